/* rollout.c: POST /v1/rollouts and its NDJSON answer (docs/protocol.md). The trainer's thread.
 *
 * Lines come in the order in which samples finish; each is put at its place (group_id, sample),
 * which must be free. After the last line every place must be taken. Whatever a line says that
 * could make the loss wrong without anybody noticing (an id outside the vocabulary, a
 * log-probability above 0, a version the weights never had, lists of different lengths) ends the
 * run with a sentence.
 */
#include "trainer/rollout/rollout.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BUSY_RETRY_MS 200
#define MODELS_MS     10000

struct intake { // what the line function works on
    const struct rollout_source *source;
    const struct sampling_options *sampling;
    struct rollout *rollout;
    int n_taken;
    uint64_t version; // no token may be of a newer one
    uint64_t oldest;  // ... nor of an older one
};

static void sample_release(struct completion *s)
{
    free(s->ids);
    free(s->logprobs);
    free(s->versions);
    free(s->text);
    free(s->accepted);
    free(s->text_offset);
    json_decref(s->telemetry);
    *s = (struct completion){0};
}

void rollout_free(struct rollout *r)
{
    if (!r) return;
    if (r->samples)
        for (int i = 0; i < r->n_groups * r->n_per_group; i++) sample_release(&r->samples[i]);
    free(r->samples);
    free(r->examples);
    free(r);
}

// ---- request ------------------------------------------------------------------------------------

static json_t *request_group(const struct example *e, int id, int n)
{
    json_t *ids = json_array();
    if (!ids) return NULL;
    for (int i = 0; i < e->prompt_ids.n; i++)
        if (json_array_append_new(ids, json_integer(e->prompt_ids.ids[i]))) {
            json_decref(ids);
            return NULL;
        }
    return json_pack("{s:i, s:o, s:i}", "id", id, "prompt_token_ids", ids, "n", n);
}

static enum status build_request(const struct example *const *examples, int n_groups, int n,
                                 const struct sampling_options *s, json_t **ret)
{
    json_t *groups = json_array();
    bool failed = !groups;
    for (int g = 0; !failed && g < n_groups; g++)
        failed = json_array_append_new(groups, request_group(examples[g], g, n));
    json_t *request =
        failed ? NULL
               : json_pack("{s:O, s:{s:f, s:f, s:f, s:i, s:i, s:I, s:b, s:s*}}", "groups", groups,
                           "sampling", "temperature", s->temperature, "top_p", s->top_p, "min_p",
                           s->min_p, "top_k", s->top_k, "max_tokens", s->max_tokens, "seed",
                           (json_int_t)(s->seed & INT64_MAX), "ignore_eos", s->ignore_eos, "stop",
                           s->stop);
    json_decref(groups);
    if (!request) return status_fail(ST_NO_MEMORY, "no memory for a rollout request");
    *ret = request;
    return ST_OK;
}

// ---- answer -------------------------------------------------------------------------------------

static enum status read_list(const char *where, const json_t *line, const char *key, int n,
                             const json_t **ret)
{
    const json_t *list = json_object_get(line, key);
    if (!json_is_array(list))
        return status_fail(ST_FORMAT, "%s: field \"%s\" is not a list", where, key);
    if (n >= 0 && json_array_size(list) != (size_t)n)
        return status_fail(ST_FORMAT, "%s: field \"%s\" has %zu entries for %d tokens", where, key,
                           json_array_size(list), n);
    *ret = list;
    return ST_OK;
}

static enum status read_tokens(const char *where, const struct intake *in, const json_t *line,
                               struct completion *s)
{
    enum status st;
    const json_t *ids = NULL, *logprobs = NULL, *versions = NULL;
    CHECK(read_list(where, line, "token_ids", -1, &ids));
    if (json_array_size(ids) > (size_t)in->sampling->max_tokens) {
        st = status_fail(ST_MISMATCH, "%s: %zu tokens where at most %d were asked for", where,
                         json_array_size(ids), in->sampling->max_tokens);
        goto out;
    }
    s->n = (int)json_array_size(ids);
    CHECK(read_list(where, line, "logprobs", s->n, &logprobs));
    CHECK(read_list(where, line, "weight_versions", s->n, &versions));
    size_t room = s->n ? (size_t)s->n : 1;
    s->ids = malloc(room * sizeof *s->ids);
    s->logprobs = malloc(room * sizeof *s->logprobs);
    s->versions = malloc(room * sizeof *s->versions);
    if (!s->ids || !s->logprobs || !s->versions) {
        st = status_fail(ST_NO_MEMORY, "%s: no memory", where);
        goto out;
    }
    for (int t = 0; t < s->n; t++) {
        const json_t *id = json_array_get(ids, (size_t)t);
        const json_t *logprob = json_array_get(logprobs, (size_t)t);
        const json_t *version = json_array_get(versions, (size_t)t);
        json_int_t i = json_is_integer(id) ? json_integer_value(id) : -1;
        json_int_t v = json_is_integer(version) ? json_integer_value(version) : -1;
        double p = json_is_number(logprob) ? json_number_value(logprob) : NAN;
        if (i < 0 || i >= in->source->vocab_size) {
            st = status_fail(ST_MISMATCH, "%s: token %d is not an id below the vocabulary's %d",
                             where, t, in->source->vocab_size);
            goto out;
        }
        if (!(p <= 1e-3) || !isfinite(p)) { // rounding may lift a certainty a little above 0
            st = status_fail(ST_FORMAT, "%s: log-probability of token %d is %g", where, t, p);
            goto out;
        }
        if (v < 2 || v % 2 || (uint64_t)v > in->version || (uint64_t)v < in->oldest) {
            st = status_fail(ST_MISMATCH,
                             "%s: token %d claims weight version %" JSON_INTEGER_FORMAT
                             ", the weights are at %" PRIu64 " and were at %" PRIu64
                             " when it was asked for",
                             where, t, v, in->version, in->oldest);
            goto out;
        }
        s->ids[t] = (int32_t)i;
        s->logprobs[t] = (float)p;
        s->versions[t] = (uint64_t)v;
    }
out:
    return st;
}

// Entry t of a list of whole numbers from 0 to `max`.
static enum status read_count(const char *where, const json_t *list, const char *key, int t,
                              json_int_t max, json_int_t *ret)
{
    const json_t *entry = json_array_get(list, (size_t)t);
    json_int_t count = json_is_integer(entry) ? json_integer_value(entry) : -1;
    if (count < 0 || count > max)
        return status_fail(ST_FORMAT,
                           "%s: field \"%s\": entry %d is not a whole number from 0 to "
                           "%" JSON_INTEGER_FORMAT,
                           where, key, t, max);
    *ret = count;
    return ST_OK;
}

// For people only, nothing is computed from them; a daemon may leave them out.
static enum status read_accepted(const char *where, const json_t *line, struct completion *s)
{
    enum status st = ST_OK;
    const json_t *accepted = NULL, *offsets = NULL;
    size_t room = s->n ? (size_t)s->n : 1;
    json_int_t count;
    if (json_has(line, "accepted")) CHECK(read_list(where, line, "accepted", s->n, &accepted));
    if (json_has(line, "text_offset")) CHECK(read_list(where, line, "text_offset", s->n, &offsets));
    if ((accepted && !(s->accepted = malloc(room * sizeof *s->accepted))) ||
        (offsets && !(s->text_offset = malloc(room * sizeof *s->text_offset)))) {
        st = status_fail(ST_NO_MEMORY, "%s: no memory", where);
        goto out;
    }
    for (int t = 0; accepted && t < s->n; t++) {
        CHECK(read_count(where, accepted, "accepted", t, UINT8_MAX, &count));
        s->accepted[t] = (uint8_t)count;
    }
    for (int t = 0; offsets && t < s->n; t++) {
        CHECK(read_count(where, offsets, "text_offset", t, INT32_MAX, &count));
        s->text_offset[t] = (int32_t)count;
    }
out:
    return st;
}

// A copy in which a sampled U+0000 is its symbol, U+2400: scorers, plug-ins and logs take text that
// ends at a NUL, and must see what follows one. NULL: no memory.
static char *text_of(const json_t *value)
{
    const char *text = json_is_string(value) ? json_string_value(value) : "";
    size_t len = json_is_string(value) ? json_string_length(value) : 0;
    struct bytes copy = BYTES_INIT;
    bytes_puts(&copy, "");
    for (size_t i = 0; i < len; i++) {
        if (text[i])
            bytes_append(&copy, text + i, 1);
        else
            bytes_puts(&copy, "\xe2\x90\x80");
    }
    if (copy.failed) bytes_release(&copy);
    return copy.data;
}

static enum status read_sample(const char *where, const struct intake *in, const json_t *line,
                               struct completion *ret)
{
    struct completion s = {0};
    const char *finish = "";
    enum status st;
    CHECK(json_get_string(where, line, "finish_reason", &finish));
    if (strcmp(finish, "stop") != 0 && strcmp(finish, "length") != 0) {
        st = status_fail(ST_FORMAT,
                         "%s: field \"finish_reason\" is \"%s\", not \"stop\" or "
                         "\"length\"",
                         where, finish);
        goto out;
    }
    s.truncated = strcmp(finish, "length") == 0;
    CHECK(read_tokens(where, in, line, &s));
    CHECK(read_accepted(where, line, &s));
    s.text = text_of(json_object_get(line, "text"));
    if (!s.text) {
        st = status_fail(ST_NO_MEMORY, "%s: no memory", where);
        goto out;
    }
    s.telemetry = json_incref(json_object_get(line, "telemetry"));
    *ret = s;
out:
    if (st != ST_OK) sample_release(&s);
    return st;
}

static enum status take_line(void *context, const char *text, size_t len)
{
    struct intake *in = context;
    struct rollout *r = in->rollout;
    enum status st = ST_OK;
    json_t *line = NULL;
    char where[80] = "answer to /v1/rollouts";
    const char *message = NULL;
    int group = -1, sample = -1;
    if (len == 0) return ST_OK;
    in->version = control_version(in->source->control); // another process may be publishing
    CHECK(json_parse(where, text, len, &line));
    if (json_has(line, "error")) {
        json_get_string(where, json_object_get(line, "error"), "message", &message);
        st = status_fail(ST_IO, "the daemon could not finish the rollouts: %s",
                         message ? message : "it gives no reason");
        goto out;
    }
    CHECK(json_get_int32(where, line, "group_id", 0, r->n_groups - 1, &group));
    CHECK(json_get_int32(where, line, "sample", 0, r->n_per_group - 1, &sample));
    if (group < 0 || sample < 0) {
        st = status_fail(ST_FORMAT, "%s: a line without \"group_id\" or \"sample\"", where);
        goto out;
    }
    snprintf(where, sizeof where, "answer to /v1/rollouts, group %d sample %d", group, sample);
    struct completion *s = &r->samples[group * r->n_per_group + sample];
    if (s->text) {
        st = status_fail(ST_MISMATCH, "%s: came twice", where);
        goto out;
    }
    CHECK(read_sample(where, in, line, s));
    in->n_taken++;
    r->n_tokens += s->n;
out:
    json_decref(line);
    return st;
}

static enum status still_alive(void *context)
{
    struct intake *in = context;
    return control_owner_alive(in->source->control);
}

static enum status post(struct intake *in, const json_t *request)
{
    int64_t deadline = clock_deadline_ns(in->source->timeout_ms);
    for (;;) {
        enum status st =
            http_post_lines(in->source->http, "/v1/rollouts", request, in->source->timeout_ms,
                            in->source->idle_timeout_ms, take_line, still_alive, in);
        // Busy comes instead of an answer, never within one.
        if (st != ST_BUSY || in->n_taken || clock_ms_until(deadline) <= BUSY_RETRY_MS) return st;
        log_debug("POST /v1/rollouts: %s; it is asked again in %d ms", status_message(),
                  BUSY_RETRY_MS);
        clock_sleep_ms(BUSY_RETRY_MS);
    }
}

enum status rollout_pull(const struct rollout_source *source, const struct example *const *examples,
                         int n_groups, int n_per_group, const struct sampling_options *sampling,
                         struct rollout **ret)
{
    enum status st = ST_OK;
    json_t *request = NULL;
    struct rollout *r = calloc(1, sizeof *r);
    // Even: an update that is being written just now may take some tokens of the weights before it.
    struct intake in = {.source = source,
                        .sampling = sampling,
                        .rollout = r,
                        .oldest = control_version(source->control) & ~(uint64_t)1};
    int64_t start = clock_now_ns();
    int wanted = n_groups * n_per_group;
    if (!r || !(r->samples = calloc((size_t)wanted, sizeof *r->samples)) ||
        !(r->examples = calloc((size_t)n_groups, sizeof(struct example *)))) {
        st = status_fail(ST_NO_MEMORY, "no memory for %d samples", wanted);
        goto out;
    }
    r->n_groups = n_groups;
    r->n_per_group = n_per_group;
    for (int g = 0; g < n_groups; g++) r->examples[g] = examples[g];
    CHECK(build_request(examples, n_groups, n_per_group, sampling, &request));
    CHECK(post(&in, request));
    if (in.n_taken != wanted) {
        st = status_fail(ST_FORMAT, "answer to /v1/rollouts: %d samples of the %d asked for",
                         in.n_taken, wanted);
        goto out;
    }
    r->seconds = clock_ms_since(start) / 1e3;
    log_debug("POST /v1/rollouts: %d x %d samples, %ld tokens in %.3f s", n_groups, n_per_group,
              r->n_tokens, r->seconds);
    *ret = r;
out:
    json_decref(request);
    if (st != ST_OK) rollout_free(r);
    return st;
}

// ---- the daemon's context -----------------------------------------------------------------------

enum status rollout_check_context(const struct rollout_source *source, const struct dataset *data,
                                  int64_t limit, int64_t max_completion_length)
{
    json_t *models;
    int64_t n = limit > 0 && limit < data->n ? limit : data->n;
    int longest = 0;
    enum status st = http_get_json(source->http, "/v1/models", MODELS_MS, &models);
    if (st != ST_OK) return st;
    const json_t *model = json_array_get(json_object_get(models, "data"), 0);
    int64_t context = json_integer_value(json_object_get(model, "max_model_len"));
    json_decref(models);
    for (int64_t i = 0; i < n; i++)
        if (data->examples[i].prompt_ids.n > longest) longest = data->examples[i].prompt_ids.n;
    if (longest + max_completion_length <= context) return ST_OK;
    return status_fail(ST_INVALID,
                       "%s: the longest prompt (%d tokens) and --max-completion-length %" PRId64
                       " are over the %" PRId64 " tokens of context that the daemon serves; lower "
                       "it or --max-prompt-length, or start cw-infer-server with a larger "
                       "--max-context",
                       data->path, longest, max_completion_length, context);
}
