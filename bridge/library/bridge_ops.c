/* bridge_ops.c: stands in the bridge's clients (libcommonweight-bridge.so, cw-ipc-check) for the
 * CPU's table of operations. They map memory, sum what is in it, and publish; nothing else is
 * computed, so that the library brings no BLAS into its caller's process. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu.h"

const struct ops cpu_ops = {.checksum = cpu_checksum};
