/* tensor.c: tensors of the Tinker API. No state; any thread. */
#include "common/base/protobuf.h"
#include "trainer/serve/datum.h"

#include <stdlib.h>
#include <string.h>

#define MAX_COLUMNS 65536
#define MAX_CELLS   (1 << 24) // of a tensor, however few of them a sparse one lists

struct tensor { // as it is in the message
    struct proto_span dense, sparse, values, rows, columns;
    uint64_t dtype;
    int n_dims;
    int64_t shape[2];
};

static const struct proto_rule tensor_rules[] = {
    {1, PROTO_BYTES, "dense", offsetof(struct tensor, dense)},
    {2, PROTO_BYTES, "sparse_csr", offsetof(struct tensor, sparse)},
    {3, PROTO_VARINT, "dtype", offsetof(struct tensor, dtype)},
    {0},
};
static const struct proto_rule sparse_rules[] = {
    {1, PROTO_BYTES, "sparse_csr", offsetof(struct tensor, values)},
    {2, PROTO_BYTES, "sparse_csr", offsetof(struct tensor, rows)},
    {3, PROTO_BYTES, "sparse_csr", offsetof(struct tensor, columns)},
    {0},
};

static enum status add_dim(struct tensor *t, uint64_t value)
{
    if (t->n_dims == 2) return status_fail(ST_UNSUPPORTED, "a tensor has more than two dimensions");
    if (value > INT32_MAX) return status_fail(ST_INVALID, "a tensor's shape is out of range");
    t->shape[t->n_dims++] = (int64_t)value;
    return ST_OK;
}

// The shape may come packed or a number at a time.
static enum status read_shape(struct tensor *t, struct proto_span message)
{
    struct proto_field f;
    uint64_t value;
    enum status st = ST_OK;
    while (proto_each(&message, &st, &f)) {
        if (f.number != 4) continue;
        if (f.type == PROTO_VARINT) {
            CHECK(add_dim(t, f.value));
            continue;
        }
        CHECK(proto_expect(&f, PROTO_BYTES, "shape"));
        while (f.span.len > 0) {
            CHECK(proto_varint(&f.span, &value));
            CHECK(add_dim(t, value));
        }
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
    const bool dense = t->dense.data, sparse = t->sparse.data;
    if (dense == sparse)
        return status_fail(ST_FORMAT, "\"%s\" is no tensor: it needs either dense or sparse values",
                           name);
    if (t->values.len % size) return status_fail(ST_FORMAT, "\"%s\" has a part of a value", name);
    if (t->n_dims > 0 && t->shape[0] != n)
        return status_fail(ST_INVALID, "\"%s\" has %lld entries, the input %d tokens", name,
                           (long long)t->shape[0], n);
    if (columns < 1 || columns > MAX_COLUMNS)
        return status_fail(ST_INVALID, "\"%s\" has %lld entries a token; 1 to %d are possible",
                           name, (long long)columns, MAX_COLUMNS);
    if (n * columns > MAX_CELLS)
        return status_fail(ST_INVALID, "\"%s\" has %lld cells; at most %d are possible", name,
                           (long long)(n * columns), MAX_CELLS);
    if (dense && values != (size_t)n * (size_t)columns)
        return status_fail(ST_INVALID, "\"%s\" has %zu values for %d tokens", name, values, n);
    if (sparse && (t->n_dims != 2 || t->rows.len != ((size_t)n + 1) * sizeof(int64_t) ||
                   t->columns.len != values * sizeof(int64_t)))
        return status_fail(ST_INVALID, "\"%s\": its sparse indices do not fit its shape", name);
    return ST_OK;
}

// Sets cell i to a value of the message: a float, or the lower half of an int64.
static enum status set_cell(const struct tensor *t, const char *name, bool integers, size_t value,
                            size_t i, int32_t *ret)
{
    const size_t size = integers ? sizeof(int64_t) : sizeof(float);
    int64_t x = 0;
    memcpy(&x, t->values.data + value * size, size);
    if (integers && (x < 0 || x > INT32_MAX))
        return status_fail(ST_INVALID, "\"%s\" holds %lld, which is no token id", name,
                           (long long)x);
    ret[i] = (int32_t)x;
    return ST_OK;
}

static enum status set_sparse(const struct tensor *t, const char *name, bool integers, int n,
                              int32_t *ret)
{
    const int64_t values = (int64_t)(t->columns.len / sizeof(int64_t));
    enum status st = ST_OK;
    for (int row = 0; row < n; row++) {
        const int64_t first = index_at(t->rows, (size_t)row),
                      end = index_at(t->rows, (size_t)row + 1);
        if (first < 0 || end < first || end > values)
            FAIL(ST_INVALID, "\"%s\": a row's sparse indices are out of order", name);
        for (int64_t i = first; i < end; i++) {
            const int64_t column = index_at(t->columns, (size_t)i);
            if (column < 0 || column >= t->shape[1])
                FAIL(ST_INVALID, "\"%s\": a sparse column is out of range", name);
            CHECK(set_cell(t, name, integers, (size_t)i,
                           (size_t)row * (size_t)t->shape[1] + (size_t)column, ret));
        }
    }
out:
    return st;
}

enum status tensor_read(const struct proto_field *field, const char *name, int n, bool integers,
                        int *ret_columns, bool *ret_two_d, void **ret)
{
    enum status st;
    struct tensor t = {0};
    int32_t *cells = NULL;
    CHECK(proto_expect(field, PROTO_BYTES, name));
    CHECK(proto_read(field->span, tensor_rules, &t));
    CHECK(proto_read(t.sparse, sparse_rules, &t));
    CHECK(read_shape(&t, field->span));
    if (t.dtype != (integers ? TENSOR_INT64 : TENSOR_FLOAT32))
        FAIL(ST_INVALID, "\"%s\" must be of %s", name, integers ? "int64" : "float32");
    if (t.dense.data) t.values = t.dense;
    CHECK(check_shape(&t, name, n, integers ? sizeof(int64_t) : sizeof(float)));
    *ret_two_d = t.n_dims == 2;
    *ret_columns = *ret_two_d ? (int)t.shape[1] : 1;
    const size_t n_cells = (size_t)n * (size_t)*ret_columns;
    cells = calloc(n_cells, sizeof *cells);
    if (!cells) FAIL(ST_NO_MEMORY, "out of memory");
    for (size_t i = 0; i < n_cells && t.dense.data; i++)
        CHECK(set_cell(&t, name, integers, i, i, cells));
    if (t.sparse.data) CHECK(set_sparse(&t, name, integers, n, cells));
    *ret = cells;
    cells = NULL;
out:
    free(cells);
    return st;
}
