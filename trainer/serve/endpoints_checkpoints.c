/* endpoints_checkpoints.c: weights that are saved, to go on from or to be sampled. Loop's thread.
 */
#include "common/base/log.h"
#include "trainer/serve/tinker.h"

#include <string.h>

void tinker_warn_ttl(struct tinker *t, const char *what)
{
    if (t->ttl_warned) return;
    t->ttl_warned = true;
    log_warn("%s: \"ttl_seconds\" has no effect: checkpoints stay until they are deleted", what);
}

static enum status perform_save(struct trained_model *m, struct request *request)
{
    static const char *const types[RUN_KINDS] = {"save_weights", "save_weights_for_sampler",
                                                 "save_weights_external"};
    struct training_request *r = (struct training_request *)request;
    const struct tinker *t = request->owner->tinker;
    char folder[PATH_ROOM], path[RUN_PATH_ROOM];
    enum status st;
    if (!r->named) {
        const bool wanted = !r->inflight && !t->options->inflight;
        CHECK(trained_snapshot(m, request->owner->id, wanted, &r->snapshot));
        r->snapshot.base = r->snapshot.base && !r->inflight;
        r->snapshot.inflight = r->inflight;
        return request_set_json(request, json_pack("{s:s, s:s}", "sampling_session_id", r->sampler,
                                                   "type", "save_weights_for_sampler"));
    }
    CHECK(runs_folder(t->model->runs, &r->path, folder));
    CHECK(trained_save(m, request->owner->id, folder, r->path.kind == RUN_WEIGHTS));
    run_path_text(&r->path, path);
    snapshots_forget(t->model->snapshots, path); // what was there before
    CHECK(trained_snapshot(m, request->owner->id, false, &r->snapshot));
    snapshots_set_path(t->model->snapshots, path, &r->snapshot, true);
    st = request_set_json(request,
                          json_pack("{s:s, s:s}", "path", path, "type", types[r->path.kind]));
out:
    return st;
}

static enum status check_save(const struct call *c, struct training_request *r)
{
    const char *runs = c->tinker->model->runs;
    char folder[PATH_ROOM];
    if (c->path && !run_name_is_good(c->path))
        return status_fail(ST_INVALID,
                           "\"path\" is \"%.100s\"; it must be a name of letters, digits and - _ . "
                           "that a folder can have, of at most %d bytes",
                           c->path, RUN_NAME_ROOM - 1);
    if (c->ttl_seconds) tinker_warn_ttl(c->tinker, r->request.owner->id);
    if (c->recipients)
        return status_fail(ST_UNSUPPORTED,
                           "\"age_encryption_recipients\" is not there, files are not encrypted "
                           "here: leave it away (save_weights_external), or take the folder of the "
                           "checkpoint, which is in %s",
                           runs);
    if (!c->path && c->which != RUN_SAMPLER_WEIGHTS)
        return status_fail(ST_INVALID, "request: \"path\", the checkpoint's name, is missing");
    if (!c->path) return ST_OK;
    r->named = true;
    r->path.kind = (enum run_kind)c->which;
    snprintf(r->path.run, sizeof r->path.run, "%.150s", r->request.owner->id);
    snprintf(r->path.name, sizeof r->path.name, "%s", c->path);
    if (!c->overwrite && runs_find(runs, &r->path, folder) == ST_OK)
        return status_fail(ST_INVALID,
                           "\"path\": there is a checkpoint %s already, and \"overwrite\" is false",
                           c->path);
    return ST_OK;
}

// A sampler's checkpoint without a name is not written: a sampling session is made of the weights.
static enum status save(const struct call *c)
{
    const bool named = c->which != RUN_SAMPLER_WEIGHTS || c->path;
    struct training_request *r;
    enum status st = ST_OK;
    if (!named && c->sampler_number < 0)
        FAIL(ST_INVALID, "request: \"sampling_session_seq_id\" is missing");
    CHECK(training_request_of(c, perform_save, &r));
    if (!r) return ST_OK;
    r->inflight = c->kind && strcmp(c->kind, "inflight") == 0;
    if (!named)
        snprintf(r->sampler, sizeof r->sampler, "%.120s:sample:%lld", r->request.owner->session->id,
                 (long long)c->sampler_number);
    training_request_submit(r, c, c->status == ST_OK ? check_save(c, r) : c->status);
    return ST_OK;
out:
    return st;
}

const struct endpoint checkpoint_endpoints[] = {
    {"POST", "/api/v1/save_weights", save, "model_id seq_id", HTTP_NEEDS_KEY, RUN_WEIGHTS},
    {"POST", "/api/v1/save_weights_for_sampler", save, "model_id seq_id", HTTP_NEEDS_KEY,
     RUN_SAMPLER_WEIGHTS},
    {"POST", "/api/v1/save_weights_external", save, "model_id seq_id", HTTP_NEEDS_KEY,
     RUN_EXTERNAL_WEIGHTS},
    {0},
};
