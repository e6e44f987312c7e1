/* test_datum.c: protobuf's wire format, field by field, and the requests and answers of the Tinker
 * API that come in it: what they hold, and what malformed ones are refused for. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_client.h"
#include "common/base/rng.h"
#include "trainer/serve/datum.h"
#include "common/base/protobuf.h"

static const struct datum_limits limits = {.vocab = 100, .longest = 8};

// ---- messages -----------------------------------------------------------------------------------

static void put_head(struct bytes *to, const char *loss)
{
    proto_put_text(to, 1, "s1:train:0");
    proto_put_varint(to, 2, 7);
    proto_put_text(to, 4, loss);
}

// Three tokens in two chunks; the sampler's log-probabilities before what they are of.
static void put_policy_datum(struct bytes *to)
{
    static const int32_t tokens[3] = {5, 6, 7};
    static const int64_t targets[3] = {6, 7, 99};
    static const float logprobs[3] = {0, -0.5f, -1.5f}, advantages[3] = {0, 1, -1};
    struct bytes datum = BYTES_INIT;
    tinker_put_tokens(&datum, tokens, 1);
    tinker_put_tokens(&datum, tokens + 1, 2);
    tinker_put_tensor(&datum, "logprobs", 1, logprobs, sizeof logprobs, 3, 0);
    tinker_put_tensor(&datum, "target_tokens", 2, targets, sizeof targets, 3, 0);
    tinker_put_tensor(&datum, "advantages", 1, advantages, sizeof advantages, 3, 0);
    proto_put_text(&datum, 3, "a span, which is passed over");
    proto_put_message(to, 3, &datum);
}

static enum status parse(struct bytes *message, struct forward_backward *ret)
{
    *ret = (struct forward_backward){0};
    enum status st = forward_backward_parse(bytes_text(message), message->len, &limits, ret);
    bytes_release(message);
    return st;
}

// ---- what they hold -----------------------------------------------------------------------------

TEST(test_policy_request)
{
    struct bytes message = BYTES_INIT, entry = BYTES_INIT, value = BYTES_INIT;
    struct forward_backward request;
    put_policy_datum(&message); // the loss stands behind the datums
    put_head(&message, "ppo");
    proto_put_double(&value, 1, 1.5);
    proto_put_text(&entry, 1, "clip_high_threshold");
    proto_put_message(&entry, 2, &value);
    proto_put_message(&message, 7, &entry);
    assert_ok(parse(&message, &request));
    assert_string_equal(request.model_id, "s1:train:0");
    assert_int_equal(request.seq_id, 7);
    assert_int_equal(request.n, 1);
    const struct datum *d = request.data;
    assert_int_equal(d->n, 3);
    assert_int_equal(d->each, 1);
    assert_false(d->two_d);
    assert_memory_equal(d->tokens, ((int32_t[]){5, 6, 7}), 12);
    assert_memory_equal(d->targets, ((int32_t[]){6, 7, 99}), 12);
    assert_memory_equal(d->inputs[INPUT_LOGPROBS], ((float[]){0, -0.5f, -1.5f}), 12);
    assert_memory_equal(d->inputs[INPUT_ADVANTAGES], ((float[]){0, 1, -1}), 12);
    assert_null(d->inputs[INPUT_WEIGHTS]);
    assert_true(request.loss.epsilon_high == 1.5);
    assert_true(request.loss.epsilon == 0.8);
    forward_backward_release(&request);
}

// A sparse tensor's cells are spread over its shape; what it does not list is 0.
TEST(test_sparse_targets)
{
    static const int32_t tokens[2] = {1, 2};
    static const int64_t values[3] = {11, 12, 13}, rows[3] = {0, 2, 3}, columns[3] = {0, 2, 1};
    static const float weights[6] = {0.5f, 0, 0.25f, 0, 1, 0};
    struct bytes message = BYTES_INIT, datum = BYTES_INIT, csr = BYTES_INIT, tensor = BYTES_INIT,
                 entry = BYTES_INIT;
    struct forward_backward request;
    put_head(&message, "cross_entropy");
    tinker_put_tokens(&datum, tokens, 2);
    tinker_put_tensor(&datum, "weights", 1, weights, sizeof weights, 2, 3);
    proto_put_bytes(&csr, 1, values, sizeof values);
    proto_put_bytes(&csr, 2, rows, sizeof rows);
    proto_put_bytes(&csr, 3, columns, sizeof columns);
    proto_put_message(&tensor, 2, &csr);
    proto_put_varint(&tensor, 3, 2);
    proto_put_varint(&tensor, 4, 2); // a shape that is not packed
    proto_put_varint(&tensor, 4, 3);
    proto_put_text(&entry, 1, "target_tokens");
    proto_put_message(&entry, 2, &tensor);
    proto_put_message(&datum, 2, &entry);
    proto_put_message(&message, 3, &datum);
    assert_ok(parse(&message, &request));
    assert_int_equal(request.data[0].each, 3);
    assert_true(request.data[0].two_d);
    assert_memory_equal(request.data[0].targets, ((int32_t[]){11, 0, 12, 0, 13, 0}), 24);
    assert_memory_equal(request.data[0].inputs[INPUT_WEIGHTS], weights, sizeof weights);
    forward_backward_release(&request);
}

// The answer's fields, read back: one record for neighbours of one shape, another where it changes.
TEST(test_answer)
{
    struct datum data[3] = {
        {.n = 2, .each = 1}, {.n = 1, .each = 1}, {.n = 1, .each = 2, .two_d = true}};
    const struct forward_backward request = {.data = data, .n = 3};
    const float logprobs[] = {-1, -2, -3, -4, -5}; // two, one and two
    SCOPED(bytes_release) struct bytes answer = BYTES_INIT;
    struct proto_field field;
    int records = 0, metrics = 0;
    enum status st = ST_OK;
    forward_backward_response(&request, logprobs, 2.5, &answer);
    struct proto_span message = {(const unsigned char *)bytes_text(&answer), answer.len};
    while (proto_each(&message, &st, &field)) {
        records += field.number == 2;
        metrics += field.number == 3;
        if (field.number == 3)
            assert_non_null(memmem(field.span.data, field.span.len, "loss:sum", 8));
        if (field.number == 2 && records == 1)
            assert_non_null(
                memmem(field.span.data, field.span.len, logprobs, 3 * sizeof *logprobs));
        if (field.number == 2 && records == 2)
            assert_non_null(
                memmem(field.span.data, field.span.len, logprobs + 3, 2 * sizeof *logprobs));
    }
    assert_int_equal(records, 2);
    assert_int_equal(metrics, 1);
}

// ---- what is refused ----------------------------------------------------------------------------

static void refuse(struct bytes *message, const char *why)
{
    struct forward_backward request;
    assert_true(parse(message, &request) != ST_OK);
    assert_message(why);
    assert_null(request.data);
}

// One datum of three tokens with these targets and, where they are there, weights.
static void refuse_datum(const int32_t *tokens, size_t n, const int64_t *targets, size_t n_targets,
                         const float *weights, const char *why)
{
    struct bytes message = BYTES_INIT, datum = BYTES_INIT;
    put_head(&message, "cross_entropy");
    if (n) tinker_put_tokens(&datum, tokens, n);
    if (targets)
        tinker_put_tensor(&datum, "target_tokens", 2, targets, n_targets * sizeof *targets,
                          (int64_t)n_targets, 0);
    if (weights) tinker_put_tensor(&datum, "weights", 1, weights, n * sizeof *weights, (int)n, 0);
    proto_put_message(&message, 3, &datum);
    refuse(&message, why);
}

TEST(test_refused_datums)
{
    static const int32_t tokens[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9}, wrong[3] = {1, 100, 2};
    static const int64_t targets[9] = {2, 3, 4, 5, 6, 7, 8, 9, 10}, ignored[3] = {2, -100, 3};
    static const float weights[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1}, odd[3] = {1, NAN, 1};
    refuse_datum(tokens, 0, targets, 3, NULL, "datum 0: \"model_input\" holds no token");
    refuse_datum(tokens, 3, NULL, 0, weights, "no \"target_tokens\"");
    refuse_datum(tokens, 3, targets, 3, NULL, "no \"weights\", which the loss needs");
    refuse_datum(tokens, 3, targets, 2, weights, "\"target_tokens\" has 2 entries, the input 3");
    refuse_datum(tokens, 9, targets, 9, weights, "at most 8 can be trained on");
    refuse_datum(wrong, 3, targets, 3, weights, "\"model_input\" holds 100; token ids are 0 to 99");
    refuse_datum(tokens, 3, ignored, 3, weights,
                 "\"target_tokens\" holds -100; token ids are 0 to 99");
    refuse_datum(tokens, 3, targets, 3, odd, "\"weights\" holds a value that is not finite");
}

TEST(test_refused_requests)
{
    struct bytes message = BYTES_INIT, entry = BYTES_INIT;
    put_head(&message, "ppo");
    refuse(&message, "\"data\" holds no datum");
    put_policy_datum(&message);
    put_head(&message, "stable_reinforce");
    refuse(&message, "loss_fn=importance_sampling");
    put_policy_datum(&message);
    put_head(&message, "cross_entropy");
    refuse(&message, "which the loss does not know");
    put_policy_datum(&message);
    put_head(&message, "dro");
    proto_put_text(&entry, 1, "clip_low_threshold");
    proto_put_double(&entry, 2, 0.5);
    proto_put_message(&message, 5, &entry);
    refuse(&message, "\"loss_fn_config\" has \"clip_low_threshold\", which the loss does not know");
}

// A few bytes of a sparse tensor may name a shape that no memory holds.
TEST(test_refused_shape)
{
    enum { LONG = 300 };
    static const struct datum_limits wide = {.vocab = 100, .longest = LONG};
    static const int32_t tokens[LONG];
    struct bytes message = BYTES_INIT, datum = BYTES_INIT, csr = BYTES_INIT, tensor = BYTES_INIT,
                 entry = BYTES_INIT;
    struct forward_backward request;
    put_head(&message, "cross_entropy");
    tinker_put_tokens(&datum, tokens, LONG);
    proto_put_message(&tensor, 2, &csr);
    proto_put_varint(&tensor, 3, 2);
    proto_put_varint(&tensor, 4, LONG);
    proto_put_varint(&tensor, 4, 65536);
    proto_put_text(&entry, 1, "target_tokens");
    proto_put_message(&entry, 2, &tensor);
    proto_put_message(&datum, 2, &entry);
    proto_put_message(&message, 3, &datum);
    assert_fails(forward_backward_parse(bytes_text(&message), message.len, &wide, &request),
                 ST_INVALID, "has 19660800 cells");
    bytes_release(&message);
}

// Whatever the bytes are, they are read or refused; a sanitizer sees more.
TEST(test_broken_bytes)
{
    SCOPED(bytes_release) struct bytes good = BYTES_INIT;
    struct rng r;
    put_head(&good, "importance_sampling");
    put_policy_datum(&good);
    rng_init(&r, 5, 0);
    for (int i = 0; i < 20000; i++) {
        struct bytes message = BYTES_INIT;
        struct forward_backward request;
        const size_t len = i % 2 ? good.len : (size_t)(rng_uniform(&r) * (float)good.len);
        bytes_append(&message, good.data, len);
        for (int k = 0; len > 0 && k < 1 + i % 4; k++)
            message.data[(size_t)(rng_uniform(&r) * (float)len) % len] =
                (char)(rng_uniform(&r) * 256);
        if (parse(&message, &request) == ST_OK) forward_backward_release(&request);
    }
}

// --loss-for: another loss is computed, and what it does not know of is passed over.
TEST(test_a_loss_that_stands_in)
{
    struct datum_limits with = limits;
    struct forward_backward request;
    struct bytes message = BYTES_INIT, setting = BYTES_INIT;
    put_head(&message, "stable_reinforce");
    put_policy_datum(&message);
    proto_put_text(&setting, 1, "mixing");
    proto_put_double(&setting, 2, 0.5);
    proto_put_message(&message, 5, &setting);
    assert_status(forward_backward_parse(bytes_text(&message), message.len, &limits, &request),
                  ST_UNSUPPORTED);
    with.loss_for = "stable_reinforce=importance_sampling";
    assert_ok(loss_for_check(with.loss_for));
    assert_ok(forward_backward_parse(bytes_text(&message), message.len, &with, &request));
    assert_int_equal(request.loss.type, LOSS_CLIENT_IMPORTANCE_SAMPLING);
    assert_int_equal(request.n, 1);
    forward_backward_release(&request);
    bytes_release(&message);
    assert_fails(loss_for_check("stable_reinforce"), ST_INVALID, "take NAME=OTHER");
    assert_fails(loss_for_check("a=nothing"), ST_INVALID, "--loss-for a=nothing");
    assert_ok(loss_for_check(NULL));
}
