/* test_json_out.c: common/base/json.h: what is written reads back as it was. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "common/base/rng.h"
#include "tests/support/support.h"

static json_t *parse(const struct bytes *text)
{
    json_error_t error;
    json_t *value =
        json_loadb(bytes_text(text), text->len, JSON_ALLOW_NUL | JSON_DECODE_ANY, &error);
    if (!value) fail_msg("%s: %s", error.text, bytes_text(text));
    return value;
}

TEST(test_structure)
{
    struct bytes text = BYTES_INIT;
    struct json_out out = {&text, false}, *o = &out;
    json_t *inner = json_pack("{s:i}", "k", 1);
    json_out_open(o, NULL, '{');
    json_out_open(o, "a", '[');
    json_out_int(o, NULL, -5);
    json_out_uint(o, NULL, UINT64_MAX / 2);
    json_out_open(o, NULL, '{');
    json_out_close(o, '}');
    json_out_real(o, NULL, 0.1);
    json_out_close(o, ']');
    json_out_bool(o, "b", true);
    json_out_null(o, "c");
    json_out_value(o, "d", inner);
    json_out_text(o, "e", NULL);
    json_out_close(o, '}');
    assert_string_equal(bytes_text(&text), "{\"a\":[-5,9223372036854775807,{},0.1],\"b\":true,"
                                           "\"c\":null,\"d\":{\"k\":1},\"e\":null}");
    json_decref(inner);
    bytes_release(&text);
}

TEST(test_strings)
{
    char every[160];
    for (int i = 0; i < 128; i++) every[i] = (char)i;
    memcpy(every + 128, "\xc3\xa9\xf0\x9f\x98\x80\xe2\x80\xa8", 9);
    struct bytes text = BYTES_INIT;
    struct json_out out = {&text, false};
    json_out_string(&out, NULL, every, 137);
    json_t *value = parse(&text);
    assert_int_equal(json_string_length(value), 137);
    assert_memory_equal(json_string_value(value), every, 137);
    json_decref(value);
    bytes_release(&text);
}

TEST(test_numbers)
{
    struct rng rng;
    rng_init(&rng, 3, 4);
    struct bytes text = BYTES_INIT;
    for (int i = 0; i < 2000; i++) {
        uint32_t word = rng_u32(&rng);
        float x;
        memcpy(&x, &word, sizeof x);
        if (!isfinite(x)) continue;
        double y = (double)x * rng_normal(&rng);
        struct json_out out = {&text, false};
        bytes_clear(&text);
        json_out_open(&out, NULL, '[');
        json_out_float(&out, NULL, x);
        json_out_real(&out, NULL, y);
        json_out_close(&out, ']');
        json_t *value = parse(&text);
        assert_true((float)json_number_value(json_array_get(value, 0)) == x);
        assert_true(json_number_value(json_array_get(value, 1)) == y);
        json_decref(value);
    }
    struct json_out out = {&text, false};
    bytes_clear(&text);
    json_out_open(&out, NULL, '[');
    json_out_float(&out, NULL, NAN);
    json_out_real(&out, NULL, INFINITY);
    json_out_logprob(&out, NULL, -INFINITY);
    json_out_close(&out, ']');
    assert_string_equal(bytes_text(&text), "[null,null,-9999]");
    bytes_release(&text);
}
