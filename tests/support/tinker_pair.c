/* tinker_pair.c: see tinker_pair.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_pair.h"

static const int32_t tokens[TINKER_N] = {10, 20, 30, 40, 50, 60},
                     others[TINKER_N] = {7, 8, 9, 10, 11, 12};
static const int64_t targets[TINKER_N] = {20, 30, 40, 50, 60, 70},
                     other_targets[TINKER_N] = {8, 9, 10, 11, 12, 13};
static const float weights[TINKER_N] = {0, 1, 1, 0.5f, 1, 1};
const struct tinker_datum tinker_one = {TINKER_N, tokens, targets, {"weights"}, {weights}},
                          tinker_other = {TINKER_N, others, other_targets, {"weights"}, {weights}};

void tinker_pair_start(struct tinker_pair *p, const char *folder, const char *const daemon_more[],
                       const char *const server_more[])
{
    daemon_start(&p->daemon, folder ? folder : daemon_model(test_folder(), true, 5), daemon_more);
    tinker_server_start(&p->server, &p->daemon, NULL, server_more);
}

void tinker_pair_stop(struct tinker_pair *p)
{
    assert_int_equal(tinker_server_stop(&p->server), 0);
    assert_int_equal(daemon_stop(&p->daemon), 0);
}
