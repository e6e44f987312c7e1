/* test_training.c: the two real processes on one copy of the weights: training in place, resuming
 * to the bit, and every way in which one of the two may end. */
#include "bridge/attach.h"
#include "common/http/http_client.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/rng.h"
#include "common/model/weights.h"
#include "tests/support/daemon.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "tests/support/tiny_tokenizer.h"
#include "tests/support/training.h"
#include "trainer/run/spec_watch.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

// What a model folder holds, as one allocation.
struct loaded {
    struct device *dev;
    struct model_config *config;
    struct weights *weights;
    void *memory;
};
static void load(const char *folder, struct loaded *l)
{
    assert_ok(device_open("cpu", &l->dev));
    assert_ok(model_config_load(folder, &l->config));
    assert_ok(weights_plan(l->config, DT_F32, &l->weights));
    assert_ok(device_alloc(l->dev, l->weights->bytes, &l->memory));
    memset(l->memory, 0, l->weights->bytes);
    weights_bind(l->weights, l->memory);
    assert_ok(weights_load(l->weights, l->dev, folder));
}
static void unload(struct loaded *l)
{
    weights_free(l->weights);
    model_config_free(l->config);
    device_release(l->dev, l->memory);
    device_free(l->dev);
}

// The daemon's arena holds exactly what the folder holds.
static void assert_arena_is(const struct scene *s, const char *folder)
{
    daemon_holds(&s->daemon, "policy", folder);
}

// ---- training -----------------------------------------------------------------------------------

static void trains_in_place(void **state)
{
    (void)state;
    struct scene s;
    scene_open(&s);
    assert_int_equal(train(&s, "run",
                           OPTIONS("--max-steps", "3", "--beta", "0.01", "--num-iterations", "2",
                                   "--log-completions", "--token-budget", "40")),
                     0);
    char *text = test_read(test_path(s.folder, "run/metrics.jsonl")), *line = text;
    for (int step = 1; step <= 3; step++) {
        json_t *m;
        char *end = strchr(line, '\n');
        assert_non_null(end);
        assert_ok(json_parse("metrics", line, (size_t)(end - line), &m));
        assert_int_equal(json_integer_value(json_object_get(m, "step")), step);
        // two published updates a step, from version 2
        assert_int_equal(json_integer_value(json_object_get(m, "weight_version")), 2 + 4 * step);
        double mismatch = json_number_value(json_object_get(m, "sampler_mismatch/max"));
        assert_true(json_is_number(json_object_get(m, "sampler_mismatch/max")) && mismatch <= 1e-5);
        assert_true(json_number_value(json_object_get(m, "grad_norm")) > 0);
        double weight =
            json_number_value(json_object_get(m, "sampling/importance_sampling_ratio/mean"));
        assert_true(fabs(weight - 1) < 1e-3);
        // the second update found the policy where the first had moved it
        assert_true(json_number_value(json_object_get(m, "importance_ratio/max")) > 1);
        assert_true(json_number_value(json_object_get(m, "entropy")) > 0);
        static const char *const keys[] = {"loss",
                                           "kl",
                                           "reward",
                                           "reward_std",
                                           "reward_group_std",
                                           "rewards/length/mean",
                                           "frac_reward_zero_std",
                                           "completions/mean_length",
                                           "completions/clipped_ratio",
                                           "clip_ratio/low_mean",
                                           "clip_ratio/low_min",
                                           "clip_ratio/high_mean",
                                           "clip_ratio/high_max",
                                           "clip_ratio/region_mean",
                                           "importance_ratio/mean",
                                           "sampling/importance_sampling_ratio/min",
                                           "sampling/importance_sampling_ratio/max",
                                           "sampling/importance_sampling_ratio/cut",
                                           "learning_rate",
                                           "publish/wait_ms",
                                           "publish/total_ms",
                                           "rollout_s",
                                           "tokens_per_s"};
        for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)
            if (!json_is_number(json_object_get(m, keys[k])))
                fail_msg("step %d: no number %s in metrics.jsonl", step, keys[k]);
        json_decref(m);
        line = end + 1;
    }
    free(text);
    assert_arena_is(&s, latest(&s, "run"));
    assert_true(file_exists(test_path(s.folder, "run/rollouts/step-3.jsonl")));
    // what was trained is not what was loaded
    struct loaded before, after;
    load(s.model, &before);
    load(latest(&s, "run"), &after);
    assert_memory_not_equal(before.memory, after.memory, 1024);
    unload(&before);
    unload(&after);
    assert_log(&s, "0 extra");
    // a run is not overwritten by accident
    assert_int_equal(train(&s, "run", OPTIONS("--max-steps", "3")), 1);
    assert_log(&s, "--resume");
    assert_int_equal(daemon_stop(&s.daemon), 0);
    scene_close(&s);
}

// What serving costs is in the reward, each term by itself, and the terms add up.
static void costs_of_inference(void **state)
{
    (void)state;
    struct scene s;
    scene_open(&s);
    assert_int_equal(train(&s, "plain", OPTIONS("--max-steps", "1", "--gain-acceptance", "2")), 0);
    assert_log(&s, "--gain-acceptance has no effect without --cost");
    json_t *m = last_metrics(&s, "plain");
    assert_null(json_object_get(m, "rewards/cost")); // measured all the same
    assert_true(metric(m, "inference/latency_ms") > 0 && metric(m, "inference/kv_memory_mb") > 0);
    assert_true(metric(m, "inference/cache_reuse_ratio") >= 0);
    assert_true(metric(m, "importance_ratio/min") == 1 && metric(m, "importance_ratio/max") == 1);
    json_decref(m);
    assert_int_equal(
        train(&s, "run",
              OPTIONS("--max-steps", "3", "--cost", "--latency", "modelled", "--reward-normalise",
                      "terms", "--cost-tokens", "0.1", "--log-completions")),
        0);
    m = last_metrics(&s, "run");
    double costs = metric(m, "rewards/cost/latency") + metric(m, "rewards/cost/tokens") +
                   metric(m, "rewards/cost/kv") + metric(m, "rewards/cost/acceptance") +
                   metric(m, "rewards/cost/cache");
    assert_true(fabs(costs - metric(m, "rewards/cost")) < 1e-6);
    assert_true(fabs(metric(m, "rewards/task") + costs - metric(m, "reward")) < 1e-6);
    assert_true(fabs(metric(m, "rewards/task") - metric(m, "rewards/length/mean")) < 1e-6);
    assert_true(
        fabs(metric(m, "rewards/cost/tokens") + 0.1 * metric(m, "completions/mean_length")) < 1e-6);
    assert_true(metric(m, "inference/latency_ms") > 0 && metric(m, "inference/kv_memory_mb") > 0);
    assert_true(metric(m, "inference/undrafted") == 1); // this daemon does not speculate
    assert_true(metric(m, "latency_model/r2") <= 1 + 1e-9);
    json_decref(m);
    assert_log(&s, "nothing was drafted for 12 of 12 samples");
    assert_log(&s, "latency model of 36 samples");
    // the fit goes on where it was
    assert_int_equal(
        train(&s, "run",
              OPTIONS("--max-steps", "4", "--cost", "--latency", "modelled", "--resume")),
        0);
    assert_log(&s, "latency model of 48 samples");
    assert_int_equal(daemon_stop(&s.daemon), 0);
    scene_close(&s);
}

// Sum of a field of the samples' telemetry over a step's rollouts.
static double telemetry_sum(const struct scene *s, const char *file, const char *key)
{
    double sum = 0;
    char *text = test_read(test_path(s->folder, file));
    for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
        json_t *sample;
        assert_ok(json_parse(file, line, (size_t)(end - line), &sample));
        sum += json_number_value(json_object_get(json_object_get(sample, "telemetry"), key));
        json_decref(sample);
    }
    free(text);
    return sum;
}

// Tokens that a step's rollouts mark as accepted drafts.
static int marked_tokens(const struct scene *s, const char *file)
{
    int marked = 0;
    char *text = test_read(test_path(s->folder, file));
    for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
        json_t *sample, *entry;
        size_t i;
        assert_ok(json_parse(file, line, (size_t)(end - line), &sample));
        json_array_foreach (json_object_get(sample, "accepted"), i, entry)
            marked += json_integer_value(entry) > 0;
        json_decref(sample);
    }
    free(text);
    return marked;
}

// A step's speculative counters are the difference of the daemon's, and so the sum over its
// samples.
static void speculative_counters(void **state)
{
    (void)state;
    struct scene s;
    scene_open(&s);
    assert_int_equal(train(&s, "off", OPTIONS("--max-steps", "1")), 0);
    json_t *m = last_metrics(&s, "off");
    assert_null(json_object_get(m, "spec_decode/num_drafts"));
    json_decref(m);
    daemon_kill(&s.daemon);
    // fixed: what is drafted is no matter of measured times
    daemon_start(&s.daemon, s.model,
                 OPTIONS("--speculative", "ngram:3", "--draft-length", "fixed"));
    // so cold that samples repeat themselves, and long enough to be drafted from
    assert_int_equal(
        train(&s, "on",
              OPTIONS("--max-steps", "2", "--temperature", "0.01", "--max-completion-length", "200",
                      "--log-completions", "--cost")),
        0);
    m = last_metrics(&s, "on");
    double drafted = metric(m, "spec_decode/num_draft_tokens");
    double accepted = metric(m, "spec_decode/num_accepted_tokens");
    assert_true(drafted > 0 && accepted > 0);
    assert_true(telemetry_sum(&s, "on/rollouts/step-2.jsonl", "num_drafts") ==
                metric(m, "spec_decode/num_drafts"));
    assert_true(telemetry_sum(&s, "on/rollouts/step-2.jsonl", "num_draft_tokens") == drafted);
    assert_true(telemetry_sum(&s, "on/rollouts/step-2.jsonl", "num_accepted_tokens") == accepted);
    assert_true(marked_tokens(&s, "on/rollouts/step-2.jsonl") == accepted);
    assert_true(fabs(metric(m, "spec_decode/acceptance_rate") - accepted / drafted) < 1e-6);
    assert_true(metric(m, "spec_decode/acceptance_length") >= 1);
    assert_true(metric(m, "spec_decode/acceptance_rate_pos_0") >= 0);
    assert_true(metric(m, "inference/undrafted") < 1);
    assert_true(fabs(metric(m, "rewards/cost/acceptance") - metric(m, "inference/accept_rate")) <
                1e-6);
    json_decref(m);
    assert_log(&s, "SpecDecoding metrics: Mean acceptance length: ");
    assert_int_equal(daemon_stop(&s.daemon), 0);
    scene_close(&s);
}

// Draft tokens of one answer, as its daemon's own counters have them.
static double draft_from(const struct daemon *d)
{
    json_decref(daemon_post(d->socket, "/v1/completions", 200,
                            "{\"prompt\":[5,6,7,5,6],\"max_tokens\":60,\"temperature\":0,"
                            "\"ignore_eos\":true}"));
    json_t *stats = daemon_get(d->socket, "/v1/spec_decode_stats", 200);
    const double drafted = json_number_value(json_object_get(stats, "num_draft_tokens"));
    json_decref(stats);
    return drafted;
}

// Counters of the trained daemon, of one more that drafts and of one that does not.
static void daemons_are_summed(void **state)
{
    (void)state;
    struct scene s;
    struct daemon second = {0}, third = {0};
    struct bridge_file *file;
    struct http_client *http;
    struct spec_watch *watch = NULL;
    struct spec_counters counted;
    char more[2 * PATH_MAX + 2];
    scene_open(&s);
    daemon_kill(&s.daemon);
    const char *const drafting[] = {"--speculative", "ngram:3", "--draft-length", "fixed", NULL};
    daemon_start(&s.daemon, s.model, drafting);
    daemon_start(&second, s.model, drafting);
    daemon_start(&third, s.model, NULL);
    snprintf(more, sizeof more, "%s,%s", second.bridge, third.bridge);
    assert_ok(bridge_file_read(s.daemon.bridge, &file));
    assert_ok(http_client_new(file->socket, &http));
    assert_ok(spec_watch_new(file, http, more, &watch));
    const double before = draft_from(&second); // not of the step
    assert_true(before > 0);
    assert_ok(spec_watch_begin(watch));
    const double first = draft_from(&s.daemon), both = draft_from(&second);
    draft_from(&third);
    assert_ok(spec_watch_end(watch, &counted));
    assert_true(counted.present && first > 0 && both > before);
    assert_true(counted.num_draft_tokens == first + both - before);
    assert_int_equal(counted.n_positions, 3);
    // of daemons that do not draft: nothing, and no error
    spec_watch_free(watch);
    http_client_free(http);
    bridge_file_free(file);
    watch = NULL;
    assert_ok(bridge_file_read(third.bridge, &file));
    assert_ok(http_client_new(file->socket, &http));
    assert_ok(spec_watch_new(file, http, NULL, &watch));
    assert_ok(spec_watch_begin(watch));
    draft_from(&third);
    assert_ok(spec_watch_end(watch, &counted));
    assert_false(counted.present);
    spec_watch_free(watch);
    http_client_free(http);
    bridge_file_free(file);

    // in a run: nobody else asked them, so it is what the samples say
    assert_int_equal(
        train(&s, "run",
              OPTIONS("--max-steps", "1", "--temperature", "0.01", "--max-completion-length", "100",
                      "--log-completions", "--also-count", more)),
        0);
    json_t *m = last_metrics(&s, "run");
    assert_true(metric(m, "spec_decode/num_draft_tokens") > 0);
    assert_true(telemetry_sum(&s, "run/rollouts/step-1.jsonl", "num_draft_tokens") ==
                metric(m, "spec_decode/num_draft_tokens"));
    json_decref(m);
    // what cannot be counted is said before anything is done
    assert_int_equal(
        train(&s, "twice", OPTIONS("--max-steps", "1", "--also-count", s.daemon.bridge)), 1);
    assert_log(&s, "would count twice");
    snprintf(more, sizeof more, "%s,", second.bridge);
    assert_int_equal(train(&s, "comma", OPTIONS("--max-steps", "1", "--also-count", more)), 1);
    assert_log(&s, "names no bridge file before or behind a comma");
    daemon_kill(&third);
    assert_int_equal(train(&s, "gone", OPTIONS("--max-steps", "1", "--also-count", third.bridge)),
                     1);
    assert_log(&s, third.bridge);
    assert_false(file_exists(test_path(s.folder, "gone")));
    daemon_kill(&second);
    scene_close(&s);
}

// A command that scores nothing ends the run, naming the sample.
static void command_that_fails(void **state)
{
    (void)state;
    struct scene s;
    scene_open(&s);
    const char *scorer = test_path(s.folder, "scorer.sh");
    static const char script[] =
        "n=0\n"
        "while read -r line; do n=$((n + 1))\n"
        "[ $n -le 6 ] && echo '{\"reward\": 1}' || echo '{\"reward\": null}'\n"
        "done\n";
    test_write(scorer, script, strlen(script));
    char reward[PATH_MAX + 32];
    snprintf(reward, sizeof reward, "exact,command:sh %s", scorer);
    assert_int_equal(train(&s, "run", OPTIONS("--max-steps", "1", "--reward", reward)), 1);
    assert_log(&s, "data.jsonl, line ");
    assert_log(&s, "sample 2: reward command"); // of the second group: the seventh
    assert_log(&s, "not {\"reward\": NUMBER}");
    assert_int_equal(daemon_stop(&s.daemon), 0);
    scene_close(&s);
}

// A run of 6 steps, and one of 3 that another trainer with another daemon takes to 6: the same
// bits.
static void resumes_to_the_bit(void **state)
{
    (void)state;
    if (strcmp(test_device(), "cpu") != 0)
        test_skip("on a GPU a row's last bit depends on the batch around it");
    struct scene s;
    scene_open(&s);
    assert_int_equal(train(&s, "whole", OPTIONS("--max-steps", "6")), 0);
    daemon_kill(&s.daemon);
    daemon_start(&s.daemon, s.model, NULL);
    assert_int_equal(train(&s, "halves", OPTIONS("--max-steps", "3", "--resume")), 0);
    daemon_kill(&s.daemon);
    daemon_start(&s.daemon, s.model, NULL);
    assert_int_equal(train(&s, "halves", OPTIONS("--max-steps", "6", "--resume")), 0);
    assert_log(&s, "resumed at step 3");
    test_same_file(latest(&s, "whole"), latest(&s, "halves"), "model.safetensors");
    test_same_file(latest(&s, "whole"), latest(&s, "halves"), "trainer/optimizer.safetensors");
    assert_int_equal(steps_done(&s, "halves"), 6);
    assert_arena_is(&s, latest(&s, "halves"));
    // with another seed it would be another run
    assert_int_equal(train(&s, "halves", OPTIONS("--max-steps", "7", "--resume", "--seed", "1")),
                     1);
    assert_log(&s, "--seed");
    scene_close(&s);
}

// With a curriculum: 20 steps, and 10 that another trainer with another daemon takes to 20. An
// epoch is 20 examples in 7 steps at first, so that both halves end in the middle of one.
static void curriculum_resumes_to_the_bit(void **state)
{
    (void)state;
    if (strcmp(test_device(), "cpu") != 0)
        test_skip("on a GPU a row's last bit depends on the batch around it");
    struct scene s;
    double buckets[20], rollouts[20], epochs[20], again[20];
    scene_open(&s);
    assert_int_equal(train(&s, "whole", OPTIONS("--max-steps", "20", "--curriculum", "kde")), 0);
    assert_log(&s, "(cluster-report-epoch-2.txt)");
    assert_int_equal(column(&s, "whole", "curriculum/rollouts", rollouts, 20), 20);
    assert_int_equal(column(&s, "whole", "curriculum/bucket", buckets, 20), 20);
    assert_int_equal(column(&s, "whole", "epoch", epochs, 20), 20);
    bool varies = false;
    for (int i = 0; i < 20; i++) {
        assert_true(rollouts[i] >= 4 && rollouts[i] <= 10);
        assert_true((buckets[i] == 0) == (i < 7)); // the first epoch knows no rewards
        if (i < 7) assert_int_equal(rollouts[i], 7);
        varies |= rollouts[i] != rollouts[i / 7 * 7];
    }
    assert_true(varies);
    assert_true(epochs[6] == 1);

    daemon_kill(&s.daemon);
    daemon_start(&s.daemon, s.model, NULL);
    assert_int_equal(train(&s, "halves", OPTIONS("--max-steps", "10", "--curriculum", "kde")), 0);
    daemon_kill(&s.daemon);
    daemon_start(&s.daemon, s.model, NULL);
    assert_int_equal(
        train(&s, "halves", OPTIONS("--max-steps", "20", "--curriculum", "kde", "--resume")), 0);
    assert_log(&s, "resumed at step 10");
    test_same_file(latest(&s, "whole"), latest(&s, "halves"), "model.safetensors");
    test_same_file(latest(&s, "whole"), latest(&s, "halves"), "trainer/optimizer.safetensors");
    test_same_file(latest(&s, "whole"), latest(&s, "halves"), "trainer/trainer_state.json");
    for (int epoch = 1; epoch <= 2; epoch++) {
        char name[64];
        snprintf(name, sizeof name, "cluster-report-epoch-%d.txt", epoch);
        test_same_file(test_path(s.folder, "whole"), test_path(s.folder, "halves"), name);
    }
    column(&s, "halves", "curriculum/rollouts", again, 20);
    assert_memory_equal(rollouts, again, sizeof again);

    // another order of the data would be another run
    assert_int_equal(
        train(&s, "halves", OPTIONS("--max-steps", "21", "--resume", "--curriculum", "off")), 1);
    assert_log(&s, "--curriculum kde");
    assert_int_equal(train(&s, "halves",
                           OPTIONS("--max-steps", "21", "--resume", "--curriculum", "kde",
                                   "--prompts-per-step", "4")),
                     1);
    assert_log(&s, "--prompts-per-step 3");
    scene_close(&s);
}

// By epochs: each ends with its report, and the run with the last of them.
static void uniform_curriculum(void **state)
{
    (void)state;
    struct scene s;
    double samples[32] = {0}, rollouts[32], epochs[32];
    scene_open(&s);
    assert_int_equal(
        train(&s, "run", OPTIONS("--num-train-epochs", "2", "--curriculum", "uniform")), 0);
    int n = column(&s, "run", "epoch", epochs, 32);
    assert_in_range(n, 14, 16); // each bucket may end in a batch that is not full
    assert_true(epochs[n - 1] == 2);
    column(&s, "run", "curriculum/samples", samples, 32);
    column(&s, "run", "curriculum/rollouts", rollouts, 32);
    assert_true(samples[6] == 20 * 7 && rollouts[6] == 7);
    double low = 10, high = 4;
    for (int i = 7; i < n; i++) {
        low = fmin(low, rollouts[i]);
        high = fmax(high, rollouts[i]);
    }
    assert_true(high - low <= 1);
    assert_true(file_exists(test_path(s.folder, "run/cluster-report-epoch-2.txt")));
    assert_false(file_exists(test_path(s.folder, "run/cluster-report-epoch-3.txt")));
    assert_int_equal(daemon_stop(&s.daemon), 0);
    scene_close(&s);
}

// ---- evaluation ---------------------------------------------------------------------------------

// The lines of metrics.jsonl that have an evaluation: their steps, up to `most`.
static int evaluated_steps(const struct scene *s, const char *run, int *ret, int most)
{
    char *text = test_read(test_path(test_path(s->folder, run), "metrics.jsonl")), *end;
    int n = 0;
    for (char *line = text; n < most && (end = strchr(line, '\n')); line = end + 1) {
        json_t *m;
        assert_ok(json_parse("metrics", line, (size_t)(end - line), &m));
        if (json_has(m, "eval/reward")) {
            assert_true(metric(m, "eval/reward_standard_error") >= 0);
            ret[n++] = (int)metric(m, "step");
        }
        json_decref(m);
    }
    free(text);
    return n;
}

// Every evaluation is as good as the baseline, which nothing can beat, while weight decay alone
// moves the weights: the run gives up, keeps step 0 as its best, and serves it.
static void stops_early(void **state)
{
    (void)state;
    struct scene s;
    int steps[8];
    char best[PATH_MAX], last[PATH_MAX];
    scene_open(&s);
    const char *const run[] = {"--max-steps",
                               "100",
                               "--reward",
                               "constant",
                               "--weight-decay",
                               "0.1",
                               "--learning-rate",
                               "1e-2",
                               "--eval-data",
                               s.data,
                               "--eval-limit",
                               "4",
                               "--eval-steps",
                               "2",
                               "--early-stop-patience",
                               "3",
                               "--save-total-limit",
                               "1",
                               NULL};
    assert_int_equal(train(&s, "run", run), 0);
    assert_int_equal(evaluated_steps(&s, "run", steps, 8), 4);
    assert_int_equal(steps[0], 0);
    assert_int_equal(steps[3], 6);
    assert_log(&s, "stopped early at step 6 of 100: 3 evaluations in a row");
    assert_log(&s, "the best was step 0 (reward 1.0000)");
    assert_non_null(realpath(test_path(s.folder, "run/checkpoints/best"), best));
    assert_non_null(realpath(latest(&s, "run"), last));
    assert_contains(best, "/step-0");
    assert_contains(last, "/step-6");
    assert_arena_is(&s, last);

    // Taken up again it has still had enough; with more patience it goes on, and serves the best.
    assert_int_equal(
        train(&s, "run",
              OPTIONS("--max-steps", "100", "--reward", "constant", "--weight-decay", "0.1",
                      "--learning-rate", "1e-2", "--eval-data", s.data, "--eval-limit", "4",
                      "--eval-steps", "2", "--early-stop-patience", "3", "--resume")),
        0);
    assert_int_equal(steps_done(&s, "run"), 7); // with the baseline's line
    assert_int_equal(
        train(&s, "run",
              OPTIONS("--max-steps", "100", "--reward", "constant", "--weight-decay", "0.1",
                      "--learning-rate", "1e-2", "--eval-data", s.data, "--eval-limit", "4",
                      "--eval-steps", "2", "--early-stop-patience", "4", "--resume",
                      "--load-best-model-at-end")),
        0);
    assert_log(&s, "stopped early at step 8 of 100");
    assert_log(&s, "serving the weights of step 0, the best");
    assert_arena_is(&s, s.model);
    assert_int_equal(daemon_stop(&s.daemon), 0);
    scene_close(&s);
}

static void evaluates_by_epochs(void **state)
{
    (void)state;
    struct scene s;
    int steps[8];
    scene_open(&s);
    assert_int_equal(train(&s, "run",
                           OPTIONS("--num-train-epochs", "5", "--eval-data", s.data, "--eval-limit",
                                   "4", "--eval-strategy", "epoch", "--eval-epochs", "2")),
                     0);
    // 20 examples, 3 a step: epochs 2 and 4 end in steps 14 and 27, the run with step 34
    assert_int_equal(evaluated_steps(&s, "run", steps, 8), 4);
    assert_int_equal(steps[1], 14);
    assert_int_equal(steps[2], 27);
    assert_int_equal(steps[3], 34);
    assert_int_equal(daemon_stop(&s.daemon), 0);
    scene_close(&s);
}

// ---- exact --------------------------------------------------------------------------------------

static void same_column(const struct scene *s, const char *a, const char *b, const char *key, int n)
{
    double x[32], y[32];
    assert_int_equal(column(s, a, key, x, 32), n);
    assert_int_equal(column(s, b, key, y, 32), n);
    for (int i = 0; i < n; i++)
        if (x[i] != y[i])
            fail_msg("line %d, %s: %.17g in %s, %.17g in %s", i + 1, key, x[i], a, y[i], b);
}

// 20 steps with a draft model that drafts and is trained, in one go; and the same with the trainer
// killed after 10, and the daemon after 15.
static void exact_run_survives_everything(void **state)
{
    (void)state;
    const bool cpu = strcmp(test_device(), "cpu") == 0;
    struct scene s;
    struct test_child trainer = {0};
    double drafts[32], mismatch[32];
    scene_open(&s);
    daemon_kill(&s.daemon);
    const char *draft = daemon_model(test_folder(), true, 12);
    const char *const daemon[] = {"--exact", "--dtype",       daemon_exact_dtype(), "--draft",
                                  draft,     "--speculative", "draft_model:3",      NULL};
    const char *const run[] = {"--exact",
                               "--train-draft",
                               "--draft-learning-rate",
                               "1e-3",
                               "--max-steps",
                               "20",
                               "--save-steps",
                               "5",
                               "--eval-data",
                               s.data,
                               "--eval-limit",
                               "6",
                               "--eval-steps",
                               "4",
                               "--early-stop-patience",
                               "9",
                               "--curriculum",
                               "kde",
                               "--resume",
                               NULL};
    daemon_start(&s.daemon, s.model, daemon);
    assert_int_equal(train(&s, "whole", run), 0);
    daemon_kill(&s.daemon);

    daemon_start(&s.daemon, s.model, daemon);
    start_trainer(&s, &trainer, "parts", run);
    wait_for_steps(&s, "parts", 1 + 11, &trainer); // the first line is the baseline's
    test_end(&trainer);                            // SIGKILL
    daemon_wait(&s.daemon);
    start_trainer(&s, &trainer, "parts", run);
    wait_for_steps(&s, "parts", 1 + 16, &trainer);
    test_kill(&s.daemon.child, SIGKILL);
    assert_int_equal(test_wait(&trainer, LIMIT_MS), 1);
    daemon_kill(&s.daemon);
    daemon_start(&s.daemon, s.model, daemon);
    assert_int_equal(train(&s, "parts", run), 0);
    assert_log(&s, "resumed at step ");
    if (cpu) { // it looks at f32
        daemon_holds(&s.daemon, "policy", latest(&s, "parts"));
        daemon_holds(&s.daemon, "draft", test_path(latest(&s, "parts"), "draft"));
    }

    static const char *const files[] = {"model.safetensors", "trainer/optimizer.safetensors",
                                        "trainer/trainer_state.json", "draft/model.safetensors",
                                        "draft/trainer/optimizer.safetensors"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        test_same_file(latest(&s, "whole"), latest(&s, "parts"), files[i]);
    static const char *const keys[] = {"loss",       "reward",     "grad_norm",
                                       "entropy",    "draft_loss", "completions/mean_length",
                                       "eval/reward"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        same_column(&s, "whole", "parts", keys[i], 21);
    column(&s, "whole", "spec_decode/num_draft_tokens", drafts, 32);
    for (int r = 0; r < 2; r++) {
        column(&s, r ? "parts" : "whole", "sampler_mismatch/max", mismatch, 32);
        for (int i = 1; i <= 20; i++) assert_true(mismatch[i] == 0);
    }
    for (int i = 1; i <= 20; i++) assert_true(drafts[i] > 0);

    // Drafts leave no trace in what is drawn: without any the first step has the same samples.
    daemon_kill(&s.daemon);
    daemon_start(&s.daemon, s.model, OPTIONS("--exact", "--dtype", daemon_exact_dtype()));
    assert_int_equal(
        train(&s, "undrafted",
              OPTIONS("--exact", "--max-steps", "20", "--eval-data", s.data, "--eval-limit", "6",
                      "--eval-steps", "4", "--curriculum", "kde")),
        0);
    test_same_file(latest(&s, "whole"), latest(&s, "undrafted"), "model.safetensors");

    // On the CPU another number of threads divides the backward pass otherwise.
    if (!cpu) {
        scene_close(&s);
        return;
    }
    assert_int_equal(setenv("OMP_NUM_THREADS", "7", 1), 0);
    int status = train(&s, "undrafted",
                       OPTIONS("--exact", "--resume", "--max-steps", "21", "--curriculum", "kde"));
    unsetenv("OMP_NUM_THREADS");
    assert_int_equal(status, 1);
    assert_log(&s, "set OMP_NUM_THREADS as it was");
    scene_close(&s);
}

static void exact_wants_an_exact_daemon(void **state)
{
    (void)state;
    struct scene s;
    scene_open(&s);
    assert_int_equal(train(&s, "run", OPTIONS("--exact", "--max-steps", "1")), 1);
    assert_log(&s, "cw-infer-server --exact");
    assert_false(file_exists(test_path(s.folder, "run")));
    scene_close(&s);
}

static void sft_then_eval(void **state)
{
    (void)state;
    struct scene s;
    scene_open(&s);
    daemon_kill(&s.daemon);
    const char *out = test_path(s.folder, "taught"), *log = test_path(s.folder, "trainer.log");
    struct tiny_model shape = {.hidden = 64,
                               .layers = 2,
                               .vocab = 300,
                               .seed = 5,
                               .eos_id = TINY_TOKENIZER_IM_END,
                               .tie_embeddings = true};
    const char *base = test_path(s.folder, "base");
    assert_ok(tiny_model_write_as(base, &shape));
    assert_ok(tiny_tokenizer_write(base));
    assert_int_equal(
        test_command(log, LIMIT_MS,
                     OPTIONS(test_binary("cw-trainer"), "sft", "--model", base, "--data", s.data,
                             "--out", out, "--device", "cpu", "--learning-rate", "5e-3",
                             "--max-steps", "120", "--examples-per-step", "20",
                             "--lr-scheduler-type", "constant", "--token-budget", "60")),
        0);
    daemon_start(&s.daemon, out, NULL);
    const char *result = test_path(s.folder, "eval.log");
    assert_int_equal(test_command(result, LIMIT_MS,
                                  OPTIONS(test_binary("cw-trainer"), "eval", "--bridge",
                                          s.daemon.bridge, "--data", s.data, "--reward", "exact",
                                          "--max-completion-length", "8", "--json")),
                     0);
    char *text = test_read(result);
    json_t *json;
    assert_ok(json_parse("eval", text, strlen(text), &json));
    assert_int_equal(json_integer_value(json_object_get(json, "n")), 20);
    // 20 sums, seen 120 times each: learned by heart
    if (json_number_value(json_object_get(json, "accuracy")) < 0.8) fail_msg("%s", text);
    json_decref(json);
    free(text);
    scene_close(&s);
}

// ---- options ------------------------------------------------------------------------------------

// Every sample is cut off at the token limit: with the mask nothing is left to learn from.
static void truncated_samples_are_masked(void **state)
{
    (void)state;
    struct scene s;
    scene_open(&s);
    for (int masked = 0; masked < 2; masked++) {
        const char *run = masked ? "masked" : "plain";
        assert_int_equal(train(&s, run,
                               OPTIONS("--max-steps", "1", "--ignore-eos",
                                       masked ? "--mask-truncated-completions" : "--no-resume")),
                         0);
        json_t *m = last_metrics(&s, run);
        assert_true(metric(m, "completions/clipped_ratio") == 1);
        assert_true(masked == (metric(m, "grad_norm") == 0));
        json_decref(m);
        if (masked) assert_arena_is(&s, test_path(s.folder, "masked/checkpoints/step-0"));
    }
    assert_int_equal(daemon_stop(&s.daemon), 0);
    scene_close(&s);
}

// A daemon may serve less context than its model has: that is said before the run has a folder.
static void context_of_the_daemon(void **state)
{
    (void)state;
    struct scene s;
    scene_open(&s);
    daemon_kill(&s.daemon);
    daemon_start(&s.daemon, s.model, OPTIONS("--max-context", "16"));
    assert_int_equal(train(&s, "run", OPTIONS("--max-steps", "1")), 1);
    assert_log(&s, "over the 16 tokens of context that the daemon serves");
    assert_log(&s, "--max-context");
    assert_false(file_exists(test_path(s.folder, "run")));
    assert_int_equal(train(&s, "run", OPTIONS("--max-steps", "1", "--max-completion-length", "4")),
                     0);
    scene_close(&s);
}

// What a resumed run does otherwise is said, and a best that cannot be compared is not kept.
static void resumes_with_other_options(void **state)
{
    (void)state;
    struct scene s;
    char to[512];
    scene_open(&s);
    const char *best = test_path(s.folder, "run/checkpoints/best");
    // no weight moves: every evaluation is as good as the baseline
    const char *still[] = {"--max-steps",     "2", "--eval-data", s.data, "--eval-steps", "1",
                           "--learning-rate", "0", NULL};
    assert_int_equal(train(&s, "run", still), 0);
    ssize_t n = readlink(best, to, sizeof to);
    assert_true(n == 6 && memcmp(to, "step-0", 6) == 0);

    const char *same[] = {"--max-steps",     "3", "--eval-data", s.data, "--eval-steps", "1",
                          "--learning-rate", "0", "--resume",    NULL};
    assert_int_equal(train(&s, "run", same), 0);
    char *log = test_read(test_path(s.folder, "trainer.log"));
    assert_null(strstr(log, "warning"));
    free(log);
    assert_log(&s, "the best was at step 0");

    const char *other[] = {"--max-steps",     "4",    "--eval-data",  s.data, "--eval-steps", "1",
                           "--learning-rate", "1e-6", "--eval-limit", "5",    "--resume",     NULL};
    assert_int_equal(train(&s, "run", other), 0);
    assert_log(&s, "warning: the run goes on with other options: ");
    assert_log(&s, "learning_rate 1e-6 (was 0.0)");
    assert_log(&s, "eval_limit 5 (was 0)");
    assert_log(&s, "their best, step 0, is not compared");
    n = readlink(best, to, sizeof to);
    assert_true(n == 6 && memcmp(to, "step-4", 6) == 0);
    assert_int_equal(daemon_stop(&s.daemon), 0);
    scene_close(&s);
}

// ---- ends ---------------------------------------------------------------------------------------

static void second_trainer_is_refused(void **state)
{
    (void)state;
    struct scene s;
    struct test_child first = {0};
    char pid[32];
    scene_open(&s);
    start_trainer(&s, &first, "first", OPTIONS("--max-steps", "100000"));
    wait_for_steps(&s, "first", 1, &first);
    assert_int_equal(train(&s, "second", OPTIONS("--max-steps", "1")), 1);
    snprintf(pid, sizeof pid, "process %d", (int)first.pid);
    assert_log(&s, pid);
    assert_true(test_running(&first));
    wait_for_steps(&s, "first", steps_done(&s, "first") + 1, &first); // undisturbed
    // nor may that of another daemon write into its folder
    struct daemon own = s.daemon, other = {0};
    daemon_start(&other, s.model, NULL);
    s.daemon = other;
    assert_int_equal(train(&s, "first", OPTIONS("--max-steps", "1", "--resume")), 1);
    assert_log(&s, "first: another trainer is writing there");
    daemon_kill(&s.daemon);
    s.daemon = own;
    wait_for_steps(&s, "first", steps_done(&s, "first") + 1, &first);
    test_end(&first);
    scene_close(&s);
}

static void sigterm_ends_after_the_step(void **state)
{
    (void)state;
    struct scene s;
    struct test_child trainer = {0};
    json_t *saved;
    scene_open(&s);
    start_trainer(&s, &trainer, "run", OPTIONS("--max-steps", "100000"));
    wait_for_steps(&s, "run", 2, &trainer);
    test_kill(&trainer, SIGTERM);
    assert_int_equal(test_wait(&trainer, LIMIT_MS), 0);
    assert_log(&s, ": stopped at step ");
    int steps = steps_done(&s, "run");
    assert_ok(json_read_file(test_path(latest(&s, "run"), "trainer/trainer_state.json"), 1 << 20,
                             &saved));
    assert_int_equal(json_integer_value(json_object_get(saved, "step")), steps);
    json_decref(saved);
    assert_arena_is(&s, latest(&s, "run"));
    assert_int_equal(train(&s, "other", OPTIONS("--max-steps", "1")), 0); // the lease is free
    scene_close(&s);
}

// In a long step, here one whose scores are waited for, the first signal says what it waits for;
// the second does not wait.
static void second_signal_ends_at_once(void **state)
{
    (void)state;
    struct scene s;
    struct test_child trainer = {0};
    char reward[PATH_MAX + 32];
    static const char script[] = "read -r line && touch \"$0.asked\" && sleep 5\n";
    scene_open(&s);
    const char *scorer = test_path(s.folder, "scorer.sh");
    test_write(scorer, script, strlen(script));
    snprintf(reward, sizeof reward, "command:sh %s", scorer);
    start_trainer(&s, &trainer, "run", OPTIONS("--max-steps", "9", "--reward", reward));
    int64_t deadline = clock_deadline_ns(10000);
    while (!file_exists(test_path(s.folder, "scorer.sh.asked")) && clock_ms_until(deadline) > 0)
        clock_sleep_ms(10);
    test_kill(&trainer, SIGINT);
    wait_for_log(&s, "once this step is done");
    assert_true(test_running(&trainer));
    int64_t start = clock_now_ns();
    test_kill(&trainer, SIGINT);
    assert_int_equal(test_wait(&trainer, LIMIT_MS), 1);
    assert_true(clock_ms_since(start) < 2000);
    assert_log(&s, "second signal: ending at once");
    struct loaded l;
    load(latest(&s, "run"), &l); // the checkpoint before is whole
    unload(&l);
    assert_int_equal(train(&s, "run", OPTIONS("--max-steps", "1", "--resume")), 0);
    scene_close(&s);
}

static void killed_daemon_ends_the_trainer(void **state)
{
    (void)state;
    struct scene s;
    struct test_child trainer = {0};
    struct loaded l;
    scene_open(&s);
    start_trainer(&s, &trainer, "run", OPTIONS("--max-steps", "100000", "--save-steps", "2"));
    wait_for_steps(&s, "run", 3, &trainer);
    test_kill(&s.daemon.child, SIGKILL);
    int64_t start = clock_now_ns();
    assert_int_equal(test_wait(&trainer, 10000), 1);
    assert_true(clock_ms_since(start) < 2000);
    assert_log(&s, "error: ");
    load(latest(&s, "run"), &l); // whole
    unload(&l);
    scene_close(&s);
    daemon_start(&s.daemon, s.model, NULL);
    assert_int_equal(train(&s, "run", OPTIONS("--max-steps", "5", "--resume")), 0);
    assert_log(&s, "resumed at step");
    scene_close(&s);
}

static void killed_trainer_leaves_the_daemon_serving(void **state)
{
    (void)state;
    struct scene s;
    struct test_child trainer = {0};
    scene_open(&s);
    start_trainer(&s, &trainer, "run", OPTIONS("--max-steps", "100000", "--save-steps", "2"));
    wait_for_steps(&s, "run", 3, &trainer);
    test_end(&trainer); // SIGKILL
    daemon_wait(&s.daemon);
    // wherever it was hit, the next one takes the lease over and goes on
    assert_int_equal(train(&s, "run", OPTIONS("--max-steps", "6", "--resume")), 0);
    assert_arena_is(&s, latest(&s, "run"));
    scene_close(&s);
}

static enum status scribble_and_die(void *context)
{
    float *arena = context;
    for (int i = 0; i < 2000; i++) arena[i] = 1e9f;
    raise(SIGKILL);
    return ST_OK;
}

static int health(struct http_client *http, struct bytes *ret)
{
    return http_get(http, "/health", 5000, ret) == ST_OK ? 200 : 503;
}

// A writer dies with half an update written: the daemon says torn, and goes back to the trainer's
// last checkpoint by itself.
static void torn_weights_are_restored(void **state)
{
    (void)state;
    struct scene s;
    struct http_client *http;
    struct bytes body = BYTES_INIT;
    if (strcmp(test_device(), "cpu") != 0)
        test_skip("it writes weights from a forked process, which a GPU does not allow; "
                  "killed_trainer_in_an_update_is_undone is the same with the real trainer");
    scene_open(&s);
    assert_int_equal(train(&s, "run", OPTIONS("--max-steps", "2")), 0);
    assert_arena_is(&s, latest(&s, "run"));
    assert_ok(http_client_new(s.daemon.socket, &http));
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct bridge *bridge;
        struct publish_times times;
        if (bridge_attach(s.daemon.bridge, NULL, &bridge) == ST_OK &&
            bridge_become_writer(bridge) == ST_OK)
            bridge_publish(bridge, 10000, scribble_and_die, bridge_base(bridge, "policy"), &times);
        fprintf(stderr, "%s\n", status_message());
        _exit(1);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    int64_t deadline = clock_deadline_ns(20000);
    for (;;) { // 200 with the old version may come first, while the death is not yet noticed
        int code = health(http, &body);
        json_t *json = NULL;
        if (code == 200) assert_ok(json_parse("health", bytes_text(&body), body.len, &json));
        json_int_t version = json_integer_value(json_object_get(json, "weight_version"));
        json_decref(json);
        if (code == 200 && version > 6) break;
        if (clock_ms_until(deadline) == 0) fail_msg("not restored: %s", bytes_text(&body));
        clock_sleep_ms(2);
    }
    // The restore of so small a model may fall between two looks: the log knows.
    char *log = test_read(s.daemon.log);
    assert_contains(log, "torn");
    free(log);
    assert_arena_is(&s, latest(&s, "run"));
    assert_int_equal(train(&s, "run", OPTIONS("--max-steps", "3", "--resume")), 0);
    bytes_release(&body);
    http_client_free(http);
    scene_close(&s);
}

// A model whose AdamW takes long enough for a signal to hit it: 11 M parameters on the CPU, 90 M
// else.
static void scene_open_large(struct scene *s)
{
    const bool cpu = strcmp(test_device(), "cpu") == 0;
    const struct tiny_model shape = {.hidden = cpu ? 512 : 1024,
                                     .layers = cpu ? 3 : 6,
                                     .intermediate = cpu ? 2048 : 4096,
                                     .vocab = 300,
                                     .eos_id = -1,
                                     .seed = 17};
    scene_open(s);
    daemon_kill(&s->daemon);
    s->model = test_path(s->folder, "large");
    assert_ok(tiny_model_write_as(s->model, &shape));
    assert_ok(tiny_tokenizer_write(s->model));
    daemon_start(&s->daemon, s->model, NULL);
}

// Kills the trainer the moment the version is odd. False if the update ended before the signal
// came.
static bool kill_in_an_update(struct test_child *trainer, const struct control *control)
{
    const int64_t deadline = clock_deadline_ns(LIMIT_MS);
    while (!(control_version(control) & 1))
        if (clock_now_ns() > deadline) fail_msg("no update within %d ms", LIMIT_MS);
    kill(trainer->pid, SIGKILL);
    test_end(trainer);
    return control_version(control) & 1;
}

// Follows /health until it says ok at an even version again. True if it said torn meanwhile, and
// /metrics with it.
static bool torn_until_restored(const struct scene *s, const struct control *control)
{
    const int64_t deadline = clock_deadline_ns(30000);
    bool torn = false;
    for (;;) {
        struct wire_answer a;
        bool odd = control_version(control) & 1; // before: while it is odd, ok is not the end
        daemon_request(s->daemon.socket, "GET", "/health", "", NULL, &a);
        const char *status = json_string_value(json_object_get(a.json, "status"));
        bool ok = a.status == 200 && !odd;
        if (a.status == 503) {
            assert_string_equal(status, "torn");
            assert_contains(bytes_text(&a.head), "Retry-After");
            torn = true;
        }
        wire_answer_release(&a);
        if (ok) return torn;
        if (clock_now_ns() > deadline) fail_msg("%s", "not restored within 30 s");
    }
}

static json_t *greedy_ids(const struct daemon *d)
{
    json_t *answer = daemon_post(d->socket, "/v1/completions", 200,
                                 "{\"prompt\":\"12+15=\",\"max_tokens\":40,\"temperature\":0}");
    const json_t *choice = json_array_get(json_object_get(answer, "choices"), 0);
    json_t *ids = json_incref(json_object_get(choice, "token_ids"));
    assert_int_equal(json_array_size(ids), 40);
    json_decref(answer);
    return ids;
}

// The real trainer, killed while AdamW writes: torn, then the last checkpoint again, to the bit,
// and what is generated is what a daemon of that checkpoint generates. The signal may come too
// late, and so small a model may be restored between two looks: up to ten attempts.
static void killed_trainer_in_an_update_is_undone(void **state)
{
    (void)state;
    struct scene s;
    struct bridge *bridge;
    struct wire_answer metrics;
    char snapshot[512], restores[64];
    bool torn = false;
    int restored = 0;
    scene_open_large(&s);
    assert_ok(bridge_attach(s.daemon.bridge, NULL, &bridge));
    const struct control *control = bridge_control(bridge);
    for (int attempt = 0; attempt < 10 && !torn; attempt++) {
        struct test_child trainer = {0};
        int before = steps_done(&s, "run");
        start_trainer(&s, &trainer, "run",
                      OPTIONS("--max-steps", "100000", "--save-steps", "2", "--resume"));
        wait_for_steps(&s, "run", before < 2 ? 2 : before + 1, &trainer);
        if (!kill_in_an_update(&trainer, control)) continue;
        torn = torn_until_restored(&s, control);
        restored++;
    }
    assert_true(restored > 0 && torn);
    control_snapshot(control, snapshot, sizeof snapshot);
    assert_contains(snapshot, "checkpoints/step-");
    assert_arena_is(&s, snapshot);
    daemon_request(s.daemon.socket, "GET", "/metrics", "", NULL, &metrics);
    snprintf(restores, sizeof restores, "commonweight:restores_total{model_name=\"large\"} %d\n",
             restored);
    assert_contains(bytes_text(&metrics.body), restores);
    assert_contains(bytes_text(&metrics.body), "commonweight:torn{model_name=\"large\"} 0\n");
    wire_answer_release(&metrics);

    json_t *now = greedy_ids(&s.daemon);
    struct daemon fresh = {0};
    daemon_start(&fresh, snapshot, NULL);
    json_t *wanted = greedy_ids(&fresh);
    assert_true(json_equal(now, wanted));
    json_decref(now);
    json_decref(wanted);
    daemon_kill(&fresh);
    bridge_detach(bridge);
    scene_close(&s);
}

// Room for the weights, not for the optimizer's state, which the first checkpoint does without.
static void full_disk_leaves_the_checkpoint_before(void **state)
{
    (void)state;
    struct scene s;
    struct file_map model;
    struct rlimit limit;
    scene_open(&s);
    assert_ok(file_map_open(test_path(s.model, "model.safetensors"), &model));
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    rlim_t before = limit.rlim_cur;
    limit.rlim_cur = model.len + model.len / 2;
    file_map_release(&model);
    signal(SIGXFSZ, SIG_IGN); // the trainer inherits both: a write past the limit is an error
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    int status = train(&s, "run", OPTIONS("--max-steps", "2", "--save-steps", "1"));
    limit.rlim_cur = before;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    signal(SIGXFSZ, SIG_DFL);
    assert_int_equal(status, 1);
    assert_log(&s, "checkpoint of step 1 (that of step 0 is whole; --resume goes on from it)");
    assert_log(&s, "trainer/optimizer.safetensors");
    struct loaded l;
    load(latest(&s, "run"), &l);
    unload(&l);
    assert_int_equal(train(&s, "run", OPTIONS("--max-steps", "2", "--resume")), 0);
    assert_arena_is(&s, latest(&s, "run"));
    scene_close(&s);
}

// A disk that is really full, and one that takes no writes: small file systems of the test's own,
// of which a copy is left to look at.
static void full_and_read_only_disks(void **state)
{
    (void)state;
    struct scene s;
    struct file_map model;
    struct bytes script = BYTES_INIT;
    const char *argv[TRAINER_WORDS + 4] = {"unshare", "-rm", "sh"};
    scene_open(&s);
    const char *log = test_path(s.folder, "trainer.log"), *path = test_path(s.folder, "on-disk.sh");
    const char *disk = test_path(s.folder, "disk"), *copy = test_path(s.folder, "copy");
    assert_ok(file_make_folders(disk));
    if (test_command(test_path(s.folder, "try.log"), LIMIT_MS,
                     OPTIONS("unshare", "-rm", "mount", "-t", "tmpfs", "none", disk)) != 0) {
        scene_close(&s);
        test_skip("this machine lets nobody mount a file system of his own (unshare -rm mount)");
    }
    assert_ok(file_map_open(test_path(s.model, "model.safetensors"), &model));
    bytes_printf(&script,
                 "mount -t tmpfs -o size=%zu none %s || exit 99\n"
                 "\"$@\"; status=$?; cp -a %s/run %s || exit 98; exit $status\n",
                 model.len * 5 / 2, disk, disk, copy);
    file_map_release(&model);
    test_write(path, script.data, script.len);
    argv[3] = path;
    trainer_command(&s, test_path(disk, "run"), OPTIONS("--max-steps", "2", "--save-steps", "1"),
                    argv + 4);
    assert_int_equal(test_command(log, LIMIT_MS, argv), 1);
    assert_log(&s, "checkpoint of step 1 (that of step 0 is whole; --resume goes on from it)");
    assert_log(&s, "checkpoints/.step-1.");
    assert_log(&s, "No space left on device");
    char *to = realpath(test_path(copy, "checkpoints/latest"), NULL);
    assert_non_null(to);
    assert_contains(to, "/step-0");
    free(to);
    struct loaded l;
    load(test_path(copy, "checkpoints/latest"), &l);
    unload(&l);

    script.len = 0;
    bytes_printf(&script, "mount -t tmpfs -o ro none %s || exit 99\nexec \"$@\"\n", disk);
    test_write(path, script.data, script.len);
    assert_int_equal(test_command(log, LIMIT_MS, argv), 1);
    assert_log(&s, "disk/run");
    assert_log(&s, "Read-only file system");
    bytes_release(&script);
    assert_int_equal(train(&s, "run", OPTIONS("--max-steps", "1")), 0); // and the daemon serves on
    assert_int_equal(daemon_stop(&s.daemon), 0);
    scene_close(&s);
}

static void wrong_usage(void **state)
{
    (void)state;
    const char *log = test_path(test_folder(), "log"), *trainer = test_binary("cw-trainer");
    static const struct {
        const char *const argv[8], *part;
    } cases[] = {
        {{"train"}, "--data"},
        {{"train", "--data", "x", "--reward", "nope"}, "\"nope\""},
        {{"train", "--data", "x", "--num-generations", "1"}, "--num-generations"},
        {{"train", "--data", "x", "--loss-type", "ppo"}, "loss-type"},
        {{"train", "--data", "x", "--delta", "0.5"}, "--delta 0.5 would cut"},
        {{"train", "--data", "x", "--kl-estimator", "k4"}, "kl-estimator"},
        {{"train", "--data", "x", "--importance-sampling-clip-min", "4"}, "is not below"},
        {{"train", "--data", "x", "--importance-sampling-mode", "token_truncate",
          "--importance-sampling-clip-max", "0"},
         "no bound to truncate at"},
        {{"train", "--data", "x", "--resume"}, "--run-dir"},
        {{"train", "--data", "x", "--run-dir", ""}, "--run-dir is empty"},
        {{"train", "--data", "x", "--curriculum", "easy"}, "curriculum"},
        {{"train", "--data", "x", "--n-buckets", "17"}, "n-buckets"},
        {{"train", "--data", "x", "--rollout-base", "1"}, "rollout-base"},
        {{"train", "--data", "x", "--rollout-alpha", "-1"}, "rollout-alpha"},
        {{"train", "--data", "x", "--min-bucket-size", "-1"}, "min-bucket-size"},
        {{"train", "--data", "x", "--curriculum-ema", "1"}, "curriculum-ema"},
        {{"train", "--data", "x", "--early-stop-patience", "2"}, "needs --eval-data"},
        {{"train", "--data", "x", "--load-best-model-at-end"}, "needs --eval-data"},
        {{"train", "--data", "x", "--eval-strategy", "no"}, "eval-strategy"},
        {{"train", "--data", "x", "--exact", "--cost"}, "give --cost-latency 0"},
        {{"train", "--data", "x", "--exact", "--cost", "--cost-latency", "0"}, "give --cost-kv 0"},
        {{"sft", "--data", "x"}, "--model"},
        {{"sft", "--init", "c", "--data", "x", "--out", "y"}, "--tokenizer"},
        {{"eval"}, "--data"},
        {{"fly"}, "fly"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *argv[10] = {trainer};
        for (int k = 0; cases[i].argv[k]; k++) argv[k + 1] = cases[i].argv[k];
        assert_int_equal(test_command(log, LIMIT_MS, argv), 2);
        char *text = test_read(log);
        assert_contains(text, cases[i].part);
        free(text);
        unlink(log);
    }
    for (int i = 0; i < 3; i++) {
        static const char *const commands[] = {"train", "sft", "eval"};
        assert_int_equal(test_command(log, LIMIT_MS, OPTIONS(trainer, commands[i], "--help")), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(trains_in_place),
        cmocka_unit_test(costs_of_inference),
        cmocka_unit_test(speculative_counters),
        cmocka_unit_test(daemons_are_summed),
        cmocka_unit_test(command_that_fails),
        cmocka_unit_test(resumes_to_the_bit),
        cmocka_unit_test(curriculum_resumes_to_the_bit),
        cmocka_unit_test(uniform_curriculum),
        cmocka_unit_test(stops_early),
        cmocka_unit_test(evaluates_by_epochs),
        cmocka_unit_test(exact_run_survives_everything),
        cmocka_unit_test(exact_wants_an_exact_daemon),
        cmocka_unit_test(sft_then_eval),
        cmocka_unit_test(truncated_samples_are_masked),
        cmocka_unit_test(context_of_the_daemon),
        cmocka_unit_test(resumes_with_other_options),
        cmocka_unit_test(second_trainer_is_refused),
        cmocka_unit_test(sigterm_ends_after_the_step),
        cmocka_unit_test(second_signal_ends_at_once),
        cmocka_unit_test(killed_daemon_ends_the_trainer),
        cmocka_unit_test(killed_trainer_leaves_the_daemon_serving),
        cmocka_unit_test(torn_weights_are_restored),
        cmocka_unit_test(killed_trainer_in_an_update_is_undone),
        cmocka_unit_test(full_disk_leaves_the_checkpoint_before),
        cmocka_unit_test(full_and_read_only_disks),
        cmocka_unit_test(wrong_usage),
    };
    return cmocka_run_group_tests_name("training", tests, NULL, NULL);
}
