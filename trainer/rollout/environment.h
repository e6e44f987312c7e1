/* environment.h: `--rollouts command:PROGRAM`: child processes that make trajectories, turn by
 * turn, out of examples and of what the policy samples for them (docs/environments.md has the
 * lines). In place of one completion of each prompt, and pulled like these: rollout_pull().
 *
 * A sample that is being made is an episode. Processes take one at a time, or as many as they say.
 * One that ends, is silent for too long or writes what is no line of the protocol is started again,
 * and its episodes are given out again, each at most three times. Any thread may pull; of several
 * at once one does and the others wait. */
#ifndef TRAINER_ENVIRONMENT_H
#define TRAINER_ENVIRONMENT_H

#include "trainer/rollout/source.h"

#define ENVIRONMENT_MAX_PROCESSES 256
struct environment_options {
    const char *line; // a program, with words and quotes as a shell takes them; borrowed
    int n;            // processes
    double timeout_s; // in which one must write
    int max_tokens;   // of a trajectory
};
// The source whose samples are the trajectories of n processes that are started, and which another
// source samples the turns of, whose end this one is too. The calling thread must outlive the
// processes. ST_PEER_GONE where one ends at once, which says how. A failure of the server, of the
// journal, or of an episode's third attempt is poll()'s, and names the line of the data set and the
// sample.
enum status environment_new(const struct environment_options *options, struct source *turns,
                            struct source **ret);

#endif
