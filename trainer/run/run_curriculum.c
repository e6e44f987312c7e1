/* run_curriculum.c: what a run takes next, and what it says of its curriculum. The main thread. */
#include "common/base/file.h"
#include "common/base/log.h"
#include "trainer/run/cluster_report.h"
#include "trainer/run/run.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

struct curriculum_options run_curriculum_options(const struct train_config *c)
{
    return (struct curriculum_options){
        .mode = c->curriculum,
        .seed = (uint64_t)c->seed,
        .prompts_per_step = (int)c->prompts_per_step,
        .num_generations = (int)c->num_generations,
        .n_buckets = (int)c->n_buckets,
        .min_bucket_size = (int)(c->min_bucket_size ? c->min_bucket_size : c->prompts_per_step),
        .base = (int)c->rollout_base,
        .alpha = c->rollout_alpha,
        .ema = c->curriculum_ema,
    };
}

void run_plan_steps(struct run *run)
{
    const struct train_config *c = run->config;
    int64_t examples = (int64_t)ceil(c->num_train_epochs * run->data->n);
    run->total_steps = c->max_steps >= 0
                           ? c->max_steps
                           : run->step + curriculum_steps_left(run->curriculum, examples);
    run->resolved.schedule.total_steps = run->total_steps;
    run->resolved.draft_schedule.total_steps = run->total_steps;
    runlog_set_total(run->log, run->total_steps);
}

static enum status report(struct run *run, const struct buckets *buckets, json_t *metrics)
{
    enum status st;
    struct bytes text = BYTES_INIT, line = BYTES_INIT;
    char name[64];
    char *path = NULL;
    struct cluster_report r = {
        .mode = curriculum_mode_names[run->config->curriculum],
        .epoch = curriculum_taken(run->curriculum) / run->data->n,
        .buckets = buckets,
    };
    for (int k = 0; k < buckets->n; k++)
        r.rollouts[k] = curriculum_bucket_rollouts(run->curriculum, k);
    cluster_report_metrics(&r, metrics);
    cluster_report_text(&r, &text);
    cluster_report_line(&r, &line);
    CHECK(bytes_status(&text));
    snprintf(name, sizeof name, "cluster-report-epoch-%" PRId64 ".txt", r.epoch);
    path = path_join(run->folder, name);
    if (!path) FAIL(ST_NO_MEMORY, "no memory for %s", name);
    CHECK(file_write_atomic(path, 0644, text.data, text.len));
    log_progress_end();
    log_info("%s (%s)", bytes_text(&line), name);
out:
    free(path);
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
    enum status st = curriculum_record(run->curriculum, means, &buckets);
    free(means);
    if (st != ST_OK) return st;
    metrics_put(metrics, "epoch", (double)curriculum_taken(run->curriculum) / run->data->n);
    if (run->config->curriculum == CURRICULUM_OFF) return ST_OK;
    metrics_put(metrics, "curriculum/bucket", batch.bucket + 1); // 0: not in one yet
    metrics_put(metrics, "curriculum/rollouts", batch.rollouts);
    metrics_put(metrics, "curriculum/samples", (double)curriculum_samples(run->curriculum));
    if (!buckets) return ST_OK;
    run_plan_steps(run); // buckets change how many steps an epoch has
    return report(run, buckets, metrics);
}
