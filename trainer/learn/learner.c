/* learner.c: forward, log-probabilities, loss and backward over micro-batches. Owns the model's
 * scratch, the tape, the batch, the backward pass, the optimizer, for a KL term a frozen second set
 * of weights, and for a draft model a second learner; the trainer's thread.
 *
 * The draft goes through its policy's micro-batches, right after the policy's forward pass: what it
 * is to imitate is then still on the policy's tape.
 *
 * All device memory is taken once, in learner_prepare(): a step that worked once does not fail for
 * memory later. The (rows, vocabulary) logits exist logits_chunk rows at a time, or all of a
 * micro-batch's where a GPU has the room (backward.c).
 */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/learn/learner.h"
#include "trainer/learn/backward.h"
#include "common/base/log.h"
#include "common/base/rng.h"
#include "trainer/learn/param_range.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Of logits, by default. A GPU is badly filled by fewer rows, and adds the head's gradient in f32,
// (vocabulary, hidden), once for each chunk.
#define CPU_CHUNK 512
#define GPU_CHUNK 2048

struct learner {
    struct learner_info info;
    struct device *dev;
    const struct model_config *config;
    const struct weights *policy;
    struct learner_config options;
    struct param_ranges trained;
    struct adapter_table *adapters;          // with the one that is trained; NULL: none is
    int32_t *row_samples, *row_samples_host; // (token_budget) with dropout: packing_samples()
    struct weights *frozen;                  // then the policy's gradients: none
    bool has_reference;
    int max_targets;
    size_t scratch;   // that the operations want, a draft's included
    size_t allocated; // on the device before
    struct model *model;
    struct model *ref_model;     // NULL: no reference
    struct weights *ref_weights; // its frozen ones; NULL: the policy's, beside an adapter
    struct model_config *teacher_config;
    struct weights *teacher_weights;
    struct model *teacher; // NULL: there is none
    struct learner_teacher_config taught;
    struct batch *teacher_batch; // where groups have prompts for it; else NULL
    struct tape *tape;
    struct batch *batch;
    struct backward *backward;
    float *balance, *balance_host; // (2, n_experts) with a load-balancing loss; NULL: there is none
    // host, (max_targets); the floats are one allocation, as far as `agrees`
    int32_t *targets;
    float *logprobs, *entropy, *ref_logprobs, *dlogprobs, *dentropy, *ddivergence;
    struct token_logprob *ranked;         // NULL: not asked for
    struct constraint_row *constraints;   // NULL: no group has one
    float *divergence, *overlap, *agrees; // from a teacher, of a draft from the policy
    float loss_weight;                    // of a draft
    int depths;                           // likewise
    // of a draft that is the policy's own layer: (token_budget) of each row of its batch where the
    // policy has the token before; host, device
    int32_t *before_host, *before;
};

void learner_free(struct learner *l)
{
    if (!l) return;
    learner_free(l->info.draft);
    if (!l->options.many_adapters) optimizer_free(l->info.optimizer);
    backward_free(l->backward);
    tape_free(l->dev, l->tape);
    batch_free(l->batch);
    model_free(l->ref_model);
    weights_free(l->ref_weights);
    batch_free(l->teacher_batch);
    model_free(l->teacher);
    weights_free(l->teacher_weights);
    model_config_free(l->teacher_config);
    model_free(l->model);
    adapter_table_free(l->adapters);
    device_release(l->dev, l->row_samples);
    device_release(l->dev, l->balance);
    device_release(l->dev, l->before);
    free(l->before_host);
    free(l->balance_host);
    free(l->row_samples_host);
    weights_free(l->frozen);
    param_ranges_release(&l->trained);
    free(l->targets);
    free(l->logprobs);
    free(l->ranked);
    free(l->constraints);
    free(l);
}

// ---- memory -------------------------------------------------------------------------------------

// What can be said before the models are there: everything but their scratch and the backward pass.
static void plan_arrays(struct learner *l, size_t free_before)
{
    struct memory_plan *plan = &l->info.memory;
    *plan = (struct memory_plan){.free = free_before, .weights_shared = l->policy->bytes};
    optimizer_memory(&l->trained, comm_size(l->options.comm), l->options.optimizer.moments,
                     &plan->residual, &plan->moments, &plan->gradients);
    plan->activations =
        tape_bytes(l->config, l->policy->dt, l->options.token_budget, l->options.recompute);
    if (l->has_reference && !l->options.adapter) plan->reference = l->policy->bytes;
    plan->total =
        plan->residual + plan->moments + plan->gradients + plan->activations + plan->reference;
}

// Elements of the largest gradient that is rounded for a matmul, of a layer.
static size_t rounded_elements(const struct learner *l, const struct layer_config *layer, int qkv)
{
    const struct model_config *c = l->config;
    const size_t t = (size_t)l->options.token_budget, rows = layer_mlp_rows(layer, t);
    const size_t each[] = {
        rows * (size_t)config_up_width(c, layer->intermediate), rows * (size_t)c->hidden,
        t * (size_t)config_up_width(c, layer->shared_intermediate), t * (size_t)qkv};
    size_t most = 0;
    for (size_t i = 0; i < sizeof each / sizeof *each; i++)
        if (each[i] > most) most = each[i];
    return l->options.gradient_dtype ? most : 0;
}

// Of the policy's passes, or of a teacher's.
static size_t operations_scratch(const struct learner *l, const struct model *m,
                                 const struct weights *weights)
{
    const struct model_config *c = m->config;
    size_t max = 0;
    for (int i = 0; i < c->n_layers; i++) {
        int up = config_up_width(c, c->layers[i].intermediate),
            qkv = layer_attn_in_width(c, &c->layers[i]) + layer_delta_in_width(&c->layers[i]);
        const size_t codes = model_codes(m),
                     back = m == l->model ? rounded_elements(l, &c->layers[i], qkv) : 0;
        struct scratch_shape shape = {
            .attn = backward_attn_shape(m, i),
            .delta = model_delta_shape(m, i),
            .rows = l->options.token_budget,
            .max_context = l->options.max_context,
            .hidden = c->hidden,
            .widest = up > qkv ? up : qkv,
            .logits_chunk = l->options.logits_chunk,
            .vocab = c->vocab_size,
            .widened = weights_widest(weights) + (int64_t)(codes > back ? codes : back),
            .rounded = back ? weights_widest(weights) + (int64_t)back : 0,
            .n_elements = l->trained.list[0].weights->n_elements,
            .lora_rank = l->options.adapter ? l->options.adapter->max_rank : 0,
            .lora_head = l->options.adapter && adapter_changes(l->options.adapter, ROLE_HEAD),
            .lora_dropout = l->options.lora_dropout > 0,
            .dt = weights->dt,
        };
        for (int pass = 0; pass < 2; pass++) {
            const size_t bytes = device_ops(l->dev)->scratch_bytes(l->dev, &shape);
            if (bytes > max) max = bytes;
            shape.attn = m->attn[i]; // the forward pass may have another form
        }
    }
    return max;
}

// As they are, and of a shard as they come from the ranks.
static size_t logits_row_bytes(const struct learner *l)
{
    return (size_t)l->config->vocab_size * sizeof(float) * (l->options.shards ? 2 : 1);
}

static size_t balance_bytes(const struct learner *l)
{
    const size_t each = 2 * (size_t)config_experts(l->config) * sizeof(float);
    return l->options.router_aux_loss_coef > 0 ? each : 0;
}

// Each of a step's prompts and completions begins a node, and may split another; so does each part,
// whose number is not known, but a node has a row at least.
static int max_nodes(const struct learner *l)
{
    return l->options.many_parts ? l->options.token_budget : 2 * l->options.max_seqs;
}

// A draft has no batch of its own, and shares the operations' scratch with its policy.
static void plan_workspace(struct learner *l)
{
    struct memory_plan *plan = &l->info.memory;
    const size_t spare_logits =
        (size_t)(l->model->max_rows - l->options.logits_chunk) * logits_row_bytes(l);
    size_t scratch = l->model->scratch_bytes;
    size_t reference = l->has_reference ? scratch - spare_logits : 0;
    plan->workspace = scratch + backward_bytes(l->model, l->options.token_budget, l->max_targets,
                                               l->options.logits_chunk);
    if (l->options.lora_dropout > 0)
        plan->workspace += (size_t)l->options.token_budget * sizeof *l->row_samples;
    plan->workspace += balance_bytes(l);
    if (l->options.constrained)
        plan->workspace += backward_mask_bytes(l->model, l->options.logits_chunk);
    l->scratch = operations_scratch(l, l->model, l->policy);
    if (!l->options.is_draft) plan->workspace += l->scratch;
    if (l->config->mtp) plan->workspace += (size_t)l->options.token_budget * sizeof *l->before;
    if (!l->options.is_draft || l->config->mtp)
        plan->workspace += batch_bytes(l->options.token_budget, max_nodes(l), 0, l->max_targets);
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
                           ? "lower --token-budget or --logits-chunk, take --recompute layer, or "
                             "give the server a smaller --kv-memory"
                           : "keep narrower moments (--optim-moments bf16 or 8bit), give the "
                             "server a smaller --kv-memory or take a smaller model");
}

// The model with room for so many rows of logits, and the plan for it.
static enum status open_model(struct learner *l, int logits_rows)
{
    const struct learner_config *o = &l->options;
    model_free(l->model);
    l->model = NULL;
    plan_arrays(l, l->info.memory.free);
    enum status st = model_new(l->dev, l->config, l->policy, o->token_budget, logits_rows,
                               o->max_context, &l->model);
    if (st != ST_OK) return st;
    l->model->comm = o->shards;
    plan_workspace(l);
    return ST_OK;
}

// All logits of a micro-batch have room on a GPU that has it left, which is nobody else's memory:
// the head's forward pass is then done once. Else a chunk of them; and where ranks share the model,
// which must all do the same and may not have the same room.
static enum status choose_model(struct learner *l)
{
    const int chunk = l->options.logits_chunk;
    const size_t all = (size_t)l->max_targets * logits_row_bytes(l);
    const bool all_fit = !l->options.is_draft && !l->options.shards &&
                         device_kind(l->dev) == DEVICE_CUDA &&
                         all <= (l->info.memory.free - l->info.memory.total) / 4;
    enum status st = open_model(l, all_fit ? l->max_targets : chunk);
    if (st == ST_OK && all_fit && l->info.memory.total > l->info.memory.free)
        st = open_model(l, chunk);
    return st;
}

enum status balance_coef(const struct model_config *model, double wanted, double *ret)
{
    int l = 0; // a layer that has experts, or the last
    while (l + 1 < model->n_layers && model->layers[l].moe.n_experts == 0) l++;
    const struct moe_shape *routing = &model->layers[l].moe;
    const double coef = wanted < 0 ? model->router_aux_loss_coef : wanted;
    if (wanted < 0 && wanted != -1)
        return status_fail(ST_INVALID,
                           "--router-aux-loss-coef %g: give 0 or more, or -1 for what the model's "
                           "config.json says",
                           wanted);
    if (coef > 0 && routing->n_experts == 0)
        return status_fail(ST_INVALID,
                           "--router-aux-loss-coef %g: the model (%s) is no mixture of experts, "
                           "there are no routers whose load could be balanced; leave it out",
                           coef, model->model_type);
    if (coef > 0 && (routing->scoring != MOE_SOFTMAX || routing->n_group > 1))
        return status_fail(ST_UNSUPPORTED,
                           "--router-aux-loss-coef %g: the load-balancing loss is of routers that "
                           "take the best of a softmax, and those of %s %s; leave it out",
                           coef, model->model_type,
                           routing->scoring != MOE_SOFTMAX ? "score each expert by a sigmoid"
                                                           : "choose among groups of experts");
    *ret = coef;
    return ST_OK;
}

enum status learner_new(struct device *dev, const struct model_config *config,
                        const struct weights *policy, bool reference,
                        const struct learner_config *options, struct learner **ret)
{
    enum status st = ST_OK;
    size_t free_before, total, peak;
    struct learner *l = calloc(1, sizeof *l);
    if (!l) return status_fail(ST_NO_MEMORY, "no memory for the learner");
    l->dev = dev;
    l->config = config;
    l->policy = policy;
    l->options = *options;
    l->max_targets = options->token_budget + options->max_seqs;
    if (options->max_targets > 0 && options->max_targets < l->max_targets)
        l->max_targets = (int)options->max_targets;
    if (l->options.logits_chunk == 0)
        l->options.logits_chunk = device_kind(dev) == DEVICE_CUDA ? GPU_CHUNK : CPU_CHUNK;
    if (l->options.logits_chunk > l->max_targets) l->options.logits_chunk = l->max_targets;
    CHECK(balance_coef(config, options->router_aux_loss_coef, &l->options.router_aux_loss_coef));
    if (policy->n_in_twin > 0 && !options->adapter && !options->many_adapters)
        FAIL(ST_UNSUPPORTED,
             "the model's experts are held in four bits (--quantization mxfp4), which nobody "
             "trains: train an adapter beside them (--lora-r), or leave --quantization away");
    if (options->gradient_dtype && config->quantization != QUANTIZATION_FP8)
        FAIL(ST_UNSUPPORTED,
             "--gradient-dtype %s is of a model whose matrices are multiplied in e4m3 "
             "(--quantization fp8), and this one has --quantization %s: leave it away",
             gradient_dtype_names[options->gradient_dtype],
             quantization_names[config->quantization]);
    CHECK(param_ranges_of(options->adapter ? options->adapter->weights : policy, options->freeze,
                          &l->trained));
    l->info.comm = options->comm;
    l->info.token_budget = options->token_budget;
    l->info.phases = options->phases;
    l->info.trained = &l->trained;
    l->info.balance_coef = l->options.router_aux_loss_coef;
    l->has_reference = reference;
    device_allocated(dev, &l->allocated, &peak);
    CHECK(device_memory(dev, &free_before, &total));
    plan_arrays(l, free_before);
    CHECK(check_room(&l->info.memory, dev)); // before anything large is taken
    CHECK(choose_model(l));
    *ret = l;
out:
    if (st != ST_OK) learner_free(l);
    return st;
}

// The operations' scratch is shared.
static void widen_scratch(struct learner *l, size_t bytes)
{
    if (bytes <= l->scratch) return;
    l->info.memory.workspace += bytes - l->scratch;
    l->info.memory.total += bytes - l->scratch;
    l->scratch = bytes;
}

enum status learner_add_draft(struct learner *l, const struct model_config *config,
                              const struct weights *draft,
                              const struct learner_draft_config *options)
{
    enum status st;
    struct learner_config draft_options = l->options;
    draft_options.optimizer = options->optimizer;
    draft_options.freeze = NULL;
    draft_options.adapter = NULL;
    draft_options.many_adapters = false;
    draft_options.router_aux_loss_coef = 0;
    draft_options.constrained = false;
    draft_options.gradient_dtype = GRADIENT_AUTO; // it is not quantised
    draft_options.is_draft = true;
    if (config->vocab_size > l->config->vocab_size)
        return status_fail(ST_MISMATCH,
                           "--train-draft: the draft model has a vocabulary of %d tokens, the "
                           "policy one of %d; take a draft of the same tokenizer",
                           config->vocab_size, l->config->vocab_size);
    if (options->depths > 1 && !config->mtp)
        return status_fail(ST_INVALID,
                           "--draft-depths %d: it is of a layer that predicts further tokens "
                           "(--speculative mtp), not of a draft model; leave it away",
                           options->depths);
    CHECK(learner_new(l->dev, config, draft, false, &draft_options, &l->info.draft));
    l->info.draft->loss_weight = options->loss_weight;
    l->info.draft->depths = options->depths > 1 ? options->depths : 1;
    l->info.memory.draft = l->info.draft->info.memory.total;
    l->info.memory.total += l->info.memory.draft;
    widen_scratch(l, l->info.draft->scratch);
    st = check_room(&l->info.memory, l->dev);
out:
    return status_context(st, "training the draft model");
}

// A folder's, which is checked and loaded.
static enum status load_teacher(struct learner *l, const char *folder)
{
    struct memory_plan *plan = &l->info.memory;
    enum status st;
    CHECK(model_config_load(folder, &l->teacher_config));
    CHECK(model_config_quantise(l->teacher_config, l->taught.quantization, true));
    l->teacher_config->expert_parallel =
        l->config->expert_parallel && config_experts(l->teacher_config) > 0;
    if (model_config_shard(l->teacher_config, l->config->shard) != ST_OK)
        log_warn("--teacher %s: each rank holds it whole: %s", folder, status_message());
    if (l->teacher_config->vocab_size < l->config->vocab_size)
        FAIL(
            ST_MISMATCH,
            "it has a vocabulary of %d tokens, the policy one of %d: it must know every token that "
            "the policy may write",
            l->teacher_config->vocab_size, l->config->vocab_size);
    if (l->options.constrained && l->teacher_config->vocab_size != l->config->vocab_size)
        FAIL(ST_UNSUPPORTED,
             "it has a vocabulary of %d tokens, the policy one of %d: with --constrained-loss, "
             "whose masks are of the policy's, they must be equal",
             l->teacher_config->vocab_size, l->config->vocab_size);
    if (l->options.max_context > l->teacher_config->max_positions)
        FAIL(ST_TOO_LONG,
             "it reads at most %d tokens, and a prompt with its completion may have %d",
             l->teacher_config->max_positions, l->options.max_context);
    CHECK(weights_plan(l->teacher_config, l->policy->dt, &l->teacher_weights));
    l->teacher_weights->comm = l->teacher_config->shard.size > 1 ? l->options.shards : NULL;
    plan->teacher = l->teacher_weights->bytes;
    plan->total += plan->teacher;
    CHECK(check_room(plan, l->dev));
    CHECK(weights_alloc(l->teacher_weights, l->dev));
    st = weights_load(l->teacher_weights, l->dev, folder);
out:
    return st;
}

enum status learner_add_teacher(struct learner *l, const struct learner_teacher_config *teacher)
{
    struct memory_plan *plan = &l->info.memory;
    const bool base = strcmp(teacher->model, TEACHER_BASE) == 0,
               own = base || strcmp(teacher->model, TEACHER_POLICY) == 0;
    enum status st = ST_OK;
    l->taught = *teacher;
    if (base && !l->options.adapter)
        FAIL(ST_UNSUPPORTED, "no adapter is trained, whose base it could be (--lora-r)");
    if (!own) CHECK(load_teacher(l, teacher->model));
    const struct weights *weights = own ? l->policy : l->teacher_weights;
    CHECK(model_new(l->dev, own ? l->config : l->teacher_config, weights, l->options.token_budget,
                    l->options.logits_chunk, l->options.max_context, &l->teacher));
    l->teacher->comm = own ? l->options.shards : l->teacher_weights->comm;
    plan->teacher += l->teacher->scratch_bytes;
    plan->total += l->teacher->scratch_bytes;
    widen_scratch(l, operations_scratch(l, l->teacher, weights));
    st = check_room(plan, l->dev);
out:
    return st;
}

const struct learner_info *learner_info(const struct learner *l)
{
    return &l->info;
}

size_t learner_memory_taken(const struct learner *l)
{
    size_t now, peak;
    device_allocated(l->dev, &now, &peak);
    return peak - l->allocated;
}

// ---- the plan as the user reads it --------------------------------------------------------------

static double mib(size_t bytes)
{
    return (double)bytes / (1024 * 1024);
}

// Why no more than a group's prompt is computed once; NULL: all that sequences share is.
static const char *shares_prompts(const struct learner *l)
{
    const struct model_config *models[] = {l->config, l->teacher_config,
                                           l->info.draft ? l->info.draft->config : NULL};
    for (size_t k = 0; k < sizeof models / sizeof *models; k++)
        for (int i = 0; models[k] && i < models[k]->n_layers; i++)
            if (models[k]->layers[i].delta.n_heads > 0)
                return "layers of linear attention go from it to its completions and no deeper";
    return l->options.lora_dropout > 0 ? "--lora-dropout's masks are of each sample" : NULL;
}

void memory_log(const struct learner *l, const char *weights, const char *freeze)
{
    const struct memory_plan p = l->info.memory;
    const struct param_ranges *trained = &l->trained;
    const char *shard = l->options.shards ? ", in this rank's shard" : "";
    if (trained->list[0].weights != l->policy)
        log_info("the adapter's %" PRId64 " parameters are trained, beside %" PRId64
                 " of the model%s",
                 param_ranges_parameters(trained), l->policy->n_parameters, shard);
    if (freeze && freeze[0])
        log_info("--freeze %s: %" PRId64 " of %" PRId64 " parameters are trained%s", freeze,
                 param_ranges_parameters(trained), trained->list[0].weights->n_parameters, shard);
    if (shares_prompts(l))
        log_info("of what sequences share only a group's prompt is computed once: %s",
                 shares_prompts(l));
    log_info("memory on %s (MiB): weights %.1f %s, residual %.1f, moments %.1f, gradients "
             "%.1f, activations %.1f, workspace %.1f, reference %.1f, teacher %.1f, draft %.1f; "
             "total %.1f of "
             "%.1f free",
             device_spec(l->dev), mib(p.weights_shared), weights, mib(p.residual), mib(p.moments),
             mib(p.gradients), mib(p.activations), mib(p.workspace), mib(p.reference),
             mib(p.teacher), mib(p.draft), mib(p.total), mib(p.free));
}

void memory_log_taken(const struct learner *l)
{
    const struct memory_plan p = l->info.memory;
    size_t left, total;
    char less[96] = "";
    if (device_kind(l->dev) == DEVICE_CUDA && device_memory(l->dev, &left, &total) == ST_OK)
        snprintf(less, sizeof less, "; %s has %.1f less free", device_spec(l->dev),
                 ((double)p.free - (double)left) / (1024 * 1024));
    log_info("memory after the first step (MiB): %.1f taken, %.1f planned%s",
             mib(learner_memory_taken(l)), mib(p.total), less);
}

// ---- the reference ------------------------------------------------------------------------------

enum status learner_set_reference(struct learner *l, const char *folder)
{
    struct weights *w = l->ref_weights;
    if (l->options.adapter) return ST_OK;
    if (folder)
        return status_context(weights_load(w, l->dev, folder), "the KL term's reference model");
    device_copy(l->dev, w->base, l->policy->base, w->canary_offset);
    return device_sync(l->dev);
}

enum status learner_mix_reference(struct learner *l, double alpha)
{
    const struct weights *reference = l->ref_weights;
    enum status st = ST_OK;
    const int64_t largest = weights_largest(reference);
    if (alpha == 1) return learner_set_reference(l, NULL);
    float *now = malloc(2 * (size_t)largest * sizeof *now), *own = now + largest;
    if (!now) return status_fail(ST_NO_MEMORY, "no memory to mix the reference model");
    for (int i = 0; i < reference->n_tensors; i++) {
        CHECK(weights_read(l->policy, l->dev, i, now));
        CHECK(weights_read(reference, l->dev, i, own));
        for (int64_t k = 0; k < reference->tensors[i].n; k++)
            own[k] = (float)(alpha * now[k] + (1 - alpha) * own[k]);
        CHECK(weights_write(reference, l->dev, i, own));
    }
    weights_quantise(reference, l->dev);
    st = device_sync(l->dev);
out:
    free(now);
    return status_context(st, "the KL term's reference model");
}

static enum status reference_new(struct learner *l)
{
    enum status st = ST_OK;
    if (!l->options.adapter) {
        CHECK(weights_plan(l->config, l->policy->dt, &l->ref_weights));
        l->ref_weights->comm = l->policy->comm;
        CHECK(weights_alloc(l->ref_weights, l->dev));
        CHECK(learner_set_reference(l, NULL));
        l->info.reference = l->ref_weights;
    }
    CHECK(model_new(l->dev, l->config, l->ref_weights ? l->ref_weights : l->policy,
                    l->options.token_budget, l->options.logits_chunk, l->options.max_context,
                    &l->ref_model));
    l->ref_model->comm = l->options.shards;
out:
    return status_context(st, "the KL term's reference model");
}

// ---- what is taken ------------------------------------------------------------------------------

// A draft's part of learner_prepare() ends where the policy's batch begins.
static enum status prepare_rows(struct learner *l)
{
    float **const lists[] = {&l->logprobs,   &l->entropy,  &l->ref_logprobs,
                             &l->dlogprobs,  &l->dentropy, &l->ddivergence,
                             &l->divergence, &l->overlap,  &l->agrees};
    const size_t n = (size_t)l->max_targets, n_lists = sizeof lists / sizeof *lists;
    float *all = l->logprobs = malloc(n_lists * n * sizeof *all);
    l->targets = malloc(n * sizeof *l->targets);
    if (!all || !l->targets)
        return status_fail(ST_NO_MEMORY, "no memory for %zu log-probabilities", n);
    for (size_t i = 0; i < n_lists; i++) *lists[i] = all + i * n;
    if (l->options.is_draft && !l->config->mtp) return ST_OK;
    enum status st =
        batch_new(l->dev, l->options.token_budget, max_nodes(l), 0, l->max_targets, &l->batch);
    if (l->config->mtp) {
        const size_t bytes = (size_t)l->options.token_budget * sizeof *l->before;
        if (!(l->before_host = malloc(bytes)))
            return status_fail(ST_NO_MEMORY, "no memory for %zu bytes", bytes);
        return st == ST_OK ? device_alloc(l->dev, bytes, (void **)&l->before) : st;
    }
    if (st == ST_OK && l->teacher && l->taught.prompts)
        st = batch_new(l->dev, l->options.token_budget, max_nodes(l), 0, l->max_targets,
                       &l->teacher_batch);
    if (st == ST_OK && l->options.ranks) {
        if (!(l->ranked = malloc(n * sizeof *l->ranked)))
            return status_fail(ST_NO_MEMORY, "no memory for %zu ranks", n);
        backward_rank(l->backward, l->ranked);
    }
    if (st == ST_OK && l->options.constrained) {
        if (!(l->constraints = malloc(n * sizeof *l->constraints)))
            return status_fail(ST_NO_MEMORY, "no memory for %zu constraints", n);
        st = backward_constrain(l->backward, l->constraints);
    }
    return st;
}

// The masks of a micro-batch, which is committed, in this step of the optimizer.
static void set_dropout(struct learner *l, const struct micro_batch *mb, bool on)
{
    struct lora_dropout dropout = {0};
    if (!l->row_samples) return;
    if (on) {
        const size_t n = (size_t)batch_tokens(l->batch);
        packing_samples(mb, l->row_samples_host);
        device_copy_in(l->dev, l->row_samples, l->row_samples_host, n * sizeof *l->row_samples);
        dropout = (struct lora_dropout){
            .p = l->options.lora_dropout,
            .seed = rng_seed_of(l->options.seed, (int)optimizer_steps(l->info.optimizer)),
            .sample = l->row_samples,
            .position = batch_view(l->batch)->positions};
    }
    adapter_table_drop(l->adapters, &dropout);
}

enum status learner_use_adapter(struct learner *l, const struct adapter *adapter,
                                struct optimizer *optimizer)
{
    enum status st = adapter_table_set(l->adapters, 0, adapter);
    if (st != ST_OK) return st;
    l->info.optimizer = optimizer;
    backward_use_adapter(l->backward, adapter, optimizer_grads(optimizer, 0));
    return ST_OK;
}

// Of the policy's weights; or of an adapter beside them, the only one of a table.
static enum status prepare_backward(struct learner *l)
{
    const struct adapter *adapter = l->options.adapter;
    enum status st;
    if (adapter) {
        CHECK(weights_plan(l->config, DT_F32, &l->frozen));
        CHECK(adapter_table_new(l->dev, l->policy, 1, adapter->max_rank, &l->adapters));
        l->model->adapters = l->adapters;
        if (l->teacher && strcmp(l->taught.model, TEACHER_POLICY) == 0)
            l->teacher->adapters = l->adapters;
    }
    if (adapter && l->options.lora_dropout > 0) {
        const size_t bytes = (size_t)l->options.token_budget * sizeof *l->row_samples;
        if (!(l->row_samples_host = malloc(bytes))) FAIL(ST_NO_MEMORY, "no memory for dropout");
        CHECK(device_alloc(l->dev, bytes, (void **)&l->row_samples));
    }
    CHECK(backward_new(l->model, adapter ? l->frozen : optimizer_grads(l->info.optimizer, 0),
                       l->options.token_budget, l->max_targets, l->options.logits_chunk,
                       &l->backward));
    backward_round(l->backward, (enum gradient_dtype)l->options.gradient_dtype);
    if (adapter && !l->options.many_adapters)
        CHECK(learner_use_adapter(l, adapter, l->info.optimizer));
out:
    return st;
}

enum status learner_prepare(struct learner *l)
{
    const struct learner_config *o = &l->options;
    const size_t balance = balance_bytes(l);
    enum status st;
    CHECK(check_room(&l->info.memory, l->dev));
    l->info.min_shared = shares_prompts(l) ? PACK_PROMPTS : PACK_MIN_SHARED;
    if (!o->is_draft) CHECK(device_reserve(l->dev, l->scratch));
    if (!o->many_adapters) {
        CHECK(optimizer_new(l->dev, &l->trained, o->comm, &o->optimizer, &l->info.optimizer));
        CHECK(optimizer_use_shards(l->info.optimizer, o->shards));
    }
    CHECK(tape_new(l->model, o->token_budget, o->recompute, &l->tape));
    CHECK(prepare_backward(l));
    if (balance > 0) {
        l->balance_host = malloc(balance);
        if (!l->balance_host) FAIL(ST_NO_MEMORY, "no memory for the routers' loads");
        CHECK(device_alloc(l->dev, balance, (void **)&l->balance));
        l->tape->balance = l->balance;
    }
    CHECK(prepare_rows(l));
    if (l->has_reference) CHECK(reference_new(l));
    if (l->info.draft)
        CHECK(status_context(learner_prepare(l->info.draft), "training the draft model"));
out:
    return st;
}

// ---- micro-batches ------------------------------------------------------------------------------

static bool all_zero(const float *x, int n)
{
    for (int i = 0; i < n; i++)
        if (x[i] != 0) return false;
    return true;
}

// What is done with every micro-batch beside the forward pass and the loss.
struct passes {
    bool backward;
    bool last;                  // of all that is added to these gradients
    double rows;                // of all micro-batches and ranks, with a load-balancing loss
    float draft_scale;          // of each target in the draft's loss
    struct update_stats *stats; // NULL: nobody asks
    bool draft;                 // learns too
    struct pack_group *taught;  // the groups as the teacher reads them, where it does so
    struct pack_group *behind;  // the same as the policy's own layer does, at each depth all
    int n_groups;
};

static bool ids_below(const int32_t *ids, int n, int vocab)
{
    for (int i = 0; i < n; i++)
        if (ids[i] >= vocab) return false;
    return true;
}

// depth: from 1 on; at that of a layer that predicts further tokens it reads so many tokens less.
static bool draft_knows(const struct learner *draft, const struct micro_batch *mb,
                        const struct pack_group *groups, int depth)
{
    int vocab = draft->config->vocab_size;
    for (int i = 0; i < mb->n_seqs; i++) {
        const struct pack_group *group = &groups[mb->seqs[i].group];
        const struct pack_completion *c = packed_completion(&mb->seqs[i], groups);
        if (draft->config->mtp && group->n_prompt <= depth) return false; // it has none before
        if (!ids_below(group->prompt, group->n_prompt, vocab)) return false;
        if (!ids_below(c->ids, c->n, vocab)) return false;
        if (!ids_below(c->sequences, c->n_sequences, vocab)) return false;
    }
    return true;
}

// The batch of the policy's own layer, of each token but a sequence's first: what it reads besides
// is the policy's hidden state of the token before, out of the policy's forward pass. At further
// depths, as where it drafts on, of each token but so many, behind what it gave for the token
// before at the depth before, whose packing `before` is, which becomes this one's.
static enum status fill_behind(struct learner *l, const struct micro_batch *mb,
                               const struct passes *passes, int depth, struct packing **before)
{
    struct learner *draft = l->info.draft;
    struct model *m = draft->model;
    const struct pack_group *groups = passes->behind + (size_t)(depth - 1) * passes->n_groups;
    struct packing *again = NULL;
    // What sequences share from their first tokens on is so many tokens less.
    const int least = l->info.min_shared,
              min_shared = least == PACK_PROMPTS ? least : least - depth;
    enum status st;
    CHECK(packing_again(mb, groups, min_shared, &again));
    batch_clear(draft->batch);
    CHECK(packing_fill(again->batches, groups, -1, draft->batch, draft->targets));
    CHECK(batch_commit(draft->batch, 0, 0));
    const int n = batch_tokens(draft->batch);
    packing_before(*before ? (*before)->batches : mb, again->batches, draft->before_host);
    device_copy_in(l->dev, draft->before, draft->before_host, (size_t)n * sizeof *draft->before);
    m->ops->gather_rows(l->dev, m->hidden_in, (*before ? draft : l)->tape->x_final,
                        &(struct gather_args){draft->before, n, m->config->hidden, 1, m->dt, 0, 0});
    if (!*before || m->config->family->mtp_normalised)
        model_normalise(
            m, m->hidden_in, n,
            &(struct norm_args){.x = m->hidden_in,
                                .w = (*before ? draft : l)->policy->at[ROLE_FINAL_NORM]});
    packing_free(*before);
    *before = TAKE_PTR(again);
out:
    packing_free(again);
    return st;
}

// The policy's forward pass of the batch is on its tape, and backward_logprobs() has run on it. No
// gradient goes from a depth to the one before.
static enum status distil(struct learner *l, const struct micro_batch *mb,
                          const struct pack_group *groups, const struct passes *passes)
{
    struct learner *draft = l->info.draft;
    const int n = mb->first[mb->n_seqs];
    const struct batch *batch = draft->config->mtp ? draft->batch : l->batch;
    const struct distillation d = {.teacher = l->model,
                                   .batch = l->batch,
                                   .x = l->tape->x_final,
                                   .kept = l->backward,
                                   .scale = passes->draft_scale,
                                   .ret_divergence = draft->divergence,
                                   .ret_overlap = draft->overlap};
    const struct backward_loss loss = {.temperature = l->options.temperature, .distillation = &d};
    struct packing *before = NULL;
    enum status st = ST_OK;
    void *x;
    for (int depth = 1; depth <= draft->depths && draft_knows(draft, mb, groups, depth); depth++) {
        if (draft->config->mtp) CHECK(fill_behind(l, mb, passes, depth, &before));
        model_forward(draft->model, batch_view(batch), NULL, draft->tape, &x);
        CHECK(backward_run(draft->backward, batch, draft->tape, &loss));
        for (int i = 0; i < n; i++) {
            stats_add(passes->stats, STAT_DRAFT_KL, draft->divergence[i]);
            stats_add(passes->stats, STAT_DRAFT_OVERLAP, draft->overlap[i]);
        }
    }
out:
    packing_free(before);
    return st;
}

// The bins of a completion's positions, by its token.
static enum statistic position_bin(int token)
{
    return token < 32    ? STAT_TEACHER_TO_32
           : token < 128 ? STAT_TEACHER_TO_128
           : token < 512 ? STAT_TEACHER_TO_512
                         : STAT_TEACHER_BEYOND;
}

// What the teacher's distributions of the batch add to the loss; over l->divergence.
static void count_teacher(const struct learner *l, const struct micro_batch *mb,
                          struct update_stats *stats)
{
    for (int s = 0, i = 0; stats && i < mb->first[mb->n_seqs]; i++) {
        while (i >= mb->first[s + 1]) s++;
        if (l->ddivergence[i] == 0) continue;
        const double loss = (double)l->ddivergence[i] * l->divergence[i];
        stats_add(stats, STAT_LOSS, loss);
        stats_add(stats, STAT_EXTRA_LOSS, loss);
        stats_add(stats, STAT_TEACHER_DIVERGENCE, l->divergence[i]);
        stats_add(stats, STAT_TEACHER_AGREES, l->agrees[i]);
        stats_add(stats, position_bin(i - mb->first[s]), l->divergence[i]);
    }
}

static void sum_grads(void *optimizer, int64_t first)
{
    optimizer_sum_grads(optimizer, first);
}

// What was enqueued is waited for where somebody counts, so that it is not taken for the work that
// comes next; there the host has nothing left to do beside it.
static enum status end_of_backward(struct learner *l)
{
    enum status st = l->options.phases ? device_sync(l->dev) : ST_OK;
    phase_timers_lap(l->options.phases, PHASE_BACKWARD);
    return st;
}

// The load-balancing loss of a micro-batch, whose forward pass is on the tape: n_experts / R^2
// times the sum over experts of assignments * probability (struct tape, `balance`), R the rows of
// all layers that have experts.
static enum status balance(struct learner *l, int rows, double all_rows, struct backward_loss *ret)
{
    const int n = config_experts(l->config);
    double sum = 0, layers = 0;
    for (int i = 0; i < l->config->n_layers; i++) layers += l->config->layers[i].moe.n_experts > 0;
    const double scale = rows / all_rows * (n / (rows * layers * (rows * layers)));
    device_copy_out(l->dev, l->balance_host, l->balance, balance_bytes(l));
    enum status st = device_sync(l->dev);
    if (st != ST_OK) return st;
    for (int e = 0; e < n; e++) sum += (double)l->balance_host[e] * l->balance_host[n + e];
    l->info.balance_loss += scale * sum;
    ret->assignments = l->balance;
    ret->balance_scale = (float)(scale * l->options.router_aux_loss_coef);
    return ST_OK;
}

// The teacher's forward pass of a micro-batch: as it is, or behind prompts of its own.
static enum status teach(struct learner *l, const struct micro_batch *mb,
                         const struct passes *passes, struct distillation *ret)
{
    enum status st = ST_OK;
    void *x;
    const struct batch *batch = l->batch;
    struct packing *again = NULL;
    if (l->teacher_batch) {
        batch = ret->batch = l->teacher_batch;
        batch_clear(l->teacher_batch);
        CHECK(packing_again(mb, passes->taught, l->info.min_shared, &again));
        CHECK(packing_fill(again->batches, passes->taught, l->options.adapter ? 0 : -1,
                           l->teacher_batch, l->targets));
        CHECK(batch_commit(l->teacher_batch, 0, 0));
    }
    if (l->teacher->adapters) set_dropout(l, mb, false);
    model_forward(l->teacher, batch_view(batch), NULL, NULL, &x);
    if (l->teacher->adapters) set_dropout(l, mb, true);
    ret->x = x;
out:
    packing_free(again);
    return st;
}

// The gradients of a micro-batch whose loss is known, if it has any.
static enum status learn(struct learner *l, const struct micro_batch *mb,
                         const struct passes *passes, struct backward_loss *loss)
{
    const int n = mb->first[mb->n_seqs];
    const bool taught = l->teacher && !all_zero(l->ddivergence, n);
    const bool of_logprobs = loss->dentropy || !all_zero(l->dlogprobs, n);
    struct distillation d = {.teacher = l->teacher,
                             .beta = l->taught.beta,
                             .scale = 1,
                             .weights = l->ddivergence,
                             .ret_divergence = l->divergence,
                             .ret_overlap = l->overlap,
                             .ret_agrees = l->agrees};
    enum status st = ST_OK;
    // Groups without spread have no gradient to compute, but for their routers' load.
    if (!taught && !of_logprobs && !loss->assignments) return ST_OK;
    if (taught) {
        CHECK(teach(l, mb, passes, &d));
        loss->distillation = &d;
        if (!of_logprobs) loss->dlogprobs = NULL;
    }
    CHECK(backward_run(l->backward, l->batch, l->tape, loss));
    if (taught) count_teacher(l, mb, passes->stats);
out:
    return st;
}

static enum status run_micro_batch(struct learner *l, const struct micro_batch *mb,
                                   const struct pack_group *groups, learner_loss_fn loss,
                                   void *context, const struct passes *passes)
{
    enum status st = ST_OK;
    void *x;
    int n = mb->first[mb->n_seqs];
    const bool backward = passes->backward;
    const float temperature = l->options.temperature;
    struct backward_loss back = {.temperature = temperature, .dlogprobs = l->dlogprobs};
    struct learner_rows rows = {mb,
                                l->logprobs,
                                l->entropy,
                                l->ref_model ? l->ref_logprobs : NULL,
                                l->ranked,
                                l->dentropy,
                                l->teacher ? l->ddivergence : NULL};
    if (n > 0) {
        batch_clear(l->batch);
        CHECK(packing_fill(mb, groups, l->options.adapter ? 0 : -1, l->batch, l->targets));
        if (l->constraints) CHECK(packing_constraints(mb, groups, l->constraints));
        phase_timers_lap(l->options.phases, PHASE_PACK);
        CHECK(end_of_backward(l)); // of the micro-batch before
        CHECK(batch_commit(l->batch, 0, 0));
        set_dropout(l, mb, backward);
        if (l->ref_model) {
            model_forward(l->ref_model, batch_view(l->batch), NULL, NULL, &x);
            CHECK(backward_logprobs(l->backward, l->ref_model, l->batch, x, l->targets, temperature,
                                    l->ref_logprobs, NULL));
        }
        model_forward(l->model, batch_view(l->batch), NULL, backward ? l->tape : NULL, &x);
        CHECK(backward_logprobs(l->backward, NULL, l->batch, x, l->targets, temperature,
                                l->logprobs, l->entropy));
        if (passes->draft) CHECK(distil(l, mb, groups, passes));
        if (backward && l->balance) CHECK(balance(l, mb->n_tokens, passes->rows, &back));
        phase_timers_lap(l->options.phases, PHASE_FORWARD);
    }
    memset(l->dentropy, 0, (size_t)n * sizeof *l->dentropy);
    memset(l->ddivergence, 0, (size_t)n * sizeof *l->ddivergence);
    loss(context, &rows, l->dlogprobs);
    if (!all_zero(l->dentropy, n)) back.dentropy = l->dentropy;
    if (passes->last && !l->options.adapter) back.done = sum_grads;
    back.context = l->info.optimizer;
    if (backward) CHECK(learn(l, mb, passes, &back));
out:
    return st;
}

// What means are over, of all ranks: the rows of the load-balancing loss, and the targets that the
// draft learns from, with the weight of each.
static enum status plan_passes(struct learner *l, const struct packing *packing,
                               const struct pack_group *groups, struct passes *passes)
{
    double sums[2] = {0};
    if (!passes->draft && !(passes->backward && l->balance)) return ST_OK;
    for (int i = 0; i < packing->n; i++) {
        const struct micro_batch *mb = &packing->batches[i];
        const int targets = mb->first[mb->n_seqs];
        if (targets > 0) sums[0] += mb->n_tokens;
        for (int d = 1; passes->draft && d <= l->info.draft->depths; d++)
            if (draft_knows(l->info.draft, mb, groups, d)) sums[1] += targets;
    }
    enum status st = comm_sum_host(l->options.comm, sums, 2);
    passes->rows = sums[0];
    l->info.balance_loss = 0;
    if (!passes->draft) return st;
    passes->stats->draft_targets = (long)sums[1];
    passes->draft_scale = l->info.draft->loss_weight / (float)(sums[1] > 0 ? sums[1] : 1);
    return st;
}

// The groups with other prompts: what the teacher reads, or, at each depth, theirs less so many
// tokens; the caller's to free. depths 0: the former.
static enum status groups_read(const struct pack_group *groups, int n, int depths,
                               struct pack_group **ret)
{
    const int all = depths ? n * depths : n;
    struct pack_group *read = malloc(((size_t)all + 1) * sizeof *read);
    if (!read) return status_fail(ST_NO_MEMORY, "no memory for %d groups", all);
    for (int i = 0; i < all; i++) {
        struct pack_group *group = &read[i];
        *group = groups[i % n];
        if (depths) {
            group->prompt += i / n + 1;
            group->n_prompt -= i / n + 1;
        } else if (group->teacher_prompt) {
            group->prompt = group->teacher_prompt;
            group->n_prompt = group->n_teacher_prompt;
        }
    }
    *ret = read;
    return ST_OK;
}

enum status learner_run(struct learner *l, enum pass_kind kind, const struct pack_group *groups,
                        int n_groups, learner_loss_fn loss, void *context,
                        struct update_stats *stats)
{
    struct passes passes = {.backward = kind >= PASS_GRADIENTS,
                            .stats = stats,
                            .n_groups = n_groups,
                            .draft = kind == PASS_STEP && stats && !stats->again && l->info.draft};
    struct packing *packing = NULL;
    enum status st;
    if (l->teacher_batch && passes.backward)
        CHECK(groups_read(groups, n_groups, 0, &passes.taught));
    if (passes.draft && l->info.draft->config->mtp)
        CHECK(groups_read(groups, n_groups, l->info.draft->depths, &passes.behind));
    if (kind == PASS_STEP) optimizer_clear_grads(l->info.optimizer);
    if (passes.draft) optimizer_clear_grads(l->info.draft->info.optimizer);
    CHECK(packing_new(groups, n_groups, l->options.token_budget, l->info.min_shared, &packing));
    CHECK(plan_passes(l, packing, groups, &passes));
    // The last one packed, which is seldom full, goes first: sums of gradients over ranks run
    // beside the last one learned from.
    for (int i = packing->n - 1; i >= 0; i--) {
        passes.last = kind == PASS_STEP && !passes.draft && i == 0;
        CHECK(run_micro_batch(l, &packing->batches[i], groups, loss, context, &passes));
    }
    st = end_of_backward(l);
out:
    packing_free(packing);
    free(passes.taught);
    free(passes.behind);
    return st;
}
