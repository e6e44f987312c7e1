/* report.h: what a run's folder holds, read while it may grow, and the page that shows it, as a
 * file or from a server. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TOOLS_REPORT_REPORT_H
#define TOOLS_REPORT_REPORT_H

#include "common/base/bytes.h"
#include "common/base/file.h"
#include <jansson.h>
#include <stdint.h>

// ---- series -------------------------------------------------------------------------------------
// metrics.jsonl as series, one for each key, read on as the file grows.

struct series { // of one key
    char *key;
    int32_t *at;   // (n) lines that have a value, ascending
    float *values; // (n) finite
    size_t n;
};
struct metrics {
    struct series *series; // (n) in the order in which keys appeared
    int n;
    json_t *index;          // key -> place in series
    int32_t *steps;         // (n_lines) ascending
    int32_t n_lines;        // that were read
    int64_t n_bad;          // others: no JSON object with a "step" above that of the line before
    int64_t at;             // byte of the file up to which it was read
    uint64_t device, inode; // of the file
};

// Reads what was appended since the last call; zero-initialised metrics: all there is. A last line
// without its end (the run goes on, or was killed) is left for later. ret_anew: the file is another
// one, or shorter, since the run was resumed: everything was read again. ST_FORMAT where no line of
// a file could be read.
enum status metrics_read(struct metrics *m, const char *path, bool *ret_anew);
void metrics_release(struct metrics *m);

// ---- samples ------------------------------------------------------------------------------------
// What is kept of every sample in a run's rollouts/: enough to list, filter and sort them. Texts
// stay in their files.

struct report_sample {
    int32_t step;
    int32_t row;             // of its step's file, from 0
    int32_t line, number;    // of the data, below 0 of the held-out data; in its group
    int32_t tokens;          // -1: not said
    float reward, advantage; // NAN: none
    uint8_t truncated;       // 0 or 1
};
struct prompt {
    int32_t line; // as a sample's
    char *text;   // how it begins, UTF-8
};
struct samples {
    struct report_sample *samples; // (n) by step and row
    size_t n;
    struct prompt *prompts; // (n_prompts) in the order in which they appeared
    size_t n_prompts;
    json_t *known; // lines of the data that have one
    int64_t n_bad; // lines that were left out
};

// Adds a step's file, after all before it; a line that cannot be read is left out and counted.
// held_out: it is of that step's evaluation.
enum status samples_add(struct samples *s, int32_t step, bool held_out, const char *path);
void samples_release(struct samples *s);

// ---- run folder ---------------------------------------------------------------------------------
// Only metrics.jsonl must be there.

struct cluster_report { // cluster-report-epoch-N.txt
    int64_t epoch;
    char *path;
};
struct run_folder {
    char *path, *name;      // name: the folder's own
    char *real;             // path without links; nothing outside it is read
    json_t *config;         // config.json; NULL: there is none
    json_t *start;          // the last of run.json; NULL: there is none
    struct metrics metrics; // metrics.jsonl
    int64_t written_s;      // when that last changed; seconds since 1970
    // rollouts/ of steps that have a line, as far as they were read
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
// The file of a step's samples, or of its evaluation's: rollouts/step-N.jsonl, eval-step-N.jsonl.
enum status run_folder_rollouts(const struct run_folder *run, int64_t step, bool held_out,
                                char ret_path[PATH_ROOM]);
void run_folder_release(struct run_folder *run);
// Opens the runs at these paths, NULL behind the last, and in place of a path that is no run but
// has some in it, or in its folders, those, the newest first. At most `max` in all.
enum status runs_open(const char *const *paths, int max, struct run_folder *ret, int *ret_n);

// ---- run data -----------------------------------------------------------------------------------
// A run as the page's script takes it, whole or what is new: one JSON object. Columns of numbers
// are base64 of little-endian int32, float32 or bytes.

struct run_cursor { // what the page has; all zero: nothing
    int64_t generation, lines, samples, prompts, reports;
};

// Appends what it lacks:
//   name, generation, lines, bad (lines that could not be read), written (seconds since 1970),
//   behind (more samples are to come)
//   config, start               null, or not there where the page has it; start: run.json's last
//   from, steps [i32]           of the lines from that one on
//   series                      [{key, at [i32] or else first, values [f32] or else same, n}]; at:
//                               line of each value, first: of the first, the others follow line
//                               by line; same: the one value of all n
//   reports                     [{epoch, text, left_out (bytes of it behind text)}], left_out: how
//                               many between the first and the second are not given; not there
//                               where the page has them
//   samples                     {from, bad (lines that could not be read), step, row, line, number,
//                               tokens [i32], reward, advantage [f32], truncated [u8]}, prompts
//                               {from, line [i32], text}
enum status run_data_put(const struct run_folder *run, const struct run_cursor *has,
                         struct bytes *to);

// ---- page ---------------------------------------------------------------------------------------
// The report as one HTML page that needs nothing besides itself, or, where it is served, its
// server.

// Appends the page with all data of n runs, and of their samples' texts at most so many bytes; of
// more, those of steps spread evenly.
enum status page_put(const struct run_folder *runs, int n, int64_t max_texts, struct bytes *to);
// The page without data, which asks its server for that of n runs, and shows that many at first.
enum status page_put_live(int n, int shown, struct bytes *to);

// Content of a <script> that is no program: '<' of JSON, which stands in its strings only, as
// "\u003c", so that nothing in it ends the element.
void page_put_json(struct bytes *to, const char *json, size_t len);

// tools/report/page/ as the build put it here.
extern const char report_style[], report_body[], report_script[];

// ---- server -------------------------------------------------------------------------------------
// The page over HTTP, with the newest data of runs that go on.

// Listens on HOST:PORT, a loopback address, says where, and serves until SIGINT or SIGTERM. shown:
// of the runs, how many the page shows until the reader ticks others.
enum status report_serve(const char *listen, struct run_folder *runs, int n, int shown);

#endif
