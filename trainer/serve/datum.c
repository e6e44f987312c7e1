/* datum.c: ForwardBackwardRequest and ForwardBackwardOutput of the Tinker API. No state.
 *
 * Their fields, by number (package tinker_public):
 *   request  1 model_id, 2 seq_id, 3 data, 4 loss_fn, 5 loss_fn_config, 6 forward_only,
 *            7 loss_fn_config_v2, which counts where both are
 *   datum    1 model_input (chunks), 2 loss_fn_inputs (tensors by name)
 *   chunk    1 text { 1 tokens, int32 each }, 2 image, 3 audio
 *   tensor   tensor.h
 *   output   1 type, 2 records { 2 fields by name { 1 data, 2 offsets, 3 dtype, 4 shape of an
 *            entry }, 3 datums }, 3 metrics
 * A map is a repeated message { 1 key, 2 value }. */
#include "trainer/serve/datum.h"
#include "trainer/serve/protobuf.h"
#include "trainer/serve/tensor.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static enum status take_text(const struct proto_field *field, const char *name, char **ret)
{
    enum status st = proto_expect(field, PROTO_BYTES, name);
    if (st != ST_OK) return st;
    if (memchr(field->span.data, 0, field->span.len))
        return status_fail(ST_INVALID, "\"%s\" holds a NUL byte", name);
    char *text = strndup((const char *)field->span.data, field->span.len);
    if (!text) return status_fail(ST_NO_MEMORY, "out of memory");
    free(*ret);
    *ret = text;
    return ST_OK;
}

// ---- maps ---------------------------------------------------------------------------------------

struct map_entry {
    char name[64]; // "" where it has none, cut where it is long: then it is no known one
    struct proto_field value;
    bool has_value;
};

static enum status take_map_field(void *context, const struct proto_field *field)
{
    struct map_entry *e = context;
    enum status st = ST_OK;
    if (field->number == 1) {
        CHECK(proto_expect(field, PROTO_BYTES, "a map's key"));
        snprintf(e->name, sizeof e->name, "%.*s",
                 (int)(field->span.len < sizeof e->name ? field->span.len : sizeof e->name),
                 (const char *)field->span.data);
    } else if (field->number == 2) {
        e->value = *field;
        e->has_value = true;
    }
out:
    return st;
}

static enum status read_entry(const struct proto_field *field, const char *name,
                              struct map_entry *ret)
{
    *ret = (struct map_entry){0};
    enum status st = proto_expect(field, PROTO_BYTES, name);
    if (st == ST_OK) st = proto_each_field(field->span, take_map_field, ret);
    if (st == ST_OK && !ret->has_value)
        st = status_fail(ST_FORMAT, "\"%s\": \"%s\" has no value", name, ret->name);
    return st;
}

// ---- datums -------------------------------------------------------------------------------------

struct datum_reader {
    struct datum *datum;
    const struct forward_backward *request;
};

static enum status take_text_field(void *context, const struct proto_field *field)
{
    struct datum_reader *r = context;
    struct datum *d = r->datum;
    if (field->number != 1) return ST_OK;
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

static enum status take_chunk_field(void *context, const struct proto_field *field)
{
    enum status st = proto_expect(field, PROTO_BYTES, "model_input");
    if (st != ST_OK) return st;
    if (field->number == 1) return proto_each_field(field->span, take_text_field, context);
    return status_fail(ST_UNSUPPORTED, "\"model_input\" has a chunk that is not text: images and "
                                       "audio are not there");
}

static enum status take_input(struct datum_reader *r, const struct proto_field *field)
{
    struct datum *d = r->datum;
    const struct loss *loss = &losses[r->request->loss.type];
    struct map_entry entry;
    int columns = 1, which;
    bool two_d, needed;
    void *values = NULL;
    enum status st;
    CHECK(read_entry(field, "loss_fn_inputs", &entry));
    if (strcmp(entry.name, "target_tokens") == 0) {
        CHECK(tensor_read(&entry.value, entry.name, d->n, true, &d->each, &d->two_d, &values));
        free(d->targets);
        d->targets = values;
        return ST_OK;
    }
    for (which = 0; which < LOSS_INPUTS; which++)
        if (strcmp(entry.name, loss_input_names[which]) == 0) break;
    needed = which < LOSS_INPUTS && (loss->needs | loss->takes) & INPUT_BIT(which);
    if (!needed && r->request->forward_only) return ST_OK;
    if (!needed)
        FAIL(ST_INVALID, "\"loss_fn_inputs\" has \"%s\", which the loss does not know", entry.name);
    CHECK(tensor_read(&entry.value, entry.name, d->n, false, &columns, &two_d, &values));
    free(d->inputs[which]);
    d->inputs[which] = values;
    if (d->targets && columns != d->each)
        FAIL(ST_INVALID, "\"%s\" has %d entries a token, \"target_tokens\" %d", entry.name, columns,
             d->each);
out:
    return st;
}

static enum status take_model_input(void *context, const struct proto_field *field)
{
    if (field->number != 1) return ST_OK;
    enum status st = proto_expect(field, PROTO_BYTES, "model_input");
    return st == ST_OK ? proto_each_field(field->span, take_chunk_field, context) : st;
}

// In two rounds: the order of a map's entries is anybody's, and the targets say how wide the others
// are.
static enum status take_targets(void *context, const struct proto_field *field)
{
    struct map_entry entry;
    if (field->number != 2) return ST_OK;
    enum status st = read_entry(field, "loss_fn_inputs", &entry);
    if (st != ST_OK || strcmp(entry.name, "target_tokens") != 0) return st;
    return take_input(context, field);
}

static enum status take_others(void *context, const struct proto_field *field)
{
    struct map_entry entry;
    if (field->number != 2) return ST_OK;
    enum status st = read_entry(field, "loss_fn_inputs", &entry);
    if (st != ST_OK || strcmp(entry.name, "target_tokens") == 0) return st;
    return take_input(context, field);
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
    enum status st;
    struct datum_reader r = {.datum = ret, .request = request};
    CHECK(proto_each_field(message, take_model_input, &r));
    if (ret->n == 0) FAIL(ST_INVALID, "\"model_input\" holds no token");
    if (ret->n > limits->longest)
        FAIL(ST_INVALID,
             "\"model_input\" has %d tokens, and at most %d can be trained on: raise "
             "--token-budget, where the model's context allows more",
             ret->n, limits->longest);
    CHECK(proto_each_field(message, take_targets, &r));
    CHECK(proto_each_field(message, take_others, &r));
    st = check_datum(request, ret, limits);
out:
    return st;
}

// ---- the request --------------------------------------------------------------------------------

struct request_reader {
    struct forward_backward *request;
    char *loss_fn;
    const struct datum_limits *limits;
};

static enum status take_config_value(void *context, const struct proto_field *field)
{
    struct proto_field *ret = context;
    *ret = *field;
    return ST_OK;
}

// An entry of loss_fn_config (a number) or, version 2, of one that has texts too.
static enum status take_setting(struct forward_backward *request, const struct proto_field *field)
{
    struct map_entry entry;
    struct proto_field value;
    enum status st;
    CHECK(read_entry(field, "loss_fn_config", &entry));
    value = entry.value;
    if (field->number == 7) {
        CHECK(proto_expect(&entry.value, PROTO_BYTES, entry.name));
        value = (struct proto_field){.type = PROTO_BYTES};
        CHECK(proto_each_field(entry.value.span, take_config_value, &value));
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

static enum status take_head(void *context, const struct proto_field *field)
{
    struct request_reader *r = context;
    enum status st = ST_OK;
    switch (field->number) {
    case 1:
        return take_text(field, "model_id", &r->request->model_id);
    case 2:
        CHECK(proto_expect(field, PROTO_VARINT, "seq_id"));
        r->request->seq_id = (int64_t)field->value;
        break;
    case 3:
        if (r->limits) r->request->n++;
        break;
    case 4:
        return r->limits ? take_text(field, "loss_fn", &r->loss_fn) : ST_OK;
    case 6:
        CHECK(proto_expect(field, PROTO_VARINT, "forward_only"));
        r->request->forward_only = field->value != 0;
        break;
    }
out:
    return st;
}

static enum status take_body(void *context, const struct proto_field *field)
{
    struct request_reader *r = context;
    struct forward_backward *request = r->request;
    if (field->number == 5 || field->number == 7) return take_setting(request, field);
    if (field->number != 3) return ST_OK;
    enum status st = proto_expect(field, PROTO_BYTES, "data");
    if (st != ST_OK) return st;
    const int i = request->n++;
    return status_context(read_datum(request, field->span, r->limits, &request->data[i]),
                          "datum %d", i);
}

enum status forward_backward_parse(const char *body, size_t len, const struct datum_limits *limits,
                                   struct forward_backward *ret)
{
    enum status st;
    struct forward_backward request = {0};
    struct request_reader r = {.request = &request, .limits = limits};
    const struct proto_span message = {(const unsigned char *)body, len};
    CHECK(proto_each_field(message, take_head, &r)); // the loss may stand behind the datums
    if (request.n == 0) FAIL(ST_INVALID, "\"data\" holds no datum");
    CHECK(loss_of_client(r.loss_fn ? r.loss_fn : "", &request.loss));
    request.data = calloc((size_t)request.n, sizeof *request.data);
    if (!request.data) FAIL(ST_NO_MEMORY, "out of memory");
    request.n = 0;
    CHECK(proto_each_field(message, take_body, &r));
    *ret = request;
out:
    free(r.loss_fn);
    if (st != ST_OK) forward_backward_release(&request);
    return status_context(st, "forward_backward");
}

enum status forward_backward_address(const char *body, size_t len, char **ret_model_id,
                                     int64_t *ret_seq_id)
{
    struct forward_backward request = {0};
    struct request_reader r = {.request = &request};
    const struct proto_span message = {(const unsigned char *)body, len};
    enum status st = proto_each_field(message, take_head, &r);
    if (st == ST_OK && (!request.model_id || request.seq_id < 1))
        st = status_fail(ST_INVALID, "\"model_id\" and \"seq_id\", from 1 on, must be there");
    if (st == ST_OK) {
        *ret_model_id = request.model_id;
        *ret_seq_id = request.seq_id;
    } else {
        free(request.model_id);
    }
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
    free(request->model_id);
    *request = (struct forward_backward){0};
}

// ---- the answer ---------------------------------------------------------------------------------

// Those of datums [first, end), which have one shape behind their tokens, as a record.
static void put_record(const struct forward_backward *request, const float *logprobs, int first,
                       int end, struct bytes *to)
{
    struct bytes data = BYTES_INIT, offsets = BYTES_INIT, tensor = BYTES_INIT, entry = BYTES_INIT,
                 record = BYTES_INIT;
    int64_t at = 0;
    bytes_append(&offsets, &at, sizeof at);
    for (int i = first; i < end; i++) {
        const struct datum *d = &request->data[i];
        const size_t n = (size_t)d->n * (size_t)d->each;
        bytes_append(&data, logprobs, n * sizeof(float));
        logprobs += n;
        at = (int64_t)data.len;
        bytes_append(&offsets, &at, sizeof at);
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

void forward_backward_answer(const struct forward_backward *request, const float *logprobs,
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
