/* run_folder.c: finds the files of a run, and reads on; and which runs the folders mean that were
 * named: runs, or folders that runs lie in.
 *
 * A step's samples are written before its line of metrics.jsonl, whole, and never again but by a
 * run that is resumed, which begins by replacing metrics.jsonl: so a step's file is read once its
 * line is there, and all are read again when the metrics are another file. */
// SPDX-License-Identifier: Apache-2.0
#include "tools/report/report.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/log.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define CONFIG_MAX    (1 << 20)
#define REPORT_PREFIX "cluster-report-epoch-"
#define REPORT_SUFFIX ".txt"

static void reports_release(struct run_folder *run)
{
    for (int i = 0; i < run->n_reports; i++) free(run->reports[i].path);
    free(run->reports);
    run->reports = NULL;
    run->n_reports = 0;
}

// A file of the run, which may be served to others: no link leads to one of another folder.
static enum status check_inside(const struct run_folder *run, const char *path)
{
    char *real = realpath(path, NULL);
    const size_t n = strlen(run->real);
    const bool inside = !real || (strncmp(real, run->real, n) == 0 && real[n] == '/');
    free(real);
    return inside
               ? ST_OK
               : status_fail(ST_MISMATCH, "%s is a link that leads out of the run's folder", path);
}

// By epoch.
static enum status list_reports(struct run_folder *run)
{
    enum status st = ST_OK;
    json_t *names = json_folder(run->path), *entry;
    size_t i;
    if (!names) return status_fail(ST_IO, "%s: %s", run->path, strerror(errno));
    reports_release(run);
    json_array_foreach (names, i, entry) {
        const char *name = json_string_value(entry), *digits = name + strlen(REPORT_PREFIX);
        char *end;
        if (strncmp(name, REPORT_PREFIX, strlen(REPORT_PREFIX)) != 0) continue;
        const long long epoch = strtoll(digits, &end, 10);
        if (end == digits || epoch < 0 || strcmp(end, REPORT_SUFFIX) != 0) continue;
        struct cluster_report *grown =
            array_room(run->reports, (size_t)run->n_reports, sizeof *grown);
        if (grown) run->reports = grown;
        char file[PATH_ROOM];
        CHECK(path_put(file, run->path, "%s", name));
        char *path = grown ? strdup(file) : NULL;
        if (!path) FAIL(ST_NO_MEMORY, "no memory for the names of %s", run->path);
        run->reports[run->n_reports++] = (struct cluster_report){epoch, path};
        CHECK(check_inside(run, path));
    }
out:
    json_decref(names);
    return st;
}

// The last part of the path that is no "." or "/".
static char *own_name(const char *path)
{
    char *resolved = realpath(path, NULL);
    const char *slash = resolved ? strrchr(resolved, '/') : NULL;
    char *name = strdup(slash && slash[1] ? slash + 1 : path);
    free(resolved);
    return name;
}

static enum status read_metrics(struct run_folder *run)
{
    enum status st;
    struct stat info;
    bool anew = false;
    char path[PATH_ROOM];
    const int32_t before = run->metrics.n_lines;
    CHECK(path_put(path, run->path, "metrics.jsonl"));
    if (stat(path, &info) != 0 && errno == ENOENT)
        FAIL(ST_NOT_FOUND,
             "%s: there is no metrics.jsonl in it; name the folder that cw-trainer "
             "wrote (its --run-dir)",
             run->path);
    CHECK(check_inside(run, path));
    CHECK(metrics_read(&run->metrics, path, &anew));
    run->written_s = (int64_t)info.st_mtime;
    if (anew) {
        samples_release(&run->samples);
        run->n_sampled = 0;
        run->generation++;
    }
    if (anew || run->metrics.n_lines > before) st = list_reports(run);
out:
    return st;
}

enum status run_folder_rollouts(const struct run_folder *run, int64_t step, bool held_out,
                                char ret_path[PATH_ROOM])
{
    enum status st = path_put(ret_path, run->path, "rollouts/%sstep-%" PRId64 ".jsonl",
                              held_out ? "eval-" : "", step);
    return st == ST_OK ? check_inside(run, ret_path) : st;
}

bool run_folder_is_behind(const struct run_folder *run)
{
    return run->n_sampled < run->metrics.n_lines;
}

enum status run_folder_refresh(struct run_folder *run, int ms)
{
    enum status st;
    const int64_t deadline = clock_deadline_ns(ms);
    char path[PATH_ROOM];
    CHECK(read_metrics(run));
    while (run_folder_is_behind(run) && (ms < 0 || clock_ms_until(deadline) > 0)) {
        const int32_t step = run->metrics.steps[run->n_sampled];
        for (int held_out = 0; held_out < 2; held_out++) {
            CHECK(run_folder_rollouts(run, step, held_out, path));
            if (file_exists(path)) CHECK(samples_add(&run->samples, step, held_out, path));
        }
        run->n_sampled++;
    }
out:
    return st;
}

// The last process's entry of run.json, which tools that write no such file leave out.
static enum status read_start(struct run_folder *run)
{
    char path[PATH_ROOM];
    json_t *all = NULL;
    enum status st;
    CHECK(path_put(path, run->path, "run.json"));
    CHECK(check_inside(run, path));
    if (!file_exists(path)) goto out;
    CHECK(json_read_file(path, CONFIG_MAX, &all));
    const json_t *starts = json_object_get(all, "starts");
    run->start = json_incref(json_array_get(starts, json_array_size(starts) - 1));
out:
    json_decref(all);
    return st;
}

enum status run_folder_open(const char *path, struct run_folder *ret)
{
    enum status st;
    struct run_folder run = {
        .path = strdup(path), .name = own_name(path), .real = realpath(path, NULL)};
    struct stat info;
    char config[PATH_ROOM];
    if (!run.path || !run.name) FAIL(ST_NO_MEMORY, "no memory to read %s", path);
    if (stat(path, &info) != 0)
        FAIL(errno == ENOENT ? ST_NOT_FOUND : ST_IO,
             "%s: %s; name the folder that cw-trainer wrote (its --run-dir)", path,
             strerror(errno));
    if (!S_ISDIR(info.st_mode))
        FAIL(ST_INVALID, "%s is no folder; name the one that cw-trainer wrote", path);
    if (!run.real) FAIL(ST_IO, "%s: %s", path, strerror(errno));
    CHECK(read_metrics(&run));
    CHECK(path_put(config, path, "config.json"));
    CHECK(check_inside(&run, config));
    if (file_exists(config)) CHECK(json_read_file(config, CONFIG_MAX, &run.config));
    CHECK(read_start(&run));
    *ret = run;
out:
    if (st != ST_OK) run_folder_release(&run);
    return st;
}

void run_folder_release(struct run_folder *run)
{
    metrics_release(&run->metrics);
    samples_release(&run->samples);
    reports_release(run);
    json_decref(run->config);
    json_decref(run->start);
    free(run->path);
    free(run->name);
    free(run->real);
    *run = (struct run_folder){0};
}

// ---- folders of runs ----------------------------------------------------------------------------

#define DEPTH 2 // of folders that are looked into: runs/real/seed-1

struct found {
    char *path;
    struct timespec written; // its metrics
};
struct found_list {
    struct found *runs; // (n)
    size_t n;
};

static int by_newest(const void *a, const void *b)
{
    const struct timespec *x = &((const struct found *)a)->written;
    const struct timespec *y = &((const struct found *)b)->written;
    if (x->tv_sec != y->tv_sec) return x->tv_sec < y->tv_sec ? 1 : -1;
    return (x->tv_nsec < y->tv_nsec) - (x->tv_nsec > y->tv_nsec);
}

static enum status find(const char *path, int depth, struct found_list *list)
{
    enum status st = ST_OK;
    struct stat info;
    char metrics[PATH_ROOM];
    json_t *names = NULL, *name;
    size_t i;
    CHECK(path_put(metrics, path, "metrics.jsonl"));
    if (stat(metrics, &info) == 0) {
        struct found *grown = array_room(list->runs, list->n, sizeof *grown);
        if (grown) list->runs = grown;
        char *copy = grown ? strdup(path) : NULL;
        if (!copy) FAIL(ST_NO_MEMORY, "no memory for the names of runs");
        list->runs[list->n++] = (struct found){copy, info.st_mtim};
        goto out;
    }
    // what cannot be listed holds no run that could be read
    if (depth > 0) names = json_folder(path);
    json_array_foreach (names, i, name) {
        char folder[PATH_ROOM];
        if (json_string_value(name)[0] == '.') continue;
        CHECK(path_put(folder, path, "%s", json_string_value(name)));
        if (lstat(folder, &info) == 0 && S_ISDIR(info.st_mode))
            CHECK(find(folder, depth - 1, list));
    }
out:
    json_decref(names);
    return st;
}

// Those in it, named by their path within it; none: what run_folder_open() says of it.
static enum status open_folder(const char *path, int max, struct run_folder *runs, int *n)
{
    struct found_list list = {0};
    enum status st;
    CHECK(find(path, DEPTH, &list));
    if (list.n == 0) {
        CHECK(run_folder_open(path, &runs[*n]));
        ++*n;
    }
    if (list.n > 1) qsort(list.runs, list.n, sizeof *list.runs, by_newest);
    for (size_t i = 0; i < list.n && *n < max; i++) {
        CHECK(run_folder_open(list.runs[i].path, &runs[*n]));
        char **name = &runs[(*n)++].name;
        const char *within = list.runs[i].path + strlen(path);
        while (*within == '/') within++;
        if (!*within) continue; // the run itself was named
        free(*name);
        if (!(*name = strdup(within))) FAIL(ST_NO_MEMORY, "no memory for the names of runs");
    }
    if (list.n > (size_t)max)
        log_info("%s has %zu runs: the newest %d are shown", path, list.n, max);
out:
    for (size_t i = 0; i < list.n; i++) free(list.runs[i].path);
    free(list.runs);
    return st;
}

enum status runs_open(const char *const *paths, int max, struct run_folder *ret, int *ret_n)
{
    enum status st = ST_OK;
    int n = 0;
    for (int i = 0; i < max && paths[i]; i++) {
        if (n == max) FAIL(ST_INVALID, "more than %d runs: name fewer of them", max);
        CHECK(open_folder(paths[i], max, ret, &n));
    }
    *ret_n = n;
out:
    for (int i = 0; st != ST_OK && i < n; i++) run_folder_release(&ret[i]);
    return st;
}
