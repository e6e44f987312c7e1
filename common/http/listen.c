/* listen.c: listening sockets, and the key to one, made before anything else starts (main thread).
 */
// SPDX-License-Identifier: Apache-2.0
#include "common/http/listen.h"
#include "common/base/file.h"
#include "common/base/hash.h"
#include "common/base/log.h"

#include <openssl/hmac.h>
#include <openssl/crypto.h>
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define BACKLOG 512

static enum status make_parent(const char *path)
{
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    struct stat info;
    if (!slash || slash == path) return ST_OK;
    snprintf(folder, sizeof folder, "%.*s", (int)(slash - path), path);
    if (stat(folder, &info) == 0) return ST_OK;
    mode_t mask = umask(0077);
    enum status st = file_make_folders(folder);
    umask(mask);
    return st;
}

static enum status take_lock(const char *path, int *ret_fd)
{
    char lock[128];
    struct stat by_name, by_fd;
    snprintf(lock, sizeof lock, "%s.lock", path);
    for (;;) {
        // a link, or another user's file, could let that user keep the lock, or lead it elsewhere
        int fd = open(lock, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
        if (fd < 0)
            return status_fail(ST_IO, "%s: %s", lock,
                               errno == ELOOP ? "it is a link, which is not followed: remove it"
                                              : strerror(errno));
        enum status st = file_check_owner(fd, lock);
        if (st != ST_OK) {
            close(fd);
            return st;
        }
        if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
            close(fd);
            return status_fail(ST_BUSY,
                               "%s: another server already serves there; stop it, or give this one "
                               "its own --socket and --bridge",
                               path);
        }
        // its last holder removes the file: the lock counts only if the name still leads to it
        if (fstat(fd, &by_fd) == 0 && lstat(lock, &by_name) == 0 &&
            by_fd.st_ino == by_name.st_ino) {
            *ret_fd = fd;
            return ST_OK;
        }
        close(fd);
    }
}

static bool somebody_answers(const struct sockaddr_un *address)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool answers =
        fd >= 0 &&
        (connect(fd, (const struct sockaddr *)address, sizeof *address) == 0 || errno == EAGAIN);
    if (fd >= 0) close(fd);
    return answers;
}

static enum status bind_unix(const char *path, int *ret_fd)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct stat info;
    strcpy(address.sun_path, path); // its length was checked
    if (somebody_answers(&address))
        return status_fail(
            ST_BUSY, "%s: another program already serves there; stop it or choose another --socket",
            path);
    if (lstat(path, &info) == 0 && !S_ISSOCK(info.st_mode))
        return status_fail(ST_INVALID, "%s exists and is not a socket; choose another --socket",
                           path);
    unlink(path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return status_fail(ST_IO, "cannot create a socket: %s", strerror(errno));
    mode_t mask = umask(0177);
    int e = bind(fd, (struct sockaddr *)&address, sizeof address);
    umask(mask);
    if (e != 0 || listen(fd, BACKLOG) != 0) {
        e = errno;
        close(fd);
        return status_fail(ST_IO, "%s: cannot listen: %s", path, strerror(e));
    }
    *ret_fd = fd;
    return ST_OK;
}

enum status unix_listen(const char *path, struct unix_listener *ret)
{
    struct unix_listener l = {.fd = -1, .lock_fd = -1};
    enum status st;
    if (strlen(path) >= sizeof l.path)
        return status_fail(ST_INVALID, "--socket %s: a socket's path has at most %zu bytes", path,
                           sizeof l.path - 1);
    strcpy(l.path, path);
    CHECK(make_parent(path));
    CHECK(take_lock(path, &l.lock_fd));
    CHECK(bind_unix(path, &l.fd));
    *ret = l;
    return ST_OK;
out:
    if (l.lock_fd >= 0) close(l.lock_fd);
    return st;
}

void unix_listener_close(struct unix_listener *l)
{
    if (l->lock_fd < 0) return;
    char lock[128];
    snprintf(lock, sizeof lock, "%s.lock", l->path);
    unlink(l->path);
    unlink(lock);
    close(l->lock_fd);
    if (l->fd >= 0) close(l->fd);
    l->fd = l->lock_fd = -1;
}

static bool is_loopback(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET)
        return (ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr) >> 24) == 127;
    if (address->sa_family == AF_INET6)
        return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)address)->sin6_addr);
    return false;
}

enum status tcp_split(const char *option, const char *address, char host[256], char port[16])
{
    const char *colon = strrchr(address, ':');
    size_t n = colon ? (size_t)(colon - address) : 0;
    bool digits = colon && colon[1] && strlen(colon + 1) <= 5 &&
                  strspn(colon + 1, "0123456789") == strlen(colon + 1) && atoi(colon + 1) <= 65535;
    if (!digits || n >= 256)
        return status_fail(ST_INVALID, "%s %s: give HOST:PORT, as 127.0.0.1:8000", option, address);
    bool brackets = n >= 2 && address[0] == '[' && address[n - 1] == ']';
    if (brackets) {
        address++;
        n -= 2;
    }
    snprintf(host, 256, "%.*s", (int)n, address);
    if (n == 0) strcpy(host, "127.0.0.1");
    snprintf(port, 16, "%s", colon + 1);
    return ST_OK;
}

static const char *listen_error(int error)
{
    switch (error) {
    case EADDRINUSE:
        return "another program listens there already: stop it, or choose another port";
    case EADDRNOTAVAIL:
        return "that is no address of this machine";
    default:
        return strerror(error);
    }
}

enum status tcp_listen(const char *option, const char *address, const char *lacks,
                       char ret_host[256], int *ret_fd, int *ret_port)
{
    char port[16];
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *found = NULL;
    int fd = -1, yes = 1;
    enum status st;
    CHECK(tcp_split(option, address, ret_host, port));
    int e = getaddrinfo(ret_host, port, &hints, &found);
    if (e != 0) FAIL(ST_INVALID, "%s %s: %s", option, address, gai_strerror(e));
    if (!is_loopback(found->ai_addr) && lacks)
        FAIL(ST_INVALID, "%s %s is open to other machines: that needs %s (or listen on 127.0.0.1)",
             option, address, lacks);
    fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
        bind(fd, found->ai_addr, found->ai_addrlen) != 0 || listen(fd, BACKLOG) != 0)
        FAIL(errno == EADDRINUSE ? ST_BUSY : ST_IO, "%s %s: %s", option, address,
             listen_error(errno));
    struct sockaddr_storage bound = {.ss_family = AF_INET};
    socklen_t size = sizeof bound;
    getsockname(fd, (struct sockaddr *)&bound, &size);
    *ret_port = ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port
                                                  : ((struct sockaddr_in *)&bound)->sin_port);
    *ret_fd = fd;
    fd = -1;
out:
    if (fd >= 0) close(fd);
    if (found) freeaddrinfo(found);
    return st;
}

bool limit_connections(int sockets, int own_files, int64_t *max_connections, int64_t *ret_files)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return false;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_max == RLIM_INFINITY) return false;
    int64_t room = ((int64_t)limit.rlim_max - own_files) / sockets;
    if (room >= *max_connections) return false;
    *max_connections = room > 1 ? room : 1;
    *ret_files = (int64_t)limit.rlim_max;
    return true;
}

// ---- keys --------------------------------------------------------------------------------------

enum status api_key_read(const char *option, const char *path, char **ret)
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
        if (!isgraph((unsigned char)start[i]))
            FAIL(ST_INVALID, "%s %s: the first line must be one word of plain ASCII", option, path);
    if (n < 8) FAIL(ST_INVALID, "%s %s: the key must have 8 characters or more", option, path);
    if (stat(path, &info) == 0 && (info.st_mode & 077))
        log_warn("%s %s can be read by others: chmod 600 it", option, path);
    *ret = strndup(start, n);
    if (!*ret) st = status_fail(ST_NO_MEMORY, "out of memory");
out:
    bytes_release(&text);
    return st;
}

enum status api_key_make(const char *option, const char *path, char **ret)
{
    uint64_t random[2];
    char text[64];
    enum status st;
    if (!file_exists(path)) {
        if (getrandom(random, sizeof random, 0) != sizeof random)
            return status_fail(ST_IO, "%s: the system gives no random bits for a key", path);
        snprintf(text, sizeof text, "tml-%016" PRIx64 "%016" PRIx64 "\n", random[0], random[1]);
        CHECK(file_write_atomic(path, 0600, text, strlen(text)));
    }
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) FAIL(ST_IO, "%s %s: %s", option, path, strerror(errno));
    st = file_check_owner(fd, path);
    close(fd);
    if (st == ST_OK) st = api_key_read(option, path, ret);
out:
    return st;
}

enum status signing_key_new(struct signing_key *ret)
{
    if (getrandom(ret->bytes, sizeof ret->bytes, 0) == sizeof ret->bytes) return ST_OK;
    return status_fail(ST_IO, "the system has no random numbers to sign URLs by");
}

// It is the HMAC-SHA256 of the time and the name.
void signature_text(const struct signing_key *key, const char *name, int64_t expires_s,
                    char ret[SIGNATURE_ROOM])
{
    unsigned char name_hash[HASH_SHA256_BYTES], text[sizeof expires_s + sizeof name_hash],
        digest[EVP_MAX_MD_SIZE] = {0};
    hash_sha256(name, strlen(name), name_hash);
    memcpy(text, &expires_s, sizeof expires_s);
    memcpy(text + sizeof expires_s, name_hash, sizeof name_hash);
    HMAC(EVP_sha256(), key->bytes, sizeof key->bytes, text, sizeof text, digest, NULL);
    int n = snprintf(ret, SIGNATURE_ROOM, "%" PRId64 "-", expires_s);
    for (int i = 0; i < HASH_SHA256_BYTES; i++, n += 2) snprintf(ret + n, 3, "%02x", digest[i]);
}

bool signature_is(const char *given, const char *wanted)
{
    const size_t n = strlen(wanted);
    return strlen(given) == n && CRYPTO_memcmp(given, wanted, n) == 0;
}
