/* liveness.h: every rank learns within seconds that another is gone, and which. Each keeps its
 * connection to rank 0 (rendezvous.h) and says every second that it lives, on a thread of its own,
 * so that the longest computation disturbs nothing. A connection that closes without a bye is
 * a process that was killed or ended; silence is one that was stopped, or a host or a link that is
 * gone. Rank 0 passes on to all others what it sees; where rank 0 itself is gone each sees it.
 *
 * Calls are of the main thread; liveness_check() of any. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_RANKS_LIVENESS_H
#define COMMON_RANKS_LIVENESS_H

#include "common/ranks/rendezvous.h"

// Within this and a second all know of a rank that is silent; of one that was killed, at once.
#define LIVENESS_SILENCE_S 6.0

struct liveness;

// Called once, on liveness's thread, when a rank is known to be gone.
typedef void (*liveness_fn)(void *context, const char *sentence);

// Takes the peers over, also on failure. silence_s: LIVENESS_SILENCE_S, or less in tests. on_loss
// may be NULL. The thread leaves a process's signals to others.
enum status liveness_start(struct peers *peers, double silence_s, liveness_fn on_loss,
                           void *context, struct liveness **ret);
// ST_PEER_GONE once a rank is gone, or becomes so within `ms`: "rank 2 (host, pid 123) is gone:
// it was killed or ended without a word". Who fails in the midst of what all ranks do together asks
// with a second or two, since that is most often why.
enum status liveness_check(struct liveness *l, int ms);
enum status liveness_watch(void *liveness); // liveness_check(l, 0), as comm_watch() wants it
// Says bye and waits for the thread. outcome: of this rank's work; where it is a failure of
// its own, the others hear this thread's sentence of it and count this rank as gone. Where rank 0
// has ended well, the others are no longer watched. NULL is fine.
void liveness_end(struct liveness *l, enum status outcome);

#endif
