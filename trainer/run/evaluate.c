/* evaluate.c: pulls answers and sums them up. The main thread.
 *
 * Prompts go out in requests of EVAL_GROUPS, enough to fill the server's batch and few enough not
 * to fill its queue while others use it. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/evaluate.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "trainer/reward/math/prose.h"
#include "trainer/rollout/rollout.h"
#include "trainer/run/runlog.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define EVAL_GROUPS 64 // samples, if a prompt has no more

// Welford 1962
static void figure_add(struct eval_figure *f, double x)
{
    const double delta = x - f->mean;
    f->mean += delta / ++f->n;
    f->squares += delta * (x - f->mean);
}

double eval_error(const struct eval_figure *f)
{
    const int n = f->n > 0 ? f->n : 1;
    return sqrt(f->squares / n / n);
}

static double telemetry_number(const struct completion *s, const char *name)
{
    return json_number_value(json_object_get(s->telemetry, name));
}

json_t *sample_line(const struct rollout *r, int i, bool prompt, const struct reward *reward,
                    const double *terms, double sum)
{
    const struct completion *s = &r->completions[i];
    const struct example *e = r->examples[i / r->n_per_group];
    const struct reward_info *info = reward_info(reward);
    json_t *parts = json_object();
    for (int k = 0; parts && terms && k < info->n; k++) // NULL: others scored it
        metrics_put(parts, info->terms[k].name, terms[k * r->n_groups * r->n_per_group + i]);
    return json_pack("{s:i, s:i, s:O*, s:s*, s:s, s:o, s:o, s:i, s:O*}", "line", e->line, "sample",
                     i % r->n_per_group, "prompt", prompt ? e->prompt_json : NULL, "answer",
                     e->answer, "completion", s->text, "reward", json_finite(sum), "terms", parts,
                     "tokens", s->n, "telemetry", s->telemetry);
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
    int max = 0, n_max = 0;
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
        if (end - i < max) continue;
        if (end - i > max) n_max = 0, right = 0;
        max = end - i;
        n_max++;
        right += correct[first];
    }
    return right / n_max;
}

static enum status count_correct(struct eval_result *r, const struct completion *samples,
                                 const double *correct)
{
    const int n = r->n_samples;
    int n_correct = 0;
    for (int i = 0; i < n; i++) n_correct += correct[i] > 0;
    r->accuracy += n_correct;
    figure_add(&r->correct, (double)n_correct / n);
    if (n == 1) return ST_OK;
    struct vote *votes = malloc((size_t)n * sizeof *votes);
    if (!votes) return status_fail(ST_NO_MEMORY, "no memory for the answers of %d samples", n);
    for (int i = 0; i < EVAL_MAX_PASS && 1 << i <= n; i++)
        figure_add(&r->pass[i], 1 - share_of_choices(n - n_correct, n, 1 << i));
    figure_add(&r->majority, majority(samples, correct, n, votes));
    free(votes);
    return ST_OK;
}

// ret_lines may be NULL.
static enum status count(const struct evaluation *e, const struct rollout *from,
                         struct bytes *ret_lines, struct eval_result *r)
{
    const int accuracy = reward_info(e->reward)->accuracy_term, each = from->n_per_group,
              n = from->n_groups * each;
    enum status st;
    double *rewards = malloc((size_t)n * (REWARD_MAX_TERMS + 1) * sizeof *rewards),
           *terms = rewards + n;
    if (!rewards) return status_fail(ST_NO_MEMORY, "no memory for %d rewards", n);
    CHECK(scoring_task(e->reward, e->data->path, from, terms, rewards));
    for (int i = 0; i < n; i++) {
        const struct completion *s = &from->completions[i];
        const struct spec_counters drafted = {
            .present = json_has(s->telemetry, "num_draft_tokens"),
            .num_drafts = telemetry_number(s, "num_drafts"),
            .num_draft_tokens = telemetry_number(s, "num_draft_tokens"),
            .num_accepted_tokens = telemetry_number(s, "num_accepted_tokens"),
        };
        spec_counters_add(&r->spec, &drafted);
        r->mean_length += s->n;
        r->truncated += s->truncated;
        if (s->n) r->weight_version = s->versions[s->n - 1];
        if (!ret_lines) continue;
        json_t *line = sample_line(from, i, true, e->reward, terms, rewards[i]);
        json_object_set_new(line, "finish_reason", json_string(s->truncated ? "length" : "stop"));
        CHECK(json_put_line(ret_lines, line, JSON_REAL_PRECISION(METRICS_DIGITS)));
    }
    for (int i = 0; i < n; i += each) {
        double mean;
        mean_std(rewards + i, each, &mean, NULL);
        if (!isnan(mean)) figure_add(&r->reward, mean);
        if (accuracy >= 0) CHECK(count_correct(r, &from->completions[i], terms + accuracy * n + i));
    }
out:
    free(rewards);
    return st;
}

enum status evaluate(const struct evaluation *e, struct bytes *ret_lines, struct eval_result *ret)
{
    const int n = e->limit > 0 && e->limit < e->data->n ? e->limit : e->data->n;
    const int at_once = e->n_samples < EVAL_GROUPS ? EVAL_GROUPS / e->n_samples : 1;
    const double samples = (double)n * e->n_samples;
    int64_t start = clock_now_ns();
    struct eval_result r = {.n = n, .n_samples = e->n_samples};
    for (int i = 0; i < n; i += at_once) {
        struct rollout_step order = {
            .step = e->step, .evaluation = true, .data = e->data->path, .sampling = *e->sampling};
        const int groups = n - i < at_once ? n - i : at_once;
        enum status st = rollout_new(groups, e->n_samples, &order.rollout);
        for (int g = 0; st == ST_OK && g < groups; g++)
            order.rollout->examples[g] = &e->data->examples[i + g];
        if (st == ST_OK) st = status_context(source_sample(e->source, &order), "evaluation");
        if (st == ST_OK) st = rollout_exchange(e->comm, order.rollout);
        if (st == ST_OK) st = count(e, order.rollout, ret_lines, &r);
        rollout_free(order.rollout);
        if (st != ST_OK) return st;
    }
    if (r.reward.n == 0) r.reward.mean = NAN;
    if (r.reward.n < n)
        log_info("no term of --reward applied to %d of %d prompts; the reward is the others' mean",
                 n - r.reward.n, n);
    r.accuracy = reward_info(e->reward)->accuracy_term >= 0 ? r.accuracy / samples : -1;
    r.mean_length /= samples;
    r.truncated /= samples;
    r.seconds = clock_ms_since(start) / 1e3;
    *ret = r;
    return ST_OK;
}

void eval_result_put(const struct eval_result *r, const char *prefix, json_t *metrics)
{
    metrics_putf(metrics, r->reward.mean, "%sreward", prefix);
    metrics_putf(metrics, eval_error(&r->reward), "%sreward_standard_error", prefix);
    metrics_putf(metrics, r->mean_length, "%smean_length", prefix);
    if (r->accuracy >= 0) {
        metrics_putf(metrics, r->accuracy, "%saccuracy", prefix);
        metrics_putf(metrics, eval_error(&r->correct), "%sstandard_error", prefix);
    }
    if (r->spec.num_draft_tokens > 0) {
        metrics_putf(metrics, spec_acceptance_rate(&r->spec), "%sacceptance_rate", prefix);
        metrics_putf(metrics, spec_acceptance_length(&r->spec), "%sacceptance_length", prefix);
    }
    for (int i = 0; i < EVAL_MAX_PASS && r->pass[i].n > 0; i++) {
        metrics_putf(metrics, r->pass[i].mean, "%spass@%d", prefix, 1 << i);
        metrics_putf(metrics, eval_error(&r->pass[i]), "%spass@%d_standard_error", prefix, 1 << i);
    }
    if (r->majority.n == 0) return;
    metrics_putf(metrics, r->majority.mean, "%smaj@%d", prefix, r->n_samples);
    metrics_putf(metrics, eval_error(&r->majority), "%smaj@%d_standard_error", prefix,
                 r->n_samples);
}
