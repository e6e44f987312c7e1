/* test_bridge.c: attaching to a bridge file, publishing through it, and cw-ipc-check. The
 * daemon is a forked process with a real arena and a real control page that answers /bridge/info.
 */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "common/base/process.h"
#include "common/base/log.h"
#include "kernels/ops.h"
#include "tests/support/bridge_sample.h"
#include "tests/support/support.h"
#include "tests/support/loaded.h"
#include "trainer/run/run.h"
#include "trainer/run/stop.h"

#include <inttypes.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

// ---- a daemon -----------------------------------------------------------------------------------

enum daemon_kind { HONEST, OTHER_MEMORY, DEAF, ONE_BYTE_OFF, SLOW_TO_RESTORE };

static void answer_info(int fd, struct device *dev, struct control *c, char *arena,
                        enum daemon_kind kind)
{
    static char copy[ARENA_BYTES];
    char request[2048], head[128];
    size_t len = 0;
    ssize_t n;
    while ((n = read(fd, request + len, sizeof request - 1 - len)) > 0) {
        len += (size_t)n;
        request[len] = 0;
        if (strstr(request, "\r\n\r\n")) break;
    }
    char *base = arena;
    if (kind == OTHER_MEMORY || kind == ONE_BYTE_OFF) {
        memcpy(copy, arena, CANARY);
        if (kind == ONE_BYTE_OFF) {
            memcpy(copy, arena, sizeof copy);
            copy[7 * TENSOR_BYTES + 3] ^= 1;
        }
        base = copy;
    }
    uint64_t word, sums[TENSORS], offset[TENSORS], bytes[TENSORS];
    memcpy(&word, base + CANARY, 8);
    uint64_t answer = ~word;
    if (kind != DEAF) memcpy(arena + CANARY + 8, &answer, 8);
    for (int i = 0; i < TENSORS; i++) {
        offset[i] = (uint64_t)i * TENSOR_BYTES;
        bytes[i] = TENSOR_BYTES;
    }
    device_ops(dev)->checksum(dev, sums, base, offset, bytes, TENSORS);
    SCOPED(bytes_release) struct bytes body = BYTES_INIT;
    bytes_printf(&body, "{\"weight_version\": %" PRIu64 ", \"canary\": \"%016" PRIx64 "\"",
                 control_version(c), word);
    if (strstr(request, "checksums=1"))
        for (int i = 0; i < TENSORS; i++)
            bytes_printf(&body, "%s\"%016" PRIx64 "\"", i ? ", " : ", \"checksums\": [", sums[i]);
    bytes_puts(&body, strstr(request, "checksums=1") ? "]}" : "}");
    snprintf(head, sizeof head,
             "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n", body.len);
    if (send(fd, head, strlen(head), MSG_NOSIGNAL) < 0 ||
        send(fd, body.data, body.len, MSG_NOSIGNAL) < 0)
        _exit(1);
}

// Never returns. Counts what the engine saw in the first two weights of tensor 1: updates and
// restores.
static void daemon_main(enum daemon_kind kind, int ready)
{
    struct device *dev = NULL;
    struct control *c = NULL;
    struct shared_memory *memory = NULL;
    struct bridge_file *f = bridge_sample(TENSORS, false);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (device_open("cpu", &dev) ||
        shared_memory_create(dev, bridge_names.arena, ARENA_BYTES, &memory) ||
        control_create(bridge_names.page, f->roles[0].layout_hash, &c)) {
        fprintf(stderr, "daemon: %s\n", status_message());
        _exit(1);
    }
    float *weights = shared_memory_data(memory);
    for (int i = 0; i < CANARY / 4; i++) weights[i] = (float)i;
    control_owner_update_end(c);
    if (bridge_file_write(f)) _exit(2);
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%.90s", bridge_names.socket);
    unlink(bridge_names.socket);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 8))
        _exit(3);
    if (write(ready, "r", 1) != 1) _exit(4);
    for (;;) {
        struct pollfd p = {.fd = listener, .events = POLLIN};
        if (poll(&p, 1, 2) > 0) {
            int fd = accept(listener, NULL, NULL);
            answer_info(fd, dev, c, (char *)weights, kind);
            close(fd);
        }
        control_heartbeat(c);
        enum control_event event =
            control_quiesce_requested(c) ? control_grant_quiesce(c) : control_check_writer(c);
        if (event == CONTROL_UPDATED) weights[ROWS * COLUMNS] += 1;
        if (event == CONTROL_TORN) {
            if (kind == SLOW_TO_RESTORE) clock_sleep_ms(500);
            control_owner_update_begin(c);
            weights[ROWS * COLUMNS + 1] += 1;
            control_owner_update_end(c);
        }
    }
}

static pid_t start_daemon(enum daemon_kind kind)
{
    int ready[2];
    char byte;
    shm_unlink(bridge_names.arena);
    assert_int_equal(pipe(ready), 0);
    pid_t pid = fork();
    if (pid == 0) daemon_main(kind, ready[1]);
    close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    return pid;
}
static void stop_daemon(pid_t pid)
{
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

// Attached, and its writer.
static struct bridge *writer(void)
{
    struct bridge *b = NULL;
    assert_ok(bridge_attach(bridge_names.file, NULL, &b));
    assert_ok(bridge_become_writer(b));
    return b;
}

// ---- attaching ----------------------------------------------------------------------------------

static enum status add_hundred(void *context)
{
    float *weights = context;
    weights[0] += 100;
    return ST_OK;
}
static enum status fail_half_way(void *context)
{
    float *weights = context;
    weights[0] = -1;
    return status_fail(ST_DEVICE, "the GPU fell off");
}

TEST(test_publish)
{
    pid_t pid = start_daemon(HONEST);
    struct bridge *b = NULL, *second = NULL;
    struct publish_times times = {0};
    assert_ok(bridge_attach(bridge_names.file, NULL, &b));
    assert_int_equal(bridge_file_of(b)->pid, pid);
    assert_int_equal(device_kind(bridge_device(b)), DEVICE_CPU);
    assert_null(bridge_base(b, "draft"));
    volatile float *weights = bridge_base(b, "policy");
    assert_true(weights[5] == 5);
    assert_int_equal(bridge_publish(b, 1000, add_hundred, (void *)weights, &times), ST_INVALID);
    assert_ok(bridge_become_writer(b));
    assert_ok(bridge_become_writer(b));

    // a second trainer is refused; a second reader on a device of its own is not
    struct device *dev = test_cpu();
    assert_ok(bridge_attach(bridge_names.file, dev, &second));
    assert_ptr_equal(bridge_device(second), dev);
    assert_int_equal(bridge_become_writer(second), ST_BUSY);
    bridge_detach(second);

    for (int i = 0; i < 5; i++) {
        assert_ok(bridge_publish(b, 5000, add_hundred, (void *)weights, &times));
        assert_int_equal(control_version(bridge_control(b)), 4 + 2 * i);
        assert_true(times.total_ms >= times.wait_ms && times.total_ms >= times.write_ms);
    }
    assert_true(weights[0] == 500);
    struct control_info f;
    clock_sleep_ms(250); // the heartbeat goes on by itself
    control_info(bridge_control(b), &f);
    assert_true(f.writer_heartbeat_age_ms < 200);
    assert_true(weights[ROWS * COLUMNS] == ROWS * COLUMNS + 5);

    assert_fails(bridge_publish(b, 5000, fail_half_way, (void *)weights, &times), ST_DEVICE,
                 "weights are torn");
    assert_message("the GPU fell off");
    int64_t deadline = clock_deadline_ns(5000);
    while (weights[ROWS * COLUMNS + 1] == ROWS * COLUMNS + 1 && clock_now_ns() < deadline)
        clock_sleep_ms(5);
    assert_true(weights[ROWS * COLUMNS + 1] == ROWS * COLUMNS + 2); // restored
    assert_int_equal(bridge_publish(b, 1000, add_hundred, (void *)weights, &times), ST_BUSY);
    bridge_detach(b);

    // a new writer goes on
    b = writer();
    weights = bridge_base(b, "policy");
    assert_ok(bridge_publish(b, 5000, add_hundred, (void *)weights, NULL));

    stop_daemon(pid);
    int64_t start = clock_now_ns();
    assert_int_equal(bridge_publish(b, 5000, add_hundred, (void *)weights, &times), ST_PEER_GONE);
    assert_true(clock_ms_since(start) < 2000);
    bridge_detach(b);
    bridge_detach(NULL);
}

// A run that begins when the one before it has just died in an update.
// A process that is told to end waits no longer.
static void assert_a_signal_ends_the_wait(struct bridge *b)
{
    const pid_t pid = fork();
    int status;
    if (pid == 0) {
        alarm(20);
        log_open("trainer", LOG_ERROR);
        stop_catch_signals();
        raise(SIGTERM);
        _exit(run_become_writer(b) == ST_CANCELLED ? 10 : 11);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 10 << 8);
}

TEST(test_run_waits_for_a_restore)
{
    pid_t pid = start_daemon(SLOW_TO_RESTORE);
    struct bridge *b = writer();
    float *weights = bridge_base(b, "policy");
    assert_int_equal(bridge_publish(b, 5000, fail_half_way, weights, NULL), ST_DEVICE);
    bridge_detach(b);
    assert_ok(bridge_attach(bridge_names.file, NULL, &b));
    assert_true(control_version(bridge_control(b)) % 2 == 1);
    kill(pid, SIGSTOP); // it has yet to restore for as long
    assert_a_signal_ends_the_wait(b);
    kill(pid, SIGCONT);
    assert_ok(run_become_writer(b));
    weights = bridge_base(b, "policy");
    assert_true(weights[ROWS * COLUMNS + 1] == ROWS * COLUMNS + 2); // restored
    bridge_detach(b);
    stop_daemon(pid);
}

// Rewrites one value of the file on disk.
static void change_file(const char *at, const char *value)
{
    json_t *json = json_of_file(bridge_names.file);
    bridge_change(json, at, value);
    assert_ok(json_write_file(bridge_names.file, 0600, json));
}

TEST(test_attach_faults)
{
    const json_t *cases = test_rows("bridge", "test_attach_faults");
    pid_t pid = start_daemon(HONEST);
    struct bridge *b = NULL;
    SCOPED(bytes_release) struct bytes good = BYTES_INIT;
    assert_ok(file_read(bridge_names.file, 16 << 20, &good));
    for (size_t i = 0; i < json_array_size(cases); i++) {
        change_file(row_text(cases, i, "at"), row_text(cases, i, "value"));
        assert_fails(bridge_attach(bridge_names.file, NULL, &b), row_status(cases, i, "st"),
                     row_text(cases, i, "words"));
        assert_null(b);
        assert_ok(file_write_atomic(bridge_names.file, 0600, good.data, good.len));
    }
    // the arena's name leads nowhere
    shm_unlink(bridge_names.arena);
    assert_fails(bridge_attach(bridge_names.file, NULL, &b), ST_NOT_FOUND, bridge_names.arena);
    assert_message("segment policy");
    stop_daemon(pid);
    assert_int_equal(bridge_attach(bridge_names.file, NULL, &b), ST_PEER_GONE);
    assert_null(b);
}

// Which the server takes out of its file first, and its memory then.
struct unloading {
    struct bridge_file *file;
    int told;
};

static void unload_before_it_is_mapped(void *context, const char *step, enum status st,
                                       const char *detail)
{
    struct unloading *u = context;
    if (st != ST_OK) fail_msg("%s: %s", step, detail);
    u->told += strcmp(step, "mapping draft") == 0;
    if (strcmp(step, "mapping policy") != 0) return;
    u->file->n_roles = 1;
    assert_ok(bridge_file_write(u->file));
    u->file->n_roles = 2;
}

TEST(test_unloaded_meanwhile)
{
    pid_t pid = start_daemon(HONEST);
    struct bridge *b = NULL;
    struct unloading u = {.file = bridge_sample(TENSORS, true)}; // the draft has no memory
    u.file->pid = pid;
    u.file->pid_start_time = process_start_time(pid);
    assert_ok(bridge_file_write(u.file));
    assert_fails(bridge_attach(bridge_names.file, NULL, &b), ST_NOT_FOUND,
                 "segment draft"); // while the file lists it, that is what is wrong
    assert_ok(bridge_attach_shard(bridge_names.file, -1, NULL, unload_before_it_is_mapped, &u, &b));
    assert_int_equal(u.told, 1);
    assert_non_null(bridge_base(b, "policy"));
    assert_null(bridge_base(b, "draft"));
    assert_int_equal(bridge_file_of(b)->n_roles, 1);
    bridge_detach(b);
    bridge_file_free(u.file);
    stop_daemon(pid);
}

// ---- cw-ipc-check -------------------------------------------------------------------------------

// cw-ipc-check with this argument, or two; what it says lives as long as the program.
static const char *checked(int wanted, const char *argument, const char *other)
{
    const char *log = test_path(test_folder(), "out");
    assert_exit(wanted,
                test_command(log, 60000, OPTIONS(test_binary("cw-ipc-check"), argument, other)));
    return test_read(log);
}

TEST(test_checker)
{
    static const struct {
        enum daemon_kind kind;
        const char *words[2];
    } liars[] = {
        {OTHER_MEMORY, {"FAIL  canary", "does not see what is written here"}},
        {DEAF, {"its answer does not arrive", ""}},
        {ONE_BYTE_OFF, {"1 of 400 tensors differ", "model.layers.7.weight"}},
    };
    pid_t pid = start_daemon(HONEST);
    const char *out = checked(0, bridge_names.file, NULL);
    print_message("%s", out);
    assert_contains(out, "ok    canary");
    assert_contains(out, "400 tensors equal the server's at version 2");
    assert_contains(out, "\nhealthy in ");
    const json_t *json = json_of(checked(0, "--json", bridge_names.file));
    assert_json(json, "{'ok': true, 'weight_version': 2, 'writer': null}");
    assert_true(json_is_null(json_at(json, "writer")));
    assert_int_equal(json_array_size(json_at(json, "checks")), 9);

    // the lease's holder is told, not disturbed
    struct bridge *b = writer();
    float *weights = bridge_base(b, "policy");
    assert_ok(bridge_publish(b, 5000, add_hundred, weights, NULL));
    out = checked(0, bridge_names.file, NULL);
    assert_contains(out, "writer pid");
    assert_contains(out, "last publish     waited");
    assert_ok(bridge_publish(b, 5000, add_hundred, weights, NULL));
    assert_true(weights[0] == 200);
    bridge_detach(b);

    checked(2, "--what", NULL);
    stop_daemon(pid);
    out = checked(1, bridge_names.file, NULL);
    assert_contains(out, "FAIL  server");
    assert_contains(out, "is dead; start cw-infer-server again");
    assert_contains(checked(1, "/nowhere/bridge.json", NULL), "/nowhere/bridge.json");
    for (size_t i = 0; i < sizeof liars / sizeof *liars; i++) {
        pid = start_daemon(liars[i].kind);
        out = checked(1, bridge_names.file, NULL);
        for (int k = 0; k < 2; k++) assert_contains(out, liars[i].words[k]);
        stop_daemon(pid);
    }
}

TESTS_BETWEEN(bridge_sample_open, bridge_sample_close)
