/* learning.c: from options to the learner's settings. No state. */
#include "trainer/run/learning.h"
#include "common/model/adapter.h"
#include "trainer/learn/learner.h"

#include <inttypes.h>

#define MAX_SKIPPED 3 // steps in a row

enum status learning_config(const struct learning_options *options,
                            const struct learning_shape *shape, double temperature,
                            struct learner_config *ret)
{
    const int64_t budget = options->token_budget;
    if (shape->longest - 1 > budget)
        return status_fail(ST_INVALID,
                           "--token-budget %" PRId64
                           " is below the longest sequence, a prompt with "
                           "its completion (%" PRId64 " tokens); raise it to %" PRId64 " or more",
                           budget, shape->longest, shape->longest);
    *ret = (struct learner_config){
        .optimizer = options->adamw,
        .freeze = options->freeze,
        .temperature = (float)temperature,
        .router_aux_loss_coef = options->router_aux_loss_coef,
        .token_budget = (int)(shape->tokens < budget ? shape->tokens : budget),
        .logits_chunk = (int)options->logits_chunk,
        .max_seqs = (int)shape->seqs,
        .max_context = (int)shape->longest,
        .recompute = options->recompute,
    };
    return ST_OK;
}

enum status lora_config_json(const struct lora_options *o, const char *model, json_t **ret)
{
    enum status st =
        adapter_config_json((int)o->r, o->alpha, o->dropout, o->rslora, o->targets, ret);
    if (st == ST_OK) json_object_set_new(*ret, "base_model_name_or_path", json_string(model));
    return st;
}

bool step_due(int64_t step, int64_t every, int64_t total)
{
    return step == total || (every > 0 && step % every == 0);
}

enum status learning_skipped(int *in_a_row, bool skipped, const char *whose, const char *way_out)
{
    *in_a_row = skipped ? *in_a_row + 1 : 0;
    if (*in_a_row < MAX_SKIPPED) return ST_OK;
    return status_fail(ST_INVALID, "%s gradient was not finite in %d steps in a row; %s", whose,
                       MAX_SKIPPED, way_out);
}
