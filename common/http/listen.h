/* listen.h: listening sockets. A Unix socket belongs to one process: a lock on PATH.lock is held as
 * long as it listens, so that two servers started at once cannot both take it, and a socket file
 * left by a dead one is replaced. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_HTTP_LISTEN_H
#define COMMON_HTTP_LISTEN_H

#include "common/base/status.h"
#include <stdint.h>

struct unix_listener {
    char path[108]; // of struct sockaddr_un
    int fd, lock_fd;
};
// Mode 0600; missing folders are made (0700 for the last). ST_BUSY where another process serves
// there.
enum status unix_listen(const char *path, struct unix_listener *ret);
// Removes the socket and its lock. The descriptor is its taker's to close, if somebody took it
// (-1).
void unix_listener_close(struct unix_listener *l);

// "HOST:PORT", "[::1]:8000", ":8000" (loopback), as an option gives it. ret_host: without brackets.
enum status tcp_split(const char *option, const char *address, char ret_host[256],
                      char ret_port[16]);
// Off loopback only where nothing is lacking; `lacks` names the option that is, NULL: none.
// ret_port is the real one where 0 was asked for. ST_BUSY where another program listens there.
enum status tcp_listen(const char *option, const char *address, const char *lacks,
                       char ret_host[256], int *ret_fd, int *ret_port);

// Every connection is a descriptor, and the soft limit of these is often 1024: takes the hard one.
// True where that has no room for max_connections of each socket beside the process's own files:
// they are then what it has room for, and ret_files that limit.
bool limit_connections(int sockets, int own_files, int64_t *max_connections, int64_t *ret_files);

// ---- the file of an API key, which both sides read alike ----------------------------------------

// The first line without white space around it; the caller frees it. ST_INVALID where it is no word
// of 8 characters or more; `option` names itself in errors. Warns where others may read the file.
enum status api_key_read(const char *option, const char *path, char **ret);
// The same of a file that is this user's own (ST_MISMATCH), and is made where it is not there:
// 0600, "tml-" and 128 random bits.
enum status api_key_make(const char *option, const char *path, char **ret);

// ---- in place of a key --------------------------------------------------------------------------

// Signatures stand for a key in a URL: who was given one by this process may fetch what it is of,
// until the time that it names. A keyed hash, of which nothing is kept.
struct signing_key {
    unsigned char bytes[32];
};
enum status signing_key_new(struct signing_key *ret); // of this process alone

#define SIGNATURE_ROOM 96 // bytes of a signature, with its end
// "EXPIRES-DIGITS" of that name. expires_s: seconds since 1970.
void signature_text(const struct signing_key *key, const char *name, int64_t expires_s,
                    char ret[SIGNATURE_ROOM]);
// Compares what a client gave with the one that was wanted, in a time that does not depend on where
// they differ.
bool signature_is(const char *given, const char *wanted);

#endif
