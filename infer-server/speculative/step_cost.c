/* step_cost.c: a table of moving averages over sizes that grow by an eighth, and how it is first
 * filled.
 *
 * A step's time changes with the machine's load by more than drafts gain, and sizes are not all run
 * at the same moment. Such changes move all sizes alike, so the table is kept in units of a level
 * that follows every step quickly, while the table moves slowly: it only says how sizes differ.
 *
 * On a busy machine some steps take several times what they should. So every measurement moves an
 * average by a bounded share, up as well as down, which makes it near a median; the first few of a
 * size count by the least of them. And no size is taken to need longer than a larger one: what was
 * once overrated would else never be tried again. */
#include "infer-server/speculative/step_cost.h"
#include "common/base/clock.h"
#include "infer-server/engine/runner.h"

#define WEIGHT       0.02
#define WEIGHT_LEVEL 0.1
#define MOST_OFF     0.2 // of what was expected, that a measurement counts as away from it
#define FIRST        3   // measurements

#define MEASURE_MS    1000.0 // no larger size once this has gone by
#define MEASURE_RUNS  3      // the shortest counts
#define SHORT_CONTEXT 16
#define LONG_CONTEXT  256

// ---- the table ---------------------------------------------------------------------------------

// Sizes 1..16 have a bucket each; above, eight buckets to a doubling.
static int bucket_of(int rows)
{
    if (rows <= 16) return rows < 1 ? 0 : rows - 1;
    int doubling = 0;
    while ((rows >> doubling) >= 32) doubling++;
    int b = 16 + doubling * 8 + ((rows >> doubling) - 16) / 2;
    return b < STEP_COST_BUCKETS ? b : STEP_COST_BUCKETS - 1;
}

static int size_of(const struct step_cost *c, int rows)
{
    return c->runner ? runner_padded_rows(c->runner, rows) : rows;
}

static double follow(double old, double measured, double weight)
{
    double off = measured / old - 1;
    if (off > MOST_OFF) off = MOST_OFF;
    if (off < -MOST_OFF) off = -MOST_OFF;
    return old * (1 + weight * off);
}

// Smaller sizes take no longer.
static void hold_below(struct step_cost *c, int b)
{
    for (int i = b - 1; i >= 0; i--)
        if (c->ms[i] > c->ms[b]) c->ms[i] = c->ms[b];
}

void step_cost_learn(struct step_cost *c, int rows, int64_t attended, double ms)
{
    const int size = size_of(c, rows), b = bucket_of(size);
    if (c->level <= 0) c->level = 1;
    const double attention = c->token_ms * (double)attended, floor = 0.1 * ms / c->level;
    double own = ms / c->level - attention;
    if (own < floor) own = floor;
    c->rows[b] += (c->n[b] == 0 ? 1 : WEIGHT) * (size - c->rows[b]);
    if (c->n[b] < FIRST) {
        if (++c->n[b] == 1 || own < c->ms[b]) c->ms[b] = own;
    } else {
        c->level = follow(c->level, ms / (c->ms[b] + attention), WEIGHT_LEVEL);
        c->ms[b] = follow(c->ms[b], own, WEIGHT);
    }
    hold_below(c, b);
}

double step_cost_ms(const struct step_cost *c, int rows, int64_t attended)
{
    const int size = size_of(c, rows), b = bucket_of(size);
    int below = b, above = b;
    while (above < STEP_COST_BUCKETS && c->rows[above] < size) above++;
    while (below >= 0 && (c->rows[below] <= 0 || c->rows[below] > size)) below--;
    if (above == STEP_COST_BUCKETS) above = below;
    if (below < 0) below = above;
    if (below < 0) return 0;
    double own = c->ms[above];
    if (c->rows[above] > c->rows[below])
        own = c->ms[below] + (c->ms[above] - c->ms[below]) * (size - c->rows[below]) /
                                 (c->rows[above] - c->rows[below]);
    return c->level * (own + c->token_ms * (double)attended);
}

int step_cost_reach(const struct step_cost *c)
{
    for (int b = STEP_COST_BUCKETS - 1; b >= 0; b--)
        if (c->rows[b] > 0) return (int)c->rows[b];
    return 0;
}

// ---- measuring ---------------------------------------------------------------------------------

// One step of `rows` sequences, each with its own blocks as far as there are such.
static enum status run(struct runner *r, int rows, int context)
{
    static const struct sampling sampling = {
        .n = 1, .max_tokens = 1, .temperature = 1, .top_p = 1, .logprobs = -1};
    const int n_blocks = (context + r->limits.block_size - 1) / r->limits.block_size;
    const int32_t token = 0;
    int32_t blocks[LONG_CONTEXT];
    enum status st = ST_OK;
    runner_clear(r);
    for (int i = 0; i < rows; i++) {
        for (int k = 0; k < n_blocks; k++)
            blocks[k] = (int32_t)(((int64_t)i * n_blocks + k) % r->kv.view.n_blocks);
        const struct sampler_row row = {.sampling = &sampling,
                                        .stream = (uint64_t)i,
                                        .position = SHORT_CONTEXT,
                                        .draft = SAMPLER_NO_DRAFT};
        CHECK(runner_feed(r, &token, 1, context - 1, blocks, n_blocks));
        CHECK(runner_want(r, i, &row));
    }
    CHECK(runner_step(r));
    CHECK(runner_sample(r, NULL));
out:
    return st;
}

static enum status time_of(struct runner *r, int rows, int context, double *ret_ms)
{
    double best = 0;
    for (int timed = 0, runs = 0; timed < MEASURE_RUNS; runs++) {
        const int64_t start_ns = clock_now_ns();
        enum status st = run(r, rows, context);
        if (st != ST_OK) return st;
        const double ms = clock_ms_since(start_ns);
        // The first run of all finds cold caches; shapes that cannot be captured never get warm.
        if (runs == 0 || (!r->warm && runs < MEASURE_RUNS)) continue;
        if (timed++ == 0 || ms < best) best = ms;
    }
    *ret_ms = best;
    return ST_OK;
}

enum status step_cost_measure(struct runner *r, int most_rows, struct step_cost *ret)
{
    const int64_t start_ns = clock_now_ns();
    const int max_context = r->limits.max_context;
    const int longest = max_context < LONG_CONTEXT ? max_context : LONG_CONTEXT;
    const int context = longest < SHORT_CONTEXT ? longest : SHORT_CONTEXT;
    struct step_cost cost = {.runner = r, .level = 1}, *c = &cost;
    enum status st = ST_OK;
    double ms = 0, longer_ms;
    int rows = 0;
    while (rows < most_rows && clock_ms_since(start_ns) < MEASURE_MS) {
        rows = runner_padded_rows(r, rows + 1 + rows / 8);
        if (rows > most_rows) rows = most_rows;
        CHECK(time_of(r, rows, context, &ms));
        const int b = bucket_of(rows);
        c->rows[b] = rows;
        c->ms[b] = ms;
        c->n[b] = FIRST;
        hold_below(c, b);
    }
    *ret = cost;
    if (longest <= context) return ST_OK;
    CHECK(time_of(r, rows, longest, &longer_ms));
    if (longer_ms > ms) c->token_ms = (longer_ms - ms) / ((double)rows * (longest - context));
    for (int b = 0; b < STEP_COST_BUCKETS; b++) {
        const double own = c->ms[b] - c->token_ms * c->rows[b] * context;
        c->ms[b] = own > c->ms[b] / 2 ? own : c->ms[b] / 2;
    }
    *ret = cost;
out:
    return st;
}
