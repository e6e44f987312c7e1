/* test_block_manager.c: the book of KV blocks: all or nothing, shared blocks, names, order of
 * reuse, and a random walk against plain lists; and the hashes that names are made of. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "common/base/rng.h"
#include "infer-server/engine/block_manager.h"

LATER(block_manager_free)

static struct block_manager *manager_of(int n_blocks, int block_size)
{
    struct block_manager *c = NULL;
    assert_ok(block_manager_new(n_blocks, block_size, &c));
    return test_later(c, block_manager_free_later);
}

TEST(take_is_all_or_nothing)
{
    struct block_manager *c = manager_of(4, 16);
    int32_t blocks[4] = {-1, -1, -1, -1};
    assert_int_equal(block_manager_blocks_for(c, 0), 0);
    assert_int_equal(block_manager_blocks_for(c, 16), 1);
    assert_int_equal(block_manager_blocks_for(c, 17), 2);
    assert_true(block_manager_allocate(c, 3, blocks));
    assert_int_equal(block_manager_used(c), 3);
    assert_false(block_manager_allocate(c, 2, blocks + 3));
    assert_int_equal(blocks[3], -1);
    assert_int_equal(block_manager_available(c), 1);
    assert_true(block_manager_allocate(c, 1, blocks + 3));
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < i; k++) assert_int_not_equal(blocks[i], blocks[k]);
    block_manager_drop(c, blocks, 4);
    assert_int_equal(block_manager_used(c), 0);
}

TEST(shared_blocks_outlive_one_holder)
{
    struct block_manager *c = manager_of(5, 16);
    int32_t prompt[2], own[3];
    assert_true(block_manager_allocate(c, 2, prompt));
    block_manager_share(c, prompt, 2);
    assert_int_equal(block_manager_used(c), 2);
    assert_int_equal(block_manager_ref_count(c, prompt[0]), 2);
    block_manager_drop(c, prompt, 2);
    assert_int_equal(block_manager_used(c), 2);
    assert_true(block_manager_allocate(c, 3, own));
    for (int i = 0; i < 3; i++) assert_true(own[i] != prompt[0] && own[i] != prompt[1]);
    block_manager_drop(c, prompt, 2);
    assert_int_equal(block_manager_used(c), 3);
}

static struct block_key key_of(uint64_t text)
{
    return (struct block_key){.hash.part = {text, ~text}, .version = 2};
}

static void name(struct block_manager *c, int32_t block, uint64_t text)
{
    const struct block_key key = key_of(text);
    block_manager_cache(c, block, &key);
}

static int32_t find(const struct block_manager *c, uint64_t text)
{
    const struct block_key key = key_of(text);
    return block_manager_find(c, &key);
}

TEST(longest_free_is_taken_first)
{
    struct block_manager *c = manager_of(4, 4);
    int32_t all[4], next[4];
    assert_true(block_manager_allocate(c, 4, all));
    for (int i = 0; i < 3; i++) name(c, all[i], (uint64_t)i);
    block_manager_drop(c, &all[1], 1);
    block_manager_drop(c, &all[2], 1);
    block_manager_drop(c, &all[0], 1);
    block_manager_drop(c, &all[3], 1); // has no name: of no use to anybody
    assert_true(block_manager_allocate(c, 4, next));
    assert_int_equal(next[0], all[3]);
    assert_int_equal(next[1], all[1]);
    assert_int_equal(next[2], all[2]);
    assert_int_equal(next[3], all[0]);
}

TEST(end_of_a_sequence_goes_first)
{
    struct block_manager *c = manager_of(3, 4);
    int32_t all[3], next[1];
    assert_true(block_manager_allocate(c, 3, all));
    for (int i = 0; i < 3; i++) name(c, all[i], (uint64_t)i);
    block_manager_drop(c, all, 3);
    for (int left = 3; left > 0; left--) {
        for (int i = 0; i < 3; i++) assert_int_equal(find(c, (uint64_t)i), i < left ? all[i] : -1);
        assert_true(block_manager_allocate(c, 1, next));
    }
}

TEST(found_until_taken)
{
    struct block_manager *c = manager_of(3, 4);
    int32_t all[3], remaining[2];
    assert_int_equal(find(c, 7), -1);
    assert_true(block_manager_allocate(c, 3, all));
    name(c, all[1], 7);
    name(c, all[1], 8); // has one
    assert_int_equal(find(c, 7), all[1]);
    assert_int_equal(find(c, 8), -1);
    block_manager_drop(c, all, 3);
    assert_int_equal(block_manager_available(c), 3);
    assert_int_equal(find(c, 7), all[1]); // free, and as it was
    assert_int_equal(block_manager_ref_count(c, all[1]), 0);
    block_manager_share(c, &all[1], 1);
    block_manager_share(c, &all[1], 1);
    assert_int_equal(block_manager_ref_count(c, all[1]), 2);
    assert_int_equal(block_manager_available(c), 2);
    assert_true(block_manager_allocate(c, 2, remaining));
    assert_true(remaining[0] != all[1] && remaining[1] != all[1]);
    block_manager_drop(c, &all[1], 1);
    assert_false(block_manager_allocate(c, 1, remaining));
    block_manager_drop(c, &all[1], 1);
    assert_int_equal(find(c, 7), all[1]);
    assert_true(block_manager_allocate(c, 1, remaining));
    assert_int_equal(find(c, 7), -1);
    name(c, remaining[0], 8); // of its new holder
    assert_int_equal(find(c, 8), remaining[0]);
}

TEST(every_part_of_a_key_counts)
{
    struct block_manager *c = manager_of(5, 4);
    int32_t all[5];
    struct block_key keys[5];
    for (int i = 0; i < 5; i++) keys[i] = key_of(7);
    keys[1].hash.part[0]++;
    keys[2].hash.part[1]++;
    keys[3].version++;
    keys[4].adapter++;
    assert_true(block_manager_allocate(c, 5, all));
    for (int i = 0; i < 5; i++) {
        assert_int_equal(block_manager_find(c, &keys[i]), -1);
        block_manager_cache(c, all[i], &keys[i]);
    }
    for (int i = 0; i < 5; i++) assert_int_equal(block_manager_find(c, &keys[i]), all[i]);
}

// Two samples that computed the same text: it is found until both blocks are gone.
TEST(blocks_of_one_name)
{
    struct block_manager *c = manager_of(3, 4);
    int32_t all[3], taken[1];
    assert_true(block_manager_allocate(c, 3, all));
    for (int i = 0; i < 3; i++) name(c, all[i], 7);
    assert_int_equal(find(c, 7), all[2]);
    for (int i = 0; i < 3; i++) {
        const int32_t first[] = {all[1], all[2], all[0]};
        block_manager_drop(c, &first[i], 1);
        assert_true(block_manager_allocate(c, 1, taken));
        assert_int_equal(taken[0], first[i]);
        assert_int_equal(find(c, 7), i == 0 ? all[2] : i == 1 ? all[0] : -1);
    }
}

TEST(hashes_depend_on_all_before)
{
    int32_t tokens[12];
    struct block_hash start = {.part = {0, 0}}, other = {.part = {1, 0}}, a[3], b[3];
    for (int i = 0; i < 12; i++) tokens[i] = i;
    assert_true(block_hash_chain(&start, tokens, 4, 3, a));
    assert_true(block_hash_chain(&start, tokens, 4, 1, b)); // in pieces the same
    assert_true(block_hash_chain(&b[0], tokens + 4, 4, 2, b + 1));
    assert_memory_equal(a, b, sizeof a);
    assert_true(block_hash_chain(&other, tokens, 4, 3, b));
    for (int i = 0; i < 3; i++) assert_memory_not_equal(&a[i], &b[i], sizeof *a);
    tokens[3]++;
    assert_true(block_hash_chain(&start, tokens, 4, 3, b));
    for (int i = 0; i < 3; i++) assert_memory_not_equal(&a[i], &b[i], sizeof *a);
    tokens[3]--;
    tokens[11]++;
    assert_true(block_hash_chain(&start, tokens, 4, 3, b));
    assert_memory_equal(a, b, 2 * sizeof *a);
    assert_memory_not_equal(&a[2], &b[2], sizeof *a);
}

TEST(refuses_empty_pool)
{
    struct block_manager *c = NULL;
    assert_status(block_manager_new(0, 16, &c), ST_INVALID);
    assert_null(c);
    block_manager_free(c);
}

// 64 sequences come, share, find and go at random; after each move the book agrees with a recount,
// and what is taken is what has been of no use for longest.
TEST(random_walk)
{
    enum { N_BLOCKS = 97, N_SEQS = 64, MOST = 9, N_TEXTS = 150 };
    struct block_manager *c = manager_of(N_BLOCKS, 16);
    int32_t held[N_SEQS][MOST];
    int n_held[N_SEQS] = {0}, ref_counts[N_BLOCKS] = {0}, n_found = 0, n_evicted = 0;
    int text_of[N_BLOCKS], freed_at[N_BLOCKS] = {0}, now = 0; // text 0: no name
    struct rng r;
    rng_init(&r, 7, 0);
    memset(text_of, 0, sizeof text_of);
    for (int move = 0; move < 20000; move++) {
        int a = (int)rng_below(&r, N_SEQS), b = (int)rng_below(&r, N_SEQS);
        const int text = 1 + (int)rng_below(&r, N_TEXTS), found = find(c, (uint64_t)text);
        if (n_held[a] && rng_below(&r, 2)) {
            const int at = (int)rng_below(&r, (uint32_t)n_held[a]);
            name(c, held[a][at], (uint64_t)text);
            if (!text_of[held[a][at]]) text_of[held[a][at]] = text;
        } else if (n_held[a]) {
            block_manager_drop(c, held[a], n_held[a]);
            for (int i = n_held[a] - 1; i >= 0; i--)
                if (--ref_counts[held[a][i]] == 0) freed_at[held[a][i]] = ++now;
            n_held[a] = 0;
        } else if (found >= 0) {
            block_manager_share(c, &found, 1);
            held[a][0] = found;
            n_held[a] = 1;
            n_found += ref_counts[found]++ == 0;
        } else if (n_held[b] && rng_below(&r, 2)) {
            n_held[a] = 1 + (int)rng_below(&r, (uint32_t)n_held[b]);
            memcpy(held[a], held[b], sizeof held[a]);
            block_manager_share(c, held[a], n_held[a]);
            for (int i = 0; i < n_held[a]; i++) ref_counts[held[a][i]]++;
        } else {
            int n = 1 + (int)rng_below(&r, MOST), available = block_manager_available(c);
            bool taken = block_manager_allocate(c, n, held[a]);
            assert_int_equal(taken, n <= available);
            if (taken) n_held[a] = n;
            for (int i = 0; i < n_held[a]; i++) {
                const int32_t block = held[a][i];
                assert_int_equal(ref_counts[block], 0);
                for (int k = 0; k < N_BLOCKS && text_of[block]; k++)
                    if (ref_counts[k] == 0)
                        assert_true(text_of[k] && freed_at[k] >= freed_at[block]);
                n_evicted += text_of[block] != 0;
                text_of[block] = 0;
                ref_counts[block] = 1;
            }
        }
        int used = 0, named = 0;
        for (int i = 0; i < N_BLOCKS; i++) {
            used += ref_counts[i] > 0;
            named += text_of[i] == text;
            assert_int_equal(block_manager_ref_count(c, i), ref_counts[i]);
        }
        assert_int_equal(block_manager_used(c), used);
        const int32_t again = find(c, (uint64_t)text);
        if (named)
            assert_true(again >= 0 && text_of[again] == text);
        else
            assert_int_equal(again, -1);
    }
    assert_true(n_found > 100 && n_evicted > 1000);
}
