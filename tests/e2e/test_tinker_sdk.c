/* test_tinker_sdk.c: the Tinker SDK, where there is one, against a real cw-trainer serve:
 * tests/clients/tinker_sdk.py says what it does, and tinker_lora.py with adapters; and the
 * notebook in python/. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/rank_group.h"
#include "tests/support/tinker_client.h"

#include <sys/resource.h>

// With servers of its own for each version: older SDKs do not tell when they end, and keep the
// weights from the next client until they were not heard of for long enough.
static void run_check(const char *python, const char *const more[], const char *check)
{
    tinker_pair_start(NULL, args("--exact --dtype %s", daemon_exact_dtype()), more);
    tinker_script(python, "tests/clients/tinker_sdk.py", check);
    tinker_pair_stop();
}

static void run_all(const char *python)
{
    run_check(python, args("--exact"), NULL);
}

// All of it within 1,024 files a process.
TEST(test_sdk)
{
    const struct rlimit files = {1024, 1024};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &files), 0);
    tinker_each_python(run_all);
}

static void run_adapters(const char *python)
{
    tinker_pair_start(
        NULL, args("--exact --dtype %s --max-adapters 32 --max-lora-rank 8", daemon_exact_dtype()),
        args("--exact"));
    tinker_script(python, "tests/clients/tinker_lora.py", NULL);
    tinker_pair_stop();
}

TEST(test_adapters)
{
    tinker_each_python(run_adapters);
}

static void run_key(const char *python)
{
    static const char key[] = "tml-key-of-this-test\n";
    const char *file = test_path(test_folder(), "key");
    test_write(file, key, strlen(key));
    setenv("TINKER_API_KEY", "tml-key-of-this-test", 1);
    run_check(python, args("--exact --api-key-file %s", file), "key");
    unsetenv("TINKER_API_KEY");
}

TEST(test_key)
{
    tinker_each_python(run_key);
}

// The notebook's cells, on the demo's model and sums, with servers that it starts.
static void run_notebook(const char *python)
{
    const char *folder = test_folder(), *log = test_path(folder, "log"), *root = test_root();
    char text[4 * PATH_MAX], *bin = strdup(test_binary("cw-trainer"));
    *strrchr(bin, '/') = '\0';
    snprintf(text, sizeof text,
             "PATH='%s':\"$PATH\" PYTHONPATH='%s/python' TINKER_TELEMETRY=0 "
             "SETTINGS='{\"model\": \"%s/tools/demo-model\", \"data\": \"%s\", \"chat\": false, "
             "\"url\": \"127.0.0.1:%d\", \"steps\": 6, \"max_tokens\": 5, "
             "\"learning_rate\": 1e-4}' '%s' '%s/tests/clients/notebook.py' "
             "'%s/python/tinker.ipynb' before=0.4 after=before+0.05",
             bin, root, root, folder, test_free_port(), python, root, root);
    assert_exit(0, test_command(log, 60000, OPTIONS(test_path(root, "tools/demo-data"), folder)));
    unlink(log);
    if (test_command(log, 180000, args("bash -c %s", text)) != 0) fail_msg("%s", test_read(log));
    assert_contains(test_read(log), "notebook: PASS");
    free(bin);
}

TEST(test_notebook)
{
    tinker_each_python(run_notebook);
}
