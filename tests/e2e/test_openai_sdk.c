/* test_openai_sdk.c: OpenAI's SDK for Python, where there is one, against a real cw-infer-server on
 * a TCP port: tests/clients/openai_sdk.py says what it does. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon.h"

static struct daemon d;

TEST(test_openai_sdk)
{
    const char *python = test_python("openai");
    daemon_start(&d, daemon_model(test_folder(), true, 7), args("--listen 127.0.0.1:0"));
    daemon_client(&d, python, "tests/clients/openai_sdk.py", "model");
    assert_int_equal(daemon_stop(&d), 0);
}
