/* adjust.cu: penalties and biases on single logits, before a token is sampled, and their way back.
 * One block a row; a row lists a token once, so no two threads meet. Products and sums are rounded
 * one by one, as on the CPU. */
#include "kernels/cuda/cuda.cuh"

#define THREADS 256

__device__ __forceinline__ float adjusted(float z, const logit_row &row, const logit_entry &entry)
{
    z = __fadd_rn(z, entry.bias);
    if (entry.seen) z = z > 0.f ? __fdiv_rn(z, row.repetition) : __fmul_rn(z, row.repetition);
    z = __fsub_rn(z, __fmul_rn(row.frequency, (float)entry.count));
    if (entry.count > 0) z = __fsub_rn(z, row.presence);
    return z;
}

__global__ void adjust_kernel(float *logits, float *saved, const logit_row *rows,
                              const logit_entry *entries, int vocab, bool undo)
{
    grid_begin();
    const logit_row row = rows[blockIdx.x];
    float *z = logits + (int64_t)row.row * vocab;
    for (int e = row.first + threadIdx.x; e < row.first + row.n; e += THREADS) {
        const logit_entry entry = entries[e];
        if (entry.token < 0 || entry.token >= vocab) continue; // the host cannot look
        if (undo) {
            z[entry.token] = saved[e];
        } else {
            saved[e] = z[entry.token];
            z[entry.token] = adjusted(z[entry.token], row, entry);
        }
    }
}

void cuda_adjust_logits(struct device *dev, float *logits, float *saved,
                        const struct logit_row *rows, const struct logit_entry *entries, int n,
                        int vocab, bool undo)
{
    if (n <= 0) return;
    cuda_launch(dev, "adjust_logits", adjust_kernel, n, THREADS, 0, logits, saved, rows, entries,
                vocab, undo);
}
