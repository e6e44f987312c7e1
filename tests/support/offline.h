/* offline.h: cw-trainer sft and dpo as programs, for end-to-end tests: a folder with data, a log
 * and any number of runs. Failures fail the running test. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_OFFLINE_H
#define TESTS_SUPPORT_OFFLINE_H

#include "tests/support/training.h"

// A tiny random model (daemon_model()) in scene->model, and a path for data. No server.
void offline_scene_open(struct scene *s);
// `cw-trainer COMMAND --model --data --run-dir FOLDER/run`, on the CPU, with small numbers; `more`
// (NULL-ended) comes last. Its exit status; and, with the words of args(), that it is this.
int offline_train(struct scene *s, const char *command, const char *run, const char *const more[]);
void assert_offline(struct scene *s, int status, const char *command, const char *run,
                    const char *format, ...) __attribute__((format(printf, 5, 6)));
// The same for train_rows(): the first word is the command.
int offline_row(struct scene *s, const char *run, const char *const words[]);
// The same, not waited for.
void offline_start(const struct scene *s, const char *command, const char *run,
                   const char *const more[], struct test_child *ret);
// scene->data: n lines of sums, as sft has them, or with two completions of which the right one is
// chosen.
void offline_sums(const struct scene *s, bool pairs, int n);

#endif
