/* learner.h: the computing half of training: everything between a step's packed sequences and its
 * gradients, and the optimizer that uses them. Knows nothing of rewards, server or bridge: step.h
 * drives it, for every command. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_LEARNER_H
#define TRAINER_LEARNER_H

#include "trainer/learn/optimizer.h"
#include "trainer/learn/samples.h"
#include "trainer/learn/stats.h"

struct adapter;
struct learner;
struct model_config;
struct learner_config {
    struct optimizer_config optimizer;
    const char *freeze;  // tensors that are not trained (param_range.h); NULL: none
    float lora_dropout;  // of an adapter's input, while gradients are computed
    uint64_t seed;       // of that
    struct comm *comm;   // of the ranks that train together; NULL: one
    struct comm *shards; // of those that hold the other shards of the policy; NULL: it is whole
    const struct adapter *adapter; // bound: is trained instead of the policy; NULL: none
    bool many_adapters;            // it is the largest's plan, of those of learner_use_adapter()
    float temperature;             // log-probabilities are of logits / temperature
    double router_aux_loss_coef;   // of the load-balancing loss; -1: as the model's config says
    int token_budget;              // rows of a micro-batch, at most
    int logits_chunk;              // rows whose logits exist at one time; 0: by the device
    int max_seqs;                  // prompts and completions of a step
    int64_t max_targets; // of a step; 0: as many as the budget and those completions may have
    bool many_parts;     // completions may be of any number of parts
    int max_context;     // longest prompt with its completion
    int recompute;       // enum recompute: of activations, the draft model's too
    int gradient_dtype;  // of a model in fp8 (enum gradient_dtype; ops.h, struct matmul, rounds)
    struct phase_timers *phases; // of the thread that drives it; NULL: nobody counts
    bool ranks;                  // learner_rows.ranked is wanted
    bool constrained;            // groups may have constraints
    bool is_draft; // learner_add_draft()'s own: it has no batch, and shares the operations' scratch
};

// Where the device memory goes, in bytes. What is shared costs the trainer nothing.
struct memory_plan {
    size_t weights_shared; // in the server's arena (or sft's own)
    size_t residual, moments, gradients;
    size_t activations; // tape
    size_t workspace;   // forward scratch, backward pass, batch, the operations' own scratch
    size_t reference;   // frozen copy for the KL term
    size_t teacher;     // a teacher's weights and scratch
    size_t draft;       // all of the above for a draft model, but its weights and what it shares
    size_t total;       // of what this process takes, from residual on
    size_t free;        // on the device before any of it was taken
};

// policy: bound. reference: frozen weights for a KL term stay beside the policy's; with an adapter
// these are the policy's own, without it. Takes no large
// memory yet: learner_info() tells what learner_prepare() will take.
enum status learner_new(struct device *dev, const struct model_config *config,
                        const struct weights *policy, bool reference,
                        const struct learner_config *options, struct learner **ret);
void learner_free(struct learner *l);
struct learner_info {            // of a learner, as it is now
    struct comm *comm;           // NULL: one rank
    struct phase_timers *phases; // NULL: nobody counts
    const struct param_ranges *trained;
    const struct weights *reference; // NULL: none, or an adapter's
    struct optimizer *optimizer;     // of its gradients; of many_adapters the present one's
    struct learner *draft;           // NULL: there is none
    int token_budget, min_shared;    // packing_new(); the latter from learner_prepare() on
    struct memory_plan memory;
    double balance_coef; // of the load-balancing loss; 0: there is none
    // This rank's part of it in the last PASS_STEP: the mean over micro-batches, weighted by their
    // rows, is the sum over ranks.
    double balance_loss;
};
const struct learner_info *learner_info(const struct learner *l);
// What was taken at most, since learner_new(): bytes to hold the plan's total against.
size_t learner_memory_taken(const struct learner *l);
// A draft model that is to answer as the policy does (Zhou et al. 2024, DistillSpec; Liu et al.
// 2024, Online Speculative Decoding): a learner of its own (learner_optimizer) whose gradients
// learner_run() computes from the policy's passes. Before learner_prepare(), which then takes its
// memory too. ST_MISMATCH where the draft's vocabulary is larger than the policy's. The policy's
// learner owns it.
struct learner_draft_config {
    struct optimizer_config optimizer;
    float loss_weight;
    int depths; // of a layer that predicts further tokens: 2, also of what follows its own; 0: 1
};
enum status learner_add_draft(struct learner *l, const struct model_config *config,
                              const struct weights *draft,
                              const struct learner_draft_config *options);
// A teacher, which the loss may hold the policy to (learner_rows): Hinton et al. 2015; on the
// policy's own samples Agarwal et al. 2024 (GKD). Before learner_prepare(). ST_MISMATCH where its
// vocabulary is the smaller, ST_UNSUPPORTED where it is the larger and groups have constraints, or
// where there is no adapter whose base it could be, or the device has no eight bits, ST_TOO_LONG
// where sequences may be longer than it reads.
#define TEACHER_POLICY "policy" // the policy's present weights: no memory but for scratch
#define TEACHER_BASE   "base"   // the model that the adapter is trained on: likewise
struct learner_teacher_config {
    const char *model; // borrowed: one of these, or a folder, loaded in the policy's dtype
    float beta;        // which divergence (ops.h, distill)
    enum quantization quantization; // of a folder, whose matrices then have the twin alone
    bool prompts;                   // groups may have prompts of their own for it
};
enum status learner_add_teacher(struct learner *l, const struct learner_teacher_config *teacher);
// Takes all memory, once; the reference is then a copy of the policy. ST_NO_MEMORY, with the
// figures and the option that helps most, where it does not fit.
enum status learner_prepare(struct learner *l);
// From here on that adapter, which is bound, is trained, by an optimizer of its own, which has its
// gradients; both are borrowed. Of a learner for many_adapters, after learner_prepare(); before
// anything else is done with it. ST_INVALID where its rank is over the largest's.
enum status learner_use_adapter(struct learner *l, const struct adapter *adapter,
                                struct optimizer *optimizer);
// Makes the reference, which there must be, a copy of the policy's present weights (NULL), or that
// model folder's. With an adapter nothing is to be done.
enum status learner_set_reference(struct learner *l, const char *folder);

// Moves it: alpha x the policy's present weights + (1 - alpha) x its own (TR-DPO, Gorbatovski et
// al. 2024), computed in f32 and rounded once. Waits.
enum status learner_mix_reference(struct learner *l, double alpha);

// What the passes over one micro-batch gave, for its targets in the order of mb->first.
struct learner_rows {
    const struct micro_batch *mb;
    const float *logprobs, *entropy;
    const float *ref_logprobs;          // NULL without a reference
    const struct token_logprob *ranked; // the targets with their ranks; NULL: not asked for
    float *dentropy;                    // for d loss / d entropy of each target; all 0
    float *ddivergence; // for d loss / d divergence from the teacher; all 0; NULL: there is none
};
// Fills d loss / d logprob of each target, and rows->dentropy where the loss has such a term.
typedef void (*learner_loss_fn)(void *context, const struct learner_rows *rows,
                                float *ret_dlogprobs);

enum pass_kind {
    PASS_NOTE, // forward, log-probabilities and loss(), which learns nothing from them (step.h)
    PASS_LOSS, // the same, with a loss
    PASS_GRADIENTS, // and backward, which adds to the gradients that are there
    PASS_STEP       // these are all of a step's: cleared first, and summed over ranks
};
// Over every micro-batch of the groups. ret_dlogprobs is given, but unused without gradients. With
// several ranks PASS_STEP is of this rank's share of the step's groups, whose gradients' sums over
// all begin while the last micro-batch's backward pass runs; optimizer_prepare() ends them. What a
// teacher adds to the loss, and its statistics, go into stats (NULL: nowhere). PASS_STEP with
// stats, in the first iteration, while the policy is what sampled them: the draft's gradients too,
// of loss_weight times the mean over all targets of KL(policy || draft), both at the learner's
// temperature, with the policy as the teacher of this very forward pass. A micro-batch with a token
// that the draft has no row for (padding of a larger vocabulary) is left out of the draft's mean.
enum status learner_run(struct learner *l, enum pass_kind kind, const struct pack_group *groups,
                        int n_groups, learner_loss_fn loss, void *context,
                        struct update_stats *stats);
// The load-balancing loss of a mixture's routers (Fedus et al. 2021, Switch Transformers), as
// transformers' load_balancing_loss_func has it: over the R rows of all layers with experts
// together, n_experts * sum over experts of (assignments / R) * (probability / R). Assignments are
// taken as given. Its coefficient: wanted, or, -1, what the model's config says. ST_INVALID where
// one is wanted and the model has no experts, ST_UNSUPPORTED where transformers has no such loss
// for its routers (sigmoids, groups of experts).
enum status balance_coef(const struct model_config *model, double wanted, double *ret);

// The plan as the user reads it, and what came of it; they log. The line before the first step:
// where every byte will go (learner_info). weights: whose they are, "shared with the server (0
// extra)". freeze: what is not trained, NULL: nothing; there is then a line before about what is.
void memory_log(const struct learner *l, const char *weights, const char *freeze);
// The line after it: what was taken, beside what was planned, and on a GPU by how much the device's
// free memory has gone down (which tells of the whole device, its other users included).
void memory_log_taken(const struct learner *l);

#endif
