/* test_tinker_lora.c: adapters in cw-trainer serve, by a client of the Tinker API without Python:
 * to the bits of cw-trainer's own learner and of a run alone, beside the base; snapshots that are
 * kept, saved and dropped; what there is no room for; checkpoints, and each process's death. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_client.h"
#include "tests/support/torn.h"

static const char *model; // its folder

static void start(const char *adapters, const char *const more[])
{
    model = daemon_model(test_folder(), true, 5);
    tinker_pair_start(model,
                      args("--exact --dtype %s --max-adapters %s --max-lora-rank 8",
                           daemon_exact_dtype(), adapters),
                      more);
    session = tinker_session();
}

#define LORA "\"rank\":4,\"seed\":9"

static struct tinker_run lora_run(const char *of, int number)
{
    return tinker_begun(tinker_create(of, number, 200, LORA));
}

// ---- sampling -----------------------------------------------------------------------------------

static json_t *ask(int seq_id, const char *sampler, int status)
{
    return tinker_sample(sampler, seq_id, status, 4, "");
}

static struct tinker_sampled sample(const char *sampler)
{
    static int seq_id;
    const struct tinker_sampled got = tinker_sampled(ask(++seq_id, sampler, 200));
    assert_int_equal(got.n, 4);
    return got;
}

static void same(const char *sampler, const struct tinker_sampled *want)
{
    const struct tinker_sampled got = sample(sampler);
    tinker_same_sample(&got, want);
}

static void differs(const char *sampler, const struct tinker_sampled *from)
{
    assert_memory_not_equal(sample(sampler).logprobs, from->logprobs, 4 * sizeof(float));
}

// Where a sampled token and its log-probability are to be the trainer's.
static bool is_exact(void)
{
    return on_cpu() || strcmp(daemon_exact_dtype(), "bf16") == 0;
}

// ---- the tests ----------------------------------------------------------------------------------

// What is sampled from an adapter is what it learns by, to the bit, at every version; the base
// stays what it is, and samples of it are beside those of the adapter.
TINKER_TEST(test_training)
{
    const char *base, *live;
    float learnt[TINKER_N];
    start("3", NULL);
    base = tinker_sampler_of("base_model", "model");
    const struct tinker_sampled untrained = sample(base);
    struct tinker_run r = lora_run(session, 0);
    json_t *info = tinker_post("get_info", 200, "{\"model_id\":\"%s\"}", r.id);
    assert_int_equal(int_of(info, "lora_rank"), 4);
    live = tinker_run_snapshot(&r, "");
    same(live, &untrained); // B is zero
    for (int i = 0; i < 3; i++) {
        tinker_run_learn(&r, &tinker_one, NULL);
        assert_true(tinker_run_step(&r, 1e-2) > 0);
        live = tinker_run_snapshot(&r, "");
        const struct tinker_sampled got = sample(live);
        assert_memory_not_equal(got.logprobs, untrained.logprobs, 4 * sizeof(float));
        int32_t input[TINKER_N] = {10, 20, 30, got.tokens[0], got.tokens[1], got.tokens[2]};
        int64_t wanted[TINKER_N] = {20,           30, got.tokens[0], got.tokens[1], got.tokens[2],
                                    got.tokens[3]};
        const struct tinker_datum datum = {
            TINKER_N, input, wanted, {"weights"}, {tinker_one.inputs[0]}};
        tinker_run_score(&r, &datum, learnt);
        if (is_exact()) assert_memory_equal(learnt + 2, got.logprobs, 4 * sizeof(float));
    }
    same(base, &untrained);
    daemon_holds(&pair.daemon, "policy", model);
}

// Two runs in turns, and one alone: the same bits.
TINKER_TEST(test_side_by_side)
{
    float left[TINKER_N], right[TINKER_N], alone[TINKER_N], second[TINKER_N];
    const char *of_left, *of_right;
    if (strcmp(daemon_exact_dtype(), "f32") != 0)
        test_skip("sums in another order, on this device");
    start("4", args("--exact"));
    struct tinker_run a = lora_run(session, 0), b = lora_run(session, 1);
    for (int i = 0; i < 3; i++) {
        tinker_run_learn(&a, &tinker_one, NULL);
        tinker_run_learn(&b, &tinker_other, NULL);
        tinker_run_learn(&a, &tinker_other, NULL);
        tinker_run_step(&b, 1e-2);
        tinker_run_step(&a, 2e-2);
    }
    tinker_run_score(&a, &tinker_one, left);
    tinker_run_score(&b, &tinker_one, right);
    of_left = tinker_run_snapshot(&a, "");
    of_right = tinker_run_snapshot(&b, "");
    const struct tinker_sampled then_sampled = sample(of_left);
    struct tinker_run c = lora_run(session, 2);
    for (int i = 0; i < 3; i++) {
        tinker_run_learn(&c, &tinker_one, NULL);
        tinker_run_learn(&c, &tinker_other, NULL);
        tinker_run_step(&c, 2e-2);
    }
    tinker_run_score(&c, &tinker_one, alone);
    assert_memory_equal(alone, left, sizeof left);
    assert_memory_not_equal(alone, right, sizeof right);
    same(of_left, &then_sampled); // the other's updates moved the version on, and left it alone
    sample(of_right);
    struct tinker_run e = lora_run(session, 3);
    for (int i = 0; i < 3; i++) {
        tinker_run_update(&e, &tinker_other);
    }
    tinker_run_score(&e, &tinker_one, second);
    assert_memory_equal(second, right, sizeof right);
}

// Parts of the model; and seeds, which draw A.
TINKER_TEST(test_parts)
{
    enum { PARTS = 6 };
    float ends[PARTS][TINKER_N];
    static const struct {
        const char *lora, *has, *has_not; // of the folder's target_modules
    } parts[PARTS] = {
        {LORA, "lm_head", "all-linear"},
        {LORA ",\"train_unembed\":false", "all-linear", "lm_head"},
        {LORA ",\"train_mlp\":false", "self_attn.q_proj", "mlp"},
        {LORA ",\"train_attn\":false", "mlp.down_proj", "self_attn"},
        {LORA ",\"train_attn\":false,\"train_mlp\":false", "lm_head", "proj"},
        {"\"rank\":4,\"seed\":10", "mlp.down_proj", "all-linear"},
    };
    start("6", NULL);
    for (int i = 0; i < PARTS; i++) {
        struct tinker_run r = tinker_begun(tinker_create(session, i, 200, parts[i].lora));
        tinker_run_update(&r, &tinker_one);
        tinker_run_score(&r, &tinker_one, ends[i]);
        tinker_run_save(&r, "save_weights_for_sampler", "x");
        const char *config =
            test_text("%s/%s/sampler_weights/x/adapter_config.json", pair.server.runs, r.id);
        char *text = test_read(config);
        assert_contains(text, parts[i].has);
        assert_null(strstr(text, parts[i].has_not));
        for (int k = 0; k < i; k++) assert_memory_not_equal(ends[i], ends[k], sizeof ends[i]);
    }
}

// Older snapshots stay as copies, as many as are asked for, those that are in use before others;
// saved ones are loaded when they are sampled.
TINKER_TEST(test_snapshots)
{
    const char *reference, *old, *path, *of_path, *live;
    start("5", args("--keep-snapshots 2"));
    struct tinker_run r = lora_run(session, 0);
    tinker_run_update(&r, &tinker_one);
    reference = tinker_run_snapshot(&r, "");
    const struct tinker_sampled first = sample(reference);
    tinker_run_update(&r, &tinker_one);
    same(reference, &first);
    old = tinker_run_snapshot(&r, "");
    const struct tinker_sampled second = sample(old);
    path = tinker_run_save(&r, "save_weights_for_sampler", "second");
    of_path = tinker_sampler_of("model_path", path);
    same(of_path, &second);
    for (int i = 0; i < 3; i++) {
        tinker_run_update(&r, &tinker_one);
        live = tinker_run_snapshot(&r, "");
        sample(live);
        same(reference, &first);
    }
    tinker_refused(ask(1, old, 400), "older ones that are kept are ");
    same(of_path, &second);
    differs(live, &first);
    path = tinker_run_save(&r, "save_weights_for_sampler", "second"); // in its place
    const struct tinker_sampled now = sample(live);
    tinker_run_update(&r, &tinker_one);
    tinker_refused(ask(2, of_path, 400), "was saved again");
    of_path = tinker_sampler_of("model_path", path);
    same(of_path, &now);
}

// A run that takes a snapshot at every step leaves another's reference where it is.
TINKER_TEST(test_kept_beside)
{
    const char *reference, *live;
    start("3", NULL);
    struct tinker_run a = lora_run(session, 0), b = lora_run(session, 1);
    tinker_run_update(&a, &tinker_one);
    reference = tinker_run_snapshot(&a, "");
    const struct tinker_sampled first = sample(reference);
    tinker_run_update(&a, &tinker_one);
    for (int i = 0; i < 3; i++) {
        tinker_run_update(&b, &tinker_other);
        live = tinker_run_snapshot(&b, "");
        sample(live);
    }
    same(reference, &first);
    char *log = test_read(pair.server.log);
    char *said = strstr(log, "is not kept");
    assert_true(said && !strstr(said + 1, "is not kept")); // once
    struct tinker_run c = lora_run(session, 2); // but a new run comes before any snapshot
    tinker_refused(ask(1, reference, 400), "--max-adapters");
    tinker_run_step(&c, 0);
}

TINKER_TEST(test_none_kept)
{
    const char *old;
    start("2", args("--keep-snapshots 0"));
    struct tinker_run r = lora_run(session, 0);
    old = tinker_run_snapshot(&r, "");
    sample(old);
    tinker_run_update(&r, &tinker_one);
    tinker_refused(ask(1, old, 400), "--keep-snapshots");
}

// As many adapters as the server holds; a client that has ended leaves its place. Full fine-tuning
// goes with none.
TINKER_TEST(test_room)
{
    const char *second, *third, *base, *live;
    start("2", NULL);
    base = tinker_sampler_of("base_model", "model");
    const struct tinker_sampled untrained = sample(base);
    second = tinker_session();
    third = tinker_session();
    struct tinker_run a = lora_run(session, 0), b = lora_run(second, 0);
    tinker_refused(tinker_retrieve(tinker_create(third, 0, 200, LORA)), "a larger --max-adapters");
    tinker_refused(tinker_create(third, 1, 409, "\"rank\":0"), "no adapter beside it");
    tinker_finish(second);
    struct tinker_run c = lora_run(third, 2);
    tinker_refused(tinker_retrieve(tinker_learn(b.id, 1, "cross_entropy", true, &tinker_one, 1)),
                   "has the weights no more");
    assert_contains(test_read(pair.server.log), "ends after 0 steps: its client has finished");
    tinker_run_update(&c, &tinker_one);
    tinker_finish(session);
    struct tinker_run whole = tinker_begun(tinker_create(third, 3, 200, "\"rank\":0"));
    tinker_refused(tinker_retrieve(tinker_learn(c.id, 3, "cross_entropy", true, &tinker_one, 1)),
                   "has the weights no more");
    same(base, &untrained);
    tinker_run_update(&whole, &tinker_one);
    live = tinker_run_snapshot(&whole, "");
    differs(live, &untrained);
    tinker_refused(ask(1, base, 400), "is the snapshot of weight version");
    a = lora_run(third, 4); // on the model as its folder has it
    daemon_holds(&pair.daemon, "policy", model);
    tinker_run_update(&a, &tinker_one);
}

// A client that has fallen silent leaves its places to any other, for a saved adapter too.
TINKER_TEST(test_a_silent_client)
{
    const char *other, *path, *sampler;
    start("2", NULL);
    other = tinker_session();
    struct tinker_run a = lora_run(session, 0);
    lora_run(other, 0);
    tinker_run_update(&a, &tinker_one);
    path = tinker_run_save(&a, "save_weights_for_sampler", "kept");
    tinker_run_update(&a, &tinker_one);
    clock_sleep_ms(37000); // more than three heartbeats
    session = tinker_session();
    sampler = tinker_sampler_of("model_path", path);
    sample(sampler);
    assert_contains(test_read(pair.server.log), "its client is gone, and another wants its place");
}

TINKER_TEST(test_refused)
{
    start("2", NULL);
    tinker_refused(tinker_create(session, 0, 400,
                                 LORA ",\"train_mlp\":false,\"train_attn\":false,"
                                      "\"train_unembed\":false"),
                   "nothing is left to train");
    tinker_refused(tinker_retrieve(tinker_create(session, 0, 200, "\"rank\":9")),
                   "--max-lora-rank 9");
    struct tinker_run whole = tinker_begun(tinker_create(session, 1, 200, "\"rank\":0"));
    const char *path;
    path = tinker_run_save(&whole, "save_weights", "whole");
    struct tinker_run r = lora_run(session, 2);
    tinker_refused(tinker_retrieve(tinker_post("load_weights", 200,
                                               "{\"model_id\":\"%s\",\"seq_id\":1,\"path\":\"%s\","
                                               "\"optimizer\":false}",
                                               r.id, path)),
                   "trains an adapter");
}

// ---- checkpoints and deaths ---------------------------------------------------------------------

// What save_weights has acknowledged outlives a kill -9, and goes on from there to the same bits,
// in a new run and in one that is there; what the dead process left on the server makes room.
TINKER_TEST(test_checkpoints)
{
    float saved[TINKER_N], then[TINKER_N], again[TINKER_N];
    const char *path, *live;
    start("2", args("--exact"));
    struct tinker_run r = lora_run(session, 0);
    tinker_run_update(&r, &tinker_one);
    path = tinker_run_save(&r, "save_weights", "first");
    live = tinker_run_snapshot(&r, "");
    const struct tinker_sampled then_sampled = sample(live);
    tinker_run_score(&r, &tinker_one, saved);
    tinker_run_update(&r, &tinker_one);
    tinker_run_score(&r, &tinker_one, then);
    tinker_pair_kill(args("--exact"));
    session = tinker_session();
    live = tinker_sampler_of("model_path", path); // with no run at all
    same(live, &then_sampled);
    struct tinker_run on = tinker_load(0, path);
    tinker_run_score(&on, &tinker_one, again);
    assert_memory_equal(again, saved, sizeof saved);
    tinker_run_update(&on, &tinker_one); // by the moments that were saved
    tinker_run_score(&on, &tinker_one, again);
    assert_memory_equal(again, then, sizeof then);
    tinker_run_save(&on, "save_weights", "second");
    tinker_retrieve(
        tinker_post("load_weights", 200,
                    "{\"model_id\":\"%s\",\"seq_id\":%d,\"path\":\"%s\",\"optimizer\":true}", on.id,
                    ++on.seq_id, path));
    tinker_run_update(&on, &tinker_one);
    tinker_run_score(&on, &tinker_one, again);
    assert_memory_equal(again, then, sizeof then);
    json_t *info = tinker_post("weights_info", 200, "{\"tinker_path\":\"%s\"}", path);
    assert_int_equal(int_of(info, "lora_rank"), 4);
    assert_true(json_is_true(json_object_get(info, "train_unembed")));
}

// Requests of a run that nobody waits for.
static void submit(struct tinker_run *r)
{
    for (int i = 0; i < 4; i++) {
        tinker_learn(r->id, ++r->seq_id, "cross_entropy", false,
                     i % 2 ? &tinker_other : &tinker_one, 1);
        tinker_post("optim_step", 200, "{\"model_id\":\"%s\",\"seq_id\":%d,\"adam_params\":{}}",
                    r->id, ++r->seq_id);
    }
}

// kill -9 at any moment of two runs' work: the model is what it was, what was saved is whole, and
// both go on from it.
TINKER_TEST(test_killed)
{
    float left[TINKER_N], right[TINKER_N], got[TINKER_N];
    const char *of_left, *of_right, *base;
    start("4", NULL);
    base = tinker_sampler_of("base_model", "model");
    const struct tinker_sampled untrained = sample(base);
    struct tinker_run a = lora_run(session, 0), b = lora_run(session, 1);
    tinker_run_learn(&a, &tinker_one, NULL);
    tinker_run_learn(&b, &tinker_other, NULL);
    tinker_run_step(&a, 1e-2);
    tinker_run_step(&b, 1e-2);
    of_left = tinker_run_save(&a, "save_weights", "kept");
    of_right = tinker_run_save(&b, "save_weights", "kept");
    tinker_run_score(&a, &tinker_one, left);
    tinker_run_score(&b, &tinker_one, right);
    for (int i = 0; i < 5; i++) {
        submit(&a);
        submit(&b);
        clock_sleep_ms(7 * i);
        tinker_pair_kill(NULL);
        session = tinker_session();
        base = tinker_sampler_of("base_model", "model");
        same(base, &untrained);
        a = tinker_load(0, of_left);
        b = tinker_load(1, of_right);
        tinker_run_score(&a, &tinker_one, got);
        assert_memory_equal(got, left, sizeof got);
        tinker_run_score(&b, &tinker_one, got);
        assert_memory_equal(got, right, sizeof got);
    }
    daemon_holds(&pair.daemon, "policy", model);
}

// The server restores the adapter that was being written, and no other, from what the dead process
// named before its update.
TINKER_TEST(test_torn)
{
    const char *first;
    if (!on_cpu()) test_skip("forks, which a GPU's driver does not survive");
    start("3", NULL);
    struct tinker_run a = lora_run(session, 0), b = lora_run(session, 1);
    tinker_run_update(&a, &tinker_one);
    first = tinker_run_save(&a, "save_weights", "x");
    tinker_run_update(&b, &tinker_one);
    tinker_run_save(&b, "save_weights", "x");
    tinker_run_step(&b, 0); // nothing changes
    tinker_run_step(&a, 0); // and the last that was written
    const char *folder = test_text("%s/%s/weights/x", pair.server.runs, a.id);
    const char *other_folder = test_text("%s/%s/weights/x", pair.server.runs, b.id);
    const char *role = test_text("adapter:tinker:%s", a.id);
    test_kill(&pair.server.child, SIGKILL);
    test_wait(&pair.server.child, 10000);
    daemon_holds_adapter(&pair.daemon, role + strlen("adapter:"), folder);
    tear_roles(&pair.daemon, role, NULL, NULL);
    test_wait_for_text(pair.daemon.log, "weights restored from", 30000, NULL);
    daemon_holds_adapter(&pair.daemon, role + strlen("adapter:"), folder);
    daemon_holds_adapter(&pair.daemon, test_text("tinker:%s", b.id), other_folder);
    daemon_holds(&pair.daemon, "policy", model);
    tinker_server_start(&pair.server, &pair.daemon, pair.server.runs, NULL); // goes on
    session = tinker_session();
    tinker_load(0, first);
}
