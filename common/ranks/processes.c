/* processes.c: children and a signalfd, in one loop. */
// SPDX-License-Identifier: Apache-2.0
#include "common/ranks/processes.h"
#include "common/base/clock.h"
#include "common/base/options.h"
#include "common/base/spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#define LAST_WORDS_S 3   // that mpirun gives ranks, twice, once one has failed
#define SETTLE_MS    500 // from a failure until the others are told to end
#define LOOK_MS      500 // between two looks at ranks that another program started

struct group {
    const struct processes *plan;
    pid_t *pids; // 0: has ended
    int n_left;
    bool all_ran;              // at once
    int64_t end_ns;            // when those that are left count as failed; INT64_MAX: all run
    int64_t kill_ns;           // when those that are left are killed; INT64_MAX: nobody failed
    bool handed_on;            // a signal
    struct status_kept failed; // the first
};

static void signal_all(const struct group *g, int number)
{
    for (int i = 0; i < g->plan->n; i++)
        if (g->pids[i]) kill(g->pids[i], number);
}

static enum status start_all(struct group *g)
{
    const struct processes *p = g->plan;
    const int in = open("/dev/null", O_RDONLY | O_CLOEXEC);
    enum status st = ST_OK;
    if (in < 0) FAIL(ST_IO, "/dev/null: %s", strerror(errno));
    for (int i = 0; i < p->n; i++) {
        if (p->before) CHECK(p->before(p->context, p->first + i));
        CHECK(spawn(p->line, in, -1, -1, &g->pids[i]));
        g->n_left++;
    }
out:
    if (in >= 0) close(in);
    return st;
}

static void note_failure(struct group *g, int i, int status)
{
    char how[SPAWN_WORDS], name[32];
    spawn_words(status, how);
    snprintf(name, sizeof name, "rank %d", g->plan->first + i);
    status_keep(&g->failed,
                status_fail(ST_PEER_GONE, "%s (pid %d) %s%s%s",
                            g->plan->name ? g->plan->name : name, (int)g->pids[i], how,
                            g->n_left > 1 ? ", and the others with it" : "",
                            g->plan->name ? "; the reason stands above its own words" : ""));
}

// The one that has failed, -1 where none has. One that a signal ended did so of no other's failing,
// so it goes before those that ended with a status.
static int failed_one(const struct group *g, int *ret_status)
{
    int first = -1, status;
    for (int i = 0; i < g->plan->n; i++) {
        if (!g->pids[i] || !spawn_exited(g->pids[i], 0, &status) || status == 0) continue;
        if (first >= 0 && (WIFSIGNALED(*ret_status) || !WIFSIGNALED(status))) continue;
        first = i;
        *ret_status = status;
    }
    return first;
}

static void end_all(struct group *g)
{
    g->kill_ns = clock_deadline_ns(g->plan->grace_ms);
    signal_all(g, SIGTERM);
    signal_all(g, SIGCONT); // one that is stopped could not end by itself
}

static void look_for_failure(struct group *g)
{
    int status = 0;
    if (g->failed.code != ST_OK || failed_one(g, &status) < 0) return;
    // A killed process's connections close before it can be waited for, so others may end first;
    // and those that are told to end at once are as gone as it is when rank 0 looks.
    clock_sleep_ms(SETTLE_MS);
    note_failure(g, failed_one(g, &status), status);
    end_all(g);
}

// Of those that another program started, what the system says are its children.
static int count_ranks(const struct group *g)
{
    char path[64];
    int pid, n = 0;
    if (!g->plan->name) return g->n_left;
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)g->pids[0], (int)g->pids[0]);
    FILE *f = fopen(path, "re");
    if (!f) return g->plan->n_ranks; // a system that does not say
    while (fscanf(f, "%d", &pid) == 1) n++;
    fclose(f);
    return n;
}

// One that is stopped at the end of a run keeps nobody waiting but this process.
static void look_for_laggards(struct group *g)
{
    const int all = g->plan->name ? g->plan->n_ranks : g->plan->n, n = count_ranks(g);
    g->all_ran |= !g->plan->name || n >= all; // those that are started here have all been
    if (!g->all_ran || n >= all || g->failed.code != ST_OK)
        g->end_ns = INT64_MAX;
    else if (g->end_ns == INT64_MAX)
        g->end_ns = clock_deadline_ns(g->plan->end_ms);
    if (clock_ms_until(g->end_ns) > 0) return;
    status_keep(&g->failed,
                status_fail(ST_TIMEOUT,
                            "%d of %d ranks had not ended %g s after the others, and were ended", n,
                            all, g->plan->end_ms / 1e3));
    end_all(g);
}

static void take_ended(struct group *g)
{
    look_for_failure(g);
    for (int i = 0; i < g->plan->n; i++) {
        if (!g->pids[i] || !spawn_exited(g->pids[i], 0, NULL)) continue;
        spawn_end(g->pids[i]); // and what it left
        g->pids[i] = 0;
        g->n_left--;
    }
}

static void kill_all(struct group *g)
{
    for (int i = 0; i < g->plan->n; i++) {
        if (g->pids[i]) spawn_end(g->pids[i]);
        g->pids[i] = 0;
    }
    g->n_left = 0;
}

static void wait_for_signal(struct group *g, int fd)
{
    struct signalfd_siginfo info;
    struct pollfd p = {.fd = fd, .events = POLLIN};
    const int64_t next = g->kill_ns < g->end_ns ? g->kill_ns : g->end_ns;
    const int ms = clock_ms_until(next);
    poll(&p, 1, g->plan->name && ms > LOOK_MS ? LOOK_MS : ms);
    while (read(fd, &info, sizeof info) == sizeof info) {
        const uint32_t number = info.ssi_signo;
        if (number == SIGCHLD || (number == SIGHUP && g->handed_on)) continue; // options.h
        signal_all(g, g->plan->stop_signal);
        g->handed_on = true;
    }
}

enum status processes_line(const char *program, char **argv, int mpi_ranks, struct bytes *ret)
{
    if (mpi_ranks > 0)
        bytes_printf(ret,
                     "mpirun -n %d --oversubscribe --bind-to none --mca odls_base_sigkill_timeout "
                     "%d%s ",
                     mpi_ranks, LAST_WORDS_S, geteuid() == 0 ? " --allow-run-as-root" : "");
    spawn_put_program(ret, program);
    for (char **word = argv; *word; word++) {
        bytes_puts(ret, " ");
        spawn_put_word(ret, *word);
    }
    return bytes_status(ret);
}

enum status processes_run(const struct processes *plan)
{
    struct group g = {.plan = plan, .end_ns = INT64_MAX, .kill_ns = INT64_MAX};
    sigset_t signals, before;
    int fd = -1;
    enum status st = ST_OK;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGUSR1);
    if (program_hears_hangup()) sigaddset(&signals, SIGHUP); // blocked, it would not be ignored
    sigaddset(&signals, SIGCHLD);
    sigprocmask(SIG_BLOCK, &signals, &before);
    g.pids = calloc((size_t)plan->n, sizeof *g.pids);
    fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
    if (!g.pids || fd < 0) FAIL(ST_IO, "no memory or descriptor to start %d processes", plan->n);
    CHECK(start_all(&g));
    while (g.n_left > 0) {
        take_ended(&g);
        if (g.n_left == 0) break;
        look_for_laggards(&g);
        if (clock_ms_until(g.kill_ns) == 0)
            kill_all(&g);
        else
            wait_for_signal(&g, fd);
    }
    st = status_recall(&g.failed);
out:
    if (g.pids) kill_all(&g);
    if (fd >= 0) close(fd);
    free(g.pids);
    sigprocmask(SIG_SETMASK, &before, NULL);
    return st;
}
