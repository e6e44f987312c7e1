/* test_ranks.c: common/ranks/ranks.h: who this process is, by options and by the environments of
 * launchers, and what is refused. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/process.h"
#include "common/ranks/ranks.h"
#include "tests/support/support.h"

static int no_environment(void **state)
{
    const json_t *names = test_rows("ranks", "variables"), *name;
    size_t i;
    (void)state;
    json_array_foreach (names, i, name) unsetenv(json_string_value(name));
    return 0;
}

// "NAME=VALUE NAME=VALUE"
static void put(const char *settings)
{
    char *copy = strdup(settings), *remaining = NULL;
    assert_non_null(copy);
    for (char *word = strtok_r(copy, " ", &remaining); word;
         word = strtok_r(NULL, " ", &remaining)) {
        char *value = strchr(word, '=');
        *value++ = '\0';
        assert_int_equal(setenv(word, value, 1), 0);
    }
    free(copy);
}

#define SRUN                                                                                       \
    "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=1 SLURM_JOB_ID=77 SLURM_STEP_ID=0 "
#define MPI "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 "

static enum status find(const json_t *cases, size_t i, struct ranks *ret)
{
    no_environment(NULL);
    put(row_text(cases, i, "environment"));
    return ranks_find(row_int(cases, i, "rank_option"), row_int(cases, i, "size_option"), ret);
}

TEST_WITH(test_found, no_environment, NULL, NULL)
{
    const json_t *cases = test_rows("ranks", "found");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        struct ranks got;
        assert_ok(find(cases, i, &got));
        assert_int_equal(got.rank, row_int(cases, i, "rank"));
        assert_int_equal(got.size, row_int(cases, i, "size"));
        assert_int_equal(got.counted, row_flag(cases, i, "counted"));
        assert_int_equal(got.local_rank, row_int(cases, i, "local_rank"));
        assert_int_equal(got.local_size, row_int(cases, i, "local_size"));
        assert_string_equal(got.run_id, row_text(cases, i, "run_id"));
        assert_string_equal(got.source, row_text(cases, i, "source"));
        // but torchrun may start its ranks again at once, as may who sets our own variables
        const bool apart = strcmp(got.source, "srun") == 0 || strncmp(got.source, "mpi", 3) == 0;
        const int64_t began = process_started_ms(getpid()) - (apart ? 2000 : 0);
        assert_in_range(got.since_ms + 100 - began, 0, 200);
    }
}

TEST_WITH(test_refused, no_environment, NULL, NULL)
{
    const json_t *cases = test_rows("ranks", "refused");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        struct ranks got = {.size = 99};
        assert_fails(find(cases, i, &got), ST_INVALID, row_text(cases, i, "says"));
        assert_message(row_text(cases, i, "too"));
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
