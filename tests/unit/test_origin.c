/* test_origin.c: what the control page says the weights are, through loads, runs, restores and
 * writers that say nothing. The test is owner and writer; a thread is the engine that grants. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/control.h"
#include "bridge/control_page.h"
#include "tests/support/support.h"

#include <pthread.h>

#define HASH "0123456789abcdef"

struct scene {
    struct control *owner, *writer;
    pthread_t engine;
    _Atomic bool stop;
    _Atomic unsigned grants; // that came to their end
};

static void *engine(void *context)
{
    struct scene *s = context;
    while (!s->stop) {
        uint32_t seen = control_doorbell(s->owner);
        if (control_quiesce_requested(s->owner)) {
            control_grant_quiesce(s->owner);
            s->grants++;
        }
        control_wait(s->owner, seen, 5);
    }
    return NULL;
}

static void scene_close(void *scene)
{
    struct scene *s = scene;
    s->stop = true;
    pthread_join(s->engine, NULL);
    control_free(s->writer);
    control_end(s->owner);
    control_free(s->owner);
}

// Of weights that are the root folder's; closed with the test.
static struct scene *scene(void)
{
    struct scene *s = test_keep(calloc(1, sizeof *s));
    char name[64];
    snprintf(name, sizeof name, "/commonweight-test-origin-%d", (int)getpid());
    assert_ok(control_create(name, HASH, &s->owner));
    control_owner_loaded(s->owner, "policy", "/", true);
    control_owner_update_end(s->owner);
    assert_ok(control_open(name, HASH, &s->writer));
    assert_int_equal(pthread_create(&s->engine, NULL, engine, s), 0);
    return test_later(s, scene_close);
}

// An update, of a folder's weights or (NULL) a step of training. The engine has seen its end: the
// owner's own updates are of one thread with its grants.
static void update(struct scene *s, const char *folder)
{
    const unsigned before = s->grants;
    assert_ok(control_quiesce(s->writer, clock_deadline_ns(10000)));
    assert_ok(control_write_begin(s->writer));
    if (folder) control_set_origin(s->writer, folder);
    assert_ok(control_write_end(s->writer));
    control_resume(s->writer);
    while (s->grants == before) clock_sleep_ms(1);
}

static struct control_info info_of(const struct scene *s)
{
    struct control_info ret;
    control_info(s->owner, &ret);
    return ret;
}

static void assert_is(const struct scene *s, const char *words)
{
    const struct control_info f = info_of(s);
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    control_origin_words(&f, &text);
    const char *said = strchr(bytes_text(&text), ',');
    assert_non_null(said);
    assert_string_equal(said + 2, words);
}

TEST(what_becomes_of_weights)
{
    struct scene *s = scene();
    struct control_info f;
    assert_is(s, "those of /");
    assert_false(control_as_left(s->writer)); // no lease yet
    assert_ok(control_lease_take(s->writer));
    assert_true(control_as_left(s->writer));
    update(s, NULL);
    assert_is(s, "1 update since / by a writer without a run folder");
    control_set_run(s->writer, "/runs/one");
    update(s, NULL);
    update(s, NULL);
    assert_is(s, "3 updates since /, the last 2 of them by the run /runs/one");
    update(s, "/tmp/../tmp");
    assert_is(s, "those of /tmp");
    update(s, NULL);
    assert_is(s, "1 update since /tmp by the run /runs/one");
    control_lease_release(s->writer);

    assert_ok(control_lease_take(s->writer));
    update(s, NULL); // the same run goes on
    assert_is(s, "2 updates since /tmp by the run /runs/one");
    atomic_fetch_add(&s->owner->page->publishes, 1); // a writer of another make
    assert_is(s, "3 updates since /tmp, the last 1 of them by a writer without a run folder");
    update(s, NULL);
    assert_is(s, "4 updates since /tmp, the last 1 of them by the run /runs/one");

    // in the middle of an update nothing is claimed
    assert_ok(control_quiesce(s->writer, clock_deadline_ns(10000)));
    assert_ok(control_write_begin(s->writer));
    control_info(s->owner, &f);
    assert_true(f.updates == 0 && !f.origin[0] && !f.run[0]);
    assert_false(control_as_left(s->writer));
    assert_ok(control_write_end(s->writer));
    control_resume(s->writer);
    assert_true(control_as_left(s->writer));
    control_lease_release(s->writer);

    control_owner_update_begin(s->owner); // restored
    control_owner_loaded(s->owner, "policy", "/usr", false);
    control_owner_update_end(s->owner);
    assert_is(s, "those of /usr");
    assert_string_equal(info_of(s).loaded, "/");
    assert_false(control_as_left(s->writer));
    control_owner_update_begin(s->owner); // reloaded
    control_owner_loaded(s->owner, "policy", "(random weights)", true);
    control_owner_update_end(s->owner);
    assert_string_equal(info_of(s).loaded, "(random weights)");
}

static void role_is(const struct scene *s, const char *role, const char *origin, int updates,
                    const char *run)
{
    struct control_info f;
    assert_true(control_info_of(s->writer, role, &f));
    assert_string_equal(f.origin, origin);
    assert_int_equal(f.updates, updates);
    assert_string_equal(f.run, run);
}

// An update is of one role, and leaves what the others are.
TEST(each_role_has_an_account)
{
    struct scene *s = scene();
    struct control_info f;
    control_owner_loaded(s->owner, "adapter:a", "", false);
    control_owner_loaded(s->owner, "adapter:b", "/usr", false);
    assert_ok(control_lease_take(s->writer));
    control_set_run(s->writer, "/runs/full");
    update(s, NULL);
    control_set_run(s->writer, "/runs/lora");
    control_set_role(s->writer, "adapter:a");
    update(s, NULL);
    update(s, NULL);
    role_is(s, "policy", "/", 1, "/runs/full");
    role_is(s, "adapter:a", "", 2, "/runs/lora");
    role_is(s, "adapter:b", "/usr", 0, "");
    assert_is(s, "1 update since / by the run /runs/full");
    assert_int_equal(info_of(s).publishes, 3);
    atomic_fetch_add(&s->owner->page->publishes, 1); // who does not say what it wrote
    role_is(s, "policy", "/", 2, "");
    update(s, "/tmp");
    role_is(s, "policy", "/", 2, "");
    role_is(s, "adapter:a", "/tmp", 0, "");
    control_owner_removed(s->owner, "adapter:a");
    assert_false(control_info_of(s->writer, "adapter:a", &f));
    role_is(s, "adapter:b", "/usr", 0, "");
    control_owner_loaded(s->owner, "adapter:c", "/usr", false); // in its place
    role_is(s, "adapter:c", "/usr", 0, "");
    update(s, NULL); // of a role that is gone: it might be anything, so it is the model's
    role_is(s, "policy", "/", 3, "/runs/lora");
}

// Later updates of other roles, and those that change nothing, leave the policy's version.
TEST(policy_version_is_of_its_last_change)
{
    struct scene *s = scene();
    struct control_info f;
    control_owner_loaded(s->owner, "adapter:a", "", false);
    assert_int_equal(info_of(s).policy_version, 2);
    assert_ok(control_lease_take(s->writer));
    update(s, NULL);
    assert_int_equal(info_of(s).policy_version, 4);
    control_set_role(s->writer, "adapter:a");
    update(s, NULL);
    update(s, "/tmp");
    control_info(s->owner, &f);
    assert_int_equal(f.policy_version, 4);
    assert_int_equal(f.version, 8);
    assert_true(control_info_of(s->owner, "adapter:a", &f));
    assert_int_equal(f.policy_version, 4);
    atomic_fetch_add(&s->owner->page->publishes, 1); // who does not say what it wrote
    assert_int_equal(info_of(s).policy_version, 8);
    update(s, NULL);
    assert_int_equal(info_of(s).policy_version, 10);
    control_owner_update_begin(s->owner); // an adapter is replaced
    control_owner_loaded(s->owner, "adapter:a", "/usr", false);
    control_owner_update_end(s->owner);
    assert_int_equal(info_of(s).policy_version, 10);
    control_owner_update_begin(s->owner); // restored
    control_owner_loaded(s->owner, "policy", "/usr", false);
    control_owner_update_end(s->owner);
    control_info(s->owner, &f);
    assert_true(f.policy_version == 14 && f.version == 14);
}

static void *reuse_slot(void *context)
{
    struct scene *s = context;
    for (int i = 0; i < 20000; i++) {
        control_owner_loaded(s->owner, i % 2 ? "adapter:a" : "adapter:b", i % 2 ? "/usr" : "/tmp",
                             false);
        control_owner_removed(s->owner, i % 2 ? "adapter:a" : "adapter:b");
    }
    atomic_store(&s->stop, true);
    return NULL;
}

// What is read of an adapter while its slot goes to another is never the other's->
TEST(a_slot_that_is_given_on)
{
    struct scene *s = scene();
    struct control_info f;
    pthread_t owner;
    assert_int_equal(pthread_create(&owner, NULL, reuse_slot, s), 0);
    while (!s->stop)
        if (control_info_of(s->writer, "adapter:a", &f)) assert_string_equal(f.origin, "/usr");
    pthread_join(owner, NULL);
}
