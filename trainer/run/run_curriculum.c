/* run_curriculum.c: what a run takes next, and what it says of its curriculum. The main thread. */
#include "common/base/file.h"
#include "common/base/log.h"
#include "trainer/rollout/source.h"
#include "trainer/run/cluster_report.h"
#include "trainer/run/run.h"
#include "trainer/run/runlog.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

void run_plan_steps(struct run *run)
{
    const struct train_config *c = run->config;
    int64_t examples = (int64_t)ceil(c->num_train_epochs * run->data->n);
    const int64_t each = run->resolved.schedule_per_step;
    run->total_steps = c->max_steps >= 0
                           ? c->max_steps / each
                           : run->step + curriculum_steps_left(run->curriculum, examples);
    run->resolved.schedule.total_steps = run->total_steps * each;
    run->resolved.draft_schedule.total_steps = run->total_steps * each;
    runlog_set_total(run->log, run->total_steps);
}

static enum status report(struct run *run, const struct buckets *buckets, json_t *metrics)
{
    enum status st;
    struct bytes text = BYTES_INIT, line = BYTES_INIT;
    char path[PATH_ROOM];
    struct cluster_report r = {
        .mode = curriculum_mode_names[run->config->curriculum.mode],
        .epoch = curriculum_taken(run->curriculum) / run->data->n,
        .buckets = buckets,
    };
    for (int k = 0; k < buckets->n; k++)
        r.rollouts[k] = curriculum_bucket_rollouts(run->curriculum, k);
    cluster_report_metrics(&r, metrics);
    cluster_report_text(&r, &text);
    cluster_report_line(&r, &line);
    CHECK(bytes_status(&text));
    CHECK(path_put(path, run->folder, "cluster-report-epoch-%" PRId64 ".txt", r.epoch));
    CHECK(file_write_atomic(path, 0644, text.data, text.len));
    log_progress_end();
    log_info("%s (%s)", bytes_text(&line), strrchr(path, '/') + 1);
out:
    bytes_release(&text);
    bytes_release(&line);
    return st;
}

enum status run_record(struct run *run, const struct rollout_step *s, json_t *metrics)
{
    const struct rollout *rollout = s->rollout;
    struct curriculum_batch batch;
    const struct buckets *buckets;
    curriculum_next(run->curriculum, 0, &batch);
    double *means = malloc((size_t)rollout->n_groups * sizeof *means);
    if (!means) return status_fail(ST_NO_MEMORY, "no memory for the rewards of a step");
    for (int g = 0; g < rollout->n_groups; g++)
        mean_std(s->scores.rewards + (size_t)g * rollout->n_per_group, rollout->n_per_group,
                 &means[g], NULL);
    for (int g = 0; g < rollout->n_groups; g++) // where nothing scored a group, it tells nothing
        if (isnan(means[g]))
            means[g] = isnan(s->scores.stats.reward_mean) ? 0 : s->scores.stats.reward_mean;
    enum status st = curriculum_record(run->curriculum, means, &buckets);
    free(means);
    if (st != ST_OK) return st;
    if (run->source->own_prompts) return ST_OK; // there are no epochs
    metrics_put(metrics, "epoch", (double)curriculum_taken(run->curriculum) / run->data->n);
    if (run->config->curriculum.mode == CURRICULUM_OFF) return ST_OK;
    metrics_put(metrics, "curriculum/bucket", batch.bucket + 1); // 0: not in one yet
    metrics_put(metrics, "curriculum/rollouts", batch.rollouts);
    metrics_put(metrics, "curriculum/samples", (double)curriculum_samples(run->curriculum));
    if (!buckets) return ST_OK;
    run_plan_steps(run); // buckets change how many steps an epoch has
    return train_ranks_lead(&run->ranks) ? report(run, buckets, metrics) : ST_OK;
}
