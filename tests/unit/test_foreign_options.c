/* test_foreign_options.c: names of TRL's and verl's options: each is answered by an option that
 * its command has, and stands in docs/use/names.md, which NAMES_OUT=FILE writes anew. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "trainer/commands.h"
#include "trainer/run/config.h"

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

// The names of an entry: none is an option here; how many there are.
static int check_names(const struct option_spec *table, const char *entry)
{
    const char *end = strstr(entry, ": ");
    int n = 0;
    assert_non_null(end);
    for (const char *at = entry; at < end; n++) {
        const size_t len = strcspn(at, " :");
        if (is_there(table, at, len)) fail_msg("%.*s is an option here", (int)len, at);
        at += len + (at[len] == ' ');
    }
    check_sentence(table, end + 2);
    return n;
}

// A line of the page: the names, as Python has them, and the sentence with its options as code.
static void write_entry(struct bytes *page, const char *entry)
{
    const char *end = strstr(entry, ": ");
    bytes_printf(page, "| `");
    for (const char *c = entry; c < end; c++)
        bytes_printf(page, *c == ' ' ? "`, `" : "%c", *c == '-' ? '_' : *c);
    bytes_printf(page, "` | ");
    bool option = false;
    for (const char *c = end + 2; *c || option; c++) {
        const bool begins = !option && strncmp(c, "--", 2) == 0;
        const bool ends = option && !strchr("abcdefghijklmnopqrstuvwxyz0123456789-", *c);
        if (begins || ends || (option && !*c)) bytes_printf(page, "`"), option = begins;
        if (!*c) break;
        bytes_printf(page, "%c", *c);
    }
    bytes_printf(page, " |\n");
}

static int write_table(struct bytes *page, int i)
{
    static const char *const titles[] = {"cw-trainer train", "cw-trainer sft", "cw-trainer dpo"};
    int n = 0;
    bytes_printf(page, "\n## `%s`\n\n| name | here |\n|---|---|\n", titles[i]);
    for (const struct option_spec *o = tables[i]; o->name; o++)
        for (const char *const *entry = o->choices; o->type == OPTION_FOREIGN && *entry; entry++) {
            n += check_names(tables[i], *entry);
            write_entry(page, *entry);
        }
    return n;
}

TEST(each_names_an_option)
{
    const char *out = getenv("NAMES_OUT");
    SCOPED(bytes_release) struct bytes page = BYTES_INIT;
    int n = 0;
    bytes_printf(
        &page,
        "# Names of other programs' options\n\n"
        "What stands here for an option of TRL, transformers, verl or vLLM: who types one, on the\n"
        "command line or in `--config`, is told the same. Of verl's dotted names the last part "
        "counts.\n"
        "Options of TRL that are not here have their own name. Written by\n"
        "`NAMES_OUT=docs/use/names.md build/tests/unit/test_foreign_options`.\n");
    for (int i = 0; i < (int)(sizeof tables / sizeof *tables); i++) n += write_table(&page, i);
    assert_true(n > 90);
    if (out) test_write(out, bytes_text(&page), page.len);
    char *there = test_read(test_path(test_root(), "docs/use/names.md"));
    assert_string_equal(bytes_text(&page), there);
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

TEST(the_way_is_told)
{
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
