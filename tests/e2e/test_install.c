/* test_install.c: what `make install` puts into place and takes away, what goals install packages,
 * and what the installed programs need. Runs make on this build, with the variables of the make
 * that runs it, and so only under one. */
#include "tests/support/reward_one.h"
#include "tests/support/support.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char build[PATH_MAX]; // this build's folder
static const char *log_path;

static int find_build(void **state)
{
    (void)state;
    snprintf(build, sizeof build, "BUILD=%s", test_binary("cw-trainer"));
    *strrchr(build, '/') = '\0';
    log_path = test_path(test_folder(), "make.log");
    return 0;
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
    char command[PATH_MAX + 64];
    snprintf(command, sizeof command, "find '%s' ! -type d | wc -l", folder);
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
    char name[PATH_MAX + 16];
    snprintf(name, sizeof name, "plugin:%s.so", source);
    struct reward *r;
    const struct reward_options options = {.names = name};
    const struct reward_input input = {.text = "(a[b])", .answer = ""};
    double score;
    assert_ok(reward_new(&options, &r));
    assert_ok(reward_score(r, &input, NULL, &score));
    assert_true(score == 1);
    reward_free(r);
}

static void installs_and_uninstalls(void **state)
{
    (void)state;
    want_make();
    const char *root = test_folder();
    char destination[PATH_MAX];
    snprintf(destination, sizeof destination, "DESTDIR=%s", root);
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
    free(unit);
    assert_int_equal(run_make("uninstall", destination, "PREFIX=/usr"), 0);
    assert_int_equal(count_files(root), 0);
}

// A folder with an apt-get and a sudo that leave a trace in it, for the front of PATH.
static const char *fake_packages(void)
{
    const char *folder = test_folder();
    char script[PATH_MAX + 32];
    snprintf(script, sizeof script, "#!/bin/sh\ntouch '%s/called'\nexit 1\n", folder);
    static const char *const names[] = {"apt-get", "sudo"};
    for (int i = 0; i < 2; i++) {
        test_write(test_path(folder, names[i]), script, strlen(script));
        char command[PATH_MAX + 16];
        snprintf(command, sizeof command, "chmod +x '%s/%s'", folder, names[i]);
        assert_int_equal(system(command), 0);
    }
    return folder;
}

static void only_building_installs_packages(void **state)
{
    (void)state;
    want_make();
    const char *fake = fake_packages(), *called = test_path(fake, "called");
    char path[PATH_MAX], other[PATH_MAX];
    char *before = strdup(getenv("PATH"));
    snprintf(path, sizeof path, "%s:%s", fake, before);
    snprintf(other, sizeof other, "BUILD=%s/none", fake);
    setenv("PATH", path, 1);
    setenv("PKG_CONFIG_LIBDIR", "/nowhere", 1); // every package seems to be missing
    unsetenv("PKG_CONFIG_PATH");
    assert_int_equal(run_make("help", other, NULL), 0);
    assert_int_equal(run_make("clean", other, "-n"), 0); // -n: it would take this build away
    assert_int_not_equal(run_make("install", other, NULL), 0);
    char *text = test_read(log_path);
    assert_contains(text, "libuv1-dev");
    free(text);
    assert_int_not_equal(run_make("all", other, "NO_INSTALL=1"), 0);
    assert_int_not_equal(access(called, F_OK), 0);
    assert_int_not_equal(run_make("all", other, NULL), 0);
    assert_int_equal(access(called, F_OK), 0); // this one tried to
    unsetenv("PKG_CONFIG_LIBDIR");
    setenv("PATH", before, 1);
    free(before);
}

// cw-ipc-check, cw-report and the library start where there is no CUDA library.
static void needs_no_cuda_library(void **state)
{
    (void)state;
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(installs_and_uninstalls),
        cmocka_unit_test(only_building_installs_packages),
        cmocka_unit_test(needs_no_cuda_library),
    };
    return cmocka_run_group_tests(tests, find_build, NULL);
}
