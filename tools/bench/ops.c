/* ops.c: what an operation takes, call by call, beside the least that its bytes or multiplications
 * can take at the bandwidth and the matmul rate measured in the same run; which of its variants
 * (kernels/variants.h) each call took, and when each is taken. Sizes are those of Qwen2.5-1.5B; of
 * mixtures, Mixtral-8x7B's and those of many small experts; of latent attention,
 * DeepSeek-V2-Lite's. Calls are captured where the device captures, so that times are the device's,
 * and take their weights, or keys and values, in turn from as many places as there is memory for,
 * so that caches do not help. One thread. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/moments.h"
#include "kernels/variants.h"
#include "tools/bench/bench.h"
#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HIDDEN = 1536,
    HEADS = 12,
    KV_HEADS = 2,
    DIM = 128,
    KV_DIM = KV_HEADS * DIM,
    FFN = 8960,
    VOCAB = 151936
};
enum { QKV = (HEADS + 2 * KV_HEADS) * DIM, BLOCK = 16, LORA_RANK = 16 };
enum { LATENT_HEADS = 16, LATENT_RANK = 512, LATENT_DIM = LATENT_RANK + 64, EXPANDED_DIM = 192 };
enum { RUNS = 20, MAX_ROWS = 8 };

enum form { FORWARD, TO_INPUT, TO_WEIGHT }; // of a matmul: y = x W^T, dx = dy W, dW += dy^T x

struct call { // of an operation, one for each of `rows`
    enum op op;
    const char *what;
    enum dtype dt;
    int rows[MAX_ROWS]; // 0: no more of them
    int width, k; // of what a row becomes, and of what it is; of top_logprobs the likeliest tokens
    enum form form;
    float beta;
    int each, before, head_dim; // attention: rows of a sequence, keys before them
    int prompt, samples;        // packed: each such group of rows is a prompt and its samples
    int experts;                // of rows that are spread evenly over them
    bool act;                   // of gate and up columns, behind a matmul
    int parts[LORA_PARTS];      // of the width, where adapters have several
    enum moments_kind moments;
    struct sample_params sampling;
    bool drafts;
    bool narrow, rounded; // weights, or keys and values, in e4m3; rows, too
};

struct ops_bench {
    struct bench *b;
    double flops; // a second, of a large matmul
    const struct call *call;
    int rows;
    size_t bytes; // of each of these four: what is read, weights, what is written, and more
    char *in, *weights, *out, *more;
    int32_t *lists;   // of the batch, of the routing, of what is sampled
    char *little;     // factors, sums, counts
    float *table;     // rotations
    int copies, turn; // of what is taken in turn
    size_t stride;    // bytes of one
    struct batch_view view;
    double keys; // that all rows of the batch attend to
    struct kv_layer layers[RUNS];
    struct kv_view kv;
    struct attn_shape attn;
    struct matmul matmul;
    struct act_shape act;
    struct latent_shape latent;
    struct lora_args lora;
    struct rope_args store;
    struct moments moments;
};

enum { LISTS_BYTES = 1 << 22, LITTLE_BYTES = 1 << 16, TABLE_BYTES = 1 << 22 };

// ---- what a call is made of ---------------------------------------------------------------------

// What is taken in turn has so many bytes: as many copies as there is memory for, of a run's calls.
static void set_turns(struct ops_bench *o, size_t bytes)
{
    o->stride = bytes / 256 * 256 + 256;
    o->copies = o->bytes / o->stride < RUNS ? (int)(o->bytes / o->stride) : RUNS;
    assert(o->copies > 0);
    o->turn = 0;
}

enum { POSITIONS, SEQ_OF, SLOTS, OF_ROWS };
enum { START, CONTEXT, STORED, PARENT, FIRST_POSITION, END, OF_SEQS };

// Writes a sequence of so many rows behind `before` keys, or rows of that parent (-1: none); `end`:
// behind the last row that sees its rows.
static void add_sequence(struct ops_bench *o, int32_t *rows[], int32_t *seqs[], int parent,
                         int before, int n, int end)
{
    struct batch_view *v = &o->view;
    const int s = v->n_seqs++;
    seqs[START][s] = v->n_tokens;
    seqs[CONTEXT][s] = before + n;
    seqs[STORED][s] = seqs[FIRST_POSITION][s] = before;
    seqs[PARENT][s] = parent;
    seqs[END][s] = end;
    for (int i = 0; i < n; i++) {
        const int row = v->n_tokens++;
        rows[POSITIONS][row] = before + i;
        rows[SEQ_OF][row] = s;
        o->keys += before + i + 1;
    }
    seqs[START][s + 1] = v->n_tokens;
    if (n > v->max_query) v->max_query = n;
    if (before + n > v->max_context) v->max_context = before + n;
}

// The call's rows as a batch: sequences of `each` rows with as many keys before each, in blocks all
// over the pool; or groups of a prompt and its samples.
static enum status set_batch(struct ops_bench *o, bool paged)
{
    const struct call *c = o->call;
    const int each = c->prompt + (c->samples ? c->samples : 1) * c->each, groups = o->rows / each;
    const int s = groups * (c->samples + 1) + 1, stride = (c->before + each + BLOCK - 1) / BLOCK;
    const int n_blocks = groups * stride;
    const size_t n = (size_t)OF_ROWS * o->rows + (size_t)OF_SEQS * s + (size_t)n_blocks;
    int32_t *host = calloc(n, sizeof *host), *rows[OF_ROWS], *seqs[OF_SEQS];
    if (!host) return status_fail(ST_NO_MEMORY, "no memory for a batch");
    for (int i = 0; i < OF_ROWS; i++) rows[i] = host + (size_t)i * o->rows;
    for (int i = 0; i < OF_SEQS; i++) seqs[i] = host + (size_t)OF_ROWS * o->rows + (size_t)i * s;
    int32_t *table = seqs[OF_SEQS - 1] + s;
    o->view = (struct batch_view){.packed = !paged, .table_stride = stride};
    o->keys = 0;
    for (int g = 0; g < groups; g++) {
        const int prompt = c->prompt ? o->view.n_seqs : -1, end = o->view.n_tokens + each;
        if (c->prompt) add_sequence(o, rows, seqs, -1, 0, c->prompt, end);
        for (int i = 0; i < (c->samples ? c->samples : 1); i++)
            add_sequence(o, rows, seqs, prompt, c->samples ? c->prompt : c->before, c->each,
                         o->view.n_tokens + c->each);
    }
    for (int i = 0; i < n_blocks; i++) table[i] = (int32_t)((int64_t)i * 7919 % n_blocks);
    for (int i = 0; paged && i < o->rows; i++) {
        const int at = rows[POSITIONS][i];
        rows[SLOTS][i] = table[rows[SEQ_OF][i] * stride + at / BLOCK] * BLOCK + at % BLOCK;
    }
    device_copy_in(o->b->dev, o->lists, host, n * sizeof *host);
    const int32_t **const on_device[] = {
        &o->view.positions,   &o->view.seq_of,     &o->view.slots,  &o->view.query_start,
        &o->view.context_len, &o->view.stored,     &o->view.parent, &o->view.first_position,
        &o->view.attend_end,  &o->view.block_table};
    for (int i = 0; i < OF_ROWS; i++) *on_device[i] = o->lists + (rows[i] - host);
    for (int i = 0; i <= OF_SEQS; i++)
        *on_device[OF_ROWS + i] = o->lists + (seqs[0] - host) + (ptrdiff_t)i * s;
    free(host);
    return device_sync(o->b->dev);
}

static bool is_paged(const struct call *c)
{
    return c->before > 0;
}

static void set_attention(struct ops_bench *o)
{
    const struct call *c = o->call;
    const bool latent = c->head_dim == LATENT_DIM;
    const int heads = latent || c->head_dim == EXPANDED_DIM ? LATENT_HEADS : HEADS;
    const int kv_heads = latent ? 1 : c->head_dim == EXPANDED_DIM ? LATENT_HEADS : KV_HEADS;
    o->attn = (struct attn_shape){.n_heads = heads,
                                  .n_kv_heads = kv_heads,
                                  .head_dim = c->head_dim,
                                  .latent = latent ? LATENT_RANK : 0,
                                  .scale = 0.1f,
                                  .dt = c->dt,
                                  .early = true};
    const bool read =
        c->op == OP_attn && is_paged(c); // else the pool is only written, beside the weights
    o->kv = (struct kv_view){.k = read ? o->weights : o->out + o->bytes / 2,
                             .v = latent ? NULL : o->more,
                             .scales = (int8_t *)o->in, // any
                             .layers = o->layers,
                             .n_blocks = o->view.n_seqs * o->view.table_stride,
                             .block_size = BLOCK,
                             .dt = c->narrow ? DT_E4M3 : c->dt};
    const int64_t pool = (int64_t)o->kv.n_blocks * BLOCK * kv_heads * c->head_dim;
    if (read) set_turns(o, (size_t)pool * dtype_size(o->kv.dt));
    for (int i = 0; i < RUNS; i++)
        o->layers[i] = (struct kv_layer){.offset = read ? i % o->copies * pool : 0,
                                         .width = kv_heads * c->head_dim};
    o->store = rope_of_batch(o->table, c->head_dim, &o->view, &o->attn, 1);
    o->store.kv = &o->kv;
}

// Sorted rows, as many of each expert.
static void set_routing(struct ops_bench *o)
{
    int32_t offsets[1100];
    for (int e = 0; e <= o->call->experts; e++)
        offsets[e] = (int32_t)((int64_t)o->rows * e / o->call->experts);
    device_copy_in(o->b->dev, o->lists, offsets, sizeof *offsets * (size_t)(o->call->experts + 1));
}

static void set_lora(struct ops_bench *o)
{
    const struct call *c = o->call;
    struct lora_factors factors[LORA_PARTS];
    const size_t part = o->bytes / LORA_PARTS / 1024 * 1024; // quarters of it are aligned to 256
    o->lora = (struct lora_args){.factors = (const struct lora_factors *)o->little,
                                 .adapter = o->lists, // zeros
                                 .n_adapters = 1,
                                 .max_rank = LORA_RANK,
                                 .rows = o->rows,
                                 .k = c->k,
                                 .dt = c->dt,
                                 .out = c->dt,
                                 .dy = c->form == TO_WEIGHT ? o->in : NULL};
    for (int p = 0; p < LORA_PARTS && (p == 0 || c->parts[p]); p++) {
        char *at = o->weights + (size_t)p * part;
        factors[p] = (struct lora_factors){at, at + part / 4, LORA_RANK, 1};
        o->lora.grads[p] =
            (struct lora_grads){(float *)(at + part / 2), (float *)(at + part / 4 * 3)};
        o->lora.first[p + 1] = o->lora.first[p] + (c->parts[p] ? c->parts[p] : c->width);
        o->lora.n_parts = p + 1;
    }
    device_copy_in(o->b->dev, o->little, factors, sizeof *factors * (size_t)o->lora.n_parts);
}

// Parameters of all rows, and a draft of each.
static void set_samples(struct ops_bench *o)
{
    enum { MOST = 64 };
    struct sample_params params[MOST];
    struct sample_draft drafts[MOST];
    for (int i = 0; i < MOST; i++) {
        params[i] = o->call->sampling;
        params[i].seed = 7;
        params[i].position = (uint64_t)i;
        drafts[i] = (struct sample_draft){i * 1009, i};
    }
    device_copy_in(o->b->dev, o->lists, params, sizeof params);
    device_copy_in(o->b->dev, o->little, drafts, sizeof drafts);
}

// Zeros, behind which lie the scales of 8-bit ones.
static void set_moments(struct ops_bench *o)
{
    const bool scales = o->call->moments == MOMENTS_8BIT;
    o->moments = (struct moments){.kind = o->call->moments, .m = o->out, .v = o->more};
    if (scales) o->moments.m_scale = (float *)(o->out + o->bytes / 2);
    if (scales) o->moments.v_scale = (float *)(o->more + o->bytes / 2);
    device_fill(o->b->dev, o->out, 0, o->bytes);
    device_fill(o->b->dev, o->more, 0, o->bytes);
}

static enum status set_call(struct ops_bench *o)
{
    const struct call *c = o->call;
    const int m = o->rows, n = c->width, k = c->k, experts = c->experts > 0 ? c->experts : 1;
    enum status st = ST_OK;
    device_fill(o->b->dev, o->lists, 0, LISTS_BYTES);
    o->matmul = (struct matmul){m, n, k, .trans_b = true, .beta = c->beta, .in = c->dt};
    if (c->form == TO_INPUT) o->matmul = (struct matmul){m, k, n, .in = c->dt};
    if (c->form == TO_WEIGHT) {
        o->matmul.m = n, o->matmul.n = k, o->matmul.k = m;
        o->matmul.trans_a = true, o->matmul.trans_b = false;
    }
    o->matmul.out = c->form == TO_WEIGHT || n == VOCAB ? DT_F32 : c->dt;
    if (c->experts) o->matmul.offsets = o->lists;
    o->matmul.n_experts = c->experts;
    if (c->act) o->matmul.act = &o->act;
    o->matmul.x = o->more;
    o->matmul.early = true;
    if (c->narrow) o->matmul.scales = (const int8_t *)o->lists + LISTS_BYTES / 2; // zeros
    if (c->rounded) o->matmul.a_scales = o->matmul.scales;
    o->act =
        (struct act_shape){.rows = m, .width = n / 2, .kind = ACT_SILU, .gated = true, .dt = c->dt};
    o->latent =
        (struct latent_shape){m, LATENT_HEADS, 128, 64, LATENT_RANK, 128, c->dt, .early = true};
    const int of_b = c->form == TO_WEIGHT ? m : n * experts; // rows of k elements
    set_turns(o, dtype_size(c->dt) * (size_t)of_b * (size_t)k);
    if (c->op == OP_latent_matmul)
        set_turns(o, dtype_size(c->dt) * LATENT_HEADS * (128 + 128) * LATENT_RANK);
    if (c->each > 0) {
        CHECK(set_batch(o, is_paged(c)));
        set_attention(o);
    }
    if (c->experts > 0) set_routing(o);
    if (c->op == OP_lora) set_lora(o);
    const bool of_logits = c->op == OP_logprob || c->op == OP_logprob_back || c->op == OP_distill ||
                           c->op == OP_top_logprobs || c->op == OP_sample;
    if (of_logits) // as far apart as a model's, for filters to have what they leave out
        o->b->ops->random_normal(o->b->dev, o->in, (int64_t)m * VOCAB, 2, 1, 0, DT_F32);
    if (c->op == OP_sample) set_samples(o);
    if (c->op == OP_adamw) set_moments(o);
    st = device_sync(o->b->dev);
out:
    return st;
}

// What the calls read and write: one of the copies of what is taken in turn, and the rest.
struct operands {
    void *in, *out, *w;
    float *more;
    int turn;
};

static bool run_matmul(struct ops_bench *o, const struct operands *x)
{
    const struct ops *ops = o->b->ops;
    struct device *dev = o->b->dev;
    const struct call *c = o->call;
    const int m = o->rows;
    switch ((int)c->op) {
    case OP_matmul:
        ops->matmul(dev, x->out, x->in, x->w, NULL, &o->matmul);
        break;
    case OP_moe_route: {
        int32_t *lists = (int32_t *)x->out;
        const struct moe_shape moe = {
            .rows = m, .n_experts = c->experts, .top_k = 2, .norm_topk = true, .scale = 1};
        ops->moe_route(
            dev, &(struct moe_routing){lists, x->more, lists + 2 * m, lists + 4 * m, o->lists},
            (float *)x->in, NULL, &moe);
        break;
    }
    case OP_lora:
        ops->lora(dev, x->out, o->lora.dy ? x->more : (void *)x->in, &o->lora);
        break;
    default:
        return false;
    }
    return true;
}

static bool run_attention(struct ops_bench *o, const struct operands *x)
{
    const struct ops *ops = o->b->ops;
    struct device *dev = o->b->dev;
    switch ((int)o->call->op) {
    case OP_rope:
        ops->rope(dev, x->out, &o->store);
        break;
    case OP_attn:
        ops->attn(dev, x->out, o->view.packed ? x->more : NULL, x->in,
                  o->view.packed ? NULL : &o->kv, x->turn, &o->view, &o->attn);
        break;
    case OP_attn_back:
        ops->attn_back(dev, x->out, NULL, x->in, x->w, x->more, x->in, &o->view, &o->attn);
        break;
    case OP_latent_matmul:
        ops->latent_matmul(dev, x->out, x->in, o->call->form == FORWARD ? x->more : NULL, x->w,
                           &o->latent);
        break;
    default:
        return false;
    }
    return true;
}

static bool run_vocabulary(struct ops_bench *o, const struct operands *x)
{
    const struct ops *ops = o->b->ops;
    struct device *dev = o->b->dev;
    const struct call *c = o->call;
    const int m = o->rows;
    const struct head_args head = {(float *)x->in, o->lists, m, VOCAB, 1};
    switch ((int)o->call->op) {
    case OP_logprob:
        ops->logprob(dev, x->more, x->more + m, x->more + 2 * m, &head);
        break;
    case OP_logprob_back:
        ops->logprob_back(dev, x->out,
                          &(struct head_grads){.dlogprob = x->more, .lse = x->more + m}, &head,
                          c->dt);
        break;
    case OP_top_logprobs:
        ops->top_logprobs(dev, x->out, c->k, &head);
        break;
    case OP_sample: {
        struct sample_args rows = {
            .logits = x->in, .params = (struct sample_params *)o->lists, .n = m, .vocab = VOCAB};
        if (c->drafts) {
            rows.drafts = (struct sample_draft *)o->little;
            rows.draft_logits = (float *)o->weights;
            rows.draft_vocab = VOCAB;
        }
        ops->sample(dev, x->out, &rows);
        break;
    }
    case OP_distill:
        ops->distill(dev, x->more, x->more + m, x->out,
                     &(struct distill_args){.student = (float *)x->in,
                                            .teacher = (float *)o->weights,
                                            .n = m,
                                            .vocab = VOCAB,
                                            .teacher_vocab = VOCAB,
                                            .temperature = 1,
                                            .scale = 1},
                     c->dt);
        break;
    default:
        return false;
    }
    return true;
}

static void run_elements(struct ops_bench *o, const struct operands *x)
{
    const struct ops *ops = o->b->ops;
    struct device *dev = o->b->dev;
    const struct call *c = o->call;
    const int m = o->rows;
    const struct norm_args norm = {.x = x->in, .w = o->little, .rstd = x->more};
    const struct norm_shape norm_shape = {NORM_RMS, m, c->k, 1, c->k, 1e-6f, c->dt, false};
    switch ((int)o->call->op) {
    case OP_norm:
        ops->norm(dev, x->out, &norm, &norm_shape);
        break;
    case OP_norm_back:
        ops->norm_back(dev, x->out, o->table, NULL, o->weights, &norm, &norm_shape, true);
        break;
    case OP_act:
        ops->act(dev, x->out, x->in, &o->act);
        break;
    case OP_sum_squares:
        ops->sum_squares(dev, (double *)o->little, (float *)x->in, (int64_t)m * c->k);
        break;
    case OP_adamw:
        ops->adamw(dev, o->weights, (uint16_t *)(o->weights + o->bytes / 2), &o->moments,
                   (float *)x->in, (int64_t)m * c->k,
                   &(struct adamw){1e-6f, 0.9, 0.999, 1e-8f, 0.01f, 0.1f, 0.001f,
                                   (float *)o->little, 1, 0},
                   c->dt);
        break;
    default:
        fprintf(stderr, "cw-bench ops: a row of calls[] that nothing here calls: %s\n", c->what);
        abort();
    }
}

static void run(struct ops_bench *o)
{
    const int turn = o->turn++ % o->copies;
    const struct operands x = {.in = o->in,
                               .out = o->out,
                               .w = o->weights + (size_t)turn * o->stride,
                               .more = (float *)o->more,
                               .turn = turn};
    if (run_matmul(o, &x) || run_attention(o, &x) || run_vocabulary(o, &x)) return;
    run_elements(o, &x);
}

// What a call cannot do without: bytes that are read and written, and multiplications and
// additions.
struct cost {
    double bytes, flops;
};

static void matmul_cost(const struct ops_bench *o, struct cost *ret)
{
    const struct call *c = o->call;
    const struct matmul *s = &o->matmul;
    const double m = o->rows, n = c->width, k = c->k, e = (double)dtype_size(c->dt);
    const double matrices = c->experts ? fmin(m, c->experts) : 1; // that are not without rows
    const double w = c->narrow ? 1 : e;                           // of a weight
    double read, written = (double)dtype_size(s->out) * (1 + s->beta);
    ret->flops = 2 * m * n * k;
    switch ((int)c->op) {
    case OP_matmul: // C: sums of a gradient of weights; half as wide behind an act
        written *= c->form == TO_WEIGHT ? matrices * n * k : m * s->n / (c->act ? 2 : 1);
        read = c->form == TO_WEIGHT ? e * m * (n + k) : e * m * s->k + w * matrices * n * k;
        ret->bytes = read + written;
        break;
    case OP_moe_route:
        *ret = (struct cost){4 * m * c->experts, 0};
        break;
    case OP_lora:
        ret->bytes = e * m * (o->lora.dy ? 3 * k + n : k + 2 * n);
        ret->flops = (o->lora.dy ? 6 : 2) * m * LORA_RANK * (o->lora.n_parts * k + n);
        break;
    }
}

static bool attention_cost(const struct ops_bench *o, struct cost *ret)
{
    const struct call *c = o->call;
    const double m = o->rows, e = (double)dtype_size(c->dt);
    const double dim = c->head_dim, value = attn_value_dim(&o->attn), heads = o->attn.n_heads;
    const double row = (double)attn_row_width(&o->attn);
    const double latent = LATENT_HEADS * 128.0 * LATENT_RANK; // weights of either matmul
    switch ((int)c->op) {
    case OP_rope:
        ret->bytes = 2 * e * m * row; // queries are rotated where they are
        break;
    case OP_attn: // of a pool a sequence's keys are read once
        ret->bytes =
            e * m * heads * (dim + value) +
            (is_paged(c) ? dtype_size(o->kv.dt) * m / c->each * (c->before + c->each) : e * m) *
                (row - heads * dim);
        ret->flops = 2 * o->keys * heads * (dim + value);
        break;
    case OP_attn_back:
        ret->bytes = 2 * e * m * (row + heads * value);
        ret->flops = 5 * o->keys * heads * (dim + value);
        break;
    case OP_latent_matmul:
        ret->bytes =
            c->form == FORWARD
                ? e * (latent + m * LATENT_HEADS * (EXPANDED_DIM + LATENT_DIM) + 2 * m * LATENT_DIM)
                : e * (latent + m * LATENT_HEADS * (LATENT_RANK + 128));
        ret->flops = 2 * latent * m;
        break;
    default:
        return false;
    }
    return true;
}

static bool other_cost(const struct ops_bench *o, struct cost *ret)
{
    const struct call *c = o->call;
    const double m = o->rows, n = c->width, k = c->k, e = (double)dtype_size(c->dt);
    switch ((int)c->op) {
    case OP_logprob:
    case OP_top_logprobs:
    case OP_sample:
        ret->bytes = (c->drafts ? 8 : 4) * m * VOCAB;
        break;
    case OP_logprob_back:
        ret->bytes = (4 + e) * m * VOCAB;
        break;
    case OP_distill:
        ret->bytes = (8 + e) * m * VOCAB;
        break;
    case OP_norm:
        ret->bytes = 2 * e * m * k;
        break;
    case OP_norm_back:
        ret->bytes = 4 * e * m * k;
        break;
    case OP_act:
        ret->bytes = 1.5 * e * m * n;
        break;
    case OP_sum_squares:
        ret->bytes = 4 * m * k;
        break;
    case OP_adamw: { // gradients; both halves of the weights and the moments, read and written
        const double moment = c->moments == MOMENTS_F32    ? 4
                              : c->moments == MOMENTS_BF16 ? 2
                                                           : 1 + 4.0 / MOMENT_BLOCK;
        ret->bytes = m * k * (4 + 8 + 4 * moment);
        break;
    }
    default:
        return false;
    }
    return true;
}

// Microseconds that the call takes at least: the larger of its bytes at the bandwidth and, in the
// dtype whose rate was measured, its multiplications at that.
static double limit_us(const struct ops_bench *o)
{
    struct cost cost = {0, 0};
    if (!attention_cost(o, &cost) && !other_cost(o, &cost)) matmul_cost(o, &cost);
    const double rate = o->call->rounded ? 2 * o->flops : o->flops;
    const double by_flops = o->call->dt == o->b->dt ? cost.flops / rate : 0;
    return 1e6 * fmax(cost.bytes / o->b->bandwidth, by_flops);
}

// ---- the calls ----------------------------------------------------------------------------------

// clang-format off
#define DECODED        {1, 8, 16, 32, 64, 192, 256}
#define TRAINED        {1, 8, 16, 32, 64, 192, 256, 8192}
#define OF(n, from)    .width = n, .k = from
#define ATTENDS(rows_, before_, dim) \
    OF(QKV, HIDDEN), .each = rows_, .before = before_, .head_dim = dim
#define GROUPS         .prompt = 64, .samples = 8
#define OUT_OF         .form = TO_INPUT, .width = LATENT_DIM // latent attention's space
#define PARTS          .parts = {HIDDEN, KV_DIM, KV_DIM}
#define SAMPLED(t, p, top) .sampling = {.temperature = t, .top_p = p, .top_k = top}
#define ROUNDED        .narrow = true, .rounded = true
#define ACT            .act = true
#define DX             .form = TO_INPUT
#define DW             .form = TO_WEIGHT, .beta = 1
#define EXPERTS        .experts = 32
#define MIXTRAL        OF(2 * 14336, 4096), .experts = 8 // gate and up
// clang-format on
static const struct call calls[] = {
    {OP_matmul, "qkv", DT_BF16, TRAINED, OF(QKV, HIDDEN)},
    {OP_matmul, "o", DT_BF16, DECODED, OF(HIDDEN, HIDDEN)},
    {OP_matmul, "o, added", DT_BF16, {16, 1024}, OF(HIDDEN, HIDDEN), .beta = 1},
    {OP_matmul, "gate+up", DT_BF16, TRAINED, OF(2 * FFN, HIDDEN)},
    {OP_matmul, "gate+up dx", DT_BF16, {8192}, OF(2 * FFN, HIDDEN), DX},
    {OP_matmul, "gate+up dw", DT_BF16, {8192}, OF(2 * FFN, HIDDEN), DW},
    {OP_matmul, "down", DT_BF16, TRAINED, OF(HIDDEN, FFN)},
    {OP_matmul, "head", DT_BF16, DECODED, OF(VOCAB, HIDDEN)},
    {OP_matmul, "qkv in e4m3", DT_BF16, DECODED, OF(QKV, HIDDEN), .narrow = true},
    {OP_matmul, "down in e4m3", DT_BF16, TRAINED, OF(HIDDEN, FFN), .narrow = true},
    {OP_matmul, "qkv in e4m3, rows too", DT_BF16, DECODED, OF(QKV, HIDDEN), ROUNDED},
    {OP_matmul, "down in e4m3, rows too", DT_BF16, TRAINED, OF(HIDDEN, FFN), ROUNDED},
    {OP_matmul, "qkv in f32", DT_F32, {256}, OF(QKV, HIDDEN)},
    {OP_matmul, "gate+up, act", DT_BF16, {16, 1024}, OF(2 * FFN, HIDDEN), ACT},
    {OP_matmul, "gate+up, act, in e4m3", DT_BF16, DECODED, OF(2 * FFN, HIDDEN), ACT,
     .narrow = true},
    {OP_matmul, "gate+up, act, in e4m3, rows too", DT_BF16, TRAINED, OF(2 * FFN, HIDDEN), ACT,
     ROUNDED},
    {OP_matmul, "gate+up, act, in f32", DT_F32, {64}, OF(8192, HIDDEN), ACT},
    {OP_rope, "and storing, decode at 256 keys", DT_BF16, {16, 256}, ATTENDS(1, 256, DIM)},
    {OP_attn, "decode at 256 keys", DT_BF16, DECODED, ATTENDS(1, 255, DIM)},
    {OP_attn, "decode at 512 keys", DT_BF16, {64}, ATTENDS(1, 511, DIM)},
    {OP_attn, "decode at 1,024 keys", DT_BF16, {16}, ATTENDS(1, 1023, DIM)},
    {OP_attn, "decode at 4,096 keys", DT_BF16, {16}, ATTENDS(1, 4095, DIM)},
    {OP_attn, "4,096 keys in e4m3", DT_BF16, {1, 64}, ATTENDS(1, 4095, DIM), .narrow = true},
    {OP_attn, "512 of 1,024 in e4m3", DT_BF16, {1024}, ATTENDS(512, 512, DIM), .narrow = true},
    {OP_attn, "512 of 1,024 keys", DT_BF16, {1024}, ATTENDS(512, 512, DIM)},
    {OP_attn, "512 of 1,024 keys, heads of 256", DT_BF16, {1024}, ATTENDS(512, 512, 256)},
    {OP_attn, "latent, at 256 keys", DT_BF16, {1, 16, 64, 256}, ATTENDS(1, 255, LATENT_DIM)},
    {OP_attn, "latent, at 1,024 keys", DT_BF16, {16}, ATTENDS(1, 1023, LATENT_DIM)},
    {OP_attn, "latent, at 4,096 keys", DT_BF16, {16}, ATTENDS(1, 4095, LATENT_DIM)},
    {OP_attn, "decode at 256 keys in f32", DT_F32, {4}, ATTENDS(1, 255, DIM)},
    {OP_attn, "sequences of 512", DT_BF16, {2048, 8192}, ATTENDS(512, 0, DIM)},
    {OP_attn, "sequences of 4,096", DT_BF16, {8192}, ATTENDS(4096, 0, DIM)},
    {OP_attn, "prompts of 64, 8 x 228", DT_BF16, {7552}, ATTENDS(228, 0, DIM), GROUPS},
    {OP_attn, "sequences of 512, heads of 256", DT_BF16, {2048}, ATTENDS(512, 0, 256)},
    {OP_attn, "latent, of 512", DT_BF16, {2048, 8192}, ATTENDS(512, 0, LATENT_DIM)},
    {OP_attn, "latent, of 4,096", DT_BF16, {8192}, ATTENDS(4096, 0, LATENT_DIM)},
    {OP_attn, "sequences of 64 in f32", DT_F32, {128}, ATTENDS(64, 0, DIM)},
    {OP_attn_back, "sequences of 512", DT_BF16, {2048, 8192}, ATTENDS(512, 0, DIM)},
    {OP_attn_back, "sequences of 4,096", DT_BF16, {8192}, ATTENDS(4096, 0, DIM)},
    {OP_attn_back, "prompts of 64, 8 x 228", DT_BF16, {7552}, ATTENDS(228, 0, DIM), GROUPS},
    {OP_attn_back, "sequences of 512, heads of 256", DT_BF16, {2048}, ATTENDS(512, 0, 256)},
    {OP_attn_back, "latent, of 512", DT_BF16, {8192}, ATTENDS(512, 0, EXPANDED_DIM)},
    {OP_attn_back, "latent, of 4,096", DT_BF16, {8192}, ATTENDS(4096, 0, EXPANDED_DIM)},
    {OP_attn_back, "sequences of 64 in f32", DT_F32, {128}, ATTENDS(64, 0, DIM)},
    {OP_latent_matmul, "queries of 192", DT_BF16, {1, 16, 64, 256, 8192}, .width = LATENT_DIM},
    {OP_latent_matmul, "queries of 192 in f32", DT_F32, {16}, .width = LATENT_DIM},
    {OP_latent_matmul, "values", DT_BF16, {1, 16, 64, 256, 8192}, OUT_OF},
    {OP_latent_matmul, "values in f32", DT_F32, {16}, OUT_OF},
    {OP_moe_route, "Mixtral", DT_BF16, {1, 16, 256, 8192}, .experts = 8},
    {OP_matmul, "Mixtral gate+up", DT_BF16, {2, 8, 32, 128, 512, 16384}, MIXTRAL},
    {OP_matmul, "Mixtral gate+up dx", DT_BF16, {16384}, MIXTRAL, DX},
    {OP_matmul, "32 of 1,536", DT_BF16, {64, 8192}, OF(1536, HIDDEN), EXPERTS},
    {OP_matmul, "32 in e4m3", DT_BF16, {64, 8192}, OF(1536, HIDDEN), EXPERTS, .narrow = true},
    {OP_matmul, "32 in e4m3, rows too", DT_BF16, {64, 8192}, OF(1536, HIDDEN), EXPERTS, ROUNDED},
    {OP_matmul, "1,040 of 64 x 64", DT_BF16, {65536}, OF(64, 64), .experts = 1040},
    {OP_matmul, "32 of 256 in f32", DT_F32, {64}, OF(256, HIDDEN), EXPERTS},
    {OP_matmul, "32 of 1,536, act", DT_BF16, {64, 8192}, OF(1536, HIDDEN), EXPERTS, ACT},
    {OP_matmul, "32 in e4m3, act", DT_BF16, {64}, OF(1536, HIDDEN), EXPERTS, .narrow = true, ACT},
    {OP_matmul,
     "32 in e4m3, rows too, act",
     DT_BF16,
     {64},
     OF(1536, HIDDEN),
     EXPERTS,
     ROUNDED,
     ACT},
    {OP_matmul, "Mixtral gate+up dw", DT_BF16, {16384}, MIXTRAL, DW},
    {OP_matmul, "32 of 512 dw", DT_BF16, {8192}, OF(512, HIDDEN), EXPERTS, DW},
    {OP_matmul, "1,040 of 64 x 64 dw", DT_BF16, {65536}, OF(64, 64), .experts = 1040, DW},
    {OP_matmul, "32 of 64 in f32 dw", DT_F32, {64}, OF(64, HIDDEN), EXPERTS, DW},
    {OP_lora, "qkv", DT_BF16, {1, 16, 64, 8192}, OF(QKV, HIDDEN), PARTS},
    {OP_lora, "o", DT_BF16, {1, 16, 64, 1024, 8192}, OF(HIDDEN, HIDDEN)},
    {OP_lora, "gate+up", DT_BF16, {1, 64, 8192}, OF(2 * FFN, HIDDEN), .parts = {FFN, FFN}},
    {OP_lora, "down", DT_BF16, {1, 64, 8192}, OF(HIDDEN, FFN)},
    {OP_lora, "qkv in f32", DT_F32, {64}, OF(QKV, HIDDEN), PARTS},
    {OP_lora, "qkv, back", DT_BF16, {1024, 8192}, OF(QKV, HIDDEN), PARTS, DW},
    {OP_lora, "o, back", DT_BF16, {8192}, OF(HIDDEN, HIDDEN), DW},
    {OP_lora, "gate+up, back", DT_BF16, {8192}, OF(2 * FFN, HIDDEN), .parts = {FFN, FFN}, DW},
    {OP_lora, "down, back", DT_BF16, {8192}, OF(HIDDEN, FFN), DW},
    {OP_lora, "qkv in f32, back", DT_F32, {64}, OF(QKV, HIDDEN), PARTS, DW},
    {OP_norm, "hidden", DT_BF16, {16, 256, 32768}, .k = HIDDEN},
    {OP_norm, "hidden in f32", DT_F32, {256}, .k = HIDDEN},
    {OP_norm_back, "hidden", DT_BF16, {8192, 32768}, .k = HIDDEN},
    {OP_act, "gate+up", DT_BF16, {16, 256, 8192}, OF(2 * FFN, 0)},
    {OP_logprob, "targets", DT_BF16, {1024}, .width = VOCAB},
    {OP_logprob_back, "targets", DT_BF16, {1024}, .width = VOCAB},
    {OP_top_logprobs, "target alone", DT_BF16, {1024}, .k = 0},
    {OP_top_logprobs, "and the likeliest", DT_BF16, {1024}, .k = 1},
    {OP_top_logprobs, "and the 20 likeliest", DT_BF16, {1024}, .k = 20},
    {OP_top_logprobs, "and the 100 likeliest", DT_BF16, {1024}, .k = 100},
    {OP_sample, "unfiltered", DT_BF16, {1, 64}, SAMPLED(1, 1, 0)},
    {OP_sample, "unfiltered, drafts", DT_BF16, {1, 64}, SAMPLED(1, 1, 0), .drafts = true},
    {OP_sample, "top-k 50", DT_BF16, {1, 64}, SAMPLED(1, 1, 50)},
    {OP_sample, "top-k 50, drafts", DT_BF16, {1, 64}, SAMPLED(1, 1, 50), .drafts = true},
    {OP_sample, "top-p 0.9", DT_BF16, {1, 64}, SAMPLED(1, 0.9f, 0)},
    {OP_sample, "top-p 0.9, drafts", DT_BF16, {1, 64}, SAMPLED(1, 0.9f, 0), .drafts = true},
    {OP_sample, "greedy", DT_BF16, {1, 64}, SAMPLED(0, 1, 0)},
    {OP_sample, "greedy, drafts", DT_BF16, {1, 64}, SAMPLED(0, 1, 0), .drafts = true},
    {OP_distill, "targets", DT_BF16, {512}, .width = VOCAB},
    {OP_sum_squares, "524 M", DT_BF16, {32000}, .k = 16384},
    // these leave weights and scratch unfit for others
    {OP_adamw, "524 M, f32 moments", DT_BF16, {32000}, .k = 16384, .moments = MOMENTS_F32},
    {OP_adamw, "524 M, bf16 moments", DT_BF16, {32000}, .k = 16384, .moments = MOMENTS_BF16},
    {OP_adamw, "524 M, 8-bit moments", DT_BF16, {32000}, .k = 16384, .moments = MOMENTS_8BIT},
};
enum { N_CALLS = sizeof calls / sizeof *calls };

// What of a call's rows was read: microseconds; 0: it was not made.
struct reading {
    double us, limit_us;
    const struct op_variant *taken;
};

static enum status time_call(struct ops_bench *o, struct reading *r)
{
    struct device *dev = o->b->dev;
    struct device_graph *graph = NULL;
    double ms[5];
    enum status st;
    CHECK(set_call(o));
    run(o); // a library that chooses by timing does so now
    CHECK(device_sync(dev));
    if (device_capture_begin(dev)) {
        for (int i = 0; i < RUNS; i++) run(o);
        CHECK(device_capture_end(dev, &graph));
    }
    const int runs = graph ? RUNS : 1;
    for (int i = 0; i < 5; i++) {
        device_timer_start(dev);
        if (graph)
            device_graph_launch(dev, graph);
        else
            run(o);
        ms[i] = device_timer_stop(dev) / runs;
    }
    *r = (struct reading){1e3 * median(ms, 5), limit_us(o), device_variant_taken(dev, o->call->op)};
    st = device_sync(dev);
out:
    device_graph_free(graph);
    return st;
}

// ---- the table ----------------------------------------------------------------------------------

static const char *line_of(const struct call *c, int rows, char text[96])
{
    snprintf(text, 96, "%s, %d row%s", c->what, rows, rows == 1 ? "" : "s");
    return text;
}

static bool is_wanted(const struct bench *b, const struct call *c, int rows)
{
    char call[96], line[160];
    snprintf(line, sizeof line, "%s %s", op_name(c->op), line_of(c, rows, call));
    return rows > 0 && device_computes_in(b->dev, c->dt) && (!b->o.only || strstr(line, b->o.only));
}

static void print_row(const struct bench *b, json_t *rows, enum op op,
                      const struct op_variant *variant, const char *call, const struct reading *r)
{
    if (b->o.json)
        json_array_append_new(rows,
                              json_pack("{s:s, s:s, s:s, s:s?, s:o, s:o}", "op", op_name(op),
                                        "variant", variant->name, "taken", variant->taken, "call",
                                        call, "us", call ? json_real(r->us) : json_null(),
                                        "limit_us", call ? json_real(r->limit_us) : json_null()));
    else if (call)
        printf("%-20s %-13s %9.1f us %5.1f%% of the limit  %s (%s)\n", op_name(op), variant->name,
               r->us, 100 * r->limit_us / r->us, call, variant->taken);
    else
        printf("%-20s %-13s %12s  (%s)\n", op_name(op), variant->name, "", variant->taken);
}

// Every row of an operation, with each call that took it.
static void print_op(const struct bench *b, json_t *rows, enum op op,
                     struct reading read[N_CALLS][MAX_ROWS])
{
    static const struct op_variant one = {"one", "always", NULL};
    const struct op_variants *variants = op_variants_of(device_kind(b->dev), op);
    const struct op_variant *row = variants ? variants->rows : &one;
    for (int n = variants ? variants->n : 1; n > 0; n--, row++) {
        int taken = 0;
        for (int i = 0; i < N_CALLS * MAX_ROWS; i++) {
            const struct call *c = &calls[i / MAX_ROWS];
            const struct reading *r = &read[i / MAX_ROWS][i % MAX_ROWS];
            char text[96];
            if (c->op != op || r->us <= 0 || (variants && r->taken != row)) continue;
            print_row(b, rows, op, row, line_of(c, c->rows[i % MAX_ROWS], text), r);
            taken++;
        }
        if (!taken && b->o.variants) print_row(b, rows, op, row, NULL, NULL);
    }
}

static enum status open_numbers(struct ops_bench *o)
{
    struct bench *b = o->b;
    char **const each[] = {&o->in, &o->weights, &o->out, &o->more};
    enum status st;
    o->bytes = device_kind(b->dev) == DEVICE_CUDA ? (size_t)4 << 30 : (size_t)64 << 20;
    for (int i = 0; i < 4; i++) {
        CHECK(device_alloc(b->dev, o->bytes, (void **)each[i]));
        // numbers that are small in either dtype: pairs of bf16 are an f32 of about the second's
        // size
        b->ops->random_normal(b->dev, *each[i], (int64_t)(o->bytes / dtype_size(b->dt)), 0.1f, 1,
                              (uint64_t)i, b->dt);
    }
    CHECK(device_alloc(b->dev, LISTS_BYTES, (void **)&o->lists));
    CHECK(device_alloc(b->dev, LITTLE_BYTES, (void **)&o->little));
    CHECK(device_alloc(b->dev, TABLE_BYTES, (void **)&o->table));
    device_fill(b->dev, o->little, 0, LITTLE_BYTES);
    device_fill(b->dev, o->table, 0, TABLE_BYTES);
    st = device_sync(b->dev);
out:
    return st;
}

static void print_ops(const struct bench *b, struct reading read[N_CALLS][MAX_ROWS])
{
    json_t *rows = json_array();
    for (int op = 0; op < N_OPS; op++)
        if (op != OP_scratch_bytes) print_op(b, rows, (enum op)op, read);
    json_t *report = json_pack("{s:s, s:s, s:o}", "benchmark", "ops", "device", device_name(b->dev),
                               "rows", rows);
    if (b->o.json) {
        json_dumpf(report, stdout, JSON_COMPACT | JSON_REAL_PRECISION(6));
        putchar('\n');
    }
    json_decref(report);
}

enum status bench_ops(const struct bench_options *options)
{
    struct bench b = {.o = *options};
    struct ops_bench o = {.b = &b};
    static struct reading read[N_CALLS][MAX_ROWS];
    enum status st;
    CHECK(device_open(options->device, &b.dev));
    b.ops = device_ops(b.dev);
    b.dt = device_default_dtype(b.dev);
    CHECK(limits_bandwidth(&b));
    CHECK(limits_matmul(&b, &o.flops));
    CHECK(open_numbers(&o));
    for (int i = 0; i < N_CALLS * MAX_ROWS; i++) {
        o.call = &calls[i / MAX_ROWS];
        o.rows = o.call->rows[i % MAX_ROWS];
        if (is_wanted(&b, o.call, o.rows)) CHECK(time_call(&o, &read[i / MAX_ROWS][i % MAX_ROWS]));
    }
    print_ops(&b, read);
    st = device_sync(b.dev);
out:
    if (!b.dev) return st;
    void *const memory[] = {o.in, o.weights, o.out, o.more, o.lists, o.little, o.table};
    for (int i = 0; i < 7; i++) device_release(b.dev, memory[i]);
    device_free(b.dev);
    return st;
}
