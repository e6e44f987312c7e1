/* datum.c: ForwardBackwardRequest and ForwardBackwardOutput of the Tinker API. No state.
 *
 * Their fields, by number (package tinker_public):
 *   request  1 model_id, 2 seq_id, 3 data, 4 loss_fn, 5 loss_fn_config, 6 forward_only,
 *            7 loss_fn_config_v2, which counts where both are
 *   datum    1 model_input (chunks), 2 loss_fn_inputs (tensors by name)
 *   chunk    1 text { 1 tokens, int32 each }, 2 image, 3 audio
 *   tensor   1 dense values, 2 sparse ones (CSR: 1 values, 2 row pointers, 3 columns, of int64
 *            each), 3 dtype, 4 shape
 *   output   1 type, 2 records { 2 fields by name { 1 data, 2 offsets, 3 dtype, 4 shape of an
 *            entry }, 3 datums }, 3 metrics
 * A map is a repeated message { 1 key, 2 value }. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/serve/datum.h"
#include "common/base/protobuf.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_COLUMNS 65536
#define MAX_CELLS   (1 << 24) // of a tensor, however few of them a sparse one lists

enum { TENSOR_FLOAT32 = 1, TENSOR_INT64 = 2 }; // dtypes in messages

static enum status copy_text(struct proto_span span, const char *name, size_t size, char *ret)
{
    if (span.len && memchr(span.data, 0, span.len))
        return status_fail(ST_INVALID, "\"%s\" holds a NUL byte", name);
    if (span.len >= size)
        return status_fail(ST_INVALID, "\"%s\" has %zu bytes, and %zu are possible", name, span.len,
                           size - 1);
    if (span.len) memcpy(ret, span.data, span.len);
    ret[span.len] = '\0';
    return ST_OK;
}

struct map_entry {
    char name[64]; // "" where it has none, cut where it is long: then it is no known one
    struct proto_field value;
};

static enum status read_entry(const struct proto_field *field, const char *name,
                              struct map_entry *ret)
{
    struct proto_span entry = field->span;
    struct proto_field f;
    bool has_value = false;
    enum status st;
    *ret = (struct map_entry){0};
    CHECK(proto_expect(field, PROTO_BYTES, name));
    while (proto_each(&entry, &st, &f)) {
        if (f.number == 1) {
            CHECK(proto_expect(&f, PROTO_BYTES, "a map's key"));
            snprintf(ret->name, sizeof ret->name, "%.*s",
                     (int)(f.span.len < sizeof ret->name ? f.span.len : sizeof ret->name),
                     (const char *)f.span.data);
        } else if (f.number == 2) {
            ret->value = f;
            has_value = true;
        }
    }
    if (st == ST_OK && !has_value) FAIL(ST_FORMAT, "\"%s\": \"%s\" has no value", name, ret->name);
out:
    return st;
}

// ---- tensors ------------------------------------------------------------------------------------

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

static enum status check_id(const char *name, int64_t id, int vocab)
{
    if (id >= 0 && id < vocab) return ST_OK;
    return status_fail(ST_INVALID, "\"%s\" holds %lld; token ids are 0 to %d", name, (long long)id,
                       vocab - 1);
}

// Sets cell i to a value of the message: a float, or the lower half of an int64.
static enum status set_cell(const struct tensor *t, const char *name, int vocab, size_t value,
                            size_t i, int32_t *ret)
{
    const size_t size = vocab ? sizeof(int64_t) : sizeof(float);
    int64_t x = 0;
    memcpy(&x, t->values.data + value * size, size);
    ret[i] = (int32_t)x;
    return vocab ? check_id(name, x, vocab) : ST_OK;
}

static enum status set_sparse(const struct tensor *t, const char *name, int vocab, int n,
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
            CHECK(set_cell(t, name, vocab, (size_t)i,
                           (size_t)row * (size_t)t->shape[1] + (size_t)column, ret));
        }
    }
out:
    return st;
}

// Reads n rows; a list of n has one column. ret (n, columns): floats or, where there is a
// vocabulary, int32 token ids of what came as int64; allocated, 0 where a sparse tensor has
// nothing. ret_two_d: it has a second dimension. `name` names it in errors.
static enum status read_tensor(const struct proto_field *field, const char *name, int n, int vocab,
                               int *ret_columns, bool *ret_two_d, void **ret)
{
    enum status st;
    struct tensor t = {0};
    int32_t *cells = NULL;
    CHECK(proto_expect(field, PROTO_BYTES, name));
    CHECK(proto_read(field->span, tensor_rules, &t));
    CHECK(proto_read(t.sparse, sparse_rules, &t));
    CHECK(read_shape(&t, field->span));
    if (t.dtype != (vocab ? TENSOR_INT64 : TENSOR_FLOAT32))
        FAIL(ST_INVALID, "\"%s\" must be of %s", name, vocab ? "int64" : "float32");
    if (t.dense.data) t.values = t.dense;
    CHECK(check_shape(&t, name, n, vocab ? sizeof(int64_t) : sizeof(float)));
    *ret_two_d = t.n_dims == 2;
    *ret_columns = *ret_two_d ? (int)t.shape[1] : 1;
    const size_t n_cells = (size_t)n * (size_t)*ret_columns;
    cells = calloc(n_cells, sizeof *cells);
    if (!cells) FAIL(ST_NO_MEMORY, "out of memory");
    for (size_t i = 0; i < n_cells && t.dense.data; i++)
        CHECK(set_cell(&t, name, vocab, i, i, cells));
    if (t.sparse.data) CHECK(set_sparse(&t, name, vocab, n, cells));
    *ret = TAKE_PTR(cells);
out:
    free(cells);
    return st;
}

// ---- datums -------------------------------------------------------------------------------------

// Appends the tokens of a chunk of text.
static enum status append_chunk(struct datum *d, struct proto_field *field)
{
    struct proto_field chunk, text;
    enum status st;
    CHECK(proto_expect(field, PROTO_BYTES, "model_input"));
    while (proto_each(&field->span, &st, &chunk)) {
        CHECK(proto_expect(&chunk, PROTO_BYTES, "model_input"));
        if (chunk.number != 1)
            FAIL(ST_UNSUPPORTED,
                 "\"model_input\" has a chunk that is not text: images and audio are not there");
        while (proto_each(&chunk.span, &st, &text)) {
            if (text.number != 1) continue;
            CHECK(proto_expect(&text, PROTO_BYTES, "tokens"));
            const size_t n = text.span.len / sizeof(int32_t);
            if (text.span.len % sizeof(int32_t))
                FAIL(ST_FORMAT, "\"tokens\" has a part of a token");
            if (n > (size_t)(INT32_MAX - d->n)) FAIL(ST_INVALID, "there are too many tokens");
            int32_t *tokens = realloc(d->tokens, ((size_t)d->n + n + 1) * sizeof *tokens);
            if (!tokens) FAIL(ST_NO_MEMORY, "out of memory");
            memcpy(tokens + d->n, text.span.data, text.span.len);
            d->tokens = tokens;
            d->n += (int)n;
        }
    }
out:
    return st;
}

static enum status read_input(const struct forward_backward *request, const struct map_entry *entry,
                              int vocab, struct datum *d, int columns[LOSS_INPUTS])
{
    const unsigned known = losses[request->loss.type].needs | losses[request->loss.type].takes;
    const bool targets = strcmp(entry->name, "target_tokens") == 0;
    int i = 0;
    bool two_d;
    void *values;
    while (!targets && i < LOSS_INPUTS && strcmp(entry->name, loss_input_names[i]) != 0) i++;
    if (!targets && (i == LOSS_INPUTS || !(known & INPUT_BIT(i)))) {
        if (request->forward_only || request->stands_in) return ST_OK;
        return status_fail(
            ST_INVALID, "\"loss_fn_inputs\" has \"%s\", which the loss does not know", entry->name);
    }
    enum status st =
        read_tensor(&entry->value, entry->name, d->n, targets ? vocab : 0,
                    targets ? &d->each : &columns[i], targets ? &d->two_d : &two_d, &values);
    if (st != ST_OK) return st;
    free(targets ? (void *)d->targets : d->inputs[i]);
    if (targets)
        d->targets = values;
    else
        d->inputs[i] = values;
    return ST_OK;
}

static enum status check_datum(const struct forward_backward *request, const struct datum *d,
                               const struct datum_limits *limits)
{
    const unsigned needs = losses[request->loss.type].needs;
    enum status st = ST_OK;
    if (!d->targets) FAIL(ST_INVALID, "\"loss_fn_inputs\" has no \"target_tokens\"");
    for (int i = 0; i < d->n; i++) CHECK(check_id("model_input", d->tokens[i], limits->vocab));
    if (d->each > 1 && !(needs & INPUT_BIT(INPUT_WEIGHTS)))
        FAIL(ST_UNSUPPORTED,
             "\"target_tokens\" has %d entries a token, which cross_entropy alone takes", d->each);
    for (int i = 0; i < LOSS_INPUTS; i++) {
        if (!d->inputs[i] && needs & INPUT_BIT(i) && !request->forward_only)
            FAIL(ST_INVALID, "\"loss_fn_inputs\" has no \"%s\", which the loss needs",
                 loss_input_names[i]);
        for (int64_t k = 0; d->inputs[i] && k < (int64_t)d->n * d->each; k++)
            if (!isfinite(d->inputs[i][k]))
                FAIL(ST_INVALID, "\"%s\" holds a value that is not finite", loss_input_names[i]);
    }
out:
    return st;
}

static enum status read_datum(const struct forward_backward *request, struct proto_span message,
                              const struct datum_limits *limits, struct datum *ret)
{
    enum status st = ST_OK;
    struct proto_span chunks = message, inputs = message;
    struct proto_field f;
    struct map_entry entry;
    int columns[LOSS_INPUTS] = {0};
    while (proto_each(&chunks, &st, &f))
        if (f.number == 1) st = append_chunk(ret, &f);
    if (st != ST_OK) goto out;
    if (ret->n == 0) FAIL(ST_INVALID, "\"model_input\" holds no token");
    if (ret->n > limits->longest)
        FAIL(ST_INVALID,
             "\"model_input\" has %d tokens, and at most %d can be trained on: raise "
             "--token-budget, where the model's context allows more",
             ret->n, limits->longest);
    while (proto_each(&inputs, &st, &f)) {
        if (f.number != 2) continue;
        CHECK(read_entry(&f, "loss_fn_inputs", &entry));
        CHECK(read_input(request, &entry, limits->vocab, ret, columns));
    }
    for (int i = 0; st == ST_OK && i < LOSS_INPUTS; i++) // any of them may have come first
        if (ret->targets && ret->inputs[i] && columns[i] != ret->each)
            FAIL(ST_INVALID, "\"%s\" has %d entries a token, \"target_tokens\" %d",
                 loss_input_names[i], columns[i], ret->each);
    if (st == ST_OK) st = check_datum(request, ret, limits);
out:
    return st;
}

// ---- the request --------------------------------------------------------------------------------

struct head {
    struct proto_span model_id, loss_fn;
    uint64_t seq_id, forward_only;
};
static const struct proto_rule head_rules[] = {
    {1, PROTO_BYTES, "model_id", offsetof(struct head, model_id)},
    {2, PROTO_VARINT, "seq_id", offsetof(struct head, seq_id)},
    {4, PROTO_BYTES, "loss_fn", offsetof(struct head, loss_fn)},
    {6, PROTO_VARINT, "forward_only", offsetof(struct head, forward_only)},
    {0},
};

// An entry of loss_fn_config (a number) or, version 2, of one that has texts too.
static enum status read_setting(struct forward_backward *request, const struct proto_field *field)
{
    struct map_entry entry;
    struct proto_field value;
    enum status st;
    CHECK(read_entry(field, "loss_fn_config", &entry));
    value = entry.value;
    if (field->number == 7) {
        CHECK(proto_expect(&entry.value, PROTO_BYTES, entry.name));
        while (proto_each(&entry.value.span, &st, &value)) continue;
        if (st != ST_OK) goto out;
    }
    for (int i = 0; loss_setting_names[i]; i++) {
        double *setting = loss_setting(&request->loss, i);
        if (strcmp(entry.name, loss_setting_names[i]) != 0 || !setting) continue;
        if (value.type != PROTO_64 || !isfinite(proto_double(&value)))
            FAIL(ST_INVALID, "\"loss_fn_config\": \"%s\" must be a number", entry.name);
        *setting = proto_double(&value);
        return ST_OK;
    }
    if (!request->stands_in)
        FAIL(ST_INVALID, "\"loss_fn_config\" has \"%s\", which the loss does not know", entry.name);
out:
    return st;
}

static enum status append_datum(struct forward_backward *request, const struct proto_field *field,
                                const struct datum_limits *limits)
{
    struct datum *data = array_room(request->data, (size_t)request->n, sizeof *data);
    if (!data) return status_fail(ST_NO_MEMORY, "out of memory");
    request->data = data;
    const int i = request->n++;
    data[i] = (struct datum){0};
    enum status st = proto_expect(field, PROTO_BYTES, "data");
    if (st != ST_OK) return st;
    return status_context(read_datum(request, field->span, limits, &data[i]), "datum %d", i);
}

const char *loss_for(const char *pair, const char *name)
{
    const size_t n = strlen(name);
    return pair && strncmp(pair, name, n) == 0 && pair[n] == '=' ? pair + n + 1 : NULL;
}

enum status loss_for_check(const char *pair)
{
    struct loss_config loss;
    if (!pair) return ST_OK;
    const char *other = strchr(pair, '=');
    if (!other || other == pair)
        return status_fail(
            ST_INVALID, "--loss-for %s: take NAME=OTHER, as stable_reinforce=importance_sampling",
            pair);
    if (loss_of_client(other + 1, &loss) == ST_OK) return ST_OK;
    return status_context(ST_INVALID, "--loss-for %s", pair);
}

enum status forward_backward_parse(const char *body, size_t len, const struct datum_limits *limits,
                                   struct forward_backward *ret)
{
    enum status st;
    struct head head = {0};
    struct proto_field f;
    struct proto_span message = {(const unsigned char *)body, len};
    char loss[64];
    *ret = (struct forward_backward){0};
    CHECK(proto_read(message, head_rules, &head)); // the loss may stand behind the datums
    if (!head.model_id.data || (int64_t)head.seq_id < 1)
        FAIL(ST_INVALID, "\"model_id\" and \"seq_id\", from 1 on, must be there");
    CHECK(copy_text(head.model_id, "model_id", sizeof ret->model_id, ret->model_id));
    ret->seq_id = (int64_t)head.seq_id;
    CHECK(copy_text(head.loss_fn, "loss_fn", sizeof loss, loss));
    const char *other = loss_for(limits->loss_for, loss);
    ret->stands_in = other != NULL;
    CHECK(loss_of_client(other ? other : loss, &ret->loss));
    ret->forward_only = head.forward_only != 0;
    while (proto_each(&message, &st, &f)) {
        if (f.number == 3)
            st = append_datum(ret, &f, limits);
        else if (f.number == 5 || f.number == 7)
            st = read_setting(ret, &f);
    }
    if (st == ST_OK && ret->n == 0) st = status_fail(ST_INVALID, "\"data\" holds no datum");
out:
    if (st != ST_OK) forward_backward_release(ret);
    return status_context(st, "forward_backward");
}

void forward_backward_release(struct forward_backward *request)
{
    for (int i = 0; request->data && i < request->n; i++) {
        free(request->data[i].tokens);
        free(request->data[i].targets);
        for (int k = 0; k < LOSS_INPUTS; k++) free(request->data[i].inputs[k]);
    }
    free(request->data);
    request->data = NULL;
    request->n = 0;
}

// ---- the response -------------------------------------------------------------------------------

// Those of datums [first, end), which have one shape behind their tokens, as a record.
static void put_record(const struct forward_backward *request, const float *logprobs, int first,
                       int end, struct bytes *to)
{
    struct bytes data = BYTES_INIT, offsets = BYTES_INIT, tensor = BYTES_INIT, entry = BYTES_INIT,
                 record = BYTES_INIT;
    int64_t offset = 0;
    bytes_append(&offsets, &offset, sizeof offset);
    for (int i = first; i < end; i++) {
        const struct datum *d = &request->data[i];
        const size_t n = (size_t)d->n * (size_t)d->each;
        bytes_append(&data, logprobs, n * sizeof(float));
        logprobs += n;
        offset = (int64_t)data.len;
        bytes_append(&offsets, &offset, sizeof offset);
    }
    proto_put_message(&tensor, 1, &data);
    proto_put_message(&tensor, 2, &offsets);
    proto_put_varint(&tensor, 3, TENSOR_FLOAT32);
    if (request->data[first].two_d)
        proto_put_varint(&tensor, 4, (uint64_t)request->data[first].each);
    proto_put_text(&entry, 1, "logprobs");
    proto_put_message(&entry, 2, &tensor);
    proto_put_message(&record, 2, &entry);
    proto_put_varint(&record, 3, (uint64_t)(end - first));
    proto_put_message(to, 2, &record);
}

void forward_backward_response(const struct forward_backward *request, const float *logprobs,
                               double loss, struct bytes *to)
{
    struct bytes metric = BYTES_INIT;
    const struct datum *data = request->data;
    proto_put_text(to, 1, "ArrayRecord");
    for (int first = 0, end; first < request->n; first = end) {
        size_t n = 0;
        for (end = first; end < request->n && data[end].each == data[first].each &&
                          data[end].two_d == data[first].two_d;
             end++)
            n += (size_t)data[end].n * (size_t)data[end].each;
        put_record(request, logprobs, first, end, to);
        logprobs += n;
    }
    proto_put_text(&metric, 1, "loss:sum");
    proto_put_double(&metric, 2, loss);
    proto_put_message(to, 3, &metric);
}
