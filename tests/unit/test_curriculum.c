/* test_curriculum.c: density and valleys against scipy, buckets, the plan of an epoch, its state in
 * checkpoints, and the cluster report; what it says of steps that are still ahead is what comes,
 * and it says nothing of steps that depend on rewards not recorded. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "tests/support/support.h"
#include "trainer/run/runlog.h"
#include "trainer/curriculum/curriculum.h"

#define LENGTH(array) ((int)(sizeof(array) / sizeof *(array)))

static void assert_near(double got, double wanted, double tolerance)
{
    if (!(fabs(got - wanted) <= tolerance)) fail_msg("%.17g is not %.17g", got, wanted);
}

// n values about `middle`, dense there and thin at middle +- reach: middle + reach k^3, k from -1
// to
// 1. Added to x[*at...].
static void add_mode(double *x, int *at, int n, double middle, double reach)
{
    for (int i = 0; i < n; i++) {
        double k = (i - (n - 1) / 2.0) / ((n - 1) / 2.0);
        x[(*at)++] = middle + reach * k * k * k;
    }
}

// ---- density ------------------------------------------------------------------------------------

// scipy 1.17: k = scipy.stats.gaussian_kde(x); k.covariance[0, 0] ** 0.5; k(at)
TEST(density)
{
    static const double x[] = {0.0, 0.1, 0.15, 0.4, 0.45, 0.5, 0.9, 1.0};
    static const double at[] = {0, 0.25, 0.5, 0.75, 1, -0.5};
    static const double wanted[] = {0.6810667302131523, 0.9280809013347877, 0.8246083130688556,
                                    0.5951561210283255, 0.4470203001795501, 0.03823004624104214};
    double got[LENGTH(at)], h = kde_bandwidth(x, LENGTH(x));
    assert_near(h, 0.2396680863856743, 1e-14);
    kde_density(x, LENGTH(x), h, at, LENGTH(at), got);
    for (int i = 0; i < LENGTH(at); i++) assert_near(got[i], wanted[i], 1e-13);

    double squares[8];
    static const double wanted_squares[] = {0.8717324983041409, 0.956114231182807,
                                            0.7047756059813287, 0.5188460850574088,
                                            0.3513494827316549};
    static const double quarters[] = {0, 0.25, 0.5, 0.75, 1};
    for (int i = 0; i < 8; i++) squares[i] = i * i / 49.0;
    h = kde_bandwidth(squares, 8);
    assert_near(h, 0.24010404828782, 1e-14);
    kde_density(squares, 8, h, quarters, 5, got);
    for (int i = 0; i < 5; i++) assert_near(got[i], wanted_squares[i], 1e-13);

    assert_true(kde_bandwidth(x, 1) == 0);
    assert_true(kde_bandwidth((const double[]){2, 2, 2}, 3) == 0);
}

TEST(valleys)
{
    int at[4];
    static const double one[] = {1, 3, 2, 4, 1};
    assert_int_equal(kde_valleys(one, 5, 4, at), 1);
    assert_int_equal(at[0], 2);
    // a flat bottom counts once, in its middle; ends and steps are none
    static const double flat[] = {0, 2, 1, 1, 1, 3, 3, 5, 0, 0};
    assert_int_equal(kde_valleys(flat, 10, 4, at), 1);
    assert_int_equal(at[0], 3);
    // prominences 1 (at 2), 4 (at 4), 2 (at 6)
    static const double three[] = {0, 5, 4, 6, 1, 5, 3, 6, 0};
    assert_int_equal(kde_valleys(three, 9, 4, at), 3);
    assert_int_equal(at[0], 2);
    assert_int_equal(at[1], 4);
    assert_int_equal(at[2], 6);
    assert_int_equal(kde_valleys(three, 9, 2, at), 2);
    assert_int_equal(at[0], 4);
    assert_int_equal(at[1], 6);
    assert_int_equal(kde_valleys(three, 9, 1, at), 1);
    assert_int_equal(at[0], 4);
    assert_int_equal(kde_valleys(three, 9, 0, at), 0);
    static const double ripple[] = {0, 1, 1 - 1e-9, 1, 0};
    assert_int_equal(kde_valleys(ripple, 5, 4, at), 0);
    assert_int_equal(kde_valleys(three, 2, 4, at), 0);
}

// ---- buckets ------------------------------------------------------------------------------------

// Buckets hold every reward, in their ranges, and are not below the least size unless alone.
static void check_buckets(const double *x, int n, int min_size, const struct buckets *b,
                          const int8_t *of)
{
    int counts[BUCKETS_MAX] = {0};
    assert_int_equal(b->n_total, n);
    for (int i = 0; i < n; i++) {
        const struct bucket *bucket = &b->bucket[of[i]];
        assert_in_range(of[i], 0, b->n - 1);
        assert_true(x[i] >= bucket->low - 1e-12 && x[i] <= bucket->high + 1e-12);
        counts[of[i]]++;
    }
    for (int k = 0; k < b->n; k++) {
        assert_int_equal(counts[k], b->bucket[k].n);
        assert_true(b->n == 1 || counts[k] >= min_size);
        assert_true(b->bucket[k].level >= 0 && b->bucket[k].level <= 1);
        if (k > 0) assert_true(b->bucket[k].mean > b->bucket[k - 1].mean);
    }
}

static void cut(const double *x, int n, int n_buckets, int min_size, struct buckets *ret)
{
    int8_t of[512];
    assert_true(n <= LENGTH(of));
    memset(of, 99, sizeof of);
    assert_ok(buckets_cut(x, n, n_buckets, min_size, ret, of));
    check_buckets(x, n, min_size, ret, of);
}

// Valleys as scipy has them on the same grid: u = (x - min) / (max - min); g = linspace(0, 1, 512);
// d = gaussian_kde(u)(g); find_peaks(-d); back in units of x.
TEST(buckets_at_valleys)
{
    double x[256];
    struct buckets b;
    int n = 0;
    add_mode(x, &n, 60, 0.2, 0.15);
    add_mode(x, &n, 40, 0.8, 0.15);
    cut(x, n, 2, 10, &b);
    assert_int_equal(b.n, 2);
    assert_near(b.boundary[0].at, 0.05 + 0.5166340508806262 * 0.9, 1e-12);
    assert_int_equal(b.boundary[0].origin, BOUNDARY_VALLEY);
    assert_int_equal(b.bucket[0].n, 60);
    assert_near(b.bucket[0].mean, 0.2, 1e-12);
    assert_near(b.bucket[1].level, (0.8 - 0.05) / 0.9, 1e-12);
    assert_near(b.mean, 0.44, 1e-12);
    assert_near(b.min, 0.05, 1e-12);
    assert_near(b.max, 0.95, 1e-12);

    n = 0;
    add_mode(x, &n, 50, -0.1, 0.1);
    add_mode(x, &n, 60, 0.3, 0.1);
    add_mode(x, &n, 40, 0.75, 0.1);
    cut(x, n, 3, 10, &b);
    assert_int_equal(b.n, 3);
    assert_near(b.boundary[0].at, -0.2 + 0.273972602739726 * 1.05, 1e-12);
    assert_near(b.boundary[1].at, -0.2 + 0.7103718199608611 * 1.05, 1e-12);
    assert_int_equal(b.bucket[0].n, 50);
    assert_int_equal(b.bucket[1].n, 60);
    assert_int_equal(b.bucket[2].n, 40);
    // with room for one boundary the more prominent valley stays, prominence 0.322 before 0.304
    cut(x, n, 2, 10, &b);
    assert_int_equal(b.n, 2);
    assert_near(b.boundary[0].at, -0.2 + 0.7103718199608611 * 1.05, 1e-12);
    cut(x, n, 1, 10, &b);
    assert_int_equal(b.n, 1);
    assert_near(b.bucket[0].level, (b.mean - b.min) / (b.max - b.min), 1e-12);
}

TEST(buckets_by_fallback)
{
    double x[256];
    struct buckets b;
    int n = 0;
    for (int i = 0; i < 90; i++) x[i] = (i * 7) % 90; // flat: no valley, so quantiles
    cut(x, 90, 3, 1, &b);
    assert_int_equal(b.n, 3);
    for (int k = 0; k < 3; k++) assert_int_equal(b.bucket[k].n, 30);
    assert_true(b.boundary[0].at == 30 && b.boundary[1].at == 60);
    assert_int_equal(b.boundary[0].origin, BOUNDARY_FALLBACK);
    assert_int_equal(b.boundary[1].origin, BOUNDARY_FALLBACK);

    // one valley for three buckets: the larger side is halved
    add_mode(x, &n, 60, 0.2, 0.15);
    add_mode(x, &n, 40, 0.8, 0.15);
    cut(x, n, 3, 10, &b);
    assert_int_equal(b.n, 3);
    assert_int_equal(b.boundary[0].origin, BOUNDARY_FALLBACK);
    assert_int_equal(b.boundary[1].origin, BOUNDARY_VALLEY);
    assert_int_equal(b.bucket[0].n, 30);
    assert_int_equal(b.bucket[1].n, 30);
    assert_int_equal(b.bucket[2].n, 40);

    // equal rewards stay together: 2 values give 2 buckets at most
    for (int i = 0; i < 50; i++) x[i] = i < 45;
    cut(x, 50, 4, 1, &b);
    assert_int_equal(b.n, 2);
    assert_int_equal(b.bucket[0].n, 5);
    assert_true(b.bucket[0].level == 0 && b.bucket[1].level == 1);
}

TEST(small_buckets_are_merged)
{
    double x[128];
    struct buckets b;
    int n = 0;
    for (; n < 50; n++) x[n] = 0;
    for (; n < 58; n++) x[n] = 0.4; // nearer to the lower
    for (; n < 108; n++) x[n] = 1;
    cut(x, n, 3, 1, &b);
    assert_int_equal(b.n, 3);
    assert_int_equal(b.bucket[1].n, 8);
    assert_int_equal(b.boundary[0].origin, BOUNDARY_FALLBACK);
    assert_int_equal(b.boundary[1].origin, BOUNDARY_VALLEY);
    double upper = b.boundary[1].at;
    cut(x, n, 3, 8, &b);
    assert_int_equal(b.n, 3);
    cut(x, n, 3, 9, &b);
    assert_int_equal(b.n, 2);
    assert_int_equal(b.bucket[0].n, 58);
    assert_int_equal(b.bucket[1].n, 50);
    assert_true(b.boundary[0].at == upper);
    // a valley whose bucket is merged makes room for a boundary elsewhere
    for (n = 0; n < 3; n++) x[n] = -200;
    for (; n < 83; n++) x[n] = n;
    cut(x, n, 2, 1, &b);
    assert_int_equal(b.boundary[0].origin, BOUNDARY_VALLEY);
    assert_int_equal(b.bucket[0].n, 3);
    cut(x, n, 2, 4, &b);
    assert_int_equal(b.n, 2);
    assert_int_equal(b.boundary[0].origin, BOUNDARY_FALLBACK);
    assert_in_range(b.bucket[0].n, 41, 42);

    n = 0;
    for (; n < 50; n++) x[n] = 0;
    for (; n < 58; n++) x[n] = 0.4;
    for (; n < 108; n++) x[n] = 1;
    cut(x, n, 3, 55, &b);
    assert_int_equal(b.n, 1); // 50 are too few also for what is left
    assert_int_equal(b.bucket[0].n, n);
    cut(x, n, 3, 1000, &b);
    assert_int_equal(b.n, 1);
}

TEST(buckets_of_little)
{
    struct buckets b;
    double same[20], one = -3;
    for (int i = 0; i < 20; i++) same[i] = 0.1;
    cut(same, 20, 3, 1, &b);
    assert_int_equal(b.n, 1);
    assert_true(b.bucket[0].level == 0.5 && b.bucket[0].std == 0);
    cut(&one, 1, 3, 1, &b);
    assert_int_equal(b.n, 1);
    assert_true(b.bucket[0].level == 0.5 && b.mean == -3 && b.std == 0);
    cut((const double[]){1, 2}, 2, 3, 1, &b);
    assert_int_equal(b.n, 2);
    assert_ok(buckets_cut(NULL, 0, 3, 1, &b, NULL));
    assert_int_equal(b.n, 0);
}

// Many shapes of data keep what check_buckets() asks for.
TEST(buckets_of_anything)
{
    struct rng rng;
    rng_init(&rng, 5, 0);
    for (int round = 0; round < 300; round++) {
        double x[200];
        struct buckets b;
        int n = 1 + (int)rng_below(&rng, 200), values = 1 + (int)rng_below(&rng, 12);
        for (int i = 0; i < n; i++)
            x[i] = round % 2 ? (double)rng_below(&rng, (uint32_t)values) / values
                             : 100 * rng_normal(&rng) * (i % 3);
        cut(x, n, 1 + (int)rng_below(&rng, BUCKETS_MAX), (int)rng_below(&rng, 30), &b);
    }
}

// ---- plan ---------------------------------------------------------------------------------------

static struct curriculum_options options_of(enum curriculum_mode mode)
{
    return (struct curriculum_options){
        .mode = mode,
        .seed = 3,
        .prompts_per_step = 8,
        .num_generations = 6,
        .n_buckets = 3,
        .min_bucket_size = 8,
        .base = 4,
        .alpha = 1.5,
        .ema = 0.7,
    };
}

TEST(rollouts_of_a_level)
{
    struct curriculum_options o = options_of(CURRICULUM_KDE);
    assert_int_equal(curriculum_rollouts(&o, 1), 4);
    assert_int_equal(curriculum_rollouts(&o, 0.5), 7);
    assert_int_equal(curriculum_rollouts(&o, 0), 10);
    assert_int_equal(curriculum_rollouts(&o, 0.92), 4); // 4.48
    assert_int_equal(curriculum_rollouts(&o, 0.91), 5); // 4.54
    assert_int_equal(curriculum_max_rollouts(&o), 10);
    o.mode = CURRICULUM_OFF;
    assert_int_equal(curriculum_max_rollouts(&o), 6);
}

// Each example's reward has one of three modes, and moves a little from epoch to epoch.
static double reward_of(int example, int64_t step)
{
    return example % 3 + 0.2 * sin(example * 1.7 + (double)step);
}

// Takes a step: its batch into ret, and a copy of its examples, which recording may move, into
// ret_examples. What curriculum_record() gives.
static const struct buckets *take(struct curriculum *c, int64_t step, struct curriculum_batch *ret,
                                  int *ret_examples)
{
    double rewards[64];
    const struct buckets *buckets;
    assert_true(curriculum_next(c, 0, ret));
    assert_in_range(ret->n, 1, LENGTH(rewards));
    memcpy(ret_examples, ret->examples, (size_t)ret->n * sizeof *ret_examples);
    for (int i = 0; i < ret->n; i++) rewards[i] = reward_of(ret_examples[i], step);
    assert_ok(curriculum_record(c, rewards, &buckets));
    return buckets;
}

// Every example once an epoch, no batch of two buckets, counts from base to base (1 + alpha), more
// for lower rewards.
TEST(epochs_of_buckets)
{
    static const int sizes[] = {1, 2, 7, 8, 9, 100, 101};
    for (int s = 0; s < LENGTH(sizes); s++) {
        struct curriculum_options o = options_of(CURRICULUM_KDE);
        struct curriculum *c;
        int n = sizes[s], examples[64], of[128];
        int64_t step = 0, left = 0;
        assert_ok(curriculum_new(&o, n, &c));
        struct buckets last = {0};
        for (int epoch = 0; epoch < 4; epoch++) {
            const struct buckets *buckets = NULL;
            int seen[128] = {0}, taken = 0;
            memset(of, 0xff, sizeof of);
            left = curriculum_steps_left(c, (int64_t)(epoch + 1) * n);
            while (!buckets) {
                struct curriculum_batch batch;
                buckets = take(c, step++, &batch, examples);
                left--;
                assert_in_range(batch.n, 1, 8);
                assert_in_range(batch.rollouts, 4, 10);
                for (int i = 0; i < batch.n; i++) {
                    seen[examples[i]]++;
                    of[examples[i]] = batch.bucket;
                }
                taken += batch.n;
                if (epoch == 0) {
                    assert_int_equal(batch.bucket, -1);
                    assert_int_equal(batch.rollouts, 7);
                } else {
                    assert_in_range(batch.bucket, 0, last.n - 1);
                    assert_int_equal(batch.rollouts,
                                     curriculum_rollouts(&o, last.bucket[batch.bucket].level));
                }
            }
            assert_int_equal(left, 0);
            assert_int_equal(taken, n);
            for (int i = 0; i < n; i++) assert_int_equal(seen[i], 1);
            // a batch was of one bucket, and all of them came
            int counts[BUCKETS_MAX] = {0};
            for (int i = 0; epoch > 0 && i < n; i++) counts[of[i]]++;
            for (int k = 0; k < last.n; k++) assert_int_equal(counts[k], last.bucket[k].n);
            last = *buckets;
            assert_int_equal(curriculum_taken(c), (epoch + 1) * n);
        }
        if (n >= 100) { // the three modes are found: hard ones are sampled more
            assert_int_equal(last.n, 3);
            for (int i = 0; i < n; i++) assert_int_equal(of[i], i % 3);
            assert_in_range(curriculum_rollouts(&o, last.bucket[0].level), 9, 10);
            assert_int_equal(curriculum_rollouts(&o, last.bucket[1].level), 7);
            assert_in_range(curriculum_rollouts(&o, last.bucket[2].level), 4, 5);
        }
        curriculum_free(c);
    }
}

// The first reward is the average, the next moves it by 1 - ema.
TEST(averages)
{
    struct curriculum_options o = options_of(CURRICULUM_KDE);
    struct curriculum *c;
    const struct buckets *b;
    double rewards[2] = {1, 1};
    assert_ok(curriculum_new(&o, 2, &c));
    assert_ok(curriculum_record(c, rewards, &b));
    assert_true(b && b->mean == 1);
    rewards[0] = rewards[1] = 0;
    assert_ok(curriculum_record(c, rewards, &b));
    assert_near(b->mean, 0.7, 1e-15);
    rewards[0] = rewards[1] = 2;
    assert_ok(curriculum_record(c, rewards, &b));
    assert_near(b->mean, 0.7 * 0.7 + 0.3 * 2, 1e-15);
    curriculum_free(c);
}

// The control: the same batches with the same rewards, the same sum of rollouts but for rounding,
// and everybody as many as the others but for rounding.
TEST(uniform_is_the_control)
{
    struct curriculum_options o = options_of(CURRICULUM_KDE);
    struct curriculum *kde, *uniform;
    assert_ok(curriculum_new(&o, 101, &kde));
    o.mode = CURRICULUM_UNIFORM;
    assert_ok(curriculum_new(&o, 101, &uniform));
    int64_t step = 0;
    for (int epoch = 0; epoch < 5; epoch++) {
        const struct buckets *buckets = NULL;
        int low = 99, high = 0;
        bool varies = false;
        int first = 0;
        while (!buckets) {
            int a[64], b[64];
            struct curriculum_batch x, y;
            buckets = take(kde, step, &x, a);
            assert_true((take(uniform, step++, &y, b) != NULL) == (buckets != NULL));
            assert_int_equal(x.n, y.n);
            assert_int_equal(x.bucket, y.bucket);
            assert_memory_equal(a, b, (size_t)x.n * sizeof *a);
            if (!first) first = x.rollouts;
            varies |= x.rollouts != first;
            low = y.rollouts < low ? y.rollouts : low;
            high = y.rollouts > high ? y.rollouts : high;
        }
        assert_int_equal(varies, epoch > 0);
        assert_true(high - low <= 1);
        // at most half a batch an epoch is lost to rounding
        assert_true(llabs(curriculum_samples(kde) - curriculum_samples(uniform)) <=
                    4 * (epoch + 1));
    }
    assert_true(curriculum_bucket_rollouts(uniform, 0) == curriculum_bucket_rollouts(uniform, 2));
    assert_true(curriculum_bucket_rollouts(kde, 0) > curriculum_bucket_rollouts(kde, 2));
    curriculum_free(kde);
    curriculum_free(uniform);
}

TEST(off_is_the_plain_order)
{
    struct curriculum_options o = options_of(CURRICULUM_OFF);
    struct curriculum *c;
    int seen[20] = {0}, examples[64];
    assert_ok(curriculum_new(&o, 20, &c));
    assert_int_equal(curriculum_steps_left(c, 60), 8);
    for (int step = 0; step < 5; step++) { // two epochs, without a gap between them
        struct curriculum_batch batch;
        assert_null(take(c, step, &batch, examples));
        assert_int_equal(batch.n, 8);
        assert_int_equal(batch.rollouts, 6);
        for (int i = 0; i < 8; i++) seen[examples[i]]++;
    }
    for (int i = 0; i < 20; i++) assert_int_equal(seen[i], 2);
    assert_int_equal(curriculum_taken(c), 40);
    assert_int_equal(curriculum_steps_left(c, 60), 3);
    assert_int_equal(curriculum_steps_left(c, 30), 0);
    json_t *json = curriculum_to_json(c);
    assert_true(json_is_null(json));
    struct curriculum *again;
    assert_ok(curriculum_new(&o, 20, &again));
    assert_ok(curriculum_from_json(again, json, 40));
    assert_int_equal(curriculum_taken(again), 40);
    json_decref(json);
    curriculum_free(again);
    curriculum_free(c);
}

// By epochs: the estimate counts full batches for epochs to come, and moves only between epochs.
TEST(steps_left)
{
    struct curriculum_options o = options_of(CURRICULUM_KDE);
    struct curriculum *c;
    int examples[64];
    assert_ok(curriculum_new(&o, 100, &c));
    assert_int_equal(curriculum_steps_left(c, 250), 13 + 13 + 7);
    int64_t step = 0;
    while (curriculum_taken(c) < 250) {
        struct curriculum_batch batch;
        int64_t left = curriculum_steps_left(c, 250);
        take(c, step++, &batch, examples);
        if (curriculum_taken(c) % 100 != 0) // within an epoch a resumed run finds the same total
            assert_int_equal(curriculum_steps_left(c, 250), left - 1);
    }
    assert_in_range(step, 33, 33 + 2 * 2);
    assert_int_equal(curriculum_steps_left(c, 250), 0);
    curriculum_free(c);
}

// ---- checkpoints --------------------------------------------------------------------------------

static json_t *through_text(json_t *json)
{
    char *text = json_dumps(json, 0);
    json_t *back = json_loads(text, 0, NULL);
    assert_non_null(back);
    json_decref(json);
    free(text);
    return back;
}

// Taken up after any step, a curriculum goes on as if nothing had been, to the bit.
TEST(state_round_trip)
{
    enum { STEPS = 45, N = 101 };
    for (enum curriculum_mode mode = CURRICULUM_UNIFORM; mode <= CURRICULUM_KDE; mode++)
        for (int stop = 0; stop < STEPS; stop += 4) {
            struct curriculum_options o = options_of(mode);
            struct curriculum *a, *b;
            int x[64], y[64];
            struct curriculum_batch batch;
            assert_ok(curriculum_new(&o, N, &a));
            for (int step = 0; step < stop; step++) take(a, step, &batch, x);
            json_t *json = through_text(curriculum_to_json(a));
            assert_ok(curriculum_new(&o, N, &b));
            assert_ok(curriculum_from_json(b, json, curriculum_taken(a)));
            json_decref(json);
            for (int step = stop; step < STEPS; step++) {
                struct curriculum_batch other;
                const struct buckets *p = take(a, step, &batch, x), *q = take(b, step, &other, y);
                assert_int_equal(batch.n, other.n);
                assert_int_equal(batch.rollouts, other.rollouts);
                assert_int_equal(batch.bucket, other.bucket);
                assert_memory_equal(x, y, (size_t)batch.n * sizeof *x);
                assert_int_equal(p != NULL, q != NULL);
                if (p) assert_memory_equal(&p->mean, &q->mean, 4 * sizeof p->mean);
            }
            json_t *end_a = curriculum_to_json(a), *end_b = curriculum_to_json(b);
            assert_true(json_equal(end_a, end_b));
            json_decref(end_a);
            json_decref(end_b);
            curriculum_free(a);
            curriculum_free(b);
        }
}

TEST(state_of_another_run)
{
    struct curriculum_options o = options_of(CURRICULUM_KDE), other;
    struct curriculum *c, *d;
    struct curriculum_batch batch;
    int examples[64];
    assert_ok(curriculum_new(&o, 101, &c));
    for (int step = 0; step < 20; step++) take(c, step, &batch, examples);
    json_t *json = curriculum_to_json(c);
    int64_t taken = curriculum_taken(c);
    curriculum_free(c);

    other = options_of(CURRICULUM_UNIFORM);
    assert_ok(curriculum_new(&other, 101, &d));
    assert_fails(curriculum_from_json(d, json, taken), ST_MISMATCH, "--curriculum kde");
    assert_fails(curriculum_from_json(d, json_null(), taken), ST_MISMATCH, "--curriculum off");
    curriculum_free(d);

    other = o;
    other.prompts_per_step = 9;
    assert_ok(curriculum_new(&other, 101, &d));
    assert_fails(curriculum_from_json(d, json, taken), ST_MISMATCH, "--prompts-per-step 8");
    curriculum_free(d);

    assert_ok(curriculum_new(&o, 100, &d));
    assert_fails(curriculum_from_json(d, json, taken), ST_MISMATCH, "number of examples");
    curriculum_free(d);

    const json_t *cases = test_rows("curriculum", "state_of_another_run");
    for (int i = 0; i < (int)json_array_size(cases); i++) {
        json_t *bad = json_copy(json);
        json_object_set_new(bad, row_text(cases, i, "key"),
                            json_loads(row_text(cases, i, "value"), JSON_DECODE_ANY, NULL));
        assert_ok(curriculum_new(&o, 101, &d));
        assert_true(curriculum_from_json(d, bad, taken) != ST_OK);
        assert_message(row_text(cases, i, "part"));
        curriculum_free(d);
        json_decref(bad);
    }
    assert_ok(curriculum_new(&o, 101, &d));
    assert_fails(curriculum_from_json(d, json, taken + 1), ST_FORMAT, "data_index");
    curriculum_free(d);
    json_decref(json);
}

// ---- report -------------------------------------------------------------------------------------

static struct buckets example_buckets(void)
{
    return (struct buckets){
        .n = 3,
        .n_total = 200,
        .contrast = 1,
        .mean = 0.51,
        .std = 0.25,
        .max = 1,
        .bucket = {{10, 0, 0.3, 0.2, 0.26, 0.2},
                   {130, 0.3, 0.625, 0.45, 0.1, 0.45},
                   {60, 0.625, 1, 0.8, 0.125, 0.8}},
        .boundary = {{0.3, BOUNDARY_VALLEY, 0}, {0.625, BOUNDARY_FALLBACK, 0}},
    };
}

TEST(report_text)
{
    struct buckets b = example_buckets();
    struct cluster_report r = {"kde", 2, &b, {9, 7, 5}};
    struct bytes text = BYTES_INIT;
    // clang-format off
    static const char wanted[] =
    "╔═════════════════════════════════════════════════════════════════════════════════════════╗\n"
    "║ Cluster report of epoch 2 (--curriculum kde)                                            ║\n"
    "╟─────────────────────────────────────────────────────────────────────────────────────────╢\n"
    "║ rewards of 200 examples: mean 0.51  std 0.25  min 0  max 1                              ║\n"
    "║ boundary 1  at 0.3: valley                                                              ║\n"
    "║ boundary 2  at 0.625: fallback                                                          ║\n"
    "╟─────────────────────────────────────────────────────────────────────────────────────────╢\n"
    "║ bucket  range                count   share rollouts  histogram         spread  balance  ║\n"
    "╟─────────────────────────────────────────────────────────────────────────────────────────╢\n"
    "║      1  [0, 0.3)                10    5.0%        9  █░░░░░░░░░░░      0.26 ✗  x0.15  ✗ ║\n"
    "║      2  [0.3, 0.625)           130   65.0%        7  ████████░░░░       0.1 ✓  x1.95  ✓ ║\n"
    "║      3  [0.625, 1]              60   30.0%        5  ████░░░░░░░░     0.125 ✓  x0.90  ✓ ║\n"
    "╟─────────────────────────────────────────────────────────────────────────────────────────╢\n"
    "║ rollouts: of each prompt in the next epoch                                              ║\n"
    "║ spread: std in the bucket; ✓ up to 1/2 of that of all, ~ up to all of it                ║\n"
    "║ balance: count over an even share; ✓ within 2, ~ within 4 times                         ║\n"
    "╚═════════════════════════════════════════════════════════════════════════════════════════╝\n";
    // clang-format on
    cluster_report_text(&r, &text);
    assert_string_equal(bytes_text(&text), wanted);
    bytes_clear(&text);
    cluster_report_line(&r, &text);
    assert_string_equal(bytes_text(&text),
                        "epoch 2: reward 0.51 +- 0.25 over 200 examples; 3 buckets: 10 of mean 0.2 "
                        "x 9 rollouts | valley 0.3 |, 130 of mean 0.45 x 7 rollouts | fallback "
                        "0.625 |, 60 of mean 0.8 x 5 rollouts");
    bytes_release(&text);
}

static double number(const json_t *metrics, const char *key)
{
    if (!json_is_number(json_object_get(metrics, key))) fail_msg("no number %s", key);
    return json_number_value(json_object_get(metrics, key));
}

TEST(report_numbers)
{
    struct buckets b = example_buckets();
    struct cluster_report r = {"kde", 2, &b, {9, 7, 5}};
    json_t *m = json_object();
    cluster_report_metrics(&r, m);
    assert_true(number(m, "curriculum/epoch") == 2);
    assert_true(number(m, "curriculum/reward_mean") == 0.51);
    assert_true(number(m, "curriculum/buckets") == 3);
    assert_true(number(m, "curriculum/valleys") == 1);
    assert_true(number(m, "curriculum/boundary_2") == 0.625);
    assert_true(number(m, "curriculum/bucket_1/count") == 10);
    assert_true(number(m, "curriculum/bucket_1/share") == 0.05);
    assert_true(number(m, "curriculum/bucket_3/rollouts") == 5);
    assert_near(number(m, "curriculum/bucket_2/balance"), 1.95, 1e-12);
    assert_near(number(m, "curriculum/bucket_2/spread"), 0.4, 1e-12);
    json_decref(m);
}

// ---- steps ahead --------------------------------------------------------------------------------

#define PER    4 // prompts of a step
#define STEPS  9
#define WINDOW 3

struct seen { // a step's batch
    int examples[PER], n, rollouts, bucket;
};

static bool look(struct curriculum *c, int ahead, struct seen *ret)
{
    struct curriculum_batch batch;
    if (!curriculum_next(c, ahead, &batch)) return false;
    *ret = (struct seen){.n = batch.n, .rollouts = batch.rollouts, .bucket = batch.bucket};
    memcpy(ret->examples, batch.examples, (size_t)batch.n * sizeof *batch.examples);
    return true;
}

// What was seen ahead of each step, by how many steps, is what the step then is.
static void check_ahead(enum curriculum_mode mode, int steps_of_an_epoch)
{
    struct curriculum_options o = options_of(mode);
    struct curriculum *c;
    struct seen ahead[STEPS + WINDOW], now;
    bool known[STEPS + WINDOW] = {0};
    o.prompts_per_step = PER;
    o.min_bucket_size = 1;
    assert_ok(curriculum_new(&o, 10, &c));
    for (int step = 0; step < STEPS; step++) {
        for (int k = WINDOW; k > 0; k--) {
            struct seen s = {0};
            const bool in_epoch = step % steps_of_an_epoch + k < steps_of_an_epoch;
            assert_int_equal(look(c, k, &s), mode == CURRICULUM_OFF || in_epoch);
            if (s.n == 0) continue;
            if (known[step + k]) assert_memory_equal(&s, &ahead[step + k], sizeof s);
            ahead[step + k] = s;
            known[step + k] = true;
        }
        assert_true(look(c, 0, &now));
        if (known[step]) assert_memory_equal(&now, &ahead[step], sizeof now);
        const struct buckets *buckets;
        const double rewards[PER] = {0.5, 0.5, 0.5, 0.5}; // one bucket: epochs stay as long
        assert_ok(curriculum_record(c, rewards, &buckets));
    }
    curriculum_free(c);
}

TEST(steps_ahead_are_what_comes)
{
    check_ahead(CURRICULUM_OFF, STEPS);
    check_ahead(CURRICULUM_KDE, 3);
    check_ahead(CURRICULUM_UNIFORM, 3);
}
