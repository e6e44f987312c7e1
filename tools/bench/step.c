/* step.c: the step benchmark: whole GRPO steps, by the real cw-infer-server and cw-trainer beside
 * this program, on random prompts and with samples that all have --tokens tokens. What a step took
 * stands in the run's metrics.jsonl. With --sync checkpoint the trainer starts the server itself.
 *
 * The limits are measured before the two programs start, with the device to ourselves. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/file.h"
#include "common/model/model.h"
#include "trainer/run/checkpoint.h"
#include "common/base/json.h"
#include "common/base/rng.h"
#include "common/text/tokenizer.h"
#include "tools/bench/bench.h"
#include "trainer/learn/learner.h"
#include "trainer/run/config.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TRAINING_S 3600

struct step_bench {
    struct bench b;
    struct programs programs;
    char data[96], run[96], teacher[96];
    double limit_ms;
};

// ---- what the programs work on ------------------------------------------------------------------

// Random tokens, as text: the trainer's prompts are text.
static enum status write_prompts(const struct step_bench *s, int n)
{
    struct bytes lines = BYTES_INIT;
    struct tokenizer *tokenizer = NULL;
    int32_t *ids = malloc((size_t)s->b.o.prompt_tokens * sizeof *ids);
    struct rng rng;
    enum status st;
    rng_init(&rng, (uint64_t)s->b.o.seed, 3);
    if (!ids) return status_fail(ST_NO_MEMORY, "no memory for prompts");
    CHECK(tokenizer_load(s->programs.model, &tokenizer));
    for (int i = 0; i < n; i++) {
        struct bytes text = BYTES_INIT;
        for (int64_t k = 0; k < s->b.o.prompt_tokens; k++) do
                ids[k] = (int32_t)rng_below(&rng, (uint32_t)tokenizer_vocab_size(tokenizer));
            while (tokenizer_is_special(tokenizer, ids[k]));
        st = tokenizer_decode(tokenizer, ids, (int)s->b.o.prompt_tokens, true, &text);
        if (st == ST_OK)
            st = json_put_line(
                &lines,
                json_pack("{s:s%, s:s}", "prompt", bytes_text(&text), text.len, "answer", "0"), 0);
        bytes_release(&text);
        if (st != ST_OK) goto out;
    }
    st = file_write_atomic(s->data, 0644, bytes_text(&lines), lines.len);
out:
    tokenizer_free(tokenizer);
    bytes_release(&lines);
    free(ids);
    return st;
}

// Reading for every token of a sample the weights and what lies behind it; then the matmuls of the
// prompts and of the training pass; then what AdamW reads and writes. With an adapter the model's
// own gradients, a third of the pass, and its AdamW are not computed; the adapter counts nothing.
static enum status measure_limit(struct step_bench *s)
{
    struct bench *b = &s->b;
    const struct model_config *c = b->config;
    double flops = 0;
    enum status st = limits_bandwidth(b);
    if (st == ST_OK) st = limits_matmul(b, &flops);
    if (st != ST_OK) return st;
    const double samples = (double)b->o.batch, prompts = samples / (double)b->o.group;
    const double context = (double)b->o.prompt_tokens + (double)b->o.tokens / 2;
    const double kv = samples * context * (double)config_kv_bytes(c, b->dt);
    const double prompt_rows = prompts * (double)b->o.prompt_tokens;
    const double rows = prompt_rows + samples * (double)b->o.tokens;
    const double decode =
        (double)b->o.tokens * (limits_read_bytes(b, samples) + kv) / b->read_bandwidth;
    const bool whole = b->o.lora_r == 0;
    const double adamw = whole ? 28.0 * (double)b->weights->n_elements / b->bandwidth : 0;
    const double training =
        (2 * prompt_rows + (whole ? 6 : 4) * rows) * limits_row_parameters(b) / flops;
    s->limit_ms = 1e3 * (decode + training + adamw);
    return ST_OK;
}

static enum status prepare(struct step_bench *s, const struct bench_options *o)
{
    enum status st;
    struct bench *b = &s->b;
    CHECK(bench_open(b, o, NULL));
    const bool cuda = device_kind(b->dev) == DEVICE_CUDA;
    if (o->batch == 0) b->o.batch = cuda ? 64 : 16;
    if (b->o.group > b->o.batch) b->o.group = b->o.batch;
    if (b->o.tokens == 0) b->o.tokens = cuda ? 256 : 32;
    if (b->o.batch % b->o.group)
        FAIL(ST_INVALID, "--batch %lld is no multiple of --group %lld", (long long)b->o.batch,
             (long long)b->o.group);
    CHECK(measure_limit(s));
    CHECK(programs_take_model(&s->programs, b));
    CHECK(write_prompts(s, (int)(b->o.batch / b->o.group)));
out:
    return st;
}

// A folder of random weights of the teacher's config, but for its name: of the policy's tokens.
static enum status write_teacher(struct step_bench *s)
{
    struct bench_options o = s->b.o;
    struct bench b = {0};
    enum status st;
    o.model = NULL;
    o.config = o.teacher;
    o.seed++;
    o.quantization = QUANTIZATION_NONE; // the trainer makes it of what is written
    CHECK(bench_open(&b, &o, NULL));
    st = model_folder_write(s->teacher, b.dev,
                            &(struct model_folder){.weights = b.weights,
                                                   .as = b.dt,
                                                   .source_folder = s->programs.model});
out:
    bench_close(&b);
    return status_context(st, "--teacher %s", o.teacher);
}

// ---- the trainer --------------------------------------------------------------------------------

static enum status run_trainer(const struct step_bench *s)
{
    const struct bench_options *o = &s->b.o;
    char command[1600], weights[256], ahead[48] = "", lora[24] = "", teacher[192] = "",
                                      budget[32] = "";
    if (o->sync == SYNC_CHECKPOINT)
        snprintf(weights, sizeof weights, "--sync checkpoint --model %s --device %s",
                 s->programs.model, o->device);
    else
        snprintf(weights, sizeof weights, "--bridge %s", s->programs.bridge);
    if (o->max_staleness >= 0)
        snprintf(ahead, sizeof ahead, " --async --max-staleness %d", (int)o->max_staleness);
    if (o->lora_r > 0) snprintf(lora, sizeof lora, " --lora-r %d", (int)o->lora_r);
    if (o->token_budget > 0)
        snprintf(budget, sizeof budget, " --token-budget %d", (int)o->token_budget);
    if (o->teacher)
        snprintf(teacher, sizeof teacher, " --teacher %s --teacher-quantization %s", s->teacher,
                 quantization_names[o->teacher_quantization]);
    // So hot that texts are random, of which every second has an even number of characters: groups
    // without a spread would have no gradient to compute.
    snprintf(command, sizeof command,
             "cw-trainer train %s --data %s --run-dir %s --reward regex "
             "--reward-pattern (?s)^(?:..)*+$ --prompts-per-step %d --num-generations %d "
             "--max-completion-length %d --ignore-eos --temperature 100 --max-steps %d "
             "--save-steps 0 --learning-rate 1e-9 --recompute %s --gradient-dtype %s "
             "--optim-moments %s%s%s%s%s",
             weights, s->data, s->run, (int)(o->batch / o->group), (int)o->group, (int)o->tokens,
             (int)(o->steps + o->warmup), recompute_names[o->recompute],
             gradient_dtype_names[o->gradient_dtype], moments_kind_names[o->moments], ahead, lora,
             budget, teacher);
    return programs_run(&s->programs, command, TRAINING_S);
}

// ---- the report ---------------------------------------------------------------------------------

enum { STEP_MS, ROLLOUT_MS, TRAIN_MS, PUBLISH_MS, SYNC_MS, WRITTEN_MB, NO_SPREAD, N_TIMES };
static const struct {
    const char *key;
    double scale;
} times[N_TIMES] = { // NO_SPREAD: share of groups whose backward pass is left out
    {"step_s", 1e3},
    {"rollout_s", 1e3},
    {"train_s", 1e3},
    {"publish/total_ms", 1},
    {"sync/time_s", 1e3},
    {"sync/bytes_written", 1e-6},
    {"frac_reward_zero_std", 1}};

struct times { // read so far
    const struct bench_options *o;
    double *columns[N_TIMES]; // (steps) each
    int64_t n;                // warm-up included
};

static enum status take_line(void *context, const char *line, size_t len)
{
    struct times *t = context;
    const int64_t at = t->n++ - t->o->warmup;
    json_t *metrics = NULL;
    enum status st = json_parse("metrics.jsonl", line, len, &metrics);
    for (int i = 0; st == ST_OK && i < N_TIMES && at >= 0 && at < t->o->steps; i++)
        t->columns[i][at] =
            times[i].scale * json_number_value(json_object_get(metrics, times[i].key));
    json_decref(metrics);
    return st;
}

// What the trainer took beside shared weights, by its own count (trainer/learn/learner.c), which
// leaves out weights of its own.
static enum status read_memory(const struct step_bench *s, double *ret_mib)
{
    static const char words[] = "memory after the first step (MiB): ";
    struct bytes log = BYTES_INIT;
    enum status st = file_read(s->programs.log, 16 << 20, &log);
    const char *at = st == ST_OK ? strstr(bytes_text(&log), words) : NULL;
    const bool own = s->b.o.sync == SYNC_CHECKPOINT;
    if (at)
        *ret_mib =
            strtod(at + strlen(words), NULL) + (own ? (double)s->b.weights->bytes / (1 << 20) : 0);
    if (st == ST_OK && !at) st = status_fail(ST_FORMAT, "the trainer does not say what it took");
    bytes_release(&log);
    return st;
}

static enum status report_steps(struct step_bench *s)
{
    const struct bench_options *o = &s->b.o;
    const int n = (int)o->steps;
    struct times t = {.o = o};
    char path[PATH_ROOM];
    double *all = calloc((size_t)n * N_TIMES, sizeof *all), m[N_TIMES], mib = 0;
    enum status st;
    if (!all) return status_fail(ST_NO_MEMORY, "no memory for %d times", n);
    for (int i = 0; i < N_TIMES; i++) t.columns[i] = all + (size_t)i * (size_t)n;
    CHECK(read_memory(s, &mib));
    CHECK(path_put(path, s->run, "metrics.jsonl"));
    CHECK(file_each_line(path, take_line, &t));
    if (t.n - o->warmup < n)
        FAIL(ST_FORMAT, "%s: %lld steps instead of %d", path, (long long)(t.n - o->warmup), n);
    for (int i = 0; i < N_TIMES; i++) m[i] = median(t.columns[i], n);
    const double tokens = (double)o->batch * (double)o->tokens;
    bench_print(
        &s->b, "step",
        json_pack("{s:s, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, "
                  "s:f}",
                  "sync", sync_way_names[o->sync], "samples", (json_int_t)o->batch, "group",
                  (json_int_t)o->group, "tokens", (json_int_t)o->tokens, "lora_r",
                  (json_int_t)o->lora_r, "trainer_mib", mib, "ms_per_step", m[STEP_MS],
                  "rollout_ms", m[ROLLOUT_MS], "train_ms", m[TRAIN_MS], "publish_ms", m[PUBLISH_MS],
                  "sync_ms", m[SYNC_MS], "written_mb", m[WRITTEN_MB], "frac_reward_zero_std",
                  m[NO_SPREAD], "tokens_per_s", tokens * 1e3 / m[STEP_MS], "limit_ms", s->limit_ms,
                  "ratio_to_limit", s->limit_ms / m[STEP_MS]),
        "step, %lld samples of %lld tokens in groups of %lld: %.1f ms, of which rollouts %.1f and "
        "training %.1f (publishing %.2f); new weights in %.2f ms, %.1f MB on disk; %.0f tokens/s; "
        "the trainer took %.1f MiB beside shared weights; limit %.1f ms, reached %.0f%%\n",
        (long long)o->batch, (long long)o->tokens, (long long)o->group, m[STEP_MS], m[ROLLOUT_MS],
        m[TRAIN_MS], m[PUBLISH_MS], m[SYNC_MS], m[WRITTEN_MB], tokens * 1e3 / m[STEP_MS], mib,
        s->limit_ms, 100 * s->limit_ms / m[STEP_MS]);
out:
    free(all);
    return st;
}

enum status bench_step(const struct bench_options *o)
{
    struct step_bench s = {0};
    enum status st;
    char adapters[64] = "";
    if (!o->model && !o->tokenizer)
        return status_fail(ST_INVALID,
                           "step needs --model DIR, or --tokenizer DIR for random weights: "
                           "prompts are text");
    CHECK(programs_open(&s.programs));
    snprintf(s.data, sizeof s.data, "%s/prompts.jsonl", s.programs.folder);
    snprintf(s.run, sizeof s.run, "%s/run", s.programs.folder);
    snprintf(s.teacher, sizeof s.teacher, "%s/teacher", s.programs.folder);
    CHECK(prepare(&s, o));
    if (o->teacher) CHECK(write_teacher(&s));
    if (o->lora_r > 0)
        snprintf(adapters, sizeof adapters, "--max-adapters 1 --max-lora-rank %d", (int)o->lora_r);
    if (o->sync == SYNC_SHARED)
        CHECK(programs_serve(&s.programs, &s.b.o, (int)s.b.o.batch, adapters));
    CHECK(run_trainer(&s));
    CHECK(report_steps(&s));
out:
    programs_close(&s.programs);
    bench_close(&s.b);
    return st;
}
