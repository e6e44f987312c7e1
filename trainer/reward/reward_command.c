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
// SPDX-License-Identifier: Apache-2.0
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
struct command {
    char *line; // as given, owned
    int timeout_ms, n_workers;
    bool whole_groups, whole_batches;
    bool failed; // a reply is missing for ever: nothing can be scored any more
    bool hinted;
    struct worker *workers; // (n_workers)
    // the batch that is scored
    const struct reward_input *inputs;
    double *scores;         // (n)
    int n, next, n_done;    // next: to be handed out
    int failing;            // the sample that an error is about
    json_int_t first_id;    // ids go on from batch to batch
    struct worker *current; // that has the last sample handed out
};

// ---- one process --------------------------------------------------------------------------------

// It owes a reply, or has yet to read what it was sent: one may reply before it has read all.
static bool worker_busy(const struct worker *w)
{
    return w->n_owed > 0 || w->child.out.len > 0;
}

// Makes the line that asks for sample i, which worker_serve() writes.
static enum status put_request(const struct command *c, struct worker *w, int i)
{
    const struct reward_input *input = &c->inputs[i];
    json_t *request =
        json_pack("{s:I, s:O*, s:s, s:s*, s:i, s:b, s:O*, s:O*}", "id", c->first_id + i, "prompt",
                  input->prompt, "completion", input->text, "answer", input->answer, "tokens",
                  input->n_tokens, "truncated", input->truncated, "telemetry", input->telemetry,
                  "example", input->row);
    if (request && c->whole_groups) {
        json_object_set_new(request, "group", json_integer(input->group));
        json_object_set_new(request, "group_size", json_integer(input->group_size));
    }
    if (request && c->whole_batches) json_object_set_new(request, "batch_size", json_integer(c->n));
    return json_put_line(&w->child.out, request, 0);
}

// Which of the samples that a worker owes a reply is for, as its index in `owed`; -1: none.
static int whose(const struct command *c, const struct worker *w, const json_t *reply)
{
    const json_t *id = json_object_get(reply, "id");
    if (!id) return w->n_owed ? 0 : -1;
    for (int k = 0; k < w->n_owed; k++)
        if (json_is_integer(id) && json_integer_value(id) == c->first_id + w->owed[k]) return k;
    return -1;
}

static enum status take_reply(struct command *c, struct worker *w, const char *text, size_t len)
{
    enum status st = ST_OK;
    json_error_t error;
    json_t *reply = json_loadb(text, len, 0, &error);
    const json_t *reward = json_object_get(reply, "reward");
    const char *why = json_string_value(json_object_get(reply, "error")), *wrong = NULL;
    const int index = whose(c, w, reply);
    const char *shown = text_cut(text, len, 200, (char[204]){0});
    // null: it does not apply to the sample; 0 where it is neither
    const double score = json_is_null(reward) ? NAN : json_number_value(reward);
    if (index >= 0) c->failing = w->owed[index];
    if (!json_is_null(reward) && (!json_is_number(reward) || !isfinite(score)))
        wrong = "not {\"reward\": NUMBER}";
    else if (index < 0)
        wrong = w->n_owed ? "no sample of that \"id\" waits" : "more than one line for one sample";
    if (why)
        st = status_fail(ST_INVALID, "command \"%s\": %s", c->line, why);
    else if (wrong)
        st = status_fail(ST_FORMAT, "command \"%s\": %s: %s", c->line, wrong, shown);
    json_decref(reply);
    if (st != ST_OK) return st;
    c->scores[w->owed[index]] = score;
    memmove(&w->owed[index], &w->owed[index + 1], (size_t)(--w->n_owed - index) * sizeof *w->owed);
    c->n_done++;
    w->replied = true;
    w->heard_ns = clock_now_ns();
    return ST_OK;
}

// A process ended: the first time it is started again, and asked again for what it owes.
static enum status restart(const struct command *c, struct worker *w)
{
    if (w->restarted) return status_context(ST_PEER_GONE, "even when started again");
    log_progress_end();
    log_warn("%s; it is started again, and asked again for the %d sample%s it owes",
             status_message(), w->n_owed, w->n_owed == 1 ? "" : "s");
    w->restarted = true;
    enum status st = child_start(&w->child, c->line);
    for (int k = 0; st == ST_OK && k < w->n_owed; k++) st = put_request(c, w, w->owed[k]);
    w->heard_ns = clock_now_ns();
    return st;
}

// Writes and reads what can be without waiting, and puts the replies into the batch's scores.
static enum status worker_serve(struct command *c, struct worker *w)
{
    const char *text;
    size_t len;
    c->failing = w->owed[0];
    enum status st = child_pump(&w->child);
    if (st == ST_PEER_GONE) st = restart(c, w);
    while (st == ST_OK && child_line(&w->child, &text, &len)) st = take_reply(c, w, text, len);
    return st;
}

// ---- all of them --------------------------------------------------------------------------------

// Who is asked for the next sample: of those that have room who owes least; NULL: nobody has any.
// The rest of a group goes where its first went, whose window has room for it.
static struct worker *next_worker(struct command *c)
{
    const struct reward_input *next = &c->inputs[c->next];
    const bool any =
        c->whole_batches || !c->whole_groups || c->next == 0 || next->group != next[-1].group;
    struct worker *idlest = NULL;
    for (struct worker *w = c->workers; w < c->workers + c->n_workers; w++)
        if (w->n_owed < w->room && w->child.out.len < MAX_UNWRITTEN &&
            (any ? !idlest || w->n_owed < idlest->n_owed : w == c->current))
            idlest = w;
    if (any) c->current = idlest;
    return idlest;
}

static enum status hand_out(struct command *c)
{
    struct worker *w;
    for (; c->next < c->n && (w = next_worker(c)); c->next++) {
        enum status st = put_request(c, w, c->failing = c->next);
        if (st != ST_OK) return st;
        if (w->n_owed == 0) w->heard_ns = clock_now_ns();
        w->owed[w->n_owed++] = c->next;
    }
    return ST_OK;
}

// ---- time ---------------------------------------------------------------------------------------

static enum status check_silence(struct command *c, const struct worker *w)
{
    static const char hint[] = "if it has computed, its output is buffered: it must flush after "
                               "every line (python -u, print(..., flush=True), stdbuf -oL)";
    const double silent_ms = clock_ms_since(w->heard_ns);
    if (!worker_busy(w)) return ST_OK;
    if (silent_ms >= c->timeout_ms) {
        c->failing = w->owed[0]; // or the last that it answered
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
    for (int k = 0; k < c->n_workers; k++) CHECK(child_start(&c->workers[k].child, c->line));
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
        return status_fail(ST_FORMAT, "command \"%s\" %s: %s", c->line, fault,
                           CUT(child_rest(child), 200));
    }
    return ST_OK;
}

static enum status score_batch(struct command *c)
{
    enum status st;
    for (int k = 0; k < c->n_workers; k++) {
        struct worker *w = &c->workers[k];
        w->room = c->whole_batches && c->n > WINDOW ? c->n : WINDOW;
        free(w->owed);
        w->owed = calloc((size_t)w->room, sizeof *w->owed);
        if (!w->owed) FAIL(ST_NO_MEMORY, "no memory for %d samples of a reward", w->room);
    }
    CHECK(check_quiet(c, "wrote without being asked"));
    CHECK(hand_out(c));
    while (c->n_done < c->n) {
        for (int k = 0; k < c->n_workers; k++) {
            if (!worker_busy(&c->workers[k])) continue;
            CHECK(worker_serve(c, &c->workers[k]));
            CHECK(check_silence(c, &c->workers[k]));
        }
        CHECK(hand_out(c));
        if (c->n_done < c->n) CHECK(wait_for_any(c));
    }
    c->failing = c->n - 1;
    CHECK(check_quiet(c, "gave more than one line for one sample"));
out:
    return st;
}

static enum status command_score(void *state, const struct reward_input *inputs, int n,
                                 double *ret_scores, int *ret_failed)
{
    struct command *c = state;
    *ret_failed = 0;
    if (c->whole_groups && !c->whole_batches && n > 0 && inputs[0].group_size > WINDOW)
        return status_fail(ST_INVALID,
                           "--reward-groups: a group has %d samples, and a process is given %d at "
                           "most before it has replied",
                           inputs[0].group_size, WINDOW);
    if (c->failed) return status_fail(ST_PEER_GONE, "command \"%s\" is gone", c->line);
    c->first_id += c->n;
    c->inputs = inputs;
    c->scores = ret_scores;
    c->n = n;
    c->next = c->n_done = c->failing = 0;
    enum status st = score_batch(c);
    c->failed = st != ST_OK;
    *ret_failed = c->failing;
    for (int k = 0; c->failed && k < c->n_workers; k++) child_end(&c->workers[k].child);
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
