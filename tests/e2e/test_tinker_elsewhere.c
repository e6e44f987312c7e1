/* test_tinker_elsewhere.c: a name of cw-trainer serve that another server answers for
 * (--model-names NAME=http://...): a teacher, whose samples and log-probabilities are that server's
 * to the bit while the model here is trained; and what is said where it is not there. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_client.h"
#include "tests/support/rank_group.h"

static struct daemon teacher;

static void start_teacher(const char *const more[])
{
    daemon_start(&teacher, daemon_model(test_folder(), true, 9), more);
}

// Its name in --model-names.
static const char *teacher_name(void)
{
    return test_text("org/teacher=http://127.0.0.1:%d,two", daemon_tcp_port(&teacher));
}

static json_t *ask(const char *sampler, int seq_id)
{
    return tinker_sample(sampler, seq_id, 200, 4, ",\"prompt_logprobs\":true");
}

// What a sampler gives is the teacher's, or not.
static void check_answer(const char *sampler, int seq_id, const json_t *line, bool is_its)
{
    float scored[3];
    const struct tinker_sampled got = tinker_sampled(ask(sampler, seq_id));
    assert_int_equal(got.n, 4);
    assert_int_equal(tinker_field(got.message, 2).len, sizeof scored);
    memcpy(scored, tinker_field(got.message, 2).data, sizeof scored);
    bool same = true;
    for (int i = 0; i < 4; i++)
        same &= got.tokens[i] == json_integer_value(json_at(line, "token_ids.%d", i));
    for (int i = 1; i < 3; i++)
        same &= scored[i] == (float)json_number_value(json_at(line, "prompt_logprobs.%d", i));
    assert_int_equal(same, is_its);
}

TINKER_TEST(test_teacher)
{
    const char *teachers, *own;
    start_teacher(
        args("--exact --dtype %s --listen 127.0.0.1:0 --max-context 100", daemon_exact_dtype()));
    tinker_pair_start(NULL, args("--exact --dtype %s", daemon_exact_dtype()),
                      OPTIONS("--model-names", teacher_name()));
    trained = tinker_whole();
    json_t *all = tinker_get("get_server_capabilities", 200);
    const json_t *one = json_at(all, "supported_models.1");
    assert_string_equal(text_of(one, "model_name"), "org/teacher");
    assert_true(json_is_false(json_object_get(one, "trainable")));
    assert_int_equal(int_of(one, "max_context_length"), 100);
    json_t *line = daemon_post(
        teacher.socket, "/v1/rollouts", 200,
        "{\"groups\":[{\"id\":0,\"prompt_token_ids\":[10,20,30],\"n\":1,\"seed\":3}],\"sampling\":"
        "{\"max_tokens\":4,\"temperature\":1,\"ignore_eos\":true,\"prompt_logprobs\":0}}");
    teachers = tinker_sampler_of("base_model", "org/teacher");
    own = tinker_sampler_of("base_model", "two");
    check_answer(teachers, 0, line, true);
    check_answer(own, 0, line, false);
    tinker_run_update(&trained, &tinker_one);
    check_answer(teachers, 1, line, true); // no stale snapshot
    tinker_refused(
        tinker_post("create_model", 400,
                    "{\"session_id\":\"%s\",\"model_seq_id\":7,\"base_model\":\"org/teacher\"}",
                    session),
        "not trained here");

    test_kill(&teacher.child, SIGKILL);
    test_wait(&teacher.child, 10000);
    const int64_t start = clock_now_ns();
    tinker_refused(tinker_retrieve(ask(teachers, 2)), "org/teacher at http://127.0");
    assert_true(clock_ms_since(start) < 15000);
}

// Starts a cw-trainer serve, with that key (NULL: its own), that does not come to serve; what it
// says.
static void refused(const char *names, const char *key, const char *const wanted[])
{
    const char *log = test_path(test_folder(), "log");
    const int64_t start = clock_now_ns();
    assert_int_equal(
        test_command(log, 60000,
                     OPTIONS(test_binary("cw-trainer"), "serve", "--bridge", pair.daemon.bridge,
                             "--listen", "127.0.0.1:0", "--run-dir",
                             test_path(test_folder(), "runs"), "--model-names", names,
                             key ? "--api-key-file" : NULL, key)),
        1);
    assert_true(clock_ms_since(start) < 30000);
    char *text = test_read(log);
    for (int i = 0; wanted[i]; i++) assert_contains(text, wanted[i]);
}

// An address where nobody is, one that takes no part in HTTP, one that wants a key, and one of
// another cw-trainer serve.
TINKER_TEST(test_not_there)
{
    const char *text = test_text("far=http://127.0.0.1:%d", test_free_port());
    struct tinker_server other = {0};
    const char *file = test_path(test_folder(), "key");
    test_write(file, "tml-of-both\n", 12);
    start_teacher(args("--listen 127.0.0.1:0 --api-key-file %s", file));
    daemon_start(&pair.daemon, daemon_model(test_folder(), true, 5), NULL);
    refused(text, NULL, OPTIONS("--model-names far=http://127.0.0.1:", "nobody answers"));
    refused("far=ftp://host", NULL, args("far=ftp://host http://HOST:PORT"));
    refused(teacher_name(), NULL, args("'--model-names org/teacher=http://127.0.0.1:' 401"));
    tinker_server_start(&other, &teacher, NULL, OPTIONS("--api-key-file", file));
    text = test_text("far=http://127.0.0.1:%d", other.port);
    refused(text, file, OPTIONS(text, "404: there is no /v1/models here; docs/use/tinker.md"));
    assert_int_equal(tinker_server_stop(&other), 0);
    tinker_server_start(&pair.server, &pair.daemon, NULL,
                        OPTIONS("--model-names", teacher_name(), "--api-key-file", file));
}
