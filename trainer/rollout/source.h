/* source.h: where the samples of a step come from. Whichever it is, it is one struct of four
 * functions, and nothing above asks which:
 *   served       the server that shares the weights which learn, and others beside it (served.c)
 *   copies       servers that hold copies of them, beside such a one or without (copies.c)
 *   environment  child processes, which ask the servers of another source turn by turn
 *                (environment.c)
 *   external     Atropos' API server, for which environments of its own sample (atropos.c)
 * What stands above stands there once: which prompts come next, how old weights may be, the
 * journal, trying again, filtering, and what a step's line of metrics.jsonl says. */
#ifndef TRAINER_SOURCE_H
#define TRAINER_SOURCE_H

#include "trainer/rollout/journal.h"
#include "trainer/rollout/scoring.h"
#include "trainer/rollout/spec_counters.h"

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
    // filled by the source
    bool scored;                // with the samples came their scores
    bool again;                 // poll() failed, and may succeed after settle()
    struct rollout_servers via; // who is asked
    struct http_client *http;   // its own; NULL: none
    // Makes the samples of what these servers give; NULL: rollout_pull().
    enum status (*pull)(void *context, struct rollout_step *step);
    void *pull_context;
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
    enum status status; // of the work on it
    char *sentence;     // of its failure
    double idle_s;      // in which nothing was sampled, before it was
};
void rollout_step_free(struct rollout_step *step);

struct source {
    // Makes ready to sample all groups of the order that are this rank's and have no completions.
    // From any thread, and of several at once where they are `ahead`.
    enum status (*order)(struct source *source, struct rollout_step *step);
    // Waits for its samples, and ends the order, also where it fails.
    enum status (*poll)(struct source *source, struct rollout_step *step);
    // Nothing being sampled: has whoever samples by copies of the weights sample by those of
    // `version`, which are the present ones; 0: those that are down by these, and others as they
    // do. evaluation: where a copy answers evaluations, which one is to come. On all ranks.
    enum status (*settle)(struct source *source, uint64_t version, bool evaluation);
    void (*close)(struct source *source); // frees it
    bool settles;                         // settle() does something
    bool own_prompts; // it takes prompts of its own: there is no data set, and no epoch
};
enum status source_sample(struct source *source, struct rollout_step *step); // order() and poll()
void source_close(struct source *source);                                    // NULL is fine

// The source that asks these servers, borrowed, and never settles.
enum status served_new(const struct rollout_servers *servers, struct source **ret);
// Its order() and poll(), for a source that does something besides.
enum status served_order(const struct rollout_servers *servers, struct rollout_step *step);
enum status served_poll(struct rollout_step *step);

#endif
