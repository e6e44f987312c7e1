/* test_twin.c: weights with an e4m3 twin (common/model/weights.h): what is multiplied are the
 * twin's numbers, of every kind of layer; whoever writes tensors makes it anew; a plan without one
 * is as it was. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/e4m3.h"
#include "common/base/mxfp4.h"
#include "tests/support/engine_bench.h"
#include "tests/support/loaded.h"
#include "trainer/learn/optimizer.h"

enum { N_IDS = 23 };

static int find_index(const struct weights *w, const char *name)
{
    return (int)(weights_find(w, name) - w->tensors);
}

// The numbers of a tensor of the twin, written over those of the same tensor of `plain`.
static void write_widened(const struct reference *from, int i, const struct reference *plain)
{
    const struct weights *twin = from->weights->twin;
    const struct weight_tensor *t = &twin->tensors[i];
    const uint8_t *codes;
    const int8_t *scales;
    weights_twin_tensor(twin, i, &codes, &scales);
    const int same = find_index(plain->weights, t->name);
    float *x = malloc((size_t)t->n * sizeof *x), *own = malloc((size_t)t->n * sizeof *x);
    double off = 0, largest = 0;
    assert_non_null(x);
    assert_non_null(own);
    assert_ok(weights_read(from->weights, from->dev, same, own));
    for (int64_t k = 0; k < t->n; k++) {
        const int64_t cols = t->shape[1], row = k / cols;
        const uint8_t code = codes[row * cols + e4m3_place(k % cols, cols)];
        x[k] = ldexpf(f32_from_e4m3(code), scales[row]);
        off = fmax(off, fabs((double)x[k] - (double)own[k]));
        largest = fmax(largest, fabs((double)own[k]));
    }
    assert_true(off <= largest / 16);
    assert_ok(weights_write(plain->weights, plain->dev, same, x));
    free(x);
    free(own);
}

static void compare_logits(const char *model)
{
    SCOPED(reference_close) struct reference r, plain;
    int32_t ids[N_IDS];
    reference_open_as(model, "cpu", QUANTIZATION_FP8_WEIGHTS, &r);
    reference_open(model, "cpu", &plain);
    const size_t bytes = N_IDS * (size_t)r.config->vocab_size * sizeof(float);
    float *have = malloc(bytes), *want = malloc(bytes), *before = malloc(bytes);
    assert_true(have && want && before);
    for (int i = 0; i < N_IDS; i++) ids[i] = (i * 29 + 5) % r.config->vocab_size;
    reference_logits(&plain, ids, N_IDS, before);
    const struct weights *twin = r.weights->twin;
    assert_non_null(twin);
    for (int i = 0; i < twin->n_tensors; i++) write_widened(&r, i, &plain);
    reference_logits(&plain, ids, N_IDS, want);
    reference_logits(&r, ids, N_IDS, have);
    assert_memory_not_equal(before, want, bytes);
    assert_memory_equal(have, want, bytes);
    free(have);
    free(want);
    free(before);
}

TEST(its_numbers_are_multiplied)
{
    for_each_golden(compare_logits);
}

// A twin by itself: codes, scales and every other tensor are those of an arena with both copies,
// which is larger by the numbers, but for room for some rows.
static void compare_alone(const char *model)
{
    struct loaded both, alone;
    size_t numbers = 0;
    loaded_config(model, &both);
    loaded_config(model, &alone);
    both.config->quantization = alone.config->quantization = QUANTIZATION_FP8_WEIGHTS;
    alone.config->twin_alone = true;
    struct loaded *sides[] = {&both, &alone};
    for (int i = 0; i < 2; i++) {
        loaded_zeros(sides[i], DT_BF16);
        assert_ok(weights_load(sides[i]->weights, sides[i]->dev, model));
    }
    const struct weights *a = both.weights, *b = alone.weights;
    assert_true(a->twin->canary_offset == b->twin->canary_offset && b->n_in_twin > 0);
    assert_memory_equal(a->twin->base, b->twin->base, a->twin->canary_offset);
    for (int i = 0; i < a->n_tensors; i++) {
        const struct weight_place x = weights_place(a, &a->tensors[i]),
                                  y = weights_place(b, &b->tensors[i]);
        if (b->tensors[i].in_twin) {
            assert_true(y.dt == DT_E4M3 && 2 * y.bytes == x.bytes);
            numbers += x.bytes;
            continue;
        }
        assert_true(x.dt == y.dt && x.bytes == y.bytes);
        assert_memory_equal((char *)a->base + x.offset, (char *)b->base + y.offset, x.bytes);
    }
    const size_t room = (b->canary_offset - b->room_offset), gaps = 256 * (size_t)a->n_tensors;
    assert_true(a->bytes + room <= b->bytes + numbers + gaps);
    assert_true(a->bytes + room + gaps >= b->bytes + numbers);
    assert_int_equal(a->n_parameters, b->n_parameters);
    uint64_t of_both, of_alone, other;
    assert_ok(weights_base_checksum(a, both.dev, &of_both));
    assert_ok(weights_base_checksum(b, alone.dev, &of_alone));
    assert_true(of_both == of_alone);
    *(uint8_t *)b->twin->base ^= 1;
    assert_ok(weights_base_checksum(b, alone.dev, &other));
    assert_true(of_alone != other);
    int coded = 0;
    while (!b->tensors[coded].in_twin) coded++;
    assert_fails(weights_read(b, alone.dev, coded, &(float){0}), ST_UNSUPPORTED, "in e4m3 alone");
    assert_fails(weights_init_random(alone.weights, alone.dev, 1), ST_UNSUPPORTED, "random");
    loaded_close(&both);
    loaded_close(&alone);
}

TEST(it_can_be_alone)
{
    for_each_golden(compare_alone);
}

static float *logits_as(const char *model, enum quantization q, int *ret_n)
{
    SCOPED(reference_close) struct reference r;
    int32_t ids[N_IDS];
    reference_open_as(model, "cpu", q, &r);
    *ret_n = N_IDS * r.config->vocab_size;
    float *logits = test_keep(malloc((size_t)*ret_n * sizeof *logits));
    for (int i = 0; i < N_IDS; i++) ids[i] = (i * 29 + 5) % r.config->vocab_size;
    reference_logits(&r, ids, N_IDS, logits);
    return logits;
}

// What rounds rows as well moves the logits of every kind of layer, about as far again as rounding
// weights does, which has as many bits.
static void compare_rounded(const char *model)
{
    int n;
    double by_weights = 0, by_rows = 0;
    const float *plain = logits_as(model, QUANTIZATION_NONE, &n);
    const float *weights = logits_as(model, QUANTIZATION_FP8_WEIGHTS, &n);
    const float *rows = logits_as(model, QUANTIZATION_FP8, &n);
    for (int i = 0; i < n; i++) {
        by_weights += pow((double)weights[i] - (double)plain[i], 2);
        by_rows += pow((double)rows[i] - (double)weights[i], 2);
    }
    const double times = sqrt(by_rows / by_weights);
    if (!(times > 0.3 && times < 3))
        fail_msg("%s: rows move logits %g times as far as weights do", model, times);
}

TEST(rows_are_rounded)
{
    for_each_golden(compare_rounded);
}

// ---- four bits ----------------------------------------------------------------------------------

// As transformers reads them (integrations/mxfp4.py): a table, times a power of two.
TEST(numbers_of_four_bits)
{
    static const float table[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (int scale = 0; scale < 255; scale++)
        for (int code = 0; code < 256; code++) {
            const uint8_t byte = (uint8_t)code;
            for (int i = 0; i < 2; i++) {
                const int four = code >> (4 * i) & 15;
                const float have = mxfp4_code(&byte, i) * mxfp4_factor((uint8_t)scale),
                            want =
                                ldexpf(four & 8 ? -table[four & 7] : table[four & 7], scale - 127);
                assert_memory_equal(&have, &want, sizeof have);
            }
        }
}

// Experts as they are stored: the bits of those that were widened when they were loaded, in less
// memory, through both of an expert's matrices and back through them.
TEST(experts_in_four_bits)
{
    const char *model = test_golden("gpt-oss-mxfp4");
    SCOPED(reference_close) struct reference r, plain;
    int n;
    const float *want = logits_as(model, QUANTIZATION_NONE, &n);
    const float *have = logits_as(model, QUANTIZATION_MXFP4, &n);
    assert_memory_equal(have, want, (size_t)n * sizeof *have);
    reference_open_as(model, "cpu", QUANTIZATION_MXFP4, &r);
    reference_open(model, "cpu", &plain);
    const struct weights *a = r.weights, *b = plain.weights;
    size_t codes = 0, widened = 0;
    for (int i = 0; i < a->n_tensors; i++) {
        const struct weight_tensor *t = &a->tensors[i];
        const bool expert = t->role == ROLE_EXPERTS_GATE_UP || t->role == ROLE_EXPERTS_DOWN;
        const struct weight_place x = weights_place(a, t), y = weights_place(b, &b->tensors[i]);
        assert_int_equal(expert, t->in_twin > 0);
        codes += expert ? x.bytes : 0;
        widened += expert ? y.bytes : 0;
    }
    assert_true(codes > 0 && 8 * codes == widened);
    assert_true(a->bytes + widened < b->bytes + 2 * codes);
    assert_int_equal(a->n_parameters, b->n_parameters);

    const int layer = 1;
    const struct weight_matrix four = weights_matrix(a, ROLE_EXPERTS_DOWN, layer),
                               wide = weights_matrix(b, ROLE_EXPERTS_DOWN, layer);
    enum { ROWS = 5 };
    const int32_t offsets[] = {0, 2, 2, 4, ROWS};
    float dy[ROWS * 64], dx[2][ROWS * 64];
    assert_true(four.n <= 64 && four.k <= 64 && !four.scales && !wide.mx_scales);
    for (int i = 0; i < ROWS * four.n; i++) dy[i] = (float)(i * 37 % 19 - 9);
    struct matmul back = {.m = ROWS, .n = four.k, .k = four.n, .offsets = offsets, .n_experts = 4};
    r.model->ops->matmul(r.dev, dx[1], dy, wide.w, NULL, &back);
    back.mx_scales = four.mx_scales;
    r.model->ops->matmul(r.dev, dx[0], dy, four.w, NULL, &back);
    assert_ok(device_sync(r.dev));
    assert_memory_equal(dx[0], dx[1], (size_t)(ROWS * four.k) * sizeof(float));
}

TEST(four_bits_are_of_folders_that_have_them)
{
    struct loaded plain, stored;
    loaded_config(test_golden("gpt-oss"), &plain);
    assert_fails(model_config_quantise(plain.config, QUANTIZATION_MXFP4, false), ST_UNSUPPORTED,
                 "GptOssForCausalLM has none");
    loaded_config(test_golden("gpt-oss-mxfp4"), &stored);
    assert_ok(model_config_quantise(stored.config, QUANTIZATION_MXFP4, false));
    assert_fails(model_config_shard(stored.config, (struct shard){0, 2}), ST_INVALID,
                 "experts in MXFP4");
    loaded_close(&plain);
    loaded_close(&stored);
}

static uint64_t sum_of(const struct reference *r)
{
    uint64_t sum;
    assert_ok(weights_checksum(r->weights, r->dev, &sum));
    return sum;
}

// The arena is as it would be with a twin that is made of the tensors now.
static void assert_fresh(const struct reference *r)
{
    const uint64_t sum = sum_of(r);
    memset(r->weights->twin->base, 0x55, (size_t)r->weights->twin->tensors[0].n);
    assert_true(sum_of(r) != sum);
    weights_quantise(r->weights, r->dev);
    assert_true(sum_of(r) == sum);
}

TEST(who_writes_makes_it)
{
    const struct optimizer_config adamw = {0.9, 0.999, 1e-8, 0.01, 1.0, MOMENTS_F32, false};
    struct optimizer *o;
    SCOPED(reference_close) struct reference r;
    double norm;
    reference_open_as(model_a, "cpu", QUANTIZATION_FP8_WEIGHTS, &r);
    const uint64_t loaded = sum_of(&r);
    assert_fresh(&r);
    assert_ok(optimizer_new_whole(r.dev, r.weights, &adamw, &o));
    assert_null(optimizer_grads(o, 0)->twin);
    float *grads = optimizer_grads(o, 0)->base;
    for (int i = 0; i < r.weights->n_tensors; i++)
        for (int64_t k = 0; k < r.weights->tensors[i].n; k++)
            grads[r.weights->tensors[i].offset + k] = k % 3 ? 1e-3f : -1e-3f;
    assert_ok(optimizer_prepare(o, &norm));
    assert_ok(optimizer_apply(o, 0.01));
    assert_ok(device_sync(r.dev));
    assert_true(sum_of(&r) != loaded);
    assert_fresh(&r);
    optimizer_free(o);
    assert_ok(weights_init_random(r.weights, r.dev, 3));
    assert_fresh(&r);
    memset(r.weights->twin->base, 0x33, (size_t)r.weights->twin->tensors[0].n); // as one is torn
    assert_ok(weights_load(r.weights, r.dev, model_a));
    assert_true(sum_of(&r) == loaded);
}

TEST(plans)
{
    SCOPED(reference_close) struct reference plain, r;
    struct weights *like;
    char hash[65], other[65];
    reference_open(model_a, "cpu", &plain);
    reference_open_as(model_a, "cpu", QUANTIZATION_FP8_WEIGHTS, &r);
    const struct weights *a = plain.weights, *b = r.weights;
    assert_null(a->twin);
    assert_true(a->canary_offset == a->twin_offset && b->twin_offset == a->twin_offset);
    assert_true(b->canary_offset == b->twin_offset + b->twin->canary_offset);
    assert_true(a->n_elements == b->n_elements && a->n_parameters == b->n_parameters);
    weights_layout_hash(a, hash);
    weights_layout_hash(b, other);
    assert_string_not_equal(hash, other);
    assert_ok(weights_plan_like(b, DT_F32, &like));
    assert_null(like->twin);
    weights_free(like);
    for (int i = 0; i < b->twin->n_tensors; i++) {
        const struct weight_tensor *t = &b->twin->tensors[i];
        assert_true(t->n_dims == 2 && t->role != ROLE_EMBED && t->role != ROLE_HEAD);
    }
    assert_ok(weights_checksum(a, plain.dev, &(uint64_t){0}));
}

TESTS_BETWEEN(engine_bench_set_up, NULL)
