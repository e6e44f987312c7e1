/* mxfp4.h: matrices of gpt-oss's published folders: 4-bit floats (e2m1), 32 neighbours of a row
 * with one scale, a power of two (OCP Microscaling Formats 1.0, 2023). NAME_blocks (matrices, rows,
 * columns / 32, 16) U8 has two values a byte, the first in the low half; NAME_scales (matrices,
 * rows, columns / 32) U8 the exponents plus 127. Every value is a bf16. Reading only; any thread.
 */
#ifndef COMMON_MODEL_MXFP4_H
#define COMMON_MODEL_MXFP4_H

#include "common/model/safetensors.h"
#include <stdbool.h>

struct mxfp4 {
    const uint8_t *blocks, *scales;
    int64_t cols;
};

// Whether the set has a tensor as these two; *ret may be NULL.
bool mxfp4_find(const struct safetensors *set, const char *name, struct mxfp4 *ret);
// Whether they are (shape[0], shape[2], shape[1]): what is stored as (experts, columns, rows) where
// it is not quantised.
enum status mxfp4_check(const struct safetensors *set, const char *name, const int64_t shape[3]);
// Whether `tensor` is one of the two of `name`.
bool mxfp4_names(const char *name, const char *tensor);
// n values of a row, counted over all matrices, from column `first` on.
void mxfp4_read(const struct mxfp4 *x, int64_t row, int64_t first, int64_t n, uint16_t *ret);

#endif
