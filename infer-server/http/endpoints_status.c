/* endpoints_status.c: /health, /version, /v1/models, /metrics, /v1/spec_decode_stats. Loop's
 * thread; the engine's numbers are a snapshot (engine_stats), so that they are there however busy
 * the engine is.
 */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/server_impl.h"
#include "common/base/dtype.h"
#include "common/base/clock.h"
#include "common/base/options.h"

#include <string.h>

void handle_health(void *server, struct http_request *q)
{
    struct server *s = server;
    struct engine_stats stats;
    const char *detail, *state = server_state(s, &stats, &detail);
    bool ok = strcmp(state, "ok") == 0;
    if (!ok) http_header(q, "Retry-After", "1");
    json_t *health = json_pack(
        "{s:s, s:I, s:o, s:o, s:b, s:i, s:i, s:i, s:f}", "status", state, "weight_version",
        (json_int_t)stats.weight_version, "model", json_clean_string(s->model.name), "state_detail",
        json_clean_string(detail), "paused", (int)s->paused, "running", stats.running, "waiting",
        stats.waiting, "max_context", s->model.max_context, "uptime_seconds",
        clock_ms_since(s->start_ns) / 1e3);
    json_object_set_new(health, "warning", json_clean_string(stats.weights_warning));
    http_reply_json(q, ok ? 200 : 503, health);
}

void handle_version(void *server, struct http_request *q)
{
    (void)server;
    http_reply_json(
        q, 200, json_pack("{s:s, s:s}", "version", COMMONWEIGHT_VERSION, "server", "commonweight"));
}

// A client that reads a context of 0 would find that nothing fits.
static bool has_models(struct server *s, struct http_request *q)
{
    if (server_knows_context(s)) return true;
    http_fail(q, 503, "the model is being loaded; try again later");
    return false;
}

static void add_card(json_t *cards, const struct server *s, const char *id, const char *folder,
                     const char *parent)
{
    json_array_append_new(cards, json_pack("{s:o, s:s, s:I, s:s, s:o, s:o, s:i}", "id",
                                           json_clean_string(id), "object", "model", "created",
                                           (json_int_t)s->start_s, "owned_by", "commonweight",
                                           "root", json_clean_string(folder), "parent",
                                           parent ? json_clean_string(parent) : json_null(),
                                           "max_model_len", s->model.max_context));
}

// The model's own first: where it is called as the frozen one, the name is its own.
static json_t *model_cards(const struct server *s)
{
    struct adapter_info list[ADAPTERS_MAX];
    const int n = engine_adapters(s->engine, list);
    json_t *cards = json_array();
    add_card(cards, s, s->model.name, s->model.folder, NULL);
    if (s->model.frozen) add_card(cards, s, API_FROZEN, s->options->engine.frozen_folder, NULL);
    for (int i = 0; i < n; i++) add_card(cards, s, list[i].name, list[i].folder, s->model.name);
    return cards;
}

void handle_models(void *server, struct http_request *q)
{
    struct server *s = server;
    if (has_models(s, q))
        http_reply_json(q, 200, json_pack("{s:s, s:o}", "object", "list", "data", model_cards(s)));
}

// A slash at the end changes nothing.
static bool is_named(const char *id, const char *name)
{
    const size_t n = strlen(name);
    return strncmp(id, name, n) == 0 && id[n + strspn(id + n, "/")] == 0;
}

void handle_model(void *server, struct http_request *q)
{
    struct server *s = server;
    const char *id = http_path_tail(q);
    size_t i;
    if (!has_models(s, q)) return;
    json_t *cards = model_cards(s), *card, *found = NULL;
    if (is_named(id, s->model.folder)) id = s->model.name;
    json_array_foreach (cards, i, card)
        if (!found && is_named(id, json_string_value(json_object_get(card, "id")))) found = card;
    if (found)
        http_reply_json(q, 200, json_incref(found));
    else
        http_fail(q, 404, "\"model\" is '%s'; this server has '%s', and what else /v1/models lists",
                  CUT(id, 200), CUT(s->model.name, 200));
    json_decref(cards);
}

void handle_metrics(void *server, struct http_request *q)
{
    struct server *s = server;
    struct engine_stats stats;
    struct bytes text = BYTES_INIT;
    struct adapter_info adapters[ADAPTERS_MAX];
    engine_stats(s->engine, &stats);
    const int n_adapters = engine_adapters(s->engine, adapters);
    const struct engine_options *o = &s->options->engine;
    const struct metrics_info info = {.model = s->model.name,
                                      .kv_dtype =
                                          o->dtype < 0 ? "auto" : dtype_name((enum dtype)o->dtype),
                                      .prefix_cache = !o->prefix_cache_off,
                                      .engine = &stats,
                                      .adapters = adapters,
                                      .n_adapters = n_adapters,
                                      .max_adapters = (int)o->max_adapters,
                                      .paused = s->paused,
                                      .draining = s->draining,
                                      .open_requests = http_open_requests(s->http)};
    metrics_write(&s->metrics, &info, &text);
    http_reply(q, 200, "text/plain; version=0.0.4; charset=utf-8", &text);
}

// The next of the request's samples after `after` (NULL: the first), in the order they ended; NULL:
// no more.
static const struct spec_window_entry *spec_window_find(const struct metrics *m,
                                                        const char *request_id,
                                                        const struct spec_window_entry *after)
{
    const struct spec_window *w = &m->ended;
    const uint64_t oldest = w->n > SPEC_WINDOW_SAMPLES ? w->n - SPEC_WINDOW_SAMPLES : 0;
    bool found = !after;
    for (uint64_t i = oldest; i < w->n; i++) {
        const struct spec_window_entry *e = &w->entries[i % SPEC_WINDOW_SAMPLES];
        if (found && strcmp(e->request_id, request_id) == 0) return e;
        found |= e == after;
    }
    return NULL;
}

static void put_samples(struct json_out *o, const struct server *s,
                        const struct spec_window_entry *e)
{
    const char *id = e->request_id;
    json_out_text(o, "id", id);
    json_out_open(o, "samples", '[');
    for (; e; e = spec_window_find(&s->metrics, id, e)) {
        json_out_open(o, NULL, '{');
        json_out_int(o, "index", e->choice);
        json_out_int(o, "generated_tokens", e->telemetry.generated_tokens);
        put_draft_counts(o, &e->telemetry.drafts);
        json_out_close(o, '}');
    }
    json_out_close(o, ']');
}

// Totals since the start, as the engine verified them; with ?id= those of a finished request.
void handle_spec_decode_stats(void *server, struct http_request *q)
{
    struct server *s = server;
    struct engine_stats stats;
    struct bytes body = BYTES_INIT;
    struct json_out out = {&body, false}, *o = &out;
    const char *id = http_query(q, "id");
    char method[64];
    if (!http_takes_only(q, OPTION_WORDS("id"))) return;
    const struct spec_window_entry *e = id ? spec_window_find(&s->metrics, id, NULL) : NULL;
    if (id && !e) {
        http_fail(q, 404, "\"id\": none of the %d samples that ended last is of request \"%s\"",
                  SPEC_WINDOW_SAMPLES, CUT(id, 48));
        return;
    }
    engine_stats(s->engine, &stats);
    json_out_open(o, NULL, '{');
    if (e) {
        put_samples(o, s, e);
    } else {
        speculative_write(stats.speculative, method);
        json_out_text(o, "method", method);
        json_out_int(o, "num_speculative_tokens", speculative_max(stats.speculative));
        put_draft_counts(o, &stats.drafts);
        json_out_uint(o, "generated_tokens", stats.generated_tokens);
        json_out_uint(o, "weight_version", stats.weight_version);
    }
    json_out_close(o, '}');
    bytes_puts(&body, "\n");
    http_reply(q, 200, "application/json", &body);
}
