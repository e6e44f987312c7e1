/* test_options.c: common/base/options.h: precedence, every type, wrong usage, help, resolved
 * config; and common/base/log.h, seen from outside. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/log.h"
#include "common/base/options.h"
#include "tests/support/support.h"

#include <fcntl.h>
#include <sys/ioctl.h>

struct config {
    const char *config, *model;
    int device;
    int64_t steps, memory;
    double rate;
    bool verbose, sync;
};

#define OPTIONS_OF struct config
static const struct option_spec table[] = {
    OPT_HEADING("where things are"),
    OPT_CONFIG,
    OPT_TEXT("model", model, NULL, "DIR", "model folder"),
    OPT_CHOICE("device", device, "auto", OPTION_WORDS("auto", "cpu", "cuda"), "where to run"),
    OPT_HEADING("how it learns"),
    OPT_INT("max-steps", steps, "10", "N", 1, 1000,
            "steps to take, which is a number of optimizer updates and not one of rollouts or of "
            "epochs"),
    OPT_SIZE("kv-memory", memory, "1G", 0, 0, "cache"),
    OPT_DOUBLE("learning-rate", rate, "1e-6", "X", 0, INFINITY, "step size"),
    OPT_FLAG("verbose", verbose, NULL, "say more"),
    OPT_FLAG("sync", sync, "true", "wait"),
    OPT_END,
};

#define MAX_WORDS 8

LATER(options_free)

// Of a NULL-ended list of words: what it gave, with the test.
static enum option_result parse_with(const struct option_spec *specs, const char *const *words,
                                     int n_positional, void *config, const char **positional,
                                     struct option_set **ret)
{
    char *argv[MAX_WORDS + 2] = {(char *)(uintptr_t) "program"};
    int argc = 1;
    for (; words[argc - 1]; argc++) {
        assert_in_range(argc, 1, MAX_WORDS);
        argv[argc] = (char *)(uintptr_t)words[argc - 1];
    }
    const enum option_result result = options_parse(specs, "program", "[options] FILE", argc, argv,
                                                    n_positional, config, positional, ret);
    if (result == OPTIONS_OK) test_later(*ret, options_free_later);
    return result;
}

static enum option_result parse(const char *const *words, struct config *config,
                                const char **positional, struct option_set **ret)
{
    memset(config, 0, sizeof *config);
    return parse_with(table, words, 2, config, positional, ret);
}

TEST(defaults)
{
    struct config c;
    const char *positional[2] = {"x", "y"};
    struct option_set *set = NULL;
    assert_int_equal(parse(OPTIONS(NULL), &c, positional, &set), OPTIONS_OK);
    assert_null(c.model);
    assert_int_equal(c.device, 0);
    assert_int_equal(c.steps, 10);
    assert_int_equal(c.memory, 1 << 30);
    assert_true(c.rate == 1e-6);
    assert_false(c.verbose);
    assert_true(c.sync);
    assert_null(positional[0]);
    assert_null(positional[1]);
    assert_false(options_given(set, "max-steps"));
    options_free(NULL);
}

TEST(command_line)
{
    struct config c;
    const char *positional[2];
    struct option_set *set = NULL;
    assert_int_equal(parse(OPTIONS("--model", "dir", "one", "--learning-rate=-0", "--verbose",
                                   "--no-sync", "--", "--two"),
                           &c, positional, &set),
                     OPTIONS_OK);
    assert_string_equal(c.model, "dir");
    assert_true(c.rate == 0);
    assert_true(c.verbose);
    assert_false(c.sync);
    assert_string_equal(positional[0], "one");
    assert_string_equal(positional[1], "--two");
    assert_true(options_given(set, "model") && options_given(set, "sync"));
    assert_false(options_given(set, "device") || options_given(set, "unheard-of"));

    // the later one wins; =false; an empty string and one that begins with dashes
    assert_int_equal(parse(OPTIONS("--max-steps", "3", "--max-steps=4", "--verbose=false",
                                   "--model=", "--model=--odd", "-"),
                           &c, positional, &set),
                     OPTIONS_OK);
    assert_int_equal(c.steps, 4);
    assert_false(c.verbose);
    assert_string_equal(c.model, "--odd");
    assert_string_equal(positional[0], "-");
}

TEST(file_under_flags)
{
    static const char text[] =
        "{\"max_steps\": 20, \"learning_rate\": 1, \"kv_memory\": \"64K\","
        " \"verbose\": true, \"sync\": null, \"device\": null, \"model\": \"m\"}";
    const char *path = test_path(test_folder(), "c.json");
    test_write(path, text, sizeof text - 1);
    struct config c;
    const char *positional[2];
    struct option_set *set = NULL;
    // the flag stands before --config and still beats the file
    assert_int_equal(parse(OPTIONS("--max-steps", "30", "--config", path), &c, positional, &set),
                     OPTIONS_OK);
    assert_int_equal(c.steps, 30);
    assert_true(c.rate == 1.0);
    assert_int_equal(c.memory, 65536);
    assert_true(c.verbose);
    assert_true(c.sync); // null leaves the default
    assert_int_equal(c.device, 0);
    assert_string_equal(c.model, "m");
    assert_true(options_given(set, "verbose") && options_given(set, "max-steps"));
    assert_false(options_given(set, "sync"));

    // what it resolves to can be read back and gives the same
    json_t *resolved = test_keep(options_to_json(table, &c));
    assert_non_null(resolved);
    assert_false(json_has(resolved, "config"));
    assert_ok(json_write_file(path, 0600, resolved));
    struct config again;
    struct option_set *second = NULL;
    assert_int_equal(parse(OPTIONS("--config", path), &again, positional, &second), OPTIONS_OK);
    assert_true(json_equal(resolved, test_keep(options_to_json(table, &again))));
    assert_int_equal(again.steps, 30);
}

TEST(wrong_files)
{
    const json_t *cases = test_rows("options", "wrong_files");
    const char *path = test_path(test_folder(), "c.json");
    struct config c;
    const char *positional[2];
    struct option_set *set = NULL;
    for (size_t i = 0; i < json_array_size(cases); i++) {
        test_write(path, row_text(cases, i, "a"), strlen(row_text(cases, i, "a")));
        assert_int_equal(parse(OPTIONS("--config", path), &c, positional, &set), OPTIONS_BAD);
        assert_message(path);
        assert_message(row_text(cases, i, "b"));
        assert_null(set);
        assert_null(c.model); // no string of the dead set is left behind
    }
    assert_int_equal(parse(OPTIONS("--config", "/no/such.json"), &c, positional, &set),
                     OPTIONS_BAD);
    assert_message("/no/such.json");
}

TEST(wrong_usage)
{
    const json_t *cases = test_rows("options", "wrong_usage");
    struct config c;
    const char *positional[2];
    struct option_set *set = NULL;
    for (size_t i = 0; i < json_array_size(cases); i++) {
        assert_int_equal(parse(row_words(cases, i, "words"), &c, positional, &set), OPTIONS_BAD);
        assert_message(row_text(cases, i, "sentence"));
        assert_null(set);
    }
    assert_int_equal(parse_with(table, OPTIONS("DIR"), 0, &c, NULL, &set), OPTIONS_BAD);
    assert_message("unexpected argument 'DIR': values stand behind their options");
}

// bytes: null where it is no size.
TEST_EACH(sizes, "options")
{
    int64_t bytes = -7;
    const json_t *wanted = json_at(cases, "%zu.bytes", i);
    assert_status(options_size(row_text(cases, i, "text"), &bytes),
                  json_is_null(wanted) ? ST_INVALID : ST_OK);
    assert_int_equal(bytes, json_is_null(wanted) ? -7 : json_integer_value(wanted));
}

// Sends a file descriptor to a file; returns a copy of what it was, for restore_fd().
static int redirect_fd(int fd, const char *path)
{
    fflush(NULL);
    int saved = dup(fd), file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(saved >= 0 && file >= 0);
    dup2(file, fd);
    close(file);
    return saved;
}

static void restore_fd(int fd, int saved)
{
    fflush(NULL);
    dup2(saved, fd);
    close(saved);
}

TEST(help_and_version)
{
    const char *path = test_path(test_folder(), "out");
    struct config c;
    const char *positional[2];
    struct option_set *set = NULL;
    int saved = redirect_fd(STDOUT_FILENO, path);
    enum option_result result = parse(OPTIONS("--verbose", "--help"), &c, positional, &set);
    restore_fd(STDOUT_FILENO, saved);
    assert_int_equal(result, OPTIONS_DONE);
    assert_null(set);
    char *text = test_read(path);
    assert_contains(text, "usage: program [options] FILE\n");
    assert_contains(text, "\nwhere things are:\n  --config FILE");
    assert_contains(text, "\nhow it learns:\n  --max-steps N");
    assert_contains(text, "--device auto|cpu|cuda");
    assert_contains(text, "step size (default: 1e-6)");
    assert_contains(text, "--[no-]sync");
    assert_contains(text, "--version");
    size_t longest = 0;
    for (const char *line = text; *line; line += strcspn(line, "\n"), line += *line == '\n')
        if (strcspn(line, "\n") > longest) longest = strcspn(line, "\n");
    assert_in_range(longest, 60, 80);

    saved = redirect_fd(STDOUT_FILENO, path);
    result = parse(OPTIONS("--version"), &c, positional, &set);
    restore_fd(STDOUT_FILENO, saved);
    assert_int_equal(result, OPTIONS_DONE);
    text = test_read(path);
    assert_string_equal(text, "program " COMMONWEIGHT_VERSION "\n");
}

TEST(log_lines)
{
    const char *path = test_path(test_folder(), "err");
    char filler[5001] = {0};
    memset(filler, 'z', 5000);
    int saved = redirect_fd(STDERR_FILENO, path);
    log_open("cw-test", LOG_INFO);
    log_info("hello %d", 1);
    log_debug("not seen");
    log_warn("careful");
    log_error("%s!", filler);
    log_progress("step %d", 2); // no terminal: a plain line
    log_progress_end();
    restore_fd(STDERR_FILENO, saved);
    char *text = test_read(path);
    assert_contains(text, " cw-test: hello 1\n");
    assert_contains(text, " cw-test: warning: careful\n");
    assert_contains(text, " cw-test: error: zzz");
    assert_contains(text, "zzz!\nstep 2\n");
    assert_null(strstr(text, "not seen"));
    assert_null(strchr(text, '\r'));
    assert_true(strlen(text) > 5000);
}

// What a terminal 20 columns wide is sent: one line that is written over, cut to its width, in the
// way of no other.
TEST(live_line_on_a_terminal)
{
    struct winsize size = {.ws_row = 5, .ws_col = 20};
    char sent[1024];
    ssize_t n;
    int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    assert_true(master >= 0);
    assert_int_equal(grantpt(master), 0);
    assert_int_equal(unlockpt(master), 0);
    assert_int_equal(ioctl(master, TIOCSWINSZ, &size), 0);
    int terminal = open(ptsname(master), O_RDWR | O_NOCTTY | O_CLOEXEC);
    assert_true(terminal >= 0);
    fflush(stderr);
    int saved = dup(STDERR_FILENO);
    assert_true(saved >= 0 && dup2(terminal, STDERR_FILENO) >= 0);
    log_open("cw-test", LOG_INFO);
    log_progress("%s", "step 1/2  0:01 left  reward 0.500");
    log_progress("%s", "\u00e4\u00f6\u00fc 2/2  0:00 left  reward 0.500");
    log_info("hello");
    log_progress("%s", "step 3");
    log_progress_end();
    log_progress_end(); // nothing more to end
    restore_fd(STDERR_FILENO, saved);
    log_open("cw-test", LOG_INFO);
    close(terminal);
    // a terminal may give what it was sent in several parts; then it says that nobody is there
    n = 0;
    for (ssize_t part; (part = read(master, sent + n, sizeof sent - 1 - (size_t)n)) > 0;) n += part;
    close(master);
    assert_true(n > 0);
    sent[n] = 0;
    // the terminal makes "\r\n" of "\n"
    static const char first[] = "\rstep 1/2  0:01 left\033[K"
                                "\r\u00e4\u00f6\u00fc 2/2  0:00 left \033[K"
                                "\r\033[K";
    assert_int_equal(strncmp(sent, first, sizeof first - 1), 0);
    const char *remaining = strstr(sent, " cw-test: hello");
    assert_non_null(remaining);
    assert_string_equal(remaining, " cw-test: hello\r\n\rstep 3\033[K\r\n");
}

// A program whose --config is something else, a model's config.json, gets the path and nothing
// more.
TEST(config_of_another_kind)
{
    static const struct option_spec path_table[] = {
        OPT_TEXT("config", config, NULL, "FILE", "a model's"),
        OPT_END,
    };
    struct config config = {0};
    struct option_set *set = NULL;
    assert_int_equal(
        parse_with(path_table, OPTIONS("--config", "/nowhere/config.json"), 0, &config, NULL, &set),
        OPTIONS_OK);
    assert_string_equal(config.config, "/nowhere/config.json");
}

// ---- rules --------------------------------------------------------------------------------------

struct ruled {
    bool fast, exact, apart;
    int64_t ahead;
    double share;
    int mode;
    const char *folder, *config;
};
#undef OPTIONS_OF
#define OPTIONS_OF struct ruled
static const struct option_spec rules_table[] = {
    OPT_CONFIG,
    OPT_FLAG("fast", fast, NULL, "", IS_COMMON, EXCLUDES("exact|ahead>1", "bits would differ")),
    OPT_FLAG("exact", exact, NULL, "", EXCLUDES("mode=b,c&share", "it is not; give --share 0")),
    OPT_INT("ahead", ahead, "1", "N", 0, 9, "", NEEDS_WHEN(">2", "folder~here|apart", NULL)),
    OPT_DOUBLE("share", share, "0.5", "X", 0, 1, "", WITHIN("mode!=a")),
    OPT_CHOICE("mode", mode, "a", OPTION_WORDS("a", "b", "c"), "",
               NEEDS_WHEN("=c", "folder", NULL)),
    OPT_TEXT("folder", folder, NULL, "DIR", "", WITHIN("mode|there=")),
    OPT_DERIVED("apart", apart),
    OPT_END,
};

// An alternative of an option that the table has not, being off, always holds: nothing to be told.
TEST(rules_in_the_help)
{
    const struct option_spec *spec = rules_table;
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    for (; strcmp(spec->name, "folder") != 0; spec++)
        if (strcmp(spec->name, "ahead") == 0) option_rules_describe(rules_table, spec, &text);
    option_rules_describe(rules_table, spec, &text);
    assert_string_equal(bytes_text(&text), " [>2: with --folder here or apart]");
}

TEST_EACH(rules_of_a_table, "options")
{
    struct ruled c = {0};
    struct option_set *set;
    SCOPED(bytes_release) struct bytes idle = BYTES_INIT;
    const char *broken = row_text(cases, i, "broken");
    assert_int_equal(parse_with(rules_table, row_words(cases, i, "words"), 0, &c, NULL, &set),
                     OPTIONS_OK);
    const enum status st = options_check(set, &c);
    assert_int_equal(st, broken ? ST_INVALID : ST_OK);
    if (broken) assert_message(broken);
    options_list_idle(set, &c, &idle);
    assert_string_equal(bytes_text(&idle), row_text(cases, i, "idle"));
}

// A file may hold every option, as a run's config.json does: what is the default there is no wish.
TEST(defaults_of_a_file_are_not_idle)
{
    static const struct {
        const char *file, *word, *idle;
    } cases[] = {
        {"{\"share\": 0.5, \"folder\": null}", NULL, ""},
        {"{\"share\": 0.25}", NULL, "--share has no effect without another --mode than a\n"},
        {"{\"share\": 0.5}", "--share=0.5",
         "--share has no effect without another --mode than a\n"}};
    const char *path = test_path(test_folder(), "config.json");
    for (int i = 0; i < 3; i++) {
        SCOPED(bytes_release) struct bytes idle = BYTES_INIT;
        struct ruled c = {0};
        struct option_set *set;
        test_write(path, cases[i].file, strlen(cases[i].file));
        assert_int_equal(
            parse_with(rules_table, OPTIONS("--config", path, cases[i].word), 0, &c, NULL, &set),
            OPTIONS_OK);
        assert_true(options_given(set, "share"));
        options_list_idle(set, &c, &idle);
        assert_string_equal(bytes_text(&idle), cases[i].idle);
    }
}
