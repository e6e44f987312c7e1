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
 * noise. On a GPU the logits are also computed in bf16, and compared with those that f32 computes
 * from the same rounded weights (to round weights is no kernel's error, and alone takes PEFT's
 * logits of llama3-r4-qv 2.5e-2 away): 1.5e-2 root mean square, where PyTorch has 1.1e-2 to 1.2e-2;
 * 4.7e-2 where states go from row to row, which is what PyTorch has for qwen35. The largest
 * difference is printed only: it follows the luck of single rows. Tokens whose choice of experts
 * hangs on a rounding are counted and left out. */
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/names.h"
#include "common/model/model.h"
#include "common/model/safetensors.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "trainer/learn/backward.h"
#include "trainer/learn/loss.h"
#include "trainer/learn/optimizer.h"
#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_LOSSES 6
static const char *const loss_names[N_LOSSES] = {"grpo",    "bnpo", "dapo",
                                                 "dr_grpo", "gspo", "cispo"};

struct result {
    double bf16_rms, bf16_logits; // -1: not computed; over bf16_rows rows
    double bf16_most;             // of bf16_rms
    int bf16_rows, bf16_flips;    // flips: tokens that went to other experts than in f32
    double logits, losses[N_LOSSES], norms[N_LOSSES], grads, after3_rms, after3_share_off,
        adamw_losses;
    double merged; // logits of base and adapter as one model; -1: there is no adapter
    bool greedy;
    bool recompute; // gradients with layers run again are the same bits
};

struct golden { // one folder, opened
    struct device *dev;
    char *folder, *model_folder; // an adapter's, and its base's; or one folder
    json_t *facts, *base_facts;  // base_*: NULL where there is no adapter
    struct safetensors *values, *base_values;
    struct model_config *config;
    struct weights *weights, *frozen; // frozen: with an adapter, the base's gradients: none
    void *arena;
    struct adapter *adapter; // NULL: none
    void *adapter_arena;
    struct adapter_table *table;
    struct model *model;
    struct batch *batch;
    struct tape *tape;
    struct optimizer *optimizer;
    struct backward *backward;
    int n_seqs, prompt, completion, first[65];
    int32_t targets[4096];
    float *stored; // see stored_value()
};

static const void *value(const struct golden *g, const char *name)
{
    const struct safetensors_entry *e = safetensors_find(g->values, name);
    if (!e && g->base_values) e = safetensors_find(g->base_values, name);
    return e ? e->data : NULL;
}

// A tensor that the folder has in one with others, as the table has it; the golden's to free.
static const float *stored_value(struct golden *g, const char *prefix,
                                 const struct weight_tensor *t)
{
    char name[220];
    const struct stored_in *s = &t->stored;
    const int64_t cols = t->n_dims == 2 ? t->shape[1] : 1;
    snprintf(name, sizeof name, "%s%s", prefix, s->name);
    const float *whole = value(g, name);
    g->stored = realloc(g->stored, (size_t)t->n * sizeof *g->stored);
    for (int64_t i = 0; whole && i < t->n; i++)
        g->stored[i] = whole[s->first + i / cols * s->row_step + i % cols * s->col_step];
    return whole ? g->stored : NULL;
}

// "<prefix>NAME" of a tensor, until the next is asked for. The reference keeps a mixture's experts
// in two tensors a layer, one expert after the other, as the arena does: there it is a part of one
// of those.
static const float *tensor_value(struct golden *g, const char *prefix, const struct weights *w,
                                 int t)
{
    char name[220];
    const struct weight_tensor *tensor = &w->tensors[t];
    if (tensor->stored.n_dims) return stored_value(g, prefix, tensor);
    snprintf(name, sizeof name, "%s%s", prefix, tensor->name);
    const float *whole = value(g, name);
    if (whole) return whole;
    const char *part = tensor->role == ROLE_ROUTER            ? "gate.weight"
                       : tensor->role == ROLE_EXPERTS_GATE_UP ? "experts.gate_up_proj"
                                                              : "experts.down_proj";
    snprintf(name, sizeof name, "%smodel.layers.%d.mlp.%s", prefix, tensor->layer, part);
    while (t > 0 && w->tensors[t - 1].role == tensor->role &&
           w->tensors[t - 1].layer == tensor->layer)
        t--;
    whole = value(g, name);
    return whole ? whole + (tensor->offset - w->tensors[t].offset) : NULL;
}

static double fact(const struct golden *g, const char *key)
{
    const json_t *x = json_object_get(g->facts, key);
    return json_number_value(x ? x : json_object_get(g->base_facts, key));
}

// ---- opening ------------------------------------------------------------------------------------
static enum status open_values(const char *folder, json_t **ret_facts,
                               struct safetensors **ret_values)
{
    char *json = path_join(folder, "golden.json"),
         *tensors = path_join(folder, "golden.safetensors");
    enum status st;
    CHECK(json_read_file(json, 1 << 20, ret_facts));
    CHECK(safetensors_open_file(tensors, ret_values));
out:
    free(json);
    free(tensors);
    return st;
}

static enum status open_files(struct golden *g)
{
    enum status st;
    const char *base;
    CHECK(open_values(g->folder, &g->facts, &g->values));
    base = json_string_value(json_object_get(g->facts, "base"));
    if (base) {
        char beside[64];
        snprintf(beside, sizeof beside, "../../golden/%s", base);
        g->model_folder = path_join(g->folder, beside);
        CHECK(open_values(g->model_folder, &g->base_facts, &g->base_values));
    } else {
        g->model_folder = path_join(g->folder, "");
    }
    CHECK(model_config_load(g->model_folder, &g->config));
    g->n_seqs = (int)fact(g, "batch");
    g->prompt = (int)fact(g, "prompt_len");
    g->completion = (int)fact(g, "completion_len");
out:
    return st;
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
        int n = 0, seq;
        while (n < g->completion && mask[s * g->completion + n] != 0) n++;
        CHECK(batch_add_packed(g->batch, ids + s * width, g->prompt + n, -1, &seq));
        for (int i = 0; i < n; i++) {
            CHECK(batch_want_row(g->batch, batch_first_row(g->batch, seq) + g->prompt - 1 + i));
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
static enum status load_weights(struct golden *g, enum dtype dt, struct weights **ret,
                                void **ret_arena)
{
    enum status st;
    CHECK(weights_plan(g->config, dt, ret));
    CHECK(device_alloc(g->dev, (*ret)->bytes, ret_arena));
    device_fill(g->dev, *ret_arena, 0, (*ret)->bytes);
    weights_bind(*ret, *ret_arena);
    CHECK(weights_load(*ret, g->dev, g->model_folder));
out:
    return st;
}

// The folder's adapter likewise, and a table with it alone.
static enum status load_adapter(struct golden *g, const struct weights *base, struct adapter **ret,
                                void **ret_arena, struct adapter_table **ret_table)
{
    struct adapter_config *config;
    enum status st;
    CHECK(adapter_config_load(g->folder, &config));
    CHECK(adapter_new(config, base, base->dt, ret));
    CHECK(device_alloc(g->dev, (*ret)->weights->bytes, ret_arena));
    device_fill(g->dev, *ret_arena, 0, (*ret)->weights->bytes);
    weights_bind((*ret)->weights, *ret_arena);
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
    CHECK(load_weights(g, DT_F32, &g->weights, &g->arena));
    // logits of 16 rows at a time, so that the chunked head is what is tested
    // as many positions as are used: some rope kinds choose by that
    CHECK(model_new(g->dev, g->config, g->weights, max_tokens, 16, longest_sequence(g), &g->model));
    CHECK(batch_new(g->dev, max_tokens, g->n_seqs, 16, max_tokens, &g->batch));
    if (g->base_facts) {
        CHECK(load_adapter(g, g->weights, &g->adapter, &g->adapter_arena, &g->table));
        model_use_adapters(g->model, g->table);
        batch_use_adapter(g->batch, 0);
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
    free(g->stored);
    model_free(g->model);
    adapter_table_free(g->table);
    adapter_free(g->adapter);
    device_release(g->dev, g->adapter_arena);
    weights_free(g->frozen);
    weights_free(g->weights);
    device_release(g->dev, g->arena);
    model_config_free(g->config);
    safetensors_free(g->values);
    safetensors_free(g->base_values);
    json_decref(g->facts);
    json_decref(g->base_facts);
    free(g->model_folder);
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
    float *all = calloc((size_t)(g->n_seqs * width) * (size_t)vocab, sizeof *all);
    int32_t *device_row = NULL;
    void *x;
    enum status st = ST_OK;
    CHECK(device_alloc(g->dev, sizeof *device_row, (void **)&device_row));
    model_forward(model, batch_view(g->batch), NULL, NULL, &x);
    for (int s = 0; s < g->n_seqs; s++)
        for (int i = 0; i < g->prompt + g->first[s + 1] - g->first[s]; i++) {
            int32_t index = batch_first_row(g->batch, s) + i;
            device_copy_in(g->dev, device_row, &index, sizeof index);
            model_head(model, x, device_row, 0, 1);
            device_copy_out(g->dev, all + (size_t)(s * width + i) * (size_t)vocab, model->logits,
                            (size_t)vocab * sizeof *all);
            CHECK(device_sync(g->dev));
        }
    *ret = all;
    all = NULL;
out:
    device_release(g->dev, device_row);
    free(all);
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
            if (use_row && !use_row[batch_first_row(g->batch, s) + i]) continue;
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
    int32_t *a = malloc((size_t)(rows * most) * sizeof *a + 1);
    int32_t *b = malloc((size_t)(rows * most) * sizeof *b + 1);
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
            int first = batch_first_row(g->batch, s),
                end = s + 1 < g->n_seqs ? batch_first_row(g->batch, s + 1) : rows;
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
    free(a);
    free(b);
    return st;
}

struct variant { // the folder's model, its weights rounded to bf16
    struct weights *weights;
    void *arena, *adapter_arena;
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
    CHECK(load_weights(g, dt, &v->weights, &v->arena));
    if (g->adapter) CHECK(load_adapter(g, v->weights, &v->adapter, &v->adapter_arena, &v->table));
    if (dt == DT_F32) CHECK(round_weights(g, v->weights));
    if (dt == DT_F32 && v->adapter) CHECK(round_weights(g, v->adapter->weights));
    CHECK(model_new(g->dev, g->config, v->weights, g->model->max_tokens, 16, longest_sequence(g),
                    &v->model));
    model_use_adapters(v->model, v->table);
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
    device_release(g->dev, v->adapter_arena);
    device_release(g->dev, v->arena);
    weights_free(v->weights);
}

// The same weights, rounded to bf16, compute logits in f32 and in bf16, where the device computes
// in it.
static enum status check_bf16(struct golden *g, struct result *r)
{
    struct variant wide = {0}, narrow = {0};
    int rows = batch_tokens(g->batch);
    bool *same = malloc((size_t)rows * sizeof *same);
    float *want = NULL;
    enum status st = ST_OK;
    r->bf16_most = 1.5e-2;
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
    free(same);
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
    struct loss_stats stats = {0};
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
    CHECK(backward_logprobs(g->backward, g->batch, x, g->targets, 1.0f, logprobs, NULL));
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
    loss_compute(&config, &batch, &stats, dlogprobs);
    *ret_loss = stats.loss;
    st = backward_run(g->backward, g->batch, g->tape, dlogprobs, NULL, 1.0f);
out:
    return st;
}

// Worst difference of an arena (gradients, parameters) from the tensors "<prefix>NAME".
static enum status compare_arena(struct golden *g, const struct weights *w, const char *prefix,
                                 double *ret_max_rel, double *ret_rms, double *ret_share_off)
{
    float *have = malloc((size_t)w->n_elements * sizeof *have);
    double worst = 0, largest = 0, squares = 0;
    int64_t off = 0, n = 0;
    enum status st = ST_OK;
    device_copy_out(g->dev, have, w->base, (size_t)w->n_elements * sizeof *have);
    CHECK(device_sync(g->dev));
    for (int t = 0; t < w->n_tensors; t++) {
        if (w->tensors[t].is_buffer) continue; // not trained
        const float *want = tensor_value(g, prefix, w, t);
        if (!want) {
            st = status_fail(ST_NOT_FOUND, "%s: golden.safetensors has no %s%s", g->folder, prefix,
                             w->tensors[t].name);
            goto out;
        }
        for (int64_t i = 0; i < w->tensors[t].n; i++, n++) {
            double difference = fabs((double)have[w->tensors[t].offset + i] - (double)want[i]);
            widen(&largest, fabs((double)want[i]));
            widen(&worst, difference);
            squares += difference * difference;
            if (!(difference <= 1e-5)) off++;
        }
    }
    if (ret_max_rel) *ret_max_rel = worst / largest;
    if (ret_rms) *ret_rms = sqrt(squares / (double)n);
    if (ret_share_off) *ret_share_off = (double)off / (double)n;
out:
    free(have);
    return st;
}

// The only loss of an adapter's folder, and its gradients.
static enum status check_adapter_loss(struct golden *g, struct result *r)
{
    double loss, want = fact(g, "loss_dapo");
    enum status st;
    CHECK(run_loss(g, "dapo", &loss));
    r->losses[0] = fabs(loss - want) / fmax(fabs(want), 1.0);
    CHECK(compare_arena(g, optimizer_grads(g->optimizer, 0), "grad.", &r->grads, NULL, NULL));
out:
    return st;
}

static enum status check_losses(struct golden *g, struct result *r)
{
    const json_t *want = json_object_get(g->facts, "losses");
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
        if (i == 0)
            CHECK(
                compare_arena(g, optimizer_grads(g->optimizer, 0), "grad.", &r->grads, NULL, NULL));
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
    const bool head_alone = g->adapter && g->adapter->list[0].role == ROLE_HEAD;
    const int lowest = head_alone ? g->config->n_layers - 1 : 0; // layer that was run again
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
                inputs->bytes < whole->bytes;
out:
    g->tape = whole;
    tape_free(g->dev, inputs);
    free(want);
    free(have);
    return st;
}

static enum status check_adamw(struct golden *g, struct result *r)
{
    const json_t *want = json_object_get(g->facts, "adamw_losses"),
                 *norms = json_object_get(g->facts, "adamw_grad_norms");
    double reference_norm;
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
    st = compare_arena(g, g->adapter ? g->adapter->weights : g->weights, "after3.", NULL,
                       &r->after3_rms, &r->after3_share_off);
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
    model_use_adapters(g->model, NULL);
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
              r->adamw_losses <= 1e-5 && r->merged <= 1e-4;
    for (int i = 0; i < N_LOSSES; i++) ok = ok && r->losses[i] <= 1e-5 && r->norms[i] <= 1e-4;
    return ok;
}

// Runs one folder and prints its line.
static bool run_folder(struct device *dev, const char *folder)
{
    const char *name = strrchr(folder, '/') ? strrchr(folder, '/') + 1 : folder;
    struct golden *g = calloc(1, sizeof *g);
    struct result r = {.bf16_logits = -1, .bf16_rms = -1, .merged = -1};
    enum status st;
    g->dev = dev;
    g->folder = (char *)folder;
    CHECK(open_golden(g));
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
        printf(" adamw_loss_rel=%.2e grads_max_rel=%.2e after3_rms=%.2e after3_share_off=%.2e %s\n",
               r.adamw_losses, r.grads, r.after3_rms, r.after3_share_off,
               passed(&r) ? "PASS" : "FAIL");
    }
    fflush(stdout);
    close_golden(g);
    free(g);
    return st == ST_OK && passed(&r);
}

// ---- the two ways to run ------------------------------------------------------------------------
static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

// Model folders of `root`, sorted; at most `max`.
static int list_folders(const char *root, char **ret, int max)
{
    int n = 0;
    DIR *dir = opendir(root);
    for (struct dirent *e = dir ? readdir(dir) : NULL; e; e = readdir(dir)) {
        char *folder = path_join(root, e->d_name), *json = path_join(folder, "golden.json");
        if (e->d_name[0] != '.' && file_exists(json) && n < max) ret[n++] = strdup(folder);
        free(json);
        free(folder);
    }
    if (dir) closedir(dir);
    qsort(ret, (size_t)n, sizeof *ret, compare_names);
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
    char *folders[256];
    const char *spec = "auto";
    struct device *dev;
    int failed = 0, n = 0;
    if (argc == 4 && strcmp(argv[1], "--device") == 0) {
        spec = argv[2];
        n = list_folders(argv[3], folders, 256);
    } else if (argc == 1) {
        n = list_folders(test_path(test_root(), "tests/golden"), folders, 128);
        n += list_folders(test_path(test_root(), "tests/golden-lora"), folders + n, 128);
    } else {
        fprintf(stderr, "usage: %s [--device auto|cpu|cuda:N DIR]\n", argv[0]);
        return 2;
    }
    if (n == 0) {
        fprintf(stderr, "%s: no folder with a golden.json\n", argc == 1 ? "tests" : argv[3]);
        return 1;
    }
    if (argc == 1) {
        struct CMUnitTest *tests = calloc((size_t)n, sizeof *tests);
        for (int i = 0; i < n; i++)
            tests[i] = (struct CMUnitTest){folders[i], test_folder_matches, NULL, NULL, folders[i]};
        return _cmocka_run_group_tests("golden", tests, (size_t)n, NULL, NULL);
    }
    if (device_open(spec, &dev) != ST_OK) {
        fprintf(stderr, "%s\n", status_message());
        return 1;
    }
    for (int i = 0; i < n; i++) failed += !run_folder(dev, folders[i]);
    device_free(dev);
    return failed > 0;
}
