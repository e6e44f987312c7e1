/* test_reward_command.c: the scorer `command` on many samples at a time: how many are in flight,
 * among how many processes, whose reply is whose, several commands in one list, and what is said of
 * a child that cannot start or does not flush. What it does with one sample is test_reward.c's. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "trainer/reward/reward.h"
#include "trainer/rollout/scoring.h"

enum { N = 100, MANY = 700 };

LATER(reward_free)

static struct reward *open_with(const struct reward_options *options)
{
    struct reward *r;
    assert_ok(reward_new(options, &r));
    return test_later(r, reward_free_later);
}

static struct reward *open_command(const char *names, int64_t processes, double timeout_s)
{
    return open_with(
        &(struct reward_options){.names = names, .timeout_s = timeout_s, .processes = processes});
}

// "command:sh SCRIPT FOLDER", valid until the next call.
static const char *script(const char *folder, const char *text)
{
    static char names[PATH_MAX * 2 + 32];
    test_put(folder, "scorer.sh", text);
    snprintf(names, sizeof names, "command:sh %s/scorer.sh %s", folder, folder);
    return names;
}

// One process.
static struct reward *open_script(const char *text)
{
    return open_command(script(test_folder(), text), 1, 20);
}

// Samples whose texts are "0", "1" and so on, in groups of 20; valid until the next call.
static struct reward_input *samples(int n)
{
    static char texts[MANY][8];
    static struct reward_input inputs[MANY];
    for (int i = 0; i < n; i++) {
        snprintf(texts[i], sizeof texts[i], "%d", i);
        inputs[i] = (struct reward_input){.text = texts[i], .group = i / 20, .group_size = 20};
    }
    return inputs;
}

static enum status ask(struct reward *r, int n, double *ret_terms, double *ret_sums)
{
    int failed;
    return reward_score_all(r, samples(n), n, ret_terms, ret_sums, &failed);
}

#define TAKE_TEXT "text=${line#*completion\\\":\\\"}; text=${text%%\\\"*}\n"
#define TAKE_ID   "id=${line#*\\\"id\\\":}; id=${id%%,*}\n"

// A process waits for as many lines as the first says by this field, a whole group or batch, before
// it answers each with how many of their texts are below 50.
static struct reward *open_whole(const char *field, struct reward_options o)
{
    char text[1024];
    snprintf(text, sizeof text,
             "while read -r line; do\n"
             "size=${line#*\\\"%s\\\":}; size=${size%%%%[,\\}]*}\n"
             "small=0; left=$size\n"
             "while :; do\n"
             "text=${line#*completion\\\":\\\"}; text=${text%%%%\\\"*}\n"
             "[ $text -lt 50 ] && small=$((small + 1))\n"
             "left=$((left - 1)); [ $left -eq 0 ] && break; read -r line\n"
             "done\n"
             "while [ $size -gt 0 ]; do\n"
             "echo \"{\\\"reward\\\": $small}\"; size=$((size - 1)); done\n"
             "done\n",
             field);
    o.names = script(test_folder(), text);
    o.timeout_s = 20;
    return open_with(&o);
}

// Of 100 samples in groups of 20 the third is cut in the middle.
TEST(groups_come_whole)
{
    for (int processes = 1; processes <= 3; processes++) {
        double terms[N], sums[N];
        int failed;
        struct reward *r = open_whole(
            "group_size", (struct reward_options){.processes = processes, .whole_groups = true});
        assert_ok(ask(r, N, terms, sums));
        for (int i = 0; i < N; i++) assert_true(sums[i] == (i < 40 ? 20 : i < 60 ? 10 : 0));
        struct reward_input *inputs = samples(N);
        inputs[0].group_size = 257;
        assert_status(reward_score_all(r, inputs, N, terms, sums, &failed), ST_INVALID);
    }
}

// One process takes all before it answers, more than it is otherwise given.
TEST(batches_come_whole)
{
    static double terms[MANY], sums[MANY];
    const struct reward_options several = {
        .names = "command:cat", .processes = 2, .whole_batches = true};
    struct reward *r;
    assert_fails(reward_new(&several, &r), ST_INVALID,
                 "--reward-batches with --reward-processes 2");
    r = open_whole("batch_size", (struct reward_options){.whole_batches = true});
    for (int n = MANY; n >= 3; n /= 10) {
        assert_ok(ask(r, n, terms, sums));
        for (int i = 0; i < n; i++) assert_true(sums[i] == (n < 50 ? n : 50));
    }
}

// The child reads all lines before it answers the first: they are in flight together.
TEST(many_in_flight)
{
    double terms[N], sums[N];
    struct reward *r =
        open_script("while true; do\n"
                    "  all=; i=0\n"
                    "  while [ $i -lt 100 ]; do\n"
                    "    read -r line || exit\n" TAKE_TEXT "    all=\"$all $text\"; i=$((i+1))\n"
                    "  done\n"
                    "  for x in $all; do echo \"{\\\"reward\\\": $x}\"; done\n"
                    "done\n");
    for (int batch = 0; batch < 3; batch++) {
        assert_ok(ask(r, N, terms, sums));
        for (int i = 0; i < N; i++) assert_true(terms[i] == i && sums[i] == i);
    }
}

// Replies that say whose they are may come in any order.
TEST(replies_by_id)
{
    double terms[N], sums[N];
    struct reward *r = open_script("while read -r first; do\n"
                                   "  read -r second\n"
                                   "  for line in \"$second\" \"$first\"; do\n" TAKE_TEXT TAKE_ID
                                   "    echo \"{\\\"reward\\\": $text, \\\"id\\\": $id}\"\n"
                                   "  done\n"
                                   "done\n");
    for (int batch = 0; batch < 3; batch++) {
        assert_ok(ask(r, N, terms, sums));
        for (int i = 0; i < N; i++) assert_true(terms[i] == i);
    }
    r = open_script("while read -r line; do echo '{\"reward\": 1, \"id\": 1000}'; done\n");
    assert_fails(ask(r, 3, terms, sums), ST_FORMAT, "1000");
}

// Each of several processes gets its share, and none is asked for what another has answered.
TEST(several_processes)
{
    double terms[N], sums[N];
    const char *folder = test_folder();
    struct reward *r = open_command(script(folder, "echo start >>\"$1/starts\"\n"
                                                   "while read -r line; do\n" TAKE_TEXT
                                                   "  echo $$ >>\"$1/asked\"\n"
                                                   "  echo \"{\\\"reward\\\": $text}\"\n"
                                                   "done\n"),
                                    4, 20);
    assert_ok(reward_check(r));
    assert_ok(ask(r, N, terms, sums));
    for (int i = 0; i < N; i++) assert_true(terms[i] == i);
    test_now(r);
    assert_string_equal(test_read(test_path(folder, "starts")), "start\nstart\nstart\nstart\n");
    char *asked = test_read(test_path(folder, "asked"));
    int pids[4] = {0}, counts[4] = {0}, n = 0;
    for (char *line = strtok(asked, "\n"); line; line = strtok(NULL, "\n"), n++)
        for (int k = 0; k < 4; k++) {
            if (pids[k] && pids[k] != atoi(line)) continue;
            pids[k] = atoi(line);
            counts[k]++;
            break;
        }
    assert_int_equal(n, N);
    for (int k = 0; k < 4; k++) assert_int_equal(counts[k], N / 4);
}

// A process that ends with samples in flight is asked again for those that it owes, and no others.
TEST(restart_owes)
{
    double terms[N], sums[N];
    struct reward *r =
        open_script("n=0\n"
                    "while read -r line; do\n" TAKE_TEXT "  echo \"{\\\"reward\\\": $text}\"\n"
                    "  n=$((n+1)); [ $n -lt 30 ] || [ -e $1/died ] "
                    "|| { touch $1/died; exit 7; }\n"
                    "done\n");
    assert_ok(ask(r, N, terms, sums));
    for (int i = 0; i < N; i++) assert_true(terms[i] == i);
}

// More lines than samples are never taken for other samples' rewards.
TEST(too_many_lines)
{
    double terms[N], sums[N];
    struct reward *r = open_script("while read -r line; do\n"
                                   "  echo '{\"reward\": 1}'; echo '{\"reward\": 1}'\n"
                                   "done\n");
    assert_fails(ask(r, N, terms, sums), ST_FORMAT, "more than one line for one sample");
    assert_status(ask(r, N, terms, sums), ST_PEER_GONE); // it stays an error
    const char *folder = test_folder();
    r = open_command(script(folder, "echo ready; touch \"$1/said\"; cat\n"), 1, 20);
    test_wait_for_file(test_path(folder, "said"), 10000, NULL);
    assert_fails(ask(r, 1, terms, sums), ST_FORMAT, "wrote without being asked: ready");
}

TEST(several_commands)
{
    static const char one[] = "while read -r line; do echo '{\\\"reward\\\": 1}'; done";
    char names[1024];
    double terms[4 * N], sums[N];
    snprintf(names, sizeof names,
             "constant,command:sh -c \"%s\",command:sh -c 'while read -r a; do echo "
             "\"{\\\"reward\\\": 2}\"; done' x,constant ',command:y',command:sh -c \"%s\"",
             one, one);
    struct reward *r = open_command(names, 2, 20);
    assert_int_equal(reward_info(r)->n, 4);
    assert_string_equal(reward_info(r)->terms[0].name, "constant");
    assert_string_equal(reward_info(r)->terms[1].name, "command");
    assert_string_equal(reward_info(r)->terms[2].name, "command_2");
    assert_string_equal(reward_info(r)->terms[3].name, "command_3");
    assert_ok(reward_check(r));
    assert_ok(ask(r, N, terms, sums));
    for (int i = 0; i < N; i++) {
        assert_true(terms[N + i] == 1 && terms[2 * N + i] == 2 && terms[3 * N + i] == 1);
        assert_true(sums[i] == 5);
    }
}

// Before the first sample, where the data set is looked at.
TEST(cannot_start)
{
    struct dataset none = {0};
    struct reward *r = open_command("command:/no/such/program --flag", 2, 20);
    assert_fails(scoring_check(r, &none), ST_PEER_GONE, "/no/such/program");
    assert_message("could not be started");
    r = open_command("command:cat", 1, 20);
    assert_ok(scoring_check(r, &none));
}

// A child that never flushes: the time-out says what to look for.
TEST(buffered_output)
{
    double terms[N], sums[N];
    struct reward *r = open_command(script(test_folder(), "cat >/dev/null\n"), 1, 0.3);
    assert_fails(ask(r, N, terms, sums), ST_TIMEOUT, "--reward-timeout");
    assert_message("buffered");
    assert_message("flush");
}

// Samples larger than a pipe, and a child that answers the first before it has read it, and then
// reads no more: an error within the time-out, not a wait without end.
TEST(answers_before_reading)
{
    enum { LEN = 1 << 19 };
    static char text[LEN + 1];
    struct reward_input inputs[2] = {{.text = text}, {.text = text}};
    double terms[2], sums[2];
    int failed = -1;
    memset(text, 'x', LEN);
    struct reward *r = open_command(
        script(test_folder(), "head -c 100 >/dev/null; echo '{\"reward\": 1}'; exec sleep 60\n"), 1,
        2);
    alarm(20);
    assert_status(reward_score_all(r, inputs, 2, terms, sums, &failed), ST_TIMEOUT);
    alarm(0);
    assert_message("answered a sample before it had read it");
    assert_int_equal(failed, 0);
}
