/* test_curriculum.c: density and valleys against scipy, buckets, the plan of an epoch, its state in
 * checkpoints, and the cluster report; what it says of steps that are still ahead is what comes,
 * and it says nothing of steps that depend on rewards not recorded. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "tests/support/support.h"
#include "trainer/run/runlog.h"
#include "trainer/curriculum/curriculum.h"

#define LENGTH(array) ((int)(sizeof(array) / sizeof *(array)))

// ---- density ------------------------------------------------------------------------------------

// scipy 1.17: k = scipy.stats.gaussian_kde(x); k.covariance[0, 0] ** 0.5; k(at)
TEST_EACH(density, "curriculum")
{
    double x[16], at[8], wanted[8], got[8];
    const int n = row_numbers(cases, i, "x", x, LENGTH(x));
    const int n_at = row_numbers(cases, i, "at", at, LENGTH(at));
    const double bandwidth = row_number(cases, i, "bandwidth"), h = kde_bandwidth(x, n);
    assert_near(h, bandwidth, bandwidth == 0 ? 0 : 1e-14);
    if (n_at > 0) kde_density(x, n, h, at, n_at, got);
    assert_int_equal(row_numbers(cases, i, "density", wanted, LENGTH(wanted)), n_at);
    for (int k = 0; k < n_at; k++) assert_near(got[k], wanted[k], 1e-13);
}

TEST_EACH(valleys, "curriculum")
{
    double density[16], wanted[4];
    int at[4];
    const int n = row_numbers(cases, i, "density", density, LENGTH(density));
    const int n_wanted = row_numbers(cases, i, "at", wanted, LENGTH(wanted));
    assert_int_equal(kde_valleys(density, n, row_int(cases, i, "max"), at), n_wanted);
    for (int k = 0; k < n_wanted; k++) assert_int_equal(at[k], wanted[k]);
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

// Adds what a part of a row's rewards says: n times a value; n about a middle, dense there and thin
// at middle +- reach: middle + reach k^3, k from -1 to 1; or n whole numbers, every by-th first.
static int add_rewards(const json_t *part, double *ret)
{
    const int n = (int)int_of(part, "n");
    const double from = json_number_value(json_object_get(part, "from"));
    const int by = (int)json_integer_value(json_object_get(part, "by"));
    for (int i = 0; i < n; i++) {
        const double k = (i - (n - 1) / 2.0) / ((n - 1) / 2.0);
        ret[i] = json_object_get(part, "value") ? real_of(part, "value")
                 : by                           ? from + i * by % n
                      : real_of(part, "middle") + real_of(part, "reach") * k * k * k;
    }
    return n;
}

static json_t *buckets_json(const struct buckets *b)
{
    json_t *n = json_array(), *mean = json_array(), *level = json_array(), *std = json_array();
    json_t *at = json_array(), *origin = json_array();
    for (int k = 0; k < b->n; k++) {
        json_array_append_new(n, json_integer(b->bucket[k].n));
        json_array_append_new(mean, json_real(b->bucket[k].mean));
        json_array_append_new(level, json_real(b->bucket[k].level));
        json_array_append_new(std, json_real(b->bucket[k].std));
    }
    for (int k = 0; k < b->n - 1; k++) {
        const bool valley = b->boundary[k].origin == BOUNDARY_VALLEY;
        json_array_append_new(at, json_real(b->boundary[k].at));
        json_array_append_new(origin, json_string(valley ? "valley" : "fallback"));
    }
    return test_keep(json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:f, s:f, s:f, s:f}", "counts", n,
                               "means", mean, "levels", level, "stds", std, "at", at, "origins",
                               origin, "mean", b->mean, "std", b->std, "min", b->min, "max",
                               b->max));
}

// Valleys as scipy has them on the same grid: u = (x - min) / (max - min); g = linspace(0, 1, 512);
// d = gaussian_kde(u)(g); find_peaks(-d); back in units of x.
TEST_EACH(buckets, "curriculum")
{
    double x[512];
    int n = 0;
    size_t k;
    struct buckets b;
    const json_t *part;
    json_array_foreach (json_at(cases, "%zu.rewards", i), k, part) n += add_rewards(part, x + n);
    cut(x, n, row_int(cases, i, "buckets"), row_int(cases, i, "min"), &b);
    assert_has(buckets_json(&b), json_at(cases, "%zu.wanted", i));
}

TEST(buckets_of_nothing)
{
    struct buckets b;
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

LATER(curriculum_free)

static struct curriculum *curriculum_of(const struct curriculum_options *options, int n_examples)
{
    struct curriculum *c;
    assert_ok(curriculum_new(options, n_examples, &c));
    return test_later(c, curriculum_free_later);
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
        int n = sizes[s], examples[64], of[128];
        int64_t step = 0, left = 0;
        struct curriculum *c = curriculum_of(&o, n);
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
    }
}

// The first reward is the average, the next moves it by 1 - ema.
TEST(averages)
{
    struct curriculum_options o = options_of(CURRICULUM_KDE);
    const struct buckets *b;
    double rewards[2] = {1, 1};
    struct curriculum *c = curriculum_of(&o, 2);
    assert_ok(curriculum_record(c, rewards, &b));
    assert_true(b && b->mean == 1);
    rewards[0] = rewards[1] = 0;
    assert_ok(curriculum_record(c, rewards, &b));
    assert_near(b->mean, 0.7, 1e-15);
    rewards[0] = rewards[1] = 2;
    assert_ok(curriculum_record(c, rewards, &b));
    assert_near(b->mean, 0.7 * 0.7 + 0.3 * 2, 1e-15);
}

// The control: the same batches with the same rewards, the same sum of rollouts but for rounding,
// and everybody as many as the others but for rounding.
TEST(uniform_is_the_control)
{
    struct curriculum_options o = options_of(CURRICULUM_KDE);
    struct curriculum *kde, *uniform;
    kde = curriculum_of(&o, 101);
    o.mode = CURRICULUM_UNIFORM;
    uniform = curriculum_of(&o, 101);
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
}

TEST(off_is_the_plain_order)
{
    struct curriculum_options o = options_of(CURRICULUM_OFF);
    int seen[20] = {0}, examples[64];
    struct curriculum *c = curriculum_of(&o, 20);
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
    json_t *json = test_keep(curriculum_to_json(c));
    assert_true(json_is_null(json));
    struct curriculum *again = curriculum_of(&o, 20);
    assert_ok(curriculum_from_json(again, json, 40));
    assert_int_equal(curriculum_taken(again), 40);
}

// By epochs: the estimate counts full batches for epochs to come, and moves only between epochs.
TEST(steps_left)
{
    struct curriculum_options o = options_of(CURRICULUM_KDE);
    int examples[64];
    struct curriculum *c = curriculum_of(&o, 100);
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
}

// ---- checkpoints --------------------------------------------------------------------------------

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
            a = curriculum_of(&o, N);
            for (int step = 0; step < stop; step++) take(a, step, &batch, x);
            char *text = test_keep(json_dumps(test_keep(curriculum_to_json(a)), 0));
            b = curriculum_of(&o, N);
            assert_ok(curriculum_from_json(b, json_of(text), curriculum_taken(a)));
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
            assert_true(
                json_equal(test_keep(curriculum_to_json(a)), test_keep(curriculum_to_json(b))));
        }
}

TEST(state_of_another_run)
{
    const struct curriculum_options o = options_of(CURRICULUM_KDE),
                                    uniform = options_of(CURRICULUM_UNIFORM);
    struct curriculum_options nine = o;
    struct curriculum *c = curriculum_of(&o, 101);
    struct curriculum_batch batch;
    int examples[64];
    for (int step = 0; step < 20; step++) take(c, step, &batch, examples);
    const json_t *json = test_keep(curriculum_to_json(c));
    const int64_t taken = curriculum_taken(c);
    nine.prompts_per_step = 9;
    const struct {
        const struct curriculum_options *options;
        int n;
        const json_t *state;
        int64_t taken;
        enum status st;
        const char *words;
    } others[] = {{&uniform, 101, json, taken, ST_MISMATCH, "--curriculum kde"},
                  {&uniform, 101, json_null(), taken, ST_MISMATCH, "--curriculum off"},
                  {&nine, 101, json, taken, ST_MISMATCH, "--prompts-per-step 8"},
                  {&o, 100, json, taken, ST_MISMATCH, "number of examples"},
                  {&o, 101, json, taken + 1, ST_FORMAT, "data_index"}};
    for (int i = 0; i < LENGTH(others); i++)
        assert_fails(curriculum_from_json(curriculum_of(others[i].options, others[i].n),
                                          others[i].state, others[i].taken),
                     others[i].st, others[i].words);
    const json_t *cases = test_rows("curriculum", "state_of_another_run");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        json_t *bad = test_keep(json_copy((json_t *)json));
        json_object_set_new(bad, row_text(cases, i, "key"),
                            json_loads(row_text(cases, i, "value"), JSON_DECODE_ANY, NULL));
        assert_true(curriculum_from_json(curriculum_of(&o, 101), bad, taken) != ST_OK);
        assert_message(row_text(cases, i, "part"));
    }
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

TEST_EACH(report, "curriculum")
{
    const struct buckets b = example_buckets();
    const struct cluster_report r = {"kde", 2, &b, {9, 7, 5}};
    const char *const *lines = row_words(cases, i, "lines");
    struct bytes text = BYTES_INIT;
    json_t *metrics = test_keep(json_object());
    cluster_report_text(&r, &text);
    char *remaining = test_keep(text.data);
    for (; *lines; lines++) assert_string_equal(strsep(&remaining, "\n"), *lines);
    assert_string_equal(remaining, "");
    text = (struct bytes)BYTES_INIT;
    cluster_report_line(&r, &text);
    assert_string_equal(test_keep(text.data), row_text(cases, i, "line"));
    cluster_report_metrics(&r, metrics);
    assert_has(metrics, json_at(cases, "%zu.metrics", i));
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
    struct seen ahead[STEPS + WINDOW], now;
    bool known[STEPS + WINDOW] = {0};
    o.prompts_per_step = PER;
    o.min_bucket_size = 1;
    struct curriculum *c = curriculum_of(&o, 10);
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
}

TEST(steps_ahead_are_what_comes)
{
    check_ahead(CURRICULUM_OFF, STEPS);
    check_ahead(CURRICULUM_KDE, 3);
    check_ahead(CURRICULUM_UNIFORM, 3);
}
