/* reference.c: see reference.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/reference.h"
#include "infer-server/engine/runner.h"
#include "tests/support/support.h"

#include <dirent.h>

#define MAX_TOKENS 1024
#define BLOCK      4

enum status reference_build(const char *folder, json_t *config, int max_tokens,
                            struct reference *ret)
{
    enum status st = ST_OK;
    ret->adapter = -1;
    if (config)
        CHECK(model_config_from_json("config.json", config, &ret->config));
    else
        CHECK(model_config_load(folder, &ret->config));
    CHECK(model_config_quantise(ret->config, ret->quantization, false));
    CHECK(weights_plan(ret->config, device_default_dtype(ret->dev), &ret->weights));
    CHECK(weights_alloc(ret->weights, ret->dev));
    CHECK(weights_load(ret->weights, ret->dev, folder));
    CHECK(model_new(ret->dev, ret->config, ret->weights, max_tokens, max_tokens, max_tokens,
                    &ret->model));
    CHECK(batch_new(ret->dev, max_tokens, 8, max_tokens / BLOCK, max_tokens, &ret->batch));
out:
    if (st != ST_OK) reference_release(ret);
    return st;
}

void reference_open(const char *folder, const char *device, struct reference *ret)
{
    reference_open_as(folder, device, QUANTIZATION_NONE, ret);
}

void reference_open_as(const char *folder, const char *device, enum quantization q,
                       struct reference *ret)
{
    *ret = (struct reference){.quantization = q};
    assert_ok(device_open(device, &ret->dev));
    assert_ok(reference_build(folder, NULL, MAX_TOKENS, ret));
}

void reference_release(struct reference *r)
{
    batch_free(r->batch);
    model_free(r->model);
    weights_free(r->weights);
    model_config_free(r->config);
    *r = (struct reference){.dev = r->dev};
}

void reference_close(struct reference *r)
{
    reference_release(r);
    device_free(r->dev);
    memset(r, 0, sizeof *r);
}

LATER(reference_close)

struct reference *reference_of(const char *folder)
{
    struct reference *r = test_keep(calloc(1, sizeof *r));
    reference_open(folder, "cpu", r);
    return test_later(r, reference_close_later);
}

void reference_logits(struct reference *r, const int32_t *ids, int n, float *ret)
{
    void *x;
    batch_clear(r->batch);
    assert_ok(batch_add_packed(r->batch, ids, n, -1, r->adapter, NULL));
    for (int i = 0; i < n; i++) assert_ok(batch_want_row(r->batch, i));
    assert_ok(batch_commit(r->batch, 0, 0));
    model_forward(r->model, batch_view(r->batch), NULL, NULL, &x);
    model_head(r->model, x, batch_rows_device(r->batch), 0, n);
    device_copy_out(r->dev, ret, r->model->logits,
                    (size_t)n * (size_t)r->config->vocab_size * sizeof *ret);
    assert_ok(device_sync(r->dev));
}

void reference_token_logprobs(struct reference *r, const int32_t *ids, int n, int from, float *ret)
{
    const int vocab = r->config->vocab_size, rows = n - from;
    const size_t bytes = (size_t)rows * sizeof *ret;
    void *targets, *logprob, *lse;
    float *logits = malloc((size_t)n * (size_t)vocab * sizeof *logits);
    assert_non_null(logits);
    assert_ok(device_alloc(r->dev, bytes, &targets));
    assert_ok(device_alloc(r->dev, bytes, &logprob));
    assert_ok(device_alloc(r->dev, bytes, &lse));
    reference_logits(r, ids, n, logits);
    device_copy_in(r->dev, targets, ids + from, bytes);
    const struct head_args head = {(const float *)r->model->logits +
                                       (size_t)(from - 1) * (size_t)vocab,
                                   targets, rows, vocab, 1};
    device_ops(r->dev)->logprob(r->dev, logprob, lse, NULL, &head);
    device_copy_out(r->dev, ret, logprob, bytes);
    assert_ok(device_sync(r->dev));
    device_release(r->dev, targets);
    device_release(r->dev, logprob);
    device_release(r->dev, lse);
    free(logits);
}

static int argmax(const float *x, int n)
{
    int best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

enum status greedy_decode(const struct model *like, const int32_t *prompt, int n_prompt, int n_new,
                          int32_t *ret)
{
    const int vocab = like->config->vocab_size, n_blocks = (n_prompt + n_new + BLOCK - 1) / BLOCK;
    const struct runner_limits limits = {.max_tokens = n_prompt,
                                         .max_seqs = 2, // a padded size
                                         .max_rows = 2,
                                         .max_context = like->max_context,
                                         .block_size = BLOCK};
    struct runner *r = NULL;
    int32_t *blocks = malloc((size_t)n_blocks * sizeof *blocks), next = prompt[n_prompt - 1];
    float *row = malloc((size_t)vocab * sizeof *row);
    const struct sampler_row unused = {0};
    enum status st = ST_OK;
    for (int i = 0; i < n_blocks; i++) blocks[i] = n_blocks - 1 - i;
    CHECK(runner_new(like->dev, like->weights, &limits, &r));
    CHECK(runner_allocate_kv(r, n_blocks, 1));
    r->model->adapters = like->adapters;
    r->model->comm = like->comm;
    for (int at = 0; at < n_prompt + n_new - 1;) {
        bool prefill = at < n_prompt;
        int take = !prefill ? 1 : at == 0 && n_prompt > 1 ? n_prompt / 2 : n_prompt - at;
        runner_clear(r);
        const struct batch_seq seq = {like->adapters ? 0 : -1, 0, 0};
        CHECK(runner_feed(r, prefill ? prompt + at : &next, take, at, blocks, n_blocks, seq));
        CHECK(runner_want(r, take - 1, &unused));
        CHECK(runner_step(r));
        device_copy_out(r->dev, row, r->model->logits, (size_t)vocab * sizeof *row);
        CHECK(device_sync(r->dev));
        at += take;
        next = argmax(row, vocab);
        if (at >= n_prompt) ret[at - n_prompt] = next;
    }
out:
    runner_free(r);
    free(blocks);
    free(row);
    return st;
}

void reference_greedy(struct reference *r, const int32_t *prompt, int n_prompt, int n_new,
                      int32_t *ret)
{
    assert_ok(greedy_decode(r->model, prompt, n_prompt, n_new, ret));
}

void reference_list_golden(void (*test)(void **state), const char *suffix)
{
    const char *root = test_golden("");
    struct dirent **list;
    const int n = scandir(root, &list, NULL, alphasort);
    for (int i = 0; i < n; i++) {
        const char *file = ((struct dirent *)test_keep(list[i]))->d_name;
        const char *model = test_path(root, file);
        if (!file_exists(test_path(model, "config.json"))) continue;
        test_list(0, (struct CMUnitTest){test_text("%s%s", file, suffix), test, NULL, NULL,
                                         (void *)model});
    }
    test_keep(list);
}

// Where --exact is refused, since whether the library keeps one order there was not measured, a
// row's bits are not held to either (docs/internals/numerics.md, "Where it holds").
void reference_skip_inexact(const char *model)
{
    struct model_config *config = NULL;
    struct device *dev;
    assert_ok(device_open(test_device(), &dev));
    const bool exact = device_is_exact(dev, device_default_dtype(dev));
    const bool cpu = device_kind(dev) == DEVICE_CPU;
    device_free(dev);
    if (!exact) test_skip("--exact is refused on this GPU (docs/internals/numerics.md)");
    if (!model) return;
    assert_ok(model_config_load(model, &config));
    const int hidden = config->hidden, experts = config_experts(config);
    bool gate = false; // of a shared expert: a column, as odd a number as of experts
    for (int l = 0; l < config->n_layers; l++) gate |= config->layers[l].shared_gate;
    model_config_free(config);
    if (cpu || (hidden % 16 == 0 && ((experts % 2 == 0 && !gate) || hidden % 64 == 0))) return;
    test_skip(
        "hidden size %d, %d experts%s: a GPU's bits may depend on the rows beside (limits.md)",
        hidden, experts, gate ? " and a shared expert's gate" : "");
}
