/* weights_owner.c: owns the arena, the control page and the bridge file, in this order of birth:
 * page (version 1: nothing loaded), arena, load (version 2), file. The engine's thread.
 *
 * The page is named after the bridge file's path. A daemon that was killed leaves it behind; the
 * next one on the same path finds its owner dead and replaces it. A living owner is found in the
 * same way, and refused: two daemons cannot fight over one bridge file.
 *
 * The arena's name says which process made it. On the CPU a killed daemon leaves gigabytes in
 * /dev/shm, so each new one first removes the arenas and pages of the dead, whatever bridge they
 * were for. */
#include "infer-server/weights_owner.h"
#include "bridge/bridge_file.h"
#include "common/base/log.h"
#include "kernels/ops.h"
#include <dirent.h>
#include <inttypes.h>
#include <limits.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct weights_owner {
    struct device *dev;
    const struct model_config *config;
    const char *model_folder;
    char *reloaded; // folder of the last reload; NULL: none
    char bridge_path[512];
    char page_name[64], arena_name[96], layout_hash[65];
    struct weights *weights;
    struct shared_memory *arena;
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

// Path hash; then for the arena PID namespace, pid and start time (the page holds its owner's).
#define ARENA_WRITE "/commonweight-%s-%" PRIu64 ".%d.%" PRIu64 "-policy"
#define ARENA_READ  "commonweight-%16[0-9a-f]-%" SCNu64 ".%d.%" SCNu64 "-policy%n"
#define PAGE_WRITE  "/commonweight-%s-control"
#define PAGE_READ   "commonweight-%16[0-9a-f]-control%n"

// Process numbers mean something only within one namespace; /dev/shm may be shared by several.
static bool is_dead_arena(const char *entry)
{
    char hash[17];
    uint64_t namespace, start;
    int pid, end = 0;
    return sscanf(entry, ARENA_READ, hash, &namespace, &pid, &start, &end) == 4 && end > 0 &&
           !entry[end] && namespace == process_namespace() && !process_alive(pid, start);
}

static bool is_page(const char *entry)
{
    char hash[17];
    int end = 0;
    return sscanf(entry, PAGE_READ, hash, &end) == 1 && end > 0 && !entry[end];
}

static void sweep_dead_segments(void)
{
    DIR *dir = opendir("/dev/shm");
    const struct dirent *entry;
    while (dir && (entry = readdir(dir))) {
        char name[NAME_MAX + 2];
        snprintf(name, sizeof name, "/%s", entry->d_name);
        if (is_page(entry->d_name) ? control_sweep(name)
                                   : is_dead_arena(entry->d_name) && shm_unlink(name) == 0)
            log_info("removed %s, which a killed daemon left", name);
    }
    if (dir) closedir(dir);
}

static void name_segments(struct weights_owner *o)
{
    unsigned char digest[EVP_MAX_MD_SIZE] = {0};
    char hex[17];
    EVP_Digest(o->bridge_path, strlen(o->bridge_path), digest, NULL, EVP_sha256(), NULL);
    for (int i = 0; i < 8; i++) snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    snprintf(o->page_name, sizeof o->page_name, PAGE_WRITE, hex);
    snprintf(o->arena_name, sizeof o->arena_name, ARENA_WRITE, hex, process_namespace(),
             (int)getpid(), process_start_time(getpid()));
}

enum status weights_owner_new(struct device *dev, const struct model_config *config, enum dtype dt,
                              const char *model_folder, const char *bridge_path,
                              struct weights_owner **ret)
{
    enum status st = ST_OK;
    struct weights_owner *o = calloc(1, sizeof *o);
    if (!o) return status_fail(ST_NO_MEMORY, "no memory for the owner of the weights");
    o->dev = dev;
    o->config = config;
    o->model_folder = model_folder;
    CHECK(absolute_path(bridge_path, o->bridge_path, sizeof o->bridge_path));
    name_segments(o);
    CHECK(weights_plan(config, dt, &o->weights));
    weights_layout_hash(o->weights, o->layout_hash);
    CHECK(control_create(o->page_name, o->layout_hash, &o->control));
    sweep_dead_segments();
    CHECK(shared_memory_create(dev, o->arena_name, o->weights->bytes, &o->arena));
    weights_bind(o->weights, shared_memory_data(o->arena));
    if (model_folder)
        CHECK(weights_load(o->weights, dev, model_folder));
    else
        CHECK(weights_init_random(o->weights, dev, 1));
    control_owner_update_end(o->control);
    *ret = o;
    return ST_OK;
out:
    weights_owner_free(o);
    return st;
}

static void describe_tensors(const struct weights *w, struct bridge_tensor *to)
{
    const size_t element = dtype_size(w->dt);
    for (int i = 0; i < w->n_tensors; i++) {
        const struct weight_tensor *t = &w->tensors[i];
        snprintf(to[i].name, sizeof to[i].name, "%s", t->name);
        to[i].n_dims = t->n_dims;
        int64_t stride = 1;
        for (int d = t->n_dims - 1; d >= 0; d--) {
            to[i].shape[d] = t->shape[d];
            to[i].stride[d] = stride;
            stride *= t->shape[d];
        }
        to[i].dt = w->dt;
        to[i].offset = (uint64_t)t->offset * element;
        to[i].bytes = (uint64_t)t->n * element;
    }
}

enum status weights_owner_announce(struct weights_owner *o, const char *socket_path)
{
    const struct weights *w = o->weights;
    enum status st = ST_OK;
    struct bridge_role role = {.role = "policy",
                               .bytes = w->bytes,
                               .canary_offset = w->canary_offset,
                               .dt = w->dt,
                               .n_parameters = w->n_parameters,
                               .n_tensors = w->n_tensors};
    struct bridge_file file = {.pid = getpid(), .n_roles = 1, .roles = &role};
    role.tensors = calloc((size_t)w->n_tensors, sizeof *role.tensors);
    if (!role.tensors) return status_fail(ST_NO_MEMORY, "no memory for the bridge file");
    describe_tensors(w, role.tensors);
    if (o->model_folder)
        CHECK(absolute_path(o->model_folder, role.model, sizeof role.model));
    else
        snprintf(role.model, sizeof role.model, "(random weights)");
    snprintf(role.kind, sizeof role.kind, "%s", shared_memory_kind(o->dev));
    snprintf(role.handle, sizeof role.handle, "%s", shared_memory_handle(o->arena));
    snprintf(role.layout_hash, sizeof role.layout_hash, "%s", o->layout_hash);
    snprintf(file.path, sizeof file.path, "%s", o->bridge_path);
    process_boot_id(file.boot_id);
    file.pid_start_time = process_start_time(file.pid);
    snprintf(file.device_uuid, sizeof file.device_uuid, "%s", device_uuid(o->dev));
    snprintf(file.device, sizeof file.device, "%s", device_spec(o->dev));
    snprintf(file.control_page, sizeof file.control_page, "%s", o->page_name);
    CHECK(absolute_path(socket_path, file.socket, sizeof file.socket));
    CHECK(bridge_file_write(&file));
    o->announced = true;
out:
    free(role.tensors);
    return st;
}

void weights_owner_free(struct weights_owner *o)
{
    if (!o) return;
    if (o->announced) unlink(o->bridge_path); // ours: the control page keeps other daemons off it
    if (o->control) control_end(o->control);
    control_free(o->control);
    shared_memory_free(o->arena);
    weights_free(o->weights);
    free(o->reloaded);
    free(o);
}

const struct weights *weights_owner_weights(const struct weights_owner *o)
{
    return o->weights;
}
struct control *weights_owner_control(const struct weights_owner *o)
{
    return o->control;
}

enum status weights_owner_restore(struct weights_owner *o, char ret_from[512])
{
    char snapshot[512];
    const char *from = snapshot;
    control_snapshot(o->control, snapshot, sizeof snapshot);
    control_owner_update_begin(o->control);
    enum status st = ST_NOT_FOUND;
    if (snapshot[0]) {
        st = weights_load(o->weights, o->dev, snapshot);
        if (st != ST_OK)
            log_warn(
                "the trainer's last snapshot cannot be used: %s; taking the model that was loaded",
                status_message());
    }
    const char *folder = o->reloaded ? o->reloaded : o->model_folder;
    if (st != ST_OK && folder) {
        from = folder;
        st = weights_load(o->weights, o->dev, from);
    }
    if (st != ST_OK) return st;
    control_owner_update_end(o->control);
    snprintf(ret_from, 512, "%s", from);
    return ST_OK;
}

enum status weights_owner_reload(struct weights_owner *o, const char *folder)
{
    struct control_facts facts;
    control_facts(o->control, &facts);
    if (facts.writer_alive)
        return status_fail(ST_BUSY,
                           "a trainer (pid %d) is attached to these weights; stop it before they "
                           "are reloaded from %s",
                           (int)facts.writer_pid, folder);
    char *name = strdup(folder);
    if (!name) return status_fail(ST_NO_MEMORY, "no memory to reload from %s", folder);
    // A folder that cannot be used is found out before the first byte is written (weights_load);
    // what fails later is the device, and then the weights are half old, half new.
    control_owner_update_begin(o->control);
    enum status st = weights_load(o->weights, o->dev, folder);
    if (st == ST_DEVICE) {
        st = status_context(ST_TORN, "reload");
        goto out;
    }
    if (st == ST_OK) { // what is to be restored from now on
        control_forget_snapshot(o->control);
        free(o->reloaded);
        o->reloaded = name;
        name = NULL;
    }
    control_owner_update_end(o->control);
out:
    free(name);
    return st;
}

enum status weights_owner_canary(struct weights_owner *o, uint64_t *ret_word)
{
    char *canary = (char *)o->weights->base + o->weights->canary_offset;
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

enum status weights_owner_checksums(struct weights_owner *o, uint64_t *sums)
{
    const struct weights *w = o->weights;
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
