/* automaton.h: a byte-level automaton with a stack, which says which bytes may follow a text. It is
 * built by a compiler (regex.c, json_schema.c, ...) out of nodes, from the end to the beginning:
 * each function takes the node that comes next and returns the one that it made. Rules may call
 * each other and themselves.
 *
 * It runs as if it were deterministic: a state is the set of all places where a text may stand,
 * each with its stack of calls to return to, and is made when a text first comes to it. States are
 * numbers from 0, the beginning; AUTOMATON_DEAD is that of a text which nothing can follow or end.
 *
 * One thread at a time (constraint.c has the lock). Bounds: AUTOMATON_NODES, AUTOMATON_STATES,
 * AUTOMATON_PLACES; what passes one is ST_TOO_LONG. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_CONSTRAINT_AUTOMATON_H
#define COMMON_CONSTRAINT_AUTOMATON_H

#include "common/base/status.h"
#include <stdint.h>

#define AUTOMATON_NODES  (1 << 18) // of one automaton
#define AUTOMATON_STATES (1 << 15)
#define AUTOMATON_PLACES 16384     // of a state
#define AUTOMATON_BUDGET (1 << 20) // nodes that are followed for one mask, or to the next state
#define AUTOMATON_DEAD   (-1)
#define AUTOMATON_END    0 // the node where a rule returns, and a text may end

struct automaton;
enum status automaton_new(struct automaton **ret);
void automaton_free(struct automaton *a);

// ---- building -----------------------------------------------------------------------------------
// A node; -1 is nothing: what no text meets, and what leads to nothing; also what was to be made
// once there were too many nodes, which automaton_failed() tells.

int automaton_byte(struct automaton *a, int low, int high,
                   int next); // one from low to high, if any
int automaton_text(struct automaton *a, const char *text, size_t len, int next);
int automaton_either(struct automaton *a, int one, int other);
// A character from code point low to high, surrogates left out: UTF-8, or in_string: as it may
// stand in a JSON string, as it is or escaped.
int automaton_character(struct automaton *a, uint32_t low, uint32_t high, bool in_string, int next);
// A node which is one of two nodes that are made later: what is repeated leads back to it.
int automaton_open(struct automaton *a);
void automaton_close(struct automaton *a, int open, int one, int other);
int automaton_rule(struct automaton *a); // a rule's number, to be defined; -1 likewise
void automaton_define(struct automaton *a, int rule, int start); // what ends in AUTOMATON_END
bool automaton_is_defined(const struct automaton *a, int rule);
void automaton_name(struct automaton *a, int rule, const char *name, size_t n); // for errors
int automaton_call(struct automaton *a, int rule, int next);
// From min to max (< 0: any number) calls.
int automaton_repeat(struct automaton *a, int rule, int64_t min, int64_t max, int next);
/* Most of what a text repeats are characters of a few sets. A slice is how the vocabulary looks to
 * one of them (constraint.c): a rule whose texts are its units is told of it (set_slice), and where
 * that is repeated, tokens need not be followed one by one. */
enum automaton_slice {
    SLICE_STRING, // any character, as it may stand in a JSON string
    SLICE_BLANK,  // JSON's white space
    SLICE_PLAIN, // no control characters, quotes, backslashes or "<": the rule may take others, too
    AUTOMATON_SLICES // none
};
struct automaton_range {
    uint32_t low, high; // code points
};
int automaton_unit(struct automaton *a, enum automaton_slice slice, int next); // one character
bool automaton_is_unit(enum automaton_slice slice, uint32_t point);
// That of a set, whose ranges are in order and apart from each other.
enum automaton_slice automaton_slice_of(const struct automaton_range *ranges, int n,
                                        bool in_string);
void automaton_set_slice(struct automaton *a, int rule, enum automaton_slice slice);
// A rule that is defined at once; of nothing: -1.
int automaton_rule_of(struct automaton *a, int start, enum automaton_slice slice);
bool automaton_failed(const struct automaton *a);
// All texts are those of this node. ST_INVALID: a rule calls itself before it reads anything.
enum status automaton_finish(struct automaton *a, int start);

// ---- running ------------------------------------------------------------------------------------

void automaton_allow(struct automaton *a); // AUTOMATON_BUDGET nodes from here on
// The state behind a byte. ST_TOO_LONG, ST_NO_MEMORY.
enum status automaton_step(struct automaton *a, int state, uint8_t byte, int *ret);
bool automaton_may_end(const struct automaton *a, int state);
bool automaton_may_go_on(const struct automaton *a, int state); // some byte may follow
/* Units that may come in a state, and what else: all that a state takes are up to `max` units;
 * from `min` to `max`, at least one, and what `behind` takes behind them; and what `rest` takes,
 * which is a state, or AUTOMATON_DEAD. The last two are so where it splits: nothing that begins a
 * unit may come behind one, and the rule takes no more than units. */
struct automaton_run {
    enum automaton_slice slice; // AUTOMATON_SLICES: nothing is known
    int min, max;
    bool splits;
    int rest, behind;
};
enum status automaton_run(struct automaton *a, int state, struct automaton_run *ret);
int automaton_states(const struct automaton *a);   // that there are so far
size_t automaton_bytes(const struct automaton *a); // about, of nodes, states and stacks so far

#endif
