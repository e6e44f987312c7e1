/* hosts.h: is a request meant for this server? A web page that a browser has open may send requests
 * to loopback addresses, and by a name of its own that suddenly leads there (DNS rebinding) even
 * read the answers. Browsers tell in Host and Origin which page that was. Pure functions; any
 * thread. */
#ifndef INFER_SERVER_HOSTS_H
#define INFER_SERVER_HOSTS_H

#include <stdbool.h>

// host: a Host header, "name", "name:port" or "[address]:port". Allowed are "localhost", loopback
// addresses and the names of `allowed` (without ports, NULL-ended, may be NULL), whatever the port.
bool host_is_allowed(const char *host, const char *const *allowed);
// origin: an Origin header, "scheme://host" or "scheme://host:port"; "null" is not allowed.
bool origin_is_allowed(const char *origin, const char *const *allowed);

#endif
