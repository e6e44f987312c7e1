/* mapped.h: the bridge that a run works on, and the models that it maps there: the policy, the
 * adapter that is trained instead, the draft that is trained along. Of several ranks each has a
 * bridge, or a shard of one. The main thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_MAPPED_H
#define TRAINER_MAPPED_H

#include "bridge/control_info.h"
#include "common/base/status.h"

#include <jansson.h>
#include <limits.h>

#define RANK_FIELD "{rank}" // in --bridge: the rank's number

struct adapter;
struct bridge;
struct bridge_role;
struct control;
struct http_client;
struct job;
struct model_folder;
struct model_config;
struct weights;
struct mapped {
    const struct job *job;
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
enum status mapped_find(struct mapped *m, const struct job *job, const char *given);
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

#endif
