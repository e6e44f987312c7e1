/* samples.h: what is learned from: groups of completions, each behind one prompt, and what a loss
 * may want of them. Whoever has a rollout, a data set or a request fills it in; nothing here knows
 * which it was. Plain data; what it points to is borrowed.
 *
 * A step's samples are cut into micro-batches of at most token_budget rows, without padding. A
 * completion behind its prompt is a sequence; one of several parts is a sequence a part, each
 * behind the prompt and a context of its own, and stays in one micro-batch. Sequences of a
 * micro-batch are packed as trees, by their tokens: what several begin with alike is computed once,
 * be it a group's prompt, the turns that two conversations share or the system prompt of all. A
 * completion of n tokens has n targets but a part of n tokens only n - 1 rows: its first token is
 * predicted by the row before, and its last token predicts nothing that counts. Targets are each
 * completion's own, also where their rows are shared: what passes through a row adds up in its
 * gradient. What is predicted may be given instead, several targets for each token: its row's
 * logits then count for all of them. Where a teacher reads another prompt, its rows count for the
 * budget, too. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_SAMPLES_H
#define TRAINER_SAMPLES_H

#include "common/base/status.h"
#include "common/constraint/constraint.h"

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>

enum token_author {
    AUTHOR_OTHER, // an environment, a template or whoever else: nothing is learned of the token
    AUTHOR_POLICY,
    AUTHOR_FROZEN // a tandem's other model, whose tokens the loss gives a weight of their own
};

enum loss_input {     // arrays of one entry a target
    INPUT_ADVANTAGES, // in place of the completion's
    INPUT_WEIGHTS,
    INPUT_LOGPROBS,   // the sampler's, of the distribution that was sampled from
    INPUT_RATIO_MASK, // not 0: the token counts for its sequence's ratio
    INPUT_CLIP_LOW,   // bounds of the ratio instead of the loss's
    INPUT_CLIP_HIGH,
    LOSS_INPUTS
};

struct pack_part { // tokens of a completion, up to the next part's, that stand behind a context
    int first;
    int begin, n_context; // among the completion's sequences: the context, and these tokens behind
};
struct pack_completion {
    const int32_t *ids; // (n)
    int n;              // may be 0: nothing to learn from it
    // (n_parts) of at least one token each; NULL: one, right behind the prompt
    const struct pack_part *parts;
    int n_parts, n_sequences;
    const int32_t *sequences; // (n_sequences) of its parts, behind the prompt
    // (n, targets_each) instead of the n ids; NULL: these
    const int32_t *targets;
    int targets_each;
    // of the loss
    bool masked;                      // it does not count
    bool given;                       // of a data set, beside what was sampled: a teacher's alone
    float advantage;                  // of all its tokens
    double reference;                 // its log-probability by a reference: of pairs
    const float *inputs[LOSS_INPUTS]; // (n, targets_each); NULL: not given
    const uint8_t *authors;           // (n) enum token_author; NULL: the policy wrote all
    // of a server that sampled it
    const float *server_logprobs; // (n) of its temperature-scaled distribution; NULL: not given
    const uint64_t *versions;     // (n) of its weights; NULL: not given
    int line, number;             // in the data set, and among its line's samples; for errors
};
struct pack_group {
    const int32_t *prompt; // (n_prompt); n_prompt >= 1
    int n_prompt;
    const int32_t *teacher_prompt; // (n_teacher_prompt) what a teacher reads instead; NULL: that
    int n_teacher_prompt;
    const struct pack_completion *completions; // (n)
    int n;
    bool whole; // its completions stay in one micro-batch: the loss compares them
    // Log-probabilities are of what it leaves, of completions that it takes; NULL: of all tokens.
    struct constraint *constraint; // held until samples_free()
};

static inline enum token_author token_author(const uint8_t *authors, int t)
{
    return authors ? (enum token_author)authors[t] : AUTHOR_POLICY;
}
static inline bool completion_wrote(const struct pack_completion *c, int t) // the policy, its t-th
{
    return token_author(c->authors, t) == AUTHOR_POLICY;
}

struct samples {
    int n_groups, n;
    struct pack_group *groups;           // (n_groups)
    struct pack_completion *completions; // (n) those of a group together, in the groups' order
    bool noted; // what follows is there before anything is learned, of all of them
    // by samples_begin()
    long *first;      // (n + 1) where each completion's targets begin in what follows
    float *logprobs;  // by the weights before the first update; 0 for those that another rank has
    float *entropies; // of the distributions; likewise
    uint8_t *chosen;  // the token counts for the policy's term: by default what the policy wrote
};
// As many groups of equal size, without anything in them; given: and behind each another of one
// completion, whose completions come behind all others. samples_free() takes half-made ones and
// NULL.
enum status samples_new(int n_groups, int n_per_group, bool given, struct samples **ret);
// Once they are filled in, and before anything is learned from them; on failure frees them.
enum status samples_begin(struct samples *s, struct samples **ret);
void samples_free(struct samples *s);

// ---- packed into micro-batches ------------------------------------------------------------------

struct batch;
// Rows that go on behind all of their parent's, whose tokens a prompt (completion -1) or a
// completion has.
struct pack_node {
    int parent; // an earlier one of the micro-batch; -1: none
    int group, completion;
    const int32_t *ids; // (n)
    int n;
    int position; // of its first row: how many its ancestors have
    int row;      // of the micro-batch
};
struct pack_seq { // a completion, those without tokens included
    int group, completion;
    int n_parts;
    int *leaves; // (n_parts) the node with the last row of each
};
static inline const struct pack_completion *packed_completion(const struct pack_seq *seq,
                                                              const struct pack_group *groups)
{
    return &groups[seq->group].completions[seq->completion];
}
struct micro_batch {
    int n_seqs;
    struct pack_seq *seqs; // (n_seqs)
    int *sample;           // (n_seqs) number of each over all groups, in their order
    int *first;            // (n_seqs + 1) where its targets start
    int n_nodes;
    struct pack_node *nodes; // (n_nodes) depth first
    int n_tokens;            // rows
    int64_t cost;            // of the budget, beside its rows: of targets, and what a teacher reads
};
struct packing {
    int n;
    struct micro_batch *batches;
    struct pack_seq *seqs; // of all of them, one after the other
    struct pack_node *nodes;
    int *samples, *firsts, *leaves;
    int n_leaves;
};
// Rows that sequences must have in common at least for these to be computed once, which costs
// attention tiles that are not full. A group's prompt always is; PACK_PROMPTS: and nothing else.
#define PACK_MIN_SHARED 32
#define PACK_PROMPTS    INT_MAX

// A prompt with one completion, or a whole group, that is over the budget is ST_INVALID and names
// --token-budget.
enum status packing_new(const struct pack_group *groups, int n_groups, int token_budget,
                        int min_shared, struct packing **ret);
// The sequences of a micro-batch, in its order, behind other prompts: one micro-batch.
enum status packing_again(const struct micro_batch *mb, const struct pack_group *groups,
                          int min_shared, struct packing **ret);
void packing_free(struct packing *p);
// How many of a completion's parts, from the first on, have room in a micro-batch of its own.
enum status packing_parts(const struct pack_group *group, int completion, int token_budget,
                          int min_shared, int *ret);

// Puts a micro-batch into an empty `batch` (not yet committed) and its targets, first[n_seqs] of
// them, into ret_targets; row i of the batch's wanted rows predicts target i. adapter: whose all
// are computed with (model.h); -1: none.
enum status packing_fill(const struct micro_batch *mb, const struct pack_group *groups, int adapter,
                         struct batch *batch, int32_t *ret_targets);

// Of each row of `behind`, the same sequences without their first tokens (packing_again()): the row
// of mb that has the token before.
void packing_before(const struct micro_batch *mb, const struct micro_batch *behind,
                    int32_t *ret_rows);

// Of the rows that packing_fill() makes: whose they are, of PACK_PROMPTS the same for a sample (or
// a group's prompt) however it is packed. Dropout goes by it.
void packing_samples(const struct micro_batch *mb, int32_t *ret_samples);

// Of its targets, first[n_seqs]; the constraints are borrowed, NULL: none. ST_MISMATCH: of a
// completion that its constraint does not take.
enum status packing_constraints(const struct micro_batch *mb, const struct pack_group *groups,
                                struct constraint_row *ret);

#endif
