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
    double noise;   // of f32 itself, where it is more than the tolerance; 0: it is not
};

struct op_test {
    const struct op_case *c;
    const int *p; // its parameters
    struct array a[MAX_ARRAYS];
    int n_arrays;
    struct rng rng;
    struct batch_view batch; // host numbers; pointers are set from the arrays at launch
};

struct op_def {
    const char *name;
    void (*setup)(struct op_test *);
    void (*launch)(struct op_test *, void **d);
    void (*reference)(struct op_test *, double **v); // v: inputs in double; fills expect
    // of a gradient, in place of a reference: expect of each output "dX" is by the input "X"
    double (*loss)(struct op_test *, double **v);
};
#define OP(op, name)                                                                               \
    static const struct op_def op_##op = {name, op##_setup, op##_launch, op##_reference, NULL}
#define OP_BACK(op, name, loss)                                                                    \
    static const struct op_def op_##op = {name, op##_setup, op##_launch, NULL, loss}

struct op_case {
    const struct op_def *op;
    const char *shape;
    int p[10];
    bool big; // too large for the double-precision reference; CUDA against CPU only
};

extern struct device *op_cpu, *op_cuda; // op_cuda: NULL where there is none
// What runs now: in it are to_device() and what launch() and the bodies below are given to do.
extern struct device *dev;
extern const struct ops *ops;
extern enum dtype dt;
void op_use(struct device *device, enum dtype as);

// Runs the table, then the file's TEST()s, each over both devices.
int op_main(int argc, char **argv, const struct op_case *cases, size_t n_cases);
#define OP_TESTS(cases) OP_MAIN(cases, sizeof cases / sizeof cases[0])
#define OP_BODIES       OP_MAIN(NULL, 0) // no table
#define OP_MAIN(cases, n)                                                                          \
    int main(int argc, char **argv)                                                                \
    {                                                                                              \
        return op_main(argc, argv, cases, n);                                                      \
    }

bool op_wanted(const char *name); // by FILTER
void sync_or_fail(void);

/* Memory lives until the case or body is over, or what began with op_mark() is released. op_host():
 * zeros. to_device(): a copy of host's, or, where that is NULL, 0xFF: NaN. */
void *op_host(size_t bytes);
void *to_device(const void *host, size_t bytes);
void from_device(void *host, const void *d, size_t bytes);
size_t op_mark(void);
void op_release(size_t mark);

float *normal_numbers(struct rng *rng, size_t n, float scale);               // op_host()
void *normal_on_device(enum dtype as, size_t n, float scale, uint64_t seed); // the same of a seed
// Stores the keys and values of rows of qkv, of which nothing is rotated.
void op_kv_store(const struct kv_view *kv, int layer, void *qkv, const struct batch_view *batch,
                 const struct attn_shape *shape);
void assert_same_bytes(const char *what, const void *a, const void *b, size_t bytes); // device

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

double dot(const double *a, const double *b, int64_t n);

// Defines a test whose body runs on the CPU and, where there is one, on CUDA: an operation in
// FILTER's sense. dt is f32, or, one after the other, what the device computes in.
#define ON_EACH_DEVICE(name) ON_EACH(name, false)
#define ON_EACH_DTYPE(name)  ON_EACH(name, true)
#define ON_EACH(name, each_dtype)                                                                  \
    static void name(void);                                                                        \
    TEST(test_##name)                                                                              \
    {                                                                                              \
        op_on_each(#name, name, each_dtype);                                                       \
    }                                                                                              \
    static void name(void)
void op_on_each(const char *name, void (*body)(void), bool each_dtype);

#endif
