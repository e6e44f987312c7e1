/* backoff.c: see backoff.h. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/speculative/backoff.h"

#define WINDOW      32 // steps: enough for a verdict on averages, few enough to lose in
#define MAX_DOUBLED 3  // doublings: what begins to pay is found within 8 times its first wait

void backoff_wait(struct backoff *b, double ms)
{
    b->wait_ms -= ms;
}

void backoff_use(struct backoff *b, double gained_ms, double ms)
{
    b->gained_ms += gained_ms;
    b->spent_ms += ms;
    if (++b->steps < WINDOW) return;
    if (b->gained_ms > 0) {
        if (++b->wins >= 2) b->failures = 0;
    } else if (-b->gained_ms > BACKOFF_SHARE * b->spent_ms) {
        b->wait_ms = -b->gained_ms / BACKOFF_SHARE * (1 << b->failures);
        if (b->failures < MAX_DOUBLED) b->failures++;
        b->wins = 0;
    }
    b->steps = 0;
    b->gained_ms = b->spent_ms = 0;
}

void backoff_lost(struct backoff *b, double ms)
{
    b->wait_ms += ms / BACKOFF_SHARE;
}
