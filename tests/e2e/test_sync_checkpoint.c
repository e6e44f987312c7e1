/* test_sync_checkpoint.c: cw-trainer train --sync checkpoint: what a server samples that is started
 * anew on each step's weights, or loads them elsewhere, is what the one samples that shares them,
 * to the bit; a server that dies, does not start or is left behind. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/bridge_file.h"
#include "tests/support/training.h"

#include <sys/stat.h>

#define STEPS 4
// Enough sampling to be killed within.
#define LONG "--max-completion-length 200 --ignore-eos --num-generations 12 --max-steps 2"

SCENE_OF_ALL(scene_open_exact)

// --sync checkpoint with these words of args() too.
#define CHECKPOINT(...)                                                                            \
    JOIN(args("--sync checkpoint --model %s --device %s --max-steps 4", scene.model,               \
              test_device()),                                                                      \
         args(__VA_ARGS__))

static void start_checkpoint(struct test_child *child, const char *run, const char *const more[])
{
    scene_spawn(&scene, child, trainer_command_on(&scene, run, more));
}

static void train_checkpoint(int status, const char *run, const char *const more[])
{
    scene_ended(&scene, train_on(&scene, run, more), status);
}

static void assert_same_weights(const char *run)
{
    test_same_file(test_path(scene.folder, "shared/checkpoints/latest"), latest(&scene, run),
                   "model.safetensors");
}

static void assert_synced_each_step(const char *run, double bytes)
{
    each_within(&scene, run, "sync/time_s", STEPS, DBL_MIN, INFINITY);
    each_within(&scene, run, "sync/bytes_written", STEPS, bytes, bytes);
    each_within(&scene, run, "sampler_mismatch/max", STEPS, 0, 0);
}

// Bytes of the weights in the folder that the last server was given.
static double weights_bytes(const char *run)
{
    struct stat sb;
    const char *folder = test_path(test_path(scene.folder, run), "workers");
    assert_int_equal(stat(test_path(folder, "model.safetensors"), &sb), 0);
    return (double)sb.st_size;
}

static const char *own_command(void)
{
    const char *folder = test_folder();
    return test_text("'%s' --model {model} --listen 127.0.0.1:{port} --device %s --socket %s/s "
                     "--bridge %s/b.json",
                     test_binary("cw-infer-server"), test_device(), folder, folder);
}

TEST(restarts_train_as_shared_weights_do)
{
    assert_train(&scene, 0, "shared", "--max-steps 4");
    assert_synced_each_step("shared", 0);
    train_checkpoint(0, "own", CHECKPOINT("--server-timeout 60"));
    assert_same_weights("own");
    assert_synced_each_step("own", weights_bytes("own"));
    // through OpenAI's endpoint, as of a server that is not ours
    train_checkpoint(0, "any", CHECKPOINT("--server-command %s", own_command()));
    assert_same_weights("any");
    assert_synced_each_step("any", weights_bytes("any"));
    // and in two pieces, with evaluations of the weights of their steps
    train_checkpoint(0, "resumed", CHECKPOINT("--max-steps 2 --eval-data %s", scene.data));
    train_checkpoint(0, "resumed", CHECKPOINT("--resume"));
    assert_same_weights("resumed");
}

// A server with all that one may have, which wants the key.
static const char *start_elsewhere(struct daemon *other, const char *key)
{
    test_write(key, "a-key-of-the-sampler\n", 21);
    chmod(key, 0600);
    daemon_start(other, scene.model,
                 args("--dtype %s --listen 127.0.0.1:0 --api-key-file %s --max-adapters 1 --draft "
                      "%s --tandem-model %s",
                      daemon_exact_dtype(), key, scene.model, scene.model));
    return test_text("http://127.0.0.1:%d", daemon_tcp_port(other));
}

TEST(one_elsewhere_is_told_to_load)
{
    struct daemon other = {0};
    const char *key = test_path(scene.folder, "key"), *url = start_elsewhere(&other, key);
    train_checkpoint(0, "elsewhere",
                     CHECKPOINT("--server-url %s --workers-api-key-file %s", url, key));
    assert_same_weights("elsewhere");
    assert_synced_each_step("elsewhere", weights_bytes("elsewhere"));
    daemon_holds(&other, "policy", test_path(scene.folder, "elsewhere/workers"));
    daemon_kill(&other);
    train_checkpoint(1, "gone", CHECKPOINT("--server-url %s --workers-api-key-file %s", url, key));
    assert_said(&scene, "--server-url: http://127.0.0.1:");
    assert_false(said(&scene, "--workers")); // which is no way out here
    assert_said(&scene, "nobody answers");
    // one that would sample by other weights than are trained
    daemon_start(&other, scene.model,
                 args("--quantization fp8-weights --listen 127.0.0.1:0 --api-key-file %s", key));
    train_checkpoint(1, "eight-bits",
                     CHECKPOINT("--server-url http://127.0.0.1:%s --workers-api-key-file %s",
                                test_text("%d", daemon_tcp_port(&other)), key));
    assert_said(&scene, "it serves with --quantization fp8-weights, and what is trained has none");
    daemon_kill(&other);
}

// What a server holds beside the policy is there in one that is started: an adapter and a draft
// that are trained, brought up to date like the policy, and a tandem's other model. The tokens are
// those of the server that shares its weights.
TEST(what_a_server_holds_beside_it)
{
    struct scene with = scene;
    const char *both = test_text("--train-draft --draft %s", scene.model);
    const struct {
        const char *name, *shared, *own, *files[2];
    } modes[] = {
        {"lora", "--lora-r 4", "", {"adapter_model.safetensors"}},
        {"draft", "--train-draft", both, {"model.safetensors", "draft/model.safetensors"}},
        {"tandem", "--tandem", "", {"model.safetensors"}},
        {"all",
         "--lora-r 4 --train-draft --tandem",
         both,
         {"adapter_model.safetensors", "draft/model.safetensors"}},
    };
    with.daemon = (struct daemon){0};
    for (size_t k = 0; k < sizeof modes / sizeof *modes; k++) {
        const char *run = test_text("%s-own", modes[k].name);
        const char *const *shared = words_of(modes[k].shared);
        daemon_start(&with.daemon, scene.model,
                     args("--dtype %s --max-adapters 1 --draft %s --tandem-model %s",
                          daemon_exact_dtype(), scene.model, scene.model));
        assert_exit(0, train(&with, modes[k].name, JOIN(args("--max-steps 4"), shared)));
        daemon_kill(&with.daemon);
        train_checkpoint(
            0, run,
            JOIN(CHECKPOINT("--server-args '--speculative off --tandem-model %s'", scene.model),
                 shared, words_of(modes[k].own)));
        for (int i = 0; i < 2 && modes[k].files[i]; i++)
            test_same_file(latest(&scene, modes[k].name), latest(&scene, run), modes[k].files[i]);
        each_within(&scene, run, "sampler_mismatch/max", STEPS, 0, 0);
    }
    // also in one elsewhere
    struct daemon other = {0};
    const char *key = test_path(scene.folder, "key"), *url = start_elsewhere(&other, key);
    train_checkpoint(0, "all-else",
                     CHECKPOINT("--lora-r 4 --train-draft --draft %s --tandem --server-url %s "
                                "--workers-api-key-file %s",
                                scene.model, url, key));
    for (int i = 0; i < 2; i++)
        test_same_file(latest(&scene, "all"), latest(&scene, "all-else"), modes[3].files[i]);
    daemon_holds(&other, "draft", test_path(scene.folder, "all-else/workers/draft"));
    daemon_kill(&other);
    each_within(&scene, "tandem-own", "tandem/frozen_token_fraction", STEPS, DBL_MIN, 1);
    // the draft of each step drafts, which makes other tokens
    train_checkpoint(0, "drafted", CHECKPOINT("--train-draft --draft %s", scene.model));
    each_within(&scene, "drafted", "spec_decode/num_drafts", STEPS, 1, INFINITY);
    each_within(&scene, "drafted", "sampler_mismatch/max", STEPS, 0, 0);
}

TEST(steps_between_are_of_older_weights)
{
    static const double ages[STEPS] = {0, 1, 2, 0};
    double age[STEPS], written[STEPS];
    train_checkpoint(0, "every-third", CHECKPOINT("--restart-interval 3"));
    assert_int_equal(column(&scene, "every-third", "rollout/staleness_max", age, STEPS), STEPS);
    column(&scene, "every-third", "sync/bytes_written", written, STEPS);
    for (int i = 0; i < STEPS; i++) {
        assert_true(age[i] == ages[i]);
        assert_int_equal(written[i] > 0, ages[i] == 0);
    }
    metric(last_metrics(&scene, "every-third"), "sampling/importance_sampling_ratio/mean");
}

// Of the server that a run has started last; 0: it is being started.
static pid_t server_of(const char *run)
{
    struct bridge_file *file;
    const char *path = test_path(test_path(scene.folder, run), "server-bridge.json");
    if (!file_exists(path) || bridge_file_read(path, &file) != ST_OK) return 0;
    const pid_t pid = bridge_file_check_process(file) == ST_OK ? file->pid : 0;
    bridge_file_free(file);
    return pid;
}

// Samples that its server has under way; -1: it does not answer.
static int samples_running(const char *run)
{
    static const char request[] = "GET /health HTTP/1.0\r\nHost: x\r\n\r\n";
    struct wire_answer a = {0};
    const int fd = daemon_connect(test_path(test_path(scene.folder, run), "server.sock"));
    if (fd < 0) return -1;
    daemon_send(fd, request, strlen(request));
    wire_read(fd, LIMIT_MS, &a);
    close(fd);
    const json_t *running = json_object_get(a.json, "running");
    return json_is_integer(running) ? (int)json_integer_value(running) : -1;
}

TEST(one_that_is_killed_is_started_anew)
{
    struct test_child child = {0};
    const int64_t deadline = clock_deadline_ns(LIMIT_MS);
    start_checkpoint(&child, "killed", CHECKPOINT(LONG));
    wait_for_steps(&scene, "killed", 1, &child);
    while (samples_running("killed") <= 0)
        assert_true(test_running(&child) && clock_ms_until(deadline) > 0);
    kill(server_of("killed"), SIGKILL);
    assert_int_equal(test_wait(&child, LIMIT_MS), 0);
    assert_said(&scene, "the server was ended by signal 9");
    assert_said(&scene, "is started anew");
    train_checkpoint(0, "whole", CHECKPOINT(LONG));
    test_same_file(latest(&scene, "whole"), latest(&scene, "killed"), "model.safetensors");
}

// The trainer's end is the server's, whichever way.
TEST(none_is_left_behind)
{
    struct test_child child = {0};
    start_checkpoint(&child, "left", CHECKPOINT("--max-steps 100000"));
    const int64_t deadline = clock_deadline_ns(LIMIT_MS);
    wait_for_steps(&scene, "left", 1, &child);
    while (server_of("left") == 0) assert_true(clock_ms_until(deadline) > 0);
    test_end(&child);
    while (server_of("left") != 0) {
        assert_true(clock_ms_until(deadline) > 0);
        clock_sleep_ms(5);
    }
    assert_int_equal(server_of("own"), 0);
}

TEST(one_that_does_not_start_says_why)
{
    train_rows(&scene, "launch", "sync_whose_server_does_not_start", train_on);
}

// A server that is ours but for the starts from the second to `last`, which it does not survive.
static const char *command_that_fails(const char *name, int last)
{
    const char *script = test_path(scene.folder, name);
    const char *text =
        test_text("#!/bin/sh\necho >> %s.starts; n=$(wc -l < %s.starts)\n"
                  "[ $n -gt 1 ] && [ $n -le %d ] && { echo start $n fails; exit 3; }\n"
                  "exec %s --model $1 --listen 127.0.0.1:$2 --socket %s.sock "
                  "--bridge %s.json --device cpu --dtype f32\n",
                  script, script, last, test_binary("cw-infer-server"), script, script);
    test_write(script, text, strlen(text));
    assert_int_equal(chmod(script, 0755), 0);
    return script;
}

TEST(one_that_dies_while_it_starts_counts_as_a_try)
{
    train_checkpoint(
        0, "twice-run",
        CHECKPOINT("--server-command '%s {model} {port}'", command_that_fails("twice", 3)));
    assert_said(&scene, "is started anew: the server ended with status 3");
    assert_said(&scene, "start 3 fails");
    train_checkpoint(
        1, "always-run",
        CHECKPOINT("--server-command '%s {model} {port}'", command_that_fails("always", 1000)));
    assert_said(&scene, "the server was lost 3 times in one step");
    assert_said(&scene, "start 4 fails");
}

TEST(what_does_not_go_together_is_refused)
{
    train_rows(&scene, "launch", "sync_that_is_refused", train_on);
}
