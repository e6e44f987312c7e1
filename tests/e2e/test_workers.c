/* test_workers.c: cw-trainer train --workers: what several servers sample is what one samples, to
 * the bit; a worker that is killed in the middle of a step costs a retry, and comes back; what
 * cannot be a worker is refused by name. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

#include <sys/stat.h>

#define STEPS   4
#define PROMPTS 48
#define PER     6 // prompts of a step

static struct daemon worker;

static void open_worker(struct scene *s)
{
    scene_open_exact(s);
    daemon_start(&worker, s->model, args("--dtype %s", daemon_exact_dtype()));
}

SCENE_OF_ALL(open_worker)

TEST(what_they_sample_is_what_one_samples)
{
    struct daemon on_tcp = {0};
    double samples[2][STEPS];
    const char *key = test_path(scene.folder, "key");
    test_write(key, "a-key-of-the-workers\n", 21);
    chmod(key, 0600);
    daemon_start(
        &on_tcp, scene.model,
        args("--dtype %s --listen 127.0.0.1:0 --api-key-file %s", daemon_exact_dtype(), key));
    const char *workers =
        test_text("%s,http://127.0.0.1:%d", worker.bridge, daemon_tcp_port(&on_tcp));
    assert_train(&scene, 0, "alone", "--max-steps 4 --prompts-per-step 6");
    assert_train(&scene, 0, "shared",
                 "--max-steps 4 --prompts-per-step 6 --workers %s --workers-api-key-file %s",
                 workers, key);
    assert_said(&scene, "2 further servers sample");
    test_same_file(latest(&scene, "alone"), latest(&scene, "shared"), "model.safetensors");
    assert_int_equal(column(&scene, "shared", "workers/1/samples", samples[0], STEPS), STEPS);
    column(&scene, "shared", "workers/2/samples", samples[1], STEPS);
    each_within(&scene, "shared", "sampler_mismatch/max", STEPS, 0, 0);
    each_within(&scene, "shared", "workers/sync_s", STEPS, DBL_MIN, INFINITY);
    each_within(&scene, "shared", "workers/up", STEPS, 2, 2);
    for (int i = 0; i < STEPS; i++) {
        assert_true(samples[0][i] > 0 && samples[1][i] > 0);
        assert_true(samples[0][i] + samples[1][i] < 6 * 4); // the trained one has its share
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
        const json_t *samples =
            json_of_lines_file(test_text("%s/%s/rollouts/step-%d.jsonl", scene.folder, run, step));
        json_array_foreach (samples, i, sample) {
            const json_int_t of = int_of(sample, "line");
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
        running = (int)int_of(daemon_get(d->socket, "/health", 200), "running");
    }
    daemon_kill(d);
}

TEST(one_that_is_killed_costs_a_retry)
{
    struct test_child child = {0};
    struct daemon again = {0};
    double up[PROMPTS / PER], samples[PROMPTS / PER];
    start_trainer(&scene, &child, "killed",
                  args("--data %s --num-train-epochs 1 --prompts-per-step 6 "
                       "--max-completion-length 200 --ignore-eos --log-completions --workers %s",
                       scene_prompts(&scene, "prompts.jsonl", PROMPTS), worker.bridge));
    wait_for_steps(&scene, "killed", 1, &child);
    kill_in_the_middle(&worker, &child);
    wait_for_log(&scene, "is put aside until it answers again");
    kill(child.pid, SIGSTOP); // where steps are quick there would be none left for who comes back
    // the same address, by another process
    again = worker;
    again.child = (struct test_child){0};
    test_spawn(&again.child, worker.log,
               args("%s --model %s --device %s --dtype %s --socket %s --bridge %s",
                    test_binary("cw-infer-server"), scene.model, test_device(),
                    daemon_exact_dtype(), worker.socket, worker.bridge));
    worker = again;
    daemon_wait(&worker);
    kill(child.pid, SIGCONT);
    assert_int_equal(test_wait(&child, LIMIT_MS), 0);
    assert_each_once("killed");
    assert_said(&scene, "go to the other servers");
    assert_said(&scene, "is back");
    assert_int_equal(column(&scene, "killed", "workers/up", up, PROMPTS / PER), PROMPTS / PER);
    column(&scene, "killed", "workers/1/samples", samples, PROMPTS / PER);
    int without = 0;
    for (int i = 0; i < PROMPTS / PER; i++) without += up[i] == 0;
    assert_true(without > 0);
    assert_true(up[0] == 1 && samples[0] > 0);
    assert_true(up[PROMPTS / PER - 1] == 1 && samples[PROMPTS / PER - 1] > 0);
    assert_true(metric(last_metrics(&scene, "killed"), "workers/1/failures") == 1);
}

// Refused before the run has a folder.
static void assert_refused(const char *workers, const char *sentence)
{
    assert_train(&scene, 1, "no", "--max-steps 1 --workers %s", workers);
    assert_said(&scene, sentence);
    assert_false(file_exists(test_path(scene.folder, "no")));
}

TEST(what_cannot_be_one_is_refused)
{
    struct daemon other = {0};
    assert_refused(scene.daemon.bridge, "is of the server that is trained");
    assert_refused(test_text("%s,%s", worker.bridge, worker.bridge), "name it once");
    assert_refused(test_text("%s,", worker.bridge), "an empty name before or behind a comma");
    assert_refused("/nonexistent/bridge.json", "/nonexistent/bridge.json");
    assert_refused("https://127.0.0.1:1", "take a bridge file or http://HOST:PORT");
    assert_refused("http://127.0.0.1:1", "http://127.0.0.1:1 cannot be used");
    daemon_start(&other, test_path(test_root(), "tools/demo-model"), args("--listen 127.0.0.1:0"));
    assert_refused(other.bridge, "start it with --model");
    assert_refused(test_text("http://127.0.0.1:%d", daemon_tcp_port(&other)),
                   "on TCP only with --api-key-file");
    daemon_kill(&other);
    assert_train(&scene, 2, "no", "--workers %s --exact", worker.bridge);
    assert_said(&scene, "--exact with --workers");
}
