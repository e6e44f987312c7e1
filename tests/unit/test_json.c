/* test_json.c: common/base/json.h: fields, ranges, and errors that name file and key. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"

#include <sys/stat.h>

static json_t *parse(const char *text)
{
    json_t *value = NULL;
    assert_ok(json_parse("test", text, strlen(text), &value));
    return value;
}

TEST(parse_errors)
{
    static const char *const bad[] = {"",    "{",     "{\"a\":1,}",       "{\"a\":01}",
                                      "nul", "[1] 2", "{\"a\":\"\xff\"}", "{\"a\":1e999}"};
    json_t *value = NULL;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_status(json_parse("request", bad[i], strlen(bad[i]), &value), ST_FORMAT);
        assert_message("request: column ");
        assert_null(value);
    }
    assert_status(json_parse("file", "{\n\"a\":\n}", 8, &value), ST_FORMAT);
    assert_message("file: line 3, column ");
    char deep[10000];
    memset(deep, '[', sizeof deep);
    assert_status(json_parse("request", deep, sizeof deep, &value), ST_FORMAT);
    // only `len` bytes are read
    assert_ok(json_parse("request", "[1]garbage", 3, &value));
    json_decref(value);
}

TEST(integers)
{
    json_t *o = parse("{\"a\": 5, \"b\": 3.0, \"c\": 3.5, \"d\": \"7\", \"e\": null, \"f\": 1e300,"
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
    assert_status(json_get_int("file", o, "a", 6, INT64_MAX, &x), ST_INVALID);
    assert_message("file: \"a\" is 5; it must be at least 6");
    assert_status(json_get_int("file", o, "a", 0, 4, &x), ST_INVALID);
    assert_message("between 0 and 4");
    assert_status(json_get_int("file", o, "c", 0, 10, &x), ST_INVALID);
    assert_message("file: \"c\" is 3.5");
    assert_status(json_get_int("file", o, "d", 0, 10, &x), ST_INVALID);
    assert_message("file: \"d\" must be a whole number, not a string");
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
    json_t *o = parse("{\"a\": 0.5, \"b\": 2, \"t\": true, \"f\": false, \"s\": \"text\","
                      " \"n\": null, \"nul\": \"a\\u0000b\", \"l\": []}");
    double x = 9;
    assert_ok(json_get_double("file", o, "a", 0, 1, &x));
    assert_true(x == 0.5);
    assert_ok(json_get_double("file", o, "b", 0, INFINITY, &x));
    assert_true(x == 2);
    assert_status(json_get_double("file", o, "b", 0, 1, &x), ST_INVALID);
    assert_message("file: \"b\" is 2; it must lie between 0 and 1");
    assert_status(json_get_double("file", o, "b", 3, INFINITY, &x), ST_INVALID);
    assert_message("at least 3");
    assert_status(json_get_double("file", o, "s", 0, 1, &x), ST_INVALID);
    assert_true(x == 2);

    bool flag = true;
    assert_ok(json_get_bool("file", o, "f", &flag));
    assert_false(flag);
    assert_ok(json_get_bool("file", o, "t", &flag));
    assert_ok(json_get_bool("file", o, "n", &flag));
    assert_true(flag);
    assert_status(json_get_bool("file", o, "b", &flag), ST_INVALID);
    assert_message("\"b\" must be true or false, not a whole number");

    const char *text = "default";
    assert_ok(json_get_string("file", o, "n", &text));
    assert_string_equal(text, "default");
    assert_ok(json_get_string("file", o, "s", &text));
    assert_string_equal(text, "text");
    assert_status(json_get_string("file", o, "l", &text), ST_INVALID);
    assert_status(json_get_string("file", o, "nul", &text), ST_INVALID);
    assert_message("U+0000");
    assert_string_equal(text, "text");
    assert_int_equal(json_string_length(json_object_get(o, "nul")), 3);

    assert_true(json_has(o, "a"));
    assert_false(json_has(o, "n"));
    assert_false(json_has(o, "absent"));
    // a field of what is not an object
    assert_status(json_get_bool("file", json_object_get(o, "l"), "x", &flag), ST_INVALID);
    assert_message("an array");
    json_decref(o);
}

TEST(files)
{
    const char *path = test_path(test_folder(), "a.json");
    json_t *o = parse("{\"a\": 0.1, \"b\": [1, \"\\u00e9\"]}"), *back = NULL;
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
    assert_status(json_read_file(path, 1000, &back), ST_FORMAT);
    assert_message(path);
    assert_null(back);
    json_decref(o);
}
