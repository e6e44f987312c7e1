/* mpirun.c: see mpirun.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/mpirun.h"
#include "tests/support/support.h"

const char *const *mpirun_words(int n)
{
    if (!CW_MPI) test_skip("this was built without MPI");
    if (system("command -v mpirun >/dev/null") != 0) test_skip("there is no mpirun");
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1); // of anybody else it is not looked at
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    setenv("OMP_NUM_THREADS", "1", 1); // machines of tests have few cores
    return args("mpirun --oversubscribe --bind-to none -n %d --enable-recovery", n);
}
