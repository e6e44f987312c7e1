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

#include "trainer/rollout/journal.h"
#include "trainer/rollout/rollout.h"

struct environment;

// Starts n processes. `line`: words and quotes as a shell takes them; borrowed. The calling thread
// must outlive them.
#define ENVIRONMENT_MAX_PROCESSES 256
enum status environment_new(const char *line, int n, double timeout_s, struct environment **ret);
void environment_free(struct environment *e); // ends them
// Before the first pull: ST_PEER_GONE where one has ended, which says how.
enum status environment_check(struct environment *e);

struct environment_stats {                // of the samples that were made
    long samples, turns, calls, replayed; // calls of tools; replayed: those out of the journal
    long unlike; // turns whose prompt did not begin with the tokens of the turn before
    long restarts;
};

struct environment_rollouts { // what a rollout source has of an environment; borrowed parts
    struct environment *environment;
    struct journal *journal; // NULL: calls are not kept
    const char *data;        // path of the data set, for errors
    int64_t step;            // from 1
    int first_group;         // number of the rollout's first group among all that the step samples
    bool evaluation;
    int max_tokens; // of a trajectory
    struct environment_stats stats;
};

// rollout_pull() where the source has environments: trajectories for all groups without
// completions. A failure of the server, of the journal, or of an episode's third attempt is the
// pull's, and names the line of the data set and the sample.
enum status environment_pull(const struct rollout_source *source,
                             const struct sampling_options *sampling, struct rollout *r);

#endif
