/* rows.c: operations that move or add rows: look-up, scatter, add, biases, column sums, conversion
 * to other types, rotation and storing. Each is one pass over its memory. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/e4m3.h"
#include "common/base/rng.h"
#include "kernels/cpu/cpu.h"
#include <string.h>

// Where a table of `rows` rows from `first` on (0 rows: all) has that row; -1: it does not hold it.
static int64_t place_of(int row, int first, int rows)
{
    const int at = row - first;
    return rows == 0 || (at >= 0 && at < rows) ? at : -1;
}

void cpu_gather_rows(struct device *dev, void *y, const void *table, const struct gather_args *args)
{
    if (!cpu_is_f32(dev, "gather_rows", args->dt)) return;
    const int n = args->n, width = args->width;
    const float scale = args->scale;
#pragma omp parallel for if ((int64_t)n * width > PARALLEL_WORK)
    for (int i = 0; i < n; i++) {
        const int64_t at = place_of(args->index[i], args->first, args->rows);
        const float *from = (const float *)table + at * width;
        float *to = (float *)y + (int64_t)i * width;
        if (at < 0) {
            memset(to, 0, (size_t)width * sizeof *to);
            continue;
        }
#pragma omp simd
        for (int c = 0; c < width; c++) to[c] = scale * from[c];
    }
}

// Each distinct index is one thread's: it adds its rows in the order given.
void cpu_scatter_add_rows(struct device *dev, void *table, enum dtype table_dt, const void *y,
                          const int32_t *order, const struct gather_args *args)
{
    if (!cpu_is_f32(dev, "scatter_add_rows", args->dt)) return;
    if (!cpu_is_f32(dev, "scatter_add_rows", table_dt)) return;
    const int32_t *index = args->index;
    const int n = args->n, width = args->width;
#pragma omp parallel for schedule(dynamic, 64) if ((int64_t)n * width > PARALLEL_WORK)
    for (int start = 0; start < n; start++) {
        int row = index[order[start]];
        if (start > 0 && index[order[start - 1]] == row) continue;
        const int64_t at = place_of(row, args->first, args->rows);
        if (at < 0) continue;
        float *to = (float *)table + at * width;
        for (int i = start; i < n && index[order[i]] == row; i++)
            add_scaled(to, args->scale, (const float *)y + (int64_t)order[i] * width, width);
    }
}

void cpu_add(struct device *dev, void *y, const void *x, int64_t n, float scale, enum dtype dt)
{
    if (!cpu_is_f32(dev, "add", dt)) return;
    float *to = y;
    const float *from = x;
#pragma omp parallel for simd if (n > PARALLEL_WORK)
    for (int64_t i = 0; i < n; i++) to[i] = fma_f32(scale, from[i], to[i]);
}

void cpu_multiply(struct device *dev, void *x, const float *factor, int64_t n, enum dtype dt)
{
    if (!cpu_is_f32(dev, "multiply", dt)) return;
    float *to = x;
    const float by = factor[0];
#pragma omp parallel for simd if (n > PARALLEL_WORK)
    for (int64_t i = 0; i < n; i++) to[i] *= by;
}

void cpu_add_bias(float *y, const float *bias, int rows, int cols)
{
#pragma omp parallel for if ((int64_t)rows * cols > PARALLEL_WORK)
    for (int r = 0; r < rows; r++) add_scaled(y + (int64_t)r * cols, 1, bias, cols);
}

void cpu_experts_bias(struct device *dev, void *y, const void *bias, const int32_t *offsets,
                      const struct expert_rows *s)
{
    if (!cpu_is_f32(dev, "experts_bias", s->dt)) return;
    for (int64_t e = 0; e < s->n_experts; e++)
        cpu_add_bias((float *)y + (int64_t)offsets[e] * s->width,
                     (const float *)bias + e * s->width, offsets[e + 1] - offsets[e], s->width);
}

// Threads own columns, so that each sum runs over the rows in order whatever the number of threads.
static void add_columns(float *out, const float *x, int rows, int cols)
{
    enum { CHUNK = 64 };
#pragma omp parallel for if ((int64_t)rows * cols > PARALLEL_WORK)
    for (int start = 0; start < cols; start += CHUNK) {
        int width = cols - start < CHUNK ? cols - start : CHUNK;
        float sum[CHUNK] = {0};
        for (int r = 0; r < rows; r++) {
            const float *from = x + (int64_t)r * cols + start;
#pragma omp simd
            for (int c = 0; c < width; c++) sum[c] += from[c];
        }
        for (int c = 0; c < width; c++) out[start + c] += sum[c];
    }
}

void cpu_column_sum(struct device *dev, float *out, const void *x, const int32_t *offsets,
                    const struct expert_rows *s)
{
    if (!cpu_is_f32(dev, "column_sum", s->dt)) return;
    if (!offsets) add_columns(out, x, s->rows, s->width);
    for (int64_t e = 0; offsets && e < s->n_experts; e++)
        add_columns(out + e * s->width, (const float *)x + (int64_t)offsets[e] * s->width,
                    offsets[e + 1] - offsets[e], s->width);
}

void cpu_convert(struct device *dev, void *y, enum dtype y_dt, const void *x, enum dtype x_dt,
                 int64_t n)
{
    if (!convert_takes(dev, y_dt, x_dt)) return;
#pragma omp parallel for if (n > PARALLEL_WORK)
    for (int64_t i = 0; i < n; i++) set_number(y, y_dt, i, number_at(x, x_dt, i));
}

static int8_t row_scale(const void *w, int64_t at, int cols, enum dtype w_dt)
{
    float largest = 0;
    bool has_nan = false;
    for (int64_t c = 0; c < cols; c++) {
        const float x = fabsf(number_at(w, w_dt, at + c));
        if (x > largest) largest = x;
        has_nan |= isnan(x);
    }
    return has_nan ? E4M3_SCALE_NAN : e4m3_scale(largest);
}

static void round_row(uint8_t *codes, const void *w, enum dtype dt, int64_t at, int n, int8_t scale)
{
    for (int64_t c = 0; c < n; c++)
        codes[e4m3_place(c, n)] = e4m3_code(number_at(w, dt, at + c), scale);
}

void cpu_quantise(struct device *dev, uint8_t *codes, int8_t *scales, const void *w, int64_t rows,
                  int cols, enum dtype w_dt, const int8_t *of_ranks, int n_ranks)
{
    (void)dev;
#pragma omp parallel for if (rows * cols > PARALLEL_WORK)
    for (int64_t r = 0; r < rows; r++) {
        int8_t scale = of_ranks ? of_ranks[r] : row_scale(w, r * cols, cols, w_dt);
        for (int i = 1; i < n_ranks; i++)
            if (of_ranks[i * rows + r] > scale) scale = of_ranks[i * rows + r];
        scales[r] = scale;
        if (codes) round_row(codes + r * cols, w, w_dt, r * cols, cols, scale);
    }
}

int8_t cpu_quantise_row(uint8_t *codes, const float *x, int n)
{
    const int8_t scale = row_scale(x, 0, n, DT_F32);
    round_row(codes, x, DT_F32, 0, n, scale);
    return scale;
}

void cpu_round_row(float *x, int64_t n, enum gradient_dtype dt)
{
    const int8_t scale = gradient_scale(row_scale(x, 0, (int)n, DT_F32), dt);
    const float up = e4m3_factor(scale), down = power_of_two(-scale);
    for (int64_t c = 0; c < n; c++)
        x[c] = f32_from_gradient(gradient_code(x[c] * down, dt), dt) * up;
}

// ---- rotation ----------------------------------------------------------------------------------

// Rotary position embedding, in place, from a table of cosines and sines, and storing keys and
// values into the block pool.
// The pairs lie `step` floats apart, the two of a pair `apart`.
VEC_INLINE void rotate(float *x, const float *angle, int half, float sign, int step, int apart)
{
#pragma omp simd
    for (int i = 0; i < half; i++) {
        float c = angle[2 * i], s = sign * angle[2 * i + 1];
        float a = x[i * step], b = x[i * step + apart];
        x[i * step] = fma_f32(a, c, -(b * s));
        x[i * step + apart] = fma_f32(b, c, a * s);
    }
}

// The heads of a row's keys, or of its values, into a slot of the pool.
static void store_heads(const struct rope_args *a, int64_t slot, const float *from, bool values)
{
    const struct kv_view *kv = a->kv;
    const struct kv_layer *layer = &kv->layers[a->layer];
    const int dim = a->head_dim, n = a->n_kv_heads, size = kv->block_size;
    const int64_t at = layer->offset + slot * layer->width;
    void *pool = values ? kv->v : kv->k;
    if (kv->dt != DT_E4M3) memcpy((float *)pool + at, from, (size_t)n * dim * sizeof *from);
    for (int h = 0; h < n && kv->dt == DT_E4M3; h++) {
        const int64_t scale = kv_scale_at(slot / size, (int)(slot % size), size, n, h, values);
        kv->scales[layer->scales + scale] =
            cpu_quantise_row((uint8_t *)pool + at + h * dim, from + (int64_t)h * dim, dim);
    }
}

void cpu_rope(struct device *dev, void *qkv, const struct rope_args *args)
{
    if (!cpu_is_f32(dev, "rope", args->dt)) return;
    const int half = args->rot_dim / 2, dim = args->head_dim;
    const int behind = args->n_heads + args->n_kv_heads; // of which the values lie; latent: none
#pragma omp parallel for if (args->rows * args->stride > PARALLEL_WORK)
    for (int r = 0; r < args->rows; r++) {
        float *row = (float *)qkv + r * args->stride;
        const float *angle =
            args->table ? args->table + (int64_t)args->positions[r] * half * 2 : NULL;
        for (int h = 0; h < args->n; h++) {
            float *head = row + (int64_t)h * dim;
            if (angle && args->interleaved)
                rotate(head, angle, half, args->sign, 2, 1);
            else if (angle)
                rotate(head, angle, half, args->sign, 1, half);
            if (args->rounds) cpu_round_row(head, dim, GRADIENT_E4M3);
        }
        if (!args->kv || args->slots[r] < 0) continue;
        store_heads(args, args->slots[r], row + (int64_t)args->n_heads * dim, false);
        if ((int64_t)behind * dim < args->stride)
            store_heads(args, args->slots[r], row + (int64_t)behind * dim, true);
    }
}

// ---- random numbers ----------------------------------------------------------------------------

// For weights that no file has.
void cpu_random_normal(struct device *dev, void *x, int64_t n, float scale, uint64_t seed,
                       uint64_t stream, enum dtype dt)
{
    (void)dev;
#pragma omp parallel for
    for (int64_t begin = 0; begin < n; begin += RANDOM_CHUNK) {
        const int64_t end = begin + RANDOM_CHUNK < n ? begin + RANDOM_CHUNK : n;
        struct rng r;
        rng_init(&r, seed, stream + (uint64_t)(begin / RANDOM_CHUNK));
        for (int64_t i = begin; i < end; i++) set_number(x, dt, i, scale * rng_normal(&r));
    }
}

// ---- single logits -----------------------------------------------------------------------------

// Penalties and biases, before a token is sampled, and their way back. Only the tokens that a row
// lists are touched, so that a vocabulary costs nothing.
static float adjusted(float z, const struct logit_row *row, const struct logit_entry *entry)
{
    z += entry->bias;
    if (entry->seen) z = z > 0 ? z / row->repetition : z * row->repetition;
    z -= row->frequency * (float)entry->count;
    if (entry->count > 0) z -= row->presence;
    return z;
}

void cpu_mask_logits(struct device *dev, float *logits, const int32_t *row, const uint32_t *masks,
                     int n, int vocab)
{
    (void)dev;
#pragma omp parallel for
    for (int i = 0; i < n; i++) {
        float *z = logits + (int64_t)(row ? row[i] : i) * vocab;
        const uint32_t *mask = masks + (int64_t)i * MASK_WORDS(vocab);
        for (int t = 0; t < vocab; t++)
            if (!(mask[t / 32] >> t % 32 & 1)) z[t] = MIN_LOGIT;
    }
}

void cpu_adjust_logits(struct device *dev, float *logits, float *saved,
                       const struct logit_row *rows, const struct logit_entry *entries, int n,
                       int vocab, bool undo)
{
    for (int i = 0; i < n; i++) {
        float *row = logits + (int64_t)rows[i].row * vocab;
        for (int e = rows[i].first; e < rows[i].first + rows[i].n; e++) {
            const int32_t token = entries[e].token;
            if (token < 0 || token >= vocab) {
                device_fail(dev, "adjust_logits: token %d is outside the vocabulary of %d", token,
                            vocab);
                return;
            }
            if (undo) {
                row[token] = saved[e];
            } else {
                saved[e] = row[token];
                row[token] = adjusted(row[token], &rows[i], &entries[e]);
            }
        }
    }
}
