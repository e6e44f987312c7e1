/* weights.c: lays the arena out, and reads and writes single tensors of it. Folders are
 * weights_files.c's.
 *
 * A new kind of tensor is one row of `roles`. The plan walks the roles in a fixed order; each
 * role's block is one matrix (or vector), and the family's names divide its rows among Hugging Face
 * tensors. One thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/weights.h"
#include "common/base/hash.h"
#include "common/base/file.h"
#include "common/base/mxfp4.h"
#include "kernels/comm.h"
#include "kernels/ops.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ALIGN_ELEMENTS  128
#define BUFFER_ELEMENTS 2 // of the arena's narrowest dtype that one f32 takes

// ---- the roles ----------------------------------------------------------------------------------
// Sizes that shapes are made of: of a config, a layer and so many rows of the vocabulary, a shard's
// or the whole model's.
#define SIZE_TABLE(X)                                                                              \
    X(SIZE_NONE, 0)                                                                                \
    X(SIZE_HIDDEN, c->hidden)                                                                      \
    X(SIZE_TWO_HIDDEN, 2 * c->hidden)                                                              \
    X(SIZE_VOCAB, vocab)                                                                           \
    X(SIZE_Q, layer_q_width(l))                                                                    \
    X(SIZE_K, layer_k_in_width(l))                                                                 \
    X(SIZE_V, layer_v_in_width(l))                                                                 \
    X(SIZE_LAYER_INPUT, c->layer_input)                                                            \
    X(SIZE_LAYER_INPUTS, c->layer_input * c->n_layers)                                             \
    X(SIZE_LAYER_VOCAB, (int64_t)c->layer_input_vocab *vocab / config_embedded(c))                 \
    X(SIZE_Q_IN, layer_q_width(l) * (c->block & ATTN_GATE ? 2 : 1))                                \
    X(SIZE_ATTN_IN, layer_attn_in_width(c, l))                                                     \
    X(SIZE_Q_NORM, layer_qk_norm_width(c, l, layer_whole(c, l)->n_heads))                          \
    X(SIZE_K_NORM, layer_qk_norm_width(c, l, layer_whole(c, l)->n_kv_heads))                       \
    X(SIZE_HEADS, l->n_heads)                                                                      \
    X(SIZE_ATTN, layer_attn_width(l))                                                              \
    X(SIZE_Q_RANK, l->latent.q_rank)                                                               \
    X(SIZE_LATENT, layer_latent_width(l))                                                          \
    X(SIZE_LATENT_RANK, l->latent.rank)                                                            \
    X(SIZE_LATENT_HEADS, (l->head_dim - l->latent.rope + l->latent.value) * l->n_heads)            \
    X(SIZE_DELTA_IN, layer_delta_in_width(l))                                                      \
    X(SIZE_DELTA_CONV, delta_conv_width(&l->delta))                                                \
    X(SIZE_DELTA_VALUE, delta_value_width(&l->delta))                                              \
    X(SIZE_DELTA_KEYS, delta_key_width(&l->delta))                                                 \
    X(SIZE_DELTA_IN_FIRST,                                                                         \
      (c->block & DELTA_GROUPED) ? layer_delta_in_width(l) : delta_first_width(l))                 \
    X(SIZE_DELTA_FIRST, delta_first_width(l))                                                      \
    X(SIZE_DELTA_THIRD, delta_third_width(l))                                                      \
    X(SIZE_DELTA_TAPS, l->delta.taps)                                                              \
    X(SIZE_DELTA_GATES, layer_delta_gates_width(l))                                                \
    X(SIZE_DELTA_FIRST_GATES, l->delta.n_heads *(c->block & DELTA_GROUPED ? 2 : 1))                \
    X(SIZE_DELTA_HEADS, l->delta.n_heads)                                                          \
    X(SIZE_DELTA_NORM, l->delta.is_scan ? delta_value_width(&l->delta) : l->delta.head_dim)        \
    X(SIZE_EXPERTS, l->moe.n_experts)                                                              \
    X(SIZE_EXPERT, layer_expert_width(c, l))                                                       \
    X(SIZE_UP, config_up_width(c, l->intermediate))                                                \
    X(SIZE_INNER, l->intermediate)                                                                 \
    X(SIZE_SHARED_UP, config_up_width(c, l->shared_intermediate))                                  \
    X(SIZE_SHARED_INNER, l->shared_intermediate)                                                   \
    X(SIZE_ONE, 1)

enum size {
#define X(name, value) name,
    SIZE_TABLE(X)
#undef X
};

// Parts of linear attention's first matmul, which ranks share each: q, k, v and the output's gate;
// of Mamba-2 the gate, x, B, C and the steps; of a short convolution alone three of one width. What
// is stored by key head is one part, of which ranks hold equal shares of the heads.
static int delta_first_width(const struct layer_config *l) // and of the second
{
    const struct delta_shape *s = &l->delta;
    return s->is_scan || delta_is_conv(s) ? delta_value_width(s) : delta_key_width(s);
}

static int delta_third_width(const struct layer_config *l) // and of the fourth
{
    return l->delta.is_scan ? delta_key_width(&l->delta) : delta_value_width(&l->delta);
}

static int64_t size_of(const struct model_config *c, const struct layer_config *l, int vocab,
                       enum size size)
{
#define X(name, value)                                                                             \
    case name:                                                                                     \
        return value;
    switch (size) {
        SIZE_TABLE(X)
    }
#undef X
    return 0;
}

// When a model, or a layer, has a role's block; without rows or columns, as those of experts where
// there are none, it has none whatever this says.
#define WHEN_TABLE(X)                                                                              \
    X(ALWAYS, true)                                                                                \
    X(IF_ATTENTION, attention)                                                                     \
    X(IF_DELTA_STATE, l->delta.n_heads > 0 && !delta_is_conv(&l->delta))                           \
    X(IF_DELTA_SCAN, l->delta.n_heads > 0 && l->delta.is_scan)                                     \
    X(IF_DELTA_BIAS, l->delta.n_heads > 0 && (c->block & DELTA_BIAS))                              \
    X(IF_DELTA_CONV_BIAS, l->delta.n_heads > 0 && (c->block & DELTA_CONV_BIAS))                    \
    X(IF_LAYER_NORM, layer_norm)                                                                   \
    X(IF_PRE_NORM, layer_mixes(l) && !(c->block & NO_PRE_NORM))                                    \
    X(IF_MLP_NORM, layer_has_mlp(l) && !(c->block & (NO_PRE_NORM | PARALLEL_BLOCK)))               \
    X(IF_MLP_LAYER_NORM, layer_norm && !(c->block & PARALLEL_BLOCK))                               \
    X(IF_POST_NORM, (c->block & POST_NORM))                                                        \
    X(IF_QKV, attention && !latent)                                                                \
    X(IF_LATENT_Q, latent && l->latent.q_rank == 0)                                                \
    X(IF_LATENT_BIAS, (c->block & O_BIAS))                                                         \
    X(IF_QK_NORM, attention && (c->block & QK_NORM))                                               \
    X(IF_K_NORM, attention && (c->block & QK_NORM) && l->kv_from < 0)                              \
    X(IF_SINKS, attention && (c->block & SINKS))                                                   \
    X(IF_QKV_BIAS, attention && (c->block & QKV_BIAS))                                             \
    X(IF_O_BIAS, attention && (c->block & O_BIAS))                                                 \
    X(IF_MLP, layer_has_mlp(l) && !experts)                                                        \
    X(IF_MLP_BIAS, layer_has_mlp(l) && !experts && (c->block & MLP_BIAS))                          \
    X(IF_EXPERTS_BIAS, (c->block & MLP_BIAS))                                                      \
    X(IF_EXPERTS_LATENT, experts && l->expert_latent > 0)                                          \
    X(IF_ROUTER_LOGIT_BIAS, experts && (c->block & ROUTER_LOGIT_BIAS))                             \
    X(IF_BESIDE, experts && (c->block & EXPERTS_BESIDE))                                           \
    X(IF_ROUTER_BIAS, l->router_bias)                                                              \
    X(IF_SHARED_GATE, l->shared_gate)                                                              \
    X(IF_LAYER_INPUT, c->layer_input > 0)                                                          \
    X(IF_LAYER_SCALE, (c->block & LAYER_SCALE))                                                    \
    X(IF_WHOLE, !c->mtp)                                                                           \
    X(IF_MTP, c->mtp)                                                                              \
    X(IF_UNTIED, !c->tie_embeddings && !c->mtp)                                                    \
    X(IF_HEAD_BIAS, (c->block & HEAD_BIAS))

enum when {
#define X(name, holds) name,
    WHEN_TABLE(X)
#undef X
};

static bool holds(const struct model_config *c, const struct layer_config *l, enum when when)
{
    const bool layer_norm = c->norm == NORM_LAYER && !(c->block & NO_NORM_BIAS),
               experts = l->moe.n_experts > 0;
    const bool latent = l->latent.rank > 0, attention = l->n_heads > 0;
#define X(name, holds) [name] = holds,
    const bool is[] = {WHEN_TABLE(X)};
#undef X
    return is[when];
}

// A role's block: (rows, cols), or (rows) where cols is none; as many of them as there are experts
// where it is theirs. `parts` are the rows of the tensors that most families store it in. A bias
// has the rows of what it is of.
struct role {
    bool is_norm, is_bias, of_experts, is_buffer, in_twin;
    enum when when;
    enum size rows, cols, parts[MAX_ROW_RUNS];
};
#define BIAS         .is_bias = true
#define NORM_OF(r)   .is_norm = true, .rows = SIZE_##r
#define NORM         NORM_OF(HIDDEN)
#define OF_EXPERTS   .of_experts = true
#define IN_TWIN      .in_twin = true
#define MATRIX(r, c) .rows = SIZE_##r, .cols = SIZE_##c
#define TWO_INNER    .parts = {SIZE_INNER, SIZE_INNER}

static const struct role roles[ROLE_COUNT] = {
    [ROLE_EMBED] = {.when = IF_WHOLE, MATRIX(VOCAB, HIDDEN)},
    [ROLE_LAYER_EMBED] = {.when = IF_LAYER_INPUT, MATRIX(LAYER_VOCAB, LAYER_INPUTS)},
    [ROLE_LAYER_INPUT] = {.when = IF_LAYER_INPUT, MATRIX(LAYER_INPUTS, HIDDEN)},
    [ROLE_LAYER_INPUT_NORM] = {NORM_OF(LAYER_INPUT), .when = IF_LAYER_INPUT},
    [ROLE_MTP_EMBED_NORM] = {NORM, .when = IF_MTP},
    [ROLE_MTP_HIDDEN_NORM] = {NORM, .when = IF_MTP},
    [ROLE_MTP_PROJ] = {.when = IF_MTP, MATRIX(HIDDEN, TWO_HIDDEN)},
    [ROLE_ATTN_NORM] = {NORM, .when = IF_PRE_NORM},
    [ROLE_ATTN_NORM_BIAS] = {BIAS, .when = IF_LAYER_NORM},
    [ROLE_QKV] = {IN_TWIN, .when = IF_QKV, MATRIX(ATTN_IN, HIDDEN),
                  .parts = {SIZE_Q_IN, SIZE_K, SIZE_V}},
    [ROLE_QKV_BIAS] = {BIAS, .when = IF_QKV_BIAS},
    [ROLE_Q_NORM] = {NORM_OF(Q_NORM), .when = IF_QK_NORM},
    [ROLE_K_NORM] = {NORM_OF(K_NORM), .when = IF_K_NORM},
    [ROLE_SINKS] = {.when = IF_SINKS, .rows = SIZE_HEADS},
    [ROLE_Q_A] = {IN_TWIN, MATRIX(Q_RANK, HIDDEN)},
    [ROLE_Q_A_BIAS] = {BIAS, .when = IF_LATENT_BIAS},
    [ROLE_Q_A_NORM] = {NORM_OF(Q_RANK)},
    [ROLE_Q_B] = {IN_TWIN, MATRIX(Q, Q_RANK)},
    [ROLE_Q] = {IN_TWIN, .when = IF_LATENT_Q, MATRIX(Q, HIDDEN)},
    [ROLE_KV_A] = {IN_TWIN, MATRIX(LATENT, HIDDEN)},
    [ROLE_KV_A_BIAS] = {BIAS, .when = IF_LATENT_BIAS},
    [ROLE_KV_A_NORM] = {NORM_OF(LATENT_RANK)},
    [ROLE_KV_B] = {IN_TWIN, MATRIX(LATENT_HEADS, LATENT_RANK)},
    [ROLE_O] = {IN_TWIN, .when = IF_ATTENTION, MATRIX(HIDDEN, ATTN)},
    [ROLE_O_BIAS] = {BIAS, .when = IF_O_BIAS},
    [ROLE_DELTA_IN] = {IN_TWIN, MATRIX(DELTA_IN, HIDDEN),
                       .parts = {SIZE_DELTA_IN_FIRST, SIZE_DELTA_FIRST, SIZE_DELTA_THIRD,
                                 SIZE_DELTA_THIRD, SIZE_DELTA_HEADS}},
    [ROLE_DELTA_IN_BIAS] = {BIAS, .when = IF_DELTA_BIAS},
    [ROLE_DELTA_GATES] = {MATRIX(DELTA_GATES, HIDDEN),
                          .parts = {SIZE_DELTA_FIRST_GATES, SIZE_DELTA_HEADS}},
    [ROLE_DELTA_CONV] = {MATRIX(DELTA_CONV, DELTA_TAPS),
                         .parts = {SIZE_DELTA_FIRST, SIZE_DELTA_KEYS, SIZE_DELTA_THIRD}},
    [ROLE_DELTA_CONV_BIAS] = {BIAS, .when = IF_DELTA_CONV_BIAS},
    [ROLE_DELTA_A_LOG] = {.when = IF_DELTA_STATE, .rows = SIZE_DELTA_HEADS},
    [ROLE_DELTA_DT_BIAS] = {.when = IF_DELTA_STATE, .rows = SIZE_DELTA_HEADS},
    [ROLE_DELTA_SKIP] = {.when = IF_DELTA_SCAN, .rows = SIZE_DELTA_HEADS},
    [ROLE_DELTA_NORM] = {NORM_OF(DELTA_NORM), .when = IF_DELTA_STATE},
    [ROLE_DELTA_OUT] = {IN_TWIN, MATRIX(HIDDEN, DELTA_VALUE)},
    [ROLE_DELTA_OUT_BIAS] = {BIAS, .when = IF_DELTA_BIAS},
    [ROLE_POST_ATTN_NORM] = {NORM, .when = IF_POST_NORM},
    [ROLE_MLP_NORM] = {NORM, .when = IF_MLP_NORM},
    [ROLE_MLP_NORM_BIAS] = {BIAS, .when = IF_MLP_LAYER_NORM},
    [ROLE_ROUTER] = {MATRIX(EXPERTS, HIDDEN)},
    [ROLE_ROUTER_LOGIT_BIAS] = {BIAS, .when = IF_ROUTER_LOGIT_BIAS},
    [ROLE_ROUTER_NORM] = {NORM, .when = IF_BESIDE},
    [ROLE_EXPERT_SCALE] = {NORM_OF(EXPERTS), .when = IF_BESIDE},
    [ROLE_EXPERTS_NORM] = {NORM, .when = IF_BESIDE},
    [ROLE_GATE_UP] = {IN_TWIN, .when = IF_MLP, MATRIX(UP, HIDDEN), TWO_INNER},
    [ROLE_GATE_UP_BIAS] = {BIAS, .when = IF_MLP_BIAS},
    [ROLE_EXPERTS_GATE_UP] = {IN_TWIN, OF_EXPERTS, MATRIX(UP, EXPERT), TWO_INNER},
    [ROLE_EXPERTS_GATE_UP_BIAS] = {BIAS, OF_EXPERTS, .when = IF_EXPERTS_BIAS},
    [ROLE_EXPERTS_IN] = {IN_TWIN, .when = IF_EXPERTS_LATENT, MATRIX(EXPERT, HIDDEN)},
    [ROLE_EXPERTS_OUT] = {IN_TWIN, .when = IF_EXPERTS_LATENT, MATRIX(HIDDEN, EXPERT)},
    [ROLE_DOWN] = {IN_TWIN, .when = IF_MLP, MATRIX(HIDDEN, INNER)},
    [ROLE_DOWN_BIAS] = {BIAS, .when = IF_MLP_BIAS},
    [ROLE_EXPERTS_DOWN] = {IN_TWIN, OF_EXPERTS, MATRIX(EXPERT, INNER)},
    [ROLE_EXPERTS_DOWN_BIAS] = {BIAS, OF_EXPERTS, .when = IF_EXPERTS_BIAS},
    [ROLE_SHARED_GATE_UP] = {IN_TWIN, MATRIX(SHARED_UP, HIDDEN),
                             .parts = {SIZE_SHARED_INNER, SIZE_SHARED_INNER}},
    [ROLE_SHARED_DOWN] = {IN_TWIN, MATRIX(HIDDEN, SHARED_INNER)},
    [ROLE_SHARED_GATE] = {.when = IF_SHARED_GATE, MATRIX(ONE, HIDDEN)},
    [ROLE_POST_SHARED_NORM] = {NORM, .when = IF_BESIDE},
    [ROLE_POST_EXPERTS_NORM] = {NORM, .when = IF_BESIDE},
    [ROLE_POST_MLP_NORM] = {NORM, .when = IF_POST_NORM},
    [ROLE_LAYER_GATE] = {.when = IF_LAYER_INPUT, MATRIX(LAYER_INPUT, HIDDEN)},
    [ROLE_LAYER_OUT] = {.when = IF_LAYER_INPUT, MATRIX(HIDDEN, LAYER_INPUT)},
    [ROLE_POST_LAYER_NORM] = {NORM, .when = IF_LAYER_INPUT},
    [ROLE_FINAL_NORM] = {NORM},
    [ROLE_FINAL_NORM_BIAS] = {BIAS, .when = IF_LAYER_NORM},
    [ROLE_HEAD] = {.when = IF_UNTIED, MATRIX(VOCAB, HIDDEN)},
    [ROLE_HEAD_BIAS] = {BIAS, .when = IF_HEAD_BIAS},
    [ROLE_ROUTER_BIAS] = {.is_buffer = true, .when = IF_ROUTER_BIAS, .rows = SIZE_EXPERTS},
    [ROLE_LAYER_SCALE] = {.is_buffer = true, .when = IF_LAYER_SCALE, .rows = SIZE_ONE},
};

// ---- the plan -----------------------------------------------------------------------------------
// Fills in one tensor's name: the part-th of the names that '|' separates, with the layer for its
// first "%d" and the expert for its second.
static void tensor_name(const char *pattern, int part, int layer, int expert, char ret[160])
{
    for (; part > 0; part--) pattern = strchr(pattern, '|') + 1;
    size_t len = strcspn(pattern, "|"), at = 0;
    int numbers[2] = {layer, expert}, used = 0;
    for (size_t i = 0; i < len && at < 150; i++) {
        if (pattern[i] == '%' && used < 2) {
            at += (size_t)snprintf(ret + at, 12, "%d", numbers[used++]);
            i++; // the d
        } else {
            ret[at++] = pattern[i];
        }
    }
    ret[at] = '\0';
}

// What a family calls a role, or what a bias is of.
static const char *family_name(const struct family *f, enum tensor_role role)
{
    return f->names[role - roles[role].is_bias];
}

// The same of a role of this config.
static void name_of_role(const struct model_config *c, enum tensor_role role, int part, int layer,
                         int expert, char ret[160])
{
    static const char model[] = "model.";
    const struct family *f = c->family;
    char name[160];
    tensor_name(c->mtp && role == ROLE_FINAL_NORM ? f->mtp_norm : family_name(f, role), part,
                layer + c->first_layer, expert, name);
    if (roles[role].is_bias) strcpy(strrchr(name, '.'), ".bias");
    const bool other = c->mtp && f->mtp_prefix && strncmp(name, model, strlen(model)) == 0;
    snprintf(ret, 160, "%s%s", other ? f->mtp_prefix : "", name + (other ? strlen(model) : 0));
}

// How a layer's block of a role is cut into parts; without any where there is no such block.
struct cut {
    int experts, n_parts; // n_parts of each expert (1 expert where the block is not theirs)
    int64_t rows[MAX_ROW_RUNS], cols;
};

static struct cut cut_role(const struct model_config *c, const struct layer_config *l, int vocab,
                           enum tensor_role i)
{
    const struct role *r = &roles[i], *shape = r - r->is_bias;
    struct cut cut = {.cols = size_of(c, l, vocab, r->cols)};
    int64_t left = size_of(c, l, vocab, shape->rows);
    if (!holds(c, l, r->when) || left == 0 || (r->cols && cut.cols == 0)) return cut;
    cut.experts = r->of_experts ? l->moe.n_experts : 1;
    for (; left > 0; left -= cut.rows[cut.n_parts++])
        cut.rows[cut.n_parts] =
            shape->parts[0] == SIZE_NONE ? left : size_of(c, l, vocab, shape->parts[cut.n_parts]);
    return cut;
}

// Tensors of an expert's parts: most families store each by itself, others all in one, or the first
// ones.
static int tensors_of(const struct model_config *c, enum tensor_role role, const struct cut *cut)
{
    int names = 1;
    for (const char *p = family_name(c->family, role); *p; p++) names += *p == '|';
    return names < cut->n_parts ? names : cut->n_parts;
}

static int64_t aligned(int64_t element)
{
    return (element + ALIGN_ELEMENTS - 1) / ALIGN_ELEMENTS * ALIGN_ELEMENTS;
}

// The tensors end at element `at`.
static void finish_plan(struct weights *w, int64_t at)
{
    w->twin_offset = (size_t)aligned(at) * dtype_size(w->dt);
    w->room_offset = w->twin_offset + (w->twin ? w->twin->canary_offset : 0);
    w->canary_offset = w->room_offset + (size_t)aligned(w->room_n) * dtype_size(w->dt);
    w->bytes = w->canary_offset + WEIGHTS_CANARY_BYTES;
}

// Whether a twin of this config has the role's blocks.
static bool in_twin(const struct model_config *c, enum tensor_role role)
{
    return roles[role].in_twin && (c->quantization != QUANTIZATION_MXFP4 || roles[role].of_experts);
}

// A plan in e4m3 is a twin's, in MXFP4 too.
static bool is_planned(const struct weights *w, enum tensor_role role)
{
    return w->dt != DT_E4M3 || in_twin(w->config, role);
}

// Bytes of n codes of a twin.
static int64_t code_bytes(const struct model_config *c, int64_t n)
{
    return c->quantization == QUANTIZATION_MXFP4 ? n / 2 : n;
}

static void count_role(struct weights *w, enum tensor_role role, int layer, int64_t *n)
{
    const struct model_config *c = w->config;
    if (!is_planned(w, role)) return;
    const struct cut cut = cut_role(c, &c->layers[layer], config_vocab_rows(c), role);
    if (cut.experts > 0) *n += (int64_t)cut.experts * tensors_of(c, role, &cut);
}

// Adds rows to the slice: to its last run where they follow it.
static void add_run(struct tensor_slice *s, const struct row_run *run)
{
    struct row_run *last = s->n_runs > 0 ? &s->runs[s->n_runs - 1] : NULL;
    if (last && last->first + last->n == run->first && last->replicas == run->replicas)
        last->n += run->n;
    else
        s->runs[s->n_runs++] = *run;
}

// The tensor of n parts from `part` on: what this rank holds of it.
static void plan_slice(const struct model_config *c, const struct cut *own, const struct cut *whole,
                       int part, int n, struct weight_tensor *t)
{
    struct tensor_slice *s = &t->slice;
    const int by_columns = own->cols ? (int)(whole->cols / own->cols) : 1;
    for (int p = part; p < part + n; p++) {
        const int64_t first = shard_first(c->shard, whole->rows[p], own->rows[p]);
        const int different = (int)(whole->rows[p] / own->rows[p]) * by_columns;
        add_run(s, &(struct row_run){.first = s->whole[0] + first,
                                     .n = own->rows[p],
                                     .replicas = c->shard.size / different});
        s->whole[0] += whole->rows[p];
        t->shape[0] += own->rows[p];
    }
    t->n_dims = own->cols ? 2 : 1;
    t->shape[1] = own->cols;
    t->n = t->shape[0] * tensor_columns(t);
    s->whole[1] = whole->cols;
    if (own->cols) s->first_col = shard_first(c->shard, whole->cols, own->cols);
}

// Ranks add parts of the gradients of these: their heads', or of experts that are cut. Norms over
// all heads do not.
static bool is_of_parts(const struct model_config *c, enum tensor_role role)
{
    if (role == ROLE_Q_NORM || role == ROLE_K_NORM) return !(c->block & QK_NORM_WHOLE);
    return (role >= ROLE_QKV && role <= ROLE_KV_A_NORM) || role == ROLE_DELTA_NORM ||
           ((role == ROLE_EXPERTS_IN || role == ROLE_EXPERTS_OUT) && !c->expert_parallel);
}

// The tensor of an expert that one rank holds whole: all of it, or nothing.
static void plan_expert(bool is_own, struct weight_tensor *t)
{
    for (int r = 0; r < t->slice.n_runs; r++) t->slice.runs[r].replicas = 1;
    if (is_own) return;
    t->slice.n_runs = 0;
    t->shape[0] = t->n = 0;
}

// Part `part` of `parts` of expert e, which are in one tensor of the folder.
static void plan_stored(const struct family *f, int layer, int experts, int e, int part, int parts,
                        struct weight_tensor *t)
{
    struct stored_in *s = &t->stored;
    const int64_t rows = t->slice.whole[0] * parts, cols = tensor_whole_columns(t);
    tensor_name(f->stored[t->role], 0, layer, 0, s->name);
    s->n_dims = t->n_dims + 1;
    s->shape[0] = experts;
    s->shape[1] = t->n_dims == 2 && !f->stored_rows ? cols : rows;
    s->shape[2] = t->n_dims == 1 ? 0 : f->stored_rows ? cols : rows;
    s->first = e * rows * cols + (f->stored_rows ? part * t->slice.whole[0] * cols : part);
    s->first_row = e * rows + part;
    s->row_step = f->stored_rows ? cols : parts;
    s->col_step = f->stored_rows ? 1 : rows;
}

static void plan_role(struct weights *w, enum tensor_role role, int layer, int64_t *at)
{
    const struct model_config *c = w->config;
    // as this rank holds it, and as all do together
    const struct cut own = cut_role(c, &c->layers[layer], config_vocab_rows(c), role),
                     whole = cut_role(c, &c->whole[layer], config_embedded(c), role);
    if (own.experts == 0 || !is_planned(w, role)) return;
    const int tensors = tensors_of(c, role, &own), together = own.n_parts - tensors; // in the first
    const struct layer_config *l = &c->layers[layer];
    const int first = layer_first_expert(c, l), end = first + layer_own_experts(c, l);
    int64_t scales = 0; // one byte each, and as many of every rank where rows are cut
    *at = aligned(*at);
    const int64_t start = *at;
    for (int i = 0; i < own.experts * tensors; i++) {
        struct weight_tensor *t = &w->tensors[w->n_tensors++];
        name_of_role(c, role, i % tensors, layer, i / tensors, t->name);
        t->role = role;
        t->layer = layer;
        const int nth = i % tensors;
        plan_slice(c, &own, &whole, nth > 0 ? nth + together : 0, nth > 0 ? 1 : 1 + together, t);
        if (roles[role].of_experts && layer_splits_experts(c, l))
            plan_expert(i / tensors >= first && i / tensors < end, t);
        if (c->family->stored[role])
            plan_stored(c->family, layer, own.experts, i / tensors, i % tensors, tensors, t);
        t->is_buffer = roles[role].is_buffer;
        t->in_parts = is_of_parts(c, role);
        w->n_parameters += t->n;
        w->n_held += t->n > 0;
        if (w->twin && c->twin_alone && in_twin(c, role)) {
            t->in_twin = ++w->n_in_twin;
            const int64_t n = t->shape[0] * t->slice.whole[1]; // of its rows all columns
            if (n > w->room_n && c->quantization != QUANTIZATION_MXFP4)
                w->room_n = n < STAGING_ELEMENTS ? n : STAGING_ELEMENTS;
            continue;
        }
        t->offset = t->n > 0 ? *at : start; // within the same block on all ranks
        *at += t->is_buffer       ? BUFFER_ELEMENTS * t->n
               : w->dt == DT_E4M3 ? code_bytes(c, t->n)
                                  : t->n;
        if (w->dt == DT_E4M3)
            scales += c->quantization == QUANTIZATION_MXFP4 ? t->n / MXFP4_BLOCK : t->shape[0];
    }
    *at += own.cols < whole.cols && !c->twin_alone ? scales * (1 + c->shard.size) : scales;
    if (!roles[role].is_buffer) w->n_elements = aligned(*at);
}

// Every block in the arena's order: those that the optimizer walks, and the buffers.
static void each_role(struct weights *w,
                      void (*visit)(struct weights *, enum tensor_role, int, int64_t *),
                      int64_t *sum)
{
    const int n = w->config->n_layers;
    for (enum tensor_role r = 0; r < ROLE_ATTN_NORM; r++) visit(w, r, 0, sum);
    for (int l = 0; l < n; l++)
        for (enum tensor_role r = ROLE_ATTN_NORM; r < ROLE_FINAL_NORM; r++) visit(w, r, l, sum);
    for (enum tensor_role r = ROLE_FINAL_NORM; r < ROLE_ROUTER_BIAS; r++) visit(w, r, 0, sum);
    for (int l = 0; l < n; l++)
        for (enum tensor_role r = ROLE_ROUTER_BIAS; r < ROLE_COUNT; r++) visit(w, r, l, sum);
}

// Takes the twin, also on failure.
static enum status plan_blocks(const struct model_config *config, enum dtype dt,
                               struct weights *twin, struct weights **ret)
{
    int64_t at = 0, n = 0;
    struct weights *w = calloc(1, sizeof *w);
    if (!w) {
        weights_free(twin);
        return status_fail(ST_NO_MEMORY, "no memory for the weights table");
    }
    w->config = config;
    w->dt = dt;
    w->twin = twin;
    each_role(w, count_role, &n);
    w->tensors = calloc((size_t)n, sizeof *w->tensors);
    w->layers = calloc((size_t)config->n_layers, sizeof *w->layers);
    if (!w->tensors || !w->layers) {
        weights_free(w);
        return status_fail(ST_NO_MEMORY, "no memory for the weights table");
    }
    each_role(w, plan_role, &at);
    finish_plan(w, at);
    *ret = w;
    return ST_OK;
}

enum status weights_plan(const struct model_config *config, enum dtype dt, struct weights **ret)
{
    struct weights *twin = NULL;
    enum status st = ST_OK;
    if (config->quantization != QUANTIZATION_NONE) st = plan_blocks(config, DT_E4M3, NULL, &twin);
    return st == ST_OK ? plan_blocks(config, dt, twin, ret) : st;
}

enum status weights_plan_list(const struct model_config *config, enum dtype dt,
                              struct weight_tensor *tensors, int n, struct weights **ret)
{
    int64_t at = 0;
    struct weights *w = calloc(1, sizeof *w);
    if (!w) {
        free(tensors);
        return status_fail(ST_NO_MEMORY, "no memory for the weights table");
    }
    *w = (struct weights){
        .config = config, .dt = dt, .n_tensors = n, .n_held = n, .tensors = tensors};
    for (int i = 0; i < n; i++) {
        struct weight_tensor *t = &tensors[i];
        t->role = ROLE_COUNT;
        t->n = t->shape[0] * tensor_columns(t);
        if (t->slice.n_runs == 0)
            t->slice = (struct tensor_slice){
                .whole = {t->shape[0], t->shape[1]}, .n_runs = 1, .runs = {{0, t->shape[0], 1}}};
        t->offset = aligned(at);
        at = t->offset + t->n;
        w->n_parameters += t->n;
    }
    w->n_elements = aligned(at);
    finish_plan(w, at);
    *ret = w;
    return ST_OK;
}

enum status weights_plan_like(const struct weights *w, enum dtype dt, struct weights **ret)
{
    if (w->layers) return plan_blocks(w->config, dt, NULL, ret);
    const size_t bytes = (size_t)w->n_tensors * sizeof *w->tensors;
    struct weight_tensor *tensors = malloc(bytes);
    if (!tensors) return status_fail(ST_NO_MEMORY, "no memory for the weights table");
    memcpy(tensors, w->tensors, bytes);
    return weights_plan_list(w->config, dt, tensors, w->n_tensors, ret);
}

bool weights_begins_block(const struct weights *w, int i)
{
    const struct weight_tensor *t = &w->tensors[i];
    return i == 0 || t->role == ROLE_COUNT || t[-1].role != t->role || t[-1].layer != t->layer;
}

// Whether each layer has a block of it.
static bool is_of_layers(enum tensor_role role)
{
    return (role >= ROLE_ATTN_NORM && role < ROLE_FINAL_NORM) || role >= ROLE_ROUTER_BIAS;
}

// Where the pointer to a role's block stands.
static void **role_pointer(struct weights *w, enum tensor_role role, int layer)
{
    return is_of_layers(role) ? &w->layers[layer].at[role] : &w->at[role];
}

// Of all experts that are held where the block is theirs.
static int64_t matrix_rows(const struct weights *w, enum tensor_role role, int layer)
{
    const struct model_config *c = w->config;
    const struct layer_config *l = &c->layers[layer];
    const int64_t rows = size_of(c, l, config_vocab_rows(c), roles[role].rows);
    return rows * (roles[role].of_experts ? layer_own_experts(c, l) : 1);
}

struct weight_matrix weights_matrix(const struct weights *w, enum tensor_role role, int layer)
{
    struct weights *held = (struct weights *)w; // whose pointers are read
    const struct model_config *c = w->config;
    const struct layer_config *l = &c->layers[layer];
    const bool of_twin = w->twin && in_twin(c, role), biased = roles[role + 1].is_bias;
    struct weight_matrix m = {
        .w = *role_pointer(of_twin ? w->twin : held, role, layer),
        .bias = biased ? *role_pointer(held, role + 1, layer) : NULL,
        .n = (int)size_of(c, l, config_vocab_rows(c), roles[role].rows),
        .k = (int)size_of(c, l, config_vocab_rows(c), roles[role].cols),
    };
    if (role == ROLE_HEAD) m.n = config_head_rows(c);
    if (!of_twin || !m.w) return m;
    void *behind = (char *)m.w + code_bytes(c, matrix_rows(w, role, layer) * m.k);
    if (c->quantization == QUANTIZATION_MXFP4)
        m.mx_scales = behind;
    else
        m.scales = behind;
    m.rounds = m.scales && c->quantization == QUANTIZATION_FP8 && role != ROLE_KV_B;
    return m;
}

int64_t weights_largest(const struct weights *w)
{
    int64_t largest = 0;
    for (int i = 0; i < w->n_tensors; i++)
        if (w->tensors[i].n > largest) largest = w->tensors[i].n;
    return largest;
}

int64_t weights_parameters(const struct weights *w)
{
    int64_t sum = 0;
    for (const struct weight_tensor *t = w->tensors; t < w->tensors + w->n_tensors; t++)
        sum += tensor_whole_elements(t);
    return sum;
}

int64_t weights_widest(const struct weights *w)
{
    int64_t widest = 0;
    for (int i = 0; w->twin && i < w->twin->n_tensors; i++) {
        const struct weight_tensor *t = &w->twin->tensors[i];
        const int64_t n =
            matrix_rows(w, t->role, t->layer) * weights_matrix(w, t->role, t->layer).k;
        if (n > widest) widest = n;
    }
    return widest;
}

void weights_twin_tensor(const struct weights *twin, int i, const uint8_t **ret_codes,
                         const int8_t **ret_scales)
{
    const bool mxfp4 = twin->config->quantization == QUANTIZATION_MXFP4;
    const struct weight_tensor *t = &twin->tensors[i], *first = t;
    while (!weights_begins_block(twin, (int)(first - twin->tensors))) first--;
    const int64_t before = t->offset - first->offset, cols = t->shape[1];
    const int64_t rows = matrix_rows(twin, t->role, t->layer);
    *ret_codes = (const uint8_t *)twin->base + t->offset;
    *ret_scales = (const int8_t *)twin->base + first->offset +
                  code_bytes(twin->config, rows * cols) +
                  (mxfp4 ? 2 * before / MXFP4_BLOCK : before / cols);
}

struct weight_place weights_place(const struct weights *w, const struct weight_tensor *t)
{
    if (t->in_twin) {
        const struct weight_tensor *codes = &w->twin->tensors[t->in_twin - 1];
        return (struct weight_place){
            w->twin_offset + (size_t)codes->offset, (size_t)code_bytes(w->config, codes->n),
            w->config->quantization == QUANTIZATION_MXFP4 ? DT_U8 : DT_E4M3};
    }
    const enum dtype own = weights_tensor_dtype(w, t);
    return (struct weight_place){(size_t)t->offset * dtype_size(w->dt),
                                 (size_t)t->n * dtype_size(own), own};
}

// A block of the twin that begins with tensor t. Where ranks have columns of its rows each, the
// scales of all of them lie behind the rows' own.
static void quantise_block(const struct weights *w, struct device *dev,
                           const struct weight_tensor *t)
{
    const struct weight_matrix m = weights_matrix(w, t->role, t->layer);
    const void *tensors = *role_pointer((struct weights *)w, t->role, t->layer);
    const int64_t rows = matrix_rows(w, t->role, t->layer);
    int8_t *scales = (int8_t *)m.scales, *of_ranks = NULL;
    if (w->comm && t->shape[1] < t->slice.whole[1]) {
        of_ranks = scales + rows;
        int8_t *own = of_ranks + comm_rank(w->comm) * rows;
        device_ops(dev)->quantise(dev, NULL, own, tensors, rows, m.k, w->dt, NULL, 0);
        comm_all_gather(w->comm, own, of_ranks, (size_t)rows);
    }
    device_ops(dev)->quantise(dev, m.w, scales, tensors, rows, m.k, w->dt, of_ranks,
                              of_ranks ? comm_size(w->comm) : 0);
}

void weights_quantise(const struct weights *w, struct device *dev)
{
    if (w->config->twin_alone) return; // loading made it
    for (int i = 0; w->twin && i < w->twin->n_tensors; i++)
        if (weights_begins_block(w->twin, i)) quantise_block(w, dev, &w->twin->tensors[i]);
}

void weights_bind_range(struct weights *w, int64_t first, int64_t n, void *at)
{
    for (int i = 0; i < w->n_tensors; i++) {
        const struct weight_tensor *t = &w->tensors[i];
        if (!weights_begins_block(w, i) || t->offset < first || t->offset >= first + n) continue;
        if (t->role == ROLE_COUNT || t->in_twin) continue;
        *role_pointer(w, t->role, t->layer) =
            (char *)at + (size_t)(t->offset - first) * dtype_size(w->dt);
    }
    if (w->config->tie_embeddings) w->at[ROLE_HEAD] = w->at[ROLE_EMBED];
}

void weights_bind(struct weights *w, void *base)
{
    w->base = base;
    weights_bind_range(w, 0, (int64_t)(w->canary_offset / dtype_size(w->dt)), base);
    if (w->twin) weights_bind(w->twin, (char *)base + w->twin_offset);
}

void weights_share_ends(struct weights *w, const struct weights *of)
{
    w->at[ROLE_EMBED] = of->at[ROLE_EMBED];
    w->at[ROLE_HEAD] = of->at[ROLE_HEAD];
}

enum status weights_alloc(struct weights *w, struct device *dev)
{
    void *memory;
    enum status st = device_alloc(dev, w->bytes, &memory);
    if (st != ST_OK) return st;
    device_fill(dev, memory, 0, w->bytes);
    w->owner = dev;
    weights_bind(w, memory);
    return ST_OK;
}

void weights_free(struct weights *w)
{
    if (!w) return;
    if (w->owner) device_release(w->owner, w->base);
    weights_free(w->twin);
    free(w->tensors);
    free(w->layers);
    free(w);
}

const struct weight_tensor *weights_find(const struct weights *w, const char *name)
{
    for (int i = 0; i < w->n_tensors; i++)
        if (strcmp(w->tensors[i].name, name) == 0) return &w->tensors[i];
    return NULL;
}

void weights_layout_hash(const struct weights *w, char ret[65])
{
    struct bytes text = BYTES_INIT;
    bytes_printf(&text, "%s %lld\n", dtype_name(w->dt), (long long)w->n_elements);
    if (w->config->shard.size > 1)
        bytes_printf(&text, "shard %d of %d\n", w->config->shard.rank, w->config->shard.size);
    for (int i = 0; i < w->n_tensors; i++) {
        const struct weight_tensor *t = &w->tensors[i];
        bytes_printf(&text, "%s %lld %lld %lld\n", t->name, (long long)t->shape[0],
                     (long long)t->shape[1], (long long)t->offset);
    }
    if (w->twin)
        bytes_printf(&text, "%s %zu\n", quantization_names[w->config->quantization],
                     w->canary_offset);
    hash_sha256_hex(bytes_text(&text), text.len, HASH_SHA256_BYTES, ret);
    bytes_release(&text);
}

enum status weights_checksum(const struct weights *w, struct device *dev, uint64_t *ret)
{
    const uint64_t offset = 0, bytes = w->canary_offset;
    device_ops(dev)->checksum(dev, ret, w->base, &offset, &bytes, 1);
    return device_sync(dev);
}

enum status weights_base_checksum(const struct weights *w, struct device *dev, uint64_t *ret)
{
    const size_t max = (size_t)w->n_tensors + 1;
    if (!w->twin) return weights_checksum(w, dev, ret);
    uint64_t *offsets = malloc(6 * max * sizeof *offsets), *bytes = offsets + 2 * max,
             *sums = bytes + 2 * max;
    if (!offsets) return status_fail(ST_NO_MEMORY, "no memory for %zu checksums", max);
    int n = 0;
    // codes and scales; behind them may be room for those of other ranks
    for (const struct weight_tensor *t = w->twin->tensors;
         t < w->twin->tensors + w->twin->n_tensors; t++) {
        if (!weights_begins_block(w->twin, (int)(t - w->twin->tensors))) continue;
        const int64_t rows = matrix_rows(w, t->role, t->layer);
        const struct weight_matrix m = weights_matrix(w, t->role, t->layer);
        const int64_t scales = m.mx_scales ? rows * m.k / MXFP4_BLOCK : rows;
        offsets[n] = (uint64_t)((const char *)m.w - (const char *)w->base);
        bytes[n++] = (uint64_t)(code_bytes(w->config, rows * m.k) + scales);
    }
    for (int i = 0; i < w->n_tensors; i++) {
        const struct weight_place place = weights_place(w, &w->tensors[i]);
        if (in_twin(w->config, w->tensors[i].role)) continue;
        offsets[n] = place.offset;
        bytes[n++] = place.bytes;
    }
    device_ops(dev)->checksum(dev, sums, w->base, offsets, bytes, n);
    enum status st = device_sync(dev);
    *ret = 0;
    for (int i = 0; i < n; i++) *ret = hash_mix(*ret + HASH_SPREAD + sums[i]);
    free(offsets);
    return st;
}

// ---- host and device ----------------------------------------------------------------------------
void *weights_address(const struct weights *w, int64_t element)
{
    return (char *)w->base + (size_t)element * dtype_size(w->dt);
}

static float load_f32(const void *data, enum dtype dt, int64_t i)
{
    uint16_t half;
    float x;
    if (dt == DT_F32) {
        memcpy(&x, (const char *)data + 4 * i, 4); // the file does not promise alignment
        return x;
    }
    memcpy(&half, (const char *)data + 2 * i, 2);
    return dt == DT_BF16 ? f32_from_bf16(half) : f32_from_f16(half);
}

void weights_convert(void *to, enum dtype to_dt, const void *from, enum dtype from_dt, int64_t n)
{
#pragma omp parallel for if (n > 65536)
    for (int64_t i = 0; i < n; i++) {
        float x = load_f32(from, from_dt, i);
        if (to_dt == DT_F32)
            ((float *)to)[i] = x;
        else
            ((uint16_t *)to)[i] = bf16_from_f32(x);
    }
}

void weights_copy_in(const struct weights *w, struct device *dev, const struct weight_tensor *t,
                     int64_t at, const void *data, enum dtype dt, int64_t n, void *staging)
{
    const enum dtype own = weights_tensor_dtype(w, t);
    char *to = (char *)weights_address(w, t->offset) + (size_t)at * dtype_size(own);
    for (int64_t n_now; n > 0; n -= n_now, to += (size_t)n_now * dtype_size(own)) {
        n_now = n < STAGING_ELEMENTS ? n : STAGING_ELEMENTS;
        if (dt != own) weights_convert(staging, own, data, dt, n_now);
        device_copy_in(dev, to, dt != own ? staging : data, (size_t)n_now * dtype_size(own));
        data = (const char *)data + (size_t)n_now * dtype_size(dt);
    }
}

enum status weights_read(const struct weights *w, struct device *dev, int tensor, float *ret)
{
    const struct weight_tensor *t = &w->tensors[tensor];
    const enum dtype own = weights_tensor_dtype(w, t);
    const size_t bytes = (size_t)t->n * dtype_size(own);
    if (t->in_twin)
        return status_fail(ST_UNSUPPORTED, "tensor %s is held in %s alone", t->name,
                           w->config->quantization == QUANTIZATION_MXFP4 ? "MXFP4" : "e4m3");
    void *staging = malloc(bytes);
    if (!staging) return status_fail(ST_NO_MEMORY, "no memory to read tensor %s", t->name);
    device_copy_out(dev, staging, weights_address(w, t->offset), bytes);
    enum status st = device_sync(dev);
    if (st == ST_OK) weights_convert(ret, DT_F32, staging, own, t->n);
    free(staging);
    return st;
}

enum status weights_write(const struct weights *w, struct device *dev, int tensor, const float *x)
{
    void *staging = malloc((size_t)STAGING_ELEMENTS * sizeof(float));
    if (!staging) return status_fail(ST_NO_MEMORY, "no memory to write a tensor through");
    weights_copy_in(w, dev, &w->tensors[tensor], 0, x, DT_F32, w->tensors[tensor].n, staging);
    enum status st = device_sync(dev);
    free(staging);
    return st;
}

// ---- random values ------------------------------------------------------------------------------
// What a tensor of one dimension begins with in every element.
static float initial_value(const struct weights *w, const struct weight_tensor *t)
{
    if (t->role == ROLE_DELTA_NORM || t->role == ROLE_DELTA_SKIP || t->role == ROLE_LAYER_SCALE)
        return 1.0f;
    return roles[t->role].is_norm && w->config->norm != NORM_RMS_PLUS_ONE ? 1.0f : 0.0f;
}

enum status weights_init_random(struct weights *w, struct device *dev, uint64_t seed)
{
    float *values = NULL;
    enum status st = ST_OK;
    if (w->config->shard.size > 1) // values are numbered as those of a whole model
        FAIL(ST_UNSUPPORTED, "random weights are of a whole model, and this is shard %d of %d",
             w->config->shard.rank, w->config->shard.size);
    if (w->config->twin_alone)
        FAIL(ST_UNSUPPORTED, "random weights in e4m3 alone are not made: give a model folder");
    for (int i = 0; i < w->n_tensors; i++) {
        const struct weight_tensor *t = &w->tensors[i];
        if (t->n_dims == 2) {
            device_ops(dev)->random_normal(dev, weights_address(w, t->offset), t->n, 0.02f, seed,
                                           (uint64_t)i << 32, weights_tensor_dtype(w, t));
            continue;
        }
        free(values);
        values = malloc((size_t)t->n * sizeof *values);
        if (!values) FAIL(ST_NO_MEMORY, "no memory for the first values of %s", t->name);
        for (int64_t j = 0; j < t->n; j++) values[j] = initial_value(w, t);
        CHECK(weights_write(w, dev, i, values));
    }
    weights_quantise(w, dev);
    st = device_sync(dev);
out:
    free(values);
    return st;
}
