/* programs.c: starts and ends the programs that a benchmark drives. */
// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/bench.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/http/http_client.h"
#include "trainer/run/checkpoint.h"
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define LOADING_S  600
#define STOPPING_S 60

extern char **environ;

enum status programs_open(struct programs *p)
{
    char folder[PATH_ROOM];
    *p = (struct programs){0};
    enum status st = file_make_temporary_folder("/tmp", "commonweight-bench", folder);
    if (st != ST_OK) return st;
    snprintf(p->folder, sizeof p->folder, "%.60s", folder);
    snprintf(p->model, sizeof p->model, "%s/model", p->folder);
    snprintf(p->bridge, sizeof p->bridge, "%s/bridge.json", p->folder);
    snprintf(p->socket, sizeof p->socket, "%s/server.sock", p->folder);
    snprintf(p->log, sizeof p->log, "%s/log", p->folder);
    return ST_OK;
}

enum status programs_take_model(struct programs *p, struct bench *b)
{
    char target[PATH_ROOM];
    enum status st = ST_OK;
    if (!b->o.model)
        CHECK(model_folder_write(p->model, b->dev,
                                 &(struct model_folder){.weights = b->weights,
                                                        .as = b->dt,
                                                        .source_folder = b->o.tokenizer}));
    else if (!realpath(b->o.model, target) || symlink(target, p->model) != 0)
        FAIL(ST_IO, "%s: %m", b->o.model);
    // what describes the model stays
    device_release(b->dev, b->arena);
    b->arena = NULL;
out:
    return st;
}

#define MAX_WORDS 64

// A program of this build: words with blanks between them. Its output goes to the log.
static enum status start(const struct programs *p, const char *command, pid_t *ret)
{
    char path[PATH_ROOM], words[PATH_ROOM], *argv[MAX_WORDS + 1] = {0}, *state = NULL;
    int n = 0;
    posix_spawn_file_actions_t actions;
    ssize_t len = readlink("/proc/self/exe", path, sizeof path - 1);
    if (len < 0) return status_fail(ST_IO, "the folder of this program cannot be found: %m");
    path[len] = 0;
    snprintf(words, sizeof words, "%s", command);
    for (char *w = strtok_r(words, " ", &state); w && n < MAX_WORDS;
         w = strtok_r(NULL, " ", &state))
        argv[n++] = w;
    char *name = strrchr(path, '/') + 1;
    snprintf(name, sizeof path - (size_t)(name - path), "%s", argv[0]);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, p->log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    int error = posix_spawn(ret, path, &actions, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (error) return status_fail(ST_NOT_FOUND, "%s cannot be started: %s", path, strerror(error));
    return ST_OK;
}

// Of the program that the command begins with.
static enum status program_failed(const struct programs *p, const char *command)
{
    struct bytes log = BYTES_INIT;
    if (file_read(p->log, 16 << 20, &log) == ST_OK) fputs(bytes_text(&log), stderr);
    bytes_release(&log);
    return status_fail(ST_PEER_GONE, "%.*s failed; its output stands above",
                       (int)strcspn(command, " "), command);
}

// Kills it where the deadline passes. False: it failed, or was killed.
static bool await_end(pid_t pid, int64_t seconds)
{
    const int64_t deadline = clock_deadline_ns(seconds * 1000);
    int state = 0;
    while (waitpid(pid, &state, WNOHANG) == 0) {
        if (clock_now_ns() >= deadline) kill(pid, SIGKILL);
        clock_sleep_ms(10);
    }
    return WIFEXITED(state) && WEXITSTATUS(state) == 0;
}

enum status programs_serve(struct programs *p, const struct bench_options *o, int max_batch,
                           const char *more)
{
    char command[PATH_ROOM];
    snprintf(command, sizeof command,
             "cw-infer-server --model %s --device %s --dtype %s --quantization %s "
             "--kv-cache-dtype %s --socket %s --bridge %s --max-batch %d %s %s",
             p->model, o->device, dtype_option_names[o->dtype], quantization_names[o->quantization],
             kv_cache_names[o->kv_cache], p->socket, p->bridge, max_batch,
             o->no_step_ahead ? "--step-ahead off" : "", more);
    const int64_t deadline = clock_deadline_ns(LOADING_S * 1000);
    struct http_client *http = NULL;
    struct bytes body = BYTES_INIT;
    enum status st = start(p, command, &p->server);
    if (st != ST_OK) return st;
    CHECK(http_client_new(p->socket, &http));
    while (http_get(http, "/health", 1000, &body) != ST_OK) {
        if (waitpid(p->server, NULL, WNOHANG) != 0) {
            p->server = 0;
            st = program_failed(p, command);
            goto out;
        }
        if (clock_now_ns() >= deadline)
            FAIL(ST_TIMEOUT, "cw-infer-server has not loaded %s in %d s", p->model, LOADING_S);
        clock_sleep_ms(20);
    }
out:
    http_client_free(http);
    bytes_release(&body);
    return st;
}

enum status programs_run(const struct programs *p, const char *command, int64_t seconds)
{
    pid_t pid;
    enum status st = start(p, command, &pid);
    if (st != ST_OK) return st;
    return await_end(pid, seconds) ? ST_OK : program_failed(p, command);
}

void programs_close(struct programs *p)
{
    if (p->server > 0) {
        kill(p->server, SIGTERM);
        await_end(p->server, STOPPING_S);
    }
    if (p->folder[0]) file_remove_tree(p->folder);
}
