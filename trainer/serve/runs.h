/* runs.h: training runs on disk, as tinker:// paths name them: RUN/run.json, and the checkpoints
 * RUN/weights/NAME, RUN/sampler_weights/NAME and RUN/external_weights/NAME, in one folder
 * (--run-dir) that outlives the server; and their files as the body of a response. Any thread: each
 * call stands for itself, and what is written is there whole or not at all. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_SERVE_RUNS_H
#define TRAINER_SERVE_RUNS_H

#include "common/base/file.h"
#include "common/http/http.h"
#include <jansson.h>
#include <time.h>

enum run_kind { RUN_WEIGHTS, RUN_SAMPLER_WEIGHTS, RUN_EXTERNAL_WEIGHTS, RUN_KINDS };
extern const char *const run_kind_names[RUN_KINDS + 1]; // as in paths
// What a run trains: the last is the head; and the fields of its description, of lora_config and of
// weights_info that say so.
enum { RUN_ATTENTION, RUN_MLP, RUN_UNEMBED, RUN_TRAINS };
extern const char *const run_trains[RUN_TRAINS];

#define RUN_NAME_ROOM 160 // bytes of a run's name, or a checkpoint's, with its end
#define RUN_PATH_ROOM (2 * RUN_NAME_ROOM + 32)
struct run_path {
    char run[RUN_NAME_ROOM], name[RUN_NAME_ROOM];
    enum run_kind kind;
    char text[RUN_PATH_ROOM]; // "tinker://RUN/weights/NAME"
};
// A run or a checkpoint can have the name that a file can have, of printable ASCII, not hidden.
bool run_name_is_good(const char *name);
// "tinker://RUN/weights/NAME"; ST_INVALID says what it should be.
enum status run_path_parse(const char *path, struct run_path *ret);
// Reads the path of a URL, which is "RUN", `between` ("/checkpoints", or ""), "/weights/NAME" and
// ret_more, "" or from a slash on. False where there can be no such checkpoint.
bool run_path_read(const char *text, const char *between, struct run_path *ret,
                   const char **ret_more);
void run_path_set(struct run_path *ret, const char *run, enum run_kind kind, const char *name);

// Gives a checkpoint's folder below `runs`, and makes those above it.
enum status runs_folder(const char *runs, const struct run_path *path, char ret_folder[PATH_ROOM]);
// ST_NOT_FOUND where there is no such checkpoint.
enum status runs_find(const char *runs, const struct run_path *path, char ret_folder[PATH_ROOM]);
enum status runs_find_path(const char *runs, const char *text, struct run_path *ret,
                           char ret_folder[PATH_ROOM]); // of a tinker:// path
// Lists what others can use of a checkpoint, which is all but the optimizer's state: {"name":
// bytes}, a name with its folders within it.
enum status runs_files(const char *folder, json_t **ret_files);

// ST_INVALID, naming the field, where a client's own make a description longer than run.json may
// be.
enum status runs_check_description(const json_t *description);
// run.json of a new run.
enum status runs_describe(const char *runs, const char *run, const json_t *description);
int64_t runs_bytes(const json_t *files); // of them all
// "TrainingRun" and "Checkpoint" as the API has them; ST_NOT_FOUND for a run that is not there.
enum status runs_training_run(const char *runs, const char *run, json_t **ret);
// Append to a list. Those whose run.json cannot be read are left out and warned of, but for those
// that `warned`, an object of the caller's, has from an earlier call.
enum status runs_training_runs(const char *runs, json_t *warned, json_t *list);
enum status runs_checkpoints(const char *runs, const char *run, json_t *list); // run NULL: all
json_t *runs_time(time_t seconds); // as the API has it; new reference

// ---- downloads (endpoints_runs.c; the loop's thread) --------------------------------------------

// Files of a checkpoint, read chunk by chunk as the client takes it: one file as it is, or all of a
// folder as a tar archive (POSIX.1-1988 "ustar"; sizes from 8 GiB on as GNU tar writes them).
struct download;
// files: {"name": bytes}, below the folder. file: one of them, or "", all as an archive; else
// ST_NOT_FOUND. ret_bytes: of the whole response.
enum status download_new(const char *folder, const json_t *files, const char *file,
                         struct download **ret, int64_t *ret_bytes);
void download_free(struct download *d); // NULL is fine
// The next chunk. STREAM_FAIL where a file is not there any more, also because the folder was put
// in the place of another since download_new(), or is not as long as it was; the sentence says
// which.
enum stream_state download_next(struct download *d, struct bytes *to);

#endif
