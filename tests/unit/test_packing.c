/* test_packing.c: trainer/learn/samples (budgets, rows, targets, trees) and learner: whatever the
 * packing, the same log-probabilities and gradients. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "tests/support/learning.h"
#include "tests/support/random_step.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"

#define VOCAB   64
#define GROUPS  3
#define PER     4
#define SAMPLES (GROUPS * PER)
#define LONGEST 9
static const int prompt_lengths[GROUPS] = {5, 1, 7};
static const int lengths[SAMPLES] = {3, 1, 9, 2, 0, 4, 5, 1, 2, 8, 0, 6};

static const struct step_shape shape = {GROUPS, PER, prompt_lengths, lengths, VOCAB, 9};

static int rows_of(int n)
{
    return n > 1 ? n - 1 : 0;
}

TEST(covers_every_sample_within_budget)
{
    struct random_step s;
    random_step_make(&shape, &s);
    for (int budget = 15; budget <= 70; budget++) {
        struct packing *p;
        int next = 0;
        assert_ok(packing_new(s.groups, GROUPS, budget, PACK_PROMPTS, &p));
        for (int b = 0; b < p->n; b++) {
            const struct micro_batch *mb = &p->batches[b];
            int rows = 0, seq = 0;
            assert_true(mb->n_tokens <= budget);
            assert_int_equal(mb->first[0], 0);
            for (; seq < mb->n_seqs; seq++) {
                int group = mb->seqs[seq].group, sample = group * PER + mb->seqs[seq].completion;
                assert_int_equal(sample, next++); // in order, none left out
                assert_int_equal(mb->sample[seq], sample);
                assert_int_equal(mb->first[seq + 1] - mb->first[seq], lengths[sample]);
                if (seq == 0 || mb->seqs[seq - 1].group != group) rows += prompt_lengths[group];
                rows += rows_of(lengths[sample]);
            }
            assert_int_equal(rows, mb->n_tokens);
        }
        assert_int_equal(next, SAMPLES);
        if (budget == 70) assert_int_equal(p->n, 1);
        packing_free(p);
    }
}

TEST(too_long_is_refused)
{
    struct random_step s;
    struct packing *p = NULL;
    random_step_make(&shape, &s);
    assert_fails(packing_new(s.groups, GROUPS, 12, PACK_PROMPTS, &p), ST_INVALID, "--token-budget");
    assert_message("5 tokens with a completion of 9");
    assert_null(p);
}

TEST(whole_groups_stay_together)
{
    struct random_step s;
    struct packing *p;
    random_step_make(&shape, &s);
    for (int g = 0; g < GROUPS; g++) s.groups[g].whole = true;
    // 16, 8 and 20 rows
    for (int budget = 20; budget <= 70; budget++) {
        int groups = 0;
        assert_ok(packing_new(s.groups, GROUPS, budget, PACK_PROMPTS, &p));
        for (int b = 0; b < p->n; b++) {
            assert_true(p->batches[b].n_tokens <= budget);
            assert_int_equal(p->batches[b].n_seqs % PER, 0);
            groups += p->batches[b].n_seqs / PER;
        }
        assert_int_equal(groups, GROUPS);
        packing_free(p);
    }
    assert_fails(packing_new(s.groups, GROUPS, 19, PACK_PROMPTS, &p), ST_INVALID,
                 "a prompt of 7 tokens with its 4 completions, which have to stand in one");
}

// ---- trees --------------------------------------------------------------------------------------

enum { SEQUENCES = 40, LENGTH = 160 };

struct sequences { // each a group of its own
    int32_t ids[SEQUENCES][LENGTH];
    int n[SEQUENCES];
    struct pack_completion completions[SEQUENCES];
    struct pack_group groups[SEQUENCES];
};

// Each begins as one before it does, and is cut into prompt and completion anywhere.
static void make_sequences(struct sequences *s)
{
    struct rng rng;
    rng_init(&rng, 7, 0);
    for (int i = 0; i < SEQUENCES; i++) {
        const int n = 8 + (int)rng_below(&rng, LENGTH - 8),
                  prompt = 1 + (int)rng_below(&rng, (uint32_t)n - 2);
        const int shared = i > 0 ? (int)rng_below(&rng, LENGTH) : 0;
        if (i > 0) memcpy(s->ids[i], s->ids[rng_below(&rng, (uint32_t)i)], sizeof s->ids[i]);
        for (int t = shared; t < LENGTH; t++) s->ids[i][t] = (int32_t)rng_below(&rng, VOCAB);
        s->n[i] = n;
        s->completions[i] = (struct pack_completion){.ids = s->ids[i] + prompt, .n = n - prompt};
        s->groups[i] = (struct pack_group){
            .prompt = s->ids[i], .n_prompt = prompt, .completions = &s->completions[i], .n = 1};
    }
}

static bool begin_alike(const struct sequences *s, int a, int b, int n)
{
    return s->n[a] > n && s->n[b] > n &&
           memcmp(s->ids[a], s->ids[b], (size_t)n * sizeof **s->ids) == 0;
}

// Rows that are distinct by all tokens up to them.
static int distinct_rows(const struct sequences *s)
{
    int rows = 0;
    for (int i = 0; i < SEQUENCES; i++)
        for (int n = 1; n < s->n[i]; n++) {
            int first = 0;
            while (!begin_alike(s, first, i, n)) first++;
            rows += first == i;
        }
    return rows;
}

// Rows lie depth first; those of a sequence's path are its own tokens, and end with its last row.
static void check_trees(const struct sequences *s, const struct micro_batch *mb)
{
    int row = 0;
    for (int i = 0; i < mb->n_nodes; i++) {
        const struct pack_node *node = &mb->nodes[i];
        const int parent = node->parent;
        int open = i - 1; // the parent is the node before, or above it
        while (open > parent && open >= 0) open = mb->nodes[open].parent;
        assert_int_equal(open, parent);
        assert_int_equal(node->row, row);
        assert_int_equal(node->position,
                         parent < 0 ? 0 : mb->nodes[parent].position + mb->nodes[parent].n);
        row += node->n;
    }
    assert_int_equal(row, mb->n_tokens);
    for (int k = 0; k < mb->n_seqs; k++) {
        const int seq = mb->seqs[k].group;
        int end = s->n[seq] - 1;
        for (int i = mb->seqs[k].leaves[0]; i >= 0; i = mb->nodes[i].parent) {
            const struct pack_node *node = &mb->nodes[i];
            assert_int_equal(node->position + node->n, end);
            assert_memory_equal(node->ids, s->ids[seq] + node->position,
                                (size_t)node->n * sizeof *node->ids);
            end = node->position;
        }
        assert_int_equal(end, 0);
    }
}

TEST(trees_hold_every_sequence)
{
    static struct sequences s;
    static const int budgets[] = {LENGTH, 3 * LENGTH, SEQUENCES * LENGTH},
                     least[] = {1, PACK_MIN_SHARED, PACK_PROMPTS};
    int rows[3][3] = {{0}}, all = 0;
    make_sequences(&s);
    for (int i = 0; i < SEQUENCES; i++) all += s.n[i] - 1;
    for (int b = 0; b < 3; b++)
        for (int k = 0; k < 3; k++) {
            struct packing *p;
            assert_ok(packing_new(s.groups, SEQUENCES, budgets[b], least[k], &p));
            for (int i = 0; i < p->n; i++) {
                assert_true(p->batches[i].n_tokens <= budgets[b]);
                check_trees(&s, &p->batches[i]);
                rows[b][k] += p->batches[i].n_tokens;
            }
            packing_free(p);
            assert_true(k < 2 ? rows[b][k] < all : rows[b][k] == all);
        }
    assert_int_equal(rows[2][0], distinct_rows(&s));
    assert_true(rows[2][0] < rows[2][1]);
}

// ---- parts --------------------------------------------------------------------------------------

enum { PARTS = 6, PART_TOKENS = 9, SAMPLED_TOKENS = 3, KEEPERS = 4 };

// Completions of PARTS parts of SAMPLED_TOKENS, each behind PART_TOKENS more than the one before.
struct keepers {
    int32_t prompt[5], read[KEEPERS][PARTS * PART_TOKENS], sequences[KEEPERS][400],
        ids[KEEPERS][PARTS * SAMPLED_TOKENS];
    struct pack_part parts[KEEPERS][PARTS];
    struct pack_completion completions[KEEPERS];
    struct pack_group group;
};

static void make_keepers(struct keepers *k)
{
    for (int t = 0; t < 5; t++) k->prompt[t] = t;
    for (int c = 0; c < KEEPERS; c++) {
        int n = 0;
        for (int t = 0; t < PARTS * PART_TOKENS; t++) k->read[c][t] = 100 * (c + 1) + t;
        for (int t = 0; t < PARTS * SAMPLED_TOKENS; t++) k->ids[c][t] = 1000 * (c + 1) + t;
        for (int p = 0; p < PARTS; n += p++ * PART_TOKENS + SAMPLED_TOKENS) {
            k->parts[c][p] = (struct pack_part){p * SAMPLED_TOKENS, n, p * PART_TOKENS};
            memcpy(k->sequences[c] + n, k->read[c], (size_t)(p * PART_TOKENS) * sizeof(int32_t));
            memcpy(k->sequences[c] + n + p * PART_TOKENS, k->ids[c] + p * SAMPLED_TOKENS,
                   SAMPLED_TOKENS * sizeof(int32_t));
        }
        k->completions[c] = (struct pack_completion){.ids = k->ids[c],
                                                     .n = PARTS * SAMPLED_TOKENS,
                                                     .parts = k->parts[c],
                                                     .n_parts = PARTS,
                                                     .sequences = k->sequences[c]};
    }
    k->group = (struct pack_group){
        .prompt = k->prompt, .n_prompt = 5, .completions = k->completions, .n = KEEPERS};
}

// A part's path is the prompt, its context and its own tokens but the last.
static void check_part(const struct keepers *k, const struct micro_batch *mb,
                       const struct pack_seq *seq, int p)
{
    const struct pack_part *part = &k->parts[seq->completion][p];
    int32_t ids[5 + PARTS * PART_TOKENS + SAMPLED_TOKENS];
    int end = 5 + part->n_context + SAMPLED_TOKENS - 1;
    memcpy(ids, k->prompt, sizeof k->prompt);
    memcpy(ids + 5, k->read[seq->completion], (size_t)part->n_context * sizeof *ids);
    memcpy(ids + 5 + part->n_context, k->ids[seq->completion] + part->first,
           SAMPLED_TOKENS * sizeof *ids);
    for (int i = seq->leaves[p]; i >= 0; i = mb->nodes[i].parent) {
        const struct pack_node *node = &mb->nodes[i];
        assert_int_equal(node->position + node->n, end);
        assert_memory_equal(node->ids, ids + node->position, (size_t)node->n * sizeof *ids);
        end = node->position;
    }
    assert_int_equal(end, 0);
}

// All parts of a completion stand in one micro-batch, within the budget; what has no room there is
// known before.
TEST(parts_stay_together)
{
    static struct keepers k;
    // alone behind the prompt, if each shares its context with the one before
    const int alone = (PARTS - 1) * PART_TOKENS + PARTS * (SAMPLED_TOKENS - 1);
    static const int least[] = {1, PACK_PROMPTS};
    make_keepers(&k);
    for (int l = 0; l < 2; l++)
        for (int budget = 5 + alone + PARTS; budget < 1000; budget += 37) {
            struct packing *p;
            int parts, n = 0, rows = 0;
            assert_ok(packing_parts(&k.group, 0, budget, least[l], &parts));
            assert_true(l > 0 || parts == PARTS);
            if (parts < PARTS) {
                assert_fails(packing_new(&k.group, 1, budget, least[l], &p), ST_INVALID,
                             "raise --token-budget");
                continue;
            }
            assert_ok(packing_new(&k.group, 1, budget, least[l], &p));
            for (const struct micro_batch *mb = p->batches; mb < p->batches + p->n; mb++) {
                assert_true(mb->n_tokens <= budget);
                rows += mb->n_tokens;
                for (int s = 0; s < mb->n_seqs; s++, n++) {
                    assert_int_equal(mb->sample[s], n);
                    assert_int_equal(mb->first[s + 1] - mb->first[s], PARTS * SAMPLED_TOKENS);
                    for (int i = 0; i < PARTS; i++) check_part(&k, mb, &mb->seqs[s], i);
                }
            }
            assert_int_equal(n, KEEPERS);
            if (l == 0) assert_int_equal(rows, 5 * p->n + KEEPERS * alone);
            packing_free(p);
        }
    int parts;
    assert_ok(packing_parts(&k.group, 0, 5 + alone + PARTS - 1, 1, &parts));
    assert_int_equal(parts, PARTS - 1);
    assert_ok(packing_parts(&k.group, 0, 5 + SAMPLED_TOKENS, PACK_PROMPTS, &parts));
    assert_int_equal(parts, 1);
}

// ---- through a model ----------------------------------------------------------------------------

static struct learning *model(int budget, int logits_chunk, bool reference)
{
    return learning_of(&(struct learning_setting){.folder = tiny_folder(32, 2, VOCAB, 3),
                                                  .reference = reference,
                                                  .config = {.temperature = 0.7f,
                                                             .token_budget = budget,
                                                             .logits_chunk = logits_chunk,
                                                             .max_seqs = SAMPLES + GROUPS,
                                                             .max_context = 32}});
}

struct seen {
    float logprobs[SAMPLES][LONGEST], ref[SAMPLES][LONGEST], entropy[SAMPLES][LONGEST];
    double loss;
};

// A loss with another weight for every token.
static double weight(int sample, int t)
{
    return 0.1 * (1 + sample % 5) - 0.03 * t;
}

static void weighted_sum(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    struct seen *seen = context;
    for (int s = 0; s < rows->mb->n_seqs; s++) {
        int sample = rows->mb->sample[s], first = rows->mb->first[s];
        for (int t = 0; t < lengths[sample]; t++) {
            seen->logprobs[sample][t] = rows->logprobs[first + t];
            seen->entropy[sample][t] = rows->entropy[first + t];
            if (rows->ref_logprobs) seen->ref[sample][t] = rows->ref_logprobs[first + t];
            seen->loss += weight(sample, t) * rows->logprobs[first + t];
            ret_dlogprobs[first + t] = (float)weight(sample, t);
        }
    }
}

TEST(packing_changes_nothing)
{
    struct random_step s;
    struct seen a = {0}, b = {0};
    random_step_make(&shape, &s);
    // the second computes a prompt again for nearly every completion
    struct learning *whole = model(70, 100, true), *cut = model(15, 3, false);
    assert_ok(learner_run(whole->learner, PASS_STEP, s.groups, GROUPS, weighted_sum, &a, NULL));
    assert_ok(learner_run(cut->learner, PASS_STEP, s.groups, GROUPS, weighted_sum, &b, NULL));
    for (int i = 0; i < SAMPLES; i++)
        for (int t = 0; t < lengths[i]; t++) {
            assert_true(a.logprobs[i][t] < 0 && a.entropy[i][t] > 0);
            assert_near(a.logprobs[i][t], b.logprobs[i][t], 1e-5);
            assert_near(a.entropy[i][t], b.entropy[i][t], 1e-5);
            // the reference is the policy itself here
            assert_near(a.logprobs[i][t], a.ref[i][t], 1e-5);
        }
    assert_same_gradients(learning_gradients(whole), learning_gradients(cut),
                          whole->policy.weights->n_elements, 1e-5);
}

TEST(gradient_is_a_slope)
{
    struct random_step s;
    struct seen seen = {0}, up = {0}, down = {0};
    double norm;
    random_step_make(&shape, &s);
    struct learning *m = model(30, 4, false);
    assert_ok(learner_run(m->learner, PASS_STEP, s.groups, GROUPS, weighted_sum, &seen, NULL));
    assert_ok(optimizer_prepare(learning_optimizer(m), &norm));
    const size_t n = (size_t)m->policy.weights->n_elements;
    float *w = m->policy.weights->base;
    const float *g = test_copy(learning_gradients(m), n * sizeof *g),
                *saved = test_copy(w, n * sizeof *w);
    const double h = 2e-3 / norm;
    for (size_t i = 0; i < n; i++) w[i] = saved[i] + (float)(h * g[i]);
    assert_ok(learner_run(m->learner, PASS_LOSS, s.groups, GROUPS, weighted_sum, &up, NULL));
    for (size_t i = 0; i < n; i++) w[i] = saved[i] - (float)(h * g[i]);
    assert_ok(learner_run(m->learner, PASS_LOSS, s.groups, GROUPS, weighted_sum, &down, NULL));
    assert_near((up.loss - down.loss) / (2 * h), norm * norm, 0.01 * norm * norm);
}

TEST(no_signal_no_gradient)
{
    struct random_step s;
    double norm = -1;
    random_step_make(&shape, &s);
    for (int i = 0; i < SAMPLES; i++) s.completions[i].n = i < PER ? lengths[i] : 0;
    struct learning *m = model(30, 4, false);
    assert_ok(learner_run(m->learner, PASS_STEP, s.groups, GROUPS, learning_no_loss, NULL, NULL));
    assert_ok(optimizer_prepare(learning_optimizer(m), &norm));
    assert_true(norm == 0);
}

TEST(memory_is_planned)
{
    struct learning *m = model(30, 4, true);
    const struct memory_plan plan = learner_info(m->learner)->memory;
    assert_int_equal(plan.weights_shared, m->policy.weights->bytes);
    assert_int_equal(plan.residual, 0);
    assert_true(plan.activations >= tape_bytes(m->policy.config, DT_F32, 30, RECOMPUTE_NONE));
    assert_true(plan.reference > m->policy.weights->bytes);
    assert_int_equal(plan.total, plan.residual + plan.moments + plan.gradients + plan.activations +
                                     plan.workspace + plan.reference);
}

// Where a step has fewer targets than rows there is less to keep, and nothing else.
TEST(memory_follows_targets)
{
    struct random_step s;
    struct seen a = {0}, b = {0};
    int targets = 0;
    random_step_make(&shape, &s);
    for (int i = 0; i < SAMPLES; i++) targets += lengths[i];
    struct learning *of_rows = model(1000, 4, false),
                    *of_targets = learning_of(
                        &(struct learning_setting){.folder = tiny_folder(32, 2, VOCAB, 3),
                                                   .config = {.temperature = 0.7f,
                                                              .token_budget = 1000,
                                                              .logits_chunk = 4,
                                                              .max_seqs = SAMPLES + GROUPS,
                                                              .max_targets = targets,
                                                              .max_context = 32}});
    assert_ok(learner_run(of_rows->learner, PASS_STEP, s.groups, GROUPS, weighted_sum, &a, NULL));
    assert_ok(
        learner_run(of_targets->learner, PASS_STEP, s.groups, GROUPS, weighted_sum, &b, NULL));
    assert_memory_equal(&a, &b, sizeof a);
    assert_memory_equal(learning_gradients(of_rows), learning_gradients(of_targets),
                        of_rows->policy.weights->n_elements * sizeof(float));
    assert_true(learner_info(of_targets->learner)->memory.workspace <
                learner_info(of_rows->learner)->memory.workspace);
}

// A budget beyond any machine's memory is refused with figures, before memory is taken.
TEST(no_room_is_said)
{
    struct learner *l = NULL;
    struct learner_config options = {.temperature = 1,
                                     .token_budget = 2000000000,
                                     .logits_chunk = 4,
                                     .max_seqs = 10,
                                     .max_context = 32};
    struct learning *m = model(30, 4, false);
    assert_fails(
        learner_new(m->policy.dev, m->policy.config, m->policy.weights, false, &options, &l),
        ST_NO_MEMORY, "--token-budget");
    assert_message("GiB are free");
    assert_null(l);
}
