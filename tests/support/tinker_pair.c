/* tinker_pair.c: see tinker_pair.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_pair.h"

static const int32_t tokens[TINKER_N] = {10, 20, 30, 40, 50, 60},
                     others[TINKER_N] = {7, 8, 9, 10, 11, 12};
static const int64_t targets[TINKER_N] = {20, 30, 40, 50, 60, 70},
                     other_targets[TINKER_N] = {8, 9, 10, 11, 12, 13};
static const float weights[TINKER_N] = {0, 1, 1, 0.5f, 1, 1};
const struct tinker_datum tinker_one = {TINKER_N, tokens, targets, {"weights"}, {weights}},
                          tinker_other = {TINKER_N, others, other_targets, {"weights"}, {weights}};

void tinker_pair_start(struct tinker_pair *p, const char *folder, const char *const daemon_more[],
                       const char *const server_more[])
{
    daemon_start(&p->daemon, folder ? folder : daemon_model(test_folder(), true, 5), daemon_more);
    tinker_server_start(&p->server, &p->daemon, NULL, server_more);
}

void tinker_pair_stop(struct tinker_pair *p)
{
    assert_int_equal(tinker_server_stop(&p->server), 0);
    assert_int_equal(daemon_stop(&p->daemon), 0);
}

void tinker_pair_kill(struct tinker_pair *p, const char *const server_more[])
{
    const char *runs = p->server.runs;
    test_kill(&p->server.child, SIGKILL);
    assert_int_equal(test_wait(&p->server.child, 10000), 128 + SIGKILL);
    tinker_server_start(&p->server, &p->daemon, runs, server_more);
}

// ---- sessions and runs --------------------------------------------------------------------------

// Takes the answer, and gives a text of it.
static void copy_text(json_t *answer, const char *key, size_t size, char *ret)
{
    const char *text = json_string_value(json_object_get(answer, key));
    if (!text) fail_msg("no %s: %s", key, json_dumps(answer, 0));
    snprintf(ret, size, "%s", text ? text : "");
    json_decref(answer);
}

void tinker_session(const struct tinker_server *s, char ret[128])
{
    copy_text(tinker_post(s, "create_session", 200, "{}"), "session_id", 128, ret);
}

void tinker_finish(const struct tinker_server *s, const char *session)
{
    char path[256];
    snprintf(path, sizeof path, "sessions/%s/finish", session);
    json_decref(tinker_post(s, path, 200, "{\"reason\":{\"type\":\"success\"},\"detail\":null}"));
}

json_t *tinker_create(const struct tinker_server *s, const char *session, int number, int status,
                      const char *lora)
{
    return tinker_post(s, "create_model", status,
                       "{\"session_id\":\"%s\",\"model_seq_id\":%d,\"base_model\":\"any/model\","
                       "\"lora_config\":{%s}}",
                       session, number, lora);
}

struct tinker_run tinker_begun(const struct tinker_server *s, json_t *future)
{
    struct tinker_run r = {.server = s};
    copy_text(tinker_retrieve(s, future), "model_id", sizeof r.id, r.id);
    return r;
}

struct tinker_run tinker_whole(const struct tinker_server *s, char ret_session[128])
{
    tinker_session(s, ret_session);
    return tinker_begun(s, tinker_create(s, ret_session, 0, 200, "\"rank\":0"));
}

struct tinker_run tinker_load(const struct tinker_server *s, const char *session, int number,
                              const char *path)
{
    return tinker_begun(s, tinker_post(s, "load_weights", 200,
                                       "{\"session_id\":\"%s\",\"model_seq_id\":%d,"
                                       "\"path\":\"%s\",\"optimizer\":true}",
                                       session, number, path));
}

static double cross_entropy(struct tinker_run *r, bool forward_only,
                            const struct tinker_datum *datum, float ret[TINKER_N])
{
    return tinker_logprobs(
        r->server,
        tinker_learn(r->server, r->id, ++r->seq_id, "cross_entropy", forward_only, datum, 1),
        TINKER_N, ret);
}

double tinker_run_learn(struct tinker_run *r, const struct tinker_datum *datum, float *ret)
{
    float unused[TINKER_N];
    return cross_entropy(r, false, datum, ret ? ret : unused);
}

double tinker_run_score(struct tinker_run *r, const struct tinker_datum *datum, float ret[TINKER_N])
{
    return cross_entropy(r, true, datum, ret);
}

double tinker_run_step(struct tinker_run *r, double lr)
{
    return tinker_step(r->server, r->id, ++r->seq_id, lr);
}

void tinker_run_update(struct tinker_run *r, const struct tinker_datum *datum)
{
    tinker_run_learn(r, datum, NULL);
    assert_true(tinker_run_step(r, 1e-2) > 0);
}

void tinker_run_save(struct tinker_run *r, const char *how, const char *name, char ret_path[256])
{
    copy_text(tinker_retrieve(r->server,
                              tinker_post(r->server, how, 200,
                                          "{\"model_id\":\"%s\",\"seq_id\":%d,\"path\":\"%s\"}",
                                          r->id, ++r->seq_id, name)),
              "path", 256, ret_path);
}

// ---- sampling -----------------------------------------------------------------------------------

static int samplers; // so far, of any session

void tinker_run_snapshot(struct tinker_run *r, const char *more, char ret[160])
{
    copy_text(
        tinker_retrieve(
            r->server,
            tinker_post(r->server, "save_weights_for_sampler", 200,
                        "{\"model_id\":\"%s\",\"seq_id\":%d,\"sampling_session_seq_id\":%d%s}",
                        r->id, ++r->seq_id, samplers++, more)),
        "sampling_session_id", 160, ret);
}

json_t *tinker_sampler(const struct tinker_server *s, const char *session, int status,
                       const char *field, const char *value)
{
    return tinker_post(s, "create_sampling_session", status,
                       "{\"session_id\":\"%s\",\"sampling_session_seq_id\":%d,\"%s\":\"%s\"}",
                       session, samplers++, field, value);
}

void tinker_sampler_of(const struct tinker_server *s, const char *session, const char *field,
                       const char *value, char ret[160])
{
    copy_text(tinker_sampler(s, session, 200, field, value), "sampling_session_id", 160, ret);
}

json_t *tinker_sample(const struct tinker_server *s, const char *sampler, int seq_id, int status,
                      int max_tokens, const char *more)
{
    return tinker_post(s, "asample", status,
                       "{\"sampling_session_id\":\"%s\",\"seq_id\":%d,\"prompt\":"
                       "{\"chunks\":[{\"type\":\"encoded_text\",\"tokens\":[10,20]},"
                       "{\"type\":\"encoded_text\",\"tokens\":[30]}]},\"sampling_params\":"
                       "{\"max_tokens\":%d,\"temperature\":1,\"seed\":3,\"stop\":[]}%s}",
                       sampler, seq_id, max_tokens, more);
}
