/* environment.h: an environment of --rollouts, as which a test starts itself: `TEST play TOKENS
 * KIND`. An episode has two turns of so many tokens with a token of the environment's between, and
 * is worth the share of sampled tokens whose number is even: of both turns ("whole"), with a reward
 * after each ("turns"), or of both where the second reads the last token alone of what was sampled
 * in the first, as behind a template that drops reasoning ("drops"). And what any environment says
 * and hears. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_ENVIRONMENT_H
#define TESTS_SUPPORT_ENVIRONMENT_H

#include "tests/support/support.h"

// "command:THIS play WORDS", which lives as long as the program.
const char *environment_of(const char *words);
// Where this process is such an environment: plays until there are no more episodes, and ends it.
void environment_main(int argc, char **argv);

json_t *environment_hear(void);                                          // NULL: no more
void environment_say(const json_t *id, const char *kind, json_t *value); // takes value

#endif
