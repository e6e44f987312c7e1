/* turns.c: finds the assistant's turns by rendering the conversation's beginnings, so that a chat
 * template need not say where they are. No state; the trainer's thread. */
#include "trainer/data/turns.h"

#include <stdlib.h>
#include <string.h>

bool message_by_assistant(const json_t *message)
{
    const char *role = json_string_value(json_object_get(message, "role"));
    return role && strcmp(role, "assistant") == 0;
}

static bool begins_with(const struct bytes *text, const struct bytes *start)
{
    return start->len <= text->len && memcmp(bytes_text(text), bytes_text(start), start->len) == 0;
}

static enum status render_first(const json_t *messages, size_t n, bool generation_prompt,
                                turns_render_fn render, void *context, struct bytes *ret)
{
    json_t *first = json_copy((json_t *)messages);
    if (!first) return status_fail(ST_NO_MEMORY, "no memory for a conversation");
    while (json_array_size(first) > n) json_array_remove(first, json_array_size(first) - 1);
    bytes_clear(ret);
    enum status st = render(context, first, generation_prompt, ret);
    json_decref(first);
    return st;
}

// Where the turn of messages[i] lies in the text. *ret_found is false where the text does not hold
// it as it would have been written; the status is then why, if the template refused a beginning.
static enum status find_turn(const struct bytes *text, const json_t *messages, size_t i,
                             turns_render_fn render, void *context, struct turn *ret,
                             bool *ret_found)
{
    struct bytes before = BYTES_INIT, with = BYTES_INIT;
    enum status st;
    *ret_found = false;
    CHECK(render_first(messages, i, true, render, context, &before));
    CHECK(render_first(messages, i + 1, false, render, context, &with));
    *ret_found = begins_with(text, &with) && begins_with(&with, &before);
    if (*ret_found) *ret = (struct turn){before.len, with.len};
out:
    bytes_release(&before);
    bytes_release(&with);
    return st;
}

enum status turns_find(const char *where, const json_t *messages, bool all, turns_render_fn render,
                       void *context, struct turns *ret)
{
    enum status st;
    const size_t n = json_array_size(messages);
    struct turns t = TURNS_INIT;
    t.turns = calloc(n, sizeof *t.turns);
    if (!t.turns) return status_fail(ST_NO_MEMORY, "%s: no memory", where);
    CHECK(render_first(messages, n, false, render, context, &t.text));
    for (size_t i = all ? 0 : n - 1; i < n; i++) {
        bool found;
        if (!message_by_assistant(json_array_get(messages, i))) continue;
        st = find_turn(&t.text, messages, i, render, context, &t.turns[t.n], &found);
        if (st == ST_NO_MEMORY || (st != ST_OK && i == n - 1)) goto out;
        found = found && (t.n == 0 || t.turns[t.n].start >= t.turns[t.n - 1].end);
        if (!found && i == n - 1)
            FAIL(ST_UNSUPPORTED,
                 "%s: in this chat template an answered conversation does not begin with "
                 "its prompt",
                 where);
        if (found)
            t.n++;
        else
            t.left_out++;
    }
    st = ST_OK;
    *ret = t;
    return ST_OK;
out:
    turns_release(&t);
    return st;
}

void turns_release(struct turns *t)
{
    bytes_release(&t->text);
    free(t->turns);
    *t = (struct turns)TURNS_INIT;
}
