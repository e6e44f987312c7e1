/* training_request.c: a training run's requests, in order.
 *
 * They carry numbers without gaps; the client may send them in another order (the chunks of a large
 * forward_backward do come so), so that one behind a gap is held until the gap is filled. A number
 * that was seen before is the same request again: it gets the same promise. A gap that is not
 * filled in time ends the run for its client: what is behind it cannot be done as it was meant, and
 * fails, then and later. */
#include "trainer/serve/training_request.h"
#include "common/base/clock.h"
#include "common/base/log.h"

#include <stdlib.h>

static void release(struct request *request)
{
    struct training_request *r = (struct training_request *)request;
    forward_backward_release(&r->data);
    json_decref(r->description);
    r->description = NULL;
}

static void make_sampler(struct training_request *r)
{
    struct sampler *s;
    enum status st = tinker_new_sampler(r->tinker, r->run->owner.session, r->sampler,
                                        r->run->owner.base, &r->snapshot, &s);
    if (st != ST_OK) request_fail(&r->request, st);
}

static void deliver(struct inbox_message *message)
{
    struct training_request *r = (struct training_request *)message;
    r->run->n_requests--;
    if (r->request.status == ST_OK && r->sampler[0])
        make_sampler(r);
    else if (r->request.status != ST_OK && r->request.seq_id == 0)
        r->run->over = true; // its beginning failed
    request_end(&r->request);
}

enum status training_request_new(const struct call *c, struct training_run *run, int64_t seq_id,
                                 training_perform perform, struct training_request **ret)
{
    struct tinker *t = c->tinker;
    struct request *known = request_known(&run->owner, seq_id), *request;
    enum status st = ST_OK;
    *ret = NULL;
    if (known) {
        request_promise(known, c->q, NULL);
    } else if (seq_id < run->next_seq) {
        http_fail(c->q, 410, "request %lld of %s was answered, and is forgotten", (long long)seq_id,
                  run->owner.id);
    } else {
        CHECK(tinker_takes_work(t));
        CHECK(requests_add(&run->owner, sizeof **ret, seq_id, &request));
        struct training_request *r = (struct training_request *)request;
        request->message.deliver = deliver;
        request->perform = perform;
        request->release = release;
        r->tinker = t;
        r->run = run;
        *ret = r;
    }
out:
    return st;
}

enum status training_request_of(const struct call *c, training_perform perform,
                                struct training_request **ret)
{
    struct training_run *run;
    enum status st = tinker_training_run(c->tinker, c->model_id, &run);
    if (st == ST_OK && c->seq_id < 1)
        st = status_fail(ST_INVALID, "request: \"seq_id\" must be there, and at least 1");
    return st == ST_OK ? training_request_new(c, run, c->seq_id, perform, ret) : st;
}

// All that is behind the gap fails, and what comes later.
static void fail_held(struct training_run *run)
{
    while (run->missed && run->held) {
        struct request *r = run->held;
        run->held = r->next;
        run->n_requests--;
        request_fail(r, status_fail(ST_INVALID,
                                    "request %lld of %s cannot be done: request %lld, which goes "
                                    "before it, did not come within --gap-timeout. Numbers "
                                    "(seq_id) of a training client have no gaps; make another one, "
                                    "from its last checkpoint "
                                    "(create_training_client_from_state_with_optimizer)",
                                    (long long)r->seq_id, run->owner.id, (long long)run->missed));
        request_end(r);
    }
}

void training_requests_sweep(struct tinker *t)
{
    for (struct training_run *run = NULL; (run = tinker_next_run(t, run));) {
        if (!run->held || clock_ms_since(run->held_ns) < t->options->gap_timeout * 1e3) continue;
        run->missed = run->next_seq;
        log_warn("%s: request %lld did not come, and what is behind it fails", run->owner.id,
                 (long long)run->missed);
        fail_held(run);
    }
}

// Lets those go that have nothing missing before them: of a run that was given up, the missing one
// itself alone, should it come after all.
static void release_held(struct tinker *t, struct training_run *run)
{
    while (run->held && run->held->seq_id <= run->next_seq) {
        struct request *r = run->held;
        run->held = r->next;
        run->next_seq = r->seq_id + 1;
        request_queue_append(&t->queue, r);
        run->held_ns = clock_now_ns();
    }
    fail_held(run);
}

void training_request_submit(struct training_request *r, const struct call *c, enum status st)
{
    struct training_run *run = r->run;
    struct request **link = &run->held;
    if (st != ST_OK) request_fail(&r->request, st);
    if (!run->held) run->held_ns = clock_now_ns();
    run->n_requests++;
    while (*link && (*link)->seq_id < r->request.seq_id) link = &(*link)->next;
    r->request.next = *link;
    *link = &r->request;
    release_held(r->tinker, run);
    request_promise(&r->request, c->q, json_pack("{s:s}", "model_id", run->owner.id));
}

// ---- ending -------------------------------------------------------------------------------------

static enum status perform_ending(struct trained_model *m, struct request *request)
{
    trained_end(m, ((struct training_request *)request)->run->owner.id);
    return ST_OK;
}

static void ended(struct inbox_message *message)
{
    struct training_request *r = (struct training_request *)message;
    r->run->n_requests--;
    bytes_release(&r->request.response);
    free(r);
}

void tinker_end_run(struct tinker *t, struct training_run *run)
{
    struct training_request *r = calloc(1, sizeof *r); // which nobody asks for
    if (!r) return; // then its slot goes to whoever wants it first
    r->request.message.deliver = ended;
    r->request.perform = perform_ending;
    r->run = run;
    run->over = true;
    run->n_requests++;
    request_queue_append(&t->queue, &r->request);
}
