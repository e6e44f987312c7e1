/* fuzz_adapter_config.c: any text as an adapter_config.json: refused, or one that says of every
 * module what is done to it. (adapter_model.safetensors is fuzz_safetensors.c's.) */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "common/model/adapter.h"
#include <math.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const modules[] = {
        "model.layers.0.self_attn.q_proj", "model.layers.11.mlp.down_proj",
        "model.layers.1.mlp.gate_up_proj", "model.layers.3.mlp.shared_expert.up_proj"};
    json_t *json = NULL;
    struct adapter_config *config = NULL;
    if (json_parse("fuzz", (const char *)data, size, &json) == ST_OK &&
        adapter_config_from_json("fuzz", json, &config) == ST_OK)
        for (size_t i = 0; i < sizeof modules / sizeof *modules; i++) {
            int rank = -1;
            float scale = NAN;
            if (adapter_config_match(config, modules[i], i == 0, &rank, &scale) != ST_OK) continue;
            if (rank < 0 || rank > ADAPTER_MAX_RANK || (rank > 0 && !isfinite(scale))) abort();
        }
    adapter_config_free(config);
    json_decref(json);
    return 0;
}
