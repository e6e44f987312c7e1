/* spans.h: where a step's time goes. A clock with laps: whatever the main thread does is some
 * span's, so that the spans of a step are together the time it took. One thread. */
#ifndef TRAINER_SPANS_H
#define TRAINER_SPANS_H

#include <stdint.h>

enum span {
    SPAN_WAIT, // for rollouts that others sample and score meanwhile (--async), for other ranks
    SPAN_ROLLOUT,
    SPAN_SCORE,
    SPAN_PACK,
    SPAN_FORWARD,   // the reference's and the draft's too
    SPAN_BACKWARD,  // the device's work of one micro-batch may run on while the next is packed
    SPAN_OPTIMIZER, // gradient norm, sums over ranks that the backward pass did not hide, AdamW
    SPAN_PUBLISH,   // quiescing the server, and letting it go on
    SPAN_LOG,       // metrics, rollouts/, and all that has no span of its own
    SPAN_EVAL,
    SPAN_CHECKPOINT,
    N_SPANS
};
extern const char *const span_names[]; // "wait", "rollout"...

struct spans {
    int64_t since_ns; // the last lap's end
    double seconds[N_SPANS];
};

// Begins anew, with the first lap.
void spans_begin(struct spans *s);
// The time since the last lap was that span's. NULL: nobody counts.
void spans_lap(struct spans *s, enum span span);
// So many of the seconds of one, at most all, were another's.
void spans_move(struct spans *s, enum span from, enum span to, double seconds);

#endif
