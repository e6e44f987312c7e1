/* comm.c: communicators of CPUs, over MPI. Every call is messages from rank to rank, sent and
 * received at once and waited for with a deadline; MPI's own collectives are not used, because they
 * wait for ever and choose the order of a sum by its size. Here a sum is taken in rank order.
 *
 * Open MPI is looked up when the first communicator is opened, so that programs start without it.
 * A communicator made of another is a list of its ranks and a tag of its own. MPI can be started
 * once in a process, and is ended by the free of the communicator that started it, after a last
 * message from all ranks to all; where one has failed, it is left as it is. Its start and its end
 * know no deadline: a thread of its own waits there, and is left behind where others do not come.
 */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/comm_backend.h"
#include "kernels/cpu/cpu.h"

#if CW_MPI

#include "common/base/clock.h"
#include "common/base/spawn.h"

#include <dlfcn.h>
#include <mpi.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LIBRARY "libmpi.so.40" // Open MPI 3, 4 and 5
#define TAG_BYE 1              // of the last message; calls' tags begin after it
#define PIECE   (1u << 20)     // bytes of a message, at most
#define SPIN_MS 0.2            // of a wait, before it sleeps between looks
#define BYE_S   2.0            // that ranks wait for each other at the end

// ---- the library -------------------------------------------------------------------------------

#define EACH_CALL(X)                                                                               \
    X(Init_thread)                                                                                 \
    X(Comm_rank)                                                                                   \
    X(Comm_size)                                                                                   \
    X(Comm_set_errhandler) X(Isend) X(Irecv) X(Test) X(Cancel) X(Error_string) X(Finalize)

static struct {
    void *library;
#define X(name) __typeof__(MPI_##name) *name;
    EACH_CALL(X)
#undef X
    MPI_Comm world;
    MPI_Datatype byte;
    MPI_Errhandler errors_return;
    int last_tag;
} mpi;

static enum status find(const char *name, void *ret)
{
    void *symbol = dlsym(mpi.library, name);
    if (!symbol) return status_fail(ST_UNSUPPORTED, LIBRARY " lacks %s; is it Open MPI's?", name);
    memcpy(ret, &symbol, sizeof symbol);
    return ST_OK;
}

static enum status load(void)
{
    enum status st;
    mpi.library = dlopen(LIBRARY, RTLD_NOW | RTLD_GLOBAL); // its plug-ins look for its symbols
    if (!mpi.library)
        FAIL(ST_UNSUPPORTED, "several ranks on the CPU want Open MPI: %s; install openmpi-bin",
             dlerror());
#define X(name) CHECK(find("MPI_" #name, &mpi.name));
    EACH_CALL(X)
#undef X
    CHECK(find("ompi_mpi_comm_world", &mpi.world));
    CHECK(find("ompi_mpi_byte", &mpi.byte));
    CHECK(find("ompi_mpi_errors_return", &mpi.errors_return));
out:
    return st;
}

static enum status check(int error, const char *what)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int len;
    if (error == MPI_SUCCESS) return ST_OK;
    mpi.Error_string(error, text, &len);
    return status_fail(ST_DEVICE, "MPI: %s: %s", what, text);
}

static int init(void)
{
    int level;
    return mpi.Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
}

static int finalize(void)
{
    return mpi.Finalize();
}

static struct { // one at a time; it outlives whoever does not wait any more
    int (*call)(void);
    int error;
    bool done; // __atomic
} bounded;

static void *call_there(void *unused)
{
    bounded.error = bounded.call();
    __atomic_store_n(&bounded.done, true, __ATOMIC_RELEASE);
    return unused;
}

// A call that all ranks make, with the communicator's deadline and watch.
static enum status call_bounded(struct comm *comm, const char *what, int (*call)(void))
{
    const int64_t start_ns = clock_now_ns();
    pthread_t thread;
    bounded.call = call;
    bounded.done = false;
    const int error = thread_start(&thread, call_there, NULL);
    if (error) return status_fail(ST_NO_MEMORY, "no thread for %s: %s", what, strerror(error));
    while (!__atomic_load_n(&bounded.done, __ATOMIC_ACQUIRE)) {
        if (!comm_may_wait(comm, what, start_ns, "the other ranks")) {
            pthread_detach(thread);
            return status_fail(ST_PEER_GONE, "%s", comm->failure);
        }
        clock_sleep_ms(1);
    }
    pthread_join(thread, NULL);
    return check(bounded.error, what);
}

static enum status start(struct comm *comm)
{
    enum status st;
    if (mpi.library) FAIL(ST_UNSUPPORTED, "MPI was started before in this process");
    // Containers forbid a process to read another's memory, of which Open MPI learns too late.
    setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 0);
    CHECK(load());
    CHECK(call_bounded(comm, "MPI_Init", init));
    CHECK(check(mpi.Comm_set_errhandler(mpi.world, mpi.errors_return), "MPI_Comm_set_errhandler"));
    mpi.last_tag = TAG_BYE;
out:
    return st;
}

// ---- messages ----------------------------------------------------------------------------------

struct message {
    int peer; // a rank of the communicator
    bool receive, done;
    void *data;
    size_t bytes;
    MPI_Request request;
};

struct peers {
    int tag;
    bool started_mpi;
    int *world_rank;      // (size)
    struct message *open; // (n_open of 2 * size) of the call at hand
    int n_open;
    char *pieces; // (size, PIECE) of all ranks, for a sum
};

static void send_to(const struct comm *comm, int to, const void *data, size_t bytes)
{
    struct peers *p = comm->state;
    p->open[p->n_open++] = (struct message){.peer = to, .data = (void *)data, .bytes = bytes};
}

static void receive_from(const struct comm *comm, int from, void *data, size_t bytes)
{
    struct peers *p = comm->state;
    p->open[p->n_open++] =
        (struct message){.peer = from, .receive = true, .data = data, .bytes = bytes};
}

static bool begin(struct comm *comm, const char *what, struct message *m, int tag)
{
    const struct peers *p = comm->state;
    const int peer = p->world_rank[m->peer], bytes = (int)m->bytes;
    const int error = m->receive
                          ? mpi.Irecv(m->data, bytes, mpi.byte, peer, tag, mpi.world, &m->request)
                          : mpi.Isend(m->data, bytes, mpi.byte, peer, tag, mpi.world, &m->request);
    if (check(error, m->receive ? "MPI_Irecv" : "MPI_Isend") == ST_OK) return true;
    comm_fail(comm, what, "rank %d: %s", m->peer, status_message());
    return false;
}

// Takes what is done off the list; whom the rest waits for, -1 where there is none.
static int look(struct comm *comm, const char *what)
{
    struct peers *p = comm->state;
    int n = 0, whom = -1;
    for (int i = 0; i < p->n_open; i++) {
        struct message *m = &p->open[i];
        int done = 0;
        if (check(mpi.Test(&m->request, &done, MPI_STATUS_IGNORE), "MPI_Test") != ST_OK)
            comm_fail(comm, what, "rank %d: %s", m->peer, status_message());
        if (done) continue;
        if (whom < 0 || m->receive) whom = m->peer;
        p->open[n++] = *m;
    }
    p->n_open = n;
    return whom;
}

static void give_up(struct peers *p)
{
    int done;
    for (int i = 0; i < p->n_open; i++) {
        if (p->open[i].receive && mpi.Cancel(&p->open[i].request) == MPI_SUCCESS)
            mpi.Test(&p->open[i].request, &done, MPI_STATUS_IGNORE);
    }
    p->n_open = 0;
}

// Sends and receives what was listed. False, after comm_fail(), where that does not come to its
// end.
static bool exchange(struct comm *comm, const char *what, int tag)
{
    struct peers *p = comm->state;
    const int64_t start_ns = clock_now_ns();
    const int n = p->n_open;
    int whom;
    for (p->n_open = 0; p->n_open < n; p->n_open++)
        if (!begin(comm, what, &p->open[p->n_open], tag)) break;
    while ((whom = look(comm, what)) >= 0 && !comm_failed(comm)) {
        char name[24];
        snprintf(name, sizeof name, "rank %d", whom);
        if (!comm_may_wait(comm, what, start_ns, name)) break;
        if (clock_ms_since(start_ns) < SPIN_MS)
            sched_yield();
        else
            nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    if (comm_failed(comm)) give_up(p);
    return !comm_failed(comm);
}

// What every rank has in `part` to all, each to its place.
static bool gather(struct comm *comm, const char *what, int tag, const void *part, void *all,
                   size_t stride, size_t bytes)
{
    for (int r = 0; r < comm->size; r++) {
        if (r == comm->rank) continue;
        receive_from(comm, r, (char *)all + (size_t)r * stride, bytes);
        send_to(comm, r, part, bytes);
    }
    return exchange(comm, what, tag);
}

// ---- opening -----------------------------------------------------------------------------------

static enum status new_peers(struct comm *comm)
{
    const size_t size = (size_t)comm->size;
    struct peers *p = comm->state = calloc(1, sizeof *p);
    if (!p) return status_fail(ST_NO_MEMORY, "no memory for a communicator");
    p->world_rank = calloc(size, sizeof *p->world_rank);
    p->open = calloc(2 * size, sizeof *p->open);
    p->pieces = malloc(size * PIECE);
    p->tag = ++mpi.last_tag; // ranks make the same calls, and so the same tags
    if (p->world_rank && p->open && p->pieces) return ST_OK;
    return status_fail(ST_NO_MEMORY, "no memory for a communicator of %d ranks", comm->size);
}

static enum status mpi_open(struct comm *comm, const unsigned char *id)
{
    enum status st;
    int rank, size;
    (void)id;
    CHECK(start(comm));
    CHECK(check(mpi.Comm_rank(mpi.world, &rank), "MPI_Comm_rank"));
    CHECK(check(mpi.Comm_size(mpi.world, &size), "MPI_Comm_size"));
    if (rank != comm->rank || size != comm->size)
        FAIL(ST_MISMATCH,
             "rank %d of %d is rank %d of %d to MPI; start the ranks with mpirun -n %d, or srun",
             comm->rank, comm->size, rank, size, comm->size);
    CHECK(new_peers(comm));
    struct peers *p = comm->state;
    p->started_mpi = true;
    for (int r = 0; r < size; r++) p->world_rank[r] = r;
out:
    return st;
}

static enum status mpi_split(const struct comm *parent, int color, struct comm *comm)
{
    enum status st = ST_OK;
    const struct peers *of = parent->state;
    struct comm *asked = (struct comm *)parent;
    int *colors = calloc((size_t)parent->size, sizeof *colors);
    if (!colors) return status_fail(ST_NO_MEMORY, "no memory for a communicator");
    colors[parent->rank] = color;
    if (!gather(asked, "split", of->tag, &color, colors, sizeof color, sizeof color))
        FAIL(ST_DEVICE, "%s", parent->failure);
    for (int r = 0; r < parent->size; r++) {
        if (r == parent->rank) comm->rank = comm->size;
        comm->size += colors[r] == color;
    }
    CHECK(new_peers(comm));
    struct peers *p = comm->state;
    for (int r = 0, n = 0; r < parent->size; r++)
        if (colors[r] == color) p->world_rank[n++] = of->world_rank[r];
out:
    free(colors);
    return st;
}

// The ranks wait for each other first, since one that is stopped is named there.
static void mpi_close(struct comm *comm)
{
    struct peers *p = comm->state;
    if (!p) return;
    if (p->started_mpi && !comm_failed(comm)) {
        comm_set_deadline(comm, BYE_S);
        if (gather(comm, "free", TAG_BYE, p->pieces, p->pieces, PIECE, 1))
            call_bounded(comm, "MPI_Finalize", finalize);
    }
    free(p->world_rank);
    free(p->open);
    free(p->pieces);
    free(p);
}

// ---- calls -------------------------------------------------------------------------------------

static size_t piece_at(size_t at, size_t bytes)
{
    return bytes - at < PIECE ? bytes - at : PIECE;
}

// ret: the sum of n elements of `mine`, which is this rank's, and of all others' in `pieces`, in
// rank order.
static void add_pieces(const struct comm *comm, const void *mine, void *ret, size_t n,
                       enum dtype dt)
{
    const struct peers *p = comm->state;
#pragma omp parallel for if (n > PARALLEL_WORK)
    for (int64_t i = 0; i < (int64_t)n; i++) {
        float sum = number_at(comm->rank == 0 ? mine : p->pieces, dt, i);
        for (int r = 1; r < comm->size; r++)
            sum += number_at(r == comm->rank ? mine : p->pieces + (size_t)r * PIECE, dt, i);
        set_number(ret, dt, i, sum);
    }
}

static void mpi_all_reduce(struct comm *comm, void *data, size_t n, enum dtype dt)
{
    const struct peers *p = comm->state;
    const size_t bytes = n * dtype_size(dt);
    for (size_t at = 0; at < bytes; at += PIECE) {
        char *mine = (char *)data + at;
        const size_t len = piece_at(at, bytes);
        if (!gather(comm, "all_reduce", p->tag, mine, p->pieces, PIECE, len)) return;
        add_pieces(comm, mine, mine, len / dtype_size(dt), dt);
    }
}

static void mpi_all_gather(struct comm *comm, const void *part, void *all, size_t bytes)
{
    const struct peers *p = comm->state;
    char *own = (char *)all + (size_t)comm->rank * bytes;
    if (part != own) memcpy(own, part, bytes);
    for (size_t at = 0; at < bytes; at += PIECE)
        if (!gather(comm, "all_gather", p->tag, own + at, (char *)all + at, bytes,
                    piece_at(at, bytes)))
            return;
}

static void mpi_reduce_scatter(struct comm *comm, const void *all, void *part, size_t n,
                               enum dtype dt)
{
    const struct peers *p = comm->state;
    const size_t bytes = n * dtype_size(dt);
    for (size_t at = 0; at < bytes; at += PIECE) {
        const size_t len = piece_at(at, bytes);
        const char *from = (const char *)all + at;
        for (int r = 0; r < comm->size; r++) {
            if (r == comm->rank) continue;
            receive_from(comm, r, p->pieces + (size_t)r * PIECE, len);
            send_to(comm, r, from + (size_t)r * bytes, len);
        }
        if (!exchange(comm, "reduce_scatter", p->tag)) return;
        add_pieces(comm, from + (size_t)comm->rank * bytes, (char *)part + at, len / dtype_size(dt),
                   dt);
    }
}

static void mpi_broadcast(struct comm *comm, void *data, size_t bytes, int root)
{
    const struct peers *p = comm->state;
    for (size_t at = 0; at < bytes; at += PIECE) {
        char *piece = (char *)data + at;
        const size_t len = piece_at(at, bytes);
        if (comm->rank != root) receive_from(comm, root, piece, len);
        for (int r = 0; comm->rank == root && r < comm->size; r++)
            if (r != root) send_to(comm, r, piece, len);
        if (!exchange(comm, "broadcast", p->tag)) return;
    }
}

static void mpi_send(struct comm *comm, const void *data, size_t bytes, int to)
{
    const struct peers *p = comm->state;
    for (size_t at = 0; at < bytes; at += PIECE) {
        send_to(comm, to, (const char *)data + at, piece_at(at, bytes));
        if (!exchange(comm, "send", p->tag)) return;
    }
}

static void mpi_recv(struct comm *comm, void *data, size_t bytes, int from)
{
    const struct peers *p = comm->state;
    for (size_t at = 0; at < bytes; at += PIECE) {
        receive_from(comm, from, (char *)data + at, piece_at(at, bytes));
        if (!exchange(comm, "recv", p->tag)) return;
    }
}

// A call is done when it returns.
static void mpi_join(struct comm *comm)
{
    (void)comm;
}

const struct comm_backend comm_mpi = {
    .open = mpi_open,
    .split = mpi_split,
    .close = mpi_close,
    .join = mpi_join,
    .all_reduce = mpi_all_reduce,
    .all_gather = mpi_all_gather,
    .reduce_scatter = mpi_reduce_scatter,
    .broadcast = mpi_broadcast,
    .send = mpi_send,
    .recv = mpi_recv,
};

#else

const struct comm_backend comm_mpi = {.missing = "MPI", .package = "libopenmpi-dev"};

#endif
