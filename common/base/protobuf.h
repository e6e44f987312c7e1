/* protobuf.h: Protocol Buffers' wire format, read and written field by field: the Tinker API has
 * nine messages of plain fields and TensorBoard three, for which a generated library would be more
 * to keep than this. Any thread; no state.
 *
 * A message is a run of fields, each a number and a value: a varint, 8 or 4 bytes, or a length and
 * bytes (text, arrays, messages within). Unknown ones are passed over by their reader. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_PROTOBUF_H
#define COMMON_PROTOBUF_H

#include "common/base/bytes.h"

struct proto_span { // borrowed from the message
    const unsigned char *data;
    size_t len;
};
struct proto_field {
    uint32_t number;
    enum proto_type { PROTO_VARINT = 0, PROTO_64 = 1, PROTO_BYTES = 2, PROTO_32 = 5 } type;
    uint64_t value;         // of all but PROTO_BYTES
    struct proto_span span; // of PROTO_BYTES
};
// The next field of the message, which moves behind it: the condition of a loop, which ends at the
// message's end, or where *st, ST_OK at its beginning, is not: ST_FORMAT, the bytes are no message.
bool proto_each(struct proto_span *message, enum status *st, struct proto_field *ret);
// ST_FORMAT unless the field is of this type; `name` names it.
enum status proto_expect(const struct proto_field *field, enum proto_type type, const char *name);
double proto_double(const struct proto_field *field); // of PROTO_64
// The next varint of a packed field, which moves behind it.
enum status proto_varint(struct proto_span *packed, uint64_t *ret);

// A table of the fields that a message's reader knows ends with the number 0. `offset` is that of a
// struct proto_span (PROTO_BYTES) or a uint64_t.
struct proto_rule {
    uint32_t number;
    enum proto_type type;
    const char *name;
    size_t offset;
};
// Sets what is there, the last where a field comes more than once; others are passed over.
enum status proto_read(struct proto_span message, const struct proto_rule *rules, void *ret);

// Appends a field.
void proto_put_varint(struct bytes *to, uint32_t number, uint64_t value);
void proto_put_double(struct bytes *to, uint32_t number, double value);
void proto_put_float(struct bytes *to, uint32_t number, float value);
void proto_put_bytes(struct bytes *to, uint32_t number, const void *data, size_t len);
void proto_put_text(struct bytes *to, uint32_t number, const char *text);
// Appends `message`, which is released, as a field.
void proto_put_message(struct bytes *to, uint32_t number, struct bytes *message);

#endif
