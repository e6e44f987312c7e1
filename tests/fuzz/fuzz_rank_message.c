/* fuzz_rank_message.c: libFuzzer entry for what comes over a connection between ranks: its frames,
 * whose seal is not to be guessed, and the statement within one, which is read as if it were. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "common/ranks/rendezvous.h"
#include "common/ranks/wire.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_frames(const uint8_t *data, size_t size)
{
    struct wire w;
    json_t *message = NULL;
    wire_open(&w, -1, "token");
    bytes_append(&w.in, data, size);
    while (wire_next(&w, &message) == ST_OK && message) json_decref(message);
    wire_close(&w);
}

static void read_statement(const uint8_t *data, size_t size)
{
    struct statement s;
    struct bytes differences = BYTES_INIT;
    char name[STATEMENT_NAME];
    json_t *message = NULL;
    if (json_parse("fuzz", (const char *)data, size, &message) != ST_OK) return;
    if (statement_parse(message, &s) == ST_OK) {
        if (s.rank < 0 || s.rank >= RANKS_MAX || s.size < 1 || s.size > RANKS_MAX) abort();
        if (strlen(statement_name(&s, name)) >= STATEMENT_NAME) abort();
        statement_compare(&s, &s, &differences);
        if (differences.len > 0) abort(); // nothing differs from itself
    }
    bytes_release(&differences);
    json_decref(message);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    read_frames(data, size);
    read_statement(data, size);
    return 0;
}
