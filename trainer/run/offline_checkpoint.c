/* offline_checkpoint.c: what a run without a server writes: its checkpoints (checkpoint.h), by
 * which it is taken up again to the same bits, and at the end --out. The main thread.
 *
 * Beyond the weights and the optimizer a run depends on its options, on the step and on how many
 * examples it has taken: data order, schedule and dropout are functions of these. */
#include "common/base/log.h"
#include "trainer/learn/step.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/offline.h"
#include "trainer/run/same_run.h"

#include <inttypes.h>
#include <stdlib.h>

static struct same_run same_run_of(const struct offline *s)
{
    const struct offline_config *c = s->config;
    return (struct same_run){.command = s->task->command,
                             .data = s->data.sides[0],
                             .seed = c->seed,
                             .freeze = c->learning.freeze,
                             .adapter = s->adapter,
                             .adapter_name = s->task->command,
                             .base = s->base,
                             .dev = s->dev};
}

static enum status state_of(const struct offline *s, bool interim, struct checkpoint *ret)
{
    const struct same_run same = same_run_of(s);
    struct checkpoint c = {.step = s->step,
                           .data_index = s->taken,
                           .num_tokens = s->num_tokens,
                           .skipped_updates = s->skipped,
                           .interim = interim,
                           .same = same_run_state(&same)};
    *ret = c;
    return c.same ? ST_OK : status_fail(ST_NO_MEMORY, "no memory for a checkpoint");
}

enum status offline_save(struct offline *s, bool interim)
{
    static const struct best none = {.step = -1};
    enum status st = ST_OK;
    char *folder = NULL;
    struct checkpoint c = {0};
    const struct model_folder model = {.weights = s->weights,
                                       .as = s->weights->dt,
                                       .source_folder = offline_tokenizer_folder(s->config),
                                       .adapter = s->adapter,
                                       .optimizer = learner_optimizer(s->learner)};
    if (!s->folder[0]) return ST_OK;
    CHECK(state_of(s, interim, &c));
    st = saver_write(&s->saver, s->folder, s->dev, &model, &c, &none, &s->ranks, &folder);
out:
    checkpoint_release(&c);
    free(folder);
    return st;
}

enum status offline_resume(struct offline *s, const char *folder)
{
    enum status st;
    struct checkpoint c = {0};
    const struct same_run same = same_run_of(s);
    CHECK(checkpoint_read(folder, &c));
    CHECK(same_run_check(&same, folder, c.same));
    CHECK(checkpoint_load_optimizer(folder, &c, learner_optimizer(s->learner)));
    CHECK(s->adapter ? adapter_load(s->adapter, s->dev, folder)
                     : weights_load(s->weights, s->dev, folder));
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

enum status offline_describe(const struct offline *s, bool resumed)
{
    if (!s->folder[0]) return ST_OK;
    json_t *options = options_to_json(s->task->options, s->config);
    json_t *start = folder_start(s->step, s->dev, s->weights->dt);
    json_object_del(options, "overwrite"); // of this start, not of the run
    if (start) folder_put_text(start, "model", s->config->model);
    if (start) json_object_set(start, ADAPTER_BASE, s->base);
    enum status st = folder_write_options(s->folder, resumed, options);
    if (st == ST_OK) return folder_add_start(s->folder, resumed, start);
    json_decref(start);
    return st;
}

enum status offline_write_out(struct offline *s)
{
    const struct offline_config *c = s->config;
    enum status st;
    if (!c->out) return ST_OK;
    const enum dtype as = c->dtype ? (enum dtype)(c->dtype - 1) : s->weights->dt;
    struct model_folder model = {.weights = s->weights,
                                 .as = as,
                                 .source_folder = offline_tokenizer_folder(c),
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
