/* rollout.c: POST /v1/rollouts and its NDJSON response (docs/protocol.md). The thread that pulls.
 *
 * The groups of a rollout are divided among the servers, one request each, all in flight at once;
 * of one server it is one request. Lines come in the order in which completions finish; each is put
 * at its place (group_id, sample), which must be free, and after the last line every place must be
 * taken. Each group has a seed of its own, so that the split changes nothing of what is sampled. */
#include "trainer/rollout/rollout.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/rng.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BUSY_RETRY_MS 200
#define MODELS_MS     10000

struct part { // the groups that one server samples
    const struct rollout_source *source;
    const struct rollout_server *server;
    struct rollout *rollout;
    struct completion_bounds bounds;
    int first, n_groups, n_wanted, n_taken; // the latter: completions
    json_t *body;
    struct http_request *request; // NULL: not in flight
    int64_t again_ns;             // when a busy server is asked again
    bool done;
};

struct rollout_source rollout_source_of(struct http_client *http, const struct control *control,
                                        int vocab_size, double timeout_s)
{
    return (struct rollout_source){
        .http = http,
        .servers = {{.control = control}},
        .n_servers = 1,
        .vocab_size = vocab_size,
        .timeout_ms = (int)(timeout_s * 1e3),
        .idle_timeout_ms = (int)(timeout_s * 1e3),
    };
}

enum status rollout_new(int n_groups, int n_per_group, struct rollout **ret)
{
    struct rollout *r = calloc(1, sizeof *r);
    if (!r) return status_fail(ST_NO_MEMORY, "no memory for a rollout");
    r->n_groups = n_groups;
    r->n_per_group = n_per_group;
    r->examples = calloc((size_t)n_groups, sizeof *r->examples);
    r->completions = calloc((size_t)n_groups * (size_t)n_per_group, sizeof *r->completions);
    if (!r->examples || !r->completions) {
        rollout_free(r);
        return status_fail(ST_NO_MEMORY, "no memory for %d x %d samples", n_groups, n_per_group);
    }
    *ret = r;
    return ST_OK;
}

void rollout_free(struct rollout *r)
{
    if (!r) return;
    for (int i = 0; r->completions && i < r->n_groups * r->n_per_group; i++)
        completion_release(&r->completions[i]);
    free(r->completions);
    free(r->examples);
    free(r);
}

uint64_t rollout_oldest(const struct rollout *r, int group)
{
    const struct completion *completions = &r->completions[group * r->n_per_group];
    uint64_t oldest = UINT64_MAX;
    for (int i = 0; i < r->n_per_group; i++)
        for (int t = 0; t < completions[i].n; t++)
            if (completions[i].versions[t] < oldest) oldest = completions[i].versions[t];
    return oldest;
}

int rollout_drop_older(struct rollout *r, uint64_t oldest)
{
    int n = 0;
    for (int g = 0; g < r->n_groups; g++) {
        if (rollout_oldest(r, g) >= oldest) continue;
        n++;
        for (int i = g * r->n_per_group; i < (g + 1) * r->n_per_group; i++) {
            r->n_tokens -= r->completions[i].n;
            completion_release(&r->completions[i]);
        }
    }
    return n;
}

// ---- request ------------------------------------------------------------------------------------

static json_t *request_group(const struct example *e, int id, int n, uint64_t seed)
{
    json_t *ids = json_array();
    if (!ids) return NULL;
    for (int i = 0; i < e->prompt_ids.n; i++)
        if (json_array_append_new(ids, json_integer(e->prompt_ids.ids[i]))) {
            json_decref(ids);
            return NULL;
        }
    return json_pack("{s:i, s:o, s:i, s:I}", "id", id, "prompt_token_ids", ids, "n", n, "seed",
                     (json_int_t)rng_seed_of(seed, id));
}

static enum status build_request(struct part *p, const struct sampling_options *s)
{
    const struct rollout *r = p->rollout;
    json_t *groups = json_array();
    bool failed = !groups;
    for (int g = p->first; !failed && g < p->first + p->n_groups; g++) {
        if (r->completions[g * r->n_per_group].text) continue; // it has its completions
        failed = json_array_append_new(
            groups, request_group(r->examples[g], g, r->n_per_group, s->seed & INT64_MAX));
        p->n_wanted += r->n_per_group;
    }
    p->body = failed ? NULL
                     : json_pack("{s:O, s:s*, s:{s:f, s:f, s:f, s:I, s:I, s:b, s:s*}}", "groups",
                                 groups, "lora", p->source->adapter, "sampling", "temperature",
                                 s->temperature, "top_p", s->top_p, "min_p", s->min_p, "top_k",
                                 (json_int_t)s->top_k, "max_tokens", (json_int_t)s->max_tokens,
                                 "ignore_eos", s->ignore_eos, "stop", s->stop);
    json_decref(groups);
    return p->body ? ST_OK : status_fail(ST_NO_MEMORY, "no memory for a rollout request");
}

// ---- response -----------------------------------------------------------------------------------

static enum status take_line(void *context, const char *text, size_t len)
{
    struct part *p = context;
    struct rollout *r = p->rollout;
    enum status st = ST_OK;
    json_t *line = NULL;
    char where[80] = "response to /v1/rollouts";
    const char *message = NULL;
    int group = -1, sample = -1;
    p->bounds.newest = control_version(p->server->control); // another process may be publishing
    CHECK(json_parse(where, text, len, &line));
    if (json_has(line, "error")) {
        json_get_string(where, json_object_get(line, "error"), "message", &message);
        st = status_fail(ST_IO, "the server could not finish the rollouts: %s",
                         message ? message : "it gives no reason");
        goto out;
    }
    CHECK(json_get_int32(where, line, "group_id", p->first, p->first + p->n_groups - 1, &group));
    CHECK(json_get_int32(where, line, "sample", 0, r->n_per_group - 1, &sample));
    if (group < 0 || sample < 0)
        FAIL(ST_FORMAT, "%s: a line without \"group_id\" or \"sample\"", where);
    snprintf(where, sizeof where, "response to /v1/rollouts, group %d sample %d", group, sample);
    struct completion *completion = &r->completions[group * r->n_per_group + sample];
    if (completion->text) FAIL(ST_MISMATCH, "%s: came twice", where);
    CHECK(completion_read(where, line, &p->bounds, completion));
    p->n_taken++;
    r->n_tokens += completion->n;
out:
    json_decref(line);
    return st;
}

// ---- parts in flight ----------------------------------------------------------------------------

static enum status check_alive(void *context)
{
    const struct part *p = context;
    if (p->source->cancelled && atomic_load(p->source->cancelled))
        return status_fail(ST_CANCELLED, "the rollouts are no longer wanted");
    return control_owner_alive(p->server->control);
}

static enum status submit(struct part *p)
{
    const struct http_call call = {
        .server = p->server->address,
        .path = "/v1/rollouts",
        .post = true,
        .body = p->body,
        .timeout_ms = p->source->timeout_ms,
        .idle_timeout_ms = p->source->idle_timeout_ms,
        .on_line = take_line,
        .alive = check_alive,
        .context = p,
    };
    return http_submit(p->source->http, &call, &p->request);
}

// Submits it, takes its end, or does nothing where it is in flight.
static enum status advance(struct part *p, int64_t deadline)
{
    if (p->done) return ST_OK;
    if (!p->request) return clock_now_ns() >= p->again_ns ? submit(p) : check_alive(p);
    if (!http_ended(p->request)) return ST_OK;
    enum status st = http_finish(p->request, NULL);
    p->request = NULL;
    // Busy comes instead of a response, never within one.
    if (st == ST_BUSY && p->n_taken == 0 && clock_ms_until(deadline) > BUSY_RETRY_MS) {
        log_debug("%s; it is asked again in %d ms", status_message(), BUSY_RETRY_MS);
        p->again_ns = clock_deadline_ns(BUSY_RETRY_MS);
        return ST_OK;
    }
    if (st != ST_OK) return st;
    p->done = true;
    if (p->n_taken != p->n_wanted)
        st = status_fail(ST_FORMAT, "response to /v1/rollouts: %d samples of the %d asked for",
                         p->n_taken, p->n_wanted);
    return st;
}

static enum status pull_parts(struct part *parts, int n)
{
    enum status st = ST_OK;
    const int64_t deadline = clock_deadline_ns(parts->source->timeout_ms);
    for (int done = 0; done < n;) {
        done = 0;
        for (int k = 0; k < n; k++) {
            CHECK(advance(&parts[k], deadline));
            done += parts[k].done;
        }
        if (done < n) http_poll(parts->source->http, BUSY_RETRY_MS);
    }
out:
    return st;
}

static enum status plan_parts(const struct rollout_source *source, struct rollout *r,
                              const struct sampling_options *sampling, struct part *ret_parts)
{
    const int n = source->n_servers;
    for (int k = 0; k < n; k++) {
        struct part *p = &ret_parts[k];
        const struct rollout_server *server = &source->servers[k];
        *p = (struct part){
            .source = source,
            .server = server,
            .rollout = r,
            .first = r->n_groups * k / n,
            .n_groups = r->n_groups * (k + 1) / n - r->n_groups * k / n,
            // Even: an update that is being written just now may take some tokens of the weights
            // before it.
            .bounds = {.vocab_size = source->vocab_size,
                       .max_tokens = sampling->max_tokens,
                       .oldest = control_version(server->control) & ~(uint64_t)1},
        };
        enum status st = build_request(p, sampling);
        if (st != ST_OK) return st;
        p->done = p->n_wanted == 0;
    }
    return ST_OK;
}

enum status rollout_pull(const struct rollout_source *source,
                         const struct sampling_options *sampling, struct rollout *r)
{
    enum status st;
    struct part parts[ROLLOUT_MAX_SERVERS] = {0};
    const int64_t start = clock_now_ns();
    CHECK(plan_parts(source, r, sampling, parts));
    CHECK(pull_parts(parts, source->n_servers));
    r->seconds += clock_ms_since(start) / 1e3;
    log_debug("POST /v1/rollouts: %d x %d samples, %ld tokens in %.3f s", r->n_groups,
              r->n_per_group, r->n_tokens, r->seconds);
out:
    for (int k = 0; k < source->n_servers; k++) {
        http_cancel(parts[k].request);
        json_decref(parts[k].body);
    }
    return st;
}

// ---- the server's context -----------------------------------------------------------------------

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
                       " are over the %" PRId64 " tokens of context that the server serves; lower "
                       "it or --max-prompt-length, or start cw-infer-server with a larger "
                       "--max-context",
                       data->path, longest, max_completion_length, context);
}
