/* fuzz_dataset.c: any text as a JSONL data set: refused, or examples that hold what training relies
 * on. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/data/data.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dataset *d = NULL;
    if (dataset_parse("fuzz", (const char *)data, size, NULL, &d) != ST_OK) return 0;
    if (d->n < 1) abort();
    for (int i = 0; i < d->n; i++) {
        const struct example *e = &d->examples[i];
        if (!e->prompt == !e->messages || (e->prompt && e->prompt_len == 0)) abort();
        if (!e->answer != !e->completion) abort();
    }
    dataset_free(d);
    return 0;
}
