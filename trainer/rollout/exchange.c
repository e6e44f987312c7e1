/* exchange.c: how ranks that train together come by one another's samples: each in turn sends the
 * groups that it has pulled since: of each its prompt, where an environment made it, and its
 * completions. The thread that owns the communicator. */
#include "trainer/rollout/rollout.h"

#include <stdlib.h>
#include <string.h>

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

static enum status take_prompt(struct rollout *r, const struct group_head *head,
                               struct packed *from)
{
    int32_t *ids = NULL;
    if (!r->prompts) r->prompts = calloc((size_t)r->n_groups, sizeof *r->prompts);
    if (!r->prompts) return status_fail(ST_NO_MEMORY, "no memory for prompts");
    enum status st = packed_copy(from, (size_t)head->n_prompt * sizeof *ids, &ids);
    if (st != ST_OK) return st;
    token_list_release(&r->prompts[head->group]);
    r->prompts[head->group] = (struct token_list){.ids = ids, .n = head->n_prompt};
    return ST_OK;
}

static enum status take_group(const struct comm *comm, struct rollout *r, struct packed *from)
{
    struct group_head head;
    enum status st;
    CHECK(packed_read(from, sizeof head, &head));
    const int first = head.group * r->n_per_group;
    if (head.group < 0 || head.group >= r->n_groups || rollout_owns(comm, head.group) ||
        r->completions[first].text)
        FAIL(ST_MISMATCH, "another rank's group %d of %d is not wanted here", head.group,
             r->n_groups);
    if (head.n_prompt >= 0) CHECK(take_prompt(r, &head, from));
    for (int i = first; i < first + r->n_per_group; i++) {
        int place;
        CHECK(completion_unpack(from, &place, &r->completions[i]));
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
        for (struct packed p = {packed, packed + len}; !mine && p.at < p.end;)
            CHECK(take_group(comm, r, &p));
        free(packed);
        packed = NULL;
    }
    st = rollout_is_everywhere(r);
out:
    free(packed);
    bytes_release(&own);
    return st;
}
