/* trajectory.c: what an environment returns, told by what was sampled for it. Stateless. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/rollout/trajectory.h"
#include "common/base/bytes.h"
#include "common/base/json.h"
#include "common/base/names.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- turns --------------------------------------------------------------------------------------

void sampled_turns_release(struct sampled_turns *turns)
{
    for (int k = 0; k < turns->n; k++) {
        token_list_release(&turns->items[k].prompt);
        completion_release(&turns->items[k].sampled);
    }
    free(turns->items);
    *turns = (struct sampled_turns){0};
}

enum status sampled_turns_add(struct sampled_turns *turns, struct token_list *prompt,
                              struct completion *sampled)
{
    struct sampled_turn *items = array_room(turns->items, (size_t)turns->n, sizeof *items);
    if (items) {
        turns->items = items;
        items[turns->n++] = (struct sampled_turn){*prompt, *sampled};
    } else {
        token_list_release(prompt);
        completion_release(sampled);
    }
    *prompt = (struct token_list){0};
    *sampled = (struct completion){0};
    return items ? ST_OK : status_fail(ST_NO_MEMORY, "no memory for a turn");
}

// Tokens that both begin with.
static int common(const int32_t *a, int n_a, const int32_t *b, int n_b)
{
    int n = 0;
    while (n < n_a && n < n_b && a[n] == b[n]) n++;
    return n;
}

// Up to where a sequence is the turn's prompt and what was sampled behind it.
static int follows(const struct sampled_turn *t, const int32_t *ids, int n)
{
    const int prompt = common(t->prompt.ids, t->prompt.n, ids, n);
    if (prompt < t->prompt.n) return prompt;
    return prompt + common(t->sampled.ids, t->sampled.n, ids + prompt, n - prompt);
}

static int end_of(const struct sampled_turn *t)
{
    return t->prompt.n + t->sampled.n;
}

bool sampled_turns_repeat(const struct sampled_turns *turns, const struct token_list *prompt,
                          int *ret_at)
{
    if (turns->n == 0) return true;
    const struct sampled_turn *last = &turns->items[turns->n - 1];
    *ret_at = follows(last, prompt->ids, prompt->n);
    return *ret_at == end_of(last);
}

// ---- fields -------------------------------------------------------------------------------------

enum status trajectory_check_fields(const json_t *object, const char *const names[])
{
    const char *key;
    const json_t *value;
    if (!json_is_object(object)) return status_fail(ST_FORMAT, "it is not an object");
    json_object_foreach ((json_t *)object, key, value) {
        if (name_find(names, key) < 0)
            return status_fail(ST_INVALID, "field \"%s\" is not known here", key);
    }
    return ST_OK;
}

enum status trajectory_read_ids(const json_t *object, const char *field, int vocab_size,
                                struct token_list *ret)
{
    const struct number_list how = {field,      NUMBER_I32,
                                    0,          vocab_size - 1,
                                    ST_INVALID, "is not an id below the vocabulary's size"};
    const json_t *list = json_object_get(object, field);
    const int n = (int)json_array_size(list);
    int32_t *ids;
    if (n == 0) return status_fail(ST_FORMAT, "field \"%s\" is not a list of token ids", field);
    enum status st = json_read_numbers(list, &how, n, &ids);
    if (st == ST_OK) *ret = (struct token_list){.ids = ids, .n = n};
    return st;
}

// ends: of each turn, how many tokens there are up to it; NULL: as they stand in the trajectory.
static enum status read_rewards(const json_t *value, const struct sampled_turns *turns,
                                const int *ends, struct completion *c)
{
    const json_t *reward = json_object_get(value, "reward"),
                 *rewards = json_object_get(value, "rewards");
    if (!reward == !rewards)
        return status_fail(ST_FORMAT, "it needs \"reward\" or \"rewards\", and not both");
    if (rewards && (turns->n == 0 || json_array_size(rewards) != (size_t)turns->n))
        return status_fail(ST_FORMAT, "field \"rewards\" has %zu entries for %d turns",
                           json_array_size(rewards), turns->n);
    c->n_rewards = rewards ? turns->n : 1;
    c->rewards = calloc((size_t)c->n_rewards, sizeof *c->rewards);
    if (!c->rewards) return status_fail(ST_NO_MEMORY, "no memory for rewards");
    for (int k = 0; k < c->n_rewards; k++) {
        const json_t *one = rewards ? json_array_get(rewards, (size_t)k) : reward;
        const struct sampled_turn *turn = rewards ? &turns->items[k] : NULL;
        if (!json_is_number(one) || !isfinite(json_number_value(one)))
            return status_fail(ST_FORMAT, "field \"%s\": %d is not a finite number",
                               rewards ? "rewards" : "reward", k);
        if (turn && !ends && follows(turn, c->ids, c->n) != end_of(turn))
            return status_fail(ST_MISMATCH,
                               "field \"rewards\": turn %d does not stand in the trajectory", k);
        c->rewards[k].reward = json_number_value(one);
        c->rewards[k].after = !turn ? c->n : ends ? ends[k] : end_of(turn);
    }
    return ST_OK;
}

// ---- the whole ----------------------------------------------------------------------------------

// Log-probabilities, versions and authors of what a turn sampled, from the first token's place on.
static void fill_from(const struct sampled_turn *turn, int first, struct completion *c)
{
    for (int t = 0; t < turn->sampled.n; t++) {
        const int at = first + t;
        c->logprobs[at] = turn->sampled.logprobs[t];
        if (turn->sampled.processed) c->processed[at] = turn->sampled.processed[t];
        c->versions[at] = turn->sampled.versions[t];
        if (c->authors[at]) c->authors[at] = (uint8_t)token_author(turn->sampled.authors, t);
    }
}

// Of those turns that stand in it. ret_from: (n) whether one did.
static void fill_from_turns(const struct sampled_turns *turns, struct completion *c,
                            uint8_t *ret_from)
{
    for (int k = 0; k < turns->n; k++) {
        const struct sampled_turn *turn = &turns->items[k];
        if (follows(turn, c->ids, c->n) != end_of(turn)) continue;
        fill_from(turn, turn->prompt.n, c);
        memset(ret_from + turn->prompt.n, 1, (size_t)turn->sampled.n);
    }
}

// The environment's tokens have no weights of their own: they count as of those before them. from:
// NULL where all others are what a turn sampled.
static enum status settle_tokens(const struct trajectory_bounds *bounds, const uint8_t *from,
                                 struct completion *c)
{
    const int first = completion_first_sampled(c);
    uint64_t version = first < c->n ? c->versions[first] : bounds->version;
    for (int t = 0; t < c->n; t++) {
        const bool sampled = c->authors[t] != AUTHOR_OTHER;
        if (sampled && from && !from[t])
            return status_fail(ST_MISMATCH,
                               "field \"mask\": token %d is not the policy's: no turn sampled it "
                               "there, behind the tokens before it",
                               t);
        if (sampled) version = c->versions[t];
        if (!sampled) c->logprobs[t] = 0;
        c->versions[t] = version;
    }
    return ST_OK;
}

// Of its n tokens.
static enum status alloc_lists(const struct sampled_turns *turns, struct completion *c)
{
    const size_t n = (size_t)c->n + 1;
    bool filtered = false;
    for (int k = 0; k < turns->n; k++) filtered |= turns->items[k].sampled.processed != NULL;
    c->logprobs = calloc(n, sizeof *c->logprobs);
    c->versions = calloc(n, sizeof *c->versions);
    if (filtered) c->processed = calloc(n, sizeof *c->processed);
    return c->logprobs && c->versions && (c->processed || !filtered)
               ? ST_OK
               : status_fail(ST_NO_MEMORY, "no memory for %d tokens", c->n);
}

static enum status read_tokens(const json_t *value, const struct sampled_turns *turns,
                               const struct trajectory_bounds *bounds, struct completion *c)
{
    // who wrote each token: the policy, 1, or somebody else, 0
    static const struct number_list mask = {"mask",        NUMBER_U8, AUTHOR_OTHER,
                                            AUTHOR_POLICY, ST_FORMAT, "is neither 0 nor 1"};
    struct token_list ids = {0};
    uint8_t *from = NULL;
    enum status st;
    CHECK(trajectory_read_ids(value, "token_ids", bounds->vocab_size, &ids));
    c->ids = ids.ids;
    c->n = ids.n;
    if (c->n > bounds->max_tokens)
        FAIL(ST_TOO_LONG, "it has %d tokens, over the episode's \"max_tokens\", %d", c->n,
             bounds->max_tokens);
    CHECK(alloc_lists(turns, c));
    if (!(from = calloc((size_t)c->n, 1))) FAIL(ST_NO_MEMORY, "no memory for %d tokens", c->n);
    CHECK(json_read_numbers(json_object_get(value, "mask"), &mask, c->n, &c->authors));
    if (c->authors[0])
        FAIL(ST_FORMAT, "field \"mask\": the first token has nothing before it that the policy "
                        "could have sampled it behind");
    fill_from_turns(turns, c, from);
    CHECK(settle_tokens(bounds, from, c));
out:
    free(from);
    return st;
}

// ---- of turns -----------------------------------------------------------------------------------

static void put_ids(int32_t *to, int *n, const int32_t *ids, int n_ids)
{
    memcpy(to + *n, ids, (size_t)n_ids * sizeof *ids);
    *n += n_ids;
}

// Its prompt goes on behind the turn added last, or is the context of a part of its own. NULL: none
// was added.
static void add_turn(const struct sampled_turn *turn, const struct sampled_turn *last,
                     struct completion *c)
{
    const bool goes_on = last && follows(last, turn->prompt.ids, turn->prompt.n) == end_of(last);
    const int before = goes_on ? end_of(last) : turn->prompt.n; // what comes then is read
    int n = c->n;
    if (!goes_on) {
        c->parts[c->n_parts++] = (struct pack_part){n, c->n_sequences, before};
        put_ids(c->sequences, &c->n_sequences, turn->prompt.ids, before);
    }
    put_ids(c->ids, &n, turn->prompt.ids + before, turn->prompt.n - before);
    memset(c->authors + n, AUTHOR_POLICY, (size_t)turn->sampled.n);
    fill_from(turn, n, c);
    put_ids(c->ids, &n, turn->sampled.ids, turn->sampled.n);
    put_ids(c->sequences, &c->n_sequences, c->ids + c->n, n - c->n);
    c->n = n;
}

// {"turns"}: 1 for those that are learned from. ret_ends: (turns->n) tokens up to each.
static enum status read_turns(const json_t *value, const struct sampled_turns *turns,
                              const struct trajectory_bounds *bounds, struct completion *c,
                              int *ret_ends)
{
    static const struct number_list choice = {"turns", NUMBER_U8, 0,
                                              1,       ST_FORMAT, "is neither 0 nor 1"};
    const json_t *list = json_object_get(value, "turns");
    const struct sampled_turn *last = NULL;
    uint8_t *learned = NULL;
    enum status st = ST_OK;
    if (json_array_size(list) != (size_t)turns->n)
        FAIL(ST_FORMAT, "field \"turns\" has %zu entries for %d turns", json_array_size(list),
             turns->n);
    CHECK(json_read_numbers(list, &choice, turns->n, &learned));
    for (int k = 0; k < turns->n; k++) c->n += learned[k] ? end_of(&turns->items[k]) : 0;
    CHECK(alloc_lists(turns, c)); // as if none went on
    c->ids = calloc((size_t)c->n + 1, sizeof *c->ids);
    c->authors = calloc((size_t)c->n + 1, sizeof *c->authors);
    c->sequences = calloc((size_t)c->n + 1, sizeof *c->sequences);
    c->parts = calloc((size_t)turns->n + 1, sizeof *c->parts);
    if (!c->ids || !c->authors || !c->parts || !c->sequences)
        FAIL(ST_NO_MEMORY, "no memory for %d tokens", c->n);
    c->n = 0;
    for (int k = 0; k < turns->n; k++) {
        const struct sampled_turn *turn = &turns->items[k];
        if (learned[k] && turn->sampled.n > 0) add_turn(turn, last, c), last = turn;
        ret_ends[k] = c->n;
    }
    if (c->n_parts == 0) completion_keep_parts(c, 0);
    st = settle_tokens(bounds, NULL, c);
out:
    free(learned);
    return st;
}

// New reference; NULL: no memory.
static json_t *sum_telemetry(const struct sampled_turns *turns)
{
    static const char *const summed[] = {
        "prompt_tokens",    "cached_prompt_tokens", "generated_tokens",
        "queue_ms",         "latency_ms",           "num_drafts",
        "num_draft_tokens", "num_accepted_tokens",  "kv_bytes_peak"}; // of the last: the largest
    enum { N = sizeof summed / sizeof *summed };
    double values[N] = {0};
    for (int k = 0; k < turns->n; k++)
        for (int i = 0; i < N; i++) {
            const json_t *telemetry = turns->items[k].sampled.telemetry;
            const double x = json_number_value(json_object_get(telemetry, summed[i]));
            values[i] = i == N - 1 ? fmax(values[i], x) : values[i] + x;
        }
    json_t *sums = json_object();
    for (int i = 0; i < N; i++) json_object_set_new(sums, summed[i], json_real(values[i]));
    const double drafted = values[6], accepted = values[7];
    json_object_set_new(sums, "accept_rate",
                        drafted > 0 ? json_real(accepted / drafted) : json_null());
    return sums;
}

enum status trajectory_read(const json_t *value, const struct sampled_turns *turns,
                            const struct trajectory_bounds *bounds, struct completion *ret)
{
    static const char *const fields[] = {"token_ids", "mask", "turns", "reward", "rewards", NULL};
    const bool of_turns = json_has(value, "turns");
    struct completion c = {0};
    struct bytes text = BYTES_INIT;
    int *ends = NULL;
    enum status st;
    CHECK(trajectory_check_fields(value, fields));
    if (of_turns && (json_has(value, "token_ids") || json_has(value, "mask")))
        FAIL(ST_FORMAT, "\"turns\" stands in place of \"token_ids\" and \"mask\"");
    if (of_turns && !(ends = calloc((size_t)turns->n + 1, sizeof *ends)))
        FAIL(ST_NO_MEMORY, "no memory for turns");
    CHECK(of_turns ? read_turns(value, turns, bounds, &c, ends)
                   : read_tokens(value, turns, bounds, &c));
    CHECK(read_rewards(value, turns, ends, &c));
    c.truncated = turns->n > 0 && turns->items[turns->n - 1].sampled.truncated;
    c.telemetry = sum_telemetry(turns);
    bytes_puts(&text, "");
    for (int k = 0; k < turns->n; k++)
        bytes_printf(&text, "%s%s", k ? "\n" : "", turns->items[k].sampled.text);
    c.text = text.data;
    if (!c.telemetry || text.failed) FAIL(ST_NO_MEMORY, "no memory for a trajectory");
    *ret = c;
out:
    free(ends);
    if (st != ST_OK) completion_release(&c);
    return st;
}

// ---- groups -------------------------------------------------------------------------------------

// What it begins with before the first token that a model wrote: the k-th of its parts; ret_n -1:
// there is no k-th.
static const int32_t *read_first(const struct completion *c, int k, int *ret_n)
{
    const int parts = c->parts ? c->n_parts : c->n > 0;
    *ret_n = k >= parts ? -1 : c->parts ? c->parts[k].n_context : completion_first_sampled(c);
    return c->parts && k < parts ? c->sequences + c->parts[k].begin : c->ids;
}

enum status trajectory_cut(struct completion *group, int n, struct token_list *ret_prompt)
{
    struct token_list prompt = {0};
    const int32_t *begin = NULL;
    int shared = 0, read;
    enum status st = ST_OK;
    for (int i = 0; i < n; i++)
        for (int k = 0;; k++) {
            const int32_t *ids = read_first(&group[i], k, &read);
            if (read < 0) break;
            shared = begin ? common(begin, shared, ids, read) : read;
            if (!begin) begin = ids;
        }
    if (!begin) goto out; // nothing is learned from
    if (shared == 0)
        FAIL(ST_MISMATCH, "its trajectories begin with different tokens; those of a group are "
                          "compared with each other, and must begin with the same one at least");
    for (int t = 0; t < shared; t++) CHECK(token_list_push(&prompt, begin[t]));
    for (int i = 0; i < n; i++) completion_cut(&group[i], shared);
    *ret_prompt = prompt;
out:
    if (st != ST_OK) token_list_release(&prompt);
    return st;
}
