/* test_combinations.c: docs/combinations.md says for each pair of the trainer's modes what the
 * rules of its options say, on one rank and on two. COMBINATIONS_OUT=FILE writes the page anew. */
#include "common/base/bytes.h"
#include "tests/support/support.h"
#include "trainer/run/config.h"

#include <stdlib.h>
#include <string.h>

#define N_MODES ((int)(sizeof modes / sizeof *modes))

static const struct {
    const char *name, *options[7];
} modes[] = {
    {"async", {"--async"}},
    {"LoRA", {"--lora-r", "4"}},
    {"draft trained along", {"--train-draft"}},
    {"tandem", {"--tandem"}},
    {"environment", {"--rollouts", "command:program"}},
    {"Atropos", {"--atropos", "http://host:1", "--max-steps", "3"}},
    {"workers", {"--workers", "bridge.json"}},
    {"checkpoint", {"--sync", "checkpoint", "--model", "folder", "--draft", "folder"}},
    {"curriculum", {"--curriculum", "kde"}},
    {"cost", {"--cost"}},
    {"filter-groups", {"--filter-groups", "2"}},
    {"beta", {"--beta", "0.04"}},
    {"8-bit moments", {"--optim-moments", "8bit"}},
};

// What is said of modes a and b together, "works" where nothing is; how many are refused.
static int put_pair(int a, int b, bool several_ranks, struct bytes *page)
{
    char *argv[20] = {"train"};
    int argc = 1;
    bool data = true;
    struct train_config config = {0};
    struct train_resolved resolved;
    struct option_set *set = NULL;
    for (int side = 0; side < 2; side++) {
        const char *const *option = modes[side ? b : a].options;
        for (int i = 0; i < 7 && option[i] && (side == 0 || a != b); i++)
            argv[argc++] = (char *)option[i];
        if (strcmp(option[0], "--atropos") == 0) data = false;
    }
    if (data) argv[argc++] = "--data=prompts.jsonl";
    assert_int_equal(options_parse(train_options, "train", "", argc, argv, 0, &config, NULL, &set),
                     OPTIONS_OK);
    config.several_ranks = several_ranks;
    const enum status st = train_config_resolve(&config, set, &resolved);
    bytes_printf(page, " %s |", st == ST_OK ? "works" : status_message());
    options_free(set);
    return st != ST_OK;
}

static void write_page(struct bytes *page)
{
    struct bytes table = BYTES_INIT;
    int refused[2] = {0};
    for (int a = 0; a < N_MODES; a++)
        for (int b = a + 1; b < N_MODES; b++) {
            bytes_printf(&table, "| %s | %s |", modes[a].name, modes[b].name);
            for (int ranks = 0; ranks < 2; ranks++)
                refused[ranks] += put_pair(a, b, ranks == 1, &table);
            bytes_puts(&table, "\n");
        }
    bytes_printf(page,
                 "# What goes with what\n\n"
                 "Each pair of the modes of `cw-trainer train`, on one rank and on several: made "
                 "from the rules of its\noptions by `tests/unit/test_combinations.c`. Of %d pairs "
                 "%d are refused on one rank and %d on several.\n`cw-trainer train --help-all` has "
                 "the rules of each option.\n\n"
                 "| mode | with | on one rank | on several |\n|---|---|---|---|\n%s",
                 N_MODES * (N_MODES - 1) / 2, refused[0], refused[1], bytes_text(&table));
    bytes_release(&table);
}

static void the_page_has_the_rules(void **state)
{
    (void)state;
    struct bytes page = BYTES_INIT;
    const char *out = getenv("COMBINATIONS_OUT");
    write_page(&page);
    if (out) test_write(out, bytes_text(&page), page.len);
    char *there = test_read(test_path(test_root(), "docs/combinations.md"));
    assert_string_equal(bytes_text(&page), there);
    free(there);
    bytes_release(&page);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_page_has_the_rules)};
    return cmocka_run_group_tests_name("combinations", tests, NULL, NULL);
}
