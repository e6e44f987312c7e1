/* pair.c: two daemons of one model, and trainers of one rank and of two on them. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/pair.h"

static void link_bridge(const struct pair *p, const char *name, const struct daemon *d)
{
    assert_int_equal(symlink(d->bridge, test_path(p->s.folder, name)), 0);
}

void pair_open_other(struct pair *p, const char *const options[])
{
    if (!on_cpu() && !daemon_has_device("cuda:1")) test_skip("%s", status_message());
    daemon_start(&p->other, p->s.model, JOIN(options, on_cpu() ? NULL : args("--device cuda:1")));
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
    daemon_kill(&p->s.daemon);
}

const char *const *pair_command(const struct pair *p, const char *const one[])
{
    const char *const *words = with_word(one, p->s.daemon.bridge, p->bridges);
    return on_cpu() ? JOIN(mpirun_words(2), words) : JOIN(words, args("--gpus 0,1"));
}

void pair_start(struct pair *p, struct test_child *child, const char *run, const char *const more[])
{
    scene_spawn(&p->s, child,
                pair_command(p, trainer_command(&p->s, test_path(p->s.folder, run), more)));
}

int pair_run(struct pair *p, const char *run, const char *const more[])
{
    struct test_child child = {0};
    pair_start(p, &child, run, more);
    return test_wait(&child, LIMIT_MS);
}

void pair_train(struct pair *p, const char *run, const char *steps)
{
    scene_ended(&p->s, pair_run(p, run, args(PAIR_NUMBERS " --resume --max-steps %s", steps)), 0);
}

// Both servers hold the run's last checkpoint, at one version.
void pair_holds(const struct pair *p, const char *run)
{
    daemon_holds(&p->s.daemon, "policy", latest(&p->s, run));
    daemon_holds(&p->other, "policy", latest(&p->s, run));
    assert_int_equal(daemon_version(&p->s.daemon), daemon_version(&p->other));
}

// The same run on one rank and on two, whose servers have these options (NULL-ended).
void pair_learns_as_one(struct pair *p, const char *model, const char *const server[],
                        const char *const run[])
{
    *p = (struct pair){0};
    scene_open(&p->s);
    daemon_kill(&p->s.daemon);
    if (model) p->s.model = model;
    daemon_start(&p->s.daemon, p->s.model, server);
    pair_open_other(p, server);
    assert_int_equal(train(&p->s, "one", run), 0);
    scene_ended(&p->s, pair_run(p, "two", run), 0);
    same_losses(&p->s, "one", "two", PAIR_STEPS, 1e-5);
}
