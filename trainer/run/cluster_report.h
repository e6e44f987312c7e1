/* cluster_report.h: what a curriculum made of an epoch's rewards, for people (a boxed text, UTF-8)
 * and for plots (numbers of metrics.jsonl). Pure functions. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_CLUSTER_REPORT_H
#define TRAINER_CLUSTER_REPORT_H

#include "common/base/bytes.h"
#include "trainer/curriculum/buckets.h"
#include <jansson.h>

struct cluster_report {
    const char *mode;              // "kde", "uniform"
    int64_t epoch;                 // that ended, from 1
    const struct buckets *buckets; // at least one
    double rollouts[BUCKETS_MAX];  // of a prompt of each in the next epoch
};

// Appends; bytes_status() tells of want of memory.
void cluster_report_text(const struct cluster_report *r, struct bytes *ret);
// One line for the console.
void cluster_report_line(const struct cluster_report *r, struct bytes *ret);
// Adds curriculum/... keys; a bucket's are curriculum/bucket_K/..., K from 1.
void cluster_report_metrics(const struct cluster_report *r, json_t *metrics);

#endif
