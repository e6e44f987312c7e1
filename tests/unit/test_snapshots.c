/* test_snapshots.c: which adapter answers for a snapshot, and whether what it gave is of it: when
 * weights change before, while and after it is sampled, and when the server itself rewrites some.
 */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "trainer/serve/snapshots.h"

static struct snapshots *s;

static int start(void **state)
{
    (void)state;
    assert_ok(snapshots_new(2, true, &s));
    assert_ok(snapshots_add(s, LIVE, "a", "tinker:a"));
    assert_ok(snapshots_add(s, LIVE, "b", "tinker:b"));
    snapshots_update(s, "a", 4, false);
    snapshots_update(s, "b", 6, false);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    snapshots_free(s);
    return 0;
}

static struct snapshot of(const char *run, uint64_t version, const char *path)
{
    struct snapshot snapshot = {.version = version};
    snprintf(snapshot.run, sizeof snapshot.run, "%s", run);
    snprintf(snapshot.path, sizeof snapshot.path, "%s", path);
    return snapshot;
}

static struct snapshot_use taken(const struct snapshot *snapshot, const char *adapter)
{
    struct snapshot_use use;
    assert_true(snapshots_use(s, snapshot, &use));
    assert_string_equal(use.adapter, adapter);
    return use;
}

TEST_WITH(test_live, start, stop, NULL)
{
    const struct snapshot a = of("a", 4, ""), b = of("b", 6, ""), model = of("", 2, "");
    const struct snapshot_use use = taken(&a, "tinker:a"), base = taken(&model, "");
    taken(&b, "tinker:b");
    assert_int_equal(snapshots_version(s, "a"), 4);
    assert_int_equal(snapshots_version(s, "c"), 0);
    assert_int_equal(snapshots_base(s), 2);
    snapshots_update(s, "b", 8, false); // another's
    assert_true(snapshots_use(s, &a, NULL));
    assert_true(snapshots_gave(s, &a, &use, 6, 8));
    assert_true(snapshots_gave(s, &model, &base, 4, 8));
    assert_false(snapshots_gave(s, &a, &use, 8, 10)); // no update of this process gave version 10
    assert_false(snapshots_gave(s, &a, &use, 2, 8));  // older than it is itself
    snapshots_update(s, "a", 10, false);
    struct snapshot newer = a;
    assert_false(snapshots_use(s, &a, NULL));
    newer.inflight = true;
    assert_true(snapshots_use(s, &newer, NULL));     // whatever it is by now
    assert_false(snapshots_gave(s, &a, &use, 8, 8)); // nobody knows what came between
    snapshots_remove(s, "tinker:a");
    assert_false(snapshots_gave(s, &a, &use, 8, 8));
    snapshots_end_use(s, &use); // of one that is gone
}

TEST_WITH(test_kept, start, stop, NULL)
{
    const struct snapshot a = of("a", 4, "");
    const struct snapshot_use use = taken(&a, "tinker:a");
    char spare[ADAPTER_ROOM];
    SCOPED(bytes_release) struct bytes words = BYTES_INIT;
    assert_ok(snapshots_add(s, KEPT, "a", "tinker:a@4"));
    snapshots_update(s, "a", 8, false);
    snapshots_update(s, "a", 10, false);
    assert_true(snapshots_gave(s, &a, &use, 6, 6));  // before the update that came next
    assert_false(snapshots_gave(s, &a, &use, 6, 8)); // across it
    const struct snapshot_use copy = taken(&a, "tinker:a@4");
    assert_true(snapshots_gave(s, &a, &copy, 8, 10));
    assert_false(snapshots_spare(s, "a", true, spare)); // it is being sampled
    snapshots_end_use(s, &copy);
    assert_int_equal(snapshots_kept(s, "a", NULL), 1);
    snapshots_kept(s, "a", &words);
    assert_string_equal(bytes_text(&words), "4");
    assert_false(snapshots_spare(s, "b", false, spare));
    assert_true(snapshots_spare(s, "a", false, spare));
    assert_string_equal(spare, "tinker:a@4");
    snapshots_remove(s, spare);
    assert_false(snapshots_use(s, &a, NULL));
}

TEST_WITH(test_saved, start, stop, NULL)
{
    const struct snapshot path = of("", 0, "tinker://a/weights/x"),
                          same = of("a", 4, "tinker://a/weights/x");
    char spare[ADAPTER_ROOM];
    assert_false(snapshots_use(s, &path, NULL));
    taken(&same, "tinker:a"); // as long as the run is at it
    assert_ok(snapshots_add(s, LOADED, path.path, "tinker:saved-1"));
    snapshots_update(s, "a", 8, false);
    const struct snapshot_use use = taken(&same, "tinker:saved-1");
    taken(&path, "tinker:saved-1");
    assert_true(snapshots_gave(s, &same, &use, 8, 8));
    snapshots_forget(s, path.path);
    assert_false(snapshots_use(s, &path, NULL));
    assert_false(snapshots_spare(s, NULL, true, spare)); // two are sampling it
    snapshots_end_use(s, &use);
    snapshots_end_use(s, &use);
    assert_false(snapshots_spare(s, NULL, false, spare));
    assert_true(snapshots_spare(s, NULL, true, spare));
}

// A path is of the weights that were saved as it, until others are.
TEST_WITH(test_paths, start, stop, NULL)
{
    const char *path = "tinker://a/weights/x";
    const struct snapshot weights = of("a", 4, "");
    struct snapshot found, again;
    snapshots_of_path(s, path, &found);
    assert_string_equal(found.path, path);
    assert_int_equal(found.version, 0);
    snapshots_set_path(s, path, &weights, true);
    snapshots_of_path(s, path, &found);
    assert_int_equal(found.saves, 1);
    taken(&found, "tinker:a");
    snapshots_set_path(s, path, &weights, false); // loaded from it
    assert_true(snapshots_use(s, &found, NULL));
    snapshots_set_path(s, path, &weights, true);
    assert_false(snapshots_use(s, &found, NULL));
    snapshots_of_path(s, path, &again);
    assert_int_equal(again.saves, 2);
    assert_true(snapshots_use(s, &again, NULL));
}

// Adapters are of the model beneath them.
TEST_WITH(test_model, start, stop, NULL)
{
    const struct snapshot path = of("", 0, "tinker://a/weights/x"), model = of("", 2, "");
    assert_ok(snapshots_add(s, LOADED, path.path, "tinker:saved-1"));
    const struct snapshot_use use = taken(&path, "tinker:saved-1"), base = taken(&model, "");
    assert_true(snapshots_gave(s, &path, &use, 6, 6));
    snapshots_update(s, "", 8, false);
    assert_int_equal(snapshots_base(s), 0);
    assert_false(snapshots_gave(s, &path, &use, 6, 8));
    assert_false(snapshots_gave(s, &model, &base, 6, 8));
    snapshots_forget(s, NULL);
    assert_false(snapshots_use(s, &path, NULL));
    assert_true(snapshots_use(s, &(struct snapshot){.version = 8}, NULL));
    snapshots_update(s, "", 10, true);
    assert_int_equal(snapshots_base(s), 10);
}

// The frozen model answers for what is of the model's folder, once the live weights are not.
TEST_WITH(test_frozen, start, stop, NULL)
{
    struct snapshot first = of("", 2, ""), later = of("", 0, "");
    first.base = later.base = true;
    assert_false(snapshots_use(s, &later, NULL));
    assert_ok(snapshots_add(s, FROZEN, "", "frozen"));
    assert_false(taken(&later, "frozen").live);
    const struct snapshot_use live = taken(&first, "");
    snapshots_update(s, "", 8, false);
    assert_false(snapshots_gave(s, &first, &live, 2, 8));
    const struct snapshot_use use = taken(&first, "frozen");
    assert_true(snapshots_gave(s, &first, &use, 2, 8)); // whatever was written meanwhile
    taken(&first, "frozen");                            // rather than newer weights
    char spare[ADAPTER_ROOM];
    snapshots_end_use(s, &use);
    assert_false(snapshots_spare(s, NULL, true, spare));
    first.base = false;
    assert_false(snapshots_use(s, &first, NULL));
}

TEST_WITH(test_runs, start, stop, NULL)
{
    char run[RUN_NAME_ROOM];
    assert_false(snapshots_abandoned(s, NULL, run));
    snapshots_abandon(s, "b", true);
    snapshots_abandon(s, "nobody", true);
    assert_true(snapshots_abandoned(s, NULL, run));
    assert_string_equal(run, "b");
    assert_false(snapshots_abandoned(s, "b", run));
    snapshots_abandon(s, "b", false);
    assert_false(snapshots_abandoned(s, NULL, run));
    snapshots_set_restore(s, "a", "/runs/a/start");
    assert_true(snapshots_need(s, "/runs/a/start"));
    snapshots_remove(s, "tinker:a");
    assert_false(snapshots_need(s, "/runs/a/start"));
}
