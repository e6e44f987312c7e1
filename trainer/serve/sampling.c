/* sampling.c: samples from the server, by /v1/rollouts on its Unix socket, thousands at once over
 * few connections. Loop's thread.
 *
 * Samples that are sampled alike (temperature, length, stops) and wait at the same time, as all do
 * that came in one turn of the loop, go as one request of many groups. What is refused as a whole
 * is sent again one by one, so that one bad request fails no other. Whatever ends is posted to the
 * inbox, and delivered in the loop's next turn. */
#include "trainer/serve/tinker.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/http/http_client.h"
#include "trainer/rollout/rollout.h"

#include <stdlib.h>
#include <string.h>

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
};

static void come_back(struct sample_request *r, enum status st)
{
    if (st != ST_OK) request_fail(&r->request, st);
    inbox_post(&r->request.owner->tinker->inbox, &r->request.message);
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
    body = json_pack("{s:o, s:O, s:s*}", "groups", groups, "sampling", any->sampling, "model",
                     any->use.adapter[0] ? any->use.adapter : NULL);
    if (!body) FAIL(ST_NO_MEMORY, "out of memory");
    const struct http_call call = {.path = "/v1/rollouts",
                                   .post = true,
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
    status_keep(&failure, st);
    for (int i = 0; i < f->n; i++) {
        struct sample_request *r = f->requests[i];
        if (!r) continue;
        const bool again = st == ST_INVALID && f->n_left > 1 && !r->alone;
        r->alone = true;
        if (again) {
            sample_request_clear(r);
            tinker_sample(r);
        } else {
            come_back(r, status_recall(&failure));
        }
    }
}

static void end_flight(struct flight *f)
{
    struct flight **link = &f->tinker->flights;
    while (*link != f) link = &(*link)->next;
    *link = f->next;
    free(f);
}

// True where it is over.
static bool advance(struct flight *f)
{
    enum status st;
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

// A request can go with those that wait to be sent.
static bool fits(const struct flight *f, const struct sample_request *r)
{
    return !f->ask.transfer && !r->alone && !f->requests[0]->alone && f->n < MAX_GROUPS &&
           f->samples + r->n <= MAX_SAMPLES &&
           strcmp(f->requests[0]->use.adapter, r->use.adapter) == 0 &&
           json_equal(f->requests[0]->sampling, r->sampling);
}

void tinker_sample(struct sample_request *r)
{
    struct tinker *t = r->request.owner->tinker;
    struct flight *f = t->flights;
    while (f && !fits(f, r)) f = f->next;
    if (!f) {
        if (!(f = calloc(1, sizeof *f))) {
            come_back(r, status_fail(ST_NO_MEMORY, "out of memory"));
            return;
        }
        f->tinker = t;
        f->servers = rollout_servers_of(t->server, t->model->control, t->model->limits.vocab,
                                        t->model->sample_timeout);
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
        if (advance(f)) end_flight(f);
    }
    http_poll_with(t->server, &loop, 1, ms);
}

void tinker_end_samples(struct tinker *t)
{
    while (t->flights) {
        rollout_cancel(&t->flights->pull, &t->flights->ask);
        give_up(t->flights, status_fail(ST_CANCELLED, "the server of the Tinker API is stopping"));
        end_flight(t->flights);
    }
}
