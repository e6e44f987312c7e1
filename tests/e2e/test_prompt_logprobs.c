/* test_prompt_logprobs.c: prompt log-probabilities, echo, penalties and biases over HTTP: each
 * endpoint's form, and its numbers against the model run in this process. Also what
 * lm-evaluation-harness makes of them, where a Python has it (test_python()). */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/served.h"
#include "tests/support/reference.h"
#include "tests/support/tiny_model.h"

enum { VOCAB = 300, MOST = 128 };

static const char *model;
static struct reference reference;

static void start(void)
{
    model = daemon_model(test_folder(), true, 7);
    reference_open(model, "cpu", &reference);
    daemon_start(&served, model, args("--max-batch 8 --kv-memory 32M --prefill-chunk 24"));
}

static void stop(void)
{
    reference_close(&reference);
    daemon_end(&served);
}

// The f32 that was written.
static float number(const json_t *value)
{
    if (!json_is_number(value)) fail_msg("not a number");
    return (float)json_number_value(value);
}

static int read_ids(const json_t *list, int32_t *ret) // room for MOST / 2
{
    assert_true(json_array_size(list) <= MOST / 2);
    for (size_t i = 0; i < json_array_size(list); i++)
        ret[i] = (int32_t)json_integer_value(json_array_get(list, i));
    return (int)json_array_size(list);
}

// ret[i] of ids[i] given those before it, i from 1 on.
static void logprobs_of(struct reference *r, const int32_t *ids, int n, float *ret)
{
    static float logits[MOST * VOCAB], lse[MOST];
    assert_true(r->config->vocab_size <= VOCAB);
    reference_logits(r, ids, n, logits);
    const struct head_args head = {logits, ids + 1, n - 1, r->config->vocab_size, 1};
    device_ops(r->dev)->logprob(r->dev, ret + 1, lse, NULL, &head);
}

// To the bit on the CPU; on a GPU attention's last bits depend on the batch.
static void same_logprob(float got, float want)
{
    if (on_cpu())
        assert_memory_equal(&got, &want, sizeof got);
    else
        assert_true(fabsf(got - want) < 0.01f);
}

// ---- echo --------------------------------------------------------------------------------------

// Every list of the object, over prompt and completion: the first number is null, the others are
// the model's, none is above the best listed, and every token stands where its offset
// says.
static void check_logprobs(const json_t *choice, const int32_t *ids, int n)
{
    const json_t *l = json_at(choice, "logprobs"), *own = json_at(l, "token_logprobs");
    const json_t *top = json_at(l, "top_logprobs"), *offsets = json_at(l, "text_offset");
    const char *text = text_of(choice, "text");
    float want[MOST];
    logprobs_of(&reference, ids, n, want);
    assert_int_equal(json_array_size(json_at(l, "tokens")), n);
    assert_int_equal(json_array_size(own), n);
    assert_int_equal(json_array_size(top), n);
    assert_int_equal(json_array_size(offsets), n);
    assert_true(json_is_null(json_array_get(own, 0)) && json_is_null(json_array_get(top, 0)));
    for (int i = 0; i < n; i++) {
        const size_t offset = (size_t)json_integer_value(json_array_get(offsets, (size_t)i));
        const char *token = json_string_value(json_at(l, "tokens.%d", i));
        assert_true(offset <= strlen(text)); // all of it is ASCII
        if (strncmp(token, "\xef\xbf\xbd", 3) != 0)
            assert_int_equal(strncmp(text + offset, token, strlen(token)), 0);
        if (i == 0) continue;
        const float got = number(json_array_get(own, (size_t)i));
        same_logprob(got, want[i]);
        const char *key;
        json_t *value;
        float best = -INFINITY;
        json_object_foreach (json_array_get(top, (size_t)i), key, value)
            best = fmaxf(best, number(value));
        assert_true(best >= got);
    }
}

TEST(echo_has_the_prompts_numbers)
{
    // "hello" is "hell" and "o"; a biased model of bytes says ASCII only
    json_t *a = ask("/v1/completions",
                    "{\"prompt\":\"hello there, you\",\"max_tokens\":6,\"temperature\":0,"
                    "\"logprobs\":2,\"echo\":true,\"logit_bias\":{\"65\":100}}");
    json_t *plain =
        ask("/v1/rollouts", "{\"groups\":[{\"prompt\":\"hello there, you\"}],\"sampling\":"
                            "{\"max_tokens\":0}}");
    int32_t ids[MOST];
    int n = read_ids(json_at(plain, "prompt_token_ids"), ids);
    n += read_ids(json_at(a, "choices.0.token_ids"), ids + n);
    assert_string_equal(text_of(a, "choices.0.text"), "hello there, youAAAAAA");
    check_logprobs(json_at(a, "choices.0"), ids, n);
}

TEST(echo_alone)
{
    // what was sent comes back, whatever it is made of, and as often as asked for
    json_t *a =
        ask("/v1/completions", "{\"prompt\":[\"<|im_start|>h\\u00e9llo\",\"x\"],\"max_tokens\":0,"
                               "\"n\":2,\"echo\":true,\"logprobs\":0}");
    for (size_t i = 0; i < 4; i++) {
        const json_t *choice = json_at(a, "choices.%zu", i);
        assert_string_equal(text_of(choice, "text"), i < 2 ? "<|im_start|>h\xc3\xa9llo" : "x");
        assert_string_equal(text_of(choice, "finish_reason"), "length");
        assert_int_equal(json_array_size(json_at(choice, "token_ids")), 0);
        const json_t *top = json_at(choice, "logprobs.top_logprobs"); // of the tokens themselves
        assert_true(json_is_null(json_array_get(top, 0)));
        for (size_t k = 1; k < json_array_size(top); k++)
            assert_int_equal(json_object_size(json_array_get(top, k)), 1);
    }
    const json_t *offsets = json_at(a, "choices.0.logprobs.text_offset");
    // <|im_start|> h, the two bytes of e with its accent, l l o
    static const int want[] = {0, 12, 13, 13, 14};
    for (size_t i = 0; i < 5; i++)
        assert_int_equal(json_integer_value(json_array_get(offsets, i)), want[i]);
    assert_true(int_of(a, "weight_version") >= 2);
    a = ask("/v1/completions", "{\"prompt\":[104,105],\"max_tokens\":0,\"echo\":true}");
    assert_string_equal(text_of(a, "choices.0.text"), "hi");
    assert_true(json_is_null(json_at(a, "choices.0.logprobs")));
}

// ---- prompt_logprobs ---------------------------------------------------------------------------

static const int32_t prompt[] = {104, 105, 7, 259, 33, 200};
enum { N_PROMPT = sizeof prompt / sizeof *prompt };

// vLLM's: [null, {"ID": {"logprob", "rank", "decoded_token"}, ...}, ...], the prompt's token first.
static void check_vllm_list(const json_t *list, int n_top)
{
    float want[MOST];
    logprobs_of(&reference, prompt, N_PROMPT, want);
    assert_int_equal(json_array_size(list), N_PROMPT);
    assert_true(json_is_null(json_array_get(list, 0)));
    for (int i = 1; i < N_PROMPT; i++) {
        json_t *entries = json_array_get(list, (size_t)i), *entry;
        const char *id;
        int n = 0, ranks = 0;
        assert_in_range(json_object_size(entries), n_top, n_top + 1);
        json_object_foreach (entries, id, entry) {
            const int rank = (int)int_of(entry, "rank");
            assert_true(json_is_string(json_at(entry, "decoded_token")));
            if (n++ == 0) {
                const float got = number(json_at(entry, "logprob"));
                assert_int_equal(atoi(id), prompt[i]);
                same_logprob(got, want[i]);
            }
            if (rank <= n_top) ranks += rank;
        }
        assert_int_equal(ranks, n_top * (n_top + 1) / 2); // 1 to n_top, once each
    }
}

TEST(every_endpoint_has_its_form)
{
    float want[MOST];
    logprobs_of(&reference, prompt, N_PROMPT, want);
    json_t *a = ask("/v1/completions",
                    "{\"prompt\":[[1,2],[104,105,7,259,33,200]],\"max_tokens\":1,\"n\":2,"
                    "\"prompt_logprobs\":5}");
    for (size_t i = 2; i < 4; i++) check_vllm_list(json_at(a, "choices.%zu.prompt_logprobs", i), 5);
    a = ask("/v1/rollouts",
            "{\"groups\":[{\"prompt_token_ids\":[104,105,7,259,33,200]}],\"sampling\":"
            "{\"max_tokens\":2,\"prompt_logprobs\":2}}");
    for (size_t i = 1; i < N_PROMPT; i++) {
        const float got = number(json_at(a, "prompt_logprobs.%zu", i));
        const json_t *top = json_at(a, "prompt_top_logprobs.%zu", i);
        same_logprob(got, want[i]);
        assert_true(json_integer_value(json_at(a, "prompt_weight_versions.%zu", i)) >= 2);
        assert_int_equal(json_array_size(top), 2);
        assert_true(number(json_at(top, "0.1")) >= got);
    }
    a = ask("/generate",
            "{\"prompt\":{\"prompt_token_ids\":[104,105,7,259,33,200]},\"max_tokens\":1,"
            "\"prompt_logprobs\":1}");
    const json_t *pairs = json_at(a, "prompt_logprobs.0");
    assert_int_equal(json_array_size(pairs), N_PROMPT);
    for (size_t i = 1; i < N_PROMPT; i++) {
        same_logprob(number(json_at(pairs, "%zu.0.%d", i, prompt[i])), want[i]);
    }
    a = ask("/v1/chat/completions",
            "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"max_tokens\":1,"
            "\"prompt_logprobs\":0}");
    const json_t *list = json_at(a, "prompt_logprobs"), *usage = json_at(a, "usage");
    assert_int_equal(json_array_size(list), int_of(usage, "prompt_tokens"));
    assert_int_equal(json_object_size(json_array_get(list, 1)), 1);
    a = ask("/v1/completions", "{\"prompt\":[5,6],\"max_tokens\":1}");
    assert_null(json_object_get(json_at(a, "choices.0"), "prompt_logprobs")); // nobody asked
}

TEST(refusals)
{
    served_refuses("prompt_logprobs", "refusals");
}

// ---- penalties ---------------------------------------------------------------------------------

static json_t *greedy_ids(const char *fields)
{
    const char *body =
        test_text("{\"prompt\":\"abc\",\"max_tokens\":24,\"temperature\":0%s}", fields);
    return json_at(ask("/v1/completions", body), "choices.0.token_ids");
}

static int count_distinct(const json_t *ids)
{
    bool seen[VOCAB] = {0};
    int n = 0;
    for (size_t i = 0; i < json_array_size(ids); i++) {
        const json_int_t id = json_integer_value(json_array_get(ids, i));
        n += !seen[id];
        seen[id] = true;
    }
    return n;
}

TEST(penalties_do_what_they_say)
{
    json_t *biased = greedy_ids(",\"logit_bias\":{\"66\":100}");
    assert_int_equal(count_distinct(biased), 1);
    assert_int_equal(int_of(biased, "0"), 66);
    json_t *both = greedy_ids(",\"logit_bias\":{\"66\":12,\"67\":12},\"presence_penalty\":2");
    json_t *fresh = greedy_ids(",\"frequency_penalty\":2,\"presence_penalty\":2,"
                               "\"repetition_penalty\":50");
    json_t *plain = greedy_ids("");
    assert_true(count_distinct(both) == 2);
    assert_true(count_distinct(fresh) > 20 && count_distinct(fresh) >= count_distinct(plain));
}

// What was sampled from and what the model says are both told.
TEST(processed_and_raw)
{
    json_t *a = ask("/v1/rollouts", "{\"groups\":[{\"prompt_token_ids\":[1,2,3]}],\"sampling\":{"
                                    "\"max_tokens\":8,\"seed\":5,\"logit_bias\":{\"66\":100}}}");
    int32_t ids[MOST] = {1, 2, 3};
    float want[MOST];
    const int n = 3 + read_ids(json_at(a, "token_ids"), ids + 3);
    logprobs_of(&reference, ids, n, want);
    for (int i = 3; i < n; i++) {
        const float raw = number(json_at(a, "logprobs.%d", i - 3));
        assert_int_equal(ids[i], 66);
        same_logprob(raw, want[i]);
        assert_true(raw < -1 && number(json_at(a, "cut_logprobs.%d", i - 3)) > -1e-4f);
    }
}

// The penalty that a model comes with is said, and left to the requests.
TEST(a_models_own_penalty)
{
    static const char config[] = "{\"repetition_penalty\": 50.0, \"do_sample\": false}";
    const char *own = daemon_model(test_folder(), true, 7);
    struct daemon other = {0};
    test_write(test_path(own, "generation_config.json"), config, sizeof config - 1);
    daemon_start(&other, own, args("--max-batch 2 --kv-memory 8M"));
    static const char *const bodies[] = {
        "{\"prompt\":\"abc\",\"max_tokens\":24,\"repetition_penalty\":50}",
        "{\"prompt\":\"abc\",\"max_tokens\":24}",
    };
    json_t *want = greedy_ids(",\"repetition_penalty\":50"), *plain = greedy_ids("");
    for (int i = 0; i < 2; i++) {
        json_t *a = daemon_post(other.socket, "/v1/completions", 200, bodies[i]);
        assert_true(json_equal(json_at(a, "choices.0.token_ids"), i ? plain : want));
    }
    assert_false(json_equal(want, plain));
    assert_contains(test_read(other.log), "repetition_penalty 50 is not applied by default");
    assert_int_equal(daemon_stop(&other), 0);
}

// ---- lm-evaluation-harness ---------------------------------------------------------------------

static const char *const pairs[] = {"27+35=", "62", "12+11=", "23",     "44+44=", "88", "27+35=",
                                    "99",     "8",  "+1",     "10+10=", "20",     NULL};
enum { N_PAIRS = sizeof pairs / sizeof *pairs / 2 };

// A token of this model is a character.
static void expect_pair(struct reference *r, const char *context, const char *continuation,
                        double *ret_sum, bool *ret_greedy)
{
    static float logits[MOST * VOCAB];
    int32_t ids[MOST];
    float own[MOST];
    const int n_context = (int)strlen(context), vocab = r->config->vocab_size;
    int n = 0;
    for (const char *c = context; *c; c++) ids[n++] = *c;
    for (const char *c = continuation; *c; c++) ids[n++] = *c;
    logprobs_of(r, ids, n, own);
    reference_logits(r, ids, n, logits);
    *ret_sum = 0;
    *ret_greedy = true;
    for (int i = n_context; i < n; i++) {
        const float *row = logits + (i - 1) * vocab;
        *ret_sum += own[i];
        for (int t = 0; t < vocab; t++) *ret_greedy &= row[t] <= row[ids[i]];
    }
}

TEST(lm_eval_agrees)
{
    const char *python = test_python("lm_eval, transformers");
    const char *folder = test_path(test_root(), "tools/demo-model");
    const char *out = test_path(test_folder(), "loglikelihood.json");
    struct daemon demo = {0};
    SCOPED(reference_close) struct reference r;
    int n_greedy = 0;
    daemon_start(&demo, folder, args("--listen 127.0.0.1:0 --kv-memory 8M"));
    test_output(0, JOIN(args("%s %s http://127.0.0.1:%d/v1/completions %s %s", python,
                             test_path(test_root(), "tests/e2e/lm_eval_loglikelihood.py"),
                             daemon_tcp_port(&demo), folder, out),
                        pairs));
    reference_open(folder, "cpu", &r);
    const json_t *got = json_of_file(out);
    assert_int_equal(json_array_size(got), N_PAIRS);
    for (int i = 0; i < N_PAIRS; i++) {
        double sum;
        bool greedy;
        expect_pair(&r, pairs[2 * i], pairs[2 * i + 1], &sum, &greedy);
        const json_t *one = json_array_get(got, (size_t)i);
        assert_true(fabs(real_of(one, "0") - sum) < 1e-6);
        assert_int_equal(json_is_true(json_array_get(one, 1)), greedy);
        n_greedy += greedy;
    }
    assert_in_range(n_greedy, 1, N_PAIRS - 1); // both answers occur
    assert_int_equal(daemon_stop(&demo), 0);
}

// No more can be listed than the vocabulary has, and the sentence says how many that are.
TEST(small_vocabulary)
{
    static const char *const bodies[] = {
        "{\"prompt\":[1,2],\"max_tokens\":1,\"prompt_logprobs\":10}",
        "{\"prompt\":[1,2],\"max_tokens\":1,\"logprobs\":10}"};
    const char *few = test_folder();
    struct daemon tiny = {0};
    assert_ok(tiny_model_write(few, 32, 1, 8, 4));
    daemon_start(&tiny, few, args("--max-batch 2 --kv-memory 8M"));
    for (int i = 0; i < 2; i++) {
        json_t *a = daemon_post(tiny.socket, "/v1/completions", 400, bodies[i]);
        assert_contains(text_of(a, "error.message"), "logprobs is 10; at most 8 can be listed");
    }
}

TESTS_BETWEEN(start, stop)
