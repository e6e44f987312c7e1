/* future.c: the futures. Loop's thread.
 *
 * They lie in a list by number, the oldest first, from which what is over falls out at the front;
 * an index (a JSON object, which is a hash table of strings) finds them by name. Of each owner
 * there is a list of those that are done, in that order, for who asks for all of a session at once.
 */
#include "trainer/serve/future.h"
#include "common/base/clock.h"
#include "common/base/json_out.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define MOST_FUTURES 262144 // that are there at one time

struct owner { // of futures that are done
    struct owner *next;
    char name[FUTURE_KEY_ROOM];
    int64_t places;
    int n; // futures of it that are there, done or not
    bool ended;
    struct future *first, **last;
};

struct futures {
    char process[17];      // of all ids of this process
    struct future **list;  // (n) by number, from `first` on; NULL: forgotten
    int64_t first, n, cap; // the list's
    json_t *by_key;        // number
    struct owner *owners;
};

enum status futures_new(struct futures **ret)
{
    uint64_t random = 0;
    struct futures *f = calloc(1, sizeof *f);
    if (!f || !(f->by_key = json_object())) {
        free(f);
        return status_fail(ST_NO_MEMORY, "out of memory");
    }
    if (getrandom(&random, sizeof random, 0) != sizeof random) random = (uint64_t)clock_now_ns();
    snprintf(f->process, sizeof f->process, "%016" PRIx64, random);
    *ret = f;
    return ST_OK;
}

static void future_free(struct future *u)
{
    if (!u) return;
    json_decref(u->promise);
    bytes_release(&u->answer);
    free(u);
}

void futures_free(struct futures *f)
{
    if (!f) return;
    for (int64_t i = 0; i < f->n; i++) future_free(f->list[i]);
    while (f->owners) {
        struct owner *o = f->owners;
        f->owners = o->next;
        free(o);
    }
    json_decref(f->by_key);
    free(f->list);
    free(f);
}

static struct owner *find_owner(struct futures *f, const char *name)
{
    for (struct owner *o = f->owners; o; o = o->next)
        if (strcmp(o->name, name) == 0) return o;
    return NULL;
}

static struct owner *need_owner(struct futures *f, const char *name)
{
    struct owner *o = find_owner(f, name);
    if (o || !(o = calloc(1, sizeof *o))) return o;
    snprintf(o->name, sizeof o->name, "%s", name);
    o->last = &o->first;
    o->next = f->owners;
    f->owners = o;
    return o;
}

static void put_key(const char *owner, int64_t seq_id, char ret[FUTURE_KEY_ROOM])
{
    snprintf(ret, FUTURE_KEY_ROOM, "%.200s %" PRId64, owner, seq_id);
}

static bool make_room(struct futures *f)
{
    if (f->n < f->cap) return true;
    const int64_t cap = f->cap ? 2 * f->cap : 256;
    struct future **list = realloc(f->list, (size_t)cap * sizeof *list);
    if (!list) return false;
    f->list = list;
    f->cap = cap;
    return true;
}

struct future *future_new(struct futures *f, const char *owner, int64_t seq_id)
{
    if (f->n >= MOST_FUTURES) {
        status_fail(ST_BUSY, "%d requests are under way or kept; try again later", MOST_FUTURES);
        return NULL;
    }
    struct future *u = calloc(1, sizeof *u);
    struct owner *o = u && make_room(f) ? need_owner(f, owner) : NULL;
    if (!o) {
        free(u);
        status_fail(ST_NO_MEMORY, "out of memory");
        return NULL;
    }
    o->n++;
    u->of = f;
    u->number = f->first + f->n;
    u->seq_id = seq_id;
    snprintf(u->owner, sizeof u->owner, "%.200s", owner);
    put_key(owner, seq_id, u->key);
    json_object_set_new(f->by_key, u->key, json_integer(u->number));
    f->list[f->n++] = u;
    return u;
}

static struct future *at(struct futures *f, int64_t number)
{
    return number >= f->first && number < f->first + f->n ? f->list[number - f->first] : NULL;
}

struct future *future_of(struct futures *f, const char *owner, int64_t seq_id)
{
    char key[FUTURE_KEY_ROOM];
    put_key(owner, seq_id, key);
    const json_t *number = json_object_get(f->by_key, key);
    return number ? at(f, json_integer_value(number)) : NULL;
}

bool futures_gave(const struct futures *f, const char *id)
{
    const size_t n = strlen(f->process);
    return strncmp(id, f->process, n) == 0 && id[n] == '-';
}

struct future *future_find(struct futures *f, const char *id)
{
    const size_t n = strlen(f->process);
    char *end;
    if (!futures_gave(f, id)) return NULL;
    const int64_t number = strtoll(id + n + 1, &end, 10);
    return end > id + n + 1 && *end == 0 ? at(f, number) : NULL;
}

void future_id(const struct future *u, char ret[FUTURE_ID_ROOM])
{
    snprintf(ret, FUTURE_ID_ROOM, "%s-%" PRId64, u->of->process, u->number);
}

void future_promise(struct future *u, struct http_request *q, json_t *more)
{
    char id[FUTURE_ID_ROOM];
    future_id(u, id);
    if (!u->promise) {
        u->promise = more ? json_incref(more) : json_object();
        json_object_set_new(u->promise, "request_id", json_string(id));
    }
    json_decref(more);
    http_reply_json(q, 200, json_incref(u->promise));
}

// ---- the answer ---------------------------------------------------------------------------------

static void answer(struct future *u, struct http_request *q)
{
    struct bytes body = BYTES_INIT;
    bytes_append(&body, bytes_text(&u->answer), u->answer.len);
    u->keep_until_ns = clock_deadline_ns(FUTURE_FETCHED_MS);
    http_reply(q, 200, u->protobuf ? "application/x-protobuf" : "application/json", &body);
}

static void end(struct future *u, int state)
{
    struct owner *o = find_owner(u->of, u->owner);
    u->state = state;
    u->keep_until_ns = clock_deadline_ns(FUTURE_KEEP_MS);
    u->place = ++o->places;
    *o->last = u;
    o->last = &u->next_done;
    struct http_request *q = u->waiting;
    if (!q) return;
    u->waiting = NULL;
    http_attach(q, NULL, NULL);
    answer(u, q);
}

void future_done_json(struct future *u, json_t *value)
{
    char *text = value ? json_dumps(value, JSON_COMPACT | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(value);
    if (!text) {
        future_fail(u, status_fail(ST_NO_MEMORY, "out of memory"));
        return;
    }
    bytes_puts(&u->answer, text);
    free(text);
    end(u, FUTURE_DONE);
}

void future_done_protobuf(struct future *u, struct bytes *value)
{
    u->answer = *value;
    u->protobuf = true;
    *value = (struct bytes)BYTES_INIT;
    end(u, FUTURE_DONE);
}

static bool is_clients_fault(enum status st)
{
    return st == ST_INVALID || st == ST_UNSUPPORTED || st == ST_MISMATCH || st == ST_FORMAT ||
           st == ST_NOT_FOUND || st == ST_TOO_LONG;
}

void future_fail(struct future *u, enum status st)
{
    json_t *error = json_pack("{s:o, s:s}", "error", json_clean_string(status_message()),
                              "category", is_clients_fault(st) ? "user" : "server");
    char *text = error ? json_dumps(error, JSON_COMPACT) : NULL;
    bytes_puts(&u->answer, text ? text : "{\"error\":\"failed\",\"category\":\"server\"}");
    free(text);
    json_decref(error);
    end(u, FUTURE_FAILED);
}

static void reply_later(struct http_request *q)
{
    http_reply_json(q, 408, json_pack("{s:s, s:s}", "type", "try_again", "queue_state", "active"));
}

static void on_gone(void *attached, bool answered)
{
    struct future *u = attached;
    (void)answered;
    if (u) u->waiting = NULL;
}

void future_retrieve(struct future *u, struct http_request *q)
{
    if (u->state != FUTURE_PENDING) {
        answer(u, q);
        return;
    }
    if (u->waiting) { // one asks at a time: an older question is of a connection that broke
        http_attach(u->waiting, NULL, NULL);
        reply_later(u->waiting);
    }
    u->waiting = q;
    u->hold_until_ns = clock_deadline_ns(FUTURE_HOLD_MS);
    http_attach(q, u, on_gone);
}

static void free_owner(struct futures *f, struct owner *o)
{
    struct owner **link = &f->owners;
    if (!o || !o->ended || o->n > 0) return;
    while (*link != o) link = &(*link)->next;
    *link = o->next;
    free(o);
}

void futures_end_owner(struct futures *f, const char *owner)
{
    struct owner *o = find_owner(f, owner);
    if (o) o->ended = true;
    free_owner(f, o);
}

static void forget(struct futures *f, int64_t i)
{
    struct future *u = f->list[i];
    struct owner *o = find_owner(f, u->owner);
    struct future **link = &o->first;
    while (*link && *link != u) link = &(*link)->next_done;
    if (*link) *link = u->next_done;
    if (o->last == &u->next_done) o->last = link;
    json_object_del(f->by_key, u->key);
    future_free(u);
    f->list[i] = NULL;
    o->n--;
    free_owner(f, o);
}

void futures_sweep(struct futures *f)
{
    const int64_t now = clock_now_ns();
    int64_t gone = 0;
    for (int64_t i = 0; i < f->n; i++) {
        struct future *u = f->list[i];
        if (!u) continue;
        if (u->waiting && now >= u->hold_until_ns) {
            struct http_request *q = u->waiting;
            u->waiting = NULL;
            http_attach(q, NULL, NULL);
            reply_later(q);
        }
        if (u->state != FUTURE_PENDING && now >= u->keep_until_ns) forget(f, i);
    }
    while (gone < f->n && !f->list[gone]) gone++;
    memmove(f->list, f->list + gone, (size_t)(f->n - gone) * sizeof *f->list);
    f->first += gone;
    f->n -= gone;
}

struct future *futures_done_of(struct futures *f, const char *owner)
{
    struct owner *o = find_owner(f, owner);
    return o ? o->first : NULL;
}
