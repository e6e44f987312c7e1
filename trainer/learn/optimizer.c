/* optimizer.c: AdamW over a whole arena. Owns the gradients, both moments and, for bf16 weights,
 * the 16-bit residual; the trainer's thread only.
 *
 * Weights, gradients, moments and residual share one layout (weights.h), so a step is one operation
 * over one range. The padding between tensors is zero in all of them and stays zero: its gradient
 * is never written. The clipping factor lies in device memory, so that between odd and even there
 * is nothing but the one kernel: the norm has been waited for before the engine is asked for quiet.
 *
 * On disk the state is per tensor ("exp_avg.NAME", "exp_avg_sq.NAME", "residual.NAME"; of 8-bit
 * moments also "exp_avg_scale.NAME" and "exp_avg_sq_scale.NAME", one for each block of the tensor):
 * readable by any safetensors loader, independent of padding, and bounded in host memory by the
 * largest tensor. Tensors begin at multiples of the block, so no scale belongs to two.
 */
#include "trainer/learn/optimizer.h"
#include "common/model/safetensors.h"
#include "kernels/moments.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct optimizer {
    struct device *dev;
    const struct ops *ops;
    const struct weights *policy; // borrowed
    struct optimizer_config config;
    struct weights *grads;  // f32 plan
    struct moments moments; // of n_elements
    uint16_t *low;          // (n_elements); NULL for f32 weights
    double *sum;            // (1), device
    float *grad_scale;      // (1), device
    bool prepared;
    int64_t steps;
};

const char *const moments_kind_names[] = {"f32", "bf16", "8bit", NULL};
static const enum dtype moment_dtypes[] = {DT_F32, DT_BF16, DT_U8};

static size_t blocks(int64_t n)
{
    return ((size_t)n + MOMENT_BLOCK - 1) / MOMENT_BLOCK;
}

static enum status alloc_zeroed(struct device *dev, size_t bytes, const char *what, void **ret)
{
    void *memory;
    enum status st = device_alloc(dev, bytes, &memory);
    if (st != ST_OK) return status_context(st, "%zu bytes for %s", bytes, what);
    device_fill(dev, memory, 0, bytes);
    *ret = memory;
    return ST_OK;
}

static enum status moments_new(struct device *dev, enum moments_kind kind, int64_t n,
                               struct moments *m)
{
    enum status st;
    size_t bytes = (size_t)n * dtype_size(moment_dtypes[kind]), scales = blocks(n) * sizeof(float);
    m->kind = kind;
    CHECK(alloc_zeroed(dev, bytes, "first moments", &m->m));
    CHECK(alloc_zeroed(dev, bytes, "second moments", &m->v));
    if (kind != MOMENTS_8BIT) goto out;
    CHECK(alloc_zeroed(dev, scales, "their scales", (void **)&m->m_scale));
    CHECK(alloc_zeroed(dev, scales, "their scales", (void **)&m->v_scale));
out:
    return st;
}

enum status optimizer_new(struct device *dev, const struct weights *policy,
                          const struct optimizer_config *config, struct optimizer **ret)
{
    enum status st = ST_OK;
    size_t n = (size_t)policy->n_elements;
    void *grads = NULL;
    struct optimizer *o = calloc(1, sizeof *o);
    if (!o) return status_fail(ST_NO_MEMORY, "no memory for the optimizer");
    o->dev = dev;
    o->ops = device_ops(dev);
    o->policy = policy;
    o->config = *config;
    CHECK(weights_plan(policy->config, DT_F32, &o->grads));
    if (o->grads->n_elements != policy->n_elements) {
        st = status_fail(ST_MISMATCH,
                         "gradients would have %" PRId64 " elements, the weights have %" PRId64,
                         o->grads->n_elements, policy->n_elements);
        goto out;
    }
    CHECK(alloc_zeroed(dev, o->grads->bytes, "gradients", &grads));
    weights_bind(o->grads, grads);
    CHECK(moments_new(dev, config->moments, policy->n_elements, &o->moments));
    if (policy->dt == DT_BF16)
        CHECK(alloc_zeroed(dev, n * sizeof *o->low, "the master's residual", (void **)&o->low));
    CHECK(alloc_zeroed(dev, sizeof *o->sum, "the gradient norm", (void **)&o->sum));
    CHECK(alloc_zeroed(dev, sizeof *o->grad_scale, "the clipping factor", (void **)&o->grad_scale));
    CHECK(device_sync(dev));
    *ret = o;
out:
    if (st != ST_OK) optimizer_free(o);
    return st;
}

void optimizer_free(struct optimizer *o)
{
    if (!o) return;
    device_release(o->dev, o->grad_scale);
    device_release(o->dev, o->sum);
    device_release(o->dev, o->low);
    device_release(o->dev, o->moments.v_scale);
    device_release(o->dev, o->moments.m_scale);
    device_release(o->dev, o->moments.v);
    device_release(o->dev, o->moments.m);
    if (o->grads) device_release(o->dev, o->grads->base);
    weights_free(o->grads);
    free(o);
}

const struct weights *optimizer_grads(const struct optimizer *o)
{
    return o->grads;
}

void optimizer_clear_grads(struct optimizer *o)
{
    device_fill(o->dev, o->grads->base, 0, o->grads->bytes);
    o->prepared = false;
}

enum status optimizer_prepare(struct optimizer *o, double *ret_norm)
{
    double sum = 0;
    o->ops->sum_squares(o->dev, o->sum, o->grads->base, o->policy->n_elements);
    device_copy_out(o->dev, &sum, o->sum, sizeof sum);
    enum status st = device_sync(o->dev);
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
        .step = (uint32_t)(o->steps + 1),
        .grad_scale = o->grad_scale,
    };
    o->ops->adamw(o->dev, o->policy->base, o->low, &o->moments, o->grads->base,
                  o->policy->n_elements, &adamw, o->policy->dt);
    o->prepared = false;
    o->steps++;
    return ST_OK;
}

int64_t optimizer_steps(const struct optimizer *o)
{
    return o->steps;
}

void optimizer_memory(const struct weights *policy, enum moments_kind moments,
                      struct optimizer_memory *ret)
{
    size_t n = (size_t)policy->n_elements;
    size_t scales = moments == MOMENTS_8BIT ? blocks(policy->n_elements) * sizeof(float) : 0;
    *ret = (struct optimizer_memory){
        .residual = policy->dt == DT_BF16 ? n * sizeof(uint16_t) : 0,
        .moments = 2 * (n * dtype_size(moment_dtypes[moments]) + scales),
        .grads = n * sizeof(float) + WEIGHTS_CANARY_BYTES + sizeof(double) + sizeof(float),
    };
}

// ---- state on disk ------------------------------------------------------------------------------

#define STATE_FORMAT "commonweight-optimizer"

// An array of the state: one entry for each of the arena's elements, or for each block of them.
struct state_array {
    const char *name;
    enum dtype dt;
    char *base;
    bool per_block;
};
#define MAX_ARRAYS 5

static int state_arrays(const struct optimizer *o, struct state_array ret[MAX_ARRAYS])
{
    const struct moments *m = &o->moments;
    enum dtype dt = moment_dtypes[m->kind];
    int n = 0;
    ret[n++] = (struct state_array){"exp_avg", dt, m->m, false};
    ret[n++] = (struct state_array){"exp_avg_sq", dt, m->v, false};
    if (m->kind == MOMENTS_8BIT) {
        ret[n++] = (struct state_array){"exp_avg_scale", DT_F32, (char *)m->m_scale, true};
        ret[n++] = (struct state_array){"exp_avg_sq_scale", DT_F32, (char *)m->v_scale, true};
    }
    if (o->low) ret[n++] = (struct state_array){"residual", DT_U16, (char *)o->low, false};
    return n;
}

// A tensor's part of an array: as it is called and shaped on disk, and (tag) where it lies.
static enum status state_part(const struct state_array *array, const struct weight_tensor *tensor,
                              struct safetensors_source *ret)
{
    int len = snprintf(ret->name, sizeof ret->name, "%s.%s", array->name, tensor->name);
    if (len < 0 || (size_t)len >= sizeof ret->name)
        return status_fail(ST_UNSUPPORTED, "tensor name \"%s\" is too long for optimizer state",
                           tensor->name);
    int64_t at = array->per_block ? tensor->offset / MOMENT_BLOCK : tensor->offset;
    ret->dt = array->dt;
    ret->tag = array->base + (size_t)at * dtype_size(array->dt);
    ret->n_dims = array->per_block ? 1 : tensor->n_dims;
    if (array->per_block) ret->shape[0] = (int64_t)blocks(tensor->n);
    for (int d = 0; !array->per_block && d < tensor->n_dims; d++) ret->shape[d] = tensor->shape[d];
    return ST_OK;
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
    enum status st = ST_OK;
    const struct weights *w = o->policy;
    json_t *metadata = NULL;
    char steps[24];
    struct state_array arrays[MAX_ARRAYS];
    int n = state_arrays(o, arrays) * w->n_tensors;
    struct safetensors_source *sources = calloc((size_t)n, sizeof *sources);
    if (!sources) return status_fail(ST_NO_MEMORY, "no memory to save the optimizer");
    for (int i = 0; i < n; i++)
        CHECK(state_part(&arrays[i / w->n_tensors], &w->tensors[i % w->n_tensors], &sources[i]));
    snprintf(steps, sizeof steps, "%" PRId64, o->steps);
    metadata = json_pack("{s:s, s:s, s:s}", "format", STATE_FORMAT, "step", steps, "moments",
                         moments_kind_names[o->moments.kind]);
    if (!metadata) {
        st = status_fail(ST_NO_MEMORY, "no memory to save the optimizer");
        goto out;
    }
    CHECK(safetensors_write(path, sources, n, metadata, read_state, o));
out:
    json_decref(metadata);
    free(sources);
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
    enum status st = ST_OK;
    struct safetensors *set = NULL;
    const struct weights *w = o->policy;
    struct state_array arrays[MAX_ARRAYS];
    int n = state_arrays(o, arrays) * w->n_tensors;
    int64_t steps = 0;
    CHECK(safetensors_open_file(path, &set));
    CHECK(read_steps(path, set, &steps));
    CHECK(moments_check(o, path, set));
    // Everything is checked before anything is written.
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < n; i++) {
            struct safetensors_source part;
            CHECK(state_part(&arrays[i / w->n_tensors], &w->tensors[i % w->n_tensors], &part));
            const struct safetensors_entry *entry = safetensors_find(set, part.name);
            if (pass == 0)
                CHECK(state_check(path, entry, &part));
            else
                device_copy_in(o->dev, (void *)part.tag, entry->data, entry->bytes);
        }
        if (n != safetensors_count(set)) {
            st = status_fail(ST_MISMATCH, "%s: holds %d tensors, this model's state has %d", path,
                             safetensors_count(set), n);
            goto out;
        }
    }
    CHECK(device_sync(o->dev));
    o->steps = steps;
out:
    safetensors_free(set);
    return st;
}
