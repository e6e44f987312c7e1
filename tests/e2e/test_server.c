/* test_server.c: every endpoint of a real cw-infer-server with a tiny random model: what is right,
 * what streams, what is refused. How it starts and stops is in test_server_life.c. */
#include "common/base/clock.h"
#include "tests/support/daemon.h"
#include "tests/support/tiny_tokenizer.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct daemon d;

static int start(void **state)
{
    static const char *const options[] = {"--max-batch",     "8",   "--max-queue", "192",
                                          "--max-body",      "64K", "--kv-memory", "32M",
                                          "--prefill-chunk", "24",  NULL};
    (void)state;
    daemon_start(&d, daemon_model(test_folder(), true, 7), options);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    int status = test_running(&d.child) ? daemon_stop(&d) : 1; // 1: it died meanwhile
    daemon_kill(&d);
    return status;
}

static const char *text_of(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    if (!json_is_string(value)) fail_msg("\"%s\" is not a string", key);
    return json_string_value(value);
}

static json_int_t int_of(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    if (!json_is_integer(value)) fail_msg("\"%s\" is not a whole number", key);
    return json_integer_value(value);
}

static json_t *choice_of(const json_t *answer, size_t i)
{
    json_t *choice = json_array_get(json_object_get(answer, "choices"), i);
    if (!choice) fail_msg("there is no choice %zu", i);
    return choice;
}

static double number_in_metrics(const char *name)
{
    struct wire_answer a;
    daemon_request(d.socket, "GET", "/metrics", "", NULL, &a);
    assert_int_equal(a.status, 200);
    const char *line = strstr(bytes_text(&a.body), name);
    while (line && line != a.body.data && line[-1] != '\n') line = strstr(line + 1, name);
    if (!line) fail_msg("no metric %s", name);
    double x = atof(strchr(line, '}') + 1);
    wire_answer_release(&a);
    return x;
}

// ---- what is there -----------------------------------------------------------------------------

static void test_health_and_models(void **state)
{
    (void)state;
    json_t *health = daemon_get(d.socket, "/health", 200);
    assert_string_equal(text_of(health, "status"), "ok");
    assert_int_equal(int_of(health, "weight_version") % 2, 0);
    assert_string_equal(text_of(health, "model"), "model");
    json_decref(health);
    json_t *models = daemon_get(d.socket, "/v1/models", 200);
    const json_t *one = json_array_get(json_object_get(models, "data"), 0);
    assert_string_equal(text_of(one, "id"), "model");
    assert_int_equal(int_of(one, "max_model_len"), 512);
    json_decref(models);
}

static void test_completion(void **state)
{
    (void)state;
    const char *body = "{\"model\":\"model\",\"prompt\":\"hello there\",\"max_tokens\":12,"
                       "\"temperature\":0,\"logprobs\":0}";
    json_t *a = daemon_post(d.socket, "/v1/completions", 200, body);
    json_t *b = daemon_post(d.socket, "/v1/completions", 200, body);
    const json_t *choice = choice_of(a, 0), *usage = json_object_get(a, "usage");
    assert_string_equal(text_of(a, "object"), "text_completion");
    assert_int_equal(json_array_size(json_object_get(choice, "token_ids")), 12);
    assert_string_equal(text_of(choice, "finish_reason"), "length");
    assert_int_equal(int_of(usage, "completion_tokens"), 12);
    assert_int_equal(int_of(usage, "total_tokens"), 12 + int_of(usage, "prompt_tokens"));
    assert_true(int_of(a, "weight_version") >= 2);
    assert_true(json_is_null(json_object_get(a, "spec_decode")));
    const json_t *logprobs = json_object_get(json_object_get(choice, "logprobs"), "token_logprobs");
    assert_int_equal(json_array_size(logprobs), 12);
    for (size_t i = 0; i < 12; i++)
        assert_true(json_number_value(json_array_get(logprobs, i)) <= 0);
    // greedy: the same again
    assert_true(json_equal(json_object_get(choice, "token_ids"),
                           json_object_get(choice_of(b, 0), "token_ids")));
    json_decref(a);
    json_decref(b);
}

static void test_prompts_of_every_form(void **state)
{
    (void)state;
    // "hello" is "hell" (259) and "o"
    json_t *text = daemon_post(d.socket, "/v1/completions", 200,
                               "{\"prompt\":\"hello\",\"max_tokens\":4,\"seed\":3}");
    json_t *ids = daemon_post(d.socket, "/v1/completions", 200,
                              "{\"prompt\":[259,111],\"max_tokens\":4,\"seed\":3}");
    json_t *many = daemon_post(d.socket, "/v1/completions", 200,
                               "{\"prompt\":[[259,111],[5]],\"max_tokens\":4,\"seed\":3,\"n\":2}");
    json_t *texts = daemon_post(d.socket, "/v1/completions", 200,
                                "{\"prompt\":[\"hello\",\"x\"],\"max_tokens\":4,\"seed\":3}");
    const json_t *want = json_object_get(choice_of(text, 0), "token_ids");
    assert_true(json_equal(want, json_object_get(choice_of(ids, 0), "token_ids")));
    assert_true(json_equal(want, json_object_get(choice_of(many, 0), "token_ids")));
    assert_true(json_equal(want, json_object_get(choice_of(texts, 0), "token_ids")));
    assert_int_equal(json_array_size(json_object_get(many, "choices")), 4);
    assert_int_equal(int_of(choice_of(many, 3), "index"), 3);
    assert_false(json_equal(want, json_object_get(choice_of(many, 1), "token_ids")));
    json_decref(text);
    json_decref(ids);
    json_decref(many);
    json_decref(texts);
}

static void test_seeds(void **state)
{
    (void)state;
    const char *form = "{\"prompt\":\"abc\",\"max_tokens\":16,\"seed\":%d,\"n\":%d}";
    char body[3][128];
    snprintf(body[0], sizeof body[0], form, 11, 3);
    snprintf(body[1], sizeof body[1], form, 11, 1);
    snprintf(body[2], sizeof body[2], form, 12, 1);
    json_t *three = daemon_post(d.socket, "/v1/completions", 200, body[0]);
    json_t *one = daemon_post(d.socket, "/v1/completions", 200, body[1]);
    json_t *other = daemon_post(d.socket, "/v1/completions", 200, body[2]);
    const json_t *ids = json_object_get(choice_of(one, 0), "token_ids");
    assert_true(json_equal(ids, json_object_get(choice_of(three, 0), "token_ids")));
    assert_false(json_equal(ids, json_object_get(choice_of(three, 1), "token_ids")));
    assert_false(json_equal(ids, json_object_get(choice_of(other, 0), "token_ids")));
    json_decref(three);
    json_decref(one);
    json_decref(other);
}

static void test_top_logprobs(void **state)
{
    (void)state;
    json_t *a =
        daemon_post(d.socket, "/v1/completions", 200,
                    "{\"prompt\":\"abc\",\"max_tokens\":6,\"temperature\":0,\"logprobs\":3}");
    const json_t *l = json_object_get(choice_of(a, 0), "logprobs");
    for (size_t i = 0; i < 6; i++) {
        double sampled = json_number_value(json_array_get(json_object_get(l, "token_logprobs"), i));
        json_t *top = json_array_get(json_object_get(l, "top_logprobs"), i), *value;
        const char *key;
        double best = -INFINITY;
        assert_in_range(json_object_size(top), 1, 4);
        json_object_foreach (top, key, value) best = fmax(best, json_number_value(value));
        assert_true(best == sampled); // greedy takes the likeliest, and its number is one
    }
    json_decref(a);
}

// All 300 tokens, once: the distribution sums to 1 and holds the sampled token.
static void test_logprobs_are_a_distribution(void **state)
{
    (void)state;
    json_t *a =
        daemon_post(d.socket, "/v1/rollouts", 200,
                    "{\"groups\":[{\"prompt_token_ids\":[1,2,3]}],\"sampling\":{\"max_tokens\":"
                    "8,\"top_k\":20,\"seed\":5}}");
    const json_t *raw = json_object_get(a, "logprobs"), *cut = json_object_get(a, "cut_logprobs");
    const json_t *mass = json_object_get(a, "kept_mass");
    assert_int_equal(json_array_size(raw), 8);
    for (size_t i = 0; i < 8; i++) {
        double l = json_number_value(json_array_get(raw, i)),
               c = json_number_value(json_array_get(cut, i));
        double kept = json_number_value(json_array_get(mass, i));
        assert_true(l <= c && c <= 0 && kept > 0 && kept <= 1);
        assert_true(fabs(exp(l - c) - kept) < 1e-4);
    }
    json_decref(a);
}

static void test_chat(void **state)
{
    (void)state;
    const char *chat = "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"max_tokens\":10,"
                       "\"temperature\":0,\"logprobs\":true,\"top_logprobs\":2}";
    json_t *a = daemon_post(d.socket, "/v1/chat/completions", 200, chat);
    json_t *b =
        daemon_post(d.socket, "/v1/completions", 200,
                    "{\"prompt\":\"<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n\","
                    "\"max_tokens\":10,\"temperature\":0}");
    const json_t *message = json_object_get(choice_of(a, 0), "message");
    assert_string_equal(text_of(a, "object"), "chat.completion");
    assert_string_equal(text_of(message, "role"), "assistant");
    assert_true(
        json_equal(json_object_get(message, "content"), json_object_get(choice_of(b, 0), "text")));
    assert_int_equal(int_of(json_object_get(a, "usage"), "prompt_tokens"),
                     int_of(json_object_get(b, "usage"), "prompt_tokens"));
    const json_t *content =
        json_object_get(json_object_get(choice_of(a, 0), "logprobs"), "content");
    assert_int_equal(json_array_size(content), 10);
    assert_int_equal(json_array_size(json_object_get(json_array_get(content, 0), "top_logprobs")),
                     2);
    json_decref(a);
    json_decref(b);
}

// ---- streams -----------------------------------------------------------------------------------

struct joined { // what the chunks of a stream give together, by choice
    struct bytes text[4];
    json_t *ids[4], *logprobs[4];
    char finish[4][16];
    json_t *usage;
    int chunks;
    bool done;
};

static void join_chunk(struct joined *j, const json_t *chunk)
{
    const json_t *choice = json_array_get(json_object_get(chunk, "choices"), 0);
    j->chunks++;
    if (!choice) {
        j->usage = json_incref(json_object_get(chunk, "usage"));
        return;
    }
    json_int_t i = int_of(choice, "index");
    assert_in_range(i, 0, 3);
    const json_t *delta = json_object_get(choice, "delta");
    const json_t *text =
        delta ? json_object_get(delta, "content") : json_object_get(choice, "text");
    assert_true(json_is_string(text));
    bytes_append(&j->text[i], json_string_value(text), json_string_length(text));
    if (!j->ids[i]) j->ids[i] = json_array();
    if (!j->logprobs[i]) j->logprobs[i] = json_array();
    json_array_extend(j->ids[i], json_object_get(choice, "token_ids"));
    const json_t *l = json_object_get(choice, "logprobs");
    json_t *list = json_object_get(l, json_object_get(l, "content") ? "content" : "token_logprobs");
    if (list) json_array_extend(j->logprobs[i], list);
    const char *finish = json_string_value(json_object_get(choice, "finish_reason"));
    if (finish) {
        assert_int_equal(j->finish[i][0], 0); // once
        snprintf(j->finish[i], sizeof j->finish[i], "%s", finish);
    }
}

static void join_stream(const char *path, const char *body, struct joined *ret)
{
    struct wire_answer a;
    char *save = NULL;
    memset(ret, 0, sizeof *ret);
    daemon_request(d.socket, "POST", path, "", body, &a);
    assert_int_equal(a.status, 200);
    assert_contains(bytes_text(&a.head), "text/event-stream");
    for (char *line = strtok_r(a.body.data, "\n", &save); line;
         line = strtok_r(NULL, "\n", &save)) {
        assert_int_equal(strncmp(line, "data: ", 6), 0);
        assert_false(ret->done);
        if (strcmp(line, "data: [DONE]") == 0) {
            ret->done = true;
            continue;
        }
        json_t *chunk = json_loads(line + 6, JSON_ALLOW_NUL, NULL);
        if (!chunk) fail_msg("not JSON: %s", line);
        join_chunk(ret, chunk);
        json_decref(chunk);
    }
    assert_true(ret->done);
    wire_answer_release(&a);
}

static void joined_release(struct joined *j)
{
    for (int i = 0; i < 4; i++) {
        bytes_release(&j->text[i]);
        json_decref(j->ids[i]);
        json_decref(j->logprobs[i]);
    }
    json_decref(j->usage);
}

static json_int_t cached_of(const json_t *usage)
{
    return int_of(json_object_get(usage, "prompt_tokens_details"), "cached_tokens");
}

static void compare_stream(const char *path, const char *fields, int n)
{
    char body[512];
    struct joined j;
    snprintf(body, sizeof body, "{%s}", fields);
    json_t *whole = daemon_post(d.socket, path, 200, body);
    snprintf(body, sizeof body, "{%s,\"stream\":true,\"stream_options\":{\"include_usage\":true}}",
             fields);
    join_stream(path, body, &j);
    for (int i = 0; i < n; i++) {
        const json_t *choice = choice_of(whole, (size_t)i),
                     *l = json_object_get(choice, "logprobs");
        const json_t *message = json_object_get(choice, "message");
        const json_t *text =
            json_object_get(message ? message : choice, message ? "content" : "text");
        assert_int_equal(j.text[i].len, json_string_length(text));
        assert_memory_equal(bytes_text(&j.text[i]), json_string_value(text), j.text[i].len);
        assert_true(json_equal(j.ids[i], json_object_get(choice, "token_ids")));
        assert_string_equal(j.finish[i], text_of(choice, "finish_reason"));
        const json_t *list = json_object_get(l, message ? "content" : "token_logprobs");
        if (list) assert_true(json_array_size(list) == json_array_size(j.logprobs[i]));
        if (list && !message) // batches differ between the two runs, so rounding may
            for (size_t k = 0; k < json_array_size(list); k++)
                assert_true(fabs(json_number_value(json_array_get(list, k)) -
                                 json_number_value(json_array_get(j.logprobs[i], k))) < 1e-4);
    }
    assert_non_null(j.usage);
    assert_true(cached_of(j.usage) >= cached_of(json_object_get(whole, "usage"))); // asked again
    json_object_del(j.usage, "prompt_tokens_details");
    json_object_del(json_object_get(whole, "usage"), "prompt_tokens_details");
    assert_true(json_equal(j.usage, json_object_get(whole, "usage")));
    joined_release(&j);
    json_decref(whole);
}

static void test_stream_equals_whole(void **state)
{
    (void)state;
    compare_stream("/v1/completions",
                   "\"prompt\":\"tell\",\"max_tokens\":40,\"seed\":1,\"n\":3,\"logprobs\":0", 3);
    compare_stream("/v1/completions", "\"prompt\":\"tell\",\"max_tokens\":40,\"seed\":2", 1);
    compare_stream("/v1/completions",
                   "\"prompt\":\"tell\",\"max_tokens\":20,\"seed\":2,\"n\":2,\"echo\":true,"
                   "\"logprobs\":1,\"stop\":[\"e\"]",
                   2);
    compare_stream("/v1/completions",
                   "\"prompt\":[1,2,3],\"max_tokens\":200,\"seed\":3,\"stop\":[\"a\",\"b\",\"cc\"]",
                   1);
    compare_stream(
        "/v1/chat/completions",
        "\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"max_tokens\":30,\"seed\":4,"
        "\"n\":2,\"logprobs\":true",
        2);
}

// ---- stop --------------------------------------------------------------------------------------

static json_t *with_stop(const char *stop, const char *more)
{
    json_t *text = json_string(stop);
    char *quoted = json_dumps(text, JSON_ENCODE_ANY), body[512];
    snprintf(body, sizeof body, "{\"prompt\":\"once\",\"max_tokens\":60,\"seed\":21,\"stop\":%s%s}",
             quoted, more);
    json_decref(text);
    free(quoted);
    return daemon_post(d.socket, "/v1/completions", 200, body);
}

static void test_stop_string(void **state)
{
    (void)state;
    json_t *free_run = with_stop("never to be found in here", "");
    const char *text = text_of(choice_of(free_run, 0), "text");
    size_t len = json_string_length(json_object_get(choice_of(free_run, 0), "text"));
    const json_t *all = json_object_get(choice_of(free_run, 0), "token_ids");
    assert_string_equal(text_of(choice_of(free_run, 0), "finish_reason"), "length");
    assert_int_equal(json_array_size(all), 60);
    // three characters from the middle: almost always three tokens
    assert_int_equal(strlen(text), len); // this seed's text has no U+0000
    size_t middle = len / 2, end;
    while (((unsigned char)text[middle] & 0xc0) == 0x80) middle++;
    end = middle;
    for (int i = 0; i < 3; i++) do
            end++;
        while (((unsigned char)text[end] & 0xc0) == 0x80);
    char stop_text[32] = {0};
    memcpy(stop_text, text + middle, end - middle);
    size_t first = (size_t)(strstr(text, stop_text) - text);

    json_t *cut = with_stop(stop_text, "");
    const json_t *ids = json_object_get(choice_of(cut, 0), "token_ids");
    const char *cut_text = text_of(choice_of(cut, 0), "text");
    assert_string_equal(text_of(choice_of(cut, 0), "finish_reason"), "stop");
    assert_string_equal(text_of(choice_of(cut, 0), "stop_reason"), stop_text);
    assert_int_equal(strlen(cut_text), first);
    assert_memory_equal(cut_text, text, first);
    assert_true(json_array_size(ids) < 60);
    for (size_t i = 0; i < json_array_size(ids); i++)
        assert_true(json_equal(json_array_get(ids, i), json_array_get(all, i)));
    assert_int_equal(int_of(json_object_get(cut, "usage"), "completion_tokens"),
                     json_array_size(ids));

    json_t *with = with_stop(stop_text, ",\"include_stop_str_in_output\":true");
    assert_int_equal(strlen(text_of(choice_of(with, 0), "text")), first + strlen(stop_text));
    json_decref(free_run);
    json_decref(cut);
    json_decref(with);
}

static void test_stop_token(void **state)
{
    (void)state;
    const char *form = "{\"prompt\":\"once\",\"max_tokens\":30,\"seed\":9%s}";
    char body[128], more[64];
    snprintf(body, sizeof body, form, "");
    json_t *all = daemon_post(d.socket, "/v1/completions", 200, body);
    const json_t *ids = json_object_get(choice_of(all, 0), "token_ids");
    json_int_t stop_id = json_integer_value(json_array_get(ids, 10));
    size_t first = 0;
    while (json_integer_value(json_array_get(ids, first)) != stop_id) first++;
    snprintf(more, sizeof more, ",\"stop_token_ids\":[%d]", (int)stop_id);
    snprintf(body, sizeof body, form, more);
    json_t *cut = daemon_post(d.socket, "/v1/completions", 200, body);
    const json_t *cut_ids = json_object_get(choice_of(cut, 0), "token_ids");
    assert_int_equal(json_array_size(cut_ids), first + 1); // the token itself is the last
    assert_string_equal(text_of(choice_of(cut, 0), "finish_reason"), "stop");
    assert_int_equal(int_of(choice_of(cut, 0), "stop_reason"), stop_id);
    json_t *same = daemon_post(d.socket, "/generate", 200, body);
    const json_t *output = json_array_get(json_object_get(same, "outputs"), 0);
    assert_true(json_equal(json_object_get(output, "token_ids"), cut_ids));
    assert_int_equal(int_of(output, "stop_reason"), stop_id);
    json_decref(all);
    json_decref(cut);
    json_decref(same);
}

// ---- rollouts and /generate --------------------------------------------------------------------

static void check_telemetry(const json_t *line, int prompt, int generated)
{
    static const char *const numbers[] = {
        "cached_prompt_tokens", "queue_ms",   "first_token_ms",   "latency_ms",
        "kv_bytes_peak",        "num_drafts", "num_draft_tokens", "num_accepted_tokens"};
    const json_t *t = json_object_get(line, "telemetry");
    assert_int_equal(int_of(t, "prompt_tokens"), prompt);
    assert_int_equal(int_of(t, "generated_tokens"), generated);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!json_is_number(json_object_get(t, numbers[i]))) fail_msg("no %s", numbers[i]);
    assert_true(int_of(t, "kv_bytes_peak") > 0);
    assert_true(json_is_null(json_object_get(t, "accept_rate")));
    assert_true(json_is_array(json_object_get(t, "num_accepted_tokens_per_pos")));
    assert_non_null(json_object_get(t, "mean_acceptance_length"));
    assert_int_equal(int_of(t, "weight_version_first"), int_of(t, "weight_version_last"));
    assert_true(json_number_value(json_object_get(t, "first_token_ms")) <=
                json_number_value(json_object_get(t, "latency_ms")));
}

static void test_rollouts(void **state)
{
    (void)state;
    struct wire_answer a;
    int seen[3] = {0}, lines = 0;
    char *save = NULL;
    daemon_request(d.socket, "POST", "/v1/rollouts", "",
                   "{\"groups\":[{\"id\":\"a\",\"prompt_token_ids\":[1,2,3],\"n\":4},"
                   "{\"id\":7,\"prompt\":\"hello\"},"
                   "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"n\":2}],"
                   "\"sampling\":{\"n\":3,\"max_tokens\":20,\"temperature\":0.7,\"seed\":4}}",
                   &a);
    assert_int_equal(a.status, 200);
    assert_contains(bytes_text(&a.head), "application/x-ndjson");
    for (char *at = strtok_r(a.body.data, "\n", &save); at;
         at = strtok_r(NULL, "\n", &save), lines++) {
        json_t *line = json_loads(at, JSON_ALLOW_NUL, NULL);
        if (!line) fail_msg("not JSON: %s", at);
        const json_t *id = json_object_get(line, "group_id"),
                     *ids = json_object_get(line, "token_ids");
        int group = json_is_string(id) ? 0 : json_integer_value(id) == 7 ? 1 : 2;
        size_t n = json_array_size(ids);
        if (group == 2) assert_int_equal(json_integer_value(id), 2); // its index
        assert_int_equal(seen[group] & 1 << int_of(line, "sample"), 0);
        seen[group] |= 1 << int_of(line, "sample");
        assert_int_equal(n, 20);
        assert_int_equal(json_array_size(json_object_get(line, "logprobs")), n);
        assert_int_equal(json_array_size(json_object_get(line, "weight_versions")), n);
        assert_null(json_object_get(line, "cut_logprobs"));
        assert_string_equal(text_of(line, "finish_reason"), "length");
        text_of(line, "text");
        const json_t *prompt = json_object_get(line, "prompt_token_ids");
        assert_true((prompt != NULL) == (group != 0)); // only what the server tokenised
        if (prompt) assert_true(json_array_size(prompt) > 0);
        if (group == 1) assert_int_equal(json_array_size(prompt), 2);
        check_telemetry(line, prompt ? (int)json_array_size(prompt) : 3, (int)n);
        json_decref(line);
    }
    wire_answer_release(&a);
    assert_int_equal(lines, 9);
    assert_int_equal(seen[0], 15);
    assert_int_equal(seen[1], 7);
    assert_int_equal(seen[2], 3);
}

static void test_rollouts_equal_completions(void **state)
{
    (void)state;
    json_t *line = daemon_post(d.socket, "/v1/rollouts", 200,
                               "{\"groups\":[{\"prompt_token_ids\":[9,8,7]}],\"sampling\":"
                               "{\"max_tokens\":16,\"seed\":77,\"stop\":\"zz\"}}");
    json_t *completion = daemon_post(d.socket, "/v1/completions", 200,
                                     "{\"prompt\":[9,8,7],\"max_tokens\":16,\"seed\":77}");
    assert_true(json_equal(json_object_get(line, "token_ids"),
                           json_object_get(choice_of(completion, 0), "token_ids")));
    json_decref(line);
    json_decref(completion);
}

static void test_generate(void **state)
{
    (void)state;
    json_t *a = daemon_post(d.socket, "/generate", 200,
                            "{\"prompt\":{\"prompt_token_ids\":[1,2,3]},\"n\":2,\"max_tokens\":5,"
                            "\"temperature\":1.0,\"logprobs\":0}");
    const json_t *ids = json_object_get(a, "completion_ids"),
                 *logprobs = json_object_get(a, "logprobs");
    const json_t *outputs = json_object_get(a, "outputs");
    assert_int_equal(json_array_size(ids), 2);
    assert_int_equal(json_array_size(json_array_get(ids, 1)), 5);
    assert_int_equal(json_array_size(json_array_get(logprobs, 1)), 5);
    assert_int_equal(json_array_size(json_array_get(json_object_get(a, "prompt_ids"), 0)), 3);
    assert_int_equal(json_array_size(outputs), 2);
    assert_true(json_equal(json_object_get(json_array_get(outputs, 1), "token_ids"),
                           json_array_get(ids, 1)));
    json_decref(a);
    a = daemon_post(d.socket, "/generate", 200, "{\"prompts\":[\"hello\",[1,2]],\"max_tokens\":2}");
    assert_int_equal(json_array_size(json_object_get(a, "completion_ids")), 2);
    assert_true(json_is_null(json_object_get(a, "logprobs")));
    json_decref(a);
}

// ---- what is refused ---------------------------------------------------------------------------

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *path, *body;
        int status;
        const char *part; // of the message
    } cases[] = {
        {"/v1/completions", "{\"prompt\":", 400, "request"},
        {"/v1/completions", "[1]", 400, "object"},
        {"/v1/completions", "", 400, "request"},
        {"/v1/completions", "{}", 400, "\"prompt\""},
        {"/v1/completions", "{\"prompt\":\"\"}", 400, "\"prompt\""},
        {"/v1/completions", "{\"prompt\":[]}", 400, "\"prompt\""},
        {"/v1/completions", "{\"prompt\":7}", 400, "\"prompt\""},
        {"/v1/completions", "{\"prompt\":[1,\"a\"]}", 400, "entry 1"},
        {"/v1/completions", "{\"prompt\":[1,300]}", 400, "300"},
        {"/v1/completions", "{\"prompt\":[-1]}", 400, "-1"},
        {"/v1/completions", "{\"prompt\":[1,99999999999999]}", 400, "99999999999999"},
        {"/v1/completions", "{\"prompt\":\"a\",\"temperature\":-1}", 400, "\"temperature\""},
        {"/v1/completions", "{\"prompt\":\"a\",\"temperature\":\"hot\"}", 400, "\"temperature\""},
        {"/v1/completions", "{\"prompt\":\"a\",\"top_p\":0}", 400, "\"top_p\""},
        {"/v1/completions", "{\"prompt\":\"a\",\"top_p\":1.5}", 400, "\"top_p\""},
        {"/v1/completions", "{\"prompt\":\"a\",\"top_k\":-2}", 400, "\"top_k\""},
        {"/v1/completions", "{\"prompt\":\"a\",\"min_p\":2}", 400, "\"min_p\""},
        {"/v1/completions", "{\"prompt\":\"a\",\"n\":0}", 400, "\"n\""},
        {"/v1/completions", "{\"prompt\":\"a\",\"n\":5000}", 400, "\"n\""},
        {"/v1/completions", "{\"prompt\":\"a\",\"n\":201}", 400, "\"n\""},
        {"/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":-1}", 400, "\"max_tokens\""},
        {"/v1/completions", "{\"prompt\":\"a\",\"logprobs\":21}", 400, "\"logprobs\""},
        {"/v1/completions", "{\"prompt\":\"a\",\"stop\":[1]}", 400, "\"stop\""},
        {"/v1/completions", "{\"prompt\":\"a\",\"stop\":\"\"}", 400, "\"stop\""},
        {"/v1/completions", "{\"prompt\":\"a\",\"stop_token_ids\":[300]}", 400,
         "\"stop_token_ids\""},
        {"/v1/rollouts", "{\"groups\":[{\"prompt\":\"a\"}],\"sampling\":{\"echo\":true}}", 400,
         "\"echo\""},
        {"/v1/completions", "{\"prompt\":\"a\",\"best_of\":3}", 400, "\"best_of\""},
        {"/v1/completions", "{\"prompt\":\"a\",\"presence_penalty\":3}", 400,
         "\"presence_penalty\""},
        {"/v1/completions", "{\"prompt\":\"a\",\"logit_bias\":{\"1\":101}}", 400, "\"logit_bias\""},
        {"/v1/completions", "{\"prompt\":\"a\",\"model\":\"gpt\"}", 404, "\"model\""},
        {"/v1/chat/completions", "{\"messages\":[]}", 400, "\"messages\""},
        {"/v1/chat/completions", "{\"messages\":[{\"role\":\"user\"}]}", 400, "messages"},
        {"/v1/chat/completions", "{\"messages\":[{\"role\":5,\"content\":\"x\"}]}", 400,
         "messages"},
        {"/v1/chat/completions",
         "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"top_logprobs\":2}", 400,
         "\"top_logprobs\""},
        {"/v1/chat/completions",
         "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"tools\":[{\"a\":1}]}", 400,
         "\"tools\""},
        {"/v1/chat/completions",
         "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],"
         "\"chat_template_kwargs\":{\"enable_thinking\":false}}",
         400, "\"chat_template_kwargs\""},
        {"/v1/rollouts", "{}", 400, "\"groups\""},
        {"/v1/rollouts", "{\"groups\":[]}", 400, "\"groups\""},
        {"/v1/rollouts", "{\"groups\":[{}]}", 400, "group 0"},
        {"/v1/rollouts", "{\"groups\":[{\"prompt_token_ids\":[1],\"prompt\":\"a\"}]}", 400,
         "exactly one"},
        {"/v1/rollouts", "{\"groups\":[{\"prompt_token_ids\":[1],\"id\":[]}]}", 400, "\"id\""},
        {"/v1/rollouts", "{\"groups\":[{\"prompt_token_ids\":[1]}],\"sampling\":3}", 400,
         "\"sampling\""},
        {"/generate", "{}", 400, "\"prompt\""},
        {"/generate", "{\"prompt\":{\"x\":1}}", 400, "\"prompt\""},
        {"/generate", "{\"prompt\":\"a\",\"stream\":true}", 400, "\"stream\""},
        {"/reload", "{\"model\":3}", 400, "\"model\""},
        {"/reload", "{\"model\":\"/nowhere/at/all\"}", 404, "/nowhere/at/all"},
        {"/v1/load_lora_adapter", "{}", 501, "not supported yet"},
        {"/lora/unload", "{}", 501, "not supported yet"},
        {"/v1/completions", "{\"prompt\":[1],\"speculative\":\"often\"}", 400, "speculative"},
        {"/v1/completions", "{\"prompt\":[1],\"speculative\":\"ngram:17\"}", 400, "1 to 16"},
        {"/v1/completions", "{\"prompt\":[1],\"speculative\":\"draft_model:5\"}", 400,
         "--draft DIR"},
        {"/v1/embeddings", "{}", 404, "/v1/embeddings"},
        {"/%ff%00%22", "{}", 404, "there is no /"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct wire_answer a;
        daemon_request(d.socket, "POST", cases[i].path, "", cases[i].body, &a);
        const json_t *error = json_object_get(a.json, "error");
        if (a.status != cases[i].status || !error)
            fail_msg("%s %s: %d %s", cases[i].path, cases[i].body, a.status, bytes_text(&a.body));
        assert_contains(text_of(error, "message"), cases[i].part);
        assert_int_equal(int_of(error, "code"), cases[i].status);
        text_of(error, "type");
        wire_answer_release(&a);
    }
    // field of the error object
    json_t *a = daemon_post(d.socket, "/v1/completions", 400, "{\"prompt\":\"a\",\"top_p\":7}");
    assert_string_equal(text_of(json_object_get(a, "error"), "param"), "top_p");
    json_decref(a);
}

static void test_too_long_prompt(void **state)
{
    (void)state;
    struct bytes body = BYTES_INIT;
    bytes_puts(&body, "{\"prompt\":[1");
    for (int i = 0; i < 600; i++) bytes_puts(&body, ",1");
    bytes_puts(&body, "]}");
    json_t *a = daemon_post(d.socket, "/v1/completions", 400, bytes_text(&body));
    assert_contains(text_of(json_object_get(a, "error"), "message"), "601 tokens");
    json_decref(a);
    bytes_release(&body);
}

static void test_methods(void **state)
{
    (void)state;
    struct wire_answer a;
    daemon_request(d.socket, "GET", "/v1/completions", "", NULL, &a);
    assert_int_equal(a.status, 405);
    assert_contains(bytes_text(&a.head), "Allow: POST");
    wire_answer_release(&a);
    daemon_request(d.socket, "POST", "/health", "", "{}", &a);
    assert_int_equal(a.status, 405);
    assert_contains(bytes_text(&a.head), "Allow: GET");
    wire_answer_release(&a);
    daemon_request(d.socket, "HEAD", "/health", "", NULL, &a);
    assert_int_equal(a.status, 200);
    assert_int_equal(a.body.len, 0);
    wire_answer_release(&a);
}

static void test_large_bodies(void **state)
{
    (void)state;
    struct bytes body = BYTES_INIT;
    struct wire_answer a;
    bytes_puts(&body, "{\"prompt\":\"");
    while (body.len < 300000) bytes_puts(&body, "aaaaaaaaaaaaaaaa");
    bytes_puts(&body, "\"}");
    daemon_request(d.socket, "POST", "/v1/completions", "", bytes_text(&body), &a);
    assert_int_equal(a.status, 413);
    assert_contains(bytes_text(&a.body), "--max-body");
    wire_answer_release(&a);
    // a client that asks first is told at once
    const char *ask = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n"
                      "Expect: 100-continue\r\n\r\n";
    int fd = wire_open(d.socket);
    wire_send(fd, ask, strlen(ask));
    assert_true(wire_read(fd, 10000, &a));
    assert_int_equal(a.status, 413);
    wire_answer_release(&a);
    close(fd);
    // chunked, so that the length is not known before
    const char *head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                       "Transfer-Encoding: chunked\r\n\r\n493e0\r\n"; // 300000
    fd = wire_open(d.socket);
    wire_send(fd, head, strlen(head));
    wire_send(fd, body.data, 300000);
    wire_send(fd, "\r\n0\r\n\r\n", 7);
    assert_true(wire_read(fd, 10000, &a));
    assert_int_equal(a.status, 413);
    wire_answer_release(&a);
    close(fd);
    bytes_release(&body);
}

static void test_broken_http(void **state)
{
    (void)state;
    static const char *const broken[] = {
        "\r\n\r\n\r\n\r\n",
        "NONSENSE\r\n\r\n",
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 18446744073709551617\r\n\r\n",
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "GET /health HTTP/9.9\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    };
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        struct wire_answer a;
        int fd = wire_open(d.socket);
        wire_send(fd, broken[i], strlen(broken[i]));
        wire_read(fd, 200, &a);
        if (a.status == 200) fail_msg("answered 200 to broken request %zu", i);
        wire_answer_release(&a);
        close(fd);
    }
    struct bytes header = BYTES_INIT;
    struct wire_answer a;
    bytes_puts(&header, "X-Long: ");
    while (header.len < 200000) bytes_puts(&header, "bbbbbbbbbbbbbbbb");
    bytes_puts(&header, "\r\n");
    daemon_request(d.socket, "GET", "/health", bytes_text(&header), NULL, &a);
    assert_true(a.status != 200);
    wire_answer_release(&a);
    bytes_release(&header);
    json_decref(daemon_get(d.socket, "/health", 200)); // still there
}

// ---- many, slow and leaving clients ------------------------------------------------------------

struct crowd {
    pthread_t thread;
    int i;
    struct wire_answer answer;
};

static void *crowd_client(void *context)
{
    struct crowd *c = context;
    char body[128], text[512];
    snprintf(body, sizeof body, "{\"prompt\":[1,2,%d],\"max_tokens\":24,\"seed\":%d%s}", c->i, c->i,
             c->i % 2 ? ",\"stream\":true" : "");
    int n = snprintf(text, sizeof text,
                     "POST /v1/completions HTTP/1.0\r\nHost: x\r\nContent-Length: %zu\r\n\r\n%s",
                     strlen(body), body);
    int fd = wire_open(d.socket);
    if (fd >= 0 && wire_send(fd, text, (size_t)n)) wire_read(fd, 60000, &c->answer);
    if (fd >= 0) close(fd);
    return NULL;
}

static void test_crowd(void **state)
{
    (void)state;
    static struct crowd crowd[64];
    for (int i = 0; i < 64; i++) {
        crowd[i].i = i;
        assert_int_equal(pthread_create(&crowd[i].thread, NULL, crowd_client, &crowd[i]), 0);
    }
    for (int i = 0; i < 64; i++) pthread_join(crowd[i].thread, NULL);
    for (int i = 0; i < 64; i++) assert_int_equal(crowd[i].answer.status, 200);
    for (int i = 0; i < 64; i += 8) { // the same alone
        char body[128];
        snprintf(body, sizeof body, "{\"prompt\":[1,2,%d],\"max_tokens\":24,\"seed\":%d}", i, i);
        json_t *alone = daemon_post(d.socket, "/v1/completions", 200, body);
        assert_true(json_equal(json_object_get(choice_of(alone, 0), "token_ids"),
                               json_object_get(choice_of(crowd[i].answer.json, 0), "token_ids")));
        json_decref(alone);
    }
    for (int i = 0; i < 64; i++) {
        if (i % 2) assert_contains(bytes_text(&crowd[i].answer.body), "data: [DONE]");
        wire_answer_release(&crowd[i].answer);
    }
}

static int open_request(const char *path, const char *body)
{
    char text[512];
    int n =
        snprintf(text, sizeof text, "POST %s HTTP/1.0\r\nHost: x\r\nContent-Length: %zu\r\n\r\n%s",
                 path, strlen(body), body);
    int fd = wire_open(d.socket);
    assert_true(fd >= 0 && wire_send(fd, text, (size_t)n));
    return fd;
}

static void wait_for_health(const char *key, bool zero)
{
    int64_t deadline = clock_deadline_ns(10000);
    for (;;) {
        json_t *health = daemon_get(d.socket, "/health", 200);
        json_int_t x = int_of(health, key);
        json_decref(health);
        if ((x == 0) == zero) return;
        if (clock_now_ns() > deadline) fail_msg("\"%s\" stays %d", key, (int)x);
        clock_sleep_ms(5);
    }
}

static void test_leaving_cancels(void **state)
{
    (void)state;
    static const char *const bodies[] = {
        "{\"prompt\":\"a\",\"max_tokens\":500,\"n\":64}",
        "{\"prompt\":\"a\",\"max_tokens\":500,\"n\":64,\"stream\":true}"};
    for (int i = 0; i < 2; i++) {
        double before = number_in_metrics("commonweight:disconnects_total");
        double aborted =
            number_in_metrics("vllm:request_success_total{model_name=\"model\",finished_"
                              "reason=\"abort\"");
        int fd = open_request("/v1/completions", bodies[i]);
        wait_for_health("running", false);
        close(fd);
        int64_t start = clock_now_ns();
        wait_for_health("running", true);
        wait_for_health("waiting", true);
        assert_true(clock_ms_since(start) < 2000);
        assert_true(number_in_metrics("commonweight:disconnects_total") == before + 1);
        assert_true(
            number_in_metrics("vllm:request_success_total{model_name=\"model\",finished_reason="
                              "\"abort\"") > aborted);
    }
}

static void test_full_queue(void **state)
{
    (void)state;
    struct wire_answer a;
    int fd = open_request("/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":500,\"n\":150}");
    wait_for_health("running", false);
    daemon_request(d.socket, "POST", "/v1/completions", "",
                   "{\"prompt\":[\"a\",\"b\",\"c\"],\"max_tokens\":400,\"n\":40}", &a);
    assert_int_equal(a.status, 429);
    assert_contains(bytes_text(&a.head), "Retry-After: ");
    wire_answer_release(&a);
    close(fd);
    wait_for_health("running", true); // what fitted of the refused request is cancelled, too
    wait_for_health("waiting", true);
}

static void test_slow_reader(void **state)
{
    (void)state;
    struct wire_answer slow;
    const char *body = "{\"groups\":[{\"prompt_token_ids\":[4,5],\"n\":48}],\"sampling\":"
                       "{\"max_tokens\":120,\"seed\":1}}";
    int fd = open_request("/v1/rollouts", body);
    clock_sleep_ms(1500); // far more than a socket's buffer is ready by now
    assert_true(wire_read(fd, 30000, &slow));
    close(fd);
    int lines = 0;
    for (size_t i = 0; i < slow.body.len; i++) lines += slow.body.data[i] == '\n';
    assert_int_equal(lines, 48);
    wire_answer_release(&slow);
}

static void test_kept_connection(void **state)
{
    (void)state;
    const char *two =
        "GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\n"
        "Connection: close\r\n\r\n";
    struct wire_answer a;
    int fd = wire_open(d.socket);
    wire_send(fd, two, strlen(two));
    assert_true(wire_read(fd, 10000, &a));
    assert_contains(bytes_text(&a.body), "max_model_len");
    wire_answer_release(&a);
    close(fd);
}

// ---- bridge and metrics ------------------------------------------------------------------------

static void test_bridge_info(void **state)
{
    (void)state;
    json_t *info = daemon_get(d.socket, "/bridge/info", 200);
    assert_string_equal(text_of(info, "status"), "ok");
    assert_string_equal(text_of(info, "bridge"), d.bridge);
    assert_true(json_is_object(json_object_get(info, "control")));
    assert_null(json_object_get(info, "checksums"));
    json_int_t n = int_of(info, "num_tensors");
    json_decref(info);
    info = daemon_get(d.socket, "/bridge/info?canary=1&checksums=1", 200);
    assert_int_equal(strlen(text_of(info, "canary")), 16);
    const json_t *sums = json_object_get(info, "checksums");
    assert_int_equal(json_array_size(sums), n);
    for (json_int_t i = 0; i < n; i++)
        assert_int_equal(strlen(json_string_value(json_array_get(sums, (size_t)i))), 16);
    json_decref(info);
}

static void test_pause_and_resume(void **state)
{
    (void)state;
    struct wire_answer a;
    json_decref(daemon_post(d.socket, "/bridge/pause", 200, ""));
    int fd = open_request("/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":2}");
    assert_false(wire_read(fd, 400, &a)); // nothing while paused
    assert_int_equal(a.status, 0);
    wire_answer_release(&a);
    json_t *resumed = daemon_post(d.socket, "/bridge/resume", 200, "");
    assert_string_equal(text_of(resumed, "status"), "resumed");
    json_decref(resumed);
    assert_true(wire_read(fd, 10000, &a));
    assert_int_equal(a.status, 200);
    wire_answer_release(&a);
    close(fd);
}

static void test_reload(void **state)
{
    (void)state;
    const char *ask = "{\"prompt\":\"reload\",\"max_tokens\":10,\"temperature\":0}";
    char body[512];
    const char *other = daemon_model(test_folder(), false, 8);
    json_t *before = daemon_post(d.socket, "/v1/completions", 200, ask);
    snprintf(body, sizeof body, "{\"model\":\"%s\"}", other);
    json_t *reloaded = daemon_post(d.socket, "/reload", 200, body);
    json_t *between = daemon_post(d.socket, "/v1/completions", 200, ask);
    assert_int_equal(int_of(reloaded, "weight_version"), int_of(before, "weight_version") + 2);
    assert_int_equal(int_of(between, "weight_version"), int_of(reloaded, "weight_version"));
    json_decref(daemon_post(d.socket, "/reload", 200, ""));
    json_t *after = daemon_post(d.socket, "/v1/completions", 200, ask);
    assert_false(json_equal(json_object_get(choice_of(before, 0), "token_ids"),
                            json_object_get(choice_of(between, 0), "token_ids")));
    assert_true(json_equal(json_object_get(choice_of(before, 0), "token_ids"),
                           json_object_get(choice_of(after, 0), "token_ids")));
    json_decref(before);
    json_decref(reloaded);
    json_decref(between);
    json_decref(after);
}

static void test_metrics(void **state)
{
    (void)state;
    static const char *const names[] = {"vllm:num_requests_running",
                                        "vllm:num_requests_waiting",
                                        "vllm:gpu_cache_usage_perc",
                                        "vllm:kv_cache_usage_perc",
                                        "vllm:prompt_tokens_total",
                                        "vllm:generation_tokens_total",
                                        "vllm:request_success_total",
                                        "vllm:time_to_first_token_seconds_bucket",
                                        "vllm:e2e_request_latency_seconds_sum",
                                        "vllm:time_per_output_token_seconds_count",
                                        "vllm:num_preemptions_total",
                                        "vllm:prefix_cache_queries_total",
                                        "vllm:prefix_cache_hits_total",
                                        "commonweight:weight_version",
                                        "commonweight:updates_total",
                                        "commonweight:paused"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) number_in_metrics(names[i]);
    double tokens = number_in_metrics("vllm:generation_tokens_total");
    double ended = number_in_metrics("vllm:e2e_request_latency_seconds_count");
    json_decref(
        daemon_post(d.socket, "/v1/completions", 200, "{\"prompt\":\"a\",\"max_tokens\":9}"));
    assert_true(number_in_metrics("vllm:generation_tokens_total") == tokens + 9);
    assert_true(number_in_metrics("vllm:e2e_request_latency_seconds_count") == ended + 1);
}

// A prompt of 40 tokens that nobody asked before, then again, as one and as a group: blocks of 16
// tokens are found, and the answer is the same.
static void test_prefix_cache(void **state)
{
    (void)state;
    struct bytes ask = BYTES_INIT, group = BYTES_INIT;
    bytes_puts(&ask, "{\"max_tokens\":8,\"temperature\":0,\"logprobs\":1,\"prompt\":[");
    bytes_puts(&group, "{\"sampling\":{\"max_tokens\":2},\"groups\":[{\"id\":\"g\",\"n\":3,"
                       "\"prompt_token_ids\":[");
    for (int i = 0; i < 40; i++) {
        bytes_printf(&ask, "%s%d", i ? "," : "", 20 + i * 11 % 90);
        bytes_printf(&group, "%s%d", i ? "," : "", 20 + i * 11 % 90);
    }
    bytes_puts(&ask, "]}");
    bytes_puts(&group, "]}]}");
    const double queries = number_in_metrics("vllm:prefix_cache_queries_total");
    const double hits = number_in_metrics("vllm:prefix_cache_hits_total");
    json_t *first = daemon_post(d.socket, "/v1/completions", 200, bytes_text(&ask));
    json_t *second = daemon_post(d.socket, "/v1/completions", 200, bytes_text(&ask));
    assert_int_equal(cached_of(json_object_get(first, "usage")), 0);
    assert_int_equal(cached_of(json_object_get(second, "usage")), 32);
    assert_true(json_equal(json_object_get(choice_of(first, 0), "token_ids"),
                           json_object_get(choice_of(second, 0), "token_ids")));
    assert_true(json_equal(json_object_get(choice_of(first, 0), "logprobs"),
                           json_object_get(choice_of(second, 0), "logprobs")));
    assert_true(number_in_metrics("vllm:prefix_cache_queries_total") == queries + 80);
    assert_true(number_in_metrics("vllm:prefix_cache_hits_total") == hits + 32);
    json_decref(first);
    json_decref(second);
    struct wire_answer a;
    char *save = NULL;
    int lines = 0;
    daemon_request(d.socket, "POST", "/v1/rollouts", "", bytes_text(&group), &a);
    assert_int_equal(a.status, 200);
    for (char *at = strtok_r(a.body.data, "\n", &save); at;
         at = strtok_r(NULL, "\n", &save), lines++) {
        json_t *line = json_loads(at, JSON_ALLOW_NUL, NULL);
        assert_int_equal(int_of(json_object_get(line, "telemetry"), "cached_prompt_tokens"), 32);
        json_decref(line);
    }
    assert_int_equal(lines, 3);
    wire_answer_release(&a);
    bytes_release(&ask);
    bytes_release(&group);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_health_and_models),
        cmocka_unit_test(test_completion),
        cmocka_unit_test(test_prompts_of_every_form),
        cmocka_unit_test(test_seeds),
        cmocka_unit_test(test_top_logprobs),
        cmocka_unit_test(test_logprobs_are_a_distribution),
        cmocka_unit_test(test_chat),
        cmocka_unit_test(test_stream_equals_whole),
        cmocka_unit_test(test_stop_string),
        cmocka_unit_test(test_stop_token),
        cmocka_unit_test(test_rollouts),
        cmocka_unit_test(test_rollouts_equal_completions),
        cmocka_unit_test(test_generate),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_too_long_prompt),
        cmocka_unit_test(test_methods),
        cmocka_unit_test(test_large_bodies),
        cmocka_unit_test(test_broken_http),
        cmocka_unit_test(test_crowd),
        cmocka_unit_test(test_leaving_cancels),
        cmocka_unit_test(test_full_queue),
        cmocka_unit_test(test_slow_reader),
        cmocka_unit_test(test_kept_connection),
        cmocka_unit_test(test_bridge_info),
        cmocka_unit_test(test_pause_and_resume),
        cmocka_unit_test(test_reload),
        cmocka_unit_test(test_metrics),
        cmocka_unit_test(test_prefix_cache),
    };
    return cmocka_run_group_tests_name("server", tests, start, stop);
}
