/* server_impl.h: the server's state, and what its endpoints do on other threads, for the files that
 * hold them. Loop's thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_SERVER_IMPL_H
#define INFER_SERVER_SERVER_IMPL_H

#include "infer-server/http/api_impl.h"
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
    bool ready_notified, draining, paused;
    int64_t drain_deadline_ns;
    int adapter_loads; // by /lora/load
    int work;          // what is under way in the thread pool and as commands of the engine
    int parsing;       // of those, bodies in the pool
    uint64_t watchdog_ms;
    int64_t watchdog_notified_ns;
};

// Endpoints: the context is the struct server.
void handle_health(void *server, struct http_request *q);
void handle_version(void *server, struct http_request *q);
void handle_models(void *server, struct http_request *q);
void handle_model(void *server, struct http_request *q);
void handle_metrics(void *server, struct http_request *q);
void handle_spec_decode_stats(void *server, struct http_request *q);

void handle_text(void *server, struct http_request *q); // which: enum api_kind

enum { TOKENIZE, DETOKENIZE, RENDER, COUNT };
void handle_tokens(void *server, struct http_request *q); // which: one of these
void handle_tokenizer_info(void *server, struct http_request *q);

void handle_bridge_info(void *server, struct http_request *q);
void handle_bridge_pause(void *server, struct http_request *q);
void handle_bridge_resume(void *server, struct http_request *q);
void handle_reload(void *server, struct http_request *q);
void handle_stop(void *server, struct http_request *q); // of rollouts

enum { ADAPTER_LOAD, ADAPTER_UNLOAD, ADAPTER_ACTIVATE, ADAPTER_DEACTIVATE };
void handle_adapter_change(void *server, struct http_request *q); // which: one of these
void handle_lora_status(void *server, struct http_request *q);

// pending.c. Whether the model is there, and with it how long a context may be.
bool server_knows_context(struct server *s);
// "ok", "loading", "torn", "draining", "failed", by the engine's statistics as they are now;
// ret_detail: a sentence (may be empty), of those or static.
const char *server_state(struct server *s, struct engine_stats *ret_stats, const char **ret_detail);
// Answers 503 and returns false where nothing is generated now.
bool server_is_open(struct server *s, struct http_request *q);

// ---- the model (served_model.c) -----------------------------------------------------------------
// What the server knows of its model before it serves: the tokenizer, the defaults of sampling, and
// what its chat template does, found out by rendering short conversations: in which form it writes
// tool calls, and whether a conversation's prompt begins with that of its turn before. At start;
// any thread.

// Reads the folder of --model into the server's `model` and `host`; it must be of the same
// tokenizer as those of --draft and --tandem-model.
enum status served_model_read(struct server *s);

// Sets the defaults: neutral ones, and over them those of a generation_config.json (NULL: none),
// where do_sample false is temperature 0. `where` names the file in errors.
enum status api_model_read_defaults(const char *where, const json_t *generation_config,
                                    struct api_model *ret);

// The form as which an earlier call, as the template renders it, parses back to the same call;
// NULL: none, or the template does not render calls.
const struct tool_form *chat_probe_tool_form(const struct chat_template *chat);

// Appends a sentence where a conversation of two turns does not begin with the tokens of the first
// turn's prompt, or does not hold its answer as it was. The prefix cache and training on several
// turns live by both. Nothing where the template does not take the conversation.
void chat_probe_repeats(const struct chat_template *chat, const struct tokenizer *tokenizer,
                        struct bytes *ret_sentence);

// ---- pending responses --------------------------------------------------------------------------
// What a request waits for on another thread: its body, where that is large (megabytes of JSON and
// text take seconds, in which the loop has others to serve) or a chat template is rendered (a
// program of somebody else's, which may take as long), a pause, a command of the engine. The
// request may go meanwhile; the pending response then ends with nobody to answer. Loop's thread,
// but for run() and pending_post().

struct pending { // embed it first in a struct of the endpoint's own
    struct inbox_message message;
    struct server *server;
    struct http_request *request; // NULL once it is gone
    struct http_body body;        // the request's
    struct status_kept status;    // what it came to, with a sentence also where it succeeded
    uint64_t version;             // of the weights, behind a command of the engine
    // Any thread. Owns the pending response meanwhile, and reads beside it only what nobody changes
    // as long as the server lives (the tokenizer, the chat template): neither request nor server.
    enum status (*run)(struct pending *pending);
    void (*done)(struct pending *pending); // answers the request, where it is there yet, and frees
                                           // the pending response
    uv_work_t work;
    bool parsing; // in the pool, counted in the server's `parsing`
};

// `size` bytes, all else zero; its done() is called exactly once, unless it is freed before it
// begins. NULL: the request was answered with a failure.
void *pending_new(struct server *s, struct http_request *q, size_t size,
                  void (*done)(struct pending *pending));
void pending_free(struct pending *j); // that never began; the request is there yet

// Calls run(), at once where the body is small and nothing is rendered, else in libuv's thread
// pool, first come, first served. As many wait there as the engine takes samples, --max-batch +
// --max-queue: ST_BUSY beyond. Not run where the client leaves before its turn.
void pending_parse(struct pending *j, bool renders, enum status (*run)(struct pending *pending));
void pending_block(struct pending *j,
                   enum status (*run)(struct pending *pending)); // in the pool: it may wait
// From any thread, instead of run(): the pending response came to pending->status.
void pending_post(struct pending *j);

// endpoints_bridge.c. engine_done_fn, of any thread: what a command came to. The context is the
// pending response.
void pending_command_done(void *context, enum status st, const char *sentence, uint64_t version);
// The fields of its body, which may be empty, by the table; borrowed from *ret_object
// (json_decref).
enum status pending_read_fields(const struct pending *j, enum body kind, struct api_request *ret,
                                json_t **ret_object);
// Tells the client what it failed of. field, what: that name a folder, in the request and in the
// log, whose files do not parse: they may be any that this process can read, which a client of the
// socket or the key need not be able to, so that their bytes, which the sentence quotes, go to the
// log only. NULL: it quotes none.
void pending_fail(const struct pending *j, const char *field, const char *what);

#endif
