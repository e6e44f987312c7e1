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
    bool comb; // each goes on behind more of the prompt than the one before, the last behind all
} cases[] = {
    {"h4/2 d64", 4, 2, 64, 0, 0, {90, 37}, false, false},
    {"h12/2 d128, a prompt", 12, 2, 128, 0, 150, {301, 1, 290, 260, 333}, false, false},
    {"h12/2 d128, long", 12, 2, 128, 0, 0, {1500}, true, false},
    {"h7/1 d64, a prompt and a window", 7, 1, 64, 100, 70, {400, 129, 64}, false, false},
    {"h16/8 d96", 16, 8, 96, 0, 0, {257, 511, 3}, true, false},
    {"h2/2 d192, long", 2, 2, 192, 0, 0, {1500, 700}, true, false},
    {"h12/2 d192, a prompt", 12, 2, 192, 0, 150, {301, 1, 290, 260, 333}, true, false},
    {"h16/16 d192 window", 16, 16, 192, 60, 0, {90, 1, 37}, false, false},
    {"h4/2 d256, a prompt", 4, 2, 256, 0, 150, {700, 33}, true, false},
    {"h12/2 d128, a comb", 12, 2, 128, 0, 350, {70, 1, 129, 64, 90}, false, true},
    {"h7/1 d64, a comb and a window", 7, 1, 64, 100, 300, {40, 129, 64}, false, true},
    {"h2/2 d192, a comb", 2, 2, 192, 0, 600, {300, 200, 5, 77}, true, true},
    {"h4/2 d256, a comb", 4, 2, 256, 0, 300, {100, 33, 200}, true, true},
};

struct lists {
    int32_t *positions, *seq_of, *start, *parent, *first, *end; // host
    int32_t *prompt, *seq; // the rows of the prompt, and of the sequences, one after the other
    int n, n_seqs, longest;
};

static int32_t *take_ints(const int32_t *host, int n)
{
    return to_device(host, (size_t)n * sizeof *host);
}

static int n_seqs_of(const struct gradient_case *c)
{
    int n = 0;
    while (n < MAX_SEQS && c->len[n]) n++;
    return n;
}

// Rows of the prompt that sequence s goes on behind.
static int prompt_of(const struct gradient_case *c, int s)
{
    return c->comb ? c->prompt * (s + 1) / n_seqs_of(c) : c->prompt;
}

// One more, behind `before` rows of that parent and its ancestors; ret_rows: its rows.
static int add_sequence(struct lists *l, int parent, int before, int n, int *ret_rows)
{
    const int s = l->n_seqs++;
    l->parent[s] = parent;
    l->first[s] = before;
    for (int i = 0; i < n; i++) {
        ret_rows[i] = l->n;
        l->positions[l->n] = before + i;
        l->seq_of[l->n++] = s;
    }
    l->start[s + 1] = l->n;
    for (int up = s; up >= 0; up = l->parent[up]) l->end[up] = l->n;
    if (n > l->longest) l->longest = n;
    return s;
}

// The prompt, if any, and the sequences from `first` to `last`, each behind what it goes on from.
static struct lists list_rows(const struct gradient_case *c, int first, int last)
{
    struct lists l = {.n = 0};
    int rows = c->prompt, prompt = 0, tip = -1, at = 0;
    for (int s = first; s <= last; s++) rows += c->len[s];
    int32_t **const of_rows[] = {&l.positions, &l.seq_of, &l.prompt, &l.seq},
                    **const of_seqs[] = {&l.start, &l.parent, &l.first, &l.end};
    for (int i = 0; i < 4; i++) {
        *of_rows[i] = op_host((size_t)rows * sizeof(int32_t));
        *of_seqs[i] = op_host((2 * MAX_SEQS + 1) * sizeof(int32_t));
    }
    l.start[0] = 0;
    for (int s = first; s <= last; at += c->len[s++]) {
        const int more = prompt_of(c, s) - prompt;
        if (more > 0) tip = add_sequence(&l, tip, prompt, more, l.prompt + prompt);
        prompt += more;
        add_sequence(&l, tip, prompt, c->len[s], l.seq + at);
    }
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
                                 .parent = take_ints(l->parent, l->n_seqs),
                                 .first_position = take_ints(l->first, l->n_seqs),
                                 .attend_end = take_ints(l->end, l->n_seqs)};
    const size_t rows = (size_t)l->n, e = dtype_size(dt);
    const size_t n = rows * (size_t)((c->heads + 2 * c->kv_heads) * c->dim);
    void *out = to_device(NULL, rows * (size_t)(c->heads * c->dim) * e),
         *dqkv = to_device(NULL, n * e);
    float *lse = to_device(NULL, rows * (size_t)c->heads * sizeof *lse),
          *wide = to_device(NULL, n * sizeof *wide);
    char *first = op_host(n * e), *again = op_host(n * e);
    float *host = op_host(n * sizeof *host);
    ops->attn(dev, out, lse, qkv, NULL, 0, &b, &shape);
    for (int i = 0; i < RUNS; i++) {
        device_fill(dev, dqkv, 0xff, n * e); // NaN, so that whatever is left out shows
        ops->attn_back(dev, dqkv, NULL, dout, out, lse, qkv, &b, &shape);
        from_device(i ? again : first, dqkv, n * e);
        if (i > 0 && memcmp(first, again, n * e) != 0)
            fail_msg("%s on %s: run %d has other bits", c->name, device_spec(dev), i);
    }
    ops->convert(dev, wide, DT_F32, dqkv, dt, (int64_t)n);
    from_device(host, wide, n * sizeof *host);
    return host;
}

// Copies n rows of so many bytes, the i-th from row from_rows[i] to row to_rows[i].
static void copy_rows(char *to, const int32_t *to_rows, const char *from, const int32_t *from_rows,
                      int n, size_t bytes)
{
    for (int i = 0; i < n; i++)
        device_copy(dev, to + (size_t)to_rows[i] * bytes, from + (size_t)from_rows[i] * bytes,
                    bytes);
}

// Adds n rows of `width` of one array to another's.
static void add_rows(float *to, const int32_t *to_rows, const float *from, const int32_t *from_rows,
                     int n, int width)
{
    for (int i = 0; i < n; i++)
        for (int c = 0; c < width; c++)
            to[(size_t)to_rows[i] * (size_t)width + (size_t)c] +=
                from[(size_t)from_rows[i] * (size_t)width + (size_t)c];
}

/* All sequences at once against one after the other, behind the same prompt. Only the prompt's keys
 * and values get something from each, and its queries, which see none of the others, the same each
 * time: of those the gradient of dout is 0. */
static void check_case(const struct gradient_case *c)
{
    const int n_seqs = n_seqs_of(c);
    struct lists all = list_rows(c, 0, n_seqs - 1);
    const int width = (c->heads + 2 * c->kv_heads) * c->dim, out_width = c->heads * c->dim;
    const size_t e = dtype_size(dt), n = (size_t)all.n * (size_t)width, w = (size_t)width * e,
                 o = (size_t)out_width * e;
    char *qkv = normal_on_device(dt, n, 1, 5),
         *dout = normal_on_device(dt, (size_t)all.n * (size_t)out_width, 1, 6);
    float *sum = op_host(n * sizeof *sum);
    for (int i = 0; i < c->prompt; i++) device_fill(dev, dout + (size_t)all.prompt[i] * o, 0, o);
    const float *together = run(c, &all, qkv, dout);
    for (int s = 0, at = 0; s < n_seqs; at += c->len[s++]) {
        struct lists one = list_rows(c, s, s);
        const int prompt = prompt_of(c, s);
        char *q = to_device(NULL, (size_t)one.n * w), *d = to_device(NULL, (size_t)one.n * o);
        copy_rows(q, one.prompt, qkv, all.prompt, prompt, w);
        copy_rows(d, one.prompt, dout, all.prompt, prompt, o);
        copy_rows(q, one.seq, qkv, all.seq + at, c->len[s], w);
        copy_rows(d, one.seq, dout, all.seq + at, c->len[s], o);
        const float *alone = run(c, &one, q, d);
        add_rows(sum, all.prompt, alone, one.prompt, prompt, width);
        add_rows(sum, all.seq + at, alone, one.seq, c->len[s], width);
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
