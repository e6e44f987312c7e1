/* backend.c: the CPU as a device: ordinary memory and its checksums, and calls that are done when
 * they return. Parallel loops are OpenMP's; the thread that owns the device starts them. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "kernels/cpu/cpu.h"
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ALIGNMENT  256
#define BLAS_BYTES (129L << 20) // of a buffer

// The machine's identity, hashed: the id itself is not meant to be shown.
static void machine_uuid(char *ret, size_t size)
{
    static const char *const files[] = {"/etc/machine-id", "/proc/sys/kernel/random/boot_id"};
    char text[128] = "";
    for (size_t i = 0; i < 2 && !text[0]; i++) {
        FILE *f = fopen(files[i], "r");
        if (!f) continue;
        if (!fgets(text, sizeof text, f)) text[0] = '\0';
        fclose(f);
        text[strcspn(text, "\n")] = '\0';
    }
    char keyed[160];
    snprintf(keyed, sizeof keyed, "commonweight %s", text);
    char hex[33];
    hash_sha256_hex(keyed, strlen(keyed), 16, hex);
    snprintf(ret, size, "cpu-%s", hex);
}

// No more than address space, and by no function that a sanitizer has to prepare first.
bool device_blas_fits(int buffers)
{
    const long at = syscall(SYS_mmap, NULL, buffers * BLAS_BYTES, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == -1) return false;
    syscall(SYS_munmap, at, buffers * BLAS_BYTES);
    return true;
}

static enum status cpu_open(int index, struct device *dev)
{
    omp_set_dynamic(0); // OpenBLAS waits for ever when a team is smaller than it asked for
    (void)index;
    const int threads = omp_get_max_threads();
    if (!device_blas_fits(threads))
        return status_fail(
            ST_NO_MEMORY,
            "cpu: no room for OpenBLAS's buffers, 129 MiB for each of %d threads, in "
            "the address space that this process may have; raise ulimit -v, or lower "
            "OMP_NUM_THREADS",
            threads);
    dev->has_e4m3 = true;
    struct cpu_state *state = calloc(1, sizeof *state);
    if (!state) return status_fail(ST_NO_MEMORY, "no memory for the CPU device");
    dev->state = state;
    snprintf(dev->name, sizeof dev->name, "cpu, %d thread%s", threads, threads == 1 ? "" : "s");
    machine_uuid(dev->uuid, sizeof dev->uuid);
    return ST_OK;
}

static void cpu_close(struct device *dev)
{
    struct cpu_state *state = dev->state;
    free(state->workspace);
    free(state);
}

void cpu_huge_pages(void *memory, size_t bytes)
{
    const uintptr_t page = 4096, huge = 2 << 20;
    if (bytes < 2 * huge) return;
    uintptr_t start = ((uintptr_t)memory + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)memory + bytes) / page * page;
    madvise((void *)start, end - start, MADV_HUGEPAGE);
}

static enum status cpu_alloc(struct device *dev, size_t bytes, void **ret)
{
    (void)dev;
    size_t whole = bytes == 0 ? ALIGNMENT : (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void *memory = whole < bytes ? NULL : aligned_alloc(ALIGNMENT, whole);
    if (!memory) return status_fail(ST_NO_MEMORY, "cpu: no memory for %zu bytes", bytes);
    cpu_huge_pages(memory, whole);
#ifdef __SANITIZE_ADDRESS__
    memset(memory, 0xFF, whole);
#endif
    *ret = memory;
    return ST_OK;
}

static void cpu_release(struct device *dev, void *memory)
{
    (void)dev;
    free(memory);
}

// A number of a file that holds one number; false where it holds something else ("max").
static bool read_number(const char *path, unsigned long long *ret)
{
    FILE *f = fopen(path, "r");
    if (!f) return false;
    bool ok = fscanf(f, "%llu", ret) == 1;
    fclose(f);
    return ok;
}

// What the system can give without swapping, or what is left of a container's limit.
static enum status cpu_memory(struct device *dev, size_t *ret_free, size_t *ret_total)
{
    (void)dev;
    unsigned long long total = 0, available = 0, limit, used;
    FILE *f = fopen("/proc/meminfo", "r");
    if (!f) return status_fail(ST_IO, "/proc/meminfo: %m");
    char line[128];
    while (fgets(line, sizeof line, f)) {
        sscanf(line, "MemTotal: %llu kB", &total);
        sscanf(line, "MemAvailable: %llu kB", &available);
    }
    fclose(f);
    if (total == 0) return status_fail(ST_FORMAT, "/proc/meminfo has no line MemTotal");
    total *= 1024;
    available *= 1024;
    if (read_number("/sys/fs/cgroup/memory.max", &limit) &&
        read_number("/sys/fs/cgroup/memory.current", &used)) {
        if (limit < total) total = limit;
        unsigned long long left = used < limit ? limit - used : 0;
        if (left < available) available = left;
    }
    *ret_free = available;
    *ret_total = total;
    return ST_OK;
}

// One thread does not use up the memory's bandwidth; PIECE is large enough that a second one pays.
enum { PIECE = 1 << 20 };

static void cpu_copy(struct device *dev, void *to, const void *from, size_t bytes,
                     enum copy_way way)
{
    (void)dev;
    (void)way;
#pragma omp parallel for if (bytes > PIECE)
    for (size_t at = 0; at < bytes; at += PIECE)
        memcpy((char *)to + at, (const char *)from + at, bytes - at < PIECE ? bytes - at : PIECE);
}

static void cpu_copy_2d(struct device *dev, void *to, size_t to_pitch, const void *from,
                        size_t from_pitch, size_t width, size_t rows)
{
    for (size_t i = 0; i < rows; i++)
        cpu_copy(dev, (char *)to + i * to_pitch, (const char *)from + i * from_pitch, width,
                 COPY_WITHIN);
}

static void cpu_fill(struct device *dev, void *to, unsigned char value, size_t bytes)
{
    (void)dev;
#pragma omp parallel for if (bytes > PIECE)
    for (size_t at = 0; at < bytes; at += PIECE)
        memset((char *)to + at, value, bytes - at < PIECE ? bytes - at : PIECE);
}

static enum status cpu_sync(struct device *dev)
{
    (void)dev;
    return ST_OK;
}

static void cpu_timer_start(struct device *dev)
{
    struct cpu_state *state = dev->state;
    state->timer_start_ns = clock_now_ns();
}

static double cpu_timer_stop(struct device *dev)
{
    struct cpu_state *state = dev->state;
    return clock_ms_since(state->timer_start_ns);
}

static enum status cpu_reserve(struct device *dev, size_t bytes)
{
    struct cpu_state *state = dev->state;
    if (bytes <= state->workspace_bytes) return ST_OK;
    size_t whole = (bytes + 63) / 64 * 64;
    void *memory = aligned_alloc(64, whole);
    if (!memory) return status_fail(ST_NO_MEMORY, "no memory for a workspace of %zu bytes", whole);
    free(state->workspace);
    device_count(dev, (int64_t)whole - (int64_t)state->workspace_bytes);
    state->workspace = memory;
    state->workspace_bytes = whole;
    return ST_OK;
}

void *cpu_workspace(struct device *dev, size_t bytes)
{
    struct cpu_state *state = dev->state;
    if (bytes > state->workspace_bytes &&
        cpu_reserve(dev, bytes + bytes / 4) != ST_OK) { // room to grow, so that growth is rare
        device_fail(dev, "%s", status_message());
        return NULL;
    }
    return state->workspace;
}

// Position-dependent sums; their order does not matter.
void cpu_checksum(struct device *dev, uint64_t *sums, const void *base, const uint64_t *offset,
                  const uint64_t *bytes, int n)
{
    (void)dev;
    for (int i = 0; i < n; i++) {
        const unsigned char *region = (const unsigned char *)base + offset[i];
        const uint64_t words = bytes[i] / 4;
        uint64_t sum = 0;
        uint32_t last = 0; // what is behind the whole words
#pragma omp parallel for simd reduction(+ : sum) if (words > PARALLEL_WORK)
        for (uint64_t j = 0; j < words; j++) {
            uint32_t word;
            memcpy(&word, region + 4 * j, 4);
            sum += hash_mix(word + j * HASH_SPREAD);
        }
        memcpy(&last, region + 4 * words, bytes[i] % 4);
        sums[i] = sum + (bytes[i] % 4 ? hash_mix(last + words * HASH_SPREAD) : 0);
    }
}

const struct backend backend_cpu = {
    .kind = DEVICE_CPU,
    .shared_kind = "posix-shm",
    .ops = &cpu_ops,
    .open = cpu_open,
    .close = cpu_close,
    .alloc = cpu_alloc,
    .release = cpu_release,
    .memory = cpu_memory,
    .reserve = cpu_reserve,
    .host_alloc = cpu_alloc,
    .host_release = cpu_release,
    .copy = cpu_copy,
    .copy_2d = cpu_copy_2d,
    .fill = cpu_fill,
    .sync = cpu_sync,
    .shared_create = cpu_shared_create,
    .shared_open = cpu_shared_open,
    .shared_close = cpu_shared_close,
    .timer_start = cpu_timer_start,
    .timer_stop = cpu_timer_stop,
};
