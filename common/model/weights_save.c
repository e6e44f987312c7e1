/* weights_save.c: the arena's values as a model folder, in the names and forms that its family is
 * published in; of several ranks rank 0 writes what all hold. The thread of the device. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/file.h"
#include "common/model/safetensors.h"
#include "common/model/shard_join.h"
#include "common/model/weights_impl.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct save {
    const struct weights *w;
    struct device *dev;
    struct shard_join *join;
    void *own, *whole; // one tensor in its dtype of the arena: what is held, and all of it
    void *converted;   // the same as it is saved, on its way into one that holds several
};

void weights_use_comm(struct weights *w, struct comm *comm)
{
    w->comm = comm;
}

static enum status save_open(const struct weights *w, struct device *dev, struct save *ret)
{
    enum status st;
    int64_t own = 0, whole = 0, stored = 0;
    *ret = (struct save){.w = w, .dev = dev};
    for (int i = 0; i < w->n_tensors; i++) {
        const struct weight_tensor *t = &w->tensors[i];
        if (t->n > own) own = t->n;
        if (shard_whole_elements(t) > whole) whole = shard_whole_elements(t);
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
    const int64_t n = shard_whole_elements(t);
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

static void describe_source(const struct weight_tensor *t, enum dtype as,
                            struct safetensors_source *ret)
{
    snprintf(ret->name, sizeof ret->name, "%s", weights_folder_name(t));
    ret->dt = t->is_buffer ? DT_F32 : as;
    ret->n_dims = weights_file_shape(t, ret->shape);
    ret->tag = t;
}

enum status weights_save_as(const struct weights *w, struct device *dev, const char *folder,
                            const char *name, enum dtype as)
{
    struct save save;
    struct safetensors_source *sources = calloc((size_t)w->n_tensors, sizeof *sources);
    json_t *metadata = json_pack("{s:s}", "format", "pt"); // what Hugging Face's loaders look for
    char *path = path_join(folder, name);
    int n = 0;
    enum status st;
    CHECK(save_open(w, dev, &save));
    for (int i = 0; sources && i < w->n_tensors; i++)
        if (weights_is_first_stored(&w->tensors[i]))
            describe_source(&w->tensors[i], as, &sources[n++]);
    if (!sources || !metadata || !path) FAIL(ST_NO_MEMORY, "%s: no memory to save", folder);
    CHECK(safetensors_write(path, sources, n, metadata, read_for_save, &save));
    st = file_sync_folder(folder);
out:
    save_close(&save);
    free(sources);
    json_decref(metadata);
    free(path);
    return st;
}

enum status weights_save(const struct weights *w, struct device *dev, const char *folder,
                         enum dtype as)
{
    return weights_save_as(w, dev, folder, "model.safetensors", as);
}
