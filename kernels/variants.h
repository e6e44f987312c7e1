/* variants.h: the ways in which a backend computes an operation (ops.h). Most operations have one;
 * the others a table, of which a call takes the first row that takes it.
 * kernels/cuda/README.md says of each what it costs and which test holds its order; `cw-bench ops
 * --variants` prints and times them. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_VARIANTS_H
#define KERNELS_VARIANTS_H

#include "kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

// clang-format off
// The fields of struct ops (ops.h), in its order.
#define EACH_OP(X) \
    X(matmul) X(lora) \
    X(gather_rows) X(scatter_add_rows) \
    X(norm) X(norm_back) \
    X(rope) X(attn) X(attn_back) \
    X(latent_matmul) X(latent_expand) \
    X(split_gate) \
    X(short_conv) X(short_conv_back) X(delta_rule) X(delta_rule_back) \
    X(act) X(act_back) \
    X(moe_route) X(moe_route_back) X(moe_balance) X(moe_balance_back) \
    X(experts_bias) X(moe_combine) X(moe_combine_back) \
    X(multiply) X(add) X(column_sum) X(convert) X(quantise) \
    X(softcap) X(softcap_back) \
    X(logprob) X(logprob_back) X(top_logprobs) X(adjust_logits) X(mask_logits) X(distill) X(sample) \
    X(sum_squares) X(adamw) \
    X(checksum) X(random_normal) X(scratch_bytes)
// clang-format on

enum op {
#define X(name) OP_##name,
    EACH_OP(X)
#undef X
        N_OPS
};

struct op_variant {
    const char *name, *taken; // taken: when, in words
    // False where it does not take the call; then nothing is done.
    bool (*launch)(struct device *dev, const void *call);
};
struct op_variants {
    enum op op;
    int n;
    const struct op_variant *rows;
};

const char *op_name(enum op op);
// The operation's rows on such a device in this build; NULL: there is one way alone, or none here.
const struct op_variants *op_variants_of(enum device_kind kind, enum op op);
// The row that the last call of the operation took; NULL: none did.
const struct op_variant *device_variant_taken(const struct device *dev, enum op op);

#ifdef __cplusplus
}
#endif
#endif
