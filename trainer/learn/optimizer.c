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
 * Where several ranks train, each has the whole gradients of its own share of the batch, and
 * moments and residual of its part of every slice (param_range.h). A slice's gradients are summed
 * over the ranks, each part into its rank's, as soon as the backward pass has finished them, beside
 * it; a part that AdamW has written goes to the other arenas while the next is computed. With one
 * rank these transfers are nothing.
 *
 * On disk the state is per tensor ("exp_avg.NAME", "exp_avg_sq.NAME", "residual.NAME"; of 8-bit
 * moments also "exp_avg_scale.NAME" and "exp_avg_sq_scale.NAME", one for each block that the tensor
 * has elements in): readable by any safetensors loader, independent of padding, and bounded in host
 * memory by the largest tensor. Tensors that lie within one block of memory (q, k and v) may share
 * a scale, which then stands with both. Of a tensor that shards of a model cut within blocks, whose
 * blocks are then not one rank's, there is a scale for each element: any number of ranks goes on
 * from these, and the same number with the same bits.
 */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/learn/optimizer.h"
#include "common/base/bytes.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/model/safetensors.h"
#include "common/model/weights.h"
#include "kernels/comm.h"
#include "kernels/moments.h"
#include "trainer/learn/param_range.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RANGE_SEED 0x9e3779b1u // between the rounding noise of one range and the next

struct grad_range { // of the gradients that this rank keeps, in their norm
    int64_t at, n;  // elements
    bool shared;    // every rank has them
    double weight;  // of their squares
};

struct optimizer {
    struct device *dev;
    const struct ops *ops;
    struct optimizer_config config;
    struct comm *comm,
        *beside; // of all ranks, on the device's stream and beside it; NULL: one rank
    struct param_ranges trained;
    struct slices slices;
    int unsummed;           // the first slices, whose gradients are not yet summed over the ranks
    struct weights **grads; // (n_arenas) f32 plans
    int n_arenas;
    int64_t n;              // elements of all ranges
    float *gradients;       // (n), device, as all that follows
    struct moments moments; // of the rank's n_state elements
    uint16_t *low;          // (n_low); NULL: there are none
    double *sums;           // (n_ranges)
    float *grad_scale;      // (1)
    struct grad_range *ranges;
    int n_ranges;
    // Ranks that hold the model's other shards, and those of them that share key-value heads; NULL:
    // there are none.
    struct comm *shards, *neighbours;
    struct replica *replicas; // (n_replicas)
    int n_replicas;
    bool prepared;
    double wait_ms; // for sums over the ranks
    int64_t steps;
};

const char *const moments_kind_names[] = {"f32", "bf16", "8bit", NULL};
static const enum dtype moment_dtypes[] = {DT_F32, DT_BF16, DT_U8};

static size_t blocks(int64_t n)
{
    return ((size_t)n + MOMENT_BLOCK - 1) / MOMENT_BLOCK;
}

static int64_t count_elements(const struct param_ranges *trained)
{
    int64_t n = 0;
    for (int i = 0; i < trained->n; i++) n += trained->list[i].n;
    return n;
}

#define PART(name) offsetof(struct optimizer, name)

// What is kept of each of a rank's elements, or of each block of them, under its name on disk.
static const struct state_array {
    size_t field; // its pointer
    const char *name;
    bool per_block, of_bf16;
} state_arrays[] = {
    {PART(moments.m), "exp_avg", false, false},
    {PART(moments.v), "exp_avg_sq", false, false},
    {PART(moments.m_scale), "exp_avg_scale", true, false},
    {PART(moments.v_scale), "exp_avg_sq_scale", true, false},
    {PART(low), "residual", false, true},
};
#define N_ARRAYS 5
#define RESIDUAL 4
#define N_PARTS  8

static enum dtype array_dtype(const struct state_array *a, enum moments_kind kind)
{
    return a->per_block ? DT_F32 : a->of_bf16 ? DT_U16 : moment_dtypes[kind];
}

// A rank's state, and what gradients of n elements take.
static void list_parts(int64_t n, const struct slices *slices, enum moments_kind kind,
                       struct device_part ret[N_PARTS])
{
    for (int i = 0; i < N_ARRAYS; i++) {
        const struct state_array *a = &state_arrays[i];
        const int64_t each = a->of_bf16 ? slices->n_low : slices->n_state;
        const size_t entries = !a->per_block          ? (size_t)each
                               : kind == MOMENTS_8BIT ? blocks(each)
                                                      : 0;
        ret[i] = (struct device_part){a->field, entries * dtype_size(array_dtype(a, kind))};
    }
    ret[5] = (struct device_part){PART(gradients), (size_t)n * sizeof(float)};
    ret[6] = (struct device_part){PART(sums), (size_t)slices->n * sizeof(double)};
    ret[7] = (struct device_part){PART(grad_scale), sizeof(float)};
}

enum status optimizer_reset(struct optimizer *o)
{
    struct device_part parts[N_PARTS];
    list_parts(o->n, &o->slices, o->moments.kind, parts);
    for (int i = 0; i < N_PARTS; i++)
        if (parts[i].bytes)
            device_fill(o->dev, *device_part_pointer(o, &parts[i]), 0, parts[i].bytes);
    o->steps = 0;
    o->prepared = false;
    o->unsummed = o->slices.n;
    return device_sync(o->dev);
}

// Places a range after those before it, its gradients in its arena's view.
static enum status add_range(struct optimizer *o, const struct param_range *r)
{
    enum status st;
    const struct param_range *before = o->trained.n ? &o->trained.list[o->trained.n - 1] : NULL;
    struct param_range *t = &o->trained.list[o->trained.n];
    *t = *r;
    t->at = before ? before->at + before->n : 0;
    if (!before || r->weights != before->weights) {
        CHECK(weights_plan_like(r->weights, DT_F32, &o->grads[o->n_arenas]));
        o->n_arenas++;
    }
    struct weights *view = o->grads[o->n_arenas - 1];
    float *gradients = o->gradients + t->at;
    if (view->n_elements != r->weights->n_elements)
        FAIL(ST_MISMATCH, "gradients would have %" PRId64 " elements, the weights have %" PRId64,
             view->n_elements, r->weights->n_elements);
    view->base = r->n == view->n_elements ? gradients : NULL;
    view->bytes = view->base ? (size_t)r->n * sizeof *gradients : 0;
    weights_bind_range(view, r->first, r->n, gradients);
    o->trained.n++;
out:
    return st;
}

// Where what this rank updates of a slice begins, in elements of the gradients.
static int64_t gradients_at(const struct optimizer *o, const struct slice *slice)
{
    return o->trained.list[slice->range].at + slice_first(slice, comm_rank(o->comm));
}

static enum status add_grad_range(struct optimizer *o, const struct grad_range *range)
{
    struct grad_range *last = o->n_ranges ? &o->ranges[o->n_ranges - 1] : NULL, *room;
    if (last && last->at + last->n == range->at && last->shared == range->shared &&
        last->weight == range->weight) {
        last->n += range->n;
        return ST_OK;
    }
    if (!(room = array_room(o->ranges, (size_t)o->n_ranges, sizeof *room)))
        return status_fail(ST_NO_MEMORY, "no memory for the gradient norm");
    o->ranges = room;
    o->ranges[o->n_ranges++] = *range;
    return ST_OK;
}

enum status optimizer_new(struct device *dev, const struct param_ranges *trained, struct comm *comm,
                          const struct optimizer_config *config, struct optimizer **ret)
{
    struct device_part parts[N_PARTS];
    enum status st = ST_OK;
    struct optimizer *o = calloc(1, sizeof *o);
    if (!o) return status_fail(ST_NO_MEMORY, "no memory for the optimizer");
    o->dev = dev;
    o->ops = device_ops(dev);
    o->config = *config;
    o->comm = comm;
    o->trained.list = calloc((size_t)trained->n, sizeof *o->trained.list);
    o->grads = calloc((size_t)trained->n, sizeof *o->grads);
    if (!o->trained.list || !o->grads) FAIL(ST_NO_MEMORY, "no memory for the optimizer");
    for (const struct param_range *r = trained->list; r < trained->list + trained->n; r++)
        if (r->first < 0 || r->n <= 0 || r->n > r->weights->n_elements - r->first ||
            r->first % MOMENT_BLOCK != 0 || r->n % MOMENT_BLOCK != 0)
            FAIL(ST_INVALID,
                 "a range of %" PRId64 " elements from %" PRId64
                 " on is none of an arena's %" PRId64 " in blocks of %d",
                 r->n, r->first, r->weights->n_elements, MOMENT_BLOCK);
    o->n = count_elements(trained);
    CHECK(slices_new(trained, comm_size(comm), &o->slices));
    CHECK(comm_beside(comm, &o->beside));
    o->moments.kind = config->moments;
    list_parts(o->n, &o->slices, o->moments.kind, parts);
    CHECK(status_context(device_alloc_parts(dev, o, parts, N_PARTS),
                         "gradients and AdamW's state of %" PRId64 " elements", o->n));
    CHECK(optimizer_reset(o));
    for (int i = 0; i < trained->n; i++) CHECK(add_range(o, &trained->list[i]));
    for (int i = 0; i < o->slices.n; i++) { // what this rank updates counts whole
        const struct slice *t = &o->slices.list[i];
        CHECK(add_grad_range(o, &(struct grad_range){gradients_at(o, t), t->n, t->shared, 1}));
    }
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
    return optimizer_new(dev, &trained, NULL, config, ret);
}

void optimizer_free(struct optimizer *o)
{
    struct device_part parts[N_PARTS];
    if (!o) return;
    list_parts(o->n, &o->slices, o->config.moments, parts);
    device_release_parts(o->dev, o, parts, N_PARTS);
    comm_free(o->neighbours);
    free(o->replicas);
    free(o->ranges);
    for (int i = 0; i < o->n_arenas; i++) weights_free(o->grads[i]);
    comm_free(o->beside);
    slices_release(&o->slices);
    free(o->grads);
    param_ranges_release(&o->trained);
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
    o->unsummed = o->slices.n;
}

void optimizer_sum_grads(struct optimizer *o, int64_t first)
{
    for (; o->unsummed > 0; o->unsummed--) {
        const struct slice *slice = &o->slices.list[o->unsummed - 1];
        const struct param_range *t = &o->trained.list[slice->range];
        if (t->first + slice->first < first) return;
        float *all = o->gradients + t->at + slice->first;
        if (slice->shared)
            comm_all_reduce(o->beside, all, (size_t)slice->n, DT_F32);
        else
            comm_reduce_scatter(o->beside, all, o->gradients + gradients_at(o, slice),
                                (size_t)slice->n, DT_F32);
    }
}

// Of what several ranks hold alike each holder counts its share: what this one keeps of it is taken
// out of the norm again but for that.
static enum status discount_replicas(struct optimizer *o)
{
    const int n_kept = o->n_ranges;
    for (int i = 0; i < o->n_replicas; i++)
        for (int k = 0; k < n_kept; k++) {
            const struct replica *r = &o->replicas[i];
            const struct grad_range kept = o->ranges[k];
            const int64_t first = r->at > kept.at ? r->at : kept.at;
            const int64_t end = r->at + r->n < kept.at + kept.n ? r->at + r->n : kept.at + kept.n;
            const double share = 1.0 / r->holders;
            if (end <= first) continue;
            enum status st =
                add_grad_range(o, &(struct grad_range){first, end - first, kept.shared, share - 1});
            if (st != ST_OK) return st;
        }
    device_release(o->dev, o->sums);
    o->sums = NULL;
    return device_alloc(o->dev, (size_t)o->n_ranges * sizeof *o->sums, (void **)&o->sums);
}

enum status optimizer_use_shards(struct optimizer *o, struct comm *comm)
{
    enum status st = ST_OK;
    int sharing = 0; // ranks that are neighbours
    const struct weight_tensor *mixed;
    if (!comm) return ST_OK;
    o->shards = comm;
    CHECK(replicas_list(&o->trained, &o->replicas, &o->n_replicas, &mixed));
    if (mixed && o->moments.kind == MOMENTS_8BIT)
        FAIL(ST_UNSUPPORTED,
             "8-bit moments of %s: several ranks hold rows of it within a block of %d elements "
             "with others', and would round them differently; give a new run --optim-moments bf16",
             mixed->name, MOMENT_BLOCK);
    for (int i = 0; i < o->n_replicas; i++) {
        const int holders = o->replicas[i].holders;
        if (!o->replicas[i].in_parts || holders == comm_size(comm)) continue;
        if (sharing && holders != sharing)
            FAIL(ST_UNSUPPORTED,
                 "key-value heads are shared by %d ranks in one layer and by %d in another",
                 sharing, holders);
        if (!sharing) CHECK(comm_split(comm, comm_rank(comm) / holders, &o->neighbours));
        sharing = holders;
    }
    st = discount_replicas(o);
out:
    return st;
}

// Squares of this rank's gradients, and of those that every rank has.
static enum status sum_squares(struct optimizer *o, double *ret_own, double *ret_shared)
{
    double sums[2] = {0};
    double *host = calloc((size_t)o->n_ranges + 1, sizeof *host);
    if (!host) return status_fail(ST_NO_MEMORY, "no memory for the gradient norm");
    for (int i = 0; i < o->n_ranges; i++)
        o->ops->sum_squares(o->dev, o->sums + i, o->gradients + o->ranges[i].at, o->ranges[i].n);
    device_copy_out(o->dev, host, o->sums, (size_t)o->n_ranges * sizeof *host);
    enum status st = device_sync(o->dev);
    for (int i = 0; i < o->n_ranges; i++)
        sums[o->ranges[i].shared] += o->ranges[i].weight * host[i];
    free(host);
    *ret_own = sums[false];
    *ret_shared = sums[true];
    return st;
}

enum status optimizer_prepare(struct optimizer *o, double *ret_norm)
{
    enum status st;
    double own = 0, sum = 0;
    const int64_t start_ns = clock_now_ns();
    optimizer_sum_grads(o, INT64_MIN);
    comm_join(o->beside);
    for (struct replica *r = o->replicas; r < o->replicas + o->n_replicas; r++)
        if (r->in_parts) // over the ranks that computed a part of it each
            comm_all_reduce(r->holders < comm_size(o->shards) ? o->neighbours : o->shards,
                            o->gradients + r->at, (size_t)r->n, DT_F32);
    CHECK(device_sync(o->dev));
    o->wait_ms = clock_ms_since(start_ns);
    CHECK(sum_squares(o, &own, &sum));
    CHECK(comm_sum_host(o->comm, &own, 1));
    sum += own;
    CHECK(comm_sum_host(o->shards, &sum, 1));
    double norm = sqrt(sum);
    if (!isfinite(norm))
        FAIL(ST_INVALID, "the gradient norm is %f: the step must be skipped", norm);
    float scale = 1;
    if (o->config.max_grad_norm > 0 && o->config.max_grad_norm < norm + 1e-6)
        scale = (float)(o->config.max_grad_norm / (norm + 1e-6));
    device_copy_in(o->dev, o->grad_scale, &scale, sizeof scale);
    o->prepared = true;
    *ret_norm = norm;
out:
    return st;
}

double optimizer_wait_ms(const struct optimizer *o)
{
    return o->wait_ms;
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

// Where the tensors end that are decayed alike from an arena's element `at` on, at most `end`.
static int64_t same_decay(const struct optimizer *o, const struct weights *w, int64_t at,
                          int64_t end, bool *ret_decays)
{
    bool known = false;
    *ret_decays = true;
    if (!o->config.decay_matrices || o->config.weight_decay == 0) return end;
    for (int i = 0; i < w->n_tensors; i++) {
        const struct weight_tensor *t = &w->tensors[i];
        const bool decays = t->n_dims > 1;
        if (t->offset + t->n <= at) continue;
        if (t->offset >= end) break;
        if (known && decays != *ret_decays) return t->offset;
        *ret_decays = decays;
        known = true;
    }
    return end;
}

// AdamW on a slice; a rank's part then goes to the others' arenas.
static void update_slice(struct optimizer *o, const struct slice *t, struct adamw *adamw)
{
    const struct param_range *range = &o->trained.list[t->range];
    const struct weights *w = range->weights;
    const size_t e = dtype_size(w->dt);
    const int64_t first = slice_first(t, comm_rank(o->comm));
    char *base = (char *)w->base + (size_t)range->first * e;
    adamw->step = (uint32_t)(o->steps + 1) + (uint32_t)t->range * RANGE_SEED;
    for (int64_t at = 0, end; at < t->n; at = end) {
        bool decays;
        const int64_t begin = range->first + first; // in the arena
        const struct moments moments = moments_at(&o->moments, t->state_at + at);
        end = same_decay(o, w, begin + at, begin + t->n, &decays) - begin;
        adamw->weight_decay = decays ? (float)o->config.weight_decay : 0;
        adamw->first = first + at;
        o->ops->adamw(o->dev, base + (size_t)(first + at) * e,
                      w->dt == DT_BF16 ? o->low + t->low_at + at : NULL, &moments,
                      o->gradients + gradients_at(o, t) + at, end - at, adamw, w->dt);
    }
    if (!t->shared)
        comm_all_gather(o->beside, base + (size_t)first * e, base + (size_t)t->first * e,
                        (size_t)t->n * e);
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
        .bias_correction1 = (float)(1 - pow(o->config.beta1, step)),
        .bias_correction2 = (float)(1 - pow(o->config.beta2, step)),
        .grad_scale = o->grad_scale,
    };
    for (int i = 0; i < o->slices.n; i++) update_slice(o, &o->slices.list[i], &adamw);
    comm_join(o->beside);
    for (int i = 0; i < o->trained.n; i++) // ranges of one arena stand together
        if (i == 0 || o->trained.list[i].weights != o->trained.list[i - 1].weights)
            weights_quantise(o->trained.list[i].weights, o->dev);
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

void optimizer_memory(const struct param_ranges *trained, int n_ranks, enum moments_kind moments,
                      size_t *ret_residual, size_t *ret_moments, size_t *ret_grads)
{
    struct device_part parts[N_PARTS];
    const struct slices slices = slices_count(trained, n_ranks);
    list_parts(count_elements(trained), &slices, moments, parts);
    *ret_residual = device_parts_bytes(parts + RESIDUAL, 1);
    *ret_moments = device_parts_bytes(parts, RESIDUAL);
    *ret_grads = device_parts_bytes(parts + N_ARRAYS, N_PARTS - N_ARRAYS);
}

// ---- state on disk ------------------------------------------------------------------------------

#define STATE_FORMAT "commonweight-optimizer"

// A tensor's part of an array.
struct piece {
    const struct state_array *array;
    enum dtype dt;
    char *base; // the array's
    const struct param_range *range;
    const struct weight_tensor *tensor; // of the range's arena
    int64_t first, n;                   // entries, from the range's start
};

// each: an entry for each element, not for each block.
static int state_shape(const struct piece *p, bool each, int64_t ret[2])
{
    const struct weights *w = p->range->weights;
    memcpy(ret, p->tensor->slice.whole, 2 * sizeof *ret); // which is what a file holds
    if (!p->array->per_block || each) return p->tensor->n_dims;
    ret[0] = shard_whole_blocks(w, (int)(p->tensor - w->tensors), MOMENT_BLOCK);
    return 1;
}

static bool has_shape(const struct safetensors_entry *entry, const struct piece *p, bool each)
{
    int64_t shape[2];
    const int n = state_shape(p, each, shape);
    return entry->dt == p->dt && entry->n_dims == n &&
           memcmp(entry->shape, shape, (size_t)n * sizeof *shape) == 0;
}

// Where it lies, by a piece of no tensor, and what it is called.
static enum status state_piece(const struct optimizer *o, const struct piece *base, int i,
                               struct piece *ret_piece, struct safetensors_source *ret)
{
    const struct param_range *range = base->range;
    const struct weight_tensor *tensor = &range->weights->tensors[i];
    const bool per_block = base->array->per_block;
    int len = snprintf(ret->name, sizeof ret->name, "%s.%s%s", base->array->name,
                       range->arena ? range->arena : "", tensor->name);
    if (len < 0 || (size_t)len >= sizeof ret->name)
        return status_fail(ST_UNSUPPORTED, "tensor name \"%s\" is too long for optimizer state",
                           tensor->name);
    const int64_t at = tensor->offset - range->first, last = (at + tensor->n - 1) / MOMENT_BLOCK;
    *ret_piece = *base;
    ret_piece->tensor = tensor;
    ret_piece->first = per_block ? at / MOMENT_BLOCK : at;
    ret_piece->n = per_block ? last - at / MOMENT_BLOCK + 1 : tensor->n;
    ret->dt = base->dt;
    ret->tag = ret_piece;
    ret->n_dims = state_shape(
        ret_piece, o->shards && !shard_cuts_between(range->weights, i, MOMENT_BLOCK), ret->shape);
    return ST_OK;
}

// What a rank's part of a slice holds of a piece: n entries, from the piece's `at` on and the
// array's `memory`.
struct overlap {
    int64_t at, n;
    char *memory;
};

static struct overlap overlap_of(const struct optimizer *o, const struct piece *p,
                                 const struct slice *t, int rank)
{
    const int64_t unit = p->array->per_block ? MOMENT_BLOCK : 1;
    const int64_t begin = slice_first(t, rank) / unit, end = begin + t->n / unit;
    const int64_t from = begin > p->first ? begin : p->first;
    const int64_t to = end < p->first + p->n ? end : p->first + p->n;
    const int64_t state = (p->array->of_bf16 ? t->low_at : t->state_at) / unit;
    if (&o->trained.list[t->range] != p->range || to <= from) return (struct overlap){0};
    return (struct overlap){
        .at = from - p->first,
        .n = to - from,
        .memory = p->base + (size_t)(state + from - begin) * dtype_size(p->dt),
    };
}

struct state { // every piece of it, and what it is called on disk
    struct optimizer *o;
    int n, n_tensors;
    struct piece *pieces;               // n_tensors of each array, of the residual fewer
    struct safetensors_source *sources; // tag: its piece
    struct moment_block last;           // of the tensor before, while it is loaded
    // while it is put together of shards, else NULL: a piece of this rank's
    struct shard_join *join;
    void *own;
};

static void state_release(struct state *s)
{
    shard_join_free(s->join);
    free(s->own);
    free(s->pieces);
    free(s->sources);
}

// s: zeroed, for state_release() whatever comes of it.
static enum status state_list(struct optimizer *o, struct state *s)
{
    enum status st = ST_OK;
    size_t room = 0;
    s->o = o;
    for (int r = 0; r < o->trained.n; r++)
        room += N_ARRAYS * (size_t)o->trained.list[r].weights->n_tensors;
    s->pieces = calloc(room, sizeof *s->pieces);
    s->sources = calloc(room, sizeof *s->sources);
    if (!s->pieces || !s->sources)
        return status_fail(ST_NO_MEMORY, "no memory to list the optimizer's state");
    for (int i = 0; i < N_ARRAYS * o->trained.n; i++) {
        const struct state_array *a = &state_arrays[i / o->trained.n];
        const struct param_range *range = &o->trained.list[i % o->trained.n];
        const struct weights *w = range->weights;
        const struct piece base = {.array = a,
                                   .dt = array_dtype(a, o->moments.kind),
                                   .base = *(char **)((char *)o + a->field),
                                   .range = range};
        if (!base.base || (a->of_bf16 && w->dt != DT_BF16)) continue;
        for (int k = 0; k < w->n_tensors; k++) {
            if (!param_range_holds(range, k)) continue;
            CHECK(state_piece(o, &base, k, &s->pieces[s->n], &s->sources[s->n]));
            s->n++;
            s->n_tensors += a == state_arrays;
        }
    }
out:
    return st;
}

// A piece of all ranks, one after the other's turn, into rank 0's `to`; every rank calls it with
// the same pieces. What comes from another lands in the gradients, which are free between steps.
static enum status gather_piece(struct optimizer *o, const struct piece *p, char *to)
{
    const size_t entry = dtype_size(p->dt);
    const int rank = comm_rank(o->comm);
    for (int r = 0; r < o->slices.n_ranks; r++) {
        for (int i = 0; i < o->slices.n; i++) {
            const struct slice *t = &o->slices.list[i];
            const struct overlap part = overlap_of(o, p, t, r);
            const size_t bytes = (size_t)part.n * entry;
            const void *from = part.memory;
            if (bytes == 0 || (t->shared && r > 0)) continue;
            if (r > 0 && rank == r) comm_send(o->comm, part.memory, bytes, 0);
            if (rank > 0) continue;
            if (r > 0) comm_recv(o->comm, o->gradients, bytes, r);
            if (r > 0) from = o->gradients;
            device_copy_out(o->dev, to + (size_t)part.at * entry, from, bytes);
        }
    }
    return device_sync(o->dev);
}

// A piece of all ranks of this shard, and then of all shards; `to`: rank 0's of both.
static enum status collect_piece(void *context, const struct safetensors_source *source,
                                 size_t bytes, void *to)
{
    struct state *s = context;
    const struct piece *p = source->tag;
    enum status st = gather_piece(s->o, p, s->join ? s->own : to);
    (void)bytes;
    if (st != ST_OK || !s->join || comm_rank(s->o->comm) > 0) return st;
    const int i = (int)(p->tensor - p->range->weights->tensors);
    return p->array->per_block ? shard_join_blocks(s->join, i, MOMENT_BLOCK, s->own, to)
                               : shard_join_tensor(s->join, i, s->own, dtype_size(p->dt), to);
}

enum status optimizer_save(struct optimizer *o, const char *path)
{
    enum status st;
    json_t *metadata = NULL;
    char steps[24];
    struct state state = {0};
    CHECK(state_list(o, &state));
    if (o->shards) { // to be put together
        const struct weights *w = o->trained.list[0].weights;
        state.own = malloc((size_t)weights_largest(w) * sizeof(float));
        if (!state.own) FAIL(ST_NO_MEMORY, "no memory to save the optimizer");
        CHECK(shard_join_new(w, o->dev, o->shards, &state.join));
    }
    for (int i = 0; !path && i < state.n; i++)
        CHECK(collect_piece(&state, &state.sources[i], 0, NULL));
    if (!path) goto out;
    snprintf(steps, sizeof steps, "%" PRId64, o->steps);
    metadata = json_pack("{s:s, s:s, s:s}", "format", STATE_FORMAT, "step", steps, "moments",
                         moments_kind_names[o->moments.kind]);
    if (!metadata) FAIL(ST_NO_MEMORY, "no memory to save the optimizer");
    CHECK(safetensors_write(path, state.sources, state.n, metadata, collect_piece, &state));
out:
    json_decref(metadata);
    state_release(&state);
    return st;
}

// States written before there was a choice say nothing of their moments: they are f32.
static enum status read_metadata(const struct optimizer *o, const char *path,
                                 const struct safetensors *set, int64_t *ret_steps)
{
    const json_t *metadata = safetensors_metadata(set);
    const char *format = json_string_value(json_object_get(metadata, "format"));
    const char *text = json_string_value(json_object_get(metadata, "step"));
    const char *kind = json_string_value(json_object_get(metadata, "moments"));
    const char *mine = moments_kind_names[o->moments.kind];
    if (!format || strcmp(format, STATE_FORMAT) != 0)
        return status_fail(ST_FORMAT, "%s: not an optimizer state (its format is not \"%s\")", path,
                           STATE_FORMAT);
    char *end = NULL;
    errno = 0;
    *ret_steps = text ? strtoll(text, &end, 10) : -1;
    if (!text || end == text || *end || errno || *ret_steps < 0)
        return status_fail(ST_FORMAT, "%s: metadata field step is \"%s\", not a count", path,
                           text ? text : "");
    if (!kind) kind = moments_kind_names[MOMENTS_F32];
    if (strcmp(kind, mine) == 0) return ST_OK;
    return status_fail(ST_MISMATCH,
                       "%s holds moments in %s, this run keeps them in %s; go on with "
                       "--optim-moments %s",
                       path, kind, mine, kind);
}

static void copy_in(struct optimizer *o, const struct piece *p, const void *data)
{
    const size_t entry = dtype_size(p->dt);
    for (int i = 0; i < o->slices.n; i++) {
        const struct overlap part = overlap_of(o, p, &o->slices.list[i], comm_rank(o->comm));
        device_copy_in(o->dev, part.memory, (const char *)data + (size_t)part.at * entry,
                       (size_t)part.n * entry);
    }
}

// This rank's part of a whole tensor's piece.
static enum status load_piece(struct state *s, const struct piece *p, const struct safetensors *set)
{
    enum status st = ST_OK;
    const bool coded = p->dt == DT_U8; // 8-bit moments, which are loaded with their scales
    const struct piece *blocks = coded ? p + 2 * s->n_tensors : p;
    const char *name = s->sources[blocks - s->pieces].name;
    const struct safetensors_entry *entry = safetensors_find(set, s->sources[p - s->pieces].name),
                                   *scales = safetensors_find(set, name);
    const struct weights *w = p->range->weights;
    const bool as_saved = !s->o->shards && has_shape(scales, blocks, false);
    struct piece all = *p; // with what else is in its blocks
    void *own = NULL;
    float *each = NULL;
    if (as_saved) copy_in(s->o, p, entry->data);
    if (as_saved || p->array->per_block || p->n == 0) return ST_OK;
    if (coded) {
        all.first -= p->first % MOMENT_BLOCK;
        all.n = blocks->n * MOMENT_BLOCK;
    }
    own = calloc((size_t)all.n, dtype_size(p->dt));
    each = calloc(coded ? (size_t)all.n : 1, sizeof *each);
    if (!own || !each) FAIL(ST_NO_MEMORY, "no memory to load the optimizer's state");
    if (!coded)
        shard_take(p->tensor, entry->data, dtype_size(p->dt), own);
    else
        shard_take_moments(w, (int)(p->tensor - w->tensors), entry->data, scales->data,
                           !has_shape(scales, blocks, false), p->array->field == PART(moments.v),
                           &s->last, own, each);
    copy_in(s->o, &all, own);
    if (coded) copy_in(s->o, blocks, each);
out:
    free(own);
    free(each);
    return st;
}

enum status optimizer_load(struct optimizer *o, const char *path)
{
    enum status st;
    struct safetensors *set = NULL;
    struct state state = {0};
    int64_t steps = 0;
    CHECK(state_list(o, &state));
    CHECK(safetensors_open_file(path, &set));
    CHECK(read_metadata(o, path, set, &steps));
    // Everything is checked before anything is written.
    for (int i = 0; i < state.n; i++) {
        const struct safetensors_source *want = &state.sources[i];
        const struct safetensors_entry *entry = safetensors_find(set, want->name);
        if (!entry) FAIL(ST_MISMATCH, "%s: tensor %s is missing", path, want->name);
        const struct piece *p = &state.pieces[i];
        if (!has_shape(entry, p, false) && !(p->array->per_block && has_shape(entry, p, true)))
            FAIL(ST_MISMATCH, "%s: tensor %s has another shape or dtype than the model's", path,
                 want->name);
    }
    if (state.n != safetensors_count(set))
        FAIL(ST_MISMATCH, "%s: holds %d tensors, the state of what is trained here has %d", path,
             safetensors_count(set), state.n);
    for (int i = 0; i < state.n; i++) CHECK(load_piece(&state, &state.pieces[i], set));
    CHECK(device_sync(o->dev));
    o->steps = steps;
    if (state.last.rounded)
        log_info("%s: 8-bit moments of other shards are rounded anew, in blocks of %d elements",
                 path, MOMENT_BLOCK);
out:
    safetensors_free(set);
    state_release(&state);
    return st;
}
