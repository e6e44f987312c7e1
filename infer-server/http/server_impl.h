/* server_impl.h: the server's state, for the files that hold its endpoints. Loop's thread. */
#ifndef INFER_SERVER_SERVER_IMPL_H
#define INFER_SERVER_SERVER_IMPL_H

#include "infer-server/http/response.h"
#include "infer-server/http/server.h"

struct server {
    const struct server_options *options;
    uv_loop_t loop;
    struct http *http;
    struct engine *engine;
    struct generation_host host;
    struct metrics metrics;
    struct unknown_fields unknown;
    struct tokenizer *tokenizer;
    uint8_t *token_ends; // (its vocabulary) tandem.h; NULL without a frozen model
    struct chat_template *chat;
    struct api_model model;
    char why_no_chat[512];
    char model_name[256];
    int64_t start_s, start_ns;

    uv_timer_t tick;
    uv_signal_t signals[4];
    enum engine_state seen_state;
    bool ready_told, draining, paused;
    int64_t drain_deadline_ns;
    int adapter_loads; // by /lora/load
    int work;          // thread-pool jobs and engine commands under way
    int parsing;       // of those, bodies in the pool
    uint64_t watchdog_ms;
    int64_t watchdog_told_ns;
};

// Endpoints: the context is the struct server.
void handle_health(void *server, struct http_request *q);
void handle_version(void *server, struct http_request *q);
void handle_models(void *server, struct http_request *q);
void handle_model(void *server, struct http_request *q);
void handle_metrics(void *server, struct http_request *q);
void handle_spec_decode_stats(void *server, struct http_request *q);

void handle_text(void *server, struct http_request *q); // which: enum api_kind
void handle_stop(void *server, struct http_request *q);

enum { TOKENIZE, DETOKENIZE };
void handle_tokens(void *server, struct http_request *q); // which: one of these
void handle_tokenizer_info(void *server, struct http_request *q);

void handle_bridge_info(void *server, struct http_request *q);
void handle_bridge_pause(void *server, struct http_request *q);
void handle_bridge_resume(void *server, struct http_request *q);
void handle_reload(void *server, struct http_request *q);

enum { ADAPTER_LOAD, ADAPTER_UNLOAD, ADAPTER_ACTIVATE, ADAPTER_DEACTIVATE };
void handle_adapter_change(void *server, struct http_request *q); // which: one of these
void handle_lora_status(void *server, struct http_request *q);

// Whether the model is there, and with it how long a context may be.
bool server_knows_context(struct server *s);
// "ok", "loading", "torn", "draining", "failed", by the engine's statistics as they are now;
// ret_detail: a sentence (may be empty), of those or static.
const char *server_state(struct server *s, struct engine_stats *ret_stats, const char **ret_detail);
// Answers 503 and returns false where nothing is generated now.
bool server_is_open(struct server *s, struct http_request *q);

#endif
