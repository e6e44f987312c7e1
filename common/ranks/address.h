/* address.h: where ranks meet: at an address that all are given (tcp://HOST:PORT), or at one that
 * rank 0 writes into a file which all can read (file://PATH). The file has a token of its own,
 * new each time and for this user's eyes only, so that who can read it is who may come. Main
 * thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_RANKS_ADDRESS_H
#define COMMON_RANKS_ADDRESS_H

#include "common/ranks/rendezvous.h"

struct address {
    bool file;
    bool one_host;                // all ranks are on one: a file's address is then loopback's
    const char *text;             // HOST:PORT or PATH; borrowed
    const struct ranks *who;      // borrowed
    char token[CONN_TOKEN_BYTES]; // file: filled by both calls
};

// ST_INVALID naming --rendezvous. token: that of tcp://, NULL or "" where there is none.
enum status address_init(struct address *p, const char *url, const char *token,
                         const struct ranks *who);

// Rank 0: listens. ST_BUSY where the port is in use, ST_INVALID off loopback without a token.
enum status address_listen(struct address *p, int *ret_fd);
// Takes the file away, where it is this one's. The descriptor is its taker's to close.
void address_leave(const struct address *p);

// Of a file: who fails before all have met leaves its sentence there in place of the address, for
// all others of this run, which must have an id. The first one stays.
void address_give_up(const struct address *p, const char *sentence);
// ST_PEER_GONE with such a sentence, not older than this process.
enum status address_check(const struct address *p);

// The others: one try to connect, non-blocking from then on. ST_NOT_FOUND, ST_PEER_GONE: nobody is
// there yet; ST_MISMATCH: the file is of another run.
enum status address_connect(struct address *p, int64_t deadline_ns, int *ret_fd);

#endif
