/* endpoints_sampling.c: snapshots, and samples of them. Loop's thread.
 *
 * Nothing is copied for a snapshot: it is a weight version, and is sampled from the run's weights
 * as long as these are of that version. Whether they were is known for certain once the samples are
 * there, since each token comes with the version that sampled it. An older one of an adapter is
 * sampled from the copy that is kept of it, one that was saved from a copy that is loaded for it; a
 * whole model that was saved is loaded in place, if nobody trains what is there. What is left is
 * stale: an error, unless --snapshots inflight, or the client's own kind "inflight", lets newer
 * weights answer.
 *
 * Samples come by /v1/rollouts on the server's Unix socket, thousands at once over few connections.
 * Those that are sampled alike (temperature, length, stops) and wait at the same time, as all do
 * that came in one turn of the loop, go as one request of many groups. What is refused as a whole
 * is sent again one by one, so that one bad request fails no other. Whatever ends is posted to the
 * inbox, and delivered in the loop's next turn. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/serve/tinker.h"
#include "bridge/control.h"
#include "bridge/control_info.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/protobuf.h"
#include "common/http/http_client.h"
#include "trainer/rollout/rollout.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_TRIES   3
#define MAX_GROUPS  512 // of one request to the server
#define MAX_SAMPLES 2048

struct flight { // one request to the server
    struct flight *next;
    struct tinker *tinker;
    struct rollout_servers servers; // the one
    struct rollout_pull pull;
    struct rollout_ask ask;                      // as rollouts are asked for
    struct sample_request *requests[MAX_GROUPS]; // (n); NULL: it came back
    int n, n_left, samples;
    const struct model_name *elsewhere; // whose server is asked; NULL: this one's
    char name[40];                      // by which the server knows it
    struct http_transfer *stop;         // that tells it what was cancelled of it; NULL: none
};

static void come_back(struct sample_request *r, enum status st)
{
    if (st != ST_OK) request_fail(&r->request, st);
    inbox_post(&r->request.owner->tinker->inbox, &r->request.message);
}

static void sample(struct sample_request *r); // which ends in the inbox

static enum status fail_cancelled(void)
{
    return status_fail(ST_CANCELLED, "its client cancelled it (cancel_future)");
}

// ---- what arrives -------------------------------------------------------------------------------

static enum status on_line(void *context, const char *text, size_t len)
{
    struct flight *f = context;
    json_t *line = NULL;
    enum status st;
    CHECK(json_parse("/v1/rollouts", text, len, &line));
    CHECK(rollout_check_line("/v1/rollouts", line));
    const json_int_t group = json_integer_value(json_object_get(line, "group_id")),
                     sample = json_integer_value(json_object_get(line, "sample"));
    if (group < 0 || group >= f->n || !f->requests[group] || sample < 0 ||
        sample >= f->requests[group]->n || f->requests[group]->samples[sample].text)
        FAIL(ST_FORMAT, "/v1/rollouts: a sample that was not asked for");
    struct sample_request *r = f->requests[group];
    CHECK(sample_request_read(r, (int)sample, line));
    if (++r->n_done < r->n) goto out;
    f->requests[group] = NULL;
    f->n_left--;
    come_back(r, ST_OK);
out:
    json_decref(line);
    return st;
}

// ---- requests to the server ---------------------------------------------------------------------

static enum status ask(struct flight *f)
{
    const struct sample_request *any = f->requests[0];
    json_t *groups = json_array(), *body;
    enum status st = ST_OK;
    for (int i = 0; i < f->n; i++) {
        const struct sample_request *r = f->requests[i];
        json_t *group = json_copy(r->group);
        json_object_set_new(group, "id", json_integer(i));
        json_object_set_new(group, "prompt_token_ids", json_ids(r->prompt.ids, r->prompt.n));
        json_array_append_new(groups, group);
    }
    body = json_pack("{s:o, s:O, s:s*, s:s}", "groups", groups, "sampling", any->sampling, "model",
                     any->use.adapter[0] ? any->use.adapter : NULL, "request_id", f->name);
    if (!body) FAIL(ST_NO_MEMORY, "out of memory");
    const struct http_call call = {.path = "/v1/rollouts",
                                   .body = body,
                                   .timeout_ms = clock_ms_until(f->pull.deadline) + 1,
                                   .on_line = on_line,
                                   .context = f};
    st = rollout_ask(&f->pull, &f->ask, &call);
out:
    json_decref(body);
    return st;
}

// All that has not come back yet does now; of a request that was refused as a whole each goes
// alone.
static void give_up(struct flight *f, enum status st)
{
    struct status_kept failure;
    if (f->elsewhere) status_context(st, "%s at %s", f->elsewhere->name, f->elsewhere->address);
    status_keep(&failure, st);
    for (int i = 0; i < f->n; i++) {
        struct sample_request *r = f->requests[i];
        if (!r) continue;
        const bool again = st == ST_INVALID && f->n_left > 1 && !r->alone;
        r->alone = true;
        if (again) {
            sample_request_clear(r);
            sample(r);
        } else {
            come_back(r, status_recall(&failure));
        }
    }
}

// True where it is over.
static bool advance(struct flight *f)
{
    enum status st;
    if (f->n == 0) return true; // all was cancelled
    if (f->ask.transfer) {
        if (!rollout_finish(&f->pull, &f->ask, NULL, &st)) return false;
        if (st == ST_OK && f->n_left > 0)
            st = status_fail(ST_PEER_GONE, "the server ended the response before every sample");
        if (st == ST_OK) return true;
        st = rollout_again(&f->pull, &f->ask, f->n_left < f->n, st);
    } else {
        st = rollout_choose(&f->pull, &f->ask) ? ask(f) : ST_OK;
    }
    if (st == ST_OK) return false;
    give_up(f, st);
    return true;
}

// ---- what waits ---------------------------------------------------------------------------------

static void sample(struct sample_request *r)
{
    struct tinker *t = r->request.owner->tinker;
    struct flight *f = t->flights; // of those that wait to be sent, one that it can go with
    while (f &&
           (f->ask.transfer || f->n == 0 || r->alone || f->requests[0]->alone ||
            f->n >= MAX_GROUPS || f->samples + r->n > MAX_SAMPLES ||
            strcmp(f->requests[0]->use.adapter, r->use.adapter) != 0 ||
            f->elsewhere != r->use.elsewhere || !json_equal(f->requests[0]->sampling, r->sampling)))
        f = f->next;
    if (!f) {
        if (!(f = calloc(1, sizeof *f))) {
            come_back(r, status_fail(ST_NO_MEMORY, "out of memory"));
            return;
        }
        f->tinker = t;
        snprintf(f->name, sizeof f->name, "tinker-%d-%" PRIx64, (int)getpid(), clock_now_ns());
        f->servers = rollout_servers_of(t->server, t->model->control, t->model->limits.vocab,
                                        t->model->sample_timeout);
        f->elsewhere = r->use.elsewhere;
        if (f->elsewhere) f->servers.servers[0].address = f->elsewhere->address;
        f->pull = rollout_pull_begin(&f->servers, NULL);
        f->ask.server = -1;
        f->next = t->flights;
        t->flights = f;
    }
    f->requests[f->n++] = r;
    f->n_left++;
    f->samples += r->n;
}

void tinker_poll_samples(struct tinker *t, int ms)
{
    const struct pollfd loop = {.fd = uv_backend_fd(&t->loop), .events = POLLIN};
    for (struct flight *f = t->flights, *next; f; f = next) {
        next = f->next;
        if (!advance(f)) continue;
        LIST_REMOVE(t->flights, f); // before it may stand by now what goes alone
        http_cancel(f->stop);
        free(f);
    }
    http_poll_with(t->server, &loop, 1, ms);
}

// What waits here ends here. What the server has it ends where it is: it is told each time until
// that came back, since it may not have read the request yet.
void tinker_end_cancelled(struct tinker *t)
{
    for (struct flight *f = t->flights; f; f = f->next) {
        struct bytes path = BYTES_INIT;
        int n = 0;
        bytes_printf(&path, "/v1/rollouts/stop?request_id=%s&group_ids=[", f->name);
        for (int i = f->n; i-- > 0;) {
            struct sample_request *r = f->requests[i];
            if (!r || !r->cancelled) continue;
            if (f->ask.transfer) {
                bytes_printf(&path, "%s%d", n++ ? "," : "", i);
                continue;
            }
            f->requests[i] = f->requests[--f->n];
            f->n_left--;
            f->samples -= r->n;
            come_back(r, fail_cancelled());
        }
        bytes_puts(&path, "]");
        http_cancel(f->stop);
        f->stop = NULL;
        const struct http_call call = {.server = f->servers.servers[0].address,
                                       .path = bytes_text(&path),
                                       .post = true,
                                       .timeout_ms = REQUEST_HOLD_MS};
        if (n > 0) http_submit(t->server, &call, &f->stop);
        bytes_release(&path);
    }
}

void tinker_end_samples(struct tinker *t)
{
    for (struct flight *f; (f = t->flights);) {
        rollout_cancel(&f->pull, &f->ask);
        give_up(f, status_fail(ST_CANCELLED, "the server of the Tinker API is stopping"));
        t->flights = f->next;
        http_cancel(f->stop);
        free(f);
    }
}

// ---- snapshots ----------------------------------------------------------------------------------

enum status tinker_new_sampler(struct owner *session, const char *id, const char *base,
                               const struct snapshot *which, struct owner **ret)
{
    struct owner *o = owner_find(session->tinker, SAMPLER, id);
    enum status st = o ? ST_OK : owner_add(session->tinker, SAMPLER, session, id, &o);
    if (st != ST_OK) return st;
    snprintf(o->base, sizeof o->base, "%s", base);
    o->snapshot = *which;
    o->snapshot.inflight = which->inflight || o->tinker->options->inflight;
    *ret = o;
    return ST_OK;
}

// sampler: that the snapshot is of.
static enum status fail_stale(const struct owner *sampler, const struct snapshot *s)
{
    struct snapshots *all = sampler->tinker->model->snapshots;
    const uint64_t live = snapshots_version(all, s->run);
    const char *what = s->path[0] ? s->path : sampler->id;
    struct snapshot now;
    struct bytes kept = BYTES_INIT;
    snapshots_of_path(all, s->path, &now);
    if (s->path[0] && s->saves != now.saves)
        return status_fail(ST_MISMATCH,
                           "%s was saved again since this sampling client was made: make another "
                           "one, of what is there now",
                           what);
    if (s->version == 0 || (s->path[0] && !s->run[0]))
        return status_fail(ST_MISMATCH,
                           "%s is no snapshot of the live weights (version %" PRIu64
                           "), which a client trains: sample it once that one has finished, or "
                           "load it as a training client's weights (load_weights), or start a "
                           "cw-infer-server of its own on that folder",
                           what, live);
    if (!s->run[0])
        return status_fail(
            ST_MISMATCH,
            "%s is the snapshot of weight version %" PRIu64
            ", and the live weights are version %" PRIu64
            ": nothing was copied for it. Take a new one after each optim_step, load a saved "
            "checkpoint (load_weights), or start cw-trainer serve with --snapshots inflight, where "
            "newer weights answer for older ones%s",
            what, s->version, live,
            s->base ? "; a snapshot of the beginning, as this is, stays where the "
                      "cw-infer-server has --tandem-model with the model's own folder"
                    : "");
    if (live == 0)
        return status_fail(ST_MISMATCH,
                           "%s is a snapshot of %s, which has ended, and its adapter is not on the "
                           "server any more: sample a path that it saved",
                           what, s->run);
    snapshots_kept(all, s->run, &kept);
    status_fail(ST_MISMATCH,
                "%s is the snapshot of weight version %" PRIu64 " of %s, which is gone: it is at "
                "version %" PRIu64 ", and older ones that are kept are %s. Save those by name that "
                "are needed for long (save_weights_for_sampler), or start cw-trainer serve with a "
                "larger --keep-snapshots (each takes a place of the server's --max-adapters), or "
                "with --snapshots inflight, where newer weights answer "
                "for older ones",
                what, s->version, s->run, live, bytes_text(&kept));
    bytes_release(&kept);
    return ST_MISMATCH;
}

// Version 0 is the model folder: the live weights, as long as the model itself was not trained, or
// the frozen model.
static enum status find_base(struct tinker *t, struct snapshot *ret)
{
    struct control_info f;
    *ret = (struct snapshot){.version = snapshots_base(t->model->snapshots), .base = true};
    if (snapshots_use(t->model->snapshots, ret, NULL)) return ST_OK;
    if (t->options->inflight) ret->version = snapshots_version(t->model->snapshots, "");
    if (ret->version) return ST_OK;
    control_info(t->model->control, &f);
    return status_fail(ST_MISMATCH,
                       "the base model was trained on since it was loaded (%" PRIu64
                       " updates), and no copy of it is kept: start the cw-infer-server with "
                       "--tandem-model %s, or "
                       "another one on that folder, for a reference or a teacher",
                       f.updates, t->model->folder);
}

// A whole model that was saved takes the place of what is there, as the model of the folder does
// beneath an adapter, if no living client trains that.
static enum status check_stale(const struct owner *sampler, const struct snapshot *s)
{
    const struct tinker *t = sampler->tinker;
    char folder[PATH_ROOM];
    struct run_path path;
    struct snapshot now;
    if (snapshots_use(t->model->snapshots, s, NULL)) return ST_OK;
    snapshots_of_path(t->model->snapshots, s->path, &now);
    if (s->path[0] && now.saves == s->saves &&
        runs_find_path(t->model->runs, s->path, &path, folder) == ST_OK &&
        !tinker_excluding(t, NULL, trained_is_adapter(folder) ? 1 : 0))
        return ST_OK;
    return fail_stale(sampler, s);
}

static enum status create_sampler(const struct call *c)
{
    struct tinker *t = c->tinker;
    const char *base = c->base_model ? c->base_model : t->names[0].name;
    const struct model_name *name = t->names;
    char id[ID_ROOM], folder[PATH_ROOM];
    struct run_path path;
    struct snapshot snapshot;
    struct owner *session, *s;
    enum status st;
    CHECK(tinker_find(t, SESSION, c->session_id, &session));
    if (!c->model_path && !c->base_model)
        FAIL(ST_INVALID, "request: \"base_model\" or \"model_path\" is missing");
    if (c->base_model) CHECK(tinker_find_model(t, base, false, &name));
    if (c->model_path) {
        CHECK(runs_find_path(t->model->runs, c->model_path, &path, folder));
        snapshots_of_path(t->model->snapshots, c->model_path, &snapshot);
    } else if (name->address) {
        snapshot = (struct snapshot){.elsewhere = name};
    } else {
        CHECK(find_base(t, &snapshot));
    }
    snprintf(id, sizeof id, "%.120s:sample:%" PRId64, session->id, c->sampler_number);
    CHECK(tinker_new_sampler(session, id, base, &snapshot, &s));
    CHECK(check_stale(s, &s->snapshot));
    st = tinker_reply(
        c, json_pack("{s:s, s:s}", "sampling_session_id", id, "type", "create_sampling_session"));
out:
    return st;
}

static enum status get_sampler(const struct call *c)
{
    struct owner *s;
    enum status st = tinker_find(c->tinker, SAMPLER, http_path_tail(c->q), &s);
    return st == ST_OK ? tinker_reply(c, json_pack("{s:s, s:s, s:s?}", "sampler_id", s->id,
                                                   "base_model", s->base, "model_path",
                                                   s->snapshot.path[0] ? s->snapshot.path : NULL))
                       : st;
}

// ---- a request's way ----------------------------------------------------------------------------

static void end(struct sample_request *r, enum status st)
{
    struct bytes *to = &r->request.response;
    if (st != ST_OK && r->request.status == ST_OK) request_fail(&r->request, st);
    r->request.is_protobuf = st == ST_OK;
    for (int i = 0; st == ST_OK && i < r->n; i++) {
        const struct completion *s = &r->samples[i];
        struct bytes sequence = BYTES_INIT;
        proto_put_varint(&sequence, 1, s->truncated); // 0: stop, 1: length
        proto_put_bytes(&sequence, 2, s->ids, (size_t)s->n * sizeof *s->ids);
        proto_put_bytes(&sequence, 3, s->logprobs, (size_t)s->n * sizeof *s->logprobs);
        proto_put_message(to, 1, &sequence);
    }
    if (st == ST_OK) {
        bytes_append(to, bytes_text(&r->scores), r->scores.len);
        proto_put_varint(to, 4, (uint64_t)r->cached_tokens);
    }
    request_end(&r->request);
}

static void on_sampled(struct inbox_message *message);

static void submit(struct sample_request *r)
{
    r->request.message.deliver = on_sampled;
    if (r->request.owner->tinker->ended)
        end(r, status_fail(ST_CANCELLED, "the Tinker API is stopping"));
    else
        sample(r);
}

static void on_loaded(struct inbox_message *message)
{
    struct sample_request *r = (struct sample_request *)message;
    struct owner *s = r->request.owner;
    enum status st = r->request.status;
    const bool loaded = st == ST_OK;
    if (s->snapshot.saves == r->snapshot.saves) s->snapshot = r->snapshot;
    // its path may have been saved again
    if (loaded) st = r->cancelled ? fail_cancelled() : check_stale(s, &r->snapshot);
    if (loaded && st != ST_OK) snapshots_end_use(s->tinker->model->snapshots, &r->use);
    if (st == ST_OK)
        submit(r);
    else
        end(r, st);
}

static enum status perform_load(struct trained_model *m, struct tinker_request *request)
{
    struct sample_request *r = (struct sample_request *)request;
    const struct tinker *t = r->request.owner->tinker;
    struct snapshot *s = &r->snapshot;
    struct run_path path;
    char folder[PATH_ROOM];
    if (r->cancelled) return fail_cancelled();
    if (!s->path[0]) // it waited while a saved model took the place of what it is of
        return snapshots_use(t->model->snapshots, s, &r->use) ? ST_OK
                                                              : fail_stale(request->owner, s);
    if (runs_find_path(t->model->runs, s->path, &path, folder) != ST_OK)
        return status_fail(ST_NOT_FOUND, "%s was deleted meanwhile", s->path);
    return trained_load_saved(m, s, folder, &r->use);
}

// On its way to what has its weights, which may be loaded first.
static void route(struct sample_request *r)
{
    struct tinker *t = r->request.owner->tinker;
    enum status st = check_stale(r->request.owner, &r->snapshot);
    if (st != ST_OK) {
        end(r, st);
    } else if (snapshots_use(t->model->snapshots, &r->snapshot, &r->use)) {
        submit(r);
    } else {
        r->request.message.deliver = on_loaded;
        r->request.perform = perform_load;
        r->request.group = r->snapshot.path[0] ? r->snapshot.path : NULL;
        tinker_note_gone(t);
        request_queue_append(&t->queue, &r->request);
    }
}

// Samples that newer weights had a part in are sampled again from a copy of the older, if there is
// one by now.
static void on_sampled(struct inbox_message *message)
{
    struct sample_request *r = (struct sample_request *)message;
    struct tinker *t = r->request.owner->tinker;
    const enum status st = r->cancelled ? fail_cancelled() : r->request.status;
    const bool gave =
        st != ST_OK || r->oldest == 0 || r->snapshot.inflight ||
        snapshots_gave(t->model->snapshots, &r->snapshot, &r->use, r->oldest, r->newest);
    snapshots_end_use(t->model->snapshots, &r->use);
    if (gave) {
        end(r, st);
    } else if (!t->ended && r->tries++ < MAX_TRIES) {
        sample_request_clear(r);
        route(r);
    } else {
        end(r, status_context(fail_stale(r->request.owner, &r->snapshot),
                              "the weights changed while this was sampled"));
    }
}

static enum status asample(const struct call *c)
{
    struct tinker *t = c->tinker;
    struct owner *s;
    struct tinker_request *request = NULL;
    char id[ID_ROOM + 40];
    json_t *ids = json_array();
    enum status st;
    CHECK(tinker_find(t, SAMPLER, c->sampling_session_id, &s));
    s->session->heard_ns = clock_now_ns();
    CHECK(requests_take(s, c->q, sizeof(struct sample_request), c->seq_id, &request));
    if (!request) goto out;
    struct sample_request *r = (struct sample_request *)request;
    request->release = sample_request_release;
    r->snapshot = s->snapshot;
    struct trained_model_info model = *t->model;
    if (r->snapshot.elsewhere) { // which knows its own tokens
        model.limits.vocab = INT_MAX;
        model.max_context = r->snapshot.elsewhere->max_context;
    }
    CHECK(sample_request_parse(c->body, &model, r));
    CHECK(check_stale(s, &r->snapshot));
    for (int i = 0; i < r->n; i++) {
        snprintf(id, sizeof id, "%s:%" PRId64 ":%d", s->id, request->seq_id, i);
        json_array_append_new(ids, json_string(id));
    }
    request_promise(request, c->q, json_pack("{s:O}", "sample_sequence_ids", ids));
    route(r);
out:
    if (st != ST_OK && request) request_drop(request);
    json_decref(ids);
    return st;
}

// ---- responses ----------------------------------------------------------------------------------

// Training requests are done in their order, each on what those before it left.
static enum status cancel(const struct call *c)
{
    struct tinker_request *r = requests_find(c->tinker, c->request_id);
    if (!r) return status_fail(ST_NOT_FOUND, "there is no request \"%s\"", CUT(c->request_id, 100));
    if (r->owner->kind != SAMPLER)
        return status_fail(ST_UNSUPPORTED, "\"request_id\" is of a training run: samples alone are "
                                           "cancelled");
    ((struct sample_request *)r)->cancelled = true;
    if (r->ended) r->keep_until_ns = clock_deadline_ns(REQUEST_FETCHED_MS);
    return tinker_reply(c, json_object());
}

const struct endpoint sampling_endpoints[] = {
    {"POST", "/api/v1/create_sampling_session", create_sampler,
     "session_id sampling_session_seq_id", HTTP_NEEDS_KEY, 0},
    {"GET", "/api/v1/samplers/*", get_sampler, NULL, HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/asample", asample, "sampling_session_id seq_id", HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/retrieve_future", requests_retrieve, "request_id", HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/cancel_future", cancel, "request_id", HTTP_NEEDS_KEY, 0},
    {"POST", "/api/v1/retrieve_futures", requests_retrieve_ended, "", HTTP_NEEDS_KEY, 0},
    {0},
};
