/* atropos_batch.c: one response of GET /batch. Stateless. */
#include "trainer/rollout/source.h"
#include "common/base/json.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NOT_TRAINED (-100) // in "masks": torch's ignore_index

struct sequence {
    struct token_list prompt;
    struct completion completion;
    double score;
    bool no_advantage; // set_advantage_to_zero
};

struct reader {
    const char *where;
    const struct atropos_bounds *bounds;
    int n_groups, n;            // of the environments; sequences in all
    int *first;                 // (n_groups + 1) of each group
    struct sequence *sequences; // (n)
};

struct place { // in the batch, for errors
    const struct reader *reader;
    const json_t *group;
    int number, sequence;
};

static enum status say(struct place *p, enum status st)
{
    return status_context(st, "%s, group %d, sequence %d", p->reader->where, p->number,
                          p->sequence);
}

// BaseEnv sends [] of what no sequence has.
static bool is_given(const struct place *p, const char *field)
{
    const json_t *value = json_object_get(p->group, field);
    return json_has(p->group, field) && !(json_is_array(value) && json_array_size(value) == 0);
}

// Entry i of a field of lists with one a sequence; NULL where the field is null or missing.
static enum status list_of(const struct place *p, const char *field, const json_t **ret)
{
    const json_t *all = json_object_get(p->group, field);
    const json_t *list = json_array_get(all, (size_t)p->sequence);
    *ret = NULL;
    if (!is_given(p, field)) return ST_OK;
    if (!json_is_array(list))
        return status_fail(ST_FORMAT, "field \"%s\" has no list for it", field);
    *ret = list;
    return ST_OK;
}

// Of n tokens, those from `first` on.
static enum status numbers_of(const struct place *p, const char *field, int n, int first,
                              float **ret)
{
    const struct number_list how = {field,   NUMBER_F32, -FLT_MAX,
                                    FLT_MAX, ST_FORMAT,  "is not a number"};
    const json_t *list;
    enum status st = list_of(p, field, &list);
    if (st == ST_OK && list) st = numbers_read(list, &how, n, ret);
    if (st == ST_OK && list) memmove(*ret, *ret + first, (size_t)(n - first) * sizeof **ret);
    return st;
}

// ---- a sequence ---------------------------------------------------------------------------------

// The first token that is trained; n where none is.
static size_t first_trained(const json_t *masks, size_t n)
{
    size_t t = 0;
    while (t < n && json_integer_value(json_array_get(masks, t)) == NOT_TRAINED) t++;
    return t;
}

static enum status read_token(const struct place *p, const json_t *tokens, const json_t *masks,
                              size_t t, int32_t *ret_id, bool *ret_trained)
{
    const json_t *token = json_array_get(tokens, t), *mask = json_array_get(masks, t);
    const json_int_t id = json_is_integer(token) ? json_integer_value(token) : -1;
    const json_int_t label = json_is_integer(mask) ? json_integer_value(mask) : -1;
    if (id < 0 || id >= p->reader->bounds->vocab_size)
        return status_fail(ST_MISMATCH, "token %zu is not an id below the vocabulary's %d", t,
                           p->reader->bounds->vocab_size);
    if (label != NOT_TRAINED && label != id)
        return status_fail(ST_FORMAT, "field \"masks\": entry %zu is neither -100 nor its token",
                           t);
    *ret_id = (int32_t)id;
    *ret_trained = label != NOT_TRAINED;
    return ST_OK;
}

static enum status read_tokens(const struct place *p, struct sequence *s, int *ret_n,
                               int *ret_first)
{
    const json_t *tokens, *masks;
    struct completion *c = &s->completion;
    enum status st;
    CHECK(list_of(p, "tokens", &tokens));
    CHECK(list_of(p, "masks", &masks));
    const size_t n = json_array_size(tokens), first = first_trained(masks, n);
    if (!tokens || !masks) FAIL(ST_FORMAT, "\"tokens\" and \"masks\" must be there");
    if (json_array_size(masks) != n)
        FAIL(ST_FORMAT, "field \"masks\" has %zu entries for %zu tokens", json_array_size(masks),
             n);
    if (n > (size_t)p->reader->bounds->max_tokens)
        FAIL(ST_TOO_LONG, "%zu tokens, over the %d that were registered as max_token_len", n,
             p->reader->bounds->max_tokens);
    if (n == 0 || first == 0)
        FAIL(ST_FORMAT, "field \"masks\": its first token is trained, and nothing comes before it");
    c->ids = malloc((n - first + 1) * sizeof *c->ids);
    c->authors = malloc(n - first + 1);
    if (!c->ids || !c->authors) FAIL(ST_NO_MEMORY, "no memory for %zu tokens", n);
    for (size_t t = 0; t < n; t++) {
        int32_t id = 0;
        bool trained = false;
        CHECK(read_token(p, tokens, masks, t, &id, &trained));
        if (t < first) CHECK(token_list_push(&s->prompt, id));
        if (t >= first) c->ids[t - first] = id;
        if (t >= first) c->authors[t - first] = trained ? AUTHOR_POLICY : AUTHOR_OTHER;
    }
    c->n = (int)(n - first);
    completion_forget_authors(c);
    *ret_n = (int)n;
    *ret_first = (int)first;
out:
    return st;
}

// The first of these that names one: the sequence's own overrides, how its group was generated, its
// group's overrides.
static enum status check_temperature(const struct place *p, const json_t *own)
{
    const json_t *objects[] = {own, json_object_get(p->group, "generation_params"),
                               json_object_get(p->group, "group_overrides")};
    const double wanted = p->reader->bounds->temperature;
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

static enum status read_overrides(const struct place *p, struct sequence *s)
{
    const json_t *all = json_object_get(p->group, "overrides"), *value;
    const bool given = json_array_size(all) > 0;
    json_t *own = given ? json_array_get(all, (size_t)p->sequence) : NULL;
    const char *key;
    if (given && !json_is_object(own))
        return status_fail(ST_FORMAT, "field \"overrides\" has no object for it");
    json_object_foreach (own, key, value) {
        if (strcmp(key, "set_advantage_to_zero") == 0)
            s->no_advantage = json_is_true(value);
        else if (strcmp(key, "temperature") != 0)
            return status_fail(ST_UNSUPPORTED,
                               "field \"overrides\": \"%s\" is not known here; "
                               "set_advantage_to_zero and temperature are",
                               key);
    }
    return check_temperature(p, own);
}

// Sampled tokens' log-probabilities; at others there is 1.0, which no log-probability is.
static enum status check_logprobs(const struct place *p, struct sequence *s)
{
    struct completion *c = &s->completion;
    for (int t = 0; c->logprobs && t < c->n; t++) {
        if (token_author(c->authors, t) != AUTHOR_POLICY)
            c->logprobs[t] = 0;
        else if (c->logprobs[t] > 1e-3f)
            return status_fail(ST_FORMAT, "field \"inference_logprobs\": that of token %d is %g",
                               t + s->prompt.n, (double)c->logprobs[t]);
    }
    if (c->logprobs || !p->reader->bounds->needs_logprobs) return ST_OK;
    return status_fail(ST_NOT_FOUND,
                       "\"inference_logprobs\" is missing, by which the loss is weighed: let the "
                       "environment send them (its managed server does), or train with "
                       "--no-importance-sampling-correction");
}

static enum status read_sequence(const struct place *p, struct sequence *s)
{
    enum status st;
    int n, first;
    const json_t *score = json_array_get(json_object_get(p->group, "scores"), (size_t)p->sequence);
    CHECK(read_tokens(p, s, &n, &first));
    CHECK(numbers_of(p, "inference_logprobs", n, first, &s->completion.logprobs));
    CHECK(check_logprobs(p, s));
    CHECK(numbers_of(p, "advantages", n, first, &s->completion.advantages));
    CHECK(read_overrides(p, s));
    if (s->no_advantage) {
        free(s->completion.advantages);
        s->completion.advantages = NULL;
    }
    if (!json_is_number(score) || !isfinite(json_number_value(score)))
        FAIL(ST_FORMAT, "field \"scores\" has no number for it");
    s->score = json_number_value(score);
    if (!(s->completion.text = strdup(""))) FAIL(ST_NO_MEMORY, "no memory for a sequence");
out:
    return st;
}

// ---- groups -------------------------------------------------------------------------------------

static enum status check_group(const struct place *p)
{
    static const char *const refused[] = {"images", "distill_token_ids", "distill_logprobs"};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (is_given(p, refused[i]))
            return status_fail(ST_UNSUPPORTED, "field \"%s\" is not supported", refused[i]);
    return ST_OK;
}

static enum status count_sequences(struct reader *r, const json_t *batch)
{
    r->n_groups = (int)json_array_size(batch);
    r->first = calloc((size_t)r->n_groups + 1, sizeof *r->first);
    if (!r->first) return status_fail(ST_NO_MEMORY, "no memory for %d groups", r->n_groups);
    for (int g = 0; g < r->n_groups; g++) {
        const json_t *tokens = json_object_get(json_array_get(batch, (size_t)g), "tokens");
        if (json_array_size(tokens) == 0)
            return status_fail(ST_FORMAT, "%s, group %d: field \"tokens\" is not a list of lists",
                               r->where, g);
        r->first[g + 1] = r->first[g] + (int)json_array_size(tokens);
    }
    r->n = r->first[r->n_groups];
    r->sequences = calloc((size_t)r->n + 1, sizeof *r->sequences);
    return r->sequences ? ST_OK : status_fail(ST_NO_MEMORY, "no memory for %d sequences", r->n);
}

static bool same_prompt(const struct token_list *a, const struct token_list *b)
{
    return a->n == b->n && memcmp(a->ids, b->ids, (size_t)a->n * sizeof *a->ids) == 0;
}

// Sequences of each group, where all have as many and one prompt; else 1.
static int sequences_a_group(const struct reader *r)
{
    const int size = r->first[1];
    for (int g = 0; g < r->n_groups; g++) {
        if (r->first[g + 1] - r->first[g] != size) return 1;
        for (int i = r->first[g] + 1; i < r->first[g + 1]; i++)
            if (!same_prompt(&r->sequences[i].prompt, &r->sequences[i - 1].prompt)) return 1;
    }
    return size;
}

static enum status make_rollout(struct reader *r, struct rollout **ret)
{
    const int size = sequences_a_group(r), n_groups = r->n / size;
    struct rollout *rollout = NULL;
    enum status st;
    CHECK(rollout_new(n_groups, size, &rollout));
    rollout->owned = calloc((size_t)n_groups, sizeof *rollout->owned);
    if (!rollout->owned) FAIL(ST_NO_MEMORY, "no memory for %d prompts", n_groups);
    for (int i = 0; i < r->n; i++) { // what it takes over is no longer the reader's
        struct sequence *s = &r->sequences[i];
        struct example *e = &rollout->owned[i / size];
        if (i % size == 0) {
            e->line = i / size + 1;
            e->prompt_ids = s->prompt;
            s->prompt = (struct token_list){0};
            rollout->examples[i / size] = e;
        }
        rollout->completions[i] = s->completion;
        rollout->n_tokens += s->completion.n;
        s->completion = (struct completion){0};
    }
    *ret = rollout;
    rollout = NULL;
out:
    rollout_free(rollout);
    return st;
}

static enum status make_scores(const struct reader *r, struct scores *ret)
{
    struct scores s = {.n = r->n};
    enum status st = ST_OK;
    s.rewards = calloc((size_t)r->n, sizeof *s.rewards);
    s.advantages = calloc((size_t)r->n, sizeof *s.advantages);
    if (!s.rewards || !s.advantages) FAIL(ST_NO_MEMORY, "no memory for %d scores", r->n);
    for (int i = 0; i < r->n; i++) s.rewards[i] = r->sequences[i].score;
    advantage_compute(s.rewards, r->first, r->n_groups, 0, r->bounds->scale, &s.stats,
                      s.advantages);
    for (int g = 0; g < r->n_groups; g++) // a sequence alone is compared with nothing
        if (r->first[g + 1] - r->first[g] == 1)
            s.advantages[r->first[g]] = (float)s.rewards[r->first[g]];
    for (int i = 0; i < r->n; i++)
        if (r->sequences[i].no_advantage) s.advantages[i] = 0;
    *ret = s;
out:
    if (st != ST_OK) scores_release(&s);
    return st;
}

static void release(struct reader *r)
{
    for (int i = 0; r->sequences && i < r->n; i++) {
        token_list_release(&r->sequences[i].prompt);
        completion_release(&r->sequences[i].completion);
    }
    free(r->sequences);
    free(r->first);
}

enum status atropos_read_batch(const char *where, const json_t *batch,
                               const struct atropos_bounds *bounds, struct rollout **ret_rollout,
                               struct scores *ret_scores)
{
    struct reader r = {.where = where, .bounds = bounds};
    struct rollout *rollout = NULL;
    enum status st;
    if (json_array_size(batch) == 0) FAIL(ST_FORMAT, "%s: no list of groups", where);
    CHECK(count_sequences(&r, batch));
    for (int g = 0; g < r.n_groups; g++) {
        struct place p = {&r, json_array_get(batch, (size_t)g), g, 0};
        CHECK(status_context(check_group(&p), "%s, group %d", where, g));
        for (; p.sequence < r.first[g + 1] - r.first[g]; p.sequence++)
            CHECK(say(&p, read_sequence(&p, &r.sequences[r.first[g] + p.sequence])));
    }
    CHECK(make_rollout(&r, &rollout));
    CHECK(make_scores(&r, ret_scores));
    *ret_rollout = rollout;
    rollout = NULL;
out:
    rollout_free(rollout);
    release(&r);
    return st;
}
