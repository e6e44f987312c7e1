/* stats_metrics.h: the statistics of an update or of an evaluation as metrics. */
#ifndef TRAINER_STATS_METRICS_H
#define TRAINER_STATS_METRICS_H

#include "trainer/learn/stats.h"

#include <jansson.h>

// Those that are given (STAT_BIT each), under keys that begin with the prefix.
void stats_put(const struct update_stats *stats, uint64_t given, const char *prefix,
               json_t *metrics);

// How many ranks there are, and what waiting for their gradients took; nothing of one.
void ranks_put(const struct update_stats *stats, const struct comm *all, json_t *metrics);

#endif
