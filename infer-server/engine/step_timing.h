/* step_timing.h: fills a table of what steps take (speculative/step_cost.h) by running some, when
 * the server starts. The engine's thread. */
#ifndef INFER_SERVER_STEP_TIMING_H
#define INFER_SERVER_STEP_TIMING_H

#include "common/base/status.h"

struct batch;
struct kv_view;
struct model;
struct sampler;
struct step_cost;

// What a model and its sampler take for decoding steps of 1..most_rows rows, larger sizes only
// within a second or so. Writes to the KV pool at will: nobody may have anything in it. Captures
// the steps on CUDA. ST_DEVICE.
enum status step_timing_measure(struct model *model, struct batch *batch, struct sampler *sampler,
                                const struct kv_view *kv, int most_rows, struct step_cost *ret);

#endif
