/* tinker_client.h: a cw-trainer serve of this build, and a client of the Tinker API without Python.
 * Failures fail the running test. One thread. */
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
// On that daemon's bridge, with `runs` (NULL: a new folder) as its --run-dir; waits until it
// serves.
void tinker_server_start(struct tinker_server *s, const struct daemon *d, const char *runs,
                         const char *const more[]);
int tinker_server_stop(struct tinker_server *s); // SIGTERM; its exit status

// Runs a script of the repository with the server's URL, the name "model", the server's --run-dir
// and one of its checks (NULL: all) by a Python that has the SDK; fails the test with what it
// printed unless it ends well.
void tinker_script(const struct tinker_server *s, const char *python, const char *script,
                   const char *check);

// Calls run() for each Python that $COMMONWEIGHT_TINKER_PYTHONS names, with colons between them,
// each with a version of the SDK; without it, for the one of the other tests. Skips where none is
// there.
void tinker_each_python(void (*run)(const char *python));

// One request; `type` NULL: no body.
void tinker_request(const struct tinker_server *s, const char *method, const char *path,
                    const char *type, const struct bytes *body, struct wire_answer *ret);
// POST of JSON text to /api/v1/PATH; the answer, which lives as long as the program and whose
// status must be this (0: any).
json_t *tinker_post(const struct tinker_server *s, const char *path, int status, const char *format,
                    ...) __attribute__((format(printf, 4, 5)));
json_t *tinker_get(const struct tinker_server *s, const char *path, int status);
// The answer of a future, taken: waits for it. With an "error" where it failed.
json_t *tinker_retrieve(const struct tinker_server *s, json_t *future);
// The same of one whose answer is protobuf.
void tinker_retrieve_bytes(const struct tinker_server *s, json_t *future, struct bytes *ret);

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
json_t *tinker_learn(const struct tinker_server *s, const char *model, int seq_id, const char *loss,
                     bool forward_only, const struct tinker_datum *data, int n);
// Takes an answer that must be an error, in whose sentence `why` stands.
void tinker_refused(json_t *answer, const char *why);
// The field's bytes within a message of protobuf.
struct proto_span tinker_field(struct proto_span message, uint32_t number);
// The log-probabilities of all datums (n tokens in all) and the loss, of such a future, taken.
double tinker_logprobs(const struct tinker_server *s, json_t *future, int n, float *ret);
// optim_step, waited for; the gradient's norm.
double tinker_step(const struct tinker_server *s, const char *model, int seq_id, double lr);

#endif
