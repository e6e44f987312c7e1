/* trajectory.h: the turns that the policy sampled for one sample of an environment, and the
 * trajectory that the environment makes of them, checked against them. Plain data; any thread.
 *
 * A trajectory is a sample with a mask: a token that the mask gives to the policy must be one that
 * a turn sampled behind exactly the tokens that stand before it, and has that turn's
 * log-probability, weight version and author, who may be a tandem's other model. All others are the
 * environment's, and weigh nothing. Or it is a choice of turns, each behind the prompt that it was
 * sampled behind: a turn whose prompt goes on behind the one before goes on with its sequence, and
 * any other begins a sequence (samples.h, struct pack_part). */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_TRAJECTORY_H
#define TRAINER_TRAJECTORY_H

#include "common/text/tokenizer.h"
#include "trainer/rollout/completion.h"
#include "common/base/status.h"

#include <jansson.h>
#include <stdint.h>

struct sampled_turns {
    struct sampled_turn {
        struct token_list prompt; // all tokens before what was sampled
        struct completion sampled;
    } * items; // (n)
    int n;
};
void sampled_turns_release(struct sampled_turns *turns);
// Takes both over, also where it fails.
enum status sampled_turns_add(struct sampled_turns *turns, struct token_list *prompt,
                              struct completion *sampled);
// Whether the prompt of a next turn begins with the last turn's prompt and what was sampled there;
// ret_at: the first token that does not.
bool sampled_turns_repeat(const struct sampled_turns *turns, const struct token_list *prompt,
                          int *ret_at);

struct trajectory_bounds {
    int vocab_size, max_tokens;
    uint64_t version; // of tokens before any that the policy wrote
};
// {"token_ids", "mask", "reward" | "rewards"}, or with "turns" in place of the first two. ret: the
// whole of it as one completion, with the sums of its turns' telemetry and their texts, one a line.
// Errors name the field.
enum status trajectory_read(const json_t *value, const struct sampled_turns *turns,
                            const struct trajectory_bounds *bounds, struct completion *ret);
// Cuts what the n trajectories of a group have in common before the first token of a turn off
// them, into ret_prompt. ST_MISMATCH where that is nothing.
enum status trajectory_cut(struct completion *group, int n, struct token_list *ret_prompt);

// ST_INVALID, naming it, where the object has a field that is not among the names (NULL-ended).
enum status trajectory_check_fields(const json_t *object, const char *const names[]);
// A list of token ids below the vocabulary's size.
enum status trajectory_read_ids(const json_t *object, const char *field, int vocab_size,
                                struct token_list *ret);

// ---- the journal --------------------------------------------------------------------------------
// What the tools of environments gave in one step, kept on disk until a checkpoint has the step, so
// that a run that goes on need not call them again. One thread at a time.
//
// RUN/journal/step-N.jsonl (of rank R above 0 step-N.rank-R.jsonl) has a line a call: {"line",
// "group", "sample", "number", "call", "result"}. A line is written with one write(2) and fsynced
// before the environment hears that it is kept; one that was cut off is dropped when the file is
// opened again.

struct journal;

struct journal_place { // of a call
    int line, group, sample;
    int number; // of the sample's calls, from 0
};

// step: from 1. Makes the folder where it is missing; the file is made with its first line. rank:
// of several that train together each has a file, and finds what any of them kept before it was
// opened, since another number of ranks divides the groups otherwise.
enum status journal_open(const char *run_folder, int64_t step, int rank, struct journal **ret);
void journal_close(struct journal *j);
// The result of that very call; NULL: it is not there. Borrowed.
json_t *journal_find(const struct journal *j, const struct journal_place *place,
                     const json_t *call);
// Keeps one. Of the sample's later calls, of a course that it no longer takes, none is left.
enum status journal_keep(struct journal *j, const struct journal_place *place, const json_t *call,
                         const json_t *result);
// Removes the files of steps up to `step`, which a checkpoint has.
enum status journal_forget(const char *run_folder, int64_t step);

#endif
