/* speculative.h: drafts of the tokens that may come next, and how many of them a step verifies.
 *
 * The methods are listed in method.h. A sample may use several at once: each step takes the
 * proposal of the one that promises most. All but the draft model's are deterministic drafts: one
 * token a position, with no probabilities of its own.
 *
 * Exactness. Verification puts the last token and the drafts d_1..d_k into one batch as k + 1 rows
 * of the sequence and samples every row at its own position; what was sampled is kept up to and
 * with the first that differs from its draft, and after k equal ones the last row's is one token
 * more.
 *
 * A deterministic draft has no part in the sampling of its row: that is Gumbel-max with noise that
 * is a function of the sample's seed and the token's position alone (kernels/ops.h, sample). Every
 * token kept is thus the one that a run without drafts would have sampled from the same prefix: the
 * output is that run's, token for token, under any temperature and filtering, up to the rounding of
 * rows computed in batches of other shapes (none on the CPU, where a row's bits do not depend on
 * its batch). It follows that d_i is accepted with exactly the target's probability p(d_i), which
 * is the optimal rule for a deterministic draft.
 *
 * A draft model samples d_i from a distribution q of its own, after the request's temperature and
 * filtering, with noise of a stream of its own; its row is sampled by rejection (Leviathan et al.
 * 2023; Chen et al. 2023): d_i with probability min(1, p(d_i) / q(d_i)), else a token of the
 * residual max(p - q, 0). The output's distribution is the target's, and the acceptance rate the
 * largest there is, sum min(p, q). Greedy output is that of a run without drafts; sampled output
 * has its distribution, but is another sample of it.
 *
 * Exact mode (engine_options.exact). Rejection makes a token depend on whether its position was
 * drafted, and so on all that decides that: measured times, room in a batch and in the KV cache,
 * preemption. There a draft model's drafts share the policy's Gumbel noise instead: they are
 * sampled with the noise of its own token at that position, and accepted where it samples the same
 * (Daliri, Musco and Suresh 2025, "drafter-invariant"). The row is sampled as for a deterministic
 * draft, so that the output is that of a run without drafts, token for token, sampled too.
 * Acceptance rate: at least (1 - t) / (1 + t) where rejection has 1 - t, t being the total
 * variation between p and q.
 *
 * Log-probabilities are the target's in all cases.
 *
 * How much is drafted: speculative.c.
 *
 * The engine's thread, but for speculative_parse() and speculative_write(). */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_SPECULATIVE_H
#define INFER_SERVER_SPECULATIVE_H

#include "common/base/status.h"
#include "infer-server/speculative/method.h"
#include <stdbool.h>
#include <stdint.h>

struct step_cost;

struct speculative_choice {
    bool chosen;                // false, of a request: what the server does
    int k[SPECULATIVE_METHODS]; // most drafts a step, 1..SPECULATIVE_MOST; 0: method not used
};

// "off", or methods with commas between them: "ngram[:K]", "suffix[:K]", "draft_model[:K]",
// "mtp[:K]".
// ST_INVALID.
enum status speculative_parse(const char *text, struct speculative_choice *ret);
void speculative_write(struct speculative_choice choice, char ret[64]); // as parse() reads it
int speculative_max(struct speculative_choice choice); // drafts a step by any method; 0: off

uint64_t speculative_prompt_key(const int32_t *prompt, int n);

struct speculative;
// fixed: verifies all that is proposed, whether it pays or not (tests, measurements). max_rows: the
// most drafts of one step.
enum status speculative_new(bool fixed, int max_rows, struct speculative **ret);
void speculative_free(struct speculative *s);

// Whether a sample of this choice is to propose() in the next step.
bool speculative_wants_drafts(const struct speculative *s, struct speculative_choice choice);
// Proposes at most `room` tokens to follow, by the method that promises most; n may be 0.
void speculative_propose(struct speculative *s, struct speculative_choice choice,
                         const struct history *history, int room, struct draft *draft);
// Sets n_verify of each of the drafts of one step. n_seqs: sequences that decode in it; attended:
// the lengths of their contexts, summed.
void speculative_plan(struct speculative *s, struct draft *const *drafts, int n, int n_seqs,
                      int64_t attended);
// A sample's step is over: of n_verified drafts the first n_accepted were sampled, and it got
// n_saved tokens beyond one. With n_verified 0, n_accepted says whether the first proposal (0 or 1)
// would have been; a draft model's was never made, and says nothing.
void speculative_verified(struct speculative *s, const struct draft *draft, int n_verified,
                          int n_accepted, int n_saved);
// The history's last token was just sampled.
void speculative_learn(struct speculative *s, struct speculative_choice choice,
                       const struct history *history);

struct step_report {    // of a step
    bool decodes;       // nothing but decoding sequences was in it
    bool warm;          // no pass nor the step, if it decodes, was among the first of its shape
    int n_seqs, n_rows; // decoding sequences; these and their drafts, as the device ran them
    int64_t attended;   // the sequences' contexts, summed
    double look_ms;     // for proposals and the plan
    double draft_ms;    // for the draft model's passes, at the table's prices
    int n_caught_up;    // tokens of samples' pasts that passes of their own computed
    double catch_up_ms; // for those passes
    double step_ms;     // for the rest
};
void speculative_step_over(struct speculative *s, const struct step_report *report);
// The same of a step that drafted nothing, whose time is not one step's.
void speculative_stepped(struct speculative *s, double ms);
// The draft model computed so many tokens of prompts; ms: of that, where it was measured, else 0.
void speculative_prompts_took(struct speculative *s, int n_tokens, double ms);
// Whether the draft model is worth its prompts' passes: it was shown to pay.
bool speculative_model_pays(const struct speculative *s, enum speculative_method method);

// What steps and the draft model's passes take: for whoever measures.
struct step_cost *speculative_step_cost(struct speculative *s);
struct step_cost *speculative_pass_cost(struct speculative *s);

#endif
