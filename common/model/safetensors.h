/* safetensors.h: reads a folder's model.safetensors, or the shards that
 * model.safetensors.index.json names, by mmap; writes one file. The header is checked whole before
 * anything is used: JSON, known dtypes, shape times dtype = range, ranges inside the file, in
 * order, without gap or overlap. Errors name the file and the tensor. Format:
 * huggingface/safetensors. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_MODEL_SAFETENSORS_H
#define COMMON_MODEL_SAFETENSORS_H

#include "common/base/dtype.h"
#include "common/base/status.h"
#include <jansson.h>

struct safetensors; // one or several mapped files
struct safetensors_entry {
    const char *name, *file; // borrowed from the set
    enum dtype dt;
    int n_dims;
    int64_t shape[8];
    const void *data; // in the mapping; alignment is whatever the file gives
    size_t bytes;
    // Of values that do not stand in `data` as they are: n of a row, counted over all dimensions
    // but the last, from its value `first` on, as dt. NULL: they do.
    void (*read)(const struct safetensors_entry *, int64_t row, int64_t first, int64_t n,
                 void *ret);
    const void *more; // for read()
    int64_t block[2]; // rows and columns that have one of its scales (fp8_folder.h)
};

enum status safetensors_open(const char *folder, struct safetensors **ret); // a model folder, GGUF
enum status safetensors_open_file(const char *path, struct safetensors **ret);
// Parses one file's bytes (the fuzz entry and the two above use it). `where` names it in errors;
// `data` must outlive the set.
enum status safetensors_parse(const char *where, const void *data, size_t len,
                              struct safetensors **ret);
// A set of entries from another format's reader: takes them (malloc()) over, and `owner`, which
// holds what they point to, also on failure.
enum status safetensors_from(const char *where, struct safetensors_entry *entries, int n,
                             void *owner, void (*free_owner)(void *), struct safetensors **ret);
void safetensors_free(struct safetensors *set);
int safetensors_count(const struct safetensors *set);
const struct safetensors_entry *safetensors_at(const struct safetensors *set, int i);
const struct safetensors_entry *safetensors_find(const struct safetensors *set, const char *name);
const json_t *
safetensors_metadata(const struct safetensors *set); // __metadata__ of the first file; may be NULL

// Writes tensors (name, dt, shape, data in host memory) atomically, streaming: read() is called for
// each tensor when its bytes are due and must fill `bytes` of host memory.
struct safetensors_source {
    char name[160];
    enum dtype dt;
    int n_dims;
    int64_t shape[8];
    const void *tag; // for read()
};
enum status safetensors_write(const char *path, const struct safetensors_source *tensors, int n,
                              const json_t *metadata,
                              enum status (*read)(void *context, const struct safetensors_source *,
                                                  size_t bytes, void *to),
                              void *context);

#endif
