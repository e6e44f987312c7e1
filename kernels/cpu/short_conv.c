/* short_conv.c: a causal convolution of a few rows, channel by channel, with SiLU behind it, and
 * its gradient. Rows before a sequence's first are those of its ancestors (packed) or of its slot's
 * window (paged), and zeros before these: the same sum of as many terms wherever a row stands. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu.h"
#include "kernels/recurrence.h"
#include <string.h>

// The sum before SiLU; from[i]: inputs that meet tap i, NULL: zeros.
static void convolve(float *sum, const float *const from[DELTA_MAX_TAPS], const float *w,
                     const float *bias, int taps, int width)
{
    if (bias)
        memcpy(sum, bias, (size_t)width * sizeof *sum);
    else
        memset(sum, 0, (size_t)width * sizeof *sum);
    for (int i = 0; i < taps; i++)
        if (from[i])
#pragma omp simd
            for (int c = 0; c < width; c++)
                sum[c] = fma_f32(w[(int64_t)c * taps + i], from[i][c], sum[c]);
}

static __attribute__((noinline)) void convolve_row(float *y,
                                                   const float *const from[DELTA_MAX_TAPS],
                                                   const struct conv_args *a,
                                                   const struct delta_shape *s)
{
    const int width = delta_conv_width(s);
    convolve(y, from, a->w, a->bias, s->taps, width);
    if (delta_is_conv(s)) return;
#pragma omp simd
    for (int c = 0; c < width; c++) y[c] *= sigmoid(y[c]);
}

static void packed_inputs(const struct conv_args *a, int row, int taps,
                          const float *ret[DELTA_MAX_TAPS])
{
    for (int i = 0; i < taps; i++) {
        const int from = row_before(a->batch.view, row, taps - 1 - i);
        ret[i] = from < 0 ? NULL : (const float *)a->x + from * a->x_stride;
    }
}

// The rows of sequence s, in order, with the window of its state, into which they go.
static void paged_rows(float *y, const struct conv_args *a, const struct delta_shape *s, int seq)
{
    const struct batch_view *b = a->batch.view;
    const int width = delta_conv_width(s), before = s->taps - 1, n = delta_window(s);
    float *window = cpu_delta_state(&a->batch, seq, 0, delta_window_elements(s));
    for (int row = b->query_start[seq]; row < b->query_start[seq + 1]; row++) {
        const float *from[DELTA_MAX_TAPS];
        const int position = b->positions[row];
        for (int i = 0; i < before; i++) {
            const int at = position - before + i;
            from[i] = at < 0 ? NULL : window + at % n * width;
        }
        from[before] = (const float *)a->x + row * a->x_stride;
        convolve_row(y + (int64_t)row * width, from, a, s);
        memcpy(window + position % n * width, from[before], (size_t)width * sizeof *window);
    }
}

void cpu_short_conv(struct device *dev, void *y, const struct conv_args *a,
                    const struct delta_shape *s)
{
    const struct batch_view *b = a->batch.view;
    const int width = delta_conv_width(s);
    if (!cpu_is_f32(dev, "short_conv", s->dt)) return;
    if (a->batch.kv) {
        for (int seq = 0; seq < b->n_seqs; seq++) {
            const int first = b->query_start[seq], n = b->query_start[seq + 1] - first;
            if (b->state_slot[seq] >= 0)
                paged_rows(y, a, s, seq);
            else
                memset((float *)y + (int64_t)first * width, 0,
                       (size_t)n * (size_t)width * sizeof(float));
        }
        return;
    }
#pragma omp parallel for if ((int64_t)b->n_tokens * width > PARALLEL_WORK / 8)
    for (int row = 0; row < b->n_tokens; row++) {
        const float *from[DELTA_MAX_TAPS];
        packed_inputs(a, row, s->taps, from);
        convolve_row((float *)y + (int64_t)row * width, from, a, s);
    }
}

// Threads own channels: what a row adds to those before it, and to the weights, is added row after
// row.
enum { CHANNELS = 64 };

static void back_row(float *dx, float *dw, float *db, const float *dy, const struct conv_args *a,
                     const struct delta_shape *s, int row, int first, int n)
{
    const float *from[DELTA_MAX_TAPS], *w = (const float *)a->w + (int64_t)first * s->taps;
    const float *bias = a->bias ? (const float *)a->bias + first : NULL;
    float sum[CHANNELS];
    packed_inputs(a, row, s->taps, from);
    for (int i = 0; i < s->taps; i++)
        if (from[i]) from[i] += first;
    convolve(sum, from, w, bias, s->taps, n);
    for (int c = 0; c < n; c++) {
        const float open = sigmoid(sum[c]);
        const float slope = delta_is_conv(s) ? 1 : open * fma_f32(sum[c], 1 - open, 1);
        sum[c] = dy[first + c] * slope;
        if (db) db[first + c] += sum[c];
    }
    for (int i = 0; i < s->taps; i++) {
        if (!from[i]) continue;
        float *grad = dx + (from[i] - (const float *)a->x); // lies as x does
        for (int c = 0; c < n; c++) {
            float *to_w = dw ? dw + (first + c) * s->taps + i : NULL;
            grad[c] = fma_f32(sum[c], w[c * s->taps + i], grad[c]);
            if (to_w) *to_w = fma_f32(sum[c], from[i][c], *to_w);
        }
    }
}

void cpu_short_conv_back(struct device *dev, void *dx, float *dw, float *db, const void *dy,
                         const struct conv_args *a, const struct delta_shape *s)
{
    const int rows = a->batch.view->n_tokens, width = delta_conv_width(s);
    if (!cpu_is_f32(dev, "short_conv_back", s->dt)) return;
#pragma omp parallel for if ((int64_t)rows * width > PARALLEL_WORK / 8)
    for (int first = 0; first < width; first += CHANNELS) {
        const int n = width - first < CHANNELS ? width - first : CHANNELS;
        for (int row = 0; row < rows; row++)
            memset((float *)dx + row * a->x_stride + first, 0, (size_t)n * sizeof(float));
        for (int row = 0; row < rows; row++)
            back_row(dx, dw, db, (const float *)dy + (int64_t)row * width, a, s, row, first, n);
    }
}
