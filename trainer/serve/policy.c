/* policy.c: learning on the served weights: attaching, publishing, gradients and steps. The main
 * thread.
 *
 * The arenas hold one set of weights each, which is live: whatever is sampled next comes from it.
 * Gradients add up over requests, in the order of their numbers, until a step. With --exact each
 * datum is a micro-batch of its own: then neither the cutting into requests nor the token budget is
 * in the order of the sums.
 *
 * The learner's memory is that of the model itself, or that of an adapter: which of them is chosen
 * by what the server has room for, and changes with what clients ask for. Adapters share it: each
 * has its own gradients, moments and residual (its optimizer), one after the other has the rest. */
#include "common/base/log.h"
#include "common/model/adapter.h"
#include "trainer/learn/learner.h"
#include "trainer/learn/step.h"
#include "trainer/run/notices.h"
#include "trainer/run/role.h"
#include "trainer/run/run.h"
#include "trainer/serve/policy_impl.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define FROZEN_ROLE "frozen" // of the bridge file, and what requests call it

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

struct sources *policy_sources(struct policy *p)
{
    return p->sources;
}

int policy_max_adapters(const struct policy *p)
{
    return server_adapters_max(p->server);
}

struct datum_limits policy_limits(const struct policy *p)
{
    const int64_t budget = p->options->learning.token_budget;
    return (struct datum_limits){
        .vocab = p->model->vocab_size,
        .longest = p->model->max_positions < budget ? p->model->max_positions : (int)budget};
}

// ---- the learner --------------------------------------------------------------------------------

static enum status plan_largest(struct policy *p)
{
    enum status st;
    struct adapter_config *config;
    json_t *json = NULL;
    json =
        json_pack("{s:i, s:s}", "r", server_adapters_max_rank(p->server), "target_modules", ".*");
    CHECK(adapter_config_from_json("--max-lora-rank", json, &config));
    st = adapter_new(config, p->weights, p->weights->dt, &p->largest);
out:
    json_decref(json);
    return st;
}

static void close_learner(struct policy *p)
{
    learner_free(p->learner);
    adapter_free(p->largest);
    p->learner = NULL;
    p->largest = NULL;
    p->selected = NULL;
}

enum status policy_use_learner(struct policy *p, bool adapters)
{
    struct learning_options learning = p->options->learning;
    const int64_t budget = learning.token_budget;
    const struct learning_shape shape = {
        .longest = policy_limits(p).longest, .tokens = budget, .seqs = budget};
    struct learner_config config;
    enum status st = ST_OK;
    if (p->learner && adapters == (p->largest != NULL)) goto out;
    close_learner(p);
    if (adapters) {
        CHECK(plan_largest(p));
        if (learning.freeze) log_info("--freeze is of full fine-tuning (rank 0) alone");
        learning.freeze = NULL; // the model is frozen as a whole
    }
    CHECK(learning_config(&learning, &shape, 1, &config));
    config.adapter = p->largest;
    config.many_adapters = adapters;
    CHECK(learner_new(bridge_device(p->bridge), p->model, p->weights, false, &config, &p->learner));
    if (adapters) log_info("memory of the largest adapter that the server holds:");
    memory_say(p->learner, "shared with the server (0 extra)", learning.freeze);
    CHECK(learner_prepare(p->learner));
    if (!adapters) optimizer_clear_grads(learner_optimizer(p->learner));
out:
    if (st != ST_OK) close_learner(p);
    return st;
}

// Before this process maps what the server shares.
static enum status open_server(struct policy *p)
{
    char path[PATH_ROOM];
    struct bridge_file *file = NULL;
    enum status st;
    CHECK(bridge_find(p->options->bridge, path, sizeof path));
    CHECK(bridge_file_read(path, &file));
    CHECK(bridge_file_check(file));
    st = server_adapters_open(file->socket, &p->server);
out:
    bridge_file_free(file);
    return st;
}

static bool is_same_folder(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

// The frozen model, where the server has one, is the model as it was: if it is of its folder.
static enum status open_sources(struct policy *p)
{
    const struct bridge_role *frozen = bridge_file_role(bridge_file_of(p->bridge), FROZEN_ROLE);
    struct control_facts f;
    control_facts(policy_control(p), &f);
    const bool is_base = f.updates == 0 && strcmp(f.origin, f.loaded) == 0;
    enum status st = sources_new(f.version, is_base, &p->sources);
    if (st != ST_OK || !frozen) return st;
    if (is_same_folder(frozen->model, f.loaded)) {
        log_info("the model as its folder has it, version 0, is sampled from the server's frozen "
                 "model once a full fine-tune has changed it");
        return sources_add_frozen(p->sources, FROZEN_ROLE);
    }
    log_info("the server's frozen model (%s) is not of the model's folder (%s): it is left alone",
             frozen->model, f.loaded);
    return ST_OK;
}

enum status policy_open(const struct policy_options *options, struct policy **ret)
{
    enum status st;
    const struct bridge_role *role;
    struct policy *p = calloc(1, sizeof *p);
    if (!p) return status_fail(ST_NO_MEMORY, "out of memory");
    p->options = options;
    CHECK(open_server(p));
    CHECK(bridge_attach(options->bridge, NULL, &p->bridge));
    CHECK(notice_roles(bridge_file_of(p->bridge), &role));
    p->folder = role->model;
    CHECK(role_open(p->bridge, role, &p->model, &p->weights));
    notice_model(p->model, 0);
    CHECK(run_become_writer(p->bridge));
    CHECK(open_sources(p));
    CHECK(policy_use_learner(p, policy_max_adapters(p) > 0));
    if (p->largest) notice_adapter(p->largest);
    *ret = p;
    p = NULL;
out:
    policy_close(p);
    return st;
}

void policy_close(struct policy *p)
{
    if (!p) return;
    policy_release_runs(p);
    close_learner(p);
    weights_free(p->weights);
    model_config_free(p->model);
    bridge_detach(p->bridge);
    server_adapters_close(p->server);
    sources_free(p->sources);
    free(p);
}

// ---- publishing ---------------------------------------------------------------------------------

struct update {
    struct policy *policy;
    const char *run;
    bool is_base;
    enum status (*write)(void *);
    void *context;
};

static enum status run_update(void *context)
{
    struct update *u = context;
    struct control *control = policy_control(u->policy);
    // Before the first byte is written: from here on nothing is taken for what it was.
    sources_update(u->policy->sources, u->run, control_version(control) + 1, u->is_base);
    return u->write(u->context);
}

enum status policy_publish(struct policy *p, const char *run, const char *restore, bool is_base,
                           enum status (*write)(void *), void *context)
{
    struct publish_times times;
    struct control_facts f;
    struct update update = {p, run, is_base, write, context};
    char role[CONTROL_ROLE_BYTES];
    enum status st = ST_OK;
    control_facts(policy_control(p), &f);
    snprintf(role, sizeof role, run[0] ? "adapter:" ADAPTER_PREFIX "%.40s" : "policy", run);
    control_set_role(policy_control(p), role);
    if (run[0]) control_set_run(policy_control(p), run);
    if (strcmp(f.snapshot, restore) != 0) CHECK(control_set_snapshot(policy_control(p), restore));
    st = bridge_publish(p->bridge, (int64_t)(p->options->quiesce_timeout * 1e3), run_update,
                        &update, &times);
out:
    return status_context(st, "publishing");
}

// ---- learning -----------------------------------------------------------------------------------

struct optimizer *policy_optimizer(struct policy *p, const struct trainee *t)
{
    return t->adapter ? t->optimizer : learner_optimizer(p->learner);
}

// The datums as the learner takes them: the first token of each is a prompt, what follows it a
// completion, of which every token has targets of its own.
static enum status samples_of(const struct forward_backward *request, struct samples **ret)
{
    struct samples *s = NULL;
    enum status st = samples_new(request->n, 1, &s);
    if (st != ST_OK) return st;
    for (int i = 0; i < s->n; i++) {
        const struct datum *d = &request->data[i];
        struct pack_completion *c = &s->completions[i];
        s->groups[i].prompt = d->tokens;
        s->groups[i].n_prompt = 1;
        *c = (struct pack_completion){
            .ids = d->tokens + 1, .n = d->n, .targets = d->targets, .targets_each = d->each};
        for (int k = 0; k < LOSS_INPUTS; k++) c->inputs[k] = d->inputs[k];
    }
    return samples_begin(s, ret);
}

enum status policy_forward_backward(struct policy *p, const char *run,
                                    const struct forward_backward *request,
                                    struct bytes *ret_answer)
{
    const struct step step = {.loss = request->loss};
    const int each = p->options->exact ? 1 : request->n;
    struct update_stats stats = {0};
    struct samples *samples = NULL;
    struct trainee *t;
    enum status st;
    CHECK(policy_select(p, run, &t));
    CHECK(samples_of(request, &samples));
    for (int first = 0; st == ST_OK && first < request->n; first += each)
        st = learner_pass(p->learner, request->forward_only ? PASS_LOSS : PASS_GRADIENTS, samples,
                          first, each, &step, &stats);
    if (st != ST_OK && !request->forward_only) {
        optimizer_clear_grads(learner_optimizer(p->learner));
        status_context(st, "the gradients since the last step are dropped");
    }
    if (st == ST_OK)
        forward_backward_answer(request, samples->logprobs, stats.range[STAT_LOSS].sum, ret_answer);
out:
    samples_free(samples);
    return st == ST_OK ? bytes_status(ret_answer) : st;
}

struct publishing {
    struct policy *policy;
    struct trainee *trainee;
};

static enum status publish(void *context, enum status (*write)(void *), void *update,
                           struct publish_times *ret_times)
{
    struct publishing *to = context;
    (void)ret_times;
    policy_keep(to->policy, to->trainee);
    return policy_publish(to->policy, trainee_source(to->trainee), to->trainee->restore, false,
                          write, update);
}

enum status policy_optim_step(struct policy *p, const char *run, double lr,
                              const struct optimizer_config *adamw, double *ret_norm)
{
    struct trainee *t;
    struct update_stats stats = {0};
    enum status st = policy_select(p, run, &t);
    if (st != ST_OK) return st;
    struct publishing to = {p, t};
    const struct step step = {.lr = lr, .publish = {publish, &to}};
    optimizer_configure(policy_optimizer(p, t), adamw);
    CHECK(learner_step(p->learner, NULL, 0, 0, &step, &stats));
    if (stats.skipped) {
        st = ST_INVALID; // the sentence is there
        goto out;
    }
    *ret_norm = stats.grad_norm;
    t->steps++;
    t->unsaved = true;
out:
    optimizer_clear_grads(learner_optimizer(p->learner));
    return status_context(st, "optim_step");
}
