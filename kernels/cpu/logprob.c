/* logprob.c: log-probability of a chosen token and entropy of each row of logits, and the gradient.
 * A row is one thread's and is summed in pieces (f32 within a piece, double over pieces), so that a
 * vocabulary of 150,000 loses nothing and a row's result does not depend on the others. */
#include "kernels/cpu/cpu.h"

enum { PIECE = 512 };

void cpu_logprob(struct device *dev, float *logprob, float *lse, float *entropy,
                 const float *logits, const int32_t *target, int n, int vocab, float temperature)
{
    for (int i = 0; i < n; i++)
        if (target[i] < 0 || target[i] >= vocab) {
            device_fail(dev, "logprob: target %d of row %d is outside the vocabulary of %d",
                        target[i], i, vocab);
            return;
        }
    const float scale = 1.0f / temperature;
#pragma omp parallel for if ((int64_t)n * vocab > PARALLEL_WORK / 8)
    for (int i = 0; i < n; i++) {
        const float *row = logits + (int64_t)i * vocab;
        const float max = max_f32(row, vocab) * scale;
        double sum = 0, weighted = 0; // of e^(z - max), and of that times (z - max)
        for (int start = 0; start < vocab; start += PIECE) {
            int end = vocab - start < PIECE ? vocab : start + PIECE;
            float part = 0, part_weighted = 0;
#pragma omp simd reduction(+ : part, part_weighted)
            for (int t = start; t < end; t++) {
                float z = row[t] * scale - max, e = exp_f32(z);
                part += e;
                part_weighted += e > 0 ? e * z : 0; // a logit of -inf adds nothing
            }
            sum += part;
            weighted += part_weighted;
        }
        double log_sum = log(sum);
        lse[i] = (float)(max + log_sum);
        logprob[i] = (float)((double)(row[target[i]] * scale - max) - log_sum);
        if (entropy) entropy[i] = (float)(log_sum - weighted / sum);
    }
}

void cpu_logprob_back(struct device *dev, void *dlogits, const float *dlogprob, const float *logits,
                      const float *lse, const int32_t *target, int n, int vocab, float temperature,
                      enum dtype dt)
{
    if (!cpu_is_f32(dev, "logprob_back", dt)) return;
    const float scale = 1.0f / temperature;
#pragma omp parallel for if ((int64_t)n * vocab > PARALLEL_WORK / 8)
    for (int i = 0; i < n; i++) {
        const float *row = logits + (int64_t)i * vocab;
        float *out = (float *)dlogits + (int64_t)i * vocab;
        float g = dlogprob[i] * scale, shift = lse[i];
        if (g == 0) {
            memset(out, 0, (size_t)vocab * sizeof *out);
            continue;
        }
#pragma omp simd
        for (int t = 0; t < vocab; t++) out[t] = -g * exp_f32(row[t] * scale - shift);
        out[target[i]] += g;
    }
}
