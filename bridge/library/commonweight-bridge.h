/* commonweight-bridge.h: publishing weights to a running cw-infer-server from any language.
 *
 * libcommonweight-bridge.so finds the server's bridge file, maps every tensor, and runs the publish
 * protocol around an update that the caller writes in place. docs/internals/bridge-library.md is
 * its page; `python/commonweight` binds it for Python.
 *
 * Every function that can fail returns 0 or an error code; cw_bridge_message() then has a sentence
 * that names what is wrong and the way out. A bridge belongs to one thread at a time. Needs neither
 * CUDA at run time nor anything of Commonweight's besides this one file. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMONWEIGHT_BRIDGE_H
#define COMMONWEIGHT_BRIDGE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CW_BRIDGE_API __attribute__((visibility("default")))

struct cw_bridge;

struct cw_bridge_tensor {
    const char *name;  // Hugging Face name; lives as long as the bridge
    const char *dtype; // "float32", "bfloat16", ...
    void *data;        // on the CPU an address; on CUDA a device pointer of this process
    uint64_t bytes;
    int32_t device; // N of cuda:N; -1: CPU
    int32_t n_dims;
    int64_t shape[4];  // rows are contiguous
    int64_t stride[4]; // in elements
};

struct cw_bridge_times { // milliseconds of one publish
    double wait_ms;      // asked until the server had stopped at a step boundary
    double write_ms;     // version odd: the update
    double total_ms;
};

// The sentence of this thread's last error, "" if there was none, until this thread's next call.
CW_BRIDGE_API const char *cw_bridge_message(void);
// "mismatch", "busy", ... for an error code; never NULL.
CW_BRIDGE_API const char *cw_bridge_error_words(int code);

// path: a bridge file, or NULL: the first found of $COMMONWEIGHT_BRIDGE,
// $LOGDIR/vllm_bridge_config.json, ./bridge.json, $XDG_RUNTIME_DIR/commonweight/bridge.json and
// /run/commonweight/bridge.json. Maps all tensors; changes nothing.
CW_BRIDGE_API int cw_bridge_open(const char *path, struct cw_bridge **ret);
// Gives the lease back if it is held. Pointers of its tensors end here. NULL is fine.
CW_BRIDGE_API void cw_bridge_close(struct cw_bridge *bridge);

// The i-th role that is shared: "policy" first, then where the server has them "draft", ...,
// "adapter:NAME"; NULL past the end. Lives as long as the bridge. Roles that this version of the
// library does not know are left out.
CW_BRIDGE_API const char *cw_bridge_role_at(const struct cw_bridge *bridge, int32_t index);
// 0 tensors: no such role.
CW_BRIDGE_API int32_t cw_bridge_tensor_count(const struct cw_bridge *bridge, const char *role);
// In the arena's order; nonzero past the end.
CW_BRIDGE_API int cw_bridge_tensor_at(const struct cw_bridge *bridge, const char *role,
                                      int32_t index, struct cw_bridge_tensor *ret);
// Even: whole; odd: being written.
CW_BRIDGE_API uint64_t cw_bridge_version(const struct cw_bridge *bridge);
CW_BRIDGE_API const char *cw_bridge_socket(const struct cw_bridge *bridge); // the server's HTTP
CW_BRIDGE_API const char *cw_bridge_model(const struct cw_bridge *bridge);  // folder of the policy
// 0 while the server lives and its weights are whole.
CW_BRIDGE_API int cw_bridge_check(const struct cw_bridge *bridge);

// One writer at a time; a second is refused with the first one's pid. A thread of the library keeps
// the lease's heartbeat until it is given back. Of a bridge that holds it, taking it again changes
// nothing: calls are not counted, and the first cw_bridge_give_lease() gives it back.
CW_BRIDGE_API int cw_bridge_take_lease(struct cw_bridge *bridge);
CW_BRIDGE_API void cw_bridge_give_lease(struct cw_bridge *bridge);

// Stops generation at a step boundary (waiting at most timeout_ms), makes the version odd, calls
// update(context), makes the version even, lets generation go on. update() returns 0 once all it
// wrote is in memory: on CUDA it waits for its own streams. If it returns anything else, what it
// wrote is taken for partial, and the server restores its last whole weights: from the snapshot, or
// else from the folder it was loaded from. Two minutes at most.
CW_BRIDGE_API int cw_bridge_publish(struct cw_bridge *bridge, int64_t timeout_ms,
                                    int (*update)(void *context), void *context,
                                    struct cw_bridge_times *ret_times); // may be NULL

// The model folder that the server restores if this writer dies in an update. Needs the lease.
CW_BRIDGE_API int cw_bridge_set_snapshot(struct cw_bridge *bridge, const char *folder);

#ifdef __cplusplus
}
#endif
#endif
