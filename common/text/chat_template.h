/* chat_template.h: from a list of chat messages to the text a model was trained on.
 *
 * Templates are the folder's own Jinja programs (common/text/jinja), found where transformers finds
 * them: chat_template.jinja and additional_chat_templates/NAME.jinja, else "chat_template" of
 * tokenizer_config.json, one text or a list of named ones. Rendered, they give what
 * apply_chat_template() gives, its errors included. Immutable once found; any thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_TEXT_CHAT_TEMPLATE_H
#define COMMON_TEXT_CHAT_TEMPLATE_H

#include "common/base/bytes.h"
#include <jansson.h>
#include <time.h>

struct chat_template;

struct chat_template_choice { // borrowed; all NULL, or no choice at all: the folder's own
    const char *name;         // one of the folder's named templates
    const char *file;         // a file instead of the folder's
};

// ST_NOT_FOUND: the folder has none. ST_FORMAT: one is not a Jinja template; the sentence names
// file, line and column.
enum status chat_template_find(const char *folder, const struct chat_template_choice *choice,
                               struct chat_template **ret);
// The same from one template's text. special_tokens: {"bos_token": "<s>", ...}; may be NULL.
enum status chat_template_parse(const char *where, const char *text, size_t len,
                                const json_t *special_tokens, struct chat_template **ret);
void chat_template_free(struct chat_template *t);

// {"bos_token": "<s>", ...}; borrowed.
const json_t *chat_template_tokens(const struct chat_template *t);
// Where it is from and what it is called, for the log: "DIR/tokenizer_config.json (default,
// tool_use)".
const char *chat_template_source(const struct chat_template *t);

struct chat_input {
    const json_t *messages; // [{"role": ..., "content": ...}, ...], as the template wants them
    const json_t *tools;    // NULL or null: none; with tools, a template called tool_use is taken
    const json_t *kwargs;   // further variables: {"enable_thinking": false}; NULL or null: none
    bool add_generation_prompt;
    const struct tm *now; // what strftime_now tells the time by; NULL: the clock
};
// Appends the text. ST_INVALID: messages or kwargs of the wrong type, or the template's own
// refusal.
enum status chat_template_render(const struct chat_template *t, const struct chat_input *input,
                                 struct bytes *ret);

bool chat_template_mentions(const struct chat_template *t, const char *word); // a name or a string
// ST_UNSUPPORTED, naming the first of them: tools or kwargs were given that the template, which
// would be taken, does not mention anywhere. Rendering ignores such, as transformers does.
enum status chat_template_check_used(const struct chat_template *t, const struct chat_input *input);

// Messages as OpenAI's clients send them, where content may be a list of {"type":"text","text"}:
// joined into one text, unless the template goes over content itself. A new reference;
// ST_UNSUPPORTED names a part that is no text.
enum status chat_messages_join_parts(const struct chat_template *t, const json_t *messages,
                                     json_t **ret);

#endif
