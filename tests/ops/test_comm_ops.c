/* test_comm_ops.c: columns that ranks put together (matmul.columns in ops.h) have the bits of the
 * matmul and the communicator's call one after the other, on 2 ranks (support/comm_ranks.h): on
 * GPUs their memory is mapped, and it is one kernel. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/ops.h"
#include "tests/support/comm_ranks.h"

#define DEADLINE_S 20.0
#define K          192
#define MAX_ROWS   130
#define MAX_N      2000
#define TIMES      3

struct sizes {
    int rows, n;
};

// What one rank has, at places of its memory.
struct tensors {
    char *a, *b; // (rows, K), (n, K)
    char *c;     // (rows, size * n), memory of its own
    enum dtype dt;
};

static char *place(const struct comm_rank *r, size_t *at, size_t bytes)
{
    char *p = (char *)r->memory + *at;
    *at += (bytes + 255) / 256 * 256;
    return p;
}

static struct tensors tensors_of(const struct comm_rank *r)
{
    struct tensors t = {.dt = device_computes_in(r->dev, DT_BF16) ? DT_BF16 : DT_F32};
    const size_t e = dtype_size(t.dt);
    size_t at = 0;
    t.a = place(r, &at, (size_t)MAX_ROWS * K * e);
    t.b = place(r, &at, (size_t)MAX_N * K * e);
    return t;
}

static void put(const struct comm_rank *r, const struct tensors *t, void *to, size_t n,
                uint32_t seed)
{
    for (size_t i = 0; i < n; i++) {
        const uint32_t u = ((uint32_t)i + seed * 977u + (uint32_t)r->rank * 31u + 1) * 2654435761u;
        const float value = (float)(u >> 8) / 16777216.0f - 0.5f;
        if (t->dt == DT_F32)
            ((float *)r->host)[i] = value;
        else
            ((uint16_t *)r->host)[i] = bf16_from_f32(value);
    }
    device_copy_in(r->dev, to, r->host, n * dtype_size(t->dt));
    device_sync(r->dev);
}

static enum status same(const struct comm_rank *r, const char *what, const void *x, const void *y,
                        size_t bytes)
{
    char *host = r->host;
    device_copy_out(r->dev, host, x, bytes);
    device_copy_out(r->dev, host + bytes, y, bytes);
    enum status st = device_sync(r->dev);
    for (size_t i = 0; st == ST_OK && i < bytes; i++)
        st = comm_rank_expect(host[i] == host[bytes + i], r, what, i);
    return st;
}

// ---- columns -----------------------------------------------------------------------------------

// Columns of f32 that go to `c` on all ranks, into memory that they share.
static enum status columns(const struct comm_rank *r, struct tensors *t, struct sizes s)
{
    const struct ops *ops = device_ops(r->dev);
    const size_t width = (size_t)s.n * sizeof(float), part = (size_t)s.rows * width,
                 all = part * (size_t)r->size,
                 room = (all + COMM_SHARED_PAGE - 1) / COMM_SHARED_PAGE * COMM_SHARED_PAGE;
    struct matmul shape = {
        .m = s.rows, .n = s.n, .k = K, .trans_b = true, .in = t->dt, .out = DT_F32};
    void *c = NULL, *parts = NULL, *wanted = NULL;
    char why[300];
    enum status st;
    CHECK(device_alloc(r->dev, room, &c));
    CHECK(device_alloc(r->dev, all, &parts));
    CHECK(device_alloc(r->dev, all, &wanted));
    CHECK(comm_share(r->comm, c, room, why, sizeof why));
    if (why[0]) FAIL(ST_UNSUPPORTED, "not shared: %s", why);
    const bool shares = comm_shares(r->comm, c), others = comm_shares(r->comm, parts);
    if (others || shares != (device_kind(r->dev) == DEVICE_CUDA))
        FAIL(ST_MISMATCH, "what is shared is not known");
    for (int i = 0; i < TIMES; i++) {
        put(r, t, t->a, (size_t)s.rows * K, 5 + (uint32_t)i);
        ops->matmul(r->dev, (char *)parts + (size_t)r->rank * part, t->a, t->b, NULL, &shape);
        comm_gather_columns(r->comm, wanted, parts, (size_t)s.rows, width);
        device_fill(r->dev, c, 0xff, all);
        struct matmul joint = shape;
        joint.columns = r->comm;
        joint.parts = parts;
        for (int k = 0; k < TIMES; k++) ops->matmul(r->dev, c, t->a, t->b, NULL, &joint);
        CHECK(same(r, "columns", c, wanted, all));
    }
out:
    device_release(r->dev, wanted);
    device_release(r->dev, parts);
    t->c = c; // released when nobody has it mapped any more
    return st;
}

static enum status rank_run(struct comm_rank *r)
{
    enum status st;
    struct tensors t = tensors_of(r);
    void *shared[3] = {NULL};
    CHECK(comm_open(r->dev, r->id, r->rank, r->size, DEADLINE_S, NULL, NULL, &r->comm));
    CHECK(comm_rank_map_peers(r));
    for (int i = 0; i < 3; i++) {
        st = columns(r, &t, (struct sizes){i == 0 ? 1 : i == 1 ? 64 : 130, 2000});
        shared[i] = t.c;
        CHECK(st);
    }
    CHECK(comm_unmap_peers(r->comm));
    if (comm_shares(r->comm, shared[0])) FAIL(ST_MISMATCH, "what is unmapped is shared still");
out:
    for (int i = 0; i < 3; i++) device_release(r->dev, shared[i]);
    return st;
}

TEST(two_ranks_have_the_bits_of_one_call_after_the_other)
{
    comm_ranks_run("ops", 2, "right", false);
}

int main(int argc, char **argv)
{
    if (comm_rank_main(argc, argv, rank_run)) return 0;
    return test_main();
}
