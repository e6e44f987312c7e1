/* test_shared_memory.c: memory shared between two processes, on the CPU and on a GPU. The child,
 * forked before any device is opened, opens the handle it reads from a pipe, checks what the parent
 * wrote and writes an answer in place; wrong sizes and malformed handles are refused by name. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/device.h"
#include "tests/support/support.h"
#include <sys/resource.h>
#include <sys/wait.h>

enum { WORDS = 1 << 20, BYTES = WORDS * 4 };

static uint32_t word(uint32_t i, uint32_t seed)
{
    return i * 2654435761u + seed;
}

// What the child found wrong; 0 for nothing.
enum { CHILD_OK, CHILD_DEVICE, CHILD_OPEN, CHILD_CONTENT, CHILD_SIZE, CHILD_HANDLE, CHILD_READ };

static int child(const char *spec, int in, int out)
{
    char handle[160];
    struct device *dev = NULL;
    struct shared_memory *memory = NULL, *none = NULL;
    uint32_t *host = test_keep(malloc(BYTES));
    if (!host || read(in, handle, sizeof handle) != (ssize_t)sizeof handle) return CHILD_READ;
    if (device_open(spec, &dev) != ST_OK) return CHILD_DEVICE;
    if (shared_memory_open(dev, "not a handle", BYTES, &none) == ST_OK) return CHILD_HANDLE;
    if (shared_memory_open(dev, handle, 4ul * BYTES, &none) != ST_MISMATCH) return CHILD_SIZE;
    if (shared_memory_open(dev, handle, BYTES, &memory) != ST_OK) {
        fprintf(stderr, "child: %s\n", status_message());
        return CHILD_OPEN;
    }
    device_copy_out(dev, host, shared_memory_data(memory), BYTES);
    if (device_sync(dev) != ST_OK) return CHILD_CONTENT;
    for (uint32_t i = 0; i < WORDS; i++)
        if (host[i] != word(i, 1)) return CHILD_CONTENT;
    for (uint32_t i = 0; i < WORDS; i++) host[i] = word(i, 2);
    device_copy_in(dev, shared_memory_data(memory), host, BYTES);
    if (device_sync(dev) != ST_OK) return CHILD_CONTENT;
    if (write(out, "!", 1) != 1) return CHILD_READ;
    shared_memory_free(memory);
    device_free(dev);
    return CHILD_OK;
}

static void share(const char *spec)
{
    int to_child[2], to_parent[2];
    assert_int_equal(pipe(to_child), 0);
    assert_int_equal(pipe(to_parent), 0);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        close(to_child[1]);
        _exit(child(spec, to_child[0], to_parent[1]));
    }
    close(to_child[0]);
    close(to_parent[1]);
    struct device *dev = NULL;
    if (device_open(spec, &dev) != ST_OK) {
        printf("shared memory on %s skipped: %s\n", spec, status_message());
        close(to_child[1]);
        waitpid(pid, NULL, 0);
        close(to_parent[0]);
        skip();
    }
    struct shared_memory *memory = NULL;
    char handle[160] = "", name[64], answer;
    snprintf(name, sizeof name, "test-%d", (int)getpid());
    uint32_t *host = test_keep(malloc(BYTES));
    assert_non_null(host);
    assert_int_equal(shared_memory_create(dev, name, BYTES, &memory), ST_OK);
    device_copy_out(dev, host, shared_memory_data(memory), BYTES);
    assert_int_equal(device_sync(dev), ST_OK);
    for (uint32_t i = 0; i < WORDS; i++) assert_int_equal(host[i], 0);
    for (uint32_t i = 0; i < WORDS; i++) host[i] = word(i, 1);
    device_copy_in(dev, shared_memory_data(memory), host, BYTES);
    assert_int_equal(device_sync(dev), ST_OK);

    assert_true(strlen(shared_memory_handle(memory)) < sizeof handle);
    strcpy(handle, shared_memory_handle(memory));
    assert_int_equal(write(to_child[1], handle, sizeof handle), (ssize_t)sizeof handle);
    ssize_t answered = read(to_parent[0], &answer, 1);
    int status = -1;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), CHILD_OK);
    assert_int_equal(answered, 1);
    device_copy_out(dev, host, shared_memory_data(memory), BYTES);
    assert_int_equal(device_sync(dev), ST_OK);
    for (uint32_t i = 0; i < WORDS; i++)
        if (host[i] != word(i, 2)) fail_msg("word %u is %08x", i, host[i]);
    shared_memory_free(memory);
    device_free(dev);
    close(to_child[1]);
    close(to_parent[0]);
}

TEST(test_cpu)
{
    share("cpu");
}

// A descriptor for the new segment and none to look at it again with: nothing is left.
TEST(test_few_descriptors)
{
    struct device *dev = NULL;
    struct shared_memory *memory = NULL;
    struct rlimit was, few;
    char name[64];
    snprintf(name, sizeof name, "test-few-%d", (int)getpid());
    assert_int_equal(device_open("cpu", &dev), ST_OK);
    const int next = dup(0);
    close(next);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &was), 0);
    few = (struct rlimit){.rlim_cur = (rlim_t)next + 1, .rlim_max = was.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    const enum status st = shared_memory_create(dev, name, BYTES, &memory);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &was), 0);
    assert_int_equal(st, ST_IO);
    if (!strstr(status_message(), "Too many open files")) fail_msg("%s", status_message());
    assert_int_equal(shared_memory_create(dev, name, BYTES, &memory), ST_OK);
    shared_memory_free(memory);
    device_free(dev);
}

TEST(test_cuda)
{
    share("cuda:0");
}

int main(void)
{
    // the GPU first: a child must be forked before its parent opens a GPU
    return test_main();
}
