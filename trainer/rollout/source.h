/* source.h: where the samples of a step come from. Whichever it is, it is one struct of four
 * functions, and nothing above asks which:
 *   servers      the server that shares the weights which learn, and servers that hold copies of
 *                them, beside such a one or without (servers.c)
 *   environment  child processes, which ask the servers of another source turn by turn
 *                (environment.c)
 *   external     Atropos' API server, for which environments of its own sample (atropos.c)
 * What stands above stands there once: which prompts come next, how old weights may be, the
 * journal, trying again, filtering, and what a step's line of metrics.jsonl says. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_SOURCE_H
#define TRAINER_SOURCE_H

#include "common/base/file.h"
#include "trainer/rollout/trajectory.h"
#include "trainer/rollout/scoring.h"
#include "trainer/rollout/spec_counters.h"

struct bridge_role;
struct server_process;

#define SOURCE_COUNTS 48 // two of each further server, and an environment's

// What a source counted for a step, as metrics.
struct source_counts {
    int n;
    struct source_count {
        char key[40];
        double sum, of; // the metric is sum / of, of all ranks; of 0: the sum
    } items[SOURCE_COUNTS];
};
// The count of that key, which is new where it is not there. On all ranks the same, in one order.
struct source_count *source_count(struct source_counts *counts, const char *key, ...)
    __attribute__((format(printf, 2, 3)));
// Those of all ranks.
enum status source_counts_sum(struct source_counts *counts, struct comm *comm);

enum rollout_state { ROLLOUT_ORDERED, ROLLOUT_BEING_SAMPLED, ROLLOUT_SAMPLED, ROLLOUT_SCORED };

struct rollout_step { // an order of samples, and what came of it
    // ordered
    int64_t step;     // done before it
    const char *data; // path of the data set, for errors
    int first_group;  // number of its first group among all that the step samples
    bool evaluation;  // by the present weights; of no step
    bool ahead;       // others may be under way at the same time: it has an HTTP client of its own
    struct sampling_options sampling;
    struct rollout *rollout; // its examples; the completions are the source's
    struct journal *journal; // of the calls that environments make; NULL: they are not kept
    int n_again;             // groups whose completions were too old, and are generated again
    int n_carried;           // groups that were ordered for a step before: rollout_queue_gather()
    // filled by the source
    bool scored;                 // with the samples came their scores
    bool again;                  // poll() failed, and may succeed after settle()
    struct rollout_servers via;  // who is asked
    struct http_client *http;    // its own; NULL: none
    struct source *puller;       // whose pull() makes the samples; NULL: rollout_pull()
    struct source_counts counts; // of this order and those before it that counts were taken over of
    // filled by the work
    struct spec_counters spec; // what was drafted meanwhile
    struct scores scores;
    struct latency_model latency; // as it is with these completions
    struct {
        int drawn, flat;   // groups beyond the step's own; of the step's in the end, those that
                           // teach nothing
        double reward_sum; // of all that was drawn
        int n_rewards;
    } filter;         // with --filter-groups
    double kl;        // with --kl-reward-coef, while it is learned from: mean over samples
    double *logprobs; // (n_tokens) the trainer's; NULL without --log-logprobs
    double score_s;   // of scoring, without samples that were drawn meanwhile
    // the queue's
    enum rollout_state state;
    struct status_kept result; // of the work on it
    double idle_s;             // in which nothing was sampled, before it was
};
void rollout_step_free(struct rollout_step *step);

// One that stands on another (an environment, or Atropos, on the servers that they ask) leaves
// order(), poll() and settle() to it, and has a pull() instead.
struct source {
    // Makes ready to sample all groups of the order that are this rank's and have no completions.
    // From any thread, and of several at once where they are `ahead`.
    enum status (*order)(struct source *source, struct rollout_step *step);
    // Waits for its samples, and ends the order, also where it fails.
    enum status (*poll)(struct source *source, struct rollout_step *step);
    // Nothing being sampled: has whoever samples by copies of the weights sample by those of
    // `version`, which are the present ones; 0: those that are down by these, and others as they
    // do. evaluation: where a copy answers evaluations, which one is to come. On all ranks.
    // NULL: nothing is to be done.
    enum status (*settle)(struct source *source, uint64_t version, bool evaluation);
    void (*close)(struct source *source); // NULL: free() does; source_close() those it stands on
    // Makes the samples, in place of rollout_pull(), of what the servers below give.
    enum status (*pull)(struct source *source, struct rollout_step *step);
    struct source *on;
    bool own_prompts; // it takes prompts of its own: there is no data set, and no epoch; its pull
                      // is of no evaluation
};
enum status source_sample(struct source *source, struct rollout_step *step); // order() and poll()
struct source *source_that_settles(struct source *source); // of these; NULL: none has to
void source_close(struct source *source);                  // NULL is fine

// ---- the sources --------------------------------------------------------------------------------

// Servers that sample: one that shares the weights that learn, alone or with others that hold
// copies and are brought new ones between steps (--workers); and with --sync checkpoint, where none
// shares them, one that is started anew on them, or one elsewhere (--server-url). All zero: the
// first, which never settles.
struct copies_options { // borrowed
    // Further servers: bridge files and http://HOST:PORT, with commas between them; before them one
    // that evaluations go to. NULL, "": none.
    const char *workers, *server_url;
    const char *api_key_file; // that they are shown; NULL: none
    int rank, n_ranks;        // each of several ranks asks every n_ranks-th of them
    const char *shared;       // the server that shares the weights, which is none of them; or NULL
    // what they must serve
    const struct bridge_role *policy;
    int64_t n_parameters; // of all its shards
    const char *model_folder;
    // The server that is started, by each rank; NULL: none is.
    struct server_process *server;
    const char *socket; // of it, if it takes adapters there
    bool completions;   // it has no POST /v1/rollouts
    // What they load: rank 0 writes it, and all ranks come to this. ret_folder: absolute.
    enum status (*write)(void *context, char ret_folder[PATH_ROOM]);
    // The server that is started serves for the first time.
    enum status (*started)(void *context);
    void *context;
    const char *adapter; // of that name, and of model_folder, is what is written; NULL: a model
    const char *draft; // folder in what is written, of a draft model that is trained; NULL: none is
    const char *other_draft; // of the server that is started, where none is
};
// Copies are added to these servers, which are borrowed; all must be there, or the error names one.
enum status servers_new(const struct copies_options *options, struct rollout_servers *servers,
                        struct source **ret);

// Child processes (--rollouts command:PROGRAM) that make trajectories, turn by turn, out of
// examples and of what the policy samples for them (docs/use/environments.md has the lines): in
// place of one completion of each prompt.
//
// A sample that is being made is an episode. Processes take one at a time, or as many as they say.
// One that ends, is silent for too long or writes what is no line of the protocol is started again,
// and its episodes are given out again, each at most three times. Any thread may pull; of several
// at once one does and the others wait.
#define ENVIRONMENT_MAX_PROCESSES 256
struct environment_options {
    const char *line; // a program, with words and quotes as a shell takes them; borrowed
    int n;            // processes
    double timeout_s; // in which one must write
    int max_tokens;   // of a trajectory
};
// The source whose samples are the trajectories of n processes that are started, and which another
// source samples the turns of. The calling thread must outlive the processes. ST_PEER_GONE
// where one ends at once, which says how. A failure of the server, of the journal, or of an
// episode's third attempt is poll()'s, and names the line of the data set and the sample.
enum status environment_new(const struct environment_options *options, struct source *turns,
                            struct source **ret);

// Batches of what Atropos' environments sampled and scored (docs/use/atropos.md). Rank 0 polls;
// each rank has the whole batch. The main thread.
struct atropos_bounds {
    int vocab_size;
    int max_tokens;      // of a sequence
    double temperature;  // of the loss: sequences of another one are refused
    bool needs_logprobs; // of the sampler: for truncated importance sampling
    enum advantage_scale scale;
};

struct atropos_options { // borrowed
    const char *url;     // of the API server
    struct atropos_bounds bounds;
    int64_t batch_size;          // sequences
    const _Atomic bool *stopped; // poll() is ST_CANCELLED once it is set
    // of the registration
    const char *run_folder;
    int64_t save_steps, step, total_steps;
};
// Registers. Evaluations go to `servers`, which ask `via`.
enum status atropos_new(const struct atropos_options *options, const struct rollout_servers *via,
                        struct source *servers, struct source **ret);
// A batch as a rollout with its scores, every number checked before it is
// believed. A group (atroposlib's ScoredData) has a list entry a sequence: "tokens", prompt and
// completion in one; "masks", -100 where a token is not trained, else the token; "scores".
// docs/use/atropos.md tells what else is read, and what is refused. batch: the list of groups. Each
// sequence's prompt is what comes before its first trained token. Where groups are of one size and
// their sequences of one prompt, each is one of the rollout's; else each sequence is a group of its
// own, and the advantages are of the environments' groups all the same. `where` names the batch in
// errors, which name the group, the sequence and the field.
enum status atropos_read_batch(const char *where, const json_t *batch,
                               const struct atropos_bounds *bounds, struct rollout **ret_rollout,
                               struct scores *ret_scores);

#endif
