/* test_state_drafts.c: drafts for and by a model that carries a state along each sequence, of
 * either rule (tests/golden/qwen35, nemotron-h-moe): wherever drafts are rejected, preempted or end
 * a sample, what is sampled has the bits of the packed pass, and a draft model drafts from the
 * right state. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/kv_memory.h"
#include "tests/support/engine_bench.h"
#include "tests/support/loaded.h"

enum { REQUESTS = 8, NEW = 56, LONGEST = 112, LONGER = 400, VOCAB_HERE = 200, LEAST = 128 };

static const char *model, *scan, *stateless; // scan has a vocabulary of LEAST

static void set_up(void)
{
    model = lasting_model(test_golden("qwen35"));
    scan = lasting_model(test_golden("nemotron-h-moe"));
    stateless = test_golden("olmo2");
    engine_bench_set_up();
}

// Prompts of several lengths that repeat themselves.
static int fill_prompt(int32_t *prompt, int request)
{
    const int n = 5 + 13 * request % 37;
    for (int i = 0; i < n; i++) prompt[i] = (i % 7 * 29 + 3 + request) % LEAST;
    return n;
}

static struct engine_options options_for(const char *policy, const char *draft)
{
    struct engine_options options = plain_options();
    options.model_folder = policy;
    options.draft_folder = draft;
    options.prefill_chunk = 7;
    options.block_size = 4;
    options.max_context = LONGEST;
    options.kv_bytes = 8 << 20;
    options.speculative_fixed = 1;
    options.speculative.chosen = true;
    options.speculative.k[draft ? SPECULATIVE_DRAFT_MODEL : SPECULATIVE_SUFFIX] = 4;
    return options;
}

// All requests twice, the second time with what the first wrote in memory; ret: of both times.
static void serve_twice(struct bench *b, const char *policy, int longer,
                        struct take *ret[2][REQUESTS])
{
    int32_t prompts[REQUESTS][LONGEST];
    int lengths[REQUESTS];
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < REQUESTS; i++) {
            struct sampling s =
                i % 2 ? random_sampling(NEW + longer, (uint64_t)i) : greedy(NEW + longer);
            s.logprobs = 0;
            s.n = i % 3 + 1;
            lengths[i] = fill_prompt(prompts[i], i);
            ret[round][i] = submit_ids(b, prompts[i], lengths[i], &s);
        }
        for (int i = 0; i < REQUESTS; i++) await_done(b, ret[round][i]);
    }
    struct reference *r = reference_of(policy);
    for (int i = 0; i < REQUESTS; i++)
        for (int k = 0; k < i % 3 + 1; k++)
            for (int round = 0; round < 2; round++)
                assert_as_packed(r, prompts[i], lengths[i], ret[round][i], k);
}

// Drafts of earlier texts: most are accepted the second time, and some never.
static void serve_drafted(const char *served, int64_t kv_bytes, bool preempts)
{
    struct bench b;
    const int longer = preempts ? LONGER : 0; // some do not find room for their blocks
    struct engine_options options = options_for(served, NULL);
    struct take *takes[2][REQUESTS];
    options.max_context = longer + LONGEST;
    options.kv_bytes = kv_bytes;
    bench_start(&b, &options);
    serve_twice(&b, served, longer, takes);
    const struct engine_stats stats = idle_stats(&b);
    assert_true((stats.preemptions > 0) == preempts);
    assert_true(stats.drafts.num_accepted_tokens > REQUESTS * NEW / 4);
    assert_true(stats.drafts.num_draft_tokens > stats.drafts.num_accepted_tokens + NEW);
    assert_int_equal(stats.kv_blocks_used, 0);
    for (int i = 0; i < REQUESTS; i++)
        for (int k = 0; k < i % 3 + 1; k++) assert_same_records(takes[0][i], k, takes[1][i], k);
    bench_end(&b);
}

TEST(drafted_as_packed)
{
    serve_drafted(model, 8 << 20, false);
    serve_drafted(scan, 8 << 20, false);
}

TEST(drafted_as_packed_when_preempted)
{
    serve_drafted(longer_model(model), 540000, true);
}

// A model that drafts for itself, with the policy's noise, is never wrong.
TEST(a_twin_is_always_accepted)
{
    for (int i = 0; i < 2; i++) {
        const char *both = i ? scan : model;
        struct engine_options options = options_for(both, both);
        struct take *takes[2][REQUESTS];
        options.exact = true;
        struct bench *b = bench_of(&options);
        serve_twice(b, both, 0, takes);
        const struct engine_stats stats = idle_stats(b);
        assert_true(stats.drafts.num_draft_tokens > REQUESTS * NEW);
        assert_int_equal(stats.drafts.num_accepted_tokens, stats.drafts.num_draft_tokens);
    }
}

static int likeliest(const float *logits)
{
    int best = 0;
    for (int i = 1; i < VOCAB_HERE; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

// Of a penalty the twin knows nothing: its drafts are rejected where that changes the likeliest
// token, and nowhere else, so behind each rejection it goes on from the right state.
TEST(a_twin_is_rejected_only_where_it_must_be)
{
    struct engine_options options = options_for(model, model);
    int32_t ids[LONGEST];
    float *logits = test_keep(malloc(LONGEST * VOCAB_HERE * sizeof *logits));
    assert_non_null(logits);
    struct bench *b = bench_of(&options);
    struct reference *r = reference_of(model);
    const int n_prompt = fill_prompt(ids, 3);
    struct sampling s = greedy(NEW);
    s.presence_penalty = 1;
    struct take *take = run_ids(b, ids, n_prompt, &s);
    const struct token_record *tokens = take->sample[0].tokens;
    for (int i = 0; i < NEW; i++) ids[n_prompt + i] = tokens[i].token;
    reference_logits(r, ids, n_prompt + NEW, logits);
    int n_rejected = 0, n_behind = 0; // drafts accepted behind the first rejection
    for (int i = 0; i < NEW; i++) {
        int n = 0;
        while (i + n < NEW && tokens[i + n].accepted_at > 0) n++;
        n_behind += n_rejected > 0 ? n : 0;
        if (tokens[i].drafted > n && i + n < NEW) {
            const int at = n_prompt + i + n;
            assert_int_not_equal(likeliest(logits + (at - 1) * VOCAB_HERE), ids[at]);
            n_rejected++;
        }
        i += n;
    }
    printf("%d rejected, %d accepted behind the first\n", n_rejected, n_behind);
    assert_true(n_rejected > 0 && n_behind > 0);
}

// Either of the two may have states and the other none.
TEST(one_of_two_has_states)
{
    for (int i = 0; i < 2; i++) {
        struct engine_options options = options_for(i ? model : stateless, i ? stateless : model);
        struct take *takes[2][REQUESTS];
        options.exact = true;
        struct bench *b = bench_of(&options);
        serve_twice(b, options.model_folder, 0, takes);
        const struct engine_stats stats = idle_stats(b);
        assert_true(stats.drafts.num_draft_tokens > 0);
        assert_true(stats.cache_hits > 0);
    }
}

// Sequences have most of the states; and what an error asks for is enough.
TEST(memory_is_planned)
{
    const json_t *cases = test_rows("state_drafts", "memory_is_planned");
    struct kv_request request = {
        .max_batch = 8, .block_size = 1, .max_context = 30, .block_bytes = 10, .state_bytes = 100};
    struct kv_plan plan;
    struct device *dev = test_cpu();
    for (size_t i = 0; i < json_array_size(cases); i++) {
        request.bytes = row_int(cases, i, "bytes");
        request.keeps = json_object_get(json_array_get(cases, i), "kept");
        assert_ok(kv_memory_plan(dev, &request, &plan));
        assert_int_equal(plan.max_batch, row_int(cases, i, "batch"));
        assert_int_equal(plan.n_kept, request.keeps ? row_int(cases, i, "kept") : 0);
    }
    request.keeps = false;
    request.context_is_firm = true;
    for (int batch = 1; batch <= 8; batch += 7) {
        request.max_batch = batch;
        request.bytes = 250;
        assert_status(kv_memory_plan(dev, &request, &plan), ST_INVALID);
        request.bytes = batch == 1 ? 400 : 600;
        char words[64];
        snprintf(words, sizeof words, "give --kv-memory %lld or more", (long long)request.bytes);
        assert_message(words);
        assert_ok(kv_memory_plan(dev, &request, &plan));
    }
}

TESTS_BETWEEN(set_up, NULL)
