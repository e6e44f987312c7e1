/* test_distill.c: a policy that is held to a teacher (trainer/learn/learner.h,
 * learner_add_teacher): loss and gradients against TRL's GKDTrainer and DistillationTrainer
 * (tests/golden/distill), also cut into micro-batches and chunks of the head, and beside another
 * loss.
 *
 * Tolerances, f32: the loss 1e-5, sums of a tensor's gradient 1e-4 of its norm. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/generated.h"
#include "tests/support/learning.h"
#include "tests/support/support.h"

enum { SEQS = 3, PROMPT = 5, LONGEST = 7, VOCAB = 256 };
static const int lengths[SEQS] = {6, 4, 7};
#define TARGETS (6 + 4 + 7)

struct sequences {
    int32_t ids[SEQS][PROMPT + LONGEST];
    struct pack_completion completions[SEQS];
    struct pack_group groups[SEQS];
};

static void make(struct sequences *s)
{
    memset(s, 0, sizeof *s);
    for (int i = 0; i < SEQS; i++) {
        for (int t = 0; t < PROMPT + lengths[i]; t++)
            s->ids[i][t] = (7 + 37 * i + 11 * t * (t + i)) % VOCAB;
        s->completions[i] = (struct pack_completion){.ids = s->ids[i] + PROMPT, .n = lengths[i]};
        s->groups[i] = (struct pack_group){
            .prompt = s->ids[i], .n_prompt = PROMPT, .completions = &s->completions[i], .n = 1};
    }
}

struct parts { // of a loss: of log-probabilities, and of divergences
    bool logprobs, divergences;
};

static void some_loss(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    const struct parts *parts = context;
    for (int i = 0; i < rows->mb->first[rows->mb->n_seqs]; i++) {
        ret_dlogprobs[i] = parts->logprobs ? -1.0f / TARGETS : 0;
        assert_float_equal(rows->ddivergence[i], 0, 0);
        rows->ddivergence[i] = parts->divergences ? 1.0f / TARGETS : 0;
    }
}

struct pair { // what is learned by what
    char student[32], teacher[32];
    float beta, temperature;
    double loss;
};

static struct learning *learning_pair(const struct pair *p, bool cut)
{
    const struct learning_setting setting = {.folder = test_golden(p->student),
                                             .teacher = test_golden(p->teacher),
                                             .beta = p->beta,
                                             .config = {.temperature = p->temperature,
                                                        .token_budget = cut ? PROMPT + LONGEST : 64,
                                                        .logits_chunk = cut ? 3 : 64,
                                                        .max_seqs = 2 * SEQS,
                                                        .max_context = PROMPT + LONGEST}};
    return learning_of(&setting);
}

// "NAME SUM... NORM" of a tensor's gradient.
static void check_tensor(const struct weights *grads, char *line)
{
    char *at = strchr(line, ' ');
    *at++ = '\0';
    const struct weight_tensor *t = weights_find(grads, line);
    const float *g = (const float *)grads->base + t->offset;
    struct projection p;
    double wanted[GENERATED_SIGNS + 1];
    projection_init(&p, line);
    for (int64_t i = 0; i < t->n; i++) projection_add(&p, i, g[i]);
    for (int k = 0; k <= GENERATED_SIGNS; k++) wanted[k] = strtod(at, &at);
    const double norm = wanted[GENERATED_SIGNS], most = 1e-4 * norm + 1e-9;
    assert_float_equal(sqrt(p.squares), norm, most);
    for (int k = 0; k < GENERATED_SIGNS; k++) assert_float_equal(p.sum[k], wanted[k], most);
}

static void check_pair(const struct pair *p, char **lines, int n, bool cut)
{
    struct sequences s;
    struct update_stats stats = {0};
    struct parts parts = {.divergences = true};
    struct learning *m = learning_pair(p, cut);
    double norm;
    make(&s);
    assert_ok(learner_run(m->learner, PASS_STEP, s.groups, SEQS, some_loss, &parts, &stats));
    assert_int_equal(stats.range[STAT_TEACHER_DIVERGENCE].n, TARGETS);
    assert_float_equal(stats.range[STAT_LOSS].sum, p->loss, 1e-5);
    assert_float_equal(stats_mean(&stats, STAT_TEACHER_DIVERGENCE), p->loss, 1e-5);
    assert_in_range((unsigned)(100 * stats_mean(&stats, STAT_TEACHER_AGREES)), 0, 99);
    assert_ok(optimizer_prepare(learning_optimizer(m), &norm));
    for (int i = 0; i < n; i++)
        check_tensor(optimizer_grads(learning_optimizer(m), 0), test_keep(strdup(lines[i])));
    learning_end(m);
}

TEST(is_trls_loss)
{
    char *text = test_read("tests/golden/distill/distill.txt"), *lines[512], *line;
    int n = 0, n_pairs = 0;
    while ((line = strsep(&text, "\n")) && *line) {
        assert_true(n < 512);
        if (*line != '#') lines[n++] = line;
    }
    for (int i = 0; i < n; n_pairs++) {
        struct pair p;
        int end = i + 1;
        assert_int_equal(sscanf(lines[i], "pair %31s %31s %f %f %lf", p.student, p.teacher, &p.beta,
                                &p.temperature, &p.loss),
                         5);
        while (end < n && strncmp(lines[end], "pair ", 5) != 0) end++;
        check_pair(&p, lines + i + 1, end - i - 1, false);
        check_pair(&p, lines + i + 1, end - i - 1, true);
        i = end;
    }
    assert_int_equal(n_pairs, 12);
}

// The gradients of two losses add up.
TEST(beside_another_loss)
{
    static const struct pair pair = {"gemma2", "llama3", 0.3f, 1, 0};
    static const struct parts parts[] = {{true, false}, {false, true}, {true, true}};
    struct sequences s;
    float *gradients[3];
    int64_t n = 0;
    make(&s);
    for (int i = 0; i < 3; i++) {
        struct learning *m = learning_pair(&pair, true);
        assert_ok(
            learner_run(m->learner, PASS_STEP, s.groups, SEQS, some_loss, (void *)&parts[i], NULL));
        n = m->policy.weights->n_elements;
        gradients[i] = (float *)test_copy(learning_gradients(m), (size_t)n * sizeof(float));
        learning_end(m);
    }
    for (int64_t i = 0; i < n; i++) gradients[0][i] += gradients[1][i];
    assert_same_gradients(gradients[2], gradients[0], n, 1e-5);
}

static enum status add(struct learning *m, const char *model)
{
    return learner_add_teacher(
        m->learner, &(struct learner_teacher_config){model, 1, QUANTIZATION_NONE, false});
}

TEST(a_smaller_vocabulary_is_refused)
{
    struct learning *m = learning_of(&(struct learning_setting){
        .folder = test_golden("llama3"),
        .config = {.token_budget = 16, .logits_chunk = 16, .max_seqs = 2, .max_context = 16}});
    assert_status(add(m, test_golden("mistral")), ST_MISMATCH);
    assert_contains(status_message(), "a vocabulary of 256 tokens, the policy one of 512");
}

TEST(what_it_could_not_read_is_refused)
{
    struct learning_setting setting = {.folder = test_golden("mistral"),
                                       .config = {.token_budget = 16,
                                                  .logits_chunk = 16,
                                                  .max_seqs = 2,
                                                  .max_context = 16,
                                                  .constrained = true}};
    struct learning *m = learning_of(&setting);
    assert_status(add(m, test_golden("llama3")), ST_UNSUPPORTED);
    assert_contains(status_message(), "--constrained-loss");
    setting.config.constrained = false;
    setting.config.max_context = 1 << 20;
    m = learning_of(&setting);
    assert_status(add(m, test_golden("llama3")), ST_TOO_LONG);
    assert_contains(status_message(), "it reads at most");
    assert_status(add(m, TEACHER_BASE), ST_UNSUPPORTED);
    assert_contains(status_message(), "no adapter is trained");
}
