/* weights_impl.h: what the files behind weights.h share: the table's own (weights.c), loading
 * (weights_load.c) and saving (weights_save.c). Nobody else includes it. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_MODEL_WEIGHTS_IMPL_H
#define COMMON_MODEL_WEIGHTS_IMPL_H

#include "common/model/safetensors.h"
#include "common/model/weights.h"

#define STAGING_ELEMENTS ((int64_t)4 << 20)

void *weights_address(const struct weights *w, int64_t element); // on the device
// n elements of the host's memory; f32, f16 or bf16 into f32 or bf16.
void weights_convert(void *to, enum dtype to_dt, const void *from, enum dtype from_dt, int64_t n);
// n elements of type `dt` to element `at` of tensor t on; `staging`, of STAGING_ELEMENTS, is used
// where the arena has another type.
void weights_copy_in(const struct weights *w, struct device *dev, const struct weight_tensor *t,
                     int64_t at, const void *data, enum dtype dt, int64_t n, void *staging);
// A tensor's dimensions in a folder: a convolution's have its one input channel in the middle.
int weights_file_shape(const struct weight_tensor *t, int64_t ret[3]);
// What the folder calls the tensor, or the one that holds it.
const char *weights_folder_name(const struct weight_tensor *t);
// Whether it is the first of the table that is in that tensor of the folder.
bool weights_is_first_stored(const struct weight_tensor *t);

// ---- mxfp4 --------------------------------------------------------------------------------------
// Matrices of gpt-oss's published folders: 4-bit floats (e2m1), 32 neighbours of a row with one
// scale, a power of two (OCP Microscaling Formats 1.0, 2023). NAME_blocks (matrices, rows, columns
// / 32, 16) U8 has two values a byte, the first in the low half; NAME_scales (matrices, rows,
// columns / 32) U8 the exponents plus 127. Every value is a bf16. Reading only; any thread.

// Whether the set has a tensor as these two; *ret, which may be NULL, is then one whose rows are
// counted over all matrices.
bool mxfp4_find(const struct safetensors *set, const char *name, struct safetensors_entry *ret);
// Whether they are (shape[0], shape[2], shape[1]): what is stored as (experts, columns, rows) where
// it is not quantised.
enum status mxfp4_check(const struct safetensors *set, const char *name, const int64_t shape[3]);
// Whether `tensor` is one of the two of `name`.
bool mxfp4_names(const char *name, const char *tensor);

#endif
