/* rendezvous_impl.h: the two sides of rendezvous(). */
#ifndef COMMON_RANKS_RENDEZVOUS_IMPL_H
#define COMMON_RANKS_RENDEZVOUS_IMPL_H

#include "common/ranks/place.h"
#include "common/ranks/rendezvous.h"

// Says now and then that this process waits, and for which ranks; *next_ns: when to say so again,
// 0 at first.
void rendezvous_say(const struct place *place, const char *ranks, int64_t *next_ns);
// Rank 0: until all are there.
enum status gather(struct place *place, int64_t deadline_ns, const struct bytes *bytes,
                   struct peers *p);
// Another: until rank 0 has answered.
enum status join(struct place *place, int64_t deadline_ns, struct peers *p,
                 struct bytes *ret_bytes);

#endif
