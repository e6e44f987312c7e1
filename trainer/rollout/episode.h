/* episode.h: one sample that an environment is making: what its process asks for, and what it is
 * given. Private to environment.c. The thread that pulls. */
#ifndef TRAINER_EPISODE_H
#define TRAINER_EPISODE_H

#include "trainer/rollout/source.h"
#include "trainer/rollout/trajectory.h"

struct episode;
struct pull { // of all episodes of a step
    struct environment *environment;
    struct rollout_step *step;
    int max_tokens; // of a trajectory
    struct rollout_pull asked;
    bool *said_unlike;
    int n, n_done;
    struct episode *episodes; // (n)
};

struct episode {
    struct pull *pull;
    int group, sample;
    int attempts;   // begun
    json_int_t id;  // of the present one; 0: none
    int process;    // that has it; -1: none
    int64_t due_ns; // when its process must have written; 0: it is the server's turn
    bool done;
    // what is asked of the server; NULL: nothing
    json_t *body;
    bool sampling;            // else it is text to be tokenised
    struct token_list prompt; // of the sampling
    struct rollout_ask ask;   // all its turns go to one server, for the sake of its prefix cache
    // so far
    struct sampled_turns turns;
    int n_calls, n_replayed, n_unlike;
    json_t *call;           // whose result is due; NULL: none
    struct completion made; // once done
};

// The episode's line in the data set, for errors.
const struct example *episode_example(const struct episode *e);
// Back to where no attempt was begun.
void episode_reset(struct episode *e);
// Begins an attempt: its line for the process.
enum status episode_begin(struct episode *e, json_int_t id, struct bytes *out);
// What its process wrote: a kind of line, with its value; the reply, if it has one, goes to `out`.
// Any failure but ST_NO_MEMORY and ST_IO is the process's.
enum status episode_take(struct episode *e, const char *kind, const json_t *value,
                         struct bytes *out);
// Submits what is to be asked of the server, or takes its response, or does nothing. ret_childs:
// the failure is that of what the process asked for.
enum status episode_advance(struct episode *e, struct bytes *out, bool *ret_childs);

#endif
