/* family.c: the table of model families. A row names the family's tensors and sets what its
 * config.json leaves unsaid; nothing else in the project asks which family a model is of.
 * Pure data and parsing; any thread. */
#include "common/model/family.h"
#include "common/base/json.h"
#include <string.h>

// Qwen2 and Qwen2.5: Llama's block with biases on q, k and v.
static enum status configure_qwen2(const char *where, const json_t *json, struct model_config *c)
{
    c->qkv_bias = true;
    bool use_window = false;
    int window = 0, full_layers = c->n_layers;
    enum status st = ST_OK;
    CHECK(json_get_bool(where, json, "use_sliding_window", &use_window));
    if (!use_window) goto out;
    CHECK(json_get_int32(where, json, "sliding_window", 1, 1 << 30, &window));
    CHECK(json_get_int32(where, json, "max_window_layers", 0, 1 << 20, &full_layers));
    // layers below max_window_layers see everything, the ones from there on a window
    for (int l = full_layers; l < c->n_layers; l++) c->window[l] = window;
out:
    return st;
}

// Llama 1 to 3.2 and its look-alikes (Yi, DeepSeek-Coder, TinyLlama).
static enum status configure_llama(const char *where, const json_t *json, struct model_config *c)
{
    bool bias = false;
    enum status st = ST_OK;
    CHECK(json_get_bool(where, json, "attention_bias", &bias));
    c->qkv_bias = c->o_bias = bias;
    CHECK(json_get_bool(where, json, "mlp_bias", &c->mlp_bias));
out:
    return st;
}

#define LAYER "model.layers.%d."
#define LLAMA_NAMES                                                                                \
    {                                                                                              \
        [ROLE_EMBED] = "model.embed_tokens.weight",                                                \
        [ROLE_ATTN_NORM] = LAYER "input_layernorm.weight",                                         \
        [ROLE_QKV] = LAYER "self_attn.q_proj.weight|" LAYER "self_attn.k_proj.weight|" LAYER       \
                           "self_attn.v_proj.weight",                                              \
        [ROLE_QKV_BIAS] = LAYER "self_attn.q_proj.bias|" LAYER "self_attn.k_proj.bias|" LAYER      \
                                "self_attn.v_proj.bias",                                           \
        [ROLE_O] = LAYER "self_attn.o_proj.weight",                                                \
        [ROLE_O_BIAS] = LAYER "self_attn.o_proj.bias",                                             \
        [ROLE_MLP_NORM] = LAYER "post_attention_layernorm.weight",                                 \
        [ROLE_GATE_UP] = LAYER "mlp.gate_proj.weight|" LAYER "mlp.up_proj.weight",                 \
        [ROLE_GATE_UP_BIAS] = LAYER "mlp.gate_proj.bias|" LAYER "mlp.up_proj.bias",                \
        [ROLE_DOWN] = LAYER "mlp.down_proj.weight", [ROLE_DOWN_BIAS] = LAYER "mlp.down_proj.bias", \
        [ROLE_FINAL_NORM] = "model.norm.weight", [ROLE_HEAD] = "lm_head.weight",                   \
    }

static const struct family families[] = {
    {"qwen2", "Qwen2ForCausalLM", "Qwen2/Qwen2.5", LLAMA_NAMES, configure_qwen2},
    {"llama", "LlamaForCausalLM", "Llama", LLAMA_NAMES, configure_llama},
};

const struct family *family_find(const char *model_type, const char *architecture)
{
    for (size_t i = 0; i < sizeof families / sizeof families[0]; i++) {
        const struct family *f = &families[i];
        if (strcmp(f->model_type, model_type) != 0) continue;
        // a folder of a known type with another head (a classifier, a reward model) is not ours
        if (architecture[0] == '\0' || strcmp(f->architecture, architecture) == 0) return f;
    }
    return NULL;
}

const char *family_list(void)
{
    return "Qwen2/Qwen2.5 (Qwen2ForCausalLM), Llama 1 to 3.2 and look-alikes (LlamaForCausalLM)";
}
