/* datum.c: ForwardBackwardRequest and ForwardBackwardOutput of the Tinker API. No state.
 *
 * Their fields, by number (package tinker_public):
 *   request  1 model_id, 2 seq_id, 3 data, 4 loss_fn, 5 loss_fn_config, 6 forward_only,
 *            7 loss_fn_config_v2, which counts where both are
 *   datum    1 model_input (chunks), 2 loss_fn_inputs (tensors by name)
 *   chunk    1 text { 1 tokens, int32 each }, 2 image, 3 audio
 *   tensor   datum.h
 *   output   1 type, 2 records { 2 fields by name { 1 data, 2 offsets, 3 dtype, 4 shape of an
 *            entry }, 3 datums }, 3 metrics
 * A map is a repeated message { 1 key, 2 value }. */
#include "trainer/serve/datum.h"
#include "common/base/protobuf.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static enum status copy_text(struct proto_span span, const char *name, char **ret)
{
    if (span.len && memchr(span.data, 0, span.len))
        return status_fail(ST_INVALID, "\"%s\" holds a NUL byte", name);
    char *text = strndup(span.len ? (const char *)span.data : "", span.len);
    if (!text) return status_fail(ST_NO_MEMORY, "out of memory");
    *ret = text;
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

// ---- datums -------------------------------------------------------------------------------------

static enum status append_tokens(struct datum *d, const struct proto_field *field)
{
    enum status st = proto_expect(field, PROTO_BYTES, "tokens");
    if (st != ST_OK) return st;
    const size_t n = field->span.len / sizeof(int32_t);
    if (field->span.len % sizeof(int32_t))
        return status_fail(ST_FORMAT, "\"tokens\" has a part of a token");
    if (n > (size_t)(INT32_MAX - d->n)) return status_fail(ST_INVALID, "there are too many tokens");
    int32_t *tokens = realloc(d->tokens, ((size_t)d->n + n + 1) * sizeof *tokens);
    if (!tokens) return status_fail(ST_NO_MEMORY, "out of memory");
    memcpy(tokens + d->n, field->span.data, field->span.len);
    d->tokens = tokens;
    d->n += (int)n;
    return ST_OK;
}

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
        while (proto_each(&chunk.span, &st, &text))
            if (text.number == 1) st = append_tokens(d, &text);
    }
out:
    return st;
}

static enum status read_input(const struct forward_backward *request, const struct map_entry *entry,
                              struct datum *d, int columns[LOSS_INPUTS])
{
    const unsigned known = losses[request->loss.type].needs | losses[request->loss.type].takes;
    const bool targets = strcmp(entry->name, "target_tokens") == 0;
    int i = 0;
    bool two_d;
    void *values;
    while (!targets && i < LOSS_INPUTS && strcmp(entry->name, loss_input_names[i]) != 0) i++;
    if (!targets && (i == LOSS_INPUTS || !(known & INPUT_BIT(i)))) {
        if (request->forward_only) return ST_OK;
        return status_fail(
            ST_INVALID, "\"loss_fn_inputs\" has \"%s\", which the loss does not know", entry->name);
    }
    enum status st =
        tensor_read(&entry->value, entry->name, d->n, targets, targets ? &d->each : &columns[i],
                    targets ? &d->two_d : &two_d, &values);
    if (st != ST_OK) return st;
    free(targets ? (void *)d->targets : d->inputs[i]);
    if (targets)
        d->targets = values;
    else
        d->inputs[i] = values;
    return ST_OK;
}

static enum status check_ids(const char *name, const int32_t *ids, size_t n, int vocab)
{
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= vocab)
            return status_fail(ST_INVALID, "\"%s\" holds %d; token ids are 0 to %d", name, ids[i],
                               vocab - 1);
    return ST_OK;
}

static enum status check_datum(const struct forward_backward *request, const struct datum *d,
                               const struct datum_limits *limits)
{
    const unsigned needs = losses[request->loss.type].needs;
    enum status st;
    if (!d->targets) FAIL(ST_INVALID, "\"loss_fn_inputs\" has no \"target_tokens\"");
    CHECK(check_ids("model_input", d->tokens, (size_t)d->n, limits->vocab));
    CHECK(check_ids("target_tokens", d->targets, (size_t)d->n * (size_t)d->each, limits->vocab));
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
        CHECK(read_input(request, &entry, ret, columns));
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

enum status forward_backward_parse(const char *body, size_t len, const struct datum_limits *limits,
                                   struct forward_backward *ret)
{
    enum status st;
    struct forward_backward request = {0};
    struct head head = {0};
    struct proto_field f;
    struct proto_span message = {(const unsigned char *)body, len};
    char *loss = NULL;
    CHECK(proto_read(message, head_rules, &head)); // the loss may stand behind the datums
    CHECK(copy_text(head.loss_fn, "loss_fn", &loss));
    CHECK(loss_of_client(loss, &request.loss));
    request.forward_only = head.forward_only != 0;
    while (proto_each(&message, &st, &f)) {
        if (f.number == 3)
            st = append_datum(&request, &f, limits);
        else if (f.number == 5 || f.number == 7)
            st = read_setting(&request, &f);
    }
    if (st == ST_OK && request.n == 0) FAIL(ST_INVALID, "\"data\" holds no datum");
    if (st == ST_OK) *ret = request;
out:
    free(loss);
    if (st != ST_OK) forward_backward_release(&request);
    return status_context(st, "forward_backward");
}

enum status forward_backward_address(const char *body, size_t len, char **ret_model_id,
                                     int64_t *ret_seq_id)
{
    struct head head = {0};
    enum status st =
        proto_read((struct proto_span){(const unsigned char *)body, len}, head_rules, &head);
    if (st == ST_OK && (!head.model_id.data || (int64_t)head.seq_id < 1))
        st = status_fail(ST_INVALID, "\"model_id\" and \"seq_id\", from 1 on, must be there");
    if (st == ST_OK) st = copy_text(head.model_id, "model_id", ret_model_id);
    if (st == ST_OK) *ret_seq_id = (int64_t)head.seq_id;
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
    *request = (struct forward_backward){0};
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
