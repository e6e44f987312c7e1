/* test_atropos.c: cw-trainer train --atropos: against an API server of this test's, which checks
 * what it is asked and hands out what it likes; and, where a Python has atroposlib, the real one
 * with an environment that has our server generate. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/canned_server.h"
#include "tests/support/pair.h"
#include "tests/support/rank_group.h"

#define STEPS 3

static struct scene scene;

// ---- the API server of this test ----------------------------------------------------------------

enum conduct {
    FINE,
    OF_TOKENS,
    OF_OTHERS_TOO,
    TAKEN,
    ENDS,
    FORGETS,
    MALFORMED,
    NONE_COMES,
    NO_API
};
static enum conduct conduct; // set before it is forked
static struct canned_server api;

#define BIG_UUID "{\"uuid\": 338598477420198391471028384756102938475}" // of 128 bits

// Groups of two sequences whose trained tokens have the log-probabilities of a uniform model, the
// first in two turns.
static const char batch[] =
    "{\"batch\": [{\"tokens\": [[40, 41, 42, 43, 44], [40, 45, 46]], \"scores\": [1, 0],"
    " \"masks\": [[-100, 41, -100, 43, 44], [-100, 45, 46]], \"env_id\": 0, \"messages\": null,"
    " \"inference_logprobs\": [[1, -5.7, 1, -5.7, -5.7], [1, -5.7, -5.7]], \"overrides\": [],"
    " \"advantages\": %s},"
    " {\"tokens\": [[50, 51], [50, 52]], \"scores\": [0.25, 0.75], \"env_id\": 0,"
    " \"masks\": [[-100, 51], [-100, 52]], \"inference_logprobs\": [[1, -5.7], [1, -5.7]]}]}";

static const char *advantages(void)
{
    if (conduct == OF_TOKENS) return "[[0, 1, 0, -1, 2], [0, 0.5, -0.5]]";
    return conduct == OF_OTHERS_TOO ? "[[9, 1, 99, -1, 2], [9, 0.5, -0.5]]" : "null";
}

static bool registers_well(const json_t *body)
{
    static const char *const texts[] = {"wandb_group", "wandb_project", "checkpoint_dir"};
    bool ok = json_object_size(body) == 8;
    for (size_t i = 0; i < 3; i++) ok = ok && json_is_string(json_object_get(body, texts[i]));
    return ok && int_of(body, "batch_size") == 4 && int_of(body, "max_token_len") > 5 &&
           json_is_integer(json_object_get(body, "save_checkpoint_interval")) &&
           int_of(body, "num_steps") == STEPS &&
           json_is_integer(json_object_get(body, "starting_step"));
}

static void serve_batch(int fd, int polls)
{
    if (conduct == FORGETS)
        canned_response(fd, "200 OK",
                        "{\"status\": \"error\", \"message\": \"Trainer not registered.\","
                        " \"batch\": []}");
    else if (polls % 2 == 1 || conduct == NONE_COMES)
        canned_response(fd, "200 OK", "{\"batch\": null}");
    else if (conduct == MALFORMED)
        canned_response(fd, "200 OK", "{\"batch\": [{\"tokens\": [[1, 2]]}]}");
    else
        canned_response(fd, "200 OK", test_text(batch, advantages()));
}

// The trainer keeps its one connection, so that what happened on it is all that happened.
static void serve(int fd)
{
    char request[16384];
    json_int_t batch_size = conduct == TAKEN ? 32 : -1, max_token_len = -1;
    for (int polls = 0; canned_request(fd, request, sizeof request);) {
        json_t *body = test_keep(json_loads(canned_body(request), 0, NULL));
        const char *info = test_text("{\"batch_size\": %d, \"max_token_len\": %d}", (int)batch_size,
                                     (int)max_token_len);
        if (conduct == NO_API) {
            canned_response(fd, "404 Not Found", "{\"detail\": \"Not Found\"}");
        } else if (canned_is(request, "/info")) {
            canned_response(fd, "200 OK", info);
        } else if (canned_is(request, "/register") && registers_well(body)) {
            batch_size = int_of(body, "batch_size");
            max_token_len = int_of(body, "max_token_len");
            canned_response(fd, "200 OK", BIG_UUID);
        } else if (canned_is(request, "/batch") && batch_size == 4) {
            if (conduct == ENDS && polls == 3) kill(getppid(), SIGKILL);
            if (conduct == ENDS && polls == 3) return;
            serve_batch(fd, ++polls);
        } else {
            canned_response(fd, "422 Unprocessable Entity", "{\"error\": \"not so\"}");
        }
    }
}

// A trainer with the numbers of trainer_command(), on that server or another one.
static const char *const *command(const char *run, const char *url, const char *const more[])
{
    return with_word(with_word(trainer_command(&scene, test_path(scene.folder, run), more),
                               "--data", "--atropos"),
                     scene.data, url);
}

#define SIZES "--prompts-per-step 2 --num-generations 2 --max-steps 3 --rollout-timeout 20 "

static int train_atropos(enum conduct how, const char *run, const char *const more[])
{
    conduct = how;
    canned_server_start(&api, serve);
    const int status = scene_run(&scene, command(run, api.url, more));
    canned_server_stop(&api);
    return status;
}

// ---- what a run does ----------------------------------------------------------------------------

TEST(it_trains_on_what_it_is_given)
{
    double reward[STEPS], norm[STEPS], off[STEPS];
    assert_int_equal(train_atropos(FINE, "fine", args(SIZES "--log-completions")), 0);
    assert_said(&scene, "registered for batches of 4 sequences");
    assert_int_equal(column(&scene, "fine", "reward", reward, STEPS), STEPS);
    column(&scene, "fine", "grad_norm", norm, STEPS);
    column(&scene, "fine", "sampler_mismatch/max", off, STEPS);
    for (int i = 0; i < STEPS; i++) assert_true(reward[i] == 0.5 && norm[i] > 0 && off[i] > 0);
    assert_true(off[0] < 3); // its log-probabilities are near those of the model at first
    json_t *m = last_metrics(&scene, "fine");
    assert_true(metric(m, "completions/max_length") == 3); // of four tokens one is not sampled
    assert_false(json_has(m, "epoch"));
}

// Of each token that is trained; what stands at others changes nothing.
TEST(tokens_may_have_advantages_of_their_own)
{
    assert_int_equal(train_atropos(OF_TOKENS, "tokens", args(SIZES)), 0);
    assert_int_equal(train_atropos(OF_OTHERS_TOO, "others", args(SIZES)), 0);
    test_same_file(latest(&scene, "tokens"), latest(&scene, "others"), "model.safetensors");
    char *fine = test_read(test_path(latest(&scene, "fine"), "model.safetensors"));
    char *tokens = test_read(test_path(latest(&scene, "tokens"), "model.safetensors"));
    assert_memory_not_equal(fine, tokens, 1 << 16);
}

// Rank 0 asks for batches; both learn from their share of each.
TEST(two_ranks_learn_as_one)
{
    struct pair p = {.s = scene};
    struct test_child child = {0};
    assert_int_equal(train_atropos(FINE, "one", args(SIZES)), 0);
    pair_open_other(&p, NULL);
    canned_server_start(&api, serve);
    scene_spawn(&scene, &child, pair_command(&p, command("two", api.url, args(SIZES))));
    const int status = test_wait(&child, LIMIT_MS);
    canned_server_stop(&api);
    if (status != 0) fail_msg("%s", test_read(child.log));
    same_losses(&scene, "one", "two", STEPS, 1e-5);
    pair_holds(&p, "two");
}

// Which is asked for by its name.
TEST(an_adapter_is_trained)
{
    struct daemon adapters = {0};
    daemon_start(&adapters, scene.model, args("--max-adapters 1"));
    assert_exit(
        0, train_atropos(FINE, "adapter", args(SIZES "--lora-r 4 --bridge %s", adapters.bridge)));
    assert_said(&scene, " for model policy are trained on");
    daemon_holds_adapter(&adapters, "policy", latest(&scene, "adapter"));
}

TEST(a_signal_ends_the_wait)
{
    struct test_child child = {0};
    conduct = NONE_COMES;
    canned_server_start(&api, serve);
    scene_spawn(&scene, &child, command("signal", api.url, args(SIZES)));
    wait_for_log(&scene, "registered for batches");
    test_kill(&child, SIGTERM);
    assert_int_equal(test_wait(&child, 10000), 0);
    canned_server_stop(&api);
    assert_said(&scene, "stopped at step 0 of 3");
    assert_true(file_exists(test_path(latest(&scene, "signal"), "model.safetensors")));
}

TEST(what_goes_wrong_is_named)
{
    const struct {
        enum conduct conduct;
        const char *timeout, *sentence;
    } faults[] = {
        {TAKEN, "20", "its batch_size is 32, of a trainer that registered before"},
        {ENDS, "20", "GET /batch"},
        {FORGETS, "20", "Trainer not registered. (it was started anew"},
        {MALFORMED, "20", "/batch, group 0, sequence 0: \"tokens\" and \"masks\" must be there"},
        {NONE_COMES, "0.6", "no batch of 4 sequences came within 1 s"},
        {NO_API, "20", "GET /info: 404"},
    };
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        const char *run = test_text("fault-%zu", i);
        assert_int_equal(train_atropos(faults[i].conduct, run,
                                       args(SIZES "--rollout-timeout %s", faults[i].timeout)),
                         1);
        assert_said(&scene, faults[i].sentence);
        assert_said(&scene, "--atropos http://127.0.0.1:");
    }
    // after a step what was learned is saved
    assert_true(file_exists(test_path(scene.folder, "fault-1/checkpoints/step-1")));
}

static int train_fine(struct scene *s, const char *run, const char *const words[])
{
    assert_ptr_equal(s, &scene);
    return train_atropos(FINE, run, words);
}

TEST(what_does_not_go_together_is_refused)
{
    train_rows(&scene, "recipes", "atropos_that_is_refused", train_fine);
}

// ---- the real one -------------------------------------------------------------------------------

static void wait_until_it_listens(int port, struct test_child *child)
{
    const int64_t deadline = clock_deadline_ns(LIMIT_MS);
    int fd;
    while ((fd = daemon_connect_tcp(port)) < 0) {
        assert_true(test_running(child) && clock_ms_until(deadline) > 0);
        clock_sleep_ms(50);
    }
    close(fd);
}

TEST(with_the_real_atroposlib)
{
    const char *python = test_python("atroposlib, transformers");
    const char *model = test_path(test_root(), "tools/demo-model");
    const int port = test_free_port();
    struct test_child run_api = {0}, env = {0}, trainer = {0};
    struct daemon d = {0};
    const char *url = test_text("http://127.0.0.1:%d", port);
    test_spawn(&run_api, test_path(scene.folder, "api.log"),
               args("%s -m atroposlib.cli.run_api --host 127.0.0.1 --port %d", python, port));
    daemon_start(&d, model, args("--listen 127.0.0.1:0"));
    const char *server = test_text("http://127.0.0.1:%d", daemon_tcp_port(&d));
    wait_until_it_listens(port, &run_api);
    const char *const *more = args("--prompts-per-step 2 --num-generations 4 --max-steps 3 "
                                   "--learning-rate 1e-4");
    test_spawn(&trainer, test_path(scene.folder, "real.log"),
               with_word(daemon_trainer(&d, url, test_path(scene.folder, "real"), more, NULL),
                         "--data", "--atropos"));
    test_spawn(&env, test_path(scene.folder, "env.log"),
               OPTIONS("env", "HF_HUB_OFFLINE=1", python,
                       test_path(test_root(), "tests/clients/atropos_env.py"), url, server, model,
                       "4"));
    const int status = test_wait(&trainer, LIMIT_MS);
    test_end(&env);
    test_end(&run_api);
    if (status != 0) fail_msg("%s", test_read(test_path(scene.folder, "env.log")));
    json_t *m = last_metrics(&scene, "real");
    assert_true(metric(m, "step") == 3 && metric(m, "grad_norm") >= 0);
    assert_true(metric(m, "completions/max_length") <= 5);
    // of weights at most a few updates before: near, and not another sampler's
    assert_true(metric(m, "sampler_mismatch/mean") < 0.5);
}

static void open_scene(void)
{
    scene_open(&scene);
}

static void end_scene(void)
{
    canned_server_stop(&api);
}

TESTS_BETWEEN(open_scene, end_scene)
