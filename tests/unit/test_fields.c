/* test_fields.c: requests' fields by their table: what is read, what holds where nothing is there,
 * and the sentence of each fault. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "tests/support/support.h"

struct wanted {
    const char *text;
    const json_t *object;
    bool flag;
    int64_t count;
    double rate;
};
#define FIELDS_OF struct wanted
static const struct json_field fields[] = {
    FIELD_TEXT("text", text),
    FIELD_JSON("object", object),
    FIELD_BOOL("flag", flag, true),
    FIELD_INT("count", count, 1, 9, 4),
    FIELD_REAL("rate", rate, 0, 1, 0.5),
    {0},
};

static enum status read_fields(const char *text, const char *needs, json_t **ret_body,
                               struct wanted *ret)
{
    assert_ok(json_parse("test", text, strlen(text), ret_body));
    memset(ret, 0x55, sizeof *ret);
    return json_read_fields("request", *ret_body, fields, needs, ret);
}

TEST(test_fields_read)
{
    json_t *body = NULL;
    struct wanted w;
    assert_ok(read_fields("{\"text\":\"a\",\"object\":{},\"flag\":false,\"count\":9,\"rate\":1}",
                          "count text", &body, &w));
    assert_string_equal(w.text, "a");
    assert_true(json_is_object(w.object) && !w.flag && w.count == 9 && w.rate == 1);
    json_decref(body);
    assert_ok(
        read_fields("{\"text\":null,\"other\":1}", NULL, &body, &w)); // others are passed over
    assert_null(w.text);
    assert_null(w.object);
    assert_true(w.flag && w.count == 4 && w.rate == 0.5);
    json_decref(body);
    assert_ok(json_read_fields("request", NULL, fields, "", &w)); // no object is one without fields
    assert_true(w.count == 4);
}

TEST(test_refused)
{
    const json_t *cases = test_rows("fields", "test_refused");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        json_t *body = NULL;
        struct wanted w;
        assert_status(read_fields(row_text(cases, i, "a"), row_text(cases, i, "b"), &body, &w),
                      ST_INVALID);
        assert_message(row_text(cases, i, "c"));
        json_decref(body);
    }
}
