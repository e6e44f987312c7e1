/* fuzz_rank_message.c: libFuzzer entry for what comes over a connection between ranks: its frames,
 * whose mac is not to be guessed, and the hello within one, which is read as if it were. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "common/ranks/rendezvous.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_frames(const uint8_t *data, size_t size)
{
    struct conn w;
    json_t *message = NULL;
    conn_open(&w, -1, "token");
    bytes_append(&w.in, data, size);
    while (conn_next(&w, &message) == ST_OK && message) json_decref(message);
    conn_close(&w);
}

static void read_hello(const uint8_t *data, size_t size)
{
    struct hello s;
    struct bytes differences = BYTES_INIT;
    char name[HELLO_NAME];
    json_t *message = NULL;
    if (json_parse("fuzz", (const char *)data, size, &message) != ST_OK) return;
    if (hello_parse(message, &s) == ST_OK) {
        if (s.rank < 0 || s.rank >= RANKS_MAX || s.size < 1 || s.size > RANKS_MAX) abort();
        if (strlen(hello_name(&s, name)) >= HELLO_NAME) abort();
        hello_compare(&s, &s, &differences);
        if (differences.len > 0) abort(); // nothing differs from itself
    }
    bytes_release(&differences);
    json_decref(message);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    read_frames(data, size);
    read_hello(data, size);
    return 0;
}
