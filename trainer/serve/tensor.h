/* tensor.h: a tensor of the Tinker API's protobuf messages: 1 dense values, or 2 sparse ones (CSR:
 * 1 values, 2 row pointers, 3 columns, of int64 each), 3 dtype, 4 shape. Any thread. */
#ifndef TRAINER_SERVE_TENSOR_H
#define TRAINER_SERVE_TENSOR_H

#include "trainer/serve/protobuf.h"

enum { TENSOR_FLOAT32 = 1, TENSOR_INT64 = 2 }; // dtypes on the wire

// Of n rows; a list of n has one column. ret (n, columns): floats or, `integers`, int32 token ids
// of what came as int64; allocated, 0 where a sparse tensor has nothing. ret_two_d: it has a second
// dimension. `name` names it in errors.
enum status tensor_read(const struct proto_field *field, const char *name, int n, bool integers,
                        int *ret_columns, bool *ret_two_d, void **ret);

#endif
