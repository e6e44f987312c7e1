/* protobuf.c: Protocol Buffers' wire format. No state; any thread. Numbers are little-endian on the
 * wire, as on every machine that this runs on. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/protobuf.h"

#include <string.h>

static enum status cut_off(void)
{
    return status_fail(ST_FORMAT, "the body is no protobuf message: it ends within a field");
}

enum status proto_varint(struct proto_span *from, uint64_t *ret)
{
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
        if (from->len == 0) return cut_off();
        const unsigned char byte = *from->data;
        from->data++;
        from->len--;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte & 0x80) continue;
        *ret = value;
        return ST_OK;
    }
    return status_fail(ST_FORMAT, "the body is no protobuf message: a number has over 64 bits");
}

static enum status read_bytes(struct proto_span *from, uint64_t n, struct proto_span *ret)
{
    if (n > from->len) return cut_off();
    *ret = (struct proto_span){from->data, (size_t)n};
    from->data += n;
    from->len -= (size_t)n;
    return ST_OK;
}

static enum status read_fixed(struct proto_span *from, size_t n, uint64_t *ret)
{
    struct proto_span span = {0};
    enum status st = read_bytes(from, n, &span);
    *ret = 0;
    if (st == ST_OK) memcpy(ret, span.data, n);
    return st;
}

bool proto_each(struct proto_span *message, enum status *ret_st, struct proto_field *ret)
{
    enum status st = *ret_st;
    uint64_t tag = 0, len = 0;
    struct proto_field f = {0};
    if (st != ST_OK || message->len == 0) return false;
    CHECK(proto_varint(message, &tag));
    f.number = (uint32_t)(tag >> 3);
    f.type = (enum proto_type)(tag & 7);
    if (f.number == 0 || tag >> 32)
        FAIL(ST_FORMAT, "the body is no protobuf message: a field has the number %llu",
             (unsigned long long)(tag >> 3));
    switch (f.type) {
    case PROTO_VARINT:
        CHECK(proto_varint(message, &f.value));
        break;
    case PROTO_64:
        CHECK(read_fixed(message, 8, &f.value));
        break;
    case PROTO_BYTES:
        CHECK(proto_varint(message, &len));
        CHECK(read_bytes(message, len, &f.span));
        break;
    case PROTO_32:
        CHECK(read_fixed(message, 4, &f.value));
        break;
    default:
        FAIL(ST_FORMAT, "the body is no protobuf message: a field has the type %d", (int)f.type);
    }
    *ret = f;
out:
    *ret_st = st;
    return st == ST_OK;
}

enum status proto_expect(const struct proto_field *field, enum proto_type type, const char *name)
{
    if (field->type == type) return ST_OK;
    return status_fail(ST_FORMAT, "\"%s\" (field %u) has the wire type %d, not %d", name,
                       field->number, (int)field->type, (int)type);
}

double proto_double(const struct proto_field *field)
{
    double value;
    memcpy(&value, &field->value, sizeof value);
    return value;
}

enum status proto_read(struct proto_span message, const struct proto_rule *rules, void *ret)
{
    struct proto_field f;
    enum status st = ST_OK;
    while (proto_each(&message, &st, &f)) {
        const struct proto_rule *r = rules;
        while (r->number && r->number != f.number) r++;
        if (!r->number) continue;
        CHECK(proto_expect(&f, r->type, r->name));
        void *to = (char *)ret + r->offset;
        if (r->type == PROTO_BYTES)
            *(struct proto_span *)to = f.span;
        else
            *(uint64_t *)to = f.value;
    }
out:
    return st;
}

// ---- writing ------------------------------------------------------------------------------------

static void put_number(struct bytes *to, uint64_t value)
{
    unsigned char text[10];
    size_t n = 0;
    for (; value >= 0x80; value >>= 7) text[n++] = (unsigned char)(value | 0x80);
    text[n++] = (unsigned char)value;
    bytes_append(to, text, n);
}

static void put_tag(struct bytes *to, uint32_t number, enum proto_type type)
{
    put_number(to, (uint64_t)number << 3 | type);
}

void proto_put_varint(struct bytes *to, uint32_t number, uint64_t value)
{
    put_tag(to, number, PROTO_VARINT);
    put_number(to, value);
}

void proto_put_double(struct bytes *to, uint32_t number, double value)
{
    put_tag(to, number, PROTO_64);
    bytes_append(to, &value, sizeof value);
}

void proto_put_float(struct bytes *to, uint32_t number, float value)
{
    put_tag(to, number, PROTO_32);
    bytes_append(to, &value, sizeof value);
}

void proto_put_bytes(struct bytes *to, uint32_t number, const void *data, size_t len)
{
    put_tag(to, number, PROTO_BYTES);
    put_number(to, len);
    bytes_append(to, data, len);
}

void proto_put_text(struct bytes *to, uint32_t number, const char *text)
{
    proto_put_bytes(to, number, text, strlen(text));
}

void proto_put_message(struct bytes *to, uint32_t number, struct bytes *message)
{
    if (message->failed) to->failed = true;
    proto_put_bytes(to, number, bytes_text(message), message->len);
    bytes_release(message);
}
