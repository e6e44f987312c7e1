/* test_delta.c: linear attention by the gated delta rule and by Mamba-2's, the convolution before
 * it, the gates, and the gradients of all of these; over packed batches with prefixes, and over
 * paged ones that go on from states. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_table.h"

// p: prefix rows, sequences behind it, rows of each, key heads, heads, key_dim, head_dim, taps; and
// of convolutions whether they have a bias. A batch is the prefix, the sequences, and one of as
// many rows as the prefix that shares nothing.
enum { PREFIX, SEQS, EACH, KEY_HEADS, HEADS, KEY_DIM, HEAD_DIM, TAPS, BIAS };

static struct delta_shape shape_of(const struct op_test *t)
{
    return (struct delta_shape){.n_key_heads = t->p[KEY_HEADS],
                                .n_heads = t->p[HEADS],
                                .key_dim = t->p[KEY_DIM],
                                .head_dim = t->p[HEAD_DIM],
                                .taps = t->p[TAPS],
                                .ahead = t->p[EACH] % 4,
                                .dt = dt};
}

static int rows_of(const int *p)
{
    return 2 * p[PREFIX] + p[SEQS] * p[EACH];
}

// ---- packed batches -----------------------------------------------------------------------------
// The lists of a packed batch; pointers at launch are those from `first` on.
static void packed_lists(struct op_test *t)
{
    const int *p = t->p, n = p[SEQS] + 2, rows = rows_of(p);
    int32_t *start = ints(t, "query_start", n + 1), *seq = ints(t, "seq_of", rows);
    int32_t *parent = ints(t, "parent", n), *first = ints(t, "first_position", n);
    int32_t *end = ints(t, "attend_end", n);
    start[0] = 0;
    for (int s = 0; s < n; s++) {
        const bool behind = s > 0 && s < n - 1;
        start[s + 1] = start[s] + (behind ? p[EACH] : p[PREFIX]);
        parent[s] = behind ? 0 : -1;
        first[s] = behind ? p[PREFIX] : 0;
        for (int r = start[s]; r < start[s + 1]; r++) seq[r] = s;
    }
    for (int s = 0; s < n; s++) end[s] = s == 0 ? start[n - 1] : start[s + 1];
}

static struct delta_batch packed_batch(struct op_test *t, void **lists)
{
    t->batch = (struct batch_view){.n_tokens = rows_of(t->p),
                                   .n_seqs = t->p[SEQS] + 2,
                                   .max_context = t->p[PREFIX] + t->p[EACH],
                                   .packed = true,
                                   .query_start = lists[0],
                                   .seq_of = lists[1],
                                   .parent = lists[2],
                                   .first_position = lists[3],
                                   .attend_end = lists[4]};
    return (struct delta_batch){.view = &t->batch};
}

// The rows that row r goes on from, and itself last: `ret` has room for them.
static int rows_up_to(const int *p, int r, int *ret)
{
    const int last = p[PREFIX] + p[SEQS] * p[EACH]; // the first row that shares nothing
    const int own = r < p[PREFIX] ? 0
                    : r < last    ? p[PREFIX] + (r - p[PREFIX]) / p[EACH] * p[EACH]
                                  : last;
    int n = 0;
    if (r >= p[PREFIX] && r < last)
        for (; n < p[PREFIX]; n++) ret[n] = n;
    for (int i = own; i <= r; i++) ret[n++] = i;
    return n;
}

// ---- formulas -----------------------------------------------------------------------------------
static double sigmoid_of(double x)
{
    return 1 / (1 + exp(-x));
}

// One head, one row further; u (head_dim): what the row adds with its key.
static void rule_row(const struct delta_shape *s, int head, double *S, double *out, double *u,
                     const double *qkv, const double *gates, double a_log, double dt_bias)
{
    const int keys = delta_key_width(s), dim = s->key_dim, n = s->head_dim;
    const double *q = qkv + head / (s->n_heads / s->n_key_heads) * dim, *k = q + keys;
    const double *v = qkv + 2 * keys + head * n, beta = sigmoid_of(gates[head]);
    const double decay = exp(-exp(a_log) * log1p(exp(gates[s->n_heads + head] + dt_bias)));
    double qq = 1e-6, kk = 1e-6;
    for (int i = 0; i < dim; i++) qq += q[i] * q[i];
    for (int i = 0; i < dim; i++) kk += k[i] * k[i];
    for (int c = 0; c < n; c++) {
        double had = 0, y = 0;
        for (int i = 0; i < dim; i++) {
            S[i * n + c] *= decay;
            had += S[i * n + c] * k[i] / sqrt(kk);
        }
        for (int i = 0; i < dim; i++) {
            S[i * n + c] += k[i] / sqrt(kk) * beta * (v[c] - had);
            y += S[i * n + c] * q[i] / sqrt(qq * dim);
        }
        out[c] = y;
        u[c] = beta * (v[c] - had);
    }
}

static double conv_row(const struct delta_shape *s, const double *const from[DELTA_MAX_TAPS],
                       const double *w, const double *bias, int c)
{
    double sum = bias ? bias[c] : 0;
    for (int i = 0; i < s->taps; i++)
        if (from[i]) sum += w[c * s->taps + i] * from[i][c];
    return delta_is_conv(s) ? sum : sum * sigmoid_of(sum);
}

// ---- the rule, packed ---------------------------------------------------------------------------
static void rule_packed(struct op_test *t, double *out, const double *qkv, const double *gates,
                        const double *a_log, const double *dt_bias)
{
    const struct delta_shape s = shape_of(t);
    const int *p = t->p, n = s.key_dim * s.head_dim;
    double *S = op_host((size_t)n * sizeof *S), *prefix = op_host((size_t)n * sizeof *S);
    double u[DELTA_MAX_DIM];
    for (int h = 0; h < s.n_heads; h++)
        for (int seq = 0, row = 0; seq < p[SEQS] + 2; seq++) {
            const bool behind = seq > 0 && seq <= p[SEQS];
            for (int i = 0; i < n; i++) S[i] = behind ? prefix[i] : 0;
            for (int end = row + (behind ? p[EACH] : p[PREFIX]); row < end; row++)
                rule_row(&s, h, S, out + ((int64_t)row * s.n_heads + h) * s.head_dim, u,
                         qkv + (int64_t)row * delta_conv_width(&s),
                         gates + (int64_t)row * 2 * s.n_heads, a_log[h], dt_bias[h]);
            for (int i = 0; i < n && seq == 0; i++) prefix[i] = S[i];
        }
}

static void rule_inputs(struct op_test *t)
{
    const struct delta_shape s = shape_of(t);
    const int rows = rows_of(t->p);
    floats(t, "qkv", IN, DATA, (int64_t)rows * delta_conv_width(&s), 1);
    floats(t, "gates", IN, F32, (int64_t)rows * 2 * s.n_heads, 1.5f);
    floats(t, "a_log", IN, DATA, s.n_heads, 0.5f);
    floats(t, "dt_bias", IN, DATA, s.n_heads, 1);
}

static void rule_setup(struct op_test *t)
{
    const struct delta_shape s = shape_of(t);
    floats(t, "out", OUT, DATA, (int64_t)rows_of(t->p) * delta_value_width(&s), 1);
    rule_inputs(t);
    packed_lists(t);
}

static void rule_launch(struct op_test *t, void **d)
{
    const struct delta_shape s = shape_of(t);
    const struct delta_args args = {d[1], d[2], d[3], d[4], packed_batch(t, d + 5), .skip = NULL};
    ops->delta_rule(dev, d[0], &args, &s);
}

static void rule_reference(struct op_test *t, double **v)
{
    rule_packed(t, t->a[0].expect, v[1], v[2], v[3], v[4]);
}

OP(rule, "delta_rule");

enum { RB_DQKV, RB_DGATES, RB_DA, RB_DDT, RB_DOUT, RB_QKV, RB_GATES, RB_A, RB_DT, RB_LISTS };

static void rule_back_setup(struct op_test *t)
{
    const struct delta_shape s = shape_of(t);
    const int rows = rows_of(t->p);
    floats(t, "dqkv", OUT, DATA, (int64_t)rows * delta_conv_width(&s), 1);
    floats(t, "dgates", OUT, DATA, (int64_t)rows * 2 * s.n_heads, 1);
    floats(t, "da_log", INOUT, F32, s.n_heads, 1);
    floats(t, "ddt_bias", INOUT, F32, s.n_heads, 1);
    floats(t, "dout", IN, DATA, (int64_t)rows * delta_value_width(&s), 1);
    rule_inputs(t);
    packed_lists(t);
}

static void rule_back_launch(struct op_test *t, void **d)
{
    const struct delta_shape s = shape_of(t);
    const struct delta_grads grads = {d[RB_DQKV], d[RB_DGATES], d[RB_DA], d[RB_DDT], NULL};
    const struct delta_args args = {
        d[RB_QKV], d[RB_GATES], d[RB_A], d[RB_DT], packed_batch(t, d + RB_LISTS), .skip = NULL};
    ops->delta_rule_back(dev, &grads, d[RB_DOUT], &args, &s);
}

static double rule_loss(struct op_test *t, double **v)
{
    const int64_t n = t->a[RB_DOUT].n;
    double *out = op_host((size_t)n * sizeof *out);
    rule_packed(t, out, v[RB_QKV], v[RB_GATES], v[RB_A], v[RB_DT]);
    return dot(v[RB_DOUT], out, n);
}

OP_BACK(rule_back, "delta_rule_back", rule_loss);

// ---- the convolution, packed --------------------------------------------------------------------
enum { GAP = 5 }; // elements between rows of x

static int64_t x_stride(const struct op_test *t)
{
    const struct delta_shape s = shape_of(t);
    return delta_conv_width(&s) + GAP;
}

static void conv_packed(struct op_test *t, double *y, const double *x, const double *w,
                        const double *bias)
{
    const struct delta_shape s = shape_of(t);
    const int rows = rows_of(t->p), width = delta_conv_width(&s);
    int *up_to = op_host((size_t)rows * sizeof *up_to);
    for (int r = 0; r < rows; r++) {
        const double *from[DELTA_MAX_TAPS];
        const int n = rows_up_to(t->p, r, up_to);
        for (int i = 0; i < s.taps; i++) {
            const int at = n - s.taps + i;
            from[i] = at < 0 ? NULL : x + up_to[at] * x_stride(t);
        }
        for (int c = 0; c < width; c++)
            y[(int64_t)r * width + c] = conv_row(&s, from, w, t->p[BIAS] ? bias : NULL, c);
    }
}

static void conv_inputs(struct op_test *t)
{
    const struct delta_shape s = shape_of(t);
    floats(t, "x", IN, DATA, rows_of(t->p) * x_stride(t), 1);
    floats(t, "w", IN, DATA, (int64_t)delta_conv_width(&s) * s.taps, 1);
    floats(t, "bias", IN, DATA, delta_conv_width(&s), 1);
}

static void conv_setup(struct op_test *t)
{
    const struct delta_shape s = shape_of(t);
    floats(t, "y", OUT, DATA, (int64_t)rows_of(t->p) * delta_conv_width(&s), 1);
    conv_inputs(t);
    packed_lists(t);
}

static void conv_launch(struct op_test *t, void **d)
{
    const struct delta_shape s = shape_of(t);
    const struct conv_args args = {d[1], x_stride(t), d[2], packed_batch(t, d + 4),
                                   t->p[BIAS] ? d[3] : NULL};
    ops->short_conv(dev, d[0], &args, &s);
}

static void conv_reference(struct op_test *t, double **v)
{
    conv_packed(t, t->a[0].expect, v[1], v[2], v[3]);
}

OP(conv, "short_conv");

enum { CB_DX, CB_DW, CB_DB, CB_DY, CB_X, CB_W, CB_BIAS, CB_LISTS };

static void conv_back_setup(struct op_test *t)
{
    const struct delta_shape s = shape_of(t);
    floats(t, "dx", OUT, DATA, rows_of(t->p) * x_stride(t), 1);
    floats(t, "dw", INOUT, F32, (int64_t)delta_conv_width(&s) * s.taps, 1);
    floats(t, "db", t->p[BIAS] ? INOUT : IN, F32, delta_conv_width(&s), 1);
    floats(t, "dy", IN, DATA, (int64_t)rows_of(t->p) * delta_conv_width(&s), 1);
    conv_inputs(t);
    packed_lists(t);
}

static void conv_back_launch(struct op_test *t, void **d)
{
    const struct delta_shape s = shape_of(t);
    const struct conv_args args = {d[CB_X], x_stride(t), d[CB_W], packed_batch(t, d + CB_LISTS),
                                   t->p[BIAS] ? d[CB_BIAS] : NULL};
    ops->short_conv_back(dev, d[CB_DX], d[CB_DW], t->p[BIAS] ? d[CB_DB] : NULL, d[CB_DY], &args,
                         &s);
}

static double conv_loss(struct op_test *t, double **v)
{
    const int64_t n = t->a[CB_DY].n;
    double *y = op_host((size_t)n * sizeof *y);
    conv_packed(t, y, v[CB_X], v[CB_W], v[CB_BIAS]);
    return dot(v[CB_DY], y, n);
}

static void conv_back_reference(struct op_test *t, double **v)
{
    const struct delta_shape s = shape_of(t);
    differentiate(t, v, CB_DX, CB_X, false, conv_loss);
    for (int64_t i = 0; i < t->a[CB_DX].n; i++) // gaps between rows are nobody's
        if (i % x_stride(t) >= delta_conv_width(&s)) t->a[CB_DX].expect[i] = NAN;
    differentiate(t, v, CB_DW, CB_W, true, conv_loss);
    if (t->p[BIAS]) differentiate(t, v, CB_DB, CB_BIAS, true, conv_loss);
}

OP(conv_back, "short_conv_back");

// ---- paged batches ------------------------------------------------------------------------------
// A sequence of EACH rows from its start in slot 2; one row in slot 0 that goes on from earlier
// ones, two more behind it, over a chunk's border, and two drafts behind these, which leave their
// states in slots 1 and 4; a padded row; a start in slot 3; and a row that goes on from slot 5, the
// last of its chunk, and leaves that as it is.
enum { SLOTS = 7, PAGED_SEQS = 8 };
static const int from_of[PAGED_SEQS] = {2, 0, 0, 0, 1, -1, 3, 5};
static const int slot_of[PAGED_SEQS] = {2, 0, 0, 1, 4, -1, 3, 6};
static const int first_of[PAGED_SEQS] = {0, 62, 63, 65, 66, 0, 0, 127};

static int paged_rows(const int *p, int seq)
{
    return seq == 0 ? p[EACH] : seq == 2 ? 2 : 1;
}

static int all_paged_rows(const int *p)
{
    return p[EACH] + PAGED_SEQS;
}

static void paged_lists(struct op_test *t)
{
    int32_t *start = ints(t, "query_start", PAGED_SEQS + 1);
    int32_t *seq = ints(t, "seq_of", all_paged_rows(t->p));
    int32_t *positions = ints(t, "positions", all_paged_rows(t->p));
    int32_t *from = ints(t, "state_from", PAGED_SEQS);
    int32_t *slot = ints(t, "state_slot", PAGED_SEQS);
    start[0] = 0;
    for (int s = 0; s < PAGED_SEQS; s++) {
        start[s + 1] = start[s] + paged_rows(t->p, s);
        from[s] = from_of[s];
        slot[s] = slot_of[s];
        for (int r = start[s]; r < start[s + 1]; r++) {
            seq[r] = s;
            positions[r] = first_of[s] + r - start[s];
        }
    }
}

static int64_t slot_elements(const struct delta_shape *s)
{
    return delta_state_elements(s) + GAP; // of another layer, before this one's
}

// kv and layer are the caller's.
static struct delta_batch paged_batch(struct op_test *t, const struct delta_shape *s, void **lists,
                                      void *states, struct kv_view *kv, struct kv_layer *layer)
{
    *layer = (struct kv_layer){.state = GAP};
    *kv = (struct kv_view){.layers = layer, .states = states, .slot_elements = slot_elements(s)};
    t->batch = (struct batch_view){.n_tokens = all_paged_rows(t->p),
                                   .n_seqs = PAGED_SEQS,
                                   .max_query = t->p[EACH], // at least 2, which sequence 2 has
                                   .query_start = lists[0],
                                   .seq_of = lists[1],
                                   .positions = lists[2],
                                   .state_from = lists[3],
                                   .state_slot = lists[4]};
    return (struct delta_batch){.view = &t->batch, .kv = kv};
}

// What sequence `seq` begins with, n elements at `at` of the slots: into its own.
static void begin_state(const struct delta_shape *s, double *states, int seq, int64_t at, int64_t n)
{
    const int64_t each = slot_elements(s);
    if (slot_of[seq] < 0) return;
    for (int64_t i = at; i < at + n; i++)
        states[slot_of[seq] * each + i] = first_of[seq] == 0 ? 0 : states[from_of[seq] * each + i];
}

static void paged_rule_setup(struct op_test *t)
{
    const struct delta_shape s = shape_of(t);
    const int rows = all_paged_rows(t->p);
    floats(t, "out", OUT, DATA, (int64_t)rows * delta_value_width(&s), 1);
    floats(t, "states", INOUT, F32, SLOTS * slot_elements(&s), 1);
    floats(t, "qkv", IN, DATA, (int64_t)rows * delta_conv_width(&s), 1);
    floats(t, "gates", IN, F32, (int64_t)rows * 2 * s.n_heads, 1);
    floats(t, "a_log", IN, DATA, s.n_heads, 0.5f);
    floats(t, "dt_bias", IN, DATA, s.n_heads, 1);
    paged_lists(t);
}

struct head_state {
    int64_t k, S, u, G; // elements before them in the states: ops.h, delta_state_elements
};

static struct head_state head_state(const struct delta_shape *s, int slot, int head)
{
    const int each = s->n_heads / s->n_key_heads;
    const int64_t k = slot * slot_elements(s) + GAP + delta_window_elements(s) +
                      head / each * delta_group_elements(s);
    const int64_t S = k + DELTA_CHUNK * s->key_dim + head % each * delta_head_elements(s);
    const int64_t u = S + s->key_dim * s->head_dim;
    return (struct head_state){k, S, u, u + DELTA_CHUNK * s->head_dim};
}

// Of each slot that is written the rows that are not there yet, which are anything: a number of
// elements from one on. Returns false behind the last.
static bool absent_rows(const struct op_test *t, int i, int64_t *ret_from, int64_t *ret_n)
{
    const struct delta_shape s = shape_of(t);
    const int part = i % 3, h = i / 3 % s.n_heads, seq = i / 3 / s.n_heads;
    if (seq == PAGED_SEQS) return false;
    const struct head_state at = head_state(&s, slot_of[seq] < 0 ? 0 : slot_of[seq], h);
    const int row = (first_of[seq] + paged_rows(t->p, seq)) % DELTA_CHUNK;
    const int width = part == 0 ? s.key_dim : part == 1 ? s.head_dim : 1;
    *ret_from = (part == 0 ? at.k : part == 1 ? at.u : at.G) + row * width;
    // of a slot that the next sequence leaves too, that one's alone
    const bool is =
        slot_of[seq] >= 0 && (seq + 1 == PAGED_SEQS || slot_of[seq + 1] != slot_of[seq]);
    *ret_n = is ? (DELTA_CHUNK - row) * width : 0;
    return true;
}

// S before row t of the open chunk, or behind its last.
static void state_before(const struct delta_shape *s, const double *states,
                         const struct head_state *at, int t, double *ret)
{
    const double *k_of = states + at->k, *u = states + at->u, *sums = states + at->G;
    const double G = t > 0 ? sums[t - 1] : 0;
    for (int k = 0; k < s->key_dim; k++)
        for (int v = 0; v < s->head_dim; v++) {
            double *sum = &ret[k * s->head_dim + v];
            *sum = exp(G) * states[at->S + k * s->head_dim + v];
            for (int j = 0; j < t; j++)
                *sum += exp(G - sums[j]) * k_of[j * s->key_dim + k] * u[j * s->head_dim + v];
        }
}

// The rule of args, and zeros in what is not there.
static void launch_paged(struct op_test *t, void *out, float *states, const struct delta_args *args,
                         const struct delta_shape *s)
{
    int64_t from, n;
    ops->delta_rule(dev, out, args, s);
    for (int i = 0; absent_rows(t, i, &from, &n); i++)
        device_fill(dev, states + from, 0, (size_t)n * sizeof(float));
}

static void paged_rule_launch(struct op_test *t, void **d)
{
    const struct delta_shape s = shape_of(t);
    struct kv_view kv;
    struct kv_layer layer;
    const struct delta_args args = {
        d[2], d[3], d[4], d[5], paged_batch(t, &s, d + 6, d[1], &kv, &layer), .skip = NULL};
    launch_paged(t, d[0], d[1], &args, &s);
}

// Row `row` of a head: S before it becomes that behind it; its output, its key and u. Returns its
// log decay.
typedef double paged_row(const struct delta_shape *s, double **v, int row, int h, double *S,
                         double *y, double *key, double *u);

static double paged_rule_row(const struct delta_shape *s, double **v, int row, int h, double *S,
                             double *y, double *key, double *u)
{
    const double *qkv = v[2] + (int64_t)row * delta_conv_width(s);
    const double *gates = v[3] + (int64_t)row * 2 * s->n_heads;
    const double *k = qkv + delta_key_width(s) + h / (s->n_heads / s->n_key_heads) * s->key_dim;
    double kk = 1e-6;
    rule_row(s, h, S, y, u, qkv, gates, v[4][h], v[5][h]);
    for (int c = 0; c < s->key_dim; c++) kk += k[c] * k[c];
    for (int c = 0; c < s->key_dim; c++) key[c] = k[c] / sqrt(kk);
    return -exp(v[4][h]) * log1p(exp(gates[s->n_heads + h] + v[5][h]));
}

static void paged_reference(struct op_test *t, double **v, const struct delta_shape *s,
                            paged_row *row_of)
{
    const int matrix = s->key_dim * s->head_dim;
    double *out = t->a[0].expect, *states = t->a[1].expect;
    double *S = op_host((size_t)matrix * sizeof *S);
    for (int64_t i = 0; i < t->a[1].n; i++) states[i] = v[1][i];
    for (int seq = 0, row = 0; seq < PAGED_SEQS; seq++) {
        begin_state(s, states, seq, GAP + delta_window_elements(s),
                    s->n_key_heads * delta_group_elements(s));
        for (int i = 0; i < paged_rows(t->p, seq); i++, row++)
            for (int h = 0; h < s->n_heads; h++) {
                const int at = (first_of[seq] + i) % DELTA_CHUNK;
                double *y = out + ((int64_t)row * s->n_heads + h) * s->head_dim;
                for (int c = 0; c < s->head_dim; c++) y[c] = 0;
                if (slot_of[seq] < 0) continue;
                const struct head_state to = head_state(s, slot_of[seq], h);
                double *G = states + to.G;
                state_before(s, states, &to, at, S);
                const double log_decay = row_of(s, v, row, h, S, y, states + to.k + at * s->key_dim,
                                                states + to.u + at * s->head_dim);
                G[at] = (at > 0 ? G[at - 1] : 0) + log_decay;
                for (int c = 0; c < matrix && at == DELTA_CHUNK - 1; c++) states[to.S + c] = S[c];
            }
    }
    int64_t from, n;
    for (int i = 0; absent_rows(t, i, &from, &n); i++)
        for (int64_t c = from; c < from + n; c++) states[c] = 0;
}

static void paged_rule_reference(struct op_test *t, double **v)
{
    const struct delta_shape s = shape_of(t);
    paged_reference(t, v, &s, paged_rule_row);
}

OP(paged_rule, "delta_rule");

static void paged_conv_setup(struct op_test *t)
{
    const struct delta_shape s = shape_of(t);
    const int rows = all_paged_rows(t->p);
    floats(t, "y", OUT, DATA, (int64_t)rows * delta_conv_width(&s), 1);
    floats(t, "states", INOUT, F32, SLOTS * slot_elements(&s), 1);
    floats(t, "x", IN, DATA, rows * x_stride(t), 1);
    floats(t, "w", IN, DATA, (int64_t)delta_conv_width(&s) * s.taps, 1);
    floats(t, "bias", IN, DATA, delta_conv_width(&s), 1);
    paged_lists(t);
}

static void paged_conv_launch(struct op_test *t, void **d)
{
    const struct delta_shape s = shape_of(t);
    struct kv_view kv;
    struct kv_layer layer;
    const struct conv_args args = {d[2], x_stride(t), d[3],
                                   paged_batch(t, &s, d + 5, d[1], &kv, &layer),
                                   t->p[BIAS] ? d[4] : NULL};
    ops->short_conv(dev, d[0], &args, &s);
}

static void paged_conv_reference(struct op_test *t, double **v)
{
    const struct delta_shape s = shape_of(t);
    const int width = delta_conv_width(&s), before = s.taps - 1;
    double *states = t->a[1].expect;
    for (int64_t i = 0; i < t->a[1].n; i++) states[i] = v[1][i];
    for (int seq = 0, row = 0; seq < PAGED_SEQS; seq++) {
        begin_state(&s, states, seq, GAP, delta_window_elements(&s));
        for (int i = 0; i < paged_rows(t->p, seq); i++, row++) {
            const double *from[DELTA_MAX_TAPS], *x = v[2] + row * x_stride(t);
            double *y = t->a[0].expect + (int64_t)row * width;
            double *window = states + slot_of[seq] * slot_elements(&s) + GAP;
            const int position = first_of[seq] + i, n = delta_window(&s);
            for (int c = 0; c < width; c++) y[c] = 0;
            if (slot_of[seq] < 0) continue;
            for (int k = 0; k < before; k++)
                from[k] =
                    position < before - k ? NULL : window + (position - before + k) % n * width;
            from[before] = x;
            for (int c = 0; c < width; c++)
                y[c] = conv_row(&s, from, v[3], t->p[BIAS] ? v[4] : NULL, c);
            for (int c = 0; c < width; c++) window[position % n * width + c] = x[c];
        }
    }
}

OP(paged_conv, "short_conv");

// ---- Mamba-2 ------------------------------------------------------------------------------------
static struct delta_shape scan_shape(const struct op_test *t)
{
    struct delta_shape s = shape_of(t);
    s.is_scan = true;
    s.min_step = 0.3f; // which some of the steps are below
    return s;
}

// What a scan reads beside x, B and C, of a head.
struct scan_head {
    const double *steps, *a_log, *dt_bias, *skip;
};

// One row further, as rule_row(); returns the log decay.
static double scan_row(const struct delta_shape *s, int head, double *S, double *out, double *u,
                       const double *xbc, const double *steps, const struct scan_head *h)
{
    const double raw = log1p(exp(steps[head] + h->dt_bias[head]));
    const double step = raw > (double)s->min_step ? raw : (double)s->min_step;
    const double log_decay = -exp(h->a_log[head]) * step, *x = xbc + head * s->head_dim;
    const double *b =
        xbc + delta_value_width(s) + head / (s->n_heads / s->n_key_heads) * s->key_dim;
    for (int v = 0; v < s->head_dim; v++) {
        double y = h->skip[head] * x[v];
        for (int k = 0; k < s->key_dim; k++) {
            double *at = S + k * s->head_dim + v;
            *at = exp(log_decay) * *at + step * x[v] * b[k];
            y += *at * b[delta_key_width(s) + k];
        }
        out[v] = y;
        u[v] = step * x[v];
    }
    return log_decay;
}

static void scan_packed(struct op_test *t, double *out, const double *xbc,
                        const struct scan_head *head)
{
    const struct delta_shape s = scan_shape(t);
    const int *p = t->p, n = s.key_dim * s.head_dim;
    double *S = op_host((size_t)n * sizeof *S), *prefix = op_host((size_t)n * sizeof *S);
    double u[DELTA_MAX_DIM];
    for (int h = 0; h < s.n_heads; h++)
        for (int seq = 0, row = 0; seq < p[SEQS] + 2; seq++) {
            const bool behind = seq > 0 && seq <= p[SEQS];
            for (int i = 0; i < n; i++) S[i] = behind ? prefix[i] : 0;
            for (int end = row + (behind ? p[EACH] : p[PREFIX]); row < end; row++)
                scan_row(&s, h, S, out + ((int64_t)row * s.n_heads + h) * s.head_dim, u,
                         xbc + (int64_t)row * delta_conv_width(&s),
                         head->steps + (int64_t)row * (s.n_heads + GAP), head);
            for (int i = 0; i < n && seq == 0; i++) prefix[i] = S[i];
        }
}

static void scan_inputs(struct op_test *t, int rows)
{
    const struct delta_shape s = scan_shape(t);
    floats(t, "xbc", IN, DATA, (int64_t)rows * delta_conv_width(&s), 1);
    floats(t, "steps", IN, DATA, (int64_t)rows * (s.n_heads + GAP), 1.5f);
    floats(t, "a_log", IN, DATA, s.n_heads, 0.5f);
    floats(t, "dt_bias", IN, DATA, s.n_heads, 1);
    floats(t, "skip", IN, DATA, s.n_heads, 1);
}

static struct delta_args scan_args_of(const struct op_test *t, void **d, struct delta_batch batch)
{
    return (struct delta_args){d[0], d[1], d[2], d[3], batch, t->p[HEADS] + GAP, d[4]};
}

static void scan_setup(struct op_test *t)
{
    const struct delta_shape s = scan_shape(t);
    floats(t, "out", OUT, DATA, (int64_t)rows_of(t->p) * delta_value_width(&s), 1);
    scan_inputs(t, rows_of(t->p));
    packed_lists(t);
}

static void scan_launch(struct op_test *t, void **d)
{
    const struct delta_shape s = scan_shape(t);
    const struct delta_args args = scan_args_of(t, d + 1, packed_batch(t, d + 6));
    ops->delta_rule(dev, d[0], &args, &s);
}

static void scan_reference(struct op_test *t, double **v)
{
    scan_packed(t, t->a[0].expect, v[1], &(struct scan_head){v[2], v[3], v[4], v[5]});
}

OP(scan, "delta_rule, scan");

enum {
    SB_DX,
    SB_DSTEPS,
    SB_DA,
    SB_DDT,
    SB_DSKIP,
    SB_DOUT,
    SB_X,
    SB_STEPS,
    SB_A,
    SB_DT,
    SB_SKIP,
    SB_LISTS
};

static void scan_back_setup(struct op_test *t)
{
    const struct delta_shape s = scan_shape(t);
    const int rows = rows_of(t->p);
    floats(t, "dxbc", OUT, DATA, (int64_t)rows * delta_conv_width(&s), 1);
    floats(t, "dsteps", OUT, DATA, (int64_t)rows * (s.n_heads + GAP), 1);
    floats(t, "da_log", INOUT, F32, s.n_heads, 1);
    floats(t, "ddt_bias", INOUT, F32, s.n_heads, 1);
    floats(t, "dskip", INOUT, F32, s.n_heads, 1);
    floats(t, "dout", IN, DATA, (int64_t)rows * delta_value_width(&s), 1);
    scan_inputs(t, rows);
    packed_lists(t);
    // Sums over all rows of what is itself a sum of differences, which cancel: of 510 rows f32 is
    // off by 2.1e-5 of the largest on an H200.
    t->a[SB_DA].noise = t->a[SB_DDT].noise = 4e-5;
}

static void scan_back_launch(struct op_test *t, void **d)
{
    const struct delta_shape s = scan_shape(t);
    const struct delta_grads grads = {d[SB_DX], d[SB_DSTEPS], d[SB_DA], d[SB_DDT], d[SB_DSKIP]};
    const struct delta_args args = scan_args_of(t, d + SB_X, packed_batch(t, d + SB_LISTS));
    ops->delta_rule_back(dev, &grads, d[SB_DOUT], &args, &s);
}

static double scan_loss(struct op_test *t, double **v)
{
    const int64_t n = t->a[SB_DOUT].n;
    double *out = op_host((size_t)n * sizeof *out);
    scan_packed(t, out, v[SB_X], &(struct scan_head){v[SB_STEPS], v[SB_A], v[SB_DT], v[SB_SKIP]});
    return dot(v[SB_DOUT], out, n);
}

static void scan_back_reference(struct op_test *t, double **v)
{
    differentiate(t, v, SB_DX, SB_X, false, scan_loss);
    differentiate(t, v, SB_DSTEPS, SB_STEPS, false, scan_loss);
    for (int64_t i = 0; i < t->a[SB_DSTEPS].n; i++) // gaps between rows are nobody's
        if (i % (t->p[HEADS] + GAP) >= t->p[HEADS]) t->a[SB_DSTEPS].expect[i] = NAN;
    differentiate(t, v, SB_DA, SB_A, true, scan_loss);
    differentiate(t, v, SB_DDT, SB_DT, true, scan_loss);
    differentiate(t, v, SB_DSKIP, SB_SKIP, true, scan_loss);
}

OP(scan_back, "delta_rule_back, scan");

static void paged_scan_setup(struct op_test *t)
{
    const struct delta_shape s = scan_shape(t);
    floats(t, "out", OUT, DATA, (int64_t)all_paged_rows(t->p) * delta_value_width(&s), 1);
    floats(t, "states", INOUT, F32, SLOTS * slot_elements(&s), 1);
    scan_inputs(t, all_paged_rows(t->p));
    paged_lists(t);
}

static void paged_scan_launch(struct op_test *t, void **d)
{
    const struct delta_shape s = scan_shape(t);
    struct kv_view kv;
    struct kv_layer layer;
    const struct delta_args args =
        scan_args_of(t, d + 2, paged_batch(t, &s, d + 7, d[1], &kv, &layer));
    launch_paged(t, d[0], d[1], &args, &s);
}

static double paged_scan_row(const struct delta_shape *s, double **v, int row, int h, double *S,
                             double *y, double *key, double *u)
{
    const struct scan_head head = {v[3], v[4], v[5], v[6]};
    const double *xbc = v[2] + (int64_t)row * delta_conv_width(s);
    const double *b = xbc + delta_value_width(s) + h / (s->n_heads / s->n_key_heads) * s->key_dim;
    for (int c = 0; c < s->key_dim; c++) key[c] = b[c];
    return scan_row(s, h, S, y, u, xbc, head.steps + (int64_t)row * (s->n_heads + GAP), &head);
}

static void paged_scan_reference(struct op_test *t, double **v)
{
    const struct delta_shape s = scan_shape(t);
    paged_reference(t, v, &s, paged_scan_row);
}

OP(paged_scan, "delta_rule, scan");

// ---- gates --------------------------------------------------------------------------------------
// p: rows width gap kind
static struct act_shape gate_of(const struct op_test *t, const void *x)
{
    return (struct act_shape){.rows = t->p[0],
                              .width = t->p[1],
                              .kind = (enum act_kind)t->p[3],
                              .gated = true,
                              .dt = dt,
                              .up = x,
                              .gate_stride = t->p[1] + t->p[2],
                              .up_stride = t->p[1] + t->p[4]};
}

static void gate_setup(struct op_test *t)
{
    floats(t, "y", OUT, DATA, (int64_t)t->p[0] * t->p[1], 1);
    floats(t, "x", IN, DATA, (int64_t)t->p[0] * (t->p[1] + t->p[4]), 1);
    floats(t, "g", IN, DATA, (int64_t)t->p[0] * (t->p[1] + t->p[2]), 2);
}

static void gate_launch(struct op_test *t, void **d)
{
    const struct act_shape shape = gate_of(t, d[1]);
    ops->act(dev, d[0], d[2], &shape);
}

static void gate_formula(const struct op_test *t, double *y, const double *x, const double *g)
{
    for (int i = 0; i < t->p[0] * t->p[1]; i++) {
        const double at = g[i / t->p[1] * (t->p[1] + t->p[2]) + i % t->p[1]];
        const double open = t->p[3] == ACT_LINEAR ? at
                            : t->p[3] == ACT_SILU ? at * sigmoid_of(at)
                                                  : sigmoid_of(at);
        y[i] = x[i / t->p[1] * (t->p[1] + t->p[4]) + i % t->p[1]] * open;
    }
}

static void gate_reference(struct op_test *t, double **v)
{
    gate_formula(t, t->a[0].expect, v[1], v[2]);
}

OP(gate, "act, gate and up apart");

enum { GB_DX, GB_DG, GB_DY, GB_X, GB_G }; // dx is written over dy

static void gate_back_setup(struct op_test *t)
{
    floats(t, "dx", INOUT, DATA, (int64_t)t->p[0] * t->p[1], 1);
    floats(t, "dg", OUT, DATA, (int64_t)t->p[0] * (t->p[1] + t->p[2]), 1);
    floats(t, "unused", IN, DATA, 1, 1);
    floats(t, "x", IN, DATA, (int64_t)t->p[0] * t->p[1], 1);
    floats(t, "g", IN, DATA, (int64_t)t->p[0] * (t->p[1] + t->p[2]), 2);
}

static void gate_back_launch(struct op_test *t, void **d)
{
    const struct act_shape shape = gate_of(t, d[GB_X]);
    ops->act_back(dev, d[GB_DG], d[GB_DX], NULL, d[GB_DX], d[GB_G], &shape);
}

static double gate_loss(struct op_test *t, double **v)
{
    double *y = op_host((size_t)t->a[GB_X].n * sizeof *y);
    gate_formula(t, y, v[GB_X], v[GB_G]);
    return dot(v[GB_DX], y, t->a[GB_X].n);
}

static void gate_back_reference(struct op_test *t, double **v)
{
    differentiate(t, v, GB_DX, GB_X, false, gate_loss);
    differentiate(t, v, GB_DG, GB_G, false, gate_loss);
    for (int64_t i = 0; i < t->a[GB_DG].n; i++)
        if (i % (t->p[1] + t->p[2]) >= t->p[1]) t->a[GB_DG].expect[i] = NAN;
}

OP(gate_back, "act_back, gate and up apart");

// p: rows n_heads n_kv_heads head_dim join
static void split_setup(struct op_test *t)
{
    const int64_t q = (int64_t)t->p[0] * t->p[1] * t->p[3],
                  kv = (int64_t)t->p[0] * 2 * t->p[2] * t->p[3];
    floats(t, "qkv", t->p[4] ? IN : OUT, DATA, q + kv, 1);
    floats(t, "gate", t->p[4] ? IN : OUT, DATA, q, 1);
    floats(t, "fused", t->p[4] ? OUT : IN, DATA, 2 * q + kv, 1);
}

static void split_launch(struct op_test *t, void **d)
{
    const struct attn_shape shape = {
        .n_heads = t->p[1], .n_kv_heads = t->p[2], .head_dim = t->p[3], .dt = dt};
    ops->split_gate(dev, d[0], d[1], d[2], t->p[0], &shape, t->p[4]);
}

static void split_reference(struct op_test *t, double **v)
{
    const int *p = t->p, q = p[1] * p[3], kv = 2 * p[2] * p[3];
    for (int r = 0; r < p[0]; r++)
        for (int c = 0; c < 2 * q + kv; c++) {
            const int head = c / p[3], in = c % p[3], both = r * (2 * q + kv) + c;
            const bool is_gate = c < 2 * q && head % 2;
            const int at = is_gate ? r * q + head / 2 * p[3] + in
                                   : r * (q + kv) + (c < 2 * q ? head / 2 * p[3] + in : c - q);
            if (p[4])
                t->a[2].expect[both] = v[is_gate][at];
            else
                t->a[is_gate].expect[at] = v[2][both];
        }
}

OP(split, "split_gate");

static const struct op_case cases[] = {
    {&op_rule, "2/4 heads of 8 x 12, prefix", {5, 2, 4, 2, 4, 8, 12, 3}, false},
    {&op_rule, "1/3 heads of 40 x 33", {9, 1, 1, 1, 3, 40, 33, 4}, false},
    {&op_rule, "2/2 heads of 128 x 128, prefix", {11, 3, 6, 2, 2, 128, 128, 4}, false},
    {&op_rule, "16/32 heads of 128 x 128", {100, 3, 70, 16, 32, 128, 128, 4}, true},
    {&op_rule_back, "2/4 heads of 8 x 12, prefix", {5, 2, 4, 2, 4, 8, 12, 3}, false},
    {&op_rule_back, "1/3 heads of 40 x 33", {9, 1, 1, 1, 3, 40, 33, 4}, false},
    {&op_rule_back, "1/1 heads of 70 x 20, several chunks", {70, 1, 67, 1, 1, 70, 20, 4}, false},
    {&op_rule_back, "4/8 heads of 128 x 128, prefix", {150, 3, 70, 4, 8, 128, 128, 4}, true},
    {&op_paged_rule, "paged, 2/4 heads of 8 x 12", {0, 0, 5, 2, 4, 8, 12, 3}, false},
    {&op_paged_rule, "paged, 2/2 heads of 128 x 100", {0, 0, 17, 2, 2, 128, 100, 4}, false},
    {&op_scan, "2/4 heads of 8 x 12, prefix", {5, 2, 4, 2, 4, 8, 12, 3}, false},
    {&op_scan, "1/3 heads of 70 x 33", {9, 1, 1, 1, 3, 70, 33, 4}, false},
    {&op_scan, "8/64 heads of 128 x 64", {100, 3, 70, 8, 64, 128, 64, 4}, true},
    {&op_scan_back, "2/4 heads of 8 x 12, prefix", {5, 2, 4, 2, 4, 8, 12, 3}, false},
    {&op_scan_back, "1/3 heads of 40 x 33", {9, 1, 1, 1, 3, 40, 33, 4}, false},
    {&op_scan_back, "1/1 heads of 20 x 70, many rows", {70, 1, 67, 1, 1, 20, 70, 4}, false},
    {&op_scan_back, "4/16 heads of 128 x 64, prefix", {150, 3, 70, 4, 16, 128, 64, 4}, true},
    {&op_paged_scan, "paged, 2/4 heads of 8 x 12", {0, 0, 5, 2, 4, 8, 12, 3}, false},
    {&op_paged_scan, "paged, 2/2 heads of 128 x 100", {0, 0, 17, 2, 2, 128, 100, 4}, false},
    {&op_conv, "52 channels, 3 taps, prefix, bias", {5, 2, 4, 2, 4, 3, 10, 3, 1}, false},
    {&op_conv_back, "28 channels, 4 taps, bias", {2, 3, 1, 1, 2, 4, 10, 4, 1}, false},
    {&op_paged_conv, "paged, 52 channels, 3 taps, bias", {0, 0, 5, 2, 4, 3, 10, 3, 1}, false},
    {&op_conv, "52 channels, 3 taps, prefix", {5, 2, 4, 2, 4, 3, 10, 3}, false},
    {&op_conv, "300 channels, 4 taps, short rows", {2, 3, 1, 1, 2, 50, 100, 4}, false},
    {&op_conv, "40 channels alone, 3 taps, prefix", {5, 2, 4, 0, 4, 3, 10, 3}, false},
    {&op_conv_back, "40 channels alone, 3 taps", {5, 2, 4, 0, 4, 3, 10, 3}, false},
    {&op_paged_conv, "paged, 40 channels alone, 3 taps", {0, 0, 5, 0, 4, 3, 10, 3}, false},
    {&op_conv_back, "52 channels, 3 taps, prefix", {5, 2, 4, 2, 4, 3, 10, 3}, false},
    {&op_conv_back, "28 channels, 4 taps, short rows", {2, 3, 1, 1, 2, 4, 10, 4}, false},
    {&op_conv_back, "8192 channels, 4 taps", {150, 3, 70, 16, 32, 128, 128, 4}, true},
    {&op_paged_conv, "paged, 52 channels, 3 taps", {0, 0, 5, 2, 4, 3, 10, 3}, false},
    {&op_paged_conv, "paged, 300 channels, 8 taps", {0, 0, 3, 1, 2, 50, 100, 8}, false},
    {&op_gate, "sigmoid 7 x 100", {7, 100, 0, ACT_SIGMOID}, false},
    {&op_gate, "silu 9 x 64, apart", {9, 64, 30, ACT_SILU}, false},
    {&op_gate, "linear 9 x 64, all apart", {9, 64, 30, ACT_LINEAR, 5}, false},
    {&op_gate_back, "linear 6 x 33, apart", {6, 33, 7, ACT_LINEAR}, false},
    {&op_gate_back, "sigmoid 5 x 40", {5, 40, 0, ACT_SIGMOID}, false},
    {&op_gate_back, "silu 6 x 33, apart", {6, 33, 7, ACT_SILU}, false},
    {&op_split, "split 4/2 heads of 6", {5, 4, 2, 6, 0}, false},
    {&op_split, "join 4/1 heads of 16", {3, 4, 1, 16, 1}, false},
    {&op_paged_rule, "paged, 1/2 heads of 40 x 33, chunks", {0, 0, 150, 1, 2, 40, 33, 4}, false},
    {&op_rule_back, "1/2 heads of 16 x 8, a prefix of a chunk", {64, 2, 3, 1, 2, 16, 8, 4}, false},
    {&op_rule_back, "1/1 heads of 16 x 8, chunks behind", {3, 2, 130, 1, 1, 16, 8, 4}, false},
    {&op_paged_scan, "paged, 1/2 heads of 40 x 33, chunks", {0, 0, 150, 1, 2, 40, 33, 4}, false},
    {&op_scan_back, "1/2 heads of 16 x 8, a prefix of a chunk", {64, 2, 3, 1, 2, 16, 8, 4}, false},
    {&op_scan_back, "1/1 heads of 16 x 8, chunks behind", {3, 2, 130, 1, 1, 16, 8, 4}, false},
};

OP_TESTS(cases)
