/* step_timing.c: step_timing_measure(), of runner.h: a table of what a runner's steps take, by
 * running some when the server starts. Steps run as the executor's do, sampling included, since
 * what is sought is the time until the tokens are here. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/runner.h"
#include "common/base/clock.h"

#define MEASURE_MS    1000.0 // no larger size once this has gone by: the server is to start soon
#define MEASURE_RUNS  3      // the shortest counts, as others on the machine only ever add
#define SHORT_CONTEXT 16     // a block: next to no attention in it
#define LONG_CONTEXT  208 // of a chunk's rows (DELTA_CHUNK) as many are open as with the short one

// One step of `rows` rows, of a sequence each as far as the engine runs so many, else of as many
// more as drafts are. Sequences have their own blocks and states, as far as there are such.
static enum status run(struct runner *r, int rows, int context, int max_batch)
{
    static const struct sampling sampling = {
        .n = 1, .max_tokens = 1, .temperature = 1, .top_p = 1, .logprobs = -1};
    const int n_blocks = (context + r->limits.block_size - 1) / r->limits.block_size;
    const int32_t token = 0;
    const int each = (rows + max_batch - 1) / max_batch;
    int32_t blocks[LONG_CONTEXT];
    enum status st = ST_OK;
    runner_clear(r);
    for (int i = 0; i < rows; i++) {
        for (int k = 0; k < n_blocks; k++)
            blocks[k] = (int32_t)(((int64_t)(i / each) * n_blocks + k) % r->kv.view.n_blocks);
        const struct sampler_row row = {.sampling = &sampling,
                                        .stream = (uint64_t)i,
                                        .position = SHORT_CONTEXT,
                                        .draft = SAMPLER_NO_DRAFT};
        const int state = r->kv.n_states > 0 ? i / each % r->kv.n_states : -1;
        const int back = each - i % each < context ? each - i % each : context;
        CHECK(runner_feed(r, &token, 1, context - back, blocks, n_blocks,
                          (struct batch_seq){-1, state, state}));
        CHECK(runner_want(r, i, &row));
    }
    CHECK(runner_step(r));
    CHECK(runner_sample(r));
    CHECK(runner_collect(r));
out:
    return st;
}

static enum status time_of(struct runner *r, int rows, int context, int max_batch, double *ret_ms)
{
    double best = 0;
    for (int timed = 0, runs = 0; timed < MEASURE_RUNS; runs++) {
        const int64_t start_ns = clock_now_ns();
        enum status st = run(r, rows, context, max_batch);
        if (st != ST_OK) return st;
        const double ms = clock_ms_since(start_ns);
        // The first run of all finds cold caches; shapes that cannot be captured never get warm.
        if (runs == 0 || (!r->warm && runs < MEASURE_RUNS)) continue;
        if (timed++ == 0 || ms < best) best = ms;
    }
    *ret_ms = best;
    return ST_OK;
}

enum status step_timing_measure(struct runner *r, int max_batch, struct step_cost *ret)
{
    const int64_t start_ns = clock_now_ns();
    const int max_context = r->limits.max_context, most_rows = r->limits.max_rows;
    const int longest = max_context < LONG_CONTEXT ? max_context : LONG_CONTEXT;
    const int context = longest < SHORT_CONTEXT ? longest : SHORT_CONTEXT;
    // Where steps are captured, they run at certain sizes alone.
    struct step_cost cost = {.padded = runner_padded_rows(r, 3) > 3};
    double times[STEP_COST_BUCKETS], longer_ms;
    int sizes[STEP_COST_BUCKETS], n = 0, rows = 0;
    enum status st = ST_OK;
    while (rows < most_rows && n < STEP_COST_BUCKETS && clock_ms_since(start_ns) < MEASURE_MS) {
        rows = runner_padded_rows(r, rows + 1 + rows / 8);
        if (rows > most_rows) rows = most_rows;
        CHECK(time_of(r, rows, context, max_batch, &times[n]));
        sizes[n++] = rows;
    }
    if (longest > context) {
        CHECK(time_of(r, rows, longest, max_batch, &longer_ms));
        const double more_ms = longer_ms - times[n - 1];
        if (more_ms > 0) cost.token_ms = more_ms / ((double)rows * (longest - context));
    }
    for (int i = 0; i < n; i++)
        step_cost_learn(&cost, sizes[i], (int64_t)sizes[i] * context, times[i]);
    *ret = cost;
out:
    return st;
}
