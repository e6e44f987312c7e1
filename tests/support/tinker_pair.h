/* tinker_pair.h: the two servers of a test of the Tinker API, and what it trains on. Failures fail
 * the running test. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_TINKER_PAIR_H
#define TESTS_SUPPORT_TINKER_PAIR_H

#include "tests/support/tinker_client.h"

struct tinker_pair {
    struct daemon daemon;
    struct tinker_server server;
};
// A daemon that serves a model's folder (NULL: a new tiny one) with these options, and a cw-trainer
// serve on it.
void tinker_pair_start(struct tinker_pair *p, const char *folder, const char *const daemon_more[],
                       const char *const server_more[]);
void tinker_pair_stop(struct tinker_pair *p); // both, which end well

// Two datums of TINKER_N tokens with "weights", the first of which is 0.
enum { TINKER_N = 6 };
extern const struct tinker_datum tinker_one, tinker_other;

#endif
