/* test_reward_math.c: the scorer "math" against math-verify: its verdicts on pairs of ours
 * (tests/golden/math), and, where $COMMONWEIGHT_MATH_VERIFY names an unpacked source release and
 * the package is there, the cases of its own tests. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/reward_one.h"
#include "tests/support/support.h"
#include "trainer/reward/math/math.h"

static struct reward *scorer(void)
{
    struct reward *r;
    const struct reward_options options = {.names = "math"};
    assert_ok(reward_new(&options, &r));
    return r;
}

static bool same(struct reward *r, const char *answer, const char *text)
{
    const struct reward_input input = {.text = text, .answer = answer};
    double score;
    assert_ok(reward_score(r, &input, NULL, &score));
    assert_true(score == 0 || score == 1);
    return score == 1;
}

// Where math-verify says otherwise: it takes no small spaces between thousands, solves no
// inequality, and compares no complex numbers by value; 204_6 is 204_5 to it, \varnothing no empty
// set, and an answer 2,5 is 2.5 only. 5.0000001 is 5 to six decimals.
static const char *const otherwise[][2] = {{"$1234567$", "1\\,234\\,567"},
                                           {"$x > 3$", "2x>6"},
                                           {"$5$", "5.0000001"},
                                           {"$3+4i$", "3+4\\cdot i"},
                                           {"$3+4i$", "(2+i)^2"},
                                           {"$\\frac{1}{1+i}$", "\\frac{1-i}{2}"},
                                           {"$204_5$", "204_6"},
                                           {"$\\emptyset$", "\\varnothing"},
                                           {"2,5", "\\boxed{2} and \\boxed{5}"}};

static bool is_otherwise(const char *answer, const char *text)
{
    for (size_t i = 0; i < sizeof otherwise / sizeof *otherwise; i++)
        if (strcmp(otherwise[i][0], answer) == 0 && strstr(text, otherwise[i][1])) return true;
    return false;
}

// Lines of [answer, completion, verdict]. Returns how many there are.
static int count_same(char *lines, int *ret_agreed, bool all_but_otherwise)
{
    struct reward *r = scorer();
    int n = 0;
    *ret_agreed = 0;
    for (char *line; (line = strsep(&lines, "\n")) && *line; n++) {
        json_t *one;
        assert_ok(json_parse("a case", line, strlen(line), &one));
        const char *answer = json_string_value(json_array_get(one, 0)),
                   *text = json_string_value(json_array_get(one, 1));
        const json_t *verdict = json_array_get(one, 2);
        const bool wanted = json_is_true(verdict) || json_integer_value(verdict) == 1;
        const bool agrees = same(r, answer, text) == wanted;
        *ret_agreed += agrees;
        if (all_but_otherwise && agrees == is_otherwise(answer, text))
            fail_msg("%s against %s: math-verify says %d", answer, text, wanted);
        if (!agrees && !all_but_otherwise)
            printf("  math-verify says %d: %.100s | %.100s\n", wanted, answer, text);
        json_decref(one);
    }
    reward_free(r);
    return n;
}

TEST(agrees_with_math_verify)
{
    char *lines = test_read("tests/golden/math/math.jsonl");
    int agreed;
    assert_true(count_same(lines, &agreed, true) > 250);
}

TEST(passes_its_own_tests)
{
    const char *folder = getenv("COMMONWEIGHT_MATH_VERIFY"),
               *log = test_path(test_folder(), "cases");
    if (!folder) test_skip("COMMONWEIGHT_MATH_VERIFY names no source of math-verify");
    const char *python = test_python("math_verify, pytest");
    char client[PATH_MAX + 64];
    snprintf(client, sizeof client, "%s/tests/clients/math_verify_cases.py", test_root());
    assert_int_equal(test_command(log, 60000, OPTIONS(python, client, folder)), 0);
    char *lines = test_read(log);
    int agreed, n = count_same(lines, &agreed, false);
    printf("  agrees with %d of %d of math-verify's cases\n", agreed, n);
    assert_true(n > 200 && agreed >= n * 97 / 100);
}

// Whatever a policy writes is scored at once: deep, long and unclosed.
TEST(bounds_its_work)
{
    static const char *const parts[] = {"{",          "\\boxed{", "\\[",        "$",      "(1,",
                                        "\\{1,\\{2,", "1 ",       "\\frac{1}{", "9!",     "\\sqrt",
                                        "-",          "|",        "1^2^",       "\\pm 1,"};
    struct reward *r = scorer();
    char many[8192] = "The answer is 7.";
    for (int i = 0; i < 700; i++) sprintf(many + strlen(many), " %d;", i);
    assert_true(same(r, "699", many)); // of more than are kept the first ones are forgotten
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        const size_t each = strlen(parts[i]), n = 40000 / each;
        char *text = calloc(1, n * each + 32);
        strcpy(text, "\\boxed{");
        for (size_t k = 0; k < n; k++) memcpy(text + 7 + k * each, parts[i], each);
        same(r, "7", text);
        same(r, text, "\\boxed{7}");
        same(r, "7", text + 7);
        free(text);
    }
    reward_free(r);
}

// Of a list whose first elements are forgotten, what is kept is the list.
TEST(a_list_begins_with_what_is_kept)
{
    struct reward *r = scorer();
    char text[8192] = "";
    for (int i = 0; i < 253; i++) strcat(text, "$1$ so ");
    strcat(text, "The final answer is $2$, $3$, $4$, $5$, $6$. ");
    for (int i = 0; i < 255; i++) strcat(text, "$7$ so ");
    assert_true(same(r, "$5$, $6$", text));
    reward_free(r);
}

static bool parses_chains(int within)
{
    char text[1024] = "1=1";
    for (int i = 0; i < within; i++) {
        char inner[sizeof text - 8];
        assert_true(snprintf(inner, sizeof inner, "%s", text) < (int)sizeof inner);
        snprintf(text, sizeof text, "1=(%s)=1", inner);
    }
    struct math_node *tree = math_parse(text, strlen(text));
    const bool parsed = tree != NULL;
    free(tree);
    return parsed;
}

// An answer is no chain of chains of chains: what compares each with each would visit them for
// ever.
TEST(chains_within_chains_are_bounded)
{
    assert_true(parses_chains(3));
    assert_false(parses_chains(12));
    assert_false(parses_chains(28));
}
