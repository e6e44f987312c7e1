/* evaluate.c: pulls answers and sums them up. The main thread.
 *
 * Prompts go out in requests of EVAL_GROUPS, enough to fill the server's batch and few enough not
 * to fill its queue while others use it. */
#include "trainer/run/evaluate.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "trainer/rollout/scoring.h"
#include "trainer/run/runlog.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define EVAL_GROUPS 64

struct tally {
    struct reward *reward;
    int n;
    double reward_mean, reward_squares; // of its deviations from the mean (Welford 1962)
    double correct, tokens, truncated;
    uint64_t weight_version;
    struct spec_counters spec;
};

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
    const struct example *e = r->examples[i];
    json_t *parts = json_object();
    for (int k = 0; parts && k < reward_terms(reward); k++)
        metrics_put(parts, reward_term_name(reward, k), terms[k * r->n_groups + i]);
    json_t *line =
        json_pack("{s:i, s:O*, s:s*, s:s, s:o, s:o, s:s, s:i, s:O*}", "line", e->line, "prompt",
                  e->prompt_json, "answer", e->answer, "completion", s->text, "reward",
                  isnan(sum) ? json_null() : json_real(sum), "terms", parts, "finish_reason",
                  s->truncated ? "length" : "stop", "tokens", s->n, "telemetry", s->telemetry);
    return json_put_line(ret, line, JSON_REAL_PRECISION(9));
}

static void count_sample(struct tally *t, const struct completion *s, double reward, double correct)
{
    if (!isnan(reward)) {
        double delta = reward - t->reward_mean;
        t->reward_mean += delta / ++t->n;
        t->reward_squares += delta * (reward - t->reward_mean);
    }
    if (!isnan(correct)) t->correct += correct;
    t->tokens += s->n;
    t->truncated += s->truncated;
    if (s->n) t->weight_version = s->versions[s->n - 1];
    count_drafts(t, s->telemetry);
}

// One sample a group. ret_lines may be NULL.
static enum status count(struct tally *t, const char *data, const struct rollout *r,
                         struct bytes *ret_lines)
{
    const int accuracy = reward_accuracy_term(t->reward), n = r->n_groups;
    double terms[REWARD_MAX_TERMS * EVAL_GROUPS], rewards[EVAL_GROUPS];
    enum status st = scoring_task(t->reward, data, r, terms, rewards);
    for (int i = 0; st == ST_OK && i < n; i++) {
        count_sample(t, &r->completions[i], rewards[i],
                     accuracy >= 0 ? terms[accuracy * n + i] : 0);
        if (ret_lines) st = put_line(ret_lines, t->reward, r, i, terms, rewards[i]);
    }
    return st;
}

enum status evaluate(const struct rollout_source *source, const struct dataset *data, int limit,
                     struct reward *reward, const struct sampling_options *sampling,
                     struct bytes *ret_lines, struct eval_result *ret)
{
    struct tally tally = {.reward = reward};
    int n = limit > 0 && limit < data->n ? limit : data->n;
    int64_t start = clock_now_ns();
    for (int i = 0; i < n; i += EVAL_GROUPS) {
        const int groups = n - i < EVAL_GROUPS ? n - i : EVAL_GROUPS;
        struct rollout *r = NULL;
        enum status st = rollout_new(groups, 1, &r);
        for (int g = 0; r && g < groups; g++) r->examples[g] = &data->examples[i + g];
        if (st == ST_OK) st = status_context(rollout_pull(source, sampling, r), "evaluation");
        if (st == ST_OK) st = count(&tally, data->path, r, ret_lines);
        rollout_free(r);
        if (st != ST_OK) return st;
    }
    double accuracy = tally.correct / n;
    *ret = (struct eval_result){
        .n = n,
        .reward = tally.reward_mean,
        .reward_standard_error =
            sqrt(tally.reward_squares / (tally.n > 0 ? tally.n : 1) / (tally.n > 0 ? tally.n : 1)),
        .accuracy = reward_accuracy_term(reward) >= 0 ? accuracy : -1,
        .standard_error = sqrt(accuracy * (1 - accuracy) / n),
        .mean_length = tally.tokens / n,
        .truncated = tally.truncated / n,
        .seconds = clock_ms_since(start) / 1e3,
        .weight_version = tally.weight_version,
        .spec = tally.spec,
    };
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
}
