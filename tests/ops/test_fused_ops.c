/* test_fused_ops.c: an operation that stands for several gives their bits, on each device and in
 * each dtype: rope with a pool (rope, storing alone), matmul with act, norm with codes (norm,
 * quantise). And scratch memory may be asked for any number of times. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_table.h"

enum { HIDDEN = 192 };

static void *values(size_t n, uint64_t seed)
{
    return normal_on_device(dt, n, 1, seed);
}

// (rows, HIDDEN) times (n, HIDDEN) of weights.
static struct matmul matmul_of(int rows, int n)
{
    return (struct matmul){
        .m = rows, .n = n, .k = HIDDEN, .trans_b = true, .in = dt, .out = dt, .early = true};
}

static void check_rope_store_into(enum dtype pool_dt, int rows, int heads, int kv_heads, int dim,
                                  int rot)
{
    enum { MOST = 200, SLOTS = 256, LAYERS = 2, POSITIONS = 20 };
    int32_t positions[MOST], slots[MOST];
    for (int i = 0; i < rows; i++) positions[i] = (3 + 13 * i) % POSITIONS;
    for (int i = 0; i < rows; i++) slots[i] = i % 7 == 2 ? -1 : (11 + 5 * i) % SLOTS;
    int width = (heads + 2 * kv_heads) * dim;
    size_t size = dtype_size(dt), qkv_bytes = (size_t)rows * width * size;
    size_t pool = (size_t)LAYERS * SLOTS * kv_heads * dim * dtype_size(pool_dt);
    size_t scales = (size_t)LAYERS * SLOTS * kv_heads * KV_SCALES;
    void *qkv = values((size_t)rows * width, 4), *other = to_device(NULL, qkv_bytes);
    float *host = op_host((size_t)POSITIONS * rot * sizeof *host);
    for (int i = 0; i < POSITIONS * rot; i++) host[i] = (float)(i % 17) / 16 - 0.4f;
    float *table = to_device(host, (size_t)POSITIONS * rot * sizeof *table);
    device_copy(dev, other, qkv, qkv_bytes);
    const struct kv_layer layers[LAYERS] = {{.width = kv_heads * dim},
                                            {.offset = (int64_t)SLOTS * kv_heads * dim,
                                             .width = kv_heads * dim,
                                             .scales = (int64_t)SLOTS * kv_heads * KV_SCALES}};
    struct kv_view kv[2];
    for (int i = 0; i < 2; i++)
        kv[i] = (struct kv_view){.k = to_device(NULL, pool),
                                 .v = to_device(NULL, pool),
                                 .scales = to_device(NULL, scales),
                                 .dt = pool_dt,
                                 .layers = layers,
                                 .n_blocks = SLOTS / 4,
                                 .block_size = 4};
    struct batch_view batch = {.n_tokens = rows,
                               .positions = to_device(positions, rows * sizeof *positions),
                               .slots = to_device(slots, rows * sizeof *slots)};
    struct attn_shape shape = {
        .n_heads = heads, .n_kv_heads = kv_heads, .head_dim = dim, .scale = 1, .dt = dt};
    const struct rope_args rope = rope_of_batch(table, rot, &batch, &shape, 1);
    char name[80];
    snprintf(name, sizeof name, "rope_store %d rows, %d + 2 x %d heads of %d, %d rotated, %s", rows,
             heads, kv_heads, dim, rot, dtype_name(pool_dt));
    struct rope_args store = rope, alone;
    store.kv = &kv[1];
    store.layer = 1;
    alone = store;
    alone.table = NULL; // rot_dim then says nothing
    alone.kv = &kv[0];
    ops->rope(dev, qkv, &rope);
    ops->rope(dev, qkv, &alone);
    ops->rope(dev, other, &store);
    assert_same_bytes(name, other, qkv, qkv_bytes);
    assert_same_bytes(name, kv[1].k, kv[0].k, pool);
    assert_same_bytes(name, kv[1].v, kv[0].v, pool);
    assert_same_bytes(name, kv[1].scales, kv[0].scales, scales);
}

static void check_rope_store(int rows, int heads, int kv_heads, int dim, int rot)
{
    check_rope_store_into(dt, rows, heads, kv_heads, dim, rot);
    check_rope_store_into(DT_E4M3, rows, heads, kv_heads, dim, rot);
}

ON_EACH_DTYPE(rope_store)
{
    static const int rows[] = {1, 5, 17, 64, 100, 200};
    check_rope_store(5, 12, 2, 128, 128);
    check_rope_store(5, 4, 4, 64, 16);
    check_rope_store(5, 3, 1, 80, 32);
    check_rope_store(5, 2, 1, 10, 6);
    check_rope_store(5, 2, 2, 12, 4);
    check_rope_store(5, 1, 1, 256, 256);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        check_rope_store(rows[i], 12, 2, 128, 128);
        check_rope_store(rows[i], 3, 1, 80, 80);
    }
}

// y with what the matmul gives being kept or not.
static void check_matmul_act(int rows, int width, enum act_kind kind, bool gated, bool has_bias)
{
    const size_t mark = op_mark();
    const int n = gated ? 2 * width : width;
    struct matmul product = matmul_of(rows, n);
    const struct act_shape act = {.rows = rows,
                                  .width = width,
                                  .kind = kind,
                                  .gated = gated,
                                  .dt = dt,
                                  .alpha = 1.702f,
                                  .limit = 1.3f};
    size_t bytes = (size_t)rows * width * dtype_size(dt), x_bytes = bytes * (gated ? 2 : 1);
    void *a = values((size_t)rows * HIDDEN, 1), *b = values((size_t)n * HIDDEN, 2);
    void *bias = values((size_t)n, 3), *added = has_bias ? bias : NULL;
    void *x = to_device(NULL, x_bytes), *y = to_device(NULL, bytes),
         *kept = to_device(NULL, x_bytes), *other = to_device(NULL, bytes);
    char name[96];
    snprintf(name, sizeof name, "matmul with act %d x %d, kind %d%s%s", rows, width, (int)kind,
             gated ? ", gated" : "", has_bias ? ", with a bias" : "");
    ops->matmul(dev, x, a, b, added, &product);
    ops->act(dev, y, x, &act);
    product.act = &act;
    product.x = kept;
    product.keep = true;
    ops->matmul(dev, other, a, b, added, &product);
    assert_same_bytes(name, other, y, bytes);
    assert_same_bytes(name, kept, x, x_bytes);
    device_fill(dev, other, 0x7b, bytes);
    product.keep = false;
    ops->matmul(dev, other, a, b, added, &product);
    assert_same_bytes(name, other, y, bytes);
    op_release(mark);
}

ON_EACH_DTYPE(matmul_act)
{
    static const int rows[] = {1, 9, 16, 33, 64, 128, 129, 200, 256, 300};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        check_matmul_act(rows[i], 8960, ACT_SILU, true, false);
        check_matmul_act(rows[i], 100, ACT_SILU, true, true);
    }
    for (int kind = ACT_SILU; kind <= ACT_GELU; kind++) {
        check_matmul_act(7, 1000, kind, true, true);
        check_matmul_act(50, 1000, kind, true, true);
        check_matmul_act(250, 8960, kind, true, true);
        check_matmul_act(7, 1000, kind, false, true);
    }
    check_matmul_act(3, 37, ACT_SILU, true, true);
}

// Rows of random numbers, one of zeros and one with a NaN.
static void check_norm_rounded(enum norm_kind kind, int rows, int width, bool has_bias)
{
    const size_t mark = op_mark(), n = (size_t)rows * width, row = width * dtype_size(dt);
    const struct norm_shape shape = {kind, rows, width, 1, width, 1e-5f, dt, false};
    char *x = values(n, 1);
    void *w = values((size_t)width, 2), *y = to_device(NULL, n * dtype_size(dt)),
         *other = to_device(NULL, n * dtype_size(dt)), *codes = to_device(NULL, n),
         *scales = to_device(NULL, (size_t)rows), *fused_codes = to_device(NULL, n),
         *fused_scales = to_device(NULL, (size_t)rows);
    struct norm_args args = {.x = x, .w = w, .b = has_bias ? values((size_t)width, 3) : NULL};
    char name[96];
    snprintf(name, sizeof name, "norm %d x %d with codes, kind %d", rows, width, (int)kind);
    device_fill(dev, x, 0, row);
    if (rows > 2) device_fill(dev, x + 2 * row, 0xff, dtype_size(dt));
    ops->norm(dev, y, &args, &shape);
    ops->quantise(dev, codes, scales, y, rows, width, dt, NULL, 0);
    args.codes = fused_codes;
    args.scales = fused_scales;
    ops->norm(dev, other, &args, &shape);
    assert_same_bytes(name, other, y, n * dtype_size(dt));
    assert_same_bytes(name, fused_codes, codes, n);
    assert_same_bytes(name, fused_scales, scales, (size_t)rows);
    // a few rows of many, in place, with weights that are read early
    struct norm_shape few = shape;
    few.rows = rows < 3 ? rows : 3;
    args.early = true;
    ops->norm(dev, x, &args, &few);
    assert_same_bytes(name, x, y, (size_t)few.rows * row);
    assert_same_bytes(name, fused_codes, codes, n);
    op_release(mark);
}

ON_EACH_DTYPE(norm_rounded)
{
    static const int rows[] = {1, 3, 8, 67, 200},
                     widths[] = {16, 24, 100, 512, 1536, 3584, 8960, 16384};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (size_t k = 0; k < sizeof widths / sizeof widths[0]; k++)
            check_norm_rounded(NORM_RMS, rows[i], widths[k], false);
    check_norm_rounded(NORM_RMS_PLUS_ONE, 5, 1536, false);
    check_norm_rounded(NORM_LAYER, 5, 1024, true);
}

// More often than a fixed list of what was outgrown would hold.
ON_EACH_DTYPE(scratch)
{
    if (device_kind(dev) != DEVICE_CUDA) return;
    for (size_t mib = 1; mib <= 80; mib++) assert_ok(device_reserve(dev, mib << 20));
    check_rope_store(5, 4, 4, 64, 16);
}

OP_BODIES
