/* evaluate.h: held-out prompts answered by the server and scored: what `cw-trainer eval` and the
 * evaluations within a run have in common. It changes no weights. One thread. */
#ifndef TRAINER_EVALUATE_H
#define TRAINER_EVALUATE_H

#include "trainer/rollout/reward.h"
#include "trainer/rollout/rollout.h"
#include "trainer/rollout/spec_counters.h"

struct eval_result {
    int n;                                // prompts
    double reward, reward_standard_error; // mean
    double accuracy, standard_error; // of the reward's first 0/1 term; accuracy -1: it has none
    double mean_length, truncated;   // tokens; share
    double seconds;
    uint64_t weight_version;   // of the last token
    struct spec_counters spec; // of these answers alone, by their telemetry; without positions
};
// limit > 0: the first `limit` examples. sampling->temperature 0 is greedy. ret_lines: a JSON
// object a sample and line is appended (docs/rewards.md), NULL: not wanted.
enum status evaluate(const struct rollout_source *source, const struct dataset *data, int limit,
                     struct reward *reward, const struct sampling_options *sampling,
                     struct bytes *ret_lines, struct eval_result *ret);
// Its figures as metrics, behind a prefix ("eval/"): those that the reward and the drafts have.
void eval_result_put(const struct eval_result *r, const char *prefix, json_t *metrics);

#endif
