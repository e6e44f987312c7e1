/* spec_watch.c: owns the bridge files of further servers and the snapshots of all, under a lock.
 * The threads that pull.
 *
 * Each server's difference is taken by itself and then added: a sum of totals would go wrong by all
 * that a server had counted before it was started anew. */
#include "trainer/rollout/spec_watch.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct watched {
    struct bridge_file *bridge; // NULL: the trained server's, which is the caller's
    const char *path, *socket;  // of the bridge file, of the server
    struct spec_counters before;
};

struct spec_watch {
    struct http_client *http;
    int n;
    struct watched *servers; // (n), the trained one first
    pthread_mutex_t lock;    // guards what was counted, and the client
    int n_begun;             // and not ended
};

static enum status add_server(struct spec_watch *w, const char *path)
{
    struct watched *d = &w->servers[w->n++]; // freed with the rest, however far this comes
    enum status st = ST_OK;
    CHECK(bridge_file_read(path, &d->bridge));
    CHECK(bridge_file_check(d->bridge));
    d->path = d->bridge->path;
    d->socket = d->bridge->socket;
    for (int i = 0; i < w->n - 1; i++)
        if (strcmp(w->servers[i].socket, d->socket) == 0) {
            st = status_fail(
                ST_INVALID, "%s is of the same server as %s, which would count twice; name it once",
                path, w->servers[i].path);
            goto out;
        }
out:
    return st;
}

enum status spec_watch_new(const struct bridge_file *trained, struct http_client *http,
                           const char *more, struct spec_watch **ret)
{
    enum status st = ST_OK;
    size_t max = 2; // the trained one, and one more than there are commas
    for (const char *c = more; c && *c; c++) max += *c == ',';
    char *paths = strdup(more ? more : ""), *remaining = paths, *path;
    struct spec_watch *w = calloc(1, sizeof *w);
    if (w) pthread_mutex_init(&w->lock, NULL);
    if (w) w->servers = calloc(max, sizeof *w->servers);
    if (!paths || !w || !w->servers)
        FAIL(ST_NO_MEMORY, "no memory for counters of %zu servers", max);
    w->http = http;
    w->servers[w->n++] = (struct watched){.path = trained->path, .socket = trained->socket};
    while (more && (path = strsep(&remaining, ","))) {
        if (*path == '\0')
            st = status_fail(ST_INVALID, "\"%s\" names no bridge file before or behind a comma",
                             more);
        else
            st = add_server(w, path);
        if (st != ST_OK) {
            status_context(st, "--also-count");
            goto out;
        }
    }
    *ret = w;
    w = NULL;
out:
    spec_watch_free(w);
    free(paths);
    return st;
}

void spec_watch_free(struct spec_watch *w)
{
    if (!w) return;
    for (int i = 1; i < w->n; i++) bridge_file_free(w->servers[i].bridge);
    pthread_mutex_destroy(&w->lock);
    free(w->servers);
    free(w);
}

static enum status scrape(const struct spec_watch *w, int i, struct spec_counters *ret)
{
    enum status st = spec_counters_scrape(w->http, w->servers[i].socket, ret);
    if (st != ST_OK && i > 0) status_context(st, "--also-count %s", w->servers[i].path);
    return st;
}

enum status spec_watch_begin(struct spec_watch *w)
{
    enum status st = ST_OK;
    pthread_mutex_lock(&w->lock);
    for (int i = 0; w->n_begun == 0 && i < w->n; i++) CHECK(scrape(w, i, &w->servers[i].before));
    w->n_begun++;
out:
    pthread_mutex_unlock(&w->lock);
    return st;
}

enum status spec_watch_end(struct spec_watch *w, struct spec_counters *ret)
{
    enum status st = ST_OK;
    struct spec_counters sum = {0};
    pthread_mutex_lock(&w->lock);
    for (int i = 0; i < w->n; i++) {
        struct spec_counters after;
        CHECK(scrape(w, i, &after));
        const struct spec_counters step = spec_counters_between(&w->servers[i].before, &after);
        spec_counters_add(&sum, &step);
        w->servers[i].before = after;
    }
    w->n_begun--;
    *ret = sum;
out:
    pthread_mutex_unlock(&w->lock);
    return st;
}
