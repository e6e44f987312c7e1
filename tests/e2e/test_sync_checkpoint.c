/* test_sync_checkpoint.c: cw-trainer train --sync checkpoint: what a server samples that is started
 * anew on each step's weights, or loads them elsewhere, is what the one samples that shares them,
 * to the bit; a server that dies, does not start or is left behind. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/bridge_file.h"
#include "tests/support/training.h"

#include <sys/stat.h>

#define STEPS 4
// Enough sampling to be killed within.
#define LONG                                                                                       \
    "--max-completion-length", "200", "--ignore-eos", "--num-generations", "12", "--max-steps", "2"

static struct scene scene;

#define CHECKPOINT_WORDS                                                                           \
    "--sync", "checkpoint", "--model", scene.model, "--device", test_device(), "--max-steps", "4"
#define CHECKPOINT(...) OPTIONS(CHECKPOINT_WORDS, __VA_ARGS__)

static void start_checkpoint(struct test_child *child, const char *run, const char *const more[])
{
    const char *argv[TRAINER_WORDS];
    trainer_command_on(&scene, run, more, argv);
    test_spawn(child, test_path(scene.folder, "trainer.log"), argv);
}

static int train_checkpoint(const char *run, const char *const more[])
{
    return train_on(&scene, run, more);
}

static void assert_same_weights(const char *run)
{
    test_same_file(test_path(scene.folder, "shared/checkpoints/latest"), latest(&scene, run),
                   "model.safetensors");
}

static void assert_synced_each_step(const char *run, double bytes)
{
    double seconds[STEPS], written[STEPS], mismatch[STEPS];
    assert_int_equal(column(&scene, run, "sync/time_s", seconds, STEPS), STEPS);
    column(&scene, run, "sync/bytes_written", written, STEPS);
    column(&scene, run, "sampler_mismatch/max", mismatch, STEPS);
    for (int i = 0; i < STEPS; i++)
        assert_true(seconds[i] > 0 && written[i] == bytes && mismatch[i] == 0);
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
    static char line[3 * PATH_MAX];
    const char *folder = test_folder();
    snprintf(line, sizeof line,
             "'%s' --model {model} --listen 127.0.0.1:{port} --device %s --socket %s --bridge %s",
             test_binary("cw-infer-server"), test_device(), test_path(folder, "s"),
             test_path(folder, "b.json"));
    return line;
}

TEST(restarts_train_as_shared_weights_do)
{
    assert_int_equal(train(&scene, "shared", OPTIONS("--max-steps", "4")), 0);
    assert_synced_each_step("shared", 0);
    assert_int_equal(train_checkpoint("own", CHECKPOINT("--server-timeout", "60")), 0);
    assert_same_weights("own");
    assert_synced_each_step("own", weights_bytes("own"));
    // through OpenAI's endpoint, as of a server that is not ours
    assert_int_equal(train_checkpoint("any", CHECKPOINT("--server-command", own_command())), 0);
    assert_same_weights("any");
    assert_synced_each_step("any", weights_bytes("any"));
    // and in two pieces, with evaluations of the weights of their steps
    assert_int_equal(
        train_checkpoint("resumed", CHECKPOINT("--max-steps", "2", "--eval-data", scene.data)), 0);
    assert_int_equal(train_checkpoint("resumed", CHECKPOINT("--resume")), 0);
    assert_same_weights("resumed");
}

// A server with all that one may have, which wants the key.
static const char *start_elsewhere(struct daemon *other, const char *key)
{
    static char url[64];
    test_write(key, "a-key-of-the-sampler\n", 21);
    chmod(key, 0600);
    daemon_start(other, scene.model,
                 OPTIONS("--dtype", daemon_exact_dtype(), "--listen", "127.0.0.1:0",
                         "--api-key-file", key, "--max-adapters", "1", "--draft", scene.model,
                         "--tandem-model", scene.model));
    snprintf(url, sizeof url, "http://127.0.0.1:%d", daemon_tcp_port(other));
    return url;
}

TEST(one_elsewhere_is_told_to_load)
{
    struct daemon other = {0};
    const char *key = test_path(scene.folder, "key"), *url = start_elsewhere(&other, key);
    assert_int_equal(train_checkpoint("elsewhere", CHECKPOINT("--server-url", url,
                                                              "--workers-api-key-file", key)),
                     0);
    assert_same_weights("elsewhere");
    assert_synced_each_step("elsewhere", weights_bytes("elsewhere"));
    daemon_holds(&other, "policy", test_path(scene.folder, "elsewhere/workers"));
    daemon_kill(&other);
    assert_int_equal(
        train_checkpoint("gone", CHECKPOINT("--server-url", url, "--workers-api-key-file", key)),
        1);
    assert_said(&scene, "--server-url: http://127.0.0.1:");
    assert_said(&scene, "nobody answers");
}

// What a server holds beside the policy is there in one that is started: an adapter and a draft
// that are trained, brought up to date like the policy, and a tandem's other model. The tokens are
// those of the server that shares its weights.
TEST(what_a_server_holds_beside_it)
{
    struct scene with = scene;
    char words[PATH_MAX + 64];
    double drafts[STEPS], mismatch[STEPS], frozen[STEPS];
    snprintf(words, sizeof words, "--speculative off --tandem-model '%s'", scene.model);
    const struct {
        const char *name, *shared[6], *own[8], *files[2];
    } modes[] = {
        {"lora", {"--lora-r", "4"}, {"--lora-r", "4"}, {"adapter_model.safetensors"}},
        {"draft",
         {"--train-draft"},
         {"--train-draft", "--draft", scene.model, "--server-args", words},
         {"model.safetensors", "draft/model.safetensors"}},
        {"tandem", {"--tandem"}, {"--tandem", "--server-args", words}, {"model.safetensors"}},
        {"all",
         {"--lora-r", "4", "--train-draft", "--tandem"},
         {"--lora-r", "4", "--train-draft", "--tandem", "--draft", scene.model, "--server-args",
          words},
         {"adapter_model.safetensors", "draft/model.safetensors"}},
    };
    with.daemon = (struct daemon){0};
    for (size_t k = 0; k < sizeof modes / sizeof *modes; k++) {
        const char *more[24] = {"--max-steps", "4"}, *own[24] = {CHECKPOINT_WORDS};
        char run[32];
        int n = 0, m = 0;
        while (more[n]) n++;
        while (own[m]) m++;
        for (int i = 0; i < 6 && modes[k].shared[i]; i++) more[n++] = modes[k].shared[i];
        for (int i = 0; i < 8 && modes[k].own[i]; i++) own[m++] = modes[k].own[i];
        snprintf(run, sizeof run, "%s-own", modes[k].name);
        daemon_start(&with.daemon, scene.model,
                     OPTIONS("--dtype", daemon_exact_dtype(), "--max-adapters", "1", "--draft",
                             scene.model, "--tandem-model", scene.model));
        assert_int_equal(train(&with, modes[k].name, more), 0);
        daemon_kill(&with.daemon);
        if (train_checkpoint(run, own) != 0)
            fail_msg("%s: %s", run, test_read(test_path(scene.folder, "alone.log")));
        for (int i = 0; i < 2 && modes[k].files[i]; i++)
            test_same_file(latest(&scene, modes[k].name), latest(&scene, run), modes[k].files[i]);
        column(&scene, run, "sampler_mismatch/max", mismatch, STEPS);
        for (int i = 0; i < STEPS; i++) assert_true(mismatch[i] == 0);
    }
    // also in one elsewhere
    struct daemon other = {0};
    const char *key = test_path(scene.folder, "key"), *url = start_elsewhere(&other, key);
    assert_int_equal(
        train_checkpoint("all-else", CHECKPOINT("--lora-r", "4", "--train-draft", "--draft",
                                                scene.model, "--tandem", "--server-url", url,
                                                "--workers-api-key-file", key)),
        0);
    for (int i = 0; i < 2; i++)
        test_same_file(latest(&scene, "all"), latest(&scene, "all-else"), modes[3].files[i]);
    daemon_holds(&other, "draft", test_path(scene.folder, "all-else/workers/draft"));
    daemon_kill(&other);
    column(&scene, "tandem-own", "tandem/frozen_token_fraction", frozen, STEPS);
    for (int i = 0; i < STEPS; i++) assert_true(frozen[i] > 0);
    // the draft of each step drafts, which makes other tokens
    assert_int_equal(
        train_checkpoint("drafted", CHECKPOINT("--train-draft", "--draft", scene.model)), 0);
    assert_int_equal(column(&scene, "drafted", "spec_decode/num_drafts", drafts, STEPS), STEPS);
    column(&scene, "drafted", "sampler_mismatch/max", mismatch, STEPS);
    for (int i = 0; i < STEPS; i++) assert_true(drafts[i] > 0 && mismatch[i] == 0);
}

TEST(steps_between_are_of_older_weights)
{
    static const double ages[STEPS] = {0, 1, 2, 0};
    double age[STEPS], written[STEPS];
    assert_int_equal(train_checkpoint("every-third", CHECKPOINT("--restart-interval", "3")), 0);
    assert_int_equal(column(&scene, "every-third", "rollout/staleness_max", age, STEPS), STEPS);
    column(&scene, "every-third", "sync/bytes_written", written, STEPS);
    for (int i = 0; i < STEPS; i++) {
        assert_true(age[i] == ages[i]);
        assert_int_equal(written[i] > 0, ages[i] == 0);
    }
    json_t *m = last_metrics(&scene, "every-third");
    metric(m, "sampling/importance_sampling_ratio/mean");
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
    const int n = json_is_integer(running) ? (int)json_integer_value(running) : -1;
    return n;
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
    assert_log(&scene, "the server was ended by signal 9");
    assert_log(&scene, "is started anew");
    assert_int_equal(train_checkpoint("whole", CHECKPOINT(LONG)), 0);
    test_same_file(latest(&scene, "whole"), latest(&scene, "killed"), "model.safetensors");
}

// The trainer's end is the server's, whichever way.
TEST(none_is_left_behind)
{
    struct test_child child = {0};
    start_checkpoint(&child, "left", CHECKPOINT("--max-steps", "100000"));
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
    char text[3 * PATH_MAX];
    const char *script = test_path(scene.folder, name);
    const int n = snprintf(text, sizeof text,
                           "#!/bin/sh\necho >> %s.starts; n=$(wc -l < %s.starts)\n"
                           "[ $n -gt 1 ] && [ $n -le %d ] && { echo start $n fails; exit 3; }\n"
                           "exec %s --model $1 --listen 127.0.0.1:$2 --socket %s.sock "
                           "--bridge %s.json --device cpu --dtype f32\n",
                           script, script, last, test_binary("cw-infer-server"), script, script);
    test_write(script, text, (size_t)n);
    assert_int_equal(chmod(script, 0755), 0);
    return script;
}

TEST(one_that_dies_while_it_starts_counts_as_a_try)
{
    char line[PATH_MAX + 32];
    snprintf(line, sizeof line, "%s {model} {port}", command_that_fails("twice", 3));
    assert_int_equal(train_checkpoint("twice-run", CHECKPOINT("--server-command", line)), 0);
    assert_said(&scene, "is started anew: the server ended with status 3");
    assert_said(&scene, "start 3 fails");
    snprintf(line, sizeof line, "%s {model} {port}", command_that_fails("always", 1000));
    assert_int_equal(train_checkpoint("always-run", CHECKPOINT("--server-command", line)), 1);
    assert_said(&scene, "the server was lost 3 times in one step");
    assert_said(&scene, "start 4 fails");
}

TEST(what_does_not_go_together_is_refused)
{
    train_rows(&scene, "launch", "sync_that_is_refused", train_on);
}

static void open_scene(void)
{
    scene_open_exact(&scene);
}

TESTS_BETWEEN(open_scene, NULL)
