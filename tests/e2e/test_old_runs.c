/* test_old_runs.c: run folders that a released version wrote (tests/old-runs) are gone on with, by
 * --resume alone, to the metrics that the version itself came to in one go. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

#define STEPS 6

/* Another processor may sum in another order; what was sampled and counted is the same. A loss is a
 * sum of advantages of about 1, of both signs: where they leave next to nothing, the rounding that
 * is left is that of the terms. */
#define RELATIVE 1e-5
#define OF_TERMS 0x1p-22 // two roundings of a f32 between 1 and 2

static json_t *read_lines(const char *folder)
{
    return json_of_lines_file(test_path(folder, "metrics.jsonl"));
}

static bool goes_by_the_clock(const char *key)
{
    static const char *const parts[] = {"_s",    "_ms",      "spans/",
                                        "sync/", "publish/", "weight_version"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        const char *at = strstr(key, parts[i]);
        if (at && (parts[i][0] != '_' || !at[strlen(parts[i])])) return true;
    }
    return false;
}

static void same_line(const json_t *was, const json_t *is)
{
    const char *key;
    const json_t *value;
    json_object_foreach ((json_t *)was, key, value) {
        if (goes_by_the_clock(key)) continue;
        const double a = json_number_value(value), b = metric(is, key);
        if (fabs(a - b) > RELATIVE * fabs(a) + OF_TERMS)
            fail_msg("%s of step %g: %.9g was %.9g", key, metric(is, "step"), b, a);
    }
}

static void same_lines(const char *name)
{
    const json_t *was = read_lines(test_path(test_path(test_root(), "tests/old-runs"), name));
    const json_t *is = read_lines(name);
    assert_int_equal(json_array_size(is), json_array_size(was));
    for (size_t i = 0; i < json_array_size(was); i++)
        same_line(json_array_get(was, i), json_array_get(is, i));
    assert_int_equal((int)metric(json_array_get(is, json_array_size(is) - 1), "step"), STEPS);
}

// Paths in the folders are relative, and the threads that the device's name counts are the run's.
static void open_copies(char home[PATH_MAX])
{
    const char *folder = test_folder();
    if (!on_cpu()) test_skip("the folders are of runs on the CPU");
    test_output(0, OPTIONS("cp", "-R", test_path(test_root(), "tests/old-runs/."), folder));
    assert_non_null(getcwd(home, PATH_MAX));
    assert_int_equal(chdir(folder), 0);
    setenv("OMP_NUM_THREADS", "2", 1);
}

static void goes_on(const char *command, const char *run)
{
    char *log =
        test_output(0, OPTIONS(test_binary("cw-trainer"), command, "--run-dir", run, "--resume"));
    assert_contains(log, "resumed at step 3 from ");
    assert_null(strstr(log, "with other options"));
    same_lines(run);
}

static void trained(const char *run)
{
    struct daemon d = {0};
    char home[PATH_MAX], here[PATH_MAX];
    open_copies(home);
    daemon_start(&d, test_path(getcwd(here, sizeof here), "model"),
                 args("--exact --max-adapters 2"));
    assert_int_equal(symlink(d.bridge, "bridge.json"), 0);
    goes_on("train", run);
    assert_int_equal(daemon_stop(&d), 0);
    assert_int_equal(chdir(home), 0);
}

TEST(policy)
{
    trained("train");
}

TEST(adapter)
{
    trained("train-lora");
}

TEST(examples)
{
    char home[PATH_MAX];
    open_copies(home);
    goes_on("sft", "sft");
    assert_int_equal(chdir(home), 0);
}

TEST(adapter_of_pairs)
{
    char home[PATH_MAX];
    open_copies(home);
    goes_on("dpo", "dpo-lora");
    assert_int_equal(chdir(home), 0);
}
