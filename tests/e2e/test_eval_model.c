/* test_eval_model.c: cw-trainer eval --model: a folder without a server of one's own. The reference
 * is the same evaluation by a server that runs. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/offline.h"
#include "tests/support/tiny_adapter.h"

#include <dirent.h>

#define MEASURE                                                                                    \
    "--reward regex --reward-pattern [a-m+] --max-completion-length 3 --temperature 0.5 "          \
    "--num-generations 4 --max-samples 12 --json"

// Of cw-trainer eval with these words; its output is the log's alone. TMPDIR is the scene's own.
static int evaluate_by(const char *trainer, const struct scene *s, const char *log,
                       const char *const words[])
{
    unlink(log);
    return test_command(log, LIMIT_MS,
                        JOIN(args("%s eval --data %s", trainer, s->data), words, args(MEASURE)));
}

static int evaluate(const struct scene *s, const char *log, const char *const words[])
{
    return evaluate_by(test_binary("cw-trainer"), s, log, words);
}

static int evaluate_row(struct scene *s, const char *run, const char *const words[])
{
    (void)run;
    return evaluate(s, test_path(s->folder, "trainer.log"), words);
}

// What --json has printed behind what else is said.
static json_t *result_in(const char *log)
{
    return json_of(strstr(test_read(log), "{\""));
}

static const char *outer_tmpdir; // of the whole test; NULL: none

static int back_in_it(void **state)
{
    (void)state;
    return outer_tmpdir ? setenv("TMPDIR", outer_tmpdir, 1) : unsetenv("TMPDIR");
}

static const char *own_tmpdir(const struct scene *s)
{
    const char *folder = test_path(s->folder, "tmp");
    assert_ok(file_make_folders(folder));
    assert_int_equal(setenv("TMPDIR", folder, 1), 0);
    return folder;
}

static void figures_of_both_agree(json_t *a, json_t *b)
{
    static const char *const figures[] = {"accuracy", "reward", "pass@1",     "pass@2",
                                          "pass@4",   "maj@4",  "mean_length"};
    for (size_t i = 0; i < sizeof figures / sizeof *figures; i++)
        assert_true(metric(a, figures[i]) == metric(b, figures[i]));
    assert_true(metric(a, "pass@4") > metric(a, "pass@1"));
}

TEST_WITH(as_by_a_server_that_runs, back_in_it, NULL, NULL)
{
    struct scene s;
    scene_open(&s);
    const char *tmp = own_tmpdir(&s), *by_server = test_path(s.folder, "server.log"),
               *alone = test_path(s.folder, "alone.log"), *lines = test_path(s.folder, "a.jsonl"),
               *same = test_path(s.folder, "b.jsonl"),
               *half = test_path(s.folder, "b.jsonl.tmp.3d08ff");
    // of evaluations that were killed
    assert_ok(file_make_folders(test_path(tmp, "commonweight-eval-00ff00-3999999")));
    test_write(half, "{", 1);
    assert_int_equal(
        evaluate(&s, by_server, OPTIONS("--bridge", s.daemon.bridge, "--output", lines)), 0);
    daemon_kill(&s.daemon);
    assert_int_equal(evaluate(&s, alone,
                              OPTIONS("--model", s.model, "--device", test_device(),
                                      "--server-args=--dtype f32", "--output", same)),
                     0);
    figures_of_both_agree(result_in(by_server), result_in(alone));
    assert_int_equal(entries_of(tmp, ""), 0); // neither socket nor log is left
    assert_false(file_exists(half));
    assert_contains(test_read(alone), "is started for this run alone; its log is ");
}

TEST_WITH(with_an_adapter, back_in_it, NULL, NULL)
{
    struct scene s;
    const char *const config =
        "{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 64, \"target_modules\": "
        "[\"q_proj\", \"up_proj\"], \"rank_pattern\": {\"up_proj\": 6}}";
    scene_open_model(&s, daemon_model(test_folder(), true, 11),
                     args("--dtype f32 --max-adapters 1 --max-lora-rank 8"));
    const char *tmp = own_tmpdir(&s), *adapter = test_path(s.folder, "adapter"),
               *by_server = test_path(s.folder, "server.log"),
               *alone = test_path(s.folder, "alone.log"), *plain = test_path(s.folder, "plain.log");
    assert_ok(tiny_adapter_write(adapter, s.model, config, 3));
    daemon_load_adapter(&s.daemon, "x", adapter);
    assert_int_equal(evaluate(&s, by_server, args("--bridge %s --lora-name x", s.daemon.bridge)),
                     0);
    daemon_kill(&s.daemon);
    const char *const *words = OPTIONS("--model", s.model, "--device", test_device(),
                                       "--server-args=--dtype f32", "--adapter", adapter);
    assert_int_equal(evaluate(&s, alone, words), 0);
    json_t *a = result_in(alone);
    figures_of_both_agree(result_in(by_server), a);
    assert_int_equal(evaluate(&s, plain, OPTIONS("--model", s.model, "--device", test_device())),
                     0);
    json_t *b = result_in(plain);
    assert_true(metric(a, "reward") != metric(b, "reward")); // it is the adapter that was measured
    assert_int_equal(entries_of(tmp, ""), 0);
}

TEST_WITH(what_is_wrong_is_named, back_in_it, NULL, NULL)
{
    struct scene s;
    offline_scene_open(&s);
    test_write(s.data, "{\"prompt\": \"a\"}\n", 16);
    const char *tmp = own_tmpdir(&s), *log = test_path(s.folder, "eval.log");
    train_rows(&s, "evaluation", "what_is_wrong_is_named", evaluate_row);
    assert_int_equal(entries_of(tmp, ""), 0);
    // a server that ends by itself: its last words are said, and its log stays
    assert_int_equal(evaluate(&s, log, OPTIONS("--model", s.model, "--server-args=--max-batch no")),
                     1);
    char *text = test_read(log);
    assert_contains(text, "the server ended with status 2; its log, ");
    assert_contains(text, "--max-batch");
    assert_int_equal(entries_of(tmp, ""), 1);
}

// Where TMPDIR is no place for a server's socket; it may be a path from where one stands.
TEST_WITH(folders_for_its_socket, back_in_it, NULL, NULL)
{
    struct scene s;
    offline_scene_open(&s);
    test_write(s.data, "{\"prompt\": \"a\"}\n", 16);
    const char *tmp = own_tmpdir(&s), *log = test_path(s.folder, "eval.log");
    const char *const *words = args("--model %s --device %s", s.model, test_device());
    const char *deep =
        test_path(tmp, "a-folder-whose-path-is-too-long-for-a-socket-that-lies-in-it-"
                       "and-is-nevertheless-a-good-folder-for-other-things");
    const struct {
        const char *folder;
        int status;
        const char *said;
    } cases[] = {
        {"tmp", 0, test_path(tmp, "commonweight-")},
        {"none", 1,
         "TMPDIR is none, and a folder for the server's socket cannot be made in it: No"},
        {deep, 1, "let TMPDIR name a folder of a shorter path"},
    };
    char here[PATH_MAX];
    assert_ok(file_make_folders(deep));
    assert_non_null(getcwd(here, sizeof here));
    const char *trainer = test_keep(realpath(test_binary("cw-trainer"), NULL));
    assert_int_equal(chdir(s.folder), 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(setenv("TMPDIR", cases[i].folder, 1), 0);
        assert_int_equal(evaluate_by(trainer, &s, log, words), cases[i].status);
        assert_contains(test_read(log), cases[i].said);
        assert_int_equal(entries_of(tmp, ""), 1); // that of the long path
        assert_int_equal(entries_of(deep, ""), 0);
    }
    assert_int_equal(chdir(here), 0);
}

// ---- signals ------------------------------------------------------------------------------------

struct going { // an evaluation that takes long
    struct test_child child;
    const char *tmp, *log;
    pid_t server;
};

static void start_long(struct going *ret)
{
    struct scene s;
    offline_scene_open(&s);
    struct going g = {.tmp = own_tmpdir(&s), .log = test_path(s.folder, "eval.log")};
    const char *bridge = "";
    s.data = scene_prompts(&s, "data.jsonl", 2000);
    test_spawn(&g.child, g.log,
               args("%s eval --model %s --device %s --data %s --reward constant --num-generations "
                    "64 --temperature 1 --max-completion-length 200",
                    test_binary("cw-trainer"), s.model, test_device(), s.data));
    for (int tries = 0; tries < 600 && entries_of(g.tmp, "") == 0; tries++) usleep(50000);
    DIR *dir = opendir(g.tmp);
    for (const struct dirent *e; (e = readdir(dir));)
        if (e->d_name[0] != '.') bridge = test_text("%s/%s/bridge.json", g.tmp, e->d_name);
    closedir(dir);
    test_wait_for_file(bridge, LIMIT_MS, &g.child);
    g.server = (pid_t)metric(json_of_file(bridge), "pid");
    assert_int_equal(kill(g.server, 0), 0);
    *ret = g;
}

static void assert_nothing_left(struct going *g, const char *said)
{
    for (int tries = 0; tries < 100 && kill(g->server, 0) == 0; tries++) usleep(20000);
    assert_int_equal(kill(g->server, 0), -1);
    assert_int_equal(entries_of(g->tmp, ""), 0);
    assert_contains(test_read(g->log), said);
}

// A signal while samples are generated ends the server too, and its folder goes; a closed terminal
// is one.
TEST_WITH(a_signal_leaves_nothing, back_in_it, NULL, NULL)
{
    static const int signals[] = {SIGINT, SIGHUP};
    struct going g;
    signal(SIGHUP, SIG_DFL); // also where these tests run under nohup
    for (int i = 0; i < 2; i++) {
        start_long(&g);
        test_kill(&g.child, signals[i]);
        assert_int_equal(test_wait(&g.child, LIMIT_MS), 1);
        assert_nothing_left(&g, "a signal: the evaluation is given up");
    }
}

// The first waits for the server to end, which here stands still; the second does not.
TEST_WITH(a_second_signal_does_not_wait, back_in_it, NULL, NULL)
{
    struct going g;
    start_long(&g);
    assert_int_equal(kill(g.server, SIGSTOP), 0);
    test_kill(&g.child, SIGINT);
    usleep(1500000);
    assert_true(test_running(&g.child));
    const int64_t start = clock_now_ns();
    test_kill(&g.child, SIGINT);
    assert_int_equal(test_wait(&g.child, LIMIT_MS), 1);
    assert_true(clock_ms_since(start) < 2000);
    assert_nothing_left(&g, "second signal: ending at once");
}

int main(void)
{
    const char *given = getenv("TMPDIR");
    outer_tmpdir = given ? strdup(given) : NULL;
    return test_main();
}
