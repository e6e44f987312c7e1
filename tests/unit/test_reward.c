/* test_reward.c: trainer/reward: numbers in text, the scorers, weighted terms. */
#include "tests/support/support.h"
#include "trainer/reward.h"

#include <math.h>
#include <string.h>

static void last_numbers(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bool marker, found;
        double value;
    } cases[] = {
        {"42", false, true, 42},
        {"so 3 and then 4.", false, true, 4},
        {"it is 3.50 dollars", false, true, 3.5},
        {"1,234,567 people", false, true, 1234567},
        {"1, 2,3", false, true, 3},
        {"12,34", false, true, 34},
        {"-7", false, true, -7},
        {"$-7 or -$8", false, true, -8},
        {"7-5", false, true, 5},
        {"7 -5", false, true, -5},
        {"(1)-2", false, true, 2},
        {".5", false, true, 0.5},
        {"version 1.2.3", false, true, 3},
        {"nothing", false, false, 0},
        {"", false, false, 0},
        {"9 eggs #### 18", true, true, 18},
        {"#### 18 because 2 + 3", true, true, 18},
        {"#### 1 #### 2,000", true, true, 2000},
        {"#### none 4", true, true, 4},
        {"no marker 5", true, true, 5},
        {"5 #### ", true, false, 0},
        {"####18", false, true, 18},
        {"99999999999999999999999999999999999999999999999999999999999999999999999", false, true,
         1e63},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double value = 0;
        bool found = reward_last_number(cases[i].text, cases[i].marker, &value);
        if (found != cases[i].found || (found && fabs(value - cases[i].value) > 1e-9 * fabs(value)))
            fail_msg("\"%s\": %s %g", cases[i].text, found ? "found" : "none", value);
    }
}

static double score(const char *name, const char *text, const char *answer)
{
    struct reward *r;
    struct reward_input input = {.text = text, .answer = answer};
    assert_ok(reward_new(name, NULL, 20, &r));
    double value = reward_score(r, &input, NULL);
    reward_free(r);
    return value;
}

static void scorers(void **state)
{
    (void)state;
    assert_true(score("exact", " 12\n", "12") == 1);
    assert_true(score("exact", "12.", "12") == 0);
    assert_true(score("exact", "", "") == 1);
    assert_true(score("numeric", "3 + 4 = 7.0", "7") == 1);
    assert_true(score("numeric", "3 + 4 = 8", "7") == 0);
    assert_true(score("numeric", "none", "7") == 0);
    assert_true(score("gsm8k", "She has 3 * 4 = <<3*4=12>>12.\n#### 12", "work\n#### 12") == 1);
    assert_true(score("gsm8k", "#### 1,200", "#### 1200") == 1);
    assert_true(score("gsm8k", "the answer is 12", "#### 12") == 1);
    assert_true(score("gsm8k", "#### 13", "#### 12") == 0);
    assert_true(score("gsm8k", "12 #### ?", "#### 12") == 0);
    assert_true(score("constant", "", NULL) == 1);
    assert_true(score("length", "abcdefghijklmnopqrst", NULL) == 0);
    assert_true(score("length", "", NULL) == -1);
    assert_true(fabs(score("length", "\xc3\xa9\xc3\xa9", NULL) + 18.0 / 20) < 1e-12);
}

static void terms_and_weights(void **state)
{
    (void)state;
    struct reward *r;
    double terms[2];
    struct reward_input input = {.text = "12345", .answer = "12345"};
    assert_ok(reward_new("length,exact", "0.5,2", 10, &r));
    assert_int_equal(reward_terms(r), 2);
    assert_string_equal(reward_term_name(r, 1), "exact");
    assert_int_equal(reward_accuracy_term(r), 1);
    assert_true(reward_needs_answer(r));
    assert_true(fabs(reward_score(r, &input, terms) - (0.5 * -0.5 + 2)) < 1e-12);
    assert_true(terms[0] == -0.5 && terms[1] == 1);
    reward_free(r);
    assert_ok(reward_new("length", "", 10, &r));
    assert_int_equal(reward_accuracy_term(r), -1);
    assert_false(reward_needs_answer(r));
    reward_free(r);
}

static void bad_names(void **state)
{
    (void)state;
    struct reward *r = NULL;
    assert_status(reward_new("exact,speed", NULL, 10, &r), ST_INVALID);
    assert_message("\"speed\"");
    assert_message("gsm8k");
    assert_status(reward_new("", NULL, 10, &r), ST_INVALID);
    assert_status(reward_new("exact,", NULL, 10, &r), ST_INVALID);
    assert_status(reward_new("exact", "1,2", 10, &r), ST_INVALID);
    assert_message("2 for 1");
    assert_status(reward_new("exact", "x", 10, &r), ST_INVALID);
    assert_status(reward_new("exact", "1e999", 10, &r), ST_INVALID);
    assert_null(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(last_numbers),
        cmocka_unit_test(scorers),
        cmocka_unit_test(terms_and_weights),
        cmocka_unit_test(bad_names),
    };
    return cmocka_run_group_tests_name("reward", tests, NULL, NULL);
}
