/* peft.c: see peft.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/peft.h"
#include "tests/support/support.h"

const char *peft_python(void)
{
    return test_python("torch, transformers, peft");
}

void peft_agrees(const char *python, const char *model, const char *adapter, const int32_t *ids,
                 int n, const float *logits, int vocab)
{
    enum { MOST = 32 };
    const char *out = test_path(adapter, "logits"), *log = test_path(adapter, "peft.log");
    char numbers[MOST][16];
    const char *argv[MOST + 6] = {python, test_path(test_root(), "tests/clients/peft_logits.py"),
                                  model, adapter, out};
    assert_true(n <= MOST);
    for (int i = 0; i < n; i++) {
        snprintf(numbers[i], sizeof numbers[i], "%d", ids[i]);
        argv[5 + i] = numbers[i];
    }
    if (test_command(log, 120000, argv) != 0) {
        char *text = test_read(log);
        print_message("%s\n", text);
        fail_msg("the script failed");
    }
    char *bytes = test_read(out);
    const float *want = (const float *)(const void *)bytes;
    double most = 0, worst = 0;
    for (int i = 0; i < n * vocab; i++) {
        most = fmax(most, fabs((double)want[i]));
        worst = fmax(worst, fabs((double)want[i] - logits[i]));
    }
    print_message("logits differ by %.2g of the largest\n", worst / most);
    assert_true(worst / most <= 1e-5);
}
