/* test_base.c: what an adapter is trained on, and what each role's weights are said to be: adapters
 * of a base that was trained, recorded bases, and updates that are counted for the role that they
 * are of. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/bridge_file.h"
#include "tests/support/offline.h"
#include "tests/support/tiny_adapter.h"

#define LORA       "--lora-r", "4", "--lora-alpha", "8"
#define ALL_LINEAR "{\"r\":4,\"lora_alpha\":8,\"target_modules\":\"all-linear\"}"

static void restart(struct scene *s, const char *model, bool exact)
{
    daemon_kill(&s->daemon);
    daemon_start(&s->daemon, model,
                 OPTIONS("--dtype", daemon_exact_dtype(), "--max-adapters", "4", "--max-lora-rank",
                         "8", exact ? "--exact" : NULL));
}

static void open_trained(struct scene *s)
{
    scene_open(s);
    restart(s, s->model, false);
    assert_int_equal(train(s, "full", OPTIONS("--max-steps", "3")), 0);
}

static void assert_role(const json_t *role, const char *origin, int updates, const char *run)
{
    assert_non_null(json_string_value(json_object_get(role, "origin")));
    assert_contains(json_string_value(json_object_get(role, "origin")), origin);
    assert_int_equal(json_integer_value(json_object_get(role, "updates")), updates);
    assert_contains(json_string_value(json_object_get(role, "run")), run);
}

static json_t *read_json(const char *folder, const char *name)
{
    return json_of_file(test_path(folder, name));
}

// The last start in a run's run.json.
static json_t *last_start(const struct scene *s, const char *run)
{
    const json_t *starts =
        json_object_get(read_json(test_path(s->folder, run), "run.json"), "starts");
    return json_array_get(starts, json_array_size(starts) - 1);
}

// What the server says of its base.
static json_t *base_now(const struct scene *s)
{
    json_t *info = daemon_get(s->daemon.socket, "/bridge/info?checksums=1", 200);
    json_t *base = json_object_get(info, "base");
    assert_non_null(base);
    return base;
}

static void same_checksum(const json_t *a, const json_t *b, bool same)
{
    const char *x = json_string_value(json_object_get(a, "checksum"));
    const char *y = json_string_value(json_object_get(b, "checksum"));
    assert_true(x && y && (strcmp(x, y) == 0) == same);
}

static void load(const struct scene *s, const char *name, const char *folder, int status,
                 const char *part, bool has)
{
    char body[2 * PATH_MAX];
    struct wire_answer a;
    snprintf(body, sizeof body, "{\"lora_name\":\"%s\",\"lora_path\":\"%s\",\"load_inplace\":true}",
             name, folder);
    daemon_request(s->daemon.socket, "POST", "/v1/load_lora_adapter", "", body, &a);
    if (a.status != status || (strstr(bytes_text(&a.body), part) != NULL) != has)
        fail_msg("%d %s", a.status, bytes_text(&a.body));
}

// An adapter's updates are the adapter's: the model keeps its own count, run and last checkpoint.
TEST_IN(each_role_has_its_own, open_trained)
{
    assert_exit(
        0, train_alone(&s, "lora", OPTIONS(LORA, "--max-steps", "2", "--start-from", "current")));
    json_t *info = daemon_get(s.daemon.socket, "/bridge/info", 200);
    assert_role(json_object_get(info, "control"), s.model, 3, "/full");

    const char *log = test_path(s.folder, "check.log");
    assert_exit(0,
                test_command(log, LIMIT_MS, OPTIONS(test_binary("cw-ipc-check"), s.daemon.bridge)));
    char *text = test_read(log);
    assert_contains(text, "3 updates since ");
    assert_contains(text, "by the run ");
    assert_contains(text, "2 updates since "); // in the adapter's line
    const char *said_json = test_path(s.folder, "check.json");
    assert_exit(0, test_command(said_json, LIMIT_MS,
                                OPTIONS(test_binary("cw-ipc-check"), s.daemon.bridge, "--json")));
    json_t *check = read_json(s.folder, "check.json");
    const json_t *roles = json_object_get(check, "roles");
    assert_role(check, s.model, 3, "/full");
    assert_role(json_array_get(roles, 0), s.model, 3, "/full");
    assert_role(json_array_get(roles, 1), "/lora/start", 2, "/lora");

    json_t *start = last_start(&s, "lora");
    const json_t *weights = json_object_get(start, "weights");
    assert_contains(json_string_value(json_object_get(weights, "folder")), "/lora/start");
    assert_int_equal(json_integer_value(json_object_get(weights, "updates")), 0);

    // the warning of what is replaced names the model's last checkpoint, and no adapter's
    assert_int_equal(train_alone(&s, "next", OPTIONS("--max-steps", "1")), 0);
    assert_said(&s, "3 updates since ");
    assert_said(&s, "/full/checkpoints/step-3");
    assert_false(said(&s, "/lora/checkpoints"));
}

// A base that was trained is not what --start-from loaded means; it is named, and replaced by
// nobody but who asks for it.
TEST_IN(a_trained_base_is_refused, open_trained)
{
    json_t *trained = base_now(&s);
    assert_int_equal(train_alone(&s, "a", OPTIONS(LORA, "--max-steps", "1")), 1);
    assert_said(&s, "--start-from current");
    assert_said(&s, "POST /reload");
    assert_said(&s, "3 updates since ");
    daemon_holds(&s.daemon, "policy", latest(&s, "full"));
    assert_exit(0,
                train_alone(&s, "b", OPTIONS(LORA, "--max-steps", "2", "--start-from", "current")));
    // it is a new adapter, which learns
    double norm[2];
    assert_int_equal(column(&s, "b", "grad_norm", norm, 2), 2);
    assert_true(norm[0] > 0 && norm[1] > 0);
    // one that is held goes on as it is, and as whose it is
    assert_exit(
        0, train_alone(&s, "on", OPTIONS(LORA, "--max-steps", "1", "--start-from", "current")));
    assert_said(&s, "starts as it is served");
    test_same_file(latest(&s, "b"), test_path(s.folder, "on/checkpoints/step-0"),
                   "adapter_model.safetensors");
    json_t *start = last_start(&s, "on");
    const json_t *weights = json_object_get(start, "weights");
    assert_int_equal(json_integer_value(json_object_get(weights, "updates")), 2);
    assert_contains(json_string_value(json_object_get(weights, "last_run")), "/b");
    daemon_post(s.daemon.socket, "/reload", 200, "");
    json_t *loaded = base_now(&s);
    same_checksum(trained, loaded, false);
    assert_int_equal(json_integer_value(json_object_get(trained, "updates")), 3);
    assert_int_equal(json_integer_value(json_object_get(loaded, "updates")), 0);
    assert_int_equal(train_alone(&s, "c", OPTIONS(LORA, "--max-steps", "1")), 0);
}

// A base's folder, version, updates and checksum stand in run.json, in checkpoints, in RUN/start
// and beside what sft writes; PEFT's config has PEFT's keys.
TEST_IN(the_base_is_recorded, open_trained)
{
    json_t *now = base_now(&s);
    assert_exit(0, train(&s, "lora", OPTIONS(LORA, "--max-steps", "1", "--start-from", "current")));
    json_t *start = last_start(&s, "lora");
    json_t *state_json = read_json(latest(&s, "lora"), "trainer/trainer_state.json");
    json_t *begun = read_json(test_path(s.folder, "lora/start"), "trainer/trainer_state.json");
    assert_true(json_equal(json_object_get(start, "base"), now));
    assert_true(json_equal(json_object_get(state_json, "base"), now));
    assert_true(json_equal(json_object_get(begun, "base"), now));
    assert_int_equal(json_integer_value(json_object_get(now, "updates")), 3);
    assert_true(json_integer_value(json_object_get(now, "version")) > 2);
    assert_contains(json_string_value(json_object_get(now, "folder")), s.model);
    json_t *peft = read_json(latest(&s, "lora"), "adapter_config.json");
    assert_null(json_object_get(peft, "base"));
    // an adapter's own updates leave its base as it was
    json_t *after = base_now(&s);
    same_checksum(after, now, true);
    assert_int_equal(json_integer_value(json_object_get(after, "updates")), 3);

    // without a server: the model's folder, to the same checksum, where both are of one dtype
    if (strcmp(test_device(), "cpu") != 0) {
        scene_close(&s);
        return;
    }
    restart(&s, s.model, false);
    now = base_now(&s);
    struct scene off;
    offline_scene_open(&off);
    off.model = s.model;
    offline_sums(&off, false, 8);
    const char *out = test_path(off.folder, "out");
    assert_exit(0,
                offline_train(&off, "sft", "run", OPTIONS(LORA, "--max-steps", "1", "--out", out)));
    json_t *written = read_json(out, "trainer/trainer_state.json");
    start = last_start(&off, "run");
    same_checksum(json_object_get(written, "base"), now, true);
    same_checksum(json_object_get(start, "base"), now, true);
    load(&s, "sft", out, 200, "Warning", false);
}

// Another base than the recorded one is told of where an adapter is loaded; --exact and --resume
// refuse it. A PEFT folder that records none is loaded as ever.
TEST_IN(another_base_is_told, open_trained)
{
    assert_exit(0, train(&s, "lora", OPTIONS(LORA, "--max-steps", "1", "--start-from", "current")));
    const char *adapter = latest(&s, "lora"), *plain = test_folder();
    char body[2 * PATH_MAX];
    load(&s, "same", adapter, 200, "Warning", false);
    assert_ok(tiny_adapter_write(plain, s.model, ALL_LINEAR, 3));

    restart(&s, s.model, false); // the base as it was before the run "full"
    load(&s, "other", adapter, 200, "Warning: ", true);
    load(&s, "plain", plain, 200, "Warning", false);
    snprintf(body, sizeof body, "{\"adapter_path\":\"%s\"}", adapter);
    json_t *answer = daemon_post(s.daemon.socket, "/lora/load", 200, body);
    assert_contains(json_string_value(json_object_get(answer, "warning")), "another base");
    char *log = test_read(s.daemon.log);
    assert_contains(log, "the adapter was trained on another base");
    assert_int_equal(train_alone(&s, "lora", OPTIONS("--max-steps", "2", "--resume")), 1);
    assert_said(&s, "the adapter was trained on another base");
    assert_exit(
        0, train_alone(&s, "from", OPTIONS(LORA, "--max-steps", "1", "--start-from", adapter)));
    assert_said(&s, "warning: ");
    assert_said(&s, "the adapter was trained on another base");

    restart(&s, s.model, true);
    load(&s, "other", adapter, 400, "the adapter was trained on another base", true);
    load(&s, "plain", plain, 200, "Warning", false);
    assert_exit(1,
                train_alone(&s, "exact",
                            OPTIONS(LORA, "--exact", "--max-steps", "1", "--start-from", adapter)));
    assert_said(&s, "--exact: ");

    // where the base is the recorded one again, by its bytes, all is well
    restart(&s, latest(&s, "full"), true);
    load(&s, "same", adapter, 200, "Warning", false);
    assert_int_equal(train_alone(&s, "lora", OPTIONS("--max-steps", "2", "--resume")), 0);
}

// An evaluation of an adapter on another model than it was trained on says so.
TEST_IN(an_evaluation_looks, offline_scene_open)
{
    offline_sums(&s, false, 8);
    const char *out = test_path(s.folder, "out"), *log = test_path(s.folder, "eval.log");
    const char *other = daemon_model(test_folder(), true, 5);
    assert_exit(0,
                offline_train(&s, "sft", "run", OPTIONS(LORA, "--max-steps", "1", "--out", out)));
    assert_exit(0, test_command(log, LIMIT_MS,
                                OPTIONS(test_binary("cw-trainer"), "eval", "--model", other,
                                        "--adapter", out, "--data", s.data, "--device", "cpu",
                                        "--max-completion-length", "2", "--max-samples", "2")));
    char *text = test_read(log);
    assert_contains(text, "warning: ");
    assert_contains(text, "the adapter was trained on another base");
}

// A base that stays as it is, is summed once, however often its adapters are replaced: what is put
// into its memory behind the server's back is not seen until it is loaded anew.
TEST_IN(a_base_is_summed_once, scene_open)
{
    struct bridge *bridge;
    restart(&s, s.model, false);
    const char *adapter = test_folder();
    assert_ok(tiny_adapter_write(adapter, s.model, ALL_LINEAR, 3));
    load(&s, "a", adapter, 200, "Warning", false);
    json_t *loaded = base_now(&s);
    assert_ok(bridge_attach(s.daemon.bridge, NULL, &bridge));
    device_fill(bridge_device(bridge), bridge_base(bridge, "policy"), 0x3f, 4);
    assert_ok(device_sync(bridge_device(bridge)));
    load(&s, "a", adapter, 200, "Warning", false);
    json_t *after = base_now(&s);
    same_checksum(after, loaded, true);
    assert_true(json_integer_value(json_object_get(after, "version")) >
                json_integer_value(json_object_get(loaded, "version")));
    assert_true(train_alone(&s, "one", OPTIONS("--max-steps", "1")) == 0);
    json_t *trained = base_now(&s);
    same_checksum(trained, loaded, false);
    daemon_post(s.daemon.socket, "/reload", 200, "");
    json_t *again = base_now(&s);
    same_checksum(again, loaded, true);
    bridge_detach(bridge);
}

// A worker keeps the weights of the last step that it sampled. An adapter is not sampled by these,
// but by its base, once the worker has loaded that again.
TEST_IN(a_worker_has_the_same_base, scene_open)
{
    struct daemon worker = {0};
    restart(&s, s.model, false);
    daemon_start(
        &worker, s.model,
        OPTIONS("--dtype", daemon_exact_dtype(), "--max-adapters", "4", "--max-lora-rank", "8"));
    assert_int_equal(train(&s, "full", OPTIONS("--max-steps", "3", "--workers", worker.bridge)), 0);
    daemon_post(s.daemon.socket, "/reload", 200, "");
    assert_exit(
        1, train_alone(&s, "no", OPTIONS(LORA, "--max-steps", "1", "--workers", worker.bridge)));
    assert_said(&s, "cannot be used");
    assert_said(&s, "the adapter was trained on another base");
    assert_said(&s, "POST /reload {\"model\": FOLDER}");

    char body[PATH_MAX + 20];
    snprintf(body, sizeof body, "{\"model\":\"%s\"}", s.model);
    daemon_post(worker.socket, "/reload", 200, body);
    assert_exit(
        0, train_alone(&s, "yes", OPTIONS(LORA, "--max-steps", "2", "--workers", worker.bridge)));
    double mismatch[2];
    assert_int_equal(column(&s, "yes", "sampler_mismatch/max", mismatch, 2), 2);
    assert_true(mismatch[0] == 0 && mismatch[1] == 0);
}
