/* hosts.c: which Host and Origin headers are taken. */
#include "common/http/http_impl.h"

#include <arpa/inet.h>
#include <string.h>
#include <strings.h>

#define HOST_BYTES 256

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
