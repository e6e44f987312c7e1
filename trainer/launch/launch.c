/* launch.c: starting the ranks of this host: on GPUs each as a child of this process, on the CPU by
 * mpirun, without which MPI's ranks do not find one another. Each runs this program's own command
 * line, and knows by its environment that it is a rank. */
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/spawn.h"
#include "common/ranks/processes.h"
#include "trainer/launch/job.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#define GRACE_MS 10000 // of ranks to end once one has failed, which they know by themselves

// Of the ranks of one host; those of several hosts have no id in common but what the environment
// says.
static void make_run_id(struct job *job)
{
    if (job->ranks.local_size == job->ranks.size)
        snprintf(job->ranks.run_id, sizeof job->ranks.run_id, "%" PRId64 "-%d", clock_wall_s(),
                 (int)getpid());
}

static enum status become_rank(void *context, int rank)
{
    const struct job *job = context;
    struct ranks r = job->ranks;
    r.rank = rank;
    r.local_rank = rank % job->n_gpus;
    return ranks_export(&r);
}

enum status job_launch(struct job *job, char **argv)
{
    struct bytes line = BYTES_INIT;
    struct processes plan = {.n = job->n_gpus,
                             .first = (int)job->options->node_rank * job->n_gpus,
                             .before = become_rank,
                             .context = job,
                             .stop_signal = SIGTERM,
                             .grace_ms = GRACE_MS,
                             .end_ms = PROCESSES_END_MS};
    enum status st;
    // mpirun, told to end, gives its ranks no time; this signal it hands on
    if (!job->n_gpus)
        plan = (struct processes){.n = 1,
                                  .name = "mpirun",
                                  .n_ranks = job->ranks.size,
                                  .stop_signal = SIGUSR1,
                                  .grace_ms = GRACE_MS,
                                  .end_ms = PROCESSES_END_MS};
    make_run_id(job);
    CHECK(processes_line("cw-trainer", argv, job->n_gpus ? 0 : job->ranks.size, &line));
    plan.line = bytes_text(&line);
    log_info("%d ranks, %d of them started here%s", job->ranks.size, job->ranks.local_size,
             job->n_gpus ? "" : ", with mpirun");
    st = processes_run(&plan);
out:
    bytes_release(&line);
    return st;
}
