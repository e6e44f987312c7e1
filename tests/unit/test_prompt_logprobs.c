/* test_prompt_logprobs.c: the engine on the CPU with tiny random models: log-probabilities of
 * prompts, and what penalties and biases do to sampling, both held to the bit against the model run
 * by itself over the whole sequence. With chunks, groups, the prefix cache, preemption, drafts and
 * new weights in the way. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/engine_bench.h"
#include "tests/support/tiny_model.h"

static struct reference of_a, of_b; // model_a, model_b

// ---- requests ----------------------------------------------------------------------------------

static struct engine_options small_options(void)
{
    struct engine_options options = plain_options();
    options.max_batch = 8;
    return options;
}

// Those of n-grams, as many as that.
static struct engine_options drafting(int n)
{
    struct engine_options options = small_options();
    options.speculative = (struct speculative_choice){.chosen = true, .k[SPECULATIVE_NGRAM] = n};
    options.speculative_fixed = true;
    return options;
}

static struct bench *small_bench(void)
{
    const struct engine_options options = small_options();
    return bench_of(&options);
}

static struct sampling plain_sampling(int max_tokens, float temperature)
{
    struct sampling s = random_sampling(max_tokens, 11);
    s.temperature = temperature;
    return s;
}

// ---- what the model says by itself -------------------------------------------------------------

// logprob[i] of ids[i] given those before it, i from 1 on, by the operation that trains.
static void reference_logprobs(struct reference *r, const int32_t *ids, int n, float temperature,
                               float *ret)
{
    static float logits[MAX_TOKENS * VOCAB], lse[MAX_TOKENS];
    reference_logits(r, ids, n, logits);
    const struct head_args head = {logits, ids + 1, n - 1, VOCAB, temperature};
    device_ops(r->dev)->logprob(r->dev, ret + 1, lse, NULL, &head);
}

static void assert_prompt_is(const struct take *take, const int32_t *prompt, int from, int to,
                             struct reference *r, float temperature)
{
    static float want[MAX_TOKENS];
    reference_logprobs(r, prompt, take->n_prompt, temperature, want);
    for (int i = from; i < to; i++)
        if (memcmp(&want[i], &take->prompt[i].logprob, sizeof *want) != 0)
            fail_msg("token %d of %d: %.9g, want %.9g", i, take->n_prompt, take->prompt[i].logprob,
                     want[i]);
}

// ---- prompts -----------------------------------------------------------------------------------

// Prompts of several lengths, one token among them, over chunks that end anywhere.
TEST(prompts_are_scored_as_they_are_trained)
{
    static const int lengths[] = {1, 2, 4, 5, 63, 64, 65, 200};
    enum { N = sizeof lengths / sizeof *lengths };
    struct engine_options options = small_options();
    options.prefill_chunk = 24;
    struct take *takes[N];
    int32_t prompts[N][MAX_TOKENS];
    struct bench *b = bench_of(&options);
    for (int i = 0; i < N; i++) {
        struct sampling s = plain_sampling(3, i % 2 ? 0.7f : 0);
        s.prompt_logprobs = true;
        s.prompt_top = i % 3;
        make_prompt(prompts[i], lengths[i], (uint64_t)i);
        takes[i] = submit_ids(b, prompts[i], lengths[i], &s);
    }
    for (int i = 0; i < N; i++) {
        await_done(b, takes[i]);
        assert_int_equal(takes[i]->times_told, 1);
        assert_int_equal(takes[i]->sample[0].n, 3);
        assert_prompt_is(takes[i], prompts[i], 1, lengths[i], &of_a, i % 2 ? 0.7f : 1);
        for (int t = 1; t < lengths[i] && i % 3 > 0; t++) {
            const struct prompt_token *own = &takes[i]->prompt[t];
            const struct top_logprob *top = takes[i]->prompt_top[t];
            assert_true((own->rank == 1) == (top[0].token == prompts[i][t]));
            assert_true(top[0].logprob >= own->logprob);
            if (own->rank == 1) assert_memory_equal(&top[0].logprob, &own->logprob, sizeof(float));
        }
    }
}

// A completion, sent again as a prompt, has the numbers it was sampled with.
TEST(sampling_and_scoring_agree)
{
    int32_t ids[MAX_TOKENS];
    struct bench *b = small_bench();
    struct sampling s = plain_sampling(60, 0.7f);
    make_prompt(ids, 40, 3);
    struct take *sampled = run_ids(b, ids, 40, &s);
    for (int i = 0; i < 60; i++) ids[40 + i] = sampled->sample[0].tokens[i].token;
    s.max_tokens = 0;
    s.prompt_logprobs = true;
    struct take *scored = run_ids(b, ids, 100, &s);
    for (int i = 0; i < 60; i++)
        assert_memory_equal(&scored->prompt[40 + i].logprob, &sampled->sample[0].tokens[i].logprob,
                            sizeof(float));
}

TEST(nothing_is_sampled_for_max_tokens_0)
{
    int32_t prompt[MAX_TOKENS];
    struct bench *b = small_bench();
    struct sampling s = plain_sampling(0, 1);
    s.n = 3;
    make_prompt(prompt, 512, 4); // the whole context
    struct take *take = run_ids(b, prompt, 512, &s);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(take->sample[i].n, 0);
        assert_int_equal(take->sample[i].finish, FINISH_LENGTH);
        assert_int_equal(take->sample[i].telemetry.generated_tokens, 0);
        assert_true(take->sample[i].telemetry.weight_version_last >= 2);
    }
    assert_int_equal(take->times_told, 0); // nobody asked
    assert_int_equal(idle_stats(b).prompt_tokens, 512);
}

// Cached blocks have no logits: who wants some computes the prompt, and leaves it to the next.
TEST(cache_is_passed_over)
{
    int32_t prompt[MAX_TOKENS];
    struct bench *b = small_bench();
    make_prompt(prompt, 100, 5);
    for (int round = 0; round < 3; round++) {
        struct sampling s = plain_sampling(2, 1);
        s.prompt_logprobs = round == 1;
        struct take *take = run_ids(b, prompt, 100, &s);
        assert_int_equal(take->sample[0].telemetry.cached_prompt_tokens, round == 2 ? 96 : 0);
        if (round == 1) assert_prompt_is(take, prompt, 1, 100, &of_a, 1);
    }
}

// Groups, too little room, and drafts: every prompt is told once, and right.
TEST(crowds_are_scored_once)
{
    enum { N = 6 };
    struct engine_options options = drafting(4);
    struct take *takes[N];
    int32_t prompts[N][MAX_TOKENS];
    options.prefill_chunk = 16;
    options.max_context = 200;
    options.kv_bytes = 160 << 10;
    struct bench *b = bench_of(&options);
    for (int i = 0; i < N; i++) {
        struct sampling s = plain_sampling(60, 1);
        s.n = 1 + i % 4;
        s.prompt_logprobs = true;
        s.seed = (uint64_t)i;
        make_prompt(prompts[i], 30 + 17 * i, (uint64_t)i);
        takes[i] = submit_ids(b, prompts[i], 30 + 17 * i, &s);
    }
    for (int i = 0; i < N; i++) {
        await_done(b, takes[i]);
        assert_int_equal(takes[i]->times_told, 1);
        assert_prompt_is(takes[i], prompts[i], 1, 30 + 17 * i, &of_a, 1);
    }
    assert_true(idle_stats(b).preemptions > 0);
}

// New weights in the middle of a prompt: each token says which version its number is of, and where
// the prompt is computed again from its start, each is that version's to the bit.
TEST(versions_are_told_apart)
{
    struct engine_options options = small_options();
    int32_t prompt[MAX_TOKENS], other[8];
    options.prefill_chunk = 8;
    options.kv_policy = KV_RECOMPUTE;
    struct bench *b = bench_of(&options);
    struct sampling s = plain_sampling(200, 1);
    make_prompt(other, 8, 7);
    make_prompt(prompt, 400, 8);
    assert_ok(engine_pause(b->engine, WAIT_MS));
    struct take *beside = submit_ids(b, other, 8, &s); // one token a step
    beside->reload_at = 20;
    s.max_tokens = 1;
    s.prompt_logprobs = true;
    struct take *take = submit_ids(b, prompt, 400, &s); // 50 steps
    assert_ok(engine_resume(b->engine));
    await_done(b, take);
    await_done(b, beside);
    int border = 1;
    while (border < 400 && take->prompt[border].weight_version == 2) border++;
    assert_true(border > 50 && border < 300);
    for (int i = border; i < 400; i++) assert_int_equal(take->prompt[i].weight_version, 4);
    assert_prompt_is(take, prompt, 1, border, &of_a, 1);
    assert_prompt_is(take, prompt, border, 400, &of_b, 1);
}

// ---- sampled tokens and the likeliest ones -----------------------------------------------------

TEST(one_number_for_one_token)
{
    int32_t prompt[MAX_TOKENS];
    struct bench *b = small_bench();
    make_prompt(prompt, 20, 9);
    for (int hot = 0; hot < 2; hot++) {
        struct sampling s = plain_sampling(300, hot ? 0.4f : 0);
        s.logprobs = MAX_TOP;
        struct take *take = run_ids(b, prompt, 20, &s);
        int found = 0;
        for (int t = 0; t < 300; t++)
            for (int i = 0; i < (hot ? MAX_TOP : 1); i++) {
                const struct top_logprob *top = &take->sample[0].top[t][i];
                const struct token_record *token = &take->sample[0].tokens[t];
                if (hot && top->token != token->token) continue;
                assert_int_equal(top->token, token->token);
                assert_memory_equal(&top->logprob, &token->logprob, sizeof(float));
                found++;
            }
        assert_true(found == 300 || (hot && found > 50));
    }
}

// ---- penalties ---------------------------------------------------------------------------------

static const struct token_bias biases[] = {{5, 3.5f}, {17, -100}, {300, 2}};

static const struct sampling penalties[] = {
    {.presence_penalty = 1.5f},
    {.frequency_penalty = 0.7f},
    {.repetition_penalty = 1.4f},
    {.logit_bias = biases, .n_logit_bias = 3},
    {.presence_penalty = -1.2f, .frequency_penalty = -0.4f}, // says the same again
    {.presence_penalty = -0.5f,
     .frequency_penalty = 0.1f,
     .repetition_penalty = 0.9f,
     .logit_bias = biases,
     .n_logit_bias = 3},
};
enum { N_PENALTIES = sizeof penalties / sizeof *penalties };

static struct sampling penalised(int which, int max_tokens, float temperature)
{
    struct sampling s = plain_sampling(max_tokens, temperature);
    s.presence_penalty = penalties[which].presence_penalty;
    s.frequency_penalty = penalties[which].frequency_penalty;
    s.repetition_penalty = penalties[which].repetition_penalty;
    s.logit_bias = penalties[which].logit_bias;
    s.n_logit_bias = penalties[which].n_logit_bias;
    return s;
}

// The row after everything that came before it, in vLLM's order.
static void adjust_row(float *row, const struct sampling *s, const int32_t *ids, int n_prompt,
                       int n)
{
    int count[VOCAB] = {0};
    bool seen[VOCAB] = {0};
    for (int i = 0; i < n; i++) seen[ids[i]] = true;
    for (int i = n_prompt; i < n; i++) count[ids[i]]++;
    for (int i = 0; i < s->n_logit_bias; i++) row[s->logit_bias[i].token] += s->logit_bias[i].bias;
    for (int t = 0; t < VOCAB; t++) {
        const float r = s->repetition_penalty;
        if (r != 0 && seen[t]) row[t] = row[t] > 0 ? row[t] / r : row[t] * r;
        row[t] -= s->frequency_penalty * (float)count[t];
        if (count[t]) row[t] -= s->presence_penalty;
    }
}

// Every greedy token is the likeliest of the adjusted row; its numbers are of the rows before and
// after.
static void check_penalised(const struct sampling *s, const int32_t *prompt, int n_prompt,
                            const struct take *take, int sample)
{
    static float logits[MAX_TOKENS * VOCAB], raw[MAX_TOKENS];
    int32_t ids[MAX_TOKENS];
    const int n = take->sample[sample].n;
    memcpy(ids, prompt, (size_t)n_prompt * sizeof *ids);
    for (int i = 0; i < n; i++) ids[n_prompt + i] = take->sample[sample].tokens[i].token;
    reference_logprobs(&of_a, ids, n_prompt + n, s->temperature > 0 ? s->temperature : 1, raw);
    reference_logits(&of_a, ids, n_prompt + n, logits);
    for (int i = 0; i < n; i++) {
        const struct token_record *token = &take->sample[sample].tokens[i];
        float *row = logits + (size_t)(n_prompt + i - 1) * VOCAB, lse, processed;
        adjust_row(row, s, ids, n_prompt, n_prompt + i);
        for (int t = 0; t < VOCAB && s->temperature == 0; t++)
            if (row[t] > row[token->token] + 1e-5f)
                fail_msg("token %d is %d, and %d is likelier", i, token->token, t);
        const struct head_args head = {row, &token->token, 1, VOCAB,
                                       s->temperature > 0 ? s->temperature : 1};
        device_ops(of_a.dev)->logprob(of_a.dev, &processed, &lse, NULL, &head);
        assert_memory_equal(&raw[n_prompt + i], &token->logprob, sizeof(float));
        assert_true(fabsf(processed - token->processed_logprob) < 1e-4f);
    }
}

static void run_penalised(const struct engine_options *options, float temperature,
                          const int32_t *prompt, int n_prompt, struct take *ret[N_PENALTIES])
{
    struct bench *b = bench_of(options);
    for (int i = 0; i < N_PENALTIES; i++) {
        struct sampling s = penalised(i, 100, temperature);
        s.n = 2;
        ret[i] = submit_ids(b, prompt, n_prompt, &s);
    }
    for (int i = 0; i < N_PENALTIES; i++) await_done(b, ret[i]);
}

static void assert_same(struct take *const a[N_PENALTIES], struct take *const b[N_PENALTIES],
                        int *ret_accepted)
{
    *ret_accepted = 0;
    for (int i = 0; i < N_PENALTIES; i++)
        for (int k = 0; k < 2; k++) {
            *ret_accepted += b[i]->sample[k].telemetry.drafts.num_accepted_tokens;
            assert_same_records(a[i], k, b[i], k);
        }
}

// Greedy and sampled; alone, and with drafts, whose rows count the drafts before them: to the bit.
TEST(penalties_with_and_without_drafts)
{
    int32_t prompt[24];
    make_prompt(prompt, 24, 10);
    for (int i = 12; i < 24; i++) prompt[i] = prompt[i - 12];
    for (int hot = 0; hot < 2; hot++) {
        struct take *alone[N_PENALTIES], *drafted[N_PENALTIES];
        struct engine_options options = small_options();
        int accepted;
        run_penalised(&options, hot ? 0.8f : 0, prompt, 24, alone);
        options = drafting(5);
        run_penalised(&options, hot ? 0.8f : 0, prompt, 24, drafted);
        assert_same(alone, drafted, &accepted);
        assert_true(accepted > (hot ? 20 : 100));
        for (int i = 0; i < N_PENALTIES; i++) {
            const struct sampling s = penalised(i, 100, hot ? 0.8f : 0);
            check_penalised(&s, prompt, 24, alone[i], 1);
        }
    }
}

// A draft model knows of no penalties; with --exact its drafts still change nothing.
TEST(penalties_with_a_draft_model)
{
    struct take *alone[N_PENALTIES], *drafted[N_PENALTIES];
    struct engine_options options = small_options();
    int32_t prompt[24];
    int accepted;
    make_prompt(prompt, 24, 13);
    run_penalised(&options, 0.8f, prompt, 24, alone);
    options = small_options();
    options.exact = true;
    options.draft_folder = model_a;
    options.speculative = (struct speculative_choice){.chosen = true};
    options.speculative.k[SPECULATIVE_DRAFT_MODEL] = 3;
    run_penalised(&options, 0.8f, prompt, 24, drafted);
    assert_same(alone, drafted, &accepted);
    assert_true(accepted > 100);
}

// A neighbour's penalties are none of a request's business.
TEST(neighbours_keep_their_bits)
{
    struct engine_options options = small_options();
    struct take *plain[2];
    int32_t prompt[24];
    make_prompt(prompt, 24, 12);
    for (int crowded = 0; crowded < 2; crowded++) {
        struct take *others[N_PENALTIES];
        options.bridge_path = small_options().bridge_path;
        struct bench *b = bench_of(&options);
        assert_ok(engine_pause(b->engine, WAIT_MS));
        struct sampling s = plain_sampling(80, 1);
        for (int i = 0; i < N_PENALTIES && crowded; i++) {
            struct sampling of_other = penalised(i, 80, 1);
            of_other.logprobs = i % 3;
            others[i] = submit_ids(b, prompt, 24, &of_other);
        }
        plain[crowded] = submit_ids(b, prompt, 24, &s);
        assert_ok(engine_resume(b->engine));
        await_done(b, plain[crowded]);
        for (int i = 0; i < N_PENALTIES && crowded; i++) await_done(b, others[i]);
    }
    assert_same_records(plain[0], 0, plain[1], 0);
}

TEST(refusals)
{
    static const struct token_bias outside = {VOCAB, 1}, endless = {1, INFINITY};
    static const struct {
        struct sampling s;
        const char *part;
    } cases[] = {
        {{.repetition_penalty = -1}, "repetition_penalty is -1"},
        {{.presence_penalty = NAN}, "presence_penalty"},
        {{.logit_bias = &outside, .n_logit_bias = 1}, "logit_bias: token"},
        {{.logit_bias = &endless, .n_logit_bias = 1}, "finite"},
        {{.prompt_logprobs = true, .prompt_top = 129}, "prompt_logprobs is 129"},
    };
    struct bench *b = small_bench();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct sampling s = cases[i].s;
        s.n = s.max_tokens = 1;
        s.temperature = s.top_p = 1;
        assert_refused(b, (const int32_t[]){1, 2, 3}, 3, &s, ST_INVALID, cases[i].part);
    }
}

static void make_models(void)
{
    folder = test_folder();
    model_a = test_path(folder, "a");
    model_b = test_path(folder, "b");
    assert_ok(tiny_model_write(model_a, 64, 2, VOCAB, 1));
    assert_ok(tiny_model_write(model_b, 64, 2, VOCAB, 2));
    reference_open(model_a, "cpu", &of_a);
    reference_open(model_b, "cpu", &of_b);
}

static void close_models(void)
{
    reference_close(&of_a);
    reference_close(&of_b);
}

TESTS_BETWEEN(make_models, close_models)
