/* reward_command.c: the scorer `command:PROGRAM ARGS`: child processes that read one JSON object a
 * line from their standard input and answer each with {"reward": x} on their standard output. Owns
 * the children (reward_child.h). The trainer's thread.
 *
 * A step's samples are divided among the processes (--reward-processes), and each is sent many
 * before the first is answered, so that a program may take them in batches or work on several at
 * once. Replies come in the order of the samples, or say by their "id" whose they are. Three things
 * can go wrong, and none of them is ever a 0: no reply in time and a malformed reply end the run
 * with a sentence; a process that ended is started once more in its life, and asked again for the
 * samples it owes.
 */
#include "common/base/bytes.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "trainer/rollout/reward_child.h"
#include "trainer/rollout/reward_scorer.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PROCESSES 256
#define WINDOW        256       // samples that one process owes, at most
#define MAX_UNWRITTEN (1 << 18) // bytes of lines made before they can be written
#define START_MS      300       // a program that cannot be started has ended by then
#define HINT_MS       5000      // of silence

struct worker {
    struct child child;
    int owed[WINDOW]; // samples of the batch, in the order they were sent
    int n_owed;
    int64_t heard_ns; // its last reply, or when it was asked after a pause
    bool replied;     // once at least
    bool restarted;
};
struct command {
    char *line; // as given, owned
    int timeout_ms, n_workers;
    struct worker *workers; // (n_workers)
    json_int_t n_asked;     // samples of earlier batches: ids go on
    bool failed;            // a reply is missing for ever: nothing can be scored any more
    bool hinted;
};

struct score_batch {
    const struct reward_input *inputs;
    int n, next, n_done; // next: to be handed out
    json_int_t first_id;
    double *scores; // (n)
};

// It owes a reply, or has yet to read what it was sent: one may answer before it has read all.
static bool is_busy(const struct worker *w)
{
    return w->n_owed > 0 || w->child.out.len > 0;
}

// ---- samples out --------------------------------------------------------------------------------

static enum status put_request(struct child *child, const struct score_batch *b, int i)
{
    const struct reward_input *input = &b->inputs[i];
    json_t *request =
        json_pack("{s:I, s:O*, s:s, s:s*, s:i, s:b, s:O*, s:O*}", "id", b->first_id + i, "prompt",
                  input->prompt, "completion", input->text, "answer", input->answer, "tokens",
                  input->n_tokens, "truncated", input->truncated, "telemetry", input->telemetry,
                  "example", input->row);
    char *text = request ? json_dumps(request, JSON_COMPACT) : NULL;
    json_decref(request);
    if (!text) return status_fail(ST_NO_MEMORY, "no memory for a sample, or its text is not UTF-8");
    bytes_puts(&child->out, text);
    bytes_puts(&child->out, "\n");
    free(text);
    return bytes_status(&child->out);
}

// The process that owes least and can take more; NULL: none can.
static struct worker *idlest(struct command *c)
{
    struct worker *idlest = NULL;
    for (int k = 0; k < c->n_workers; k++) {
        struct worker *w = &c->workers[k];
        if (w->n_owed < WINDOW && w->child.out.len < MAX_UNWRITTEN &&
            (!idlest || w->n_owed < idlest->n_owed))
            idlest = w;
    }
    return idlest;
}

static enum status hand_out(struct command *c, struct score_batch *b, int *ret_failed)
{
    struct worker *w;
    while (b->next < b->n && (w = idlest(c))) {
        enum status st = put_request(&w->child, b, b->next);
        if (st != ST_OK) {
            *ret_failed = b->next;
            return st;
        }
        if (w->n_owed == 0) w->heard_ns = clock_now_ns();
        w->owed[w->n_owed++] = b->next++;
    }
    return ST_OK;
}

// ---- replies in ---------------------------------------------------------------------------------

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
    const double score = json_number_value(reward); // 0 where it is no number
    if (place >= 0) *ret_failed = w->owed[place];
    if (why)
        st = status_fail(ST_INVALID, "command \"%s\": %s", line, why);
    else if (!json_is_number(reward) || !isfinite(score))
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
static enum status restart(struct command *c, struct worker *w, struct score_batch *b)
{
    if (w->restarted) return status_context(ST_PEER_GONE, "even when started again");
    log_progress_end();
    log_warn("%s; it is started again, and asked again for the %d sample%s it owes",
             status_message(), w->n_owed, w->n_owed == 1 ? "" : "s");
    w->restarted = true;
    enum status st = child_start(&w->child, c->line);
    for (int k = 0; st == ST_OK && k < w->n_owed; k++) st = put_request(&w->child, b, w->owed[k]);
    w->heard_ns = clock_now_ns();
    return st;
}

static enum status serve(struct command *c, struct worker *w, struct score_batch *b,
                         int *ret_failed)
{
    *ret_failed = w->owed[0];
    enum status st = child_pump(&w->child);
    if (st == ST_PEER_GONE) st = restart(c, w, b);
    return st == ST_OK ? take_replies(w, b, ret_failed) : st;
}

// ---- time ---------------------------------------------------------------------------------------

static enum status check_silence(struct command *c, const struct worker *w, int *ret_failed)
{
    static const char hint[] = "if it has computed, its output is buffered: it must flush after "
                               "every line (python -u, print(..., flush=True), stdbuf -oL)";
    const double silent_ms = clock_ms_since(w->heard_ns);
    if (!is_busy(w)) return ST_OK;
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
        if (!is_busy(w)) continue;
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
    for (int k = 0; c->workers && k < c->n_workers; k++) child_end(&c->workers[k].child);
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
    c->n_workers = options->processes > 1 ? (int)options->processes : 1;
    if (strspn(argument, " ") == strlen(argument)) {
        st = status_fail(ST_INVALID, "reward \"command:\" names no program");
        goto out;
    }
    if (c->n_workers > MAX_PROCESSES) {
        st = status_fail(ST_INVALID, "--reward-processes %d: at most %d", c->n_workers,
                         MAX_PROCESSES);
        goto out;
    }
    c->line = strdup(argument);
    c->workers = calloc((size_t)c->n_workers, sizeof *c->workers);
    if (!c->line || !c->workers) {
        st = status_fail(ST_NO_MEMORY, "no memory for the reward \"command\"");
        goto out;
    }
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
            if (!is_busy(&c->workers[k])) continue;
            CHECK(serve(c, &c->workers[k], b, ret_failed));
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
    struct score_batch b = {.inputs = inputs, .n = n, .first_id = c->n_asked, .scores = ret_scores};
    c->n_asked += n;
    *ret_failed = 0;
    if (c->failed) return status_fail(ST_PEER_GONE, "command \"%s\" is gone", c->line);
    enum status st = score_batch(c, &b, ret_failed);
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
