/* tape.c: what a forward pass keeps for the backward pass: how much of it, and where it lies. One
 * thread, the owner of the device. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/model.h"
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TAPE 60
#define TAPE(name, size)                                                                           \
    {                                                                                              \
        offsetof(struct layer_tape, name), (size)                                                  \
    }

static int tape_parts(const struct model_config *c, const struct layer_config *l, enum dtype dt,
                      size_t t, struct device_part ret[MAX_TAPE])
{
    size_t e = dtype_size(dt), hidden = t * (size_t)c->hidden * e, stat = t * sizeof(float);
    size_t qkv = l->latent.rank > 0 ? 0 : t * (size_t)layer_qkv_width(l) * e;
    size_t a = layer_mlp_rows(l, t);
    size_t mean = c->norm == NORM_LAYER ? stat : 0, own = t * (size_t)c->layer_input;
    size_t inputs = l == c->layers ? t * (size_t)config_layer_inputs(c) : 0;
    const struct device_part parts[] = {
        TAPE(x, hidden),
        TAPE(rstd1, c->block & NO_PRE_NORM ? 0 : stat),
        TAPE(mean1, mean),
        TAPE(qkv_raw, c->block & QK_NORM ? qkv : 0),
        TAPE(rstd_q, c->block & QK_NORM ? stat * (size_t)layer_qk_norms(c, l->n_heads) : 0),
        TAPE(rstd_k, c->block & QK_NORM ? stat * (size_t)layer_qk_norms(c, l->n_kv_heads) : 0),
        TAPE(rstd_v, c->block & V_NORM ? stat * (size_t)l->n_kv_heads : 0),
        TAPE(qkv, qkv),
        TAPE(kv, l->kv_shared < 0 ? 0 : 2 * t * (size_t)layer_kv_width(l) * e),
        TAPE(gate, c->block & ATTN_GATE ? t * (size_t)layer_q_width(l) * e : 0),
        TAPE(attn, t * (size_t)layer_attn_width(l) * e),
        TAPE(lse, stat * (size_t)l->n_heads),
        TAPE(delta_in, t * (size_t)layer_delta_in_width(l) * e),
        TAPE(delta_gates, stat * (size_t)layer_delta_gates_width(l)),
        TAPE(rstd_delta, stat * (size_t)l->delta.n_heads),
        TAPE(attn_proj, c->block & POST_NORM ? hidden : 0),
        TAPE(rstd_post1, c->block & POST_NORM ? stat : 0),
        TAPE(x_mid, layer_mixes(l) && layer_has_mlp(l) ? hidden : 0),
        TAPE(rstd2, c->block & (PARALLEL_BLOCK | NO_PRE_NORM) ? 0 : stat),
        TAPE(mean2, c->block & PARALLEL_BLOCK ? 0 : mean),
        TAPE(router_logits, stat * (size_t)l->moe.n_experts),
        TAPE(shared_gate_up, t * (size_t)config_up_width(c, l->shared_intermediate) * e),
        TAPE(shared_out, l->shared_gate || (c->block & EXPERTS_BESIDE) ? hidden : 0),
        TAPE(rstd_shared, c->block & EXPERTS_BESIDE ? stat : 0),
        TAPE(experts_sum, c->block & EXPERTS_BESIDE ? hidden : 0),
        TAPE(rstd_experts, c->block & EXPERTS_BESIDE ? stat : 0),
        TAPE(shared_logits, l->shared_gate ? stat : 0),
        TAPE(gate_up, a * (size_t)config_up_width(c, l->intermediate) * e),
        TAPE(expert_out, layer_expert_elements(c, l, t) * e),
        TAPE(mlp_proj, c->block & POST_NORM ? hidden : 0),
        TAPE(rstd_post2, c->block & POST_NORM ? stat : 0),
        TAPE(x_own, own ? hidden : 0),
        TAPE(own_gate, own * e),
        TAPE(own_proj, own ? hidden : 0),
        TAPE(rstd_own, own ? stat : 0),
        TAPE(inputs, inputs * e),
        TAPE(inputs_raw, inputs * e),
        TAPE(rstd_inputs, inputs > 0 ? stat * (size_t)c->n_layers : 0),
    };
    int n = sizeof parts / sizeof *parts;
    memcpy(ret, parts, sizeof parts);
    n += latent_rows_parts(l, dt, t, offsetof(struct layer_tape, latent), true, ret + n);
    n += model_routing_parts(l->moe.n_experts, t * (size_t)l->moe.top_k,
                             offsetof(struct layer_tape, routing), ret + n);
    return n + model_routing_parts(l->shared_gate, l->shared_gate ? t : 0,
                                   offsetof(struct layer_tape, shared_routing), ret + n);
}

// Whether each layer has a part for itself with RECOMPUTE_LAYER, too: the residual stream at its
// entry, what other layers read, and what attention gives, which takes longest to compute again at
// long contexts.
static bool is_kept(const struct layer_config *layer, const struct device_part *part)
{
    const bool attn = layer->latent.rank == 0 && layer->delta.n_heads == 0;
    return part->field == offsetof(struct layer_tape, x) ||
           part->field == offsetof(struct layer_tape, kv) ||
           part->field == offsetof(struct layer_tape, inputs) ||
           part->field == offsetof(struct layer_tape, inputs_raw) ||
           part->field == offsetof(struct layer_tape, rstd_inputs) ||
           (attn && (part->field == offsetof(struct layer_tape, attn) ||
                     part->field == offsetof(struct layer_tape, lse)));
}

// Visits every part of a tape in one fixed order: sums their sizes, and sets the pointers of
// `tape`. Kept parts of all layers come first; with RECOMPUTE_LAYER all layers share the rest,
// which is as long as the largest layer's.
static size_t lay_out(const struct model_config *c, enum dtype dt, size_t t,
                      enum recompute recompute, struct tape *tape)
{
    struct device_part parts[MAX_TAPE];
    size_t at = 0, shared = 0, end = 0;
    char *base = tape ? tape->memory : NULL;
    for (int kept = 1; kept >= 0; kept--) {
        shared = at;
        for (int l = 0; l < c->n_layers; l++) {
            if (!kept && recompute == RECOMPUTE_LAYER) at = shared;
            const int n = tape_parts(c, &c->layers[l], dt, t, parts);
            for (int i = 0; i < n; i++) {
                if (is_kept(&c->layers[l], &parts[i]) != kept) continue;
                if (tape && parts[i].bytes > 0)
                    *device_part_pointer(&tape->layers[l], &parts[i]) = base + at;
                at += (parts[i].bytes + 255) / 256 * 256;
            }
            // what an MLP without attention before it reads is the layer's own input
            if (tape && !tape->layers[l].x_mid) tape->layers[l].x_mid = tape->layers[l].x;
            if (at > end) end = at;
        }
    }
    if (tape) tape->x_final = base + end;
    return end + t * (size_t)c->hidden * dtype_size(dt);
}

size_t tape_bytes(const struct model_config *config, enum dtype dt, int max_tokens,
                  enum recompute recompute)
{
    return lay_out(config, dt, (size_t)max_tokens, recompute, NULL);
}

const char *const recompute_names[] = {"none", "layer", NULL};

enum status tape_new(const struct model *m, int max_tokens, enum recompute recompute,
                     struct tape **ret)
{
    enum status st = ST_OK;
    struct tape *tape = calloc(1, sizeof *tape);
    if (tape) tape->layers = calloc((size_t)m->config->n_layers, sizeof *tape->layers);
    if (!tape || !tape->layers) FAIL(ST_NO_MEMORY, "no memory for a tape");
    tape->max_tokens = max_tokens;
    tape->recompute = recompute;
    tape->held = -1;
    tape->bytes = tape_bytes(m->config, m->dt, max_tokens, recompute);
    CHECK(status_context(device_alloc(m->dev, tape->bytes, &tape->memory),
                         "activations of %d tokens", max_tokens));
    lay_out(m->config, m->dt, (size_t)max_tokens, recompute, tape);
    *ret = TAKE_PTR(tape);
out:
    tape_free(m->dev, tape);
    return st;
}

void tape_free(struct device *dev, struct tape *tape)
{
    if (!tape) return;
    device_release(dev, tape->memory);
    free(tape->layers);
    free(tape);
}
