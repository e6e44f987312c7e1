/* environment.c: the processes of --rollouts and the episodes that they have, each one sample that
 * is being made. A process's line has an episode's id and one more field, which names what it is;
 * each kind is an entry of a table. One loop waits for all of them and for the server at once. The
 * thread that pulls. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/rng.h"
#include "trainer/launch/child.h"
#include "trainer/rollout/source.h"
#include "trainer/rollout/trajectory.h"

#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define START_MS     300 // a program that cannot be started has ended by then
#define WAIT_MS      100
#define MAX_ATTEMPTS 3
#define MAX_AT_ONCE  4096
#define MAX_REQUESTS 256 // in flight: each has a connection
#define ROLLOUTS     "/v1/rollouts"
#define TOKENIZE     "/tokenize"
#define SHOWN        120 // bytes of a line in an error

// Of a pull: each in its place, and on every rank, whether it counts something or not.
#define N_COUNTS 5
static const char *const counts[N_COUNTS] = {"turns", "calls", "replayed", "unlike_prompts",
                                             "restarts"};

struct process { // all zero: to be started
    struct child child;
    int at_once; // episodes that it takes
    int n;       // that it has
};

struct environment {
    struct source source;
    struct environment_options options;
    struct process *processes; // (options.n)
    json_int_t n_ids;
    bool said_unlike;
    pthread_mutex_t turn; // whose pull it is
};

struct pull { // of all episodes of a step
    struct environment *environment;
    struct rollout_step *step;
    struct rollout_pull asked;
    int n, n_done;
    struct episode *episodes; // (n)
};

struct episode {
    struct pull *pull;
    int group, sample;
    int attempts;   // begun
    json_int_t id;  // of the present one; 0: none
    int process;    // that has it; -1: none
    int64_t due_ns; // when its process must have written; 0: it is the server's turn
    bool done;
    // what is asked of the server; NULL: nothing
    json_t *body;
    bool sampling;            // else it is text to be tokenised
    struct token_list prompt; // of the sampling
    struct rollout_ask ask;   // all its turns go to one server, for the sake of its prefix cache
    // so far
    struct sampled_turns turns;
    int n_calls, n_replayed, n_unlike;
    json_t *call;           // whose result is due; NULL: none
    struct completion made; // once done
};

// Its line in the data set, for errors.
static const struct example *episode_example(const struct episode *e)
{
    return e->pull->step->rollout->examples[e->group];
}

// Back to where no attempt was begun.
static void episode_reset(struct episode *e)
{
    rollout_cancel(&e->pull->asked, &e->ask);
    json_decref(e->body);
    json_decref(e->call);
    token_list_release(&e->prompt);
    sampled_turns_release(&e->turns);
    completion_release(&e->made);
    *e = (struct episode){.pull = e->pull,
                          .group = e->group,
                          .sample = e->sample,
                          .attempts = e->attempts,
                          .ask.server = -1,
                          .process = -1};
}

// Puts {"id", kind: value} as a line; takes the reference to the value over.
static enum status put_line(struct bytes *out, json_int_t id, const char *kind, json_t *value)
{
    return json_put_line(out, json_pack("{s:I, s:o}", "id", id, kind, value), 0);
}

static uint64_t seed_of(const struct episode *e)
{
    return rng_seed_of(e->pull->step->sampling.seed & INT64_MAX,
                       e->group * e->pull->step->rollout->n_per_group + e->sample);
}

// Begins an attempt: its line for the process.
static enum status episode_begin(struct episode *e, json_int_t id, struct bytes *out)
{
    const struct rollout_step *step = e->pull->step;
    const struct example *example = episode_example(e);
    e->id = id;
    e->attempts++;
    json_t *ids = json_ids(example->prompt_ids.ids, example->prompt_ids.n);
    json_t *episode = json_pack(
        "{s:I, s:b, s:i, s:i, s:i, s:i, s:I, s:i, s:o, s:O}", "step",
        (json_int_t)(step->step + !step->evaluation), "evaluation", step->evaluation, "group",
        step->first_group + e->group, "sample", e->sample, "line", example->line, "attempt",
        e->attempts, "seed", (json_int_t)(seed_of(e) >> 11), "max_tokens",
        e->pull->environment->options.max_tokens, "prompt_token_ids", ids, "example", example->row);
    return put_line(out, id, "episode", episode);
}

// ---- an episode's sampling ----------------------------------------------------------------------

static void note_prompt(struct episode *e)
{
    int at = 0;
    if (sampled_turns_repeat(&e->turns, &e->prompt, &at)) return;
    e->n_unlike++;
    if (e->pull->environment->said_unlike) return;
    e->pull->environment->said_unlike = true;
    log_progress_end();
    log_warn(
        "environment: %s, line %d, sample %d: the prompt of turn %d has other tokens than the "
        "turn before from token %d on: a conversation rendered anew need not repeat. One "
        "trajectory cannot hold both, so it can train what was sampled behind the tokens that "
        "it has, and not the other turns; to train all, end with \"turns\", or keep each turn's "
        "token_ids and append to them (said once; metric environment/unlike_prompts counts)",
        e->pull->step->data, episode_example(e)->line, e->sample, e->turns.n + 1, at);
}

// Nothing of it fits the context any more.
static enum status reply_full(struct episode *e, struct bytes *out)
{
    struct completion nothing = {.truncated = true, .text = strdup("")};
    if (!nothing.text) return status_fail(ST_NO_MEMORY, "no memory for a turn");
    enum status st = sampled_turns_add(&e->turns, &e->prompt, &nothing);
    if (st != ST_OK) return st;
    return put_line(out, e->id, "sampled",
                    json_pack("{s:[], s:[], s:[], s:s, s:s}", "token_ids", "logprobs",
                              "weight_versions", "finish_reason", "length", "text", ""));
}

static enum status ask_sample(struct episode *e, const json_t *value, int64_t max_tokens)
{
    static const char *const stops[] = {"stop", "stop_token_ids"};
    json_t *group = rollout_group(&e->prompt, 0, 1, rng_seed_of(seed_of(e) & INT64_MAX, e->turns.n),
                                  json_object_get(value, "response_format"));
    e->body = rollout_request(&e->pull->asked, json_pack("[o]", group));
    if (!e->body) return status_fail(ST_NO_MEMORY, "no memory for a request");
    json_t *sampling = json_object_get(e->body, "sampling");
    json_object_set_new(sampling, "max_tokens", json_integer(max_tokens));
    for (size_t i = 0; i < sizeof stops / sizeof *stops; i++)
        if (json_has(value, stops[i]))
            json_object_set(sampling, stops[i], json_object_get(value, stops[i]));
    e->sampling = true;
    return ST_OK;
}

static enum status take_sample(struct episode *e, const json_t *value, struct bytes *out)
{
    static const char *const fields[] = {"token_ids",      "max_tokens",      "stop",
                                         "stop_token_ids", "response_format", NULL};
    const int64_t max = e->pull->step->sampling.max_tokens;
    int64_t max_tokens = max;
    enum status st;
    CHECK(trajectory_check_fields(value, fields));
    CHECK(json_get_int("sample", value, "max_tokens", 1, INT32_MAX, &max_tokens));
    if (max_tokens > max)
        FAIL(ST_INVALID, "\"max_tokens\" %lld is over --max-completion-length %lld",
             (long long)max_tokens, (long long)max);
    CHECK(trajectory_read_ids(value, "token_ids", e->pull->step->via.vocab_size, &e->prompt));
    note_prompt(e);
    const int room = e->pull->environment->options.max_tokens - e->prompt.n;
    if (room <= 0) return reply_full(e, out);
    st = ask_sample(e, value, max_tokens < room ? max_tokens : room);
out:
    return st;
}

static enum status take_sampled(struct episode *e, const json_t *line, struct bytes *out)
{
    struct completion sampled = {0};
    enum status st;
    CHECK(rollout_check_line("response to " ROLLOUTS, line));
    CHECK(rollout_read(&e->pull->asked, &e->ask, "response to " ROLLOUTS, line, &sampled));
    CHECK(sampled_turns_add(&e->turns, &e->prompt, &sampled));
    st = put_line(
        out, e->id, "sampled",
        json_pack("{s:O*, s:O*, s:O*, s:O*, s:O*}", "token_ids", json_object_get(line, "token_ids"),
                  "logprobs", json_object_get(line, "logprobs"), "weight_versions",
                  json_object_get(line, "weight_versions"), "finish_reason",
                  json_object_get(line, "finish_reason"), "text", json_object_get(line, "text")));
out:
    return st;
}

// ---- text ---------------------------------------------------------------------------------------

static enum status take_tokenize(struct episode *e, const json_t *value, struct bytes *out)
{
    (void)out;
    if (!json_is_object(value))
        return status_fail(ST_FORMAT, "it is no object, as POST " TOKENIZE " takes it");
    e->body = json_incref((json_t *)value);
    e->sampling = false;
    return ST_OK;
}

static enum status take_tokenized(struct episode *e, const json_t *response, struct bytes *out)
{
    json_t *tokens = json_object_get(response, "tokens");
    if (!json_is_array(tokens))
        return status_fail(ST_IO, "response to " TOKENIZE ": it has no \"tokens\"");
    return put_line(out, e->id, "tokenized", json_incref(tokens));
}

// ---- calls of tools -----------------------------------------------------------------------------

static struct journal_place place_of(const struct episode *e)
{
    return (struct journal_place){episode_example(e)->line, e->pull->step->first_group + e->group,
                                  e->sample, e->n_calls};
}

static enum status take_call(struct episode *e, const json_t *value, struct bytes *out)
{
    const struct journal_place place = place_of(e);
    struct journal *journal = e->pull->step->journal;
    json_t *result = journal ? journal_find(journal, &place, value) : NULL;
    if (result) {
        e->n_calls++;
        e->n_replayed++;
    } else {
        e->call = json_incref((json_t *)value);
    }
    return put_line(out, e->id, "called",
                    result ? json_pack("{s:O}", "result", result) : json_object());
}

static enum status take_result(struct episode *e, const json_t *value, struct bytes *out)
{
    const struct journal_place place = place_of(e);
    struct journal *journal = e->pull->step->journal;
    enum status st = ST_OK;
    if (!e->call) FAIL(ST_FORMAT, "a result where no call came before it");
    if (journal) CHECK(journal_keep(journal, &place, e->call, value));
    json_decref(e->call);
    e->call = NULL;
    e->n_calls++;
    st = put_line(out, e->id, "kept", json_boolean(journal != NULL));
out:
    return st;
}

// ---- the end ------------------------------------------------------------------------------------

static enum status take_trajectory(struct episode *e, const json_t *value, struct bytes *out)
{
    const struct trajectory_bounds bounds = {e->pull->step->via.vocab_size,
                                             e->pull->environment->options.max_tokens,
                                             e->pull->asked.oldest};
    (void)out;
    enum status st = trajectory_read(value, &e->turns, &bounds, &e->made);
    e->done = st == ST_OK;
    return st;
}

static const struct {
    const char *kind;
    enum status (*take)(struct episode *e, const json_t *value, struct bytes *out);
    bool within_call; // may come while a result is due
} kinds[] = {
    {"sample", take_sample, false},
    {"tokenize", take_tokenize, false},
    {"call", take_call, false},
    {"result", take_result, true},
    {"trajectory", take_trajectory, false},
    {"error", NULL, true},
};
#define N_KINDS (sizeof kinds / sizeof *kinds)

// ---- processes ----------------------------------------------------------------------------------

// at_once: until it says another number.
static enum status start(struct environment *e, struct process *p)
{
    *p = (struct process){.at_once = 1};
    return child_start(&p->child, e->options.line);
}

static enum status at_process(enum status st, const struct environment *e, int k)
{
    return status_context(st, "environment process %d of %d", k + 1, e->options.n);
}

// ---- what goes wrong ----------------------------------------------------------------------------

// The attempt failed, as status_message() says; it is given out again.
static enum status fail_attempt(struct episode *e)
{
    episode_reset(e);
    if (e->attempts < MAX_ATTEMPTS) return ST_OK;
    return status_context(ST_PEER_GONE, "%s, line %d, sample %d: %d attempts failed, the last",
                          e->pull->step->data, episode_example(e)->line, e->sample, e->attempts);
}

// A process that ended, was silent for too long or wrote nonsense.
static enum status fail_process(struct pull *pull, int k)
{
    struct environment *env = pull->environment;
    struct process *p = &env->processes[k];
    struct status_kept why;
    enum status st = ST_OK;
    at_process(ST_PEER_GONE, env, k);
    status_keep(&why, ST_PEER_GONE);
    log_progress_end();
    log_warn("%s; it is started again, and its %d episode%s given out again", why.message, p->n,
             p->n == 1 ? " is" : "s are");
    source_count(&pull->step->counts, "environment/restarts")->sum++;
    for (int i = 0; i < pull->n; i++) {
        struct episode *e = &pull->episodes[i];
        if (e->done || e->process != k) continue;
        status_recall(&why);
        CHECK(fail_attempt(e));
    }
    child_end(&p->child);
    *p = (struct process){0}; // it is started when it is given an episode
out:
    return st;
}

// ---- lines --------------------------------------------------------------------------------------

// When the process must have written next, now that a line was taken or a reply made.
static void wait_for_process(struct pull *pull, struct episode *e)
{
    const int timeout_ms = (int)(pull->environment->options.timeout_s * 1e3);
    e->due_ns = e->body || e->done ? 0 : clock_deadline_ns(timeout_ms);
}

// The group of an episode that is done, at its place once all of it are.
static enum status hand_over(struct pull *pull, const struct episode *e)
{
    struct rollout *r = pull->step->rollout;
    struct completion *group = &r->completions[e->group * r->n_per_group];
    struct episode *first = &pull->episodes[e - pull->episodes - e->sample];
    enum status st = ST_OK;
    for (int k = 0; k < r->n_per_group; k++)
        if (!first[k].done) return ST_OK;
    for (int k = 0; k < r->n_per_group; k++) {
        group[k] = first[k].made;
        first[k].made = (struct completion){0};
    }
    token_list_release(&r->prompts[e->group]);
    CHECK(status_context(trajectory_cut(group, r->n_per_group, &r->prompts[e->group]),
                         "%s, line %d", pull->step->data, episode_example(e)->line));
    for (int k = 0; k < r->n_per_group; k++) r->n_tokens += group[k].n;
    rollout_group_came(r, e->group);
out:
    return st;
}

// ret_childs: the failure is the process's.
static enum status take_episode_line(struct pull *pull, int k, json_t *line, bool *ret_childs)
{
    struct process *p = &pull->environment->processes[k];
    const json_t *id = json_object_get(line, "id");
    struct episode *e = NULL;
    size_t t = 0;
    enum status st;
    for (int i = 0; i < pull->n && !e && json_is_integer(id); i++) {
        struct episode *its = &pull->episodes[i];
        if (!its->done && its->process == k && its->id == json_integer_value(id)) e = its;
    }
    *ret_childs = true;
    if (!e) return status_fail(ST_FORMAT, "no episode of that \"id\" is its");
    json_object_del(line, "id");
    if (json_object_size(line) != 1)
        return status_fail(ST_FORMAT, "beside \"id\" there must be one field, the kind of line");
    const char *kind = json_object_iter_key(json_object_iter(line));
    const json_t *value = json_object_get(line, kind);
    while (t < N_KINDS && strcmp(kinds[t].kind, kind) != 0) t++;
    if (t == N_KINDS)
        return status_fail(
            ST_FORMAT, "\"%s\" is none of sample, tokenize, call, result, trajectory, error", kind);
    if (!kinds[t].take) { // one given up; it goes on with its others
        status_fail(ST_INVALID, "error: it says: %s",
                    json_is_string(value) ? json_string_value(value) : "that it cannot go on");
        *ret_childs = false;
        at_process(ST_PEER_GONE, pull->environment, k);
        log_progress_end();
        log_warn("%s; the episode is given out again", status_message());
        p->n--;
        return fail_attempt(e);
    }
    if (e->body) return status_fail(ST_FORMAT, "a line while the reply to the last one is due");
    if (e->call && !kinds[t].within_call)
        return status_fail(ST_FORMAT, "\"%s\" where the result of a call is due", kind);
    st = status_context(kinds[t].take(e, value, &p->child.out), "%s", kind);
    *ret_childs = st != ST_NO_MEMORY && st != ST_IO; // any other failure is the process's
    if (st != ST_OK) return st;
    if (e->done) {
        const int counted[] = {e->turns.n, e->n_calls, e->n_replayed, e->n_unlike};
        for (int i = 0; i < 4; i++) {
            struct source_count *c = source_count(&pull->step->counts, "environment/%s", counts[i]);
            c->sum += counted[i];
            c->of += i < 2; // turns and calls are means
        }
        pull->n_done++;
        p->n--;
        *ret_childs = false;
        CHECK(hand_over(pull, e));
    }
    wait_for_process(pull, e);
out:
    return st;
}

static enum status take_line(struct pull *pull, int k, const char *text, size_t len,
                             bool *ret_childs)
{
    json_t *line = NULL;
    enum status st;
    *ret_childs = true;
    CHECK(json_parse("a line", text, len, &line));
    if (json_has(line, "at_once"))
        st = json_get_int32("a line", line, "at_once", 1, MAX_AT_ONCE,
                            &pull->environment->processes[k].at_once);
    else
        st = take_episode_line(pull, k, line, ret_childs);
out:
    if (*ret_childs)
        status_context(st, "it wrote %s", text_cut(text, len, SHOWN, (char[SHOWN + 4]){0}));
    json_decref(line);
    return st;
}

static enum status serve_process(struct pull *pull, int k)
{
    struct process *p = &pull->environment->processes[k];
    const char *text;
    size_t len;
    if (!p->child.pid) return ST_OK;
    enum status st = child_pump(&p->child);
    bool childs = st == ST_PEER_GONE || st == ST_FORMAT;
    while (st == ST_OK && child_line(&p->child, &text, &len))
        st = take_line(pull, k, text, len, &childs);
    return st != ST_OK && childs ? fail_process(pull, k) : st;
}

// ---- episodes -----------------------------------------------------------------------------------

// To the process that has the fewest and takes one more.
static enum status give_out(struct pull *pull)
{
    struct environment *env = pull->environment;
    enum status st = ST_OK;
    for (int i = 0; i < pull->n; i++) {
        struct episode *e = &pull->episodes[i];
        int to = -1;
        if (e->done || e->process >= 0) continue;
        for (int k = 0; k < env->options.n; k++) {
            const struct process *p = &env->processes[k];
            if ((!p->child.pid || p->n < p->at_once) && (to < 0 || p->n < env->processes[to].n))
                to = k;
        }
        if (to < 0) return ST_OK;
        struct process *p = &env->processes[to];
        if (!p->child.pid) CHECK(start(env, p));
        CHECK(episode_begin(e, ++env->n_ids, &p->child.out));
        e->process = to;
        p->n++;
        wait_for_process(pull, e);
    }
out:
    return st;
}

// Submits what is to be asked of the server, or takes its response, or does nothing.
static enum status advance(struct pull *pull, struct episode *e)
{
    struct environment *env = pull->environment;
    struct rollout_pull *asked = &pull->asked;
    struct bytes text = BYTES_INIT;
    json_t *response = NULL;
    enum status st;
    if (e->done || e->process < 0) return ST_OK;
    if (e->due_ns && clock_ms_until(e->due_ns) == 0) {
        status_fail(ST_TIMEOUT,
                    "command \"%s\" wrote nothing about %s, line %d, sample %d for %g s "
                    "(--rollout-process-timeout)",
                    env->options.line, pull->step->data, episode_example(e)->line, e->sample,
                    env->options.timeout_s);
        return fail_process(pull, e->process);
    }
    if (!e->body) return ST_OK;
    if (!e->ask.transfer) {
        if (asked->in_flight >= MAX_REQUESTS || !rollout_choose(asked, &e->ask)) return ST_OK;
        const struct http_call call = {.path = e->sampling ? ROLLOUTS : TOKENIZE,
                                       .body = e->body,
                                       .timeout_ms = clock_ms_until(asked->deadline)};
        return rollout_ask(asked, &e->ask, &call);
    }
    if (!rollout_finish(asked, &e->ask, &text, &st)) return ST_OK;
    const bool childs = st == ST_INVALID; // the failure is that of what the process asked for
    if (st != ST_OK && !childs && st != ST_NO_MEMORY) {
        st = rollout_again(asked, &e->ask, false, st);
        goto out;
    }
    json_decref(e->body);
    e->body = NULL;
    if (st != ST_OK) goto out;
    CHECK(json_parse(e->sampling ? "response to " ROLLOUTS : "response to " TOKENIZE,
                     bytes_text(&text), text.len, &response));
    CHECK((e->sampling ? take_sampled : take_tokenized)(e, response,
                                                        &env->processes[e->process].child.out));
    wait_for_process(pull, e);
out:
    json_decref(response);
    bytes_release(&text);
    return childs ? fail_process(pull, e->process) : st;
}

static void wait_for_any(const struct pull *pull)
{
    const struct environment *env = pull->environment;
    struct pollfd fds[2 * ENVIRONMENT_MAX_PROCESSES];
    int n = 0;
    for (int k = 0; k < env->options.n; k++) {
        const struct child *c = &env->processes[k].child;
        if (!c->pid) continue;
        fds[n++] = (struct pollfd){.fd = c->from, .events = POLLIN};
        if (c->out.len) fds[n++] = (struct pollfd){.fd = c->to, .events = POLLOUT};
    }
    http_poll_with(pull->step->via.http, fds, n, WAIT_MS);
}

static enum status run_episodes(struct pull *pull)
{
    const struct environment *env = pull->environment;
    enum status st = ST_OK;
    while (pull->n_done < pull->n) {
        if (clock_ms_until(pull->asked.deadline) == 0)
            FAIL(ST_TIMEOUT, "%d of %d trajectories did not come within %.0f s (--rollout-timeout)",
                 pull->n - pull->n_done, pull->n, pull->step->via.timeout_ms / 1e3);
        CHECK(rollout_check(&pull->step->via));
        for (int k = 0; k < env->options.n; k++) CHECK(serve_process(pull, k));
        for (int i = 0; i < pull->n; i++) CHECK(advance(pull, &pull->episodes[i]));
        CHECK(give_out(pull)); // last, so that who has just ended an episode has the next at once
        if (pull->n_done < pull->n) wait_for_any(pull);
    }
out:
    return st;
}

// ---- a pull -------------------------------------------------------------------------------------

static enum status plan(struct pull *pull)
{
    const struct rollout *r = pull->step->rollout;
    const int n = r->n_groups * r->n_per_group;
    pull->episodes = calloc((size_t)n, sizeof *pull->episodes);
    if (!pull->episodes) return status_fail(ST_NO_MEMORY, "no memory for %d episodes", n);
    for (int i = 0; i < n; i++)
        if (rollout_wants(r, pull->step->via.comm, i / r->n_per_group))
            pull->episodes[pull->n++] = (struct episode){.pull = pull,
                                                         .group = i / r->n_per_group,
                                                         .sample = i % r->n_per_group,
                                                         .ask.server = -1,
                                                         .process = -1};
    return ST_OK;
}

// A process that still has an episode, of a pull that failed, ends: what it would write belongs to
// no other.
static void end_pull(struct pull *pull)
{
    struct environment *env = pull->environment;
    for (int i = 0; i < pull->n; i++) episode_reset(&pull->episodes[i]);
    for (int k = 0; k < env->options.n; k++) {
        struct process *p = &env->processes[k];
        if (p->n == 0) continue;
        child_end(&p->child);
        *p = (struct process){0};
    }
    free(pull->episodes);
}

static enum status pull_episodes(struct source *source, struct rollout_step *step)
{
    struct environment *env = (struct environment *)source;
    const int64_t start_ns = clock_now_ns();
    pthread_mutex_lock(&env->turn);
    struct pull pull = {
        .environment = env,
        .step = step,
        .asked = rollout_pull_begin(&step->via, &step->sampling),
    };
    struct status_kept result;
    for (int i = 0; i < N_COUNTS; i++) source_count(&step->counts, "environment/%s", counts[i]);
    enum status st = plan(&pull);
    if (st == ST_OK) st = run_episodes(&pull);
    const double replayed = source_count(&step->counts, "environment/replayed")->sum;
    if (st == ST_OK && replayed > 0 && !step->evaluation) {
        log_progress_end();
        log_info("step %" PRId64 ": %.0f of %.0f calls of tools have their results out of the "
                 "journal, and were not made again",
                 step->step + 1, replayed, source_count(&step->counts, "environment/calls")->sum);
    }
    status_keep(&result, st);
    end_pull(&pull);
    pthread_mutex_unlock(&env->turn);
    step->rollout->seconds += clock_ms_since(start_ns) / 1e3;
    log_debug("environment: %d x %d samples, %.0f turns, %ld tokens in %.3f s",
              step->rollout->n_groups, step->rollout->n_per_group,
              source_count(&step->counts, "environment/turns")->sum, step->rollout->n_tokens,
              step->rollout->seconds);
    return status_recall(&result);
}

// ---- the source ---------------------------------------------------------------------------------

static void close_episodes(struct source *source)
{
    struct environment *e = (struct environment *)source;
    for (int k = 0; e->processes && k < e->options.n; k++) child_end(&e->processes[k].child);
    pthread_mutex_destroy(&e->turn);
    free(e->processes);
    free(e);
}

enum status environment_new(const struct environment_options *options, struct source *turns,
                            struct source **ret)
{
    enum status st = ST_OK;
    struct environment *e = calloc(1, sizeof *e);
    if (!e) return status_fail(ST_NO_MEMORY, "no memory for environments");
    pthread_mutex_init(&e->turn, NULL);
    e->source = (struct source){.pull = pull_episodes, .close = close_episodes, .on = turns};
    e->options = *options;
    e->processes = calloc((size_t)options->n, sizeof *e->processes);
    if (!e->processes) FAIL(ST_NO_MEMORY, "no memory for environments");
    for (int k = 0; k < options->n; k++) CHECK(start(e, &e->processes[k]));
    for (int k = 0; k < options->n; k++)
        CHECK(at_process(child_check(&e->processes[k].child, START_MS), e, k));
    *ret = &e->source;
out:
    if (st != ST_OK) close_episodes(&e->source);
    return st;
}
