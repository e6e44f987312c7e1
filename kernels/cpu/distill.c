/* distill.c: the divergence of a teacher's distribution from a student's, and its gradient: what a
 * draft model is trained on. Summed as in logprob.c: a row is one thread's, f32 within a chunk and
 * double over chunks. */
#include "kernels/cpu/cpu.h"

enum { CHUNK = 512 };

// e^(z - max) for z = row * scale, times inverse_sum, is a row's softmax.
struct softmax {
    const float *row;
    float scale, max, inverse_sum;
    double log_sum;
};

static struct softmax softmax_of(const float *row, int vocab, float scale)
{
    struct softmax s = {.row = row, .scale = scale, .max = max_f32(row, vocab) * scale};
    double sum = 0;
    for (int start = 0; start < vocab; start += CHUNK) {
        int end = vocab - start < CHUNK ? vocab : start + CHUNK;
        float each[CHUNK];
#pragma omp simd
        for (int t = start; t < end; t++) each[t - start] = exp_f32(row[t] * scale - s.max);
        sum += sum_f32(each, end - start);
    }
    s.inverse_sum = (float)(1 / sum);
    s.log_sum = log(sum);
    return s;
}

void cpu_distill(struct device *dev, float *kl, float *overlap, void *dstudent,
                 const struct distill_args *args, enum dtype dt)
{
    const int n = args->n, vocab = args->vocab, teacher_vocab = args->teacher_vocab;
    const float *student = args->student, *teacher = args->teacher;
    if (dstudent && !cpu_is_f32(dev, "distill", dt)) return;
    if (teacher_vocab < vocab) {
        device_fail(dev, "distill: a teacher vocabulary of %d, smaller than the student's %d",
                    teacher_vocab, vocab);
        return;
    }
    const float slope = args->scale / args->temperature;
#pragma omp parallel for if ((int64_t)n * vocab > PARALLEL_WORK / 8)
    for (int i = 0; i < n; i++) {
        const float inverse = 1.0f / args->temperature;
        const struct softmax p = softmax_of(teacher + (int64_t)i * teacher_vocab, vocab, inverse);
        const struct softmax q = softmax_of(student + (int64_t)i * vocab, vocab, inverse);
        float *gradient = dstudent ? (float *)dstudent + (int64_t)i * vocab : NULL;
        double weighted = 0, common = 0; // sums of p (z_p - z_q), from the maxima; and of min(p, q)
        for (int start = 0; start < vocab; start += CHUNK) {
            int end = vocab - start < CHUNK ? vocab : start + CHUNK;
            float each[CHUNK], least[CHUNK];
#pragma omp simd
            for (int t = start; t < end; t++) {
                float zp = p.row[t] * inverse - p.max, zq = q.row[t] * inverse - q.max;
                float pt = exp_f32(zp) * p.inverse_sum, qt = exp_f32(zq) * q.inverse_sum;
                each[t - start] = pt > 0 ? pt * (zp - zq) : 0; // a logit of -inf adds nothing
                least[t - start] = pt < qt ? pt : qt;
                if (gradient) gradient[t] = slope * (qt - pt);
            }
            weighted += sum_f32(each, end - start);
            common += sum_f32(least, end - start);
        }
        kl[i] = (float)(weighted - p.log_sum + q.log_sum);
        overlap[i] = (float)common;
    }
}
