/* optimizer.c: AdamW over ranges of arenas. Owns the gradients, both moments and, for bf16 weights,
 * the 16-bit residual; the trainer's thread only.
 *
 * Ranges begin and end at multiples of 128 elements (weights.h). Gradients, moments and residual of
 * one range after the other lie in one array each, and within a range as the weights do: a step is
 * one operation for each range, the norm one over all. The padding between tensors is zero in all
 * of them and stays zero: its gradient is never written. The clipping factor lies in device memory,
 * so that between odd and even there is nothing but AdamW itself: the norm has been waited for
 * before the engine is asked to quiesce.
 *
 * On disk the state is per tensor ("exp_avg.NAME", "exp_avg_sq.NAME", "residual.NAME"; of 8-bit
 * moments also "exp_avg_scale.NAME" and "exp_avg_sq_scale.NAME", one for each block that the tensor
 * has elements in): readable by any safetensors loader, independent of padding, and bounded in host
 * memory by the largest tensor. Tensors that lie within one block of memory (q, k and v) may share
 * a scale, which then stands with both.
 */
#include "trainer/learn/optimizer.h"
#include "common/model/safetensors.h"
#include "kernels/moments.h"
#include "trainer/learn/replicas.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RANGE_SEED 0x9e3779b1u // between the rounding noise of one range and the next

struct trained { // a range, and where its state begins
    struct param_range range;
    int64_t at, low_at; // elements of gradients and moments, of the residual
};

struct optimizer {
    struct device *dev;
    const struct ops *ops;
    struct optimizer_config config;
    struct trained *trained; // (n_ranges)
    int n_ranges;
    struct weights **grads; // (n_arenas) f32 plans
    int n_arenas;
    int64_t n, n_low;          // elements of all ranges, of those in bf16
    float *gradients;          // (n), device, as all that follows
    struct moments moments;    // of n elements
    uint16_t *low;             // (n_low); NULL: there are none
    struct replicas *replicas; // of a sharded model, else NULL
    double *sum;               // (1)
    float *grad_scale;         // (1)
    bool prepared;
    int64_t steps;
};

const char *const moments_kind_names[] = {"f32", "bf16", "8bit", NULL};
static const enum dtype moment_dtypes[] = {DT_F32, DT_BF16, DT_U8};

static size_t blocks(int64_t n)
{
    return ((size_t)n + MOMENT_BLOCK - 1) / MOMENT_BLOCK;
}

// Elements of all ranges, and of those in bf16.
static void count_elements(const struct param_ranges *trained, int64_t *ret_n, int64_t *ret_low)
{
    *ret_n = *ret_low = 0;
    for (int i = 0; i < trained->n; i++) {
        *ret_n += trained->list[i].n;
        if (trained->list[i].weights->dt == DT_BF16) *ret_low += trained->list[i].n;
    }
}

static enum status check_range(const struct param_range *r)
{
    bool fits = r->first >= 0 && r->n > 0 && r->n <= r->weights->n_elements - r->first;
    if (fits && r->first % MOMENT_BLOCK == 0 && r->n % MOMENT_BLOCK == 0) return ST_OK;
    return status_fail(ST_INVALID,
                       "a range of %" PRId64 " elements from %" PRId64
                       " on is none of an arena's %" PRId64 " in blocks of %d",
                       r->n, r->first, r->weights->n_elements, MOMENT_BLOCK);
}

#define N_PARTS 8
#define PART(name, size)                                                                           \
    {                                                                                              \
        offsetof(struct optimizer, name), (size)                                                   \
    }
enum { RESIDUAL = 0, MOMENTS = 1, GRADIENTS = 5 }; // the first part of each

// What n elements take, of which n_low are in bf16.
static void list_parts(int64_t n, int64_t n_low, enum moments_kind kind,
                       struct device_part ret[N_PARTS])
{
    const size_t moments = (size_t)n * dtype_size(moment_dtypes[kind]);
    const size_t scales = kind == MOMENTS_8BIT ? blocks(n) * sizeof(float) : 0;
    const struct device_part parts[N_PARTS] = {
        [RESIDUAL] = PART(low, (size_t)n_low * sizeof(uint16_t)),
        [MOMENTS] = PART(moments.m, moments),
        PART(moments.v, moments),
        PART(moments.m_scale, scales),
        PART(moments.v_scale, scales),
        [GRADIENTS] = PART(gradients, (size_t)n * sizeof(float)),
        PART(sum, sizeof(double)),
        PART(grad_scale, sizeof(float)),
    };
    memcpy(ret, parts, sizeof parts);
}

enum status optimizer_reset(struct optimizer *o)
{
    struct device_part parts[N_PARTS];
    list_parts(o->n, o->n_low, o->moments.kind, parts);
    for (int i = 0; i < N_PARTS; i++)
        if (parts[i].bytes)
            device_fill(o->dev, *device_part_pointer(o, &parts[i]), 0, parts[i].bytes);
    o->steps = 0;
    o->prepared = false;
    return device_sync(o->dev);
}

static enum status alloc_state(struct optimizer *o)
{
    struct device_part parts[N_PARTS];
    enum status st;
    o->moments.kind = o->config.moments;
    list_parts(o->n, o->n_low, o->moments.kind, parts);
    CHECK(status_context(device_alloc_parts(o->dev, o, parts, N_PARTS),
                         "gradients and AdamW's state of %" PRId64 " elements", o->n));
    st = optimizer_reset(o);
out:
    return st;
}

// Places a range after those before it, its gradients in its arena's view.
static enum status add_range(struct optimizer *o, const struct param_range *r)
{
    enum status st;
    const struct trained *before = o->n_ranges ? &o->trained[o->n_ranges - 1] : NULL;
    struct trained t = {.range = *r};
    CHECK(check_range(r));
    if (before) {
        t.at = before->at + before->range.n;
        t.low_at = before->low_at + (before->range.weights->dt == DT_BF16 ? before->range.n : 0);
    }
    if (!before || r->weights != before->range.weights) {
        CHECK(weights_plan_like(r->weights, DT_F32, &o->grads[o->n_arenas]));
        o->n_arenas++;
    }
    struct weights *view = o->grads[o->n_arenas - 1];
    float *gradients = o->gradients + t.at;
    if (view->n_elements != r->weights->n_elements)
        FAIL(ST_MISMATCH, "gradients would have %" PRId64 " elements, the weights have %" PRId64,
             view->n_elements, r->weights->n_elements);
    view->base = r->n == view->n_elements ? gradients : NULL;
    view->bytes = view->base ? (size_t)r->n * sizeof *gradients : 0;
    weights_bind_range(view, r->first, r->n, gradients);
    o->trained[o->n_ranges++] = t;
out:
    return st;
}

enum status optimizer_new(struct device *dev, const struct param_ranges *trained,
                          const struct optimizer_config *config, struct optimizer **ret)
{
    enum status st = ST_OK;
    struct optimizer *o = calloc(1, sizeof *o);
    if (!o) return status_fail(ST_NO_MEMORY, "no memory for the optimizer");
    o->dev = dev;
    o->ops = device_ops(dev);
    o->config = *config;
    o->trained = calloc((size_t)trained->n, sizeof *o->trained);
    o->grads = calloc((size_t)trained->n, sizeof *o->grads);
    if (!o->trained || !o->grads) FAIL(ST_NO_MEMORY, "no memory for the optimizer");
    count_elements(trained, &o->n, &o->n_low);
    CHECK(alloc_state(o));
    for (int i = 0; i < trained->n; i++) CHECK(add_range(o, &trained->list[i]));
    *ret = o;
out:
    if (st != ST_OK) optimizer_free(o);
    return st;
}

enum status optimizer_new_whole(struct device *dev, const struct weights *weights,
                                const struct optimizer_config *config, struct optimizer **ret)
{
    struct param_range all = {.weights = weights, .n = weights->n_elements};
    struct param_ranges trained = {&all, 1};
    return optimizer_new(dev, &trained, config, ret);
}

enum status optimizer_use_comm(struct optimizer *o, const struct param_ranges *trained,
                               struct comm *comm)
{
    return replicas_new(o->dev, comm, trained, o->gradients, &o->replicas);
}

void optimizer_free(struct optimizer *o)
{
    struct device_part parts[N_PARTS];
    if (!o) return;
    list_parts(o->n, o->n_low, o->config.moments, parts);
    device_release_parts(o->dev, o, parts, N_PARTS);
    replicas_free(o->replicas);
    for (int i = 0; i < o->n_arenas; i++) weights_free(o->grads[i]);
    free(o->grads);
    free(o->trained);
    free(o);
}

const struct weights *optimizer_grads(const struct optimizer *o, int i)
{
    return o->grads[i];
}

void optimizer_clear_grads(struct optimizer *o)
{
    device_fill(o->dev, o->gradients, 0, (size_t)o->n * sizeof *o->gradients);
    o->prepared = false;
}

enum status optimizer_prepare(struct optimizer *o, double *ret_norm)
{
    double sum = 0;
    replicas_sum(o->replicas);
    o->ops->sum_squares(o->dev, o->sum, o->gradients, o->n);
    device_copy_out(o->dev, &sum, o->sum, sizeof sum);
    enum status st = device_sync(o->dev);
    if (st == ST_OK) st = replicas_sum_squares(o->replicas, &sum);
    if (st != ST_OK) return st;
    double norm = sqrt(sum);
    if (!isfinite(norm))
        return status_fail(ST_INVALID, "the gradient norm is %f: the step must be skipped", norm);
    float scale = 1;
    if (o->config.max_grad_norm > 0 && o->config.max_grad_norm < norm + 1e-6)
        scale = (float)(o->config.max_grad_norm / (norm + 1e-6));
    device_copy_in(o->dev, o->grad_scale, &scale, sizeof scale);
    o->prepared = true;
    *ret_norm = norm;
    return ST_OK;
}

// Those of the elements from `at` on.
static struct moments moments_at(const struct moments *m, int64_t at)
{
    const int64_t bytes = at * (int64_t)dtype_size(moment_dtypes[m->kind]),
                  block = at / MOMENT_BLOCK;
    const bool scaled = m->kind == MOMENTS_8BIT;
    return (struct moments){
        .kind = m->kind,
        .m = (char *)m->m + bytes,
        .v = (char *)m->v + bytes,
        .m_scale = scaled ? m->m_scale + block : NULL,
        .v_scale = scaled ? m->v_scale + block : NULL,
    };
}

enum status optimizer_apply(struct optimizer *o, double lr)
{
    if (!o->prepared)
        return status_fail(ST_INVALID, "optimizer_apply() without optimizer_prepare()");
    double step = (double)(o->steps + 1);
    struct adamw adamw = {
        .lr = (float)lr,
        .beta1 = o->config.beta1,
        .beta2 = o->config.beta2,
        .eps = (float)o->config.eps,
        .weight_decay = (float)o->config.weight_decay,
        .bias_correction1 = (float)(1 - pow(o->config.beta1, step)),
        .bias_correction2 = (float)(1 - pow(o->config.beta2, step)),
        .grad_scale = o->grad_scale,
    };
    for (int i = 0; i < o->n_ranges; i++) {
        const struct trained *t = &o->trained[i];
        const struct weights *w = t->range.weights;
        const struct moments moments = moments_at(&o->moments, t->at);
        adamw.step = (uint32_t)(o->steps + 1) + (uint32_t)i * RANGE_SEED;
        o->ops->adamw(o->dev, (char *)w->base + (size_t)t->range.first * dtype_size(w->dt),
                      w->dt == DT_BF16 ? o->low + t->low_at : NULL, &moments, o->gradients + t->at,
                      t->range.n, &adamw, w->dt);
    }
    o->prepared = false;
    o->steps++;
    return ST_OK;
}

int64_t optimizer_steps(const struct optimizer *o)
{
    return o->steps;
}

void optimizer_configure(struct optimizer *o, const struct optimizer_config *config)
{
    o->config = *config;
    o->config.moments = o->moments.kind;
}

void optimizer_memory(const struct param_ranges *trained, enum moments_kind moments,
                      struct optimizer_memory *ret)
{
    struct device_part parts[N_PARTS];
    int64_t n, n_low;
    count_elements(trained, &n, &n_low);
    list_parts(n, n_low, moments, parts);
    *ret = (struct optimizer_memory){
        .residual = device_parts_bytes(parts + RESIDUAL, MOMENTS - RESIDUAL),
        .moments = device_parts_bytes(parts + MOMENTS, GRADIENTS - MOMENTS),
        .grads = device_parts_bytes(parts + GRADIENTS, N_PARTS - GRADIENTS),
    };
}

// ---- state on disk ------------------------------------------------------------------------------

#define STATE_FORMAT "commonweight-optimizer"

// An array of the state: one entry for each of the ranges' elements, or for each block of them.
struct state_array {
    const char *name;
    enum dtype dt;
    char *base;
    bool per_block, of_bf16;
};
#define MAX_ARRAYS 5

static int state_arrays(const struct optimizer *o, struct state_array ret[MAX_ARRAYS])
{
    const struct moments *m = &o->moments;
    enum dtype dt = moment_dtypes[m->kind];
    int n = 0;
    ret[n++] = (struct state_array){"exp_avg", dt, m->m, false, false};
    ret[n++] = (struct state_array){"exp_avg_sq", dt, m->v, false, false};
    if (m->kind == MOMENTS_8BIT) {
        ret[n++] = (struct state_array){"exp_avg_scale", DT_F32, (char *)m->m_scale, true, false};
        ret[n++] =
            (struct state_array){"exp_avg_sq_scale", DT_F32, (char *)m->v_scale, true, false};
    }
    if (o->low) ret[n++] = (struct state_array){"residual", DT_U16, (char *)o->low, false, true};
    return n;
}

// A tensor's part of an array: as it is called and shaped on disk, and (tag) where it lies.
static enum status state_part(const struct state_array *array, const struct trained *t,
                              const struct weight_tensor *tensor, struct safetensors_source *ret)
{
    const char *arena = t->range.arena ? t->range.arena : "";
    int len = snprintf(ret->name, sizeof ret->name, "%s.%s%s", array->name, arena, tensor->name);
    if (len < 0 || (size_t)len >= sizeof ret->name)
        return status_fail(ST_UNSUPPORTED, "tensor name \"%s\" is too long for optimizer state",
                           tensor->name);
    int64_t at = tensor->offset - t->range.first + (array->of_bf16 ? t->low_at : t->at);
    const int64_t last_block = (at + tensor->n - 1) / MOMENT_BLOCK;
    if (array->per_block) at /= MOMENT_BLOCK;
    ret->dt = array->dt;
    ret->tag = array->base + (size_t)at * dtype_size(array->dt);
    ret->n_dims = array->per_block ? 1 : tensor->n_dims;
    if (array->per_block) ret->shape[0] = last_block - at + 1;
    for (int d = 0; !array->per_block && d < tensor->n_dims; d++) ret->shape[d] = tensor->shape[d];
    return ST_OK;
}

// Every part of the state; the caller's to free.
static enum status list_state(const struct optimizer *o, struct safetensors_source **ret,
                              int *ret_n)
{
    enum status st = ST_OK;
    struct state_array arrays[MAX_ARRAYS];
    const int n_arrays = state_arrays(o, arrays);
    int n = 0, room = 0;
    for (int r = 0; r < o->n_ranges; r++) room += n_arrays * o->trained[r].range.weights->n_tensors;
    struct safetensors_source *list = calloc((size_t)room, sizeof *list);
    if (!list) return status_fail(ST_NO_MEMORY, "no memory to list the optimizer's state");
    for (int i = 0; i < n_arrays * o->n_ranges; i++) {
        const struct state_array *array = &arrays[i / o->n_ranges];
        const struct trained *t = &o->trained[i % o->n_ranges];
        const struct weights *w = t->range.weights;
        if (array->of_bf16 && w->dt != DT_BF16) continue;
        for (int k = 0; k < w->n_tensors; k++)
            if (param_range_holds(&t->range, k))
                CHECK(state_part(array, t, &w->tensors[k], &list[n++]));
    }
    *ret = list;
    *ret_n = n;
    list = NULL;
out:
    free(list);
    return st;
}

static enum status read_state(void *context, const struct safetensors_source *source, size_t bytes,
                              void *to)
{
    struct optimizer *o = context;
    device_copy_out(o->dev, to, source->tag, bytes);
    return device_sync(o->dev);
}

enum status optimizer_save(struct optimizer *o, const char *path)
{
    enum status st;
    json_t *metadata = NULL;
    char steps[24];
    struct safetensors_source *state = NULL;
    int n;
    CHECK(list_state(o, &state, &n));
    snprintf(steps, sizeof steps, "%" PRId64, o->steps);
    metadata = json_pack("{s:s, s:s, s:s}", "format", STATE_FORMAT, "step", steps, "moments",
                         moments_kind_names[o->moments.kind]);
    if (!metadata) FAIL(ST_NO_MEMORY, "no memory to save the optimizer");
    CHECK(safetensors_write(path, state, n, metadata, read_state, o));
out:
    json_decref(metadata);
    free(state);
    return st;
}

static enum status state_check(const char *path, const struct safetensors_entry *entry,
                               const struct safetensors_source *want)
{
    if (!entry) return status_fail(ST_MISMATCH, "%s: tensor %s is missing", path, want->name);
    bool same = entry->dt == want->dt && entry->n_dims == want->n_dims;
    for (int d = 0; same && d < want->n_dims; d++) same = entry->shape[d] == want->shape[d];
    if (!same)
        return status_fail(ST_MISMATCH, "%s: tensor %s has another shape or dtype than the model's",
                           path, want->name);
    return ST_OK;
}

// States written before there was a choice say nothing of their moments: they are f32.
static enum status moments_check(const struct optimizer *o, const char *path,
                                 const struct safetensors *set)
{
    const json_t *metadata = safetensors_metadata(set);
    const char *kind = json_string_value(json_object_get(metadata, "moments"));
    const char *mine = moments_kind_names[o->moments.kind];
    if (!kind) kind = moments_kind_names[MOMENTS_F32];
    if (strcmp(kind, mine) == 0) return ST_OK;
    return status_fail(ST_MISMATCH,
                       "%s holds moments in %s, this run keeps them in %s; go on with "
                       "--optim-moments %s",
                       path, kind, mine, kind);
}

static enum status read_steps(const char *path, const struct safetensors *set, int64_t *ret_steps)
{
    const json_t *metadata = safetensors_metadata(set);
    const char *format = json_string_value(json_object_get(metadata, "format"));
    const char *text = json_string_value(json_object_get(metadata, "step"));
    if (!format || strcmp(format, STATE_FORMAT) != 0)
        return status_fail(ST_FORMAT, "%s: not an optimizer state (its format is not \"%s\")", path,
                           STATE_FORMAT);
    char *end = NULL;
    errno = 0;
    long long steps = text ? strtoll(text, &end, 10) : -1;
    if (!text || end == text || *end || errno || steps < 0)
        return status_fail(ST_FORMAT, "%s: metadata field step is \"%s\", not a count", path,
                           text ? text : "");
    *ret_steps = steps;
    return ST_OK;
}

enum status optimizer_load(struct optimizer *o, const char *path)
{
    enum status st;
    struct safetensors *set = NULL;
    struct safetensors_source *state = NULL;
    int n;
    int64_t steps = 0;
    CHECK(list_state(o, &state, &n));
    CHECK(safetensors_open_file(path, &set));
    CHECK(read_steps(path, set, &steps));
    CHECK(moments_check(o, path, set));
    // Everything is checked before anything is written.
    for (int i = 0; i < n; i++)
        CHECK(state_check(path, safetensors_find(set, state[i].name), &state[i]));
    if (n != safetensors_count(set))
        FAIL(ST_MISMATCH, "%s: holds %d tensors, the state of what is trained here has %d", path,
             safetensors_count(set), n);
    for (int i = 0; i < n; i++) {
        const struct safetensors_entry *entry = safetensors_find(set, state[i].name);
        device_copy_in(o->dev, (void *)state[i].tag, entry->data, entry->bytes);
    }
    CHECK(device_sync(o->dev));
    o->steps = steps;
out:
    safetensors_free(set);
    free(state);
    return st;
}
