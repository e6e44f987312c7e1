/* weights.h: where every tensor of a model lies in one allocation (the arena).
 *
 * A plan is made from the config alone, so server and trainer compute the same one and compare its
 * hash. Offsets are multiples of 128 elements, whatever the dtype (256 bytes in bf16), so that the
 * i-th element of the weights, of the gradients, of both moments and of the 16-bit residual belong
 * together and the optimizer is one pass over one range. Fused blocks (qkv, gate_up) lie together;
 * each Hugging Face tensor is a plain row range of its block. The last 256 bytes of the arena are
 * the canary (bridge/bridge_file.h): never a weight.
 *
 * With quantization (dtype.h) there are two copies of the layers' matrices: behind the tensors the
 * arena has their *twin* in e4m3, which is what is multiplied (weights_matrix()), while what is
 * trained, saved and loaded are the tensors. The twin is a function of the tensors as they are, row
 * by row (ops.h, quantise), and nothing else: whoever has written tensors makes it anew
 * (weights_quantise()) within the same update, so that the arena's one version fences both, and
 * neither checkpoints nor snapshots need to hold it. Where nobody trains (config.h, twin_alone),
 * the arena holds these matrices in the twin alone: loading rounds them, some rows at a time.
 *
 * A shard's arena (config.h) is laid out alike, from the shard's own sizes; a tensor is then a
 * slice of the Hugging Face tensor of that name. Its table lists what other ranks hold alone, too:
 * with no rows. Its twin's codes are those of a whole model's: ranks that have parts of a row take
 * the largest of their scales.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_MODEL_WEIGHTS_H
#define COMMON_MODEL_WEIGHTS_H

#include "common/model/config.h"
#include "common/model/family.h"
#include "kernels/device.h"

// Where a tensor of the table lies in one of the folder's that holds several (family.h): its
// element (row, col) is that one's first + row * row_step + col * col_step, and its row is that
// one's first_row + row * row_step, counted over all experts.
struct stored_in {
    char name[160];
    int n_dims; // 0: the folder has the tensor as it is
    int64_t shape[3];
    int64_t first, first_row, row_step, col_step;
};
struct weight_tensor {
    char name[160];        // Hugging Face name
    enum tensor_role role; // ROLE_COUNT: none (weights_plan_list)
    int layer;             // 0 outside of layers
    int n_dims;
    int64_t shape[2]; // of what is held: the slice
    int64_t n;        // elements
    int64_t offset;   // elements from the arena's start
    int in_twin;      // > 0: it has no offset, and is tensor in_twin - 1 of a twin that is alone
    struct tensor_slice slice; // of the Hugging Face tensor
    struct stored_in stored;   // of the whole tensor
    bool in_parts;  // of rows that several ranks hold each computes a part of the gradient
    bool is_buffer; // f32 in an arena of any dtype, behind n_elements: nothing trains it
};
// Columns of what is held, and of the whole tensor, whose elements are.
static inline int64_t tensor_columns(const struct weight_tensor *t)
{
    return t->n_dims == 2 ? t->shape[1] : 1;
}
static inline int64_t tensor_whole_columns(const struct weight_tensor *t)
{
    return t->n_dims == 2 ? t->slice.whole[1] : 1;
}
static inline int64_t tensor_whole_elements(const struct weight_tensor *t)
{
    return t->slice.whole[0] * tensor_whole_columns(t);
}

struct layer_weights {
    void *at[ROLE_COUNT]; // where the layer's block of each role (weights.c) is; NULL: it has none
};

struct weights {
    const struct model_config *config; // borrowed
    enum dtype dt;
    int64_t n_elements;   // of the range the optimizer walks: tensors and padding between them
    int64_t n_parameters; // of the tensors, buffers included
    size_t bytes;         // of the arena: n_elements * dtype_size + canary, rounded up
    size_t canary_offset; // bytes
    // Of the same config in DT_E4M3, within this arena from twin_offset (bytes) on; the scales of a
    // block's rows lie behind its codes. NULL: there is none.
    struct weights *twin;
    size_t twin_offset;
    size_t room_offset; // of a twin that is alone, behind it: room for room_n elements on their way
    int64_t room_n;
    int n_in_twin; // tensors that lie there
    int n_tensors;
    int n_held; // of these: of others there is nothing in this shard (expert_parallel)
    struct weight_tensor *tensors; // in arena order
    void *base;                    // device memory; NULL until bound
    struct device *owner;          // of memory that weights_alloc() took; else NULL
    void *at[ROLE_COUNT]; // the model's own blocks; the head's is the embeddings' where tied
    struct layer_weights *layers; // (n_layers)
    // Of weights_load() from a folder in FP8: matrices whose scales are no powers of two, which the
    // twin therefore rounds once more, and the most that this changed of one (fp8_rounding()).
    int n_rounded;
    double rounding;
    // Borrowed: ranks that hold the other shards, and save and make the twin with this one. NULL:
    // none do.
    struct comm *comm;
};
#define WEIGHTS_CANARY_BYTES 256

enum status weights_plan(const struct model_config *config, enum dtype dt, struct weights **ret);
// The same for tensors that are no model's (an adapter's): names, dimensions and layers are given,
// and of a shard's slices and in_parts; n and offset are filled in; each is a block of its own, and
// none has a pointer. Takes `tensors`, which is from malloc(), also on failure.
enum status weights_plan_list(const struct model_config *config, enum dtype dt,
                              struct weight_tensor *tensors, int n, struct weights **ret);
// The same tensors at the same elements in another dtype, not bound and without a twin.
enum status weights_plan_like(const struct weights *w, enum dtype dt, struct weights **ret);
void weights_bind(struct weights *w, void *base); // sets base and all pointers; borrows the memory
// Of a layer that predicts further tokens (config.h, mtp), which has none of its own: embeddings
// and head are that model's. Once both are bound.
void weights_share_ends(struct weights *w, const struct weights *of);
// weights_bind() to memory of their own on the device, all zeros, which weights_free() releases.
enum status weights_alloc(struct weights *w, struct device *dev);
// weights_bind() for the blocks of elements first to first + n alone, which lie at `at`; base, and
// the pointers of other blocks (NULL in a new plan), stay as they are.
void weights_bind_range(struct weights *w, int64_t first, int64_t n, void *at);
// Of a tensor in the arena.
static inline enum dtype weights_tensor_dtype(const struct weights *w,
                                              const struct weight_tensor *t)
{
    return t->is_buffer ? DT_F32 : w->dt;
}
// Where a tensor lies within the arena, bytes; of one in the twin alone its codes. In MXFP4 these
// are DT_U8 of two numbers each.
struct weight_place {
    size_t offset, bytes;
    enum dtype dt;
};
struct weight_place weights_place(const struct weights *w, const struct weight_tensor *t);
// The matrix of a role that a layer has (of the model's own: layer 0), y = x . w^T + bias, as this
// rank holds it; of experts all. NULL is what there is none of, or what is not bound.
struct weight_matrix {
    void *w, *bias; // (n, k), (n)
    int n, k;
    const int8_t *scales; // of w, which is the twin's (ops.h, struct matmul); NULL: it is of w's dt
    const uint8_t *mx_scales; // likewise, of a twin in MXFP4
    bool rounds;              // the forward pass multiplies it with rows in e4m3
};
struct weight_matrix weights_matrix(const struct weights *w, enum tensor_role role, int layer);
int64_t weights_largest(const struct weights *w);    // elements of a tensor, at most
int64_t weights_parameters(const struct weights *w); // of all shards, each once
// Elements of the twin's largest matrix, of experts all: what is widened at once (ops.h,
// scratch_shape). 0: there is no twin.
int64_t weights_widest(const struct weights *w);
// Where tensor i of the twin has its codes (e4m3.h, mxfp4.h) and their scales, on the device.
void weights_twin_tensor(const struct weights *twin, int i, const uint8_t **ret_codes,
                         const int8_t **ret_scales);
// Enqueues making the twin of the tensors as they are; nothing where there is none. What writes
// tensors below does so itself, but for weights_write() and weights_load_tensors(). All ranks of
// w->comm call it.
void weights_quantise(const struct weights *w, struct device *dev);
// Whether tensor i is the first of its block.
bool weights_begins_block(const struct weights *w, int i);
void weights_free(struct weights *w); // the table, not the memory
const struct weight_tensor *weights_find(const struct weights *w, const char *name);
// Hex digest over config-independent facts: every name, shape, offset, dt, and which shard it is.
void weights_layout_hash(const struct weights *w, char ret[65]);
// ops.checksum of the whole arena, whose gaps are zeros. Waits.
enum status weights_checksum(const struct weights *w, struct device *dev, uint64_t *ret);
// By what an adapter knows what it is of: the same, or where there is a twin, of what is
// multiplied, whether the twin is alone or not. Waits.
enum status weights_base_checksum(const struct weights *w, struct device *dev, uint64_t *ret);

// Reads every tensor of the folder, of a shard its slice, into bound memory, converting dtypes. A
// missing tensor, an extra one, a wrong shape or an unusable dtype is an error naming file and
// tensor; on any such error nothing was written. (lm_head.weight of a tied model may be there and
// is ignored.)
// The ranks of w->comm call it together where there is a twin, and none makes it unless all have
// loaded.
enum status weights_load(struct weights *w, struct device *dev, const char *folder);
// The same without making the twin.
enum status weights_load_tensors(struct weights *w, struct device *dev, const char *folder);
// For logs: what became of a folder whose matrices are quantised. False: they are not.
bool weights_describe_stored(const struct weights *w, char *ret, size_t size);
// Whether the tensors are all in an open set, with their shapes (others are not looked at), and
// then their values, without making the twin. `where` names the set in errors.
struct safetensors;
enum status weights_load_set(struct weights *w, struct device *dev, const struct safetensors *set,
                             const char *where);
enum status weights_check_set(const struct weights *w, const struct safetensors *set,
                              const char *where);
// The same checks without reading the values: what passes, weights_load() takes. For those who must
// know before they begin to write. `w` need not be bound.
enum status weights_check(const struct weights *w, const char *folder);
// One tensor's values, f32 in host memory, whatever the arena's dtype; none of the twin alone. Both
// wait.
enum status weights_read(const struct weights *w, struct device *dev, int tensor, float *ret);
enum status weights_write(const struct weights *w, struct device *dev, int tensor, const float *x);
// Normal(0, 0.02) matrices, ones in norms, zeros in biases: a fresh model (sft --init, benchmarks).
enum status weights_init_random(struct weights *w, struct device *dev, uint64_t seed);

// ---- saving -------------------------------------------------------------------------------------
// Writes folder/model.safetensors in the family's own names, as dt `as`. Of a shard rank 0 writes
// whole tensors, while the others give it their parts.
enum status weights_save_part(const struct weights *w, struct device *dev);
enum status weights_save(const struct weights *w, struct device *dev, const char *folder,
                         enum dtype as);
// The same with the twin's numbers in place of the matrices that it is of: F8_E4M3 codes and an F32
// scale for each row, the form of fp8_config_new(). ST_UNSUPPORTED of a shard, and where a family's
// folders have all experts in one tensor.
enum status weights_save_twin(const struct weights *w, struct device *dev, const char *folder,
                              enum dtype as);
// As weights_save(), into a file of that folder with another name.
enum status weights_save_as(const struct weights *w, struct device *dev, const char *folder,
                            const char *name, enum dtype as);

// Whole Hugging Face tensors out of the slices that ranks hold, for checkpoints, and a rank's slice
// out of a whole tensor. Host memory.
struct shard_join; // NULL: one rank holds all

// comm: the ranks that hold the shards of w's model; NULL gives NULL. Both are borrowed.
enum status shard_join_new(const struct weights *w, struct device *dev, struct comm *comm,
                           struct shard_join **ret);
void shard_join_free(struct shard_join *j);
// Tensor i of all ranks into rank 0's `whole` (others give NULL), entries of `element` bytes; every
// rank calls it for the same tensors. Waits.
enum status shard_join_tensor(struct shard_join *j, int i, const void *own, size_t element,
                              void *whole);

// What is held of a whole tensor.
void shard_take(const struct weight_tensor *t, const void *whole, size_t element, void *ret_own);

// An f32 for each block of so many elements of the arena, as the scales of 8-bit moments are. Where
// ranks cut a tensor between such blocks, a shard's are blocks of the whole model's, too; elsewhere
// what they hold together has one for each element.
bool shard_cuts_between(const struct weights *w, int i, int64_t block);
// Those that a whole model's tensor i has elements in.
int64_t shard_whole_blocks(const struct weights *w, int i, int64_t block);
// As shard_join_tensor(). own: of the blocks that the tensor has elements in, with room for one for
// each element, which is then there.
enum status shard_join_blocks(struct shard_join *j, int i, int64_t block, float *own, float *whole);
// 8-bit moments (kernels/moments.h) of all blocks that tensor i has elements in: codes, and what is
// first the scale of each element, then of each block. The file has one for each block, or (each)
// element. `last`: the last block of the tensor before, with which the first may begin; then this
// one's. Codes of a block with several scales are rounded anew, which it notes.
struct moment_block {
    uint8_t codes[128];
    float scale;
    bool rounded; // this one or one before
};
void shard_take_moments(const struct weights *w, int i, const void *codes, const void *scales,
                        bool each, bool squares, struct moment_block *last, uint8_t *ret_codes,
                        float *ret_scales);

// ---- what weights.c and weights_files.c share ---------------------------------------------------

#define STAGING_ELEMENTS ((int64_t)4 << 20)

void *weights_address(const struct weights *w, int64_t element); // on the device
// n elements of the host's memory; f32, f16 or bf16 into f32 or bf16.
void weights_convert(void *to, enum dtype to_dt, const void *from, enum dtype from_dt, int64_t n);
// n elements of type `dt` to element `at` of tensor t on; `staging`, of STAGING_ELEMENTS, is used
// where the arena has another type.
void weights_copy_in(const struct weights *w, struct device *dev, const struct weight_tensor *t,
                     int64_t at, const void *data, enum dtype dt, int64_t n, void *staging);

#endif
