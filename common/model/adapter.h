/* adapter.h: a LoRA adapter as an arena of its own: a plan of its A and B tensors (weights.h),
 * which is bound, shared, trained and saved as a model's is, and PEFT's folder to read and to
 * write. One thread at a time. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_MODEL_ADAPTER_H
#define COMMON_MODEL_ADAPTER_H

#include "common/model/weights.h"
#include "kernels/ops.h"
#include <jansson.h>

// ---- adapter config -----------------------------------------------------------------------------
// Which matrices a LoRA adapter (Hu et al. 2021) changes, with what rank and scale: PEFT's
// adapter_config.json. What would compute something else (DoRA, biases, modules_to_save, trained
// embeddings, ...) is refused by name. Plain data once made; any thread.

#define ADAPTER_CONFIG_FILE "adapter_config.json"
#define ADAPTER_MAX_RANK    1024

struct adapter_config {
    int r;
    double alpha, dropout;
    bool rslora;    // scale is alpha / sqrt(r) (Kalajdzievski 2023) instead of alpha / r
    bool ties;      // ensure_weight_tying: the adapter of one of tied matrices is the other's too
    json_t *source; // the parsed file, for writing it again
};

enum status adapter_config_load(const char *folder, struct adapter_config **ret);
// The same from parsed JSON; `where` names it in errors. Keeps a reference to `json`.
enum status adapter_config_from_json(const char *where, json_t *json, struct adapter_config **ret);
// The JSON of a new one. targets: "all-linear", or modules separated by commas ("q_proj,v_proj").
enum status adapter_config_json(int r, double alpha, double dropout, bool rslora,
                                const char *targets, json_t **ret);
void adapter_config_free(struct adapter_config *config);

// What is done to a module ("model.layers.0.self_attn.q_proj"): *ret_rank 0: nothing. is_head: it
// is the output's matrix, which all-linear leaves alone.
enum status adapter_config_match(const struct adapter_config *config, const char *module,
                                 bool is_head, int *ret_rank, float *ret_scale);

// ---- adapter ------------------------------------------------------------------------------------
// A matrix of the base that is adapted: W + scale * B A.
struct adapted {
    enum tensor_role role; // adapter_role(); of its block in the base's arena,
    int layer, part;       // and which of the block's parts it is
    int base;              // tensor of the base
    int a, b;              // tensors of the adapter: (rank, columns of W), (rows of W, rank)
    int rank;
    float scale;
};
struct adapter {
    struct adapter_config *config;
    const struct weights *base; // borrowed; need not be bound
    struct weights *weights;    // the arena's plan; not bound
    struct adapted *list;       // (n) in the order of adapter_nth()
    int n, max_rank;
};

// Whose product in the forward pass an adapter of that tensor of the base changes: a matrix of
// attention, of a plain MLP, or the head. Embeddings that are the head too: the head's, as in PEFT;
// the look-up stays. ROLE_COUNT: nobody's, it cannot be adapted.
enum tensor_role adapter_role(const struct weights *base, int tensor);
// The name of that tensor's module ("model.layers.0.mlp.up_proj").
void adapter_module(const struct weights *base, int tensor, char *ret, size_t size);
// The tensors of the base in the order in which they are adapted: the layers', then the head's.
int adapter_nth(const struct weights *base, int i);

// Takes `config`, also on failure. ST_INVALID where it names no matrix of the base that can be
// adapted.
enum status adapter_new(struct adapter_config *config, const struct weights *base, enum dtype dt,
                        struct adapter **ret);
void adapter_free(struct adapter *a); // the plan, not the memory
bool adapter_changes(const struct adapter *a, enum tensor_role role);
// Of one base: whether both change the same matrices with the same ranks and scales.
bool adapter_same(const struct adapter *a, const struct adapter *b);

// Fills bound memory from a PEFT folder. A tensor that is missing, or one more, is an error;
// nothing was written then.
enum status adapter_load(const struct adapter *a, struct device *dev, const char *folder);
// The same checks alone: what passes, adapter_load() takes. Also that its config is this one's.
enum status adapter_check(const struct adapter *a, const char *folder);
// A new adapter, which changes nothing yet: A uniform as in PEFT (Kaiming, a = sqrt(5)), B zero.
enum status adapter_init(const struct adapter *a, struct device *dev, uint64_t seed);
// Writes both files of a PEFT folder, which must exist.
enum status adapter_save(const struct adapter *a, struct device *dev, const char *folder,
                         enum dtype as);
// What it is trained on, as JSON ("folder", "version", "updates", "checksum"), which its folder
// records in ADAPTER_STATE_FILE under ADAPTER_BASE: the folder that the base's weights were last
// exactly those of, the server's weight version (0: no server), updates since the folder, and
// dtype, shards and the (n) sums of all weights in one. New reference; NULL: no memory.
#define ADAPTER_STATE_FILE "trainer/trainer_state.json"
#define ADAPTER_BASE       "base"
json_t *adapter_base(const char *folder, uint64_t version, uint64_t updates, enum dtype dt,
                     int shards, const uint64_t *sums, size_t n);
// Of bound weights that are exactly a folder's.
enum status adapter_base_of(const struct weights *w, struct device *dev, const char *folder,
                            json_t **ret);
// ST_MISMATCH: the adapter in `folder` records another base. Checksums decide; of other dtypes or
// shards one folder, which nobody trained since.
enum status adapter_base_check(const char *folder, const json_t *base);

// Adds scale * B A to every adapted matrix of `w`, which has the base's plan and is bound, as the
// adapter is. ST_UNSUPPORTED where that would change the embeddings with the head. Waits.
enum status adapter_merge(const struct adapter *a, const struct weights *w, struct device *dev);

// ---- the adapters of a forward pass -------------------------------------------------------------
// Those that a model's forward pass can compute with, in device memory: for every adapted block of
// every layer whose factors are where. A batch's rows name them by index (struct batch_seq), so
// that one batch has rows of several, and of none.

struct adapter_table;

// Room for max_adapters of ranks up to max_rank. base is borrowed, and need not be bound.
enum status adapter_table_new(struct device *dev, const struct weights *base, int max_adapters,
                              int max_rank, struct adapter_table **ret);
void adapter_table_free(struct adapter_table *t);
// Makes index `at` that adapter, which is bound and borrowed; NULL: nobody's. Waits.
enum status adapter_table_set(struct adapter_table *t, int at, const struct adapter *a);

// A digest of which blocks any of the adapters changes, 0 where there is none. A step captured with
// the table computes with what it holds at the time of a launch, but for the blocks that have no
// operation in it: it holds for tables of the same digest.
uint64_t adapter_table_sites(const struct adapter_table *t);

// Of the calls from now on; its matrix is each block's own. p 0: none, as in a new table.
void adapter_table_drop(struct adapter_table *t, const struct lora_dropout *dropout);
// The call for `rows` rows of a layer's block; false where no adapter changes it.
bool adapter_table_args(const struct adapter_table *t, enum tensor_role role, int layer, int rows,
                        const int32_t *adapter, struct lora_args *ret);

// Where the gradients of an adapter's factors for that block lie: grads is the plan of its arena in
// f32, bound. NULL pointers for parts that it leaves alone.
void adapter_grads(const struct adapter *a, const struct weights *grads, enum tensor_role role,
                   int layer, struct lora_grads ret[LORA_PARTS]);

#endif
