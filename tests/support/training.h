/* training.h: a daemon with a tiny model and sums to learn, and cw-trainer train on it, for
 * end-to-end tests: one scene is one daemon, one data set and any number of runs in its folder.
 * Failures fail the running test. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_TRAINING_H
#define TESTS_SUPPORT_TRAINING_H

#include "tests/support/daemon.h"

#define LIMIT_MS 120000 // for anything that one process does

struct scene { // one daemon and a data set
    const char *folder, *model, *data;
    struct daemon daemon;
};
void scene_open(struct scene *s);
void scene_open_exact(struct scene *s); // in daemon_exact_dtype()
// With a model folder of the test's own, and further options (NULL-ended) of the server.
void scene_open_model(struct scene *s, const char *model, const char *const options[]);
// In an $XDG_RUNTIME_DIR of its own, where ranks' servers are; its path. One thread for each.
const char *scene_open_runtime(struct scene *s);
void scene_close(struct scene *s);
// A file of the scene with n prompts "0+1=", "1+1=", ... and their answers; its path.
const char *scene_prompts(const struct scene *s, const char *name, int n);
// A scorer that is this shell script, as --reward has it.
const char *scene_scorer(const struct scene *s, const char *script);

// cw-trainer train with small numbers, into the run folder `run` of the scene; `more` (NULL-ended)
// comes last. Its output goes to trainer.log, one for all runs.
void trainer_command(struct scene *s, const char *folder, const char *const more[],
                     const char *ret_argv[TRAINER_WORDS]);
// The same with two other words, the first of `more`, in place of --bridge and its file.
void trainer_command_on(struct scene *s, const char *run, const char *const more[],
                        const char *ret_argv[TRAINER_WORDS]);
void start_trainer(struct scene *s, struct test_child *child, const char *run,
                   const char *const more[]);
int train(struct scene *s, const char *run, const char *const more[]); // its exit status
// The same, with a log of its own, alone.log, which said() and assert_said() look at.
int train_alone(struct scene *s, const char *run, const char *const more[]);
int train_on(struct scene *s, const char *run, const char *const more[]); // trainer_command_on()
bool said(const struct scene *s, const char *part);
void assert_said(const struct scene *s, const char *part);
// cw-trainer with these words alone, into the same log.
int trainer_alone(struct scene *s, const char *run, const char *const words[]);
// Command lines and what comes of them: the rows of test_rows(file, list), one after another.
// `start` (train_alone() or one like it) starts them with their "words" (separated by blanks, '...'
// is one) in folder "run" ("run" where a row has none), and they end with status "exit". alone.log
// has "says" and not "not" (a text or several); metrics.jsonl has so many "steps"; files of the
// scene's folder are "there" and "gone". "data" is written as the scene's data before. $FOLDER,
// $MODEL, $DATA and $BRIDGE stand for the scene's, $DEVICE for test_device().
void train_rows(struct scene *s, const char *file, const char *list,
                int (*start)(struct scene *s, const char *run, const char *const words[]));
// TEST() in a scene of its own, `s`, which `open` has opened.
#define TEST_IN(name, open)                                                                        \
    static void name##_in(struct scene s);                                                         \
    TEST(name)                                                                                     \
    {                                                                                              \
        struct scene s;                                                                            \
        open(&s);                                                                                  \
        name##_in(s);                                                                              \
    }                                                                                              \
    static void name##_in(struct scene s)
// One that is rows alone.
#define TEST_ROWS(name, file, open, start)                                                         \
    TEST_IN(name, open)                                                                            \
    {                                                                                              \
        train_rows(&s, file, #name, start);                                                        \
    }
void assert_log(const struct scene *s, const char *part);
void wait_for_log(const struct scene *s, const char *part);

int steps_done(const struct scene *s, const char *run); // lines of metrics.jsonl so far
void wait_for_steps(const struct scene *s, const char *run, int n, struct test_child *child);
int saved_step(const struct scene *s, const char *run);     // that of its newest checkpoint
const char *latest(const struct scene *s, const char *run); // checkpoint

json_t *metrics_of(const struct scene *s, const char *run); // the lines of metrics.jsonl
json_t *last_metrics(const struct scene *s,
                     const char *run);           // line of metrics.jsonl
double metric(const json_t *m, const char *key); // which it must have
// Values of a key in the lines of metrics.jsonl, 0 where a line has none; up to `most`. How many.
int column(const struct scene *s, const char *run, const char *key, double *ret, int max);
// Losses of two runs of so many steps differ by `most` at most; what else is learned by, ten times.
void same_losses(const struct scene *s, const char *a, const char *b, int steps, double max);

#endif
