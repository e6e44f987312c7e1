/* decode_graphs.h: the captured decode steps of one runner, a bounded number of them: where there
 * is no room for one more, the one that was used longest ago goes. The engine's thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_DECODE_GRAPHS_H
#define INFER_SERVER_DECODE_GRAPHS_H

#include "kernels/device.h"

enum { DECODE_GRAPHS_MAX = 256 };

struct decode_graph_key { // everything that a capture freezes
    const void *batch, *kv;
    int rows, wanted; // computed; of these, asked for
    int context, table_stride;
    uint64_t adapted; // adapter_table_sites() of the model's, 0: there is none
};

struct decode_graph {
    struct decode_graph_key key;
    bool warm; // ran once uncaptured, so that no operation needs to set itself up while captured
    struct device_graph *graph; // NULL: not captured yet
    uint64_t used;              // when, in look-ups
};

struct decode_graphs;

int decode_graphs_rows(int n); // the size that n rows are captured as, n or a little more
int decode_graphs_context(int context, int max_context); // likewise

struct decode_graphs *decode_graphs_new(struct device *dev); // NULL: no memory
void decode_graphs_free(struct decode_graphs *graphs);

// The step with this key, new (neither warm nor captured) where it is not known. Valid until the
// next look-up. Waits for the device where another step has to go.
struct decode_graph *decode_graphs_find(struct decode_graphs *graphs,
                                        const struct decode_graph_key *key);

#endif
