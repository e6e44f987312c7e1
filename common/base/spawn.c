/* spawn.c: fork and exec of a shell line. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/spawn.h"
#include "common/base/clock.h"
#include "common/base/file.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define POLL_MS 5

void spawn_put_word(struct bytes *to, const char *word)
{
    bytes_puts(to, "'");
    for (; *word; word++) {
        if (*word == '\'')
            bytes_puts(to, "'\\''");
        else
            bytes_append(to, word, 1);
    }
    bytes_puts(to, "'");
}

void spawn_put_program(struct bytes *to, const char *name)
{
    char path[PATH_ROOM];
    const size_t room = sizeof path - strlen(name) - 1;
    const ssize_t n = readlink("/proc/self/exe", path, room);
    char *slash = n > 0 && (size_t)n < room ? (path[n] = '\0', strrchr(path, '/')) : NULL;
    if (slash) strcpy(slash + 1, name);
    spawn_put_word(to, slash && file_exists(path) ? path : name);
}

static bool put_stream(int fd, int as)
{
    return fd < 0 || dup2(fd, as) >= 0;
}

// Between fork and exec: system calls only.
static void become_child(const char *shell_line, const int streams[3], pid_t parent)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    signal(SIGXFSZ, SIG_DFL);
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() == parent && put_stream(streams[0], STDIN_FILENO) &&
        put_stream(streams[1], STDOUT_FILENO) && put_stream(streams[2], STDERR_FILENO))
        execl("/bin/sh", "sh", "-c", shell_line, (char *)NULL);
    _exit(127);
}

enum status spawn(const char *line, int in, int out, int err, pid_t *ret)
{
    const int streams[3] = {in, out, err};
    const pid_t parent = getpid();
    struct bytes shell_line = BYTES_INIT;
    enum status st;
    pid_t pid = 0;
    bytes_printf(&shell_line, "exec %s", line);
    CHECK(bytes_status(&shell_line));
    pid = fork();
    if (pid == 0) become_child(shell_line.data, streams, parent);
    if (pid < 0) FAIL(ST_IO, "command \"%s\": fork: %s", line, strerror(errno));
    setpgid(pid, pid); // whichever of the two comes first
    *ret = pid;
out:
    bytes_release(&shell_line);
    return st;
}

bool spawn_exited(pid_t pid, int ms, int *ret_status)
{
    const int64_t deadline = clock_deadline_ns(ms);
    siginfo_t info = {0};
    while (waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && !info.si_pid) {
        if (clock_ms_until(deadline) == 0) return false;
        clock_sleep_ms(POLL_MS);
    }
    if (ret_status) *ret_status = info.si_code == CLD_EXITED ? info.si_status << 8 : info.si_status;
    return true;
}

int spawn_end(pid_t pid)
{
    int status = 0;
    kill(-pid, SIGKILL); // also what it started
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
    return status;
}

void spawn_words(int status, char ret[SPAWN_WORDS])
{
    if (WIFSIGNALED(status))
        snprintf(ret, SPAWN_WORDS, "was ended by signal %d (%s)", WTERMSIG(status),
                 strsignal(WTERMSIG(status)));
    else
        snprintf(ret, SPAWN_WORDS, "ended with status %d%s", WEXITSTATUS(status),
                 WEXITSTATUS(status) == 127 ? " (it could not be started)" : "");
}

int thread_start(pthread_t *ret, void *(*run)(void *), void *context)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(ret, NULL, run, context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}
