/* endpoints_tokens.c: /tokenize, /detokenize and /tokenizer_info, as vLLM has them: text to token
 * ids and back, by the tokenizer that the endpoints which generate use. Loop's thread. */
#include "infer-server/http/server_impl.h"
#include "common/base/file.h"
#include "common/base/json.h"

#include <stdlib.h>
#include <string.h>

#define CONFIG_BYTES (16 << 20)

static enum status read_body(const struct server *s, const struct exchange *x, json_t **ret)
{
    size_t len;
    const char *body = exchange_body(x, &len);
    json_t *object = NULL;
    if (!s->tokenizer)
        return status_fail(ST_UNSUPPORTED, "%s has no tokenizer.json: there is no text here",
                           s->model.folder);
    enum status st = json_parse("request", body, len, &object);
    if (st != ST_OK) return st;
    if (!json_is_object(object)) {
        json_decref(object);
        return status_fail(ST_INVALID, "request: the body must be a JSON object");
    }
    *ret = object;
    return ST_OK;
}

static json_t *id_list(const struct token_list *ids)
{
    json_t *list = json_array();
    for (int i = 0; i < ids->n; i++) json_array_append_new(list, json_integer(ids->ids[i]));
    return list;
}

// As the vocabulary spells them; null for an id without a token.
static json_t *token_strings(const struct tokenizer *t, const struct token_list *ids)
{
    json_t *list = json_array();
    for (int i = 0; i < ids->n; i++) {
        const char *token = tokenizer_token(t, ids->ids[i]);
        json_array_append_new(list, token ? json_string(token) : json_null());
    }
    return list;
}

void handle_tokenize(void *server, struct exchange *x)
{
    struct server *s = server;
    struct token_list ids = TOKEN_LIST_INIT;
    json_t *object = NULL;
    bool strings = false;
    enum status st = ST_OK;
    if (!server_is_open(s, x)) return;
    CHECK(read_body(s, x, &object));
    CHECK(json_get_bool("request", object, "return_token_strs", &strings));
    CHECK(api_tokenize(&s->model, object, &ids));
    exchange_reply_json(x, 200,
                        json_pack("{s:i, s:i, s:o, s:o}", "count", ids.n, "max_model_len",
                                  s->model.max_context, "tokens", id_list(&ids), "token_strs",
                                  strings ? token_strings(s->tokenizer, &ids) : json_null()));
out:
    if (st != ST_OK) exchange_fail_status(x, st);
    token_list_release(&ids);
    json_decref(object);
}

void handle_detokenize(void *server, struct exchange *x)
{
    struct server *s = server;
    struct token_list ids = TOKEN_LIST_INIT;
    struct bytes text = BYTES_INIT;
    json_t *object = NULL;
    enum status st = ST_OK;
    CHECK(read_body(s, x, &object));
    CHECK(api_detokenize(&s->model, object, &ids));
    CHECK(tokenizer_decode(s->tokenizer, ids.ids, ids.n, false, &text));
    exchange_reply_json(x, 200,
                        json_pack("{s:o}", "prompt", json_stringn(bytes_text(&text), text.len)));
out:
    if (st != ST_OK) exchange_fail_status(x, st);
    token_list_release(&ids);
    bytes_release(&text);
    json_decref(object);
}

// Special tokens are strings, or objects that have one.
static json_t *plain_token(json_t *value)
{
    json_t *content = json_object_get(value, "content");
    return json_incref(json_is_string(content) ? content : value);
}

static enum status read_template(const char *folder, json_t *ret_info)
{
    struct bytes text = BYTES_INIT;
    char *path = path_join(folder, "chat_template.jinja");
    enum status st = path ? ST_OK : status_fail(ST_NO_MEMORY, "out of memory");
    if (st == ST_OK && file_exists(path)) {
        st = file_read(path, CONFIG_BYTES, &text);
        if (st == ST_OK)
            json_object_set_new(ret_info, "chat_template",
                                json_stringn(bytes_text(&text), text.len));
    }
    bytes_release(&text);
    free(path);
    return st;
}

// tokenizer_config.json, with special tokens as plain strings and the chat template of its own
// file.
static enum status read_info(const char *folder, json_t **ret)
{
    json_t *config = NULL, *info = json_object(), *value;
    char *path = path_join(folder, "tokenizer_config.json");
    const char *key;
    enum status st = ST_OK;
    if (!path || !info) {
        st = status_fail(ST_NO_MEMORY, "out of memory");
        goto out;
    }
    if (file_exists(path)) CHECK(json_read_file(path, CONFIG_BYTES, &config));
    json_object_set_new(info, "tokenizer_class", json_string("PreTrainedTokenizerFast"));
    json_object_foreach (config, key, value)
        if (strcmp(key, "vocab_file") != 0 && strcmp(key, "merges_file") != 0)
            json_object_set_new(info, key, plain_token(value));
    CHECK(read_template(folder, info));
    *ret = json_incref(info);
out:
    free(path);
    json_decref(config);
    json_decref(info);
    return st;
}

void handle_tokenizer_info(void *server, struct exchange *x)
{
    struct server *s = server;
    json_t *info = NULL;
    if (!s->tokenizer) {
        exchange_fail(x, 404, "not_found_error", "the model's folder has no tokenizer.json");
        return;
    }
    enum status st = read_info(s->model.folder, &info);
    if (st == ST_OK)
        exchange_reply_json(x, 200, info);
    else
        exchange_fail_status(x, st);
}
