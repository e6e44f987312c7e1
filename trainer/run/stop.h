/* stop.h: how a training process ends when it is told to, or when its server is gone.
 *
 * The first SIGINT, SIGTERM, SIGHUP (a terminal that is closed; not where nohup has it ignored) or
 * SIGUSR1 (which mpirun hands on, and batch systems send before they end a job) asks for an end
 * after the current step; the second, unless it is a SIGHUP, ends the process within a fifth of a
 * second, though never while an update is being published (a request to quiesce that is not granted
 * yet is revoked). A watching thread does the latter. When the server has died it says so while the
 * main thread, deep in a computation, has not noticed; and ends the process if that takes ten
 * minutes. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_STOP_H
#define TRAINER_STOP_H

#include "bridge/control.h"
#include <pthread.h>

struct stop;

void stop_catch_signals(void); // handlers of these, process-wide
bool stop_requested(void);
const _Atomic bool *stop_flag(void); // set once it is

struct stop_options {        // all borrowed until stop_watch_end()
    struct control *control; // of weights that others see; NULL: none are written
    const char *first;       // what the first signal asks for, which is said
    // what a second one does before the process ends, on the watching thread; NULL: nothing
    void (*leave)(void *context);
    void *context;
};
#define STOP_AT_STEP "the run ends with a checkpoint once this step is done"
enum status stop_watch_new(const struct stop_options *options, struct stop **ret);
void stop_watch_end(struct stop *s); // NULL is fine
void stop_saving(struct stop *s);    // the last checkpoint is being written, however long it takes
pthread_mutex_t *stop_publish_lock(struct stop *s); // hold it while publishing

#endif
