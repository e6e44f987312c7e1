/* rank_program.c: the launching parts of cw-trainer train, and nothing of training. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/rank_program.h"
#include "common/base/options.h"
#include "common/ranks/liveness.h"
#include "trainer/run/config.h"

struct rank_main {
    struct train_config config;
    struct launch launch;
    char **argv;
};

static enum status check(void *context, struct option_set *set)
{
    struct rank_main *m = context;
    (void)set;
    enum status st = launch_find(&m->config.launch, &m->launch);
    if (st == ST_OK) log_open(m->launch.log_name, LOG_INFO);
    return st;
}

static enum status run(void *context)
{
    struct rank_main *m = context;
    const char *ms = getenv("RANK_PROGRAM_MS");
    const struct ranks *r = &m->launch.ranks;
    struct liveness *liveness = NULL;
    SCOPED(bytes_release) struct bytes bytes = BYTES_INIT;
    enum status st;
    if (m->launch.launches) return launch_ranks(&m->launch, m->argv);
    CHECK(launch_meet(&m->launch, "one layout", &bytes, &liveness));
    printf("rank %d of %d on GPU %d, pid %d\n", r->rank, r->size,
           m->launch.n_gpus ? m->launch.gpus[r->local_rank] : -1, (int)getpid());
    fflush(stdout);
    st = liveness_check(liveness, ms ? atoi(ms) : 0);
out:
    liveness_end(liveness, st);
    return st;
}

int rank_program(int argc, char **argv)
{
    struct rank_main m = {.argv = argv + 1};
    const struct program program = {.name = "cw-trainer",
                                    .command = "train",
                                    .usage = "",
                                    .options = train_options,
                                    .config = &m.config,
                                    .check = check,
                                    .run = run,
                                    .context = &m};
    return program_main(&program, argc - 1, argv + 1);
}

const char *rank_program_folder(void)
{
    const char *folder = test_folder();
    char self[PATH_MAX], *path = NULL;
    const ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(n > 0);
    self[n] = '\0';
    assert_int_equal(symlink(self, test_path(folder, "cw-trainer")), 0);
    assert_true(asprintf(&path, "%s:%s", folder, getenv("PATH")) > 0);
    setenv("PATH", path, 1);
    free(path);
    return folder;
}

pid_t rank_program_pid(const char *log, const char *rank, int64_t ms)
{
    const int64_t deadline = clock_deadline_ns(ms);
    for (;;) {
        char *text = test_read(log);
        const char *line = strstr(text, rank), *pid = line ? strstr(line, "pid ") : NULL;
        const pid_t found = pid && strchr(pid, '\n') ? atoi(pid + 4) : 0;
        if (!found && clock_ms_until(deadline) == 0) fail_msg("no \"%s\" in: %s", rank, text);
        if (found) return found;
        clock_sleep_ms(10);
    }
}
