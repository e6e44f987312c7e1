/* speculative.h: drafts of the tokens that may come next, and how many of them a step verifies.
 *
 * Drafters are "one-hot": they name one token a position, with no probabilities of their own.
 *   ngram   prompt look-up (Saxena 2023): the longest of the sequence's last 4..1 tokens that
 * stands earlier in prompt or completion; drafts what followed there suffix  what followed the same
 * last tokens in completions of the same prompt, by siblings of the group or by earlier requests
 * (suffix_memory.h); where nothing is known, as ngram
 *
 * Exactness. A row's token is drawn by Gumbel-max with noise that is a function of the sample's
 * seed and the token's position alone (kernels/ops.h, sample). Verification puts the last token and
 * the drafts d_1..d_k into one batch as k + 1 rows of the sequence, draws every row with the
 * ordinary operation at its own position, and keeps draws while draw i equals d_i; the first that
 * differs is the token itself, and after k equal ones the last row's draw is one token more. Every
 * token kept is thus the draw that a run without drafts would have made from the same prefix: the
 * output is that run's, token for token, under any temperature and cut, up to the rounding of rows
 * computed in batches of other shapes (none on the CPU, where a row's bits do not depend on its
 * batch). It follows that d_i is accepted with exactly the target's probability p(d_i), which is
 * the optimal rule for a one-hot draft (Leviathan et al. 2023), and that log-probabilities are the
 * target's.
 *
 * Draft length. Each sample carries a moving average of the chance that its next draft is accepted,
 * measured also on steps that verified nothing (the proposal is compared with what was drawn), and
 * the engine one for each length of the matched context; their mean is the chance counted on. With
 * the measured time of steps (step_cost.h) the plan takes the drafts, most promising first, that
 * maximise expected tokens per second over the whole batch: none where that does not pay.
 *
 * The engine's thread, but for speculative_parse(). */
#ifndef INFER_SERVER_SPECULATIVE_H
#define INFER_SERVER_SPECULATIVE_H

#include "common/base/status.h"
#include <stdint.h>

#define SPECULATIVE_MOST 16 // drafts of one sample in one step

enum speculative_method {
    SPECULATIVE_DEFAULT, // of a request: what the server does
    SPECULATIVE_OFF,
    SPECULATIVE_NGRAM,
    SPECULATIVE_SUFFIX
};
struct speculative_choice {
    enum speculative_method method;
    int k; // most drafts a step; 1..SPECULATIVE_MOST for a method that drafts
};

// "off", "ngram[:K]", "suffix[:K]". ST_INVALID; ST_UNSUPPORTED for "draft_model[:K]".
enum status speculative_parse(const char *text, struct speculative_choice *ret);
const char *speculative_name(enum speculative_method method);

// A sample's tokens, as drafters read them.
struct history {
    const int32_t *prompt, *generated;
    int n_prompt, n_generated;
    uint64_t prompt_key; // speculative_prompt_key(prompt)
};
uint64_t speculative_prompt_key(const int32_t *prompt, int n);

struct draft { // a sample's; all zero before its first
    int32_t tokens[SPECULATIVE_MOST];
    int n;        // proposed
    int n_verify; // of these, wanted in the next step
    int matched;  // tokens of the context that the first stands on: how sure it is
    bool judged;  // acceptance was measured once
    double acceptance, chance;
};

struct speculative;
// fixed: verifies all that is proposed, whether it pays or not (tests, measurements). max_rows: the
// most drafts of one step.
enum status speculative_new(bool fixed, int max_rows, struct speculative **ret);
void speculative_free(struct speculative *s);

// Proposes at most min(choice.k, room) tokens to follow; n may be 0.
void speculative_propose(struct speculative *s, struct speculative_choice choice,
                         const struct history *history, int room, struct draft *draft);
// Sets n_verify of each of the drafts of one step; n_seqs: sequences that decode in it.
void speculative_plan(struct speculative *s, struct draft *const *drafts, int n, int n_seqs);
// The step is over: of n_verified drafts the first n_accepted were drawn. With n_verified 0,
// n_accepted says whether the first proposal (0 or 1) would have been.
void speculative_judge(struct speculative *s, struct speculative_choice choice, struct draft *draft,
                       int n_verified, int n_accepted);
// The history's last token was just drawn.
void speculative_learn(struct speculative *s, struct speculative_choice choice,
                       const struct history *history);
// A step of decoding only took so long.
void speculative_step_took(struct speculative *s, int n_rows, bool verified, double ms);

#endif
