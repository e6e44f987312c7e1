/* comm_backend.h: what a backend gives to kernels/comm.c. Private to kernels/. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_COMM_BACKEND_H
#define KERNELS_COMM_BACKEND_H

#include "kernels/backend.h"
#include "kernels/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

// Each is the function of comm.h of that name.
enum comm_kind {
    COMM_ALL_REDUCE,
    COMM_ALL_GATHER,
    COMM_REDUCE_SCATTER,
    COMM_BROADCAST,
    COMM_SEND,
    COMM_RECV
};
struct comm_call {
    enum comm_kind kind;
    const char *what;
    const void *from; // may be `to`; of a gather its place there, of a scatter the whole
    void *to;
    size_t n;      // of one rank
    enum dtype dt; // DT_U8 of what is not added
    int peer;      // the root, who receives, or who sends
};

// Every field does what the function of comm.h of that name says, of two ranks or more. Failures
// of calls go to comm_fail().
struct comm_backend {
    enum status (*new_id)(unsigned char ret_id[COMM_ID_BYTES]); // NULL: it needs none
    enum status (*open)(struct comm *comm, const unsigned char *id);
    // comm: rank and size are the backend's to fill in. color < 0: all ranks, on an own stream.
    enum status (*split)(const struct comm *parent, int color, struct comm *comm);
    void (*close)(struct comm *comm);
    // NULL, all four: no use in it
    enum status (*share)(struct comm *comm, void *memory, size_t bytes, char *why, size_t why_size);
    enum status (*unmap_peers)(struct comm *comm);
    bool (*shares)(const struct comm *comm, const void *memory);
    void (*join)(struct comm *comm);
    void (*call)(struct comm *comm, const struct comm_call *c);
    // Where the program was built without it, what it is and the package that it wants, and nothing
    // else; or NULL.
    const char *missing, *package;
};

struct comm {
    const struct comm_backend *backend;
    struct device *dev;
    int rank, size;
    const struct comm *parent; // of which it was made: it has the deadline and the watch; or NULL
    double deadline_s;
    comm_watch_fn *watch; // NULL: there is none
    void *watch_context;
    bool failed; // written once, with `failure`, by whatever thread sees it: __atomic
    char failure[400];
    void *staging; // device memory for what is on its way from host to host, of staging_bytes
    size_t staging_bytes;
    void *state; // the backend's own
};

extern const struct comm_backend comm_mpi;
#if CW_CUDA
extern const struct comm_backend comm_nccl;
#endif

// Records the first failure, of call `what`, and has the device report it from now on.
void comm_fail(struct comm *comm, const char *what, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
bool comm_failed(const struct comm *comm);
// During a wait of call `what` that began at start_ns (clock_now_ns): false, after comm_fail(),
// where the deadline is past, or the watch says that a rank is gone. whom: "rank 2".
bool comm_may_wait(struct comm *comm, const char *what, int64_t start_ns, const char *whom);

#ifdef __cplusplus
}
#endif
#endif
