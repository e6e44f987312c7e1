/* test_preference.c: the losses of preferred completions, and their gradients, against TRL's
 * DPOTrainer (tests/golden/preference/make_preference.py) and finite differences. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/names.h"
#include "tests/support/support.h"
#include "trainer/learn/loss.h"

enum { PAIRS = 5, SIDES = 2 * PAIRS, FIGURES = 7 }; // FIGURES: the loss and TRL's metrics

static double lengths[SIDES], logps[SIDES], reference[SIDES]; // the chosen, then the rejected
static int n_cases;

static void read_numbers(char **remaining, double *ret, int n)
{
    for (int i = 0; i < n; i++) {
        const char *word = strsep(remaining, " ");
        assert_non_null(word);
        ret[i] = strtod(word, NULL);
    }
}

static struct pair pair_of(int i)
{
    const int other = PAIRS + i;
    return (struct pair){logps[i] - reference[i], logps[other] - reference[other], (int)lengths[i],
                         (int)lengths[other]};
}

static void is(double have, double want)
{
    if (fabs(have - want) > 1e-9 * (1 + fabs(want))) fail_msg("%.12g, not %.12g", have, want);
}

static void differences_agree(const struct loss_config *c, const struct pair *at)
{
    const double h = 1e-6;
    const struct pair_loss here = losses[c->type].pair(c, at);
    struct pair up = *at, down = *at;
    up.chosen += h, down.chosen -= h;
    double slope =
        (losses[c->type].pair(c, &up).loss - losses[c->type].pair(c, &down).loss) / (2 * h);
    assert_true(fabs(slope - here.by_chosen) < 1e-7);
    up = down = *at;
    up.rejected += h, down.rejected -= h;
    slope = (losses[c->type].pair(c, &up).loss - losses[c->type].pair(c, &down).loss) / (2 * h);
    assert_true(fabs(slope - here.by_rejected) < 1e-7);
}

static void check_case(char *remaining)
{
    struct loss_config c;
    double numbers[2], figures[FIGURES], gradients[SIDES], loss = 0;
    int type;
    assert_ok(name_parse(preference_names, strsep(&remaining, " "), &type));
    c = (struct loss_config){.type = (enum loss_type)(LOSS_SIGMOID + type)};
    read_numbers(&remaining, numbers, 2);
    c.beta = numbers[0];
    c.label_smoothing = numbers[1];
    c.discopop_tau = 0.05;
    assert_ok(loss_check_pairs(&c));
    read_numbers(&remaining, figures, FIGURES);
    read_numbers(&remaining, gradients, SIDES);
    for (int i = 0; i < PAIRS; i++) {
        const struct pair pair = pair_of(i);
        const struct pair_loss have = losses[c.type].pair(&c, &pair);
        loss += have.loss / PAIRS;
        is(have.by_chosen / PAIRS, gradients[i]);
        is(have.by_rejected / PAIRS, gradients[PAIRS + i]);
        differences_agree(&c, &pair);
        const struct loss_config wider = {
            .type = c.type, .beta = c.beta, .label_smoothing = 0.2, .discopop_tau = 0.7};
        differences_agree(&wider, &pair);
    }
    is(loss, figures[0]);
    n_cases++;
}

static void check_line(char *line)
{
    const char *word = strsep(&line, " ");
    if (strcmp(word, "lengths") == 0) read_numbers(&line, lengths, SIDES);
    if (strcmp(word, "logps") == 0) read_numbers(&line, logps, SIDES);
    if (strcmp(word, "reference") == 0) read_numbers(&line, reference, SIDES);
    if (strcmp(word, "case") == 0) check_case(line);
}

TEST(as_trl)
{
    for_lines("tests/golden/preference/preference.txt", check_line);
    assert_int_equal(n_cases, 28);
}

// Where the exponentials of a naive logistic function overflow.
TEST(far_away)
{
    const struct loss_config c = {.type = LOSS_SIGMOID, .beta = 1, .discopop_tau = 0.05};
    const struct pair lost = {-900, 900, 3, 3}, won = {900, -900, 3, 3};
    struct pair_loss loss = losses[c.type].pair(&c, &lost);
    assert_true(loss.loss == 1800 && loss.by_chosen == -1 && loss.by_rejected == 1);
    loss = losses[c.type].pair(&c, &won);
    assert_true(loss.loss == 0 && loss.by_chosen == 0 && loss.by_rejected == 0);
    loss = losses[LOSS_DISCOPOP].pair(&c, &lost);
    assert_true(loss.loss == 1800 && loss.by_chosen == -1 && loss.by_rejected == 1);
}

TEST(what_a_loss_needs)
{
    struct loss_config c = {.type = LOSS_SIGMOID};
    assert_fails(loss_check_pairs(&c), ST_INVALID, "--beta 0: give more than 0");
    c.beta = 0.1;
    c.type = LOSS_EXO_PAIR;
    assert_fails(loss_check_pairs(&c), ST_INVALID, "--label-smoothing above 0");
}
