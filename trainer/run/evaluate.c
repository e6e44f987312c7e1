/* evaluate.c: pulls answers and sums them up. The main thread.
 *
 * Prompts go out in requests of EVAL_GROUPS, enough to fill the server's batch and few enough not
 * to fill its queue while others use it. */
#include "trainer/run/evaluate.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "trainer/reward/math/number.h"
#include "trainer/rollout/rollout.h"
#include "trainer/run/runlog.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EVAL_GROUPS 64 // samples, if a prompt has no more

struct spread { // mean, and squares of the deviations from it (Welford 1962), over prompts
    int n;
    double mean, squares;
};

struct tally {
    struct reward *reward;
    int n_samples; // of a prompt
    struct spread of_reward, correct, pass[EVAL_MOST_PASS], majority;
    double n_correct, tokens, truncated;
    uint64_t weight_version;
    struct spec_counters spec;
};

static void spread_add(struct spread *s, double x)
{
    const double delta = x - s->mean;
    s->mean += delta / ++s->n;
    s->squares += delta * (x - s->mean);
}

static struct eval_figure figure_of(const struct spread *s)
{
    const int n = s->n > 0 ? s->n : 1;
    return (struct eval_figure){s->mean, sqrt(s->squares / n / n)};
}

static void count_drafts(struct tally *t, const json_t *telemetry)
{
    struct spec_counters of_sample = {
        .present = json_has(telemetry, "num_draft_tokens"),
        .num_drafts = json_number_value(json_object_get(telemetry, "num_drafts")),
        .num_draft_tokens = json_number_value(json_object_get(telemetry, "num_draft_tokens")),
        .num_accepted_tokens = json_number_value(json_object_get(telemetry, "num_accepted_tokens")),
    };
    spec_counters_add(&t->spec, &of_sample);
}

// Sample i of a rollout as a line of --output; terms: (terms, n) of the rollout.
static enum status put_line(struct bytes *ret, const struct reward *reward, const struct rollout *r,
                            int i, const double *terms, double sum)
{
    const struct completion *s = &r->completions[i];
    const struct example *e = r->examples[i / r->n_per_group];
    json_t *parts = json_object();
    for (int k = 0; parts && k < reward_terms(reward); k++)
        metrics_put(parts, reward_term_name(reward, k),
                    terms[k * r->n_groups * r->n_per_group + i]);
    json_t *line =
        json_pack("{s:i, s:O*, s:s*, s:s, s:o, s:o, s:s, s:i, s:O*}", "line", e->line, "prompt",
                  e->prompt_json, "answer", e->answer, "completion", s->text, "reward",
                  isnan(sum) ? json_null() : json_real(sum), "terms", parts, "finish_reason",
                  s->truncated ? "length" : "stop", "tokens", s->n, "telemetry", s->telemetry);
    return json_put_line(ret, line, JSON_REAL_PRECISION(9));
}

static void count_sample(struct tally *t, const struct completion *s)
{
    t->tokens += s->n;
    t->truncated += s->truncated;
    if (s->n) t->weight_version = s->versions[s->n - 1];
    count_drafts(t, s->telemetry);
}

struct vote { // of one sample: the number that its text gives as the answer, else the text itself
    bool has_number;
    double number;
    const char *text;
    int sample;
};

// Numbers by their size, then texts.
static int compare_votes(const void *a, const void *b)
{
    const struct vote *x = a, *y = b;
    if (x->has_number != y->has_number) return x->has_number ? -1 : 1;
    return x->has_number ? (x->number > y->number) - (x->number < y->number)
                         : strcmp(x->text, y->text);
}

static bool same_answer(const struct vote *a, const struct vote *b)
{
    if (a->has_number != b->has_number) return false;
    return a->has_number ? number_same(a->number, b->number) : strcmp(a->text, b->text) == 0;
}

// Whether the answer that most of n samples gave is right; of several such, how many of them are.
static double majority(const struct completion *samples, const double *correct, int n,
                       struct vote *votes)
{
    int most = 0, n_most = 0;
    double right = 0;
    for (int i = 0; i < n; i++) {
        votes[i] = (struct vote){.text = samples[i].text, .sample = i};
        votes[i].has_number = number_answer(samples[i].text, &votes[i].number);
    }
    qsort(votes, (size_t)n, sizeof *votes, compare_votes);
    for (int i = 0, end; i < n; i = end) {
        int first = votes[i].sample;
        for (end = i + 1; end < n && same_answer(&votes[i], &votes[end]); end++)
            if (votes[end].sample < first) first = votes[end].sample;
        if (end - i < most) continue;
        if (end - i > most) n_most = 0, right = 0;
        most = end - i;
        n_most++;
        right += correct[first];
    }
    return right / n_most;
}

static enum status count_correct(struct tally *t, const struct completion *samples,
                                 const double *correct)
{
    const int n = t->n_samples;
    int n_correct = 0;
    for (int i = 0; i < n; i++) n_correct += correct[i] > 0;
    t->n_correct += n_correct;
    spread_add(&t->correct, (double)n_correct / n);
    if (n == 1) return ST_OK;
    struct vote *votes = malloc((size_t)n * sizeof *votes);
    if (!votes) return status_fail(ST_NO_MEMORY, "no memory for the answers of %d samples", n);
    for (int i = 0; i < EVAL_MOST_PASS && 1 << i <= n; i++)
        spread_add(&t->pass[i], 1 - share_of_choices(n - n_correct, n, 1 << i));
    spread_add(&t->majority, majority(samples, correct, n, votes));
    free(votes);
    return ST_OK;
}

// ret_lines may be NULL.
static enum status count(struct tally *t, const char *data, const struct rollout *r,
                         struct bytes *ret_lines)
{
    const int accuracy = reward_accuracy_term(t->reward), each = r->n_per_group,
              n = r->n_groups * each;
    enum status st;
    double *rewards = malloc((size_t)n * (REWARD_MAX_TERMS + 1) * sizeof *rewards),
           *terms = rewards + n;
    if (!rewards) return status_fail(ST_NO_MEMORY, "no memory for %d rewards", n);
    CHECK(scoring_task(t->reward, data, r, terms, rewards));
    for (int i = 0; i < n; i++) {
        count_sample(t, &r->completions[i]);
        if (ret_lines) CHECK(put_line(ret_lines, t->reward, r, i, terms, rewards[i]));
    }
    for (int i = 0; i < n; i += each) {
        double mean;
        mean_std(rewards + i, each, &mean, NULL);
        if (!isnan(mean)) spread_add(&t->of_reward, mean);
        if (accuracy >= 0) CHECK(count_correct(t, &r->completions[i], terms + accuracy * n + i));
    }
out:
    free(rewards);
    return st;
}

static struct eval_result result_of(const struct tally *t, int n, int64_t start)
{
    const double all = (double)n * t->n_samples;
    const struct eval_figure reward = figure_of(&t->of_reward), correct = figure_of(&t->correct);
    struct eval_result r = {
        .n = n,
        .n_samples = t->n_samples,
        .reward = reward.mean,
        .reward_standard_error = reward.error,
        .accuracy = reward_accuracy_term(t->reward) >= 0 ? t->n_correct / all : -1,
        .standard_error = correct.error,
        .mean_length = t->tokens / all,
        .truncated = t->truncated / all,
        .seconds = clock_ms_since(start) / 1e3,
        .weight_version = t->weight_version,
        .spec = t->spec,
        .majority = figure_of(&t->majority),
    };
    for (int i = 0; i < EVAL_MOST_PASS && t->pass[i].n > 0; i++)
        r.pass[r.n_pass++] = figure_of(&t->pass[i]);
    return r;
}

enum status evaluate(const struct evaluation *e, struct bytes *ret_lines, struct eval_result *ret)
{
    struct tally tally = {.reward = e->reward, .n_samples = e->n_samples};
    const int n = e->limit > 0 && e->limit < e->data->n ? e->limit : e->data->n;
    const int at_once = e->n_samples < EVAL_GROUPS ? EVAL_GROUPS / e->n_samples : 1;
    int64_t start = clock_now_ns();
    for (int i = 0; i < n; i += at_once) {
        struct rollout_step order = {
            .step = e->step, .evaluation = true, .data = e->data->path, .sampling = *e->sampling};
        const int groups = n - i < at_once ? n - i : at_once;
        enum status st = rollout_new(groups, e->n_samples, &order.rollout);
        for (int g = 0; st == ST_OK && g < groups; g++)
            order.rollout->examples[g] = &e->data->examples[i + g];
        if (st == ST_OK) st = status_context(source_sample(e->source, &order), "evaluation");
        if (st == ST_OK) st = rollout_exchange(e->comm, order.rollout);
        if (st == ST_OK) st = count(&tally, e->data->path, order.rollout, ret_lines);
        rollout_free(order.rollout);
        if (st != ST_OK) return st;
    }
    *ret = result_of(&tally, n, start);
    return ST_OK;
}

void eval_result_put(const struct eval_result *r, const char *prefix, json_t *metrics)
{
    const bool binary = r->accuracy >= 0, drafted = r->spec.num_draft_tokens > 0;
    const struct {
        const char *name;
        double value;
        bool given;
    } figures[] = {
        {"reward", r->reward, true},
        {"reward_standard_error", r->reward_standard_error, true},
        {"mean_length", r->mean_length, true},
        {"accuracy", r->accuracy, binary},
        {"standard_error", r->standard_error, binary},
        {"acceptance_rate", spec_acceptance_rate(&r->spec), drafted},
        {"acceptance_length", spec_acceptance_length(&r->spec), drafted},
    };
    for (size_t i = 0; i < sizeof figures / sizeof *figures; i++) {
        if (figures[i].given)
            metrics_putf(metrics, figures[i].value, "%s%s", prefix, figures[i].name);
    }
    for (int i = 0; i < r->n_pass; i++) {
        metrics_putf(metrics, r->pass[i].mean, "%spass@%d", prefix, 1 << i);
        metrics_putf(metrics, r->pass[i].error, "%spass@%d_standard_error", prefix, 1 << i);
    }
    if (r->n_pass == 0) return;
    metrics_putf(metrics, r->majority.mean, "%smaj@%d", prefix, r->n_samples);
    metrics_putf(metrics, r->majority.error, "%smaj@%d_standard_error", prefix, r->n_samples);
}
