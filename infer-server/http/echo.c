/* echo.c: a prompt's text and its tokens' places in it. Loop's thread.
 *
 * A text prompt is given back byte by byte. Its tokens' places are those of the text that the
 * tokens decode to, special ones included where they stand in the prompt; one that the tokenizer
 * put there
 * (<s>) takes no room. A tokenizer that changes a text (normal forms, a space in front) may decode
 * to other text: places never lie behind the prompt's end. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/generation.h"

#include <stdlib.h>
#include <string.h>

void echo_release(struct echo *e)
{
    bytes_release(&e->text);
    free(e->text_at);
    *e = (struct echo){0};
}

// Whether the special token stands in what was sent, at the place that decoding has come to.
static bool is_written(const struct api_prompt *prompt, const struct tokenizer *tokenizer,
                       int32_t id, size_t at)
{
    const char *token = tokenizer_token(tokenizer, id);
    const size_t len = token ? strlen(token) : 0;
    return prompt->text && len > 0 && prompt->text_len >= at + len &&
           memcmp(prompt->text + at, token, len) == 0;
}

static enum status decode(const struct api_prompt *prompt, const struct tokenizer *tokenizer,
                          bool skip_special, struct echo *e)
{
    struct detokenizer *d = NULL;
    enum status st = ST_OK;
    CHECK(detokenizer_new(tokenizer, false, &d));
    for (int i = 0; i < prompt->n_ids; i++) {
        const int32_t id = prompt->ids[i];
        const size_t before = e->text.len;
        e->text_at[i] = e->chars;
        const bool skip = prompt->text ? !is_written(prompt, tokenizer, id, before) : skip_special;
        if (skip && tokenizer_is_special(tokenizer, id)) continue;
        CHECK(detokenizer_push(d, id, &e->text));
        e->chars += (int)utf8_count(bytes_text(&e->text) + before, e->text.len - before);
    }
    CHECK(detokenizer_flush(d, &e->text));
    st = bytes_status(&e->text);
out:
    detokenizer_free(d);
    return st;
}

enum status echo_init(const struct api_prompt *prompt, const struct tokenizer *tokenizer,
                      bool skip_special, struct echo *ret)
{
    struct echo e = {.text = BYTES_INIT};
    enum status st = ST_OK;
    e.text_at = calloc((size_t)prompt->n_ids, sizeof *e.text_at);
    if (!e.text_at) return status_fail(ST_NO_MEMORY, "out of memory");
    if (tokenizer) CHECK(decode(prompt, tokenizer, skip_special, &e));
    if (prompt->text) {
        bytes_clear(&e.text);
        bytes_append(&e.text, prompt->text, prompt->text_len);
        CHECK(bytes_status(&e.text));
    }
    e.chars = (int)utf8_count(bytes_text(&e.text), e.text.len);
    for (int i = 0; i < prompt->n_ids; i++)
        if (e.text_at[i] > e.chars) e.text_at[i] = e.chars;
    *ret = e;
    return ST_OK;
out:
    echo_release(&e);
    return st;
}
