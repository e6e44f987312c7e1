/* spec_counters.c: counters of speculative decoding, read from Prometheus' text format, under
 * vLLM's names (vllm/v1/spec_decode/metrics.py); and the watch over several servers, which owns
 * their bridge files and the snapshots of all, under a lock. The threads that pull.
 *
 * Each server's difference is taken by itself and then added: a sum of totals would go wrong by all
 * that a server had counted before it was started anew. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/rollout/spec_counters.h"
#include "bridge/bridge_file.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define PREFIX     "vllm:spec_decode_"
#define TIMEOUT_MS 10000

// The value of a label inside "{...}" as a position; -1: there is none.
static int position_of(const char *labels, size_t len)
{
    static const char key[] = "position=\"";
    const char *at = memmem(labels, len, key, sizeof key - 1);
    if (!at) return -1;
    at += sizeof key - 1;
    char *end;
    long position = strtol(at, &end, 10);
    return end == at || *end != '"' || position < 0 || position >= SPEC_MAX_POSITIONS
               ? -1
               : (int)position;
}

static void take_line(struct spec_counters *c, const char *line, size_t len)
{
    static const char *const names[] = {"num_drafts_total", "num_draft_tokens_total",
                                        "num_accepted_tokens_total",
                                        "num_accepted_tokens_per_pos_total"};
    if (len <= sizeof PREFIX || memcmp(line, PREFIX, sizeof PREFIX - 1) != 0) return;
    const char *name = line + sizeof PREFIX - 1, *end = line + len;
    size_t name_len = strcspn(name, "{ \n");
    const char *labels = name + name_len, *value = labels;
    if (*labels == '{') {
        const char *close = memchr(labels, '}', (size_t)(end - labels));
        if (!close) return;
        value = close + 1;
    }
    char *after;
    double x = strtod(value, &after);
    if (after == value || after > end || !isfinite(x)) return;
    for (int i = 0; i < 4; i++) { // in the order of `all`
        if (strlen(names[i]) != name_len || memcmp(names[i], name, name_len) != 0) continue;
        const int position = i == 3 ? position_of(labels, (size_t)(value - labels)) : 0;
        if (position < 0) return;
        c->present |= i < 3;
        c->all[i + position] += x;
        if (i == 3 && position >= c->n_positions) c->n_positions = position + 1;
    }
}

void spec_counters_parse(const char *text, struct spec_counters *ret)
{
    struct spec_counters c = {0};
    while (*text) {
        size_t len = strcspn(text, "\n");
        take_line(&c, text, len);
        text += len + (text[len] == '\n');
    }
    *ret = c;
}

struct spec_counters spec_counters_between(const struct spec_counters *before,
                                           const struct spec_counters *after)
{
    struct spec_counters c = *after;
    c.present = before->present && after->present;
    for (int i = 0; i < 3 + SPEC_MAX_POSITIONS; i++) {
        c.all[i] -= before->all[i];
        c.present &= i >= 3 || c.all[i] >= 0;
    }
    return c;
}

void spec_counters_add(struct spec_counters *sum, const struct spec_counters *more)
{
    if (!more->present) return;
    sum->present = true;
    if (more->n_positions > sum->n_positions) sum->n_positions = more->n_positions;
    for (int i = 0; i < 3 + more->n_positions; i++) sum->all[i] += more->all[i];
}

double spec_acceptance_length(const struct spec_counters *c)
{
    return c->num_drafts > 0 ? 1 + c->num_accepted_tokens / c->num_drafts : NAN;
}

double spec_acceptance_rate(const struct spec_counters *c)
{
    return c->num_draft_tokens > 0 ? c->num_accepted_tokens / c->num_draft_tokens : NAN;
}

double spec_acceptance_at(const struct spec_counters *c, int position)
{
    return c->num_drafts > 0 ? c->accepted_per_position[position] / c->num_drafts : NAN;
}

// ---- the watch ----------------------------------------------------------------------------------

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
        if (strcmp(w->servers[i].socket, d->socket) == 0)
            FAIL(ST_INVALID,
                 "%s is of the same server as %s, which would count twice; name it once", path,
                 w->servers[i].path);
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
        if (!*path)
            FAIL(ST_INVALID, "--also-count: \"%s\" names no bridge file before or behind a comma",
                 more);
        CHECK(status_context(add_server(w, path), "--also-count"));
    }
    *ret = TAKE_PTR(w);
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

// One that has no such counters, or no /metrics, is no error: not `present`.
static enum status scrape(const struct spec_watch *w, int i, struct spec_counters *ret)
{
    struct bytes body = BYTES_INIT;
    const struct http_call call = {
        .server = w->servers[i].socket, .path = "/metrics", .timeout_ms = TIMEOUT_MS};
    enum status st = http_perform(w->http, &call, &body);
    if (st != ST_OK && st != ST_PEER_GONE && st != ST_NO_MEMORY) { // it answers, but not this
        bytes_clear(&body);
        st = ST_OK;
    }
    if (st == ST_OK)
        spec_counters_parse(bytes_text(&body), ret);
    else if (i > 0)
        status_context(st, "--also-count %s", w->servers[i].path);
    bytes_release(&body);
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
