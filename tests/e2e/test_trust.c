/* test_trust.c: what a real cw-infer-server trusts, shows and leaves: links in the place of its
 * lock, other users' bridge files, bytes of files in errors, paths that are no UTF-8, what the
 * killed left. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "tests/support/daemon.h"

#include <fcntl.h>
#include <sys/mman.h>

static const char *model;

static void make_model(void)
{
    model = daemon_model(test_folder(), false, 7);
}

// The same daemon again: on the socket and bridge of one that has ended.
static void spawn_again(struct daemon *d)
{
    const char *const *argv = OPTIONS(test_binary("cw-infer-server"), "--model", model, "--device",
                                      test_device(), "--socket", d->socket, "--bridge", d->bridge);
    test_spawn(&d->child, d->log, argv);
}

TEST(test_lock_is_no_link)
{
    const char *folder = test_folder(), *victim = test_path(folder, "victim");
    struct daemon d = {.folder = folder,
                       .socket = test_path(folder, "s.sock"),
                       .bridge = test_path(folder, "b.json"),
                       .log = test_path(folder, "log")};
    assert_int_equal(symlink(victim, test_path(folder, "s.sock.lock")), 0);
    spawn_again(&d);
    assert_int_equal(test_wait(&d.child, 20000), 1);
    assert_contains(test_read(d.log), "it is a link");
    assert_false(file_exists(victim));
}

DAEMON_TEST(test_bridge_of_another, model, NULL)
{
    if (getuid() != 0) test_skip("only root can give files to another user");
    assert_int_equal(chown(d->bridge, 65534, (gid_t)-1), 0);
    assert_contains(test_output(1, args("%s %s", test_binary("cw-ipc-check"), d->bridge)),
                    "belongs to user 65534");
}

// POST /reload with a folder whose file of that name holds something else entirely.
static void reload_secret(struct daemon *d, const char *name, const char *secret)
{
    const char *folder = test_folder();
    unsigned long long first = 0;
    test_write(test_path(folder, name), secret, strlen(secret));
    json_t *a = daemon_post(d->socket, "/reload", 400, test_text("{\"model\":\"%s\"}", folder));
    const char *message = text_of(a, "error.message");
    assert_contains(message, "log");
    for (size_t at = 0; at + 3 <= strlen(secret); at++)
        if (memmem(message, strlen(message), secret + at, 3))
            fail_msg("\"%s\" shows \"%.3s\"", message, secret + at);
    memcpy(&first, secret, sizeof first);
    const char *number = test_text("%llu", first);
    assert_null(strstr(message, number)); // the first eight bytes as the length of a header
}

DAEMON_TEST(test_reload_tells_no_content, model, NULL)
{
    reload_secret(d, "model.safetensors", "Qzx7Kw9Vbn2Jy5PqLm8");
    reload_secret(d, "model.safetensors.index.json", "Qzx7Kw9Vbn2Jy5PqLm8");
    assert_contains(test_read(d->log), "/reload: "); // who runs it can find out
    daemon_get(d->socket, "/health", 200);
}

DAEMON_TEST(test_paths_of_any_bytes, model, NULL)
{
    struct bridge *bridge;
    const char *snapshot = test_path(test_folder(), "caf\xe9");
    assert_ok(file_make_folders(snapshot));
    assert_ok(bridge_attach(d->bridge, NULL, &bridge));
    assert_ok(bridge_become_writer(bridge));
    assert_ok(control_set_snapshot(bridge_control(bridge), snapshot));
    json_t *info = daemon_get(d->socket, "/bridge/info", 200);
    assert_contains(json_string_value(json_at(info, "control.snapshot")), "/caf?");
    bridge_detach(bridge);
}

// A page that its maker did not live to name, and half a bridge file.
DAEMON_TEST(test_temporaries_are_swept, model, NULL)
{
    static const char page[] = "/commonweight-0123456789abcdef-control.999999";
    assert_int_equal(daemon_stop(d), 0);
    const char *half = test_path(d->folder, "bridge.json.tmp.0a1b2c");
    test_write(half, "{", 1);
    int fd = shm_open(page, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0 && ftruncate(fd, 4096) == 0 && pwrite(fd, "CWEIGHTS", 8, 0) == 8);
    close(fd);
    spawn_again(d);
    daemon_wait(d);
    assert_false(file_exists(half));
    fd = shm_open(page, O_RDWR | O_CLOEXEC, 0);
    shm_unlink(page);
    assert_int_equal(fd, -1);
}

TESTS_BETWEEN(make_model, NULL)
