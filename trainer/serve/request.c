/* request.c: the requests that are under way, or whose responses are kept.
 *
 * An index (a JSON object, which is a hash table of strings) finds them by id. Of each owner there
 * is a list of those that have ended, in that order, for who asks for all of a session at once. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/clock.h"
#include "trainer/serve/tinker.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#define MAX_REQUESTS 262144 // that are there at one time
#define CLONE_SEQ_IDS                                                                              \
    1000000000 // a copy of a client numbers its requests from a multiple of this on

struct waiter { // a question that is held
    struct waiter *next;
    struct tinker *tinker;
    struct http_request *q;
    int64_t until_ns;
    struct tinker_request *request; // for its response; NULL: for what has ended
    struct owner *owner;            // of this one's
    int64_t clone, cursor;
};

enum status requests_init(struct tinker *t)
{
    uint64_t random = 0;
    if (getrandom(&random, sizeof random, 0) != sizeof random) random = (uint64_t)clock_now_ns();
    snprintf(t->process, sizeof t->process, "%016" PRIx64 "-", random);
    t->requests = json_object();
    return t->requests ? ST_OK : status_fail(ST_NO_MEMORY, "out of memory");
}

static struct tinker_request *request_at(const json_t *address) // NULL is fine
{
    return address ? (struct tinker_request *)(intptr_t)json_integer_value(address) : NULL;
}

static void release(struct tinker_request *r)
{
    if (r->release) r->release(r);
    r->release = NULL;
}

static void request_free(struct tinker_request *r)
{
    if (!r) return;
    release(r);
    json_decref(r->promise);
    bytes_release(&r->response);
    free(r);
}

void requests_free(struct tinker *t)
{
    const char *id;
    json_t *address;
    json_object_foreach (t->requests, id, address) request_free(request_at(address));
    for (struct owner *o = t->owners, *next; o; o = next) {
        next = o->next;
        free(o);
    }
    json_decref(t->requests);
}

struct owner *owner_next(const struct tinker *t, enum owner_kind kind, const struct owner *after)
{
    struct owner *o = after ? after->next : t->owners;
    while (o && (o->forgotten || o->kind != kind)) o = o->next;
    return o;
}

struct owner *owner_find(const struct tinker *t, enum owner_kind kind, const char *id)
{
    struct owner *o = owner_next(t, kind, NULL);
    while (o && strcmp(o->id, id) != 0) o = owner_next(t, kind, o);
    return o;
}

enum status owner_add(struct tinker *t, enum owner_kind kind, struct owner *session, const char *id,
                      struct owner **ret)
{
    struct owner *o = calloc(1, sizeof *o);
    if (!o) return status_fail(ST_NO_MEMORY, "out of memory");
    snprintf(o->id, sizeof o->id, "%s", id);
    o->tinker = t;
    o->kind = kind;
    o->session = session ? session : o;
    o->last = &o->first;
    o->next = t->owners;
    t->owners = o;
    *ret = o;
    return ST_OK;
}

static void drop_owner(struct owner *o)
{
    if (!o->forgotten || o->n > 0) return;
    LIST_REMOVE(o->tinker->owners, o);
    free(o);
}

void session_forget(struct owner *session)
{
    for (struct owner *o = session->tinker->owners, *next; o; o = next) {
        next = o->next;
        if (o->session != session) continue;
        o->forgotten = true;
        o->session = NULL;
        drop_owner(o);
    }
}

static const char *id_of(const struct owner *o, int64_t seq_id, char ret[REQUEST_ID_ROOM])
{
    snprintf(ret, REQUEST_ID_ROOM, "%s%s:%" PRId64, o->tinker->process, o->id, seq_id);
    return ret;
}

enum status requests_add(struct owner *o, size_t size, int64_t seq_id, struct tinker_request **ret)
{
    char id[REQUEST_ID_ROOM];
    json_t *all = o->tinker->requests;
    if (json_object_size(all) >= MAX_REQUESTS)
        return status_fail(ST_BUSY, "%d requests are under way or kept; try again later",
                           MAX_REQUESTS);
    struct tinker_request *r = calloc(1, size);
    if (!r || json_object_set_new(all, id_of(o, seq_id, id), json_integer((intptr_t)r))) {
        free(r);
        return status_fail(ST_NO_MEMORY, "out of memory");
    }
    o->n++;
    r->owner = o;
    r->seq_id = seq_id;
    *ret = r;
    return ST_OK;
}

enum status requests_take(struct owner *o, struct http_request *q, size_t size, int64_t seq_id,
                          struct tinker_request **ret)
{
    char id[REQUEST_ID_ROOM];
    struct tinker_request *known = requests_find(o->tinker, id_of(o, seq_id, id));
    enum status st = ST_OK;
    *ret = NULL;
    if (known) {
        request_promise(known, q, NULL);
    } else if (seq_id < o->next_seq) {
        http_fail(q, 410, "request %lld of %s was answered, and is forgotten", (long long)seq_id,
                  o->id);
    } else if ((st = tinker_takes_work(o->tinker)) == ST_OK) {
        st = requests_add(o, size, seq_id, ret);
    }
    return st;
}

struct tinker_request *requests_find(const struct tinker *t, const char *id)
{
    return request_at(json_object_get(t->requests, id));
}

void request_drop(struct tinker_request *r)
{
    struct owner *o = r->owner;
    struct tinker_request **link = &o->first;
    char id[REQUEST_ID_ROOM];
    while (*link && *link != r) link = &(*link)->next_ended;
    if (*link) *link = r->next_ended;
    if (o->last == &r->next_ended) o->last = link;
    json_object_del(o->tinker->requests, id_of(o, r->seq_id, id));
    request_free(r);
    o->n--;
    drop_owner(o);
}

void request_promise(struct tinker_request *r, struct http_request *q, json_t *more)
{
    char id[REQUEST_ID_ROOM];
    if (!r->promise) {
        r->promise = more ? json_incref(more) : json_object();
        json_object_set_new(r->promise, "request_id", json_string(id_of(r->owner, r->seq_id, id)));
    }
    json_decref(more);
    http_reply_json(q, 200, json_incref(r->promise));
}

// ---- the response -------------------------------------------------------------------------------

enum status request_set_json(struct tinker_request *r, json_t *response)
{
    return json_put_line(&r->response, response, JSON_REAL_PRECISION(17));
}

void request_fail(struct tinker_request *r, enum status st)
{
    const bool clients = st == ST_INVALID || st == ST_UNSUPPORTED || st == ST_MISMATCH ||
                         st == ST_FORMAT || st == ST_NOT_FOUND || st == ST_TOO_LONG;
    json_t *error = json_pack("{s:o, s:s}", "error", json_clean_string(status_message()),
                              "category", clients ? "user" : "server");
    r->status = st;
    r->is_protobuf = false;
    bytes_release(&r->response);
    if (json_put_line(&r->response, error, 0) != ST_OK)
        bytes_puts(&r->response, "{\"error\":\"failed\",\"category\":\"server\"}");
}

// Responds where there is something, or `now`.
static bool respond(const struct waiter *w, bool now)
{
    char id[REQUEST_ID_ROOM];
    int64_t cursor = w->cursor;
    struct tinker_request *one = w->request;
    if (one && one->ended) {
        struct bytes body = BYTES_INIT;
        bytes_append(&body, bytes_text(&one->response), one->response.len);
        one->keep_until_ns = clock_deadline_ns(REQUEST_FETCHED_MS);
        http_reply(w->q, 200, one->is_protobuf ? "application/x-protobuf" : "application/json",
                   &body);
        return true;
    }
    if (one && now)
        http_reply_json(w->q, 408,
                        json_pack("{s:s, s:s}", "type", "try_again", "queue_state", "active"));
    if (one) return now;
    json_t *list = json_array();
    for (const struct tinker_request *r = w->owner->first; r; r = r->next_ended) {
        if (r->cursor <= w->cursor || r->seq_id / CLONE_SEQ_IDS != w->clone) continue;
        id_of(r->owner, r->seq_id, id);
        json_array_append_new(list,
                              r->status != ST_OK
                                  ? json_pack("{s:s, s:s}", "state", "failed", "request_id", id)
                                  : json_pack("{s:s, s:s, s:I}", "state", "finished", "request_id",
                                              id, "response_payload_uncompressed_size",
                                              (json_int_t)r->response.len));
        cursor = r->cursor;
    }
    const bool responds = now || json_array_size(list) > 0;
    if (responds)
        http_reply_json(w->q, 200,
                        json_pack("{s:O, s:I}", "completions", list, "cursor", (json_int_t)cursor));
    json_decref(list);
    return responds;
}

static void drop_waiter(void *attached, bool answered)
{
    struct waiter *w = attached;
    (void)answered;
    LIST_REMOVE(w->tinker->waiters, w);
    if (w->owner && --w->owner->n == 0) drop_owner(w->owner);
    free(w);
}

static void respond_to_waiters(struct tinker *t)
{
    const int64_t now = clock_now_ns();
    for (struct waiter *w = t->waiters, *next; w; w = next) {
        next = w->next;
        if (!respond(w, now >= w->until_ns)) continue;
        http_attach(w->q, NULL, NULL);
        drop_waiter(w, true);
    }
}

// Responds at once, or later.
static enum status respond_or_hold(const struct waiter *waiter, double hold_s)
{
    if (respond(waiter, hold_s == 0)) return ST_OK;
    struct waiter *w = malloc(sizeof *w);
    if (!w) return status_fail(ST_NO_MEMORY, "out of memory");
    *w = *waiter;
    w->until_ns = clock_deadline_ns((int64_t)(hold_s * 1e3));
    w->next = w->tinker->waiters;
    w->tinker->waiters = w;
    if (w->owner) w->owner->n++;
    http_attach(w->q, w, drop_waiter);
    return ST_OK;
}

void request_end(struct tinker_request *r)
{
    struct owner *o = r->owner;
    if (r->response.failed) request_fail(r, bytes_status(&r->response));
    release(r);
    r->ended = true;
    r->keep_until_ns =
        clock_deadline_ns(r->status == ST_CANCELLED ? REQUEST_FETCHED_MS : REQUEST_KEEP_MS);
    r->cursor = ++o->cursor;
    *o->last = r;
    o->last = &r->next_ended;
    respond_to_waiters(o->tinker);
}

enum status requests_retrieve(const struct call *c)
{
    struct tinker *t = c->tinker;
    const char *id = c->request_id;
    struct tinker_request *r = requests_find(t, id);
    if (r)
        return respond_or_hold(&(struct waiter){.tinker = t, .q = c->q, .request = r},
                               REQUEST_HOLD_MS / 1e3);
    if (strncmp(id, t->process, strlen(t->process)) == 0)
        http_fail(c->q, 410, "request %s is gone: it is older than %d s", CUT(id, 60),
                  REQUEST_KEEP_MS / 1000);
    else // not 410, whose sentence the SDK does not show
        http_reply_json(c->q, 200,
                        json_pack("{s:s, s:s}", "error",
                                  "this request was lost: cw-trainer serve was started anew since; "
                                  "go on from the last checkpoint",
                                  "category", "server"));
    return ST_OK;
}

enum status requests_retrieve_ended(const struct call *c)
{
    const char *id = NULL;
    int64_t clone = 0;
    struct owner *s;
    enum status st;
    CHECK(json_get_string("target", c->target, "sampling_session_id", &id));
    if (!id) FAIL(ST_INVALID, "target: \"sampling_session_id\" is missing");
    CHECK(json_get_int("target", c->target, "cloned_sampler_id", 0, INT64_MAX, &clone));
    CHECK(tinker_find(c->tinker, SAMPLER, id, &s));
    st = respond_or_hold(
        &(struct waiter){
            .tinker = c->tinker, .q = c->q, .owner = s, .clone = clone, .cursor = c->prev_cursor},
        c->timeout);
out:
    return st;
}

void requests_sweep(struct tinker *t)
{
    const int64_t now = clock_now_ns();
    const char *id;
    json_t *address;
    void *next;
    respond_to_waiters(t);
    json_object_foreach_safe(t->requests, next, id, address)
    {
        struct tinker_request *r = request_at(address);
        if (r->ended && now >= r->keep_until_ns) request_drop(r);
    }
}

// ---- queues -------------------------------------------------------------------------------------

void request_queue_init(struct request_queue *queue)
{
    queue->first = NULL;
    queue->last = &queue->first;
    pthread_mutex_init(&queue->lock, NULL);
    clock_cond_init(&queue->some);
}

void request_queue_append(struct request_queue *queue, struct tinker_request *r)
{
    pthread_mutex_lock(&queue->lock);
    struct tinker_request **link = queue->last;
    for (struct tinker_request *x = r->group ? queue->first : NULL; x; x = x->next)
        if (x->group && strcmp(x->group, r->group) == 0) link = &x->next;
    r->next = *link;
    *link = r;
    if (!r->next) queue->last = &r->next;
    pthread_cond_signal(&queue->some);
    pthread_mutex_unlock(&queue->lock);
}

struct tinker_request *request_queue_next(struct request_queue *queue, int ms)
{
    const int64_t until = clock_deadline_ns(ms);
    pthread_mutex_lock(&queue->lock);
    while (!queue->first && clock_now_ns() < until)
        clock_cond_wait(&queue->some, &queue->lock, until);
    struct tinker_request *r = queue->first;
    if (r) queue->first = r->next;
    if (!queue->first) queue->last = &queue->first;
    pthread_mutex_unlock(&queue->lock);
    return r;
}
