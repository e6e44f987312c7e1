/* fuzz_request.c: any bytes as the body of each of the endpoints that generate, and of /tokenize
 * and /detokenize: refused in a sentence, or a request whose every number the engine may rely on.
 * The first byte picks the endpoint, and whether the model has a tokenizer and a chat template. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/api.h"
#include "common/base/json.h"
#include "tests/support/tiny_tokenizer.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct tokenizer *tokenizer;
static struct chat_template *chat;

static void make_tokenizer(void)
{
    json_t *json = NULL, *config = NULL;
    if (tiny_tokenizer_json(&json, &config) != ST_OK) abort();
    char *text = json_dumps(json, 0), *config_text = json_dumps(config, 0);
    const char *template_text = json_string_value(json_object_get(config, "chat_template"));
    const struct tokenizer_text files[TOKENIZER_FILES] = {{text, strlen(text)},
                                                          {config_text, strlen(config_text)}};
    if (tokenizer_parse("tokenizer.json", files, &tokenizer) != ST_OK) abort();
    if (chat_template_parse("tokenizer_config.json", template_text, strlen(template_text), NULL,
                            &chat) != ST_OK)
        abort();
    free(text);
    free(config_text);
    json_decref(json);
    json_decref(config);
}

static void check(const struct api_request *r, const struct api_model *model)
{
    int samples = 0;
    const struct sampling *s = &r->sampling;
    for (int i = 0; i < r->n_prompts; i++) {
        const struct api_prompt *p = &r->prompts[i];
        if (p->n_ids < 1 || p->n < 1 || p->n > API_MAX_N) abort();
        if (p->n_ids + s->max_tokens > model->max_context) abort();
        for (int k = 0; k < p->n_ids; k++)
            if (p->ids[k] < 0 || p->ids[k] >= model->vocab_size) abort();
        samples += p->n;
    }
    const struct tandem_choice *t = &s->tandem;
    if (t->on && (!(t->p >= 0 && t->p <= 1) || t->chunk < 1 || t->selector > TANDEM_WORD)) abort();
    if (r->n_prompts < 1 || samples != r->n_samples || s->max_tokens < 0) abort();
    if (!(s->temperature >= 0) || !(s->top_p > 0 && s->top_p <= 1) ||
        !(s->min_p >= 0 && s->min_p <= 1))
        abort();
    if (s->prompt_top < 0 || s->prompt_top > API_MAX_PROMPT_TOP) abort();
    for (int i = 0; i < s->n_logit_bias; i++)
        if (s->logit_bias[i].token < 0 || s->logit_bias[i].token >= model->vocab_size) abort();
    if (s->top_k < 0 || s->logprobs < -1 || s->logprobs > API_MAX_LOGPROBS) abort();
}

static void generate(enum api_kind kind, const struct api_model *model, const char *body,
                     size_t len)
{
    struct api_request *r = NULL;
    enum status st = api_request_parse(kind, model, body, len, &r);
    if (st == ST_OK)
        check(r, model);
    else if (r || !status_message()[0])
        abort();
    api_request_free(r);
}

static void tokenize(const struct api_model *model, const char *body, size_t len, bool back)
{
    struct token_list ids = TOKEN_LIST_INIT;
    json_t *object = NULL;
    bool strings;
    enum status st = api_read_object(body, len, false, &object);
    if (st == ST_OK)
        st = back ? api_detokenize(model, object, &ids)
                  : api_tokenize(model, object, &ids, &strings);
    if (st == ST_OK)
        for (int i = 0; i < ids.n; i++)
            if (ids.ids[i] < 0 || ids.ids[i] >= model->vocab_size) abort();
    token_list_release(&ids);
    json_decref(object);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!tokenizer) make_tokenizer();
    if (size < 1) return 0;
    bool text = (data[0] & 4) == 0;
    const struct api_model model = {.name = "model",
                                    .folder = "folder",
                                    .tokenizer = text ? tokenizer : NULL,
                                    .chat = text ? chat : NULL,
                                    .why_no_chat = "none",
                                    .vocab_size = 300,
                                    .max_context = 512,
                                    .temperature = 1,
                                    .top_p = 1};
    const char *body = (const char *)data + 1;
    // the first four as they always were, by two bits; others by bits that were free
    const int others = data[0] >> 6;
    if (others > 1)
        tokenize(&model, body, size - 1, others == 3);
    else
        generate((enum api_kind)(others ? API_INFERENCE + (data[0] & 3) % 3 : data[0] & 3), &model,
                 body, size - 1);
    return 0;
}
