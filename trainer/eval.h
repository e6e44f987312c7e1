/* eval.h: greedy answers to held-out prompts, through the daemon, and their score. Takes no lease
 * and writes no weights: it runs beside a training run. One thread. */
#ifndef TRAINER_EVAL_H
#define TRAINER_EVAL_H

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

int eval_main(int argc, char **argv); // cw-trainer eval: exit status

#endif
