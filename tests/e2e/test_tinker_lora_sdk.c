/* test_tinker_lora_sdk.c: the Tinker SDK, where there is one, with adapters against a real
 * cw-trainer serve: tests/clients/tinker_lora.py says what it does. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_pair.h"

static struct tinker_pair pair;

static void run_script(const char *python)
{
    tinker_pair_start(&pair, NULL,
                      OPTIONS("--exact", "--dtype", daemon_exact_dtype(), "--max-adapters", "32",
                              "--max-lora-rank", "8"),
                      OPTIONS("--exact"));
    tinker_script(&pair.server, python, "tests/clients/tinker_lora.py", NULL);
    tinker_pair_stop(&pair);
}

TEST(test_sdk)
{
    tinker_each_python(run_script);
}
