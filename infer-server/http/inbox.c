/* inbox.c: messages to the loop's thread. Any thread posts; the loop's thread takes the whole list
 * at once and delivers in order of posting. */
#include "infer-server/http/inbox.h"

#include <pthread.h>
#include <stdlib.h>

struct inbox {
    uv_async_t async; // first: its address is the inbox's
    pthread_mutex_t lock;
    struct inbox_message *first, **last;
};

static void on_async(uv_async_t *async)
{
    inbox_drain(async->data);
}

enum status inbox_new(uv_loop_t *loop, struct inbox **ret)
{
    struct inbox *box = calloc(1, sizeof *box);
    if (!box) return status_fail(ST_NO_MEMORY, "out of memory");
    int e = uv_async_init(loop, &box->async, on_async);
    if (e < 0) {
        free(box);
        return status_fail(ST_IO, "cannot create a wake-up handle: %s", uv_strerror(e));
    }
    box->async.data = box;
    box->last = &box->first;
    pthread_mutex_init(&box->lock, NULL);
    *ret = box;
    return ST_OK;
}

void inbox_post(struct inbox *box, struct inbox_message *message)
{
    message->next = NULL;
    pthread_mutex_lock(&box->lock);
    *box->last = message;
    box->last = &message->next;
    pthread_mutex_unlock(&box->lock);
    uv_async_send(&box->async);
}

void inbox_drain(struct inbox *box)
{
    pthread_mutex_lock(&box->lock);
    struct inbox_message *message = box->first;
    box->first = NULL;
    box->last = &box->first;
    pthread_mutex_unlock(&box->lock);
    while (message) {
        struct inbox_message *next = message->next;
        message->deliver(message);
        message = next;
    }
}

static void on_closed(uv_handle_t *handle)
{
    struct inbox *box = handle->data;
    pthread_mutex_destroy(&box->lock);
    free(box);
}

void inbox_close(struct inbox *box)
{
    if (!box) return;
    inbox_drain(box);
    uv_close((uv_handle_t *)&box->async, on_closed);
}
