/* atropos.c: the source whose samples are what Atropos' environments put into its API server
 * (--atropos). The main thread.
 *
 * Environments have the trained server generate (its /generate and /v1 endpoints), score groups of
 * sequences themselves, and hand them to the API; the trainer registers there once and polls for
 * batches. Which weights sampled a token is told by nobody, so a sequence has no versions: the
 * sampler's log-probabilities that come with it are what says how far it is off the policy. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/rollout/source.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/json.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ASK_MS  60000 // a batch may be large
#define POLL_MS 250

struct atropos {
    struct source source;
    struct atropos_options options;
    const struct rollout_servers *via; // that environments may ask, and evaluations do
};

// body: of a POST; NULL: a GET.
static enum status ask(const struct atropos *a, const char *path, const json_t *body, json_t **ret)
{
    const struct http_call call = {
        .server = a->options.url, .path = path, .body = body, .timeout_ms = ASK_MS};
    return http_perform_json(a->via->http, &call, ret);
}

// ---- registering --------------------------------------------------------------------------------

// Its sizes must be ours: an API that a trainer registered with before keeps that one's.
static enum status check_info(const struct atropos *a, bool registered)
{
    const struct {
        const char *key;
        int64_t ours;
    } sizes[] = {{"batch_size", a->options.batch_size},
                 {"max_token_len", a->options.bounds.max_tokens}};
    enum status st;
    json_t *info = NULL;
    CHECK(ask(a, "/info", NULL, &info));
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int64_t theirs = INT64_MIN;
        CHECK(json_get_int("/info", info, sizes[i].key, -1, INT64_MAX, &theirs));
        if (theirs == INT64_MIN)
            FAIL(ST_FORMAT, "/info has no \"%s\": is this Atropos' run-api?", sizes[i].key);
        if (theirs == sizes[i].ours || (theirs == -1 && !registered)) continue;
        FAIL(ST_MISMATCH,
             "its %s is %" PRId64 ", of a trainer that registered before, and this run's is "
             "%" PRId64 "; begin anew with GET /reset_data, or take that one",
             sizes[i].key, theirs, sizes[i].ours);
    }
out:
    json_decref(info);
    return st;
}

static enum status register_run(const struct atropos *a)
{
    const struct atropos_options *o = &a->options;
    enum status st;
    char checkpoints[PATH_ROOM];
    json_t *body = NULL, *response = NULL;
    CHECK(path_put(checkpoints, o->run_folder, "checkpoints"));
    body = json_pack("{s:s, s:s, s:I, s:I, s:s, s:I, s:I, s:I}", "wandb_group", o->run_folder,
                     "wandb_project", "commonweight", "batch_size", (json_int_t)o->batch_size,
                     "max_token_len", (json_int_t)o->bounds.max_tokens, "checkpoint_dir",
                     checkpoints, "save_checkpoint_interval",
                     (json_int_t)(o->save_steps > 0 ? o->save_steps : o->total_steps),
                     "starting_step", (json_int_t)o->step, "num_steps", (json_int_t)o->total_steps);
    if (!body)
        FAIL(ST_INVALID, "%s: it cannot be registered: its name is not UTF-8", o->run_folder);
    CHECK(ask(a, "/register", body, &response));
    if (!json_is_number(json_object_get(response, "uuid")))
        FAIL(ST_FORMAT, "/register: the response has no \"uuid\"");
out:
    json_decref(response);
    json_decref(body);
    return st;
}

// ---- batches ------------------------------------------------------------------------------------

static enum status wait_for_batch(const struct atropos *a, json_t **ret)
{
    const int64_t deadline = clock_deadline_ns(a->via->timeout_ms);
    json_t *response = NULL, *batch;
    enum status st;
    for (;; clock_sleep_ms(POLL_MS)) {
        json_decref(response);
        response = NULL;
        CHECK(ask(a, "/batch", NULL, &response));
        const char *status = json_string_value(json_object_get(response, "status"));
        if (status && strcmp(status, "error") == 0)
            FAIL(ST_PEER_GONE,
                 "/batch: %s (it was started anew, or its data reset; --resume registers again)",
                 json_string_value(json_object_get(response, "message")));
        if (!(batch = json_object_get(response, "batch")))
            FAIL(ST_FORMAT, "/batch: the response has no \"batch\"");
        if (!json_is_null(batch)) break;
        if (*a->options.stopped)
            FAIL(ST_CANCELLED, "the run was to end while it waited for environments");
        if (clock_ms_until(deadline) == 0)
            FAIL(ST_TIMEOUT,
                 "no batch of %" PRId64 " sequences came within %.0f s (--rollout-timeout): are "
                 "environments running?",
                 a->options.batch_size, a->via->timeout_ms / 1e3);
    }
    *ret = json_incref(batch);
out:
    json_decref(response);
    return st;
}

// Rank 0 asks, and the others have the same text of it: all learn from the batch as it divides its
// groups. An end that was asked for is rank 0's to see, and all ranks'.
static enum status agree_on_batch(const struct atropos *a, json_t **batch)
{
    struct comm *comm = a->via->comm;
    enum status st = ST_OK;
    struct bytes text = BYTES_INIT;
    if (comm_rank(comm) == 0) st = wait_for_batch(a, batch);
    if (!comm || (st != ST_OK && st != ST_CANCELLED)) return st;
    if (*batch) CHECK(json_put_line(&text, json_incref(*batch), 0));
    CHECK(rollout_broadcast(comm, 0, &text));
    if (text.len == 0) FAIL(ST_CANCELLED, "the run was to end while it waited for environments");
    if (!*batch) st = json_parse("rank 0's batch", text.data, text.len, batch);
out:
    bytes_release(&text);
    return st;
}

static enum status pull_batch(struct source *source, struct rollout_step *s)
{
    const struct atropos *a = (struct atropos *)source;
    const int64_t start = clock_now_ns();
    struct rollout *rollout = NULL;
    json_t *batch = NULL;
    enum status st;
    CHECK(agree_on_batch(a, &batch));
    scores_release(&s->scores);
    CHECK(atropos_read_batch("/batch", batch, &a->options.bounds, &rollout, &s->scores));
    if (s->scores.n > a->options.batch_size)
        FAIL(ST_MISMATCH, "/batch: %d sequences, and %" PRId64 " were registered", s->scores.n,
             a->options.batch_size);
    rollout_is_everywhere(rollout);
    rollout_free(s->rollout);
    s->rollout = TAKE_PTR(rollout);
    s->rollout->seconds = clock_ms_since(start) / 1e3;
    s->scored = true;
out:
    rollout_free(rollout);
    json_decref(batch);
    return status_context(st, "--atropos %s", a->options.url);
}

// ---- the source ---------------------------------------------------------------------------------

enum status atropos_new(const struct atropos_options *options, const struct rollout_servers *via,
                        struct source *servers, struct source **ret)
{
    enum status st = ST_OK;
    struct atropos *a = calloc(1, sizeof *a);
    if (!a) return status_fail(ST_NO_MEMORY, "no memory for a source of samples");
    *a = (struct atropos){{.pull = pull_batch, .on = servers, .own_prompts = true}, *options, via};
    if (comm_rank(via->comm) == 0) {
        CHECK(check_info(a, false));
        CHECK(register_run(a));
        CHECK(check_info(a, true));
    }
    *ret = &a->source;
    a = NULL;
out:
    free(a);
    return status_context(st, "--atropos %s", options->url);
}

// ---- one response of GET /batch -----------------------------------------------------------------

#define NOT_TRAINED (-100) // in "masks": torch's ignore_index

struct reader {
    const char *where;
    const struct atropos_bounds *bounds;
    int n_groups;            // of the environments
    int *first;              // (n_groups + 1) sequence of each
    struct rollout *rollout; // a group a sequence, until all are read
    struct scores scores;
    bool *flat; // (sequences) set_advantage_to_zero
    // what is read
    const json_t *group;
    int sequence, number; // of its group's; of all
};

// BaseEnv sends [] of what no sequence has.
static bool is_given(const struct reader *r, const char *field)
{
    const json_t *value = json_object_get(r->group, field);
    return json_has(r->group, field) && !(json_is_array(value) && json_array_size(value) == 0);
}

// Entry i of a field of lists with one a sequence; NULL where the field is null or missing.
static enum status list_of(const struct reader *r, const char *field, const json_t **ret)
{
    const json_t *all = json_object_get(r->group, field);
    const json_t *list = json_array_get(all, (size_t)r->sequence);
    *ret = NULL;
    if (!is_given(r, field)) return ST_OK;
    if (!json_is_array(list))
        return status_fail(ST_FORMAT, "field \"%s\" has no list for it", field);
    *ret = list;
    return ST_OK;
}

// Of n tokens; NULL where there are none.
static enum status numbers_of(const struct reader *r, const struct number_list *how, int n,
                              void *ret)
{
    const json_t *list;
    enum status st = list_of(r, how->key, &list);
    return st == ST_OK && list ? json_read_numbers(list, how, n, ret) : st;
}

static enum status floats_of(const struct reader *r, const char *field, int n, float **ret)
{
    const struct number_list how = {field,   NUMBER_F32, -FLT_MAX,
                                    FLT_MAX, ST_FORMAT,  "is not a number"};
    return numbers_of(r, &how, n, ret);
}

// ---- a sequence ---------------------------------------------------------------------------------

static enum status read_tokens(const struct reader *r, struct completion *c)
{
    const double last = r->bounds->vocab_size - 1;
    const struct number_list ids = {
        "tokens", NUMBER_I32, 0, last, ST_MISMATCH, "is not an id below the vocabulary's size"};
    const struct number_list masks = {"masks", NUMBER_I32, NOT_TRAINED,
                                      last,    ST_FORMAT,  "is neither -100 nor its token"};
    const json_t *tokens;
    int32_t *labels = NULL;
    enum status st;
    CHECK(list_of(r, ids.key, &tokens));
    c->n = (int)json_array_size(tokens);
    if (c->n > r->bounds->max_tokens)
        FAIL(ST_TOO_LONG, "%d tokens, over the %d that were registered as max_token_len", c->n,
             r->bounds->max_tokens);
    CHECK(numbers_of(r, &ids, c->n, &c->ids));
    CHECK(numbers_of(r, &masks, c->n, &labels));
    if (!c->ids || !labels) FAIL(ST_FORMAT, "\"tokens\" and \"masks\" must be there");
    if (!(c->authors = malloc((size_t)c->n + 1)))
        FAIL(ST_NO_MEMORY, "no memory for %d tokens", c->n);
    for (int t = 0; t < c->n; t++) {
        c->authors[t] = labels[t] == NOT_TRAINED ? AUTHOR_OTHER : AUTHOR_POLICY;
        if (c->authors[t] == AUTHOR_POLICY && labels[t] != c->ids[t])
            FAIL(ST_FORMAT, "field \"masks\": entry %d is neither -100 nor its token", t);
    }
    if (c->n == 0 || c->authors[0] == AUTHOR_POLICY)
        FAIL(ST_FORMAT, "field \"masks\": its first token is trained, and nothing comes before it");
out:
    free(labels);
    return st;
}

// The first of these that names one: the sequence's own overrides, how its group was generated, its
// group's overrides.
static enum status check_temperature(const struct reader *r, const json_t *own)
{
    const json_t *objects[] = {own, json_object_get(r->group, "generation_params"),
                               json_object_get(r->group, "group_overrides")};
    const double wanted = r->bounds->temperature;
    for (size_t i = 0; i < sizeof objects / sizeof *objects; i++) {
        const json_t *given = json_object_get(objects[i], "temperature");
        if (!json_has(objects[i], "temperature")) continue;
        if (json_is_number(given) && fabs(json_number_value(given) - wanted) < 1e-6 * wanted)
            return ST_OK;
        return status_fail(ST_MISMATCH,
                           "it was sampled at temperature %g, and the loss is of --temperature %g; "
                           "give that, or change the environment's",
                           json_number_value(given), wanted);
    }
    return ST_OK;
}

static enum status read_overrides(const struct reader *r)
{
    const json_t *all = json_object_get(r->group, "overrides"), *value;
    const bool given = json_array_size(all) > 0;
    json_t *own = given ? json_array_get(all, (size_t)r->sequence) : NULL;
    const char *key;
    if (given && !json_is_object(own))
        return status_fail(ST_FORMAT, "field \"overrides\" has no object for it");
    json_object_foreach (own, key, value) {
        if (strcmp(key, "set_advantage_to_zero") == 0)
            r->flat[r->number] = json_is_true(value);
        else if (strcmp(key, "temperature") != 0)
            return status_fail(ST_UNSUPPORTED,
                               "field \"overrides\": \"%s\" is not known here; "
                               "set_advantage_to_zero and temperature are",
                               key);
    }
    return check_temperature(r, own);
}

// Sampled tokens' log-probabilities; at others there is 1.0, which no log-probability is.
static enum status check_logprobs(const struct reader *r, const struct completion *c)
{
    for (int t = 0; c->logprobs && t < c->n; t++) {
        if (token_author(c->authors, t) != AUTHOR_POLICY)
            c->logprobs[t] = 0;
        else if (c->logprobs[t] > 1e-3f)
            return status_fail(ST_FORMAT, "field \"inference_logprobs\": that of token %d is %g", t,
                               (double)c->logprobs[t]);
    }
    if (c->logprobs || !r->bounds->needs_logprobs) return ST_OK;
    return status_fail(ST_NOT_FOUND,
                       "\"inference_logprobs\" is missing, by which the loss is weighed: let the "
                       "environment send them (its managed server does), or train with "
                       "--no-importance-sampling-correction");
}

static enum status read_sequence(struct reader *r)
{
    struct completion *c = &r->rollout->completions[r->number];
    const json_t *score = json_array_get(json_object_get(r->group, "scores"), (size_t)r->sequence);
    enum status st;
    CHECK(read_tokens(r, c));
    CHECK(floats_of(r, "inference_logprobs", c->n, &c->logprobs));
    CHECK(check_logprobs(r, c));
    CHECK(read_overrides(r));
    CHECK(floats_of(r, "advantages", c->n, &c->advantages));
    if (!json_is_number(score) || !isfinite(json_number_value(score)))
        FAIL(ST_FORMAT, "field \"scores\" has no number for it");
    if (!(c->text = strdup(""))) FAIL(ST_NO_MEMORY, "no memory for a sequence");
    if (r->flat[r->number]) {
        free(c->advantages);
        c->advantages = NULL;
    }
    const int prompt = completion_first_sampled(c);
    for (int t = 0; t < prompt; t++)
        CHECK(token_list_push(&r->rollout->owned[r->number].prompt_ids, c->ids[t]));
    completion_cut(c, prompt);
    r->scores.rewards[r->number] = json_number_value(score);
    r->rollout->n_tokens += c->n;
out:
    return st;
}

// ---- groups -------------------------------------------------------------------------------------

static enum status open_reader(struct reader *r, const json_t *batch)
{
    enum status st;
    r->n_groups = (int)json_array_size(batch);
    r->first = calloc((size_t)r->n_groups + 1, sizeof *r->first);
    if (!r->first) FAIL(ST_NO_MEMORY, "no memory for %d groups", r->n_groups);
    for (int g = 0; g < r->n_groups; g++) {
        const json_t *tokens = json_object_get(json_array_get(batch, (size_t)g), "tokens");
        if (json_array_size(tokens) == 0)
            FAIL(ST_FORMAT, "%s, group %d: field \"tokens\" is not a list of lists", r->where, g);
        r->first[g + 1] = r->first[g] + (int)json_array_size(tokens);
    }
    const size_t n = (size_t)r->first[r->n_groups];
    CHECK(rollout_new((int)n, 1, &r->rollout));
    r->scores.n = (int)n;
    r->scores.rewards = calloc(n, sizeof *r->scores.rewards);
    r->scores.advantages = calloc(n, sizeof *r->scores.advantages);
    r->rollout->owned = calloc(n, sizeof *r->rollout->owned);
    r->rollout->n_owned = r->rollout->owned ? (int)n : 0;
    r->flat = calloc(n, sizeof *r->flat);
    if (!r->scores.rewards || !r->scores.advantages || !r->rollout->owned || !r->flat)
        FAIL(ST_NO_MEMORY, "no memory for %zu sequences", n);
out:
    return st;
}

// Sequences of each group, where all have as many and one prompt; else 1.
static int sequences_a_group(const struct reader *r)
{
    const struct example *all = r->rollout->owned;
    for (int g = 0; g < r->n_groups; g++) {
        if (r->first[g + 1] - r->first[g] != r->first[1]) return 1;
        for (int i = r->first[g] + 1; i < r->first[g + 1]; i++) {
            const struct token_list *a = &all[i].prompt_ids, *b = &all[i - 1].prompt_ids;
            if (a->n != b->n || memcmp(a->ids, b->ids, (size_t)a->n * sizeof *a->ids) != 0)
                return 1;
        }
    }
    return r->first[1];
}

// Each sequence is a group; now those of a group of equals are one again.
static void join_groups(struct reader *r)
{
    struct rollout *rollout = r->rollout;
    struct example *owned = rollout->owned;
    const int n = rollout->n_groups, size = sequences_a_group(r);
    for (int g = 0; g < n / size; g++) {
        owned[g * size].line = g + 1;
        rollout->examples[g] = &owned[g * size];
    }
    rollout->n_groups = n / size;
    rollout->n_per_group = size;
}

enum status atropos_read_batch(const char *where, const json_t *batch,
                               const struct atropos_bounds *bounds, struct rollout **ret_rollout,
                               struct scores *ret_scores)
{
    static const char *const refused[] = {"images", "distill_token_ids", "distill_logprobs"};
    struct reader r = {.where = where, .bounds = bounds};
    struct scores *s = &r.scores;
    enum status st;
    if (json_array_size(batch) == 0) FAIL(ST_FORMAT, "%s: no list of groups", where);
    CHECK(open_reader(&r, batch));
    for (int g = 0; g < r.n_groups; g++) {
        r.group = json_array_get(batch, (size_t)g);
        r.sequence = 0;
        for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
            if (is_given(&r, refused[i]))
                FAIL(ST_UNSUPPORTED, "%s, group %d: field \"%s\" is not supported", where, g,
                     refused[i]);
        for (; r.number < r.first[g + 1]; r.number++, r.sequence++)
            CHECK(status_context(read_sequence(&r), "%s, group %d, sequence %d", where, g,
                                 r.sequence));
    }
    join_groups(&r);
    advantage_estimate(&(struct advantage_config){.scale = bounds->scale}, s->rewards, NULL,
                       r.first, r.n_groups, 0, &s->stats, s->advantages);
    for (int g = 0; g < r.n_groups; g++) // a sequence alone is compared with nothing
        if (r.first[g + 1] - r.first[g] == 1)
            s->advantages[r.first[g]] = (float)s->rewards[r.first[g]];
    for (int i = 0; i < s->n; i++)
        if (r.flat[i]) s->advantages[i] = 0;
    *ret_rollout = r.rollout;
    *ret_scores = r.scores;
    r.rollout = NULL;
    r.scores = (struct scores){0};
out:
    rollout_free(r.rollout);
    scores_release(&r.scores);
    free(r.first);
    free(r.flat);
    return st;
}
