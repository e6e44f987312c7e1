/* endpoints_checkpoints.c: weights that are saved, to go on from or to be sampled. Loop's thread.
 */
#include "trainer/serve/tinker.h"
#include "common/base/json.h"
#include "common/base/log.h"

#include <string.h>

void tinker_ttl(struct tinker *t, const char *of)
{
    if (t->ttl_told) return;
    t->ttl_told = true;
    log_warn("%s: \"ttl_seconds\" has no effect: checkpoints stay until they are deleted", of);
}

static enum status run_save(struct policy *policy, struct work *work)
{
    struct op *op = (struct op *)work;
    char folder[PATH_ROOM], path[RUN_PATH_ROOM];
    enum status st = ST_OK;
    if (op->named) {
        CHECK(runs_place(op->tinker->options->runs, &op->path, folder));
        CHECK(policy_save(policy, op->model->id, folder, op->path.part == RUN_WEIGHTS));
        run_path_put(&op->path, path);
        sources_forget(op->tinker->sources, path); // what was there before
    }
    const bool wanted = !op->named && !op->inflight && !op->tinker->options->inflight;
    st = policy_snapshot(policy, op->model->id, wanted, &op->snapshot);
out:
    return st;
}

static void saved(struct op *op)
{
    char path[RUN_PATH_ROOM];
    static const char *const types[RUN_PARTS] = {"save_weights", "save_weights_for_sampler",
                                                 "save_weights_external"};
    run_path_put(&op->path, path);
    op_note_live(op, true);
    future_done_json(op->future,
                     json_pack("{s:s, s:s}", "path", path, "type", types[op->path.part]));
}

static void snapshot(struct op *op)
{
    op->snapshot.base = op->snapshot.base && !op->inflight;
    struct sampler *s = tinker_new_sampler(op->tinker, op->model->session, op->sampler,
                                           op->model->base, &op->snapshot);
    if (s) {
        s->inflight = op->inflight;
        future_done_json(op->future, json_pack("{s:s, s:s}", "sampling_session_id", s->id, "type",
                                               "save_weights_for_sampler"));
    } else {
        future_fail(op->future, status_fail(ST_NO_MEMORY, "out of memory"));
    }
}

// Where "path" says that the checkpoint is to be, a name of the client's own.
static enum status read_name(const json_t *body, struct op *op, enum run_part part)
{
    const char *name = NULL;
    enum status st = json_get_string("request", body, "path", &name);
    if (st != ST_OK || !name) return st;
    if (!run_name_is_good(name))
        return status_fail(ST_INVALID,
                           "\"path\" is \"%.100s\"; it must be a name of letters, digits and - _ . "
                           "that a folder can have, of at most %d bytes",
                           name, RUN_NAME_ROOM - 1);
    op->named = true;
    op->path.part = part;
    snprintf(op->path.run, sizeof op->path.run, "%.150s", op->model->id);
    snprintf(op->path.name, sizeof op->path.name, "%s", name);
    return ST_OK;
}

static void save(struct http_request *q, const json_t *body, struct op *op, enum run_part part)
{
    bool overwrite = true;
    enum status st;
    CHECK(read_name(body, op, part));
    CHECK(json_get_bool("request", body, "overwrite", &overwrite));
    if (json_has(body, "ttl_seconds")) tinker_ttl(op->tinker, op->model->id);
    if (json_has(body, "age_encryption_recipients"))
        FAIL(ST_UNSUPPORTED,
             "\"age_encryption_recipients\" is not there, files are not encrypted here: leave it "
             "away (save_weights_external), or take the folder of the checkpoint, which is in %s",
             op->tinker->options->runs);
    if (!op->named && part != RUN_SAMPLER_WEIGHTS)
        FAIL(ST_INVALID, "request: \"path\", the checkpoint's name, is missing");
    char folder[PATH_ROOM];
    if (op->named && !overwrite && runs_find(op->tinker->options->runs, &op->path, folder) == ST_OK)
        FAIL(ST_INVALID, "\"path\": there is a checkpoint %s already, and \"overwrite\" is false",
             op->path.name);
out:
    op_refuse(op, st);
    op_submit(op, q);
}

static void save_named(struct tinker *t, struct http_request *q, enum run_part part)
{
    json_t *body = tinker_body(q);
    if (!body) return;
    struct op *op = op_of(t, q, body, run_save, saved);
    if (op) save(q, body, op, part);
    json_decref(body);
}

void handle_save_weights(void *tinker, struct http_request *q)
{
    save_named(tinker, q, RUN_WEIGHTS);
}

void handle_save_external(void *tinker, struct http_request *q)
{
    save_named(tinker, q, RUN_EXTERNAL_WEIGHTS);
}

void handle_save_for_sampler(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    json_t *body = tinker_body(q);
    if (!body) return;
    const bool named = json_has(body, "path");
    const int64_t number = named ? 0 : tinker_number(q, body, "sampling_session_seq_id", 0);
    struct op *op = number >= 0 ? op_of(t, q, body, run_save, named ? saved : snapshot) : NULL;
    if (op) {
        const char *kind = json_string_value(json_object_get(body, "kind"));
        op->inflight = kind && strcmp(kind, "inflight") == 0;
        snprintf(op->sampler, sizeof op->sampler, "%.120s:sample:%lld", op->model->session->id,
                 (long long)number);
        save(q, body, op, RUN_SAMPLER_WEIGHTS);
    }
    json_decref(body);
}
