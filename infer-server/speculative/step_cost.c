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
#include "common/model/batch.h"
#include "common/model/model.h"
#include "infer-server/engine/sampler.h"
#include <stdlib.h>

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
    return c->model ? model_decode_padding(c->model, rows) : rows;
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

struct measured { // what a measurement runs on
    struct model *model;
    struct batch *batch;
    struct sampler *sampler;
    const struct kv_view *kv;
    struct sampler_row *draws;      // (most_rows)
    const struct top_logprob **top; // (most_rows)
    int32_t *blocks;                // of one sequence
};

// One step of `rows` sequences, each with its own blocks as far as there are such.
static enum status run(const struct measured *m, int rows, int context, bool *ret_settled)
{
    const int block = m->kv->block_size, n_blocks = (context + block - 1) / block;
    const int32_t token = 0;
    const struct sample_result *results;
    enum status st = ST_OK;
    batch_clear(m->batch);
    for (int i = 0; i < rows; i++) {
        for (int k = 0; k < n_blocks; k++)
            m->blocks[k] = (int32_t)(((int64_t)i * n_blocks + k) % m->kv->n_blocks);
        CHECK(batch_add_paged(m->batch, &token, 1, context - 1, m->blocks, n_blocks, block));
        CHECK(batch_want_row(m->batch, i));
    }
    CHECK(batch_commit(m->batch, model_decode_padding(m->model, rows)));
    const bool settled = model_step(m->model, m->batch, m->kv);
    CHECK(sampler_draw(m->sampler, m->model->logits, m->draws, rows, NULL, &results, m->top));
    *ret_settled = settled;
out:
    return st;
}

static enum status time_of(const struct measured *m, int rows, int context, double *ret_ms)
{
    double best = 0;
    for (int timed = 0, runs = 0; timed < MEASURE_RUNS; runs++) {
        const int64_t start_ns = clock_now_ns();
        bool settled;
        enum status st = run(m, rows, context, &settled);
        if (st != ST_OK) return st;
        const double ms = clock_ms_since(start_ns);
        // The first run of all finds cold caches; shapes that cannot be captured never settle.
        if (runs == 0 || (!settled && runs < MEASURE_RUNS)) continue;
        if (timed++ == 0 || ms < best) best = ms;
    }
    *ret_ms = best;
    return ST_OK;
}

static enum status fill(const struct measured *m, int most_rows, int longest, struct step_cost *c)
{
    const int64_t start_ns = clock_now_ns();
    const int context = longest < SHORT_CONTEXT ? longest : SHORT_CONTEXT;
    enum status st = ST_OK;
    double ms = 0;
    int rows = 0;
    c->level = 1;
    while (rows < most_rows && clock_ms_since(start_ns) < MEASURE_MS) {
        rows = model_decode_padding(m->model, rows + 1 + rows / 8);
        if (rows > most_rows) rows = most_rows;
        CHECK(time_of(m, rows, context, &ms));
        const int b = bucket_of(rows);
        c->rows[b] = rows;
        c->ms[b] = ms;
        c->n[b] = FIRST;
        hold_below(c, b);
    }
    if (longest <= context) return ST_OK;
    double longer_ms;
    CHECK(time_of(m, rows, longest, &longer_ms));
    if (longer_ms > ms) c->token_ms = (longer_ms - ms) / ((double)rows * (longest - context));
    for (int b = 0; b < STEP_COST_BUCKETS; b++) {
        const double own = c->ms[b] - c->token_ms * c->rows[b] * context;
        c->ms[b] = own > c->ms[b] / 2 ? own : c->ms[b] / 2;
    }
out:
    return st;
}

enum status step_cost_measure(struct model *model, struct batch *batch, struct sampler *sampler,
                              const struct kv_view *kv, int most_rows, struct step_cost *ret)
{
    static const struct sampling sampling = {
        .n = 1, .max_tokens = 1, .temperature = 1, .top_p = 1, .logprobs = -1};
    const int longest = model->max_context < LONG_CONTEXT ? model->max_context : LONG_CONTEXT;
    struct step_cost cost = {.model = model};
    struct measured m = {.model = model, .batch = batch, .sampler = sampler, .kv = kv};
    enum status st = ST_OK;
    m.draws = malloc((size_t)most_rows * sizeof *m.draws);
    m.top = malloc((size_t)most_rows * sizeof(struct top_logprob *));
    m.blocks = malloc((size_t)LONG_CONTEXT * sizeof *m.blocks);
    if (!m.draws || !m.top || !m.blocks) {
        st = status_fail(ST_NO_MEMORY, "no memory to measure steps of %d rows", most_rows);
        goto out;
    }
    for (int i = 0; i < most_rows; i++)
        m.draws[i] = (struct sampler_row){.sampling = &sampling,
                                          .stream = (uint64_t)i,
                                          .position = SHORT_CONTEXT,
                                          .draft = SAMPLER_NO_DRAFT};
    CHECK(fill(&m, most_rows, longest, &cost));
    *ret = cost;
out:
    free(m.draws);
    free(m.top);
    free(m.blocks);
    return st;
}
