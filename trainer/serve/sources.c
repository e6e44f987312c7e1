/* sources.c: see sources.h. Each call takes the lock for a walk over a list of some dozens. */
#include "trainer/serve/sources.h"
#include "common/base/clock.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

// A run's own adapter; a copy of one as it was; of a checkpoint; the model as its folder has it.
enum kind { LIVE, KEPT, SAVED, FROZEN };

struct source {
    struct source *next;
    enum kind kind;
    char adapter[SOURCE_ROOM];
    char of[RUN_PATH_ROOM]; // LIVE, KEPT: the run; SAVED: the path; "" there: nobody asks for it
    uint64_t since, until;  // LIVE: version of the weights; KEPT: and of those that followed, or 0
    int users;
    int64_t used_ns;
    bool abandoned;          // LIVE
    char restore[PATH_ROOM]; // LIVE
};

struct sources {
    pthread_mutex_t lock;
    struct source *list; // the model itself is the last
    uint64_t last;       // version that an update of this process gave
    uint64_t base;       // see sources_base()
    bool held;
};

static struct source *by_adapter(const struct sources *s, const char *adapter)
{
    struct source *x = s->list;
    while (x && strcmp(x->adapter, adapter) != 0) x = x->next;
    return x;
}

static struct source *live(const struct sources *s, const char *run)
{
    struct source *x = s->list;
    while (x && (x->kind != LIVE || strcmp(x->of, run) != 0)) x = x->next;
    return x;
}

static struct source *kept(const struct sources *s, const char *run, uint64_t version)
{
    struct source *x = run[0] ? s->list : NULL;
    while (x && (x->kind != KEPT || x->since != version || strcmp(x->of, run) != 0)) x = x->next;
    return x;
}

static struct source *saved(const struct sources *s, const char *path)
{
    struct source *x = path[0] ? s->list : NULL;
    while (x && (x->kind != SAVED || strcmp(x->of, path) != 0)) x = x->next;
    return x;
}

static struct source *frozen(const struct sources *s)
{
    struct source *x = s->list;
    while (x && x->kind != FROZEN) x = x->next;
    return x;
}

static enum status add(struct sources *s, enum kind kind, const char *of, const char *adapter)
{
    struct source *x = calloc(1, sizeof *x);
    if (!x) return status_fail(ST_NO_MEMORY, "no memory for what can be sampled");
    x->kind = kind;
    x->used_ns = clock_now_ns();
    snprintf(x->of, sizeof x->of, "%s", of);
    snprintf(x->adapter, sizeof x->adapter, "%s", adapter);
    pthread_mutex_lock(&s->lock);
    const struct source *run = kind == KEPT ? live(s, of) : NULL;
    if (run) x->since = run->since;
    x->next = s->list;
    s->list = x;
    pthread_mutex_unlock(&s->lock);
    return ST_OK;
}

enum status sources_new(uint64_t version, bool is_base, struct sources **ret)
{
    struct sources *s = calloc(1, sizeof *s);
    if (!s) return status_fail(ST_NO_MEMORY, "no memory for what can be sampled");
    pthread_mutex_init(&s->lock, NULL);
    enum status st = add(s, LIVE, "", "");
    if (st == ST_OK) {
        sources_update(s, "", version, is_base);
        *ret = s;
    } else {
        sources_free(s);
    }
    return st;
}

void sources_free(struct sources *s)
{
    if (!s) return;
    while (s->list) {
        struct source *x = s->list;
        s->list = x->next;
        free(x);
    }
    pthread_mutex_destroy(&s->lock);
    free(s);
}

// ---- what is asked ------------------------------------------------------------------------------

static struct source *find(const struct sources *s, const struct snapshot *of, bool newer)
{
    struct source *run = of->version ? live(s, of->run) : NULL, *x = run;
    if (x && x->since == of->version) return x;
    if (of->base && (x = frozen(s))) return x;
    if (run && newer) return run;
    x = of->version ? kept(s, of->run, of->version) : NULL;
    return x ? x : saved(s, of->path);
}

bool sources_take(struct sources *s, const struct snapshot *of, bool newer, struct source_use *ret)
{
    pthread_mutex_lock(&s->lock);
    struct source *x = find(s, of, newer);
    if (x && s->held && x->kind != FROZEN) x = NULL;
    if (x) {
        x->users++;
        x->used_ns = clock_now_ns();
        ret->live = x->kind == LIVE;
        memcpy(ret->adapter, x->adapter, sizeof x->adapter);
    }
    pthread_mutex_unlock(&s->lock);
    return x != NULL;
}

void sources_give(struct sources *s, const struct source_use *use)
{
    pthread_mutex_lock(&s->lock);
    struct source *x = by_adapter(s, use->adapter); // NULL: unloaded meanwhile
    if (x) x->users--;
    pthread_mutex_unlock(&s->lock);
}

bool sources_has(struct sources *s, const struct snapshot *of, bool newer)
{
    pthread_mutex_lock(&s->lock);
    const bool has = find(s, of, newer) != NULL;
    pthread_mutex_unlock(&s->lock);
    return has;
}

// Of a run's own weights, which may have changed since: they had not, or not before the last token.
static bool was_live(const struct sources *s, const struct snapshot *of, const char *adapter,
                     uint64_t oldest, uint64_t newest)
{
    const struct source *x = by_adapter(s, adapter), *copy = kept(s, of->run, of->version);
    if (!x || oldest < of->version) return false;
    return x->since == of->version || (copy && newest < copy->until);
}

bool sources_gave(struct sources *s, const struct snapshot *of, const struct source_use *use,
                  uint64_t oldest, uint64_t newest)
{
    pthread_mutex_lock(&s->lock);
    const struct source *model = live(s, ""), *x = by_adapter(s, use->adapter);
    bool gave = newest <= s->last; // else the server itself rewrote something
    if (use->adapter[0]) gave = gave && oldest >= model->since; // an adapter of this base
    if (use->live) gave = gave && was_live(s, of, use->adapter, oldest, newest);
    if (x && x->kind == FROZEN) gave = true; // whatever was written meanwhile
    pthread_mutex_unlock(&s->lock);
    return gave;
}

uint64_t sources_version(struct sources *s, const char *run)
{
    pthread_mutex_lock(&s->lock);
    const struct source *x = live(s, run);
    const uint64_t version = x ? x->since : 0;
    pthread_mutex_unlock(&s->lock);
    return version;
}

uint64_t sources_base(struct sources *s)
{
    pthread_mutex_lock(&s->lock);
    const uint64_t version = s->base;
    pthread_mutex_unlock(&s->lock);
    return version;
}

void sources_abandon(struct sources *s, const char *run, bool gone)
{
    pthread_mutex_lock(&s->lock);
    struct source *x = live(s, run);
    if (x) x->abandoned = gone;
    pthread_mutex_unlock(&s->lock);
}

bool sources_needs(struct sources *s, const char *folder)
{
    bool needs = false;
    pthread_mutex_lock(&s->lock);
    for (const struct source *x = s->list; x; x = x->next)
        needs = needs || strcmp(x->restore, folder) == 0;
    pthread_mutex_unlock(&s->lock);
    return needs;
}

void sources_kept(struct sources *s, const char *run, struct bytes *to)
{
    int n = 0;
    pthread_mutex_lock(&s->lock);
    for (const struct source *x = s->list; x; x = x->next)
        if (x->kind == KEPT && strcmp(x->of, run) == 0)
            bytes_printf(to, "%s%" PRIu64, n++ ? ", " : "", x->since);
    pthread_mutex_unlock(&s->lock);
    if (n == 0) bytes_puts(to, "none");
}

void sources_forget(struct sources *s, const char *path)
{
    pthread_mutex_lock(&s->lock);
    for (struct source *x = s->list; x; x = x->next)
        if (path ? x->kind == SAVED && strcmp(x->of, path) == 0 : x->kind != LIVE) x->of[0] = 0;
    pthread_mutex_unlock(&s->lock);
}

// ---- what changes -------------------------------------------------------------------------------

enum status sources_add_run(struct sources *s, const char *run, const char *adapter)
{
    return add(s, LIVE, run, adapter);
}

enum status sources_add_kept(struct sources *s, const char *run, const char *adapter)
{
    return add(s, KEPT, run, adapter);
}

enum status sources_add_saved(struct sources *s, const char *path, const char *adapter)
{
    return add(s, SAVED, path, adapter);
}

enum status sources_add_frozen(struct sources *s, const char *name)
{
    return add(s, FROZEN, "", name);
}

void sources_remove(struct sources *s, const char *adapter)
{
    pthread_mutex_lock(&s->lock);
    struct source *gone = by_adapter(s, adapter), **link = &s->list;
    while (gone && *link != gone) link = &(*link)->next;
    if (gone) *link = gone->next;
    pthread_mutex_unlock(&s->lock);
    free(gone);
}

void sources_hold(struct sources *s, bool held)
{
    pthread_mutex_lock(&s->lock);
    s->held = held;
    pthread_mutex_unlock(&s->lock);
}

int sources_users(struct sources *s)
{
    int n = 0;
    pthread_mutex_lock(&s->lock);
    for (const struct source *x = s->list; x; x = x->next) n += x->kind == FROZEN ? 0 : x->users;
    pthread_mutex_unlock(&s->lock);
    return n;
}

void sources_update(struct sources *s, const char *run, uint64_t version, bool is_base)
{
    pthread_mutex_lock(&s->lock);
    struct source *x = live(s, run), *copy = x ? kept(s, run, x->since) : NULL;
    if (copy) copy->until = version;
    if (x) x->since = version;
    if (!run[0]) s->base = is_base ? version : 0;
    s->last = version;
    pthread_mutex_unlock(&s->lock);
}

void sources_set_restore(struct sources *s, const char *run, const char *folder)
{
    pthread_mutex_lock(&s->lock);
    struct source *x = live(s, run);
    if (x) snprintf(x->restore, sizeof x->restore, "%s", folder);
    pthread_mutex_unlock(&s->lock);
}

bool sources_spare(struct sources *s, const char *run, bool saved, char ret_adapter[SOURCE_ROOM])
{
    const struct source *spare = NULL;
    pthread_mutex_lock(&s->lock);
    for (const struct source *x = s->list; x; x = x->next) {
        const bool of =
            x->kind == KEPT ? !run || strcmp(x->of, run) == 0 : x->kind == SAVED && saved;
        if (!of || x->users > 0) continue;
        if (!spare || x->used_ns < spare->used_ns) spare = x;
    }
    if (spare) memcpy(ret_adapter, spare->adapter, SOURCE_ROOM);
    pthread_mutex_unlock(&s->lock);
    return spare != NULL;
}

int sources_count_kept(struct sources *s, const char *run)
{
    int n = 0;
    pthread_mutex_lock(&s->lock);
    for (const struct source *x = s->list; x; x = x->next)
        n += x->kind == KEPT && strcmp(x->of, run) == 0;
    pthread_mutex_unlock(&s->lock);
    return n;
}

bool sources_abandoned(struct sources *s, char ret_run[RUN_NAME_ROOM])
{
    pthread_mutex_lock(&s->lock);
    const struct source *x = s->list;
    while (x && (x->kind != LIVE || !x->abandoned)) x = x->next;
    if (x) memcpy(ret_run, x->of, RUN_NAME_ROOM);
    pthread_mutex_unlock(&s->lock);
    return x != NULL;
}
