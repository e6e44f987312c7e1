/* sample_request.c: requests of samples, as they are read and filled. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/serve/request.h"
#include "common/base/json.h"
#include "common/base/protobuf.h"

#include <math.h>
#include <stdlib.h>

#define MAX_SAMPLES 1024 // of one request
#define MAX_TOP     128

void sample_request_clear(struct sample_request *r)
{
    for (int i = 0; r->samples && i < r->n; i++) completion_release(&r->samples[i]);
    bytes_release(&r->scores);
    r->oldest = r->newest = 0;
    r->n_done = 0;
}

void sample_request_release(struct tinker_request *request)
{
    struct sample_request *r = (struct sample_request *)request;
    sample_request_clear(r);
    free(r->samples);
    token_list_release(&r->prompt);
    json_decref(r->group);
    json_decref(r->sampling);
    r->samples = NULL;
    r->group = r->sampling = NULL;
}

// ---- as it is asked for -------------------------------------------------------------------------

// Chunks of token ids become one list.
static enum status read_prompt(const json_t *body, int vocab, struct sample_request *r)
{
    const json_t *chunks = json_object_get(json_object_get(body, "prompt"), "chunks"), *chunk, *id;
    size_t i, k;
    json_array_foreach (chunks, i, chunk) {
        const json_t *tokens = json_object_get(chunk, "tokens");
        const char *type = json_string_value(json_object_get(chunk, "type"));
        if (!json_is_array(tokens))
            return status_fail(ST_UNSUPPORTED,
                               "\"prompt\": chunk %zu is of type \"%s\"; there is "
                               "\"encoded_text\" alone",
                               i, CUT(type ? type : "", 40));
        json_array_foreach (tokens, k, id) {
            const json_int_t token = json_integer_value(id);
            if (!json_is_integer(id) || token < 0 || token >= vocab)
                return status_fail(ST_INVALID,
                                   "\"prompt\": chunk %zu, token %zu is no token id from 0 to %d",
                                   i, k, vocab - 1);
            enum status st = token_list_push(&r->prompt, (int32_t)token);
            if (st != ST_OK) return st;
        }
    }
    return r->prompt.n ? ST_OK : status_fail(ST_INVALID, "\"prompt\" holds no tokens");
}

struct wanted {
    const json_t *params, *targets;
    int64_t n, top, sample_top, alternatives, max_tokens, top_k;
    double temperature, top_p;
    int64_t seed;
    bool stable, prompt_logprobs;
};
#define FIELDS_OF struct wanted
static const struct json_field request_fields[] = {
    FIELD_BOOL("record_stability_info", stable, false),
    FIELD_INT("topk_sample_logprobs", sample_top, 0, INT64_MAX, 0),
    FIELD_INT("prompt_alt_tokens_k", alternatives, 0, INT64_MAX, 0),
    FIELD_JSON("target_prompt_logprobs", targets),
    FIELD_INT("num_samples", n, 1, MAX_SAMPLES, 1),
    FIELD_INT("topk_prompt_logprobs", top, 0, MAX_TOP, 0),
    FIELD_BOOL("prompt_logprobs", prompt_logprobs, false),
    FIELD_JSON("sampling_params", params),
    {0},
};
static const struct json_field params_fields[] = {
    FIELD_INT("max_tokens", max_tokens, 1, INT32_MAX, 0),
    FIELD_INT("top_k", top_k, -1, INT32_MAX, -1),
    FIELD_REAL("temperature", temperature, 0, 100, 1),
    FIELD_REAL("top_p", top_p, 0, 1, 1),
    FIELD_INT("seed", seed, INT64_MIN, INT64_MAX, 0),
    {0},
};

static enum status set_sampling(const struct wanted *w, const struct trained_model_info *model,
                                struct sample_request *r)
{
    const int room = model->max_context - r->prompt.n;
    const int64_t max_tokens = w->max_tokens ? w->max_tokens : room > 1 ? room : 1;
    r->sampling =
        json_pack("{s:I, s:f, s:f, s:I}", "max_tokens", (json_int_t)max_tokens, "temperature",
                  w->temperature, "top_p", w->top_p, "top_k", (json_int_t)w->top_k);
    r->n = (int)w->n;
    r->group = json_pack("{s:i}", "n", r->n);
    if (!r->sampling || !r->group) return status_fail(ST_NO_MEMORY, "out of memory");
    if (json_has(w->params, "seed"))
        json_object_set_new(r->group, "seed", json_integer((json_int_t)w->seed));
    r->top = (int)w->top;
    r->prompt_logprobs = w->prompt_logprobs || r->top > 0;
    if (r->prompt_logprobs)
        json_object_set_new(r->sampling, "prompt_logprobs", json_integer(r->top));
    r->bounds = (struct completion_bounds){
        .vocab_size = model->limits.vocab, .max_tokens = (int)max_tokens, .newest = UINT64_MAX};
    // null: the model's own end of a sequence stops; texts stop beside it; ids stand for
    // themselves, and an empty list for nothing
    if (!json_has(w->params, "stop")) return ST_OK;
    json_t *stop = json_object_get(w->params, "stop");
    const bool ids = json_is_integer(json_array_get(stop, 0)),
               texts = !ids && (json_is_string(stop) || json_array_size(stop) > 0);
    if (!json_is_string(stop) && !json_is_array(stop))
        return status_fail(ST_INVALID, "\"stop\" must be a string, or a list of strings or ids");
    if (!texts) json_object_set_new(r->sampling, "ignore_eos", json_true());
    if (ids || texts) json_object_set(r->sampling, ids ? "stop_token_ids" : "stop", stop);
    return ST_OK;
}

enum status sample_request_parse(const json_t *body, const struct trained_model_info *model,
                                 struct sample_request *ret)
{
    struct sample_request *r = ret;
    struct wanted w;
    enum status st;
    CHECK(json_read_fields("request", body, request_fields, NULL, &w));
    // what the API has and this server has not
    if (w.stable && !loss_for(model->limits.loss_for, "stable_reinforce"))
        FAIL(ST_UNSUPPORTED, "\"record_stability_info\" is of stable_reinforce, whose formula is "
                             "not published: take loss_fn=importance_sampling, or cw-trainer serve "
                             "--loss-for stable_reinforce=importance_sampling");
    if (w.sample_top || w.alternatives)
        FAIL(ST_UNSUPPORTED, "\"%s\" is not there",
             w.sample_top ? "topk_sample_logprobs" : "prompt_alt_tokens_k");
    if (w.targets)
        FAIL(ST_UNSUPPORTED, "\"target_prompt_logprobs\" is not there; \"topk_prompt_logprobs\" "
                             "is, and forward with target_tokens (N, K)");
    CHECK(read_prompt(body, model->limits.vocab, r));
    if (w.params && !json_is_object(w.params))
        FAIL(ST_INVALID, "request: \"sampling_params\" must be an object");
    CHECK(json_read_fields("sampling_params", w.params, params_fields, NULL, &w));
    CHECK(set_sampling(&w, model, r));
    CHECK(json_get_int32("request", body, "prompt_logprobs_last_n", 1,
                         r->prompt.n > 1 ? r->prompt.n - 1 : 1, &r->last_n));
    r->samples = calloc((size_t)r->n, sizeof *r->samples);
    if (!r->samples) st = status_fail(ST_NO_MEMORY, "out of memory");
out:
    return st;
}

// ---- what comes back ----------------------------------------------------------------------------

static void note_version(struct sample_request *r, uint64_t version)
{
    if (r->oldest == 0 || version < r->oldest) r->oldest = version;
    if (version > r->newest) r->newest = version;
}

// Appends what the line has of the prompt: a log-probability of each token (NAN: none) and its
// likeliest tokens there, [null, [[id, logprob], ...], ...].
static enum status append_scores(const json_t *line, struct sample_request *r)
{
    const json_t *logprobs = json_object_get(line, "prompt_logprobs"),
                 *lists = json_object_get(line, "prompt_top_logprobs");
    const int unscored = r->last_n > 0 ? r->prompt.n - r->last_n : 0;
    struct bytes scores = BYTES_INIT, ids = BYTES_INIT, likeliest = BYTES_INIT, top = BYTES_INIT;
    for (int i = 0; i < r->prompt.n; i++) {
        const size_t index = i < unscored ? SIZE_MAX : (size_t)i; // of no entry
        const json_t *one = json_array_get(logprobs, index), *list = json_array_get(lists, index);
        const float logprob = json_is_number(one) ? (float)json_number_value(one) : NAN;
        bytes_append(&scores, &logprob, sizeof logprob);
        for (int k = 0; k < r->top; k++) {
            const json_t *pair = json_array_get(list, (size_t)k);
            const int32_t id = (int32_t)json_integer_value(json_array_get(pair, 0));
            const float of_id =
                pair ? (float)json_number_value(json_array_get(pair, 1)) : SAMPLE_NO_LOGPROB;
            bytes_append(&ids, &id, sizeof id);
            bytes_append(&likeliest, &of_id, sizeof of_id);
        }
    }
    proto_put_message(&r->scores, 2, &scores);
    if (r->top > 0) {
        proto_put_message(&top, 1, &ids);
        proto_put_message(&top, 2, &likeliest);
        proto_put_varint(&top, 3, (uint64_t)r->top);
        proto_put_varint(&top, 4, (uint64_t)r->prompt.n);
        proto_put_message(&r->scores, 3, &top);
    }
    return bytes_status(&r->scores);
}

enum status sample_request_read(struct sample_request *r, int i, const json_t *line)
{
    struct completion *sample = &r->samples[i];
    const json_t *version;
    size_t k;
    enum status st;
    CHECK(completion_read("/v1/rollouts", line, &r->bounds, sample));
    for (int t = 0; t < sample->n; t++) note_version(r, sample->versions[t]);
    r->cached_tokens =
        (int)json_integer_value(json_object_get(sample->telemetry, "cached_prompt_tokens"));
    if (!r->prompt_logprobs || r->scores.len) return ST_OK;
    json_array_foreach (json_object_get(line, "prompt_weight_versions"), k, version)
        if (json_is_integer(version)) // null: the first of a prompt
            note_version(r, (uint64_t)json_integer_value(version));
    st = append_scores(line, r);
out:
    return st;
}
