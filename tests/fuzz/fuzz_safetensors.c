/* fuzz_safetensors.c: any bytes as a safetensors file: refused, or every tensor lies inside them,
 * and matrices in FP8 with the scales that they call for can be read.
 */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/fp8_folder.h"
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_fp8(const struct safetensors *set, const struct safetensors_entry *codes)
{
    static const int blocks[][2] = {{0, 0}, {2, 3}};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
        struct safetensors_entry e;
        if (fp8_find(set, codes, blocks[i], &e) != ST_OK) continue;
        float *row = malloc((size_t)e.shape[1] * sizeof *row);
        e.read(&e, e.shape[0] - 1, 0, e.shape[1], row);
        free(row);
        if (fp8_rounding(&e) < 0) abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct safetensors *set;
    if (safetensors_parse("fuzz", data, size, &set) != ST_OK) return 0;
    for (int i = 0; i < safetensors_count(set); i++) {
        const struct safetensors_entry *e = safetensors_at(set, i);
        const uint8_t *begin = e->data;
        if (begin < data || begin + e->bytes > data + size) abort();
        if (safetensors_find(set, e->name) != e) abort();
        if (e->dt == DT_E4M3) read_fp8(set, e);
    }
    safetensors_free(set);
    return 0;
}
