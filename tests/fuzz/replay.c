/* replay.c: a main for a fuzz entry without libFuzzer: runs the files named on the command line
 * through it once each. Any compiler; tests/fuzz/run links it when SECONDS is 0. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/file.h"
#include <stdio.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        struct bytes input = BYTES_INIT;
        if (file_read(argv[i], (size_t)64 << 20, &input) != ST_OK) {
            fprintf(stderr, "%s\n", status_message());
            return 1;
        }
        LLVMFuzzerTestOneInput((const uint8_t *)bytes_text(&input), input.len);
        bytes_release(&input);
    }
    return 0;
}
