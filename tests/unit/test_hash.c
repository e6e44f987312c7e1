/* test_hash.c: common/base/hash.h against published values, and common/base/names.h. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/hash.h"
#include "common/base/names.h"
#include "tests/support/support.h"

TEST(published_values)
{
    char hex[9];
    assert_true(hash_fnv1a("", 0) == 0xcbf29ce484222325u); // Fowler, Noll and Vo's own list
    assert_true(hash_fnv1a("a", 1) == 0xaf63dc4c8601ec8cu);
    assert_true(hash_fnv1a("foobar", 6) == 0x85944171f73967e8u);
    assert_true(hash_mix(HASH_SPREAD) == 0xe220a8397b1dcdafu); // splitmix64's first, seed 0
    hash_sha256_hex("abc", 3, 4, hex);
    assert_string_equal(hex, "ba7816bf"); // FIPS 180-2
}

TEST(names_of_an_enum)
{
    static const char *const names[] = {"keep", "recompute", NULL};
    int value = 7;
    assert_int_equal(name_find(names, "recompute"), 1);
    assert_int_equal(name_find(names, "recomp"), -1);
    assert_ok(name_parse(names, "keep", &value));
    assert_int_equal(value, 0);
    value = 7;
    assert_fails(name_parse(names, "drop", &value), ST_INVALID,
                 "'drop' is not one of keep|recompute");
    assert_int_equal(value, 7);
}
