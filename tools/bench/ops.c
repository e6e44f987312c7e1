/* ops.c: the operations' variants (kernels/variants.h): which there are on this device, when each
 * is taken, and what one takes of a call for which it is, at sizes of Qwen2.5-1.5B (a mixture: 32
 * experts; latent attention: 16 heads of DeepSeek-V2). Calls are captured where the device
 * captures, so that times are the device's. One thread. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/variants.h"
#include "tools/bench/bench.h"
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 16, DIM = 128, HEADS = 12, KV_HEADS = 2, EXPERTS = 32, TOP = 4, RANK = 16 };
enum { RUNS = 20 };

struct call { // one of an operation
    enum op op;
    const char *what;
    enum dtype dt;
    int rows, width;  // of a batch; of a matmul's result (multiplied by `hidden`)
    int seqs, before; // that the rows are spread over, keys before each's
    int head_dim, experts;
    float beta;
};

struct ops_bench {
    struct bench *b;
    const struct call *call;
    int hidden; // k of matmuls
    // device memory of some numbers: what is read, weights, what is written
    void *in, *weights, *out, *more;
    int32_t *lists; // of the batch, and of the routing
    struct batch_view view;
    struct kv_layer layer;
    struct kv_view kv;
    struct attn_shape attn;
    struct matmul matmul;
    struct act_shape act;
    struct latent_shape latent;
    struct lora_factors *factors;
    struct lora_args lora;
    struct lora_grads grads;
    float *table;
    struct rope_store store;
};

#define NUMBERS ((size_t)256 << 20) // bytes of each of the four, on CUDA; a fourth of it on the CPU

static size_t bytes_each(const struct bench *b)
{
    return device_kind(b->dev) == DEVICE_CUDA ? NUMBERS : NUMBERS / 4;
}

// ---- what a call is made of ---------------------------------------------------------------------

// A batch of c->rows spread evenly over c->seqs sequences with c->before keys before each.
static enum status set_batch(struct ops_bench *o, bool paged)
{
    const struct call *c = o->call;
    const int t = c->rows, s = c->seqs, each = t / s, context = c->before + each;
    const int stride = (context + BLOCK - 1) / BLOCK;
    const size_t n = 5 * (size_t)t + 6 * (size_t)s + 2 + (size_t)s * (size_t)stride;
    int32_t *host = calloc(n, sizeof *host), *at = host, *lists[12];
    if (!host) return status_fail(ST_NO_MEMORY, "no memory for a batch");
    const int sizes[12] = {t, t, t, t, s + 1, t, s, s, s * stride, s, s, s};
    for (int i = 0; i < 12; i++) {
        lists[i] = at;
        at += sizes[i];
    }
    for (int i = 0; i < t; i++) {
        lists[1][i] = c->before + i % each;
        lists[2][i] = i / each;
        lists[3][i] = -1;
        lists[5][i] = (i / each * stride * BLOCK) + c->before + i % each;
    }
    for (int i = 0; i <= s; i++) lists[4][i] = i * each;
    for (int i = 0; i < s; i++) {
        lists[6][i] = context;
        lists[7][i] = c->before;
        lists[11][i] = (i + 1) * each;
    }
    for (int i = 0; i < s * stride; i++) lists[8][i] = i;
    device_copy_in(o->b->dev, o->lists, host, n * sizeof *host);
    int32_t *d[12];
    for (int i = 0; i < 12; i++) d[i] = o->lists + (lists[i] - host);
    o->view = (struct batch_view){.n_tokens = t,
                                  .n_seqs = s,
                                  .max_query = each,
                                  .max_context = context,
                                  .packed = !paged,
                                  .tokens = d[0],
                                  .positions = d[1],
                                  .seq_of = d[2],
                                  .adapter = d[3],
                                  .query_start = d[4],
                                  .slots = d[5],
                                  .context_len = d[6],
                                  .stored = d[7],
                                  .block_table = d[8],
                                  .table_stride = stride,
                                  .prefix_start = d[9],
                                  .prefix_len = d[10],
                                  .attend_end = d[11]};
    free(host);
    return device_sync(o->b->dev);
}

static void set_attention(struct ops_bench *o)
{
    const struct call *c = o->call;
    const bool latent = c->head_dim == 576;
    const int heads = latent ? 16 : HEADS, kv_heads = latent ? 1 : KV_HEADS;
    o->attn = (struct attn_shape){.n_heads = heads,
                                  .n_kv_heads = kv_heads,
                                  .head_dim = c->head_dim,
                                  .latent = latent ? 512 : 0,
                                  .scale = 0.1f,
                                  .dt = c->dt,
                                  .early = true};
    o->layer = (struct kv_layer){.width = kv_heads * c->head_dim};
    o->kv = (struct kv_view){.k = o->weights,
                             .v = latent ? NULL : o->more,
                             .layers = &o->layer,
                             .n_blocks = c->seqs * o->view.table_stride,
                             .block_size = BLOCK,
                             .dt = c->dt};
    o->store = (struct rope_store){.table = o->table,
                                   .rot_dim = c->head_dim,
                                   .kv = &o->kv,
                                   .batch = &o->view,
                                   .shape = &o->attn};
}

// Sorted rows, as many of each expert.
static void set_routing(struct ops_bench *o)
{
    int32_t offsets[1100];
    for (int e = 0; e <= o->call->experts; e++)
        offsets[e] = (int32_t)((int64_t)o->call->rows * e / o->call->experts);
    device_copy_in(o->b->dev, o->lists, offsets, sizeof *offsets * (size_t)(o->call->experts + 1));
}

static void set_lora(struct ops_bench *o)
{
    const struct call *c = o->call;
    const struct lora_factors factors = {o->weights, o->more, RANK, 1};
    device_copy_in(o->b->dev, o->factors, &factors, sizeof factors);
    o->lora = (struct lora_args){.factors = o->factors,
                                 .adapter = o->lists, // zeros
                                 .n_adapters = 1,
                                 .n_parts = 1,
                                 .max_rank = RANK,
                                 .rows = c->rows,
                                 .k = o->hidden,
                                 .first = {0, c->width},
                                 .dt = c->dt,
                                 .out = c->dt};
    o->grads = (struct lora_grads){o->out, (float *)o->out + RANK * o->hidden};
}

static enum status set_call(struct ops_bench *o)
{
    const struct call *c = o->call;
    const bool experts_back = c->op == OP_matmul_experts_back;
    enum status st = ST_OK;
    device_fill(o->b->dev, o->lists, 0, 4096);
    o->matmul = (struct matmul){.m = c->rows,
                                .n = c->width,
                                .k = c->experts > EXPERTS ? 64 : o->hidden,
                                .trans_b = !experts_back,
                                .beta = c->beta,
                                .in = c->dt,
                                .out = experts_back ? DT_F32 : c->dt};
    o->act = (struct act_shape){
        .rows = c->rows, .width = c->width / 2, .kind = ACT_SILU, .gated = true, .dt = c->dt};
    o->latent = (struct latent_shape){c->rows, 16, 128, 64, 512, 128, c->dt, false};
    if (c->seqs > 0) {
        CHECK(set_batch(o, c->op == OP_attn_paged || c->op == OP_matmul_rope_store));
        set_attention(o);
    }
    if (c->experts > 0) set_routing(o);
    if (c->op == OP_lora || c->op == OP_lora_back) set_lora(o);
    st = device_sync(o->b->dev);
out:
    return st;
}

static void run(struct ops_bench *o)
{
    const struct call *c = o->call;
    const struct ops *ops = o->b->ops;
    struct device *dev = o->b->dev;
    void *in = o->in, *w = o->weights, *out = o->out, *more = o->more;
    switch ((int)c->op) {
    case OP_matmul:
        ops->matmul(dev, out, in, w, NULL, &o->matmul);
        break;
    case OP_matmul_act:
        ops->matmul_act(dev, out, more, in, w, NULL, &o->matmul, &o->act, false);
        break;
    case OP_matmul_rope_store:
        // the pool is in the two that others have weights in
        ops->matmul_rope_store(dev, out, in, (char *)in + NUMBERS / 8, NULL, &o->matmul, &o->store);
        break;
    case OP_attn_paged:
        ops->attn_paged(dev, out, in, &o->kv, 0, &o->view, &o->attn);
        break;
    case OP_attn_packed:
        ops->attn_packed(dev, out, more, in, &o->view, &o->attn);
        break;
    case OP_attn_packed_back:
        ops->attn_packed_back(dev, out, in, w, more, in, &o->view, &o->attn);
        break;
    case OP_latent_query:
        ops->latent_query(dev, out, in, more, w, &o->latent);
        break;
    case OP_latent_value:
        ops->latent_value(dev, out, in, w, &o->latent);
        break;
    case OP_matmul_experts:
        ops->matmul_experts(dev, out, in, w, o->lists, c->experts, &o->matmul);
        break;
    case OP_matmul_experts_act:
        ops->matmul_experts_act(dev, out, more, in, w, o->lists, c->experts, &o->matmul, &o->act,
                                false);
        break;
    case OP_matmul_experts_back:
        ops->matmul_experts_back(dev, out, in, w, o->lists, c->experts, &o->matmul);
        break;
    case OP_lora:
        ops->lora(dev, out, in, &o->lora);
        break;
    case OP_lora_back:
        ops->lora_back(dev, out, &o->grads, in, more, &o->lora);
        break;
    }
}

// ---- the calls ----------------------------------------------------------------------------------

#define MM(op, what, dt, rows, width, beta)                                                        \
    {                                                                                              \
        OP_##op, what, dt, rows, width, 0, 0, 0, 0, beta                                           \
    }
#define AT(op, what, dt, rows, seqs, before, d)                                                    \
    {                                                                                              \
        OP_##op, what, dt, rows, 0, seqs, before, d, 0, 0                                          \
    }
#define EX(op, what, dt, rows, width, experts)                                                     \
    {                                                                                              \
        OP_##op, what, dt, rows, width, 0, 0, 0, experts, 0                                        \
    }

static const struct call calls[] = {
    MM(matmul, "16 rows", DT_BF16, 16, 2048, 0),
    MM(matmul, "1,024 rows, added", DT_BF16, 1024, 2048, 1),
    MM(matmul, "1,024 rows", DT_BF16, 1024, 2048, 0),
    MM(matmul, "256 rows in f32", DT_F32, 256, 2048, 0),
    MM(matmul_act, "16 rows", DT_BF16, 16, 17920, 0),
    MM(matmul_act, "1,024 rows", DT_BF16, 1024, 17920, 0),
    MM(matmul_act, "64 rows in f32", DT_F32, 64, 8192, 0),
    {OP_matmul_rope_store, "16 rows", DT_BF16, 16, 2048, 16, 256, DIM, 0, 0},
    {OP_matmul_rope_store, "1,024 rows", DT_BF16, 1024, 2048, 2, 0, DIM, 0, 0},
    {OP_matmul_rope_store, "16 rows in f32", DT_F32, 16, 2048, 16, 256, DIM, 0, 0},
    AT(attn_paged, "16 x 1 row, 1,024 keys", DT_BF16, 16, 16, 1023, DIM),
    AT(attn_paged, "64 x 1 row, 512 keys", DT_BF16, 64, 64, 511, DIM),
    AT(attn_paged, "2 x 512 rows, 1,024 keys", DT_BF16, 1024, 2, 512, DIM),
    AT(attn_paged, "2 x 512 rows, 1,024 keys, heads of 256", DT_BF16, 1024, 2, 512, 256),
    AT(attn_paged, "16 x 1 row, 1,024 latent keys", DT_BF16, 16, 16, 1023, 576),
    AT(attn_paged, "4 x 1 row, 256 keys in f32", DT_F32, 4, 4, 255, DIM),
    AT(attn_packed, "4 x 512 rows", DT_BF16, 2048, 4, 0, DIM),
    AT(attn_packed, "4 x 512 rows, heads of 256", DT_BF16, 2048, 4, 0, 256),
    AT(attn_packed, "4 x 512 rows, latent keys", DT_BF16, 2048, 4, 0, 576),
    AT(attn_packed, "2 x 64 rows in f32", DT_F32, 128, 2, 0, DIM),
    AT(attn_packed_back, "4 x 512 rows", DT_BF16, 2048, 4, 0, DIM),
    AT(attn_packed_back, "4 x 512 rows, heads of 256", DT_BF16, 2048, 4, 0, 256),
    AT(attn_packed_back, "2 x 64 rows in f32", DT_F32, 128, 2, 0, DIM),
    MM(latent_query, "16 rows", DT_BF16, 16, 0, 0),
    MM(latent_query, "16 rows in f32", DT_F32, 16, 0, 0),
    MM(latent_value, "16 rows", DT_BF16, 16, 0, 0),
    MM(latent_value, "16 rows in f32", DT_F32, 16, 0, 0),
    EX(matmul_experts, "64 rows", DT_BF16, 64, 1536, EXPERTS),
    EX(matmul_experts, "8,192 rows", DT_BF16, 8192, 1536, EXPERTS),
    EX(matmul_experts, "65,536 rows, 1,040 experts of 64 x 64", DT_BF16, 65536, 64, 1040),
    EX(matmul_experts, "64 rows in f32", DT_F32, 64, 256, EXPERTS),
    EX(matmul_experts_act, "64 rows", DT_BF16, 64, 1536, EXPERTS),
    EX(matmul_experts_act, "8,192 rows", DT_BF16, 8192, 1536, EXPERTS),
    EX(matmul_experts_back, "8,192 rows", DT_BF16, 8192, 512, EXPERTS),
    EX(matmul_experts_back, "65,536 rows, 1,040 experts of 64 x 64", DT_BF16, 65536, 64, 1040),
    EX(matmul_experts_back, "64 rows in f32", DT_F32, 64, 64, EXPERTS),
    MM(lora, "16 rows", DT_BF16, 16, 2048, 0),
    MM(lora, "1,024 rows", DT_BF16, 1024, 2048, 0),
    MM(lora, "64 rows in f32", DT_F32, 64, 2048, 0),
    MM(lora_back, "1,024 rows", DT_BF16, 1024, 2048, 0),
    MM(lora_back, "64 rows in f32", DT_F32, 64, 2048, 0),
};
enum { N_CALLS = sizeof calls / sizeof *calls };

// What of a call was read: microseconds; 0: it was not made.
struct reading {
    double us;
    const struct op_variant *taken;
};

static enum status time_call(struct ops_bench *o, double *ret_us)
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
    *ret_us = 1e3 * median(ms, 5);
    st = device_sync(dev);
out:
    device_graph_free(graph);
    return st;
}

// ---- the table ----------------------------------------------------------------------------------

static void print_row(const struct bench *b, json_t *rows, enum op op, const char *name,
                      const char *taken, const struct call *call, double us)
{
    if (b->o.json)
        json_array_append_new(rows,
                              json_pack("{s:s, s:s, s:s, s:s?, s:o}", "op", op_name(op), "variant",
                                        name, "taken", taken, "call", call ? call->what : NULL,
                                        "us", call ? json_real(us) : json_null()));
    else if (call)
        printf("%-20s %-13s %9.1f us  %s (%s)\n", op_name(op), name, us, call->what, taken);
    else
        printf("%-20s %-13s %12s  (%s)\n", op_name(op), name, "", taken);
}

// Every row of an operation, with each call that took it.
static void print_op(const struct bench *b, json_t *rows, enum op op, const struct reading *read)
{
    static const struct op_variant one = {"one", "always", NULL, NULL};
    const struct op_variants *variants = op_variants_of(device_kind(b->dev), op);
    const struct op_variant *row = variants ? variants->rows : &one;
    for (int n = variants ? variants->n : 1; n > 0; n--, row++) {
        int taken = 0;
        for (int i = 0; i < N_CALLS; i++) {
            if (calls[i].op != op || read[i].us <= 0 || (variants && read[i].taken != row))
                continue;
            print_row(b, rows, op, row->name, row->taken, &calls[i], read[i].us);
            taken++;
        }
        if (!taken && b->o.variants) print_row(b, rows, op, row->name, row->taken, NULL, 0);
    }
}

static enum status open_numbers(struct ops_bench *o)
{
    struct bench *b = o->b;
    const size_t bytes = bytes_each(b);
    void **const each[] = {&o->in, &o->weights, &o->out, &o->more};
    enum status st;
    for (int i = 0; i < 4; i++) {
        CHECK(device_alloc(b->dev, bytes, each[i]));
        // numbers that are small in either dtype: pairs of bf16 are an f32 of about the second's
        // size
        b->ops->random_normal(b->dev, *each[i],
                              (int64_t)(bytes / dtype_size(device_default_dtype(b->dev))), 0.1f, 1,
                              (uint64_t)i, device_default_dtype(b->dev));
    }
    CHECK(device_alloc(b->dev, 1 << 22, (void **)&o->lists));
    CHECK(device_alloc(b->dev, 4096, (void **)&o->factors));
    CHECK(device_alloc(b->dev, 4096 * DIM * sizeof(float), (void **)&o->table));
    device_fill(b->dev, o->table, 0, 4096 * DIM * sizeof(float));
    st = device_sync(b->dev);
out:
    return st;
}

static void print_ops(const struct bench *b, const struct reading *read)
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
    struct ops_bench o = {.b = &b, .hidden = 1536};
    struct reading read[N_CALLS] = {0};
    enum status st;
    CHECK(device_open(options->device, &b.dev));
    b.ops = device_ops(b.dev);
    CHECK(open_numbers(&o));
    for (int i = 0; i < N_CALLS; i++) {
        if (!device_computes_in(b.dev, calls[i].dt)) continue;
        o.call = &calls[i];
        CHECK(time_call(&o, &read[i].us));
        read[i].taken = device_variant_taken(b.dev, calls[i].op);
    }
    print_ops(&b, read);
    st = device_sync(b.dev);
out:
    if (!b.dev) return st;
    void *const memory[] = {o.in, o.weights, o.out, o.more, o.lists, o.factors, o.table};
    for (int i = 0; i < 7; i++) device_release(b.dev, memory[i]);
    device_free(b.dev);
    return st;
}
