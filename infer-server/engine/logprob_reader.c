/* logprob_reader.c: see logprobs.h. The engine's thread. */
#include "infer-server/engine/logprobs.h"

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
