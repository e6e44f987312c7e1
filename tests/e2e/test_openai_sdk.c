/* test_openai_sdk.c: OpenAI's SDK for Python, where there is one, against a real cw-infer-server on
 * a TCP port: tests/clients/openai_sdk.py says what it does. */
#include "tests/support/daemon.h"

#include <stdio.h>
#include <stdlib.h>

static struct daemon d;

static void test_openai_sdk(void **state)
{
    (void)state;
    char url[64];
    const char *python = test_python("openai");
    daemon_start(&d, daemon_model(test_folder(), true, 7), OPTIONS("--listen", "127.0.0.1:0"));
    snprintf(url, sizeof url, "http://127.0.0.1:%d", daemon_tcp_port(&d));
    const char *const argv[] = {python, test_path(test_root(), "tests/clients/openai_sdk.py"), url,
                                "model", NULL};
    const char *log = test_path(d.folder, "sdk.log");
    if (test_command(log, 120000, argv) != 0) {
        char *text = test_read(log);
        print_message("%s\n", text);
        free(text);
        fail_msg("the script failed");
    }
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
