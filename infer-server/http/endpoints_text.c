/* endpoints_text.c: the endpoints that generate. A body becomes a checked request (api.h; a
 * large one, and one that may hold messages, in another thread, pending.c), then a generation; its
 * answer is written when all is there, or as a stream while the client reads. Loop's thread. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/server_impl.h"
#include "common/base/clock.h"

#include <stdlib.h>

struct text_request {
    struct pending pending; // until its body is parsed
    struct response response;
    enum api_kind kind;
    struct api_model model; // a copy: the loop may learn more of its own
    struct api_request *parsed;
};

#define EVENTS "text/event-stream; charset=utf-8"

static const struct text_form {
    const char *prefix; // of ids
    void (*whole)(struct response *a, struct bytes *to);
    enum stream_state (*stream)(struct response *a, bool overdue, struct bytes *to);
    const char *streamed; // as what
    bool renders;         // may hold messages
} text_forms[] = {
    [API_COMPLETIONS] = {"cmpl-", choices_response, choices_stream, EVENTS, false},
    [API_CHAT] = {"chatcmpl-", choices_response, choices_stream, EVENTS, true},
    [API_ROLLOUTS] = {"cmpl-", NULL, rollouts_stream, "application/x-ndjson", true}, // always one
    [API_GENERATE] = {"cmpl-", generate_response, NULL, NULL, false},                // never one
    [API_INFERENCE] = {"", choices_response, choices_stream, EVENTS, false},
    [API_RESPONSES] = {"resp_", responses_response, responses_stream, EVENTS, true},
    [API_MESSAGES] = {"msg_", messages_response, messages_stream, EVENTS, true},
};

static void on_close(void *attached, bool answered)
{
    struct text_request *t = attached;
    if (!answered) t->pending.server->metrics.disconnects++;
    generation_release(t->response.generation);
    free(t);
}

static void on_progress(void *context)
{
    struct text_request *t = context;
    struct bytes body = BYTES_INIT;
    const struct generation_sample *failure = t->response.generation->failure;
    const char *sentence;
    if (t->response.request->stream) {
        http_wake(t->pending.request);
    } else if (http_replied(t->pending.request)) {
        return;
    } else if (failure) {
        unsigned code = failure_code(failure, &sentence);
        http_fail_as(t->pending.request, code, NULL, "server_error", sentence);
    } else if (t->response.generation->ended == t->response.request->n_samples) {
        text_forms[t->kind].whole(&t->response, &body);
        http_reply(t->pending.request, 200, "application/json", &body);
    }
}

static enum stream_state produce(void *attached, struct http_request *q, struct bytes *to)
{
    struct text_request *t = attached;
    return text_forms[t->kind].stream(&t->response, http_expired(q), to);
}

// The client's own name for it, where there is one, is a part of the id.
static void name_response(const struct http_request *q, struct api_request *r)
{
    if (!r->name[0]) snprintf(r->name, sizeof r->name, "%s", http_request_id(q));
    snprintf(r->id, sizeof r->id, "%s%s", text_forms[r->kind].prefix, r->name);
}

// Takes the request over, also where it fails.
static enum status begin(struct text_request *t, struct api_request *r)
{
    struct server *s = t->pending.server;
    const bool stream = r->stream;
    const int max = s->options->engine.max_batch + s->options->engine.max_queue;
    name_response(t->pending.request, r);
    if (r->n_samples > max) {
        enum status failed =
            status_fail(ST_INVALID,
                        "request: \"n\" over all prompts makes %d samples; this server takes at "
                        "most %d at once (--max-queue)",
                        r->n_samples, max);
        api_request_free(r);
        return failed;
    }
    t->response = (struct response){
        .model = &s->model, .created = clock_wall_s(), .unfinished = r->n_samples, .request = r};
    enum status st = generation_start(&s->host, r, on_progress, t, &t->response.generation);
    if (st != ST_OK) return st;
    http_attach(t->pending.request, t, on_close);
    t->response.samples = t->response.generation->samples;
    for (int i = 0; i < r->n_prompts; i++) {
        histogram_add(&s->metrics.asked_n, &bounds_n, r->prompts[i].n);
        histogram_add(&s->metrics.asked_tokens, &s->metrics.tokens, r->sampling.max_tokens);
    }
    if (stream) http_stream(t->pending.request, text_forms[t->kind].streamed, -1, produce);
    return ST_OK;
}

static enum status parse(struct pending *pending)
{
    struct text_request *t = (struct text_request *)pending;
    return api_request_parse(t->kind, &t->model, bytes_text(&pending->body.bytes),
                             pending->body.bytes.len, &t->parsed);
}

static void on_parsed(struct pending *pending)
{
    struct text_request *t = (struct text_request *)pending;
    struct metrics *metrics = &pending->server->metrics;
    struct http_request *q = pending->request;
    enum status st = status_recall(&pending->status);
    if (!q) { // the client has left
        metrics->disconnects++;
        api_request_free(t->parsed);
        free(t);
        return;
    }
    if (st == ST_OK) st = begin(t, t->parsed);
    if (st == ST_OK) return;
    metrics->refused++;
    free(t);
    http_fail_status(q, st);
}

void handle_text(void *server, struct http_request *q)
{
    struct server *s = server;
    if (!server_is_open(s, q)) {
        s->metrics.refused++;
        return;
    }
    struct text_request *t = pending_new(s, q, sizeof *t, on_parsed);
    if (!t) return;
    t->kind = (enum api_kind)http_which(q);
    t->model = s->model;
    pending_parse(&t->pending, text_forms[t->kind].renders, parse);
}
