/* http_route.c: which handler a request goes to, whether its client may ask for that, and what it
 * is called. Loop's thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/http/http_impl.h"

#include <arpa/inet.h>
#include <openssl/crypto.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

#define HOST_BYTES 256

const char *http_header_of(const struct http_request *q, const char *name)
{
    return MHD_lookup_connection_value(q->connection, MHD_HEADER_KIND, name);
}

// "Authorization: Bearer KEY", or "X-API-Key: KEY".
static bool key_is_right(const struct http_request *q)
{
    const char *key = q->listener->http->options.api_key;
    const char *given = http_header_of(q, "Authorization");
    if (given && strncasecmp(given, "Bearer ", 7) == 0)
        given += 7;
    else
        given = http_header_of(q, "X-API-Key");
    return given && strlen(given) == strlen(key) && CRYPTO_memcmp(given, key, strlen(key)) == 0;
}

// The name without port, brackets and the last dot; false where it is none.
static bool split_name(const char *host, char ret[HOST_BYTES])
{
    size_t len = strlen(host), n = len;
    const char *start = host, *colon = strrchr(host, ':'), *bracket = strrchr(host, ']');
    if (host[0] == '[') {
        if (!bracket || (bracket[1] && bracket[1] != ':')) return false;
        start = host + 1;
        n = (size_t)(bracket - start);
    } else if (colon) {
        n = (size_t)(colon - host);
    }
    if (n > 0 && start[n - 1] == '.') n--;
    if (n == 0 || n >= HOST_BYTES) return false;
    memcpy(ret, start, n);
    ret[n] = 0;
    return true;
}

static bool is_loopback_name(const char *name)
{
    struct in_addr four;
    struct in6_addr six;
    if (strcasecmp(name, "localhost") == 0) return true;
    if (inet_pton(AF_INET, name, &four) == 1) return ntohl(four.s_addr) >> 24 == 127;
    return inet_pton(AF_INET6, name, &six) == 1 && IN6_IS_ADDR_LOOPBACK(&six);
}

bool host_is_allowed(const char *host, const char *const *allowed)
{
    char name[HOST_BYTES];
    if (!split_name(host, name)) return false;
    if (is_loopback_name(name)) return true;
    for (; allowed && *allowed; allowed++)
        if (strcasecmp(name, *allowed) == 0) return true;
    return false;
}

bool origin_is_allowed(const char *origin, const char *const *allowed)
{
    const char *host = strstr(origin, "://");
    return host && !strchr(host + 3, '/') && host_is_allowed(host + 3, allowed);
}

// Refuses what this client may not ask for: then the request has its answer. The Unix socket's
// file mode has decided for its clients. TCP asks for the key; without one, whoever is on this
// machine may come, so that what changes the server is not to be had there, and web pages are kept
// out.
static void check_access(struct http_request *q)
{
    const struct http_options *o = &q->listener->http->options;
    enum http_access access = q->route ? q->route->access : HTTP_NEEDS_KEY;
    if (!q->listener->tcp) return;
    if (o->api_key) {
        if (access == HTTP_OPEN || key_is_right(q)) return;
        http_header(q, "WWW-Authenticate", "Bearer");
        http_fail(q, 401, "this address needs the API key: send it as 'Authorization: Bearer KEY'");
        return;
    }
    const char *host = http_header_of(q, "Host"), *origin = http_header_of(q, "Origin");
    if (host && !host_is_allowed(host, o->allowed_hosts)) {
        http_fail(q, 403,
                  "Host '%s' is none of this server's names: ask it as localhost, or start it "
                  "with --allowed-hosts or --api-key-file",
                  CUT(host, 100));
    } else if (origin && !origin_is_allowed(origin, o->allowed_hosts)) {
        http_fail(q, 403,
                  "pages of '%s' may not ask this server: start it with --allowed-hosts or "
                  "--api-key-file if they are to",
                  CUT(origin, 100));
    } else if (access == HTTP_ADMIN) {
        http_fail(q, 403, "%s is there on the Unix socket, and on TCP only with --api-key-file",
                  CUT(q->route->path, 60));
    }
}

void http_name_request(struct http_request *q)
{
    const char *given = http_header_of(q, "X-Request-Id");
    size_t n = given ? strlen(given) : 0;
    for (size_t i = 0; i < n; i++)
        if (given[i] < 0x20 || given[i] > 0x7e) n = 0;
    if (n > 0 && n <= REQUEST_ID_MAX) {
        memcpy(q->request_id, given, n + 1);
        return;
    }
    unsigned char random[16] = {0};
    if (getrandom(random, sizeof random, 0) != sizeof random) memcpy(random, &q, sizeof q);
    for (size_t i = 0; i < sizeof random; i++)
        snprintf(q->request_id + 2 * i, 3, "%02x", random[i]);
}

// Clients end paths with a slash now and then. ret_tail: what stands behind a route's "/a/".
static bool path_is(const char *path, const char *url, const char **ret_tail)
{
    size_t n = strlen(path), len = strlen(url);
    if (n > 2 && path[n - 1] == '*') {
        if (strncmp(path, url, n - 1) != 0 || len < n) return false;
        *ret_tail = url + n - 1;
        return true;
    }
    while (len > 1 && url[len - 1] == '/') len--;
    return n == len && memcmp(path, url, n) == 0;
}

void http_find_route(struct http_request *q, const char *url, const char *method)
{
    const struct http_options *o = &q->listener->http->options;
    const char *wanted = strcmp(method, "HEAD") == 0 ? "GET" : method;
    char allow[64] = "";
    for (const struct http_route *r = o->routes; r->path; r++) {
        if (!path_is(r->path, url, &q->path_tail)) continue;
        if (strcmp(r->method, wanted) == 0) {
            q->route = r;
            break;
        }
        snprintf(allow, sizeof allow, "%s%s", r->method, strcmp(r->method, "GET") ? "" : ", HEAD");
    }
    check_access(q);
    if (http_replied(q)) return;
    if (!q->route && allow[0]) {
        http_header(q, "Allow", allow);
        http_fail(q, 405, "%s takes %s, not %s", CUT(url, 100), allow, CUT(method, 20));
    } else if (!q->route) {
        http_fail(q, 404, "there is no %s here; %s lists what there is", CUT(url, 150), o->page);
    }
}
