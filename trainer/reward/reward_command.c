/* reward_command.c: the scorer `command:PROGRAM ARGS`: child processes that read one JSON object a
 * line from their standard input and reply to each with {"reward": x} on their standard output.
 * Owns the workers (reward_worker.h). The thread that scores.
 *
 * A step's samples are divided among the processes (--reward-processes), and each is sent many
 * before the first is replied to, so that a program may take them in batches or work on several at
 * once. Three things can go wrong, and none of them is ever a 0: no reply in time and a malformed
 * reply end the run with a sentence; a process that ended is started once more. */
#include "common/base/clock.h"
#include "common/base/log.h"
#include "trainer/reward/reward_scorer.h"
#include "trainer/reward/reward_worker.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PROCESSES 256
#define WINDOW        256  // samples that one process owes, at most, unless it takes whole batches
#define START_MS      300  // a program that cannot be started has ended by then
#define HINT_MS       5000 // of silence

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
