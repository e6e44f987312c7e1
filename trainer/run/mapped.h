/* mapped.h: the bridge that a run works on, and the models that it maps there: the policy, the
 * adapter that is trained instead, the draft that is trained along. Of several ranks
 * (docs/use/scaling.md) each has a bridge, or a shard of one; they meet, decide together what must
 * not be decided twice, and hold the same weights. Rank 0 writes the run's folder, and logs. The
 * main thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_MAPPED_H
#define TRAINER_MAPPED_H

#include "bridge/control_info.h"
#include "trainer/launch/launch.h"

#include <jansson.h>
#include <limits.h>

#define RANK_FIELD "{rank}" // in --bridge: the rank's number

struct adapter;
struct bridge;
struct bridge_role;
struct control;
struct http_client;
struct model_folder;
struct model_config;
struct weights;
struct mapped {
    const struct launch *launch;
    const char *given;          // --bridge; NULL: it is looked for
    int shard, n_shards;        // of the server's model: this rank's, and into how many
    char bridge_path[PATH_MAX]; // this rank's; "": as it is given
    uint64_t next_version;      // that the servers are brought to
    struct bridge *bridge;
    // the policy
    const char *model_folder; // the bridge file's
    const char *files_folder; // whose tokenizer and further files are written beside the weights
    struct model_config *model;
    struct weights *policy;        // bound to the shared arena
    struct adapter *adapter;       // that is trained instead (--lora-r), bound likewise; NULL: none
    json_t *base;                  // that the adapter is trained on (adapter_base())
    char role[CONTROL_ROLE_BYTES]; // the bridge file's, of what is trained
    // the draft model, with --train-draft; NULL without
    const char *draft_folder; // the bridge file's
    struct model_config *draft_model;
    struct weights *draft; // bound to its shared arena
};

// Which bridge file is this rank's, before anything else.
enum status mapped_find(struct mapped *m, const struct launch *launch, const char *given);
const char *mapped_path(const struct mapped *m); // the bridge file's; NULL: to be looked for
enum status mapped_attach(struct mapped *m);
void mapped_release(struct mapped *m); // also what is half opened
// Reads the role's model folder, checks that both sides lay its weights out alike, and binds them
// to the role's mapped arena. What is there of both is the caller's to free, also on failure.
enum status role_open(struct bridge *bridge, const struct bridge_role *role,
                      struct model_config **ret_model, struct weights **ret_weights);
struct model_folder mapped_folder(const struct mapped *m); // of what is trained, to be written
struct control *mapped_control(const struct mapped *m);
uint64_t mapped_version(const struct mapped *m); // of the weights
// What a server's adapters are of now (adapter_base()).
enum status adapter_base_ask(struct http_client *http, json_t **ret);

// ---- the ranks that train together: of one rank all of it does nothing --------------------------

struct train_ranks {
    const struct launch *launch;
    struct liveness *liveness; // of the other ranks
    // all; those who hold copies of the same weights; those who hold a server's model together.
    // NULL: this rank alone
    struct comm *all, *copies, *shards;
};

// They meet, once each has its bridge, and are divided by the shards of their servers.
enum status train_ranks_meet(struct train_ranks *r, struct mapped *mapped, double timeout_s);
// Brings the servers to one weight version, where theirs differ.
enum status train_ranks_align_versions(const struct train_ranks *r, struct mapped *mapped,
                                       int64_t quiesce_ms);
// ST_MISMATCH where what the ranks have mapped differs in a bit, after that step.
enum status train_ranks_compare(const struct train_ranks *r, const struct mapped *mapped,
                                int64_t step);
// Says farewell to the others, or what this one failed by, before what they wait for is closed.
void train_ranks_leave(struct train_ranks *r, enum status outcome);
void train_ranks_free(struct train_ranks *r);

bool train_ranks_lead(const struct train_ranks *r);                                   // rank 0
enum status train_ranks_agree(const struct train_ranks *r, void *data, size_t bytes); // rank 0's
enum status train_ranks_any(const struct train_ranks *r, bool *flag); // set where any rank's is

#endif
