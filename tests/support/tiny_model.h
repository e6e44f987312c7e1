/* tiny_model.h: writes a small Qwen2 model folder with random weights: config.json and
 * model.safetensors, no tokenizer. The same numbers give the same bytes. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_TINY_MODEL_H
#define TESTS_SUPPORT_TINY_MODEL_H

#include "common/base/status.h"
#include <jansson.h>
#include <stdint.h>

struct tiny_model {
    int hidden, layers, vocab; // hidden: a multiple of 32
    int intermediate;          // 0: 2 * hidden
    int max_positions;         // 0: 512
    bool tie_embeddings;
    int eos_id; // -1: none
    uint64_t seed;
};

// Makes the folder where needed. Heads are 16 wide, two query heads share one of keys and values.
enum status tiny_model_write_as(const char *folder, const struct tiny_model *shape);
// Untied, 512 positions, no end-of-sequence token.
enum status tiny_model_write(const char *folder, int hidden, int layers, int vocab, uint64_t seed);
// The same, in a new folder of test_folder(); failures fail the running test.
const char *tiny_folder(int hidden, int layers, int vocab, uint64_t seed);
const char *tiny_folder_as(const struct tiny_model *shape);
// Writes FOLDER/NAME, and takes the value (NULL: there was no memory for it).
enum status tiny_json_write(const char *folder, const char *name, json_t *json);

#endif
