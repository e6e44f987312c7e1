/* saver.h: when a run's checkpoints are due, and the writing of them by all its ranks: rank 0
 * writes the folder, the others give it their parts. Of every command that trains. One thread. */
#ifndef TRAINER_SAVER_H
#define TRAINER_SAVER_H

#include "trainer/run/best.h"
#include "trainer/run/learning.h"
#include "trainer/run/train_ranks.h"

struct checkpoint;
struct comm;
struct device;
struct model_folder;
struct saver {
    const struct saving_options *options;
    int64_t step;         // of the last checkpoint; -1: none
    int64_t interim_step; // the same, where the next one is to replace it; -1: it is not
    int64_t ns;           // clock_now_ns() of it
    bool failed;          // the one after it
    bool keep_start;      // that of step 0 is never removed
};
void saver_init(struct saver *s, const struct saving_options *options);

enum save_kind {
    SAVE_NOT,
    SAVE_INTERIM, // --save-minutes: the next one replaces it
    SAVE_KEPT     // --save-steps, the last step, or the best
};
// Whether the step just done has a checkpoint, on all ranks alike.
bool saver_is_kept(const struct saver *s, int64_t step, int64_t total, const struct best *best);
enum status saver_due(const struct saver *s, int64_t step, int64_t total, const struct best *best,
                      const struct train_ranks *ranks, enum save_kind *ret);
// Writes it, unless there is one of c->step. ret_folder: on every rank, the caller's to free; NULL
// where there was one already.
enum status saver_write(struct saver *s, const char *run_folder, struct device *dev,
                        const struct model_folder *m, const struct checkpoint *c,
                        const struct best *best, const struct train_ranks *ranks,
                        char **ret_folder);
// A run goes on from that one.
void saver_resume(struct saver *s, const struct checkpoint *c);

#endif
