/* test_adapters.c: LoRA adapters of a running server: loading and unloading as vLLM's and Atropos's
 * clients do, the base and two adapters in one batch to the bit, and weights that are replaced
 * under load. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/bridge_file.h"
#include "tests/support/daemon.h"
#include "tests/support/tiny_adapter.h"

#define ALL_LINEAR "{\"r\":4,\"lora_alpha\":4,\"target_modules\":\"all-linear\"}"
#define QV         "{\"r\":3,\"lora_alpha\":6,\"target_modules\":[\"q_proj\",\"v_proj\"]}"
enum { LIMIT_MS = 60000 };

static struct daemon d;
static const char *model;

static void start(void)
{
    model = daemon_model(test_folder(), true, 11);
    daemon_start(&d, model,
                 OPTIONS("--dtype", daemon_exact_dtype(), "--exact", "--max-adapters", "3",
                         "--max-lora-rank", "4", "--block-size", "4", "--served-model-name",
                         "base"));
}

static void stop(void)
{
    daemon_end(&d);
}

static const char *adapter_folder(const char *config, uint64_t seed)
{
    const char *folder = test_folder();
    assert_ok(tiny_adapter_write(folder, model, config, seed));
    return folder;
}

// Asserts the status; the sentence of an error has `part`, as has the text of a success.
static void call(const char *path, int status, const char *part, const char *format, ...)
{
    char body[1024];
    struct wire_answer a;
    va_list args;
    va_start(args, format);
    vsnprintf(body, sizeof body, format, args);
    va_end(args);
    daemon_request(d.socket, "POST", path, "", body, &a);
    if (a.status != status || !strstr(bytes_text(&a.body), part))
        fail_msg("%s %s: %d %s", path, body, a.status, bytes_text(&a.body));
}

static void load(const char *name, const char *folder)
{
    call("/v1/load_lora_adapter", 200, "added successfully",
         "{\"lora_name\":\"%s\",\"lora_path\":\"%s\"}", name, folder);
}

static void unload(const char *name)
{
    call("/v1/unload_lora_adapter", 200, "removed successfully", "{\"lora_name\":\"%s\"}", name);
}

TEST(names_are_as_in_vllm)
{
    const char *a = adapter_folder(ALL_LINEAR, 1), *b = adapter_folder(QV, 2);
    const char *wide = adapter_folder("{\"r\":5,\"target_modules\":[\"q_proj\"]}", 3);
    load("a", a);
    load("b", b);
    call("/v1/load_lora_adapter", 400, "has already been loaded",
         "{\"lora_name\":\"a\",\"lora_path\":\"%s\"}", a);
    call("/v1/load_lora_adapter", 400, "the model's own name",
         "{\"lora_name\":\"base\",\"lora_path\":\"%s\"}", a);
    call("/v1/load_lora_adapter", 404, "/nowhere",
         "{\"lora_name\":\"c\",\"lora_path\":\"/nowhere\"}");
    call("/v1/load_lora_adapter", 400, "--max-lora-rank 5",
         "{\"lora_name\":\"c\",\"lora_path\":\"%s\"}", wide);
    call("/v1/load_lora_adapter", 400, "use_dora",
         "{\"lora_name\":\"c\",\"config\":{\"use_dora\":true,\"target_modules\":\"all-linear\"}}");
    call("/v1/unload_lora_adapter", 404, "no adapter 'c'", "{\"lora_name\":\"c\"}");
    json_t *models = daemon_get(d.socket, "/v1/models", 200),
           *data = json_object_get(models, "data");
    assert_int_equal(json_array_size(data), 3);
    const json_t *card = json_array_get(data, 1);
    assert_string_equal(text_of(card, "id"), "a");
    assert_string_equal(text_of(card, "parent"), "base");
    daemon_get(d.socket, "/v1/models/b", 200);
    struct bridge_file *file;
    assert_ok(bridge_file_read(d.bridge, &file));
    assert_int_equal(file->n_roles, 3);
    assert_non_null(bridge_file_role(file, "adapter:a"));
    bridge_file_free(file);
    // the last place, and none after it
    call("/v1/load_lora_adapter", 200, "added", "{\"lora_name\":\"new\",\"config\":%s}",
         ALL_LINEAR);
    call("/v1/load_lora_adapter", 400, "--max-adapters",
         "{\"lora_name\":\"c\",\"lora_path\":\"%s\"}", a);
    // a response says who wrote it
    call("/v1/completions", 200, "\"model\":\"a\"",
         "{\"model\":\"a\",\"prompt\":[1],\"max_tokens\":1}");
    unload("new");
    unload("b");
    unload("a");
    call("/v1/completions", 404, "'a'", "{\"model\":\"a\",\"prompt\":[1]}");
    daemon_get(d.socket, "/v1/models/b", 404);
    assert_ok(bridge_file_read(d.bridge, &file));
    assert_int_equal(file->n_roles, 1);
    bridge_file_free(file);
}

// Of a server that was told how many, and no more.
TEST(the_rank_has_a_default)
{
    static struct daemon plain;
    char body[300];
    struct wire_answer a;
    daemon_start(&plain, model, OPTIONS("--max-adapters", "1"));
    json_t *status = daemon_get(plain.socket, "/lora/status", 200);
    assert_int_equal(int_of(status, "max_adapters"), 1);
    assert_int_equal(int_of(status, "max_lora_rank"), 64);
    snprintf(body, sizeof body, "{\"lora_name\":\"a\",\"lora_path\":\"%s\"}",
             adapter_folder(ALL_LINEAR, 1));
    daemon_request(plain.socket, "POST", "/v1/load_lora_adapter", "", body, &a);
    assert_int_equal(a.status, 200);
    assert_int_equal(daemon_stop(&plain), 0);
}

// ---- one batch ----------------------------------------------------------------------------------
static int ask(const char *who, int seed)
{
    char body[400], text[700];
    snprintf(body, sizeof body,
             "{\"prompt\":[5,6,7,8,9,10,11,12,%d],%s\"max_tokens\":12,\"temperature\":0.9,"
             "\"seed\":%d,\"logprobs\":1,\"ignore_eos\":true}",
             20 + seed, who, seed);
    int n = snprintf(text, sizeof text,
                     "POST /v1/completions HTTP/1.0\r\nContent-Length: %zu\r\n\r\n%s", strlen(body),
                     body);
    int fd = daemon_connect(d.socket);
    assert_true(fd >= 0 && daemon_send(fd, text, (size_t)n));
    return fd;
}

// The choice with its text and log-probabilities, in JSON as it came; the caller frees it.
static char *answer(int fd)
{
    struct wire_answer a;
    assert_true(wire_read(fd, LIMIT_MS, &a));
    if (a.status != 200) fail_msg("%d %s", a.status, bytes_text(&a.body));
    char *text = json_dumps(json_object_get(a.json, "choices"), 0);
    return text;
}

TEST(two_in_one_batch_are_as_alone)
{
    enum { WHO = 4, EACH = 6 };
    static const char *const who[WHO] = {"", "\"model\":\"a\",", "\"lora\":\"b\",",
                                         "\"model\":\"base\",\"lora\":\"a\","};
    char *alone[WHO][EACH];
    int fd[WHO][EACH];
    load("a", adapter_folder(ALL_LINEAR, 1));
    load("b", adapter_folder(QV, 2));
    for (int w = 0; w < WHO; w++)
        for (int i = 0; i < EACH; i++) alone[w][i] = answer(ask(who[w], i));
    for (int i = 0; i < EACH; i++)
        for (int w = 0; w < WHO; w++) fd[w][i] = ask(who[w], i);
    for (int w = 0; w < WHO; w++)
        for (int i = 0; i < EACH; i++) {
            char *together = answer(fd[w][i]);
            assert_string_equal(together, alone[w][i]);
            free(together);
        }
    // an adapter is one by either name, and no two are alike
    for (int i = 0; i < EACH; i++) {
        assert_string_equal(alone[1][i], alone[3][i]);
        assert_string_not_equal(alone[0][i], alone[1][i]);
        assert_string_not_equal(alone[0][i], alone[2][i]);
        assert_string_not_equal(alone[1][i], alone[2][i]);
    }
    for (int w = 0; w < WHO; w++)
        for (int i = 0; i < EACH; i++) free(alone[w][i]);
    unload("a");
    unload("b");
}

// Another adapter in the same place, under the same name, finds no block of the one before.
TEST(blocks_are_an_adapters_own)
{
    const char *a = adapter_folder(ALL_LINEAR, 1), *b = adapter_folder(ALL_LINEAR, 2);
    load("x", b);
    char *want = answer(ask("\"lora\":\"x\",", 0));
    unload("x");
    load("x", a);
    free(answer(ask("\"lora\":\"x\",", 0)));
    unload("x");
    load("x", b);
    char *have = answer(ask("\"lora\":\"x\",", 0));
    assert_string_equal(have, want);
    free(want);
    free(have);
    unload("x");
}

// ---- under load ---------------------------------------------------------------------------------
enum { SWAPS = 100, TOKENS = 4 };

static int ask_rollouts(void)
{
    static const char body[] =
        "{\"lora\":\"x\",\"groups\":[{\"prompt_token_ids\":[5,6,7,8,9],\"n\":8}],"
        "\"sampling\":{\"max_tokens\":4,\"temperature\":0,\"ignore_eos\":true}}";
    char text[600];
    int n =
        snprintf(text, sizeof text, "POST /v1/rollouts HTTP/1.0\r\nContent-Length: %zu\r\n\r\n%s",
                 sizeof body - 1, body);
    int fd = daemon_connect(d.socket);
    assert_true(fd >= 0 && daemon_send(fd, text, (size_t)n));
    return fd;
}

// Samples of one version have the tokens of that version's weights: want[0] of even swaps (and of
// `first`, the version before any), want[1] of odd. Returns how many there were.
static int check_rollouts(int fd, json_int_t first, json_t *const want[2])
{
    struct wire_answer a;
    int n = 0;
    assert_true(wire_read(fd, LIMIT_MS, &a));
    if (a.status != 200) fail_msg("%d %s", a.status, bytes_text(&a.body));
    char *remaining = NULL;
    for (char *line = strtok_r((char *)bytes_text(&a.body), "\n", &remaining); line;
         line = strtok_r(NULL, "\n", &remaining)) {
        json_t *sample = json_loads(line, JSON_ALLOW_NUL, NULL); // token 0 is one
        const json_t *versions = json_object_get(sample, "weight_versions");
        if (!json_object_get(sample, "token_ids")) fail_msg("%s", line);
        json_int_t v = int_of(versions, "0");
        bool one = json_array_size(versions) == TOKENS;
        for (size_t i = 0; i < json_array_size(versions); i++)
            one = one && json_integer_value(json_array_get(versions, i)) == v;
        if (one && !json_equal(json_object_get(sample, "token_ids"), want[(v - first) / 2 % 2]))
            fail_msg("version %lld: %s", (long long)v, line);
        n += one;
        json_decref(sample);
    }
    return n;
}

static json_t *tokens_of_now(json_int_t *ret_version)
{
    struct wire_answer a;
    assert_true(wire_read(ask_rollouts(), LIMIT_MS, &a));
    json_t *sample = json_loads(bytes_text(&a.body), JSON_DISABLE_EOF_CHECK | JSON_ALLOW_NUL, NULL);
    json_t *ids = json_incref(json_object_get(sample, "token_ids"));
    assert_int_equal(json_array_size(ids), TOKENS);
    *ret_version = int_of(sample, "weight_versions.0");
    json_decref(sample);
    return ids;
}

static void swap(const char *folder)
{
    call("/v1/load_lora_adapter", 200, "added",
         "{\"lora_name\":\"x\",\"lora_path\":\"%s\",\"load_inplace\":true}", folder);
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
    swap(folder[1]);
    want[1] = tokens_of_now(&next);
    assert_int_equal(next, version + 2);
    assert_false(json_equal(want[0], want[1]));
    for (int i = 0; i < STREAMS; i++) fd[i] = ask_rollouts();
    for (int i = 0; i < SWAPS; i++) {
        swap(folder[i % 2]);
        n += check_rollouts(ask_rollouts(), version, want); // of this version, whole
        n += check_rollouts(fd[i % STREAMS], version, want);
        fd[i % STREAMS] = ask_rollouts();
    }
    for (int i = 0; i < STREAMS; i++) n += check_rollouts(fd[i], version, want);
    assert_true(n >= 8 * SWAPS);
    // another config is another arena, and changes nothing
    json_decref(tokens_of_now(&version));
    call("/v1/load_lora_adapter", 400, "other targets",
         "{\"lora_name\":\"x\",\"lora_path\":\"%s\",\"load_inplace\":true}", adapter_folder(QV, 2));
    json_decref(tokens_of_now(&next));
    assert_int_equal(next, version);
    json_decref(want[0]);
    json_decref(want[1]);
    unload("x");
}

// A name that is taken away while samples are computed with it: they end as if it were there.
TEST(unloading_waits_for_samples)
{
    load("x", adapter_folder(ALL_LINEAR, 1));
    char *want = answer(ask("\"lora\":\"x\",", 3));
    daemon_post(d.socket, "/bridge/pause", 200, "{}");
    int fd = ask("\"lora\":\"x\",", 3);
    while (true) { // until it is inside
        json_t *health = daemon_get(d.socket, "/health", 200);
        json_int_t inside = int_of(health, "waiting") + int_of(health, "running");
        if (inside > 0) break;
        usleep(1000);
    }
    unload("x");
    call("/v1/completions", 404, "'x'", "{\"model\":\"x\",\"prompt\":[1]}");
    call("/v1/completions", 404, "no adapter",
         "{\"lora\":\"\",\"prompt\":[1]}"); // it has no name now
    daemon_post(d.socket, "/bridge/resume", 200, "{}");
    char *have = answer(fd);
    assert_string_equal(have, want);
    free(want);
    free(have);
    for (int i = 0; i < 3; i++) { // all room is there again
        char name[2] = {(char)('p' + i), 0};
        load(name, adapter_folder(QV, 2));
    }
    for (int i = 0; i < 3; i++) unload((char[]){(char)('p' + i), 0});
}

// ---- as Atropos asks ----------------------------------------------------------------------------
static char *generated(void)
{
    json_t *a = daemon_post(d.socket, "/generate", 200,
                            "{\"prompt\":{\"prompt_token_ids\":[5,6,7]},\"max_tokens\":6,"
                            "\"temperature\":0,\"logprobs\":0,\"ignore_eos\":true}");
    char *text = json_dumps(json_object_get(a, "token_ids"), 0);
    assert_non_null(text);
    return text;
}

TEST(the_active_adapter_generates)
{
    const char *a = adapter_folder(ALL_LINEAR, 1), *b = adapter_folder(ALL_LINEAR, 2);
    char *plain = generated();
    call("/lora/load", 200, "\"adapter_name\"", "{\"adapter_path\":\"%s\",\"adapter_name\":\"s1\"}",
         a);
    char *first = generated();
    call("/lora/load", 200, "\"adapter_name\"", "{\"adapter_path\":\"%s\"}", b);
    char *second = generated();
    json_t *status = daemon_get(d.socket, "/lora/status", 200);
    assert_int_equal(int_of(status, "load_count"), 2);
    assert_string_equal(text_of(status, "active_adapter_path"), b);
    assert_int_equal(json_array_size(json_object_get(status, "available_adapters")), 1);
    assert_string_not_equal(plain, first);
    assert_string_not_equal(first, second);
    call("/lora/unload", 200, "adapter_1", "{}");
    char *again = generated();
    assert_string_equal(again, plain);
    call("/lora/unload", 200, "null", "{}");
    free(plain);
    free(first);
    free(second);
    free(again);
}

TESTS_BETWEEN(start, stop)
