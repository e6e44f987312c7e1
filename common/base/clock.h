/* clock.h: time. Durations and deadlines are nanoseconds of CLOCK_MONOTONIC, which is the same for
 * every process of a machine, so they may stand on a shared page. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_CLOCK_H
#define COMMON_BASE_CLOCK_H

#include <pthread.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NS_PER_MS 1000000LL
#define NS_PER_S  1000000000LL

int64_t clock_now_ns(void);              // CLOCK_MONOTONIC
int64_t clock_wall_s(void);              // seconds since 1970
int64_t clock_wall_ms(void);             // milliseconds since then
int64_t clock_deadline_ns(int64_t ms);   // now + ms
double clock_ms_since(int64_t start_ns); // milliseconds from start to now
int clock_ms_until(int64_t deadline_ns); // 0 once passed, rounded up; for poll()
void clock_sleep_ms(int64_t ms);
void clock_cond_init(pthread_cond_t *ret); // whose timed waits end by this clock
void clock_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t deadline_ns);

#ifdef __cplusplus
}
#endif

#endif
