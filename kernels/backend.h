/* backend.h: what a backend gives to kernels/device.c. Private to kernels/. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_BACKEND_H
#define KERNELS_BACKEND_H

#include "kernels/device.h"
#include "kernels/ops.h"
#include "kernels/variants.h"
#include <math.h>

#ifdef __cplusplus
extern "C" {
#endif

// To the device, from it, or on it.
enum copy_way { COPY_IN, COPY_OUT, COPY_WITHIN };

// Every field mirrors the function of device.h of that name; see there for what it must do. NULL,
// from capture_begin to graph_free, mark, wait, copy_in_beside and call_beside: nothing is
// captured, and calls are done when they return.
struct backend {
    enum device_kind kind;
    const char *shared_kind;
    const struct ops *ops;
    enum status (*open)(int index, struct device *dev); // fills dev->state, name, uuid
    void (*close)(struct device *dev);
    enum status (*alloc)(struct device *dev, size_t bytes, void **ret);
    void (*release)(struct device *dev, void *memory);
    enum status (*memory)(struct device *dev, size_t *ret_free, size_t *ret_total);
    enum status (*reserve)(struct device *dev, size_t bytes);
    enum status (*host_alloc)(struct device *dev, size_t bytes, void **ret);
    void (*host_release)(struct device *dev, void *memory);
    void (*copy)(struct device *dev, void *to, const void *from, size_t bytes, enum copy_way way);
    void (*copy_2d)(struct device *dev, void *to, size_t to_pitch, const void *from,
                    size_t from_pitch, size_t width, size_t rows);
    void (*fill)(struct device *dev, void *to, unsigned char value, size_t bytes);
    enum status (*sync)(struct device *dev);
    enum status (*shared_create)(struct device *dev, const char *name,
                                 struct shared_memory *memory);
    enum status (*shared_open)(struct device *dev, struct shared_memory *memory);
    void (*shared_close)(struct shared_memory *memory);
    bool (*capture_begin)(struct device *dev);
    enum status (*capture_end)(struct device *dev, struct device_graph **ret);
    void (*graph_launch)(struct device *dev, struct device_graph *graph);
    void (*graph_free)(struct device_graph *graph);
    void (*timer_start)(struct device *dev);
    double (*timer_stop)(struct device *dev);
    void (*mark)(struct device *dev, int mark);
    enum status (*wait)(struct device *dev, int mark);
    void (*copy_in_beside)(struct device *dev, void *to, const void *host, size_t bytes);
    void (*call_beside)(struct device *dev, void (*call)(void *), void *context);
};

struct device_block {
    void *memory;
    size_t bytes;
};

struct device {
    const struct backend *backend;
    int index;
    bool bf16_is_exact, has_e4m3; // set by open
    char spec[16], name[96], uuid[48];
    enum status failed; // first failure of an enqueued operation since the last sync
    char failure[512];
    const char *comm_failure; // sentence of a failed communicator (comm.c), any thread's: __atomic
    struct device_block *blocks; // of device_alloc, n_blocks of max_blocks
    int n_blocks, max_blocks;
    size_t allocated, allocated_peak;
    const struct op_variant *taken[N_OPS]; // by the last call of each operation that has several
    void *state;                           // the backend's own
};

struct shared_memory {
    struct device *dev;
    void *data;
    size_t bytes;
    char handle[160];
    bool maker;
    int lock_fd; // of POSIX shared memory's maker: its sign of life (shared.c)
};

extern const struct backend backend_cpu;
#if CW_CUDA
extern const struct backend backend_cuda; // open() fails with ST_NOT_FOUND where there is no GPU
#endif

// Adds to (or takes from) what device_allocated() tells. Scratch that a backend takes for its
// operations is counted by itself, device_alloc's memory by device.c.
void device_count(struct device *dev, int64_t bytes);

// Launches the first row that takes the call. The last one always does.
void op_take_variant(struct device *dev, const struct op_variants *, const void *call);

// Records the first failure of an enqueued operation.
void device_fail(struct device *dev, const char *format, ...) __attribute__((format(printf, 2, 3)));

// ---- whether an operation takes a call, on any backend; else that is recorded ------------------

static inline bool delta_takes(struct device *dev, const struct batch_view *batch)
{
    if (batch->depth > 1)
        device_fail(dev, "delta_rule: trees %d deep; a packed batch's may be 1", batch->depth);
    return batch->depth <= 1;
}

static inline bool convert_takes(struct device *dev, enum dtype to, enum dtype from)
{
    if ((from == DT_F32 || from == DT_BF16 || from == DT_F16) && (to == DT_F32 || to == DT_BF16))
        return true;
    device_fail(dev, "convert: from %s to %s is not possible", dtype_name(from), dtype_name(to));
    return false;
}

static inline bool adamw_takes(struct device *dev, enum dtype w_dt, const uint16_t *low)
{
    if (low ? w_dt == DT_BF16 : w_dt == DT_F32) return true;
    device_fail(dev, "adamw: weights are f32, or bf16 with their lower halves; these are %s %s",
                dtype_name(w_dt), low ? "with" : "without");
    return false;
}

static inline bool top_logprobs_takes(struct device *dev, int k, int vocab)
{
    if (k >= 0 && k <= vocab && k <= TOP_LOGPROBS_MAX) return true;
    device_fail(dev, "top_logprobs: %d likeliest tokens of %d; at most %d", k, vocab,
                TOP_LOGPROBS_MAX);
    return false;
}

static inline bool distill_takes(struct device *dev, const struct distill_args *a)
{
    if (a->teacher_vocab >= a->vocab) return true;
    device_fail(dev, "distill: a teacher vocabulary of %d, smaller than the student's %d",
                a->teacher_vocab, a->vocab);
    return false;
}

static inline bool sample_takes(struct device *dev, const struct sample_args *a)
{
    if (!a->drafts || a->draft_vocab <= a->vocab) return true;
    device_fail(dev, "sample: a draft vocabulary of %d, larger than the %d of the logits",
                a->draft_vocab, a->vocab);
    return false;
}

// ---- activations, norms and distillation -------------------------------------------------------

// The same with all said of where gate and up lie; up NULL: there is none.
static inline struct act_shape act_laid_out(const void *x, struct act_shape s)
{
    if (s.up) return s;
    s.gate_stride = s.up_stride = (s.gated ? 2 : 1) * (int64_t)s.width;
    if (s.gated) s.up = (const char *)x + (size_t)s.width * dtype_size(s.dt);
    return s;
}

// Where row r's statistics lie (ops.h, norm_shape).
DTYPE_INLINE int norm_place(const struct norm_shape *s, int r)
{
    return s->own_weights ? r % s->heads * (s->rows / s->heads) + r / s->heads : r;
}

// Of one token: what it adds to the divergence, and by how much the divergence grows with the
// token's share in q, but for the mean over q of that. Of beta 0 the gradient needs neither.
struct distilled {
    float value, slope;
};

DTYPE_INLINE struct distilled distil(float beta, float p, float q, float log_p, float log_q)
{
    struct distilled d = {p > 0 ? p * (log_p - log_q) : 0, 0}; // a logit of -inf adds nothing
    if (beta == 0) return d;
    const float other = beta == 1 ? log_p : logf(beta * p + (1 - beta) * q);
    const float of_q = beta == 1 ? 1 : 1 - beta;
    d.slope = q > 0 ? of_q * (log_q - other) : 0;
    d.value = q * d.slope + (beta < 1 && p > 0 ? beta * p * (log_p - other) : 0);
    return d;
}

#ifdef __cplusplus
}
#endif
#endif
