/* device.h: one small interface to the thing that computes: the CPU, or one CUDA GPU.
 *
 * A `struct device` is used by one thread at a time and has one stream: everything enqueued on it
 * runs in order. On CUDA calls return before the work is done; device_sync() waits. A failure of an
 * enqueued operation sticks to the device and is reported by the next device_sync(), so operations
 * (ops.h) return nothing.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_DEVICE_H
#define KERNELS_DEVICE_H

#include "common/base/dtype.h"
#include "common/base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct device;
struct ops;

enum device_kind { DEVICE_CPU, DEVICE_CUDA };

// First thing in main: has CPU worker threads sleep, not spin, while they wait for work, because a
// server and a trainer on one machine would otherwise spin against each other; and has OpenBLAS use
// the vectors of a processor that is newer than itself. Both read these settings before main, so
// the program is executed anew once. What the user has set in OMP_WAIT_POLICY and
// OPENBLAS_CORETYPE stays.
void device_prepare_process(char **argv);
// Whether the address space that this process may have (ulimit -v) has room for so many buffers of
// OpenBLAS, one for each thread that calls it: where there is none it asks for it for ever.
bool device_blas_fits(int buffers);
// Stands outside of functions of a main (a shared object cannot have it): ends the process with a
// sentence where OpenBLAS, when it is loaded, would find no room.
#define PREPARE_PROGRAM                                                                            \
    __attribute__((section(".preinit_array"), used)) static void (*const before_libraries)(        \
        int, char **, char **) = prepare_check
void prepare_check(int argc, char **argv, char **envp);

// spec: "auto" (first GPU if there is one, else the CPU), "cpu", "cuda" or "cuda:N". A binary built
// without CUDA refuses "cuda:N" with a sentence that says so.
enum status device_open(const char *spec, struct device **ret);
void device_free(struct device *dev); // memory taken with device_alloc must be released before

enum device_kind device_kind(const struct device *dev);
int device_index(const struct device *dev);        // N of cuda:N; -1 for the CPU
const char *device_spec(const struct device *dev); // "cpu", "cuda:0"
const char *device_name(const struct device *dev); // "cpu, 2 threads", "NVIDIA H200"
const char *device_uuid(const struct device *dev); // "GPU-xxxxxxxx-...", "cpu-<machine id hash>"
const struct ops *device_ops(const struct device *dev);
enum dtype device_default_dtype(const struct device *dev); // DT_BF16 on CUDA, DT_F32 on the CPU
// CPU: f32, and e4m3 of weights (ops.h, struct matmul); CUDA: f32, bf16
bool device_computes_in(const struct device *dev, enum dtype dt);
// Whether what a row gives in a forward pass has the same bits whatever is computed beside it, and
// in which pieces its context was (docs/internals/numerics.md, Where it holds).
bool device_is_exact(const struct device *dev, enum dtype dt);

// ---- memory -------------------------------------------------------------------------------------
// 256-byte aligned. Not cleared: on debug builds it is filled with 0xFF (NaN).
enum status device_alloc(struct device *dev, size_t bytes, void **ret);
void device_release(struct device *dev, void *memory); // NULL is fine; waits for work that uses it
enum status device_memory(struct device *dev, size_t *ret_free, size_t *ret_total);
// Bytes held through dev now, and the most there ever were: memory of device_alloc and the scratch
// that operations keep. Shared and pinned memory, and what a driver or library takes for itself,
// are not among them.
void device_allocated(const struct device *dev, size_t *ret_now, size_t *ret_peak);
// Makes the operations' scratch (ops.h, scratch_bytes) at least this large: what needs no more will
// take no memory while it runs.
enum status device_reserve(struct device *dev, size_t bytes);

// Buffers that a struct has pointers to: where each pointer stands in it, and the buffer's bytes
// (0: not wanted, the pointer stays NULL). A list that was taken in part is released like a whole
// one.
struct device_part {
    size_t field, bytes;
};
enum status device_alloc_parts(struct device *dev, void *owner, const struct device_part *parts,
                               int n);
void device_release_parts(struct device *dev, void *owner, const struct device_part *parts, int n);
size_t device_parts_bytes(const struct device_part *parts, int n);
// Each of `parts` becomes as large as the same one of `other`, where that is larger.
void device_parts_widen(struct device_part *parts, const struct device_part *other, int n);
void **device_part_pointer(void *owner, const struct device_part *part);

// Host memory that copies to and from the device fast (pinned on CUDA).
enum status device_host_alloc(struct device *dev, size_t bytes, void **ret);
void device_host_release(struct device *dev, void *memory);

// Ordered after what is already enqueued. copy_in and copy_out with memory of device_host_alloc
// return before they are done (the host buffer must stay untouched until a sync); with other host
// memory they return when the host buffer is free again.
void device_copy_in(struct device *dev, void *to, const void *host, size_t bytes);
void device_copy_out(struct device *dev, void *host, const void *from, size_t bytes);
// As copy_in, but beside what is already enqueued, none of which may use `to`; what is enqueued
// from here on comes behind it.
void device_copy_in_beside(struct device *dev, void *to, const void *host, size_t bytes);
// What is copied beside from here on waits until call(context) has returned, which a thread of the
// device's calls (where nothing is enqueued, this one); in it nothing may be asked of the device.
void device_call_beside(struct device *dev, void (*call)(void *), void *context);
void device_copy(struct device *dev, void *to, const void *from, size_t bytes); // never overlapping
// `rows` runs of `width` bytes; pitch: bytes from the start of one run to that of the next.
void device_copy_2d(struct device *dev, void *to, size_t to_pitch, const void *from,
                    size_t from_pitch, size_t width, size_t rows); // never overlapping
void device_fill(struct device *dev, void *to, unsigned char value, size_t bytes);

// Waits for everything enqueued; reports the first failure since the last report (ST_DEVICE).
enum status device_sync(struct device *dev);
// A mark stands behind what is enqueued by now; waiting for it waits for that alone, and reports as
// device_sync() does.
#define DEVICE_MARKS 2
void device_mark(struct device *dev, int mark);
enum status device_wait(struct device *dev, int mark);

// ---- memory shared between processes ------------------------------------------------------------
// Made by one process and opened by others on the same device. CUDA: cudaMalloc and CUDA IPC; the
// handle is base64 of the 64-byte cudaIpcMemHandle_t. CPU: POSIX shared memory; the handle is its
// name ("/commonweight-..."). The maker's free ends it (unlinks the name); an opener's free unmaps.
struct shared_memory;
enum status shared_memory_create(struct device *dev, const char *name, size_t bytes,
                                 struct shared_memory **ret); // zero-filled
enum status shared_memory_open(struct device *dev, const char *handle, size_t bytes,
                               struct shared_memory **ret); // ST_MISMATCH where the size differs
void *shared_memory_data(const struct shared_memory *memory);
const char *shared_memory_handle(const struct shared_memory *memory);
const char *shared_memory_kind(const struct device *dev); // "cuda-ipc" or "posix-shm"
void shared_memory_free(struct shared_memory *memory);

// ---- captured work ------------------------------------------------------------------------------
// A fixed sequence of operations recorded once and launched many times (a CUDA graph). Pointers and
// host numbers are frozen; what device memory holds is read anew at each launch. On the CPU
// device_capture_begin() returns false and callers simply run the operations.
struct device_graph;
bool device_capture_begin(struct device *dev);
enum status device_capture_end(struct device *dev, struct device_graph **ret);
void device_graph_launch(struct device *dev, struct device_graph *graph);
void device_graph_free(struct device_graph *graph);

// ---- time ---------------------------------------------------------------------------------------
// Milliseconds that the work enqueued between start and stop took on the device (events on CUDA,
// the clock on the CPU). stop waits.
void device_timer_start(struct device *dev);
double device_timer_stop(struct device *dev);

#ifdef __cplusplus
}
#endif
#endif
