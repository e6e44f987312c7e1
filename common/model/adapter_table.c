/* adapter_table.c: a site is a block of the base's arena that adapters can change (one matmul of
 * the forward pass); its parts are the block's tensors. The list of factors in device memory is
 * (parts of all sites, max_adapters); a copy of it on the host says which sites anybody adapts. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/adapter_table.h"
#include "common/base/hash.h"

#include <stdlib.h>
#include <string.h>

struct site {
    int n_parts, first[LORA_PARTS + 1], k; // columns of the matmul's result; see lora_args
    int at;                                // its first part in the list
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
