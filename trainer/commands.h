/* commands.h: the commands of cw-trainer. Each ends with an exit status. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_COMMANDS_H
#define TRAINER_COMMANDS_H

#include "common/base/options.h"

int train_main(int argc, char **argv);
int serve_main(int argc, char **argv);
int sft_main(int argc, char **argv);
int dpo_main(int argc, char **argv);
int eval_main(int argc, char **argv);
int merge_main(int argc, char **argv);
// for tests; those of train: run/config.h
extern const struct option_spec sft_options[], dpo_options[], serve_options[], eval_options[],
    merge_options[];

#endif
