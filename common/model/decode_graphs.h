/* decode_graphs.h: the captured decode steps of one model, a bounded number of them: where there is
 * no room for one more, the one that was used longest ago goes. One thread, the owner of the
 * device.
 */
#ifndef COMMON_MODEL_DECODE_GRAPHS_H
#define COMMON_MODEL_DECODE_GRAPHS_H

#include "kernels/device.h"

enum { DECODE_GRAPHS_MAX = 256 };

struct decode_graph { // everything that a capture freezes is its key
    const void *batch, *kv;
    int rows, context;
    bool warm; // ran once uncaptured, so that no operation needs to set itself up while captured
    struct device_graph *graph; // NULL: not captured yet
    uint64_t used;              // when, in look-ups
};

struct decode_graphs;

struct decode_graphs *decode_graphs_new(struct device *dev); // NULL: no memory
void decode_graphs_free(struct decode_graphs *graphs);

// The step with this key, new (neither warm nor captured) where it is not known. Valid until the
// next look-up. Waits for the device where another step has to go.
struct decode_graph *decode_graphs_find(struct decode_graphs *graphs, const void *batch,
                                        const void *kv, int rows, int context);

#endif
