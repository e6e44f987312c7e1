/* step_timing.h: fills a table of what steps take (speculative/step_cost.h) by running some, when
 * the server starts. The engine's thread. */
#ifndef INFER_SERVER_STEP_TIMING_H
#define INFER_SERVER_STEP_TIMING_H

#include "infer-server/engine/runner.h"
#include "infer-server/speculative/step_cost.h"

// What decoding steps of 1..most_rows rows take a runner, sampling included; larger sizes only
// within a second or so. Writes to the KV pool at will: nobody may have anything in it. Captures
// the steps on CUDA. ST_DEVICE.
enum status step_timing_measure(struct runner *r, int most_rows, struct step_cost *ret);

#endif
