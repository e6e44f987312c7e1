/* constraint.h: what a completion may be: a JSON value of a schema, a text of a regular expression,
 * one of several texts. A constraint is compiled once for a vocabulary and says, from state to
 * state, which tokens may come next. States are numbers; a text begins in CONSTRAINT_START.
 *
 * Server and trainer use the same, so that a mask which sampling had is made again to the bit.
 * Thread: any, each constraint has a lock of its own. Bounds of time and memory: automaton.h. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_CONSTRAINT_CONSTRAINT_H
#define COMMON_CONSTRAINT_CONSTRAINT_H

#include "common/text/tokenizer.h"
#include <jansson.h>

#define CONSTRAINT_START 0

// The constraints of one vocabulary, the last ones compiled among them.
struct constraints;
// The tokenizer is borrowed. Ends: tokens that end a completion; they come where it may end.
// vocab_size: of the logits, which may have rows that no token has.
enum status constraints_new(const struct tokenizer *tokenizer, int vocab_size, const int *ends,
                            int n_ends, struct constraints **ret);
void constraints_free(struct constraints *all); // once nobody holds one

struct constraint;
/* Spec is a text, which the completion is, or an object with one of
 *     "json_schema": a schema (json_schema.h), "json_object": true, "regex": a pattern that the
 *     whole matches, "grammar": GBNF whose root it is (pattern.h), "choice": the texts that it may
 * be, or of these, which put specs together: "sequence": [SPEC, ...]   one behind the other
 *     "either": [SPEC, ...]     one of them; a text "" among them is nothing
 *     "repeat": SPEC            any number of times, with "min" and "max" so often, and with
 *                               "between": SPEC that between one and the next
 *     "until": [TEXT, ...]      free text up to and with the first of these texts in it
 *     "without": [TEXT, ...]    free text that has none of these texts in it
 * "strict_whitespace": true in an object is ", " and ": " and no other white space in its JSON and
 * in that of what it is put together of. The name of a special token in a text ("<|im_start|>") is
 * that token; free text, patterns, grammars and JSON have none. The completion of
 *     {"sequence": ["<tool_call>\n{\"name\": \"f\", \"arguments\": ", {"json_schema": {...}},
 *                   "}\n</tool_call>"]}
 * is a call. A reference.
 * ST_INVALID, ST_UNSUPPORTED, ST_TOO_LONG: what of it is wrong, not known here, or over a bound. */
enum status constraints_get(struct constraints *all, const json_t *spec, struct constraint **ret);
struct constraint *constraint_hold(struct constraint *c); // one more reference; NULL: NULL
void constraint_release(struct constraint *c);

// OpenAI's "response_format" as a spec; NULL: of the type "text", or none. ST_INVALID,
// ST_UNSUPPORTED. A new reference.
enum status constraint_of_format(const json_t *format, json_t **ret);
// Whether a text is what a spec takes, by itself: no vocabulary, nothing kept. Errors as of
// constraints_get(): of "" they are the spec's.
enum status constraint_meets(const json_t *spec, const char *text, size_t len, bool *ret);

// 32-bit words of a mask: bit i % 32 of word i / 32 says that token i may come.
int constraint_words(const struct constraint *c);
// ret (constraint_words()). ST_NO_MEMORY. ST_TOO_LONG, ST_UNSUPPORTED: it goes beyond a bound; it
// is of nothing then, and constraint_next() fails from that state, too.
enum status constraint_mask(struct constraint *c, int state, uint32_t *ret);
struct constraint_row { // of logits
    struct constraint *constraint;
    int state;
    int32_t token; // what came there; -1: nothing has
};
// The masks of n rows, (n, constraint_words()), behind what came there, which OpenMP's threads make
// beside each other: the same as one by one. Errors likewise, of a row that has one; its mask is of
// nothing, as that of a row whose token may not come.
enum status constraint_masks(const struct constraint_row *rows, int n, uint32_t *ret);
// The state behind a token; that of an end is the same. < 0: it may not come here. ST_TOO_LONG,
// ST_UNSUPPORTED, ST_NO_MEMORY.
enum status constraint_next(struct constraint *c, int state, int32_t token, int *ret);
// Follows the rows' tokens with OpenMP's threads, so that constraint_next() of them is quick.
void constraint_follow(const struct constraint_row *rows, int n);
// Whether nothing but an end may come.
bool constraint_is_over(struct constraint *c, int state);

#endif
