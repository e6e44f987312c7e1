/* oneshot.cuh: sums over the GPUs of one host through memory that all of them write into, for what
 * is too small for a library that was made for bandwidth: the residual stream of a decode step,
 * which a tensor-parallel model sums twice a layer; and a step's logits, put together there.
 *
 * Sums go one way: each rank writes its partial sum into every other rank's memory and adds what
 * came to its own, in rank order, in f32, rounding once. Each 8 bytes written hold 4 of data and
 * the call's number, and GPUs write 8 bytes at once, so a number that is right says that its data
 * is there: no flags, no fences, no second message (NCCL calls this protocol LL). Two sets of
 * slots take turns: who writes a set has seen the answers to the call between, which nobody gives
 * before it has read the last of this set.
 *
 * Logits are large, and their places are known: the matmul of the head writes them where they
 * belong, on all ranks. Two flags a rank frame it: "ready" (what lay there is not read any more),
 * and "done", behind a fence.
 *
 * Calls are counted in device memory, so that a captured graph may be replayed. A call's number is
 * never 0, which is what memory holds at first; it comes again after 2^32 - 1 calls, some 50 hours
 * of decoding without a pause. A slot is then mistaken for written only where it was written
 * exactly so many calls ago and not since: one of the few that only long prompts reach, once in
 * some 10^9 of them. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_ONESHOT_CUH
#define KERNELS_CUDA_ONESHOT_CUH

#include "kernels/comm_backend.h"
#include "kernels/cuda/cuda.cuh"

#define MAX_PEERS 8 // ranks of one host that are mapped into one another

// A word of a partial sum, and after each half the number of the call.
struct alignas(16) line {
    unsigned low, of_low, high, of_high;
};

// What a kernel needs that takes part in a call.
struct peer_slots {
    struct line *of[MAX_PEERS]; // the memory of rank r, as this GPU sees it
    unsigned *flags[MAX_PEERS]; // in it: of each rank's being ready, then of its being done
    unsigned long long *calls;  // of those ended, in units of CALL
    unsigned *ended;            // blocks of the call under way
    const volatile int *stop;   // host memory: no rank is waited for any more
    size_t room;                // lines of a slot
    int rank, size;             // size 0: no call
};

// ---- for kernels of other operations (comm.cu) --------------------------------------------------

// The caller's kernel writes the columns of `data` on all ranks. NULL: comm_gather_columns() must.
const struct peer_slots *comm_place_columns(struct comm *comm, void *data, void *ret_of[MAX_PEERS]);

// ---- the device's side --------------------------------------------------------------------------

#define LOOK_AFTER 1024   // tries between looks at host memory
#define CALL       65536u // more than a call has blocks

struct peer_call {
    unsigned number;
    size_t set; // its slots are those of ranks from `set` on
};

// The call under way: after grid_wait(), and before the block's end_peer_call().
INLINE peer_call this_peer_call(const peer_slots &p)
{
    const unsigned long long ended = *(const volatile unsigned long long *)p.calls / CALL;
    return {(unsigned)(ended % 0xffffffffu) + 1, (size_t)(ended & 1) * p.size};
}

// Every block of the kernel that ends the call, all of whose threads call it: together they add
// CALL, whichever of them comes last.
INLINE void end_peer_call(const peer_slots &p)
{
    __syncthreads();
    if (threadIdx.x == 0)
        atomicAdd(p.calls, (unsigned long long)(blockIdx.x == 0 ? CALL - (gridDim.x - 1) : 1));
}

INLINE struct line *peer_line(const peer_slots &p, peer_call call, int to, int from, size_t word)
{
    return p.of[to] + (call.set + from) * p.room + word;
}

template <typename T> constexpr int word_elements = 8 / (int)sizeof(T);

// 8 bytes of the partial sum, to all others.
INLINE void send_word(const peer_slots &p, peer_call call, size_t word, uint2 bits)
{
    for (int i = 1; i < p.size; i++) {
        const int r = p.rank + i, to = r < p.size ? r : r - p.size;
        asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(
                         peer_line(p, call, to, p.rank, word)),
                     "r"(bits.x), "r"(call.number), "r"(bits.y)
                     : "memory");
    }
}

// The word that rank r sends.
INLINE uint2 receive_word(const peer_slots &p, peer_call call, int r, size_t word)
{
    uint4 got;
    for (int tries = 1;; tries++) {
        asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w)
                     : "l"(peer_line(p, call, p.rank, r, word))
                     : "memory");
        if (got.y == call.number && got.w == call.number) break;
        if (tries % LOOK_AFTER == 0 && *p.stop) break;
    }
    return make_uint2(got.x, got.z);
}

enum peer_flag { PEER_READY, PEER_DONE };

// One thread: all other ranks are to know / have said so. What this rank wrote before is visible to
// those who find its flag.
INLINE void raise_flag(const peer_slots &p, peer_call call, peer_flag flag)
{
    __threadfence_system();
    for (int r = 0; r < p.size; r++)
        if (r != p.rank)
            *(volatile unsigned *)(p.flags[r] + flag * MAX_PEERS + p.rank) = call.number;
}

INLINE void await_flags(const peer_slots &p, peer_call call, peer_flag flag)
{
    for (int r = 0; r < p.size; r++) {
        const volatile unsigned *at = p.flags[p.rank] + flag * MAX_PEERS + r;
        for (int tries = 1; r != p.rank && *at != call.number; tries++)
            if (tries % LOOK_AFTER == 0 && *p.stop) break;
    }
    __threadfence_system();
}

#endif
