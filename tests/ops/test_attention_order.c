/* test_attention_order.c: attention of a row has the same bits whatever it is computed with: among
 * the rows of a packed batch, behind a shared prefix, decoded alone or among hundreds, verified, or
 * in a prefill of any chunks, from blocks of any size. On each device in the dtype in which it says
 * so (device_is_exact). */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_table.h"

enum { MAX_RUNS = 1200, JUNK = 37 };

static const struct attention_case {
    const char *name;
    int heads, kv_heads, dim, window;
    float softcap;
    int tokens, block;
    bool cuda_only; // long on a CPU
    bool sinks;     // attn_shape has some
    int latent;     // as in attn_shape
} cases[] = {
    {"h12/2 d128", 12, 2, 128, 0, 0, 700, 16, true, false, 0},
    {"h12/2 d128, long", 12, 2, 128, 0, 0, 1200, 32, true, false, 0},
    {"h28/4 d128", 28, 4, 128, 0, 0, 530, 16, true, false, 0},
    {"h16/8 d128 window", 16, 8, 128, 100, 0, 600, 1, true, false, 0},
    {"h14/2 d64", 14, 2, 64, 0, 0, 700, 7, true, false, 0},
    {"h4/4 d64 window softcap", 4, 4, 64, 300, 5, 700, 16, true, false, 0},
    {"h32/1 d64", 32, 1, 64, 0, 0, 300, 16, true, false, 0},
    {"h8/1 d64 sinks", 8, 1, 64, 0, 0, 700, 16, true, true, 0},
    {"h8/1 d64 window sinks", 8, 1, 64, 128, 0, 530, 16, false, true, 0},
    {"h4/2 d256 sinks", 4, 2, 256, 0, 0, 600, 16, true, true, 0},
    {"h3/3 d96", 3, 3, 96, 0, 0, 600, 16, true, false, 0},
    {"h2/1 d80 window", 2, 1, 80, 9, 0, 520, 3, false, false, 0},
    {"h2/1 d256 softcap", 2, 1, 256, 0, 3, 520, 16, true, false, 0},
    {"h8/4 d256 window", 8, 4, 256, 257, 0, 600, 16, true, false, 0},
    {"h4/1 d512", 4, 1, 512, 0, 0, 300, 16, true, false, 0},
    {"h2/1 d16", 2, 1, 16, 0, 0, 520, 16, false, false, 0},
    {"h2/1 d20", 2, 1, 20, 0, 0, 280, 16, false, false, 0},
    {"latent h16 512 of 576", 16, 1, 576, 0, 0, 700, 16, true, false, 512},
    {"latent h20 512 of 576", 20, 1, 576, 0, 0, 530, 64, true, false, 512},
    {"latent h128 512 of 576", 128, 1, 576, 0, 0, 300, 16, true, false, 512},
    {"latent h16 512 of 576, long", 16, 1, 576, 0, 0, 1200, 32, true, false, 512},
    {"latent h4 96 of 128 window softcap", 4, 1, 128, 300, 5, 600, 7, true, false, 96},
    {"latent h3 24 of 40 sinks", 3, 1, 40, 0, 0, 520, 16, false, true, 24},
    {"latent h3 7 of 10", 3, 1, 10, 0, 0, 280, 16, false, false, 7},
};

// One context of n tokens, as rows of qkv and in a pool.
struct scene {
    const struct attention_case *c;
    struct attn_shape shape;
    int n, width, out_bytes; // elements of a row of qkv; bytes of a row of what attention gives
    void *qkv;
    bool in_e4m3; // the pool is; packed batches have keys and values as that gives them
    struct kv_view kv;
    struct kv_layer layer;
    int32_t *table; // host: a block of each block_size tokens
    int n_blocks;
    char *expected; // (n, out_bytes)
    int32_t *lists; // of paged batches, see put_list()
};

// Rows of the context that are one sequence of a batch; or, with a first of -1, one row of padding.
struct run {
    int first, n;
};

// What stores a paged batch's keys and values before its attention. SLOWLY: a product that takes
// longer than attention needs to begin.
enum store { STORED, STORE, STORE_SLOWLY };

static int32_t *take_ints(const int32_t *host, int n)
{
    return to_device(host, (size_t)n * sizeof *host);
}

// Rows of normal values; queries are larger, so that some weights are far above the others.
static void *take_rows(const struct scene *s, int rows, uint64_t seed)
{
    const size_t n = (size_t)rows * (size_t)s->width;
    struct rng rng;
    rng_init(&rng, seed, 0);
    float *host = normal_numbers(&rng, n, 1);
    for (size_t i = 0; i < n; i++)
        host[i] *= ((int)(i % (size_t)s->width) < s->shape.n_heads * s->shape.head_dim ? 2.5f : 1);
    float *wide = to_device(host, n * sizeof *host);
    void *p = to_device(NULL, n * dtype_size(dt));
    ops->convert(dev, p, dt, wide, DT_F32, (int64_t)n);
    assert_ok(device_sync(dev));
    return p;
}

static size_t pool_bytes(const struct scene *s)
{
    return (size_t)s->n_blocks * (size_t)s->c->block * (size_t)s->layer.width *
           dtype_size(s->kv.dt);
}

static size_t scale_bytes(const struct scene *s)
{
    return (size_t)s->n_blocks * (size_t)s->c->block * (size_t)s->shape.n_kv_heads * KV_SCALES;
}

static void take_pool(struct scene *s)
{
    const int block = s->c->block;
    s->n_blocks = (s->n + block - 1) / block;
    const int64_t kv_width = (int64_t)s->shape.n_kv_heads * s->shape.head_dim;
    s->layer = (struct kv_layer){.offset = 0, .width = (int)kv_width};
    s->kv = (struct kv_view){
        .layers = &s->layer, .n_blocks = s->n_blocks, .block_size = block, .dt = dt};
    if (s->in_e4m3) {
        s->kv.dt = DT_E4M3;
        s->kv.scales = to_device(NULL, scale_bytes(s));
    }
    const size_t bytes = pool_bytes(s);
    s->kv.k = to_device(NULL, bytes);
    s->kv.v = to_device(NULL, bytes);
    s->table = op_host((size_t)s->n_blocks * sizeof *s->table);
    struct rng rng;
    rng_init(&rng, 3, 0);
    for (int i = 0; i < s->n_blocks; i++) {
        const int j = (int)rng_below(&rng, (uint32_t)i + 1);
        s->table[i] = s->table[j];
        s->table[j] = i;
    }
}

/* Paged batches have their lists at the same places, as a server's have: whoever reads them before
 * the operation in front has ended must not find what stood there in the batch before. */
enum list { POSITIONS, SLOTS, SEQ_OF, QUERY_START, CONTEXT_LEN, STORED_KEYS, BLOCK_TABLE };

static void take_lists(struct scene *s)
{
    const size_t n = (BLOCK_TABLE + s->n_blocks) * (size_t)(MAX_RUNS + 1);
    s->lists = to_device(NULL, n * sizeof *s->lists);
}

static const int32_t *put_list(const struct scene *s, enum list list, const int32_t *host, int n)
{
    int32_t *to = s->lists + list * (size_t)(MAX_RUNS + 1);
    assert_true(list == BLOCK_TABLE || n <= MAX_RUNS + 1);
    device_copy_in(dev, to, host, (size_t)n * sizeof *host);
    return to;
}

static int32_t slot_of(const struct scene *s, int position)
{
    return s->table[position / s->c->block] * s->c->block + position % s->c->block;
}

// ---- batches -----------------------------------------------------------------------------------

// rows: which of the context each is; -1: padding, of which zeros come out.
static void compare(const struct scene *s, const char *what, const void *out, const int32_t *rows,
                    int n)
{
    const size_t width = (size_t)s->out_bytes;
    char *host = op_host((size_t)n * width), *zeros = op_host(width);
    from_device(host, out, (size_t)n * width);
    for (int i = 0; i < n; i++) {
        const char *want = rows[i] < 0 ? zeros : s->expected + (size_t)rows[i] * width;
        const char *got = host + (size_t)i * width;
        size_t at = 0;
        while (at < width && got[at] == want[at]) at++;
        if (at < width)
            fail_msg("%s on %s, %s: the row at position %d differs from head %d on", s->c->name,
                     device_spec(dev), what, rows[i],
                     (int)(at / dtype_size(dt)) / attn_value_dim(&s->shape));
    }
}

/* A product with the identity that is the keys of n rows from `first` on, neighbours in the pool;
 * its inner dimension is mostly zeros. A pool in e4m3 gets them behind it. */
static struct slow_store {
    struct matmul shape;
    void *keys, *identity, *to;
} slow;

static void slow_store_new(const struct scene *s, int first, int n)
{
    enum { INNER = 16384 };
    const int width = s->layer.width;
    const size_t e = dtype_size(dt), bytes = (size_t)width * INNER * e;
    const size_t key_at = (size_t)(s->shape.n_heads * s->shape.head_dim);
    const struct matmul shape = {
        .m = n, .n = width, .k = INNER, .trans_b = true, .in = dt, .out = dt};
    const float value = 1;
    float *wide = to_device(NULL, sizeof value);
    void *one = to_device(NULL, e);
    slow = (struct slow_store){.shape = shape, .keys = to_device(NULL, (size_t)n * INNER * e)};
    slow.identity = to_device(NULL, bytes);
    slow.to = s->in_e4m3 ? to_device(NULL, (size_t)n * (size_t)width * e)
                         : (char *)s->kv.k + (size_t)slot_of(s, first) * (size_t)width * e;
    device_copy_in(dev, wide, &value, sizeof value);
    ops->convert(dev, one, dt, wide, DT_F32, 1);
    device_fill(dev, slow.identity, 0, bytes);
    device_fill(dev, slow.keys, 0, (size_t)n * INNER * e);
    for (int i = 0; i < width; i++)
        device_copy(dev, (char *)slow.identity + (size_t)i * (INNER + 1) * e, one, e);
    for (int i = 0; i < n; i++)
        device_copy(dev, (char *)slow.keys + (size_t)i * INNER * e,
                    (char *)s->qkv + ((size_t)(first + i) * (size_t)s->width + key_at) * e,
                    (size_t)width * e);
    assert_ok(device_sync(dev));
}

/* The runs as sequences of one paged batch whose keys before each run are in the pool already; max:
 * what max_context says, at least. */
static void run_paged(const struct scene *s, const char *what, const struct run *runs, int n_runs,
                      int max, enum store store)
{
    static int32_t start[MAX_RUNS + 1], context[MAX_RUNS], stored[MAX_RUNS];
    int n = 0, row = 0;
    struct batch_view b = {
        .n_seqs = n_runs, .max_query = 1, .max_context = max, .table_stride = s->n_blocks};
    for (int i = 0; i < n_runs; i++) n += runs[i].n;
    const size_t mark = op_mark(), each = (size_t)n * sizeof(int32_t);
    int32_t *position = op_host(each), *slots = op_host(each), *seq = op_host(each);
    int32_t *table = op_host((size_t)n_runs * (size_t)s->n_blocks * sizeof *table);
    for (int i = 0; i < n_runs; i++) {
        start[i] = row;
        const bool pads = runs[i].first < 0;
        const bool goes_on = i > 0 && runs[i].first == context[i - 1];
        context[i] = pads ? 0 : runs[i].first + runs[i].n;
        stored[i] = goes_on ? stored[i - 1] : pads ? 0 : runs[i].first;
        if (runs[i].n > b.max_query) b.max_query = runs[i].n;
        if (context[i] > b.max_context) b.max_context = context[i];
        memcpy(table + (size_t)i * (size_t)s->n_blocks, s->table,
               (size_t)s->n_blocks * sizeof *table);
        for (int k = 0; k < runs[i].n; k++, row++) {
            position[row] = pads ? 0 : runs[i].first + k;
            slots[row] = pads ? -1 : slot_of(s, position[row]);
            seq[row] = i;
        }
    }
    start[n_runs] = row;
    b.n_tokens = n;
    b.positions = put_list(s, POSITIONS, position, n);
    b.slots = put_list(s, SLOTS, slots, n);
    b.seq_of = put_list(s, SEQ_OF, seq, n);
    b.query_start = put_list(s, QUERY_START, start, n_runs + 1);
    b.context_len = put_list(s, CONTEXT_LEN, context, n_runs);
    b.stored = put_list(s, STORED_KEYS, stored, n_runs);
    b.block_table = put_list(s, BLOCK_TABLE, table, n_runs * s->n_blocks);
    void *qkv = to_device(NULL, (size_t)n * (size_t)s->width * dtype_size(dt));
    void *out = to_device(NULL, (size_t)n * (size_t)s->out_bytes);
    ops->gather_rows(dev, qkv, s->qkv,
                     &(struct gather_args){b.positions, n, s->width, 1, dt, 0, 0});
    assert_ok(device_sync(dev));
    if (store == STORE_SLOWLY)
        ops->matmul(dev, slow.to, slow.keys, slow.identity, NULL, &slow.shape);
    if (store == STORE || (store == STORE_SLOWLY && s->in_e4m3))
        op_kv_store(&s->kv, 0, qkv, &b, &s->shape);
    ops->attn(dev, out, NULL, qkv, &s->kv, 0, &b, &s->shape);
    for (int i = 0; i < n; i++)
        if (slots[i] < 0) position[i] = -1;
    compare(s, what, out, position, n);
    op_release(mark);
}

enum { MAX_CUTS = 6 };
static const int whole[1];

/* Packed: `junk` rows of another sequence, and the context as sequences that go on behind one
 * another, cut before those of its rows (ascending, 0-ended); returns (device) the rows of the
 * context. */
static void *run_packed(const struct scene *s, int junk, const int *cuts)
{
    const int n = junk + s->n;
    int32_t start[MAX_CUTS + 3] = {0}, parent[MAX_CUTS + 2], first[MAX_CUTS + 2] = {0},
                             end[MAX_CUTS + 2];
    int32_t *seq = op_host((size_t)n * sizeof *seq), *position = op_host((size_t)n * sizeof *seq);
    int n_seqs = 0;
    if (junk) {
        parent[n_seqs] = -1;
        end[n_seqs++] = junk;
        start[n_seqs] = junk;
    }
    const int root = n_seqs;
    for (;; cuts++) {
        parent[n_seqs] = n_seqs > root ? n_seqs - 1 : -1;
        end[n_seqs] = n;
        first[n_seqs] = start[n_seqs] - junk;
        start[++n_seqs] = *cuts ? junk + *cuts : n;
        if (!*cuts) break;
    }
    for (int r = 0, at = 0; r < n; r++) {
        while (r >= start[at + 1]) at++;
        seq[r] = at;
        position[r] = first[at] + r - start[at];
    }
    const size_t row = (size_t)s->width * dtype_size(dt);
    char *qkv = to_device(NULL, (size_t)n * row),
         *out = to_device(NULL, (size_t)n * (size_t)s->out_bytes);
    float *lse = to_device(NULL, (size_t)n * (size_t)s->shape.n_heads * sizeof *lse);
    void *other = take_rows(s, JUNK, 99);
    if (junk) device_copy(dev, qkv, other, (size_t)junk * row);
    device_copy(dev, qkv + (size_t)junk * row, s->qkv, (size_t)s->n * row);
    const int q_width = s->shape.n_heads * s->shape.head_dim;
    const struct rope_args rounds = {.rows = n,
                                     .n = (s->width - q_width) / s->shape.head_dim,
                                     .head_dim = s->shape.head_dim,
                                     .stride = s->width,
                                     .dt = dt,
                                     .rounds = true};
    if (s->in_e4m3) ops->rope(dev, qkv + (size_t)q_width * dtype_size(dt), &rounds);
    struct batch_view b = {.n_tokens = n,
                           .n_seqs = n_seqs,
                           .max_query = s->n > junk ? s->n : junk,
                           .max_context = s->n > junk ? s->n : junk,
                           .packed = true,
                           .positions = take_ints(position, n),
                           .seq_of = take_ints(seq, n),
                           .query_start = take_ints(start, n_seqs + 1),
                           .parent = take_ints(parent, n_seqs),
                           .first_position = take_ints(first, n_seqs),
                           .attend_end = take_ints(end, n_seqs)};
    ops->attn(dev, out, lse, qkv, NULL, 0, &b, &s->shape);
    void *rows = to_device(NULL, (size_t)s->n * (size_t)s->out_bytes);
    device_copy(dev, rows, out + (size_t)junk * (size_t)s->out_bytes,
                (size_t)s->n * (size_t)s->out_bytes);
    assert_ok(device_sync(dev));
    return rows;
}

// ---- checks ------------------------------------------------------------------------------------

static void check_packed(const struct scene *s, int junk, const int *cuts)
{
    const size_t mark = op_mark();
    char what[64];
    snprintf(what, sizeof what, "packed, %d rows before, cut at %d, %d...", junk, cuts[0],
             cuts[0] ? cuts[1] : 0);
    int32_t *rows = op_host((size_t)s->n * sizeof *rows);
    for (int i = 0; i < s->n; i++) rows[i] = i;
    compare(s, what, run_packed(s, junk, cuts), rows, s->n);
    op_release(mark);
}

// The whole context in chunks of so many rows, which the pool gets as they come.
static void check_chunks(const struct scene *s, int chunk)
{
    char what[64];
    snprintf(what, sizeof what, "prefill in chunks of %d", chunk);
    const size_t bytes = pool_bytes(s);
    device_fill(dev, s->kv.k, 0xff, bytes); // whoever reads too early reads a NaN
    device_fill(dev, s->kv.v, 0xff, bytes);
    if (s->in_e4m3) device_fill(dev, s->kv.scales, 0xff, scale_bytes(s));
    for (int at = 0; at < s->n; at += chunk) {
        struct run run = {at, s->n - at < chunk ? s->n - at : chunk};
        run_paged(s, what, &run, 1, 0, STORE);
    }
}

static void check_decode(const struct scene *s)
{
    static struct run runs[MAX_RUNS];
    for (int i = 0; i < s->n; i++) runs[i] = (struct run){i, 1};
    run_paged(s, "decoded, every row at once", runs, s->n, 0, STORED);
    run_paged(s, "decoded, every row at once, in a larger grid", runs, s->n, 5000, STORED);
    for (int i = s->n - 1; i >= 0; i = i * 3 / 4 - 1) {
        run_paged(s, "decoded alone", &runs[i], 1, 0, STORE);
        run_paged(s, "decoded alone, in a larger grid", &runs[i], 1, 5000, STORE);
    }
}

// As captured steps are: with rows of padding, in a grid of a longer context.
static void check_padded(const struct scene *s)
{
    enum { ROWS = 24 };
    struct run runs[ROWS];
    for (int n = 1; n < ROWS; n *= 3) {
        for (int i = 0; i < ROWS; i++) runs[i] = (struct run){i < n ? s->n - 1 - i * 17 : -1, 1};
        run_paged(s, "decoded, padded", runs, ROWS, 5000, STORE);
    }
}

// Drafts are sequences of one row that see those before them: of the keys that their own batch
// stores, none may be read before the operation that stores them has ended.
static void check_drafts(const struct scene *s)
{
    enum { N = 8 };
    struct run runs[N];
    const int first = (s->n - N) / s->c->block * s->c->block;
    const size_t row = (size_t)s->layer.width * dtype_size(s->kv.dt);
    if (s->c->block < N) return;
    run_paged(s, "before drafts", &(struct run){0, first + N}, 1, 0, STORE);
    device_fill(dev, (char *)s->kv.k + (size_t)slot_of(s, first) * row, 0xff, N * row);
    for (int i = 0; i < N; i++) runs[i] = (struct run){first + i, 1};
    slow_store_new(s, first, N);
    run_paged(s, "drafts, a row each", runs, N, 0, STORE_SLOWLY);
}

// Decoding rows, drafts to verify and chunks of prompts in one batch.
static void check_mixed(const struct scene *s)
{
    static const int lengths[] = {1, 1, 5, 200, 1, 9, 17, 2, 65, 3, 1, 10, 11, 1};
    static struct run runs[MAX_RUNS];
    struct rng rng;
    rng_init(&rng, 11, 0);
    for (int most = 1; most <= 14; most++) {
        int n = 0;
        for (int i = 0; i < most; i++) {
            const int length = lengths[i] < s->n ? lengths[i] : s->n;
            const int first = (int)rng_below(&rng, (uint32_t)(s->n - length + 1));
            runs[n++] = (struct run){first, length};
        }
        run_paged(s, "mixed", runs, n, 0, STORED);
        // so long that a pool in e4m3 is widened for a few of the sequences at a time
        if (most == 14) run_paged(s, "mixed, in a much larger grid", runs, n, 60000, STORED);
    }
    for (int k = 2; k <= 9; k++) { // verification
        int n = 0;
        for (int at = 0; at + k <= s->n; at += 13) runs[n++] = (struct run){at, k};
        run_paged(s, "verified", runs, n, 0, STORED);
    }
}

static void check_case(const struct attention_case *c, bool in_e4m3)
{
    struct scene s = {.c = c,
                      .in_e4m3 = in_e4m3,
                      .n = c->tokens,
                      .shape = {.dt = dt,
                                .n_heads = c->heads,
                                .n_kv_heads = c->kv_heads,
                                .head_dim = c->dim,
                                .latent = c->latent,
                                .scale = 1 / sqrtf((float)c->dim),
                                .softcap = c->softcap,
                                .window = c->window,
                                .early = true}};
    s.width = (int)attn_row_width(&s.shape);
    s.out_bytes = c->heads * attn_value_dim(&s.shape) * (int)dtype_size(dt);
    s.qkv = take_rows(&s, s.n, 5);
    if (c->sinks) s.shape.sinks = s.qkv; // any numbers do
    take_pool(&s);
    take_lists(&s);
    s.expected = op_host((size_t)s.n * (size_t)s.out_bytes);
    from_device(s.expected, run_packed(&s, 0, whole), (size_t)s.n * (size_t)s.out_bytes);

    check_packed(&s, JUNK, whole);
    check_packed(&s, 0, (const int[]){100, 0});
    check_packed(&s, JUNK, (const int[]){257, 0});
    check_packed(&s, JUNK, (const int[]){1, 64, 65, 130, 256, 257, 0}); // of a tree's branch
    static const int chunks[] = {1200, 512, 100, 64, 7};
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) check_chunks(&s, chunks[i]);
    check_decode(&s);
    check_padded(&s);
    check_mixed(&s);
    check_drafts(&s);
}

static void wanted_cases(void)
{
    dt = device_default_dtype(dev);
    if (!device_is_exact(dev, dt)) {
        printf("not on %s: in %s it is not exact\n", device_name(dev), dtype_name(dt));
        return;
    }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const size_t mark = op_mark();
        if (cases[i].cuda_only && device_kind(dev) == DEVICE_CPU) continue;
        for (int in_e4m3 = 0; in_e4m3 < 2 && op_wanted(cases[i].name); in_e4m3++) {
            check_case(&cases[i], in_e4m3);
            op_release(mark);
        }
    }
}

TEST(on_each_device)
{
    op_on_each(NULL, wanted_cases, false);
}

OP_BODIES
