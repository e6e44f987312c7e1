/* dataset_checkpoint.c: what a run without a server writes: its checkpoints (checkpoint.h), by
 * which it is taken up again to the same bits, and at the end --out. The main thread.
 *
 * Beyond the weights and the optimizer a run depends on its options, on the step and on how many
 * examples it has taken: data order, schedule and dropout are functions of these. */
#include "common/base/log.h"
#include "trainer/learn/step.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/dataset_run.h"
#include "trainer/run/same_run.h"

#include <inttypes.h>
#include <stdlib.h>

static struct same_run same_run_of(const struct dataset_run *s)
{
    const struct dataset_config *c = s->config;
    return (struct same_run){.command = s->task->command,
                             .data = s->data.sides[0],
                             .seed = c->seed,
                             .freeze = c->learning.freeze,
                             .adapter = s->adapter,
                             .adapter_name = s->task->command,
                             .base = s->base,
                             .dev = s->dev};
}

enum status dataset_run_save(struct dataset_run *s, bool interim)
{
    enum status st = ST_OK;
    char *folder = NULL;
    const struct same_run same = same_run_of(s);
    struct checkpoint c = {.step = s->step,
                           .data_index = s->taken,
                           .num_tokens = s->num_tokens,
                           .skipped_updates = s->skipped,
                           .interim = interim,
                           .best = best_to_json(&s->best),
                           .best_of = json_incref(s->best_of),
                           .same = same_run_state(&same)};
    const struct model_folder model = {.weights = s->weights,
                                       .as = s->weights->dt,
                                       .source_folder = dataset_tokenizer_folder(s->config),
                                       .adapter = s->adapter,
                                       .optimizer = learner_optimizer(s->learner)};
    if (!s->folder[0]) goto out;
    if (!c.same || !c.best) FAIL(ST_NO_MEMORY, "no memory for a checkpoint");
    st = saver_write(&s->saver, s->folder, s->dev, &model, &c, &s->best, &s->ranks, &folder);
out:
    checkpoint_release(&c);
    free(folder);
    return st;
}

enum status dataset_run_resume(struct dataset_run *s, const char *folder)
{
    enum status st;
    struct checkpoint c = {0};
    const struct same_run same = same_run_of(s);
    CHECK(checkpoint_read(folder, &c));
    CHECK(same_run_check(&same, folder, c.same));
    CHECK(checkpoint_load_optimizer(folder, &c, learner_optimizer(s->learner)));
    CHECK(s->adapter ? adapter_load(s->adapter, s->dev, folder)
                     : weights_load(s->weights, s->dev, folder));
    CHECK(best_resume(&s->best, folder, c.best, c.best_of, &s->best_of));
    saver_resume(&s->saver, &c);
    s->step = c.step;
    s->taken = c.data_index;
    s->num_tokens = c.num_tokens;
    s->skipped = c.skipped_updates;
    log_info("resumed at step %" PRId64 " from %s", s->step, folder);
out:
    checkpoint_release(&c);
    return status_context(st, "resuming");
}

enum status dataset_run_take_best(struct dataset_run *s)
{
    enum status st;
    char *folder = NULL;
    if (s->best.step < 0 || s->best.step == s->step) return ST_OK;
    CHECK(checkpoint_best(s->folder, &folder));
    if (!folder)
        FAIL(ST_NOT_FOUND, "%s/checkpoints/best: there is no such checkpoint any more", s->folder);
    CHECK(s->adapter ? adapter_load(s->adapter, s->dev, folder)
                     : weights_load(s->weights, s->dev, folder));
    log_info("the weights are those of step %" PRId64 ", the best", s->best.step);
out:
    free(folder);
    return status_context(st, "--load-best-model-at-end");
}

enum status dataset_run_describe(const struct dataset_run *s, bool resumed)
{
    if (!s->folder[0] || !train_ranks_lead(&s->ranks)) return ST_OK;
    json_t *options = options_to_json(s->task->options, s->config);
    json_t *start = folder_start(s->step, s->dev, s->weights->dt);
    if (start) folder_put_text(start, "model", s->config->model);
    if (start) json_object_set(start, ADAPTER_BASE, s->base);
    enum status st = folder_write_options(s->folder, resumed, options);
    if (st == ST_OK) return folder_add_start(s->folder, resumed, start);
    json_decref(start);
    return st;
}

enum status dataset_run_write_out(struct dataset_run *s)
{
    const struct dataset_config *c = s->config;
    enum status st;
    if (!c->out || !train_ranks_lead(&s->ranks)) return ST_OK;
    const enum dtype as = c->dtype ? (enum dtype)(c->dtype - 1) : s->weights->dt;
    struct model_folder model = {.weights = s->weights,
                                 .as = as,
                                 .source_folder = dataset_tokenizer_folder(c),
                                 .adapter = s->adapter};
    if (s->adapter && !(model.state = adapter_state(NULL, s->base)))
        FAIL(ST_NO_MEMORY, "no memory to write %s", c->out);
    st = model_folder_write(c->out, s->dev, &model);
    json_decref(model.state);
    CHECK(st);
    log_info("wrote %s%s", c->out, s->adapter ? ", an adapter of --model" : "");
out:
    return st;
}
