/* episode.c: the lines of one episode. A process's line has its id and one more field, which names
 * what it is; each kind is an entry of a table. */
#include "trainer/rollout/episode.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/rng.h"

#include <stdlib.h>
#include <string.h>

#define MAX_REQUESTS 256 // in flight: each has a connection
#define ROLLOUTS     "/v1/rollouts"
#define TOKENIZE     "/tokenize"

const struct example *episode_example(const struct episode *e)
{
    return e->pull->step->rollout->examples[e->group];
}

void episode_reset(struct episode *e)
{
    rollout_cancel(&e->pull->asked, &e->ask);
    json_decref(e->body);
    json_decref(e->call);
    token_list_release(&e->prompt);
    sampled_turns_release(&e->turns);
    completion_release(&e->made);
    *e = (struct episode){.pull = e->pull,
                          .group = e->group,
                          .sample = e->sample,
                          .attempts = e->attempts,
                          .ask.server = -1,
                          .process = -1};
}

// Puts {"id", kind: value} as a line; takes the reference to the value over.
static enum status put_line(struct bytes *out, json_int_t id, const char *kind, json_t *value)
{
    return json_put_line(out, json_pack("{s:I, s:o}", "id", id, kind, value), 0);
}

static uint64_t seed_of(const struct episode *e)
{
    return rng_seed_of(e->pull->step->sampling.seed & INT64_MAX,
                       e->group * e->pull->step->rollout->n_per_group + e->sample);
}

enum status episode_begin(struct episode *e, json_int_t id, struct bytes *out)
{
    const struct rollout_step *step = e->pull->step;
    const struct example *example = episode_example(e);
    e->id = id;
    e->attempts++;
    json_t *ids = json_ids(example->prompt_ids.ids, example->prompt_ids.n);
    json_t *episode =
        ids ? json_pack("{s:I, s:b, s:i, s:i, s:i, s:i, s:I, s:i, s:o, s:O}", "step",
                        (json_int_t)(step->step + !step->evaluation), "evaluation",
                        step->evaluation, "group", step->first_group + e->group, "sample",
                        e->sample, "line", example->line, "attempt", e->attempts, "seed",
                        (json_int_t)(seed_of(e) >> 11), "max_tokens", e->pull->max_tokens,
                        "prompt_token_ids", ids, "example", example->row)
            : NULL;
    return put_line(out, id, "episode", episode);
}

// ---- sampling -----------------------------------------------------------------------------------

static void note_prompt(struct episode *e)
{
    int at = 0;
    if (sampled_turns_repeat(&e->turns, &e->prompt, &at)) return;
    e->n_unlike++;
    if (*e->pull->said_unlike) return;
    *e->pull->said_unlike = true;
    log_progress_end();
    log_warn("environment: %s, line %d, sample %d: the prompt of turn %d has other tokens than the "
             "turn before from token %d on: a conversation rendered anew need not repeat. One "
             "trajectory cannot hold both, so it can train what was sampled behind the tokens that "
             "it has, and not the other turns; to train all, keep each turn's token_ids and append "
             "to them (said once; metric environment/unlike_prompts counts)",
             e->pull->step->data, episode_example(e)->line, e->sample, e->turns.n + 1, at);
}

// Nothing of it fits the context any more.
static enum status reply_full(struct episode *e, struct bytes *out)
{
    struct completion nothing = {.truncated = true, .text = strdup("")};
    if (!nothing.text) return status_fail(ST_NO_MEMORY, "no memory for a turn");
    enum status st = sampled_turns_add(&e->turns, &e->prompt, &nothing);
    if (st != ST_OK) return st;
    return put_line(out, e->id, "sampled",
                    json_pack("{s:[], s:[], s:[], s:s, s:s}", "token_ids", "logprobs",
                              "weight_versions", "finish_reason", "length", "text", ""));
}

static enum status ask_sample(struct episode *e, const json_t *value, int64_t max_tokens)
{
    static const char *const stops[] = {"stop", "stop_token_ids"};
    json_t *group =
        rollout_group(&e->prompt, 0, 1, rng_seed_of(seed_of(e) & INT64_MAX, e->turns.n));
    e->body = rollout_request(&e->pull->asked, group ? json_pack("[o]", group) : NULL);
    if (!e->body) return status_fail(ST_NO_MEMORY, "no memory for a request");
    json_t *sampling = json_object_get(e->body, "sampling");
    json_object_set_new(sampling, "max_tokens", json_integer(max_tokens));
    for (size_t i = 0; i < sizeof stops / sizeof *stops; i++)
        if (json_has(value, stops[i]))
            json_object_set(sampling, stops[i], json_object_get(value, stops[i]));
    e->sampling = true;
    return ST_OK;
}

static enum status take_sample(struct episode *e, const json_t *value, struct bytes *out)
{
    static const char *const fields[] = {"token_ids", "max_tokens", "stop", "stop_token_ids", NULL};
    const int64_t max = e->pull->step->sampling.max_tokens;
    int64_t max_tokens = max;
    enum status st;
    CHECK(trajectory_check_fields(value, fields));
    CHECK(json_get_int("sample", value, "max_tokens", 1, INT32_MAX, &max_tokens));
    if (max_tokens > max)
        FAIL(ST_INVALID, "\"max_tokens\" %lld is over --max-completion-length %lld",
             (long long)max_tokens, (long long)max);
    CHECK(trajectory_read_ids(value, "token_ids", e->pull->step->via.vocab_size, &e->prompt));
    note_prompt(e);
    const int room = e->pull->max_tokens - e->prompt.n;
    if (room <= 0) return reply_full(e, out);
    st = ask_sample(e, value, max_tokens < room ? max_tokens : room);
out:
    return st;
}

static enum status take_sampled(struct episode *e, const json_t *line, struct bytes *out)
{
    struct completion sampled = {0};
    enum status st;
    CHECK(rollout_check_line("response to " ROLLOUTS, line));
    CHECK(rollout_read(&e->pull->asked, &e->ask, "response to " ROLLOUTS, line, &sampled));
    CHECK(sampled_turns_add(&e->turns, &e->prompt, &sampled));
    st = put_line(
        out, e->id, "sampled",
        json_pack("{s:O*, s:O*, s:O*, s:O*, s:O*}", "token_ids", json_object_get(line, "token_ids"),
                  "logprobs", json_object_get(line, "logprobs"), "weight_versions",
                  json_object_get(line, "weight_versions"), "finish_reason",
                  json_object_get(line, "finish_reason"), "text", json_object_get(line, "text")));
out:
    return st;
}

// ---- text ---------------------------------------------------------------------------------------

static enum status take_tokenize(struct episode *e, const json_t *value, struct bytes *out)
{
    (void)out;
    if (!json_is_object(value))
        return status_fail(ST_FORMAT, "it is no object, as POST " TOKENIZE " takes it");
    e->body = json_incref((json_t *)value);
    e->sampling = false;
    return ST_OK;
}

static enum status take_tokenized(struct episode *e, const json_t *response, struct bytes *out)
{
    json_t *tokens = json_object_get(response, "tokens");
    if (!json_is_array(tokens))
        return status_fail(ST_IO, "response to " TOKENIZE ": it has no \"tokens\"");
    return put_line(out, e->id, "tokenized", json_incref(tokens));
}

// ---- calls of tools -----------------------------------------------------------------------------

static struct journal_place place_of(const struct episode *e)
{
    return (struct journal_place){episode_example(e)->line, e->pull->step->first_group + e->group,
                                  e->sample, e->n_calls};
}

static enum status take_call(struct episode *e, const json_t *value, struct bytes *out)
{
    const struct journal_place place = place_of(e);
    struct journal *journal = e->pull->step->journal;
    json_t *result = journal ? journal_find(journal, &place, value) : NULL;
    if (result) {
        e->n_calls++;
        e->n_replayed++;
    } else {
        e->call = json_incref((json_t *)value);
    }
    return put_line(out, e->id, "called",
                    result ? json_pack("{s:O}", "result", result) : json_object());
}

static enum status take_result(struct episode *e, const json_t *value, struct bytes *out)
{
    const struct journal_place place = place_of(e);
    struct journal *journal = e->pull->step->journal;
    enum status st = ST_OK;
    if (!e->call) FAIL(ST_FORMAT, "a result where no call came before it");
    if (journal) CHECK(journal_keep(journal, &place, e->call, value));
    json_decref(e->call);
    e->call = NULL;
    e->n_calls++;
    st = put_line(out, e->id, "kept", json_boolean(journal != NULL));
out:
    return st;
}

// ---- the end ------------------------------------------------------------------------------------

static enum status take_trajectory(struct episode *e, const json_t *value, struct bytes *out)
{
    const struct trajectory_bounds bounds = {e->pull->step->via.vocab_size, e->pull->max_tokens,
                                             e->pull->asked.oldest};
    (void)out;
    enum status st = trajectory_read(value, &e->turns, &bounds, &e->made);
    e->done = st == ST_OK;
    return st;
}

static enum status take_error(struct episode *e, const json_t *value, struct bytes *out)
{
    (void)e;
    (void)out;
    return status_fail(ST_INVALID, "it says: %s",
                       json_is_string(value) ? json_string_value(value) : "that it cannot go on");
}

static const struct {
    const char *kind;
    enum status (*take)(struct episode *e, const json_t *value, struct bytes *out);
    bool within_call; // may come while a result is due
} kinds[] = {
    {"sample", take_sample, false},
    {"tokenize", take_tokenize, false},
    {"call", take_call, false},
    {"result", take_result, true},
    {"trajectory", take_trajectory, false},
    {"error", take_error, true},
};

enum status episode_take(struct episode *e, const char *kind, const json_t *value,
                         struct bytes *out)
{
    const size_t n = sizeof kinds / sizeof *kinds;
    size_t k = 0;
    enum status st = ST_OK;
    while (k < n && strcmp(kinds[k].kind, kind) != 0) k++;
    if (k == n)
        FAIL(ST_FORMAT, "\"%s\" is none of sample, tokenize, call, result, trajectory, error",
             kind);
    if (e->body) FAIL(ST_FORMAT, "a line while the reply to the last one is due");
    if (e->call && !kinds[k].within_call)
        FAIL(ST_FORMAT, "\"%s\" where the result of a call is due", kind);
    st = status_context(kinds[k].take(e, value, out), "%s", kind);
out:
    return st;
}

// ---- the server ---------------------------------------------------------------------------------

enum status episode_advance(struct episode *e, struct bytes *out, bool *ret_childs)
{
    struct rollout_pull *asked = &e->pull->asked;
    struct bytes text = BYTES_INIT;
    json_t *response = NULL;
    enum status st;
    *ret_childs = false;
    if (!e->body) return ST_OK;
    if (!e->ask.transfer) {
        if (asked->in_flight >= MAX_REQUESTS || !rollout_choose(asked, &e->ask)) return ST_OK;
        const struct http_call call = {.path = e->sampling ? ROLLOUTS : TOKENIZE,
                                       .post = true,
                                       .body = e->body,
                                       .timeout_ms = clock_ms_until(asked->deadline)};
        return rollout_ask(asked, &e->ask, &call);
    }
    if (!rollout_finish(asked, &e->ask, &text, &st)) return ST_OK;
    *ret_childs = st == ST_INVALID;
    if (st != ST_OK && st != ST_INVALID && st != ST_NO_MEMORY) {
        st = rollout_again(asked, &e->ask, false, st);
        goto out;
    }
    json_decref(e->body);
    e->body = NULL;
    if (st != ST_OK) goto out;
    CHECK(json_parse(e->sampling ? "response to " ROLLOUTS : "response to " TOKENIZE,
                     bytes_text(&text), text.len, &response));
    st = (e->sampling ? take_sampled : take_tokenized)(e, response, out);
out:
    json_decref(response);
    bytes_release(&text);
    return st;
}
