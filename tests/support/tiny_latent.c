/* tiny_latent.c: matrices are large enough that greedy text wanders, and biases that they decide
 * between experts. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tiny_latent.h"
#include "tests/support/loaded.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/model/weights.h"

#include <stdlib.h>

static enum status fill(struct weights *w, struct device *dev)
{
    enum status st = weights_init_random(w, dev, 3);
    for (int t = 0; t < w->n_tensors && st == ST_OK; t++) {
        const struct weight_tensor *tensor = &w->tensors[t];
        float *x = malloc((size_t)tensor->n * sizeof *x);
        if (!x) return status_fail(ST_NO_MEMORY, "no memory for a tiny model");
        st = weights_read(w, dev, t, x);
        for (int64_t i = 0; i < tensor->n; i++)
            x[i] = tensor->is_buffer ? 0.1f * (float)(i % 3 - 1) : 6 * x[i];
        if (st == ST_OK && (tensor->n_dims == 2 || tensor->is_buffer))
            st = weights_write(w, dev, t, x);
        free(x);
    }
    return st;
}

static enum status write_config(const char *folder, int heads, int vocab)
{
    json_t *config = json_pack(
        "{s:[s], s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i,"
        " s:i, s:i, s:i, s:i, s:i, s:s}",
        "architectures", "DeepseekV3ForCausalLM", "model_type", "deepseek_v3", "vocab_size", vocab,
        "hidden_size", 64, "intermediate_size", 96, "num_hidden_layers", 2, "num_attention_heads",
        heads, "num_key_value_heads", heads, "max_position_embeddings", 512, "q_lora_rank", 32,
        "kv_lora_rank", 32, "qk_nope_head_dim", 16, "qk_rope_head_dim", 16, "v_head_dim", 16,
        "first_k_dense_replace", 1, "moe_intermediate_size", 32, "n_routed_experts", 8,
        "num_experts_per_tok", 2, "n_shared_experts", 1, "n_group", 2, "topk_group", 1,
        "num_nextn_predict_layers", 1, "torch_dtype", "float32");
    return tiny_json_write(folder, "config.json", config);
}

// The model's weights, or those of the layer behind it, as a file of that name.
static enum status write_weights(const char *folder, bool mtp, const char *name)
{
    struct device *dev = NULL;
    struct model_config *config = NULL;
    struct weights *w = NULL;
    enum status st;
    CHECK(device_open("cpu", &dev));
    CHECK(model_config_load(folder, &config));
    if (mtp) CHECK(model_config_take_mtp(folder, config));
    CHECK(weights_plan(config, DT_F32, &w));
    CHECK(weights_alloc(w, dev));
    CHECK(fill(w, dev));
    st = weights_save_as(w, dev, folder, name, DT_F32);
out:
    weights_free(w);
    model_config_free(config);
    device_free(dev);
    return st;
}

enum status tiny_latent_write(const char *folder, int heads, int vocab)
{
    const enum status st = write_config(folder, heads, vocab);
    return st == ST_OK ? write_weights(folder, false, "model.safetensors") : st;
}

const char *tiny_mtp_folder(int vocab)
{
    const char *folder = test_folder(), *parts[] = {"model.part", "mtp.part"};
    struct safetensors_source sources[256];
    struct safetensors *sets[2];
    int n = 0;
    assert_ok(write_config(folder, 4, vocab));
    for (int i = 0; i < 2; i++) {
        assert_ok(write_weights(folder, i == 1, parts[i]));
        assert_ok(safetensors_open_file(test_path(folder, parts[i]), &sets[i]));
        n += tensor_sources(sets[i], sources + n);
    }
    tensors_write(folder, sources, n);
    for (int i = 0; i < 2; i++) safetensors_free(sets[i]);
    return folder;
}
