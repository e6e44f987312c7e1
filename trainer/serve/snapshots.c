/* snapshots.c: see snapshots.h. Each call takes the lock for a walk over a list of some dozens, and
 * of the paths that this process saved. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/serve/snapshots.h"
#include "common/base/clock.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct entry {
    struct entry *next;
    enum snapshot_kind kind;
    char adapter[ADAPTER_ROOM];
    char name[RUN_PATH_ROOM]; // LIVE, KEPT: the run; LOADED, PATH: the path; "" of LOADED: nobody
                              // asks for it
    uint64_t since, until;    // LIVE: version of the weights; KEPT: and of the next, or 0
    int users;
    int64_t used_ns;
    bool abandoned;          // LIVE
    char *restore;           // LIVE: a folder, or NULL
    struct snapshot weights; // PATH
};

struct snapshots {
    pthread_mutex_t lock;
    struct entry *list; // the model itself is the last
    uint64_t last;      // version that an update of this process gave
    uint64_t base;      // see snapshots_base()
    bool held;
};

static struct snapshots *lock(struct snapshots *s)
{
    pthread_mutex_lock(&s->lock);
    return s;
}

static void unlock(struct snapshots **s)
{
    pthread_mutex_unlock(&(*s)->lock);
}

// The lock is held from here to the end of the function.
#define LOCKED(s) struct snapshots *locked __attribute__((cleanup(unlock), unused)) = lock(s)

static struct entry *by_adapter(const struct snapshots *s, const char *adapter)
{
    struct entry *e = s->list;
    while (e && (e->kind == PATH || strcmp(e->adapter, adapter) != 0)) e = e->next;
    return e;
}

// version 0: any.
static struct entry *by_name(const struct snapshots *s, enum snapshot_kind kind, const char *name,
                             uint64_t version)
{
    struct entry *e = s->list;
    while (e && (e->kind != kind || strcmp(e->name, name) != 0 || (version && e->since != version)))
        e = e->next;
    return e;
}

static struct entry *live(const struct snapshots *s, const char *run)
{
    return by_name(s, LIVE, run, 0);
}

static struct entry *kept(const struct snapshots *s, const char *run, uint64_t version)
{
    return run[0] && version ? by_name(s, KEPT, run, version) : NULL;
}

static struct entry *add(struct snapshots *s, enum snapshot_kind kind, const char *name,
                         const char *adapter)
{
    struct entry *e = calloc(1, sizeof *e);
    if (!e) return NULL;
    const struct entry *run = kind == KEPT ? live(s, name) : NULL;
    e->kind = kind;
    e->used_ns = clock_now_ns();
    e->since = run ? run->since : 0;
    snprintf(e->name, sizeof e->name, "%s", name);
    snprintf(e->adapter, sizeof e->adapter, "%s", adapter);
    e->next = s->list;
    s->list = e;
    return e;
}

enum status snapshots_add(struct snapshots *s, enum snapshot_kind kind, const char *name,
                          const char *adapter)
{
    LOCKED(s);
    return add(s, kind, name, adapter) ? ST_OK
                                       : status_fail(ST_NO_MEMORY, "no memory for a snapshot");
}

enum status snapshots_new(uint64_t version, bool is_base, struct snapshots **ret)
{
    struct snapshots *s = calloc(1, sizeof *s);
    if (!s) return status_fail(ST_NO_MEMORY, "no memory for snapshots");
    pthread_mutex_init(&s->lock, NULL);
    enum status st = snapshots_add(s, LIVE, "", "");
    if (st == ST_OK) {
        snapshots_update(s, "", version, is_base);
        *ret = s;
    } else {
        snapshots_free(s);
    }
    return st;
}

void snapshots_free(struct snapshots *s)
{
    if (!s) return;
    for (struct entry *e = s->list, *next; e; e = next) {
        next = e->next;
        free(e->restore);
        free(e);
    }
    pthread_mutex_destroy(&s->lock);
    free(s);
}

// ---- what is asked ------------------------------------------------------------------------------

static struct entry *find(const struct snapshots *s, const struct snapshot *which)
{
    struct entry *run = which->version ? live(s, which->run) : NULL, *e = run;
    const struct entry *path = by_name(s, PATH, which->path, 0);
    if (path && path->weights.saves != which->saves) return NULL;
    if (e && e->since == which->version) return e;
    if (which->base && (e = by_name(s, FROZEN, "", 0))) return e;
    if (run && which->inflight) return run;
    e = kept(s, which->run, which->version);
    return e || !which->path[0] ? e : by_name(s, LOADED, which->path, 0);
}

bool snapshots_use(struct snapshots *s, const struct snapshot *which, struct snapshot_use *ret)
{
    LOCKED(s);
    if (ret) ret->elsewhere = which->elsewhere;
    if (which->elsewhere) return true;
    struct entry *e = find(s, which);
    if (!e || !ret) return e != NULL;
    if (s->held && e->kind != FROZEN) return false;
    e->users++;
    e->used_ns = clock_now_ns();
    ret->live = e->kind == LIVE;
    memcpy(ret->adapter, e->adapter, sizeof e->adapter);
    return true;
}

void snapshots_end_use(struct snapshots *s, const struct snapshot_use *use)
{
    LOCKED(s);
    struct entry *e = by_adapter(s, use->adapter); // NULL: unloaded meanwhile
    if (e && !use->elsewhere) e->users--;
}

bool snapshots_gave(struct snapshots *s, const struct snapshot *which,
                    const struct snapshot_use *use, uint64_t oldest, uint64_t newest)
{
    LOCKED(s);
    const struct entry *e = by_adapter(s, use->adapter),
                       *copy = kept(s, which->run, which->version);
    if (use->elsewhere || (e && e->kind == FROZEN)) return true; // whatever was written meanwhile
    if (newest > s->last) return false; // the server itself rewrote something
    if (use->adapter[0] && oldest < live(s, "")->since) return false; // it is of another base
    if (!use->live) return true;
    // A run's own weights may have changed since: they had not, or not before the last token.
    return e && oldest >= which->version &&
           (e->since == which->version || (copy && newest < copy->until));
}

uint64_t snapshots_version(struct snapshots *s, const char *run)
{
    LOCKED(s);
    const struct entry *e = live(s, run);
    return e ? e->since : 0;
}

uint64_t snapshots_base(struct snapshots *s)
{
    LOCKED(s);
    return s->base;
}

void snapshots_abandon(struct snapshots *s, const char *run, bool gone)
{
    LOCKED(s);
    struct entry *e = live(s, run);
    if (e) e->abandoned = gone;
}

bool snapshots_need(struct snapshots *s, const char *folder)
{
    LOCKED(s);
    for (const struct entry *e = s->list; e; e = e->next)
        if (e->restore && strcmp(e->restore, folder) == 0) return true;
    return false;
}

int snapshots_kept(struct snapshots *s, const char *run, struct bytes *to)
{
    LOCKED(s);
    int n = 0;
    for (const struct entry *e = s->list; e; e = e->next) {
        if (e->kind != KEPT || strcmp(e->name, run) != 0) continue;
        if (to) bytes_printf(to, "%s%" PRIu64, n ? ", " : "", e->since);
        n++;
    }
    if (to && n == 0) bytes_puts(to, "none");
    return n;
}

void snapshots_forget(struct snapshots *s, const char *path)
{
    LOCKED(s);
    for (struct entry *e = s->list; e; e = e->next)
        if (e->kind == LOADED ? !path || strcmp(e->name, path) == 0 : e->kind == KEPT && !path)
            e->name[0] = 0;
}

void snapshots_set_path(struct snapshots *s, const char *path, const struct snapshot *weights,
                        bool saved)
{
    LOCKED(s);
    struct entry *e = by_name(s, PATH, path, 0);
    if (!e && !(e = add(s, PATH, path, ""))) return;
    const int64_t saves = e->weights.saves + saved;
    e->weights = *weights;
    e->weights.saves = saves;
}

void snapshots_of_path(struct snapshots *s, const char *path, struct snapshot *ret)
{
    LOCKED(s);
    const struct entry *e = by_name(s, PATH, path, 0);
    *ret = e ? e->weights : (struct snapshot){0};
    snprintf(ret->path, sizeof ret->path, "%s", path);
}

// ---- what changes -------------------------------------------------------------------------------

void snapshots_remove(struct snapshots *s, const char *adapter)
{
    LOCKED(s);
    struct entry *gone = by_adapter(s, adapter);
    if (!gone) return;
    LIST_REMOVE(s->list, gone);
    free(gone->restore);
    free(gone);
}

int snapshots_hold(struct snapshots *s, bool held)
{
    LOCKED(s);
    int users = 0;
    s->held = held;
    for (const struct entry *e = s->list; e; e = e->next) users += e->kind == FROZEN ? 0 : e->users;
    return users;
}

void snapshots_update(struct snapshots *s, const char *run, uint64_t version, bool is_base)
{
    LOCKED(s);
    struct entry *e = live(s, run), *copy = e ? kept(s, run, e->since) : NULL;
    if (copy) copy->until = version;
    if (e) e->since = version;
    if (!run[0]) s->base = is_base ? version : 0;
    s->last = version;
}

void snapshots_set_restore(struct snapshots *s, const char *run, const char *folder)
{
    LOCKED(s);
    struct entry *e = live(s, run);
    if (!e) return;
    free(e->restore);
    e->restore = strdup(folder);
}

bool snapshots_spare(struct snapshots *s, const char *run, bool loaded,
                     char ret_adapter[ADAPTER_ROOM])
{
    LOCKED(s);
    const struct entry *spare = NULL;
    for (const struct entry *e = s->list; e; e = e->next) {
        const bool may_go =
            e->kind == KEPT ? !run || strcmp(e->name, run) == 0 : e->kind == LOADED && loaded;
        if (may_go && e->users == 0 && (!spare || e->used_ns < spare->used_ns)) spare = e;
    }
    if (spare) memcpy(ret_adapter, spare->adapter, ADAPTER_ROOM);
    return spare != NULL;
}

bool snapshots_abandoned(struct snapshots *s, const char *but, char ret_run[RUN_NAME_ROOM])
{
    LOCKED(s);
    for (const struct entry *e = s->list; e; e = e->next) {
        if (e->kind != LIVE || !e->abandoned || (but && strcmp(e->name, but) == 0)) continue;
        memcpy(ret_run, e->name, RUN_NAME_ROOM);
        return true;
    }
    return false;
}
