/* sampling.c: the thread that samples. It alone uses its HTTP client; others put requests into a
 * list under a lock and wake it. */
#include "trainer/serve/sampling.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/http/http_client.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define WAIT_MS       1000
#define BUSY_RETRY_MS 200
#define MOST_GROUPS   512 // of one request to the server
#define MOST_SAMPLES  2048

struct sampling {
    pthread_t thread;
    pthread_mutex_t lock;
    struct sample_request *first, **last; // put, not yet taken
    bool ended;
    struct http_client *http;
    struct inbox *inbox;
    int timeout_ms;
    struct flight *flights; // thread's
};

struct flight { // one request to the server
    struct flight *next;
    struct sampling *of;
    struct http_transfer *transfer; // NULL: waits until again_ns
    int64_t again_ns, deadline_ns;
    struct sample_request *requests[MOST_GROUPS]; // (n)
    int n, samples;
};

static void come_back(struct sampling *s, struct sample_request *r, enum status st)
{
    status_keep(&r->status, st);
    inbox_post(s->inbox, &r->message);
}

// ---- what arrives -------------------------------------------------------------------------------

static enum status on_line(void *context, const char *text, size_t len)
{
    struct flight *f = context;
    json_t *line = NULL;
    enum status st;
    CHECK(json_parse("/v1/rollouts", text, len, &line));
    const json_t *error = json_object_get(json_object_get(line, "error"), "message");
    if (json_is_string(error)) FAIL(ST_IO, "the server: %s", json_string_value(error));
    const json_int_t group = json_integer_value(json_object_get(line, "group_id")),
                     sample = json_integer_value(json_object_get(line, "sample"));
    if (group < 0 || group >= f->n || !f->requests[group] || sample < 0 ||
        sample >= f->requests[group]->n || f->requests[group]->samples[sample].tokens)
        FAIL(ST_FORMAT, "/v1/rollouts: a sample that was not asked for");
    struct sample_request *r = f->requests[group];
    CHECK(sample_request_take(r, (int)sample, line));
    if (++r->n_done < r->n) goto out;
    f->requests[group] = NULL;
    come_back(f->of, r, ST_OK);
out:
    json_decref(line);
    return st;
}

// ---- requests to the server ---------------------------------------------------------------------

static json_t *group_of(const struct sample_request *r, int id)
{
    json_t *ids = json_array(), *group;
    for (int i = 0; ids && i < r->n_prompt; i++)
        json_array_append_new(ids, json_integer(r->prompt[i]));
    group = json_pack("{s:i, s:o, s:i}", "id", id, "prompt_token_ids", ids, "n", r->n);
    if (group && r->has_seed) json_object_set_new(group, "seed", json_integer(r->seed));
    return group;
}

static enum status ask(struct flight *f)
{
    json_t *groups = json_array(), *body;
    enum status st = ST_OK;
    const struct sample_request *any = NULL;
    for (int i = 0; groups && i < f->n; i++) {
        if (!f->requests[i]) continue;
        any = f->requests[i];
        json_array_append_new(groups, group_of(any, i));
    }
    body = json_pack("{s:o, s:O, s:s*}", "groups", groups, "sampling", any->sampling, "model",
                     any->adapter[0] ? any->adapter : NULL);
    if (!body) FAIL(ST_NO_MEMORY, "out of memory");
    const struct http_call call = {.path = "/v1/rollouts",
                                   .post = true,
                                   .body = body,
                                   .timeout_ms = clock_ms_until(f->deadline_ns) + 1,
                                   .on_line = on_line,
                                   .context = f};
    st = http_submit(f->of->http, &call, &f->transfer);
out:
    json_decref(body);
    return st;
}

// What has not come back yet does now; of a request that was refused as a whole each goes alone.
static void give_up(struct flight *f, enum status st)
{
    char sentence[1024];
    int left = 0;
    snprintf(sentence, sizeof sentence, "%s", status_message());
    for (int i = 0; i < f->n; i++) left += f->requests[i] != NULL;
    for (int i = 0; i < f->n; i++) {
        struct sample_request *r = f->requests[i];
        if (!r) continue;
        const bool again = st == ST_INVALID && left > 1 && !r->alone;
        r->alone = true;
        f->requests[i] = NULL;
        if (again) {
            sample_request_clear(r);
            sampling_put(f->of, r);
        } else {
            come_back(f->of, r, status_fail(st, "%s", sentence));
        }
    }
}

static void end_flight(struct flight *f)
{
    struct flight **link = &f->of->flights;
    while (*link != f) link = &(*link)->next;
    *link = f->next;
    free(f);
}

static bool is_whole(const struct flight *f)
{
    for (int i = 0; i < f->n; i++)
        if (f->requests[i]) return false;
    return true;
}

// True where it is over.
static bool advance(struct flight *f)
{
    enum status st = ST_OK;
    if (!f->transfer && clock_now_ns() >= f->again_ns) st = ask(f);
    if (f->transfer && http_ended(f->transfer)) {
        st = http_finish(f->transfer, NULL);
        f->transfer = NULL;
        if (st == ST_OK && !is_whole(f))
            st = status_fail(ST_PEER_GONE, "the server ended the response before every sample");
        if (st == ST_OK) return true;
        if (st == ST_BUSY && clock_now_ns() < f->deadline_ns) {
            f->again_ns = clock_deadline_ns(BUSY_RETRY_MS);
            return false;
        }
    }
    if (st == ST_OK) return false;
    give_up(f, st);
    return true;
}

// ---- the thread ---------------------------------------------------------------------------------

static struct sample_request *take_all(struct sampling *s, bool *ret_ended)
{
    pthread_mutex_lock(&s->lock);
    struct sample_request *first = s->first;
    s->first = NULL;
    s->last = &s->first;
    *ret_ended = s->ended;
    pthread_mutex_unlock(&s->lock);
    return first;
}

// Whether the request can go with those that wait to be sent.
static bool fits(const struct flight *f, const struct sample_request *r)
{
    return !f->transfer && !r->alone && !f->requests[0]->alone && f->n < MOST_GROUPS &&
           f->samples + r->n <= MOST_SAMPLES && strcmp(f->requests[0]->adapter, r->adapter) == 0 &&
           json_equal(f->requests[0]->sampling, r->sampling);
}

static struct flight *new_flight(struct sampling *s)
{
    struct flight *f = calloc(1, sizeof *f);
    if (!f) return NULL;
    f->of = s;
    f->deadline_ns = clock_deadline_ns(s->timeout_ms);
    f->next = s->flights;
    s->flights = f;
    return f;
}

// Puts what was taken into as few requests as hold it.
static void board(struct sampling *s, struct sample_request *first)
{
    for (struct sample_request *r = first, *next; r; r = next) {
        struct flight *f = s->flights;
        next = r->next;
        while (f && !fits(f, r)) f = f->next;
        if (!f && !(f = new_flight(s))) {
            come_back(s, r, status_fail(ST_NO_MEMORY, "out of memory"));
            continue;
        }
        f->requests[f->n++] = r;
        f->samples += r->n;
    }
}

static void *run(void *context)
{
    struct sampling *s = context;
    bool ended;
    for (;;) {
        board(s, take_all(s, &ended));
        if (ended) break;
        for (struct flight *f = s->flights, *next; f; f = next) {
            next = f->next;
            if (advance(f)) end_flight(f);
        }
        http_poll(s->http, s->flights ? BUSY_RETRY_MS : WAIT_MS);
    }
    while (s->flights) {
        struct flight *f = s->flights;
        http_cancel(f->transfer);
        give_up(f, status_fail(ST_CANCELLED, "the server of the Tinker API is stopping"));
        end_flight(f);
    }
    return NULL;
}

enum status sampling_new(const char *socket, double timeout_s, struct inbox *inbox,
                         struct sampling **ret)
{
    enum status st;
    struct sampling *s = calloc(1, sizeof *s);
    if (!s) return status_fail(ST_NO_MEMORY, "out of memory");
    s->inbox = inbox;
    s->timeout_ms = (int)(timeout_s * 1e3);
    s->last = &s->first;
    CHECK(http_client_new(socket, &s->http));
    pthread_mutex_init(&s->lock, NULL);
    if (pthread_create(&s->thread, NULL, run, s) != 0) {
        pthread_mutex_destroy(&s->lock);
        FAIL(ST_IO, "the sampling thread cannot be started");
    }
    *ret = s;
    return ST_OK;
out:
    http_client_free(s->http);
    free(s);
    return st;
}

void sampling_free(struct sampling *s)
{
    if (!s) return;
    pthread_mutex_lock(&s->lock);
    s->ended = true;
    pthread_mutex_unlock(&s->lock);
    http_client_wake(s->http);
    pthread_join(s->thread, NULL);
    http_client_free(s->http);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

void sampling_put(struct sampling *s, struct sample_request *r)
{
    r->next = NULL;
    pthread_mutex_lock(&s->lock);
    *s->last = r;
    s->last = &r->next;
    pthread_mutex_unlock(&s->lock);
    http_client_wake(s->http);
}
