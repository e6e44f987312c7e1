/* main.c: cw-report, the folders of runs as one HTML page, written or served. One thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/file.h"
#include "common/base/options.h"
#include "tools/report/report.h"

#include <stdio.h>

#define RUNS_MAX 32

struct report {
    const char *folders[RUNS_MAX], *out, *listen;
    int64_t texts;
    bool serve;
};
#define OPTIONS_OF struct report
static const struct option_spec table[] = {
    OPT_TEXT("out", out, NULL, "FILE.html", "where to write the page; else RUN/report.html"),
    OPT_SIZE("texts", texts, "32M", 0, 1e12,
             "of rollouts in the page; of more, the last step and steps spread evenly are taken"),
    OPT_FLAG("serve", serve, NULL,
             "serve the page in place of writing it, with all rollouts, and with what runs that go "
             "on write"),
    OPT_TEXT("listen", listen, "127.0.0.1:8012", "HOST:PORT",
             "where, with --serve; on this machine alone"),
    OPT_END,
};

static enum status check(void *context, struct option_set *set)
{
    const struct report *r = context;
    if (!r->folders[0] && !r->serve)
        return status_fail(ST_INVALID, "RUN is missing: the folder that cw-trainer wrote "
                                       "(--help says more)");
    if (!r->serve && options_given(set, "listen"))
        return status_fail(ST_INVALID, "--listen is for --serve: give that too");
    if (r->serve && (r->out || options_given(set, "texts")))
        return status_fail(ST_INVALID, "--serve writes no page: leave --%s out",
                           r->out ? "out" : "texts");
    return ST_OK;
}

static enum status write_page(const struct report *r, struct run_folder *runs, int n)
{
    enum status st = ST_OK;
    struct bytes page = BYTES_INIT;
    char path[PATH_ROOM];
    CHECK(path_put(path, r->folders[0], "report.html"));
    for (int i = 0; i < n; i++) CHECK(run_folder_refresh(&runs[i], -1));
    CHECK(page_put(runs, n, r->texts, &page));
    CHECK(file_write_atomic(r->out ? r->out : path, 0644, page.data, page.len));
    if (printf("%s\n", r->out ? r->out : path) < 0 || fflush(stdout) != 0)
        FAIL(ST_IO, "standard output: %m");
out:
    bytes_release(&page);
    return st;
}

static enum status report(void *context)
{
    const struct report *r = context;
    static const char *const usual[RUNS_MAX] = {"runs"};
    const char *const *folders = r->folders[0] ? r->folders : usual;
    struct run_folder runs[RUNS_MAX] = {0};
    enum status st;
    int n = 0;
    CHECK(runs_open(folders, RUNS_MAX, runs, &n));
    // of a folder of runs the newest is what one wants to see
    st = r->serve ? report_serve(r->listen, runs, n, folders[1] ? n : 1) : write_page(r, runs, n);
out:
    for (int i = 0; i < n; i++) run_folder_release(&runs[i]);
    return st;
}

int main(int argc, char **argv)
{
    struct report r = {0};
    const struct program program = {
        .name = "cw-report",
        .usage =
            "RUN... [--out FILE.html], or [RUN...] --serve\n\n"
            "Writes what runs of cw-trainer left in their folders as one HTML page that "
            "needs nothing\nbesides itself: curves of every metric, of several runs beside "
            "each other, where each step's time\nwent, cluster reports, and the rollouts. "
            "Prints the page's path.\nA folder that holds runs stands for all of them: served, the "
            "newest is shown first (--serve alone: of runs/).",
        .options = table,
        .config = &r,
        .word = r.folders,
        .max_words = RUNS_MAX,
        .check = check,
        .run = report,
        .context = &r,
    };
    return program_main(&program, argc, argv);
}
