/* decode_graphs.c: see decode_graphs.h. A look-up passes over all of them, which is nothing beside
 * a step. The engine's thread. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/decode_graphs.h"
#include <stdlib.h>
#include <string.h>

struct decode_graphs {
    struct device *dev;
    uint64_t look_ups;
    int n;
    struct decode_graph entry[DECODE_GRAPHS_MAX];
};

int decode_graphs_rows(int n)
{
    if (n <= 2) return n;
    if (n <= 8) return (n + 1) / 2 * 2;
    if (n <= 32) return (n + 7) / 8 * 8;
    if (n <= 128) return (n + 15) / 16 * 16;
    return (n + 31) / 32 * 32;
}

int decode_graphs_context(int context, int max_context)
{
    int bucket = 256;
    while (bucket < context) bucket *= 2;
    return bucket < max_context ? bucket : max_context;
}

struct decode_graphs *decode_graphs_new(struct device *dev)
{
    struct decode_graphs *g = calloc(1, sizeof *g);
    if (g) g->dev = dev;
    return g;
}

void decode_graphs_free(struct decode_graphs *g)
{
    for (int i = 0; g && i < g->n; i++) device_graph_free(g->entry[i].graph);
    free(g);
}

// Room for a new step: a free place, or that of the step used longest ago.
static struct decode_graph *place(struct decode_graphs *g)
{
    if (g->n < DECODE_GRAPHS_MAX) return &g->entry[g->n++];
    struct decode_graph *oldest = &g->entry[0];
    for (int i = 1; i < g->n; i++)
        if (g->entry[i].used < oldest->used) oldest = &g->entry[i];
    if (oldest->graph) {
        device_sync(g->dev); // it may still run; a failure is found again at the next wait
        device_graph_free(oldest->graph);
    }
    return oldest;
}

struct decode_graph *decode_graphs_find(struct decode_graphs *g, const struct decode_graph_key *key)
{
    struct decode_graph *found = NULL;
    for (int i = 0; i < g->n && !found; i++)
        if (!memcmp(&g->entry[i].key, key, sizeof *key)) found = &g->entry[i];
    if (!found) {
        found = place(g);
        *found = (struct decode_graph){.key = *key};
    }
    found->used = ++g->look_ups;
    return found;
}
