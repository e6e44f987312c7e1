/* gguf.h: GGUF files (llama.cpp's, versions 2 and 3): what is in one, and the Hugging Face folder
 * that it stands for. Its metadata become the texts of config.json, generation_config.json,
 * tokenizer.json and tokenizer_config.json, its tensors entries under Hugging Face's names, so that
 * the readers of a folder go on with them as with a folder's own. Everything is checked against the
 * file's length before it is used; errors name the file. Any thread; read-only once open. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_MODEL_GGUF_H
#define COMMON_MODEL_GGUF_H

#include "common/base/file.h"
#include "common/model/safetensors.h"

// ---- quantised values (quant.c) -----------------------------------------------------------------
// A type's blocks: `values` neighbours of a row in `bytes`.
struct quant_type {
    const char *name;
    int values, bytes;
    void (*read)(const struct quant_type *, const uint8_t *block, float *ret); // NULL: not known
    uint8_t low, high, min; // where a block has values' lower and upper bits, and the least value
    uint8_t zero;           // which value stands for 0
};
const struct quant_type *quant_type_at(uint32_t number); // ggml's numbers; NULL: none
// n values from number `first` on, of blocks that lie one behind the other.
void quant_read(const struct quant_type *type, const void *data, int64_t first, int64_t n,
                float *ret);

// ---- the file (gguf.c) --------------------------------------------------------------------------
#define GGUF_NAME 128
struct gguf_tensor {
    char name[GGUF_NAME];
    const struct quant_type *type; // one that can be read
    int n_dims;
    int64_t shape[4]; // rows first, as Hugging Face counts
    const uint8_t *data;
    size_t bytes;
    int heads; // above 0: rows of each head have their halves' in turn, as llama's q and k
    float add; // to every value
};
struct gguf {
    char *where;
    json_t *metadata; // {"general.architecture": "llama", ...}
    struct gguf_tensor *tensors;
    int n_tensors;
    struct file_map map; // empty: the caller's memory
};

bool gguf_is_file(const char *path); // a file that begins as a GGUF file does
enum status gguf_open(const char *path, struct gguf **ret);
// The same of a file's bytes, which must outlive it.
enum status gguf_parse(const char *where, const void *data, size_t len, struct gguf **ret);
void gguf_free(struct gguf *g);

// ---- as a folder (gguf.c, text/gguf_tokenizer.c) -----------------------------------------------
bool gguf_has_file(const struct gguf *g, const char *name);
// The content of the folder's file `name`; *ret NULL where the folder has none. ST_UNSUPPORTED
// names an architecture or a tokenizer that is not known.
enum status gguf_folder_file(const struct gguf *g, const char *name, json_t **ret);
enum status gguf_tokenizer(const struct gguf *g, json_t **ret);
enum status gguf_tokenizer_config(const struct gguf *g, json_t **ret);
// The tensors as a folder's; takes g over, also on failure.
enum status gguf_tensors(struct gguf *g, struct safetensors **ret);

#endif
