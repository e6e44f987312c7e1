/* test_schedule.c: learning rates against transformers' schedulers, and weight decay of matrices
 * alone against its Trainer's choice (tests/golden/schedules). */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/names.h"
#include "common/model/config.h"
#include "common/model/weights.h"
#include "tests/support/loaded.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "trainer/learn/optimizer.h"
#include "trainer/learn/schedule.h"

enum { TOTAL = 23 };
#define PEAK 3e-5

// Calls check() with each line of a table, whose first word is given apart.
static int for_each_line(const char *table, void (*check)(const char *word, char *remaining))
{
    char *text = test_read(test_path(test_root(), table)), *next = text;
    int n = 0;
    for (char *line; (line = strsep(&next, "\n"));) {
        if (!*line || *line == '#') continue;
        const char *word = strsep(&line, " ");
        check(word, line);
        n++;
    }
    return n;
}

static void check_rates(const char *type, char *remaining)
{
    struct schedule s = {.peak = PEAK, .total_steps = TOTAL};
    int value;
    assert_ok(name_parse(schedule_type_names, type, &value));
    s.type = (enum schedule_type)value;
    s.warmup_steps = strtod(strsep(&remaining, " "), NULL);
    s.min_ratio = strtod(strsep(&remaining, " "), NULL);
    s.decay_steps = strtod(strsep(&remaining, " "), NULL);
    assert_ok(name_parse(decay_type_names, strsep(&remaining, " "), &value));
    s.decay = (enum decay_type)value;
    for (int step = 0; step < TOTAL; step++) {
        const double want = strtod(strsep(&remaining, " "), NULL), have = schedule_at(&s, step);
        if (!(fabs(have - want) <= 1e-12 * PEAK))
            fail_msg("%s, warm-up %g, step %d: %.17g, not %.17g", type, s.warmup_steps, step, have,
                     want);
    }
    assert_null(remaining);
}

TEST(transformers_agrees)
{
    assert_int_equal(for_each_line("tests/golden/schedules/schedules.txt", check_rates), 69);
}

// What transformers ignores: a warm-up before `constant`.
TEST(constant_warms_up)
{
    const struct schedule s = {
        .type = SCHEDULE_CONSTANT, .peak = 2, .warmup_steps = 4, .total_steps = 12};
    assert_true(schedule_at(&s, 2) == 1);
    assert_true(schedule_at(&s, 11) == 2);
}

TEST(refusals_name_the_option)
{
    static const struct {
        struct schedule schedule;
        const char *part;
    } refused[] = {
        {{.type = SCHEDULE_COSINE_WITH_MIN_LR}, "needs --min-lr-ratio"},
        {{.type = SCHEDULE_COSINE, .min_ratio = 0.1}, "--min-lr-ratio with"},
        {{.type = SCHEDULE_WARMUP_STABLE_DECAY}, "needs --num-decay-steps"},
        {{.type = SCHEDULE_LINEAR, .decay_steps = 3}, "--num-decay-steps with"},
        {{.type = SCHEDULE_LINEAR, .decay = DECAY_LINEAR}, "--decay-type with"},
        {{.type = SCHEDULE_WARMUP_STABLE_DECAY,
          .warmup_steps = 0.5,
          .decay_steps = 6,
          .total_steps = 10},
         "more than the run's 10 steps"},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        assert_fails(schedule_check(&refused[i].schedule), ST_INVALID, refused[i].part);
    }
}

// ---- weight decay -------------------------------------------------------------------------------

static bool names_tensor(const char *names, const char *name)
{
    const size_t n = strlen(name);
    for (const char *s = names; (s = strstr(s, name)); s += n)
        if ((s == names || s[-1] == ' ') && (s[n] == ' ' || s[n] == '\0')) return true;
    return false;
}

// Tensors of one dimension are those that the Trainer leaves out.
static void check_decayed(const char *model, char *names)
{
    char path[PATH_MAX];
    struct weights *w;
    snprintf(path, sizeof path, "tests/golden/%s", model);
    struct model_config *config = config_of(test_path(test_root(), path));
    assert_ok(weights_plan(config, DT_F32, &w));
    for (int i = 0; i < w->n_tensors; i++)
        if ((w->tensors[i].n_dims > 1) == names_tensor(names, w->tensors[i].name))
            fail_msg("%s: %s", model, w->tensors[i].name);
    weights_free(w);
}

TEST(decays_what_trl_decays)
{
    assert_true(for_each_line("tests/golden/schedules/not_decayed.txt", check_decayed) >= 16);
}

// Weights of ones after two steps; the caller frees them.
static float *decayed(struct device *dev, const struct model_config *config,
                      const struct optimizer_config *adamw, struct weights **ret)
{
    struct weights *w;
    struct optimizer *o;
    double norm;
    assert_ok(weights_plan(config, DT_F32, &w));
    float *memory = malloc(w->bytes);
    for (int64_t i = 0; i < w->n_elements; i++) memory[i] = 1;
    weights_bind(w, memory);
    assert_ok(optimizer_new_whole(dev, w, adamw, &o));
    for (int step = 0; step < 2; step++) {
        float *g = optimizer_grads(o, 0)->base;
        for (int64_t i = 0; i < w->n_elements; i++)
            g[i] = (float)((i * 2654435761u) % 1009) / 1009 - 0.4f;
        assert_ok(optimizer_prepare(o, &norm));
        assert_ok(optimizer_apply(o, 1e-2));
    }
    optimizer_free(o);
    *ret = w;
    return memory;
}

// To the bit, each tensor is as if all, or none, were decayed.
TEST(matrices_alone)
{
    const char *folder = tiny_folder(32, 2, 64, 1);
    struct model_config *config = config_of(folder);
    struct device *dev = test_cpu();
    for (int kind = MOMENTS_F32; kind <= MOMENTS_8BIT; kind++) {
        struct optimizer_config adamw = {.beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8};
        struct weights *w[3];
        float *after[3]; // none, all, matrices
        adamw.moments = (enum moments_kind)kind;
        for (int i = 0; i < 3; i++) {
            adamw.weight_decay = i == 0 ? 0 : 0.1;
            adamw.decay_matrices = i == 2;
            after[i] = decayed(dev, config, &adamw, &w[i]);
        }
        for (int i = 0; i < w[0]->n_tensors; i++) {
            const struct weight_tensor *t = &w[0]->tensors[i];
            const size_t bytes = (size_t)t->n * sizeof(float);
            const bool decays = t->n_dims > 1;
            assert_memory_equal(after[2] + t->offset, after[decays] + t->offset, bytes);
            assert_memory_not_equal(after[2] + t->offset, after[!decays] + t->offset, bytes);
        }
        for (int i = 0; i < 3; i++) {
            weights_free(w[i]);
            free(after[i]);
        }
    }
}
