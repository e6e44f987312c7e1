/* main.c: cw-report, a run's folder as one HTML page. One thread. */
#include "common/base/file.h"
#include "common/base/program.h"
#include "tools/report/page.h"

#include <stdio.h>

struct report {
    const char *folder, *out;
};
#define OPTIONS_OF struct report
static const struct option_spec table[] = {
    OPT_TEXT("out", out, NULL, "FILE.html", "where to write the page; else RUN/report.html"),
    OPT_END,
};

static enum status check(void *context, struct option_set *set)
{
    const struct report *r = context;
    (void)set;
    if (r->folder) return ST_OK;
    return status_fail(ST_INVALID, "RUN is missing: the folder that cw-trainer train wrote (--help "
                                   "says more)");
}

static enum status write_report(void *context)
{
    const struct report *r = context;
    enum status st;
    struct run_folder run = {0};
    struct bytes page = BYTES_INIT;
    char path[PATH_ROOM];
    CHECK(path_put(path, r->folder, "report.html"));
    CHECK(run_folder_read(r->folder, &run));
    CHECK(page_draw(&run, &page));
    CHECK(file_write_atomic(r->out ? r->out : path, 0644, page.data, page.len));
    if (printf("%s\n", r->out ? r->out : path) < 0 || fflush(stdout) != 0)
        FAIL(ST_IO, "standard output: %m");
out:
    bytes_release(&page);
    run_folder_release(&run);
    return st;
}

int main(int argc, char **argv)
{
    struct report r = {0};
    const struct program program = {
        .name = "cw-report",
        .usage = "RUN [--out FILE.html]\n\n"
                 "Writes what a run of cw-trainer train left in its folder as one HTML page that "
                 "needs nothing\nbesides itself: curves of every metric, cluster reports, and a "
                 "few rollouts with their rewards.\nPrints the page's path.",
        .options = table,
        .config = &r,
        .word = &r.folder,
        .check = check,
        .run = write_report,
        .context = &r,
    };
    return program_main(&program, argc, argv);
}
