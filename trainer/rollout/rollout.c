/* rollout.c: POST /v1/rollouts and its NDJSON response (docs/use/protocol.md), or, of a server that
 * has no such endpoint, POST /v1/completions. The thread that pulls.
 *
 * Of one server it is one request. For several the groups are divided into more chunks than there
 * are servers, and each chunk goes to the server that has the fewest: a fast one takes more of
 * them. A worker that fails gives its chunks back, less the groups that came whole. Lines come in
 * the order in which completions finish; each is put at its place (group_id, sample), which must be
 * free, and after the last line every place of the chunk must be taken. Each group has a seed of
 * its own, so that the split changes nothing of what is sampled.
 */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/rollout/rollout.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/rng.h"
#include "trainer/learn/learner.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BUSY_RETRY_MS 200
#define CHECK_MS      100 // whether all without whom nothing can be sampled are there
#define MODELS_MS     10000

#define CHUNKS_A_SERVER 8 // on average, of several

struct chunk { // groups that one server samples
    struct pull *pull;
    struct rollout_ask ask;
    int first, n_groups, n_wanted, n_taken; // the latter: completions
    bool done;
};

struct pull {
    struct rollout_pull common;
    struct rollout *rollout;
    struct chunk *chunks; // (common.n_asks)
};

struct rollout_servers rollout_servers_of(struct http_client *http, const struct control *control,
                                          int vocab_size, double timeout_s)
{
    return (struct rollout_servers){
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
    r->prompts = calloc((size_t)n_groups, sizeof *r->prompts);
    r->exchanged = calloc((size_t)n_groups, sizeof *r->exchanged);
    r->whole = calloc((size_t)n_groups, sizeof *r->whole);
    r->gathered = calloc((size_t)n_groups, sizeof *r->gathered);
    r->completions = calloc((size_t)n_groups * (size_t)n_per_group, sizeof *r->completions);
    if (!r->examples || !r->prompts || !r->exchanged || !r->whole || !r->gathered ||
        !r->completions) {
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
    for (int i = 0; i < r->n_owned; i++) example_release(&r->owned[i]);
    for (int g = 0; r->prompts && g < r->n_groups; g++) token_list_release(&r->prompts[g]);
    free(r->prompts);
    free(r->exchanged);
    free(r->whole);
    free(r->gathered);
    free(r->owned);
    free(r->completions);
    free(r->examples);
    free(r);
}

const struct token_list *rollout_prompt(const struct rollout *r, int group)
{
    return r->prompts[group].n > 0 ? &r->prompts[group] : &r->examples[group]->prompt_ids;
}

uint64_t rollout_oldest(const struct rollout *r, int group)
{
    const struct completion *completions = &r->completions[group * r->n_per_group];
    uint64_t oldest = UINT64_MAX;
    for (int i = 0; i < r->n_per_group; i++)
        for (int t = 0; completions[i].versions && t < completions[i].n; t++)
            if (completions[i].versions[t] < oldest) oldest = completions[i].versions[t];
    return oldest;
}

static void drop_group(struct rollout *r, int group)
{
    for (int i = group * r->n_per_group; i < (group + 1) * r->n_per_group; i++) {
        r->n_tokens -= r->completions[i].n;
        completion_release(&r->completions[i]);
    }
    r->whole[group] = false;
}

void rollout_group_came(struct rollout *r, int group)
{
    bool whole = true;
    for (int i = group * r->n_per_group; i < (group + 1) * r->n_per_group; i++)
        whole &= r->completions[i].text != NULL;
    r->whole[group] = whole;
}

void rollout_gather(struct rollout *to, int group, struct rollout *from, int from_group)
{
    const int each = to->n_per_group;
    struct completion *dst = &to->completions[group * each],
                      *src = &from->completions[from_group * each];
    to->examples[group] = from->examples[from_group];
    to->prompts[group] = from->prompts[from_group];
    from->prompts[from_group] = (struct token_list){0};
    for (int i = 0; i < each; i++) {
        dst[i] = src[i];
        to->n_tokens += src[i].n;
        src[i] = (struct completion){0};
    }
    to->whole[group] = from->whole[from_group];
    from->gathered[from_group] = true;
}

int rollout_drop_older(struct rollout *r, uint64_t oldest)
{
    int n = 0;
    for (int g = 0; g < r->n_groups; g++) {
        if (rollout_oldest(r, g) >= oldest) continue;
        n++;
        r->exchanged[g] = false;
        drop_group(r, g);
    }
    return n;
}

// ---- what is learned from -----------------------------------------------------------------------

// The data's completion of an example, behind its prompt: the teacher's alone.
static void give(const struct example *e, struct pack_group *group, struct pack_completion *c)
{
    group->prompt = e->prompt_ids.ids;
    group->n_prompt = e->prompt_ids.n;
    group->teacher_prompt = e->teacher_ids.ids;
    group->n_teacher_prompt = e->teacher_ids.n;
    *c = (struct pack_completion){.ids = e->completion_ids.ids,
                                  .n = e->completion_ids.n,
                                  .masked = true,
                                  .given = true,
                                  .line = e->line};
}

// A completion of several parts stays in one micro-batch: those without room there go.
static enum status cut_parts(struct rollout *r, int i, const struct rollout_learning *how,
                             const struct pack_group *group, struct pack_completion *c,
                             int *ret_cut)
{
    struct completion *from = &r->completions[i];
    int parts;
    if (!from->parts) return ST_OK;
    enum status st = packing_parts(group, i % r->n_per_group, how->learner->token_budget,
                                   how->learner->min_shared, &parts);
    if (st != ST_OK) return st;
    *ret_cut += parts < from->n_parts;
    completion_keep_parts(from, parts);
    r->n_tokens += from->n - c->n;
    c->n = from->n;
    c->parts = from->parts;
    c->n_parts = from->n_parts;
    return ST_OK;
}

enum status rollout_samples(struct rollout *r, const struct rollout_learning *how,
                            struct samples **ret)
{
    struct samples *s = NULL;
    int cut = 0;
    enum status st = samples_new(r->n_groups, r->n_per_group, how->given, &s);
    if (st != ST_OK) return st;
    const int each = how->given ? 2 : 1, n_sampled = r->n_groups * r->n_per_group;
    for (int g = 0; g < r->n_groups; g++) {
        const json_t *constraint = how->constraints ? r->examples[g]->constraint : NULL;
        struct pack_group *group = &s->groups[g * each];
        group->prompt = rollout_prompt(r, g)->ids;
        group->n_prompt = rollout_prompt(r, g)->n;
        group->teacher_prompt = r->examples[g]->teacher_ids.ids;
        group->n_teacher_prompt = r->examples[g]->teacher_ids.n;
        if (constraint) CHECK(constraints_get(how->constraints, constraint, &group->constraint));
        if (how->given) give(r->examples[g], &group[1], &s->completions[n_sampled + g]);
    }
    for (int i = 0; i < n_sampled; i++) {
        const struct completion *c = &r->completions[i];
        const struct pack_group *group = &s->groups[i / r->n_per_group * each];
        const bool constrained = group->constraint;
        const float *const sampled = how->processed && c->processed ? c->processed : c->logprobs;
        if (constrained && !c->processed && c->n > 0)
            FAIL(ST_MISMATCH,
                 "--constrained-loss: the server of line %d's sample gave no log-probabilities of "
                 "what it sampled from (cut_logprobs), which Commonweight's own does",
                 r->examples[i / r->n_per_group]->line);
        s->completions[i] = (struct pack_completion){
            .ids = c->ids,
            .n = c->n,
            .parts = c->parts,
            .n_parts = c->n_parts,
            .n_sequences = c->n_sequences,
            .sequences = c->sequences,
            .masked = how->mask_truncated && c->truncated,
            .advantage = how->advantages[i],
            .inputs = {[INPUT_ADVANTAGES] = c->advantages,
                       [INPUT_LOGPROBS] = constrained ? c->processed : sampled},
            .authors = c->authors,
            .server_logprobs = constrained ? c->processed : c->logprobs,
            .versions = c->versions,
            .line = r->examples[i / r->n_per_group]->line,
            .number = i % r->n_per_group,
        };
        CHECK(cut_parts(r, i, how, group, &s->completions[i], &cut));
    }
    if (cut > 0)
        log_warn("the last turns of %d samples, which are over --token-budget with those before "
                 "them (%d rows), are not learned from; raise it",
                 cut, how->learner->token_budget);
    return samples_begin(s, ret);
out:
    samples_free(s);
    return st;
}

// ---- what is asked of servers -------------------------------------------------------------------

struct rollout_pull rollout_pull_begin(const struct rollout_servers *servers,
                                       const struct sampling_options *sampling)
{
    return (struct rollout_pull){
        .servers = servers,
        .sampling = sampling,
        // Even: an update that is being written just now may take some tokens of the weights
        // before it.
        .oldest = control_version(servers->servers[0].control) & ~(uint64_t)1,
        .deadline = clock_deadline_ns(servers->timeout_ms),
    };
}

static bool is_down(const struct rollout_server *s)
{
    return s->worker && s->worker->down;
}

static int servers_up(const struct rollout_servers *servers)
{
    int up = 0;
    for (int k = 0; k < servers->n_servers; k++) up += !is_down(&servers->servers[k]);
    return up;
}

static const struct rollout_server *server_of(const struct rollout_pull *p,
                                              const struct rollout_ask *a)
{
    return &p->servers->servers[a->server];
}

enum status rollout_check(const struct rollout_servers *servers)
{
    if (servers->cancelled && atomic_load(servers->cancelled))
        return status_fail(ST_CANCELLED, "the rollouts are no longer wanted");
    if (servers_up(servers) == 0)
        return status_fail(ST_PEER_GONE, "none of the servers that sample answers any more");
    enum status st = comm_check(servers->comm);
    return st == ST_OK ? control_owner_alive(servers->servers[0].control) : st;
}

bool rollout_choose(struct rollout_pull *p, struct rollout_ask *a)
{
    const int n = p->servers->n_servers;
    const int up = servers_up(p->servers);
    // Three quarters of a server's even share, so that its batch is full; who is done first takes
    // the rest. A server that is alone gets all; where none is left, another pull has just put it
    // aside.
    int fewest = p->n_asks == 0 || up <= 1 ? INT_MAX : (3 * p->n_asks + 4 * up - 1) / (4 * up);
    if (a->server >= 0 && is_down(server_of(p, a))) a->server = -1;
    if (a->server >= 0) return clock_now_ns() >= p->of[a->server].again_ns;
    for (int i = 0; i < n; i++) {
        const int k = (p->next + i) % n;
        if (is_down(&p->servers->servers[k]) || clock_now_ns() < p->of[k].again_ns ||
            p->of[k].in_flight >= fewest)
            continue;
        a->server = k;
        fewest = p->of[k].in_flight;
    }
    if (a->server >= 0) p->next = a->server + 1;
    return a->server >= 0;
}

enum status rollout_ask(struct rollout_pull *p, struct rollout_ask *a, const struct http_call *call)
{
    struct http_call to = *call;
    to.server = server_of(p, a)->address;
    enum status st = http_submit(p->servers->http, &to, &a->transfer);
    p->of[a->server].in_flight += st == ST_OK;
    p->in_flight += st == ST_OK;
    return st;
}

static void leave(struct rollout_pull *p, struct rollout_ask *a)
{
    a->transfer = NULL;
    p->of[a->server].in_flight--;
    p->in_flight--;
}

void rollout_cancel(struct rollout_pull *p, struct rollout_ask *a)
{
    http_cancel(a->transfer);
    if (a->transfer) leave(p, a);
}

bool rollout_finish(struct rollout_pull *p, struct rollout_ask *a, struct bytes *ret_body,
                    enum status *ret_result)
{
    const struct rollout_server *server = server_of(p, a);
    if (http_ended(a->transfer)) {
        *ret_result = http_finish(a->transfer, ret_body);
        leave(p, a);
        return true;
    }
    if (!is_down(server)) return false;
    rollout_cancel(p, a); // another that was asked of it told
    *ret_result = status_fail(ST_PEER_GONE, "worker %s is put aside", server->worker->name);
    return true;
}

enum status rollout_again(struct rollout_pull *p, struct rollout_ask *a, bool begun, enum status st)
{
    struct rollout_worker *worker = server_of(p, a)->worker;
    struct status_kept why;
    // Busy comes instead of a response, never within one.
    if (st == ST_BUSY && !begun && clock_ms_until(p->deadline) > BUSY_RETRY_MS) {
        log_debug("%s; it is asked again in %d ms", status_message(), BUSY_RETRY_MS);
        p->of[a->server].again_ns = clock_deadline_ns(BUSY_RETRY_MS);
        return ST_OK;
    }
    if (!worker) return st;
    status_keep(&why, st);
    if (!worker->down && (st = rollout_check(p->servers)) != ST_OK)
        return st; // the run's end, not this worker's
    status_recall(&why);
    const bool first = !worker->down;
    worker->down = true;
    worker->n_failures += first;
    const bool others = servers_up(p->servers) > 0;
    if (first) {
        log_progress_end();
        log_warn("worker %s is put aside until it answers again before a step: %s; its requests %s",
                 worker->name, why.message,
                 others ? "go to the other servers" : "have no other server");
    }
    return others ? ST_OK : status_recall(&why);
}

// ---- request ------------------------------------------------------------------------------------

static const char *completions_of(const struct rollout_server *s)
{
    return s->worker ? s->worker->completions_of : NULL;
}

static const struct rollout_server *chunks_server(const struct chunk *p)
{
    return server_of(&p->pull->common, &p->ask);
}

json_t *rollout_group(const struct token_list *prompt, int id, int n, uint64_t seed,
                      const json_t *format)
{
    json_t *ids = json_ids(prompt->ids, prompt->n);
    return json_pack("{s:i, s:o, s:i, s:I, s:O*}", "id", id, "prompt_token_ids", ids, "n", n,
                     "seed", (json_int_t)seed, "response_format", format);
}

static const json_t *format_of(const struct example *e)
{
    return e->constraint ? json_object_get(e->row, "response_format") : NULL;
}

static uint64_t seed_of(const struct chunk *p, int group)
{
    return rng_seed_of(p->pull->common.sampling->seed & INT64_MAX, group);
}

// OpenAI's shape with vLLM's fields, of which those stay away that ask for nothing.
static json_t *completions_body(struct chunk *p)
{
    const struct rollout *r = p->pull->rollout;
    const struct sampling_options *s = p->pull->common.sampling;
    const struct token_list *prompt = &r->examples[p->first]->prompt_ids;
    json_t *ids = json_ids(prompt->ids, prompt->n);
    json_t *body =
        json_pack("{s:s, s:o, s:i, s:I, s:I, s:f, s:f, s:i, s:b, s:b, s:s*, s:O*}", "model",
                  completions_of(chunks_server(p)), "prompt", ids, "n", r->n_per_group, "seed",
                  (json_int_t)seed_of(p, p->first), "max_tokens", (json_int_t)s->max_tokens,
                  "temperature", s->temperature, "top_p", s->top_p, "logprobs", 1,
                  "return_token_ids", 1, "return_tokens_as_token_ids", 1, "stop", s->stop,
                  "response_format", format_of(r->examples[p->first]));
    if (body && s->top_k > 0) json_object_set_new(body, "top_k", json_integer(s->top_k));
    if (body && s->min_p > 0) json_object_set_new(body, "min_p", json_real(s->min_p));
    if (body && s->ignore_eos) json_object_set_new(body, "ignore_eos", json_true());
    p->n_wanted = r->n_per_group;
    p->n_taken = 0;
    return body;
}

json_t *rollout_request(const struct rollout_pull *pull, json_t *groups)
{
    const struct sampling_options *s = pull->sampling;
    const struct tandem_options *t = &s->tandem;
    json_t *tandem =
        t->on ? json_pack("{s:s, s:f, s:I}", "selector", tandem_selector_names[t->selector], "p",
                          t->p, "chunk", (json_int_t)t->chunk)
              : NULL;
    if (tandem && t->shared)
        json_object_set_new(tandem, "seed", json_integer((json_int_t)(s->seed & INT64_MAX)));
    return json_pack("{s:o, s:s*, s:{s:f, s:f, s:f, s:I, s:I, s:b, s:s*, s:o*, s:o*}}", "groups",
                     groups, "lora", pull->servers->adapter, "sampling", "temperature",
                     s->temperature, "top_p", s->top_p, "min_p", s->min_p, "top_k",
                     (json_int_t)s->top_k, "max_tokens", (json_int_t)s->max_tokens, "ignore_eos",
                     s->ignore_eos, "stop", s->stop, "tandem", tandem, "text_offset",
                     s->text_offset ? json_true() : NULL);
}

bool rollout_wants(const struct rollout *r, const struct comm *comm, int group)
{
    return group % comm_size(comm) == comm_rank(comm) && !r->whole[group] && !r->gathered[group];
}

// Of the groups that have no completions; how many samples that are is the chunk's n_wanted.
static json_t *rollouts_body(struct chunk *p)
{
    const struct rollout *r = p->pull->rollout;
    json_t *groups = json_array();
    bool failed = !groups;
    p->n_wanted = p->n_taken = 0;
    for (int g = p->first; !failed && g < p->first + p->n_groups; g++) {
        if (!rollout_wants(r, p->pull->common.servers->comm, g)) continue;
        failed = json_array_append_new(groups,
                                       rollout_group(&r->examples[g]->prompt_ids, g, r->n_per_group,
                                                     seed_of(p, g), format_of(r->examples[g])));
        p->n_wanted += r->n_per_group;
    }
    if (failed) json_decref(groups);
    return rollout_request(&p->pull->common, failed ? NULL : groups);
}

// ---- response -----------------------------------------------------------------------------------

enum status rollout_check_line(const char *where, const json_t *line)
{
    const json_t *error = json_object_get(line, "error");
    const char *message = json_string_value(json_object_get(error, "message"));
    if (!error) return ST_OK;
    return status_fail(ST_IO, "%s: the server could not finish it: %s", where,
                       message ? message : "it gives no reason");
}

// A worker's weights do not change in a pull; those that learn may, by another process.
enum status rollout_read(const struct rollout_pull *pull, const struct rollout_ask *ask,
                         const char *where, const json_t *line, struct completion *ret)
{
    const struct rollout_server *server = server_of(pull, ask);
    const struct sampling_options *sampling = pull->sampling;
    struct rollout_worker *worker = server->worker;
    const bool filtered = sampling->temperature > 0 &&
                          (sampling->top_k > 0 || sampling->top_p < 1 || sampling->min_p > 0);
    const struct completion_bounds bounds = {
        .vocab_size = pull->servers->vocab_size,
        .max_tokens = (int)sampling->max_tokens,
        .tandem = sampling->tandem.on,
        .filtered = (filtered && !(worker && worker->completions_of)) ||
                    json_has(line, "cut_logprobs"), // of a response_format
        .oldest = worker ? worker->version : pull->oldest,
        .newest = worker ? worker->version : control_version(server->control),
    };
    enum status st = completion_read(where, line, &bounds, ret);
    if (st != ST_OK || !worker) return st;
    for (int t = 0; t < ret->n; t++) ret->versions[t] = worker->copy_of;
    worker->n_samples++;
    return ST_OK;
}

// One sample, as a line of /v1/rollouts has it; `path` is that of the request.
static enum status take_sample(struct chunk *p, const char *path, const json_t *line)
{
    struct rollout *r = p->pull->rollout;
    enum status st = ST_OK;
    char where[80];
    int group = -1, sample = -1;
    snprintf(where, sizeof where, "response to %s", path);
    CHECK(rollout_check_line(where, line));
    CHECK(json_get_int32(where, line, "group_id", p->first, p->first + p->n_groups - 1, &group));
    CHECK(json_get_int32(where, line, "sample", 0, r->n_per_group - 1, &sample));
    if (group < 0 || sample < 0)
        FAIL(ST_FORMAT, "%s: a line without \"group_id\" or \"sample\"", where);
    snprintf(where, sizeof where, "response to %s, group %d sample %d", path, group, sample);
    struct completion *completion = &r->completions[group * r->n_per_group + sample];
    if (r->whole[group] || completion->text) FAIL(ST_MISMATCH, "%s: came twice", where);
    CHECK(rollout_read(&p->pull->common, &p->ask, where, line, completion));
    p->n_taken++;
    r->n_tokens += completion->n;
    rollout_group_came(r, group);
out:
    return st;
}

#define ROLLOUTS    "/v1/rollouts"
#define COMPLETIONS "/v1/completions"

static enum status take_line(void *context, const char *text, size_t len)
{
    struct chunk *p = context;
    enum status st = ST_OK;
    json_t *line = NULL;
    CHECK(json_parse("response to " ROLLOUTS, text, len, &line));
    st = take_sample(p, ROLLOUTS, line);
out:
    json_decref(line);
    return st;
}

// A choice as the line that /v1/rollouts would have of it. NULL: no memory.
static json_t *line_of_choice(const struct chunk *p, const json_t *choice)
{
    const json_t *ids = json_object_get(choice, "token_ids");
    const json_int_t version = (json_int_t)chunks_server(p)->worker->version;
    json_t *versions = json_array();
    for (size_t t = 0; t < json_array_size(ids); t++)
        json_array_append_new(versions, json_integer(version));
    return json_pack("{s:i, s:O*, s:O*, s:O*, s:O*, s:O*, s:o}", "group_id", p->first, "sample",
                     json_object_get(choice, "index"), "finish_reason",
                     json_object_get(choice, "finish_reason"), "text",
                     json_object_get(choice, "text"), "token_ids", ids, "logprobs",
                     json_object_get(json_object_get(choice, "logprobs"), "token_logprobs"),
                     "weight_versions", versions);
}

static enum status take_choices(struct chunk *p, const struct bytes *body)
{
    enum status st;
    json_t *response = NULL, *line = NULL;
    const json_t *choice;
    size_t i;
    CHECK(json_parse("response to " COMPLETIONS, bytes_text(body), body->len, &response));
    json_array_foreach (json_object_get(response, "choices"), i, choice) {
        json_decref(line);
        if (!(line = line_of_choice(p, choice))) FAIL(ST_NO_MEMORY, "no memory for a completion");
        CHECK(take_sample(p, COMPLETIONS, line));
    }
out:
    json_decref(line);
    json_decref(response);
    return st;
}

// ---- chunks -------------------------------------------------------------------------------------

// Takes the chunk from its server. Groups that did not come whole are asked for again.
static void give_back(struct chunk *p)
{
    struct rollout *r = p->pull->rollout;
    p->ask.server = -1;
    p->done = true;
    for (int g = p->first; g < p->first + p->n_groups; g++) {
        if (!rollout_wants(r, p->pull->common.servers->comm, g)) continue;
        p->done = false;
        drop_group(r, g);
    }
}

// Submits it, takes its end, or does nothing where it is in flight.
static enum status advance(struct chunk *p)
{
    struct rollout_pull *pull = &p->pull->common;
    struct rollout_ask *a = &p->ask;
    struct bytes body = BYTES_INIT;
    enum status st;
    if (p->done) return ST_OK;
    if (!a->transfer) {
        if (!rollout_choose(pull, a)) return ST_OK;
        const bool completions = completions_of(chunks_server(p)) != NULL;
        json_t *request = completions ? completions_body(p) : rollouts_body(p);
        if (!request) return status_fail(ST_NO_MEMORY, "no memory for a rollout request");
        st = rollout_ask(pull, a,
                         &(struct http_call){.path = completions ? COMPLETIONS : ROLLOUTS,
                                             .body = request,
                                             .timeout_ms = pull->servers->timeout_ms,
                                             .idle_timeout_ms = pull->servers->idle_timeout_ms,
                                             .on_line = completions ? NULL : take_line,
                                             .context = p});
        json_decref(request);
        return st;
    }
    if (!rollout_finish(pull, a, &body, &st)) return ST_OK;
    if (st == ST_OK && completions_of(chunks_server(p))) st = take_choices(p, &body);
    if (st == ST_OK && p->n_taken != p->n_wanted)
        st = status_fail(ST_FORMAT, "response to " ROLLOUTS ": %d samples of the %d asked for",
                         p->n_taken, p->n_wanted);
    if (st != ST_OK) st = rollout_again(pull, a, p->n_taken > 0, st);
    give_back(p);
    bytes_release(&body);
    return st;
}

static enum status pull_chunks(struct pull *pull)
{
    enum status st = ST_OK;
    for (int done = 0; done < pull->common.n_asks;) {
        CHECK(rollout_check(pull->common.servers));
        done = 0;
        for (int k = 0; k < pull->common.n_asks; k++) {
            CHECK(advance(&pull->chunks[k]));
            done += pull->chunks[k].done;
        }
        if (done < pull->common.n_asks) http_poll(pull->common.servers->http, CHECK_MS);
    }
out:
    return st;
}

static enum status plan_chunks(struct pull *pull)
{
    const struct rollout *r = pull->rollout;
    const struct rollout_servers *servers = pull->common.servers;
    const int max = CHUNKS_A_SERVER * servers->n_servers;
    bool each_group = false;
    for (int k = 0; k < servers->n_servers; k++)
        each_group |= completions_of(&servers->servers[k]) != NULL;
    const int n = each_group || (servers->n_servers > 1 && r->n_groups < max) ? r->n_groups
                  : servers->n_servers == 1                                   ? 1
                                                                              : max;
    pull->chunks = calloc((size_t)n, sizeof *pull->chunks);
    if (!pull->chunks) return status_fail(ST_NO_MEMORY, "no memory for %d requests", n);
    pull->common.n_asks = n;
    for (int k = 0, end = 0; k < n; k++) {
        struct chunk *p = &pull->chunks[k];
        p->pull = pull;
        p->ask.server = -1;
        p->first = end;
        end = (int)((int64_t)r->n_groups * (k + 1) / n);
        p->n_groups = end - p->first;
        p->done = true;
        for (int g = p->first; g < end; g++) p->done &= !rollout_wants(r, servers->comm, g);
    }
    return ST_OK;
}

enum status rollout_pull(const struct rollout_servers *source,
                         const struct sampling_options *sampling, struct rollout *r)
{
    struct pull pull = {.common = rollout_pull_begin(source, sampling), .rollout = r};
    const int64_t start = clock_now_ns();
    enum status st = plan_chunks(&pull);
    if (st == ST_OK) st = pull_chunks(&pull);
    for (int k = 0; k < pull.common.n_asks; k++) {
        if (!pull.chunks[k].ask.transfer) continue;
        rollout_cancel(&pull.common, &pull.chunks[k].ask);
        give_back(&pull.chunks[k]);
    }
    free(pull.chunks);
    if (st != ST_OK) return st;
    r->seconds += clock_ms_since(start) / 1e3;
    log_debug("POST /v1/rollouts: %d x %d samples, %ld tokens in %.3f s", r->n_groups,
              r->n_per_group, r->n_tokens, r->seconds);
    return ST_OK;
}

// ---- the server's context -----------------------------------------------------------------------

enum status rollout_context(const struct rollout_servers *source, int64_t *ret)
{
    json_t *models;
    enum status st = http_get_json(source->http, "/v1/models", MODELS_MS, &models);
    if (st != ST_OK) return st;
    const json_t *model = json_array_get(json_object_get(models, "data"), 0);
    *ret = json_integer_value(json_object_get(model, "max_model_len"));
    if (!json_has(model, "max_model_len")) {
        log_warn("the server's /v1/models names no \"max_model_len\": whether prompts and "
                 "completions fit its context is not checked");
        *ret = INT64_MAX;
    }
    json_decref(models);
    return ST_OK;
}

enum status rollout_check_context(const struct rollout_servers *source, const struct dataset *data,
                                  int64_t limit, int64_t max_completion_length)
{
    int64_t context = 0, n = limit > 0 && limit < data->n ? limit : data->n;
    int longest = 0;
    enum status st = rollout_context(source, &context);
    if (st != ST_OK) return st;
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
