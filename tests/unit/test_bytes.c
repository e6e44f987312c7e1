/* test_bytes.c: common/base bytes, base64, UTF-8, and the status sentences. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "tests/support/support.h"

#include <pthread.h>

// ---- status -------------------------------------------------------------------------------------

TEST(status_keeps_sentence)
{
    assert_int_equal(status_fail(ST_FORMAT, "%s: field %d", "a.json", 3), ST_FORMAT);
    assert_string_equal(status_message(), "a.json: field 3");
    assert_int_equal(status_context(ST_FORMAT, "loading %s", "m"), ST_FORMAT);
    assert_string_equal(status_message(), "loading m: a.json: field 3");
    assert_ok(status_context(ST_OK, "nothing"));
    assert_string_equal(status_message(), "loading m: a.json: field 3");
    status_fail(ST_IO, "again (%s)", status_message()); // its own message as an argument
    assert_string_equal(status_message(), "again (loading m: a.json: field 3)");
    assert_string_equal(status_words(ST_TORN), "weights are torn");
    assert_string_equal(status_words((enum status)999), "unknown error");
}

TEST(status_cuts_at_character)
{
    char filler[2047];
    for (int pad = 2030; pad < 2047; pad++) {
        memset(filler, 'x', (size_t)pad);
        filler[pad] = 0;
        status_fail(ST_IO, "%s\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac",
                    filler);
        const char *text = status_message();
        size_t len = strlen(text);
        assert_true(len <= 2047);
        for (size_t at = 0; at < len;) {
            int n = utf8_sequence(text + at, len - at);
            assert_true(n > 0);
            at += (size_t)n;
        }
        status_context(ST_IO, "%s", filler); // longer than the buffer: kept whole words of it
        assert_memory_equal(status_message(), filler, (size_t)pad);
    }
}

static void *other_thread(void *argument)
{
    (void)argument;
    bool empty = status_message()[0] == 0;
    status_fail(ST_IO, "theirs");
    return (void *)(uintptr_t)empty;
}

TEST(status_is_per_thread)
{
    pthread_t thread;
    void *empty;
    status_fail(ST_IO, "mine");
    assert_int_equal(pthread_create(&thread, NULL, other_thread, NULL), 0);
    pthread_join(thread, &empty);
    assert_true(empty != NULL);
    assert_string_equal(status_message(), "mine");
}

// ---- bytes --------------------------------------------------------------------------------------

TEST(bytes_build_text)
{
    struct bytes b = BYTES_INIT;
    assert_string_equal(bytes_text(&b), "");
    bytes_puts(&b, "one");
    bytes_append(&b, "\0two", 4);
    bytes_append(&b, NULL, 0);
    bytes_printf(&b, " %d %s", 3, "four");
    assert_ok(bytes_status(&b));
    assert_int_equal(b.len, 14);
    assert_memory_equal(b.data, "one\0two 3 four", 15); // the NUL behind it too
    bytes_clear(&b);
    assert_int_equal(b.len, 0);
    assert_string_equal(bytes_text(&b), "");
    for (int i = 0; i < 10000; i++) bytes_printf(&b, "%04d", i);
    assert_int_equal(b.len, 40000);
    assert_memory_equal(b.data + 4 * 1234, "1234", 4);
    assert_int_equal(b.data[b.len], 0);
    bytes_release(&b);
    assert_null(b.data);
    bytes_release(&b);
    bytes_release(NULL);
}

TEST(bytes_failure_sticks)
{
    struct bytes b = BYTES_INIT;
    bytes_puts(&b, "kept");
    assert_false(bytes_reserve(&b, SIZE_MAX));
    bytes_puts(&b, "lost");
    bytes_printf(&b, "lost");
    assert_string_equal(bytes_text(&b), "kept");
    assert_status(bytes_status(&b), ST_NO_MEMORY);
    bytes_release(&b);
    assert_ok(bytes_status(&b));
}

// ---- base64 -------------------------------------------------------------------------------------

// RFC 4648, section 10.
TEST_EACH(base64_vectors, "bytes")
{
    const char *text = row_text(cases, i, "text"), *base64 = row_text(cases, i, "base64");
    SCOPED(bytes_release) struct bytes coded = BYTES_INIT, data = BYTES_INIT;
    assert_ok(base64_encode(text, strlen(text), &coded));
    assert_string_equal(bytes_text(&coded), base64);
    assert_ok(base64_decode(base64, &data));
    assert_int_equal(data.len, strlen(text));
    assert_string_equal(bytes_text(&data), text);
}

TEST(base64_round_trip)
{
    struct rng r;
    rng_init(&r, 1, 0);
    SCOPED(bytes_release) struct bytes text = BYTES_INIT, data = BYTES_INIT;
    // around the block at which long data is split (3 << 20), and a CUDA handle's 64 bytes
    static const size_t lengths[] = {1, 2, 63, 64, 65, (3 << 20) - 1, 3 << 20, (3 << 20) + 1};
    unsigned char *raw = test_keep(malloc((3 << 20) + 1));
    assert_non_null(raw);
    for (size_t i = 0; i < (3 << 20) + 1; i++) raw[i] = (unsigned char)rng_u32(&r);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        assert_ok(base64_encode(raw, lengths[i], &text));
        assert_int_equal(text.len, (lengths[i] + 2) / 3 * 4);
        assert_int_equal(strlen(text.data), text.len);
        assert_ok(base64_decode(text.data, &data));
        assert_int_equal(data.len, lengths[i]);
        assert_memory_equal(data.data, raw, lengths[i]);
    }
}

TEST_EACH(base64_refuses, "bytes")
{
    SCOPED(bytes_release) struct bytes data = BYTES_INIT;
    bytes_puts(&data, "untouched");
    assert_status(base64_decode(row_text(cases, i, "text"), &data), ST_FORMAT);
    assert_string_equal(bytes_text(&data), "untouched");
}

// ---- UTF-8 --------------------------------------------------------------------------------------

TEST(utf8_every_code_point)
{
    for (uint32_t code = 0; code <= 0x10ffff; code++) {
        if (code == 0xd800) code = 0xe000; // surrogates are no characters
        char s[4];
        int n = utf8_encode(code, s);
        assert_int_equal(utf8_sequence(s, (size_t)n), n);
        assert_int_equal(utf8_decode(s, n), code);
        for (int cut = 0; cut < n; cut++) assert_int_equal(utf8_sequence(s, (size_t)cut), -1);
    }
}

// A second reading of "well formed", from the definition: decode by the bits, then refuse what
// another, shorter sequence gives, surrogates and what lies beyond U+10FFFF.
static bool well_formed(const unsigned char *p, int n)
{
    static const uint32_t min[5] = {0, 0, 0x80, 0x800, 0x10000};
    static const unsigned char mask[5] = {0, 0, 0xe0, 0xf0, 0xf8},
                               mark[5] = {0, 0, 0xc0, 0xe0, 0xf0};
    if (n == 1) return p[0] < 0x80;
    if ((p[0] & mask[n]) != mark[n]) return false;
    uint32_t code = p[0] & (unsigned char)~mask[n];
    for (int i = 1; i < n; i++) {
        if ((p[i] & 0xc0) != 0x80) return false;
        code = code << 6 | (p[i] & 0x3f);
    }
    return code >= min[n] && code <= 0x10ffff && !(code >= 0xd800 && code <= 0xdfff);
}

TEST(utf8_random_bytes)
{
    struct rng r;
    rng_init(&r, 2, 0);
    for (int trial = 0; trial < 2000000; trial++) {
        uint32_t word = rng_u32(&r);
        if (trial & 1) word |= 0x80c0u; // more of them begin like a sequence
        unsigned char p[4];
        memcpy(p, &word, 4);
        int n = 0;
        for (int k = 1; k <= 4 && n == 0; k++)
            if (well_formed(p, k)) n = k;
        assert_int_equal(utf8_sequence((const char *)p, 4), n);
    }
}

// An impossible beginning is known before the rest is there.
TEST_EACH(utf8_malformed, "bytes")
{
    double bytes[4];
    char text[4];
    const int n = row_numbers(cases, i, "bytes", bytes, 4);
    for (int k = 0; k < n; k++) text[k] = (char)(unsigned char)bytes[k];
    assert_int_equal(utf8_sequence(text, (size_t)n), 0);
}

TEST(arrays_that_grow)
{
    int *list = NULL;
    for (size_t n = 0; n < 1000; n++) {
        int *larger = array_room(list, n, sizeof *larger);
        assert_non_null(larger);
        list = larger;
        list[n] = (int)n;
    }
    for (int i = 0; i < 1000; i++) assert_int_equal(list[i], i);
    assert_null(array_room(list, SIZE_MAX / 2 + 1, sizeof *list)); // more than there can be
    free(list);
}

// What one thread found, another tells.
TEST(failure_between_threads)
{
    struct status_kept kept = {0};
    assert_ok(status_recall(&kept));
    status_keep(&kept, status_fail(ST_BUSY, "the lease of %d", 7));
    status_fail(ST_IO, "something else");
    assert_int_equal(status_recall(&kept), ST_BUSY);
    assert_string_equal(status_message(), "the lease of 7");
    status_keep(&kept, ST_OK);
    assert_ok(status_recall(&kept));
}

// What a sentence quotes ends at a whole character and a whole escape, and says that it was cut.
TEST(quotes_are_cut)
{
    const json_t *cases = test_rows("bytes", "quotes_are_cut");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const size_t max = (size_t)row_int(cases, i, "max");
        char room[16];
        memset(room, '#', sizeof room);
        assert_string_equal(text_cut(row_text(cases, i, "text"), (size_t)-1, max, room),
                            row_text(cases, i, "wanted"));
        assert_int_equal(room[max + 4], '#'); // no more than it was given
    }
    assert_string_equal(text_cut("ab\xff\xfe", (size_t)-1, 3, (char[12]){0}), "ab\xff...");
    assert_string_equal(text_cut("abc", 2, 8, (char[12]){0}), "ab");
    assert_string_equal(CUT("abcdef", 3), "abc...");
    assert_status(status_fail(ST_INVALID, "it is %s, or %s", CUT("{\"\xc3\xa9\"}", 3), CUT("b", 3)),
                  ST_INVALID);
    assert_message("it is {\"..., or b");
}
