/* test_adapters.c: LoRA adapters of a running server: loading and unloading as vLLM's and Atropos's
 * clients do, the base and two adapters in one batch to the bit, and weights that are replaced
 * under load. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/bridge_file.h"
#include "tests/support/served.h"
#include "tests/support/tiny_adapter.h"

#define ALL_LINEAR "{\"r\":4,\"lora_alpha\":4,\"target_modules\":\"all-linear\"}"
#define QV         "{\"r\":3,\"lora_alpha\":6,\"target_modules\":[\"q_proj\",\"v_proj\"]}"
enum { LIMIT_MS = 60000 };

static const char *model;

static void start(void)
{
    model = daemon_model(test_folder(), true, 11);
    daemon_start(&served, model,
                 args("--dtype %s --exact --max-adapters 3 --max-lora-rank 4 --block-size 4 "
                      "--served-model-name base",
                      daemon_exact_dtype()));
}

static const char *adapter_folder(const char *config, uint64_t seed)
{
    const char *folder = test_folder();
    assert_ok(tiny_adapter_write(folder, model, config, seed));
    return folder;
}

static void load(const char *name, const char *folder)
{
    daemon_call(&served, "/v1/load_lora_adapter", 200, "added successfully",
                "{\"lora_name\":\"%s\",\"lora_path\":\"%s\"}", name, folder);
}

static void unload(const char *name)
{
    daemon_call(&served, "/v1/unload_lora_adapter", 200, "removed successfully",
                "{\"lora_name\":\"%s\"}", name);
}

TEST(names_are_as_in_vllm)
{
    const char *a = adapter_folder(ALL_LINEAR, 1), *b = adapter_folder(QV, 2);
    const char *wide = adapter_folder("{\"r\":5,\"target_modules\":[\"q_proj\"]}", 3);
    load("a", a);
    load("b", b);
    daemon_call(&served, "/v1/load_lora_adapter", 400, "has already been loaded",
                "{\"lora_name\":\"a\",\"lora_path\":\"%s\"}", a);
    daemon_call(&served, "/v1/load_lora_adapter", 400, "the model's own name",
                "{\"lora_name\":\"base\",\"lora_path\":\"%s\"}", a);
    daemon_call(&served, "/v1/load_lora_adapter", 404, "/nowhere",
                "{\"lora_name\":\"c\",\"lora_path\":\"/nowhere\"}");
    daemon_call(&served, "/v1/load_lora_adapter", 400, "--max-lora-rank 5",
                "{\"lora_name\":\"c\",\"lora_path\":\"%s\"}", wide);
    daemon_call(
        &served, "/v1/load_lora_adapter", 400, "use_dora",
        "{\"lora_name\":\"c\",\"config\":{\"use_dora\":true,\"target_modules\":\"all-linear\"}}");
    daemon_call(&served, "/v1/load_lora_adapter", 400, "\"param\":null", // of the request no field
                "{\"lora_name\":\"c\",\"config\":{\"r\":4,\"target_modules\":[\"c_attn\"]}}");
    const char *other = test_folder();
    test_put(other, "adapter_config.json", "{\"peft_type\":\"IA3\"}");
    daemon_call(&served, "/v1/load_lora_adapter", 400, "\"param\":null",
                "{\"lora_name\":\"c\",\"lora_path\":\"%s\"}", other);
    daemon_call(&served, "/v1/unload_lora_adapter", 404, "no adapter 'c'", "{\"lora_name\":\"c\"}");
    json_t *models = daemon_get(served.socket, "/v1/models", 200),
           *data = json_object_get(models, "data");
    assert_int_equal(json_array_size(data), 3);
    const json_t *card = json_array_get(data, 1);
    assert_string_equal(text_of(card, "id"), "a");
    assert_string_equal(text_of(card, "parent"), "base");
    daemon_get(served.socket, "/v1/models/b", 200);
    daemon_get(served.socket, "/v1/models/b/", 200);
    struct bridge_file *file;
    assert_ok(bridge_file_read(served.bridge, &file));
    assert_int_equal(file->n_roles, 3);
    assert_non_null(bridge_file_role(file, "adapter:a"));
    bridge_file_free(file);
    // the last place, and none after it
    daemon_call(&served, "/v1/load_lora_adapter", 200, "added",
                "{\"lora_name\":\"new\",\"config\":%s}", ALL_LINEAR);
    daemon_call(&served, "/v1/load_lora_adapter", 400, "--max-adapters",
                "{\"lora_name\":\"c\",\"lora_path\":\"%s\"}", a);
    // a response says who wrote it
    daemon_call(&served, "/v1/completions", 200, "\"model\":\"a\"",
                "{\"model\":\"a\",\"prompt\":[1],\"max_tokens\":1}");
    unload("new");
    unload("b");
    unload("a");
    daemon_call(&served, "/v1/completions", 404, "'a'", "{\"model\":\"a\",\"prompt\":[1]}");
    daemon_get(served.socket, "/v1/models/b", 404);
    assert_ok(bridge_file_read(served.bridge, &file));
    assert_int_equal(file->n_roles, 1);
    bridge_file_free(file);
}

// Of a server that was told how many, and no more.
TEST(the_rank_has_a_default)
{
    static struct daemon plain;
    daemon_start(&plain, model, args("--max-adapters 1"));
    json_t *status = daemon_get(plain.socket, "/lora/status", 200);
    assert_int_equal(int_of(status, "max_adapters"), 1);
    assert_int_equal(int_of(status, "max_lora_rank"), 64);
    daemon_load_adapter(&plain, "a", adapter_folder(ALL_LINEAR, 1));
    assert_int_equal(daemon_stop(&plain), 0);
}

// ---- one batch ----------------------------------------------------------------------------------
static int ask_one(const char *who, int seed)
{
    return daemon_ask(&served, "/v1/completions",
                      test_text("{\"prompt\":[5,6,7,8,9,10,11,12,%d],%s\"max_tokens\":12,"
                                "\"temperature\":0.9,\"seed\":%d,\"logprobs\":1,"
                                "\"ignore_eos\":true}",
                                20 + seed, who, seed));
}

// The choice with its text and log-probabilities, in JSON as it came.
static const char *answer(int fd)
{
    struct wire_answer a;
    assert_true(wire_read(fd, LIMIT_MS, &a));
    if (a.status != 200) fail_msg("%d %s", a.status, bytes_text(&a.body));
    return test_keep(json_dumps(json_object_get(a.json, "choices"), 0));
}

TEST(two_in_one_batch_are_as_alone)
{
    enum { WHO = 4, EACH = 6 };
    static const char *const who[WHO] = {"", "\"model\":\"a\",", "\"lora\":\"b\",",
                                         "\"model\":\"base\",\"lora\":\"a\","};
    const char *alone[WHO][EACH];
    int fd[WHO][EACH];
    load("a", adapter_folder(ALL_LINEAR, 1));
    load("b", adapter_folder(QV, 2));
    for (int w = 0; w < WHO; w++)
        for (int i = 0; i < EACH; i++) alone[w][i] = answer(ask_one(who[w], i));
    for (int i = 0; i < EACH; i++)
        for (int w = 0; w < WHO; w++) fd[w][i] = ask_one(who[w], i);
    for (int w = 0; w < WHO; w++)
        for (int i = 0; i < EACH; i++) assert_string_equal(answer(fd[w][i]), alone[w][i]);
    // an adapter is one by either name, and no two are alike
    for (int i = 0; i < EACH; i++) {
        assert_string_equal(alone[1][i], alone[3][i]);
        assert_string_not_equal(alone[0][i], alone[1][i]);
        assert_string_not_equal(alone[0][i], alone[2][i]);
        assert_string_not_equal(alone[1][i], alone[2][i]);
    }
    unload("a");
    unload("b");
}

// Another adapter in the same place, under the same name, finds no block of the one before.
TEST(blocks_are_an_adapters_own)
{
    const char *a = adapter_folder(ALL_LINEAR, 1), *b = adapter_folder(ALL_LINEAR, 2);
    load("x", b);
    const char *want = answer(ask_one("\"lora\":\"x\",", 0));
    unload("x");
    load("x", a);
    answer(ask_one("\"lora\":\"x\",", 0));
    unload("x");
    load("x", b);
    assert_string_equal(answer(ask_one("\"lora\":\"x\",", 0)), want);
    unload("x");
}

// ---- under load ---------------------------------------------------------------------------------
enum { SWAPS = 100, TOKENS = 4 };

static int ask_rollouts(void)
{
    static const char body[] =
        "{\"lora\":\"x\",\"groups\":[{\"prompt_token_ids\":[5,6,7,8,9],\"n\":8}],"
        "\"sampling\":{\"max_tokens\":4,\"temperature\":0,\"ignore_eos\":true}}";
    return daemon_ask(&served, "/v1/rollouts", body);
}

// Samples of one version have the tokens of that version's weights: want[0] of even swaps (and of
// `first`, the version before any), want[1] of odd. Returns how many there were.
static int check_rollouts(int fd, json_int_t first, json_t *const want[2])
{
    struct wire_answer a;
    int n = 0;
    assert_true(wire_read(fd, LIMIT_MS, &a));
    if (a.status != 200) fail_msg("%d %s", a.status, bytes_text(&a.body));
    const json_t *samples = json_of_lines(bytes_text(&a.body)), *sample;
    size_t k;
    json_array_foreach (samples, k, sample) {
        const json_t *versions = json_at(sample, "weight_versions");
        const json_int_t v = int_of(versions, "0");
        bool one = json_array_size(versions) == TOKENS;
        for (size_t i = 0; i < json_array_size(versions); i++)
            one = one && json_integer_value(json_array_get(versions, i)) == v;
        if (one && !json_equal(json_at(sample, "token_ids"), want[(v - first) / 2 % 2]))
            fail_msg("version %lld: %s", (long long)v, json_dumps(sample, 0));
        n += one;
    }
    return n;
}

static json_t *tokens_of_now(json_int_t *ret_version)
{
    struct wire_answer a;
    assert_true(wire_read(ask_rollouts(), LIMIT_MS, &a));
    const json_t *sample = json_array_get(json_of_lines(bytes_text(&a.body)), 0);
    json_t *ids = json_at(sample, "token_ids");
    assert_int_equal(json_array_size(ids), TOKENS);
    *ret_version = int_of(sample, "weight_versions.0");
    return ids;
}

TEST(a_hundred_swaps_under_load)
{
    enum { STREAMS = 3 };
    const char *folder[2] = {adapter_folder(ALL_LINEAR, 1), adapter_folder(ALL_LINEAR, 2)};
    json_t *want[2];
    json_int_t version, next;
    int fd[STREAMS], n = 0;
    load("x", folder[0]);
    want[0] = tokens_of_now(&version);
    daemon_load_adapter(&served, "x", folder[1]);
    want[1] = tokens_of_now(&next);
    assert_int_equal(next, version + 2);
    assert_false(json_equal(want[0], want[1]));
    for (int i = 0; i < STREAMS; i++) fd[i] = ask_rollouts();
    for (int i = 0; i < SWAPS; i++) {
        daemon_load_adapter(&served, "x", folder[i % 2]);
        n += check_rollouts(ask_rollouts(), version, want); // of this version, whole
        n += check_rollouts(fd[i % STREAMS], version, want);
        fd[i % STREAMS] = ask_rollouts();
    }
    for (int i = 0; i < STREAMS; i++) n += check_rollouts(fd[i], version, want);
    assert_true(n >= 8 * SWAPS);
    // another config is another arena, and changes nothing
    tokens_of_now(&version);
    daemon_call(&served, "/v1/load_lora_adapter", 400, "other targets",
                "{\"lora_name\":\"x\",\"lora_path\":\"%s\",\"load_inplace\":true}",
                adapter_folder(QV, 2));
    tokens_of_now(&next);
    assert_int_equal(next, version);
    unload("x");
}

// A name that is taken away while samples are computed with it: they end as if it were there.
TEST(unloading_waits_for_samples)
{
    load("x", adapter_folder(ALL_LINEAR, 1));
    const char *want = answer(ask_one("\"lora\":\"x\",", 3));
    ask("/bridge/pause", "{}");
    int fd = ask_one("\"lora\":\"x\",", 3);
    for (json_int_t inside = 0; inside == 0; usleep(1000)) {
        json_t *health = daemon_get(served.socket, "/health", 200);
        inside = int_of(health, "waiting") + int_of(health, "running");
    }
    unload("x");
    daemon_call(&served, "/v1/completions", 404, "'x'", "{\"model\":\"x\",\"prompt\":[1]}");
    daemon_call(&served, "/v1/completions", 404, "no adapter",
                "{\"lora\":\"\",\"prompt\":[1]}"); // it has no name now
    ask("/bridge/resume", "{}");
    assert_string_equal(answer(fd), want);
    for (int i = 0; i < 3; i++) load(test_text("%d", i), adapter_folder(QV, 2)); // all room again
    for (int i = 0; i < 3; i++) unload(test_text("%d", i));
}

// ---- as Atropos asks ----------------------------------------------------------------------------
static const char *generated(void)
{
    json_t *a = ask("/generate", "{\"prompt\":{\"prompt_token_ids\":[5,6,7]},\"max_tokens\":6,"
                                 "\"temperature\":0,\"logprobs\":0,\"ignore_eos\":true}");
    return test_keep(json_dumps(json_at(a, "token_ids"), 0));
}

TEST(the_active_adapter_generates)
{
    const char *a = adapter_folder(ALL_LINEAR, 1), *b = adapter_folder(ALL_LINEAR, 2);
    const char *plain = generated();
    daemon_call(&served, "/lora/load", 200, "\"adapter_name\"",
                "{\"adapter_path\":\"%s\",\"adapter_name\":\"s1\"}", a);
    const char *first = generated();
    daemon_call(&served, "/lora/load", 200, "\"adapter_name\"", "{\"adapter_path\":\"%s\"}", b);
    const char *second = generated();
    json_t *status = daemon_get(served.socket, "/lora/status", 200);
    assert_int_equal(int_of(status, "load_count"), 2);
    assert_string_equal(text_of(status, "active_adapter_path"), b);
    assert_int_equal(json_array_size(json_object_get(status, "available_adapters")), 1);
    assert_string_not_equal(plain, first);
    assert_string_not_equal(first, second);
    daemon_call(&served, "/lora/unload", 200, "adapter_1", "{}");
    assert_string_equal(generated(), plain);
    daemon_call(&served, "/lora/unload", 200, "null", "{}");
}

TESTS_BETWEEN(start, served_stop)
