/* logprobs.c: see logprobs.h. The engine's thread.
 *
 * Row p of a prompt says how likely token p + 1 is; the last row is sampled from and has nothing to
 * say of the prompt. A request's rows are read from the front, each once (request.n_scored): what a
 * preempted sample computes again, or a sibling, is passed over, and no sample starts from cached
 * blocks whose rows were not read (scheduler.c). Each row notes the version that computed it. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/logprobs.h"
#include "infer-server/engine/runner.h"
#include <assert.h>
#include <stdlib.h>

void logprob_reader_release(struct logprob_reader *r)
{
    if (!r->dev) return;
    device_release(r->dev, r->targets);
    device_release(r->dev, r->entries);
    device_host_release(r->dev, r->host_targets);
    device_host_release(r->dev, r->host_entries);
    *r = (struct logprob_reader){.dev = r->dev};
}

// What came back is read before the next call: nothing has to outlive this.
static enum status reserve(struct logprob_reader *r, int n_rows, int n_entries)
{
    enum status st = ST_OK;
    if (n_rows <= r->cap_rows && n_entries <= r->cap_entries) return ST_OK;
    const int rows = n_rows > r->cap_rows ? n_rows : r->cap_rows;
    const int entries = n_entries > r->cap_entries ? n_entries : r->cap_entries;
    const size_t ids = (size_t)rows * sizeof *r->targets;
    const size_t bytes = (size_t)entries * sizeof *r->entries;
    logprob_reader_release(r);
    CHECK(device_alloc(r->dev, ids, (void **)&r->targets));
    CHECK(device_host_alloc(r->dev, ids, (void **)&r->host_targets));
    CHECK(device_alloc(r->dev, bytes, (void **)&r->entries));
    CHECK(device_host_alloc(r->dev, bytes, (void **)&r->host_entries));
    r->cap_rows = rows;
    r->cap_entries = entries;
out:
    return st;
}

enum status logprob_reader_read(struct logprob_reader *r, const struct logprob_rows *rows,
                                const struct token_logprob **ret)
{
    const int n_entries = rows->n * (1 + rows->n_top);
    enum status st = reserve(r, rows->n, n_entries);
    if (st != ST_OK) return st;
    for (int i = 0; i < rows->n; i++) r->host_targets[i] = rows->targets[i];
    device_copy_in(r->dev, r->targets, r->host_targets, (size_t)rows->n * sizeof *r->targets);
    const struct head_args head = {.logits = rows->logits,
                                   .target = r->targets,
                                   .n = rows->n,
                                   .vocab = rows->vocab,
                                   .temperature = rows->temperature > 0 ? rows->temperature : 1};
    device_ops(r->dev)->top_logprobs(r->dev, r->entries, rows->n_top, &head);
    device_copy_out(r->dev, r->host_entries, r->entries, (size_t)n_entries * sizeof *r->entries);
    st = device_sync(r->dev);
    if (st == ST_OK) *ret = r->host_entries;
    return st;
}

// ---- sampled tokens' ---------------------------------------------------------------------------

enum status sampled_logprobs_init(struct sampled_logprobs *s, struct device *dev, int max_rows,
                                  int vocab)
{
    *s = (struct sampled_logprobs){.reader.dev = dev, .vocab = vocab};
    s->top = malloc((size_t)max_rows * SAMPLER_MAX_TOP * sizeof *s->top);
    if (s->top) return ST_OK;
    return status_fail(ST_NO_MEMORY, "no memory for a sampler of %d rows", max_rows);
}

void sampled_logprobs_release(struct sampled_logprobs *s)
{
    logprob_reader_release(&s->reader);
    free(s->top);
}

// Rows from `first` on that one call reads: how many. 0: it is not read.
static int read_alike(const struct sampler_row *rows, int first, int n)
{
    const struct sampler_row *a = &rows[first];
    int end = first;
    if (!sampler_row_is_read(a)) return 0;
    while (end < n && sampler_row_is_read(&rows[end]) && rows[end].n_top == a->n_top &&
           rows[end].sampling->temperature == a->sampling->temperature)
        end++;
    return end - first;
}

enum status sampled_logprobs_launch(struct sampled_logprobs *s, const float *logits,
                                    const struct sampler_row *rows, int n,
                                    const struct sample_result *results)
{
    struct logprob_reader *r = &s->reader;
    int n_entries = 0, at = 0;
    for (int i = 0; i < n; i++) n_entries += sampler_row_is_read(&rows[i]) ? 1 + rows[i].n_top : 0;
    enum status st = n_entries > 0 ? reserve(r, n, n_entries) : ST_OK;
    if (n_entries == 0 || st != ST_OK) return st;
    device_copy_2d(r->dev, r->targets, sizeof *r->targets, &results->token, sizeof *results,
                   sizeof *r->targets, (size_t)n);
    for (int i = 0, m; i<n; i += m> 0 ? m : 1) {
        if ((m = read_alike(rows, i, n)) == 0) continue;
        const float temperature = rows[i].sampling->temperature;
        const struct head_args head = {.logits = logits + (size_t)i * (size_t)s->vocab,
                                       .target = r->targets + i,
                                       .n = m,
                                       .vocab = s->vocab,
                                       .temperature = temperature > 0 ? temperature : 1};
        device_ops(r->dev)->top_logprobs(r->dev, r->entries + at, rows[i].n_top, &head);
        at += m * (1 + rows[i].n_top);
    }
    device_copy_out(r->dev, r->host_entries, r->entries, (size_t)at * sizeof *r->entries);
    return ST_OK;
}

void sampled_logprobs_take(struct sampled_logprobs *s, const struct sampler_row *rows, int n,
                           struct sample_result *results, const struct top_logprob **ret_top)
{
    const struct token_logprob *read = s->reader.host_entries;
    for (int i = 0; i < n; i++) {
        struct top_logprob *top = s->top + (size_t)i * SAMPLER_MAX_TOP;
        const int k = rows[i].n_top;
        ret_top[i] = k > 0 ? top : NULL;
        if (!sampler_row_is_read(&rows[i])) continue;
        // Of an adjusted row the sampler's is that of the adjusted logits, in the trainer's order
        // of sums: it is the processed one where no filter is behind it.
        if (adjustment_is_any(&rows[i].adjustment) && !sampling_cuts(rows[i].sampling))
            results[i].processed_logprob = results[i].logprob;
        results[i].logprob = read[0].logprob;
        for (int j = 0; j < k; j++)
            top[j] =
                (struct top_logprob){.token = read[1 + j].token, .logprob = read[1 + j].logprob};
        read += 1 + k;
    }
}

// ---- a prompt's ---------------------------------------------------------------------------------

struct prompt_row {
    struct request *request;
    int position; // of the token that the row is about
};

struct prompt_logprobs {
    struct runner *runner; // that computed the step whose rows are read
    struct logprob_reader reader;
    int n;
    struct prompt_row *rows;         // (model->max_rows) of the chunk
    int32_t *targets;                // (max_rows)
    int32_t *numbers, *host_numbers; // (max_rows) of the rows in the batch
};

enum status prompt_logprobs_new(struct runner *runner, struct prompt_logprobs **ret)
{
    enum status st = ST_OK;
    struct model *model = runner->model;
    const size_t n = (size_t)model->max_rows;
    struct prompt_logprobs *p = calloc(1, sizeof *p);
    if (!p) return status_fail(ST_NO_MEMORY, "no memory for prompt log-probabilities");
    p->runner = runner;
    p->reader.dev = model->dev;
    p->rows = malloc(n * sizeof *p->rows);
    p->targets = malloc(n * sizeof *p->targets);
    if (!p->rows || !p->targets) FAIL(ST_NO_MEMORY, "no memory for prompt log-probabilities");
    CHECK(device_alloc(model->dev, n * sizeof *p->numbers, (void **)&p->numbers));
    CHECK(device_host_alloc(model->dev, n * sizeof *p->host_numbers, (void **)&p->host_numbers));
    *ret = p;
    return ST_OK;
out:
    prompt_logprobs_free(p);
    return st;
}

void prompt_logprobs_free(struct prompt_logprobs *p)
{
    if (!p) return;
    logprob_reader_release(&p->reader);
    device_release(p->runner->dev, p->numbers);
    device_host_release(p->runner->dev, p->host_numbers);
    free(p->rows);
    free(p->targets);
    free(p);
}

static void note_row(const struct prompt_row *row, const struct token_logprob *read, int n_top,
                     uint64_t version)
{
    struct request *r = row->request;
    struct top_logprob *top =
        r->prompt_top + (size_t)row->position * (size_t)r->sampling.prompt_top;
    r->prompt_tokens[row->position] = (struct prompt_token){
        .logprob = read[0].logprob, .rank = read[0].rank, .weight_version = version};
    for (int j = 0; j < n_top; j++)
        top[j] = (struct top_logprob){.token = read[1 + j].token, .logprob = read[1 + j].logprob};
}

// Computes the logits of the rows listed so far, and empties the list.
static enum status read_chunk(struct prompt_logprobs *p, uint64_t version)
{
    const struct model *m = p->runner->model;
    if (p->n == 0) return ST_OK;
    const struct sampling *sampling = &p->rows[0].request->sampling;
    enum status st = runner_head(p->runner, p->host_numbers, p->n, p->numbers);
    if (st != ST_OK) return st;
    const struct logprob_rows rows = {.logits = m->logits,
                                      .targets = p->targets,
                                      .n = p->n,
                                      .vocab = m->config->vocab_size,
                                      .n_top = sampling->prompt_top,
                                      .temperature = sampling->temperature};
    const struct token_logprob *read;
    st = logprob_reader_read(&p->reader, &rows, &read);
    for (int i = 0; st == ST_OK && i < p->n; i++)
        note_row(&p->rows[i], read + (size_t)i * (size_t)(1 + rows.n_top), rows.n_top, version);
    p->n = 0;
    return st;
}

static enum status read_item(struct prompt_logprobs *p, const struct step_item *item, int end,
                             uint64_t version)
{
    enum status st = ST_OK;
    struct request *r = item->sample->request;
    const int last = r->n_prompt - 1, stop = item->first + item->n;
    const struct sampling *before = p->n > 0 ? &p->rows[0].request->sampling : &r->sampling;
    if (before->prompt_top != r->sampling.prompt_top ||
        before->temperature != r->sampling.temperature)
        CHECK(read_chunk(p, version));
    assert(item->first <= r->n_scored || r->n_scored >= last);
    for (; r->n_scored < last && r->n_scored < stop; r->n_scored++) {
        if (p->n == p->runner->limits.max_rows) CHECK(read_chunk(p, version));
        p->rows[p->n] = (struct prompt_row){.request = r, .position = r->n_scored + 1};
        p->targets[p->n] = r->prompt[r->n_scored + 1];
        p->host_numbers[p->n++] = end - item->n + (r->n_scored - item->first);
    }
out:
    return st;
}

enum status prompt_logprobs_read(struct prompt_logprobs *p, struct runner *runner,
                                 const struct engine_step *step, const int *item_end,
                                 uint64_t version)
{
    enum status st = ST_OK;
    assert(runner->limits.max_rows == p->runner->limits.max_rows);
    p->runner = runner;
    p->n = 0;
    for (int i = 0; i < step->n_items; i++)
        if (step->items[i].sample && step->items[i].sample->request->sampling.prompt_logprobs)
            CHECK(read_item(p, &step->items[i], item_end[i], version));
    CHECK(read_chunk(p, version));
out:
    return st;
}
