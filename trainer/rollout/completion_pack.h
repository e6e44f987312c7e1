/* completion_pack.h: completions as bytes, by which ranks that train together tell each other what
 * their servers gave. All of them run the same program on processors of one byte order. Plain
 * functions; any thread. */
#ifndef TRAINER_COMPLETION_PACK_H
#define TRAINER_COMPLETION_PACK_H

#include "common/base/bytes.h"
#include "trainer/rollout/completion.h"

// Appends a completion without its advantages, and the place that it has in its rollout.
enum status completion_pack(const struct completion *c, int place, struct bytes *to);
// The one at *at, which is moved behind it. ST_FORMAT where it is not whole.
enum status completion_unpack(const char *from, size_t len, size_t *at, int *ret_place,
                              struct completion *ret);

#endif
