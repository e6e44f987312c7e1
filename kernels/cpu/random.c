/* random.c: random numbers for weights that no file has. */
#include "common/base/rng.h"
#include "kernels/cpu/cpu.h"

void cpu_random_normal(struct device *dev, void *x, int64_t n, float scale, uint64_t seed,
                       uint64_t stream, enum dtype dt)
{
    (void)dev;
#pragma omp parallel for
    for (int64_t begin = 0; begin < n; begin += RANDOM_CHUNK) {
        const int64_t end = begin + RANDOM_CHUNK < n ? begin + RANDOM_CHUNK : n;
        struct rng r;
        rng_init(&r, seed, stream + (uint64_t)(begin / RANDOM_CHUNK));
        for (int64_t i = begin; i < end; i++) {
            const float value = scale * rng_normal(&r);
            if (dt == DT_F32)
                ((float *)x)[i] = value;
            else
                ((uint16_t *)x)[i] = bf16_from_f32(value);
        }
    }
}
