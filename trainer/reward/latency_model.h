/* latency_model.h: latency of a sample as a linear function of the work it is, fitted by least
 * squares on everything that this run has measured so far:
 *
 *   latency_ms - queue_ms  ~  base + a prefill + b generated + c draft tokens + d accepted tokens
 *
 * Measured latency depends on who else was in the batch; the fit averages that out and keeps what
 * is the sample's own doing. One thread. */
#ifndef TRAINER_LATENCY_MODEL_H
#define TRAINER_LATENCY_MODEL_H

#include "trainer/reward/cost.h"

// prefill: prompt tokens that were not in the prefix cache
enum { LATENCY_PREFILL, LATENCY_GENERATED, LATENCY_DRAFT, LATENCY_ACCEPTED, LATENCY_INPUTS };

struct latency_model { // zero-initialise; plain data
    // of all samples so far, with Welford's updates: count, means, and sums of products of the
    // deviations from the means; the last variable is the latency
    double n, means[LATENCY_INPUTS + 1], products[LATENCY_INPUTS + 1][LATENCY_INPUTS + 1];
    // the last fit
    double base_ms, ms_per[LATENCY_INPUTS]; // 0 for an input that never varied
    double r2;                              // share of the variance explained
};
void latency_model_add(struct latency_model *m, const struct completion_cost *s);
void latency_model_fit(struct latency_model *m);
double latency_model_ms(const struct latency_model *m,
                        const struct completion_cost *s); // never below 0

// The measurements as a JSON list, for checkpoints. New reference, NULL: no memory.
json_t *latency_model_to_json(const struct latency_model *m);
// Takes them up and fits; ST_FORMAT where it is not such a list.
enum status latency_model_from_json(const json_t *json, struct latency_model *ret);

#endif
