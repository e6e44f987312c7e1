/* config.h: the options of `cw-trainer train`, and how those that are words or fractions resolve;
 * sft and dpo have some of them, and a few of their own. Names and defaults are TRL's (GRPOConfig)
 * where TRL has the option. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_CONFIG_H
#define TRAINER_CONFIG_H

#include "common/base/log.h"
#include "common/base/options.h"
#include "trainer/reward/advantage.h"
#include "trainer/reward/cost.h"
#include "trainer/curriculum/curriculum.h"
#include "trainer/launch/launch.h"
#include "trainer/learn/loss.h"
#include "trainer/data/data.h"
#include "trainer/reward/reward.h"
#include "trainer/rollout/rollout.h"
#include "trainer/run/options_shared.h"

#define ROLLOUTS_COMMAND "command:"

enum sync_way { SYNC_SHARED, SYNC_CHECKPOINT };
extern const char *const sync_way_names[];

struct train_config {
    const char *bridge, *data, *run_dir, *config;
    const char *atropos;  // URL; NULL: rollouts are this program's
    const char *rollouts; // ROLLOUTS_COMMAND and a program's line; NULL: one completion a sample
    int64_t rollout_processes;
    double rollout_process_timeout;
    const char *also_count, *start_from;
    const char *workers, *workers_api_key_file;
    // how the sampler comes by new weights
    enum sync_way sync;
    const char *model, *draft, *device; // with SYNC_CHECKPOINT; model also of a server of its own
    int quantization;                   // quantization_names, of weights of this process
    int64_t restart_interval, server_port;
    const char *server_command, *server_url;
    double server_timeout;
    enum log_level log_level;
    bool resume, exact;
    // prompts
    struct prompt_options prompts;
    // reward
    struct reward_options reward;
    // cost of inference
    bool cost;
    double cost_weights[COST_TERMS];
    int latency_modelled, normalise_terms; // 0 or 1
    // rollouts
    int64_t filter_groups; // times that flat ones are drawn anew
    bool async;
    int64_t max_staleness, rollout_ahead;
    double rollout_budget;
    struct sampling_options sampling;     // without its seed, which is each step's
    struct curriculum_options curriculum; // with the run's seed once it is checked
    // loss; as it is meant: train_resolved
    struct loss_config loss;
    struct advantage_config advantage; // without its pass_k
    int64_t pass_k;
    int64_t num_iterations, steps_per_generation;
    int count_updates; // 0 or 1
    double kl_reward_coef;
    bool sync_ref_model;
    double ref_model_mixup_alpha;
    int64_t ref_model_sync_steps;
    struct entropy_config entropy;
    bool importance_sampling_correction, processed_logprobs, constrained_loss;
    int importance_sampling_mode; // tis_mode without off: from 0 on
    bool mask_truncated_completions;
    struct lora_options lora;
    // optimizer
    struct learner_options learner;
    int64_t max_steps;
    double num_train_epochs;
    int64_t seed;
    const char *teacher;      // NULL: there is none
    int teacher_quantization; // quantization_names
    double distill_beta;
    // draft model
    bool train_draft;
    double draft_learning_rate, draft_loss_weight, draft_max_grad_norm;
    int64_t draft_depths;
    // run
    struct saving_options saving;
    bool log_completions, log_logprobs;
    const char *eval_data;
    int eval_by_epoch; // 0 or 1
    int64_t num_generations_eval;
    double eval_temperature;
    int64_t eval_steps, eval_epochs, eval_limit, early_stop_patience;
    bool load_best_model_at_end;
    const char *best_metric; // NULL: the reward
    // of sft and dpo (dataset_run.h)
    const char *init, *tokenizer, *out;
    int dtype;      // of what is written to `out`: dtype_option_names
    int all_turns;  // 0 or 1
    int preference; // of preference_names
    int64_t rope_context;
    bool overwrite;
    // several ranks
    struct launch_options launch;
    // machine
    double quiesce_timeout, rollout_timeout;
    // derived: by launch_find(), a server of this rank's own is looked for, and who trains
    // together; by train_config_resolve(), whether samples may be of weights before those that
    // learn
    bool serves, several_ranks, stale;
};
extern const struct option_spec train_options[];

// What the words mean, checked together; options name themselves in errors (ST_INVALID). The
// config's derived values of launch_find() are set before; the others come to be here.
struct train_resolved {
    struct loss_config loss;
    struct schedule schedule;       // total_steps: filled by run_plan_steps()
    struct schedule draft_schedule; // the same shape
    double draft_max_grad_norm;
    int64_t updates_per_step;
    int64_t schedule_per_step; // of the schedules' steps in a rollout: --count-steps
    bool has_reference;        // weights that the policy is compared with
    // --async or --rollout-ahead; without, steps_ahead is 0
    bool async;
    int64_t max_staleness; // updates; also of --restart-interval
    int steps_ahead;       // that may be sampled before the one that is learned from is
    int steps_carried;     // that a group may go on into; above 0 with --rollout-budget alone
};
enum status train_config_resolve(struct train_config *config, const struct option_set *set,
                                 struct train_resolved *ret);
#endif
