/* test_rollout_pull.c: pulling rollouts from one server and from several, which are children that
 * make up completions out of each group's seed: what comes is the same however it was divided. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/control.h"
#include "tests/support/canned_server.h"
#include "tests/support/support.h"
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
// Tokens above 50 in a prompt say what is to go wrong with its group.
enum { FINE = 1, MISSING = 60, FOREIGN, STALLED };

static void serve(int fd)
{
    char request[16384];
    for (int n = 0; canned_request(fd, request, sizeof request); n++) {
        json_t *body = json_loads(canned_body(request), 0, NULL);
        const json_t *groups = json_object_get(body, "groups");
        if (n % 2 == 0) {
            canned_response(fd, "429 Too Many Requests", "{\"error\": {\"message\": \"full\"}}");
            json_decref(body);
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
        json_decref(body);
    }
}

// Breaks off in the middle of the first group.
static void serve_half(int fd)
{
    char request[16384];
    if (!canned_request(fd, request, sizeof request)) return;
    json_t *body = json_loads(canned_body(request), 0, NULL);
    json_t *group = json_array_get(json_object_get(body, "groups"), 0);
    json_object_set_new(group, "n", json_integer(SAMPLES - 1));
    canned_chunked(fd);
    serve_group(fd, group);
    json_decref(body);
}

static struct canned_server servers[3], half;
static struct control *control;
static const struct sampling_options sampling = {
    .temperature = 1, .top_p = 1, .max_tokens = 4, .seed = 12345};

static struct rollout_servers source_of(int n_servers)
{
    struct rollout_servers s = {
        .n_servers = n_servers, .vocab_size = 64, .timeout_ms = 60000, .idle_timeout_ms = 60000};
    for (int k = 0; k < n_servers; k++)
        s.servers[k] =
            (struct rollout_server){k == 1 ? servers[k].url : servers[k].socket, control, NULL};
    assert_ok(http_client_new(servers[0].socket, &s.http));
    return s;
}

static enum status pull(const struct rollout_servers *source, int32_t first_token, int odd_group,
                        struct rollout **ret)
{
    int32_t fine[] = {FINE}, odd[] = {first_token};
    struct example examples[GROUPS];
    struct rollout *r;
    assert_ok(rollout_new(GROUPS, SAMPLES, &r));
    for (int g = 0; g < GROUPS; g++) {
        examples[g] = (struct example){.prompt_ids = {g == odd_group ? odd : fine, 1, 1}};
        r->examples[g] = &examples[g];
    }
    enum status st = rollout_pull(source, &sampling, r);
    if (st == ST_OK)
        *ret = r;
    else
        rollout_free(r);
    return st;
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
        struct rollout_servers source = source_of(n);
        struct rollout *r = NULL;
        assert_ok(pull(&source, FINE, 0, &r));
        if (alone) {
            assert_same(alone, r);
            rollout_free(r);
        } else {
            alone = r;
        }
        http_client_free(source.http);
    }
    int differing = 0;
    for (int g = 1; g < GROUPS; g++)
        differing += alone->completions[g * SAMPLES].ids[0] != alone->completions[0].ids[0];
    assert_true(differing > 0); // each group has a seed of its own
    rollout_free(alone);
}

static void assert_refused(int n_servers, int32_t token, int group, enum status status,
                           const char *sentence)
{
    struct rollout_servers source = source_of(n_servers);
    struct rollout *r = NULL;
    if (token == STALLED) source.idle_timeout_ms = 400;
    assert_fails(pull(&source, token, group, &r), status, sentence);
    assert_null(r);
    http_client_free(source.http);
}

TEST(one_server_s_fault_is_the_pull_s)
{
    assert_refused(1, MISSING, 2, ST_FORMAT, "12 samples of the 15 asked for");
    assert_refused(3, MISSING, 2, ST_FORMAT, "0 samples of the 3 asked for");
    assert_refused(1, FOREIGN, 0, ST_MISMATCH, "group 4 sample 2: came twice");
    assert_refused(3, FOREIGN, 0, ST_INVALID, "group_id"); // of another server's groups
    assert_refused(3, STALLED, 1, ST_TIMEOUT, "nothing arrived for 400 ms");
}

// A group is as old as its oldest token; one too old is pulled again, alone and with its own seed.
TEST(what_is_too_old_is_pulled_again)
{
    struct rollout_servers source = source_of(1);
    struct example examples[GROUPS];
    int32_t fine[] = {FINE}, missing[] = {MISSING};
    struct rollout *r = NULL;
    assert_ok(pull(&source, FINE, 0, &r));
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
    for (int g = 0; g < GROUPS; g++) { // of the others nothing comes, so it would be missed
        examples[g] = (struct example){.prompt_ids = {g == 3 ? fine : missing, 1, 1}};
        r->examples[g] = &examples[g];
    }
    assert_ok(rollout_pull(&source, &sampling, r));
    assert_int_equal(r->n_tokens, 2 * GROUPS * SAMPLES);
    assert_int_equal(old->ids[0], first_id);
    assert_int_equal(rollout_oldest(r, 3), 2); // as this server has it
    assert_int_equal(rollout_oldest(r, 2), 6);
    rollout_free(r);
    http_client_free(source.http);
}

TEST(a_server_that_is_gone_is_named)
{
    struct rollout_servers source = source_of(2);
    struct rollout *r = NULL;
    source.servers[1].address = "/nonexistent/s.sock";
    assert_fails(pull(&source, FINE, 0, &r), ST_PEER_GONE,
                 "nobody answers on socket /nonexistent/s.sock");
    http_client_free(source.http);
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
    struct rollout *alone = NULL;
    assert_ok(pull(&source, FINE, 0, &alone));
    http_client_free(source.http);
    for (size_t i = 0; i < sizeof workers / sizeof *workers; i++) {
        struct rollout_worker worker = {
            .name = "of-the-test", .version = workers[i].version, .copy_of = 40};
        struct rollout *r = NULL;
        int of_copy = 0;
        source = source_of(2);
        source.servers[1].address = workers[i].address;
        source.servers[1].worker = &worker;
        assert_ok(pull(&source, FINE, 0, &r));
        assert_same(alone, r);
        for (int k = 0; k < GROUPS * SAMPLES; k++) of_copy += r->completions[k].versions[1] == 40;
        assert_int_equal(worker.down, workers[i].down);
        assert_int_equal(worker.n_failures, workers[i].down);
        assert_int_equal(of_copy > 0, !workers[i].down);
        if (!workers[i].down) assert_int_equal(worker.n_samples, of_copy);
        rollout_free(r);
        // and one that is down is not asked
        worker.down = true;
        worker.n_samples = worker.n_failures = 0;
        assert_ok(pull(&source, FINE, 0, &r));
        assert_int_equal(worker.n_samples + worker.n_failures, 0);
        rollout_free(r);
        http_client_free(source.http);
    }
    rollout_free(alone);
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
    struct rollout *r = NULL;
    pthread_t thread;
    source.cancelled = &cancelled;
    assert_int_equal(pthread_create(&thread, NULL, cancel_soon, NULL), 0);
    const int64_t start = clock_now_ns();
    assert_status(pull(&source, STALLED, 0, &r), ST_CANCELLED);
    assert_true(clock_ms_since(start) < 30000);
    pthread_join(thread, NULL);
    http_client_free(source.http);
}

static void open_all(void)
{
    char page[64];
    snprintf(page, sizeof page, "/commonweight-pull-%d", (int)getpid());
    assert_ok(control_create(
        page, "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", &control));
    control_owner_update_end(control);
    for (int k = 0; k < 3; k++) canned_server_start(&servers[k], serve);
    canned_server_start(&half, serve_half);
}

static void close_all(void)
{
    for (int k = 0; k < 3; k++) canned_server_stop(&servers[k]);
    canned_server_stop(&half);
    control_end(control);
    control_free(control);
}

TESTS_BETWEEN(open_all, close_all)
