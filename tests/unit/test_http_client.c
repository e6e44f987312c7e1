/* test_http_client.c: the HTTP client against a little server of canned answers on a Unix socket,
 * in a forked process, one connection at a time. */
#include "common/http/http_client.h"
#include "common/base/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>

#include <cmocka.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[64], path[96];
static pid_t server;

// ---- the server ---------------------------------------------------------------------------------

static void send_text(int fd, const char *text)
{
    if (send(fd, text, strlen(text), MSG_NOSIGNAL) < 0) return;
}
static void send_answer(int fd, const char *status, const char *body)
{
    char text[256];
    snprintf(text, sizeof text, "HTTP/1.1 %s\r\nContent-Length: %zu\r\n\r\n", status, strlen(body));
    send_text(fd, text);
    send_text(fd, body);
}
static void send_chunk(int fd, const char *body)
{
    char text[1024];
    snprintf(text, sizeof text, "%zx\r\n%s\r\n", strlen(body), body);
    send_text(fd, text);
}

// Reads one request with its body; false at the end of the connection.
static bool read_request(int fd, char *request, size_t size)
{
    size_t len = 0;
    for (;;) {
        ssize_t n = read(fd, request + len, size - 1 - len);
        if (n <= 0) return false;
        len += (size_t)n;
        request[len] = 0;
        const char *end = strstr(request, "\r\n\r\n"), *field = strstr(request, "Content-Length: ");
        if (end && len >= (size_t)(end + 4 - request) + (field ? strtoul(field + 16, NULL, 10) : 0))
            return true;
    }
}

static void serve(int fd, int n_requests)
{
    char request[8192], body[64];
    while (read_request(fd, request, sizeof request)) {
        n_requests++;
        const char *target = strchr(request, ' ') + 1;
        if (strncmp(target, "/count", 6) == 0) { // of this connection
            snprintf(body, sizeof body, "{\"n\": %d}", n_requests);
            send_answer(fd, "200 OK", body);
        } else if (strncmp(target, "/echo", 5) == 0) {
            send_answer(fd, "200 OK", strstr(request, "\r\n\r\n") + 4);
        } else if (strncmp(target, "/busy", 5) == 0) {
            send_answer(fd, "429 Too Many Requests", "{\"error\": {\"message\": \"queue full\"}}");
        } else if (strncmp(target, "/torn", 5) == 0) {
            send_answer(fd, "503 Service Unavailable", "{\"error\": \"torn\"}");
        } else if (strncmp(target, "/bad", 4) == 0) {
            send_answer(fd, "400 Bad Request", "{\"error\": {\"message\": \"n is -1\"}}");
        } else if (strncmp(target, "/broken", 7) == 0) {
            send_answer(fd, "500 Internal Server Error", "it broke");
        } else if (strncmp(target, "/nonsense", 9) == 0) {
            send_answer(fd, "200 OK", "{\"a\": ");
        } else if (strncmp(target, "/never", 6) == 0) {
            sleep(30);
        } else if (strncmp(target, "/closes", 7) == 0) {
            return;
        } else { // lines
            send_text(fd, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
            send_chunk(fd, "first\nsec");
            clock_sleep_ms(20);
            send_chunk(fd, "ond\n\nthird\n");
            if (strncmp(target, "/lines-cut", 10) == 0) return;
            if (strncmp(target, "/lines-stall", 12) == 0) sleep(30);
            send_chunk(fd, "last");
            send_text(fd, "0\r\n\r\n");
        }
    }
}

static int start_server(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/commonweight-http-XXXXXX");
    if (!mkdtemp(folder)) return -1;
    snprintf(path, sizeof path, "%s/s.sock", folder);
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%.90s", path);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 8))
        return -1;
    server = fork();
    if (server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        signal(SIGCHLD, SIG_IGN);
        for (;;) {
            int fd = accept(listener, NULL, NULL);
            if (fd < 0) _exit(1);
            if (fork() == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                serve(fd, 0);
                _exit(0);
            }
            close(fd);
        }
    }
    close(listener);
    return server > 0 ? 0 : -1;
}

static int stop_server(void **state)
{
    (void)state;
    kill(server, SIGKILL);
    waitpid(server, NULL, 0);
    unlink(path);
    rmdir(folder);
    return 0;
}

static struct http_client *client(void)
{
    struct http_client *c = NULL;
    assert_int_equal(http_client_new(path, &c), ST_OK);
    return c;
}

static void assert_says(const char *words)
{
    if (!strstr(status_message(), words)) fail_msg("\"%s\" lacks \"%s\"", status_message(), words);
}

// ---- tests --------------------------------------------------------------------------------------

static void test_json(void **state)
{
    (void)state;
    struct http_client *c = client();
    json_t *answer = NULL, *body = json_pack("{s:[i,i]}", "ids", 1, 2);
    for (int n = 1; n <= 3; n++) { // one connection is kept
        assert_int_equal(http_get_json(c, "/count", 2000, &answer), ST_OK);
        assert_int_equal(json_integer_value(json_object_get(answer, "n")), n);
        json_decref(answer);
    }
    assert_int_equal(http_post_json(c, "/echo", body, 2000, &answer), ST_OK);
    assert_true(json_equal(answer, body));
    json_decref(answer);
    assert_int_equal(http_post_json(c, "/echo", NULL, 2000, &answer), ST_OK);
    assert_true(json_is_object(answer) && json_object_size(answer) == 0);
    json_decref(answer);
    assert_int_equal(http_post_json(c, "/echo", body, 2000, NULL), ST_OK);
    struct bytes text = BYTES_INIT;
    assert_int_equal(http_get(c, "/count", 2000, &text), ST_OK);
    assert_string_equal(bytes_text(&text), "{\"n\": 7}");
    bytes_release(&text);
    json_decref(body);
    http_client_free(c);
}

static void test_refusals(void **state)
{
    (void)state;
    struct http_client *c = client();
    json_t *answer = NULL;
    assert_int_equal(http_get_json(c, "/busy", 2000, &answer), ST_BUSY);
    assert_says("GET /busy: 429: queue full");
    assert_int_equal(http_get_json(c, "/torn", 2000, &answer), ST_BUSY);
    assert_says("503: torn");
    assert_int_equal(http_post_json(c, "/bad", NULL, 2000, &answer), ST_INVALID);
    assert_says("POST /bad: 400: n is -1");
    assert_int_equal(http_get_json(c, "/broken", 2000, &answer), ST_IO);
    assert_says("500: it broke");
    assert_int_equal(http_get_json(c, "/nonsense", 2000, &answer), ST_FORMAT);
    assert_says("/nonsense");
    assert_null(answer);
    http_client_free(c);
}

static void test_gone_and_late(void **state)
{
    (void)state;
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
    assert_says("/tmp/no-such-socket");
    http_client_free(c);
    c = NULL;
    char longer[200];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = 0;
    assert_int_equal(http_client_new(longer, &c), ST_INVALID);
    assert_null(c);
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

static void test_lines(void **state)
{
    (void)state;
    struct http_client *c = client();
    struct lines lines = {0};
    assert_int_equal(http_post_lines(c, "/lines", NULL, 0, 2000, on_line, NULL, &lines), ST_OK);
    assert_string_equal(lines.text, "first|second|third|last|");

    lines = (struct lines){.fail_at = 2};
    assert_int_equal(http_post_lines(c, "/lines", NULL, 0, 2000, on_line, NULL, &lines),
                     ST_MISMATCH);
    assert_says("line 2 is wrong");
    assert_string_equal(lines.text, "first|");
    assert_int_equal(lines.n, 2);

    lines = (struct lines){0};
    assert_int_equal(http_post_lines(c, "/lines-cut", NULL, 0, 2000, on_line, NULL, &lines),
                     ST_PEER_GONE);
    assert_string_equal(lines.text, "first|second|third|");

    lines = (struct lines){0};
    assert_int_equal(http_post_lines(c, "/lines-stall", NULL, 0, 200, on_line, NULL, &lines),
                     ST_TIMEOUT);
    assert_says("nothing arrived for 200 ms");
    lines = (struct lines){0};
    assert_int_equal(http_post_lines(c, "/lines-stall", NULL, 300, 0, on_line, NULL, &lines),
                     ST_TIMEOUT);
    lines = (struct lines){0};
    int64_t start = clock_now_ns();
    assert_int_equal(http_post_lines(c, "/lines-stall", NULL, 0, 0, on_line, alive, &lines),
                     ST_PEER_GONE);
    assert_says("it died");
    assert_true(clock_ms_since(start) < 2000);

    lines = (struct lines){0};
    assert_int_equal(http_post_lines(c, "/busy", NULL, 0, 2000, on_line, NULL, &lines), ST_BUSY);
    assert_int_equal(lines.n, 0);
    http_client_free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_json),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_gone_and_late),
        cmocka_unit_test(test_lines),
    };
    return cmocka_run_group_tests_name("http_client", tests, start_server, stop_server);
}
