/* shard.c: makes a model's config that of one rank: the numbers that forward and backward pass,
 * scratch, KV pool and arena go by become the rank's own. Any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/config.h"

#include <stdlib.h>
#include <string.h>

static enum status check_shared(const struct model_config *c, const char *key, int number, int size)
{
    if (number % size == 0) return ST_OK;
    return status_fail(ST_INVALID,
                       "%s: %s is %d, which %d ranks cannot share evenly; take a "
                       "--tensor-parallel-size that divides it",
                       c->architecture, key, number, size);
}

static enum status check_layer(const struct model_config *c, const struct layer_config *l, int size)
{
    enum status st;
    if (l->delta.n_heads > 0)
        FAIL(ST_INVALID,
             "%s: layers of linear attention are not divided among ranks; leave "
             "--tensor-parallel-size at 1",
             c->architecture);
    CHECK(check_shared(c, "num_attention_heads", l->n_heads, size));
    if (size % l->n_kv_heads != 0)
        CHECK(check_shared(c, "num_key_value_heads", l->n_kv_heads, size));
    CHECK(check_shared(c, l->moe.n_experts > 0 ? "an expert's width" : "intermediate_size",
                       l->intermediate, size));
    CHECK(check_shared(c, "shared_expert_intermediate_size", l->shared_intermediate, size));
out:
    return st;
}

static void take_part(struct layer_config *l, int size)
{
    l->n_heads /= size;
    l->n_kv_heads = l->n_kv_heads > size ? l->n_kv_heads / size : 1;
    l->intermediate /= size;
    l->shared_intermediate /= size;
}

enum status model_config_shard(struct model_config *c, struct shard shard)
{
    const size_t bytes = (size_t)c->n_layers * sizeof *c->layers;
    struct layer_config *layers = NULL;
    enum status st = ST_OK;
    if (shard.size == 1) return ST_OK;
    if (c->qk_norm_whole)
        FAIL(ST_INVALID,
             "%s: norms of queries and keys go over all heads, which several ranks cannot share; "
             "take --tensor-parallel-size 1",
             c->architecture);
    CHECK(check_shared(c, "vocab_size", c->vocab_size, shard.size));
    for (int l = 0; l < c->n_layers; l++) CHECK(check_layer(c, &c->whole[l], shard.size));
    layers = malloc(bytes);
    if (!layers) FAIL(ST_NO_MEMORY, "no memory for a shard's config");
    memcpy(layers, c->whole, bytes);
    for (int l = 0; l < c->n_layers; l++) take_part(&layers[l], shard.size);
    c->layers = layers;
    c->shard = shard;
out:
    return st;
}
