/* test_foreign_options.c: names of TRL's and verl's options: each is answered by an option that
 * its command has, and stands in the table of docs/use/recipes.md. */
#include "common/base/bytes.h"
#include "tests/support/support.h"
#include "trainer/commands.h"
#include "trainer/run/config.h"

#include <stdlib.h>
#include <stdio.h>
#include <string.h>

static const struct option_spec *const tables[] = {train_options, sft_options, dpo_options};

static bool is_there(const struct option_spec *table, const char *name, size_t len)
{
    for (const struct option_spec *o = table; o->name; o++)
        if (o->type != OPTION_FOREIGN && strlen(o->name) == len && memcmp(o->name, name, len) == 0)
            return true;
    return false;
}

// Every --option of the sentence that is not another program's.
static void check_sentence(const struct option_spec *table, const char *sentence)
{
    static const char server[] = "cw-infer-server ", eval[] = "cw-trainer eval ";
    int n = strncmp(sentence, "nothing: ", 9) == 0;
    for (const char *s = sentence; (s = strstr(s, "--")); n++) {
        const size_t before = (size_t)(s - sentence);
        s += 2;
        if ((before >= strlen(server) &&
             strncmp(s - 2 - strlen(server), server, strlen(server)) == 0) ||
            (before >= strlen(eval) && strncmp(s - 2 - strlen(eval), eval, strlen(eval)) == 0))
            continue;
        size_t len = strspn(s, "abcdefghijklmnopqrstuvwxyz0123456789-");
        if (!is_there(table, s, len)) fail_msg("\"%s\": there is no --%.*s", sentence, (int)len, s);
    }
    if (n == 0) fail_msg("\"%s\": names no option", sentence);
}

// The names of an entry: none is an option here, and the page lists each; how many there are.
static int check_names(const struct option_spec *table, const char *entry, const char *page)
{
    const char *end = strstr(entry, ": ");
    int n = 0;
    assert_non_null(end);
    for (const char *at = entry; at < end; n++) {
        const size_t len = strcspn(at, " :");
        char cell[80];
        if (is_there(table, at, len)) fail_msg("%.*s is an option here", (int)len, at);
        snprintf(cell, sizeof cell, "| `%.*s` |", (int)len, at);
        for (char *c = cell; *c; c++)
            if (*c == '-') *c = '_';
        assert_contains(page, cell);
        at += len + (at[len] == ' ');
    }
    check_sentence(table, end + 2);
    return n;
}

static int check_table(const struct option_spec *table, const char *page)
{
    int n = 0;
    for (const struct option_spec *o = table; o->name; o++)
        for (const char *const *entry = o->choices; o->type == OPTION_FOREIGN && *entry; entry++)
            n += check_names(table, *entry, page);
    return n;
}

static void each_names_an_option(void **state)
{
    (void)state;
    char *page = test_read(test_path(test_root(), "docs/use/recipes.md"));
    int n = 0;
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) n += check_table(tables[i], page);
    assert_true(n > 90);
    free(page);
}

static void refused(const char *word, const char *part)
{
    struct train_config config = {0};
    struct option_set *set = NULL;
    char *argv[] = {"train", "--data", "x.jsonl", (char *)word, "1"};
    assert_int_equal(options_parse(train_options, "train", "", 5, argv, 0, &config, NULL, &set),
                     OPTIONS_BAD);
    assert_message(part);
    options_free(set);
}

static void the_way_is_told(void **state)
{
    (void)state;
    refused("--ppo_mini_batch_size", "here --steps-per-generation is train_batch_size /");
    refused("--actor_rollout_ref.actor.clip_ratio_high", "here --epsilon-high");
    refused("--vllm-importance-sampling-mode", "here --importance-sampling-mode");
    refused("--algorithm.rollout_correction.rollout_is_threshold",
            "--importance-sampling-clip-max");
    refused("--batch-size", "here --prompts-per-step");
    refused("--num-epochs", "here --num-train-epochs");
    refused("--bf16", "here cw-infer-server --dtype");
    refused("--full-determinism", "here --exact");
    refused("--actor_rollout_ref.rollout.free_cache_engine", "here nothing: server and trainer");
    const char *path = test_path(test_folder(), "config.json");
    test_write(path, "{\"kl_loss_coef\": 0.1}", 21);
    struct train_config config = {0};
    struct option_set *set = NULL;
    char *argv[] = {"train", "--config", (char *)path};
    assert_int_equal(options_parse(train_options, "train", "", 3, argv, 0, &config, NULL, &set),
                     OPTIONS_BAD);
    assert_message("unknown key \"kl_loss_coef\": here --beta");
    options_free(set);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_names_an_option),
        cmocka_unit_test(the_way_is_told),
    };
    return cmocka_run_group_tests_name("foreign options", tests, NULL, NULL);
}
