/* test_comm.c: what communicators give, to the bit, on 2 and 4 ranks (support/comm_ranks.h), and
 * what they say when a rank does not answer. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/comm_ranks.h"

#define DEADLINE_S 20.0
#define SHORT_S    0.5 // of the ranks that wait in vain

// ---- one rank ----------------------------------------------------------------------------------

// Sums of these depend on their order: the parts are of very different size.
static float value(int rank, size_t i)
{
    uint32_t u = (uint32_t)(i + 1) * 2654435761u ^ (uint32_t)(rank + 1) * 40503u;
    float x = (float)(u >> 8) / 16777216.0f - 0.5f;
    return u & 1 ? x : x * 4096;
}

static float sum_of(int size, size_t i, enum dtype dt)
{
    float sum = 0;
    for (int r = 0; r < size; r++) {
        float x = value(r, i);
        if (dt == DT_BF16) x = f32_from_bf16(bf16_from_f32(x));
        sum = r ? sum + x : x;
    }
    return dt == DT_BF16 ? f32_from_bf16(bf16_from_f32(sum)) : sum;
}

static void put(const struct comm_rank *r, void *host, size_t from, size_t n, enum dtype dt)
{
    for (size_t i = 0; i < n; i++) {
        float x = value(r->rank, from + i);
        if (dt == DT_F32)
            ((float *)host)[i] = x;
        else
            ((uint16_t *)host)[i] = bf16_from_f32(x);
    }
    device_copy_in(r->dev, r->memory, host, n * dtype_size(dt));
}

static enum status is_sum(const struct comm_rank *r, const char *what, const void *host,
                          size_t from, size_t n, enum dtype dt)
{
    for (size_t i = 0; i < n; i++) {
        float x =
            dt == DT_F32 ? ((const float *)host)[i] : f32_from_bf16(((const uint16_t *)host)[i]);
        float wanted = sum_of(r->size, from + i, dt);
        if (memcmp(&x, &wanted, sizeof x) != 0) return comm_rank_expect(false, r, what, i);
    }
    return ST_OK;
}

static enum status sums(const struct comm_rank *r, void *host, size_t n, enum dtype dt)
{
    enum status st;
    const size_t all = n * (size_t)r->size;
    char *part = (char *)r->memory + n * (size_t)r->rank * dtype_size(dt);
    put(r, host, 0, n, dt);
    comm_all_reduce(r->comm, r->memory, n, dt);
    device_copy_out(r->dev, host, r->memory, n * dtype_size(dt));
    CHECK(device_sync(r->dev));
    CHECK(is_sum(r, "all_reduce", host, 0, n, dt));

    put(r, host, 0, all, dt);
    comm_reduce_scatter(r->comm, r->memory, part, n, dt);
    device_copy_out(r->dev, host, part, n * dtype_size(dt));
    CHECK(device_sync(r->dev));
    CHECK(is_sum(r, "reduce_scatter", host, n * (size_t)r->rank, n, dt));
out:
    return st;
}

static unsigned char byte_of(int rank, size_t i)
{
    return (unsigned char)(i * 31 + (size_t)rank * 101 + 7);
}

static enum status is_bytes(const struct comm_rank *r, const char *what, void *host, size_t n,
                            int from)
{
    device_copy_out(r->dev, host, r->memory, n);
    enum status st = device_sync(r->dev);
    for (size_t i = 0; st == ST_OK && i < n; i++)
        st = comm_rank_expect(((unsigned char *)host)[i] == byte_of(from, i), r, what, i);
    return st;
}

static void put_bytes(const struct comm_rank *r, unsigned char *host, void *to, size_t n)
{
    for (size_t i = 0; i < n; i++) host[i] = byte_of(r->rank, i);
    device_copy_in(r->dev, to, host, n);
}

static enum status copies(const struct comm_rank *r, unsigned char *host, size_t n)
{
    enum status st;
    const int last = r->size - 1;
    char *place = (char *)r->memory + (size_t)r->rank * n;
    put_bytes(r, host, place, n);
    comm_all_gather(r->comm, place, r->memory, n);
    device_copy_out(r->dev, host, r->memory, n * (size_t)r->size);
    CHECK(device_sync(r->dev));
    for (size_t i = 0; i < n * (size_t)r->size; i++)
        CHECK(comm_rank_expect(host[i] == byte_of((int)(i / n), i % n), r, "all_gather", i));

    put_bytes(r, host, r->memory, n);
    comm_broadcast(r->comm, r->memory, n, last);
    CHECK(is_bytes(r, "broadcast", host, n, last));

    put_bytes(r, host, r->memory, n);
    if (r->rank == 0) comm_send(r->comm, r->memory, n, last);
    if (r->rank == last) comm_recv(r->comm, r->memory, n, 0);
    CHECK(is_bytes(r, "send", host, n, r->rank == last ? 0 : r->rank));
out:
    return st;
}

// Ranks of one color, and a stream beside the device's: sums of both at once.
static enum status splits(const struct comm_rank *r, void *host)
{
    enum status st;
    struct comm *half = NULL, *beside = NULL;
    const int color = r->rank % 2, members = r->size / 2;
    struct comm_rank part = *r;
    CHECK(comm_split(r->comm, color, &half));
    CHECK(comm_beside(r->comm, &beside));
    CHECK(comm_rank_expect(comm_size(half) == members && comm_rank(half) == r->rank / 2, r, "split",
                           0));
    put(&part, host, 0, 1000, DT_F32);
    comm_all_reduce(half, r->memory, 1000, DT_F32);
    device_copy_out(r->dev, host, r->memory, 1000 * sizeof(float));
    CHECK(device_sync(r->dev));
    for (size_t i = 0; i < 1000; i++) {
        float wanted = 0, got = ((float *)host)[i];
        for (int m = 0; m < members; m++) {
            float x = value(2 * m + color, i);
            wanted = m ? wanted + x : x;
        }
        CHECK(
            comm_rank_expect(memcmp(&got, &wanted, sizeof got) == 0, r, "all_reduce of a half", i));
    }
    put(&part, host, 0, 1000, DT_F32);
    comm_all_reduce(beside, r->memory, 1000, DT_F32);
    comm_join(beside);
    device_copy_out(r->dev, host, r->memory, 1000 * sizeof(float));
    CHECK(device_sync(r->dev));
    CHECK(is_sum(r, "all_reduce beside", host, 0, 1000, DT_F32));
out:
    comm_free(beside);
    comm_free(half);
    return st;
}

// Sums behind one another, of a length each, without a wait between: the second and later ones add
// what is the same on all ranks. As calls, and as a captured graph where the device has graphs.
static void sum_often(const struct comm_rank *r, size_t n)
{
    static const size_t counts[] = {0, 900, 20000, 3, 900};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        comm_all_reduce(r->comm, r->memory, counts[i] ? counts[i] : n, DT_F32);
}

static float sum_of_same(int size, float x)
{
    float sum = x;
    for (int r = 1; r < size; r++) sum += x;
    return sum;
}

static enum status often_is_right(const struct comm_rank *r, float *host, size_t n, int times)
{
    device_copy_out(r->dev, host, r->memory, n * sizeof *host);
    enum status st = device_sync(r->dev);
    for (size_t i = 0; st == ST_OK && i < n; i++) {
        const int more = 1 + (i < 3) + 2 * (i < 900) + 1;
        float wanted = sum_of(r->size, i, DT_F32);
        for (int k = 1; k < times * more; k++) wanted = sum_of_same(r->size, wanted);
        st = comm_rank_expect(memcmp(&host[i], &wanted, sizeof wanted) == 0, r, "sums in a row", i);
    }
    return st;
}

static enum status sums_in_a_row(const struct comm_rank *r, void *host)
{
    const size_t n = 20000;
    struct device_graph *graph = NULL;
    enum status st;
    put(r, host, 0, n, DT_F32);
    sum_often(r, n);
    CHECK(often_is_right(r, host, n, 1));
    if (!device_capture_begin(r->dev)) goto out;
    sum_often(r, n);
    CHECK(device_capture_end(r->dev, &graph));
    put(r, host, 0, n, DT_F32);
    for (int i = 0; i < 3; i++) device_graph_launch(r->dev, graph);
    CHECK(often_is_right(r, host, n, 3));
out:
    device_graph_free(graph);
    return st;
}

static enum status all_calls(struct comm_rank *r, void *host)
{
    static const size_t counts[] = {1, 7, 1000, (1 << 18) + 3}; // the last is more than one message
    enum status st = ST_OK;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        CHECK(sums(r, host, counts[i], DT_F32));
        CHECK(sums(r, host, counts[i], DT_BF16));
        CHECK(copies(r, host, counts[i] * sizeof(float)));
    }
    CHECK(sums_in_a_row(r, host));
    CHECK(splits(r, host));
    CHECK(comm_barrier(r->comm));
out:
    return st;
}

static enum status rank_is_gone(void *context)
{
    const int64_t start_ns = *(const int64_t *)context;
    if (clock_ms_since(start_ns) < 200) return ST_OK;
    return status_fail(ST_PEER_GONE, "rank 1 (there, process 7) is gone");
}

static enum status sum_in_graph(const struct comm_rank *r)
{
    struct device_graph *graph = NULL;
    if (!device_capture_begin(r->dev)) return status_fail(ST_UNSUPPORTED, "no graphs here");
    comm_all_reduce(r->comm, r->memory, 1000, DT_F32);
    enum status st = device_capture_end(r->dev, &graph);
    if (st == ST_OK) device_graph_launch(r->dev, graph);
    return st; // the process ends soon, the graph with it
}

// The last rank takes no part. What the others say, and what they say when asked again.
static enum status wait_in_vain(struct comm_rank *r)
{
    int64_t start_ns = clock_now_ns();
    if (r->rank == r->size - 1) {
        clock_sleep_ms(1500);
        return ST_OK;
    }
    enum status st = ST_OK;
    if (strcmp(r->mode, "gone") == 0) comm_watch(r->comm, rank_is_gone, &start_ns);
    if (strcmp(r->mode, "late graph") == 0)
        st = sum_in_graph(r);
    else if (strcmp(r->mode, "late sum") == 0)
        comm_all_reduce(r->comm, r->memory, 1000, DT_F32);
    else
        comm_all_gather(r->comm, (char *)r->memory + r->rank, r->memory, 1);
    if (st == ST_OK) st = device_sync(r->dev);
    if (st == ST_OK) return status_fail(ST_MISMATCH, "the call came to its end");
    char said[1024];
    snprintf(said, sizeof said, "%s", status_message());
    comm_all_reduce(r->comm, r->memory, 1, DT_F32);
    if (device_sync(r->dev) == ST_OK || strcmp(said, status_message()) != 0)
        return status_fail(ST_MISMATCH, "then: %s", status_message());
    comm_rank_report(r, said);
    return st;
}

// The last rank does not open; it stays until the first has given up.
static enum status open_in_vain(struct comm_rank *r)
{
    const bool gone = strcmp(r->mode, "alone, gone") == 0;
    const int64_t start_ns = clock_now_ns(), until = clock_deadline_ns(60000);
    char said[PATH_MAX];
    snprintf(said, sizeof said, "%s/rank-0", r->folder);
    while (r->rank > 0 && access(said, R_OK) != 0 && clock_ms_until(until) > 0) clock_sleep_ms(10);
    if (r->rank > 0) return ST_OK;
    return comm_open(r->dev, r->id, r->rank, r->size, gone ? DEADLINE_S : SHORT_S,
                     gone ? rank_is_gone : NULL, (void *)&start_ns, &r->comm);
}

static enum status rank_run(struct comm_rank *r)
{
    enum status st;
    const bool vain = strcmp(r->mode, "calls") != 0;
    if (strcmp(r->mode, "alone") == 0 || strcmp(r->mode, "alone, gone") == 0)
        return open_in_vain(r);
    CHECK(comm_open(r->dev, r->id, r->rank, r->size, DEADLINE_S, NULL, NULL, &r->comm));
    CHECK(comm_barrier(r->comm));
    if (strncmp(r->mode, "late ", 5) == 0) CHECK(comm_rank_map_peers(r));
    if (strncmp(r->mode, "late", 4) == 0) comm_set_deadline(r->comm, SHORT_S);
    if (vain) {
        wait_in_vain(r);
        _exit(0); // without an end of MPI, which would wait
    }
    CHECK(all_calls(r, r->host));
    CHECK(comm_rank_map_peers(r));
    CHECK(all_calls(r, r->host));
    CHECK(comm_unmap_peers(r->comm));
    CHECK(all_calls(r, r->host));
out:
    return st;
}

// ---- the ranks together ------------------------------------------------------------------------

TEST(two_ranks_give_the_bits_of_sums_in_rank_order)
{
    comm_ranks_run("calls", 2, "right", false);
}

TEST(four_ranks_give_the_bits_of_sums_in_rank_order)
{
    comm_ranks_run("calls", 4, "right", false);
}

TEST(a_rank_that_does_not_answer_is_named_after_the_deadline)
{
    comm_ranks_run("late", 2, "rank 0 of 2: all_gather: nothing from", true);
}

TEST(so_it_is_in_a_sum)
{
    comm_ranks_run("late sum", 2, "rank 0 of 2: all_reduce: nothing from", true);
}

TEST(so_it_is_in_a_captured_graph)
{
    if (strncmp(test_device(), "cuda", 4) != 0) test_skip("only GPUs have graphs");
    comm_ranks_run("late graph", 2, "rank 0 of 2: a captured step: nothing from", true);
}

TEST(one_that_does_not_open_is_not_waited_for_without_end)
{
    if (strncmp(test_device(), "cuda", 4) == 0) test_skip("NCCL has waits of its own");
    comm_ranks_run("alone", 2, "rank 0 of 2: MPI_Init: nothing from the other ranks within", true);
    comm_ranks_run("alone, gone", 2, "rank 0 of 2: MPI_Init: rank 1 (there, process 7) is gone",
                   true);
}

TEST(a_rank_that_is_gone_ends_the_wait)
{
    comm_ranks_run("gone", 2, "rank 0 of 2: all_gather: rank 1 (there, process 7) is gone", true);
}

TEST(one_rank_has_no_communicator)
{
    struct device *dev;
    struct comm *comm = (struct comm *)&dev;
    float x = 3;
    assert_ok(device_open("cpu", &dev));
    assert_ok(comm_open(dev, NULL, 0, 1, 1, NULL, NULL, &comm));
    assert_null(comm);
    assert_int_equal(comm_size(comm), 1);
    comm_all_reduce(comm, &x, 1, DT_F32);
    assert_ok(comm_barrier(comm));
    assert_float_equal(x, 3, 0);
    assert_status(comm_open(dev, NULL, 2, 2, 1, NULL, NULL, &comm), ST_INVALID);
    comm_free(comm);
    device_free(dev);
}

int main(int argc, char **argv)
{
    if (comm_rank_main(argc, argv, rank_run)) return 0;
    return test_main();
}
