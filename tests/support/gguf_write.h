/* gguf_write.h: GGUF files for tests, as convert_hf_to_gguf.py of llama.cpp makes them of a model
 * folder: metadata, names, q and k of llama with the rows of each head's halves in turn, Gemma's
 * norms plus one. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_GGUF_WRITE_H
#define TESTS_SUPPORT_GGUF_WRITE_H

#include "common/base/bytes.h"
#include <jansson.h>

struct gguf_writer { // all zero: empty
    struct bytes metadata, tensors, data;
    uint64_t n_metadata, n_tensors;
};

// Of JSON: a text, a boolean, an integer (u32), a real (f32), or a list of texts, of integers (i32)
// or of reals.
void gguf_put(struct gguf_writer *w, const char *key, const json_t *value);
// `shape` rows first; type: ggml's number.
void gguf_put_tensor(struct gguf_writer *w, const char *name, int n_dims, const int64_t *shape,
                     uint32_t type, const void *data, size_t len);
// The file's bytes; the writer is empty then.
void gguf_finish(struct gguf_writer *w, struct bytes *ret);
// A folder's config and tensors, and its tokenizer where it has one, as an architecture.
void gguf_put_folder(struct gguf_writer *w, const char *folder, const char *arch);
void gguf_write_folder(const char *folder, const char *arch, const char *path);

#endif
