/* ops.cu: the CUDA backend's table of operations, and the scratch that they share. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda.cuh"
#include <algorithm>

size_t cuda_scratch_bytes(struct device *dev, const struct scratch_shape *s)
{
    const size_t element = s->lora_dropout ? dtype_size(s->dt) : 0;
    auto lora = [&](int rows, int width, int columns) {
        return cuda_lora_scratch(rows, s->lora_rank, columns, width * element);
    };
    const size_t most = std::max(
        {s->attn.n_heads > 0 ? cuda_attn_scratch(dev, &s->attn, s->rows, s->dt) : 0,
         cuda_norm_scratch(dev, std::max(s->hidden, delta_value_width(&s->delta))),
         cuda_column_sum_scratch(s->rows, s->widest),
         cuda_matmul_scratch(s->rows, s->hidden), // added to the residual stream
         cuda_column_sum_scratch(s->logits_chunk, s->vocab),
         lora(s->rows, s->widest, std::max(s->widest, LORA_PARTS * s->hidden)),
         s->lora_head ? lora(s->logits_chunk, s->hidden, std::max(s->vocab, s->hidden)) : 0,
         cuda_delta_scratch(dev, &s->delta, s->rows)});
    const size_t all = most + s->widened * dtype_size(s->dt) + s->rounded;
    return (all + (1 << 20) - 1) >> 20 << 20; // as it is taken (device.cu)
}

static const struct op_variants *const tables[] = {
#define X(name) &name##_variants,
    EACH_TABLE(X)
#undef X
        NULL};

extern "C" const struct ops ops_cuda;
const struct ops ops_cuda = {
#define X(name) cuda_##name,
    EACH_OP(X)
#undef X
        tables};
