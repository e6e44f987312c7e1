/* test_publish.c: no torn read, ever. A second process publishes 1,000 updates while a daemon
 * generates flat out; every sampled token must carry a version and the log-probability which that
 * version's weights give it.
 *
 * Version v multiplies the vocabulary matrix by scale(v). Nothing before it changes, so the cache
 * of a request in flight stays right, the logits of version v are scale(v) times those of the
 * folder's weights, and a matrix read half old, half new would give log-probabilities of no version
 * at all. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "common/http/http_client.h"
#include "tests/support/daemon.h"
#include "tests/support/reference.h"
#include <sys/wait.h>

#define PUBLISHES  1000
#define MAX_TOKENS 48
#define PROMPT     6

static double scale(uint64_t version)
{
    return version <= 2 ? 1.0 : 0.25 + (double)(version / 2 * 37 % 101) / 50.0;
}

// ---- the publishing process ---------------------------------------------------------------------
struct publisher {
    struct bridge *bridge;
    float *base;   // the folder's vocabulary matrix
    float *scaled; // (n) the next version's
    void *head;    // the shared one, device memory
    int64_t n;
};

static enum status write_head(void *context)
{
    struct publisher *p = context;
    double s =
        scale(control_version(bridge_control(p->bridge)) + 1); // odd now; this is the next even one
    for (int64_t i = 0; i < p->n; i++) p->scaled[i] = (float)(s * (double)p->base[i]);
    device_copy_in(bridge_device(p->bridge), p->head, p->scaled, (size_t)p->n * sizeof *p->scaled);
    return ST_OK;
}

static enum status publish_all(const char *bridge_path, const char *model)
{
    struct publisher p = {0};
    struct model_config *config = NULL;
    struct weights *weights = NULL;
    enum status st;
    CHECK(bridge_attach(bridge_path, NULL, &p.bridge));
    CHECK(bridge_become_writer(p.bridge));
    CHECK(model_config_load(model, &config));
    CHECK(weights_plan(config, DT_F32, &weights));
    weights_bind(weights, bridge_base(p.bridge, "policy"));
    p.head = weights->at[ROLE_HEAD];
    p.n = (int64_t)config->vocab_size * config->hidden;
    p.base = malloc((size_t)p.n * sizeof *p.base);
    p.scaled = malloc((size_t)p.n * sizeof *p.scaled);
    device_copy_out(bridge_device(p.bridge), p.base, p.head, (size_t)p.n * sizeof *p.base);
    CHECK(device_sync(bridge_device(p.bridge)));
    for (int i = 0; i < PUBLISHES; i++) {
        struct publish_times times;
        CHECK(bridge_publish(p.bridge, 10000, write_head, &p, &times));
        usleep(1000); // a step or two in between, so that versions are sampled from
    }
out:
    if (st != ST_OK) fprintf(stderr, "publisher: %s\n", status_message());
    bridge_detach(p.bridge);
    weights_free(weights);
    model_config_free(config);
    free(p.base);
    free(p.scaled);
    return st;
}

// ---- what the daemon says -----------------------------------------------------------------------
struct seen {
    struct reference reference;
    float *logits;                  // (PROMPT + MAX_TOKENS, vocab)
    long samples, tokens, spanning; // spanning: samples that lived through an update
    uint64_t first, last;           // versions
    double worst, tolerance;
    bool versions[PUBLISHES + 2];
};

static double logprob_of(const float *logits, int vocab, double s, int token)
{
    double largest = -INFINITY, sum = 0;
    for (int v = 0; v < vocab; v++) largest = fmax(largest, s * (double)logits[v]);
    for (int v = 0; v < vocab; v++) sum += exp(s * (double)logits[v] - largest);
    return s * (double)logits[token] - largest - log(sum);
}

// Checking is slower than generating: lines are kept until the publisher is done.
static enum status keep_line(void *context, const char *line, size_t len)
{
    struct bytes *lines = context;
    bytes_append(lines, line, len);
    bytes_puts(lines, "\n");
    return ST_OK;
}

static void check_sample(struct seen *seen, const char *line, size_t len)
{
    int vocab = seen->reference.config->vocab_size;
    int32_t ids[PROMPT + MAX_TOKENS] = {3, 1, 4, 1, 5, 9};
    json_t *sample = NULL;
    uint64_t before = 0;
    assert_ok(json_parse("rollouts", line, len, &sample));
    const json_t *tokens = json_object_get(sample, "token_ids"),
                 *logprobs = json_object_get(sample, "logprobs"),
                 *versions = json_object_get(sample, "weight_versions");
    size_t n = json_array_size(tokens);
    if (n != MAX_TOKENS) fail_msg("a sample of %zu tokens: %.*s", n, (int)len, line);
    assert_int_equal(json_array_size(logprobs), n);
    assert_int_equal(json_array_size(versions), n);
    for (size_t i = 0; i < n; i++)
        ids[PROMPT + i] = (int32_t)json_integer_value(json_array_get(tokens, i));
    reference_logits(&seen->reference, ids, PROMPT + MAX_TOKENS, seen->logits);
    for (size_t i = 0; i < n; i++) {
        uint64_t version = (uint64_t)json_integer_value(json_array_get(versions, i));
        assert_int_equal(version % 2, 0);
        assert_in_range(version, 2, 2 + 2 * PUBLISHES);
        assert_true(version >= before);
        if (before && version > before) seen->spanning++;
        before = version;
        seen->versions[version / 2] = true;
        if (seen->first == 0) seen->first = version;
        seen->last = version;
        const float *row = seen->logits + (size_t)(PROMPT + (int)i - 1) * (size_t)vocab;
        double want = logprob_of(row, vocab, scale(version), ids[PROMPT + i]);
        double have = json_number_value(json_array_get(logprobs, i));
        seen->worst = fmax(seen->worst, fabs(have - want));
        if (!(fabs(have - want) < seen->tolerance))
            fail_msg("token %zu, version %llu: log-probability %.7f, its weights give %.7f", i,
                     (unsigned long long)version, have, want);
        seen->tokens++;
    }
    seen->samples++;
}

TEST(no_read_is_torn)
{
    const char *folder = test_folder(), *model = daemon_model(folder, false, 11);
    const char *const *options = args("--max-batch 16");
    struct daemon daemon = {0};
    struct seen seen = {0};
    struct http_client *client;
    SCOPED(bytes_release) struct bytes lines = BYTES_INIT;
    int child_status = -1;
    reference_open(model, "cpu", &seen.reference);
    // The reference is the CPU's. A GPU sums in other orders, and the scale enlarges what that is
    // worth in f32 (2.2e-5 was seen); a torn read would be off by tenths.
    seen.tolerance = on_cpu() ? 2e-5 : 1e-4;
    seen.logits =
        malloc(sizeof(float) * (PROMPT + MAX_TOKENS) * (size_t)seen.reference.config->vocab_size);
    daemon_start(&daemon, model, options);
    assert_ok(http_client_new(daemon.socket, &client));
    json_t *body =
        test_keep(json_pack("{s:[{s:s, s:[i,i,i,i,i,i], s:i}], s:{s:i, s:f, s:b}}", "groups", "id",
                            "g", "prompt_token_ids", 3, 1, 4, 1, 5, 9, "n", 16, "sampling",
                            "max_tokens", MAX_TOKENS, "temperature", 1.0, "ignore_eos", 1));
    assert_non_null(body);
    const struct http_call call = {.path = "/v1/rollouts",
                                   .post = true,
                                   .body = body,
                                   .timeout_ms = 30000,
                                   .idle_timeout_ms = 30000,
                                   .on_line = keep_line,
                                   .context = &lines};
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) _exit(publish_all(daemon.bridge, model) == ST_OK ? 0 : 1);
    int64_t deadline = clock_deadline_ns(120 * 1000);
    for (int seed = 1; waitpid(child, &child_status, WNOHANG) == 0; seed++) {
        assert_true(clock_now_ns() < deadline);
        json_object_set_new(json_object_get(body, "sampling"), "seed", json_integer(seed));
        assert_ok(http_perform(client, &call, NULL));
    }
    assert_int_equal(child_status, 0);
    assert_ok(http_perform(client, &call, NULL));
    for (char *line = lines.data, *end; (end = strchr(line, '\n')); line = end + 1)
        check_sample(&seen, line, (size_t)(end - line));
    assert_int_equal(seen.last, 2 + 2 * PUBLISHES);
    int sampled = 0;
    for (int i = 0; i < PUBLISHES + 2; i++) sampled += seen.versions[i];
    print_message(
        "%d publishes; %ld samples, %ld tokens of %d versions, %ld updates under a running sample; "
        "worst log-probability off by %.2e\n",
        PUBLISHES, seen.samples, seen.tokens, sampled, seen.spanning, seen.worst);
    assert_true(sampled > PUBLISHES / 2); // generation did run all along
    assert_true(seen.spanning > PUBLISHES / 2);
    http_client_free(client);
    assert_int_equal(daemon_stop(&daemon), 0);
    free(seen.logits);
    reference_close(&seen.reference);
}
