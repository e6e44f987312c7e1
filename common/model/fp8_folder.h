/* fp8_folder.h: matrices that a model folder stores in FP8 (e4m3): codes of a byte, and beside them
 * scales, in whichever of the published forms config.json's quantization_config names. A weight is
 * its code times its scale in f32, and in memory one of the arena's dtype. Any thread.
 *
 * NAME.weight is F8_E4M3, and what it is multiplied by, of the quant_method
 * - fp8 (DeepSeek, Qwen): NAME.weight_scale_inv, one for a block of weight_block_size rows and
 *   columns; without that size NAME.weight_scale, a single one;
 * - compressed-tensors, format float-quantized: NAME.weight_scale; strategy tensor has one, channel
 *   one a row, block one for each block_structure;
 * - fbgemm_fp8: NAME.weight_scale, one a row;
 * - modelopt, quant_algo FP8: NAME.weight_scale, a single one.
 *
 * Which matrices are so stored is told by their own dtype. Scales of activations and of the KV
 * cache are left alone. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_MODEL_FP8_FOLDER_H
#define COMMON_MODEL_FP8_FOLDER_H

#include "common/model/safetensors.h"

// Whether quantization_config is of such a folder: ST_UNSUPPORTED names what it is of. Rows and
// columns that have one scale: 0 where the scales' own shape says.
enum status fp8_config_read(const char *where, const json_t *quantization, int ret_block[2]);

// The matrix `codes` of the set as an entry whose numbers are read() as f32. An error names what
// its scales lack.
enum status fp8_find(const struct safetensors *set, const struct safetensors_entry *codes,
                     const int block[2], struct safetensors_entry *ret);
// Whether a tensor of the set is a scale, of a matrix that is in it too.
bool fp8_is_scale(const struct safetensors *set, const char *name);
// The quantization_config of a folder that weights_save_twin() writes: compressed-tensors, a scale
// a row. rounds: those who load it may round what the matrices multiply to e4m3 too, a token at a
// time; else the matrices alone are. NULL: no memory. The caller's.
struct weights;
json_t *fp8_config_new(const struct weights *w, bool rounds);
// Of fp8_find()'s: what rounding its rows to e4m3 with a power of two each (dtype.h) changes, the
// root of the mean square as a share of the matrix's own. 0 where all scales are powers of two,
// whose numbers are kept as they are.
double fp8_rounding(const struct safetensors_entry *matrix);

#endif
