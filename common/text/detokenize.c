/* detokenize.c: token texts back to text, one token at a time, so that streaming and decoding a
 * whole list are the same code.
 *
 * A decoder is one of three kinds: none (tokens joined by spaces), byte-level (tokens spell bytes
 * in GPT-2's alphabet, and any cut between bytes is possible), or SentencePiece's chain
 * (replacements, byte tokens "<0xNN>", fused, characters stripped off the front). The tokenizers
 * library turns a run of byte tokens into text only if the whole run is UTF-8, and into one U+FFFD
 * a byte otherwise; so a run is held back until it ends. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "common/text/tokenizer_parts.h"
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define REPLACEMENT_CHARACTER "\xef\xbf\xbd"

enum decoder_kind { DECODER_NONE, DECODER_BYTE_LEVEL, DECODER_CHAIN };

struct decoder {
    enum decoder_kind kind;
    struct replacement *replacements; // CHAIN, in order
    size_t n_replacements;
    bool drop_in_first;       // the first token loses its matches instead (Metaspace)
    bool byte_fallback, fuse; // CHAIN
    char strip[5];            // CHAIN: the character taken off the front, "" for none
    int strip_left;           // at most so many
};

// ---- loading -----------------------------------------------------------------------------------

void decoder_free(struct decoder *d)
{
    if (!d) return;
    for (size_t i = 0; i < d->n_replacements; i++) replacement_release(&d->replacements[i]);
    free(d->replacements);
    free(d);
}

// The next replacement, yet to be filled.
static enum status add_replacement(struct decoder *d, const char *where, struct replacement **ret)
{
    struct replacement *items = array_room(d->replacements, d->n_replacements, sizeof(*items));
    if (!items) return status_fail(ST_NO_MEMORY, "%s: out of memory", where);
    d->replacements = items;
    *ret = &items[d->n_replacements++];
    **ret = (struct replacement){NULL, BYTES_INIT};
    return ST_OK;
}

static enum status parse_replace(const char *where, const json_t *section, struct decoder *d)
{
    struct replacement *r;
    enum status st = add_replacement(d, where, &r);
    return st == ST_OK ? replacement_parse(where, "decoder", section, r) : st;
}

static enum status parse_metaspace(const char *where, const json_t *section, struct decoder *d)
{
    char text[5];
    enum prepend_scheme scheme;
    struct replacement *r;
    enum status st;
    CHECK(section_metaspace(where, "decoder", section, text, &scheme));
    CHECK(add_replacement(d, where, &r));
    bytes_puts(&r->with, " ");
    CHECK(bytes_status(&r->with));
    d->drop_in_first = scheme != PREPEND_NEVER;
    st = pattern_new(where, "decoder.replacement", text, strlen(text), true, &r->pattern);
out:
    return st;
}

static enum status parse_strip(const char *where, const json_t *section, struct decoder *d)
{
    const char *content = " ";
    int stop = 0;
    enum status st;
    CHECK(json_get_string(where, section, "content", &content));
    CHECK(json_get_int32(where, section, "start", 0, 1 << 20, &d->strip_left));
    CHECK(json_get_int32(where, section, "stop", 0, 1 << 20, &stop));
    if (stop != 0)
        return status_fail(ST_UNSUPPORTED,
                           "%s: decoder.stop %d of Strip is not supported, only 0 is", where, stop);
    st = section_character(where, "decoder.content", content, d->strip);
out:
    return st;
}

static enum status parse_step(void *context, const char *where, const char *name,
                              const json_t *section)
{
    struct decoder *d = context;
    bool byte_level = strcmp(name, "ByteLevel") == 0;
    bool empty = d->kind == DECODER_NONE;
    d->kind = byte_level ? DECODER_BYTE_LEVEL : DECODER_CHAIN;
    // Steps have a fixed order here; each comes only before those that follow it in the chain.
    if (byte_level && empty) return ST_OK;
    if (strcmp(name, "Replace") == 0 && !d->byte_fallback && !d->fuse)
        return parse_replace(where, section, d);
    if (strcmp(name, "Metaspace") == 0 && empty) return parse_metaspace(where, section, d);
    if (strcmp(name, "ByteFallback") == 0 && !d->fuse) {
        d->byte_fallback = true;
        return ST_OK;
    }
    if (strcmp(name, "Fuse") == 0) {
        d->fuse = true;
        return ST_OK;
    }
    if (strcmp(name, "Strip") == 0 && d->fuse && d->strip_left == 0)
        return parse_strip(where, section, d);
    return status_fail(ST_UNSUPPORTED, "%s: decoder.type \"%s\" is not supported%s", where, name,
                       empty ? "" : " at this place of the sequence");
}

enum status decoder_parse(const char *where, const json_t *section, struct decoder **ret)
{
    struct decoder *d = calloc(1, sizeof(*d));
    if (!d) return status_fail(ST_NO_MEMORY, "%s: out of memory", where);
    enum status st = section_each(where, "decoder", "decoders", section, parse_step, d);
    if (st != ST_OK)
        decoder_free(d);
    else
        *ret = d;
    return st;
}

// ---- decoding ----------------------------------------------------------------------------------

void decoding_reset(const struct decoder *d, struct decoding *state)
{
    bytes_clear(&state->pending);
    state->started = false;
    state->strip_left = d->strip_left;
}

bool decoding_is_inside(const struct decoder *d, const struct decoding *state)
{
    return d->kind == DECODER_BYTE_LEVEL || (state->started && state->strip_left == 0);
}

void decoding_set_inside(struct decoding *state)
{
    state->started = true;
    state->strip_left = 0;
}

// Gives out text, less the characters still to be stripped off the front.
static void emit(const struct decoder *d, struct decoding *state, const char *text, size_t len,
                 struct bytes *ret)
{
    size_t n = strlen(d->strip);
    while (state->strip_left > 0 && len > 0) {
        if (len < n || memcmp(text, d->strip, n) != 0) {
            state->strip_left = 0;
            break;
        }
        text += n;
        len -= n;
        state->strip_left--;
    }
    bytes_append(ret, text, len);
}

// Whole characters of the pending bytes; broken ones as U+FFFD, one for each longest prefix of a
// character (as Unicode recommends). An open character at the end stays, unless this is the end.
static void drain_bytes(struct decoding *state, bool end, struct bytes *ret)
{
    const char *data = bytes_text(&state->pending);
    size_t len = state->pending.len, at = 0;
    while (at < len) {
        int n = utf8_sequence(data + at, len - at);
        if (n < 0 && !end) break;
        if (n > 0) {
            bytes_append(ret, data + at, (size_t)n);
        } else {
            bytes_puts(ret, REPLACEMENT_CHARACTER);
            size_t prefix = 1;
            while (at + prefix < len && utf8_sequence(data + at, prefix + 1) < 0) prefix++;
            n = (int)prefix;
        }
        at += (size_t)n;
    }
    if (at > 0) {
        memmove(state->pending.data, state->pending.data + at, len - at);
        state->pending.len = len - at;
    }
}

static void put_byte_level(const char *token, size_t len, struct bytes *ret)
{
    const size_t before = ret->len;
    for (size_t i = 0; i < len;) {
        int n = utf8_sequence(token + i, len - i);
        int byte = n > 0 ? byte_level_byte(utf8_decode(token + i, n)) : -1;
        if (byte < 0) { // an added token with other characters: as it is
            ret->len = before;
            bytes_append(ret, token, len);
            break;
        }
        char c = (char)byte;
        bytes_append(ret, &c, 1);
        i += (size_t)n;
    }
}

static void end_byte_run(const struct decoder *d, struct decoding *state, struct bytes *ret)
{
    const char *data = bytes_text(&state->pending);
    size_t len = state->pending.len;
    if (utf8_valid(data, len) == len)
        emit(d, state, data, len, ret);
    else
        for (size_t i = 0; i < len; i++) emit(d, state, REPLACEMENT_CHARACTER, 3, ret);
    bytes_clear(&state->pending);
}

static int byte_of_token(const char *token, size_t len) // "<0xNN>", -1 for any other
{
    bool is = len == 6 && memcmp(token, "<0x", 3) == 0 && token[5] == '>' &&
              isxdigit((unsigned char)token[3]) && isxdigit((unsigned char)token[4]);
    return is ? (int)strtol(token + 3, NULL, 16) : -1;
}

static enum status push_chain(const struct decoder *d, struct decoding *state, const char *token,
                              size_t len, struct bytes *ret)
{
    struct bytes text = BYTES_INIT, other = BYTES_INIT;
    enum status st = ST_OK;
    bytes_append(&text, token, len);
    for (size_t i = 0; i < d->n_replacements; i++) {
        const struct replacement *r = &d->replacements[i];
        size_t with_len = d->drop_in_first && !state->started ? 0 : r->with.len;
        bytes_clear(&other);
        CHECK(pattern_replace(r->pattern, bytes_text(&text), text.len, bytes_text(&r->with),
                              with_len, &other));
        struct bytes swap = text;
        text = other;
        other = swap;
    }
    int byte = d->byte_fallback ? byte_of_token(bytes_text(&text), text.len) : -1;
    if (byte >= 0) {
        char c = (char)byte;
        bytes_append(&state->pending, &c, 1);
    } else {
        if (state->pending.len > 0) end_byte_run(d, state, ret);
        emit(d, state, bytes_text(&text), text.len, ret);
    }
    st = bytes_status(&text);
out:
    bytes_release(&text);
    bytes_release(&other);
    return st;
}

enum status decoding_push(const struct decoder *d, struct decoding *state, const char *token,
                          size_t len, struct bytes *ret)
{
    enum status st = ST_OK;
    switch (d->kind) {
    case DECODER_NONE:
        if (state->started) bytes_puts(ret, " ");
        bytes_append(ret, token, len);
        break;
    case DECODER_BYTE_LEVEL:
        put_byte_level(token, len, &state->pending);
        drain_bytes(state, false, ret);
        break;
    case DECODER_CHAIN:
        st = push_chain(d, state, token, len, ret);
        break;
    }
    state->started = true;
    if (st == ST_OK) st = bytes_status(&state->pending);
    return st == ST_OK ? bytes_status(ret) : st;
}

enum status decoding_bytes(const struct decoder *d, const char *token, size_t len,
                           struct bytes *ret)
{
    struct decoding state = {.pending = BYTES_INIT};
    enum status st = ST_OK;
    decoding_set_inside(&state);
    if (d->kind == DECODER_BYTE_LEVEL)
        put_byte_level(token, len, ret);
    else if (d->kind == DECODER_CHAIN)
        st = push_chain(d, &state, token, len, ret);
    else
        bytes_append(ret, token, len);
    bytes_append(ret, bytes_text(&state.pending), state.pending.len); // a byte token's
    bytes_release(&state.pending);
    return st == ST_OK ? bytes_status(ret) : st;
}

enum status decoding_flush(const struct decoder *d, struct decoding *state, struct bytes *ret)
{
    if (d->kind == DECODER_BYTE_LEVEL)
        drain_bytes(state, true, ret);
    else if (d->kind == DECODER_CHAIN && state->pending.len > 0)
        end_byte_run(d, state, ret);
    decoding_reset(d, state);
    return bytes_status(ret);
}
