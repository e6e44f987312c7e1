/* reward_worker.h: one of the processes of the scorer "command", with the samples it was sent and
 * has not scored. Private to reward_command.c. One thread. */
#ifndef TRAINER_REWARD_WORKER_H
#define TRAINER_REWARD_WORKER_H

#include "trainer/reward/reward.h"
#include "trainer/launch/child.h"

struct worker { // all zero but for a started child and a place for what it owes: owes nothing
    struct child child;
    int *owed; // (room) samples of the batch, in the order they were sent
    int n_owed, room;
    int64_t heard_ns; // its last reply, or when it was asked after a pause
    bool replied;     // once at least
    bool restarted;
};
struct score_batch {
    const struct reward_input *inputs;
    int n, next, n_done; // next: to be handed out
    json_int_t first_id;
    double *scores;           // (n)
    bool whole_groups, whole; // whole: it is one process's, which is told so
};

// It owes a reply, or has yet to read what it was sent: one may reply before it has read all.
bool worker_busy(const struct worker *w);
bool worker_has_room(const struct worker *w); // for one more sample
// Makes the line that asks for sample i, which worker_serve() writes.
enum status worker_ask(struct worker *w, const struct score_batch *b, int i);
// Writes and reads what can be without waiting, and puts the replies into the batch's scores.
// ret_failed: the sample that an error is about.
enum status worker_serve(struct worker *w, struct score_batch *b, int *ret_failed);

#endif
