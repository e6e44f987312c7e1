/* fuzz_config.c: any text as a config.json: refused, or a config whose tables can be made. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "common/model/weights.h"
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    json_t *json = NULL;
    struct model_config *config = NULL;
    struct weights *weights = NULL;
    if (json_parse("fuzz", (const char *)data, size, &json) == ST_OK &&
        model_config_from_json("fuzz", json, &config) == ST_OK && config->n_layers <= 64) {
        free(rope_table(config, 0, 4));
        if (weights_plan(config, DT_F32, &weights) == ST_OK && weights->n_parameters <= 0) abort();
    }
    weights_free(weights);
    model_config_free(config);
    json_decref(json);
    return 0;
}
