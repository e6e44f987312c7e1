/* main.c: cw-bench: what this machine's limit is, and how near we come to it, in one run.
 *
 *   decode       one token for each of --batch sequences, each with --context tokens behind it:
 *                batch upload, model step, sampling and the read-back of the tokens, as the engine
 *                does it. Limit: the weights and the keys and values read once, at the bandwidth
 *                measured for reading.
 *   train        forward and backward over --tokens tokens in sequences of --sequence, the targets
 *                every token. Limit: its floating-point operations at the measured rate of a large
 *                matmul.
 *   sync         publishes from a second process while this one decodes flat out. Limit: what AdamW
 *                must read and write at the measured bandwidth.
 *   step         whole GRPO steps by the real server and trainer: --batch samples of --tokens
 *                tokens in groups of --group (step.c). Limit: what decoding must read, what
 *                training must multiply, what AdamW must read and write, at the rates measured.
 *   speculative  rollouts of groups with each method of speculative decoding beside those without,
 *                at several batch sizes (speculative.c).
 *
 * Times are medians of --steps after --warmup, limits the best of their repetitions; random weights
 * unless --model is given.
 */
#include "common/base/log.h"
#include "common/base/options.h"
#include "tools/bench/bench.h"
#include <string.h>

#define FIELD(name) offsetof(struct bench_options, name)
static const struct option_spec table[] = {
    {"", OPTION_HEADING, 0, NULL, NULL, "What is run", 0, 0, NULL},
    {"model", OPTION_PATH, FIELD(model), NULL, "DIR", "a Hugging Face folder, with its weights", 0,
     0, NULL},
    {"config", OPTION_PATH, FIELD(config), NULL, "FILE",
     "a config.json; its weights are random. Without --model and --config: a 100 M model on the "
     "CPU, one "
     "of Qwen2.5-1.5B's size on CUDA",
     0, 0, NULL},
    {"tokenizer", OPTION_PATH, FIELD(tokenizer), NULL, "DIR",
     "folder with the tokenizer of random weights, for step", 0, 0, NULL},
    {"device", OPTION_STRING, FIELD(device), "auto", "SPEC", "auto, cpu or cuda:N", 0, 0, NULL},
    {"dtype", OPTION_STRING, FIELD(dtype), "auto", "TYPE", "of weights and activations", 0, 0,
     "auto|bf16|f32"},
    {"", OPTION_HEADING, 0, NULL, NULL, "Sizes", 0, 0, NULL},
    {"batch", OPTION_INT, FIELD(batch), "0", "N",
     "sequences decoded at once (0: 1 on the CPU, 16 on CUDA); samples of a step (0: 16, 64 on "
     "CUDA)",
     0, 4096, NULL},
    {"context", OPTION_INT, FIELD(context), "256", "N", "tokens behind each decoded one", 1,
     1 << 20, NULL},
    {"tokens", OPTION_INT, FIELD(tokens), "0", "N",
     "tokens of a training pass (0: 512, 8192 on CUDA); most of a completion in speculative (0: "
     "128); all of it in step (0: 32, 256 on CUDA)",
     0, 1 << 20, NULL},
    {"sequence", OPTION_INT, FIELD(sequence), "0", "N",
     "tokens of a training sequence (0: 128, 512 on CUDA)", 0, 1 << 20, NULL},
    {"steps", OPTION_INT, FIELD(steps), "20", "N", "measured repetitions", 1, 100000, NULL},
    {"warmup", OPTION_INT, FIELD(warmup), "4", "N", "repetitions before those", 0, 100000, NULL},
    {"seed", OPTION_INT, FIELD(seed), "1", "N", "of random weights and tokens", 0, 0, NULL},
    {"", OPTION_HEADING, 0, NULL, NULL, "Speculative decoding", 0, 0, NULL},
    {"draft", OPTION_PATH, FIELD(draft), NULL, "DIR", "a draft model's folder, with its weights", 0,
     0, NULL},
    {"draft-config", OPTION_PATH, FIELD(draft_config), NULL, "FILE",
     "a draft model's config.json; random weights", 0, 0, NULL},
    {"methods", OPTION_STRING, FIELD(methods), NULL, "LIST",
     "as --speculative of the daemon, separated by commas, joined by + where one is several at "
     "once, with "
     "fixed- before one that drafts its K always; off is always measured. Default: "
     "ngram:5,suffix:8, and "
     "draft_model:5 where there is a draft model",
     0, 0, NULL},
    {"batches", OPTION_STRING, FIELD(batches), "1,2,4,8,16,32,64", "LIST", "samples in flight", 0,
     0, NULL},
    {"group", OPTION_INT, FIELD(group), "8", "N", "samples of a prompt, at most the batch", 1, 4096,
     NULL},
    {"waves", OPTION_INT, FIELD(waves), "1", "N", "how often a round fills the batch", 1, 100000,
     NULL},
    {"repeats", OPTION_INT, FIELD(repeats), "3", "N",
     "times that all rounds are done, each time with engines begun anew", 1, 1000, NULL},
    {"rounds", OPTION_INT, FIELD(rounds), "5", "N",
     "measured rounds, each with all methods in turn", 1, 100000, NULL},
    {"warmup-rounds", OPTION_INT, FIELD(warmup_rounds), "1", "N",
     "rounds before those, of each batch size", 0, 100000, NULL},
    {"temperature", OPTION_DOUBLE, FIELD(temperature), "1", "T", "of the sampling", 0, 1000, NULL},
    {"ignore-eos", OPTION_FLAG, FIELD(ignore_eos), NULL, NULL,
     "samples do not stop before --tokens", 0, 0, NULL},
    {"prompts", OPTION_PATH, FIELD(prompts), NULL, "FILE",
     "a data set as cw-trainer's --data; its answers are not looked at. Default: random tokens", 0,
     0, NULL},
    {"prompt-tokens", OPTION_INT, FIELD(prompt_tokens), "32", "N", "tokens of a random prompt", 1,
     1 << 20, NULL},
    {"", OPTION_HEADING, 0, NULL, NULL, "Output", 0, 0, NULL},
    {"json", OPTION_FLAG, FIELD(json), NULL, NULL, "print one JSON object", 0, 0, NULL},
    {NULL, OPTION_FLAG, 0, NULL, NULL, NULL, 0, 0, NULL},
};

static const struct {
    const char *name;
    enum status (*run)(struct bench *b);
    enum status (*run_alone)(const struct bench_options *o); // opens the device itself
} modes[] = {{"decode", bench_decode, NULL},
             {"train", bench_train, NULL},
             {"sync", NULL, bench_sync},
             {"step", NULL, bench_step},
             {"speculative", bench_speculative, NULL}};
#define N_MODES (sizeof modes / sizeof modes[0])

int main(int argc, char **argv)
{
    struct bench_options o = {0};
    struct bench b = {0};
    const char *what = NULL;
    struct option_set *set = NULL;
    enum status st;
    size_t mode = 0;
    device_prepare_process(argv);
    log_open("cw-bench", LOG_INFO);
    switch (options_parse(table, "cw-bench", "decode|train|sync|step|speculative [options]", argc,
                          argv, 1, &o, &what, &set)) {
    case OPTIONS_DONE:
        return 0;
    case OPTIONS_BAD:
        log_error("%s", status_message());
        return 2;
    case OPTIONS_OK:
        break;
    }
    while (what && mode < N_MODES && strcmp(what, modes[mode].name) != 0) mode++;
    if (!what || mode == N_MODES) {
        log_error("say what to measure: decode, train, sync, step or speculative (--help lists the "
                  "options)");
        options_free(set);
        return 2;
    }
    if (modes[mode].run_alone) {
        st = modes[mode].run_alone(&o);
    } else {
        st = bench_open(&b, &o, NULL);
        if (st == ST_OK) st = modes[mode].run(&b);
        bench_close(&b);
    }
    if (st != ST_OK) log_error("%s", status_message());
    options_free(set);
    return st == ST_OK ? 0 : 1;
}
