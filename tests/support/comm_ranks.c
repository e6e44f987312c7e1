/* comm_ranks.c: see comm_ranks.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/comm_ranks.h"
#include "tests/support/mpirun.h"

#define MAX_RANKS 4
#define UNMAPPED  "peers are not mapped"

static const char *program;

// ---- one rank ----------------------------------------------------------------------------------

void comm_rank_report(const struct comm_rank *r, const char *text)
{
    char name[32];
    snprintf(name, sizeof name, "rank-%d", r->rank);
    test_write(test_path(r->folder, name), text, strlen(text));
}

enum status comm_rank_expect(bool right, const struct comm_rank *r, const char *what, size_t i)
{
    if (right) return ST_OK;
    return status_fail(ST_MISMATCH, "rank %d of %d: %s: element %zu is wrong", r->rank, r->size,
                       what, i);
}

enum status comm_rank_map_peers(struct comm_rank *r)
{
    char why[300] = "not written";
    enum status st = comm_share(r->comm, NULL, 0, why, sizeof why);
    if (st == ST_OK && why[0]) st = status_fail(ST_UNSUPPORTED, UNMAPPED ": %s", why);
    return st;
}

// argv: this program, "rank", mode, folder, rank or "mpi", size, id, device
bool comm_rank_main(int argc, char **argv, comm_rank_fn *run)
{
    enum status st;
    SCOPED(bytes_release) struct bytes id = BYTES_INIT;
    program = argv[0];
    if (argc != 8 || strcmp(argv[1], "rank") != 0) return false;
    const char *rank = strcmp(argv[4], "mpi") ? argv[4] : getenv("OMPI_COMM_WORLD_RANK");
    struct comm_rank r = {
        .mode = argv[2], .folder = argv[3], .rank = atoi(rank), .size = atoi(argv[5])};
    r.room = (size_t)r.size * (1 << 20) * 5;
    CHECK(base64_decode(argv[6], &id));
    memcpy(r.id, id.data, sizeof r.id);
    CHECK(device_open(argv[7], &r.dev));
    CHECK(device_alloc(r.dev, r.room, &r.memory));
    CHECK(device_host_alloc(r.dev, r.room, &r.host));
    st = run(&r);
out:
    comm_rank_report(&r, st == ST_OK ? "right" : status_message());
    comm_free(r.comm);
    device_host_release(r.dev, r.host);
    device_release(r.dev, r.memory);
    device_free(r.dev);
    return true;
}

// ---- the ranks together ------------------------------------------------------------------------

static void start_mpi(const char *mode, const char *folder, int size, const char *id)
{
    struct test_child child = {0};
    test_spawn(&child, test_path(folder, "log"),
               JOIN(mpirun_words(size),
                    args("%s rank %s %s mpi %d %s cpu", program, mode, folder, size, id)));
    test_wait(&child, 60000);
}

static void start_gpus(const char *mode, const char *folder, int size, const char *id)
{
    struct test_child children[MAX_RANKS] = {0};
    for (int r = 0; r < size; r++)
        test_spawn(&children[r], test_path(folder, "log"),
                   args("%s rank %s %s %d %d %s cuda:%d", program, mode, folder, r, size, id, r));
    for (int r = 0; r < size; r++) test_wait(&children[r], 120000);
}

void comm_ranks_run(const char *mode, int size, const char *wanted, bool without_last)
{
    unsigned char id[COMM_ID_BYTES];
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    struct device *dev;
    const char *folder = test_folder();
    char name[32];
    const bool cuda = strncmp(test_device(), "cuda", 4) == 0;
    if (cuda) {
        snprintf(name, sizeof name, "cuda:%d", size - 1);
        if (device_open(name, &dev) != ST_OK) test_skip("%s", status_message());
        device_free(dev);
    }
    assert_ok(comm_new_id(cuda ? DEVICE_CUDA : DEVICE_CPU, id));
    assert_ok(base64_encode(id, sizeof id, &text));
    if (cuda)
        start_gpus(mode, folder, size, bytes_text(&text));
    else
        start_mpi(mode, folder, size, bytes_text(&text));
    for (int r = 0; r < size - without_last; r++) {
        snprintf(name, sizeof name, "rank-%d", r);
        if (access(test_path(folder, name), R_OK) != 0)
            print_error("rank %d wrote nothing:\n%s\n", r, test_read(test_path(folder, "log")));
        char *said = test_read(test_path(folder, name));
        if (strstr(said, UNMAPPED)) test_skip("%s", said);
        assert_contains(said, wanted);
    }
}
