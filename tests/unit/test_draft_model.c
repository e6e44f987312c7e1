/* test_draft_model.c: the draft model by itself, on the CPU: what it computes of samples that it
 * has fallen behind on. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/loaded.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "infer-server/engine/draft_model.h"
#include "infer-server/engine/engine.h"
#include "infer-server/speculative/step_cost.h"

enum { SAMPLES = 4, BLOCK = 4, CHUNK = 8, PROMPT = 12, CONTEXT = 64, BLOCKS = 5 };

static struct loaded model;

static void open_model(void)
{
    const char *folder = test_path(test_folder(), "model");
    assert_ok(tiny_model_write(folder, 32, 2, 64, 3));
    assert_ok(loaded_open(folder, DT_F32, &model));
}

static void close_model(void)
{
    loaded_close(&model);
}

static struct draft_model *new_draft_model(int chunk, struct runner **ret_runner)
{
    const struct draft_model_limits limits = {
        .max_batch = SAMPLES, .prefill_chunk = chunk, .max_drafts = SAMPLES * 2};
    const struct runner_limits own =
        draft_model_runner_limits(&limits, model.config, CONTEXT, BLOCK);
    struct draft_model *d = NULL;
    assert_ok(runner_new(model.dev, model.weights, &own, ret_runner));
    assert_ok(draft_model_new(*ret_runner, NULL, &limits, &d));
    assert_ok(draft_model_allocate_kv(d, SAMPLES * BLOCKS, SAMPLES));
    return d;
}

// A sample that decodes, with blocks of its own; the draft model has `computed` of its tokens.
static struct request *new_sample(int number, int computed)
{
    const struct sampling sampling = {.n = 1, .max_tokens = 8, .top_p = 1, .logprobs = -1};
    int32_t prompt[PROMPT];
    struct request *r = NULL;
    for (int i = 0; i < PROMPT; i++) prompt[i] = 1 + number * PROMPT + i;
    assert_ok(request_new(prompt, PROMPT, &sampling, NULL, &r));
    assert_ok(request_prepare(r, BLOCK, 0));
    struct sample *s = &r->samples[0];
    s->blocks.n = BLOCKS;
    for (int i = 0; i < BLOCKS; i++) s->blocks.at[i] = number * BLOCKS + i;
    sample_append(s, 60);
    s->kv[RUNNER_POLICY].computed = PROMPT;
    s->kv[RUNNER_DRAFT].computed = computed;
    return r;
}

// Samples two drafts for each of n, as often as it takes; returns how often. Tokens that were
// computed in passes that do nothing else are added to *ret_caught_up.
static int sample_all(struct draft_model *d, struct request *const *requests, int n,
                      int32_t (*ret)[2], int *ret_caught_up)
{
    struct step_cost passes = {0};
    int rounds = 0;
    *ret_caught_up = 0;
    for (bool all = false; !all; rounds++) {
        struct sample *samples[SAMPLES];
        struct step_report report = {.warm = true};
        assert_true(rounds < 10);
        for (int i = 0; i < n; i++) {
            samples[i] = &requests[i]->samples[0];
            samples[i]->draft.method = SPECULATIVE_DRAFT_MODEL;
            samples[i]->draft.n_verify = 2;
        }
        assert_ok(draft_model_sample(d, samples, n, &passes, &report));
        all = true;
        for (int i = 0; i < n; i++) {
            all &= samples[i]->draft.n_verify == 2;
            for (int k = 0; k < 2; k++) ret[i][k] = samples[i]->draft.tokens[k];
            draft_model_truncate(d, samples[i], PROMPT);
        }
        assert_true(report.draft_ms + report.catch_up_ms > 0);
        *ret_caught_up += report.n_caught_up;
    }
    return rounds;
}

// Three samples with all their past to compute leave no room for one another, but for the fourth,
// which has one row to add; and what is computed in several passes gives the same drafts.
TEST(catches_up_as_far_as_there_is_room)
{
    int32_t drafts[2][SAMPLES][2];
    for (int small = 0; small < 2; small++) {
        struct runner *runner = NULL;
        struct draft_model *d = new_draft_model(small ? CHUNK : SAMPLES * CONTEXT, &runner);
        struct request *requests[SAMPLES];
        for (int i = 0; i < SAMPLES; i++) requests[i] = new_sample(i, 0);
        int32_t unused[1][2];
        int caught_up;
        if (small) sample_all(d, &requests[SAMPLES - 1], 1, unused, &caught_up); // it has kept up
        const int rounds = sample_all(d, requests, SAMPLES, drafts[small], &caught_up);
        printf("chunks of %d: %d rounds\n", small ? CHUNK : SAMPLES * CONTEXT, rounds);
        assert_true(small ? rounds >= 3 * (PROMPT + 1) / CHUNK : rounds == 1);
        for (int i = 0; i < SAMPLES; i++) request_free(requests[i]);
        draft_model_free(d);
        runner_free(runner);
    }
    assert_memory_equal(drafts[0], drafts[1], sizeof drafts[0]);
}

// What a sample has accepted since is computed by rows of the first pass, which stays a decode
// step, with the same drafts, as far as there are rows for it.
TEST(a_few_tokens_ride_in_the_first_pass)
{
    struct runner *runner = NULL;
    struct draft_model *d = new_draft_model(CHUNK, &runner);
    struct request *requests[SAMPLES];
    int32_t expected[SAMPLES][2], drafts[SAMPLES][2];
    int caught_up;
    for (int i = 0; i < SAMPLES; i++) requests[i] = new_sample(i, 0);
    sample_all(d, requests, SAMPLES, expected, &caught_up);
    for (int lag = 0; lag <= 3; lag++) {
        for (int i = 0; i < SAMPLES; i++)
            requests[i]->samples[0].kv[RUNNER_DRAFT].computed = PROMPT - lag;
        const int rounds = sample_all(d, requests, SAMPLES, drafts, &caught_up);
        printf("%d tokens: %d caught up in %d rounds\n", lag, caught_up, rounds);
        assert_memory_equal(drafts, expected, sizeof drafts);
        // of 2 SAMPLES rows
        if (lag <= 2) assert_int_equal(caught_up, 0);
        if (lag == 3) assert_true(caught_up > 0);
    }
    for (int i = 0; i < SAMPLES; i++) request_free(requests[i]);
    draft_model_free(d);
    runner_free(runner);
}

TESTS_BETWEEN(open_model, close_model)
