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

// As they may follow each other.
enum { BYTE_LEVEL, METASPACE, REPLACE, BYTE_FALLBACK, FUSE, STRIP };

// ---- loading -----------------------------------------------------------------------------------

static enum status parse_strip(const char *where, const char *name, struct step *s)
{
    int stop = 0;
    enum status st;
    CHECK(json_get_int32(where, s->json, "start", 0, 1 << 20, &s->count));
    CHECK(json_get_int32(where, s->json, "stop", 0, 1 << 20, &stop));
    if (stop != 0)
        FAIL(ST_UNSUPPORTED, "%s: %s.stop %d of Strip is not supported, only 0 is", where, name,
             stop);
    st = step_parse_character(where, name, "content", " ", s);
out:
    return st;
}

static const struct step_type types[] = {
    {"ByteLevel", BYTE_LEVEL, 0, NULL},
    {"Metaspace", METASPACE, 0, step_parse_metaspace},
    {"Replace", REPLACE, 0, step_parse_replace},
    {"ByteFallback", BYTE_FALLBACK, 0, NULL},
    {"Fuse", FUSE, 0, NULL},
    {"Strip", STRIP, 0, parse_strip},
    {NULL, 0, 0, NULL},
};

enum status decoder_parse(const char *where, const json_t *section, struct step_list *ret)
{
    int max = -1; // of the kinds before
    enum status st;
    CHECK(step_list_parse(where, "decoder", "decoders", section, types, ret));
    // steps have a fixed order here; each comes only before those that follow it in the chain
    for (size_t i = 0; i < ret->n; i++) {
        const struct step_type *type = ret->items[i].type;
        const bool first = i == 0 && type->kind != STRIP,
                   later = max > BYTE_LEVEL && type->kind > METASPACE &&
                           (type->kind == STRIP ? max == FUSE
                                                : type->kind == FUSE || type->kind >= max);
        if (!first && !later)
            FAIL(ST_UNSUPPORTED, "%s: decoder.type \"%s\" is not supported%s", where, type->name,
                 i == 0 ? "" : " at this place of the sequence");
        if (type->kind > max) max = type->kind;
    }
out:
    return st;
}

static const struct step *find(const struct step_list *d, int kind)
{
    for (size_t i = 0; i < d->n; i++)
        if (d->items[i].type->kind == kind) return &d->items[i];
    return NULL;
}

// ---- decoding ----------------------------------------------------------------------------------

void decoding_reset(const struct step_list *d, struct decoding *state)
{
    bytes_clear(&state->pending);
    state->started = false;
    const struct step *strip = find(d, STRIP);
    state->strip_left = strip ? strip->count : 0;
}

bool decoding_is_inside(const struct step_list *d, const struct decoding *state)
{
    return find(d, BYTE_LEVEL) || (state->started && state->strip_left == 0);
}

void decoding_set_inside(struct decoding *state)
{
    state->started = true;
    state->strip_left = 0;
}

// Gives out text, less the characters still to be stripped off the front.
static void emit(const struct step_list *d, struct decoding *state, const char *text, size_t len,
                 struct bytes *ret)
{
    const struct step *strip = find(d, STRIP);
    size_t n = strip ? strlen(strip->character) : 0;
    while (state->strip_left > 0 && len > 0) {
        if (len < n || memcmp(text, strip->character, n) != 0) {
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

static void end_byte_run(const struct step_list *d, struct decoding *state, struct bytes *ret)
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

static enum status push_chain(const struct step_list *d, struct decoding *state, const char *token,
                              size_t len, struct bytes *ret)
{
    struct bytes text = BYTES_INIT, other = BYTES_INIT;
    enum status st = ST_OK;
    bytes_append(&text, token, len);
    for (size_t i = 0; i < d->n; i++) {
        const struct step *r = &d->items[i];
        if (!r->pattern) continue;
        // a Metaspace's space in front was put there
        const bool dropped =
            r->type->kind == METASPACE && r->scheme != PREPEND_NEVER && !state->started;
        size_t with_len = dropped ? 0 : r->with.len;
        bytes_clear(&other);
        CHECK(pattern_replace(r->pattern, bytes_text(&text), text.len, bytes_text(&r->with),
                              with_len, &other));
        struct bytes swap = text;
        text = other;
        other = swap;
    }
    int byte = find(d, BYTE_FALLBACK) ? byte_of_token(bytes_text(&text), text.len) : -1;
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

enum status decoding_push(const struct step_list *d, struct decoding *state, const char *token,
                          size_t len, struct bytes *ret)
{
    enum status st = ST_OK;
    if (d->n == 0) {
        if (state->started) bytes_puts(ret, " ");
        bytes_append(ret, token, len);
    } else if (find(d, BYTE_LEVEL)) {
        put_byte_level(token, len, &state->pending);
        drain_bytes(state, false, ret);
    } else {
        st = push_chain(d, state, token, len, ret);
    }
    state->started = true;
    if (st == ST_OK) st = bytes_status(&state->pending);
    return st == ST_OK ? bytes_status(ret) : st;
}

enum status decoding_bytes(const struct step_list *d, const char *token, size_t len,
                           struct bytes *ret)
{
    struct decoding state = {.pending = BYTES_INIT};
    enum status st = ST_OK;
    decoding_set_inside(&state);
    if (d->n == 0)
        bytes_append(ret, token, len);
    else if (find(d, BYTE_LEVEL))
        put_byte_level(token, len, ret);
    else
        st = push_chain(d, &state, token, len, ret);
    bytes_append(ret, bytes_text(&state.pending), state.pending.len); // a byte token's
    bytes_release(&state.pending);
    return st == ST_OK ? bytes_status(ret) : st;
}

enum status decoding_flush(const struct step_list *d, struct decoding *state, struct bytes *ret)
{
    if (find(d, BYTE_LEVEL))
        drain_bytes(state, true, ret);
    else if (state->pending.len > 0)
        end_byte_run(d, state, ret);
    decoding_reset(d, state);
    return bytes_status(ret);
}
