/* learner.c: forward, log-probabilities, loss and backward over micro-batches. Owns the model's
 * scratch, the tape, the batch, the backward pass, the optimizer and, for a KL term, a frozen
 * second set of weights; the trainer's thread.
 *
 * All device memory is taken once, in learner_prepare(): a step that worked once does not fail for
 * memory later. The (rows, vocabulary) logits exist head_rows rows at a time, for the policy within
 * backward_logprobs() and for the reference here.
 */
#include "trainer/learner.h"

#include <stdlib.h>
#include <string.h>

struct reference { // frozen weights and a walk of their own
    struct weights *weights;
    void *memory;
    struct model *model;
    int32_t *targets;      // (max_targets), device
    float *logprobs, *lse; // (max_targets), device
};

struct learner {
    struct device *dev;
    const struct model_config *config;
    const struct weights *policy;
    struct learner_config options;
    char *reference_folder;
    int max_targets;
    struct memory_plan plan;
    struct model *model;
    struct reference ref;
    struct tape *tape;
    struct batch *batch;
    struct backward *backward;
    struct optimizer *optimizer;
    // host, (max_targets)
    int32_t *targets;
    float *logprobs, *entropy, *ref_logprobs, *dlogprobs;
};

static void reference_release(struct device *dev, struct reference *ref)
{
    model_free(ref->model);
    device_release(dev, ref->targets);
    device_release(dev, ref->logprobs);
    device_release(dev, ref->lse);
    device_release(dev, ref->memory);
    weights_free(ref->weights);
    *ref = (struct reference){0};
}

void learner_free(struct learner *l)
{
    if (!l) return;
    optimizer_free(l->optimizer);
    backward_free(l->backward);
    tape_free(l->dev, l->tape);
    batch_free(l->batch);
    reference_release(l->dev, &l->ref);
    model_free(l->model);
    free(l->targets);
    free(l->logprobs);
    free(l->entropy);
    free(l->ref_logprobs);
    free(l->dlogprobs);
    free(l->reference_folder);
    free(l);
}

// What can be said before the models are there: everything but their scratch and the backward pass.
static void plan_arrays(struct learner *l, size_t free_before)
{
    struct memory_plan *plan = &l->plan;
    struct optimizer_memory o;
    optimizer_memory(l->policy, &o);
    plan->free = free_before;
    plan->weights_shared = l->policy->bytes;
    plan->residual = o.residual;
    plan->moments = o.moments;
    plan->gradients = o.grads;
    plan->activations = tape_bytes(l->config, l->policy->dt, l->options.token_budget);
    if (l->reference_folder)
        plan->reference =
            l->policy->bytes + (size_t)l->max_targets * (sizeof(int32_t) + 2 * sizeof(float));
    plan->total =
        plan->residual + plan->moments + plan->gradients + plan->activations + plan->reference;
}

static void plan_workspace(struct learner *l)
{
    struct memory_plan *plan = &l->plan;
    size_t scratch = l->model->scratch_bytes, reference = l->reference_folder ? scratch : 0;
    plan->workspace = scratch + backward_bytes(l->model, l->options.token_budget, l->max_targets);
    plan->reference += reference;
    plan->total += plan->workspace + reference;
}

static enum status check_room(const struct memory_plan *plan, const struct device *dev)
{
    if (plan->total <= plan->free) return ST_OK;
    double gib = 1.0 / (1024.0 * 1024.0 * 1024.0);
    bool by_rows = plan->activations + plan->workspace > plan->total / 4;
    return status_fail(ST_NO_MEMORY, "training needs %.2f GiB on %s, where %.2f GiB are free: %s",
                       (double)plan->total * gib, device_spec(dev), (double)plan->free * gib,
                       by_rows
                           ? "lower --token-budget or --head-rows, or give the daemon a smaller "
                             "--kv-memory"
                           : "give the daemon a smaller --kv-memory or take a smaller model");
}

enum status learner_new(struct device *dev, const struct model_config *config,
                        const struct weights *policy, const char *reference_folder,
                        const struct learner_config *options, struct learner **ret)
{
    enum status st = ST_OK;
    size_t free_before, total;
    struct learner *l = calloc(1, sizeof *l);
    if (!l) return status_fail(ST_NO_MEMORY, "no memory for the learner");
    l->dev = dev;
    l->config = config;
    l->policy = policy;
    l->options = *options;
    l->max_targets = options->token_budget + options->max_seqs;
    if (l->options.head_rows > l->max_targets) l->options.head_rows = l->max_targets;
    if (reference_folder && !(l->reference_folder = strdup(reference_folder))) {
        st = status_fail(ST_NO_MEMORY, "no memory for the learner");
        goto out;
    }
    CHECK(device_memory(dev, &free_before, &total));
    plan_arrays(l, free_before);
    CHECK(check_room(&l->plan, dev)); // before anything large is taken
    CHECK(model_new(dev, config, policy, options->token_budget, l->options.head_rows,
                    options->max_context, &l->model));
    plan_workspace(l);
    *ret = l;
out:
    if (st != ST_OK) learner_free(l);
    return st;
}

void learner_memory(const struct learner *l, struct memory_plan *ret)
{
    *ret = l->plan;
}

static enum status reference_load(struct learner *l)
{
    struct reference *ref = &l->ref;
    enum status st;
    size_t n = (size_t)l->max_targets;
    CHECK(weights_plan(l->config, l->policy->dt, &ref->weights));
    CHECK(device_alloc(l->dev, ref->weights->bytes, &ref->memory));
    device_fill(l->dev, ref->memory, 0, ref->weights->bytes);
    weights_bind(ref->weights, ref->memory);
    CHECK(weights_load(ref->weights, l->dev, l->reference_folder));
    CHECK(model_new(l->dev, l->config, ref->weights, l->options.token_budget, l->options.head_rows,
                    l->options.max_context, &ref->model));
    CHECK(device_alloc(l->dev, n * sizeof *ref->targets, (void **)&ref->targets));
    CHECK(device_alloc(l->dev, n * sizeof *ref->logprobs, (void **)&ref->logprobs));
    CHECK(device_alloc(l->dev, n * sizeof *ref->lse, (void **)&ref->lse));
out:
    return status_context(st, "the KL term's reference model");
}

enum status learner_prepare(struct learner *l)
{
    enum status st;
    size_t n = (size_t)l->max_targets;
    CHECK(check_room(&l->plan, l->dev));
    CHECK(optimizer_new(l->dev, l->policy, &l->options.optimizer, &l->optimizer));
    CHECK(tape_new(l->model, l->options.token_budget, &l->tape));
    CHECK(backward_new(l->model, optimizer_grads(l->optimizer), l->options.token_budget,
                       l->max_targets, &l->backward));
    CHECK(batch_new(l->dev, l->options.token_budget, l->options.max_seqs, 0, l->max_targets,
                    &l->batch));
    if (l->reference_folder) CHECK(reference_load(l));
    l->targets = malloc(n * sizeof *l->targets);
    l->logprobs = malloc(n * sizeof *l->logprobs);
    l->entropy = malloc(n * sizeof *l->entropy);
    l->ref_logprobs = malloc(n * sizeof *l->ref_logprobs);
    l->dlogprobs = malloc(n * sizeof *l->dlogprobs);
    if (!l->targets || !l->logprobs || !l->entropy || !l->ref_logprobs || !l->dlogprobs)
        st = status_fail(ST_NO_MEMORY, "no memory for %zu log-probabilities", n);
out:
    return st;
}

static enum status reference_logprobs(struct learner *l, int n)
{
    struct reference *ref = &l->ref;
    struct model *m = ref->model;
    const int32_t *rows = batch_rows_device(l->batch);
    void *x;
    model_forward(m, batch_view(l->batch), NULL, NULL, &x);
    device_copy_in(l->dev, ref->targets, l->targets, (size_t)n * sizeof *ref->targets);
    for (int i = 0; i < n; i += l->options.head_rows) {
        int chunk = n - i < l->options.head_rows ? n - i : l->options.head_rows;
        model_head(m, x, rows + i, chunk);
        m->ops->logprob(l->dev, ref->logprobs + i, ref->lse + i, NULL, m->logits, ref->targets + i,
                        chunk, l->config->vocab_size, l->options.temperature);
    }
    device_copy_out(l->dev, l->ref_logprobs, ref->logprobs, (size_t)n * sizeof *ref->logprobs);
    return device_sync(l->dev);
}

static bool all_zero(const float *x, int n)
{
    for (int i = 0; i < n; i++)
        if (x[i] != 0) return false;
    return true;
}

static enum status run_micro_batch(struct learner *l, const struct micro_batch *mb,
                                   const struct pack_group *groups, learner_loss_fn loss,
                                   void *context, bool backward)
{
    enum status st = ST_OK;
    void *x;
    int n = mb->first[mb->n_seqs];
    struct learner_rows rows = {mb, l->logprobs, l->entropy, l->ref.model ? l->ref_logprobs : NULL};
    if (n > 0) {
        batch_clear(l->batch);
        CHECK(packing_fill(mb, groups, l->batch, l->targets));
        CHECK(batch_commit(l->batch, 0));
        if (l->ref.model) CHECK(reference_logprobs(l, n));
        model_forward(l->model, batch_view(l->batch), NULL, backward ? l->tape : NULL, &x);
        CHECK(backward_logprobs(l->backward, l->batch, x, l->targets, l->options.temperature,
                                l->logprobs, l->entropy));
    }
    loss(context, &rows, l->dlogprobs);
    // Groups without spread have no gradient to compute.
    if (backward && !all_zero(l->dlogprobs, n))
        CHECK(backward_run(l->backward, l->batch, l->tape, l->dlogprobs, l->options.temperature));
out:
    return st;
}

static enum status run_all(struct learner *l, const struct pack_group *groups, int n_groups,
                           learner_loss_fn loss, void *context, bool backward)
{
    struct packing *packing = NULL;
    enum status st;
    CHECK(packing_new(groups, n_groups, l->options.token_budget, &packing));
    for (int i = 0; i < packing->n; i++)
        CHECK(run_micro_batch(l, &packing->batches[i], groups, loss, context, backward));
out:
    packing_free(packing);
    return st;
}

enum status learner_gradients(struct learner *l, const struct pack_group *groups, int n_groups,
                              learner_loss_fn loss, void *context)
{
    optimizer_clear_grads(l->optimizer);
    return run_all(l, groups, n_groups, loss, context, true);
}

enum status learner_clip(struct learner *l, double *ret_norm)
{
    return optimizer_prepare(l->optimizer, ret_norm);
}

enum status learner_evaluate(struct learner *l, const struct pack_group *groups, int n_groups,
                             learner_loss_fn loss, void *context)
{
    return run_all(l, groups, n_groups, loss, context, false);
}

enum status learner_apply(struct learner *l, double lr)
{
    return optimizer_apply(l->optimizer, lr);
}

struct optimizer *learner_optimizer(struct learner *l)
{
    return l->optimizer;
}
