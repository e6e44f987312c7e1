/* ssm.c: Mamba-2's scan (ops.h, scan_args) and its gradient, row after row.
 *
 * All of it is one recurrence, a sweep: a matrix M (a, b) goes along the rows, M = carry * M + p
 * q^T, and each row gives M^T r. With u = step * x:
 *
 *     what           M             p      q      r
 *     forward        S             B      u      C
 *     dC             S^T           u      B      dout
 *     du             dS            C      dout   B      from the last row to the first
 *     dB             dS^T          dout   C      u      likewise
 *
 * The gradient of a row's decay needs few states. Behind row t the product sum(S * dS) is made of
 * what the row reads, C . dC, and of what rows behind it keep, e of the next one; it is also what
 * the row keeps, its own e, and what it adds, B . dB, which is u . du. So
 * e_t = e_(t+1) + C_t . dC_t - u_t . du_t, and e is the gradient of the decay's logarithm.
 * Roundings add up in that: every CHUNK-th row of the batch takes e from S before it and dS behind
 * it. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu.h"
#include <string.h>

enum { CHUNK = 64, DIM = DELTA_MAX_DIM };

// Of a row and a head.
struct step {
    float raw, step, decay; // raw: before softplus
};

// One of a row's vectors: n elements at `at` + row * stride, times the row's step if `scaled`.
struct vector {
    const float *at;
    int64_t stride;
    int n;
    bool scaled;
};

enum what { FORWARD, OF_C, OF_U, OF_B };

// What the sweeps of the gradient leave: of each row and head (n_tokens, n_heads), and of each
// CHUNK-th row and head e, (n_chunks, n_heads), and S^T before it, (n_chunks, n_heads, matrix).
struct sums {
    float *c_dc, *x_du, *x_dout, *e, *kept;
};

struct sweep {
    enum what what;
    const struct scan_args *args;
    const struct delta_shape *s;
    int head;
    struct vector p, q, r, x, dout;
    float *out; // of FORWARD
    const struct scan_grads *grads;
    struct sums sums;
};

static float rate_of(const struct scan_args *a, int head)
{
    return expf(((const float *)a->a_log)[head]);
}

static __attribute__((noinline)) struct step step_of(const struct scan_args *a,
                                                     const struct delta_shape *s, int head, int row)
{
    struct step st;
    st.raw = ((const float *)a->steps)[row * a->stride + head] + ((const float *)a->dt_bias)[head];
    st.step = fmaxf(softplus(st.raw), s->min_step);
    st.decay = expf(-rate_of(a, head) * st.step);
    return st;
}

static const float *row_of(const struct vector *v, int row, float step, float room[DIM])
{
    const float *at = v->at + row * v->stride;
    if (!v->scaled) return at;
    for (int i = 0; i < v->n; i++) room[i] = step * at[i];
    return room;
}

// M and what it gives, one row further (one piece of code, so that all who call it get one result).
static __attribute__((noinline)) void advance(float *M, float *out, const struct sweep *w, int row,
                                              float step, float carry)
{
    float rooms[3][DIM];
    const float *p = row_of(&w->p, row, step, rooms[0]), *q = row_of(&w->q, row, step, rooms[1]),
                *r = row_of(&w->r, row, step, rooms[2]);
    const int n = w->q.n;
    memset(out, 0, (size_t)n * sizeof *out);
    for (int i = 0; i < w->p.n; i++) {
        float *at = M + i * n;
#pragma omp simd
        for (int k = 0; k < n; k++) {
            at[k] = fma_f32(p[i], q[k], carry * at[k]);
            out[k] = fma_f32(at[k], r[i], out[k]);
        }
    }
}

// What row `row` of the sweep gives, to where it belongs. The heads of a group come in order.
static void give(const struct sweep *w, int row, float step, const float *out)
{
    const struct delta_shape *s = w->s;
    const int n = w->q.n, each = s->n_heads / s->n_key_heads, group = w->head / each;
    const int64_t at = (int64_t)row * s->n_heads + w->head;
    const float *x = w->x.at + row * w->x.stride, *dout = w->dout.at + row * w->dout.stride;
    const float skip = ((const float *)w->args->skip)[w->head];
    if (w->what == FORWARD) {
        float *y = w->out + at * n;
        for (int v = 0; v < n; v++) y[v] = fma_f32(skip, x[v], out[v]);
        return;
    }
    float *to = (float *)w->grads->xbc + (int64_t)row * delta_conv_width(s);
    if (w->what == OF_U) {
        float *dx = to + w->head * s->head_dim;
        for (int v = 0; v < n; v++) dx[v] = fma_f32(skip, dout[v], step * out[v]);
        w->sums.x_du[at] = dot_f32(x, out, n);
        w->sums.x_dout[at] = dot_f32(x, dout, n);
        return;
    }
    to += delta_value_width(s) + group * s->key_dim;
    if (w->what == OF_C) {
        to += delta_key_width(s);
        w->sums.c_dc[at] =
            dot_f32((const float *)w->args->xbc + (int64_t)row * delta_conv_width(s) +
                        delta_value_width(s) + delta_key_width(s) + group * s->key_dim,
                    out, n);
    }
    for (int k = 0; k < n; k++) to[k] = w->head % each == 0 ? out[k] : to[k] + out[k];
}

// The rows of sequence seq.
static void run(const struct sweep *w, float *M, int seq)
{
    const struct batch_view *b = w->args->batch.view;
    const int first = b->query_start[seq], n = b->query_start[seq + 1] - first;
    const bool back = w->what == OF_U || w->what == OF_B;
    const int size = w->p.n * w->q.n;
    float out[DIM], carry = 1;
    for (int i = 0; i < n; i++) {
        const int row = back ? first + n - 1 - i : first + i;
        const struct step st = step_of(w->args, w->s, w->head, row);
        const int64_t chunk = (int64_t)(row / CHUNK) * w->s->n_heads + w->head;
        const bool begins = row % CHUNK == 0;
        if (begins && w->what == OF_C)
            memcpy(w->sums.kept + chunk * size, M, (size_t)size * sizeof *M);
        advance(M, out, w, row, st.step, back ? carry : st.decay);
        give(w, row, st.step, out);
        carry = st.decay;
        if (begins && w->what == OF_B)
            w->sums.e[chunk] = carry * dot_f32(w->sums.kept + chunk * size, M, size);
    }
    for (int i = 0; back && i < size; i++) M[i] *= carry;
}

// A sequence of a packed batch, and those that go on behind it.
static void run_packed(const struct sweep *w, int seq)
{
    float M[DIM * DIM], own[DIM * DIM];
    const int size = w->p.n * w->q.n, end = cpu_delta_unit_end(&w->args->batch, seq);
    const bool back = w->what == OF_U || w->what == OF_B;
    memset(M, 0, (size_t)size * sizeof *M);
    if (!back) run(w, M, seq);
    for (int child = seq + 1; child < end; child++) {
        if (back)
            memset(own, 0, (size_t)size * sizeof *own);
        else
            memcpy(own, M, (size_t)size * sizeof *own);
        run(w, own, child);
        for (int i = 0; back && i < size; i++) M[i] += own[i];
    }
    if (back) run(w, M, seq);
}

static void run_paged(const struct sweep *w, int seq)
{
    const struct delta_shape *s = w->s;
    const struct batch_view *b = w->args->batch.view;
    const int64_t size = (int64_t)s->key_dim * s->head_dim;
    const int64_t at = delta_window_elements(s) + w->head * size;
    if (b->state_slot[seq] < 0) {
        for (int row = b->query_start[seq]; row < b->query_start[seq + 1]; row++)
            memset(w->out + ((int64_t)row * s->n_heads + w->head) * s->head_dim, 0,
                   (size_t)s->head_dim * sizeof *w->out);
        return;
    }
    for (int end = cpu_delta_unit_end(&w->args->batch, seq); seq < end; seq++)
        run(w, cpu_delta_state(&w->args->batch, seq, at, size), seq);
}

// A sweep of one head's; dout is NULL in the forward pass.
static struct sweep sweep_of(enum what what, const struct scan_args *a, const struct delta_shape *s,
                             const float *dout, int head)
{
    const int64_t width = delta_conv_width(s);
    const float *row = a->xbc;
    const float *b =
        row + delta_value_width(s) + (int64_t)(head / (s->n_heads / s->n_key_heads)) * s->key_dim;
    const struct vector x = {row + head * s->head_dim, width, s->head_dim, false},
                        u = {x.at, width, s->head_dim, true}, B = {b, width, s->key_dim, false},
                        C = {b + delta_key_width(s), width, s->key_dim, false},
                        y = {dout + (dout ? head * s->head_dim : 0), delta_value_width(s),
                             s->head_dim, false};
    const struct vector parts[][3] = {
        [FORWARD] = {B, u, C}, [OF_C] = {u, B, y}, [OF_U] = {C, y, B}, [OF_B] = {y, C, u}};
    return (struct sweep){.what = what,
                          .args = a,
                          .s = s,
                          .head = head,
                          .p = parts[what][0],
                          .q = parts[what][1],
                          .r = parts[what][2],
                          .x = x,
                          .dout = y};
}

void cpu_ssm_scan(struct device *dev, void *out, const struct scan_args *a,
                  const struct delta_shape *s)
{
    if (!cpu_is_f32(dev, "ssm_scan", s->dt) || !delta_takes(dev, a->batch.view)) return;
    const int units = a->batch.view->n_seqs * s->n_heads;
#pragma omp parallel for schedule(dynamic) if (units > 1)
    for (int unit = 0; unit < units; unit++) {
        const int seq = unit / s->n_heads;
        struct sweep w = sweep_of(FORWARD, a, s, NULL, unit % s->n_heads);
        w.out = out;
        if (!cpu_delta_begins(&a->batch, seq)) continue;
        if (a->batch.kv)
            run_paged(&w, seq);
        else
            run_packed(&w, seq);
    }
}

// ---- backward -----------------------------------------------------------------------------------

// From e behind the last row of sequence seq to that of its first, and on the way the gradients of
// the steps; each row's of a_log takes the place of its c_dc.
static float back_steps(const struct scan_grads *g, const struct sums *sums,
                        const struct scan_args *a, const struct delta_shape *s, int head, int seq,
                        float e)
{
    const struct batch_view *b = a->batch.view;
    const float rate = rate_of(a, head);
    for (int row = b->query_start[seq + 1] - 1; row >= b->query_start[seq]; row--) {
        const int64_t at = (int64_t)row * s->n_heads + head;
        const struct step st = step_of(a, s, head, row);
        e += sums->c_dc[at] - st.step * sums->x_du[at];
        if (row % CHUNK == 0) e = sums->e[(int64_t)(row / CHUNK) * s->n_heads + head];
        const float slope = softplus(st.raw) >= s->min_step ? sigmoid(st.raw) : 0;
        ((float *)g->steps)[row * a->stride + head] = (sums->x_du[at] - rate * e) * slope;
        sums->c_dc[at] = -rate * st.step * e;
    }
    return e;
}

static void back_group(const struct scan_grads *g, const struct sums *sums, const float *dout,
                       const struct scan_args *a, const struct delta_shape *s, int group, int seq)
{
    const int each = s->n_heads / s->n_key_heads, end = cpu_delta_unit_end(&a->batch, seq);
    for (int head = group * each; head < (group + 1) * each; head++) {
        for (enum what what = OF_C; what <= OF_B; what++) {
            struct sweep w = sweep_of(what, a, s, dout, head);
            w.grads = g;
            w.sums = *sums;
            run_packed(&w, seq);
        }
        float behind = 0;
        for (int child = seq + 1; child < end; child++)
            behind += back_steps(g, sums, a, s, head, child, 0);
        back_steps(g, sums, a, s, head, seq, behind);
    }
}

size_t cpu_ssm_scratch(const struct delta_shape *s, int rows)
{
    const size_t chunks = (size_t)(rows + CHUNK - 1) / CHUNK;
    const size_t matrix = (size_t)s->key_dim * (size_t)s->head_dim;
    return (3 * (size_t)rows + chunks * (1 + matrix)) * (size_t)s->n_heads * sizeof(float);
}

void cpu_ssm_scan_back(struct device *dev, const struct scan_grads *grads, const void *dout,
                       const struct scan_args *a, const struct delta_shape *s)
{
    const struct batch_view *view = a->batch.view;
    if (!cpu_is_f32(dev, "ssm_scan_back", s->dt) || !delta_takes(dev, view)) return;
    float *scratch = cpu_workspace(dev, cpu_ssm_scratch(s, view->n_tokens));
    if (!scratch) return;
    const int64_t n = (int64_t)view->n_tokens * s->n_heads;
    const int64_t chunks = (view->n_tokens + CHUNK - 1) / CHUNK;
    float *e = scratch + 3 * n;
    const struct sums sums = {scratch, scratch + n, scratch + 2 * n, e, e + chunks * s->n_heads};
    const int units = view->n_seqs * s->n_key_heads;
#pragma omp parallel for schedule(dynamic) if (units > 1)
    for (int unit = 0; unit < units; unit++)
        if (cpu_delta_begins(&a->batch, unit / s->n_key_heads))
            back_group(grads, &sums, dout, a, s, unit % s->n_key_heads, unit / s->n_key_heads);
    // what all rows of a head share, row after row
    for (int64_t at = 0; at < n; at++) {
        const int64_t h = at % s->n_heads, row = at / s->n_heads;
        if (grads->a_log) grads->a_log[h] += sums.c_dc[at];
        if (grads->dt_bias) grads->dt_bias[h] += ((float *)grads->steps)[row * a->stride + h];
        if (grads->skip) grads->skip[h] += sums.x_dout[at];
    }
}
