/* prompts.c: joins data set, tokenizer and chat template: turns the examples into token ids, once,
 * at start; from there on tokens travel as ids. The trainer's thread.
 *
 * A data set of questions, as GSM8K ships it, says nothing about how a model is asked. Left to
 * itself (--prompt-template auto), a model with a chat template gets each as a user's message that
 * ends on the form of answer which the reward reads; a model without one, which nobody taught to
 * follow an instruction, gets the question as it is. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/log.h"
#include "trainer/data/data.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct tokenizing {    // of one example
    struct dataset *d; // what the template ignores is noted there
    struct example *e;
    const struct prompt_format *format;
};

// Errors are put at the example's line by dataset_tokenize().

static enum status encode(const struct tokenizing *t, const char *text, size_t len,
                          bool add_special, struct token_list *ret)
{
    const int vocab_size = t->format->vocab_size;
    enum status st = tokenizer_encode(t->format->tokenizer, text, len, add_special, ret);
    for (int i = 0; st == ST_OK && i < ret->n; i++)
        if (ret->ids[i] < 0 || ret->ids[i] >= vocab_size)
            st = status_fail(ST_MISMATCH,
                             "token id %d is beyond the model's vocabulary of %d; the tokenizer "
                             "belongs to another model",
                             ret->ids[i], vocab_size);
    return st;
}

// ---- chats --------------------------------------------------------------------------------------

static bool is_auto(const struct prompt_options *options)
{
    return !options->prompt_template || strcmp(options->prompt_template, "auto") == 0;
}

// The template that was given; NULL: none.
static const char *given_template(const struct prompt_options *options)
{
    return is_auto(options) || strcmp(options->prompt_template, "none") == 0
               ? NULL
               : options->prompt_template;
}

// The prompt is, or becomes, a chat.
static bool is_chat(const struct tokenizing *t)
{
    return t->e->messages || t->format->options->chat || (t->d->asks && t->e->question);
}

// A text prompt with what the format puts around it.
static void put_prompt(const struct tokenizing *t, struct bytes *ret)
{
    const struct prompt_options *o = t->format->options;
    const bool asks = t->d->asks && t->e->question;
    const char *around = asks ? o->question_template : given_template(o);
    const char *place = around ? strstr(around, PROMPT_PLACE) : NULL;
    if (place) bytes_append(ret, around, (size_t)(place - around));
    bytes_append(ret, t->e->prompt, t->e->prompt_len);
    if (place) bytes_puts(ret, place + strlen(PROMPT_PLACE));
}

// False: no memory.
static bool add_message(json_t *messages, const char *role, const char *text, size_t len)
{
    return json_array_append_new(messages,
                                 json_pack("{s:s, s:s%}", "role", role, "content", text, len)) == 0;
}

// The messages of an example, its own or its text as a user's, with its completion at their end or
// without it. New reference.
static enum status conversation(const struct tokenizing *t, bool answered, json_t **ret)
{
    const struct example *e = t->e;
    const char *system = t->format->options->system_prompt;
    struct bytes text = BYTES_INIT;
    enum status st = ST_OK;
    json_t *messages = e->messages ? json_copy((json_t *)e->messages) : json_array();
    const json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    bool ok = messages != NULL;
    if (!e->messages) {
        put_prompt(t, &text);
        if (system) ok = ok && add_message(messages, "system", system, strlen(system));
        ok = ok && !text.failed && add_message(messages, "user", bytes_text(&text), text.len);
    }
    if (message_by_assistant(last)) { // of its own
        if (!answered) json_array_remove(messages, json_array_size(messages) - 1);
    } else if (answered && e->reply) {
        ok = ok && json_array_append(messages, (json_t *)e->reply) == 0;
    } else if (answered && e->completion) {
        ok = ok && add_message(messages, "assistant", e->completion, strlen(e->completion));
    } else if (answered) {
        st = status_fail(ST_FORMAT, "neither a \"completion\" nor an assistant's message at the "
                                    "end to learn");
    }
    bytes_release(&text);
    if (st == ST_OK && !ok) st = status_fail(ST_NO_MEMORY, "no memory");
    if (st == ST_OK)
        *ret = messages;
    else
        json_decref(messages);
    return st;
}

// A turns_render_fn.
static enum status render_chat(void *context, const json_t *messages, bool generation_prompt,
                               struct bytes *ret)
{
    const struct tokenizing *t = context;
    const struct chat_template *chat = t->format->chat;
    if (!chat)
        return status_fail(ST_UNSUPPORTED,
                           "chat messages, but the model folder has no chat template; give one "
                           "with --chat-template-file");
    char sentence[600];
    json_t *joined = NULL;
    enum status st = chat_messages_join_parts(chat, messages, &joined);
    struct chat_input input = {
        .messages = joined,
        .tools = json_object_get(t->e->row, "tools"),
        .kwargs = json_object_get(t->e->row, "chat_template_kwargs"),
        .add_generation_prompt = generation_prompt,
    };
    if (st == ST_OK) st = chat_template_render(chat, &input, ret);
    if (st == ST_OK && !t->d->ignored && chat_template_check_used(chat, &input) != ST_OK) {
        // the first is kept for the mains to log
        snprintf(sentence, sizeof sentence, "%s, line %d: %s", t->d->path, t->e->line,
                 status_message());
        t->d->ignored = strdup(sentence);
    }
    json_decref(joined);
    return st;
}

// ---- turns --------------------------------------------------------------------------------------
// The assistant's are found by rendering the conversation's beginnings, so that a chat template
// need not say where they are.

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

enum status turns_find(const json_t *messages, bool all, turns_render_fn render, void *context,
                       struct turns *ret)
{
    enum status st;
    const size_t n = json_array_size(messages);
    struct turns t = TURNS_INIT;
    t.turns = calloc(n, sizeof *t.turns);
    if (!t.turns) return status_fail(ST_NO_MEMORY, "no memory for a conversation");
    CHECK(render_first(messages, n, false, render, context, &t.text));
    for (size_t i = all ? 0 : n - 1; i < n; i++) {
        bool found;
        if (!message_by_assistant(json_array_get(messages, i))) continue;
        st = find_turn(&t.text, messages, i, render, context, &t.turns[t.n], &found);
        if (st == ST_NO_MEMORY || (st != ST_OK && i == n - 1)) goto out;
        found = found && (t.n == 0 || t.turns[t.n].start >= t.turns[t.n - 1].end);
        if (!found && i == n - 1)
            FAIL(ST_UNSUPPORTED, "in this chat template an answered conversation does not begin "
                                 "with its prompt");
        t.n += found;
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

// ---- prompts ------------------------------------------------------------------------------------

static enum status tokenize_prompt(struct tokenizing *t)
{
    enum status st;
    struct bytes text = BYTES_INIT;
    struct example *e = t->e;
    const bool chat = is_chat(t);
    json_t *messages = NULL;
    e->prompt_ids.n = 0;
    if (chat) {
        CHECK(conversation(t, false, &messages));
        CHECK(render_chat(t, messages, true, &text));
    } else {
        put_prompt(t, &text);
    }
    CHECK(bytes_status(&text));
    CHECK(encode(t, bytes_text(&text), text.len, !chat, &e->prompt_ids));
    json_decref(e->prompt_text); // for the log of rollouts, where it is not what the row says
    e->prompt_text = NULL;
    if (!e->prompt || text.len != e->prompt_len || memcmp(text.data, e->prompt, text.len) != 0) {
        e->prompt_text = json_stringn(bytes_text(&text), text.len);
        if (!e->prompt_text) FAIL(ST_NO_MEMORY, "no memory for a prompt's text");
    }
    if (e->prompt_ids.n == 0) st = status_fail(ST_FORMAT, "the prompt has no tokens");
out:
    json_decref(messages);
    bytes_release(&text);
    return st;
}

// What a teacher reads goes the way of the prompt that it stands for.
static enum status tokenize_taught(const struct tokenizing *t)
{
    const json_t *text = json_is_string(t->e->taught) ? t->e->taught : NULL;
    struct example read = {.row = t->e->row,
                           .line = t->e->line,
                           .question = t->e->question,
                           .prompt = json_string_value(text),
                           .prompt_len = json_string_length(text),
                           .messages = text ? NULL : t->e->taught};
    struct tokenizing of_teacher = {t->d, &read, t->format};
    if (!t->e->taught) return ST_OK;
    const enum status st = tokenize_prompt(&of_teacher);
    t->e->teacher_ids = read.prompt_ids;
    json_decref(read.prompt_text);
    return status_context(st, "field \"teacher_prompt\"");
}

// ---- completions --------------------------------------------------------------------------------

// Appends the tokens of a stretch of text to the completion.
static enum status add_stretch(const struct tokenizing *t, const struct bytes *text, size_t start,
                               size_t end, bool learnt)
{
    struct example *e = t->e;
    const int before = e->completion_ids.n;
    if (start == end) return ST_OK;
    enum status st = encode(t, bytes_text(text) + start, end - start, false, &e->completion_ids);
    if (st != ST_OK) return st;
    const int n = e->completion_ids.n;
    uint8_t *larger = realloc(e->learnt, (size_t)(n ? n : 1));
    if (!larger) return status_fail(ST_NO_MEMORY, "no memory");
    e->learnt = larger;
    memset(larger + before, learnt, (size_t)(n - before));
    return ST_OK;
}

// The completion of a chat is what the conversation's text has from its first turn that is learnt
// on: the responses with the template's own ends of turn, and what stands between them.
static enum status tokenize_chat_completion(struct tokenizing *t)
{
    enum status st = ST_OK;
    struct turns turns = TURNS_INIT;
    json_t *messages = NULL;
    const json_t *message;
    size_t i, n = 0;
    CHECK(conversation(t, true, &messages));
    CHECK(turns_find(messages, t->format->options->all_turns, render_chat, t, &turns));
    if (turns.n > 1) { // it begins before the last
        t->e->prompt_ids.n = 0;
        CHECK(encode(t, bytes_text(&turns.text), turns.turns[0].start, false, &t->e->prompt_ids));
    }
    for (int k = 0; k < turns.n; k++) {
        const struct turn *turn = &turns.turns[k];
        if (k > 0) CHECK(add_stretch(t, &turns.text, turn[-1].end, turn->start, false));
        CHECK(add_stretch(t, &turns.text, turn->start, turn->end, true));
    }
    json_array_foreach (messages, i, message) n += message_by_assistant(message);
    t->d->turns.several += n > 1;
    t->d->turns.earlier += (int64_t)n - 1;
    t->d->turns.learnt += turns.n - 1;
out:
    json_decref(messages);
    turns_release(&turns);
    return st;
}

static enum status tokenize_completion(struct tokenizing *t)
{
    const int given = t->format->options->end_id,
              end = given >= 0 ? given : tokenizer_eos(t->format->tokenizer);
    struct token_list *ids = &t->e->completion_ids;
    const char *text = t->e->completion;
    enum status st;
    ids->n = 0;
    if (is_chat(t)) {
        CHECK(tokenize_chat_completion(t));
    } else {
        if (!text)
            FAIL(ST_FORMAT, "no field \"completion\" or \"answer\" to learn; name another with "
                            "--answer-field");
        CHECK(encode(t, text, strlen(text), false, ids));
        if (end >= 0) CHECK(token_list_push(ids, end));
    }
    if (ids->n == 0) st = status_fail(ST_FORMAT, "the completion has no tokens");
out:
    return st;
}

// ---- all of them --------------------------------------------------------------------------------

enum status dataset_tokenize(struct dataset *d, const struct prompt_format *format,
                             int *ret_left_out)
{
    const struct prompt_options *o = format->options;
    int kept = 0;
    d->max_prompt = d->max_completion = d->max_read = 0;
    for (int i = 0; i < d->n; i++) {
        struct example *e = &d->examples[i];
        struct tokenizing t = {d, e, format};
        enum status st = tokenize_prompt(&t);
        const bool fits = o->max_prompt_length == 0 || e->prompt_ids.n <= o->max_prompt_length;
        if (st == ST_OK && fits) st = tokenize_taught(&t);
        if (st == ST_OK && fits && (o->completions || o->given)) st = tokenize_completion(&t);
        if (st != ST_OK) return status_context(st, "%s, line %d", d->path, e->line);
        struct example this = *e;
        *e = (struct example){0}; // it moves: after a failure it is freed once
        if (!fits) {
            example_release(&this);
            continue;
        }
        if (this.prompt_ids.n > d->max_prompt) d->max_prompt = this.prompt_ids.n;
        if (this.prompt_ids.n > d->max_read) d->max_read = this.prompt_ids.n;
        if (this.teacher_ids.n > d->max_read) d->max_read = this.teacher_ids.n;
        if (this.completion_ids.n > d->max_completion) d->max_completion = this.completion_ids.n;
        d->examples[kept++] = this;
    }
    if (kept > 0 && !o->completions && d->examples[0].answer) {
        struct example *first = &d->examples[0];
        enum status st = tokenizer_encode(format->tokenizer, first->answer, strlen(first->answer),
                                          false, &first->answer_ids);
        if (st != ST_OK) return st;
    }
    const int left_out = d->n - kept;
    d->n = kept;
    if (kept == 0)
        return status_fail(ST_INVALID,
                           "%s: every prompt is longer than --max-prompt-length %d tokens", d->path,
                           (int)o->max_prompt_length);
    *ret_left_out = left_out;
    return ST_OK;
}

enum status prompts_check(const struct prompt_options *options)
{
    const char *around = given_template(options);
    if (!around || strstr(around, PROMPT_PLACE)) return ST_OK;
    return status_fail(ST_INVALID,
                       "--prompt-template \"%s\" has no " PROMPT_PLACE " where the prompt is to "
                       "stand; put it in, or say none or auto",
                       CUT(around, 80));
}

enum status prompts_load(const char *path, const char *model_folder, int vocab_size,
                         const struct prompt_options *options, struct dataset **ret,
                         int *ret_left_out)
{
    enum status st;
    struct dataset *data = NULL;
    struct tokenizer *tokenizer = NULL;
    struct chat_template *chat = NULL;
    int left_out;
    CHECK(prompts_check(options));
    CHECK(dataset_load(path, options, &data));
    if (data->byte_order_mark) log_info("%s begins with a byte order mark, which is skipped", path);
    CHECK(tokenizer_load(model_folder, &tokenizer));
    bool ask = is_auto(options) && options->question_template && data->questions;
    const struct chat_template_choice *choice = &options->chat_template;
    bool needed = options->chat || choice->name || choice->file || data->messages;
    if (needed || ask) {
        st = chat_template_find(model_folder, choice, &chat);
        if (st != ST_OK && !(st == ST_NOT_FOUND && !needed)) goto out;
    } else if (is_auto(options) && !options->completions) {
        data->plain = chat_template_find(model_folder, choice, &chat) == ST_OK;
    }
    data->asks = ask && chat;
    const struct prompt_format format = {options, tokenizer, chat, vocab_size};
    CHECK(dataset_tokenize(data, &format, &left_out));
    bool used = chat && (options->chat || data->asks || data->messages);
    if (used && !(data->chat_source = strdup(chat_template_source(chat))))
        FAIL(ST_NO_MEMORY, "%s: no memory", path);
    *ret = data;
    *ret_left_out = left_out;
out:
    chat_template_free(chat);
    tokenizer_free(tokenizer);
    if (st != ST_OK) dataset_free(data);
    return st;
}
