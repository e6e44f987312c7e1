/* test_rollout_pull.c: pulling rollouts from one server and from several, which are children that
 * make up completions out of each group's seed: what comes is the same however it was divided; from
 * one that has POST /v1/completions and no versions, as vLLM, or not quite; and what a line of a
 * rollout must say. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/canned_server.h"
#include "tests/support/control_test.h"
#include "trainer/rollout/rollout.h"

#include <pthread.h>

#define GROUPS  5
#define SAMPLES 3

static void serve_group(int fd, const json_t *group)
{
    const json_int_t id = json_integer_value(json_object_get(group, "id"));
    const json_int_t seed = json_integer_value(json_object_get(group, "seed"));
    const json_int_t n = json_integer_value(json_object_get(group, "n"));
    for (int i = (int)n - 1; i >= 0; i--) {
        char line[256];
        snprintf(
            line, sizeof line,
            "{\"group_id\": %d, \"sample\": %d, \"finish_reason\": \"stop\", \"text\": \"%d\", "
            "\"token_ids\": [%d, %d], \"logprobs\": [-1, -2], \"weight_versions\": [2, 2]}\n",
            (int)id, i, i, (int)(((uint64_t)seed >> 7) % 50), i);
        canned_chunk(fd, line);
    }
}

// Completions of the groups asked for, last group first; every other request is refused as busy.
// The first token of a prompt says what is to go wrong with its group.
enum { FINE = 1, NO_IDS, ONE_CHOICE, BAD_INDEX, NO_LOGPROBS, NOT_JSON, ABORTED, CLOSED };
enum { MISSING = 60, FOREIGN, STALLED };

static void serve(int fd)
{
    char request[16384];
    for (int n = 0; canned_request(fd, request, sizeof request); n++) {
        json_t *body = test_keep(json_loads(canned_body(request), 0, NULL));
        const json_t *groups = json_object_get(body, "groups");
        if (n % 2 == 0) {
            canned_response(fd, "429 Too Many Requests", "{\"error\": {\"message\": \"full\"}}");
            continue;
        }
        canned_chunked(fd);
        for (size_t g = json_array_size(groups); g-- > 0;) {
            json_t *group = json_array_get(groups, g);
            const json_int_t token =
                json_integer_value(json_array_get(json_object_get(group, "prompt_token_ids"), 0));
            if (token == MISSING) continue;
            if (token == STALLED) sleep(60);
            if (token == FOREIGN) json_object_set_new(group, "id", json_integer(GROUPS - 1));
            serve_group(fd, group);
        }
        canned_end(fd);
    }
}

// Breaks off in the middle of the first group.
static void serve_half(int fd)
{
    char request[16384];
    if (!canned_request(fd, request, sizeof request)) return;
    json_t *body = test_keep(json_loads(canned_body(request), 0, NULL));
    json_t *group = json_array_get(json_object_get(body, "groups"), 0);
    json_object_set_new(group, "n", json_integer(SAMPLES - 1));
    canned_chunked(fd);
    serve_group(fd, group);
}

static void serve_choices(int fd, const json_t *body, json_int_t token)
{
    char text[1024], list[2][300];
    const long long seed = json_integer_value(json_object_get(body, "seed"));
    for (int i = 0; i < 2; i++) {
        char ids[60], logprobs[60];
        snprintf(ids, sizeof ids, ", \"token_ids\": [%d, %d]", (int)((unsigned)seed % 50), i);
        snprintf(logprobs, sizeof logprobs, "{\"token_logprobs\": [-1, -2]}");
        snprintf(list[i], sizeof list[i],
                 "{\"index\": %d, \"finish_reason\": \"%s\", \"text\": \"%d\", \"logprobs\": %s%s}",
                 token == BAD_INDEX ? 7 : i, token == ABORTED ? "abort" : "length", i,
                 token == NO_LOGPROBS ? "null" : logprobs, token == NO_IDS ? "" : ids);
    }
    snprintf(text, sizeof text, "{\"choices\": [%s%s%s]}", list[1], token == ONE_CHOICE ? "" : ", ",
             token == ONE_CHOICE ? "" : list[0]);
    canned_response(fd, "200 OK", token == NOT_JSON ? "<html>" : text);
}

static void serve_completions(int fd)
{
    char request[16384];
    while (canned_request(fd, request, sizeof request)) {
        json_t *body = test_keep(json_loads(canned_body(request), 0, NULL));
        const json_int_t token =
            json_integer_value(json_array_get(json_object_get(body, "prompt"), 0));
        const char *model = json_string_value(json_object_get(body, "model"));
        if (token == CLOSED) return;
        if (!canned_is(request, "/v1/completions") || !model || strcmp(model, "of-the-test") != 0 ||
            json_integer_value(json_object_get(body, "n")) != 2 ||
            !json_is_true(json_object_get(body, "return_token_ids")))
            canned_response(fd, "400 Bad Request", "{\"error\": {\"message\": \"not so\"}}");
        else
            serve_choices(fd, body, token);
    }
}

static struct canned_server servers[3], half, choices;
static struct control *control;
static const struct sampling_options sampling = {
    .temperature = 1, .top_p = 1, .max_tokens = 4, .seed = 12345};

LATER(http_client_free)
LATER(rollout_free)

static struct rollout_servers source_of(int n_servers)
{
    struct rollout_servers s = {
        .n_servers = n_servers, .vocab_size = 64, .timeout_ms = 60000, .idle_timeout_ms = 60000};
    for (int k = 0; k < n_servers; k++)
        s.servers[k] =
            (struct rollout_server){k == 1 ? servers[k].url : servers[k].socket, control, NULL};
    assert_ok(http_client_new(servers[0].socket, &s.http));
    test_later(s.http, http_client_free_later);
    return s;
}

// To be pulled: prompts of one token, which is fine but in one group.
static struct rollout *rollout_of(int n_groups, int n_samples, int32_t token, int odd_group)
{
    static int32_t fine[] = {FINE};
    int32_t *odd = test_keep(malloc(sizeof *odd));
    struct example *examples = test_keep(calloc((size_t)n_groups, sizeof *examples));
    struct rollout *r;
    *odd = token;
    assert_ok(rollout_new(n_groups, n_samples, &r));
    for (int g = 0; g < n_groups; g++) {
        examples[g] = (struct example){.prompt_ids = {g == odd_group ? odd : fine, 1, 1}};
        r->examples[g] = &examples[g];
    }
    return test_later(r, rollout_free_later);
}

// GROUPS of SAMPLES, all fine.
static struct rollout *pulled(const struct rollout_servers *source)
{
    struct rollout *r = rollout_of(GROUPS, SAMPLES, FINE, 0);
    assert_ok(rollout_pull(source, &sampling, r));
    return r;
}

static void assert_same(const struct rollout *a, const struct rollout *b)
{
    assert_int_equal(a->n_tokens, b->n_tokens);
    for (int i = 0; i < GROUPS * SAMPLES; i++) {
        assert_int_equal(a->completions[i].n, 2);
        assert_memory_equal(a->completions[i].ids, b->completions[i].ids, 2 * sizeof(int32_t));
        assert_string_equal(a->completions[i].text, b->completions[i].text);
    }
}

// Busy at first, over a Unix socket, over TCP, and of both.
TEST(the_split_changes_nothing)
{
    struct rollout *alone = NULL;
    for (int n = 1; n <= 3; n++) {
        const struct rollout_servers source = source_of(n);
        struct rollout *r = pulled(&source);
        if (alone)
            assert_same(alone, r);
        else
            alone = r;
    }
    int differing = 0;
    for (int g = 1; g < GROUPS; g++)
        differing += alone->completions[g * SAMPLES].ids[0] != alone->completions[0].ids[0];
    assert_true(differing > 0); // each group has a seed of its own
}

TEST(one_server_s_fault_is_the_pull_s)
{
    static const struct {
        int n_servers;
        int32_t token;
        int group;
        enum status status;
        const char *sentence;
    } faults[] = {
        {1, MISSING, 2, ST_FORMAT, "12 samples of the 15 asked for"},
        {3, MISSING, 2, ST_FORMAT, "0 samples of the 3 asked for"},
        {1, FOREIGN, 0, ST_MISMATCH, "group 4 sample 2: came twice"},
        {3, FOREIGN, 0, ST_INVALID, "group_id"}, // of another server's groups
        {3, STALLED, 1, ST_TIMEOUT, "nothing arrived for 400 ms"},
    };
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        struct rollout_servers source = source_of(faults[i].n_servers);
        if (faults[i].token == STALLED) source.idle_timeout_ms = 400;
        struct rollout *r = rollout_of(GROUPS, SAMPLES, faults[i].token, faults[i].group);
        assert_fails(rollout_pull(&source, &sampling, r), faults[i].status, faults[i].sentence);
    }
}

// A group is as old as its oldest token; one too old is pulled again, alone and with its own seed.
TEST(what_is_too_old_is_pulled_again)
{
    struct rollout_servers source = source_of(1);
    int32_t missing[] = {MISSING};
    struct example others = {.prompt_ids = {missing, 1, 1}};
    struct rollout *r = pulled(&source);
    for (int i = 0; i < GROUPS * SAMPLES; i++)
        for (int t = 0; t < 2; t++) r->completions[i].versions[t] = 6;
    struct completion *old = &r->completions[3 * SAMPLES + 1];
    old->versions[1] = 4;
    assert_int_equal(rollout_oldest(r, 3), 4);
    assert_int_equal(rollout_oldest(r, 2), 6);
    const int32_t first_id = old->ids[0];
    assert_int_equal(rollout_drop_older(r, 4), 0);
    assert_int_equal(rollout_drop_older(r, 6), 1);
    assert_int_equal(r->n_tokens, 2 * (GROUPS - 1) * SAMPLES);
    assert_null(old->text);
    for (int g = 0; g < GROUPS; g++) // of the others nothing comes, so it would be missed
        if (g != 3) r->examples[g] = &others;
    assert_ok(rollout_pull(&source, &sampling, r));
    assert_int_equal(r->n_tokens, 2 * GROUPS * SAMPLES);
    assert_int_equal(old->ids[0], first_id);
    assert_int_equal(rollout_oldest(r, 3), 2); // as this server has it
    assert_int_equal(rollout_oldest(r, 2), 6);
}

TEST(a_server_that_is_gone_is_named)
{
    struct rollout_servers source = source_of(2);
    source.servers[1].address = "/nonexistent/s.sock";
    assert_fails(rollout_pull(&source, &sampling, rollout_of(GROUPS, SAMPLES, FINE, 0)),
                 ST_PEER_GONE, "nobody answers on socket /nonexistent/s.sock");
}

// Whatever a worker does wrong, the others do its groups, to the same tokens; it gets no more.
TEST(a_worker_s_fault_is_its_own)
{
    const struct {
        const char *address;
        uint64_t version; // of its tokens it is 2
        bool down;
    } workers[] = {
        {servers[1].url, 2, false},
        {"/nonexistent/s.sock", 2, true},
        {half.socket, 2, true},
        {servers[1].socket, 4, true},
    };
    struct rollout_servers source = source_of(1);
    const struct rollout *alone = pulled(&source);
    for (size_t i = 0; i < sizeof workers / sizeof *workers; i++) {
        struct rollout_worker worker = {
            .name = "of-the-test", .version = workers[i].version, .copy_of = 40};
        int of_copy = 0;
        source = source_of(2);
        source.servers[1].address = workers[i].address;
        source.servers[1].worker = &worker;
        const struct rollout *r = pulled(&source);
        assert_same(alone, r);
        for (int k = 0; k < GROUPS * SAMPLES; k++) of_copy += r->completions[k].versions[1] == 40;
        assert_int_equal(worker.down, workers[i].down);
        assert_int_equal(worker.n_failures, workers[i].down);
        assert_int_equal(of_copy > 0, !workers[i].down);
        if (!workers[i].down) assert_int_equal(worker.n_samples, of_copy);
        // and one that is down is not asked
        worker.down = true;
        worker.n_samples = worker.n_failures = 0;
        pulled(&source);
        assert_int_equal(worker.n_samples + worker.n_failures, 0);
    }
}

static _Atomic bool cancelled;

static void *cancel_soon(void *context)
{
    clock_sleep_ms(150);
    cancelled = true;
    return context;
}

TEST(it_can_be_cancelled)
{
    struct rollout_servers source = source_of(2);
    struct rollout *r = rollout_of(GROUPS, SAMPLES, STALLED, 0);
    pthread_t thread;
    source.cancelled = &cancelled;
    assert_int_equal(pthread_create(&thread, NULL, cancel_soon, NULL), 0);
    const int64_t start = clock_now_ns();
    assert_status(rollout_pull(&source, &sampling, r), ST_CANCELLED);
    assert_true(clock_ms_since(start) < 30000);
    pthread_join(thread, NULL);
}

// More groups than connections that libcurl keeps.
static enum status pull_choices(struct rollout_worker *worker, int32_t odd, struct rollout **ret)
{
    struct rollout_servers source = source_of(1);
    *worker = (struct rollout_worker){
        .name = "of-the-test", .completions_of = "of-the-test", .version = 2, .copy_of = 40};
    source.servers[0] = (struct rollout_server){choices.url, control, worker};
    *ret = rollout_of(20, 2, odd, 19);
    return rollout_pull(&source, &sampling, *ret);
}

TEST(choices_are_samples)
{
    struct rollout_worker worker;
    struct rollout *r, *again;
    struct rollout_servers source = source_of(1);
    assert_ok(pull_choices(&worker, FINE, &r));
    assert_status(pull_choices(&worker, CLOSED, &again), ST_PEER_GONE);
    assert_true(worker.down); // what came whole stays
    source.servers[0] = (struct rollout_server){choices.url, control, &worker};
    again->examples[19] = again->examples[0];
    assert_fails(rollout_pull(&source, &sampling, again), ST_PEER_GONE,
                 "none of the servers that sample answers");
    worker.down = false;
    assert_ok(rollout_pull(&source, &sampling, again));
    assert_int_equal(r->n_tokens, 2 * 20 * 2);
    assert_int_equal(again->n_tokens, r->n_tokens);
    int differing = 0;
    for (int i = 0; i < 20 * 2; i++) {
        const struct completion *c = &r->completions[i];
        assert_int_equal(c->ids[1], i % 2);
        assert_int_equal(c->ids[0], again->completions[i].ids[0]);
        assert_true(c->versions[0] == 40 && c->versions[1] == 40 && c->truncated);
        differing += c->ids[0] != r->completions[0].ids[0];
    }
    assert_true(differing > 0); // each group has a seed of its own
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
        struct rollout *r;
        assert_fails(pull_choices(&worker, faults[i].token, &r), faults[i].status,
                     faults[i].sentence);
        assert_int_equal(worker.n_failures, 1);
    }
}

// Which model wrote each token is asked for, and checked.
TEST_EACH(lines_with_a_mask, "rollout")
{
    const bool tandem = row_flag(cases, i, "tandem");
    const struct completion_bounds bounds = {
        .vocab_size = 10, .max_tokens = 4, .tandem = tandem, .oldest = 2, .newest = 4};
    const json_t *line = json_at(cases, "%zu.line", i);
    struct completion c;
    if (row_status(cases, i, "status") != ST_OK) {
        assert_fails(completion_read("line", line, &bounds, &c), row_status(cases, i, "status"),
                     row_text(cases, i, "says"));
        return;
    }
    assert_ok(completion_read("line", line, &bounds, &c));
    assert_int_equal(c.authors != NULL, tandem);
    for (int t = 0; t < 3; t++)
        assert_int_equal(token_author(c.authors, t),
                         tandem && t == 1 ? AUTHOR_FROZEN : AUTHOR_POLICY);
    completion_release(&c);
}

static void open_all(void)
{
    control = control_test_owner();
    for (int k = 0; k < 3; k++) canned_server_start(&servers[k], serve);
    canned_server_start(&half, serve_half);
    canned_server_start(&choices, serve_completions);
}

static void close_all(void)
{
    for (int k = 0; k < 3; k++) canned_server_stop(&servers[k]);
    canned_server_stop(&half);
    canned_server_stop(&choices);
    control_test_end(control);
}

TESTS_BETWEEN(open_all, close_all)
