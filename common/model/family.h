/* family.h: what a model family adds to the common description: one row of a table (family.c).
 * A tensor of the weights table has a role; a family says what Hugging Face calls it, and which
 * which of them are stored in parts (qkv in three, gate_up in two). */
#ifndef COMMON_MODEL_FAMILY_H
#define COMMON_MODEL_FAMILY_H

#include "common/model/config.h"

// The fused blocks of the weights arena. Names are per layer where the pattern has "%d".
enum tensor_role {
    ROLE_EMBED,
    ROLE_ATTN_NORM,
    ROLE_QKV,
    ROLE_QKV_BIAS,
    ROLE_O,
    ROLE_O_BIAS,
    ROLE_MLP_NORM,
    ROLE_GATE_UP,
    ROLE_GATE_UP_BIAS,
    ROLE_DOWN,
    ROLE_DOWN_BIAS,
    ROLE_FINAL_NORM,
    ROLE_HEAD, // absent where tied
    ROLE_COUNT
};

struct family {
    const char *model_type;   // config.json "model_type"
    const char *architecture; // config.json "architectures"[0]
    const char *title;        // for error messages and docs
    // Hugging Face names of the parts of each role, in row order, separated by '|'; NULL: not there.
    const char *names[ROLE_COUNT];
    // Sets the fields this family fixes and reads its own keys, after the common ones were read.
    enum status (*configure)(const char *where, const json_t *json, struct model_config *config);
};

const struct family *family_find(const char *model_type, const char *architecture); // NULL: unknown
const char *family_list(void); // "Qwen2 (qwen2), Llama (llama), ..."

#endif
