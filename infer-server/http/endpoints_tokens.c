/* endpoints_tokens.c: /tokenize, /detokenize, /tokenizer_info and /v1/chat/completions/render, as
 * vLLM has them, and /v1/messages/count_tokens: text to token ids and back, by the tokenizer that
 * the endpoints which generate use. Loop's thread, but for run(), which may be another's
 * (pending.c). */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/server_impl.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/model/model_folder.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define CONFIG_BYTES (16 << 20)

struct token_pending {
    struct pending pending;
    struct api_model model; // a copy
    int which;
    struct bytes answer;
};

enum status api_tokenize(const struct api_model *model, const json_t *object,
                         struct token_list *ret, bool *ret_strings)
{
    struct api_request own = {.given = {.add_special = true, .generation_prompt = true}};
    struct api_prompt prompt = {0};
    struct api_model unbounded = *model; // a text need not fit to be counted
    enum status st;
    unbounded.max_context = 0;
    CHECK(request_read(object, BODY_TOKENIZE, model->unknown, &own));
    CHECK(api_check_model_name(&own, model));
    if (!!own.given.messages == !!own.given.prompt)
        FAIL(ST_INVALID, "request: give exactly one of \"prompt\" and \"messages\"");
    if (own.given.messages && json_is_true(json_object_get(object, "add_special_tokens")))
        FAIL(ST_UNSUPPORTED, "request: \"add_special_tokens\" with messages is not supported: the "
                             "chat template writes them");
    CHECK(api_read_group_prompt(&own.given, &unbounded, &prompt));
    *ret = (struct token_list){prompt.ids, prompt.n_ids, prompt.n_ids};
    *ret_strings = own.given.token_strings;
out:
    return st;
}

enum status api_detokenize(const struct api_model *model, const json_t *object,
                           struct token_list *ret)
{
    struct api_request own = {.name = ""};
    struct api_prompt tokens = {0};
    const json_t **list = &own.given.prompt_ids;
    enum status st;
    CHECK(request_read(object, BODY_DETOKENIZE, model->unknown, &own));
    CHECK(api_check_model_name(&own, model));
    if (json_is_array(*list) && json_array_size(*list) == 0) return ST_OK; // the empty text
    CHECK(api_read_ids(*list, "tokens", model, &tokens));
    *ret = (struct token_list){tokens.ids, tokens.n_ids, tokens.n_ids};
out:
    return st;
}

static enum status tokenize(const struct api_model *model, const json_t *object, json_t **ret)
{
    struct token_list ids = TOKEN_LIST_INIT;
    bool strings = false;
    enum status st;
    CHECK(api_tokenize(model, object, &ids, &strings));
    json_t *spelled = strings ? json_array() : json_null(); // null for an id without a token
    for (int i = 0; strings && i < ids.n; i++) {
        const char *token = tokenizer_token(model->tokenizer, ids.ids[i]);
        json_array_append_new(spelled, token ? json_string(token) : json_null());
    }
    *ret = json_pack("{s:i, s:i, s:o, s:o}", "count", ids.n, "max_model_len", model->max_context,
                     "tokens", json_ids(ids.ids, ids.n), "token_strs", spelled);
out:
    token_list_release(&ids);
    return st;
}

static enum status detokenize(const struct api_model *model, const json_t *object, json_t **ret)
{
    struct token_list ids = TOKEN_LIST_INIT;
    struct bytes text = BYTES_INIT;
    enum status st;
    CHECK(api_detokenize(model, object, &ids));
    CHECK(tokenizer_decode(model->tokenizer, ids.ids, ids.n, false, &text));
    *ret = json_pack("{s:o}", "prompt", json_stringn(bytes_text(&text), text.len));
out:
    token_list_release(&ids);
    bytes_release(&text);
    return st;
}

// A chat as the body of /inference/v1/generate that it comes to.
static enum status render(const struct api_model *model, const json_t *object, json_t **ret)
{
    struct api_request *r = NULL;
    enum status st = api_request_read(API_CHAT, model, object, &r);
    if (st != ST_OK) return st;
    const struct sampling *s = &r->sampling;
    json_t *sampling = request_sampling_fields(object);
    json_t *own = json_pack("{s:i, s:f, s:f, s:f, s:i}", "max_tokens", s->max_tokens, "temperature",
                            (double)s->temperature, "top_p", (double)s->top_p, "min_p",
                            (double)s->min_p, "top_k", s->top_k);
    json_object_update(sampling, own);
    json_decref(own);
    json_object_set_new(sampling, "logprobs",
                        r->want_logprobs ? json_integer(s->logprobs) : json_null());
    json_object_del(sampling, "max_completion_tokens"); // max_tokens' other name
    *ret =
        json_pack("{s:o, s:n, s:o, s:s, s:b, s:O?, s:O?, s:i}", "token_ids",
                  json_ids(r->prompts[0].ids, r->prompts[0].n_ids), "features", "sampling_params",
                  sampling, "model", r->adapter[0] ? r->adapter : model->name, "stream", r->stream,
                  "stream_options", json_object_get(object, "stream_options"), "cache_salt",
                  json_object_get(object, "cache_salt"), "priority", 0);
    api_request_free(r);
    return ST_OK;
}

// Anthropic's count of a prompt, which need not fit.
static enum status count(const struct api_model *model, const json_t *object, json_t **ret)
{
    struct api_request *r = NULL;
    struct api_model unbounded = *model;
    unbounded.max_context = INT_MAX / 8;
    enum status st = api_request_read(API_MESSAGES, &unbounded, object, &r);
    if (st == ST_OK) *ret = json_pack("{s:i}", "input_tokens", r->prompts[0].n_ids);
    api_request_free(r);
    return st;
}

static enum status run(struct pending *pending)
{
    static enum status (*const runs[])(const struct api_model *, const json_t *, json_t **) = {
        [TOKENIZE] = tokenize, [DETOKENIZE] = detokenize, [RENDER] = render, [COUNT] = count};
    struct token_pending *j = (struct token_pending *)pending;
    json_t *object = NULL, *answer = NULL;
    char *written = NULL;
    enum status st;
    if (!j->model.tokenizer)
        return status_fail(ST_UNSUPPORTED, "%s has no tokenizer.json: there is no text here",
                           j->model.folder);
    CHECK(
        api_read_object(bytes_text(&pending->body.bytes), pending->body.bytes.len, false, &object));
    CHECK(runs[j->which](&j->model, object, &answer));
    written = answer ? json_dumps(answer, JSON_COMPACT) : NULL; // here, as it may be long, too
    if (written)
        bytes_puts(&j->answer, written);
    else
        st = status_fail(ST_NO_MEMORY, "out of memory while writing the answer");
    bytes_puts(&j->answer, "\n");
out:
    free(written);
    json_decref(answer);
    json_decref(object);
    return st;
}

static void done(struct pending *pending)
{
    struct token_pending *j = (struct token_pending *)pending;
    const enum status st = status_recall(&pending->status);
    if (pending->request && st == ST_OK)
        http_reply(pending->request, 200, "application/json", &j->answer);
    else if (pending->request)
        http_fail_status(pending->request, st);
    bytes_release(&j->answer);
    free(j);
}

void handle_tokens(void *server, struct http_request *q)
{
    struct server *s = server;
    const int which = http_which(q);
    if (which != DETOKENIZE && !server_is_open(s, q)) return;
    struct token_pending *j = pending_new(s, q, sizeof *j, done);
    if (!j) return;
    j->model = s->model;
    j->which = which;
    pending_parse(&j->pending, which != DETOKENIZE, run); // which may hold messages
}

// tokenizer_config.json, with special tokens as plain strings and the chat template of its own
// file.
static enum status read_info(const char *folder, json_t **ret)
{
    json_t *config = NULL, *info = json_object(), *value;
    struct bytes text = BYTES_INIT;
    char path[PATH_ROOM];
    const char *key;
    enum status st;
    if (!info) FAIL(ST_NO_MEMORY, "out of memory");
    CHECK(model_file_read_json(folder, "tokenizer_config.json", CONFIG_BYTES, &config));
    json_object_set_new(info, "tokenizer_class", json_string("PreTrainedTokenizerFast"));
    json_object_foreach (config, key, value) {
        json_t *content = json_object_get(value, "content"); // of special tokens that are objects
        if (strcmp(key, "vocab_file") != 0 && strcmp(key, "merges_file") != 0)
            json_object_set(info, key, json_is_string(content) ? content : value);
    }
    CHECK(path_put(path, folder, "chat_template.jinja"));
    if (file_exists(path)) {
        CHECK(file_read(path, CONFIG_BYTES, &text));
        json_object_set_new(info, "chat_template", json_stringn(bytes_text(&text), text.len));
    }
    *ret = json_incref(info);
out:
    bytes_release(&text);
    json_decref(config);
    json_decref(info);
    return st;
}

void handle_tokenizer_info(void *server, struct http_request *q)
{
    struct server *s = server;
    json_t *info = NULL;
    if (!s->tokenizer) {
        http_fail(q, 404, "the model's folder has no tokenizer.json");
        return;
    }
    enum status st = read_info(s->model.folder, &info);
    if (st == ST_OK)
        http_reply_json(q, 200, info);
    else
        http_fail_status(q, st);
}
