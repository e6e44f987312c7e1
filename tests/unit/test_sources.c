/* test_sources.c: which adapter answers for a snapshot, and whether what it gave is of it: when
 * weights change before, while and after it is sampled, and when the server itself rewrites some.
 */
#include "tests/support/support.h"
#include "trainer/serve/sources.h"

#include <stdio.h>
#include <string.h>

static struct sources *s;

static int start(void **state)
{
    (void)state;
    assert_ok(sources_new(2, true, &s));
    assert_ok(sources_add_run(s, "a", "tinker:a"));
    assert_ok(sources_add_run(s, "b", "tinker:b"));
    sources_update(s, "a", 4, false);
    sources_update(s, "b", 6, false);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    sources_free(s);
    return 0;
}

static struct snapshot of(const char *run, uint64_t version, const char *path)
{
    struct snapshot snapshot = {.version = version};
    snprintf(snapshot.run, sizeof snapshot.run, "%s", run);
    snprintf(snapshot.path, sizeof snapshot.path, "%s", path);
    return snapshot;
}

static struct source_use taken(const struct snapshot *snapshot, const char *adapter)
{
    struct source_use use;
    assert_true(sources_take(s, snapshot, false, &use));
    assert_string_equal(use.adapter, adapter);
    return use;
}

static void test_live(void **state)
{
    (void)state;
    const struct snapshot a = of("a", 4, ""), b = of("b", 6, ""), model = of("", 2, "");
    const struct source_use use = taken(&a, "tinker:a"), base = taken(&model, "");
    taken(&b, "tinker:b");
    assert_int_equal(sources_version(s, "a"), 4);
    assert_int_equal(sources_version(s, "c"), 0);
    assert_int_equal(sources_base(s), 2);
    sources_update(s, "b", 8, false); // another's
    assert_true(sources_has(s, &a, false));
    assert_true(sources_gave(s, &a, &use, 6, 8));
    assert_true(sources_gave(s, &model, &base, 4, 8));
    assert_false(sources_gave(s, &a, &use, 8, 10)); // no update of this process gave version 10
    assert_false(sources_gave(s, &a, &use, 2, 8));  // older than it is itself
    sources_update(s, "a", 10, false);
    assert_false(sources_has(s, &a, false));
    assert_true(sources_has(s, &a, true));         // whatever it is by now
    assert_false(sources_gave(s, &a, &use, 8, 8)); // nobody knows what came between
    sources_remove(s, "tinker:a");
    assert_false(sources_gave(s, &a, &use, 8, 8));
    sources_give(s, &use); // of one that is gone
}

static void test_kept(void **state)
{
    (void)state;
    const struct snapshot a = of("a", 4, "");
    const struct source_use use = taken(&a, "tinker:a");
    char spare[SOURCE_ROOM];
    struct bytes words = BYTES_INIT;
    assert_ok(sources_add_kept(s, "a", "tinker:a@4"));
    sources_update(s, "a", 8, false);
    sources_update(s, "a", 10, false);
    assert_true(sources_gave(s, &a, &use, 6, 6));  // before the update that came next
    assert_false(sources_gave(s, &a, &use, 6, 8)); // across it
    const struct source_use copy = taken(&a, "tinker:a@4");
    assert_true(sources_gave(s, &a, &copy, 8, 10));
    assert_false(sources_spare(s, "a", true, spare)); // it is being sampled
    sources_give(s, &copy);
    assert_int_equal(sources_count_kept(s, "a"), 1);
    sources_kept(s, "a", &words);
    assert_string_equal(bytes_text(&words), "4");
    bytes_release(&words);
    assert_false(sources_spare(s, "b", false, spare));
    assert_true(sources_spare(s, "a", false, spare));
    assert_string_equal(spare, "tinker:a@4");
    sources_remove(s, spare);
    assert_false(sources_has(s, &a, false));
}

static void test_saved(void **state)
{
    (void)state;
    const struct snapshot path = of("", 0, "tinker://a/weights/x"),
                          same = of("a", 4, "tinker://a/weights/x");
    char spare[SOURCE_ROOM];
    assert_false(sources_has(s, &path, false));
    taken(&same, "tinker:a"); // as long as the run is at it
    assert_ok(sources_add_saved(s, path.path, "tinker:saved-1"));
    sources_update(s, "a", 8, false);
    const struct source_use use = taken(&same, "tinker:saved-1");
    taken(&path, "tinker:saved-1");
    assert_true(sources_gave(s, &same, &use, 8, 8));
    sources_forget(s, path.path);
    assert_false(sources_has(s, &path, false));
    assert_false(sources_spare(s, NULL, true, spare)); // two are sampling it
    sources_give(s, &use);
    sources_give(s, &use);
    assert_false(sources_spare(s, NULL, false, spare));
    assert_true(sources_spare(s, NULL, true, spare));
}

// Adapters are of the model beneath them.
static void test_model(void **state)
{
    (void)state;
    const struct snapshot path = of("", 0, "tinker://a/weights/x"), model = of("", 2, "");
    assert_ok(sources_add_saved(s, path.path, "tinker:saved-1"));
    const struct source_use use = taken(&path, "tinker:saved-1"), base = taken(&model, "");
    assert_true(sources_gave(s, &path, &use, 6, 6));
    sources_update(s, "", 8, false);
    assert_int_equal(sources_base(s), 0);
    assert_false(sources_gave(s, &path, &use, 6, 8));
    assert_false(sources_gave(s, &model, &base, 6, 8));
    sources_forget(s, NULL);
    assert_false(sources_has(s, &path, false));
    assert_true(sources_has(s, &(struct snapshot){.version = 8}, false));
    sources_update(s, "", 10, true);
    assert_int_equal(sources_base(s), 10);
}

// The frozen model answers for what is of the model's folder, once the live weights are not.
static void test_frozen(void **state)
{
    (void)state;
    struct snapshot first = of("", 2, ""), later = of("", 0, "");
    first.base = later.base = true;
    assert_false(sources_has(s, &later, false));
    assert_ok(sources_add_frozen(s, "frozen"));
    assert_false(taken(&later, "frozen").live);
    const struct source_use live = taken(&first, "");
    sources_update(s, "", 8, false);
    assert_false(sources_gave(s, &first, &live, 2, 8));
    const struct source_use use = taken(&first, "frozen");
    assert_true(sources_gave(s, &first, &use, 2, 8)); // whatever was written meanwhile
    taken(&first, "frozen");                          // rather than newer weights
    char spare[SOURCE_ROOM];
    sources_give(s, &use);
    assert_false(sources_spare(s, NULL, true, spare));
    first.base = false;
    assert_false(sources_has(s, &first, false));
}

static void test_runs(void **state)
{
    (void)state;
    char run[RUN_NAME_ROOM];
    assert_false(sources_abandoned(s, run));
    sources_abandon(s, "b", true);
    sources_abandon(s, "nobody", true);
    assert_true(sources_abandoned(s, run));
    assert_string_equal(run, "b");
    sources_abandon(s, "b", false);
    assert_false(sources_abandoned(s, run));
    sources_set_restore(s, "a", "/runs/a/start");
    assert_true(sources_needs(s, "/runs/a/start"));
    sources_remove(s, "tinker:a");
    assert_false(sources_needs(s, "/runs/a/start"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_live, start, stop),
        cmocka_unit_test_setup_teardown(test_kept, start, stop),
        cmocka_unit_test_setup_teardown(test_saved, start, stop),
        cmocka_unit_test_setup_teardown(test_model, start, stop),
        cmocka_unit_test_setup_teardown(test_frozen, start, stop),
        cmocka_unit_test_setup_teardown(test_runs, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
