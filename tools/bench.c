/* bench.c: cw-bench: what this machine's limit is, and how near we come to it, in one run.
 *
 *   decode  one token for each of --batch sequences, each with --context tokens behind it: batch
 *           upload, model step, sampling and the read-back of the tokens, as the engine does it.
 *           Limit: the weights and the keys and values read once, at the bandwidth measured for reading.
 *   train   forward and backward over --tokens tokens in sequences of --sequence, the targets every
 *           token. Limit: its floating-point operations at the measured rate of a large product.
 *   sync    publishes from a second process while this one decodes flat out. Limit: what AdamW must
 *           read and write at the measured bandwidth.
 *
 * Times are medians of --steps after --warmup, limits the best of their repetitions; random weights
 * unless --model is given.
 */
#include "bridge/attach.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "common/base/rng.h"
#include "common/model/model.h"
#include "infer-server/weights_owner.h"
#include "trainer/backward.h"
#include "trainer/optimizer.h"
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

struct bench_options {
    const char *model, *config, *device, *dtype;
    int64_t batch, context, tokens, sequence, steps, warmup, seed;
    bool json;
};
#define FIELD(name) offsetof(struct bench_options, name)
static const struct option_spec table[] = {
    {"", OPTION_HEADING, 0, NULL, NULL, "What is run", 0, 0, NULL},
    {"model", OPTION_PATH, FIELD(model), NULL, "DIR", "a Hugging Face folder, with its weights", 0, 0, NULL},
    {"config", OPTION_PATH, FIELD(config), NULL, "FILE",
     "a config.json; its weights are random. Without --model and --config: a 100 M model on the CPU, one "
     "of Qwen2.5-1.5B's size on CUDA",
     0, 0, NULL},
    {"device", OPTION_STRING, FIELD(device), "auto", "SPEC", "auto, cpu or cuda:N", 0, 0, NULL},
    {"dtype", OPTION_STRING, FIELD(dtype), "auto", "TYPE", "of weights and activations", 0, 0, "auto|bf16|f32"},
    {"", OPTION_HEADING, 0, NULL, NULL, "Sizes", 0, 0, NULL},
    {"batch", OPTION_INT, FIELD(batch), "0", "N", "sequences decoded at once (0: 1 on the CPU, 16 on CUDA)", 0,
     4096, NULL},
    {"context", OPTION_INT, FIELD(context), "256", "N", "tokens behind each decoded one", 1, 1 << 20, NULL},
    {"tokens", OPTION_INT, FIELD(tokens), "0", "N", "tokens of a training pass (0: 512, 8192 on CUDA)", 0, 1 << 20,
     NULL},
    {"sequence", OPTION_INT, FIELD(sequence), "0", "N", "tokens of a training sequence (0: 128, 512 on CUDA)", 0,
     1 << 20, NULL},
    {"steps", OPTION_INT, FIELD(steps), "20", "N", "measured repetitions", 1, 100000, NULL},
    {"warmup", OPTION_INT, FIELD(warmup), "4", "N", "repetitions before those", 0, 100000, NULL},
    {"seed", OPTION_INT, FIELD(seed), "1", "N", "of random weights and tokens", 0, 0, NULL},
    {"json", OPTION_FLAG, FIELD(json), NULL, NULL, "print one JSON object", 0, 0, NULL},
    {NULL, OPTION_FLAG, 0, NULL, NULL, NULL, 0, 0, NULL},
};

// Sizes the benchmarks are quoted for.
static const char config_100m[] =
    "{\"model_type\":\"qwen2\",\"architectures\":[\"Qwen2ForCausalLM\"],\"vocab_size\":32000,\"hidden_size\":768,"
    "\"intermediate_size\":2048,\"num_hidden_layers\":12,\"num_attention_heads\":12,\"num_key_value_heads\":4,"
    "\"max_position_embeddings\":32768,\"rope_theta\":1000000.0,\"tie_word_embeddings\":true}";
static const char config_1500m[] =
    "{\"model_type\":\"qwen2\",\"architectures\":[\"Qwen2ForCausalLM\"],\"vocab_size\":151936,"
    "\"hidden_size\":1536,\"intermediate_size\":8960,\"num_hidden_layers\":28,\"num_attention_heads\":12,"
    "\"num_key_value_heads\":2,\"max_position_embeddings\":32768,\"rope_theta\":1000000.0,"
    "\"tie_word_embeddings\":true}";

struct bench {
    struct bench_options o;
    struct device *dev;
    const struct ops *ops;
    struct model_config *config;
    const struct weights *weights;
    struct weights *plan;        // decode, train: bound to
    void *arena;                 // memory of this process
    struct weights_owner *owner; // sync: shared with a second process
    enum dtype dt;
    double bandwidth;      // bytes/s, reading and writing
    double read_bandwidth; // bytes/s, reading alone
};

// ---- the machine's limits --------------------------------------------------------------------------------
static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, compare_doubles);
    return x[n / 2];
}

static double least(const double *x, int n)
{
    double min = x[0];
    for (int i = 1; i < n; i++) min = x[i] < min ? x[i] : min;
    return min;
}

// A pass that only reads host memory; the sum keeps the compiler from leaving it out.
static float read_through(const float *x, int64_t n)
{
    enum { PIECE = 1 << 15 };
    float total = 0;
#pragma omp parallel for reduction(+ : total)
    for (int64_t at = 0; at < n; at += PIECE) {
        int64_t end = n - at < PIECE ? n : at + PIECE;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = at; i < end; i++) sum += x[i];
        total += sum;
    }
    return total;
}

// Reading and writing: the better of a copy and a sum of two arrays, which differ in how many streams
// the memory must follow. Reading alone: a pass of its own on the CPU, where it is slower a byte; on
// CUDA it is taken to be the same.
static enum status measure_bandwidth(struct bench *b)
{
    bool cuda = device_kind(b->dev) == DEVICE_CUDA;
    size_t bytes = cuda ? (size_t)4 << 30 : (size_t)256 << 20;
    enum { REPEAT = 7 };
    double copy_ms[REPEAT], read_ms[REPEAT], add_ms[REPEAT];
    volatile float kept = 0;
    void *from = NULL, *to = NULL;
    enum status st;
    CHECK(device_alloc(b->dev, bytes, &from));
    CHECK(device_alloc(b->dev, bytes, &to));
    device_fill(b->dev, from, 0x11, bytes);
    device_fill(b->dev, to, 0x22, bytes);
    for (int i = 0; i < REPEAT; i++) {
        device_timer_start(b->dev);
        device_copy(b->dev, to, from, bytes);
        copy_ms[i] = device_timer_stop(b->dev);
        device_timer_start(b->dev);
        if (!cuda) kept = read_through(from, (int64_t)(bytes / sizeof(float)));
        read_ms[i] = device_timer_stop(b->dev);
        device_timer_start(b->dev);
        b->ops->add(b->dev, to, from, (int64_t)(bytes / sizeof(float)), DT_F32);
        add_ms[i] = device_timer_stop(b->dev);
    }
    CHECK(device_sync(b->dev));
    (void)kept;
    b->bandwidth = 1e3 * (double)bytes * fmax(2 / least(copy_ms, REPEAT), 3 / least(add_ms, REPEAT));
    b->read_bandwidth = cuda ? b->bandwidth : 1e3 * (double)bytes / least(read_ms, REPEAT);
out:
    device_release(b->dev, to);
    device_release(b->dev, from);
    return st;
}

static void random_floats(struct device *dev, const struct ops *ops, void *to, enum dtype dt, int64_t n,
                          void *staging_device, float *staging, uint64_t seed)
{
    struct rng r;
    rng_init(&r, seed, 0);
    for (int64_t i = 0; i < n; i++) staging[i] = rng_uniform(&r) - 0.5f;
    device_copy_in(dev, staging_device, staging, (size_t)n * sizeof(float));
    ops->convert(dev, to, dt, staging_device, DT_F32, n);
}

// Floating-point operations a second of one large product of random numbers, in the faster of the two
// layouts that training uses (on the CPU they are different kernels).
static enum status measure_products(struct bench *b, double *ret_flops)
{
    bool cuda = device_kind(b->dev) == DEVICE_CUDA;
    int size = cuda ? 8192 : 1024;
    int64_t n = (int64_t)size * size;
    enum { REPEAT = 7 };
    double ms[2 * REPEAT];
    void *x = NULL, *y = NULL, *z = NULL, *staging_device = NULL;
    float *staging = malloc((size_t)n * sizeof *staging);
    struct matmul shape = {size, size, size, false, true, 0, b->dt, b->dt};
    enum status st;
    if (!staging) return status_fail(ST_NO_MEMORY, "no memory to measure products");
    CHECK(device_alloc(b->dev, (size_t)n * dtype_size(b->dt), &x));
    CHECK(device_alloc(b->dev, (size_t)n * dtype_size(b->dt), &y));
    CHECK(device_alloc(b->dev, (size_t)n * dtype_size(b->dt), &z));
    CHECK(device_alloc(b->dev, (size_t)n * sizeof(float), &staging_device));
    random_floats(b->dev, b->ops, x, b->dt, n, staging_device, staging, 1);
    random_floats(b->dev, b->ops, y, b->dt, n, staging_device, staging, 2);
    for (int i = -2; i < 2 * REPEAT; i++) {
        shape.trans_b = i % 2 == 0;
        device_timer_start(b->dev);
        b->ops->matmul(b->dev, z, x, y, NULL, &shape);
        double took = device_timer_stop(b->dev);
        if (i >= 0) ms[i] = took;
    }
    CHECK(device_sync(b->dev));
    *ret_flops = 2e3 * (double)size * (double)size * (double)size / least(ms, 2 * REPEAT);
out:
    device_release(b->dev, x);
    device_release(b->dev, y);
    device_release(b->dev, z);
    device_release(b->dev, staging_device);
    free(staging);
    return st;
}

// ---- the model -------------------------------------------------------------------------------------------
static enum status load_config(const struct bench_options *o, bool cuda, struct model_config **ret)
{
    json_t *json = NULL;
    enum status st;
    if (o->model) return model_config_load(o->model, ret);
    if (o->config) return model_config_load_file(o->config, ret);
    const char *text = cuda ? config_1500m : config_100m;
    st = json_parse("the built-in config", text, strlen(text), &json);
    if (st == ST_OK) st = model_config_from_json("the built-in config", json, ret);
    json_decref(json);
    return st;
}

// With a bridge path the weights are shared as the daemon shares them.
static enum status open_bench(struct bench *b, const struct bench_options *o, const char *bridge_path)
{
    enum status st;
    b->o = *o;
    CHECK(device_open(o->device, &b->dev));
    b->ops = device_ops(b->dev);
    bool cuda = device_kind(b->dev) == DEVICE_CUDA;
    b->dt = strcmp(o->dtype, "auto") == 0 ? device_default_dtype(b->dev) : (enum dtype)dtype_from_name(o->dtype);
    if (b->o.batch == 0) b->o.batch = cuda ? 16 : 1;
    if (b->o.tokens == 0) b->o.tokens = cuda ? 8192 : 512;
    if (b->o.sequence == 0) b->o.sequence = cuda ? 512 : 128;
    if (b->o.sequence > b->o.tokens) b->o.sequence = b->o.tokens;
    CHECK(load_config(o, cuda, &b->config));
    if (bridge_path) {
        const struct weights_source sources[WEIGHTS_ROLES] = {{b->config, o->model}};
        CHECK(weights_owner_new(b->dev, sources, b->dt, bridge_path, &b->owner));
        b->weights = weights_owner_weights(b->owner, WEIGHTS_POLICY);
    } else {
        CHECK(weights_plan(b->config, b->dt, &b->plan));
        CHECK(device_alloc(b->dev, b->plan->bytes, &b->arena));
        weights_bind(b->plan, b->arena);
        if (o->model) CHECK(weights_load(b->plan, b->dev, o->model));
        else CHECK(weights_init_random(b->plan, b->dev, (uint64_t)o->seed));
        b->weights = b->plan;
    }
    st = measure_bandwidth(b);
out:
    return st;
}

static void close_bench(struct bench *b)
{
    weights_owner_free(b->owner);
    device_release(b->dev, b->arena);
    weights_free(b->plan);
    model_config_free(b->config);
    device_free(b->dev);
}

// ---- a decoding batch, as the engine has it ------------------------------------------------------------------
#define BLOCK 16

struct decoder {
    struct bench *b;
    struct model *model;
    struct batch *batch;
    struct kv_view kv;
    int n, blocks_each;
    int32_t *tokens; // (n) last token of each sequence
    int32_t *blocks; // (n, blocks_each)
    struct sample_params *params, *host_params;
    struct sample_result *results, *host_results;
};

static enum status decoder_prefill(struct decoder *d)
{
    int context = (int)d->b->o.context;
    int32_t *prompt = malloc((size_t)context * sizeof *prompt);
    struct rng r;
    enum status st = ST_OK;
    if (!prompt) return status_fail(ST_NO_MEMORY, "no memory for a prompt of %d tokens", context);
    rng_init(&r, (uint64_t)d->b->o.seed, 99);
    for (int s = 0; s < d->n; s++) {
        for (int i = 0; i < context; i++) prompt[i] = (int32_t)rng_below(&r, (uint32_t)d->b->config->vocab_size);
        for (int at = 0; at < context; at += d->model->max_tokens) {
            int n = context - at < d->model->max_tokens ? context - at : d->model->max_tokens;
            batch_clear(d->batch);
            CHECK(batch_add_paged(d->batch, prompt + at, n, at, d->blocks + s * d->blocks_each, d->blocks_each, BLOCK));
            CHECK(batch_commit(d->batch, 0));
            model_step(d->model, d->batch, &d->kv);
            CHECK(device_sync(d->b->dev));
        }
        d->tokens[s] = prompt[0];
    }
out:
    free(prompt);
    return st;
}

static void decoder_close(struct decoder *d)
{
    if (!d->b) return;
    struct device *dev = d->b->dev;
    device_release(dev, d->kv.k);
    device_release(dev, d->kv.v);
    device_release(dev, d->params);
    device_release(dev, d->results);
    device_host_release(dev, d->host_params);
    device_host_release(dev, d->host_results);
    batch_free(d->batch);
    model_free(d->model);
    free(d->tokens);
    free(d->blocks);
}

static enum status decoder_open(struct decoder *d, struct bench *b)
{
    int last = (int)b->o.context + 2, chunk = (int)(b->o.batch > 512 ? b->o.batch : 512);
    size_t bytes;
    enum status st;
    memset(d, 0, sizeof *d);
    d->b = b;
    d->n = (int)b->o.batch;
    d->blocks_each = (last + BLOCK - 1) / BLOCK;
    d->tokens = calloc((size_t)d->n, sizeof *d->tokens);
    d->blocks = calloc((size_t)d->n * (size_t)d->blocks_each, sizeof *d->blocks);
    if (!d->tokens || !d->blocks) return status_fail(ST_NO_MEMORY, "no memory for %d sequences", d->n);
    for (int i = 0; i < d->n * d->blocks_each; i++) d->blocks[i] = i;
    d->kv = (struct kv_view){.n_blocks = d->n * d->blocks_each, .block_size = BLOCK, .dt = b->dt};
    d->kv.layer_stride = (int64_t)d->kv.n_blocks * BLOCK * config_kv_width(b->config);
    bytes = (size_t)d->kv.layer_stride * (size_t)b->config->n_layers * dtype_size(b->dt);
    CHECK(device_alloc(b->dev, bytes, &d->kv.k));
    CHECK(device_alloc(b->dev, bytes, &d->kv.v));
    // room for padding a batch up to the next captured size
    int rows = d->n < 32 ? d->n + 8 : d->n + 32;
    CHECK(model_new(b->dev, b->config, b->weights, chunk + 32, rows, last, &d->model));
    CHECK(batch_new(b->dev, chunk + 32, rows, d->blocks_each, rows, &d->batch));
    CHECK(device_alloc(b->dev, (size_t)rows * sizeof *d->params, (void **)&d->params));
    CHECK(device_alloc(b->dev, (size_t)rows * sizeof *d->results, (void **)&d->results));
    CHECK(device_host_alloc(b->dev, (size_t)rows * sizeof *d->params, (void **)&d->host_params));
    CHECK(device_host_alloc(b->dev, (size_t)rows * sizeof *d->results, (void **)&d->host_results));
    for (int i = 0; i < rows; i++)
        d->host_params[i] = (struct sample_params){1.0f, 1.0f, 0, 0, (uint64_t)i, (uint64_t)b->o.context};
    st = decoder_prefill(d);
out:
    return st;
}

// One step of the whole batch at position `context`; the same position every time, so that every
// step does the same work.
static enum status decoder_step(struct decoder *d)
{
    struct bench *b = d->b;
    int at = (int)b->o.context;
    enum status st = ST_OK;
    batch_clear(d->batch);
    for (int s = 0; s < d->n; s++) {
        CHECK(batch_add_paged(d->batch, &d->tokens[s], 1, at, d->blocks + s * d->blocks_each, d->blocks_each, BLOCK));
        CHECK(batch_want_row(d->batch, s));
    }
    CHECK(batch_commit(d->batch, model_decode_padding(d->model, d->n)));
    device_copy_in(b->dev, d->params, d->host_params, (size_t)d->n * sizeof *d->params);
    model_step(d->model, d->batch, &d->kv);
    b->ops->sample(b->dev, d->results, d->model->logits, d->params, NULL, NULL, d->n,
                   b->config->vocab_size, 0);
    device_copy_out(b->dev, d->host_results, d->results, (size_t)d->n * sizeof *d->results);
    CHECK(device_sync(b->dev));
    for (int s = 0; s < d->n; s++) d->tokens[s] = d->host_results[s].token;
out:
    return st;
}

// ---- reports ---------------------------------------------------------------------------------------------
static json_t *report_base(const struct bench *b, const char *what)
{
    return json_pack("{s:s, s:s, s:s, s:I, s:f, s:f}", "benchmark", what, "device", device_name(b->dev), "dtype",
                     dtype_name(b->dt), "parameters", (json_int_t)b->weights->n_parameters, "bandwidth_gb_s",
                     b->bandwidth / 1e9, "read_gb_s", b->read_bandwidth / 1e9);
}

static void print_report(const struct bench *b, json_t *report, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (b->o.json) {
        json_dumpf(report, stdout, JSON_COMPACT | JSON_REAL_PRECISION(6));
        putchar('\n');
    } else {
        printf("%s, %.1f M parameters, %s: ", device_name(b->dev), (double)b->weights->n_parameters / 1e6,
               dtype_name(b->dt));
        vprintf(format, args);
    }
    va_end(args);
    fflush(stdout);
    json_decref(report);
}

static enum status bench_decode(struct bench *b)
{
    struct decoder d = {0};
    int steps = (int)b->o.steps;
    double *ms = calloc((size_t)steps, sizeof *ms);
    const struct model_config *c = b->config;
    enum status st;
    if (!ms) return status_fail(ST_NO_MEMORY, "no memory for %d times", steps);
    CHECK(decoder_open(&d, b));
    for (int i = -(int)b->o.warmup; i < steps; i++) {
        int64_t start = clock_now_ns();
        CHECK(decoder_step(&d));
        if (i >= 0) ms[i] = clock_ms_since(start);
    }
    double step_ms = median(ms, steps);
    // an untied input embedding is looked up, not read through
    double read = (double)b->weights->n_parameters - (c->tie_embeddings ? 0 : (double)c->vocab_size * c->hidden);
    read += (double)d.n * (double)b->o.context * 2 * config_kv_width(c) * c->n_layers;
    double floor_ms = 1e3 * read * (double)dtype_size(b->dt) / b->read_bandwidth;
    json_t *report = report_base(b, "decode");
    json_object_set_new(report, "batch", json_integer(d.n));
    json_object_set_new(report, "context", json_integer(b->o.context));
    json_object_set_new(report, "ms_per_step", json_real(step_ms));
    json_object_set_new(report, "tokens_per_s", json_real(d.n * 1e3 / step_ms));
    json_object_set_new(report, "limit_ms", json_real(floor_ms));
    json_object_set_new(report, "ratio_to_limit", json_real(floor_ms / step_ms));
    print_report(b, report,
                 "decode, batch %d, context %lld: %.3f ms a step, %.0f tokens/s; limit %.3f ms at %.1f GB/s, "
                 "reached %.0f%%\n",
                 d.n, (long long)b->o.context, step_ms, d.n * 1e3 / step_ms, floor_ms, b->read_bandwidth / 1e9,
                 100 * floor_ms / step_ms);
out:
    decoder_close(&d);
    free(ms);
    return st;
}

// ---- training --------------------------------------------------------------------------------------------
struct learner_bench {
    struct model *model;
    struct batch *batch;
    struct tape *tape;
    struct optimizer *optimizer;
    struct backward *backward;
    int32_t *targets;
    float *logprobs, *dlogprobs;
    int n;
};

static enum status learner_open(struct bench *b, struct learner_bench *l)
{
    struct optimizer_config adamw = {0.9, 0.999, 1e-8, 0.0, 1.0, MOMENTS_F32};
    int tokens = (int)b->o.tokens, sequence = (int)b->o.sequence, head_rows = tokens < 1024 ? tokens : 1024;
    int32_t *ids = malloc((size_t)sequence * sizeof *ids);
    struct rng r;
    enum status st;
    if (!ids) return status_fail(ST_NO_MEMORY, "no memory for a sequence of %d tokens", sequence);
    rng_init(&r, (uint64_t)b->o.seed, 5);
    CHECK(model_new(b->dev, b->config, b->weights, tokens, head_rows, sequence + 1, &l->model));
    CHECK(batch_new(b->dev, tokens, tokens / sequence + 1, 0, tokens, &l->batch));
    CHECK(tape_new(l->model, tokens, RECOMPUTE_NONE, &l->tape));
    CHECK(optimizer_new(b->dev, b->weights, &adamw, &l->optimizer));
    CHECK(backward_new(l->model, optimizer_grads(l->optimizer), tokens, tokens, &l->backward));
    l->targets = calloc((size_t)tokens, sizeof *l->targets);
    l->logprobs = calloc((size_t)tokens, sizeof *l->logprobs);
    l->dlogprobs = calloc((size_t)tokens, sizeof *l->dlogprobs);
    if (!l->targets || !l->logprobs || !l->dlogprobs) {
        st = status_fail(ST_NO_MEMORY, "no memory for %d targets", tokens);
        goto out;
    }
    batch_clear(l->batch);
    for (int at = 0; at + sequence <= tokens; at += sequence) {
        for (int i = 0; i < sequence; i++) ids[i] = (int32_t)rng_below(&r, (uint32_t)b->config->vocab_size);
        CHECK(batch_add_packed(l->batch, ids, sequence, -1, NULL));
        for (int i = 0; i < sequence; i++) {
            CHECK(batch_want_row(l->batch, at + i));
            l->targets[l->n] = ids[(i + 1) % sequence];
            l->dlogprobs[l->n++] = -1.0f / (float)tokens;
        }
    }
    st = batch_commit(l->batch, 0);
out:
    free(ids);
    return st;
}

static void learner_close(struct bench *b, struct learner_bench *l)
{
    free(l->targets);
    free(l->logprobs);
    free(l->dlogprobs);
    backward_free(l->backward);
    optimizer_free(l->optimizer);
    tape_free(b->dev, l->tape);
    batch_free(l->batch);
    model_free(l->model);
}

static enum status learner_pass(struct learner_bench *l)
{
    void *x;
    enum status st;
    model_forward(l->model, batch_view(l->batch), NULL, l->tape, &x);
    CHECK(backward_logprobs(l->backward, l->batch, x, l->targets, 1.0f, l->logprobs, NULL));
    st = backward_run(l->backward, l->batch, l->tape, l->dlogprobs, 1.0f);
out:
    return st;
}

static enum status bench_train(struct bench *b)
{
    struct learner_bench l = {0};
    int steps = (int)b->o.steps;
    const struct model_config *c = b->config;
    double *ms = calloc((size_t)steps, sizeof *ms), flops = 0;
    enum status st;
    if (!ms) return status_fail(ST_NO_MEMORY, "no memory for %d times", steps);
    CHECK(measure_products(b, &flops));
    CHECK(learner_open(b, &l));
    for (int i = -(int)b->o.warmup; i < steps; i++) {
        optimizer_clear_grads(l.optimizer);
        int64_t start = clock_now_ns();
        CHECK(learner_pass(&l));
        if (i >= 0) ms[i] = clock_ms_since(start);
    }
    double pass_ms = median(ms, steps), n = l.n;
    // 6 operations a parameter and token, and the attention scores and sums of causal sequences
    double work = 6 * (double)b->weights->n_parameters * n +
                  6.0 * c->n_layers * n * (double)b->o.sequence * config_q_width(c);
    if (!c->tie_embeddings) work -= 6 * (double)c->vocab_size * c->hidden * n; // looked up, not multiplied
    double floor_ms = 1e3 * work / flops;
    json_t *report = report_base(b, "train");
    json_object_set_new(report, "tokens", json_integer(l.n));
    json_object_set_new(report, "sequence", json_integer(b->o.sequence));
    json_object_set_new(report, "ms_per_pass", json_real(pass_ms));
    json_object_set_new(report, "tokens_per_s", json_real(n * 1e3 / pass_ms));
    json_object_set_new(report, "tflops", json_real(work / pass_ms / 1e9));
    json_object_set_new(report, "product_tflops", json_real(flops / 1e12));
    json_object_set_new(report, "limit_ms", json_real(floor_ms));
    json_object_set_new(report, "ratio_to_limit", json_real(floor_ms / pass_ms));
    print_report(b, report,
                 "train, %d tokens in sequences of %lld: %.1f ms forward and backward, %.0f tokens/s, %.2f TFLOP/s; "
                 "limit %.1f ms at %.2f TFLOP/s, reached %.0f%%\n",
                 l.n, (long long)b->o.sequence, pass_ms, n * 1e3 / pass_ms, work / pass_ms / 1e9, floor_ms,
                 flops / 1e12, 100 * floor_ms / pass_ms);
out:
    learner_close(b, &l);
    free(ms);
    return st;
}

// ---- publishing ------------------------------------------------------------------------------------------
struct publisher { // in the second process
    struct optimizer *optimizer;
    struct device *dev;
    double adamw_ms;
};

static enum status publisher_update(void *context)
{
    struct publisher *p = context;
    device_timer_start(p->dev);
    enum status st = optimizer_apply(p->optimizer, 1e-9);
    p->adamw_ms = device_timer_stop(p->dev);
    return st;
}

struct publish_record {
    double total_ms, wait_ms, write_ms, adamw_ms, pause_ms;
};

// The trainer's part: maps the weights through the bridge file and publishes. ret_records: (steps).
static enum status publish_all(const struct bench_options *o, const char *bridge_path,
                               struct publish_record *ret_records)
{
    struct optimizer_config adamw = {0.9, 0.999, 1e-8, 0.0, 1.0, MOMENTS_F32};
    struct bridge *bridge = NULL;
    struct model_config *config = NULL;
    struct weights *weights = NULL;
    struct publisher p = {0};
    enum status st = ST_OK;
    int64_t deadline = clock_deadline_ns(300 * 1000);
    while (!file_exists(bridge_path) && clock_now_ns() < deadline) clock_sleep_ms(20);
    CHECK(bridge_attach(bridge_path, NULL, &bridge));
    CHECK(bridge_become_writer(bridge));
    p.dev = bridge_device(bridge);
    CHECK(load_config(o, device_kind(p.dev) == DEVICE_CUDA, &config));
    CHECK(weights_plan(config, bridge_file_of(bridge)->roles[0].dt, &weights));
    weights_bind(weights, bridge_base(bridge, "policy"));
    CHECK(optimizer_new(p.dev, weights, &adamw, &p.optimizer));
    for (int64_t i = 0; i < o->warmup + o->steps; i++) {
        struct publish_times times;
        struct control_facts facts;
        double norm;
        // gradients of 7e-4, so that the arithmetic is that of a real step
        device_fill(p.dev, optimizer_grads(p.optimizer)->base, 0x3a, (size_t)weights->n_elements * sizeof(float));
        CHECK(optimizer_prepare(p.optimizer, &norm));
        CHECK(bridge_publish(bridge, 10000, publisher_update, &p, &times));
        clock_sleep_ms(20); // generation goes on between updates; the engine notes the pause meanwhile
        control_facts(bridge_control(bridge), &facts);
        if (i >= o->warmup)
            ret_records[i - o->warmup] = (struct publish_record){times.total_ms, times.wait_ms, times.write_ms,
                                                                 p.adamw_ms, facts.last_pause_ms};
    }
out:
    optimizer_free(p.optimizer);
    weights_free(weights);
    model_config_free(config);
    bridge_detach(bridge);
    return st;
}

// Decodes flat out until the publisher has ended, granting quiet between steps as the engine does.
// The ended process is left to be waited for.
static enum status decode_until_done(struct bench *b, struct control *control, pid_t child)
{
    struct decoder d = {0};
    siginfo_t ended = {0};
    enum status st;
    CHECK(decoder_open(&d, b));
    while (waitid(P_PID, (id_t)child, &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid == 0) {
        CHECK(decoder_step(&d));
        control_heartbeat(control);
        if (control_quiet_requested(control) && control_grant_quiet(control) == CONTROL_TORN) {
            st = status_fail(ST_TORN, "the publishing process died in an update");
            goto out;
        }
    }
    if (ended.si_code != CLD_EXITED || ended.si_status != 0)
        st = status_fail(ST_PEER_GONE, "the publishing process failed (its error stands above)");
out:
    decoder_close(&d);
    return st;
}

static enum status sync_owner(const struct bench_options *o, const char *bridge_path, pid_t child,
                              const struct publish_record *records)
{
    struct bench b = {0};
    int n = (int)o->steps;
    double *column = calloc((size_t)n, sizeof *column), medians[5];
    enum status st;
    if (!column) return status_fail(ST_NO_MEMORY, "no memory for %d times", n);
    CHECK(open_bench(&b, o, bridge_path));
    CHECK(weights_owner_announce(b.owner, "/nonexistent")); // nobody asks for rollouts
    CHECK(decode_until_done(&b, weights_owner_control(b.owner), child));
    for (int i = 0; i < 5; i++) {
        for (int k = 0; k < n; k++) {
            const struct publish_record *r = &records[k];
            const double values[5] = {r->total_ms, r->wait_ms, r->write_ms, r->adamw_ms, r->pause_ms};
            column[k] = values[i];
        }
        medians[i] = median(column, n);
    }
    // gradient, both moments and the master read, all but the gradient written
    double each = 4 + 2 * (8 + 4); // a master is 4 bytes: f32, or bf16 and its residual
    double floor_ms = 1e3 * each * (double)b.weights->n_elements / b.bandwidth;
    json_t *report = report_base(&b, "sync");
    json_object_set_new(report, "publishes", json_integer(n));
    json_object_set_new(report, "pause_ms", json_real(medians[4]));
    json_object_set_new(report, "adamw_ms", json_real(medians[3]));
    json_object_set_new(report, "overhead_ms", json_real(medians[4] - medians[3]));
    json_object_set_new(report, "wait_ms", json_real(medians[1]));
    json_object_set_new(report, "write_ms", json_real(medians[2]));
    json_object_set_new(report, "total_ms", json_real(medians[0]));
    json_object_set_new(report, "bytes_copied", json_integer(0));
    json_object_set_new(report, "limit_ms", json_real(floor_ms));
    json_object_set_new(report, "ratio_to_limit", json_real(floor_ms / medians[4]));
    print_report(&b, report,
                 "sync, %d publishes under full generation: pause %.3f ms, of which AdamW %.3f ms and the rest %.3f ms; "
                 "wait for the step in flight %.3f ms; limit %.3f ms at %.1f GB/s, reached %.0f%%; bytes copied 0\n",
                 n, medians[4], medians[3], medians[4] - medians[3], medians[1], floor_ms, b.bandwidth / 1e9,
                 100 * floor_ms / medians[4]);
out:
    close_bench(&b);
    free(column);
    return st;
}

static enum status bench_sync(const struct bench_options *o)
{
    char folder[] = "/tmp/commonweight-bench-XXXXXX", path[64];
    size_t bytes = (size_t)o->steps * sizeof(struct publish_record);
    enum status st;
    struct publish_record *records = // both processes' memory
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (records == MAP_FAILED) return status_fail(ST_NO_MEMORY, "no memory for %zu bytes of times", bytes);
    if (!mkdtemp(folder)) {
        st = status_fail(ST_IO, "cannot make a folder in /tmp: %m");
        goto out;
    }
    snprintf(path, sizeof path, "%s/bridge.json", folder);
    // the second process starts before either opens a device: a GPU does not survive a fork
    pid_t child = fork();
    if (child < 0) {
        st = status_fail(ST_IO, "cannot start a second process: %m");
    } else if (child == 0) {
        st = publish_all(o, path, records);
        if (st != ST_OK) log_error("publisher: %s", status_message());
        _exit(st == ST_OK ? 0 : 1);
    } else {
        st = sync_owner(o, path, child, records);
        kill(child, SIGKILL); // not waited for yet, so the number is still its own
        waitpid(child, NULL, 0);
    }
    file_remove_tree(folder);
out:
    munmap(records, bytes);
    return st;
}

int main(int argc, char **argv)
{
    struct bench_options o = {0};
    struct bench b = {0};
    const char *what = NULL;
    struct option_set *set = NULL;
    enum status st;
    device_prepare_process(argv);
    log_open("cw-bench", LOG_INFO);
    switch (options_parse(table, "cw-bench", "decode|train|sync [options]", argc, argv, 1, &o, &what, &set)) {
    case OPTIONS_DONE: return 0;
    case OPTIONS_BAD: log_error("%s", status_message()); return 2;
    case OPTIONS_OK: break;
    }
    if (!what || (strcmp(what, "decode") != 0 && strcmp(what, "train") != 0 && strcmp(what, "sync") != 0)) {
        log_error("say what to measure: decode, train or sync (--help lists the options)");
        options_free(set);
        return 2;
    }
    if (strcmp(what, "sync") == 0) {
        st = bench_sync(&o);
    } else {
        st = open_bench(&b, &o, NULL);
        if (st == ST_OK) st = strcmp(what, "decode") == 0 ? bench_decode(&b) : bench_train(&b);
        close_bench(&b);
    }
    if (st != ST_OK) log_error("%s", status_message());
    options_free(set);
    return st == ST_OK ? 0 : 1;
}
