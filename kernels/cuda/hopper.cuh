/* hopper.cuh: instructions of sm_90a: barriers in shared memory, copies by the tensor memory
 * accelerator (TMA), and wgmma of bf16, m64nNk16, and of e4m3, m64nNk32, with the right operand or
 * both in shared memory. Private to kernels/cuda.
 *
 * A tile of an operand is rows of 64 elements (128 bytes), swizzled by 128 bytes and aligned to
 * 1024: what a TMA box of 64 elements writes, and what operand() describes to wgmma. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_HOPPER_CUH
#define KERNELS_CUDA_HOPPER_CUH

#include "kernels/cuda/tensor.cuh"
#include <cuda.h>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA 1
#else
#define HAS_WGMMA 0
#endif

// A matrix of bf16 to the copy engine: sizes and boxes in elements, innermost first, the strides of
// all but the innermost in bytes. A box's rows are 64 elements, swizzled by 128 bytes, or 32,
// by 64.
struct tensor_boxes {
    int rank;
    cuuint64_t sizes[4], strides[3];
    cuuint32_t box[4];
    CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B; // what the L2 reads
};

// False after a recorded failure (device.cu).
bool tensor_map(struct device *dev, CUtensorMap *ret, const void *x, const tensor_boxes &boxes);

#if HAS_WGMMA

// ---- barriers; addresses are those of shared_address() -----------------------------------------

INLINE void barrier_init(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes barrier_init() of this thread visible to the TMA.
INLINE void barriers_made()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and lets the phase wait for `bytes` of copies.
INLINE void barrier_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

INLINE void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same where `does`. A branch would part the warps of a group between two wgmma.
INLINE void barrier_arrive_if(uint32_t barrier, bool does)
{
    asm volatile("{ .reg .pred does;\n"
                 "setp.ne.u32 does, %1, 0;\n"
                 "@does mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(barrier),
                 "r"((uint32_t)does)
                 : "memory");
}

// Waits for the end of the phase of this parity.
INLINE void barrier_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile("{ .reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again; }" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// ---- a ring of stages --------------------------------------------------------------------------

// A ring of n stages in shared memory, each with a barrier that says it is full and one that says
// it is empty, from the view of one that goes round it. Addresses.
struct stage_ring {
    uint32_t first, bytes, full, empty; // bytes: of a stage
    int n, slot;
    uint32_t parity;

    __device__ uint32_t stage() const { return first + slot * bytes; }
    __device__ uint32_t is_full() const { return full + slot * 8; }
    __device__ uint32_t is_empty() const { return empty + slot * 8; }
    __device__ void next()
    {
        if (++slot < n) return;
        slot = 0;
        parity ^= 1;
    }
};

// ---- copies ------------------------------------------------------------------------------------

#define L2_EVICT_FIRST 0x12F0000000000000ull // what is read once
#define L2_EVICT_LAST  0x14F0000000000000ull // what every block reads

// The map, before the first copy needs it.
INLINE void prefetch_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box at (0, row, pair, chunk) of a map of (64, rows, pairs, chunks) elements, zeros outside of
// it.
INLINE void copy_box(uint32_t to, const CUtensorMap *map, int row, int pair, int chunk,
                     uint32_t barrier, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
                 "l"(map), "r"(0), "r"(row), "r"(pair), "r"(chunk), "r"(barrier), "l"(policy)
                 : "memory");
}

// A box at (column, row, matrix) of a map of so many columns, rows and matrices, zeros outside of
// it.
INLINE void copy_box(uint32_t to, const CUtensorMap *map, int column, int row, int matrix,
                     uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(barrier)
                 : "memory");
}

// Arrives when the cp.async that this thread has issued so far have come.
INLINE void barrier_arrive_copied(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// What this thread knows to be in shared memory, by stores or cp.async, is there for wgmma too.
INLINE void fence_async()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- wgmma -------------------------------------------------------------------------------------

// Rows of 128 bytes at a 1024-aligned address, in groups of 8; + 2 for each 16 of k.
INLINE uint64_t operand(uint32_t address)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// So many times 16 bytes behind: an addition to the half that holds the address.
INLINE uint64_t behind(uint64_t operand, uint32_t units)
{
    return operand >> 32 << 32 | (uint32_t)((uint32_t)operand + units);
}

// The same tile as the right operand of a product over its rows, 16 of them (+ 128 for the next
// 16); of more than 64 columns, the next 64 lie `apart` bytes behind.
INLINE uint64_t operand_of_rows(uint32_t address, uint32_t apart)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(apart >> 4) << 16 | 64ull << 32 |
           1ull << 62;
}

INLINE void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

INLINE void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most N of the committed groups are unfinished.
template <int N> INLINE void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// d (64, 8 J) += a (64, 16) b (8 J, 16)^T. The descriptors come first and are written as if they
// changed, so that the numbers of the sums do not depend on J.
#define NAMES(a, b, c, d) "%" #a ", %" #b ", %" #c ", %" #d
#define SUMS(i)           "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define NAMES_1           NAMES(2, 3, 4, 5)
#define NAMES_2           NAMES_1 ", " NAMES(6, 7, 8, 9)
#define NAMES_4           NAMES_2 ", " NAMES(10, 11, 12, 13) ", " NAMES(14, 15, 16, 17)
#define NAMES_5           NAMES_4 ", " NAMES(18, 19, 20, 21)
#define NAMES_6           NAMES_5 ", " NAMES(22, 23, 24, 25)
#define NAMES_8           NAMES_6 ", " NAMES(26, 27, 28, 29) ", " NAMES(30, 31, 32, 33)
#define NAMES_9           NAMES_8 ", " NAMES(34, 35, 36, 37)
#define NAMES_10          NAMES_8 ", " NAMES(34, 35, 36, 37) ", " NAMES(38, 39, 40, 41)
#define NAMES_12          NAMES_10 ", " NAMES(42, 43, 44, 45) ", " NAMES(46, 47, 48, 49)
#define NAMES_14          NAMES_12 ", " NAMES(50, 51, 52, 53) ", " NAMES(54, 55, 56, 57)
#define NAMES_16          NAMES_14 ", " NAMES(58, 59, 60, 61) ", " NAMES(62, 63, 64, 65)
#define NAMES_17          NAMES_16 ", " NAMES(66, 67, 68, 69)
#define NAMES_18          NAMES_17 ", " NAMES(70, 71, 72, 73)
#define NAMES_20          NAMES_18 ", " NAMES(74, 75, 76, 77) ", " NAMES(78, 79, 80, 81)
#define NAMES_22          NAMES_20 ", " NAMES(82, 83, 84, 85) ", " NAMES(86, 87, 88, 89)
#define NAMES_24          NAMES_22 ", " NAMES(90, 91, 92, 93) ", " NAMES(94, 95, 96, 97)
#define NAMES_26          NAMES_24 ", " NAMES(98, 99, 100, 101) ", " NAMES(102, 103, 104, 105)
#define NAMES_28          NAMES_26 ", " NAMES(106, 107, 108, 109) ", " NAMES(110, 111, 112, 113)
#define NAMES_30          NAMES_28 ", " NAMES(114, 115, 116, 117) ", " NAMES(118, 119, 120, 121)
#define NAMES_32          NAMES_30 ", " NAMES(122, 123, 124, 125) ", " NAMES(126, 127, 128, 129)
#define SUMS2(i)          SUMS(i), SUMS(i + 4)
#define SUMS4(i)          SUMS2(i), SUMS2(i + 8)
#define SUMS8(i)          SUMS4(i), SUMS4(i + 16)
#define SUMS_1            SUMS(0)
#define SUMS_2            SUMS2(0)
#define SUMS_4            SUMS4(0)
#define SUMS_5            SUMS_4, SUMS(16)
#define SUMS_6            SUMS_4, SUMS2(16)
#define SUMS_8            SUMS8(0)
#define SUMS_9            SUMS_8, SUMS(32)
#define SUMS_12           SUMS_8, SUMS4(32)
#define SUMS_16           SUMS_8, SUMS8(32)
#define SUMS_17           SUMS_16, SUMS(64)
#define SUMS_18           SUMS_16, SUMS2(64)
#define SUMS_24           SUMS_16, SUMS8(64)
#define SUMS_32           SUMS_24, SUMS8(96)
#define WGMMA(J, N)                                                                                \
    INLINE void wgmma(float(&d)[4 * J], uint64_t a, uint64_t b)                                    \
    {                                                                                              \
        asm volatile("{ .reg .pred add;\n"                                                         \
                     "setp.ne.b32 add, 1, 0;\n"                                                    \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES_##J        \
                     "}, %0, %1, add, 1, 1, 0, 0; }"                                               \
                     : "+l"(a), "+l"(b), SUMS_##J);                                                \
    }
WGMMA(1, 8)
WGMMA(2, 16)
WGMMA(4, 32)
WGMMA(5, 40)
WGMMA(6, 48)
WGMMA(8, 64)
WGMMA(12, 96)
WGMMA(16, 128)
WGMMA(18, 144)
#undef WGMMA

/* The same, each operand with k along its rows or, _across, with k across them: a tile of 64 rows
 * of k, its columns in groups of 64 (operand_of_rows()). */
template <bool A_ACROSS, bool B_ACROSS>
INLINE void wgmma_of(float (&d)[128], uint64_t a, uint64_t b)
{
    asm volatile("{ .reg .pred add;\n"
                 "setp.ne.b32 add, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NAMES_32
                 "}, %0, %1, add, 1, 1, %130, %131; }"
                 : "+l"(a), "+l"(b), SUMS_32
                 : "n"(A_ACROSS), "n"(B_ACROSS));
}

/* wgmma into d (64, 8 J) as mma's results lie, [i][e]: without what was there where add is 0;
 * and with the left operand in registers, as mma has it, b being rows of k16 columns or, _of_rows,
 * 16 rows of columns; _codes: both in e4m3, 32 columns. `after`: the numbers behind those of the
 * sums. */
#define FLAT(J) float(&d)[4 * J] = reinterpret_cast<float(&)[4 * J]>(sums)
#define WGMMA_TO(J, N, NAME, KIND, across, after)                                                  \
    INLINE void NAME(float(&sums)[J][4], uint64_t a, uint64_t b, int add)                          \
    {                                                                                              \
        FLAT(J);                                                                                   \
        asm volatile("{ .reg .pred add;\n"                                                         \
                     "setp.ne.b32 add, %" #after ", 0;\n"                                          \
                     "wgmma.mma_async.sync.aligned.m64n" #N KIND " {" NAMES_##J                    \
                     "}, %0, %1, add, 1, 1" across "; }"                                           \
                     : "+l"(a), "+l"(b), SUMS_##J                                                  \
                     : "r"(add));                                                                  \
    }
#define WGMMA_LEFT(J, N, NAME, KIND, across, a0, a1, a2, a3)                                       \
    INLINE void NAME(float(&sums)[J][4], const uint32_t(&a)[4], uint64_t b, int add)               \
    {                                                                                              \
        FLAT(J);                                                                                   \
        asm volatile("{ .reg .pred add;\n"                                                         \
                     "setp.ne.b32 add, %1, 0;\n"                                                   \
                     "wgmma.mma_async.sync.aligned.m64n" #N KIND " {" NAMES_##J                    \
                     "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %0, add, 1, 1" across "; }"     \
                     : "+l"(b), "+r"(add), SUMS_##J                                                \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));                                \
    }
#define OF_BF16 "k16.f32.bf16.bf16"
#define OF_E4M3 "k32.f32.e4m3.e4m3"
WGMMA_TO(8, 64, wgmma_to, OF_BF16, ", 0, 0", 34)
WGMMA_TO(2, 16, wgmma_codes, OF_E4M3, "", 10)
WGMMA_TO(4, 32, wgmma_codes, OF_E4M3, "", 18)
WGMMA_TO(8, 64, wgmma_codes, OF_E4M3, "", 34)
WGMMA_LEFT(1, 8, wgmma_left, OF_BF16, ", 0", 6, 7, 8, 9)
WGMMA_LEFT(2, 16, wgmma_left, OF_BF16, ", 0", 10, 11, 12, 13)
WGMMA_LEFT(4, 32, wgmma_left, OF_BF16, ", 0", 18, 19, 20, 21)
WGMMA_LEFT(8, 64, wgmma_left, OF_BF16, ", 0", 34, 35, 36, 37)
WGMMA_LEFT(16, 128, wgmma_left, OF_BF16, ", 0", 66, 67, 68, 69)
WGMMA_LEFT(8, 64, wgmma_left_of_rows, OF_BF16, ", 1", 34, 35, 36, 37)
WGMMA_LEFT(9, 72, wgmma_left_of_rows, OF_BF16, ", 1", 38, 39, 40, 41)
WGMMA_LEFT(16, 128, wgmma_left_of_rows, OF_BF16, ", 1", 66, 67, 68, 69)
WGMMA_LEFT(17, 136, wgmma_left_of_rows, OF_BF16, ", 1", 70, 71, 72, 73)
WGMMA_LEFT(24, 192, wgmma_left_of_rows, OF_BF16, ", 1", 98, 99, 100, 101)
WGMMA_LEFT(32, 256, wgmma_left_of_rows, OF_BF16, ", 1", 130, 131, 132, 133)
WGMMA_LEFT(1, 8, wgmma_codes, OF_E4M3, "", 6, 7, 8, 9)
WGMMA_LEFT(2, 16, wgmma_codes, OF_E4M3, "", 10, 11, 12, 13)
WGMMA_LEFT(4, 32, wgmma_codes, OF_E4M3, "", 18, 19, 20, 21)
WGMMA_LEFT(8, 64, wgmma_codes, OF_E4M3, "", 34, 35, 36, 37)
WGMMA_LEFT(16, 128, wgmma_codes, OF_E4M3, "", 66, 67, 68, 69)
#undef WGMMA_TO
#undef WGMMA_LEFT
#undef OF_BF16
#undef OF_E4M3
#undef FLAT

// What comes before in the program and changes these registers, or reads them, stays before; what
// comes behind stays behind. To be said before wgmma that go on with sums, and after the wait.
template <int J> INLINE void settle(float (&sums)[J][4])
{
    unrolled<J, 4>([&](int i, int e) { asm volatile("" : "+f"(sums[i][e])::"memory"); });
}
template <int J> INLINE void settle(uint32_t (&left)[J][4])
{
    unrolled<J, 4>([&](int i, int e) { asm volatile("" : "+r"(left[i][e])::"memory"); });
}

// Threads of the block's first so many warpgroups meet.
template <int GROUPS> INLINE void groups_sync()
{
    asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory");
}

// The registers that a thread of this warpgroup may have from now on.
template <int N> INLINE void fewer_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> INLINE void more_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

#endif // HAS_WGMMA
#endif
