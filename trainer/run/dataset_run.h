/* dataset_run.h: training on completions that are there already, without a server: `cw-trainer sft`
 * learns them, `cw-trainer dpo` prefers one of two. One run: its options, and everything it has
 * open. Private to sft.c, dpo.c and the dataset_*.c files. One thread, the main one. */
#ifndef TRAINER_DATASET_RUN_H
#define TRAINER_DATASET_RUN_H

#include "common/base/log.h"
#include "trainer/learn/loss.h"
#include "trainer/data/data_order.h"
#include "trainer/data/prompts.h"
#include "trainer/run/folder.h"
#include "trainer/run/learning.h"
#include "trainer/run/runlog.h"
#include "trainer/run/saver.h"

#define DATASET_SIDES 2 // completions of an example, at most

struct dataset_config {
    const char *model, *init, *tokenizer, *data, *eval_data, *out, *run_dir, *config, *device;
    int dtype; // dtype_option_names
    struct prompt_options prompts;
    int64_t examples_per_step, max_steps, seed, eval_steps, eval_limit;
    struct learning_options learning;
    struct lora_options lora; // without its name
    struct saving_options saving;
    int all_turns;           // 0 or 1
    struct loss_config loss; // of dpo: beta, label_smoothing, sft_weight
    int preference;          // of preference_names
    int64_t rope_context;
    bool overwrite, resume;
    double num_train_epochs;
    int64_t early_stop_patience;
    bool load_best_model_at_end;
    struct job_options job;
    bool several_ranks; // derived
    enum log_level log_level;
};

struct dataset_examples {
    // (task->sides): the same lines with a completion each, and the same prompts
    struct dataset *sides[DATASET_SIDES];
    int n;             // examples
    double *reference; // (n, sides) log-probability of each completion by the start; of pairs
};

struct dataset_task { // what differs between the commands
    const char *command;
    const struct option_spec *options;
    int sides;
    const char *side_fields[DATASET_SIDES]; // prompt_options.side
    enum loss_type loss;                    // the first, of dpo's
};

struct dataset_run {
    const struct dataset_task *task;
    const struct dataset_config *config;
    char folder[FOLDER_ROOM]; // "": none is kept
    int folder_lock;          // -1: none
    struct device *dev;
    struct model_config *model;
    struct weights *weights;
    struct adapter *adapter;            // that is trained instead (--lora-r); NULL: none
    json_t *base;                       // of the adapter
    struct dataset_examples data, eval; // eval.n 0: none
    int64_t longest, widest; // tokens of a prompt with a completion; with all of an example's
    struct data_order order;
    struct schedule schedule;
    struct learner *learner;
    struct loss_config loss;
    int *items;         // (examples_per_step)
    struct runlog *log; // NULL: none
    int64_t step, taken, num_tokens, skipped;
    struct train_ranks ranks;
    struct saver saver;
    struct best best; // of the evaluations: minus the held-out loss
    json_t *best_of;  // what they were made of; NULL: there are none
};

// What is asked for, before anything is opened: ST_INVALID names the option. A run that goes on
// takes its options from its folder.
enum status dataset_run_check(const struct dataset_task *task, struct option_set *set,
                              struct dataset_config *config, struct job *ret_job);
// task and config are set: folder, model, data, the learner with all its memory, and the state of
// the last checkpoint with --resume. dataset_run_release() takes half-opened runs too.
enum status dataset_run_open(struct dataset_run *s);
void dataset_run_release(struct dataset_run *s, enum status outcome); // which other ranks hear
const char *dataset_tokenizer_folder(const struct dataset_config *config);

enum status dataset_run_compare_weights(const struct dataset_run *s); // of all ranks, after a step

// dataset_examples.c: reads a file's examples; largest: s->longest and widest become theirs, where
// they are more.
enum status dataset_examples_load(struct dataset_run *s, const char *path, int64_t limit,
                                  struct dataset_examples *ret);
void dataset_examples_release(struct dataset_examples *data);
// The log-probabilities by the weights as they are.
enum status dataset_run_measure(struct dataset_run *s, struct dataset_examples *data);
// n examples of `data`: those of items, or, NULL, the first ones. ret: begun; it borrows them.
enum status dataset_run_samples(const struct dataset_run *s, const struct dataset_examples *data,
                                const int *items, int n, struct samples **ret);

// dataset_checkpoint.c: a checkpoint of the present step, unless there is one, or no folder.
enum status dataset_run_save(struct dataset_run *s, bool interim);
enum status dataset_run_resume(struct dataset_run *s, const char *folder);
enum status dataset_run_take_best(struct dataset_run *s); // the best checkpoint's weights
enum status dataset_run_describe(const struct dataset_run *s,
                                 bool resumed);           // config.json and run.json
enum status dataset_run_write_out(struct dataset_run *s); // --out

// dataset_run.c: a task's main.
int dataset_main(const struct dataset_task *task, const char *usage, int argc, char **argv);

// Rows that both commands have, of a struct dataset_config.
#define DATASET_OPTIONS(data_help)                                                                 \
    OPT_TEXT("tokenizer", tokenizer, NULL, "DIR", "folder with the tokenizer (default: --model)"), \
        OPT_TEXT("data", data, NULL, "FILE", data_help, IS_COMMON), MAX_SAMPLES_OPTION,            \
        OPT_TEXT("out", out, NULL, "DIR",                                                          \
                 "model folder to write at the end, or with --lora-r the adapter's", IS_COMMON),   \
        RUN_DIR_OPTIONS("runs/DATE-TIME, or none where --out is given"),                           \
        OPT_FLAG("overwrite", overwrite, NULL,                                                     \
                 "replace --out where it is there, and without --resume the run in --run-dir"),    \
        OPT_CHOICE("dtype", dtype, "auto", dtype_option_names,                                     \
                   "of the folder --out; auto: as trained", WITHIN("out")),                        \
        OPT_TEXT("device", device, "auto", "auto|cpu|cuda:N", "where it is trained", IS_COMMON,    \
                 EXCLUDES_WHEN("!=auto", "gpus|several ranks",                                     \
                               "each rank is trained on its own GPU (--gpus), or on the CPU")),    \
        OPT_INT("rope-context", rope_context, "0", "TOKENS", 0, 1 << 24,                           \
                "of models with longrope: context by which its factors are chosen, as a server "   \
                "does by --max-context; 0: the longest example"),                                  \
        OPT_CONFIG, PROMPT_OPTIONS

#define DATASET_RUN_OPTIONS(rate)                                                                  \
    OPT_HEADING("Optimizer (AdamW)"),                                                              \
        OPT_INT("examples-per-step", examples_per_step, "8", "N", 1, 1e6, "examples in one step",  \
                IS_COMMON),                                                                        \
        EXPERTS_OPTION, ADAMW_OPTIONS(rate), LENGTH_OPTIONS("steps", "random weights"),            \
        OPT_HEADING("LoRA adapter"),                                                               \
        LORA_OPTIONS("train an adapter of this rank beside the frozen model; 0: the model "        \
                     "itself"),                                                                    \
        OPT_HEADING("Run"), SAVING_OPTIONS,                                                        \
        EVAL_OPTIONS("write the weights of the best evaluation to --out"), LOG_LEVEL_OPTION,       \
        OPT_HEADING("Several GPUs or hosts (docs/launch.md)"),                                     \
        RANK_OPTIONS("this host's GPUs, a rank each"),                                             \
        OPT_DERIVED("several ranks", several_ranks), OPT_HEADING("Machine"), MEMORY_OPTIONS

#endif
