/* test_warnings.c: what a run says of its adapter: one that PEFT opens otherwise than this server.
 */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "tests/support/tiny_adapter.h"
#include "trainer/run/warnings.h"
#include <fcntl.h>

// What warn_adapter() logs of an adapter of a model of tests/golden; the caller frees it.
static char *warn_of(const char *model, const char *targets)
{
    const char *log = test_path(test_folder(), "log");
    char config[256];
    snprintf(config, sizeof config, "{\"r\":2,\"target_modules\":%s}", targets);
    struct reference *r = reference_of(test_golden(model));
    struct adapter *a = tiny_adapter_new(r->dev, r->weights, config);
    const int file = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600), saved = dup(STDERR_FILENO);
    assert_true(file >= 0 && saved >= 0 && dup2(file, STDERR_FILENO) >= 0);
    warn_adapter(a);
    dup2(saved, STDERR_FILENO);
    close(saved);
    close(file);
    adapter_free(a);
    return test_read(log);
}

TEST_EACH(adapters_that_peft_takes_otherwise, "warnings")
{
    char *text = test_keep(warn_of(row_text(cases, i, "model"), row_text(cases, i, "targets")));
    if (row_flag(cases, i, "said"))
        assert_contains(text, "but PEFT on transformers 5 reads gate_proj, up_proj and");
    else
        assert_string_equal(text, "");
}
