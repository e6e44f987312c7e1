/* test_http_client.c: one request at a time against a server of canned responses. */
// SPDX-License-Identifier: Apache-2.0
#include "common/http/http_client.h"
#include "tests/support/canned_server.h"
#include "tests/support/support.h"

static struct canned_server server;

static enum status post_json(struct http_client *c, const char *path, const json_t *body,
                             json_t **ret)
{
    struct bytes text = BYTES_INIT;
    enum status st = http_perform(
        c, &(struct http_call){.path = path, .post = true, .body = body, .timeout_ms = 2000},
        &text);
    if (st == ST_OK && ret) st = json_parse(path, bytes_text(&text), text.len, ret);
    bytes_release(&text);
    return st;
}

static void serve(int fd)
{
    char request[8192], body[64];
    for (int n = 1; canned_request(fd, request, sizeof request); n++) {
        if (canned_is(request, "/count")) { // of this connection
            snprintf(body, sizeof body, "{\"n\": %d}", n);
            canned_response(fd, "200 OK", body);
        } else if (canned_is(request, "/echo")) {
            canned_response(fd, "200 OK", canned_body(request));
        } else if (canned_is(request, "/busy")) {
            canned_response(fd, "429 Too Many Requests",
                            "{\"error\": {\"message\": \"queue full\"}}");
        } else if (canned_is(request, "/torn")) {
            canned_response(fd, "503 Service Unavailable", "{\"error\": \"torn\"}");
        } else if (canned_is(request, "/bad")) {
            canned_response(fd, "400 Bad Request", "{\"error\": {\"message\": \"n is -1\"}}");
        } else if (canned_is(request, "/broken")) {
            canned_response(fd, "500 Internal Server Error", "it broke");
        } else if (canned_is(request, "/nonsense")) {
            canned_response(fd, "200 OK", "{\"a\": ");
        } else if (canned_is(request, "/never")) {
            sleep(30);
        } else if (canned_is(request, "/closes")) {
            return;
        } else { // lines
            canned_chunked(fd);
            canned_chunk(fd, "first\nsec");
            clock_sleep_ms(20);
            canned_chunk(fd, "ond\n\nthird\n");
            if (canned_is(request, "/lines-cut")) return;
            if (canned_is(request, "/lines-stall")) sleep(30);
            canned_chunk(fd, "last");
            canned_end(fd);
        }
    }
}

static void start_server(void)
{
    canned_server_start(&server, serve);
}

static void stop_server(void)
{
    canned_server_stop(&server);
}

static struct http_client *client(void)
{
    struct http_client *c = NULL;
    assert_ok(http_client_new(server.socket, &c));
    return c;
}

// ---- tests --------------------------------------------------------------------------------------

TEST(test_json)
{
    struct http_client *c = client();
    json_t *answer = NULL, *body = json_pack("{s:[i,i]}", "ids", 1, 2);
    for (int n = 1; n <= 3; n++) { // one connection is kept
        assert_int_equal(http_get_json(c, "/count", 2000, &answer), ST_OK);
        assert_int_equal(json_integer_value(json_object_get(answer, "n")), n);
        json_decref(answer);
    }
    assert_int_equal(post_json(c, "/echo", body, &answer), ST_OK);
    assert_true(json_equal(answer, body));
    json_decref(answer);
    assert_int_equal(post_json(c, "/echo", NULL, &answer), ST_OK);
    assert_true(json_is_object(answer) && json_object_size(answer) == 0);
    json_decref(answer);
    assert_int_equal(post_json(c, "/echo", body, NULL), ST_OK);
    struct bytes text = BYTES_INIT;
    assert_int_equal(http_get(c, "/count", 2000, &text), ST_OK);
    assert_string_equal(bytes_text(&text), "{\"n\": 7}");
    bytes_release(&text);
    json_decref(body);
    http_client_free(c);
}

TEST(test_refusals)
{
    struct http_client *c = client();
    json_t *answer = NULL;
    assert_int_equal(http_get_json(c, "/busy", 2000, &answer), ST_BUSY);
    assert_message("GET /busy: 429: queue full");
    assert_int_equal(http_get_json(c, "/torn", 2000, &answer), ST_BUSY);
    assert_message("503: torn");
    assert_int_equal(post_json(c, "/bad", NULL, &answer), ST_INVALID);
    assert_message("POST /bad: 400: n is -1");
    assert_int_equal(http_get_json(c, "/broken", 2000, &answer), ST_IO);
    assert_message("500: it broke");
    assert_int_equal(http_get_json(c, "/nonsense", 2000, &answer), ST_FORMAT);
    assert_message("/nonsense");
    assert_null(answer);
    http_client_free(c);
}

TEST(test_gone_and_late)
{
    struct http_client *c = client();
    json_t *answer = NULL;
    int64_t start = clock_now_ns();
    assert_int_equal(http_get_json(c, "/never", 150, &answer), ST_TIMEOUT);
    assert_true(clock_ms_since(start) >= 150 && clock_ms_since(start) < 1500);
    assert_int_equal(http_get_json(c, "/closes", 2000, &answer), ST_PEER_GONE);
    assert_int_equal(http_get_json(c, "/count", 2000, &answer), ST_OK); // and it works again
    json_decref(answer);
    http_client_free(c);
    c = NULL;
    assert_int_equal(http_client_new("/tmp/no-such-socket", &c), ST_OK);
    assert_int_equal(http_get_json(c, "/count", 2000, &answer), ST_PEER_GONE);
    assert_message("/tmp/no-such-socket");
    http_client_free(c);
    c = NULL;
    char longer[200];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = 0;
    assert_int_equal(http_client_new(longer, &c), ST_INVALID);
    assert_null(c);
}

static enum status post_lines(struct http_client *c, const char *path, int timeout_ms,
                              int idle_timeout_ms, http_line_fn on_line,
                              enum status (*alive)(void *context), void *context)
{
    const struct http_call call = {.path = path,
                                   .post = true,
                                   .timeout_ms = timeout_ms,
                                   .idle_timeout_ms = idle_timeout_ms,
                                   .on_line = on_line,
                                   .alive = alive,
                                   .context = context};
    return http_perform(c, &call, NULL);
}

struct lines {
    char text[256];
    int fail_at, n, asked;
};
static enum status on_line(void *context, const char *line, size_t len)
{
    struct lines *lines = context;
    if (++lines->n == lines->fail_at) return status_fail(ST_MISMATCH, "line %d is wrong", lines->n);
    size_t used = strlen(lines->text);
    snprintf(lines->text + used, sizeof lines->text - used, "%.*s|", (int)len, line);
    return ST_OK;
}
static enum status alive(void *context)
{
    struct lines *lines = context;
    return ++lines->asked < 3 ? ST_OK : status_fail(ST_PEER_GONE, "it died");
}

TEST(test_lines)
{
    struct http_client *c = client();
    struct lines lines = {0};
    assert_int_equal(post_lines(c, "/lines", 0, 2000, on_line, NULL, &lines), ST_OK);
    assert_string_equal(lines.text, "first|second|third|last|");

    lines = (struct lines){.fail_at = 2};
    assert_int_equal(post_lines(c, "/lines", 0, 2000, on_line, NULL, &lines), ST_MISMATCH);
    assert_message("line 2 is wrong");
    assert_string_equal(lines.text, "first|");
    assert_int_equal(lines.n, 2);

    lines = (struct lines){0};
    assert_int_equal(post_lines(c, "/lines-cut", 0, 2000, on_line, NULL, &lines), ST_PEER_GONE);
    assert_string_equal(lines.text, "first|second|third|");

    lines = (struct lines){0};
    assert_int_equal(post_lines(c, "/lines-stall", 0, 200, on_line, NULL, &lines), ST_TIMEOUT);
    assert_message("nothing arrived for 200 ms");
    lines = (struct lines){0};
    assert_int_equal(post_lines(c, "/lines-stall", 300, 0, on_line, NULL, &lines), ST_TIMEOUT);
    lines = (struct lines){0};
    int64_t start = clock_now_ns();
    assert_int_equal(post_lines(c, "/lines-stall", 0, 0, on_line, alive, &lines), ST_PEER_GONE);
    assert_message("it died");
    assert_true(clock_ms_since(start) < 2000);

    lines = (struct lines){0};
    assert_int_equal(post_lines(c, "/busy", 0, 2000, on_line, NULL, &lines), ST_BUSY);
    assert_int_equal(lines.n, 0);
    http_client_free(c);
}

TESTS_BETWEEN(start_server, stop_server)
