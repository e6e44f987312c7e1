/* test_preference.c: the losses of preferred completions, and their gradients, against TRL's
 * DPOTrainer (tests/golden/preference/make_preference.py) and finite differences. */
#include "common/base/names.h"
#include "tests/support/support.h"
#include "trainer/learn/preference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PAIRS = 5, SIDES = 2 * PAIRS, FIGURES = 7 }; // FIGURES: the loss and TRL's metrics

static double lengths[SIDES], logps[SIDES], reference[SIDES]; // the chosen, then the rejected
static int n_cases;

static void read_numbers(char **rest, double *ret, int n)
{
    for (int i = 0; i < n; i++) {
        const char *word = strsep(rest, " ");
        assert_non_null(word);
        ret[i] = strtod(word, NULL);
    }
}

static struct preference_pair pair_of(int i)
{
    const int other = PAIRS + i;
    return (struct preference_pair){logps[i] - reference[i], logps[other] - reference[other],
                                    (int)lengths[i], (int)lengths[other]};
}

static void is(double have, double want)
{
    if (fabs(have - want) > 1e-9 * (1 + fabs(want))) fail_msg("%.12g, not %.12g", have, want);
}

static void differences_agree(const struct preference_config *c, const struct preference_pair *at)
{
    const double h = 1e-6;
    const struct preference_loss here = preference_loss(c, at);
    struct preference_pair up = *at, down = *at;
    up.chosen += h, down.chosen -= h;
    double slope = (preference_loss(c, &up).loss - preference_loss(c, &down).loss) / (2 * h);
    assert_true(fabs(slope - here.by_chosen) < 1e-7);
    up = down = *at;
    up.rejected += h, down.rejected -= h;
    slope = (preference_loss(c, &up).loss - preference_loss(c, &down).loss) / (2 * h);
    assert_true(fabs(slope - here.by_rejected) < 1e-7);
}

static void check_case(char *rest)
{
    struct preference_config c;
    double numbers[2], figures[FIGURES], gradients[SIDES], loss = 0;
    assert_ok(name_parse(preference_names, strsep(&rest, " "), &c.type));
    read_numbers(&rest, numbers, 2);
    c.beta = numbers[0];
    c.label_smoothing = numbers[1];
    assert_ok(preference_check(&c));
    read_numbers(&rest, figures, FIGURES);
    read_numbers(&rest, gradients, SIDES);
    for (int i = 0; i < PAIRS; i++) {
        const struct preference_pair pair = pair_of(i);
        const struct preference_loss have = preference_loss(&c, &pair);
        loss += have.loss / PAIRS;
        is(have.by_chosen / PAIRS, gradients[i]);
        is(have.by_rejected / PAIRS, gradients[PAIRS + i]);
        differences_agree(&c, &pair);
    }
    is(loss, figures[0]);
    n_cases++;
}

static void as_trl(void **state)
{
    char *text = test_read(test_path(test_root(), "tests/golden/preference/preference.txt"));
    char *next = text;
    (void)state;
    for (char *line; (line = strsep(&next, "\n")) && *line;) {
        char *word = strsep(&line, " ");
        if (strcmp(word, "lengths") == 0) read_numbers(&line, lengths, SIDES);
        if (strcmp(word, "logps") == 0) read_numbers(&line, logps, SIDES);
        if (strcmp(word, "reference") == 0) read_numbers(&line, reference, SIDES);
        if (strcmp(word, "case") == 0) check_case(line);
    }
    free(text);
    assert_int_equal(n_cases, 26);
}

// Where the exponentials of a naive logistic function overflow.
static void far_away(void **state)
{
    (void)state;
    const struct preference_config c = {.type = 0, .beta = 1};
    const struct preference_pair lost = {-900, 900, 3, 3}, won = {900, -900, 3, 3};
    struct preference_loss loss = preference_loss(&c, &lost);
    assert_true(loss.loss == 1800 && loss.by_chosen == -1 && loss.by_rejected == 1);
    loss = preference_loss(&c, &won);
    assert_true(loss.loss == 0 && loss.by_chosen == 0 && loss.by_rejected == 0);
}

static void what_a_loss_needs(void **state)
{
    (void)state;
    struct preference_config c = {.beta = 0};
    assert_status(preference_check(&c), ST_INVALID);
    assert_message("--beta 0: give more than 0");
    c.beta = 0.1;
    assert_ok(name_parse(preference_names, "exo_pair", &c.type));
    assert_status(preference_check(&c), ST_INVALID);
    assert_message("--label-smoothing above 0");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_trl),
        cmocka_unit_test(far_away),
        cmocka_unit_test(what_a_loss_needs),
    };
    return cmocka_run_group_tests_name("preference", tests, NULL, NULL);
}
