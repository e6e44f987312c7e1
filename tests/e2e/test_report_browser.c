/* test_report_browser.c: cw-report on a run of 10,000 steps and 100,000 samples: within bounds of
 * memory and size; and its page, written and served, in a real browser where there is one. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/html_check.h"
#include "tests/support/long_run.h"
#include "tests/support/report_server.h"

#include <sys/resource.h>
#include <sys/stat.h>

#define LIMIT_MS 300000
#define MIB      ((int64_t)1 << 20)

static const char *folder;
static struct test_child server;

static void make_runs(void)
{
    const struct long_run shorter = {
        .first = 1, .last = 200, .keys = 20, .samples = 5, .words = 24, .with_tokens = true};
    folder = test_folder();
    long_run_write(test_path(folder, "long"), &(struct long_run){.first = 1,
                                                                 .last = 10000,
                                                                 .keys = 60,
                                                                 .samples = 10,
                                                                 .words = 24,
                                                                 .with_tokens = true});
    long_run_write(test_path(folder, "a"), &shorter);
    long_run_write(test_path(folder, "b"), &shorter);
    test_write(test_path(folder, "a/config.json"), "{\"seed\":1}", 10);
}

TEST(long_runs_are_bounded)
{
    const char *page = test_path(folder, "long.html");
    struct rusage used;
    struct stat info;
    test_output(0, args("%s %s --texts 8M --out %s", test_binary("cw-report"),
                        test_path(folder, "long"), page));
    assert_int_equal(stat(page, &info), 0);
    // 64 numbers a step, 29 bytes a sample; in base64; the texts; the rest
    const int64_t numbers = 10000 * 64 * 4 + 100000 * 29;
    assert_true(info.st_size > numbers);
    assert_true(info.st_size < numbers * 4 / 3 + 9 * MIB);
    assert_int_equal(getrusage(RUSAGE_CHILDREN, &used), 0);
#ifndef __SANITIZE_ADDRESS__
    assert_true(used.ru_maxrss * 1024 < 160 * MIB);
#endif
    char *text = test_read(page), sentence[200];
    if (!html_check(text, sentence, sizeof sentence)) fail_msg("%s", sentence);
}

TEST(in_a_browser)
{
    const char *python = test_python("playwright"), *log = test_path(folder, "browser.log");
    const char *url =
        test_text("http://127.0.0.1:%d/",
                  report_server_start(&server, test_path(folder, "serve.log"),
                                      test_path(folder, "a"), test_path(folder, "b")));
    const char *const *argv =
        OPTIONS(python, test_path(test_root(), "tests/clients/report_page.py"),
                test_path(folder, "long.html"), url, test_path(folder, "a"));
    const int status = test_command(log, LIMIT_MS, argv);
    char *text = test_read(log);
    if (status == 77) test_skip("%s", text);
    print_message("%s", text);
    assert_int_equal(status, 0);
    report_server_stop(&server);
}

TESTS_BETWEEN(make_runs, NULL)
