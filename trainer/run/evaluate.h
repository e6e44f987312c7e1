/* evaluate.h: held-out prompts answered by the server and scored: what `cw-trainer eval` and the
 * evaluations within a run have in common. It changes no weights. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_EVALUATE_H
#define TRAINER_EVALUATE_H

#include "trainer/reward/reward.h"
#include "trainer/rollout/source.h"

#define EVAL_MAX_PASS 12 // k = 1, 2, 4 .. 2048
struct eval_figure {     // over prompts: the mean, and the squares of the deviations from it
    int n;
    double mean, squares;
};
double eval_error(const struct eval_figure *f); // of the mean
struct eval_result {
    int n, n_samples; // prompts; of each
    struct eval_figure reward;
    double accuracy; // of the reward's first 0/1 term; -1: it has none
    struct eval_figure correct;
    // With it and several samples: that of 2^i of them any is right (unbiased, Chen et al. 2021;
    // of no prompts: so many there are not), and that the answer that most of them gave is.
    struct eval_figure pass[EVAL_MAX_PASS], majority;
    double mean_length, truncated; // tokens; share
    double seconds;
    uint64_t weight_version;   // of the last token
    struct spec_counters spec; // of these answers alone, by their telemetry; without positions
};
struct evaluation { // borrowed
    struct source *source;
    struct comm *comm; // of the ranks that evaluate together; NULL: this one alone
    const struct dataset *data;
    int limit;     // > 0: the first so many examples
    int n_samples; // of each
    int64_t step;  // done
    struct reward *reward;
    const struct sampling_options *sampling; // temperature 0: greedy
};
// Sample i of a rollout as a line for people and the report, with its prompt or without; terms:
// (terms, n) of all its samples, or NULL where others scored it (Atropos). NULL: no memory.
json_t *sample_line(const struct rollout *r, int i, bool prompt, const struct reward *reward,
                    const double *terms, double sum);
// ret_lines: a JSON object a sample and line is appended (docs/use/rewards.md), NULL: not wanted.
enum status evaluate(const struct evaluation *e, struct bytes *ret_lines, struct eval_result *ret);
// Its figures as metrics, behind a prefix ("eval/"): those that the reward and the drafts have.
void eval_result_put(const struct eval_result *r, const char *prefix, json_t *metrics);

#endif
