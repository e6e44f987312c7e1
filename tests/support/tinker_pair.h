/* tinker_pair.h: the two servers of a test of the Tinker API, and what it trains on. Failures fail
 * the running test. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_TINKER_PAIR_H
#define TESTS_SUPPORT_TINKER_PAIR_H

#include "tests/support/tinker_client.h"

struct tinker_pair {
    struct daemon daemon;
    struct tinker_server server;
};
// A daemon that serves a model's folder (NULL: a new tiny one) with these options, and a cw-trainer
// serve on it.
void tinker_pair_start(struct tinker_pair *p, const char *folder, const char *const daemon_more[],
                       const char *const server_more[]);
void tinker_pair_stop(struct tinker_pair *p); // both, which end well
// kill -9 of the cw-trainer serve, and another on the same folder.
void tinker_pair_kill(struct tinker_pair *p, const char *const server_more[]);

// Two datums of TINKER_N tokens with "weights", the first of which is 0.
enum { TINKER_N = 6 };
extern const struct tinker_datum tinker_one, tinker_other;

// A client's session: its beginning, and its end.
void tinker_session(const struct tinker_server *s, char ret[128]);
void tinker_finish(const struct tinker_server *s, const char *session);
// create_model by these fields of lora_config: its future, or what refuses it.
json_t *tinker_create(const struct tinker_server *s, const char *session, int number, int status,
                      const char *lora);

// A training run, and the number of its last request. What follows is waited for.
struct tinker_run {
    const struct tinker_server *server;
    char id[128];
    int seq_id;
};
// A new session, and its model of rank 0.
struct tinker_run tinker_whole(const struct tinker_server *s, char ret_session[128]);
struct tinker_run tinker_begun(const struct tinker_server *s, json_t *future); // taken
// load_weights, with the optimizer, as a run of its own.
struct tinker_run tinker_load(const struct tinker_server *s, const char *session, int number,
                              const char *path);
// Cross entropy's gradients of a datum of TINKER_N tokens (ret: NULL is fine), a step, both, or the
// log-probabilities alone. The loss; the gradient's norm.
double tinker_run_learn(struct tinker_run *r, const struct tinker_datum *datum, float *ret);
double tinker_run_step(struct tinker_run *r, double lr);
void tinker_run_update(struct tinker_run *r, const struct tinker_datum *datum); // by 1e-2
double tinker_run_score(struct tinker_run *r, const struct tinker_datum *datum,
                        float ret[TINKER_N]);
// how: save_weights, or one of its kind.
void tinker_run_save(struct tinker_run *r, const char *how, const char *name, char ret_path[256]);

// Sampling sessions: of a run's weights as they are, with further fields; and of what a field says.
void tinker_run_snapshot(struct tinker_run *r, const char *more, char ret[160]);
json_t *tinker_sampler(const struct tinker_server *s, const char *session, int status,
                       const char *field, const char *value);
void tinker_sampler_of(const struct tinker_server *s, const char *session, const char *field,
                       const char *value, char ret[160]);
// asample of one sample that ends after so many tokens; its future, or what refuses it. more:
// further fields.
json_t *tinker_sample(const struct tinker_server *s, const char *sampler, int seq_id, int status,
                      int max_tokens, const char *more);

#endif
