/* run_folder.h: what a run's folder holds, for reading. Only metrics.jsonl must be there. */
#ifndef TOOLS_REPORT_RUN_FOLDER_H
#define TOOLS_REPORT_RUN_FOLDER_H

#include "tools/report/series.h"

struct numbered_file { // "step-12.jsonl": 12
    int64_t number;
    char *path;
};
struct file_list {
    struct numbered_file *files; // (n) by number
    int n;
};
struct run_folder {
    char *path, *name;                // name: the folder's own
    json_t *config;                   // config.json; NULL: there is none
    struct metrics metrics;           // metrics.jsonl
    int64_t written_s;                // when metrics.jsonl last changed; seconds since 1970
    struct file_list cluster_reports; // cluster-report-epoch-N.txt
    struct file_list rollouts;        // rollouts/step-N.jsonl
};

// ST_NOT_FOUND or ST_FORMAT, saying what a run's folder is, where this is none.
enum status run_folder_read(const char *path, struct run_folder *ret);
void run_folder_release(struct run_folder *run);

#endif
