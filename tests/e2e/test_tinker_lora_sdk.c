/* test_tinker_lora_sdk.c: the Tinker SDK, where there is one, with adapters against a real
 * cw-trainer serve: tests/clients/tinker_lora.py says what it does. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_client.h"

static void run_script(const char *python)
{
    tinker_pair_start(
        NULL, args("--exact --dtype %s --max-adapters 32 --max-lora-rank 8", daemon_exact_dtype()),
        args("--exact"));
    tinker_script(python, "tests/clients/tinker_lora.py", NULL);
    tinker_pair_stop();
}

TEST(test_sdk)
{
    tinker_each_python(run_script);
}
