/* spans.c: laps of the monotonic clock. */
#include "trainer/learn/spans.h"
#include "common/base/clock.h"

#include <math.h>
#include <stddef.h>

const char *const span_names[] = {"wait",      "rollout", "score", "pack", "forward",    "backward",
                                  "optimizer", "publish", "log",   "eval", "checkpoint", NULL};

void spans_begin(struct spans *s)
{
    *s = (struct spans){.since_ns = clock_now_ns()};
}

void spans_lap(struct spans *s, enum span span)
{
    if (!s) return;
    const int64_t now = clock_now_ns();
    s->seconds[span] += (double)(now - s->since_ns) / NS_PER_S;
    s->since_ns = now;
}

void spans_move(struct spans *s, enum span from, enum span to, double seconds)
{
    if (!s) return;
    const double moved = fmin(seconds, s->seconds[from]);
    s->seconds[from] -= moved;
    s->seconds[to] += moved;
}
