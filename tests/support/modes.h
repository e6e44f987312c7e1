/* modes.h: the modes of `cw-trainer train`, by which options each is asked for, which go together
 * by the options' rules, and an array of runs that has each pair which does. Plain data; one
 * thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_MODES_H
#define TESTS_SUPPORT_MODES_H

#include "common/base/status.h"

#include <stdbool.h>
#include <stdint.h>

enum mode {
    ASYNC,
    BUDGET,
    LORA,
    DRAFT,
    TANDEM,
    ENVIRONMENT,
    ATROPOS,
    WORKERS,
    CHECKPOINT,
    CURRICULUM,
    COST,
    FILTER,
    BETA,
    EIGHT_BIT,
    TEACHER,
    N_MODES
};
typedef uint32_t mode_set; // bit m: mode m
#define MODE(m)  ((mode_set)1 << (m))
#define BY_CLOCK (MODE(ASYNC) | MODE(BUDGET)) // of which a run goes by the clock

// A word in braces stands for what a run has there: {environment}, {atropos}, {worker}, {model},
// {draft}, {server-args}.
#define MODE_WORDS 12
extern const struct mode_row {
    const char *name, *words[MODE_WORDS];
} modes[N_MODES];

// ST_INVALID, with the rule's sentence, where the options of these modes do not go together.
enum status modes_check(mode_set set, bool several_ranks);

// One of the array's runs.
struct mode_run {
    mode_set set;
    int ranks; // 1 or 2
};
#define MODE_RUNS 64
// Runs in which each pair of modes that go together is there on one rank and on two, and each of a
// pair without the other: chosen one by one, each of many by what it has that none before has.
// How many.
int modes_cover(struct mode_run ret[MODE_RUNS]);

#endif
