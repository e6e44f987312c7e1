/* offline_checkpoint.c: what a run without a server writes: its checkpoints (checkpoint.h), by
 * which it is taken up again to the same bits, and at the end --out. The main thread.
 *
 * Beyond the weights and the optimizer a run depends on its options, on the step and on how many
 * examples it has taken: data order, schedule and dropout are functions of these. */
#include "common/base/clock.h"
#include "common/base/log.h"
#include "trainer/run/adapter_folder.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/model_folder_write.h"
#include "trainer/run/offline.h"
#include "trainer/run/same_run.h"

#include <inttypes.h>

static struct same_run same_run_of(const struct offline *s)
{
    const struct offline_config *c = s->config;
    return (struct same_run){.data = s->data.sides[0],
                             .seed = c->seed,
                             .freeze = c->learning.freeze,
                             .adapter = s->adapter,
                             .adapter_name = s->task->command,
                             .base = s->base,
                             .dev = s->dev};
}

static json_t *state_of(const struct offline *s, bool interim)
{
    const struct same_run same = same_run_of(s);
    json_t *state = same_run_state(&same);
    if (state && json_object_set_new(state, "command", json_string(s->task->command)) == 0 &&
        json_object_set_new(state, "num_tokens", json_integer(s->num_tokens)) == 0 &&
        json_object_set_new(state, "skipped_updates", json_integer(s->skipped)) == 0 &&
        json_object_set_new(state, "interim", json_boolean(interim)) == 0)
        return state;
    json_decref(state);
    return NULL;
}

enum status offline_save(struct offline *s, bool interim)
{
    enum status st = ST_OK;
    if (!s->folder[0] || s->saved_step == s->step) return ST_OK;
    const struct checkpoint c = {.step = s->step,
                                 .data_index = s->taken,
                                 .state = state_of(s, interim),
                                 .replaced_step = s->interim_step >= 0 ? &s->interim_step : NULL};
    const struct checkpoint_model policy = {s->weights, learner_optimizer(s->learner),
                                            offline_tokenizer_folder(s->config), s->adapter};
    if (!c.state) FAIL(ST_NO_MEMORY, "no memory for a checkpoint");
    CHECK(checkpoint_write(s->folder, &c, s->dev, &policy, NULL,
                           (int)s->config->saving.save_total_limit, NULL));
    s->saved_step = s->step;
    s->interim_step = interim ? s->step : -1;
    s->saved_ns = clock_now_ns();
out:
    json_decref(c.state);
    return status_context(st, "checkpoint of step %" PRId64, s->step);
}

static enum status check_command(const struct offline *s, const char *folder, const json_t *state)
{
    const char *command = json_string_value(json_object_get(state, "command"));
    if (command && strcmp(command, s->task->command) == 0) return ST_OK;
    return status_fail(ST_MISMATCH,
                       "%s is of a run of cw-trainer %s, not of %s: go on with that, or begin "
                       "another run from it (--model)",
                       folder, command ? command : "train", s->task->command);
}

enum status offline_resume(struct offline *s, const char *folder)
{
    enum status st;
    struct checkpoint c = {0};
    const struct same_run same = same_run_of(s);
    CHECK(checkpoint_read(folder, &c));
    CHECK(check_command(s, folder, c.state));
    CHECK(same_run_check(&same, folder, c.state));
    CHECK(checkpoint_load_optimizer(folder, &c, learner_optimizer(s->learner)));
    CHECK(s->adapter ? adapter_load(s->adapter, s->dev, folder)
                     : weights_load(s->weights, s->dev, folder));
    s->step = s->saved_step = c.step;
    s->taken = c.data_index;
    if (json_is_true(json_object_get(c.state, "interim"))) s->interim_step = c.step;
    s->num_tokens = json_integer_value(json_object_get(c.state, "num_tokens"));
    s->skipped = json_integer_value(json_object_get(c.state, "skipped_updates"));
    log_info("resumed at step %" PRId64 " from %s", s->step, folder);
out:
    json_decref(c.state);
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
    if (s->adapter)
        CHECK(adapter_folder_write(c->out, s->adapter, s->dev, as, NULL, s->base));
    else
        CHECK(model_folder_write(c->out, s->dev, s->weights, as, offline_tokenizer_folder(c), NULL,
                                 NULL));
    log_info("wrote %s%s", c->out, s->adapter ? ", an adapter of --model" : "");
out:
    return st;
}
