/* prepare.c: settings of the libraries below the kernels, which they read before main; and the
 * address space that OpenBLAS takes, for which it asks for ever where there is none (ulimit -v). */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/device.h"

#include <cblas.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

// OpenBLAS takes a buffer a thread before main, when it is loaded.
void prepare_check(int argc, char **argv, char **envp)
{
    static const char sentence[] = "commonweight: no room for OpenBLAS's buffers, 129 MiB for each "
                                   "thread, in the address space that this process may have: raise "
                                   "ulimit -v, or lower OMP_NUM_THREADS\n";
    cpu_set_t set; // of which the kernel writes a part
    CPU_ZERO(&set);
    long n = syscall(SYS_sched_getaffinity, 0, sizeof set, &set) > 0 ? CPU_COUNT(&set) : 1;
    (void)argc;
    (void)argv;
    for (; *envp; envp++)
        if (strncmp(*envp, "OMP_NUM_THREADS=", 16) == 0 && atoi(*envp + 16) > 0)
            n = atoi(*envp + 16);
    if (device_blas_fits((int)n)) return;
    if (write(STDERR_FILENO, sentence, sizeof sentence - 1) < 0) _exit(1);
    _exit(1);
}

// A processor that OpenBLAS does not know gets kernels of four floats, three times slower than with
// the vectors that it has. NULL: it is known.
static const char *blas_core(void)
{
#if defined(__x86_64__)
    if (strcmp(openblas_get_corename(), "Prescott") != 0) return NULL;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return "SkylakeX";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "Haswell";
#endif
    return NULL;
}

void device_prepare_process(char **argv)
{
    const char *const settings[][2] = {{"OMP_WAIT_POLICY", "passive"},
                                       {"OPENBLAS_CORETYPE", blas_core()}};
    char self[4096]; // resolved, so that the process keeps its name
    const ssize_t len = readlink("/proc/self/exe", self, sizeof self - 1);
    bool anew = false;
    for (int i = 0; len > 0 && i < 2; i++)
        if (settings[i][1] && !getenv(settings[i][0]))
            anew = setenv(settings[i][0], settings[i][1], 0) == 0 || anew;
    if (!anew) return;
    self[len] = '\0';
    execv(self, argv); // on failure: just as we are
}
