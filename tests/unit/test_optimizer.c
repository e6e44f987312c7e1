/* test_optimizer.c: trainer/optimizer: against torch's formula in a plain loop, the exact fp32
 * master behind bf16 weights, clipping, state on disk. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "kernels/moments.h"
#include "tests/support/loaded.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "trainer/learn/optimizer.h"
#include "trainer/learn/param_range.h"

LATER(optimizer_free)

static struct optimizer *optimizer_of(const struct loaded *a, const struct optimizer_config *config)
{
    struct optimizer *o;
    assert_ok(optimizer_new_whole(a->dev, a->weights, config, &o));
    return test_later(o, optimizer_free_later);
}

// Values that bf16 holds exactly, so that both dtypes start alike. Padding stays zero.
static struct loaded *tiny(enum dtype dt, int vocab)
{
    struct loaded *a = loaded_planned(tiny_folder(32, 1, vocab, 1), dt);
    struct rng r;
    rng_init(&r, 5, 0);
    for (int t = 0; t < a->weights->n_tensors; t++) {
        const struct weight_tensor *tensor = &a->weights->tensors[t];
        for (int64_t i = tensor->offset; i < tensor->offset + tensor->n; i++) {
            const uint16_t h = bf16_from_f32(0.05f * rng_normal(&r));
            if (dt == DT_BF16)
                ((uint16_t *)a->weights->base)[i] = h;
            else
                ((float *)a->weights->base)[i] = f32_from_bf16(h);
        }
    }
    return a;
}

// Another gradient each step, its norm around 3.
static void fill_grads(struct optimizer *o, int step)
{
    enum { SAMPLES = 1009 };
    struct rng r;
    float samples[SAMPLES], *g = optimizer_grads(o, 0)->base;
    rng_init(&r, 6, (uint64_t)step);
    for (int i = 0; i < SAMPLES; i++) samples[i] = 0.1f * (rng_uniform(&r) - 0.4f);
    for (int t = 0; t < optimizer_grads(o, 0)->n_tensors; t++) {
        const struct weight_tensor *tensor = &optimizer_grads(o, 0)->tensors[t];
        for (int64_t i = tensor->offset; i < tensor->offset + tensor->n; i++)
            g[i] = samples[i % SAMPLES];
    }
}

static const struct optimizer_config defaults = {0.9, 0.999, 1e-8, 0.01, 1.0, MOMENTS_F32, false};

static struct optimizer_config with_moments(enum moments_kind kind)
{
    struct optimizer_config config = defaults;
    config.moments = kind;
    return config;
}

static void one_step(struct optimizer *o, int step, double lr)
{
    double norm;
    fill_grads(o, step);
    assert_ok(optimizer_prepare(o, &norm));
    assert_ok(optimizer_apply(o, lr));
}

// torch.optim.AdamW and clip_grad_norm_ in double.
TEST(equals_plain_loop)
{
    const struct loaded *a = tiny(DT_F32, 64);
    struct optimizer *o = optimizer_of(a, &defaults);
    const size_t n = (size_t)a->weights->n_elements;
    double *p = test_keep(calloc(n, sizeof *p)), *m = test_keep(calloc(n, sizeof *p)),
           *v = test_keep(calloc(n, sizeof *p));
    const float *w = a->weights->base, *g = optimizer_grads(o, 0)->base;
    for (size_t i = 0; i < n; i++) p[i] = w[i];
    for (int step = 1; step <= 20; step++) {
        double norm, sum = 0;
        fill_grads(o, step);
        if (step == 2) // small enough not to be clipped
            for (size_t i = 0; i < n; i++) ((float *)optimizer_grads(o, 0)->base)[i] *= 1e-3f;
        for (size_t i = 0; i < n; i++) sum += (double)g[i] * g[i];
        assert_ok(optimizer_prepare(o, &norm));
        assert_near(norm, sqrt(sum), 1e-6 * norm);
        assert_true(step == 2 ? norm < 1 : norm > 1);
        double scale = fmin(1, 1 / (sqrt(sum) + 1e-6));
        assert_ok(optimizer_apply(o, 1e-3));
        for (size_t i = 0; i < n; i++) {
            double grad = g[i] * scale;
            p[i] *= 1 - 1e-3 * 0.01;
            m[i] = 0.9 * m[i] + 0.1 * grad;
            v[i] = 0.999 * v[i] + 0.001 * grad * grad;
            p[i] -= 1e-3 / (1 - pow(0.9, step)) * m[i] /
                    (sqrt(v[i]) / sqrt(1 - pow(0.999, step)) + 1e-8);
        }
    }
    for (size_t i = 0; i < n; i++) assert_near(w[i], p[i], 2e-6);
    assert_int_equal(optimizer_steps(o), 20);
}

// 1,000 steps at a learning rate whose updates bf16 alone would round away: the two halves are the
// fp32 weight to the bit.
static void check_master(enum moments_kind kind)
{
    const struct optimizer_config config = with_moments(kind);
    const struct loaded *f32 = tiny(DT_F32, 64), *bf16 = tiny(DT_BF16, 64);
    struct optimizer *of = optimizer_of(f32, &config), *ob = optimizer_of(bf16, &config);
    const size_t n = (size_t)f32->weights->n_elements;
    assert_int_equal(bf16->weights->n_elements, n);
    const uint16_t *start = test_copy(bf16->weights->base, n * sizeof *start);
    const char *path = test_path(test_folder(), "state.safetensors");
    for (int step = 1; step <= 1000; step++) {
        one_step(of, step, 1e-6);
        one_step(ob, step, 1e-6);
        if (step == 500) { // and through a file
            assert_ok(optimizer_save(ob, path));
            ob = optimizer_of(bf16, &config);
            assert_ok(optimizer_load(ob, path));
            assert_int_equal(optimizer_steps(ob), 500);
        }
    }
    // The residual is not public: it is read from the state, tensor by tensor.
    assert_ok(optimizer_save(ob, path));
    struct safetensors *set = tensors_of_file(path);
    size_t compared = 0, moved = 0;
    for (int t = 0; t < bf16->weights->n_tensors; t++) {
        const struct weight_tensor *tensor = &bf16->weights->tensors[t];
        char name[200];
        snprintf(name, sizeof name, "residual.%s", tensor->name);
        const struct safetensors_entry *entry = safetensors_find(set, name);
        assert_non_null(entry);
        const unsigned char *bytes = entry->data;
        const uint16_t *high = (uint16_t *)bf16->weights->base + tensor->offset;
        for (int64_t i = 0; i < tensor->n; i++, compared++) {
            uint16_t low;
            memcpy(&low, bytes + 2 * i, 2);
            float master = master_join(high[i], low);
            assert_memory_equal(&master, (float *)f32->weights->base + tensor->offset + i,
                                sizeof master);
            moved += high[i] != start[tensor->offset + i];
        }
    }
    assert_int_equal(compared, bf16->weights->n_parameters);
    assert_true(moved > compared / 10); // small steps have added up to visible ones
}

TEST(master_is_exact)
{
    check_master(MOMENTS_F32);
    check_master(MOMENTS_8BIT);
}

// Ten steps are five, and five more from their state.
static void check_resume(const struct loaded *a, const struct optimizer_config *config)
{
    const size_t bytes = a->weights->bytes;
    const char *path = test_path(test_folder(), "state.safetensors");
    struct optimizer *o = optimizer_of(a, config);
    for (int step = 1; step <= 5; step++) one_step(o, step, 1e-3);
    assert_ok(optimizer_save(o, path));
    const void *middle = test_copy(a->weights->base, bytes);
    for (int step = 6; step <= 10; step++) one_step(o, step, 1e-3);
    const void *end = test_copy(a->weights->base, bytes);
    memcpy(a->weights->base, middle, bytes);
    o = optimizer_of(a, config);
    assert_ok(optimizer_load(o, path));
    for (int step = 6; step <= 10; step++) one_step(o, step, 1e-3);
    assert_memory_equal(end, a->weights->base, bytes);
}

TEST(resumes_to_the_bit)
{
    for (int kind = MOMENTS_F32; kind <= MOMENTS_8BIT; kind++) {
        const struct optimizer_config config = with_moments((enum moments_kind)kind);
        check_resume(tiny(DT_F32, 64), &config);
    }
}

// The scales of 8-bit moments, of tensors that lie within a block of memory and so begin and end in
// the middle of a scale's 128 elements: q, k, v biases of 160, 80, 80: v is elements 240 to 319,
// which end in the block after the one that they begin in.
TEST(scales_beyond_a_border_are_kept)
{
    const struct optimizer_config config = with_moments(MOMENTS_8BIT);
    const struct loaded *m = loaded_planned(tiny_folder(160, 1, 50, 1), DT_F32);
    bool crosses = false;
    for (int t = 0; t < m->weights->n_tensors; t++) {
        const int64_t at = m->weights->tensors[t].offset, n = m->weights->tensors[t].n;
        crosses |= (at + n - 1) / MOMENT_BLOCK - at / MOMENT_BLOCK >= (n + 127) / MOMENT_BLOCK;
    }
    assert_true(crosses); // else nothing is tested
    check_resume(m, &config);
}

// A state of one kind of moments is not another's; the message names both and the option.
TEST(moments_are_not_mixed)
{
    const char *path = test_path(test_folder(), "state.safetensors");
    const struct loaded *a = tiny(DT_F32, 64);
    for (int from = MOMENTS_F32; from <= MOMENTS_8BIT; from++) {
        struct optimizer_config config = with_moments((enum moments_kind)from);
        struct optimizer *o = optimizer_of(a, &config);
        one_step(o, 1, 1e-3);
        assert_ok(optimizer_save(o, path));
        for (int to = MOMENTS_F32; to <= MOMENTS_8BIT; to++) {
            char wanted[64];
            config.moments = (enum moments_kind)to;
            o = optimizer_of(a, &config);
            assert_status(optimizer_load(o, path), from == to ? ST_OK : ST_MISMATCH);
            assert_int_equal(optimizer_steps(o), from == to);
            if (from == to) continue;
            snprintf(wanted, sizeof wanted, "holds moments in %s, this run keeps them in %s",
                     moments_kind_names[from], moments_kind_names[to]);
            assert_message(wanted);
            snprintf(wanted, sizeof wanted, "--optim-moments %s", moments_kind_names[from]);
            assert_message(wanted);
            assert_message(path);
        }
    }
}

// ---- moments of fewer bits ----------------------------------------------------------------------

// Every code comes back as it is, whatever the noise: what is stored and not changed stays.
TEST(codes_are_stable)
{
    static const float scales[] = {1, 0.3f, 7e-12f, 3e20f};
    for (int s = 0; s < 4; s++)
        for (int code = 0; code < 256; code++) {
            float largest = scales[s], inverse = 1 / largest;
            float m = moment_unpack((uint8_t)code, largest, false);
            float v = moment_unpack((uint8_t)code, largest, true);
            // a code's value is at the edge of the range that it stands for, and the inverse is
            // rounded: half the noise is out of reach of that edge on both sides
            int wanted = code == 128 ? 0 : code; // minus 0 is 0
            assert_int_equal(moment_pack(m, inverse, 0x7fff, false), wanted);
            assert_int_equal(moment_pack(v, inverse, 0x7fff, true), code);
            assert_true(fabsf(m) <= largest && v >= 0 && v <= largest);
            if (code > 0)
                assert_true(v > 0 && v > moment_unpack((uint8_t)(code - 1), largest, true));
        }
    assert_true(moment_unpack(127, 0.3f, false) == 0.3f &&
                moment_unpack(255, 0.3f, false) == -0.3f);
    assert_true(moment_unpack(255, 0.3f, true) == 0.3f);
}

// The mean over the noise is the value; v does not become 0, m does where it is negligible.
TEST(rounding_has_no_bias)
{
    static const float values[] = {1, 0.97f, 0.5001f, 0.1234f, 3e-2f, 7.7e-4f, 5e-5f};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        double m = 0, v = 0, half = 0, x = values[i];
        for (uint32_t noise = 0; noise < 65536; noise++) {
            m += moment_unpack(moment_pack(-values[i], 1, noise, false), 1, false);
            v += moment_unpack(moment_pack(values[i], 1, noise, true), 1, true);
            half += f32_from_bf16(moment_to_bf16(values[i], noise));
        }
        // exact but for the bits that lie below the noise's
        assert_near(m / 65536, -x, 2e-5 * x);
        assert_near(v / 65536, x, 2e-5 * x);
        assert_near(half / 65536, x, 1e-6 * x);
    }
    for (uint32_t noise = 0; noise < 65536; noise += 5) {
        assert_int_equal(moment_pack(1e-20f, 1, noise, true), 1);
        assert_int_equal(moment_pack(1e-6f, 1, noise, false), 0);
        assert_int_equal(moment_pack(0, 1, noise, true), 0);
        assert_int_equal(moment_pack(0, 1, noise, false), 0);
        assert_int_equal(moment_pack(0, moment_inverse(0), noise, true), 0);
        assert_int_equal(moment_pack(1e-40f, moment_inverse(1e-40f), noise, false), 0);
    }
    double sum = 0, both = 0;
    enum { N = 100000 };
    for (int i = 0; i < N; i++) { // halves are uniform and independent of each other
        uint32_t noise = moment_noise((uint64_t)i * 3 + ((uint64_t)i << 31), 7);
        double upper = (noise >> 16) / 65535.0 - 0.5, lower = (noise & 0xffff) / 65535.0 - 0.5;
        sum += upper + lower;
        both += upper * lower;
    }
    assert_true(fabs(sum) < 5 * sqrt(N / 6.0));
    assert_true(fabs(both) < 5 * sqrt(N / 144.0));
}

// After many steps of a constant gradient m is the gradient and v its square, for elements four
// orders of magnitude apart in a block: the weights then move by lr a step. Rounding to nearest
// would have stopped v at a fraction of that.
TEST(small_steps_add_up)
{
    enum { N = MOMENT_BLOCK, STEPS = 4000 };
    for (int kind = MOMENTS_BF16; kind <= MOMENTS_8BIT; kind++) {
        struct device *dev = test_cpu();
        static uint16_t m[N], v[N]; // room for either kind
        float w[N] = {0}, grad[N], scale = 1, m_scale = 0, v_scale = 0;
        memset(m, 0, sizeof m);
        memset(v, 0, sizeof v);
        struct moments moments = {(enum moments_kind)kind, m, v, &m_scale, &v_scale};
        for (int i = 0; i < N; i++) grad[i] = powf(10, (float)-(i % 5)) * (i % 2 ? 1 : -1);
        double moved = 0;
        for (int step = 1; step <= STEPS; step++) {
            struct adamw a = {.lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-12f};
            a.bias_correction1 = (float)(1 - pow(0.9, step));
            a.bias_correction2 = (float)(1 - pow(0.999, step));
            a.step = (uint32_t)step;
            a.grad_scale = &scale;
            device_ops(dev)->adamw(dev, w, NULL, &moments, grad, N, &a, DT_F32);
        }
        for (int i = 0; i < N; i++) {
            double way = fabs((double)w[i]) / (1e-3 * STEPS);
            assert_true((w[i] > 0) == (grad[i] < 0));
            if (!(fabs(way - 1) < 0.25))
                fail_msg("%s: element %d went %g of its way", moments_kind_names[kind], i, way);
            moved += way / N;
        }
        if (!(fabs(moved - 1) < 0.03))
            fail_msg("%s: %g of the way on average", moments_kind_names[kind], moved);
    }
}

TEST(bad_gradient_changes_nothing)
{
    const struct loaded *a = tiny(DT_F32, 64);
    struct optimizer *o = optimizer_of(a, &defaults);
    float *g = optimizer_grads(o, 0)->base;
    double norm = -1;
    const void *before = test_copy(a->weights->base, a->weights->bytes);
    for (int i = 0; i < 2; i++) {
        optimizer_clear_grads(o);
        g[7] = i ? INFINITY : NAN;
        assert_fails(optimizer_prepare(o, &norm), ST_INVALID, "must be skipped");
        assert_true(norm == -1);
        assert_status(optimizer_apply(o, 1), ST_INVALID);
    }
    optimizer_clear_grads(o);
    g[7] = 3e38f; // finite in double: a norm, and a clipping factor near 0
    assert_ok(optimizer_prepare(o, &norm));
    assert_true(norm > 1e38);
    assert_memory_equal(before, a->weights->base, a->weights->bytes);
    assert_int_equal(optimizer_steps(o), 0);
}

TEST(foreign_state_is_refused)
{
    const char *folder = test_folder(), *path = test_path(folder, "state.safetensors");
    const struct loaded *a = tiny(DT_F32, 64);
    struct optimizer *o = optimizer_of(a, &defaults),
                     *wider = optimizer_of(tiny(DT_F32, 65), &defaults),
                     *bf16 = optimizer_of(tiny(DT_BF16, 64), &defaults);
    one_step(o, 1, 1e-3);
    assert_ok(optimizer_save(o, path));
    assert_fails(optimizer_load(wider, path), ST_MISMATCH, "exp_avg.");
    assert_message(path);
    assert_int_equal(optimizer_steps(wider), 0);
    assert_fails(optimizer_load(bf16, path), ST_MISMATCH, "residual.");
    assert_ok(optimizer_save(bf16, path));
    assert_status(optimizer_load(o, path), ST_MISMATCH);
    assert_status(optimizer_load(o, test_path(folder, "none")), ST_NOT_FOUND);
    assert_ok(weights_save(a->weights, a->dev, folder, DT_F32));
    assert_fails(optimizer_load(o, test_path(folder, "model.safetensors")), ST_FORMAT,
                 "commonweight-optimizer");
    assert_int_equal(optimizer_steps(o), 1);
}

TEST(memory_is_what_it_says)
{
    const struct loaded *a = tiny(DT_BF16, 64);
    size_t residual, kept, grads;
    size_t n = (size_t)a->weights->n_elements;
    struct param_range all = {.weights = a->weights, .n = a->weights->n_elements};
    struct param_ranges trained = {&all, 1};
    const size_t moments[] = {8 * n, 4 * n, 2 * n + 2 * n / MOMENT_BLOCK * sizeof(float)};
    for (int kind = MOMENTS_F32; kind <= MOMENTS_8BIT; kind++) {
        optimizer_memory(&trained, 1, (enum moments_kind)kind, &residual, &kept, &grads);
        assert_int_equal(residual, 2 * n);
        assert_int_equal(kept, moments[kind]);
        assert_true(grads >= 4 * n);
    }
}
