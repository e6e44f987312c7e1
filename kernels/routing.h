/* routing.h: formulas of a router's scores and weights (ops.h, `moe_shape`), for CPU and CUDA
 * alike.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_ROUTING_H
#define KERNELS_ROUTING_H

#include "kernels/ops.h"
#include <math.h>

// Keeps a sum of scores that all vanish from dividing by 0.
#define ROUTING_TINY 1e-20f

DTYPE_INLINE float routing_sigmoid(float logit)
{
    return 1.0f / (1.0f + expf(-logit));
}

// Whether experts are ranked by their logits, which order them as a softmax does and better: near
// ones may round to one probability.
DTYPE_INLINE bool routing_by_logit(const struct moe_shape *s, bool has_bias)
{
    return s->scoring == MOE_SOFTMAX && !has_bias;
}

// What an expert's rank is made of where it is not the logit. max, sum: of the row's logits, and of
// e^(logit - max).
DTYPE_INLINE float routing_score(const struct moe_shape *s, float logit, float max, float sum)
{
    return s->scoring == MOE_SOFTMAX ? expf(logit - max) / sum : routing_sigmoid(logit);
}

// NaN comes first, so that it shows in the weights; after this, NaN marks who may not be chosen.
DTYPE_INLINE float routing_rank(float x)
{
    return isnan(x) ? INFINITY : x;
}

// A chosen expert's weight, up to the sum that it is divided by.
DTYPE_INLINE float routing_share(const struct moe_shape *s, float logit, float max)
{
    return s->scoring == MOE_SOFTMAX ? expf(logit - max) : routing_sigmoid(logit);
}

// By how much the i-th chosen expert's dweight is above their mean under the normalised weights:
// from differences, as the mean is all but equal to one of them where that has nearly all the
// weight.
DTYPE_INLINE float routing_excess(const struct moe_shape *s, const float *weight,
                                  const float *dweight, int i)
{
    float sum = 0;
    for (int j = 0; j < s->top_k; j++) sum += weight[j] / s->scale * (dweight[i] - dweight[j]);
    return sum;
}

// The gradient of the i-th chosen expert's logit, without what a softmax over all experts takes
// from every logit. sum: of the chosen experts' sigmoids.
DTYPE_INLINE float routing_slope(const struct moe_shape *s, float logit, const float *weight,
                                 const float *dweight, int i, float sum)
{
    const float by = s->norm_topk ? routing_excess(s, weight, dweight, i) : dweight[i];
    if (s->scoring == MOE_SOFTMAX) return weight[i] * by;
    float x = routing_sigmoid(logit), slope = s->scale * x * (1.0f - x);
    return s->norm_topk ? slope * by / (sum + ROUTING_TINY) : slope * by;
}

#endif
