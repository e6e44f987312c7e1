/* test_json.c: common/base/json.h: fields, ranges, and errors that name file and key; and what is
 * written reads back as it was. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "tests/support/support.h"

#include <sys/stat.h>

TEST(parse_errors)
{
    static const char *const bad[] = {"",    "{",     "{\"a\":1,}",       "{\"a\":01}",
                                      "nul", "[1] 2", "{\"a\":\"\xff\"}", "{\"a\":1e999}"};
    json_t *value = NULL;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_fails(json_parse("request", bad[i], strlen(bad[i]), &value), ST_FORMAT,
                     "request: column ");
        assert_null(value);
    }
    assert_fails(json_parse("file", "{\n\"a\":\n}", 8, &value), ST_FORMAT, "file: line 3, column ");
    char deep[10000];
    memset(deep, '[', sizeof deep);
    assert_status(json_parse("request", deep, sizeof deep, &value), ST_FORMAT);
    // only `len` bytes are read
    assert_ok(json_parse("request", "[1]garbage", 3, &value));
    json_decref(value);
}

TEST(integers)
{
    json_t *o =
        json_of("{\"a\": 5, \"b\": 3.0, \"c\": 3.5, \"d\": \"7\", \"e\": null, \"f\": 1e300,"
                " \"g\": -9223372036854775808, \"h\": 9223372036854775808.0, \"i\": true}");
    int64_t x = 42;
    assert_ok(json_get_int("file", o, "a", 0, 10, &x));
    assert_int_equal(x, 5);
    assert_ok(json_get_int("file", o, "b", 0, 10, &x));
    assert_int_equal(x, 3);
    x = 42;
    assert_ok(json_get_int("file", o, "e", 0, 10, &x));
    assert_ok(json_get_int("file", o, "absent", 0, 10, &x));
    assert_ok(json_get_int("file", NULL, "a", 0, 10, &x));
    assert_fails(json_get_int("file", o, "a", 6, INT64_MAX, &x), ST_INVALID,
                 "file: \"a\" is 5; it must be at least 6");
    assert_fails(json_get_int("file", o, "a", 0, 4, &x), ST_INVALID, "between 0 and 4");
    assert_fails(json_get_int("file", o, "c", 0, 10, &x), ST_INVALID, "file: \"c\" is 3.5");
    assert_fails(json_get_int("file", o, "d", 0, 10, &x), ST_INVALID,
                 "file: \"d\" must be a whole number, not a string");
    assert_status(json_get_int("file", o, "f", INT64_MIN, INT64_MAX, &x), ST_INVALID);
    assert_status(json_get_int("file", o, "h", INT64_MIN, INT64_MAX, &x), ST_INVALID);
    assert_status(json_get_int("file", o, "i", 0, 10, &x), ST_INVALID);
    assert_int_equal(x, 42);
    assert_ok(json_get_int("file", o, "g", INT64_MIN, INT64_MAX, &x));
    assert_true(x == INT64_MIN);
    int small = 1;
    assert_ok(json_get_int32("file", o, "a", 0, 10, &small));
    assert_int_equal(small, 5);
    assert_ok(json_get_int32("file", o, "absent", 0, 10, &small));
    assert_status(json_get_int32("file", o, "g", INT_MIN, INT_MAX, &small), ST_INVALID);
    assert_int_equal(small, 5);
    json_decref(o);
}

TEST(other_types)
{
    json_t *o =
        test_keep(json_of("{\"a\": 0.5, \"b\": 2, \"t\": true, \"f\": false, \"s\": \"text\","
                          " \"n\": null, \"nul\": \"a\\u0000b\", \"l\": []}"));
    double x = 9;
    assert_ok(json_get_double("file", o, "a", 0, 1, &x));
    assert_true(x == 0.5);
    assert_ok(json_get_double("file", o, "b", 0, INFINITY, &x));
    assert_true(x == 2);
    assert_fails(json_get_double("file", o, "b", 0, 1, &x), ST_INVALID,
                 "file: \"b\" is 2; it must lie between 0 and 1");
    assert_fails(json_get_double("file", o, "b", 3, INFINITY, &x), ST_INVALID, "at least 3");
    assert_status(json_get_double("file", o, "s", 0, 1, &x), ST_INVALID);
    assert_true(x == 2);

    bool flag = true;
    assert_ok(json_get_bool("file", o, "f", &flag));
    assert_false(flag);
    assert_ok(json_get_bool("file", o, "t", &flag));
    assert_ok(json_get_bool("file", o, "n", &flag));
    assert_true(flag);
    assert_fails(json_get_bool("file", o, "b", &flag), ST_INVALID,
                 "\"b\" must be true or false, not a whole number");

    const char *text = "default";
    assert_ok(json_get_string("file", o, "n", &text));
    assert_string_equal(text, "default");
    assert_ok(json_get_string("file", o, "s", &text));
    assert_string_equal(text, "text");
    assert_status(json_get_string("file", o, "l", &text), ST_INVALID);
    assert_fails(json_get_string("file", o, "nul", &text), ST_INVALID, "U+0000");
    assert_string_equal(text, "text");
    assert_int_equal(json_string_length(json_object_get(o, "nul")), 3);

    assert_true(json_has(o, "a"));
    assert_false(json_has(o, "n"));
    assert_false(json_has(o, "absent"));
    // a field of what is not an object
    assert_fails(json_get_bool("file", json_object_get(o, "l"), "x", &flag), ST_INVALID,
                 "an array");
}

TEST(files)
{
    const char *path = test_path(test_folder(), "a.json");
    json_t *o = json_of("{\"a\": 0.1, \"b\": [1, \"\\u00e9\"]}"), *back = NULL;
    struct stat info;
    assert_ok(json_write_file(path, 0600, o));
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_mode & 07777, 0600);
    assert_ok(json_read_file(path, 1000, &back));
    assert_true(json_equal(o, back));
    json_decref(back);
    back = NULL;
    assert_status(json_read_file(path, 5, &back), ST_FORMAT);
    assert_status(json_read_file("/no/such.json", 5, &back), ST_NOT_FOUND);
    test_write(path, "{\"a\"", 4);
    assert_fails(json_read_file(path, 1000, &back), ST_FORMAT, path);
    assert_null(back);
    static const char python[] = "{\"limit\": [0.0, Infinity], \"text\": \"Infinity\"}";
    test_write(path, python, sizeof python - 1);
    assert_ok(json_read_file(path, 1000, &back));
    assert_true(json_real_value(json_array_get(json_object_get(back, "limit"), 1)) > 1e308);
    assert_string_equal(json_string_value(json_object_get(back, "text")), "Infinity");
    json_decref(back);
    back = NULL;
    assert_status(json_parse("a request", python, sizeof python - 1, &back), ST_FORMAT);
    json_decref(o);
}

// ---- what is written ----------------------------------------------------------------------------

static json_t *read_back(const struct bytes *text)
{
    json_error_t error;
    json_t *value =
        json_loadb(bytes_text(text), text->len, JSON_ALLOW_NUL | JSON_DECODE_ANY, &error);
    if (!value) fail_msg("%s: %s", error.text, bytes_text(text));
    return value;
}

TEST(test_structure)
{
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    struct json_out out = {&text, false}, *o = &out;
    json_t *inner = test_keep(json_pack("{s:i}", "k", 1));
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
}

TEST(test_strings)
{
    char every[160];
    for (int i = 0; i < 128; i++) every[i] = (char)i;
    memcpy(every + 128, "\xc3\xa9\xf0\x9f\x98\x80\xe2\x80\xa8", 9);
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    struct json_out out = {&text, false};
    json_out_string(&out, NULL, every, 137);
    json_t *value = test_keep(read_back(&text));
    assert_int_equal(json_string_length(value), 137);
    assert_memory_equal(json_string_value(value), every, 137);
}

TEST(test_numbers)
{
    struct rng rng;
    rng_init(&rng, 3, 4);
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
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
        json_t *value = test_keep(read_back(&text));
        assert_true((float)json_number_value(json_array_get(value, 0)) == x);
        assert_true(json_number_value(json_array_get(value, 1)) == y);
    }
    struct json_out out = {&text, false};
    bytes_clear(&text);
    json_out_open(&out, NULL, '[');
    json_out_float(&out, NULL, NAN);
    json_out_real(&out, NULL, INFINITY);
    json_out_logprob(&out, NULL, -INFINITY);
    json_out_close(&out, ']');
    assert_string_equal(bytes_text(&text), "[null,null,-9999]");
}
