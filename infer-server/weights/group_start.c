/* group_start.c: a tensor-parallel server that nobody has started N times starts its ranks itself:
 * on GPUs each as a child of this process, on the CPU by mpirun, without which MPI's ranks do not
 * find one another. Main thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/ranks/processes.h"
#include "infer-server/weights/group.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GRACE_MS 10000 // of ranks to end once one has failed, which they know by themselves

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
