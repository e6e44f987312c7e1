/* test_report.c: cw-report on the folder of a real run, and on folders that are none. */
#include "common/base/file.h"
#include "common/base/json.h"
#include "tests/support/daemon.h"
#include "tests/support/html_check.h"
#include "tests/support/support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIMIT_MS 120000

// A run of three steps with evaluations, costs and logged text; its folder.
static const char *train(const char *folder)
{
    struct daemon daemon = {0};
    const char *run = test_path(folder, "run"), *data = test_path(folder, "data.jsonl");
    struct bytes lines = BYTES_INIT;
    for (int a = 0; a < 12; a++)
        bytes_printf(&lines, "{\"prompt\": \"%d<%d=\", \"answer\": \"%d\"}\n", a, a + 3, a);
    test_write(data, lines.data, lines.len);
    bytes_release(&lines);
    daemon_start(&daemon, daemon_model(folder, true, 5), NULL);
    const char *argv[TRAINER_WORDS];
    daemon_trainer(&daemon, data, run,
                   OPTIONS("--eval-data", data, "--reward", "exact,length", "--length-target", "10",
                           "--prompts-per-step", "3", "--num-generations", "4",
                           "--max-completion-length", "12", "--learning-rate", "1e-3", "--beta",
                           "0.01", "--max-steps", "3", "--eval-steps", "2", "--log-completions",
                           "--cost"),
                   NULL, argv);
    assert_int_equal(test_command(test_path(folder, "trainer.log"), LIMIT_MS, argv), 0);
    assert_int_equal(daemon_stop(&daemon), 0);
    daemon_kill(&daemon);
    return run;
}

static int report(const char *folder, const char *run, const char *option, const char *value)
{
    const char *const argv[] = {test_binary("cw-report"), run, option, value, NULL};
    return test_command(test_path(folder, "report.log"), LIMIT_MS, argv);
}

// Every number of metrics.jsonl has its line in a chart.
static void assert_all_charted(const char *run, const char *page)
{
    char *text = test_read(test_path(run, "metrics.jsonl"));
    int keys = 0;
    for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
        json_t *metrics, *value;
        const char *key;
        assert_ok(json_parse("metrics.jsonl", line, (size_t)(end - line), &metrics));
        json_object_foreach (metrics, key, value) {
            char part[128];
            if (!json_is_number(value) || strcmp(key, "step") == 0) continue;
            snprintf(part, sizeof part, "data-metric=\"%s\"", key);
            if (!strstr(page, part)) fail_msg("no chart has %s", key);
            keys++;
        }
        json_decref(metrics);
    }
    free(text);
    assert_true(keys > 100);
}

static void page_of_a_run(void **state)
{
    (void)state;
    const char *folder = test_folder(), *run = train(folder);
    char sentence[200];
    assert_int_equal(report(folder, run, NULL, NULL), 0);
    char *page = test_read(test_path(run, "report.html"));
    if (!html_check(page, sentence, sizeof sentence)) fail_msg("%s", sentence);
    assert_null(strstr(page, "http://"));
    assert_null(strstr(page, "https://"));
    assert_all_charted(run, page);
    static const char *const parts[] = {"<h2>Reward</h2>",
                                        "Accuracy",
                                        "&lt;",
                                        "Step 1 ",
                                        "Step 3 ",
                                        "cost/latency",
                                        "<th>num_generations</th><td>4</td>"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) assert_contains(page, parts[i]);
    // --out, and the same bytes again
    const char *out = test_path(folder, "elsewhere.html");
    assert_int_equal(report(folder, run, "--out", out), 0);
    char *again = test_read(out);
    assert_string_equal(page, again);
    char *log = test_read(test_path(folder, "report.log"));
    assert_contains(log, "run/report.html\n");
    assert_contains(log, "elsewhere.html\n");
    free(log);
    free(again);
    free(page);
}

static void errors_are_clear(void **state)
{
    (void)state;
    const char *folder = test_folder();
    assert_int_equal(report(folder, folder, NULL, NULL), 1); // no run
    assert_int_equal(report(folder, test_path(folder, "missing"), NULL, NULL), 1);
    assert_int_equal(report(folder, NULL, NULL, NULL), 2);
    assert_int_equal(report(folder, folder, "--colour", "red"), 2);
    test_write(test_path(folder, "metrics.jsonl"), "{\"step\":1,\"reward\":1}\n", 22);
    assert_int_equal(report(folder, folder, "--out", test_path(folder, "no/such/folder.html")), 1);
    char *log = test_read(test_path(folder, "report.log"));
    assert_contains(log, "there is no metrics.jsonl in it");
    assert_contains(log, "missing");
    assert_contains(log, "RUN is missing");
    assert_contains(log, "--colour");
    assert_contains(log, "no/such");
    free(log);
    assert_false(file_exists(test_path(folder, "report.html")));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(page_of_a_run),
        cmocka_unit_test(errors_are_clear),
    };
    return cmocka_run_group_tests_name("report", tests, NULL, NULL);
}
