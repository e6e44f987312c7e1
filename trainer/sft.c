/* sft.c: `cw-trainer sft`: learns completions by cross-entropy. The main thread.
 *
 * The same learner as GRPO's, on weights of its own instead of a server's: an example is a group of
 * one completion, and the loss is the mean over the step's completion tokens of -log p. Examples of
 * similar length need not meet, since nothing is padded. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/commands.h"
#include "common/model/model.h"
#include "trainer/run/dataset_run.h"
#include "trainer/run/options_shared.h"

#define OPTIONS_OF struct train_config
const struct option_spec sft_options[] = {
    OPT_HEADING("What is trained, on what"),
    OPT_TEXT("model", model, NULL, "DIR", "model folder to start from", IS_COMMON),
    OPT_TEXT("init", init, NULL, "FILE", "or: a config.json, for a new model with random weights",
             IS_COMMON, EXCLUDES("model", "both say what is trained"),
             NEEDS("tokenizer", "a folder with tokenizer.json"),
             EXCLUDES("lora-r", "an adapter of random weights is of no use")),
    OPT_CHOICE("train-on", all_turns, "last", OPTION_WORDS("last", "all"),
               "which turns of the assistant are learnt of a conversation"),
    DATASET_OPTIONS("prompts and completions, JSONL"),
    ANSWER_FIELD_OPTION,
    DATASET_RUN_OPTIONS("2e-5"),
    OPT_FOREIGN(sft_foreign_names),
    OPT_FOREIGN(dataset_foreign_names),
    OPT_FOREIGN(common_foreign_names),
    OPT_END,
};

int sft_main(int argc, char **argv)
{
    static const struct task task = {
        .command = "sft",
        .options = sft_options,
        .kind = &dataset_kind,
        .sides = 1,
        .loss = LOSS_CROSS_ENTROPY,
    };
    return run_main(&task,
                    "--model DIR | --init CONFIG.json --tokenizer DIR  --data FILE.jsonl "
                    "--out DIR | --run-dir DIR\n\n"
                    "Trains a model folder, or a LoRA adapter of it, on prompts and "
                    "completions, without a server.",
                    argc, argv);
}
