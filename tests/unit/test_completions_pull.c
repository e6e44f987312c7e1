/* test_completions_pull.c: rollouts of a server that has POST /v1/completions and no versions: a
 * child that answers as vLLM does, or not quite. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/control.h"
#include "tests/support/canned_server.h"
#include "tests/support/support.h"
#include "trainer/rollout/rollout.h"

#define GROUPS  20 // more than connections that libcurl keeps
#define SAMPLES 2

// The first token of a prompt says what is wrong with the response.
enum { FINE = 1, NO_IDS, ONE_CHOICE, BAD_INDEX, NO_LOGPROBS, NOT_JSON, ABORTED, CLOSED };

static void serve_choices(int fd, const json_t *body, json_int_t token)
{
    char text[1024], choices[2][300];
    const long long seed = json_integer_value(json_object_get(body, "seed"));
    for (int i = 0; i < SAMPLES; i++) {
        char ids[60], logprobs[60];
        snprintf(ids, sizeof ids, ", \"token_ids\": [%d, %d]", (int)((unsigned)seed % 50), i);
        snprintf(logprobs, sizeof logprobs, "{\"token_logprobs\": [-1, -2]}");
        snprintf(choices[i], sizeof choices[i],
                 "{\"index\": %d, \"finish_reason\": \"%s\", \"text\": \"%d\", \"logprobs\": %s%s}",
                 token == BAD_INDEX ? 7 : i, token == ABORTED ? "abort" : "length", i,
                 token == NO_LOGPROBS ? "null" : logprobs, token == NO_IDS ? "" : ids);
    }
    snprintf(text, sizeof text, "{\"choices\": [%s%s%s]}", choices[1],
             token == ONE_CHOICE ? "" : ", ", token == ONE_CHOICE ? "" : choices[0]);
    canned_response(fd, "200 OK", token == NOT_JSON ? "<html>" : text);
}

static void serve(int fd)
{
    char request[16384];
    while (canned_request(fd, request, sizeof request)) {
        json_t *body = json_loads(canned_body(request), 0, NULL);
        const json_int_t token =
            json_integer_value(json_array_get(json_object_get(body, "prompt"), 0));
        const char *model = json_string_value(json_object_get(body, "model"));
        if (token == CLOSED) return;
        if (!canned_is(request, "/v1/completions") || !model || strcmp(model, "of-the-test") != 0 ||
            json_integer_value(json_object_get(body, "n")) != SAMPLES ||
            !json_is_true(json_object_get(body, "return_token_ids")))
            canned_response(fd, "400 Bad Request", "{\"error\": {\"message\": \"not so\"}}");
        else
            serve_choices(fd, body, token);
        json_decref(body);
    }
}

static struct canned_server server;
static struct control *control;
static const struct sampling_options sampling = {
    .temperature = 1, .top_p = 1, .max_tokens = 4, .seed = 12345};

static enum status pull(struct rollout_worker *worker, int32_t odd, struct rollout **ret)
{
    int32_t fine[] = {FINE}, last[] = {odd};
    struct example examples[GROUPS];
    struct rollout_servers source = {
        .n_servers = 1, .vocab_size = 64, .timeout_ms = 60000, .idle_timeout_ms = 60000};
    struct rollout *r;
    *worker = (struct rollout_worker){
        .name = "of-the-test", .completions_of = "of-the-test", .version = 2, .copy_of = 40};
    source.servers[0] = (struct rollout_server){server.url, control, worker};
    assert_ok(http_client_new(server.url, &source.http));
    assert_ok(rollout_new(GROUPS, SAMPLES, &r));
    for (int g = 0; g < GROUPS; g++) {
        examples[g] = (struct example){.prompt_ids = {g == GROUPS - 1 ? last : fine, 1, 1}};
        r->examples[g] = &examples[g];
    }
    enum status st = rollout_pull(&source, &sampling, r);
    if (st == ST_PEER_GONE) { // what came whole stays
        assert_true(worker->down);
        last[0] = FINE;
        assert_fails(rollout_pull(&source, &sampling, r), ST_PEER_GONE,
                     "none of the servers that sample answers");
        worker->down = false;
        st = rollout_pull(&source, &sampling, r);
    }
    http_client_free(source.http);
    if (st == ST_OK)
        *ret = r;
    else
        rollout_free(r);
    return st;
}

TEST(choices_are_samples)
{
    struct rollout_worker worker;
    struct rollout *r = NULL, *again = NULL;
    assert_ok(pull(&worker, FINE, &r));
    assert_ok(pull(&worker, CLOSED, &again));
    assert_int_equal(r->n_tokens, 2 * GROUPS * SAMPLES);
    assert_int_equal(again->n_tokens, r->n_tokens);
    int differing = 0;
    for (int i = 0; i < GROUPS * SAMPLES; i++) {
        const struct completion *c = &r->completions[i];
        assert_int_equal(c->ids[1], i % SAMPLES);
        assert_int_equal(c->ids[0], again->completions[i].ids[0]);
        assert_true(c->versions[0] == 40 && c->versions[1] == 40 && c->truncated);
        differing += c->ids[0] != r->completions[0].ids[0];
    }
    assert_true(differing > 0); // each group has a seed of its own
    rollout_free(r);
    rollout_free(again);
}

TEST(what_is_wrong_is_named)
{
    static const struct {
        int32_t token;
        enum status status;
        const char *sentence;
    } faults[] = {
        {NO_IDS, ST_FORMAT, "group 19 sample 1: field \"token_ids\" is not a list"},
        {ONE_CHOICE, ST_FORMAT, "1 samples of the 2 asked for"},
        {BAD_INDEX, ST_INVALID, "\"sample\""},
        {NO_LOGPROBS, ST_FORMAT, "field \"logprobs\" is not a list"},
        {NOT_JSON, ST_FORMAT, "response to /v1/completions"},
        {ABORTED, ST_FORMAT, "\"abort\""},
    };
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        struct rollout_worker worker;
        struct rollout *r = NULL;
        assert_fails(pull(&worker, faults[i].token, &r), faults[i].status, faults[i].sentence);
        assert_int_equal(worker.n_failures, 1);
    }
}

static void open_all(void)
{
    char page[64];
    snprintf(page, sizeof page, "/commonweight-completions-%d", (int)getpid());
    assert_ok(control_create(
        page, "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", &control));
    control_owner_update_end(control);
    canned_server_start(&server, serve);
}

static void close_all(void)
{
    canned_server_stop(&server);
    control_end(control);
    control_free(control);
}

TESTS_BETWEEN(open_all, close_all)
