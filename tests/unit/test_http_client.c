/* test_http_client.c: requests to a server of canned responses: one at a time, and many of one
 * client at the same time, each with its own consumer, deadline and error, where none disturbs
 * another. */
// SPDX-License-Identifier: Apache-2.0
#include "common/http/http_client.h"
#include "tests/support/canned_server.h"
#include "tests/support/support.h"

#define N        24
#define LIMIT_MS 60000

static struct canned_server server;
static const char *gates; // folder

static const char *gate(int i)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%d", gates, i);
    return path;
}

static int n_of(const char *request)
{
    return atoi(strchr(request, '?') + 1);
}

static void wait_for_gate(int i)
{
    const int64_t deadline = clock_deadline_ns(LIMIT_MS);
    while (access(gate(i), F_OK) != 0 && clock_now_ns() < deadline) clock_sleep_ms(1);
}

// /slow?MS: a line at once, and one after MS. /gate?I: the second once there is the file gate(I).
// /stall: one, then nothing. /cut: one, then the end of the connection. /lines: four, of which the
// last ends with the response; /lines-cut and /lines-stall as those above, behind the third.
// /count: how many requests the connection has had.
static void serve(int fd)
{
    static const struct {
        const char *path, *status, *body;
    } canned[] = {
        {"/busy", "429 Too Many Requests", "{\"error\": {\"message\": \"queue full\"}}"},
        {"/torn", "503 Service Unavailable", "{\"error\": \"torn\"}"},
        {"/bad", "400 Bad Request", "{\"error\": {\"message\": \"n is -1\"}}"},
        {"/broken", "500 Internal Server Error", "it broke"},
        {"/nonsense", "200 OK", "{\"a\": "},
    };
    enum { CANNED = sizeof canned / sizeof *canned };
    char request[8192], line[64];
    for (int n = 1; canned_request(fd, request, sizeof request); n++) {
        int which = 0;
        while (which < CANNED && !canned_is(request, canned[which].path)) which++;
        snprintf(line, sizeof line, "{\"n\": %d}", n);
        if (which < CANNED)
            canned_response(fd, canned[which].status, canned[which].body);
        else if (canned_is(request, "/count"))
            canned_response(fd, "200 OK", line);
        else if (canned_is(request, "/echo"))
            canned_response(fd, "200 OK", canned_body(request));
        if (which < CANNED || canned_is(request, "/count") || canned_is(request, "/echo")) continue;
        if (canned_is(request, "/never")) sleep(30);
        if (canned_is(request, "/closes")) return;
        canned_chunked(fd);
        if (canned_is(request, "/lines")) {
            canned_chunk(fd, "first\nsec");
            clock_sleep_ms(20);
            canned_chunk(fd, "ond\n\nthird\n");
            snprintf(line, sizeof line, "last");
        } else {
            snprintf(line, sizeof line, "%s\n", canned_body(request));
            canned_chunk(fd, line);
        }
        if (canned_is(request, "/stall") || canned_is(request, "/lines-stall")) sleep(60);
        if (canned_is(request, "/cut") || canned_is(request, "/lines-cut")) return;
        if (canned_is(request, "/gate?")) wait_for_gate(n_of(request));
        if (canned_is(request, "/slow?")) clock_sleep_ms(n_of(request));
        canned_chunk(fd, line);
        canned_end(fd);
    }
}

static void start_server(void)
{
    gates = test_folder();
    canned_server_start(&server, serve);
}

static void stop_server(void)
{
    canned_server_stop(&server);
}

LATER(http_client_free)

// Of the test's server, or that address; freed with the test.
static struct http_client *client_of(const char *address)
{
    struct http_client *c = NULL;
    assert_ok(http_client_new(address, &c));
    return test_later(c, http_client_free_later);
}

static enum status post_json(struct http_client *c, const char *path, const json_t *body,
                             json_t **ret)
{
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    enum status st = http_perform(
        c, &(struct http_call){.path = path, .post = true, .body = body, .timeout_ms = 2000},
        &text);
    if (st == ST_OK && ret) st = json_parse(path, bytes_text(&text), text.len, ret);
    return st;
}

// ---- one at a time ------------------------------------------------------------------------------

TEST(test_json)
{
    struct http_client *c = client_of(server.socket);
    struct bytes text = BYTES_INIT;
    const json_t *body = json_quoted("{'ids': [1, 2]}");
    json_t *answer = NULL;
    for (int n = 1; n <= 3; n++) { // one connection is kept
        assert_ok(http_get_json(c, "/count", 2000, &answer));
        assert_int_equal(int_of(test_keep(answer), "n"), n);
    }
    assert_ok(post_json(c, "/echo", body, &answer));
    assert_true(json_equal(test_keep(answer), body));
    assert_ok(post_json(c, "/echo", NULL, &answer));
    assert_true(json_equal(test_keep(answer), json_quoted("{}")));
    assert_ok(post_json(c, "/echo", body, NULL));
    assert_ok(http_get(c, "/count", 2000, &text));
    assert_string_equal(test_keep(text.data), "{\"n\": 7}");
}

TEST(test_refusals)
{
    const json_t *cases = test_rows("http_client", "test_refusals");
    struct http_client *c = client_of(server.socket);
    json_t *answer = NULL;
    for (size_t i = 0; i < json_array_size(cases); i++)
        assert_fails(http_get_json(c, row_text(cases, i, "path"), 2000, &answer),
                     row_status(cases, i, "st"), row_text(cases, i, "words"));
    assert_fails(post_json(c, "/bad", NULL, &answer), ST_INVALID, "POST /bad: 400: n is -1");
    assert_null(answer);
}

TEST(test_gone_and_late)
{
    struct http_client *c = client_of(server.socket);
    json_t *answer = NULL;
    int64_t start = clock_now_ns();
    assert_int_equal(http_get_json(c, "/never", 150, &answer), ST_TIMEOUT);
    assert_true(clock_ms_since(start) >= 150 && clock_ms_since(start) < 1500);
    assert_int_equal(http_get_json(c, "/closes", 2000, &answer), ST_PEER_GONE);
    assert_ok(http_get_json(c, "/count", 2000, &answer)); // and it works again
    test_keep(answer);
    assert_fails(http_get_json(client_of("/tmp/no-such-socket"), "/count", 2000, &answer),
                 ST_PEER_GONE, "/tmp/no-such-socket");
    c = NULL;
    char longer[200] = {0};
    memset(longer, 'x', sizeof longer - 1);
    assert_int_equal(http_client_new(longer, &c), ST_INVALID);
    assert_null(c);
}

// ---- lines --------------------------------------------------------------------------------------
struct consumer {
    struct http_transfer *request;
    char lines[128];
    int fail_at, n, asked;
};

static enum status take(void *context, const char *line, size_t len)
{
    struct consumer *c = context;
    const size_t used = strlen(c->lines);
    if (++c->n == c->fail_at)
        return status_fail(ST_FORMAT, "line %d of %.*s", c->n, (int)len, line);
    snprintf(c->lines + used, sizeof c->lines - used, "%.*s|", (int)len, line);
    return ST_OK;
}

static enum status alive(void *context)
{
    struct consumer *c = context;
    return ++c->asked < 3 ? ST_OK : status_fail(ST_PEER_GONE, "it died");
}

TEST(test_lines)
{
    const json_t *cases = test_rows("http_client", "test_lines");
    struct http_client *client = client_of(server.socket);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        struct consumer c = {.fail_at = row_int(cases, i, "fail_at")};
        const int64_t start = clock_now_ns();
        const struct http_call call = {.path = row_text(cases, i, "path"),
                                       .post = true,
                                       .timeout_ms = row_int(cases, i, "timeout_ms"),
                                       .idle_timeout_ms = row_int(cases, i, "idle_timeout_ms"),
                                       .on_line = take,
                                       .alive = row_flag(cases, i, "asked") ? alive : NULL,
                                       .context = &c};
        assert_status(http_perform(client, &call, NULL), row_status(cases, i, "status"));
        if (row_status(cases, i, "status") != ST_OK) assert_message(row_text(cases, i, "message"));
        if (row_text(cases, i, "lines")) assert_string_equal(c.lines, row_text(cases, i, "lines"));
        if (row_int(cases, i, "fail_at")) assert_int_equal(c.n, row_int(cases, i, "fail_at"));
        if (row_flag(cases, i, "asked")) assert_true(clock_ms_since(start) < 2000);
    }
}

// ---- many at the same time ----------------------------------------------------------------------
static void submit(struct http_client *client, struct consumer *c, const char *path, int id,
                   int timeout_ms, int idle_timeout_ms)
{
    json_t *body = test_keep(json_pack("[i]", id));
    const struct http_call call = {.path = path,
                                   .post = true,
                                   .body = body,
                                   .timeout_ms = timeout_ms,
                                   .idle_timeout_ms = idle_timeout_ms,
                                   .on_line = take,
                                   .context = c};
    assert_ok(http_submit(client, &call, &c->request));
}

static void assert_lines(const struct consumer *c, int id, int n)
{
    char wanted[128] = "";
    for (int i = 0; i < n; i++) snprintf(wanted + strlen(wanted), 16, "[%d]|", id);
    assert_string_equal(c->lines, wanted);
}

// The last submitted is let through first; no other ends with it.
TEST(each_has_its_own_consumer)
{
    struct http_client *client = client_of(server.socket);
    struct consumer c[N] = {0};
    const int64_t deadline = clock_deadline_ns(LIMIT_MS);
    for (int i = 0; i < N; i++) {
        char path[32];
        snprintf(path, sizeof path, "/gate?%d", i);
        submit(client, &c[i], path, i, LIMIT_MS, 0);
    }
    for (int i = N - 1; i >= 0; i--) {
        test_write(gate(i), "", 0);
        while (!http_ended(c[i].request)) {
            assert_true(clock_now_ns() < deadline);
            http_poll(client, 1000);
        }
        for (int k = 0; k < i; k++) assert_false(http_ended(c[k].request));
    }
    for (int i = 0; i < N; i++) {
        assert_ok(http_finish(c[i].request, NULL));
        assert_lines(&c[i], i, 2);
    }
}

// One fails in each of the ways there are; each tells its own story however late it is asked, and
// the one that does not fail is none the worse.
TEST(each_has_its_own_error)
{
    struct http_client *client = client_of(server.socket);
    struct consumer cut = {0}, late = {0}, idle = {0}, wrong = {.fail_at = 2}, busy = {0},
                    good = {0};
    submit(client, &good, "/slow?500", 1, LIMIT_MS, 0);
    submit(client, &cut, "/cut", 2, LIMIT_MS, 0);
    submit(client, &late, "/stall", 3, 300, 0);
    submit(client, &idle, "/stall-idle", 4, 0, 200);
    submit(client, &wrong, "/slow?1", 5, LIMIT_MS, 0);
    submit(client, &busy, "/busy", 6, LIMIT_MS, 0);
    assert_ok(http_finish(good.request, NULL));
    assert_lines(&good, 1, 2);
    assert_fails(http_finish(busy.request, NULL), ST_BUSY, "POST /busy: 429: queue full");
    assert_fails(http_finish(wrong.request, NULL), ST_FORMAT, "line 2 of [5]");
    assert_lines(&wrong, 5, 1);
    assert_fails(http_finish(idle.request, NULL), ST_TIMEOUT,
                 "POST /stall-idle: nothing arrived for 200 ms");
    assert_fails(http_finish(late.request, NULL), ST_TIMEOUT,
                 "POST /stall: no whole response within 300 ms");
    assert_fails(http_finish(cut.request, NULL), ST_PEER_GONE, "POST /cut");
}

TEST(cancelled_ones_are_over)
{
    struct http_client *client = client_of(server.socket);
    struct consumer stalled = {0}, good = {0}, left = {0};
    submit(client, &stalled, "/stall", 1, 0, 0);
    submit(client, &left, "/stall", 2, 0, 0);
    submit(client, &good, "/slow?50", 3, LIMIT_MS, 0);
    http_poll(client, 10);
    http_cancel(stalled.request);
    const int before = stalled.n;
    assert_ok(http_finish(good.request, NULL));
    assert_lines(&good, 3, 2);
    assert_int_equal(stalled.n, before);
    http_cancel(NULL);
    test_now(client); // `left` is cancelled with it
}

TEST(the_life_of_each_server_is_asked_for)
{
    struct http_client *client = client_of(server.socket);
    struct consumer good = {0}, dead = {.asked = 3};
    struct http_transfer *request;
    const struct http_call call = {
        .path = "/stall", .post = true, .alive = alive, .context = &dead};
    submit(client, &good, "/slow?400", 1, LIMIT_MS, 0);
    assert_ok(http_submit(client, &call, &request));
    const int64_t start = clock_now_ns();
    assert_fails(http_finish(request, NULL), ST_PEER_GONE, "it died");
    assert_true(clock_ms_since(start) < 10000);
    assert_ok(http_finish(good.request, NULL));
}

static int requests_on_connection(struct http_client *client, const char *address)
{
    SCOPED(bytes_release) struct bytes body = BYTES_INIT;
    const struct http_call call = {.server = address, .path = "/count", .timeout_ms = LIMIT_MS};
    assert_ok(http_perform(client, &call, &body));
    const int n = atoi(strchr(bytes_text(&body), ':') + 1);
    return n;
}

// Unix socket and TCP, in one client; a connection to each is kept.
TEST(servers_side_by_side)
{
    struct http_client *client = client_of(server.socket);
    for (int n = 1; n <= 3; n++) {
        assert_int_equal(requests_on_connection(client, NULL), n);
        assert_int_equal(requests_on_connection(client, server.url), n);
    }
    struct http_transfer *request = NULL;
    const struct http_call nobody = {
        .server = "http://127.0.0.1:1", .path = "/", .timeout_ms = 9000};
    assert_fails(http_perform(client, &nobody, NULL), ST_PEER_GONE,
                 "nobody answers on http://127.0.0.1:1");
    const struct http_call nameless = {.server = "", .path = "/"};
    assert_status(http_submit(client, &nameless, &request), ST_INVALID);
    assert_null(request);
    client = client_of(server.url);
    assert_int_equal(requests_on_connection(client, NULL), 1);
}

// A server that is killed with requests in flight is noticed at once by all of them.
TEST(a_killed_server_ends_them_all)
{
    struct canned_server other;
    canned_server_start(&other, serve);
    struct http_client *client = client_of(other.socket);
    struct consumer c[4] = {0};
    for (int i = 0; i < 4; i++) submit(client, &c[i], "/stall", i, LIMIT_MS, 0);
    const int64_t deadline = clock_deadline_ns(LIMIT_MS);
    while (!(c[0].n && c[1].n && c[2].n && c[3].n)) {
        assert_true(clock_now_ns() < deadline);
        http_poll(client, 10);
    }
    const int64_t start = clock_now_ns();
    canned_server_stop(&other);
    for (int i = 0; i < 4; i++)
        assert_fails(http_finish(c[i].request, NULL), ST_PEER_GONE,
                     "the server closed the connection on");
    assert_true(clock_ms_since(start) < 10000);
}

TESTS_BETWEEN(start_server, stop_server)
