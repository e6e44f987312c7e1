/* training_request.c: a training run's requests, in order.
 *
 * They carry numbers without gaps; the client may send them in another order (the chunks of a large
 * forward_backward do come so), so that one behind a gap is held until the gap is filled. A number
 * that was seen before is the same request again: it gets the same promise. A gap that is not
 * filled in time ends the run for its client: what is behind it cannot be done as it was meant, and
 * fails, then and later. */
#include "trainer/serve/tinker.h"
#include "common/base/clock.h"
#include "common/base/log.h"

static void release(struct request *request)
{
    struct training_request *r = (struct training_request *)request;
    forward_backward_release(&r->data);
    json_decref(r->description);
    r->description = NULL;
}

static void make_sampler(struct training_request *r)
{
    struct owner *run = r->request.owner, *s;
    enum status st = tinker_new_sampler(run->session, r->sampler, run->base, &r->snapshot, &s);
    if (st != ST_OK) request_fail(&r->request, st);
}

static void deliver(struct inbox_message *message)
{
    struct training_request *r = (struct training_request *)message;
    r->request.owner->n_requests--;
    if (r->request.status == ST_OK && r->sampler[0])
        make_sampler(r);
    else if (r->request.status != ST_OK && r->request.seq_id == 0)
        r->request.owner->over = true; // its beginning failed
    request_end(&r->request);
}

static void prepare(struct request *r, training_perform perform)
{
    r->message.deliver = deliver;
    r->perform = perform;
    r->release = release;
}

enum status training_request_new(const struct call *c, struct owner *run, int64_t seq_id,
                                 training_perform perform, struct training_request **ret)
{
    struct request *r;
    enum status st = tinker_new_request(c, run, sizeof **ret, seq_id, &r);
    if (st != ST_OK) return st;
    if (r) prepare(r, perform);
    *ret = (struct training_request *)r;
    return ST_OK;
}

enum status training_request_of(const struct call *c, training_perform perform,
                                struct training_request **ret)
{
    struct owner *run;
    enum status st = tinker_find(c->tinker, TRAINING_RUN, c->model_id, &run);
    if (st == ST_OK && c->seq_id < 1)
        st = status_fail(ST_INVALID, "request: \"seq_id\" must be there, and at least 1");
    return st == ST_OK ? training_request_new(c, run, c->seq_id, perform, ret) : st;
}

// All that is behind the gap fails, and what comes later.
static void fail_held(struct owner *run)
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
                                    (long long)r->seq_id, run->id, (long long)run->missed));
        request_end(r);
    }
}

void training_requests_sweep(struct tinker *t)
{
    for (struct owner *run = NULL; (run = owner_next(t->requests, TRAINING_RUN, run));) {
        if (!run->held || clock_ms_since(run->held_ns) < t->options->gap_timeout * 1e3) continue;
        run->missed = run->next_seq;
        log_warn("%s: request %lld did not come, and what is behind it fails", run->id,
                 (long long)run->missed);
        fail_held(run);
    }
}

// Lets those go that have nothing missing before them: of a run that was given up, the missing one
// itself alone, should it come after all.
static void release_held(struct owner *run)
{
    while (run->held && run->held->seq_id <= run->next_seq) {
        struct request *r = run->held;
        run->held = r->next;
        run->next_seq = r->seq_id + 1;
        request_queue_append(&run->tinker->queue, r);
        run->held_ns = clock_now_ns();
    }
    fail_held(run);
}

void training_request_submit(struct training_request *r, const struct call *c, enum status st)
{
    struct owner *run = r->request.owner;
    struct request **link = &run->held;
    if (st != ST_OK) request_fail(&r->request, st);
    if (!run->held) run->held_ns = clock_now_ns();
    run->n_requests++;
    while (*link && (*link)->seq_id < r->request.seq_id) link = &(*link)->next;
    r->request.next = *link;
    *link = &r->request;
    release_held(run);
    request_promise(&r->request, c->q, json_pack("{s:s}", "model_id", run->id));
}

// ---- ending -------------------------------------------------------------------------------------

static enum status perform_ending(struct trained_model *m, struct request *request)
{
    trained_end(m, request->owner->id);
    return ST_OK;
}

void tinker_end_run(struct owner *run)
{
    struct request *r; // which nobody asks for
    run->over = true;
    // without memory its slot goes to whoever wants it first
    if (requests_add(run, sizeof(struct training_request), -1, &r) != ST_OK) return;
    prepare(r, perform_ending);
    run->n_requests++;
    request_queue_append(&run->tinker->queue, r);
}
