/* spec_watch.c: owns the connections to further daemons and the snapshots of all. The trainer's
 * thread.
 *
 * Each daemon's difference is taken by itself and then added: a sum of totals would go wrong by all
 * that a daemon had counted before it was started anew. */
#include "trainer/run/spec_watch.h"

#include <stdlib.h>
#include <string.h>

struct watched {
    struct bridge_file *bridge; // NULL: the trained daemon's, which is the caller's
    const char *path, *socket;  // of the bridge file, of the daemon
    struct http_client *http;
    struct spec_counters before;
};

struct spec_watch {
    int n;
    struct watched *daemons; // (n), the trained one first
};

static enum status add_daemon(struct spec_watch *w, const char *path)
{
    struct watched *d = &w->daemons[w->n++]; // freed with the rest, however far this comes
    enum status st;
    CHECK(bridge_file_read(path, &d->bridge));
    CHECK(bridge_file_check(d->bridge));
    d->path = d->bridge->path;
    d->socket = d->bridge->socket;
    for (int i = 0; i < w->n - 1; i++)
        if (strcmp(w->daemons[i].socket, d->socket) == 0) {
            st = status_fail(
                ST_INVALID, "%s is of the same daemon as %s, which would count twice; name it once",
                path, w->daemons[i].path);
            goto out;
        }
    CHECK(http_client_new(d->socket, &d->http));
out:
    return st;
}

enum status spec_watch_new(const struct bridge_file *trained, struct http_client *http,
                           const char *more, struct spec_watch **ret)
{
    enum status st = ST_OK;
    size_t most = 2;
    for (const char *c = more; c && *c; c++) most += *c == ',';
    char *paths = strdup(more ? more : ""), *rest = paths, *path;
    struct spec_watch *w = calloc(1, sizeof *w);
    if (w) w->daemons = calloc(most, sizeof *w->daemons);
    if (!paths || !w || !w->daemons) {
        st = status_fail(ST_NO_MEMORY, "no memory for counters of %zu daemons", most);
        goto out;
    }
    w->daemons[w->n++] =
        (struct watched){.path = trained->path, .socket = trained->socket, .http = http};
    while (more && (path = strsep(&rest, ","))) {
        if (*path == '\0')
            st = status_fail(ST_INVALID, "\"%s\" names no bridge file before or behind a comma",
                             more);
        else
            st = add_daemon(w, path);
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
    for (int i = 1; i < w->n; i++) {
        http_client_free(w->daemons[i].http);
        bridge_file_free(w->daemons[i].bridge);
    }
    free(w->daemons);
    free(w);
}

static enum status scrape(const struct spec_watch *w, int i, struct spec_counters *ret)
{
    enum status st = spec_counters_scrape(w->daemons[i].http, ret);
    if (st != ST_OK && i > 0) status_context(st, "--also-count %s", w->daemons[i].path);
    return st;
}

enum status spec_watch_begin(struct spec_watch *w)
{
    enum status st = ST_OK;
    for (int i = 0; i < w->n; i++) CHECK(scrape(w, i, &w->daemons[i].before));
out:
    return st;
}

enum status spec_watch_end(struct spec_watch *w, struct spec_counters *ret)
{
    enum status st = ST_OK;
    struct spec_counters sum = {0};
    for (int i = 0; i < w->n; i++) {
        struct spec_counters after;
        CHECK(scrape(w, i, &after));
        const struct spec_counters step = spec_counters_between(&w->daemons[i].before, &after);
        spec_counters_add(&sum, &step);
    }
    *ret = sum;
out:
    return st;
}
