/* exchange.h: how ranks that train together come by one another's samples. The thread that owns the
 * communicator. */
#ifndef TRAINER_EXCHANGE_H
#define TRAINER_EXCHANGE_H

#include "trainer/rollout/rollout.h"

// Each rank has pulled its own groups (rollout_owns()); then each has those of all. What was
// exchanged before is not sent again, unless it was dropped (rollout_drop_older()) and pulled anew.
// Of one rank nothing. ST_MISMATCH where another gives what is no group of its own.
enum status rollout_exchange(struct comm *comm, struct rollout *r);
// Nothing of it is to be sent: all ranks have it already.
enum status rollout_is_everywhere(struct rollout *r);

#endif
