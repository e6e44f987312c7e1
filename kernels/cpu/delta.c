/* delta.c: the gated delta rule (ops.h, delta_shape) and its gradient, row after row.
 *
 * A unit of work is a sequence, of a packed batch with those that go on behind it, and a key
 * head; its value heads follow one another. S lies (key_dim, head_dim), so that every loop runs
 * over values and sums over keys in order.
 *
 * The gradient needs S before and after every row, from the last to the first. It goes forward
 * again, keeps S before every CHUNK-th row, and from there on S of a chunk's rows while it is that
 * chunk's turn: of a sequence of n rows n / CHUNK + CHUNK matrices, for one head and thread at a
 * time. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu.h"
#include <omp.h>
#include <string.h>

enum { CHUNK = 32, DIM = DELTA_MAX_DIM };

// ---- one row ------------------------------------------------------------------------------------
struct row {
    float q[DIM], k[DIM]; // as the rule takes them
    float q_scale, k_scale;
    const float *v;
    float beta, decay;
    float a, rate; // of the decay: exp(-rate * softplus(a))
};

static const float *row_part(const struct delta_args *a, const struct delta_shape *s, int row,
                             int column)
{
    return (const float *)a->qkv + (int64_t)row * delta_conv_width(s) + column;
}

// x divided by its length, and times `scale`; returns the factor.
static float normalise(float *y, const float *x, int n, float scale)
{
    const float factor = scale / sqrtf(dot_f32(x, x, n) + 1e-6f);
    for (int i = 0; i < n; i++) y[i] = x[i] * factor;
    return factor;
}

static int key_head_of(const struct delta_shape *s, int head)
{
    return head / (s->n_heads / s->n_key_heads);
}

static __attribute__((noinline)) void read_row(const struct delta_args *a,
                                               const struct delta_shape *s, int head, int row,
                                               struct row *ret)
{
    const int keys = delta_key_width(s), at = key_head_of(s, head) * s->key_dim;
    const float *gates = a->gates + (int64_t)row * 2 * s->n_heads;
    ret->q_scale =
        normalise(ret->q, row_part(a, s, row, at), s->key_dim, 1.0f / sqrtf((float)s->key_dim));
    ret->k_scale = normalise(ret->k, row_part(a, s, row, keys + at), s->key_dim, 1);
    ret->v = row_part(a, s, row, 2 * keys + head * s->head_dim);
    ret->beta = sigmoid(gates[head]);
    ret->a = gates[s->n_heads + head] + ((const float *)a->dt_bias)[head];
    ret->rate = expf(((const float *)a->a_log)[head]);
    ret->decay = expf(-ret->rate * softplus(ret->a));
}

// S and what it gives, one row further (one piece of code, so that all who call it get one result);
// error (head_dim): the value less what S had for its key.
static __attribute__((noinline)) void advance(float *S, float *out, float *error,
                                              const struct row *r, const struct delta_shape *s)
{
    const int n = s->head_dim;
    float add[DIM];
    memset(error, 0, (size_t)n * sizeof *error);
    memset(out, 0, (size_t)n * sizeof *out);
    for (int k = 0; k < s->key_dim; k++) {
        float *at = S + k * n;
#pragma omp simd
        for (int v = 0; v < n; v++) {
            at[v] *= r->decay;
            error[v] = fma_f32(at[v], r->k[k], error[v]);
        }
    }
    for (int v = 0; v < n; v++) {
        error[v] = r->v[v] - error[v];
        add[v] = r->beta * error[v];
    }
    for (int k = 0; k < s->key_dim; k++) {
        float *at = S + k * n;
#pragma omp simd
        for (int v = 0; v < n; v++) {
            at[v] = fma_f32(r->k[k], add[v], at[v]);
            out[v] = fma_f32(at[v], r->q[k], out[v]);
        }
    }
}

// ---- forward ------------------------------------------------------------------------------------
static int64_t matrix(const struct delta_shape *s)
{
    return (int64_t)s->key_dim * s->head_dim;
}

static void run(float *S, float *out, const struct delta_args *a, const struct delta_shape *s,
                int head, int seq)
{
    const struct batch_view *b = a->batch.view;
    float error[DIM];
    struct row r;
    for (int row = b->query_start[seq]; row < b->query_start[seq + 1]; row++) {
        read_row(a, s, head, row, &r);
        advance(S, out + (int64_t)row * delta_value_width(s) + head * s->head_dim, error, &r, s);
    }
}

// Whether sequence s begins a unit: it goes on from no other of the batch.
bool cpu_delta_begins(const struct delta_batch *b, int s)
{
    const struct batch_view *v = b->view;
    if (!b->kv) return v->parent[s] < 0;
    return s == 0 || v->state_slot[s] < 0 || v->state_slot[s - 1] != v->state_from[s];
}

int cpu_delta_unit_end(const struct delta_batch *b, int s)
{
    do s++;
    while (s < b->view->n_seqs && !cpu_delta_begins(b, s));
    return s;
}

float *cpu_delta_state(const struct delta_batch *b, int seq, int64_t at, int64_t n)
{
    const struct batch_view *v = b->view;
    const int from = v->state_from[seq], slot = v->state_slot[seq];
    float *states = b->kv->states + b->kv->layers[b->layer].state + at;
    float *state = states + slot * b->kv->slot_elements;
    const size_t bytes = (size_t)n * sizeof *state;
    if (v->positions[v->query_start[seq]] == 0)
        memset(state, 0, bytes);
    else if (from != slot)
        memcpy(state, states + from * b->kv->slot_elements, bytes);
    return state;
}

static void run_paged(float *out, const struct delta_args *a, const struct delta_shape *s, int head,
                      int seq)
{
    const struct batch_view *b = a->batch.view;
    if (b->state_slot[seq] < 0) {
        for (int row = b->query_start[seq]; row < b->query_start[seq + 1]; row++)
            memset(out + (int64_t)row * delta_value_width(s) + head * s->head_dim, 0,
                   (size_t)s->head_dim * sizeof *out);
        return;
    }
    const int64_t at = delta_window_elements(s) + head * matrix(s);
    for (int end = cpu_delta_unit_end(&a->batch, seq); seq < end; seq++)
        run(cpu_delta_state(&a->batch, seq, at, matrix(s)), out, a, s, head, seq);
}

static void run_packed(float *out, const struct delta_args *a, const struct delta_shape *s,
                       int head, int seq)
{
    float prefix[DIM * DIM], S[DIM * DIM];
    const size_t bytes = (size_t)matrix(s) * sizeof *S;
    memset(prefix, 0, bytes);
    run(prefix, out, a, s, head, seq);
    for (int end = cpu_delta_unit_end(&a->batch, seq++); seq < end; seq++) {
        memcpy(S, prefix, bytes);
        run(S, out, a, s, head, seq);
    }
}

void cpu_delta_rule(struct device *dev, void *out, const struct delta_args *a,
                    const struct delta_shape *s)
{
    if (!cpu_is_f32(dev, "delta_rule", s->dt) || !delta_takes(dev, a->batch.view)) return;
    const int units = a->batch.view->n_seqs * s->n_heads;
#pragma omp parallel for schedule(dynamic) if (units > 1)
    for (int unit = 0; unit < units; unit++) {
        const int seq = unit / s->n_heads, head = unit % s->n_heads;
        if (!cpu_delta_begins(&a->batch, seq)) continue;
        if (a->batch.kv)
            run_paged(out, a, s, head, seq);
        else
            run_packed(out, a, s, head, seq);
    }
}

// ---- backward -----------------------------------------------------------------------------------
// A thread's memory.
struct back {
    const struct delta_args *args;
    const struct delta_shape *s;
    const struct delta_grads *grads;
    const float *dout;
    float *rate_part;          // (T, n_heads) of the gradient of a_log
    float *kept, *kept_prefix; // S before every CHUNK-th row, and behind the last
    float *chunk;              // (CHUNK + 1) S before the rows of a chunk, and behind its last
    float *dS, *dS_prefix;
    float errors[CHUNK][DIM];
};

// The gradients of row's q and k as the rule takes them, and of its value and gates, from those of
// S behind it (b->dS, which becomes that of S before it) and of its output.
static void back_row(struct back *b, const float *before, const float *behind, const float *error,
                     int head, int row)
{
    const struct delta_shape *s = b->s;
    const int n = s->head_dim, first = head * n, keys = delta_key_width(s);
    const float *dout = b->dout + (int64_t)row * delta_value_width(s) + first;
    float *dqkv = (float *)b->grads->qkv + (int64_t)row * delta_conv_width(s);
    float *dq = dqkv + key_head_of(s, head) * s->key_dim, *dk = dq + keys;
    float *dv = dqkv + 2 * keys + first;
    float dadd[DIM] = {0}, add[DIM], dread[DIM], ddecay = 0;
    struct row r;
    read_row(b->args, s, head, row, &r);
    for (int v = 0; v < n; v++) add[v] = r.beta * error[v];
    for (int k = 0; k < s->key_dim; k++) {
        float *dS = b->dS + k * n;
#pragma omp simd
        for (int v = 0; v < n; v++) {
            dS[v] = fma_f32(r.q[k], dout[v], dS[v]);
            dadd[v] = fma_f32(dS[v], r.k[k], dadd[v]);
        }
        dq[k] += dot_f32(behind + k * n, dout, n);
        dk[k] += dot_f32(dS, add, n);
    }
    for (int v = 0; v < n; v++) {
        dv[v] = r.beta * dadd[v];
        dread[v] = -dv[v];
    }
    for (int k = 0; k < s->key_dim; k++) {
        float *dS = b->dS + k * n;
        const float *S = before + k * n;
        dk[k] = fma_f32(r.decay, dot_f32(S, dread, n), dk[k]);
#pragma omp simd
        for (int v = 0; v < n; v++) dS[v] = fma_f32(r.k[k], dread[v], dS[v]);
        ddecay += dot_f32(S, dS, n);
#pragma omp simd
        for (int v = 0; v < n; v++) dS[v] *= r.decay;
    }
    float *dgates = (float *)b->grads->gates + (int64_t)row * 2 * s->n_heads;
    const float dexponent = -ddecay * r.decay * r.rate; // of softplus(a)
    dgates[head] = dot_f32(dadd, error, n) * r.beta * (1 - r.beta);
    dgates[s->n_heads + head] = dexponent * sigmoid(r.a);
    b->rate_part[(int64_t)row * s->n_heads + head] = dexponent * softplus(r.a);
}

static int chunks_of(int rows)
{
    return (rows + CHUNK - 1) / CHUNK;
}

// Goes over sequence seq from `from` on; S before every chunk, and behind the last, go to kept.
static void keep_states(struct back *b, float *kept, const float *from, int head, int seq)
{
    const struct batch_view *view = b->args->batch.view;
    const int64_t size = matrix(b->s);
    const int first = view->query_start[seq], n = view->query_start[seq + 1] - first;
    float out[DIM], error[DIM];
    struct row r;
    memcpy(kept, from, (size_t)size * sizeof *kept);
    for (int i = 0; i < n; i++) {
        if (i % CHUNK == 0) {
            memcpy(kept + size, kept, (size_t)size * sizeof *kept);
            kept += size;
        }
        read_row(b->args, b->s, head, first + i, &r);
        advance(kept, out, error, &r, b->s);
    }
}

static void back_sequence(struct back *b, const float *kept, int head, int seq)
{
    const struct batch_view *view = b->args->batch.view;
    const int64_t size = matrix(b->s);
    const int first = view->query_start[seq], end = view->query_start[seq + 1];
    float out[DIM];
    struct row r;
    for (int c = chunks_of(end - first) - 1; c >= 0; c--) {
        const int from = first + c * CHUNK, n = end - from < CHUNK ? end - from : CHUNK;
        memcpy(b->chunk, kept + c * size, (size_t)size * sizeof *kept);
        for (int i = 0; i < n; i++) {
            float *S = b->chunk + (i + 1) * size;
            memcpy(S, S - size, (size_t)size * sizeof *S);
            read_row(b->args, b->s, head, from + i, &r);
            advance(S, out, b->errors[i], &r, b->s);
        }
        for (int i = n - 1; i >= 0; i--)
            back_row(b, b->chunk + i * size, b->chunk + (i + 1) * size, b->errors[i], head,
                     from + i);
    }
}

// One value head of a sequence and of those that go on behind it.
static void back_unit(struct back *b, int head, int seq)
{
    const struct batch_view *view = b->args->batch.view;
    const int64_t size = matrix(b->s);
    const size_t bytes = (size_t)size * sizeof(float);
    const int rows = view->query_start[seq + 1] - view->query_start[seq];
    const int end = cpu_delta_unit_end(&b->args->batch, seq);
    memset(b->dS_prefix, 0, bytes); // S before the first row is 0
    keep_states(b, b->kept_prefix, b->dS_prefix, head, seq);
    b->kept = b->kept_prefix + (chunks_of(rows) + 1) * size;
    for (int child = seq + 1; child < end; child++) {
        keep_states(b, b->kept, b->kept - size, head, child);
        memset(b->dS, 0, bytes);
        back_sequence(b, b->kept, head, child);
        for (int64_t i = 0; i < size; i++) b->dS_prefix[i] += b->dS[i];
    }
    memcpy(b->dS, b->dS_prefix, bytes);
    back_sequence(b, b->kept_prefix, head, seq);
}

// Takes the gradient of a query or key as the rule takes it, y = factor * x, back to x, in place.
static void back_length(float *dx, const float *y, float factor, float scale, int n)
{
    const float along = dot_f32(y, dx, n) / (scale * scale);
    for (int i = 0; i < n; i++) dx[i] = factor * fma_f32(-y[i], along, dx[i]);
}

static void back_lengths(struct back *b, int key_head, int row)
{
    const struct delta_shape *s = b->s;
    float *dq = (float *)b->grads->qkv + (int64_t)row * delta_conv_width(s) + key_head * s->key_dim;
    struct row r;
    read_row(b->args, s, key_head * (s->n_heads / s->n_key_heads), row, &r);
    back_length(dq, r.q, r.q_scale, 1.0f / sqrtf((float)s->key_dim), s->key_dim);
    back_length(dq + delta_key_width(s), r.k, r.k_scale, 1, s->key_dim);
}

static void back_key_head(struct back *b, int key_head, int seq)
{
    const struct delta_shape *s = b->s;
    const struct batch_view *view = b->args->batch.view;
    const int each = s->n_heads / s->n_key_heads;
    const int first = view->query_start[seq],
              end = view->query_start[cpu_delta_unit_end(&b->args->batch, seq)];
    const size_t bytes = (size_t)s->key_dim * sizeof(float);
    for (int row = first; row < end; row++) {
        float *dq = (float *)b->grads->qkv + (int64_t)row * delta_conv_width(s);
        memset(dq + key_head * s->key_dim, 0, bytes);
        memset(dq + delta_key_width(s) + key_head * s->key_dim, 0, bytes);
    }
    for (int h = 0; h < each; h++) back_unit(b, key_head * each + h, seq);
    for (int row = first; row < end; row++) back_lengths(b, key_head, row);
}

// Matrices of a thread: those kept of a prefix and of a sequence behind it, a chunk's, and two.
static int64_t thread_floats(const struct delta_shape *s, int max_context)
{
    return matrix(s) * (chunks_of(max_context) + 3 + CHUNK + 1 + 2);
}

size_t cpu_delta_scratch(const struct delta_shape *s, int rows, int max_context)
{
    if (delta_is_conv(s)) return 0;
    if (s->is_scan) return cpu_ssm_scratch(s, rows);
    return ((size_t)omp_get_max_threads() * (size_t)thread_floats(s, max_context) +
            (size_t)rows * (size_t)s->n_heads) *
           sizeof(float);
}

// The gradients of what all rows of a head share, row after row.
static void add_shared(const struct delta_grads *g, const float *rate_part, int rows,
                       const struct delta_shape *s)
{
    for (int row = 0; row < rows; row++)
        for (int h = 0; h < s->n_heads; h++) {
            const float *dgates = (const float *)g->gates + (int64_t)row * 2 * s->n_heads;
            if (g->a_log) g->a_log[h] += rate_part[(int64_t)row * s->n_heads + h];
            if (g->dt_bias) g->dt_bias[h] += dgates[s->n_heads + h];
        }
}

void cpu_delta_rule_back(struct device *dev, const struct delta_grads *grads, const void *dout,
                         const struct delta_args *a, const struct delta_shape *s)
{
    const struct batch_view *view = a->batch.view;
    if (!cpu_is_f32(dev, "delta_rule_back", s->dt) || !delta_takes(dev, view)) return;
    float *scratch = cpu_workspace(dev, cpu_delta_scratch(s, view->n_tokens, view->max_context));
    if (!scratch) return;
    const int64_t each = thread_floats(s, view->max_context), size = matrix(s);
    const int units = view->n_seqs * s->n_key_heads;
    float *rate_part = scratch + omp_get_max_threads() * each;
#pragma omp parallel for schedule(dynamic) if (units > 1)
    for (int unit = 0; unit < units; unit++) {
        const int seq = unit / s->n_key_heads;
        float *mine = scratch + omp_get_thread_num() * each;
        struct back b = {.args = a,
                         .s = s,
                         .grads = grads,
                         .dout = dout,
                         .rate_part = rate_part,
                         .dS = mine,
                         .dS_prefix = mine + size,
                         .chunk = mine + 2 * size,
                         .kept_prefix = mine + (CHUNK + 3) * size};
        if (cpu_delta_begins(&a->batch, seq)) back_key_head(&b, unit % s->n_key_heads, seq);
    }
    add_shared(grads, rate_part, view->n_tokens, s);
}
