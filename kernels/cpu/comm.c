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

static bool begin(struct comm *comm, const char *what, struct message *m)
{
    const struct peers *p = comm->state;
    const int peer = p->world_rank[m->peer], bytes = (int)m->bytes;
    const int error =
        m->receive ? mpi.Irecv(m->data, bytes, mpi.byte, peer, p->tag, mpi.world, &m->request)
                   : mpi.Isend(m->data, bytes, mpi.byte, peer, p->tag, mpi.world, &m->request);
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
static bool exchange(struct comm *comm, const char *what)
{
    struct peers *p = comm->state;
    const int64_t start_ns = clock_now_ns();
    const int n = p->n_open;
    int whom;
    for (p->n_open = 0; p->n_open < n; p->n_open++)
        if (!begin(comm, what, &p->open[p->n_open])) break;
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

// Whether this rank sends to rank r, and whether it receives from it.
static bool sends(const struct comm *comm, const struct comm_call *c, int r)
{
    if (c->kind == COMM_BROADCAST) return comm->rank == c->peer;
    return c->kind == COMM_SEND ? r == c->peer : c->kind != COMM_RECV;
}
static bool receives(const struct comm_call *c, int r)
{
    if (c->kind == COMM_BROADCAST || c->kind == COMM_RECV) return r == c->peer;
    return c->kind != COMM_SEND;
}

// A call, a piece of what each sends and receives at a time.
static void mpi_call(struct comm *comm, const struct comm_call *c)
{
    struct peers *p = comm->state;
    const bool adds = c->kind == COMM_ALL_REDUCE || c->kind == COMM_REDUCE_SCATTER;
    const size_t rank = (size_t)comm->rank, bytes = c->n * dtype_size(c->dt);
    const size_t sent_step = c->kind == COMM_REDUCE_SCATTER ? bytes : 0; // from rank to rank
    const size_t got_step = c->kind == COMM_ALL_GATHER ? bytes : 0;
    char *own = (char *)c->to + rank * got_step;
    if (c->kind == COMM_ALL_GATHER && c->from != own) memcpy(own, c->from, bytes);
    for (size_t at = 0; at < bytes; at += PIECE) {
        const size_t len = bytes - at < PIECE ? bytes - at : PIECE;
        char *sent = (char *)c->from + at, *got = (char *)c->to + at;
        for (int r = 0; r < comm->size; r++) {
            const size_t i = (size_t)r;
            void *to = adds ? p->pieces + i * PIECE : got + i * got_step;
            if (r == comm->rank) continue;
            if (receives(c, r))
                p->open[p->n_open++] =
                    (struct message){.peer = r, .receive = true, .data = to, .bytes = len};
            if (sends(comm, c, r))
                p->open[p->n_open++] =
                    (struct message){.peer = r, .data = sent + i * sent_step, .bytes = len};
        }
        if (!exchange(comm, c->what)) return;
        if (adds) add_pieces(comm, sent + rank * sent_step, got, len / dtype_size(c->dt), c->dt);
    }
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
    mpi_call(asked,
             &(struct comm_call){COMM_ALL_GATHER, "split", &color, colors, sizeof color, DT_U8, 0});
    if (comm_failed(parent)) FAIL(ST_DEVICE, "%s", parent->failure);
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
        const struct comm_call bye = {COMM_ALL_GATHER, "free", p->pieces + comm->rank, p->pieces, 1,
                                      DT_U8,           0};
        p->tag = TAG_BYE;
        mpi_call(comm, &bye);
        if (!comm_failed(comm)) call_bounded(comm, "MPI_Finalize", mpi.Finalize);
    }
    free(p->world_rank);
    free(p->open);
    free(p->pieces);
    free(p);
}

const struct comm_backend comm_mpi = {
    .open = mpi_open,
    .split = mpi_split,
    .close = mpi_close,
    .call = mpi_call,
};

#else

const struct comm_backend comm_mpi = {.missing = "MPI", .package = "libopenmpi-dev"};

#endif
