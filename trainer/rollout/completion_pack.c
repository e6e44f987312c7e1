/* completion_pack.c: a head, then the lists that are there, the text and the telemetry's JSON, one
 * behind the other. Stateless. */
#include "trainer/rollout/completion_pack.h"
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

struct reader {
    const char *at, *end;
};

// The next `bytes`; NULL where there are fewer.
static const char *next(struct reader *r, size_t bytes)
{
    const char *at = r->at;
    if (bytes > (size_t)(r->end - at)) return NULL;
    r->at += bytes;
    return at;
}

// A copy of the next `bytes` with a NUL behind it.
static enum status copy_next(struct reader *r, size_t bytes, void **ret)
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
    struct reader r = {from + *at, from + len};
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
