/* ops.c: the CPU backend's table of operations, and the scratch that they share. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu.h"

size_t cpu_scratch_bytes(struct device *dev, const struct scratch_shape *shape)
{
    (void)dev;
    size_t attention =
        shape->attn.n_heads > 0 ? cpu_attn_scratch(&shape->attn, shape->max_context) : 0;
    size_t delta = cpu_delta_scratch(&shape->delta, shape->rows, shape->max_context);
    size_t squares = cpu_squares_scratch(shape->n_elements);
    size_t lora =
        cpu_lora_scratch(shape->rows, shape->lora_rank, shape->lora_dropout ? shape->widest : 0);
    size_t max = attention > squares ? attention : squares;
    size_t widened = (size_t)shape->widened * sizeof(float);
    if (delta > max) max = delta;
    if (widened > max) max = widened;
    return ((max > lora ? max : lora) + 63) / 64 * 64;
}

bool cpu_is_f32(struct device *dev, const char *name, enum dtype dt)
{
    if (dt == DT_F32) return true;
    device_fail(dev, "%s: the CPU computes in f32, not in %s", name, dtype_name(dt));
    return false;
}

const struct ops cpu_ops = {
#define X(name) .name = cpu_##name,
    EACH_OP(X)
#undef X
};

// EACH_OP is in the struct's order, by which the CUDA backend's table is filled.
#define X(name)                                                                                    \
    _Static_assert(offsetof(struct ops, name) == OP_##name * sizeof(void (*)(void)), #name);
EACH_OP(X)
#undef X
