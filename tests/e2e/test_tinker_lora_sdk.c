/* test_tinker_lora_sdk.c: the Tinker SDK, where there is one, with adapters against a real
 * cw-trainer serve: tests/clients/tinker_lora.py says what it does. */
#include "tests/support/tinker_client.h"

static struct daemon d;
static struct tinker_server s;

static int stop(void **state)
{
    (void)state;
    tinker_server_kill(&s);
    daemon_kill(&d);
    return 0;
}

static void run_script(const char *python)
{
    daemon_start(&d, daemon_model(test_folder(), true, 7),
                 OPTIONS("--exact", "--dtype", daemon_exact_dtype(), "--max-adapters", "32",
                         "--max-lora-rank", "8"));
    tinker_server_start(&s, &d, NULL, OPTIONS("--exact"));
    tinker_script(&s, python, "tests/clients/tinker_lora.py", NULL);
    assert_int_equal(tinker_server_stop(&s), 0);
    assert_int_equal(daemon_stop(&d), 0);
}

static void test_sdk(void **state)
{
    (void)state;
    tinker_each_python(run_script);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_sdk, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
