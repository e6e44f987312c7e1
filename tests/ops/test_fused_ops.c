/* test_fused_ops.c: rope_store, two operations in one, gives the bits of rope and kv_store, on each
 * device and in each dtype. And scratch memory may be asked for any number of times. */
#include "common/base/rng.h"
#include "kernels/ops.h"
#include "tests/support/support.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct device *dev;
static const struct ops *ops;
static enum dtype dt;

static void *take(size_t bytes)
{
    void *p = NULL;
    assert_ok(device_alloc(dev, bytes, &p));
    device_fill(dev, p, 0x7b, bytes); // a finite value
    return p;
}

static void *take_random(size_t n, uint64_t seed)
{
    struct rng rng;
    rng_init(&rng, seed, 0);
    float *host = malloc(n * sizeof *host);
    assert_non_null(host);
    for (size_t i = 0; i < n; i++) host[i] = rng_normal(&rng);
    void *wide = take(n * sizeof *host), *p = take(n * dtype_size(dt));
    device_copy_in(dev, wide, host, n * sizeof *host);
    ops->convert(dev, p, dt, wide, DT_F32, (int64_t)n);
    assert_ok(device_sync(dev));
    device_release(dev, wide);
    free(host);
    return p;
}

static int32_t *take_ints(const int32_t *host, size_t n)
{
    int32_t *p = take(n * sizeof *p);
    device_copy_in(dev, p, host, n * sizeof *p);
    assert_ok(device_sync(dev));
    return p;
}

static void assert_same(const char *what, const void *a, const void *b, size_t bytes)
{
    char *x = malloc(bytes), *y = malloc(bytes);
    assert_true(x && y);
    device_copy_out(dev, x, a, bytes);
    device_copy_out(dev, y, b, bytes);
    assert_ok(device_sync(dev));
    if (memcmp(x, y, bytes) != 0) {
        size_t at = 0;
        while (x[at] == y[at]) at++;
        fail_msg("%s on %s, %s: byte %zu of %zu differs", what, device_spec(dev), dtype_name(dt),
                 at, bytes);
    }
    free(x);
    free(y);
}

static void check_rope_store(int heads, int kv_heads, int dim, int rot)
{
    enum { ROWS = 5, SLOTS = 12, LAYERS = 2, POSITIONS = 20 };
    static const int32_t positions[ROWS] = {3, 0, 19, 7, 8}, slots[ROWS] = {11, 0, -1, 4, 5};
    int width = (heads + 2 * kv_heads) * dim;
    size_t size = dtype_size(dt), qkv_bytes = (size_t)ROWS * width * size;
    size_t pool = (size_t)LAYERS * SLOTS * kv_heads * dim;
    void *qkv = take_random((size_t)ROWS * width, 4), *other = take(qkv_bytes);
    float *table = take((size_t)POSITIONS * rot * sizeof *table),
          *host = calloc((size_t)POSITIONS * rot, 4);
    assert_non_null(host);
    for (int i = 0; i < POSITIONS * rot; i++) host[i] = (float)(i % 17) / 16 - 0.4f;
    device_copy_in(dev, table, host, (size_t)POSITIONS * rot * sizeof *table);
    device_copy(dev, other, qkv, qkv_bytes);
    const struct kv_layer layers[LAYERS] = {{0, kv_heads * dim},
                                            {(int64_t)SLOTS * kv_heads * dim, kv_heads * dim}};
    struct kv_view kv[2];
    for (int i = 0; i < 2; i++)
        kv[i] = (struct kv_view){.k = take(pool * size),
                                 .v = take(pool * size),
                                 .dt = dt,
                                 .layers = layers,
                                 .n_blocks = SLOTS / 4,
                                 .block_size = 4};
    struct batch_view batch = {
        .n_tokens = ROWS, .positions = take_ints(positions, ROWS), .slots = take_ints(slots, ROWS)};
    struct attn_shape shape = {
        .n_heads = heads, .n_kv_heads = kv_heads, .head_dim = dim, .scale = 1};
    const struct rope_args rope = rope_of_batch(table, rot, &batch, &shape, 1, dt);
    char name[64];
    snprintf(name, sizeof name, "rope_store %d + 2 x %d heads of %d, %d rotated", heads, kv_heads,
             dim, rot);
    ops->rope(dev, qkv, &rope);
    ops->kv_store(dev, &kv[0], 1, qkv, &batch, &shape);
    ops->rope_store(dev, other, table, rot, &kv[1], 1, &batch, &shape);
    assert_same(name, other, qkv, qkv_bytes);
    assert_same(name, kv[1].k, kv[0].k, pool * size);
    assert_same(name, kv[1].v, kv[0].v, pool * size);
    void *all[] = {qkv,
                   other,
                   table,
                   kv[0].k,
                   kv[0].v,
                   kv[1].k,
                   kv[1].v,
                   (void *)batch.positions,
                   (void *)batch.slots};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) device_release(dev, all[i]);
    free(host);
}

static void rope_store(void)
{
    check_rope_store(12, 2, 128, 128);
    check_rope_store(4, 4, 64, 16);
    check_rope_store(3, 1, 80, 32);
    check_rope_store(2, 1, 10, 6);
    check_rope_store(2, 2, 12, 4);
    check_rope_store(1, 1, 256, 256);
}

// More often than a fixed list of what was outgrown would hold.
static void scratch(void)
{
    if (device_kind(dev) != DEVICE_CUDA) return;
    for (size_t mib = 1; mib <= 80; mib++) assert_ok(device_reserve(dev, mib << 20));
    check_rope_store(4, 4, 64, 16);
}

static void on_each_device(void (*check)(void))
{
    static const char *const specs[] = {"cpu", "cuda:0"};
    for (int i = 0; i < 2; i++) {
        if (device_open(specs[i], &dev) != ST_OK) {
            printf("not on %s: %s\n", specs[i], status_message());
            continue;
        }
        ops = device_ops(dev);
        for (int d = 0; d < 2; d++) {
            dt = d ? DT_BF16 : DT_F32;
            if (device_computes_in(dev, dt)) check();
        }
        device_free(dev);
    }
}

static void test_rope_store(void **state)
{
    (void)state;
    on_each_device(rope_store);
}

static void test_scratch(void **state)
{
    (void)state;
    on_each_device(scratch);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rope_store),
        cmocka_unit_test(test_scratch),
    };
    return cmocka_run_group_tests_name("fused operations", tests, NULL, NULL);
}
