/* test_ends.c: every way in which one of the two processes may end, and full disks. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "tests/support/reference.h"
#include "tests/support/torn.h"

#include <sys/resource.h>

TEST_IN(second_trainer_is_refused, scene_open)
{
    struct test_child first = {0};
    start_trainer(s, &first, "first", args("--max-steps 100000"));
    wait_for_steps(s, "first", 1, &first);
    assert_train(s, 1, "second", "--max-steps 1");
    assert_said(s, test_text("process %d", (int)first.pid));
    assert_true(test_running(&first));
    wait_for_steps(s, "first", steps_done(s, "first") + 1, &first); // undisturbed
    // nor may that of another daemon write into its folder
    struct daemon own = s->daemon, other = {0};
    daemon_start(&other, s->model, NULL);
    s->daemon = other;
    assert_train(s, 1, "first", "--max-steps 1 --resume");
    assert_said(s, "first: another trainer is writing there");
    daemon_kill(&s->daemon);
    s->daemon = own;
    wait_for_steps(s, "first", steps_done(s, "first") + 1, &first);
}

TEST_IN(sigterm_ends_after_the_step, scene_open)
{
    struct test_child trainer = {0};
    start_trainer(s, &trainer, "run", args("--max-steps 100000"));
    wait_for_steps(s, "run", 2, &trainer);
    test_kill(&trainer, SIGTERM);
    assert_int_equal(test_wait(&trainer, LIMIT_MS), 0);
    assert_said(s, ": stopped at step ");
    char *log = test_read(test_path(s->folder, "trainer.log")),
         *signalled = strstr(log, "signal: ");
    assert_non_null(signalled); // first why, then what
    assert_true(signalled < strstr(log, ": stopped at step "));
    assert_int_equal(saved_step(s, "run"), steps_done(s, "run"));
    daemon_holds(&s->daemon, "policy", latest(s, "run"));
    assert_train(s, 0, "other", "--max-steps 1"); // the lease is free
}

// In a long step, here one whose scores are waited for, the first signal says what it waits for;
// the second does not wait.
TEST_IN(second_signal_ends_at_once, scene_open)
{
    struct test_child trainer = {0};
    static const char script[] = "read -r line && echo '{\"reward\": 1}'\n" // when it is tried
                                 "read -r line && touch \"$0.asked\" && sleep 5\n";
    start_trainer(s, &trainer, "run", args("--max-steps 9 --reward %s", scene_scorer(s, script)));
    int64_t deadline = clock_deadline_ns(10000);
    while (!file_exists(test_path(s->folder, "scorer-0.sh.asked")) && clock_ms_until(deadline) > 0)
        clock_sleep_ms(10);
    test_kill(&trainer, SIGINT);
    wait_for_log(s, "once this step is done");
    assert_true(test_running(&trainer));
    int64_t start = clock_now_ns();
    test_kill(&trainer, SIGINT);
    assert_int_equal(test_wait(&trainer, LIMIT_MS), 1);
    assert_true(clock_ms_since(start) < 2000);
    assert_said(s, "second signal: ending at once");
    SCOPED(reference_close) struct reference l;
    reference_open(latest(s, "run"), "cpu", &l); // the checkpoint before is whole
    assert_train(s, 0, "run", "--max-steps 1 --resume");
}

static bool catches(pid_t pid, int number)
{
    return test_process(pid, "SigCgt:", 16) >> (number - 1) & 1;
}

// Nor while data is read before the first step, which here takes longer than the test waits.
TEST_IN(second_signal_ends_the_start, scene_open)
{
    struct test_child trainer = {0};
    const char *data = scene_prompts(s, "long.jsonl", 2000000);
    start_trainer(s, &trainer, "run", args("--max-steps 1 --data %s", data));
    for (int i = 0; i < 2000 && !catches(trainer.pid, SIGTERM); i++) usleep(5000);
    const int64_t start = clock_now_ns();
    test_kill(&trainer, SIGTERM);
    wait_for_log(s, "a second one ends it at once");
    test_kill(&trainer, SIGTERM);
    assert_int_equal(test_wait(&trainer, LIMIT_MS), 1);
    assert_true(clock_ms_since(start) < 1000);
    assert_said(s, "second signal: ending at once");
    assert_false(file_exists(test_path(s->folder, "run/metrics.jsonl")));
}

TEST_IN(killed_daemon_ends_the_trainer, scene_open)
{
    struct test_child trainer = {0};
    SCOPED(reference_close) struct reference l;
    start_trainer(s, &trainer, "run", args("--max-steps 100000 --save-steps 2"));
    wait_for_steps(s, "run", 3, &trainer);
    test_kill(&s->daemon.child, SIGKILL);
    int64_t start = clock_now_ns();
    assert_int_equal(test_wait(&trainer, 10000), 1);
    assert_true(clock_ms_since(start) < 2000);
    assert_said(s, "error: ");
    reference_open(latest(s, "run"), "cpu", &l); // whole
    daemon_start(&s->daemon, s->model, NULL);
    assert_train(s, 0, "run", "--max-steps 5 --resume");
    assert_said(s, "resumed at step");
}

TEST_IN(killed_trainer_leaves_the_daemon_serving, scene_open)
{
    struct test_child trainer = {0};
    start_trainer(s, &trainer, "run", args("--max-steps 100000 --save-steps 2"));
    wait_for_steps(s, "run", 3, &trainer);
    test_end(&trainer); // SIGKILL
    // wherever it was hit, the next one takes the lease over and goes on
    assert_train(s, 0, "run", "--max-steps 6 --resume");
    daemon_holds(&s->daemon, "policy", latest(s, "run"));
}

// A writer dies with half an update written: the daemon says torn, and goes back to the trainer's
// last checkpoint by itself.
TEST(torn_weights_are_restored)
{
    struct scene s;
    if (!on_cpu())
        test_skip("it writes weights from a forked process, which a GPU does not allow; "
                  "killed_trainer_in_an_update_is_undone is the same with the real trainer");
    scene_open(&s);
    assert_train(&s, 0, "run", "--max-steps 2");
    daemon_holds(&s.daemon, "policy", latest(&s, "run"));
    tear_roles(&s.daemon, "policy", NULL, NULL);
    int64_t deadline = clock_deadline_ns(20000);
    for (;;) { // 200 with the old version may come first, while the death is not yet noticed
        struct wire_answer a;
        daemon_request(s.daemon.socket, "GET", "/health", "", NULL, &a);
        if (a.status == 200 && metric(a.json, "weight_version") > 6) break;
        if (clock_ms_until(deadline) == 0) fail_msg("not restored: %s", bytes_text(&a.body));
        clock_sleep_ms(2);
    }
    // The restore of so small a model may fall between two looks: the log knows.
    assert_contains(test_read(s.daemon.log), "torn");
    daemon_holds(&s.daemon, "policy", latest(&s, "run"));
    assert_train(&s, 0, "run", "--max-steps 3 --resume");
}

static json_t *greedy_ids(const struct daemon *d)
{
    json_t *answer = daemon_post(d->socket, "/v1/completions", 200,
                                 "{\"prompt\":\"12+15=\",\"max_tokens\":40,\"temperature\":0}");
    const json_t *choice = json_array_get(json_object_get(answer, "choices"), 0);
    json_t *ids = json_object_get(choice, "token_ids");
    assert_int_equal(json_array_size(ids), 40);
    return ids;
}

// The real trainer, killed while AdamW writes: torn, then the last checkpoint again, to the bit,
// and what is generated is what a daemon of that checkpoint generates. The signal may come too
// late, and so small a model may be restored between two looks: up to twenty attempts.
static void kill_in_updates(const char *const server_options[])
{
    struct scene s;
    struct bridge *bridge;
    struct wire_answer metrics;
    char snapshot[512];
    bool torn = false;
    int restored = 0;
    scene_open_large(&s, server_options);
    assert_ok(bridge_attach(s.daemon.bridge, NULL, &bridge));
    const struct control *control = bridge_control(bridge);
    for (int attempt = 0; attempt < 20 && !torn; attempt++) {
        struct test_child trainer = {0};
        int before = steps_done(&s, "run");
        start_trainer(&s, &trainer, "run", args("--max-steps 100000 --save-steps 2 --resume"));
        wait_for_steps(&s, "run", before < 2 ? 2 : before + 1, &trainer);
        if (!kill_in_an_update(&trainer, control)) continue;
        torn = torn_until_restored(&s, control);
        restored++;
    }
    assert_true(restored > 0 && torn);
    control_snapshot(control, snapshot, sizeof snapshot);
    assert_contains(snapshot, "checkpoints/step-");
    daemon_holds(&s.daemon, "policy", snapshot);
    daemon_request(s.daemon.socket, "GET", "/metrics", "", NULL, &metrics);
    const char *restores =
        test_text("commonweight:restores_total{model_name=\"large\"} %d\n", restored);
    assert_contains(bytes_text(&metrics.body), restores);
    assert_contains(bytes_text(&metrics.body), "commonweight:torn{model_name=\"large\"} 0\n");

    json_t *now = greedy_ids(&s.daemon);
    struct daemon fresh = {0};
    daemon_start(&fresh, snapshot, server_options);
    json_t *wanted = greedy_ids(&fresh);
    assert_true(json_equal(now, wanted));
    daemon_kill(&fresh);
    bridge_detach(bridge);
}

TEST(killed_trainer_in_an_update_is_undone)
{
    kill_in_updates(NULL);
}

// Of weights with a twin both copies.
TEST(killed_trainer_in_an_update_of_e4m3_is_undone)
{
    kill_in_updates(args("--quantization fp8-weights"));
}

// Room for the weights, not for the optimizer's state, which the first checkpoint does without.
TEST_IN(full_disk_leaves_the_checkpoint_before, scene_open)
{
    SCOPED(file_map_release) struct file_map model;
    struct rlimit limit;
    assert_ok(file_map_open(test_path(s->model, "model.safetensors"), &model));
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    rlim_t before = limit.rlim_cur;
    limit.rlim_cur = model.len + model.len / 2;
    signal(SIGXFSZ, SIG_IGN); // the trainer inherits both: a write past the limit is an error
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    int status = train(s, "run", args("--max-steps 2 --save-steps 1"));
    limit.rlim_cur = before;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    signal(SIGXFSZ, SIG_DFL);
    assert_int_equal(status, 1);
    assert_said(s, "checkpoint of step 1 (that of step 0 is whole; --resume goes on from it)");
    assert_said(s, "trainer/optimizer.safetensors");
    SCOPED(reference_close) struct reference l;
    reference_open(latest(s, "run"), "cpu", &l);
    assert_train(s, 0, "run", "--max-steps 2 --resume");
    daemon_holds(&s->daemon, "policy", latest(s, "run"));
}

// A disk that is really full, and one that takes no writes: small file systems of the test's own,
// of which a copy is left to look at.
TEST_IN(full_and_read_only_disks, scene_open)
{
    SCOPED(file_map_release) struct file_map model;
    SCOPED(bytes_release) struct bytes script = BYTES_INIT;
    const char *path = test_path(s->folder, "on-disk.sh");
    const char *disk = test_path(s->folder, "disk"), *copy = test_path(s->folder, "copy");
    assert_ok(file_make_folders(disk));
    if (test_command(test_path(s->folder, "try.log"), LIMIT_MS,
                     args("unshare -rm mount -t tmpfs none %s", disk)) != 0)
        test_skip("this machine lets nobody mount a file system of his own (unshare -rm mount)");
    assert_ok(file_map_open(test_path(s->model, "model.safetensors"), &model));
    bytes_printf(&script,
                 "mount -t tmpfs -o size=%zu none %s || exit 99\n"
                 "\"$@\"; status=$?; cp -a %s/run %s || exit 98; exit $status\n",
                 model.len * 5 / 2, disk, disk, copy);
    test_write(path, script.data, script.len);
    const char *const *argv =
        JOIN(args("unshare -rm sh %s", path),
             trainer_command(s, test_path(disk, "run"), args("--max-steps 2 --save-steps 1")));
    assert_exit(1, scene_run(s, argv));
    assert_said(s, "checkpoint of step 1 (that of step 0 is whole; --resume goes on from it)");
    assert_said(s, "checkpoints/.step-1.");
    assert_said(s, "No space left on device");
    assert_contains(test_keep(realpath(test_path(copy, "checkpoints/latest"), NULL)), "/step-0");
    SCOPED(reference_close) struct reference l;
    reference_open(test_path(copy, "checkpoints/latest"), "cpu", &l);

    script.len = 0;
    bytes_printf(&script, "mount -t tmpfs -o ro none %s || exit 99\nexec \"$@\"\n", disk);
    test_write(path, script.data, script.len);
    assert_exit(1, scene_run(s, argv));
    assert_said(s, "disk/run");
    assert_said(s, "Read-only file system");
    assert_train(s, 0, "run", "--max-steps 1"); // and the daemon serves on
}
