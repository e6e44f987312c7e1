/* speculative.c: the speculative benchmark: what each method of speculative decoding gains over
 * none, by batch size; and the tandem benchmark: what rollouts that a frozen model writes too cost,
 * by selector. One thread.
 *
 * Each method has an executor of its own (the engine without its thread and bridge: every
 * difference between methods is in there), all on one copy of the weights, and keeps it over a
 * batch size's rounds, so that it learns costs and acceptance as a server's does. A round gives
 * every method the same rollouts: --waves times the batch, in groups as GRPO asks for them, all
 * queued at the start, timed from there to the last one's end. Prompts and seeds change from round
 * to round: what a method remembers of a prompt is of the same round's siblings, or of earlier
 * passes over a --prompts file.
 *
 * Where an executor's memory happens to lie is worth a few percent on a CPU, so all that is done
 * again
 * --repeats times with new ones.
 *
 * The methods of a round run one after another, beginning with another one each round, and a
 * method's time is compared with that of "off" in the same round: a machine that drifts or is
 * shared hurts all alike. Reported are the median of these ratios and their quartiles.
 * Deterministic drafts give the tokens that "off" gives; a draft model's samples are others, of the
 * same distribution, so the ratio is of tokens a second. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/clock.h"
#include "common/base/names.h"
#include "common/base/rng.h"
#include "infer-server/engine/drafting.h"
#include "infer-server/engine/executor.h"
#include "infer-server/engine/kv_memory.h"
#include "tools/bench/bench.h"
#include "trainer/data/data.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ARMS    24
#define MAX_BATCHES 16
#define NAME_BYTES  64
#define BLOCK       16  // tokens
#define CHUNK       512 // prompt tokens of a step
#define FIXED       "fixed-"
#define SHARED      "shared-"

struct arm { // a method under measurement
    char name[NAME_BYTES];
    struct speculative_choice choice;
    bool fixed;
    struct tandem_choice tandem;
    struct executor *executor;
    struct engine_stats stats, before;      // the executor's, at its first measured round
    double steps, times, drafted, accepted; // in the measured rounds at this batch size
    double *tokens_per_s;                   // (repeats * rounds)
};
struct comparison {
    struct bench *b;
    int n_arms, n_batches;
    struct arm arms[MAX_ARMS]; // "off" is the first
    int batches[MAX_BATCHES];
    struct model_config *draft_config;
    struct weights *draft; // NULL: none
    void *draft_arena;
    struct model_config *mtp_config; // of the model's own layer that predicts further tokens
    struct weights *mtp;             // NULL: no method drafts with it
    void *mtp_arena;
    struct weights *frozen; // of the tandem benchmark; NULL: it is the other one
    void *frozen_arena;
    struct dataset *prompts; // NULL: random ones
    int32_t *prompt;         // (prompt_tokens) a random one
    int longest_prompt, tokens;
    int requests_done;
    bool names_off;
    bool failed; // a sample ended in an error
    char error[256];
    json_t *results;
};

// ---- what is asked for -------------------------------------------------------------------------

// SELECTOR[:P], with shared- before it where all samples of a round have the same authors.
static enum status read_selector(struct arm *arm)
{
    char name[NAME_BYTES];
    struct tandem_choice *t = &arm->tandem;
    *t = (struct tandem_choice){.p = 0.5, .chunk = TANDEM_CHUNK_TOKENS};
    t->shared = strncmp(arm->name, SHARED, strlen(SHARED)) == 0;
    strcpy(name, arm->name + (t->shared ? strlen(SHARED) : 0));
    char *p = strchr(name, ':'), *end = "";
    if (strcmp(name, "off") == 0) return ST_OK;
    if (p) t->p = strtod(p + 1, &end);
    if (p) *p = 0;
    if (*end || !(t->p >= 0 && t->p <= 1))
        return status_fail(ST_INVALID, "--methods: %s: P is a number from 0 to 1", arm->name);
    t->on = true;
    return status_context(name_parse(tandem_selector_names, name, &t->selector), "--methods");
}

static enum status read_choice(struct comparison *c, struct arm *arm)
{
    char choice[NAME_BYTES];
    arm->fixed = strncmp(arm->name, FIXED, strlen(FIXED)) == 0;
    strcpy(choice, arm->name + (arm->fixed ? strlen(FIXED) : 0));
    for (char *at = choice; *at; at++)
        if (*at == '+') *at = ',';
    enum status st = speculative_parse(choice, &arm->choice);
    if (st != ST_OK) return status_context(st, "--methods");
    if (arm->choice.k[SPECULATIVE_DRAFT_MODEL] && !c->draft)
        return status_fail(ST_INVALID,
                           "--methods: %s needs a draft model; give one with --draft or "
                           "--draft-config",
                           arm->name);
    if (arm->choice.k[SPECULATIVE_DRAFT_MODEL] && arm->choice.k[SPECULATIVE_MTP])
        return status_fail(ST_INVALID, "--methods: %s: one model drafts beside the policy",
                           arm->name);
    return ST_OK;
}

static enum status add_arm(struct comparison *c, const char *text, size_t n)
{
    if (c->n_arms == MAX_ARMS)
        return status_fail(ST_INVALID, "--methods: at most %d are taken", MAX_ARMS - 1);
    if (n >= NAME_BYTES)
        return status_fail(ST_INVALID, "--methods: \"%.*s\" is no method", (int)n, text);
    struct arm *arm = &c->arms[c->n_arms];
    *arm = (struct arm){0};
    memcpy(arm->name, text, n);
    const enum status st = c->frozen ? read_selector(arm) : read_choice(c, arm);
    if (st != ST_OK) return st;
    // "off" is there already; a second one shows how far equal things come out apart.
    if (c->n_arms == 1 && speculative_max(arm->choice) == 0 && !arm->tandem.on && !c->names_off) {
        c->names_off = true;
        return ST_OK;
    }
    c->n_arms++;
    return ST_OK;
}

static enum status read_methods(struct comparison *c)
{
    const char *at = c->b->o.methods;
    enum status st = add_arm(c, "off", 3);
    if (!at)
        at = c->frozen  ? "bernoulli,chunk,alternating,shared-bernoulli,shared-chunk"
             : c->draft ? "ngram:5,suffix:8,draft_model:5"
                        : "ngram:5,suffix:8";
    while (st == ST_OK) {
        const size_t n = strcspn(at, ",");
        st = add_arm(c, at, n);
        if (!at[n]) break;
        at += n + 1;
    }
    return st;
}

static enum status read_batches(struct comparison *c)
{
    for (const char *at = c->b->o.batches;; at++) {
        char *end;
        const long batch = strtol(at, &end, 10);
        if (end == at || batch < 1 || batch > 4096 || (*end && *end != ','))
            return status_fail(ST_INVALID,
                               "--batches %s: they must be 1 to 4096, with commas between "
                               "them",
                               c->b->o.batches);
        if (c->n_batches == MAX_BATCHES)
            return status_fail(ST_INVALID, "--batches: at most %d are taken", MAX_BATCHES);
        c->batches[c->n_batches++] = (int)batch;
        if (!*end) return ST_OK;
        at = end;
    }
}

static enum status load_draft(struct comparison *c)
{
    const struct bench_options *o = &c->b->o;
    enum status st = ST_OK;
    if (!o->draft && !o->draft_config) return ST_OK;
    if (o->draft)
        CHECK(model_config_load(o->draft, &c->draft_config));
    else
        CHECK(model_config_load_file(o->draft_config, &c->draft_config));
    if (c->draft_config->vocab_size > c->b->config->vocab_size)
        FAIL(ST_MISMATCH,
             "the draft model's vocabulary of %d tokens is larger than the %d of the "
             "model; it must be of the same tokenizer",
             c->draft_config->vocab_size, c->b->config->vocab_size);
    model_config_predict_first(c->draft_config, o->draft_vocabulary);
    st = bench_load_weights(c->b->dev, c->draft_config, c->b->dt, o->draft, (uint64_t)o->seed + 1,
                            &c->draft, &c->draft_arena);
out:
    return st;
}

static enum status load_mtp(struct comparison *c)
{
    const struct bench_options *o = &c->b->o;
    enum status st = ST_OK;
    if (!o->methods || !strstr(o->methods, method_mtp.name)) return ST_OK;
    CHECK(o->model ? model_config_load(o->model, &c->mtp_config)
                   : model_config_load_file(o->config, &c->mtp_config));
    CHECK(model_config_take_mtp(o->model ? o->model : o->config, c->mtp_config));
    model_config_predict_first(c->mtp_config, o->draft_vocabulary);
    CHECK(bench_load_weights(c->b->dev, c->mtp_config, c->b->dt, o->model, (uint64_t)o->seed + 1,
                             &c->mtp, &c->mtp_arena));
    weights_share_ends(c->mtp, c->b->weights);
out:
    return st;
}

static enum status load_prompts(struct comparison *c)
{
    const struct bench_options *o = &c->b->o;
    const struct prompt_options options = {.end_id = -1};
    int left_out;
    c->longest_prompt = (int)o->prompt_tokens;
    if (!o->prompts) {
        c->prompt = malloc((size_t)c->longest_prompt * sizeof *c->prompt);
        return c->prompt ? ST_OK : status_fail(ST_NO_MEMORY, "no memory for a prompt");
    }
    if (!o->model)
        return status_fail(ST_INVALID, "--prompts needs --model, whose tokenizer reads them");
    enum status st = prompts_load(o->prompts, o->model, c->b->config->vocab_size, &options,
                                  &c->prompts, &left_out);
    if (st == ST_OK) c->longest_prompt = c->prompts->max_prompt;
    return st;
}

// As a server's, states are taken back by what is drafted.
static void make_room_for_drafts(struct comparison *c)
{
    int most = 0;
    for (int i = 0; i < c->n_arms; i++)
        if (speculative_max(c->arms[i].choice) > most) most = speculative_max(c->arms[i].choice);
    model_config_draft_ahead(c->b->config, most);
    if (c->draft_config) model_config_draft_ahead(c->draft_config, SPECULATIVE_MAX);
}

// ---- a round -----------------------------------------------------------------------------------

static void on_event(void *context, const struct engine_event *event)
{
    struct comparison *c = context;
    if (event->finish == FINISH_ERROR && !c->failed) {
        c->failed = true;
        snprintf(c->error, sizeof c->error, "%s", event->error);
    }
    if (!event->request_done) return;
    request_free(event->request);
    c->requests_done++;
}

static enum status new_request(struct comparison *c, const struct arm *arm, int n, int64_t number,
                               struct request **ret)
{
    const struct bench_options *o = &c->b->o;
    const struct sampling sampling = {.tandem = arm->tandem,
                                      .n = n,
                                      .max_tokens = c->tokens,
                                      .temperature = (float)o->temperature,
                                      .top_p = 1,
                                      .seed = (uint64_t)(o->seed + number),
                                      .logprobs = -1,
                                      .ignore_eos = o->ignore_eos};
    struct request *r = NULL;
    enum status st;
    if (c->prompts) {
        const struct token_list *ids = &c->prompts->examples[number % c->prompts->n].prompt_ids;
        st = request_new(ids->ids, ids->n, &sampling, NULL, &r);
    } else {
        struct rng rng;
        rng_init(&rng, (uint64_t)o->seed, (uint64_t)number);
        for (int i = 0; i < c->longest_prompt; i++)
            c->prompt[i] = (int32_t)rng_below(&rng, (uint32_t)c->b->config->vocab_size);
        st = request_new(c->prompt, c->longest_prompt, &sampling, NULL, &r);
    }
    if (st == ST_OK) st = request_prepare(r, BLOCK, 0);
    if (st != ST_OK) {
        request_free(r);
        return st;
    }
    *ret = r;
    return ST_OK;
}

static enum status run_round(struct comparison *c, struct arm *arm, int batch, int round,
                             double *ret_tokens_per_s)
{
    const int group = c->b->o.group < batch ? (int)c->b->o.group : batch;
    const int n_groups = (int)((c->b->o.waves * batch + group - 1) / group);
    enum status st = ST_OK;
    bool stepped = true;
    const struct engine_stats before = arm->stats;
    c->requests_done = 0;
    arm->tandem.seed = (uint64_t)round;
    for (int i = 0; i < n_groups; i++) {
        struct request *r;
        CHECK(new_request(c, arm, group, (int64_t)round * n_groups + i, &r));
        executor_add(arm->executor, r);
    }
    const int64_t start_ns = clock_now_ns();
    while (c->requests_done < n_groups && stepped)
        CHECK(executor_step(arm->executor, 2, ADMIT_ALL, &stepped));
    const double ms = clock_ms_since(start_ns);
    if (c->failed)
        st = status_fail(ST_DEVICE, "a sample failed: %s", c->error);
    else if (!stepped)
        st = status_fail(ST_NO_MEMORY, "the engine cannot go on with its samples");
    const struct engine_stats after = arm->stats;
    *ret_tokens_per_s = 1e3 * (double)(after.generated_tokens - before.generated_tokens) / ms;
out:
    executor_end_all(arm->executor, FINISH_CANCELLED, NULL);
    return st;
}

// ---- a batch size ------------------------------------------------------------------------------

// For blocks of so many bytes, and states of all sequences, which get half of the memory at most,
// an eighth of that being the prefix cache's (kv_memory_plan()).
static int64_t pool_bytes(int64_t blocks, int64_t state, int batch)
{
    const int64_t states = state * (batch + batch / 7 + 1);
    return state == 0 ? blocks : 2 * (blocks > states ? blocks : states);
}

// The first is another arm's each time.
static enum status open_executors(struct comparison *c, int batch, int repeat)
{
    const struct bench *b = c->b;
    // Room for drafts and for the block a running sample that admission keeps back: the batch is to
    // be what is asked for.
    const int roomy = c->longest_prompt + c->tokens + 4 * BLOCK;
    const int positions = b->config->max_positions;
    const int context = roomy < positions ? roomy : positions;
    const int64_t n_blocks = (int64_t)batch * ((context + BLOCK - 1) / BLOCK);
    for (int i = 0; i < c->n_arms; i++) {
        struct arm *arm = &c->arms[(i + repeat) % c->n_arms];
        // Only a method that uses it pays for a draft model.
        const struct weights *draft = arm->choice.k[SPECULATIVE_DRAFT_MODEL] ? c->draft
                                      : arm->choice.k[SPECULATIVE_MTP]       ? c->mtp
                                                                             : NULL;
        const struct weights *frozen = arm->tandem.on ? c->frozen : NULL;
        const struct weights *const weights[RUNNERS] = {b->weights, draft, frozen};
        int64_t block_bytes = 0, state_bytes = 0;
        for (int k = 0; k < RUNNERS; k++) {
            if (!weights[k]) continue;
            block_bytes += kv_memory_block_bytes(weights[k]->config, b->dt, BLOCK);
            state_bytes += kv_memory_state_bytes(weights[k]->config);
        }
        struct engine_options options = {.max_batch = batch,
                                         .max_context = context,
                                         .block_size = BLOCK,
                                         .prefill_chunk = CHUNK,
                                         .speculative = arm->choice,
                                         .speculative_fixed = arm->fixed};
        options.kv_bytes = pool_bytes(n_blocks * block_bytes, state_bytes, batch);
        enum status st =
            executor_new(b->dev, weights, NULL, &options, on_event, c, &arm->stats, &arm->executor);
        if (st != ST_OK) return st;
        scheduler_update(arm->executor->scheduler, 2, false);
    }
    return ST_OK;
}

static void close_executors(struct comparison *c)
{
    for (int i = 0; i < c->n_arms; i++) {
        executor_free(c->arms[i].executor);
        c->arms[i].executor = NULL;
    }
}

static void count_arm(struct arm *arm)
{
    const struct engine_stats now = arm->stats;
    arm->steps += (double)(now.steps - arm->before.steps);
    arm->times += (double)(now.drafts.num_drafts - arm->before.drafts.num_drafts);
    arm->drafted += (double)(now.drafts.num_draft_tokens - arm->before.drafts.num_draft_tokens);
    arm->accepted +=
        (double)(now.drafts.num_accepted_tokens - arm->before.drafts.num_accepted_tokens);
}

// Sorts `ratios` and `rates`, both (repeats * rounds).
static void report_arm(struct comparison *c, const struct arm *arm, int batch, double *ratios,
                       double *rates)
{
    const int rounds = (int)(c->b->o.repeats * c->b->o.rounds);
    for (int i = 0; i < rounds; i++) {
        rates[i] = arm->tokens_per_s[i];
        ratios[i] = rates[i] / c->arms[0].tokens_per_s[i];
    }
    const double rate = median(rates, rounds), ratio = median(ratios, rounds);
    const double low = ratios[rounds / 4], high = ratios[rounds - 1 - rounds / 4];
    const double acceptance = arm->accepted / arm->drafted, length = arm->accepted / arm->times;
    json_array_append_new(
        c->results,
        json_pack("{s:i, s:s, s:f, s:f, s:f, s:f, s:o, s:o, s:f}", "batch", batch, "method",
                  arm->name, "tokens_per_s", rate, "ratio_to_off", ratio, "ratio_quartile_1", low,
                  "ratio_quartile_3", high, "accept_rate",
                  arm->drafted > 0 ? json_real(acceptance) : json_null(), "mean_acceptance_length",
                  arm->times > 0 ? json_real(1 + length) : json_null(), "draft_tokens_per_step",
                  arm->drafted / arm->steps));
    if (c->b->o.json) return;
    char accept_text[16] = "-", length_text[16] = "-";
    if (arm->drafted > 0) snprintf(accept_text, sizeof accept_text, "%.1f%%", 100 * acceptance);
    if (arm->times > 0) snprintf(length_text, sizeof length_text, "%.2f", 1 + length);
    printf("%5d  %-24s %10.0f %7.3f  %.3f..%.3f %9s %7s %12.2f\n", batch, arm->name, rate, ratio,
           low, high, accept_text, length_text, arm->drafted / arm->steps);
    fflush(stdout);
}

static enum status repeat_at(struct comparison *c, int batch, int repeat)
{
    const int warmup = (int)c->b->o.warmup_rounds, rounds = (int)c->b->o.rounds;
    enum status st = ST_OK;
    CHECK(open_executors(c, batch, repeat));
    for (int round = 0; round < warmup + rounds; round++) {
        for (int i = 0; i < c->n_arms; i++) {
            struct arm *arm = &c->arms[(i + round) % c->n_arms];
            const int number = repeat * (warmup + rounds) + round;
            double rate;
            if (round == warmup) arm->before = arm->stats;
            CHECK(run_round(c, arm, batch, number, &rate));
            if (round >= warmup) arm->tokens_per_s[repeat * rounds + round - warmup] = rate;
        }
    }
    for (int i = 0; i < c->n_arms; i++) count_arm(&c->arms[i]);
out:
    close_executors(c);
    return st;
}

static enum status compare_at(struct comparison *c, int batch, double *ratios, double *rates)
{
    enum status st = ST_OK;
    for (int i = 0; i < c->n_arms; i++) {
        struct arm *arm = &c->arms[i];
        arm->steps = arm->times = arm->drafted = arm->accepted = 0;
    }
    for (int repeat = 0; repeat < c->b->o.repeats; repeat++) CHECK(repeat_at(c, batch, repeat));
    for (int i = 0; i < c->n_arms; i++) report_arm(c, &c->arms[i], batch, ratios, rates);
out:
    return st;
}

static enum status compare(struct bench *b, const char *name)
{
    struct comparison c = {.b = b, .tokens = b->o.tokens ? (int)b->o.tokens : 128};
    const size_t rounds = (size_t)(b->o.repeats * b->o.rounds);
    double *figures = NULL; // (arms + 2, rounds): the arms' rates, and two lists to sort
    enum status st = ST_OK;
    CHECK(read_batches(&c));
    if (strcmp(name, "tandem") == 0)
        CHECK(bench_load_weights(b->dev, b->config, b->dt, b->o.tandem_model,
                                 (uint64_t)b->o.seed + 1, &c.frozen, &c.frozen_arena));
    else
        CHECK(load_draft(&c));
    CHECK(load_mtp(&c));
    CHECK(read_methods(&c));
    make_room_for_drafts(&c);
    CHECK(load_prompts(&c));
    if (c.longest_prompt + c.tokens > b->config->max_positions)
        FAIL(ST_INVALID,
             "prompts of up to %d tokens and --tokens %d are over the model's %d: ask for fewer",
             c.longest_prompt, c.tokens, b->config->max_positions);
    figures = malloc((size_t)(c.n_arms + 2) * rounds * sizeof *figures);
    c.results = json_array();
    if (!figures || !c.results) FAIL(ST_NO_MEMORY, "no memory for %zu rounds", rounds);
    for (int i = 0; i < c.n_arms; i++) c.arms[i].tokens_per_s = figures + (size_t)(i + 2) * rounds;
    if (!b->o.json)
        printf("%s, %.1f M parameters, %s: %s, %d tokens at most behind %s of %d, groups of "
               "%d, temperature %g, %d rounds\n"
               "batch  %-24s %10s %7s  %-12s %9s %7s %12s\n",
               device_name(b->dev), (double)b->weights->n_parameters / 1e6, dtype_name(b->dt), name,
               c.tokens, c.prompts ? "prompts" : "random prompts", c.longest_prompt,
               (int)b->o.group, b->o.temperature, (int)rounds, "method", "tokens/s", "to off",
               "quartiles", "accepted", "length", "drafts/step");
    for (int i = 0; i < c.n_batches; i++)
        CHECK(compare_at(&c, c.batches[i], figures, figures + rounds));
    if (b->o.json)
        bench_print(b, name,
                    json_pack("{s:i, s:i, s:I, s:f, s:I, s:O}", "tokens", c.tokens, "prompt_tokens",
                              c.longest_prompt, "group", (json_int_t)b->o.group, "temperature",
                              b->o.temperature, "rounds", (json_int_t)b->o.rounds, "results",
                              c.results),
                    " ");
out:
    json_decref(c.results);
    free(figures);
    free(c.prompt);
    dataset_free(c.prompts);
    device_release(b->dev, c.mtp_arena);
    weights_free(c.mtp);
    model_config_free(c.mtp_config);
    device_release(b->dev, c.draft_arena);
    weights_free(c.draft);
    model_config_free(c.draft_config);
    device_release(b->dev, c.frozen_arena);
    weights_free(c.frozen);
    return st;
}

enum status bench_speculative(struct bench *b)
{
    return compare(b, "speculative");
}

enum status bench_tandem(struct bench *b)
{
    return compare(b, "tandem");
}
