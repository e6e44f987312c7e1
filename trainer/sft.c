/* sft.c: `cw-trainer sft`: learns completions by cross-entropy. The main thread.
 *
 * The same learner as GRPO's, on weights of its own instead of a server's: an example is a group of
 * one completion, and the loss is the mean over the step's completion tokens of -log p. Examples of
 * similar length need not meet, since nothing is padded. */
#include "trainer/sft.h"
#include "trainer/run/foreign_names.h"
#include "trainer/run/offline.h"
#include "trainer/run/options_shared.h"

#define OPTIONS_OF struct offline_config
const struct option_spec sft_options[] = {
    OPT_HEADING("What is trained, on what"),
    OPT_TEXT("model", model, NULL, "DIR", "model folder to start from", IS_COMMON),
    OPT_TEXT("init", init, NULL, "FILE", "or: a config.json, for a new model with random weights",
             IS_COMMON, EXCLUDES("model", "both say what is trained"),
             NEEDS("tokenizer", "a folder with tokenizer.json"),
             EXCLUDES("lora-r", "an adapter of random weights is of no use")),
    OPT_CHOICE("train-on", all_turns, "last", OPTION_WORDS("last", "all"),
               "which turns of the assistant are learnt of a conversation"),
    OFFLINE_DATA_OPTIONS("prompts and completions, JSONL"),
    ANSWER_FIELD_OPTION,
    OFFLINE_RUN_OPTIONS("2e-5"),
    OPT_FOREIGN(sft_foreign_names),
    OPT_FOREIGN(offline_foreign_names),
    OPT_FOREIGN(common_foreign_names),
    OPT_END,
};

static bool is_learnt(const struct example *e, int token)
{
    return !e->learnt || e->learnt[token];
}

static int64_t count(const struct offline_data *data, int item)
{
    const struct example *e = &data->sides[0]->examples[item];
    int64_t n = 0;
    for (int t = 0; t < e->completion_ids.n; t++) n += is_learnt(e, t);
    return n;
}

static void cross_entropy(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    struct offline_pass *pass = context;
    struct update_stats *stats = &pass->stats;
    const struct micro_batch *mb = rows->mb;
    for (int seq = 0; seq < mb->n_seqs; seq++) {
        const struct example *e = &pass->data->sides[0]->examples[pass->items[mb->sample[seq]]];
        for (int i = mb->first[seq]; i < mb->first[seq + 1]; i++) {
            ret_dlogprobs[i] = 0;
            if (!is_learnt(e, i - mb->first[seq])) continue;
            stats_add(stats, STAT_LOSS, -rows->logprobs[i] * pass->weight);
            stats_add(stats, STAT_ENTROPY, rows->entropy[i]);
            stats_add(stats, STAT_LIKELIEST, rows->ranked[i].rank == 1);
            ret_dlogprobs[i] = (float)-pass->weight;
        }
    }
}

int sft_main(int argc, char **argv)
{
    static const struct offline_task task = {
        .command = "sft",
        .options = sft_options,
        .sides = 1,
        .loss = cross_entropy,
        .count = count,
        .stats = STAT_BIT(STAT_LOSS) | STAT_BIT(STAT_ENTROPY) | STAT_BIT(STAT_LIKELIEST),
    };
    return offline_main(&task,
                        "--model DIR | --init CONFIG.json --tokenizer DIR  --data FILE.jsonl "
                        "--out DIR | --run-dir DIR\n\n"
                        "Trains a model folder, or a LoRA adapter of it, on prompts and "
                        "completions, without a server.",
                        argc, argv);
}
