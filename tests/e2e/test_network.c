/* test_network.c: cw-infer-server among clients that mean no good: connections that are left, held
 * and dripped over the limit of a listener, web pages and other users on loopback TCP, request
 * bodies that fill memory or take seconds to read. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon.h"
#include "tests/support/notify.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/socket.h>

#define SOON_MS 10000 // far below the idle time-outs that would free a slot otherwise

static const char *model;

static void make_model(void)
{
    model = daemon_model(test_folder(), true, 7);
}

// ---- slots -------------------------------------------------------------------------------------

enum leaving { CLOSE, RESET, HALF_CLOSE, HOLD };

static void leave(int fd, enum leaving how)
{
    struct linger none = {.l_onoff = 1, .l_linger = 0};
    if (how == HOLD) return;
    if (how == HALF_CLOSE) {
        shutdown(fd, SHUT_WR);
        return;
    }
    if (how == RESET) setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
    close(fd);
}

static const char *const beginnings[] = {
    "",
    "GET /hea",
    "GET /health HTTP/1.1\r\nHost: localho",
    "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
    ("POST /generate HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
     "Content-Length: 9\r\n\r\n"),
    "POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
    "POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"};

// n clients send that much of a request (NULL: each another) and leave; then another is served.
static void crowd(int port, int n, const char *same, enum leaving how)
{
    const int texts = (int)(sizeof beginnings / sizeof *beginnings);
    int *fds = test_keep(calloc((size_t)n, sizeof *fds));
    for (int i = 0; i < n; i++) {
        fds[i] = daemon_connect_tcp(port);
        if (fds[i] < 0) fail_msg("connection %d is refused", i);
        const char *text = same ? same : beginnings[i % texts];
        daemon_send(fds[i], text, strlen(text));
    }
    clock_sleep_ms(20);
    for (int i = 0; i < n; i++) leave(fds[i], how);
    int status = daemon_tcp_status(port, "GET", "/health", "Host: localhost\r\n");
    if (status != 200)
        fail_msg("status %d after %d clients left (%d) behind \"%s\"", status, n, how,
                 same ? same : "(each another)");
    for (int i = 0; i < n && (how == HALF_CLOSE || how == HOLD); i++) close(fds[i]);
}

TEST(test_clients_that_leave)
{
    static const char *const options[] = {"--listen", "127.0.0.1:0", "--max-connections", "8",
                                          NULL};
    struct daemon d = {0};
    daemon_start(&d, model, options);
    int port = daemon_tcp_port(&d);
    for (size_t i = 0; i < sizeof beginnings / sizeof *beginnings; i++)
        for (enum leaving how = CLOSE; how <= HALF_CLOSE; how++)
            for (int more = 0; more <= 3; more += 3) {
                // half closed behind a whole request is a client that waits for its answer
                if (i == 3 && how == HALF_CLOSE) continue;
                crowd(port, 8 + more, beginnings[i], how);
            }
    assert_int_equal(daemon_stop(&d), 0);
}

// They stay, send nothing more, and lose their slots to others.
DAEMON_TEST(test_clients_that_hold, model,
            args("--listen 127.0.0.1:0 --max-connections 8 --idle-timeout 1"))
{
    int port = daemon_tcp_port(d);
    crowd(port, 8, NULL, HOLD);
    crowd(port, 16, NULL, HOLD);
}

DAEMON_TEST(test_eleven_hundred_connections, model, args("--listen 127.0.0.1:0"))
{
    enum { MANY = 1100 };
    struct rlimit before, wanted;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    if (before.rlim_max < 2 * MANY + 400)
        test_skip("a process may open %d files here; %d are needed", (int)before.rlim_max,
                  2 * MANY + 400);
    int port = daemon_tcp_port(d);
    wanted = before;
    wanted.rlim_cur = before.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &wanted), 0);
    crowd(port, MANY, beginnings[4], RESET);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    daemon_get(d->socket, "/health", 200);
}

// They have left before the server even accepts them: it is stopped meanwhile, so that all it hears
// of each is in one piece.
DAEMON_TEST(test_left_before_accept, model, args("--listen 127.0.0.1:0"))
{
    enum { BATCHES = 3, BATCH = 400 }; // more than the limit, and less at once than the backlog
    int port = daemon_tcp_port(d);
    for (int k = 0; k < BATCHES; k++) {
        test_kill(&d->child, SIGSTOP);
        for (int i = 0; i < BATCH; i++) {
            int fd = daemon_connect_tcp(port);
            assert_true(fd >= 0 && daemon_send(fd, beginnings[4], strlen(beginnings[4])));
            close(fd);
        }
        test_kill(&d->child, SIGCONT);
        assert_int_equal(daemon_tcp_status(port, "GET", "/health", "Host: localhost\r\n"), 200);
    }
}

// A byte now and then, for ever, in every part of a request.
DAEMON_TEST(test_drippers, model, args("--idle-timeout 2"))
{
    static const char *const begun[] = {
        "GET /health HTTP/1.1\r\nX: ",                                        // the first headers
        "GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nX: ", // those after an
                                                                              // answer
        "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n "};
    enum { DRIPPERS = sizeof begun / sizeof *begun };
    int fds[DRIPPERS], n_left = DRIPPERS;
    for (int i = 0; i < DRIPPERS; i++) {
        fds[i] = daemon_connect(d->socket);
        assert_true(fds[i] >= 0 && daemon_send(fds[i], begun[i], strlen(begun[i])));
    }
    for (int64_t deadline = clock_deadline_ns(2 * SOON_MS); n_left; clock_sleep_ms(200))
        for (int i = 0; i < DRIPPERS; i++) {
            if (fds[i] < 0 || daemon_send(fds[i], " ", 1)) {
                if (clock_now_ns() > deadline) fail_msg("\"%s\" drips for ever", begun[i]);
                continue;
            }
            close(fds[i]);
            fds[i] = -1;
            n_left--;
        }
}

TEST(test_few_descriptors)
{
    static const char script[] = "ulimit -n 200; exec \"$0\" \"$@\"";
    const char *folder = test_folder();
    struct daemon d = {.folder = folder,
                       .socket = test_path(folder, "s.sock"),
                       .bridge = test_path(folder, "bridge.json"),
                       .log = test_path(folder, "daemon.log")};
    const char *const *argv =
        args("sh -c %s %s --model %s --device %s --socket %s --bridge %s --listen 127.0.0.1:0",
             script, test_binary("cw-infer-server"), model, test_device(), d.socket, d.bridge);
    test_spawn(&d.child, d.log, argv);
    daemon_wait(&d);
    int port = daemon_tcp_port(&d);
    assert_contains(test_read(d.log), "36 connections");
    int fds[100];
    for (int i = 0; i < 100; i++) assert_true((fds[i] = daemon_connect_tcp(port)) >= 0);
    clock_sleep_ms(100);
    daemon_get(d.socket, "/health", 200); // the other listener has its own
    for (int i = 0; i < 100; i++) close(fds[i]);
    assert_int_equal(daemon_tcp_status(port, "GET", "/health", "Host: localhost\r\n"), 200);
    assert_int_equal(daemon_stop(&d), 0);
}

// ---- who may ask -------------------------------------------------------------------------------

static const struct {
    const char *method, *path;
} admin[] = {{"GET", "/bridge/info"},          {"POST", "/bridge/pause"},
             {"POST", "/bridge/resume"},       {"POST", "/reload"},
             {"POST", "/lora/load"},           {"POST", "/lora/unload"},
             {"POST", "/v1/load_lora_adapter"}};

DAEMON_TEST(test_loopback_without_key, model,
            args("--listen 127.0.0.1:0 --allowed-hosts gpu-box.lan,other.lan"))
{
    int port = daemon_tcp_port(d);
    for (size_t i = 0; i < sizeof admin / sizeof *admin; i++)
        assert_int_equal(
            daemon_tcp_status(port, admin[i].method, admin[i].path, "Host: localhost\r\n"), 403);
    json_t *health = daemon_get(d->socket, "/health", 200);
    assert_false(json_is_true(json_object_get(health, "paused")));
    daemon_get(d->socket, "/bridge/info", 200); // the Unix socket has it

    const json_t *taken = test_rows("network", "taken");
    const json_t *refused = test_rows("network", "refused");
    for (size_t i = 0; i < json_array_size(taken); i++)
        assert_int_equal(daemon_tcp_status(port, "GET", "/v1/models",
                                           json_string_value(json_array_get(taken, i))),
                         200);
    for (size_t i = 0; i < json_array_size(refused); i++)
        for (int k = 0; k < 2; k++)
            assert_int_equal(daemon_tcp_status(port, "GET", k ? "/health" : "/v1/models",
                                               json_string_value(json_array_get(refused, i))),
                             403);
    // nothing that a page may read or send more by
    int fd = daemon_connect_tcp(port);
    struct wire_answer a;
    static const char ask[] = "OPTIONS /v1/models HTTP/1.0\r\nHost: localhost\r\n"
                              "Origin: http://localhost\r\n\r\n";
    assert_true(fd >= 0 && daemon_send(fd, ask, sizeof ask - 1) && wire_read(fd, SOON_MS, &a));
    assert_int_equal(a.status, 405);
    assert_null(strcasestr(bytes_text(&a.head), "Access-Control"));
    close(fd);
}

TEST(test_loopback_with_key)
{
    struct daemon d = {0};
    const char *key = test_path(test_folder(), "key");
    test_write(key, "correct-horse-battery\n", 22);
    const char *const *options = args("--listen 127.0.0.1:0 --api-key-file %s", key);
    static const char with[] =
        "Host: behind.a.proxy\r\nAuthorization: Bearer correct-horse-battery\r\n";
    daemon_start(&d, model, options);
    int port = daemon_tcp_port(&d);
    assert_int_equal(daemon_tcp_status(port, "GET", "/bridge/info", "Host: localhost\r\n"), 401);
    assert_int_equal(daemon_tcp_status(port, "GET", "/bridge/info", with), 200);
    assert_int_equal(daemon_tcp_status(port, "POST", "/bridge/pause", with), 200);
    assert_int_equal(daemon_tcp_status(port, "POST", "/bridge/resume", with), 200);
    assert_int_equal(daemon_tcp_status(port, "GET", "/health", "Host: behind.a.proxy\r\n"), 200);
    assert_int_equal(daemon_stop(&d), 0);
}

// ---- large bodies ------------------------------------------------------------------------------

#define LARGE ((size_t)31 << 20)

struct sender {
    pthread_t thread;
    const char *socket, *path, *body;
    size_t len;
    _Atomic bool sent, answered;
    struct wire_answer answer;
};

static void *send_large(void *argument)
{
    struct sender *s = argument;
    char head[128];
    int n = snprintf(head, sizeof head,
                     "POST %s HTTP/1.0\r\nHost: x\r\nContent-Length: %zu\r\n\r\n", s->path, s->len);
    int fd = daemon_connect(s->socket);
    if (fd >= 0 && daemon_send(fd, head, (size_t)n)) daemon_send(fd, s->body, s->len);
    s->sent = true;
    if (fd >= 0) wire_read(fd, 300000, &s->answer);
    s->answered = true;
    if (fd >= 0) close(fd);
    return NULL;
}

static char *large_body(size_t len)
{
    static const char head[] = "{\"prompt\":\"", tail[] = "\"}";
    char *body = test_keep(malloc(len + 1));
    memset(body, 'a', len);
    body[len] = 0;
    memcpy(body, head, sizeof head - 1);
    memcpy(body + len - sizeof tail + 1, tail, sizeof tail - 1);
    return body;
}

static int count_pings(int fd)
{
    char text[2048];
    int n = 0;
    for (ssize_t len; (len = recv(fd, text, sizeof text - 1, MSG_DONTWAIT)) > 0;) {
        text[len] = 0;
        n += strstr(text, "WATCHDOG=1") != NULL;
    }
    return n;
}

static bool all(struct sender *senders, int n, bool answered)
{
    for (int i = 0; i < n; i++)
        if (!(answered ? senders[i].answered : senders[i].sent)) return false;
    return true;
}

// Twenty at once: between the last byte of the last one and the last answer the loop goes on: it
// answers others, and tells the service manager that it lives.
TEST(test_twenty_large_bodies)
{
    enum { MANY = 20 };
    static const char *const options[] = {"--max-body", "32M", "--max-buffered", "1G", NULL};
    struct daemon d = {0};
    struct sender senders[MANY] = {0};
    char *body = large_body(LARGE / 4);
    int notify = notify_open(), health = 0, pings = 0;
    setenv("WATCHDOG_USEC", "300000", 1); // a ping every 100 ms
    daemon_spawn(&d, model, options);
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    daemon_wait(&d);
    for (int i = 0; i < MANY; i++) {
        senders[i] = (struct sender){
            .socket = d.socket, .path = "/v1/completions", .body = body, .len = LARGE / 4};
        assert_int_equal(pthread_create(&senders[i].thread, NULL, send_large, &senders[i]), 0);
    }
    while (!all(senders, MANY, false)) {
        count_pings(notify); // a full socket would hold up the server
        clock_sleep_ms(1);
    }
    while (!all(senders, MANY, true)) {
        pings += count_pings(notify);
        daemon_get(d.socket, "/health", 200);
        health++;
        clock_sleep_ms(1);
    }
    print_message("%d answers and %d pings meanwhile\n", health, pings);
    for (int i = 0; i < MANY; i++) {
        pthread_join(senders[i].thread, NULL);
        assert_int_equal(senders[i].answer.status, 400);
        assert_contains(bytes_text(&senders[i].answer.body),
                        "maximum context length is 512 tokens, which hold");
    }
    assert_true(pings >= 2);
    assert_true(health >= 2 * MANY);
    close(notify);
    assert_int_equal(daemon_stop(&d), 0);
}

// Bodies that are never ended take memory only up to --max-buffered; then others are sent away
// until there is room again.
DAEMON_TEST(test_buffered_bodies, model, args("--max-body 1M --max-buffered 4M"))
{
    enum { HOLDERS = 6 };
    static const char head[] =
        "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n";
    struct sender other = {0};
    int fds[HOLDERS];
    size_t part = 900000;
    char *body = large_body(part);
    other =
        (struct sender){.socket = d->socket, .path = "/v1/completions", .body = body, .len = part};
    for (int i = 0; i < HOLDERS; i++) {
        fds[i] = daemon_connect(d->socket);
        assert_true(fds[i] >= 0 && daemon_send(fds[i], head, sizeof head - 1) &&
                    daemon_send(fds[i], body, part));
    }
    send_large(&other);
    assert_int_equal(other.answer.status, 429);
    assert_contains(bytes_text(&other.answer.head), "Retry-After");
    assert_contains(bytes_text(&other.answer.body), "--max-buffered");
    daemon_post(d->socket, "/v1/completions", 200, "{\"prompt\":\"a\",\"max_tokens\":1}");
    for (int i = 0; i < HOLDERS; i++) close(fds[i]);
    int64_t deadline = clock_deadline_ns(SOON_MS);
    for (int status = 429; status == 429;) { // their memory is given back
        send_large(&other);
        status = other.answer.status;
        if (status != 429) assert_int_equal(status, 400); // no prompt of that length fits
        assert_true(clock_now_ns() < deadline);
    }
}

// Counting the tokens of a text that no context takes is work for another thread, too.
DAEMON_TEST(test_large_text_is_counted, model, args("--max-body 32M"))
{
    char *body = large_body(LARGE / 8);
    struct sender s = {.socket = d->socket, .path = "/tokenize", .body = body, .len = LARGE / 8};
    assert_int_equal(pthread_create(&s.thread, NULL, send_large, &s), 0);
    while (!s.sent) clock_sleep_ms(1);
    int health = 0;
    for (; !s.answered; health++) {
        daemon_get(d->socket, "/health", 200);
        clock_sleep_ms(1);
    }
    pthread_join(s.thread, NULL);
    assert_int_equal(s.answer.status, 200);
    assert_contains(bytes_text(&s.answer.body), "\"count\"");
    print_message("%d answers meanwhile\n", health);
    assert_true(health >= 20);
}

// A client that leaves while its body is parsed leaves nothing behind; some still are at the end.
TEST(test_leaves_while_parsed)
{
    static const char *const options[] = {"--max-body", "32M", NULL};
    struct daemon d = {0};
    char *body = large_body(LARGE / 2), head[128];
    daemon_start(&d, model, options);
    int n = snprintf(head, sizeof head,
                     "POST /v1/completions HTTP/1.0\r\nHost: x\r\nContent-Length: %zu\r\n\r\n",
                     LARGE / 2);
    for (int i = 0; i < 6; i++) {
        int fd = daemon_connect(d.socket);
        assert_true(fd >= 0 && daemon_send(fd, head, (size_t)n) &&
                    daemon_send(fd, body, LARGE / 2));
        close(fd);
    }
    daemon_get(d.socket, "/health", 200);
    assert_int_equal(daemon_stop(&d), 0); // some are still being parsed
}

TESTS_BETWEEN(make_model, NULL)
