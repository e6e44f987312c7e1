/* server_process.c: one child process and its log file. The main thread.
 *
 * It is asked to end with SIGTERM, upon which a server answers what it has under way, and killed
 * with its process group after STOP_MS. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/launch/server_process.h"
#include "common/base/bytes.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/spawn.h"
#include "common/http/listen.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LOG_NAME   "server.log"
#define STOP_MS    30000
#define POLL_MS    20
#define HEALTH_MS  2000
#define LOAD_MS    60000 // an adapter
#define TAIL_BYTES 1200

struct server_process {
    struct bytes command;    // with its placeholders
    char address[PATH_ROOM]; // a URL, or its socket
    struct server_options options;
    char log[PATH_ROOM];
    off_t log_begin; // where the lines of the one that runs begin; an earlier one's go before
    pid_t pid;       // 0: not started
};

// ---- its command --------------------------------------------------------------------------------

static enum status put_command(struct server_process *s)
{
    const char *given = s->options.command;
    if (given && (!strstr(given, "{model}") || !strstr(given, "{port}")))
        return status_fail(ST_INVALID,
                           "--server-command \"%s\": write {model} where the model folder goes, "
                           "and {port} where the port does",
                           given);
    if (given) {
        bytes_puts(&s->command, given);
    } else {
        bytes_puts(&s->command, s->options.before ? s->options.before : "");
        spawn_put_program(&s->command, "cw-infer-server");
        bytes_printf(&s->command, " --model {model} --socket {folder}/server.sock --device %s%s %s",
                     s->options.device,
                     s->options.shares ? " --bridge {folder}/bridge.json"
                                       : " --bridge {folder}/server-bridge.json "
                                         "--listen 127.0.0.1:{port}",
                     s->options.arguments ? s->options.arguments : "");
    }
    return bytes_status(&s->command);
}

// The command with its placeholders filled.
static void put_line(const struct server_process *s, const char *model, const char *draft,
                     struct bytes *ret)
{
    char port[16];
    const struct {
        const char *name, *word;
    } placeholders[] = {
        {"{model}", model}, {"{port}", port}, {"{folder}", s->options.folder}, {"{draft}", draft}};
    snprintf(port, sizeof port, "%d", s->options.port);
    for (const char *at = bytes_text(&s->command); *at;) {
        const char *before = at;
        for (size_t i = 0; i < sizeof placeholders / sizeof *placeholders; i++) {
            const size_t len = strlen(placeholders[i].name);
            if (!placeholders[i].word || strncmp(at, placeholders[i].name, len) != 0) continue;
            spawn_put_word(ret, placeholders[i].word);
            at += len;
        }
        if (at == before) bytes_append(ret, at++, 1);
    }
}

enum status server_process_new(const struct server_options *o, struct server_process **ret)
{
    enum status st;
    char host[256];
    int fd;
    struct server_process *s = calloc(1, sizeof *s);
    if (!s) return status_fail(ST_NO_MEMORY, "no memory for a server");
    s->options = *o;
    CHECK(put_command(s));
    if (o->port == 0 && !o->shares) { // one that nobody listens on now
        CHECK(tcp_listen("--server-port", "127.0.0.1:0", NULL, host, &fd, &s->options.port));
        close(fd);
    }
    if (o->shares)
        CHECK(path_put(s->address, o->folder, "server.sock"));
    else
        snprintf(s->address, sizeof s->address, "http://127.0.0.1:%d", s->options.port);
    *ret = s;
    return ST_OK;
out:
    server_process_free(s);
    return st;
}

const char *server_process_address(const struct server_process *s)
{
    return s->address;
}

// ---- its life -----------------------------------------------------------------------------------

static void stop(struct server_process *s)
{
    if (s->pid == 0) return;
    kill(s->pid, SIGTERM);
    spawn_exited(s->pid, STOP_MS, NULL);
    spawn_end(s->pid);
    s->pid = 0;
}

void server_process_free(struct server_process *s)
{
    if (!s) return;
    stop(s);
    bytes_release(&s->command);
    free(s);
}

// The last lines that it wrote, from where they begin.
static const char *log_tail(const struct server_process *s, char ret[TAIL_BYTES + 1])
{
    const int fd = open(s->log, O_RDONLY | O_CLOEXEC);
    const off_t size = fd < 0 ? 0 : lseek(fd, 0, SEEK_END);
    const off_t from = size - s->log_begin > TAIL_BYTES ? size - TAIL_BYTES : s->log_begin;
    const ssize_t n = fd < 0 ? -1 : pread(fd, ret, TAIL_BYTES, from);
    if (fd >= 0) close(fd);
    ret[n > 0 ? n : 0] = '\0';
    const char *line = from > s->log_begin ? strchr(ret, '\n') : NULL;
    return line ? line + 1 : ret;
}

enum status server_process_check(const struct server_process *s, int ms)
{
    char words[SPAWN_WORDS], tail[TAIL_BYTES + 1];
    int status;
    if (s->pid == 0) return status_fail(ST_PEER_GONE, "the server does not run");
    if (!spawn_exited(s->pid, ms, &status)) return ST_OK;
    spawn_words(status, words);
    return status_fail(ST_PEER_GONE, "the server %s; its log, %s, ends:\n%s", words, s->log,
                       log_tail(s, tail));
}

static enum status start(struct server_process *s, const char *model, const char *draft)
{
    enum status st = ST_OK;
    struct bytes line = BYTES_INIT;
    const int in = open("/dev/null", O_RDONLY | O_CLOEXEC),
              log = open(s->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (in < 0 || log < 0) FAIL(ST_IO, "%s: %s", s->log, strerror(errno));
    s->log_begin = lseek(log, 0, SEEK_END);
    put_line(s, model, draft, &line);
    CHECK(bytes_status(&line));
    CHECK(spawn(bytes_text(&line), in, log, log, &s->pid));
out:
    if (in >= 0) close(in);
    if (log >= 0) close(log);
    bytes_release(&line);
    return st;
}

// Until its /health says 200.
static enum status wait_ready(struct server_process *s, struct http_client *http)
{
    const int64_t deadline = clock_deadline_ns((int)(s->options.timeout_s * 1e3));
    const struct http_call health = {
        .server = s->address, .path = "/health", .timeout_ms = HEALTH_MS};
    char tail[TAIL_BYTES + 1];
    enum status st;
    while ((st = http_perform(http, &health, NULL)) != ST_OK) {
        struct status_kept why = {0};
        status_keep(&why, st);
        CHECK(server_process_check(s, 0));
        if (s->options.cancelled && *s->options.cancelled)
            FAIL(ST_CANCELLED, "the start of the server was given up");
        status_recall(&why);
        if (clock_ms_until(deadline) == 0)
            FAIL(ST_TIMEOUT,
                 "the server was not ready within %g s (--server-timeout): %s; its log, %s, "
                 "ends:\n%s",
                 s->options.timeout_s, status_message(), s->log, log_tail(s, tail));
        clock_sleep_ms(POLL_MS);
    }
    // Another program may answer on its port, while it could not listen there.
    st = server_process_check(s, 0);
out:
    return st;
}

enum status server_process_restart(struct server_process *s, struct http_client *http,
                                   const char *model, const char *draft)
{
    enum status st;
    stop(s);
    CHECK(path_put(s->log, s->options.folder, LOG_NAME));
    CHECK(start(s, model, draft));
    CHECK(wait_ready(s, http));
out:
    if (st != ST_OK) stop(s);
    return st;
}

// ---- an adapter ---------------------------------------------------------------------------------

enum status adapter_load_body(const char *name, const char *folder, json_t **ret)
{
    *ret = json_pack("{s:s, s:s, s:b}", "lora_name", name, "lora_path", folder, "load_inplace", 1);
    return *ret ? ST_OK
                : status_fail(ST_INVALID,
                              "%s: a server cannot be told of this folder, whose name is "
                              "not UTF-8, or memory is short",
                              folder);
}

enum status server_load_adapter(struct http_client *http, const char *server, const char *name,
                                const char *folder, enum status (*alive)(void *context))
{
    struct http_call call = {
        .server = server, .path = "/v1/load_lora_adapter", .timeout_ms = LOAD_MS, .alive = alive};
    json_t *body;
    enum status st = adapter_load_body(name, folder, &body);
    call.body = body;
    if (st == ST_OK) st = http_perform(http, &call, NULL);
    json_decref(body);
    return st;
}
