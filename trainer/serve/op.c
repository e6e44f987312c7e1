/* op.c: a training run's requests on their way to the main thread and back. Loop's thread.
 *
 * They carry numbers without gaps; the client may send them in another order (the parts of a large
 * forward_backward do come so), so that one behind a gap is held until the gap is filled. A number
 * that was seen before is the same request again: it gets the same future. A gap that is not filled
 * in time ends the run for its client: what is behind it cannot be done as it was meant, and fails,
 * then and later. */
#include "trainer/serve/tinker.h"
#include "common/base/clock.h"
#include "common/base/log.h"

#include <stdlib.h>

static void op_free(struct op *op)
{
    if (!op) return;
    forward_backward_release(&op->request);
    bytes_release(&op->answer);
    json_decref(op->description);
    free(op);
}

static void deliver(struct inbox_message *message)
{
    struct op *op = (struct op *)message;
    enum status st = status_recall(&op->work.status);
    if (st == ST_OK)
        op->done(op);
    else
        future_fail(op->future, st);
    if (st != ST_OK && op->seq_id == 0) op->model->over = true; // its beginning failed
    op->model->n_ops--;
    op_free(op);
}

void op_free_held(struct training_run *m)
{
    while (m->held) {
        struct op *op = m->held;
        m->held = op->next;
        op_free(op);
    }
}

struct op *op_new(struct tinker *t, struct http_request *q, struct training_run *m, int64_t seq_id,
                  enum status (*run)(struct policy *, struct work *), void (*done)(struct op *))
{
    struct future *known = m && seq_id >= 0 ? future_of(t->futures, m->id, seq_id) : NULL;
    struct op *op = NULL;
    if (known)
        future_promise(known, q, NULL);
    else if (m && seq_id >= 0 && seq_id < m->next_seq)
        http_fail(q, 410, "request %lld of %s was answered, and is forgotten", (long long)seq_id,
                  m->id);
    else if (m && seq_id >= 0 && tinker_takes_work(t, q) && !(op = calloc(1, sizeof *op)))
        http_fail(q, 500, "out of memory");
    if (!op) return NULL;
    op->work.message.deliver = deliver;
    op->work.run = run;
    op->done = done;
    op->tinker = t;
    op->model = m;
    op->seq_id = seq_id;
    return op;
}

struct op *op_of(struct tinker *t, struct http_request *q, const json_t *body,
                 enum status (*run)(struct policy *, struct work *), void (*done)(struct op *))
{
    const char *id = tinker_text(q, body, "model_id");
    struct training_run *m = id ? tinker_training_run(t, q, id) : NULL;
    const int64_t seq_id = m ? tinker_number(q, body, "seq_id", 1) : -1;
    return op_new(t, q, m, seq_id, run, done);
}

static enum status fail_missed(const struct training_run *m, const struct op *op)
{
    return status_fail(
        ST_INVALID,
        "request %lld of %s cannot be done: request %lld, which goes before it, did "
        "not come within --gap-timeout. Numbers (seq_id) of a training client have no "
        "gaps; make another one, from its last checkpoint "
        "(create_training_client_from_state_with_optimizer)",
        (long long)op->seq_id, m->id, (long long)m->missed);
}

// What is behind the gap fails, and what comes later.
static void fail_held(struct training_run *m)
{
    while (m->missed && m->held) {
        struct op *op = m->held;
        m->held = op->next;
        m->n_ops--;
        future_fail(op->future, fail_missed(m, op));
        op_free(op);
    }
}

void op_sweep(struct tinker *t)
{
    const int64_t most_ms = (int64_t)(t->options->gap_timeout * 1e3);
    for (struct training_run *m = t->training_runs; m; m = m->next) {
        if (!m->held || clock_ms_since(m->held_ns) < (double)most_ms) continue;
        m->missed = m->next_seq;
        log_warn("%s: request %lld did not come, and what is behind it fails", m->id,
                 (long long)m->missed);
        fail_held(m);
    }
}

// Lets those go that have nothing missing before them: of a run that was given up, the missing one
// itself alone, should it come after all.
static void release_held(struct tinker *t, struct training_run *m)
{
    while (m->held && m->held->seq_id <= m->next_seq) {
        struct op *op = m->held;
        m->held = op->next;
        m->next_seq = op->seq_id + 1;
        work_put(t->works, &op->work);
        m->held_ns = clock_now_ns();
    }
    fail_held(m);
}

void op_submit(struct op *op, struct http_request *q)
{
    struct training_run *m = op->model;
    struct op **link = &m->held;
    op->future = future_new(op->tinker->futures, m->id, op->seq_id);
    if (!op->future) {
        http_fail_status(q, ST_BUSY);
        op_free(op);
        return;
    }
    struct future *future = op->future;
    if (!m->held) m->held_ns = clock_now_ns();
    m->n_ops++;
    while (*link && (*link)->seq_id < op->seq_id) link = &(*link)->next;
    op->next = *link;
    *link = op;
    release_held(op->tinker, m);
    future_promise(future, q, json_pack("{s:s}", "model_id", m->id));
}

static enum status run_refused(struct policy *policy, struct work *work)
{
    (void)policy;
    return status_recall(&work->status);
}

void op_refuse(struct op *op, enum status st)
{
    status_keep(&op->work.status, st);
    if (st != ST_OK) op->work.run = run_refused;
}

void op_note_live(struct op *op, bool saved)
{
    char path[RUN_PATH_ROOM];
    run_path_put(&op->path, path);
    const json_t *before = json_object_get(op->tinker->live, path);
    const json_int_t saves = json_integer_value(json_object_get(before, "saves")) + saved;
    json_object_set_new(op->tinker->live, path,
                        json_pack("{s:s, s:I, s:b, s:I}", "run", op->snapshot.run, "version",
                                  (json_int_t)op->snapshot.version, "base", op->snapshot.base,
                                  "saves", saves));
}
