/* reward_command.c: the scorer `command:PROGRAM ARGS`: a child process that reads one JSON object a
 * line from its standard input and answers each with {"reward": x} on its standard output. Owns the
 * child. The trainer's thread.
 *
 * Each sample is sent and its reply awaited before the next, within a time limit. Three things can
 * go wrong, and none of them is ever a 0: no reply in time and a malformed reply end the run with a
 * sentence; a child that ended is started once more in its life, and asked again for the sample it
 * owes. The child is the leader of a process group of its own (a Ctrl-C at the terminal, which the
 * trainer takes as "end after this step", must not take the child away in the middle of it), is
 * killed with its group when the scorer is closed, and by the kernel should the trainer die.
 */
#include "common/base/bytes.h"
#include "common/base/clock.h"
#include "trainer/rollout/reward_scorer.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_REPLY (1 << 20) // bytes of one line
#define GRACE_MS  200

struct command {
    char *shell_line; // owned
    const char *line; // of it, as given
    int timeout_ms;
    pid_t pid;          // 0: none
    int to, from;       // its standard input and output; -1: none
    struct bytes reply; // read and not yet taken
    bool restarted;
};

// ---- the child ----------------------------------------------------------------------------------

static void close_fd(int *fd)
{
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

// Kills it and takes its status, as waitpid() gives it; 0 where there was none.
static int end_child(struct command *c)
{
    int status = 0;
    close_fd(&c->to);
    close_fd(&c->from);
    bytes_clear(&c->reply);
    if (c->pid > 0) {
        kill(-c->pid, SIGKILL); // also what it started; one that ended by itself keeps its status
        while (waitpid(c->pid, &status, 0) < 0 && errno == EINTR) continue;
    }
    c->pid = 0;
    return status;
}

// Between fork and exec: system calls only.
static void become_child(const struct command *c, int in, int out, pid_t parent)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() == parent && dup2(in, STDIN_FILENO) >= 0 && dup2(out, STDOUT_FILENO) >= 0)
        execl("/bin/sh", "sh", "-c", c->shell_line, (char *)NULL);
    _exit(127);
}

static enum status start_child(struct command *c)
{
    enum status st = ST_OK;
    int in[2] = {-1, -1}, out[2] = {-1, -1};
    pid_t parent = getpid();
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) {
        st = status_fail(ST_IO, "command \"%s\": pipe: %s", c->line, strerror(errno));
        goto out;
    }
    // Ours do not block; the flag is the open pipe end's, so the child's stay as they are.
    fcntl(in[1], F_SETFL, O_NONBLOCK);
    fcntl(out[0], F_SETFL, O_NONBLOCK);
    pid_t pid = fork();
    if (pid == 0) become_child(c, in[0], out[1], parent);
    if (pid < 0) {
        st = status_fail(ST_IO, "command \"%s\": fork: %s", c->line, strerror(errno));
        goto out;
    }
    setpgid(pid, pid); // whichever of the two comes first
    c->pid = pid;
    c->to = in[1];
    c->from = out[0];
    in[1] = out[0] = -1;
out:
    close_fd(&in[0]);
    close_fd(&in[1]);
    close_fd(&out[0]);
    close_fd(&out[1]);
    return st;
}

// It closed its output: most likely it is just ending, and its status says why.
static enum status ended(struct command *c)
{
    siginfo_t info = {0};
    for (int i = 0; i < GRACE_MS / 5; i++) {
        if (waitid(P_PID, (id_t)c->pid, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid)
            break;
        clock_sleep_ms(5);
    }
    int status = end_child(c);
    if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL)
        return status_fail(ST_PEER_GONE, "command \"%s\" was ended by signal %d (%s)", c->line,
                           WTERMSIG(status), strsignal(WTERMSIG(status)));
    if (WIFEXITED(status))
        return status_fail(ST_PEER_GONE, "command \"%s\" ended with status %d%s", c->line,
                           WEXITSTATUS(status),
                           WEXITSTATUS(status) == 127 ? " (it could not be started)" : "");
    return status_fail(ST_PEER_GONE, "command \"%s\" closed its output or was killed", c->line);
}

// ---- one exchange -------------------------------------------------------------------------------

// write(2) without the SIGPIPE of a reader that has gone.
static ssize_t write_quietly(int fd, const void *data, size_t len)
{
    sigset_t pipe_signal, before, pending;
    sigemptyset(&pipe_signal);
    sigaddset(&pipe_signal, SIGPIPE);
    sigpending(&pending);
    pthread_sigmask(SIG_BLOCK, &pipe_signal, &before);
    ssize_t n = write(fd, data, len);
    int error = errno;
    if (n < 0 && error == EPIPE && !sigismember(&pending, SIGPIPE)) {
        const struct timespec now = {0};
        while (sigtimedwait(&pipe_signal, NULL, &now) < 0 && errno == EINTR) continue;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = error;
    return n;
}

// Takes what the child has written so far.
static enum status read_some(struct command *c)
{
    if (!bytes_reserve(&c->reply, 4096)) return bytes_status(&c->reply);
    ssize_t n = read(c->from, c->reply.data + c->reply.len, 4096);
    if (n == 0) return ended(c);
    if (n < 0 && errno != EAGAIN && errno != EINTR)
        return status_fail(ST_IO, "command \"%s\": %s", c->line, strerror(errno));
    if (n > 0) c->reply.len += (size_t)n;
    c->reply.data[c->reply.len] = '\0';
    if (c->reply.len > MAX_REPLY)
        return status_fail(ST_FORMAT, "command \"%s\": a reply of more than %d bytes", c->line,
                           MAX_REPLY);
    return ST_OK;
}

// Sends a line and waits until a whole one stands in c->reply.
static enum status exchange(struct command *c, const char *text, size_t len)
{
    int64_t deadline = clock_deadline_ns(c->timeout_ms);
    while (len > 0 || !memchr(bytes_text(&c->reply), '\n', c->reply.len)) {
        struct pollfd fds[2] = {{c->from, POLLIN, 0}, {len ? c->to : -1, POLLOUT, 0}};
        int left = clock_ms_until(deadline);
        if (left == 0) {
            end_child(c);
            return status_fail(ST_TIMEOUT,
                               "command \"%s\" gave no reply within %g s (--reward-timeout)",
                               c->line, c->timeout_ms / 1e3);
        }
        if (poll(fds, 2, left) < 0 && errno != EINTR)
            return status_fail(ST_IO, "command \"%s\": poll: %s", c->line, strerror(errno));
        if (fds[1].revents) {
            ssize_t n = write_quietly(c->to, text, len);
            if (n < 0 && errno == EPIPE) return ended(c);
            if (n < 0 && errno != EAGAIN && errno != EINTR)
                return status_fail(ST_IO, "command \"%s\": %s", c->line, strerror(errno));
            if (n > 0) text += n, len -= (size_t)n;
        }
        if (fds[0].revents) {
            enum status st = read_some(c);
            if (st != ST_OK) return st;
        }
    }
    return ST_OK;
}

// Takes the line out of c->reply.
static enum status take_reply(struct command *c, double *ret_score)
{
    enum status st = ST_OK;
    json_error_t error;
    const char *text = bytes_text(&c->reply);
    size_t len = (size_t)((const char *)memchr(text, '\n', c->reply.len) - text);
    json_t *reply = json_loadb(text, len, 0, &error);
    const json_t *reward = json_object_get(reply, "reward");
    const char *why = json_string_value(json_object_get(reply, "error"));
    if (c->reply.len > len + 1)
        st = status_fail(ST_FORMAT, "command \"%s\": more than one line for one sample: %.200s",
                         c->line, text);
    else if (why)
        st = status_fail(ST_INVALID, "command \"%s\": %s", c->line, why);
    else if (!json_is_number(reward) || !isfinite(json_number_value(reward)))
        st = status_fail(ST_FORMAT, "command \"%s\": not {\"reward\": NUMBER}: %.*s", c->line,
                         len > 200 ? 200 : (int)len, text);
    else
        *ret_score = json_number_value(reward);
    json_decref(reply);
    bytes_clear(&c->reply);
    return st;
}

static enum status request_line(const struct reward_input *input, struct bytes *ret)
{
    json_t *request =
        json_pack("{s:O*, s:s, s:s*, s:i, s:b, s:O*, s:O*}", "prompt", input->prompt, "completion",
                  input->text, "answer", input->answer, "tokens", input->n_tokens, "truncated",
                  input->truncated, "telemetry", input->telemetry, "example", input->row);
    char *text = request ? json_dumps(request, JSON_COMPACT) : NULL;
    json_decref(request);
    if (!text) return status_fail(ST_NO_MEMORY, "no memory for a sample, or its text is not UTF-8");
    bytes_puts(ret, text);
    bytes_puts(ret, "\n");
    free(text);
    return bytes_status(ret);
}

// ---- scorer -------------------------------------------------------------------------------------

static void command_close(void *state)
{
    struct command *c = state;
    if (!c) return;
    end_child(c);
    bytes_release(&c->reply);
    free(c->shell_line);
    free(c);
}

static enum status command_open(const struct reward_options *options, const char *argument,
                                void **ret_state)
{
    enum status st = ST_OK;
    struct command *c = calloc(1, sizeof *c);
    if (!c) return status_fail(ST_NO_MEMORY, "no memory for the reward \"command\"");
    c->to = c->from = -1;
    c->timeout_ms = (int)(options->timeout_s * 1e3);
    if (strspn(argument, " ") == strlen(argument)) {
        st = status_fail(ST_INVALID, "reward \"command:\" names no program");
        goto out;
    }
    // exec: the shell only takes the words apart, and is not left standing in between
    if (asprintf(&c->shell_line, "exec %s", argument) < 0) c->shell_line = NULL;
    c->line = c->shell_line ? c->shell_line + strlen("exec ") : NULL;
    if (!c->line) {
        st = status_fail(ST_NO_MEMORY, "no memory for the reward \"command\"");
        goto out;
    }
    CHECK(start_child(c));
    *ret_state = c;
out:
    if (st != ST_OK) command_close(c);
    return st;
}

static enum status command_score(void *state, const struct reward_input *input, double *ret_score)
{
    struct command *c = state;
    enum status st;
    struct bytes line = BYTES_INIT;
    CHECK(request_line(input, &line));
    if (c->reply.len > 0) {
        st = status_fail(ST_FORMAT, "command \"%s\" wrote without being asked: %.200s", c->line,
                         bytes_text(&c->reply));
        goto out;
    }
    st = c->pid ? exchange(c, line.data, line.len)
                : status_fail(ST_PEER_GONE, "command \"%s\" is gone", c->line);
    if (st == ST_PEER_GONE && !c->restarted) {
        c->restarted = true;
        CHECK(start_child(c));
        st = exchange(c, line.data, line.len);
    }
    if (st == ST_PEER_GONE) status_context(st, "even when started again");
    if (st == ST_OK) st = take_reply(c, ret_score);
out:
    bytes_release(&line);
    return st;
}

const struct scorer scorer_command = {
    .name = "command",
    .takes_argument = true,
    .help = "command:PROGRAM ARGS, a child process fed JSON lines; the last of the list",
    .open = command_open,
    .close = command_close,
    .score = command_score,
};
