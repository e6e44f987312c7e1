/* test_file.c: common/base/file.h: reading, mapping, atomic writing and what its failures leave. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"

#include <dirent.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

static int count_entries(const char *folder)
{
    DIR *dir = opendir(folder);
    assert_non_null(dir);
    int n = -2; // "." and ".."
    while (readdir(dir)) n++;
    closedir(dir);
    return n;
}

static void assert_content(const char *path, const char *wanted)
{
    char *text = test_read(path);
    assert_string_equal(text, wanted);
}

TEST(write_and_read)
{
    const char *folder = test_folder(), *path = test_path(folder, "a");
    struct stat info;
    assert_ok(file_write_atomic(path, 0600, "first", 5));
    assert_content(path, "first");
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_mode & 07777, 0600);
    assert_ok(file_write_atomic(path, 0644, "", 0));
    assert_content(path, "");
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_mode & 07777, 0644);
    assert_int_equal(count_entries(folder), 1);
    assert_true(file_exists(path));
    assert_false(file_exists(test_path(folder, "b")));
}

TEST(read_limits_and_errors)
{
    const char *folder = test_folder(), *path = test_path(folder, "a"),
               *fifo = test_path(folder, "f");
    SCOPED(bytes_release) struct bytes b = BYTES_INIT;
    bytes_puts(&b, "untouched");
    test_write(path, "12345", 5);
    assert_fails(file_read(path, 4, &b), ST_FORMAT, path);
    assert_fails(file_read(test_path(folder, "missing"), 10, &b), ST_NOT_FOUND, "missing");
    assert_fails(file_read(folder, 10, &b), ST_IO, "folder");
    assert_int_equal(mkfifo(fifo, 0600), 0);
    assert_status(file_read(fifo, 10, &b), ST_IO); // and does not hang
    assert_string_equal(bytes_text(&b), "untouched");
    assert_ok(file_read(path, 5, &b));
    assert_string_equal(bytes_text(&b), "12345");
    assert_ok(file_read("/proc/self/stat", 4096, &b)); // says it has 0 bytes
    assert_true(b.len > 10);
    assert_status(file_read("/proc/self/stat", 10, &b), ST_FORMAT);
}

static enum status no_line(void *context, const char *line, size_t len)
{
    (void)context;
    (void)line;
    (void)len;
    return ST_OK;
}

// What is no file of lines neither hangs nor fills the memory; what cannot be there is not found.
TEST(lines_of_no_file)
{
    const char *folder = test_folder(), *path = test_path(folder, "lines");
    SCOPED(bytes_release) struct bytes b = BYTES_INIT;
    char name[400];
    assert_int_equal(symlink("/dev/zero", path), 0);
    assert_fails(file_each_line(path, no_line, NULL), ST_IO, "a special file, not a regular file");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_fails(file_each_line(path, no_line, NULL), ST_IO, path);
    assert_status(file_read(test_path(path, "below"), 10, &b), ST_NOT_FOUND);
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    assert_status(file_read(test_path(folder, name), 10, &b), ST_NOT_FOUND);
}

TEST(lines_that_begin_a_file)
{
    static const struct {
        size_t max;
        const char *text;
    } cases[] = {{0, ""}, {2, ""}, {3, "ab\n"}, {6, "ab\n"}, {7, "ab\ncde\n"}, {8, "ab\ncde\nf"}};
    const char *folder = test_folder(), *path = test_path(folder, "a");
    SCOPED(bytes_release) struct bytes b = BYTES_INIT;
    int64_t left_out = -1;
    test_write(path, "ab\ncde\nf", 8);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_ok(file_read_start(path, cases[i].max, &b, &left_out));
        assert_string_equal(bytes_text(&b), cases[i].text);
        assert_int_equal(left_out, 8 - b.len);
    }
    assert_status(file_read_start(test_path(folder, "b"), 9, &b, &left_out), ST_NOT_FOUND);
    assert_string_equal(bytes_text(&b), "ab\ncde\nf");
}

TEST(failed_write_leaves_old_file)
{
    const char *folder = test_folder(), *path = test_path(folder, "a");
    assert_ok(file_write_atomic(path, 0600, "old", 3));

    // the disk refuses half way: a file size limit gives EFBIG after its first 4096 bytes
    static char large[65536];
    struct rlimit before, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = before;
    small.rlim_cur = 4096;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    enum status st = file_write_atomic(path, 0600, large, sizeof large);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_int_equal(st, ST_IO);
    assert_message(path);
    assert_content(path, "old");
    assert_int_equal(count_entries(folder), 1);

    // the name is taken by a folder
    const char *taken = test_path(folder, "taken");
    assert_ok(file_make_folders(taken));
    assert_status(file_write_atomic(taken, 0600, "x", 1), ST_IO);
    assert_int_equal(count_entries(folder), 2);

    assert_status(file_write_atomic(test_path(folder, "no/such/a"), 0600, "x", 1), ST_NOT_FOUND);
}

// A writer that is killed at any moment leaves one of its two contents, whole.
TEST(killed_writer_leaves_whole_file)
{
    enum { LENGTH = 300000 };
    const char *path = test_path(test_folder(), "a");
    char *content = test_keep(malloc(LENGTH));
    assert_non_null(content);
    memset(content, 'a', LENGTH);
    assert_ok(file_write_atomic(path, 0600, content, LENGTH));
    for (int trial = 0; trial < 10; trial++) {
        pid_t pid = fork();
        if (pid == 0) {
            for (int i = 0;; i++) {
                memset(content, 'a' + i % 26, LENGTH);
                if (file_write_atomic(path, 0600, content, LENGTH) != ST_OK) _exit(1);
            }
        }
        usleep(3000 + (useconds_t)trial * 1700);
        kill(pid, SIGKILL);
        int status;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFSIGNALED(status));
        SCOPED(bytes_release) struct bytes b = BYTES_INIT;
        assert_ok(file_read(path, LENGTH, &b));
        assert_int_equal(b.len, LENGTH);
        for (size_t i = 1; i < LENGTH; i++)
            if (b.data[i] != b.data[0]) fail_msg("mixed content at byte %zu", i);
    }
}

TEST(map)
{
    const char *folder = test_folder(), *path = test_path(folder, "a");
    struct file_map map = {0};
    test_write(path, "hello", 5);
    assert_ok(file_map_open(path, &map));
    assert_int_equal(map.len, 5);
    assert_memory_equal(map.data, "hello", 5);
    file_map_release(&map);
    file_map_release(&map);
    file_map_release(NULL);
    test_write(path, "", 0);
    assert_ok(file_map_open(path, &map));
    assert_null(map.data);
    assert_int_equal(map.len, 0);
    assert_status(file_map_open(folder, &map), ST_IO);
    assert_status(file_map_open(test_path(folder, "b"), &map), ST_NOT_FOUND);
}

TEST(folders)
{
    const char *folder = test_folder(), *deep = test_path(folder, "a//b/c/");
    assert_ok(file_make_folders(deep));
    assert_ok(file_make_folders(deep));
    assert_ok(file_make_folders("/"));
    test_write(test_path(folder, "a/b/file"), "x", 1);
    assert_fails(file_make_folders(test_path(folder, "a/b/file/d")), ST_IO, "a/b/file");
    assert_ok(file_sync_folder(deep));
    assert_status(file_sync_folder(test_path(folder, "z")), ST_NOT_FOUND);

    // a link out of the tree is removed, not followed
    const char *other = test_folder(), *outside = test_path(other, "kept");
    test_write(outside, "x", 1);
    assert_int_equal(symlink(other, test_path(folder, "a/link")), 0);
    assert_ok(file_remove_tree(test_path(folder, "a")));
    assert_false(file_exists(test_path(folder, "a")));
    assert_true(file_exists(outside));
    assert_ok(file_remove_tree(test_path(folder, "a")));
}

TEST(join)
{
    static const char *const cases[][3] = {
        {"a", "b", "a/b"}, {"a/", "b", "a/b"}, {"", "b", "b"}, {"/", "b", "/b"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char path[PATH_ROOM];
        assert_ok(path_put(path, cases[i][0], "%s", cases[i][1]));
        assert_string_equal(path, cases[i][2]);
    }
}

// ---- what killed processes leave ----------------------------------------------------------------

TEST(of_no_process)
{
    const char *folder = test_folder();
    char mine[64], temporary[64], made[PATH_ROOM], again[PATH_ROOM];
    snprintf(mine, sizeof mine, ".model.%d.new", (int)getpid());
    snprintf(temporary, sizeof temporary, "out.jsonl.tmp.%06x", (unsigned)getpid());
    const char *const gone[] = {".model.3999999.new", ".model.sub.3999999.new",
                                "out.jsonl.tmp.3d08ff", "step-7.jsonl.tmp.3d08ff",
                                "kind-00ff00-3999999"};
    const char *const stay[] = {mine,
                                temporary,
                                ".other.3999999.new",
                                ".model.3999999.old",
                                "model.3999999",
                                "kind-3999999x",
                                "step-3999999"};
    for (size_t i = 0; i < 7; i++) test_write(test_path(folder, stay[i]), "x", 1);
    for (size_t i = 0; i < 5; i++) {
        assert_ok(file_make_folders(test_path(folder, gone[i])));
        if (i < 2 || i == 4) continue;
        assert_int_equal(rmdir(test_path(folder, gone[i])), 0);
        test_write(test_path(folder, gone[i]), "x", 1);
    }
    test_write(test_path(test_path(folder, gone[0]), "half"), "x", 1);
    file_sweep_owned(folder, ".model.", ".new");
    assert_int_equal(file_sweep_temporaries(test_path(folder, "out.jsonl")), 1);
    assert_int_equal(file_sweep_temporaries(test_path(folder, "")), 1);
    assert_ok(file_make_temporary_folder(folder, "kind", made));
    for (size_t i = 0; i < 5; i++) assert_false(file_exists(test_path(folder, gone[i])));
    for (size_t i = 0; i < 7; i++) assert_true(file_exists(test_path(folder, stay[i])));
    // one whose process is in another container is held by a lock
    const char *theirs = test_path(folder, "kind-00ff00-3999999");
    assert_int_equal(rename(made, theirs), 0);
    assert_ok(file_make_temporary_folder(folder, "kind", again));
    assert_true(file_exists(theirs) && file_exists(again));
}
