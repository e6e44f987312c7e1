/* test_balance.c: the routers' load-balancing loss and its gradients, of the mixtures of experts in
 * tests/golden, against transformers (tests/golden/balance/make_balance.py): of whole batches, and
 * a micro-batch at a time; and who has no such loss.
 *
 * Tolerances, f32: the loss 1e-6, gradients 1e-4 of the largest, sums of f32 numbers in another
 * order. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/safetensors.h"
#include "tests/support/learning.h"
#include "tests/support/support.h"
#include "tests/support/loaded.h"

enum { SEQS = 4, PROMPT = 7, COMPLETION = 13, WIDTH = PROMPT + COMPLETION };

struct sequences { // a folder's, as groups of one
    struct safetensors *values;
    struct pack_completion completions[SEQS];
    struct pack_group groups[SEQS];
    int longest;
};

static void sequences_open(const char *folder, struct sequences *s)
{
    const char *path = test_path(folder, "golden.safetensors");
    assert_ok(safetensors_open_file(path, &s->values));
    const int32_t *ids = safetensors_find(s->values, "input_ids")->data;
    const float *mask = safetensors_find(s->values, "completion_mask")->data;
    for (int i = 0; i < SEQS; i++) {
        int n = 0;
        while (n < COMPLETION && mask[i * COMPLETION + n] != 0) n++;
        s->completions[i] = (struct pack_completion){.ids = ids + i * WIDTH + PROMPT, .n = n};
        s->groups[i] = (struct pack_group){.prompt = ids + i * WIDTH,
                                           .n_prompt = PROMPT,
                                           .completions = &s->completions[i],
                                           .n = 1};
        if (PROMPT + n - 1 > s->longest) s->longest = PROMPT + n - 1;
    }
}

static double largest(const float *x, int64_t n)
{
    double most = 0;
    for (int64_t i = 0; i < n; i++) most = fmax(most, fabs(x[i]));
    return most;
}

// "LAYER VALUE ..." of a router's gradient.
static void check_router(const struct weights *grads, char *line)
{
    const int layer = (int)strtol(line, &line, 10);
    const struct layer_config *l = &grads->config->layers[layer];
    const float *router = grads->layers[layer].at[ROLE_ROUTER];
    const int64_t n = (int64_t)l->moe.n_experts * grads->config->hidden;
    const double most = largest(router, n);
    double worst = 0;
    for (int64_t i = 0; i < n; i++) worst = fmax(worst, fabs(strtod(line, &line) - router[i]));
    assert_true(most > 1e-3 && worst <= 1e-4 * most);
}

// "whole|each LOSS NORM" and the routers' lines that follow. The last sequence alone would share a
// micro-batch with the one before.
static void check_way(const char *folder, const struct sequences *s, char *line, char **lines,
                      int n_routers, enum recompute recompute)
{
    double norm;
    const bool each = strncmp(line, "each", 4) == 0;
    char *remaining = strchr(line, ' ');
    const double loss = strtod(remaining, &remaining), want_norm = strtod(remaining, NULL);
    struct learning *m = learning_of(
        &(struct learning_setting){.folder = folder,
                                   .config = {.optimizer = {.beta2 = 0.95},
                                              .router_aux_loss_coef = 1,
                                              .token_budget = each ? s->longest : SEQS * WIDTH,
                                              .logits_chunk = 16,
                                              .max_seqs = 2 * SEQS,
                                              .max_context = WIDTH,
                                              .recompute = recompute}});
    assert_ok(learner_run(m->learner, PASS_STEP, s->groups, each ? SEQS - 1 : SEQS,
                          learning_no_loss, NULL, NULL));
    assert_float_equal(learner_info(m->learner)->balance_loss, loss, 1e-6 * loss);
    assert_ok(optimizer_prepare(learning_optimizer(m), &norm));
    assert_float_equal(norm, want_norm, 1e-5 * want_norm);
    for (int i = 0; i < n_routers; i++)
        check_router(optimizer_grads(learning_optimizer(m), 0), lines[i]);
    learning_end(m);
}

static int split(char *text, char **ret, int max)
{
    int n = 0;
    for (char *line; (line = strsep(&text, "\n")) && *line;) {
        assert_true(n < max);
        ret[n++] = line;
    }
    return n;
}

TEST(is_transformers_loss)
{
    char *text = test_read("tests/golden/balance/balance.txt"), *lines[128];
    const int n = split(text, lines, 128);
    int n_ways = 0;
    for (int i = 0; i < n;) {
        char name[64];
        double coef;
        int n_routers;
        struct sequences s = {0};
        assert_int_equal(sscanf(lines[i], "%63s %d %lf", name, &n_routers, &coef), 3);
        const char *folder = test_golden(name);
        sequences_open(folder, &s);
        for (i++; i < n && (lines[i][0] == 'w' || lines[i][0] == 'e'); i += n_routers + 1) {
            char *again = test_keep(strdup(lines[i]));
            check_way(folder, &s, lines[i], lines + i + 1, n_routers, RECOMPUTE_NONE);
            check_way(folder, &s, again, lines + i + 1, n_routers, RECOMPUTE_LAYER);
            n_ways++;
        }
        safetensors_free(s.values);
    }
    assert_int_equal(n_ways, 12);
}

TEST_EACH(coef_is_the_models_own, "balance")
{
    double coef = -1;
    struct model_config *config = config_of(row_text(cases, i, "folder"));
    const enum status st = balance_coef(config, row_number(cases, i, "wanted"), &coef);
    assert_int_equal(st == ST_OK, row_text(cases, i, "error") == NULL);
    if (row_text(cases, i, "error"))
        assert_non_null(strstr(status_message(), row_text(cases, i, "error")));
    else
        assert_float_equal(coef, row_number(cases, i, "coef"), 0);
}
