/* pair.c: two daemons of one model, and trainers of one rank and of two on them. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/pair.h"

bool on_cpu(void)
{
    return strcmp(test_device(), "cpu") == 0;
}

static void link_bridge(const struct pair *p, const char *name, const struct daemon *d)
{
    assert_int_equal(symlink(d->bridge, test_path(p->s.folder, name)), 0);
}

void pair_open_other(struct pair *p, const char *const options[])
{
    const char *more[8] = {0};
    int n = 0;
    struct device *dev;
    if (!on_cpu() && device_open("cuda:1", &dev) != ST_OK) test_skip("%s", status_message());
    if (!on_cpu()) device_free(dev);
    for (; options && options[n]; n++) more[n] = options[n];
    if (!on_cpu()) memcpy(more + n, OPTIONS("--device", "cuda:1"), 2 * sizeof *more);
    daemon_start(&p->other, p->s.model, more);
    link_bridge(p, "rank-0.json", &p->s.daemon);
    link_bridge(p, "rank-1.json", &p->other);
    p->bridges = test_path(p->s.folder, "rank-{rank}.json");
}

void pair_open(struct pair *p)
{
    *p = (struct pair){0};
    scene_open(&p->s);
    pair_open_other(p, NULL);
}

void pair_close(struct pair *p)
{
    daemon_kill(&p->other);
    scene_close(&p->s);
}

void pair_command(const struct pair *p, const char *const one[], const char *ret[PAIR_WORDS])
{
    int n = on_cpu() ? mpirun_put(2, ret) : 0;
    for (; *one; one++) ret[n++] = strcmp(*one, p->s.daemon.bridge) == 0 ? p->bridges : *one;
    ret[n] = NULL;
    if (!on_cpu()) memcpy(ret + n, OPTIONS("--gpus", "0,1"), 3 * sizeof *ret);
}

void pair_start(struct pair *p, struct test_child *child, const char *run, const char *const more[])
{
    const char *one[TRAINER_WORDS], *argv[PAIR_WORDS];
    trainer_command(&p->s, test_path(p->s.folder, run), more, one);
    pair_command(p, one, argv);
    test_spawn(child, test_path(p->s.folder, "trainer.log"), argv);
}

void pair_train(struct pair *p, const char *run, const char *steps)
{
    struct test_child child = {0};
    pair_start(p, &child, run, OPTIONS(PAIR_NUMBERS, "--resume", "--max-steps", steps));
    if (test_wait(&child, LIMIT_MS) != 0) fail_msg("%s", test_read(child.log));
}

static json_int_t served_version(const struct daemon *d)
{
    json_t *health = daemon_get(d->socket, "/health", 200);
    json_int_t version = json_integer_value(json_object_get(health, "weight_version"));
    return version;
}

// Both servers hold the run's last checkpoint, at one version.
void pair_holds(const struct pair *p, const char *run)
{
    daemon_holds(&p->s.daemon, "policy", latest(&p->s, run));
    daemon_holds(&p->other, "policy", latest(&p->s, run));
    assert_int_equal(served_version(&p->s.daemon), served_version(&p->other));
}

// The same run on one rank and on two, whose servers have these options (NULL-ended).
void pair_learns_as_one(struct pair *p, const char *model, const char *const server[],
                        const char *const run[])
{
    struct test_child child = {0};
    *p = (struct pair){0};
    scene_open(&p->s);
    daemon_kill(&p->s.daemon);
    if (model) p->s.model = model;
    daemon_start(&p->s.daemon, p->s.model, server);
    pair_open_other(p, server);
    assert_int_equal(train(&p->s, "one", run), 0);
    pair_start(p, &child, "two", run);
    if (test_wait(&child, LIMIT_MS) != 0) fail_msg("%s", test_read(child.log));
    same_losses(&p->s, "one", "two", PAIR_STEPS, 1e-5);
}
