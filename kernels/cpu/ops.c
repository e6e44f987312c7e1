/* ops.c: the CPU backend's table of operations, and the scratch that they share. */
#include "kernels/cpu/cpu.h"

static size_t cpu_scratch_bytes(struct device *dev, const struct scratch_shape *shape)
{
    (void)dev;
    size_t attention = cpu_attn_scratch(&shape->attn, shape->max_context);
    size_t squares = cpu_squares_scratch(shape->n_elements);
    return ((attention > squares ? attention : squares) + 63) / 64 * 64;
}

bool cpu_is_f32(struct device *dev, const char *name, enum dtype dt)
{
    if (dt == DT_F32) return true;
    device_fail(dev, "%s: the CPU computes in f32, not in %s", name, dtype_name(dt));
    return false;
}

const struct ops cpu_ops = {
    .matmul = cpu_matmul,
    .gather_rows = cpu_gather_rows,
    .scatter_add_rows = cpu_scatter_add_rows,
    .norm = cpu_norm,
    .norm_back = cpu_norm_back,
    .rope = cpu_rope,
    .kv_store = cpu_kv_store,
    .rope_store = cpu_rope_store,
    .attn_paged = cpu_attn_paged,
    .attn_packed = cpu_attn_packed,
    .attn_packed_back = cpu_attn_packed_back,
    .act = cpu_act,
    .act_back = cpu_act_back,
    .moe_route = cpu_moe_route,
    .moe_route_back = cpu_moe_route_back,
    .matmul_experts = cpu_matmul_experts,
    .matmul_experts_back = cpu_matmul_experts_back,
    .moe_combine = cpu_moe_combine,
    .moe_combine_back = cpu_moe_combine_back,
    .add = cpu_add,
    .column_sum = cpu_column_sum,
    .convert = cpu_convert,
    .softcap = cpu_softcap,
    .softcap_back = cpu_softcap_back,
    .logprob = cpu_logprob,
    .logprob_back = cpu_logprob_back,
    .top_logprobs = cpu_top_logprobs,
    .adjust_logits = cpu_adjust_logits,
    .distill = cpu_distill,
    .sample = cpu_sample,
    .sum_squares = cpu_sum_squares,
    .adamw = cpu_adamw,
    .checksum = cpu_checksum,
    .scratch_bytes = cpu_scratch_bytes,
};
