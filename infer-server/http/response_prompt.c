/* response_prompt.c: a prompt's log-probabilities, in the form of each endpoint. The first token has
 * none: null. Loop's thread. */
#include "infer-server/http/response.h"

#include <stdio.h>

struct scored { // a prompt whose log-probabilities are there
    const struct api_prompt *prompt;
    const struct prompt_token *tokens; // (prompt->n_ids)
    const struct top_logprob *top;     // (prompt->n_ids, stride)
    int stride, n_top;                 // n_top of them are wanted
};

static struct scored scored_of(const struct response *a, int prompt)
{
    const struct api_request *r = generation_request(a->generation);
    const struct generation_prompt *report = generation_prompt(a->generation, prompt);
    return (struct scored){.prompt = &r->prompts[prompt],
                           .tokens = report->tokens,
                           .top = report->top,
                           .stride = r->sampling.prompt_top,
                           .n_top = r->prompt_top};
}

static const struct top_logprob *top_of(const struct scored *s, int i)
{
    return s->top + (size_t)i * (size_t)s->stride;
}

// Calls put for the prompt's token at i, then for the likeliest ones, which it may be among.
typedef void (*put_entry_fn)(struct json_out *o, const struct response *a, int32_t token, int rank,
                             float logprob);
static void put_entries(struct json_out *o, const struct response *a, const struct scored *s, int i,
                        put_entry_fn put)
{
    const struct top_logprob *top = top_of(s, i);
    put(o, a, s->prompt->ids[i], s->tokens[i].rank, s->tokens[i].logprob);
    for (int j = 0; j < s->n_top; j++)
        if (top[j].token != s->prompt->ids[i]) put(o, a, top[j].token, j + 1, top[j].logprob);
}

static void put_named(struct json_out *o, const struct response *a, int32_t token, int rank,
                      float logprob)
{
    char key[16];
    struct bytes text = BYTES_INIT;
    snprintf(key, sizeof key, "%d", token);
    token_text(a->model, token, &text);
    json_out_key(o, key);
    json_out_open(o, '{');
    json_out_key(o, "logprob");
    json_out_logprob(o, logprob);
    json_out_key(o, "rank");
    json_out_int(o, rank);
    json_out_key(o, "decoded_token");
    json_out_string(o, bytes_text(&text), text.len);
    json_out_close(o, '}');
    bytes_release(&text);
}

void put_prompt_logprobs(struct json_out *o, const struct response *a, int prompt)
{
    const struct scored s = scored_of(a, prompt);
    json_out_key(o, "prompt_logprobs");
    json_out_open(o, '[');
    json_out_null(o);
    for (int i = 1; i < s.prompt->n_ids; i++) {
        json_out_open(o, '{');
        put_entries(o, a, &s, i, put_named);
        json_out_close(o, '}');
    }
    json_out_close(o, ']');
}

static void put_pair(struct json_out *o, const struct response *a, int32_t token, int rank,
                     float logprob)
{
    char key[16];
    (void)a, (void)rank;
    snprintf(key, sizeof key, "%d", token);
    json_out_open(o, '{');
    json_out_key(o, key);
    json_out_logprob(o, logprob);
    json_out_close(o, '}');
}

void put_prompt_pairs(struct json_out *o, const struct response *a, int prompt)
{
    const struct scored s = scored_of(a, prompt);
    json_out_open(o, '[');
    json_out_null(o);
    for (int i = 1; i < s.prompt->n_ids; i++) {
        json_out_open(o, '[');
        put_entries(o, a, &s, i, put_pair);
        json_out_close(o, ']');
    }
    json_out_close(o, ']');
}

void put_prompt_lists(struct json_out *o, const struct response *a, int prompt)
{
    const struct scored s = scored_of(a, prompt);
    json_out_key(o, "prompt_logprobs");
    json_out_open(o, '[');
    json_out_null(o);
    for (int i = 1; i < s.prompt->n_ids; i++) json_out_logprob(o, s.tokens[i].logprob);
    json_out_close(o, ']');
    json_out_key(o, "prompt_weight_versions");
    json_out_open(o, '[');
    json_out_null(o);
    for (int i = 1; i < s.prompt->n_ids; i++) json_out_uint(o, s.tokens[i].weight_version);
    json_out_close(o, ']');
    if (s.n_top == 0) return;
    json_out_key(o, "prompt_top_logprobs");
    json_out_open(o, '[');
    json_out_null(o);
    for (int i = 1; i < s.prompt->n_ids; i++) {
        json_out_open(o, '[');
        for (int j = 0; j < s.n_top; j++) {
            json_out_open(o, '[');
            json_out_int(o, top_of(&s, i)[j].token);
            json_out_logprob(o, top_of(&s, i)[j].logprob);
            json_out_close(o, ']');
        }
        json_out_close(o, ']');
    }
    json_out_close(o, ']');
}
