/* test_install.c: what `make install` puts into place and takes away, what goals install packages,
 * what make builds where there is a GPU and where there is none, and what the installed programs
 * need. Runs make on this build, with the variables of the make
 * that runs it, and so only under one. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/reward_one.h"
#include "tests/support/support.h"
#include <sys/stat.h>

static const char *build; // BUILD= this build's folder
static const char *log_path;

static void find_build(void)
{
    const char *program = test_binary("cw-trainer");
    build = test_text("BUILD=%.*s", (int)(strrchr(program, '/') - program), program);
    log_path = test_path(test_folder(), "make.log");
}

static void want_make(void)
{
    if (!getenv("MAKELEVEL")) test_skip("runs under make test: it needs that make's variables");
}

static int run_make(const char *goal, const char *a, const char *b)
{
    unlink(log_path);
    return test_command(log_path, 300000, OPTIONS("make", "-C", test_root(), build, goal, a, b));
}

// With the installed header alone: the example, whose include is the only one it has of the tree.
static void builds_a_plugin(const char *root)
{
    const char *source = test_path(test_folder(), "plugin.c");
    test_shell("sed 's|\"trainer/reward/reward_plugin.h\"|<commonweight-reward.h>|' "
               "'%s/trainer/examples/reward_balanced.c' > '%s' && cc -Wall -Werror -shared -fPIC "
               "-I'%s/usr/include' -o '%s.so' '%s'",
               test_root(), source, root, source, source);
    const char *name = test_text("plugin:%s.so", source);
    struct reward *r;
    const struct reward_options options = {.names = name};
    const struct reward_input input = {.text = "(a[b])", .answer = ""};
    double score;
    assert_ok(reward_new(&options, &r));
    assert_ok(reward_score(r, &input, NULL, &score));
    assert_true(score == 1);
    reward_free(r);
}

TEST(installs_and_uninstalls)
{
    want_make();
    const char *root = test_folder();
    const char *destination = test_text("DESTDIR=%s", root);
    if (run_make("install", destination, "PREFIX=/usr"))
        fail_msg("make install: %s", test_read(log_path));
    const json_t *wanted = test_rows("install", "installed");
    for (size_t i = 0; i < json_array_size(wanted); i++) {
        const char *file = json_string_value(json_array_get(wanted, i));
        if (access(test_path(root, file), R_OK)) fail_msg("%s is not there", file);
    }
    builds_a_plugin(root);
    if (system("command -v help2man >/dev/null") == 0)
        assert_int_equal(access(test_path(root, "usr/share/man/man1/cw-trainer-train.1"), R_OK), 0);
    char *unit = test_read(test_path(root, "usr/lib/systemd/system/cw-infer-server.service"));
    assert_contains(unit, "ExecStart=/usr/bin/cw-infer-server");
    assert_null(strstr(unit, "@PREFIX"));
    assert_int_equal(run_make("uninstall", destination, "PREFIX=/usr"), 0);
    assert_string_equal(test_shell("find '%s' ! -type d", root), "");
}

static void write_script(const char *folder, const char *name, const char *text)
{
    test_write(test_path(folder, name), text, strlen(text));
    assert_int_equal(chmod(test_path(folder, name), 0755), 0);
}

// A folder with an apt-get and a sudo that leave a trace in it, for the front of PATH.
static const char *fake_packages(void)
{
    const char *folder = test_folder();
    const char *script = test_text("#!/bin/sh\ntouch '%s/called'\nexit 1\n", folder);
    write_script(folder, "apt-get", script);
    write_script(folder, "sudo", script);
    return folder;
}

TEST(only_building_installs_packages)
{
    want_make();
    const char *fake = fake_packages(), *called = test_path(fake, "called");
    const char *before = test_text("%s", getenv("PATH"));
    const char *path = test_text("%s:%s", fake, before);
    const char *other = test_text("BUILD=%s/none", fake);
    setenv("PATH", path, 1);
    setenv("PKG_CONFIG_LIBDIR", "/nowhere", 1); // every package seems to be missing
    unsetenv("PKG_CONFIG_PATH");
    assert_int_equal(run_make("help", other, NULL), 0);
    assert_int_equal(run_make("clean", other, "-n"), 0); // -n: it would take this build away
    assert_int_not_equal(run_make("install", other, NULL), 0);
    assert_contains(test_read(log_path), "libuv1-dev");
    assert_int_not_equal(run_make("all", other, "NO_INSTALL=1"), 0);
    assert_int_not_equal(access(called, F_OK), 0);
    assert_int_not_equal(run_make("all", other, NULL), 0);
    assert_int_equal(access(called, F_OK), 0); // this one tried to
    unsetenv("PKG_CONFIG_LIBDIR");
    setenv("PATH", before, 1);
}

/* What make would build (`make -n`), or with "-p" its variables, on a machine with the nvcc of
 * `folder`. The make that runs this test decides none of it. */
static void expect_plan(const char *folder, const char *const arguments[3],
                        const char *const wanted[3], const char *unwanted)
{
    char *text = test_shell(
        "cd '%s' && env -u MAKEFLAGS -u MAKELEVEL -u CUDA -u CUDA_ARCHS -u BUILD -u SANITIZE "
        "PATH='%s':\"$PATH\" make -n NO_INSTALL=1 %s %s %s 2>&1",
        test_root(), folder, arguments[0], arguments[1] ? arguments[1] : "",
        arguments[2] ? arguments[2] : "");
    for (int i = 0; i < 3 && wanted[i]; i++) assert_contains(text, wanted[i]);
    if (unwanted && strstr(text, unwanted)) fail_msg("%s: %s", arguments[1], text);
}

#define WORDS(...) ((const char *const[3]){__VA_ARGS__})

TEST(gpu_decides_what_is_built)
{
    const char *folder = test_folder();
    const char *none = test_text("BUILD='%s/none'", folder);
    write_script(folder, "nvcc", "#!/bin/sh\nprintf 'compute_80\\ncompute_89\\ncompute_90\\n'\n");
    write_script(folder, "nvidia-smi", "#!/bin/sh\necho 8.9\n");
    static const char others[] = "\"make CUDA=1\" builds for another one",
                      own[] = "-gencode arch=compute_89,code=sm_89 -X",
                      all[] = "-gencode arch=compute_80,code=[sm_80,compute_80] "
                              "-gencode arch=compute_90a,code=sm_90a -X";
    expect_plan(folder, WORDS(none, "GPU="), WORDS(others, "-DCW_CUDA=0"), "-gencode");
    expect_plan(folder, WORDS(none, "GPU=", "CUDA=1"), WORDS(all, "-DCW_CUDA=1"), others);
    expect_plan(folder, WORDS(none, "GPU=yes"), WORDS(own, "-DCW_CUDA=1"), others);
    write_script(folder, "nvidia-smi", "#!/bin/sh\necho 12.0\n"); // which this nvcc does not know
    expect_plan(folder, WORDS(none, "GPU=yes"), WORDS(all), others);
    // build/ is the machine's own kind
    expect_plan(folder, WORDS("-p help", "GPU="), WORDS("\nKIND := \n"), NULL);
    expect_plan(folder, WORDS("-p help", "GPU=yes"), WORDS("\nKIND := \n"), NULL);
    expect_plan(folder, WORDS("-p help", "GPU=", "CUDA=1"), WORDS("\nKIND := -cuda\n"), NULL);
    expect_plan(folder, WORDS("-p help", "GPU=yes", "CUDA=0"), WORDS("\nKIND := -cpu\n"), NULL);
}

// It maps and compares memory: the kernels of an inference server are no part of it.
TEST(ipc_check_has_no_kernels)
{
    char *symbols = test_output(0, args("nm %s", test_binary("cw-ipc-check")));
    assert_contains(symbols, "cpu_checksum");
    assert_null(strstr(symbols, "cpu_matmul"));
    assert_null(strstr(symbols, "cuda_matmul"));
    assert_null(strstr(symbols, "cblas_"));
}

// cw-ipc-check, cw-report and the library start where there is no CUDA library.
TEST(needs_no_cuda_library)
{
    static const char *const names[] = {"cw-ipc-check", "cw-report", "cw-infer-server",
                                        "libcommonweight-bridge.so.0"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char *needed = test_output(0, args("readelf -d %s", test_binary(names[i])));
        static const char *const cuda[] = {"cublas", "cudart", "nvrtc"};
        assert_contains(needed, "NEEDED");
        for (int k = 0; k < 3; k++) assert_null(strstr(needed, cuda[k]));
    }
}

TESTS_BETWEEN(find_build, NULL)
