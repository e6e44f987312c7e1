/* test_bridge.c: the bridge file, attaching to it, publishing through it, and cw-ipc-check. The
 * daemon is a forked process with a real arena and a real control page that answers /bridge/info.
 */
#include "bridge/attach.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "kernels/ops.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>

#include <cmocka.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define TENSORS      400
#define ROWS         16
#define COLUMNS      8
#define TENSOR_BYTES (ROWS * COLUMNS * 4)
#define CANARY       (TENSORS * TENSOR_BYTES)
#define ARENA_BYTES  (CANARY + 256)

static char folder[64], bridge_path[96], socket_path[96], page_name[64], arena_name[64];

static int make_names(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/commonweight-bridge-XXXXXX");
    if (!mkdtemp(folder)) return -1;
    snprintf(bridge_path, sizeof bridge_path, "%s/bridge.json", folder);
    snprintf(socket_path, sizeof socket_path, "%s/s.sock", folder);
    snprintf(page_name, sizeof page_name, "/commonweight-test-page-%d", (int)getpid());
    snprintf(arena_name, sizeof arena_name, "/commonweight-test-arena-%d", (int)getpid());
    return 0;
}
static int remove_names(void **state)
{
    (void)state;
    shm_unlink(page_name);
    shm_unlink(arena_name);
    return file_remove_tree(folder) == ST_OK ? 0 : -1;
}

static void assert_says(const char *words)
{
    if (!strstr(status_message(), words)) fail_msg("\"%s\" lacks \"%s\"", status_message(), words);
}

// A file of this process with a policy of n tensors and, where wanted, a small draft.
static struct bridge_file *sample(int n_tensors, bool draft)
{
    struct bridge_file *f = calloc(1, sizeof *f);
    struct device *dev = NULL;
    assert_int_equal(device_open("cpu", &dev), ST_OK);
    snprintf(f->path, sizeof f->path, "%s", bridge_path);
    process_boot_id(f->boot_id);
    f->pid = getpid();
    f->pid_start_time = process_start_time(getpid());
    snprintf(f->device, sizeof f->device, "cpu");
    snprintf(f->device_uuid, sizeof f->device_uuid, "%s", device_uuid(dev));
    snprintf(f->control_page, sizeof f->control_page, "%s", page_name);
    snprintf(f->socket, sizeof f->socket, "%s", socket_path);
    f->n_roles = draft ? 2 : 1;
    f->roles = calloc((size_t)f->n_roles, sizeof *f->roles);
    for (int i = 0; i < f->n_roles; i++) {
        struct bridge_role *r = &f->roles[i];
        snprintf(r->role, sizeof r->role, "%s", i ? "draft" : "policy");
        snprintf(r->model, sizeof r->model, "/models/%s", r->role);
        snprintf(r->kind, sizeof r->kind, "posix-shm");
        snprintf(r->handle, sizeof r->handle, "%s%s", arena_name, i ? "-draft" : "");
        memset(r->layout_hash, i ? 'b' : 'a', 64);
        r->dt = DT_F32;
        r->n_tensors = i ? 2 : n_tensors;
        r->canary_offset = (uint64_t)r->n_tensors * TENSOR_BYTES;
        r->bytes = r->canary_offset + 256;
        r->n_parameters = (int64_t)r->n_tensors * ROWS * COLUMNS;
        r->tensors = calloc((size_t)r->n_tensors, sizeof *r->tensors);
        for (int k = 0; k < r->n_tensors; k++) {
            struct bridge_tensor *t = &r->tensors[k];
            snprintf(t->name, sizeof t->name, "model.layers.%d.weight", k);
            t->n_dims = 2;
            t->shape[0] = ROWS;
            t->shape[1] = t->stride[0] = COLUMNS;
            t->stride[1] = 1;
            t->dt = DT_F32;
            t->bytes = TENSOR_BYTES;
            t->offset = (uint64_t)k * TENSOR_BYTES;
        }
    }
    device_free(dev);
    return f;
}

// ---- the file -----------------------------------------------------------------------------------

static void test_round_trip(void **state)
{
    (void)state;
    struct bridge_file *f = sample(TENSORS, true), *again = NULL;
    struct stat sb;
    assert_int_equal(bridge_file_write(f), ST_OK);
    assert_int_equal(stat(bridge_path, &sb), 0);
    assert_int_equal(sb.st_mode & 0777, 0600);
    int64_t start = clock_now_ns();
    if (bridge_file_read(bridge_path, &again) != ST_OK) fail_msg("%s", status_message());
    print_message("%d tensors read in %.1f ms\n", TENSORS + 2, clock_ms_since(start));
    assert_string_equal(again->path, bridge_path);
    assert_string_equal(again->boot_id, f->boot_id);
    assert_int_equal(again->pid, f->pid);
    assert_int_equal(again->pid_start_time, f->pid_start_time);
    assert_string_equal(again->device, f->device);
    assert_string_equal(again->device_uuid, f->device_uuid);
    assert_string_equal(again->control_page, f->control_page);
    assert_string_equal(again->socket, f->socket);
    assert_int_equal(again->n_roles, 2);
    for (int i = 0; i < 2; i++) {
        const struct bridge_role *a = &f->roles[i], *b = bridge_file_role(again, a->role);
        assert_ptr_equal(b, &again->roles[i]);
        assert_string_equal(a->model, b->model);
        assert_string_equal(a->kind, b->kind);
        assert_string_equal(a->handle, b->handle);
        assert_string_equal(a->layout_hash, b->layout_hash);
        assert_int_equal(a->bytes, b->bytes);
        assert_int_equal(a->canary_offset, b->canary_offset);
        assert_int_equal(a->dt, b->dt);
        assert_int_equal(a->n_parameters, b->n_parameters);
        assert_int_equal(a->n_tensors, b->n_tensors);
        for (int k = 0; k < a->n_tensors; k++)
            assert_memory_equal(&a->tensors[k], &b->tensors[k], sizeof *a->tensors);
    }
    assert_null(bridge_file_role(again, "adapter"));
    assert_int_equal(bridge_file_check(again), ST_OK);

    again->pid_start_time++;
    assert_int_equal(bridge_file_check(again), ST_PEER_GONE);
    assert_says("given to another process");
    again->boot_id[0] ^= 1;
    assert_int_equal(bridge_file_check(again), ST_MISMATCH);
    assert_says("was written in boot");
    assert_says("start cw-infer-server");
    bridge_file_free(again);

    pid_t pid = fork();
    if (pid == 0) _exit(0);
    siginfo_t info;
    f->pid = pid;
    f->pid_start_time = process_start_time(pid);
    waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT);
    assert_int_equal(bridge_file_check(f), ST_PEER_GONE);
    assert_says("is dead");
    waitpid(pid, NULL, 0);
    bridge_file_free(f);
}

// What tools for vLLM-style bridges read.
static void test_old_keys(void **state)
{
    (void)state;
    struct bridge_file *f = sample(3, false);
    json_t *json = NULL;
    struct bytes name = BYTES_INIT;
    assert_int_equal(bridge_file_write(f), ST_OK);
    assert_int_equal(json_read_file(bridge_path, 1 << 20, &json), ST_OK);
    assert_string_equal(json_string_value(json_object_get(json, "model")), "/models/policy");
    assert_int_equal(json_integer_value(json_object_get(json, "tp_degree")), 1);
    assert_int_equal(json_integer_value(json_object_get(json, "num_params")), 3);
    assert_true(json_is_true(json_object_get(json, "single_copy_enabled")));
    const json_t *mapping =
        json_object_get(json_object_get(json, "param_mappings"), "model.layers.1.weight");
    assert_string_equal(json_string_value(json_object_get(mapping, "dtype")), "torch.float32");
    const json_t *handle =
        json_object_get(json_object_get(json, "ipc_handles"), "model.layers.1.weight");
    assert_int_equal(json_integer_value(json_object_get(handle, "storage_offset")), ROWS * COLUMNS);
    assert_int_equal(json_integer_value(json_object_get(handle, "storage_size")),
                     f->roles[0].bytes);
    const char *b64 = json_string_value(json_object_get(handle, "ipc_handle_b64"));
    assert_int_equal(base64_decode(b64, &name), ST_OK);
    assert_string_equal(bytes_text(&name), arena_name);
    bytes_release(&name);
    json_decref(json);
    bridge_file_free(f);
}

// Each case changes one value, found by a path of keys and list positions ("a/0/b"), to JSON text
// (NULL: removes it), and says what the error must name.
static const struct {
    const char *at, *value;
    enum status st;
    const char *words;
} faults[] = {
    {"format_version", NULL, ST_FORMAT, "\"format_version\" is missing"},
    {"format_version", "2", ST_UNSUPPORTED, "\"format_version\" is 2"},
    {"boot_id", NULL, ST_FORMAT, "\"boot_id\" is missing"},
    {"pid", "0", ST_INVALID, "\"pid\" is 0"},
    {"pid", "\"x\"", ST_INVALID, "\"pid\" must be a whole number"},
    {"pid_start_time", NULL, ST_FORMAT, "pid_start_time"},
    {"device", "\"cuda:x\"", ST_FORMAT, "must be cpu or cuda:N"},
    {"device", "\"cuda:0\"", ST_MISMATCH, "kind posix-shm does not go with device"},
    {"device_uuid", "\"\"", ST_FORMAT, "\"device_uuid\" has 0 characters"},
    {"control_page", "7", ST_INVALID, "control_page"},
    {"socket", NULL, ST_FORMAT, "socket"},
    {"layout_hash", "\"cc\"", ST_MISMATCH, "layout_hash"},
    {"model", "\"other\"", ST_MISMATCH, "\"model\" is other"},
    {"tp_degree", "2", ST_UNSUPPORTED, "\"tp_degree\" is 2"},
    {"single_copy_enabled", "false", ST_UNSUPPORTED, "single_copy_enabled"},
    {"num_params", "4", ST_MISMATCH, "num_params"},
    {"segments", "[]", ST_FORMAT, "0 segments"},
    {"segments/0/kind", "\"carrier-pigeon\"", ST_UNSUPPORTED, "carrier-pigeon"},
    {"segments/0/bytes", "-1", ST_INVALID, "segments[0]: \"bytes\""},
    {"segments/0/bytes", "2048", ST_MISMATCH, "segment policy has 2048"},
    {"segments/0/role", "\"draft\"", ST_MISMATCH, "segments[0]: it is of role draft"},
    {"segments/1/handle", NULL, ST_FORMAT, "segments[1]: \"handle\" is missing"},
    {"segments/0/handle", "\"/elsewhere\"", ST_MISMATCH, "model.layers.0.weight: ipc_handle_b64"},
    {"segments/0/device_index", "0", ST_MISMATCH, "device_index"},
    {"roles", "{}", ST_FORMAT, "\"roles\" must be a list"},
    {"roles/0", "7", ST_FORMAT, "roles[0] is not an object"},
    {"roles/0/role", "\"draft\"", ST_FORMAT, "must be the policy"},
    {"roles/1/role", "\"policy\"", ST_FORMAT, "must be the policy"},
    {"roles/1/role", "\"king\"", ST_UNSUPPORTED, "king"},
    {"roles/0/segment", "2", ST_INVALID, "\"segment\" is 2"},
    {"roles/0/dtype", "\"torch.int7\"", ST_FORMAT, "torch.int7"},
    {"roles/0/dtype", "\"torch.bfloat16\"", ST_MISMATCH, "that of role policy torch.bfloat16"},
    {"roles/0/canary_offset", "1536000", ST_FORMAT, "canary_offset is 1536000"},
    {"roles/0/canary_offset", "1540", ST_FORMAT, "canary_offset"},
    {"roles/0/canary_offset", "0", ST_FORMAT, "lies over the canary"},
    {"roles/0/num_parameters", "5", ST_MISMATCH, "num_parameters is 5"},
    {"roles/0/num_params", "5", ST_MISMATCH, "num_params says 5"},
    {"roles/0/layout_hash", NULL, ST_FORMAT, "roles[0]: \"layout_hash\""},
    {"roles/1/ipc_handles", NULL, ST_FORMAT, "roles[1]: \"ipc_handles\""},
    {"param_names", "7", ST_FORMAT, "param_names"},
    {"param_names/1", "7", ST_FORMAT, "param_names[1]"},
    {"param_names/1", "\"stranger\"", ST_FORMAT, "stranger"},
    {"param_names/1", "\"model.layers.0.weight\"", ST_FORMAT, "lists model.layers.0.weight twice"},
    {"param_mappings/model.layers.1.weight", NULL, ST_MISMATCH, "2 in param_mappings"},
    {"param_mappings/model.layers.1.weight/shape", "[16, 9]", ST_MISMATCH,
     "layers.1.weight: its shape"},
    {"param_mappings/model.layers.1.weight/dtype", "\"torch.float16\"", ST_MISMATCH,
     "dtype is torch.float32, in param_mappings torch.float16"},
    {"param_mappings/model.layers.1.weight/device", "\"cuda:0\"", ST_MISMATCH,
     "device is \"cuda:0\""},
    {"ipc_handles/model.layers.1.weight/shape", "[16, 0]", ST_FORMAT, "\"shape\"[1]"},
    {"ipc_handles/model.layers.1.weight/shape", "[]", ST_FORMAT, "0 dimensions"},
    {"ipc_handles/model.layers.1.weight/shape", "[16]", ST_MISMATCH, "shape"},
    {"ipc_handles/model.layers.1.weight/stride", "[1, 16]", ST_UNSUPPORTED, "stride"},
    {"ipc_handles/model.layers.1.weight/stride", "[8]", ST_UNSUPPORTED, "stride"},
    {"ipc_handles/model.layers.1.weight/storage_offset", "1000", ST_FORMAT,
     "within segment policy"},
    {"ipc_handles/model.layers.1.weight/storage_offset", "9223372036854775807", ST_FORMAT,
     "within segment policy"},
    {"ipc_handles/model.layers.1.weight/storage_offset", "-1", ST_INVALID, "storage_offset"},
    {"ipc_handles/model.layers.1.weight/storage_offset", "130", ST_FORMAT, "overlap"},
    {"ipc_handles/model.layers.1.weight/storage_offset", "255", ST_FORMAT, "overlap"},
    {"ipc_handles/model.layers.2.weight/storage_offset", "300", ST_FORMAT, "lies over the canary"},
    {"ipc_handles/model.layers.1.weight/storage_size", "12", ST_MISMATCH, "storage_size"},
    {"ipc_handles/model.layers.1.weight/device_index", "3", ST_MISMATCH, "device_index"},
    {"ipc_handles/model.layers.1.weight/ipc_handle_b64", "\"AAAA\"", ST_MISMATCH, "ipc_handle_b64"},
    {"ipc_handles/model.layers.1.weight", "[]", ST_FORMAT, "no object in ipc_handles"},
};

// Sets or removes the value at the path; fails the test where there is no such place.
static void change(json_t *json, const char *at, const char *value)
{
    char keys[256], *rest = keys, *key;
    snprintf(keys, sizeof keys, "%s", at);
    json_t *new_value = value ? json_loads(value, JSON_DECODE_ANY, NULL) : NULL;
    assert_true(!value || new_value);
    while ((key = strsep(&rest, "/")) && rest)
        json = json_is_array(json) ? json_array_get(json, strtoul(key, NULL, 10))
                                   : json_object_get(json, key);
    assert_non_null(json);
    int failed;
    if (json_is_array(json))
        failed = json_array_set_new(json, strtoul(key, NULL, 10), new_value);
    else
        failed = value ? json_object_set_new(json, key, new_value) : json_object_del(json, key);
    assert_int_equal(failed, 0);
}

static void test_faults(void **state)
{
    (void)state;
    struct bridge_file *f = sample(3, true), *ret = NULL;
    json_t *good = NULL;
    assert_int_equal(bridge_file_write(f), ST_OK);
    bridge_file_free(f);
    assert_int_equal(json_read_file(bridge_path, 1 << 20, &good), ST_OK);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        json_t *json = json_deep_copy(good);
        change(json, faults[i].at, faults[i].value);
        char *text = json_dumps(json, 0);
        enum status st = bridge_file_parse("b.json", text, strlen(text), &ret);
        if (st != faults[i].st || !strstr(status_message(), faults[i].words) ||
            strncmp(status_message(), "b.json", 6) != 0)
            fail_msg("%s = %s: status %d: %s", faults[i].at, faults[i].value, st,
                     st ? status_message() : "");
        assert_null(ret);
        free(text);
        json_decref(json);
    }
    json_decref(good);
    // not even JSON, and cut off at every length
    struct bytes text = BYTES_INIT;
    assert_int_equal(file_read(bridge_path, 1 << 20, &text), ST_OK);
    for (size_t n = 0; n + 2 < text.len; n += 7)
        assert_int_equal(bridge_file_parse("b.json", text.data, n, &ret), ST_FORMAT);
    bytes_release(&text);
    assert_int_equal(bridge_file_parse("b.json", "[]", 2, &ret), ST_FORMAT);
    assert_int_equal(bridge_file_read("/no/such/bridge.json", &ret), ST_NOT_FOUND);
    assert_says("/no/such/bridge.json");
}

static void test_write_refuses(void **state)
{
    (void)state;
    struct bridge_file *f = sample(3, false);
    unlink(bridge_path);
    f->roles[0].tensors[1].offset -= 4;
    assert_int_equal(bridge_file_write(f), ST_FORMAT);
    assert_says("overlap");
    f->roles[0].tensors[1].offset += 2;
    assert_int_equal(bridge_file_write(f), ST_INVALID);
    assert_says("model.layers.1.weight");
    assert_false(file_exists(bridge_path));
    f->n_roles = 0;
    assert_int_equal(bridge_file_write(f), ST_INVALID);
    f->n_roles = 1;
    bridge_file_free(f);
}

static void put_file(const char *path)
{
    assert_int_equal(file_write_atomic(path, 0600, "{}", 2), ST_OK);
}

static void test_search_order(void **state)
{
    (void)state;
    char saved[4096], path[512], found[512], runtime[128], logs[128], set[128];
    snprintf(runtime, sizeof runtime, "%s/commonweight", folder);
    snprintf(logs, sizeof logs, "%s/vllm_bridge_config.json", folder);
    snprintf(set, sizeof set, "%s/set.json", folder);
    assert_non_null(getcwd(saved, sizeof saved));
    assert_int_equal(chdir(folder), 0);
    unlink(bridge_path);
    setenv("COMMONWEIGHT_BRIDGE", set, 1);
    setenv("LOGDIR", folder, 1);
    setenv("XDG_RUNTIME_DIR", folder, 1);
    enum status st = bridge_find(NULL, path, sizeof path);
    if (st == ST_OK) { // a daemon of this machine
        assert_string_equal(path, "/run/commonweight/bridge.json");
    } else {
        assert_int_equal(st, ST_NOT_FOUND);
        assert_says(set);
        assert_says(logs);
        assert_says("./bridge.json");
        assert_says("/run/commonweight/bridge.json");
    }
    // from the last to the first: each new one wins
    assert_int_equal(file_make_folders(runtime), ST_OK);
    snprintf(path, sizeof path, "%s/bridge.json", runtime);
    put_file(path);
    assert_int_equal(bridge_find(NULL, found, sizeof found), ST_OK);
    assert_string_equal(found, path);
    put_file("bridge.json");
    assert_int_equal(bridge_find(NULL, found, sizeof found), ST_OK);
    assert_string_equal(found, "./bridge.json");
    put_file(logs);
    assert_int_equal(bridge_find(NULL, found, sizeof found), ST_OK);
    assert_string_equal(found, logs);
    put_file(set);
    assert_int_equal(bridge_find(NULL, found, sizeof found), ST_OK);
    assert_string_equal(found, set);
    assert_int_equal(bridge_find(path, found, sizeof found), ST_OK);
    assert_string_equal(found, path);
    assert_int_equal(bridge_find("nowhere.json", found, sizeof found), ST_NOT_FOUND);
    assert_says("nowhere.json");
    unsetenv("COMMONWEIGHT_BRIDGE");
    unsetenv("LOGDIR");
    unsetenv("XDG_RUNTIME_DIR");
    assert_int_equal(chdir(saved), 0);
}

// ---- a daemon -----------------------------------------------------------------------------------

enum daemon_kind { HONEST, OTHER_MEMORY, DEAF, ONE_BYTE_OFF };

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
    struct bytes body = BYTES_INIT;
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
    bytes_release(&body);
}

// Never returns. Counts what the engine saw in the first two weights of tensor 1: updates and
// restores.
static void daemon_main(enum daemon_kind kind, int ready)
{
    struct device *dev = NULL;
    struct control *c = NULL;
    struct shared_memory *memory = NULL;
    struct bridge_file *f = sample(TENSORS, false);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (device_open("cpu", &dev) || shared_memory_create(dev, arena_name, ARENA_BYTES, &memory) ||
        control_create(page_name, f->roles[0].layout_hash, &c)) {
        fprintf(stderr, "daemon: %s\n", status_message());
        _exit(1);
    }
    float *weights = shared_memory_data(memory);
    for (int i = 0; i < CANARY / 4; i++) weights[i] = (float)i;
    control_owner_update_end(c);
    if (bridge_file_write(f)) _exit(2);
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%.90s", socket_path);
    unlink(socket_path);
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
            control_quiet_requested(c) ? control_grant_quiet(c) : control_check_writer(c);
        if (event == CONTROL_UPDATED) weights[ROWS * COLUMNS] += 1;
        if (event == CONTROL_TORN) {
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
    shm_unlink(arena_name);
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

static void test_publish(void **state)
{
    (void)state;
    pid_t pid = start_daemon(HONEST);
    struct bridge *b = NULL, *second = NULL;
    struct publish_times times = {0};
    if (bridge_attach(bridge_path, NULL, &b) != ST_OK) fail_msg("%s", status_message());
    assert_int_equal(bridge_file_of(b)->pid, pid);
    assert_int_equal(device_kind(bridge_device(b)), DEVICE_CPU);
    assert_null(bridge_base(b, "draft"));
    volatile float *weights = bridge_base(b, "policy");
    assert_true(weights[5] == 5);
    assert_int_equal(bridge_publish(b, 1000, add_hundred, (void *)weights, &times), ST_INVALID);
    assert_int_equal(bridge_become_writer(b), ST_OK);
    assert_int_equal(bridge_become_writer(b), ST_OK);

    // a second trainer is refused; a second reader on a device of its own is not
    struct device *dev = NULL;
    assert_int_equal(device_open("cpu", &dev), ST_OK);
    assert_int_equal(bridge_attach(bridge_path, dev, &second), ST_OK);
    assert_ptr_equal(bridge_device(second), dev);
    assert_int_equal(bridge_become_writer(second), ST_BUSY);
    bridge_detach(second);
    device_free(dev);

    for (int i = 0; i < 5; i++) {
        enum status st = bridge_publish(b, 5000, add_hundred, (void *)weights, &times);
        if (st != ST_OK) fail_msg("%s", status_message());
        assert_int_equal(control_version(bridge_control(b)), 4 + 2 * i);
        assert_true(times.total_ms >= times.wait_ms && times.total_ms >= times.write_ms);
    }
    assert_true(weights[0] == 500);
    struct control_facts f;
    clock_sleep_ms(250); // the heartbeat goes on by itself
    control_facts(bridge_control(b), &f);
    assert_true(f.writer_heartbeat_age_ms < 200);
    assert_true(weights[ROWS * COLUMNS] == ROWS * COLUMNS + 5);

    assert_int_equal(bridge_publish(b, 5000, fail_half_way, (void *)weights, &times), ST_DEVICE);
    assert_says("weights are torn");
    assert_says("the GPU fell off");
    int64_t deadline = clock_deadline_ns(5000);
    while (weights[ROWS * COLUMNS + 1] == ROWS * COLUMNS + 1 && clock_now_ns() < deadline)
        clock_sleep_ms(5);
    assert_true(weights[ROWS * COLUMNS + 1] == ROWS * COLUMNS + 2); // restored
    assert_int_equal(bridge_publish(b, 1000, add_hundred, (void *)weights, &times), ST_BUSY);
    bridge_detach(b);

    // a new writer goes on
    b = NULL;
    assert_int_equal(bridge_attach(bridge_path, NULL, &b), ST_OK);
    assert_int_equal(bridge_become_writer(b), ST_OK);
    weights = bridge_base(b, "policy");
    assert_int_equal(bridge_publish(b, 5000, add_hundred, (void *)weights, NULL), ST_OK);

    stop_daemon(pid);
    int64_t start = clock_now_ns();
    assert_int_equal(bridge_publish(b, 5000, add_hundred, (void *)weights, &times), ST_PEER_GONE);
    assert_true(clock_ms_since(start) < 2000);
    bridge_detach(b);
    bridge_detach(NULL);
}

// Rewrites one value of the file on disk.
static void change_file(const char *at, const char *value)
{
    json_t *json = NULL;
    assert_int_equal(json_read_file(bridge_path, 16 << 20, &json), ST_OK);
    change(json, at, value);
    assert_int_equal(json_write_file(bridge_path, 0600, json), ST_OK);
    json_decref(json);
}

static void test_attach_faults(void **state)
{
    (void)state;
    static const struct {
        const char *at, *value;
        enum status st;
        const char *words;
    } cases[] = {
        {"device_uuid", "\"cpu-other\"", ST_MISMATCH, "give both the same --device"},
        {"control_page", "\"/commonweight-test-nowhere\"", ST_NOT_FOUND,
         "commonweight-test-nowhere"},
        {"boot_id", "\"another\"", ST_MISMATCH, "was written in boot another"},
        {"pid_start_time", "1", ST_PEER_GONE, "given to another process"},
        {"pid", "4194305", ST_PEER_GONE, "is dead"},
    };
    pid_t pid = start_daemon(HONEST);
    struct bridge *b = NULL;
    struct bytes good = BYTES_INIT;
    assert_int_equal(file_read(bridge_path, 16 << 20, &good), ST_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        change_file(cases[i].at, cases[i].value);
        enum status st = bridge_attach(bridge_path, NULL, &b);
        if (st != cases[i].st) fail_msg("%s: %d: %s", cases[i].at, st, status_message());
        assert_says(cases[i].words);
        assert_null(b);
        assert_int_equal(file_write_atomic(bridge_path, 0600, good.data, good.len), ST_OK);
    }
    // the arena's name leads nowhere
    shm_unlink(arena_name);
    assert_int_equal(bridge_attach(bridge_path, NULL, &b), ST_NOT_FOUND);
    assert_says(arena_name);
    assert_says("segment policy");
    bytes_release(&good);
    stop_daemon(pid);
    assert_int_equal(bridge_attach(bridge_path, NULL, &b), ST_PEER_GONE);
    assert_null(b);
}

// ---- cw-ipc-check -------------------------------------------------------------------------------

static char checker[4096];

static bool find_checker(void) // beside the tests folder this program was built into
{
    ssize_t n = readlink("/proc/self/exe", checker, sizeof checker - 64);
    if (n <= 0) return false;
    checker[n] = 0;
    for (int i = 0; i < 3; i++) {
        char *slash = strrchr(checker, '/');
        if (!slash) return false;
        *slash = 0;
    }
    strcat(checker, "/cw-ipc-check");
    return file_exists(checker);
}

static int run_checker(const char *arguments, struct bytes *ret_output)
{
    char command[4400], part[4096];
    size_t n;
    snprintf(command, sizeof command, "'%s' %s 2>&1", checker, arguments);
    bytes_clear(ret_output);
    FILE *f = popen(command, "r");
    assert_non_null(f);
    while ((n = fread(part, 1, sizeof part, f)) > 0) bytes_append(ret_output, part, n);
    int status = pclose(f);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void check_output(const struct bytes *output, const char *words)
{
    if (!strstr(bytes_text(output), words))
        fail_msg("no \"%s\" in:\n%s", words, bytes_text(output));
}

static void test_checker(void **state)
{
    (void)state;
    struct bytes out = BYTES_INIT;
    char json_arguments[128];
    if (!find_checker()) {
        print_message("skipped: %s was not built\n", checker);
        skip();
    }
    snprintf(json_arguments, sizeof json_arguments, "--json %s", bridge_path);
    pid_t pid = start_daemon(HONEST);
    assert_int_equal(run_checker(bridge_path, &out), 0);
    print_message("%s", bytes_text(&out));
    check_output(&out, "ok    canary");
    check_output(&out, "400 tensors equal the daemon's at version 2");
    check_output(&out, "\nhealthy in ");

    assert_int_equal(run_checker(json_arguments, &out), 0);
    json_t *json = NULL;
    assert_int_equal(json_parse("output", bytes_text(&out), out.len, &json), ST_OK);
    assert_true(json_is_true(json_object_get(json, "ok")));
    assert_int_equal(json_integer_value(json_object_get(json, "weight_version")), 2);
    assert_true(json_is_null(json_object_get(json, "writer")));
    assert_int_equal(json_array_size(json_object_get(json, "checks")), 9);
    json_decref(json);

    // the lease's holder is told, not disturbed
    struct bridge *b = NULL;
    assert_int_equal(bridge_attach(bridge_path, NULL, &b), ST_OK);
    assert_int_equal(bridge_become_writer(b), ST_OK);
    float *weights = bridge_base(b, "policy");
    assert_int_equal(bridge_publish(b, 5000, add_hundred, weights, NULL), ST_OK);
    assert_int_equal(run_checker(bridge_path, &out), 0);
    check_output(&out, "writer pid");
    check_output(&out, "last publish     waited");
    assert_int_equal(bridge_publish(b, 5000, add_hundred, weights, NULL), ST_OK);
    assert_true(weights[0] == 200);
    bridge_detach(b);

    assert_int_equal(run_checker("--what", &out), 2);
    stop_daemon(pid);
    assert_int_equal(run_checker(bridge_path, &out), 1);
    check_output(&out, "FAIL  daemon");
    check_output(&out, "is dead; start cw-infer-server again");
    assert_int_equal(run_checker("/nowhere/bridge.json", &out), 1);
    check_output(&out, "/nowhere/bridge.json");

    pid = start_daemon(OTHER_MEMORY);
    assert_int_equal(run_checker(bridge_path, &out), 1);
    check_output(&out, "FAIL  canary");
    check_output(&out, "does not see what is written here");
    stop_daemon(pid);
    pid = start_daemon(DEAF);
    assert_int_equal(run_checker(bridge_path, &out), 1);
    check_output(&out, "its answer does not arrive");
    stop_daemon(pid);
    pid = start_daemon(ONE_BYTE_OFF);
    assert_int_equal(run_checker(json_arguments, &out), 1);
    check_output(&out, "1 of 400 tensors differ");
    check_output(&out, "model.layers.7.weight");
    stop_daemon(pid);
    bytes_release(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),    cmocka_unit_test(test_old_keys),
        cmocka_unit_test(test_faults),        cmocka_unit_test(test_write_refuses),
        cmocka_unit_test(test_search_order),  cmocka_unit_test(test_publish),
        cmocka_unit_test(test_attach_faults), cmocka_unit_test(test_checker),
    };
    return cmocka_run_group_tests_name("bridge", tests, make_names, remove_names);
}
