/* environment.c: the processes of --rollouts and the episodes that they have. One loop waits for
 * all of them and for the server at once; what a line says is episode.c's. */
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "trainer/launch/child.h"
#include "trainer/rollout/episode.h"

#include <inttypes.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define START_MS     300 // a program that cannot be started has ended by then
#define WAIT_MS      100
#define MAX_ATTEMPTS 3
#define MAX_AT_ONCE  4096
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
    e->due_ns = e->body || e->done
                    ? 0
                    : clock_deadline_ns((int)(pull->environment->options.timeout_s * 1e3));
}

static struct episode *find(struct pull *pull, int process, json_int_t id)
{
    for (int i = 0; i < pull->n; i++) {
        struct episode *e = &pull->episodes[i];
        if (!e->done && e->process == process && e->id == id) return e;
    }
    return NULL;
}

// ret_childs: the failure is the process's.
static enum status take_episode_line(struct pull *pull, int k, json_t *line, bool *ret_childs)
{
    struct process *p = &pull->environment->processes[k];
    const json_t *id = json_object_get(line, "id");
    struct episode *e = json_is_integer(id) ? find(pull, k, json_integer_value(id)) : NULL;
    enum status st;
    *ret_childs = true;
    if (!e) return status_fail(ST_FORMAT, "no episode of that \"id\" is its");
    json_object_del(line, "id");
    if (json_object_size(line) != 1)
        return status_fail(ST_FORMAT, "beside \"id\" there must be one field, the kind of line");
    const char *kind = json_object_iter_key(json_object_iter(line));
    st = episode_take(e, kind, json_object_get(line, kind), &p->child.out);
    *ret_childs = st != ST_NO_MEMORY && st != ST_IO;
    if (*ret_childs && strcmp(kind, "error") == 0) { // one given up; it goes on with its others
        *ret_childs = false;
        at_process(ST_PEER_GONE, pull->environment, k);
        log_progress_end();
        log_warn("%s; the episode is given out again", status_message());
        p->n--;
        return fail_attempt(e);
    }
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
    }
    wait_for_process(pull, e);
    return ST_OK;
}

static enum status take_line(struct pull *pull, int k, const char *text, size_t len,
                             bool *ret_childs)
{
    const int shown = len > SHOWN ? SHOWN : (int)len;
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
    if (*ret_childs) status_context(st, "it wrote %.*s", shown, text);
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

static enum status advance(struct pull *pull, struct episode *e)
{
    struct environment *env = pull->environment;
    bool childs = false;
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
    enum status st = episode_advance(e, &env->processes[e->process].child.out, &childs);
    if (childs) return fail_process(pull, e->process);
    if (st == ST_OK && !e->body) wait_for_process(pull, e);
    return st;
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
        if (!r->completions[i].text && rollout_owns(pull->step->via.comm, i / r->n_per_group))
            pull->episodes[pull->n++] = (struct episode){.pull = pull,
                                                         .group = i / r->n_per_group,
                                                         .sample = i % r->n_per_group,
                                                         .ask.server = -1,
                                                         .process = -1};
    return ST_OK;
}

// What came, at its place: whole groups, in their order.
static enum status hand_over(struct pull *pull, struct rollout *r)
{
    enum status st = ST_OK;
    if (!r->prompts) r->prompts = calloc((size_t)r->n_groups, sizeof *r->prompts);
    if (!r->prompts) FAIL(ST_NO_MEMORY, "no memory for %d prompts", r->n_groups);
    for (int i = 0; i < pull->n; i++) {
        struct episode *e = &pull->episodes[i];
        struct completion *c = &r->completions[e->group * r->n_per_group + e->sample];
        *c = e->made;
        e->made = (struct completion){0};
        if (e->sample < r->n_per_group - 1) continue;
        token_list_release(&r->prompts[e->group]);
        CHECK(status_context(trajectory_cut(c - e->sample, r->n_per_group, &r->prompts[e->group]),
                             "%s, line %d", pull->step->data, episode_example(e)->line));
        for (int k = 0; k < r->n_per_group; k++) r->n_tokens += c[-k].n;
    }
out:
    return st;
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
        .max_tokens = env->options.max_tokens,
        .asked = rollout_pull_begin(&step->via, &step->sampling),
        .said_unlike = &env->said_unlike,
    };
    struct status_kept result;
    for (int i = 0; i < N_COUNTS; i++) source_count(&step->counts, "environment/%s", counts[i]);
    enum status st = plan(&pull);
    if (st == ST_OK) st = run_episodes(&pull);
    if (st == ST_OK) st = hand_over(&pull, step->rollout);
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
