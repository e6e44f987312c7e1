/* isa.c: a program built for newer processors than the one it runs on says so, instead of dying of
 * an illegal instruction. Compiled for any x86-64 and run before main; the Makefile tells in CW_ISA
 * what the rest of the program was compiled for. Empty elsewhere. */
// SPDX-License-Identifier: Apache-2.0
#ifdef CW_ISA
#include <stdbool.h>
#include <unistd.h>

static bool supported(void)
{
    __builtin_cpu_init();
    switch (CW_ISA[sizeof CW_ISA - 2]) {
    case '4':
        if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
            !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
            return false; // fall through
    case '3':
        if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
            !__builtin_cpu_supports("bmi2"))
            return false; // fall through
    case '2':
        return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
    default:
        return true;
    }
}

__attribute__((constructor)) static void check_processor(void)
{
    static const char sentence[] =
        "commonweight: this program was built for " CW_ISA
        " processors, and this machine's is older: build it here, or with make ARCH=x86-64-v2\n";
    if (supported()) return;
    if (write(STDERR_FILENO, sentence, sizeof sentence - 1) < 0) _exit(1);
    _exit(1);
}
#endif
