/* weights_owner.c: owns the arenas, the control page and the bridge file, in this order of birth:
 * page (version 1: nothing loaded), arenas, load (version 2), file. The engine's thread.
 *
 * The page is named after the bridge file's path. A server that was killed leaves it behind; the
 * next one on the same path finds its owner dead and replaces it. A living owner is found in the
 * same way, and refused: two servers cannot fight over one bridge file.
 *
 * The arena's name says which process made it. On the CPU a killed server leaves gigabytes in
 * /dev/shm, so each new one first removes the arenas and pages of the dead, whatever bridge they
 * were for. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/weights/weights_owner.h"
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "bridge/bridge_file.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/model/adapter.h"
#include "kernels/ops.h"
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

static const char *const role_names[WEIGHTS_ROLES] = {"policy", "draft", "frozen"};

struct arena {
    struct weights_source source;
    char reloaded[PATH_MAX]; // folder of the last reload; "": none
    char layout_hash[65];
    struct weights *weights; // NULL: there is no such role
    struct shared_memory *memory;
};
struct weights_owner {
    struct device *dev;
    struct group *group; // NULL: one rank
    char bridge_path[512], path_hash[17], page_name[64];
    struct arena arenas[WEIGHTS_ROLES];
    struct control *control;
    struct adapters *adapters;           // NULL: none
    json_t *base;                        // adapter_base(); NULL: nobody has asked yet
    uint64_t base_version, base_updates; // control_info.policy_version, updates of its sum
    char *socket_path;                   // NULL: not announced yet
    bool inference_only;                 // the bridge file says so
};

#define NO_FOLDER    "(random weights)"
#define FOLLOWERS_MS 10000 // of other shards' trainers to end, once that of rank 0 is gone

// ---- of any rank's arena -----------------------------------------------------------------------

void segment_name(const char *bridge_path, const char *role, char ret[SEGMENT_BYTES])
{
    char path_hash[17];
    hash_sha256_hex(bridge_path, strlen(bridge_path), 8, path_hash);
    snprintf(ret, SEGMENT_BYTES, "/commonweight-%s-%" PRIu64 ".%d.%" PRIu64 "-%s", path_hash,
             process_namespace(), (int)getpid(), process_start_time(getpid()), role);
}

enum status arena_canary(struct device *dev, const struct weights *w, uint64_t *ret_word)
{
    char *canary = (char *)w->base + w->canary_offset;
    uint64_t word = 0;
    device_copy_out(dev, &word, canary, sizeof word);
    enum status st = device_sync(dev);
    if (st != ST_OK) return st;
    const uint64_t complement = ~word;
    device_copy_in(dev, canary + sizeof word, &complement, sizeof complement);
    st = device_sync(dev);
    if (st == ST_OK) *ret_word = word;
    return st;
}

enum status arena_checksums(struct device *dev, const struct weights *w, uint64_t *sums)
{
    const size_t n = (size_t)w->n_held;
    uint64_t *ranges = malloc(2 * n * sizeof *ranges), *to = ranges; // offsets, then lengths
    if (!ranges) return status_fail(ST_NO_MEMORY, "no memory for %zu checksums", n);
    for (const struct weight_tensor *t = w->tensors; t < w->tensors + w->n_tensors; t++) {
        const struct weight_place place = weights_place(w, t);
        if (t->n == 0) continue;
        *to = place.offset;
        to++[n] = place.bytes;
    }
    device_ops(dev)->checksum(dev, sums, w->base, ranges, ranges + n, w->n_held);
    free(ranges);
    return device_sync(dev);
}

// ---- what the dead left ------------------------------------------------------------------------

// Path hash; then for an arena what segment_name() writes (the page holds its owner's).
#define ARENA_READ "commonweight-%16[0-9a-f]-%" SCNu64 ".%d.%" SCNu64 "-%7[a-z]%n" // and a number
#define PAGE_WRITE "/commonweight-%s-control"
#define PAGE_READ  "commonweight-%16[0-9a-f]-control%n"

// Its maker holds a lock on it (kernels/cpu/shared.c). A pid means something only within one
// namespace, and /dev/shm may be shared by several; within it, builds before the lock are told by
// it.
static bool sweep_arena(const char *name)
{
    char hash[17], role[8];
    uint64_t namespace, start;
    int pid, end = 0;
    if (sscanf(name, "/" ARENA_READ, hash, &namespace, &pid, &start, role, &end) != 5 || end <= 0 ||
        name[end + (int)strspn(name + end, "0123456789")])
        return false;
    int fd = shm_open(name, O_RDWR | O_CLOEXEC, 0);
    if (fd < 0) return false;
    bool lives = flock(fd, LOCK_EX | LOCK_NB) != 0 ||
                 (namespace == process_namespace() && process_alive(pid, start));
    bool removed = !lives && shm_unlink(name) == 0;
    close(fd);
    return removed;
}

// A page, or one that its maker did not live to name (control_page.c).
static bool is_page(const char *name)
{
    char hash[17];
    int end = 0;
    if (sscanf(name, "/" PAGE_READ, hash, &end) != 1 || end <= 0) return false;
    const char *remaining = name + end;
    return !remaining[0] || (remaining[0] == '.' && remaining[1] &&
                             !remaining[1 + strspn(remaining + 1, "0123456789")]);
}

static void sweep_dead_segments(void)
{
    DIR *dir = opendir("/dev/shm");
    const struct dirent *entry;
    while (dir && (entry = readdir(dir))) {
        char name[NAME_MAX + 2];
        snprintf(name, sizeof name, "/%s", entry->d_name);
        if (is_page(name) ? control_sweep(name) : sweep_arena(name))
            log_info("removed %s, which a killed server left", name);
    }
    if (dir) closedir(dir);
}

// What came of an order here, and at the followers, whose answers are read in either case.
static enum status and_others(struct weights_owner *o, enum status here, void *answers,
                              size_t bytes)
{
    struct status_kept kept;
    status_keep(&kept, here);
    const enum status others = group_wait(o->group, answers, bytes);
    return here == ST_OK ? others : status_recall(&kept);
}

// All shards of it; once each has loaded its own they make the twin together.
static enum status load_shards(struct weights_owner *o, enum weights_role role, const char *folder)
{
    struct weights *w = o->arenas[role].weights;
    enum status st;
    CHECK(group_order(o->group, ORDER_LOAD, role, folder, strlen(folder)));
    CHECK(and_others(o, weights_load_tensors(w, o->dev, folder), NULL, 0));
    if (!w->twin) goto out;
    CHECK(group_order(o->group, ORDER_TWIN, role, NULL, 0));
    weights_quantise(w, o->dev);
    st = and_others(o, device_sync(o->dev), NULL, 0);
out:
    return st;
}

static enum status arena_load(struct weights_owner *o, enum weights_role role, const char *folder)
{
    struct weights *w = o->arenas[role].weights;
    enum status st =
        folder ? load_shards(o, role, folder) : weights_init_random(w, o->dev, 1 + (uint64_t)role);
    return role == WEIGHTS_POLICY ? st : status_context(st, "the %s model", role_names[role]);
}

static enum status arena_new(struct weights_owner *o, enum weights_role role)
{
    struct arena *a = &o->arenas[role];
    char name[SEGMENT_BYTES];
    segment_name(o->bridge_path, role_names[role], name);
    enum status st = shared_memory_create(o->dev, name, a->weights->bytes, &a->memory);
    if (st != ST_OK) return st;
    weights_bind(a->weights, shared_memory_data(a->memory));
    a->weights->comm = group_comm(o->group);
    return arena_load(o, role, a->source.folder);
}

enum status weights_owner_new(struct device *dev, struct group *group,
                              const struct weights_source sources[WEIGHTS_ROLES], enum dtype dt,
                              bool inference_only, const char *bridge_path,
                              struct weights_owner **ret)
{
    enum status st = ST_OK;
    struct weights_owner *o = calloc(1, sizeof *o);
    if (!o) return status_fail(ST_NO_MEMORY, "no memory for the owner of the weights");
    o->dev = dev;
    o->group = group;
    o->inference_only = inference_only;
    CHECK(status_context(path_absolute(bridge_path, o->bridge_path, sizeof o->bridge_path),
                         "--bridge"));
    hash_sha256_hex(o->bridge_path, strlen(o->bridge_path), 8, o->path_hash);
    snprintf(o->page_name, sizeof o->page_name, PAGE_WRITE, o->path_hash);
    for (int i = 0; i < WEIGHTS_ROLES; i++) {
        struct arena *a = &o->arenas[i];
        a->source = sources[i];
        if (!a->source.config) continue;
        CHECK(weights_plan(a->source.config, dt, &a->weights));
        weights_layout_hash(a->weights, a->layout_hash);
    }
    CHECK(control_create(o->page_name, o->arenas[WEIGHTS_POLICY].layout_hash, &o->control));
    sweep_dead_segments();
    for (int i = 0; i < WEIGHTS_ROLES; i++)
        if (o->arenas[i].weights) CHECK(arena_new(o, (enum weights_role)i));
    struct weights *draft = o->arenas[WEIGHTS_DRAFT].weights;
    if (draft && draft->config->mtp) weights_share_ends(draft, o->arenas[WEIGHTS_POLICY].weights);
    const char *from = sources[WEIGHTS_POLICY].folder;
    control_owner_loaded(o->control, role_names[WEIGHTS_POLICY], from ? from : NO_FOLDER, true);
    control_owner_update_end(o->control);
    *ret = o;
    return ST_OK;
out:
    weights_owner_free(o);
    return st;
}

// Which part of the Hugging Face tensor it is, where there are several ranks.
static void describe_slice(const struct weight_tensor *t, struct bridge_slice *ret)
{
    ret->n_runs = t->slice.n_runs;
    ret->first_column = t->slice.first_col;
    for (int d = 0; d < t->n_dims; d++) ret->whole[d] = t->slice.whole[d];
    for (int i = 0; i < ret->n_runs; i++) {
        ret->runs[i].first = t->slice.runs[i].first;
        ret->runs[i].n = t->slice.runs[i].n;
    }
}

// Takes memory for the tensors, which the caller frees. folder: NULL or "" where it is of none.
static enum status describe_arena(const struct weights_owner *o, const struct weights *w,
                                  const char *folder, const char *handle, struct bridge_role *ret)
{
    struct bridge_role role = {.bytes = w->bytes,
                               .canary_offset = w->canary_offset,
                               .dt = w->dt,
                               .n_parameters = w->n_parameters,
                               .rope_context = w->config->rope_context,
                               .quantization = w->config->quantization,
                               .inference_only = o->inference_only,
                               .kv_cache = w->config->kv_cache,
                               .n_tensors = w->n_held};
    enum status st = ST_OK;
    if (folder && folder[0])
        st = path_absolute(folder, role.model, sizeof role.model);
    else
        snprintf(role.model, sizeof role.model, "%s", NO_FOLDER);
    if (st != ST_OK) return st;
    snprintf(role.kind, sizeof role.kind, "%s", shared_memory_kind(o->dev));
    snprintf(role.handle, sizeof role.handle, "%s", handle);
    weights_layout_hash(w, role.layout_hash);
    struct bridge_tensor *to = role.tensors = calloc((size_t)w->n_held, sizeof *role.tensors);
    if (!role.tensors) return status_fail(ST_NO_MEMORY, "no memory for the bridge file");
    for (const struct weight_tensor *t = w->tensors; t < w->tensors + w->n_tensors; t++) {
        if (t->n == 0) continue;
        snprintf(to->name, sizeof to->name, "%s", t->name);
        const struct weight_place place = weights_place(w, t);
        to->n_dims = t->n_dims;
        int64_t stride = 1;
        for (int d = t->n_dims - 1; d >= 0; d--) {
            to->shape[d] = t->shape[d] / (place.dt == DT_U8 && d == t->n_dims - 1 ? 2 : 1);
            to->stride[d] = stride;
            stride *= to->shape[d];
        }
        if (w->config->shard.size > 1) describe_slice(t, &to->slice);
        to->dt = place.dt;
        to->is_buffer = t->is_buffer;
        to->offset = place.offset;
        to->bytes = place.bytes;
        to++;
    }
    *ret = role;
    return ST_OK;
}

// The i-th arena that the bridge file lists may be: the model's, the draft's, the adapters'. NULL:
// there is none. Each of several ranks has as many.
static const struct weights *listed_arena(const struct weights_owner *o, int i)
{
    if (i < WEIGHTS_ROLES) return o->arenas[i].weights;
    const struct adapter_info *info = adapters_info(o->adapters, i - WEIGHTS_ROLES);
    return info && info->name[0] ? adapters_weights(o->adapters, i - WEIGHTS_ROLES) : NULL;
}

static int listed_arenas(const struct weights_owner *o)
{
    return WEIGHTS_ROLES + (o->adapters ? adapters_max(o->adapters) : 0);
}

// w: the i-th arena's plan, of this rank's shard or another's.
static enum status describe_role(const struct weights_owner *o, int i, const struct weights *w,
                                 const char *handle, struct bridge_role *ret)
{
    const bool adapter = i >= WEIGHTS_ROLES;
    const struct adapter_info *info =
        adapter ? adapters_info(o->adapters, i - WEIGHTS_ROLES) : NULL;
    enum status st =
        describe_arena(o, w, adapter ? info->folder : o->arenas[i].source.folder, handle, ret);
    if (st != ST_OK) return st;
    if (adapter)
        snprintf(ret->role, sizeof ret->role, "adapter:%s", info->name);
    else
        snprintf(ret->role, sizeof ret->role, "%s", w->config->mtp ? MTP_ROLE : role_names[i]);
    if (adapter && !info->folder[0]) snprintf(ret->model, sizeof ret->model, "(made by a request)");
    return ST_OK;
}

// The shard of a follower, whose plan is made once more to say where its tensors are.
static enum status describe_shard(const struct weights_owner *o, int i, int rank,
                                  const struct segment_info *info, struct bridge_role *ret)
{
    const bool adapter = i >= WEIGHTS_ROLES;
    const struct arena *first = &o->arenas[adapter ? WEIGHTS_POLICY : i];
    struct model_config config = *first->source.config; // a follower's has the same sizes
    struct weights *w = NULL;
    struct adapter *a = NULL;
    char name[SHARD_NAME];
    config.shard.rank = rank;
    enum status st = weights_plan(&config, first->weights->dt, &w);
    if (st == ST_OK && adapter) st = adapters_plan_on(o->adapters, i - WEIGHTS_ROLES, w, &a);
    if (st == ST_OK) st = describe_role(o, i, a ? a->weights : w, info->handle, ret);
    adapter_free(a);
    weights_free(w);
    if (st != ST_OK) return st;
    snprintf(name, sizeof name, "%s", ret->role);
    bridge_shard_name(name, rank, ret->role);
    snprintf(ret->kind, sizeof ret->kind, "%s", info->kind);
    ret->holder = (struct bridge_holder){.pid = (pid_t)info->pid,
                                         .pid_start_time = (uint64_t)info->pid_start_time};
    snprintf(ret->holder.device, sizeof ret->holder.device, "%s", info->device);
    snprintf(ret->holder.device_uuid, sizeof ret->holder.device_uuid, "%s", info->device_uuid);
    return ST_OK;
}

static enum status describe_shards(const struct weights_owner *o, int i, struct bridge_file *file)
{
    enum status st = ST_OK;
    const int n = group_size(o->group) - 1;
    struct segment_info *infos = calloc((size_t)n + 1, sizeof *infos);
    if (!infos) return status_fail(ST_NO_MEMORY, "no memory for the bridge file");
    CHECK(group_order(o->group, ORDER_SEGMENT, i, NULL, 0));
    CHECK(group_wait(o->group, infos, sizeof *infos));
    for (int r = 0; r < n; r++)
        CHECK(describe_shard(o, i, r + 1, &infos[r], &file->roles[file->n_roles++]));
out:
    free(infos);
    return st;
}

static enum status describe_roles(const struct weights_owner *o, struct bridge_file *file)
{
    enum status st = ST_OK;
    for (int i = 0; i < listed_arenas(o); i++) {
        const struct weights *w = listed_arena(o, i);
        if (!w) continue;
        const struct shared_memory *memory = i < WEIGHTS_ROLES
                                                 ? o->arenas[i].memory
                                                 : adapters_memory(o->adapters, i - WEIGHTS_ROLES);
        CHECK(describe_role(o, i, w, shared_memory_handle(memory), &file->roles[file->n_roles]));
        file->n_roles++;
    }
    for (int i = 0; i < listed_arenas(o); i++)
        if (o->group && listed_arena(o, i)) CHECK(describe_shards(o, i, file));
out:
    return st;
}

static enum status announce(struct weights_owner *o)
{
    enum status st = ST_OK;
    const size_t n = (size_t)(listed_arenas(o) * group_size(o->group)); // at most
    const struct model_config *policy = o->arenas[WEIGHTS_POLICY].source.config;
    struct bridge_role *roles = calloc(n, sizeof *roles);
    struct bridge_file file = {.pid = getpid(),
                               .n_roles = 0,
                               .roles = roles,
                               .tp_degree = group_size(o->group),
                               .expert_parallel = policy->expert_parallel};
    if (!roles) FAIL(ST_NO_MEMORY, "no memory for the bridge file");
    CHECK(describe_roles(o, &file));
    snprintf(file.path, sizeof file.path, "%s", o->bridge_path);
    process_boot_id(file.boot_id);
    file.pid_start_time = process_start_time(file.pid);
    snprintf(file.device_uuid, sizeof file.device_uuid, "%s", device_uuid(o->dev));
    snprintf(file.device, sizeof file.device, "%s", device_spec(o->dev));
    snprintf(file.control_page, sizeof file.control_page, "%s", o->page_name);
    CHECK(path_absolute(o->socket_path, file.socket, sizeof file.socket));
    CHECK(bridge_file_write(&file));
out:
    for (int i = 0; i < file.n_roles; i++) free(roles[i].tensors);
    free(roles);
    return st;
}

enum status weights_owner_announce(struct weights_owner *o, const char *socket_path)
{
    int left = file_sweep_temporaries(o->bridge_path);
    if (left) log_info("removed %d halves of %s, which killed servers left", left, o->bridge_path);
    o->socket_path = strdup(socket_path);
    if (!o->socket_path) return status_fail(ST_NO_MEMORY, "no memory for the bridge file");
    return announce(o);
}

// ---- adapters -----------------------------------------------------------------------------------

static enum status order_change(struct weights_owner *o, const struct adapter_change *c)
{
    struct bytes data = BYTES_INIT;
    bytes_append(&data, c, sizeof *c);
    bytes_puts(&data, c->text ? c->text : "");
    bytes_append(&data, "", 1);
    enum status st = bytes_status(&data);
    if (st == ST_OK) st = group_order(o->group, ORDER_ADAPTER, 0, data.data, data.len);
    bytes_release(&data);
    return st;
}

// On all ranks.
static enum status change_adapters(struct weights_owner *o, const struct adapter_change *c)
{
    char segment[SEGMENT_BYTES];
    segment_name(o->bridge_path, "adapter", segment);
    enum status st = order_change(o, c);
    return st == ST_OK ? and_others(o, adapters_change(o->adapters, c, segment), NULL, 0) : st;
}

enum status weights_owner_hold_adapters(struct weights_owner *o, int max_adapters, int max_rank)
{
    const struct adapter_change order = {ADAPTERS_NEW, max_adapters, max_rank, "", NULL};
    enum status st = order_change(o, &order);
    if (st == ST_OK)
        st = and_others(o,
                        adapters_new(o->dev, o->control, o->arenas[WEIGHTS_POLICY].weights,
                                     max_adapters, max_rank, &o->adapters),
                        NULL, 0);
    return status_context(st, "--max-adapters %d of --max-lora-rank %d", max_adapters, max_rank);
}

const struct adapters *weights_owner_adapters(const struct weights_owner *o)
{
    return o->adapters;
}

enum status weights_owner_add_adapter(struct weights_owner *o, const struct adapter_request *order)
{
    struct status_kept kept;
    struct adapter_change c = {.slot = -1, .step = ADAPTERS_COPY, .text = order->copy_of};
    if (order->folder) c.step = ADAPTERS_LOAD, c.text = order->folder;
    if (order->config) c.step = ADAPTERS_MAKE, c.text = order->config;
    snprintf(c.name, sizeof c.name, "%s", order->name);
    enum status st = change_adapters(o, &c);
    if (st == ST_OK) st = announce(o);
    if (st == ST_OK) return st;
    status_keep(&kept, st);
    c.step = ADAPTERS_REMOVE;
    change_adapters(o, &c);
    return status_recall(&kept);
}

// A writer's master weights are of what it wrote last.
static enum status check_no_writer(const struct weights_owner *o, const char *folder)
{
    struct control_info info;
    control_info(o->control, &info);
    if (!info.writer_alive) return ST_OK;
    return status_fail(ST_BUSY,
                       "a trainer (pid %d) is attached to these weights; stop it before they "
                       "are reloaded from %s",
                       (int)info.writer_pid, folder);
}

enum status weights_owner_retire_adapter(struct weights_owner *o, int slot, pid_t writer)
{
    struct control_info info;
    control_info(o->control, &info);
    if (info.writer_alive &&
        info.writer_pid != writer) // it has mapped whatever the bridge file lists
        return status_fail(ST_BUSY,
                           "a trainer (pid %d) is attached to this server's memory; stop it before "
                           "the adapter '%s' is unloaded",
                           (int)info.writer_pid, adapters_info(o->adapters, slot)->name);
    enum status st =
        change_adapters(o, &(struct adapter_change){ADAPTERS_RETIRE, slot, 0, "", NULL});
    return st == ST_OK ? announce(o) : st;
}

enum status weights_owner_remove_adapter(struct weights_owner *o, int slot)
{
    return change_adapters(o, &(struct adapter_change){ADAPTERS_REMOVE, slot, 0, "", NULL});
}

enum status weights_owner_reload_adapter(struct weights_owner *o, int slot, const char *folder)
{
    enum status st = check_no_writer(o, folder);
    if (st == ST_OK) st = adapters_check_folder(o->adapters, slot, folder);
    if (st != ST_OK) return st;
    control_owner_update_begin(o->control);
    st = change_adapters(o, &(struct adapter_change){ADAPTERS_RELOAD, slot, 0, "", folder});
    control_owner_update_end(o->control);
    return st;
}

void weights_owner_free(struct weights_owner *o)
{
    if (!o) return;
    if (o->socket_path) unlink(o->bridge_path); // ours: the control page keeps other daemons off it
    adapters_free(o->adapters);
    json_decref(o->base);
    free(o->socket_path);
    if (o->control) control_end(o->control);
    control_free(o->control);
    for (int i = 0; i < WEIGHTS_ROLES; i++) {
        shared_memory_free(o->arenas[i].memory);
        weights_free(o->arenas[i].weights);
    }
    free(o);
}

const struct weights *weights_owner_weights(const struct weights_owner *o, enum weights_role role)
{
    return o->arenas[role].weights;
}
struct control *weights_owner_control(const struct weights_owner *o)
{
    return o->control;
}

// From the snapshot's folder for this role ("": there is none), else from what was loaded. Where a
// snapshot that is there cannot be used, its fault stands in ret->fault.
static enum status arena_restore(struct weights_owner *o, enum weights_role role,
                                 const char *snapshot, struct weights_restored *ret)
{
    const struct arena *a = &o->arenas[role];
    const char *chosen = a->reloaded[0] ? a->reloaded : a->source.folder; // by its own choice
    if (snapshot[0]) {
        enum status st = arena_load(o, role, snapshot);
        if (role == WEIGHTS_POLICY) snprintf(ret->from, sizeof ret->from, "%.511s", snapshot);
        if (st == ST_OK) return ST_OK;
        snprintf(ret->fault, sizeof ret->fault, "%s", status_message());
    }
    if (!chosen) return status_fail(ST_NOT_FOUND, "there is no folder to restore them from");
    if (role == WEIGHTS_POLICY) snprintf(ret->from, sizeof ret->from, "%.511s", chosen);
    return arena_load(o, role, chosen);
}

// The policy, and where the snapshot does not say that it was written, the adapters.
static enum status restore_policy(struct weights_owner *o, const char *snapshot,
                                  struct weights_restored *ret)
{
    enum status st = arena_restore(o, WEIGHTS_POLICY, snapshot, ret);
    if (st == ST_OK && o->adapters && (!snapshot[0] || ret->fault[0]))
        st = change_adapters(o, &(struct adapter_change){ADAPTERS_REVERT, 0, 0, "", NULL});
    if (st == ST_OK) control_owner_loaded(o->control, role_names[WEIGHTS_POLICY], ret->from, false);
    return st;
}

// An adapter's writer did not write the policy.
static enum status restore_adapter(struct weights_owner *o, const char *snapshot,
                                   struct weights_restored *ret)
{
    snprintf(ret->from, sizeof ret->from, "%.511s", snapshot);
    const struct adapter_change restore = {ADAPTERS_RESTORE, 0, 0, "", snapshot},
                                revert = {ADAPTERS_REVERT, 0, 0, "", NULL};
    if (change_adapters(o, &restore) == ST_OK) return ST_OK;
    snprintf(ret->fault, sizeof ret->fault, "%s", status_message());
    snprintf(ret->from, sizeof ret->from, "the adapters' folders, or new adapters");
    return change_adapters(o, &revert);
}

enum status weights_owner_restore(struct weights_owner *o, struct weights_restored *ret)
{
    char snapshot[512], draft[600] = "";
    struct weights_restored restored = {0};
    // who writes another shard ends when its leader has, and until then may write over what is
    // restored
    if (control_await_followers(o->control, clock_deadline_ns(FOLLOWERS_MS)) != ST_OK)
        log_warn("the weights are restored although %s, and may write over them", status_message());
    control_snapshot(o->control, snapshot, sizeof snapshot);
    control_owner_update_begin(o->control);
    const bool adapter = o->adapters && adapters_is_checkpoint(snapshot);
    enum status st = (adapter ? restore_adapter : restore_policy)(o, snapshot, &restored);
    if (snapshot[0]) snprintf(draft, sizeof draft, "%s/draft", snapshot);
    if (draft[0] && access(draft, F_OK) != 0) draft[0] = 0; // that run did not train it
    if (st == ST_OK && o->arenas[WEIGHTS_DRAFT].weights)
        st = arena_restore(o, WEIGHTS_DRAFT, draft, &restored);
    if (st != ST_OK) return st;
    control_owner_update_end(o->control);
    *ret = restored;
    return ST_OK;
}

static enum status check_reload(const struct weights_owner *o, const char *folder,
                                const char *draft_folder)
{
    const struct weights *draft = o->arenas[WEIGHTS_DRAFT].weights;
    enum status st = weights_check(o->arenas[WEIGHTS_POLICY].weights, folder);
    if (st != ST_OK || !draft_folder) return st;
    if (!draft)
        return status_fail(ST_INVALID, "\"draft\": this server was started without --draft");
    return status_context(weights_check(draft, draft_folder), "the draft model");
}

enum status weights_owner_reload(struct weights_owner *o, const char *folder,
                                 const char *draft_folder)
{
    enum status st = check_no_writer(o, folder);
    if (st == ST_OK) st = check_reload(o, folder, draft_folder);
    if (st != ST_OK) return st;
    control_owner_update_begin(o->control);
    st = arena_load(o, WEIGHTS_POLICY, folder);
    if (st == ST_OK && draft_folder) st = arena_load(o, WEIGHTS_DRAFT, draft_folder);
    if (st != ST_OK)
        return status_context(ST_TORN, "reload"); // checked folders: half old, half new
    control_owner_loaded(o->control, role_names[WEIGHTS_POLICY], folder, true);
    snprintf(o->arenas[WEIGHTS_POLICY].reloaded, PATH_MAX, "%s", folder);
    if (draft_folder) snprintf(o->arenas[WEIGHTS_DRAFT].reloaded, PATH_MAX, "%s", draft_folder);
    control_owner_update_end(o->control);
    return ST_OK;
}

int weights_owner_shards(const struct weights_owner *o)
{
    return group_size(o->group);
}

int64_t weights_owner_parameters(const struct weights_owner *o)
{
    return weights_parameters(o->arenas[WEIGHTS_POLICY].weights);
}

enum status weights_owner_canaries(struct weights_owner *o, uint64_t *words)
{
    enum status st = group_order(o->group, ORDER_CANARY, WEIGHTS_POLICY, NULL, 0);
    if (st != ST_OK) return st;
    st = arena_canary(o->dev, o->arenas[WEIGHTS_POLICY].weights, words);
    return and_others(o, st, words + 1, sizeof *words);
}

int weights_owner_tensors(const struct weights_owner *o)
{
    int n = 0;
    for (int i = 0; i < listed_arenas(o); i++)
        if (listed_arena(o, i)) n += listed_arena(o, i)->n_held;
    return n * group_size(o->group);
}

enum status weights_owner_checksums(struct weights_owner *o, uint64_t *sums)
{
    const int others = group_size(o->group) - 1, all = weights_owner_tensors(o) / (others + 1);
    uint64_t *theirs = calloc((size_t)(all * others) + 1, sizeof *theirs);
    enum status st = theirs ? ST_OK : status_fail(ST_NO_MEMORY, "no memory for checksums");
    for (int i = 0; i < listed_arenas(o) && st == ST_OK; i++) {
        const struct weights *w = listed_arena(o, i);
        if (!w) continue;
        const size_t bytes = (size_t)w->n_held * sizeof *sums;
        CHECK(group_order(o->group, ORDER_SUMS, i, NULL, 0));
        CHECK(and_others(o, arena_checksums(o->dev, w, sums), theirs, bytes));
        for (int r = 0; r < others; r++)
            memcpy(sums + (r + 1) * all, theirs + r * w->n_held, bytes);
        sums += w->n_held;
    }
out:
    free(theirs);
    return st;
}

enum status weights_owner_base(struct weights_owner *o, const json_t **ret)
{
    const struct weights *w = o->arenas[WEIGHTS_POLICY].weights;
    const size_t n = (size_t)group_size(o->group);
    enum status st = ST_OK;
    struct control_info f;
    uint64_t *sums = NULL;
    control_info(o->control, &f);
    if (!o->base || o->base_version != f.policy_version || o->base_updates != f.updates) {
        if (!(sums = calloc(n, sizeof *sums))) FAIL(ST_NO_MEMORY, "no memory for sums");
        CHECK(group_order(o->group, ORDER_BASE, WEIGHTS_POLICY, NULL, 0));
        CHECK(and_others(o, weights_base_checksum(w, o->dev, sums), sums + 1, sizeof *sums));
        json_decref(o->base);
        o->base = adapter_base(f.origin, f.version, f.updates, w->dt, (int)n, sums, n);
        o->base_version = f.policy_version;
        o->base_updates = f.updates; // a writer of an older release counts these alone
    }
    json_object_set_new(o->base, "version", json_integer((json_int_t)f.version));
    *ret = o->base;
out:
    free(sums);
    return st;
}
