/* mpirun.c: see mpirun.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/mpirun.h"
#include "tests/support/support.h"

int mpirun_put(int n, const char *ret_argv[MPIRUN_WORDS])
{
    static const char *const numbers[] = {"0", "1", "2", "3", "4"};
    const char *const words[] = {"mpirun", "--oversubscribe", "--bind-to",         "none",
                                 "-n",     numbers[n],        "--enable-recovery", NULL};
    int count = 0;
    if (!CW_MPI) test_skip("this was built without MPI");
    if (system("command -v mpirun >/dev/null") != 0) test_skip("there is no mpirun");
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1); // of anybody else it is not looked at
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    setenv("OMP_NUM_THREADS", "1", 1); // machines of tests have few cores
    while (words[count]) {
        ret_argv[count] = words[count];
        count++;
    }
    return count;
}
