/* test_decode_graphs.c: which captured decode steps are kept when there are more shapes than room.
 */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/decode_graphs.h"
#include "tests/support/support.h"

static int a_batch, a_kv; // only their addresses count

static struct decode_graph *find(struct decode_graphs *g, int rows)
{
    const struct decode_graph_key key = {&a_batch, &a_kv, rows, rows, 256, 16, 0};
    return decode_graphs_find(g, &key);
}

TEST(test_the_oldest_goes)
{
    struct decode_graphs *g = decode_graphs_new(NULL);
    assert_non_null(g);
    for (int rows = 1; rows <= DECODE_GRAPHS_MAX; rows++) find(g, rows)->warm = true;
    find(g, 1); // used again: now 2 is the oldest

    struct decode_graph *more = find(g, DECODE_GRAPHS_MAX + 1);
    assert_non_null(more); // a further shape finds room
    assert_int_equal(more->key.rows, DECODE_GRAPHS_MAX + 1);
    assert_false(more->warm);
    more->warm = true;
    assert_true(find(g, DECODE_GRAPHS_MAX + 1)->warm); // and is known the next time
    assert_true(find(g, 1)->warm);
    assert_true(find(g, 3)->warm);
    assert_false(find(g, 2)->warm); // anew
    decode_graphs_free(g);
}

TEST(test_what_is_the_key)
{
    struct decode_graphs *g = decode_graphs_new(NULL);
    assert_non_null(g);
    const struct decode_graph_key key = {&a_batch, &a_kv, 4, 4, 256, 16, 0};
    const struct decode_graph_key others[] = {
        {&a_batch, &a_kv, 4, 4, 512, 16, 0},   {&a_batch, &a_kv, 4, 4, 256, 32, 0},
        {&a_batch, &a_kv, 4, 4, 256, 16, 7},   {&a_batch, &a_kv, 6, 4, 256, 16, 0},
        {&a_batch, &a_kv, 4, 2, 256, 16, 0},   {&a_kv, &a_kv, 4, 4, 256, 16, 0},
        {&a_batch, &a_batch, 4, 4, 256, 16, 0}};
    decode_graphs_find(g, &key)->warm = true;
    assert_true(decode_graphs_find(g, &key)->warm);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        assert_false(decode_graphs_find(g, &others[i])->warm);
    assert_true(decode_graphs_find(g, &key)->warm);
    decode_graphs_free(g);
    decode_graphs_free(NULL);
}
