/* fuzz_gguf.c: any bytes as a GGUF file: refused, or its folder's files are made, its tensors lie
 * inside it, and the readers of a folder's files take or refuse what is made. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "common/model/config.h"
#include "common/model/gguf.h"
#include "common/text/tokenizer.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_tokenizer(json_t *json)
{
    char *text = json_dumps(json, 0);
    struct tokenizer_text files[TOKENIZER_FILES] = {{text, text ? strlen(text) : 0}};
    struct tokenizer *tokenizer;
    if (text && tokenizer_parse("fuzz", files, &tokenizer) == ST_OK) tokenizer_free(tokenizer);
    free(text);
}

static void read_tensors(struct gguf *g, const uint8_t *data, size_t size)
{
    struct safetensors *set;
    if (gguf_tensors(g, &set) != ST_OK) return;
    for (int i = 0; i < safetensors_count(set); i++) {
        const struct safetensors_entry *e = safetensors_at(set, i);
        const uint8_t *begin = e->data;
        float values[4];
        if (begin < data || begin + e->bytes > data + size) abort();
        const int64_t cols = e->n_dims > 1 ? e->shape[e->n_dims - 1] : 1;
        int64_t rows = e->shape[0];
        for (int d = 1; d < e->n_dims - 1; d++) rows *= e->shape[d];
        e->read(e, 0, 0, cols < 4 ? cols : 4, values);
        e->read(e, rows - 1, cols < 4 ? 0 : cols - 4, cols < 4 ? cols : 4, values);
    }
    safetensors_free(set);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const names[] = {"config.json", "tokenizer.json", "tokenizer_config.json"};
    struct gguf *g;
    if (gguf_parse("fuzz", data, size, &g) != ST_OK) return 0;
    for (int i = 0; i < 3; i++) {
        json_t *json = NULL;
        struct model_config *config;
        if (gguf_folder_file(g, names[i], &json) != ST_OK || !json) continue;
        if (i == 0 && model_config_from_json("fuzz", json, &config) == ST_OK)
            model_config_free(config);
        if (i == 1) read_tokenizer(json);
        json_decref(json);
    }
    read_tensors(g, data, size);
    return 0;
}
