/* curriculum.c: averages of the rewards, and the plan of an epoch made of them: each bucket's
 * batches behind those of the one before, shuffled. Owns both. What is saved are the averages and
 * each example's bucket: the plan follows from them, and the number of examples taken says where in
 * it a run is. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/curriculum/curriculum.h"
#include "common/base/bytes.h"
#include "common/base/json.h"
#include "common/base/rng.h"
#include "trainer/data/data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define UNSEEN       (-1)                // bucket of an example without a reward
#define BATCH_STREAM ((uint64_t)1 << 33) // apart from the data order's and the sampler's streams

struct prompt_batch {
    int first, n; // of the plan's examples
    int bucket, rollouts;
};

struct curriculum {
    struct curriculum_options options;
    int n; // examples
    int64_t taken, samples;
    struct data_order order;
    int *examples; // as the plan takes them; with CURRICULUM_OFF: of the step asked for last
    // what follows: of the other modes
    double *ema;    // (n) average reward
    int32_t *seen;  // (n) how often
    int8_t *bucket; // (n)
    int n_levels;   // buckets
    double levels[BUCKETS_MAX];
    struct buckets buckets; // of the last epoch that ended here
    // the present epoch's plan: a function of the seed, the epoch and each example's bucket
    struct prompt_batch *batches; // (n_batches) each of one bucket
    int n_batches, next;
    double mean_rollouts; // over the epoch's examples
};

const char *const curriculum_mode_names[] = {"off", "uniform", "kde", NULL};

int curriculum_rollouts(const struct curriculum_options *o, double level)
{
    return (int)lround(o->base * (1 + o->alpha * (1 - level)));
}

int curriculum_max_rollouts(const struct curriculum_options *o)
{
    return o->mode == CURRICULUM_OFF ? o->num_generations : curriculum_rollouts(o, 0);
}

int64_t curriculum_taken(const struct curriculum *c)
{
    return c->taken;
}

int64_t curriculum_samples(const struct curriculum *c)
{
    return c->samples;
}

// ---- the epoch's plan ---------------------------------------------------------------------------

static int rollouts_of(const struct curriculum *c, int bucket)
{
    return curriculum_rollouts(&c->options, bucket == UNSEEN ? 0.5 : c->levels[bucket]);
}

double curriculum_bucket_rollouts(const struct curriculum *c, int bucket)
{
    return c->options.mode == CURRICULUM_UNIFORM ? c->mean_rollouts : rollouts_of(c, bucket);
}

static int64_t batches_of(int64_t examples, int64_t max)
{
    return examples / max + (examples % max != 0);
}

// Puts one bucket's examples behind `first`, and their batches; where the next bucket's begin.
static int plan_bucket(struct curriculum *c, int64_t epoch, int bucket, int first)
{
    int n = 0;
    for (int i = 0; i < c->n; i++) {
        int example = data_order_at(&c->order, epoch * c->n + i);
        if (c->bucket[example] == bucket) c->examples[first + n++] = example;
    }
    const int batches = (int)batches_of(n, c->options.prompts_per_step);
    for (int b = 0, done = 0; b < batches; b++) {
        int size = (n - done) / (batches - b);
        c->batches[c->n_batches++] =
            (struct prompt_batch){first + done, size, bucket, rollouts_of(c, bucket)};
        done += size;
    }
    return first + n;
}

static void plan_epoch(struct curriculum *c)
{
    const int64_t epoch = c->taken / c->n;
    struct rng rng;
    int64_t samples = 0;
    int first = 0;
    c->n_batches = c->next = 0;
    for (int bucket = UNSEEN; bucket < c->n_levels; bucket++)
        first = plan_bucket(c, epoch, bucket, first);
    rng_init(&rng, c->options.seed, BATCH_STREAM + (uint64_t)epoch);
    rng_shuffle(&rng, c->batches, c->n_batches, sizeof *c->batches);
    for (int b = 0; b < c->n_batches; b++)
        samples += (int64_t)c->batches[b].n * c->batches[b].rollouts;
    c->mean_rollouts = (double)samples / c->n;
    if (c->options.mode != CURRICULUM_UNIFORM) return;
    // each batch gets the mean, rounded down or up: the same sum, as near as whole numbers allow
    double wanted = 0;
    for (int b = 0; b < c->n_batches; b++) {
        struct prompt_batch *batch = &c->batches[b];
        wanted += c->mean_rollouts * batch->n;
        double each = round(wanted / batch->n);
        each = fmin(fmax(each, floor(c->mean_rollouts)), ceil(c->mean_rollouts));
        batch->rollouts = (int)each;
        wanted -= each * batch->n;
    }
}

enum status curriculum_new(const struct curriculum_options *options, int n_examples,
                           struct curriculum **ret)
{
    enum status st = ST_OK;
    const int per_step = (int)options->prompts_per_step;
    const size_t n = (size_t)n_examples;
    struct curriculum *c = calloc(1, sizeof *c);
    if (!c) return status_fail(ST_NO_MEMORY, "no memory for the curriculum");
    c->options = *options;
    if (c->options.min_bucket_size == 0) c->options.min_bucket_size = options->prompts_per_step;
    c->n = n_examples;
    c->examples = calloc(n + (size_t)per_step, sizeof *c->examples);
    // each bucket's last batch may hold less
    c->batches = calloc(n / (size_t)per_step + BUCKETS_MAX + 1, sizeof *c->batches);
    c->ema = calloc(n, sizeof *c->ema);
    c->seen = calloc(n, sizeof *c->seen);
    c->bucket = malloc(n);
    if (!c->examples || !c->batches || !c->ema || !c->seen || !c->bucket)
        FAIL(ST_NO_MEMORY, "no memory for a curriculum of %d examples", n_examples);
    memset(c->bucket, UNSEEN, n);
    CHECK(data_order_init(&c->order, options->seed, n_examples));
    if (options->mode != CURRICULUM_OFF) plan_epoch(c);
    *ret = c;
out:
    if (st != ST_OK) curriculum_free(c);
    return st;
}

void curriculum_free(struct curriculum *c)
{
    if (!c) return;
    data_order_release(&c->order);
    free(c->batches);
    free(c->ema);
    free(c->seen);
    free(c->bucket);
    free(c->examples);
    free(c);
}

// ---- steps --------------------------------------------------------------------------------------

bool curriculum_next(struct curriculum *c, int ahead, struct curriculum_batch *ret)
{
    const struct curriculum_options *o = &c->options;
    if (o->mode == CURRICULUM_OFF) {
        for (int i = 0; i < o->prompts_per_step; i++)
            c->examples[i] =
                data_order_at(&c->order, c->taken + (int64_t)ahead * o->prompts_per_step + i);
        *ret =
            (struct curriculum_batch){c->examples, o->prompts_per_step, o->num_generations, UNSEEN};
        return true;
    }
    if (c->next + ahead >= c->n_batches) return false;
    const struct prompt_batch *b = &c->batches[c->next + ahead];
    *ret = (struct curriculum_batch){c->examples + b->first, b->n, b->rollouts, b->bucket};
    return true;
}

static enum status sort_into_buckets(struct curriculum *c)
{
    enum status st;
    int n = 0;
    double *rewards = malloc((size_t)c->n * sizeof *rewards);
    int8_t *bucket = malloc((size_t)c->n);
    if (!rewards || !bucket) FAIL(ST_NO_MEMORY, "no memory to sort %d examples into buckets", c->n);
    for (int i = 0; i < c->n; i++)
        if (c->seen[i]) rewards[n++] = c->ema[i];
    CHECK(buckets_cut(rewards, n, c->options.n_buckets, c->options.min_bucket_size, &c->buckets,
                      bucket));
    for (int i = 0, k = 0; i < c->n; i++)
        if (c->seen[i]) c->bucket[i] = bucket[k++];
    c->n_levels = c->buckets.n;
    for (int k = 0; k < c->n_levels; k++) c->levels[k] = c->buckets.bucket[k].level;
out:
    free(rewards);
    free(bucket);
    return st;
}

enum status curriculum_record(struct curriculum *c, const double *rewards,
                              const struct buckets **ret_buckets)
{
    struct curriculum_batch batch;
    const struct buckets *buckets = NULL;
    if (c->options.mode == CURRICULUM_OFF) {
        c->taken += c->options.prompts_per_step;
        *ret_buckets = NULL;
        return ST_OK;
    }
    curriculum_next(c, 0, &batch);
    for (int i = 0; i < batch.n; i++) {
        int e = batch.examples[i];
        double old = c->seen[e]++ ? c->options.ema : 0;
        c->ema[e] = old * c->ema[e] + (1 - old) * rewards[i];
    }
    c->taken += batch.n;
    c->samples += (int64_t)batch.n * batch.rollouts;
    if (++c->next == c->n_batches) {
        enum status st = sort_into_buckets(c);
        if (st != ST_OK) return st;
        plan_epoch(c);
        buckets = &c->buckets;
    }
    *ret_buckets = buckets;
    return ST_OK;
}

int64_t curriculum_steps_left(const struct curriculum *c, int64_t examples)
{
    const int64_t max = c->options.prompts_per_step;
    int64_t taken = c->taken, steps = 0;
    if (c->options.mode == CURRICULUM_OFF)
        return examples > taken ? batches_of(examples - taken, max) : 0;
    for (int b = c->next; b < c->n_batches && taken < examples; b++, steps++)
        taken += c->batches[b].n;
    if (taken >= examples) return steps;
    return steps + (examples - taken) / c->n * batches_of(c->n, max) +
           batches_of((examples - taken) % c->n, max);
}

// ---- checkpoints --------------------------------------------------------------------------------

// Arrays go as base64 of their bytes (little-endian), which keeps every bit and stays short.
static json_t *array_to_json(const void *data, size_t bytes)
{
    struct bytes text = BYTES_INIT;
    json_t *json =
        base64_encode(data, bytes, &text) == ST_OK ? json_string(bytes_text(&text)) : NULL;
    bytes_release(&text);
    return json;
}

static enum status array_from_json(const json_t *state, const char *key, size_t bytes, void *ret)
{
    struct bytes data = BYTES_INIT;
    const char *text = json_string_value(json_object_get(state, key));
    enum status st =
        text ? base64_decode(text, &data) : status_fail(ST_FORMAT, "the field is not text");
    if (st == ST_OK && data.len != bytes)
        st = status_fail(ST_MISMATCH,
                         "%zu bytes instead of %zu: the run had another number of examples; take "
                         "the --max-prompt-length it was made with",
                         data.len, bytes);
    if (st == ST_OK) memcpy(ret, data.data, bytes);
    bytes_release(&data);
    return status_context(st, "field \"curriculum\", \"%s\"", key);
}

json_t *curriculum_to_json(const struct curriculum *c)
{
    size_t n = (size_t)c->n;
    if (c->options.mode == CURRICULUM_OFF) return json_null();
    return json_pack(
        "{s:s, s:I, s:I, s:o, s:o, s:o, s:o}", "mode", curriculum_mode_names[c->options.mode],
        "prompts_per_step", (json_int_t)c->options.prompts_per_step, "samples",
        (json_int_t)c->samples, "levels", json_reals(c->levels, c->n_levels), "ema",
        array_to_json(c->ema, n * sizeof *c->ema), "seen",
        array_to_json(c->seen, n * sizeof *c->seen), "bucket", array_to_json(c->bucket, n));
}

static enum status check_options(const struct curriculum *c, const json_t *json)
{
    const char *mode = json_string_value(json_object_get(json, "mode"));
    json_int_t prompts = json_integer_value(json_object_get(json, "prompts_per_step"));
    if (strcmp(mode ? mode : "off", curriculum_mode_names[c->options.mode]) != 0)
        return status_fail(ST_MISMATCH, "the run was made with --curriculum %s, not %s",
                           mode ? mode : "off", curriculum_mode_names[c->options.mode]);
    if (c->options.mode != CURRICULUM_OFF && prompts != c->options.prompts_per_step)
        return status_fail(ST_MISMATCH,
                           "the run was made with --prompts-per-step %" JSON_INTEGER_FORMAT
                           ", and a curriculum's batches cannot change",
                           prompts);
    return ST_OK;
}

enum status curriculum_from_json(struct curriculum *c, const json_t *json, int64_t taken)
{
    enum status st;
    const json_t *levels = json_object_get(json, "levels");
    size_t n = (size_t)c->n, k;
    const json_t *level;
    CHECK(check_options(c, json));
    c->taken = taken;
    if (c->options.mode == CURRICULUM_OFF) return ST_OK;
    CHECK(json_get_int("field \"curriculum\"", json, "samples", 0, INT64_MAX, &c->samples));
    CHECK(array_from_json(json, "ema", n * sizeof *c->ema, c->ema));
    CHECK(array_from_json(json, "seen", n * sizeof *c->seen, c->seen));
    CHECK(array_from_json(json, "bucket", n, c->bucket));
    c->n_levels = 0;
    json_array_foreach (levels, k, level) {
        double x = json_is_number(level) ? json_number_value(level) : -1;
        if (k == BUCKETS_MAX || !(x >= 0 && x <= 1))
            return status_fail(ST_FORMAT, "field \"curriculum\": level %zu is not one", k);
        c->levels[c->n_levels++] = x;
    }
    for (int i = 0; i < c->n; i++)
        if (!isfinite(c->ema[i]) || c->seen[i] < 0 || c->bucket[i] < UNSEEN ||
            c->bucket[i] >= c->n_levels)
            FAIL(ST_FORMAT, "field \"curriculum\": the state of example %d is broken", i);
    plan_epoch(c);
    int64_t at = taken - taken % c->n;
    while (at < taken) at += c->batches[c->next++].n;
    if (at != taken) st = status_fail(ST_FORMAT, "field \"data_index\" is in the middle of a step");
out:
    return st;
}
