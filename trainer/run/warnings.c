/* warnings.c: log lines of cw-trainer's commands. No state. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/warnings.h"
#include "common/model/adapter.h"
#include "common/base/bytes.h"
#include "common/base/log.h"
#include "trainer/data/data.h"

#include <inttypes.h>
#include <string.h>

void warn_idle(const struct option_set *set, const void *config)
{
    struct bytes sentences = BYTES_INIT;
    options_list_idle(set, config, &sentences);
    size_t len;
    for (const char *line = bytes_text(&sentences); *line; line += len + 1) {
        len = strcspn(line, "\n");
        log_warn("%.*s", (int)len, line);
    }
    bytes_release(&sentences);
}

void warn_model(const struct model_config *model, double balance_coef)
{
    const int experts = config_experts(model);
    if (experts > 0 && balance_coef > 0)
        log_info("the model is a mixture of %d experts: the load-balancing loss of its routers is "
                 "part of what is trained, with a coefficient of %g (--router-aux-loss-coef)",
                 experts, balance_coef);
    else if (experts > 0)
        log_warn("the model is a mixture of %d experts: a load-balancing loss of its routers is no "
                 "part of what is trained, and they may come to favour few experts",
                 experts);
    if (stored_form_notes[model->stored])
        log_info("the model's folder: %s", stored_form_notes[model->stored]);
}

void warn_adapter(const struct adapter *a)
{
    const struct model_config *model = a->base->config;
    const bool plain_mlp = adapter_changes(a, ROLE_GATE_UP) || adapter_changes(a, ROLE_DOWN) ||
                           adapter_changes(a, ROLE_SHARED_GATE_UP) ||
                           adapter_changes(a, ROLE_SHARED_DOWN);
    bool experts = false;
    for (int l = 0; l < model->n_layers; l++) experts |= model->layers[l].moe.n_experts > 0;
    if (experts && plain_mlp)
        log_warn("the adapter changes dense or shared MLPs of a model with experts: Commonweight "
                 "takes such a folder, but PEFT on transformers 5 reads gate_proj, up_proj and "
                 "down_proj as the experts' and leaves these out; where PEFT is to open it, name "
                 "attention's matrices alone as its targets, or merge it (cw-trainer merge)");
}

enum status warn_adapter_base(const char *folder, const json_t *base, bool exact)
{
    const enum status st = adapter_base_check(folder, base);
    if (st != ST_MISMATCH || exact) return status_context(st, "--exact");
    log_warn("%s", status_message());
    return ST_OK;
}

static void warn_filtering(const struct train_config *c)
{
    struct bytes options = BYTES_INIT;
    if (c->sampling.top_k > 0) bytes_printf(&options, ", --top-k %" PRId64, c->sampling.top_k);
    if (c->sampling.top_p < 1) bytes_printf(&options, ", --top-p %g", c->sampling.top_p);
    if (c->sampling.min_p > 0) bytes_printf(&options, ", --min-p %g", c->sampling.min_p);
    const bool corrected = c->importance_sampling_correction && c->processed_logprobs;
    if (options.len && corrected)
        log_info("%s: samples come from the filtered distribution; the loss is of the whole one, "
                 "weighed by its probabilities over those that sampled (--processed-logprobs)",
                 bytes_text(&options) + 2);
    if (options.len && corrected && c->server_command)
        log_warn("--server-command: what it gives as log-probabilities is taken to be of the "
                 "filtered distribution (vLLM: --logprobs-mode processed_logprobs)");
    if (options.len && corrected && c->importance_sampling_mode + 1 >= TIS_SEQUENCE_TRUNCATE)
        log_warn("--importance-sampling-mode %s: these weights, at most 1 a token, are multiplied "
                 "over a sample, so that long ones hardly count; token_truncate weighs each token "
                 "by itself",
                 tis_mode_names[c->importance_sampling_mode + 1]);
    if (options.len && !corrected)
        log_warn("%s: samples come from the filtered distribution, but are trained on with the "
                 "log-probabilities of the whole one, before filtering: nothing corrects for it "
                 "without --importance-sampling-correction and --processed-logprobs",
                 bytes_text(&options) + 2);
    bytes_release(&options);
}

void warn_left_out(const struct dataset *data, int left_out)
{
    if (left_out)
        log_warn("%s: %d prompts are longer than --max-prompt-length and left out", data->path,
                 left_out);
}

void warn_data(const struct dataset *data, int left_out)
{
    if (data->chat_source) log_info("chat template: %s", data->chat_source);
    if (data->ignored) log_warn("%s", data->ignored);
    if (data->plain)
        log_warn("%s: prompts are texts, and go to the model as they are, though it has a chat "
                 "template: --chat puts them into it, as chat models are taught to answer "
                 "(--prompt-template none: they are meant so)",
                 data->path);
    warn_left_out(data, left_out);
}

enum status warn_roles(const struct bridge_file *file, const struct bridge_role **ret_policy)
{
    const struct bridge_role *policy = bridge_file_role(file, "policy");
    if (file->ignored[0])
        log_warn("%s: its server shares roles that are not known here, and left alone: %s",
                 file->path, file->ignored);
    if (!policy)
        return status_fail(ST_NOT_FOUND, "%s: shares no tensors of role \"policy\"", file->path);
    *ret_policy = policy;
    return ST_OK;
}

void warn_options(const struct train_config *c, const struct train_resolved *r)
{
    if (c->loss.off_policy_threshold == 0)
        log_info("--off-policy-mask-threshold 0: samples of negative advantage count while the "
                 "policy has not moved away from them; -1 would mask none");
    warn_filtering(c);
    const char *unequal = c->steps_per_generation > 1   ? "steps-per-generation"
                          : c->entropy.top_quantile < 1 ? "top-entropy-quantile"
                                                        : NULL;
    if (c->lora.r && c->lora.dropout != 0 && unequal)
        log_info("--lora-dropout %g with --%s: the importance ratio is to log-probabilities of a "
                 "pass without masks, and is not 1 in the first update%s",
                 c->lora.dropout, unequal, c->exact ? "; --exact does not compare them" : "");
    else if (c->lora.r && c->lora.dropout != 0)
        log_info("--lora-dropout %g: an update's log-probabilities are of masked inputs, the "
                 "sampler's are not: sampler_mismatch tells of that too%s",
                 c->lora.dropout, c->exact ? ", and --exact does not compare them" : "");
    if (r->async && r->steps_ahead == 0)
        log_info("--async --max-staleness %" PRId64 " with %" PRId64 " updates on each rollout: no "
                 "step is sampled ahead, which is the run without --async",
                 r->max_staleness, r->updates_per_step);
    else if (r->async)
        log_info("--async: up to %d steps are sampled ahead, by weights of up to %" PRId64
                 " updates before those that learn from them (metric rollout/staleness_max)",
                 r->steps_ahead, (r->steps_ahead + r->steps_carried) * r->updates_per_step);
    if (r->steps_carried > 0)
        log_info("--rollout-budget %g: groups that are not whole when a step closes go on into the "
                 "next %d at most (metric rollout/carried_groups)",
                 c->rollout_budget, r->steps_carried);
    if (r->async && r->steps_ahead > 0 && !c->importance_sampling_correction)
        log_warn("--async without --importance-sampling-correction: nothing corrects for the age "
                 "of the samples");
}
