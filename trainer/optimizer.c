/* optimizer.c: AdamW over a whole arena. Owns the gradients, both moments and, for bf16 weights,
 * the 16-bit residual; the trainer's thread only.
 *
 * Weights, gradients, moments and residual share one layout (weights.h), so a step is one operation
 * over one range. The padding between tensors is zero in all of them and stays zero: its gradient
 * is never written. The clipping factor lies in device memory, so that between odd and even there
 * is nothing but the one kernel: the norm has been waited for before the engine is asked for quiet.
 *
 * On disk the state is per tensor ("exp_avg.NAME", "exp_avg_sq.NAME", "residual.NAME"): readable
 * by any safetensors loader, independent of padding, and bounded in host memory by the largest
 * tensor.
 */
#include "trainer/optimizer.h"
#include "common/model/safetensors.h"

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
    struct weights *grads; // f32 plan
    float *m, *v;          // (n_elements)
    uint16_t *low;         // (n_elements); NULL for f32 weights
    double *sum;           // (1), device
    float *grad_scale;     // (1), device
    bool prepared;
    int64_t steps;
};

static enum status alloc_zeroed(struct device *dev, size_t bytes, const char *what, void **ret)
{
    void *memory;
    enum status st = device_alloc(dev, bytes, &memory);
    if (st != ST_OK) return status_context(st, "%zu bytes for %s", bytes, what);
    device_fill(dev, memory, 0, bytes);
    *ret = memory;
    return ST_OK;
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
    CHECK(alloc_zeroed(dev, n * sizeof *o->m, "first moments", (void **)&o->m));
    CHECK(alloc_zeroed(dev, n * sizeof *o->v, "second moments", (void **)&o->v));
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
    device_release(o->dev, o->v);
    device_release(o->dev, o->m);
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
        .beta1 = (float)o->config.beta1,
        .beta2 = (float)o->config.beta2,
        .eps = (float)o->config.eps,
        .weight_decay = (float)o->config.weight_decay,
        .bias_correction1 = (float)(1 - pow(o->config.beta1, step)),
        .bias_correction2 = (float)(1 - pow(o->config.beta2, step)),
    };
    o->ops->adamw(o->dev, o->policy->base, o->low, o->m, o->v, o->grads->base, o->grad_scale,
                  o->policy->n_elements, &adamw, o->policy->dt);
    o->prepared = false;
    o->steps++;
    return ST_OK;
}

int64_t optimizer_steps(const struct optimizer *o)
{
    return o->steps;
}

void optimizer_memory(const struct weights *policy, struct optimizer_memory *ret)
{
    size_t n = (size_t)policy->n_elements;
    *ret = (struct optimizer_memory){
        .residual = policy->dt == DT_BF16 ? n * sizeof(uint16_t) : 0,
        .moments = 2 * n * sizeof(float),
        .grads = n * sizeof(float) + WEIGHTS_CANARY_BYTES,
    };
}

// ---- state on disk ------------------------------------------------------------------------------

#define STATE_FORMAT "commonweight-optimizer"

// The arrays of the state: the i-th has this name and dtype, and its first element at *ret_base.
// NULL once i is past the last.
static const char *state_array(const struct optimizer *o, int i, enum dtype *ret_dt,
                               char **ret_base)
{
    *ret_dt = i == 2 ? DT_U16 : DT_F32;
    *ret_base = i == 0 ? (char *)o->m : i == 1 ? (char *)o->v : (char *)o->low;
    static const char *const names[] = {"exp_avg", "exp_avg_sq", "residual"};
    return i < (o->low ? 3 : 2) ? names[i] : NULL;
}

static enum status state_name(const char *array, const struct weight_tensor *tensor, size_t size,
                              char *ret_name)
{
    int len = snprintf(ret_name, size, "%s.%s", array, tensor->name);
    if (len < 0 || (size_t)len >= size)
        return status_fail(ST_UNSUPPORTED, "tensor name \"%s\" is too long for optimizer state",
                           tensor->name);
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
    enum dtype dt;
    char *base, steps[24];
    const char *array;
    int n = 0;
    struct safetensors_source *sources = calloc((size_t)w->n_tensors * 3, sizeof *sources);
    if (!sources) return status_fail(ST_NO_MEMORY, "no memory to save the optimizer");
    for (int i = 0; (array = state_array(o, i, &dt, &base)); i++)
        for (int t = 0; t < w->n_tensors; t++, n++) {
            const struct weight_tensor *tensor = &w->tensors[t];
            CHECK(state_name(array, tensor, sizeof sources[n].name, sources[n].name));
            sources[n].dt = dt;
            sources[n].n_dims = tensor->n_dims;
            for (int d = 0; d < tensor->n_dims; d++) sources[n].shape[d] = tensor->shape[d];
            sources[n].tag = base + (size_t)tensor->offset * dtype_size(dt);
        }
    snprintf(steps, sizeof steps, "%" PRId64, o->steps);
    metadata = json_pack("{s:s, s:s}", "format", STATE_FORMAT, "step", steps);
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
                               const char *name, const struct weight_tensor *tensor, enum dtype dt)
{
    if (!entry) return status_fail(ST_MISMATCH, "%s: tensor %s is missing", path, name);
    bool same = entry->dt == dt && entry->n_dims == tensor->n_dims;
    for (int d = 0; same && d < tensor->n_dims; d++) same = entry->shape[d] == tensor->shape[d];
    if (!same)
        return status_fail(ST_MISMATCH, "%s: tensor %s has another shape or dtype than the model's",
                           path, name);
    return ST_OK;
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
    int64_t steps = 0;
    CHECK(safetensors_open_file(path, &set));
    CHECK(read_steps(path, set, &steps));
    // Everything is checked before anything is written.
    for (int pass = 0; pass < 2; pass++) {
        enum dtype dt;
        char *base, name[160];
        const char *array;
        int n = 0;
        for (int i = 0; (array = state_array(o, i, &dt, &base)); i++)
            for (int t = 0; t < w->n_tensors; t++, n++) {
                const struct weight_tensor *tensor = &w->tensors[t];
                CHECK(state_name(array, tensor, sizeof name, name));
                const struct safetensors_entry *entry = safetensors_find(set, name);
                if (pass == 0)
                    CHECK(state_check(path, entry, name, tensor, dt));
                else
                    device_copy_in(o->dev, base + (size_t)tensor->offset * dtype_size(dt),
                                   entry->data, entry->bytes);
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
