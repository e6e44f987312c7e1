/* test_base.c: what an adapter is trained on, and what each role's weights are said to be: adapters
 * of a base that was trained, recorded bases, and updates that are counted for the role that they
 * are of. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/bridge_file.h"
#include "tests/support/offline.h"
#include "tests/support/tiny_adapter.h"

#define LORA       "--lora-r 4 --lora-alpha 8 "
#define ALL_LINEAR "{\"r\":4,\"lora_alpha\":8,\"target_modules\":\"all-linear\"}"

static void restart(struct scene *s, const char *model, bool exact)
{
    daemon_start(&s->daemon, model,
                 JOIN(args("--dtype %s --max-adapters 4 --max-lora-rank 8", daemon_exact_dtype()),
                      exact ? args("--exact") : NULL));
}

static void open_trained(struct scene *s)
{
    scene_open(s);
    restart(s, s->model, false);
    assert_train(s, 0, "full", "--max-steps 3");
}

static void assert_role(const json_t *role, const char *origin, int updates, const char *run)
{
    assert_contains(text_of(role, "origin"), origin);
    assert_int_equal(int_of(role, "updates"), updates);
    assert_contains(text_of(role, "run"), run);
}

static json_t *read_json(const char *folder, const char *name)
{
    return json_of_file(test_path(folder, name));
}

// The last start in a run's run.json.
static json_t *last_start(const struct scene *s, const char *run)
{
    const json_t *starts = json_at(read_json(test_path(s->folder, run), "run.json"), "starts");
    return json_array_get(starts, json_array_size(starts) - 1);
}

// What the server says of its base.
static json_t *base_now(const struct scene *s)
{
    return json_at(daemon_get(s->daemon.socket, "/bridge/info?checksums=1", 200), "base");
}

static void same_checksum(const json_t *a, const json_t *b, bool same)
{
    assert_int_equal(strcmp(text_of(a, "checksum"), text_of(b, "checksum")) == 0, same);
}

static void load(const struct scene *s, const char *name, const char *folder, int status,
                 const char *part, bool has)
{
    struct wire_answer a;
    daemon_request(s->daemon.socket, "POST", "/v1/load_lora_adapter", "",
                   test_text("{\"lora_name\":\"%s\",\"lora_path\":\"%s\",\"load_inplace\":true}",
                             name, folder),
                   &a);
    if (a.status != status || (strstr(bytes_text(&a.body), part) != NULL) != has)
        fail_msg("%d %s", a.status, bytes_text(&a.body));
}

// An adapter's updates are the adapter's: the model keeps its own count, run and last checkpoint.
TEST_IN(each_role_has_its_own, open_trained)
{
    assert_train(s, 0, "lora", LORA "--max-steps 2 --start-from current");
    assert_role(json_at(daemon_get(s->daemon.socket, "/bridge/info", 200), "control"), s->model, 3,
                "/full");

    const char *const *check = OPTIONS(test_binary("cw-ipc-check"), s->daemon.bridge);
    assert_exit(0, scene_run(s, check));
    assert_said(s, "3 updates since ");
    assert_said(s, "by the run ");
    assert_said(s, "2 updates since "); // in the adapter's line
    const json_t *checked = json_of(test_output(0, JOIN(check, args("--json"))));
    assert_role(checked, s->model, 3, "/full");
    assert_role(json_at(checked, "roles.0"), s->model, 3, "/full");
    assert_role(json_at(checked, "roles.1"), "/lora/start", 2, "/lora");

    const json_t *weights = json_at(last_start(s, "lora"), "weights");
    assert_contains(text_of(weights, "folder"), "/lora/start");
    assert_int_equal(int_of(weights, "updates"), 0);

    // the warning of what is replaced names the model's last checkpoint, and no adapter's
    assert_train(s, 0, "next", "--max-steps 1");
    assert_said(s, "3 updates since ");
    assert_said(s, "/full/checkpoints/step-3");
    assert_false(said(s, "/lora/checkpoints"));
}

// A base that was trained is not what --start-from loaded means; it is named, and replaced by
// nobody but who asks for it.
TEST_IN(a_trained_base_is_refused, open_trained)
{
    json_t *trained = base_now(s);
    assert_train(s, 1, "a", LORA "--max-steps 1");
    assert_said(s, "--start-from current");
    assert_said(s, "POST /reload");
    assert_said(s, "3 updates since ");
    daemon_holds(&s->daemon, "policy", latest(s, "full"));
    assert_train(s, 0, "b", LORA "--max-steps 2 --start-from current");
    // it is a new adapter, which learns
    each_within(s, "b", "grad_norm", 2, DBL_MIN, INFINITY);
    // one that is held goes on as it is, and as whose it is
    assert_train(s, 0, "on", LORA "--max-steps 1 --start-from current");
    assert_said(s, "starts as it is served");
    test_same_file(latest(s, "b"), test_path(s->folder, "on/checkpoints/step-0"),
                   "adapter_model.safetensors");
    const json_t *weights = json_at(last_start(s, "on"), "weights");
    assert_int_equal(int_of(weights, "updates"), 2);
    assert_contains(text_of(weights, "last_run"), "/b");
    daemon_post(s->daemon.socket, "/reload", 200, "");
    json_t *loaded = base_now(s);
    same_checksum(trained, loaded, false);
    assert_int_equal(int_of(trained, "updates"), 3);
    assert_int_equal(int_of(loaded, "updates"), 0);
    assert_train(s, 0, "c", LORA "--max-steps 1");
}

// A base's folder, version, updates and checksum stand in run.json, in checkpoints, in RUN/start
// and beside what sft writes; PEFT's config has PEFT's keys.
TEST_IN(the_base_is_recorded, open_trained)
{
    json_t *now = base_now(s);
    assert_train(s, 0, "lora", LORA "--max-steps 1 --start-from current");
    json_t *start = last_start(s, "lora");
    json_t *state_json = read_json(latest(s, "lora"), "trainer/trainer_state.json");
    json_t *begun = read_json(test_path(s->folder, "lora/start"), "trainer/trainer_state.json");
    assert_true(json_equal(json_object_get(start, "base"), now));
    assert_true(json_equal(json_object_get(state_json, "base"), now));
    assert_true(json_equal(json_object_get(begun, "base"), now));
    assert_int_equal(int_of(now, "updates"), 3);
    assert_true(int_of(now, "version") > 2);
    assert_contains(text_of(now, "folder"), s->model);
    assert_null(json_object_get(read_json(latest(s, "lora"), "adapter_config.json"), "base"));
    // an adapter's own updates leave its base as it was
    json_t *after = base_now(s);
    same_checksum(after, now, true);
    assert_int_equal(int_of(after, "updates"), 3);

    // without a server: the model's folder, to the same checksum, where both are of one dtype
    if (!on_cpu()) return;
    restart(s, s->model, false);
    now = base_now(s);
    struct scene off;
    offline_scene_open(&off);
    off.model = s->model;
    offline_sums(&off, false, 8);
    const char *out = test_path(off.folder, "out");
    assert_offline(&off, 0, "sft", "run", LORA "--max-steps 1 --out %s", out);
    same_checksum(json_at(read_json(out, "trainer/trainer_state.json"), "base"), now, true);
    same_checksum(json_at(last_start(&off, "run"), "base"), now, true);
    load(s, "sft", out, 200, "Warning", false);
}

// Another base than the recorded one is told of where an adapter is loaded; --exact and --resume
// refuse it. A PEFT folder that records none is loaded as ever.
TEST_IN(another_base_is_told, open_trained)
{
    assert_train(s, 0, "lora", LORA "--max-steps 1 --start-from current");
    const char *adapter = latest(s, "lora"), *plain = test_folder();
    load(s, "same", adapter, 200, "Warning", false);
    assert_ok(tiny_adapter_write(plain, s->model, ALL_LINEAR, 3));

    restart(s, s->model, false); // the base as it was before the run "full"
    load(s, "other", adapter, 200, "Warning: ", true);
    load(s, "plain", plain, 200, "Warning", false);
    const char *body = test_text("{\"adapter_path\":\"%s\"}", adapter);
    json_t *answer = daemon_post(s->daemon.socket, "/lora/load", 200, body);
    assert_contains(text_of(answer, "warning"), "another base");
    assert_contains(test_read(s->daemon.log), "the adapter was trained on another base");
    assert_train(s, 1, "lora", "--max-steps 2 --resume");
    assert_said(s, "the adapter was trained on another base");
    assert_train(s, 0, "from", LORA "--max-steps 1 --start-from %s", adapter);
    assert_said(s, "warning: ");
    assert_said(s, "the adapter was trained on another base");

    restart(s, s->model, true);
    load(s, "other", adapter, 400, "the adapter was trained on another base", true);
    load(s, "other", adapter, 400, "\"param\":null", true); // of no field of the request
    load(s, "plain", plain, 200, "Warning", false);
    assert_train(s, 1, "exact", LORA "--exact --max-steps 1 --start-from %s", adapter);
    assert_said(s, "--exact: ");

    // where the base is the recorded one again, by its bytes, all is well
    restart(s, latest(s, "full"), true);
    load(s, "same", adapter, 200, "Warning", false);
    assert_train(s, 0, "lora", "--max-steps 2 --resume");
}

// An evaluation of an adapter on another model than it was trained on says so.
TEST_IN(an_evaluation_looks, offline_scene_open)
{
    offline_sums(s, false, 8);
    const char *out = test_path(s->folder, "out"), *other = daemon_model(test_folder(), true, 5);
    assert_offline(s, 0, "sft", "run", LORA "--max-steps 1 --out %s", out);
    assert_trainer(s, 0,
                   "eval --model %s --adapter %s --data %s --device cpu --max-completion-length 2 "
                   "--max-samples 2",
                   other, out, s->data);
    assert_said(s, "warning: ");
    assert_said(s, "the adapter was trained on another base");
}

// A base that stays as it is, is summed once, however often its adapters are replaced: what is put
// into its memory behind the server's back is not seen until it is loaded anew.
TEST_IN(a_base_is_summed_once, scene_open)
{
    struct bridge *bridge;
    restart(s, s->model, false);
    const char *adapter = test_folder();
    assert_ok(tiny_adapter_write(adapter, s->model, ALL_LINEAR, 3));
    load(s, "a", adapter, 200, "Warning", false);
    json_t *loaded = base_now(s);
    assert_ok(bridge_attach(s->daemon.bridge, NULL, &bridge));
    device_fill(bridge_device(bridge), bridge_base(bridge, "policy"), 0x3f, 4);
    assert_ok(device_sync(bridge_device(bridge)));
    load(s, "a", adapter, 200, "Warning", false);
    json_t *after = base_now(s);
    same_checksum(after, loaded, true);
    assert_true(int_of(after, "version") > int_of(loaded, "version"));
    assert_train(s, 0, "one", "--max-steps 1");
    same_checksum(base_now(s), loaded, false);
    daemon_post(s->daemon.socket, "/reload", 200, "");
    same_checksum(base_now(s), loaded, true);
    bridge_detach(bridge);
}

// A worker keeps the weights of the last step that it sampled. An adapter is not sampled by these,
// but by its base, once the worker has loaded that again.
TEST_IN(a_worker_has_the_same_base, scene_open)
{
    struct daemon worker = {0};
    restart(s, s->model, false);
    daemon_start(&worker, s->model,
                 args("--dtype %s --max-adapters 4 --max-lora-rank 8", daemon_exact_dtype()));
    assert_train(s, 0, "full", "--max-steps 3 --workers %s", worker.bridge);
    daemon_post(s->daemon.socket, "/reload", 200, "");
    assert_train(s, 1, "no", LORA "--max-steps 1 --workers %s", worker.bridge);
    assert_said(s, "cannot be used");
    assert_said(s, "the adapter was trained on another base");
    assert_said(s, "POST /reload {\"model\": FOLDER}");

    daemon_post(worker.socket, "/reload", 200, test_text("{\"model\":\"%s\"}", s->model));
    assert_train(s, 0, "yes", LORA "--max-steps 2 --workers %s", worker.bridge);
    each_within(s, "yes", "sampler_mismatch/max", 2, 0, 0);
}
