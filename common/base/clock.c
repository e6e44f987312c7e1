/* clock.c: time from the system clocks. No state; any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/clock.h"

#include <errno.h>
#include <limits.h>
#include <time.h>

int64_t clock_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * NS_PER_S + now.tv_nsec;
}

int64_t clock_wall_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * 1000 + now.tv_nsec / NS_PER_MS;
}

int64_t clock_wall_s(void)
{
    return clock_wall_ms() / 1000;
}

int64_t clock_deadline_ns(int64_t ms)
{
    int64_t deadline;
    if (__builtin_mul_overflow(ms, NS_PER_MS, &deadline) ||
        __builtin_add_overflow(deadline, clock_now_ns(), &deadline))
        return ms < 0 ? INT64_MIN : INT64_MAX;
    return deadline;
}

double clock_ms_since(int64_t start_ns)
{
    return (double)(clock_now_ns() - start_ns) / NS_PER_MS;
}

int clock_ms_until(int64_t deadline_ns)
{
    int64_t now = clock_now_ns();
    if (deadline_ns <= now) return 0;
    // rounded up without adding to the difference, which may be near the top
    int64_t ms = (deadline_ns - now - 1) / NS_PER_MS + 1;
    return ms < INT_MAX ? (int)ms : INT_MAX;
}

void clock_sleep_ms(int64_t ms)
{
    if (ms <= 0) return;
    // to a point in time, so that signals in between do not make it longer
    int64_t end = clock_deadline_ns(ms);
    struct timespec until = {end / NS_PER_S, end % NS_PER_S};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) continue;
}

void clock_cond_init(pthread_cond_t *ret)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(ret, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

void clock_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t deadline_ns)
{
    const struct timespec until = {.tv_sec = deadline_ns / NS_PER_S,
                                   .tv_nsec = deadline_ns % NS_PER_S};
    pthread_cond_timedwait(cond, lock, &until);
}
