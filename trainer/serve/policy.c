/* policy.c: training runs on the served weights. The main thread.
 *
 * The arena holds one set of weights, which is live: whatever is sampled next comes from it. So one
 * run trains at a time; beginning another puts the first one's weights away, and what it did not
 * save is gone, which the log says. Gradients add up over requests, in the order of their numbers,
 * until a step. With --exact each datum is a micro-batch of its own: then neither the cutting into
 * requests nor the token budget is in the order of the sums.
 *
 * What is saved last is what the server restores if this process dies while it writes. */
#include "trainer/serve/policy.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "trainer/learn/memory.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/model_folder_write.h"
#include "trainer/run/notices.h"
#include "trainer/run/role.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct policy {
    const struct policy_options *options;
    struct bridge *bridge;
    const char *folder; // the bridge file's
    struct model_config *model;
    struct weights *weights; // bound to the shared arena
    struct learner *learner;
    char *run;     // that has the policy; NULL: none yet
    int64_t steps; // of the run since it began or was loaded
    bool unsaved;  // steps
};

struct control *policy_control(struct policy *p)
{
    return bridge_control(p->bridge);
}

const char *policy_folder(const struct policy *p)
{
    return p->folder;
}

const char *policy_socket(const struct policy *p)
{
    return bridge_file_of(p->bridge)->socket;
}

const struct model_config *policy_model(const struct policy *p)
{
    return p->model;
}

struct datum_limits policy_limits(const struct policy *p)
{
    const int64_t budget = p->options->learning.token_budget;
    return (struct datum_limits){
        .vocab = p->model->vocab_size,
        .longest = p->model->max_positions < budget ? p->model->max_positions : (int)budget};
}

static enum status open_learner(struct policy *p)
{
    const struct learning_options *learning = &p->options->learning;
    const int64_t budget = learning->token_budget;
    const struct learning_shape shape = {
        .longest = policy_limits(p).longest, .tokens = budget, .seqs = budget};
    struct learner_config config;
    enum status st;
    CHECK(learning_config(learning, &shape, 1, &config));
    CHECK(learner_new(bridge_device(p->bridge), p->model, p->weights, false, &config, &p->learner));
    memory_say(p->learner, "shared with the server (0 extra)", learning->freeze);
    CHECK(learner_prepare(p->learner));
    learner_clear_gradients(p->learner);
out:
    return st;
}

enum status policy_open(const struct policy_options *options, struct policy **ret)
{
    enum status st;
    const struct bridge_role *role;
    struct policy *p = calloc(1, sizeof *p);
    if (!p) return status_fail(ST_NO_MEMORY, "out of memory");
    p->options = options;
    CHECK(bridge_attach(options->bridge, NULL, &p->bridge));
    CHECK(notice_roles(bridge_file_of(p->bridge), &role));
    p->folder = role->model;
    CHECK(role_open(p->bridge, role, &p->model, &p->weights));
    notice_router(p->model);
    CHECK(bridge_become_writer(p->bridge));
    CHECK(open_learner(p));
    *ret = p;
    p = NULL;
out:
    policy_close(p);
    return st;
}

void policy_close(struct policy *p)
{
    if (!p) return;
    if (p->unsaved)
        log_warn("%s: its last steps were not saved; they are served until the server loads other "
                 "weights",
                 p->run);
    learner_free(p->learner);
    weights_free(p->weights);
    model_config_free(p->model);
    bridge_detach(p->bridge);
    free(p->run);
    free(p);
}

enum status policy_check(const struct policy *p, const char *run)
{
    if (p->run && strcmp(p->run, run) == 0) return ST_OK;
    if (!p->run) return status_fail(ST_MISMATCH, "%s has no weights: its beginning failed", run);
    return status_fail(ST_MISMATCH,
                       "%s has the weights no more, as %s took them: one full fine-tune is trained "
                       "at a time; go on from one of its checkpoints (load_weights)",
                       run, p->run);
}

// ---- loading ------------------------------------------------------------------------------------

struct load {
    struct policy *policy;
    const char *folder;
};

static enum status load_weights(void *context)
{
    struct load *l = context;
    struct policy *p = l->policy;
    control_set_origin(policy_control(p), l->folder);
    return weights_load(p->weights, bridge_device(p->bridge), l->folder);
}

static enum status publish(struct policy *p, enum status (*update)(void *), void *context)
{
    struct publish_times times;
    enum status st = bridge_publish(p->bridge, (int64_t)(p->options->quiesce_timeout * 1e3), update,
                                    context, &times);
    return status_context(st, "publishing");
}

// The weights of a folder, unless they are there already.
static enum status take_folder(struct policy *p, const char *folder)
{
    struct control_facts f;
    struct load load = {p, folder};
    enum status st;
    control_facts(policy_control(p), &f);
    if (f.updates == 0 && strcmp(f.origin, folder) == 0) return ST_OK;
    CHECK(weights_check(p->weights, folder));
    // First, so that a death in the middle of this very update is repaired from it as well.
    CHECK(control_set_snapshot(policy_control(p), folder));
    st = publish(p, load_weights, &load);
out:
    return st;
}

static enum status load_optimizer(struct policy *p, const char *folder)
{
    struct checkpoint c = {0};
    enum status st;
    CHECK(checkpoint_read(folder, &c));
    st = checkpoint_load_optimizer(folder, &c, learner_optimizer(p->learner));
out:
    json_decref(c.state);
    return st;
}

static enum status load(struct policy *p, const char *folder, bool with_optimizer)
{
    enum status st;
    CHECK(take_folder(p, folder));
    CHECK(optimizer_reset(learner_optimizer(p->learner)));
    if (with_optimizer) CHECK(load_optimizer(p, folder));
    p->steps = 0;
    p->unsaved = false;
out:
    return st;
}

enum status policy_load(struct policy *p, const char *run, const char *folder, bool with_optimizer)
{
    enum status st = policy_check(p, run);
    return st == ST_OK ? load(p, folder, with_optimizer) : st;
}

// The folder that the server loaded, with all links followed, as the control page has it.
static enum status base_folder(struct policy *p, char ret[PATH_ROOM])
{
    struct control_facts f;
    control_facts(policy_control(p), &f);
    if (f.loaded[0] != '/')
        return status_fail(ST_INVALID, "the server loaded no folder (%s) to start a run from",
                           f.loaded);
    snprintf(ret, PATH_ROOM, "%s", f.loaded);
    return ST_OK;
}

enum status policy_begin(struct policy *p, const char *run, const char *folder, bool with_optimizer)
{
    char base[PATH_ROOM];
    enum status st = ST_OK;
    char *name = strdup(run);
    if (!name) return status_fail(ST_NO_MEMORY, "out of memory");
    if (p->run)
        log_line(p->unsaved ? LOG_WARN : LOG_INFO,
                 "%s takes the weights from %s, after %" PRId64 " steps%s", run, p->run, p->steps,
                 p->unsaved ? ", the last not saved" : "");
    if (!folder) CHECK(base_folder(p, base));
    free(p->run);
    p->run = NULL; // also where what follows fails in the middle
    CHECK(load(p, folder ? folder : base, with_optimizer));
    control_set_run(policy_control(p), run);
    p->run = name;
    name = NULL;
    log_info("%s trains from %s", run, folder ? folder : base);
out:
    free(name);
    return st;
}

// ---- learning -----------------------------------------------------------------------------------

struct pass { // over a request's datums
    const struct forward_backward *request;
    int first;        // datum that the learner calls its first
    float **logprobs; // of each datum
    double loss;
};

static void losses(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    struct pass *pass = context;
    for (int s = 0; s < rows->mb->n_seqs; s++) {
        const int i = pass->first + rows->mb->sample[s], at = rows->mb->first[s],
                  n = rows->mb->first[s + 1] - at;
        const struct datum *d = &pass->request->data[i];
        const float *inputs[TOKEN_INPUTS];
        for (int k = 0; k < TOKEN_INPUTS; k++) inputs[k] = d->inputs[k];
        memcpy(pass->logprobs[i], rows->logprobs + at, (size_t)n * sizeof(float));
        pass->loss += token_loss_compute(&pass->request->loss, n, rows->logprobs + at, inputs,
                                         ret_dlogprobs + at);
    }
}

// A datum as the learner takes it: its first token is a prompt, what follows it a completion, of
// which every token has targets of its own.
static void place(const struct datum *d, struct pack_completion *ret_completion,
                  struct pack_group *ret_group)
{
    *ret_completion = (struct pack_completion){
        .ids = d->tokens + 1, .n = d->n, .targets = d->targets, .targets_each = d->each};
    *ret_group = (struct pack_group){
        .prompt = d->tokens, .n_prompt = 1, .completions = ret_completion, .n = 1};
}

static enum status run_pass(struct policy *p, const struct pack_group *groups, struct pass *pass)
{
    const struct forward_backward *request = pass->request;
    enum status (*go)(struct learner *, const struct pack_group *, int, learner_loss_fn, void *) =
        request->forward_only ? learner_evaluate : learner_add_gradients;
    enum status st = ST_OK;
    if (!p->options->exact) return go(p->learner, groups, request->n, losses, pass);
    for (pass->first = 0; st == ST_OK && pass->first < request->n; pass->first++)
        st = go(p->learner, &groups[pass->first], 1, losses, pass);
    return st;
}

enum status policy_forward_backward(struct policy *p, const char *run,
                                    const struct forward_backward *request,
                                    struct bytes *ret_answer)
{
    const size_t n = (size_t)request->n;
    struct pass pass = {.request = request, .logprobs = calloc(n, sizeof *pass.logprobs)};
    struct pack_group *groups = calloc(n, sizeof *groups);
    struct pack_completion *completions = calloc(n, sizeof *completions);
    enum status st;
    CHECK(policy_check(p, run));
    if (!pass.logprobs || !groups || !completions) FAIL(ST_NO_MEMORY, "out of memory");
    for (size_t i = 0; i < n; i++) {
        const struct datum *d = &request->data[i];
        pass.logprobs[i] = malloc((size_t)d->n * (size_t)d->each * sizeof(float));
        if (!pass.logprobs[i]) FAIL(ST_NO_MEMORY, "out of memory");
        place(d, &completions[i], &groups[i]);
    }
    st = run_pass(p, groups, &pass);
    if (st != ST_OK && !request->forward_only) {
        learner_clear_gradients(p->learner);
        status_context(st, "the gradients since the last step are dropped");
    }
    if (st == ST_OK) forward_backward_answer(request, pass.logprobs, pass.loss, ret_answer);
out:
    for (size_t i = 0; pass.logprobs && i < n; i++) free(pass.logprobs[i]);
    free(pass.logprobs);
    free(completions);
    free(groups);
    return st == ST_OK ? bytes_status(ret_answer) : st;
}

struct step {
    struct learner *learner;
    double lr;
};

static enum status apply(void *context)
{
    struct step *s = context;
    return learner_apply(s->learner, s->lr);
}

enum status policy_optim_step(struct policy *p, const char *run, double lr,
                              const struct optimizer_config *adamw, double *ret_norm)
{
    struct step step = {p->learner, lr};
    enum status st = policy_check(p, run);
    if (st != ST_OK) return st;
    optimizer_configure(learner_optimizer(p->learner), adamw);
    CHECK(learner_clip(p->learner, ret_norm));
    CHECK(publish(p, apply, &step));
    p->steps++;
    p->unsaved = true;
out:
    learner_clear_gradients(p->learner);
    return status_context(st, "optim_step");
}

enum status policy_save(struct policy *p, const char *run, const char *folder, bool with_optimizer)
{
    const struct checkpoint_model model = {p->weights, learner_optimizer(p->learner), p->folder,
                                           NULL};
    const struct checkpoint c = {.step = optimizer_steps(model.optimizer)};
    enum status st;
    CHECK(policy_check(p, run));
    if (!with_optimizer)
        return model_folder_write(folder, bridge_device(p->bridge), p->weights, p->weights->dt,
                                  p->folder, NULL, NULL);
    CHECK(checkpoint_write_folder(folder, &c, bridge_device(p->bridge), &model));
    // What the server restores should this process die in the middle of an update.
    CHECK(control_set_snapshot(policy_control(p), folder));
    p->unsaved = false;
out:
    return st;
}
