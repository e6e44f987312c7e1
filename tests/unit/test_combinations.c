/* test_combinations.c: docs/use/combinations.md says for each pair of the trainer's modes what the
 * rules of its options say, on one rank and on two; and the runs of e2e/test_combinations have each
 * pair that goes together. COMBINATIONS_OUT=FILE writes the page anew. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/modes.h"
#include "tests/support/support.h"

static void write_page(struct bytes *page)
{
    SCOPED(bytes_release) struct bytes table = BYTES_INIT;
    int refused[2] = {0};
    for (int a = 0; a < N_MODES; a++)
        for (int b = a + 1; b < N_MODES; b++) {
            bytes_printf(&table, "| %s | %s |", modes[a].name, modes[b].name);
            for (int ranks = 0; ranks < 2; ranks++) {
                const enum status st = modes_check(MODE(a) | MODE(b), ranks == 1);
                bytes_printf(&table, " %s |", st == ST_OK ? "works" : status_message());
                refused[ranks] += st != ST_OK;
            }
            bytes_puts(&table, "\n");
        }
    bytes_printf(page,
                 "# What goes with what\n\n"
                 "Each pair of the modes of `cw-trainer train`, on one rank and on several: made "
                 "from the rules of its\noptions by `tests/unit/test_combinations.c`. Of %d pairs "
                 "%d are refused on one rank and %d on several.\n`cw-trainer train --help-all` has "
                 "the rules of each option. `make combinations` runs them all.\n\n"
                 "| mode | with | on one rank | on several |\n|---|---|---|---|\n%s",
                 N_MODES * (N_MODES - 1) / 2, refused[0], refused[1], bytes_text(&table));
}

TEST(the_page_has_the_rules)
{
    SCOPED(bytes_release) struct bytes page = BYTES_INIT;
    const char *out = getenv("COMBINATIONS_OUT");
    write_page(&page);
    if (out) test_write(out, bytes_text(&page), page.len);
    char *there = test_read(test_path(test_root(), "docs/use/combinations.md"));
    assert_string_equal(bytes_text(&page), there);
}

static bool is_run(const struct mode_run *runs, int n, mode_set on, mode_set off, int ranks)
{
    for (int i = 0; i < n; i++)
        if ((runs[i].set & (on | off)) == on && (!ranks || runs[i].ranks == ranks)) return true;
    return false;
}

TEST(the_array_has_each_pair)
{
    struct mode_run runs[MODE_RUNS];
    const int n = modes_cover(runs);
    for (int i = 0; i < n; i++) assert_ok(modes_check(runs[i].set, runs[i].ranks > 1));
    for (int a = 0; a < N_MODES; a++)
        for (int b = 0; b < N_MODES; b++)
            for (int ranks = 1; ranks <= 2 && a != b; ranks++) {
                if (modes_check(MODE(a) | MODE(b), ranks > 1) != ST_OK) continue;
                if (!is_run(runs, n, MODE(a) | MODE(b), 0, ranks))
                    fail_msg("%s with %s on %d", modes[a].name, modes[b].name, ranks);
                if (!is_run(runs, n, MODE(a), MODE(b), 0))
                    fail_msg("%s without %s", modes[a].name, modes[b].name);
            }
    printf("%d runs\n", n);
}
