/* test_bridge_file.c: the bridge file: written, read back, found, and refused with the fault's
 * name; its list of roles. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/process.h"
#include "tests/support/bridge_sample.h"
#include "tests/support/support.h"

#include <sys/stat.h>
#include <sys/wait.h>

LATER(bridge_file_free)

// Freed with the test.
static struct bridge_file *sample(int n_tensors, bool draft)
{
    return test_later(bridge_sample(n_tensors, draft), bridge_file_free_later);
}

// Written, and read again.
static struct bridge_file *read_back(const struct bridge_file *f)
{
    struct bridge_file *again = NULL;
    assert_ok(bridge_file_write(f));
    assert_ok(bridge_file_read(bridge_names.file, &again));
    return test_later(again, bridge_file_free_later);
}

TEST(test_round_trip)
{
    struct bridge_file *f = sample(TENSORS, true);
    struct stat sb;
    struct bridge_file *again = read_back(f);
    assert_int_equal(stat(bridge_names.file, &sb), 0);
    assert_int_equal(sb.st_mode & 0777, 0600);
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
    assert_message("start cw-infer-server");

    pid_t pid = fork();
    if (pid == 0) _exit(0);
    siginfo_t info;
    f->pid = pid;
    f->pid_start_time = process_start_time(pid);
    waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT);
    assert_fails(bridge_file_check(f), ST_PEER_GONE, "is dead");
    waitpid(pid, NULL, 0);
}

// What tools for vLLM-style bridges read.
TEST(test_old_keys)
{
    struct bridge_file *f = sample(3, false);
    struct bytes name = BYTES_INIT;
    assert_ok(bridge_file_write(f));
    const json_t *json = json_of_file(bridge_names.file);
    assert_json(json, "{'model': '/models/policy', 'tp_degree': 1, 'num_params': 3,"
                      " 'single_copy_enabled': true,"
                      " 'param_mappings': {'model.layers.1.weight': {'dtype': 'torch.float32'}}}");
    const json_t *handle = json_object_get(json_at(json, "ipc_handles"), "model.layers.1.weight");
    assert_int_equal(int_of(handle, "storage_offset"), ROWS * COLUMNS);
    assert_int_equal(int_of(handle, "storage_size"), f->roles[0].bytes);
    assert_ok(base64_decode(text_of(handle, "ipc_handle_b64"), &name));
    assert_string_equal(test_keep(name.data), bridge_names.arena);
}

// Each case changes one value, found by a path of keys and list positions ("a/0/b"), to JSON text
// (NULL: removes it), and says what the error must name.
TEST(test_faults)
{
    const json_t *faults = test_rows("bridge_file", "test_faults");
    struct bridge_file *f = sample(3, true), *ret = NULL;
    assert_ok(bridge_file_write(f));
    json_t *good = json_of_file(bridge_names.file);
    for (size_t i = 0; i < json_array_size(faults); i++) {
        json_t *json = test_keep(json_deep_copy(good));
        bridge_change(json, row_text(faults, i, "at"), row_text(faults, i, "value"));
        const char *text = test_keep(json_dumps(json, 0));
        enum status st = bridge_file_parse("b.json", text, strlen(text), &ret);
        if (st != row_status(faults, i, "st") ||
            !strstr(status_message(), row_text(faults, i, "words")) ||
            strncmp(status_message(), "b.json", 6) != 0)
            fail_msg("%s = %s: status %d: %s", row_text(faults, i, "at"),
                     row_text(faults, i, "value"), st, st ? status_message() : "");
        assert_null(ret);
    }
    // not even JSON, and cut off at every length
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    assert_ok(file_read(bridge_names.file, 1 << 20, &text));
    for (size_t n = 0; n + 2 < text.len; n += 7)
        assert_int_equal(bridge_file_parse("b.json", text.data, n, &ret), ST_FORMAT);
    assert_int_equal(bridge_file_parse("b.json", "[]", 2, &ret), ST_FORMAT);
    assert_fails(bridge_file_read("/no/such/bridge.json", &ret), ST_NOT_FOUND,
                 "/no/such/bridge.json");
}

TEST(test_write_refuses)
{
    struct bridge_file *f = sample(3, false);
    unlink(bridge_names.file);
    f->roles[0].tensors[1].offset -= 4;
    assert_fails(bridge_file_write(f), ST_FORMAT, "overlap");
    f->roles[0].tensors[1].offset += 2;
    assert_fails(bridge_file_write(f), ST_INVALID, "model.layers.1.weight");
    assert_false(file_exists(bridge_names.file));
    f->n_roles = 0;
    assert_int_equal(bridge_file_write(f), ST_INVALID);
    f->n_roles = 1;
}

// Of a bf16 model: DeepSeek-V3's correction bias, which is f32, and no other tensor.
TEST(test_buffers_are_f32)
{
    struct bridge_file *f = sample(3, false);
    f->roles[0].dt = DT_BF16;
    for (int i = 0; i < 2; i++) {
        f->roles[0].tensors[i].dt = DT_BF16;
        f->roles[0].tensors[i].bytes /= 2;
    }
    assert_fails(bridge_file_write(f), ST_MISMATCH,
                 "dtype is torch.float32, that of role policy torch.bfloat16");
    f->roles[0].tensors[2].is_buffer = true;
    const struct bridge_file *again = read_back(f);
    assert_true(again->roles[0].tensors[2].is_buffer);
    assert_false(again->roles[0].tensors[1].is_buffer);
    f->roles[0].tensors[1].is_buffer = true;
    assert_fails(bridge_file_write(f), ST_MISMATCH,
                 "dtype is torch.bfloat16, that of buffers in role policy torch.float32");
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
        assert_message(logs);
        assert_message("./bridge.json");
        assert_message("/run/commonweight/bridge.json");
    }
    // from the last to the first: each new one wins
    assert_ok(file_make_folders(runtime));
    snprintf(path, sizeof path, "%s/bridge.json", runtime);
    const char *const places[] = {path, "./bridge.json", logs, set};
    for (int i = 0; i < 4; i++) {
        test_write(places[i], "{}", 2);
        assert_int_equal(chmod(places[i], 0600), 0);
        assert_ok(bridge_find(NULL, found, sizeof found));
        assert_string_equal(found, places[i]);
    }
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
    char value[160];
    assert_ok(bridge_file_write(sample(3, true)));
    json_t *json = json_of_file(bridge_names.file);
    snprintf(value, sizeof value, "\"%s\"", role);
    bridge_change(json, "roles/1/role", value);
    bridge_change(json, "segments/1/role", value);
    const char *text = test_keep(json_dumps(json, 0));
    const enum status st = bridge_file_parse("b.json", text, strlen(text), ret);
    if (st == ST_OK) test_later(*ret, bridge_file_free_later);
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
    }
    for (int i = 0; i < 5;
         i++) { // of a later server: what is known is there, and what is not is named
        assert_ok(read_renamed(unknown[i], &f));
        assert_int_equal(f->n_roles, 1);
        assert_string_equal(f->roles[0].role, "policy");
        assert_null(bridge_file_role(f, unknown[i]));
        assert_non_null(strstr(f->ignored, unknown[i]));
    }
}

TEST(test_adapters_have_names)
{
    struct bridge_file *f = sample(3, true);
    const size_t bytes = (size_t)f->roles[1].n_tensors * sizeof *f->roles[1].tensors;
    struct bridge_role *roles = realloc(f->roles, 3 * sizeof *roles);
    assert_non_null(roles);
    roles[2] = roles[1];
    roles[2].tensors = memcpy(malloc(bytes), roles[1].tensors, bytes);
    f->roles = roles;
    f->n_roles = 3;
    snprintf(roles[1].role, sizeof roles[1].role, "adapter:a");
    snprintf(roles[2].role, sizeof roles[2].role, "adapter:b");
    const struct bridge_file *again = read_back(f);
    assert_int_equal(again->n_roles, 3);
    assert_non_null(bridge_file_role(again, "adapter:b"));
    snprintf(roles[2].role, sizeof roles[2].role, "adapter:a");
    assert_fails(bridge_file_write(f), ST_FORMAT, "role adapter:a is there twice");
    snprintf(roles[2].role, sizeof roles[2].role, "spare");
    assert_fails(bridge_file_write(f), ST_INVALID, "no client knows the role \"spare\"");
}

TESTS_BETWEEN(bridge_sample_open, bridge_sample_close)
