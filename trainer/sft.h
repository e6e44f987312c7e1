/* sft.h: `cw-trainer sft`: supervised training of a model folder, without a server. */
#ifndef TRAINER_SFT_H
#define TRAINER_SFT_H

#include "common/base/options.h"

extern const struct option_spec sft_options[];
int sft_main(int argc, char **argv); // exit status

#endif
