/* scoring.c: the stage of the loop between rollout and learning. The trainer's thread.
 *
 * Plain, a reward is the weighted sum of its terms. With --reward-normalise terms each term is
 * first put on the same footing, its z-score within the group, so that milliseconds in the hundreds
 * do not drown an accuracy of 0 or 1; the sum is then divided by its deviation over the batch.
 */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/rollout/scoring.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void scores_release(struct scores *s)
{
    free(s->rewards);
    free(s->terms);
    free(s->costs);
    free(s->advantages);
    *s = (struct scores){0};
}

static enum status at_sample(enum status st, const char *data, const struct rollout *r, int i)
{
    return status_context(st, "%s, line %d, sample %d", data, r->examples[i / r->n_per_group]->line,
                          i % r->n_per_group);
}

// One completion, made of the first line's own answer, by every term: a scorer that cannot score is
// found before anything is replaced or sampled.
static enum status try_answer(struct reward *reward, const struct dataset *data)
{
    const struct example *e = &data->examples[0];
    double terms[REWARD_MAX_TERMS], sum;
    struct completion completion = {.n = e->answer_ids.n,
                                    .ids = e->answer_ids.ids,
                                    .text = (char *)(e->answer ? e->answer : "")};
    const struct rollout rollout = {
        .n_groups = 1, .n_per_group = 1, .examples = &e, .completions = &completion};
    completion.telemetry =
        json_pack("{s:i, s:i, s:i, s:f, s:f, s:f, s:i, s:i, s:i, s:i, s:[], s:n, s:n, s:i, s:i}",
                  "prompt_tokens", e->prompt_ids.n, "cached_prompt_tokens", 0, "generated_tokens",
                  completion.n, "queue_ms", 0.0, "first_token_ms", 0.0, "latency_ms", 0.0,
                  "kv_bytes_peak", 0, "num_drafts", 0, "num_draft_tokens", 0, "num_accepted_tokens",
                  0, "num_accepted_tokens_per_pos", "accept_rate", "mean_acceptance_length",
                  "weight_version_first", 0, "weight_version_last", 0);
    enum status st = completion.telemetry
                         ? scoring_task(reward, data->path, &rollout, terms, &sum)
                         : status_fail(ST_NO_MEMORY, "no memory to try the reward");
    json_decref(completion.telemetry);
    return status_context(st,
                          "the reward was tried on the first line's own answer, before anything "
                          "is sampled");
}

enum status scoring_check(struct reward *reward, const struct dataset *data)
{
    enum status st = reward_info(reward)->needs_answer ? dataset_require_answers(data) : ST_OK;
    for (int i = 0; st == ST_OK && i < data->n; i++) {
        const struct example *e = &data->examples[i];
        st = reward_check_row(reward, e->answer, e->row);
        status_context(st, "%s, line %d", data->path, e->line);
    }
    if (st == ST_OK) st = reward_check(reward);
    return st == ST_OK && data->n > 0 ? try_answer(reward, data) : st;
}

enum status scoring_task(struct reward *reward, const char *data, const struct rollout *r,
                         double *ret_terms, double *ret_sums)
{
    const int n = r->n_groups * r->n_per_group;
    int failed = 0;
    struct reward_input *inputs = malloc((size_t)n * sizeof *inputs);
    if (!inputs) return status_fail(ST_NO_MEMORY, "no memory to score %d samples", n);
    for (int i = 0; i < n; i++) {
        const struct completion *completion = &r->completions[i];
        const struct example *example = r->examples[i / r->n_per_group];
        inputs[i] = (struct reward_input){
            .text = completion->text,
            .answer = example->answer,
            .n_tokens = completion->n,
            .ids = completion->ids,
            .truncated = completion->truncated,
            .telemetry = completion->telemetry,
            .prompt = example->prompt_json,
            .row = example->row,
            .environment = completion_reward(completion),
            .group = i / r->n_per_group,
            .group_size = r->n_per_group,
        };
    }
    enum status st = reward_score_all(reward, inputs, n, ret_terms, ret_sums, &failed);
    free(inputs);
    return at_sample(st, data, r, failed);
}

// Mean acceptance rate of the drafted among n samples; `none` where there is no such.
static double drafted_mean(const struct completion_cost *costs, int n, double none)
{
    double sum = 0;
    int drafted = 0;
    for (int i = 0; i < n; i++) {
        if (!costs[i].drafted) continue;
        sum += costs[i].accept_rate;
        drafted++;
    }
    return drafted ? sum / drafted : none;
}

static enum status read_costs(const struct scoring *how, const struct rollout *r, struct scores *s)
{
    enum status st = ST_OK;
    size_t n = (size_t)s->n;
    struct completion_cost *costs = malloc(n * sizeof *costs);
    s->costs = malloc(n * COST_TERMS * sizeof *s->costs);
    if (!costs || !s->costs) FAIL(ST_NO_MEMORY, "no memory for the costs of %d samples", s->n);
    for (int i = 0; i < s->n; i++) {
        CHECK(at_sample(cost_read(r->completions[i].telemetry, &costs[i]), how->data, r, i));
        s->n_undrafted += !costs[i].drafted;
    }
    // Whether to draft is the server's choice: a sample that had none is neither better nor worse
    // for it than the others of its group. It takes their mean, or, where none of them was drafted
    // for, the step's.
    const double step_mean = drafted_mean(costs, s->n, 0);
    for (int g = 0; g < r->n_groups; g++) {
        struct completion_cost *group = costs + (size_t)g * r->n_per_group;
        const double mean = drafted_mean(group, r->n_per_group, step_mean);
        for (int i = 0; i < r->n_per_group; i++)
            if (!group[i].drafted) group[i].accept_rate = mean;
    }
    if (how->latency) {
        for (int i = 0; i < s->n; i++) latency_model_add(how->latency, &costs[i]);
        latency_model_fit(how->latency);
    }
    for (int i = 0; i < s->n; i++) {
        double quantities[COST_TERMS];
        cost_quantities(&costs[i],
                        how->latency ? latency_model_ms(how->latency, &costs[i])
                                     : costs[i].latency_ms,
                        quantities);
        for (int k = 0; k < COST_TERMS; k++) {
            s->costs[(size_t)k * n + (size_t)i] = quantities[k];
            s->rewards[i] += cost_signed_weight(how->weights, k) * quantities[k];
        }
    }
out:
    free(costs);
    return st;
}

// Weight times z-score of one term (n_groups, n_per_group), added to ret_sums.
static void add_z_scores(const double *term, double weight, int n_groups, int n_per_group,
                         double *ret_sums)
{
    double largest = 0;
    for (int i = 0; i < n_groups * n_per_group; i++) largest = fmax(largest, fabs(term[i]));
    for (int g = 0; g < n_groups; g++) {
        const double *x = term + (size_t)g * n_per_group;
        double *sums = ret_sums + (size_t)g * n_per_group, mean, std;
        mean_std(x, n_per_group, &mean, &std);
        if (std <= SCORING_NOISE * largest) continue;
        for (int i = 0; i < n_per_group; i++)
            if (!isnan(x[i])) sums[i] += weight * (x[i] - mean) / std;
    }
}

void scoring_normalise(const double *terms, const double *weights, int n_terms, int n_groups,
                       int n_per_group, double *ret_sums)
{
    size_t n = (size_t)n_groups * n_per_group;
    memset(ret_sums, 0, n * sizeof *ret_sums);
    for (int k = 0; k < n_terms; k++)
        add_z_scores(terms + (size_t)k * n, weights[k], n_groups, n_per_group, ret_sums);
}

static enum status normalised_advantages(const struct scoring *how, const struct rollout *r,
                                         struct scores *s)
{
    double weights[REWARD_MAX_TERMS], costs[COST_TERMS];
    struct advantage_stats stats;
    size_t n = (size_t)s->n;
    double *sums = malloc(2 * n * sizeof *sums);
    if (!sums) return status_fail(ST_NO_MEMORY, "no memory for %d rewards", s->n);
    for (int k = 0; k < s->n_terms; k++) weights[k] = reward_info(how->reward)->terms[k].weight;
    for (int k = 0; s->costs && k < COST_TERMS; k++) costs[k] = cost_signed_weight(how->weights, k);
    scoring_normalise(s->terms, weights, s->n_terms, r->n_groups, r->n_per_group, sums);
    if (s->costs) {
        scoring_normalise(s->costs, costs, COST_TERMS, r->n_groups, r->n_per_group, sums + n);
        for (size_t i = 0; i < n; i++) sums[i] += sums[n + i];
    }
    for (size_t i = 0; i < n; i++)
        if (isnan(s->rewards[i])) sums[i] = NAN;
    advantage_estimate(&(struct advantage_config){.scale = SCALE_BATCH}, sums, NULL, NULL,
                       r->n_groups, r->n_per_group, &stats, s->advantages);
    s->stats.frac_zero_std = stats.frac_zero_std;
    s->stats.mean = stats.mean;
    s->stats.std = stats.std;
    free(sums);
    return ST_OK;
}

enum status scoring_again(const struct scoring *how, const struct rollout *r, struct scores *s)
{
    int *n_tokens = calloc((size_t)s->n + 1, sizeof *n_tokens);
    if (!n_tokens) return status_fail(ST_NO_MEMORY, "no memory for %d advantages", s->n);
    for (int i = 0; i < s->n; i++)
        for (int t = 0; t < r->completions[i].n; t++)
            n_tokens[i] += token_author(r->completions[i].authors, t) == AUTHOR_POLICY;
    advantage_estimate(&how->advantage, s->rewards, n_tokens, NULL, r->n_groups, r->n_per_group,
                       &s->stats, s->advantages);
    free(n_tokens);
    return how->normalise_terms ? normalised_advantages(how, r, s) : ST_OK;
}

enum status scoring_rollout(const struct scoring *how, const struct rollout *r, struct scores *ret)
{
    enum status st = ST_OK;
    struct scores s = {.n = r->n_groups * r->n_per_group, .n_terms = reward_info(how->reward)->n};
    size_t n = (size_t)s.n;
    s.rewards = malloc(n * sizeof *s.rewards);
    s.terms = malloc(n * (size_t)s.n_terms * sizeof *s.terms);
    s.advantages = malloc(n * sizeof *s.advantages);
    if (!s.rewards || !s.terms || !s.advantages)
        FAIL(ST_NO_MEMORY, "no memory for %d rewards", s.n);
    CHECK(scoring_task(how->reward, how->data, r, s.terms, s.rewards));
    if (how->cost) CHECK(read_costs(how, r, &s));
    CHECK(scoring_again(how, r, &s));
    *ret = s;
out:
    if (st != ST_OK) scores_release(&s);
    return st;
}

// ---- rewards of turns ---------------------------------------------------------------------------

static int rewards_of(const struct completion *c)
{
    return c->n_rewards > 1 ? c->n_rewards : 1;
}

enum status scoring_turns(const struct scoring *how, struct rollout *r, struct scores *s)
{
    enum status st = ST_OK;
    struct advantage_stats stats;
    double *rewards = NULL;
    float *advantages = NULL;
    int *first = calloc((size_t)r->n_groups + 1, sizeof *first), n = 0;
    if (!first) return status_fail(ST_NO_MEMORY, "no memory for %d groups", r->n_groups);
    for (int i = 0; i < s->n; i++)
        first[i / r->n_per_group + 1] = n += rewards_of(&r->completions[i]);
    if (n == s->n) goto out; // one each
    if (how->normalise_terms)
        FAIL(ST_UNSUPPORTED, "--reward-normalise terms: an environment gave \"rewards\" of turns, "
                             "and terms are of whole samples; let it give one \"reward\"");
    if (how->advantage.estimator != ADVANTAGE_GRPO)
        FAIL(ST_UNSUPPORTED,
             "--advantage-estimator %s: an environment gave \"rewards\" of turns, "
             "whose advantages are grpo's; let it give one \"reward\"",
             advantage_estimator_names[how->advantage.estimator]);
    rewards = calloc((size_t)n, sizeof *rewards);
    advantages = calloc((size_t)n, sizeof *advantages);
    if (!rewards || !advantages) FAIL(ST_NO_MEMORY, "no memory for %d rewards", n);
    for (int i = 0, at = 0; i < s->n; at += rewards_of(&r->completions[i++])) {
        const struct completion *c = &r->completions[i];
        const int last = rewards_of(c) - 1; // has all else that the sample's reward is made of
        double before = 0;
        for (int k = 0; k < last; k++) before += rewards[at + k] = c->rewards[k].reward;
        rewards[at + last] = s->rewards[i] - before;
    }
    advantage_estimate(&(struct advantage_config){.scale = how->advantage.scale}, rewards, NULL,
                       first, r->n_groups, 0, &stats, advantages);
    for (int i = 0, at = 0; i < s->n; at += rewards_of(&r->completions[i++])) {
        struct completion *c = &r->completions[i];
        free(c->advantages);
        c->advantages = calloc((size_t)c->n + 1, sizeof *c->advantages);
        if (!c->advantages) FAIL(ST_NO_MEMORY, "no memory for %d advantages", c->n);
        s->advantages[i] = 0;
        for (int k = 0; k < rewards_of(c); k++) {
            s->advantages[i] += advantages[at + k];
            for (int t = 0; t < c->n; t++)
                if (c->n_rewards <= 1 || c->rewards[k].after > t)
                    c->advantages[t] += advantages[at + k];
        }
    }
    s->stats.frac_zero_std = stats.frac_zero_std;
    s->stats.mean = stats.mean;
    s->stats.std = stats.std;
out:
    free(first);
    free(rewards);
    free(advantages);
    return st;
}
