/* completion.c: a completion as a line of the NDJSON response of POST /v1/rollouts has it; and how
 * ranks that train together come by one another's samples: each in turn sends the groups that it
 * has pulled since, of each its prompt, where an environment made it, and its completions.
 * Stateless.
 *
 * Whatever a line says that could make the loss wrong without anybody noticing (an id outside the
 * vocabulary, a log-probability above 0, a version the weights never had, lists of different
 * lengths) is an error with a sentence. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/rollout/completion.h"
#include "common/base/json.h"
#include "trainer/rollout/rollout.h"

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
} lists[] = {LIST(ids),     LIST(logprobs), LIST(processed),   LIST(versions),
             LIST(authors), LIST(accepted), LIST(text_offset), LIST(advantages)};
enum { LISTS = sizeof lists / sizeof *lists };

// Where the i-th is, NULL in it where the completion has none, and the bytes of an entry.
static void **list_of(const struct completion *c, int i, size_t *ret_each)
{
    *ret_each = lists[i].each;
    return (void **)((char *)c + lists[i].field);
}

void completion_release(struct completion *c)
{
    size_t each;
    for (int i = 0; i < LISTS; i++) free(*list_of(c, i, &each));
    free(c->text);
    free(c->parts);
    free(c->sequences);
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

int completion_first_sampled(const struct completion *c)
{
    int t = 0;
    while (t < c->n && token_author(c->authors, t) == AUTHOR_OTHER) t++;
    return t;
}

static void cut_tokens(struct completion *c, int first)
{
    const size_t left = (size_t)(c->n - first);
    for (int i = 0; i < LISTS; i++) {
        size_t each;
        char *list = *list_of(c, i, &each);
        if (list) memmove(list, list + (size_t)first * each, left * each);
    }
    for (int k = 0; k < c->n_rewards; k++) c->rewards[k].after -= first;
    c->n = (int)left;
}

static void cut_contexts(struct completion *c, int first)
{
    c->n_sequences = 0;
    for (int k = 0; k < c->n_parts; k++) {
        struct pack_part *part = &c->parts[k];
        const int end = k + 1 < c->n_parts ? part[1].first : c->n;
        part->n_context -= first;
        const int n = part->n_context + end - part->first;
        memmove(c->sequences + c->n_sequences, c->sequences + part->begin + first,
                (size_t)n * sizeof *c->sequences);
        part->begin = c->n_sequences;
        c->n_sequences += n;
    }
}

void completion_keep_parts(struct completion *c, int parts)
{
    if (parts < c->n_parts) c->n = c->parts[parts].first;
    c->n_parts = parts;
    if (parts > 0) return;
    free(c->parts); // one, without tokens
    c->parts = NULL;
}

void completion_cut(struct completion *c, int first)
{
    if (c->parts)
        cut_contexts(c, first);
    else
        cut_tokens(c, first);
    for (int t = 0; t < c->n; t++)
        if (token_author(c->authors, t) != AUTHOR_POLICY) return;
    free(c->authors); // all are the policy's
    c->authors = NULL;
}

// ---- a line of the response ---------------------------------------------------------------------

// Without the mask a tandem's sample would be learned from as if the policy had written all of it.
// Nothing is computed from the last two, which are for people: a server may leave them out.
static enum status read_lists(const struct completion_bounds *bounds, const json_t *line,
                              struct completion *c)
{
    const double vocab = bounds->vocab_size, certain = 1e-3; // 0, lifted a little by rounding
    const double oldest = bounds->oldest > 2 ? (double)bounds->oldest : 2;
    const struct number_list fields[] = {
        {"token_ids", NUMBER_I32, 0, vocab - 1, ST_MISMATCH,
         "is not an id below the vocabulary's size"},
        {"weight_versions", NUMBER_U64, oldest, (double)bounds->newest, ST_MISMATCH,
         "is no version that the weights had since it was asked for"},
        {"logprobs", NUMBER_F32, -FLT_MAX, certain, ST_FORMAT, "is no log-probability"},
        {"cut_logprobs", NUMBER_F32, -FLT_MAX, certain, ST_FORMAT, "is no log-probability"},
        {"model_mask", NUMBER_U8, 0, 1, ST_FORMAT, "is neither 0 nor 1"},
        {"accepted", NUMBER_U8, 0, UINT8_MAX, ST_FORMAT, "is not a small whole number"},
        {"text_offset", NUMBER_I32, 0, INT32_MAX, ST_FORMAT, "is not a whole number"},
    };
    void *const to[] = {&c->ids,     &c->versions, &c->logprobs,   &c->processed,
                        &c->authors, &c->accepted, &c->text_offset};
    const bool wanted[] = {true,
                           true,
                           true,
                           bounds->filtered,
                           bounds->tandem,
                           json_has(line, "accepted"),
                           json_has(line, "text_offset")};
    enum status st = ST_OK;
    if (bounds->tandem != json_has(line, "model_mask"))
        FAIL(ST_MISMATCH, "field \"model_mask\" %s",
             bounds->tandem ? "is missing: which tokens of a tandem are the policy's?"
                            : "of a tandem, where none was asked for");
    c->n = (int)json_array_size(json_object_get(line, "token_ids"));
    if (c->n > bounds->max_tokens)
        FAIL(ST_MISMATCH, "%d tokens where at most %d were asked for", c->n, bounds->max_tokens);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (wanted[i])
            CHECK(json_read_numbers(json_object_get(line, fields[i].key), &fields[i], c->n, to[i]));
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
    for (size_t i = 0; i < len; i++)
        bytes_append(&copy, text[i] ? text + i : "\xe2\x90\x80", text[i] ? 1 : 3);
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

// Appends a block; NULL is there as such.
static void put(struct bytes *to, const void *data, size_t bytes)
{
    const size_t held = data ? bytes + 1 : 0;
    bytes_append(to, &held, sizeof held);
    if (!data) return;
    bytes_append(to, data, bytes);
    bytes_append(to, "", 1);
}

// The next block, with a NUL behind it (ret_copy: pointer to its pointer), of so many bytes;
// SIZE_MAX: of any number. ST_FORMAT where it is not whole, or of another length.
static enum status get(struct packed *from, size_t bytes, void *ret_copy)
{
    const size_t left = (size_t)(from->end - from->at);
    size_t held = 0;
    char *copy = NULL;
    if (left >= sizeof held) memcpy(&held, from->at, sizeof held);
    if (left < sizeof held || held > left - sizeof held ||
        (held > 0 && bytes != SIZE_MAX && held != bytes + 1))
        return status_fail(ST_FORMAT, "what another rank sent is cut off");
    if (held > 0 && !(copy = malloc(held)))
        return status_fail(ST_NO_MEMORY, "no memory for what another rank sent");
    if (copy) memcpy(copy, from->at + sizeof held, held);
    from->at += sizeof held + held;
    memcpy(ret_copy, &copy, sizeof copy);
    return ST_OK;
}

enum status completion_pack(const struct completion *c, struct bytes *to)
{
    char *telemetry = c->telemetry ? json_dumps(c->telemetry, JSON_COMPACT) : NULL;
    size_t each;
    put(to, c, sizeof *c); // for its numbers
    for (int i = 0; i < LISTS; i++) {
        const void *list = *list_of(c, i, &each);
        put(to, list, (size_t)c->n * each);
    }
    put(to, c->parts, (size_t)c->n_parts * sizeof *c->parts);
    put(to, c->sequences, (size_t)c->n_sequences * sizeof *c->sequences);
    put(to, c->rewards, (size_t)c->n_rewards * sizeof *c->rewards);
    put(to, c->text, strlen(c->text));
    put(to, telemetry, telemetry ? strlen(telemetry) : 0);
    free(telemetry);
    return c->telemetry && !telemetry ? status_fail(ST_NO_MEMORY, "no memory for a completion")
                                      : bytes_status(to);
}

enum status completion_unpack(struct packed *from, struct completion *ret)
{
    struct packed r = *from;
    struct completion c = {0}, *sent = NULL;
    char *telemetry = NULL;
    size_t each;
    enum status st;
    CHECK(get(&r, sizeof *sent, &sent));
    c.n = sent->n;
    c.n_rewards = sent->n_rewards;
    c.n_parts = sent->n_parts;
    c.n_sequences = sent->n_sequences;
    c.truncated = sent->truncated;
    for (int i = 0; i < LISTS; i++) {
        void **list = list_of(&c, i, &each);
        CHECK(get(&r, (size_t)c.n * each, list));
    }
    CHECK(get(&r, (size_t)c.n_parts * sizeof *c.parts, &c.parts));
    CHECK(get(&r, (size_t)c.n_sequences * sizeof *c.sequences, &c.sequences));
    CHECK(get(&r, (size_t)c.n_rewards * sizeof *c.rewards, &c.rewards));
    CHECK(get(&r, SIZE_MAX, &c.text));
    CHECK(get(&r, SIZE_MAX, &telemetry));
    if (telemetry)
        CHECK(json_parse("another rank's telemetry", telemetry, strlen(telemetry), &c.telemetry));
    *from = r;
    *ret = c;
    c = (struct completion){0};
out:
    free(sent);
    free(telemetry);
    completion_release(&c);
    return st;
}

// ---- between ranks ------------------------------------------------------------------------------

enum status rollout_broadcast(struct comm *comm, int rank, struct bytes *text)
{
    enum status st;
    size_t len = text->len;
    CHECK(comm_broadcast_host(comm, &len, sizeof len, rank));
    if (comm_rank(comm) != rank) {
        bytes_clear(text);
        if (!bytes_reserve(text, len)) FAIL(ST_NO_MEMORY, "no memory for what rank %d sent", rank);
        text->len = len;
    }
    if (len > 0) CHECK(comm_broadcast_host(comm, text->data, len, rank));
out:
    return st;
}

struct group_head {
    int32_t group, n_prompt; // tokens
};

static enum status pack_groups(const struct rollout *r, struct bytes *to)
{
    enum status st = ST_OK;
    for (int g = 0; g < r->n_groups; g++) {
        const struct token_list *prompt = &r->prompts[g];
        const struct group_head head = {g, prompt->n};
        if (r->exchanged[g] || !r->completions[g * r->n_per_group].text) continue; // another's
        put(to, &head, sizeof head);
        put(to, prompt->ids, (size_t)prompt->n * sizeof *prompt->ids);
        for (int i = g * r->n_per_group; i < (g + 1) * r->n_per_group; i++)
            CHECK(completion_pack(&r->completions[i], to));
    }
    st = bytes_status(to);
out:
    return st;
}

static enum status take_group(struct rollout *r, struct packed *from)
{
    struct group_head *head = NULL;
    int32_t *prompt = NULL;
    enum status st;
    CHECK(get(from, sizeof *head, &head));
    const int g = head->group, first = g * r->n_per_group;
    if (g < 0 || g >= r->n_groups || r->completions[first].text)
        FAIL(ST_MISMATCH, "another rank's group %d of %d is not wanted here", g, r->n_groups);
    CHECK(get(from, (size_t)head->n_prompt * sizeof *prompt, &prompt));
    if (prompt) {
        token_list_release(&r->prompts[g]);
        r->prompts[g] = (struct token_list){.ids = prompt, .n = head->n_prompt};
        prompt = NULL;
    }
    for (int i = first; i < first + r->n_per_group; i++) {
        CHECK(completion_unpack(from, &r->completions[i]));
        r->n_tokens += r->completions[i].n;
    }
out:
    free(prompt);
    free(head);
    return st;
}

void rollout_is_everywhere(struct rollout *r)
{
    memset(r->exchanged, true, (size_t)r->n_groups * sizeof *r->exchanged);
}

enum status rollout_exchange(struct comm *comm, struct rollout *r)
{
    enum status st = ST_OK;
    struct bytes own = BYTES_INIT, others = BYTES_INIT;
    if (!comm) return ST_OK;
    CHECK(pack_groups(r, &own));
    for (int rank = 0; rank < comm_size(comm); rank++) {
        const bool mine = rank == comm_rank(comm);
        CHECK(rollout_broadcast(comm, rank, mine ? &own : &others));
        struct packed p = {others.data, others.data + others.len};
        while (!mine && p.at < p.end) CHECK(take_group(r, &p));
    }
    rollout_is_everywhere(r);
out:
    bytes_release(&others);
    bytes_release(&own);
    return st;
}
