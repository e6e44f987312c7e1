/* data_order.h: the order in which examples are taken: epoch e is a permutation sampled from
 * (seed, e), and epochs follow each other without a gap, so the i-th example of a run is a function
 * of (seed, i). One thread. */
#ifndef TRAINER_DATA_ORDER_H
#define TRAINER_DATA_ORDER_H

#include "common/base/status.h"
#include <stdint.h>

struct data_order {
    uint64_t seed;
    int n;
    int64_t epoch; // that `permutation` is of; -1: none yet
    int *permutation;
};
enum status data_order_init(struct data_order *o, uint64_t seed, int n);
void data_order_release(struct data_order *o);
int data_order_at(struct data_order *o, int64_t i);

#endif
