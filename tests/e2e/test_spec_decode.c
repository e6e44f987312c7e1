/* test_spec_decode.c: what a daemon says of its drafts, over HTTP: the counts of a request up to
 * its stop string, the look-up by id and how long it lasts, a request's own method on every
 * endpoint, and the series of /metrics. The daemon drafts as much as it may (--draft-length fixed),
 * so that no count depends on the machine's speed. And greedy answers of a
 * trained model with drafts and without: equal in f32 on the CPU; in bf16 on a GPU they may part at
 * near-ties, which are counted. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/served.h"

#define WINDOW 1024 // samples that can be looked up (docs/use/protocol.md)
#define TOKENS 40

// One greedy answer of TOKENS tokens; `more` are further fields. The first line's object.
static json_t *answer(const char *path, const char *method, const char *more)
{
    const char *format =
        strcmp(path, "/v1/rollouts") == 0
            ? "{\"groups\":[{\"prompt_token_ids\":[5,6,7,5,6]}],\"sampling\":{\"max_tokens\":%d,"
              "\"temperature\":0,\"ignore_eos\":true,\"speculative\":\"%s\"%s}}"
        : strcmp(path, "/v1/chat/completions") == 0
            ? "{\"messages\":[{\"role\":\"user\",\"content\":\"ab ab ab\"}],\"max_tokens\":%d,"
              "\"temperature\":0,\"ignore_eos\":true,\"speculative\":\"%s\"%s}"
            : "{\"prompt\":[5,6,7,5,6],\"max_tokens\":%d,\"temperature\":0,\"ignore_eos\":true,"
              "\"speculative\":\"%s\"%s}";
    return ask(path, test_text(format, TOKENS, method, more));
}

static json_t *totals(void)
{
    return daemon_get(served.socket, "/v1/spec_decode_stats", 200);
}

static json_t *look_up(const char *id, int status)
{
    return daemon_get(served.socket, test_text("/v1/spec_decode_stats?id=%s", id), status);
}

// What must hold of any counts with drafts in them.
static void check_counts(const json_t *o, json_int_t generated)
{
    const json_t *per_pos = json_object_get(o, "num_accepted_tokens_per_pos"), *count;
    const json_int_t drafts = int_of(o, "num_drafts"), drafted = int_of(o, "num_draft_tokens");
    const json_int_t accepted = int_of(o, "num_accepted_tokens");
    json_int_t sum = 0, before = drafts;
    size_t i;
    assert_true(0 < drafts && drafts <= drafted && accepted <= drafted && accepted <= generated);
    json_array_foreach (per_pos, i, count) {
        assert_true(json_integer_value(count) <= before);
        before = json_integer_value(count);
        sum += before;
    }
    assert_int_equal(sum, accepted);
    assert_true(fabs(real_of(o, "accept_rate") - (double)accepted / (double)drafted) < 1e-9);
    assert_true(fabs(real_of(o, "mean_acceptance_length") - 1 - (double)accepted / (double)drafts) <
                1e-9);
}

// Entry i: steps that accepted i drafts.
static void check_histogram(const json_t *spec)
{
    const json_t *histogram = json_object_get(spec, "acceptance_histogram"), *count;
    json_int_t steps = 0, accepted = 0;
    size_t i;
    assert_int_equal(json_array_size(histogram),
                     json_array_size(json_object_get(spec, "num_accepted_tokens_per_pos")) + 1);
    json_array_foreach (histogram, i, count) {
        assert_true(json_integer_value(count) >= 0);
        steps += json_integer_value(count);
        accepted += (json_int_t)i * json_integer_value(count);
    }
    assert_int_equal(steps, int_of(spec, "num_drafts"));
    assert_int_equal(accepted, int_of(spec, "num_accepted_tokens"));
}

static void assert_same_counts(const json_t *a, const json_t *b)
{
    static const char *const keys[] = {"num_drafts",          "num_draft_tokens",
                                       "num_accepted_tokens", "num_accepted_tokens_per_pos",
                                       "accept_rate",         "mean_acceptance_length"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!json_equal(json_object_get(a, keys[i]), json_object_get(b, keys[i])))
            fail_msg("\"%s\" differs", keys[i]);
}

// The text of a whole answer: a piece that begins behind `from` characters and stands nowhere
// before.
static const char *find_stop(const char *text, size_t from)
{
    for (size_t at = from; text[at] && strlen(text + at) > 8; at++)
        for (size_t n = 1; n <= 4; n++) {
            const char *stop = test_text("%.*s", (int)n, text + at);
            bool plain = true;
            for (size_t i = 0; i < n; i++)
                plain &= stop[i] > ' ' && stop[i] < 127 && !strchr("\"\\", stop[i]);
            if (plain && strstr(text, stop) == text + at) return stop;
        }
    fail_msg("no piece of \"%s\" is the first of its kind", text);
    return NULL;
}

// A stop string in the middle of a step takes the drafts behind it out of the counts, of the
// request and of the look-up; the engine's totals keep them.
TEST(counts_end_at_the_stop)
{
    json_t *plain = answer("/v1/rollouts", "off", "");
    const char *text = text_of(plain, "text");
    const char *more = test_text(",\"stop\":\"%s\"", find_stop(text, strlen(text) / 3));
    answer("/v1/rollouts", "suffix:16", ""); // now it is known by heart
    json_t *before = totals();
    json_t *whole = answer("/v1/rollouts", "suffix:16", "");
    json_t *between = totals();
    json_t *cut = answer("/v1/rollouts", "suffix:16", more);
    json_t *after = totals();

    const json_t *of_whole = json_object_get(whole, "telemetry");
    if (on_cpu()) { // elsewhere rows of other batches round otherwise
        static const char *const same[] = {"token_ids", "logprobs"};
        for (size_t k = 0; k < 2; k++)
            assert_true(
                json_equal(json_object_get(whole, same[k]), json_object_get(plain, same[k])));
    }
    check_counts(of_whole, TOKENS);
    assert_true(int_of(of_whole, "num_accepted_tokens") > TOKENS / 2);
    assert_int_equal(int_of(between, "num_accepted_tokens") - int_of(before, "num_accepted_tokens"),
                     int_of(of_whole, "num_accepted_tokens"));

    const json_t *of_cut = json_object_get(cut, "telemetry"), *place;
    const json_int_t n = (json_int_t)json_array_size(json_object_get(cut, "token_ids"));
    json_int_t marked = 0;
    size_t i;
    assert_string_equal(text_of(cut, "finish_reason"), "stop");
    assert_true(0 < n && n < TOKENS - 8);
    assert_int_equal(int_of(of_cut, "generated_tokens"), n);
    check_counts(of_cut, n);
    json_array_foreach (json_object_get(cut, "accepted"), i, place)
        marked += json_integer_value(place) > 0;
    assert_int_equal(i, (size_t)n);
    assert_int_equal(marked, int_of(of_cut, "num_accepted_tokens"));
    json_int_t offset = 0; // where each token begins in the text
    json_array_foreach (json_object_get(cut, "text_offset"), i, place) {
        assert_true(json_integer_value(place) >= offset);
        offset = json_integer_value(place);
    }
    assert_int_equal(i, (size_t)n);
    // 16 drafts a step, all right: the engine went on behind the stop string
    assert_true(int_of(after, "num_accepted_tokens") - int_of(between, "num_accepted_tokens") >
                int_of(of_cut, "num_accepted_tokens"));
    assert_true(int_of(after, "generated_tokens") - int_of(between, "generated_tokens") > n);
    const json_t *own = json_at(look_up(text_of(cut, "id"), 200), "samples.0");
    assert_same_counts(own, of_cut);
    assert_int_equal(int_of(own, "generated_tokens"), n);
}

// Every endpoint takes a method of the request's own, and says what came of it.
TEST(methods_of_requests)
{
    static const char *const paths[] = {"/v1/completions", "/generate", "/v1/chat/completions",
                                        "/v1/rollouts"};
    static const char *const methods[] = {"ngram:3", "suffix:5", "ngram:2,suffix:7"};
    static const size_t longest[] = {3, 5, 7};
    for (size_t p = 0; p < 4; p++) {
        const char *place = p == 3 ? "telemetry" : p == 1 ? "outputs.0.spec_decode" : "spec_decode";
        json_t *a = answer(paths[p], "off", "");
        const json_t *spec = json_at(a, "%s", place);
        if (p == 3) {
            assert_int_equal(int_of(spec, "num_draft_tokens"), 0);
            assert_true(json_is_null(json_at(spec, "accept_rate")));
            assert_true(json_is_null(json_at(spec, "mean_acceptance_length")));
            assert_null(json_object_get(a, "accepted"));
        } else {
            assert_true(json_is_null(spec));
        }
        for (size_t m = 0; m < 3; m++) {
            answer(paths[p], methods[m], ""); // suffix: to be remembered
            spec = json_at(answer(paths[p], methods[m], ""), "%s", place);
            if (!json_is_object(spec)) fail_msg("%s, %s: no drafts", paths[p], methods[m]);
            check_counts(spec, TOKENS);
            if (p != 3) check_histogram(spec);
            assert_in_range(json_array_size(json_at(spec, "num_accepted_tokens_per_pos")), 0,
                            longest[m]);
        }
    }
    static const char *const bad[] = {"\"often\"",   "\"ngram:0\"",       "\"ngram:17\"", "5",
                                      "[\"ngram\"]", "\"draft_model:3\"", "\"\""};
    static const char *const bodies[] = {
        "{\"prompt\":[1,2],\"speculative\":%s}", "{\"prompt\":[1,2],\"speculative\":%s}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"speculative\":%s}",
        "{\"groups\":[{\"prompt_token_ids\":[1,2]}],\"sampling\":{\"speculative\":%s}}"};
    for (size_t p = 0; p < 4; p++)
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
            json_t *a = daemon_post(served.socket, paths[p], 400, test_text(bodies[p], bad[i]));
            assert_contains(text_of(a, "error.message"), i == 5 ? "--draft" : "speculative");
        }
}

// Samples of a request with n and several prompts stand together in the look-up, their sums in its
// answer.
TEST(look_up_by_id)
{
    static const char body[] = "{\"prompt\":[[5,6,5,6,5],[7,8,7,8]],\"n\":2,\"max_tokens\":30,"
                               "\"seed\":3,\"ignore_eos\":true,\"speculative\":\"ngram:4\"}";
    json_t *a = ask("/v1/completions", body);
    const char *id = text_of(a, "id");
    json_t *found = look_up(id, 200), *sample;
    json_int_t seen = 0, drafts = 0, drafted = 0, accepted = 0;
    size_t i;
    assert_string_equal(text_of(found, "id"), id);
    assert_int_equal(json_array_size(json_object_get(found, "samples")), 4);
    json_array_foreach (json_object_get(found, "samples"), i, sample) {
        seen |= (json_int_t)1 << int_of(sample, "index");
        assert_int_equal(int_of(sample, "generated_tokens"), 30);
        drafts += int_of(sample, "num_drafts");
        drafted += int_of(sample, "num_draft_tokens");
        accepted += int_of(sample, "num_accepted_tokens");
    }
    assert_int_equal(seen, 15);
    const json_t *spec = json_object_get(a, "spec_decode");
    check_counts(spec, 120);
    check_histogram(spec);
    assert_int_equal(drafts, int_of(spec, "num_drafts"));
    assert_int_equal(drafted, int_of(spec, "num_draft_tokens"));
    assert_int_equal(accepted, int_of(spec, "num_accepted_tokens"));
    static const char *const unknown[] = {
        "", "cmpl-0", "%22%7d%00%0a", "cmpl-",
        ("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
         "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa")};
    for (i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        found = look_up(unknown[i], 404);
        assert_string_equal(text_of(found, "error.param"), "id");
    }
}

// n samples of one token.
static void finish_samples(int n)
{
    daemon_call(
        &served, "/v1/rollouts", 200, "",
        "{\"groups\":[{\"prompt_token_ids\":[9]}],\"sampling\":{\"n\":%d,\"max_tokens\":1}}", n);
}

TEST(window_is_bounded)
{
    json_t *a = answer("/v1/completions", "ngram:3", "");
    const char *id = text_of(a, "id");
    look_up(id, 200);
    finish_samples(WINDOW - 1);
    look_up(id, 200);
    finish_samples(1);
    look_up(id, 404);
}

// Sum over the series of that name; each must have the model's label.
static double metric(const char *page, const char *name, int *ret_n)
{
    const size_t len = strlen(name);
    double sum = 0;
    *ret_n = 0;
    for (const char *line = page; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, name, len) != 0 || (line[len] != '{' && line[len] != ' ')) continue;
        const char *value = strstr(line, "} ");
        if (!value || !strstr(line, "model_name=\"model\"")) fail_msg("%.120s", line);
        sum += atof(value + 2);
        ++*ret_n;
    }
    return sum;
}

// The totals and /metrics say the same, in vLLM's names; a daemon that was never asked for drafts
// has no such series.
TEST(series_of_metrics)
{
    static const char *const names[][2] = {
        {"vllm:spec_decode_num_drafts_total", "num_drafts"},
        {"vllm:spec_decode_num_draft_tokens_total", "num_draft_tokens"},
        {"vllm:spec_decode_num_accepted_tokens_total", "num_accepted_tokens"}};
    const json_t *usual = test_rows("metrics", "usual");
    struct wire_answer page;
    struct daemon quiet = {0};
    int n;
    json_t *stats = totals();
    check_counts(stats, int_of(stats, "generated_tokens"));
    daemon_request(served.socket, "GET", "/metrics", "", NULL, &page);
    const char *text = bytes_text(&page.body);
    for (size_t i = 0; i < 3; i++) {
        assert_true(metric(text, names[i][0], &n) == (double)int_of(stats, names[i][1]) && n == 1);
        assert_contains(text, test_text("# TYPE %s counter\n", names[i][0]));
    }
    const char *per_pos = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
    const json_t *counts = json_object_get(stats, "num_accepted_tokens_per_pos");
    assert_true(metric(text, per_pos, &n) == (double)int_of(stats, "num_accepted_tokens"));
    assert_int_equal(n, json_array_size(counts));
    for (int i = 0; i < n; i++)
        assert_contains(text,
                        test_text("%s{model_name=\"model\",position=\"%d\"} %d\n", per_pos, i,
                                  (int)json_integer_value(json_array_get(counts, (size_t)i))));
    for (size_t i = 0; i < json_array_size(usual); i++) {
        const char *name = json_string_value(json_array_get(usual, i));
        metric(text, name, &n);
        if (n != 1) fail_msg("%d series %s", n, name);
    }

    daemon_start(&quiet, daemon_model(test_folder(), true, 7), NULL);
    daemon_post(quiet.socket, "/v1/completions", 200, "{\"prompt\":[1,2,1,2,1]}");
    daemon_request(quiet.socket, "GET", "/metrics", "", NULL, &page);
    assert_null(strstr(bytes_text(&page.body), "spec_decode"));
    stats = daemon_get(quiet.socket, "/v1/spec_decode_stats", 200);
    assert_string_equal(text_of(stats, "method"), "off");
    assert_int_equal(int_of(stats, "num_drafts"), 0);
    assert_true(json_is_null(json_object_get(stats, "accept_rate")));
    assert_int_equal(daemon_stop(&quiet), 0);
}

// ---- near-ties ----------------------------------------------------------------------------------

enum { PROMPTS_MAX = 1000, AT_ONCE = 250, LENGTH = 24 };

struct greedy {
    json_int_t tokens[LENGTH];
    double gap[LENGTH]; // log-probability of the likeliest above that of the second
};

static void read_greedy(const json_t *output, struct greedy *ret)
{
    const json_t *ids = json_object_get(output, "token_ids"), *step;
    size_t t;
    assert_int_equal(json_array_size(ids), LENGTH);
    json_array_foreach (json_object_get(output, "logprobs"), t, step) {
        const char *key;
        json_t *entry;
        double best = -INFINITY, second = -INFINITY;
        json_object_foreach ((json_t *)step, key, entry) {
            const double p = real_of(entry, "logprob");
            second = fmax(second, fmin(p, best));
            best = fmax(best, p);
        }
        ret->tokens[t] = json_integer_value(json_array_get(ids, t));
        ret->gap[t] = best - second;
    }
    assert_int_equal(t, LENGTH);
}

// Greedy answers to sums, no two of them alike: (prompts).
static struct greedy *answer_sums(const struct daemon *daemon, const char *method, int prompts)
{
    struct greedy *all = test_keep(calloc(PROMPTS_MAX, sizeof *all));
    for (int first = 0; first < prompts; first += AT_ONCE) {
        SCOPED(bytes_release) struct bytes body = BYTES_INIT;
        for (int i = first; i < first + AT_ONCE; i++)
            bytes_printf(&body, "%s\"%d+%d=\"", i == first ? "{\"prompts\":[" : ",", i % 100,
                         i / 100 * 7 + 3);
        bytes_printf(&body,
                     "],\"max_tokens\":%d,\"temperature\":0,\"ignore_eos\":true,\"logprobs\":2,"
                     "\"speculative\":\"%s\"}",
                     LENGTH, method);
        json_t *a = daemon_post(daemon->socket, "/generate", 200, bytes_text(&body));
        for (int i = 0; i < AT_ONCE; i++) read_greedy(json_at(a, "outputs.%d", i), &all[first + i]);
    }
    return all;
}

// Behind the first place where two answers part they are answers to other prompts.
TEST(greedy_with_and_without)
{
    static const char *const methods[] = {"ngram:2,suffix:4,draft_model:5", "ngram:4", "suffix:8",
                                          "draft_model:5"};
    const bool cpu = on_cpu();
    const int prompts = cpu ? AT_ONCE : PROMPTS_MAX; // near-ties are rare
    struct daemon trained = {0};
    daemon_start(&trained, test_path(test_root(), "tools/demo-model"),
                 args("--draft %s --draft-length fixed --dtype %s",
                      test_path(test_root(), "tools/demo-draft"), cpu ? "f32" : "bf16"));
    struct greedy *plain = answer_sums(&trained, "off", prompts);
    for (size_t m = 0; m < sizeof methods / sizeof *methods; m++) {
        struct greedy *drafted = answer_sums(&trained, methods[m], prompts);
        double widest = 0;
        int parted = 0;
        for (int i = 0; i < prompts; i++)
            for (int t = 0; t < LENGTH; t++) {
                if (drafted[i].tokens[t] == plain[i].tokens[t]) continue;
                parted++;
                widest = fmax(widest, plain[i].gap[t]);
                break;
            }
        printf("%s, %s: %d of %d answers part, where the gap is at most %.4f\n",
               cpu ? "f32" : "bf16", methods[m], parted, prompts, widest);
        if (cpu) assert_int_equal(parted, 0);
        // bf16 has 8 bits: products of two shapes may make logits near 32 of it that are 1/4 apart
        assert_true(widest <= 0.25 && parted < prompts / 20);
    }
    json_t *stats = daemon_get(trained.socket, "/v1/spec_decode_stats", 200);
    assert_true(int_of(stats, "num_accepted_tokens") > prompts * LENGTH / 2);
    assert_int_equal(daemon_stop(&trained), 0);
}

static void start(void)
{
    daemon_start(&served, daemon_model(test_folder(), true, 7), args("--draft-length fixed"));
}

TESTS_BETWEEN(start, served_stop)
