/* run_folder.h: what a run's folder holds, for reading, while it may grow. Only metrics.jsonl must
 * be there. One thread. */
#ifndef TOOLS_REPORT_RUN_FOLDER_H
#define TOOLS_REPORT_RUN_FOLDER_H

#include "common/base/file.h"
#include "tools/report/samples.h"
#include "tools/report/series.h"

struct cluster_report { // cluster-report-epoch-N.txt
    int64_t epoch;
    char *path;
};
struct run_folder {
    char *path, *name;      // name: the folder's own
    json_t *config;         // config.json; NULL: there is none
    struct metrics metrics; // metrics.jsonl
    int64_t written_s;      // when that last changed; seconds since 1970
    // rollouts/step-N.jsonl of steps that have a line, as far as they were read
    struct samples samples;
    int32_t n_sampled; // lines of metrics whose step's file was looked for
    struct cluster_report *reports;
    int n_reports;
    int generation; // another one each time that all was read anew, since the run was resumed
};

// Opens a folder and reads its metrics. ST_NOT_FOUND or ST_FORMAT, saying what a run's folder is,
// where this is none.
enum status run_folder_open(const char *path, struct run_folder *ret);
// Reads what was appended; of samples as much as `ms` milliseconds allow (< 0: all).
enum status run_folder_refresh(struct run_folder *run, int ms);
bool run_folder_is_behind(const struct run_folder *run); // samples are left to be read
// The file of a step's samples.
enum status run_folder_rollouts(const struct run_folder *run, int64_t step,
                                char ret_path[PATH_ROOM]);
void run_folder_release(struct run_folder *run);

#endif
