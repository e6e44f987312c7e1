/* test_kills.c: kill -9 of a rank, a server, a worker, an environment or Atropos' API in runs of
 * all modes of `cw-trainer train`: the run goes on, or ends and is taken up again, as documented,
 * and either way each step was made once, of each prompt once, and ends in the bits of a run that
 * nobody disturbed (without --async, which goes by the clock). As `test_kills all`: each mode by
 * itself, on one rank and on two. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/environment.h"
#include "tests/support/mode_scene.h"
#include "tests/support/mpirun.h"

#define STEPS 8
#define LINES (STEPS * MODE_PROMPTS) // one epoch
#define AFTER 3                      // steps that are done when somebody is killed
#define TRIES 12                     // where the run was quicker than the one who kills

enum victim { TRAINER, SERVER, OWN_SERVER, WORKER, ENVIRONMENT_PROCESS, API };

static struct mode_scene s;

struct kill_case {
    struct mode_run run;
    enum victim victim;
    int rank; // whose
};

// ---- who is killed ------------------------------------------------------------------------------

static void stop_ranks(const struct test_child *child, int ranks, int signal)
{
    for (int r = 0; r < ranks; r++) {
        const pid_t pid = rank_process(child, "cw-trainer", ranks, r);
        if (pid) kill(pid, signal);
    }
}

static void kill_victim(const struct kill_case *c, const struct test_child *child)
{
    static const char *const names[] = {
        [TRAINER] = "cw-trainer",
        [OWN_SERVER] = "cw-infer-server",
        [ENVIRONMENT_PROCESS] = "test_kills",
    };
    const int64_t deadline = clock_deadline_ns(LIMIT_MS);
    pid_t pid = 0;
    if (c->victim == SERVER) pid = s.daemons[c->rank].child.pid;
    if (c->victim == WORKER) pid = s.worker.child.pid;
    if (c->victim == API) canned_server_stop(&s.atropos);
    if (c->victim == API) return;
    while (!pid && clock_ms_until(deadline) > 0)
        pid = rank_process(child, names[c->victim], c->run.ranks, c->rank);
    assert_true(pid > 1);
    kill(pid, SIGKILL);
}

// ---- runs ---------------------------------------------------------------------------------------

static void start_run(const struct kill_case *c, const char *name, struct test_child *child)
{
    *child = (struct test_child){0};
    scene_spawn(&s.runs, child,
                mode_scene_command(&s, &c->run, name,
                                   args("--max-steps 8 --save-steps 2 --resume "
                                        "--importance-sampling-mode token_truncate")));
}

// Whoever was killed is there again.
static void revive(struct daemon *d)
{
    if (test_running(&d->child)) return;
    daemon_kill(d);
    mode_scene_start(&s, d);
    daemon_wait(d);
}

static void revive_all(void)
{
    revive(&s.daemons[0]);
    revive(&s.daemons[1]);
    revive(&s.worker);
    if (s.atropos.pid == 0) mode_scene_serve_atropos(&s);
}

// Somebody is killed behind the third step. False: the run was over by then.
static bool disturb(const struct kill_case *c, const char *name, struct test_child *child)
{
    const int64_t deadline = clock_deadline_ns(LIMIT_MS);
    start_run(c, name, child);
    while (steps_done(&s.runs, name) < AFTER && test_running(child)) {
        assert_true(clock_ms_until(deadline) > 0);
        clock_sleep_ms(1);
    }
    stop_ranks(child, c->run.ranks, SIGSTOP);
    const int done = steps_done(&s.runs, name);
    if (done >= AFTER && done < STEPS - 1) kill_victim(c, child);
    stop_ranks(child, c->run.ranks, SIGCONT);
    if (done < AFTER) fail_msg("%s", test_read(child->log));
    return done < STEPS - 1;
}

// With --async a server that the run itself has started ends it where it samples ahead, and is
// started anew where it does not just then.
static void assert_ended(const struct kill_case *c, bool ended, const char *log)
{
    const bool mends = c->victim >= OWN_SERVER && c->victim != API;
    if (c->victim == OWN_SERVER && c->run.set & BY_CLOCK) return;
    if (ended == mends) fail_msg("it %s: %s", ended ? "ended" : "went on", test_read(log));
}

static void assert_whole(const struct kill_case *c, const char *name)
{
    const bool each_once = !(c->run.set & (MODE(ATROPOS) | MODE(FILTER)));
    double steps[STEPS + 1];
    int lines[LINES + 1] = {0};
    assert_int_equal(column(&s.runs, name, "step", steps, STEPS + 1), STEPS);
    for (int i = 0; i < STEPS; i++) assert_true(steps[i] == i + 1);
    for (int i = 1; i <= STEPS && each_once; i++) free(mode_scene_samples(&s, name, i, lines));
    for (int k = 1; k <= LINES && each_once; k++)
        if (lines[k] != 1) fail_msg("prompt %d came %d times", k, lines[k]);
}

static void assert_undisturbed(const struct kill_case *c, const char *name)
{
    struct test_child child = {0};
    const char *whole = test_text("whole-%x-%d", c->run.set, c->run.ranks);
    if (c->run.set & BY_CLOCK) return;
    if (!file_exists(test_path(s.runs.folder, whole))) {
        mode_scene_begin_anew(&s);
        start_run(c, whole, &child);
        if (test_wait(&child, LIMIT_MS) != 0) fail_msg("%s", test_read(child.log));
    }
    test_same_file(latest(&s.runs, whole), latest(&s.runs, name),
                   c->run.set & MODE(LORA) ? "adapter_model.safetensors" : "model.safetensors");
}

static void it_goes_on(void **state)
{
    const struct kill_case *c = *state;
    struct test_child child = {0};
    char name[64];
    bool disturbed = false;
    for (int i = 0; i < TRIES && !disturbed; i++) {
        snprintf(name, sizeof name, "kill-%x-%d-%d-%d-%d", c->run.set, c->run.ranks, c->victim,
                 c->rank, i);
        revive_all();
        mode_scene_begin_anew(&s);
        disturbed = disturb(c, name, &child);
        if (!disturbed) test_wait(&child, LIMIT_MS);
    }
    assert_true(disturbed);
    const int status = test_wait(&child, LIMIT_MS);
    const bool ended = steps_done(&s.runs, name) < STEPS;
    if (c->run.ranks == 1) assert_int_equal(status != 0, ended); // mpirun does not say
    assert_ended(c, ended, child.log);
    revive_all();
    if (ended) {
        start_run(c, name, &child);
        if (test_wait(&child, LIMIT_MS) != 0) fail_msg("%s", test_read(child.log));
    }
    assert_whole(c, name);
    assert_undisturbed(c, name);
}

// ---- which --------------------------------------------------------------------------------------

#define LEARNT (MODE(LORA) | MODE(DRAFT) | MODE(BETA) | MODE(EIGHT_BIT))
#define MOST   (LEARNT | MODE(TANDEM) | MODE(ENVIRONMENT) | MODE(CURRICULUM) | MODE(COST))

static const struct kill_case some[] = {
    {{0, 1}, TRAINER, 0},
    {{0, 1}, SERVER, 0},
    {{MOST | MODE(WORKERS), 1}, TRAINER, 0},
    {{MOST | MODE(WORKERS), 1}, SERVER, 0},
    {{MOST | MODE(WORKERS), 1}, WORKER, 0},
    {{MOST | MODE(WORKERS), 1}, ENVIRONMENT_PROCESS, 0},
    {{MOST | MODE(CHECKPOINT), 1}, TRAINER, 0},
    {{MOST | MODE(CHECKPOINT), 1}, OWN_SERVER, 0},
    {{MODE(ASYNC) | MODE(FILTER) | MODE(WORKERS), 1}, WORKER, 0},
    {{MODE(ASYNC) | MODE(CHECKPOINT), 1}, OWN_SERVER, 0},
    {{MODE(BUDGET), 1}, TRAINER, 0},
    {{MODE(ATROPOS) | LEARNT, 1}, API, 0},
    {{MODE(ATROPOS) | LEARNT, 1}, TRAINER, 0},
    {{MODE(ASYNC) | MOST | MODE(WORKERS), 2}, TRAINER, 1},
    {{MODE(ASYNC) | MOST | MODE(WORKERS), 2}, SERVER, 1},
    {{MODE(ASYNC) | MOST | MODE(WORKERS), 2}, ENVIRONMENT_PROCESS, 1},
    {{MODE(FILTER) | LEARNT | MODE(CHECKPOINT) | MODE(WORKERS), 2}, TRAINER, 0},
    {{MODE(FILTER) | LEARNT | MODE(CHECKPOINT) | MODE(WORKERS), 2}, OWN_SERVER, 1},
    {{MODE(FILTER) | LEARNT | MODE(CHECKPOINT) | MODE(WORKERS), 2}, WORKER, 0},
    {{MODE(ATROPOS) | MODE(LORA), 2}, TRAINER, 1},
    {{MODE(ATROPOS) | MODE(LORA), 2}, API, 0},
};

#define CASES_MAX 256

static struct which {
    struct kill_case c;
    char name[256];
} which[CASES_MAX];

static bool is_there(mode_set set, enum victim victim)
{
    switch (victim) {
    case SERVER:
        return !(set & MODE(CHECKPOINT));
    case OWN_SERVER:
        return set & MODE(CHECKPOINT);
    case WORKER:
        return set & MODE(WORKERS);
    case ENVIRONMENT_PROCESS:
        return set & MODE(ENVIRONMENT);
    case API:
        return set & MODE(ATROPOS);
    case TRAINER:
        break;
    }
    return true;
}

// Each mode by itself; of two ranks the second's, and of the trainers both.
static int all_cases(void)
{
    int n = 0;
    for (int ranks = 1; ranks <= 2; ranks++)
        for (int m = 0; m < N_MODES; m++)
            for (int v = TRAINER; v <= API; v++)
                for (int r = v == TRAINER ? 0 : ranks - 1; r < ranks; r++)
                    if (is_there(MODE(m), v))
                        which[n++].c = (struct kill_case){{MODE(m), ranks}, v, r};
    return n;
}

static void name_case(struct which *w)
{
    static const char *const victims[] = {"trainer", "server",      "server of its own",
                                          "worker",  "environment", "Atropos' API"};
    int len = snprintf(w->name, sizeof w->name, "%s %d of", victims[w->c.victim], w->c.rank);
    for (int m = 0; m < N_MODES; m++)
        if (w->c.run.set & MODE(m))
            len += snprintf(w->name + len, sizeof w->name - (size_t)len, " %s,", modes[m].name);
    snprintf(w->name + len, sizeof w->name - (size_t)len, " on %d", w->c.run.ranks);
}

static void open_scene(void)
{
    mode_scene_open(&s, LINES);
}

static void close_scene(void)
{
    mode_scene_close(&s);
}

TESTS_BETWEEN(open_scene, close_scene)

int main(int argc, char **argv)
{
    environment_main(argc, argv);
    if (mode_scene_is_skipped()) return 0;
    const bool all = argc > 1 && strcmp(argv[1], "all") == 0;
    const int n = all ? all_cases() : (int)(sizeof some / sizeof *some);
    for (int i = 0; i < n; i++) {
        if (!all) which[i].c = some[i];
        name_case(&which[i]);
        test_list(i, (struct CMUnitTest){which[i].name, it_goes_on, NULL, NULL, &which[i].c});
    }
    return test_main();
}
