/* adapter.c: plans an adapter's arena over the base's table of tensors, reads and writes PEFT's
 * folder, merges; and the table of those that a forward pass computes with. One thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/adapter.h"
#include "common/base/file.h"
#include "common/base/hash.h"
#include "common/base/json.h"
#include "common/base/rng.h"
#include "common/model/safetensors.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TENSORS_FILE "adapter_model.safetensors"
#define PREFIX       "base_model.model."
#define MAX_STATE    ((size_t)1 << 26)

// ---- the plan -----------------------------------------------------------------------------------
#define BIT(role) ((unsigned __int128)1 << ROLE_##role)

enum tensor_role adapter_role(const struct weights *base, int tensor)
{
    const unsigned __int128 adapted = BIT(QKV) | BIT(Q_A) | BIT(Q_B) | BIT(Q) | BIT(KV_A) | BIT(O) |
                                      BIT(DELTA_IN) | BIT(DELTA_OUT) | BIT(GATE_UP) | BIT(DOWN) |
                                      BIT(EXPERTS_IN) | BIT(EXPERTS_OUT) | BIT(SHARED_GATE_UP) |
                                      BIT(SHARED_DOWN) | BIT(LAYER_INPUT) | BIT(LAYER_GATE) |
                                      BIT(LAYER_OUT) | BIT(HEAD);
    const enum tensor_role role = base->tensors[tensor].role;
    if (role == ROLE_EMBED && base->config->tie_embeddings) return ROLE_HEAD;
    return role < ROLE_COUNT && adapted >> role & 1 ? role : ROLE_COUNT;
}

int adapter_nth(const struct weights *base, int i)
{
    return (i + 1) % base->n_tensors; // embeddings, which are the first, last
}

void adapter_module(const struct weights *base, int tensor, char *ret, size_t size)
{
    const bool head = adapter_role(base, tensor) == ROLE_HEAD;
    snprintf(ret, size, "%s",
             head ? base->config->family->names[ROLE_HEAD] : base->tensors[tensor].name);
    char *end = strrchr(ret, '.');
    if (end) *end = '\0';
}

static enum status name_factor(struct weight_tensor *t, const char *module, const char *factor)
{
    const int n = snprintf(t->name, sizeof t->name, PREFIX "%s.lora_%s.weight", module, factor);
    if (n > 0 && (size_t)n < sizeof t->name) return ST_OK;
    return status_fail(ST_UNSUPPORTED, "%s: the name is too long for an adapter", module);
}

// What makes keys and values of latents is multiplied into queries and results instead (ops.h,
// struct latent_shape), where an adapter has no place: a list must not name it. An expression and
// "all-linear" mean what can be adapted; factors of it in a folder are refused like any other's.
static enum status check_left_alone(const struct adapter *a, int tensor)
{
    const struct weight_tensor *t = &a->base->tensors[tensor];
    const bool listed = json_is_array(json_object_get(a->config->source, "target_modules"));
    char module[sizeof t->name];
    int rank = 0;
    float scale;
    enum status st = ST_OK;
    if (t->role != ROLE_KV_B || !listed) return ST_OK;
    adapter_module(a->base, tensor, module, sizeof module);
    st = adapter_config_match(a->config, module, false, &rank, &scale);
    if (st == ST_OK && rank > 0)
        st = status_fail(ST_UNSUPPORTED,
                         "target_modules: adapters of kv_b_proj (%s) are not supported; name "
                         "others of latent attention: q_proj, q_a_proj, q_b_proj, "
                         "kv_a_proj_with_mqa, o_proj",
                         module);
    return st;
}

// What this rank has of a matrix's two factors: A of its columns and B of its rows. Of a matrix
// whose rows are cut all ranks have A, of one whose columns are cut B, and each computes a part of
// its gradient; B A x of such a column's cut is a part of the sum that its layer takes.
static void cut_factors(const struct weight_tensor *t, int n_ranks, struct weight_tensor *fa,
                        struct weight_tensor *fb)
{
    const bool by_columns = t->shape[1] < t->slice.whole[1],
               by_rows = t->shape[0] < t->slice.whole[0];
    const int rank = (int)fa->shape[0];
    fa->slice = (struct tensor_slice){.whole = {rank, t->slice.whole[1]},
                                      .n_runs = 1,
                                      .runs = {{0, rank, by_columns ? 1 : n_ranks}},
                                      .first_col = t->slice.first_col};
    fb->slice = t->slice;
    fb->slice.whole[1] = rank;
    fb->slice.first_col = 0;
    if (by_columns) fb->slice.runs[0].replicas = n_ranks; // its one run
    fa->in_parts = by_rows || t->in_parts;
    fb->in_parts = by_columns || t->in_parts;
}

// Adds tensor i of the base and its two factors, where it is adapted.
static enum status add_matrix(struct adapter *a, int i, struct weight_tensor *factors)
{
    const struct weight_tensor *t = &a->base->tensors[i];
    const enum tensor_role role = adapter_role(a->base, i);
    struct adapted m = {.role = role, .layer = t->layer, .base = i};
    struct weight_tensor *fa = &factors[2 * a->n], *fb = fa + 1;
    char module[sizeof t->name];
    enum status st = ST_OK;
    if (role == ROLE_COUNT) {
        st = check_left_alone(a, i);
        goto out;
    }
    adapter_module(a->base, i, module, sizeof module);
    CHECK(adapter_config_match(a->config, module, role == ROLE_HEAD, &m.rank, &m.scale));
    if (m.rank == 0) goto out;
    if (t->role == ROLE_EMBED && a->config->ties)
        FAIL(ST_UNSUPPORTED,
             "ensure_weight_tying is set, and %s is the embeddings too: adapters of embeddings are "
             "not supported",
             module);
    while (!weights_begins_block(a->base, i - m.part)) m.part++;
    m.a = 2 * a->n;
    m.b = m.a + 1;
    *fa = (struct weight_tensor){.layer = t->layer, .n_dims = 2, .shape = {m.rank, t->shape[1]}};
    *fb = (struct weight_tensor){.layer = t->layer, .n_dims = 2, .shape = {t->shape[0], m.rank}};
    cut_factors(t, a->base->config->shard.size, fa, fb);
    CHECK(name_factor(fa, module, "A"));
    CHECK(name_factor(fb, module, "B"));
    a->list[a->n++] = m;
    if (m.rank > a->max_rank) a->max_rank = m.rank;
out:
    return st;
}

static enum status nothing_matches(const struct adapter *a)
{
    char *targets = json_dumps(json_object_get(a->config->source, "target_modules"),
                               JSON_ENCODE_ANY | JSON_COMPACT);
    char module[sizeof a->base->tensors->name] = "";
    for (int i = a->base->n_tensors - 1; i >= 0; i--)
        if (adapter_role(a->base, adapter_nth(a->base, i)) != ROLE_COUNT)
            adapter_module(a->base, adapter_nth(a->base, i), module, sizeof module);
    enum status st = status_fail(ST_INVALID,
                                 "target_modules %s names no matrix that can be adapted: these "
                                 "are attention's, the plain MLP's and the head, like %s",
                                 CUT(targets ? targets : "", 300), module);
    free(targets);
    return st;
}

enum status adapter_new(struct adapter_config *config, const struct weights *base, enum dtype dt,
                        struct adapter **ret)
{
    enum status st = ST_OK;
    struct weight_tensor *factors = NULL;
    struct adapter *a = calloc(1, sizeof *a);
    if (!a) {
        adapter_config_free(config);
        return status_fail(ST_NO_MEMORY, "no memory for an adapter");
    }
    a->config = config;
    a->base = base;
    a->list = calloc((size_t)base->n_tensors, sizeof *a->list);
    factors = calloc(2 * (size_t)base->n_tensors, sizeof *factors);
    if (!a->list || !factors) FAIL(ST_NO_MEMORY, "no memory for an adapter");
    for (int i = 0; i < base->n_tensors; i++) CHECK(add_matrix(a, adapter_nth(base, i), factors));
    if (a->n == 0) CHECK(nothing_matches(a));
    st = weights_plan_list(base->config, dt, factors, 2 * a->n, &a->weights);
    factors = NULL;
    if (st != ST_OK) goto out;
    a->weights->comm = base->comm;
    *ret = TAKE_PTR(a);
out:
    free(factors);
    adapter_free(a);
    return st;
}

void adapter_free(struct adapter *a)
{
    if (!a) return;
    weights_free(a->weights);
    adapter_config_free(a->config);
    free(a->list);
    free(a);
}

// ---- PEFT's folder ------------------------------------------------------------------------------
// Whether it is the head's own matrix, as large as here, which PEFT saves beside its adapter. It is
// frozen there, and not read.
static bool is_head(const struct adapter *a, const struct safetensors_entry *e)
{
    const struct adapted *last = &a->list[a->n - 1];
    const int64_t *shape = a->base->tensors[last->base].slice.whole;
    char module[sizeof a->base->tensors->name], name[sizeof module + sizeof PREFIX + 32];
    if (last->role != ROLE_HEAD) return false;
    adapter_module(a->base, last->base, module, sizeof module);
    snprintf(name, sizeof name, PREFIX "%s.base_layer.weight", module);
    return strcmp(e->name, name) == 0 && e->n_dims == 2 && e->shape[0] == shape[0] &&
           e->shape[1] == shape[1];
}

static enum status check_extra(const struct adapter *a, const struct safetensors *set)
{
    for (int i = 0; i < safetensors_count(set); i++) {
        const struct safetensors_entry *e = safetensors_at(set, i);
        if (weights_find(a->weights, e->name) || is_head(a, e)) continue;
        return status_fail(ST_UNSUPPORTED,
                           "%s: tensor %s is none that target_modules calls for, or of a module "
                           "that cannot be adapted (embeddings, router, experts), or whose own "
                           "matrix is another here",
                           e->file, e->name);
    }
    return ST_OK;
}

static enum status open_tensors(const struct adapter *a, const char *folder,
                                struct safetensors **ret)
{
    enum status st;
    struct safetensors *set = NULL;
    char path[PATH_ROOM];
    CHECK(path_put(path, folder, TENSORS_FILE));
    CHECK(safetensors_open_file(path, &set));
    CHECK(check_extra(a, set));
    CHECK(weights_check_set(a->weights, set, path));
    *ret = TAKE_PTR(set);
out:
    safetensors_free(set);
    return st;
}

enum status adapter_load(const struct adapter *a, struct device *dev, const char *folder)
{
    struct safetensors *set = NULL;
    enum status st = open_tensors(a, folder, &set);
    if (st == ST_OK) st = weights_load_set(a->weights, dev, set, folder);
    safetensors_free(set);
    return st;
}

bool adapter_changes(const struct adapter *a, enum tensor_role role)
{
    for (int i = 0; i < a->n; i++)
        if (a->list[i].role == role) return true;
    return false;
}

bool adapter_same(const struct adapter *a, const struct adapter *b)
{
    bool same = a->n == b->n;
    for (int i = 0; same && i < a->n; i++)
        same = a->list[i].base == b->list[i].base && a->list[i].rank == b->list[i].rank &&
               a->list[i].scale == b->list[i].scale;
    return same;
}

enum status adapter_check(const struct adapter *a, const char *folder)
{
    enum status st;
    struct safetensors *set = NULL;
    struct adapter_config *config = NULL;
    struct adapter *other = NULL;
    CHECK(adapter_config_load(folder, &config));
    CHECK(adapter_new(config, a->base, a->weights->dt, &other));
    if (!adapter_same(a, other))
        FAIL(ST_MISMATCH,
             "%s has other targets, ranks or scales than the adapter that is to "
             "take its weights: give that one those of its adapter_config.json",
             folder);
    st = open_tensors(a, folder, &set);
out:
    safetensors_free(set);
    adapter_free(other);
    return st;
}

enum status adapter_save(const struct adapter *a, struct device *dev, const char *folder,
                         enum dtype as)
{
    enum status st = ST_OK;
    char path[PATH_ROOM];
    CHECK(path_put(path, folder, ADAPTER_CONFIG_FILE));
    CHECK(weights_save_as(a->weights, dev, folder, TENSORS_FILE, as));
    CHECK(json_write_file(path, 0644, a->config->source));
out:
    return st;
}

// ---- values -------------------------------------------------------------------------------------
// A tensor as f32 in host memory, the caller's to free.
static enum status read_tensor(const struct weights *w, struct device *dev, int tensor, float **ret)
{
    float *x = malloc((size_t)w->tensors[tensor].n * sizeof *x);
    if (!x) return status_fail(ST_NO_MEMORY, "no memory for tensor %s", w->tensors[tensor].name);
    enum status st = weights_read(w, dev, tensor, x);
    if (st == ST_OK)
        *ret = x;
    else
        free(x);
    return st;
}

enum status adapter_init(const struct adapter *a, struct device *dev, uint64_t seed)
{
    const struct weights *w = a->weights;
    enum status st = ST_OK;
    device_fill(dev, w->base, 0, (size_t)w->n_elements * dtype_size(w->dt));
    for (int i = 0; i < a->n && st == ST_OK; i++) {
        const struct weight_tensor *t = &w->tensors[a->list[i].a];
        const int64_t all = t->slice.whole[0] * t->slice.whole[1];
        const float bound = 1.0f / sqrtf((float)t->slice.whole[1]);
        float *x = malloc((size_t)(all + t->n) * sizeof *x);
        struct rng rng;
        if (!x) return status_fail(ST_NO_MEMORY, "no memory for tensor %s", t->name);
        rng_init(&rng, seed, (uint64_t)i);
        for (int64_t j = 0; j < all; j++) x[j] = bound * (2 * rng_uniform(&rng) - 1);
        shard_take(t, x, sizeof *x, x + all);
        st = weights_write(w, dev, a->list[i].a, x + all);
        free(x);
    }
    return st;
}

// w (rows, cols) += scale * b (rows, rank) a (rank, cols)
static void add_product(float *w, const float *a, const float *b, int64_t rows, int64_t cols,
                        const struct adapted *m)
{
#pragma omp parallel for
    for (int64_t i = 0; i < rows; i++)
        for (int j = 0; j < m->rank; j++) {
            const float x = m->scale * b[i * m->rank + j];
            for (int64_t c = 0; c < cols; c++) w[i * cols + c] += x * a[j * cols + c];
        }
}

enum status adapter_merge(const struct adapter *a, const struct weights *w, struct device *dev)
{
    enum status st = ST_OK;
    if (w->config->tie_embeddings && adapter_changes(a, ROLE_HEAD))
        return status_fail(ST_UNSUPPORTED,
                           "the adapter changes the head, whose matrix is the embeddings too, and "
                           "not these: save the model with tie_word_embeddings false first, or "
                           "load the adapter beside it");
    for (int i = 0; i < a->n && st == ST_OK; i++) {
        const struct adapted *m = &a->list[i];
        const struct weight_tensor *t = &w->tensors[m->base];
        float *matrix = NULL, *fa = NULL, *fb = NULL;
        st = read_tensor(w, dev, m->base, &matrix);
        if (st == ST_OK) st = read_tensor(a->weights, dev, m->a, &fa);
        if (st == ST_OK) st = read_tensor(a->weights, dev, m->b, &fb);
        if (st == ST_OK) {
            add_product(matrix, fa, fb, t->shape[0], t->shape[1], m);
            st = weights_write(w, dev, m->base, matrix);
        }
        free(matrix);
        free(fa);
        free(fb);
    }
    return st;
}

// ---- what it is trained on ----------------------------------------------------------------------

json_t *adapter_base(const char *folder, uint64_t version, uint64_t updates, enum dtype dt,
                     int shards, const uint64_t *sums, size_t n)
{
    uint64_t all = 0;
    char checksum[40];
    for (size_t i = 0; i < n; i++) all = hash_mix(all + HASH_SPREAD + sums[i]);
    snprintf(checksum, sizeof checksum, "%s/%d:%016" PRIx64, dtype_name(dt), shards, all);
    return json_pack("{s:o*, s:I, s:I, s:s}", "folder", json_string(folder), "version",
                     (json_int_t)version, "updates", (json_int_t)updates, "checksum", checksum);
}

enum status adapter_base_of(const struct weights *w, struct device *dev, const char *folder,
                            json_t **ret)
{
    uint64_t sum;
    enum status st = weights_base_checksum(w, dev, &sum);
    char *real = realpath(folder, NULL);
    if (st == ST_OK) *ret = adapter_base(real ? real : folder, 0, 0, w->dt, 1, &sum, 1);
    free(real);
    return st;
}

static bool is_same(const json_t *a, const json_t *b)
{
    const char *x = json_string_value(json_object_get(a, "checksum"));
    const char *y = json_string_value(json_object_get(b, "checksum"));
    if (!x || !y || strncmp(x, y, strcspn(x, ":")) == 0) return x && y && strcmp(x, y) == 0;
    return json_equal(json_object_get(a, "folder"), json_object_get(b, "folder")) &&
           json_integer_value(json_object_get(a, "updates")) == 0 &&
           json_integer_value(json_object_get(b, "updates")) == 0;
}

enum status adapter_base_check(const char *folder, const json_t *base)
{
    enum status st = ST_OK;
    json_t *state = NULL;
    char path[PATH_ROOM], *was = NULL, *is = NULL;
    CHECK(path_put(path, folder, ADAPTER_STATE_FILE));
    if (!file_exists(path)) goto out;
    CHECK(json_read_file(path, MAX_STATE, &state));
    const json_t *recorded = json_object_get(state, ADAPTER_BASE);
    if (!recorded || is_same(recorded, base)) goto out;
    was = json_dumps(recorded, JSON_ENCODE_ANY);
    is = json_dumps(base, JSON_ENCODE_ANY);
    st = status_fail(ST_MISMATCH, "%s: the adapter was trained on another base: on %s; this is %s",
                     folder, was ? was : "?", is ? is : "?");
out:
    json_decref(state);
    free(was);
    free(is);
    return st;
}

// ---- the table of a forward pass ----------------------------------------------------------------
// A site is a block of the base's arena that adapters can change (one matmul of the forward pass);
// its parts are the block's tensors. The list of factors in device memory is (parts of all sites,
// max_adapters); a copy of it on the host says which sites anybody adapts.

struct site {
    int n_parts, first[LORA_PARTS + 1], k; // columns of the matmul's result; see lora_args
    int at;                                // its first part in the list
    uint32_t column;                       // of the whole matrix, this rank's first
};

struct adapter_table {
    struct device *dev;
    enum dtype dt;
    int n_layers, max_adapters, max_rank, n_parts; // n_parts: of all sites
    struct site *sites;                            // (n_layers, ROLE_COUNT); n_parts 0: none
    struct lora_factors *host, *device;            // (n_parts, max_adapters)
    struct lora_dropout dropout;
};

static struct site *site_at(const struct adapter_table *t, enum tensor_role role, int layer)
{
    return &t->sites[layer * ROLE_COUNT + (int)role];
}

// Base tensor i as the next part of its site.
static void add_part(struct adapter_table *t, const struct weights *base, int i)
{
    const struct weight_tensor *tensor = &base->tensors[i];
    const enum tensor_role role = adapter_role(base, i);
    struct site *s = site_at(t, role, tensor->layer);
    if (role == ROLE_COUNT) return;
    if (s->n_parts == 0) s->at = t->n_parts;
    s->k = (int)tensor->shape[1];
    s->column = (uint32_t)tensor->slice.first_col;
    s->first[s->n_parts + 1] = s->first[s->n_parts] + (int)tensor->shape[0];
    s->n_parts++;
    t->n_parts++;
}

enum status adapter_table_new(struct device *dev, const struct weights *base, int max_adapters,
                              int max_rank, struct adapter_table **ret)
{
    enum status st = ST_OK;
    size_t n;
    struct adapter_table *t = calloc(1, sizeof *t);
    if (!t) return status_fail(ST_NO_MEMORY, "no memory for a table of adapters");
    t->dev = dev;
    t->dt = base->dt;
    t->n_layers = base->config->n_layers;
    t->max_adapters = max_adapters;
    t->max_rank = max_rank;
    t->sites = calloc((size_t)base->config->n_layers * ROLE_COUNT, sizeof *t->sites);
    if (t->sites)
        for (int i = 0; i < base->n_tensors; i++) add_part(t, base, adapter_nth(base, i));
    n = (size_t)t->n_parts * (size_t)max_adapters;
    t->host = calloc(n + 1, sizeof *t->host);
    if (!t->sites || !t->host) FAIL(ST_NO_MEMORY, "no memory for a table of adapters");
    CHECK(device_alloc(dev, (n + 1) * sizeof *t->device, (void **)&t->device));
    device_fill(dev, t->device, 0, (n + 1) * sizeof *t->device);
    *ret = TAKE_PTR(t);
out:
    adapter_table_free(t);
    return st;
}

void adapter_table_free(struct adapter_table *t)
{
    if (!t) return;
    device_release(t->dev, t->device);
    free(t->host);
    free(t->sites);
    free(t);
}

static const void *factor(const struct weights *w, int tensor)
{
    return (const char *)w->base + (size_t)w->tensors[tensor].offset * dtype_size(w->dt);
}

enum status adapter_table_set(struct adapter_table *t, int at, const struct adapter *a)
{
    if (at < 0 || at >= t->max_adapters || (a && a->max_rank > t->max_rank))
        return status_fail(ST_INVALID,
                           "adapter %d of rank %d: there is room for %d of ranks up to %d", at,
                           a ? a->max_rank : 0, t->max_adapters, t->max_rank);
    for (int p = 0; p < t->n_parts; p++)
        t->host[p * t->max_adapters + at] = (struct lora_factors){0};
    for (int i = 0; a && i < a->n; i++) {
        const struct adapted *m = &a->list[i];
        const int part = site_at(t, m->role, m->layer)->at + m->part;
        t->host[part * t->max_adapters + at] = (struct lora_factors){
            factor(a->weights, m->a), factor(a->weights, m->b), m->rank, m->scale};
    }
    device_copy_in(t->dev, t->device, t->host,
                   (size_t)t->n_parts * (size_t)t->max_adapters * sizeof *t->host);
    return device_sync(t->dev);
}

static bool is_adapted(const struct adapter_table *t, const struct site *s)
{
    const struct lora_factors *host = t->host + s->at * t->max_adapters;
    bool any = false;
    for (int i = 0; i < s->n_parts * t->max_adapters; i++) any = any || host[i].a;
    return any;
}

uint64_t adapter_table_sites(const struct adapter_table *t)
{
    uint64_t digest = 0;
    for (int i = 0; i < t->n_layers * ROLE_COUNT; i++)
        if (is_adapted(t, &t->sites[i])) digest = hash_mix(digest ^ (uint64_t)(i + 1));
    return digest;
}

void adapter_table_drop(struct adapter_table *t, const struct lora_dropout *dropout)
{
    t->dropout = *dropout;
}

bool adapter_table_args(const struct adapter_table *t, enum tensor_role role, int layer, int rows,
                        const int32_t *adapter, struct lora_args *ret)
{
    const struct site *s = site_at(t, role, layer);
    if (!is_adapted(t, s)) return false;
    *ret = (struct lora_args){.factors = t->device + s->at * t->max_adapters,
                              .adapter = adapter,
                              .n_adapters = t->max_adapters,
                              .n_parts = s->n_parts,
                              .max_rank = t->max_rank,
                              .rows = rows,
                              .k = s->k,
                              .dropout = t->dropout,
                              .dt = t->dt,
                              .out = t->dt};
    ret->dropout.matrix = (uint32_t)s->at;
    ret->dropout.column = s->column;
    memcpy(ret->first, s->first, sizeof s->first);
    return true;
}

void adapter_grads(const struct adapter *a, const struct weights *grads, enum tensor_role role,
                   int layer, struct lora_grads ret[LORA_PARTS])
{
    memset(ret, 0, LORA_PARTS * sizeof *ret);
    for (int i = 0; i < a->n; i++) {
        const struct adapted *m = &a->list[i];
        if (m->role != role || m->layer != layer) continue;
        ret[m->part] = (struct lora_grads){(float *)grads->base + grads->tensors[m->a].offset,
                                           (float *)grads->base + grads->tensors[m->b].offset};
    }
}
