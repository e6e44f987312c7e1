/* endpoints_training.c: what trains: models, gradients, steps. Loop's thread. */
#include "trainer/serve/tinker.h"
#include "common/model/adapter.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define GONE_MS 35000 // since a session was heard of: it sends a heartbeat every 10 s

// ---- a model's beginning ------------------------------------------------------------------------

static enum status run_begin(struct policy *policy, struct work *work)
{
    struct op *op = (struct op *)work;
    const char *runs = op->tinker->options->runs;
    char folder[PATH_ROOM];
    enum status st;
    if (op->named) CHECK(runs_find(runs, &op->path, folder));
    if (op->named) op->beginning.folder = folder;
    op->beginning.with_optimizer = op->with_optimizer;
    CHECK(runs_describe(runs, op->model->id, json_incref(op->description)));
    CHECK(policy_begin(policy, op->model->id, &op->beginning));
    st = policy_snapshot(policy, op->model->id, false, &op->snapshot);
out:
    op->beginning.folder = NULL;
    return st;
}

static void begun(struct op *op)
{
    future_done_json(op->future,
                     json_pack("{s:s, s:s}", "model_id", op->model->id, "type", "create_model"));
}

static void loaded(struct op *op)
{
    char path[RUN_PATH_ROOM];
    run_path_put(&op->path, path);
    op_note_live(op, false);
    future_done_json(op->future, json_pack("{s:s, s:s, s:s}", "path", path, "model_id",
                                           op->model->id, "type", "load_weights"));
}

static bool is_gone(const struct session *s)
{
    return s->ended || clock_ms_since(s->heard_ns) > GONE_MS;
}

// A full fine-tune goes with no other run.
static bool excludes(int rank, const struct training_run *m)
{
    return !m->over && (rank == 0 || m->rank == 0);
}

const struct training_run *tinker_excluding(const struct tinker *t, const struct session *but,
                                            int rank)
{
    const struct training_run *m = t->training_runs;
    while (m && (!excludes(rank, m) || m->session == but || is_gone(m->session))) m = m->next;
    return m;
}

// A client that lives keeps the weights from others. 409 is tried again.
static bool is_free(struct tinker *t, struct http_request *q, const struct session *s, int rank)
{
    const struct training_run *m = tinker_excluding(t, s, rank);
    if (!m) return true;
    log_info("session %s waits: %s is being trained, by a client that is alive", s->id, m->id);
    http_fail(
        q, 409,
        "%s is being trained, by a client that was heard of %.0f s ago: one full fine-tune "
        "is trained at a time (rank 0), and no adapter beside it; try again once that client has "
        "ended",
        m->id, clock_ms_since(m->session->heard_ns) / 1e3);
    return false;
}

static struct training_run *training_run_new(struct tinker *t, struct session *s, const char *id,
                                             const char *base, int rank)
{
    struct training_run *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    for (struct training_run *other = t->training_runs; other; other = other->next) {
        other->over = other->over || excludes(rank, other);
        sources_abandon(t->sources, other->id, is_gone(other->session));
    }
    snprintf(m->id, sizeof m->id, "%s", id);
    snprintf(m->base, sizeof m->base, "%.190s", base);
    m->rank = rank;
    m->session = s;
    m->next = t->training_runs;
    t->training_runs = m;
    return m;
}

// Of a training run, for its folder.
static json_t *describe(const struct beginning *b, const char *base, const json_t *body)
{
    return json_pack("{s:s, s:i, s:b, s:b, s:b, s:O?}", "base_model", base, "lora_rank", b->rank,
                     run_trains[0], b->attention, run_trains[1], b->mlp, run_trains[2], b->unembed,
                     "user_metadata", json_object_get(body, "user_metadata"));
}

// The first request of a model, which is begun from `path`, or new.
static void begin(struct tinker *t, struct http_request *q, const json_t *body,
                  const struct run_path *path, const struct beginning *b, const char *base)
{
    char id[ID_ROOM];
    json_t *description = describe(b, base, body);
    struct session *s = tinker_session(t, q, body);
    const int64_t number = s ? tinker_number(q, body, "model_seq_id", 0) : -1;
    const enum status st = number < 0 ? ST_OK : runs_check_description(description);
    if (st != ST_OK) http_fail_status(q, st);
    if (number < 0 || st != ST_OK) goto out;
    snprintf(id, sizeof id, "%.120s:train:%lld", s->id, (long long)number);
    struct training_run *m = tinker_find_run(t, id); // it was asked for before
    if (!m) {
        if (!tinker_takes_work(t, q) || !is_free(t, q, s, b->rank)) goto out;
        if (!(m = training_run_new(t, s, id, base, b->rank))) http_fail(q, 500, "out of memory");
    }
    struct op *op = op_new(t, q, m, 0, run_begin, path ? loaded : begun);
    if (!op) goto out;
    op->named = path != NULL;
    if (path) op->path = *path;
    op->beginning = *b;
    op->with_optimizer = b->with_optimizer;
    op->description = json_incref(description);
    op_submit(op, q);
out:
    json_decref(description);
}

// Full fine-tuning trains all of the model that --freeze leaves.
static enum status check_whole(const bool trains[3])
{
    for (int i = 0; i < 3; i++)
        if (!trains[i])
            return status_fail(ST_UNSUPPORTED,
                               "\"%s\" is false: of a whole model (rank 0) cw-trainer serve "
                               "--freeze says what is not trained",
                               run_trains[i]);
    return ST_OK;
}

// What of an adapter the client asks for.
static enum status read_lora(struct tinker *t, const json_t *body, struct beginning *b)
{
    const json_t *lora = json_object_get(body, "lora_config");
    bool trains[3] = {true, true, true};
    int64_t seed = 0;
    enum status st = ST_OK;
    *b = (struct beginning){.attention = true, .mlp = true, .unembed = true};
    if (!json_is_object(lora)) return ST_OK; // none: all is trained
    CHECK(json_get_int32("lora_config", lora, "rank", 0, ADAPTER_MAX_RANK, &b->rank));
    CHECK(json_get_int("lora_config", lora, "seed", INT64_MIN, INT64_MAX, &seed));
    for (int i = 0; i < 3; i++)
        CHECK(json_get_bool("lora_config", lora, run_trains[i], &trains[i]));
    b->seed = (uint64_t)seed;
    b->attention = trains[0];
    b->mlp = trains[1];
    b->unembed = trains[2];
    if (b->rank == 0) {
        st = check_whole(trains);
        goto out;
    }
    if (t->max_adapters == 0)
        FAIL(ST_UNSUPPORTED,
             "\"rank\" is %d, and the server holds no adapters: start cw-infer-server with "
             "--max-adapters N, or take rank 0 (lora_rank=0 in recipes), which trains the whole "
             "model and wants about a tenth of an adapter's learning rate",
             b->rank);
    if (!b->attention && !b->mlp && !b->unembed)
        FAIL(ST_INVALID,
             "\"train_attn\", \"train_mlp\" and \"train_unembed\" are false: nothing is "
             "left to train");
out:
    return st;
}

static enum status check_optimizer(const json_t *body, const char *key)
{
    const char *type = json_string_value(json_object_get(json_object_get(body, key), "type"));
    if (!type || strcmp(type, "adamw") == 0 || strcmp(type, "adam") == 0) return ST_OK;
    return status_fail(ST_UNSUPPORTED, "\"%s\" has the type \"%.40s\"; there is \"adamw\"", key,
                       type);
}

void handle_create_model(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    json_t *body = tinker_body(q);
    if (!body) return;
    const char *base = tinker_text(q, body, "base_model");
    struct beginning b;
    enum status st = base ? read_lora(t, body, &b) : ST_OK;
    if (st == ST_OK) st = check_optimizer(body, "optimizer_config");
    if (st != ST_OK)
        http_fail_status(q, st);
    else if (base && tinker_serves(t, q, base))
        begin(t, q, body, NULL, &b, base);
    json_decref(body);
}

static enum status run_load(struct policy *policy, struct work *work)
{
    struct op *op = (struct op *)work;
    char folder[PATH_ROOM];
    enum status st;
    CHECK(runs_find(op->tinker->options->runs, &op->path, folder));
    CHECK(policy_load(policy, op->model->id, folder, op->with_optimizer));
    st = policy_snapshot(policy, op->model->id, false, &op->snapshot);
out:
    return st;
}

static void load_into(struct tinker *t, struct http_request *q, const json_t *body,
                      const struct run_path *path, bool with_optimizer)
{
    struct op *op = op_of(t, q, body, run_load, loaded);
    if (!op) return;
    op->path = *path;
    op->with_optimizer = with_optimizer;
    op_submit(op, q);
}

// As the checkpoint's run began.
static struct beginning beginning_of(const json_t *run, bool with_optimizer)
{
    return (struct beginning){.rank = (int)json_integer_value(json_object_get(run, "lora_rank")),
                              .attention = json_is_true(json_object_get(run, run_trains[0])),
                              .mlp = json_is_true(json_object_get(run, run_trains[1])),
                              .unembed = json_is_true(json_object_get(run, run_trains[2])),
                              .with_optimizer = with_optimizer};
}

void handle_load_weights(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    struct run_path path;
    char folder[PATH_ROOM];
    bool with_optimizer = false;
    json_t *body = tinker_body(q), *run = NULL;
    if (!body) return;
    const char *text = tinker_text(q, body, "path");
    const char *base = json_string_value(json_object_get(body, "base_model"));
    enum status st = ST_OK;
    if (!text) goto out;
    CHECK(run_path_parse(text, &path));
    CHECK(runs_find(t->options->runs, &path, folder));
    CHECK(runs_training_run(t->options->runs, path.run, &run));
    CHECK(json_get_bool("request", body, "optimizer", &with_optimizer));
    CHECK(check_optimizer(body, "optimizer_config"));
    if (with_optimizer && path.part != RUN_WEIGHTS)
        FAIL(ST_INVALID, "%.200s holds no optimizer's state: take one of save_weights", text);
    if (json_has(body, "model_id")) {
        load_into(t, q, body, &path, with_optimizer);
    } else if (!base || tinker_serves(t, q, base)) {
        const struct beginning b = beginning_of(run, with_optimizer);
        begin(t, q, body, &path, &b,
              base ? base : json_string_value(json_object_get(run, "base_model")));
    }
out:
    if (st != ST_OK) http_fail_status(q, st);
    json_decref(run);
    json_decref(body);
}

void handle_get_info(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    json_t *body = tinker_body(q);
    if (!body) return;
    const char *id = tinker_text(q, body, "model_id");
    const struct training_run *m = id ? tinker_training_run(t, q, id) : NULL;
    if (m)
        http_reply_json(q, 200,
                        json_pack("{s:s, s:{s:s, s:s}, s:b, s:i, s:s, s:s}", "model_id", m->id,
                                  "model_data", "model_name", m->base, "tokenizer_id",
                                  t->model_folder, "is_lora", 1, "lora_rank", m->rank, "model_name",
                                  m->base, "type", "get_info"));
    json_decref(body);
}

// ---- gradients and steps ------------------------------------------------------------------------

static enum status run_forward_backward(struct policy *policy, struct work *work)
{
    struct op *op = (struct op *)work;
    return policy_forward_backward(policy, op->model->id, &op->request, &op->answer);
}

static void computed(struct op *op)
{
    future_done_protobuf(op->future, &op->answer);
}

void handle_forward_backward(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    struct http_body body;
    char *id = NULL;
    int64_t seq_id = -1;
    http_take_body(q, &body);
    const char *message = bytes_text(&body.bytes);
    enum status st = forward_backward_address(message, body.bytes.len, &id, &seq_id);
    if (st != ST_OK) {
        http_fail_status(q, st);
        goto out;
    }
    struct training_run *m = tinker_training_run(t, q, id);
    struct op *op = op_new(t, q, m, seq_id, run_forward_backward, computed);
    if (!op) goto out;
    op_refuse(op, forward_backward_parse(message, body.bytes.len, &t->limits, &op->request));
    op_submit(op, q);
out:
    http_body_release(&body);
    free(id);
}

static enum status run_optim_step(struct policy *policy, struct work *work)
{
    struct op *op = (struct op *)work;
    return policy_optim_step(policy, op->model->id, op->lr, &op->adamw, &op->norm);
}

static void stepped(struct op *op)
{
    future_done_json(op->future, json_pack("{s:{s:f}, s:s}", "metrics", "grad_norm:mean", op->norm,
                                           "type", "optim_step"));
}

static enum status read_adam(const json_t *body, struct op *op)
{
    const json_t *adam = json_object_get(body, "adam_params");
    struct optimizer_config *c = &op->adamw;
    enum status st = check_optimizer(body, "optimizer_params");
    if (!adam) adam = json_object_get(body, "optimizer_params");
    *c = (struct optimizer_config){.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-12};
    op->lr = 1e-4;
    if (st != ST_OK) return st;
    if (!json_is_object(adam))
        return status_fail(ST_INVALID, "request: \"adam_params\" is missing");
    CHECK(json_get_double("adam_params", adam, "learning_rate", 0, 10, &op->lr));
    CHECK(json_get_double("adam_params", adam, "beta1", 0, 0.9999999, &c->beta1));
    CHECK(json_get_double("adam_params", adam, "beta2", 0, 0.9999999, &c->beta2));
    CHECK(json_get_double("adam_params", adam, "eps", 0, 1, &c->eps));
    CHECK(json_get_double("adam_params", adam, "weight_decay", 0, 10, &c->weight_decay));
    CHECK(json_get_double("adam_params", adam, "grad_clip_norm", 0, 1e9, &c->max_grad_norm));
out:
    return st;
}

void handle_optim_step(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    json_t *body = tinker_body(q);
    if (!body) return;
    struct op *op = op_of(t, q, body, run_optim_step, stepped);
    if (op) {
        op_refuse(op, read_adam(body, op));
        op_submit(op, q);
    }
    json_decref(body);
}
