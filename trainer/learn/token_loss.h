/* token_loss.h: losses whose weights or advantages a client gives token by token, as the Tinker API
 * names and defines them: plain sums, no mean over tokens or sequences. On host arrays, in double,
 * from log-probabilities to the loss and its derivative by each, as in loss.h, which has those of
 * cw-trainer's own loop. Pure functions. */
#ifndef TRAINER_TOKEN_LOSS_H
#define TRAINER_TOKEN_LOSS_H

#include "common/base/status.h"

// What a loss may want beside the log-probabilities: arrays of one entry a token, by name.
enum token_input {
    INPUT_WEIGHTS,
    INPUT_LOGPROBS, // the sampler's
    INPUT_ADVANTAGES,
    INPUT_RATIO_MASK, // not 0: the token counts for its sequence's ratio
    INPUT_CLIP_LOW,   // instead of the setting of that name
    INPUT_CLIP_HIGH,
    TOKEN_INPUTS
};
extern const char *const token_input_names[TOKEN_INPUTS + 1]; // NULL-ended

struct token_loss; // one of a table
enum token_setting { SETTING_CLIP_LOW, SETTING_CLIP_HIGH, SETTING_BETA, TOKEN_SETTINGS };
extern const char *const token_setting_names[TOKEN_SETTINGS + 1];
struct token_loss_config {
    const struct token_loss *loss;
    double settings[TOKEN_SETTINGS];
};

// The loss with its defaults. ST_INVALID lists those that there are; ST_UNSUPPORTED for one whose
// formula is not published.
enum status token_loss_find(const char *name, struct token_loss_config *ret);
bool token_loss_has_setting(const struct token_loss_config *config, enum token_setting setting);
bool token_loss_needs(const struct token_loss_config *config, enum token_input input);
bool token_loss_takes(const struct token_loss_config *config, enum token_input input); // or needs

// The sum over n tokens of one sequence. inputs: (n) each; those that are needed are there.
// ret_dlogprobs (n): its derivative by each log-probability.
double token_loss_compute(const struct token_loss_config *config, int n, const float *logprobs,
                          const float *const inputs[TOKEN_INPUTS], float *ret_dlogprobs);

#endif
