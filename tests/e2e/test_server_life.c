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

// A server of the model with these options, on a socket of its own, ends with that status and says
// `part`.
static void refused(int status, const char *part, const char *const options[])
{
    assert_contains(
        test_output(status, JOIN(args("%s --model %s --socket %s", test_binary("cw-infer-server"),
                                      model, test_path(test_folder(), "s.sock")),
                                 options)),
        part);
}

TEST(test_usage)
{
    const char *program = test_binary("cw-infer-server");
    assert_contains(test_output(2, args("%s", program)), "--model DIR is needed");
    refused(1, "/nowhere/draft", args("--draft /nowhere/draft"));
    refused(2, "draft_model needs --draft DIR", args("--speculative draft_model:4"));
    refused(2, "must be 1 to 16", args("--speculative ngram:99"));
    refused(2, "--model", args("--modl %s", model));
    refused(2, "--no-enable-prefix-caching: here --prefix-cache off",
            args("--no-enable-prefix-caching"));
    refused(2, "--kv-memory: 'lots' is not a size", args("--kv-memory lots"));
    refused(2, "or a percentage, as 80%", args("--kv-memory lots"));
    assert_contains(
        test_output(1, args("env XDG_RUNTIME_DIR=/dev/null %s --model %s", program, model)),
        "give --socket and --bridge, or set XDG_RUNTIME_DIR");
    assert_contains(test_output(0, args("%s --help", program)), "--request-timeout");
}

TEST(test_no_model)
{
    const char *folder = test_folder(), *socket = test_path(folder, "s.sock");
    const char *const *argv =
        args("%s --model /nowhere/at/all --socket %s --bridge %s", test_binary("cw-infer-server"),
             socket, test_path(folder, "b.json"));
    assert_contains(test_output(1, argv), "/nowhere/at/all");
    assert_false(file_exists(socket));
}

TEST(test_broken_weights)
{
    const char *broken = daemon_model(test_folder(), false, 3), *folder = test_folder();
    const char *socket = test_path(folder, "s.sock"), *bridge = test_path(folder, "bridge.json");
    test_write(test_path(broken, "model.safetensors"), "not safetensors at all", 22);
    const char *const *argv = args("%s --model %s --device cpu --socket %s --bridge %s",
                                   test_binary("cw-infer-server"), broken, socket, bridge);
    char *sentence = strstr(test_output(1, argv), "model.safetensors");
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

DAEMON_TEST(test_second_daemon_is_refused, model, NULL)
{
    const char *const *argv =
        OPTIONS(test_binary("cw-infer-server"), "--model", model, "--socket", d->socket, "--bridge",
                test_path(test_folder(), "other.json"));
    assert_contains(test_output(1, argv), "already serves there");
    daemon_get(d->socket, "/health", 200);
}

TEST(test_stale_socket_is_replaced)
{
    struct daemon d = {0};
    daemon_start(&d, model, NULL);
    test_kill(&d.child, SIGKILL);
    test_wait(&d.child, 10000);
    assert_true(file_exists(d.socket));
    const char *const *argv = args("%s --model %s --device cpu --socket %s --bridge %s",
                                   test_binary("cw-infer-server"), model, d.socket, d.bridge);
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
    int fd = daemon_ask(&d, "/v1/rollouts",
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
    int fd = daemon_ask(&d, "/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":4}");
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
    for (int i = 0; i < 2; i++) {
        struct daemon d = {0};
        struct wire_answer a;
        daemon_start(&d, model, i ? args("--drain-timeout 0") : NULL);
        daemon_post(d.socket, "/bridge/pause", 200, ""); // it would never end by itself
        int fd = daemon_ask(&d, "/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":400}");
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
        if (daemon_send(fd, text, sizeof text - 1)) wire_read(fd, 1000, &a);
        close(fd);
    }
    return NULL;
}

TEST(test_stops_in_a_crowd)
{
    for (int round = 0; round < 4; round++) {
        struct daemon d = {0};
        struct asker askers[8];
        _Atomic bool over = false;
        daemon_start(&d, model, args("--drain-timeout 0"));
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
        if (file->d_name[0] == '.') continue;
        const char *blob = test_text("b10b-%s", file->d_name);
        const char *link = test_text("../../blobs/%s", blob);
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
    assert_string_equal(text_of(models, "data.0.id"), "some-org/tiny");
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
    refused(1, "hf download some-org/none", args("--model some-org/none"));
    unsetenv("HF_HUB_CACHE");
    unsetenv("HF_HOME");
}

TEST(test_tcp_and_key)
{
    struct daemon d = {0};
    const char *key = test_path(test_folder(), "key");
    test_write(key, "correct-horse-battery\n", 22);
    daemon_start(&d, model, args("--listen 127.0.0.1:0 --api-key-file %s", key));
    int port = daemon_tcp_port(&d);
    assert_int_equal(daemon_tcp_status(port, "GET", "/v1/models", ""), 401);
    assert_int_equal(
        daemon_tcp_status(port, "GET", "/v1/models", "Authorization: Bearer wrong\r\n"), 401);
    assert_int_equal(daemon_tcp_status(port, "GET", "/v1/models",
                                       "Authorization: Bearer correct-horse-batterz\r\n"),
                     401);
    assert_int_equal(daemon_tcp_status(port, "GET", "/nothing", ""), 401);
    assert_int_equal(daemon_tcp_status(port, "GET", "/v1/models",
                                       "Authorization: Bearer correct-horse-battery\r\n"),
                     200);
    assert_int_equal(daemon_tcp_status(port, "GET", "/health", ""), 200);
    daemon_get(d.socket, "/v1/models", 200); // the Unix socket needs none
    assert_int_equal(daemon_stop(&d), 0);

    refused(1, "--api-key-file", args("--listen 0.0.0.0:0"));
    refused(2, ": give HOST:PORT", args("--listen 8000"));
    refused(2, ": give HOST:PORT", args("--listen 127.0.0.1:99999"));
    refused(2, ": give HOST:PORT", args("--listen 127.0.0.1:http"));
}

// ---- time-outs ---------------------------------------------------------------------------------

static void read_answer(int fd, struct wire_answer *ret)
{
    assert_true(wire_read(fd, 8000, ret));
    close(fd);
}

DAEMON_TEST(test_request_timeout, model, args("--request-timeout 1 --idle-timeout 2"))
{
    struct wire_answer a;
    daemon_post(d->socket, "/bridge/pause", 200, "");
    int whole = daemon_ask(d, "/v1/completions", "{\"prompt\":\"a\"}");
    int stream = daemon_ask(d, "/v1/completions", "{\"prompt\":\"a\",\"stream\":true}");
    int lines = daemon_ask(d, "/v1/rollouts", "{\"groups\":[{\"prompt_token_ids\":[1]}]}");
    int half = daemon_connect(d->socket);
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
}

// Waiting for the engine is not idling.
DAEMON_TEST(test_long_wait_is_not_idle, model, args("--idle-timeout 1"))
{
    struct wire_answer whole, lines;
    daemon_post(d->socket, "/bridge/pause", 200, "");
    int fd = daemon_ask(d, "/v1/completions", "{\"prompt\":\"a\"}");
    int stream = daemon_ask(d, "/v1/rollouts", "{\"groups\":[{\"prompt_token_ids\":[1],\"n\":3}]}");
    clock_sleep_ms(3500);
    daemon_post(d->socket, "/bridge/resume", 200, "");
    assert_true(wire_read(fd, 10000, &whole));
    assert_int_equal(whole.status, 200);
    assert_true(wire_read(stream, 10000, &lines));
    assert_contains(bytes_text(&lines.body), "\"sample\":2");
    close(fd);
    close(stream);
}

// A client that asks for much and reads nothing holds up nobody, and is given up in the end.
DAEMON_TEST(test_client_that_never_reads, model, args("--idle-timeout 1"))
{
    struct wire_answer a;
    int fd = daemon_ask(d, "/v1/rollouts",
                        "{\"groups\":[{\"prompt_token_ids\":[1],\"n\":32}],\"sampling\":"
                        "{\"max_tokens\":500,\"ignore_eos\":true}}");
    int64_t deadline = clock_deadline_ns(30000);
    for (bool given_up = false; !given_up;) {
        daemon_post(d->socket, "/v1/completions", 200, "{\"prompt\":[1,2],\"max_tokens\":1}");
        daemon_request(d->socket, "GET", "/metrics", "", NULL, &a);
        given_up =
            strstr(bytes_text(&a.body), "commonweight:disconnects_total{model_name=\"model\"} 1\n");
        assert_true(clock_now_ns() < deadline);
        clock_sleep_ms(50);
    }
    assert_int_equal(int_of(daemon_get(d->socket, "/health", 200), "running"), 0);
    close(fd);
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
    daemon_start(&d, model, args("--draft %s --speculative draft_model:4", draft));
    // two roles in the bridge file, and both arenas are the daemon's
    const json_t *roles = json_at(json_of_file(d.bridge), "roles");
    assert_int_equal(json_array_size(roles), 2);
    assert_string_equal(text_of(roles, "1.role"), "draft");
    assert_contains(test_output(0, args("%s %s", test_binary("cw-ipc-check"), d.bridge)), "draft");
    // greedy text is that of a run without drafts, and the request's drafts can be looked up
    static const char body[] =
        "{\"prompt\":[5,6,7],\"max_tokens\":40,\"temperature\":0,\"ignore_eos\":true}";
    json_t *plain = daemon_post(d.socket, "/v1/completions", 200,
                                test_text("{\"speculative\":\"off\",%s", body + 1));
    json_int_t drafted = 0;
    for (int i = 0; i < 20; i++) { // the cost model tries it soon, and goes on if it pays
        json_t *a = daemon_post(d.socket, "/v1/completions", 200, body);
        const json_t *x = json_at(a, "choices.0"), *y = json_at(plain, "choices.0");
        assert_true(json_equal(json_object_get(x, "token_ids"), json_object_get(y, "token_ids")));
        const char *path = test_text("/v1/spec_decode_stats?id=%s", text_of(a, "id"));
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
    refused(1, "vocabulary of 600 tokens is larger than the 300", args("--draft %s", other));
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
    const char *const *version = args("systemd-analyze --version");
    if (test_command(log, 10000, version) != 0) test_skip("no systemd-analyze here");
    char *text = test_read(test_path(test_root(), "infer-server/cw-infer-server.service"));
    SCOPED(bytes_release) struct bytes whole = BYTES_INIT;
    const char *remaining = text;
    for (const char *at; (at = strstr(remaining, mark)); remaining = at + strlen(mark)) {
        bytes_append(&whole, remaining, (size_t)(at - remaining));
        bytes_puts(&whole, prefix);
    }
    bytes_puts(&whole, remaining);
    test_write(unit, whole.data, whole.len);
    assert_ok(file_make_folders(bin));
    assert_int_equal(symlink(test_binary("cw-infer-server"), test_path(bin, "cw-infer-server")), 0);
    const char *const *verify = args("systemd-analyze verify --man=no %s", unit);
    int status = test_command(log, 30000, verify);
    text = test_read(log);
    // it also speaks of other units of this system
    if (status != 0 || strstr(text, "cw-infer-server.service"))
        fail_msg("systemd-analyze verify: status %d: %s", status, text);
}

TESTS_BETWEEN(make_model, NULL)
