/* fuzz_tokenizer.c: libFuzzer entry of the tokenizer: its file parser, encoding and decoding.
 * Input: tokenizer.json, NUL, tokenizer_config.json, NUL, text; the later parts may be missing.
 * Seeds are in corpus/tokenizer/. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/tokenizer.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void encode_and_back(const struct tokenizer *t, const char *text, size_t len)
{
    struct token_list ids = TOKEN_LIST_INIT;
    struct bytes whole = BYTES_INIT, streamed = BYTES_INIT;
    struct detokenizer *d = NULL;
    if (tokenizer_encode(t, text, len, true, &ids) == ST_OK) {
        for (int i = 0; i < ids.n; i++)
            if (ids.ids[i] < 0 || ids.ids[i] >= tokenizer_vocab_size(t)) abort();
        if (tokenizer_decode(t, ids.ids, ids.n, false, &whole) == ST_OK &&
            detokenizer_new(t, false, &d) == ST_OK) {
            for (int i = 0; i < ids.n; i++)
                if (detokenizer_push(d, ids.ids[i], &streamed) != ST_OK) abort();
            if (detokenizer_flush(d, &streamed) != ST_OK || whole.len != streamed.len ||
                memcmp(bytes_text(&whole), bytes_text(&streamed), whole.len) != 0)
                abort();
        }
    }
    detokenizer_free(d);
    token_list_release(&ids);
    bytes_release(&whole);
    bytes_release(&streamed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *part[3] = {(const char *)data, NULL, NULL}, *end = (const char *)data + size;
    size_t len[3] = {size, 0, 0};
    for (int i = 0; i < 2 && part[i]; i++) {
        const char *nul = memchr(part[i], '\0', (size_t)(end - part[i]));
        if (!nul) break;
        len[i] = (size_t)(nul - part[i]);
        part[i + 1] = nul + 1;
        len[i + 1] = (size_t)(end - part[i + 1]);
    }
    struct tokenizer *t = NULL;
    const struct tokenizer_text files[TOKENIZER_FILES] = {{part[0], len[0]}, {part[1], len[1]}};
    if (tokenizer_parse("tokenizer.json", files, &t) == ST_OK) {
        encode_and_back(t, part[2] ? part[2] : "", len[2]);
        encode_and_back(t, "Hello  hello's 123 \xe4\xb8\xad\xf0\x9f\x98\x80\n\n x", 27);
    }
    tokenizer_free(t);
    return 0;
}
