/* api_prompt.c: what a request is generated from, in each way that a client may write it, to token
 * ids. Any thread: it reads the model, which nobody changes. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/api_impl.h"
#include "common/base/json.h"
#include "common/base/rng.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

// Room for n prompts, which came in `field`.
static enum status make_prompts(struct api_request *r, size_t n, const char *field)
{
    if (n == 0) return status_fail(ST_INVALID, "request: \"%s\" is empty", field);
    if (n > API_MAX_PROMPTS)
        return status_fail(ST_INVALID, "request: \"%s\" has %zu entries; at most %d in one request",
                           field, n, API_MAX_PROMPTS);
    r->prompts = calloc(n, sizeof *r->prompts);
    if (!r->prompts) return status_fail(ST_NO_MEMORY, "out of memory");
    r->n_prompts = (int)n;
    for (int i = 0; i < r->n_prompts; i++) {
        r->prompts[i].n = r->sampling.n;
        r->prompts[i].seed = rng_seed_of(r->sampling.seed, i);
    }
    return ST_OK;
}

enum status api_read_ids(const json_t *array, const char *field, const struct api_model *model,
                         struct api_prompt *ret)
{
    if (!json_is_array(array))
        return status_fail(ST_INVALID, "request: \"%s\" must be an array of token ids", field);
    size_t n = json_array_size(array);
    if (n == 0)
        return status_fail(ST_INVALID, "request: \"%s\" is empty: give one token at least", field);
    if (n > INT_MAX / 8) return status_fail(ST_INVALID, "request: \"%s\" is too long", field);
    enum status st = ST_OK;
    int32_t *ids = malloc(n * sizeof *ids);
    if (!ids) return status_fail(ST_NO_MEMORY, "out of memory");
    for (size_t i = 0; i < n; i++) {
        const json_t *x = json_array_get(array, i);
        const json_int_t id = json_integer_value(x);
        if (!json_is_integer(x))
            FAIL(ST_INVALID, "request: \"%s\": entry %zu is not a whole number", field, i);
        if (id < 0 || id >= model->vocab_size)
            FAIL(ST_INVALID,
                 "request: \"%s\": entry %zu is token id %lld; this model's go from 0 to %d", field,
                 i, (long long)id, model->vocab_size - 1);
        ids[i] = (int32_t)id;
    }
    ret->ids = ids;
    ret->n_ids = (int)n;
    ids = NULL;
out:
    free(ids);
    return st;
}

enum status api_encode_text(const char *text, size_t len, bool add_special, const char *field,
                            const struct api_model *model, struct api_prompt *ret)
{
    if (!model->tokenizer)
        return status_fail(ST_INVALID,
                           "request: \"%s\" is text, but %s has no tokenizer.json; send token ids "
                           "(prompt_token_ids) instead",
                           field, model->folder);
    // a text that cannot fit is not worth the seconds that megabytes take
    size_t max = (size_t)model->max_context * tokenizer_max_token_bytes(model->tokenizer);
    if (max && len > max)
        return status_fail(ST_TOO_LONG,
                           "request: %s has %zu bytes. This model's maximum context length is "
                           "%d tokens, which hold %zu bytes at most: shorten the prompt",
                           field, len, model->max_context, max);
    struct token_list list = TOKEN_LIST_INIT;
    enum status st;
    CHECK(status_context(tokenizer_encode(model->tokenizer, text, len, add_special, &list),
                         "request: \"%s\"", field));
    if (list.n == 0) FAIL(ST_INVALID, "request: \"%s\" has no tokens: give some text", field);
    for (int i = 0; i < list.n; i++)
        if (list.ids[i] >= model->vocab_size)
            FAIL(
                ST_INVALID,
                "request: \"%s\" holds token id %d, which this model (%d embeddings) does not have",
                field, list.ids[i], model->vocab_size);
    ret->ids = list.ids;
    ret->n_ids = list.n;
    ret->tokenised = true;
    return ST_OK;
out:
    token_list_release(&list);
    return st;
}

// A prompt that is a string, which an echo and /generate give back.
static enum status read_text(const struct api_request *r, const json_t *value, const char *field,
                             const struct api_model *model, struct api_prompt *ret)
{
    const char *text = json_string_value(value);
    const size_t len = json_string_length(value);
    if (r->echo || r->kind == API_GENERATE) {
        ret->text = malloc(len + 1);
        if (!ret->text) return status_fail(ST_NO_MEMORY, "out of memory");
        memcpy(ret->text, text, len);
        ret->text_len = len;
    }
    return api_encode_text(text, len, r->given.add_special, field, model, ret);
}

enum status api_read_group_prompt(const struct api_given *given, const struct api_model *model,
                                  struct api_prompt *ret)
{
    const json_t *ids = given->prompt_ids, *prompt = given->prompt;
    if (!!ids + !!given->messages + !!prompt != 1)
        return status_fail(ST_INVALID, "request: \"groups\": give each group exactly one of "
                                       "prompt_token_ids, messages and prompt");
    if (given->messages) return api_read_messages(given, model, ret);
    enum status st = api_chat_refuse_fields(given);
    if (st != ST_OK) return st;
    if (ids) return api_read_ids(ids, "prompt_token_ids", model, ret);
    if (!json_is_string(prompt))
        return status_fail(
            ST_INVALID,
            "request: \"prompt\" of a group must be a string (token ids go into prompt_token_ids)");
    return api_encode_text(json_string_value(prompt), json_string_length(prompt),
                           given->add_special, "prompt", model, ret);
}

static enum status read_group(const json_t *group, int i, bool ignore_eos,
                              const struct api_model *model, struct api_prompt *ret)
{
    struct api_request own = {
        .sampling = {.n = ret->n, .seed = ret->seed, .ignore_eos = ignore_eos},
        .given = {.add_special = true, .generation_prompt = true}};
    const json_t **id = &own.given.group_id;
    enum status st;
    if (!json_is_object(group))
        return status_fail(ST_INVALID, "request: \"groups\": entry %d is not an object", i);
    CHECK(request_read(group, BODY_GROUP, model->unknown, &own));
    if (*id && !json_is_string(*id) && !json_is_integer(*id))
        FAIL(ST_INVALID, "request: \"id\" of group %d must be a string or a whole number", i);
    ret->group_id = *id ? json_deep_copy(*id) : json_integer(i);
    ret->n = own.sampling.n;
    ret->seed = own.sampling.seed;
    st = status_context(api_read_group_prompt(&own.given, model, ret), "group %d", i);
    if (st == ST_OK) st = status_context(set_constraint(&own, model), "group %d", i);
    ret->constraint = own.sampling.constraint;
out:
    json_decref(own.constraint);
    return st;
}

// By its id a group's samples are known, and ended.
static enum status check_id(const struct api_prompt *prompts, int i)
{
    char id[64] = ""; // as JSON
    json_dumpb(prompts[i].group_id, id, sizeof id - 1, JSON_ENCODE_ANY);
    for (int k = 0; k < i; k++)
        if (json_equal(prompts[k].group_id, prompts[i].group_id))
            return status_fail(ST_INVALID,
                               "request: \"id\" of groups %d and %d is %s (without one it is the "
                               "index): give each group its own",
                               k, i, id);
    return ST_OK;
}

enum status api_read_groups(struct api_request *r, const struct api_model *model)
{
    enum status st;
    const json_t *groups = r->given.groups;
    if (!json_is_array(groups))
        return status_fail(ST_INVALID, "request: \"groups\" must be an array of groups");
    CHECK(make_prompts(r, json_array_size(groups), "groups"));
    for (int i = 0; i < r->n_prompts; i++) {
        CHECK(read_group(json_array_get(groups, (size_t)i), i, r->sampling.ignore_eos, model,
                         &r->prompts[i]));
        CHECK(check_id(r->prompts, i));
    }
out:
    return st;
}

// "prompt" is a string, token ids, or an object as vLLM's TokensPrompt and TextPrompt; "prompts" is
// a list of any of them.
static enum status read_generate_prompt(const struct api_request *r, const json_t *value,
                                        const struct api_model *model, struct api_prompt *ret)
{
    struct api_request own = {.name = ""};
    if (json_is_object(value)) {
        enum status st = request_read(value, BODY_PROMPT, model->unknown, &own);
        if (st != ST_OK) return st;
        if (own.given.prompt_ids)
            return api_read_ids(own.given.prompt_ids, "prompt_token_ids", model, ret);
        value = own.given.prompt;
    }
    if (json_is_array(value)) return api_read_ids(value, "prompt", model, ret);
    if (json_is_string(value)) return read_text(r, value, "prompt", model, ret);
    return status_fail(ST_INVALID, "request: \"prompt\" must be a string, an array of token ids, "
                                   "or an object with prompt_token_ids or prompt");
}

enum status api_read_generate_prompts(struct api_request *r, const struct api_model *model)
{
    enum status st;
    const json_t *one = r->given.prompt, *many = r->given.prompts;
    if (!!one == !!many)
        return status_fail(ST_INVALID, "request: give exactly one of \"prompt\" and \"prompts\"");
    r->many_prompts = many != NULL;
    if (many && !json_is_array(many))
        return status_fail(ST_INVALID, "request: \"prompts\" must be an array");
    CHECK(make_prompts(r, many ? json_array_size(many) : 1, many ? "prompts" : "prompt"));
    for (int i = 0; i < r->n_prompts; i++)
        CHECK(read_generate_prompt(r, many ? json_array_get(many, (size_t)i) : one, model,
                                   &r->prompts[i]));
out:
    return st;
}

enum status api_read_chat_prompt(struct api_request *r, const struct api_model *model)
{
    enum status st = make_prompts(r, 1, "messages");
    if (st == ST_OK) st = api_read_messages(&r->given, model, &r->prompts[0]);
    return st == ST_OK ? api_set_tools(r, model) : st;
}

enum status api_read_inference_prompt(struct api_request *r, const struct api_model *model)
{
    enum status st = make_prompts(r, 1, "token_ids");
    return st == ST_OK ? api_read_ids(r->given.prompt_ids, "token_ids", model, &r->prompts[0]) : st;
}

// A string, an array of strings, an array of ids, or an array of arrays of ids.
enum status api_read_completion_prompts(struct api_request *r, const struct api_model *model)
{
    enum status st = ST_OK;
    const bool ids = r->given.prompt_ids != NULL;
    const char *field = ids ? "prompt_token_ids" : "prompt";
    const json_t *value = ids ? r->given.prompt_ids : r->given.prompt;
    if (r->given.best_of && r->given.best_of != r->sampling.n)
        return status_fail(ST_UNSUPPORTED, "request: \"best_of\" must be equal to n");
    if (!json_is_string(value) && !json_is_array(value))
        return status_fail(ST_INVALID,
                           "request: \"%s\" must be a string, an array of strings, an array of "
                           "token ids, or an array of arrays of token ids",
                           field);
    const bool alone = json_is_string(value) || json_is_integer(json_array_get(value, 0));
    CHECK(make_prompts(r, alone ? 1 : json_array_size(value), field));
    for (int i = 0; i < r->n_prompts; i++) {
        const json_t *one = alone ? value : json_array_get(value, (size_t)i);
        if (json_is_string(one))
            CHECK(read_text(r, one, field, model, &r->prompts[i]));
        else if (json_is_array(one))
            CHECK(api_read_ids(one, field, model, &r->prompts[i]));
        else
            return status_fail(
                ST_INVALID,
                "request: \"%s\": entry %d is neither a string nor an array of token ids", field,
                i);
    }
out:
    return st;
}
