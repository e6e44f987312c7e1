/* weights_owner.h: the server's side of the one copy of the weights: the shared arenas (the
 * policy's, and a draft model's and a frozen model's where there are such), what fills them, the
 * control page through which a trainer writes them, and the bridge file that leads there. All
 * arenas are of one version; the frozen model's is never written again.
 *
 * The engine's thread, but for weights_owner_control(), whose control_info() any thread may call.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_WEIGHTS_OWNER_H
#define INFER_SERVER_WEIGHTS_OWNER_H

#include "bridge/control.h"
#include "common/model/weights.h"
#include "infer-server/weights/adapters.h"
#include "infer-server/weights/group.h"
#include "kernels/device.h"

struct weights_owner;

// In the order of enum runner_role.
enum weights_role { WEIGHTS_POLICY, WEIGHTS_DRAFT, WEIGHTS_FROZEN, WEIGHTS_ROLES };
struct weights_source {
    const struct model_config *config; // NULL: there is no such role
    const char *folder;                // NULL: random weights, for benchmarks
};

// Plans the arenas, takes the control page, allocates, and loads the folders: version 2. ST_BUSY
// where a living server uses the same bridge path. All pointers are borrowed for its life. group:
// its followers hold the policy's other shards, and load whatever is loaded here; NULL: none.
// inference_only: the bridge file lets nobody attach.
enum status weights_owner_new(struct device *dev, struct group *group,
                              const struct weights_source sources[WEIGHTS_ROLES], enum dtype dt,
                              bool inference_only, const char *bridge_path,
                              struct weights_owner **ret);
// Writes the bridge file: clients find the weights from here on.
enum status weights_owner_announce(struct weights_owner *o, const char *socket_path);
// Removes bridge file, control page and arenas; NULL is fine.
void weights_owner_free(struct weights_owner *o);

// Room for LoRA adapters (adapters_new); before anybody takes all memory that is left.
enum status weights_owner_hold_adapters(struct weights_owner *o, int max_adapters, int max_rank);
const struct adapters *
weights_owner_adapters(const struct weights_owner *o); // NULL: there are none
// adapters_change() on all ranks; the bridge file is then written anew. Retiring is ST_BUSY while
// another trainer than `writer`, who may have mapped the arena, is attached; removing follows once
// nobody computes with it.
enum status weights_owner_add_adapter(struct weights_owner *o, const struct adapter_request *order);
enum status weights_owner_retire_adapter(struct weights_owner *o, int slot, pid_t writer);
enum status weights_owner_remove_adapter(struct weights_owner *o, int slot);
// Likewise: next even version. ST_BUSY as of weights_owner_reload().
enum status weights_owner_reload_adapter(struct weights_owner *o, int slot, const char *folder);

// NULL where there is no such role.
const struct weights *weights_owner_weights(const struct weights_owner *o, enum weights_role role);
struct control *weights_owner_control(const struct weights_owner *o);

// Torn weights, role by role: where the writer's last snapshot is of an adapter, that adapter from
// it, else the policy: from the snapshot if there is one that loads, else from the folder of the
// last reload, else from the model folder. The draft in either case: from "draft" inside the
// snapshot, else from its folder. Where no snapshot can be used, adapters become as they were
// loaded or made, since one may be what is torn. Next even version. On failure they stay torn.
struct weights_restored {
    char from[512];  // the folder, in words where there are several
    char fault[512]; // why the snapshot, or its draft, was not used; "": it was, or there is none
};
enum status weights_owner_restore(struct weights_owner *o, struct weights_restored *ret);
// Rewrites the policy's weights from a folder, and the draft's from draft_folder (NULL: it stays as
// it is): next even version. ST_BUSY while a trainer holds the lease (its master weights would be
// of another model). Snapshots of trainers before are forgotten: they are of the weights that were
// replaced. On failure ST_TORN where the weights are half written, else they are as they were.
enum status weights_owner_reload(struct weights_owner *o, const char *folder,
                                 const char *draft_folder);

// The 64-bit word at the start of the policy's canary; its complement is then stored beside it. Of
// every shard: words (weights_owner_shards).
int weights_owner_shards(const struct weights_owner *o);
// Of the policy, all shards of it together.
int64_t weights_owner_parameters(const struct weights_owner *o);
enum status weights_owner_canaries(struct weights_owner *o, uint64_t *words);
int weights_owner_tensors(const struct weights_owner *o); // of all roles, and other shards
// ops.checksum of every tensor as the bridge file lists them, then likewise of each other rank;
// sums (weights_owner_tensors).
enum status weights_owner_checksums(struct weights_owner *o, uint64_t *sums);
// What adapters are of, adapter_base(): the policy as it is. It is summed when somebody asks, and
// once for as long as it stays the same, whatever becomes of the other roles. The owner's.
enum status weights_owner_base(struct weights_owner *o, const json_t **ret);

// The same of one arena, by whichever rank it is; and where on this machine it is, with the name of
// a new segment, which says which process made it.
enum status arena_canary(struct device *dev, const struct weights *w, uint64_t *ret_word);
enum status arena_checksums(struct device *dev, const struct weights *w, uint64_t *sums);
#define SEGMENT_BYTES 96
void segment_name(const char *bridge_path, const char *role, char ret[SEGMENT_BYTES]);

#endif
