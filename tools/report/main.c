/* main.c: cw-report, a run's folder as one HTML page. One thread. */
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "tools/report/page.h"

#include <stdio.h>
#include <stdlib.h>

struct config {
    const char *out;
};
#define OPTIONS_OF struct config
static const struct option_spec table[] = {
    OPT_TEXT("out", out, NULL, "FILE.html", "where to write the page; else RUN/report.html"),
    OPT_END,
};

static enum status report(const char *folder, const char *out)
{
    enum status st;
    struct run_folder run = {0};
    struct bytes page = BYTES_INIT;
    char *path = NULL;
    CHECK(run_folder_read(folder, &run));
    CHECK(page_draw(&run, &page));
    if (!out && !(path = path_join(folder, "report.html")))
        FAIL(ST_NO_MEMORY, "no memory for the report's name");
    CHECK(file_write_atomic(out ? out : path, 0644, page.data, page.len));
    printf("%s\n", out ? out : path);
out:
    free(path);
    bytes_release(&page);
    run_folder_release(&run);
    return st;
}

int main(int argc, char **argv)
{
    static const char usage[] =
        "RUN [--out FILE.html]\n\n"
        "Writes what a run of cw-trainer train left in its folder as one HTML page that needs "
        "nothing\nbesides itself: curves of every metric, cluster reports, and a few rollouts with "
        "their rewards.\nPrints the page's path.";
    struct config config = {0};
    struct option_set *options = NULL;
    const char *folder = NULL;
    int exit_status = 0;
    log_open("cw-report", LOG_INFO);
    enum option_result parsed =
        options_parse(table, "cw-report", usage, argc, argv, 1, &config, &folder, &options);
    if (parsed == OPTIONS_DONE) goto out;
    if (parsed == OPTIONS_BAD) {
        log_error("%s", status_message());
        exit_status = 2;
    } else if (!folder) {
        log_error("RUN is missing: the folder that cw-trainer train wrote (--help says more)");
        exit_status = 2;
    } else if (report(folder, config.out) != ST_OK || fflush(stdout) != 0) {
        log_error("%s", status_message());
        exit_status = 1;
    }
out:
    options_free(options);
    return exit_status;
}
