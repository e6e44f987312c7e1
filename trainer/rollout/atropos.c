/* atropos.c: the source whose samples are what Atropos' environments put into its API server
 * (--atropos). The main thread.
 *
 * Environments have the trained server generate (its /generate and /v1 endpoints), score groups of
 * sequences themselves, and hand them to the API; the trainer registers there once and polls for
 * batches. Which weights sampled a token is told by nobody, so a sequence has no versions: the
 * sampler's log-probabilities that come with it are what says how far it is off the policy. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/rollout/source.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/log.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define ASK_MS  60000 // a batch may be large
#define POLL_MS 250

struct atropos {
    struct source source;
    struct atropos_options options;
    const struct rollout_servers *via; // that environments may ask, and evaluations do
};

// body: of a POST; NULL: a GET.
static enum status ask(const struct atropos *a, const char *path, const json_t *body, json_t **ret)
{
    const struct http_call call = {.server = a->options.url,
                                   .path = path,
                                   .post = body != NULL,
                                   .body = body,
                                   .timeout_ms = ASK_MS};
    return http_perform_json(a->via->http, &call, ret);
}

// ---- registering --------------------------------------------------------------------------------

// Its sizes must be ours: an API that a trainer registered with before keeps that one's.
static enum status check_info(const struct atropos *a, bool registered)
{
    const struct {
        const char *key;
        int64_t ours;
    } sizes[] = {{"batch_size", a->options.batch_size},
                 {"max_token_len", a->options.bounds.max_tokens}};
    enum status st;
    json_t *info = NULL;
    CHECK(ask(a, "/info", NULL, &info));
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int64_t theirs = INT64_MIN;
        CHECK(json_get_int("/info", info, sizes[i].key, -1, INT64_MAX, &theirs));
        if (theirs == INT64_MIN)
            FAIL(ST_FORMAT, "/info has no \"%s\": is this Atropos' run-api?", sizes[i].key);
        if (theirs == sizes[i].ours || (theirs == -1 && !registered)) continue;
        FAIL(ST_MISMATCH,
             "its %s is %" PRId64 ", of a trainer that registered before, and this run's is "
             "%" PRId64 "; begin anew with GET /reset_data, or take that one",
             sizes[i].key, theirs, sizes[i].ours);
    }
out:
    json_decref(info);
    return st;
}

static enum status register_run(const struct atropos *a)
{
    const struct atropos_options *o = &a->options;
    enum status st;
    char checkpoints[PATH_ROOM];
    json_t *body = NULL, *response = NULL;
    CHECK(path_put(checkpoints, o->run_folder, "checkpoints"));
    body = json_pack("{s:s, s:s, s:I, s:I, s:s, s:I, s:I, s:I}", "wandb_group", o->run_folder,
                     "wandb_project", "commonweight", "batch_size", (json_int_t)o->batch_size,
                     "max_token_len", (json_int_t)o->bounds.max_tokens, "checkpoint_dir",
                     checkpoints, "save_checkpoint_interval",
                     (json_int_t)(o->save_steps > 0 ? o->save_steps : o->total_steps),
                     "starting_step", (json_int_t)o->step, "num_steps", (json_int_t)o->total_steps);
    if (!body)
        FAIL(ST_INVALID, "%s: it cannot be registered: its name is not UTF-8", o->run_folder);
    CHECK(ask(a, "/register", body, &response));
    if (!json_is_number(json_object_get(response, "uuid")))
        FAIL(ST_FORMAT, "/register: the response has no \"uuid\"");
out:
    json_decref(response);
    json_decref(body);
    return st;
}

// ---- batches ------------------------------------------------------------------------------------

static enum status wait_for_batch(const struct atropos *a, json_t **ret)
{
    const int64_t deadline = clock_deadline_ns(a->via->timeout_ms);
    json_t *response = NULL, *batch;
    enum status st;
    for (;; clock_sleep_ms(POLL_MS)) {
        json_decref(response);
        response = NULL;
        CHECK(ask(a, "/batch", NULL, &response));
        const char *status = json_string_value(json_object_get(response, "status"));
        if (status && strcmp(status, "error") == 0)
            FAIL(ST_PEER_GONE,
                 "/batch: %s (it was started anew, or its data reset; --resume registers again)",
                 json_string_value(json_object_get(response, "message")));
        if (!(batch = json_object_get(response, "batch")))
            FAIL(ST_FORMAT, "/batch: the response has no \"batch\"");
        if (!json_is_null(batch)) break;
        if (*a->options.stopped)
            FAIL(ST_CANCELLED, "the run was to end while it waited for environments");
        if (clock_ms_until(deadline) == 0)
            FAIL(ST_TIMEOUT,
                 "no batch of %" PRId64 " sequences came within %.0f s (--rollout-timeout): are "
                 "environments running?",
                 a->options.batch_size, a->via->timeout_ms / 1e3);
    }
    *ret = json_incref(batch);
out:
    json_decref(response);
    return st;
}

// Rank 0 asks, and the others have the same text of it: all learn from the batch as it divides its
// groups. An end that was asked for is rank 0's to see, and all ranks'.
static enum status agree_on_batch(const struct atropos *a, json_t **batch)
{
    struct comm *comm = a->via->comm;
    enum status st = ST_OK;
    struct bytes text = BYTES_INIT;
    if (comm_rank(comm) == 0) st = wait_for_batch(a, batch);
    if (!comm || (st != ST_OK && st != ST_CANCELLED)) return st;
    if (*batch) CHECK(json_put_line(&text, json_incref(*batch), 0));
    CHECK(rollout_broadcast(comm, 0, &text));
    if (text.len == 0) FAIL(ST_CANCELLED, "the run was to end while it waited for environments");
    if (!*batch) st = json_parse("rank 0's batch", text.data, text.len, batch);
out:
    bytes_release(&text);
    return st;
}

static enum status pull_batch(struct source *source, struct rollout_step *s)
{
    const struct atropos *a = (struct atropos *)source;
    const int64_t start = clock_now_ns();
    struct rollout *rollout = NULL;
    json_t *batch = NULL;
    enum status st;
    CHECK(agree_on_batch(a, &batch));
    scores_release(&s->scores);
    CHECK(atropos_read_batch("/batch", batch, &a->options.bounds, &rollout, &s->scores));
    if (s->scores.n > a->options.batch_size)
        FAIL(ST_MISMATCH, "/batch: %d sequences, and %" PRId64 " were registered", s->scores.n,
             a->options.batch_size);
    rollout_is_everywhere(rollout);
    rollout_free(s->rollout);
    s->rollout = rollout;
    rollout = NULL;
    s->rollout->seconds = clock_ms_since(start) / 1e3;
    s->scored = true;
out:
    rollout_free(rollout);
    json_decref(batch);
    return status_context(st, "--atropos %s", a->options.url);
}

// ---- the source ---------------------------------------------------------------------------------

enum status atropos_new(const struct atropos_options *options, const struct rollout_servers *via,
                        struct source *servers, struct source **ret)
{
    enum status st = ST_OK;
    struct atropos *a = calloc(1, sizeof *a);
    if (!a) return status_fail(ST_NO_MEMORY, "no memory for a source of samples");
    *a = (struct atropos){{.pull = pull_batch, .on = servers, .own_prompts = true}, *options, via};
    if (comm_rank(via->comm) == 0) {
        CHECK(check_info(a, false));
        CHECK(register_run(a));
        CHECK(check_info(a, true));
    }
    *ret = &a->source;
    a = NULL;
out:
    free(a);
    return status_context(st, "--atropos %s", options->url);
}
