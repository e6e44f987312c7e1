/* bench.h: what cw-bench's modes share: the options, the device and the weights they run on, the
 * limits measured beside them, and the form of a report. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TOOLS_BENCH_BENCH_H
#define TOOLS_BENCH_BENCH_H

#include "common/base/status.h"
#include "common/model/config.h"
#include "common/model/weights.h"
#include "kernels/ops.h"
#include <jansson.h>
#include <sys/types.h>

struct runner;
struct weights_owner;

struct bench_options {
    const char *model, *config, *tokenizer, *device;
    int dtype;              // dtype_option_names
    int recompute, moments; // recompute_names, moments_kind_names
    int sync;               // sync_way_names
    int quantization;       // quantization_names
    int gradient_dtype;     // gradient_dtype_names
    int kv_cache;           // kv_cache_names
    int64_t batch, context, tokens, sequence, steps, warmup, seed, max_staleness, lora_r;
    int64_t token_budget;                                           // of step
    int64_t turns, read, sampled, kept;                             // of train
    double shared;                                                  // percent; 0: as it comes
    const char *draft, *draft_config, *prompts, *methods, *batches; // of speculative, tandem
    const char *tandem_model;
    const char *teacher;      // of step
    int teacher_quantization; // quantization_names
    int64_t prompt_tokens, group, waves, repeats, rounds, warmup_rounds, draft_vocabulary;
    int64_t requests, shortest, longest; // of serve
    const char *schemas;                 // likewise
    double temperature;
    bool ignore_eos, no_step_ahead;
    const char *only; // of ops
    bool variants;    // of ops
    bool json;
};

struct bench {
    struct bench_options o;
    struct device *dev;
    const struct ops *ops;
    struct model_config *config;
    const struct weights *weights;
    struct weights *plan;        // all but sync: bound to
    void *arena;                 // memory of this process
    struct weights_owner *owner; // sync: shared with a second process
    enum dtype dt;
    double bandwidth;      // bytes/s, reading and writing
    double read_bandwidth; // bytes/s, reading alone
};

// Opens the device and the weights; defaults that depend on the device are set in b->o. With a
// bridge path the weights are shared as the server shares them. Release with bench_close(),
// whatever became of it.
enum status bench_open(struct bench *b, const struct bench_options *o, const char *bridge_path);
void bench_close(struct bench *b);
// The config of --model, of --config, or the built-in one for this kind of device.
enum status bench_load_config(const struct bench_options *o, bool cuda, struct model_config **ret);
// Weights in memory of this process, loaded from a folder (NULL: random, from the seed). The caller
// frees both; they may be set on failure too.
enum status bench_load_weights(struct device *dev, const struct model_config *config, enum dtype dt,
                               const char *folder, uint64_t seed, struct weights **ret_weights,
                               void **ret_arena);

// Sets both bandwidths of `b`.
enum status limits_bandwidth(struct bench *b);
// Floating-point operations a second of one large matmul of random numbers, in the faster of the
// two layouts that training uses (on the CPU they are different kernels).
enum status limits_matmul(struct bench *b, double *ret_flops);
// Parameters that one row is multiplied by, or looks up: of experts those it is given to.
double limits_row_parameters(const struct bench *b);
// Bytes of the weights that n rows together read, where rows spread evenly over experts.
double limits_read_bytes(const struct bench *b, double n);
// Bytes of one sequence's states that a decode step reads at least: each head's matrix.
double limits_state_bytes(const struct bench *b);
// layer_attn_products() of all layers.
double limits_attn_products(const struct bench *b);

double median(double *x, int n); // sorts x; n >= 1

// Median time of a pass, of `repeats` after `warmup`.
enum status bench_time(int64_t warmup, int64_t repeats, enum status (*pass)(void *context),
                       void *context, double *ret_ms);

// With --json one object, of what was measured on what and the figures, else a line of text behind
// the device's and the model's names. Takes the figures over.
void bench_print(const struct bench *b, const char *what, json_t *figures, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

enum status bench_decode(struct bench *b);
enum status bench_prefill(struct bench *b);
enum status bench_train(struct bench *b);
enum status bench_sync(const struct bench_options *o); // opens its own: it forks first
enum status
bench_step(const struct bench_options *o); // opens its own: others need the device after it
enum status bench_serve(const struct bench_options *o); // likewise
enum status bench_speculative(struct bench *b);
enum status bench_tandem(struct bench *b);
enum status bench_ops(const struct bench_options *o); // likewise: it needs no model

// ---- decode -------------------------------------------------------------------------------------
// A decoding batch as the engine has it: upload, model step, sampling, read-back.

struct decoder {
    struct bench *b;
    struct runner *runner;
    int n, context, blocks_each; // sequences, and of each
    int32_t *prompts;            // (n, context)
    int32_t *tokens;             // (n) last token of each sequence
    int32_t *blocks;             // (n, blocks_each)
};

// b->o.batch sequences with room for b->o.context tokens behind each, of which the runner takes so
// many a step. Close whatever became of it.
enum status decoder_open(struct decoder *d, struct bench *b, int max_tokens);
#define DECODER_TOKENS(b) ((int)((b)->o.batch > 512 ? (b)->o.batch : 512) + 32) // where it decodes
void decoder_close(struct decoder *d);
// The prompts. Waits.
enum status decoder_prefill(void *decoder);
// One step of the whole batch at position `context`; the same position every time, so that every
// step does the same work. Waits.
enum status decoder_step(void *decoder);

// ---- programs -----------------------------------------------------------------------------------
// The real cw-infer-server, and other programs of this build, beside a benchmark: in a temporary
// folder, which also holds the model where its weights are random.

struct programs {
    char folder[64]; // temporary
    char model[96];  // inside it: written, or a link to --model
    char bridge[96], socket[96], log[96];
    pid_t server;
};

// Release with programs_close(), whatever became of it: stops the server, removes the folder.
enum status programs_open(struct programs *p);
void programs_close(struct programs *p);
// Writes the model where its weights are random, and gives their memory back: the programs need it.
enum status programs_take_model(struct programs *p, struct bench *b);
// Returns when it serves. max_batch: of the server; more: of its options, "" for none.
enum status programs_serve(struct programs *p, const struct bench_options *o, int max_batch,
                           const char *more);
// Runs another program of this build to its end: words with blanks between them.
enum status programs_run(const struct programs *p, const char *command, int64_t seconds);

#endif
