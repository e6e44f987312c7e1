/* endpoints_sampling.c: snapshots, and samples of them. Loop's thread.
 *
 * Nothing is copied for a snapshot: it is a weight version, and is sampled from the run's weights
 * as long as these are of that version. Whether they were is known for certain once the samples are
 * there, since each token comes with the version that sampled it. An older one of an adapter is
 * sampled from the copy that is kept of it, one that was saved from a copy that is loaded for it; a
 * whole model that was saved is loaded in place, if nobody trains what is there. What is left is
 * stale: an error, unless --snapshots inflight, or the client's own kind "inflight", lets newer
 * weights answer. */
#include "trainer/serve/tinker.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "trainer/serve/protobuf.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MOST_TRIES 3
#define CLONE_SEQ_IDS                                                                              \
    1000000000 // a copy of a client numbers its requests from a multiple of this on

struct asked { // a request of samples under way
    struct sample_request request;
    struct work load; // of its snapshot, where that is to be loaded
    struct source_use use;
    int tries;
    struct tinker *tinker;
    struct future *future;
    struct sampler sampler; // as it was then
};

// ---- snapshots ----------------------------------------------------------------------------------

struct sampler *tinker_sampler(struct tinker *t, const char *id)
{
    for (struct sampler *s = t->samplers; s; s = s->next)
        if (strcmp(s->id, id) == 0) return s;
    return NULL;
}

static int64_t saves_of(const struct tinker *t, const struct snapshot *of)
{
    return json_integer_value(json_object_get(json_object_get(t->live, of->path), "saves"));
}

struct sampler *tinker_new_sampler(struct tinker *t, struct session *session, const char *id,
                                   const char *base, const struct snapshot *of)
{
    struct sampler *s = tinker_sampler(t, id);
    if (!s) {
        if (!(s = calloc(1, sizeof *s))) return NULL;
        s->next = t->samplers;
        t->samplers = s;
    }
    s->session = session;
    snprintf(s->id, sizeof s->id, "%s", id);
    snprintf(s->base, sizeof s->base, "%s", base);
    s->of = *of;
    s->saves = saves_of(t, of);
    return s;
}

static enum status fail_stale(const struct tinker *t, const struct sampler *s)
{
    const uint64_t live = sources_version(t->sources, s->of.run);
    const char *what = s->of.path[0] ? s->of.path : s->id;
    struct bytes kept = BYTES_INIT;
    if (s->saves != saves_of(t, &s->of))
        return status_fail(ST_MISMATCH,
                           "%s was saved again since this sampling client was made: make another "
                           "one, of what is there now",
                           what);
    if (s->of.version == 0 || (s->of.path[0] && !s->of.run[0]))
        return status_fail(ST_MISMATCH,
                           "%s is no snapshot of the live weights (version %" PRIu64
                           "), which a client trains: sample it once that one has finished, or "
                           "load it as a training client's weights (load_weights), or start a "
                           "cw-infer-server of its own on that folder",
                           what, live);
    if (!s->of.run[0])
        return status_fail(
            ST_MISMATCH,
            "%s is the snapshot of weight version %" PRIu64
            ", and the live weights are version %" PRIu64
            ": nothing was copied for it. Take a new one after each optim_step, load a saved "
            "checkpoint (load_weights), or start cw-trainer serve with --snapshots inflight, where "
            "newer weights answer for older ones%s",
            what, s->of.version, live,
            s->of.base ? "; a snapshot of the beginning, as this is, stays where the "
                         "cw-infer-server has --tandem-model with the model's own folder"
                       : "");
    if (live == 0)
        return status_fail(ST_MISMATCH,
                           "%s is a snapshot of %s, which has ended, and its adapter is not on the "
                           "server any more: sample a path that it saved",
                           what, s->of.run);
    sources_kept(t->sources, s->of.run, &kept);
    status_fail(ST_MISMATCH,
                "%s is the snapshot of weight version %" PRIu64 " of %s, which is gone: it is at "
                "version %" PRIu64 ", and older ones that are kept are %s. Save those by name that "
                "are needed for long (save_weights_for_sampler), or start cw-trainer serve with a "
                "larger --keep-snapshots (each takes a place of the server's --max-adapters), or "
                "with --snapshots inflight, where newer weights answer "
                "for older ones",
                what, s->of.version, s->of.run, live, bytes_text(&kept));
    bytes_release(&kept);
    return ST_MISMATCH;
}

static bool may_be_newer(const struct tinker *t, const struct sampler *s)
{
    return s->inflight || t->options->inflight;
}

// Version 0 is the model folder: the live weights, as long as the model itself was not trained, or
// the frozen model.
static enum status find_base(struct tinker *t, struct snapshot *ret)
{
    struct control_facts f;
    ret->version = sources_base(t->sources);
    ret->base = true;
    if (sources_has(t->sources, ret, false)) return ST_OK;
    if (t->options->inflight) ret->version = sources_version(t->sources, "");
    if (ret->version) return ST_OK;
    control_facts(t->control, &f);
    return status_fail(ST_MISMATCH,
                       "the base model was trained on since it was loaded (%" PRIu64
                       " updates), and no copy of it is kept: start the cw-infer-server with "
                       "--tandem-model %s, or "
                       "another one on that folder, for a reference or a teacher",
                       f.updates, t->model_folder);
}

static enum status find_path(struct tinker *t, const char *text, struct snapshot *ret)
{
    struct run_path path;
    char folder[PATH_ROOM];
    const json_t *live = json_object_get(t->live, text);
    enum status st = run_path_parse(text, &path);
    if (st == ST_OK) st = runs_find(t->options->runs, &path, folder);
    if (st != ST_OK) return st;
    snprintf(ret->path, sizeof ret->path, "%s", text);
    if (!live) return ST_OK;
    snprintf(ret->run, sizeof ret->run, "%s", json_string_value(json_object_get(live, "run")));
    ret->version = (uint64_t)json_integer_value(json_object_get(live, "version"));
    ret->base = json_is_true(json_object_get(live, "base"));
    return ST_OK;
}

// The folder of a snapshot that is on disk. Any thread.
static bool find_folder(const struct tinker *t, const struct snapshot *of, char ret[PATH_ROOM])
{
    struct run_path path;
    return of->path[0] && run_path_parse(of->path, &path) == ST_OK &&
           runs_find(t->options->runs, &path, ret) == ST_OK;
}

// A whole model that was saved takes the place of what is there, as the model of the folder does
// beneath an adapter, if no living client trains that.
static bool can_load(const struct tinker *t, const struct snapshot *of)
{
    char folder[PATH_ROOM];
    return find_folder(t, of, folder) &&
           !tinker_excluding(t, NULL, policy_is_adapter(folder) ? 1 : 0);
}

static enum status check_stale(const struct tinker *t, const struct sampler *s)
{
    const bool is_there =
        sources_has(t->sources, &s->of, may_be_newer(t, s)) || can_load(t, &s->of);
    return is_there && s->saves == saves_of(t, &s->of) ? ST_OK : fail_stale(t, s);
}

void handle_create_sampler(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    char id[ID_ROOM];
    struct snapshot of = {0};
    json_t *body = tinker_body(q);
    if (!body) return;
    struct session *session = tinker_session(t, q, body);
    const int64_t number = session ? tinker_number(q, body, "sampling_session_seq_id", 0) : -1;
    const char *path = json_string_value(json_object_get(body, "model_path")),
               *base = json_string_value(json_object_get(body, "base_model"));
    enum status st = ST_OK;
    if (number < 0) goto out;
    if (!path && !base) FAIL(ST_INVALID, "request: \"base_model\" or \"model_path\" is missing");
    if (base && !tinker_serves(t, q, base)) goto out;
    CHECK(path ? find_path(t, path, &of) : find_base(t, &of));
    snprintf(id, sizeof id, "%.120s:sample:%" PRId64, session->id, number);
    struct sampler *s = tinker_new_sampler(t, session, id, base ? base : t->model_name, &of);
    if (!s) FAIL(ST_NO_MEMORY, "out of memory");
    CHECK(check_stale(t, s));
    http_reply_json(
        q, 200,
        json_pack("{s:s, s:s}", "sampling_session_id", id, "type", "create_sampling_session"));
out:
    if (st != ST_OK) http_fail_status(q, st);
    json_decref(body);
}

void handle_sampler(void *tinker, struct http_request *q)
{
    const struct sampler *s = tinker_sampler(tinker, http_path_tail(q));
    if (s)
        http_reply_json(q, 200,
                        json_pack("{s:s, s:s, s:s?}", "sampler_id", s->id, "base_model", s->base,
                                  "model_path", s->of.path[0] ? s->of.path : NULL));
    else
        http_fail(q, 404, "there is no sampling session \"%.100s\": " TINKER_FORGOTTEN,
                  http_path_tail(q));
}

// ---- its answer ---------------------------------------------------------------------------------

static void put_prompt(const struct asked *a, struct bytes *to)
{
    const struct sample_request *r = &a->request;
    const int unscored = r->last_n > 0 ? r->n_prompt - r->last_n : 0;
    if (!r->logprobs) return;
    for (int i = 0; i < unscored; i++) r->logprobs[i] = NAN;
    proto_put_bytes(to, 2, r->logprobs, (size_t)r->n_prompt * sizeof(float));
    if (!r->top_ids) return;
    const size_t n = (size_t)r->n_prompt * (size_t)r->top;
    for (size_t i = 0; i < (size_t)unscored * (size_t)r->top; i++) {
        r->top_ids[i] = 0;
        r->top_logprobs[i] = SAMPLE_NO_LOGPROB;
    }
    struct bytes top = BYTES_INIT;
    proto_put_bytes(&top, 1, r->top_ids, n * sizeof(int32_t));
    proto_put_bytes(&top, 2, r->top_logprobs, n * sizeof(float));
    proto_put_varint(&top, 3, (uint64_t)r->top);
    proto_put_varint(&top, 4, (uint64_t)r->n_prompt);
    proto_put_message(to, 3, &top);
}

static void put_samples(const struct asked *a, struct bytes *to)
{
    const struct sample_request *r = &a->request;
    for (int i = 0; i < r->n; i++) {
        const struct sampled *s = &r->samples[i];
        struct bytes sequence = BYTES_INIT;
        proto_put_varint(&sequence, 1, !s->stopped); // 0: stop, 1: length
        proto_put_bytes(&sequence, 2, s->tokens, (size_t)s->n * sizeof *s->tokens);
        proto_put_bytes(&sequence, 3, s->logprobs, (size_t)s->n * sizeof *s->logprobs);
        proto_put_message(to, 1, &sequence);
    }
    put_prompt(a, to);
    proto_put_varint(to, 4, (uint64_t)r->cached_tokens);
}

static void end(struct asked *a, enum status st)
{
    struct bytes answer = BYTES_INIT;
    if (st == ST_OK) {
        put_samples(a, &answer);
        st = bytes_status(&answer);
    }
    if (st == ST_OK)
        future_done_protobuf(a->future, &answer);
    else
        future_fail(a->future, st);
    tinker_polls_sweep(a->tinker);
    bytes_release(&answer);
    sample_request_release(&a->request);
    free(a);
}

static void submit(struct asked *a)
{
    if (!a->tinker->sampling) {
        end(a, status_fail(ST_CANCELLED, "the Tinker API is stopping"));
        return;
    }
    memcpy(a->request.adapter, a->use.adapter, sizeof a->use.adapter);
    sampling_put(a->tinker->sampling, &a->request);
}

static void on_loaded(struct inbox_message *message)
{
    struct asked *a = (struct asked *)((char *)message - offsetof(struct asked, load.message));
    struct sampler *s = tinker_sampler(a->tinker, a->sampler.id);
    enum status st = status_recall(&a->load.status);
    if (s && s->saves == a->sampler.saves) s->of = a->sampler.of;
    if (st == ST_OK) {
        st = check_stale(a->tinker, &a->sampler); // its path may have been saved again
        if (st != ST_OK) sources_give(a->tinker->sources, &a->use);
    } else if (!a->sampler.of.path[0]) {
        st = fail_stale(a->tinker, &a->sampler);
    }
    if (st == ST_OK)
        submit(a);
    else
        end(a, st);
}

static enum status run_load(struct policy *policy, struct work *work)
{
    struct asked *a = (struct asked *)((char *)work - offsetof(struct asked, load));
    struct snapshot *of = &a->sampler.of;
    char folder[PATH_ROOM];
    if (!of->path[0]) // it waited while a saved model took the place of what it is of
        return sources_take(a->tinker->sources, of, may_be_newer(a->tinker, &a->sampler), &a->use)
                   ? ST_OK
                   : status_fail(ST_MISMATCH, "nothing is there to sample it of");
    if (!find_folder(a->tinker, of, folder))
        return status_fail(ST_NOT_FOUND, "%s was deleted meanwhile", of->path);
    return policy_load_saved(policy, of, folder, &a->use);
}

// On its way to what has its weights, which may be loaded first.
static void route(struct asked *a)
{
    struct tinker *t = a->tinker;
    const struct sampler *s = &a->sampler;
    enum status st = check_stale(t, s);
    if (st != ST_OK) {
        end(a, st);
    } else if (sources_take(t->sources, &s->of, may_be_newer(t, s), &a->use)) {
        submit(a);
    } else {
        a->load.message.deliver = on_loaded;
        a->load.run = run_load;
        a->load.group = s->of.path[0] ? s->of.path : NULL;
        work_put(t->works, &a->load);
    }
}

// Samples that newer weights had a part in are drawn again from a copy of the older, if there is
// one by now.
static void deliver(struct inbox_message *message)
{
    struct asked *a = (struct asked *)message;
    struct tinker *t = a->tinker;
    const struct sample_request *r = &a->request;
    enum status st = status_recall(&r->status);
    const bool gave = st != ST_OK || r->oldest == 0 || may_be_newer(t, &a->sampler) ||
                      sources_gave(t->sources, &a->sampler.of, &a->use, r->oldest, r->newest);
    sources_give(t->sources, &a->use);
    if (gave) {
        end(a, st);
    } else if (t->sampling && a->tries++ < MOST_TRIES) {
        sample_request_clear(&a->request);
        route(a);
    } else {
        end(a, status_context(fail_stale(t, &a->sampler),
                              "the weights changed while this was sampled"));
    }
}

static json_t *sequence_ids(const struct sampler *s, int64_t seq_id, int n)
{
    json_t *ids = json_array();
    char id[ID_ROOM + 40];
    for (int i = 0; i < n; i++) {
        snprintf(id, sizeof id, "%s:%" PRId64 ":%d", s->id, seq_id, i);
        json_array_append_new(ids, json_string(id));
    }
    return json_pack("{s:o}", "sample_sequence_ids", ids);
}

// A request that was not seen before.
static enum status ask(struct tinker *t, struct http_request *q, const json_t *body,
                       const struct sampler *s, int64_t seq_id)
{
    enum status st;
    const struct sample_limits limits = {t->limits.vocab, t->options->max_context};
    struct asked *a = calloc(1, sizeof *a);
    if (!a) return status_fail(ST_NO_MEMORY, "out of memory");
    a->tinker = t;
    a->sampler = *s;
    a->request.message.deliver = deliver;
    CHECK(sample_request_parse(body, &limits, &a->request));
    CHECK(check_stale(t, &a->sampler));
    a->future = future_new(t->futures, s->id, seq_id);
    if (!a->future) {
        st = ST_BUSY;
        goto out;
    }
    future_promise(a->future, q, sequence_ids(s, seq_id, a->request.n));
    route(a);
    return ST_OK;
out:
    sample_request_release(&a->request);
    free(a);
    return st;
}

void handle_asample(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    json_t *body = tinker_body(q);
    if (!body) return;
    const char *id = tinker_text(q, body, "sampling_session_id");
    struct sampler *s = id ? tinker_sampler(t, id) : NULL;
    const int64_t seq_id = s ? tinker_number(q, body, "seq_id", 0) : -1;
    struct future *known = s && seq_id >= 0 ? future_of(t->futures, s->id, seq_id) : NULL;
    if (s) s->session->heard_ns = clock_now_ns();
    if (id && !s) {
        http_fail(q, 404, "there is no sampling session \"%.100s\": " TINKER_FORGOTTEN, id);
    } else if (known) {
        future_promise(known, q, NULL);
    } else if (seq_id >= 0 && tinker_takes_work(t, q)) {
        enum status st = ask(t, q, body, s, seq_id);
        if (st != ST_OK) http_fail_status(q, st);
    }
    json_decref(body);
}
