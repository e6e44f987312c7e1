/* group.c: see group.h. It starts the ranks and carries orders to them. A message is a header and
 * as many bytes as it says; both ends are processes of one program. A follower that fails says so
 * unasked, and its sentence is found by whoever next looks: rank 0 does between steps and while it
 * waits in the communicator. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/weights/group.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "common/ranks/processes.h"
#include "common/ranks/rendezvous.h"
#include "kernels/device.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MEET_S    60.0   // until all ranks have come
#define COMM_S    10.0   // of a wait for the others' part of a sum
#define SEND_MS   10000  // until a follower takes an order
#define ANSWER_MS 600000 // until it has carried one out: loading weights is the longest
#define GRACE_MS  10000  // of ranks to end once one has failed, which they know by themselves
#define MAX_BYTES (1u << 30)

struct group {
    struct peers *peers; // rank 0's are the followers, a follower's is rank 0
    struct comm *comm;
    int rank, size;
    bool over;  // rank 0 has told the followers to end
    bool ended; // group_end()
    struct bytes answer;
};

struct header {
    uint32_t what; // enum order; of an answer enum status
    uint32_t bytes;
};

static const char *name_of(const struct peer *p, char ret[HELLO_NAME])
{
    return hello_name(&p->who, ret);
}

static enum status gone(const struct peer *p)
{
    char name[HELLO_NAME];
    return status_fail(ST_PEER_GONE, "%s of the tensor-parallel server is gone", name_of(p, name));
}

static enum status wait_for(const struct peer *p, short events, int64_t deadline_ns)
{
    char name[HELLO_NAME];
    struct pollfd fd = {.fd = p->conn.fd, .events = events};
    int n;
    do n = poll(&fd, 1, deadline_ns == INT64_MAX ? -1 : clock_ms_until(deadline_ns));
    while (n < 0 && errno == EINTR);
    if (n > 0) return ST_OK;
    // for good: what it says later would be taken for the answer to something else
    return status_fail(ST_PEER_GONE, "%s of the tensor-parallel server does not answer",
                       name_of(p, name));
}

static enum status send_all(const struct peer *p, const void *data, size_t n)
{
    const int64_t deadline_ns = clock_deadline_ns(SEND_MS);
    const char *at = data;
    enum status st = ST_OK;
    while (n > 0 && st == ST_OK) {
        const ssize_t sent = send(p->conn.fd, at, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) {
            at += sent;
            n -= (size_t)sent;
        } else if (errno == EAGAIN) {
            st = wait_for(p, POLLOUT, deadline_ns);
        } else if (errno != EINTR) {
            st = gone(p);
        }
    }
    return st;
}

static enum status receive_all(const struct peer *p, void *data, size_t n, int64_t deadline_ns)
{
    char *at = data;
    enum status st = ST_OK;
    while (n > 0 && st == ST_OK) {
        const ssize_t got = recv(p->conn.fd, at, n, MSG_DONTWAIT);
        if (got > 0) {
            at += got;
            n -= (size_t)got;
        } else if (got < 0 && errno == EAGAIN) {
            st = wait_for(p, POLLIN, deadline_ns);
        } else if (got == 0 || errno != EINTR) {
            st = gone(p);
        }
    }
    return st;
}

static enum status send_message(const struct peer *p, uint32_t what, const void *data, size_t n)
{
    const struct header header = {what, (uint32_t)n};
    enum status st = send_all(p, &header, sizeof header);
    return st == ST_OK ? send_all(p, data, n) : st;
}

static enum status receive_message(const struct peer *p, int64_t deadline_ns, uint32_t *ret_what,
                                   struct bytes *ret)
{
    struct header header;
    enum status st;
    bytes_clear(ret);
    CHECK(receive_all(p, &header, sizeof header, deadline_ns));
    if (header.bytes > MAX_BYTES || !bytes_reserve(ret, header.bytes))
        FAIL(ST_NO_MEMORY, "no memory for a message of %u bytes", header.bytes);
    CHECK(receive_all(p, ret->data, header.bytes, deadline_ns));
    ret->len = header.bytes;
    ret->data[ret->len] = '\0';
    *ret_what = header.what;
out:
    return st;
}

// ---- life ---------------------------------------------------------------------------------------
enum status group_open_device(const char *spec, const struct ranks *who, struct device **ret)
{
    char own[16];
    const bool any = strcmp(spec, "auto") == 0;
    if (who->size <= 1 || strcmp(spec, "cpu") == 0) return device_open(spec, ret);
    if (!any && strcmp(spec, "cuda") != 0)
        return status_fail(ST_INVALID,
                           "--device %s: a tensor-parallel server takes a GPU for each rank, from "
                           "cuda:0 on; give auto, cpu or cuda, and choose GPUs with "
                           "CUDA_VISIBLE_DEVICES",
                           spec);
    snprintf(own, sizeof own, "cuda:%d", who->local_rank);
    enum status st = device_open(own, ret);
    if (!any || (st != ST_NOT_FOUND && st != ST_UNSUPPORTED)) return st;
    struct device *first; // too few GPUs for the ranks are not as good as none
    if (who->local_rank == 0 || device_open("cuda:0", &first) != ST_OK)
        return device_open("cpu", ret);
    device_free(first);
    return device_open(own, ret); // says why not
}

// What the communicator asks while it waits.
static enum status watch(void *group)
{
    return group_check(group);
}

// url: room for it.
static struct rendezvous_options meeting_of(const char *bridge_path, const struct ranks *who,
                                            char url[PATH_MAX + 16])
{
    snprintf(url, PATH_MAX + 16, "file://%s.ranks", bridge_path);
    return (struct rendezvous_options){
        .url = url, .who = *who, .version = COMMONWEIGHT_VERSION, .timeout_s = MEET_S};
}

void group_give_up(const char *bridge_path, const struct ranks *who, enum status why)
{
    char url[PATH_MAX + 16];
    const struct rendezvous_options options = meeting_of(bridge_path, who, url);
    if (who->size > 1) rendezvous_give_up(&options, why);
}

enum status group_open(struct device *dev, const char *bridge_path, const struct ranks *who,
                       struct group **ret)
{
    char url[PATH_MAX + 16], why[300];
    unsigned char id[COMM_ID_BYTES] = {0};
    struct bytes bytes = BYTES_INIT;
    struct group *g = NULL;
    enum status st = ST_OK;
    if (who->size <= 1) {
        *ret = NULL;
        return ST_OK;
    }
    const struct rendezvous_options options = meeting_of(bridge_path, who, url);
    g = calloc(1, sizeof *g);
    if (!g) FAIL(ST_NO_MEMORY, "no memory for a group of %d ranks", who->size);
    g->rank = who->rank;
    g->size = who->size;
    if (who->rank == 0) CHECK(comm_new_id(device_kind(dev), id));
    bytes_append(&bytes, id, sizeof id);
    CHECK(bytes_status(&bytes));
    CHECK(rendezvous(&options, &bytes, &g->peers));
    if (bytes.len != sizeof id) FAIL(ST_MISMATCH, "rank 0 is another program");
    memcpy(id, bytes.data, sizeof id);
    CHECK(comm_open(dev, id, who->rank, who->size, COMM_S, watch, g, &g->comm));
    CHECK(comm_share(g->comm, NULL, 0, why, sizeof why));
    if (why[0]) log_warn("sums of the ranks are NCCL's alone, and slower: %s", why);
    *ret = TAKE_PTR(g);
out:
    bytes_release(&bytes);
    group_free(g);
    return st;
}

void group_end(struct group *g)
{
    if (!g || !g->peers || g->ended) return;
    g->ended = true;
    enum status st = g->rank == 0 ? group_check(g) : g->over ? ST_OK : ST_PEER_GONE;
    for (int i = 0; !g->over && g->rank == 0 && i < g->peers->n; i++) {
        const enum status sent = send_message(&g->peers->list[i], ORDER_END, NULL, 0);
        if (st == ST_OK) st = sent; // who is gone has ended
    }
    g->over = true;
    if (st == ST_OK && comm_unmap_peers(g->comm) != ST_OK)
        log_warn("rank %d of the tensor-parallel server: at its end: %s", g->rank,
                 status_message());
}

void group_free(struct group *g)
{
    if (!g) return;
    group_end(g);
    comm_free(g->comm);
    peers_free(g->peers);
    bytes_release(&g->answer);
    free(g);
}

struct comm *group_comm(const struct group *g)
{
    return g ? g->comm : NULL;
}

int group_size(const struct group *g)
{
    return g ? g->size : 1;
}

// ---- rank 0 -------------------------------------------------------------------------------------
enum status group_order(struct group *g, enum order order, int model, const void *data, size_t n)
{
    enum status st = ST_OK;
    for (int i = 0; g && i < g->peers->n && st == ST_OK; i++)
        st = send_message(&g->peers->list[i], order + ORDERS * (uint32_t)model, data, n);
    return st;
}

// The follower's next answer; what it failed of is this call's failure.
static enum status take_answer(struct group *g, const struct peer *p)
{
    char name[HELLO_NAME];
    uint32_t st;
    enum status received = receive_message(p, clock_deadline_ns(ANSWER_MS), &st, &g->answer);
    if (received != ST_OK || st == ST_OK) return received;
    return status_fail((enum status)st, "%s of the tensor-parallel server: %s", name_of(p, name),
                       bytes_text(&g->answer));
}

enum status group_wait(struct group *g, void *answers, size_t bytes)
{
    enum status st = ST_OK;
    for (int i = 0; g && i < g->peers->n; i++) { // also behind one that has failed
        enum status one = take_answer(g, &g->peers->list[i]);
        if (one == ST_OK && g->answer.len != bytes)
            one = status_fail(ST_MISMATCH, "a follower answers with %zu bytes, not %zu",
                              g->answer.len, bytes);
        if (one == ST_OK && bytes)
            memcpy((char *)answers + (size_t)i * bytes, g->answer.data, bytes);
        if (st == ST_OK) st = one;
    }
    return st;
}

enum status group_check(struct group *g)
{
    enum status st = ST_OK;
    for (int i = 0; g && !g->over && i < g->peers->n && st == ST_OK; i++) {
        const struct peer *p = &g->peers->list[i];
        struct pollfd fd = {.fd = p->conn.fd, .events = g->rank == 0 ? POLLIN : POLLRDHUP};
        if (poll(&fd, 1, 0) <= 0) continue;
        // a follower has nothing to say unasked but that it fails; rank 0 may have gone on
        st = g->rank == 0 ? take_answer(g, p) : gone(p);
    }
    return st;
}

// ---- a follower ---------------------------------------------------------------------------------
enum status group_next(struct group *g, enum order *ret, int *ret_model, struct bytes *ret_data)
{
    uint32_t order = 0;
    enum status st = receive_message(&g->peers->list[0], INT64_MAX, &order, ret_data);
    if (st != ST_OK) return st;
    *ret = (enum order)(order % ORDERS);
    *ret_model = (int)(order / ORDERS);
    g->over = *ret == ORDER_END;
    return ST_OK;
}

enum status group_answer(struct group *g, enum status st, const void *data, size_t n)
{
    if (st != ST_OK) {
        data = status_message();
        n = strlen(data);
    }
    return send_message(&g->peers->list[0], st, data, n);
}

// ---- starting the ranks -------------------------------------------------------------------------
// A server that nobody has started N times starts its ranks itself: on GPUs each as a child of this
// process, on the CPU by mpirun, without which MPI's ranks do not find one another.

static enum status become_rank(void *context, int rank)
{
    struct ranks r = *(const struct ranks *)context;
    r.rank = r.local_rank = rank;
    return ranks_export(&r);
}

// Without opening one here: that would take memory of it for as long as the server runs.
static bool on_gpus(const char *device)
{
#if CW_CUDA
    return strcmp(device, "auto") != 0 || access("/proc/driver/nvidia/version", F_OK) == 0;
#else
    return strcmp(device, "auto") != 0;
#endif
}

enum status group_start(int n, const char *device, char **argv)
{
    const bool gpus = strcmp(device, "cpu") != 0 && on_gpus(device);
    struct ranks all = {.size = n, .local_size = n};
    struct bytes line = BYTES_INIT;
    // mpirun, told to end, gives its ranks no time; this signal it hands on
    struct processes plan = {.n = 1,
                             .name = "mpirun",
                             .n_ranks = n,
                             .stop_signal = SIGUSR1,
                             .grace_ms = GRACE_MS,
                             .end_ms = PROCESSES_END_MS};
    enum status st;
    if (gpus)
        plan = (struct processes){.n = n,
                                  .before = become_rank,
                                  .context = &all,
                                  .stop_signal = SIGTERM,
                                  .grace_ms = GRACE_MS,
                                  .end_ms = PROCESSES_END_MS};
    // systemd asks its main process for signs of life, which is this one; rank 0 gives them.
    const char *pid = getenv("WATCHDOG_PID");
    if (pid && atoi(pid) == (int)getpid()) unsetenv("WATCHDOG_PID");
    snprintf(all.run_id, sizeof all.run_id, "%" PRId64 "-%d", clock_wall_s(), (int)getpid());
    CHECK(processes_line("cw-infer-server", argv, gpus ? 0 : n, &line));
    plan.line = bytes_text(&line);
    log_info("%d ranks are started%s", n, gpus ? "" : ", with mpirun");
    st = processes_run(&plan);
out:
    bytes_release(&line);
    return st;
}
