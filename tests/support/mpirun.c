/* mpirun.c: see mpirun.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/mpirun.h"
#include "tests/support/support.h"

#include <ctype.h>
#include <dirent.h>

const char *const *mpirun_words(int n)
{
    if (!CW_MPI) test_skip("this was built without MPI");
    if (system("command -v mpirun >/dev/null") != 0) test_skip("there is no mpirun");
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1); // of anybody else it is not looked at
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    setenv("OMP_NUM_THREADS", "1", 1);           // machines of tests have few cores
    setenv("ASAN_OPTIONS", "detect_leaks=0", 0); // Open MPI leaves some behind
    return args("mpirun --oversubscribe --bind-to none -n %d --enable-recovery", n);
}

static pid_t parent_of(pid_t pid)
{
    char stat[512] = "", path[32];
    int parent = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    const char *end = fgets(stat, sizeof stat, f) ? strrchr(stat, ')') : NULL;
    if (end) sscanf(end, ") %*c %d", &parent);
    fclose(f);
    return parent;
}

static bool descends(pid_t pid, pid_t from)
{
    for (; pid > 1; pid = parent_of(pid))
        if (pid == from) return true;
    return false;
}

static bool has_in(pid_t pid, const char *file, const char *what)
{
    char text[1 << 15], path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, file);
    FILE *f = fopen(path, "r");
    if (!f) return false;
    const size_t len = fread(text, 1, sizeof text, f);
    fclose(f);
    return memmem(text, len, what, strlen(what)) != NULL;
}

pid_t rank_process(const struct test_child *child, const char *name, int ranks, int rank)
{
    pid_t found = 0;
    DIR *dir = opendir("/proc");
    const struct dirent *entry;
    const char *mine = test_text("OMPI_COMM_WORLD_RANK=%d", rank);
    while ((entry = readdir(dir)) && !found) {
        const pid_t pid = isdigit((unsigned char)entry->d_name[0]) ? atoi(entry->d_name) : 0;
        if (pid && has_in(pid, "comm", name) && (ranks == 1 || has_in(pid, "environ", mine)) &&
            descends(pid, child->pid))
            found = pid;
    }
    closedir(dir);
    return found;
}
