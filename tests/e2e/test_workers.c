/* test_workers.c: cw-trainer train --workers: what several servers sample is what one samples, to
 * the bit; a worker that is killed in the middle of a step costs a retry, and comes back; what
 * cannot be a worker is refused by name. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

#include <sys/stat.h>

#define STEPS   4
#define PROMPTS 48
#define PER     6 // prompts of a step

static struct scene scene;
static struct daemon worker;

TEST(what_they_sample_is_what_one_samples)
{
    struct daemon on_tcp = {0};
    char workers[PATH_MAX + 40];
    double samples[2][STEPS], mismatch[STEPS], sync_s[STEPS], up[STEPS];
    const char *key = test_path(scene.folder, "key");
    test_write(key, "a-key-of-the-workers\n", 21);
    chmod(key, 0600);
    daemon_start(
        &on_tcp, scene.model,
        OPTIONS("--dtype", daemon_exact_dtype(), "--listen", "127.0.0.1:0", "--api-key-file", key));
    snprintf(workers, sizeof workers, "%s,http://127.0.0.1:%d", worker.bridge,
             daemon_tcp_port(&on_tcp));
    assert_exit(0, train(&scene, "alone", OPTIONS("--max-steps", "4", "--prompts-per-step", "6")));
    assert_exit(0, train_alone(&scene, "shared",
                               OPTIONS("--max-steps", "4", "--prompts-per-step", "6", "--workers",
                                       workers, "--workers-api-key-file", key)));
    assert_said(&scene, "2 further servers sample");
    test_same_file(test_path(scene.folder, "alone/checkpoints/latest"),
                   test_path(scene.folder, "shared/checkpoints/latest"), "model.safetensors");
    assert_int_equal(column(&scene, "shared", "workers/1/samples", samples[0], STEPS), STEPS);
    column(&scene, "shared", "workers/2/samples", samples[1], STEPS);
    column(&scene, "shared", "sampler_mismatch/max", mismatch, STEPS);
    column(&scene, "shared", "workers/sync_s", sync_s, STEPS);
    column(&scene, "shared", "workers/up", up, STEPS);
    for (int i = 0; i < STEPS; i++) {
        assert_true(samples[0][i] > 0 && samples[1][i] > 0);
        assert_true(samples[0][i] + samples[1][i] < 6 * 4); // the trained one has its share
        assert_true(mismatch[i] == 0 && sync_s[i] > 0 && up[i] == 2);
    }
    daemon_holds(&on_tcp, "policy", test_path(scene.folder, "shared/workers"));
}

// How often each prompt was learned from, by the samples that the run logged.
static void assert_each_once(const char *run)
{
    int times[PROMPTS] = {0};
    const json_t *sample;
    size_t i;
    for (int step = 1; step <= PROMPTS / PER; step++) {
        char name[60];
        snprintf(name, sizeof name, "%s/rollouts/step-%d.jsonl", run, step);
        const json_t *samples = json_of_lines_file(test_path(scene.folder, name));
        json_array_foreach (samples, i, sample) {
            const json_int_t of = json_integer_value(json_object_get(sample, "line"));
            assert_in_range(of, 1, PROMPTS);
            times[of - 1]++;
        }
    }
    for (int k = 0; k < PROMPTS; k++)
        if (times[k] != 4) fail_msg("prompt %d was learned from by %d samples, not 4", k, times[k]);
}

// While it samples for the trainer.
static void kill_in_the_middle(struct daemon *d, struct test_child *trainer)
{
    const int64_t deadline = clock_deadline_ns(LIMIT_MS);
    for (int running = 0; running == 0;) {
        assert_true(test_running(trainer) && clock_ms_until(deadline) > 0);
        json_t *health = daemon_get(d->socket, "/health", 200);
        running = (int)json_integer_value(json_object_get(health, "running"));
    }
    daemon_kill(d);
}

TEST(one_that_is_killed_costs_a_retry)
{
    struct test_child child = {0};
    struct daemon again = {0};
    double up[PROMPTS / PER], samples[PROMPTS / PER];
    start_trainer(&scene, &child, "killed",
                  OPTIONS("--data", scene_prompts(&scene, "prompts.jsonl", PROMPTS),
                          "--num-train-epochs", "1", "--prompts-per-step", "6",
                          "--max-completion-length", "200", "--ignore-eos", "--log-completions",
                          "--workers", worker.bridge));
    wait_for_steps(&scene, "killed", 1, &child);
    kill_in_the_middle(&worker, &child);
    wait_for_log(&scene, "is put aside until it answers again");
    kill(child.pid, SIGSTOP); // where steps are quick there would be none left for who comes back
    // the same address, by another process
    again = worker;
    again.child = (struct test_child){0};
    test_spawn(&again.child, worker.log,
               OPTIONS(test_binary("cw-infer-server"), "--model", scene.model, "--device",
                       test_device(), "--dtype", daemon_exact_dtype(), "--socket", worker.socket,
                       "--bridge", worker.bridge));
    worker = again;
    daemon_wait(&worker);
    kill(child.pid, SIGCONT);
    assert_int_equal(test_wait(&child, LIMIT_MS), 0);
    assert_each_once("killed");
    assert_log(&scene, "go to the other servers");
    assert_log(&scene, "is back");
    assert_int_equal(column(&scene, "killed", "workers/up", up, PROMPTS / PER), PROMPTS / PER);
    column(&scene, "killed", "workers/1/samples", samples, PROMPTS / PER);
    int without = 0;
    for (int i = 0; i < PROMPTS / PER; i++) without += up[i] == 0;
    assert_true(without > 0);
    assert_true(up[0] == 1 && samples[0] > 0);
    assert_true(up[PROMPTS / PER - 1] == 1 && samples[PROMPTS / PER - 1] > 0);
    json_t *m = last_metrics(&scene, "killed");
    assert_true(metric(m, "workers/1/failures") == 1);
}

// Refused before the run has a folder.
static void assert_refused(const char *workers, const char *sentence)
{
    assert_exit(1, train_alone(&scene, "no", OPTIONS("--max-steps", "1", "--workers", workers)));
    assert_said(&scene, sentence);
    assert_false(file_exists(test_path(scene.folder, "no")));
}

TEST(what_cannot_be_one_is_refused)
{
    char words[2 * PATH_MAX];
    struct daemon other = {0};
    assert_refused(scene.daemon.bridge, "is of the server that is trained");
    snprintf(words, sizeof words, "%s,%s", worker.bridge, worker.bridge);
    assert_refused(words, "name it once");
    snprintf(words, sizeof words, "%s,", worker.bridge);
    assert_refused(words, "an empty name before or behind a comma");
    assert_refused("/nonexistent/bridge.json", "/nonexistent/bridge.json");
    assert_refused("https://127.0.0.1:1", "take a bridge file or http://HOST:PORT");
    assert_refused("http://127.0.0.1:1", "http://127.0.0.1:1 cannot be used");
    daemon_start(&other, test_path(test_root(), "tools/demo-model"),
                 OPTIONS("--listen", "127.0.0.1:0"));
    assert_refused(other.bridge, "start it with --model");
    snprintf(words, sizeof words, "http://127.0.0.1:%d", daemon_tcp_port(&other));
    assert_refused(words, "on TCP only with --api-key-file");
    daemon_kill(&other);
    assert_int_equal(train_alone(&scene, "no", OPTIONS("--workers", worker.bridge, "--exact")), 2);
    assert_said(&scene, "--exact with --workers");
}

static void open_scene(void)
{
    scene_open_exact(&scene);
    daemon_start(&worker, scene.model, OPTIONS("--dtype", daemon_exact_dtype()));
}

TESTS_BETWEEN(open_scene, NULL)
