/* main.c: cw-infer-server. Reads options, takes the socket (so that a second server is refused
 * before it loads anything), and runs the server. Main thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "common/base/dtype.h"
#include "common/http/listen.h"
#include "common/model/model_folder.h"
#include "infer-server/engine/engine.h"
#include "infer-server/weights/group.h"
#include "infer-server/http/server.h"
#include "infer-server/http/tool_calls.h"
#include "kernels/device.h"

#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#define OWN_FILES 128 // descriptors beside those of connections
#define HOSTS_MAX 64  // names in --allowed-hosts

struct config {
    struct server_options server;
    const char *config, *speculative, *socket, *listen, *api_key_file, *allowed_hosts, *bridge,
        *kv_memory;
    enum log_level log_level;
    int dtype; // dtype_option_names
    int64_t tensor_parallel;
    char **argv; // of this program
};

#define OPTIONS_OF struct config
#define TEXT(x)    #x
#define TEXT_OF(x) TEXT(x)

static const struct option_spec table[] = {
    OPT_TEXT("model", server.engine.model_folder, NULL, "DIR",
             "Hugging Face model folder (needed)"),
    OPT_TEXT("device", server.engine.device, "auto", "auto|cpu|cuda:N", "where the model runs"),
    OPT_CHOICE("dtype", dtype, "auto", dtype_option_names,
               "of weights and activations; auto: bf16 on CUDA, f32 on the CPU"),
    OPT_CHOICE("quantization", server.engine.quantization, "none", quantization_names,
               "of what is multiplied; fp8-weights: the matrices of the layers in e4m3, in server "
               "and trainer; fp8: the rows that they are multiplied with, too; mxfp4: experts of a "
               "folder that stores them so, which adapters alone are trained beside "
               "(docs/use/fp8.md)"),
    OPT_CHOICE(
        "kv-cache-dtype", server.engine.kv_cache, "auto", kv_cache_names,
        "of keys and values in the cache; auto: as they are computed; fp8: e4m3, with a scale "
        "for each token and KV head, in server and trainer (docs/use/fp8.md)"),
    OPT_TEXT("chat-template", server.chat_template.name, NULL, "NAME",
             "which of the folder's named chat templates (default: default, with tools tool_use)"),
    OPT_TEXT("chat-template-file", server.chat_template.file, NULL, "FILE",
             "Jinja chat template to use instead of the folder's"),
    OPT_CHOICE(
        "tool-call-parser", server.tool_parser, "auto", tool_parser_names,
        "form in which the model calls tools in a chat; auto: the one that the chat template "
        "writes earlier calls in; off: calls stay text"),
    OPT_TEXT("served-model-name", server.model_name, NULL, "NAME",
             "name in /v1/models (default: the folder's)"),
    OPT_TEXT("draft", server.engine.draft_folder, NULL, "DIR",
             "folder of a smaller model of the same tokenizer, which drafts"),
    OPT_TEXT(
        "tandem-model", server.engine.frozen_folder, NULL, "DIR",
        "folder of a model of the same tokenizer that is never trained, and answers requests that "
        "name it (\"frozen\"), or writes rollouts together with the other where they ask for that "
        "(\"tandem\"); may be --model's"),
    OPT_TEXT("speculative", speculative, "off", "METHOD:K",
             "drafts of at most K tokens a step: off, or one or several of ngram[:5], suffix[:8], "
             "draft_model[:5], mtp[:3] with commas between them"),
    OPT_CHOICE("draft-length", server.engine.speculative_fixed, "adaptive",
               OPTION_WORDS("adaptive", "fixed"),
               "drafts of a step: as many as pay, by measured time and acceptance, or always as "
               "many as there are: slower, but acceptance is then counted on all of a sample"),
    OPT_INT(
        "draft-vocabulary", server.engine.draft_vocabulary, "0", "N", 0, 1 << 24,
        "mtp and draft_model draft the first N tokens of the vocabulary alone, and read so many "
        "rows of the head; 0: all"),
    OPT_HEADING("Sockets"),
    OPT_TEXT("socket", socket, NULL, "PATH",
             "Unix socket (default: $XDG_RUNTIME_DIR/commonweight/server.sock, else "
             "/run/commonweight/...)"),
    OPT_TEXT("listen", listen, NULL, "HOST:PORT",
             "listen on TCP too; off loopback only with --api-key-file"),
    OPT_TEXT("api-key-file", api_key_file, NULL, "FILE",
             "its first line is the key, 8 characters or more, that TCP clients must send"),
    OPT_TEXT("allowed-hosts", allowed_hosts, NULL, "NAME,NAME",
             "names and addresses, beside loopback's and that of --listen, by which TCP clients "
             "without a key may call this server (their Host and Origin headers)"),
    OPT_TEXT("bridge", bridge, NULL, "PATH",
             "bridge file to write (default: bridge.json beside the default socket)"),
    OPT_INT("max-connections", server.http.max_connections, "1024", "N", 1, 65536,
            "open connections, each socket"),
    OPT_SIZE("max-body", server.http.max_body, "8M", 1024, 1 << 30, "largest request body"),
    OPT_SIZE("max-buffered", server.http.max_buffered, "0", 0, 0,
             "all request bodies in memory together, more get 429; 0: 32 times --max-body"),
    OPT_INT("idle-timeout", server.http.idle_timeout_s, "120", "S", 1, 86400,
            "closes a connection on which nothing moves"),
    OPT_INT("request-timeout", server.http.request_timeout_s, "3600", "S", 1, 604800,
            "longest time for one answer"),
    OPT_INT("drain-timeout", server.drain_timeout_s, "30", "S", 0, 86400,
            "time for requests under way to end after SIGTERM"),
    OPT_CHOICE(
        "unknown-fields", server.accept_unknown, "refuse", OPTION_WORDS("refuse", "warn"),
        "fields of requests that docs/use/protocol.md does not list: 400, or a line in the log"),
    OPT_HEADING("Engine"),
    OPT_INT("max-batch", server.engine.max_batch, TEXT_OF(ENGINE_MAX_BATCH), "N", 1, 4096,
            "sequences decoded at once"),
    OPT_INT("max-context", server.engine.max_context, "0", "N", 0, 1 << 24,
            "tokens of prompt and completion; 0: the model's, as memory allows"),
    OPT_INT("max-queue", server.engine.max_queue, TEXT_OF(ENGINE_MAX_QUEUE), "N", 1, 1 << 20,
            "samples waiting beyond those; more get 429"),
    OPT_INT("prefill-chunk", server.engine.prefill_chunk, TEXT_OF(ENGINE_PREFILL_CHUNK), "N", 1,
            1 << 20, "max. prompt tokens in one step"),
    OPT_INT("block-size", server.engine.block_size, TEXT_OF(ENGINE_BLOCK_SIZE), "N", 1, 1024,
            "tokens of one KV block"),
    OPT_TEXT(
        "kv-memory", kv_memory, "0%", "SIZE|PERCENT",
        "for the KV cache: 4G, or 80% of what is free after the weights; 0%: the device's default"),
    OPT_INT("max-adapters", server.engine.max_adapters, "0", "N", 0, ADAPTERS_MAX,
            "room for so many LoRA adapters beside the model, for requests that name one"),
    OPT_INT("max-lora-rank", server.engine.max_lora_rank, "64", "R", 1, 1024,
            "largest rank of an adapter"),
    OPT_CHOICE("kv-policy", server.engine.kv_policy, "keep", kv_policy_names,
               "what a weight update does to the KV cache of requests in flight"),
    OPT_CHOICE("prefix-cache", server.engine.prefix_cache_off, "on", OPTION_WORDS("on", "off"),
               "prompts begin with what earlier requests computed of the same tokens"),
    OPT_INT("tensor-parallel-size", tensor_parallel, "1", "N", 1, 64,
            "shares the model among N processes, which this one starts, each with a GPU of this "
            "host: of every layer each computes some heads and some of the MLP"),
    OPT_FLAG("expert-parallel", server.engine.expert_parallel, NULL,
             "each of these processes holds some of the experts, whole, instead of a part of each "
             "(docs/use/scaling.md)",
             NEEDS("tensor-parallel-size>1", "whose processes share the experts")),
    OPT_CHOICE(
        "step-ahead", server.engine.step_ahead, "auto", OPTION_WORDS("auto", "on", "off"),
        "launches a step while the one before it is computed, where nothing in it depends on "
        "the tokens that are coming: the same tokens, sooner on a GPU; auto: there"),
    OPT_FLAG("exact", server.engine.exact, NULL,
             "a request's tokens and log-probabilities have the same bits whatever else is served, "
             "drafted or was before: on the CPU, and in bf16 on a Hopper GPU; a "
             "draft model's drafts then follow no clock"),
    OPT_FLAG("inference-only", server.engine.inference_only, NULL,
             "nobody trains the weights: no trainer may attach, and with --quantization the "
             "matrices of the layers are held in e4m3 alone"),
    OPT_HEADING("General"),
    OPT_CHOICE("log-level", log_level, "info", log_level_names, "what is logged"),
    OPT_CONFIG,
    // vLLM's
    OPT_FOREIGN(OPTION_WORDS("max-model-len: --max-context", "max-num-seqs: --max-batch",
                             "max-num-batched-tokens: --prefill-chunk",
                             "gpu-memory-utilization: --kv-memory, a size or a percentage",
                             "enable-prefix-caching: --prefix-cache",
                             "no-enable-prefix-caching: --prefix-cache off",
                             "tokenizer: --model's folder has it",
                             "trust-remote-code: nothing: no code of a folder is run",
                             "enable-expert-parallel: --expert-parallel",
                             "pipeline-parallel-size: --tensor-parallel-size is what there is",
                             "data-parallel-size: a server each; cw-trainer --gpus starts them",
                             "async-scheduling: --step-ahead",
                             "enable-chunked-prefill: --prefill-chunk, as prompts always go",
                             "num-speculative-tokens: --speculative METHOD:K",
                             "enforce-eager: nothing: captured steps give the same bits",
                             "generation-config: --model's folder has it",
                             "load-format: nothing: a folder's files say what they are",
                             "reasoning-parser: nothing: what a model thinks stays in its text",
                             "revision: nothing: --model's folder is of one",
                             "swap-space: nothing: what is preempted is computed again",
                             "seed: nothing: each request has its \"seed\"",
                             "enable-auto-tool-choice: --tool-call-parser, auto unless it is given",
                             "enable-lora: --max-adapters above 0",
                             "lora-modules: --max-adapters; POST /v1/load_lora_adapter loads one",
                             "max-loras: --max-adapters",
                             "speculative-config: --speculative, and --draft for a draft model",
                             "host: --listen HOST:PORT", "port: --listen HOST:PORT",
                             "api-key: --api-key-file", "uds: --socket")),
    OPT_END,
};

static enum status read_kv_memory(const char *text, struct engine_options *ret)
{
    char *end;
    size_t n = strlen(text);
    if (n > 0 && text[n - 1] == '%') {
        double percent = strtod(text, &end);
        if (end != text + n - 1 || !(percent >= 0 && percent <= 100))
            return status_fail(ST_INVALID, "--kv-memory %s: give 0%% to 100%%, or a size as 4G",
                               text);
        ret->kv_percent = percent;
        return ST_OK;
    }
    int64_t bytes;
    enum status st = options_size(text, &bytes);
    if (st != ST_OK)
        return status_fail(st, "--kv-memory: %s; or a percentage, as 80%%", status_message());
    if (bytes == 0) return status_fail(ST_INVALID, "--kv-memory 0: give a size above 0, or 0%%");
    ret->kv_bytes = bytes;
    return ST_OK;
}

static enum status check_usage(void *context, struct option_set *set)
{
    struct config *c = context;
    const struct http_options *http = &c->server.http;
    char host[256], port[16];
    enum status st;
    CHECK(options_check(set, c));
    if (!c->server.engine.model_folder)
        return status_fail(ST_INVALID, "--model DIR is needed: a Hugging Face model folder");
    if (http->max_buffered && http->max_buffered < http->max_body)
        return status_fail(ST_INVALID,
                           "--max-buffered %lld is below --max-body %lld: no body of that size "
                           "would ever be taken",
                           (long long)http->max_buffered, (long long)http->max_body);
    if (c->listen) CHECK(tcp_split("--listen", c->listen, host, port));
    CHECK(read_kv_memory(c->kv_memory, &c->server.engine));
    struct engine_options *engine = &c->server.engine;
    CHECK(status_context(speculative_parse(c->speculative, &engine->speculative), "--speculative"));
    if (engine->speculative.k[SPECULATIVE_DRAFT_MODEL] && !engine->draft_folder)
        st = status_fail(ST_INVALID, "--speculative: draft_model needs --draft DIR, the draft "
                                     "model's folder");
out:
    return st;
}

// Clients of a bridge run in other folders: what stands in the bridge file must be absolute.
static enum status choose_path(const char *given, const char *name, char ret[PATH_MAX])
{
    char path[PATH_MAX];
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    const bool own = runtime && *runtime;
    if (given) return path_absolute(given, ret, PATH_MAX);
    snprintf(path, sizeof path, "%s/commonweight/%s", own ? runtime : "/run", name);
    return path_absolute(path, ret, PATH_MAX);
}

// Each socket may have as many as were asked for, or what there is room for beside the server's own
// files.
static void fit_connections(const struct config *c, int64_t *max_connections)
{
    const long long asked = *max_connections;
    int64_t files;
    if (limit_connections(c->listen ? 2 : 1, OWN_FILES, max_connections, &files))
        log_warn("--max-connections %lld: this process may open %lld files (ulimit -Hn, "
                 "LimitNOFILE=), so that each socket takes %lld connections",
                 asked, (long long)files, (long long)*max_connections);
}

// The names of --allowed-hosts and the host of --listen. `names` is cut into pieces, which the list
// borrows, as it does `host`.
static enum status list_hosts(char *names, const char *host, const char *ret[HOSTS_MAX + 2])
{
    int n = 0;
    char *remaining = NULL;
    if (*host) ret[n++] = host;
    for (char *name = strtok_r(names, ", ", &remaining); name;
         name = strtok_r(NULL, ", ", &remaining)) {
        if (n > HOSTS_MAX)
            return status_fail(ST_INVALID, "--allowed-hosts: more than %d names", HOSTS_MAX);
        ret[n++] = name;
    }
    ret[n] = NULL;
    return ST_OK;
}

static enum status listen_tcp(const struct config *c, struct server_options *o, char host[256])
{
    int port = 0;
    const char *key = o->http.api_key ? " (API key needed)" : "";
    enum status st = tcp_listen("--listen", c->listen, o->http.api_key ? NULL : "--api-key-file",
                                host, &o->tcp_fd, &port);
    if (st == ST_OK) log_info("listening on %s, port %d%s", c->listen, port, key);
    return st;
}

// Which of the processes this is that share the model.
static enum status find_rank(const struct config *c, struct ranks *ret)
{
    const int n = (int)c->tensor_parallel;
    struct ranks who;
    if (n == 1) return ST_OK; // nobody else's numbers are its business
    enum status st = ranks_find(-1, 0, &who);
    if (st != ST_OK) return st;
    if (who.counted && who.size != n)
        return status_fail(ST_INVALID,
                           "--tensor-parallel-size %d: %s started %d processes, and %d share the "
                           "model; start as many, or one alone, which then starts the others",
                           n, who.source, who.size, n);
    *ret = who;
    return ST_OK;
}

static enum status serve(void *context)
{
    const struct config *c = context;
    bool alone = false;
    enum status st;
    char socket_path[PATH_MAX], bridge_path[PATH_MAX], host[256] = "";
    char *key = NULL, *names = strdup(c->allowed_hosts ? c->allowed_hosts : "");
    const char *hosts[HOSTS_MAX + 2];
    if (!names) return status_fail(ST_NO_MEMORY, "out of memory");
    struct unix_listener socket = {.fd = -1, .lock_fd = -1};
    struct server_options o = c->server;
    log_open("cw-infer-server", c->log_level);
    char found[3][PATH_ROOM];
    const char **folders[] = {&o.engine.model_folder, &o.engine.draft_folder,
                              &o.engine.frozen_folder};
    for (int i = 0; i < 3; i++) {
        if (!*folders[i]) continue;
        CHECK(model_folder_find(*folders[i], found[i]));
        *folders[i] = found[i];
    }
    o.engine.dtype = c->dtype - 1;
    o.unix_fd = o.tcp_fd = -1;
    if (!o.http.max_buffered) o.http.max_buffered = 32 * o.http.max_body;
    fit_connections(c, &o.http.max_connections);
    CHECK(choose_path(c->socket, "server.sock", socket_path));
    CHECK(choose_path(c->bridge, "bridge.json", bridge_path));
    o.engine.bridge_path = bridge_path;
    CHECK(find_rank(c, &o.engine.who));
    if (c->tensor_parallel > 1 && !o.engine.who.counted) {
        st = group_start((int)c->tensor_parallel, o.engine.device, c->argv + 1);
        goto out;
    }
    if (o.engine.who.rank > 0) {
        st = follower_run(&o.engine);
        goto out;
    }
    alone = o.engine.who.counted; // until server_run()
    if (c->api_key_file) CHECK(api_key_read("--api-key-file", c->api_key_file, &key));
    st = unix_listen(socket_path, &socket);
    if (st == ST_IO && !c->socket)
        FAIL(st, "%s; give --socket and --bridge, or set XDG_RUNTIME_DIR to a folder of this user",
             status_message());
    CHECK(st);
    log_info("listening on %s", socket_path);
    o.http.api_key = key;
    if (c->listen) CHECK(listen_tcp(c, &o, host));
    if (*names && (key || !c->listen))
        log_warn("--allowed-hosts %s: nothing to allow: %s", c->allowed_hosts,
                 key ? "requests are told by their key" : "there is no --listen");
    CHECK(list_hosts(names, host, hosts));
    o.http.allowed_hosts = hosts;
    o.engine.socket_path = socket_path;
    o.unix_fd = socket.fd;
    socket.fd = -1;
    alone = false;
    st = server_run(&o);
out:
    if (st != ST_OK && alone) group_give_up(bridge_path, &o.engine.who, st);
    unix_listener_close(&socket);
    free(names);
    free(key);
    return st;
}

PREPARE_PROGRAM;

int main(int argc, char **argv)
{
    struct config config = {.argv = argv};
    const struct program program = {.name = "cw-infer-server",
                                    .usage = "--model DIR [options]",
                                    .options = table,
                                    .config = &config,
                                    .check = check_usage,
                                    .run = serve,
                                    .context = &config};
    device_prepare_process(argv);
    signal(SIGPIPE, SIG_IGN);
    return program_main(&program, argc, argv);
}
