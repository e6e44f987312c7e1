/* foreign_names.h: for OPT_FOREIGN (options.h): names of TRL's, verl's and others' options, and
 * what stands here for them. */
#ifndef TRAINER_FOREIGN_NAMES_H
#define TRAINER_FOREIGN_NAMES_H

extern const char *const common_foreign_names[];  // of every command that trains
extern const char *const train_foreign_names[];   // of `train` alone
extern const char *const dataset_foreign_names[]; // of `sft` and `dpo`
extern const char *const sft_foreign_names[], *const dpo_foreign_names[];

#endif
