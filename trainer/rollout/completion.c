/* completion.c: a completion as a line of the NDJSON response of POST /v1/rollouts has it, and as
 * ranks send it to each other. Stateless.
 *
 * Whatever a line says that could make the loss wrong without anybody noticing (an id outside the
 * vocabulary, a log-probability above 0, a version the weights never had, lists of different
 * lengths) is an error with a sentence. */
#include "trainer/rollout/completion.h"
#include "common/base/json.h"

#include <float.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

// ---- lists --------------------------------------------------------------------------------------

#define LIST(name)                                                                                 \
    {                                                                                              \
        offsetof(struct completion, name), sizeof *((struct completion *)NULL)->name               \
    }
static const struct {
    size_t field, each;
} lists[COMPLETION_LISTS] = {LIST(ids),     LIST(logprobs), LIST(processed),   LIST(versions),
                             LIST(authors), LIST(accepted), LIST(text_offset), LIST(advantages)};

void **completion_list(const struct completion *c, int i, size_t *ret_each)
{
    *ret_each = lists[i].each;
    return (void **)((char *)c + lists[i].field);
}

void completion_release(struct completion *c)
{
    size_t each;
    for (int i = 0; i < COMPLETION_LISTS; i++) free(*completion_list(c, i, &each));
    free(c->text);
    free(c->rewards);
    json_decref(c->telemetry);
    *c = (struct completion){0};
}

double completion_reward(const struct completion *c)
{
    double sum = 0;
    for (int k = 0; k < c->n_rewards; k++) sum += c->rewards[k].reward;
    return sum;
}

void completion_forget_authors(struct completion *c)
{
    int n = 0;
    while (n < c->n && token_author(c->authors, n) == AUTHOR_POLICY) n++;
    if (n < c->n) return;
    free(c->authors);
    c->authors = NULL;
}

// ---- a line of the response ---------------------------------------------------------------------

enum status numbers_read(const json_t *list, const struct number_list *how, int n, void *ret_array)
{
    static const size_t sizes[] = {sizeof(int32_t), 1, sizeof(uint64_t), sizeof(float)};
    const size_t len = json_array_size(list);
    enum status st = ST_OK;
    void *array = NULL;
    if (!json_is_array(list)) FAIL(ST_FORMAT, "field \"%s\" is not a list", how->key);
    if (n >= 0 && len != (size_t)n)
        FAIL(ST_FORMAT, "field \"%s\" has %zu entries for %d tokens", how->key, len, n);
    if (!(array = malloc((len + 1) * sizes[how->type])))
        FAIL(ST_NO_MEMORY, "no memory for %zu numbers", len);
    for (size_t t = 0; t < len; t++) {
        const json_t *entry = json_array_get(list, t);
        const double x = json_number_value(entry);
        if (!(how->type == NUMBER_F32 ? json_is_number(entry) : json_is_integer(entry)) ||
            !(x >= how->min && x <= how->max))
            FAIL(how->status, "field \"%s\": entry %zu %s", how->key, t, how->fault);
        if (how->type == NUMBER_I32) ((int32_t *)array)[t] = (int32_t)x;
        if (how->type == NUMBER_U8) ((uint8_t *)array)[t] = (uint8_t)x;
        if (how->type == NUMBER_U64) ((uint64_t *)array)[t] = (uint64_t)x;
        if (how->type == NUMBER_F32) ((float *)array)[t] = (float)x;
    }
    memcpy(ret_array, &array, sizeof array);
    array = NULL;
out:
    free(array);
    return st;
}

// Without the mask a tandem's sample would be learned from as if the policy had written all of it.
// Nothing is computed from the last two, which are for people: a server may leave them out.
static enum status read_lists(const struct completion_bounds *bounds, const json_t *line,
                              struct completion *c)
{
    const double vocab = bounds->vocab_size, certain = 1e-3; // 0, lifted a little by rounding
    const double oldest = bounds->oldest > 2 ? (double)bounds->oldest : 2;
    const struct {
        void *to; // pointer to its pointer
        bool wanted;
        struct number_list how;
    } rows[] = {
        {&c->ids,
         true,
         {"token_ids", NUMBER_I32, 0, vocab - 1, ST_MISMATCH,
          "is not an id below the vocabulary's size"}},
        {&c->versions,
         true,
         {"weight_versions", NUMBER_U64, oldest, (double)bounds->newest, ST_MISMATCH,
          "is no version that the weights had since it was asked for"}},
        {&c->logprobs,
         true,
         {"logprobs", NUMBER_F32, -FLT_MAX, certain, ST_FORMAT, "is no log-probability"}},
        {&c->processed,
         bounds->filtered,
         {"cut_logprobs", NUMBER_F32, -FLT_MAX, certain, ST_FORMAT, "is no log-probability"}},
        {&c->authors,
         bounds->tandem,
         {"model_mask", NUMBER_U8, 0, 1, ST_FORMAT, "is neither 0 nor 1"}},
        {&c->accepted,
         json_has(line, "accepted"),
         {"accepted", NUMBER_U8, 0, UINT8_MAX, ST_FORMAT, "is not a small whole number"}},
        {&c->text_offset,
         json_has(line, "text_offset"),
         {"text_offset", NUMBER_I32, 0, INT32_MAX, ST_FORMAT, "is not a whole number"}},
    };
    enum status st = ST_OK;
    if (bounds->tandem != json_has(line, "model_mask"))
        FAIL(ST_MISMATCH, "field \"model_mask\" %s",
             bounds->tandem ? "is missing: which tokens of a tandem are the policy's?"
                            : "of a tandem, where none was asked for");
    c->n = (int)json_array_size(json_object_get(line, "token_ids"));
    if (c->n > bounds->max_tokens)
        FAIL(ST_MISMATCH, "%d tokens where at most %d were asked for", c->n, bounds->max_tokens);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].wanted)
            CHECK(numbers_read(json_object_get(line, rows[i].how.key), &rows[i].how, c->n,
                               rows[i].to));
    for (int t = 0; t < c->n; t++) {
        if (c->versions[t] % 2)
            FAIL(ST_MISMATCH, "field \"weight_versions\": entry %d is odd, of no whole weights", t);
        if (bounds->tandem && !c->authors[t]) c->authors[t] = AUTHOR_FROZEN;
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
    struct completion c = {0};
    const char *finish = json_string_value(json_object_get(line, "finish_reason"));
    enum status st = ST_OK;
    c.truncated = finish && strcmp(finish, "length") == 0;
    if (!c.truncated && !(finish && strcmp(finish, "stop") == 0))
        FAIL(ST_FORMAT, "field \"finish_reason\" is \"%s\", not \"stop\" or \"length\"",
             finish ? finish : "");
    CHECK(read_lists(bounds, line, &c));
    if (!(c.text = text_of(json_object_get(line, "text")))) FAIL(ST_NO_MEMORY, "no memory");
    c.telemetry = json_incref(json_object_get(line, "telemetry"));
    *ret = c;
out:
    if (st != ST_OK) completion_release(&c);
    return status_context(st, "%s", where);
}

// ---- as bytes -----------------------------------------------------------------------------------

// A completion is a head, then the lists that are there, the rewards, the text and the telemetry's
// JSON, one behind the other.
struct head {
    int32_t place, n, truncated, n_rewards;
    uint32_t lists; // bit i: lists[i] is there
    uint32_t text_len, telemetry_len;
};

enum status completion_pack(const struct completion *c, int place, struct bytes *to)
{
    char *telemetry = c->telemetry ? json_dumps(c->telemetry, JSON_COMPACT) : NULL;
    struct head h = {.place = place,
                     .n = c->n,
                     .truncated = c->truncated,
                     .n_rewards = c->n_rewards,
                     .text_len = (uint32_t)strlen(c->text),
                     .telemetry_len = telemetry ? (uint32_t)strlen(telemetry) : 0};
    size_t each;
    for (int i = 0; i < COMPLETION_LISTS; i++)
        h.lists |= (uint32_t)(*completion_list(c, i, &each) != NULL) << i;
    bytes_append(to, &h, sizeof h);
    for (int i = 0; i < COMPLETION_LISTS; i++)
        if (h.lists >> i & 1)
            bytes_append(to, *completion_list(c, i, &each), (size_t)c->n * lists[i].each);
    if (c->n_rewards) bytes_append(to, c->rewards, (size_t)c->n_rewards * sizeof *c->rewards);
    bytes_append(to, c->text, h.text_len);
    bytes_append(to, telemetry ? telemetry : "", h.telemetry_len);
    free(telemetry);
    return c->telemetry && !telemetry ? status_fail(ST_NO_MEMORY, "no memory for a completion")
                                      : bytes_status(to);
}

enum status packed_read(struct packed *from, size_t bytes, void *to)
{
    if (bytes > (size_t)(from->end - from->at))
        return status_fail(ST_FORMAT, "what another rank sent is cut off");
    memcpy(to, from->at, bytes);
    from->at += bytes;
    return ST_OK;
}

enum status packed_copy(struct packed *from, size_t bytes, void *ret_copy)
{
    if (bytes > (size_t)(from->end - from->at)) bytes = (size_t)(from->end - from->at) + 1;
    char *copy = malloc(bytes + 1);
    if (!copy) return status_fail(ST_NO_MEMORY, "no memory for what another rank sent");
    enum status st = packed_read(from, bytes, copy);
    copy[bytes] = 0;
    if (st == ST_OK)
        memcpy(ret_copy, &copy, sizeof copy);
    else
        free(copy);
    return st;
}

enum status completion_unpack(struct packed *from, int *ret_place, struct completion *ret)
{
    struct packed r = *from;
    struct completion c = {0};
    struct head h;
    char *telemetry = NULL;
    enum status st;
    CHECK(packed_read(&r, sizeof h, &h));
    if (h.n < 0 || h.place < 0 || h.n_rewards < 0)
        FAIL(ST_FORMAT, "another rank's completion %d has %d tokens", h.place, h.n);
    c = (struct completion){.n = h.n, .truncated = h.truncated != 0, .n_rewards = h.n_rewards};
    for (int i = 0; i < COMPLETION_LISTS; i++)
        if (h.lists >> i & 1)
            CHECK(packed_copy(&r, (size_t)h.n * lists[i].each, (char *)&c + lists[i].field));
    if (h.n_rewards) CHECK(packed_copy(&r, (size_t)h.n_rewards * sizeof *c.rewards, &c.rewards));
    CHECK(packed_copy(&r, h.text_len, &c.text));
    CHECK(packed_copy(&r, h.telemetry_len, &telemetry));
    if (h.telemetry_len)
        CHECK(json_parse("another rank's telemetry", telemetry, h.telemetry_len, &c.telemetry));
    *from = r;
    *ret_place = h.place;
    *ret = c;
    c = (struct completion){0};
out:
    free(telemetry);
    completion_release(&c);
    return st;
}
