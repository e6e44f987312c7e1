/* delta.c: the gated delta rule and Mamba-2's (ops.h, delta_shape), and their gradients, by chunks
 * of positions. Mamba-2's is the gated delta rule with a row's u made of its value alone, not of
 * what S and the rows before it hold of its key.
 *
 * S stands at a chunk's border and goes on at the next; of the rows between, the open chunk, k, u
 * and G are kept. A row is a function of these alone and of its own numbers, so it has the same
 * bits however its sequence is cut into batches. A unit of work is a sequence, of a packed batch
 * with those that go on behind it, and a key head with its value heads. S lies (key_dim, head_dim),
 * so that every loop runs over values and sums over keys in order.
 *
 * The gradient needs S at every border, from the last to the first, and u of all rows. It goes
 * forward again and keeps both, one value head at a time. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu.h"
#include "kernels/recurrence.h"
#include <omp.h>
#include <string.h>

enum { CHUNK = DELTA_CHUNK, DIM = DELTA_MAX_DIM };

// ---- one row ------------------------------------------------------------------------------------
struct row {
    float q[DIM], k[DIM]; // as the rule takes them
    float q_scale, k_scale;
    const float *v;
    float beta, log_decay; // beta: of Mamba-2 the step
    float a, rate;         // of the decay: exp(-rate * softplus(a)), or exp(-rate * step)
    float skip;            // of Mamba-2
};

// x divided by its length, and times `scale`; returns the factor.
static float normalise(float *y, const float *x, int n, float scale)
{
    const float factor = scale / sqrtf(dot_f32(x, x, n) + 1e-6f);
    for (int i = 0; i < n; i++) y[i] = x[i] * factor;
    return factor;
}

// Elements of gates before those of row `row`.
static int64_t gates_before(const struct delta_args *a, const struct delta_shape *s, int row)
{
    return row * (s->is_scan ? a->stride : 2 * s->n_heads);
}

static __attribute__((noinline)) void read_row(const struct delta_args *a,
                                               const struct delta_shape *s, int head, int row,
                                               struct row *ret)
{
    const int dim = s->key_dim;
    const struct delta_columns at = delta_columns_of(s, s->is_scan, head);
    const float *x = (const float *)a->qkv + (int64_t)row * delta_conv_width(s);
    const float *q = x + at.q, *k = x + at.k;
    const float *gates = (const float *)a->gates + gates_before(a, s, row) + head;
    ret->v = x + at.v;
    ret->rate = expf(((const float *)a->a_log)[head]);
    ret->a = gates[s->is_scan ? 0 : s->n_heads] + ((const float *)a->dt_bias)[head];
    if (s->is_scan) {
        memcpy(ret->q, q, (size_t)dim * sizeof *q);
        memcpy(ret->k, k, (size_t)dim * sizeof *k);
        ret->beta = fmaxf(softplus(ret->a), s->min_step);
        ret->log_decay = -ret->rate * ret->beta;
        ret->skip = ((const float *)a->skip)[head];
    } else {
        ret->q_scale = normalise(ret->q, q, dim, 1.0f / sqrtf((float)dim));
        ret->k_scale = normalise(ret->k, k, dim, 1);
        ret->beta = sigmoid(gates[0]);
        ret->log_decay = -ret->rate * softplus(ret->a);
    }
}

// Row t of the open chunk, whose key is there already (one piece of code, so that all who call it
// get one result).
static __attribute__((noinline)) void add_row(const struct delta_state *st, float *out,
                                              const struct row *r, int t,
                                              const struct delta_shape *s)
{
    const int n = s->head_dim;
    float *u = st->u + t * n;
    st->G[t] = (t > 0 ? st->G[t - 1] : 0) + r->log_decay;
    const float decay = expf(st->G[t]);
    memset(u, 0, (size_t)n * sizeof *u);
    memset(out, 0, (size_t)n * sizeof *out);
    for (int k = 0; k < s->key_dim; k++) {
        if (!s->is_scan) add_scaled(u, r->k[k], st->S + k * n, n);
        add_scaled(out, r->q[k], st->S + k * n, n);
    }
    for (int v = 0; v < n; v++) {
        u[v] = r->beta * fma_f32(-decay, u[v], r->v[v]);
        out[v] *= decay;
    }
    for (int j = 0; j < t; j++) {
        const float *key = st->k + j * s->key_dim, *before = st->u + j * n;
        const float since = expf(st->G[t] - st->G[j]);
        if (!s->is_scan)
            add_scaled(u, -r->beta * (since * dot_f32(r->k, key, s->key_dim)), before, n);
        add_scaled(out, since * dot_f32(r->q, key, s->key_dim), before, n);
    }
    add_scaled(out, dot_f32(r->q, r->k, s->key_dim), u, n);
    if (s->is_scan) add_scaled(out, r->skip, r->v, n);
}

// S of the next border.
static __attribute__((noinline)) void close_chunk(float *to, const struct delta_state *st,
                                                  const struct delta_shape *s)
{
    const int n = s->head_dim;
    const float end = st->G[CHUNK - 1], decay = expf(end);
    float since[CHUNK];
    for (int j = 0; j < CHUNK; j++) since[j] = expf(end - st->G[j]);
    for (int k = 0; k < s->key_dim; k++) {
        const float *S = st->S + k * n;
        float *next = to + k * n;
        for (int v = 0; v < n; v++) next[v] = decay * S[v];
        for (int j = 0; j < CHUNK; j++)
            add_scaled(next, since[j] * st->k[j * s->key_dim + k], st->u + j * n, n);
    }
}

// The rows of sequence seq on the states of n value heads of a key head, from `head` on, each of
// which begins with key_head. The state of a chunk lies `apart` floats behind that of the chunk
// before; 0: in its place. out (T, value width); NULL: not wanted.
static void run(float *states, int64_t apart, float *out, const struct delta_args *a,
                const struct delta_shape *s, int head, int n, int seq)
{
    const struct batch_view *b = a->batch.view;
    int position = unit_position(b, seq);
    for (int row = b->query_start[seq]; row < b->query_start[seq + 1]; row++, position++)
        for (int i = 0; i < n; i++) {
            const struct delta_state st = delta_state_of(states + position / CHUNK * apart, s, i);
            const int t = position % CHUNK, column = (head + i) * s->head_dim;
            float unwanted[DIM];
            struct row r;
            read_row(a, s, head + i, row, &r);
            memcpy(st.k + t * s->key_dim, r.k, (size_t)s->key_dim * sizeof *st.k);
            add_row(&st, out ? out + (int64_t)row * delta_value_width(s) + column : unwanted, &r, t,
                    s);
            if (t == CHUNK - 1) close_chunk(st.S + apart, &st, s);
        }
}

// ---- forward ------------------------------------------------------------------------------------
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

// Sequence seq, which begins, and those that go on from it. memory: of two states of a key head,
// where a packed batch has those of its sequences.
static void run_unit(float *out, const struct delta_args *a, const struct delta_shape *s,
                     int key_head, int seq, float *memory)
{
    const struct batch_view *b = a->batch.view;
    const int each = heads_each(s), width = each * s->head_dim;
    const int first = seq, end = unit_end(b, seq);
    const int64_t n = delta_group_elements(s), at = delta_window_elements(s) + key_head * n;
    const size_t bytes = (size_t)n * sizeof *memory;
    if (!b->packed && b->state_slot[seq] < 0) {
        for (int row = b->query_start[seq]; row < b->query_start[seq + 1]; row++)
            memset(out + (int64_t)row * delta_value_width(s) + key_head * width, 0,
                   (size_t)width * sizeof *out);
        return;
    }
    for (; seq < end; seq++) {
        float *state = seq == first ? memory : memory + n;
        if (!b->packed)
            state = cpu_delta_state(&a->batch, seq, at, n);
        else if (seq == first)
            memset(state, 0, bytes);
        else
            memcpy(state, memory, bytes);
        run(state, 0, out, a, s, key_head * each, each, seq);
    }
}

void cpu_delta_rule(struct device *dev, void *out, const struct delta_args *a,
                    const struct delta_shape *s)
{
    if (!cpu_is_f32(dev, "delta_rule", s->dt) || !delta_takes(dev, a->batch.view)) return;
    const int units = a->batch.view->n_seqs * s->n_key_heads;
    const int64_t each = 2 * delta_group_elements(s);
    float *scratch = cpu_workspace(dev, (size_t)(omp_get_max_threads() * each) * sizeof *scratch);
    if (!scratch) return;
#pragma omp parallel for schedule(dynamic) if (units > 1)
    for (int unit = 0; unit < units; unit++) {
        const int seq = unit / s->n_key_heads;
        if (unit_begins(a->batch.view, seq))
            run_unit(out, a, s, unit % s->n_key_heads, seq, scratch + omp_get_thread_num() * each);
    }
}

// ---- backward -----------------------------------------------------------------------------------
// The gradients of a chunk's rows.
struct row_grads {
    float q[CHUNK][DIM], k[CHUNK][DIM], u[CHUNK][DIM];
    double G[CHUNK], log_decay[CHUNK]; // sums of which little stays
};

// A thread's memory: of a value head, of the positions of a sequence and of the one it goes on
// from.
struct back {
    const struct delta_args *args;
    const struct delta_shape *s;
    const struct delta_grads *grads;
    const float *dout;
    float *parts;  // (T, n_heads, 3) of the gradients of a_log, dt_bias and skip
    float *chunks; // (chunks + 1, chunk_floats): states, of which the last is a border's alone
    float *dS, *dS_shared;
    struct row r[CHUNK];
    struct row_grads d;
    // What the sequences behind a prefix add to the rows of its open chunk.
    float shared_u[CHUNK][DIM];
    double shared_log_decay[CHUNK];
};

static int64_t matrix(const struct delta_shape *s)
{
    return (int64_t)s->key_dim * s->head_dim;
}

// Floats of the state of a chunk's one value head.
static int64_t chunk_floats(const struct delta_shape *s)
{
    return CHUNK * (int64_t)s->key_dim + delta_head_elements(s);
}

// What a whole chunk's rows get of the gradient of S behind it.
static void back_border(struct back *b, const struct delta_state *st)
{
    const int dim = b->s->key_dim, n = b->s->head_dim;
    const float end = st->G[CHUNK - 1];
    double *dG = b->d.G;
    dG[CHUNK - 1] += expf(end) * dot_f32(st->S, b->dS, (int)matrix(b->s));
    for (int j = 0; j < CHUNK; j++) {
        const float since = expf(end - st->G[j]), *key = st->k + j * dim, *u = st->u + j * n;
        for (int k = 0; k < dim; k++) {
            const float *dS = b->dS + k * n;
            b->d.k[j][k] = since * dot_f32(dS, u, n); // the first that a row gets
            add_scaled(b->d.u[j], since * key[k], dS, n);
        }
        const float part = dot_f32(b->d.k[j], key, dim);
        dG[CHUNK - 1] += part;
        dG[j] -= part;
    }
}

// Of weight * exp(G_t - G_j) * (x . k_j) * (y . u_j), by which row t reads row j.
static void back_pair(struct back *b, const struct delta_state *st, int t, int j, float weight,
                      const float *x, float *dx, const float *y)
{
    const int dim = b->s->key_dim, n = b->s->head_dim;
    const float *key = st->k + j * dim;
    const float since = weight * expf(st->G[t] - st->G[j]);
    const float dread = since * dot_f32(y, st->u + j * n, n), read = dot_f32(x, key, dim);
    add_scaled(b->d.u[j], since * read, y, n);
    b->d.G[t] += dread * read;
    b->d.G[j] -= dread * read;
    add_scaled(dx, dread, key, dim);
    add_scaled(b->d.k[j], dread, x, dim);
}

// Row t of a chunk, those behind it being done. dS becomes that of S before the chunk.
static void back_row(struct back *b, const struct delta_state *st, int head, int row, int t)
{
    const struct delta_shape *s = b->s;
    const int dim = s->key_dim, n = s->head_dim;
    const struct row *r = &b->r[t];
    const float *dout = b->dout + (int64_t)row * delta_value_width(s) + head * n;
    float *dv = (float *)b->grads->qkv + (int64_t)row * delta_conv_width(s) +
                delta_columns_of(s, s->is_scan, head).v;
    float *dgate = (float *)b->grads->gates + gates_before(b->args, s, row) + head;
    float *dq = b->d.q[t], *dk = b->d.k[t], *du = b->d.u[t];
    double *dG = b->d.G;
    for (int j = 0; j <= t; j++) back_pair(b, st, t, j, 1, r->q, dq, dout);
    for (int j = 0; j < t && !s->is_scan; j++) back_pair(b, st, t, j, -r->beta, r->k, dk, du);
    for (int v = 0; v < n; v++) dv[v] = r->beta * du[v];
    const float decay = expf(st->G[t]);
    for (int k = 0; k < dim; k++) {
        const float *S = st->S + k * n;
        const float from_q = decay * dot_f32(S, dout, n);
        const float from_k = s->is_scan ? 0 : -decay * dot_f32(S, dv, n);
        dq[k] += from_q;
        dk[k] += from_k;
        dG[t] += from_q * r->q[k] + from_k * r->k[k];
        add_scaled(b->dS + k * n, decay * r->q[k], dout, n);
        if (!s->is_scan) add_scaled(b->dS + k * n, -decay * r->k[k], dv, n);
    }
    if (s->is_scan) {
        add_scaled(dv, r->skip, dout, n);
        *dgate = dot_f32(du, r->v, n); // of the step, as far as u is made of it
        b->parts[((int64_t)row * s->n_heads + head) * 3 + 2] = dot_f32(r->v, dout, n);
    } else {
        *dgate = dot_f32(du, st->u + t * n, n) * (1 - r->beta);
    }
}

// The gradient of what the row's decay is made of, from that of its logarithm.
static void back_decay(const struct back *b, const struct row *r, int head, int row,
                       float dlog_decay)
{
    const struct delta_shape *s = b->s;
    float *part = b->parts + ((int64_t)row * s->n_heads + head) * 3;
    float *dgate = (float *)b->grads->gates + gates_before(b->args, s, row) + head;
    const float dexponent = -dlog_decay * r->rate; // of softplus(a), or of the step
    part[0] = dexponent * (s->is_scan ? r->beta : softplus(r->a));
    if (s->is_scan)
        *dgate = softplus(r->a) >= s->min_step ? (*dgate + dexponent) * sigmoid(r->a) : 0;
    else
        *(dgate += s->n_heads) = dexponent * sigmoid(r->a);
    part[1] = *dgate;
}

// The rows of positions `from` to `end` of a chunk, of sequence seq. Of those of the chunk before
// `from`, which are those of the sequence it goes on from, what they get is added up.
static void back_chunk(struct back *b, int head, int seq, int from, int end)
{
    const struct delta_shape *s = b->s;
    const struct batch_view *view = b->args->batch.view;
    const int chunk = from / CHUNK, first = chunk * CHUNK, own = from - first, n = end - first;
    const struct delta_columns at = delta_columns_of(s, s->is_scan, head);
    const struct delta_state st = delta_state_of(b->chunks + chunk * chunk_floats(s), s, 0);
    double dG = 0;
    for (int t = 0; t < n; t++) read_row(b->args, s, head, row_at(view, seq, first + t), &b->r[t]);
    if (n == CHUNK) {
        back_border(b, &st);
        const float decay = expf(st.G[n - 1]);
        for (int64_t i = 0; i < matrix(s); i++) b->dS[i] *= decay;
    }
    for (int t = n - 1; t >= own; t--) back_row(b, &st, head, row_at(view, seq, first + t), t);
    for (int t = n - 1; t >= 0; t--) {
        const int row = row_at(view, seq, first + t);
        float *dx = (float *)b->grads->qkv + (int64_t)row * delta_conv_width(s);
        dG += b->d.G[t];
        add_scaled(dx + at.q, 1, b->d.q[t], s->key_dim);
        add_scaled(dx + at.k, 1, b->d.k[t], s->key_dim);
        b->d.log_decay[t] += dG;
        if (t < own) {
            add_scaled(b->shared_u[t], 1, b->d.u[t], s->head_dim);
            b->shared_log_decay[t] += b->d.log_decay[t];
        } else {
            back_decay(b, &b->r[t], head, row, (float)b->d.log_decay[t]);
        }
    }
    memset(&b->d, 0, sizeof b->d);
}

// Sequence seq from its last row to its first; dS of what it began with is left. takes: it is the
// one that others went on from, which have added up what they give to it.
static void back_sequence(struct back *b, int head, int seq, bool takes)
{
    const struct batch_view *v = b->args->batch.view;
    const int first = v->first_position[seq];
    const int behind = first + v->query_start[seq + 1] - v->query_start[seq];
    memset(b->dS, 0, (size_t)matrix(b->s) * sizeof(float));
    if (takes) {
        memcpy(b->d.u, b->shared_u, sizeof b->d.u);
        memcpy(b->d.log_decay, b->shared_log_decay, sizeof b->d.log_decay);
    }
    for (int end = behind, from; end > first; end = from) {
        const int border = (end - 1) / CHUNK * CHUNK;
        if (takes && end == behind / CHUNK * CHUNK)
            add_scaled(b->dS, 1, b->dS_shared, (int)matrix(b->s));
        from = border > first ? border : first;
        back_chunk(b, head, seq, from, end);
    }
}

// One value head of a sequence and of those that go on behind it.
static void back_unit(struct back *b, int head, int seq)
{
    const int size = (int)matrix(b->s), end = unit_end(b->args->batch.view, seq);
    // S before the first row is 0.
    memset(delta_state_of(b->chunks, b->s, 0).S, 0, (size_t)size * sizeof(float));
    memset(b->dS_shared, 0, (size_t)size * sizeof(float));
    memset(b->shared_u, 0, sizeof b->shared_u);
    memset(b->shared_log_decay, 0, sizeof b->shared_log_decay);
    for (int i = seq; i < end; i++) {
        run(b->chunks, chunk_floats(b->s), NULL, b->args, b->s, head, 1, i);
        if (i == seq) continue;
        back_sequence(b, head, i, false);
        add_scaled(b->dS_shared, 1, b->dS, size);
    }
    back_sequence(b, head, seq, true);
}

// Takes the gradient of a query or key as the rule takes it, y = factor * x, back to x, in place.
static void back_length(float *dx, const float *y, float factor, float scale, int n)
{
    const float along = dot_f32(y, dx, n) / (scale * scale);
    for (int i = 0; i < n; i++) dx[i] = factor * fma_f32(-y[i], along, dx[i]);
}

// head: the first of the key head's.
static void back_lengths(struct back *b, int head, int row)
{
    const struct delta_shape *s = b->s;
    const struct delta_columns at = delta_columns_of(s, s->is_scan, head);
    float *dx = (float *)b->grads->qkv + (int64_t)row * delta_conv_width(s);
    struct row r;
    read_row(b->args, s, head, row, &r);
    back_length(dx + at.q, r.q, r.q_scale, 1.0f / sqrtf((float)s->key_dim), s->key_dim);
    back_length(dx + at.k, r.k, r.k_scale, 1, s->key_dim);
}

static void back_key_head(struct back *b, int key_head, int seq)
{
    const struct delta_shape *s = b->s;
    const struct batch_view *view = b->args->batch.view;
    const int each = heads_each(s), head = key_head * each;
    const struct delta_columns at = delta_columns_of(s, s->is_scan, head);
    const int first = view->query_start[seq], end = view->query_start[unit_end(view, seq)];
    const size_t bytes = (size_t)s->key_dim * sizeof(float);
    for (int row = first; row < end; row++) {
        float *dx = (float *)b->grads->qkv + (int64_t)row * delta_conv_width(s);
        memset(dx + at.q, 0, bytes);
        memset(dx + at.k, 0, bytes);
    }
    for (int h = 0; h < each; h++) back_unit(b, head + h, seq);
    for (int row = first; row < end && !s->is_scan; row++) back_lengths(b, head, row);
}

// A thread's floats: two gradients of S, and states.
static int64_t thread_floats(const struct delta_shape *s, int max_context)
{
    return 2 * matrix(s) + (max_context / CHUNK + 2) * chunk_floats(s);
}

size_t cpu_delta_scratch(const struct delta_shape *s, int rows, int max_context)
{
    if (delta_is_conv(s)) return 0;
    const size_t threads = (size_t)omp_get_max_threads();
    const size_t forward = threads * 2 * (size_t)delta_group_elements(s);
    const size_t back =
        threads * (size_t)thread_floats(s, max_context) + 3 * (size_t)rows * (size_t)s->n_heads;
    return (forward > back ? forward : back) * sizeof(float);
}

// The gradients of what all rows of a head share, row after row.
static void add_shared(const struct delta_grads *g, const float *parts, int rows, int n_heads)
{
    float *const to[] = {g->a_log, g->dt_bias, g->skip};
    for (int64_t i = 0; i < (int64_t)rows * n_heads * 3; i++)
        if (to[i % 3]) to[i % 3][i / 3 % n_heads] += parts[i];
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
    float *parts = scratch + omp_get_max_threads() * each;
#pragma omp parallel for schedule(dynamic) if (units > 1)
    for (int unit = 0; unit < units; unit++) {
        const int seq = unit / s->n_key_heads;
        float *mine = scratch + omp_get_thread_num() * each;
        struct back b = {.args = a,
                         .s = s,
                         .grads = grads,
                         .dout = dout,
                         .parts = parts,
                         .chunks = mine + 2 * size,
                         .dS = mine,
                         .dS_shared = mine + size};
        if (unit_begins(view, seq)) back_key_head(&b, unit % s->n_key_heads, seq);
    }
    add_shared(grads, parts, view->n_tokens, s->n_heads);
}
