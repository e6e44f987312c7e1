/* comm.cu: communicators of GPUs, over NCCL. Calls are enqueued on the device's stream, or on one
 * of the communicator's own (comm_beside) that waits for what the device was given before.
 *
 * NCCL is looked up when it is first used (library.cuh), and opened non-blocking,
 * so that no call of it waits by itself. What the device's thread may come to wait for, anywhere,
 * is a stream in which another rank is missing: so each communicator has a thread that looks, every
 * 20 ms, whether the oldest call is done, and where its deadline is past, NCCL has failed, or a
 * rank is gone, aborts it. That ends its kernels; what they leave is garbage, and the next
 * device_sync() says so. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/clock.h"
#include "kernels/comm_backend.h"
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/comm/oneshot.cuh"
#include <stdio.h>
#include <stdlib.h>

#if __has_include(<nccl.h>)

#include "kernels/cuda/library.cuh"
#include <nccl.h>
#include <pthread.h>

#define LOOK_MS  20
#define MAX_OPEN 64 // calls that are looked at one by one; beyond, the last stands for those after

// See oneshot.cuh. The device's thread, but for oneshot_abort().
#define SLOTS_BYTES ((size_t)32 << 20) // of a rank: two sets of a slot for each rank, and flags
#define FLAGS_BYTES ((size_t)4096)
#define MAX_SHARED  5 // the slots among them

struct shared_range {
    void *of[MAX_PEERS]; // on rank r, as this GPU sees it
    size_t bytes;
};

struct oneshot {
    struct device *dev;
    struct peer_slots slots;
    int *stop;
    struct shared_range shared[MAX_SHARED]; // the first: the slots
    int n_shared;
};

// ---- sums through mapped memory: adding up -----------------------------------------------------

template <typename T> using word = pack<T, word_elements<T>>;

// Elements of a word that are there.
INLINE int there(size_t first, size_t n, int of_word)
{
    return n - first < (size_t)of_word ? (int)(n - first) : of_word;
}

// The word at `first` of this rank's partial sum becomes the ranks' sum, in their order; other(r):
// that of rank r.
template <typename T, typename F>
INLINE void sum_word(T *data, size_t first, size_t n, int rank, int size, F other)
{
    constexpr int E = word_elements<T>;
    const int count = there(first, n, E);
    word<T> w = load_some<T, E>(data + first, count, true);
    float sum[E];
    for (int r = 0; r < size; r++) {
        const word<T> x = r == rank ? w : other(r);
        unrolled<E>([&](int i) { sum[i] = r == 0 ? to_f32(x.at[i]) : sum[i] + to_f32(x.at[i]); });
    }
    unrolled<E>([&](int i) { w.at[i] = from_f32<T>(sum[i]); });
    store_some(data + first, w, count, true);
}

template <typename T> __global__ void sum_kernel(struct peer_slots p, T *data, size_t n)
{
    grid_begin();
    const peer_call call = this_peer_call(p);
    constexpr int E = word_elements<T>;
    const size_t words = (n + E - 1) / E, step = (size_t)gridDim.x * blockDim.x;
    const size_t start = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (size_t w = start; w < words; w += step) {
        const word<T> own = load_some<T, E>(data + w * E, there(w * E, n, E), true);
        send_word(p, call, w, reinterpret_cast<const uint2 &>(own));
    }
    for (size_t w = start; w < words; w += step)
        sum_word(data, w * E, n, p.rank, p.size, [&](int r) {
            const uint2 bits = receive_word(p, call, r, w);
            return reinterpret_cast<const word<T> &>(bits);
        });
    end_peer_call(p);
}

// NULL where n elements have no room.
static const struct peer_slots *oneshot_slots(struct oneshot *sum, const void *data, size_t n,
                                              enum dtype dt)
{
    const bool fits = (n * dtype_size(dt) + 7) / 8 <= sum->slots.room && (uintptr_t)data % 8 == 0;
    return fits ? &sum->slots : NULL;
}

static void oneshot_reduce(struct device *dev, const struct peer_slots *slots, void *data, size_t n,
                           enum dtype dt)
{
    // At most a block an SM: all have begun when one of them waits.
    const size_t words = (n * dtype_size(dt) + 7) / 8;
    const int sms = cuda_use(dev)->n_sms, block = words > (size_t)sms * 128 ? 512 : 128;
    const int wanted = ceil_div((int64_t)words, block), grid = wanted < sms ? wanted : sms;
    launch_typed(dt, dev, "all_reduce", sum_kernel, dim3((unsigned)grid), dim3((unsigned)block), 0,
                 *slots, data, n);
}

template <typename T>
__global__ void add_kernel(T *data, const T *others, size_t n, size_t pitch, int rank, int size)
{
    grid_begin();
    constexpr int E = word_elements<T>;
    const size_t step = (size_t)gridDim.x * blockDim.x * E;
    size_t first = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * E;
    for (; first < n; first += step)
        sum_word(data, first, n, rank, size, [&](int r) {
            const T *of_rank = others + (size_t)(r - (r > rank)) * pitch + first;
            return load_some<T, E>(of_rank, there(first, n, E), true);
        });
}

// The n elements of `data`, which are this rank's partial sum, become the sum with those of the
// other ranks, in rank order; these lie in `others`, `pitch` elements apart, a multiple of 4.
static void oneshot_add(struct device *dev, void *data, const void *others, size_t n, size_t pitch,
                        int rank, int size, enum dtype dt)
{
    const int sms = cuda_use(dev)->n_sms, wanted = ceil_div((int64_t)(n * dtype_size(dt)), 8 * 256);
    launch_typed(dt, dev, "all_reduce", add_kernel,
                 dim3((unsigned)(wanted < sms * 8 ? wanted : sms * 8)), dim3(256), 0, data, others,
                 n, pitch, rank, size);
}

// ---- sums through mapped memory: opening -------------------------------------------------------

// What a rank tells the others of memory of its own.
struct peer_hello {
    cudaIpcMemHandle_t handle;
    char uuid[64], name[128]; // of its GPU
    bool made;                // there is a handle
};

static enum status make(struct comm *comm, struct oneshot **ret)
{
    struct oneshot *sum = (struct oneshot *)calloc(1, sizeof *sum);
    if (!sum) return status_fail(ST_NO_MEMORY, "no memory for sums of ranks");
    *ret = sum;
    sum->dev = comm->dev;
    struct peer_slots *p = &sum->slots;
    void *memory = NULL, *stop = NULL, *calls = NULL;
    const size_t counters = sizeof *p->calls + sizeof *p->ended;
    p->rank = comm->rank;
    p->size = comm->size;
    p->room = (SLOTS_BYTES - FLAGS_BYTES) / sizeof(struct line) / 2 / (size_t)comm->size;
    enum status st = device_alloc(comm->dev, SLOTS_BYTES, &memory);
    p->of[p->rank] = (struct line *)memory;
    if (st == ST_OK) st = device_alloc(comm->dev, counters, &calls);
    p->calls = (unsigned long long *)calls;
    if (st == ST_OK) st = device_host_alloc(comm->dev, sizeof(int), &stop);
    if (st != ST_OK) return st;
    p->ended = (unsigned *)(p->calls + 1);
    sum->stop = (int *)stop;
    *sum->stop = 0;
    p->stop = sum->stop;
    device_fill(comm->dev, memory, 0, SLOTS_BYTES);
    device_fill(comm->dev, calls, 0, counters);
    return device_sync(comm->dev);
}

// The number that this process has for a GPU; -1: it sees none of that name.
static int device_of(const char *uuid)
{
    int n = 0;
    cudaGetDeviceCount(&n);
    for (int i = 0; i < n; i++) {
        char name[64];
        cudaDeviceProp prop;
        if (cudaGetDeviceProperties(&prop, i) != cudaSuccess) continue;
        cuda_uuid(&prop, name, sizeof name);
        if (strcmp(name, uuid) == 0) return i;
    }
    return -1;
}

// The memory of rank r. NULL, and why, where it cannot be written from here.
static void *reach(struct oneshot *sum, const struct peer_hello *hello, int r, char *why,
                   size_t why_size)
{
    void *memory = NULL;
    cudaError_t error = cudaErrorInvalidDevice;
    int able = 0, device = device_of(hello->uuid), own = cuda_use(sum->dev)->index;
    // Ranks plan a step's kernels each for itself, and must come to the same.
    const bool alike = strcmp(hello->name, sum->dev->name) == 0;
    if (device == own) able = 1;
    if (device >= 0 && device != own) cudaDeviceCanAccessPeer(&able, own, device);
    if (able && alike && hello->made)
        error = cudaIpcOpenMemHandle(&memory, hello->handle, cudaIpcMemLazyEnablePeerAccess);
    cudaGetLastError();
    if (error == cudaSuccess) return memory;
    snprintf(why, why_size, "rank %d cannot write into the memory of rank %d's GPU: %s",
             sum->slots.rank, r,
             device < 0     ? "that is of another host, or not in CUDA_VISIBLE_DEVICES"
             : !able        ? "there is no way between the two"
             : !alike       ? "they are of different kinds"
             : !hello->made ? "it has no CUDA IPC handle"
                            : cudaGetErrorString(error));
    return NULL;
}

// Opens what all ranks have at `own`, to `of`; they tell one another whether that went well.
static enum status reach_all(struct comm *comm, struct oneshot *sum, void *memory,
                             void *of[MAX_PEERS], bool *ret_all, char *why, size_t why_size)
{
    struct peer_hello own = {}, all[MAX_PEERS];
    char reached[MAX_PEERS] = {1};
    snprintf(own.uuid, sizeof own.uuid, "%s", comm->dev->uuid);
    snprintf(own.name, sizeof own.name, "%s", comm->dev->name);
    own.made = cudaIpcGetMemHandle(&own.handle, memory) == cudaSuccess;
    cudaGetLastError();
    of[comm->rank] = memory;
    enum status st = comm_gather_host(comm, &own, all, sizeof own);
    if (st != ST_OK) return st;
    char good = own.made;
    if (!good) snprintf(why, why_size, "rank %d has no CUDA IPC handle of its memory", comm->rank);
    for (int r = 0; r < comm->size; r++)
        if (r != comm->rank && !(of[r] = reach(sum, &all[r], r, why, why_size))) good = 0;
    st = comm_gather_host(comm, &good, reached, sizeof good);
    *ret_all = true;
    for (int r = 0; r < comm->size; r++) {
        if (reached[r]) continue;
        *ret_all = false;
        if (good) snprintf(why, why_size, "rank %d cannot write into another's memory", r);
    }
    return st;
}

static void close_all(const struct oneshot *sum, void *of[MAX_PEERS])
{
    for (int r = 0; r < sum->slots.size; r++) {
        if (r != sum->slots.rank && of[r]) cudaIpcCloseMemHandle(of[r]);
        if (r != sum->slots.rank) of[r] = NULL;
    }
}

// The end of all that is mapped: other ranks' memory is not reached any more.
static void oneshot_unmap(struct oneshot *sum)
{
    cuda_use(sum->dev);
    for (int i = 0; i < sum->n_shared; i++) close_all(sum, sum->shared[i].of);
}

// Enqueued calls are done. Memory that other ranks may still have mapped, because they did not come
// to a common end, is left to the end of the process.
static void oneshot_free(struct oneshot *sum, bool common_end)
{
    if (!sum) return;
    oneshot_unmap(sum);
    if (common_end) device_release(sum->dev, sum->slots.of[sum->slots.rank]);
    device_release(sum->dev, sum->slots.calls);
    device_host_release(sum->dev, sum->stop);
    free(sum);
}

// comm_share().
static enum status oneshot_share(struct comm *comm, struct oneshot *sum, void *memory, size_t bytes,
                                 char *why, size_t why_size)
{
    bool all = false;
    if (sum->n_shared == MAX_SHARED) {
        snprintf(why, why_size, "ranks share %d pieces of memory already", MAX_SHARED - 1);
        return ST_OK;
    }
    struct shared_range *range = &sum->shared[sum->n_shared];
    enum status st = reach_all(comm, sum, memory, range->of, &all, why, why_size);
    range->bytes = bytes;
    if (st != ST_OK || !all) close_all(sum, range->of);
    if (st != ST_OK || all) sum->n_shared++; // where that failed, others may have it mapped
    return st;
}

// All ranks call it, once `comm` can carry calls. Gives NULL, and in `why` a sentence, where a rank
// cannot write into the memory of another: no other way of summing gives other bits.
static enum status oneshot_open(struct comm *comm, struct oneshot **ret, char *why, size_t why_size)
{
    struct oneshot *sum = NULL;
    *ret = NULL;
    if (comm->size > MAX_PEERS) {
        snprintf(why, why_size, "%d ranks, more than %d", comm->size, MAX_PEERS);
        return ST_OK;
    }
    enum status st = make(comm, &sum);
    if (st == ST_OK)
        st = oneshot_share(comm, sum, sum->slots.of[comm->rank], SLOTS_BYTES, why, why_size);
    if (st != ST_OK || sum->n_shared == 0) {
        oneshot_free(sum, st == ST_OK && comm_barrier(comm) == ST_OK);
        return st;
    }
    for (int r = 0; r < comm->size; r++) {
        char *slots = (char *)sum->shared[0].of[r];
        sum->slots.of[r] = (struct line *)slots;
        sum->slots.flags[r] = (unsigned *)(slots + SLOTS_BYTES - FLAGS_BYTES);
    }
    *ret = sum;
    return ST_OK;
}

// Where `data` lies on every rank, NULL where it is unmapped; false where it was not shared.
static bool oneshot_shared(const struct oneshot *sum, const void *data, void *ret_of[MAX_PEERS])
{
    for (int i = 0; i < sum->n_shared; i++) {
        const struct shared_range *range = &sum->shared[i];
        const size_t at = (size_t)((const char *)data - (const char *)range->of[sum->slots.rank]);
        if (at >= range->bytes) continue;
        for (int r = 0; r < sum->slots.size; r++) ret_of[r] = (char *)range->of[r] + at;
        return true;
    }
    return false;
}

// Any thread: sums that wait for a rank end, and what they leave is garbage.
static void oneshot_abort(struct oneshot *sum)
{
    if (sum) __atomic_store_n(sum->stop, 1, __ATOMIC_RELEASE);
}

// ---- the library -------------------------------------------------------------------------------

static late_library library("libnccl.so.2", "several GPUs want NCCL: ", "libnccl2");
#define NCCL(name) LATE_FUNCTION(nccl_##name, nccl##name, library, ncclSystemError)
NCCL(GetUniqueId)
NCCL(CommInitRankConfig)
NCCL(CommSplit)
NCCL(CommUserRank)
NCCL(CommCount)
NCCL(CommGetAsyncError)
NCCL(CommAbort)
NCCL(CommFinalize)
NCCL(CommDestroy)
NCCL(AllReduce)
NCCL(ReduceScatter)
NCCL(AllGather)
NCCL(Broadcast)
NCCL(GroupStart)
NCCL(GroupEnd)
NCCL(Send)
NCCL(Recv)
LATE_FUNCTION(nccl_GetErrorString, ncclGetErrorString, library, library.missing)
LATE_FUNCTION(nccl_GetLastError, ncclGetLastError, library, "")

// What NCCL says of a result, or why there is no NCCL.
static const char *words(ncclResult_t result)
{
    return library.missing[0] ? library.missing : nccl_GetErrorString(result);
}

static const char *last_words()
{
    const char *text = nccl_GetLastError((ncclComm_t)NULL);
    return text ? text : "";
}

// ---- calls under way ---------------------------------------------------------------------------

struct open_call {
    cudaEvent_t done;
    const char *what;
    int64_t since_ns;
};

struct nccl_state {
    ncclComm_t comm;
    cudaStream_t stream;   // own, or NULL: the device's
    struct oneshot *peers; // NULL: sums are all NCCL's
    bool unmapped, left;   // peers' memory, by this rank at a common end; by all, so that it may go
    cudaEvent_t before, after;
    bool watching; // the thread runs
    pthread_t thread;
    pthread_mutex_t mutex; // guards what follows, and NCCL's calls against its abort
    struct open_call open[MAX_OPEN];
    int first, n_open;
    bool stop, aborted;
    bool splitting; // NCCL may yet write into `comm`
};

static struct nccl_state *state_of(const struct comm *comm)
{
    return (struct nccl_state *)comm->state;
}

static void abort_comm(struct nccl_state *s)
{
    oneshot_abort(s->peers);
    if (s->comm && !s->aborted) nccl_CommAbort(s->comm);
    s->aborted = true;
}

// Waits until NCCL has taken a call in. False after comm_fail().
static bool settle(struct comm *comm, ncclComm_t of, const char *what, ncclResult_t result)
{
    const int64_t start_ns = clock_now_ns();
    while (result == ncclInProgress && !comm_failed(comm)) {
        if (!comm_may_wait(comm, what, start_ns, "the other ranks")) return false;
        if (clock_ms_since(start_ns) > 1) clock_sleep_ms(1);
        ncclResult_t asked = nccl_CommGetAsyncError(of, &result);
        if (asked != ncclSuccess) result = asked;
    }
    if (result != ncclSuccess) comm_fail(comm, what, "%s %s", words(result), last_words());
    return !comm_failed(comm);
}

// With the mutex held: the oldest calls that are done go.
static void forget_done(struct nccl_state *s)
{
    while (s->n_open > 0 && cudaEventQuery(s->open[s->first].done) == cudaSuccess) {
        s->first = (s->first + 1) % MAX_OPEN;
        s->n_open--;
    }
    cudaGetLastError(); // "not ready" is no error
}

static void look(struct comm *comm)
{
    struct nccl_state *s = state_of(comm);
    ncclResult_t error = ncclSuccess;
    forget_done(s);
    if (s->n_open == 0) return;
    const struct open_call *oldest = &s->open[s->first];
    nccl_CommGetAsyncError(s->comm, &error);
    if (error != ncclSuccess && error != ncclInProgress)
        comm_fail(comm, oldest->what, "%s %s", words(error), last_words());
    else
        comm_may_wait(comm, oldest->what, oldest->since_ns, "the other ranks");
    if (comm_failed(comm)) abort_comm(s);
}

static void *watch_calls(void *context)
{
    struct comm *comm = (struct comm *)context;
    struct nccl_state *s = state_of(comm);
    cuda_use(comm->dev);
    for (bool stop = false; !stop;) {
        clock_sleep_ms(LOOK_MS);
        pthread_mutex_lock(&s->mutex);
        if (!s->aborted) look(comm);
        stop = s->stop;
        pthread_mutex_unlock(&s->mutex);
    }
    return NULL;
}

// With the mutex held: a call was enqueued on `stream`. One that is being captured is not under
// way; its graph will be.
static void note(struct comm *comm, const char *what, cudaStream_t stream)
{
    struct nccl_state *s = state_of(comm);
    struct cuda_state *cuda = cuda_use(comm->dev);
    if (cuda->capturing) {
        cuda->captured = comm;
        return;
    }
    forget_done(s);
    const bool full = s->n_open == MAX_OPEN;
    struct open_call *call = &s->open[(s->first + s->n_open - full) % MAX_OPEN];
    if (!full) s->n_open++;
    call->what = what;
    call->since_ns = clock_now_ns();
    cuda_ok(comm->dev, cudaEventRecord(call->done, stream), what);
}

// f: enqueues the call on the stream that it is given.
template <typename F> static void enqueue(struct comm *comm, const char *what, F f)
{
    struct nccl_state *s = state_of(comm);
    struct cuda_state *cuda = cuda_use(comm->dev);
    cudaStream_t stream = s->stream ? s->stream : cuda->stream;
    pthread_mutex_lock(&s->mutex);
    if (s->stream) {
        cuda_ok(comm->dev, cudaEventRecord(s->before, cuda->stream), what);
        cuda_ok(comm->dev, cudaStreamWaitEvent(s->stream, s->before, 0), what);
    }
    if (!comm_failed(comm) && settle(comm, s->comm, what, f(s->comm, stream)))
        note(comm, what, stream);
    if (comm_failed(comm)) abort_comm(s);
    cuda_enqueued(cuda, false); // the next kernel waits for NCCL's whole
    pthread_mutex_unlock(&s->mutex);
}

void comm_call_enqueued(struct comm *comm, const char *what)
{
    struct nccl_state *s = state_of(comm);
    pthread_mutex_lock(&s->mutex);
    note(comm, what, cuda_use(comm->dev)->stream);
    if (comm_failed(comm)) abort_comm(s);
    pthread_mutex_unlock(&s->mutex);
}

// ---- opening -----------------------------------------------------------------------------------

static enum status new_id(unsigned char ret_id[COMM_ID_BYTES])
{
    static_assert(sizeof(ncclUniqueId) == COMM_ID_BYTES, "NCCL's id");
    ncclResult_t result = nccl_GetUniqueId((ncclUniqueId *)ret_id);
    if (result == ncclSuccess) return ST_OK;
    return status_fail(library.missing[0] ? ST_UNSUPPORTED : ST_DEVICE, "NCCL's id: %s",
                       words(result));
}

static enum status failure(const struct comm *comm)
{
    return status_fail(library.missing[0] ? ST_UNSUPPORTED : ST_DEVICE, "%s", comm->failure);
}

static enum status new_state(struct comm *comm, bool own_stream)
{
    struct nccl_state *s = (struct nccl_state *)calloc(1, sizeof *s);
    if (!s) return status_fail(ST_NO_MEMORY, "no memory for a communicator");
    comm->state = s;
    pthread_mutex_init(&s->mutex, NULL);
    cuda_use(comm->dev);
    cudaError_t error = cudaEventCreateWithFlags(&s->before, cudaEventDisableTiming);
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(&s->after, cudaEventDisableTiming);
    for (int i = 0; error == cudaSuccess && i < MAX_OPEN; i++)
        error = cudaEventCreateWithFlags(&s->open[i].done, cudaEventDisableTiming);
    int least = 0, greatest = 0;
    if (error == cudaSuccess) error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (error == cudaSuccess && own_stream)
        error = cudaStreamCreateWithPriority(&s->stream, cudaStreamNonBlocking, greatest);
    if (error == cudaSuccess) return ST_OK;
    return status_fail(ST_DEVICE, "%s: a communicator: %s", comm->dev->spec,
                       cudaGetErrorString(error));
}

static enum status start_watching(struct comm *comm)
{
    struct nccl_state *s = state_of(comm);
    if (pthread_create(&s->thread, NULL, watch_calls, comm) != 0)
        return status_fail(ST_NO_MEMORY, "no thread to watch over a communicator");
    s->watching = true;
    return ST_OK;
}

static enum status nccl_open(struct comm *comm, const unsigned char *id)
{
    ncclUniqueId unique;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    enum status st = new_state(comm, false);
    if (st != ST_OK) return st;
    struct nccl_state *s = state_of(comm);
    memcpy(&unique, id, sizeof unique);
    config.blocking = 0;
    ncclResult_t result =
        nccl_CommInitRankConfig(&s->comm, comm->size, unique, comm->rank, &config);
    return settle(comm, s->comm, "open", result) ? start_watching(comm) : failure(comm);
}

// Waits until a thread of NCCL's has put the new communicator into its place, which can be after
// the one that it is made of has no call under way any more.
static bool is_split(struct comm *comm, ncclComm_t of)
{
    struct nccl_state *s = state_of(comm);
    const int64_t start_ns = clock_now_ns();
    while (!__atomic_load_n(&s->comm, __ATOMIC_ACQUIRE)) {
        ncclResult_t error = ncclSuccess;
        nccl_CommGetAsyncError(of, &error);
        if (error != ncclSuccess && error != ncclInProgress)
            comm_fail(comm, "split", "%s %s", words(error), last_words());
        if (comm_failed(comm) || !comm_may_wait(comm, "split", start_ns, "the other ranks"))
            return false;
        clock_sleep_ms(1);
    }
    s->splitting = false;
    return true;
}

static enum status nccl_split(const struct comm *parent, int color, struct comm *comm)
{
    struct nccl_state *of = state_of(parent);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    comm->rank = parent->rank;
    comm->size = parent->size;
    enum status st = new_state(comm, color < 0);
    if (st != ST_OK) return st;
    struct nccl_state *s = state_of(comm);
    config.blocking = 0;
    pthread_mutex_lock(&of->mutex);
    ncclResult_t result = ncclSystemError;
    s->splitting = !comm_failed(parent);
    if (s->splitting)
        result = nccl_CommSplit(of->comm, color < 0 ? 0 : color, parent->rank, &s->comm, &config);
    bool ok = settle(comm, of->comm, "split", result) && is_split(comm, of->comm);
    pthread_mutex_unlock(&of->mutex);
    ok = ok && settle(comm, s->comm, "split", ncclInProgress);
    ok = ok && settle(comm, s->comm, "split", nccl_CommUserRank(s->comm, &comm->rank));
    ok = ok && settle(comm, s->comm, "split", nccl_CommCount(s->comm, &comm->size));
    return ok ? start_watching(comm) : failure(comm);
}

static void nccl_close(struct comm *comm)
{
    struct nccl_state *s = state_of(comm);
    if (!s) return;
    struct cuda_state *cuda = cuda_use(comm->dev);
    // With the watch still there, so that no wait here is without its deadline.
    if (s->watching) cudaStreamSynchronize(s->stream ? s->stream : cuda->stream);
    pthread_mutex_lock(&s->mutex);
    s->stop = true;
    pthread_mutex_unlock(&s->mutex);
    if (s->watching) pthread_join(s->thread, NULL);
    if (s->comm && !comm_failed(comm) && settle(comm, s->comm, "free", nccl_CommFinalize(s->comm)))
        nccl_CommDestroy(s->comm);
    else
        abort_comm(s);
    oneshot_free(s->peers, s->left);
    for (int i = 0; i < MAX_OPEN; i++)
        if (s->open[i].done) cudaEventDestroy(s->open[i].done);
    if (s->before) cudaEventDestroy(s->before);
    if (s->after) cudaEventDestroy(s->after);
    if (s->stream) cudaStreamDestroy(s->stream);
    pthread_mutex_destroy(&s->mutex);
    if (!s->splitting) free(s);
}

static enum status nccl_share(struct comm *comm, void *memory, size_t bytes, char *why,
                              size_t why_size)
{
    struct nccl_state *s = state_of(comm);
    struct oneshot *peers = s->peers;
    if (memory) return peers ? oneshot_share(comm, peers, memory, bytes, why, why_size) : ST_OK;
    enum status st = peers ? ST_OK : oneshot_open(comm, &peers, why, why_size);
    pthread_mutex_lock(&s->mutex);
    s->peers = peers;
    pthread_mutex_unlock(&s->mutex);
    return st;
}

static bool nccl_shares(const struct comm *comm, const void *memory)
{
    const struct nccl_state *s = state_of(comm);
    void *of[MAX_PEERS];
    return s->peers && !s->left && oneshot_shared(s->peers, memory, of);
}

static enum status nccl_unmap_peers(struct comm *comm)
{
    struct nccl_state *s = state_of(comm);
    if (!s->peers || s->unmapped) return ST_OK;
    enum status st = comm_barrier(comm); // nobody's kernel writes any more
    if (st != ST_OK) return st;
    pthread_mutex_lock(&s->mutex);
    oneshot_unmap(s->peers);
    s->unmapped = true;
    pthread_mutex_unlock(&s->mutex);
    st = comm_barrier(comm);
    s->left = st == ST_OK; // nobody has it mapped any more
    return st;
}

// ---- calls -------------------------------------------------------------------------------------

static ncclDataType_t type_of(enum dtype dt)
{
    return dt == DT_F32 ? ncclFloat32 : dt == DT_BF16 ? ncclBfloat16 : ncclUint8;
}

static void nccl_join(struct comm *comm)
{
    struct nccl_state *s = state_of(comm);
    struct cuda_state *cuda = cuda_use(comm->dev);
    if (!s->stream) return;
    cuda_ok(comm->dev, cudaEventRecord(s->after, s->stream), "join");
    cuda_ok(comm->dev, cudaStreamWaitEvent(cuda->stream, s->after, 0), "join");
    cuda_enqueued(cuda, false);
}

// n elements in shares, one a rank, of whole words of oneshot_add(); the last ones may be short.
struct shares {
    size_t n, each;
    size_t first(int r) const { return each * (size_t)r < n ? each * (size_t)r : n; }
    size_t count(int r) const { return first(r + 1) - first(r); }
};

// Every rank's share of this rank's partial sum goes to it, and of the others' partial sums this
// one's comes to `rest`. NULL: this rank's share, which is summed, goes to all, and theirs come to
// their places.
static void change_shares(struct comm *comm, char *data, char *others, struct shares part,
                          enum dtype dt)
{
    const size_t e = dtype_size(dt);
    const int rank = comm->rank;
    enqueue(comm, "all_reduce", [=](ncclComm_t c, cudaStream_t stream) {
        nccl_GroupStart();
        for (int i = 1; i < comm->size; i++) {
            const int r = (rank + i) % comm->size, given = others ? r : rank,
                      got = others ? rank : r;
            char *to = others ? others + (size_t)(r - (r > rank)) * part.each * e
                              : data + part.first(r) * e;
            if (part.count(given))
                nccl_Send(data + part.first(given) * e, part.count(given), type_of(dt), r, c,
                          stream);
            if (part.count(got)) nccl_Recv(to, part.count(got), type_of(dt), r, c, stream);
        }
        return nccl_GroupEnd();
    });
}

static void sum_shares(struct comm *comm, char *data, size_t n, enum dtype dt)
{
    const size_t size = (size_t)comm->size, each = ((n + size - 1) / size + 3) / 4 * 4;
    const struct shares part = {n, each};
    const size_t own = part.count(comm->rank), e = dtype_size(dt);
    char *others = (char *)cuda_workspace(comm->dev, each * (size - 1) * e);
    if (!others) return;
    change_shares(comm, data, others, part, dt);
    if (own)
        oneshot_add(comm->dev, data + part.first(comm->rank) * e, others, own, each, comm->rank,
                    comm->size, dt);
    change_shares(comm, data, NULL, part, dt);
}

// With the mutex held: the memory of peers, where calls through it are taken.
static struct oneshot *open_peers(const struct comm *comm)
{
    const struct nccl_state *s = state_of(comm);
    return s->unmapped || s->stream || comm_failed(comm) ? NULL : s->peers;
}

const struct peer_slots *comm_place_columns(struct comm *comm, void *data, void *ret_of[MAX_PEERS])
{
    struct nccl_state *s = state_of(comm);
    pthread_mutex_lock(&s->mutex);
    struct oneshot *peers = open_peers(comm);
    const bool shared = peers && oneshot_shared(peers, data, ret_of);
    pthread_mutex_unlock(&s->mutex);
    return shared ? oneshot_slots(peers, data, 0, DT_F32) : NULL;
}

static bool sum_through_peers(struct comm *comm, void *data, size_t n, enum dtype dt)
{
    struct nccl_state *s = state_of(comm);
    pthread_mutex_lock(&s->mutex);
    struct oneshot *peers = open_peers(comm);
    pthread_mutex_unlock(&s->mutex);
    const struct peer_slots *slots = peers ? oneshot_slots(peers, data, n, dt) : NULL;
    if (!slots) return comm_failed(comm);
    oneshot_reduce(comm->dev, slots, data, n, dt);
    comm_call_enqueued(comm, "all_reduce");
    return true;
}

// What has room in the memory of peers goes there; of more, each rank adds up a share. Both in rank
// order, so that the bits of a row do not depend on how many come with it. Sums beside the device's
// stream, which are of gradients, and of what does not lie at whole words are NCCL's own.
static void nccl_call(struct comm *comm, const struct comm_call *call)
{
    const struct comm_call c = *call;
    if (c.kind == COMM_ALL_REDUCE && !state_of(comm)->stream && (uintptr_t)c.to % 8 == 0) {
        if (!sum_through_peers(comm, c.to, c.n, c.dt)) sum_shares(comm, (char *)c.to, c.n, c.dt);
        return;
    }
    enqueue(comm, c.what, [=](ncclComm_t of, cudaStream_t stream) {
        const ncclDataType_t type = type_of(c.dt);
        switch (c.kind) {
        case COMM_ALL_REDUCE:
            return nccl_AllReduce(c.from, c.to, c.n, type, ncclSum, of, stream);
        case COMM_ALL_GATHER:
            return nccl_AllGather(c.from, c.to, c.n, type, of, stream);
        case COMM_REDUCE_SCATTER:
            return nccl_ReduceScatter(c.from, c.to, c.n, type, ncclSum, of, stream);
        case COMM_BROADCAST:
            return nccl_Broadcast(c.from, c.to, c.n, type, c.peer, of, stream);
        case COMM_SEND:
            return nccl_Send(c.from, c.n, type, c.peer, of, stream);
        case COMM_RECV:
            break;
        }
        return nccl_Recv(c.to, c.n, type, c.peer, of, stream);
    });
}

const struct comm_backend comm_nccl = {
    new_id,      nccl_open, nccl_split, nccl_close, nccl_share, nccl_unmap_peers,
    nccl_shares, nccl_join, nccl_call,  NULL,       NULL,
};

#else

static enum status new_id(unsigned char *)
{
    return status_fail(ST_UNSUPPORTED, "this program was built without NCCL; build it with the "
                                       "package libnccl-dev");
}

// No communicator was opened to call these with.
const struct peer_slots *comm_place_columns(struct comm *, void *, void **)
{
    return NULL;
}

void comm_call_enqueued(struct comm *, const char *) {}

const struct comm_backend comm_nccl = {new_id, NULL, NULL, NULL, NULL,   NULL,
                                       NULL,   NULL, NULL, NULL, "NCCL", "libnccl-dev"};

#endif
