/* test_served.c: every model of tests/golden, served: prompts in chunks that share a beginning, a
 * pool too small for all requests at once, drafts. The log-probability of each sampled token is
 * that of the packed pass over the finished text, to the bit: the trainer's. On a GPU
 * (COMMONWEIGHT_TEST_DEVICE) in bf16. */
#include "common/base/file.h"
#include "infer-server/engine/kv_memory.h"
#include "tests/support/engine_bench.h"
#include "tests/support/reference.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>

enum { REQUESTS = 6, PROMPT = 21, SHARED = 13, NEW = 18, BLOCKS = 24, BLOCK_TOKENS = 4 };

static struct engine_stats all; // counters of all folders

// Prompts that begin alike and repeat themselves, so that there is something to draft.
static void fill_prompt(int32_t *prompt, int request, int vocab)
{
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = (i % 5 * 31 + 7 + (i >= SHARED ? request * 17 : 0)) % vocab;
}

static void compare(struct reference *r, const int32_t *prompt, const struct take *take)
{
    int32_t ids[PROMPT + NEW];
    float have[NEW];
    const int n = take->sample[0].n;
    assert_int_equal(n, NEW);
    memcpy(ids, prompt, PROMPT * sizeof *ids);
    for (int i = 0; i < n; i++) ids[PROMPT + i] = take->sample[0].tokens[i].token;
    reference_token_logprobs(r, ids, PROMPT + n, PROMPT, have);
    for (int i = 0; i < n; i++)
        if (memcmp(&have[i], &take->sample[0].tokens[i].logprob, sizeof have[i]) != 0)
            fail_msg("token %d: served %.9g, packed %.9g", i,
                     (double)take->sample[0].tokens[i].logprob, (double)have[i]);
}

static struct take *submit_one(struct bench *b, const int32_t *prompt, int request, bool drafts)
{
    struct sampling s = request % 2 ? random_sampling(NEW, (uint64_t)request) : greedy(NEW);
    s.logprobs = 0;
    s.speculative =
        (struct speculative_choice){.chosen = true, .k[SPECULATIVE_NGRAM] = drafts ? 3 : 0};
    return submit_ids(b, prompt, PROMPT, &s);
}

static void serve(const char *model)
{
    struct bench b;
    struct reference r;
    int32_t prompts[REQUESTS][PROMPT];
    struct take *takes[REQUESTS];
    struct engine_options options = plain_options();
    reference_open(model, test_device(), &r);
    const int64_t state_bytes = kv_memory_state_bytes(r.config); // such a model has no drafts
    options.model_folder = model;
    options.device = test_device();
    options.exact = true;
    options.block_size = BLOCK_TOKENS;
    options.max_context = BLOCKS * BLOCK_TOKENS; // long, as the reference, by longrope
    options.prefill_chunk = 5;
    options.speculative_fixed = 1;
    options.kv_bytes =
        BLOCKS * kv_memory_block_bytes(r.config, r.weights->dt, BLOCK_TOKENS) + 2 * state_bytes;
    bench_start(&b, &options);
    for (int i = 0; i < REQUESTS; i++) {
        fill_prompt(prompts[i], i, r.config->vocab_size);
        takes[i] = submit_one(&b, prompts[i], i, state_bytes == 0);
    }
    for (int i = 0; i < REQUESTS; i++) await_done(&b, takes[i]);
    const struct engine_stats stats = idle_stats(&b);
    all.preemptions += stats.preemptions;
    all.cache_hits += stats.cache_hits;
    all.drafts.num_accepted_tokens += stats.drafts.num_accepted_tokens;
    bench_end(&b);
    for (int i = 0; i < REQUESTS; i++) {
        compare(&r, prompts[i], takes[i]);
        free(takes[i]);
    }
    reference_close(&r);
}

static void one_model(void **state)
{
    struct model_config *config = NULL;
    assert_ok(model_config_load(*state, &config));
    const int hidden = config->hidden;
    model_config_free(config);
    if (hidden % 16 != 0 && strcmp(test_device(), "cpu") != 0)
        test_skip("%d is no multiple of 16: a GPU's bits may depend on the rows beside (limits.md)",
                  hidden);
    serve(*state);
}

static void all_was_seen(void **state)
{
    (void)state;
    assert_true(all.preemptions > 0 && all.cache_hits > 0 && all.drafts.num_accepted_tokens > 0);
}

int main(void)
{
    static struct CMUnitTest tests[64];
    struct dirent **list;
    size_t n_tests = 0;
    const char *root = test_path(test_root(), "tests/golden");
    const int n = scandir(root, &list, NULL, alphasort);
    for (int i = 0; i < n && n_tests < 63; i++) {
        const char *model = test_path(root, list[i]->d_name);
        if (file_exists(test_path(model, "config.json")))
            tests[n_tests++] = (struct CMUnitTest){
                .name = list[i]->d_name, .test_func = one_model, .initial_state = (void *)model};
    }
    tests[n_tests++] = (struct CMUnitTest)cmocka_unit_test(all_was_seen);
    return _cmocka_run_group_tests("served", tests, n_tests, engine_bench_set_up, NULL);
}
