/* test_bridge_library.c: libcommonweight-bridge.so as other programs use it: loaded at run time,
 * its functions found by name, against a real server; and the examples that train from PyTorch and
 * from TRL. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/library/commonweight-bridge.h"
#include "tests/support/daemon.h"
#include <dlfcn.h>
#include <sys/wait.h>

static struct daemon server;

static struct { // the library's functions
    typeof(cw_bridge_open) *open;
    typeof(cw_bridge_close) *close;
    typeof(cw_bridge_message) *message;
    typeof(cw_bridge_error_words) *words;
    typeof(cw_bridge_tensor_count) *count;
    typeof(cw_bridge_tensor_at) *at;
    typeof(cw_bridge_version) *version;
    typeof(cw_bridge_check) *check;
    typeof(cw_bridge_take_lease) *take;
    typeof(cw_bridge_give_lease) *give;
    typeof(cw_bridge_publish) *publish;
    typeof(cw_bridge_set_snapshot) *snapshot;
} lib;

static void load_library(void)
{
    void *so = dlopen(test_binary("libcommonweight-bridge.so.0"), RTLD_NOW | RTLD_LOCAL);
    if (!so) fail_msg("%s", dlerror());
#define FIND(field, name) lib.field = (typeof(lib.field))dlsym(so, name)
    FIND(open, "cw_bridge_open");
    FIND(close, "cw_bridge_close");
    FIND(message, "cw_bridge_message");
    FIND(words, "cw_bridge_error_words");
    FIND(count, "cw_bridge_tensor_count");
    FIND(at, "cw_bridge_tensor_at");
    FIND(version, "cw_bridge_version");
    FIND(check, "cw_bridge_check");
    FIND(take, "cw_bridge_take_lease");
    FIND(give, "cw_bridge_give_lease");
    FIND(publish, "cw_bridge_publish");
    FIND(snapshot, "cw_bridge_set_snapshot");
#undef FIND
    assert_true(lib.open && lib.snapshot);
}

static void skip_on_gpu(void)
{
    if (!on_cpu())
        test_skip("writes the weights from the host; train_in_place.py does it on a GPU");
}

static struct cw_bridge *open_bridge(void)
{
    struct cw_bridge *bridge = NULL;
    if (lib.open(server.bridge, &bridge)) fail_msg("%s", lib.message());
    return bridge;
}

// Adds 1 to every element of the first tensor.
static int add_one(void *context)
{
    struct cw_bridge_tensor t;
    if (lib.at(context, "policy", 0, &t)) return 1;
    for (uint64_t i = 0; i < t.bytes / 4; i++) ((float *)t.data)[i] += 1;
    return 0;
}

static int add_one_and_fail(void *context)
{
    add_one(context);
    return 7;
}

TEST(publishes_in_place)
{
    skip_on_gpu();
    daemon_start(&server, daemon_model(test_folder(), false, 1), OPTIONS(NULL));
    struct cw_bridge *bridge = open_bridge();
    int n = lib.count(bridge, "policy");
    assert_true(n > 4);
    assert_int_equal(lib.count(bridge, "draft"), 0);
    struct cw_bridge_tensor t;
    assert_int_not_equal(lib.at(bridge, "policy", n, &t), 0);
    assert_contains(lib.message(), "has no tensor");
    assert_int_equal(lib.at(bridge, "policy", 0, &t), 0);
    assert_string_equal(t.dtype, "float32");
    assert_int_equal(t.device, -1);
    float first = *(float *)t.data;

    uint64_t version = lib.version(bridge);
    assert_int_not_equal(lib.publish(bridge, 5000, add_one, bridge, NULL), 0); // no lease
    assert_contains(lib.message(), "lease");
    assert_int_equal(lib.take(bridge), 0);
    assert_int_equal(lib.take(bridge), 0); // which changes nothing
    struct cw_bridge_times times;
    if (lib.publish(bridge, 10000, add_one, bridge, &times)) fail_msg("%s", lib.message());
    assert_int_equal(lib.version(bridge), version + 2);
    assert_true(times.total_ms >= times.write_ms);
    assert_true(*(float *)t.data == first + 1);
    // the engine says so from its next turn on
    const int64_t deadline = clock_deadline_ns(10000);
    for (uint64_t said = version; said != version + 2;) {
        said = (uint64_t)int_of(daemon_get(server.socket, "/health", 200), "weight_version");
        assert_true(clock_ms_until(deadline) > 0);
    }
    assert_int_equal(lib.check(bridge), 0);

    // The lease goes to one at a time, and can be given back.
    pid_t child = fork();
    if (child == 0) {
        struct cw_bridge *other = NULL;
        bool refused = lib.open(server.bridge, &other) == 0 && lib.take(other) != 0 &&
                       strcmp(lib.words(lib.take(other)), "busy") == 0;
        _exit(refused ? 0 : 1);
    }
    int exit_status = -1;
    assert_int_equal(waitpid(child, &exit_status, 0), child);
    assert_int_equal(exit_status, 0);
    lib.give(bridge);
    assert_int_not_equal(lib.publish(bridge, 5000, add_one, bridge, NULL), 0);
    assert_int_equal(lib.take(bridge), 0);
    lib.close(bridge);
}

// It would leave the twin of what it writes behind.
TEST(weights_with_a_twin_are_not_written)
{
    skip_on_gpu();
    daemon_start(&server, daemon_model(test_folder(), false, 1),
                 args("--quantization fp8-weights"));
    struct cw_bridge *bridge = open_bridge();
    assert_string_equal(lib.words(lib.take(bridge)), "not supported");
    assert_contains(lib.message(), "--quantization fp8-weights");
    lib.close(bridge);
}

TEST(a_failed_update_is_restored)
{
    skip_on_gpu();
    const char *model = daemon_model(test_folder(), false, 2);
    daemon_start(&server, model, OPTIONS(NULL));
    struct cw_bridge *bridge = open_bridge();
    assert_int_equal(lib.take(bridge), 0);
    assert_int_not_equal(lib.snapshot(bridge, "/nowhere"), 0);
    assert_contains(lib.message(), "/nowhere");
    assert_int_not_equal(lib.publish(bridge, 10000, add_one_and_fail, bridge, NULL), 0);
    assert_contains(lib.message(), "update() returned 7");
    for (int i = 0; i < 200 && lib.version(bridge) % 2; i++) usleep(50000);
    assert_int_equal(lib.version(bridge) % 2, 0);
    lib.close(bridge);
    daemon_wait(&server);
    daemon_holds(&server, "policy", model);
}

// A Python with these modules, for the server of the demo's model, which is started.
static const char *serve_demo(const char *modules)
{
    const char *python = test_python(modules);
    daemon_start(&server, test_path(test_root(), "tools/demo-model"), OPTIONS(NULL));
    setenv("HF_HUB_OFFLINE", "1", 1);
    setenv("TRL_EXPERIMENTAL_SILENCE", "1", 1);
    return python;
}

// The module finds the library beside the server on the PATH.
TEST(module_says_what_is_wrong)
{
#ifdef __SANITIZE_ADDRESS__
    test_skip("a Python cannot load a library that is built with AddressSanitizer");
#endif
    const char *python = serve_demo("ctypes");
    const char *script = test_path(test_root(), "tests/clients/bridge_module.py");
    char *text = test_output(0, args("env PATH=%s:%s %s -B %s %s", test_binary("."), getenv("PATH"),
                                     python, script, server.bridge));
    assert_contains(text, "bridge_module: PASS");
}

TEST(pytorch_trains_in_place)
{
    const char *python = serve_demo("torch, transformers");
    char *text = test_output(
        0, args("%s %s --bridge %s --library %s --prompt 27+35= --completion 99 --steps 20", python,
                test_path(test_root(), "python/train_in_place.py"), server.bridge,
                test_binary("libcommonweight-bridge.so.0")));
    assert_contains(text, "before: '52'"); // as README.md's first request gets it
    assert_contains(text, "after: '99' version 42");
}

// A program of tests/clients over TRL, on the CPU: it says "NAME: PASS".
static void trl_passes(const char *name)
{
    skip_on_gpu();
    const char *python = serve_demo("torch, transformers, trl");
    const char *program = test_text("tests/clients/%s.py", name);
    char *text = test_output(0, OPTIONS(python, test_path(test_root(), program), server.bridge,
                                        test_binary("libcommonweight-bridge.so.0"), test_folder()));
    assert_contains(text, test_text("%s: PASS", name));
}

// TRL's trainer around it wants CUDA.
TEST(trl_transfers_through_the_bridge)
{
    trl_passes("trl_weight_transfer");
}

TEST(trl_trains_in_place)
{
    trl_passes("trl_rollout");
}

TESTS_BETWEEN(load_library, NULL)
