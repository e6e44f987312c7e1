/* step_timing.c: see step_timing.h. Steps run as the executor's do, sampling included, since what
 * is sought is the time until the tokens are here. */
#include "infer-server/engine/step_timing.h"
#include "common/base/clock.h"
#include "common/model/batch.h"
#include "common/model/model.h"
#include "infer-server/engine/sampler.h"
#include "infer-server/speculative/step_cost.h"
#include <stdlib.h>

#define MEASURE_MS    1000.0 // no larger size once this has gone by: the server is to start soon
#define MEASURE_RUNS  3      // the shortest counts, as others on the machine only ever add
#define SHORT_CONTEXT 16     // a block: next to no attention in it
#define LONG_CONTEXT  256    // as long as steps captured for short contexts reach

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
static enum status run(const struct measured *m, int rows, int context, bool *ret_warm)
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
    const bool warm = model_step(m->model, m->batch, m->kv);
    CHECK(sampler_draw(m->sampler, m->model->logits, m->draws, rows, NULL, &results, m->top));
    *ret_warm = warm;
out:
    return st;
}

static enum status time_of(const struct measured *m, int rows, int context, double *ret_ms)
{
    double best = 0;
    for (int timed = 0, runs = 0; timed < MEASURE_RUNS; runs++) {
        const int64_t start_ns = clock_now_ns();
        bool warm;
        enum status st = run(m, rows, context, &warm);
        if (st != ST_OK) return st;
        const double ms = clock_ms_since(start_ns);
        // The first run of all finds cold caches; shapes that cannot be captured never settle.
        if (runs == 0 || (!warm && runs < MEASURE_RUNS)) continue;
        if (timed++ == 0 || ms < best) best = ms;
    }
    *ret_ms = best;
    return ST_OK;
}

static enum status fill(const struct measured *m, int most_rows, int longest, struct step_cost *c)
{
    const int64_t start_ns = clock_now_ns();
    const int context = longest < SHORT_CONTEXT ? longest : SHORT_CONTEXT;
    double times[STEP_COST_BUCKETS], longer_ms;
    int sizes[STEP_COST_BUCKETS], n = 0, rows = 0;
    enum status st = ST_OK;
    while (rows < most_rows && n < STEP_COST_BUCKETS && clock_ms_since(start_ns) < MEASURE_MS) {
        rows = model_decode_padding(m->model, rows + 1 + rows / 8);
        if (rows > most_rows) rows = most_rows;
        CHECK(time_of(m, rows, context, &times[n]));
        sizes[n++] = rows;
    }
    if (longest > context) {
        CHECK(time_of(m, rows, longest, &longer_ms));
        const double more_ms = longer_ms - times[n - 1];
        if (more_ms > 0) c->token_ms = more_ms / ((double)rows * (longest - context));
    }
    for (int i = 0; i < n; i++) step_cost_learn(c, sizes[i], (int64_t)sizes[i] * context, times[i]);
out:
    return st;
}

enum status step_timing_measure(struct model *model, struct batch *batch, struct sampler *sampler,
                                const struct kv_view *kv, int most_rows, struct step_cost *ret)
{
    static const struct sampling sampling = {
        .n = 1, .max_tokens = 1, .temperature = 1, .top_p = 1, .logprobs = -1};
    const int longest = model->max_context < LONG_CONTEXT ? model->max_context : LONG_CONTEXT;
    // Where steps are captured, they run at certain sizes alone.
    struct step_cost cost = {.padded = model_decode_padding(model, 3) > 3};
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
