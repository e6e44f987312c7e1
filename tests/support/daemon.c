/* daemon.c: the daemon as a child process, and a plain HTTP client over its Unix socket. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon.h"
#include "bridge/attach.h"
#include "common/model/safetensors.h"
#include "tests/support/reference.h"
#include "tests/support/mpirun.h"
#include "tests/support/tiny_model.h"
#include "tests/support/tiny_tokenizer.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#define START_MS  60000
#define ANSWER_MS 60000

const char *daemon_model(const char *folder, bool tokenizer, uint64_t seed)
{
    const char *model = test_path(folder, "model");
    assert_ok(file_make_folders(model));
    assert_ok(tiny_model_write(model, 64, 2, 300, seed));
    if (tokenizer) assert_ok(tiny_tokenizer_write(model));
    return model;
}

// `before` (may be NULL) are words before the program's.
static void spawn(struct daemon *d, const char *const before[], const char *model,
                  const char *const options[])
{
    daemon_kill(d);
    d->folder = test_folder();
    d->socket = test_path(d->folder, "s.sock");
    d->bridge = test_path(d->folder, "bridge.json");
    d->log = test_path(d->folder, "daemon.log");
    test_spawn(
        &d->child, d->log,
        JOIN(before,
             args("%s --model %s --device %s --dtype f32 --socket %s --bridge %s",
                  test_binary("cw-infer-server"), model, test_device(), d->socket, d->bridge),
             options));
}

void daemon_spawn(struct daemon *d, const char *model, const char *const options[])
{
    spawn(d, NULL, model, options);
}

void daemon_spawn_ranks(struct daemon *d, int n, const char *model, const char *const options[])
{
    spawn(d, mpirun_words(n), model, options);
}

const char *daemon_exact_dtype(void)
{
    return on_cpu() ? "f32" : "bf16";
}

bool daemon_has_device(const char *name)
{
    struct device *dev;
    if (device_open(name, &dev) != ST_OK) return false;
    device_free(dev);
    return true;
}

void daemon_wait(struct daemon *d)
{
    int64_t deadline = clock_deadline_ns(START_MS);
    test_wait_for_socket(d->socket, START_MS, &d->child);
    for (;;) {
        struct wire_answer a;
        const int fd = daemon_connect(d->socket);
        if (fd < 0) fail_msg("the daemon has ended:\n%s", test_read(d->log));
        close(fd);
        daemon_request(d->socket, "GET", "/health", "", NULL, &a);
        int status = a.status;
        if (status == 200) return;
        if (clock_now_ns() > deadline || !test_running(&d->child))
            fail_msg("the daemon did not become ready (status %d):\n%s", status, test_read(d->log));
        clock_sleep_ms(20);
    }
}

void daemon_start(struct daemon *d, const char *model, const char *const options[])
{
    daemon_spawn(d, model, options);
    daemon_wait(d);
}

int daemon_stop(struct daemon *d)
{
    test_kill(&d->child, SIGTERM);
    return test_wait(&d->child, START_MS);
}

void daemon_end(struct daemon *d)
{
    const int status = test_running(&d->child) ? daemon_stop(d) : 1;
    daemon_kill(d);
    assert_int_equal(status, 0);
}

void daemon_kill(struct daemon *d)
{
    test_end(&d->child);
}

const char *const *daemon_trainer(const struct daemon *d, const char *data, const char *run_dir,
                                  const char *const options[], const char *const more[])
{
    return JOIN(args("%s train --bridge %s --data %s --run-dir %s", test_binary("cw-trainer"),
                     d->bridge, data, run_dir),
                options, more);
}

void daemon_tensor_is(struct bridge *bridge, const void *at, enum dtype dt, const void *want,
                      enum dtype want_dt, size_t n)
{
    const size_t bytes = n * dtype_size(dt);
    char *have = malloc(bytes + 1); // the daemon's may lie on a GPU
    assert_non_null(have);
    device_copy_out(bridge_device(bridge), have, at, bytes);
    assert_ok(device_sync(bridge_device(bridge)));
    if (dt == want_dt) assert_memory_equal(have, want, bytes);
    for (size_t i = 0; dt != want_dt && i < n; i++) {
        float master;
        uint16_t high;
        memcpy(&master, (const char *)want + i * sizeof master, sizeof master);
        memcpy(&high, have + i * sizeof high, sizeof high);
        if (high != master_high(master)) assert_int_equal(high, bf16_from_f32(master));
    }
    free(have);
}

void daemon_holds(const struct daemon *d, const char *role, const char *folder)
{
    struct bridge *bridge;
    SCOPED(reference_close) struct reference wanted;
    reference_open(folder, "cpu", &wanted);
    assert_ok(bridge_attach(d->bridge, NULL, &bridge));
    const enum dtype dt = bridge_file_role(bridge_file_of(bridge), role)->dt;
    for (int t = 0; t < wanted.weights->n_tensors; t++) {
        const struct weight_tensor *tensor = &wanted.weights->tensors[t];
        const size_t at = (size_t)tensor->offset, n = (size_t)tensor->n;
        daemon_tensor_is(bridge, (char *)bridge_base(bridge, role) + at * dtype_size(dt),
                         tensor->is_buffer ? DT_F32 : dt, (const float *)wanted.weights->base + at,
                         DT_F32, n);
    }
    bridge_detach(bridge);
}

void daemon_holds_file(const struct daemon *d, const char *role_name, const char *path)
{
    struct bridge *bridge;
    struct safetensors *set;
    assert_ok(safetensors_open_file(path, &set));
    assert_ok(bridge_attach(d->bridge, NULL, &bridge));
    const struct bridge_role *role = bridge_file_role(bridge_file_of(bridge), role_name);
    assert_non_null(role);
    assert_int_equal(role->n_tensors, safetensors_count(set));
    for (int i = 0; i < role->n_tensors; i++) {
        const struct bridge_tensor *t = &role->tensors[i];
        const struct safetensors_entry *e = safetensors_find(set, t->name);
        assert_true(e && e->dt == t->dt && e->bytes == t->bytes);
        daemon_tensor_is(bridge, (char *)bridge_base(bridge, role->role) + t->offset, t->dt,
                         e->data, e->dt, (size_t)t->bytes / dtype_size(t->dt));
    }
    bridge_detach(bridge);
    safetensors_free(set);
}

void daemon_holds_adapter(const struct daemon *d, const char *name, const char *folder)
{
    daemon_holds_file(d, test_text("adapter:%s", name),
                      test_path(folder, "adapter_model.safetensors"));
}

int daemon_tcp_port(struct daemon *d)
{
    test_wait_for_text(d->log, ", port ", START_MS, NULL);
    return atoi(strstr(test_read(d->log), ", port ") + 7);
}

void daemon_client(struct daemon *d, const char *python, const char *script, const char *argument)
{
    const char *url = test_text("http://127.0.0.1:%d", daemon_tcp_port(d));
    test_output(0, OPTIONS(python, test_path(test_root(), script), url, argument));
}

// ---- HTTP --------------------------------------------------------------------------------------

int daemon_connect(const char *socket_path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", socket_path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0) return fd;
    close(fd);
    return -1;
}

int daemon_connect_tcp(int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0) return fd;
    close(fd);
    return -1;
}

bool daemon_send(int fd, const char *text, size_t len)
{
    while (len > 0) {
        ssize_t n = send(fd, text, len, MSG_NOSIGNAL);
        if (n <= 0) return false;
        text += n;
        len -= (size_t)n;
    }
    return true;
}

static void split(struct bytes *whole, struct wire_answer *ret)
{
    const char *end = strstr(bytes_text(whole), "\r\n\r\n");
    if (!end) return;
    size_t head = (size_t)(end - whole->data) + 4;
    bytes_append(&ret->head, whole->data, head);
    bytes_append(&ret->body, whole->data + head, whole->len - head);
    const char *space = strchr(bytes_text(&ret->head), ' ');
    if (strncmp(ret->head.data, "HTTP/1.", 7) == 0 && space) ret->status = atoi(space + 1);
    // a random model's text may hold any byte
    ret->json = json_loadb(bytes_text(&ret->body), ret->body.len, JSON_ALLOW_NUL, NULL);
    test_keep(ret->head.data);
    test_keep(ret->body.data);
    test_keep(ret->json);
}

bool wire_read(int fd, int ms, struct wire_answer *ret)
{
    SCOPED(bytes_release) struct bytes whole = BYTES_INIT;
    int64_t deadline = clock_deadline_ns(ms);
    bool ended = false;
    char piece[4096];
    *ret = (struct wire_answer){.status = 0, .head = BYTES_INIT, .body = BYTES_INIT};
    while (!ended) {
        struct pollfd wait = {.fd = fd, .events = POLLIN};
        if (poll(&wait, 1, clock_ms_until(deadline)) <= 0) break;
        ssize_t n = recv(fd, piece, sizeof piece, 0);
        if (n > 0) bytes_append(&whole, piece, (size_t)n);
        ended = n <= 0;
    }
    if (whole.len > 0) split(&whole, ret);
    return ended;
}

void daemon_request(const char *socket_path, const char *method, const char *path,
                    const char *headers, const char *body, struct wire_answer *ret)
{
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    int fd = daemon_connect(socket_path);
    if (fd < 0) fail_msg("%s: refused", socket_path);
    bytes_printf(&text, "%s %s HTTP/1.0\r\nHost: x\r\n%s", method, path, headers);
    if (body) bytes_printf(&text, "Content-Length: %zu\r\n", strlen(body));
    bytes_puts(&text, "\r\n");
    if (body) bytes_puts(&text, body);
    daemon_send(fd, text.data, text.len);
    bool ended = wire_read(fd, ANSWER_MS, ret);
    close(fd);
    if (!ended) fail_msg("%s %s: no answer within %d ms", method, path, ANSWER_MS);
}

static json_t *check_answer(struct wire_answer *a, const char *what, int status)
{
    if (a->status != status || !a->json)
        fail_msg("%s: status %d, not %d: %s", what, a->status, status, bytes_text(&a->body));
    return a->json;
}

json_t *daemon_post(const char *socket_path, const char *path, int status, const char *body)
{
    struct wire_answer a;
    daemon_request(socket_path, "POST", path, "", body, &a);
    return check_answer(&a, path, status);
}

json_t *daemon_get(const char *socket_path, const char *path, int status)
{
    struct wire_answer a;
    daemon_request(socket_path, "GET", path, "", NULL, &a);
    return check_answer(&a, path, status);
}

void daemon_call(const struct daemon *d, const char *path, int status, const char *part,
                 const char *format, ...)
{
    SCOPED(bytes_release) struct bytes body = BYTES_INIT;
    struct wire_answer a;
    va_list arguments;
    va_start(arguments, format);
    bytes_vprintf(&body, format, arguments);
    va_end(arguments);
    daemon_request(d->socket, "POST", path, "", bytes_text(&body), &a);
    if (a.status != status || !strstr(bytes_text(&a.body), part))
        fail_msg("%s %s: %d %s", path, bytes_text(&body), a.status, bytes_text(&a.body));
}

int daemon_ask(const struct daemon *d, const char *path, const char *body)
{
    const char *text = test_text("POST %s HTTP/1.0\r\nHost: x\r\nContent-Length: %zu\r\n\r\n%s",
                                 path, strlen(body), body);
    const int fd = daemon_connect(d->socket);
    assert_true(fd >= 0 && daemon_send(fd, text, strlen(text)));
    return fd;
}

json_int_t daemon_version(const struct daemon *d)
{
    return int_of(daemon_get(d->socket, "/health", 200), "weight_version");
}

double daemon_metric(const struct daemon *d, const char *series)
{
    struct wire_answer a;
    daemon_request(d->socket, "GET", "/metrics", "", NULL, &a);
    assert_int_equal(a.status, 200);
    const char *line = strstr(bytes_text(&a.body), test_text("\n%s", series));
    if (!line) fail_msg("no metric %s", series);
    return atof(strchr(line, '}') + 1);
}

void daemon_load_adapter(const struct daemon *d, const char *name, const char *folder)
{
    daemon_call(d, "/v1/load_lora_adapter", 200, "added successfully",
                "{\"lora_name\":\"%s\",\"lora_path\":\"%s\",\"load_inplace\":true}", name, folder);
}

int daemon_tcp_status(int port, const char *method, const char *path, const char *headers)
{
    const char *text = test_text("%s %s HTTP/1.0\r\n%s\r\n", method, path, headers);
    struct wire_answer a = {0};
    int fd = daemon_connect_tcp(port);
    if (fd < 0) return 0;
    daemon_send(fd, text, strlen(text));
    wire_read(fd, 10000, &a);
    close(fd);
    return a.status;
}
