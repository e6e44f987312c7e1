/* test_tinker_lora_sdk.c: the Tinker SDK, where there is one, with adapters against a real
 * cw-trainer serve: tests/clients/tinker_lora.py says what it does.
 * $COMMONWEIGHT_TINKER_PYTHONS names further Pythons, with colons between them: those of other
 * versions of the SDK. */
#include "tests/support/tinker_client.h"

#include <stdlib.h>
#include <string.h>

static struct daemon d;
static struct tinker_server s;

static void start(void)
{
    daemon_start(&d, daemon_model(test_folder(), true, 7),
                 OPTIONS("--exact", "--dtype", daemon_exact_dtype(), "--max-adapters", "32",
                         "--max-lora-rank", "8"));
    tinker_server_start(&s, &d, NULL, OPTIONS("--exact"));
}

static int stop(void **state)
{
    (void)state;
    tinker_server_kill(&s);
    daemon_kill(&d);
    return 0;
}

static void run_script(const char *python)
{
    tinker_script(&s, python, "tests/clients/tinker_lora.py", NULL);
}

static void test_sdk(void **state)
{
    (void)state;
    const char *python = test_python("tinker");
    start();
    run_script(python);
}

static void test_other_versions(void **state)
{
    (void)state;
    const char *list = getenv("COMMONWEIGHT_TINKER_PYTHONS");
    if (!list)
        test_skip("$COMMONWEIGHT_TINKER_PYTHONS names no Pythons with other versions of the SDK");
    char *names = strdup(list), *remaining = NULL;
    start();
    for (char *name = strtok_r(names, ":", &remaining); name;
         name = strtok_r(NULL, ":", &remaining))
        run_script(name);
    free(names);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_sdk, stop),
        cmocka_unit_test_teardown(test_other_versions, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
