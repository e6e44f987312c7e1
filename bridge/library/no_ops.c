/* no_ops.c: stands in libcommonweight-bridge.so for the CPU's table of operations. The library maps
 * memory and publishes; it computes nothing, and so brings no BLAS into its caller's process. */
#include "kernels/cpu/cpu.h"

const struct ops cpu_ops = {0};
