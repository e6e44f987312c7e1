/* test_tinker_sdk.c: the Tinker SDK, where there is one, against a real cw-trainer serve:
 * tests/clients/tinker_sdk.py says what it does. $COMMONWEIGHT_TINKER_PYTHONS names further
 * Pythons, with colons between them: those of other versions of the SDK. */
#include "tests/support/tinker_client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

static struct daemon d;
static struct tinker_server s;

static void run_script(const char *python, const char *check)
{
    tinker_script(&s, python, "tests/clients/tinker_sdk.py", check);
}

static void start(const char *const more[])
{
    const char *options[8] = {"--exact", "--dtype", daemon_exact_dtype()};
    daemon_start(&d, daemon_model(test_folder(), true, 7), options);
    tinker_server_start(&s, &d, NULL, more);
}

static void end(void)
{
    assert_int_equal(tinker_server_stop(&s), 0);
    assert_int_equal(daemon_stop(&d), 0);
}

// All of it within 1,024 files a process.
static void test_sdk(void **state)
{
    (void)state;
    const char *python = test_python("tinker");
    const struct rlimit files = {1024, 1024};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &files), 0);
    start(OPTIONS("--exact"));
    run_script(python, NULL);
    end();
}

static void test_key(void **state)
{
    (void)state;
    static const char key[] = "tml-key-of-this-test\n";
    const char *python = test_python("tinker"), *file = test_path(test_folder(), "key");
    test_write(file, key, strlen(key));
    start(OPTIONS("--api-key-file", file));
    setenv("TINKER_API_KEY", "tml-key-of-this-test", 1);
    run_script(python, "key");
    unsetenv("TINKER_API_KEY");
    end();
}

static void test_other_versions(void **state)
{
    (void)state;
    const char *list = getenv("COMMONWEIGHT_TINKER_PYTHONS");
    if (!list)
        test_skip("$COMMONWEIGHT_TINKER_PYTHONS names no Pythons with other versions of the SDK");
    char *names = strdup(list), *remaining = NULL;
    start(OPTIONS("--exact"));
    for (char *name = strtok_r(names, ":", &remaining); name;
         name = strtok_r(NULL, ":", &remaining)) {
        run_script(name, "session");
        run_script(name, "resume");
        run_script(name, "scores");
    }
    free(names);
    end();
}

static int stop(void **state)
{
    (void)state;
    tinker_server_kill(&s);
    daemon_kill(&d);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_sdk, stop),
        cmocka_unit_test_teardown(test_key, stop),
        cmocka_unit_test_teardown(test_other_versions, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
