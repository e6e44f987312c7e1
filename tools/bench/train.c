/* train.c: the train benchmark: the learner's own passes (trainer/learn) over random sequences, in
 * one micro-batch; of --turns conversations, packed as trees and, beside that, with nothing to
 * share. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "tools/bench/bench.h"
#include "trainer/learn/learner.h"
#include <stdlib.h>
#include <string.h>

struct sequences { // each a group of its own
    int32_t *ids;
    struct pack_completion *completions;
    struct pack_group *groups;
    int n, longest;
    int64_t rows; // of all, if each were alone
};

static void sequences_release(struct sequences *s)
{
    free(s->ids);
    free(s->completions);
    free(s->groups);
}

// Room for n of up to `longest` tokens; returns the ids, as many for each.
static enum status sequences_new(struct sequences *s, int n, int longest)
{
    *s = (struct sequences){.longest = longest};
    s->ids = malloc((size_t)n * (size_t)longest * sizeof *s->ids);
    s->completions = calloc((size_t)n, sizeof *s->completions);
    s->groups = calloc((size_t)n, sizeof *s->groups);
    if (!s->ids || !s->completions || !s->groups)
        return status_fail(ST_NO_MEMORY, "no memory for %d sequences", n);
    return ST_OK;
}

// Adds one whose ids are there.
static void add_sequence(struct sequences *s, int prompt, int completion)
{
    const int i = s->n++;
    int32_t *ids = s->ids + (size_t)i * (size_t)s->longest;
    s->completions[i] = (struct pack_completion){.ids = ids + prompt, .n = completion};
    s->groups[i] = (struct pack_group){
        .prompt = ids, .n_prompt = prompt, .completions = &s->completions[i], .n = 1};
    s->rows += prompt + completion - 1;
}

static void random_ids(struct rng *r, const struct bench *b, int n, int32_t *ret)
{
    for (int i = 0; i < n; i++) ret[i] = (int32_t)rng_below(r, (uint32_t)b->config->vocab_size);
}

// A prompt of one token and a completion of `sequence` ones, which have as many rows and targets.
static enum status independent(const struct bench *b, struct sequences *s)
{
    const int n = (int)(b->o.tokens / b->o.sequence), length = (int)b->o.sequence + 1;
    struct rng r;
    enum status st = sequences_new(s, n, length);
    if (st != ST_OK) return st;
    rng_init(&r, (uint64_t)b->o.seed, 5);
    random_ids(&r, b, n * length, s->ids);
    while (s->n < n) add_sequence(s, 1, length - 1);
    return ST_OK;
}

// Where a conversation's history is written anew: from that turn on its token `at` is another, so
// that what the turns before have behind it is computed again.
struct anew {
    int turn, at; // turn 0: nowhere
};

// So that conversations share --shared percent of all rows, beside the rows that are distinct where
// nothing is written anew.
static enum status find_anew(const struct bench *b, struct anew *ret)
{
    const double turns = (double)b->o.turns, n = (double)b->o.batch, own = (double)b->o.sampled - 1;
    const int read = (int)b->o.read, each = read + (int)b->o.kept;
    const double path = (turns - 1) * each, all = n * turns * (path / 2 + read + own),
                 distinct = read + n * (path + turns * own), most = (turns - 2) * each + read,
                 rows = ((1 - b->o.shared / 100) * all - distinct) / n; // of each, once more
    *ret = (struct anew){0};
    if (b->o.shared == 0) return ST_OK;
    if (rows < 0 || rows > most)
        return status_fail(
            ST_INVALID, "--shared %g: these conversations can share %.1f to %.1f percent",
            b->o.shared, 100 * (1 - (distinct + n * most) / all), 100 * (1 - distinct / all));
    while (ret->turn * each + read < rows) ret->turn++;
    ret->at = ret->turn++ * each + read - (int)(rows + 0.5);
    return ST_OK;
}

// Conversations that begin with the same turn; a turn goes on behind what the template keeps of
// those before it, which begins with other tokens than were sampled. apart: the first token of each
// is another, so that nothing is shared.
static enum status conversations(const struct bench *b, bool apart, struct sequences *s)
{
    const int turns = (int)b->o.turns, read = (int)b->o.read, sampled = (int)b->o.sampled,
              each = read + (int)b->o.kept, longest = turns * each + sampled;
    const int n = (int)b->o.batch;
    struct rng r;
    struct anew anew;
    enum status st = find_anew(b, &anew);
    if (st != ST_OK) return st;
    int32_t *path = malloc((size_t)longest * sizeof *path), *begin = NULL;
    st = path ? sequences_new(s, n * turns, longest)
              : status_fail(ST_NO_MEMORY, "no memory for a conversation");
    rng_init(&r, (uint64_t)b->o.seed, 5);
    if (st == ST_OK) random_ids(&r, b, read, path);
    if (st == ST_OK && !(begin = malloc((size_t)read * sizeof *begin)))
        st = status_fail(ST_NO_MEMORY, "no memory for a conversation");
    if (st == ST_OK) memcpy(begin, path, (size_t)read * sizeof *begin);
    for (int c = 0; st == ST_OK && c < n; c++) {
        memcpy(path, begin, (size_t)read * sizeof *path);
        random_ids(&r, b, turns * each - read, path + read);
        for (int t = 0; t < turns; t++) {
            const int prompt = t * each + read;
            int32_t *ids = s->ids + (size_t)s->n * (size_t)longest;
            if (anew.turn > 0 && t == anew.turn)
                path[anew.at] = (path[anew.at] + 1 + c) % b->config->vocab_size;
            memcpy(ids, path, (size_t)prompt * sizeof *ids);
            random_ids(&r, b, sampled, ids + prompt);
            if (apart) ids[0] = s->n % b->config->vocab_size;
            add_sequence(s, prompt, sampled);
        }
    }
    free(begin);
    free(path);
    return st;
}

// ---- passes -------------------------------------------------------------------------------------

struct passes {
    struct learner *learner;
    struct sequences sequences;
    int64_t rows, targets; // of a pass
    double attended;       // twice the keys that all rows attend to
    double ms;
    size_t memory; // that was taken, beside the weights
};

static void passes_release(struct passes *p)
{
    sequences_release(&p->sequences);
    learner_free(p->learner);
}

// With room for all sequences in one micro-batch.
static enum status open_learner(struct bench *b, const struct sequences *s, struct learner **ret)
{
    struct packing *packing;
    enum status st = packing_new(s->groups, s->n, (int)s->rows, PACK_MIN_SHARED, &packing);
    if (st != ST_OK) return st;
    const struct micro_batch *mb = packing->batches;
    const int budget = (int)(mb->cost > mb->n_tokens ? mb->cost : mb->n_tokens),
              targets = mb->first[mb->n_seqs];
    packing_free(packing);
    const struct learner_config config = {.optimizer = {.beta1 = 0.9,
                                                        .beta2 = 0.999,
                                                        .eps = 1e-8,
                                                        .max_grad_norm = 1,
                                                        .moments = (enum moments_kind)b->o.moments},
                                          .recompute = b->o.recompute,
                                          .gradient_dtype = b->o.gradient_dtype,
                                          .temperature = 1,
                                          .token_budget = budget,
                                          .max_seqs = 2 * s->n,
                                          .max_targets = targets,
                                          .max_context = s->longest};
    st = learner_new(b->dev, b->config, b->weights, false, &config, ret);
    return st == ST_OK ? learner_prepare(*ret) : st;
}

// The mean of all targets' log-probabilities, downwards.
static void mean_loss(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    struct passes *p = context;
    const struct micro_batch *mb = rows->mb;
    const int n = mb->first[mb->n_seqs];
    p->rows += mb->n_tokens;
    p->targets += n;
    for (const struct pack_node *node = mb->nodes; node < mb->nodes + mb->n_nodes; node++)
        p->attended += (double)node->n * (2.0 * node->position + node->n);
    for (int i = 0; i < n; i++) ret_dlogprobs[i] = -1.0f / (float)p->sequences.rows;
}

static enum status pass(void *context)
{
    struct passes *p = context;
    p->rows = p->targets = 0;
    p->attended = 0;
    return learner_run(p->learner, PASS_STEP, p->sequences.groups, p->sequences.n, mean_loss, p,
                       NULL);
}

static enum status measure(struct bench *b, struct passes *p)
{
    enum status st;
    CHECK(open_learner(b, &p->sequences, &p->learner));
    CHECK(bench_time(b->o.warmup, b->o.steps, pass, p, &p->ms));
    p->memory = learner_memory_taken(p->learner);
out:
    return st;
}

// 6 operations a parameter and row, or target, and the attention scores and sums.
static double operations(const struct bench *b, const struct passes *p)
{
    const struct model_config *c = b->config;
    const double head = (double)c->vocab_size * c->hidden, looked_up = c->tie_embeddings ? 0 : head;
    return 6 * (limits_row_parameters(b) - looked_up - head) * (double)p->rows +
           6 * head * (double)p->targets + 3 * p->attended * limits_attn_products(b);
}

static double per_second(const struct passes *p) // tokens of the sequences
{
    return (double)p->sequences.rows * 1e3 / p->ms;
}

// Behind the passes, so that its memory is not taken for theirs.
static enum status limits(struct bench *b, double *ret_flops)
{
    enum status st = limits_bandwidth(b);
    return st == ST_OK ? limits_matmul(b, ret_flops) : st;
}

static enum status train_independent(struct bench *b)
{
    struct passes p = {0};
    double flops = 0;
    enum status st;
    CHECK(independent(b, &p.sequences));
    CHECK(measure(b, &p));
    CHECK(limits(b, &flops));
    const double work = operations(b, &p), limit_ms = 1e3 * work / flops;
    bench_print(b, "train",
                json_pack("{s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f}", "tokens", (json_int_t)p.rows,
                          "sequence", (json_int_t)b->o.sequence, "ms_per_pass", p.ms,
                          "tokens_per_s", per_second(&p), "tflops", work / p.ms / 1e9,
                          "product_tflops", flops / 1e12, "limit_ms", limit_ms, "ratio_to_limit",
                          limit_ms / p.ms),
                "train, %lld tokens in sequences of %lld: %.1f ms forward and backward, %.0f "
                "tokens/s, %.2f TFLOP/s; limit %.1f ms at %.2f TFLOP/s, reached %.0f%%\n",
                (long long)p.rows, (long long)b->o.sequence, p.ms, per_second(&p),
                work / p.ms / 1e9, limit_ms, flops / 1e12, 100 * limit_ms / p.ms);
out:
    passes_release(&p);
    return st;
}

static json_t *figures_of(const struct bench *b, const struct passes *p, double flops)
{
    const double limit_ms = 1e3 * operations(b, p) / flops;
    return json_pack("{s:I, s:f, s:f, s:I, s:f, s:f}", "rows", (json_int_t)p->rows, "ms_per_pass",
                     p->ms, "tokens_per_s", per_second(p), "memory_bytes", (json_int_t)p->memory,
                     "limit_ms", limit_ms, "ratio_to_limit", limit_ms / p->ms);
}

static enum status train_conversations(struct bench *b)
{
    struct passes p[2] = {0}; // as trees, apart
    double flops = 0;
    enum status st = ST_OK;
    for (int apart = 0; apart < 2; apart++) {
        CHECK(conversations(b, apart, &p[apart].sequences));
        CHECK(measure(b, &p[apart]));
        learner_free(p[apart].learner); // the other has the memory then
        p[apart].learner = NULL;
    }
    CHECK(limits(b, &flops));
    const double mib = 1024 * 1024, rate = p[1].ms / p[0].ms,
                 shared = 1 - (double)p[0].rows / (double)p[1].rows,
                 memory = (double)p[0].memory / (double)p[1].memory;
    bench_print(
        b, "train",
        json_pack("{s:I, s:I, s:I, s:I, s:I, s:f, s:o, s:o, s:f, s:f}", "conversations",
                  (json_int_t)b->o.batch, "turns", (json_int_t)b->o.turns, "read",
                  (json_int_t)b->o.read, "sampled", (json_int_t)b->o.sampled, "kept",
                  (json_int_t)b->o.kept, "shared", shared, "trees", figures_of(b, &p[0], flops),
                  "apart", figures_of(b, &p[1], flops), "rate", rate, "memory", memory),
        "train, %lld conversations of %lld turns, %lld tokens of which %.1f%% are shared: as trees "
        "%.1f ms forward and backward, %.0f tokens/s, %.0f MiB beside the weights; apart %.1f ms, "
        "%.0f tokens/s, %.0f MiB: %.2f times the rate with %.2f of the memory\n",
        (long long)b->o.batch, (long long)b->o.turns, (long long)p[1].rows, 100 * shared, p[0].ms,
        per_second(&p[0]), (double)p[0].memory / mib, p[1].ms, per_second(&p[1]),
        (double)p[1].memory / mib, rate, memory);
out:
    for (int i = 0; i < 2; i++) passes_release(&p[i]);
    return st;
}

enum status bench_train(struct bench *b)
{
    const bool cuda = device_kind(b->dev) == DEVICE_CUDA;
    if (b->o.tokens == 0) b->o.tokens = cuda ? 8192 : 512;
    if (b->o.sequence == 0) b->o.sequence = cuda ? 512 : 128;
    if (b->o.sequence > b->o.tokens) b->o.sequence = b->o.tokens;
    return b->o.turns > 0 ? train_conversations(b) : train_independent(b);
}
