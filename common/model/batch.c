/* batch.c: the builder of the one batch shape. Every list has its place in one host buffer and, at
 * the same offset, in one device buffer; batch_commit copies the part in use. The block table,
 * which is large, lies at the end and goes in a copy of its own. The host buffer must not be
 * refilled before the device has taken the copy: callers wait for a step's results before they
 * clear. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/batch.h"
#include "common/base/bytes.h"
#include <stdlib.h>
#include <string.h>

// Name, how long it is, its field in the view.
#define VIEW_LISTS(X)                                                                              \
    X(LIST_TOKENS, PER_TOKEN, tokens)                                                              \
    X(LIST_POSITIONS, PER_TOKEN, positions)                                                        \
    X(LIST_SEQ_OF, PER_TOKEN, seq_of)                                                              \
    X(LIST_ADAPTER, PER_TOKEN, adapter)                                                            \
    X(LIST_SLOTS, PER_TOKEN, slots)                                                                \
    X(LIST_QUERY_START, PER_SEQ_AND_END, query_start)                                              \
    X(LIST_CONTEXT_LEN, PER_SEQ, context_len)                                                      \
    X(LIST_STORED, PER_SEQ, stored)                                                                \
    X(LIST_STATE_FROM, PER_SEQ, state_from)                                                        \
    X(LIST_STATE_SLOT, PER_SEQ, state_slot)                                                        \
    X(LIST_PARENT, PER_SEQ, parent)                                                                \
    X(LIST_FIRST_POSITION, PER_SEQ, first_position)                                                \
    X(LIST_ATTEND_END, PER_SEQ, attend_end)                                                        \
    X(LIST_BLOCK_TABLE, PER_SEQ_AND_BLOCK, block_table)
enum list {
#define X(name, length, field) name,
    LIST_ROWS,
    LIST_ROWS_ORDER,
    LIST_TOKENS_ORDER,
    VIEW_LISTS(X) LIST_COUNT // the last is the block table
#undef X
};
enum length { PER_TOKEN, PER_SEQ, PER_SEQ_AND_END, PER_SEQ_AND_BLOCK, PER_ROW };
static const enum length lengths[] = {
#define X(name, length, field) [name] = length,
    [LIST_ROWS] = PER_ROW,
    [LIST_ROWS_ORDER] = PER_ROW,
    [LIST_TOKENS_ORDER] = PER_TOKEN,
    VIEW_LISTS(X)
#undef X
};

struct batch {
    struct device *dev;
    int max_tokens, max_seqs, max_blocks, max_rows;
    int n_tokens, n_seqs, n_rows, kind; // kind: 0 none yet, 1 paged, 2 packed
    int padded_rows, block_size;
    int32_t *host[LIST_COUNT], *device[LIST_COUNT];
    int64_t *sort_keys; // (max of tokens and rows)
    size_t bytes;       // up to the block table
    struct batch_view view;
};

static size_t list_bytes(enum list list, int tokens, int seqs, int blocks, int rows)
{
    const size_t n[] = {[PER_TOKEN] = (size_t)tokens,
                        [PER_SEQ] = (size_t)seqs,
                        [PER_SEQ_AND_END] = (size_t)seqs + 1,
                        [PER_SEQ_AND_BLOCK] = (size_t)seqs * (size_t)blocks,
                        [PER_ROW] = (size_t)rows};
    return n[lengths[list]] * sizeof(int32_t);
}

// Where each list begins in the one allocation; returns its bytes.
static size_t lay_out(int tokens, int seqs, int blocks, int rows, size_t ret_offset[LIST_COUNT])
{
    size_t total = 0;
    for (enum list i = 0; i < LIST_COUNT; i++) {
        ret_offset[i] = total;
        total += (list_bytes(i, tokens, seqs, blocks, rows) + 255) / 256 * 256;
    }
    return total;
}

size_t batch_bytes(int max_tokens, int max_seqs, int max_blocks, int max_rows)
{
    size_t offset[LIST_COUNT];
    return lay_out(max_tokens, max_seqs, max_blocks, max_rows, offset);
}

enum status batch_new(struct device *dev, int max_tokens, int max_seqs, int max_blocks,
                      int max_rows, struct batch **ret)
{
    struct batch *b = calloc(1, sizeof *b);
    void *host = NULL, *device = NULL;
    size_t total, offset[LIST_COUNT];
    enum status st = ST_OK;
    if (!b) return status_fail(ST_NO_MEMORY, "no memory for a batch");
    b->dev = dev;
    b->max_tokens = max_tokens;
    b->max_seqs = max_seqs;
    b->max_blocks = max_blocks;
    b->max_rows = max_rows;
    total = lay_out(max_tokens, max_seqs, max_blocks, max_rows, offset);
    b->bytes = offset[LIST_BLOCK_TABLE];
    int longest = max_tokens > max_rows ? max_tokens : max_rows;
    b->sort_keys = malloc((size_t)longest * sizeof *b->sort_keys);
    if (!b->sort_keys) FAIL(ST_NO_MEMORY, "no memory for a batch");
    CHECK(device_host_alloc(dev, total, &host));
    b->host[0] = host;
    memset(host, 0, total);
    CHECK(device_alloc(dev, total, &device));
    for (int i = 0; i < LIST_COUNT; i++) {
        b->host[i] = (int32_t *)((char *)host + offset[i]);
        b->device[i] = (int32_t *)((char *)device + offset[i]);
    }
    batch_clear(b);
    *ret = TAKE_PTR(b);
out:
    batch_free(b);
    return st;
}

void batch_free(struct batch *b)
{
    if (!b) return;
    device_release(b->dev, b->device[0]);
    device_host_release(b->dev, b->host[0]);
    free(b->sort_keys);
    free(b);
}

void batch_clear(struct batch *b)
{
    b->n_tokens = b->n_seqs = b->n_rows = b->kind = b->padded_rows = 0;
    memset(&b->view, 0, sizeof b->view);
}

static enum status room_for(const struct batch *b, int n, int kind)
{
    if (b->kind != 0 && b->kind != kind)
        return status_fail(ST_INVALID, "a batch is either paged or packed, not both");
    if (n < 1 || b->n_tokens + n > b->max_tokens)
        return status_fail(ST_INVALID, "a batch of %d tokens has no room for %d more (at most %d)",
                           b->n_tokens, n, b->max_tokens);
    if (b->n_seqs == b->max_seqs)
        return status_fail(ST_INVALID, "a batch holds at most %d sequences", b->max_seqs);
    return ST_OK;
}

// Appends the rows every kind has; the sequence's own fields are the caller's.
static int append_rows(struct batch *b, const int32_t *tokens, int n, int first_position,
                       int adapter)
{
    int seq = b->n_seqs++, row = b->n_tokens;
    memcpy(b->host[LIST_TOKENS] + row, tokens, (size_t)n * sizeof *tokens);
    for (int i = 0; i < n; i++) {
        b->host[LIST_POSITIONS][row + i] = first_position + i;
        b->host[LIST_SEQ_OF][row + i] = seq;
        b->host[LIST_ADAPTER][row + i] = adapter;
    }
    b->n_tokens += n;
    b->host[LIST_QUERY_START][seq] = row;
    b->host[LIST_QUERY_START][seq + 1] = b->n_tokens;
    if (n > b->view.max_query) b->view.max_query = n;
    if (first_position + n > b->view.max_context) b->view.max_context = first_position + n;
    return seq;
}

static int32_t slot_of(const int32_t *blocks, int position, int block_size)
{
    return blocks[position / block_size] * block_size + position % block_size;
}

enum status batch_add_paged(struct batch *b, const int32_t *tokens, int n, int first_position,
                            const int32_t *blocks, int n_blocks, int block_size,
                            struct batch_seq own)
{
    enum status st = room_for(b, n, 1);
    if (st != ST_OK) return st;
    if (n_blocks > b->max_blocks || (int64_t)n_blocks * block_size < (int64_t)first_position + n)
        return status_fail(ST_INVALID, "%d blocks of %d tokens do not hold positions up to %d",
                           n_blocks, block_size, first_position + n - 1);
    b->kind = 1;
    b->block_size = block_size;
    int row = b->n_tokens, seq = append_rows(b, tokens, n, first_position, own.adapter);
    int32_t *slots = b->host[LIST_SLOTS], *stored = b->host[LIST_STORED];
    for (int i = 0; i < n; i++) slots[row + i] = slot_of(blocks, first_position + i, block_size);
    bool goes_on = row > 0 && first_position > 0 &&
                   slots[row - 1] == slot_of(blocks, first_position - 1, block_size);
    stored[seq] = goes_on ? stored[seq - 1] : first_position;
    b->host[LIST_CONTEXT_LEN][seq] = first_position + n;
    b->host[LIST_STATE_FROM][seq] = own.state_from;
    b->host[LIST_STATE_SLOT][seq] = own.state_slot;
    memcpy(b->host[LIST_BLOCK_TABLE] + (size_t)seq * (size_t)b->max_blocks, blocks,
           (size_t)n_blocks * sizeof *blocks);
    return ST_OK;
}

enum status batch_add_packed(struct batch *b, const int32_t *tokens, int n, int parent, int adapter,
                             int *ret_seq)
{
    enum status st = room_for(b, n, 2);
    const int32_t *start = b->host[LIST_QUERY_START], *parents = b->host[LIST_PARENT];
    int32_t *first = b->host[LIST_FIRST_POSITION], *end = b->host[LIST_ATTEND_END];
    int depth = 0;
    if (st != ST_OK) return st;
    if (parent >= b->n_seqs || (parent >= 0 && end[parent] != b->n_tokens))
        return status_fail(ST_INVALID,
                           "sequence %d cannot be a parent here: its tree must lie depth first",
                           parent);
    b->kind = 2;
    int before = parent < 0 ? 0 : first[parent] + start[parent + 1] - start[parent];
    int seq = append_rows(b, tokens, n, before, adapter);
    b->host[LIST_PARENT][seq] = parent;
    first[seq] = before;
    end[seq] = b->n_tokens;
    for (int s = parent; s >= 0; s = parents[s], depth++) end[s] = b->n_tokens;
    if (depth > b->view.depth) b->view.depth = depth;
    if (ret_seq) *ret_seq = seq;
    return ST_OK;
}

enum status batch_want_row(struct batch *b, int row)
{
    if (row < 0 || row >= b->n_tokens || b->n_rows == b->max_rows)
        return status_fail(ST_INVALID, "row %d of %d cannot be asked for (%d of at most %d are)",
                           row, b->n_tokens, b->n_rows, b->max_rows);
    b->host[LIST_ROWS][b->n_rows++] = row;
    return ST_OK;
}

static int compare_keys(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

// 0..n-1 sorted by value, equal values in order of index.
static void sort_order(struct batch *b, const int32_t *values, int n, int32_t *ret_order)
{
    for (int i = 0; i < n; i++) b->sort_keys[i] = ((int64_t)values[i] << 32) | i;
    qsort(b->sort_keys, (size_t)n, sizeof *b->sort_keys, compare_keys);
    for (int i = 0; i < n; i++) ret_order[i] = (int32_t)(b->sort_keys[i] & 0xffffffff);
}

bool batch_decodes(const struct batch *b)
{
    return b->kind == 1 && b->view.max_query == 1;
}

static enum status pad(struct batch *b, int pad_seqs, int pad_rows)
{
    if (!batch_decodes(b) || pad_seqs > b->max_seqs || pad_seqs > b->max_tokens ||
        pad_rows > b->max_rows)
        return status_fail(ST_INVALID,
                           "only a decode batch within its limits is padded (to %d, and %d wanted)",
                           pad_seqs, pad_rows);
    for (int i = b->n_seqs; i < pad_seqs; i++) {
        b->host[LIST_TOKENS][i] = b->host[LIST_POSITIONS][i] = 0;
        b->host[LIST_SEQ_OF][i] = i;
        b->host[LIST_ADAPTER][i] = -1;
        b->host[LIST_SLOTS][i] = -1;
        b->host[LIST_STATE_FROM][i] = b->host[LIST_STATE_SLOT][i] = -1;
        b->host[LIST_QUERY_START][i + 1] = i + 1;
        b->host[LIST_CONTEXT_LEN][i] = b->host[LIST_STORED][i] = 0;
    }
    for (int i = b->n_rows; i < pad_rows; i++) b->host[LIST_ROWS][i] = 0;
    return ST_OK;
}

// Brings the rows of the block table together: as far apart as the longest context of the batch
// needs, and not as the longest that could be, since all between them is copied each step. Few
// distances, because a captured step keeps its own.
static int close_up_table(struct batch *b)
{
    int32_t *table = b->host[LIST_BLOCK_TABLE];
    const int used = (b->view.max_context + b->block_size - 1) / b->block_size;
    int stride = 16;
    while (stride < used) stride *= 2;
    if (stride >= b->max_blocks) return b->max_blocks;
    for (int s = 1; s < b->n_seqs; s++)
        memmove(table + (size_t)s * (size_t)stride, table + (size_t)s * (size_t)b->max_blocks,
                (size_t)used * sizeof *table);
    return stride;
}

static size_t table_bytes(const struct batch *b)
{
    return (size_t)b->n_seqs * (size_t)b->view.table_stride * sizeof(int32_t);
}

// The lists go to the device; the view is of n tokens and so many sequences, padding included.
static void upload(struct batch *b, int n, int seqs)
{
    device_copy_in(b->dev, b->device[0], b->host[0], b->bytes);
    if (b->kind == 1)
        device_copy_in(b->dev, b->device[LIST_BLOCK_TABLE], b->host[LIST_BLOCK_TABLE],
                       table_bytes(b));
    b->view.n_tokens = n;
    b->view.n_seqs = seqs;
    b->view.packed = b->kind == 2;
#define X(name, length, field) b->view.field = b->device[name];
    VIEW_LISTS(X)
#undef X
}

enum status batch_commit(struct batch *b, int pad_seqs, int pad_rows)
{
    int n = b->n_tokens, seqs = b->n_seqs;
    b->padded_rows = b->n_rows;
    if (pad_seqs > seqs || pad_rows > b->n_rows) {
        enum status st = pad(b, pad_seqs, pad_rows);
        if (st != ST_OK) return st;
        if (pad_seqs > seqs) n = seqs = pad_seqs;
        if (pad_rows > b->n_rows) b->padded_rows = pad_rows;
    }
    if (b->kind == 2) {
        sort_order(b, b->host[LIST_ROWS], b->n_rows, b->host[LIST_ROWS_ORDER]);
        sort_order(b, b->host[LIST_TOKENS], n, b->host[LIST_TOKENS_ORDER]);
    }
    if (b->kind == 1 && !b->view.table_stride) b->view.table_stride = close_up_table(b);
    upload(b, n, seqs);
    return ST_OK;
}

// clang-format off
// What stands before the lists, and the block table, in a batch's bytes: its name there and here.
#define WRITTEN(X) \
    X(n_tokens, n_tokens) X(n_seqs, n_seqs) X(n_rows, n_rows) X(kind, kind) \
    X(padded_rows, padded_rows) X(block_size, block_size) \
    X(tokens, view.n_tokens) X(seqs, view.n_seqs) X(max_query, view.max_query) \
    X(max_context, view.max_context) X(depth, view.depth) X(table_stride, view.table_stride)
// clang-format on
struct written {
    uint64_t list_bytes;
#define X(name, field) int32_t name;
    WRITTEN(X)
#undef X
};

// Bytes of a list that a committed batch has a use for: a decode step's are few beside its room.
static size_t used_bytes(const struct batch *b, enum list list)
{
    if (list == LIST_BLOCK_TABLE) return table_bytes(b);
    return list_bytes(list, b->view.n_tokens, b->view.n_seqs, 0, b->padded_rows);
}

enum status batch_write(const struct batch *b, struct bytes *to)
{
    struct written w = {.list_bytes = b->bytes};
#define X(name, field) w.name = b->field;
    WRITTEN(X)
#undef X
    bytes_append(to, &w, sizeof w);
    for (int i = 0; i < LIST_COUNT; i++) bytes_append(to, b->host[i], used_bytes(b, (enum list)i));
    return bytes_status(to);
}

enum status batch_read(struct batch *b, const void *data, size_t n)
{
    struct written w;
    const char *at = (const char *)data + sizeof w;
    size_t whole = sizeof w;
    batch_clear(b);
    if (n >= sizeof w) memcpy(&w, data, sizeof w);
    if (n < sizeof w || w.list_bytes != b->bytes || w.seqs > b->max_seqs || w.n_seqs > w.seqs ||
        w.tokens > b->max_tokens || w.padded_rows > b->max_rows || w.table_stride > b->max_blocks)
        return status_fail(ST_FORMAT, "a batch of %zu bytes does not fit one of %d tokens", n,
                           b->max_tokens);
#define X(name, field) b->field = w.name;
    WRITTEN(X)
#undef X
    for (int i = 0; i < LIST_COUNT; i++) whole += used_bytes(b, (enum list)i);
    if (n != whole) return status_fail(ST_FORMAT, "a batch of %zu bytes is not whole", n);
    for (int i = 0; i < LIST_COUNT; i++) {
        memcpy(b->host[i], at, used_bytes(b, (enum list)i));
        at += used_bytes(b, (enum list)i);
    }
    upload(b, w.tokens, w.seqs);
    return ST_OK;
}

const struct batch_view *batch_view(const struct batch *b)
{
    return &b->view;
}
int batch_tokens(const struct batch *b)
{
    return b->n_tokens;
}
int batch_rows(const struct batch *b)
{
    return b->padded_rows;
}
const int32_t *batch_rows_device(const struct batch *b)
{
    return b->device[LIST_ROWS];
}
const int32_t *batch_rows_order(const struct batch *b)
{
    return b->device[LIST_ROWS_ORDER];
}
const int32_t *batch_tokens_order(const struct batch *b)
{
    return b->device[LIST_TOKENS_ORDER];
}
