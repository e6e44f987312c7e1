/* test_tinker_sdk.c: the Tinker SDK, where there is one, against a real cw-trainer serve:
 * tests/clients/tinker_sdk.py says what it does. */
#include "tests/support/tinker_pair.h"

#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

static struct tinker_pair pair;

// With servers of its own for each version: older SDKs do not tell when they end, and keep the
// weights from the next client until they were not heard of for long enough.
static void run(const char *python, const char *const more[], const char *check)
{
    tinker_pair_start(&pair, NULL, OPTIONS("--exact", "--dtype", daemon_exact_dtype()), more);
    tinker_script(&pair.server, python, "tests/clients/tinker_sdk.py", check);
    tinker_pair_stop(&pair);
}

static void run_all(const char *python)
{
    run(python, OPTIONS("--exact"), NULL);
}

// All of it within 1,024 files a process.
static void test_sdk(void **state)
{
    (void)state;
    const struct rlimit files = {1024, 1024};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &files), 0);
    tinker_each_python(run_all);
}

static void run_key(const char *python)
{
    static const char key[] = "tml-key-of-this-test\n";
    const char *file = test_path(test_folder(), "key");
    test_write(file, key, strlen(key));
    setenv("TINKER_API_KEY", "tml-key-of-this-test", 1);
    run(python, OPTIONS("--exact", "--api-key-file", file), "key");
    unsetenv("TINKER_API_KEY");
}

static void test_key(void **state)
{
    (void)state;
    tinker_each_python(run_key);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TINKER_TEST(test_sdk, &pair),
        TINKER_TEST(test_key, &pair),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
