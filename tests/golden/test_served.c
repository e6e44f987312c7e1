/* test_served.c: every model of tests/golden, served: prompts in chunks that share a beginning, a
 * pool too small for all requests at once, drafts. The log-probability of each sampled token is
 * that of the packed pass over the finished text, to the bit: the trainer's. */
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
    int32_t ids[PROMPT + NEW], targets[NEW];
    float lse[NEW];
    static float logits[(PROMPT + NEW) * 1024], have[NEW];
    const int n = take->sample[0].n, vocab = r->config->vocab_size;
    assert_int_equal(n, NEW);
    assert_true(vocab <= 1024);
    memcpy(ids, prompt, PROMPT * sizeof *ids);
    for (int i = 0; i < n; i++) ids[PROMPT + i] = targets[i] = take->sample[0].tokens[i].token;
    reference_logits(r, ids, PROMPT + n, logits);
    const struct head_args head = {logits + (PROMPT - 1) * vocab, targets, n, vocab, 1};
    device_ops(r->dev)->logprob(r->dev, have, lse, NULL, &head);
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
    reference_open(model, "cpu", &r);
    const int64_t state_bytes = kv_memory_state_bytes(r.config); // such a model has no drafts
    options.model_folder = model;
    options.block_size = BLOCK_TOKENS;
    options.max_context = BLOCKS * BLOCK_TOKENS; // long, as the reference, by longrope
    options.prefill_chunk = 5;
    options.speculative_fixed = 1;
    options.kv_bytes =
        BLOCKS * kv_memory_block_bytes(r.config, DT_F32, BLOCK_TOKENS) + 2 * state_bytes;
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

static void every_model(void **state)
{
    const char *root = test_path(test_root(), "tests/golden");
    struct dirent **list;
    const int n = scandir(root, &list, NULL, alphasort);
    int served = 0;
    (void)state;
    for (int i = 0; i < n; i++) {
        const char *model = test_path(root, list[i]->d_name);
        if (file_exists(test_path(model, "config.json"))) {
            printf("%s\n", list[i]->d_name);
            serve(model);
            served++;
        }
        free(list[i]);
    }
    free(list);
    assert_true(served > 10);
    assert_true(all.preemptions > 0 && all.cache_hits > 0 && all.drafts.num_accepted_tokens > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_model)};
    return cmocka_run_group_tests_name("served", tests, engine_bench_set_up, NULL);
}
