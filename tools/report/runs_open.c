/* runs_open.c: which runs the folders mean that were named: runs, or folders that runs lie in. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/file.h"
#include "common/base/log.h"
#include "tools/report/report.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

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
    struct dirent **entries = NULL;
    int n = 0;
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
    if (depth > 0) n = scandir(path, &entries, NULL, alphasort);
    for (int i = 0; i < n; i++) {
        char folder[PATH_ROOM];
        if (entries[i]->d_name[0] == '.') continue;
        CHECK(path_put(folder, path, "%s", entries[i]->d_name));
        if (lstat(folder, &info) == 0 && S_ISDIR(info.st_mode))
            CHECK(find(folder, depth - 1, list));
    }
out:
    for (int i = 0; i < n; i++) free(entries[i]);
    free(entries);
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
