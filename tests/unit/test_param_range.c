/* test_param_range.c: what is trained: patterns of --freeze as ranges, and training that runs over
 * them: gradients, AdamW, clipping, memory and state on disk, of several ranges of one arena and of
 * ranges of two. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/learning.h"
#include "tests/support/loaded.h"
#include "tests/support/random_step.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "common/model/safetensors.h"
#include "trainer/learn/param_range.h"

enum { VOCAB = 50, GROUPS = 2, SAMPLES = 4, LAYERS = 3 };

static const char *tiny(int layers, uint64_t seed)
{
    return tiny_folder(32, layers, VOCAB, seed);
}

// ---- patterns -----------------------------------------------------------------------------------

static bool covers(const struct param_ranges *r, const struct weights *w, const char *name)
{
    for (int k = 0; k < r->n; k++)
        for (int t = 0; t < w->n_tensors; t++)
            if (param_range_holds(&r->list[k], t) && strcmp(w->tensors[t].name, name) == 0)
                return true;
    return false;
}

TEST_EACH(patterns_name_ranges, "param_range")
{
    const struct weights *w = loaded_planned(tiny(LAYERS, 1), DT_F32)->weights;
    const char *freeze = row_text(cases, i, "freeze"), *frozen = row_text(cases, i, "frozen");
    struct param_ranges r;
    int64_t covered = 0;
    assert_ok(param_ranges_of(w, freeze, &r));
    print_message("%s: %d ranges\n", freeze ? freeze : "(none)", r.n);
    assert_int_equal(r.n, row_int(cases, i, "ranges"));
    for (int k = 0; k < r.n; k++) covered += r.list[k].n;
    assert_true(covers(&r, w, row_text(cases, i, "trained")));
    assert_false(frozen && covers(&r, w, frozen));
    if (frozen)
        assert_true(covered < w->n_elements && param_ranges_parameters(&r) < w->n_parameters);
    else
        assert_true(covered == w->n_elements && param_ranges_parameters(&r) == w->n_parameters);
    param_ranges_release(&r);
}

TEST_EACH(bad_patterns_are_named, "param_range")
{
    struct param_ranges r = {0};
    assert_fails(param_ranges_of(loaded_planned(tiny(LAYERS, 1), DT_F32)->weights,
                                 row_text(cases, i, "freeze"), &r),
                 ST_INVALID, row_text(cases, i, "said"));
    assert_null(r.list);
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

static struct learning *model(const char *folder, const char *freeze, double max_grad_norm)
{
    return learning_of(&(struct learning_setting){
        .folder = folder,
        .config = {.optimizer = {.weight_decay = 0.1, .max_grad_norm = max_grad_norm},
                   .freeze = freeze,
                   .token_budget = 40,
                   .logits_chunk = 16,
                   .max_seqs = SAMPLES + GROUPS,
                   .max_context = 12}});
}

// The gradient's norm.
static double one_step(struct learning *m, uint64_t seed)
{
    static const int prompts[] = {4, 6}, completions[] = {5, 3, 6, 6};
    const struct step_shape shape = {GROUPS, SAMPLES / GROUPS, prompts, completions, VOCAB, seed};
    struct random_step step;
    double loss = 0;
    random_step_make(&shape, &step);
    assert_ok(learner_run(m->learner, PASS_STEP, step.groups, GROUPS, cross_entropy, &loss, NULL));
    const double norm = learning_step(m, 1e-2);
    assert_ok(device_sync(m->policy.dev));
    return norm;
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
static void check_freeze(const char *folder, const char *freeze)
{
    struct learning *full = model(folder, NULL, 0), *part = model(folder, freeze, 0);
    const struct weights *w = full->policy.weights;
    const char *old = test_copy(w->base, w->bytes), *all = w->base,
               *now = part->policy.weights->base;
    int moved = 0, kept = 0;
    const double whole_norm = one_step(full, 7), norm = one_step(part, 7);
    assert_true(norm > 0 && norm < whole_norm);
    for (int round = 0; round < 2; round++) {
        for (int t = 0; t < w->n_tensors; t++) {
            const size_t at = (size_t)w->tensors[t].offset * sizeof(float),
                         bytes = (size_t)w->tensors[t].n * sizeof(float);
            const bool trained = is_trained(part->learner, t);
            if (!trained || round == 0)
                assert_memory_equal(now + at, (trained ? all : old) + at, bytes);
            moved += trained && memcmp(now + at, old + at, bytes) != 0;
            kept += !trained;
        }
        if (round == 0) assert_true(moved > 0 && kept > 0);
        for (uint64_t k = 0; k < 3 && round == 0; k++) one_step(part, k);
    }
    learning_end(full);
    learning_end(part);
}

TEST(trained_as_in_full_frozen_as_before)
{
    for (int tied = 0; tied < 2; tied++) {
        const struct tiny_model shape = {.hidden = 32,
                                         .layers = LAYERS,
                                         .vocab = VOCAB,
                                         .tie_embeddings = tied,
                                         .eos_id = -1,
                                         .seed = 3};
        const char *folder = tiny_folder_as(&shape);
        for (size_t i = 0; i < sizeof freezes / sizeof *freezes; i++)
            if (!tied || !strstr(freezes[i], "lm_head")) check_freeze(folder, freezes[i]);
    }
}

TEST(plan_shrinks_and_holds)
{
    const char *folder = tiny(LAYERS, 3);
    const struct memory_plan full = learner_info(model(folder, NULL, 1)->learner)->memory;
    for (size_t i = 0; i < sizeof freezes / sizeof *freezes; i++) {
        int64_t n = 0;
        struct learning *m = model(folder, freezes[i], 1);
        for (uint64_t k = 0; k < 2; k++) one_step(m, k);
        const struct memory_plan plan = learner_info(m->learner)->memory;
        const struct param_ranges *trained = learner_info(m->learner)->trained;
        for (int k = 0; k < trained->n; k++) n += trained->list[k].n;
        assert_int_equal(plan.moments, 8 * n);
        assert_true(plan.gradients < full.gradients && plan.total < full.total);
        assert_int_equal(full.total - plan.total,
                         full.moments - plan.moments + full.gradients - plan.gradients);
        assert_int_equal(plan.total, learner_memory_taken(m->learner));
        learning_end(m);
    }
}

// ---- state on disk ------------------------------------------------------------------------------

TEST(goes_on_from_its_state)
{
    const char *freeze = "*.mlp.*,model.embed_tokens.weight", *folder = tiny(LAYERS, 3),
               *path = test_path(test_folder(), "optimizer.safetensors");
    struct learning *a = model(folder, freeze, 1), *b = model(folder, freeze, 1);
    const struct weights *w = a->policy.weights;
    one_step(a, 1);
    assert_ok(optimizer_save(learning_optimizer(a), path));
    memcpy(b->policy.weights->base, w->base, w->bytes);
    assert_ok(optimizer_load(learning_optimizer(b), path));
    one_step(a, 2);
    one_step(b, 2);
    assert_memory_equal(w->base, b->policy.weights->base, w->bytes);
    // neither more nor less than what is trained
    static const char *const others[] = {NULL, "*.mlp.*", "*.mlp.*,*embed*,lm_head.weight"};
    for (int i = 0; i < 3; i++) {
        b = model(folder, others[i], 1);
        assert_status(optimizer_load(learning_optimizer(b), path), ST_MISMATCH);
        print_message("%s\n", status_message());
        assert_int_equal(optimizer_steps(learning_optimizer(b)), 0);
    }
}

// Of full fine-tuning the file is what it was before there were ranges.
TEST(whole_state_has_its_names)
{
    const char *path = test_path(test_folder(), "optimizer.safetensors");
    static const char *const names[] = {"exp_avg.model.embed_tokens.weight",
                                        "exp_avg_sq.model.layers.2.mlp.down_proj.weight",
                                        "exp_avg.lm_head.weight"};
    struct learning *m = model(tiny(LAYERS, 3), NULL, 1);
    one_step(m, 1);
    assert_ok(optimizer_save(learning_optimizer(m), path));
    struct safetensors *set = tensors_of_file(path);
    assert_int_equal(safetensors_count(set), 2 * m->policy.weights->n_tensors);
    for (int i = 0; i < 3; i++) assert_non_null(safetensors_find(set, names[i]));
}

// ---- ranges of two arenas -----------------------------------------------------------------------

static const struct weights *arena_of(int layers, enum dtype dt)
{
    const struct loaded *m = loaded_planned(tiny(layers, 5), dt);
    assert_ok(weights_init_random(m->weights, m->dev, 9));
    return m->weights;
}

LATER(device_free)
LATER(optimizer_free)

static struct device *cpu(void)
{
    struct device *dev;
    assert_ok(device_open("cpu", &dev));
    return test_later(dev, device_free_later);
}

static struct optimizer *optimizer_of(struct device *dev, const struct param_ranges *trained,
                                      const struct optimizer_config *config)
{
    struct optimizer *o;
    assert_ok(optimizer_new(dev, trained, NULL, config, &o));
    return test_later(o, optimizer_free_later);
}

// A few gradients in the first and the last block of each range.
static void put_gradients(struct optimizer *o, const struct param_ranges *trained, int step)
{
    optimizer_clear_grads(o);
    for (int i = 0, arena = 0; i < trained->n; i++) {
        if (i > 0 && trained->list[i].weights != trained->list[i - 1].weights) arena++;
        const struct weights *g = optimizer_grads(o, arena);
        float *first = g->at[ROLE_EMBED] ? g->at[ROLE_EMBED] : g->at[ROLE_FINAL_NORM];
        for (int k = 0; k < 20; k++) first[k] = 0.125f * (float)(k + step) - (float)arena;
    }
}

// One optimizer over an f32 and a bf16 arena does what one for each does, but that the norm is that
// of all; and its state keeps the two apart.
TEST(two_arenas_are_one_list)
{
    struct device *dev = cpu();
    const struct weights *a[2], *b[2];
    struct optimizer *apart[2];
    struct param_ranges two = {NULL, 0}, one[2];
    const char *path = test_path(test_folder(), "optimizer.safetensors");
    const struct optimizer_config adamw = {0.9, 0.999, 1e-8, 0.01, 0, MOMENTS_F32, false};
    struct param_range list[8];
    double norm, norms[2];
    for (int i = 0; i < 2; i++) {
        struct param_ranges more;
        a[i] = arena_of(i + 1, i ? DT_BF16 : DT_F32);
        b[i] = arena_of(i + 1, i ? DT_BF16 : DT_F32);
        assert_ok(param_ranges_of(a[i], i ? "*.mlp.*" : NULL, &one[i]));
        apart[i] = optimizer_of(dev, &one[i], &adamw);
        assert_ok(param_ranges_of(b[i], i ? "*.mlp.*" : NULL, &more));
        for (int k = 0; k < more.n; k++) {
            list[two.n] = more.list[k];
            list[two.n++].arena = i ? "draft." : NULL;
        }
        param_ranges_release(&more);
    }
    assert_true(two.n > 3);
    two.list = list;
    struct optimizer *together = optimizer_of(dev, &two, &adamw);
    for (int step = 1; step <= 4; step++) {
        put_gradients(together, &two, step);
        assert_ok(optimizer_prepare(together, &norm));
        for (int i = 0; i < 2; i++) {
            put_gradients(apart[i], &one[i], step);
            if (i) // the gradients of the second arena
                for (int k = 0; k < 20; k++)
                    ((float *)optimizer_grads(apart[i], 0)->at[ROLE_EMBED])[k] -= 1;
            assert_ok(optimizer_prepare(apart[i], &norms[i]));
            assert_ok(optimizer_apply(apart[i], 1e-2));
        }
        assert_near(norm * norm, norms[0] * norms[0] + norms[1] * norms[1], 1e-6);
        assert_ok(optimizer_apply(together, 1e-2));
        for (int i = 0; i < 2; i++) assert_memory_equal(a[i]->base, b[i]->base, a[i]->bytes);
        if (step != 2) continue;
        assert_ok(optimizer_save(together, path)); // steps 3 and 4 are a loaded state's
        together = optimizer_of(dev, &two, &adamw);
        assert_ok(optimizer_load(together, path));
    }
    assert_int_equal(optimizer_steps(together), 4);
    for (int i = 0; i < 2; i++) param_ranges_release(&one[i]);
}

TEST(odd_ranges_are_refused)
{
    struct optimizer *o;
    const struct optimizer_config adamw = {0.9, 0.999, 1e-8, 0, 0, MOMENTS_F32, false};
    const struct weights *w = arena_of(1, DT_F32);
    const int64_t n = w->n_elements;
    const struct param_range odd[] = {{w, 0, n + 128, NULL, 0}, {w, 64, 128, NULL, 0},
                                      {w, 0, 130, NULL, 0},     {w, n, 128, NULL, 0},
                                      {w, -128, 128, NULL, 0},  {w, 0, 0, NULL, 0}};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        struct param_range range = odd[i];
        struct param_ranges trained = {&range, 1};
        assert_status(optimizer_new(cpu(), &trained, NULL, &adamw, &o), ST_INVALID);
    }
}
