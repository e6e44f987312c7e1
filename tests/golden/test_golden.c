/* test_golden.c: reference values (tests/golden/README.md) against the model, the losses, the
 * backward pass and the optimizer: the code that trains and serves, called as the daemon and the
 * trainer do.
 *
 * With a folder (make golden GOLDEN_DIR=DIR): one line for every model folder in it, or every
 * adapter's (make golden-lora), whose golden.json names its base in DIR/../golden: there the
 * adapter is what is trained, on the dapo loss. Without: the folders of tests/golden and
 * tests/golden-lora as tests.
 *
 * Tolerances, f32: logits and gradients 1e-4 of the largest entry (sums of some hundred f32
 * products in another order); losses 1e-5; parameters after three AdamW steps 2e-6 rms and at most
 * 0.1% of entries off by more than 1e-5, because Adam magnifies entries whose gradient is rounding
 * noise. A folder that has projections of gradients and parameters instead of all entries
 * (README.md) is held to the same numbers: each projection of a gradient may be off by what an
 * entry may, and those of parameters give the rms; only those with entries tell how many are off.
 * On a GPU the logits are also computed in bf16, and compared with those that f32 computes from the
 * same rounded weights (to round weights is no kernel's error, and alone takes PEFT's logits of
 * llama3-r4-qv 2.5e-2 away): 1.5e-2 root mean square, where PyTorch has 1.1e-2 to 1.2e-2, or what
 * PyTorch has of the folder itself where golden.json tells that (bf16_logits_rms); 4.7e-2 where
 * states go from row to row, which is what PyTorch has for qwen35. The largest difference is
 * printed only: it follows the luck of single rows. Tokens whose choice of experts hangs on a
 * rounding are counted and left out. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/names.h"
#include "common/model/model.h"
#include "common/model/safetensors.h"
#include "tests/support/generated.h"
#include "tests/support/reference.h"
#include "tests/support/loss_batch.h"
#include "tests/support/support.h"
#include "trainer/learn/backward.h"
#include "trainer/learn/loss.h"
#include "trainer/learn/optimizer.h"
#include "trainer/learn/stats.h"
#include <dirent.h>

#define N_LOSSES 6
static const char *const loss_names[N_LOSSES] = {"grpo",    "bnpo", "dapo",
                                                 "dr_grpo", "gspo", "cispo"};

struct result {
    double bf16_rms, bf16_logits; // -1: not computed; over bf16_rows rows
    double bf16_most;             // of bf16_rms
    int bf16_rows, bf16_flips;    // flips: tokens that went to other experts than in f32
    double logits, losses[N_LOSSES], norms[N_LOSSES], grads, after3_rms, adamw_losses;
    // Of the latter: 1e-5; in e4m3, where what another processor rounds otherwise may bring a
    // weight to the next code, an eighth of it away, 1e-4.
    double adamw_most;
    double after3_share_off; // -1: the folder has projections
    double merged;           // logits of base and adapter as one model; -1: there is no adapter
    bool greedy;
    bool recompute; // gradients with layers run again are the same bits
};

struct golden { // one folder, opened
    struct device *dev;
    const char *folder, *model_folder; // an adapter's, and its base's; or one folder
    json_t *info, *base_info;          // base_*: NULL where there is no adapter
    struct safetensors *values, *base_values;
    struct model_config *config;
    struct weights *weights, *frozen; // frozen: with an adapter, the base's gradients: none
    struct adapter *adapter;          // NULL: none
    struct adapter_table *table;
    struct model *model;
    struct batch *batch;
    struct tape *tape;
    struct optimizer *optimizer;
    struct backward *backward;
    int n_seqs, prompt, completion, first[65];
    int32_t targets[4096];
};

static const void *value(const struct golden *g, const char *name)
{
    const struct safetensors_entry *e = safetensors_find(g->values, name);
    if (!e && g->base_values) e = safetensors_find(g->base_values, name);
    return e ? e->data : NULL;
}

// Where the reference has a tensor's entries: in which of its own, and entry i as which.
struct place {
    char name[160];
    int64_t first, cols, row_step, col_step;
};

static int64_t place_of(const struct place *p, int64_t i)
{
    return p->first + i / p->cols * p->row_step + i % p->cols * p->col_step;
}

static bool has(const struct golden *g, const char *prefix, const char *name)
{
    char whole[220], projected[220];
    snprintf(whole, sizeof whole, "%s%s", prefix, name);
    snprintf(projected, sizeof projected, "projected.%s", name);
    return value(g, whole) || value(g, projected);
}

// Some tensors the file has in one with others, as the table has it. The reference itself keeps a
// mixture's experts in two tensors a layer, one expert after the other, as the arena does: there it
// is a part of one of those.
static enum status find_place(const struct golden *g, const char *prefix, const struct weights *w,
                              int t, struct place *ret)
{
    const struct weight_tensor *tensor = &w->tensors[t];
    const struct stored_in *s = &tensor->stored;
    if (s->n_dims) {
        *ret = (struct place){"", s->first, tensor->n_dims == 2 ? tensor->shape[1] : 1, s->row_step,
                              s->col_step};
        snprintf(ret->name, sizeof ret->name, "%s", s->name);
    } else {
        *ret = (struct place){"", 0, tensor->n, 0, 1};
        snprintf(ret->name, sizeof ret->name, "%s", tensor->name);
    }
    if (has(g, prefix, ret->name)) return ST_OK;
    // Nemotron-H's has the folder's own words, for one expert after the other
    const char *mixer = strstr(tensor->name, "mixer.experts.");
    const char *part = tensor->role == ROLE_ROUTER            ? "gate.weight"
                       : tensor->role != ROLE_EXPERTS_GATE_UP ? "experts.down_proj"
                       : mixer                                ? "experts.up_proj"
                                                              : "experts.gate_up_proj";
    snprintf(ret->name, sizeof ret->name, "model.layers.%d.%s.%s", tensor->layer,
             mixer ? "mixer" : "mlp", part);
    while (t > 0 && w->tensors[t - 1].role == tensor->role &&
           w->tensors[t - 1].layer == tensor->layer)
        t--;
    ret->first = tensor->offset - w->tensors[t].offset;
    if (has(g, prefix, ret->name) && !s->n_dims) return ST_OK;
    return status_fail(ST_NOT_FOUND, "%s: golden.safetensors has no %s%s", g->folder, prefix,
                       tensor->name);
}

static double fact(const struct golden *g, const char *key)
{
    const json_t *x = json_object_get(g->info, key);
    return json_number_value(x ? x : json_object_get(g->base_info, key));
}

// ---- opening ------------------------------------------------------------------------------------
static enum status open_values(const char *folder, json_t **ret_info,
                               struct safetensors **ret_values)
{
    enum status st = json_read_file(test_path(folder, "golden.json"), 1 << 20, ret_info);
    return st ? st : safetensors_open_file(test_path(folder, "golden.safetensors"), ret_values);
}

static enum status open_files(struct golden *g)
{
    enum status st;
    const char *base;
    CHECK(open_values(g->folder, &g->info, &g->values));
    base = json_string_value(json_object_get(g->info, "base"));
    if (base) {
        char beside[64];
        snprintf(beside, sizeof beside, "../../golden/%s", base);
        g->model_folder = test_path(g->folder, beside);
        CHECK(open_values(g->model_folder, &g->base_info, &g->base_values));
    } else {
        g->model_folder = g->folder;
    }
    CHECK(model_config_load(g->model_folder, &g->config));
    if (json_object_get(g->info, "quantization"))
        g->config->quantization = QUANTIZATION_FP8_WEIGHTS;
    g->n_seqs = (int)fact(g, "batch");
    g->prompt = (int)fact(g, "prompt_len");
    g->completion = (int)fact(g, "completion_len");
out:
    return st;
}

// A sequence is a prompt and its completion, and those before it are.
static int first_row(const struct golden *g, int seq)
{
    return seq * g->prompt + g->first[seq];
}

// One packed sequence a row of input_ids, up to its completion's end; targets are the completions.
static enum status fill_batch(struct golden *g)
{
    const int32_t *ids = value(g, "input_ids");
    const float *mask = value(g, "completion_mask");
    int width = g->prompt + g->completion;
    enum status st = ST_OK;
    batch_clear(g->batch);
    for (int s = 0; s < g->n_seqs; s++) {
        int n = 0;
        while (n < g->completion && mask[s * g->completion + n] != 0) n++;
        CHECK(batch_add_packed(g->batch, ids + s * width, g->prompt + n, -1, g->base_info ? 0 : -1,
                               NULL));
        for (int i = 0; i < n; i++) {
            CHECK(batch_want_row(g->batch, first_row(g, s) + g->prompt - 1 + i));
            g->targets[g->first[s] + i] = ids[s * width + g->prompt + i];
        }
        g->first[s + 1] = g->first[s] + n;
    }
    st = batch_commit(g->batch, 0, 0);
out:
    return st;
}

static int longest_sequence(const struct golden *g)
{
    const struct safetensors_entry *greedy = safetensors_find(g->values, "greedy");
    int n = g->prompt + g->completion;
    return greedy && greedy->shape[0] > n ? (int)greedy->shape[0] : n;
}

// The folder's model, or its base's, in an arena of that dtype.
static enum status load_weights(struct golden *g, enum dtype dt, struct weights **ret)
{
    enum status st;
    CHECK(weights_plan(g->config, dt, ret));
    CHECK(weights_alloc(*ret, g->dev));
    CHECK(weights_load(*ret, g->dev, g->model_folder));
out:
    return st;
}

// The folder's adapter likewise, and a table with it alone.
static enum status load_adapter(struct golden *g, const struct weights *base, struct adapter **ret,
                                struct adapter_table **ret_table)
{
    struct adapter_config *config;
    enum status st;
    CHECK(adapter_config_load(g->folder, &config));
    CHECK(adapter_new(config, base, base->dt, ret));
    CHECK(weights_alloc((*ret)->weights, g->dev));
    CHECK(adapter_load(*ret, g->dev, g->folder));
    CHECK(adapter_table_new(g->dev, base, 1, (*ret)->max_rank, ret_table));
    CHECK(adapter_table_set(*ret_table, 0, *ret));
out:
    return st;
}

// What is trained, and its optimizer: all of the model, or the adapter.
static enum status open_training(struct golden *g, int max_tokens)
{
    struct optimizer_config adamw = {0.9, 0.999, 1e-8, 0.01, 1.0, MOMENTS_F32, false};
    enum status st;
    CHECK(tape_new(g->model, max_tokens, RECOMPUTE_NONE, &g->tape));
    CHECK(optimizer_new_whole(g->dev, g->adapter ? g->adapter->weights : g->weights, &adamw,
                              &g->optimizer));
    if (g->adapter) CHECK(weights_plan(g->config, DT_F32, &g->frozen));
    CHECK(backward_new(g->model, g->adapter ? g->frozen : optimizer_grads(g->optimizer, 0),
                       max_tokens, max_tokens, g->model->max_rows, &g->backward));
    if (g->adapter) backward_use_adapter(g->backward, g->adapter, optimizer_grads(g->optimizer, 0));
out:
    return st;
}

static enum status open_golden(struct golden *g)
{
    int max_tokens;
    enum status st;
    CHECK(open_files(g));
    max_tokens = g->n_seqs * (g->prompt + g->completion);
    CHECK(load_weights(g, DT_F32, &g->weights));
    // logits of 16 rows at a time, so that the chunked head is what is tested
    // as many positions as are used: some rope kinds choose by that
    CHECK(model_new(g->dev, g->config, g->weights, max_tokens, 16, longest_sequence(g), &g->model));
    CHECK(batch_new(g->dev, max_tokens, g->n_seqs, 16, max_tokens, &g->batch));
    if (g->base_info) {
        CHECK(load_adapter(g, g->weights, &g->adapter, &g->table));
        g->model->adapters = g->table;
    }
    CHECK(open_training(g, max_tokens));
    CHECK(fill_batch(g));
out:
    return st;
}

static void close_golden(struct golden *g)
{
    backward_free(g->backward);
    optimizer_free(g->optimizer);
    tape_free(g->dev, g->tape);
    batch_free(g->batch);
    model_free(g->model);
    adapter_table_free(g->table);
    adapter_free(g->adapter);
    weights_free(g->frozen);
    weights_free(g->weights);
    model_config_free(g->config);
    safetensors_free(g->values);
    safetensors_free(g->base_values);
    json_decref(g->info);
    json_decref(g->base_info);
}

// ---- comparing ----------------------------------------------------------------------------------
static void widen(double *worst, double x)
{
    if (!(x <= *worst)) *worst = x; // NaN counts as worst
}

// All logits, as the folder's are laid out; 0 where there is no token.
static enum status model_logits(struct golden *g, struct model *model, float **ret)
{
    int vocab = g->config->vocab_size, width = g->prompt + g->completion;
    float *all = test_keep(calloc((size_t)(g->n_seqs * width) * (size_t)vocab, sizeof *all));
    int32_t *device_row = NULL;
    void *x;
    enum status st = ST_OK;
    CHECK(device_alloc(g->dev, sizeof *device_row, (void **)&device_row));
    model_forward(model, batch_view(g->batch), NULL, NULL, &x);
    for (int s = 0; s < g->n_seqs; s++)
        for (int i = 0; i < g->prompt + g->first[s + 1] - g->first[s]; i++) {
            int32_t index = first_row(g, s) + i;
            device_copy_in(g->dev, device_row, &index, sizeof index);
            model_head(model, x, device_row, 0, 1);
            device_copy_out(g->dev, all + (size_t)(s * width + i) * (size_t)vocab, model->logits,
                            (size_t)vocab * sizeof *all);
            CHECK(device_sync(g->dev));
        }
    *ret = TAKE_PTR(all);
out:
    device_release(g->dev, device_row);
    return st;
}

// How far the model's logits are from those wanted, over all rows, or those of use_row (T): the
// largest difference of the largest logit, and (where asked for) the root mean square of both.
static enum status check_logits(struct golden *g, struct model *model, const float *want,
                                const bool *use_row, double *ret, double *ret_rms)
{
    int vocab = g->config->vocab_size, width = g->prompt + g->completion;
    float *have = NULL;
    double largest = 0, worst = 0, squares = 0, errors = 0;
    enum status st;
    CHECK(model_logits(g, model, &have));
    for (int s = 0; s < g->n_seqs; s++)
        for (int i = 0; i < g->prompt + g->first[s + 1] - g->first[s]; i++) {
            if (use_row && !use_row[first_row(g, s) + i]) continue;
            size_t row = (size_t)(s * width + i) * (size_t)vocab;
            for (size_t v = row; v < row + (size_t)vocab; v++) {
                widen(&largest, fabs((double)want[v]));
                const double error = (double)have[v] - (double)want[v];
                widen(&worst, fabs(error));
                squares += (double)want[v] * (double)want[v];
                errors += error * error;
            }
        }
    *ret = worst / largest;
    if (ret_rms) *ret_rms = sqrt(errors / squares);
out:
    free(have);
    return st;
}

static int compare_ints(const void *a, const void *b)
{
    return *(const int32_t *)a - *(const int32_t *)b;
}

// Which expert is third best may hang on a rounding: then the two runs compute different functions.
// A row that some layer sent to other experts is such a place, and so are those that can attend to
// it.
static enum status mark_same_experts(struct golden *g, const struct tape *x, const struct tape *y,
                                     bool *ret_rows, int *ret_flips)
{
    int most = 0, rows = batch_tokens(g->batch);
    for (int l = 0; l < g->config->n_layers; l++)
        if (g->config->layers[l].moe.top_k > most) most = g->config->layers[l].moe.top_k;
    int32_t *a = test_keep(malloc((size_t)(rows * most) * sizeof *a + 1));
    int32_t *b = test_keep(malloc((size_t)(rows * most) * sizeof *b + 1));
    enum status st = ST_OK;
    for (int r = 0; r < rows; r++) ret_rows[r] = true;
    for (int l = 0; l < g->config->n_layers; l++) {
        const int k = g->config->layers[l].moe.top_k;
        const size_t bytes = (size_t)(rows * k) * sizeof *a;
        if (g->config->layers[l].moe.n_experts == 0) continue;
        device_copy_out(g->dev, a, x->layers[l].routing.expert, bytes);
        device_copy_out(g->dev, b, y->layers[l].routing.expert, bytes);
        CHECK(device_sync(g->dev));
        for (int s = 0; s < g->n_seqs; s++) {
            int first = first_row(g, s), end = s + 1 < g->n_seqs ? first_row(g, s + 1) : rows;
            for (int r = first; r < end; r++) {
                qsort(a + r * k, (size_t)k, sizeof *a, compare_ints);
                qsort(b + r * k, (size_t)k, sizeof *b, compare_ints);
                bool same = memcmp(a + r * k, b + r * k, (size_t)k * sizeof *a) == 0;
                if (!same && ret_rows[r]) ++*ret_flips;
                for (int later = r; !same && later < end; later++) ret_rows[later] = false;
            }
        }
    }
out:
    return st;
}

struct variant { // the folder's model, its weights rounded to bf16
    struct weights *weights;
    struct adapter *adapter;
    struct adapter_table *table;
    struct model *model;
    struct tape *tape;
};

static enum status round_weights(struct golden *g, const struct weights *weights)
{
    int64_t n = weights->n_elements;
    void *rounded;
    enum status st;
    CHECK(device_alloc(g->dev, (size_t)n * dtype_size(DT_BF16), &rounded));
    device_ops(g->dev)->convert(g->dev, rounded, DT_BF16, weights->base, DT_F32, n);
    device_ops(g->dev)->convert(g->dev, weights->base, DT_F32, rounded, DT_BF16, n);
    weights_quantise(weights, g->dev);
    st = device_sync(g->dev);
    device_release(g->dev, rounded);
out:
    return st;
}

// Which computes in dt, and has run the batch.
static enum status open_variant(struct golden *g, enum dtype dt, struct variant *v)
{
    void *x;
    enum status st;
    CHECK(load_weights(g, dt, &v->weights));
    if (g->adapter) CHECK(load_adapter(g, v->weights, &v->adapter, &v->table));
    if (dt == DT_F32) CHECK(round_weights(g, v->weights));
    if (dt == DT_F32 && v->adapter) CHECK(round_weights(g, v->adapter->weights));
    CHECK(model_new(g->dev, g->config, v->weights, g->model->max_tokens, 16, longest_sequence(g),
                    &v->model));
    v->model->adapters = v->table;
    CHECK(tape_new(v->model, g->model->max_tokens, RECOMPUTE_NONE, &v->tape));
    model_forward(v->model, batch_view(g->batch), NULL, v->tape, &x);
out:
    return st;
}

static void close_variant(struct golden *g, struct variant *v)
{
    tape_free(g->dev, v->tape);
    model_free(v->model);
    adapter_table_free(v->table);
    adapter_free(v->adapter);
    weights_free(v->weights);
}

// The same weights, rounded to bf16, compute logits in f32 and in bf16, where the device computes
// in it.
static enum status check_bf16(struct golden *g, struct result *r)
{
    struct variant wide = {0}, narrow = {0};
    int rows = batch_tokens(g->batch);
    bool *same = test_keep(malloc((size_t)rows * sizeof *same));
    float *want = NULL;
    enum status st = ST_OK;
    r->bf16_most = 1.5e-2;
    if (json_object_get(g->info, "bf16_logits_rms")) r->bf16_most = fact(g, "bf16_logits_rms");
    for (int l = 0; l < g->config->n_layers; l++)
        if (g->config->layers[l].delta.n_heads > 0) r->bf16_most = 4.7e-2;
    if (!device_computes_in(g->dev, DT_BF16)) goto out;
    CHECK(open_variant(g, DT_F32, &wide));
    CHECK(open_variant(g, DT_BF16, &narrow));
    CHECK(mark_same_experts(g, wide.tape, narrow.tape, same, &r->bf16_flips));
    for (int i = 0; i < rows; i++) r->bf16_rows += same[i];
    CHECK(model_logits(g, wide.model, &want));
    st = check_logits(g, narrow.model, want, same, &r->bf16_logits, &r->bf16_rms);
out:
    close_variant(g, &wide);
    close_variant(g, &narrow);
    free(want);
    return st;
}

// Forward, loss and gradients of one loss type; gradients are left in the optimizer.
static enum status run_loss(struct golden *g, const char *name, double *ret_loss)
{
    bool gspo = strcmp(name, "gspo") == 0;
    struct loss_config config = {.sequence_level = gspo,
                                 .epsilon = fact(g, "eps_low"),
                                 .epsilon_high = fact(g, "eps_high"),
                                 .beta = fact(g, "beta"),
                                 .kl_estimator = KL_K3,
                                 .max_completion_length = g->completion};
    float logprobs[4096], old[4096], ref[4096], dlogprobs[4096];
    const float *all_old = value(g, "old_logprobs"), *all_ref = value(g, "ref_logprobs");
    struct update_stats stats = {0};
    void *x;
    enum status st;
    int type;
    CHECK(name_parse(loss_type_names, gspo ? "grpo" : name, &type));
    config.type = (enum loss_type)type;
    if (config.type == LOSS_CISPO) config.epsilon_high += 1; // the cap of the ratio itself
    for (int s = 0; s < g->n_seqs; s++)
        for (int i = g->first[s]; i < g->first[s + 1]; i++) {
            old[i] = all_old[s * g->completion + i - g->first[s]];
            ref[i] = all_ref[s * g->completion + i - g->first[s]];
        }
    optimizer_clear_grads(g->optimizer);
    model_forward(g->model, batch_view(g->batch), NULL, g->tape, &x);
    CHECK(backward_logprobs(g->backward, NULL, g->batch, x, g->targets, 1.0f, logprobs, NULL));
    struct loss_batch batch = {
        .n_seqs = g->n_seqs,
        .first = g->first,
        .logprobs = logprobs,
        .old_logprobs = old,
        .ref_logprobs = ref,
        .advantages = value(g, "advantages"),
        .step_seqs = g->n_seqs,
        .step_tokens = g->first[g->n_seqs],
    };
    loss_batch_compute(&config, &batch, &stats, dlogprobs);
    *ret_loss = stats.range[STAT_LOSS].sum;
    st = backward_run(g->backward, g->batch, g->tape,
                      &(struct backward_loss){.temperature = 1.0f, .dlogprobs = dlogprobs});
out:
    return st;
}

// How far an arena's entries are from the reference's.
struct distance {
    double worst, largest, squares;
    int64_t off, n;
    bool projected; // no entries: off is not known, squares are an estimate
};

// One of the reference's tensors of which only projections are kept, added up over those that are
// parts of it.
struct sums {
    const float *want;
    struct projection have;
};

static void compare_entries(struct distance *d, const struct place *p, const float *have,
                            const float *want, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        const double wanted = (double)want[place_of(p, i)],
                     difference = fabs((double)have[i] - wanted);
        widen(&d->largest, fabs(wanted));
        widen(&d->worst, difference);
        d->squares += difference * difference;
        if (!(difference <= 1e-5)) d->off++;
    }
}

// Of differences e, a sum with random signs has the mean square sum(e^2); of a single one, its
// size.
static void compare_sums(struct distance *d, const struct sums *s)
{
    for (int j = 0; j < GENERATED_SIGNS; j++) {
        const double difference = fabs(s->have.sum[j] - (double)s->want[j]);
        widen(&d->worst, difference);
        d->squares += difference * difference / GENERATED_SIGNS;
    }
    widen(&d->worst, fabs(sqrt(s->have.squares) - (double)s->want[GENERATED_SIGNS]));
}

// The arena (gradients, parameters) against the tensors "<prefix>NAME", or, where the folder has
// these, the row `row` of "projected.NAME".
static enum status compare_arena(struct golden *g, const struct weights *w, const char *prefix,
                                 int row, struct distance *ret)
{
    float *have = test_keep(malloc((size_t)w->n_elements * sizeof *have));
    struct sums *sums = calloc((size_t)w->n_tensors, sizeof *sums);
    const float *largest = value(g, "grad_largest");
    struct distance d = {.largest = largest ? (double)*largest : 0};
    int n_sums = 0, s;
    enum status st = ST_OK;
    device_copy_out(g->dev, have, w->base, (size_t)w->n_elements * sizeof *have);
    CHECK(device_sync(g->dev));
    for (int t = 0; t < w->n_tensors; t++) {
        const struct weight_tensor *tensor = &w->tensors[t];
        const float *mine = have + tensor->offset;
        struct place p;
        char name[220];
        if (tensor->is_buffer) continue; // not trained
        CHECK(find_place(g, prefix, w, t, &p));
        d.n += tensor->n;
        snprintf(name, sizeof name, "%s%s", prefix, p.name);
        const float *want = value(g, name);
        if (want) {
            compare_entries(&d, &p, mine, want, tensor->n);
            continue;
        }
        snprintf(name, sizeof name, "projected.%s", p.name);
        want = (const float *)value(g, name) + row * (GENERATED_SIGNS + 1);
        for (s = 0; s < n_sums && sums[s].want != want; s++)
            ;
        if (s == n_sums) {
            sums[n_sums++].want = want;
            projection_init(&sums[s].have, p.name);
        }
        for (int64_t i = 0; i < tensor->n; i++)
            projection_add(&sums[s].have, place_of(&p, i), (double)mine[i]);
    }
    for (s = 0; s < n_sums; s++) compare_sums(&d, &sums[s]);
    d.projected = n_sums > 0;
    *ret = d;
out:
    free(sums);
    return st;
}

static enum status compare_grads(struct golden *g, double *ret_max_rel)
{
    struct distance d;
    enum status st;
    CHECK(compare_arena(g, optimizer_grads(g->optimizer, 0), "grad.", 0, &d));
    *ret_max_rel = d.worst / d.largest;
out:
    return st;
}

// The only loss of an adapter's folder, and its gradients.
static enum status check_adapter_loss(struct golden *g, struct result *r)
{
    double loss, want = fact(g, "loss_dapo");
    enum status st;
    CHECK(run_loss(g, "dapo", &loss));
    r->losses[0] = fabs(loss - want) / fmax(fabs(want), 1.0);
    CHECK(compare_grads(g, &r->grads));
out:
    return st;
}

static enum status check_losses(struct golden *g, struct result *r)
{
    const json_t *want = json_object_get(g->info, "losses");
    enum status st = ST_OK;
    for (int i = 0; i < N_LOSSES; i++) {
        char key[64];
        double loss, norm;
        snprintf(key, sizeof key, "%s_grad_norm", loss_names[i]);
        CHECK(run_loss(g, loss_names[i], &loss));
        CHECK(optimizer_prepare(g->optimizer, &norm));
        double want_loss = json_number_value(json_object_get(want, loss_names[i]));
        double want_norm = json_number_value(json_object_get(want, key));
        // a loss is a mean of terms of size 1: below that, its own size says nothing about rounding
        r->losses[i] = fabs(loss - want_loss) / fmax(fabs(want_loss), 1.0);
        r->norms[i] = fabs(norm - want_norm) / want_norm;
        if (i == 0) CHECK(compare_grads(g, &r->grads));
    }
out:
    return st;
}

static const char *trained_loss(const struct golden *g)
{
    return g->adapter ? "dapo" : "grpo";
}

// The gradients of a loss once more, from a tape that keeps no more than each layer's input.
static enum status check_recompute(struct golden *g, bool *ret_same)
{
    const struct weights *grads = optimizer_grads(g->optimizer, 0);
    struct tape *whole = g->tape, *inputs = NULL;
    char *want = malloc(grads->bytes), *have = malloc(grads->bytes);
    const struct adapted *first = g->adapter ? &g->adapter->list[0] : NULL;
    const bool head_alone = first && first->role == ROLE_HEAD;
    // layer that was run again
    const int lowest = head_alone ? g->config->n_layers - 1 : first ? first->layer : 0;
    double loss, again;
    enum status st;
    CHECK(run_loss(g, trained_loss(g), &loss));
    device_copy_out(g->dev, want, grads->base, grads->bytes);
    CHECK(tape_new(g->model, whole->max_tokens, RECOMPUTE_LAYER, &inputs));
    g->tape = inputs;
    CHECK(run_loss(g, trained_loss(g), &again));
    device_copy_out(g->dev, have, grads->base, grads->bytes);
    CHECK(device_sync(g->dev));
    *ret_same = loss == again && memcmp(want, have, grads->bytes) == 0 && inputs->held == lowest &&
                (inputs->bytes < whole->bytes || g->config->n_layers == 1);
out:
    g->tape = whole;
    tape_free(g->dev, inputs);
    free(want);
    free(have);
    return st;
}

static enum status check_adamw(struct golden *g, struct result *r)
{
    const json_t *want = json_object_get(g->info, "adamw_losses"),
                 *norms = json_object_get(g->info, "adamw_grad_norms");
    double reference_norm;
    struct distance d;
    enum status st = ST_OK;
    r->adamw_losses = 0;
    for (int step = 0; step < 3; step++) {
        double loss, norm, reference = json_number_value(json_array_get(want, (size_t)step));
        CHECK(run_loss(g, trained_loss(g), &loss));
        CHECK(optimizer_prepare(g->optimizer, &norm));
        if (g->adapter) {
            reference_norm = json_number_value(json_array_get(norms, (size_t)step));
            // a step whose tokens are all clipped has none
            widen(&r->norms[0],
                  fabs(norm - reference_norm) / (reference_norm > 0 ? reference_norm : 1));
        }
        CHECK(optimizer_apply(g->optimizer, fact(g, "lr")));
        widen(&r->adamw_losses, fabs(loss - reference) / fmax(fabs(reference), 1.0));
    }
    CHECK(device_sync(g->dev));
    CHECK(compare_arena(g, g->adapter ? g->adapter->weights : g->weights, "after3.", 1, &d));
    r->after3_rms = sqrt(d.squares / (double)d.n);
    r->after3_share_off = d.projected ? -1 : (double)d.off / (double)d.n;
out:
    return st;
}

// The logits of base and adapter made one model; where the folder has none (an adapter of a head
// that is the embeddings too), that it is refused. The last check: the base is changed by it.
static enum status check_merged(struct golden *g, double *ret)
{
    enum status st;
    CHECK(adapter_load(g->adapter, g->dev, g->folder));
    if (!safetensors_find(g->values, "merged_logits")) {
        const bool refused = adapter_merge(g->adapter, g->weights, g->dev) == ST_UNSUPPORTED;
        return refused ? ST_OK : status_fail(ST_MISMATCH, "%s was merged", g->folder);
    }
    CHECK(adapter_merge(g->adapter, g->weights, g->dev));
    g->model->adapters = NULL;
    CHECK(check_logits(g, g->model, value(g, "merged_logits"), NULL, ret, NULL));
out:
    return st;
}

static enum status check_greedy(struct golden *g, bool *ret)
{
    const struct safetensors_entry *e = safetensors_find(g->values, "greedy");
    const int32_t *want = e->data;
    int n_new = (int)e->shape[0] - g->prompt;
    int32_t have[256];
    enum status st = greedy_decode(g->model, want, g->prompt, n_new, have);
    *ret = st == ST_OK && memcmp(have, want + g->prompt, (size_t)n_new * sizeof *have) == 0;
    return st;
}

static bool passed(const struct result *r)
{
    bool ok = r->logits <= 1e-4 && r->bf16_rms <= r->bf16_most && r->grads <= 1e-4 && r->greedy &&
              r->recompute && r->after3_rms < 2e-6 && r->after3_share_off <= 1e-3 &&
              r->adamw_losses <= r->adamw_most && r->merged <= 1e-4;
    for (int i = 0; i < N_LOSSES; i++) ok = ok && r->losses[i] <= 1e-5 && r->norms[i] <= 1e-4;
    return ok;
}

// Runs one folder and prints its line.
static bool run_folder(struct device *dev, const char *folder)
{
    const char *name = strrchr(folder, '/') ? strrchr(folder, '/') + 1 : folder;
    struct golden *g = test_keep(calloc(1, sizeof *g));
    struct result r = {.bf16_logits = -1, .bf16_rms = -1, .merged = -1};
    enum status st;
    g->dev = dev;
    g->folder = folder;
    CHECK(open_golden(g));
    r.adamw_most = g->config->quantization == QUANTIZATION_NONE ? 1e-5 : 1e-4;
    CHECK(check_logits(g, g->model, value(g, "logits"), NULL, &r.logits, NULL));
    CHECK(check_bf16(g, &r));
    CHECK(g->adapter ? check_adapter_loss(g, &r) : check_losses(g, &r));
    CHECK(check_recompute(g, &r.recompute));
    CHECK(check_greedy(g, &r.greedy));
    CHECK(fill_batch(g));
    CHECK(check_adamw(g, &r));
    if (g->adapter) CHECK(check_merged(g, &r.merged));
out:
    if (st != ST_OK) {
        printf("%s error=\"%s\" FAIL\n", name, status_message());
    } else {
        const char *const one[] = {"dapo"}, *const *names = g->adapter ? one : loss_names;
        const int n = g->adapter ? 1 : N_LOSSES;
        printf("%s logits_max_rel=%.2e greedy=%s", name, r.logits, r.greedy ? "match" : "mismatch");
        for (int i = 0; i < n; i++) printf(" loss_%s_rel=%.2e", names[i], r.losses[i]);
        for (int i = 0; i < n; i++) printf(" norm_%s_rel=%.2e", names[i], r.norms[i]);
        if (r.merged >= 0) printf(" merged_max_rel=%.2e", r.merged);
        printf(" recompute=%s", r.recompute ? "same" : "differs");
        if (r.bf16_logits >= 0)
            printf(" bf16_logits_max_rel=%.2e bf16_logits_rms=%.2e", r.bf16_logits, r.bf16_rms);
        if (r.bf16_flips > 0)
            printf(" bf16_expert_flips=%d bf16_rows=%d", r.bf16_flips, r.bf16_rows);
        printf(" adamw_loss_rel=%.2e grads_max_rel=%.2e after3_rms=%.2e", r.adamw_losses, r.grads,
               r.after3_rms);
        if (r.after3_share_off >= 0) printf(" after3_share_off=%.2e", r.after3_share_off);
        printf(" %s\n", passed(&r) ? "PASS" : "FAIL");
    }
    fflush(stdout);
    close_golden(g);
    return st == ST_OK && passed(&r);
}

// ---- the two ways to run ------------------------------------------------------------------------
// Model folders of `root`, sorted; at most `max`.
static int list_folders(const char *root, const char **ret, int max)
{
    struct dirent **list = NULL;
    int n = 0;
    const int all = scandir(root, &list, NULL, alphasort);
    for (int i = 0; i < all; i++) {
        const char *folder = test_path(root, list[i]->d_name);
        if (list[i]->d_name[0] != '.' && file_exists(test_path(folder, "golden.json")) && n < max)
            ret[n++] = folder;
        free(list[i]);
    }
    free(list);
    return n;
}

static void test_folder_matches(void **state)
{
    struct device *dev;
    assert_ok(device_open("cpu", &dev));
    bool ok = run_folder(dev, *state);
    device_free(dev);
    assert_true(ok);
}

int main(int argc, char **argv)
{
    const char *folders[256];
    const char *spec = "auto";
    struct device *dev;
    int failed = 0, n = 0;
    if (argc == 4 && strcmp(argv[1], "--device") == 0) {
        spec = argv[2];
        n = list_folders(argv[3], folders, 256);
    } else if (argc == 1) {
        n = list_folders(test_golden(""), folders, 128);
        n += list_folders(test_path(test_golden(""), "../golden-lora"), folders + n, 128);
    } else {
        fprintf(stderr, "usage: %s [--device auto|cpu|cuda:N DIR]\n", argv[0]);
        return 2;
    }
    if (n == 0) {
        fprintf(stderr, "%s: no folder with a golden.json\n", argc == 1 ? "tests" : argv[3]);
        return 1;
    }
    if (argc == 1) {
        for (int i = 0; i < n; i++)
            test_list(i, (struct CMUnitTest){folders[i], test_folder_matches, NULL, NULL,
                                             (void *)folders[i]});
        return test_main();
    }
    if (device_open(spec, &dev) != ST_OK) {
        fprintf(stderr, "%s\n", status_message());
        return 1;
    }
    for (int i = 0; i < n; i++) failed += !run_folder(dev, folders[i]);
    device_free(dev);
    return failed > 0;
}
