/* adapter_config.c: see adapter.h. Every key of the file is either read, or known to change
 * nothing here, or must be empty: so that a kind of adapter which this program has never heard of
 * is not computed as plain LoRA. Module names are matched as PEFT matches them (tuners_utils.py,
 * check_target_module_exists; other.py, get_pattern_key), its regular expressions by PCRE2. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/adapter.h"
#include "common/base/bytes.h"
#include "common/base/file.h"
#include "common/base/json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#define MAX_ALPHA 1e6

// ---- reading ------------------------------------------------------------------------------------
static const char *const read_keys[] = {"peft_type",
                                        "r",
                                        "lora_alpha",
                                        "lora_dropout",
                                        "use_rslora",
                                        "target_modules",
                                        "bias",
                                        "rank_pattern",
                                        "alpha_pattern",
                                        "init_lora_weights",
                                        "exclude_modules",
                                        "layers_to_transform",
                                        "ensure_weight_tying",
                                        NULL};
// How it was made, by whom and of what; and options of kinds that are off.
static const char *const silent_keys[] = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core",
    "peft_version", "qalora_group_size",       "revision",       "task_type",
    "loftq_config", "runtime_config",          "eva_config",     NULL};

#define MERGE "merge it into its base with PEFT's merge_and_unload() and serve the result"
// What is refused, and the way out; any other key that is not empty gets the last.
static const struct refusal {
    const char *key, *way_out;
} refusals[] = {
    {"use_dora", "DoRA is not supported; " MERGE},
    {"lora_bias", "biases of adapters are not supported; " MERGE},
    {"modules_to_save", "whole modules beside an adapter are not supported; " MERGE},
    {"trainable_token_indices", "trained embeddings are not supported; " MERGE},
    {"fan_in_fan_out", "transposed weights are of models that are not supported"},
    {"layers_pattern", "write the layers into target_modules as a regular expression"},
    {"target_parameters", "adapters of parameters (experts) are not supported; " MERGE},
    {NULL, "this kind of adapter is not known here; " MERGE},
};

static bool listed(const char *const *keys, const char *key)
{
    while (*keys && strcmp(*keys, key) != 0) keys++;
    return *keys != NULL;
}

static bool is_empty(const json_t *value)
{
    return json_is_null(value) || json_is_false(value) ||
           (json_is_object(value) && json_object_size(value) == 0) ||
           (json_is_array(value) && json_array_size(value) == 0);
}

static enum status check_keys(const char *where, json_t *json)
{
    const char *key;
    json_t *value;
    json_object_foreach (json, key, value) {
        const struct refusal *r = refusals;
        if (is_empty(value) || listed(read_keys, key) || listed(silent_keys, key)) continue;
        while (r->key && strcmp(r->key, key) != 0) r++;
        return status_fail(ST_UNSUPPORTED, "%s: %s is set: %s", where, key, r->way_out);
    }
    return ST_OK;
}

// Ways to begin that leave the base as it is; PiSSA, OLoRA and their like take a part out of it.
static enum status check_init(const char *where, const json_t *json)
{
    static const char *const harmless[] = {"gaussian", "orthogonal", "eva", NULL};
    const char *init = json_string_value(json_object_get(json, "init_lora_weights"));
    if (!init || listed(harmless, init)) return ST_OK;
    return status_fail(ST_UNSUPPORTED,
                       "%s: init_lora_weights \"%s\" changes the base model's weights; save the "
                       "adapter with PEFT's path_initial_model_for_weight_conversion",
                       where, init);
}

static enum status check_targets(const char *where, const json_t *json)
{
    const json_t *targets = json_object_get(json, "target_modules"), *one;
    size_t i;
    bool ok = json_is_string(targets) || (json_is_array(targets) && json_array_size(targets) > 0);
    json_array_foreach (targets, i, one) ok = ok && json_is_string(one);
    if (ok) return ST_OK;
    return status_fail(ST_INVALID,
                       "%s: target_modules must be a list of modules' names, a regular expression "
                       "or \"all-linear\"",
                       where);
}

enum status adapter_config_from_json(const char *where, json_t *json, struct adapter_config **ret)
{
    enum status st = ST_OK;
    struct adapter_config *c = calloc(1, sizeof *c);
    if (!c) return status_fail(ST_NO_MEMORY, "no memory for an adapter's config");
    c->r = 8; // PEFT's defaults
    c->alpha = 8;
    c->source = json_incref(json);
    if (!json_is_object(json)) FAIL(ST_INVALID, "%s: not a JSON object", where);
    CHECK(json_expect(where, json, "peft_type", "LORA", "only LoRA is supported"));
    CHECK(json_expect(where, json, "bias", "none", "biases of adapters are not supported; " MERGE));
    CHECK(check_keys(where, json));
    CHECK(check_init(where, json));
    CHECK(check_targets(where, json));
    CHECK(json_get_int32(where, json, "r", 1, ADAPTER_MAX_RANK, &c->r));
    CHECK(json_get_double(where, json, "lora_alpha", 0, MAX_ALPHA, &c->alpha));
    CHECK(json_get_double(where, json, "lora_dropout", 0, 0.99, &c->dropout));
    CHECK(json_get_bool(where, json, "use_rslora", &c->rslora));
    CHECK(json_get_bool(where, json, "ensure_weight_tying", &c->ties));
    *ret = TAKE_PTR(c);
out:
    adapter_config_free(c);
    return st;
}

enum status adapter_config_load(const char *folder, struct adapter_config **ret)
{
    enum status st = ST_OK;
    json_t *json = NULL;
    char path[PATH_ROOM];
    CHECK(path_put(path, folder, ADAPTER_CONFIG_FILE));
    if (!file_exists(path))
        FAIL(ST_NOT_FOUND,
             "%s: no adapter_config.json in it; an adapter is a folder as PEFT writes it, and a "
             "run's checkpoints (checkpoints/latest in its folder)",
             folder);
    CHECK(json_read_file(path, 1 << 20, &json));
    CHECK(adapter_config_from_json(path, json, ret));
out:
    json_decref(json);
    return st;
}

void adapter_config_free(struct adapter_config *config)
{
    if (!config) return;
    json_decref(config->source);
    free(config);
}

enum status adapter_config_json(int r, double alpha, double dropout, bool rslora,
                                const char *targets, json_t **ret)
{
    const bool all = strcmp(targets, "all-linear") == 0;
    char *copy = strdup(targets), *state = NULL;
    json_t *list = all ? json_string(targets) : json_array();
    for (char *name = copy && !all ? strtok_r(copy, ", ", &state) : NULL; name;
         name = strtok_r(NULL, ", ", &state))
        json_array_append_new(list, json_string(name));
    free(copy);
    json_t *json =
        json_pack("{s:s, s:s, s:i, s:f, s:f, s:b, s:o, s:s, s:b, s:b, s:b}", "peft_type", "LORA",
                  "task_type", "CAUSAL_LM", "r", r, "lora_alpha", alpha, "lora_dropout", dropout,
                  "use_rslora", rslora, "target_modules", list, "bias", "none", "fan_in_fan_out", 0,
                  "inference_mode", 1, "init_lora_weights", 1);
    if (!json) return status_fail(ST_NO_MEMORY, "no memory for an adapter's config");
    *ret = json;
    return ST_OK;
}

// ---- matching -----------------------------------------------------------------------------------
// Whether all of `text` matches (Python's re.fullmatch).
static enum status full_match(const char *field, const char *expression, const char *text,
                              bool *ret)
{
    int error, n = -1;
    PCRE2_SIZE at;
    pcre2_code *code =
        pcre2_compile((PCRE2_SPTR)expression, PCRE2_ZERO_TERMINATED,
                      PCRE2_ANCHORED | PCRE2_ENDANCHORED | PCRE2_UTF, &error, &at, NULL);
    pcre2_match_data *data = code ? pcre2_match_data_create(1, NULL) : NULL;
    if (data) n = pcre2_match(code, (PCRE2_SPTR)text, strlen(text), 0, 0, data, NULL);
    pcre2_match_data_free(data);
    pcre2_code_free(code);
    if (!code)
        return status_fail(ST_INVALID, "%s: the regular expression \"%s\" is not understood", field,
                           CUT(expression, 200));
    if (n < 0 && n != PCRE2_ERROR_NOMATCH)
        return status_fail(ST_INVALID, "%s: matching \"%s\" fails (PCRE2 error %d)", field,
                           CUT(expression, 200), n);
    *ret = n >= 0;
    return ST_OK;
}

static bool ends_with(const char *module, const char *name)
{
    const size_t len = strlen(module), n = strlen(name);
    if (n > len || strcmp(module + len - n, name) != 0) return false;
    return n == len || module[len - n - 1] == '.';
}

// A list of names, of which one must be the module's or its end; or an expression.
static enum status names_match(const char *field, const json_t *names, const char *module,
                               bool *ret)
{
    const json_t *name;
    size_t i;
    *ret = false;
    if (json_is_string(names)) return full_match(field, json_string_value(names), module, ret);
    json_array_foreach (names, i, name)
        if (json_is_string(name)) *ret = *ret || ends_with(module, json_string_value(name));
    return ST_OK;
}

static bool is_named(const json_t *names, const char *module)
{
    const json_t *name;
    size_t i;
    json_array_foreach (names, i, name)
        if (json_is_string(name) && strcmp(json_string_value(name), module) == 0) return true;
    return false;
}

// layers_to_transform: a layer or a list of them; of lists of targets only, and of those not named
// in full.
static bool layer_wanted(const json_t *layers, const char *module)
{
    const char *at = strstr(module, ".layers.");
    const json_int_t layer = at ? atoi(at + strlen(".layers.")) : -1;
    const json_t *one;
    size_t i;
    if (json_is_integer(layers)) return json_integer_value(layers) == layer;
    if (json_array_size(layers) == 0) return true;
    json_array_foreach (layers, i, one)
        if (json_integer_value(one) == layer) return true;
    return false;
}

// The value of the first pattern whose match ends the module's name.
static enum status pattern_value(const json_t *json, const char *field, const char *module,
                                 double *ret_value)
{
    const char *pattern;
    json_t *value;
    bool found = false;
    json_object_foreach (json_object_get(json, field), pattern, value) {
        struct bytes whole = BYTES_INIT;
        bytes_printf(&whole, "(.*\\.)?(%s)", pattern);
        enum status st = full_match(field, bytes_text(&whole), module, &found);
        bytes_release(&whole);
        if (st != ST_OK) return st;
        if (found && !json_is_number(value))
            return status_fail(ST_INVALID, "%s: the value of \"%s\" is not a number", field,
                               pattern);
        if (found) *ret_value = json_number_value(value);
        if (found) break;
    }
    return ST_OK;
}

static enum status is_target(const struct adapter_config *c, const char *module, bool is_head,
                             bool *ret)
{
    const json_t *targets = json_object_get(c->source, "target_modules");
    const char *word = json_string_value(targets);
    bool excluded = false;
    enum status st;
    *ret = false;
    CHECK(names_match("exclude_modules", json_object_get(c->source, "exclude_modules"), module,
                      &excluded));
    if (excluded) goto out;
    if (word && strcmp(word, "all-linear") == 0)
        *ret = !is_head;
    else
        CHECK(names_match("target_modules", targets, module, ret));
    if (!word && !is_named(targets, module))
        *ret = *ret && layer_wanted(json_object_get(c->source, "layers_to_transform"), module);
out:
    return st;
}

enum status adapter_config_match(const struct adapter_config *config, const char *module,
                                 bool is_head, int *ret_rank, float *ret_scale)
{
    double rank = config->r, alpha = config->alpha;
    bool wanted;
    enum status st;
    CHECK(is_target(config, module, is_head, &wanted));
    CHECK(pattern_value(config->source, "rank_pattern", module, &rank));
    CHECK(pattern_value(config->source, "alpha_pattern", module, &alpha));
    if (wanted && !(rank >= 1 && rank <= ADAPTER_MAX_RANK && rank == (int)rank))
        FAIL(ST_INVALID, "rank_pattern: %s has rank %g; it must be a whole number from 1 to %d",
             module, rank, ADAPTER_MAX_RANK);
    if (wanted && !(alpha >= 0 && alpha <= MAX_ALPHA))
        FAIL(ST_INVALID, "alpha_pattern: %s has alpha %g; it must be 0 to %g", module, alpha,
             MAX_ALPHA);
    *ret_rank = wanted ? (int)rank : 0;
    *ret_scale = (float)(alpha / (config->rslora ? sqrt(rank) : rank));
out:
    return st;
}
