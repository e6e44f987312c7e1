/* shard_join.c: see shard_join.h. Slices travel through a small buffer on the device, because that
 * is what communicators carry; where each belongs is said by the plan of the rank that sends it. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/shard_join.h"

#include <stdlib.h>
#include <string.h>

#define PIECE_BYTES ((size_t)16 << 20)

struct shard_join {
    const struct weights *own;
    struct device *dev;
    struct comm *comm;
    struct weights **plans; // (ranks) rank 0's
    void *piece;            // (PIECE_BYTES) device
    void *slice;            // of the largest tensor, f32; host
};

static int64_t columns(const struct weight_tensor *t)
{
    return t->n_dims == 2 ? t->shape[1] : 1;
}

// The entry of the whole tensor where a row of the slice begins.
static int64_t place_of(const struct weight_tensor *t, int64_t row)
{
    const struct tensor_slice *s = &t->slice;
    int run = 0;
    for (; row >= s->runs[run].n; run++) row -= s->runs[run].n;
    return (s->runs[run].first + row) * (t->n_dims == 2 ? s->whole[1] : 1) + s->first_col;
}

void shard_take(const struct weight_tensor *t, const void *whole, size_t element, void *ret_own)
{
    const size_t bytes = (size_t)columns(t) * element;
    for (int64_t row = 0; row < t->shape[0]; row++)
        memcpy((char *)ret_own + (size_t)row * bytes,
               (const char *)whole + (size_t)place_of(t, row) * element, bytes);
}

static void put(const struct weight_tensor *t, const void *own, size_t element, void *ret_whole)
{
    const size_t bytes = (size_t)columns(t) * element;
    for (int64_t row = 0; row < t->shape[0]; row++)
        memcpy((char *)ret_whole + (size_t)place_of(t, row) * element,
               (const char *)own + (size_t)row * bytes, bytes);
}

int64_t shard_whole_elements(const struct weight_tensor *t)
{
    return t->slice.whole[0] * (t->n_dims == 2 ? t->slice.whole[1] : 1);
}

static enum status plan_ranks(struct shard_join *j)
{
    enum status st = ST_OK;
    const int n = comm_size(j->comm);
    struct model_config config = *j->own->config; // other ranks' have the same sizes
    j->plans = calloc((size_t)n, sizeof *j->plans);
    if (!j->plans) FAIL(ST_NO_MEMORY, "no memory for the plans of %d shards", n);
    for (config.shard.rank = 0; config.shard.rank < n; config.shard.rank++)
        CHECK(weights_plan(&config, j->own->dt, &j->plans[config.shard.rank]));
out:
    return st;
}

enum status shard_join_new(const struct weights *w, struct device *dev, struct comm *comm,
                           struct shard_join **ret)
{
    enum status st = ST_OK;
    int64_t largest = 0;
    struct shard_join *j = NULL;
    if (!comm) {
        *ret = NULL;
        return ST_OK;
    }
    j = calloc(1, sizeof *j);
    if (!j) FAIL(ST_NO_MEMORY, "no memory to put shards together");
    j->own = w;
    j->dev = dev;
    j->comm = comm;
    for (int i = 0; i < w->n_tensors; i++)
        if (w->tensors[i].n > largest) largest = w->tensors[i].n;
    j->slice = malloc((size_t)largest * sizeof(float));
    if (!j->slice) FAIL(ST_NO_MEMORY, "no memory to put shards together");
    CHECK(device_alloc(dev, PIECE_BYTES, &j->piece));
    if (comm_rank(comm) == 0) CHECK(plan_ranks(j));
    *ret = TAKE_PTR(j);
out:
    shard_join_free(j);
    return st;
}

void shard_join_free(struct shard_join *j)
{
    if (!j) return;
    for (int r = 0; j->plans && r < comm_size(j->comm); r++) weights_free(j->plans[r]);
    free(j->plans);
    free(j->slice);
    device_release(j->dev, j->piece);
    free(j);
}

static enum status send_slice(struct shard_join *j, const char *own, size_t bytes)
{
    enum status st = ST_OK;
    for (size_t at = 0, n; at < bytes && st == ST_OK; at += n) {
        n = bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES;
        device_copy_in(j->dev, j->piece, own + at, n);
        comm_send(j->comm, j->piece, n, 0);
        st = device_sync(j->dev);
    }
    return st;
}

static enum status receive_slice(struct shard_join *j, int rank, char *slice, size_t bytes)
{
    enum status st = ST_OK;
    for (size_t at = 0, n; at < bytes && st == ST_OK; at += n) {
        n = bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES;
        comm_recv(j->comm, j->piece, n, rank);
        device_copy_out(j->dev, slice + at, j->piece, n);
        st = device_sync(j->dev);
    }
    return st;
}

enum status shard_join_tensor(struct shard_join *j, int i, const void *own, size_t element,
                              void *whole)
{
    const size_t bytes = (size_t)j->own->tensors[i].n * element;
    enum status st = ST_OK;
    if (comm_rank(j->comm) > 0) return send_slice(j, own, bytes);
    put(&j->own->tensors[i], own, element, whole);
    for (int r = 1; r < comm_size(j->comm) && st == ST_OK; r++) {
        st = receive_slice(j, r, j->slice, bytes);
        if (st == ST_OK) put(&j->plans[r]->tensors[i], j->slice, element, whole);
    }
    return st;
}
