/* role.c: opens a role of the bridge. No state; the main thread. */
#include "trainer/run/role.h"
#include "common/base/log.h"

#include <string.h>

// Server and trainer must rotate alike, however long the trainer's own sequences are.
static enum status take_rope(const struct bridge *bridge, const struct bridge_role *role,
                             struct model_config *model)
{
    char words[128];
    model->rope_context = role->rope_context;
    if (!rope_describe(model, words, sizeof words)) return ST_OK;
    if (role->rope_context == 0)
        return status_fail(ST_MISMATCH,
                           "%s: role %s has no \"rope_context\", by which the server chose the "
                           "factors of longrope; server and trainer must be of one version",
                           bridge_file_of(bridge)->path, role->role);
    log_info("%s: %s, as the server chose", role->model, words);
    return ST_OK;
}

enum status role_open(struct bridge *bridge, const struct bridge_role *role,
                      struct model_config **ret_model, struct weights **ret_weights)
{
    const struct bridge_file *file = bridge_file_of(bridge);
    enum status st;
    char hash[65];
    CHECK(model_config_load(role->model, ret_model));
    CHECK(take_rope(bridge, role, *ret_model));
    if (file->tp_degree > 1)
        CHECK(model_config_shard(*ret_model, (struct shard){file->shard, file->tp_degree}));
    CHECK(weights_plan(*ret_model, role->dt, ret_weights));
    weights_layout_hash(*ret_weights, hash);
    if (strcmp(hash, role->layout_hash) != 0 || (*ret_weights)->bytes > role->bytes) {
        st = status_fail(ST_MISMATCH,
                         "%s: the server's layout of the weights differs from what %s gives here; "
                         "server and trainer must be of one version, and the folder unchanged",
                         file->path, role->model);
        goto out;
    }
    weights_bind(*ret_weights, bridge_base(bridge, role->role));
out:
    return st;
}
