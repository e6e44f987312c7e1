/* fuzz_safetensors.c: any bytes as a safetensors file: refused, or every tensor lies inside them.
 */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/safetensors.h"
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct safetensors *set;
    if (safetensors_parse("fuzz", data, size, &set) != ST_OK) return 0;
    for (int i = 0; i < safetensors_count(set); i++) {
        const struct safetensors_entry *e = safetensors_at(set, i);
        const uint8_t *begin = e->data;
        if (begin < data || begin + e->bytes > data + size) abort();
        if (safetensors_find(set, e->name) != e) abort();
    }
    safetensors_free(set);
    return 0;
}
