/* served_model.h: what the server knows of its model before it serves: the tokenizer, the defaults
 * of sampling, and what its chat template does, found out by rendering short conversations: in
 * which form it writes tool calls, and whether a conversation's prompt begins with that of its turn
 * before. At start; any thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_SERVED_MODEL_H
#define INFER_SERVER_SERVED_MODEL_H

#include "common/text/chat_template.h"
#include "common/text/tokenizer.h"
#include "infer-server/http/api.h"

// Reads the folder of --model into the server's `model` and `host`; it must be of the same
// tokenizer as those of --draft and --tandem-model.
struct server;
enum status served_model_read(struct server *s);

// Sets the defaults: neutral ones, and over them those of a generation_config.json (NULL: none),
// where do_sample false is temperature 0. `where` names the file in errors.
enum status api_model_read_defaults(const char *where, const json_t *generation_config,
                                    struct api_model *ret);

// The form as which an earlier call, as the template renders it, parses back to the same call;
// NULL: none, or the template does not render calls.
const struct tool_form *chat_probe_tool_form(const struct chat_template *chat);

// Appends a sentence where a conversation of two turns does not begin with the tokens of the first
// turn's prompt, or does not hold its answer as it was. The prefix cache and training on several
// turns live by both. Nothing where the template does not take the conversation.
void chat_probe_repeats(const struct chat_template *chat, const struct tokenizer *tokenizer,
                        struct bytes *ret_sentence);

#endif
