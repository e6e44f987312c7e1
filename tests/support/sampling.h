/* sampling.h: the specification of a row's distribution (kernels/ops.h: sample) in double
 * precision, for tests to compare with. Running out of memory fails the running test. One thread.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_SAMPLING_H
#define TESTS_SUPPORT_SAMPLING_H

#include "kernels/ops.h"

// What the cuts keep of a row: kept (vocab); the sums of e^(z - max) over all tokens and those
// kept.
void cut_formula(const float *logits, int vocab, const struct sample_params *s, bool *kept,
                 double *ret_all, double *ret_kept);
// ret (vocab): the probability of each token after temperature and cuts.
void distribution_formula(const float *logits, int vocab, const struct sample_params *s,
                          double *ret);
// The Gumbel noise of a token, and the u that a draft's acceptance is decided by.
double noise_formula(const struct sample_params *s, int token);
double acceptance_formula(const struct sample_params *s);

#endif
