/* time_ops.c: times the operations at the sizes of Qwen2.5-1.5B (experts: Mixtral-8x7B; latent
 * attention: DeepSeek-V2-Lite) on one device, through the table, and prints what each takes beside
 * the least its bytes or multiplications can take at the copy bandwidth and matrix rate measured in
 * the same run. Not a part of cw-bench: `make build/time_ops` builds it.
 *
 *   time_ops [--device cuda:N] [FILTER]     FILTER: lines whose name contains it */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "kernels/moments.h"
#include "kernels/ops.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HIDDEN = 1536,
    HEADS = 12,
    KV_HEADS = 2,
    DIM = 128,
    FFN = 8960,
    VOCAB = 151936,
    LAYERS = 28
};
enum { QKV = (HEADS + 2 * KV_HEADS) * DIM, BLOCK = 16 };

static struct device *dev;
static const struct ops *ops;
static const char *filter;
static double bytes_per_ms, flops_per_ms; // measured ceilings

static void must(enum status st)
{
    if (st == ST_OK) return;
    fprintf(stderr, "time_ops: %s\n", status_message());
    exit(1);
}

static void *take(size_t bytes)
{
    void *p = NULL;
    must(device_alloc(dev, bytes, &p));
    return p;
}

// Device memory of n bf16 values, normal with this deviation; a block of 1 Mi values repeated.
static void *random_bf16(size_t n, float deviation, uint64_t seed)
{
    enum { CHUNK = 1 << 20 };
    struct rng rng;
    rng_init(&rng, seed, 0);
    uint16_t *host = malloc(CHUNK * sizeof *host);
    if (!host) exit(1);
    for (int i = 0; i < CHUNK; i++) host[i] = bf16_from_f32(deviation * rng_normal(&rng));
    uint16_t *p = take(n * sizeof *p);
    for (size_t at = 0; at < n; at += CHUNK)
        device_copy_in(dev, p + at, host, (n - at < CHUNK ? n - at : CHUNK) * sizeof *host);
    must(device_sync(dev));
    free(host);
    return p;
}

static void *random_f32(size_t n, float deviation, uint64_t seed)
{
    void *half = random_bf16(n, deviation, seed), *p = take(n * 4);
    ops->convert(dev, p, DT_F32, half, DT_BF16, (int64_t)n);
    device_release(dev, half);
    return p;
}

static int32_t *ints(const int32_t *host, size_t n)
{
    int32_t *p = take(n * sizeof *p);
    device_copy_in(dev, p, host, n * sizeof *p);
    must(device_sync(dev));
    return p;
}

typedef void work(void *context);

// Milliseconds of one run: median of 7 samples of `inner` runs, captured where the device captures.
static double time_work(work *run, void *context, int inner)
{
    double sample[7];
    struct device_graph *graph = NULL;
    run(context);
    must(device_sync(dev));
    if (device_capture_begin(dev)) {
        for (int i = 0; i < inner; i++) run(context);
        must(device_capture_end(dev, &graph));
    }
    for (int s = -1; s < 7; s++) {
        device_timer_start(dev);
        if (graph)
            device_graph_launch(dev, graph);
        else
            for (int i = 0; i < inner; i++) run(context);
        double ms = device_timer_stop(dev) / inner;
        if (s >= 0) sample[s] = ms;
    }
    device_graph_free(graph);
    must(device_sync(dev));
    for (int i = 0; i < 7; i++)
        for (int j = i + 1; j < 7; j++)
            if (sample[j] < sample[i]) {
                double t = sample[i];
                sample[i] = sample[j];
                sample[j] = t;
            }
    return sample[3];
}

static double report(const char *name, work *run, void *context, int inner, double bytes,
                     double flops)
{
    if (filter && !strstr(name, filter)) return 0;
    double ms = time_work(run, context, inner);
    double floor = bytes_per_ms > 0 ? bytes / bytes_per_ms : 0;
    if (flops_per_ms > 0 && flops / flops_per_ms > floor) floor = flops / flops_per_ms;
    printf("%-34s %9.2f us  %7.0f GB/s  %6.1f TFLOP/s  %5.1f%% of the limit\n", name, ms * 1e3,
           bytes / ms / 1e6, flops / ms / 1e9, 100 * floor / ms);
    fflush(stdout);
    return ms;
}

// ---- single operations -------------------------------------------------------------------------

struct product {
    void *c, *a, *b, *bias;
    struct matmul shape;
    size_t copies, turn; // weights are taken in turn from `copies` places, so that L2 does not help
};

static void run_product(void *context)
{
    struct product *p = context;
    const uint16_t *b = p->b;
    b += p->turn++ % p->copies * p->shape.n * p->shape.k;
    ops->matmul(dev, p->c, p->a, b, p->bias, &p->shape);
}

static void time_product(const char *name, int m, int n, int k, bool trans_a, bool trans_b,
                         int inner)
{
    if (filter && !strstr(name, filter)) return;
    size_t copies =
        (size_t)inner * n * k > (600u << 20) ? (600u << 20) / ((size_t)n * k) : (size_t)inner;
    if (copies < 1 || !trans_b) copies = 1;
    struct product p = {take((size_t)m * n * 4),
                        random_bf16((size_t)m * k, 1, 1),
                        random_bf16(copies * n * k, 0.02f, 2),
                        NULL,
                        {m, n, k, trans_a, trans_b, 0, DT_BF16, DT_BF16, true, NULL, NULL, NULL},
                        copies,
                        0};
    report(name, run_product, &p, inner, 2.0 * ((double)m * k + (double)n * k + (double)m * n),
           2.0 * m * n * k);
    device_release(dev, p.a);
    device_release(dev, p.b);
    device_release(dev, p.c);
}

// The experts' products of a mixture of Mixtral-8x7B's size, rows spread evenly over its experts.
struct experts {
    void *c, *a, *b, *logits;
    float *dw;
    struct moe_routing routing;
    struct moe_shape moe;
    struct matmul shape;
};

enum { EXPERTS = 8, EXPERT_HIDDEN = 4096, EXPERT_FFN = 14336 };

static void run_route(void *context)
{
    struct experts *x = context;
    ops->moe_route(dev, &x->routing, x->logits, NULL, &x->moe);
}

static void run_experts(void *context)
{
    struct experts *x = context;
    ops->matmul_experts(dev, x->c, x->a, x->b, x->routing.offsets, EXPERTS, &x->shape);
}

static void run_experts_back(void *context)
{
    struct experts *x = context;
    ops->matmul_experts_back(dev, x->dw, x->c, x->a, x->routing.offsets, EXPERTS, &x->shape);
}

static void time_experts(int rows)
{
    enum { TOP = 2, N = 2 * EXPERT_FFN, K = EXPERT_HIDDEN };
    char name[4][64];
    snprintf(name[0], sizeof name[0], "experts route, %d rows", rows);
    snprintf(name[1], sizeof name[1], "experts gate+up, %d rows", rows);
    snprintf(name[2], sizeof name[2], "experts gate+up dx, %d rows", rows);
    snprintf(name[3], sizeof name[3], "experts gate+up dw, %d rows", rows);
    bool wanted = !filter;
    for (int i = 0; i < 4 && !wanted; i++) wanted = strstr(name[i], filter);
    if (!wanted) return;
    const int m = rows * TOP, busy = m < EXPERTS ? m : EXPERTS;
    struct experts x = {
        .moe = {.rows = rows, .n_experts = EXPERTS, .top_k = TOP, .norm_topk = true, .scale = 1},
        .shape = {m, N, K, false, true, 0, DT_BF16, DT_BF16, .early = true}};
    float *logits = malloc((size_t)rows * EXPERTS * sizeof *logits);
    if (!logits) exit(1);
    for (int i = 0; i < rows; i++)
        for (int e = 0; e < EXPERTS; e++)
            logits[i * EXPERTS + e] = -(float)((e - TOP * i % EXPERTS + EXPERTS) % EXPERTS);
    x.logits = take((size_t)rows * EXPERTS * 4);
    device_copy_in(dev, x.logits, logits, (size_t)rows * EXPERTS * 4);
    must(device_sync(dev));
    free(logits);
    x.a = random_bf16((size_t)m * K, 1, 41);
    x.b = random_bf16((size_t)EXPERTS * N * K, 0.02f, 42);
    x.c = random_bf16((size_t)m * N, 1, 43);
    x.routing = (struct moe_routing){take(m * 4ul), take(m * 4ul), take(m * 4ul), take(m * 4ul),
                                     take((EXPERTS + 1) * 4)};
    run_route(&x);
    double flops = 2.0 * m * N * K, weights = 2.0 * busy * N * K, in_out = 2.0 * m * (N + K);
    report(name[0], run_route, &x, 8, 0, 0);
    report(name[1], run_experts, &x, 2, weights + in_out, flops);
    if (rows >= 1024) {
        x.dw = take((size_t)EXPERTS * N * K * 4);
        device_fill(dev, x.dw, 0, (size_t)EXPERTS * N * K * 4);
        report(name[3], run_experts_back, &x, 2, 4 * weights + in_out, flops);
        x.shape =
            (struct matmul){.m = m, .n = K, .k = N, .in = DT_BF16, .out = DT_BF16, .early = true};
        void *dx = x.a, *dy = x.c;
        x.c = dx;
        x.a = dy;
        report(name[2], run_experts, &x, 2, weights + in_out, flops);
    }
    void *all[] = {x.c,
                   x.a,
                   x.b,
                   x.logits,
                   x.dw,
                   x.routing.expert,
                   x.routing.weight,
                   x.routing.row,
                   x.routing.place,
                   x.routing.offsets};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) device_release(dev, all[i]);
}

// One adapter of rank 16 on a matmul of these parts.
struct adapted {
    void *x, *y;
    struct lora_args args;
    struct lora_grads grads[LORA_PARTS];
};

static void run_lora(void *context)
{
    struct adapted *a = context;
    ops->lora(dev, a->y, a->x, &a->args);
}

static void run_lora_back(void *context)
{
    struct adapted *a = context;
    ops->lora_back(dev, a->x, a->grads, a->y, a->x, &a->args);
}

static void time_lora(const char *what, int rows, int k, const int widths[LORA_PARTS])
{
    enum { RANK = 16 };
    char name[2][64];
    snprintf(name[0], sizeof name[0], "lora %s, %d rows", what, rows);
    snprintf(name[1], sizeof name[1], "lora back %s, %d rows", what, rows);
    if (filter && !strstr(name[0], filter) && !strstr(name[1], filter)) return;
    struct lora_factors list[LORA_PARTS];
    struct adapted a = {.args = {.n_adapters = 1, .max_rank = RANK, .rows = rows, .k = k}};
    struct lora_args *l = &a.args;
    l->dt = DT_BF16;
    for (int p = 0; p < LORA_PARTS && widths[p]; p++) {
        list[p] =
            (struct lora_factors){random_bf16((size_t)RANK * k, 0.02f, 61 + p),
                                  random_bf16((size_t)RANK * widths[p], 0.02f, 71 + p), RANK, 1};
        a.grads[p] = (struct lora_grads){random_f32((size_t)RANK * k, 1, 81),
                                         random_f32((size_t)RANK * widths[p], 1, 82)};
        l->first[++l->n_parts] = l->first[p] + widths[p];
    }
    const int width = l->first[l->n_parts];
    struct lora_factors *factors = take(sizeof list);
    int32_t *adapter = take((size_t)rows * sizeof *adapter);
    device_copy_in(dev, factors, list, (size_t)l->n_parts * sizeof *list);
    device_fill(dev, adapter, 0, (size_t)rows * sizeof *adapter);
    must(device_sync(dev));
    l->factors = factors;
    l->adapter = adapter;
    a.x = random_bf16((size_t)rows * k, 1, 51);
    a.y = random_bf16((size_t)rows * width, 1, 52);
    const double x = 2.0 * rows * k, y = 2.0 * rows * width;
    const double flops = 2.0 * rows * RANK * ((double)l->n_parts * k + width);
    report(name[0], run_lora, &a, 8, x + 2 * y, flops);
    // h again, dh, both gradients and dx
    if (rows >= 1024) report(name[1], run_lora_back, &a, 8, 3 * x + y, 3 * flops);
    device_release(dev, a.x);
    device_release(dev, a.y);
    device_release(dev, factors);
    device_release(dev, adapter);
    for (int p = 0; p < l->n_parts; p++) {
        device_release(dev, (void *)(uintptr_t)list[p].a);
        device_release(dev, (void *)(uintptr_t)list[p].b);
        device_release(dev, a.grads[p].a);
        device_release(dev, a.grads[p].b);
    }
}

struct copy {
    void *to, *from;
    int64_t bytes;
};

// By a kernel: the copy engines are slower.
static void run_copy(void *context)
{
    struct copy *c = context;
    ops->convert(dev, c->to, DT_F32, c->from, DT_F32, c->bytes / 4);
}

struct adam {
    void *w;
    uint16_t *low;
    struct moments moments;
    float *grad, *clip;
    double *sum;
    int64_t n;
};

static void run_adam(void *context)
{
    struct adam *a = context;
    const struct adamw shape = {1e-6f, 0.9f, 0.999f, 1e-8f, 0.01f, 0.1f, 0.001f, a->clip, 1, 0};
    ops->adamw(dev, a->w, a->low, &a->moments, a->grad, a->n, &shape, DT_BF16);
}

static void run_squares(void *context)
{
    struct adam *a = context;
    ops->sum_squares(dev, a->sum, a->grad, a->n);
}

static void time_optimizer(void)
{
    struct adam a = {.n = 500 << 20};
    a.w = random_bf16(a.n, 0.02f, 3);
    a.low = take(a.n * 2);
    a.grad = random_f32(a.n, 1e-3f, 5);
    a.clip = random_f32(1, 1, 6);
    a.sum = take(8);
    device_fill(dev, a.low, 0, a.n * 2);
    for (int kind = MOMENTS_F32; kind <= MOMENTS_8BIT; kind++) {
        static const char *const names[] = {"adamw, 524 M parameters", "adamw, bf16 moments",
                                            "adamw, 8-bit moments"};
        int64_t bytes = a.n * (kind == MOMENTS_F32 ? 4 : kind == MOMENTS_BF16 ? 2 : 1);
        int64_t scales = kind == MOMENTS_8BIT ? a.n / MOMENT_BLOCK * 4 : 0;
        a.moments = (struct moments){kind, take(bytes), take(bytes), NULL, NULL};
        device_fill(dev, a.moments.m, 0, bytes);
        device_fill(dev, a.moments.v, 0, bytes);
        if (scales) {
            a.moments.m_scale = take(scales);
            a.moments.v_scale = take(scales);
            device_fill(dev, a.moments.m_scale, 0, scales);
            device_fill(dev, a.moments.v_scale, 0, scales);
        }
        // gradients, both halves of the weights and the moments, the last two read and written
        report(names[kind], run_adam, &a, 1, 12.0 * a.n + 4.0 * bytes + 4.0 * scales, 0);
        device_release(dev, a.moments.m);
        device_release(dev, a.moments.v);
        device_release(dev, a.moments.m_scale);
        device_release(dev, a.moments.v_scale);
    }
    report("sum of squares, 524 M", run_squares, &a, 1, 4.0 * a.n, 0);
    device_release(dev, a.w);
    device_release(dev, a.low);
    device_release(dev, a.grad);
    device_release(dev, a.clip);
    device_release(dev, a.sum);
}

struct packed {
    void *qkv, *out, *dout, *dqkv;
    float *lse;
    struct batch_view batch;
    struct attn_shape shape;
};

static void run_packed(void *context)
{
    struct packed *p = context;
    ops->attn_packed(dev, p->out, p->lse, p->qkv, &p->batch, &p->shape);
}

static void run_packed_back(void *context)
{
    struct packed *p = context;
    ops->attn_packed_back(dev, p->dqkv, p->dout, p->out, p->lse, p->qkv, &p->batch, &p->shape);
}

// Lists of a packed batch, of groups of samples that share a prompt (none: of 0 tokens); gives the
// keys that its rows attend to, in all.
static double fill_groups(struct batch_view *b, int groups, int samples, int prompt, int len)
{
    enum { POSITIONS, SEQ_OF, START, PREFIX_START, PREFIX_LEN, END, LISTS };
    const int T = groups * (prompt + samples * len), n = T + 1;
    int32_t *list = calloc((size_t)LISTS * n, sizeof *list), *at[LISTS];
    if (!list) exit(1);
    for (int i = 0; i < LISTS; i++) at[i] = list + i * n;
    int row = 0, s = 0;
    double keys = 0;
    for (int g = 0; g < groups; g++)
        for (int i = prompt ? -1 : 0, first = row; i < samples; i++, s++) {
            const int rows = i < 0 ? prompt : len, before = i < 0 ? 0 : prompt;
            at[START][s] = row;
            at[PREFIX_START][s] = first;
            at[PREFIX_LEN][s] = before;
            at[END][s] = i < 0 ? row + prompt + samples * len : row + rows;
            for (int r = 0; r < rows; r++, row++) {
                at[POSITIONS][row] = before + r;
                at[SEQ_OF][row] = s;
                keys += before + r + 1;
            }
        }
    at[START][s] = row;
    const int32_t *lists = ints(list, (size_t)LISTS * n);
    *b = (struct batch_view){.n_tokens = T,
                             .n_seqs = s,
                             .max_query = len > prompt ? len : prompt,
                             .max_context = prompt + len,
                             .packed = true,
                             .positions = lists + POSITIONS * n,
                             .seq_of = lists + SEQ_OF * n,
                             .query_start = lists + START * n,
                             .prefix_start = lists + PREFIX_START * n,
                             .prefix_len = lists + PREFIX_LEN * n,
                             .attend_end = lists + END * n};
    free(list);
    return keys;
}

static void time_packed(int groups, int samples, int prompt, int len)
{
    struct packed p = {.shape = {.n_heads = HEADS,
                                 .n_kv_heads = KV_HEADS,
                                 .head_dim = DIM,
                                 .scale = 0.0883883f,
                                 .dt = DT_BF16}};
    const double flops = 4.0 * HEADS * DIM * fill_groups(&p.batch, groups, samples, prompt, len);
    const int T = p.batch.n_tokens;
    p.qkv = random_bf16((size_t)T * QKV, 1, 7);
    p.dqkv = take((size_t)T * QKV * 2);
    p.out = take((size_t)T * HEADS * DIM * 2);
    p.dout = random_bf16((size_t)T * HEADS * DIM, 1, 8);
    p.lse = take((size_t)T * HEADS * 4);
    char name[64], shape[32];
    if (prompt)
        snprintf(shape, sizeof shape, "%d x (%d + %d x %d)", groups, prompt, samples, len);
    else
        snprintf(shape, sizeof shape, "%d x %d", groups * samples, len);
    snprintf(name, sizeof name, "attention, packed %s", shape);
    report(name, run_packed, &p, 4, 2.0 * T * (QKV + HEADS * DIM), flops);
    run_packed(&p);
    snprintf(name, sizeof name, "attention gradient %s", shape);
    report(name, run_packed_back, &p, 4, 2.0 * T * (2 * QKV + 2 * HEADS * DIM), 2.5 * flops);
}

struct normed {
    void *x, *y, *dy, *w;
    float *rstd, *dw;
    struct norm_shape shape;
};

static void run_norm(void *context)
{
    struct normed *n = context;
    const struct norm_args args = {.x = n->x, .w = n->w, .rstd = n->rstd};
    ops->norm(dev, n->y, &args, &n->shape);
}

static void run_norm_back(void *context)
{
    struct normed *n = context;
    const struct norm_args args = {.x = n->x, .w = n->w, .rstd = n->rstd};
    ops->norm_back(dev, n->y, n->dw, NULL, n->dy, &args, &n->shape, true);
}

// Of four training steps' rows, which the L2 cache does not hold, and of one's.
static void time_norm(void)
{
    enum { ROWS = 8192 };
    const size_t size = (size_t)ROWS * HIDDEN;
    struct normed n = {.x = random_bf16(4 * size, 1, 51),
                       .y = random_bf16(4 * size, 1, 52),
                       .dy = random_bf16(4 * size, 1, 53),
                       .w = random_bf16(HIDDEN, 1, 54),
                       .rstd = take(4 * ROWS * sizeof(float)),
                       .dw = random_f32(HIDDEN, 1, 55),
                       .shape = {NORM_RMS, 4 * ROWS, HIDDEN, 1, HIDDEN, 1e-6f, DT_BF16}};
    report("norm, 32768 rows", run_norm, &n, 2, 4.0 * 4 * size, 0);
    report("norm gradient, 32768 rows", run_norm_back, &n, 2, 8.0 * 4 * size, 0);
    n.shape.rows = ROWS;
    report("norm gradient, 8192 rows", run_norm_back, &n, 2, 8.0 * size, 0);
    void *all[] = {n.x, n.y, n.dy, n.w, n.rstd, n.dw};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) device_release(dev, all[i]);
}

// ---- a decode step: the operations of one, layer by layer, with weights of their own
// ----------------

struct step {
    int batch;
    uint16_t *weights, *x, *normed, *qkv, *attn, *wide, *act;
    uint16_t *norm, *bias;
    float *logits, *table;
    struct sample_params *params;
    struct sample_result *result;
    int32_t *tokens;
    uint16_t *embed;
    struct kv_view kv;
    struct kv_layer kv_layers[LAYERS];
    struct batch_view view;
    struct attn_shape attn_shape;
    unsigned parts; // which of the operations below run
};
enum { PRODUCTS = 1, ATTENTION = 2, SMALL = 4, HEAD = 8, SAMPLE = 16, ALL = 31 };

static void product(struct step *s, void *c, const void *a, const void *w, const void *bias, int n,
                    int k, float beta)
{
    const struct matmul shape = {.m = s->batch,
                                 .n = n,
                                 .k = k,
                                 .trans_b = true,
                                 .beta = beta,
                                 .in = DT_BF16,
                                 .out = DT_BF16,
                                 .early = true};
    if (s->parts & PRODUCTS) ops->matmul(dev, c, a, w, bias, &shape);
}

static void run_step(void *context)
{
    struct step *s = context;
    const struct norm_shape norm = {NORM_RMS, s->batch, HIDDEN, 1, HIDDEN, 1e-6f, DT_BF16};
    const struct norm_args normed = {.x = s->x, .w = s->norm};
    const struct act_shape act = {s->batch, FFN, ACT_SILU, true, DT_BF16, 0, 0};
    const struct sample_args rows = {
        .logits = s->logits, .params = s->params, .n = s->batch, .vocab = VOCAB};
    const uint16_t *w = s->weights;
    bool small = s->parts & SMALL;
    if (small)
        ops->gather_rows(dev, s->x, s->embed,
                         &(struct gather_args){s->tokens, s->batch, HIDDEN, 1, DT_BF16, 0, 0});
    for (int l = 0; l < LAYERS; l++) {
        if (small) ops->norm(dev, s->normed, &normed, &norm);
        product(s, s->qkv, s->normed, w, s->bias, QKV, HIDDEN, 0);
        w += (size_t)QKV * HIDDEN;
        const struct rope_store store = {s->table, DIM, &s->kv, l, &s->view, &s->attn_shape};
        if (small) ops->rope_store(dev, s->qkv, &store);
        if (s->parts & ATTENTION)
            ops->attn_paged(dev, s->attn, s->qkv, &s->kv, l, &s->view, &s->attn_shape);
        product(s, s->x, s->attn, w, NULL, HIDDEN, HEADS * DIM, 1);
        w += (size_t)HIDDEN * HEADS * DIM;
        if (small) ops->norm(dev, s->normed, &normed, &norm);
        product(s, s->wide, s->normed, w, NULL, 2 * FFN, HIDDEN, 0);
        w += (size_t)2 * FFN * HIDDEN;
        if (small) ops->act(dev, s->act, s->wide, &act);
        product(s, s->x, s->act, w, NULL, HIDDEN, FFN, 1);
        w += (size_t)HIDDEN * FFN;
    }
    const struct matmul head = {s->batch, VOCAB,   HIDDEN, false,        true,
                                0,        DT_BF16, DT_F32, .early = true};
    if (small) ops->norm(dev, s->normed, &normed, &norm);
    if (s->parts & HEAD) ops->matmul(dev, s->logits, s->normed, s->embed, NULL, &head);
    if (s->parts & SAMPLE) ops->sample(dev, s->result, &rows);
}

// The last of `context` tokens of each of so many sequences, in blocks all over a pool.
static struct batch_view decode_view(int batch, int context)
{
    const int blocks = (context + BLOCK - 1) / BLOCK;
    int32_t *host = calloc((size_t)batch * blocks + batch + 1, sizeof *host);
    struct batch_view view = {.n_tokens = batch,
                              .n_seqs = batch,
                              .max_query = 1,
                              .max_context = context,
                              .table_stride = blocks};
    if (!host) exit(1);
    for (int i = 0; i < batch; i++) host[i] = context - 1;
    view.positions = view.stored = ints(host, batch);
    for (int i = 0; i < batch; i++) host[i] = context;
    view.context_len = ints(host, batch);
    for (int i = 0; i <= batch; i++) host[i] = i;
    view.seq_of = view.query_start = ints(host, batch + 1);
    for (int i = 0; i < batch * blocks; i++)
        host[i] = (int32_t)((int64_t)i * 7919 % (batch * blocks));
    view.block_table = ints(host, (size_t)batch * blocks);
    for (int i = 0; i < batch; i++)
        host[i] = (int32_t)(((int64_t)i * blocks + blocks - 1) * 7919 % (batch * blocks)) * BLOCK +
                  (context - 1) % BLOCK;
    view.slots = ints(host, batch);
    free(host);
    return view;
}

// What is sampled for each of the batch, and the token before it.
static void put_samples(struct step *s, int batch)
{
    struct sample_params *params = calloc(batch, sizeof *params);
    int32_t *host = calloc(batch, sizeof *host);
    if (!params || !host) exit(1);
    for (int i = 0; i < batch; i++) params[i] = (struct sample_params){1, 1, 0, 0, 7, i};
    s->params = take(batch * sizeof *params);
    device_copy_in(dev, s->params, params, batch * sizeof *params);
    for (int i = 0; i < batch; i++) host[i] = 1000 + i;
    s->tokens = ints(host, batch);
    free(host);
    free(params);
}

static void time_step(int batch, int context)
{
    char name[64];
    snprintf(name, sizeof name, "decode step, batch %d, context %d", batch, context);
    if (filter && !strstr(name, filter)) return;
    size_t per_layer =
        (size_t)QKV * HIDDEN + (size_t)HIDDEN * HEADS * DIM + (size_t)3 * FFN * HIDDEN;
    int blocks = (context + BLOCK - 1) / BLOCK;
    size_t kv_layer = (size_t)batch * blocks * BLOCK * KV_HEADS * DIM;
    struct step s = {.batch = batch,
                     .attn_shape = {.n_heads = HEADS,
                                    .n_kv_heads = KV_HEADS,
                                    .head_dim = DIM,
                                    .scale = 0.0883883f,
                                    .dt = DT_BF16,
                                    .early = true}};
    s.weights = random_bf16(per_layer * LAYERS, 0.02f, 11);
    s.embed = random_bf16((size_t)VOCAB * HIDDEN, 0.02f, 12);
    s.x = random_bf16((size_t)batch * HIDDEN, 1, 13);
    s.normed = take((size_t)batch * HIDDEN * 2);
    s.qkv = random_bf16((size_t)batch * QKV, 1, 14);
    s.attn = random_bf16((size_t)batch * HEADS * DIM, 1, 15);
    s.wide = random_bf16((size_t)batch * 2 * FFN, 1, 16);
    s.act = random_bf16((size_t)batch * FFN, 1, 17);
    s.norm = random_bf16(HIDDEN, 1, 18);
    s.bias = random_bf16(QKV, 1, 19);
    s.logits = random_f32((size_t)batch * VOCAB, 1, 20);
    s.table = random_f32((size_t)(context + 1) * DIM, 0.7f, 21);
    s.result = take(batch * sizeof *s.result);
    for (int l = 0; l < LAYERS; l++)
        s.kv_layers[l] =
            (struct kv_layer){.offset = (int64_t)l * (int64_t)kv_layer, .width = KV_HEADS * DIM};
    s.kv = (struct kv_view){.k = random_bf16(kv_layer * LAYERS, 1, 22),
                            .v = random_bf16(kv_layer * LAYERS, 1, 23),
                            .layers = s.kv_layers,
                            .n_blocks = batch * blocks,
                            .block_size = BLOCK,
                            .dt = DT_BF16};
    put_samples(&s, batch);
    s.view = decode_view(batch, context);

    double weights = 2.0 * per_layer * LAYERS, head = 2.0 * VOCAB * HIDDEN;
    double kv = 4.0 * LAYERS * batch * (double)context * KV_HEADS * DIM;
    s.parts = ALL;
    report(name, run_step, &s, 1, weights + head + kv, 0);
    s.parts = PRODUCTS;
    report("  decode step: 112 products", run_step, &s, 1, weights, 0);
    s.parts = HEAD;
    report("  decode step: head", run_step, &s, 1, head, 0);
    s.parts = ATTENTION;
    report("  decode step: attention", run_step, &s, 1, kv, 0);
    s.parts = SMALL;
    report("  decode step: norm rope kv act", run_step, &s, 1, 0, 0);
    s.parts = SAMPLE;
    report("  decode step: sample", run_step, &s, 1, 4.0 * batch * VOCAB, 0);
    void *all[] = {s.weights, s.embed, s.x,      s.normed, s.qkv,    s.attn, s.wide, s.act,
                   s.norm,    s.bias,  s.logits, s.table,  s.result, s.kv.k, s.kv.v, s.params};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) device_release(dev, all[i]);
}

// ---- latent attention --------------------------------------------------------------------------

enum { LATENT_HEADS = 16, NOPE = 128, ROPE = 64, RANK = 512, VALUE = 128, WIDTH = RANK + ROPE };

struct latent {
    struct latent_shape shape;
    uint16_t *q, *keys, *w, *qkv, *o, *out;
    size_t turn; // of LAYERS matrices or pools
    struct attn_shape attn;
    struct batch_view view;
    struct kv_layer layers[LAYERS];
    struct kv_view kv;
};

static const uint16_t *latent_weights(struct latent *t)
{
    return t->w + t->turn++ % LAYERS * LATENT_HEADS * (NOPE + VALUE) * RANK;
}

static void run_latent_query(void *context)
{
    struct latent *t = context;
    ops->latent_query(dev, t->qkv, t->q, t->keys, latent_weights(t), &t->shape);
}

static void run_latent_value(void *context)
{
    struct latent *t = context;
    ops->latent_value(dev, t->out, t->o, latent_weights(t), &t->shape);
}

static void run_latent_paged(void *context)
{
    struct latent *t = context;
    ops->attn_paged(dev, t->o, t->qkv, &t->kv, (int)(t->turn++ % LAYERS), &t->view, &t->attn);
}

// The products for so many rows; context > 0: and attention of as many decoded.
static void time_latent(int rows, int context)
{
    char name[64];
    struct latent t = {.shape = {rows, LATENT_HEADS, NOPE, ROPE, RANK, VALUE, DT_BF16, true},
                       .attn = {.n_heads = LATENT_HEADS,
                                .n_kv_heads = 1,
                                .head_dim = WIDTH,
                                .latent = RANK,
                                .scale = 0.0721688f,
                                .dt = DT_BF16}};
    const double w = (double)LATENT_HEADS * RANK * NOPE, r = rows, heads = r * LATENT_HEADS;
    t.q = random_bf16((size_t)heads * (NOPE + ROPE), 1, 31);
    t.keys = random_bf16((size_t)rows * WIDTH, 1, 32);
    t.w = random_bf16((size_t)LAYERS * LATENT_HEADS * (NOPE + VALUE) * RANK, 0.02f, 33);
    t.qkv = take((size_t)(heads + r) * WIDTH * 2);
    t.o = random_bf16((size_t)heads * RANK, 1, 34);
    t.out = take((size_t)heads * VALUE * 2);
    snprintf(name, sizeof name, "latent queries, %d rows", rows);
    report(name, run_latent_query, &t, LAYERS,
           2 * (w + heads * (NOPE + ROPE + WIDTH) + 2 * r * WIDTH), 2 * w * r);
    snprintf(name, sizeof name, "latent values, %d rows", rows);
    report(name, run_latent_value, &t, LAYERS, 2 * (w + heads * (RANK + VALUE)), 2 * w * r);
    if (context) {
        t.view = decode_view(rows, context);
        const int64_t pool = (int64_t)rows * t.view.table_stride * BLOCK * WIDTH;
        for (int l = 0; l < LAYERS; l++)
            t.layers[l] = (struct kv_layer){.offset = l * pool, .width = WIDTH};
        t.kv = (struct kv_view){.k = random_bf16((size_t)pool * LAYERS, 1, 35),
                                .layers = t.layers,
                                .n_blocks = rows * t.view.table_stride,
                                .block_size = BLOCK,
                                .dt = DT_BF16};
        snprintf(name, sizeof name, "latent attention, %d rows of %d", rows, context);
        report(name, run_latent_paged, &t, LAYERS, 2 * (r * context * WIDTH + heads * WIDTH * 2),
               2 * heads * context * (WIDTH + RANK));
        device_release(dev, t.kv.k);
    }
    void *all[] = {t.q, t.keys, t.w, t.qkv, t.o, t.out};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) device_release(dev, all[i]);
}

// Training: the absorbed form, and the gradient of the expanded one.
static void time_latent_packed(int sequences, int len)
{
    struct packed p = {.shape = {.n_heads = LATENT_HEADS,
                                 .n_kv_heads = 1,
                                 .head_dim = WIDTH,
                                 .latent = RANK,
                                 .scale = 0.0721688f,
                                 .dt = DT_BF16}};
    const double keys = LATENT_HEADS * fill_groups(&p.batch, sequences, 1, 0, len);
    const size_t T = (size_t)p.batch.n_tokens, dim = NOPE + ROPE, n = T * LATENT_HEADS;
    char name[64];
    p.qkv = random_bf16(n * 3 * (RANK > dim ? RANK : dim), 1, 36);
    p.dqkv = take(n * 3 * dim * 2);
    p.out = random_bf16(n * RANK, 1, 37);
    p.dout = random_bf16(n * dim, 1, 38);
    p.lse = take(n * sizeof *p.lse);
    snprintf(name, sizeof name, "latent attention, %d x %d", sequences, len);
    report(name, run_packed, &p, 4, 2.0 * n * (WIDTH + RANK), 2 * keys * (WIDTH + RANK));
    p.shape = (struct attn_shape){.n_heads = LATENT_HEADS,
                                  .n_kv_heads = LATENT_HEADS,
                                  .head_dim = (int)dim,
                                  .scale = 0.0721688f,
                                  .dt = DT_BF16};
    run_packed(&p);
    snprintf(name, sizeof name, "latent gradient %d x %d", sequences, len);
    report(name, run_packed_back, &p, 4, 2.0 * n * 8 * dim, 2 * keys * (3 * dim + 2 * VALUE));
    void *all[] = {p.qkv, p.dqkv, p.out, p.dout, p.lse};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) device_release(dev, all[i]);
}

// ---- the vocabulary ----------------------------------------------------------------------------

struct vocabulary {
    float *logits, *logprob, *lse, *entropy;
    int32_t *target;
    void *dlogits;
    int n, n_top;
    struct token_logprob *top;
    struct sample_params *params;
    struct sample_result *result;
    struct sample_draft *drafts; // for run_judge
    const float *other;          // rows to draft from or to be taught by
};

static void run_logprob(void *context)
{
    struct vocabulary *v = context;
    const struct head_args head = {v->logits, v->target, v->n, VOCAB, 1};
    ops->logprob(dev, v->logprob, v->lse, v->entropy, &head);
}

static void run_top_logprobs(void *context)
{
    struct vocabulary *v = context;
    const struct head_args head = {v->logits, v->target, v->n, VOCAB, 1};
    ops->top_logprobs(dev, v->top, v->n_top, &head);
}

static void run_logprob_back(void *context)
{
    struct vocabulary *v = context;
    const struct head_args head = {v->logits, v->target, v->n, VOCAB, 1};
    const struct head_grads grads = {.dlogprob = v->logprob, .lse = v->lse};
    ops->logprob_back(dev, v->dlogits, &grads, &head, DT_BF16);
}

static void run_sample(void *context)
{
    struct vocabulary *v = context;
    const struct sample_args rows = {
        .logits = v->logits, .params = v->params, .n = v->n, .vocab = VOCAB};
    ops->sample(dev, v->result, &rows);
}

static void run_judge(void *context)
{
    struct vocabulary *v = context;
    const struct sample_args rows = {v->logits, v->params, v->n, VOCAB, v->drafts, v->other, VOCAB};
    ops->sample(dev, v->result, &rows);
}

static void run_distill(void *context)
{
    struct vocabulary *v = context;
    const struct distill_args args = {v->logits, v->other, v->n, VOCAB, VOCAB, 1, 1};
    ops->distill(dev, v->logprob, v->lse, v->dlogits, &args, DT_BF16);
}

static void time_vocabulary(void)
{
    enum { N = 1024 };
    struct vocabulary v = {.n = N};
    v.logits = random_f32((size_t)N * VOCAB, 2, 31);
    v.dlogits = take((size_t)N * VOCAB * 2);
    v.logprob = take(N * 4);
    v.lse = take(N * 4);
    v.entropy = take(N * 4);
    v.target = take(N * 4);
    v.top = take(N * 101 * sizeof *v.top);
    v.result = take(N * sizeof *v.result);
    v.params = take(N * sizeof *v.params);
    v.drafts = take(64 * sizeof *v.drafts);
    v.other = v.logits + (size_t)N / 2 * VOCAB;
    device_fill(dev, v.target, 0, N * 4);
    report("logprob, 1024 rows", run_logprob, &v, 2, 4.0 * N * VOCAB, 0);
    report("logprob gradient, 1024 rows", run_logprob_back, &v, 2, 6.0 * N * VOCAB, 0);
    static const int tops[] = {0, 1, 20, 100};
    for (int i = 0; i < 4; i++) {
        char name[64];
        v.n_top = tops[i];
        snprintf(name, sizeof name, "%d likeliest tokens, 1024 rows", tops[i]);
        report(name, run_top_logprobs, &v, 1, 4.0 * N * VOCAB, 0);
    }
    static const struct sample_params kinds[] = {
        {1, 1, 0, 0, 7, 3}, {1, 1, 0, 50, 7, 3}, {1, 0.9f, 0, 0, 7, 3}, {0, 1, 0, 0, 7, 3}};
    static const char *const names[] = {"no cut", "top-k 50", "top-p 0.9", "greedy"};
    for (int k = 0; k < 4; k++)
        for (int n = 1; n <= 64; n *= 64) {
            char name[64];
            struct sample_params params[64];
            for (int i = 0; i < 64; i++) params[i] = kinds[k];
            device_copy_in(dev, v.params, params, sizeof params);
            v.n = n;
            snprintf(name, sizeof name, "sample, %s, %d rows", names[k], n);
            report(name, run_sample, &v, 8, 4.0 * n * VOCAB, 0);
            struct sample_draft drafts[64];
            for (int i = 0; i < 64; i++) drafts[i] = (struct sample_draft){i * 1009, i};
            device_copy_in(dev, v.drafts, drafts, sizeof drafts);
            snprintf(name, sizeof name, "sample, %s, %d drafts", names[k], n);
            report(name, run_judge, &v, 8, 8.0 * n * VOCAB, 0);
        }
    v.n = N / 2;
    report("distill, 512 rows", run_distill, &v, 2, 10.0 * v.n * VOCAB, 0);
    void *all[] = {v.logits, v.dlogits, v.logprob, v.lse,    v.entropy,
                   v.target, v.result,  v.params,  v.drafts, v.top};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) device_release(dev, all[i]);
}

// What a copy and a large product reach here, against which the others are held.
static void measure_limits(void)
{
    const char *asked = filter;
    filter = NULL;
    struct copy c = {take(2ul << 30), random_bf16(1ul << 30, 1, 9), 2ll << 30};
    printf("%s\n", device_name(dev));
    double ms = report("copy, 2 GiB", run_copy, &c, 1, 2.0 * c.bytes, 0);
    bytes_per_ms = 2.0 * c.bytes / ms;
    device_release(dev, c.to);
    device_release(dev, c.from);
    struct product p = {
        take(8192u * 8192 * 2),
        random_bf16(8192 * 8192, 1, 1),
        random_bf16(8192 * 8192, 1, 2),
        NULL,
        {8192, 8192, 8192, false, true, 0, DT_BF16, DT_BF16, true, NULL, NULL, NULL},
        1,
        0};
    ms = report("product 8192 x 8192 x 8192", run_product, &p, 4, 0, 2.0 * 8192 * 8192 * 8192);
    flops_per_ms = 2.0 * 8192 * 8192 * 8192 / ms;
    device_release(dev, p.a);
    device_release(dev, p.b);
    device_release(dev, p.c);
    filter = asked;
}

static void time_products(void)
{
    static const int rows[] = {1, 8, 16, 32, 64, 192, 256};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char name[64];
        static const struct {
            const char *name;
            int n, k;
        } w[] = {{"qkv", QKV, HIDDEN},
                 {"o", HIDDEN, HIDDEN},
                 {"gate+up", 2 * FFN, HIDDEN},
                 {"down", HIDDEN, FFN},
                 {"head", VOCAB, HIDDEN}};
        for (size_t j = 0; j < sizeof w / sizeof w[0]; j++) {
            snprintf(name, sizeof name, "product %s, %d rows", w[j].name, rows[i]);
            time_product(name, rows[i], w[j].n, w[j].k, false, true, j == 4 ? 4 : 28);
        }
    }
}

static void time_adapters_and_experts(void)
{
    static const int lora_rows[] = {1, 64, 8192};
    for (size_t i = 0; i < sizeof lora_rows / sizeof lora_rows[0]; i++) {
        const int kv = KV_HEADS * DIM;
        time_lora("qkv", lora_rows[i], HIDDEN, (const int[LORA_PARTS]){HIDDEN, kv, kv});
        time_lora("o", lora_rows[i], HIDDEN, (const int[LORA_PARTS]){HIDDEN});
        time_lora("gate+up", lora_rows[i], HIDDEN, (const int[LORA_PARTS]){FFN, FFN});
        time_lora("down", lora_rows[i], FFN, (const int[LORA_PARTS]){HIDDEN});
    }
    static const int expert_rows[] = {1, 4, 16, 64, 256, 8192};
    for (size_t i = 0; i < sizeof expert_rows / sizeof expert_rows[0]; i++)
        time_experts(expert_rows[i]);
}

int main(int argc, char **argv)
{
    const char *spec = "cuda:0";
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--device") == 0 && i + 1 < argc)
            spec = argv[++i];
        else
            filter = argv[i];
    }
    must(device_open(spec, &dev));
    ops = device_ops(dev);
    if (!device_computes_in(dev, DT_BF16)) {
        fprintf(stderr, "time_ops: %s does not compute in bf16\n", device_name(dev));
        return 1;
    }

    measure_limits();
    time_products();
    time_step(1, 256);
    time_step(16, 256);
    time_step(64, 256);
    time_step(256, 256);
    time_step(16, 4096);
    time_product("train gate+up", 8192, 2 * FFN, HIDDEN, false, true, 4);
    time_product("train gate+up dx", 8192, HIDDEN, 2 * FFN, false, false, 4);
    time_product("train gate+up dw", 2 * FFN, HIDDEN, 8192, true, false, 4);
    time_product("train qkv", 8192, QKV, HIDDEN, false, true, 4);
    time_product("train down", 8192, HIDDEN, FFN, false, true, 4);
    time_adapters_and_experts();
    time_packed(16, 1, 0, 512);
    time_packed(2, 1, 0, 4096);
    time_packed(4, 8, 64, 228); // samples of a GRPO step
    time_latent(1, 256);
    time_latent(16, 256);
    time_latent(64, 256);
    time_latent(256, 256);
    time_latent(16, 4096);
    time_latent(8192, 0);
    time_latent_packed(16, 512);
    time_latent_packed(2, 4096);
    time_norm();
    time_vocabulary();
    time_optimizer();
    device_free(dev);
    return 0;
}
