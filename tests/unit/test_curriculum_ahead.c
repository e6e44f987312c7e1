/* test_curriculum_ahead.c: what a curriculum says of steps that are still ahead is what comes, and
 * it says nothing of steps that depend on rewards not recorded. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "trainer/curriculum/curriculum.h"

#define N      10
#define PER    4 // prompts of a step
#define STEPS  9
#define WINDOW 3

struct seen { // a step's batch
    int examples[PER], n, rollouts, bucket;
};

static struct curriculum *open_curriculum(enum curriculum_mode mode)
{
    const struct curriculum_options options = {.mode = mode,
                                               .seed = 5,
                                               .prompts_per_step = PER,
                                               .num_generations = 8,
                                               .n_buckets = 3,
                                               .min_bucket_size = 1,
                                               .base = 4,
                                               .alpha = 1.5,
                                               .ema = 0.7};
    struct curriculum *c;
    assert_ok(curriculum_new(&options, N, &c));
    return c;
}

static bool look(struct curriculum *c, int ahead, struct seen *ret)
{
    struct curriculum_batch batch;
    if (!curriculum_next(c, ahead, &batch)) return false;
    *ret = (struct seen){.n = batch.n, .rollouts = batch.rollouts, .bucket = batch.bucket};
    memcpy(ret->examples, batch.examples, (size_t)batch.n * sizeof *batch.examples);
    return true;
}

// What was seen ahead of each step, by how many steps, is what the step then is.
static void check(enum curriculum_mode mode, int steps_of_an_epoch)
{
    struct curriculum *c = open_curriculum(mode);
    struct seen ahead[STEPS + WINDOW], now;
    bool known[STEPS + WINDOW] = {0};
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
    check(CURRICULUM_OFF, STEPS);
    check(CURRICULUM_KDE, 3);
    check(CURRICULUM_UNIFORM, 3);
}
