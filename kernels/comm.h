/* comm.h: how the devices of several processes (ranks) compute as one: sums, copies and gathers of
 * device memory between them. NCCL between GPUs, MPI between CPUs; each is looked up when the first
 * communicator is opened, so a program starts where neither is installed.
 *
 * A communicator belongs to one device and is used by that device's thread. Calls are enqueued on
 * the device's stream (on the CPU they are done when they return). All ranks make the same calls in
 * the same order.
 *
 * Failures are as those of operations (ops.h): they stick, and the next device_sync() reports them
 * with a sentence that says which rank, which call, and whom it waited for. A communicator that has
 * failed stays so: its calls do nothing, and each device_sync() says the same again, until it is
 * freed. No call waits longer than the deadline given to comm_open(), counted from when it was
 * enqueued, or the captured graph that it is in.
 *
 * NULL is a communicator of one rank, on which every call does nothing: so callers need no branch
 * where the parts lie at their places.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_COMM_H
#define KERNELS_COMM_H

#include "kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

struct comm;

#define COMM_MAX_RANKS 4096
#define COMM_ID_BYTES  128
// What rank 0 makes and gives to all ranks (common/ranks): NCCL's id. MPI needs none: zeros.
enum status comm_new_id(enum device_kind kind, unsigned char ret_id[COMM_ID_BYTES]);
// Asked during every wait, by any thread, of communicators made of this one too: a
// status other than ST_OK ends the wait with its sentence. What it knows: that a rank is gone.
typedef enum status comm_watch_fn(void *context);
// Waits for all ranks, with the deadline and the watch (NULL: none) that every later wait has too.
// size 1 gives NULL. On the CPU rank and size must be those of MPI_COMM_WORLD; where the others do
// not come, a thread is left that waits in MPI until the process ends.
enum status comm_open(struct device *dev, const unsigned char *id, int rank, int size,
                      double deadline_s, comm_watch_fn *watch, void *watch_context,
                      struct comm **ret);
// The ranks that give the same color, numbered in the order of their ranks. Waits.
enum status comm_split(struct comm *comm, int color, struct comm **ret);
// The same ranks on a stream of its own, which runs beside the device's: a call there begins when
// what the device was given before it is done. Waits for all ranks.
enum status comm_beside(struct comm *comm, struct comm **ret);
// Lets ranks write into one another's memory, where that is possible. First, of memory NULL, into
// 32 MiB that it takes of the device, so that a sum of a few megabytes takes microseconds; its bits
// are the same without. Then into `memory`, which each rank has of the same size and which its
// device_alloc() gave in whole pages of COMM_SHARED_PAGE; where the first was not possible nothing
// is done. Waits for all ranks. ret_why: why it is not possible, or "" (so of one rank, and on the
// CPU).
#define COMM_SHARED_PAGE ((size_t)2 << 20)
enum status comm_share(struct comm *comm, void *memory, size_t bytes, char *ret_why, size_t size);
// The end of all that, when all ranks have come to their end in good order and before such memory
// is released: no rank frees what another still has mapped. Waits for all ranks.
enum status comm_unmap_peers(struct comm *comm);
// From comm_share() until that has succeeded: another rank may have it mapped, and it is left to
// the end of the process.
bool comm_shares(const struct comm *comm, const void *memory);
// What the device is given from here on begins when comm's calls so far are done.
void comm_join(struct comm *comm);
// Before its device and after those that were made of it. Says good-bye to the other ranks where
// nothing has failed.
void comm_free(struct comm *comm);

int comm_rank(const struct comm *comm);
int comm_size(const struct comm *comm);
// Of every wait from here on, in place of what comm_open() was given; also of communicators made of
// this one.
void comm_set_deadline(struct comm *comm, double deadline_s);
// In place of the watch that comm_open() was given, which is not being asked any more when this
// returns.
void comm_watch(struct comm *comm, comm_watch_fn *watch, void *context);
enum status comm_check(const struct comm *comm); // what it says now; of one rank ST_OK

// dt: DT_F32, or DT_BF16, which is added in f32 and rounded once. The sum is taken in rank order,
// whatever the message's size; on a GPU only where it goes on the device's stream and data lies at
// a multiple of 8 bytes, else in an order of NCCL's.
void comm_all_reduce(struct comm *comm, void *data, size_t n, enum dtype dt); // in place
// The parts in rank order; part may be its own place in `all`.
void comm_all_gather(struct comm *comm, const void *part, void *all, size_t bytes);
// all: size * n elements; part: the n of this rank, summed; may be their place in `all`. What else
// lies in `all` stays as it is.
void comm_reduce_scatter(struct comm *comm, const void *all, void *part, size_t n, enum dtype dt);
// all: (rows, size * width bytes), whole on every rank, of the ranks' columns in rank order. parts:
// (size, rows, width bytes), of which this rank's part is there; the others are overwritten.
void comm_gather_columns(struct comm *comm, void *all, void *parts, size_t rows, size_t width);
void comm_broadcast(struct comm *comm, void *data, size_t bytes, int root);
// Both sides at once; other ranks do not take part.
void comm_send(struct comm *comm, const void *data, size_t bytes, int to);
void comm_recv(struct comm *comm, void *data, size_t bytes, int from);
// The same of a few bytes of host memory, which lie where they are wanted when these return; of one
// rank too.
enum status comm_gather_host(struct comm *comm, const void *part, void *all, size_t bytes);
enum status comm_broadcast_host(struct comm *comm, void *data, size_t bytes, int root);
// Each of any number of them, over the ranks, in rank order.
enum status comm_sum_host(struct comm *comm, double *x, int64_t n);
// Returns when all ranks have come to it, and what this device was given before it is done.
enum status comm_barrier(struct comm *comm);

#ifdef __cplusplus
}
#endif
#endif
