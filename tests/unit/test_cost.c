/* test_cost.c: trainer/cost, latency_model, scoring and spec_metrics: the cost formula term by
 * term, the fit against latencies of known make, z-scored terms, and the daemon's counters. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "tests/support/support.h"
#include "trainer/run/config.h"
#include "trainer/rollout/scoring.h"
#include "trainer/rollout/spec_counters.h"
#include "trainer/run/runlog.h"

#define NEAR(a, b) assert_near((a), (b), 1e-9 * fmax(1, fabs((double)(b))))

// Kept.
static json_t *telemetry(double latency_ms, int generated, json_t *accept_rate)
{
    return test_keep(json_pack(
        "{s:i, s:i, s:i, s:f, s:f, s:f, s:i, s:i, s:i, s:i, s:o}", "prompt_tokens", 8,
        "cached_prompt_tokens", 2, "generated_tokens", generated, "queue_ms", 1.0, "first_token_ms",
        2.0, "latency_ms", latency_ms, "kv_bytes_peak", 3 << 20, "num_drafts", 4,
        "num_draft_tokens", 10, "num_accepted_tokens", 5, "accept_rate", accept_rate));
}

TEST(quantities)
{
    struct completion_cost s;
    double q[COST_TERMS];
    json_t *t = telemetry(120, 7, json_real(0.5));
    assert_ok(cost_read(t, &s));
    assert_true(s.drafted);
    cost_quantities(&s, s.latency_ms, q);
    NEAR(q[COST_LATENCY], 120);
    NEAR(q[COST_TOKENS], 7);
    NEAR(q[COST_KV], 3);
    NEAR(q[COST_ACCEPTANCE], 0.5);
    NEAR(q[COST_CACHE], 0.25);

    json_object_set_new(t, "accept_rate", json_null()); // nothing was drafted
    assert_ok(cost_read(t, &s));
    assert_false(s.drafted);
    NEAR(s.accept_rate, 0);
    static const char *const keys[] = {"latency_ms", "queue_ms", "kv_bytes_peak",
                                       "cached_prompt_tokens", "num_accepted_tokens"};
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
        json_t *copy = test_keep(json_copy(t));
        json_object_del(copy, keys[k]);
        assert_fails(cost_read(copy, &s), ST_FORMAT, keys[k]);
        json_object_set_new(copy, keys[k], json_integer(-1));
        assert_status(cost_read(copy, &s), ST_FORMAT);
    }
    assert_status(cost_read(NULL, &s), ST_FORMAT);
}

// The formula's defaults, as an invocation without any of its options has them.
TEST(default_weights)
{
    static char *argv[] = {"train", "--data", "d.jsonl", "--cost"};
    static const double wanted[COST_TERMS] = {[COST_LATENCY] = -0.001,
                                              [COST_TOKENS] = -0.001,
                                              [COST_KV] = -0.01,
                                              [COST_ACCEPTANCE] = 1,
                                              [COST_CACHE] = 0.5};
    struct train_config config = {0};
    struct train_resolved resolved;
    struct option_set *set = NULL;
    assert_int_equal(options_parse(train_options, "train", "", 4, argv, 0, &config, NULL, &set),
                     OPTIONS_OK);
    assert_ok(train_config_resolve(&config, set, &resolved));
    assert_true(config.cost && !config.latency_modelled && !config.normalise_terms);
    for (int k = 0; k < COST_TERMS; k++)
        assert_true(cost_signed_weight(config.cost_weights, (enum cost_term)k) == wanted[k]);
    options_free(set);
}

// ---- latency model ------------------------------------------------------------------------------

static struct completion_cost random_sample(struct rng *rng, bool speculate)
{
    struct completion_cost s = {
        .prompt_tokens = 10 + rng_below(rng, 100),
        .generated_tokens = 1 + rng_below(rng, 200),
        .queue_ms = rng_below(rng, 1000), // must not matter
    };
    s.cached_prompt_tokens = rng_below(rng, 10);
    if (speculate) {
        s.num_draft_tokens = rng_below(rng, 300);
        s.num_accepted_tokens = rng_below(rng, 1 + (uint32_t)s.num_draft_tokens);
    }
    s.latency_ms = s.queue_ms + 5 + 0.1 * (s.prompt_tokens - s.cached_prompt_tokens) +
                   2 * s.generated_tokens + 0.3 * s.num_draft_tokens - 1.5 * s.num_accepted_tokens;
    return s;
}

TEST(latency_of_known_make)
{
    struct latency_model m = {0}, again;
    struct rng rng;
    rng_init(&rng, 3, 0);
    for (int i = 0; i < 500; i++) {
        struct completion_cost s = random_sample(&rng, true);
        s.latency_ms += i % 2 ? 4 : -4; // the others in the batch
        latency_model_add(&m, &s);
    }
    latency_model_fit(&m);
    assert_near(m.ms_per[LATENCY_PREFILL], 0.1, 0.02);
    assert_near(m.ms_per[LATENCY_GENERATED], 2, 0.01);
    assert_near(m.ms_per[LATENCY_DRAFT], 0.3, 0.01);
    assert_near(m.ms_per[LATENCY_ACCEPTED], -1.5, 0.01);
    assert_near(m.base_ms, 5, 2);
    assert_true(m.r2 > 0.99 && m.r2 <= 1);
    struct completion_cost s = {.prompt_tokens = 50, .generated_tokens = 100};
    assert_near(latency_model_ms(&m, &s), 210, 2);
    s = (struct completion_cost){.num_accepted_tokens = 1000};
    assert_true(latency_model_ms(&m, &s) == 0); // never negative

    json_t *saved = test_keep(latency_model_to_json(&m));
    assert_ok(latency_model_from_json(saved, &again));
    assert_memory_equal(&m, &again, sizeof m);
    json_array_remove(saved, 3);
    assert_status(latency_model_from_json(saved, &again), ST_FORMAT);
}

// Inputs that never varied, or that always move together, break nothing.
TEST(degenerate_fits)
{
    struct latency_model m = {0};
    struct rng rng;
    struct completion_cost s = {.prompt_tokens = 3, .generated_tokens = 4, .latency_ms = 9};
    latency_model_fit(&m);
    assert_true(latency_model_ms(&m, &s) == 0);
    for (int i = 0; i < 5; i++) latency_model_add(&m, &s);
    latency_model_fit(&m);
    NEAR(latency_model_ms(&m, &s), 9);
    assert_true(m.ms_per[LATENCY_GENERATED] == 0);

    memset(&m, 0, sizeof m);
    rng_init(&rng, 4, 0);
    for (int i = 0; i < 100; i++) { // no speculation
        s = random_sample(&rng, false);
        latency_model_add(&m, &s);
    }
    latency_model_fit(&m);
    assert_true(m.ms_per[LATENCY_DRAFT] == 0 && m.ms_per[LATENCY_ACCEPTED] == 0);
    assert_near(m.ms_per[LATENCY_GENERATED], 2, 1e-3);

    memset(&m, 0, sizeof m);
    for (int i = 0; i < 100; i++) { // every draft accepted, two for each token
        s = (struct completion_cost){.generated_tokens = i,
                                     .num_draft_tokens = 2 * i,
                                     .num_accepted_tokens = 2 * i,
                                     .latency_ms = 3 + 6 * i};
        latency_model_add(&m, &s);
    }
    latency_model_fit(&m);
    assert_true(fabs(latency_model_ms(&m, &s) - s.latency_ms) < 0.01);
    for (int i = 0; i < LATENCY_INPUTS; i++) assert_true(fabs(m.ms_per[i]) < 10);
}

// ---- scoring ------------------------------------------------------------------------------------

struct bench { // a rollout of 2 groups of 3, made by hand
    struct example examples[2];
    const struct example *list[2];
    struct completion samples[6];
    struct rollout rollout;
    struct scoring how; // by whether the text is "1", times 2, and cost
};

LATER(reward_free)
LATER(scores_release)

// Released with the test.
static struct bench *bench(void)
{
    static char *const texts[6] = {"1", "2", "1", "2", "2", "2"};
    struct reward_options options = {.names = "exact", .weights = "2"};
    struct bench *b = test_keep(calloc(1, sizeof *b));
    b->rollout = (struct rollout){
        .n_groups = 2, .n_per_group = 3, .examples = b->list, .completions = b->samples};
    for (int g = 0; g < 2; g++) {
        b->examples[g] = (struct example){.line = g + 5, .answer = "1"};
        b->list[g] = &b->examples[g];
    }
    for (int i = 0; i < 6; i++) {
        b->samples[i].text = texts[i];
        b->samples[i].telemetry =
            telemetry(100 * (i + 1), i + 1, i == 4 ? json_null() : json_real(0.1 * i));
    }
    assert_ok(reward_new(&options, &b->how.reward));
    test_later(b->how.reward, reward_free_later);
    b->how.data = "d.jsonl";
    b->how.cost = true;
    return b;
}

static struct scores *scores_of(const struct bench *b)
{
    struct scores *s = test_keep(calloc(1, sizeof *s));
    assert_ok(scoring_rollout(&b->how, &b->rollout, s));
    return test_later(s, scores_release_later);
}

TEST(formula)
{
    struct bench *b = bench();
    struct scores none = {0};
    b->how.weights = (double[COST_TERMS]){0.001, 0.002, 0.01, 1, 0.5};
    const struct scores *s = scores_of(b);
    assert_int_equal(s->n_undrafted, 1);
    for (int i = 0; i < 6; i++) {
        double task = i == 0 || i == 2 ? 2 : 0, accept = 0.1 * i;
        if (i == 4) accept = (0.3 + 0.5) / 2; // undrafted: the mean of its group
        NEAR(s->rewards[i],
             task - 0.001 * 100 * (i + 1) - 0.002 * (i + 1) - 0.01 * 3 + accept + 0.5 * 0.25);
        NEAR(s->terms[i], task / 2);
        NEAR(s->costs[COST_TOKENS * 6 + i], i + 1);
    }
    b->how.cost = false; // off: telemetry is not even looked at
    json_object_clear(b->samples[4].telemetry);
    s = scores_of(b);
    assert_null(s->costs);
    NEAR(s->rewards[0], 2);
    b->how.cost = true; // and missing telemetry is never a 0
    assert_fails(scoring_rollout(&b->how, &b->rollout, &none), ST_FORMAT,
                 "d.jsonl, line 6, sample 1");
    assert_null(none.rewards);
}

TEST(modelled_latency)
{
    struct bench *b = bench();
    struct latency_model m = {0};
    // 100 ms a token and 1 ms queued; sample 3 was unlucky with its neighbours
    json_object_set_new(b->samples[3].telemetry, "latency_ms", json_real(4000));
    b->how.latency = &m;
    b->how.weights = (double[COST_TERMS]){[COST_LATENCY] = 1};
    const struct scores *s = scores_of(b);
    assert_true(m.n == 6);
    // What the model says depends on tokens alone: equal steps, and not the outlier's
    const double step = s->costs[1] - s->costs[0];
    for (int i = 1; i < 6; i++) assert_near(s->costs[i] - s->costs[i - 1], step, 1e-6);
    assert_true(s->costs[3] < 2000);
}

TEST(normalised_terms)
{
    // Two terms of very different units, (terms, 2 groups of 3); the second group of the first is
    // flat and must add nothing, nor noise.
    const double terms[12] = {1, 0, 1, 0.1, 0.1, 0.1, 5000, 6000, 4000, 10, 20, 30};
    const double weights[2] = {2, -1}, plain[1] = {1};
    double sums[6], mean, std;
    scoring_normalise(terms, weights, 2, 2, 3, sums);
    const double up = 1 / sqrt(3), down = -2 / sqrt(3); // z-scores of 1, 0, 1
    const double wanted[6] = {2 * up - 0, 2 * down - 1, 2 * up + 1, 1, 0, -1};
    for (int i = 0; i < 6; i++) NEAR(sums[i], wanted[i]);
    // The unit does not matter
    double seconds[12], same[6];
    memcpy(seconds, terms, sizeof terms);
    for (int i = 6; i < 12; i++) seconds[i] /= 1000;
    scoring_normalise(seconds, weights, 2, 2, 3, same);
    for (int i = 0; i < 6; i++) NEAR(same[i], sums[i]);
    scoring_normalise(terms + 3, plain, 1, 1, 3, sums);
    assert_true(sums[0] == 0 && sums[1] == 0 && sums[2] == 0);

    struct bench *b = bench();
    b->how.normalise_terms = true;
    b->how.weights = (double[COST_TERMS]){[COST_LATENCY] = 1};
    const struct scores *s = scores_of(b);
    NEAR(s->rewards[1], -200); // as it is, in the log
    double advantages[6];
    for (int i = 0; i < 6; i++) advantages[i] = s->advantages[i];
    mean_std(advantages, 6, &mean, &std);
    assert_near(mean, 0, 1e-6); // over the batch
    assert_near(std, 1, 1e-3);
    // right and fast, wrong, right and slow: the task, weighed 2, is not drowned by milliseconds
    assert_true(s->advantages[0] > s->advantages[2] && s->advantages[2] > s->advantages[1]);
}

// ---- speculative counters -----------------------------------------------------------------------

static const char before_text[] =
    "# HELP vllm:spec_decode_num_drafts_total Drafts.\n"
    "# TYPE vllm:spec_decode_num_drafts_total counter\n"
    "vllm:spec_decode_num_drafts_total{engine=\"0\",model_name=\"m\"} 10\n"
    "vllm:spec_decode_num_drafts_total{engine=\"1\",model_name=\"m\"} 5\n"
    "vllm:spec_decode_num_draft_tokens_total 45\n"
    "vllm:spec_decode_num_accepted_tokens_total 20.0\n"
    "vllm:spec_decode_num_accepted_tokens_per_pos_total{engine=\"0\",position=\"0\"} 12\n"
    "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"1\",engine=\"0\"} 8\n"
    "vllm:spec_decode_num_drafts_created 1.7e9\n"
    "vllm:num_requests_running 3\n";
static const char after_text[] =
    "vllm:spec_decode_num_drafts_total 1.15e+02\n"
    "vllm:spec_decode_num_draft_tokens_total 345 1700000000000\n"
    "vllm:spec_decode_num_accepted_tokens_total 170\n"
    "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"0\"} 92\n"
    "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"1\"} 58\n"
    "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"2\"} 20\n"
    "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"x\"} 20\n"
    "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"99\"} 20\n"
    "vllm:spec_decode_num_drafts_total{broken 4\n"
    "vllm:spec_decode_num_drafts_total";

TEST(counters)
{
    struct spec_counters before, after, step;
    SCOPED(bytes_release) struct bytes line = BYTES_INIT;
    json_t *m = test_keep(json_object());
    spec_counters_parse(before_text, &before);
    spec_counters_parse(after_text, &after);
    assert_true(before.present && after.present);
    NEAR(before.num_drafts, 15);
    assert_int_equal(before.n_positions, 2);
    assert_int_equal(after.n_positions, 3);
    step = spec_counters_between(&before, &after);
    spec_counters_put(&step, m);
    assert_json(m, "{'spec_decode/num_drafts': 100, 'spec_decode/num_draft_tokens': 300,"
                   " 'spec_decode/num_accepted_tokens': 150, 'spec_decode/acceptance_rate': 0.5,"
                   " 'spec_decode/acceptance_length': 2.5,"
                   " 'spec_decode/acceptance_rate_pos_0': 0.8,"
                   " 'spec_decode/acceptance_rate_pos_1': 0.5,"
                   " 'spec_decode/acceptance_rate_pos_2': 0.2,"
                   " 'spec_decode/acceptance_rate_pos_3': null}");
    spec_counters_text(&step, 2, &line);
    assert_string_equal(
        bytes_text(&line),
        "SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 75.00 tokens/s, "
        "Drafted throughput: 150.00 tokens/s, Accepted: 150 tokens, Drafted: 300 tokens, "
        "Per-position acceptance rate: 0.800, 0.500, 0.200, Avg Draft acceptance rate: 50.0%");

    struct spec_counters sum = {0}; // of two daemons
    spec_counters_add(&sum, &step);
    spec_counters_add(&sum, &step);
    NEAR(sum.num_drafts, 200);
    NEAR(spec_acceptance_length(&sum), 2.5);
}

TEST(no_counters)
{
    struct spec_counters none, some, step;
    json_t *m = test_keep(json_object());
    spec_counters_parse("vllm:num_requests_running 3\nnot a metric\n\n", &none);
    assert_false(none.present);
    spec_counters_parse(after_text, &some);
    step = spec_counters_between(&none, &some);
    spec_counters_put(&step, m);
    step = spec_counters_between(&some, &none);
    spec_counters_put(&step, m);
    spec_counters_parse(before_text, &none); // counters that went back: another daemon
    step = spec_counters_between(&some, &none);
    spec_counters_put(&step, m);
    assert_int_equal(json_object_size(m), 0);
    step = spec_counters_between(&some, &some); // present, and nothing drafted
    spec_counters_put(&step, m);
    NEAR(real_of(m, "spec_decode/num_drafts"), 0);
    assert_true(json_is_null(json_object_get(m, "spec_decode/acceptance_length")));
}
