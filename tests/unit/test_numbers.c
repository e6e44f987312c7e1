/* test_numbers.c: common/base rng, dtype and clock. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/dtype.h"
#include "common/base/hash.h"
#include "common/base/rng.h"
#include "tests/support/support.h"
#include <float.h>

// ---- rng ----------------------------------------------------------------------------------------

// Known answers of the generator's authors (Random123, kat_vectors: philox4x32 10).
TEST(philox_known_answers)
{
    static const struct {
        uint32_t counter[4], key[2], answer[4];
    } vectors[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        uint32_t got[4];
        philox4x32(vectors[i].counter, vectors[i].key, got);
        assert_memory_equal(got, vectors[i].answer, sizeof got);
    }
}

TEST(stream_is_its_counters)
{
    const uint64_t seed = 0x0123456789abcdef, stream = 0xfedcba9876543210;
    struct rng r, other;
    rng_init(&r, seed, stream);
    for (uint32_t block = 0; block < 3; block++) {
        const uint32_t counter[4] = {block, 0, 0x76543210, 0xfedcba98};
        const uint32_t key[2] = {0x89abcdef, 0x01234567};
        uint32_t words[4];
        philox4x32(counter, key, words);
        for (int i = 0; i < 4; i++) assert_int_equal(rng_u32(&r), words[i]);
    }
    rng_init(&r, seed, stream);
    rng_init(&other, seed, stream + 1);
    int equal = 0;
    for (int i = 0; i < 1000; i++) equal += rng_u32(&r) == rng_u32(&other);
    assert_int_equal(equal, 0);
    r.position = UINT64_C(0x1ffffffff); // the counter's carry
    r.used = 4;
    rng_u32(&r);
    assert_true(r.position == UINT64_C(0x200000000));
}

TEST(open_interval)
{
    assert_true(rng_open01(0) > 0.0f);
    assert_true(rng_open01(UINT32_MAX) < 1.0f);
    // exact: no two of the 2^23 values fall together
    assert_true(rng_open01(0xfffffe00u) != rng_open01(0xfffffc00u));
    assert_true((double)rng_open01(0x200u) == 1.5 / 8388608.0);
}

// Mean and variance lie within 5 standard errors of their values, the streams being fixed.
TEST(moments)
{
    enum { N = 200000 };
    struct rng r;
    rng_init(&r, 7, 0);
    double sum = 0, squares = 0, uniform = 0;
    for (int i = 0; i < N; i++) {
        double x = (double)rng_normal(&r);
        sum += x;
        squares += x * x;
        uniform += (double)rng_uniform(&r);
    }
    assert_true(fabs(sum / N) < 5 / sqrt(N));
    assert_true(fabs(squares / N - 1) < 5 * sqrt(2.0 / N));
    assert_true(fabs(uniform / N - 0.5) < 5 * sqrt(1.0 / 12 / N));
}

TEST(below_is_uniform)
{
    enum { N = 60000, BINS = 6 };
    struct rng r;
    rng_init(&r, 11, 3);
    int counts[BINS] = {0};
    for (int i = 0; i < N; i++) {
        uint32_t x = rng_below(&r, BINS);
        assert_true(x < BINS);
        counts[x]++;
    }
    for (int i = 0; i < BINS; i++) // 5 standard deviations of a binomial count
        assert_true(abs(counts[i] - N / BINS) < 5 * sqrt((double)N / BINS * (1 - 1.0 / BINS)));
    for (int i = 0; i < 100; i++) assert_int_equal(rng_below(&r, 1), 0);
    // 2^32 words for 3 * 2^30 results: unless words are drawn again, one result in three comes
    // twice as often as the others
    int thirds[3] = {0};
    for (int i = 0; i < N; i++) thirds[rng_below(&r, 3u << 30) % 3]++;
    for (int i = 0; i < 3; i++)
        assert_true(abs(thirds[i] - N / 3) < 5 * sqrt((double)N / 3 * (1 - 1.0 / 3)));
}

// ---- dtype --------------------------------------------------------------------------------------

TEST(names)
{
    static const size_t sizes[DT_COUNT] = {4, 2, 2, 2, 4, 1, 1};
    for (int dt = 0; dt < DT_COUNT; dt++) {
        assert_int_equal(dtype_size(dt), sizes[dt]);
        assert_int_equal(dtype_from_name(dtype_name(dt)), dt);
        assert_int_equal(dtype_from_name(dtype_torch_name(dt)), dt);
        assert_int_equal(dtype_from_name(dtype_safetensors_name(dt)), dt);
    }
    assert_int_equal(dtype_from_name("torch.bfloat16"), DT_BF16);
    assert_int_equal(dtype_from_name("float8"), -1);
    assert_int_equal(dtype_from_name(""), -1);
}

static uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static float float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, 4);
    return x;
}

// torch 2.15: `x.to(torch.float8_e4m3fn)` of every bf16 below 464 in magnitude, in the order of
// their bits, and back of every code that is a number.
TEST(e4m3_as_torch)
{
    static uint8_t codes[65536];
    static float values[256];
    size_t n = 0, numbers = 0;
    char hex[65];
    for (uint32_t u = 0; u < 65536; u++) {
        const float x = f32_from_bf16((uint16_t)u);
        if (fabsf(x) < 464) codes[n++] = e4m3_from_f32(x);
    }
    hash_sha256_hex(codes, n, HASH_SHA256_BYTES, hex);
    assert_int_equal(n, 34768);
    assert_string_equal(hex, "2704cf4227fe622b633a0ffec593328030ec8a7843ddfc904772f18180d58864");
    for (int c = 0; c < 256; c++) {
        const float x = f32_from_e4m3((uint8_t)c);
        if (isnan(x)) assert_int_equal(c & 0x7f, 0x7f);
        if (!isnan(x)) values[numbers++] = x;
    }
    hash_sha256_hex(values, numbers * sizeof *values, HASH_SHA256_BYTES, hex);
    assert_int_equal(numbers, 254);
    assert_string_equal(hex, "f275e267d1b70f2c583fa6b5c47be61348a1aa22f7aa676cc5a0fb66798646a5");
}

// The nearest code to any f32, of two the even one; the most for all above it; NaN for NaN.
static void check_nearest(uint8_t (*code_of)(float), float (*value_of)(uint8_t), int most)
{
    struct rng r;
    rng_init(&r, 12, 0);
    for (int i = 0; i < 200000; i++) {
        const uint32_t u = rng_u32(&r);
        const float x = float_of(i % 2 ? u : (u & 0x87ffffffu) | 0x38000000u); // half: of its range
        const double magnitude = fmin(fabs((double)x), (double)value_of((uint8_t)most));
        const uint8_t code = code_of(x);
        int nearest = 0;
        if (isnan(x)) {
            assert_int_equal(code & 0x7f, 0x7f);
            continue;
        }
        for (int c = 1; c <= most; c++) {
            const double here = fabs(magnitude - (double)value_of((uint8_t)c));
            const double best = fabs(magnitude - (double)value_of((uint8_t)nearest));
            if (here < best || (here == best && c % 2 == 0)) nearest = c;
        }
        if (code != (nearest | (bits_of(x) >> 24 & 0x80)))
            fail_msg("%.9g became %02x, nearest is %02x", (double)x, code, nearest);
    }
    assert_int_equal(code_of(INFINITY), most);
    assert_int_equal(code_of(-1e30f), most | 0x80);
    assert_true(isnan(value_of(0x7f)) && isnan(value_of(0xff)));
}

TEST(eight_bits_round_to_nearest)
{
    check_nearest(e4m3_from_f32, f32_from_e4m3, 0x7e);
    check_nearest(e5m2_from_f32, f32_from_e5m2, 0x7b);
    assert_true(f32_from_e5m2(0x7b) == 57344.0f && f32_from_e5m2(1) == 0x1p-16f);
    assert_true(f32_from_e5m2(0xbc) == -1.0f && f32_from_e5m2(0x80) == 0);
}

// The smallest power of two by which a magnitude is within 448, whose codes are exactly numbers of
// bf16.
TEST(e4m3_scales)
{
    assert_int_equal(e4m3_scale(448.0f), 0);
    assert_int_equal(e4m3_scale(nextafterf(448.0f, 500)), 1);
    assert_int_equal(e4m3_scale(224.0f), -1);
    assert_int_equal(e4m3_scale(0.0f), E4M3_SCALE_MIN);
    assert_int_equal(e4m3_scale(1e-40f), E4M3_SCALE_MIN);
    assert_int_equal(e4m3_scale(FLT_MAX), E4M3_SCALE_MAX);
    assert_int_equal(e4m3_scale(INFINITY), E4M3_SCALE_MAX);
    struct rng r;
    rng_init(&r, 13, 0);
    for (int i = 0; i < 100000; i++) {
        const float largest = fabsf(float_of(rng_u32(&r)));
        const int scale = e4m3_scale(largest);
        if (isnan(largest)) continue;
        if (scale < E4M3_SCALE_MAX) assert_true((double)largest <= ldexp(448, scale));
        if (scale > E4M3_SCALE_MIN) assert_true((double)largest > ldexp(448, scale - 1));
    }
    for (int scale = E4M3_SCALE_MIN; scale <= E4M3_SCALE_MAX; scale++)
        for (int c = 0; c < 0x7f; c++) {
            const float x = f32_from_e4m3((uint8_t)c) * power_of_two(scale);
            assert_true((double)x == ldexp((double)f32_from_e4m3((uint8_t)c), scale));
            assert_true(f32_from_bf16(bf16_from_f32(x)) == x);
        }
}

static void check_master(uint32_t u)
{
    float master = float_of(u);
    uint16_t high = master_high(master), low = master_low(master);
    uint32_t back = bits_of(master_join(high, low));
    if (back != u) fail_msg("master %08x came back as %08x", u, back);
    // the shared weight is the master rounded half up in magnitude: within half a step of it
    uint32_t distance = ((uint32_t)high << 16) - u + 0x8000u;
    if (distance > 0x10000u) fail_msg("master %08x is shared as %04x", u, high);
}

// Every bit pattern comes back: all upper halves with lower halves around the tie, then random
// ones.
TEST(master_halves)
{
    static const uint32_t lows[] = {0, 1, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff};
    for (uint32_t high = 0; high <= 0xffff; high++)
        for (size_t i = 0; i < sizeof lows / sizeof *lows; i++) check_master(high << 16 | lows[i]);
    struct rng r;
    rng_init(&r, 5, 0);
    for (int i = 0; i < 5000000; i++) check_master(rng_u32(&r));
}

TEST(master_rounding)
{
    assert_int_equal(master_high(float_of(0x3f800000)), 0x3f80);
    assert_int_equal(master_high(float_of(0x3f807fff)), 0x3f80);
    assert_int_equal(master_high(float_of(0x3f808000)), 0x3f81); // a tie goes up, even or odd
    assert_int_equal(master_high(float_of(0x3f818000)), 0x3f82);
    assert_int_equal(master_high(float_of(0xbf808000)), 0xbf81); // in magnitude
    assert_int_equal(master_high(float_of(0x3fffffff)), 0x4000); // carries into the exponent
}

// The nearest bf16 found by trying the three neighbours, ties to the even one.
static uint16_t nearest_bf16(float x)
{
    uint16_t truncated = (uint16_t)(bits_of(x) >> 16), best = truncated;
    for (uint16_t candidate = truncated; candidate <= truncated + 1; candidate++) {
        double distance = fabs((double)f32_from_bf16(candidate) - (double)x);
        double min = fabs((double)f32_from_bf16(best) - (double)x);
        if (distance < min || (distance == min && candidate % 2 == 0)) best = candidate;
    }
    return best;
}

TEST(bf16)
{
    for (uint32_t h = 0; h <= 0xffff; h++) {
        float x = f32_from_bf16((uint16_t)h);
        if (isnan(x))
            assert_true(isnan(f32_from_bf16(bf16_from_f32(x))));
        else
            assert_int_equal(bf16_from_f32(x), h);
    }
    struct rng r;
    rng_init(&r, 6, 0);
    for (int i = 0; i < 1000000; i++) {
        uint32_t u = rng_u32(&r);
        if (i % 4 == 0) u = (u & 0xffff0000u) | 0x8000u; // ties
        float x = float_of(u);
        if (isnan(x)) {
            assert_true(isnan(f32_from_bf16(bf16_from_f32(x))));
        } else if (fabsf(x) < 0x1.fep127f) { // beyond, infinity is the nearer by rule, not distance
            if (bf16_from_f32(x) != nearest_bf16(x))
                fail_msg("%08x rounds to %04x, not %04x", u, bf16_from_f32(x), nearest_bf16(x));
        }
    }
    assert_int_equal(bf16_from_f32(float_of(0x7f7fffff)), 0x7f80);          // FLT_MAX overflows
    assert_true(isnan(f32_from_bf16(bf16_from_f32(float_of(0x7f800001))))); // NaN in low bits only
}

TEST(f16)
{
    assert_int_equal(bits_of(f32_from_f16(0x0000)), 0x00000000);
    assert_int_equal(bits_of(f32_from_f16(0x8000)), 0x80000000);
    assert_true(f32_from_f16(0x3c00) == 1.0f);
    assert_true(f32_from_f16(0xc000) == -2.0f);
    assert_true(f32_from_f16(0x7bff) == 65504.0f);
    assert_true(f32_from_f16(0x0400) == 0x1p-14f);
    assert_true(f32_from_f16(0x0001) == 0x1p-24f);
    assert_true(f32_from_f16(0x83ff) == -0x1.ff8p-15f);
    assert_true(isinf(f32_from_f16(0x7c00)) && f32_from_f16(0xfc00) < 0);
    assert_true(isnan(f32_from_f16(0x7e00)) && isnan(f32_from_f16(0xfc01)));
    float last = -1;
    for (uint16_t h = 0; h <= 0x7c00; h++) { // rises all the way
        assert_true(f32_from_f16(h) > last);
        last = f32_from_f16(h);
    }
}

// ---- clock --------------------------------------------------------------------------------------

TEST(deadlines)
{
    int64_t start = clock_now_ns(), deadline = clock_deadline_ns(20);
    int left = clock_ms_until(deadline);
    assert_true(left > 0 && left <= 20);
    clock_sleep_ms(20);
    assert_int_equal(clock_ms_until(deadline), 0);
    assert_true(clock_ms_since(start) >= 20.0);
    assert_int_equal(clock_ms_until(clock_now_ns() - 1), 0);
    assert_int_equal(clock_ms_until(INT64_MAX), INT_MAX);
    assert_true(clock_deadline_ns(INT64_MAX) == INT64_MAX);
    assert_true(clock_wall_s() > 1700000000);
}
