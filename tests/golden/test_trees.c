/* test_trees.c: every model of tests/golden, whose sequences share turns, prompts and what they
 * were sampled: packed as trees they give the log-probabilities that each gives alone, to the bit,
 * from fewer rows, and the same gradients but for the order of sums; so do conversations of which
 * each is one completion, a part a turn. On a GPU (COMMONWEIGHT_TEST_DEVICE) in bf16. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/learning.h"
#include "common/base/rng.h"
#include "tests/support/support.h"

// Conversations of TURNS turns, whose template keeps of what was sampled other tokens; and samples
// of one prompt.
enum { CONVERSATIONS = 2, TURNS = 3, READ = 33, KEPT = 34, SAMPLED = 35, SAMPLES = 3 };
enum {
    CONTEXT = TURNS * (READ + KEPT) + SAMPLED,
    SEQUENCES = CONVERSATIONS * TURNS + SAMPLES,
    GROUPS = CONVERSATIONS * TURNS + 1,
    ROWS = SEQUENCES * CONTEXT
};

struct step {
    int32_t read[TURNS * (READ + KEPT)], ids[SEQUENCES][CONTEXT], prompt[READ + 5];
    struct pack_completion completions[SEQUENCES];
    struct pack_group groups[GROUPS], alone[SEQUENCES];
    // the conversations, a completion each
    struct pack_part parts[CONVERSATIONS][TURNS];
    int32_t sequences[CONVERSATIONS][TURNS * CONTEXT], sampled[CONVERSATIONS][TURNS * SAMPLED];
    struct pack_completion of_parts[CONVERSATIONS];
    struct pack_group conversations;
};

static void random_ids(struct rng *rng, int vocab, int n, int32_t *ret)
{
    for (int i = 0; i < n; i++) ret[i] = (int32_t)rng_below(rng, (uint32_t)vocab);
}

// All conversations begin with the same turn, and so does the samples' prompt. The second sample
// leaves the first late, the third ends within it.
static void step_make(int vocab, struct step *s)
{
    struct rng rng;
    rng_init(&rng, 3, 0);
    random_ids(&rng, vocab, READ + 5, s->prompt);
    int n = 0;
    for (int c = 0; c < CONVERSATIONS; c++) {
        random_ids(&rng, vocab, TURNS * (READ + KEPT), s->read);
        memcpy(s->read, s->prompt, READ * sizeof *s->read);
        for (int t = 0; t < TURNS; t++, n++) {
            const int read = READ + t * (READ + KEPT);
            memcpy(s->ids[n], s->read, (size_t)read * sizeof *s->read);
            random_ids(&rng, vocab, SAMPLED, s->ids[n] + read);
            s->completions[n] = (struct pack_completion){.ids = s->ids[n] + read, .n = SAMPLED};
            s->groups[n] = (struct pack_group){
                .prompt = s->ids[n], .n_prompt = read, .completions = &s->completions[n], .n = 1};
        }
    }
    const int first = n;
    for (int i = 0; i < SAMPLES; i++, n++) {
        memcpy(s->ids[n], s->prompt, sizeof s->prompt);
        random_ids(&rng, vocab, 2 * SAMPLED, s->ids[n] + READ + 5);
        if (i > 0) memcpy(s->ids[n], s->ids[first], (READ + 5 + SAMPLED) * sizeof *s->ids[n]);
        s->completions[n] = (struct pack_completion){.ids = s->ids[n] + READ + 5,
                                                     .n = i < 2 ? 2 * SAMPLED : SAMPLED};
    }
    s->groups[GROUPS - 1] = (struct pack_group){.prompt = s->prompt,
                                                .n_prompt = READ + 5,
                                                .completions = &s->completions[first],
                                                .n = SAMPLES};
    for (int i = 0; i < SEQUENCES; i++) {
        s->alone[i] = s->groups[i < first ? i : GROUPS - 1];
        s->alone[i].completions = &s->completions[i];
        s->alone[i].n = 1;
    }
}

// Behind the turn that all begin with.
static void make_parts(struct step *s)
{
    for (int c = 0; c < CONVERSATIONS; c++) {
        int begin = 0;
        for (int t = 0; t < TURNS; t++) {
            const int32_t *ids = s->ids[c * TURNS + t];
            const int n = t * (READ + KEPT);
            memcpy(s->sequences[c] + begin, ids + READ, (size_t)(n + SAMPLED) * sizeof *ids);
            memcpy(s->sampled[c] + t * SAMPLED, ids + READ + n, SAMPLED * sizeof *ids);
            s->parts[c][t] = (struct pack_part){t * SAMPLED, begin, n};
            begin += n + SAMPLED;
        }
        s->of_parts[c] = (struct pack_completion){.ids = s->sampled[c],
                                                  .n = TURNS * SAMPLED,
                                                  .parts = s->parts[c],
                                                  .n_parts = TURNS,
                                                  .sequences = s->sequences[c]};
    }
    s->conversations = (struct pack_group){
        .prompt = s->prompt, .n_prompt = READ, .completions = s->of_parts, .n = CONVERSATIONS};
}

struct seen {
    float logprobs[SEQUENCES][2 * SAMPLED];
    int first, rows; // the number of the pass's first sequence; rows of all
    int parts;       // sequences of a completion
};

static void weighted(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    struct seen *seen = context;
    const struct micro_batch *mb = rows->mb;
    seen->rows += mb->n_tokens;
    for (int s = 0; s < mb->n_seqs; s++) {
        const int n = (mb->first[s + 1] - mb->first[s]) / seen->parts;
        for (int i = 0; i < n * seen->parts; i++) {
            const int number = seen->first + mb->sample[s] * seen->parts + i / n, t = i % n;
            seen->logprobs[number][t] = rows->logprobs[mb->first[s] + i];
            ret_dlogprobs[mb->first[s] + i] = 0.1f * (float)(1 + number % 5) - 0.003f * (float)t;
        }
    }
}

static const float *gradients_of(const struct learning *l)
{
    const size_t bytes = (size_t)l->policy.weights->n_elements * sizeof(float);
    float *host = test_keep(malloc(bytes));
    device_copy_out(l->policy.dev, host, learning_gradients(l), bytes);
    assert_ok(device_sync(l->policy.dev));
    return host;
}

static bool goes_over_trees(const struct model_config *c)
{
    for (int i = 0; i < c->n_layers; i++)
        if (c->layers[i].delta.n_heads > 0) return false;
    return true;
}

static void assert_same_logprobs(const struct step *s, const struct seen *tree,
                                 const struct seen *alone, int n)
{
    for (int i = 0; i < n; i++)
        for (int t = 0; t < s->completions[i].n; t++)
            if (tree->logprobs[i][t] != alone->logprobs[i][t])
                fail_msg("sequence %d, token %d: %.9g in a tree, %.9g alone", i, t,
                         (double)tree->logprobs[i][t], (double)alone->logprobs[i][t]);
}

static void one_model(void **state)
{
    static struct step s;
    struct seen tree = {.parts = 1}, alone = {.parts = 1}, parts = {.parts = TURNS};
    const float *of_conversations = NULL;
    reference_skip_inexact(*state);
    struct learning *l =
        learning_of(&(struct learning_setting){.folder = *state,
                                               .device = test_device(),
                                               .config = {.token_budget = ROWS,
                                                          .max_seqs = 2 * SEQUENCES,
                                                          .many_parts = true,
                                                          .max_context = CONTEXT}});
    step_make(l->policy.config->vocab_size, &s);
    make_parts(&s);
    const size_t elements = l->policy.weights->n_elements;
    assert_ok(learner_run(l->learner, PASS_STEP, s.groups, GROUPS, weighted, &tree, NULL));
    const float *of_tree = gradients_of(l);
    assert_ok(learner_run(l->learner, PASS_STEP, &s.conversations, 1, weighted, &parts, NULL));
    const float *of_parts = gradients_of(l);
    for (; alone.first < SEQUENCES; alone.first++) {
        if (alone.first == CONVERSATIONS * TURNS) of_conversations = gradients_of(l);
        assert_ok(learner_run(l->learner, alone.first == 0 ? PASS_STEP : PASS_GRADIENTS,
                              &s.alone[alone.first], 1, weighted, &alone, NULL));
    }
    assert_same_logprobs(&s, &tree, &alone, SEQUENCES);
    assert_same_logprobs(&s, &parts, &alone, CONVERSATIONS * TURNS);
    printf("%d rows in trees, %d alone\n", tree.rows, alone.rows);
    // one turn of all; of each conversation the others, and what was sampled, but its last token
    const int conversation = (TURNS - 1) * (READ + KEPT) + TURNS * (SAMPLED - 1);
    const int samples = 5 + 2 * SAMPLED - 1 + SAMPLED - 1;
    if (goes_over_trees(l->policy.config))
        assert_int_equal(tree.rows, READ + CONVERSATIONS * conversation + samples);
    if (goes_over_trees(l->policy.config))
        assert_int_equal(parts.rows, READ + CONVERSATIONS * conversation);
    assert_same_gradients(of_tree, gradients_of(l), elements, on_cpu() ? 1e-5 : 2e-2);
    assert_same_gradients(of_parts, of_conversations, elements, on_cpu() ? 1e-5 : 2e-2);
}

int main(int argc, char **argv)
{
    test_only(argc, argv);
    reference_list_golden(one_model, "");
    return test_main();
}
