/* run_folder.c: finds the files of a run. */
#include "tools/report/run_folder.h"
#include "common/base/file.h"
#include "common/base/json.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define CONFIG_MAX (1 << 20)

static void file_list_release(struct file_list *list)
{
    for (int i = 0; i < list->n; i++) free(list->files[i].path);
    free(list->files);
    *list = (struct file_list){0};
}

// The files "<prefix>N<suffix>" of a folder, by number; a folder that is not there has none.
static enum status list_numbered(const char *folder, const char *prefix, const char *suffix,
                                 struct file_list *ret)
{
    enum status st = ST_OK;
    struct dirent **entries = NULL;
    struct file_list list = {0};
    int n = scandir(folder, &entries, NULL, versionsort);
    if (n < 0 && errno != ENOENT) return status_fail(ST_IO, "%s: %s", folder, strerror(errno));
    if (!(list.files = calloc((size_t)(n > 0 ? n : 1), sizeof *list.files)))
        FAIL(ST_NO_MEMORY, "no memory for the names of %s", folder);
    for (int i = 0; i < n; i++) {
        const char *name = entries[i]->d_name, *digits = name + strlen(prefix);
        char *end;
        if (strncmp(name, prefix, strlen(prefix)) != 0) continue;
        long long number = strtoll(digits, &end, 10);
        if (end == digits || number < 0 || strcmp(end, suffix) != 0) continue;
        struct numbered_file *file = &list.files[list.n++];
        *file = (struct numbered_file){number, path_join(folder, name)};
        if (!file->path) FAIL(ST_NO_MEMORY, "no memory for the names of %s", folder);
    }
    *ret = list;
out:
    for (int i = 0; i < n; i++) free(entries[i]);
    free(entries);
    if (st != ST_OK) file_list_release(&list);
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

static enum status read_files(struct run_folder *run)
{
    enum status st;
    struct stat info;
    char metrics[PATH_ROOM], config[PATH_ROOM], rollouts[PATH_ROOM];
    CHECK(path_put(metrics, run->path, "metrics.jsonl"));
    CHECK(path_put(config, run->path, "config.json"));
    CHECK(path_put(rollouts, run->path, "rollouts"));
    if (stat(metrics, &info) != 0 && errno == ENOENT)
        FAIL(ST_NOT_FOUND,
             "%s: there is no metrics.jsonl in it; name the folder that cw-trainer "
             "train wrote (its --run-dir)",
             run->path);
    CHECK(metrics_read(metrics, &run->metrics));
    run->written_s = (int64_t)info.st_mtime;
    if (file_exists(config)) CHECK(json_read_file(config, CONFIG_MAX, &run->config));
    CHECK(list_numbered(run->path, "cluster-report-epoch-", ".txt", &run->cluster_reports));
    st = list_numbered(rollouts, "step-", ".jsonl", &run->rollouts);
out:
    return st;
}

enum status run_folder_read(const char *path, struct run_folder *ret)
{
    enum status st;
    struct run_folder run = {.path = strdup(path), .name = own_name(path)};
    struct stat info;
    if (!run.path || !run.name) FAIL(ST_NO_MEMORY, "no memory to read %s", path);
    if (stat(path, &info) != 0)
        FAIL(errno == ENOENT ? ST_NOT_FOUND : ST_IO, "%s: %s", path, strerror(errno));
    if (!S_ISDIR(info.st_mode))
        FAIL(ST_INVALID, "%s is no folder; name the one that cw-trainer train wrote", path);
    CHECK(read_files(&run));
    *ret = run;
out:
    if (st != ST_OK) run_folder_release(&run);
    return st;
}

void run_folder_release(struct run_folder *run)
{
    metrics_release(&run->metrics);
    file_list_release(&run->cluster_reports);
    file_list_release(&run->rollouts);
    json_decref(run->config);
    free(run->path);
    free(run->name);
    *run = (struct run_folder){0};
}
