/* tensor.cuh: the instructions of the tensor-core kernels: asynchronous copies into shared memory,
 * ldmatrix, and mma m16n8k16 of bf16. Private to kernels/cuda. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_TENSOR_CUH
#define KERNELS_CUDA_TENSOR_CUH

#include "kernels/cuda/cuda.cuh"

INLINE uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}
INLINE uint32_t shared_address(uint32_t p) // which is one
{
    return p;
}

// 16 bytes; zeros where there is nothing to copy (`from` must still point into the array).
template <typename P> INLINE void copy16(P to, const bf16 *from, bool valid)
{
    int bytes = valid ? 16 : 0; // the rest is zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes)
                 : "memory");
}

// One number, likewise.
INLINE void copy4(float *to, const float *from, bool valid)
{
    int bytes = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes)
                 : "memory");
}

INLINE void copies_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most N of the committed groups are still on their way.
template <int N> INLINE void copies_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Rows of 8-element units. The unit u of row r lies at u ^ r % 8, so that eight rows of one unit
 * are in different banks. */
template <int UNITS> INLINE bf16 *unit_at(bf16 *tile, int row, int unit)
{
    return tile + (row * UNITS + (unit ^ (row & 7))) * 8;
}

// Four 8 x 8 matrices; lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i.
template <typename P> INLINE void load_matrices(uint32_t (&r)[4], P p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p))
                 : "memory");
}

template <typename P> INLINE void load_matrices_transposed(uint32_t (&r)[4], P p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p))
                 : "memory");
}

/* 16 x 16 of a tile whose rows lie PITCH apart, at (row, col), as mma takes it:
 *   left:         rows are those of its left operand, columns the inner dimension;
 *   right:        rows are the columns of the right operand, columns the inner dimension (A B');
 *   right_across: rows are the inner dimension, columns those of the right operand (A B).
 * A right operand comes as two 8-wide halves: registers 0, 1 and 2, 3. */
template <int PITCH> INLINE void load_left(uint32_t (&r)[4], const bf16 *tile, int row, int col)
{
    int lane = threadIdx.x % 32;
    load_matrices(r, tile + (row + lane % 16) * PITCH + col + lane / 16 * 8);
}

template <int PITCH> INLINE void load_right(uint32_t (&r)[4], const bf16 *tile, int row, int col)
{
    int lane = threadIdx.x % 32;
    load_matrices(r, tile + (row + lane / 16 * 8 + lane % 8) * PITCH + col + lane / 8 % 2 * 8);
}

template <int PITCH>
INLINE void load_right_across(uint32_t (&r)[4], const bf16 *tile, int row, int col)
{
    int lane = threadIdx.x % 32;
    load_matrices_transposed(r, tile + (row + lane % 16) * PITCH + col + lane / 16 * 8);
}

INLINE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

INLINE uint32_t pack2(float x, float y)
{
    __nv_bfloat162 p = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<uint32_t *>(&p);
}

INLINE void store_pair(bf16 *to, float x, float y)
{
    *reinterpret_cast<uint32_t *>(to) = pack2(x, y);
}

INLINE void store_pair(float *to, float x, float y)
{
    *reinterpret_cast<float2 *>(to) = make_float2(x, y);
}

#endif
