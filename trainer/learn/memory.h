/* memory.h: the memory plan as the user reads it, and what came of it. The main thread; logs. */
#ifndef TRAINER_MEMORY_H
#define TRAINER_MEMORY_H

#include "trainer/learn/learner.h"

// The line before the first step: where every byte will go (learner_memory). weights: whose they
// are, "shared with the server (0 extra)". freeze: what is not trained, NULL: nothing; there is
// then a line before about what is.
void memory_say(const struct learner *l, const char *weights, const char *freeze);
// The line after it: what was taken, beside what was planned, and on a GPU by how much the device's
// free memory has gone down (which tells of the whole device, its other users included).
void memory_say_taken(const struct learner *l);

#endif
