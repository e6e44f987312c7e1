/* reward_worker.c: what a process is asked, and what it replies. The thread that scores.
 *
 * Replies come in the order of the samples, or say by their "id" whose they are. A process that
 * ended is started once more in its life, and asked again for the samples it owes. */
#include "trainer/reward/reward_worker.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"

#include <math.h>
#include <string.h>

#define MAX_UNWRITTEN (1 << 18) // bytes of lines made before they can be written

bool worker_busy(const struct worker *w)
{
    return w->n_owed > 0 || w->child.out.len > 0;
}

static enum status put_request(struct child *child, const struct score_batch *b, int i)
{
    const struct reward_input *input = &b->inputs[i];
    json_t *request =
        json_pack("{s:I, s:O*, s:s, s:s*, s:i, s:b, s:O*, s:O*}", "id", b->first_id + i, "prompt",
                  input->prompt, "completion", input->text, "answer", input->answer, "tokens",
                  input->n_tokens, "truncated", input->truncated, "telemetry", input->telemetry,
                  "example", input->row);
    if (request && b->whole_groups) {
        json_object_set_new(request, "group", json_integer(input->group));
        json_object_set_new(request, "group_size", json_integer(input->group_size));
    }
    if (request && b->whole) json_object_set_new(request, "batch_size", json_integer(b->n));
    return json_put_line(&child->out, request, 0);
}

bool worker_has_room(const struct worker *w)
{
    return w->n_owed < w->room && w->child.out.len < MAX_UNWRITTEN;
}

enum status worker_ask(struct worker *w, const struct score_batch *b, int i)
{
    enum status st = put_request(&w->child, b, i);
    if (st != ST_OK) return st;
    if (w->n_owed == 0) w->heard_ns = clock_now_ns();
    w->owed[w->n_owed++] = i;
    return ST_OK;
}

// Which of the samples that a worker owes a reply is for, as its place in `owed`; -1: none.
static int whose(const struct worker *w, const struct score_batch *b, const json_t *reply)
{
    const json_t *id = json_object_get(reply, "id");
    if (!id) return w->n_owed ? 0 : -1;
    for (int k = 0; k < w->n_owed; k++)
        if (json_is_integer(id) && json_integer_value(id) == b->first_id + w->owed[k]) return k;
    return -1;
}

static enum status take_reply(struct worker *w, struct score_batch *b, const char *text, size_t len,
                              int *ret_failed)
{
    enum status st = ST_OK;
    json_error_t error;
    json_t *reply = json_loadb(text, len, 0, &error);
    const json_t *reward = json_object_get(reply, "reward");
    const char *why = json_string_value(json_object_get(reply, "error")), *line = w->child.line;
    const int place = whose(w, b, reply), shown = len > 200 ? 200 : (int)len;
    // null: it does not apply to the sample; 0 where it is neither
    const double score = json_is_null(reward) ? NAN : json_number_value(reward);
    if (place >= 0) *ret_failed = w->owed[place];
    if (why)
        st = status_fail(ST_INVALID, "command \"%s\": %s", line, why);
    else if (!json_is_null(reward) && (!json_is_number(reward) || !isfinite(score)))
        st = status_fail(ST_FORMAT, "command \"%s\": not {\"reward\": NUMBER}: %.*s", line, shown,
                         text);
    else if (place < 0 && w->n_owed)
        st = status_fail(ST_FORMAT, "command \"%s\": no sample of that \"id\" waits: %.*s", line,
                         shown, text);
    else if (place < 0)
        st = status_fail(ST_FORMAT, "command \"%s\": more than one line for one sample: %.*s", line,
                         shown, text);
    json_decref(reply);
    if (st != ST_OK) return st;
    b->scores[w->owed[place]] = score;
    memmove(&w->owed[place], &w->owed[place + 1], (size_t)(--w->n_owed - place) * sizeof *w->owed);
    b->n_done++;
    w->replied = true;
    w->heard_ns = clock_now_ns();
    return ST_OK;
}

static enum status take_replies(struct worker *w, struct score_batch *b, int *ret_failed)
{
    const char *text;
    size_t len;
    enum status st = ST_OK;
    while (st == ST_OK && child_line(&w->child, &text, &len))
        st = take_reply(w, b, text, len, ret_failed);
    return st;
}

// A process ended: the first time it is started again, and asked again for what it owes.
static enum status restart(struct worker *w, struct score_batch *b)
{
    if (w->restarted) return status_context(ST_PEER_GONE, "even when started again");
    log_progress_end();
    log_warn("%s; it is started again, and asked again for the %d sample%s it owes",
             status_message(), w->n_owed, w->n_owed == 1 ? "" : "s");
    w->restarted = true;
    enum status st = child_start(&w->child, w->child.line);
    for (int k = 0; st == ST_OK && k < w->n_owed; k++) st = put_request(&w->child, b, w->owed[k]);
    w->heard_ns = clock_now_ns();
    return st;
}

enum status worker_serve(struct worker *w, struct score_batch *b, int *ret_failed)
{
    *ret_failed = w->owed[0];
    enum status st = child_pump(&w->child);
    if (st == ST_PEER_GONE) st = restart(w, b);
    return st == ST_OK ? take_replies(w, b, ret_failed) : st;
}
