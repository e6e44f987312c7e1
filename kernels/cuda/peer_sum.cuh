/* peer_sum.cuh: sums over the GPUs of one host through memory that all of them write into, for what
 * is too small for a library that was made for bandwidth: the residual stream of a decode step,
 * which a tensor-parallel model sums twice a layer.
 *
 * One kernel, one way: each rank writes its addend into every other rank's memory and adds what
 * came to its own, in rank order, in f32, rounding once. Each 8 bytes written hold 4 of data and
 * the call's number, and GPUs write 8 bytes at once, so a number that is right says that its data
 * is there: no flags, no fences, no second message (NCCL calls this protocol LL). Two sets of
 * places take turns: who writes a set has seen the answers to the call between, which nobody gives
 * before it has read the last of this set. */
#ifndef KERNELS_CUDA_PEER_SUM_CUH
#define KERNELS_CUDA_PEER_SUM_CUH

#include "kernels/comm_backend.h"

#define MAX_PEERS 8 // ranks of one host that are mapped into one another

struct peer_sum;

// All ranks call it, once `comm` can carry calls. Gives NULL, and in `why` a sentence, where a rank
// cannot write into the memory of another: no other way of summing gives other bits.
enum status peer_sum_open(struct comm *comm, struct peer_sum **ret, char *why, size_t why_size);
void peer_sum_free(struct peer_sum *sum); // enqueued sums are done

// False, with nothing enqueued, where n elements have no room.
bool peer_sum_begin(struct peer_sum *sum, struct device *dev, void *data, size_t n, enum dtype dt);
// Any thread: sums that wait for a rank end, and what they leave is garbage.
void peer_sum_abort(struct peer_sum *sum);

// The n elements of `data`, which are this rank's addend, become the sum with those of the other
// ranks, in rank order; these lie in `rest`, `pitch` elements apart, a multiple of 4.
void peer_sum_add(struct device *dev, void *data, const void *rest, size_t n, size_t pitch,
                  int rank, int size, enum dtype dt);

#endif
