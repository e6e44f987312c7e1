/* test_mtp.c: layers that predict further tokens (multi-token prediction): what they compute is
 * what torch computes by the published formula (tests/golden/mtp), and an engine that drafts with
 * one gives what it gives without, with as many drafts accepted as the layer, computed over the
 * whole sequence at once, foresees; and its training (trainer/learner, backward_run): its loss
 * against one computed from plain logits, and its gradient against finite differences. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "common/model/model.h"
#include "tests/support/engine_bench.h"
#include "tests/support/generated.h"
#include "tests/support/learning.h"
#include "tests/support/loaded.h"
#include "tests/support/random_step.h"
#include "tests/support/tiny_latent.h"

#include <math.h>

enum { ROOM = 64, SMALL_VOCAB = 8, REQUESTS = 40, TOKENS = 24 };

struct pair { // a model, and its layer that predicts further tokens
    struct loaded *model;
    struct model_config *config;
    struct weights *weights;
    struct model *policy, *mtp;
};

static void open_pair(const char *model_folder, struct pair *p)
{
    p->model = loaded_of(model_folder, DT_F32);
    assert_ok(model_config_load(model_folder, &p->config));
    assert_ok(model_config_take_mtp(model_folder, p->config));
    assert_ok(weights_plan(p->config, DT_F32, &p->weights));
    assert_ok(weights_alloc(p->weights, p->model->dev));
    assert_ok(weights_load(p->weights, p->model->dev, model_folder));
    weights_share_ends(p->weights, p->model->weights);
    assert_ok(model_new(p->model->dev, p->model->config, p->model->weights, ROOM, ROOM, ROOM,
                        &p->policy));
    assert_ok(model_new(p->model->dev, p->config, p->weights, ROOM, ROOM, ROOM, &p->mtp));
}

static void close_pair(struct pair *p)
{
    model_free(p->policy);
    model_free(p->mtp);
    weights_free(p->weights);
    model_config_free(p->config);
}

// The residual stream of a sequence behind a model's layers, all rows' logits in m->logits.
static void *forward(struct model *m, const int32_t *tokens, int n)
{
    struct batch *b = NULL;
    int32_t rows[ROOM];
    void *x;
    assert_ok(batch_new(m->dev, ROOM, 1, 0, 1, &b));
    assert_ok(batch_add_packed(b, tokens, n, -1, -1, NULL));
    assert_ok(batch_commit(b, 0, 0));
    model_forward(m, batch_view(b), NULL, NULL, &x);
    for (int i = 0; i < n; i++) rows[i] = i;
    model_head(m, x, rows, 0, n);
    batch_free(b);
    return x;
}

// Of n tokens: the layer's logits of its n - 1 positions; `further` (NULL: none): one more, which
// reads what the layer gave behind that token.
static const float *predict(struct pair *p, const int32_t *tokens, int n, const int32_t *further)
{
    const size_t row = (size_t)p->config->hidden;
    int32_t behind[ROOM];
    struct model *m = p->mtp;
    forward(p->policy, tokens, n);
    float *states = m->hidden_in;
    model_normalise(
        m, states, n - 1,
        &(struct norm_args){.x = p->policy->x, .w = p->model->weights->at[ROLE_FINAL_NORM]});
    memcpy(behind, tokens + 1, (size_t)(n - 1) * sizeof *behind);
    const float *x = forward(m, behind, n - 1);
    if (!further) return m->logits;
    memcpy(states + (size_t)(n - 1) * row, x + (size_t)(n - 2) * row, row * sizeof *states);
    if (p->config->family->mtp_normalised)
        model_normalise(m, states + (size_t)(n - 1) * row, 1,
                        &(struct norm_args){.x = states + (size_t)(n - 1) * row,
                                            .w = p->weights->at[ROLE_FINAL_NORM]});
    behind[n - 1] = *further;
    forward(m, behind, n);
    return m->logits;
}

static int likeliest(const float *logits, int n)
{
    int best = 0;
    for (int i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

// ---- torch's numbers ----------------------------------------------------------------------------

static const char *golden_folder(const char *name)
{
    const char *golden = test_path(test_root(), test_text("tests/golden/mtp/%s", name));
    const char *made = test_folder();
    const char *config = test_read(test_path(golden, "config.json"));
    test_write(test_path(made, "config.json"), config, strlen(config));
    assert_ok(generated_write(golden, made));
    return made;
}

static void check_golden(const char *name)
{
    const char *golden = test_path(test_root(), test_text("tests/golden/mtp/%s", name));
    struct pair p;
    open_pair(golden_folder(name), &p);
    char *text = test_read(test_path(golden, "mtp.txt")), *save = NULL;
    int32_t tokens[ROOM];
    int n = 0;
    char *line = strtok_r(text, "\n", &save);
    for (int used; sscanf(line, "%d%n", &tokens[n], &used) == 1; line += used) n++;
    int last = -1;
    double most = 0;
    for (int row = 0; row < n; row++) {
        const int32_t further = last;
        const float *logits = predict(&p, tokens, n, row == n - 1 ? &further : NULL) +
                              (size_t)row * (size_t)p.config->vocab_size;
        line = strtok_r(NULL, "\n", &save);
        assert_non_null(line);
        int best, used;
        assert_int_equal(sscanf(line, "%d%n", &best, &used), 1);
        assert_int_equal(likeliest(logits, p.config->vocab_size), best);
        line += used;
        for (int k = 0; k < 8; k++, line += used) {
            double want;
            assert_int_equal(sscanf(line, "%lf%n", &want, &used), 1);
            most = fmax(most, fabs(logits[16 * k] - want));
        }
        last = best;
    }
    printf("%s: logits differ by %.1e at most\n", name, most);
    assert_true(most < 1e-5);
    close_pair(&p);
}

TEST(deepseek_v3_is_that_of_torch)
{
    check_golden("deepseek-v3");
}

TEST(qwen35_is_that_of_torch)
{
    check_golden("qwen35");
}

// ---- an engine that drafts with it --------------------------------------------------------------

static const char *model;

static struct engine_options drafting_options(void)
{
    struct engine_options options = plain_options();
    options.model_folder = model;
    options.prefill_chunk = 8; // prompts come in several
    options.speculative_fixed = true;
    assert_ok(speculative_parse("mtp:3", &options.speculative));
    return options;
}

static int make_small_prompt(int32_t *prompt, int i)
{
    struct rng r;
    rng_init(&r, (uint64_t)i, 5);
    const int n = 1 + (int)rng_below(&r, 20);
    for (int k = 0; k < n; k++) prompt[k] = (int32_t)rng_below(&r, SMALL_VOCAB);
    return n;
}

static void run_all(struct bench *b, const struct sampling *sampling, const char *method,
                    struct take *ret[REQUESTS])
{
    struct sampling s = *sampling;
    assert_ok(speculative_parse(method, &s.speculative));
    for (int i = 0; i < REQUESTS; i++) {
        int32_t prompt[ROOM];
        const int n = make_small_prompt(prompt, i);
        s.seed = (uint64_t)i;
        ret[i] = submit_ids(b, prompt, n, &s);
    }
    for (int i = 0; i < REQUESTS; i++) await_done(b, ret[i]);
}

static int64_t accepted_of(const struct take *t)
{
    return t->sample[0].telemetry.drafts.num_accepted_tokens;
}

static void check_same(const char *folder_of_model, bool exact, const struct sampling *sampling,
                       bool accepts)
{
    static const char *const methods[] = {"mtp:1", "mtp:3", "mtp:16", "ngram:2,mtp:2"};
    struct take *plain[REQUESTS], *drafted[REQUESTS];
    struct engine_options options = drafting_options();
    options.model_folder = folder_of_model;
    options.exact = exact;
    struct bench *b = bench_of(&options);
    run_all(b, sampling, "off", plain);
    for (size_t m = 0; m < sizeof methods / sizeof *methods; m++) {
        int64_t accepted = 0;
        run_all(b, sampling, methods[m], drafted);
        for (int i = 0; i < REQUESTS; i++) {
            assert_int_equal(plain[i]->sample[0].n, drafted[i]->sample[0].n);
            for (int k = 0; k < plain[i]->sample[0].n; k++) {
                const struct token_record *x = &plain[i]->sample[0].tokens[k],
                                          *y = &drafted[i]->sample[0].tokens[k];
                assert_int_equal(x->token, y->token);
                assert_memory_equal(&x->logprob, &y->logprob, sizeof x->logprob);
            }
            accepted += accepted_of(drafted[i]);
        }
        printf("%s: %lld accepted\n", methods[m], (long long)accepted);
        assert_true(accepted > 0 || !accepts);
    }
}

TEST(greedy_samples_are_those_without)
{
    const struct sampling s = greedy(TOKENS);
    check_same(model, false, &s, true);
}

TEST(exact_samples_are_those_without)
{
    const struct sampling s = random_sampling(TOKENS, 0);
    check_same(model, true, &s, true);
}

// The policy carries states along, of which each draft leaves one; its layer has none.
TEST(samples_of_linear_attention_are_those_without)
{
    const struct sampling s = greedy(TOKENS), random = random_sampling(TOKENS, 0);
    check_same(golden_folder("qwen35"), false, &s, false);
    check_same(golden_folder("qwen35"), true, &random, false);
}

// One draft a step: of the first `vocabulary` tokens the layer's likeliest at the position before
// the last known token, as the layer computed over the whole sequence has it. So what is accepted
// is known.
static void check_foretold(int vocabulary)
{
    struct engine_options options = drafting_options();
    options.draft_vocabulary = vocabulary;
    struct bench *b = bench_of(&options);
    struct take *takes[REQUESTS];
    struct pair p;
    const struct sampling s = greedy(TOKENS);
    int64_t all = 0;
    open_pair(model, &p);
    run_all(b, &s, "mtp:1", takes);
    for (int i = 0; i < REQUESTS; i++) {
        int32_t tokens[ROOM];
        const int n_prompt = make_small_prompt(tokens, i);
        for (int k = 0; k < TOKENS; k++) tokens[n_prompt + k] = takes[i]->sample[0].tokens[k].token;
        const float *logits = predict(&p, tokens, n_prompt + TOKENS, NULL);
        int drafts = 0, accepted = 0;
        for (int n = 1, right; n < TOKENS; n += 1 + right) {
            right = 0;
            if (TOKENS - n - 1 < 1) continue;
            const float *row = logits + (size_t)(n_prompt + n - 2) * SMALL_VOCAB;
            right = likeliest(row, vocabulary) == tokens[n_prompt + n];
            drafts++;
            accepted += right;
        }
        assert_int_equal(takes[i]->sample[0].telemetry.drafts.num_drafts, drafts);
        assert_int_equal(accepted_of(takes[i]), accepted);
        all += accepted;
    }
    printf("%lld accepted\n", (long long)all);
    assert_true(all > 0);
    close_pair(&p);
}

TEST(it_drafts_what_the_whole_sequence_foretells)
{
    check_foretold(SMALL_VOCAB);
}

TEST(it_drafts_of_the_first_tokens_alone)
{
    check_foretold(SMALL_VOCAB / 2);
}

// Parallel samples of a prompt, and one that another has left its blocks behind.
TEST(siblings_and_cached_prompts_draft_too)
{
    struct engine_options options = drafting_options();
    struct bench *b = bench_of(&options);
    struct sampling s = random_sampling(TOKENS, 3);
    int32_t prompt[ROOM];
    s.n = 4;
    make_prompt(prompt, 20, 1);
    for (int i = 0; i < 20; i++) prompt[i] %= SMALL_VOCAB;
    for (int again = 0; again < 2; again++) {
        const struct take *take = run_ids(b, prompt, 20, &s);
        for (int i = 0; i < 4; i++) {
            assert_int_equal(take->sample[i].n, TOKENS);
            assert_true(take->sample[i].telemetry.drafts.num_drafts > 0);
        }
    }
}

// ---- its training -------------------------------------------------------------------------------

enum { GROUPS = 3, PER = 3, SAMPLES = GROUPS * PER, TARGETS = 29 };
#define TEMPERATURE 0.8f
static const int prompt_lengths[GROUPS] = {5, 2, 6};
static const int lengths[SAMPLES] = {3, 1, 7, 2, 0, 4, 5, 1, 6};

static struct learner *learner_of(struct pair *p, int budget, float weight, int depths)
{
    const struct optimizer_config optimizer = {.beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
    const struct learner_config config = {.optimizer = optimizer,
                                          .temperature = TEMPERATURE,
                                          .token_budget = budget,
                                          .logits_chunk = 3,
                                          .max_seqs = SAMPLES + GROUPS,
                                          .max_context = 32};
    struct learner *l = NULL;
    assert_ok(learner_new(p->model->dev, p->model->config, p->model->weights, false, &config, &l));
    assert_ok(learner_add_draft(l, p->config, p->weights,
                                &(struct learner_draft_config){optimizer, weight, depths}));
    assert_ok(learner_prepare(l));
    return l;
}

static void softmax(const float *logits, int n, double *ret)
{
    double most = logits[0], sum = 0;
    for (int i = 1; i < n; i++) most = fmax(most, logits[i]);
    for (int i = 0; i < n; i++) sum += ret[i] = exp((logits[i] - most) / TEMPERATURE);
    for (int i = 0; i < n; i++) ret[i] /= sum;
}

// What each sequence's tokens but two read at the second depth; no gradient goes through it.
static float states_of_second[SAMPLES][ROOM * 64];
static bool states_are_kept;

// The layer's logits at the second depth, of a sequence's n - 2 positions.
static const float *predict_second(struct pair *p, const int32_t *tokens, int n, float *states)
{
    const size_t row = (size_t)p->config->hidden;
    struct model *m = p->mtp;
    int32_t behind[ROOM];
    assert_true(row <= 64);
    if (!states_are_kept) {
        forward(p->policy, tokens, n);
        model_normalise(
            m, m->hidden_in, n - 1,
            &(struct norm_args){.x = p->policy->x, .w = p->model->weights->at[ROLE_FINAL_NORM]});
        float *x = forward(m, memcpy(behind, tokens + 1, (size_t)(n - 1) * sizeof *behind), n - 1);
        if (p->config->family->mtp_normalised)
            model_normalise(m, x, n - 2,
                            &(struct norm_args){.x = x, .w = p->weights->at[ROLE_FINAL_NORM]});
        memcpy(states, x, (size_t)(n - 2) * row * sizeof *states);
    }
    memcpy(m->hidden_in, states, (size_t)(n - 2) * row * sizeof *states);
    forward(m, memcpy(behind, tokens + 2, (size_t)(n - 2) * sizeof *behind), n - 2);
    return m->logits;
}

// Mean divergence of the layer from the model, one sequence at a time, over targets behind prompts
// of more tokens than the depth, and over depths.
static double plain_divergence(struct pair *p, const struct random_step *s, int depths)
{
    const int vocab = p->config->vocab_size;
    double *teacher = malloc((size_t)vocab * sizeof *teacher);
    double *student = malloc((size_t)vocab * sizeof *student);
    double sum = 0;
    int n_targets = 0;
    for (int i = 0; i < SAMPLES; i++) {
        const struct pack_group *g = &s->groups[i / PER];
        const struct pack_completion *c = &s->completions[i];
        int32_t ids[ROOM];
        memcpy(ids, g->prompt, (size_t)g->n_prompt * sizeof *ids);
        memcpy(ids + g->n_prompt, c->ids, (size_t)c->n * sizeof *ids);
        for (int d = 1; d <= depths && g->n_prompt > d; d++) {
            const int n = g->n_prompt + c->n;
            const float *of_student =
                d == 1 ? predict(p, ids, n, NULL) : predict_second(p, ids, n, states_of_second[i]);
            forward(p->policy, ids, n); // whose logits stay in its own memory
            for (int t = 0; t < c->n; t++, n_targets++) {
                softmax(p->policy->logits + (size_t)(g->n_prompt + t - 1) * (size_t)vocab, vocab,
                        teacher);
                softmax(of_student + (size_t)(g->n_prompt + t - 1 - d) * (size_t)vocab, vocab,
                        student);
                for (int v = 0; v < vocab; v++) sum += teacher[v] * log(teacher[v] / student[v]);
            }
        }
    }
    free(teacher);
    free(student);
    return sum / n_targets;
}

static double divergence(struct learner *l, const struct random_step *s, long *ret_targets)
{
    struct update_stats u = {0};
    assert_ok(learner_run(l, PASS_STEP, s->groups, GROUPS, learning_no_loss, NULL, &u));
    *ret_targets = u.draft_targets;
    return stats_mean(&u, STAT_DRAFT_KL);
}

static const struct step_shape step_shape = {GROUPS, PER, prompt_lengths, lengths, 100, 5};
static const int longer_lengths[GROUPS] = {5, 3, 6};
static const struct step_shape longer_shape = {GROUPS, PER, longer_lengths, lengths, 100, 5};

// However it is cut into micro-batches. A prompt of one token has none before it, and is left out
// with its micro-batch.
TEST(its_loss_is_the_divergence_from_the_model)
{
    static const char *const names[] = {"deepseek-v3", "qwen35"};
    struct random_step s;
    for (int i = 0; i < 4; i++) {
        struct pair p;
        open_pair(golden_folder(names[i / 2]), &p);
        struct learner *l = learner_of(&p, i % 2 ? 13 : 70, 1, 1);
        random_step_make(&step_shape, &s);
        long targets;
        const double kl = divergence(l, &s, &targets), wanted = plain_divergence(&p, &s, 1);
        assert_int_equal(targets, TARGETS);
        printf("%s: %.6f\n", names[i / 2], kl);
        assert_true(kl > 0.05);
        assert_near(kl, wanted, 1e-5 * wanted);
        s.groups[0].n_prompt = 1;
        divergence(l, &s, &targets);
        assert_true(i % 2 ? targets > 0 && targets <= TARGETS - 11 : targets == 0);
        learner_free(l);
        close_pair(&p);
    }
}

// Sequences that share turns: each row of the layer's batch is led to the policy's row of the token
// before, wherever the trees have put the two.
TEST(rows_before_are_found_in_trees)
{
    enum { N = 4, PROMPT = 40, OWN = 60, SHARED = 33, BUDGET = 1000 };
    static int32_t ids[N][PROMPT + OWN];
    struct pack_completion completions[N] = {{0}};
    struct pack_group groups[N] = {{0}}, behind[N];
    struct packing *whole = NULL, *again = NULL;
    int32_t before[BUDGET];
    for (int i = 0; i < N; i++) {
        // the prompts of two and two are alike as far as SHARED, one of each goes on with the other
        for (int t = 0; t < PROMPT + OWN; t++)
            ids[i][t] = t < SHARED + (i % 2) * 45 ? 1000 * (i / 2) + t : 10000 * (i + 1) + t;
        if (i % 2) memcpy(ids[i], ids[i - 1], SHARED * sizeof **ids);
        completions[i] = (struct pack_completion){.ids = ids[i] + PROMPT, .n = OWN};
        groups[i] = (struct pack_group){
            .prompt = ids[i], .n_prompt = PROMPT, .completions = &completions[i], .n = 1};
        behind[i] = groups[i];
        behind[i].prompt++;
        behind[i].n_prompt--;
    }
    assert_ok(packing_new(groups, N, BUDGET, PACK_MIN_SHARED, &whole));
    assert_int_equal(whole->n, 1);
    const struct micro_batch *mb = whole->batches;
    assert_ok(packing_again(mb, behind, PACK_MIN_SHARED - 1, &again));
    assert_true(mb->n_tokens < N * (PROMPT + OWN - 1)); // something is shared
    assert_true(again->batches->n_tokens <= mb->n_tokens);
    packing_before(mb, again->batches, before);
    for (int s = 0; s < N; s++)
        for (int i = again->batches->seqs[s].leaves[0]; i >= 0;
             i = again->batches->nodes[i].parent) {
            const struct pack_node *node = &again->batches->nodes[i];
            for (int t = 0; t < node->n; t++) {
                const int row = before[node->row + t], position = node->position + t;
                const struct pack_node *has = mb->nodes;
                while (row >= has->row + has->n) has++;
                assert_int_equal(has->position + row - has->row, position);
                assert_int_equal(has->ids[row - has->row], ids[mb->seqs[s].group][position]);
            }
        }
    packing_free(again);
    packing_free(whole);
}

// Of two depths too, where prompts have three tokens or more; by a prompt of two its micro-batch is
// left out of the second.
TEST(its_loss_at_two_depths_is_the_divergence)
{
    static const char *const names[] = {"deepseek-v3", "qwen35"};
    for (int i = 0; i < 4; i++) {
        struct random_step s;
        struct pair p;
        long targets;
        open_pair(golden_folder(names[i / 2]), &p);
        struct learner *l = learner_of(&p, i % 2 ? 14 : 70, 1, 2);
        random_step_make(&longer_shape, &s);
        const double kl = divergence(l, &s, &targets), wanted = plain_divergence(&p, &s, 2);
        assert_int_equal(targets, 2 * TARGETS);
        assert_near(kl, wanted, 1e-5 * wanted);
        assert_true(fabs(wanted - plain_divergence(&p, &s, 1)) > 1e-3);
        s.groups[0].n_prompt = 2;
        divergence(l, &s, &targets);
        assert_true(i % 2 ? targets > TARGETS && targets <= 2 * TARGETS - 11 : targets == TARGETS);
        learner_free(l);
        close_pair(&p);
    }
}

// By each tensor of a layer without experts, whose routers leap.
static void check_slopes(int depths)
{
    struct random_step s;
    struct pair p;
    const double weight = 1.5, h = 4e-3;
    open_pair(golden_folder("qwen35"), &p);
    struct learner *l = learner_of(&p, 14, (float)weight, depths);
    random_step_make(depths > 1 ? &longer_shape : &step_shape, &s);
    long targets;
    divergence(l, &s, &targets);
    plain_divergence(&p, &s, depths);
    states_are_kept = true;
    const float *gradients =
        optimizer_grads(learner_info(learner_info(l)->draft)->optimizer, 0)->base;
    int n_large = 0;
    for (int k = 0; k < p.weights->n_tensors; k++) {
        const struct weight_tensor *t = &p.weights->tensors[k];
        float *w = (float *)p.weights->base + t->offset;
        const float *g = gradients + t->offset;
        const size_t n = (size_t)t->n;
        const float *saved = test_copy(w, n * sizeof *saved);
        double norm = 0;
        for (size_t i = 0; i < n; i++) norm += (double)g[i] * g[i];
        norm = sqrt(norm);
        if (norm < 1e-3) continue;
        for (size_t i = 0; i < n; i++) w[i] = saved[i] + (float)(h * g[i] / norm);
        const double up = plain_divergence(&p, &s, depths);
        for (size_t i = 0; i < n; i++) w[i] = saved[i] - (float)(h * g[i] / norm);
        const double slope = weight * (up - plain_divergence(&p, &s, depths)) / (2 * h);
        memcpy(w, saved, n * sizeof *saved);
        if (fabs(slope - norm) > 0.01 * norm + 1e-4 * weight)
            fail_msg("%s: slope %g, gradient %g", t->name, slope, norm);
        n_large++;
    }
    printf("%d of %d tensors\n", n_large, p.weights->n_tensors);
    assert_true(n_large > p.weights->n_tensors / 2);
    states_are_kept = false;
    learner_free(l);
    close_pair(&p);
}

TEST(its_gradient_is_a_slope)
{
    check_slopes(1);
}

TEST(its_gradient_of_two_depths_is_a_slope)
{
    check_slopes(2);
}

TEST(what_has_no_such_layer_is_refused)
{
    struct loaded o;
    loaded_config(test_golden("qwen3"), &o);
    assert_fails(model_config_take_mtp("qwen3", o.config), ST_NOT_FOUND, "another method than mtp");
    loaded_close(&o);
    // a folder whose config names one that it does not have
    const char *bare = test_folder();
    assert_ok(tiny_latent_write(bare, 4, SMALL_VOCAB));
    loaded_config(bare, &o);
    assert_ok(model_config_take_mtp(bare, o.config));
    loaded_zeros(&o, DT_F32);
    assert_fails(weights_load(o.weights, o.dev, bare), ST_NOT_FOUND, "model.layers.2.");
    loaded_close(&o);
}

static void set_up(void)
{
    engine_bench_set_up();
    model = tiny_mtp_folder(SMALL_VOCAB);
}

TESTS_BETWEEN(set_up, NULL)
