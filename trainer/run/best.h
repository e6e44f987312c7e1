/* best.h: the best of a run's evaluations, and how long there has been no better one. Part of a
 * run's checkpoints, so that a resumed run counts on. One thread. */
#ifndef TRAINER_BEST_H
#define TRAINER_BEST_H

#include "common/base/status.h"
#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

struct best {
    int64_t step;   // of the best evaluation; -1: there was none yet
    double score;   // higher is better
    int64_t waited; // evaluations since then
};
#define BEST_NONE ((struct best){.step = -1})

// One more evaluation; true where it is the best so far. An equal score is not better, and one that
// is not a number never is.
bool best_consider(struct best *b, int64_t step, double score);

// --early-stop-patience N evaluations in a row were no better; 0: never.
bool best_out_of_patience(const struct best *b, int64_t patience);
// The end of an evaluation's line, and, of what was scored ("accuracy"), of a run's last.
#define BEST_WORDS 96
void best_words(const struct best *b, bool is_best, int64_t step, char ret[BEST_WORDS]);
void best_end_words(const struct best *b, const char *scored, char ret[BEST_WORDS]);

// For checkpoints. The new reference is null where there was no evaluation; NULL: no memory.
json_t *best_to_json(const struct best *b);
// `json` NULL or null: none. ST_FORMAT, naming `where`, where it is no such object.
enum status best_from_json(const char *where, const json_t *json, struct best *ret);

#endif
