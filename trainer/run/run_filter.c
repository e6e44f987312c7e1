/* run_filter.c: dynamic sampling (Yu et al. 2025, DAPO): groups whose rewards are all equal teach
 * nothing, and with --filter-groups other prompts are drawn in their place, a bounded number of
 * times. The main thread, while it scores a step.
 *
 * The prompts drawn are a function of the seed and the step, so that a checkpoint needs to know
 * nothing of them, and epochs count those of the data's order alone. */
#include "common/base/log.h"
#include "common/base/rng.h"
#include "trainer/rollout/rollout.h"
#include "trainer/rollout/source.h"
#include "trainer/run/run.h"
#include "trainer/run/runlog.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FILTER_STREAM ((uint64_t)1 << 33) // of prompts drawn; apart from the data's and rollouts'

static bool is_flat(const struct rollout *r, const struct scores *scores, int group)
{
    return rewards_are_equal(scores->rewards + (size_t)group * r->n_per_group, r->n_per_group);
}

static int list_flat(const struct rollout_step *s, int *ret_groups)
{
    int n = 0;
    for (int g = 0; g < s->rollout->n_groups; g++)
        if (is_flat(s->rollout, &s->scores, g)) ret_groups[n++] = g;
    return n;
}

static void count_rewards(struct rollout_step *s, const struct scores *scores)
{
    for (int i = 0; i < scores->n; i++) {
        if (isnan(scores->rewards[i])) continue;
        s->filter.reward_sum += scores->rewards[i];
        s->filter.n_rewards++;
    }
}

// Group `from` of r takes the place of group `to` of the step, which goes where that was.
static void exchange(struct rollout_step *s, int to, struct rollout *r, const struct scores *scores,
                     int from)
{
    struct rollout *into = s->rollout;
    const int each = r->n_per_group;
    into->examples[to] = r->examples[from];
    if (r->prompts) {
        const struct token_list was = into->prompts[to];
        into->prompts[to] = r->prompts[from];
        r->prompts[from] = was;
    }
    for (int i = 0; i < each; i++) {
        const int here = to * each + i, there = from * each + i;
        const struct completion was = into->completions[here];
        into->completions[here] = r->completions[there];
        r->completions[there] = was;
        into->n_tokens += into->completions[here].n - was.n;
        s->scores.rewards[here] = scores->rewards[there];
        for (int k = 0; k < scores->n_terms; k++)
            s->scores.terms[k * s->scores.n + here] = scores->terms[k * scores->n + there];
    }
}

// Other prompts in place of n groups; those that are flat too are left.
static enum status draw(struct run *run, struct rollout_step *s, struct rng *rng, const int *groups,
                        int n)
{
    struct rollout_step drawn = {.step = s->step,
                                 .first_group = s->rollout->n_groups + s->filter.drawn,
                                 .sampling = s->sampling,
                                 .counts = s->counts};
    struct scores scores = {0};
    enum status st;
    CHECK(rollout_new(n, s->rollout->n_per_group, &drawn.rollout));
    struct rollout *r = drawn.rollout;
    for (int g = 0; g < n; g++)
        r->examples[g] = &run->data->examples[rng_below(rng, (uint32_t)run->data->n)];
    drawn.sampling.seed = rng_u64(rng) >> 1;
    CHECK(run_sample(run, &drawn));
    s->counts = drawn.counts;
    CHECK(rollout_exchange(run->ranks.all, r));
    CHECK(scoring_rollout(run->scoring, r, &scores));
    CHECK(
        train_ranks_agree(&run->ranks, scores.rewards, (size_t)scores.n * sizeof *scores.rewards));
    count_rewards(s, &scores);
    for (int g = 0; g < n; g++)
        if (!is_flat(r, &scores, g)) exchange(s, groups[g], r, &scores, g);
    s->rollout->seconds += r->seconds;
    s->filter.drawn += n;
out:
    scores_release(&scores);
    rollout_free(drawn.rollout);
    return status_context(st, "--filter-groups");
}

enum status run_filter_groups(struct run *run, struct rollout_step *s)
{
    const int64_t max = run->config->filter_groups;
    struct rng rng;
    enum status st = ST_OK;
    if (max == 0) return ST_OK;
    memset(&s->filter, 0, sizeof s->filter); // where it is scored again
    int *groups = calloc((size_t)s->rollout->n_groups, sizeof *groups);
    if (!groups) return status_fail(ST_NO_MEMORY, "no memory for %d groups", s->rollout->n_groups);
    rng_init(&rng, (uint64_t)run->config->seed, FILTER_STREAM + (uint64_t)s->step);
    count_rewards(s, &s->scores);
    for (int64_t i = 0; i < max; i++) {
        const int n = list_flat(s, groups);
        if (n == 0) break;
        log_debug("step %" PRId64 ": the rewards of %d of %d groups are all equal; other prompts "
                  "are drawn",
                  s->step + 1, n, s->rollout->n_groups);
        CHECK(draw(run, s, &rng, groups, n));
    }
    s->filter.flat = list_flat(s, groups);
    if (s->filter.drawn > 0) st = scoring_again(run->scoring, s->rollout, &s->scores);
    if (st == ST_OK && s->filter.drawn > 0)
        st = scoring_turns(run->scoring, s->rollout, &s->scores);
out:
    free(groups);
    return st;
}

void run_put_filter(const struct run *run, const struct rollout_step *s, json_t *metrics)
{
    const int n = s->rollout->n_groups;
    if (run->config->filter_groups == 0) return;
    metrics_put(metrics, "filter_groups/drawn", s->filter.drawn);
    metrics_put(metrics, "filter_groups/flat", (double)s->filter.flat / n);
    metrics_put(metrics, "filter_groups/reward",
                s->filter.n_rewards > 0 ? s->filter.reward_sum / s->filter.n_rewards : NAN);
}
