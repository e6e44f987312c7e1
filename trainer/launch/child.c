/* child.c: starts, feeds, reads and ends a child process. Owns the process and its pipes.
 * The thread that uses it.
 */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/launch/child.h"
#include "common/base/clock.h"
#include "common/base/spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_LINE (1 << 24) // bytes: a trajectory of a million tokens
#define GRACE_MS 200
#define READ     65536

// ---- its life -----------------------------------------------------------------------------------

static void close_fd(int *fd)
{
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

int child_end(struct child *c)
{
    int status = 0;
    if (c->pid > 0) {
        close_fd(&c->to);
        close_fd(&c->from);
        status = spawn_end(c->pid);
    }
    c->pid = 0;
    bytes_release(&c->out);
    bytes_release(&c->in);
    c->written = c->taken = 0;
    return status;
}

enum status child_start(struct child *c, const char *line)
{
    enum status st = ST_OK;
    int in[2] = {-1, -1}, out[2] = {-1, -1};
    *c = (struct child){.line = line, .started_ns = clock_now_ns()};
    signal(SIGPIPE, SIG_IGN); // of the whole process: a child that has gone is an error of write(2)
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0)
        FAIL(ST_IO, "command \"%s\": pipe: %s", line, strerror(errno));
    // Ours do not block; the flag is the open pipe end's, so the child's stay as they are.
    fcntl(in[1], F_SETFL, O_NONBLOCK);
    fcntl(out[0], F_SETFL, O_NONBLOCK);
    CHECK(spawn(line, in[0], out[1], -1, &c->pid));
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
static enum status ended(struct child *c)
{
    char words[SPAWN_WORDS];
    spawn_exited(c->pid, GRACE_MS, NULL);
    int status = child_end(c);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        return status_fail(ST_PEER_GONE, "command \"%s\" closed its output or was killed", c->line);
    spawn_words(status, words);
    return status_fail(ST_PEER_GONE, "command \"%s\" %s", c->line, words);
}

enum status child_check(struct child *c, int ms)
{
    const int left = clock_ms_until(c->started_ns + ms * NS_PER_MS);
    return spawn_exited(c->pid, left, NULL) ? ended(c) : ST_OK;
}

// ---- what is written ----------------------------------------------------------------------------

static enum status write_some(struct child *c)
{
    if (c->out.len == c->written) return ST_OK;
    ssize_t n = write(c->to, c->out.data + c->written, c->out.len - c->written);
    if (n < 0 && errno == EPIPE) return ended(c);
    if (n < 0 && errno != EAGAIN && errno != EINTR)
        return status_fail(ST_IO, "command \"%s\": %s", c->line, strerror(errno));
    if (n > 0) c->written += (size_t)n;
    if (c->written == c->out.len) {
        bytes_clear(&c->out);
        c->written = 0;
    }
    return ST_OK;
}

static enum status read_some(struct child *c)
{
    if (c->taken > 0 && (c->taken == c->in.len || c->taken > READ)) {
        c->in.len -= c->taken;
        memmove(c->in.data, c->in.data + c->taken, c->in.len);
        c->taken = 0;
    }
    if (!bytes_reserve(&c->in, READ)) return bytes_status(&c->in);
    ssize_t n = read(c->from, c->in.data + c->in.len, READ);
    if (n == 0) return ended(c);
    if (n < 0 && errno != EAGAIN && errno != EINTR)
        return status_fail(ST_IO, "command \"%s\": %s", c->line, strerror(errno));
    if (n > 0) c->in.len += (size_t)n;
    c->in.data[c->in.len] = '\0';
    if (c->in.len - c->taken > MAX_LINE)
        return status_fail(ST_FORMAT, "command \"%s\": a reply of more than %d bytes", c->line,
                           MAX_LINE);
    return ST_OK;
}

enum status child_pump(struct child *c)
{
    // First what it wrote: one that ends after its last reply is found ended with the next.
    size_t unread = c->in.len - c->taken;
    enum status st = read_some(c);
    return st == ST_OK && c->in.len - c->taken == unread ? write_some(c) : st;
}

bool child_line(struct child *c, const char **ret_text, size_t *ret_len)
{
    const char *text = child_rest(c), *newline = memchr(text, '\n', c->in.len - c->taken);
    if (!newline) return false;
    *ret_text = text;
    *ret_len = (size_t)(newline - text);
    c->taken += *ret_len + 1;
    return true;
}

const char *child_rest(const struct child *c)
{
    return bytes_text(&c->in) + c->taken;
}

bool child_unread(const struct child *c)
{
    int to = 0, from = 0;
    ioctl(c->to, FIONREAD, &to);
    ioctl(c->from, FIONREAD, &from);
    return c->out.len > 0 || to > 1 || from > 0; // a parser may stop before a line's end
}
