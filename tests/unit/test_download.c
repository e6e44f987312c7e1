/* test_download.c: files of a checkpoint as the body of an answer, their archive read by tar
 * itself, sizes beyond what octal digits hold, what changes meanwhile; and signatures of URLs. */
// SPDX-License-Identifier: Apache-2.0
#include "common/http/listen.h"
#include "tests/support/support.h"
#include "trainer/serve/runs.h"

#include <fcntl.h>

static const char *folder,
    *names[] = {"config.json", "empty", "model.safetensors", "sub/a b.jinja"};

static void make_folder(void)
{
    folder = test_folder();
    assert_ok(file_make_folders(test_path(folder, "sub")));
    assert_ok(file_make_folders(test_path(folder, "trainer")));
    test_write(test_path(folder, names[0]), "{}", 2);
    test_write(test_path(folder, names[1]), "", 0);
    char *large = calloc(1, 700000); // some pieces, the last not whole
    for (int i = 0; i < 700000; i++) large[i] = (char)(i * 7 + i / 256);
    test_write(test_path(folder, names[2]), large, 700000);
    free(large);
    test_write(test_path(folder, names[3]), "x", 1);
    test_write(test_path(folder, "trainer/optimizer.safetensors"), "secret", 6);
}

static json_t *files(void)
{
    json_t *ret = NULL;
    assert_ok(runs_files(folder, &ret));
    return ret;
}

// Each piece after the other; the whole has the length that was told.
static void read_all(const char *file, struct bytes *ret)
{
    struct download *d;
    int64_t n_bytes;
    json_t *list = test_keep(files());
    assert_ok(download_new(folder, list, file, &d, &n_bytes));
    for (enum stream_state state = STREAM_MORE; state == STREAM_MORE;) {
        SCOPED(bytes_release) struct bytes piece = BYTES_INIT;
        state = download_next(d, &piece);
        assert_int_not_equal(state, STREAM_FAIL);
        assert_true(piece.len <= 300 << 10);
        bytes_append(ret, bytes_text(&piece), piece.len);
    }
    assert_int_equal(ret->len, n_bytes);
    download_free(d);
}

TEST(test_files)
{
    json_t *list = test_keep(files());
    assert_int_equal(json_object_size(list), 4);
    assert_int_equal(runs_bytes(list), 700003);
    for (int i = 0; i < 4; i++) {
        SCOPED(bytes_release) struct bytes body = BYTES_INIT;
        char *on_disk = test_read(test_path(folder, names[i]));
        read_all(names[i], &body);
        assert_memory_equal(bytes_text(&body), on_disk, body.len);
    }
}

TEST(test_archive)
{
    SCOPED(bytes_release) struct bytes body = BYTES_INIT;
    const char *to = test_folder(), *file = test_path(to, "archive.tar");
    read_all("", &body);
    test_write(file, bytes_text(&body), body.len);
    assert_exit(0,
                test_command(test_path(to, "log"), 10000, OPTIONS("tar", "-C", to, "-xf", file)));
    for (int i = 0; i < 4; i++) test_same_file(folder, to, names[i]);
    assert_int_not_equal(access(test_path(to, "trainer"), F_OK), 0);
}

static void truncate_to(const char *name, int64_t size)
{
    int fd = open(test_path(folder, name), O_WRONLY | O_CREAT, 0644);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, size), 0);
    close(fd);
}

// tar lists a file of 9 GiB by its header alone, of which nothing else is read here.
TEST(test_beyond_octal_digits)
{
    struct download *d;
    SCOPED(bytes_release) struct bytes piece = BYTES_INIT;
    const int64_t size = (int64_t)9 << 30;
    int64_t n_bytes;
    const char *to = test_folder(), *log = test_path(to, "log");
    truncate_to("large", size);
    json_t *list = test_keep(json_pack("{s:I}", "large", (json_int_t)size));
    assert_ok(download_new(folder, list, "", &d, &n_bytes));
    assert_true(n_bytes == 512 + size + 1024);
    assert_int_equal(download_next(d, &piece), STREAM_MORE);
    test_write(test_path(to, "archive.tar"), bytes_text(&piece), piece.len);
    test_command(log, 10000, OPTIONS("tar", "-tvf", test_path(to, "archive.tar")));
    assert_contains(test_read(log), "9663676416");
    download_free(d);
    unlink(test_path(folder, "large"));
}

TEST(test_changed)
{
    struct download *d;
    SCOPED(bytes_release) struct bytes piece = BYTES_INIT;
    int64_t n_bytes;
    json_t *list = json_pack("{s:i}", names[0], 7);
    assert_ok(download_new(folder, list, names[0], &d, &n_bytes));
    assert_int_equal(download_next(d, &piece), STREAM_FAIL);
    assert_message("is another file than before");
    download_free(d);
    assert_status(download_new(folder, list, "trainer/optimizer.safetensors", &d, &n_bytes),
                  ST_NOT_FOUND);
    json_decref(list);
    list = json_pack("{s:i}", names[2], 700000);
    assert_ok(download_new(folder, list, names[2], &d, &n_bytes));
    assert_int_equal(download_next(d, &piece), STREAM_MORE);
    truncate_to(names[2], 300000);
    enum stream_state end;
    while ((end = download_next(d, &piece)) == STREAM_MORE) continue;
    assert_int_equal(end, STREAM_FAIL);
    assert_message("ends early");
    download_free(d);
    json_decref(list);
}

// A checkpoint that is saved anew while an archive of it is on its way: another folder of the same
// names and sizes has its place, and none of that is sent.
TEST(test_replaced)
{
    struct download *d;
    SCOPED(bytes_release) struct bytes piece = BYTES_INIT;
    int64_t n_bytes;
    const char *in = test_folder(), *of = test_path(in, "at"), *next = test_path(in, "next");
    json_t *list = test_keep(json_pack("{s:i, s:i}", "a", 1, "b", 1));
    for (int i = 0; i < 2; i++) {
        const char *to = i ? next : of;
        assert_ok(file_make_folders(to));
        test_write(test_path(to, "a"), i ? "2" : "1", 1);
        test_write(test_path(to, "b"), i ? "2" : "1", 1);
    }
    assert_ok(download_new(of, list, "", &d, &n_bytes));
    assert_int_equal(download_next(d, &piece), STREAM_MORE);
    assert_int_equal(rename(of, test_path(in, "before")), 0);
    assert_int_equal(rename(next, of), 0);
    assert_ok(file_remove_tree(test_path(in, "before")));
    assert_int_equal(download_next(d, &piece), STREAM_FAIL);
    assert_message("b: No such file");
    download_free(d);
}

TEST(test_signatures)
{
    struct signing_key key, other;
    char one[SIGNATURE_ROOM], two[SIGNATURE_ROOM];
    assert_ok(signing_key_new(&key));
    assert_ok(signing_key_new(&other));
    signature_text(&key, "tinker://run/weights/a/x 1", 1700000000, one);
    assert_int_equal(strtoll(one, NULL, 10), 1700000000);
    signature_text(&key, "tinker://run/weights/a/x 1", 1700000000, two);
    assert_true(signature_is(one, two));
    signature_text(&key, "tinker://run/weights/a/x 2", 1700000000, two);
    assert_false(signature_is(one, two));
    signature_text(&key, "tinker://run/weights/a/x 1", 1700000001, two);
    assert_false(signature_is(one, two));
    signature_text(&other, "tinker://run/weights/a/x 1", 1700000000, two);
    assert_false(signature_is(one, two));
    assert_false(signature_is("", one));
}

TESTS_BETWEEN(make_folder, NULL)
