/* test_device.c: the device interface on the CPU: names, memory, copies, and shared memory between
 * processes (creation, opening, wrong sizes, stale names). */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/device.h"
#include "kernels/ops.h"
#include "tests/support/support.h"
#include <sys/stat.h>
#include <sys/wait.h>

LATER(device_free)

static struct device *open_cpu(void)
{
    struct device *dev = NULL;
    assert_ok(device_open("cpu", &dev));
    return test_later(dev, device_free_later);
}

// Of a child: its exit status.
static int status_of(pid_t child)
{
    int ended = 0;
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_true(WIFEXITED(ended));
    return WEXITSTATUS(ended);
}

// A shared memory name nobody else uses.
static const char *name_of(const char *label)
{
    static char name[96];
    snprintf(name, sizeof name, "/commonweight-test-%s-%d", label, (int)getpid());
    return name;
}

TEST(test_specs)
{
    struct device *dev = open_cpu();
    assert_string_equal(device_spec(dev), "cpu");
    assert_int_equal(device_kind(dev), DEVICE_CPU);
    assert_int_equal(device_index(dev), -1);
    assert_int_equal(device_default_dtype(dev), DT_F32);
    assert_true(device_computes_in(dev, DT_F32));
    assert_false(device_computes_in(dev, DT_BF16));
    assert_int_equal(strncmp(device_uuid(dev), "cpu-", 4), 0);
    assert_int_equal(strlen(device_uuid(dev)), 4 + 32);
    assert_non_null(strstr(device_name(dev), "thread"));
    assert_string_equal(shared_memory_kind(dev), "posix-shm");
    assert_string_equal(device_uuid(open_cpu()), device_uuid(dev)); // the same machine
    device_free(NULL);

    static const char *const wrong[] = {"", "gpu", "cpu0", "cuda:", "cuda:x", "cuda:-1", "cuda:0x"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        struct device *none = NULL;
        assert_fails(device_open(wrong[i], &none), ST_INVALID, wrong[i]);
        assert_null(none);
    }
#if !CW_CUDA
    struct device *none = NULL;
    assert_fails(device_open("cuda:3", &none), ST_UNSUPPORTED, "built without CUDA");
#endif
}

// 9 runs of 13 bytes, 50 apart, to where they are 70 apart; nothing beside them. On the GPU too,
// where there is one.
TEST(test_copy_2d)
{
    static const char *const specs[] = {"cpu", "auto"};
    for (int k = 0; k < 2; k++) {
        struct device *dev = NULL;
        unsigned char host[1000], back[1000];
        void *a = NULL, *b = NULL;
        for (int i = 0; i < 1000; i++) host[i] = (unsigned char)(i * 7);
        assert_ok(device_open(specs[k], &dev));
        assert_ok(device_alloc(dev, 1000, &a));
        assert_ok(device_alloc(dev, 1000, &b));
        device_copy_in(dev, a, host, 1000);
        device_fill(dev, b, 0xEE, 1000);
        device_copy_2d(dev, (char *)b + 5, 70, (char *)a + 3, 50, 13, 9);
        device_copy_2d(dev, b, 70, a, 50, 0, 9);
        device_copy_2d(dev, b, 70, a, 50, 13, 0);
        device_copy_out(dev, back, b, 1000);
        assert_ok(device_sync(dev));
        for (int i = 0; i < 1000; i++) {
            const int row = (i - 5) / 70, column = (i - 5) % 70;
            const bool copied = i >= 5 && row < 9 && column < 13;
            assert_int_equal(back[i], copied ? host[3 + row * 50 + column] : 0xEE);
        }
        device_release(dev, a);
        device_release(dev, b);
        device_free(dev);
    }
}

TEST(test_memory)
{
    struct device *dev = open_cpu();
    unsigned char host[1000], back[1000];
    void *a = NULL, *b = NULL, *pinned = NULL;
    for (int i = 0; i < 1000; i++) host[i] = (unsigned char)(i * 7);
    assert_ok(device_alloc(dev, 1000, &a));
    assert_ok(device_alloc(dev, 0, &b));
    assert_int_equal((uintptr_t)a % 256, 0);
    assert_non_null(b);
    device_release(dev, b);
    assert_ok(device_alloc(dev, 1000, &b));
    assert_ok(device_host_alloc(dev, 1000, &pinned));
    device_copy_in(dev, a, host, 1000);
    device_copy(dev, b, a, 1000);
    device_copy_out(dev, back, b, 1000);
    assert_ok(device_sync(dev));
    assert_memory_equal(back, host, 1000);
    device_fill(dev, b, 0x5A, 999);
    device_copy_out(dev, pinned, b, 1000);
    assert_ok(device_sync(dev));
    for (int i = 0; i < 999; i++) assert_int_equal(((unsigned char *)pinned)[i], 0x5A);
    assert_int_equal(((unsigned char *)pinned)[999], host[999]);
    size_t left = 0, total = 0;
    assert_ok(device_memory(dev, &left, &total));
    assert_true(left > 0 && left <= total);
    device_timer_start(dev);
    assert_true(device_timer_stop(dev) >= 0);
    assert_false(device_capture_begin(dev));
    device_graph_free(NULL);
#ifndef __SANITIZE_ADDRESS__ // which ends the program at such a request
    void *huge = NULL;
    assert_status(device_alloc(dev, (size_t)1 << 60, &huge), ST_NO_MEMORY);
    assert_null(huge);
#endif
    device_host_release(dev, pinned);
    device_release(dev, a);
    device_release(dev, b);
    device_release(dev, NULL);
}

// A failed operation is reported once, by the next sync.
TEST(test_sticky_failure)
{
    struct device *dev = open_cpu();
    const struct ops *ops = device_ops(dev);
    uint16_t x[4] = {0}, y[4] = {0};
    ops->add(dev, y, x, 4, 1.0f, DT_BF16);
    ops->convert(dev, y, DT_I32, x, DT_F32, 1);
    assert_fails(device_sync(dev), ST_DEVICE, "add");
    assert_message("bf16");
    assert_ok(device_sync(dev));
}

TEST(test_shared_across_fork)
{
    enum { N = 1 << 18 };
    struct device *dev = open_cpu();
    struct shared_memory *memory = NULL;
    assert_ok(shared_memory_create(dev, name_of("fork"), N, &memory));
    assert_string_equal(shared_memory_handle(memory), name_of("fork"));
    unsigned char *data = shared_memory_data(memory);
    for (int i = 0; i < N; i += 4099) assert_int_equal(data[i], 0);
    data[5] = 42;

    char path[160];
    struct stat info;
    snprintf(path, sizeof path, "/dev/shm%s", shared_memory_handle(memory));
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0600);

    char handle[96];
    strcpy(handle, shared_memory_handle(memory));
    pid_t child = fork();
    if (child == 0) { // opens by its name, as another program would
        struct device *own = NULL;
        struct shared_memory *opened = NULL;
        if (device_open("cpu", &own) != ST_OK) _exit(1);
        if (shared_memory_open(own, handle, N, &opened) != ST_OK) _exit(2);
        unsigned char *seen = shared_memory_data(opened);
        if (seen == data || seen[5] != 42) _exit(3);
        seen[N - 1] = 43;
        shared_memory_free(opened); // unmaps, and leaves the name
        device_free(own);
        _exit(0);
    }
    assert_int_equal(status_of(child), 0);
    assert_int_equal(data[N - 1], 43);
    assert_int_equal(stat(path, &info), 0);

    shared_memory_free(memory);
    assert_int_not_equal(stat(path, &info), 0); // the maker's free took the name away
    shared_memory_free(NULL);
}

TEST(test_shared_refusals)
{
    struct device *dev = open_cpu();
    struct shared_memory *memory = NULL, *other = NULL;
    assert_ok(shared_memory_create(dev, name_of("size"), 8192, &memory));
    static const size_t sizes[] = {1, 4096, 8191, 8193, 1 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        assert_fails(shared_memory_open(dev, name_of("size"), sizes[i], &other), ST_MISMATCH,
                     name_of("size"));
        assert_message("8192");
        assert_null(other);
    }
    // a name that is taken, perhaps by a process that died
    assert_fails(shared_memory_create(dev, name_of("size"), 8192, &other), ST_BUSY,
                 "/dev/shm/commonweight-test-size");
    assert_null(other);
    shared_memory_free(memory);
    assert_status(shared_memory_open(dev, name_of("size"), 8192, &other), ST_NOT_FOUND);

    assert_status(shared_memory_create(dev, name_of("none"), 0, &other), ST_INVALID);
    assert_status(shared_memory_open(dev, name_of("none"), 0, &other), ST_INVALID);
    assert_status(shared_memory_create(dev, "/a/b", 10, &other), ST_INVALID);
    assert_status(shared_memory_open(dev, "../x", 10, &other), ST_INVALID);
    char longest[400] = "/";
    memset(longest + 1, 'x', sizeof longest - 2);
    assert_status(shared_memory_create(dev, longest, 10, &other), ST_INVALID);
    assert_status(shared_memory_open(dev, longest, 10, &other), ST_FORMAT);
    // more than the machine has: an error now, not a crash at the first write
    assert_status(shared_memory_create(dev, name_of("huge"), (size_t)1 << 46, &other),
                  ST_NO_MEMORY);
    assert_status(shared_memory_open(dev, name_of("huge"), 10, &other), ST_NOT_FOUND);
    assert_null(other);
}

// A maker that was killed leaves its name: it is refused, and free to take once removed.
TEST(test_stale_name)
{
    struct device *dev = open_cpu();
    const char *name = name_of("stale");
    pid_t child = fork();
    if (child == 0) {
        struct shared_memory *memory = NULL;
        _exit(shared_memory_create(dev, name, 4096, &memory) != ST_OK);
    }
    assert_int_equal(status_of(child), 0);
    struct shared_memory *memory = NULL;
    assert_fails(shared_memory_create(dev, name, 4096, &memory), ST_BUSY, "remove");
    char path[160];
    snprintf(path, sizeof path, "/dev/shm%s", name);
    assert_int_equal(unlink(path), 0);
    assert_ok(shared_memory_create(dev, name, 4096, &memory));
    shared_memory_free(memory);
}
