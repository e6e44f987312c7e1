/* prepare.c: settings of the libraries below the kernels, which they read before main. */
#include "kernels/device.h"

#include <cblas.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
