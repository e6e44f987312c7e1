/* test_kv_cache.c: the book of KV blocks: all or nothing, shared blocks, order of reuse, and a
 * random walk against a plain count of holders. */
#include "tests/support/support.h"
#include "common/base/rng.h"
#include "infer-server/kv_cache.h"
#include <string.h>

static void take_is_all_or_nothing(void **state)
{
    (void)state;
    struct kv_cache *c = NULL;
    int32_t blocks[4] = {-1, -1, -1, -1};
    assert_ok(kv_cache_new(4, 16, &c));
    assert_int_equal(kv_cache_blocks_for(c, 0), 0);
    assert_int_equal(kv_cache_blocks_for(c, 16), 1);
    assert_int_equal(kv_cache_blocks_for(c, 17), 2);
    assert_true(kv_cache_take(c, 3, blocks));
    assert_int_equal(kv_cache_used(c), 3);
    assert_false(kv_cache_take(c, 2, blocks + 3));
    assert_int_equal(blocks[3], -1);
    assert_int_equal(kv_cache_available(c), 1);
    assert_true(kv_cache_take(c, 1, blocks + 3));
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < i; k++) assert_int_not_equal(blocks[i], blocks[k]);
    kv_cache_drop(c, blocks, 4);
    assert_int_equal(kv_cache_used(c), 0);
    kv_cache_free(c);
}

static void shared_blocks_outlive_one_holder(void **state)
{
    (void)state;
    struct kv_cache *c = NULL;
    int32_t prompt[2], own[3];
    assert_ok(kv_cache_new(5, 16, &c));
    assert_true(kv_cache_take(c, 2, prompt));
    kv_cache_share(c, prompt, 2);
    assert_int_equal(kv_cache_used(c), 2);
    assert_int_equal(kv_cache_holders(c, prompt[0]), 2);
    kv_cache_drop(c, prompt, 2);
    assert_int_equal(kv_cache_used(c), 2);
    assert_true(kv_cache_take(c, 3, own));
    for (int i = 0; i < 3; i++) assert_true(own[i] != prompt[0] && own[i] != prompt[1]);
    kv_cache_drop(c, prompt, 2);
    assert_int_equal(kv_cache_used(c), 3);
    kv_cache_free(c);
}

static void longest_free_is_taken_first(void **state)
{
    (void)state;
    struct kv_cache *c = NULL;
    int32_t all[3], next[3];
    assert_ok(kv_cache_new(3, 4, &c));
    assert_true(kv_cache_take(c, 3, all));
    kv_cache_drop(c, &all[1], 1);
    kv_cache_drop(c, &all[2], 1);
    kv_cache_drop(c, &all[0], 1);
    assert_true(kv_cache_take(c, 3, next));
    assert_int_equal(next[0], all[1]);
    assert_int_equal(next[1], all[2]);
    assert_int_equal(next[2], all[0]);
    kv_cache_free(c);
}

static void refuses_empty_pool(void **state)
{
    (void)state;
    struct kv_cache *c = NULL;
    assert_status(kv_cache_new(0, 16, &c), ST_INVALID);
    assert_null(c);
    kv_cache_free(c);
}

// 64 sequences come, share and go at random; after each move the book agrees with a recount.
static void random_walk(void **state)
{
    (void)state;
    enum { N_BLOCKS = 97, N_SEQS = 64, MOST = 9 };
    struct kv_cache *c = NULL;
    int32_t held[N_SEQS][MOST];
    int n_held[N_SEQS] = {0}, holders[N_BLOCKS];
    struct rng r;
    rng_init(&r, 7, 0);
    assert_ok(kv_cache_new(N_BLOCKS, 16, &c));
    for (int move = 0; move < 20000; move++) {
        int a = (int)rng_below(&r, N_SEQS), b = (int)rng_below(&r, N_SEQS);
        if (n_held[a]) {
            kv_cache_drop(c, held[a], n_held[a]);
            n_held[a] = 0;
        } else if (n_held[b] && rng_below(&r, 2)) {
            n_held[a] = 1 + (int)rng_below(&r, (uint32_t)n_held[b]);
            memcpy(held[a], held[b], sizeof held[a]);
            kv_cache_share(c, held[a], n_held[a]);
        } else {
            int n = 1 + (int)rng_below(&r, MOST), available = kv_cache_available(c);
            bool taken = kv_cache_take(c, n, held[a]);
            assert_int_equal(taken, n <= available);
            if (taken) n_held[a] = n;
        }
        memset(holders, 0, sizeof holders);
        for (int s = 0; s < N_SEQS; s++)
            for (int i = 0; i < n_held[s]; i++) holders[held[s][i]]++;
        int used = 0;
        for (int i = 0; i < N_BLOCKS; i++) {
            used += holders[i] > 0;
            assert_int_equal(kv_cache_holders(c, i), holders[i]);
        }
        assert_int_equal(kv_cache_used(c), used);
    }
    kv_cache_free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(take_is_all_or_nothing),
        cmocka_unit_test(shared_blocks_outlive_one_holder),
        cmocka_unit_test(longest_free_is_taken_first),
        cmocka_unit_test(refuses_empty_pool),
        cmocka_unit_test(random_walk),
    };
    return cmocka_run_group_tests_name("kv_cache", tests, NULL, NULL);
}
