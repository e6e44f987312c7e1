/* test_ranks.c: common/ranks/ranks.h: who this process is, by options and by the environments of
 * launchers, and what is refused. */
// SPDX-License-Identifier: Apache-2.0
#include "common/ranks/ranks.h"
#include "tests/support/support.h"

static const char *const names[] = {
    "COMMONWEIGHT_RANK",
    "COMMONWEIGHT_RANKS",
    "COMMONWEIGHT_LOCAL_RANK",
    "COMMONWEIGHT_LOCAL_RANKS",
    "COMMONWEIGHT_RUN_ID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
};

static int no_environment(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unsetenv(names[i]);
    return 0;
}

// "NAME=VALUE NAME=VALUE"
static void put(const char *settings)
{
    char *copy = strdup(settings), *rest = NULL;
    assert_non_null(copy);
    for (char *word = strtok_r(copy, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        char *value = strchr(word, '=');
        *value++ = '\0';
        assert_int_equal(setenv(word, value, 1), 0);
    }
    free(copy);
}

#define SRUN                                                                                       \
    "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=1 SLURM_JOB_ID=77 SLURM_STEP_ID=0 "
#define MPI "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 "

TEST_WITH(test_found, no_environment, NULL, NULL)
{
    static const struct {
        const char *environment;
        int rank_option, size_option;
        struct ranks want; // local_size, run_id: as they are
    } cases[] = {
        {"", -1, 0, {0, 1, false, 0, 1, "", "--ranks"}},
        {"", -1, 4, {0, 4, false, 0, 4, "", "--ranks"}},
        {"", 2, 4, {2, 4, true, 0, 0, "", "--rank"}},
        {MPI "OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=j1",
         -1,
         0,
         {2, 4, true, 1, 2, "j1", "mpirun"}},
        {MPI, 2, 4, {2, 4, true, 0, 0, "", "mpirun"}},
        {"PMI_RANK=1 PMI_SIZE=3 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=3",
         -1,
         0,
         {1, 3, true, 1, 3, "", "mpiexec"}},
        {"RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=r",
         -1,
         0,
         {3, 4, true, 1, 2, "r", "torchrun"}},
        {"RANK=3 WORLD_SIZE=4 TORCHELASTIC_RUN_ID=none", -1, 0, {3, 4, true, 0, 0, "", "torchrun"}},
        {SRUN "SLURM_STEP_TASKS_PER_NODE=4(x2)", -1, 0, {5, 8, true, 1, 4, "77.0", "srun"}},
        {SRUN "SLURM_STEP_TASKS_PER_NODE=8", -1, 0, {5, 8, true, 1, 8, "77.0", "srun"}},
        {SRUN "SLURM_STEP_TASKS_PER_NODE=6,2", -1, 0, {5, 8, true, 1, 0, "77.0", "srun"}},
        {SRUN "SLURM_STEP_TASKS_PER_NODE=3(x2),2", -1, 0, {5, 8, true, 1, 0, "77.0", "srun"}},
        // a batch script, no task of a step
        {"SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=8 SLURM_JOB_ID=77",
         -1,
         0,
         {0, 1, false, 0, 1, "", "--ranks"}},
        // mpirun in a step of Slurm, whose numbers are then those of mpirun's own helpers
        {SRUN MPI, -1, 0, {2, 4, true, 0, 0, "", "mpirun"}},
        {MPI "RANK=2 WORLD_SIZE=4", -1, 0, {2, 4, true, 0, 0, "", "mpirun"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ranks got;
        no_environment(NULL);
        put(cases[i].environment);
        assert_ok(ranks_find(cases[i].rank_option, cases[i].size_option, &got));
        assert_int_equal(got.rank, cases[i].want.rank);
        assert_int_equal(got.size, cases[i].want.size);
        assert_int_equal(got.counted, cases[i].want.counted);
        assert_int_equal(got.local_rank, cases[i].want.local_rank);
        assert_int_equal(got.local_size, cases[i].want.local_size);
        assert_string_equal(got.run_id, cases[i].want.run_id);
        assert_string_equal(got.source, cases[i].want.source);
    }
}

TEST_WITH(test_refused, no_environment, NULL, NULL)
{
    static const struct {
        const char *environment;
        int rank_option, size_option;
        const char *a, *b; // both of which the sentence names
    } cases[] = {
        {MPI, 1, 0, "--rank says 1", "OMPI_COMM_WORLD_RANK says 2"},
        {MPI, -1, 3, "--ranks says 3", "OMPI_COMM_WORLD_SIZE says 4"},
        {SRUN, -1, 4, "--ranks says 4", "SLURM_STEP_NUM_TASKS says 8"},
        {MPI "RANK=1 WORLD_SIZE=4", -1, 0, "OMPI_COMM_WORLD_RANK says 2", "RANK says 1"},
        {MPI "PMI_RANK=2 PMI_SIZE=5", -1, 0, "OMPI_COMM_WORLD_SIZE says 4", "PMI_SIZE says 5"},
        {"RANK=1", -1, 0, "RANK is in the environment without WORLD_SIZE", "unset"},
        {"WORLD_SIZE=2", -1, 0, "WORLD_SIZE is in the environment without RANK", "unset"},
        {"RANK=4 WORLD_SIZE=4", -1, 0, "RANK=4", "WORLD_SIZE=4"},
        {"RANK=one WORLD_SIZE=4", -1, 0, "RANK=one", "number"},
        {"RANK=-1 WORLD_SIZE=4", -1, 0, "RANK=-1", "number"},
        {"RANK= WORLD_SIZE=4", -1, 0, "RANK=", "number"},
        {"RANK=1 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", -1, 0, "LOCAL_RANK=2",
         "LOCAL_WORLD_SIZE=2"},
        {"", 1, 0, "--rank 1", "--ranks"},
        {"", 4, 4, "--rank 4", "--ranks 4"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ranks got = {.size = 99};
        no_environment(NULL);
        put(cases[i].environment);
        assert_status(ranks_find(cases[i].rank_option, cases[i].size_option, &got), ST_INVALID);
        assert_message(cases[i].a);
        assert_message(cases[i].b);
        assert_int_equal(got.size, 99);
    }
}

// What one launcher hands on replaces what another one left.
TEST_WITH(test_exported, no_environment, no_environment, NULL)
{
    const struct ranks given = {
        .rank = 9, .size = 16, .local_rank = 1, .local_size = 8, .run_id = "a-run"};
    struct ranks got;
    put(SRUN "RANK=1 WORLD_SIZE=2 " MPI);
    assert_ok(ranks_export(&given));
    assert_ok(ranks_find(-1, 0, &got));
    assert_int_equal(got.rank, 9);
    assert_int_equal(got.size, 16);
    assert_int_equal(got.local_rank, 1);
    assert_int_equal(got.local_size, 8);
    assert_string_equal(got.run_id, "a-run");
}
