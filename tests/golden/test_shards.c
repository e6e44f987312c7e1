/* test_shards.c: the models of tests/golden, each cut into shards that 2 and 4 ranks compute with
 * together (MPI), against the same model on one rank.
 *
 * Every rank holds its shard and, beside it, the whole model. Logits, gradients, their norm and the
 * weights after a step must agree within f32 rounding: the sums are the same ones, in another
 * order. What must be the same to the bit: logits on all ranks; a second run; a run that computes
 * layers again in the backward pass; the sampler's pass (paged, in chunks, then token by token) and
 * the trainer's (packed); after a step what several ranks hold alike; and files that they save,
 * with those of one rank. Models with experts are shared twice, with a part of every expert and
 * with some experts whole on each rank, where what a mixture gives, and all its gradients, have the
 * bits of one rank. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/e4m3.h"
#include "common/base/file.h"
#include "common/model/adapter.h"
#include "common/model/model.h"
#include "common/model/safetensors.h"
#include "infer-server/engine/runner.h"
#include "kernels/moments.h"
#include "tests/support/mpirun.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "trainer/learn/layer_back.h"
#include "trainer/learn/optimizer.h"
#include "trainer/learn/param_range.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FIRST = 11, SECOND = 7, ROWS = FIRST + SECOND, CHUNK = 5, BLOCK = 4 };
#define LIMIT_MS  300000 // four ranks under the sanitizers, on two cores, take over two minutes
#define COMPARED  "all folders were compared" // each rank says so, in the end
#define TOLERANCE 3e-5 // of the largest entry: sums of some hundred f32 products

// ---- a rank's program ---------------------------------------------------------------------------
static const char *folder_now;
static bool experts_whole; // --expert-parallel
static enum moments_kind moments_kind;

// A rank that finds something wrong ends, and mpirun then ends the others.
static void must(bool holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "%s%s: %s\n", folder_now, experts_whole ? " by experts" : "", what);
    exit(1);
}

static void must_ok(enum status st)
{
    must(st == ST_OK, status_message());
}

struct side { // the model, or a shard of it; and an adapter of it, where one is trained
    struct device *dev;
    struct comm *comm;
    struct model_config *config;
    struct weights *weights, *frozen, *trained; // the adapter's plan of gradients; what is trained
    struct adapter *adapter;
    struct adapter_table *adapters;
    int32_t *row_lists; // device: of dropout each row's sample, then its position
    struct model *model;
    struct optimizer *optimizer;
    struct backward *backward;
    struct batch *batch;
    int32_t ids[ROWS], targets[ROWS];
    // what differentiate() gave
    float *logits; // (ROWS, vocab)
    float logprobs[ROWS], entropy[ROWS];
    float *grads; // of the arena
    double norm;
};

static void fill_batch(struct side *s)
{
    const int adapter = s->adapter ? 0 : -1;
    for (int i = 0; i < ROWS; i++) {
        s->ids[i] = (i * 29 + 3) % s->config->vocab_size;
        s->targets[i] = (i * 71 + 5) % s->config->vocab_size;
    }
    must_ok(batch_add_packed(s->batch, s->ids, FIRST, -1, adapter, NULL));
    must_ok(batch_add_packed(s->batch, s->ids + FIRST, SECOND, -1, adapter, NULL));
    for (int i = 0; i < ROWS; i++) must_ok(batch_want_row(s->batch, i));
    must_ok(batch_commit(s->batch, 0, 0));
}

static enum status take_shard(struct model_config *config, struct comm *comm)
{
    config->expert_parallel = experts_whole && comm;
    return model_config_shard(config, (struct shard){comm_rank(comm), comm_size(comm)});
}

// An adapter of all matrices, whose B is not zero, with dropout in training.
static void open_adapter(struct side *s)
{
    json_t *json = json_pack("{s:s, s:i, s:i}", "target_modules", ".*", "r", 3, "lora_alpha", 6);
    struct adapter_config *config;
    int32_t lists[2 * ROWS];
    must_ok(adapter_config_from_json("the adapter", json, &config));
    json_decref(json);
    must_ok(adapter_new(config, s->weights, DT_F32, &s->adapter));
    s->trained = s->adapter->weights;
    must_ok(weights_alloc(s->trained, s->dev));
    must_ok(adapter_init(s->adapter, s->dev, 7));
    for (int i = 0; i < s->adapter->n; i++) {
        const struct weight_tensor *t = &s->trained->tensors[s->adapter->list[i].b];
        const int64_t all = t->slice.whole[0] * t->slice.whole[1];
        float *x = test_keep(malloc((size_t)(all + t->n) * sizeof *x));
        for (int64_t k = 0; k < all; k++) x[k] = (float)((k * 37 + i) % 101 - 50) / 5000.0f;
        shard_take(t, x, sizeof *x, x + all);
        must_ok(weights_write(s->trained, s->dev, s->adapter->list[i].b, x + all));
    }
    must_ok(weights_plan(s->config, DT_F32, &s->frozen));
    must_ok(adapter_table_new(s->dev, s->weights, 1, 3, &s->adapters));
    must_ok(adapter_table_set(s->adapters, 0, s->adapter));
    must_ok(device_alloc(s->dev, sizeof lists, (void **)&s->row_lists));
    for (int i = 0; i < 2 * ROWS; i++) lists[i] = i % ROWS;
    device_copy_in(s->dev, s->row_lists, lists, sizeof lists);
}

static void drop(struct side *s, float p)
{
    const struct lora_dropout dropout = {
        .p = p, .seed = 9, .sample = s->row_lists, .position = s->row_lists + ROWS};
    if (s->adapter) adapter_table_drop(s->adapters, &dropout);
}

// False where the model's numbers are not so many ranks' to share.
static bool open_side(struct side *s, struct device *dev, struct comm *comm, const char *folder,
                      bool adapted)
{
    const struct optimizer_config adamw = {0.9, 0.999, 1e-8, 0.01, 1.0, moments_kind, false};
    *s = (struct side){.dev = dev, .comm = comm};
    must_ok(model_config_load(folder, &s->config));
    if (take_shard(s->config, comm) != ST_OK) return false;
    must_ok(weights_plan(s->config, DT_F32, &s->weights));
    must_ok(weights_alloc(s->weights, dev));
    must_ok(weights_load(s->weights, dev, folder));
    s->weights->comm = comm;
    s->trained = s->weights;
    if (adapted) open_adapter(s);
    must_ok(model_new(dev, s->config, s->weights, ROWS, ROWS, ROWS, &s->model));
    s->model->comm = comm;
    s->model->adapters = s->adapters;
    must_ok(optimizer_new_whole(dev, s->trained, &adamw, &s->optimizer));
    if (optimizer_use_shards(s->optimizer, comm) != ST_OK) return false;
    const struct weights *grads = optimizer_grads(s->optimizer, 0);
    must_ok(backward_new(s->model, adapted ? s->frozen : grads, ROWS, ROWS, CHUNK, &s->backward));
    if (adapted) backward_use_adapter(s->backward, s->adapter, grads);
    must_ok(batch_new(dev, ROWS, 2, 0, ROWS, &s->batch));
    fill_batch(s);
    s->logits = malloc((size_t)ROWS * (size_t)s->config->vocab_size * sizeof *s->logits);
    s->grads = malloc((size_t)s->trained->n_elements * sizeof *s->grads);
    must(s->logits && s->grads, "no memory");
    return true;
}

static void close_side(struct side *s)
{
    free(s->logits);
    free(s->grads);
    batch_free(s->batch);
    backward_free(s->backward);
    optimizer_free(s->optimizer);
    model_free(s->model);
    if (s->adapter) device_release(s->dev, s->row_lists);
    adapter_table_free(s->adapters);
    adapter_free(s->adapter);
    weights_free(s->frozen);
    weights_free(s->weights);
    model_config_free(s->config);
}

// Logits, log-probabilities, and what made-up gradients of these give the weights.
static void differentiate(struct side *s, enum recompute recompute)
{
    struct tape *tape;
    void *x;
    float dlogprobs[ROWS];
    const size_t logits = (size_t)ROWS * (size_t)s->config->vocab_size;
    for (int i = 0; i < ROWS; i++) dlogprobs[i] = 0.3f * (float)(i % 5 - 2) + 0.1f;
    must_ok(tape_new(s->model, ROWS, recompute, &tape));
    optimizer_clear_grads(s->optimizer);
    model_forward(s->model, batch_view(s->batch), NULL, tape, &x);
    must_ok(backward_logprobs(s->backward, NULL, s->batch, x, s->targets, 0.7f, s->logprobs,
                              s->entropy));
    device_copy_out(s->dev, s->logits, s->model->logits, logits * sizeof(float));
    must_ok(backward_run(s->backward, s->batch, tape,
                         &(struct backward_loss){.temperature = 0.7f, .dlogprobs = dlogprobs}));
    must_ok(optimizer_prepare(s->optimizer, &s->norm));
    device_copy_out(s->dev, s->grads, optimizer_grads(s->optimizer, 0)->base,
                    (size_t)s->trained->n_elements * sizeof(float));
    must_ok(device_sync(s->dev));
    tape_free(s->dev, tape);
}

// ---- comparing ----------------------------------------------------------------------------------
static void must_be_close(const float *have, const float *want, size_t n, double largest,
                          const char *what)
{
    double worst = 0;
    for (size_t i = 0; i < n; i++) {
        const double error = fabs((double)have[i] - (double)want[i]);
        if (!(error <= worst)) worst = error;
    }
    if (worst <= TOLERANCE * largest) return;
    fprintf(stderr, "%s: %g off, of %g\n", what, worst, largest);
    must(false, what);
}

static double largest_of(const float *x, size_t n)
{
    double largest = 0;
    for (size_t i = 0; i < n; i++) largest = fmax(largest, fabs((double)x[i]));
    return largest;
}

// A shard's values (its arena or its gradients) against the slices of the whole's. largest: of
// these, or 0: they must be the same.
static void slices_must_be_close(const struct side *part, const float *have,
                                 const struct side *whole, const float *want, double largest)
{
    for (int i = 0; i < part->trained->n_tensors; i++) {
        const struct weight_tensor *t = &part->trained->tensors[i];
        const struct weight_tensor *all = weights_find(whole->trained, t->name);
        if (t->is_buffer) continue; // without a gradient; replicas_must_be_same()
        const int64_t cols = t->n_dims == 2 ? t->shape[1] : 1, width = all->n / all->shape[0];
        const float *from = have + t->offset;
        for (int r = 0; r < t->slice.n_runs; r++)
            for (int64_t row = 0; row < t->slice.runs[r].n; row++, from += cols)
                must_be_close(from,
                              want + all->offset + (t->slice.runs[r].first + row) * width +
                                  t->slice.first_col,
                              (size_t)cols, largest, t->name);
    }
}

static void must_be_same_everywhere(struct comm *comm, const void *data, size_t bytes,
                                    const char *what)
{
    char *all = test_keep(malloc(bytes * (size_t)comm_size(comm)));
    must(all != NULL, "no memory");
    comm_all_gather(comm, data, all, bytes);
    for (int r = 0; r < comm_size(comm); r++)
        must(memcmp(all + (size_t)r * bytes, data, bytes) == 0, what);
}

// After a step: what all ranks hold is the same, bit for bit.
static void replicas_must_be_same(const struct side *s)
{
    for (int i = 0; i < s->trained->n_tensors; i++) {
        const struct weight_tensor *t = &s->trained->tensors[i];
        if (t->slice.n_runs == 1 && t->slice.runs[0].replicas == comm_size(s->comm))
            must_be_same_everywhere(s->comm, (const float *)s->trained->base + t->offset,
                                    (size_t)t->n * sizeof(float), t->name);
    }
}

// The first sequence as the sampler computes it: a chunk, another, then token by token.
static void sampler_must_agree(const struct side *s)
{
    static const int chunks[] = {4, 3, 1, 1, 1, 1};
    const struct runner_limits limits = {.max_tokens = FIRST,
                                         .max_seqs = 2,
                                         .max_rows = 2,
                                         .max_context = ROWS,
                                         .block_size = BLOCK};
    const size_t vocab = (size_t)s->config->vocab_size;
    const int32_t blocks[] = {2, 0, 1};
    const struct sampler_row unused = {0};
    float *row = test_keep(malloc(vocab * sizeof *row));
    struct runner *r;
    must(row != NULL, "no memory");
    must_ok(runner_new(s->dev, s->weights, &limits, &r));
    must_ok(runner_allocate_kv(r, 3, 1));
    r->model->comm = s->comm;
    if (s->adapter) runner_use_adapters(r, s->adapters);
    for (int i = 0, at = 0; at < FIRST; at += chunks[i++]) {
        runner_clear(r);
        must_ok(runner_feed(r, s->ids + at, chunks[i], at, blocks, 3,
                            (struct batch_seq){s->adapter ? 0 : -1, 0, 0}));
        must_ok(runner_want(r, chunks[i] - 1, &unused));
        must_ok(runner_step(r));
        device_copy_out(s->dev, row, r->model->logits, vocab * sizeof *row);
        must_ok(device_sync(s->dev));
        must(memcmp(row, s->logits + (size_t)(at + chunks[i] - 1) * vocab, vocab * sizeof *row) ==
                 0,
             "the sampler's logits are not the trainer's");
    }
    runner_free(r);
}

// What layer l's mixture gives for made-up rows, and then the gradient of these; the gradients of
// its weights are the optimizer's.
static void mix(struct side *s, int l, float *ret)
{
    const size_t n = (size_t)ROWS * (size_t)s->config->hidden, bytes = n * sizeof *ret;
    const struct backward_loss loss = {.temperature = 1};
    struct model *m = s->model;
    struct tape *tape;
    float *x = malloc(2 * bytes);
    must(x != NULL, "no memory");
    must_ok(tape_new(m, ROWS, RECOMPUTE_NONE, &tape));
    struct layer_tape *layer = &tape->layers[l];
    for (size_t i = 0; i < 2 * n; i++) x[i] = (float)(i * 37 % 101) / 50.0f - 1.0f;
    optimizer_clear_grads(s->optimizer);
    device_copy_in(s->dev, layer->x_mid, x, bytes);
    device_copy_in(s->dev, s->backward->dx, x + n, bytes);
    mlp_block(m, l, ROWS, layer, layer->x_mid, m->x);
    mlp_back(s->backward, l, ROWS, layer, &loss);
    device_copy_out(s->dev, ret, m->x, bytes);
    device_copy_out(s->dev, ret + n, s->backward->dx, bytes);
    device_copy_out(s->dev, s->grads, optimizer_grads(s->optimizer, 0)->base,
                    (size_t)s->weights->n_elements * sizeof(float));
    must_ok(device_sync(s->dev));
    tape_free(s->dev, tape);
    free(x);
}

static void experts_must_give_the_same(struct side *part, struct side *whole)
{
    const size_t n = 2 * (size_t)ROWS * (size_t)whole->config->hidden;
    float *have = malloc(2 * n * sizeof *have), *want = have + n;
    must(have != NULL, "no memory");
    for (int l = 0; l < whole->config->n_layers; l++) {
        if (whole->config->layers[l].moe.n_experts == 0) continue;
        mix(part, l, have);
        mix(whole, l, want);
        must(memcmp(have, want, n * sizeof *have) == 0, "experts give other bits than on one rank");
        must(largest_of(whole->grads, (size_t)whole->weights->n_elements) > 0, "no gradients");
        slices_must_be_close(part, part->grads, whole, whole->grads, 0);
    }
    free(have);
}

static void compare(struct side *part, struct side *whole)
{
    if (experts_whole && !part->adapter) experts_must_give_the_same(part, whole);
    const size_t logits = (size_t)ROWS * (size_t)whole->config->vocab_size;
    differentiate(whole, RECOMPUTE_NONE);
    differentiate(part, RECOMPUTE_NONE);
    must_be_close(part->logits, whole->logits, logits, largest_of(whole->logits, logits), "logits");
    must_be_close(part->logprobs, whole->logprobs, ROWS, 10, "log-probabilities");
    must_be_same_everywhere(part->comm, part->logits, logits * sizeof(float), "logits of ranks");
    slices_must_be_close(part, part->grads, whole, whole->grads,
                         largest_of(whole->grads, (size_t)whole->trained->n_elements));
    must(fabs(part->norm - whole->norm) <= TOLERANCE * whole->norm, "the gradients' norm");
    must_be_same_everywhere(part->comm, &part->norm, sizeof part->norm, "norms of ranks");
    sampler_must_agree(part);
}

// The same once more, to the bit.
static void repeat(struct side *s, enum recompute recompute)
{
    const size_t logits = (size_t)ROWS * (size_t)s->config->vocab_size * sizeof(float);
    const size_t grads = (size_t)s->trained->n_elements * sizeof(float);
    float *logits_before = malloc(logits), *grads_before = malloc(grads);
    must(logits_before && grads_before, "no memory");
    memcpy(logits_before, s->logits, logits);
    memcpy(grads_before, s->grads, grads);
    differentiate(s, recompute);
    must(memcmp(logits_before, s->logits, logits) == 0, "another run has other logits");
    must(memcmp(grads_before, s->grads, grads) == 0, "another run has other gradients");
    free(logits_before);
    free(grads_before);
}

// ---- the twin -----------------------------------------------------------------------------------

// Weights with a twin, as a rank or the whole model has them; comm NULL: that. alone: there are no
// others of its matrices.
static struct weights *open_twin(struct side *s, struct device *dev, struct comm *comm,
                                 const char *folder, bool alone)
{
    *s = (struct side){.dev = dev, .comm = comm};
    must_ok(model_config_load(folder, &s->config));
    must_ok(take_shard(s->config, comm));
    s->config->quantization = QUANTIZATION_FP8_WEIGHTS;
    s->config->twin_alone = alone;
    must_ok(weights_plan(s->config, DT_F32, &s->weights));
    must_ok(weights_alloc(s->weights, dev));
    s->weights->comm = comm;
    return s->weights;
}

// Row `row` of a tensor of the twin: its scale, and the code of column `col`.
static int8_t twin_scale(const struct weights *twin, int i, int64_t row, int64_t col, uint8_t *code)
{
    const uint8_t *codes;
    const int8_t *scales;
    const int64_t cols = twin->tensors[i].shape[1];
    weights_twin_tensor(twin, i, &codes, &scales);
    *code = codes[row * cols + e4m3_place(col, cols)];
    return scales[row];
}

// Codes and scales of a shard are those that the whole model has; how many rows are cut.
static int twins_must_be_same(const struct weights *part, const struct weights *whole)
{
    int cut = 0;
    for (int i = 0; i < part->n_tensors; i++) {
        const struct weight_tensor *t = &part->tensors[i];
        int64_t row = 0;
        uint8_t have, want;
        must(strcmp(t->name, whole->tensors[i].name) == 0, "another tensor");
        for (int r = 0; r < t->slice.n_runs; r++)
            for (int64_t k = 0; k < t->slice.runs[r].n; k++, row++)
                for (int64_t c = 0; c < t->shape[1]; c++) {
                    const int8_t own = twin_scale(part, i, row, c, &have);
                    const int8_t all = twin_scale(whole, i, t->slice.runs[r].first + k,
                                                  t->slice.first_col + c, &want);
                    must(own == all, "a row of the twin has another scale than on one rank");
                    must(have == want, "a weight of the twin has another code than on one rank");
                }
        if (t->shape[1] < t->slice.whole[1]) cut += (int)row;
    }
    return cut;
}

// After loading, and after other numbers were written: 2^-3 to 2^3 times them, a factor a column.
static void run_twin(struct device *dev, struct comm *comm, const char *folder)
{
    struct side part, whole, codes;
    struct weights *a = open_twin(&part, dev, comm, folder, false),
                   *b = open_twin(&whole, dev, NULL, folder, false),
                   *alone = open_twin(&codes, dev, comm, folder, true);
    must_ok(weights_load(a, dev, folder));
    must_ok(weights_load(b, dev, folder));
    must_ok(weights_load(alone, dev, folder));
    must(twins_must_be_same(a->twin, b->twin) > 0, "no row is cut");
    twins_must_be_same(alone->twin, b->twin);
    close_side(&codes);
    for (int i = 0; i < b->n_tensors; i++) {
        const struct weight_tensor *t = &b->tensors[i];
        float *x = malloc((size_t)t->n * sizeof *x), *own = malloc((size_t)t->n * sizeof *own);
        must(x && own, "no memory");
        must_ok(weights_read(b, dev, i, x));
        const int64_t cols = t->n_dims == 2 ? t->shape[1] : t->n;
        for (int64_t k = 0; k < t->n; k++) x[k] = ldexpf(x[k], (int)(k % cols * 7 / cols) - 3);
        must_ok(weights_write(b, dev, i, x));
        shard_take(&a->tensors[i], x, sizeof *x, own);
        must_ok(weights_write(a, dev, i, own));
        free(x);
        free(own);
    }
    weights_quantise(a, dev);
    weights_quantise(b, dev);
    must_ok(device_sync(dev));
    twins_must_be_same(a->twin, b->twin);
    // a rank that cannot load its shard lets none make a twin
    const char *elsewhere = comm_rank(comm) == 0 ? "nowhere" : folder;
    const enum status st = weights_load(a, dev, elsewhere);
    must(st == ST_NOT_FOUND, "one rank without a folder is not an error");
    must(strstr(status_message(), comm_rank(comm) == 0 ? "nowhere" : "rank 0 could not load"),
         status_message());
    close_side(&part);
    close_side(&whole);
}

static void step(struct side *s)
{
    // a learning rate at which Adam does not turn rounding into a step of its full size
    must_ok(optimizer_apply(s->optimizer, 1e-6));
    must_ok(device_sync(s->dev));
}

static void files_must_be_same(const char *a, const char *b, const char *what)
{
    struct file_map x, y;
    must_ok(file_map_open(a, &x));
    must_ok(file_map_open(b, &y));
    must(x.len == y.len && memcmp(x.data, y.data, x.len) == 0, what);
    file_map_release(&x);
    file_map_release(&y);
}

// What ranks save together is what one rank saves: the weights, and the optimizer's state once they
// have loaded one rank's.
static void files_must_be_of_one_rank(struct side *part, struct side *whole)
{
    char dir[] = "/tmp/cw-shards-XXXXXX";
    const bool writes = comm_rank(part->comm) == 0;
    must(mkdtemp(dir) != NULL, "no folder for files");
    const char *one = test_path(dir, "one"), *all = test_path(dir, "all");
    if (part->adapter) {
        must_ok(adapter_init(whole->adapter, whole->dev, 3));
        must_ok(adapter_init(part->adapter, part->dev, 3));
    } else {
        must_ok(weights_load(whole->weights, whole->dev, folder_now));
        must_ok(weights_load(part->weights, part->dev, folder_now));
    }
    must_ok(weights_save_as(whole->trained, whole->dev, dir, "one", DT_F32));
    must_ok(writes ? weights_save_as(part->trained, part->dev, dir, "all", DT_F32)
                   : weights_save_part(part->trained, part->dev));
    if (writes) files_must_be_same(one, all, "ranks save other weights than one");
    must_ok(optimizer_save(whole->optimizer, one));
    must_ok(optimizer_load(part->optimizer, one));
    must_ok(optimizer_save(part->optimizer, writes ? all : NULL));
    if (writes) files_must_be_same(one, all, "ranks save another state than one");
    unlink(one);
    if (writes) unlink(all);
    rmdir(dir);
}

static void train_both(struct side *part, struct side *whole)
{
    compare(part, whole);
    repeat(part, RECOMPUTE_NONE);
    repeat(part, RECOMPUTE_LAYER);
    step(part);
    step(whole);
    slices_must_be_close(part, part->trained->base, whole, whole->trained->base,
                         largest_of(whole->trained->base, (size_t)whole->trained->n_elements));
    replicas_must_be_same(part);
    files_must_be_of_one_rank(part, whole);
}

// An adapter's factors are cut as its matrices are, and trained without dropout and with it.
static void run_adapter(struct device *dev, struct comm *comm, const char *folder)
{
    struct side part, whole;
    must(open_side(&part, dev, comm, folder, true), "the shard does not open");
    must(open_side(&whole, dev, NULL, folder, true), "the whole model does not open");
    train_both(&part, &whole);
    drop(&part, 0.3f);
    drop(&whole, 0.3f);
    differentiate(&part, RECOMPUTE_NONE);
    differentiate(&whole, RECOMPUTE_NONE);
    slices_must_be_close(&part, part.grads, &whole, whole.grads,
                         largest_of(whole.grads, (size_t)whole.trained->n_elements));
    close_side(&part);
    close_side(&whole);
}

// ---- 8-bit moments ------------------------------------------------------------------------------

// An 8-bit moment as it is on disk, or its scale, which is an element's or its block's.
static float moment_in(const struct safetensors *set, const char *array, const struct side *whole,
                       int i, int64_t k)
{
    const struct weight_tensor *t = &whole->weights->tensors[i];
    const struct safetensors_entry *codes =
        safetensors_find(set, test_text("%s.%s", array, t->name));
    const struct safetensors_entry *scales =
        safetensors_find(set, test_text("%s_scale.%s", array, t->name));
    must(codes && scales, "moments are missing");
    const bool each = scales->n_dims == t->n_dims && scales->shape[0] == t->shape[0];
    const int64_t at = each ? k : (t->offset % MOMENT_BLOCK + k) / MOMENT_BLOCK;
    float scale;
    memcpy(&scale, (const char *)scales->data + (size_t)at * sizeof scale, sizeof scale);
    const uint8_t code = ((const uint8_t *)codes->data)[k];
    return moment_unpack(code, scale, strstr(array, "_sq") != NULL);
}

// What one rank makes of the ranks' moments: theirs, but for roundings to the nearest code, a
// sixteenth each, of a block as often as it has tensors (q, k, v), and for what is far below the
// largest of all.
static void moments_must_be_close(const struct side *whole, const char *ranks, const char *one)
{
    static const char *const arrays[] = {"exp_avg", "exp_avg_sq"};
    struct safetensors *a, *b;
    must_ok(safetensors_open_file(ranks, &a));
    must_ok(safetensors_open_file(one, &b));
    for (int n = 0; n < 2; n++)
        for (int i = 0; i < whole->weights->n_tensors; i++) {
            const struct weight_tensor *t = &whole->weights->tensors[i];
            for (int64_t k = 0; !t->is_buffer && k < t->n; k += 1 + t->n / 200) {
                const float x = moment_in(a, arrays[n], whole, i, k),
                            y = moment_in(b, arrays[n], whole, i, k);
                must(fabsf(x - y) <= fabsf(x) / 5 + 1e-5f, "one rank has other moments");
            }
        }
    safetensors_free(a);
    safetensors_free(b);
}

static void load_and_save(struct side *s, const char *from, const char *to)
{
    must_ok(optimizer_reset(s->optimizer));
    must_ok(optimizer_load(s->optimizer, from));
    must_ok(optimizer_save(s->optimizer, comm_rank(s->comm) == 0 ? to : NULL));
}

static bool cut_between_blocks(const struct weights *w)
{
    for (int i = 0; i < w->n_tensors; i++)
        if (!w->tensors[i].is_buffer && !shard_cuts_between(w, i, MOMENT_BLOCK)) return false;
    return true;
}

// Two steps, saved by all: what they load is that, to the bit, and what one rank loads, too, where
// no block is cut.
static void compare_moments(struct side *part, struct side *whole)
{
    const char *dir = getenv("SHARDS_FOLDER"); // the ranks' own, of all
    const bool writes = comm_rank(part->comm) == 0, same = cut_between_blocks(part->weights);
    const char *all = test_path(dir, "all"), *again = test_path(dir, "again"),
               *one = test_path(dir, test_text("one-%d", comm_rank(part->comm)));
    for (int i = 0; i < 2; i++) {
        differentiate(part, RECOMPUTE_NONE);
        step(part);
    }
    replicas_must_be_same(part);
    must_ok(optimizer_save(part->optimizer, writes ? all : NULL));
    must_ok(comm_barrier(part->comm));
    load_and_save(part, all, again);
    if (writes) files_must_be_same(all, again, "ranks load other moments than they saved");
    load_and_save(whole, all, one);
    moments_must_be_close(whole, all, one);
    if (same) files_must_be_same(all, one, "one rank loads other moments than ranks saved");
    if (same && writes) printf("%s has moments of one rank\n", folder_now);
    load_and_save(part, one, again);
    if (writes && same) files_must_be_same(all, again, "ranks load other moments than one saved");
    must_ok(comm_barrier(part->comm));
}

static void run_moments(struct device *dev, struct comm *comm, const char *folder)
{
    struct side part, whole;
    moments_kind = MOMENTS_8BIT;
    if (open_side(&part, dev, comm, folder, false)) {
        must(open_side(&whole, dev, NULL, folder, false), "the whole model does not open");
        compare_moments(&part, &whole);
        close_side(&whole);
    } else {
        must(strstr(status_message(), "--optim-moments bf16") != NULL, status_message());
        if (comm_rank(comm) == 0) printf("%s has mixed blocks\n", folder);
    }
    close_side(&part);
    moments_kind = MOMENTS_F32;
}

static void run_folder(struct device *dev, struct comm *comm, const char *folder)
{
    struct side part, whole;
    const char *way = experts_whole ? " by experts" : "";
    folder_now = folder;
    const bool fits = open_side(&part, dev, comm, folder, false);
    if (fits) {
        must(open_side(&whole, dev, NULL, folder, false), "the whole model does not open");
        train_both(&part, &whole);
        run_twin(dev, comm, folder);
        close_side(&whole);
        run_adapter(dev, comm, folder);
        run_moments(dev, comm, folder);
    }
    if (comm_rank(comm) == 0 && fits) printf("%s%s agrees\n", folder, way);
    if (comm_rank(comm) == 0 && !fits)
        printf("%s%s is not to be shared: %s\n", folder, way, status_message());
    experts_whole = !experts_whole && config_experts(part.config) > 0;
    close_side(&part);
    if (experts_whole) run_folder(dev, comm, folder);
}

static int rank_main(const char *root)
{
    struct device *dev;
    struct comm *comm;
    struct dirent **list;
    unsigned char id[COMM_ID_BYTES] = {0};
    const int n = scandir(root, &list, NULL, alphasort);
    folder_now = root;
    must(n >= 0, "cannot be listed");
    must_ok(device_open("cpu", &dev));
    must_ok(comm_open(dev, id, atoi(getenv("OMPI_COMM_WORLD_RANK")),
                      atoi(getenv("OMPI_COMM_WORLD_SIZE")), 30, NULL, NULL, &comm));
    for (int i = 0; i < n; i++) {
        const char *folder = test_path(root, list[i]->d_name);
        if (file_exists(test_path(folder, "config.json"))) run_folder(dev, comm, folder);
        free(list[i]);
    }
    free(list);
    comm_free(comm);
    device_free(dev);
    puts(COMPARED);
    return 0;
}

// ---- the test -----------------------------------------------------------------------------------
static char self[PATH_MAX];

static int count(const char *text, const char *words)
{
    int n = 0;
    for (const char *at = text; (at = strstr(at, words)); at++) n++;
    return n;
}

static char *ranks_say(int n, const char *root)
{
    const char *log = test_path(test_folder(), "log");
    setenv("OMP_NUM_THREADS", "1", 1);
    setenv("SHARDS_FOLDER", test_folder(), 1);
    const int status =
        test_command(log, LIMIT_MS, JOIN(mpirun_words(n), OPTIONS(self, "--rank", root)));
    char *text = test_read(log);
    if (status != 0) print_error("%s\n", text);
    assert_int_equal(status, 0);
    assert_int_equal(count(text, COMPARED), n); // what ends a rank is no failure of mpirun's here
    return text;
}

// All folders agree but those that so many ranks cannot share, each of which says what to do.
static void run_ranks(int n, const char *const refused[])
{
    int n_refused = 0;
    char *text = ranks_say(n, test_golden(""));
    for (; refused[n_refused]; n_refused++) assert_contains(text, refused[n_refused]);
    assert_int_equal(count(text, " is not to be shared: "), n_refused);
    assert_int_equal(count(text, " --tensor-parallel-size "), n_refused);
    assert_true(count(text, " agrees\n") > 25);
    assert_true(count(text, " by experts agrees\n") > 3);
    assert_int_equal(count(text, " has mixed blocks\n"), n == 2 ? 1 : 13); // tiny heads, shared
}

// Wide enough that no rank has a part of a block, as models of real sizes are.
TEST(moments_are_those_of_one_rank)
{
    const char *root = test_path(test_folder(), "wide");
    assert_int_equal(mkdir(root, 0700), 0);
    assert_ok(tiny_model_write(test_path(root, "tiny"), 512, 2, 64, 3));
    assert_contains(ranks_say(2, root), "/tiny has moments of one rank\n");
}

TEST(two_ranks_agree_with_one)
{
    run_ranks(
        2, OPTIONS("/gpt-oss-clamp by experts is not to be shared: GptOssForCausalLM: it has 3",
                   "/qwen3-moe-fp8 by experts is not to be shared: Qwen3MoeForCausalLM: it has 5",
                   "/qwen3-moe-some by experts is not to be shared: "));
}

TEST(four_ranks_agree_with_one)
{
    const char *const *refused = OPTIONS(
        "/llama3 is not to be shared: LlamaForCausalLM: num_attention_heads is 6",
        "/qwen3-next is not to be shared: Qwen3NextForCausalLM: linear_num_key_heads is 2",
        "/qwen35-moe is not to be shared: ", "/qwen35 is not to be shared: ",
        "/deepseek-v2-lite by experts is not to be shared: ",
        "/deepseek-v3-wide by experts is not to be shared: ",
        "/gpt-oss by experts is not to be shared: GptOssForCausalLM: it has 6 experts",
        "/gpt-oss-clamp by experts is not to be shared: ",
        "/mixtral-6x3 by experts is not to be shared: ", "/olmoe by experts is not to be shared: ",
        "/qwen2-moe by experts is not to be shared: ",
        "/qwen3-moe-fp8 by experts is not to be shared: ",
        "/qwen3-moe-some by experts is not to be shared: ",
        "/qwen3-next by experts is not to be shared: ",
        "/qwen35-moe by experts is not to be shared: ");
    run_ranks(4, refused);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--rank") == 0) return rank_main(argv[2]);
    if (!realpath("/proc/self/exe", self)) return 1;
    return test_main();
}
