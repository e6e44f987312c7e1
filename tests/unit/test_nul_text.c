/* test_nul_text.c: samples whose text holds U+0000, from the server's line to the scorers: what
 * follows it counts. The server is a child that gives one canned answer. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/control.h"
#include "tests/support/canned_server.h"
#include "tests/support/reward_one.h"
#include "tests/support/support.h"
#include "trainer/reward/reward.h"
#include "trainer/rollout/rollout.h"

#define N 3
// As /v1/rollouts gives them: NDJSON, NUL escaped.
#define LINE(sample, text)                                                                         \
    "{\"group_id\": 0, \"sample\": " #sample ", \"finish_reason\": \"stop\", \"text\": \"" text    \
    "\", \"token_ids\": [1], \"logprobs\": [-1], \"weight_versions\": [2]}\n"
static const char answer[] = LINE(0, "62\\u0000 garbage") LINE(1, "62") LINE(2, "\\u000061\\u0000");

static void serve(int fd)
{
    char request[8192];
    if (!canned_request(fd, request, sizeof request)) return;
    canned_response(fd, "200 OK", answer);
}

static double score(const char *names, const char *text)
{
    const struct reward_options options = {.names = names, .length_target = 10, .timeout_s = 20};
    const struct reward_input input = {.text = text, .answer = "62"};
    struct reward *r;
    double sum;
    assert_ok(reward_new(&options, &r));
    assert_ok(reward_score(r, &input, NULL, &sum));
    reward_free(r);
    return sum;
}

TEST(what_follows_a_nul_is_scored)
{
    struct canned_server server;
    char page[64];
    struct control *control;
    int32_t prompt[] = {1};
    const struct example example = {.prompt_ids = {prompt, 1, 1}};
    const struct sampling_options sampling = {.temperature = 1, .top_p = 1, .max_tokens = 4};
    struct rollout_servers source = {
        .vocab_size = 8, .timeout_ms = 20000, .idle_timeout_ms = 20000};
    struct rollout *r;
    snprintf(page, sizeof page, "/commonweight-nul-%d", (int)getpid());
    assert_ok(control_create(
        page, "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", &control));
    control_owner_update_end(control);
    canned_server_start(&server, serve);
    source.servers[0].control = control;
    source.n_servers = 1;
    assert_ok(http_client_new(server.socket, &source.http));
    assert_ok(rollout_new(1, N, &r));
    r->examples[0] = &example;
    assert_ok(rollout_pull(&source, &sampling, r));
    assert_string_equal(r->completions[0].text, "62\xe2\x90\x80 garbage");
    assert_string_equal(r->completions[2].text, "\xe2\x90\x80"
                                                "61\xe2\x90\x80");
    assert_true(score("exact", r->completions[0].text) == 0);
    assert_true(score("exact", r->completions[1].text) == 1);
    assert_true(score("numeric", r->completions[0].text) == 1); // the last number is still 62
    assert_true(score("numeric", r->completions[2].text) == 0);
    assert_true(fabs(score("length", r->completions[0].text) + 1.0 / 10) < 1e-12); // 11 characters
    rollout_free(r);
    http_client_free(source.http);
    canned_server_stop(&server);
    control_end(control);
    control_free(control);
}
