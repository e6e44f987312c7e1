/* prepare.h: what a program with kernels does before its libraries are prepared. For mains. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_PREPARE_H
#define KERNELS_PREPARE_H

// Ends the process with a sentence where OpenBLAS, when it is loaded, would ask for memory for
// ever.
void prepare_check(int argc, char **argv, char **envp);
// Stands outside of functions of a main; a shared object cannot have it.
#define PREPARE_PROGRAM                                                                            \
    __attribute__((section(".preinit_array"), used)) static void (*const before_libraries)(        \
        int, char **, char **) = prepare_check

#endif
