/* test_best.c: trainer/best: what counts as better, and the way through a checkpoint. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "trainer/run/runlog.h"

TEST(higher_is_better)
{
    struct best b = BEST_NONE;
    assert_false(best_consider(&b, 0, NAN)); // nothing to compare with yet
    assert_int_equal(b.step, -1);
    assert_int_equal(b.waited, 0);
    assert_true(best_consider(&b, 10, -2));
    assert_false(best_consider(&b, 20, -2)); // equal
    assert_false(best_consider(&b, 30, -INFINITY));
    assert_false(best_consider(&b, 40, NAN));
    assert_int_equal(b.step, 10);
    assert_int_equal(b.waited, 3);
    assert_true(best_consider(&b, 50, -1.999999999));
    assert_int_equal(b.step, 50);
    assert_int_equal(b.waited, 0);
}

TEST(through_a_checkpoint)
{
    struct best b = BEST_NONE, again = {.step = 7};
    json_t *json = best_to_json(&b);
    assert_ok(best_from_json("x", json, &again));
    assert_int_equal(again.step, -1);
    json_decref(json);
    again.step = 7;
    assert_ok(best_from_json("x", NULL, &again)); // a checkpoint of before there were evaluations
    assert_int_equal(again.step, -1);

    best_consider(&b, 12, 1.0 / 3);
    best_consider(&b, 13, 0);
    json = best_to_json(&b);
    char *text = json_dumps(json, 0);
    json_decref(json);
    json = json_loads(text, 0, NULL);
    assert_ok(best_from_json("x", json, &again));
    assert_int_equal(again.step, 12);
    assert_int_equal(again.waited, 1);
    assert_true(again.score == 1.0 / 3);
    json_decref(json);
    free(text);
}

TEST(bad_ones_are_refused)
{
    static const char *const cases[] = {"[]",
                                        "{}",
                                        "{\"step\": 3}",
                                        "{\"score\": 1}",
                                        "{\"step\": -3, \"score\": 1}",
                                        "{\"step\": 3, \"score\": \"high\"}",
                                        "{\"step\": 3, \"score\": 1, \"waited\": -1}"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct best b = {.step = 5};
        json_t *json = json_loads(cases[i], 0, NULL);
        assert_true(best_from_json("state.json", json, &b) != ST_OK);
        assert_message("state.json");
        assert_int_equal(b.step, 5);
        json_decref(json);
    }
}
