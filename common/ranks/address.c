/* address.c: the address of rank 0: how it is published, found and reached. */
// SPDX-License-Identifier: Apache-2.0
#include "common/ranks/address.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/http/listen.h"

#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#define OPTION     "--rendezvous"
#define CONNECT_MS 3000 // of one address; where nothing answers, the next one is tried
#define FILE_MAX   (64 << 10)
#define GIVE_UP_MS 100 // in which rank 0 has written its address

enum status address_init(struct address *p, const char *url, const char *token,
                         const struct ranks *who)
{
    struct address address = {.one_host = who->local_size == who->size, .who = who};
    char host[256], port[16];
    enum status st = ST_OK;
    address.file = strncmp(url, "file://", 7) == 0;
    address.text = url + (address.file ? 7 : 6);
    if (!address.file && strncmp(url, "tcp://", 6) != 0)
        FAIL(ST_INVALID, OPTION " %s: give tcp://HOST:PORT or file://PATH", url);
    if (address.file && address.text[0] != '/')
        FAIL(ST_INVALID, OPTION " %s: give the whole path, as file:///shared/run-1.ranks", url);
    if (address.file && token && *token)
        FAIL(ST_INVALID,
             OPTION " %s: the file has a token of its own; leave out "
                    "--rendezvous-token-file",
             url);
    if (!address.file) CHECK(tcp_split(OPTION, address.text, host, port));
    if (token && strlen(token) >= sizeof address.token)
        FAIL(ST_INVALID, "--rendezvous-token-file: the token has %zu bytes; %zu are the most",
             strlen(token), sizeof address.token - 1);
    snprintf(address.token, sizeof address.token, "%s", token ? token : "");
    *p = address;
out:
    return st;
}

// ---- rank 0 -------------------------------------------------------------------------------------

static bool address_text(const struct sockaddr *a, int port, char *ret, size_t size)
{
    char host[128];
    const bool v6 = a->sa_family == AF_INET6;
    const socklen_t len = v6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    if (v6 && IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)a)->sin6_addr)) return false;
    if (getnameinfo(a, len, host, sizeof host, NULL, 0, NI_NUMERICHOST) != 0) return false;
    snprintf(ret, size, v6 ? "[%s]:%d" : "%s:%d", host, port);
    return true;
}

// Of this machine; loopback's stand last, since on other machines they lead elsewhere.
static enum status list_addresses(int port, bool only_loopback, json_t *to)
{
    struct ifaddrs *all = NULL;
    char text[160];
    if (getifaddrs(&all) != 0)
        return status_fail(ST_IO, "the addresses of this machine: %s", strerror(errno));
    for (int loopback = only_loopback; loopback <= 1; loopback++)
        for (const struct ifaddrs *i = all; i; i = i->ifa_next) {
            const int family = i->ifa_addr ? i->ifa_addr->sa_family : AF_UNSPEC;
            if (family != AF_INET && (family != AF_INET6 || only_loopback)) continue;
            if (!(i->ifa_flags & IFF_UP) || !!(i->ifa_flags & IFF_LOOPBACK) != loopback) continue;
            if (address_text(i->ifa_addr, port, text, sizeof text))
                json_array_append_new(to, json_string(text));
        }
    freeifaddrs(all);
    return ST_OK;
}

static enum status new_token(char ret[CONN_TOKEN_BYTES])
{
    unsigned char random[24];
    if (getrandom(random, sizeof random, 0) != sizeof random)
        return status_fail(ST_IO, "no random numbers for a token: %s", strerror(errno));
    for (size_t i = 0; i < sizeof random; i++) snprintf(ret + 2 * i, 3, "%02x", random[i]);
    return ST_OK;
}

static enum status publish(const struct address *p, int port)
{
    json_t *addresses = json_array();
    json_t *file = json_pack("{s:O?, s:s, s:s}", "addresses", addresses, "token", p->token,
                             "run_id", p->who->run_id);
    enum status st;
    if (!addresses || !file) FAIL(ST_NO_MEMORY, "no memory for %s", p->text);
    CHECK(list_addresses(port, p->one_host, addresses));
    st = json_write_file(p->text, 0600, file);
out:
    json_decref(addresses);
    json_decref(file);
    return st;
}

enum status address_listen(struct address *p, int *ret_fd)
{
    char host[256];
    int fd = -1, port;
    enum status st;
    if (!p->file)
        return tcp_listen(OPTION, p->text, p->token[0] ? NULL : "--rendezvous-token-file", host,
                          ret_fd, &port);
    st = p->one_host ? ST_INVALID : tcp_listen(OPTION, "[::]:0", NULL, host, &fd, &port);
    if (st != ST_OK) // also where the kernel has no IPv6
        CHECK(
            tcp_listen(OPTION, p->one_host ? "127.0.0.1:0" : "0.0.0.0:0", NULL, host, &fd, &port));
    CHECK(new_token(p->token));
    CHECK(publish(p, port));
    *ret_fd = fd;
    fd = -1;
out:
    if (fd >= 0) close(fd);
    return st;
}

static enum status read_file(const char *path, json_t **ret)
{
    struct bytes text = BYTES_INIT;
    enum status st;
    CHECK(file_read_own(path, FILE_MAX, &text));
    CHECK(json_parse(path, text.data, text.len, ret));
out:
    bytes_release(&text);
    return st;
}

void address_leave(const struct address *p)
{
    json_t *file = NULL;
    const char *token = NULL;
    if (!p->file || read_file(p->text, &file) != ST_OK) return;
    if (json_get_string(p->text, file, "token", &token) == ST_OK && token &&
        strcmp(token, p->token) == 0)
        unlink(p->text);
    json_decref(file);
}

void address_give_up(const struct address *p, const char *sentence)
{
    if (!p->file || !p->who->run_id[0]) return;
    json_t *file = json_pack("{s:s, s:o, s:I}", "run_id", p->who->run_id, "failed",
                             json_clean_string(sentence), "at_ms", (json_int_t)clock_wall_ms());
    // Once more where rank 0, which had looked before, has written its address over it.
    for (int i = 0; i < 3 && file && address_check(p) == ST_OK; i++) {
        json_write_file(p->text, 0600, file); // else others wait until their deadline
        clock_sleep_ms(GIVE_UP_MS);
    }
    json_decref(file);
}

enum status address_check(const struct address *p)
{
    json_t *file = NULL;
    enum status st = ST_OK;
    if (!p->file || !p->who->run_id[0] || read_file(p->text, &file) != ST_OK) return ST_OK;
    const char *run_id = json_string_value(json_object_get(file, "run_id")),
               *failed = json_string_value(json_object_get(file, "failed"));
    const bool is_earlier = json_integer_value(json_object_get(file, "at_ms")) < p->who->since_ms;
    if (run_id && failed && strcmp(run_id, p->who->run_id) == 0 && !is_earlier)
        st = status_fail(ST_PEER_GONE, "%s", failed);
    json_decref(file);
    return st;
}

// ---- the others ---------------------------------------------------------------------------------

static enum status connect_one(const struct addrinfo *to, int64_t deadline_ns, int *ret_fd)
{
    int error = 0, yes = 1;
    socklen_t size = sizeof error;
    const int limit = clock_ms_until(deadline_ns), ms = limit < CONNECT_MS ? limit : CONNECT_MS;
    int fd = socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return status_fail(ST_IO, "cannot create a socket: %s", strerror(errno));
    if (connect(fd, to->ai_addr, to->ai_addrlen) != 0) error = errno;
    if (error == EINPROGRESS) {
        struct pollfd p = {.fd = fd, .events = POLLOUT};
        error = ETIMEDOUT;
        if (poll(&p, 1, ms) == 1) getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (error) {
        close(fd);
        return status_fail(ST_PEER_GONE, "%s", strerror(error));
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    *ret_fd = fd;
    return ST_OK;
}

static enum status connect_to(const char *address, int64_t deadline_ns, int *ret_fd)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    char host[256], port[16];
    enum status st;
    CHECK(tcp_split(OPTION, address, host, port));
    const int e = getaddrinfo(host, port, &hints, &found);
    if (e != 0) FAIL(ST_NOT_FOUND, "%s: %s", host, gai_strerror(e));
    for (const struct addrinfo *a = found; a; a = a->ai_next) {
        st = connect_one(a, deadline_ns, ret_fd);
        if (st == ST_OK) break;
    }
    st = status_context(st, "%s", address);
out:
    if (found) freeaddrinfo(found);
    return st;
}

static enum status connect_by_file(struct address *p, int64_t deadline_ns, int *ret_fd)
{
    json_t *file = NULL;
    const char *token = NULL, *run_id = NULL;
    enum status st;
    CHECK(read_file(p->text, &file));
    CHECK(json_get_string(p->text, file, "token", &token));
    CHECK(json_get_string(p->text, file, "run_id", &run_id));
    const json_t *addresses = json_object_get(file, "addresses");
    if (!token || !run_id || !json_array_size(addresses) || strlen(token) >= sizeof p->token)
        FAIL(ST_FORMAT, "%s is no file of a rendezvous", p->text);
    if (*run_id && *p->who->run_id && strcmp(run_id, p->who->run_id) != 0)
        FAIL(ST_MISMATCH, "%s is of another run (%s), which ended without taking it away", p->text,
             run_id);
    st = status_fail(ST_FORMAT, "%s has no address", p->text);
    for (size_t i = 0; st != ST_OK && i < json_array_size(addresses); i++) {
        const char *address = json_string_value(json_array_get(addresses, i));
        if (address) st = connect_to(address, deadline_ns, ret_fd);
    }
    strcpy(p->token, token);
    if (st != ST_OK)
        status_context(st, "nobody answers where %s leads, which may be an earlier run's", p->text);
out:
    json_decref(file);
    return st;
}

enum status address_connect(struct address *p, int64_t deadline_ns, int *ret_fd)
{
    return p->file ? connect_by_file(p, deadline_ns, ret_fd)
                   : connect_to(p->text, deadline_ns, ret_fd);
}
