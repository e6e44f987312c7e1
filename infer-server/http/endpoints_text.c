/* endpoints_text.c: the five endpoints that generate. A body becomes a checked request (api.h; a
 * large one in another thread, body_work.h), then a generation; its answer is written when all is
 * there, or as a stream while the client reads. Loop's thread. */
#include "infer-server/http/server_impl.h"
#include "infer-server/http/body_work.h"
#include "common/base/clock.h"

#include <stdlib.h>

struct text_request {
    struct server *server;
    struct http_request
        *request; // NULL once it is gone, which happens only while its body is parsed
    struct response response;
    // while its body is parsed: written by that thread
    bool parsing;
    enum api_kind kind;
    struct api_model model; // a copy: the loop may learn more of its own
    struct api_request *parsed;
    struct status_kept status;
};

static void on_close(void *attached, bool answered)
{
    struct text_request *t = attached;
    if (!answered) t->server->metrics.disconnects++;
    t->request = NULL;
    if (t->parsing) return; // on_parsed() comes
    generation_release(t->response.generation);
    free(t);
}

static void reply_whole(struct text_request *t)
{
    struct bytes body = BYTES_INIT;
    if (t->kind == API_GENERATE)
        generate_response(&t->response, &body);
    else
        choices_response(&t->response, &body); // rollouts are always a stream
    http_reply(t->request, 200, "application/json", &body);
}

static void on_progress(void *context)
{
    struct text_request *t = context;
    const struct generation_sample *failure = generation_failure(t->response.generation);
    const char *sentence;
    if (t->response.request->stream) {
        http_wake(t->request);
    } else if (http_replied(t->request)) {
        return;
    } else if (failure) {
        unsigned code = failure_code(failure, &sentence);
        http_fail_as(t->request, code, "server_error", sentence);
    } else if (generation_done(t->response.generation)) {
        reply_whole(t);
    }
}

static enum stream_state produce(void *attached, struct http_request *q, struct bytes *to)
{
    struct text_request *t = attached;
    return (t->kind == API_ROLLOUTS ? rollouts_stream : choices_stream)(&t->response,
                                                                        http_expired(q), to);
}

static enum status check_room(const struct server *s, const struct api_request *r)
{
    int max = s->options->engine.max_batch + s->options->engine.max_queue;
    if (r->n_samples <= max) return ST_OK;
    return status_fail(
        ST_INVALID,
        "request: \"n\" over all prompts makes %d samples; this server takes at most "
        "%d at once (--max-queue)",
        r->n_samples, max);
}

// The client's own name for it, where there is one, is a part of the id.
static void name_response(const struct http_request *q, struct api_request *r)
{
    const char *prefix = r->kind == API_CHAT        ? "chatcmpl-"
                         : r->kind == API_INFERENCE ? ""
                                                    : "cmpl-";
    if (!r->name[0]) snprintf(r->name, sizeof r->name, "%s", http_request_id(q));
    snprintf(r->id, sizeof r->id, "%s%s", prefix, r->name);
}

// Takes the request over, also where it fails.
static enum status begin(struct text_request *t, struct api_request *r)
{
    struct server *s = t->server;
    const bool stream = r->stream;
    name_response(t->request, r);
    enum status st = check_room(s, r);
    if (st != ST_OK) {
        api_request_free(r);
        return st;
    }
    t->response = (struct response){
        .model = &s->model, .created = clock_wall_s(), .unfinished = r->n_samples, .request = r};
    st = generation_start(&s->host, r, on_progress, t, &t->response.generation);
    if (st != ST_OK) return st;
    t->response.samples = generation_samples(t->response.generation);
    for (int i = 0; i < r->n_prompts; i++)
        metrics_request(&s->metrics, r->prompts[i].n, r->sampling.max_tokens);
    if (stream)
        http_stream(t->request,
                    t->kind == API_ROLLOUTS ? "application/x-ndjson"
                                            : "text/event-stream; charset=utf-8",
                    produce);
    return ST_OK;
}

// Any thread (body_work.h).
static void parse(void *context, const char *text, size_t len)
{
    struct text_request *t = context;
    status_keep(&t->status, api_request_parse(t->kind, &t->model, text, len, &t->parsed));
}

// Refuses the request, which has come to nothing.
static void refuse(struct text_request *t, enum status st)
{
    struct http_request *q = t->request;
    t->server->metrics.refused++;
    http_attach(q, NULL, NULL);
    free(t);
    http_fail_status(q, st);
}

// The client may have left meanwhile.
static void on_parsed(void *context)
{
    struct text_request *t = context;
    t->server->work--;
    t->parsing = false;
    if (!t->request) {
        api_request_free(t->parsed);
        free(t);
        return;
    }
    enum status st = status_recall(&t->status);
    if (st == ST_OK) st = begin(t, t->parsed);
    if (st != ST_OK) refuse(t, st);
}

static void handle(struct server *s, struct http_request *q, enum api_kind kind)
{
    if (!server_is_open(s, q)) {
        s->metrics.refused++;
        return;
    }
    struct text_request *t = calloc(1, sizeof *t);
    if (!t) {
        http_fail(q, 500, "out of memory");
        return;
    }
    *t = (struct text_request){
        .server = s, .request = q, .parsing = true, .kind = kind, .model = s->model};
    http_attach(q, t, on_close);
    s->work++;
    const struct body_work work = {parse, on_parsed, t};
    enum status st = body_work_start(&s->loop, q, &work);
    if (st == ST_OK) return;
    s->work--;
    refuse(t, st);
}

void handle_completions(void *server, struct http_request *q)
{
    handle(server, q, API_COMPLETIONS);
}

void handle_chat(void *server, struct http_request *q)
{
    handle(server, q, API_CHAT);
}

void handle_rollouts(void *server, struct http_request *q)
{
    handle(server, q, API_ROLLOUTS);
}

void handle_generate(void *server, struct http_request *q)
{
    handle(server, q, API_GENERATE);
}

void handle_inference(void *server, struct http_request *q)
{
    handle(server, q, API_INFERENCE);
}
