/* spec_counters.h: speculative decoding of one step, from a server's counters: GET /metrics before
 * and after the rollouts, and the difference. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_SPEC_COUNTERS_H
#define TRAINER_SPEC_COUNTERS_H

#include "common/http/http_client.h"

#define SPEC_MAX_POSITIONS 64

struct spec_counters {
    bool present;    // the server has such counters
    int n_positions; // 1 + the last position there is a counter of
    union {
        struct {
            double num_drafts, num_draft_tokens, num_accepted_tokens;
            double accepted_per_position[SPEC_MAX_POSITIONS];
        };
        double all[3 + SPEC_MAX_POSITIONS]; // the same
    };
};

// Reads vllm:spec_decode_* out of Prometheus' text format; series that differ in other labels
// (model, engine) are added up. Lines that are something else are passed over.
void spec_counters_parse(const char *text, struct spec_counters *ret);
// What was counted between the two. Not `present` where either is not, or where a counter went
// back because the server started anew.
struct spec_counters spec_counters_between(const struct spec_counters *before,
                                           const struct spec_counters *after);
void spec_counters_add(struct spec_counters *sum, const struct spec_counters *more);

// 1 + accepted / drafts; accepted / draft tokens. NAN where nothing was drafted.
double spec_acceptance_length(const struct spec_counters *c);
double spec_acceptance_rate(const struct spec_counters *c);
double spec_acceptance_at(const struct spec_counters *c, int position); // accepted / drafts

struct bridge_file;
// All servers that count: the trained one and those of --also-count. Any thread but for _new() and
// _free().
struct spec_watch;

// All are reached through `http`, a client of the trained one, which stays the caller's and must
// outlive the watch. `more`: bridge files of further servers with commas between them, or NULL.
// Errors name the bridge file: not there, its server not alive, or one that is named twice (it
// would be counted twice).
enum status spec_watch_new(const struct bridge_file *trained, struct http_client *http,
                           const char *more, struct spec_watch **ret);
void spec_watch_free(struct spec_watch *w);

enum status spec_watch_begin(struct spec_watch *w); // before the rollouts: takes the snapshots
// After them: what the servers counted since then, added up. Servers that do not speculate, or were
// started anew meanwhile, add nothing; `present` where any is. Several threads may each be between
// the two: what was counted is then that one's which ends first, and no other's.
enum status spec_watch_end(struct spec_watch *w, struct spec_counters *ret);

#endif
