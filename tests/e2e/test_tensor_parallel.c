/* test_tensor_parallel.c: cw-infer-server --tensor-parallel-size: several processes serve one model
 * as one does; clients see every shard; and when one of them is gone all end, and say who. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/bridge_file.h"
#include "tests/support/daemon.h"
#include "tests/support/generated.h"
#include "tests/support/mpirun.h"
#include "tests/support/tiny_adapter.h"
#include "tests/support/tiny_latent.h"
#include "tests/support/tiny_tokenizer.h"
#include "tests/support/torn.h"

static void start_ranks(struct daemon *d, int n, const char *folder, const char *const options[])
{
    daemon_spawn_ranks(d, n, folder, options);
    daemon_wait(d);
}

// Of a test: two ranks, and the model's folder.
static struct daemon ranks;
static const char *model;

// Rank 0 is told, and the others end with it; mpirun would end all of them.
static void stop_ranks(struct daemon *d)
{
    kill((pid_t)int_of(json_of_file(d->bridge), "pid"), SIGTERM);
    assert_int_equal(test_wait(&d->child, 20000), 0);
}

// ---- the same tokens ----------------------------------------------------------------------------
// A prompt that repeats, so that something is drafted; its samples share its blocks.
static json_t *samples(const struct daemon *d)
{
    return daemon_post(d->socket, "/v1/completions", 200,
                       "{\"prompt\": [7, 11, 7, 11, 7, 11, 90, 7, 11], \"max_tokens\": 24, "
                       "\"n\": 3, \"temperature\": 0.8, \"seed\": 5, \"logprobs\": 2, "
                       "\"ignore_eos\": true, \"prompt_logprobs\": 1}");
}

static json_t *greedy(const struct daemon *d)
{
    return daemon_post(d->socket, "/v1/completions", 200,
                       "{\"prompt\": [5, 6, 5, 6, 5, 6, 5], \"max_tokens\": 20, "
                       "\"temperature\": 0, \"logprobs\": 0, \"ignore_eos\": true}");
}

// Equal, but for numbers that are no whole ones, which may be rounded otherwise.
static void assert_alike(const json_t *a, const json_t *b)
{
    const char *key;
    json_t *value;
    assert_int_equal(json_typeof(a), json_typeof(b));
    if (json_is_real(a)) {
        if (!(fabs(json_real_value(a) - json_real_value(b)) < 1e-4))
            fail_msg("%g is not %g", json_real_value(a), json_real_value(b));
    } else if (json_is_array(a)) {
        assert_int_equal(json_array_size(a), json_array_size(b));
        for (size_t i = 0; i < json_array_size(a); i++)
            assert_alike(json_array_get(a, i), json_array_get(b, i));
    } else if (json_is_object(a)) {
        assert_int_equal(json_object_size(a), json_object_size(b));
        json_object_foreach ((json_t *)a, key, value) {
            const json_t *other = json_object_get(b, key);
            assert_non_null(other);
            assert_alike(value, other);
        }
    } else {
        assert_true(json_equal(a, b));
    }
}

static void assert_same_choices(json_t *a, json_t *b)
{
    const json_t *choices = json_object_get(a, "choices");
    assert_true(json_array_size(choices) > 0);
    assert_alike(choices, json_object_get(b, "choices"));
}

// What a server says of its model is of all its shards.
static void assert_same_model(const struct daemon *one)
{
    static const char *const same[] = {"num_tensors", "num_parameters"};
    json_t *a = daemon_get(ranks.socket, "/bridge/info", 200),
           *b = daemon_get(one->socket, "/bridge/info", 200);
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        assert_true(json_equal(json_object_get(a, same[i]), json_object_get(b, same[i])));
    assert_int_equal(int_of(a, "tp_degree"), 2);
    assert_int_equal(int_of(b, "tp_degree"), 1);
    // norms, which all ranks hold, are there twice
    assert_true(int_of(a, "weight_bytes") > int_of(b, "weight_bytes"));
}

static void give_what_one_gives(void)
{
    struct daemon four = {0}, one = {0};
    daemon_start(&one, model, args("--speculative ngram:3"));
    assert_same_model(&one);
    assert_same_choices(samples(&ranks), samples(&one));
    assert_same_choices(greedy(&ranks), greedy(&one));
    // and the same again, from the prefix cache
    json_t *alone = samples(&one);
    assert_same_choices(samples(&ranks), alone);
    daemon_end(&one);
    // key-value heads that two ranks share
    if (on_cpu() || daemon_has_device("cuda:3")) {
        start_ranks(&four, 4, model, args("--tensor-parallel-size 4"));
        assert_same_choices(samples(&four), alone);
        stop_ranks(&four);
    }
}

static void refused(const char *folder, const char *const options[], const char *sentence)
{
    struct daemon d = {0};
    daemon_spawn(&d, folder, options);
    assert_int_not_equal(test_wait(&d.child, 20000), 0);
    assert_contains(test_read(d.log), sentence);
}

// What rank 0 alone reads ends both at once, though nothing kills the other, which says why: before
// the server, of the server, and of the engine.
// The second time rank 1 asks for the first time long after that, as on a busy machine.
TEST(rank_0_that_fails_before_all_meet_ends_all)
{
    static const char late[] = "[ $OMPI_COMM_WORLD_RANK = 0 ] || sleep 1.5; exec \"$0\" \"$@\"";
    const char *policy = daemon_model(test_folder(), true, 8), *broken = test_folder();
    const char *const why[] = {"/nowhere/key", "tokenizer.json", "/nowhere/draft"};
    const char *const *const options[] = {args("--model %s --api-key-file /nowhere/key", policy),
                                          args("--model %s", broken),
                                          args("--model %s --draft /nowhere/draft "
                                               "--speculative draft_model",
                                               policy)};
    mpirun_words(2);
    test_command(test_path(broken, "log"), 10000, args("cp -r %s/. %s", policy, broken));
    test_write(test_path(broken, "tokenizer.json"), "{", 1);
    for (int i = 0; i < 3; i++) {
        const char *folder = test_folder(), *log = test_path(folder, "log");
        const int64_t start_ns = clock_now_ns();
        const char *const *given =
            args("%s --device cpu --tensor-parallel-size 2 --socket %s/s --bridge %s/b",
                 test_binary("cw-infer-server"), folder, folder);
        if (i == 1) given = JOIN(OPTIONS("sh", "-c", late), given);
        test_command(log, 60000, JOIN(mpirun_words(2), JOIN(given, options[i])));
        assert_contains(test_read(log), "error: rank 0 (");
        assert_contains(strstr(test_read(log), ") has failed: "), why[i]);
        assert_true(clock_ms_since(start_ns) < 20000);
    }
}

// torchrun starts all again at once, with the id that they had: what ended the first try ends no
// rank of the second, which meet (and then find no MPI).
TEST(torchrun_begins_again)
{
    static const char second[] =
        "[ $RANK$TORCHELASTIC_RESTART_COUNT = 00 ] && set -- \"$@\" --api-key-file /nowhere/key; "
        "echo try $TORCHELASTIC_RESTART_COUNT; exec \"$0\" \"$@\"";
    const char *folder = daemon_model(test_folder(), true, 8), *log = test_path(folder, "log");
    const char *const *torchrun =
        args("%s -m torch.distributed.run --standalone --no-python --nproc-per-node 2 "
             "--max-restarts 1",
             test_python("torch.distributed.run"));
    if (!CW_MPI) test_skip("this was built without MPI");
    test_command(log, 120000,
                 JOIN(torchrun, OPTIONS("sh", "-c", second),
                      args("%s --device cpu --tensor-parallel-size 2 --model %s --socket %s/s "
                           "--bridge %s/b",
                           test_binary("cw-infer-server"), folder, folder, folder)));
    const char *text = test_read(log), *again = strstr(text, "try 1");
    assert_contains(text, ": cannot open /nowhere/key"); // rank 0 says it, or rank 1 of it
    assert_non_null(again);
    assert_null(strstr(again, "/nowhere/key"));
    // what torchrun lets them say of it, once they have met
    assert_true(strstr(again, " of 2 is rank 0 of 1 to MPI") ||
                strstr(again, " of the tensor-parallel server is gone"));
}

// ---- clients ------------------------------------------------------------------------------------
static void show_clients_every_shard(void)
{
    char *text = test_output(0, OPTIONS(test_binary("cw-ipc-check"), ranks.bridge));
    assert_contains(text, "ok    canary");
    assert_contains(text, "ok    rank 1: canary");
    assert_contains(text, "ok    rank 1: checksums");
    const json_t *bridge = json_of_file(ranks.bridge);
    assert_int_equal(int_of(bridge, "tp_degree"), 2);
    const json_t *mapping = json_object_get(json_at(bridge, "param_mappings"),
                                            "model.layers.0.self_attn.o_proj.weight");
    json_t *shard =
        json_pack("{s:[i, i], s:[[i, i]], s:i}", "shape", 64, 64, "rows", 0, 64, "first_column", 0);
    assert_true(json_equal(json_object_get(mapping, "shard"), shard));
    json_decref(shard);
    // who maps whole models is told
    struct bridge *whole;
    assert_status(bridge_attach(ranks.bridge, NULL, &whole), ST_UNSUPPORTED);
    assert_message("\"tp_degree\" is 2");
    assert_message("as many ranks of one trainer");
    assert_status(bridge_attach_shard(ranks.bridge, 2, NULL, NULL, NULL, &whole), ST_INVALID);
}

// Which hands on what it is told to do, and ends as its ranks do.
TEST(one_command_starts_all_ranks)
{
    struct daemon d = {0}, one = {0};
    const char *folder = daemon_model(test_folder(), false, 3);
    mpirun_words(2); // which skips the test where there is none
    daemon_start(&d, folder, args("--tensor-parallel-size 2"));
    daemon_start(&one, folder, NULL);
    assert_same_choices(greedy(&d), greedy(&one));
    assert_int_equal(daemon_stop(&one), 0);
    assert_int_equal(daemon_stop(&d), 0);
    refused(folder, args("--tensor-parallel-size 3"), "num_attention_heads is 4");
}

static void reload_every_shard(void)
{
    struct daemon one = {0};
    const char *other = daemon_model(test_folder(), false, 8);
    daemon_post(ranks.socket, "/reload", 200, test_text("{\"model\": \"%s\"}", other));
    daemon_start(&one, other, args("--speculative ngram:3"));
    assert_same_choices(greedy(&ranks), greedy(&one));
    daemon_end(&one);
}

// ---- ends ---------------------------------------------------------------------------------------
static void name_a_follower_that_is_killed(void)
{
    const json_t *shard = json_at(json_of_file(ranks.bridge), "roles.1");
    const pid_t follower = (pid_t)int_of(shard, "pid");
    assert_string_equal(text_of(shard, "role"), "shard:1");
    assert_true(follower > 0 && follower != ranks.child.pid);
    const int64_t start_ns = clock_now_ns();
    kill(follower, SIGKILL);
    test_wait(&ranks.child, 10000);
    assert_true(clock_ms_since(start_ns) < 10000);
    assert_contains(test_read(ranks.log),
                    test_text("pid %d) of the tensor-parallel server is gone", (int)follower));
}

TEST(two_ranks_serve_one_model)
{
    model = daemon_model(test_folder(), false, 3);
    start_ranks(&ranks, 2, model, args("--tensor-parallel-size 2 --speculative ngram:3"));
    give_what_one_gives();
    show_clients_every_shard();
    reload_every_shard();
    name_a_follower_that_is_killed();
}

// In e4m3 too: the twin is made when all have loaded, and anew by /reload. That its codes are those
// of one rank is what golden/test_shards compares.
static const char *base_checksum(const struct daemon *d)
{
    return text_of(daemon_get(d->socket, "/bridge/info?checksums=1", 200), "base.checksum");
}

TEST(two_ranks_in_e4m3)
{
    struct daemon two = {0}, one = {0};
    const char *folder = daemon_model(test_folder(), false, 3),
               *other = daemon_model(test_folder(), false, 8);
    const char *reload = test_text("{\"model\": \"%s\"}", other);
    mpirun_words(2);
    daemon_start(&two, folder, args("--tensor-parallel-size 2 --quantization fp8-weights"));
    daemon_start(&one, folder, args("--quantization fp8-weights"));
    assert_same_choices(samples(&two), samples(&one));
    daemon_post(two.socket, "/reload", 200, reload);
    daemon_post(one.socket, "/reload", 200, reload);
    assert_same_choices(samples(&two), samples(&one));
    const char *base = base_checksum(&two);
    assert_int_equal(daemon_stop(&two), 0);
    // the codes alone, in which the two have less, and which are an adapter's base just as well
    const int64_t both = int_of(daemon_get(one.socket, "/bridge/info", 200), "weight_bytes");
    daemon_start(&two, other,
                 args("--tensor-parallel-size 2 --quantization fp8-weights --inference-only"));
    assert_same_choices(samples(&two), samples(&one));
    assert_true(int_of(daemon_get(two.socket, "/bridge/info", 200), "weight_bytes") < both);
    assert_string_equal(base_checksum(&two), base);
    daemon_end(&one);
    assert_int_equal(daemon_stop(&two), 0);
}

// In f32, in which a GPU is not exact.
static const char *const *mtp_drafts(void)
{
    return JOIN(args("--speculative mtp:3 --draft-length fixed"),
                on_cpu() ? OPTIONS("--exact") : NULL);
}

// Two ranks give what one gives: those of `own` options beside `both`, which one has, too.
static void ranks_give_the_same(const char *folder, const char *const own[],
                                const char *const both[])
{
    struct daemon two = {0}, one = {0};
    daemon_start(&two, folder, JOIN(JOIN(args("--tensor-parallel-size 2"), own), both));
    daemon_start(&one, folder, both);
    // with drafts that are sampled, and that are not, some of which are accepted; no byte 0
    for (int i = 0; i < 2; i++) {
        const char *body =
            test_text("{\"prompt\": [7, 11, 7, 11, 7, 11, 90, 7, 11], \"n\": %d, "
                      "\"max_tokens\": 24, \"temperature\": %d, \"seed\": 5, "
                      "\"logprobs\": 2, \"return_tokens_as_token_ids\": true, "
                      "\"ignore_eos\": true, \"logit_bias\": {\"0\": -100, \"7\": 4, \"11\": 4}}",
                      i ? 3 : 1, i);
        assert_same_choices(daemon_post(two.socket, "/v1/completions", 200, body),
                            daemon_post(one.socket, "/v1/completions", 200, body));
    }
    static const char *const counts[] = {"vllm:spec_decode_num_drafts_total",
                                         "vllm:spec_decode_num_accepted_tokens_total"};
    for (int i = 0; i < 2; i++) {
        assert_true(daemon_metric(&two, counts[i]) > 0);
        if (on_cpu()) assert_true(daemon_metric(&two, counts[i]) == daemon_metric(&one, counts[i]));
    }
    assert_contains(test_output(0, OPTIONS(test_binary("cw-ipc-check"), two.bridge)),
                    "ok    rank 1: checksums");
    daemon_end(&one);
    assert_int_equal(daemon_stop(&two), 0);
}

// States of sequences are copied on every rank: those of samples of one prompt, and of drafts that
// were accepted.
TEST(two_ranks_carry_states)
{
    mpirun_words(2);
    static const char *const names[] = {"nemotron-h", "qwen35", "qwen3-next", "lfm2"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        ranks_give_the_same(tiny_tokenizer_beside(test_golden(names[i])), OPTIONS(NULL),
                            args("--speculative ngram:3 --draft-length fixed"));
}

// A layer that predicts further tokens has shards as the policy has, and a draft model.
TEST(two_ranks_draft)
{
    const char *qwen = test_folder(), *golden = test_path(test_root(), "tests/golden/mtp/qwen35");
    const char *latent = tiny_mtp_folder(300), *plain = daemon_model(test_folder(), false, 3);
    mpirun_words(2);
    assert_int_equal(symlink(test_path(golden, "config.json"), test_path(qwen, "config.json")), 0);
    assert_ok(generated_write(golden, qwen));
    ranks_give_the_same(qwen, OPTIONS(NULL), args("--speculative mtp:3 --draft-length fixed"));
    ranks_give_the_same(latent, OPTIONS(NULL), mtp_drafts());
    // of the first tokens alone, which the first rank holds, or not all of them
    ranks_give_the_same(latent, OPTIONS(NULL), JOIN(mtp_drafts(), args("--draft-vocabulary 101")));
    ranks_give_the_same(latent, OPTIONS(NULL), JOIN(mtp_drafts(), args("--draft-vocabulary 171")));
    for (int n = 0; n <= 171; n += 57)
        ranks_give_the_same(plain, OPTIONS(NULL),
                            args("--speculative draft_model:3 --draft %s --draft-length fixed "
                                 "--draft-vocabulary %d",
                                 daemon_model(test_folder(), false, 3), n));
}

// What a policy and a frozen model write by turns, in the order of samples.
static json_t *written(const struct daemon *d, const char *more, const char *sampling)
{
    struct wire_answer answer;
    daemon_request(d->socket, "POST", "/v1/rollouts", "",
                   test_text("{\"groups\":[{\"prompt_token_ids\":[7,11,7,11,90,7,11],\"n\":4}],%s"
                             "\"sampling\":{\"max_tokens\":24,\"seed\":5,\"ignore_eos\":true%s}}",
                             more, sampling),
                   &answer);
    if (answer.status != 200) fail_msg("%s", bytes_text(&answer.body));
    const json_t *lines = json_of_lines(bytes_text(&answer.body));
    json_t *ret = json_array(), *one;
    size_t i;
    assert_int_equal(json_array_size(lines), 4);
    for (int k = 0; k < 4; k++) json_array_append_new(ret, json_null());
    json_array_foreach (lines, i, one)
        json_array_set_new(ret, (size_t)int_of(one, "sample"),
                           json_pack("[O?, O?, O?, O?]", json_object_get(one, "token_ids"),
                                     json_object_get(one, "logprobs"),
                                     json_object_get(one, "model_mask"),
                                     json_object_get(one, "prompt_logprobs")));
    return ret;
}

// A frozen model has shards, too, and its states and blocks are copied on every rank.
TEST(two_ranks_write_in_tandem)
{
    mpirun_words(2);
    const char *states = tiny_tokenizer_beside(test_golden("qwen35"));
    const char *const rows[][2] = {
        {daemon_model(test_folder(), false, 3), daemon_model(test_folder(), false, 8)},
        {states, states}};
    static const char *const asks[][2] = {{"", ",\"tandem\":{}"},
                                          {"", ",\"tandem\":{\"p\":0}"},
                                          {"\"model\":\"frozen\",", ",\"prompt_logprobs\":1"},
                                          {"", ""}};
    for (int k = 0; k < 2; k++) {
        struct daemon two = {0}, one = {0};
        const char *const *frozen = args("--tandem-model %s --block-size 4", rows[k][1]);
        daemon_start(&two, rows[k][0], JOIN(args("--tensor-parallel-size 2"), frozen));
        daemon_start(&one, rows[k][0], frozen);
        for (int i = 0; i < 4; i++) {
            json_t *a = written(&two, asks[i][0], asks[i][1]),
                   *b = written(&one, asks[i][0], asks[i][1]);
            assert_alike(a, b);
            json_decref(a);
            json_decref(b);
        }
        assert_contains(test_output(0, OPTIONS(test_binary("cw-ipc-check"), two.bridge)),
                        "ok    rank 1: checksums");
        daemon_holds(&one, "frozen", rows[k][1]);
        assert_string_equal(text_of(json_of_file(two.bridge), "roles.3.role"), "shard:1:frozen");
        daemon_end(&one);
        assert_int_equal(daemon_stop(&two), 0);
    }
}

static void adapter_call(struct daemon *const servers[2], const char *path, int status,
                         const char *part, const char *body)
{
    for (int i = 0; i < 2; i++) daemon_call(servers[i], path, status, part, "%s", body);
}

// Requests of the base and of adapters, of which a batch has several, give the same on both.
static void adapted_alike(struct daemon *const servers[2])
{
    static const char *const names[] = {"a", "b", "c", "m"};
    for (int k = 0; k < 4; k++) {
        const char *body = test_text("{\"model\": \"%s\", \"prompt\": [[7, 11, 7, 11, 90], [5]], "
                                     "\"n\": 2, \"max_tokens\": 16, \"temperature\": 0.8, "
                                     "\"seed\": 5, \"logprobs\": 2, \"ignore_eos\": true, "
                                     "\"return_tokens_as_token_ids\": true}",
                                     names[k]);
        assert_same_choices(daemon_post(servers[0]->socket, "/v1/completions", 200, body),
                            daemon_post(servers[1]->socket, "/v1/completions", 200, body));
    }
}

// Adapters have shards as their matrices have; what is done to one is done to those of all ranks,
// or to none.
static void hold_adapters(const char *folder, const char *const own[])
{
    struct daemon two = {0}, one = {0}, *const servers[] = {&two, &one};
    const char *a = test_folder(), *b = test_folder();
    const char *const *both = args("--max-adapters 4 --max-lora-rank 4 --served-model-name m");
    assert_ok(tiny_adapter_write(a, folder, "{\"r\":4,\"target_modules\":\"all-linear\"}", 1));
    assert_ok(
        tiny_adapter_write(b, folder, "{\"r\":3,\"target_modules\":[\"o_proj\",\"lm_head\"]}", 2));
    daemon_start(&two, folder, JOIN(JOIN(args("--tensor-parallel-size 2"), own), both));
    daemon_start(&one, folder, both);
    const char *load = "{\"lora_name\":\"%s\",\"lora_path\":\"%s\"}";
    adapter_call(servers, "/v1/load_lora_adapter", 200, "added", test_text(load, "a", b));
    adapter_call(servers, "/v1/load_lora_adapter", 404, "/nowhere",
                 test_text(load, "b", "/nowhere"));
    adapter_call(servers, "/v1/load_lora_adapter", 200, "added", test_text(load, "b", b));
    adapter_call(servers, "/v1/load_lora_adapter", 200, "added",
                 "{\"lora_name\":\"c\",\"copy_of\":\"b\"}");
    adapted_alike(servers);
    adapter_call(servers, "/v1/unload_lora_adapter", 200, "removed", "{\"lora_name\":\"a\"}");
    adapter_call(servers, "/v1/load_lora_adapter", 200, "added", test_text(load, "a", a));
    adapted_alike(servers);
    adapter_call(servers, "/v1/load_lora_adapter", 200, "added",
                 "{\"lora_name\":\"new\",\"config\":{\"r\":2,\"target_modules\":\"all-linear\"}}");
    // torn, they are their folders' again, or new
    for (int i = 0; i < 2 && on_cpu(); i++) {
        tear_roles(servers[i], "policy adapter:a adapter:c", NULL, NULL);
        test_wait_for_text(servers[i]->log, "weights restored from", LIMIT_MS, NULL);
        daemon_wait(servers[i]);
    }
    adapted_alike(servers);
    const char *text = test_output(0, OPTIONS(test_binary("cw-ipc-check"), two.bridge));
    assert_contains(text, "ok    rank 1: checksums");
    assert_contains(text, "adapter:b");
    struct bridge_file *file;
    assert_ok(bridge_file_read(two.bridge, &file));
    assert_non_null(bridge_file_role(file, "shard:1:adapter:new"));
    bridge_file_free(file);
    daemon_end(&one);
    assert_int_equal(daemon_stop(&two), 0);
}

TEST(two_ranks_hold_adapters)
{
    mpirun_words(2);
    hold_adapters(daemon_model(test_folder(), false, 3), OPTIONS(NULL));
    hold_adapters(tiny_tokenizer_beside(test_golden("qwen35")), OPTIONS(NULL));
    hold_adapters(tiny_tokenizer_beside(test_golden("qwen3-moe")), args("--expert-parallel"));
}

// With one that all rows go to; of a latent vector; in groups; rounded, and as a folder stores
// them.
TEST(two_ranks_hold_whole_experts)
{
    mpirun_words(2);
    static const char *const rows[][2] = {{"qwen2-moe", "none"},  {"nemotron-h-latent", "none"},
                                          {"gemma4-moe", "none"}, {"deepseek-v3", "fp8-weights"},
                                          {"qwen3-moe", "fp8"},   {"gpt-oss-mxfp4", "mxfp4"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        ranks_give_the_same(
            tiny_tokenizer_beside(test_golden(rows[i][0])), args("--expert-parallel"),
            args("--speculative ngram:3 --draft-length fixed --quantization %s", rows[i][1]));
    // a layer that drafts has experts, too
    ranks_give_the_same(tiny_mtp_folder(300), args("--expert-parallel"), mtp_drafts());
}

// Which a bridge file lists for the rank that holds them.
TEST(a_shard_lists_its_own_experts)
{
    struct daemon d = {0};
    mpirun_words(2);
    daemon_start(&d, tiny_tokenizer_beside(test_golden("qwen3-moe")),
                 args("--tensor-parallel-size 2 --expert-parallel"));
    const json_t *bridge = json_of_file(d.bridge),
                 *ranks_of[] = {bridge, json_at(bridge, "roles.1")};
    assert_true(json_is_true(json_at(bridge, "expert_parallel")));
    assert_true(
        json_is_true(json_at(daemon_get(d.socket, "/bridge/info", 200), "expert_parallel")));
    for (int rank = 0; rank < 2; rank++)
        for (int e = 0; e < 8; e++) {
            const char *name = test_text("model.layers.0.mlp.experts.%d.down_proj.weight", e);
            const json_t *mapping =
                json_object_get(json_at(ranks_of[rank], "param_mappings"), name);
            assert_int_equal(mapping != NULL, e / 4 == rank);
            if (mapping) assert_int_equal(int_of(mapping, "shape.1"), 40);
        }
    assert_int_equal(daemon_stop(&d), 0);
}

TEST(what_has_no_shards_is_refused)
{
    const char *folder = daemon_model(test_folder(), false, 3);
    refused(folder, args("--expert-parallel"), "--expert-parallel needs --tensor-parallel-size");
    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "2", 1);
    refused(folder, args("--tensor-parallel-size 4"),
            "torchrun started 2 processes, and 4 share the model");
    refused(folder, args("--tensor-parallel-size 2 --expert-parallel"),
            "it has no experts; leave --expert-parallel away");
    refused(tiny_tokenizer_beside(test_golden("qwen3-moe-some")),
            args("--tensor-parallel-size 2 --expert-parallel"),
            "it has 5 experts, which 2 ranks cannot share evenly");
    setenv("WORLD_SIZE", "3", 1);
    refused(folder, args("--tensor-parallel-size 3"), "num_attention_heads is 4");
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
}
