/* mode_scene.h: what runs of any modes (modes.h) need: two servers of the demo's model, each with a
 * draft, a frozen model and room for an adapter, a worker, sums to learn, an environment and
 * Atropos' API. Failures fail the running test. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_MODE_SCENE_H
#define TESTS_SUPPORT_MODE_SCENE_H

#include "tests/support/canned_server.h"
#include "tests/support/modes.h"
#include "tests/support/pair.h"

#define MODE_PROMPTS 4 // of a step
#define MODE_SAMPLES 4 // of a prompt

struct mode_scene {
    struct scene runs; // its folder and data; no server
    int lines;         // of the data
    const char *model, *draft, *server_args, *environment, *bridges;
    struct daemon daemons[2], worker;
    struct canned_server atropos;
};
void mode_scene_open(struct mode_scene *s, int lines);
void mode_scene_close(struct mode_scene *s);
// One of its servers, or Atropos' API, which does not run.
void mode_scene_start(struct mode_scene *s, struct daemon *d);
void mode_scene_serve_atropos(struct mode_scene *s);

// The command of a run into the scene's folder `name`; more: NULL-ended, comes last.
const char *const *mode_scene_command(const struct mode_scene *s, const struct mode_run *run,
                                      const char *name, const char *const more[]);
// The servers are as they were started, whatever the run before has trained.
void mode_scene_begin_anew(const struct mode_scene *s);
// How often each line of the data was a prompt of a step, added to ret_lines (s->lines + 1), and
// "LINE TEXT" of its samples, the caller's to free.
char *mode_scene_samples(const struct mode_scene *s, const char *name, int step, int ret_lines[]);

bool mode_scene_is_skipped(void); // elsewhere than on the CPU; says so

#endif
