/* canned_server.c: sockets and processes of canned_server.h. The server leads a process group, so
 * that its connections end with it. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/canned_server.h"
#include "tests/support/support.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

static int listen_unix(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    snprintf(address.sun_path, sizeof address.sun_path, "%.100s", path);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(fd, 64), 0);
    return fd;
}

static int listen_tcp(char ret_url[32])
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(fd, 64), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&address, &len), 0);
    snprintf(ret_url, 32, "http://127.0.0.1:%d", ntohs(address.sin_port));
    return fd;
}

static void accept_all(const int listeners[2], void (*serve)(int fd))
{
    struct pollfd fds[2] = {{listeners[0], POLLIN, 0}, {listeners[1], POLLIN, 0}};
    signal(SIGCHLD, SIG_IGN);
    for (;;) {
        if (poll(fds, 2, -1) < 0) _exit(1);
        int fd = accept(fds[fds[0].revents ? 0 : 1].fd, NULL, NULL);
        if (fd < 0) _exit(1);
        if (fork() == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            serve(fd);
            _exit(0);
        }
        close(fd);
    }
}

void canned_server_start(struct canned_server *s, void (*serve)(int fd))
{
    s->socket = test_path(test_folder(), "s.sock");
    const int listeners[2] = {listen_unix(s->socket), listen_tcp(s->url)};
    fflush(NULL);
    s->pid = fork();
    if (s->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        setpgid(0, 0);
        accept_all(listeners, serve);
    }
    assert_true(s->pid > 0);
    setpgid(s->pid, s->pid); // whichever of the two comes first
    close(listeners[0]);
    close(listeners[1]);
}

void canned_server_stop(struct canned_server *s)
{
    if (s->pid <= 0) return;
    kill(-s->pid, SIGKILL);
    waitpid(s->pid, NULL, 0);
    s->pid = 0;
}

bool canned_request(int fd, char *request, size_t size)
{
    size_t len = 0;
    for (;;) {
        ssize_t n = read(fd, request + len, size - 1 - len);
        if (n <= 0) return false;
        len += (size_t)n;
        request[len] = 0;
        const char *end = strstr(request, "\r\n\r\n"), *field = strstr(request, "Content-Length: ");
        if (end && len >= (size_t)(end + 4 - request) + (field ? strtoul(field + 16, NULL, 10) : 0))
            return true;
    }
}

bool canned_is(const char *request, const char *path)
{
    return strncmp(strchr(request, ' ') + 1, path, strlen(path)) == 0;
}

const char *canned_body(const char *request)
{
    return strstr(request, "\r\n\r\n") + 4;
}

void canned_text(int fd, const char *text)
{
    if (send(fd, text, strlen(text), MSG_NOSIGNAL) < 0) return;
}

void canned_response(int fd, const char *status, const char *body)
{
    char head[256];
    snprintf(head, sizeof head, "HTTP/1.1 %s\r\nContent-Length: %zu\r\n\r\n", status, strlen(body));
    canned_text(fd, head);
    canned_text(fd, body);
}

void canned_chunked(int fd)
{
    canned_text(fd, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
}

void canned_chunk(int fd, const char *body)
{
    char size[32];
    snprintf(size, sizeof size, "%zx\r\n", strlen(body));
    canned_text(fd, size);
    canned_text(fd, body);
    canned_text(fd, "\r\n");
}

void canned_end(int fd)
{
    canned_text(fd, "0\r\n\r\n");
}
