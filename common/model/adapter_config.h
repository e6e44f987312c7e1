/* adapter_config.h: which matrices a LoRA adapter (Hu et al. 2021) changes, with what rank and
 * scale: PEFT's adapter_config.json. What would compute something else (DoRA, biases,
 * modules_to_save, trained embeddings, ...) is refused by name. Plain data once made; any thread.
 */
#ifndef COMMON_MODEL_ADAPTER_CONFIG_H
#define COMMON_MODEL_ADAPTER_CONFIG_H

#include "common/base/status.h"
#include <jansson.h>
#include <stdbool.h>

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

#endif
