/* test_openai_sdk.c: OpenAI's SDK for Python, where there is one, against a real cw-infer-server on
 * a TCP port: tests/clients/openai_sdk.py says what it does. */
#include "tests/support/daemon.h"

static struct daemon d;

static void test_openai_sdk(void **state)
{
    (void)state;
    const char *python = test_python("openai");
    daemon_start(&d, daemon_model(test_folder(), true, 7), OPTIONS("--listen", "127.0.0.1:0"));
    daemon_client(&d, python, "tests/clients/openai_sdk.py", "model");
    assert_int_equal(daemon_stop(&d), 0);
}

static int stop(void **state)
{
    (void)state;
    daemon_kill(&d);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test_teardown(test_openai_sdk, stop)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
