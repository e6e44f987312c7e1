/* endpoints_training.c: what trains: models, gradients, steps, and weights that are saved, to go on
 * from or to be sampled. Loop's thread, but for what performs it.
 *
 * A training run's requests carry numbers without gaps; the client may send them in another order
 * (the chunks of a large forward_backward do come so), so that one behind a gap is held until the
 * gap is filled. A number that was seen before is the same request again: it gets the same promise.
 * A gap that is not filled in time ends the run for its client: what is behind it cannot be done as
 * it was meant, and fails, then and later. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/clock.h"
#include "common/base/log.h"
#include "trainer/serve/tinker.h"
#include "common/model/adapter.h"
#include "trainer/learn/optimizer.h"

#include <string.h>

#define GONE_MS 35000 // since a session was heard of: it sends a heartbeat every 10 s

struct training_request {
    struct tinker_request request;
    struct forward_backward data;
    double lr;
    struct optimizer_config adamw;
    struct run_path path;       // its text is "": none
    char sampler[ID_ROOM];      // that is made of the snapshot then; "": none
    struct beginning beginning; // of a run, but for its folder
    json_t *description;        // likewise
    struct snapshot snapshot;   // of the weights, afterwards
};
// Main thread: does it, and sets the response.
typedef enum status (*training_perform)(struct trained_model *m, struct tinker_request *r);

// ---- requests of a training run -----------------------------------------------------------------

static void release(struct tinker_request *request)
{
    struct training_request *r = (struct training_request *)request;
    forward_backward_release(&r->data);
    json_decref(r->description);
    r->description = NULL;
}

static void deliver(struct inbox_message *message)
{
    struct training_request *r = (struct training_request *)message;
    struct owner *run = r->request.owner, *s;
    enum status st = r->request.status;
    run->n_requests--;
    if (st != ST_OK && r->request.seq_id == 0) run->over = true; // its beginning failed
    if (st == ST_OK && r->sampler[0]) {
        st = tinker_new_sampler(run->session, r->sampler, run->base, &r->snapshot, &s);
        if (st != ST_OK) request_fail(&r->request, st);
    }
    request_end(&r->request);
}

static void prepare(struct tinker_request *r, training_perform perform)
{
    r->message.deliver = deliver;
    r->perform = perform;
    r->release = release;
}

// requests_take() of one.
static enum status new_request(const struct call *c, struct owner *run, int64_t seq_id,
                               training_perform perform, struct training_request **ret)
{
    struct tinker_request *r;
    enum status st = requests_take(run, c->q, sizeof **ret, seq_id, &r);
    if (st != ST_OK) return st;
    if (r) prepare(r, perform);
    *ret = (struct training_request *)r;
    return ST_OK;
}

// Of the run and the number that the call names.
static enum status request_of(const struct call *c, training_perform perform,
                              struct training_request **ret)
{
    struct owner *run;
    enum status st = tinker_find(c->tinker, TRAINING_RUN, c->model_id, &run);
    if (st == ST_OK && c->seq_id < 1)
        st = status_fail(ST_INVALID, "request: \"seq_id\" must be there, and at least 1");
    return st == ST_OK ? new_request(c, run, c->seq_id, perform, ret) : st;
}

// All that is behind the gap fails, and what comes later.
static void fail_held(struct owner *run)
{
    while (run->missed && run->held) {
        struct tinker_request *r = run->held;
        run->held = r->next;
        run->n_requests--;
        request_fail(r, status_fail(ST_INVALID,
                                    "request %lld of %s cannot be done: request %lld, which goes "
                                    "before it, did not come within --gap-timeout. Numbers "
                                    "(seq_id) of a training client have no gaps; make another one, "
                                    "from its last checkpoint "
                                    "(create_training_client_from_state_with_optimizer)",
                                    (long long)r->seq_id, run->id, (long long)run->missed));
        request_end(r);
    }
}

void training_requests_sweep(struct tinker *t)
{
    for (struct owner *run = NULL; (run = owner_next(t, TRAINING_RUN, run));) {
        if (!run->held || clock_ms_since(run->held_ns) < t->options->gap_timeout * 1e3) continue;
        run->missed = run->next_seq;
        log_warn("%s: request %lld did not come, and what is behind it fails", run->id,
                 (long long)run->missed);
        fail_held(run);
    }
}

static bool is_gone(const struct owner *s)
{
    return s->ended || clock_ms_since(s->heard_ns) > GONE_MS;
}

void tinker_note_gone(const struct tinker *t)
{
    for (struct owner *run = NULL; (run = owner_next(t, TRAINING_RUN, run));)
        snapshots_abandon(t->model->snapshots, run->id, is_gone(run->session));
}

// Takes a request over, and lets those go that have nothing missing before them: of a run that was
// given up, the missing one itself alone, should it come after all. One that is wrong (st is not
// ST_OK) is one that came: it has its turn, and a response that says so.
static void submit(struct training_request *r, const struct call *c, enum status st)
{
    struct owner *run = r->request.owner;
    struct tinker_request **link = &run->held, *next;
    if (st != ST_OK) request_fail(&r->request, st);
    if (!run->held) run->held_ns = clock_now_ns();
    tinker_note_gone(run->tinker);
    run->n_requests++;
    while (*link && (*link)->seq_id < r->request.seq_id) link = &(*link)->next;
    r->request.next = *link;
    *link = &r->request;
    while ((next = run->held) && next->seq_id <= run->next_seq) {
        run->held = next->next;
        run->next_seq = next->seq_id + 1;
        request_queue_append(&run->tinker->queue, next);
        run->held_ns = clock_now_ns();
    }
    fail_held(run);
    request_promise(&r->request, c->q, json_pack("{s:s}", "model_id", run->id));
}

static enum status perform_ending(struct trained_model *m, struct tinker_request *request)
{
    trained_end(m, request->owner->id);
    return ST_OK;
}

void tinker_end_run(struct owner *run)
{
    struct tinker_request *r; // which nobody asks for
    run->over = true;
    // without memory its slot goes to whoever wants it first
    if (requests_add(run, sizeof(struct training_request), -1, &r) != ST_OK) return;
    prepare(r, perform_ending);
    run->n_requests++;
    request_queue_append(&run->tinker->queue, r);
}

// ---- a model's beginning ------------------------------------------------------------------------

// The weights become the checkpoint's at its path, where there is one, of a new run or of one that
// is there.
static enum status perform_begin(struct trained_model *m, struct tinker_request *request)
{
    struct training_request *r = (struct training_request *)request;
    const char *runs = request->owner->tinker->model->runs, *run = request->owner->id;
    char folder[PATH_ROOM];
    enum status st;
    const bool named = r->path.text[0];
    if (named) CHECK(runs_find(runs, &r->path, folder));
    r->beginning.folder = named ? folder : NULL;
    if (r->description) {
        CHECK(runs_describe(runs, run, r->description));
        CHECK(trained_begin(m, run, &r->beginning));
    } else {
        CHECK(trained_load(m, run, &r->beginning));
    }
    if (!named)
        return request_set_json(request,
                                json_pack("{s:s, s:s}", "model_id", run, "type", "create_model"));
    CHECK(trained_snapshot(m, run, false, &r->snapshot));
    snapshots_set_path(request->owner->tinker->model->snapshots, r->path.text, &r->snapshot, false);
    st = request_set_json(request, json_pack("{s:s, s:s, s:s}", "path", r->path.text, "model_id",
                                             run, "type", "load_weights"));
out:
    return st;
}

// A full fine-tune goes with no other run.
static bool excludes(int rank, const struct owner *run)
{
    return !run->over && (rank == 0 || run->rank == 0);
}

const struct owner *tinker_excluding(const struct tinker *t, const struct owner *but, int rank)
{
    for (struct owner *run = NULL; (run = owner_next(t, TRAINING_RUN, run));)
        if (excludes(rank, run) && run->session != but && !is_gone(run->session)) return run;
    return NULL;
}

// A new one of the session's; NULL where a client that lives keeps the weights from others. That
// answer, 409, is tried again.
static enum status begin_run(const struct call *c, struct owner *session, const char *id,
                             const char *base, int rank, struct owner **ret)
{
    struct tinker *t = c->tinker;
    const struct owner *run = tinker_excluding(t, session, rank);
    enum status st;
    *ret = NULL;
    CHECK(tinker_takes_work(t));
    if (run) {
        log_info("session %s waits: %s is being trained, by a client that is alive", session->id,
                 run->id);
        http_fail(c->q, 409,
                  "%s is being trained, by a client that was heard of %.0f s ago: one full "
                  "fine-tune is trained at a time (rank 0), and no adapter beside it; try again "
                  "once that client has ended",
                  run->id, clock_ms_since(run->session->heard_ns) / 1e3);
        goto out;
    }
    for (struct owner *other = NULL; (other = owner_next(t, TRAINING_RUN, other));)
        other->over = other->over || excludes(rank, other);
    CHECK(owner_add(t, TRAINING_RUN, session, id, ret));
    snprintf((*ret)->base, sizeof(*ret)->base, "%.190s", base);
    (*ret)->rank = rank;
out:
    return st;
}

// The first request of a model, which is begun from `path`, or new.
static enum status begin(const struct call *c, const struct run_path *path,
                         const struct beginning *b, const char *base)
{
    struct tinker *t = c->tinker;
    char id[ID_ROOM];
    struct training_request *r;
    struct owner *s;
    enum status st;
    // for the run's folder
    json_t *description = json_pack("{s:s, s:I, s:b, s:b, s:b, s:O?}", "base_model", base,
                                    "lora_rank", (json_int_t)b->rank, run_trains[0], b->trains[0],
                                    run_trains[1], b->trains[1], run_trains[2], b->trains[2],
                                    "user_metadata", json_object_get(c->body, "user_metadata"));
    if (!description) FAIL(ST_NO_MEMORY, "out of memory");
    if (!c->session_id || c->model_number < 0)
        FAIL(ST_INVALID, "request: \"%s\" is missing",
             c->session_id ? "model_seq_id" : "session_id");
    CHECK(tinker_find(t, SESSION, c->session_id, &s));
    CHECK(runs_check_description(description));
    snprintf(id, sizeof id, "%.120s:train:%lld", s->id, (long long)c->model_number);
    struct owner *run = owner_find(t, TRAINING_RUN, id); // it was asked for before
    if (!run) CHECK(begin_run(c, s, id, base, (int)b->rank, &run));
    if (!run) goto out;
    CHECK(new_request(c, run, 0, perform_begin, &r));
    if (!r) goto out;
    if (path) r->path = *path;
    r->beginning = *b;
    r->description = json_incref(description);
    submit(r, c, ST_OK);
out:
    json_decref(description);
    return st;
}

static enum status check_optimizer(const json_t *optimizer, const char *name)
{
    const char *type = json_string_value(json_object_get(optimizer, "type"));
    if (!type || strcmp(type, "adamw") == 0 || strcmp(type, "adam") == 0) return ST_OK;
    return status_fail(ST_UNSUPPORTED, "\"%s\" has the type \"%s\"; there is \"adamw\"", name,
                       CUT(type, 40));
}

#define FIELDS_OF struct beginning
static const struct json_field lora_fields[] = {
    FIELD_INT("rank", rank, 0, ADAPTER_MAX_RANK, 0),
    FIELD_INT("seed", seed, INT64_MIN, INT64_MAX, 0),
    FIELD_BOOL("train_attn", trains[RUN_ATTENTION], true),
    FIELD_BOOL("train_mlp", trains[RUN_MLP], true),
    FIELD_BOOL("train_unembed", trains[RUN_UNEMBED], true),
    {0},
};
#undef FIELDS_OF

// Full fine-tuning trains all of the model that --freeze leaves.
static enum status check_lora(const struct beginning *b, int max_adapters)
{
    for (int i = 0; i < RUN_TRAINS && b->rank == 0; i++)
        if (!b->trains[i])
            return status_fail(ST_UNSUPPORTED,
                               "\"%s\" is false: of a whole model (rank 0) cw-trainer serve "
                               "--freeze says what is not trained",
                               run_trains[i]);
    if (b->rank > 0 && max_adapters == 0)
        return status_fail(
            ST_UNSUPPORTED,
            "\"rank\" is %d, and the server holds no adapters: start cw-infer-server with "
            "--max-adapters N, or take rank 0 (lora_rank=0 in recipes), which trains the whole "
            "model and wants about a tenth of an adapter's learning rate",
            (int)b->rank);
    if (!b->trains[RUN_ATTENTION] && !b->trains[RUN_MLP] && !b->trains[RUN_UNEMBED])
        return status_fail(ST_INVALID,
                           "\"train_attn\", \"train_mlp\" and \"train_unembed\" are false: nothing "
                           "is left to train");
    return ST_OK;
}

static enum status create_model(const struct call *c)
{
    struct beginning b = {0};
    enum status st;
    // none, or no object: all is trained
    CHECK(json_read_fields("lora_config", json_is_object(c->lora) ? c->lora : NULL, lora_fields,
                           NULL, &b));
    CHECK(check_lora(&b, c->tinker->model->max_adapters));
    CHECK(check_optimizer(c->optimizer, "optimizer_config"));
    CHECK(tinker_find_model(c->tinker, c->base_model, true, NULL));
    st = begin(c, NULL, &b, c->base_model);
out:
    return st;
}

// A model is begun as the checkpoint's run began, or the weights of one that is there become the
// checkpoint's.
static enum status load_weights(const struct call *c)
{
    const char *runs = c->tinker->model->runs;
    struct run_path path;
    char folder[PATH_ROOM];
    struct training_request *r;
    json_t *run = NULL;
    enum status st;
    CHECK(runs_find_path(runs, c->path, &path, folder));
    CHECK(runs_training_run(runs, path.run, &run));
    CHECK(check_optimizer(c->optimizer, "optimizer_config"));
    if (c->with_optimizer && path.kind != RUN_WEIGHTS)
        FAIL(ST_INVALID, "%s holds no optimizer's state: take one of save_weights",
             CUT(c->path, 200));
    const char *base =
        c->base_model ? c->base_model : json_string_value(json_object_get(run, "base_model"));
    struct beginning b = {.with_optimizer = c->with_optimizer};
    CHECK(json_read_fields("run.json", run, lora_fields, NULL, &b));
    b.rank = json_integer_value(json_object_get(run, "lora_rank"));
    if (!c->model_id) {
        if (c->base_model) CHECK(tinker_find_model(c->tinker, base, true, NULL));
        st = begin(c, &path, &b, base);
        goto out;
    }
    CHECK(request_of(c, perform_begin, &r));
    if (!r) goto out;
    r->path = path;
    r->beginning = b;
    submit(r, c, ST_OK);
out:
    json_decref(run);
    return st;
}

static enum status get_info(const struct call *c)
{
    struct owner *run;
    enum status st = tinker_find(c->tinker, TRAINING_RUN, c->model_id, &run);
    return st == ST_OK
               ? tinker_reply(c, json_pack("{s:s, s:{s:s, s:s}, s:b, s:i, s:s, s:s}", "model_id",
                                           run->id, "model_data", "model_name", run->base,
                                           "tokenizer_id", c->tinker->model->folder, "is_lora", 1,
                                           "lora_rank", run->rank, "model_name", run->base, "type",
                                           "get_info"))
               : st;
}

// ---- gradients and steps ------------------------------------------------------------------------

static enum status perform_forward_backward(struct trained_model *m, struct tinker_request *request)
{
    struct training_request *r = (struct training_request *)request;
    request->is_protobuf = true;
    return trained_forward_backward(m, request->owner->id, &r->data, &request->response);
}

static enum status forward_backward(const struct call *c)
{
    struct training_request *r = NULL;
    struct owner *run;
    struct http_body body;
    struct forward_backward data;
    enum status st;
    http_take_body(c->q, &body);
    // Whole, as it comes once in general: where it was answered before, or its run is not there,
    // that was in vain.
    const enum status parsed = forward_backward_parse(bytes_text(&body.bytes), body.bytes.len,
                                                      &c->tinker->model->limits, &data);
    http_body_release(&body);
    if (!data.seq_id) return parsed;
    CHECK(tinker_find(c->tinker, TRAINING_RUN, data.model_id, &run));
    CHECK(new_request(c, run, data.seq_id, perform_forward_backward, &r));
    if (!r) goto out;
    r->data = data;
    submit(r, c, parsed);
    return ST_OK;
out:
    forward_backward_release(&data);
    return st;
}

static enum status perform_optim_step(struct trained_model *m, struct tinker_request *request)
{
    const struct training_request *r = (struct training_request *)request;
    double norm = 0;
    enum status st = trained_optim_step(m, request->owner->id, r->lr, &r->adamw, &norm);
    return st == ST_OK
               ? request_set_json(request, json_pack("{s:{s:f}, s:s}", "metrics", "grad_norm:mean",
                                                     norm, "type", "optim_step"))
               : st;
}

#define FIELDS_OF struct training_request
static const struct json_field adam_fields[] = {
    FIELD_REAL("learning_rate", lr, 0, 10, 1e-4),
    FIELD_REAL("beta1", adamw.beta1, 0, 0.9999999, 0.9),
    FIELD_REAL("beta2", adamw.beta2, 0, 0.9999999, 0.95),
    FIELD_REAL("eps", adamw.eps, 0, 1, 1e-12),
    FIELD_REAL("weight_decay", adamw.weight_decay, 0, 10, 0),
    FIELD_REAL("grad_clip_norm", adamw.max_grad_norm, 0, 1e9, 0),
    {0},
};
#undef FIELDS_OF

static enum status optim_step(const struct call *c)
{
    const json_t *adam = json_object_get(c->body, "adam_params"),
                 *optimizer = json_object_get(c->body, "optimizer_params");
    struct training_request *r;
    enum status st = request_of(c, perform_optim_step, &r);
    if (st != ST_OK || !r) return st;
    st = check_optimizer(optimizer, "optimizer_params");
    if (!adam) adam = optimizer;
    if (st == ST_OK && !json_is_object(adam))
        st = status_fail(ST_INVALID, "request: \"adam_params\" is missing");
    submit(r, c, st == ST_OK ? json_read_fields("adam_params", adam, adam_fields, NULL, r) : st);
    return ST_OK;
}

// ---- saving -------------------------------------------------------------------------------------

void tinker_warn_ttl(struct tinker *t, const char *what)
{
    if (t->ttl_warned) return;
    t->ttl_warned = true;
    log_warn("%s: \"ttl_seconds\" has no effect: checkpoints stay until they are deleted", what);
}

static enum status perform_save(struct trained_model *m, struct tinker_request *request)
{
    static const char *const types[RUN_KINDS] = {"save_weights", "save_weights_for_sampler",
                                                 "save_weights_external"};
    struct training_request *r = (struct training_request *)request;
    const struct tinker *t = request->owner->tinker;
    char folder[PATH_ROOM];
    enum status st;
    if (!r->path.text[0]) {
        const bool inflight = r->snapshot.inflight;
        CHECK(trained_snapshot(m, request->owner->id, !inflight && !t->options->inflight,
                               &r->snapshot));
        r->snapshot.base = r->snapshot.base && !inflight;
        return request_set_json(request, json_pack("{s:s, s:s}", "sampling_session_id", r->sampler,
                                                   "type", "save_weights_for_sampler"));
    }
    CHECK(runs_folder(t->model->runs, &r->path, folder));
    CHECK(trained_save(m, request->owner->id, folder, r->path.kind == RUN_WEIGHTS));
    snapshots_forget(t->model->snapshots, r->path.text); // what was there before
    CHECK(trained_snapshot(m, request->owner->id, false, &r->snapshot));
    snapshots_set_path(t->model->snapshots, r->path.text, &r->snapshot, true);
    st = request_set_json(
        request, json_pack("{s:s, s:s}", "path", r->path.text, "type", types[r->path.kind]));
out:
    return st;
}

static enum status check_save(const struct call *c, struct training_request *r)
{
    const char *runs = c->tinker->model->runs;
    char folder[PATH_ROOM];
    if (c->path && !run_name_is_good(c->path))
        return status_fail(ST_INVALID,
                           "\"path\" is \"%s\"; it must be a name of letters, digits and - _ . "
                           "that a folder can have, of at most %d bytes",
                           CUT(c->path, 100), RUN_NAME_ROOM - 1);
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
    run_path_set(&r->path, r->request.owner->id, (enum run_kind)c->which, c->path);
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
    CHECK(request_of(c, perform_save, &r));
    if (!r) return ST_OK;
    r->snapshot.inflight = !named && c->kind && strcmp(c->kind, "inflight") == 0;
    if (!named)
        snprintf(r->sampler, sizeof r->sampler, "%.120s:sample:%lld", r->request.owner->session->id,
                 (long long)c->sampler_number);
    submit(r, c, c->status == ST_OK ? check_save(c, r) : c->status);
    return ST_OK;
out:
    return st;
}

const struct endpoint training_endpoints[] = {
    {"POST", "/api/v1/create_model", create_model, "base_model session_id model_seq_id",
     HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/load_weights", load_weights, "path", HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/get_info", get_info, "model_id", HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/forward_backward", forward_backward, NULL, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/optim_step", optim_step, "model_id seq_id", HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/save_weights", save, "model_id seq_id", HTTP_NEEDS_KEY, RUN_WEIGHTS},
    {"POST", "/api/v1/save_weights_for_sampler", save, "model_id seq_id", HTTP_NEEDS_KEY,
     RUN_SAMPLER_WEIGHTS},
    {"POST", "/api/v1/save_weights_external", save, "model_id seq_id", HTTP_NEEDS_KEY,
     RUN_EXTERNAL_WEIGHTS},
    {0},
};
