/* test_report.c: cw-report on the folders of real runs, and on folders that are none; what it
 * serves. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon.h"
#include "tests/support/html_check.h"
#include "tests/support/report_server.h"
#include "tests/support/support.h"

#include <fcntl.h>
#include <sys/stat.h>

#define LIMIT_MS 120000

// A run of three steps with evaluations, costs and logged text; its folder.
static const char *train(const char *folder)
{
    struct daemon daemon = {0};
    const char *run = test_path(folder, "run"), *data = test_path(folder, "data.jsonl");
    SCOPED(bytes_release) struct bytes lines = BYTES_INIT;
    for (int a = 0; a < 12; a++)
        bytes_printf(&lines, "{\"prompt\": \"%d<%d=\", \"answer\": \"%d\"}\n", a, a + 3, a);
    test_write(data, lines.data, lines.len);
    daemon_start(&daemon, daemon_model(folder, true, 5), NULL);
    const char *const *more =
        args("--eval-data %s --reward exact,length --length-target 10 --prompts-per-step 3 "
             "--num-generations 4 --max-completion-length 12 --learning-rate 1e-3 --beta 0.01 "
             "--max-steps 3 --eval-steps 2 --log-completions --log-logprobs --cost",
             data);
    assert_exit(0, test_command(test_path(folder, "trainer.log"), LIMIT_MS,
                                daemon_trainer(&daemon, data, run, more, NULL)));
    daemon_end(&daemon);
    return run;
}

static char *report(int status, const char *run, const char *option, const char *value)
{
    return test_output(status, OPTIONS(test_binary("cw-report"), run, option, value));
}

// Every number of metrics.jsonl is on the page.
static void assert_all_there(const char *run, const char *page)
{
    const json_t *lines = json_of_lines_file(test_path(run, "metrics.jsonl"));
    json_t *metrics, *value;
    const char *key;
    size_t i;
    int keys = 0;
    json_array_foreach (lines, i, metrics)
        json_object_foreach (metrics, key, value) {
            if (!json_is_number(value) || strcmp(key, "step") == 0) continue;
            const char *part = test_text("{\"key\":\"%s\",", key);
            if (!strstr(page, part)) fail_msg("the page has no %s", key);
            keys++;
        }
    assert_true(keys > 100);
}

TEST(page_of_a_run)
{
    const char *folder = test_folder(), *run = train(folder);
    char sentence[200];
    assert_contains(report(0, run, NULL, NULL), "run/report.html\n");
    char *page = test_read(test_path(run, "report.html"));
    if (!html_check(page, sentence, sizeof sentence)) fail_msg("%s", sentence);
    assert_null(strstr(page, "http://"));
    assert_null(strstr(page, "https://"));
    assert_all_there(run, page);
    static const char *const parts[] = {
        "id=\"rollouts-0-1\"",          "id=\"rollouts-0-3\"",   "id=\"rollouts-0-0-eval\"",
        "id=\"rollouts-0-2-eval\"",     "\"cost/latency\"",      "\"trainer_logprobs\":[",
        "\"memory_mib\":{\"weights\":", "\"num_generations\":4", "\\u003c"}; // a prompt's <
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) assert_contains(page, parts[i]);
    // --out, and the same bytes again
    const char *out = test_path(folder, "elsewhere.html");
    assert_contains(report(0, run, "--out", out), "elsewhere.html\n");
    assert_string_equal(page, test_read(out));
}

TEST(several_runs_on_a_page)
{
    const char *folder = test_folder(), *out = test_path(folder, "both.html");
    static const char *const names[] = {"one", "two"};
    for (int i = 0; i < 2; i++) {
        const char *run = test_path(folder, names[i]);
        assert_ok(file_make_folders(run));
        test_write(test_path(run, "metrics.jsonl"), "{\"step\":1,\"reward\":1}\n", 22);
    }
    test_output(0, OPTIONS(test_binary("cw-report"), test_path(folder, "one"),
                           test_path(folder, "two"), "--out", out));
    char *page = test_read(out);
    assert_contains(page, "id=\"run-0\">{\"name\":\"one\"");
    assert_contains(page, "id=\"run-1\">{\"name\":\"two\"");
}

// A folder of runs stands for them, the newest first; a value that never changes is there once.
TEST(a_folder_of_runs)
{
    const char *folder = test_folder(), *out = test_path(folder, "all.html");
    static const char *const names[] = {"runs/old", "runs/real/new"};
    static const char lines[] =
        "{\"step\":1,\"reward\":0.5,\"kl\":1}\n{\"step\":2,\"reward\":0.5,\"kl\":2}\n";
    for (int i = 0; i < 2; i++) {
        const char *run = test_path(folder, names[i]);
        assert_ok(file_make_folders(run));
        test_write(test_path(run, "metrics.jsonl"), lines, strlen(lines));
    }
    const struct timespec long_ago[2] = {{.tv_sec = 1}, {.tv_sec = 1}};
    assert_int_equal(utimensat(AT_FDCWD, test_path(folder, "runs/old/metrics.jsonl"), long_ago, 0),
                     0);
    report(0, test_path(folder, "runs"), "--out", out);
    char *page = test_read(out);
    assert_contains(page, "id=\"run-0\">{\"name\":\"real/new\"");
    assert_contains(page, "id=\"run-1\">{\"name\":\"old\"");
    assert_contains(page, "{\"key\":\"reward\",\"first\":0,\"same\":0.5,\"n\":2}");
    assert_contains(page, "{\"key\":\"kl\",\"first\":0,\"values\":\"");
}

// ---- serving ------------------------------------------------------------------------------------

static struct test_child server;

static void get(int port, const char *path, const char *host, struct wire_answer *ret)
{
    const char *request = test_text("GET %s HTTP/1.0\r\nHost: %s\r\n\r\n", path, host);
    const int fd = daemon_connect_tcp(port);
    assert_true(fd >= 0);
    assert_true(daemon_send(fd, request, strlen(request)));
    assert_true(wire_read(fd, LIMIT_MS, ret));
    close(fd);
}

// A run that goes on: the page, what is new, a step's samples.
TEST(runs_are_served)
{
    const char *folder = test_folder(), *run = test_path(folder, "run");
    const char *metrics = test_path(run, "metrics.jsonl");
    static const char two[] = "{\"step\":1,\"reward\":1}\n{\"step\":2,\"reward\":2}\n";
    static const char sample[] = "{\"line\":1,\"sample\":0,\"completion\":\"x\",\"reward\":1}\n";
    struct wire_answer a;
    assert_ok(file_make_folders(test_path(run, "rollouts")));
    test_write(metrics, two, strlen(two) / 2);
    const int port = report_server_start(&server, test_path(folder, "serve.log"), run, NULL);
    get(port, "/", "localhost", &a);
    assert_int_equal(a.status, 200);
    assert_contains(bytes_text(&a.body), "id=\"live\">1</script>");
    get(port, "/data?run=0", "localhost", &a);
    assert_int_equal(int_of(a.json, "lines"), 1);
    const char *path = test_text("/data?run=0&lines=1&generation=%" JSON_INTEGER_FORMAT,
                                 int_of(a.json, "generation"));
    test_write(test_path(run, "rollouts/step-2.jsonl"), sample, strlen(sample));
    test_write(metrics, two, strlen(two));
    get(port, "/data?run=0&lines=1", "localhost", &a); // a page of a server that was here before
    assert_int_equal(int_of(a.json, "from"), 0);
    get(port, path, "localhost", &a);
    assert_int_equal(int_of(a.json, "from"), 1);
    assert_int_equal(int_of(a.json, "lines"), 2);
    assert_contains(bytes_text(&a.body), "\"row\":\"AAAAAA==\"");
    get(port, "/rollouts?run=0&step=2", "localhost", &a);
    assert_string_equal(bytes_text(&a.body), sample);
    const json_t *refused = test_rows("report", "runs_are_served");
    for (size_t i = 0; i < json_array_size(refused); i++) {
        get(port, row_text(refused, i, "path"), row_text(refused, i, "host"), &a);
        assert_int_equal(a.status, row_int(refused, i, "status"));
        assert_contains(bytes_text(&a.body), row_text(refused, i, "part"));
    }
    report_server_stop(&server);
}

// Of a folder of runs the page shows the newest, and has the others.
TEST(the_newest_run_is_shown)
{
    const char *folder = test_folder(), *runs = test_path(folder, "runs");
    struct wire_answer a;
    for (int i = 0; i < 2; i++) {
        const char *run = test_path(runs, i ? "b" : "a");
        assert_ok(file_make_folders(run));
        test_write(test_path(run, "metrics.jsonl"), "{\"step\":1,\"reward\":1}\n", 22);
    }
    const int port = report_server_start(&server, test_path(folder, "serve.log"), runs, NULL);
    get(port, "/", "localhost", &a);
    assert_contains(bytes_text(&a.body), "data-shown=\"1\" id=\"live\">2</script>");
    report_server_stop(&server);
    // two that were named are both meant
    const int both = report_server_start(&server, test_path(folder, "both.log"),
                                         test_path(runs, "a"), test_path(runs, "b"));
    get(both, "/", "localhost", &a);
    assert_contains(bytes_text(&a.body), "data-shown=\"2\" id=\"live\">2</script>");
    report_server_stop(&server);
}

// ---- errors -------------------------------------------------------------------------------------

TEST(errors_are_clear)
{
    const char *folder = test_folder(), *program = test_binary("cw-report");
    assert_contains(report(1, folder, NULL, NULL), "there is no metrics.jsonl in it");
    assert_contains(report(1, test_path(folder, "missing"), NULL, NULL), "missing");
    assert_contains(report(2, NULL, NULL, NULL), "RUN is missing");
    assert_contains(report(2, folder, "--colour", "red"), "--colour");
    test_write(test_path(folder, "metrics.jsonl"), "{\"step\":1,\"reward\":1}\n", 22);
    assert_contains(report(1, folder, "--out", test_path(folder, "no/such/folder.html")),
                    "no/such");
    assert_contains(report(2, folder, "--listen", "127.0.0.1:0"), "--listen is for --serve");
    assert_contains(test_output(1, args("%s %s --serve --listen 0.0.0.0:0", program, folder)),
                    "is open to other machines");
    assert_contains(test_output(2, args("%s %s --serve --out x.html", program, folder)),
                    "--serve writes no page: leave --out out");
    // what the system does not give is said, not died of
    const char *few = test_text("exec 3>&- 4>&- 5>&- 6>&- 7>&-; ulimit -n 7; exec %s %s --serve "
                                "--listen 127.0.0.1:0",
                                program, folder);
    assert_contains(test_output(1, args("sh -c %s", few)), "no event loop: ");
    const char *small =
        test_text("ulimit -f 16; exec %s %s --out %s/x.html", program, folder, folder);
    assert_contains(test_output(1, args("sh -c %s", small)), "File too large");
    assert_false(file_exists(test_path(folder, "report.html")));
}
