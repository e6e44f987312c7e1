/* trajectory.h: the turns that the policy sampled for one sample of an environment, and the
 * trajectory that the environment makes of them, checked against them. Plain data; any thread.
 *
 * A trajectory is a sample with a mask: a token that the mask gives to the policy must be one that
 * a turn sampled behind exactly the tokens that stand before it, and has that turn's
 * log-probability, weight version and author, who may be a tandem's other model. All others are the
 * environment's, and weigh nothing. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_TRAJECTORY_H
#define TRAINER_TRAJECTORY_H

#include "common/text/tokenizer.h"
#include "trainer/rollout/completion.h"

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
// {"token_ids", "mask", "reward" | "rewards"}. ret: the whole of it as one completion, with the
// sums of its turns' telemetry and their texts, one a line. Errors name the field.
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

#endif
