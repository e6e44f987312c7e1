/* test_option_names.c: one thing has one name in all commands of cw-trainer: what two tables call
 * the same is of one type, reads the same words and stands for the same kind of value. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "trainer/commands.h"
#include "trainer/run/config.h"

static const struct {
    const char *command;
    const struct option_spec *table;
} tables[] = {
    {"train", train_options}, {"sft", sft_options},   {"dpo", dpo_options},
    {"serve", serve_options}, {"eval", eval_options}, {"merge", merge_options},
};
#define N_TABLES (sizeof tables / sizeof *tables)

static bool is_option(const struct option_spec *o)
{
    return o->type != OPTION_HEADING && o->type != OPTION_FOREIGN && o->type != OPTION_DERIVED;
}

static const struct option_spec *find(const struct option_spec *table, const char *name)
{
    for (; table->name; table++)
        if (is_option(table) && strcmp(table->name, name) == 0) return table;
    return NULL;
}

static bool same_text(const char *a, const char *b)
{
    return a && b ? strcmp(a, b) == 0 : !a && !b;
}

// Losses of rollouts and of pairs are two lists, as in TRL.
static bool same_choices(const struct option_spec *a, const struct option_spec *b)
{
    if (strcmp(a->name, "loss-type") == 0) return true;
    const char *const *x = a->choices, *const *y = b->choices;
    for (; x && y && *x && *y; x++, y++)
        if (strcmp(*x, *y) != 0) return false;
    return !x == !y && (!x || !*x == !*y);
}

TEST(one_thing_has_one_name)
{
    int shared = 0;
    for (size_t i = 0; i < N_TABLES; i++)
        for (size_t k = i + 1; k < N_TABLES; k++)
            for (const struct option_spec *a = tables[i].table; a->name; a++) {
                const struct option_spec *b = is_option(a) ? find(tables[k].table, a->name) : NULL;
                if (!b) continue;
                shared++;
                if (a->type != b->type || !same_text(a->value_name, b->value_name) ||
                    !same_choices(a, b))
                    fail_msg("--%s of %s and of %s differ", a->name, tables[i].command,
                             tables[k].command);
            }
    assert_true(shared > 150);
}
