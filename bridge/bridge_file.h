/* bridge_file.h: the bridge file: what a client needs to find and map the server's weights.
 * Written atomically with mode 0600. docs/internals/bridge.md lists its keys; those of existing
 * tools keep their names (model, tp_degree, param_names, param_mappings, ipc_handles,
 * single_copy_enabled, num_params). */
// SPDX-License-Identifier: Apache-2.0
#ifndef BRIDGE_BRIDGE_FILE_H
#define BRIDGE_BRIDGE_FILE_H

#include "common/base/dtype.h"
#include "common/base/status.h"
#include <stdint.h>
#include <sys/types.h>

#define BRIDGE_FORMAT_VERSION 1

// Which part of the Hugging Face tensor a shard holds: runs of its rows, one after the other, and
// of these as many columns as the tensor has here, from first_column on.
#define BRIDGE_MAX_RUNS 5
struct bridge_slice {
    int64_t whole[4]; // its shape
    int n_runs;       // 0: the tensor is the whole one
    struct {
        int64_t first, n;
    } runs[BRIDGE_MAX_RUNS];
    int64_t first_column;
};
struct bridge_tensor {
    char name[160]; // Hugging Face name
    int n_dims;
    int64_t shape[4], stride[4]; // elements
    enum dtype dt;
    bool is_buffer;            // nothing trains it; f32 in a role of any dtype
    uint64_t offset, bytes;    // in the role's segment
    struct bridge_slice slice; // of a server with several ranks
};
// One arena. The policy is there and is first; "draft", "reference" and "frozen" may follow, and
// any number of "adapter:NAME". Others, of newer servers, are left out when the file is read. Of a
// server with several ranks "policy" is the shard of rank 0, and "shard:R" that of rank R; of
// further models and adapters "draft", "mtp" or "frozen", and "shard:R:draft".
#define MTP_ROLE "mtp" // of the policy's own layer that predicts further tokens, in a draft's place
struct bridge_role {
    char role[80], model[512]; // model: the Hugging Face folder it was loaded from
    char kind[16],
        handle[160]; // "cuda-ipc" or "posix-shm" (shared_memory_kind), shared_memory_handle
    char layout_hash[65];
    uint64_t bytes, canary_offset;
    enum dtype dt;
    int64_t n_parameters;
    int rope_context; // by which the server chose the rope's factors (config.h); 0: not told
    // Of the policy, whose twin then lies behind its tensors (common/model/weights.h): whoever
    // writes these must make it anew within the same update.
    enum quantization quantization;
    // Of the policy: nobody may attach. What the twin alone has then stands in the file as its
    // codes.
    bool inference_only;
    enum kv_cache kv_cache; // as which the server holds keys and values of this model
    int n_tensors;
    struct bridge_tensor *tensors;
    struct bridge_holder { // of a shard's role: the process that holds it, and on what
        char device[16], device_uuid[48];
        pid_t pid;
        uint64_t pid_start_time;
    } holder;
};
struct bridge_file {
    char path[512];                                // where it was read from, or is written to
    char boot_id[40], device_uuid[48], device[16]; // device: "cuda:0", "cpu"
    pid_t pid;
    uint64_t pid_start_time;
    char control_page[96]; // shared memory name
    char socket[256];      // the server's Unix socket
    int tp_degree;         // ranks that share the policy; 0 or 1: one
    bool expert_parallel;  // they hold its experts whole, some each
    int shard;             // bridge_file_take_shard(): whose the policy is; 0 before
    char page_layout[65];  // layout_hash by which the control page goes: that of rank 0
    int n_roles;
    struct bridge_role *roles; // roles[0] is the policy; its fields also fill the keys of old tools
    char ignored[256];         // names of roles that were left out, for the reader to say; or ""
};

// --bridge (explicit_path, may be NULL), $COMMONWEIGHT_BRIDGE, $LOGDIR/vllm_bridge_config.json,
// ./bridge.json, $XDG_RUNTIME_DIR/commonweight/bridge.json, /run/commonweight/bridge.json. The
// first that exists; ST_NOT_FOUND lists where it looked. An explicit path is the only candidate.
enum status bridge_find(const char *explicit_path, char *ret_path, size_t size);
enum status bridge_file_write(const struct bridge_file *file);
// ST_MISMATCH where it belongs to another user (./bridge.json may be anybody's). Parses and checks
// the file by itself: every key, types, ranges inside segments, no overlap.
enum status bridge_file_read(const char *path, struct bridge_file **ret);
enum status bridge_file_parse(const char *where, const char *text, size_t len,
                              struct bridge_file **ret); // for the fuzz entry
void bridge_file_free(struct bridge_file *file);
// Checks it against this machine: boot (ST_MISMATCH), then the living pid with that start time
// (ST_PEER_GONE), each with its remedy.
enum status bridge_file_check(const struct bridge_file *file);
// Finds it, reads it and checks it.
enum status bridge_file_open(const char *explicit_path, struct bridge_file **ret);
enum status bridge_file_check_boot(const struct bridge_file *file);
enum status bridge_file_check_process(const struct bridge_file *file);
const struct bridge_role *bridge_file_role(const struct bridge_file *file, const char *role);
// The name of a rank's shard of that role of rank 0's.
#define SHARD_NAME 80
void bridge_shard_name(const char *role, int rank, char ret[SHARD_NAME]);
// Makes it the file of one rank's shards, which its "policy" and further models then are, on that
// rank's device; the other shards are left out. ST_INVALID where there is no such rank.
enum status bridge_file_take_shard(struct bridge_file *file, int rank);

#endif
