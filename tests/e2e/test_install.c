/* test_install.c: what `make install` puts into place and takes away, what goals install packages,
 * what make builds where there is a GPU and where there is none, and what the installed programs
 * need. Runs make on this build, with the variables of the make
 * that runs it, and so only under one. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/reward_one.h"
#include "tests/support/support.h"
#include <sys/stat.h>

static char build[PATH_MAX]; // this build's folder
static const char *log_path;

static void find_build(void)
{
    snprintf(build, sizeof build, "BUILD=%s", test_binary("cw-trainer"));
    *strrchr(build, '/') = '\0';
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

static int count_files(const char *folder)
{
    const char *command = test_text("find '%s' ! -type d | wc -l", folder);
    FILE *p = popen(command, "r");
    int n = -1;
    if (!p || fscanf(p, "%d", &n) != 1) fail_msg("%s", command);
    pclose(p);
    return n;
}

// With the installed header alone: the example, whose include is the only one it has of the tree.
static void builds_a_plugin(const char *root)
{
    char command[3 * PATH_MAX];
    const char *source = test_path(test_folder(), "plugin.c");
    snprintf(command, sizeof command,
             "sed 's|\"trainer/reward/reward_plugin.h\"|<commonweight-reward.h>|' "
             "'%s/trainer/examples/reward_balanced.c' > '%s' && cc -Wall -Werror -shared -fPIC "
             "-I'%s/usr/include' -o '%s.so' '%s'",
             test_root(), source, root, source, source);
    assert_int_equal(system(command), 0);
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
    static const char *const wanted[] = {
        "usr/bin/cw-infer-server",
        "usr/bin/cw-ipc-check",
        "usr/lib/libcommonweight-bridge.so",
        "usr/lib/libcommonweight-bridge.so.0",
        "usr/lib/pkgconfig/commonweight-bridge.pc",
        "usr/include/commonweight-bridge.h",
        "usr/include/commonweight-reward.h",
        "usr/lib/systemd/system/cw-infer-server.service",
        "usr/lib/systemd/system/cw-infer-server@.service",
        "usr/lib/sysusers.d/commonweight.conf",
        "usr/share/bash-completion/completions/cw-infer-server",
        "usr/share/doc/commonweight/examples/server.json",
        "usr/share/doc/commonweight/examples/train.sbatch",
        "usr/share/doc/commonweight/examples/kubernetes.yaml",
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if (access(test_path(root, wanted[i]), R_OK)) fail_msg("%s is not there", wanted[i]);
    builds_a_plugin(root);
    if (system("command -v help2man >/dev/null") == 0)
        assert_int_equal(access(test_path(root, "usr/share/man/man1/cw-trainer-train.1"), R_OK), 0);
    char *unit = test_read(test_path(root, "usr/lib/systemd/system/cw-infer-server.service"));
    assert_contains(unit, "ExecStart=/usr/bin/cw-infer-server");
    assert_null(strstr(unit, "@PREFIX"));
    assert_int_equal(run_make("uninstall", destination, "PREFIX=/usr"), 0);
    assert_int_equal(count_files(root), 0);
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
    char *before = strdup(getenv("PATH"));
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
    free(before);
}

/* What make would build (`make -n`), or with "-p" its variables, on a machine with the nvcc of
 * `folder`. The make that runs this test decides none of it. */
static void expect_plan(const char *folder, const char *const arguments[3],
                        const char *const wanted[3], const char *unwanted)
{
    char command[3 * PATH_MAX];
    snprintf(command, sizeof command,
             "cd '%s' && env -u MAKEFLAGS -u MAKELEVEL -u CUDA -u CUDA_ARCHS -u BUILD -u SANITIZE "
             "PATH='%s':\"$PATH\" make -n NO_INSTALL=1 %s %s %s > '%s' 2>&1",
             test_root(), folder, arguments[0], arguments[1] ? arguments[1] : "",
             arguments[2] ? arguments[2] : "", log_path);
    const int status = system(command);
    char *text = test_read(log_path);
    if (status != 0) fail_msg("%s: %s", command, text);
    for (int i = 0; i < 3 && wanted[i]; i++) assert_contains(text, wanted[i]);
    if (unwanted && strstr(text, unwanted)) fail_msg("%s has %s", command, unwanted);
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
    const char *command = test_text("nm '%s' > '%s'", test_binary("cw-ipc-check"), log_path);
    assert_int_equal(system(command), 0);
    char *symbols = test_read(log_path);
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
        char command[PATH_MAX + 64];
        snprintf(command, sizeof command,
                 "readelf -d '%s' | grep -E 'NEEDED.*(cublas|cudart|nvrtc)'",
                 test_binary(names[i]));
        assert_int_not_equal(system(command), 0);
    }
}

TESTS_BETWEEN(find_build, NULL)
