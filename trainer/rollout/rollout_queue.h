/* rollout_queue.h: steps of rollouts between sampling and learning, in the order in which they were
 * ordered. Its length bounds how far sampling may be ahead of the weights.
 *
 * Of length 1 there is one thread: a step is sampled and scored when it is taken, by the weights
 * that it teaches. Of length N > 1 the queue has N threads of its own, which sample all ordered
 * steps at once and score them one after the other, in order, while the caller learns from earlier
 * ones: a step is taken after at most N - 1 updates that it knows nothing of. With a budget what is
 * learned from is not a step as it was ordered, but one that is gathered of the groups that are
 * whole: rollout_queue_gather(). All functions are the caller's thread's; the work is the queue's,
 * and what it touches belongs to it but between rollout_queue_pause() and rollout_queue_resume().
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_ROLLOUT_QUEUE_H
#define TRAINER_ROLLOUT_QUEUE_H

#include "trainer/rollout/source.h"

// Each wait in it has a deadline, so that each wait for the queue has.
typedef enum status (*rollout_work_fn)(void *context, struct rollout_step *step);
struct rollout_work {
    rollout_work_fn sample; // in several threads at once, each on a step of its own
    rollout_work_fn score;  // a sampled step, once all before it are scored
    void *context;
};

struct rollout_queue;
enum status rollout_queue_new(int length, const struct rollout_work *work,
                              struct rollout_queue **ret);
// Ends the work under way, through rollout_queue_cancelled(), and drops what was not taken.
void rollout_queue_free(struct rollout_queue *q);
// Set once the queue is to end; for the work to look at.
const _Atomic bool *rollout_queue_cancelled(const struct rollout_queue *q);

// The queue owns the step from here on. ST_BUSY, and nothing is taken over, where it is full.
// first: one just taken, which is the first again, and worked on before all others.
enum status rollout_queue_put(struct rollout_queue *q, struct rollout_step *step, bool first);
int rollout_queue_count(const struct rollout_queue *q); // put and not taken
bool rollout_queue_failed(struct rollout_queue *q);     // the work on one of these did
// The oldest, once it is scored. A step whose work failed is that failure, now and ever after:
// no work on a step behind it begins. ST_INVALID where nothing was put.
enum status rollout_queue_take(struct rollout_queue *q, struct rollout_step **ret);

// A budget for rollouts: a step of P groups closes once `enough` of the P whose turn it is are
// whole, and P are in all, and is made of the first P of these, in the order in which they were
// ordered: groups of the steps behind it take the places of those that go on. What was ordered for
// step N is waited for in step N + carried. So each group is in one step, whatever its length, and
// at most one order is due at a time.
struct rollout_budget {
    int enough, carried;
};
// Fills the step, whose rollout has room for its groups, with the next ones; of several ranks
// (comm; NULL: one) the same on all, each with the completions that it pulled. Orders of which
// nothing is left leave the queue, and what they counted is added to the step's, as are the groups
// that were ordered for a step before (n_carried).
enum status rollout_queue_gather(struct rollout_queue *q, const struct rollout_budget *budget,
                                 struct comm *comm, struct rollout_step *into);
// Of the orders in the queue the step of the first, and the numbers of the groups that were
// gathered of each: {"first", "groups": [[G, ...], ...]}. New reference; NULL: no memory.
json_t *rollout_queue_gathered(const struct rollout_queue *q);

// Waits for the work under way and begins no other.
void rollout_queue_pause(struct rollout_queue *q);
void rollout_queue_resume(struct rollout_queue *q);

#endif
