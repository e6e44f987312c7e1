/* tensor.c: tensors of the Tinker API. No state; any thread. */
#include "trainer/serve/tensor.h"

#include <stdlib.h>
#include <string.h>

#define MOST_COLUMNS 65536

struct tensor { // as it is in the message
    bool dense, sparse;
    struct proto_span values, rows, columns;
    uint64_t dtype;
    int n_dims;
    int64_t shape[2];
};

static enum status take_dim(void *context, uint64_t value)
{
    struct tensor *t = context;
    if (t->n_dims == 2) return status_fail(ST_UNSUPPORTED, "a tensor has more than two dimensions");
    if (value > INT32_MAX) return status_fail(ST_INVALID, "a tensor's shape is out of range");
    t->shape[t->n_dims++] = (int64_t)value;
    return ST_OK;
}

static enum status take_sparse_field(void *context, const struct proto_field *field)
{
    struct tensor *t = context;
    if (field->number < 1 || field->number > 3) return ST_OK;
    enum status st = proto_expect(field, PROTO_BYTES, "sparse_csr");
    if (st != ST_OK) return st;
    *(field->number == 1 ? &t->values : field->number == 2 ? &t->rows : &t->columns) = field->span;
    return ST_OK;
}

static enum status take_tensor_field(void *context, const struct proto_field *field)
{
    struct tensor *t = context;
    enum status st = ST_OK;
    switch (field->number) {
    case 1:
        CHECK(proto_expect(field, PROTO_BYTES, "dense"));
        t->values = field->span;
        t->dense = true;
        break;
    case 2:
        CHECK(proto_expect(field, PROTO_BYTES, "sparse_csr"));
        t->sparse = true;
        st = proto_each_field(field->span, take_sparse_field, t);
        break;
    case 3:
        CHECK(proto_expect(field, PROTO_VARINT, "dtype"));
        t->dtype = field->value;
        break;
    case 4:
        st = proto_each_varint(field, "shape", take_dim, t);
        break;
    }
out:
    return st;
}

static int64_t index_at(struct proto_span indices, size_t i)
{
    int64_t x;
    memcpy(&x, indices.data + i * sizeof x, sizeof x);
    return x;
}

// Its rows and columns: a list of n is (n, 1).
static enum status check_shape(const struct tensor *t, const char *name, int n, size_t size)
{
    const int64_t columns = t->n_dims == 2 ? t->shape[1] : 1;
    const size_t values = t->values.len / size;
    if (t->dense == t->sparse)
        return status_fail(ST_FORMAT, "\"%s\" is no tensor: it needs either dense or sparse values",
                           name);
    if (t->values.len % size) return status_fail(ST_FORMAT, "\"%s\" has a part of a value", name);
    if (t->n_dims > 0 && t->shape[0] != n)
        return status_fail(ST_INVALID, "\"%s\" has %lld entries, the input %d tokens", name,
                           (long long)t->shape[0], n);
    if (columns < 1 || columns > MOST_COLUMNS)
        return status_fail(ST_INVALID, "\"%s\" has %lld entries a token; 1 to %d are possible",
                           name, (long long)columns, MOST_COLUMNS);
    if (t->dense && values != (size_t)n * (size_t)columns)
        return status_fail(ST_INVALID, "\"%s\" has %zu values for %d tokens", name, values, n);
    if (t->sparse && (t->n_dims != 2 || t->rows.len != ((size_t)n + 1) * sizeof(int64_t) ||
                      t->columns.len != values * sizeof(int64_t)))
        return status_fail(ST_INVALID, "\"%s\": its sparse indices do not fit its shape", name);
    return ST_OK;
}

// The value of each cell in turn, where it lies in the message; NULL: a sparse tensor has none.
static enum status spread(const struct tensor *t, const char *name, int n, size_t size,
                          const unsigned char **ret_cells)
{
    const size_t columns = t->n_dims == 2 ? (size_t)t->shape[1] : 1;
    if (t->dense) {
        for (size_t i = 0; i < (size_t)n * columns; i++) ret_cells[i] = t->values.data + i * size;
        return ST_OK;
    }
    const int64_t values = (int64_t)(t->values.len / size);
    for (int row = 0; row < n; row++) {
        const int64_t first = index_at(t->rows, (size_t)row),
                      end = index_at(t->rows, (size_t)row + 1);
        if (first < 0 || end < first || end > values)
            return status_fail(ST_INVALID, "\"%s\": a row's sparse indices are out of order", name);
        for (int64_t i = first; i < end; i++) {
            const int64_t column = index_at(t->columns, (size_t)i);
            if (column < 0 || column >= (int64_t)columns)
                return status_fail(ST_INVALID, "\"%s\": a sparse column is out of range", name);
            ret_cells[(size_t)row * columns + (size_t)column] = t->values.data + (size_t)i * size;
        }
    }
    return ST_OK;
}

enum status tensor_read(const struct proto_field *field, const char *name, int n, bool integers,
                        int *ret_columns, bool *ret_two_d, void **ret)
{
    enum status st;
    struct tensor t = {0};
    const size_t size = integers ? sizeof(int64_t) : sizeof(float);
    const unsigned char **cells = NULL;
    void *values = NULL;
    CHECK(proto_expect(field, PROTO_BYTES, name));
    CHECK(proto_each_field(field->span, take_tensor_field, &t));
    if (t.dtype != (integers ? TENSOR_INT64 : TENSOR_FLOAT32))
        FAIL(ST_INVALID, "\"%s\" must be of %s", name, integers ? "int64" : "float32");
    CHECK(check_shape(&t, name, n, size));
    *ret_two_d = t.n_dims == 2;
    *ret_columns = *ret_two_d ? (int)t.shape[1] : 1;
    const size_t all = (size_t)n * (size_t)*ret_columns;
    cells = calloc(all, sizeof *cells);
    values = calloc(all, 4);
    if (!cells || !values) FAIL(ST_NO_MEMORY, "out of memory");
    CHECK(spread(&t, name, n, size, cells));
    for (size_t i = 0; i < all; i++) {
        if (!cells[i]) continue;
        int64_t x = 0;
        memcpy(&x, cells[i], size);
        if (integers && (x < 0 || x > INT32_MAX))
            FAIL(ST_INVALID, "\"%s\" holds %lld, which is no token id", name, (long long)x);
        memcpy((char *)values + 4 * i, &x, 4); // the lower half, or all of a float
    }
    *ret = values;
    values = NULL;
out:
    free(cells);
    free(values);
    return st;
}
