/* test_tinker_faults.c: cw-trainer serve and clients that misbehave: 10,000 malformed requests of
 * all kinds, clients that leave while their answer is held, requests behind a gap, and kill -9 of
 * either process at any moment. Nothing that was asked for properly is lost by it. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_client.h"
#include "common/base/rng.h"
#include "common/base/protobuf.h"

#include <dirent.h>
#include <sys/socket.h>

#define REQUESTS    10000
#define HALF_CLOSED 100
#define SETTLE_MS   10000

static const char *former; // former: a run that has the weights no more

static void start(void)
{
    tinker_pair_start(NULL, args("--exact --dtype %s", daemon_exact_dtype()),
                      args("--exact --max-body 1M"));
    trained = tinker_whole();
}

static int open_files(void)
{
    int n = 0;
    DIR *folder = opendir(test_text("/proc/%d/fd", (int)pair.server.child.pid));
    assert_non_null(folder);
    while (readdir(folder)) n++;
    closedir(folder);
    return n;
}

// Once the connections of requests that were answered are closed, which takes a moment.
static int files_at_rest(void)
{
    int n = open_files();
    for (int remaining = 0; remaining < 20; remaining++) {
        clock_sleep_ms(10);
        if (open_files() != n) remaining = 0;
        n = open_files();
    }
    return n;
}

// That clients have left is noticed in time.
static void check_files(int wanted)
{
    const int64_t deadline = clock_deadline_ns(SETTLE_MS);
    while (open_files() > wanted && clock_now_ns() < deadline) clock_sleep_ms(20);
    assert_in_range(open_files(), 1, wanted);
}

static int pick(struct rng *r, int n)
{
    return (int)(rng_uniform(r) * (float)n) % n;
}

// Of a list of tests/cases/tinker.json.
static const char *one_of(struct rng *r, const char *list)
{
    static const json_t *lists[8];
    static const char *names[8];
    int i = 0;
    while (names[i] && strcmp(names[i], list) != 0) i++;
    if (!names[i]) lists[i] = test_rows("tinker", names[i] = list);
    return json_string_value(json_at(lists[i], "%d", pick(r, (int)json_array_size(lists[i]))));
}

// ---- malformed requests -------------------------------------------------------------------------

static void put_random(struct rng *r, int n, struct bytes *to)
{
    for (int i = 0; i < n; i++) {
        const char byte = (char)pick(r, 256);
        bytes_append(to, &byte, 1);
    }
}

// JSON with fields of the wrong kind, and now and then without its end.
static void put_json(struct rng *r, struct bytes *body)
{
    bytes_printf(body, "{\"model_id\":\"%s\"", pick(r, 2) ? trained.id : "x");
    for (int i = 0; i < 4; i++)
        bytes_printf(body, ",\"%s\":%s", one_of(r, "keys"), one_of(r, "values"));
    bytes_puts(body, pick(r, 5) ? "}" : "");
}

// What is right but for the run, which has the weights no more: with bytes changed, or cut off.
static void put_protobuf(struct rng *r, struct bytes *body)
{
    tinker_put_learn(body, former, 2 + pick(r, 50), "cross_entropy", false, &tinker_one, 1);
    if (pick(r, 2)) {
        body->len = (size_t)pick(r, (int)body->len);
        return;
    }
    for (int i = pick(r, 6); i >= 0; i--)
        body->data[strlen(former) + 2 + (size_t)pick(r, (int)(body->len - strlen(former) - 2))] =
            (char)pick(r, 256);
}

static void put_future(struct rng *r, struct bytes *body)
{
    json_t *known = tinker_learn(former, 1, "cross_entropy", true, &tinker_one, 1);
    const char *id = text_of(known, "request_id");
    const char *form = one_of(r, "ids");
    const char *asked = strncmp(form, "%s", 2) == 0
                            ? test_text("%.*s%s", (int)strcspn(id, "-"), id, form + 2)
                            : form;
    bytes_printf(body, "{\"request_id\":\"%s\"}", asked);
}

static void ask(const char *method, const char *path, const char *type, const struct bytes *body)
{
    struct wire_answer a;
    tinker_request(method, test_text("/api/v1/%s", path), type, body, &a);
    if (a.status < 200 || a.status >= 500)
        fail_msg("%s %s: %d to %s", method, path, a.status, bytes_text(body));
    const json_t *error = json_object_get(json_object_get(a.json, "error"), "message");
    if (a.status >= 400 && (!error || strlen(json_string_value(error)) < 10))
        fail_msg("%s %s: %d without a sentence: %s", method, path, a.status, bytes_text(&a.body));
}

static void ask_json(struct rng *r, struct bytes *body)
{
    if (pick(r, 4) == 0)
        put_random(r, 40, body);
    else
        put_json(r, body);
    ask(one_of(r, "methods"), one_of(r, "paths"), "application/json", body);
}

static void ask_protobuf(struct rng *r, struct bytes *body)
{
    if (pick(r, 4) == 0)
        put_random(r, 60, body);
    else
        put_protobuf(r, body);
    ask("POST", "forward_backward", "application/x-protobuf", body);
}

static void ask_future(struct rng *r, struct bytes *body)
{
    put_future(r, body);
    ask("POST", "retrieve_future", "application/json", body);
}

// Of clients that have ended their half of the connection, and wait for the server's.
static int half_closed[HALF_CLOSED];

static void end_half_closed(int slot)
{
    struct wire_answer a = {0};
    const int fd = half_closed[slot];
    half_closed[slot] = 0;
    if (fd == 0) return;
    assert_true(wire_read(fd, SETTLE_MS, &a));
    assert_true(a.status < 500 || a.status == 501 || a.status == 505);
    close(fd);
}

// Bytes of which none, or a part, is HTTP.
static void ask_broken(struct rng *r, struct bytes *text)
{
    static int slot;
    const int fd = daemon_connect_tcp(pair.server.port);
    assert_true(fd >= 0);
    bytes_puts(text, one_of(r, "starts"));
    if (pick(r, 2)) put_random(r, 30, text);
    daemon_send(fd, bytes_text(text), text->len);
    if (pick(r, 2)) {
        close(fd);
        return;
    }
    shutdown(fd, SHUT_WR);
    slot = (slot + 1) % HALF_CLOSED;
    end_half_closed(slot);
    half_closed[slot] = fd;
}

static void ask_malformed(int n)
{
    static void (*const kinds[])(struct rng *, struct bytes *) = {ask_json, ask_protobuf,
                                                                  ask_future, ask_broken};
    struct rng r;
    rng_init(&r, 11, 0);
    for (int i = 0; i < n; i++) {
        SCOPED(bytes_release) struct bytes body = BYTES_INIT;
        kinds[i % 4](&r, &body);
    }
    for (int i = 0; i < HALF_CLOSED; i++) end_half_closed(i);
}

static void begin_next(int number)
{
    former = trained.id;
    trained = tinker_begun(tinker_create(session, number, 200, ""));
}

// Gradients that wait for their step when the storm comes are there after it.
TINKER_TEST(test_malformed)
{
    start();
    float wanted[TINKER_N], after[TINKER_N];
    tinker_run_update(&trained, &tinker_one);
    tinker_run_score(&trained, &tinker_one, wanted);
    begin_next(1);
    begin_next(2); // former: of no requests
    const int files = files_at_rest();
    tinker_run_learn(&trained, &tinker_one, NULL);
    ask_malformed(REQUESTS);
    check_files(files);
    tinker_run_step(&trained, 1e-2);
    tinker_run_score(&trained, &tinker_one, after);
    assert_memory_equal(after, wanted, sizeof after);
}

// ---- clients that leave -------------------------------------------------------------------------

static void step_request(int seq_id, struct bytes *body)
{
    bytes_printf(body, "{\"model_id\":\"%s\",\"seq_id\":%d,\"adam_params\":{\"learning_rate\":0}}",
                 trained.id, seq_id);
}

// A request for an answer that is not there yet; the socket that it is held on.
static int hold(const char *path, const char *body)
{
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    const int fd = daemon_connect_tcp(pair.server.port);
    assert_true(fd >= 0);
    bytes_printf(&text,
                 "POST /api/v1/%s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                 "X-API-Key: %s\r\nContent-Length: %zu\r\n\r\n%s",
                 path, pair.server.key, strlen(body), body);
    daemon_send(fd, bytes_text(&text), text.len);
    return fd;
}

// Hundreds ask for what is held behind a gap, and for what is done of a session, and leave, some
// without a word. The answer is there for who comes after them.
TINKER_TEST(test_leavers)
{
    start();
    const char *sampler;
    SCOPED(bytes_release) struct bytes step = BYTES_INIT;
    const int files = files_at_rest();
    step_request(3, &step);
    json_t *late = tinker_post("optim_step", 200, "%s", bytes_text(&step));
    const char *body = test_text("{\"request_id\":\"%s\"}", text_of(late, "request_id"));
    sampler = tinker_run_snapshot(&trained, "");
    const char *poll =
        test_text("{\"target\":{\"sampling_session_id\":\"%s\",\"cloned_sampler_id\":0}}", sampler);
    for (int round = 0; round < 3; round++) {
        int fds[100];
        for (int i = 0; i < 100; i++)
            fds[i] = i % 2 ? hold("retrieve_future", body) : hold("retrieve_futures", poll);
        for (int i = 0; i < 100; i++) {
            const struct linger reset = {1, 0};
            if (i % 3 == 0) setsockopt(fds[i], SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
            close(fds[i]);
        }
    }
    check_files(files);
    tinker_run_learn(&trained, &tinker_one, NULL);
    json_t *answer = tinker_retrieve(late);
    assert_non_null(json_object_get(answer, "metrics"));
}

// ---- kill -9 ------------------------------------------------------------------------------------

// A stream of gradients, steps and saves, whose answers nobody waits for.
static void submit_all(void)
{
    for (int i = 0; i < 4; i++) {
        SCOPED(bytes_release) struct bytes step = BYTES_INIT;
        tinker_learn(trained.id, ++trained.seq_id, "cross_entropy", false, &tinker_one, 1);
        step_request(++trained.seq_id, &step);
        tinker_post("optim_step", 200, "%s", bytes_text(&step));
        tinker_post("save_weights", 200,
                    "{\"model_id\":\"%s\",\"seq_id\":%d,\"path\":\"under-way\"}", trained.id,
                    ++trained.seq_id);
    }
}

// kill -9 of cw-trainer serve, at any moment of its work: what save_weights had acknowledged is
// whole, the next process takes the lease, and gives the log-probabilities of then.
TINKER_TEST(test_killed)
{
    start();
    float wanted[TINKER_N], got[TINKER_N];
    const char *path;
    struct rng r;
    rng_init(&r, 5, 0);
    tinker_run_update(&trained, &tinker_one);
    path = tinker_run_save(&trained, "save_weights", "kept");
    tinker_run_score(&trained, &tinker_one, wanted);
    for (int i = 0; i < 6; i++) {
        submit_all();
        clock_sleep_ms(pick(&r, 25));
        tinker_pair_kill(args("--exact"));
        tinker_finish(session); // what its client does once it has failed
        tinker_whole();
        trained = tinker_load(1, path);
        tinker_run_score(&trained, &tinker_one, got);
        assert_memory_equal(got, wanted, sizeof got);
    }
}
