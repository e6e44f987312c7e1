/* ops.cu: the CUDA backend's table of operations, and the scratch that they share. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda.cuh"

size_t cuda_scratch_bytes(struct device *dev, const struct scratch_shape *s)
{
    size_t most = s->attn.n_heads > 0 ? cuda_attn_scratch(dev, &s->attn, s->rows, s->dt) : 0;
    size_t norm = cuda_norm_scratch(dev, s->hidden);
    size_t sums = cuda_column_sum_scratch(s->rows, s->widest);
    size_t matmul = cuda_matmul_scratch(s->rows, s->hidden); // added to the residual stream
    size_t head_sums = cuda_column_sum_scratch(s->logits_chunk, s->vocab);
    const size_t row = dtype_size(s->dt);
    size_t lora = cuda_lora_scratch(s->rows, s->lora_rank, max(s->widest, LORA_PARTS * s->hidden),
                                    s->lora_dropout ? s->widest * row : 0);
    size_t lora_head =
        s->lora_head ? cuda_lora_scratch(s->logits_chunk, s->lora_rank, max(s->vocab, s->hidden),
                                         s->lora_dropout ? s->hidden * row : 0)
                     : 0;
    if (lora > most) most = lora;
    if (lora_head > most) most = lora_head;
    size_t delta = cuda_delta_scratch(dev, &s->delta, s->rows, s->max_context);
    if (delta > most) most = delta;
    if (norm > most) most = norm;
    if (sums > most) most = sums;
    if (matmul > most) most = matmul;
    if (head_sums > most) most = head_sums;
    return (most + (1 << 20) - 1) >> 20 << 20; // as it is taken (device.cu)
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
