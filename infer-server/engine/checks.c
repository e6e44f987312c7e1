/* checks.c: see engine_thread.h. No state. A draft of other tokens is not wrong, verification sees
 * to that; it only never saves a step, and says nothing. What another tokenizer's model writes with
 * the policy would be nonsense. So folders of further models are held against the policy's. */
#include "infer-server/engine/engine_thread.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/model/model_folder.h"
#include <math.h>

#define DEFAULT_BATCH 64
#define DEFAULT_CHUNK 512
#define DEFAULT_BLOCK 16
#define DEFAULT_QUEUE 1024

// ---- what it is started with -------------------------------------------------------------------

static enum status check_choice(const struct engine_options *o, struct speculative_choice choice,
                                const char *where)
{
    for (int m = 0; m < SPECULATIVE_METHODS; m++)
        if (choice.k[m] < 0 || choice.k[m] > SPECULATIVE_MOST)
            return status_fail(ST_INVALID, "%s: K is %d; it must be 1 to %d", where, choice.k[m],
                               SPECULATIVE_MOST);
    if (choice.k[SPECULATIVE_DRAFT_MODEL] && !o->draft_folder)
        return status_fail(ST_INVALID,
                           "%s: draft_model needs a draft model, and the server was started "
                           "without one; start it with --draft DIR",
                           where);
    return ST_OK;
}

// What several ranks do not share yet.
static enum status check_ranks(const struct engine_options *o)
{
    const struct {
        bool given;
        const char *option, *why;
    } alone[] = {
        {o->draft_folder, "--draft", "a draft model has no shards"},
        {o->frozen_folder, "--tandem-model", "a frozen model has no shards"},
        {o->max_adapters > 0, "--max-adapters", "LoRA adapters have no shards"},
    };
    for (size_t i = 0; o->who.size > 1 && i < sizeof alone / sizeof *alone; i++)
        if (alone[i].given)
            return status_fail(ST_UNSUPPORTED,
                               "%s does not go with --tensor-parallel-size %d: %s; leave one of "
                               "them away",
                               alone[i].option, o->who.size, alone[i].why);
    return ST_OK;
}

enum status checks_options(struct engine_options *o)
{
    if (!o->max_batch) o->max_batch = DEFAULT_BATCH;
    if (!o->prefill_chunk) o->prefill_chunk = DEFAULT_CHUNK;
    if (!o->block_size) o->block_size = DEFAULT_BLOCK;
    if (!o->max_queue) o->max_queue = DEFAULT_QUEUE;
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
    enum status st = check_choice(o, o->speculative, "--speculative");
    if (st != ST_OK) return st;
    st = check_ranks(o);
    if (st != ST_OK) return st;
    if (!o->bridge_path || !o->bridge_path[0])
        return status_fail(ST_INVALID, "--bridge: a path is needed");
    if (!o->socket_path || !o->socket_path[0])
        return status_fail(ST_INVALID, "--socket: a path is needed");
    return ST_OK;
}

enum status checks_states(const struct engine_options *o, const struct model_config *policy,
                          const struct model_config *frozen)
{
    if (frozen && config_state_elements(frozen) > 0 && config_state_elements(policy) == 0)
        return status_fail(
            ST_UNSUPPORTED,
            "--tandem-model %s: it carries a state along each sequence, which is not "
            "shared among samples that two models write; give a model without one",
            o->frozen_folder);
    return ST_OK;
}

// Each draft takes memory for a state of its own; and a sequence's state cannot go on to where
// another model wrote.
static enum status check_states(const struct engine_options *o, const struct model_config *config,
                                const struct sampling *s)
{
    if (config_state_elements(config) == 0) return ST_OK;
    if (speculative_most(s->speculative) > 0 && speculative_most(o->speculative) == 0)
        return status_fail(ST_UNSUPPORTED,
                           "speculative: this model carries a state along each sequence, and the "
                           "server has no memory for those of drafts; start it with --speculative, "
                           "or leave \"speculative\" out");
    if (s->tandem.on)
        return status_fail(
            ST_UNSUPPORTED,
            "tandem: this model carries a state along each sequence, and writes none "
            "together with another; leave \"tandem\" out");
    return ST_OK;
}

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

enum status checks_further_model(const struct further_model *m, const char *policy_folder,
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

// ---- requests ----------------------------------------------------------------------------------

static enum status check_ids(const struct model_config *config, const char *what,
                             const int32_t *ids, int n)
{
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= config->vocab_size)
            return status_fail(ST_INVALID, "%s %d is %d, outside the vocabulary of %d tokens", what,
                               i, (int)ids[i], config->vocab_size);
    return ST_OK;
}

// How many likeliest tokens can be listed beside one: `most`, or all of a smaller vocabulary.
static enum status check_listed(const struct model_config *config, const char *what, int n,
                                int most)
{
    if (most > config->vocab_size) most = config->vocab_size;
    if (n <= most) return ST_OK;
    return status_fail(ST_INVALID, "%s is %d; at most %d can be listed", what, n, most);
}

static enum status check_sampling(const struct model_config *config, const struct sampling *s)
{
    const struct {
        bool bad;
        const char *name;
        double value;
        const char *must;
    } faults[] = {
        {s->max_tokens < 0, "max_tokens", s->max_tokens, "cannot be negative"},
        {!(s->temperature >= 0) || isinf(s->temperature), "temperature", s->temperature,
         "must be 0 or more"},
        {!(s->top_p > 0 && s->top_p <= 1), "top_p", s->top_p, "must be above 0 and at most 1"},
        {!(s->min_p >= 0 && s->min_p <= 1), "min_p", s->min_p, "must be 0 to 1"},
        {s->top_k < 0, "top_k", s->top_k, "must be 0 (off) or more"},
        {!(s->repetition_penalty >= 0) || isinf(s->repetition_penalty), "repetition_penalty",
         s->repetition_penalty, "must be above 0 (1 is off)"},
        {!isfinite(s->frequency_penalty), "frequency_penalty", s->frequency_penalty,
         "must be finite"},
        {!isfinite(s->presence_penalty), "presence_penalty", s->presence_penalty, "must be finite"},
    };
    const int most = (int)(sizeof s->stop_ids / sizeof s->stop_ids[0]);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        if (faults[i].bad)
            return status_fail(ST_INVALID, "%s is %g; it %s", faults[i].name, faults[i].value,
                               faults[i].must);
    if (s->n_stop_ids < 0 || s->n_stop_ids > most)
        return status_fail(ST_INVALID, "%d stop token ids; at most %d are taken", s->n_stop_ids,
                           most);
    enum status st = check_ids(config, "stop token id", s->stop_ids, s->n_stop_ids);
    if (st == ST_OK) st = check_listed(config, "logprobs", s->logprobs, SAMPLER_MAX_TOP);
    if (st == ST_OK) st = check_listed(config, "prompt_logprobs", s->prompt_top, TOP_LOGPROBS_MOST);
    for (int i = 0; i < s->n_logit_bias && st == ST_OK; i++) {
        const struct token_bias *bias = &s->logit_bias[i];
        st = check_ids(config, "logit_bias: token", &bias->token, 1);
        if (st == ST_OK && !isfinite(bias->bias))
            st = status_fail(ST_INVALID, "logit_bias of token %d is %g; it must be finite",
                             (int)bias->token, bias->bias);
    }
    return st;
}

static enum status check_frozen(const struct engine_options *o, const struct sampling *s)
{
    if (!s->frozen) return ST_OK;
    if (!o->frozen_folder)
        return status_fail(ST_INVALID, "the server was started without a frozen model: start it "
                                       "with --tandem-model DIR");
    if (s->adapter.index || s->tandem.on)
        return status_fail(ST_INVALID, "the frozen model samples alone: leave \"%s\" out",
                           s->tandem.on ? "tandem" : "lora");
    if (speculative_most(s->speculative) > 0)
        return status_fail(ST_INVALID, "nothing is drafted for the frozen model: leave "
                                       "\"speculative\" out");
    return ST_OK;
}

static enum status check_tandem(const struct engine_options *o, const struct sampling *s)
{
    const struct tandem_choice *t = &s->tandem;
    if (!t->on) return ST_OK;
    if (!o->frozen_folder)
        return status_fail(ST_INVALID,
                           "tandem: the server was started without a model that writes with the "
                           "policy; start it with --tandem-model DIR");
    if (!(t->p >= 0 && t->p <= 1))
        return status_fail(ST_INVALID, "tandem: p is %g; it must be 0 to 1", t->p);
    if (t->chunk < 1)
        return status_fail(ST_INVALID, "tandem: chunk is %d; it must be at least 1", t->chunk);
    if ((t->selector == TANDEM_SENTENCE || t->selector == TANDEM_WORD) && !o->token_ends)
        return status_fail(ST_INVALID,
                           "tandem: the selector %s goes by text, and %s has no tokenizer.json",
                           tandem_selector_names[t->selector], o->model_folder);
    if (s->prompt_logprobs)
        return status_fail(ST_INVALID, "tandem: prompt_logprobs are not given with it: ask for "
                                       "them in a request of their own");
    if (speculative_most(s->speculative) > 0)
        return status_fail(ST_INVALID, "tandem: nothing is drafted with it; leave \"speculative\" "
                                       "out");
    return ST_OK;
}

enum status checks_request(const struct engine_options *options, const struct model_config *config,
                           const struct request *r)
{
    enum status st = check_ids(config, "prompt token", r->prompt, r->n_prompt);
    if (st == ST_OK) st = check_sampling(config, &r->sampling);
    if (st == ST_OK) st = check_states(options, config, &r->sampling);
    if (st == ST_OK) st = check_tandem(options, &r->sampling);
    if (st == ST_OK) st = check_frozen(options, &r->sampling);
    if (st == ST_OK) st = check_choice(options, r->sampling.speculative, "speculative");
    return st;
}
