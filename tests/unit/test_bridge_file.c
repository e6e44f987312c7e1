/* test_bridge_file.c: the bridge file: written, read back, found, and refused with the fault's
 * name; its list of roles. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/process.h"
#include "tests/support/bridge_sample.h"
#include "tests/support/support.h"

#include <sys/stat.h>
#include <sys/wait.h>

TEST(test_round_trip)
{
    struct bridge_file *f = bridge_sample(TENSORS, true), *again = NULL;
    struct stat sb;
    assert_ok(bridge_file_write(f));
    assert_int_equal(stat(bridge_names.file, &sb), 0);
    assert_int_equal(sb.st_mode & 0777, 0600);
    int64_t start = clock_now_ns();
    if (bridge_file_read(bridge_names.file, &again) != ST_OK) fail_msg("%s", status_message());
    print_message("%d tensors read in %.1f ms\n", TENSORS + 2, clock_ms_since(start));
    assert_string_equal(again->path, bridge_names.file);
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
    assert_ok(bridge_file_check(again));

    again->pid_start_time++;
    assert_fails(bridge_file_check(again), ST_PEER_GONE, "given to another process");
    again->boot_id[0] ^= 1;
    assert_fails(bridge_file_check(again), ST_MISMATCH, "was written in boot");
    assert_says("start cw-infer-server");
    bridge_file_free(again);

    pid_t pid = fork();
    if (pid == 0) _exit(0);
    siginfo_t info;
    f->pid = pid;
    f->pid_start_time = process_start_time(pid);
    waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT);
    assert_fails(bridge_file_check(f), ST_PEER_GONE, "is dead");
    waitpid(pid, NULL, 0);
    bridge_file_free(f);
}

// What tools for vLLM-style bridges read.
TEST(test_old_keys)
{
    struct bridge_file *f = bridge_sample(3, false);
    json_t *json = NULL;
    struct bytes name = BYTES_INIT;
    assert_ok(bridge_file_write(f));
    assert_ok(json_read_file(bridge_names.file, 1 << 20, &json));
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
    assert_ok(base64_decode(b64, &name));
    assert_string_equal(bytes_text(&name), bridge_names.arena);
    bytes_release(&name);
    json_decref(json);
    bridge_file_free(f);
}

// Each case changes one value, found by a path of keys and list positions ("a/0/b"), to JSON text
// (NULL: removes it), and says what the error must name.
TEST(test_faults)
{
    const json_t *faults = test_rows("bridge_file", "test_faults");
    struct bridge_file *f = bridge_sample(3, true), *ret = NULL;
    json_t *good = NULL;
    assert_ok(bridge_file_write(f));
    bridge_file_free(f);
    assert_ok(json_read_file(bridge_names.file, 1 << 20, &good));
    for (size_t i = 0; i < json_array_size(faults); i++) {
        json_t *json = test_keep(json_deep_copy(good));
        bridge_change(json, row_text(faults, i, "at"), row_text(faults, i, "value"));
        char *text = json_dumps(json, 0);
        enum status st = bridge_file_parse("b.json", text, strlen(text), &ret);
        if (st != row_status(faults, i, "st") ||
            !strstr(status_message(), row_text(faults, i, "words")) ||
            strncmp(status_message(), "b.json", 6) != 0)
            fail_msg("%s = %s: status %d: %s", row_text(faults, i, "at"),
                     row_text(faults, i, "value"), st, st ? status_message() : "");
        assert_null(ret);
        free(text);
    }
    json_decref(good);
    // not even JSON, and cut off at every length
    struct bytes text = BYTES_INIT;
    assert_ok(file_read(bridge_names.file, 1 << 20, &text));
    for (size_t n = 0; n + 2 < text.len; n += 7)
        assert_int_equal(bridge_file_parse("b.json", text.data, n, &ret), ST_FORMAT);
    bytes_release(&text);
    assert_int_equal(bridge_file_parse("b.json", "[]", 2, &ret), ST_FORMAT);
    assert_fails(bridge_file_read("/no/such/bridge.json", &ret), ST_NOT_FOUND,
                 "/no/such/bridge.json");
}

TEST(test_write_refuses)
{
    struct bridge_file *f = bridge_sample(3, false);
    unlink(bridge_names.file);
    f->roles[0].tensors[1].offset -= 4;
    assert_fails(bridge_file_write(f), ST_FORMAT, "overlap");
    f->roles[0].tensors[1].offset += 2;
    assert_fails(bridge_file_write(f), ST_INVALID, "model.layers.1.weight");
    assert_false(file_exists(bridge_names.file));
    f->n_roles = 0;
    assert_int_equal(bridge_file_write(f), ST_INVALID);
    f->n_roles = 1;
    bridge_file_free(f);
}

static void put_file(const char *path)
{
    assert_ok(file_write_atomic(path, 0600, "{}", 2));
}

// Of a bf16 model: DeepSeek-V3's correction bias, which is f32, and no other tensor.
TEST(test_buffers_are_f32)
{
    struct bridge_file *f = bridge_sample(3, false), *again = NULL;
    f->roles[0].dt = DT_BF16;
    for (int i = 0; i < 2; i++) {
        f->roles[0].tensors[i].dt = DT_BF16;
        f->roles[0].tensors[i].bytes /= 2;
    }
    assert_fails(bridge_file_write(f), ST_MISMATCH,
                 "dtype is torch.float32, that of role policy torch.bfloat16");
    f->roles[0].tensors[2].is_buffer = true;
    assert_ok(bridge_file_write(f));
    assert_ok(bridge_file_read(bridge_names.file, &again));
    assert_true(again->roles[0].tensors[2].is_buffer);
    assert_false(again->roles[0].tensors[1].is_buffer);
    f->roles[0].tensors[1].is_buffer = true;
    assert_fails(bridge_file_write(f), ST_MISMATCH,
                 "dtype is torch.bfloat16, that of buffers in role policy torch.float32");
    bridge_file_free(again);
    bridge_file_free(f);
}

TEST(test_search_order)
{
    char saved[4096], path[512], found[512], runtime[128], logs[128], set[128];
    snprintf(runtime, sizeof runtime, "%s/commonweight", bridge_names.folder);
    snprintf(logs, sizeof logs, "%s/vllm_bridge_config.json", bridge_names.folder);
    snprintf(set, sizeof set, "%s/set.json", bridge_names.folder);
    assert_non_null(getcwd(saved, sizeof saved));
    assert_int_equal(chdir(bridge_names.folder), 0);
    unlink(bridge_names.file);
    setenv("COMMONWEIGHT_BRIDGE", set, 1);
    setenv("LOGDIR", bridge_names.folder, 1);
    setenv("XDG_RUNTIME_DIR", bridge_names.folder, 1);
    enum status st = bridge_find(NULL, path, sizeof path);
    if (st == ST_OK) { // a daemon of this machine
        assert_string_equal(path, "/run/commonweight/bridge.json");
    } else {
        assert_fails(st, ST_NOT_FOUND, set);
        assert_says(logs);
        assert_says("./bridge.json");
        assert_says("/run/commonweight/bridge.json");
    }
    // from the last to the first: each new one wins
    assert_ok(file_make_folders(runtime));
    snprintf(path, sizeof path, "%s/bridge.json", runtime);
    put_file(path);
    assert_ok(bridge_find(NULL, found, sizeof found));
    assert_string_equal(found, path);
    put_file("bridge.json");
    assert_ok(bridge_find(NULL, found, sizeof found));
    assert_string_equal(found, "./bridge.json");
    put_file(logs);
    assert_ok(bridge_find(NULL, found, sizeof found));
    assert_string_equal(found, logs);
    put_file(set);
    assert_ok(bridge_find(NULL, found, sizeof found));
    assert_string_equal(found, set);
    assert_ok(bridge_find(path, found, sizeof found));
    assert_string_equal(found, path);
    assert_fails(bridge_find("nowhere.json", found, sizeof found), ST_NOT_FOUND, "nowhere.json");
    unsetenv("COMMONWEIGHT_BRIDGE");
    unsetenv("LOGDIR");
    unsetenv("XDG_RUNTIME_DIR");
    assert_int_equal(chdir(saved), 0);
}

// ---- roles --------------------------------------------------------------------------------------

// Writes the sample, renames its draft in the file, and reads that.
static enum status read_renamed(const char *role, struct bridge_file **ret)
{
    struct bridge_file *f = bridge_sample(3, true);
    json_t *json = NULL;
    char value[160];
    assert_ok(bridge_file_write(f));
    bridge_file_free(f);
    assert_ok(json_read_file(bridge_names.file, 1 << 20, &json));
    snprintf(value, sizeof value, "\"%s\"", role);
    bridge_change(json, "roles/1/role", value);
    bridge_change(json, "segments/1/role", value);
    char *text = json_dumps(json, 0);
    enum status st = bridge_file_parse("b.json", text, strlen(text), ret);
    free(text);
    json_decref(json);
    return st;
}

TEST(test_roles_are_a_list)
{
    static const char *const known[] = {"draft", "reference", "frozen", "adapter:maths"};
    static const char *const unknown[] = {"king", "adapter", "adapter:", "drafts", "Draft"};
    struct bridge_file *f = NULL;
    for (int i = 0; i < 4; i++) {
        assert_ok(read_renamed(known[i], &f));
        assert_int_equal(f->n_roles, 2);
        assert_ptr_equal(bridge_file_role(f, known[i]), &f->roles[1]);
        assert_string_equal(f->ignored, "");
        bridge_file_free(f);
    }
    for (int i = 0; i < 5;
         i++) { // of a later server: what is known is there, and what is not is named
        assert_ok(read_renamed(unknown[i], &f));
        assert_int_equal(f->n_roles, 1);
        assert_string_equal(f->roles[0].role, "policy");
        assert_null(bridge_file_role(f, unknown[i]));
        assert_non_null(strstr(f->ignored, unknown[i]));
        bridge_file_free(f);
    }
}

TEST(test_adapters_have_names)
{
    struct bridge_file *f = bridge_sample(3, true), *again = NULL;
    struct bridge_role *roles = calloc(3, sizeof *roles);
    memcpy(roles, f->roles, 2 * sizeof *roles);
    roles[2] = roles[1];
    roles[2].tensors = calloc((size_t)roles[1].n_tensors, sizeof *roles[2].tensors);
    memcpy(roles[2].tensors, roles[1].tensors,
           (size_t)roles[1].n_tensors * sizeof *roles[2].tensors);
    free(f->roles);
    f->roles = roles;
    f->n_roles = 3;
    snprintf(roles[1].role, sizeof roles[1].role, "adapter:a");
    snprintf(roles[2].role, sizeof roles[2].role, "adapter:b");
    assert_ok(bridge_file_write(f));
    assert_ok(bridge_file_read(bridge_names.file, &again));
    assert_int_equal(again->n_roles, 3);
    assert_non_null(bridge_file_role(again, "adapter:b"));
    bridge_file_free(again);
    snprintf(roles[2].role, sizeof roles[2].role, "adapter:a");
    assert_fails(bridge_file_write(f), ST_FORMAT, "role adapter:a is there twice");
    snprintf(roles[2].role, sizeof roles[2].role, "spare");
    assert_fails(bridge_file_write(f), ST_INVALID, "no client knows the role \"spare\"");
    bridge_file_free(f);
}

TESTS_BETWEEN(bridge_sample_open, bridge_sample_close)
