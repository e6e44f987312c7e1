/* generated.h: numbers that NumPy and C make alike (tests/golden/generated.py has the same):
 * weights of the folders of reference values, which list their tensors in weights.txt, and the
 * signs of projections, which stand there for whole gradients. Formulas: splitmix64 (Steele, Lea
 * and Flood 2014), from a state that is FNV-1a of a text. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_GENERATED_H
#define TESTS_SUPPORT_GENERATED_H

#include "common/base/status.h"
#include <stdint.h>

enum { GENERATED_SIGNS = 8 }; // projections of a tensor

uint64_t generated_state(const char *text);
uint64_t generated_bits(uint64_t state, int64_t i); // i from 0

// Of a tensor, gone through entry by entry: its sums with eight lists of signs, and of squares.
struct projection {
    uint64_t state;
    double sum[GENERATED_SIGNS], squares;
};
void projection_init(struct projection *p, const char *tensor);
void projection_add(struct projection *p, int64_t i, double x); // entry i of the tensor

// Writes the file that FOLDER/weights.txt describes (model.safetensors, adapter_model.safetensors)
// into the folder `to`. Its first line: the file and a seed; then a tensor a line: "NAME f32 MEAN
// DEVIATION DIM..." or "NAME u8 LOWEST HIGHEST DIM...". The bits are those of
// "SEED/NAME", or of TEXT where the line ends in "=TEXT".
enum status generated_write(const char *folder, const char *to);

#endif
