/* test_param_range.c: what is trained: patterns of --freeze as ranges, and training that runs over
 * them: gradients, AdamW, clipping, memory and state on disk, of several ranges of one arena and of
 * ranges of two. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/random_step.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "common/model/safetensors.h"
#include "trainer/learn/learner.h"
#include "trainer/learn/param_range.h"

enum { VOCAB = 50, GROUPS = 2, SAMPLES = 4, LAYERS = 3 };

static struct weights *plan_of(const char *folder, enum dtype dt, struct model_config **ret_config)
{
    struct weights *w;
    assert_ok(model_config_load(folder, ret_config));
    assert_ok(weights_plan(*ret_config, dt, &w));
    return w;
}

static const char *tiny(int layers, uint64_t seed)
{
    const char *folder = test_folder();
    assert_ok(tiny_model_write(folder, 32, layers, VOCAB, seed));
    return folder;
}

// ---- patterns -----------------------------------------------------------------------------------

TEST(patterns_name_ranges)
{
    const json_t *cases = test_rows("param_range", "patterns_name_ranges");
    struct model_config *config;
    struct weights *w = plan_of(tiny(LAYERS, 1), DT_F32, &config);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        struct param_ranges r;
        int64_t covered = 0;
        bool trained = false, frozen = true;
        assert_ok(param_ranges_of(w, row_text(cases, i, "freeze"), &r));
        print_message("%s: %d ranges\n",
                      row_text(cases, i, "freeze") ? row_text(cases, i, "freeze") : "(none)", r.n);
        assert_int_equal(r.n, row_int(cases, i, "ranges"));
        for (int k = 0; k < r.n; k++) {
            covered += r.list[k].n;
            for (int t = 0; t < w->n_tensors; t++) {
                if (!param_range_holds(&r.list[k], t)) continue;
                if (strcmp(w->tensors[t].name, row_text(cases, i, "trained")) == 0) trained = true;
                if (row_text(cases, i, "frozen") &&
                    strcmp(w->tensors[t].name, row_text(cases, i, "frozen")) == 0)
                    frozen = false;
            }
        }
        assert_true(trained && frozen);
        if (row_text(cases, i, "frozen"))
            assert_true(covered < w->n_elements && param_ranges_parameters(&r) < w->n_parameters);
        else
            assert_true(covered == w->n_elements && param_ranges_parameters(&r) == w->n_parameters);
        param_ranges_release(&r);
    }
    weights_free(w);
    model_config_free(config);
}

TEST(bad_patterns_are_named)
{
    const json_t *cases = test_rows("param_range", "bad_patterns_are_named");
    struct model_config *config;
    struct weights *w = plan_of(tiny(LAYERS, 1), DT_F32, &config);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        struct param_ranges r = {0};
        assert_int_equal(param_ranges_of(w, row_text(cases, i, "freeze"), &r), ST_INVALID);
        print_message("%s\n", status_message());
        assert_non_null(strstr(status_message(), row_text(cases, i, "said")));
        assert_null(r.list);
    }
    weights_free(w);
    model_config_free(config);
}

// ---- training -----------------------------------------------------------------------------------

static void cross_entropy(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    double *loss = context;
    for (int i = 0; i < rows->mb->first[rows->mb->n_seqs]; i++) {
        *loss -= rows->logprobs[i] / 20.0;
        ret_dlogprobs[i] = -1.0f / 20;
    }
}

struct machine {
    struct reference r;
    struct learner *learner;
};

static void machine_open(const char *folder, const char *freeze, double max_grad_norm,
                         struct machine *m)
{
    struct learner_config options = {
        .optimizer = {0.9, 0.999, 1e-8, 0.1, max_grad_norm, MOMENTS_F32, false},
        .freeze = freeze,
        .temperature = 1,
        .token_budget = 40,
        .logits_chunk = 16,
        .max_seqs = SAMPLES + GROUPS,
        .max_context = 12,
    };
    *m = (struct machine){0};
    reference_open(folder, "cpu", &m->r);
    assert_ok(learner_new(m->r.dev, m->r.config, m->r.weights, false, &options, &m->learner));
    assert_ok(learner_prepare(m->learner));
}

static void machine_close(struct machine *m)
{
    learner_free(m->learner);
    reference_close(&m->r);
}

static void one_step(struct machine *m, uint64_t seed, double *ret_norm)
{
    static const int prompts[] = {4, 6}, completions[] = {5, 3, 6, 6};
    const struct step_shape shape = {GROUPS, SAMPLES / GROUPS, prompts, completions, VOCAB, seed};
    struct random_step step;
    double loss = 0;
    random_step_make(&shape, &step);
    assert_ok(learner_run(m->learner, PASS_STEP, step.groups, GROUPS, cross_entropy, &loss, NULL));
    assert_ok(optimizer_prepare(learner_optimizer(m->learner), ret_norm));
    assert_ok(optimizer_apply(learner_optimizer(m->learner), 1e-2));
    assert_ok(device_sync(m->r.dev));
}

static const char *const freezes[] = {
    "model.embed_tokens.weight",
    "*norm.weight",
    "*.bias",
    "*.mlp.*",
    "*.self_attn.*",
    "lm_head.weight",
    "model.embed_tokens.weight,model.layers.[01].*",
    "*,!lm_head.weight",
    "*,!model.layers.1.mlp.down_proj.weight",
};

static bool is_trained(const struct learner *l, int tensor)
{
    const struct param_ranges *trained = learner_info(l)->trained;
    for (int i = 0; i < trained->n; i++)
        if (param_range_holds(&trained->list[i], tensor)) return true;
    return false;
}

// The first step of what is trained is, to the bit, that of training everything (clipping off, so
// that nobody's norm matters); what is frozen keeps its bits over several.
TEST(trained_as_in_full_frozen_as_before)
{
    for (int tied = 0; tied < 2; tied++) {
        const char *folder = test_folder();
        const struct tiny_model shape = {.hidden = 32,
                                         .layers = LAYERS,
                                         .vocab = VOCAB,
                                         .tie_embeddings = tied,
                                         .eos_id = -1,
                                         .seed = 3};
        assert_ok(tiny_model_write_as(folder, &shape));
        for (size_t i = 0; i < sizeof freezes / sizeof *freezes; i++) {
            if (tied && strstr(freezes[i], "lm_head")) continue;
            struct machine full, part;
            struct reference before;
            double norms[2];
            int moved = 0, kept = 0;
            reference_open(folder, "cpu", &before);
            machine_open(folder, NULL, 0, &full);
            machine_open(folder, freezes[i], 0, &part);
            one_step(&full, 7, &norms[0]);
            one_step(&part, 7, &norms[1]);
            assert_true(norms[1] > 0 && norms[1] < norms[0]);
            const struct weights *w = full.r.weights;
            for (int t = 0; t < w->n_tensors; t++) {
                const struct weight_tensor *tensor = &w->tensors[t];
                const size_t at = (size_t)tensor->offset * sizeof(float),
                             bytes = (size_t)tensor->n * sizeof(float);
                const char *old = (const char *)before.weights->base + at;
                const bool trained = is_trained(part.learner, t);
                const char *want = trained ? (const char *)w->base + at : old;
                assert_memory_equal((const char *)part.r.weights->base + at, want, bytes);
                moved += trained && memcmp(want, old, bytes) != 0;
                kept += !trained;
            }
            print_message("%s: %d tensors moved, %d frozen\n", freezes[i], moved, kept);
            assert_true(moved > 0 && kept > 0);
            for (uint64_t k = 0; k < 3; k++) one_step(&part, k, &norms[1]);
            for (int t = 0; t < w->n_tensors; t++) {
                const size_t at = (size_t)w->tensors[t].offset * sizeof(float);
                if (!is_trained(part.learner, t))
                    assert_memory_equal((const char *)part.r.weights->base + at,
                                        (const char *)before.weights->base + at,
                                        (size_t)w->tensors[t].n * sizeof(float));
            }
            machine_close(&full);
            machine_close(&part);
            reference_close(&before);
        }
    }
}

TEST(plan_shrinks_and_holds)
{
    const char *folder = tiny(LAYERS, 3);
    struct memory_plan full, plan;
    struct machine m;
    double norm;
    machine_open(folder, NULL, 1, &m);
    full = learner_info(m.learner)->memory;
    machine_close(&m);
    for (size_t i = 0; i < sizeof freezes / sizeof *freezes; i++) {
        int64_t n = 0;
        machine_open(folder, freezes[i], 1, &m);
        for (uint64_t k = 0; k < 2; k++) one_step(&m, k, &norm);
        plan = learner_info(m.learner)->memory;
        const struct param_ranges *trained = learner_info(m.learner)->trained;
        for (int k = 0; k < trained->n; k++) n += trained->list[k].n;
        assert_int_equal(plan.moments, 8 * n);
        assert_true(plan.gradients < full.gradients && plan.total < full.total);
        assert_int_equal(full.total - plan.total,
                         full.moments - plan.moments + full.gradients - plan.gradients);
        assert_int_equal(plan.total, learner_memory_taken(m.learner));
        machine_close(&m);
    }
}

// ---- state on disk ------------------------------------------------------------------------------

TEST(goes_on_from_its_state)
{
    const char *freeze = "*.mlp.*,model.embed_tokens.weight", *folder = tiny(LAYERS, 3),
               *path = test_path(test_folder(), "optimizer.safetensors");
    struct machine a, b;
    double norm;
    machine_open(folder, freeze, 1, &a);
    one_step(&a, 1, &norm);
    assert_ok(optimizer_save(learner_optimizer(a.learner), path));
    machine_open(folder, freeze, 1, &b);
    memcpy(b.r.weights->base, a.r.weights->base, a.r.weights->bytes);
    assert_ok(optimizer_load(learner_optimizer(b.learner), path));
    one_step(&a, 2, &norm);
    one_step(&b, 2, &norm);
    assert_memory_equal(a.r.weights->base, b.r.weights->base, a.r.weights->bytes);
    machine_close(&b);
    // neither more nor less than what is trained
    static const char *const others[] = {NULL, "*.mlp.*", "*.mlp.*,*embed*,lm_head.weight"};
    for (int i = 0; i < 3; i++) {
        machine_open(folder, others[i], 1, &b);
        assert_int_equal(optimizer_load(learner_optimizer(b.learner), path), ST_MISMATCH);
        print_message("%s\n", status_message());
        assert_int_equal(optimizer_steps(learner_optimizer(b.learner)), 0);
        machine_close(&b);
    }
    machine_close(&a);
}

// Of full fine-tuning the file is what it was before there were ranges.
TEST(whole_state_has_its_names)
{
    const char *path = test_path(test_folder(), "optimizer.safetensors");
    static const char *const names[] = {"exp_avg.model.embed_tokens.weight",
                                        "exp_avg_sq.model.layers.2.mlp.down_proj.weight",
                                        "exp_avg.lm_head.weight"};
    struct safetensors *set;
    struct machine m;
    double norm;
    machine_open(tiny(LAYERS, 3), NULL, 1, &m);
    one_step(&m, 1, &norm);
    assert_ok(optimizer_save(learner_optimizer(m.learner), path));
    assert_ok(safetensors_open_file(path, &set));
    assert_int_equal(safetensors_count(set), 2 * m.r.weights->n_tensors);
    for (int i = 0; i < 3; i++) assert_non_null(safetensors_find(set, names[i]));
    safetensors_free(set);
    machine_close(&m);
}

// ---- ranges of two arenas -----------------------------------------------------------------------

struct arena {
    struct model_config *config;
    struct weights *weights;
    void *memory;
};

static void arena_open(struct device *dev, int layers, enum dtype dt, struct arena *a)
{
    a->weights = plan_of(tiny(layers, 5), dt, &a->config);
    assert_ok(device_alloc(dev, a->weights->bytes, &a->memory));
    memset(a->memory, 0, a->weights->bytes);
    weights_bind(a->weights, a->memory);
    assert_ok(weights_init_random(a->weights, dev, 9));
}

static void arena_close(struct device *dev, struct arena *a)
{
    weights_free(a->weights);
    model_config_free(a->config);
    device_release(dev, a->memory);
}

// A few gradients in the first and the last block of each range.
static void put_gradients(struct optimizer *o, const struct param_ranges *trained, int step)
{
    optimizer_clear_grads(o);
    for (int i = 0, arena = 0; i < trained->n; i++) {
        if (i > 0 && trained->list[i].weights != trained->list[i - 1].weights) arena++;
        const struct weights *g = optimizer_grads(o, arena);
        float *first = g->embed ? g->embed : g->final_norm;
        for (int k = 0; k < 20; k++) first[k] = 0.125f * (float)(k + step) - (float)arena;
    }
}

// One optimizer over an f32 and a bf16 arena does what one for each does, but that the norm is that
// of all; and its state keeps the two apart.
TEST(two_arenas_are_one_list)
{
    struct device *dev;
    struct arena a[2], b[2];
    struct optimizer *together, *apart[2], *again;
    struct param_ranges two = {NULL, 0}, one[2];
    const char *path = test_path(test_folder(), "optimizer.safetensors");
    const struct optimizer_config adamw = {0.9, 0.999, 1e-8, 0.01, 0, MOMENTS_F32, false};
    struct param_range list[8];
    double norm, norms[2];
    assert_ok(device_open("cpu", &dev));
    for (int i = 0; i < 2; i++) {
        arena_open(dev, i + 1, i ? DT_BF16 : DT_F32, &a[i]);
        arena_open(dev, i + 1, i ? DT_BF16 : DT_F32, &b[i]);
        assert_ok(param_ranges_of(a[i].weights, i ? "*.mlp.*" : NULL, &one[i]));
        assert_ok(optimizer_new(dev, &one[i], NULL, &adamw, &apart[i]));
        struct param_ranges more;
        assert_ok(param_ranges_of(b[i].weights, i ? "*.mlp.*" : NULL, &more));
        for (int k = 0; k < more.n; k++) {
            list[two.n] = more.list[k];
            list[two.n++].arena = i ? "draft." : NULL;
        }
        param_ranges_release(&more);
    }
    assert_true(two.n > 3);
    two.list = list;
    assert_ok(optimizer_new(dev, &two, NULL, &adamw, &together));
    for (int step = 1; step <= 4; step++) {
        put_gradients(together, &two, step);
        assert_ok(optimizer_prepare(together, &norm));
        for (int i = 0; i < 2; i++) {
            put_gradients(apart[i], &one[i], step);
            if (i) // the gradients of the second arena
                for (int k = 0; k < 20; k++) ((float *)optimizer_grads(apart[i], 0)->embed)[k] -= 1;
            assert_ok(optimizer_prepare(apart[i], &norms[i]));
            assert_ok(optimizer_apply(apart[i], 1e-2));
        }
        assert_float_equal(norm * norm, norms[0] * norms[0] + norms[1] * norms[1], 1e-6);
        assert_ok(optimizer_apply(together, 1e-2));
        for (int i = 0; i < 2; i++)
            assert_memory_equal(a[i].memory, b[i].memory, a[i].weights->bytes);
        if (step != 2) continue;
        assert_ok(optimizer_save(together, path)); // steps 3 and 4 are a loaded state's
        optimizer_free(together);
        assert_ok(optimizer_new(dev, &two, NULL, &adamw, &again));
        assert_ok(optimizer_load(again, path));
        together = again;
    }
    assert_int_equal(optimizer_steps(together), 4);
    optimizer_free(together);
    for (int i = 0; i < 2; i++) {
        optimizer_free(apart[i]);
        param_ranges_release(&one[i]);
        arena_close(dev, &a[i]);
        arena_close(dev, &b[i]);
    }
    device_free(dev);
}

TEST(odd_ranges_are_refused)
{
    struct device *dev;
    struct arena a;
    struct optimizer *o;
    const struct optimizer_config adamw = {0.9, 0.999, 1e-8, 0, 0, MOMENTS_F32, false};
    assert_ok(device_open("cpu", &dev));
    arena_open(dev, 1, DT_F32, &a);
    const int64_t n = a.weights->n_elements;
    const struct param_range odd[] = {
        {a.weights, 0, n + 128, NULL, 0}, {a.weights, 64, 128, NULL, 0},
        {a.weights, 0, 130, NULL, 0},     {a.weights, n, 128, NULL, 0},
        {a.weights, -128, 128, NULL, 0},  {a.weights, 0, 0, NULL, 0}};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        struct param_range range = odd[i];
        struct param_ranges trained = {&range, 1};
        assert_int_equal(optimizer_new(dev, &trained, NULL, &adamw, &o), ST_INVALID);
    }
    arena_close(dev, &a);
    device_free(dev);
}
