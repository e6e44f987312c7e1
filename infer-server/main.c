/* main.c: cw-infer-server. Reads options, takes the socket (so that a second daemon is refused
 * before it loads anything), and runs the server. Main thread. */
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "common/base/dtype.h"
#include "infer-server/http/listen.h"
#include "infer-server/http/server.h"

#include <ctype.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define OWN_FILES 128 // descriptors beside those of connections
#define HOSTS_MAX 64  // names in --allowed-hosts

struct config {
    const char *config, *model, *draft, *speculative, *device, *dtype, *chat_template, *served_name;
    const char *chat_template_file;
    const char *socket, *listen, *api_key_file, *allowed_hosts, *bridge, *kv_memory, *kv_policy;
    const char *prefix_cache, *log_level, *draft_length, *unknown_fields;
    int64_t max_batch, max_context, prefill_chunk, block_size, max_queue, max_body, max_buffered;
    int64_t max_connections;
    int64_t idle_timeout, request_timeout, drain_timeout;
    bool exact;
};

#define FIELD(name) offsetof(struct config, name)
#define HEADING(help)                                                                              \
    {                                                                                              \
        "", OPTION_HEADING, 0, NULL, NULL, help, 0, 0, NULL                                        \
    }
#define TEXT(name, field, fallback, value, help)                                                   \
    {                                                                                              \
        name, OPTION_STRING, FIELD(field), fallback, value, help, 0, 0, NULL                       \
    }
#define CHOICE(name, field, fallback, choices, help)                                               \
    {                                                                                              \
        name, OPTION_STRING, FIELD(field), fallback, NULL, help, 0, 0, choices                     \
    }
#define NUMBER(name, field, fallback, value, min, max, help)                                       \
    {                                                                                              \
        name, OPTION_INT, FIELD(field), fallback, value, help, min, max, NULL                      \
    }

static const struct option_spec table[] = {
    TEXT("model", model, NULL, "DIR", "Hugging Face model folder (needed)"),
    TEXT("device", device, "auto", "auto|cpu|cuda:N", "where the model runs"),
    CHOICE("dtype", dtype, "auto", "auto|bf16|f32",
           "of weights and activations; auto: bf16 on CUDA, f32 on the CPU"),
    TEXT("chat-template", chat_template, NULL, "NAME",
         "which of the folder's named chat templates (default: default, with tools tool_use)"),
    TEXT("chat-template-file", chat_template_file, NULL, "FILE",
         "Jinja chat template to use instead of the folder's"),
    TEXT("served-model-name", served_name, NULL, "NAME",
         "name in /v1/models (default: the folder's)"),
    TEXT("draft", draft, NULL, "DIR",
         "folder of a smaller model of the same tokenizer, which drafts"),
    TEXT("speculative", speculative, "off", "METHOD:K",
         "drafts of at most K tokens a step: off, or one or several of ngram[:5], suffix[:8], "
         "draft_model[:5] with commas between them"),
    CHOICE(
        "draft-length", draft_length, "adaptive", "adaptive|fixed",
        "drafts of a step: as many as pay, by measured time and acceptance, or always as many as "
        "there are: slower, but acceptance is then counted on all of a sample"),
    HEADING("Sockets"),
    TEXT("socket", socket, NULL, "PATH",
         "Unix socket (default: $XDG_RUNTIME_DIR/commonweight/server.sock, else "
         "/run/commonweight/...)"),
    TEXT("listen", listen, NULL, "HOST:PORT",
         "listen on TCP too; off loopback only with --api-key-file"),
    TEXT("api-key-file", api_key_file, NULL, "FILE",
         "its first line is the key that TCP clients must send"),
    TEXT("allowed-hosts", allowed_hosts, NULL, "NAME,NAME",
         "names and addresses, beside loopback's and that of --listen, by which TCP clients "
         "without a "
         "key may call this server (their Host and Origin headers)"),
    TEXT("bridge", bridge, NULL, "PATH",
         "bridge file to write (default: bridge.json beside the default socket)"),
    NUMBER("max-connections", max_connections, "1024", "N", 1, 65536,
           "open connections, each socket"),
    {"max-body", OPTION_SIZE, FIELD(max_body), "8M", "SIZE", "largest request body", 1024, 1 << 30,
     NULL},
    {"max-buffered", OPTION_SIZE, FIELD(max_buffered), "0", "SIZE",
     "all request bodies in memory together, more get 429; 0: 32 times --max-body", 0, 0, NULL},
    NUMBER("idle-timeout", idle_timeout, "120", "S", 1, 86400,
           "closes a connection on which nothing moves"),
    NUMBER("request-timeout", request_timeout, "3600", "S", 1, 604800,
           "longest time for one answer"),
    NUMBER("drain-timeout", drain_timeout, "30", "S", 0, 86400,
           "time for requests under way to end after SIGTERM"),
    CHOICE("unknown-fields", unknown_fields, "refuse", "refuse|warn",
           "fields of requests that docs/protocol.md does not list: 400, or a line in the log"),
    HEADING("Engine"),
    NUMBER("max-batch", max_batch, "64", "N", 1, 4096, "sequences decoded at once"),
    NUMBER("max-context", max_context, "0", "N", 0, 1 << 24,
           "tokens of prompt and completion; 0: the model's, as memory allows"),
    NUMBER("max-queue", max_queue, "4096", "N", 1, 1 << 20,
           "samples waiting beyond those; more get 429"),
    NUMBER("prefill-chunk", prefill_chunk, "512", "N", 1, 1 << 20,
           "most prompt tokens in one step"),
    NUMBER("block-size", block_size, "16", "N", 1, 1024, "tokens of one KV block"),
    TEXT(
        "kv-memory", kv_memory, "0%", "SIZE|PERCENT",
        "for the KV cache: 4G, or 80% of what is free after the weights; 0%: the device's default"),
    CHOICE("kv-policy", kv_policy, "keep", "keep|recompute|drain",
           "what a weight update does to the KV cache of requests in flight"),
    CHOICE("prefix-cache", prefix_cache, "on", "on|off",
           "prompts begin with what earlier requests computed of the same tokens"),
    {"exact", OPTION_FLAG, FIELD(exact), NULL, NULL,
     "a request's tokens and log-probabilities have the same bits whatever else is served, drafted "
     "or was before: on the CPU, and in bf16 on a Hopper GPU, where sums are so in any case; "
     "drafts "
     "then follow no clock",
     0, 0, NULL},
    HEADING("General"),
    CHOICE("log-level", log_level, "info", "error|warn|info|debug", "what is logged"),
    TEXT("config", config, NULL, "FILE.json", "the same names with _ for -; a flag beats the file"),
    {NULL, OPTION_FLAG, 0, NULL, NULL, NULL, 0, 0, NULL},
};

static enum status check_usage(const struct config *c)
{
    struct speculative_choice choice;
    if (!c->model)
        return status_fail(ST_INVALID, "--model DIR is needed: a Hugging Face model folder");
    if (c->max_buffered && c->max_buffered < c->max_body)
        return status_fail(ST_INVALID,
                           "--max-buffered %lld is below --max-body %lld: no body of that size "
                           "would ever be taken",
                           (long long)c->max_buffered, (long long)c->max_body);
    enum status st = speculative_parse(c->speculative, &choice);
    if (st == ST_OK && choice.k[SPECULATIVE_DRAFT_MODEL] && !c->draft)
        st = status_fail(ST_INVALID, "draft_model needs --draft DIR, the draft model's folder");
    return st == ST_OK ? st : status_context(st, "--speculative");
}

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
    if (st != ST_OK) return status_context(st, "--kv-memory");
    if (bytes == 0) return status_fail(ST_INVALID, "--kv-memory 0: give a size above 0, or 0%%");
    ret->kv_bytes = bytes;
    return ST_OK;
}

// The first line without white space around it; the caller frees it.
static enum status read_api_key(const char *path, char **ret)
{
    struct bytes text = BYTES_INIT;
    struct stat info;
    enum status st;
    CHECK(file_read(path, 64 << 10, &text));
    const char *start = bytes_text(&text);
    while (*start == ' ' || *start == '\t') start++;
    size_t n = strcspn(start, "\r\n");
    while (n > 0 && isspace((unsigned char)start[n - 1])) n--;
    for (size_t i = 0; i < n; i++)
        if (!isgraph((unsigned char)start[i])) {
            st = status_fail(ST_INVALID,
                             "--api-key-file %s: the first line must be one word of plain "
                             "ASCII",
                             path);
            goto out;
        }
    if (n < 8) {
        st = status_fail(ST_INVALID, "--api-key-file %s: the key must have 8 characters or more",
                         path);
        goto out;
    }
    if (stat(path, &info) == 0 && (info.st_mode & 077))
        log_warn("--api-key-file %s can be read by others: chmod 600 it", path);
    *ret = strndup(start, n);
    if (!*ret) st = status_fail(ST_NO_MEMORY, "out of memory");
out:
    bytes_release(&text);
    return st;
}

static void default_path(const char *given, const char *name, char ret[PATH_MAX])
{
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    if (given)
        snprintf(ret, PATH_MAX, "%s", given);
    else if (runtime && *runtime)
        snprintf(ret, PATH_MAX, "%s/commonweight/%s", runtime, name);
    else
        snprintf(ret, PATH_MAX, "/run/commonweight/%s", name);
}

// Clients of a bridge run in other folders: what stands in the bridge file must be absolute.
static void make_absolute(char path[PATH_MAX])
{
    char folder[PATH_MAX], whole[PATH_MAX];
    if (path[0] == '/' || !getcwd(folder, sizeof folder)) return;
    int n = snprintf(whole, sizeof whole, "%s/%s", folder, path);
    if (n > 0 && n < PATH_MAX) memcpy(path, whole, (size_t)n + 1);
}

// Every connection is a descriptor; the soft limit is often 1024. Gives how many connections each
// socket may have: as asked for, or what the hard limit has room for beside the server's own files.
static int connection_limit(const struct config *c)
{
    struct rlimit limit;
    int wanted = (int)c->max_connections, sockets = c->listen ? 2 : 1;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return wanted;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_max == RLIM_INFINITY) return wanted;
    int64_t room = ((int64_t)limit.rlim_max - OWN_FILES) / sockets;
    if (room >= wanted) return wanted;
    if (room < 1) room = 1;
    log_warn(
        "--max-connections %d: this process may open %lld files (ulimit -Hn, LimitNOFILE=), so "
        "that each socket takes %lld connections",
        wanted, (long long)limit.rlim_max, (long long)room);
    return (int)room;
}

// The names of --allowed-hosts and the host of --listen. `names` is cut into pieces, which the list
// borrows, as it does `host`.
static enum status list_hosts(char *names, const char *host, const char *ret[HOSTS_MAX + 2])
{
    int n = 0;
    char *rest = NULL;
    if (*host) ret[n++] = host;
    for (char *name = strtok_r(names, ", ", &rest); name; name = strtok_r(NULL, ", ", &rest)) {
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
    const char *key = o->api_key ? " (API key needed)" : "";
    enum status st = listen_split(c->listen, host, (char[16]){0});
    if (st == ST_OK) st = tcp_listen(c->listen, o->api_key != NULL, &o->tcp_fd, &port);
    if (st == ST_OK) log_info("listening on %s, port %d%s", c->listen, port, key);
    return st;
}

static enum status serve(const struct config *c)
{
    enum status st;
    char socket_path[PATH_MAX], bridge_path[PATH_MAX], host[256] = "";
    char *key = NULL, *names = strdup(c->allowed_hosts ? c->allowed_hosts : "");
    const char *hosts[HOSTS_MAX + 2];
    if (!names) return status_fail(ST_NO_MEMORY, "out of memory");
    struct unix_listener socket = {.fd = -1, .lock_fd = -1};
    struct server_options o = {
        .engine = {.model_folder = c->model,
                   .draft_folder = c->draft,
                   .speculative_fixed = strcmp(c->draft_length, "fixed") == 0,
                   .device = c->device,
                   .dtype = strcmp(c->dtype, "auto") == 0 ? -1 : dtype_from_name(c->dtype),
                   .max_batch = (int)c->max_batch,
                   .max_context = (int)c->max_context,
                   .block_size = (int)c->block_size,
                   .prefill_chunk = (int)c->prefill_chunk,
                   .max_queue = (int)c->max_queue,
                   .kv_policy = c->kv_policy,
                   .prefix_cache_off = strcmp(c->prefix_cache, "off") == 0,
                   .exact = c->exact},
        .model_name = c->served_name,
        .chat_template = {.name = c->chat_template, .file = c->chat_template_file},
        .accept_unknown = strcmp(c->unknown_fields, "warn") == 0,
        .unix_fd = -1,
        .tcp_fd = -1,
        .max_body = c->max_body,
        .max_buffered = c->max_buffered ? c->max_buffered : 32 * c->max_body,
        .max_connections = connection_limit(c),
        .idle_timeout_s = (int)c->idle_timeout,
        .request_timeout_s = (int)c->request_timeout,
        .drain_timeout_s = (int)c->drain_timeout,
    };
    default_path(c->socket, "server.sock", socket_path);
    default_path(c->bridge, "bridge.json", bridge_path);
    make_absolute(socket_path);
    make_absolute(bridge_path);
    CHECK(read_kv_memory(c->kv_memory, &o.engine));
    CHECK(speculative_parse(c->speculative, &o.engine.speculative));
    if (c->api_key_file) CHECK(read_api_key(c->api_key_file, &key));
    CHECK(unix_listen(socket_path, &socket));
    log_info("listening on %s", socket_path);
    o.api_key = key;
    if (c->listen) CHECK(listen_tcp(c, &o, host));
    if (*names && (key || !c->listen))
        log_warn("--allowed-hosts %s: nothing to allow: %s", c->allowed_hosts,
                 key ? "requests are told by their key" : "there is no --listen");
    CHECK(list_hosts(names, host, hosts));
    o.allowed_hosts = hosts;
    o.socket_path = o.engine.socket_path = socket_path;
    o.engine.bridge_path = bridge_path;
    o.unix_fd = socket.fd;
    socket.fd = -1;
    st = server_run(&o);
out:
    unix_listener_close(&socket);
    free(names);
    free(key);
    return st;
}

int main(int argc, char **argv)
{
    struct config config = {0};
    struct option_set *set = NULL;
    device_prepare_process(argv);
    enum option_result parsed = options_parse(table, "cw-infer-server", "--model DIR [options]",
                                              argc, argv, 0, &config, NULL, &set);
    if (parsed == OPTIONS_DONE) return 0;
    log_open("cw-infer-server",
             parsed == OPTIONS_OK ? log_level_from_name(config.log_level) : LOG_INFO);
    if (parsed == OPTIONS_BAD || check_usage(&config) != ST_OK) {
        log_error("%s", status_message());
        options_free(set);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    enum status st = serve(&config);
    if (st != ST_OK) log_error("%s", status_message());
    options_free(set);
    return st == ST_OK ? 0 : 1;
}
