/* run.h: one training run, whichever command it is of: what it has open, and what it writes down.
 * Private to train.c, dataset.c, and the run_*.c and dataset_*.c files. One thread, the main
 * one. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_RUN_H
#define TRAINER_RUN_H

#include "trainer/learn/stats.h"
#include "trainer/reward/cost.h"
#include "trainer/run/config.h"
#include "trainer/run/mapped.h"
#include "trainer/run/runlog.h"

#define FOLDER_ROOM 512
#define TASK_SIDES  2 // completions of an example, at most

struct dataset_run;
struct rollout_step;
struct run;
struct scores;

struct task_kind { // where the samples of its steps come from: sampled anew, or of a data set
    // The options together, before anything is opened: ST_INVALID names the option.
    enum status (*check)(struct run *run, struct option_set *set, struct train_config *config);
    enum status (*open)(struct run *run);
    enum status (*step)(struct run *run); // the next one, which leaves its line
    // On held-out data; adds the result to `metrics`, compares it with the best, and logs it.
    enum status (*evaluate)(struct run *run, json_t *metrics);
    enum status (*end)(struct run *run); // after the last step, or once it was told to stop
};
struct task { // what differs between the commands
    const char *command;
    const struct option_spec *options;
    const struct task_kind *kind;
    int sides; // completions of an example of a data set; 0: they are sampled
    const char *side_fields[TASK_SIDES]; // prompt_options.side
    enum loss_type loss;                 // of a data set: the first, of dpo's
};

struct own {
    struct server_process *server; // started once there are weights for it; NULL: none is
    // where it has its log: the run's folder, of further ranks one in it
    char folder[PATH_ROOM], socket[PATH_ROOM];
    struct device *device; // until the bridge has it
};

struct saved {
    int64_t step;         // of the last checkpoint; -1: none
    int64_t interim_step; // the same, where the next one is to replace it; -1: it is not
    int64_t ns;           // clock_now_ns() of it
    bool failed;          // the one after it
};

struct run {
    const struct task *task;
    const struct train_config *config;
    struct train_resolved resolved;
    const struct launch *launch;
    char folder[FOLDER_ROOM]; // "": none is kept
    int folder_lock;          // open while this process writes there; -1: none
    struct train_ranks ranks;
    struct mapped mapped; // what is trained
    struct http_client *http;
    bool made_adapter;               // on the server, by this run, which has not begun yet
    struct rollout_servers *servers; // who samples
    struct source *source;           // of samples
    int64_t server_context;          // tokens; with --rollouts
    struct own own;
    struct dataset_run *given; // of sft and dpo: its completions; NULL of train
    struct learner *learner;
    // the task
    struct dataset *data, *eval_data; // eval_data: NULL without --eval-data
    struct tokenizer *tokenizer;      // of the constraints
    struct constraints *constraints;  // that the loss is under; NULL: it is of whole distributions
    struct curriculum *curriculum;    // what the next step takes
    struct reward *reward;
    struct scoring *scoring;             // how rollouts are scored
    struct latency_model latency;        // with --latency modelled: of the steps done
    struct latency_model scored_latency; // of those scored, which may be ahead
    struct rollout_queue *queue;         // steps ordered, and not yet learned from
    int64_t ordered;                     // steps that were, those learned from among them
    json_t *gathered;                    // run_rollouts.c: of orders that a checkpoint was amid
    // the state
    struct runlog *log;
    struct stop *stop;
    json_t *start;                  // run_start.c: what the weights were at the first start
    int64_t step, total_steps;      // step: done
    uint64_t step_version;          // of the weights, after the step done
    struct saved saved;             // its last checkpoint
    json_t *line;                   // of the step done, not yet in metrics.jsonl; NULL: it is there
    bool evaluation_due;            // before the line can be written
    struct best best;               // of the evaluations
    const char *best_metric;        // of an evaluation: highest at the best
    json_t *best_of;                // what they were made of: run_checkpoint.c; NULL: not yet said
    struct entropy_state entropy;   // of the loss' bonus
    struct phase_timers phases;     // of what comes into the next line of metrics.jsonl
    double settle_s, written_bytes; // of bringing new weights to the samplers, since the last line
    int64_t num_tokens;             // learned from: each sample's completion, with its prompt
    int64_t skipped;                // updates whose gradient was not finite
    int skipped_in_a_row;           // steps
    int draft_skips_in_a_row;       // the same of the draft model
    struct spec_watch *watch;       // the servers that count drafts
    bool watching;                  // since a step of --rollout-budget was ordered or gathered
    struct divergence divergence;   // of this process's steps
    bool said_undrafted, said_memory;
};

// run_loop.c: a task's main: options, opening, the steps with evaluations and checkpoints between
// them, and the end.
int run_main(const struct task *task, const char *usage, int argc, char **argv);
enum status run_agree_to_stop(const struct run *run, bool *ret_stop); // whether any rank is to
enum status run_evaluate(struct run *run, json_t *metrics);           // task_kind.evaluate of train
bool run_out_of_patience(const struct run *run);                      // --early-stop-patience
// Sets total_steps, which an epoch's buckets may move a little where the run goes by epochs.
void run_plan_steps(struct run *run);
// Records the step's rewards in the curriculum, and in `metrics` where it is; at an epoch's end
// also writes and logs the cluster report.
enum status run_record(struct run *run, const struct rollout_step *s, json_t *metrics);

// run_open.c: config, resolved and reward are set. Attaches to the server, reads the data, prints
// the memory plan, takes the memory, takes the writer's lease, and goes on from a checkpoint where
// one is there and wanted. run_close() takes half-opened runs too; outcome: of the run, which
// the other ranks hear.
enum status run_open(struct run *run);
// The last of opening, of each command, once the weights are where it starts: the folder says what
// the run is, in place of one that is replaced, and how many steps it has is planned.
enum status run_begin(struct run *run, bool replaced, bool resumed);
void run_close(struct run *run, enum status outcome);
// bridge_become_writer(), once the server has restored what a trainer before left torn.
enum status run_become_writer(struct bridge *bridge);
// Attempts again, for five minutes at most, while that gives `restoring`, and says so once.
// ST_CANCELLED once a signal asks for an end (stop.h).
enum status run_retry(enum status restoring, enum status (*attempt)(void *), void *context);

// Once the weights are there: from now on signals ask for the end of the run (stop.h).
enum status run_catch_signals(struct run *run);
// The learner of steps of that shape, with all its memory.
enum status run_open_learner(struct run *run, const struct learner_shape *shape);

// run_open.c: ST_INVALID where a prompt with its completion is over the server's context.
enum status run_check_context(void *run); // a struct run
bool run_gives(const struct run *run);    // the data's completions, too, are held to the teacher

// run_folder.c: makes, locks and names run->folder. ret_latest: the checkpoint to go on from, ""
// where there is none. ST_INVALID where it holds a run that neither
// --resume nor --overwrite asks for; one that ended before its first step is removed. ret_replaced:
// there is one, which goes (run_remove()) once this one can begin.
enum status run_open_folder(struct run *run, bool *ret_replaced, char ret_latest[PATH_ROOM]);
enum status run_remove(const struct run *run);
// The options of a run to go on with (--resume, --run-dir) that were not given are those of its
// config.json, where it has one; says which.
enum status run_folder_options(struct option_set *set, struct train_config *config);
// config.json and run.json, once the weights are where this process starts.
enum status run_folder_describe(const struct run *run, bool resumed);

// run_start.c: brings the weights to where --start-from says that a new run starts, says what they
// were and are, and makes them the reference of the KL term.
enum status run_start(struct run *run);
// The reference of the KL divergence of a run that goes on: what it started from, or what the
// checkpoint has of one that moves. Nothing without one.
enum status run_resume_reference(struct run *run, const char *checkpoint);
// What the weights of run->role are: folder, updates since, by which run. New reference; NULL: no
// memory.
json_t *run_weights(const struct run *run);

// run_checkpoint.c: a checkpoint of the present step, unless there is one or no folder; it becomes
// the snapshot that the server restores should this process die in the middle of an update.
// interim: the next one replaces it.
enum status run_save(struct run *run, bool interim);
// A folder of it, by rank 0 with what the others give: all ranks call it.
enum status run_write_model(const struct run *run, const char *folder,
                            const struct model_folder *m);
// One of the step just done, where it is due: by --save-steps, as the last or the best, or, until
// the next one, by --save-minutes.
enum status run_save_if_due(struct run *run);
bool run_keeps(const struct run *run); // the step has a checkpoint that stays
// The last checkpoint of a run that ends by an error: of what was learned since the one before, as
// long as the weights are whole and this run's. Keeps the error `why` and its sentence.
void run_save_remains(struct run *run, enum status why);
// Reads a whole checkpoint and checks that it is of this run and model; then writes
// its weights into the shared arena and takes over its step. On failure the arena is as it was.
enum status run_resume(struct run *run, const char *folder);
// Writes a model folder's weights into the shared arena under the publish protocol; draft_folder:
// NULL where the draft stays as it is. The folders are checked before the server is asked for
// to quiesce.
enum status run_load_weights(struct run *run, const char *folder, const char *draft_folder);
// Writes the weights of the best checkpoint into the shared arena, where it is not the present one.
enum status run_serve_best(struct run *run);

// run_rollouts.c: what sampling of a step (0: the first) is asked for.
struct sampling_options run_sampling(const struct run *run, int64_t step);
// Before a step's orders, or those of an evaluation behind it, while nothing is sampled: who
// samples by copies of the weights does so by the present ones, or by those of up to
// --restart-interval steps before.
enum status run_settle(struct run *run, int64_t step, bool evaluation);
// What a checkpoint has of orders of which some groups were learned from: run_state's "orders". New
// reference; null: there are none.
json_t *run_orders(const struct run *run);
// Takes that up; NULL: there were none. ST_MISMATCH where the options would make other orders of
// it.
enum status run_resume_orders(struct run *run, const json_t *orders);
// The queue of rollouts, once the run is where it starts.
enum status run_open_rollouts(struct run *run);
// Orders the next step and those that --max-staleness allows beyond it, where they are not yet, and
// as far as the curriculum knows them before the rewards in between.
enum status run_order_steps(struct run *run);
// The next step, once it is sampled and scored; no token is older than --max-staleness updates:
// groups that are have been generated again.
enum status run_take_step(struct run *run, struct rollout_step **ret);

// run_weights.c, in every run: before what else is opened. With --sync checkpoint, and of a data
// set: run->mapped.bridge, and the models there, of weights which this process owns.
enum status run_open_own(struct run *run);
// Of runs with --lora-r: asks the server for the adapter, before this process attaches; opens what
// the server shares; sets run->mapped.base.
enum status run_make_adapter(struct run *run);
enum status run_open_adapter(struct run *run);
void run_unload_adapter(struct run *run); // that a run made which never began
enum status run_find_base(struct run *run);
// Who samples for the run: run->source.
enum status run_open_source(struct run *run);
enum status run_place_server(struct run *run); // whose files go into the run's folder

// run_learn.c: the draft model's learning rate in a step.
double run_draft_rate(const struct run *run, int64_t step);
// The updates by these samples, published; counts them. ST_INVALID where too many in a row were not
// finite.
enum status run_update(struct run *run, struct samples *samples, double lr,
                       struct update_stats *ret);
// A step's updates, by what was sampled for it.
enum status run_learn(struct run *run, struct rollout_step *s, double lr, struct update_stats *ret);

// run_metrics.c: the line of metrics.jsonl of the step just done. New reference; NULL: no memory.
// wait_s: until its rollouts were there.
json_t *run_metrics(struct run *run, const struct rollout_step *s,
                    const struct update_stats *update, double wait_s, double train_s);
double run_accuracy(const struct run *run, const struct scores *scores); // -1: no 0/1 term
// Tokens of a sample, as TRL counts them: without those that an environment wrote.
int run_length(const struct completion *sample);

// run_log.c: warnings of a learning rate that is 0, or does not come to its peak, and of data that
// is less than a step takes. Before the first step.
void run_log_course(const struct run *run);
// The progress line of the step just done, warnings of what is wrong with it, and with
// --log-level debug where its time went; every --logging-steps lines about speculative decoding,
// the draft model, the latency model. Once in a run: that samples drafted nothing.
void run_log_step(struct run *run, const struct rollout_step *s, const struct update_stats *update,
                  double wait_s, double train_s);
// rollouts/step-N.jsonl
enum status run_log_rollout(struct run *run, const struct rollout_step *s);
void run_log_end(const struct run *run); // how it ended, and what was the best

#endif
