/* speculative.h: drafts of the tokens that may come next, and how many of them a step verifies.
 *
 * Methods, of which a sample may use several at once: each step takes the proposal of the one that
 * promises most.
 *   ngram        prompt look-up (Saxena 2023): the longest of the sequence's last 4..1 tokens that
 *                stands earlier in prompt or completion; drafts what followed there
 *   suffix       what followed the same last tokens in completions of the same prompt, by siblings
 *                of the group or by earlier requests (suffix_memory.h); where nothing is known, as
 *                ngram
 *   draft_model  what a smaller model of the same tokenizer draws (draft_model.h)
 * The first two are "one-hot": they name one token a position, with no probabilities of their own.
 *
 * Exactness. Verification puts the last token and the drafts d_1..d_k into one batch as k + 1 rows
 * of the sequence and draws every row at its own position; draws are kept up to and with the first
 * that differs from its draft, and after k equal ones the last row's draw is one token more.
 *
 * A one-hot draft has no part in the draw of its row: that is Gumbel-max with noise that is a
 * function of the sample's seed and the token's position alone (kernels/ops.h, sample). Every token
 * kept is thus the one that a run without drafts would have drawn from the same prefix: the output
 * is that run's, token for token, under any temperature and cut, up to the rounding of rows
 * computed in batches of other shapes (none on the CPU, where a row's bits do not depend on its
 * batch). It follows that d_i is accepted with exactly the target's probability p(d_i), which is
 * the optimal rule for a one-hot draft.
 *
 * A draft model draws d_i from a distribution q of its own, after the request's temperature and
 * cuts, with noise of a stream of its own; its row is drawn by rejection (Leviathan et al. 2023;
 * Chen et al. 2023): d_i with probability min(1, p(d_i) / q(d_i)), else a token of the residual
 * max(p - q, 0). The output's distribution is the target's, and the chance of acceptance the
 * largest there is, sum min(p, q). Greedy output is that of a run without drafts; sampled output
 * has its distribution, but is another sample of it.
 *
 * Exact mode (engine_options.exact). Rejection makes a token depend on whether its position was
 * drafted, and so on all that decides that: measured times, room in a batch and in the KV cache,
 * preemption. There a draft model's drafts are coupled instead: they are drawn with the noise of
 * the policy's own draw at that position, and accepted where the policy draws the same (Daliri,
 * Musco and Suresh 2025, "drafter-invariant"). The row is drawn as for a one-hot draft, so that the
 * output is that of a run without drafts, token for token, sampled too. Chance of acceptance: at
 * least (1 - t) / (1 + t) where rejection has 1 - t, t being the total variation between p and q.
 *
 * Log-probabilities are the target's in all cases.
 *
 * Draft length. Each sample carries for each method a moving average of the chance that its next
 * draft is accepted, measured for one-hot drafts also on steps that verified nothing (the proposal
 * is compared with what was drawn), and the engine one for each length of the matched context;
 * their mean is the chance counted on. With the time of steps and of the draft model's passes
 * (step_cost.h) the plan takes the drafts, most promising first, that maximise expected tokens per
 * second over the whole batch: none where that does not pay.
 *
 * The engine's thread, but for speculative_parse() and speculative_write(). */
#ifndef INFER_SERVER_SPECULATIVE_H
#define INFER_SERVER_SPECULATIVE_H

#include "common/base/status.h"
#include <stdbool.h>
#include <stdint.h>

struct step_cost;

#define SPECULATIVE_MOST 16 // drafts of one sample in one step

enum speculative_method {
    SPECULATIVE_NGRAM,
    SPECULATIVE_SUFFIX,
    SPECULATIVE_DRAFT_MODEL,
    SPECULATIVE_METHODS
};
struct speculative_choice {
    bool chosen;                // false, of a request: what the server does
    int k[SPECULATIVE_METHODS]; // most drafts a step, 1..SPECULATIVE_MOST; 0: method not used
};

// "off", or methods with commas between them: "ngram[:K]", "suffix[:K]", "draft_model[:K]".
// ST_INVALID.
enum status speculative_parse(const char *text, struct speculative_choice *ret);
void speculative_write(struct speculative_choice choice, char ret[64]); // as parse() reads it
int speculative_most(struct speculative_choice choice); // drafts a step by any method; 0: off

// A sample's tokens, as drafters read them.
struct history {
    const int32_t *prompt, *generated;
    int n_prompt, n_generated;
    uint64_t prompt_key; // speculative_prompt_key(prompt)
};
uint64_t speculative_prompt_key(const int32_t *prompt, int n);

struct draft {                      // a sample's; all zero before its first
    enum speculative_method method; // that proposed the present ones
    int32_t tokens[SPECULATIVE_MOST];
    int32_t rows[SPECULATIVE_MOST]; // draft_model: of its logits; the distributions of the tokens
    int n;                          // proposed; of a draft model: may be drafted, tokens to come
    int n_verify;                   // of these, wanted in the next step
    int matched; // tokens of the context that the first stands on: how sure it is
    int context; // the sample's tokens
    int behind;  // draft_model: of these, not computed there, the last not counted
    double chance;
    struct {
        bool judged; // acceptance was measured once
        double acceptance;
    } by[SPECULATIVE_METHODS];
};

struct speculative;
// fixed: verifies all that is proposed, whether it pays or not (tests, measurements). max_rows: the
// most drafts of one step.
enum status speculative_new(bool fixed, int max_rows, struct speculative **ret);
void speculative_free(struct speculative *s);

// Whether the next step is to look for drafts: where they do not pay, few are. Once a step with a
// sample that may draft.
bool speculative_wants_drafts(struct speculative *s);
// Proposes at most `room` tokens to follow, by the method that promises most; n may be 0.
void speculative_propose(struct speculative *s, struct speculative_choice choice,
                         const struct history *history, int room, struct draft *draft);
// Sets n_verify of each of the drafts of one step. n_seqs: sequences that decode in it; attended:
// the lengths of their contexts, summed.
void speculative_plan(struct speculative *s, struct draft *const *drafts, int n, int n_seqs,
                      int64_t attended);
// The step is over: of n_verified drafts the first n_accepted were drawn. With n_verified 0,
// n_accepted says whether the first proposal (0 or 1) would have been; a draft model's was never
// made, and is not judged.
void speculative_judge(struct speculative *s, struct draft *draft, int n_verified, int n_accepted);
// The history's last token was just drawn.
void speculative_learn(struct speculative *s, struct speculative_choice choice,
                       const struct history *history);

struct step_report {    // of a step
    bool looked;        // for drafts
    bool decodes;       // nothing but decoding sequences was in it
    bool settled;       // no pass nor the step, if it decodes, was among the first of its shape
    int n_seqs, n_rows; // decoding sequences; these and their drafts
    int n_saved;        // tokens that it brought beyond one for each draw
    int64_t attended;   // the sequences' contexts, summed
    int64_t attended_by_all; // and those of the drafts' rows
    double look_ms;          // for proposals and the plan
    double draft_ms;         // for the draft model's passes
    int n_caught_up;         // tokens of samples' pasts that passes of their own computed
    double catch_up_ms;      // for those passes
    double step_ms;          // for the rest
};
void speculative_step_over(struct speculative *s, const struct step_report *report);
// The draft model computed so many tokens of prompts; ms: of that, where it was measured, else 0.
void speculative_prompts_took(struct speculative *s, int n_tokens, double ms);
// Whether the draft model is worth its prompts' passes: of late it was used because it pays.
bool speculative_model_pays(const struct speculative *s);

// What steps, the draft model's passes, and its prompts (a pass of them, each token) take: for
// whoever measures.
struct step_cost *speculative_step_cost(struct speculative *s);
struct step_cost *speculative_pass_cost(struct speculative *s);
void speculative_set_prompt_cost(struct speculative *s, double ms, double token_ms);

#endif
