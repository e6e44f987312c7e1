/* fuzz_bridge_file.c: libFuzzer entry for the bridge file's parser. What it accepts must hold what
 * a client relies on when it maps memory by these numbers: every tensor inside its segment. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/bridge_file.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct bridge_file *file = NULL;
    if (bridge_file_parse("fuzz", (const char *)data, size, &file) != ST_OK) return 0;
    for (int i = 0; i < file->n_roles; i++) {
        const struct bridge_role *r = &file->roles[i];
        if (r->canary_offset + 16 > r->bytes) abort();
        for (int k = 0; k < r->n_tensors; k++) {
            const struct bridge_tensor *t = &r->tensors[k];
            if (t->bytes == 0 || t->bytes > r->bytes || t->offset > r->bytes - t->bytes) abort();
        }
    }
    bridge_file_free(file);
    return 0;
}
