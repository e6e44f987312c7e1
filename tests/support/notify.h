/* notify.h: systemd's side of sd_notify(), for tests: the socket on which a service says how it is.
 * Failures fail the running test. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_NOTIFY_H
#define TESTS_SUPPORT_NOTIFY_H

#include <stdbool.h>

// A socket in a new folder, which $NOTIFY_SOCKET names until the caller unsets it.
int notify_open(void);
// Whether something with that word in it was said within `ms`; what came before is gone.
bool notify_heard(int fd, const char *word, int ms);

#endif
