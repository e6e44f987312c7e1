/* test_reward.c: trainer/number and trainer/reward*: numbers in text, every scorer, and what a
 * scorer that cannot tell does. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/reward_one.h"
#include "tests/support/support.h"
#include "trainer/data/data.h"
#include "trainer/reward/math/prose.h"
#include "trainer/reward/reward.h"

#include <sys/wait.h>

TEST_EACH(numbers, "reward")
{
    double value = 0;
    const bool found = (row_flag(cases, i, "answer") ? number_answer : number_last)(
        row_text(cases, i, "text"), &value);
    if (found != row_flag(cases, i, "found") ||
        (found && fabs(value - row_number(cases, i, "value")) > 1e-9 * fabs(value)))
        fail_msg("\"%s\": %s %g", row_text(cases, i, "text"), found ? "found" : "none", value);
}

// Whole numbers are the same or not, however large; fractions but for their rounding.
TEST_EACH(same_numbers, "reward")
{
    const double a = row_number(cases, i, "a"), b = row_number(cases, i, "b");
    if (number_same(a, b) != row_flag(cases, i, "same")) fail_msg("%.17g and %.17g", a, b);
}

LATER(reward_free)

static struct reward *open_with(const struct reward_options *options)
{
    struct reward *r;
    assert_ok(reward_new(options, &r));
    return test_later(r, reward_free_later);
}

static struct reward *open_reward(const char *names, const char *weights, double length_target)
{
    return open_with(&(struct reward_options){
        .names = names, .weights = weights, .length_target = length_target, .timeout_s = 20});
}

static double score_of(struct reward *r, const struct reward_input *input)
{
    double value;
    assert_ok(reward_score(r, input, NULL, &value));
    return value;
}

// By each scorer, whose targets are 20 characters.
TEST_EACH(scores, "reward")
{
    const char *name = row_text(cases, i, "scorer"), *text = row_text(cases, i, "text"),
               *answer = row_text(cases, i, "answer");
    const double got =
        score_of(open_reward(name, NULL, 20),
                 &(struct reward_input){.text = text,
                                        .answer = answer,
                                        .row = json_object_get(json_array_get(cases, i), "row")});
    if (!(fabs(got - row_number(cases, i, "score")) < 1e-12))
        fail_msg("%s: %s against %s: %g", name, text, answer ? answer : "nothing", got);
}

TEST(what_a_line_must_have)
{
    json_t *row = json_of("{\"response_format\": {\"type\": \"text\"}}");
    struct reward *r = open_reward("json_schema", NULL, 10);
    assert_fails(reward_check_row(r, NULL, row), ST_INVALID, "no field \"response_format\"");
    json_object_set_new(row, "response_format", json_of("{\"type\": \"json_object\"}"));
    assert_ok(reward_check_row(r, NULL, row));
}

TEST(terms_and_weights)
{
    double terms[2], sum;
    struct reward_input input = {.text = "12345", .answer = "12345"};
    struct reward *r = open_reward("length,exact", "0.5,2", 10);
    assert_int_equal(reward_info(r)->n, 2);
    assert_string_equal(reward_info(r)->terms[1].name, "exact");
    assert_true(reward_info(r)->terms[1].weight == 2);
    assert_int_equal(reward_info(r)->accuracy_term, 1);
    assert_true(reward_info(r)->needs_answer);
    assert_ok(reward_score(r, &input, terms, &sum));
    assert_true(fabs(sum - (0.5 * -0.5 + 2)) < 1e-12);
    assert_true(terms[0] == -0.5 && terms[1] == 1);
    r = open_reward("length", "", 10);
    assert_int_equal(reward_info(r)->accuracy_term, -1);
    assert_false(reward_info(r)->needs_answer);
    // An answer that is no number is the data set's fault, not the model's.
    r = open_reward("numeric", NULL, 10);
    input.answer = "twelve";
    assert_fails(reward_score(r, &input, terms, &sum), ST_FORMAT, "twelve");
}

static enum status try_open(const char *names, const char *weights)
{
    struct reward *r = NULL;
    struct reward_options options = {.names = names, .weights = weights, .length_target = 10};
    enum status st = reward_new(&options, &r);
    assert_null(r);
    return st;
}

TEST(bad_names)
{
    assert_fails(try_open("exact,speed", NULL), ST_INVALID, "\"speed\"");
    assert_message("gsm8k");
    assert_status(try_open("", NULL), ST_INVALID);
    assert_status(try_open("exact,", NULL), ST_INVALID);
    assert_fails(try_open("exact", "1,2"), ST_INVALID,
                 "--reward-weights 1,2: 2 for 1 terms of --reward; give each its own");
    assert_status(try_open("exact", "x"), ST_INVALID);
    assert_status(try_open("exact", "1e999"), ST_INVALID);
    assert_status(try_open("plugin", NULL), ST_INVALID);
    assert_status(try_open("exact:3", NULL), ST_INVALID);
    assert_status(try_open("command:", NULL), ST_INVALID);
}

// ---- GSM8K --------------------------------------------------------------------------------------

// "1,200" behind the mark, as the data set spells it, without its commas.
static void reference_of(const char *answer, char ret[64])
{
    const char *s = strstr(answer, "#### ");
    size_t n = 0;
    assert_non_null(s);
    for (s += 5; *s && *s != '\n' && n < 63; s++)
        if (*s != ',' && *s != ' ') ret[n++] = *s;
    ret[n] = '\0';
}

// Every reference scores 1 for its own problem, and 0 for the next one that has another answer; and
// so does the bare number in the other spellings.
static int check_gsm8k(const char *path)
{
    struct dataset *d;
    struct reward *r = open_reward("gsm8k", NULL, 20);
    assert_ok(dataset_load(path, NULL, &d));
    for (int i = 0; i < d->n; i++) {
        const char *own = d->examples[i].answer;
        char reference[64], other[64], said[160];
        double own_score, other_score;
        int j = i;
        reference_of(own, reference);
        do {
            j = (j + 1) % d->n;
            reference_of(d->examples[j].answer, other);
        } while (strcmp(other, reference) == 0);
        static const char *const spellings[] = {"%s", "In 9 steps, the answer is $%s.",
                                                "\\boxed{%s}, that is all of 9", "5 or 6? %s"};
        for (size_t k = 0; k < 4; k++) {
            snprintf(said, sizeof said, spellings[k], reference);
            struct reward_input input = {.text = k ? said : own, .answer = own};
            assert_ok(reward_score(r, &input, NULL, &own_score));
            input.answer = d->examples[j].answer;
            assert_ok(reward_score(r, &input, NULL, &other_score));
            if (own_score != 1 || other_score != 0)
                fail_msg("%s, line %d, spelling %zu: %g for its own, %g for line %d's", path,
                         d->examples[i].line, k, own_score, other_score, d->examples[j].line);
        }
    }
    int n = d->n;
    dataset_free(d);
    return n;
}

TEST(gsm8k_references)
{
    char folder[PATH_MAX];
    test_data_folder("gsm8k", folder);
    int n = check_gsm8k(test_path(folder, "test.jsonl"));
    n += check_gsm8k(test_path(folder, "train.jsonl"));
    assert_int_equal(n, 8792);
}

// A reference that no answer could equal is refused before the first step; the reward says how its
// form of answer is asked for.
TEST(references_and_prompts)
{
    struct reward *r = open_reward("length,gsm8k,exact", NULL, 20);
    assert_ok(reward_check_row(r, "6 * 7 = 42\n#### 42", NULL));
    assert_ok(reward_check_row(r, NULL, NULL)); // dataset_require_answers() says that better
    assert_fails(reward_check_row(r, "42 ####", NULL), ST_FORMAT, "\"42 ####\" holds no number");
    assert_status(reward_check_row(r, "\\frac{x}{4}", NULL), ST_FORMAT);
    assert_contains(reward_info(r)->prompt_template, "{prompt}");
    assert_contains(reward_info(r)->prompt_template, "####");
    r = open_reward("exact,numeric", NULL, 20);
    assert_status(reward_check_row(r, "many", NULL), ST_FORMAT);
    assert_null(reward_info(r)->prompt_template);
    r = open_reward("choice,math", NULL, 20);
    assert_ok(reward_check_row(r, "A", NULL));
    assert_fails(reward_check_row(r, "none of them", NULL), ST_FORMAT, "no letter from A to J");
    r = open_reward("math", NULL, 20);
    assert_ok(reward_check_row(r, "\\sqrt{2}", NULL));
    assert_fails(reward_check_row(r, "?!", NULL), ST_FORMAT, "holds no formula and no number");
}

// ---- regex --------------------------------------------------------------------------------------

TEST(regex)
{
    const json_t *own = json_quoted("{'pattern': '(?i)YES'}"), *none = json_quoted("{}");
    const json_t *endless = json_quoted("{'pattern': '^(a+)+$'}");
    struct reward_options options = {.names = "regex", .pattern = "^\\p{Lu}\\w+\\.$"};
    struct reward *r = open_with(&options);
    assert_int_equal(reward_info(r)->accuracy_term, 0);
    assert_false(reward_info(r)->needs_answer);
    const struct {
        const char *text;
        const json_t *row;
        double score;
    } cases[] = {
        {"\xc3\x84hre.", none, 1},
        {"no.", none, 0},
        {"oh yes!", own, 1},
        {"oh yes!", none, 0}, // back to the option's
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_true(score_of(r, &(struct reward_input){.text = cases[i].text,
                                                       .row = cases[i].row}) == cases[i].score);
    // endless backtracking is not a 0
    char text[64] = {[62] = '!'};
    memset(text, 'a', 62);
    assert_fails(
        reward_score(r, &(struct reward_input){.text = text, .row = endless}, NULL, &(double){0}),
        ST_INVALID, "(a+)+");
    assert_fails(reward_check_row(r, NULL, json_quoted("{'pattern': '(open'}")), ST_INVALID,
                 "(open");
    assert_status(reward_check_row(r, NULL, json_quoted("{'pattern': 3}")), ST_INVALID);
    assert_ok(reward_check_row(r, NULL, none));
    options.pattern = NULL;
    assert_fails(reward_check_row(open_with(&options), NULL, none), ST_INVALID, "--reward-pattern");
    options.pattern = "[";
    r = NULL;
    assert_fails(reward_new(&options, &r), ST_INVALID, "--reward-pattern");
    assert_null(r);
}

// ---- plugin -------------------------------------------------------------------------------------

TEST(plugin)
{
    char names[PATH_MAX + 16], deep[2001] = {0};
    const char *path = test_binary("examples/reward_balanced.so");
    snprintf(names, sizeof names, "constant,plugin:%s,exact", path);
    struct reward *r = open_reward(names, NULL, 20);
    assert_int_equal(reward_info(r)->n, 3);
    assert_string_equal(reward_info(r)->terms[1].name, "balanced");
    const json_t *row = json_quoted("{'messages': [{'role': 'user', 'content': 'x'}]}");
    struct reward_input input = {
        .text = "(a[b])(",
        .answer = "?",
        .prompt = json_at(row, "messages"),
        .row = row,
        .telemetry = row,
    };
    assert_near(score_of(r, &input), 1 + 4.0 / 5, 1e-12);
    memset(deep, '(', 2000);
    input.text = deep;
    assert_fails(reward_score(r, &input, NULL, &(double){0}), ST_INVALID, "1000 deep");
    assert_fails(try_open("plugin:/no/such.so", NULL), ST_IO, "/no/such.so");
    assert_message("any program: command:PROGRAM ARGS");
    const char *empty = test_path(test_folder(), "x.so");
    test_write(empty, "", 0);
    snprintf(names, sizeof names, "plugin:%s", empty);
    assert_fails(try_open(names, NULL), ST_IO, "x.so");
}

TEST(graded_plugin)
{
    char names[PATH_MAX + 16];
    snprintf(names, sizeof names, "plugin:%s", test_binary("examples/reward_digits.so"));
    struct reward *r = open_reward(names, NULL, 20);
    const json_t *row = json_quoted("{'prompt': '95+27='}");
    static const struct {
        const char *text;
        double score;
    } cases[] = {{"122", 1},        {"112", 2.0 / 3}, {"22", 2.0 / 3},
                 {"0122", 3.0 / 4}, {"x", 0},         {"", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_near(score_of(r, &(struct reward_input){.text = cases[i].text,
                                                       .answer = "122",
                                                       .prompt = json_at(row, "prompt"),
                                                       .row = row}),
                    cases[i].score, 1e-12);
    assert_fails(
        reward_score(r, &(struct reward_input){.text = "1", .row = row}, NULL, &(double){0}),
        ST_INVALID, "no answer");
}

// ---- command ------------------------------------------------------------------------------------

// A scorer whose program is a shell script of the given text; it sees its folder as $1.
static struct reward *open_script(const char *folder, const char *script, int timeout_ms)
{
    char names[PATH_MAX * 2 + 32];
    const char *path = test_path(folder, "scorer.sh");
    test_write(path, script, strlen(script));
    snprintf(names, sizeof names, "command:sh %s %s", path, folder);
    return open_with(&(struct reward_options){.names = names, .timeout_s = timeout_ms / 1e3});
}

static enum status ask(struct reward *r, const char *text, double *ret)
{
    const json_t *row = json_quoted("{'prompt': 'P', 'level': 3}");
    struct reward_input input = {
        .text = text, .answer = "A", .n_tokens = 2, .prompt = json_at(row, "prompt"), .row = row};
    return reward_score(r, &input, NULL, ret);
}

TEST(command)
{
    double x = 7;
    const char *folder = test_folder();
    struct reward *r = open_script(folder,
                                   "while read -r line; do\n"
                                   "  printf '%s\\n' \"$line\" >>\"$1/asked\"\n"
                                   "  case $line in *good*) echo '{\"reward\": 0.5}' ;;\n"
                                   "  *) echo '{\"reward\": -1}' ;; esac\n"
                                   "done\n",
                                   20000);
    assert_string_equal(reward_info(r)->terms[0].name, "command");
    assert_ok(ask(r, "good\n\"quoted\"", &x));
    assert_true(x == 0.5);
    assert_ok(ask(r, "", &x));
    assert_true(x == -1);
    char *long_text = test_keep(calloc(300001, 1)); // more than a pipe holds
    memset(long_text, 'x', 300000);
    assert_ok(ask(r, long_text, &x));
    assert_true(x == -1);
    assert_json(json_array_get(json_of_lines_file(test_path(folder, "asked")), 0),
                "{'prompt': 'P', 'completion': 'good\\n\\u0022quoted\\u0022', 'answer': 'A',"
                " 'example': {'level': 3}}");
}

TEST_EACH(command_failures, "reward")
{
    double x = 7;
    const enum status st = row_status(cases, i, "status");
    struct reward *r =
        open_script(test_folder(), row_text(cases, i, "script"), st == ST_TIMEOUT ? 300 : 20000);
    assert_fails(ask(r, "text", &x), st, row_text(cases, i, "message"));
    if (st == ST_TIMEOUT || st == ST_PEER_GONE)
        assert_true(ask(r, "text", &x) != ST_OK); // it stays an error
    assert_true(x == 7);
}

// A child that ends is started again, once, and asked again for the sample it owes.
TEST(command_restarts_once)
{
    double x;
    const char *folder = test_folder();
    struct reward *r = open_script(folder,
                                   "echo start >>\"$1/starts\"\n"
                                   "read -r line; echo '{\"reward\": 2}'\n"
                                   "read -r line; exit 5\n",
                                   20000);
    assert_ok(ask(r, "one", &x));
    assert_ok(ask(r, "two", &x));
    assert_true(x == 2);
    assert_fails(ask(r, "three", &x), ST_PEER_GONE, "status 5");
    assert_message("started again");
    assert_string_equal(test_read(test_path(folder, "starts")), "start\nstart\n");
}

static pid_t read_pid(const char *path)
{
    const pid_t pid = (pid_t)atoi(test_read(path));
    assert_true(pid > 1);
    return pid;
}

// Gone, or a zombie that waits for whoever adopted it.
static void assert_ends(pid_t pid)
{
    for (int64_t deadline = clock_deadline_ns(5000);;) {
        char path[64], status = 'Z';
        snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
        FILE *file = fopen(path, "r");
        if (file && fscanf(file, "%*d (%*[^)]) %c", &status) != 1) status = 'Z';
        if (file) fclose(file);
        if (status == 'Z') return;
        if (clock_ms_until(deadline) == 0) fail_msg("process %d lives on", (int)pid);
        clock_sleep_ms(5);
    }
}

// Closing the scorer kills the child and what it started.
TEST(command_is_killed)
{
    double x;
    const char *folder = test_folder();
    struct reward *r = open_script(folder,
                                   "sleep 1000 & echo $! >\"$1/pid\"\n"
                                   "read -r line; echo '{\"reward\": 1}'\n"
                                   "trap '' TERM; cat\n",
                                   20000);
    assert_ok(ask(r, "one", &x));
    pid_t pid = read_pid(test_path(folder, "pid"));
    assert_true(kill(pid, 0) == 0);
    test_now(r);
    assert_ends(pid);
}

// So does the death of the process that owns the scorer, even where the child would go on.
TEST(command_dies_with_its_owner)
{
    const char *folder = test_folder();
    int status;
    pid_t owner = fork();
    assert_true(owner >= 0);
    if (owner == 0) {
        double x;
        struct reward *r = open_script(folder,
                                       "echo $$ >\"$1/pid\"\n"
                                       "read -r line; echo '{\"reward\": 1}'\n"
                                       "exec sleep 1000\n",
                                       20000);
        if (ask(r, "one", &x) == ST_OK) raise(SIGKILL);
        _exit(1);
    }
    assert_int_equal(waitpid(owner, &status, 0), owner);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    assert_ends(read_pid(test_path(folder, "pid")));
}

// A page of the manual is made of --help: a name and what it does are told apart by two blanks,
// else several rewards run into one paragraph.
TEST(a_list_for_the_manual)
{
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    int n = 0;
    reward_describe_all(&text);
    for (const char *at = bytes_text(&text); (at = strstr(at, "\n  ")); n++) {
        at += 3;
        const size_t name = strcspn(at, " ");
        if (strncmp(at + name, "  ", 2) != 0) fail_msg("%.40s", at);
    }
    assert_true(n > 10);
}
