/* endpoints_futures.c: the answers of all that takes a while, one at a time or all that is done of
 * a sampling session. Loop's thread. */
#include "trainer/serve/tinker.h"
#include "common/base/clock.h"
#include "common/base/json.h"

#include <stdlib.h>
#include <string.h>

// A copy of a client numbers its requests from a multiple of this on.
#define CLONE_SEQ_IDS 1000000000

void handle_retrieve(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    json_t *body = tinker_body(q);
    if (!body) return;
    const char *id = tinker_text(q, body, "request_id");
    struct future *future = id ? future_find(t->futures, id) : NULL;
    if (future)
        future_retrieve(future, q);
    else if (id && futures_gave(t->futures, id))
        http_fail(q, 410, "request %.60s is gone: it is older than %d s", id,
                  FUTURE_KEEP_MS / 1000);
    else if (id) // not 410, whose sentence the SDK does not show
        http_reply_json(q, 200,
                        json_pack("{s:o, s:s}", "error",
                                  json_string("this request was lost: cw-trainer serve was "
                                              "started anew since; go on from the last "
                                              "checkpoint"),
                                  "category", "server"));
    json_decref(body);
}

struct poll { // for what is done of a session
    struct poll *next;
    struct tinker *tinker;
    struct http_request *q;
    char sampler[ID_ROOM];
    int64_t clone, cursor, until_ns;
};

static json_t *completion(const struct future *u)
{
    char id[FUTURE_ID_ROOM];
    future_id(u, id);
    if (u->state == FUTURE_FAILED)
        return json_pack("{s:s, s:s}", "state", "failed", "request_id", id);
    return json_pack("{s:s, s:s, s:I}", "state", "finished", "request_id", id,
                     "response_payload_uncompressed_size", (json_int_t)u->answer.len);
}

// Answers where there is something, or `now`.
static bool answer_poll(struct tinker *t, const struct poll *p, bool now)
{
    json_t *list = json_array();
    int64_t cursor = p->cursor;
    for (struct future *u = futures_done_of(t->futures, p->sampler); u; u = u->next_done) {
        if (u->place <= p->cursor || u->seq_id / CLONE_SEQ_IDS != p->clone) continue;
        json_array_append_new(list, completion(u));
        cursor = u->place;
    }
    if (json_array_size(list) == 0 && !now) {
        json_decref(list);
        return false;
    }
    http_reply_json(p->q, 200,
                    json_pack("{s:o, s:I}", "completions", list, "cursor", (json_int_t)cursor));
    return true;
}

void tinker_polls_sweep(struct tinker *t)
{
    for (struct poll **link = &t->polls; *link;) {
        struct poll *p = *link;
        if (!answer_poll(t, p, clock_now_ns() >= p->until_ns)) {
            link = &p->next;
            continue;
        }
        http_attach(p->q, NULL, NULL);
        *link = p->next;
        free(p);
    }
}

static void on_gone(void *attached, bool answered)
{
    struct poll *gone = attached, **link = &gone->tinker->polls;
    (void)answered;
    while (*link != gone) link = &(*link)->next;
    *link = gone->next;
    free(gone);
}

void handle_retrieve_all(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    struct poll poll = {.tinker = t, .q = q};
    double timeout = FUTURE_HOLD_MS / 1e3;
    json_t *body = tinker_body(q);
    if (!body) return;
    const json_t *target = json_object_get(body, "target");
    const char *id = tinker_text(q, target, "sampling_session_id");
    enum status st = ST_OK;
    if (!id) goto out;
    if (!tinker_sampler(t, id))
        FAIL(ST_NOT_FOUND, "there is no sampling session \"%.100s\": " TINKER_FORGOTTEN, id);
    snprintf(poll.sampler, sizeof poll.sampler, "%s", id);
    CHECK(json_get_int("target", target, "cloned_sampler_id", 0, INT64_MAX, &poll.clone));
    CHECK(json_get_int("request", body, "prev_cursor", 0, INT64_MAX, &poll.cursor));
    CHECK(json_get_double("request", body, "timeout", 0, FUTURE_HOLD_MS / 1e3, &timeout));
    poll.until_ns = clock_deadline_ns((int64_t)(timeout * 1e3));
    if (answer_poll(t, &poll, timeout == 0)) goto out;
    struct poll *held = malloc(sizeof *held);
    if (!held) FAIL(ST_NO_MEMORY, "out of memory");
    *held = poll;
    held->next = t->polls;
    t->polls = held;
    http_attach(q, held, on_gone);
out:
    if (st != ST_OK) http_fail_status(q, st);
    json_decref(body);
}
