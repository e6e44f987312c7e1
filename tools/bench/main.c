/* main.c: cw-bench: what this machine's limit is, and how near we come to it, in one run.
 *
 *   decode       one token for each of --batch sequences, each with --context tokens behind it:
 *                batch upload, model step, sampling and the read-back of the tokens, as the engine
 *                does it. Limit: the weights and the keys and values read once, at the bandwidth
 *                measured for reading.
 *   prefill      --batch prompts of --context tokens, --tokens of them in a step. Limit: their
 *                floating-point operations at the measured rate of a large matmul.
 *   train        forward and backward over --tokens tokens in sequences of --sequence, the targets
 *                every token. Limit: its floating-point operations at the measured rate of a large
 *                matmul. With --turns conversations instead: each turn a sequence behind what a
 *                template keeps of those before, packed as trees and with nothing to share.
 *   sync         publishes from a second process while this one decodes flat out. Limit: what AdamW
 *                must read and write at the measured bandwidth.
 *   step         whole GRPO steps by the real server and trainer: --batch samples of --tokens
 *                tokens in groups of --group (step.c). Limit: what decoding must read, what
 *                training must multiply, what AdamW must read and write, at the rates measured.
 *   serve        --requests requests of --shortest to --longest tokens to the real server, over its
 *                socket (serve.c). Limit: what decoding must read and prompts must multiply.
 *   speculative  rollouts of groups with each method of speculative decoding beside those without,
 *                at several batch sizes (speculative.c).
 *   ops          each operation, call by call, beside what its bytes or multiplications take at
 *                least, and which of its variants the call took (ops.c).
 *   tandem       rollouts of groups that a frozen model of the same size writes too, beside those
 *                without, at several batch sizes (speculative.c).
 *
 * Times are medians of --steps after --warmup, limits the best of their repetitions; random weights
 * unless --model is given.
 */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/options.h"
#include "common/model/adapter.h"
#include "common/model/model.h"
#include "kernels/device.h"
#include "tools/bench/bench.h"
#include "trainer/learn/learner.h"
#include "trainer/run/config.h"
#include <string.h>

#define OPTIONS_OF struct bench_options
static const struct option_spec table[] = {
    OPT_HEADING("What is run"),
    OPT_TEXT("model", model, NULL, "DIR", "a Hugging Face folder, with its weights"),
    OPT_TEXT("config", config, NULL, "FILE",
             "a config.json; its weights are random. Without --model and --config: a 100 M model "
             "on the CPU, one of Qwen2.5-1.5B's size on CUDA"),
    OPT_TEXT("tokenizer", tokenizer, NULL, "DIR",
             "folder with the tokenizer of random weights, for step and --schemas"),
    OPT_TEXT("device", device, "auto", "SPEC", "auto, cpu or cuda:N"),
    OPT_CHOICE("dtype", dtype, "auto", dtype_option_names, "of weights and activations"),
    OPT_CHOICE("quantization", quantization, "none", quantization_names, "as cw-infer-server"),
    OPT_CHOICE("kv-cache-dtype", kv_cache, "auto", kv_cache_names, "as cw-infer-server"),
    OPT_HEADING("Sizes"),
    OPT_INT("batch", batch, "0", "N", 0, 4096,
            "sequences decoded at once (0: 1 on the CPU, 16 on CUDA); samples of a step (0: 16, 64 "
            "on CUDA); conversations of --turns (0: 8)"),
    OPT_INT("context", context, "256", "N", 1, 1 << 20, "tokens behind each decoded one"),
    OPT_INT("tokens", tokens, "0", "N", 0, 1 << 20,
            "tokens of a training pass, or of a step in prefill (0: 512, 8192 on CUDA); most of a "
            "completion in speculative (0: 128); all of it in step (0: 32, 256 on CUDA)"),
    OPT_INT("sequence", sequence, "0", "N", 0, 1 << 20,
            "tokens of a training sequence (0: 128, 512 on CUDA)"),
    OPT_INT("steps", steps, "20", "N", 1, 100000, "measured repetitions"),
    OPT_INT("warmup", warmup, "4", "N", 0, 100000, "repetitions before those"),
    OPT_INT("seed", seed, "1", "N", 0, 0, "of random weights and tokens"),
    OPT_HEADING("Training"),
    OPT_CHOICE("recompute", recompute, "none", recompute_names, "train, step: as cw-trainer"),
    OPT_CHOICE("gradient-dtype", gradient_dtype, "auto", gradient_dtype_names,
               "train, step: as cw-trainer"),
    OPT_CHOICE("optim-moments", moments, "f32", moments_kind_names, "train, step: as cw-trainer"),
    OPT_INT("token-budget", token_budget, "0", "N", 0, 1 << 24, "step: as cw-trainer; 0: its own"),
    OPT_INT("turns", turns, "0", "N", 0, 1000, "train: conversations of that many; 0: without"),
    OPT_INT("read", read, "256", "N", 1, 1 << 20, "tokens that a turn reads"),
    OPT_INT("sampled", sampled, "128", "N", 1, 1 << 20, "tokens that it samples"),
    OPT_INT("kept", kept, "64", "N", 0, 1 << 20, "tokens that later turns have of those"),
    OPT_DOUBLE(
        "shared", shared, "0", "PERCENT", 0, 100,
        "share of all tokens that conversations are to have in common: histories are written "
        "anew (compacted, say) in one of their turns; 0: as it comes"),
    OPT_INT("max-staleness", max_staleness, "-1", "UPDATES", -1, 64,
            "step: cw-trainer --async --max-staleness; -1: without"),
    OPT_CHOICE("sync", sync, "shared", sync_way_names,
               "step: as cw-trainer; checkpoint: its own server is started anew for each step"),
    OPT_INT("lora-r", lora_r, "0", "R", 0, ADAPTER_MAX_RANK,
            "step: train an adapter of this rank, of all that adapters can change; 0: the model"),
    OPT_TEXT("teacher", teacher, NULL, "FILE",
             "step: a teacher's config.json; its weights are random, its tokens the model's"),
    OPT_CHOICE("teacher-quantization", teacher_quantization, "none", quantization_names,
               "step: as cw-trainer", WITHIN("teacher")),
    OPT_HEADING("Serving"),
    OPT_INT("requests", requests, "0", "N", 0, 100000,
            "of a round (0: 8, 256 on CUDA); --batch is how many are in flight at a time (0: all)"),
    OPT_INT("shortest", shortest, "32", "N", 1, 1 << 20,
            "least random tokens in a request's prompt, and in its completion"),
    OPT_INT("longest", longest, "32", "N", 1, 1 << 20, "most of either"),
    OPT_TEXT("schemas", schemas, NULL, "FILE",
             "serve: JSON schemas, one a line, that the answers are of in turns"),
    OPT_HEADING("Speculative decoding, tandem"),
    OPT_TEXT("draft", draft, NULL, "DIR", "a draft model's folder, with its weights"),
    OPT_INT("draft-vocabulary", draft_vocabulary, "0", "N", 0, 1 << 24, "as cw-infer-server"),
    OPT_TEXT("draft-config", draft_config, NULL, "FILE",
             "a draft model's config.json; random weights"),
    OPT_TEXT("methods", methods, NULL, "LIST",
             "as --speculative of the server, separated by commas, joined by + where one is "
             "several at once, with fixed- before one that drafts its K always; off is always "
             "measured. Default: ngram:5,suffix:8, and draft_model:5 where there is a draft model. "
             "tandem: selectors as SELECTOR[:P], with shared- before one where all samples of a "
             "round have the same authors"),
    OPT_TEXT("tandem-model", tandem_model, NULL, "DIR",
             "tandem: folder of the frozen model's weights, of the model's own shape; default: "
             "random"),
    OPT_TEXT("batches", batches, "1,2,4,8,16,32,64", "LIST", "samples in flight"),
    OPT_INT("group", group, "8", "N", 1, 4096, "samples of a prompt, at most the batch"),
    OPT_INT("waves", waves, "1", "N", 1, 100000, "how often a round fills the batch"),
    OPT_INT("repeats", repeats, "3", "N", 1, 1000,
            "times that all rounds are done, each time with engines begun anew"),
    OPT_INT("rounds", rounds, "5", "N", 1, 100000,
            "measured rounds, each with all methods in turn"),
    OPT_INT("warmup-rounds", warmup_rounds, "1", "N", 0, 100000,
            "rounds before those, of each batch size"),
    OPT_DOUBLE("temperature", temperature, "1", "T", 0, 1000, "of the sampling"),
    OPT_FLAG("no-step-ahead", no_step_ahead, NULL,
             "serve, step: with the server's --step-ahead off"),
    OPT_FLAG("ignore-eos", ignore_eos, NULL, "samples do not stop before --tokens"),
    OPT_TEXT(
        "prompts", prompts, NULL, "FILE",
        "a data set as cw-trainer's --data; its answers are not looked at. Default: random tokens"),
    OPT_INT("prompt-tokens", prompt_tokens, "32", "N", 1, 1 << 20, "tokens of a random prompt"),
    OPT_HEADING("Output"),
    OPT_TEXT("only", only, NULL, "TEXT", "ops: the calls whose line contains it: 'matmul head'"),
    OPT_FLAG("variants", variants, NULL,
             "ops: every variant of every operation, with when it is taken, timed or not"),
    OPT_FLAG("json", json, NULL, "print one JSON object"),
    OPT_END,
};

static const struct mode {
    const char *name;
    enum status (*run)(struct bench *b);
    enum status (*run_alone)(const struct bench_options *o); // opens the device itself
} modes[] = {{"decode", bench_decode, NULL},
             {"prefill", bench_prefill, NULL},
             {"train", bench_train, NULL},
             {"sync", NULL, bench_sync},
             {"step", NULL, bench_step},
             {"serve", NULL, bench_serve},
             {"speculative", bench_speculative, NULL},
             {"tandem", bench_tandem, NULL},
             {"ops", NULL, bench_ops}};

struct choice {
    struct bench_options o;
    const char *what;
    const struct mode *mode;
};

static enum status find_mode(void *context, struct option_set *set)
{
    struct choice *c = context;
    (void)set;
    for (size_t i = 0; c->what && i < sizeof modes / sizeof *modes; i++)
        if (strcmp(c->what, modes[i].name) == 0) c->mode = &modes[i];
    if (c->mode) return ST_OK;
    return status_fail(ST_INVALID, "say what to measure: decode, prefill, train, sync, step, "
                                   "serve, speculative, tandem or ops (--help lists the options)");
}

static enum status run(void *context)
{
    const struct choice *c = context;
    struct bench b = {0};
    if (c->mode->run_alone) return c->mode->run_alone(&c->o);
    enum status st = bench_open(&b, &c->o, NULL);
    if (st == ST_OK) st = c->mode->run(&b);
    bench_close(&b);
    return st;
}

PREPARE_PROGRAM;

int main(int argc, char **argv)
{
    struct choice c = {0};
    const struct program program = {
        .name = "cw-bench",
        .usage = "decode|prefill|train|sync|step|serve|speculative|tandem|ops [options]",
        .options = table,
        .config = &c.o,
        .word = &c.what,
        .check = find_mode,
        .run = run,
        .context = &c,
    };
    device_prepare_process(argv);
    return program_main(&program, argc, argv);
}
