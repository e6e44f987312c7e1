/* test_tinker_lora.c: adapters in cw-trainer serve, by a client of the Tinker API without Python:
 * to the bits of cw-trainer's own learner and of a run alone, beside the base; snapshots that are
 * kept, saved and dropped; what there is no room for; checkpoints, and each process's death. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_pair.h"

#include <sys/wait.h>

static struct tinker_pair pair;
static const char *model; // its folder
static char session[128];

struct run { // a training run, and the number of its last request
    char id[128];
    int seq_id;
};

static void open_session(char ret[128])
{
    json_t *answer = tinker_post(&pair.server, "create_session", 200, "{}");
    snprintf(ret, 128, "%s", json_string_value(json_object_get(answer, "session_id")));
}

static void start(const char *adapters, const char *const more[])
{
    model = daemon_model(test_folder(), true, 5);
    tinker_pair_start(&pair, model,
                      OPTIONS("--exact", "--dtype", daemon_exact_dtype(), "--max-adapters",
                              adapters, "--max-lora-rank", "8"),
                      more);
    open_session(session);
}

static json_t *create(const char *of, int number, int status, const char *lora)
{
    return tinker_post(&pair.server, "create_model", status,
                       "{\"session_id\":\"%s\",\"model_seq_id\":%d,\"base_model\":\"model\","
                       "\"lora_config\":{%s}}",
                       of, number, lora);
}

#define LORA "\"rank\":4,\"seed\":9"

// Takes the answer of a future that gives a model.
static struct run begun(json_t *answer)
{
    struct run r = {0};
    const char *id = json_string_value(json_object_get(answer, "model_id"));
    if (!id) fail_msg("not begun: %s", json_dumps(answer, 0));
    snprintf(r.id, sizeof r.id, "%s", id);
    json_decref(answer);
    return r;
}

static struct run train(const char *of, int number)
{
    return begun(tinker_retrieve(&pair.server, create(of, number, 200, LORA)));
}

static void learn(struct run *r, const struct tinker_datum *datum)
{
    float unused[TINKER_N];
    tinker_logprobs(
        &pair.server,
        tinker_learn(&pair.server, r->id, ++r->seq_id, "cross_entropy", false, datum, 1), TINKER_N,
        unused);
}

static double step(struct run *r, double lr)
{
    return tinker_step(&pair.server, r->id, ++r->seq_id, lr);
}

static void score(struct run *r, const struct tinker_datum *datum, float ret[TINKER_N])
{
    tinker_logprobs(&pair.server,
                    tinker_learn(&pair.server, r->id, ++r->seq_id, "cross_entropy", true, datum, 1),
                    TINKER_N, ret);
}

// ---- sampling -----------------------------------------------------------------------------------

struct completion {
    int32_t tokens[4];
    float logprobs[4];
};

static json_t *ask(int seq_id, const char *sampler, int status)
{
    return tinker_post(&pair.server, "asample", status,
                       "{\"sampling_session_id\":\"%s\",\"seq_id\":%d,\"num_samples\":1,"
                       "\"prompt\":{\"chunks\":[{\"type\":\"encoded_text\",\"tokens\":[10,20,30]}]}"
                       ",\"sampling_params\":{\"max_tokens\":4,\"seed\":3,\"stop\":[]}}",
                       sampler, seq_id);
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

static int samplers; // so far

static void sampler_of(const char *what, const char *value, char ret[160])
{
    json_t *answer =
        tinker_post(&pair.server, "create_sampling_session", 200,
                    "{\"session_id\":\"%s\",\"sampling_session_seq_id\":%d,\"%s\":\"%s\"}", session,
                    ++samplers, what, value);
    snprintf(ret, 160, "%s", json_string_value(json_object_get(answer, "sampling_session_id")));
    json_decref(answer);
}

static void take_snapshot(struct run *r, char ret[160])
{
    json_t *answer = tinker_retrieve(
        &pair.server,
        tinker_post(&pair.server, "save_weights_for_sampler", 200,
                    "{\"model_id\":\"%s\",\"seq_id\":%d,\"sampling_session_seq_id\":%d}", r->id,
                    ++r->seq_id, ++samplers));
    snprintf(ret, 160, "%s", json_string_value(json_object_get(answer, "sampling_session_id")));
}

// save_weights or save_weights_for_sampler, by name.
static void save(struct run *r, const char *how, const char *name, char ret_path[256])
{
    json_t *answer = tinker_retrieve(
        &pair.server,
        tinker_post(&pair.server, how, 200, "{\"model_id\":\"%s\",\"seq_id\":%d,\"path\":\"%s\"}",
                    r->id, ++r->seq_id, name));
    if (!json_object_get(answer, "path")) fail_msg("%s: %s", how, json_dumps(answer, 0));
    snprintf(ret_path, 256, "%s", json_string_value(json_object_get(answer, "path")));
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
    sampler_of("base_model", "model", base);
    const struct completion untrained = sample(base);
    struct run r = train(session, 0);
    json_t *info = tinker_post(&pair.server, "get_info", 200, "{\"model_id\":\"%s\"}", r.id);
    assert_int_equal(json_integer_value(json_object_get(info, "lora_rank")), 4);
    take_snapshot(&r, live);
    same(live, &untrained); // B is zero
    for (int i = 0; i < 3; i++) {
        learn(&r, &tinker_one);
        assert_true(step(&r, 1e-2) > 0);
        take_snapshot(&r, live);
        const struct completion got = sample(live);
        assert_memory_not_equal(got.logprobs, untrained.logprobs, sizeof got.logprobs);
        int32_t input[TINKER_N] = {10, 20, 30, got.tokens[0], got.tokens[1], got.tokens[2]};
        int64_t wanted[TINKER_N] = {20,           30, got.tokens[0], got.tokens[1], got.tokens[2],
                                    got.tokens[3]};
        const struct tinker_datum datum = {
            TINKER_N, input, wanted, {"weights"}, {tinker_one.inputs[0]}};
        score(&r, &datum, learnt);
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
    struct run a = train(session, 0), b = train(session, 1);
    for (int i = 0; i < 3; i++) {
        learn(&a, &tinker_one);
        learn(&b, &tinker_other);
        learn(&a, &tinker_other);
        step(&b, 1e-2);
        step(&a, 2e-2);
    }
    score(&a, &tinker_one, left);
    score(&b, &tinker_one, right);
    take_snapshot(&a, of_left);
    take_snapshot(&b, of_right);
    const struct completion then_sampled = sample(of_left);
    struct run c = train(session, 2);
    for (int i = 0; i < 3; i++) {
        learn(&c, &tinker_one);
        learn(&c, &tinker_other);
        step(&c, 2e-2);
    }
    score(&c, &tinker_one, alone);
    assert_memory_equal(alone, left, sizeof left);
    assert_memory_not_equal(alone, right, sizeof right);
    same(of_left, &then_sampled); // the other's updates moved the version on, and left it alone
    sample(of_right);
    struct run e = train(session, 3);
    for (int i = 0; i < 3; i++) {
        learn(&e, &tinker_other);
        step(&e, 1e-2);
    }
    score(&e, &tinker_one, second);
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
        struct run r = begun(tinker_retrieve(&pair.server, create(session, i, 200, parts[i].lora)));
        char path[256], config[1024];
        learn(&r, &tinker_one);
        step(&r, 1e-2);
        score(&r, &tinker_one, ends[i]);
        save(&r, "save_weights_for_sampler", "x", path);
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
    struct run r = train(session, 0);
    learn(&r, &tinker_one);
    step(&r, 1e-2);
    take_snapshot(&r, reference);
    const struct completion first = sample(reference);
    learn(&r, &tinker_one);
    step(&r, 1e-2);
    same(reference, &first);
    take_snapshot(&r, old);
    const struct completion second = sample(old);
    save(&r, "save_weights_for_sampler", "second", path);
    sampler_of("model_path", path, of_path);
    same(of_path, &second);
    for (int i = 0; i < 3; i++) {
        learn(&r, &tinker_one);
        step(&r, 1e-2);
        take_snapshot(&r, live);
        sample(live);
        same(reference, &first);
    }
    tinker_refused(ask(1, old, 400), "older ones that are kept are ");
    same(of_path, &second);
    assert_memory_not_equal(sample(live).logprobs, first.logprobs, sizeof first.logprobs);
    save(&r, "save_weights_for_sampler", "second", path); // in its place
    const struct completion now = sample(live);
    learn(&r, &tinker_one);
    step(&r, 1e-2);
    tinker_refused(ask(2, of_path, 400), "was saved again");
    sampler_of("model_path", path, of_path);
    same(of_path, &now);
    tinker_pair_stop(&pair);
}

// A run that takes a snapshot at every step leaves another's reference where it is.
TEST(test_kept_beside)
{
    char reference[160], live[160];
    start("3", NULL);
    struct run a = train(session, 0), b = train(session, 1);
    learn(&a, &tinker_one);
    step(&a, 1e-2);
    take_snapshot(&a, reference);
    const struct completion first = sample(reference);
    learn(&a, &tinker_one);
    step(&a, 1e-2);
    for (int i = 0; i < 3; i++) {
        learn(&b, &tinker_other);
        step(&b, 1e-2);
        take_snapshot(&b, live);
        sample(live);
    }
    same(reference, &first);
    char *log = test_read(pair.server.log);
    char *said = strstr(log, "is not kept");
    assert_true(said && !strstr(said + 1, "is not kept")); // once
    struct run c = train(session, 2); // but a new run comes before any snapshot
    tinker_refused(ask(1, reference, 400), "--max-adapters");
    step(&c, 0);
    tinker_pair_stop(&pair);
}

TEST(test_none_kept)
{
    char old[160];
    start("2", OPTIONS("--keep-snapshots", "0"));
    struct run r = train(session, 0);
    take_snapshot(&r, old);
    sample(old);
    learn(&r, &tinker_one);
    step(&r, 1e-2);
    tinker_refused(ask(1, old, 400), "--keep-snapshots");
    tinker_pair_stop(&pair);
}

static void finish(const char *of)
{
    char path[256];
    snprintf(path, sizeof path, "sessions/%s/finish", of);
    tinker_post(&pair.server, path, 200, "{\"reason\":{\"type\":\"success\"}}");
}

// As many adapters as the server holds; a client that has ended leaves its place. Full fine-tuning
// goes with none.
TEST(test_room)
{
    char second[128], third[128], base[160], live[160];
    start("2", NULL);
    sampler_of("base_model", "model", base);
    const struct completion untrained = sample(base);
    open_session(second);
    open_session(third);
    struct run a = train(session, 0), b = train(second, 0);
    tinker_refused(tinker_retrieve(&pair.server, create(third, 0, 200, LORA)),
                   "a larger --max-adapters");
    tinker_refused(create(third, 1, 409, "\"rank\":0"), "no adapter beside it");
    finish(second);
    struct run c = train(third, 2);
    tinker_refused(
        tinker_retrieve(&pair.server,
                        tinker_learn(&pair.server, b.id, 1, "cross_entropy", true, &tinker_one, 1)),
        "has the weights no more");
    char *log = test_read(pair.server.log);
    assert_contains(log, "ends after 0 steps: its client has finished");
    learn(&c, &tinker_one);
    step(&c, 1e-2);
    finish(session);
    struct run whole = begun(tinker_retrieve(&pair.server, create(third, 3, 200, "\"rank\":0")));
    tinker_refused(
        tinker_retrieve(&pair.server,
                        tinker_learn(&pair.server, c.id, 3, "cross_entropy", true, &tinker_one, 1)),
        "has the weights no more");
    same(base, &untrained);
    learn(&whole, &tinker_one);
    step(&whole, 1e-2);
    take_snapshot(&whole, live);
    assert_memory_not_equal(sample(live).logprobs, untrained.logprobs, sizeof untrained.logprobs);
    tinker_refused(ask(1, base, 400), "is the snapshot of weight version");
    a = train(third, 4); // on the model as its folder has it
    daemon_holds(&pair.daemon, "policy", model);
    learn(&a, &tinker_one);
    step(&a, 1e-2);
    tinker_pair_stop(&pair);
}

// A client that has fallen silent leaves its places to any other, for a saved adapter too.
TEST(test_a_silent_client)
{
    char other[128], path[256], sampler[160];
    start("2", NULL);
    open_session(other);
    struct run a = train(session, 0);
    train(other, 0);
    learn(&a, &tinker_one);
    step(&a, 1e-2);
    save(&a, "save_weights_for_sampler", "kept", path);
    learn(&a, &tinker_one);
    step(&a, 1e-2);
    clock_sleep_ms(37000); // more than three heartbeats
    open_session(session);
    sampler_of("model_path", path, sampler);
    sample(sampler);
    char *log = test_read(pair.server.log);
    assert_contains(log, "its client is gone, and another wants its place");
    tinker_pair_stop(&pair);
}

TEST(test_refused)
{
    start("2", NULL);
    tinker_refused(create(session, 0, 400,
                          LORA ",\"train_mlp\":false,\"train_attn\":false,"
                               "\"train_unembed\":false"),
                   "nothing is left to train");
    tinker_refused(tinker_retrieve(&pair.server, create(session, 0, 200, "\"rank\":9")),
                   "--max-lora-rank 9");
    struct run whole = begun(tinker_retrieve(&pair.server, create(session, 1, 200, "\"rank\":0")));
    char path[256];
    save(&whole, "save_weights", "whole", path);
    struct run r = train(session, 2);
    tinker_refused(tinker_retrieve(&pair.server,
                                   tinker_post(&pair.server, "load_weights", 200,
                                               "{\"model_id\":\"%s\",\"seq_id\":1,\"path\":\"%s\","
                                               "\"optimizer\":false}",
                                               r.id, path)),
                   "trains an adapter");
    tinker_pair_stop(&pair);
}

// ---- checkpoints and deaths ---------------------------------------------------------------------

static struct run load(int number, const char *path)
{
    return begun(
        tinker_retrieve(&pair.server, tinker_post(&pair.server, "load_weights", 200,
                                                  "{\"session_id\":\"%s\",\"model_seq_id\":%d,"
                                                  "\"path\":\"%s\",\"optimizer\":true}",
                                                  session, number, path)));
}

// What save_weights has acknowledged outlives a kill -9, and goes on from there to the same bits,
// in a new run and in one that is there; what the dead process left on the server makes room.
TEST(test_checkpoints)
{
    float saved[TINKER_N], then[TINKER_N], again[TINKER_N];
    char path[256], second[256], live[160];
    start("2", OPTIONS("--exact"));
    struct run r = train(session, 0);
    learn(&r, &tinker_one);
    step(&r, 1e-2);
    save(&r, "save_weights", "first", path);
    take_snapshot(&r, live);
    const struct completion then_sampled = sample(live);
    score(&r, &tinker_one, saved);
    learn(&r, &tinker_one);
    step(&r, 1e-2);
    score(&r, &tinker_one, then);
    const char *runs = pair.server.runs;
    test_kill(&pair.server.child, SIGKILL);
    assert_int_equal(test_wait(&pair.server.child, 10000), 128 + SIGKILL);
    tinker_server_start(&pair.server, &pair.daemon, runs, OPTIONS("--exact"));
    open_session(session);
    sampler_of("model_path", path, live); // with no run at all
    same(live, &then_sampled);
    struct run on = load(0, path);
    score(&on, &tinker_one, again);
    assert_memory_equal(again, saved, sizeof saved);
    learn(&on, &tinker_one);
    step(&on, 1e-2); // by the moments that were saved
    score(&on, &tinker_one, again);
    assert_memory_equal(again, then, sizeof then);
    save(&on, "save_weights", "second", second);
    tinker_retrieve(
        &pair.server,
        tinker_post(&pair.server, "load_weights", 200,
                    "{\"model_id\":\"%s\",\"seq_id\":%d,\"path\":\"%s\",\"optimizer\":true}", on.id,
                    ++on.seq_id, path));
    learn(&on, &tinker_one);
    step(&on, 1e-2);
    score(&on, &tinker_one, again);
    assert_memory_equal(again, then, sizeof then);
    json_t *info = tinker_post(&pair.server, "weights_info", 200, "{\"tinker_path\":\"%s\"}", path);
    assert_int_equal(json_integer_value(json_object_get(info, "lora_rank")), 4);
    assert_true(json_is_true(json_object_get(info, "train_unembed")));
    tinker_pair_stop(&pair);
}

// Requests of a run that nobody waits for.
static void submit(struct run *r)
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
    sampler_of("base_model", "model", base);
    const struct completion untrained = sample(base);
    struct run a = train(session, 0), b = train(session, 1);
    learn(&a, &tinker_one);
    learn(&b, &tinker_other);
    step(&a, 1e-2);
    step(&b, 1e-2);
    save(&a, "save_weights", "kept", of_left);
    save(&b, "save_weights", "kept", of_right);
    score(&a, &tinker_one, left);
    score(&b, &tinker_one, right);
    for (int i = 0; i < 5; i++) {
        const char *runs = pair.server.runs;
        submit(&a);
        submit(&b);
        clock_sleep_ms(7 * i);
        test_kill(&pair.server.child, SIGKILL);
        assert_int_equal(test_wait(&pair.server.child, 10000), 128 + SIGKILL);
        tinker_server_start(&pair.server, &pair.daemon, runs, NULL);
        open_session(session);
        sampler_of("base_model", "model", base);
        same(base, &untrained);
        a = load(0, of_left);
        b = load(1, of_right);
        score(&a, &tinker_one, got);
        assert_memory_equal(got, left, sizeof got);
        score(&b, &tinker_one, got);
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
    struct run a = train(session, 0), b = train(session, 1);
    learn(&a, &tinker_one);
    step(&a, 1e-2);
    save(&a, "save_weights", "x", first);
    learn(&b, &tinker_one);
    step(&b, 1e-2);
    save(&b, "save_weights", "x", second);
    step(&b, 0); // nothing changes
    step(&a, 0); // and the last that was written
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
    open_session(session);
    load(0, first);
    tinker_pair_stop(&pair);
}
