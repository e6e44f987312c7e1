/* dpo.c: `cw-trainer dpo`: learns which of two completions is preferred (learn/preference.h). The
 * main thread.
 *
 * A pair is a group of two completions behind one prompt; the loss is the mean over the step's
 * pairs. The log-probabilities by the reference, --model as it is, are computed once, before the
 * first step, so that no second model is held. */
#include "trainer/dpo.h"
#include "trainer/run/foreign_names.h"
#include "trainer/run/offline.h"
#include "trainer/run/options_shared.h"

#define OPTIONS_OF struct offline_config
const struct option_spec dpo_options[] = {
    OPT_HEADING("What is trained, on what"),
    OPT_TEXT("model", model, NULL, "DIR", "model folder to start from, and the reference (needed)",
             IS_COMMON),
    OFFLINE_DATA_OPTIONS("pairs, JSONL: prompt, chosen and rejected"),
    OPT_HEADING("Loss"),
    OPT_CHOICE("loss-type", preference.type, "sigmoid", preference_names, "sigmoid: DPO",
               IS_COMMON),
    OPT_DOUBLE("beta", preference.beta, "0.1", "B", 0, 1e6,
               "how closely the policy is held to the reference; more: closer", IS_COMMON),
    OPT_DOUBLE("label-smoothing", preference.label_smoothing, "0", "E", 0, 0.499,
               "of robust and exo_pair: share of pairs taken to be the wrong way round",
               WITHIN("loss-type=robust,exo_pair")),
    OPT_DOUBLE("sft-weight", sft_weight, "0", "W", 0, 1e6,
               "of the chosen completions' cross-entropy beside it, which keeps them likely"),
    OFFLINE_RUN_OPTIONS("1e-6"),
    OPT_FOREIGN(dpo_foreign_names),
    OPT_FOREIGN(offline_foreign_names),
    OPT_FOREIGN(common_foreign_names),
    OPT_END,
};

static int64_t count(const struct offline_data *data, int item)
{
    (void)data;
    (void)item;
    return 1;
}

// Sums over one completion, as TRL has them.
static double sum_completion(struct update_stats *stats, const struct learner_rows *rows, int seq)
{
    const struct micro_batch *mb = rows->mb;
    const bool chosen = mb->sample[seq] % 2 == 0;
    double logprob = 0;
    for (int i = mb->first[seq]; i < mb->first[seq + 1]; i++) {
        logprob += rows->logprobs[i];
        stats_add(stats, STAT_ENTROPY, rows->entropy[i]);
        if (chosen) stats_add(stats, STAT_LIKELIEST, rows->ranked[i].rank == 1);
    }
    return logprob;
}

static void fill(const struct micro_batch *mb, int seq, double value, float *ret)
{
    for (int i = mb->first[seq]; i < mb->first[seq + 1]; i++) ret[i] = (float)value;
}

static void preferences(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    struct offline_pass *pass = context;
    struct update_stats *stats = &pass->stats;
    const struct micro_batch *mb = rows->mb;
    for (int seq = 0; seq < mb->n_seqs; seq += 2) {
        const double *reference = pass->data->reference + 2 * pass->items[mb->sample[seq] / 2];
        const double chosen = sum_completion(stats, rows, seq),
                     rejected = sum_completion(stats, rows, seq + 1);
        const struct preference_pair pair = {chosen - reference[0], rejected - reference[1],
                                             mb->first[seq + 1] - mb->first[seq],
                                             mb->first[seq + 2] - mb->first[seq + 1]};
        const struct preference_loss loss = preference_loss(&pass->config->preference, &pair);
        const double beta = pass->config->preference.beta;
        stats_add(stats, STAT_LOSS, loss.loss * pass->weight - chosen * pass->per_token);
        stats_add(stats, STAT_CHOSEN_REWARD, beta * pair.chosen);
        stats_add(stats, STAT_REJECTED_REWARD, beta * pair.rejected);
        stats_add(stats, STAT_MARGIN, beta * (pair.chosen - pair.rejected));
        stats_add(stats, STAT_RIGHT, pair.chosen > pair.rejected);
        stats_add(stats, STAT_CHOSEN_LOGPROB, chosen);
        stats_add(stats, STAT_REJECTED_LOGPROB, rejected);
        fill(mb, seq, loss.by_chosen * pass->weight - pass->per_token, ret_dlogprobs);
        fill(mb, seq + 1, loss.by_rejected * pass->weight, ret_dlogprobs);
    }
}

int dpo_main(int argc, char **argv)
{
    static const struct offline_task task = {
        .command = "dpo",
        .options = dpo_options,
        .sides = 2,
        .side_fields = {"chosen", "rejected"},
        .reference = true,
        .loss = preferences,
        .count = count,
        .stats = STAT_BIT(STAT_LOSS) | STAT_BIT(STAT_ENTROPY) | STAT_BIT(STAT_LIKELIEST) |
                 STAT_BIT(STAT_CHOSEN_REWARD) | STAT_BIT(STAT_REJECTED_REWARD) |
                 STAT_BIT(STAT_MARGIN) | STAT_BIT(STAT_RIGHT) | STAT_BIT(STAT_CHOSEN_LOGPROB) |
                 STAT_BIT(STAT_REJECTED_LOGPROB),
    };
    return offline_main(&task,
                        "--model DIR --data FILE.jsonl --out DIR | --run-dir DIR\n\n"
                        "Trains a model folder, or a LoRA adapter of it, on pairs of which one "
                        "completion is preferred (DPO), without a server.",
                        argc, argv);
}
