/* test_tinker_sdk.c: the Tinker SDK, where there is one, against a real cw-trainer serve:
 * tests/clients/tinker_sdk.py says what it does. $COMMONWEIGHT_TINKER_PYTHONS names Pythons, with
 * colons between them, each with a version of the SDK; else it is the one of the other tests. */
#include "tests/support/tinker_client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static struct daemon d;
static struct tinker_server s;

// With servers of its own for each version: older SDKs do not tell when they end, and keep the
// weights from the next client until they were not heard of for long enough.
static void each_version(const char *const more[], const char *check)
{
    const char *list = getenv("COMMONWEIGHT_TINKER_PYTHONS");
    char *names = strdup(list && *list ? list : test_python("tinker")), *remaining = NULL;
    int n = 0;
    for (char *name = strtok_r(names, ":", &remaining); name;
         name = strtok_r(NULL, ":", &remaining)) {
        if (strchr(name, '/') && access(name, X_OK) != 0) {
            print_message("%s is not there: that version of the SDK is left out\n", name);
            continue;
        }
        daemon_start(&d, daemon_model(test_folder(), true, 7),
                     OPTIONS("--exact", "--dtype", daemon_exact_dtype()));
        tinker_server_start(&s, &d, NULL, more);
        tinker_script(&s, name, "tests/clients/tinker_sdk.py", check);
        assert_int_equal(tinker_server_stop(&s), 0);
        assert_int_equal(daemon_stop(&d), 0);
        n++;
    }
    free(names);
    if (n == 0) test_skip("$COMMONWEIGHT_TINKER_PYTHONS (%s) names no Python that is there", list);
}

// All of it within 1,024 files a process.
static void test_sdk(void **state)
{
    (void)state;
    const struct rlimit files = {1024, 1024};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &files), 0);
    each_version(OPTIONS("--exact"), NULL);
}

static void test_key(void **state)
{
    (void)state;
    static const char key[] = "tml-key-of-this-test\n";
    const char *file = test_path(test_folder(), "key");
    test_write(file, key, strlen(key));
    setenv("TINKER_API_KEY", "tml-key-of-this-test", 1);
    each_version(OPTIONS("--exact", "--api-key-file", file), "key");
    unsetenv("TINKER_API_KEY");
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
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
