/* test_server_life.c: how cw-infer-server starts, is refused, drains and stops, its TCP listener
 * and API key, its time-outs, and a model without a tokenizer. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/notify.h"
#include "tests/support/daemon.h"
#include "tests/support/tiny_model.h"

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

static const char *model; // with a tokenizer

static void make_model(void)
{
    model = daemon_model(test_folder(), true, 7);
}

static int open_request(const struct daemon *d, const char *path, const char *body)
{
    char text[512];
    int n =
        snprintf(text, sizeof text, "POST %s HTTP/1.0\r\nHost: x\r\nContent-Length: %zu\r\n\r\n%s",
                 path, strlen(body), body);
    int fd = daemon_connect(d->socket);
    assert_true(fd >= 0 && daemon_send(fd, text, (size_t)n));
    return fd;
}

// Runs it to its end; it must say `part`.
static void expect_refusal(int status, const char *part, const char *const argv[])
{
    const char *log = test_path(test_folder(), "log");
    int got = test_command(log, 30000, argv);
    char *text = test_read(log);
    if (got != status) fail_msg("exit status %d, not %d: %s", got, status, text);
    assert_contains(text, part);
}

TEST(test_usage)
{
    const char *program = test_binary("cw-infer-server");
    const char *const none[] = {program, NULL};
    const char *const draft[] = {program, "--model", model, "--draft", "/nowhere/draft", NULL};
    const char *const method[] = {program,         "--model",       model,
                                  "--speculative", "draft_model:4", NULL};
    const char *const unknown[] = {program, "--model", model, "--speculative", "ngram:99", NULL};
    const char *const vllm[] = {program, "--model", model, "--no-enable-prefix-caching", NULL};
    const char *const typo[] = {program, "--modl", model, NULL};
    const char *const *kv = OPTIONS(program, "--model", model, "--kv-memory", "lots", "--socket",
                                    test_path(test_folder(), "s"));
    const char *const nowhere[] = {"env", "XDG_RUNTIME_DIR=/dev/null", program, "--model", model,
                                   NULL};
    const char *const help[] = {program, "--help", NULL};
    expect_refusal(2, "--model DIR is needed", none);
    expect_refusal(1, "/nowhere/draft", draft);
    expect_refusal(2, "draft_model needs --draft DIR", method);
    expect_refusal(2, "must be 1 to 16", unknown);
    expect_refusal(2, "--model", typo);
    expect_refusal(2, "--no-enable-prefix-caching: here --prefix-cache off", vllm);
    expect_refusal(2, "--kv-memory: 'lots' is not a size", kv);
    expect_refusal(2, "or a percentage, as 80%", kv);
    expect_refusal(1, "give --socket and --bridge, or set XDG_RUNTIME_DIR", nowhere);
    expect_refusal(0, "--request-timeout", help);
}

TEST(test_no_model)
{
    const char *folder = test_folder(), *socket = test_path(folder, "s.sock");
    const char *const *argv = OPTIONS(test_binary("cw-infer-server"), "--model", "/nowhere/at/all",
                                      "--socket", socket, "--bridge", test_path(folder, "b.json"));
    expect_refusal(1, "/nowhere/at/all", argv);
    assert_false(file_exists(socket));
}

TEST(test_broken_weights)
{
    const char *broken = daemon_model(test_folder(), false, 3), *folder = test_folder();
    const char *socket = test_path(folder, "s.sock"), *bridge = test_path(folder, "bridge.json");
    test_write(test_path(broken, "model.safetensors"), "not safetensors at all", 22);
    const char *const *argv = OPTIONS(test_binary("cw-infer-server"), "--model", broken, "--device",
                                      "cpu", "--socket", socket, "--bridge", bridge);
    const char *log = test_path(folder, "log");
    assert_int_equal(test_command(log, 30000, argv), 1);
    char *text = test_read(log), *sentence = strstr(text, "model.safetensors");
    assert_non_null(sentence);
    assert_null(strstr(sentence + 1, "model.safetensors")); // and once
    assert_false(file_exists(socket));
    assert_false(file_exists(bridge));
}

// What a server that is still loading can serve is not known: nobody is told that nothing fits.
TEST(test_models_while_loading)
{
    struct daemon d = {0};
    int fd = -1;
    const char *slow = test_path(test_folder(), "slow"); // whose embedding takes its time
    assert_ok(file_make_folders(slow));
    assert_ok(tiny_model_write(slow, 64, 1, 1 << 20, 3));
    daemon_spawn(&d, slow, NULL);
    const int64_t deadline = clock_deadline_ns(30000);
    while ((fd = daemon_connect(d.socket)) < 0 && clock_now_ns() < deadline) clock_sleep_ms(1);
    assert_true(fd >= 0);
    close(fd);
    daemon_get(d.socket, "/v1/models", 503);
    daemon_get(d.socket, "/v1/models/slow", 503);
}

TEST(test_second_daemon_is_refused)
{
    struct daemon d = {0};
    daemon_start(&d, model, NULL);
    const char *const *argv = OPTIONS(test_binary("cw-infer-server"), "--model", model, "--socket",
                                      d.socket, "--bridge", test_path(test_folder(), "other.json"));
    expect_refusal(1, "already serves there", argv);
    daemon_get(d.socket, "/health", 200);
    assert_int_equal(daemon_stop(&d), 0);
}

TEST(test_stale_socket_is_replaced)
{
    struct daemon d = {0};
    daemon_start(&d, model, NULL);
    test_kill(&d.child, SIGKILL);
    test_wait(&d.child, 10000);
    assert_true(file_exists(d.socket));
    const char *const *argv = OPTIONS(test_binary("cw-infer-server"), "--model", model, "--device",
                                      "cpu", "--socket", d.socket, "--bridge", d.bridge);
    test_spawn(&d.child, d.log, argv);
    daemon_wait(&d);
    struct stat info;
    assert_int_equal(stat(d.socket, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0600);
    assert_int_equal(daemon_stop(&d), 0);
    assert_false(file_exists(d.socket));
    assert_false(file_exists(d.bridge));
}

TEST(test_drain)
{
    struct daemon d = {0};
    struct wire_answer a;
    daemon_start(&d, model, NULL);
    daemon_post(d.socket, "/bridge/pause", 200, ""); // so that it cannot end too early
    int fd = open_request(&d, "/v1/rollouts",
                          "{\"groups\":[{\"prompt_token_ids\":[1,2],\"n\":24}],\"sampling\":"
                          "{\"max_tokens\":200}}");
    clock_sleep_ms(100);
    test_kill(&d.child, SIGTERM);
    // while it drains it says so, and takes nothing new
    int64_t deadline = clock_deadline_ns(5000);
    for (int status = 0; status != 503;) {
        daemon_request(d.socket, "GET", "/health", "", NULL, &a);
        status = a.status;
        if (status == 503) assert_contains(bytes_text(&a.body), "draining");
        assert_true(clock_now_ns() < deadline);
    }
    daemon_request(d.socket, "POST", "/v1/completions", "", "{\"prompt\":\"a\"}", &a);
    assert_int_equal(a.status, 503);
    assert_contains(bytes_text(&a.head), "Retry-After");
    // what was under way is answered in full
    daemon_post(d.socket, "/bridge/resume", 200, "");
    assert_true(wire_read(fd, 60000, &a));
    int lines = 0;
    for (size_t i = 0; i < a.body.len; i++) lines += a.body.data[i] == '\n';
    assert_int_equal(lines, 24);
    assert_null(strstr(bytes_text(&a.body), "\"error\""));
    close(fd);
    assert_int_equal(test_wait(&d.child, 20000), 0);
    assert_false(file_exists(d.socket));
    assert_false(file_exists(d.bridge));
}

// A closed terminal, which sends SIGHUP twice, is an end in good order.
TEST(test_hangup)
{
    struct daemon d = {0};
    struct wire_answer a;
    signal(SIGHUP, SIG_DFL); // also where these tests run under nohup
    daemon_start(&d, model, NULL);
    daemon_post(d.socket, "/bridge/pause", 200, ""); // so that it cannot end too early
    int fd = open_request(&d, "/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":4}");
    clock_sleep_ms(200);
    for (int i = 0; i < 2; i++) {
        test_kill(&d.child, SIGHUP);
        clock_sleep_ms(200);
    }
    assert_true(test_running(&d.child));
    daemon_post(d.socket, "/bridge/resume", 200, "");
    assert_true(wire_read(fd, 60000, &a));
    assert_int_equal(a.status, 200);
    close(fd);
    test_kill(&d.child, SIGHUP);
    assert_int_equal(test_wait(&d.child, 20000), 0);
    assert_false(file_exists(d.socket));
    assert_false(file_exists(d.bridge));
}

TEST(test_second_signal_and_drain_timeout)
{
    static const char *const short_drain[] = {"--drain-timeout", "0", NULL};
    for (int i = 0; i < 2; i++) {
        struct daemon d = {0};
        struct wire_answer a;
        daemon_start(&d, model, i ? short_drain : NULL);
        daemon_post(d.socket, "/bridge/pause", 200, ""); // it would never end by itself
        int fd = open_request(&d, "/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":400}");
        clock_sleep_ms(200);
        int64_t start = clock_now_ns();
        test_kill(&d.child, SIGTERM);
        if (i == 0) {
            clock_sleep_ms(300);
            assert_true(test_running(&d.child));
            test_kill(&d.child, SIGINT);
        }
        assert_int_equal(test_wait(&d.child, 10000), 0);
        assert_true(clock_ms_since(start) < 5000);
        assert_true(wire_read(fd, 5000, &a)); // its connection was closed
        close(fd);
        assert_false(file_exists(d.bridge));
    }
}

// Clients that keep asking for what the engine answers, up to the last moment: the server stops
// with connections in every state.
struct asker {
    pthread_t thread;
    const char *socket;
    _Atomic bool *stop;
};

static void *keep_asking(void *argument)
{
    const struct asker *asker = argument;
    static const char text[] = "GET /bridge/info?canary=1 HTTP/1.0\r\nHost: x\r\n\r\n";
    while (!atomic_load(asker->stop)) {
        int fd = daemon_connect(asker->socket);
        struct wire_answer a;
        if (fd < 0) continue;
        if (daemon_send(fd, text, sizeof text - 1)) {
            wire_read(fd, 1000, &a);
        }
        close(fd);
    }
    return NULL;
}

TEST(test_stops_in_a_crowd)
{
    static const char *const short_drain[] = {"--drain-timeout", "0", NULL};
    for (int round = 0; round < 4; round++) {
        struct daemon d = {0};
        struct asker askers[8];
        _Atomic bool over = false;
        daemon_start(&d, model, short_drain);
        for (int i = 0; i < 8; i++) {
            askers[i] = (struct asker){.socket = d.socket, .stop = &over};
            assert_int_equal(pthread_create(&askers[i].thread, NULL, keep_asking, &askers[i]), 0);
        }
        clock_sleep_ms(100);
        test_kill(&d.child, SIGTERM);
        int status = test_wait(&d.child, 10000);
        atomic_store(&over, true);
        for (int i = 0; i < 8; i++) pthread_join(askers[i].thread, NULL);
        assert_int_equal(status, 0);
    }
}

// ---- TCP ---------------------------------------------------------------------------------------

static int tcp_status(int port, const char *path, const char *headers)
{
    char text[512];
    struct wire_answer a;
    int n = snprintf(text, sizeof text, "GET %s HTTP/1.0\r\nHost: x\r\n%s\r\n", path, headers);
    int fd = daemon_connect_tcp(port);
    assert_true(fd >= 0 && daemon_send(fd, text, (size_t)n));
    assert_true(wire_read(fd, 10000, &a));
    close(fd);
    return a.status;
}

// Files of a snapshot are links to blobs, as the Hub's programs leave them.
static void make_snapshot(const char *repository, const char *snapshot)
{
    const char *folder = daemon_model(test_folder(), true, 7),
               *blobs = test_path(repository, "blobs");
    DIR *files = opendir(folder);
    assert_non_null(files);
    assert_ok(file_make_folders(snapshot));
    assert_ok(file_make_folders(blobs));
    for (const struct dirent *file; (file = readdir(files));) {
        char blob[300], link[320];
        if (file->d_name[0] == '.') continue;
        snprintf(blob, sizeof blob, "b10b-%s", file->d_name);
        snprintf(link, sizeof link, "../../blobs/%s", blob);
        assert_int_equal(rename(test_path(folder, file->d_name), test_path(blobs, blob)), 0);
        assert_int_equal(symlink(link, test_path(snapshot, file->d_name)), 0);
    }
    closedir(files);
    assert_ok(file_make_folders(test_path(repository, "refs")));
    test_write(test_path(repository, "refs/main"), "0123abcd", 8);
}

static void serves_as_the_repository(const char *given)
{
    struct daemon d = {0};
    daemon_start(&d, given, NULL);
    json_t *models = daemon_get(d.socket, "/v1/models", 200);
    const json_t *card = json_at(models, "data.0");
    assert_string_equal(text_of(card, "id"), "some-org/tiny");
    daemon_post(d.socket, "/v1/completions", 200,
                "{\"model\":\"some-org/tiny\",\"prompt\":\"a\",\"max_tokens\":2}");
    assert_int_equal(daemon_stop(&d), 0);
}

// --model ORG/NAME is found in the Hub's local cache, by refs/main; its name is the repository's,
// also where the snapshot's folder is given.
TEST(test_model_of_the_hub)
{
    const char *home = test_folder(), *cache = test_path(home, "hub"),
               *repository = test_path(cache, "models--some-org--tiny"),
               *snapshot = test_path(repository, "snapshots/0123abcd");
    make_snapshot(repository, snapshot);
    unsetenv("HF_HUB_CACHE");
    setenv("HF_HOME", home, 1);
    serves_as_the_repository("some-org/tiny");
    serves_as_the_repository(snapshot);
    setenv("HF_HOME", "/nowhere", 1);
    setenv("HF_HUB_CACHE", cache, 1);
    serves_as_the_repository("some-org/tiny");
    const char *const none[] = {
        test_binary("cw-infer-server"),     "--model", "some-org/none", "--socket",
        test_path(test_folder(), "s.sock"), NULL};
    expect_refusal(1, "hf download some-org/none", none);
    unsetenv("HF_HUB_CACHE");
    unsetenv("HF_HOME");
}

TEST(test_tcp_and_key)
{
    struct daemon d = {0};
    const char *key = test_path(test_folder(), "key");
    test_write(key, "correct-horse-battery\n", 22);
    const char *const options[] = {"--listen", "127.0.0.1:0", "--api-key-file", key, NULL};
    daemon_start(&d, model, options);
    int port = daemon_tcp_port(&d);
    assert_int_equal(tcp_status(port, "/v1/models", ""), 401);
    assert_int_equal(tcp_status(port, "/v1/models", "Authorization: Bearer wrong\r\n"), 401);
    assert_int_equal(
        tcp_status(port, "/v1/models", "Authorization: Bearer correct-horse-batterz\r\n"), 401);
    assert_int_equal(tcp_status(port, "/nothing", ""), 401);
    assert_int_equal(
        tcp_status(port, "/v1/models", "Authorization: Bearer correct-horse-battery\r\n"), 200);
    assert_int_equal(tcp_status(port, "/health", ""), 200);
    daemon_get(d.socket, "/v1/models", 200); // the Unix socket needs none
    assert_int_equal(daemon_stop(&d), 0);

    const char *const *open = OPTIONS(test_binary("cw-infer-server"), "--model", model, "--socket",
                                      test_path(test_folder(), "s.sock"), "--listen", "0.0.0.0:0");
    expect_refusal(1, "--api-key-file", open);
    static const char *const bad[] = {"8000", "127.0.0.1:99999", "127.0.0.1:http"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const char *const *words =
            OPTIONS(test_binary("cw-infer-server"), "--model", model, "--socket",
                    test_path(test_folder(), "s.sock"), "--listen", bad[i]);
        expect_refusal(2, ": give HOST:PORT", words);
    }
}

// ---- time-outs ---------------------------------------------------------------------------------

static void read_answer(int fd, struct wire_answer *ret)
{
    assert_true(wire_read(fd, 8000, ret));
    close(fd);
}

TEST(test_request_timeout)
{
    static const char *const options[] = {"--request-timeout", "1", "--idle-timeout", "2", NULL};
    struct daemon d = {0};
    struct wire_answer a;
    daemon_start(&d, model, options);
    daemon_post(d.socket, "/bridge/pause", 200, "");
    int whole = open_request(&d, "/v1/completions", "{\"prompt\":\"a\"}");
    int stream = open_request(&d, "/v1/completions", "{\"prompt\":\"a\",\"stream\":true}");
    int lines = open_request(&d, "/v1/rollouts", "{\"groups\":[{\"prompt_token_ids\":[1]}]}");
    int half = daemon_connect(d.socket);
    daemon_send(half, "POST /generate HTTP/1.1\r\nContent-Le", 35);
    read_answer(whole, &a);
    assert_int_equal(a.status, 504);
    read_answer(stream, &a);
    assert_int_equal(a.status, 200);
    assert_contains(bytes_text(&a.body), "\"error\"");
    assert_contains(bytes_text(&a.body), "[DONE]");
    read_answer(lines, &a);
    assert_contains(bytes_text(&a.body), "--request-timeout");
    read_answer(half, &a); // a client that sends half a request is not waited for
    assert_true(a.status != 200);
    assert_int_equal(daemon_stop(&d), 0);
}

// Waiting for the engine is not idling.
TEST(test_long_wait_is_not_idle)
{
    static const char *const options[] = {"--idle-timeout", "1", NULL};
    struct daemon d = {0};
    struct wire_answer whole, lines;
    daemon_start(&d, model, options);
    daemon_post(d.socket, "/bridge/pause", 200, "");
    int fd = open_request(&d, "/v1/completions", "{\"prompt\":\"a\"}");
    int stream =
        open_request(&d, "/v1/rollouts", "{\"groups\":[{\"prompt_token_ids\":[1],\"n\":3}]}");
    clock_sleep_ms(3500);
    daemon_post(d.socket, "/bridge/resume", 200, "");
    assert_true(wire_read(fd, 10000, &whole));
    assert_int_equal(whole.status, 200);
    assert_true(wire_read(stream, 10000, &lines));
    assert_contains(bytes_text(&lines.body), "\"sample\":2");
    close(fd);
    close(stream);
    assert_int_equal(daemon_stop(&d), 0);
}

// A client that asks for much and reads nothing holds up nobody, and is given up in the end.
TEST(test_client_that_never_reads)
{
    static const char *const options[] = {"--idle-timeout", "1", NULL};
    struct daemon d = {0};
    struct wire_answer a;
    daemon_start(&d, model, options);
    int fd = open_request(&d, "/v1/rollouts",
                          "{\"groups\":[{\"prompt_token_ids\":[1],\"n\":64}],\"sampling\":"
                          "{\"max_tokens\":500,\"ignore_eos\":true}}");
    int64_t deadline = clock_deadline_ns(30000);
    for (bool given_up = false; !given_up;) {
        daemon_post(d.socket, "/v1/completions", 200, "{\"prompt\":[1,2],\"max_tokens\":1}");
        daemon_request(d.socket, "GET", "/metrics", "", NULL, &a);
        given_up =
            strstr(bytes_text(&a.body), "commonweight:disconnects_total{model_name=\"model\"} 1\n");
        assert_true(clock_now_ns() < deadline);
        clock_sleep_ms(50);
    }
    json_t *health = daemon_get(d.socket, "/health", 200);
    assert_int_equal(int_of(health, "running"), 0);
    close(fd);
    assert_int_equal(daemon_stop(&d), 0);
}

// ---- without a tokenizer -----------------------------------------------------------------------

TEST(test_ids_only)
{
    struct daemon d = {0};
    daemon_start(&d, daemon_model(test_folder(), false, 9), NULL);
    json_t *a = daemon_post(d.socket, "/v1/completions", 200,
                            "{\"prompt\":[1,2],\"max_tokens\":3,\"logprobs\":1}");
    const json_t *choice = json_at(a, "choices.0");
    assert_int_equal(json_array_size(json_object_get(choice, "token_ids")), 3);
    assert_string_equal(text_of(choice, "text"), "");
    a = daemon_post(d.socket, "/v1/rollouts", 200,
                    "{\"groups\":[{\"prompt_token_ids\":[1,2]}],\"sampling\":{\"max_tokens\":3}}");
    assert_true(json_is_null(json_object_get(a, "text")));
    static const char *const refused[][2] = {
        {"/v1/completions", "{\"prompt\":\"a\"}"},
        {"/v1/completions", "{\"prompt\":[1],\"stop\":\"a\"}"},
        {"/v1/chat/completions", "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}"}};
    for (int i = 0; i < 3; i++) {
        a = daemon_post(d.socket, refused[i][0], 400, refused[i][1]);
        assert_contains(text_of(a, "error.message"), "no tokenizer.json");
    }
    assert_int_equal(daemon_stop(&d), 0);
}

// ---- a draft model -----------------------------------------------------------------------------

TEST(test_draft_model)
{
    struct daemon d = {0};
    const char *draft = daemon_model(test_folder(), true, 77), *other = test_folder();
    const char *const options[] = {"--draft", draft, "--speculative", "draft_model:4", NULL};
    daemon_start(&d, model, options);
    // two roles in the bridge file, and both arenas are the daemon's
    const json_t *roles = json_at(json_of_file(d.bridge), "roles");
    assert_int_equal(json_array_size(roles), 2);
    assert_string_equal(text_of(roles, "1.role"), "draft");
    struct test_child check = {0};
    const char *log = test_path(d.folder, "check.log");
    const char *const argv[] = {test_binary("cw-ipc-check"), d.bridge, NULL};
    test_spawn(&check, log, argv);
    assert_int_equal(test_wait(&check, 30000), 0);
    assert_contains(test_read(log), "draft");
    // greedy text is that of a run without drafts, and the request's drafts can be looked up
    static const char format[] = "{\"prompt\":[5,6,7],\"max_tokens\":40,\"temperature\":0,"
                                 "\"ignore_eos\":true%s}";
    char body[256], path[96];
    snprintf(body, sizeof body, format, ",\"speculative\":\"off\"");
    json_t *plain = daemon_post(d.socket, "/v1/completions", 200, body);
    snprintf(body, sizeof body, format, "");
    json_int_t drafted = 0;
    for (int i = 0; i < 20; i++) { // the cost model tries it soon, and goes on if it pays
        json_t *a = daemon_post(d.socket, "/v1/completions", 200, body);
        const json_t *x = json_at(a, "choices.0"), *y = json_at(plain, "choices.0");
        assert_true(json_equal(json_object_get(x, "token_ids"), json_object_get(y, "token_ids")));
        snprintf(path, sizeof path, "/v1/spec_decode_stats?id=%s", text_of(a, "id"));
        json_t *stats = daemon_get(d.socket, path, 200);
        const json_t *own = json_at(stats, "samples.0");
        const json_t *spec = json_object_get(a, "spec_decode");
        assert_int_equal(int_of(own, "generated_tokens"), 40);
        assert_int_equal(int_of(own, "num_draft_tokens"),
                         json_is_null(spec) ? 0 : int_of(spec, "num_draft_tokens"));
        drafted += int_of(own, "num_draft_tokens");
    }
    assert_true(drafted > 0);
    daemon_get(d.socket, "/v1/spec_decode_stats?id=cmpl-0", 404);
    json_t *stats = daemon_get(d.socket, "/v1/spec_decode_stats", 200);
    assert_string_equal(text_of(stats, "method"), "draft_model:4");
    assert_int_equal(daemon_stop(&d), 0);

    // another tokenizer, a larger vocabulary
    struct tiny_model shape = {
        .hidden = 32, .layers = 1, .vocab = 600, .eos_id = -1, .max_positions = 512, .seed = 1};
    assert_ok(tiny_model_write_as(other, &shape));
    const char *const *larger =
        OPTIONS(test_binary("cw-infer-server"), "--model", model, "--draft", other, "--socket",
                test_path(other, "s.sock"), "--bridge", test_path(other, "b.json"));
    expect_refusal(1, "vocabulary of 600 tokens is larger than the 300", larger);
}

// ---- systemd -----------------------------------------------------------------------------------

TEST(test_systemd_is_told)
{
    struct daemon d = {0};
    const int fd = notify_open();
    setenv("WATCHDOG_USEC", "600000", 1);
    daemon_spawn(&d, model, NULL);
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    assert_true(notify_heard(fd, "READY=1", 30000));
    daemon_get(d.socket, "/health", 200); // ready means ready
    assert_true(notify_heard(fd, "WATCHDOG=1", 5000));
    assert_true(notify_heard(fd, "WATCHDOG=1", 5000));
    test_kill(&d.child, SIGTERM);
    assert_true(notify_heard(fd, "STOPPING=1", 5000));
    assert_int_equal(test_wait(&d.child, 10000), 0);
    close(fd);
}

// The unit file as `make install` writes it, with a program at the place it names.
TEST(test_unit_file)
{
    static const char mark[] = "@PREFIX@";
    const char *prefix = test_folder(), *bin = test_path(prefix, "bin");
    const char *unit = test_path(prefix, "cw-infer-server.service");
    const char *log = test_path(prefix, "log");
    const char *const version[] = {"systemd-analyze", "--version", NULL};
    if (test_command(log, 10000, version) != 0) test_skip("no systemd-analyze here");
    char *text = test_read(test_path(test_root(), "infer-server/cw-infer-server.service"));
    struct bytes whole = BYTES_INIT;
    const char *remaining = text;
    for (const char *at; (at = strstr(remaining, mark)); remaining = at + strlen(mark)) {
        bytes_append(&whole, remaining, (size_t)(at - remaining));
        bytes_puts(&whole, prefix);
    }
    bytes_puts(&whole, remaining);
    test_write(unit, whole.data, whole.len);
    bytes_release(&whole);
    assert_ok(file_make_folders(bin));
    assert_int_equal(symlink(test_binary("cw-infer-server"), test_path(bin, "cw-infer-server")), 0);
    const char *const verify[] = {"systemd-analyze", "verify", "--man=no", unit, NULL};
    int status = test_command(log, 30000, verify);
    text = test_read(log);
    // it also speaks of other units of this system
    if (status != 0 || strstr(text, "cw-infer-server.service"))
        fail_msg("systemd-analyze verify: status %d: %s", status, text);
}

TESTS_BETWEEN(make_model, NULL)
