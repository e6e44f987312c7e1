/* ranks.c: the variables of each launcher, in one table. Those that stand first win nothing: where
 * two of them speak they must agree. Slurm alone is outranked, since other launchers run inside its
 * jobs, where its numbers are those of the launchers. */
// SPDX-License-Identifier: Apache-2.0
#include "common/ranks/ranks.h"
#include "common/base/process.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Slurm starts a job again after two minutes, mpirun under another id.
#define APART_MS 2000

struct launcher {
    const char *name, *rank, *size, *local_rank, *local_size, *run_id; // NULL: it has none
    const char *only_with; // a variable without which it speaks of somebody else
    bool apart;            // two tries of one run_id begin APART_MS apart at least
};

static const struct launcher launchers[] = {
    {"cw-trainer", "COMMONWEIGHT_RANK", "COMMONWEIGHT_RANKS", "COMMONWEIGHT_LOCAL_RANK",
     "COMMONWEIGHT_LOCAL_RANKS", "COMMONWEIGHT_RUN_ID", NULL, false},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE", NULL, true},
    {"mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", NULL, NULL, true},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID",
     NULL, false},
    // a batch script has most of these too, but is no task of a step
    {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
     "SLURM_JOB_ID", "SLURM_STEP_ID", true},
};
#define N_LAUNCHERS (sizeof launchers / sizeof *launchers)
#define SLURM       (&launchers[N_LAUNCHERS - 1])

static enum status read_number(const char *name, int max, int *ret)
{
    const char *text = getenv(name);
    char *end;
    const long value = strtol(text, &end, 10);
    if (end == text || *end || value < 0 || value > max)
        return status_fail(ST_INVALID,
                           "%s=%s in the environment: a number from 0 to %d belongs "
                           "there",
                           name, text, max);
    *ret = (int)value;
    return ST_OK;
}

// Slurm writes "4", "4(x2)" on two hosts, or "4,2" where they differ: then it is not known.
static int tasks_per_host(const char *text)
{
    char *end;
    const long n = strtol(text, &end, 10);
    const bool all_alike = *end == '\0' || (*end == '(' && !strchr(end, ','));
    return end != text && all_alike && n > 0 && n <= RANKS_MAX ? (int)n : 0;
}

static enum status read_launcher(const struct launcher *l, struct ranks *ret)
{
    struct ranks r = {.counted = true, .source = l->name};
    enum status st;
    CHECK(read_number(l->rank, RANKS_MAX - 1, &r.rank));
    CHECK(read_number(l->size, RANKS_MAX, &r.size));
    if (r.rank >= r.size)
        FAIL(ST_INVALID, "%s=%d with %s=%d in the environment: ranks go from 0 to %d", l->rank,
             r.rank, l->size, r.size, r.size - 1);
    if (getenv(l->local_rank)) CHECK(read_number(l->local_rank, RANKS_MAX - 1, &r.local_rank));
    if (l == SLURM && getenv(l->local_size))
        r.local_size = tasks_per_host(getenv(l->local_size));
    else if (getenv(l->local_size))
        CHECK(read_number(l->local_size, RANKS_MAX, &r.local_size));
    if (r.local_size && r.local_rank >= r.local_size)
        FAIL(ST_INVALID, "%s=%d with %s=%s in the environment: they contradict one another",
             l->local_rank, r.local_rank, l->local_size, getenv(l->local_size));
    // torchrun says "none" where it was not given one; a job of Slurm has several steps
    const char *id = l->run_id ? getenv(l->run_id) : NULL;
    if (id && strcmp(id, "none") != 0)
        snprintf(r.run_id, sizeof r.run_id, "%s%s%s", id, l->only_with ? "." : "",
                 l->only_with ? getenv(l->only_with) : "");
    *ret = r;
out:
    return st;
}

static enum status disagree(const char *a_name, int a, const char *b_name, int b)
{
    return status_fail(ST_INVALID, "%s says %d, %s says %d: leave out the one, or unset the other",
                       a_name, a, b_name, b);
}

// ret_by: who says so; NULL: nobody does.
static enum status ask_environment(struct ranks *ret, const struct launcher **ret_by)
{
    const struct launcher *by = NULL;
    struct ranks found = {0}, other;
    enum status st = ST_OK;
    for (const struct launcher *l = launchers; l < launchers + N_LAUNCHERS; l++) {
        const bool rank = getenv(l->rank) != NULL, size = getenv(l->size) != NULL;
        if ((!rank && !size) || (l->only_with && !getenv(l->only_with))) continue;
        if (by && l == SLURM) continue;
        if (rank != size)
            FAIL(ST_INVALID, "%s is in the environment without %s: set both, or unset it",
                 rank ? l->rank : l->size, rank ? l->size : l->rank);
        CHECK(read_launcher(l, &other));
        if (by && found.rank != other.rank)
            CHECK(disagree(by->rank, found.rank, l->rank, other.rank));
        if (by && found.size != other.size)
            CHECK(disagree(by->size, found.size, l->size, other.size));
        if (by) continue;
        by = l;
        found = other;
    }
    *ret = found;
    *ret_by = by;
out:
    return st;
}

enum status ranks_find(int rank, int size, struct ranks *ret)
{
    const struct launcher *by = NULL;
    struct ranks r = {0};
    enum status st;
    CHECK(ask_environment(&r, &by));
    if (by) {
        if (rank >= 0 && rank != r.rank) CHECK(disagree("--rank", rank, by->rank, r.rank));
        if (size > 0 && size != r.size) CHECK(disagree("--ranks", size, by->size, r.size));
    } else if (rank >= 0) {
        if (size <= 0) FAIL(ST_INVALID, "--rank %d needs --ranks N, how many there are", rank);
        if (rank >= size)
            FAIL(ST_INVALID, "--rank %d with --ranks %d: ranks go from 0 to %d", rank, size,
                 size - 1);
        r = (struct ranks){.rank = rank, .size = size, .counted = true, .source = "--rank"};
    } else {
        r = (struct ranks){.size = size > 1 ? size : 1, .source = "--ranks"};
        r.local_size = r.size;
    }
    *ret = r;
    // On a busy machine a rank may begin, or get this far, when another has failed already.
    ret->since_ms = process_started_ms(getpid()) - (by && by->apart ? APART_MS : 0);
out:
    return st;
}

const char *ranks_variable(const struct ranks *ranks)
{
    for (const struct launcher *l = launchers; l < launchers + N_LAUNCHERS; l++)
        if (strcmp(l->name, ranks->source) == 0) return l->rank;
    return NULL;
}

enum status ranks_export(const struct ranks *ranks)
{
    const struct launcher *own = &launchers[0];
    const struct {
        const char *name;
        int value;
    } numbers[] = {{own->rank, ranks->rank},
                   {own->size, ranks->size},
                   {own->local_rank, ranks->local_rank},
                   {own->local_size, ranks->local_size}};
    for (const struct launcher *l = own + 1; l < SLURM; l++) {
        unsetenv(l->rank);
        unsetenv(l->size);
    }
    bool put = setenv(own->run_id, ranks->run_id, 1) == 0;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        char text[16];
        snprintf(text, sizeof text, "%d", numbers[i].value);
        put = put && setenv(numbers[i].name, text, 1) == 0;
    }
    return put ? ST_OK : status_fail(ST_NO_MEMORY, "no memory for the environment");
}

void ranks_put_forgetting(struct bytes *line)
{
    static const char *const all_of[] = {"OMPI_", "PMIX_", "PMI_", "MPI_LOCAL", "PRTE_", "HYDI_"};
    extern char **environ;
    bytes_puts(line, "env ");
    for (char **variable = environ; *variable; variable++) {
        const int len = (int)strcspn(*variable, "=");
        bool put = false;
        for (size_t i = 0; i < sizeof all_of / sizeof *all_of; i++)
            put |= strncmp(*variable, all_of[i], strlen(all_of[i])) == 0;
        for (const struct launcher *l = launchers; l < launchers + N_LAUNCHERS; l++) {
            const char *of[] = {l->rank,       l->size,   l->local_rank,
                                l->local_size, l->run_id, l->only_with};
            for (size_t i = 0; i < sizeof of / sizeof *of; i++)
                put |= of[i] && (int)strlen(of[i]) == len && strncmp(*variable, of[i], len) == 0;
        }
        if (put) bytes_printf(line, "-u %.*s ", len, *variable);
    }
}
