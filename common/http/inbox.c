/* inbox.c: messages to the loop's thread. Any thread posts; the loop's thread takes the whole list
 * at once and delivers in order of posting. */
#include "common/http/inbox.h"

static void drain(struct inbox *box)
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

static void on_async(uv_async_t *async)
{
    drain(async->data);
}

enum status inbox_init(struct inbox *box, uv_loop_t *loop)
{
    int e = uv_async_init(loop, &box->async, on_async);
    if (e < 0) return status_fail(ST_IO, "cannot create a wake-up handle: %s", uv_strerror(e));
    box->async.data = box;
    box->last = &box->first;
    pthread_mutex_init(&box->lock, NULL);
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

void inbox_close(struct inbox *box)
{
    if (!box->last) return;
    drain(box);
    uv_close((uv_handle_t *)&box->async, NULL);
    pthread_mutex_destroy(&box->lock);
}
