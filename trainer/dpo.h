/* dpo.h: `cw-trainer dpo`: training of a model folder on preferred completions, without a server.
 */
#ifndef TRAINER_DPO_H
#define TRAINER_DPO_H

#include "common/base/options.h"

extern const struct option_spec dpo_options[];
int dpo_main(int argc, char **argv); // exit status

#endif
