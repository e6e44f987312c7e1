/* work.h: what the loop's thread asks of the main thread, which owns the policy: a list under a
 * lock, taken in order, but that what belongs together stays together. What may lie in it is
 * bounded by what the futures are (future.h). */
#ifndef TRAINER_SERVE_WORK_H
#define TRAINER_SERVE_WORK_H

#include "common/http/inbox.h"
#include "trainer/serve/policy.h"

struct work {                     // embed it first in a struct of the kind of work
    struct inbox_message message; // its way back; deliver() runs on the loop's thread
    struct work *next;
    enum status (*run)(struct policy *policy, struct work *work); // the main thread
    const char *group; // it goes behind the last one that waits with the same; NULL: in its turn
    struct status_kept status; // what it came to
};

struct work_queue;
enum status work_queue_new(struct work_queue **ret);
void work_queue_free(struct work_queue *q); // empty by now; NULL is fine
void work_put(struct work_queue *q, struct work *work);
// The next one, or NULL after `ms`.
struct work *work_take(struct work_queue *q, int ms);

#endif
