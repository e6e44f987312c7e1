/* engine_bench.h: an engine on the CPU with random models of a test's own folder, what came back of
 * its requests, and another process that writes its weights: the test's program again, with
 * "--writer" as its first word. Failures fail the running test. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_ENGINE_BENCH_H
#define TESTS_SUPPORT_ENGINE_BENCH_H

#include "infer-server/engine/engine.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include <pthread.h>

enum { VOCAB = 320, MAX_SAMPLES = 8, MAX_TOKENS = 512, MAX_TOP = 8, WAIT_MS = 60000 };

extern const char *folder, *model_a, *model_b; // two models of one layout
extern const char *bridge_path; // of the test's engine; one that failed may still hold its own
void engine_bench_set_up(void); // makes them; for TESTS_BETWEEN
void for_each_golden(void (*serve)(const char *model)); // every model of tests/golden
// A folder with the same model, which takes 4,096 positions: where the state of a sequence is as
// large as the keys of some hundred tokens, only longer ones are short of blocks.
const char *longer_model(const char *model);
// One whose states forget little (A_log), where such a model's forget a row within some twenty:
// what is wrong with a state shows far behind.
const char *lasting_model(const char *model);

struct take { // what came back of a request; its tag. All of them stay until the program ends
    struct take *next;
    struct request *request;
    int n_prompt, n_top, n_prompt_top;
    struct prompt_token prompt[MAX_TOKENS];
    struct top_logprob prompt_top[MAX_TOKENS][MAX_TOP];
    int times_told; // of its prompt
    int reload_at;  // so many tokens of sample 0: asks for model_b; 0: never
    struct {
        struct token_record tokens[MAX_TOKENS];
        struct top_logprob top[MAX_TOKENS][MAX_TOP];
        int n;
        enum finish_reason finish;
        struct sample_telemetry telemetry;
        char error[128];
    } sample[MAX_SAMPLES];
    bool done;
};
struct bench { // an engine and what the events' thread shares with the test's
    struct engine *engine;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    _Atomic int slow_ms; // the engine is held up by this much an event: time to act in the middle
    bool commanded;
    enum status command_status;
    char message[256];
    uint64_t version, canary, first_sums[2];
    int open; // requests, of a test that counts them: bench_submitted(), bench_ended()
    bool info_given;
};

// ---- engines -----------------------------------------------------------------------------------
struct engine_options plain_options(void); // with a bridge path of its own, now bridge_path
void bench_start(struct bench *b, const struct engine_options *options);
// With a callback of the test's own, whose context is the bench.
void bench_start_as(struct bench *b, const struct engine_options *options,
                    engine_event_fn callback);
void bench_end(struct bench *b);
void bench_submitted(struct bench *b);
void bench_ended(struct bench *b);
void bench_await(struct bench *b); // until none is open
// One that ends with the test; and with plain_options().
struct bench *bench_of(const struct engine_options *options);
struct bench *bench_plain(void);
// The callback of bench_start()'s engines.
void on_event(void *context, const struct engine_event *event);

// ---- requests ----------------------------------------------------------------------------------
struct sampling greedy(int max_tokens);
struct sampling random_sampling(int max_tokens, uint64_t seed);
void make_prompt(int32_t *prompt, int n, uint64_t seed);
struct take *submit_ids(struct bench *b, const int32_t *prompt, int n_prompt,
                        const struct sampling *sampling);
struct take *submit(struct bench *b, int n_prompt, uint64_t prompt_seed, const struct sampling *s);
// And awaits it.
struct take *run_ids(struct bench *b, const int32_t *prompt, int n_prompt,
                     const struct sampling *sampling);
struct take *run(struct bench *b, int n_prompt, uint64_t prompt_seed, const struct sampling *s);
void assert_refused(struct bench *b, const int32_t *prompt, int n_prompt, const struct sampling *s,
                    enum status st, const char *part);
struct take *greedy_of(struct bench *b, const int32_t *prompt, int n_prompt,
                       int max_tokens); // and awaits it
void assert_same_tokens(const struct take *a, int i, const struct take *b, int k);
void assert_same_records(const struct take *a, int i, const struct take *b, int k);
// The log-probabilities of a sample's tokens, of temperature 1, as the packed pass over prompt and
// completion at once, the trainer's, gives them; and that the server's are these, to the bit.
void packed_logprobs(struct reference *r, const int32_t *prompt, int n_prompt,
                     const struct take *take, int sample, float ret[MAX_TOKENS]);
void assert_same_logprob(const struct token_record *token, float packed, int i); // its i-th
void assert_as_packed(struct reference *r, const int32_t *prompt, int n_prompt,
                      const struct take *take, int sample);

// ---- waiting: at most WAIT_MS ------------------------------------------------------------------
bool wait_changed(struct bench *b, int64_t deadline_ns); // under the lock; false: too late
void await_done(struct bench *b, struct take *take);
// A command's callback, which `b` is the context of, and that it was called: its status and message
// are in b.
void on_command(void *context, enum status st, const char *message, uint64_t version);
void await_command(struct bench *b);
void await_tokens(struct bench *b, struct take *take, int sample, int n);
int tokens_of(struct bench *b, const struct take *take, int sample);
void await_state(struct bench *b, enum engine_state state);
struct engine_stats stats_of(struct bench *b);
// The statistics of a step become visible after its events: waits for those of an idle engine.
struct engine_stats idle_stats(struct bench *b);

// ---- another process ---------------------------------------------------------------------------
// --writer BRIDGE FOLDER N [die]: N updates to the folder's weights, which is then the snapshot to
// restore from, and one more that kills this process half way. Exits 0 if all went well.
int writer_main(int argc, char **argv);
// This program again with such words, on the bridge of the test's engine.
void start_self(struct test_child *child, const char *role, const char *model, const char *times,
                bool die);
void start_writer(struct test_child *child, const char *model, const char *times, bool die);
// The same, to its end, which is a good one but where it dies.
void run_writer(const char *model, const char *times, bool dies);

#endif
