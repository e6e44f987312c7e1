/* inbox.h: how other threads hand work to the loop's thread: a locked list and a uv_async_t.
 * Posting never blocks for longer than the list's lock is held (a few instructions). What may lie
 * in it is bounded by what the server has admitted: a message is one step's tokens, or the end of a
 * command. */
#ifndef COMMON_HTTP_INBOX_H
#define COMMON_HTTP_INBOX_H

#include "common/base/status.h"
#include <pthread.h>
#include <uv.h>

// One message; embed it first in a malloc'ed struct. deliver() runs on the loop's thread and owns
// the memory from then on.
struct inbox_message {
    struct inbox_message *next;
    void (*deliver)(struct inbox_message *message);
};

struct inbox {
    uv_async_t async;
    pthread_mutex_t lock;
    struct inbox_message *first, **last;
};
enum status inbox_init(struct inbox *box, uv_loop_t *loop);
void inbox_post(struct inbox *box, struct inbox_message *message); // any thread
// Delivers what is left and closes the handle, for which the loop has to run once more. One that
// was never made is fine.
void inbox_close(struct inbox *box);

#endif
