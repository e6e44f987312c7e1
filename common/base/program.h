/* program.h: how a program begins and ends: its options, its log, its exit status. Main thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_PROGRAM_H
#define COMMON_BASE_PROGRAM_H

#include "common/base/options.h"

struct program {
    const char *name, *command; // "cw-trainer", which the log has; "train" behind it, or NULL
    const char *usage;          // as options_parse() takes it
    const struct option_spec *options;
    void *config;      // zeroed; what the options fill
    const char **word; // the positional words, NULL behind the last; NULL: none is taken
    int max_words;     // that it has room for; 0: one
    // Whether what is asked for makes sense, before anything is opened; NULL: it does.
    enum status (*check)(void *context, struct option_set *set);
    // ST_CANCELLED: it failed and has said so.
    enum status (*run)(void *context);
    void *context; // of both
};
// The exit status: 0; 1 where run() failed, 2 where the usage is wrong, whose sentence is logged.
int program_main(const struct program *p, int argc, char **argv);
// Whether a closed terminal (SIGHUP) ends this process: nohup has it ignored. A terminal sends it
// twice, once through its shell, so that a further one is no second wish.
bool program_hears_hangup(void);

#endif
