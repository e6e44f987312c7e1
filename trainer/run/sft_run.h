/* sft_run.h: one supervised run: its options, and everything `cw-trainer sft` has open. Private to
 * sft.c and sft_open.c. One thread, the main one. */
#ifndef TRAINER_SFT_RUN_H
#define TRAINER_SFT_RUN_H

#include "trainer/rollout/data_order.h"
#include "trainer/rollout/prompts.h"
#include "trainer/run/learning.h"

struct sft_config {
    const char *model, *init, *tokenizer, *data, *out, *config, *device;
    int dtype; // dtype_option_names
    struct prompt_options prompts;
    int64_t examples_per_step, max_steps, seed, logging_steps;
    struct learning_options learning;
    int all_turns; // 0 or 1
    int64_t rope_context;
    bool overwrite;
    double num_train_epochs;
};
extern const struct option_spec sft_options[];

struct sft {
    const struct sft_config *config;
    struct device *dev;
    struct model_config *model;
    struct weights *weights;
    void *memory;
    struct dataset *data;
    int64_t longest; // tokens of an example
    struct data_order order;
    struct schedule schedule;
    struct learner *learner;
    struct pack_group *groups; // (examples_per_step)
    struct pack_completion *completions;
    const struct example **examples; // of the step, (examples_per_step) too
};

// What is asked for, before anything is opened: ST_INVALID names the option.
enum status sft_check(const struct sft_config *config);
// config is set: model, data, and the learner with all its memory. sft_release() takes half-opened
// runs too.
enum status sft_open(struct sft *s);
void sft_release(struct sft *s);
const char *sft_tokenizer_folder(const struct sft_config *config);

#endif
