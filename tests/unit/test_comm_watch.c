/* test_comm_watch.c: what asks a communicator's watch may be a thread of the backend's: a watch
 * that has been taken away is not being asked any more, so that what it looks at may go. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/comm_backend.h"
#include "tests/support/support.h"

#include <pthread.h>
#include <stdatomic.h>

#define ASKED_MS 100 // that an answer takes

static _Atomic int asked, answered;

static enum status slow_watch(void *context)
{
    assert_ptr_equal(context, &asked);
    asked++;
    clock_sleep_ms(ASKED_MS);
    answered++;
    return ST_OK;
}

static void *ask(void *comm)
{
    comm_check(comm);
    return NULL;
}

TEST(test_a_watch_that_is_taken_away_is_not_asked)
{
    struct comm parent = {0}, comm = {.parent = &parent};
    pthread_t thread;
    comm_watch(&parent, slow_watch, &asked);
    assert_int_equal(pthread_create(&thread, NULL, ask, &comm), 0);
    while (!asked) clock_sleep_ms(1);
    comm_watch(&parent, NULL, NULL);
    assert_int_equal(answered, 1);
    pthread_join(thread, NULL);
    assert_ok(comm_check(&comm));
    assert_int_equal(asked, 1);
}
