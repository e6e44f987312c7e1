/* completion.c: one line of an NDJSON response of POST /v1/rollouts. Stateless.
 *
 * Whatever a line says that could make the loss wrong without anybody noticing (an id outside the
 * vocabulary, a log-probability above 0, a version the weights never had, lists of different
 * lengths) is an error with a sentence. */
#include "trainer/rollout/completion.h"
#include "common/base/bytes.h"
#include "common/base/json.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

void completion_release(struct completion *s)
{
    free(s->ids);
    free(s->logprobs);
    free(s->processed);
    free(s->versions);
    free(s->authors);
    free(s->text);
    free(s->accepted);
    free(s->text_offset);
    free(s->advantages);
    free(s->rewards);
    json_decref(s->telemetry);
    *s = (struct completion){0};
}

double completion_reward(const struct completion *c)
{
    double sum = 0;
    for (int k = 0; k < c->n_rewards; k++) sum += c->rewards[k].reward;
    return sum;
}

static enum status read_list(const char *where, const json_t *line, const char *key, int n,
                             const json_t **ret)
{
    const json_t *list = json_object_get(line, key);
    if (!json_is_array(list))
        return status_fail(ST_FORMAT, "%s: field \"%s\" is not a list", where, key);
    if (n >= 0 && json_array_size(list) != (size_t)n)
        return status_fail(ST_FORMAT, "%s: field \"%s\" has %zu entries for %d tokens", where, key,
                           json_array_size(list), n);
    *ret = list;
    return ST_OK;
}

// A list of n log-probabilities.
static enum status read_logprobs(const char *where, const json_t *line, const char *key, int n,
                                 float **ret)
{
    const json_t *list = NULL;
    enum status st;
    float *logprobs = malloc(((size_t)n + 1) * sizeof *logprobs);
    if (!logprobs) FAIL(ST_NO_MEMORY, "%s: no memory", where);
    CHECK(read_list(where, line, key, n, &list));
    for (int t = 0; t < n; t++) {
        const json_t *logprob = json_array_get(list, (size_t)t);
        const double p = json_is_number(logprob) ? json_number_value(logprob) : NAN;
        if (!(p <= 1e-3) || !isfinite(p)) // rounding may lift a certainty a little above 0
            FAIL(ST_FORMAT, "%s: field \"%s\": log-probability of token %d is %g", where, key, t,
                 p);
        logprobs[t] = (float)p;
    }
    *ret = logprobs;
    return ST_OK;
out:
    free(logprobs);
    return st;
}

static enum status read_tokens(const char *where, const struct completion_bounds *bounds,
                               const json_t *line, struct completion *s)
{
    enum status st;
    const json_t *ids = NULL, *versions = NULL;
    CHECK(read_list(where, line, "token_ids", -1, &ids));
    if (json_array_size(ids) > (size_t)bounds->max_tokens)
        FAIL(ST_MISMATCH, "%s: %zu tokens where at most %d were asked for", where,
             json_array_size(ids), bounds->max_tokens);
    s->n = (int)json_array_size(ids);
    CHECK(read_list(where, line, "weight_versions", s->n, &versions));
    size_t room = s->n ? (size_t)s->n : 1;
    s->ids = malloc(room * sizeof *s->ids);
    s->versions = malloc(room * sizeof *s->versions);
    if (!s->ids || !s->versions) FAIL(ST_NO_MEMORY, "%s: no memory", where);
    for (int t = 0; t < s->n; t++) {
        const json_t *id = json_array_get(ids, (size_t)t);
        const json_t *version = json_array_get(versions, (size_t)t);
        json_int_t i = json_is_integer(id) ? json_integer_value(id) : -1;
        json_int_t v = json_is_integer(version) ? json_integer_value(version) : -1;
        if (i < 0 || i >= bounds->vocab_size)
            FAIL(ST_MISMATCH, "%s: token %d is not an id below the vocabulary's %d", where, t,
                 bounds->vocab_size);
        if (v < 2 || v % 2 || (uint64_t)v > bounds->newest || (uint64_t)v < bounds->oldest)
            FAIL(ST_MISMATCH,
                 "%s: token %d claims weight version %" JSON_INTEGER_FORMAT
                 ", the weights are at %" PRIu64 " and were at %" PRIu64 " when it was asked for",
                 where, t, v, bounds->newest, bounds->oldest);
        s->ids[t] = (int32_t)i;
        s->versions[t] = (uint64_t)v;
    }
    CHECK(read_logprobs(where, line, "logprobs", s->n, &s->logprobs));
    st = bounds->filtered ? read_logprobs(where, line, "cut_logprobs", s->n, &s->processed) : ST_OK;
out:
    return st;
}

// Entry t of a list of whole numbers from 0 to `max`.
static enum status read_count(const char *where, const json_t *list, const char *key, int t,
                              json_int_t max, json_int_t *ret)
{
    const json_t *entry = json_array_get(list, (size_t)t);
    json_int_t count = json_is_integer(entry) ? json_integer_value(entry) : -1;
    if (count < 0 || count > max)
        return status_fail(ST_FORMAT,
                           "%s: field \"%s\": entry %d is not a whole number from 0 to "
                           "%" JSON_INTEGER_FORMAT,
                           where, key, t, max);
    *ret = count;
    return ST_OK;
}

// Without it a tandem's sample would be learned from as if the policy had written all of it.
static enum status read_mask(const char *where, const struct completion_bounds *bounds,
                             const json_t *line, struct completion *s)
{
    enum status st;
    const json_t *mask = NULL;
    json_int_t one = 0;
    if (bounds->tandem != json_has(line, "model_mask"))
        return status_fail(ST_MISMATCH, "%s: field \"model_mask\" %s", where,
                           bounds->tandem ? "is missing: which tokens of a tandem are the policy's?"
                                          : "of a tandem, where none was asked for");
    if (!bounds->tandem) return ST_OK;
    CHECK(read_list(where, line, "model_mask", s->n, &mask));
    s->authors = malloc(s->n ? (size_t)s->n : 1);
    if (!s->authors) FAIL(ST_NO_MEMORY, "%s: no memory", where);
    for (int t = 0; t < s->n; t++) {
        CHECK(read_count(where, mask, "model_mask", t, 1, &one));
        s->authors[t] = one ? AUTHOR_POLICY : AUTHOR_FROZEN;
    }
out:
    return st;
}

// For people only, nothing is computed from them; a server may leave them out.
static enum status read_accepted(const char *where, const json_t *line, struct completion *s)
{
    enum status st = ST_OK;
    const json_t *accepted = NULL, *offsets = NULL;
    size_t room = s->n ? (size_t)s->n : 1;
    json_int_t count = 0;
    if (json_has(line, "accepted")) CHECK(read_list(where, line, "accepted", s->n, &accepted));
    if (json_has(line, "text_offset")) CHECK(read_list(where, line, "text_offset", s->n, &offsets));
    if ((accepted && !(s->accepted = malloc(room * sizeof *s->accepted))) ||
        (offsets && !(s->text_offset = malloc(room * sizeof *s->text_offset))))
        FAIL(ST_NO_MEMORY, "%s: no memory", where);
    for (int t = 0; accepted && t < s->n; t++) {
        CHECK(read_count(where, accepted, "accepted", t, UINT8_MAX, &count));
        s->accepted[t] = (uint8_t)count;
    }
    for (int t = 0; offsets && t < s->n; t++) {
        CHECK(read_count(where, offsets, "text_offset", t, INT32_MAX, &count));
        s->text_offset[t] = (int32_t)count;
    }
out:
    return st;
}

// A copy in which a sampled U+0000 is its symbol, U+2400: scorers, plug-ins and logs take text that
// ends at a NUL, and must see what follows one. NULL: no memory.
static char *text_of(const json_t *value)
{
    const char *text = json_is_string(value) ? json_string_value(value) : "";
    size_t len = json_is_string(value) ? json_string_length(value) : 0;
    struct bytes copy = BYTES_INIT;
    bytes_puts(&copy, "");
    for (size_t i = 0; i < len; i++) {
        if (text[i])
            bytes_append(&copy, text + i, 1);
        else
            bytes_puts(&copy, "\xe2\x90\x80");
    }
    if (copy.failed) bytes_release(&copy);
    return copy.data;
}

enum status completion_read(const char *where, const json_t *line,
                            const struct completion_bounds *bounds, struct completion *ret)
{
    struct completion s = {0};
    const char *finish = "";
    enum status st;
    CHECK(json_get_string(where, line, "finish_reason", &finish));
    if (strcmp(finish, "stop") != 0 && strcmp(finish, "length") != 0)
        FAIL(ST_FORMAT,
             "%s: field \"finish_reason\" is \"%s\", not \"stop\" or "
             "\"length\"",
             where, finish);
    s.truncated = strcmp(finish, "length") == 0;
    CHECK(read_tokens(where, bounds, line, &s));
    CHECK(read_mask(where, bounds, line, &s));
    CHECK(read_accepted(where, line, &s));
    s.text = text_of(json_object_get(line, "text"));
    if (!s.text) FAIL(ST_NO_MEMORY, "%s: no memory", where);
    s.telemetry = json_incref(json_object_get(line, "telemetry"));
    *ret = s;
out:
    if (st != ST_OK) completion_release(&s);
    return st;
}
