/* place.h: where ranks meet: at an address that all are given (tcp://HOST:PORT), or at one that
 * rank 0 writes into a file which all can read (file://PATH). The file has a token of its own, new
 * each time and for this user's eyes only, so that who can read it is who may come. Main thread. */
#ifndef COMMON_RANKS_PLACE_H
#define COMMON_RANKS_PLACE_H

#include "common/base/bytes.h"
#include "common/ranks/wire.h"

struct place {
    bool file;
    bool one_host;    // all ranks are on one: a file's address is then loopback's
    const char *text; // HOST:PORT or PATH; borrowed
    const char *run_id;
    char token[WIRE_TOKEN_BYTES]; // file: filled by both calls
};

// ST_INVALID naming --rendezvous. token: that of tcp://, NULL or "" where there is none.
enum status place_init(struct place *p, const char *url, const char *token, bool one_host,
                       const char *run_id);

// Rank 0: listens. ST_BUSY where the port is in use, ST_INVALID off loopback without a token.
enum status place_listen(struct place *p, int *ret_fd);
// Takes the file away, where it is this one's. The descriptor is its taker's to close.
void place_leave(const struct place *p);

// The others: one try to connect, non-blocking from then on. ST_NOT_FOUND, ST_PEER_GONE: nobody is
// there yet; ST_MISMATCH: the file is of another run.
enum status place_connect(struct place *p, int64_t deadline_ns, int *ret_fd);

#endif
