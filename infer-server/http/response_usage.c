/* response_usage.c: what a response says of itself beside its choices: tokens used, the version of
 * the weights, drafts verified. Loop's thread. */
#include "infer-server/http/response.h"

static void put_counts(struct json_out *o, int64_t prompt, int64_t completion)
{
    json_out_key(o, "prompt_tokens");
    json_out_int(o, prompt);
    json_out_key(o, "completion_tokens");
    json_out_int(o, completion);
    json_out_key(o, "total_tokens");
    json_out_int(o, prompt + completion);
}

void put_usage(struct json_out *o, const struct response *a)
{
    const struct api_request *r = generation_request(a->generation);
    const struct generation_sample *samples = generation_samples(a->generation);
    int64_t prompt = 0, completion = 0, cached = 0;
    for (int i = 0; i < r->n_prompts; i++) prompt += r->prompts[i].n_ids;
    for (int i = 0; i < r->n_samples; i++) {
        completion += samples[i].n;
        if (samples[i].index == 0) cached += samples[i].telemetry.cached_prompt_tokens;
    }
    json_out_key(o, "usage");
    json_out_open(o, '{');
    put_counts(o, prompt, completion);
    json_out_key(o, "prompt_tokens_details");
    json_out_open(o, '{');
    json_out_key(o, "cached_tokens");
    json_out_int(o, cached);
    json_out_close(o, '}');
    json_out_close(o, '}');
}

void put_chunk_usage(struct json_out *o, const struct response *a, const struct generation_sample *s)
{
    const struct api_request *r = generation_request(a->generation);
    if (!s) {
        put_usage(o, a);
    } else if (r->continuous_usage) {
        json_out_key(o, "usage");
        json_out_open(o, '{');
        put_counts(o, r->prompts[s->prompt].n_ids, s->n);
        json_out_close(o, '}');
    } else if (r->include_usage) {
        json_out_key(o, "usage");
        json_out_null(o);
    }
}

static void put_version_and_drafts(struct json_out *o, uint64_t version,
                                   const struct sample_telemetry *drafts)
{
    json_out_key(o, "weight_version");
    if (version)
        json_out_uint(o, version);
    else
        json_out_null(o); // no token yet
    json_out_key(o, "spec_decode");
    put_spec_decode(o, drafts);
}

static uint64_t last_version(const struct generation_sample *s)
{
    if (s->n > 0) return s->tokens[s->n - 1].weight_version;
    return s->telemetry.weight_version_last; // of a prompt alone, once it has ended
}

static void add_drafts(struct sample_telemetry *sum, const struct sample_telemetry *t)
{
    sum->num_drafts += t->num_drafts;
    sum->num_draft_tokens += t->num_draft_tokens;
    sum->num_accepted_tokens += t->num_accepted_tokens;
    if (t->draft_positions > sum->draft_positions) sum->draft_positions = t->draft_positions;
    for (int i = 0; i < SPECULATIVE_MOST; i++)
        sum->num_accepted_tokens_per_pos[i] += t->num_accepted_tokens_per_pos[i];
}

void put_chunk_extras(struct json_out *o, const struct generation_sample *s)
{
    put_version_and_drafts(o, last_version(s), &s->telemetry);
}

void put_extras(struct json_out *o, const struct response *a)
{
    const struct generation_sample *samples = generation_samples(a->generation);
    struct sample_telemetry drafts = {0}; // of all choices
    uint64_t version = 0;
    for (int i = 0; i < generation_request(a->generation)->n_samples; i++) {
        if (last_version(&samples[i]) > version) version = last_version(&samples[i]);
        add_drafts(&drafts, &samples[i].telemetry);
    }
    put_version_and_drafts(o, version, &drafts);
}
