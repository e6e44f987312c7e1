/* test_batch.c: what a batch says of the keys that each sequence finds in the pool: those of
 * earlier batches, however many of its sequences share blocks. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/batch.h"
#include "tests/support/loaded.h"
#include "tests/support/support.h"

#define BLOCK 4

struct added {
    int first, n;
    int32_t blocks[4];
    int stored; // that the view is to name
};

static void check(const struct added *rows, int n)
{
    static const int32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    struct batch *b = NULL;
    struct device *dev = test_cpu();
    assert_ok(batch_new(dev, 32, 8, 4, 8, &b));
    for (int i = 0; i < n; i++)
        assert_ok(batch_add_paged(b, tokens, rows[i].n, rows[i].first, rows[i].blocks, 4, BLOCK,
                                  batch_plain));
    assert_ok(batch_commit(b, 0, 0));
    for (int i = 0; i < n; i++) assert_int_equal(batch_view(b)->stored[i], rows[i].stored);
    batch_free(b);
}

TEST(test_sequences_of_their_own)
{
    static const struct added rows[] = {
        {7, 1, {0, 1, 2, 3}, 7}, {0, 5, {4, 5, 6, 7}, 0}, {5, 3, {8, 9, 10, 11}, 5}};
    check(rows, 3);
}

// A draft's row sees the rows before it, which the same step stores; over a block's border too.
TEST(test_drafts_go_on)
{
    static const struct added rows[] = {{6, 1, {0, 1, 2, 3}, 6}, {7, 1, {0, 1, 2, 3}, 6},
                                        {8, 1, {0, 1, 2, 3}, 6}, {9, 1, {0, 1, 2, 3}, 6},
                                        {9, 1, {4, 5, 6, 7}, 9}, {10, 1, {4, 5, 6, 7}, 9}};
    check(rows, 6);
}

// A shared prompt's blocks, and positions that happen to follow, do not make two samples one.
TEST(test_siblings_stay_apart)
{
    static const struct added rows[] = {{8, 1, {0, 1, 2, 3}, 8}, {9, 1, {0, 1, 4, 5}, 9}};
    check(rows, 2);
}

// Of a table with room for 64 blocks a sequence only what the longest context needs is copied, and
// every sequence finds its blocks.
TEST(test_table_closes_up)
{
    enum { ROOM = 64, SEQS = 3 };
    static const int firsts[SEQS] = {3, 4 * 19, 10};
    struct device *dev = test_cpu();
    for (int full = 0; full < 2; full++) {
        const int room = full ? 20 : ROOM; // of 20 no power of two is less and enough
        struct batch *b = NULL;
        assert_ok(batch_new(dev, 32, 8, room, 8, &b));
        for (int s = 0; s < SEQS; s++) {
            int32_t token = 1, blocks[20];
            for (int i = 0; i < 20; i++) blocks[i] = 100 * s + i;
            assert_ok(batch_add_paged(b, &token, 1, firsts[s], blocks, 20, BLOCK, batch_plain));
        }
        for (int again = 0; again < 2; again++) {
            assert_ok(batch_commit(b, 0, 0));
            const struct batch_view *view = batch_view(b);
            assert_int_equal(view->table_stride, full ? room : 32);
            for (int s = 0; s < SEQS; s++)
                for (int i = 0; i <= firsts[s] / BLOCK; i++)
                    assert_int_equal(view->block_table[s * view->table_stride + i], 100 * s + i);
        }
        batch_free(b);
    }
}

// Of a batch that decodes not every row is wanted; both are padded.
TEST(test_padding)
{
    const int32_t blocks[1] = {7};
    struct batch *b = NULL;
    struct device *dev = test_cpu();
    assert_ok(batch_new(dev, 16, 8, 1, 4, &b));
    for (int32_t s = 0; s < 5; s++)
        assert_ok(batch_add_paged(b, &s, 1, s % 4, blocks, 1, BLOCK, batch_plain));
    assert_true(batch_decodes(b));
    assert_ok(batch_want_row(b, 4));
    assert_ok(batch_want_row(b, 2));
    assert_ok(batch_want_row(b, 3));
    assert_int_equal(batch_commit(b, 9, 4), ST_INVALID);
    assert_int_equal(batch_commit(b, 8, 5), ST_INVALID);
    assert_ok(batch_commit(b, 8, 4));
    assert_int_equal(batch_view(b)->n_tokens, 8);
    assert_int_equal(batch_view(b)->n_seqs, 8);
    for (int i = 5; i < 8; i++) assert_int_equal(batch_view(b)->slots[i], -1); // nothing is stored
    assert_int_equal(batch_rows(b), 4);
    assert_int_equal(batch_rows_device(b)[0], 4);
    assert_int_equal(batch_rows_device(b)[2], 3);
    assert_int_equal(batch_rows_device(b)[3], 0);
    batch_clear(b);
    const int32_t two[2] = {1, 2};
    assert_ok(batch_add_paged(b, two, 2, 0, blocks, 1, BLOCK, batch_plain));
    assert_false(batch_decodes(b));
    assert_int_equal(batch_commit(b, 4, 4), ST_INVALID);
    batch_free(b);
}
