/* torn.c: see torn.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/torn.h"
#include "bridge/attach.h"
#include "tests/support/tiny_model.h"
#include "tests/support/tiny_tokenizer.h"

#include <sys/wait.h>

void scene_open_large(struct scene *s, const char *const options[])
{
    const bool cpu = on_cpu();
    const struct tiny_model shape = {.hidden = cpu ? 384 : 1024,
                                     .layers = cpu ? 2 : 6,
                                     .intermediate = cpu ? 1536 : 4096,
                                     .vocab = 300,
                                     .eos_id = -1,
                                     .seed = 17};
    scene_open(s);
    daemon_kill(&s->daemon);
    s->model = test_path(s->folder, "large");
    assert_ok(tiny_model_write_as(s->model, &shape));
    assert_ok(tiny_tokenizer_write(s->model));
    daemon_start(&s->daemon, s->model, options);
}

static void wait_while(struct test_child *trainer, const struct control *control, bool odd)
{
    const int64_t deadline = clock_deadline_ns(LIMIT_MS);
    for (int i = 1; (control_version(control) & 1) == odd; i++) {
        usleep(20); // an update takes longer, and the trainer wants the core
        if (i % 64 != 0) continue;
        if (clock_now_ns() > deadline) fail_msg("no update begins or ends within %d ms", LIMIT_MS);
        if (test_running(trainer)) continue;
        fputs(test_read(trainer->log), stderr);
        fail_msg("the trainer ended with status %d", trainer->exit_status);
    }
}

void wait_for_begin(struct test_child *trainer, const struct control *control)
{
    wait_while(trainer, control, true);
    wait_while(trainer, control, false);
}

void wait_for_update(struct test_child *trainer, const struct control *control)
{
    wait_for_begin(trainer, control);
    wait_while(trainer, control, true);
}

bool kill_in_an_update(struct test_child *trainer, const struct control *control)
{
    wait_for_begin(trainer, control);
    kill(trainer->pid, SIGKILL);
    test_end(trainer);
    return control_version(control) & 1;
}

bool torn_until_restored(const struct scene *s, const struct control *control)
{
    const int64_t deadline = clock_deadline_ns(30000);
    bool torn = false;
    for (;;) {
        struct wire_answer a;
        bool odd = control_version(control) & 1; // before: while it is odd, ok is not the end
        daemon_request(s->daemon.socket, "GET", "/health", "", NULL, &a);
        const char *status = json_string_value(json_object_get(a.json, "status"));
        bool ok = a.status == 200 && !odd;
        if (a.status == 503) {
            assert_string_equal(status, "torn");
            assert_contains(bytes_text(&a.head), "Retry-After");
            torn = true;
        }
        if (ok) return torn;
        if (clock_now_ns() > deadline) fail_msg("%s", "not restored within 30 s");
    }
}

struct tear {
    struct bridge *bridge;
    const char *const *roles;
    const char *snapshot, *moved_to;
};

static enum status scribble_and_die(void *context)
{
    const struct tear *t = context;
    for (int i = 0; t->roles[i]; i++)
        memset(bridge_base(t->bridge, t->roles[i]), 0x4e,
               bridge_file_role(bridge_file_of(t->bridge), t->roles[i])->tensors[0].bytes);
    if (t->moved_to && rename(t->snapshot, t->moved_to) != 0) return ST_IO;
    raise(SIGKILL);
    return ST_OK;
}

void tear_roles(const struct daemon *d, const char *roles, const char *snapshot,
                const char *moved_to)
{
    struct tear t = {.roles = words_of(roles), .snapshot = snapshot, .moved_to = moved_to};
    int status;
    if (!on_cpu()) test_skip("it writes weights from a forked process, which a GPU does not allow");
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        if (bridge_attach_shard(d->bridge, 0, NULL, NULL, NULL, &t.bridge) == ST_OK &&
            bridge_become_writer(t.bridge) == ST_OK &&
            (!snapshot || control_set_snapshot(bridge_control(t.bridge), snapshot) == ST_OK))
            bridge_publish(t.bridge, 10000, scribble_and_die, &t, NULL);
        fprintf(stderr, "%s\n", status_message());
        _exit(1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}
