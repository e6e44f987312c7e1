/* test_eval_model.c: cw-trainer eval --model: a folder without a server of one's own. The reference
 * is the same evaluation by a server that runs. */
#include "common/base/file.h"
#include "common/base/json.h"
#include "tests/support/daemon.h"
#include "tests/support/tiny_adapter.h"
#include "tests/support/training.h"

#include <dirent.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WORDS 48

static const char *const measure[] = {"--reward",
                                      "regex",
                                      "--reward-pattern",
                                      "[a-m+]",
                                      "--max-completion-length",
                                      "3",
                                      "--temperature",
                                      "0.5",
                                      "--num-samples",
                                      "4",
                                      "--limit",
                                      "12",
                                      "--json",
                                      NULL};

// Of cw-trainer eval with these words; its output is the log's alone. TMPDIR is the scene's own.
static int evaluate(const struct scene *s, const char *log, const char *const words[])
{
    const char *argv[WORDS] = {test_binary("cw-trainer"), "eval", "--data", s->data};
    int n = 4;
    for (const char *const *w = words; *w; w++) argv[n++] = *w;
    for (const char *const *w = measure; *w; w++) argv[n++] = *w;
    unlink(log);
    return test_command(log, LIMIT_MS, argv);
}

static json_t *result_in(const char *log)
{
    char *text = test_read(log), *object = strstr(text, "{\"");
    json_t *result;
    if (!object) fail_msg("no result in:\n%s", text);
    assert_ok(json_parse("eval", object, strlen(object), &result));
    free(text);
    return result;
}

static int entries(const char *folder)
{
    DIR *dir = opendir(folder);
    int n = 0;
    assert_non_null(dir);
    for (const struct dirent *e; (e = readdir(dir));) n += e->d_name[0] != '.';
    closedir(dir);
    return n;
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
    json_decref(a);
    json_decref(b);
}

static void as_by_a_server_that_runs(void **state)
{
    (void)state;
    struct scene s;
    scene_open(&s);
    const char *tmp = own_tmpdir(&s), *by_server = test_path(s.folder, "server.log"),
               *alone = test_path(s.folder, "alone.log"), *lines = test_path(s.folder, "a.jsonl"),
               *same = test_path(s.folder, "b.jsonl");
    assert_int_equal(
        evaluate(&s, by_server, OPTIONS("--bridge", s.daemon.bridge, "--output", lines)), 0);
    daemon_kill(&s.daemon);
    assert_int_equal(evaluate(&s, alone,
                              OPTIONS("--model", s.model, "--device", test_device(),
                                      "--server-args=--dtype f32", "--output", same)),
                     0);
    figures_of_both_agree(result_in(by_server), result_in(alone));
    assert_int_equal(entries(tmp), 0); // neither socket nor log is left
    char *text = test_read(alone);
    assert_contains(text, "is started for this run alone; its log is ");
    free(text);
    scene_close(&s);
}

static void with_an_adapter(void **state)
{
    (void)state;
    struct scene s;
    const char *const config =
        "{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 64, \"target_modules\": "
        "[\"q_proj\", \"up_proj\"], \"rank_pattern\": {\"up_proj\": 6}}";
    scene_open_model(&s, daemon_model(test_folder(), true, 11),
                     OPTIONS("--dtype", "f32", "--max-adapters", "1", "--max-lora-rank", "8"));
    const char *tmp = own_tmpdir(&s), *adapter = test_path(s.folder, "adapter"),
               *by_server = test_path(s.folder, "server.log"),
               *alone = test_path(s.folder, "alone.log"), *plain = test_path(s.folder, "plain.log");
    assert_ok(tiny_adapter_write(adapter, s.model, config, 3));
    char body[PATH_MAX + 64];
    snprintf(body, sizeof body, "{\"lora_name\": \"x\", \"lora_path\": \"%s\"}", adapter);
    struct wire_answer answer;
    daemon_request(s.daemon.socket, "POST", "/v1/load_lora_adapter", "", body, &answer);
    assert_int_equal(answer.status, 200);
    wire_answer_release(&answer);
    assert_int_equal(evaluate(&s, by_server, OPTIONS("--bridge", s.daemon.bridge, "--lora", "x")),
                     0);
    daemon_kill(&s.daemon);
    const char *const words[] = {
        "--model", s.model, "--device", test_device(), "--server-args=--dtype f32",
        "--lora",  adapter, NULL};
    assert_int_equal(evaluate(&s, alone, words), 0);
    json_t *a = result_in(alone);
    figures_of_both_agree(result_in(by_server), json_incref(a));
    assert_int_equal(evaluate(&s, plain, OPTIONS("--model", s.model, "--device", test_device())),
                     0);
    json_t *b = result_in(plain);
    assert_true(metric(a, "reward") != metric(b, "reward")); // it is the adapter that was measured
    json_decref(a);
    json_decref(b);
    assert_int_equal(entries(tmp), 0);
    scene_close(&s);
}

static void what_is_wrong_is_named(void **state)
{
    (void)state;
    struct scene s = {.folder = test_folder()};
    s.model = daemon_model(s.folder, true, 7);
    s.data = test_path(s.folder, "data.jsonl");
    test_write(s.data, "{\"prompt\": \"a\"}\n", 16);
    const char *tmp = own_tmpdir(&s), *log = test_path(s.folder, "eval.log");
    const struct {
        const char *const *words;
        int status;
        const char *said;
    } cases[] = {
        {OPTIONS("--model", s.model, "--bridge", "x.json"), 2, "give one of the two"},
        {OPTIONS("--device", "cpu"), 2, "--device is for a server that is started: give --model"},
        {OPTIONS("--model", tmp), 1, "config.json"},
        {OPTIONS("--model", s.model, "--lora", s.model), 1, "adapter_config.json"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(evaluate(&s, log, cases[i].words), cases[i].status);
        char *text = test_read(log);
        assert_contains(text, cases[i].said);
        free(text);
        assert_int_equal(entries(tmp), 0);
    }
    // a server that ends by itself: its last words are said, and its log stays
    assert_int_equal(evaluate(&s, log, OPTIONS("--model", s.model, "--server-args=--max-batch no")),
                     1);
    char *text = test_read(log);
    assert_contains(text, "the server ended with status 2; its log, ");
    assert_contains(text, "--max-batch");
    free(text);
    assert_int_equal(entries(tmp), 1);
}

// A signal while samples are generated ends the server too, and its folder goes.
static void a_signal_leaves_nothing(void **state)
{
    (void)state;
    struct scene s = {.folder = test_folder()};
    struct test_child child = {0};
    s.model = daemon_model(s.folder, true, 7);
    s.data = test_path(s.folder, "data.jsonl");
    struct bytes lines = BYTES_INIT;
    for (int i = 0; i < 2000; i++) bytes_printf(&lines, "{\"prompt\": \"%d\"}\n", i);
    test_write(s.data, lines.data, lines.len);
    bytes_release(&lines);
    const char *tmp = own_tmpdir(&s), *log = test_path(s.folder, "eval.log");
    test_spawn(&child, log,
               OPTIONS(test_binary("cw-trainer"), "eval", "--model", s.model, "--device",
                       test_device(), "--data", s.data, "--reward", "constant", "--num-samples",
                       "64", "--temperature", "1", "--max-completion-length", "200"));
    for (int tries = 0; tries < 600 && entries(tmp) == 0; tries++) usleep(50000);
    char bridge[PATH_MAX] = "";
    DIR *dir = opendir(tmp);
    for (const struct dirent *e; (e = readdir(dir));)
        if (e->d_name[0] != '.')
            snprintf(bridge, sizeof bridge, "%s/%s/bridge.json", tmp, e->d_name);
    closedir(dir);
    test_wait_for_file(bridge, LIMIT_MS, &child);
    test_kill(&child, SIGINT);
    assert_int_equal(test_wait(&child, LIMIT_MS), 1);
    assert_int_equal(entries(tmp), 0);
    char *text = test_read(log);
    assert_contains(text, "a signal: the evaluation is given up");
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_by_a_server_that_runs),
        cmocka_unit_test(with_an_adapter),
        cmocka_unit_test(what_is_wrong_is_named),
        cmocka_unit_test(a_signal_leaves_nothing),
    };
    return cmocka_run_group_tests_name("eval --model", tests, NULL, NULL);
}
