/* test_bits.c: the forward pass has the same bits under every compiler, every instruction set with
 * FMA and any number of threads: a digest of each model of tests/golden's logits stands in
 * tests/golden/bits.txt. `make golden-bits` writes that table anew, for when the models or the
 * order of sums have changed on purpose. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/hash.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"

#include <dirent.h>
#include <omp.h>

enum { ROWS = 41, DIGEST = 16 }; // no multiple of a register's floats

// Of the logits of ROWS tokens.
static void digest(const char *model, char ret[DIGEST + 1])
{
    SCOPED(reference_close) struct reference r;
    int32_t ids[ROWS];
    reference_open(model, "cpu", &r);
    const size_t n = (size_t)ROWS * (size_t)r.config->vocab_size;
    float *logits = test_keep(malloc(n * sizeof *logits));
    for (int i = 0; i < ROWS; i++) ids[i] = (i * i * 29 + i * 7 + 3) % r.config->vocab_size;
    reference_logits(&r, ids, ROWS, logits);
    hash_sha256_hex(logits, n * sizeof *logits, DIGEST / 2, ret);
}

static void one_model(void **state)
{
    const char *model = *state, *name = strrchr(model, '/') + 1;
    char have[DIGEST + 1], alone[DIGEST + 1], line[256];
    const int threads = omp_get_max_threads();
    digest(model, have);
    omp_set_num_threads(threads == 1 ? 3 : 1);
    digest(model, alone);
    omp_set_num_threads(threads);
    assert_string_equal(have, alone);
#if !defined(__FMA__) && !defined(__aarch64__)
    test_skip(
        "built for a processor without FMA: its bits are its own (docs/internals/numerics.md)");
#endif
    snprintf(line, sizeof line, "%s %s\n", name, have);
    char *table = test_read(test_path(test_root(), "tests/golden/bits.txt"));
    if (!strstr(table, line))
        fail_msg("bits.txt has no line \"%s %s\"; `make golden-bits` writes it anew", name, have);
}

int main(int argc, char **argv)
{
    static struct dirent **list; // to the end: the tests' names are in it
    const bool print = argc > 1 && strcmp(argv[1], "--print") == 0;
    const char *root = test_path(test_root(), "tests/golden");
    const int n = scandir(root, &list, NULL, alphasort);
    for (int i = 0; i < n; i++) {
        char text[DIGEST + 1];
        if (!file_exists(test_path(test_path(root, list[i]->d_name), "config.json"))) continue;
        const char *model = test_golden(list[i]->d_name);
        test_list(0, (struct CMUnitTest){list[i]->d_name, one_model, NULL, NULL, (void *)model});
        if (!print) continue;
        digest(model, text);
        printf("%s %s\n", list[i]->d_name, text);
    }
    return print ? 0 : test_main();
}
