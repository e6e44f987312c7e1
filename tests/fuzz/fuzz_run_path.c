/* fuzz_run_path.c: any text as a tinker:// path: refused, or one that names a place within the
 * folder of runs, and is written as it was read. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/serve/runs.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_name(const char *name)
{
    if (name[0] == 0 || name[0] == '.' || strchr(name, '/') || strchr(name, '\\')) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct run_path path;
    char *text = strndup((const char *)data, size);
    if (!text) abort();
    if (run_path_parse(text, &path) == ST_OK) {
        check_name(path.run);
        check_name(path.name);
        if (strcmp(path.text, text) != 0) abort();
    }
    free(text);
    return 0;
}
