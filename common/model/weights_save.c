/* weights_save.c: the arena's values as a model folder, in the names and forms that its family is
 * published in; of several ranks rank 0 writes what all hold. The thread of the device. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/weights.h"
#include "common/base/file.h"
#include "common/model/safetensors.h"
#include "kernels/comm.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- shards -------------------------------------------------------------------------------------
// Slices travel through a small buffer on the device, because that is what communicators carry;
// where each belongs is said by the plan of the rank that sends it.

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

static int64_t whole_elements(const struct weight_tensor *t)
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

// ---- saving -------------------------------------------------------------------------------------

struct save {
    const struct weights *w;
    struct device *dev;
    struct shard_join *join;
    void *own, *whole; // one tensor in its dtype of the arena: what is held, and all of it
    void *converted;   // the same as it is saved, on its way into one that holds several
};

static enum status save_open(const struct weights *w, struct device *dev, struct save *ret)
{
    enum status st;
    int64_t own = 0, whole = 0, stored = 0;
    *ret = (struct save){.w = w, .dev = dev};
    for (int i = 0; i < w->n_tensors; i++) {
        const struct weight_tensor *t = &w->tensors[i];
        if (t->n > own) own = t->n;
        if (whole_elements(t) > whole) whole = whole_elements(t);
        if (t->stored.n_dims) stored = whole;
    }
    if (w->config->shard.size > 1 && !w->comm)
        FAIL(ST_UNSUPPORTED, "a folder's tensors are whole, and this is shard %d of %d",
             w->config->shard.rank, w->config->shard.size);
    CHECK(shard_join_new(w, dev, w->comm, &ret->join));
    ret->own = malloc((size_t)own * sizeof(float));
    if (ret->join) ret->whole = malloc((size_t)whole * sizeof(float));
    if (stored) ret->converted = malloc((size_t)stored * sizeof(float));
    if (!ret->own || (stored && !ret->converted) || (ret->join && !ret->whole))
        FAIL(ST_NO_MEMORY, "no memory to save weights");
out:
    return st;
}

static void save_close(struct save *s)
{
    shard_join_free(s->join);
    free(s->own);
    free(s->whole);
    free(s->converted);
}

// A tensor into s->own, and of several ranks into rank 0's s->whole.
static enum status collect_tensor(struct save *s, int i)
{
    const struct weight_tensor *t = &s->w->tensors[i];
    const size_t element = dtype_size(weights_tensor_dtype(s->w, t));
    device_copy_out(s->dev, s->own, weights_address(s->w, t->offset), (size_t)t->n * element);
    enum status st = device_sync(s->dev);
    return st == ST_OK && s->join ? shard_join_tensor(s->join, i, s->own, element, s->whole) : st;
}

static void convert_for_save(struct save *s, const struct weight_tensor *t, enum dtype as, void *to)
{
    const void *from = s->join ? s->whole : s->own;
    const int64_t n = whole_elements(t);
    const enum dtype own = weights_tensor_dtype(s->w, t);
    if (as == own)
        memcpy(to, from, (size_t)n * dtype_size(as));
    else
        weights_convert(to, as, from, own, n);
}

// Every tensor of the table from t on that the folder has in the same one, each to its places in
// it.
static enum status read_stored(struct save *s, const struct weight_tensor *t, enum dtype as,
                               char *to)
{
    const struct weight_tensor *end = s->w->tensors + s->w->n_tensors, *first = t;
    const size_t element = dtype_size(as);
    enum status st = ST_OK;
    for (; t < end && strcmp(t->stored.name, first->stored.name) == 0; t++) {
        const int64_t cols = t->n_dims == 2 ? t->slice.whole[1] : 1;
        CHECK(collect_tensor(s, (int)(t - s->w->tensors)));
        convert_for_save(s, t, as, s->converted);
#pragma omp parallel for
        for (int64_t c = 0; c < cols; c++)
            for (int64_t row = 0; row < t->slice.whole[0]; row++)
                memcpy(to + (size_t)(t->stored.first + row * t->stored.row_step +
                                     c * t->stored.col_step) *
                                element,
                       (char *)s->converted + (size_t)(row * cols + c) * element, element);
    }
out:
    return st;
}

static enum status read_for_save(void *context, const struct safetensors_source *source,
                                 size_t bytes, void *to)
{
    struct save *s = context;
    const struct weight_tensor *t = source->tag;
    (void)bytes;
    if (t->stored.n_dims) return read_stored(s, t, source->dt, to);
    enum status st = collect_tensor(s, (int)(t - s->w->tensors));
    if (st == ST_OK) convert_for_save(s, t, source->dt, to);
    return st;
}

enum status weights_save_part(const struct weights *w, struct device *dev)
{
    struct save save;
    enum status st = save_open(w, dev, &save);
    for (int i = 0; st == ST_OK && i < w->n_tensors; i++) st = collect_tensor(&save, i);
    save_close(&save);
    return st;
}

enum status weights_save_as(const struct weights *w, struct device *dev, const char *folder,
                            const char *name, enum dtype as)
{
    struct save save;
    struct safetensors_source *sources = calloc((size_t)w->n_tensors, sizeof *sources);
    json_t *metadata = json_pack("{s:s}", "format", "pt"); // what Hugging Face's loaders look for
    char path[PATH_ROOM];
    int n = 0;
    enum status st;
    CHECK(save_open(w, dev, &save));
    CHECK(path_put(path, folder, "%s", name));
    for (int i = 0; sources && i < w->n_tensors; i++) {
        const struct weight_tensor *t = &w->tensors[i];
        if (!weights_is_first_stored(t)) continue;
        struct safetensors_source *source = &sources[n++];
        snprintf(source->name, sizeof source->name, "%s", weights_folder_name(t));
        source->dt = t->is_buffer ? DT_F32 : as;
        source->n_dims = weights_file_shape(t, source->shape);
        source->tag = t;
    }
    if (!sources || !metadata) FAIL(ST_NO_MEMORY, "%s: no memory to save", folder);
    st = safetensors_write(path, sources, n, metadata, read_for_save, &save);
out:
    save_close(&save);
    free(sources);
    json_decref(metadata);
    return st;
}

enum status weights_save(const struct weights *w, struct device *dev, const char *folder,
                         enum dtype as)
{
    return weights_save_as(w, dev, folder, "model.safetensors", as);
}
