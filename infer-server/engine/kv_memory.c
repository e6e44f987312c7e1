/* kv_memory.c: owns the keys and values of every sequence, once for each runner. The engine's
 * thread.
 *
 * The pools take a share of the memory that is free after the weights and the models' scratch, so
 * they are allocated last. Without a size they take 30%: a trainer on the same device needs the
 * larger part (gradients, moments, activations). On the CPU it also stops at 4 GiB, for "free"
 * there is memory that the system would otherwise use to cache files. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/kv_memory.h"
#include <stdlib.h>
#include <string.h>

#define DEFAULT_PERCENT 30.0
#define CPU_MAX_BYTES   ((int64_t)4 << 30)

static enum status pool_bytes(struct device *dev, const struct kv_request *request, int64_t *ret)
{
    size_t available, total;
    enum status st = device_memory(dev, &available, &total);
    if (st != ST_OK) return st;
    if (request->bytes > 0) {
        if ((uint64_t)request->bytes > available)
            return status_fail(ST_NO_MEMORY,
                               "--kv-memory asks for %lld bytes, %s has %zu free; ask for less",
                               (long long)request->bytes, device_spec(dev), available);
        *ret = request->bytes;
        return ST_OK;
    }
    double percent = request->percent > 0 ? request->percent : DEFAULT_PERCENT;
    int64_t bytes = (int64_t)((double)available * percent / 100.0);
    if (request->percent <= 0 && device_kind(dev) == DEVICE_CPU && bytes > CPU_MAX_BYTES)
        bytes = CPU_MAX_BYTES;
    *ret = bytes;
    return ST_OK;
}

// Of so many bytes, for how many sequences there are states, which are then taken off.
static enum status plan_states(const struct kv_request *request, int64_t *bytes,
                               struct kv_plan *ret)
{
    ret->max_batch = request->max_batch;
    if (request->state_bytes == 0) return ST_OK;
    const int64_t fit = *bytes / 2 / request->state_bytes;
    if (fit < 1)
        return status_fail(
            ST_INVALID,
            "half of a KV cache of %lld bytes has no room for the %lld that this model "
            "carries along a sequence; give --kv-memory %lld or more",
            (long long)*bytes, (long long)request->state_bytes,
            (long long)(2 * request->state_bytes));
    const int64_t others = request->keeps ? fit / 8 : 0;
    if (ret->max_batch > fit - others) ret->max_batch = (int)(fit - others);
    const int64_t small = *bytes / 16 / request->state_bytes;
    const int64_t kept = small > ret->max_batch ? small : ret->max_batch;
    const int64_t left = fit - ret->max_batch;
    ret->n_kept = request->keeps ? (int)(kept < left ? kept : left) : 0;
    *bytes -= (ret->max_batch + ret->n_kept) * request->state_bytes;
    return ST_OK;
}

enum status kv_memory_plan(struct device *dev, const struct kv_request *request,
                           struct kv_plan *ret)
{
    int64_t bytes = 0;
    struct kv_plan plan = {.max_context = request->max_context};
    enum status st = pool_bytes(dev, request, &bytes);
    if (st == ST_OK) st = plan_states(request, &bytes, &plan);
    if (st != ST_OK) return st;
    const int64_t requested =
        (request->max_context + request->block_size - 1) / request->block_size;
    int64_t n_blocks = bytes / request->block_bytes;
    if (n_blocks > requested * plan.max_batch) n_blocks = requested * plan.max_batch;
    if (n_blocks > INT32_MAX / request->block_size) n_blocks = INT32_MAX / request->block_size;
    // The least that has room for them beside the states, which take half at most.
    const int64_t blocks = requested * request->block_bytes;
    const int64_t states =
        (int64_t)request->max_batch * (1 + request->keeps) * request->state_bytes;
    if (n_blocks < requested && (request->context_is_firm || n_blocks < 1))
        return status_fail(
            ST_INVALID,
            "a KV cache of %lld bytes holds %lld tokens, fewer than one sequence of --max-context "
            "%d; give --kv-memory %lld or more, or a smaller --max-context",
            (long long)bytes, (long long)(n_blocks * request->block_size), request->max_context,
            (long long)(blocks + (states < blocks ? states : blocks)));
    plan.n_blocks = (int)n_blocks;
    if (n_blocks < requested) plan.max_context = plan.n_blocks * request->block_size;
    *ret = plan;
    return ST_OK;
}

int64_t kv_memory_block_bytes(const struct model_config *config, enum dtype dt, int block_size)
{
    return block_size * config_kv_bytes(config, dt);
}

int64_t kv_memory_state_bytes(const struct model_config *config)
{
    return config_state_elements(config) * (int64_t)sizeof(float);
}

enum status kv_memory_alloc(struct kv_memory *m, struct device *dev,
                            const struct model_config *config, enum dtype dt, int block_size,
                            int n_blocks, int n_states)
{
    enum status st = ST_OK;
    int64_t elements = 0, scales = 0, state = 0; // of the keys; of a slot of the states
    bool latent = true;                          // all layers: a token's key is its value too
    *m = (struct kv_memory){.dev = dev, .n_layers = config->n_layers};
    m->layers = malloc((size_t)config->n_layers * sizeof *m->layers);
    if (!m->layers) FAIL(ST_NO_MEMORY, "no memory for %d layers", config->n_layers);
    for (int l = 0; l < config->n_layers; l++) {
        const struct layer_config *layer = &config->layers[l];
        m->layers[l] = (struct kv_layer){.offset = elements,
                                         .width = layer_cached_width(layer),
                                         .scales = scales,
                                         .state = state};
        if (layer->kv_from >= 0) continue; // its keys are another's
        if (layer->delta.n_heads > 0) state += delta_state_elements(&layer->delta);
        latent = latent && layer->latent.rank > 0;
        elements += (int64_t)n_blocks * block_size * m->layers[l].width;
        scales += (int64_t)n_blocks * block_size * layer_kv_heads(layer) * KV_SCALES;
    }
    if (config->kv_cache == KV_CACHE_FP8) dt = DT_E4M3;
    m->n_scales = scales;
    const size_t half = (size_t)elements * dtype_size(dt), values = latent ? 0 : half;
    m->view = (struct kv_view){.layers = m->layers,
                               .n_blocks = n_blocks,
                               .block_size = block_size,
                               .dt = dt,
                               .slot_elements = config_state_elements(config)};
    if (m->view.slot_elements > 0) {
        m->n_states = n_states;
        CHECK(device_alloc(dev, (size_t)n_states * (size_t)kv_memory_state_bytes(config),
                           (void **)&m->view.states));
    }
    CHECK(device_alloc(dev, half, &m->view.k));
    if (values > 0) CHECK(device_alloc(dev, values, &m->view.v));
    if (dt == DT_E4M3) CHECK(device_alloc(dev, (size_t)scales, (void **)&m->view.scales));
    // Rows that no sequence wrote yet are never read, but a padded kernel of CUDA may load and mask
    // them: zeros keep NaN out of such sums. On the CPU what is not yet used takes no memory.
    if (device_kind(dev) == DEVICE_CPU) return ST_OK;
    device_fill(dev, m->view.k, 0, half);
    if (values > 0) device_fill(dev, m->view.v, 0, values);
    if (m->view.scales) device_fill(dev, m->view.scales, 0, (size_t)scales);
    return ST_OK;
out:
    kv_memory_release(m);
    return status_context(st, "KV cache");
}

void kv_memory_release(struct kv_memory *m)
{
    if (!m->dev) return;
    device_release(m->dev, m->view.k);
    device_release(m->dev, m->view.v);
    device_release(m->dev, m->view.scales);
    device_release(m->dev, m->view.states);
    free(m->layers);
    memset(m, 0, sizeof *m);
}

// Bytes of a block's scales in a layer; 0: it has none.
static size_t scale_bytes(const struct kv_memory *m, int layer)
{
    const int64_t next = layer + 1 < m->n_layers ? m->layers[layer + 1].scales : m->n_scales;
    return (size_t)((next - m->layers[layer].scales) / m->view.n_blocks);
}

void kv_memory_copy_block(const struct kv_memory *m, int32_t from, int32_t to)
{
    const struct kv_layer *layers = m->layers;
    char *halves[] = {m->view.k, m->view.v};
    for (int l = 0, end; l < m->n_layers; l = end) { // layers of one width in one copy
        for (end = l + 1; end < m->n_layers && layers[end].width == layers[l].width &&
                          scale_bytes(m, end) == scale_bytes(m, l);)
            end++;
        const size_t element = dtype_size(m->view.dt), at = (size_t)layers[l].offset * element;
        const size_t bytes = (size_t)m->view.block_size * (size_t)layers[l].width * element;
        const size_t pitch = bytes * (size_t)m->view.n_blocks;
        for (int i = 0; i < (m->view.v ? 2 : 1); i++)
            device_copy_2d(m->dev, halves[i] + at + (size_t)to * bytes, pitch,
                           halves[i] + at + (size_t)from * bytes, pitch, bytes, (size_t)(end - l));
        const size_t own = scale_bytes(m, l), all = own * (size_t)m->view.n_blocks;
        int8_t *scales = m->view.scales + layers[l].scales;
        if (m->view.scales)
            device_copy_2d(m->dev, scales + (size_t)to * own, all, scales + (size_t)from * own, all,
                           own, (size_t)(end - l));
    }
}

void kv_memory_copy_state(const struct kv_memory *m, int32_t from, int32_t to)
{
    const int64_t n = m->view.slot_elements;
    device_copy(m->dev, m->view.states + to * n, m->view.states + from * n,
                (size_t)n * sizeof(float));
}
