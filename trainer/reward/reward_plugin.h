/* reward_plugin.h: the interface of a reward in a shared object (--reward plugin:PATH.so). This
 * header needs nothing else of the project. A plug-in defines one symbol,
 *
 *     const struct reward_plugin commonweight_reward_plugin = { REWARD_PLUGIN_VERSION, ... };
 *
 * and is built with `cc -shared -fPIC`. trainer/examples/reward_balanced.c is a whole one.
 *
 * All calls come from one thread, one sample after another. A plug-in that cannot score a sample
 * writes why into `error` and returns nonzero: the run then ends with that sentence and the
 * sample's place, and never goes on with a 0 in its stead. The same where the score is not finite.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_REWARD_PLUGIN_H
#define TRAINER_REWARD_PLUGIN_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define REWARD_PLUGIN_VERSION 1
#define REWARD_PLUGIN_SYMBOL  "commonweight_reward_plugin"

// One sample. Strings are UTF-8, NUL-ended, and valid during the call only.
struct reward_plugin_sample {
    const char *prompt;     // text; of a chat, its messages as a JSON list
    const char *completion; // special tokens left out
    const char *answer;     // NULL: the data set has none
    const char *example;    // the data set's whole line, as a JSON object
    const char *telemetry;  // how it was served, as a JSON object; NULL: not known
    int n_tokens;           // of the completion
    int truncated;          // 1: it ended at the token limit
};

struct reward_plugin {
    int version;      // REWARD_PLUGIN_VERSION
    const char *name; // of its term in metrics: letters, digits, "_", "-"
    // Before the first sample; may be NULL. 0: *ret_state goes to the other two; else: why, in
    // error.
    int (*open)(void **ret_state, char *error, size_t error_size);
    // 0: the score is in *ret_score; else: why not, in error.
    int (*score)(void *state, const struct reward_plugin_sample *sample, double *ret_score,
                 char *error, size_t error_size);
    void (*close)(void *state); // may be NULL
};

#ifdef __cplusplus
}
#endif
#endif
