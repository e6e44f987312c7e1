/* exchange.h: how ranks that train together come by one another's samples, as bytes: all of them
 * run the same program on processors of one byte order. The thread that owns the communicator. */
#ifndef TRAINER_EXCHANGE_H
#define TRAINER_EXCHANGE_H

#include "common/base/bytes.h"
#include "trainer/rollout/rollout.h"

// Each rank has pulled its own groups (rollout_owns()); then each has those of all. What was
// exchanged before is not sent again, unless it was dropped (rollout_drop_older()) and pulled anew.
// Of one rank nothing. ST_MISMATCH where another gives what is no group of its own.
enum status rollout_exchange(struct comm *comm, struct rollout *r);
// Nothing of it is to be sent: all ranks have it already.
enum status rollout_is_everywhere(struct rollout *r);

// Appends a completion without its advantages, and the place that it has in its rollout.
enum status completion_pack(const struct completion *c, int place, struct bytes *to);
// The one at *at, which is moved behind it. ST_FORMAT where it is not whole.
enum status completion_unpack(const char *from, size_t len, size_t *at, int *ret_place,
                              struct completion *ret);

#endif
