/* journal.h: what the tools of environments gave in one step, kept on disk until a checkpoint has
 * the step, so that a run that goes on need not call them again. One thread at a time.
 *
 * RUN/journal/step-N.jsonl (of rank R above 0 step-N.rank-R.jsonl) has a line a call: {"line",
 * "group", "sample", "number", "call", "result"}. A line is written with one write(2) and fsynced
 * before the environment hears that it is kept; one that was cut off is dropped when the file is
 * opened again. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_JOURNAL_H
#define TRAINER_JOURNAL_H

#include "common/base/status.h"
#include <jansson.h>
#include <stdint.h>

struct journal;

struct journal_place { // of a call
    int line, group, sample;
    int number; // of the sample's calls, from 0
};

// step: from 1. Makes the folder where it is missing; the file is made with its first line. rank:
// of several that train together each has a file, and finds what any of them kept before it was
// opened, since another number of ranks divides the groups otherwise.
enum status journal_open(const char *run_folder, int64_t step, int rank, struct journal **ret);
void journal_close(struct journal *j);
// The result of that very call; NULL: it is not there. Borrowed.
json_t *journal_find(const struct journal *j, const struct journal_place *place,
                     const json_t *call);
// Keeps one. Of the sample's later calls, of a course that it no longer takes, none is left.
enum status journal_keep(struct journal *j, const struct journal_place *place, const json_t *call,
                         const json_t *result);
// Removes the files of steps up to `step`, which a checkpoint has.
enum status journal_forget(const char *run_folder, int64_t step);

#endif
