/* op_table.h: the table that drives the tests of kernels/ops.h. A case is an operation and a shape;
 * for each, with fresh random inputs and outputs poisoned with NaN:
 *   reference  the CPU against a plain double-precision version written in the test. Gradients are
 *              held against central differences of the double-precision forward formula.
 *   cuda f32   CUDA against the CPU on the same inputs.
 *   cuda bf16  the same, inputs rounded to bf16 first and the CPU run on the rounded values.
 * Errors are relative to the largest entry of the array. Memory behind every array is guarded.
 *
 *   test_X [--device cuda:N] [FILTER]     FILTER: operations whose name contains it */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_OP_TABLE_H
#define TESTS_SUPPORT_OP_TABLE_H

#include "common/base/rng.h"
#include "kernels/ops.h"
#include "tests/support/support.h"
#include <float.h>

enum { MAX_ARRAYS = 16, GUARD = 256 }; // GUARD: bytes behind an array

enum role { IN, OUT, INOUT };
enum kind { DATA, F32, F64, I32 }; // DATA: f32 here, the case's dtype on the device

struct array {
    const char *name;
    enum role role;
    enum kind kind;
    int64_t n;
    float *f;       // DATA, F32: values before the run
    int32_t *i;     // I32
    double *expect; // outputs; NaN: not compared
};

struct op_test {
    const struct op_case *c;
    struct array a[MAX_ARRAYS];
    int n_arrays;
    struct rng rng;
    struct batch_view batch; // host numbers; pointers are set from the arrays at launch
    enum dtype dt;
};

struct op_def {
    const char *name;
    void (*setup)(struct op_test *);
    void (*launch)(struct op_test *, struct device *, const struct ops *, void **d);
    void (*reference)(struct op_test *, double **v); // v: inputs in double; fills expect
};

struct op_case {
    const struct op_def *op;
    const char *shape;
    int p[10];
    bool big; // too large for the double-precision reference; CUDA against CPU only
};

extern struct device *op_cpu, *op_cuda; // op_cuda: NULL where there is none

// Runs the table, then the file's TEST()s, each over both devices.
int op_main(int argc, char **argv, const struct op_case *cases, size_t n_cases);
#define OP_TESTS(cases)                                                                            \
    int main(int argc, char **argv)                                                                \
    {                                                                                              \
        return op_main(argc, argv, cases, sizeof cases / sizeof cases[0]);                         \
    }

void *must(void *p); // exits where it is NULL
void sync_or_fail(struct device *dev);

// A case's arrays, in the order of the pointers that launch() gets. floats: filled with normal
// numbers times `scale` where they are inputs.
struct array *array_new(struct op_test *t, const char *name, enum role role, enum kind kind,
                        int64_t n);
float *floats(struct op_test *t, const char *name, enum role role, enum kind kind, int64_t n,
              float scale);
int32_t *ints(struct op_test *t, const char *name, int64_t n);

/* Adds to expect (of the array `gradient`) the derivative of loss() by entries of input `input`,
 * through central differences in double. `add`: the gradient is added to what is there. Large
 * inputs: a random sample of entries; the rest stay NaN. */
void differentiate(struct op_test *t, double **v, int gradient, int input, bool add,
                   double (*loss)(struct op_test *, double **v));

// Runs `body` on the CPU and, where there is one, on CUDA.
void on_each_device(const char *op, void (*body)(struct device *dev));
void *to_device(struct device *dev, const void *host, size_t bytes); // host NULL: filled with NaN
void from_device(struct device *dev, void *host, const void *d, size_t bytes);

#endif
