/* tinker_client.h: the two servers of a test of the Tinker API, a cw-trainer serve of this build on
 * a daemon, and a client of it without Python: every request is to pair.server. What is given back
 * lives as long as the program. Failures fail the running test. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_TINKER_CLIENT_H
#define TESTS_SUPPORT_TINKER_CLIENT_H

#include "tests/support/daemon.h"
#include "common/base/protobuf.h"

struct tinker_server {
    struct test_child child;
    const char *runs, *log; // paths
    int port;
    char key[80]; // that requests are sent with; tinker_server_start(): of the file in `runs`
};
struct tinker_pair {
    struct daemon daemon;
    struct tinker_server server;
};
// A training run, and the number of its last request. What follows is waited for.
struct tinker_run {
    const char *id;
    int seq_id;
};
extern struct tinker_pair pair;
extern const char *session; // of tinker_whole(), or whatever the test began
extern struct tinker_run trained;

// Defines a test that starts the pair, which ends well behind it.
#define TINKER_TEST(name)                                                                          \
    static void in_##name(void);                                                                   \
    TEST(name)                                                                                     \
    {                                                                                              \
        in_##name();                                                                               \
        tinker_pair_stop();                                                                        \
    }                                                                                              \
    static void in_##name(void)

// A daemon that serves a model's folder (NULL: a new tiny one) with these options, and a cw-trainer
// serve on it.
void tinker_pair_start(const char *folder, const char *const daemon_more[],
                       const char *const server_more[]);
void tinker_pair_stop(void); // both, which end well
// kill -9 of the cw-trainer serve, and another on the same folder.
void tinker_pair_kill(const char *const server_more[]);

// On that daemon's bridge, with `runs` (NULL: a new folder) as its --run-dir; waits until it
// serves.
void tinker_server_start(struct tinker_server *s, const struct daemon *d, const char *runs,
                         const char *const more[]);
int tinker_server_stop(struct tinker_server *s); // SIGTERM; its exit status

// Runs a script of the repository with the server's URL, the name "model", the server's --run-dir
// and one of its checks (NULL: all) by a Python that has the SDK; fails the test with what it
// printed unless it ends well.
void tinker_script(const char *python, const char *script, const char *check);

// Calls body() for each Python that $COMMONWEIGHT_TINKER_PYTHONS names, with colons between them,
// each with a version of the SDK; without it, for the one of the other tests. Skips where none is
// there.
void tinker_each_python(void (*body)(const char *python));

// One request; `type` NULL: no body.
void tinker_request(const char *method, const char *path, const char *type,
                    const struct bytes *body, struct wire_answer *ret);
// POST of JSON text to /api/v1/PATH; the answer, whose status must be this (0: any).
json_t *tinker_post(const char *path, int status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
json_t *tinker_get(const char *path, int status);
// The answer of a future: waits for it. With an "error" where it failed.
json_t *tinker_retrieve(json_t *future);
// The same of one whose answer is protobuf.
struct proto_span tinker_message(json_t *future);

// A datum: n tokens and what each is to predict, with inputs by name (n floats each).
struct tinker_datum {
    int n;
    const int32_t *tokens;
    const int64_t *targets;
    const char *names[4]; // NULL-ended
    const float *inputs[4];
};
// A datum's tensor of that shape (columns 0: a list), of floats (1) or int64 (2); and a chunk of
// its tokens.
void tinker_put_tensor(struct bytes *datum, const char *name, int dtype, const void *data,
                       size_t len, int rows, int columns);
void tinker_put_tokens(struct bytes *datum, const int32_t *tokens, int n);
// The body of a forward_backward.
void tinker_put_learn(struct bytes *to, const char *model, int seq_id, const char *loss,
                      bool forward_only, const struct tinker_datum *data, int n);
// forward_backward; its future.
json_t *tinker_learn(const char *model, int seq_id, const char *loss, bool forward_only,
                     const struct tinker_datum *data, int n);
// An answer that must be an error, in whose sentence `why` stands.
void tinker_refused(json_t *answer, const char *why);
// The field's bytes within a message of protobuf.
struct proto_span tinker_field(struct proto_span message, uint32_t number);
// The log-probabilities of all datums (n tokens in all) and the loss, of such a future, taken.
double tinker_logprobs(json_t *future, int n, float *ret);
// optim_step, waited for; the gradient's norm.
double tinker_step(const char *model, int seq_id, double lr);

// Two datums of TINKER_N tokens with "weights", the first of which is 0.
enum { TINKER_N = 6 };
extern const struct tinker_datum tinker_one, tinker_other;

// A client's session: its beginning, and its end.
const char *tinker_session(void);
void tinker_finish(const char *of);
// create_model by these fields of lora_config: its future, or what refuses it.
json_t *tinker_create(const char *of, int number, int status, const char *lora);

// A new session, and its model of rank 0.
struct tinker_run tinker_whole(void);
struct tinker_run tinker_begun(json_t *future);
// load_weights, with the optimizer, as a run of its own.
struct tinker_run tinker_load(int number, const char *path);
// Cross entropy's gradients of a datum of TINKER_N tokens (ret: NULL is fine), a step, both, or the
// log-probabilities alone. The loss; the gradient's norm.
double tinker_run_learn(struct tinker_run *r, const struct tinker_datum *datum, float *ret);
double tinker_run_step(struct tinker_run *r, double lr);
void tinker_run_update(struct tinker_run *r, const struct tinker_datum *datum); // by 1e-2
double tinker_run_score(struct tinker_run *r, const struct tinker_datum *datum,
                        float ret[TINKER_N]);
// how: save_weights, or one of its kind. The path.
const char *tinker_run_save(struct tinker_run *r, const char *how, const char *name);

// Sampling sessions: of a run's weights as they are, with further fields; and of what a field says.
const char *tinker_run_snapshot(struct tinker_run *r, const char *more);
json_t *tinker_sampler(int status, const char *field, const char *value);
const char *tinker_sampler_of(const char *field, const char *value);
// asample of one sample that ends after so many tokens; its future, or what refuses it. more:
// further fields.
json_t *tinker_sample(const char *sampler, int seq_id, int status, int max_tokens,
                      const char *more);
// The first sequence of such a future's answer.
struct tinker_sampled {
    struct proto_span message, sequence;
    size_t n;
    int32_t *tokens;
    float *logprobs;
};
struct tinker_sampled tinker_sampled(json_t *future);
void tinker_same_sample(const struct tinker_sampled *a, const struct tinker_sampled *b);

#endif
