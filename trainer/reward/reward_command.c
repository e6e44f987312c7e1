/* reward_command.c: the scorer `command:PROGRAM ARGS`: child processes that read one JSON object a
 * line from their standard input and reply to each with {"reward": x} on their standard output.
 * Owns the workers. The thread that scores.
 *
 * A step's samples are divided among the processes (--reward-processes), and each is sent many
 * before the first is replied to, so that a program may take them in batches or work on several at
 * once. Replies come in the order of the samples, or say by their "id" whose they are. Three things
 * can go wrong, and none of them is ever a 0: no reply in time and a malformed reply end the run
 * with a sentence; a process that ended is started once more in its life, and asked again for the
 * samples it owes. */
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "trainer/launch/child.h"
#include "trainer/reward/reward_scorer.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PROCESSES 256
#define MAX_UNWRITTEN (1 << 18) // bytes of lines made before they can be written
#define WINDOW        256  // samples that one process owes, at most, unless it takes whole batches
#define START_MS      300  // a program that cannot be started has ended by then
#define HINT_MS       5000 // of silence

struct worker { // all zero but for a started child and a place for what it owes: owes nothing
    struct child child;
    int *owed; // (room) samples of the batch, in the order they were sent
    int n_owed, room;
    int64_t heard_ns; // its last reply, or when it was asked after a pause
    bool replied;     // once at least
    bool restarted;
};
struct score_batch {
    const struct reward_input *inputs;
    int n, next, n_done; // next: to be handed out
    json_int_t first_id;
    double *scores;           // (n)
    bool whole_groups, whole; // whole: it is one process's, which is told so
};

// ---- one process --------------------------------------------------------------------------------

// It owes a reply, or has yet to read what it was sent: one may reply before it has read all.
static bool worker_busy(const struct worker *w)
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

// For one more sample.
static bool worker_has_room(const struct worker *w)
{
    return w->n_owed < w->room && w->child.out.len < MAX_UNWRITTEN;
}

// Makes the line that asks for sample i, which worker_serve() writes.
static enum status worker_ask(struct worker *w, const struct score_batch *b, int i)
{
    enum status st = put_request(&w->child, b, i);
    if (st != ST_OK) return st;
    if (w->n_owed == 0) w->heard_ns = clock_now_ns();
    w->owed[w->n_owed++] = i;
    return ST_OK;
}

// Which of the samples that a worker owes a reply is for, as its index in `owed`; -1: none.
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
    const int index = whose(w, b, reply), shown = len > 200 ? 200 : (int)len;
    // null: it does not apply to the sample; 0 where it is neither
    const double score = json_is_null(reward) ? NAN : json_number_value(reward);
    if (index >= 0) *ret_failed = w->owed[index];
    if (why)
        st = status_fail(ST_INVALID, "command \"%s\": %s", line, why);
    else if (!json_is_null(reward) && (!json_is_number(reward) || !isfinite(score)))
        st = status_fail(ST_FORMAT, "command \"%s\": not {\"reward\": NUMBER}: %.*s", line, shown,
                         text);
    else if (index < 0 && w->n_owed)
        st = status_fail(ST_FORMAT, "command \"%s\": no sample of that \"id\" waits: %.*s", line,
                         shown, text);
    else if (index < 0)
        st = status_fail(ST_FORMAT, "command \"%s\": more than one line for one sample: %.*s", line,
                         shown, text);
    json_decref(reply);
    if (st != ST_OK) return st;
    b->scores[w->owed[index]] = score;
    memmove(&w->owed[index], &w->owed[index + 1], (size_t)(--w->n_owed - index) * sizeof *w->owed);
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

// Writes and reads what can be without waiting, and puts the replies into the batch's scores.
// ret_failed: the sample that an error is about.
static enum status worker_serve(struct worker *w, struct score_batch *b, int *ret_failed)
{
    *ret_failed = w->owed[0];
    enum status st = child_pump(&w->child);
    if (st == ST_PEER_GONE) st = restart(w, b);
    return st == ST_OK ? take_replies(w, b, ret_failed) : st;
}

// ---- all of them --------------------------------------------------------------------------------

struct command {
    char *line; // as given, owned
    int timeout_ms, n_workers;
    struct worker *workers; // (n_workers)
    json_int_t n_asked;     // samples of earlier batches: ids go on
    bool failed;            // a reply is missing for ever: nothing can be scored any more
    bool whole_groups, whole_batches;
    struct worker *current; // that has the last sample handed out
    bool hinted;
};

// The process that owes least and can take more; NULL: none can.
static struct worker *idlest(struct command *c)
{
    struct worker *idlest = NULL;
    for (int k = 0; k < c->n_workers; k++) {
        struct worker *w = &c->workers[k];
        if (worker_has_room(w) && (!idlest || w->n_owed < idlest->n_owed)) idlest = w;
    }
    return idlest;
}

// Who is asked for the next sample; NULL: nobody has room. The rest of a group goes where its first
// went, whose window has room for it.
static struct worker *next_worker(struct command *c, const struct score_batch *b)
{
    const struct reward_input *next = &b->inputs[b->next];
    if (b->whole) return worker_has_room(c->workers) ? c->workers : NULL;
    if (!b->whole_groups || b->next == 0 || next->group != b->inputs[b->next - 1].group)
        return c->current = idlest(c);
    return worker_has_room(c->current) ? c->current : NULL;
}

static enum status hand_out(struct command *c, struct score_batch *b, int *ret_failed)
{
    struct worker *w;
    while (b->next < b->n && (w = next_worker(c, b))) {
        enum status st = worker_ask(w, b, b->next);
        if (st != ST_OK) {
            *ret_failed = b->next;
            return st;
        }
        b->next++;
    }
    return ST_OK;
}

// ---- time ---------------------------------------------------------------------------------------

static enum status check_silence(struct command *c, const struct worker *w, int *ret_failed)
{
    static const char hint[] = "if it has computed, its output is buffered: it must flush after "
                               "every line (python -u, print(..., flush=True), stdbuf -oL)";
    const double silent_ms = clock_ms_since(w->heard_ns);
    if (!worker_busy(w)) return ST_OK;
    if (silent_ms >= c->timeout_ms) {
        *ret_failed = w->owed[0]; // or the last that it answered
        if (!w->n_owed)
            return status_fail(
                ST_TIMEOUT,
                "command \"%s\" answered a sample before it had read it, and did not "
                "read on within %g s (--reward-timeout)",
                c->line, c->timeout_ms / 1e3);
        return status_fail(
            ST_TIMEOUT, "command \"%s\" gave no reply within %g s (--reward-timeout)%s%s", c->line,
            c->timeout_ms / 1e3, w->replied ? "" : "; ", w->replied ? "" : hint);
    }
    if (silent_ms >= HINT_MS && !w->replied && !c->hinted) {
        c->hinted = true;
        log_progress_end();
        log_warn("command \"%s\" was asked for its first rewards %d s ago and has not answered; %s",
                 c->line, HINT_MS / 1000, hint);
    }
    return ST_OK;
}

// Waits until a process can be written to or read from, or has been silent for too long.
static enum status wait_for_any(struct command *c)
{
    struct pollfd fds[2 * MAX_PROCESSES];
    int n = 0;
    double ms = c->timeout_ms;
    for (int k = 0; k < c->n_workers; k++) {
        const struct worker *w = &c->workers[k];
        const struct child *child = &w->child;
        if (!worker_busy(w)) continue;
        fds[n++] = (struct pollfd){.fd = child->from, .events = POLLIN};
        if (child->out.len) fds[n++] = (struct pollfd){.fd = child->to, .events = POLLOUT};
        double silent_ms = clock_ms_since(w->heard_ns);
        ms = fmin(ms, c->timeout_ms - silent_ms);
        if (!w->replied && !c->hinted) ms = fmin(ms, HINT_MS - silent_ms);
    }
    if (poll(fds, (nfds_t)n, (int)ceil(fmax(ms, 0))) < 0 && errno != EINTR)
        return status_fail(ST_IO, "command \"%s\": poll: %s", c->line, strerror(errno));
    return ST_OK;
}

// ---- scorer -------------------------------------------------------------------------------------

static void command_close(void *state)
{
    struct command *c = state;
    if (!c) return;
    for (int k = 0; c->workers && k < c->n_workers; k++) {
        child_end(&c->workers[k].child);
        free(c->workers[k].owed);
    }
    free(c->workers);
    free(c->line);
    free(c);
}

// For so many samples that it owes.
static enum status make_room(struct worker *w, int n)
{
    if (n <= w->room) return ST_OK;
    int *owed = realloc(w->owed, (size_t)n * sizeof *owed);
    if (!owed) return status_fail(ST_NO_MEMORY, "no memory for %d samples of a reward", n);
    w->owed = owed;
    w->room = n;
    return ST_OK;
}

static enum status command_open(const struct reward_options *options, const char *argument,
                                void **ret_state)
{
    enum status st = ST_OK;
    struct command *c = calloc(1, sizeof *c);
    if (!c) return status_fail(ST_NO_MEMORY, "no memory for the reward \"command\"");
    c->timeout_ms = (int)(options->timeout_s * 1e3);
    c->whole_groups = options->whole_groups;
    c->whole_batches = options->whole_batches;
    c->n_workers = options->processes > 1 ? (int)options->processes : 1;
    if (strspn(argument, " ") == strlen(argument))
        FAIL(ST_INVALID, "reward \"command:\" names no program");
    if (c->n_workers > MAX_PROCESSES)
        FAIL(ST_INVALID, "--reward-processes %d: at most %d", c->n_workers, MAX_PROCESSES);
    if (c->whole_batches && c->n_workers > 1)
        FAIL(ST_INVALID,
             "--reward-batches with --reward-processes %d: one process has all of a "
             "batch; leave one of the two out",
             c->n_workers);
    c->line = strdup(argument);
    c->workers = calloc((size_t)c->n_workers, sizeof *c->workers);
    if (!c->line || !c->workers) FAIL(ST_NO_MEMORY, "no memory for the reward \"command\"");
    for (int k = 0; k < c->n_workers; k++) {
        CHECK(make_room(&c->workers[k], WINDOW));
        CHECK(child_start(&c->workers[k].child, c->line));
    }
    *ret_state = c;
out:
    if (st != ST_OK) command_close(c);
    return st;
}

static enum status command_check(void *state)
{
    struct command *c = state;
    for (int k = 0; k < c->n_workers; k++) {
        enum status st = child_check(&c->workers[k].child, START_MS);
        if (st != ST_OK) return st;
    }
    return ST_OK;
}

// Nothing may be written between batches, nor anything be left unread: more lines than samples.
static enum status check_quiet(struct command *c, const char *fault)
{
    for (int k = 0; k < c->n_workers; k++) {
        struct child *child = &c->workers[k].child;
        if (!child_unread(child) && !*child_rest(child)) continue;
        child_pump(child); // to show it
        return status_fail(ST_FORMAT, "command \"%s\" %s: %.200s", c->line, fault,
                           child_rest(child));
    }
    return ST_OK;
}

static enum status score_batch(struct command *c, struct score_batch *b, int *ret_failed)
{
    enum status st;
    CHECK(check_quiet(c, "wrote without being asked"));
    CHECK(hand_out(c, b, ret_failed));
    while (b->n_done < b->n) {
        for (int k = 0; k < c->n_workers; k++) {
            if (!worker_busy(&c->workers[k])) continue;
            CHECK(worker_serve(&c->workers[k], b, ret_failed));
            CHECK(check_silence(c, &c->workers[k], ret_failed));
        }
        CHECK(hand_out(c, b, ret_failed));
        if (b->n_done < b->n) CHECK(wait_for_any(c));
    }
    *ret_failed = b->n - 1;
    CHECK(check_quiet(c, "gave more than one line for one sample"));
out:
    return st;
}

static enum status command_score(void *state, const struct reward_input *inputs, int n,
                                 double *ret_scores, int *ret_failed)
{
    struct command *c = state;
    struct score_batch b = {.inputs = inputs,
                            .n = n,
                            .first_id = c->n_asked,
                            .scores = ret_scores,
                            .whole_groups = c->whole_groups,
                            .whole = c->whole_batches};
    c->n_asked += n;
    *ret_failed = 0;
    enum status st = b.whole ? make_room(c->workers, n) : ST_OK;
    if (st != ST_OK) return st;
    if (b.whole_groups && !b.whole && n > 0 && inputs[0].group_size > WINDOW)
        return status_fail(ST_INVALID,
                           "--reward-groups: a group has %d samples, and a process is given %d at "
                           "most before it has replied",
                           inputs[0].group_size, WINDOW);
    if (c->failed) return status_fail(ST_PEER_GONE, "command \"%s\" is gone", c->line);
    st = score_batch(c, &b, ret_failed);
    if (st == ST_OK) return ST_OK;
    c->failed = true;
    for (int k = 0; k < c->n_workers; k++) child_end(&c->workers[k].child);
    return st;
}

const struct scorer scorer_command = {
    .name = "command",
    .takes_argument = true,
    .help =
        "command:PROGRAM ARGS, child processes fed JSON lines (--reward-processes); last in the "
        "list, or before another command:",
    .open = command_open,
    .close = command_close,
    .check = command_check,
    .score_all = command_score,
};
