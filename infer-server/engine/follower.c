/* follower.c: see engine.h. Owns a device, one shared arena and one runner; what it computes is
 * what the engine on rank 0 computes at the same time (runner.c), so nothing here decides anything.
 * Here is also what makes rank 0's runner lead them. One thread. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/engine.h"
#include "common/base/log.h"
#include "common/base/process.h"
#include "infer-server/engine/executor.h"
#include "infer-server/weights/group.h"
#include "infer-server/engine/runner.h"
#include "infer-server/weights/weights_owner.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct held { // one model's shard
    struct weights *weights;
    struct shared_memory *memory; // which a trainer maps
    struct runner *runner;
    int32_t *rows; // (runner's max_rows) device
};

struct follower {
    struct device *dev;
    struct group *group;
    const char *bridge_path;
    struct model_config *configs[RUNNERS]; // NULL where there is none, but for the policy's
    enum order order;                      // that is carried out
    struct held held[RUNNERS], *now;       // of it
    struct adapters *adapters;             // NULL: none
    struct held adapter;                   // of them, which that order is of
};

static enum status open_weights(struct follower *f, const struct engine_options *o)
{
    static const char *const names[RUNNERS] = {"policy", "draft", "frozen"};
    const enum dtype dt = o->dtype < 0 ? device_default_dtype(f->dev) : (enum dtype)o->dtype;
    char name[SEGMENT_BYTES];
    enum status st = ST_OK;
    for (int i = 0; i < RUNNERS; i++) {
        struct held *h = &f->held[i];
        if (!f->configs[i]) continue;
        CHECK(weights_plan(f->configs[i], dt, &h->weights));
        segment_name(o->bridge_path, names[i], name);
        CHECK(shared_memory_create(f->dev, name, h->weights->bytes, &h->memory));
        weights_bind(h->weights, shared_memory_data(h->memory));
        h->weights->comm = group_comm(f->group);
        if (f->configs[i]->mtp) weights_share_ends(h->weights, f->held[RUNNER_POLICY].weights);
    }
out:
    return st;
}

static enum status open_all(struct follower *f, const struct engine_options *o)
{
    enum status st;
    CHECK(group_open_device(o->device, &o->who, &f->dev));
    CHECK(group_open(f->dev, o->bridge_path, &o->who, &f->group));
    CHECK(engine_load_configs(o, f->configs));
    st = open_weights(f, o);
out:
    return st;
}

// ---- runners of several ranks (runner.h) --------------------------------------------------------

enum status runner_use_group(struct runner *r, enum runner_role role, struct group *group)
{
    r->group = group;
    r->role = role;
    r->model->comm = group_comm(group);
    enum status st;
    CHECK(group_order(group, ORDER_RUNNER, role, &r->limits, sizeof r->limits));
    CHECK(group_wait(group, NULL, 0)); // an answer that came during what follows would be a failure
    CHECK(group_order(group, ORDER_SHARE, role, NULL, 0));
    st = runner_share_logits(r);
out:
    return st;
}

enum status runner_share_logits(struct runner *r)
{
    char why[300];
    const enum status st = model_share_logits(r->model, why, sizeof why);
    if (st == ST_OK && why[0])
        log_warn("logits of the ranks are gathered by NCCL, which is slower: %s", why);
    return st;
}

// ---- orders that rank 0 waits for ---------------------------------------------------------------
static enum status make_runner(struct follower *f, const struct bytes *data)
{
    struct runner_limits limits;
    const bool adapted = f->now == f->held && f->adapters;
    enum status st;
    memcpy(&limits, data->data, sizeof limits);
    CHECK(runner_new(f->dev, f->now->weights, &limits, &f->now->runner));
    f->now->runner->model->comm = group_comm(f->group);
    if (adapted) runner_use_adapters(f->now->runner, adapters_table(f->adapters));
    CHECK(device_alloc(f->dev, (size_t)limits.max_rows * sizeof *f->now->rows,
                       (void **)&f->now->rows));
    st = group_answer(f->group, ST_OK, NULL, 0);
out:
    return st;
}

static enum status share_logits(struct follower *f, const struct bytes *data)
{
    (void)data;
    return runner_share_logits(f->now->runner);
}

static enum status make_kv(struct follower *f, const struct bytes *data)
{
    int n[2]; // blocks and states
    memcpy(n, data->data, sizeof n);
    enum status st = runner_allocate_kv(f->now->runner, n[0], n[1]);
    return st == ST_OK ? group_answer(f->group, ST_OK, NULL, 0) : st;
}

static enum status load(struct follower *f, const struct bytes *data)
{
    // a folder that cannot be loaded is no end: rank 0 may know another
    return group_answer(f->group, weights_load_tensors(f->now->weights, f->dev, bytes_text(data)),
                        NULL, 0);
}

static enum status make_twin(struct follower *f, const struct bytes *data)
{
    (void)data;
    weights_quantise(f->now->weights, f->dev);
    enum status st = device_sync(f->dev);
    return st == ST_OK ? group_answer(f->group, ST_OK, NULL, 0) : st;
}

static enum status reply_segment(struct follower *f, const struct bytes *data)
{
    struct segment_info info = {.pid = getpid(),
                                .pid_start_time = (int64_t)process_start_time(getpid())};
    (void)data;
    snprintf(info.kind, sizeof info.kind, "%s", shared_memory_kind(f->dev));
    snprintf(info.handle, sizeof info.handle, "%s", shared_memory_handle(f->now->memory));
    snprintf(info.device, sizeof info.device, "%s", device_spec(f->dev));
    snprintf(info.device_uuid, sizeof info.device_uuid, "%s", device_uuid(f->dev));
    return group_answer(f->group, ST_OK, &info, sizeof info);
}

static enum status reply_canary(struct follower *f, const struct bytes *data)
{
    uint64_t word;
    (void)data;
    enum status st = arena_canary(f->dev, f->now->weights, &word);
    return st == ST_OK ? group_answer(f->group, ST_OK, &word, sizeof word) : st;
}

static enum status reply_base(struct follower *f, const struct bytes *data)
{
    uint64_t sum;
    (void)data;
    enum status st = weights_base_checksum(f->now->weights, f->dev, &sum);
    return st == ST_OK ? group_answer(f->group, ST_OK, &sum, sizeof sum) : st;
}

static enum status reply_sums(struct follower *f, const struct bytes *data)
{
    const size_t bytes = (size_t)f->now->weights->n_held * sizeof(uint64_t);
    uint64_t *sums = malloc(bytes);
    enum status st = ST_OK;
    (void)data;
    if (!sums) FAIL(ST_NO_MEMORY, "no memory for checksums");
    CHECK(arena_checksums(f->dev, f->now->weights, sums));
    st = group_answer(f->group, ST_OK, sums, bytes);
out:
    free(sums);
    return st;
}

// What cannot be done to an adapter is no end either.
static enum status change_adapters(struct follower *f, const struct bytes *data)
{
    struct adapter_change c;
    char segment[SEGMENT_BYTES];
    memcpy(&c, data->data, sizeof c);
    c.text = bytes_text(data) + sizeof c;
    segment_name(f->bridge_path, "adapter", segment);
    enum status st = c.step == ADAPTERS_NEW
                         ? adapters_new(f->dev, NULL, f->held[RUNNER_POLICY].weights, c.slot,
                                        c.max_rank, &f->adapters)
                         : adapters_change(f->adapters, &c, segment);
    if (st == ST_OK && f->held[RUNNER_POLICY].runner)
        runner_use_adapters(f->held[RUNNER_POLICY].runner, adapters_table(f->adapters));
    return group_answer(f->group, st, NULL, 0);
}

// ---- orders of a step ---------------------------------------------------------------------------
static enum status step(struct follower *f, const struct bytes *data)
{
    return runner_follow(f->now->runner, data->data, data->len);
}

static enum status copy(struct follower *f, const struct bytes *data)
{
    struct kv_copy c;
    memcpy(&c, data->data, sizeof c);
    enum status st = runner_copy(f->now->runner, &c);
    return st == ST_OK ? device_sync(f->dev) : st;
}

static enum status head(struct follower *f, const struct bytes *data)
{
    const int n = (int)(data->len / sizeof(int32_t));
    enum status st = runner_head(f->now->runner, (const int32_t *)data->data, n, f->now->rows);
    return st == ST_OK ? device_sync(f->dev) : st;
}

// What rank 0 reads, which is here too: residual streams are whole on every rank.
static enum status read_hidden(struct follower *f, const struct bytes *data)
{
    const bool of_policy = f->order == ORDER_HIDDEN;
    const struct model *policy = of_policy ? f->held[RUNNER_POLICY].runner->model : NULL;
    const int n = (int)(data->len / sizeof(int32_t));
    enum status st = runner_read_hidden(f->now->runner, policy, (const int32_t *)data->data, n);
    return st == ST_OK ? device_sync(f->dev) : st;
}

typedef enum status order_fn(struct follower *f, const struct bytes *data);
static order_fn *const orders[ORDER_END] = {
    [ORDER_LOAD] = load,           [ORDER_TWIN] = make_twin,      [ORDER_SEGMENT] = reply_segment,
    [ORDER_RUNNER] = make_runner,  [ORDER_SHARE] = share_logits,  [ORDER_KV] = make_kv,
    [ORDER_STEP] = step,           [ORDER_COPY] = copy,           [ORDER_HEAD] = head,
    [ORDER_CANARY] = reply_canary, [ORDER_SUMS] = reply_sums,     [ORDER_BASE] = reply_base,
    [ORDER_HIDDEN] = read_hidden,  [ORDER_FURTHER] = read_hidden, [ORDER_ADAPTER] = change_adapters,
};

static enum status follow(struct follower *f)
{
    struct bytes data = BYTES_INIT;
    int model = 0;
    enum status st = ST_OK;
    while (st == ST_OK && (st = group_next(f->group, &f->order, &model, &data)) == ST_OK) {
        if (f->order >= ORDER_END) break;
        f->now = model < RUNNERS ? &f->held[model] : &f->adapter;
        if (model >= RUNNERS) // whose weights are not written here
            f->adapter = (struct held){
                .weights = (struct weights *)adapters_weights(f->adapters, model - RUNNERS),
                .memory = adapters_memory(f->adapters, model - RUNNERS)};
        st = orders[f->order](f, &data);
    }
    bytes_release(&data);
    return st;
}

enum status follower_run(const struct engine_options *options)
{
    struct follower f = {.bridge_path = options->bridge_path};
    enum status st = open_all(&f, options);
    if (st == ST_OK) {
        // rank 0 ends what runs, and then its followers: what stops all of them is for it to hear
        signal(SIGTERM, SIG_IGN);
        signal(SIGINT, SIG_IGN);
        signal(SIGUSR1, SIG_IGN);
        log_info("rank %d of %d: %.1f MB of weights on %s", options->who.rank, options->who.size,
                 (double)f.held[RUNNER_POLICY].weights->bytes / 1e6, device_name(f.dev));
        st = follow(&f);
        group_end(f.group);
    }
    if (st != ST_OK && f.group) group_answer(f.group, st, NULL, 0);
    if (st != ST_OK && !f.group) group_give_up(options->bridge_path, &options->who, st);
    adapters_free(f.adapters);
    for (struct held *h = f.held; h < f.held + RUNNERS; h++) {
        if (f.dev) device_release(f.dev, h->rows);
        runner_free(h->runner);
    }
    for (int i = RUNNERS - 1; i >= 0; i--) { // a draft's ends may be the policy's
        shared_memory_free(f.held[i].memory);
        weights_free(f.held[i].weights);
        model_config_free(f.configs[i]);
    }
    group_free(f.group);
    device_free(f.dev);
    return st;
}
