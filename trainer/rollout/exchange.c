/* exchange.c: each rank in turn sends the groups that it has pulled since: of each its prompt,
 * where an environment made it, and its completions. A completion is a head, then the lists that
 * are there, the text and the telemetry's JSON, one behind the other. Stateless. */
#include "trainer/rollout/exchange.h"
#include "common/base/json.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

struct head {
    int32_t place, n, truncated, n_rewards;
    uint32_t lists; // bit i: lists[i] is there
    uint32_t text_len, telemetry_len;
};

#define LIST(name)                                                                                 \
    {                                                                                              \
        offsetof(struct completion, name), sizeof *((struct completion *)NULL)->name               \
    }
static const struct {
    size_t field, each; // of a list of n
} lists[] = {LIST(ids),     LIST(logprobs), LIST(processed),  LIST(versions),
             LIST(authors), LIST(accepted), LIST(text_offset)};
#define N_LISTS ((int)(sizeof lists / sizeof lists[0]))

static void **list_of(const struct completion *c, int i)
{
    return (void **)((char *)c + lists[i].field);
}

enum status completion_pack(const struct completion *c, int place, struct bytes *to)
{
    char *telemetry = c->telemetry ? json_dumps(c->telemetry, JSON_COMPACT) : NULL;
    struct head h = {.place = place,
                     .n = c->n,
                     .truncated = c->truncated,
                     .n_rewards = c->n_rewards,
                     .text_len = (uint32_t)strlen(c->text),
                     .telemetry_len = telemetry ? (uint32_t)strlen(telemetry) : 0};
    for (int i = 0; i < N_LISTS; i++) h.lists |= (uint32_t)(*list_of(c, i) != NULL) << i;
    bytes_append(to, &h, sizeof h);
    for (int i = 0; i < N_LISTS; i++)
        if (h.lists >> i & 1) bytes_append(to, *list_of(c, i), (size_t)c->n * lists[i].each);
    if (c->n_rewards) bytes_append(to, c->rewards, (size_t)c->n_rewards * sizeof *c->rewards);
    bytes_append(to, c->text, h.text_len);
    bytes_append(to, telemetry ? telemetry : "", h.telemetry_len);
    free(telemetry);
    return c->telemetry && !telemetry ? status_fail(ST_NO_MEMORY, "no memory for a completion")
                                      : bytes_status(to);
}

struct packed {
    const char *at, *end;
};

// The next `bytes`; NULL where there are fewer.
static const char *next(struct packed *r, size_t bytes)
{
    const char *at = r->at;
    if (bytes > (size_t)(r->end - at)) return NULL;
    r->at += bytes;
    return at;
}

// A copy of the next `bytes` with a NUL behind it.
static enum status copy_next(struct packed *r, size_t bytes, void **ret)
{
    const char *from = next(r, bytes);
    if (!from) return status_fail(ST_FORMAT, "another rank's completion is cut off");
    char *copy = malloc(bytes + 1);
    if (!copy) return status_fail(ST_NO_MEMORY, "no memory for a completion");
    memcpy(copy, from, bytes);
    copy[bytes] = 0;
    *ret = copy;
    return ST_OK;
}

enum status completion_unpack(const char *from, size_t len, size_t *at, int *ret_place,
                              struct completion *ret)
{
    struct packed r = {from + *at, from + len};
    struct completion c = {0};
    struct head h;
    enum status st;
    const char *bytes = next(&r, sizeof h);
    if (!bytes) FAIL(ST_FORMAT, "another rank's completion is cut off");
    memcpy(&h, bytes, sizeof h);
    if (h.n < 0 || h.place < 0 || h.n_rewards < 0)
        FAIL(ST_FORMAT, "another rank's completion %d has %d tokens", h.place, h.n);
    c.n = h.n;
    c.truncated = h.truncated != 0;
    for (int i = 0; i < N_LISTS; i++)
        if (h.lists >> i & 1) CHECK(copy_next(&r, (size_t)h.n * lists[i].each, list_of(&c, i)));
    c.n_rewards = h.n_rewards;
    if (h.n_rewards)
        CHECK(copy_next(&r, (size_t)h.n_rewards * sizeof *c.rewards, (void **)&c.rewards));
    CHECK(copy_next(&r, h.text_len, (void **)&c.text));
    if (!(bytes = next(&r, h.telemetry_len)))
        FAIL(ST_FORMAT, "another rank's completion is cut off");
    if (h.telemetry_len)
        CHECK(json_parse("another rank's telemetry", bytes, h.telemetry_len, &c.telemetry));
    *at = (size_t)(r.at - from);
    *ret_place = h.place;
    *ret = c;
    c = (struct completion){0};
    st = ST_OK;
out:
    completion_release(&c);
    return st;
}

// ---- groups -------------------------------------------------------------------------------------

struct group_head {
    int32_t group, n_prompt; // tokens; -1: the prompt is the example's
};

static enum status pack_groups(const struct comm *comm, const struct rollout *r, struct bytes *to)
{
    enum status st = ST_OK;
    for (int g = 0; g < r->n_groups; g++) {
        const struct token_list *prompt = r->prompts ? &r->prompts[g] : NULL;
        const struct group_head head = {g, prompt ? prompt->n : -1};
        if (r->exchanged[g] || !rollout_owns(comm, g)) continue;
        bytes_append(to, &head, sizeof head);
        if (prompt) bytes_append(to, prompt->ids, (size_t)prompt->n * sizeof *prompt->ids);
        for (int i = g * r->n_per_group; i < (g + 1) * r->n_per_group; i++)
            CHECK(completion_pack(&r->completions[i], i, to));
    }
    st = bytes_status(to);
out:
    return st;
}

static enum status take_prompt(struct rollout *r, const struct group_head *head, const char *ids,
                               size_t left)
{
    const size_t bytes = (size_t)head->n_prompt * sizeof *r->prompts->ids;
    if (bytes > left) return status_fail(ST_FORMAT, "another rank's prompt is cut off");
    if (!r->prompts) r->prompts = calloc((size_t)r->n_groups, sizeof *r->prompts);
    int32_t *copy = malloc(bytes + 1);
    if (!r->prompts || !copy) {
        free(copy);
        return status_fail(ST_NO_MEMORY, "no memory for a prompt");
    }
    memcpy(copy, ids, bytes);
    token_list_release(&r->prompts[head->group]);
    r->prompts[head->group] = (struct token_list){.ids = copy, .n = head->n_prompt};
    return ST_OK;
}

static enum status take_group(const struct comm *comm, struct rollout *r, const char *packed,
                              size_t len, size_t *at)
{
    struct group_head head;
    enum status st = ST_OK;
    if (len - *at < sizeof head) FAIL(ST_FORMAT, "another rank's group is cut off");
    memcpy(&head, packed + *at, sizeof head);
    *at += sizeof head;
    const int first = head.group * r->n_per_group;
    if (head.group < 0 || head.group >= r->n_groups || rollout_owns(comm, head.group) ||
        r->completions[first].text)
        FAIL(ST_MISMATCH, "another rank's group %d of %d is not wanted here", head.group,
             r->n_groups);
    if (head.n_prompt >= 0) {
        CHECK(take_prompt(r, &head, packed + *at, len - *at));
        *at += (size_t)head.n_prompt * sizeof *r->prompts->ids;
    }
    for (int i = first; i < first + r->n_per_group; i++) {
        int place;
        CHECK(completion_unpack(packed, len, at, &place, &r->completions[i]));
        if (place != i) FAIL(ST_MISMATCH, "another rank's completion %d is at %d", i, place);
        r->n_tokens += r->completions[i].n;
    }
out:
    return st;
}

static enum status make_room(struct rollout *r)
{
    if (!r->exchanged) r->exchanged = calloc((size_t)r->n_groups, sizeof *r->exchanged);
    return r->exchanged ? ST_OK : status_fail(ST_NO_MEMORY, "no memory for %d groups", r->n_groups);
}

enum status rollout_is_everywhere(struct rollout *r)
{
    enum status st = make_room(r);
    if (st == ST_OK) memset(r->exchanged, true, (size_t)r->n_groups * sizeof *r->exchanged);
    return st;
}

enum status rollout_exchange(struct comm *comm, struct rollout *r)
{
    enum status st = ST_OK;
    struct bytes own = BYTES_INIT;
    char *packed = NULL;
    if (!comm) return ST_OK;
    CHECK(make_room(r));
    CHECK(pack_groups(comm, r, &own));
    for (int rank = 0; rank < comm_size(comm); rank++) {
        const bool mine = rank == comm_rank(comm);
        size_t len = own.len;
        CHECK(comm_broadcast_host(comm, &len, sizeof len, rank));
        if (!(packed = malloc(len + 1)))
            FAIL(ST_NO_MEMORY, "no memory for the completions of rank %d", rank);
        if (mine) memcpy(packed, bytes_text(&own), len);
        CHECK(comm_broadcast_host(comm, packed, len, rank));
        for (size_t at = 0; !mine && at < len;) CHECK(take_group(comm, r, packed, len, &at));
        free(packed);
        packed = NULL;
    }
    st = rollout_is_everywhere(r);
out:
    free(packed);
    bytes_release(&own);
    return st;
}
