/* learning.h: what `train` and `sft` have in common of what is learnt, and how: the options, and
 * the learner's settings that follow. Plain data. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_LEARNING_H
#define TRAINER_LEARNING_H

#include "trainer/learn/optimizer.h"
#include "trainer/learn/schedule.h"

#include <jansson.h>

struct learner_config;
struct learning_options { // called `learning` where options_shared.h's rows are used
    const char *freeze;
    struct optimizer_config adamw;
    struct schedule schedule; // total_steps: not an option
    int64_t token_budget, logits_chunk;
    int recompute; // enum recompute
    double router_aux_loss_coef;
};

struct lora_options {
    int64_t r; // 0: none, all of the model is trained
    double alpha, dropout;
    const char *targets;
    const char *name; // by which a server knows it
    bool rslora;
};
// PEFT's adapter_config.json of a new adapter of that base.
enum status lora_config_json(const struct lora_options *options, const char *model, json_t **ret);

struct saving_options {
    int64_t logging_steps, save_steps, save_total_limit;
    double save_minutes;
};
// Whether a run's step is one of every so many, or its last.
static inline bool step_due(int64_t step, int64_t every, int64_t total)
{
    return step == total || (every > 0 && step % every == 0);
}

struct learning_shape { // of a run's steps, at most
    int64_t longest;    // tokens of a prompt with its completion
    int64_t tokens;     // of a step's prompts and completions
    int64_t seqs;       // prompts and completions
};
// The learner's settings. ST_INVALID where a sequence is longer than --token-budget.
enum status learning_config(const struct learning_options *options,
                            const struct learning_shape *shape, double temperature,
                            struct learner_config *ret);

#endif
