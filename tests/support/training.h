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
// One scene for all tests of a file: `scene`, which `open` opens.
#define SCENE_OF_ALL(open)                                                                         \
    static struct scene scene;                                                                     \
    static void open_scene(void)                                                                   \
    {                                                                                              \
        open(&scene);                                                                              \
    }                                                                                              \
    TESTS_BETWEEN(open_scene, NULL)
// In an $XDG_RUNTIME_DIR of its own, where ranks' servers are; its path. One thread for each.
const char *scene_open_runtime(struct scene *s);
void scene_end(struct scene *s); // its server, where it runs, ends well
// A file of the scene with n prompts "0+1=", "1+1=", ... and their answers; its path.
const char *scene_prompts(const struct scene *s, const char *name, int n);
// A scorer that is this shell script, as --reward has it.
const char *scene_scorer(const struct scene *s, const char *script);

// cw-trainer train with small numbers, into that folder; `more` (NULL-ended) comes last.
const char *const *trainer_command(const struct scene *s, const char *folder,
                                   const char *const more[]);
// Of the run `run` of the scene, with two other words, the first of `more`, in place of --bridge
// and its file.
const char *const *trainer_command_on(const struct scene *s, const char *run,
                                      const char *const more[]);
// A program; not waited for, or to its end: its exit status. What it says goes to trainer.log,
// which is of the last one that was started, and which those below look at.
void scene_spawn(const struct scene *s, struct test_child *child, const char *const argv[]);
int scene_run(const struct scene *s, const char *const argv[]);
bool said(const struct scene *s, const char *part);
void assert_said(const struct scene *s, const char *part);
void wait_for_log(const struct scene *s, const char *part);
void scene_ended(const struct scene *s, int status, int wanted); // fails with it where they differ
void start_trainer(const struct scene *s, struct test_child *child, const char *run,
                   const char *const more[]);
int train(struct scene *s, const char *run, const char *const more[]);
int train_on(struct scene *s, const char *run, const char *const more[]); // trainer_command_on()
// train() with the words of args(), which ends with this status.
void assert_train(struct scene *s, int status, const char *run, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
// cw-trainer with these words alone; and that it ends with this status.
void assert_trainer(struct scene *s, int status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
int trainer_alone(struct scene *s, const char *run, const char *const words[]);
// Command lines and what comes of them: the rows of test_rows(file, list), one after another.
// `start` (train() or one like it) starts them with their "words" (separated by blanks, '...'
// is one) in folder "run" ("run" where a row has none), and they end with status "exit". the log
// has "says" and not "not" (a text or several); metrics.jsonl has so many "steps"; files of the
// scene's folder are "there" and "gone". "data" is written as the scene's data before. $FOLDER,
// $MODEL, $DATA and $BRIDGE stand for the scene's, $DEVICE for test_device().
void train_rows(struct scene *s, const char *file, const char *list,
                int (*start)(struct scene *s, const char *run, const char *const words[]));
// TEST() in a scene of its own, which `open` has opened, and which scene_end() ends.
#define TEST_IN(name, open)                                                                        \
    static void name##_in(struct scene *s);                                                        \
    TEST(name)                                                                                     \
    {                                                                                              \
        struct scene s;                                                                            \
        open(&s);                                                                                  \
        name##_in(&s);                                                                             \
        scene_end(&s);                                                                             \
    }                                                                                              \
    static void name##_in(struct scene *s)
// One that is rows alone.
#define TEST_ROWS(name, file, open, start)                                                         \
    TEST_IN(name, open)                                                                            \
    {                                                                                              \
        train_rows(s, file, #name, start);                                                         \
    }

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
// Each of its lines has such a value, which lies within `low` and `high`; and there are n.
void each_within(const struct scene *s, const char *run, const char *key, int n, double low,
                 double high);
// Losses of two runs of so many steps differ by `most` at most; what else is learned by, ten times.
void same_losses(const struct scene *s, const char *a, const char *b, int steps, double max);

#endif
