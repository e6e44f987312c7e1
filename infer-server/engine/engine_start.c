/* engine_start.c: from options to an engine that can step: the options are checked and completed,
 * the folders' configs held against one another, the device opened, the weights loaded, and
 * everything that steps need allocated. The main thread up to engine_load_configs(), then the
 * engine's.
 *
 * A draft of other tokens is not wrong, verification sees to that; it only never saves a step, and
 * says nothing. What another tokenizer's model writes with the policy would be nonsense. So folders
 * of further models are held against the policy's. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/engine_thread.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/model/model_folder.h"
#include "infer-server/engine/drafting.h"
#include "infer-server/engine/logprobs.h"
#include "infer-server/engine/masks_ahead.h"
#include <stdlib.h>
#include <string.h>

#define DEFAULT_MAX_CONTEXT 32768
#define ROWS_APART          512 // of a step, beside its decoding samples', at most

const char *const kv_policy_names[] = {"keep", "recompute", "drain", NULL};

// ---- options -----------------------------------------------------------------------------------

enum status engine_check_options(struct engine_options *o)
{
    if (!o->max_batch) o->max_batch = ENGINE_MAX_BATCH;
    if (!o->prefill_chunk) o->prefill_chunk = ENGINE_PREFILL_CHUNK;
    if (!o->block_size) o->block_size = ENGINE_BLOCK_SIZE;
    if (!o->max_queue) o->max_queue = ENGINE_MAX_QUEUE;
    if (o->max_batch < 1 || o->max_batch > 4096)
        return status_fail(ST_INVALID, "--max-batch %lld: it must be 1 to 4096",
                           (long long)o->max_batch);
    if (o->prefill_chunk < 1 || o->prefill_chunk > 1 << 20)
        return status_fail(ST_INVALID, "a prefill chunk of %lld tokens: it must be 1 to %d",
                           (long long)o->prefill_chunk, 1 << 20);
    if (o->block_size < 1 || o->block_size > BLOCK_SIZE_MAX)
        return status_fail(ST_INVALID, "KV blocks of %lld tokens: they must hold 1 to %d",
                           (long long)o->block_size, BLOCK_SIZE_MAX);
    if (o->max_context < 0 || o->max_queue < 0 || o->kv_bytes < 0)
        return status_fail(ST_INVALID,
                           "--max-context, the queue and --kv-memory cannot be negative");
    if (!(o->kv_percent >= 0 && o->kv_percent <= 100))
        return status_fail(ST_INVALID, "--kv-memory %g%%: it must be 0%% to 100%%", o->kv_percent);
    enum status st = check_drafts(o, o->speculative, "--speculative");
    if (st != ST_OK) return st;
    if (o->speculative.k[SPECULATIVE_MTP] && o->speculative.k[SPECULATIVE_DRAFT_MODEL])
        return status_fail(ST_UNSUPPORTED,
                           "--speculative: one model drafts beside the policy, its own layer (mtp) "
                           "or another (draft_model); leave one of them away");
    if (o->draft_vocabulary > 0 && !o->speculative.k[SPECULATIVE_MTP] &&
        !o->speculative.k[SPECULATIVE_DRAFT_MODEL])
        return status_fail(ST_INVALID,
                           "--draft-vocabulary %lld: it is of what a model drafts; give "
                           "--speculative mtp or draft_model, or leave it away",
                           (long long)o->draft_vocabulary);
    if (!o->bridge_path || !o->bridge_path[0])
        return status_fail(ST_INVALID, "--bridge: a path is needed");
    if (!o->socket_path || !o->socket_path[0])
        return status_fail(ST_INVALID, "--socket: a path is needed");
    return ST_OK;
}

// ---- models ------------------------------------------------------------------------------------

// A model beside the policy. Token ids must mean the same to both. Where both folders have a
// tokenizer the tokens themselves are compared, by who loads them (server.c), and a draft's
// vocabulary may be the smaller: larger models pad theirs further. Where one has none, sizes must
// be equal and the end tokens, if both name some, must share one; that no more could be compared is
// logged. ST_MISMATCH says what differs.
struct further_model {
    const char *option, *what; // "--draft", "draft model"
    const char *folder;
    bool reads_all; // what the policy writes, so that its vocabulary must not be the smaller
};

// None in common, though both have some.
static bool ends_differ(const struct model_config *a, const struct model_config *b)
{
    for (int i = 0; i < a->n_eos; i++)
        for (int k = 0; k < b->n_eos; k++)
            if (a->eos_ids[i] == b->eos_ids[k]) return false;
    return a->n_eos > 0 && b->n_eos > 0;
}

static enum status check_sizes(const struct further_model *m, const struct model_config *config,
                               const char *policy_folder, const struct model_config *policy)
{
    const char *bare = !model_file_exists(m->folder, "tokenizer.json")       ? m->folder
                       : !model_file_exists(policy_folder, "tokenizer.json") ? policy_folder
                                                                             : NULL;
    const int vocab = config->vocab_size;
    if (vocab > policy->vocab_size)
        return status_fail(ST_MISMATCH,
                           "%s %s: its vocabulary of %d tokens is larger than the %d of %s; a %s "
                           "must be of the same tokenizer",
                           m->option, m->folder, vocab, policy->vocab_size, policy_folder, m->what);
    if (vocab != policy->vocab_size && m->reads_all)
        return status_fail(ST_MISMATCH,
                           "%s %s: its vocabulary of %d tokens is smaller than the %d of %s; a %s "
                           "must know every token that the policy may write",
                           m->option, m->folder, vocab, policy->vocab_size, policy_folder, m->what);
    if (!bare) return ST_OK;
    if (vocab != policy->vocab_size)
        return status_fail(ST_MISMATCH,
                           "%s %s: its vocabulary of %d tokens is not the %d of %s, and %s "
                           "has no tokenizer.json to compare them by; a %s must be of the "
                           "same tokenizer: if it is, copy tokenizer.json there",
                           m->option, m->folder, vocab, policy->vocab_size, policy_folder, bare,
                           m->what);
    if (ends_differ(config, policy))
        return status_fail(ST_MISMATCH,
                           "%s %s: it ends texts with token %d, %s with %d, and %s has no "
                           "tokenizer.json to compare them by; a %s must be of the same "
                           "tokenizer: if it is, copy tokenizer.json there",
                           m->option, m->folder, config->eos_ids[0], policy_folder,
                           policy->eos_ids[0], bare, m->what);
    log_info("%s has no tokenizer.json: %s and policy are compared by the size of the "
             "vocabulary (%d) and end tokens alone",
             bare, m->what, vocab);
    return ST_OK;
}

static enum status read_further(const struct further_model *m, const char *policy_folder,
                                const struct model_config *policy, struct model_config **ret)
{
    struct model_config *config = NULL;
    enum status st = status_context(model_config_load(m->folder, &config), "%s", m->option);
    if (st == ST_OK) st = check_sizes(m, config, policy_folder, policy);
    if (st == ST_OK)
        *ret = config;
    else
        model_config_free(config);
    return st;
}

// The folder whose layer predicts further tokens: the model's, or a checkpoint's of such a layer.
static const char *mtp_folder(const struct engine_options *o)
{
    return o->draft_folder ? o->draft_folder : o->model_folder;
}

static const char *folder_of(const struct engine_options *o, enum runner_role role)
{
    if (role == RUNNER_DRAFT)
        return o->speculative.k[SPECULATIVE_MTP] ? mtp_folder(o) : o->draft_folder;
    return role == RUNNER_POLICY ? o->model_folder : o->frozen_folder;
}

static enum status take_mtp(const struct engine_options *o, const struct model_config *policy,
                            struct model_config **ret)
{
    const char *folder = mtp_folder(o);
    enum status st = ST_OK;
    if (!*ret) CHECK(model_config_load(folder, ret));
    CHECK(model_config_take_mtp(folder, *ret));
    if ((*ret)->hidden != policy->hidden || (*ret)->vocab_size != policy->vocab_size)
        FAIL(ST_MISMATCH,
             "--draft %s: its layer is of a model of hidden_size %d and a vocabulary of %d, and "
             "--model has %d and %d",
             folder, (*ret)->hidden, (*ret)->vocab_size, policy->hidden, policy->vocab_size);
out:
    return status_context(st, "--speculative mtp");
}

enum status engine_load_configs(const struct engine_options *o, struct model_config *ret[RUNNERS])
{
    const struct further_model draft = {"--draft", "draft model", o->draft_folder, false};
    const struct further_model frozen = {"--tandem-model", "frozen model", o->frozen_folder, true};
    struct model_config **policy = &ret[RUNNER_POLICY], **other = &ret[RUNNER_FROZEN];
    enum status st;
    CHECK(model_config_load(o->model_folder, policy));
    if (o->draft_folder) CHECK(read_further(&draft, o->model_folder, *policy, &ret[RUNNER_DRAFT]));
    if (o->speculative.k[SPECULATIVE_MTP]) CHECK(take_mtp(o, *policy, &ret[RUNNER_DRAFT]));
    if (ret[RUNNER_DRAFT] && o->draft_vocabulary > ret[RUNNER_DRAFT]->vocab_size)
        FAIL(ST_INVALID,
             "--draft-vocabulary %lld: the vocabulary has %d tokens; give fewer, or leave it away",
             (long long)o->draft_vocabulary, ret[RUNNER_DRAFT]->vocab_size);
    if (ret[RUNNER_DRAFT]) model_config_predict_first(ret[RUNNER_DRAFT], o->draft_vocabulary);
    if (o->frozen_folder) {
        CHECK(read_further(&frozen, o->model_folder, *policy, other));
        // What both write ends where the policy's texts end.
        memcpy((*other)->eos_ids, (*policy)->eos_ids, sizeof(*other)->eos_ids);
        (*other)->n_eos = (*policy)->n_eos;
    }
    // Once for all who compute with these weights: the bridge file tells it to trainers.
    const int context = executor_requested_context(*policy, (int)o->max_context);
    CHECK(model_config_quantise(*policy, (enum quantization)o->quantization, o->inference_only));
    for (int i = 0; i < RUNNERS; i++) {
        struct model_config *c = ret[i];
        if (!c) continue;
        c->kv_cache = (enum kv_cache)o->kv_cache;
        c->rope_context =
            i == RUNNER_DRAFT && c->max_positions < context ? c->max_positions : context;
        if (i != RUNNER_FROZEN)
            model_config_draft_ahead(c, i == RUNNER_DRAFT ? SPECULATIVE_MAX
                                                          : speculative_max(o->speculative));
        c->expert_parallel = o->expert_parallel && (i == RUNNER_POLICY || config_experts(c) > 0);
        if (o->who.size > 1)
            CHECK(status_context(model_config_shard(c, (struct shard){o->who.rank, o->who.size}),
                                 "%s", folder_of(o, i)));
    }
out:
    return st;
}

// ---- what steps need ---------------------------------------------------------------------------

int executor_requested_context(const struct model_config *config, int named)
{
    const int max_positions = config->max_positions;
    if (named > 0) return named;
    return max_positions < DEFAULT_MAX_CONTEXT ? max_positions : DEFAULT_MAX_CONTEXT;
}

static enum status add_draft_model(struct executor *x, const struct weights *weights,
                                   const struct engine_options *options, int context)
{
    const struct draft_model_limits limits = {.max_batch = options->max_batch,
                                              .prefill_chunk = options->prefill_chunk,
                                              .max_drafts = drafting_rows(options),
                                              .shared_noise = options->exact};
    const struct runner_limits own =
        draft_model_runner_limits(&limits, weights->config, context, options->block_size);
    struct runner **runner = &x->runners[RUNNER_DRAFT];
    const struct runner *policy = x->runners[RUNNER_POLICY];
    enum status st = runner_new(policy->dev, weights, &own, runner);
    if (st == ST_OK) st = runner_use_group(*runner, RUNNER_DRAFT, policy->group);
    if (st != ST_OK) return status_context(st, "the draft model");
    return draft_model_new(*runner, policy->model, &limits, &x->draft_model);
}

// Rows of a step beside its decoding samples': what a tandem has missed.
static int rows_apart(int max_batch)
{
    const int missed = EXECUTOR_MISSED_APART * max_batch;
    return missed < ROWS_APART ? missed : ROWS_APART;
}

static enum status add_frozen_model(struct executor *x, const struct weights *weights, int context)
{
    const struct runner_limits own = x->runners[RUNNER_POLICY]->limits;
    if (context > weights->config->max_positions)
        return status_fail(ST_INVALID,
                           "--tandem-model: it has a context of %d tokens, and %d are served; "
                           "give --max-context %d or less",
                           weights->config->max_positions, context, weights->config->max_positions);
    struct runner *policy = x->runners[RUNNER_POLICY], **runner = &x->runners[RUNNER_FROZEN];
    enum status st = runner_new(policy->dev, weights, &own, runner);
    if (st == ST_OK) st = runner_use_group(*runner, RUNNER_FROZEN, policy->group);
    return status_context(st, "the frozen model");
}

// Whether those that write samples carry states along them: a draft model alone shares none.
static bool writes_states(const struct executor *x)
{
    const struct runner *policy = x->runners[RUNNER_POLICY], *frozen = x->runners[RUNNER_FROZEN];
    return config_state_elements(policy->config) > 0 ||
           (frozen && config_state_elements(frozen->config) > 0);
}

// Whether somebody finds them again: without a prefix cache the samples of a tandem's group alone.
static bool keeps_states(const struct executor *x, const struct engine_options *options)
{
    return writes_states(x) && (!options->prefix_cache_off || x->runners[RUNNER_FROZEN]);
}

// Drafts by which states are taken back, the policy's by fewer than a draft model's; 0: none is.
static int draft_ahead(const struct executor *x)
{
    const struct runner *draft = x->runners[RUNNER_DRAFT];
    const int n = x->runners[RUNNER_POLICY]->config->ahead;
    return n > 0 || !draft ? n : draft->config->ahead;
}

// The pools take what memory is left: a block of each runner's for every block there is.
static enum status allocate_kv(struct executor *x, const struct engine_options *options,
                               int context)
{
    const struct runner *policy = x->runners[RUNNER_POLICY];
    // States are taken back by what the server's options draft, and no further.
    const bool drafts =
        config_state_elements(policy->config) == 0 || speculative_max(options->speculative) > 0;
    const struct kv_request request = {.bytes = options->kv_bytes,
                                       .percent = options->kv_percent,
                                       .block_size = options->block_size,
                                       .max_batch = options->max_batch,
                                       .keeps = keeps_states(x, options),
                                       .max_context = context,
                                       .context_is_firm = options->max_context > 0,
                                       .block_bytes = x->block_bytes,
                                       .state_bytes = x->state_bytes};
    struct kv_plan plan = {0};
    enum status st = kv_memory_plan(policy->dev, &request, &plan);
    const int n_blocks = plan.n_blocks;
    x->n_states = plan.max_batch + plan.n_kept;
    x->max_batch = plan.max_batch;
    x->max_drafts = drafts ? drafting_rows(options) : 0;
    x->max_context = plan.max_context;
    if (st == ST_OK) st = runner_allocate_kv(x->runners[RUNNER_POLICY], n_blocks, x->n_states);
    if (st == ST_OK && x->draft_model)
        st = draft_model_allocate_kv(x->draft_model, n_blocks, x->n_states);
    if (st == ST_OK && x->runners[RUNNER_FROZEN])
        st = runner_allocate_kv(x->runners[RUNNER_FROZEN], n_blocks, x->n_states);
    if (st == ST_OK) st = block_manager_new(n_blocks, options->block_size, &x->manager);
    return st;
}

// Followers are told a step's tokens, and who writes with another needs them.
static bool goes_ahead(const struct executor *x, enum step_ahead choice)
{
    const bool cuda = device_kind(x->runners[RUNNER_POLICY]->dev) == DEVICE_CUDA;
    return !x->runners[RUNNER_FROZEN] &&
           (choice == STEP_AHEAD_ON || (choice == STEP_AHEAD_AUTO && cuda));
}

static enum status make_ahead(struct executor *x, int max_batch)
{
    const enum status st = runner_make_sides(x->runners[RUNNER_POLICY]);
    return st == ST_OK ? masks_ahead_new(max_batch, &x->masks) : st;
}

enum status executor_new(struct device *dev, const struct weights *const weights[RUNNERS],
                         struct group *group, const struct engine_options *options,
                         engine_event_fn on_event, void *context, struct engine_stats *stats,
                         struct executor **ret)
{
    enum status st = ST_OK;
    const struct model_config *config = weights[RUNNER_POLICY]->config;
    const int max_batch = options->max_batch, chunk = options->prefill_chunk;
    const int requested = executor_requested_context(config, options->max_context);
    const int max_rows = max_batch + drafting_rows(options);
    const int apart = weights[RUNNER_FROZEN] ? rows_apart(max_batch) : 0;
    const int max_seqs = max_rows > max_batch + apart ? max_rows : max_batch + apart;
    struct executor *x = calloc(1, sizeof *x);
    if (!x) return status_fail(ST_NO_MEMORY, "no memory for an executor");
    if (requested > config->max_positions)
        FAIL(ST_INVALID,
             "--max-context %d is over the model's %d positions; give as many at most, or 0",
             requested, config->max_positions);
    const struct runner_limits own = {.max_tokens = max_seqs + chunk,
                                      .max_seqs = max_seqs,
                                      .max_rows = max_rows,
                                      .max_context = requested,
                                      .block_size = options->block_size};
    CHECK(runner_new(dev, weights[RUNNER_POLICY], &own, &x->runners[RUNNER_POLICY]));
    CHECK(runner_use_group(x->runners[RUNNER_POLICY], RUNNER_POLICY, group));
    CHECK(prompt_logprobs_new(x->runners[RUNNER_POLICY], &x->prompt_logprobs));
    if (weights[RUNNER_DRAFT]) {
        CHECK(add_draft_model(x, weights[RUNNER_DRAFT], options, requested));
        x->runners[RUNNER_POLICY]->drafts = draft_model_logits(x->draft_model);
    }
    if (weights[RUNNER_FROZEN]) CHECK(add_frozen_model(x, weights[RUNNER_FROZEN], requested));
    x->token_ends = options->token_ends;
    x->n_token_ends = options->token_ends ? options->n_token_ends : 0;
    x->stats = stats;
    x->on_event = on_event;
    x->context = context;
    for (int i = 0; i < RUNNERS; i++)
        if (x->runners[i]) {
            x->block_bytes += kv_memory_block_bytes(x->runners[i]->config, x->runners[i]->model->dt,
                                                    options->block_size);
            x->state_bytes += kv_memory_state_bytes(x->runners[i]->config);
        }
    CHECK(allocate_kv(x, options, requested));
    CHECK(
        drafting_new(options, x->draft_model, x->max_drafts, draft_ahead(x), stats, &x->drafting));
    const int n_kept = keeps_states(x, options) ? x->n_states - x->max_batch : -1;
    const struct scheduler_limits limits = {x->max_batch, chunk, writes_states(x), n_kept};
    CHECK(scheduler_new(&limits, x->manager, &x->scheduler));
    x->max_events = max_rows;
    x->item_end = malloc((size_t)max_batch * sizeof *x->item_end);
    x->constrained = malloc((size_t)max_batch * sizeof *x->constrained);
    x->events = malloc((size_t)max_rows * sizeof *x->events);
    x->records = malloc((size_t)max_rows * sizeof *x->records);
    if (!x->item_end || !x->constrained || !x->events || !x->records)
        FAIL(ST_NO_MEMORY, "no memory for steps of %d sequences", max_batch);
    x->drafts = speculative_max(options->speculative) > 0;
    CHECK(drafting_measure(x->drafting, x->runners, x->max_batch));
    x->ahead = !group && goes_ahead(x, options->step_ahead);
    if (x->ahead) CHECK(make_ahead(x, max_batch));
    CHECK(device_sync(dev));
    *ret = x;
    return ST_OK;
out:
    executor_free(x);
    return st;
}

void executor_free(struct executor *x)
{
    if (!x) return;
    free(x->item_end);
    free(x->constrained);
    if (x->masks) device_sync(x->runners[RUNNER_POLICY]->dev); // whose calls wait for masks
    masks_ahead_free(x->masks);
    free(x->events);
    free(x->records);
    drafting_free(x->drafting);
    draft_model_free(x->draft_model);
    scheduler_free(x->scheduler);
    block_manager_free(x->manager);
    prompt_logprobs_free(x->prompt_logprobs);
    for (int i = 0; i < RUNNERS; i++) runner_free(x->runners[i]);
    free(x);
}

// ---- the engine --------------------------------------------------------------------------------

enum status engine_open_device(struct engine *e)
{
    enum status st = group_open_device(e->options.device, &e->options.who, &e->dev);
    if (st != ST_OK) return st;
    if (e->options.dtype < 0) e->options.dtype = device_default_dtype(e->dev);
    if (!device_computes_in(e->dev, (enum dtype)e->options.dtype))
        return status_fail(ST_UNSUPPORTED, "--dtype %s: %s computes in %s only",
                           dtype_name((enum dtype)e->options.dtype), device_name(e->dev),
                           dtype_name(device_default_dtype(e->dev)));
    const int quantization = e->options.quantization, kv_cache = e->options.kv_cache;
    if ((quantization || kv_cache) && !device_computes_in(e->dev, DT_E4M3))
        return status_fail(ST_UNSUPPORTED,
                           "--%s %s: %s (%s) has no e4m3, as GPUs have from compute "
                           "capability 8.9 on, and --device cpu; leave it away",
                           quantization ? "quantization" : "kv-cache-dtype",
                           quantization ? quantization_names[quantization]
                                        : kv_cache_names[kv_cache],
                           device_name(e->dev), device_spec(e->dev));
    if (e->options.exact && !device_is_exact(e->dev, (enum dtype)e->options.dtype))
        return status_fail(
            ST_UNSUPPORTED,
            "--exact: in %s on %s (%s) the last bits of a row depend on the batch it is computed "
            "in; they do not in bf16 on a GPU of compute capability 9.0 (Hopper) and on --device "
            "cpu: take one of these, or leave --exact away",
            dtype_name((enum dtype)e->options.dtype), device_name(e->dev), device_spec(e->dev));
    if (e->options.exact && device_kind(e->dev) == DEVICE_CUDA)
        log_info("engine: --exact: on %s every operation's sums are in one order, with it and "
                 "without; it couples a draft model's drafts and drafts without looking at a clock",
                 device_name(e->dev));
    return group_open(e->dev, e->options.bridge_path, &e->options.who, &e->group);
}

static void log_config(const struct weights *w, const char *folder)
{
    const struct model_config *config = w->config;
    char words[256];
    if (weights_describe_stored(w, words, sizeof words)) log_info("engine: %s: %s", folder, words);
    if (rope_describe(config, words, sizeof words)) log_info("engine: %s: %s", folder, words);
    if (left_out_describe(config, words, sizeof words)) log_info("engine: %s: %s", folder, words);
}

static void log_states(const struct engine *e)
{
    const struct executor *x = e->executor;
    const bool policy = config_state_elements(e->configs[RUNNER_POLICY]) > 0;
    if (x->state_bytes == 0) return;
    log_info("engine: %s carries a state of %.1f MB along each sequence: memory has room for %d "
             "sequences at once (--max-batch %lld)",
             policy             ? e->options.model_folder
             : writes_states(x) ? e->options.frozen_folder
                                : e->options.draft_folder,
             (double)x->state_bytes / 1e6, x->max_batch, (long long)e->options.max_batch);
    if (keeps_states(x, &e->options))
        log_info("engine: the prefix cache has room for %d states of prompts, and for as many more "
                 "as fewer sequences run",
                 x->n_states - x->max_batch);
}

// Of a model beside the policy: its part of the pool's bytes is in the line before.
static void log_further(const struct engine *e, const char *what, const char *folder,
                        const struct weights *w)
{
    const struct engine_stats *s = &e->live;
    const int64_t kv_bytes =
        kv_memory_block_bytes(w->config, w->dt, s->kv_block_tokens) * s->kv_blocks_total;
    log_info("engine: %s %s: %.1f MB of weights, %.1f of the KV blocks' MB", what, folder,
             (double)w->bytes / 1e6, (double)kv_bytes / 1e6);
    log_config(w, folder);
}

// How the layers' matrices are held.
static void log_quantization(const struct weights *w)
{
    const enum quantization q = w->config->quantization;
    if (!w->twin) return;
    const double mb = (double)w->twin->canary_offset / 1e6;
    if (q == QUANTIZATION_MXFP4)
        log_info("engine: --quantization mxfp4: experts are held in four bits, %.1f MB of these "
                 "weights: adapters are trained beside them, they themselves are not",
                 mb);
    else
        log_info("engine: --quantization %s: the layers' matrices%s are multiplied in e4m3, %.1f "
                 "MB of these weights%s",
                 quantization_names[q],
                 q == QUANTIZATION_FP8 ? ", and the rows that they take," : "", mb,
                 w->config->twin_alone ? ", and there is no other copy of them" : "");
}

enum status engine_load(struct engine *e)
{
    enum status st = ST_OK;
    struct weights_owner *owner = NULL;
    const struct engine_options *o = &e->options;
    const int64_t start_ns = clock_now_ns();
    struct weights_source sources[WEIGHTS_ROLES];
    for (int i = 0; i < WEIGHTS_ROLES; i++)
        sources[i] = (struct weights_source){e->configs[i], folder_of(o, (enum runner_role)i)};
    CHECK(weights_owner_new(e->dev, e->group, sources, (enum dtype)o->dtype, o->inference_only,
                            o->bridge_path, &owner));
    const struct weights *weights[RUNNERS];
    for (int i = 0; i < RUNNERS; i++)
        weights[i] = weights_owner_weights(owner, (enum weights_role)i);
    const struct weights *draft = weights[RUNNER_DRAFT], *frozen = weights[RUNNER_FROZEN];
    e->live.weight_bytes = (int64_t)weights[RUNNER_POLICY]->bytes;
    e->live.draft_weight_bytes = draft ? (int64_t)draft->bytes : 0;
    e->live.frozen_weight_bytes = frozen ? (int64_t)frozen->bytes : 0;
    if (o->max_adapters)
        CHECK(weights_owner_hold_adapters(owner, (int)o->max_adapters, (int)o->max_lora_rank));
    CHECK(executor_new(e->dev, weights, e->group, o, engine_on_event, e, &e->live, &e->executor));
    executor_use_adapters(e->executor, weights_owner_adapters(owner));
    e->live.weight_version = control_version(weights_owner_control(owner));
    scheduler_update(e->executor->scheduler, e->live.weight_version, false);
    pthread_mutex_lock(&e->lock);
    e->max_context = e->executor->max_context; // before anybody reads the bridge file, and asks
    pthread_mutex_unlock(&e->lock);
    CHECK(weights_owner_announce(owner, o->socket_path));
    pthread_mutex_lock(&e->lock);
    e->owner = owner;
    pthread_mutex_unlock(&e->lock);
    engine_set_state(e, ENGINE_OK, "");
    log_info("engine: %s on %s in %.1f s: %.1f MB of weights (%s), context %d, %d KV blocks of %d "
             "tokens (%.1f MB)",
             o->model_folder, device_name(e->dev), clock_ms_since(start_ns) / 1e3,
             (double)e->live.weight_bytes / 1e6, dtype_name((enum dtype)o->dtype), e->max_context,
             e->live.kv_blocks_total, e->live.kv_block_tokens,
             (double)e->live.kv_blocks_total * (double)e->live.kv_bytes_per_block / 1e6);
    log_config(weights[RUNNER_POLICY], o->model_folder);
    log_quantization(weights[RUNNER_POLICY]);
    log_states(e);
    if (draft)
        log_further(e, draft->config->mtp ? "layer that predicts further tokens of" : "draft model",
                    folder_of(o, RUNNER_DRAFT), draft);
    if (frozen) log_further(e, "frozen model", o->frozen_folder, frozen);
    if (frozen && speculative_max(o->speculative) > 0)
        log_info("engine: requests with \"tandem\" draft nothing");
    return ST_OK;
out:
    executor_free(e->executor);
    e->executor = NULL;
    weights_owner_free(owner);
    return st;
}
