/* backoff.h: whether something that may cost more than it brings is used: measured over windows of
 * steps, and left alone for a while after one that lost.
 *
 * A window that lost more than BACKOFF_SHARE of its time is a failure. What is waited then is so
 * long that the loss is that share of it, and twice as long with every failure until two windows in
 * a row were won. So whatever is tried and however wrong it was chosen, it costs at most that share
 * of the time in the long run. The engine's thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_BACKOFF_H
#define INFER_SERVER_BACKOFF_H

#include <stdbool.h>

// Of the time: half a percent for each of up to three methods stays well within the 3% that
// speculation may cost, and is little beside what a step's time varies by itself.
#define BACKOFF_SHARE 0.005

struct backoff {                // all zero: to be tried at once
    double wait_ms;             // until the next try
    int wins, failures;         // in a row; failures since two wins in a row
    int steps;                  // of the present window
    double gained_ms, spent_ms; // in it
};

static inline bool backoff_waits(const struct backoff *b)
{
    return b->wait_ms > 0;
}

// It has been shown to pay, and does so yet.
static inline bool backoff_on(const struct backoff *b)
{
    return b->wins >= 2;
}

// A step of so many milliseconds went by in which it waited.
void backoff_wait(struct backoff *b, double ms);
// A step in which it was used took ms; without it, the same would have taken gained_ms more.
void backoff_use(struct backoff *b, double gained_ms, double ms);
// More was lost than the windows know of.
void backoff_lost(struct backoff *b, double ms);

#endif
