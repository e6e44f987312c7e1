/* saver.c: writes down which checkpoint is the last, and writes the next. */
#include "trainer/run/saver.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "kernels/comm.h"
#include "trainer/run/checkpoint.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void saver_init(struct saver *s, const struct saving_options *options)
{
    *s = (struct saver){.options = options, .step = -1, .interim_step = -1, .ns = clock_now_ns()};
}

bool saver_is_kept(const struct saver *s, int64_t step, int64_t total, const struct best *best)
{
    return step_due(step, s->options->save_steps, total) || best->step == step;
}

enum status saver_due(const struct saver *s, int64_t step, int64_t total, const struct best *best,
                      const struct train_ranks *ranks, enum save_kind *ret)
{
    const double every = s->options->save_minutes;
    bool interim = every > 0 && clock_ms_since(s->ns) / 60e3 >= every;
    enum status st = ST_OK;
    *ret = SAVE_KEPT;
    if (saver_is_kept(s, step, total, best)) return ST_OK;
    if (every > 0) st = train_ranks_agree(ranks, &interim, sizeof interim); // clocks differ
    *ret = interim ? SAVE_INTERIM : SAVE_NOT;
    return st;
}

// This rank's parts of what rank 0 writes, in its order; of the weights where it holds another
// shard of rank 0's server.
static enum status give_parts(struct device *dev, const struct model_folder *m,
                              const struct train_ranks *ranks)
{
    struct optimizer *optimizers[] = {m->optimizer, m->draft ? m->draft->optimizer : NULL};
    enum status st = ST_OK;
    if (ranks->shards && comm_rank(ranks->copies) == 0) CHECK(weights_save_part(m->weights, dev));
    for (int i = 0; i < 2; i++)
        if (optimizers[i] && optimizer_steps(optimizers[i]) > 0)
            CHECK(optimizer_save(optimizers[i], NULL));
out:
    return st;
}

// What rank 0 has written, on every rank.
static enum status agree_on_path(const struct train_ranks *ranks, char **folder)
{
    char path[PATH_MAX] = "";
    if (*folder) snprintf(path, sizeof path, "%s", *folder);
    enum status st = train_ranks_agree(ranks, path, sizeof path);
    if (st != ST_OK || *folder) return st;
    *folder = strdup(path);
    return *folder ? ST_OK : status_fail(ST_NO_MEMORY, "no memory for a path");
}

static enum status failed(const struct saver *s, int64_t step, enum status st)
{
    if (st != ST_OK && s->step >= 0 && s->step < step)
        return status_context(st,
                              "checkpoint of step %" PRId64 " (that of step %" PRId64
                              " is whole; --resume goes on from it)",
                              step, s->step);
    return status_context(st, "checkpoint of step %" PRId64, step);
}

enum status saver_write(struct saver *s, const char *run_folder, struct device *dev,
                        const struct model_folder *m, const struct checkpoint *c,
                        const struct best *best, const struct train_ranks *ranks, char **ret_folder)
{
    const int64_t start_ns = clock_now_ns();
    const struct checkpoint_others others = {.best_step = best->step >= 0 ? &best->step : NULL,
                                             .replaced_step =
                                                 s->interim_step >= 0 ? &s->interim_step : NULL,
                                             .keep_start = s->keep_start,
                                             .keep = (int)s->options->save_total_limit};
    enum status st = ST_OK;
    char *folder = NULL;
    *ret_folder = NULL;
    if (s->step == c->step) return ST_OK;
    if (train_ranks_lead(ranks))
        CHECK(checkpoint_write(run_folder, dev, m, c, &others, &folder));
    else
        CHECK(give_parts(dev, m, ranks));
    CHECK(agree_on_path(ranks, &folder));
    s->step = c->step;
    s->interim_step = c->interim ? c->step : -1;
    s->ns = clock_now_ns();
    log_debug("step %" PRId64 ": checkpoint %s written in %.2f s", c->step, folder,
              clock_ms_since(start_ns) / 1e3);
    *ret_folder = folder;
    folder = NULL;
out:
    s->failed = st != ST_OK;
    free(folder);
    return failed(s, c->step, st);
}

void saver_resume(struct saver *s, const struct checkpoint *c)
{
    s->step = c->step;
    s->interim_step = c->interim ? c->step : -1;
}
