/* exchange.c: how ranks that train together come by one another's samples: each in turn sends the
 * groups that it has pulled since: of each its prompt, where an environment made it, and its
 * completions. The thread that owns the communicator. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/rollout/rollout.h"

#include <stdlib.h>
#include <string.h>

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

static enum status pack_groups(const struct comm *comm, const struct rollout *r, struct bytes *to)
{
    enum status st = ST_OK;
    for (int g = 0; g < r->n_groups; g++) {
        const struct token_list *prompt = &r->prompts[g];
        const struct group_head head = {g, prompt->n};
        if (r->exchanged[g] || !rollout_owns(comm, g)) continue;
        packed_put(to, &head, sizeof head);
        packed_put(to, prompt->ids, (size_t)prompt->n * sizeof *prompt->ids);
        for (int i = g * r->n_per_group; i < (g + 1) * r->n_per_group; i++)
            CHECK(completion_pack(&r->completions[i], to));
    }
    st = bytes_status(to);
out:
    return st;
}

static enum status take_group(const struct comm *comm, struct rollout *r, struct packed *from)
{
    struct group_head *head = NULL;
    int32_t *prompt = NULL;
    enum status st;
    CHECK(packed_get(from, sizeof *head, &head));
    const int g = head->group, first = g * r->n_per_group;
    if (g < 0 || g >= r->n_groups || rollout_owns(comm, g) || r->completions[first].text)
        FAIL(ST_MISMATCH, "another rank's group %d of %d is not wanted here", g, r->n_groups);
    CHECK(packed_get(from, (size_t)head->n_prompt * sizeof *prompt, &prompt));
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
    CHECK(pack_groups(comm, r, &own));
    for (int rank = 0; rank < comm_size(comm); rank++) {
        const bool mine = rank == comm_rank(comm);
        CHECK(rollout_broadcast(comm, rank, mine ? &own : &others));
        struct packed p = {others.data, others.data + others.len};
        while (!mine && p.at < p.end) CHECK(take_group(comm, r, &p));
    }
    rollout_is_everywhere(r);
out:
    bytes_release(&others);
    bytes_release(&own);
    return st;
}
