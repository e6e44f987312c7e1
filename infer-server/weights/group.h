/* group.h: the ranks of a tensor-parallel server on one host (common/model/config.h), each a
 * process with a device of its own. Rank 0 is the engine; the others are followers (follower.c),
 * which do what it orders: what every step computes, it orders before it computes its own part.
 * Orders go over the sockets on which the ranks met (common/ranks/rendezvous.h), so that a follower
 * that waits for work computes nothing; sums and parts go through the communicator.
 *
 * NULL is a server of one rank, to which every call does nothing. The engine's thread, on rank 0.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_GROUP_H
#define INFER_SERVER_GROUP_H

#include "common/base/bytes.h"
#include "common/ranks/ranks.h"
#include "kernels/comm.h"

struct group;

// Starts n ranks of this server with its own command line (from the first option
// on), and returns when all have ended. Main thread.
enum status group_start(int n, const char *device, char **argv);

// The device of a rank: what --device names; with several ranks on GPUs the one of its number.
enum status group_open_device(const char *spec, const struct ranks *who, struct device **ret);

// What clients need to find a follower's arena (bridge_file.h).
struct segment_info {
    char kind[16], handle[160], device[16], device_uuid[48];
    int64_t pid, pid_start_time;
};

// Each is of one of the models that the ranks share, by its number (runner.h, weights_owner.h), or
// behind these of the adapter in that slot.
enum order {
    ORDER_LOAD,    // a folder's tensors into the arena, but for the twin
    ORDER_TWIN,    // all ranks make it together
    ORDER_SEGMENT, // asks for struct segment_info
    ORDER_RUNNER,  // struct runner_limits
    ORDER_SHARE,   // the ranks' logits, with one another; is not answered
    ORDER_KV,      // int[2]: blocks, and states of sequences
    ORDER_STEP,    // batch_write()
    ORDER_COPY,    // struct kv_copy
    ORDER_HEAD,    // int32_t[]: rows of the last step whose logits are computed
    ORDER_HIDDEN,  // int32_t[]: rows of the policy's last step that its own layer goes on from
    ORDER_FURTHER, // int32_t[]: the same of that layer's
    ORDER_CANARY,  // asks for uint64_t: arena_canary()
    ORDER_SUMS,    // asks for uint64_t[n_tensors]
    ORDER_BASE,    // asks for uint64_t: weights_base_checksum()
    ORDER_ADAPTER, // struct adapter_change (adapters.h), and behind it its text
    ORDER_END,
    ORDERS
};

// Waits until all ranks have come, which know each other by the bridge file's path. One rank
// gives NULL.
enum status group_open(struct device *dev, const char *bridge_path, const struct ranks *who,
                       struct group **ret);
// Of a rank that fails before: the others, who wait, end at once with its sentence, which stays
// this thread's.
void group_give_up(const char *bridge_path, const struct ranks *who, enum status why);
// Before the model's memory is released: rank 0's tells the followers to end, and where all do,
// none has another's memory mapped any more.
void group_end(struct group *g);
void group_free(struct group *g);
struct comm *group_comm(const struct group *g);
int group_size(const struct group *g);

// Rank 0: all followers are to do that next. ST_PEER_GONE, or a follower's own failure, naming it.
enum status group_order(struct group *g, enum order order, int model, const void *data, size_t n);
// Waits until each follower has said that it has done its last order; answers (NULL: none) holds
// `bytes` from each, in rank order.
enum status group_wait(struct group *g, void *answers, size_t bytes);
// Whether all are there, and none has failed.
enum status group_check(struct group *g);

// A follower: waits for the next order. ST_PEER_GONE where rank 0 has ended without a word.
enum status group_next(struct group *g, enum order *ret, int *ret_model, struct bytes *ret_data);
// Says that it has done an order that is waited for, or (st, this thread's sentence) has failed.
enum status group_answer(struct group *g, enum status st, const void *data, size_t n);

#endif
