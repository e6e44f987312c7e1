/* spec_watch.h: speculative decoding of one step over all servers that count: the trained one and
 * those of --also-count. Any thread, but for spec_watch_new() and _free(). */
#ifndef TRAINER_SPEC_WATCH_H
#define TRAINER_SPEC_WATCH_H

#include "bridge/bridge_file.h"
#include "trainer/rollout/spec_counters.h"

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
