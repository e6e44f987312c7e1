/* test_two_hosts.c: ranks on two hosts: two network namespaces with names and addresses of their
 * own and a cable between them, which is pulled. Skips where the machine does not let a process
 * make these. */
// SPDX-License-Identifier: Apache-2.0
#include "common/ranks/liveness.h"
#include "tests/support/rank_group.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define HOST_A  "host-a"
#define HOST_B  "host-b"
#define ADDRESS "10.99.0.1"

// Each is held by a process that does nothing else.
static pid_t holders[2];
static const char *folder;
static struct rank_group group;

// ---- the hosts ----------------------------------------------------------------------------------

static bool write_line(const char *path, const char *line)
{
    const int fd = open(path, O_WRONLY | O_CLOEXEC);
    const ssize_t n = fd < 0 ? -1 : write(fd, line, strlen(line));
    if (fd >= 0) close(fd);
    return n >= 0;
}

static bool become_root_of_a_namespace(void)
{
    char uid[64], gid[64];
    snprintf(uid, sizeof uid, "0 %d 1", (int)geteuid());
    snprintf(gid, sizeof gid, "0 %d 1", (int)getegid());
    return unshare(CLONE_NEWUSER) == 0 && write_line("/proc/self/setgroups", "deny") &&
           write_line("/proc/self/uid_map", uid) && write_line("/proc/self/gid_map", gid);
}

static bool become_host(const char *name)
{
    return unshare(CLONE_NEWNET | CLONE_NEWUTS) == 0 && sethostname(name, strlen(name)) == 0 &&
           system("ip link set lo up") == 0;
}

// Host b is a child of a, and hangs on the other end of a's cable.
static bool be_host_a(pid_t *ret_b)
{
    char command[128];
    int ready[2];
    char byte = 0;
    if (!become_root_of_a_namespace() || !become_host(HOST_A) || pipe(ready) != 0) return false;
    if (system("ip link add cable type veth peer name other") != 0) return false;
    const pid_t b = fork();
    if (b == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (become_host(HOST_B) && write(ready[1], "b", 1) == 1)
            for (;;) pause();
        _exit(1);
    }
    close(ready[1]);
    if (b < 0 || read(ready[0], &byte, 1) != 1) return false;
    close(ready[0]);
    snprintf(command, sizeof command, "ip link set other netns %d", (int)b);
    if (system(command) != 0 || system("ip addr add " ADDRESS "/24 dev cable") != 0 ||
        system("ip link set cable up") != 0)
        return false;
    snprintf(command, sizeof command,
             "nsenter -t %d -n sh -c 'ip addr add 10.99.0.2/24 dev other; ip link set other up'",
             (int)b);
    *ret_b = b;
    return system(command) == 0;
}

static void hold_host_a(int to)
{
    pid_t b = 0;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (!be_host_a(&b)) b = 0;
    if (write(to, &b, sizeof b) == sizeof b && b > 0)
        for (;;) pause();
    _exit(1);
}

static void make_hosts(void)
{
    int from_a[2];
    assert_int_equal(pipe(from_a), 0);
    holders[0] = fork();
    assert_true(holders[0] >= 0);
    if (holders[0] == 0) hold_host_a(from_a[1]);
    close(from_a[1]);
    if (read(from_a[0], &holders[1], sizeof holders[1]) != sizeof holders[1]) holders[1] = 0;
    close(from_a[0]);
    if (holders[1] <= 0) test_skip("no namespaces, no veth or no ip and nsenter on this machine");
    folder = test_folder();
}

static int end_hosts(void **state)
{
    (void)state;
    rank_group_end(&group);
    if (holders[0] > 0) {
        kill(holders[0], SIGKILL);
        waitpid(holders[0], NULL, 0);
    }
    holders[0] = holders[1] = 0;
    return 0;
}

static bool enter(pid_t holder)
{
    static const char *const spaces[] = {"user", "net", "uts"};
    bool inside = true;
    for (size_t i = 0; i < 3; i++) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/ns/%s", (int)holder, spaces[i]);
        const int fd = open(path, O_RDONLY | O_CLOEXEC);
        inside = inside && fd >= 0 && setns(fd, 0) == 0;
        if (fd >= 0) close(fd);
    }
    return inside;
}

// ---- the ranks ----------------------------------------------------------------------------------

static enum status work(const struct rendezvous_options *o, void *context)
{
    SCOPED(bytes_release) struct bytes bytes = BYTES_INIT;
    struct peers *peers = NULL;
    struct liveness *l = NULL;
    char path[PATH_MAX];
    const int *check_ms = context;
    enum status st;
    bytes_puts(&bytes, o->who.rank == 0 ? "given" : "");
    if (!enter(holders[o->who.rank / 2])) FAIL(ST_IO, "the host cannot be entered");
    CHECK(rendezvous(o, &bytes, &peers));
    if (strcmp(bytes_text(&bytes), "given") != 0) FAIL(ST_FORMAT, "other bytes");
    CHECK(liveness_start(peers, 1.5, NULL, NULL, &l));
    CHECK(path_put(path, folder, "ready-%d", o->who.rank));
    CHECK(file_write_atomic(path, 0600, "", 0));
    CHECK(liveness_check(l, *check_ms));
out:
    liveness_end(l, st);
    return st;
}

static void start_ranks(const char *url, const char *token, int *check_ms)
{
    const struct rendezvous_options o = {.url = url,
                                         .token = token,
                                         .who = {.size = 4, .local_size = 2},
                                         .version = "1",
                                         .timeout_s = 20};
    for (int rank = 0; rank < 4; rank++) rank_group_add(&group, &o, rank, work, check_ms);
}

static void all_end_well(void)
{
    char sentence[2048];
    for (int rank = 0; rank < 4; rank++)
        if (rank_group_outcome(&group, rank, sentence) != ST_OK)
            fail_msg("rank %d: %s", rank, sentence);
}

TEST_WITH(test_meet_by_tcp, NULL, end_hosts, NULL)
{
    static int check_ms = 500;
    make_hosts();
    start_ranks("tcp://" ADDRESS ":29500", "a-long-token", &check_ms);
    all_end_well();
}

TEST_WITH(test_meet_by_file, NULL, end_hosts, NULL)
{
    static int check_ms = 500;
    char url[PATH_MAX + 8];
    make_hosts();
    snprintf(url, sizeof url, "file://%s/ranks", folder);
    start_ranks(url, NULL, &check_ms);
    all_end_well();
}

// Whoever is on one host misses somebody on the other.
TEST_WITH(test_pulled_cable, NULL, end_hosts, NULL)
{
    static int check_ms = 30000;
    char command[128], path[PATH_MAX], sentence[2048];
    make_hosts();
    start_ranks("tcp://" ADDRESS ":29500", "a-long-token", &check_ms);
    for (int rank = 0; rank < 4; rank++) {
        snprintf(path, sizeof path, "%s/ready-%d", folder, rank);
        test_wait_for_file(path, 20000, NULL);
    }
    snprintf(command, sizeof command, "nsenter -t %d -U -n ip link set cable down",
             (int)holders[0]);
    assert_int_equal(system(command), 0);
    for (int rank = 0; rank < 4; rank++) {
        assert_int_equal(rank_group_outcome(&group, rank, sentence), ST_PEER_GONE);
        assert_contains(sentence, rank < 2 ? "(" HOST_B ", pid " : "rank 0 (" HOST_A ", pid ");
        assert_contains(sentence, "is gone");
    }
}
