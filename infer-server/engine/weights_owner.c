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
#include "infer-server/engine/weights_owner.h"
#include "common/base/hash.h"
#include "bridge/bridge_file.h"
#include "common/base/file.h"
#include "common/base/log.h"
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

static const char *const role_names[WEIGHTS_ROLES] = {"policy", "draft"};

struct arena {
    struct weights_source source;
    char reloaded[PATH_MAX]; // folder of the last reload; "": none
    char layout_hash[65];
    struct weights *weights; // NULL: there is no such role
    struct shared_memory *memory;
};
struct weights_owner {
    struct device *dev;
    char bridge_path[512], path_hash[17], page_name[64];
    struct arena arenas[WEIGHTS_ROLES];
    struct control *control;
    bool announced;
};

// An absolute path, so that the names do not depend on the working folder.
static enum status absolute_path(const char *path, char *ret, size_t size)
{
    char cwd[PATH_MAX] = "";
    int n;
    if (path[0] == '/')
        n = snprintf(ret, size, "%s", path);
    else if (!getcwd(cwd, sizeof cwd))
        return status_fail(ST_IO, "the working folder has no path: %m");
    else
        n = snprintf(ret, size, "%s/%s", cwd, path);
    if (n < 0 || (size_t)n >= size)
        return status_fail(ST_INVALID, "--bridge %s: a path of more than %zu bytes", path,
                           size - 1);
    return ST_OK;
}

static const char *source_name(const struct weights_source *source)
{
    return source->folder ? source->folder : "(random weights)";
}

// Path hash; then for an arena PID namespace, pid and start time (the page holds its owner's), and
// its role.
#define ARENA_WRITE "/commonweight-%s-%" PRIu64 ".%d.%" PRIu64 "-%s"
#define ARENA_READ  "commonweight-%16[0-9a-f]-%" SCNu64 ".%d.%" SCNu64 "-%7[a-z]%n"
#define PAGE_WRITE  "/commonweight-%s-control"
#define PAGE_READ   "commonweight-%16[0-9a-f]-control%n"

// Its maker holds a lock on it (kernels/cpu/shared.c). A pid means something only within one
// namespace, and /dev/shm may be shared by several; within it, builds before the lock are told by
// it.
static bool sweep_arena(const char *name)
{
    char hash[17], role[8];
    uint64_t namespace, start;
    int pid, end = 0;
    if (sscanf(name, "/" ARENA_READ, hash, &namespace, &pid, &start, role, &end) != 5 || end <= 0 ||
        name[end])
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
    const char *rest = name + end;
    return !rest[0] || (rest[0] == '.' && rest[1] && !rest[1 + strspn(rest + 1, "0123456789")]);
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

static enum status arena_load(struct weights_owner *o, enum weights_role role, const char *folder)
{
    const struct arena *a = &o->arenas[role];
    enum status st = folder ? weights_load(a->weights, o->dev, folder)
                            : weights_init_random(a->weights, o->dev, 1 + (uint64_t)role);
    return role == WEIGHTS_POLICY ? st : status_context(st, "the %s model", role_names[role]);
}

static enum status arena_new(struct weights_owner *o, enum weights_role role)
{
    struct arena *a = &o->arenas[role];
    char name[96];
    snprintf(name, sizeof name, ARENA_WRITE, o->path_hash, process_namespace(), (int)getpid(),
             process_start_time(getpid()), role_names[role]);
    enum status st = shared_memory_create(o->dev, name, a->weights->bytes, &a->memory);
    if (st != ST_OK) return st;
    weights_bind(a->weights, shared_memory_data(a->memory));
    return arena_load(o, role, a->source.folder);
}

enum status weights_owner_new(struct device *dev,
                              const struct weights_source sources[WEIGHTS_ROLES], enum dtype dt,
                              const char *bridge_path, struct weights_owner **ret)
{
    enum status st = ST_OK;
    struct weights_owner *o = calloc(1, sizeof *o);
    if (!o) return status_fail(ST_NO_MEMORY, "no memory for the owner of the weights");
    o->dev = dev;
    CHECK(absolute_path(bridge_path, o->bridge_path, sizeof o->bridge_path));
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
    control_owner_loaded(o->control, source_name(&sources[WEIGHTS_POLICY]), true);
    control_owner_update_end(o->control);
    *ret = o;
    return ST_OK;
out:
    weights_owner_free(o);
    return st;
}

// Takes memory for the tensors, which the caller frees.
static enum status describe_role(const struct weights_owner *o, enum weights_role which,
                                 struct bridge_role *ret)
{
    const struct arena *a = &o->arenas[which];
    const struct weights *w = a->weights;
    const size_t element = dtype_size(w->dt);
    struct bridge_role role = {.bytes = w->bytes,
                               .canary_offset = w->canary_offset,
                               .dt = w->dt,
                               .n_parameters = w->n_parameters,
                               .rope_context = w->config->rope_context,
                               .n_tensors = w->n_tensors};
    enum status st = ST_OK;
    if (a->source.folder)
        st = absolute_path(a->source.folder, role.model, sizeof role.model);
    else
        snprintf(role.model, sizeof role.model, "%s", source_name(&a->source));
    if (st != ST_OK) return st;
    snprintf(role.role, sizeof role.role, "%s", role_names[which]);
    snprintf(role.kind, sizeof role.kind, "%s", shared_memory_kind(o->dev));
    snprintf(role.handle, sizeof role.handle, "%s", shared_memory_handle(a->memory));
    snprintf(role.layout_hash, sizeof role.layout_hash, "%s", a->layout_hash);
    role.tensors = calloc((size_t)w->n_tensors, sizeof *role.tensors);
    if (!role.tensors) return status_fail(ST_NO_MEMORY, "no memory for the bridge file");
    for (int i = 0; i < w->n_tensors; i++) {
        const struct weight_tensor *t = &w->tensors[i];
        struct bridge_tensor *to = &role.tensors[i];
        snprintf(to->name, sizeof to->name, "%s", t->name);
        to->n_dims = t->n_dims;
        int64_t stride = 1;
        for (int d = t->n_dims - 1; d >= 0; d--) {
            to->shape[d] = t->shape[d];
            to->stride[d] = stride;
            stride *= t->shape[d];
        }
        to->dt = w->dt;
        to->offset = (uint64_t)t->offset * element;
        to->bytes = (uint64_t)t->n * element;
    }
    *ret = role;
    return ST_OK;
}

enum status weights_owner_announce(struct weights_owner *o, const char *socket_path)
{
    enum status st = ST_OK;
    struct bridge_role roles[WEIGHTS_ROLES];
    struct bridge_file file = {.pid = getpid(), .n_roles = 0, .roles = roles};
    for (int i = 0; i < WEIGHTS_ROLES; i++) {
        if (!o->arenas[i].weights) continue;
        CHECK(describe_role(o, (enum weights_role)i, &roles[file.n_roles]));
        file.n_roles++;
    }
    snprintf(file.path, sizeof file.path, "%s", o->bridge_path);
    process_boot_id(file.boot_id);
    file.pid_start_time = process_start_time(file.pid);
    snprintf(file.device_uuid, sizeof file.device_uuid, "%s", device_uuid(o->dev));
    snprintf(file.device, sizeof file.device, "%s", device_spec(o->dev));
    snprintf(file.control_page, sizeof file.control_page, "%s", o->page_name);
    CHECK(absolute_path(socket_path, file.socket, sizeof file.socket));
    int left = file_sweep_temporaries(file.path);
    if (left) log_info("removed %d halves of %s, which killed servers left", left, file.path);
    CHECK(bridge_file_write(&file));
    o->announced = true;
out:
    for (int i = 0; i < file.n_roles; i++) free(roles[i].tensors);
    return st;
}

void weights_owner_free(struct weights_owner *o)
{
    if (!o) return;
    if (o->announced) unlink(o->bridge_path); // ours: the control page keeps other servers off it
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
        if (role == WEIGHTS_POLICY) snprintf(ret->from, sizeof ret->from, "%s", snapshot);
        if (st == ST_OK) return ST_OK;
        snprintf(ret->fault, sizeof ret->fault, "%s", status_message());
    }
    if (!chosen) return status_fail(ST_NOT_FOUND, "there is no folder to restore them from");
    if (role == WEIGHTS_POLICY) snprintf(ret->from, sizeof ret->from, "%s", chosen);
    return arena_load(o, role, chosen);
}

static enum status restore_draft(struct weights_owner *o, const char *snapshot,
                                 struct weights_restored *ret)
{
    char folder[600] = "";
    if (snapshot[0]) snprintf(folder, sizeof folder, "%s/draft", snapshot);
    if (folder[0] && access(folder, F_OK) != 0) folder[0] = 0; // that run did not train it
    return arena_restore(o, WEIGHTS_DRAFT, folder, ret);
}

enum status weights_owner_restore(struct weights_owner *o, struct weights_restored *ret)
{
    char snapshot[512];
    struct weights_restored restored = {0};
    control_snapshot(o->control, snapshot, sizeof snapshot);
    control_owner_update_begin(o->control);
    enum status st = arena_restore(o, WEIGHTS_POLICY, snapshot, &restored);
    if (st == ST_OK && o->arenas[WEIGHTS_DRAFT].weights) st = restore_draft(o, snapshot, &restored);
    if (st != ST_OK) return st;
    control_owner_loaded(o->control, restored.from, false);
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
    struct control_facts facts;
    control_facts(o->control, &facts);
    if (facts.writer_alive)
        return status_fail(ST_BUSY,
                           "a trainer (pid %d) is attached to these weights; stop it before they "
                           "are reloaded from %s",
                           (int)facts.writer_pid, folder);
    enum status st = check_reload(o, folder, draft_folder);
    if (st != ST_OK) return st;
    control_owner_update_begin(o->control);
    st = arena_load(o, WEIGHTS_POLICY, folder);
    if (st == ST_OK && draft_folder) st = arena_load(o, WEIGHTS_DRAFT, draft_folder);
    if (st != ST_OK)
        return status_context(ST_TORN, "reload"); // checked folders: half old, half new
    control_owner_loaded(o->control, folder, true);
    snprintf(o->arenas[WEIGHTS_POLICY].reloaded, PATH_MAX, "%s", folder);
    if (draft_folder) snprintf(o->arenas[WEIGHTS_DRAFT].reloaded, PATH_MAX, "%s", draft_folder);
    control_owner_update_end(o->control);
    return ST_OK;
}

enum status weights_owner_canary(struct weights_owner *o, uint64_t *ret_word)
{
    const struct weights *w = o->arenas[WEIGHTS_POLICY].weights;
    char *canary = (char *)w->base + w->canary_offset;
    uint64_t word = 0;
    device_copy_out(o->dev, &word, canary, sizeof word);
    enum status st = device_sync(o->dev);
    if (st != ST_OK) return st;
    const uint64_t complement = ~word;
    device_copy_in(o->dev, canary + sizeof word, &complement, sizeof complement);
    st = device_sync(o->dev);
    if (st == ST_OK) *ret_word = word;
    return st;
}

int weights_owner_tensors(const struct weights_owner *o)
{
    int n = 0;
    for (int i = 0; i < WEIGHTS_ROLES; i++)
        if (o->arenas[i].weights) n += o->arenas[i].weights->n_tensors;
    return n;
}

static enum status arena_checksums(struct weights_owner *o, const struct weights *w, uint64_t *sums)
{
    const size_t n = (size_t)w->n_tensors, element = dtype_size(w->dt);
    uint64_t *ranges = malloc(2 * n * sizeof *ranges); // offsets, then lengths
    if (!ranges) return status_fail(ST_NO_MEMORY, "no memory for %zu checksums", n);
    for (size_t i = 0; i < n; i++) {
        ranges[i] = (uint64_t)w->tensors[i].offset * element;
        ranges[n + i] = (uint64_t)w->tensors[i].n * element;
    }
    device_ops(o->dev)->checksum(o->dev, sums, w->base, ranges, ranges + n, w->n_tensors);
    free(ranges);
    return device_sync(o->dev);
}

enum status weights_owner_checksums(struct weights_owner *o, uint64_t *sums)
{
    enum status st = ST_OK;
    for (int i = 0; i < WEIGHTS_ROLES && st == ST_OK; i++) {
        const struct weights *w = o->arenas[i].weights;
        if (!w) continue;
        st = arena_checksums(o, w, sums);
        sums += w->n_tensors;
    }
    return st;
}
