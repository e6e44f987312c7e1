/* torn.h: real trainers that are killed while they write an update, for end-to-end tests. Failures
 * fail the running test. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_TORN_H
#define TESTS_SUPPORT_TORN_H

#include "bridge/control.h"
#include "tests/support/training.h"

// A scene with a model whose AdamW takes long enough for a signal to hit it: 11 M parameters on the
// CPU, 90 M else. Its server has the options (NULL-ended, or NULL).
void scene_open_large(struct scene *s, const char *const options[]);
// An update that begins from now on: to its beginning, and to its end.
void wait_for_begin(struct test_child *trainer, const struct control *control);
void wait_for_update(struct test_child *trainer, const struct control *control);
// Kills the trainer the moment the version is odd. False if the update ended before the signal
// came.
bool kill_in_an_update(struct test_child *trainer, const struct control *control);
// Follows /health until it says ok at an even version again. True if it said torn meanwhile.
bool torn_until_restored(const struct scene *s, const struct control *control);
// A writer, a process of this program's own, dies while it writes those roles (with blanks between
// them), of a server with several ranks rank 0's. It names `snapshot` first, where that is not
// NULL, and moves it away in its update where moved_to is none. Skips the test on a GPU, which does
// not allow it.
void tear_roles(const struct daemon *d, const char *roles, const char *snapshot,
                const char *moved_to);

#endif
