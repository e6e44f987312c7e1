/* test_served_with.c: every model of tests/golden, served with a LoRA adapter, and writing together
 * with a frozen model (itself, without the adapter): prompts in chunks, a pool too small for all,
 * drafts. The log-probability of each token is that of its author's packed pass, to the bit. The
 * adapter is a folder that was saved and read again. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/adapter.h"
#include "infer-server/weights/adapters.h"
#include "infer-server/engine/kv_memory.h"
#include "tests/support/engine_bench.h"
#include "tests/support/tiny_adapter.h"

enum { REQUESTS = 8, PROMPT = 21, NEW = 15, BLOCKS = 26, BLOCK_TOKENS = 4 };
#define ADAPTER "{\"r\":2,\"lora_alpha\":0.2,\"target_modules\":\"all-linear\"}"

static int64_t all_drafted; // of all folders

// Request i: whether the adapter samples, and whether with the frozen model.
static bool is_adapted(int i)
{
    return i % 2 == 0;
}
static bool is_tandem(int i)
{
    return i % 4 >= 2;
}

static void start(struct bench *b, const char *model, const char *adapter,
                  const struct model_config *config)
{
    struct engine_options options = plain_options();
    const struct adapter_request order = {.name = "a", .folder = adapter};
    options.model_folder = options.frozen_folder = model;
    options.quantization = config->quantization;
    options.kv_cache = config->kv_cache;
    options.max_adapters = 1;
    options.max_lora_rank = 4;
    options.block_size = BLOCK_TOKENS;
    options.max_context = BLOCKS * BLOCK_TOKENS;
    options.prefill_chunk = 5;
    options.speculative_fixed = 1;
    options.speculative = (struct speculative_choice){.chosen = true, .k[SPECULATIVE_NGRAM] = 3};
    // For both models; states take half of it at most.
    const int64_t blocks = 2 * BLOCKS * kv_memory_block_bytes(config, DT_F32, BLOCK_TOKENS),
                  states = 2 * 16 * kv_memory_state_bytes(config);
    options.kv_bytes = blocks + (states > 0 && states < blocks ? blocks : states);
    bench_start(b, &options);
    assert_ok(engine_load_adapter(b->engine, &order, on_command, b));
    await_command(b);
    if (b->command_status != ST_OK) fail_msg("%s", b->message);
}

static struct take *submit_one(struct bench *b, const int32_t *prompt, int i)
{
    struct sampling s = random_sampling(NEW, (uint64_t)i);
    s.logprobs = 0;
    if (is_adapted(i)) assert_true(engine_find_adapter(b->engine, "a", &s.adapter));
    if (is_tandem(i))
        s.tandem =
            (struct tandem_choice){.on = true, .selector = TANDEM_CHUNK, .p = 0.5, .chunk = 3};
    return submit_ids(b, prompt, PROMPT, &s);
}

// Each token as its author has it: the policy with the adapter or without, or the frozen model,
// whose weights are never quantised. Returns the tokens of that.
static int check(struct reference *r, struct reference *f, const int32_t *prompt,
                 const struct take *take, int i)
{
    float plain[MAX_TOKENS], adapted[MAX_TOKENS], frozen[MAX_TOKENS];
    int n_frozen = 0;
    assert_int_equal(take->sample[0].n, NEW);
    r->adapter = -1;
    packed_logprobs(r, prompt, PROMPT, take, 0, plain);
    packed_logprobs(f, prompt, PROMPT, take, 0, frozen);
    r->adapter = 0;
    packed_logprobs(r, prompt, PROMPT, take, 0, adapted);
    assert_memory_not_equal(plain, adapted, NEW * sizeof *plain);
    for (int t = 0; t < NEW; t++) {
        const struct token_record *token = &take->sample[0].tokens[t];
        assert_same_logprob(token,
                            token->frozen   ? frozen[t]
                            : is_adapted(i) ? adapted[t]
                                            : plain[t],
                            t);
        n_frozen += token->frozen;
    }
    return n_frozen;
}

static void use_adapter(struct reference *r, const char *saved, struct adapter **ret,
                        struct adapter_table **ret_table)
{
    *ret = tiny_adapter_new(r->dev, r->weights, ADAPTER);
    assert_ok(adapter_load(*ret, r->dev, saved));
    assert_ok(adapter_table_new(r->dev, r->weights, 1, (*ret)->max_rank, ret_table));
    assert_ok(adapter_table_set(*ret_table, 0, *ret));
    r->model->adapters = *ret_table;
}

static void serve_as(const char *model, enum quantization quantization, enum kv_cache kv_cache)
{
    const char *saved = test_folder();
    struct bench b;
    SCOPED(reference_close) struct reference r, f;
    struct adapter *adapter;
    struct adapter_table *table;
    int32_t prompts[REQUESTS][PROMPT];
    struct take *takes[REQUESTS];
    int n_frozen = 0, n_tandem = 0;
    assert_ok(tiny_adapter_write(saved, model, ADAPTER, 5));
    reference_open_as(model, "cpu", quantization, &r);
    reference_open(model, "cpu", &f);
    r.config->kv_cache = f.config->kv_cache = kv_cache;
    start(&b, model, saved, r.config);
    for (int i = 0; i < REQUESTS; i++) {
        for (int k = 0; k < PROMPT; k++)
            prompts[i][k] = (k % 5 * 31 + 7 + i / 4 * 17) % r.config->vocab_size;
        takes[i] = submit_one(&b, prompts[i], i);
    }
    for (int i = 0; i < REQUESTS; i++) await_done(&b, takes[i]);
    all_drafted += idle_stats(&b).drafts.num_draft_tokens;
    bench_end(&b);
    use_adapter(&r, saved, &adapter, &table);
    for (int i = 0; i < REQUESTS; i++) {
        n_tandem += is_tandem(i) ? NEW : 0;
        n_frozen += check(&r, &f, prompts[i], takes[i], i);
    }
    assert_true(n_frozen > 0 && n_frozen < n_tandem);
    adapter_table_free(table);
    adapter_free(adapter);
}

static void serve(const char *model)
{
    serve_as(model, QUANTIZATION_NONE, KV_CACHE_AUTO);
}

static void serve_in_e4m3(const char *model)
{
    serve_as(model, QUANTIZATION_FP8_WEIGHTS, KV_CACHE_AUTO);
}

static void serve_all_in_e4m3(const char *model)
{
    serve_as(model, QUANTIZATION_FP8_WEIGHTS, KV_CACHE_FP8);
}

static void serve_rounded(const char *model)
{
    serve_as(model, QUANTIZATION_FP8, KV_CACHE_AUTO);
}

TEST(every_model)
{
    for_each_golden(serve);
    assert_true(all_drafted > 0);
}

TEST(every_model_in_e4m3)
{
    for_each_golden(serve_in_e4m3);
}

TEST(every_model_in_e4m3_rows_too)
{
    for_each_golden(serve_rounded);
}

TEST(every_model_and_its_keys_in_e4m3)
{
    for_each_golden(serve_all_in_e4m3);
}

TESTS_BETWEEN(engine_bench_set_up, NULL)
