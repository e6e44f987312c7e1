/* test_frozen_model.c: requests that name the frozen model (--tandem-model), which then writes
 * alone: to the bit what a server of that model says, with the log-probabilities of prompts, beside
 * requests of the policy, under preemption, and after the policy was written. What cannot be is
 * refused. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

#define GROUPS 6

static const char *frozen; // another model of the tokenizer's

static void open_frozen(struct scene *s)
{
    scene_open_exact(s);
    frozen = daemon_model(test_folder(), true, 12);
}

SCENE_OF_ALL(open_frozen)

static void serve(const char *model, const char *const options[])
{
    daemon_start(&scene.daemon, model,
                 JOIN(args("--dtype %s --exact", daemon_exact_dtype()), options));
}

struct lines { // of an answer, by group and sample
    json_t *at[GROUPS][2];
};

// Prompts of different lengths, two samples each. model: as the request names it, or NULL.
static void roll_out(const char *model, const char *sampling, struct lines *ret)
{
    struct wire_answer answer;
    SCOPED(bytes_release) struct bytes body = BYTES_INIT;
    *ret = (struct lines){0};
    bytes_puts(&body, "{\"groups\":[");
    for (int i = 0; i < GROUPS; i++)
        bytes_printf(&body, "%s{\"id\":%d,\"prompt\":\"%.*s\",\"n\":2,\"seed\":%d}", i ? "," : "",
                     i, 4 + 7 * i, "12+34=46, 56+78=134, 11+22=33, 9+9=18, 1+1=2", i);
    bytes_puts(&body, "]");
    if (model) bytes_printf(&body, ",\"model\":\"%s\"", model);
    bytes_printf(&body, ",\"sampling\":{\"max_tokens\":24,\"ignore_eos\":true%s}}", sampling);
    daemon_request(scene.daemon.socket, "POST", "/v1/rollouts", "", bytes_text(&body), &answer);
    if (answer.status != 200) fail_msg("%s", bytes_text(&answer.body));
    const json_t *lines = json_of_lines(bytes_text(&answer.body));
    json_t *one;
    size_t i;
    json_array_foreach (lines, i, one)
        ret->at[int_of(one, "group_id")][int_of(one, "sample")] = one;
}

static bool is_same(const struct lines *a, const struct lines *b, const char *key)
{
    bool same = true;
    for (int i = 0; i < 2 * GROUPS; i++) {
        const json_t *x = json_object_get((&a->at[0][0])[i], key),
                     *y = json_object_get((&b->at[0][0])[i], key);
        if (!x || !y) fail_msg("line %d: no %s", i, key);
        same = same && json_equal(x, y);
    }
    return same;
}

static void assert_same(const struct lines *a, const struct lines *b, bool prompts)
{
    assert_true(is_same(a, b, "token_ids"));
    assert_true(is_same(a, b, "logprobs"));
    if (!prompts) return;
    assert_true(is_same(a, b, "prompt_logprobs"));
    assert_true(is_same(a, b, "prompt_top_logprobs"));
}

#define SCORED ",\"prompt_logprobs\":3"

// What a server of the frozen model alone says, then what this one's frozen model does.
static struct lines alone, alone_scored;

TEST(it_says_what_its_own_server_says)
{
    struct lines policy, policy_again, named, scored;
    serve(frozen, NULL);
    roll_out(NULL, "", &alone);
    roll_out(NULL, SCORED, &alone_scored);
    serve(scene.model, OPTIONS("--tandem-model", frozen));
    roll_out(NULL, SCORED, &policy);
    roll_out("frozen", "", &named);
    roll_out("frozen", SCORED, &scored);
    roll_out(NULL, SCORED, &policy_again);
    assert_same(&named, &alone, false);
    assert_same(&scored, &alone_scored, true);
    assert_same(&policy, &policy_again, true);
    assert_false(is_same(&policy, &scored, "token_ids"));
    assert_false(is_same(&policy, &scored, "prompt_logprobs"));
    assert_null(json_object_get(named.at[0][0], "model_mask"));
}

// Room for fewer samples than there are, in chunks that cut prompts.
TEST(preempted_it_says_the_same)
{
    struct lines named;
    serve(
        scene.model,
        args("--tandem-model %s --max-context 80 --kv-memory 128K --block-size 4 --prefill-chunk 5",
             frozen));
    roll_out("frozen", SCORED, &named);
    assert_same(&named, &alone_scored, true);
    assert_true(daemon_metric(&scene.daemon, "vllm:num_preemptions_total") > 0);
}

// A trainer writes the policy; a prompt that was cached before is the frozen model's all the same.
TEST(training_leaves_it_alone)
{
    struct lines before, after, policy, policy_after;
    serve(scene.model, OPTIONS("--tandem-model", frozen));
    roll_out(NULL, SCORED, &policy);
    roll_out("frozen", SCORED, &before);
    assert_train(&scene, 0, "run", "--max-steps 2");
    roll_out("frozen", SCORED, &after);
    roll_out(NULL, SCORED, &policy_after);
    assert_same(&before, &alone_scored, true);
    assert_same(&after, &before, true);
    assert_false(is_same(&policy, &policy_after, "prompt_logprobs"));
}

static void refused(const char *path, int status, const char *body, const char *part)
{
    json_t *answer = daemon_post(scene.daemon.socket, path, status, body);
    assert_contains(text_of(answer, "error.message"), part);
}

#define ASK "{\"groups\":[{\"prompt\":\"1+2=\"}],\"model\":\"frozen\""

TEST(what_cannot_be_is_refused)
{
    serve(scene.model, args("--tandem-model %s --max-adapters 1", frozen));
    refused("/v1/rollouts", 400, ASK ",\"sampling\":{\"tandem\":{}}}", "\"tandem\"");
    refused("/v1/rollouts", 400, ASK ",\"sampling\":{\"speculative\":\"ngram:3\"}}",
            "\"speculative\"");
    refused("/v1/load_lora_adapter", 400, "{\"lora_name\":\"frozen\",\"lora_path\":\"x\"}",
            "the frozen model's own name");
    json_t *models = daemon_get(scene.daemon.socket, "/v1/models", 200);
    const json_t *card = json_at(models, "data.1");
    assert_string_equal(text_of(card, "id"), "frozen");
    assert_string_equal(text_of(card, "root"), frozen);
    daemon_get(scene.daemon.socket, "/v1/models/frozen", 200);
    serve(scene.model, NULL);
    refused("/v1/rollouts", 404, ASK "}", "\"model\" is 'frozen'");
}
