/* test_refusals.c: what a real cw-infer-server refuses, and what it stands: broken HTTP, large
 * bodies, crowds, clients that leave or do not read. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/served.h"

#include <pthread.h>

TEST(test_refusals)
{
    served_refuses("refusals", "test_refusals");
    char long_name[400] = "{\"model\":\"/tmp/";
    memset(long_name + strlen(long_name), 'x', 300);
    strcat(long_name, "\"}");
    daemon_call(&served, "/reload", 404, "/tmp/xxx", "%s", long_name);
    // field of the error object
    json_t *a =
        daemon_post(served.socket, "/v1/completions", 400, "{\"prompt\":\"a\",\"top_p\":7}");
    assert_string_equal(text_of(a, "error.param"), "top_p");
}

TEST(test_too_long_prompt)
{
    SCOPED(bytes_release) struct bytes body = BYTES_INIT;
    bytes_puts(&body, "{\"prompt\":[1");
    for (int i = 0; i < 600; i++) bytes_puts(&body, ",1");
    bytes_puts(&body, "]}");
    json_t *a = daemon_post(served.socket, "/v1/completions", 400, bytes_text(&body));
    assert_contains(text_of(a, "error.message"), "601 tokens");
}

TEST(test_methods)
{
    struct wire_answer a;
    daemon_request(served.socket, "GET", "/v1/completions", "", NULL, &a);
    assert_int_equal(a.status, 405);
    assert_contains(bytes_text(&a.head), "Allow: POST");
    daemon_request(served.socket, "POST", "/health", "", "{}", &a);
    assert_int_equal(a.status, 405);
    assert_contains(bytes_text(&a.head), "Allow: GET");
    daemon_request(served.socket, "HEAD", "/health", "", NULL, &a);
    assert_int_equal(a.status, 200);
    assert_int_equal(a.body.len, 0);
}

TEST(test_large_bodies)
{
    SCOPED(bytes_release) struct bytes body = BYTES_INIT;
    struct wire_answer a;
    bytes_puts(&body, "{\"prompt\":\"");
    while (body.len < 300000) bytes_puts(&body, "aaaaaaaaaaaaaaaa");
    bytes_puts(&body, "\"}");
    daemon_request(served.socket, "POST", "/v1/completions", "", bytes_text(&body), &a);
    assert_int_equal(a.status, 413);
    assert_contains(bytes_text(&a.body), "--max-body");
    // a client that asks first is told at once
    const char *ask = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n"
                      "Expect: 100-continue\r\n\r\n";
    int fd = daemon_connect(served.socket);
    daemon_send(fd, ask, strlen(ask));
    assert_true(wire_read(fd, 10000, &a));
    assert_int_equal(a.status, 413);
    close(fd);
    // chunked, so that the length is not known before
    const char *head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                       "Transfer-Encoding: chunked\r\n\r\n493e0\r\n"; // 300000
    fd = daemon_connect(served.socket);
    daemon_send(fd, head, strlen(head));
    daemon_send(fd, body.data, 300000);
    daemon_send(fd, "\r\n0\r\n\r\n", 7);
    assert_true(wire_read(fd, 10000, &a));
    assert_int_equal(a.status, 413);
    close(fd);
}

TEST(test_broken_http)
{
    static const char *const broken[] = {
        "\r\n\r\n\r\n\r\n",
        "NONSENSE\r\n\r\n",
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 18446744073709551617\r\n\r\n",
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "GET /health HTTP/9.9\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    };
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        struct wire_answer a;
        int fd = daemon_connect(served.socket);
        daemon_send(fd, broken[i], strlen(broken[i]));
        wire_read(fd, 200, &a);
        if (a.status == 200) fail_msg("answered 200 to broken request %zu", i);
        close(fd);
    }
    SCOPED(bytes_release) struct bytes header = BYTES_INIT;
    struct wire_answer a;
    bytes_puts(&header, "X-Long: ");
    while (header.len < 200000) bytes_puts(&header, "bbbbbbbbbbbbbbbb");
    bytes_puts(&header, "\r\n");
    daemon_request(served.socket, "GET", "/health", bytes_text(&header), NULL, &a);
    assert_true(a.status != 200);
    daemon_get(served.socket, "/health", 200); // still there
}

struct crowd {
    pthread_t thread;
    const char *request;
    struct wire_answer answer;
};

static void *crowd_client(void *context)
{
    struct crowd *c = context;
    int fd = daemon_connect(served.socket);
    if (fd >= 0 && daemon_send(fd, c->request, strlen(c->request)))
        wire_read(fd, 60000, &c->answer);
    if (fd >= 0) close(fd);
    return NULL;
}

TEST(test_crowd)
{
    static struct crowd crowd[64];
    for (int i = 0; i < 64; i++) {
        const char *body = test_text("{\"prompt\":[1,2,%d],\"max_tokens\":24,\"seed\":%d%s}", i, i,
                                     i % 2 ? ",\"stream\":true" : "");
        crowd[i].request =
            test_text("POST /v1/completions HTTP/1.0\r\nHost: x\r\nContent-Length: %zu\r\n\r\n%s",
                      strlen(body), body);
        assert_int_equal(pthread_create(&crowd[i].thread, NULL, crowd_client, &crowd[i]), 0);
    }
    for (int i = 0; i < 64; i++) pthread_join(crowd[i].thread, NULL);
    for (int i = 0; i < 64; i++) assert_int_equal(crowd[i].answer.status, 200);
    for (int i = 0; i < 64; i += 8) { // the same alone
        json_t *alone = ask("/v1/completions",
                            test_text("{\"prompt\":[1,2,%d],\"max_tokens\":24,\"seed\":%d}", i, i));
        assert_true(json_equal(json_at(alone, "choices.0.token_ids"),
                               json_at(crowd[i].answer.json, "choices.0.token_ids")));
    }
    for (int i = 1; i < 64; i += 2)
        assert_contains(bytes_text(&crowd[i].answer.body), "data: [DONE]");
}

static void wait_for_health(const char *key, bool zero)
{
    int64_t deadline = clock_deadline_ns(10000);
    for (;;) {
        json_int_t x = int_of(daemon_get(served.socket, "/health", 200), key);
        if ((x == 0) == zero) return;
        if (clock_now_ns() > deadline) fail_msg("\"%s\" stays %d", key, (int)x);
        clock_sleep_ms(5);
    }
}

TEST(test_leaving_cancels)
{
    static const char *const bodies[] = {
        "{\"prompt\":\"a\",\"max_tokens\":500,\"n\":64}",
        "{\"prompt\":\"a\",\"max_tokens\":500,\"n\":64,\"stream\":true}"};
    static const char series[] =
        "vllm:request_success_total{model_name=\"model\",finished_reason=\"abort\"";
    for (int i = 0; i < 2; i++) {
        double before = daemon_metric(&served, "commonweight:disconnects_total");
        double aborted = daemon_metric(&served, series);
        int fd = daemon_ask(&served, "/v1/completions", bodies[i]);
        wait_for_health("running", false);
        close(fd);
        int64_t start = clock_now_ns();
        wait_for_health("running", true);
        wait_for_health("waiting", true);
        assert_true(clock_ms_since(start) < 2000);
        assert_true(daemon_metric(&served, "commonweight:disconnects_total") == before + 1);
        assert_true(daemon_metric(&served, series) > aborted);
    }
}

TEST(test_full_queue)
{
    struct wire_answer a;
    int fd =
        daemon_ask(&served, "/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":500,\"n\":150}");
    wait_for_health("running", false);
    daemon_request(served.socket, "POST", "/v1/completions", "",
                   "{\"prompt\":[\"a\",\"b\",\"c\"],\"max_tokens\":400,\"n\":40}", &a);
    assert_int_equal(a.status, 429);
    assert_contains(bytes_text(&a.head), "Retry-After: ");
    close(fd);
    wait_for_health("running", true); // what fitted of the refused request is cancelled, too
    wait_for_health("waiting", true);
}

TEST(test_slow_reader)
{
    struct wire_answer slow;
    const char *body = "{\"groups\":[{\"prompt_token_ids\":[4,5],\"n\":48}],\"sampling\":"
                       "{\"max_tokens\":120,\"seed\":1}}";
    int fd = daemon_ask(&served, "/v1/rollouts", body);
    clock_sleep_ms(1500); // far more than a socket's buffer is ready by now
    assert_true(wire_read(fd, 30000, &slow));
    close(fd);
    assert_int_equal(json_array_size(json_of_lines(bytes_text(&slow.body))), 48);
}

TEST(test_kept_connection)
{
    const char *two =
        "GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\n"
        "Connection: close\r\n\r\n";
    struct wire_answer a;
    int fd = daemon_connect(served.socket);
    daemon_send(fd, two, strlen(two));
    assert_true(wire_read(fd, 10000, &a));
    assert_contains(bytes_text(&a.body), "max_model_len");
    close(fd);
}

// What a burst of large bodies took is the system's again.
TEST(test_memory_after_a_burst)
{
    enum { CLIENTS = 12, BODY = 6 << 20, PART = 1 << 20 };
    static const char begin[] = "{\"prompt\":[1";
    char *body = test_keep(malloc(BODY)), head[128];
    int fds[CLIENTS];
    const int len = snprintf(head, sizeof head,
                             "POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n", BODY);
    for (int i = 0; i < BODY; i++) body[i] = i % 2 ? '1' : ',';
    memcpy(body, begin, strlen(begin));
    memcpy(body + BODY - 3, "1]}", 3);
    struct daemon d = {0}; // one that takes such bodies
    daemon_start(&d, daemon_model(test_folder(), true, 5), NULL);
    const long before = test_process(d.child.pid, "VmRSS:", 10);
    for (int c = 0; c < CLIENTS; c++) {
        fds[c] = daemon_connect(d.socket);
        assert_true(daemon_send(fds[c], head, (size_t)len));
    }
    for (int at = 0; at < BODY; at += PART) // all at once
        for (int c = 0; c < CLIENTS; c++) assert_true(daemon_send(fds[c], body + at, PART));
    for (int c = 0; c < CLIENTS; c++) {
        struct wire_answer a;
        assert_true(wire_read(fds[c], 60000, &a));
        assert_int_equal(a.status, 400);
        close(fds[c]);
    }
    long after = 0;
    for (int i = 0; i < 50; i++) {
        after = test_process(d.child.pid, "VmRSS:", 10);
        if (after < before + (128 << 10)) break;
        clock_sleep_ms(100);
    }
    printf("%ld MB before, %ld MB after\n", before >> 10, after >> 10);
    daemon_kill(&d);
    assert_true(after < before + (128 << 10));
}

TESTS_BETWEEN(served_start, served_stop)
