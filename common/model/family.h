/* family.h: what a model family adds to the common description: one row of a table (family.c).
 * A tensor of the weights table has a role; a family says what Hugging Face calls it, and which of
 * them are stored in parts (qkv in three by most, whole by Phi-3). docs/internals/extending.md
 * shows how to add one. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_MODEL_FAMILY_H
#define COMMON_MODEL_FAMILY_H

#include "common/model/config.h"

// The blocks of the weights arena, in its order: the first, those of each layer, the last four, and
// then each layer's buffers. A bias stands behind the role that it is of.
enum tensor_role {
    ROLE_EMBED,
    ROLE_LAYER_EMBED, // of layers with inputs of their own (config.h, layer_input), as the next two
    ROLE_LAYER_INPUT,
    ROLE_LAYER_INPUT_NORM,
    ROLE_MTP_EMBED_NORM, // of a layer that predicts further tokens (config.h, mtp), as the next two
    ROLE_MTP_HIDDEN_NORM,
    ROLE_MTP_PROJ,
    ROLE_ATTN_NORM,
    ROLE_ATTN_NORM_BIAS,
    ROLE_QKV,
    ROLE_QKV_BIAS,
    ROLE_Q_NORM,
    ROLE_K_NORM,
    ROLE_SINKS,
    ROLE_Q_A, // of latent attention, as far as ROLE_KV_B
    ROLE_Q_A_BIAS,
    ROLE_Q_A_NORM,
    ROLE_Q_B,
    ROLE_Q, // in place of those four
    ROLE_KV_A,
    ROLE_KV_A_BIAS,
    ROLE_KV_A_NORM,
    ROLE_KV_B,
    ROLE_O,
    ROLE_O_BIAS,
    ROLE_DELTA_IN, // of linear attention: into the convolution and the output's gate
    ROLE_DELTA_IN_BIAS,
    ROLE_DELTA_GATES, // b and a of every head
    ROLE_DELTA_CONV,
    ROLE_DELTA_CONV_BIAS,
    ROLE_DELTA_A_LOG,
    ROLE_DELTA_DT_BIAS,
    ROLE_DELTA_SKIP, // Mamba-2's D
    ROLE_DELTA_NORM,
    ROLE_DELTA_OUT,
    ROLE_DELTA_OUT_BIAS,
    ROLE_POST_ATTN_NORM,
    ROLE_MLP_NORM,
    ROLE_MLP_NORM_BIAS,
    ROLE_ROUTER,
    ROLE_ROUTER_LOGIT_BIAS,
    ROLE_ROUTER_NORM, // of what the router reads (config.h, EXPERTS_BESIDE), as the next two
    ROLE_EXPERT_SCALE,
    ROLE_EXPERTS_NORM,
    ROLE_GATE_UP,
    ROLE_GATE_UP_BIAS,
    ROLE_EXPERTS_GATE_UP, // of every expert, one after the other, in layers that have experts
    ROLE_EXPERTS_GATE_UP_BIAS,
    ROLE_EXPERTS_IN, // into what experts read, where that is a latent vector, and out of it
    ROLE_EXPERTS_OUT,
    ROLE_DOWN,
    ROLE_DOWN_BIAS,
    ROLE_EXPERTS_DOWN,
    ROLE_EXPERTS_DOWN_BIAS,
    ROLE_SHARED_GATE_UP,
    ROLE_SHARED_DOWN,
    ROLE_SHARED_GATE,
    ROLE_POST_SHARED_NORM, // config.h, EXPERTS_BESIDE
    ROLE_POST_EXPERTS_NORM,
    ROLE_POST_MLP_NORM,
    ROLE_LAYER_GATE, // of a layer's own inputs, as the next two
    ROLE_LAYER_OUT,
    ROLE_POST_LAYER_NORM,
    ROLE_FINAL_NORM,
    ROLE_FINAL_NORM_BIAS,
    ROLE_HEAD, // absent where tied
    ROLE_HEAD_BIAS,
    ROLE_ROUTER_BIAS, // of every layer, behind all that is trained: buffers
    ROLE_LAYER_SCALE,
    ROLE_COUNT
};

#define MAX_BLOCK_KEYS 4

typedef enum status configure_family(const char *where, const json_t *json,
                                     struct model_config *config);

struct family {
    const char *model_type;   // config.json "model_type"
    const char *architecture; // config.json "architectures"[0]
    const char *title;        // for error messages and docs
    // What a config.json of this family means where it is silent.
    enum norm_kind norm;
    const char *norm_eps_key; // NULL: "rms_norm_eps"
    double norm_eps;          // 0: 1e-6
    const char *act_key;      // NULL: "hidden_act"
    enum act_kind act;
    unsigned block; // QKV_BIAS and so on (config.h)
    struct named_bits {
        const char *key; // of a bool that says whether blocks have these, in place of `block`
        unsigned of;
    } block_keys[MAX_BLOCK_KEYS];
    // Which layers have a sliding window, where layer_types does not say. ALL_LAYERS: whatever it
    // says.
    struct windows {
        enum { NO_WINDOWS, SOME_LAYERS, ALL_LAYERS } of;
        int absent;            // of a config without sliding_window: positions; 0: none
        bool by_use;           // none unless use_sliding_window is true
        bool late, early;      // those from max_window_layers on, or those before it
        int full_every;        // but every so many-th; 0: no such
        const char *every_key; // of that number
        bool last_full;        // and never the last layer
    } windows;
    // Experts: their number, how many a token goes to, and their width, 0: intermediate_size's, all
    // of a silent config. Those with a width are Qwen's: in layers that the config may choose.
    // Beside them one that every token goes to, with a gate: its width, 0: there is none.
    struct {
        int n, per_token, width, shared;
        bool norm_topk;  // of those with a width, where norm_topk_prob is silent
        bool everywhere; // in all layers, and normalised, whatever the config says
    } experts;
    double rotary_share;   // 0: 1
    bool partial_rotary;   // partial_rotary_factor may say another share than that
    double rope_theta;     // 0: 10000
    bool window_ropes;     // layers with a window have positions of their own, of the theta
    const char *local_key; // of this key (NULL: there is none),
    double local_theta;    // or this one
    const char *ropes;     // rope_parameters of a config without any (JSON); NULL: none
    bool ropes_say_all;    // thetas and shares stand there alone; ROPE_DEFAULT has no share
    bool query_growth;     // queries grow with their positions (rope_config.query_beta)
    bool no_positions;     // nothing is rotated, and what says how is not read
    bool phi3_ropes;       // rope types are those of Phi-3's folders (rope.c)
    int head_dim;          // 0: hidden_size / num_attention_heads
    int kv_heads;          // 0: num_attention_heads
    int max_positions;     // 0: 2048
    bool tied;
    // Layers without a window have heads of this size, where per_layer_config does not say of each
    // (Gemma 4). 0: all layers have one size.
    int global_head_dim;
    // Layers of a config that lists them in a way of its own; NULL: num_hidden_layers.
    int (*count_layers)(const json_t *json);
    // Hugging Face names of each role: parts in row order, separated by '|'; the first "%d" is the
    // layer, the second the expert. Roles that the config rules out are not looked up, and a bias
    // is called as what it is of, with .bias for .weight.
    const char *names[ROLE_COUNT];
    // Where a folder has all experts of a layer in one tensor (gpt-oss), what it is called: their
    // matrices (n_experts, columns, rows), their biases (n_experts, rows), a row of each part in
    // turn. `names` are then what the table calls them. In published folders matrices may be
    // MXFP4, in two tensors (weights_files.c).
    const char *stored[ROLE_COUNT];
    // They are (n_experts, rows, columns), a part's rows behind another's (Gemma 4).
    bool stored_rows;
    // What names in a folder begin with in place of "model."; NULL: with that.
    const char *folder_prefix;
    // A layer that predicts further tokens: its tensors are `names` too, with `mtp_prefix` in place
    // of "model." (NULL: as those of a layer behind the model's last), but for the last norm's.
    const char *mtp_prefix, *mtp_norm;
    // Whether what such a layer gives is normalised before the next step reads it.
    bool mtp_normalised;
    // A row of folders whose text model is one of another row, beside what reads images: the
    // model_type of that, and what its config means where text_config is silent (JSON). Nothing
    // else of such a row is used.
    // Of several rows with one model_type text_config's own picks one, else the first.
    const char *text_type, *text_defaults;
    // Reads the family's own keys, after the common ones and what the row says; NULL: it has none.
    configure_family *configure;
};

// Of the families with latent attention, and of two with their router alone (deepseek.c); and
// nemotron.c's.
configure_family configure_deepseek_v2, configure_deepseek_v3, configure_glm4_moe_lite;
configure_family configure_glm4_moe, configure_minimax_m2;
configure_family configure_nemotron_h;
int nemotron_h_layers(const json_t *json);

// Experts in the layers from `first` on, of that width, routed as DeepSeek-V3's: by a sigmoid, with
// a bias for the pick. `moe` is what a silent config means. EXPERTS_LISTED: in those that
// mlp_layer_types says. EXPERTS_EVERYWHERE: in all, whatever the config says, nor is there a shared
// one of its.
enum { EXPERTS_LISTED = -1, EXPERTS_EVERYWHERE = -2 };
enum status configure_biased_experts(const char *where, const json_t *json,
                                     struct model_config *config, int first, int width,
                                     struct moe_shape moe);

// Reads which layers have windows, and what sizes differ by that. Before the positions.
enum status family_layers(const char *where, const json_t *json, struct model_config *config);
// Reads what a config of the family has beyond sizes, activation and positions, which were read.
enum status family_configure(const char *where, const json_t *json, struct model_config *config);
const struct family *family_find(const char *model_type, const char *architecture); // NULL: unknown
// The row of folders of that model_type, beside what reads images, whose text model is of text_type
// (NULL: any); NULL: there is none.
const struct family *family_find_text(const char *model_type, const char *text_type);
const struct family *family_at(int i); // the i-th row; NULL past the end
const char *family_list(void); // "Qwen2/Qwen2.5 (Qwen2ForCausalLM), ..."; one thread's own text

#endif
