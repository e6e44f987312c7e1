/* test_attention_gradient.c: the gradient of packed attention at sizes where blocks of keys are cut
 * into parts and several blocks of the device work on one sequence: it has the same bits in every
 * run, and each sequence's is the one that the sequence has alone, but for the order of sums. On
 * each device in its own dtype. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_table.h"

enum { MAX_SEQS = 8, RUNS = 3 };

static const struct gradient_case {
    const char *name;
    int heads, kv_heads, dim, window, prompt; // rows that all sequences share, or 0
    int len[MAX_SEQS];
    bool cuda_only; // long on a CPU
} cases[] = {
    {"h4/2 d64", 4, 2, 64, 0, 0, {90, 37}, false},
    {"h12/2 d128, a prompt", 12, 2, 128, 0, 150, {301, 1, 290, 260, 333}, false},
    {"h12/2 d128, long", 12, 2, 128, 0, 0, {1500}, true},
    {"h7/1 d64, a prompt and a window", 7, 1, 64, 100, 70, {400, 129, 64}, false},
    {"h16/8 d96", 16, 8, 96, 0, 0, {257, 511, 3}, true},
    {"h2/2 d192, long", 2, 2, 192, 0, 0, {1500, 700}, true},
    {"h12/2 d192, a prompt", 12, 2, 192, 0, 150, {301, 1, 290, 260, 333}, true},
    {"h16/16 d192 window", 16, 16, 192, 60, 0, {90, 1, 37}, false},
    {"h4/2 d256, a prompt", 4, 2, 256, 0, 150, {700, 33}, true},
};

struct lists {
    int32_t *positions, *seq_of, *start, *prefix_start, *prefix_len, *end; // host
    int n, n_seqs, longest;
};

static int32_t *take_ints(const int32_t *host, int n)
{
    return to_device(host, (size_t)n * sizeof *host);
}

// The prompt, if any, and the sequences from `first` to `last` behind it.
static struct lists list_rows(const struct gradient_case *c, int first, int last)
{
    struct lists l = {.n = c->prompt, .longest = c->prompt};
    const int before = c->prompt > 0;
    for (int s = first; s <= last; s++) l.n += c->len[s];
    l.positions = op_host((size_t)l.n * sizeof(int32_t));
    l.seq_of = op_host((size_t)l.n * sizeof(int32_t));
    l.start = op_host((MAX_SEQS + 2) * sizeof(int32_t));
    l.prefix_start = op_host((MAX_SEQS + 1) * sizeof(int32_t));
    l.prefix_len = op_host((MAX_SEQS + 1) * sizeof(int32_t));
    l.end = op_host((MAX_SEQS + 1) * sizeof(int32_t));
    int row = 0;
    for (int s = first - before; s <= last; s++, l.n_seqs++) {
        const bool is_prompt = s < first;
        const int rows = is_prompt ? c->prompt : c->len[s];
        l.start[l.n_seqs] = row;
        l.prefix_len[l.n_seqs] = is_prompt ? 0 : c->prompt;
        for (int i = 0; i < rows; i++, row++) {
            l.positions[row] = l.prefix_len[l.n_seqs] + i;
            l.seq_of[row] = l.n_seqs;
        }
        l.end[l.n_seqs] = is_prompt ? l.n : row;
        if (rows > l.longest) l.longest = rows;
    }
    l.start[l.n_seqs] = row;
    return l;
}

// The rows' gradient RUNS times, which must be the same; returns the first (host, f32).
static float *run(const struct gradient_case *c, const struct lists *l, void *qkv, void *dout)
{
    const struct attn_shape shape = {.dt = dt,
                                     .n_heads = c->heads,
                                     .n_kv_heads = c->kv_heads,
                                     .head_dim = c->dim,
                                     .scale = 1 / sqrtf((float)c->dim),
                                     .window = c->window};
    const struct batch_view b = {.n_tokens = l->n,
                                 .n_seqs = l->n_seqs,
                                 .max_query = l->longest,
                                 .max_context = c->prompt + l->longest,
                                 .packed = true,
                                 .positions = take_ints(l->positions, l->n),
                                 .seq_of = take_ints(l->seq_of, l->n),
                                 .query_start = take_ints(l->start, l->n_seqs + 1),
                                 .prefix_start = take_ints(l->prefix_start, l->n_seqs),
                                 .prefix_len = take_ints(l->prefix_len, l->n_seqs),
                                 .attend_end = take_ints(l->end, l->n_seqs)};
    const size_t rows = (size_t)l->n, e = dtype_size(dt);
    const size_t n = rows * (size_t)((c->heads + 2 * c->kv_heads) * c->dim);
    void *out = to_device(NULL, rows * (size_t)(c->heads * c->dim) * e),
         *dqkv = to_device(NULL, n * e);
    float *lse = to_device(NULL, rows * (size_t)c->heads * sizeof *lse),
          *wide = to_device(NULL, n * sizeof *wide);
    char *first = op_host(n * e), *again = op_host(n * e);
    float *host = op_host(n * sizeof *host);
    ops->attn_packed(dev, out, lse, qkv, &b, &shape);
    for (int i = 0; i < RUNS; i++) {
        device_fill(dev, dqkv, 0xff, n * e); // NaN, so that whatever is left out shows
        ops->attn_packed_back(dev, dqkv, dout, out, lse, qkv, &b, &shape);
        from_device(i ? again : first, dqkv, n * e);
        if (i > 0 && memcmp(first, again, n * e) != 0)
            fail_msg("%s on %s: run %d has other bits", c->name, device_spec(dev), i);
    }
    ops->convert(dev, wide, DT_F32, dqkv, dt, (int64_t)n);
    from_device(host, wide, n * sizeof *host);
    return host;
}

// Adds `rows` rows of `width` of one array to another's.
static void add_rows(float *to, const float *from, int rows, int width)
{
    for (size_t i = 0; i < (size_t)rows * (size_t)width; i++) to[i] += from[i];
}

/* All sequences at once against one after the other, behind the same prompt. Only the prompt's keys
 * and values get something from each, and its queries, which see none of the others, the same each
 * time: of those the gradient of dout is 0. */
static void check_case(const struct gradient_case *c)
{
    int n_seqs = 0;
    while (n_seqs < MAX_SEQS && c->len[n_seqs]) n_seqs++;
    struct lists all = list_rows(c, 0, n_seqs - 1);
    const int width = (c->heads + 2 * c->kv_heads) * c->dim, out_width = c->heads * c->dim;
    const size_t e = dtype_size(dt), n = (size_t)all.n * (size_t)width;
    char *qkv = normal_on_device(dt, n, 1, 5),
         *dout = normal_on_device(dt, (size_t)all.n * (size_t)out_width, 1, 6);
    float *sum = op_host(n * sizeof *sum);
    device_fill(dev, dout, 0, (size_t)c->prompt * (size_t)out_width * e);
    const float *together = run(c, &all, qkv, dout);
    for (int s = 0, row = c->prompt; s < n_seqs; row += c->len[s++]) {
        struct lists one = list_rows(c, s, s);
        char *q = to_device(NULL, (size_t)one.n * (size_t)width * e);
        char *d = to_device(NULL, (size_t)one.n * (size_t)out_width * e);
        const size_t prompt = (size_t)c->prompt, own = (size_t)c->len[s], at = (size_t)row;
        const size_t w = (size_t)width * e, o = (size_t)out_width * e;
        if (prompt) device_copy(dev, q, qkv, prompt * w);
        if (prompt) device_fill(dev, d, 0, prompt * o);
        device_copy(dev, q + prompt * w, qkv + at * w, own * w);
        device_copy(dev, d + prompt * o, dout + at * o, own * o);
        const float *alone = run(c, &one, q, d);
        add_rows(sum, alone, c->prompt, width);
        add_rows(sum + at * (size_t)width, alone + prompt * (size_t)width, c->len[s], width);
    }
    double largest = 0, off = 0;
    for (size_t i = 0; i < n; i++) {
        largest = fmax(largest, fabs((double)sum[i]));
        off = fmax(off, isfinite(together[i]) ? fabs((double)together[i] - sum[i]) : INFINITY);
    }
    printf("%-32s on %s: together and alone differ by %.1e of the largest\n", c->name,
           device_spec(dev), off / largest);
    assert_true(off <= (dt == DT_F32 ? 1e-5 : 1e-2) * largest);
}

ON_EACH_DEVICE(attention_gradient)
{
    dt = device_default_dtype(dev);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const size_t mark = op_mark();
        if (device_kind(dev) != DEVICE_CPU || !cases[i].cuda_only) check_case(&cases[i]);
        op_release(mark);
    }
}

OP_BODIES
