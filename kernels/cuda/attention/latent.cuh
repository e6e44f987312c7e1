/* latent.cuh: the products of latent attention (latent.cu, latent_tensor.cu). */
#ifndef KERNELS_CUDA_LATENT_CUH
#define KERNELS_CUDA_LATENT_CUH

#include "kernels/cuda/cuda.cuh"

// Of each head: C (rows, cols) = A (rows, depth) B, of which entry (k, c) is at b[k * b_depth + c *
// b_col]. An entry is one sum in the order of the inner dimension, whatever the number of rows: a
// row has the same bits in decoding and in training.
template <typename T> struct heads_product {
    T *c;
    const T *a, *b;
    int n_heads, rows, cols, depth;
    bool early; // B (ops.h, Order)
    int64_t a_row, a_head, b_head, c_row, c_head, b_depth, b_col;
    // What of the absorbed form is there already: behind a row's `depth` and `cols` entries of a
    // head the rotated ones, to be copied, and behind all heads the row's key, c_head wide.
    int rotated;
    const T *keys; // NULL: nothing of this
};

// Multiplies on Hopper's tensor cores, with all that `rotated` and `keys` ask for
// (latent_tensor.cu).
bool latent_mma_takes(struct device *dev, const heads_product<bf16> &p);
void latent_mma(struct device *dev, const heads_product<bf16> &p);

#endif
