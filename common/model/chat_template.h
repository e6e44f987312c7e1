/* chat_template.h: from a list of chat messages to the text a model was trained on.
 *
 * Templates are Jinja programs in tokenizer_config.json or chat_template.jinja. None is run here:
 * the template's family is recognised by what it must contain, and rendered by C code that gives
 * the same text. A template of no known family is ST_UNSUPPORTED, none at all ST_NOT_FOUND, and
 * --chat-template NAME picks one. Immutable once found; any thread. */
#ifndef COMMON_MODEL_CHAT_TEMPLATE_H
#define COMMON_MODEL_CHAT_TEMPLATE_H

#include "common/base/bytes.h"
#include <jansson.h>

struct chat_template;

// `name`: a family (see chat_template_names), or NULL to recognise the folder's own template.
enum status chat_template_find(const char *folder, const char *name, struct chat_template **ret);
// The same from the template's text and the tokens it may use; any of them may be NULL.
enum status chat_template_parse(const char *where, const char *text, const char *name,
                                const char *bos, const char *eos, struct chat_template **ret);
void chat_template_free(struct chat_template *t);
const char *chat_template_name(const struct chat_template *t);
const char *chat_template_names(void); // "chatml, qwen2, ..."

// messages: [{"role", "content"}, ...]; content is a string or a list of {"type":"text","text"}.
// Appends the text; a bad message is ST_INVALID naming messages[i] and its field. Assistant
// messages may have "reasoning_content" where the family knows it; tool calls are ST_UNSUPPORTED.
enum status chat_template_render(const struct chat_template *t, const json_t *messages,
                                 bool add_generation_prompt, struct bytes *ret);

#endif
