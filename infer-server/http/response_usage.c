/* response_usage.c: what a response says of itself beside its choices: tokens used, the version of
 * the weights, drafts verified. Loop's thread. */
#include "infer-server/http/response.h"

static void put_counts(struct json_out *o, int64_t prompt, int64_t completion)
{
    json_out_int(o, "prompt_tokens", prompt);
    json_out_int(o, "completion_tokens", completion);
    json_out_int(o, "total_tokens", prompt + completion);
}

void put_usage(struct json_out *o, const struct response *a)
{
    int64_t prompt = 0, completion = 0, cached = 0;
    for (int i = 0; i < a->request->n_prompts; i++) prompt += a->request->prompts[i].n_ids;
    for (int i = 0; i < a->request->n_samples; i++) {
        completion += a->samples[i].n;
        if (a->samples[i].index == 0) cached += a->samples[i].telemetry.cached_prompt_tokens;
    }
    json_out_open(o, "usage", '{');
    put_counts(o, prompt, completion);
    json_out_open(o, "prompt_tokens_details", '{');
    json_out_int(o, "cached_tokens", cached);
    json_out_close(o, '}');
    json_out_close(o, '}');
}

void put_chunk_usage(struct json_out *o, const struct response *a,
                     const struct generation_sample *s)
{
    if (!s) {
        put_usage(o, a);
    } else if (a->request->continuous_usage) {
        json_out_open(o, "usage", '{');
        put_counts(o, a->request->prompts[s->prompt].n_ids, s->n);
        json_out_close(o, '}');
    } else if (a->request->include_usage) {
        json_out_null(o, "usage");
    }
}

void put_draft_counts(struct json_out *o, const struct draft_counts *c)
{
    json_out_int(o, "num_drafts", c->num_drafts);
    json_out_int(o, "num_draft_tokens", c->num_draft_tokens);
    json_out_int(o, "num_accepted_tokens", c->num_accepted_tokens);
    JSON_OUT_LIST(o, "num_accepted_tokens_per_pos", i, 0, c->draft_positions,
                  json_out_int(o, NULL, c->num_accepted_tokens_per_pos[i]));
    // null where nothing was drafted: 0 / 0 is no number
    json_out_real(o, "accept_rate", (double)c->num_accepted_tokens / (double)c->num_draft_tokens);
    json_out_real(o, "mean_acceptance_length",
                  1 + (double)c->num_accepted_tokens / (double)c->num_drafts);
}

void put_spec_decode(struct json_out *o, const struct draft_counts *c)
{
    if (c->num_drafts == 0) {
        json_out_null(o, "spec_decode");
        return;
    }
    json_out_open(o, "spec_decode", '{');
    put_draft_counts(o, c);
    json_out_open(o, "acceptance_histogram", '[');
    int64_t reached = c->num_drafts; // steps that accepted i drafts or more
    for (int i = 0; i <= c->draft_positions; i++) {
        const int64_t further = i < c->draft_positions ? c->num_accepted_tokens_per_pos[i] : 0;
        json_out_int(o, NULL, reached - further);
        reached = further;
    }
    json_out_close(o, ']');
    json_out_close(o, '}');
}

static uint64_t last_version(const struct generation_sample *s)
{
    if (s->n > 0) return s->tokens[s->n - 1].weight_version;
    return s->telemetry.weight_version_last; // of a prompt alone, once it has ended
}

static void put_version(struct json_out *o, uint64_t version)
{
    if (version)
        json_out_uint(o, "weight_version", version);
    else
        json_out_null(o, "weight_version"); // no token yet
}

void put_chunk_extras(struct json_out *o, const struct generation_sample *s)
{
    put_version(o, last_version(s));
    put_spec_decode(o, &s->telemetry.drafts);
}

uint64_t response_version(const struct response *a)
{
    uint64_t version = 0;
    for (int i = 0; i < a->request->n_samples; i++)
        if (last_version(&a->samples[i]) > version) version = last_version(&a->samples[i]);
    return version;
}

void put_extras(struct json_out *o, const struct response *a)
{
    struct draft_counts drafts = {0}; // of all choices
    for (int i = 0; i < a->request->n_samples; i++)
        draft_counts_add(&drafts, &a->samples[i].telemetry.drafts);
    put_version(o, response_version(a));
    put_spec_decode(o, &drafts);
}
