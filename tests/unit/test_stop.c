/* test_stop.c: infer-server/http/stop.c: what is found does not depend on how the text is cut up.
 */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/rng.h"
#include "infer-server/http/api.h"
#include "tests/support/support.h"

static void add(struct stop_set *set, const char *text)
{
    assert_ok(stop_set_add(set, text, strlen(text)));
}

TEST(test_first_end_wins)
{
    struct stop_set set = {.n = 0};
    int which = -1;
    size_t at = 99;
    add(&set, "cdef");
    add(&set, "de");
    add(&set, "cde");
    assert_true(stop_find(&set, "abcdefg", 7, 0, &which, &at));
    assert_int_equal(which, 2); // "de" and "cde" end together, before "cdef": the longer
    assert_int_equal(at, 2);
    assert_false(stop_find(&set, "abcd", 4, 0, &which, &at));
    assert_int_equal(stop_hold(&set, "abcd", 4), 2);
    assert_int_equal(stop_hold(&set, "xyz", 3), 0);
    assert_true(stop_find(&set, "abcde", 5, 4, &which, &at)); // only its last byte is new
    assert_int_equal(at, 2);
    stop_set_release(&set);
    assert_int_equal(set.n, 0);
}

TEST(test_bad_sets)
{
    struct stop_set set = {.n = 0};
    static char long_text[STOP_BYTES_MAX + 1];
    memset(long_text, 'x', sizeof long_text);
    assert_status(stop_set_add(&set, "", 0), ST_INVALID);
    assert_status(stop_set_add(&set, long_text, sizeof long_text), ST_INVALID);
    for (int i = 0; i < STOP_STRINGS_MAX; i++) assert_ok(stop_set_add(&set, "a", 1));
    assert_fails(stop_set_add(&set, "b", 1), ST_INVALID, "16");
    stop_set_release(&set);
}

// The specification: byte by byte, the first position at which some string ends; the longest of
// them.
static bool slow_find(const struct stop_set *set, const char *text, size_t len, size_t *ret_at)
{
    for (size_t end = 1; end <= len; end++) {
        size_t longest = 0;
        for (int i = 0; i < set->n; i++) {
            size_t n = set->lengths[i];
            if (n <= end && n > longest && memcmp(text + end - n, set->strings[i], n) == 0)
                longest = n;
        }
        if (longest > 0) {
            *ret_at = end - longest;
            return true;
        }
    }
    return false;
}

TEST(test_pieces)
{
    struct rng rng;
    rng_init(&rng, 1, 2);
    int found = 0;
    for (int round = 0; round < 20000; round++) {
        struct stop_set set = {.n = 0};
        char text[24], word[5];
        size_t len = rng_below(&rng, sizeof text), want = 0, at = 0, seen = 0, out = 0;
        for (size_t i = 0; i < len; i++) text[i] = (char)('a' + rng_below(&rng, 3));
        for (uint32_t n = 1 + rng_below(&rng, 3); n > 0; n--) {
            size_t m = 1 + rng_below(&rng, 5);
            for (size_t i = 0; i < m; i++) word[i] = (char)('a' + rng_below(&rng, 3));
            assert_ok(stop_set_add(&set, word, m));
        }
        bool stops = slow_find(&set, text, len, &want), hit = false;
        while (seen < len && !hit) {
            int which;
            size_t next = seen + 1 + rng_below(&rng, 4);
            if (next > len) next = len;
            hit = stop_find(&set, text, next, seen, &which, &at);
            if (!hit) { // what is not held back is out for good
                size_t safe = next - stop_hold(&set, text, next);
                assert_true(safe >= out);
                out = safe;
            }
            seen = next;
        }
        assert_int_equal(hit, stops);
        if (hit) assert_int_equal(at, want);
        if (hit) assert_true(out <= at);
        found += hit;
        stop_set_release(&set);
    }
    assert_in_range(found, 1000, 19000); // both outcomes were tried
}
