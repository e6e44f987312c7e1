/* test_trust.c: what another user made is refused; the dead's files are told from the living's by a
 * lock, whatever a pid seems to say; new files keep to the umask. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/bridge_file.h"
#include "bridge/control_page.h"
#include "kernels/device.h"
#include "tests/support/control_test.h"
#include "tests/support/loaded.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define STRANGER 65534

static void need_root(void)
{
    if (getuid() != 0) test_skip("only root can give files to another user");
}

static void give_away(const char *path)
{
    assert_int_equal(chown(path, STRANGER, (gid_t)-1), 0);
}

static const char *shm_path(const char *name)
{
    return test_path("/dev/shm", name + 1);
}

// ---- another user's ----------------------------------------------------------------------------

TEST(test_bridge_file_of_another)
{
    need_root();
    struct bridge_file *file = NULL;
    const char *path = test_path(test_folder(), "bridge.json");
    test_write(path, "{}", 2);
    assert_status(bridge_file_read(path, &file), ST_FORMAT); // ours: read
    give_away(path);
    assert_fails(bridge_file_read(path, &file), ST_MISMATCH, path);
    assert_message("belongs to user 65534");
    assert_null(file);
}

TEST(test_page_of_another)
{
    need_root();
    struct control *c = control_test_owner(), *other = NULL;
    give_away(shm_path(control_test_page));
    assert_fails(control_open(control_test_page, CONTROL_TEST_HASH, &other), ST_MISMATCH,
                 "belongs to user 65534");
    assert_status(control_create(control_test_page, CONTROL_TEST_HASH, &other), ST_MISMATCH);
    assert_null(other);
    control_test_end(c);
}

TEST(test_segment_of_another)
{
    need_root();
    struct shared_memory *made, *opened = NULL;
    char name[64];
    snprintf(name, sizeof name, "/commonweight-test-trust-%d", (int)getpid());
    struct device *dev = test_cpu();
    assert_ok(shared_memory_create(dev, name, 4096, &made));
    give_away(shm_path(name));
    assert_fails(shared_memory_open(dev, name, 4096, &opened), ST_MISMATCH,
                 "belongs to user 65534");
    assert_null(opened);
    shared_memory_free(made);
}

// ---- signs of life -----------------------------------------------------------------------------

// As the page of a daemon in another PID namespace: its pid is nobody's here.
TEST(test_page_of_another_namespace)
{
    struct control *c = control_test_owner(), *other = NULL;
    struct page *page = c->page;
    page->owner_pid = 0x3fffffff;
    page->owner_namespace ^= 1;
    assert_status(control_create(control_test_page, CONTROL_TEST_HASH, &other), ST_BUSY);
    assert_false(control_sweep(control_test_page));
    assert_true(file_exists(shm_path(control_test_page)));
    // and, killed, it is told to be dead without its pid
    page->owner_pid = getpid();
    assert_int_equal(flock(c->fd, LOCK_UN), 0);
    assert_true(control_sweep(control_test_page));
    assert_false(file_exists(shm_path(control_test_page)));
    assert_null(other);
    control_free(c);
}

TEST(test_killed_owner)
{
    struct control *c = control_test_owner(), *next = NULL; // takes a name, and leaves it
    control_test_end(c);
    pid_t pid = control_test_fork();
    if (pid == 0) {
        if (control_create(control_test_page, CONTROL_TEST_HASH, &next) != ST_OK) _exit(1);
        kill(getpid(), SIGKILL);
    }
    assert_int_equal(control_test_status(pid), 128 + SIGKILL);
    assert_ok(control_create(control_test_page, CONTROL_TEST_HASH, &next));
    assert_status(control_create(control_test_page, CONTROL_TEST_HASH, &c), ST_BUSY);
    control_test_end(next);
}

// ---- the umask ---------------------------------------------------------------------------------

TEST(test_umask)
{
    static const mode_t masks[] = {0, 022, 027, 077};
    const char *path = test_path(test_folder(), "file");
    mode_t before = umask(0);
    struct stat info;
    for (int i = 0; i < 4; i++) {
        umask(masks[i]);
        assert_ok(file_write_atomic(path, 0644, "x", 1));
        assert_int_equal(stat(path, &info), 0);
        assert_int_equal(info.st_mode & 0777, 0644 & ~masks[i]);
        assert_ok(file_write_atomic(path, 0600, "x", 1));
        assert_int_equal(stat(path, &info), 0);
        assert_int_equal(info.st_mode & 0777, 0600);
    }
    umask(before);
}

TEST(test_temporaries)
{
    const char *folder = test_folder(), *path = test_path(folder, "bridge.json");
    static const char *const left[] = {"bridge.json.tmp.012abc", "bridge.json.tmp.ffffff"};
    static const char *const others[] = {"bridge.json", "other.json.tmp.012abc",
                                         "bridge.json.tmp.0", "bridge.json.tmp.012abcd",
                                         "bridge.json.tmp.readme"};
    for (int i = 0; i < 2; i++) test_write(test_path(folder, left[i]), "x", 1);
    for (int i = 0; i < 5; i++) test_write(test_path(folder, others[i]), "x", 1);
    assert_int_equal(file_sweep_temporaries(path), 2);
    for (int i = 0; i < 2; i++) assert_false(file_exists(test_path(folder, left[i])));
    for (int i = 0; i < 5; i++) assert_true(file_exists(test_path(folder, others[i])));
}
