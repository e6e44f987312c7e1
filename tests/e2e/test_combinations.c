/* test_combinations.c: modes of `cw-trainer train` together, each seen at work: the runs of a
 * covering array (support/modes.h), and as `test_combinations all` (make combinations) each mode
 * and each pair, on one rank and on two, with a table at the end. Three steps on the demo's model.
 *
 * Of a run without --async nothing depends on the clock, so copies of the weights (workers,
 * --sync checkpoint) must change no bit of it; and what its first step samples depends on those
 * modes alone which say what is sampled. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/environment.h"
#include "tests/support/mode_scene.h"

#define STEPS  3
#define LINES  8 // of the data set: its second epoch begins in the third step
#define COPIES (MODE(WORKERS) | MODE(CHECKPOINT))

static struct mode_scene s;
static struct {
    mode_set set; // of those that say what is sampled
    char *samples;
} firsts[N_MODES * N_MODES]; // first steps so far
static int n_firsts;

static void open_scene(void)
{
    mode_scene_open(&s, LINES);
}

static void close_scene(void)
{
    mode_scene_close(&s);
}

static const char *run_name(const struct mode_run *run)
{
    return test_text("run-%x-%d", run->set, run->ranks);
}

static void train_run(const struct mode_run *run)
{
    mode_scene_begin_anew(&s);
    scene_ended(&s.runs, scene_run(&s.runs, mode_scene_command(&s, run, run_name(run), NULL)), 0);
}

// ---- what is seen of it -------------------------------------------------------------------------

// Sum of a metric over the steps, each of which must have it.
static double sum_of(const char *run, const char *key)
{
    double values[STEPS + 1], sum = 0;
    metric(last_metrics(&s.runs, run), key);
    assert_int_equal(column(&s.runs, run, key, values, STEPS + 1), STEPS);
    for (int i = 0; i < STEPS; i++) sum += values[i];
    return sum;
}

static void assert_shows(const char *run, const char *key, double min, double max)
{
    const double sum = sum_of(run, key);
    if (sum < min || sum > max) fail_msg("%s is %g, not within %g and %g", key, sum, min, max);
}

static bool has_tensor(const char *path, const char *part)
{
    SCOPED(file_map_release) struct file_map map;
    assert_ok(file_map_open(path, &map));
    const bool has = memmem(map.data, map.len, part, strlen(part)) != NULL;
    return has;
}

// What is trained is served, or lies in the folder that copies were given.
static void assert_served(const struct mode_run *run, const char *checkpoint)
{
    const bool lora = run->set & MODE(LORA), shared = !(run->set & MODE(CHECKPOINT));
    assert_int_equal(file_exists(test_path(checkpoint, "adapter_config.json")), lora);
    assert_int_equal(file_exists(test_path(checkpoint, "draft/config.json")),
                     (run->set & MODE(DRAFT)) != 0);
    for (int i = 0; shared && i < run->ranks; i++) {
        const struct daemon *d = &s.daemons[i];
        if (lora) daemon_holds_adapter(d, "adapter", checkpoint);
        daemon_holds(d, "policy", lora ? s.model : checkpoint);
        daemon_holds(d, "draft", run->set & MODE(DRAFT) ? test_path(checkpoint, "draft") : s.draft);
    }
}

static void assert_at_work(const struct mode_run *run)
{
    const char *name = run_name(run), *checkpoint = latest(&s.runs, name);
    const mode_set set = run->set;
    const bool exact = !(set & (BY_CLOCK | MODE(ATROPOS)));
    const int most = set & MODE(BUDGET) ? 2 : 1;      // --max-staleness
    const int lines = set & MODE(BUDGET) ? 1 : STEPS; // that tell what was counted, at least
    double oldest[STEPS] = {0};
    column(&s.runs, name, "rollout/staleness_max", oldest, STEPS);
    assert_served(run, checkpoint);
    assert_shows(name, "grad_norm", 1e-6, 1e6);
    if (exact) assert_shows(name, "sampler_mismatch/max", 0, 0);
    if (run->ranks > 1) assert_shows(name, "ranks/size", 2 * STEPS, 2 * STEPS);
    if (set & BY_CLOCK) assert_shows(name, "rollout/staleness_max", 1, STEPS * most - 1);
    for (int i = 0; i < STEPS && set & BY_CLOCK; i++) assert_true(oldest[i] <= most);
    if (set & MODE(DRAFT)) assert_shows(name, "draft_loss", 1e-4, 1e3);
    if (set & MODE(TANDEM)) assert_shows(name, "tandem/frozen_token_fraction", 0.3, STEPS - 0.3);
    if (set & MODE(ENVIRONMENT)) assert_shows(name, "environment/turns", 2 * lines, 2 * STEPS);
    if (set & MODE(ATROPOS)) assert_shows(name, "reward", 0.5 * STEPS, 0.5 * STEPS);
    if (set & MODE(WORKERS)) assert_shows(name, "workers/up", lines, STEPS);
    if ((set & (MODE(WORKERS) | MODE(ATROPOS))) == MODE(WORKERS))
        assert_shows(name, "workers/1/samples", 1, 1e6);
    if (set & COPIES) assert_shows(name, "sync/bytes_written", 1000.0 * STEPS, 1e9);
    if (set & MODE(CURRICULUM)) assert_shows(name, "curriculum/bucket", 1, 3);
    if (set & MODE(COST)) assert_shows(name, "rewards/cost", -1, -1e-3);
    if (set & MODE(FILTER)) assert_shows(name, "filter_groups/drawn", 1, 1e3);
    if (set & MODE(BETA)) assert_shows(name, "kl", 1e-9, 1e3);
    if (set & MODE(TEACHER)) assert_shows(name, "teacher/divergence", 1e-3, 1e3);
    assert_int_equal(
        has_tensor(test_path(checkpoint, "trainer/optimizer.safetensors"), "exp_avg_scale."),
        (set & MODE(EIGHT_BIT)) != 0);
}

// The first step's are those of each run before whose modes say as much of what is sampled; an
// epoch has each prompt once, unless the filter has put others in the place of some. With a budget
// steps are of whichever groups are whole, and the three have each prompt once or twice.
static void assert_samples(const struct mode_run *run)
{
    const mode_set say =
        MODE(TANDEM) | MODE(ENVIRONMENT) | MODE(ATROPOS) | MODE(FILTER) | MODE(CURRICULUM);
    const mode_set set = run->set & say;
    int i = 0, lines[LINES + 1] = {0};
    char *samples = test_keep(mode_scene_samples(&s, run_name(run), 1, lines));
    const bool gathered = run->set & MODE(BUDGET);
    free(mode_scene_samples(&s, run_name(run), 2, lines));
    if (gathered) free(mode_scene_samples(&s, run_name(run), 3, lines));
    for (int k = 1; k <= LINES && !(set & (MODE(ATROPOS) | MODE(FILTER))); k++)
        if (lines[k] != 1 && !(gathered && lines[k] == 2))
            fail_msg("prompt %d came %d times in an epoch", k, lines[k]);
    if (gathered) return;
    while (i < n_firsts && firsts[i].set != set) i++;
    if (i == n_firsts) {
        firsts[n_firsts].set = set;
        firsts[n_firsts++].samples = samples;
        return;
    }
    assert_string_equal(firsts[i].samples, samples);
}

// Copies of the weights change no bit.
static void assert_as_without_copies(const struct mode_run *run)
{
    const struct mode_run without = {run->set & ~COPIES, run->ranks};
    const char *name = run_name(run);
    if (without.set == run->set || run->set & BY_CLOCK) return;
    if (!file_exists(test_path(s.runs.folder, run_name(&without)))) train_run(&without);
    same_losses(&s.runs, name, run_name(&without), STEPS, 0);
    test_same_file(latest(&s.runs, name), latest(&s.runs, run_name(&without)),
                   run->set & MODE(LORA) ? "adapter_model.safetensors" : "model.safetensors");
    if (run->set & MODE(DRAFT))
        test_same_file(latest(&s.runs, name), latest(&s.runs, run_name(&without)),
                       "draft/model.safetensors");
}

// ---- which --------------------------------------------------------------------------------------

#define RUNS_MAX (N_MODES * N_MODES * 2)

static struct which {
    struct mode_run run;
    char name[256];
    bool works;
} which[RUNS_MAX];

static void all_are_at_work(void **state)
{
    struct which *w = *state;
    train_run(&w->run);
    assert_at_work(&w->run);
    assert_samples(&w->run);
    assert_as_without_copies(&w->run);
    w->works = true;
}

static void name_run(struct which *w)
{
    int len = 0;
    for (int m = 0; m < N_MODES; m++)
        if (w->run.set & MODE(m))
            len += snprintf(w->name + len, sizeof w->name - (size_t)len, "%s%s", len ? ", " : "",
                            modes[m].name);
    snprintf(w->name + len, sizeof w->name - (size_t)len, " on %d", w->run.ranks);
}

static int add_runs(int n, int a, int b)
{
    for (int ranks = 1; ranks <= 2; ranks++)
        if (modes_check(MODE(a) | MODE(b), ranks > 1) == ST_OK)
            which[n++].run = (struct mode_run){MODE(a) | MODE(b), ranks};
    return n;
}

// Each mode, with which pairs are compared, and each pair that goes together.
static int all_runs(void)
{
    int n = 0;
    for (int a = 0; a < N_MODES; a++) n = add_runs(n, a, a);
    for (int a = 0; a < N_MODES; a++)
        for (int b = a + 1; b < N_MODES; b++) n = add_runs(n, a, b);
    return n;
}

// As docs/use/combinations.md has it, and what does not work although it is not refused.
static void print_table(int n)
{
    for (int a = 0; a < N_MODES; a++)
        for (int b = a + 1; b < N_MODES; b++) {
            printf("| %s | %s |", modes[a].name, modes[b].name);
            for (int ranks = 1; ranks <= 2; ranks++) {
                const struct mode_run run = {MODE(a) | MODE(b), ranks};
                bool works = false;
                for (int i = 0; i < n; i++)
                    works |= which[i].works && which[i].run.set == run.set &&
                             which[i].run.ranks == ranks;
                const bool refused = modes_check(run.set, ranks > 1) != ST_OK;
                printf(" %s%s |",
                       refused ? "refused: "
                       : works ? "works"
                               : "FAILS",
                       refused ? status_message() : "");
            }
            puts("");
        }
}

TESTS_BETWEEN(open_scene, close_scene)

int main(int argc, char **argv)
{
    struct mode_run array[MODE_RUNS];
    environment_main(argc, argv);
    if (mode_scene_is_skipped()) return 0;
    const bool all = argc > 1 && strcmp(argv[1], "all") == 0;
    const int n = all ? all_runs() : modes_cover(array);
    for (int i = 0; i < n; i++) {
        if (!all) which[i].run = array[i];
        name_run(&which[i]);
        test_list(i, (struct CMUnitTest){which[i].name, all_are_at_work, NULL, NULL, &which[i]});
    }
    const int failed = test_main();
    if (all) print_table(n);
    return failed;
}
