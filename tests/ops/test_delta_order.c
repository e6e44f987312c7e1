/* test_delta_order.c: a row of linear attention by either rule (ops.h, delta_shape) has the same
 * bits whatever it is computed with: in a packed batch, behind a shared prefix, in a prompt's
 * chunks of any length, decoded alone or beside these, or as a draft, on both sides of a chunk's
 * border. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_table.h"

enum { ROWS = 200, SLOTS = 6, MAX_SEQS = 6 };

static const struct delta_shape shapes[] = {
    {.n_key_heads = 1, .n_heads = 2, .key_dim = 40, .head_dim = 33, .taps = 2},
    {.n_key_heads = 2, .n_heads = 4, .key_dim = 128, .head_dim = 128, .taps = 4},
    {.n_key_heads = 1, .n_heads = 3, .key_dim = 40, .head_dim = 33, .taps = 2, .is_scan = true},
    {.n_key_heads = 2, .n_heads = 8, .key_dim = 128, .head_dim = 64, .taps = 4, .is_scan = true},
    {.n_key_heads = 1, .n_heads = 2, .key_dim = 128, .head_dim = 80, .taps = 4, .is_scan = true},
};

// One context: its rows, what they give, and slots for its states.
struct scene {
    struct delta_shape shape;
    char *qkv, *gates, *out; // rows on the device
    void *a_log, *dt_bias, *skip;
    size_t qkv_bytes, gates_bytes, out_bytes; // of a row
    struct kv_view kv;
    struct kv_layer layer;
    char *expected; // (ROWS, out_bytes)
};

static struct delta_args args_of(const struct scene *s, int first, struct delta_batch batch)
{
    return (struct delta_args){s->qkv + (size_t)first * s->qkv_bytes,
                               s->gates + (size_t)first * s->gates_bytes,
                               s->a_log,
                               s->dt_bias,
                               batch,
                               2 * s->shape.n_heads,
                               s->skip};
}

// The first n rows of out are rows of the context from `first` on.
static void compare(const struct scene *s, const char *what, int first, int n)
{
    char *got = op_host((size_t)n * s->out_bytes);
    from_device(got, s->out, (size_t)n * s->out_bytes);
    for (int i = 0; i < n; i++)
        if (memcmp(got + (size_t)i * s->out_bytes, s->expected + (size_t)(first + i) * s->out_bytes,
                   s->out_bytes) != 0)
            fail_msg("%s on %s, %s: row %d differs", what, device_spec(dev), dtype_name(dt),
                     first + i);
}

static const int32_t *list(const int32_t *host, int n)
{
    return to_device(host, (size_t)n * sizeof *host);
}

// ---- packed -------------------------------------------------------------------------------------
// Sequences of rows[0], rows[1] ... up to a 0, the others behind the first, which are rows of the
// context one after the other: only what stands behind the first's is as in the context.
static void run_packed(const struct scene *s, const int *rows)
{
    int32_t start[MAX_SEQS + 1] = {0}, parent[MAX_SEQS], first[MAX_SEQS], end[MAX_SEQS];
    int n = 0;
    for (; n < MAX_SEQS && rows[n] > 0; n++) {
        start[n + 1] = start[n] + rows[n];
        parent[n] = n ? 0 : -1;
        first[n] = n ? rows[0] : 0;
        end[n] = start[n + 1];
    }
    end[0] = start[n];
    int32_t *seq = op_host((size_t)start[n] * sizeof *seq);
    for (int i = 0; i < n; i++)
        for (int r = start[i]; r < start[i + 1]; r++) seq[r] = i;
    const struct batch_view view = {.n_tokens = start[n],
                                    .n_seqs = n,
                                    .max_context = start[n],
                                    .packed = true,
                                    .query_start = list(start, n + 1),
                                    .seq_of = list(seq, start[n]),
                                    .parent = list(parent, n),
                                    .first_position = list(first, n),
                                    .attend_end = list(end, n)};
    const struct delta_args args = args_of(s, 0, (struct delta_batch){.view = &view});
    ops->delta_rule(dev, s->out, &args, &s->shape);
    sync_or_fail();
}

// ---- paged --------------------------------------------------------------------------------------
struct run {
    int n, from, slot; // rows, and where their state lies before and behind
};

// Runs of the context's rows from `first` on, one behind the other.
static void run_paged(const struct scene *s, const char *what, int first, const struct run *runs,
                      int n)
{
    const size_t mark = op_mark();
    int32_t start[MAX_SEQS + 1] = {0}, from[MAX_SEQS], slot[MAX_SEQS], seq[ROWS], positions[ROWS];
    int longest = 0;
    for (int i = 0; i < n; i++) {
        start[i + 1] = start[i] + runs[i].n;
        from[i] = runs[i].from;
        slot[i] = runs[i].slot;
        longest = runs[i].n > longest ? runs[i].n : longest;
        for (int r = start[i]; r < start[i + 1]; r++) {
            seq[r] = i;
            positions[r] = first + r;
        }
    }
    const struct batch_view view = {.n_tokens = start[n],
                                    .n_seqs = n,
                                    .max_query = longest,
                                    .max_context = first + start[n],
                                    .query_start = list(start, n + 1),
                                    .seq_of = list(seq, start[n]),
                                    .positions = list(positions, start[n]),
                                    .state_from = list(from, n),
                                    .state_slot = list(slot, n)};
    const struct delta_args args = args_of(s, first, (struct delta_batch){&view, &s->kv, 0});
    ops->delta_rule(dev, s->out, &args, &s->shape);
    sync_or_fail();
    compare(s, what, first, start[n]);
    op_release(mark);
}

// A prompt of `prompt` rows, and then `each` rows at a time, all in one slot.
static void check_chunks(const struct scene *s, const char *what, int prompt, int each)
{
    run_paged(s, what, 0, &(struct run){prompt, 1, 1}, 1);
    for (int first = prompt; first < ROWS; first += each)
        run_paged(s, what, first, &(struct run){ROWS - first < each ? ROWS - first : each, 1, 1},
                  1);
}

// A row and two drafts behind it, which leave their states in slots of their own; the first draft
// is accepted, so what comes next goes on from its state.
static void check_drafts(const struct scene *s)
{
    int home = 0;
    run_paged(s, "a prompt", 0, &(struct run){59, home, home}, 1);
    for (int first = 59; first + 3 <= ROWS; first += 2) {
        const int accepted = (home + 1) % 3, rejected = (home + 2) % 3;
        run_paged(
            s, "drafts", first,
            (const struct run[]){{1, home, home}, {1, home, accepted}, {1, accepted, rejected}}, 3);
        home = accepted;
    }
}

// A row and five drafts behind it in one slot, over borders of tiles and chunks. Three rows are
// kept where no chunk was closed, and all six where one was: they cannot be taken back.
static void check_taken_back(const struct scene *s)
{
    enum { RUNS = 6, KEPT = 3 };
    static const struct run runs[RUNS] = {{1, 1, 1}, {1, 1, 1}, {1, 1, 1},
                                          {1, 1, 1}, {1, 1, 1}, {1, 1, 1}};
    run_paged(s, "a prompt", 0, &(struct run){49, 1, 1}, 1);
    for (int first = 49; first + RUNS <= ROWS;) {
        run_paged(s, "drafts in one slot", first, runs, RUNS);
        first += first % DELTA_CHUNK + RUNS < DELTA_CHUNK ? KEPT : RUNS;
    }
}

// Rows that decode in a batch with pieces of prompts, in states of their own and in one with them.
static void check_mixed(const struct scene *s)
{
    run_paged(s, "a prompt", 0, &(struct run){60, 1, 1}, 1);
    run_paged(s, "a prompt", 0, &(struct run){61, 2, 2}, 1);
    run_paged(s, "a row beside several", 60, (const struct run[]){{1, 1, 1}, {20, 2, 2}}, 2);
    run_paged(s, "a prompt", 0, &(struct run){101, 4, 4}, 1);
    run_paged(s, "several beside a row", 81, (const struct run[]){{20, 2, 2}, {1, 4, 4}}, 2);
    run_paged(s, "several behind a row", 101,
              (const struct run[]){{1, 2, 3}, {30, 3, 5}, {3, 5, 5}}, 3);
    run_paged(s, "a row behind several", 135, (const struct run[]){{60, 5, 0}, {1, 0, 1}}, 2);
}

static void check_shape(const struct delta_shape *shape)
{
    struct scene s = {.shape = *shape, .layer = {.state = 3}};
    s.shape.dt = dt;
    const size_t width = (size_t)delta_conv_width(shape), heads = (size_t)shape->n_heads;
    const int64_t slot = delta_state_elements(shape) + 3;
    s.qkv_bytes = width * dtype_size(dt);
    s.out_bytes = (size_t)delta_value_width(shape) * dtype_size(dt);
    s.qkv = normal_on_device(dt, ROWS * width, 1, 1);
    const enum dtype gates_dt = shape->is_scan ? dt : DT_F32;
    s.gates_bytes = 2 * heads * dtype_size(gates_dt); // Mamba-2's steps are half of a row
    s.gates = normal_on_device(gates_dt, ROWS * 2 * heads, 1.5f, 2);
    s.a_log = normal_on_device(dt, heads, 0.5f, 3);
    s.dt_bias = normal_on_device(dt, heads, 1, 4);
    s.skip = normal_on_device(dt, heads, 1, 5);
    s.out = to_device(NULL, ROWS * s.out_bytes);
    s.kv = (struct kv_view){.layers = &s.layer,
                            .states = to_device(NULL, SLOTS * (size_t)slot * sizeof(float)),
                            .slot_elements = slot};
    s.expected = op_host(ROWS * s.out_bytes);
    run_packed(&s, (const int[]){ROWS, 0});
    from_device(s.expected, s.out, ROWS * s.out_bytes);
    run_packed(&s, (const int[]){70, 80, 50, 0}); // the third goes on behind the first too
    compare(&s, "behind a prefix", 0, 150);
    run_packed(&s, (const int[]){64, 136, 0});
    compare(&s, "behind a prefix of a chunk", 0, ROWS);
    check_chunks(&s, "one prompt", ROWS, 1);
    check_chunks(&s, "chunks of 7", 7, 7);
    check_chunks(&s, "chunks of 100", 100, 100);
    check_chunks(&s, "decode", 50, 1);
    check_drafts(&s);
    check_taken_back(&s);
    check_mixed(&s);
}

static void each_shape(void)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const size_t mark = op_mark();
        check_shape(&shapes[i]);
        op_release(mark);
    }
}

TEST(on_each_device)
{
    op_on_each(NULL, each_shape, true);
}

OP_BODIES
