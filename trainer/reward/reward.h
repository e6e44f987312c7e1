/* reward.h: the task's score of a finished sample: a weighted sum of terms, each by a scorer out of
 * one table (docs/use/rewards.md). No device, no server. One thread: scorers may keep a state (a
 * child process, a compiled pattern). What serving the sample cost is trainer/reward/cost.h's. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_REWARD_H
#define TRAINER_REWARD_H

#include "common/base/bytes.h"
#include <jansson.h>

struct reward;

// One sample as a scorer sees it. All borrowed.
struct reward_input {
    const char *text;        // of the completion, special tokens left out
    const char *answer;      // of the data set; NULL where it has none
    int n_tokens;            // of the completion
    const int32_t *ids;      // (n_tokens)
    bool truncated;          // it ended at the token limit
    const json_t *telemetry; // of this sample (docs/use/protocol.md); may be NULL
    const json_t *prompt;    // text or messages, as the data set has it; may be NULL
    const json_t *row;       // the data set's line; may be NULL
    double environment;      // with reward_options.environment: what it gave
    int group, group_size;   // number of its prompt's in the batch, whose samples stand together
};

#define REWARD_MAX_TERMS 16

struct reward_options {
    // "gsm8k" or "exact,length". "plugin:PATH.so"; "command:PROGRAM ARGS" reaches, commas included,
    // to the next ",command:" outside of quotes or to the end of the list, so commands come last.
    const char *names;
    bool none;            // no terms, whatever the names
    const char *weights;  // "1,0.1"; NULL or "": all 1
    const char *pattern;  // of `regex`, where a line has no "pattern" of its own; NULL: none. It
                          // stays as long as the reward
    double length_target; // of `length`; characters
    int64_t overlong_buffer, max_completion_length; // of `overlong`; tokens
    int64_t repetition_ngram;                       // of `repetition`; tokens, 0: 3
    double timeout_s;                               // of `command`: longest wait for a reply
    int64_t processes;                              // of each `command`; 0: 1
    bool whole_groups;  // of each `command`: one process has all of a group, and is told so
    bool whole_batches; // the same of all that is scored at once
    bool environment;   // samples are made by environments, which give them a reward
};
// Loads plug-ins and starts commands. ST_INVALID: names, weights or a pattern.
enum status reward_new(const struct reward_options *options, struct reward **ret);
void reward_free(struct reward *r); // ends commands
// What metrics and data sets ask of it; lives as long.
struct reward_info {
    int n; // terms
    struct {
        char name[64]; // the scorer's, with _2 and so on behind it where an earlier one has that
        double weight;
    } terms[REWARD_MAX_TERMS];
    bool needs_answer;
    int accuracy_term; // the first that is 0 or 1 (its mean is the accuracy); -1: none is
    // What stands around a question (data.h, PROMPT_PLACE in it) so that an instruct model ends
    // on the form of answer that is read; NULL where no term reads a certain one.
    const char *prompt_template;
};
const struct reward_info *reward_info(const struct reward *r);
// Refuses a line of the data set whose samples a scorer could not score. `answer` may be NULL.
enum status reward_check_row(struct reward *r, const char *answer, const json_t *row);
// Before the first sample: the scorers are ready, and commands are alive.
enum status reward_check(struct reward *r);
// ret_terms: (terms, n) unweighted scores, NaN where a scorer said that it does not apply.
// ret_sums: (n) weighted, of those that do; NaN where none does. A scorer that cannot tell is an
// error, never a 0; ret_failed: whose.
enum status reward_score_all(struct reward *r, const struct reward_input *inputs, int n,
                             double *ret_terms, double *ret_sums, int *ret_failed);

// One line about each scorer, each after a newline, for --help.
void reward_describe_all(struct bytes *ret);

#endif
