/* test_tinker_lora.c: adapters in cw-trainer serve, by a client of the Tinker API without Python:
 * to the bits of cw-trainer's own learner and of a run alone, beside the base; snapshots that are
 * kept, saved and dropped; what there is no room for; checkpoints, and each process's death. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_pair.h"

#include <sys/wait.h>

static struct tinker_pair pair;
static const char *model; // its folder
static char session[128];

static void start(const char *adapters, const char *const more[])
{
    model = daemon_model(test_folder(), true, 5);
    tinker_pair_start(&pair, model,
                      OPTIONS("--exact", "--dtype", daemon_exact_dtype(), "--max-adapters",
                              adapters, "--max-lora-rank", "8"),
                      more);
    tinker_session(&pair.server, session);
}

#define LORA "\"rank\":4,\"seed\":9"

static struct tinker_run train(const char *of, int number)
{
    return tinker_begun(&pair.server, tinker_create(&pair.server, of, number, 200, LORA));
}

// ---- sampling -----------------------------------------------------------------------------------

struct completion {
    int32_t tokens[4];
    float logprobs[4];
};

static json_t *ask(int seq_id, const char *sampler, int status)
{
    return tinker_sample(&pair.server, sampler, seq_id, status, 4, "");
}

static struct completion sample(const char *sampler)
{
    static int seq_id;
    struct bytes answer = BYTES_INIT;
    struct completion got;
    tinker_retrieve_bytes(&pair.server, ask(++seq_id, sampler, 200), &answer);
    const struct proto_span message = {(const unsigned char *)bytes_text(&answer), answer.len},
                            sequence = tinker_field(message, 1);
    assert_int_equal(tinker_field(sequence, 2).len, sizeof got.tokens);
    memcpy(got.tokens, tinker_field(sequence, 2).data, sizeof got.tokens);
    memcpy(got.logprobs, tinker_field(sequence, 3).data, sizeof got.logprobs);
    bytes_release(&answer);
    return got;
}

static void same(const char *sampler, const struct completion *want)
{
    const struct completion got = sample(sampler);
    assert_memory_equal(&got, want, sizeof got);
}

// Where a sampled token and its log-probability are to be the trainer's.
static bool is_exact(void)
{
    return strcmp(test_device(), "cpu") == 0 || strcmp(daemon_exact_dtype(), "bf16") == 0;
}

// ---- the tests ----------------------------------------------------------------------------------

// What is sampled from an adapter is what it learns by, to the bit, at every version; the base
// stays what it is, and samples of it are beside those of the adapter.
TEST(test_training)
{
    char base[160], live[160];
    float learnt[TINKER_N];
    start("3", NULL);
    tinker_sampler_of(&pair.server, session, "base_model", "model", base);
    const struct completion untrained = sample(base);
    struct tinker_run r = train(session, 0);
    json_t *info = tinker_post(&pair.server, "get_info", 200, "{\"model_id\":\"%s\"}", r.id);
    assert_int_equal(json_integer_value(json_object_get(info, "lora_rank")), 4);
    tinker_run_snapshot(&r, "", live);
    same(live, &untrained); // B is zero
    for (int i = 0; i < 3; i++) {
        tinker_run_learn(&r, &tinker_one, NULL);
        assert_true(tinker_run_step(&r, 1e-2) > 0);
        tinker_run_snapshot(&r, "", live);
        const struct completion got = sample(live);
        assert_memory_not_equal(got.logprobs, untrained.logprobs, sizeof got.logprobs);
        int32_t input[TINKER_N] = {10, 20, 30, got.tokens[0], got.tokens[1], got.tokens[2]};
        int64_t wanted[TINKER_N] = {20,           30, got.tokens[0], got.tokens[1], got.tokens[2],
                                    got.tokens[3]};
        const struct tinker_datum datum = {
            TINKER_N, input, wanted, {"weights"}, {tinker_one.inputs[0]}};
        tinker_run_score(&r, &datum, learnt);
        if (is_exact()) assert_memory_equal(learnt + 2, got.logprobs, sizeof got.logprobs);
    }
    same(base, &untrained);
    daemon_holds(&pair.daemon, "policy", model);
    tinker_pair_stop(&pair);
}

// Two runs in turns, and one alone: the same bits.
TEST(test_side_by_side)
{
    float left[TINKER_N], right[TINKER_N], alone[TINKER_N], second[TINKER_N];
    char of_left[160], of_right[160];
    if (strcmp(daemon_exact_dtype(), "f32") != 0)
        test_skip("sums in another order, on this device");
    start("4", OPTIONS("--exact"));
    struct tinker_run a = train(session, 0), b = train(session, 1);
    for (int i = 0; i < 3; i++) {
        tinker_run_learn(&a, &tinker_one, NULL);
        tinker_run_learn(&b, &tinker_other, NULL);
        tinker_run_learn(&a, &tinker_other, NULL);
        tinker_run_step(&b, 1e-2);
        tinker_run_step(&a, 2e-2);
    }
    tinker_run_score(&a, &tinker_one, left);
    tinker_run_score(&b, &tinker_one, right);
    tinker_run_snapshot(&a, "", of_left);
    tinker_run_snapshot(&b, "", of_right);
    const struct completion then_sampled = sample(of_left);
    struct tinker_run c = train(session, 2);
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
    struct tinker_run e = train(session, 3);
    for (int i = 0; i < 3; i++) {
        tinker_run_update(&e, &tinker_other);
    }
    tinker_run_score(&e, &tinker_one, second);
    assert_memory_equal(second, right, sizeof right);
    tinker_pair_stop(&pair);
}

// Parts of the model; and seeds, which draw A.
TEST(test_parts)
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
        struct tinker_run r =
            tinker_begun(&pair.server, tinker_create(&pair.server, session, i, 200, parts[i].lora));
        char path[256], config[1024];
        tinker_run_update(&r, &tinker_one);
        tinker_run_score(&r, &tinker_one, ends[i]);
        tinker_run_save(&r, "save_weights_for_sampler", "x", path);
        snprintf(config, sizeof config, "%s/%s/sampler_weights/x/adapter_config.json",
                 pair.server.runs, r.id);
        char *text = test_read(config);
        assert_contains(text, parts[i].has);
        assert_null(strstr(text, parts[i].has_not));
        for (int k = 0; k < i; k++) assert_memory_not_equal(ends[i], ends[k], sizeof ends[i]);
    }
    tinker_pair_stop(&pair);
}

// Older snapshots stay as copies, as many as are asked for, those that are in use before others;
// saved ones are loaded when they are sampled.
TEST(test_snapshots)
{
    char reference[160], old[160], path[256], of_path[160], live[160];
    start("5", OPTIONS("--keep-snapshots", "2"));
    struct tinker_run r = train(session, 0);
    tinker_run_update(&r, &tinker_one);
    tinker_run_snapshot(&r, "", reference);
    const struct completion first = sample(reference);
    tinker_run_update(&r, &tinker_one);
    same(reference, &first);
    tinker_run_snapshot(&r, "", old);
    const struct completion second = sample(old);
    tinker_run_save(&r, "save_weights_for_sampler", "second", path);
    tinker_sampler_of(&pair.server, session, "model_path", path, of_path);
    same(of_path, &second);
    for (int i = 0; i < 3; i++) {
        tinker_run_update(&r, &tinker_one);
        tinker_run_snapshot(&r, "", live);
        sample(live);
        same(reference, &first);
    }
    tinker_refused(ask(1, old, 400), "older ones that are kept are ");
    same(of_path, &second);
    assert_memory_not_equal(sample(live).logprobs, first.logprobs, sizeof first.logprobs);
    tinker_run_save(&r, "save_weights_for_sampler", "second", path); // in its place
    const struct completion now = sample(live);
    tinker_run_update(&r, &tinker_one);
    tinker_refused(ask(2, of_path, 400), "was saved again");
    tinker_sampler_of(&pair.server, session, "model_path", path, of_path);
    same(of_path, &now);
    tinker_pair_stop(&pair);
}

// A run that takes a snapshot at every step leaves another's reference where it is.
TEST(test_kept_beside)
{
    char reference[160], live[160];
    start("3", NULL);
    struct tinker_run a = train(session, 0), b = train(session, 1);
    tinker_run_update(&a, &tinker_one);
    tinker_run_snapshot(&a, "", reference);
    const struct completion first = sample(reference);
    tinker_run_update(&a, &tinker_one);
    for (int i = 0; i < 3; i++) {
        tinker_run_update(&b, &tinker_other);
        tinker_run_snapshot(&b, "", live);
        sample(live);
    }
    same(reference, &first);
    char *log = test_read(pair.server.log);
    char *said = strstr(log, "is not kept");
    assert_true(said && !strstr(said + 1, "is not kept")); // once
    struct tinker_run c = train(session, 2); // but a new run comes before any snapshot
    tinker_refused(ask(1, reference, 400), "--max-adapters");
    tinker_run_step(&c, 0);
    tinker_pair_stop(&pair);
}

TEST(test_none_kept)
{
    char old[160];
    start("2", OPTIONS("--keep-snapshots", "0"));
    struct tinker_run r = train(session, 0);
    tinker_run_snapshot(&r, "", old);
    sample(old);
    tinker_run_update(&r, &tinker_one);
    tinker_refused(ask(1, old, 400), "--keep-snapshots");
    tinker_pair_stop(&pair);
}

// As many adapters as the server holds; a client that has ended leaves its place. Full fine-tuning
// goes with none.
TEST(test_room)
{
    char second[128], third[128], base[160], live[160];
    start("2", NULL);
    tinker_sampler_of(&pair.server, session, "base_model", "model", base);
    const struct completion untrained = sample(base);
    tinker_session(&pair.server, second);
    tinker_session(&pair.server, third);
    struct tinker_run a = train(session, 0), b = train(second, 0);
    tinker_refused(tinker_retrieve(&pair.server, tinker_create(&pair.server, third, 0, 200, LORA)),
                   "a larger --max-adapters");
    tinker_refused(tinker_create(&pair.server, third, 1, 409, "\"rank\":0"),
                   "no adapter beside it");
    tinker_finish(&pair.server, second);
    struct tinker_run c = train(third, 2);
    tinker_refused(
        tinker_retrieve(&pair.server,
                        tinker_learn(&pair.server, b.id, 1, "cross_entropy", true, &tinker_one, 1)),
        "has the weights no more");
    char *log = test_read(pair.server.log);
    assert_contains(log, "ends after 0 steps: its client has finished");
    tinker_run_update(&c, &tinker_one);
    tinker_finish(&pair.server, session);
    struct tinker_run whole =
        tinker_begun(&pair.server, tinker_create(&pair.server, third, 3, 200, "\"rank\":0"));
    tinker_refused(
        tinker_retrieve(&pair.server,
                        tinker_learn(&pair.server, c.id, 3, "cross_entropy", true, &tinker_one, 1)),
        "has the weights no more");
    same(base, &untrained);
    tinker_run_update(&whole, &tinker_one);
    tinker_run_snapshot(&whole, "", live);
    assert_memory_not_equal(sample(live).logprobs, untrained.logprobs, sizeof untrained.logprobs);
    tinker_refused(ask(1, base, 400), "is the snapshot of weight version");
    a = train(third, 4); // on the model as its folder has it
    daemon_holds(&pair.daemon, "policy", model);
    tinker_run_update(&a, &tinker_one);
    tinker_pair_stop(&pair);
}

// A client that has fallen silent leaves its places to any other, for a saved adapter too.
TEST(test_a_silent_client)
{
    char other[128], path[256], sampler[160];
    start("2", NULL);
    tinker_session(&pair.server, other);
    struct tinker_run a = train(session, 0);
    train(other, 0);
    tinker_run_update(&a, &tinker_one);
    tinker_run_save(&a, "save_weights_for_sampler", "kept", path);
    tinker_run_update(&a, &tinker_one);
    clock_sleep_ms(37000); // more than three heartbeats
    tinker_session(&pair.server, session);
    tinker_sampler_of(&pair.server, session, "model_path", path, sampler);
    sample(sampler);
    char *log = test_read(pair.server.log);
    assert_contains(log, "its client is gone, and another wants its place");
    tinker_pair_stop(&pair);
}

TEST(test_refused)
{
    start("2", NULL);
    tinker_refused(tinker_create(&pair.server, session, 0, 400,
                                 LORA ",\"train_mlp\":false,\"train_attn\":false,"
                                      "\"train_unembed\":false"),
                   "nothing is left to train");
    tinker_refused(
        tinker_retrieve(&pair.server, tinker_create(&pair.server, session, 0, 200, "\"rank\":9")),
        "--max-lora-rank 9");
    struct tinker_run whole =
        tinker_begun(&pair.server, tinker_create(&pair.server, session, 1, 200, "\"rank\":0"));
    char path[256];
    tinker_run_save(&whole, "save_weights", "whole", path);
    struct tinker_run r = train(session, 2);
    tinker_refused(tinker_retrieve(&pair.server,
                                   tinker_post(&pair.server, "load_weights", 200,
                                               "{\"model_id\":\"%s\",\"seq_id\":1,\"path\":\"%s\","
                                               "\"optimizer\":false}",
                                               r.id, path)),
                   "trains an adapter");
    tinker_pair_stop(&pair);
}

// ---- checkpoints and deaths ---------------------------------------------------------------------

// What save_weights has acknowledged outlives a kill -9, and goes on from there to the same bits,
// in a new run and in one that is there; what the dead process left on the server makes room.
TEST(test_checkpoints)
{
    float saved[TINKER_N], then[TINKER_N], again[TINKER_N];
    char path[256], second[256], live[160];
    start("2", OPTIONS("--exact"));
    struct tinker_run r = train(session, 0);
    tinker_run_update(&r, &tinker_one);
    tinker_run_save(&r, "save_weights", "first", path);
    tinker_run_snapshot(&r, "", live);
    const struct completion then_sampled = sample(live);
    tinker_run_score(&r, &tinker_one, saved);
    tinker_run_update(&r, &tinker_one);
    tinker_run_score(&r, &tinker_one, then);
    tinker_pair_kill(&pair, OPTIONS("--exact"));
    tinker_session(&pair.server, session);
    tinker_sampler_of(&pair.server, session, "model_path", path, live); // with no run at all
    same(live, &then_sampled);
    struct tinker_run on = tinker_load(&pair.server, session, 0, path);
    tinker_run_score(&on, &tinker_one, again);
    assert_memory_equal(again, saved, sizeof saved);
    tinker_run_update(&on, &tinker_one); // by the moments that were saved
    tinker_run_score(&on, &tinker_one, again);
    assert_memory_equal(again, then, sizeof then);
    tinker_run_save(&on, "save_weights", "second", second);
    tinker_retrieve(
        &pair.server,
        tinker_post(&pair.server, "load_weights", 200,
                    "{\"model_id\":\"%s\",\"seq_id\":%d,\"path\":\"%s\",\"optimizer\":true}", on.id,
                    ++on.seq_id, path));
    tinker_run_update(&on, &tinker_one);
    tinker_run_score(&on, &tinker_one, again);
    assert_memory_equal(again, then, sizeof then);
    json_t *info = tinker_post(&pair.server, "weights_info", 200, "{\"tinker_path\":\"%s\"}", path);
    assert_int_equal(json_integer_value(json_object_get(info, "lora_rank")), 4);
    assert_true(json_is_true(json_object_get(info, "train_unembed")));
    tinker_pair_stop(&pair);
}

// Requests of a run that nobody waits for.
static void submit(struct tinker_run *r)
{
    for (int i = 0; i < 4; i++) {
        tinker_learn(&pair.server, r->id, ++r->seq_id, "cross_entropy", false,
                     i % 2 ? &tinker_other : &tinker_one, 1);
        tinker_post(&pair.server, "optim_step", 200,
                    "{\"model_id\":\"%s\",\"seq_id\":%d,\"adam_params\":{}}", r->id, ++r->seq_id);
    }
}

// kill -9 at any moment of two runs' work: the model is what it was, what was saved is whole, and
// both go on from it.
TEST(test_killed)
{
    float left[TINKER_N], right[TINKER_N], got[TINKER_N];
    char of_left[256], of_right[256], base[160];
    start("4", NULL);
    tinker_sampler_of(&pair.server, session, "base_model", "model", base);
    const struct completion untrained = sample(base);
    struct tinker_run a = train(session, 0), b = train(session, 1);
    tinker_run_learn(&a, &tinker_one, NULL);
    tinker_run_learn(&b, &tinker_other, NULL);
    tinker_run_step(&a, 1e-2);
    tinker_run_step(&b, 1e-2);
    tinker_run_save(&a, "save_weights", "kept", of_left);
    tinker_run_save(&b, "save_weights", "kept", of_right);
    tinker_run_score(&a, &tinker_one, left);
    tinker_run_score(&b, &tinker_one, right);
    for (int i = 0; i < 5; i++) {
        submit(&a);
        submit(&b);
        clock_sleep_ms(7 * i);
        tinker_pair_kill(&pair, NULL);
        tinker_session(&pair.server, session);
        tinker_sampler_of(&pair.server, session, "base_model", "model", base);
        same(base, &untrained);
        a = tinker_load(&pair.server, session, 0, of_left);
        b = tinker_load(&pair.server, session, 1, of_right);
        tinker_run_score(&a, &tinker_one, got);
        assert_memory_equal(got, left, sizeof got);
        tinker_run_score(&b, &tinker_one, got);
        assert_memory_equal(got, right, sizeof got);
    }
    daemon_holds(&pair.daemon, "policy", model);
    tinker_pair_stop(&pair);
}

// In a child of its own: a writer that dies in the middle of an update of the role.
static void die_in_an_update(const char *role)
{
    struct bridge *b;
    if (bridge_attach(pair.daemon.bridge, NULL, &b) != ST_OK || bridge_become_writer(b) != ST_OK)
        _exit(1);
    struct control *c = bridge_control(b);
    if (control_quiesce(c, clock_deadline_ns(10000)) != ST_OK || control_write_begin(c) != ST_OK)
        _exit(2);
    device_fill(bridge_device(b), bridge_base(b, role), 0x3f,
                bridge_file_role(bridge_file_of(b), role)->tensors[0].bytes);
    device_sync(bridge_device(b));
    _exit(0);
}

// The server restores the adapter that was being written, and no other, from what the dead process
// named before its update.
TEST(test_torn)
{
    char first[256], second[256], folder[512], other_folder[512], role[160];
    int status;
    if (strcmp(test_device(), "cpu") != 0)
        test_skip("forks, which a GPU's driver does not survive");
    start("3", NULL);
    struct tinker_run a = train(session, 0), b = train(session, 1);
    tinker_run_update(&a, &tinker_one);
    tinker_run_save(&a, "save_weights", "x", first);
    tinker_run_update(&b, &tinker_one);
    tinker_run_save(&b, "save_weights", "x", second);
    tinker_run_step(&b, 0); // nothing changes
    tinker_run_step(&a, 0); // and the last that was written
    snprintf(folder, sizeof folder, "%s/%s/weights/x", pair.server.runs, a.id);
    snprintf(other_folder, sizeof other_folder, "%s/%s/weights/x", pair.server.runs, b.id);
    snprintf(role, sizeof role, "adapter:tinker:%s", a.id);
    test_kill(&pair.server.child, SIGKILL);
    test_wait(&pair.server.child, 10000);
    daemon_holds_adapter(&pair.daemon, role + strlen("adapter:"), folder);
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) die_in_an_update(role);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(WEXITSTATUS(status), 0);
    test_wait_for_text(pair.daemon.log, "weights restored from", 30000, NULL);
    daemon_holds_adapter(&pair.daemon, role + strlen("adapter:"), folder);
    snprintf(role, sizeof role, "tinker:%s", b.id);
    daemon_holds_adapter(&pair.daemon, role, other_folder);
    daemon_holds(&pair.daemon, "policy", model);
    tinker_server_start(&pair.server, &pair.daemon, pair.server.runs, NULL); // goes on
    tinker_session(&pair.server, session);
    tinker_load(&pair.server, session, 0, first);
    tinker_pair_stop(&pair);
}
