/* served.c: see served.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/served.h"

struct daemon served;

void served_start(void)
{
    const char *const *options = OPTIONS("--max-batch", "8", "--max-queue", "192", "--max-body",
                                         "64K", "--kv-memory", "32M", "--prefill-chunk", "24");
    daemon_start(&served, daemon_model(test_folder(), true, 7), options);
}

void served_stop(void)
{
    daemon_end(&served);
}

json_t *ask(const char *path, const char *body)
{
    return daemon_post(served.socket, path, 200, body);
}

void served_refuses(const char *file, const char *list)
{
    const json_t *rows = test_rows(file, list), *row;
    size_t i;
    json_array_foreach (rows, i, row) {
        const char *body = text_of(row, "body");
        const int status = json_has(row, "status") ? (int)int_of(row, "status") : 400;
        struct wire_answer a;
        daemon_request(served.socket, "POST", text_of(row, "path"), "", body, &a);
        const json_t *error = json_object_get(a.json, "error"), *param, *code;
        if (a.status != status || !error)
            fail_msg("%s: %d %s", body, a.status, bytes_text(&a.body));
        if (json_has(row, "part")) assert_contains(text_of(error, "message"), text_of(row, "part"));
        param = json_object_get(row, "param"); // null: of no field
        if (param && !json_equal(param, json_object_get(error, "param")))
            fail_msg("%s: %s", body, bytes_text(&a.body));
        code = json_object_get(row, "code");
        if (code)
            assert_true(json_equal(code, json_at(error, "code")));
        else
            assert_int_equal(int_of(error, "code"), status);
        text_of(error, "type");
    }
}
