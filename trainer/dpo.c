/* dpo.c: `cw-trainer dpo`: learns which of two completions is preferred (learn/losses.c). The
 * main thread.
 *
 * A pair is a group of two completions behind one prompt; the loss is the mean over the step's
 * pairs. The log-probabilities by the reference, --model as it is, are computed once, before the
 * first step, so that no second model is held. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/commands.h"
#include "common/model/model.h"
#include "trainer/run/dataset_run.h"
#include "trainer/run/options_shared.h"

#define OPTIONS_OF struct train_config
const struct option_spec dpo_options[] = {
    OPT_HEADING("What is trained, on what"),
    OPT_TEXT("model", model, NULL, "DIR", "model folder to start from, and the reference (needed)",
             IS_COMMON),
    DATASET_OPTIONS("pairs, JSONL: prompt, chosen and rejected"),
    OPT_HEADING("Loss"),
    OPT_CHOICE("loss-type", preference, "sigmoid", preference_names, "sigmoid: DPO", IS_COMMON),
    OPT_DOUBLE("beta", loss.beta, "0.1", "B", 0, 1e6,
               "how closely the policy is held to the reference; more: closer", IS_COMMON),
    OPT_DOUBLE("label-smoothing", loss.label_smoothing, "0", "E", 0, 0.499,
               "of robust and exo_pair: share of pairs taken to be the wrong way round",
               WITHIN("loss-type=robust,exo_pair")),
    OPT_DOUBLE("discopop-tau", loss.discopop_tau, "0.05", "T", 1e-6, 1e6,
               "of discopop: how far from the reference the one loss gives way to the other",
               WITHIN("loss-type=discopop")),
    OPT_DOUBLE("sft-weight", loss.sft_weight, "0", "W", 0, 1e6,
               "of the chosen completions' cross-entropy beside it, which keeps them likely"),
    DATASET_RUN_OPTIONS("1e-6"),
    OPT_FOREIGN(dpo_foreign_names),
    OPT_FOREIGN(dataset_foreign_names),
    OPT_FOREIGN(common_foreign_names),
    OPT_END,
};

int dpo_main(int argc, char **argv)
{
    static const struct task task = {
        .command = "dpo",
        .options = dpo_options,
        .kind = &dataset_kind,
        .sides = 2,
        .side_fields = {"chosen", "rejected"},
        .loss = LOSS_SIGMOID,
    };
    return run_main(&task,
                    "--model DIR --data FILE.jsonl --out DIR | --run-dir DIR\n\n"
                    "Trains a model folder, or a LoRA adapter of it, on pairs of which one "
                    "completion is preferred (DPO), without a server.",
                    argc, argv);
}
