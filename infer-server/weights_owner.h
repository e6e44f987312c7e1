/* weights_owner.h: the daemon's side of the one copy of the weights: the shared arena, what fills
 * it, the control page through which a trainer writes it, and the bridge file that leads there.
 *
 * The engine's thread, but for weights_owner_control(), whose control_facts() any thread may call.
 */
#ifndef INFER_SERVER_WEIGHTS_OWNER_H
#define INFER_SERVER_WEIGHTS_OWNER_H

#include "bridge/control.h"
#include "common/model/weights.h"
#include "kernels/device.h"

struct weights_owner;

// Plans the arena, takes the control page, allocates, and loads the folder: version 2. ST_BUSY
// where a living daemon uses the same bridge path. model_folder NULL: random weights, for
// benchmarks. All pointers are borrowed for its life.
enum status weights_owner_new(struct device *dev, const struct model_config *config, enum dtype dt,
                              const char *model_folder, const char *bridge_path,
                              struct weights_owner **ret);
// Writes the bridge file: clients find the weights from here on.
enum status weights_owner_announce(struct weights_owner *o, const char *socket_path);
// Removes bridge file, control page and arena; NULL is fine.
void weights_owner_free(struct weights_owner *o);

const struct weights *weights_owner_weights(const struct weights_owner *o);
struct control *weights_owner_control(const struct weights_owner *o);

// Torn weights: the writer's last good snapshot if there is one that loads, else the folder of the
// last reload, else the model folder.
// Next even version. ret_from (512 bytes) is the folder it took. On failure they stay torn.
enum status weights_owner_restore(struct weights_owner *o, char ret_from[512]);
// Rewrites the weights from a folder: next even version. ST_BUSY while a trainer holds the lease
// (its master weights would be of another model). Snapshots of trainers before are forgotten: they
// are of the weights that were replaced. On failure ST_TORN where the weights are half
// written, else they are as they were.
enum status weights_owner_reload(struct weights_owner *o, const char *folder);

// The 64-bit word at the start of the canary; its complement is then stored beside it.
enum status weights_owner_canary(struct weights_owner *o, uint64_t *ret_word);
// ops.checksum of every tensor in arena order; sums (n_tensors).
enum status weights_owner_checksums(struct weights_owner *o, uint64_t *sums);

#endif
