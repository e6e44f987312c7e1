/* fp8_folder.c: see fp8_folder.h. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/fp8_folder.h"
#include "common/base/json.h"
#include "common/model/weights.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_BLOCK (1 << 20)

// ---- config.json --------------------------------------------------------------------------------

// Says what the config has, "KEY VALUE", in place of what is read.
static enum status unsupported(const char *where, const char *method, const char *key,
                               const char *value)
{
    return status_fail(ST_UNSUPPORTED,
                       "%s: quantization_config: quant_method \"%s\"%s%s%s%s is not supported; FP8 "
                       "is (quant_method fp8, fbgemm_fp8, compressed-tensors of the format "
                       "float-quantized, modelopt with quant_algo FP8), and gpt-oss's MXFP4: use "
                       "the model's bf16, f16 or f32 folder, or one of these",
                       where, method, key ? " with " : "", key ? key : "", key ? " " : "",
                       key ? value : "");
}

// A key whose value must be that word, or that is not there.
static enum status check_word(const char *where, const char *method, const json_t *object,
                              const char *key, const char *want)
{
    const char *have = want;
    enum status st = json_get_string(where, object, key, &have);
    return st != ST_OK || strcmp(have, want) == 0 ? st : unsupported(where, method, key, have);
}

static enum status read_block(const char *where, const json_t *object, const char *key, int ret[2])
{
    const json_t *list = json_object_get(object, key);
    if (!json_has(object, key)) return ST_OK;
    for (size_t i = 0; i < 2; i++) {
        const json_int_t size = json_integer_value(json_array_get(list, i));
        if (json_array_size(list) != 2 || size < 1 || size > MAX_BLOCK)
            return status_fail(ST_FORMAT,
                               "%s: quantization_config: %s must be a list of two sizes from 1 to "
                               "%d, the rows and columns of a block",
                               where, key, MAX_BLOCK);
        if (ret[i] && ret[i] != size)
            return status_fail(ST_UNSUPPORTED,
                               "%s: quantization_config: blocks of different sizes in one folder "
                               "are not supported; use the model's bf16, f16 or f32 folder",
                               where);
        ret[i] = (int)size;
    }
    return ST_OK;
}

static enum status read_group(const char *where, const char *method, const json_t *group,
                              int block[2])
{
    const json_t *weights = json_object_get(group, "weights");
    const char *strategy = "tensor";
    int bits = 8;
    bool symmetric = true;
    char words[16];
    enum status st = ST_OK;
    CHECK(check_word(where, method, group, "format", "float-quantized"));
    CHECK(check_word(where, method, weights, "type", "float"));
    CHECK(json_get_int32(where, weights, "num_bits", 1, 64, &bits));
    CHECK(json_get_bool(where, weights, "symmetric", &symmetric));
    CHECK(json_get_string(where, weights, "strategy", &strategy));
    snprintf(words, sizeof words, "%d", bits);
    if (bits != 8) return unsupported(where, method, "num_bits", words);
    if (!symmetric) return unsupported(where, method, "symmetric", "false");
    if (strcmp(strategy, "block") == 0) return read_block(where, weights, "block_structure", block);
    if (strcmp(strategy, "tensor") != 0 && strcmp(strategy, "channel") != 0)
        return unsupported(where, method, "strategy", strategy);
out:
    return st;
}

static enum status read_compressed(const char *where, const char *method, const json_t *object,
                                   int block[2])
{
    const json_t *groups = json_object_get(object, "config_groups"), *group;
    const json_t *transform = json_object_get(object, "transform_config");
    const char *name;
    enum status st;
    CHECK(check_word(where, method, object, "format", "float-quantized"));
    CHECK(check_word(where, method, json_object_get(object, "sparsity_config"), "format", "dense"));
    if (json_object_size(json_object_get(transform, "config_groups")) > 0)
        return unsupported(where, method, "transform_config", "of rotations");
    json_object_foreach ((json_t *)groups, name, group)
        CHECK(read_group(where, method, group, block));
out:
    return st;
}

enum status fp8_config_read(const char *where, const json_t *object, int ret_block[2])
{
    const char *method = "";
    int block[2] = {0, 0};
    enum status st = json_get_string(where, object, "quant_method", &method);
    if (st != ST_OK) return st;
    if (strcmp(method, "fp8") == 0) {
        CHECK(check_word(where, method, object, "fmt", "e4m3"));
        CHECK(read_block(where, object, "weight_block_size", block));
    } else if (strcmp(method, "compressed-tensors") == 0) {
        CHECK(read_compressed(where, method, object, block));
    } else if (strcmp(method, "modelopt") == 0) {
        CHECK(check_word(where, method, object, "quant_algo", "FP8"));
    } else if (strcmp(method, "fbgemm_fp8") != 0) {
        return unsupported(where, method, NULL, NULL);
    }
    memcpy(ret_block, block, sizeof block);
out:
    return st;
}

// ---- tensors ------------------------------------------------------------------------------------

bool fp8_is_scale(const struct safetensors *set, const char *name)
{
    // With the matrix's name in front; those of the KV cache stand beside the matrices that fill
    // it.
    static const char *const of_matrix[] = {"weight_scale", "weight_scale_inv",
                                            "input_scale",  "activation_scale",
                                            "output_scale", "input_scale_ub"};
    static const char *const of_cache[] = {"k_scale", "v_scale", "q_scale", "kv_scale"};
    const char *dot = strrchr(name, '.'), *last = dot ? dot + 1 : name;
    char matrix[200];
    for (size_t i = 0; i < sizeof of_cache / sizeof *of_cache; i++)
        if (strcmp(last, of_cache[i]) == 0) return true;
    snprintf(matrix, sizeof matrix, "%.*sweight", (int)(last - name), name);
    for (size_t i = 0; i < sizeof of_matrix / sizeof *of_matrix; i++)
        if (strcmp(last, of_matrix[i]) == 0) return safetensors_find(set, matrix) != NULL;
    return false;
}

// Scale i. Host memory of any alignment.
static float scale_at(const struct safetensors_entry *scales, int64_t i)
{
    float x;
    weights_convert(&x, DT_F32, (const char *)scales->data + (size_t)i * dtype_size(scales->dt),
                    scales->dt, 1);
    return x;
}

static void read_row(const struct safetensors_entry *e, int64_t row, int64_t first, int64_t n,
                     void *ret)
{
    const int64_t cols = e->shape[1], across = (cols + e->block[1] - 1) / e->block[1];
    const uint8_t *codes = (const uint8_t *)e->data + row * cols;
    float *to = ret;
    for (int64_t c = first, end; c < first + n; c = end) {
        const float scale = scale_at(e->more, row / e->block[0] * across + c / e->block[1]);
        end = (c / e->block[1] + 1) * e->block[1];
        if (end > first + n) end = first + n;
        for (int64_t i = c; i < end; i++) to[i - first] = f32_from_e4m3(codes[i]) * scale;
    }
}

static int64_t count(const struct safetensors_entry *e)
{
    return (int64_t)(e->bytes / dtype_size(e->dt));
}

// How many rows and columns have a scale together; false: the shape is of none of the forms.
static bool find_block(const struct safetensors_entry *codes,
                       const struct safetensors_entry *scales, const int block[2], int64_t ret[2])
{
    const int64_t rows = codes->shape[0], cols = codes->shape[1];
    ret[0] = block[0];
    ret[1] = block[1];
    if (block[0] && scales->n_dims == 2 && scales->shape[0] == (rows + block[0] - 1) / block[0] &&
        scales->shape[1] == (cols + block[1] - 1) / block[1])
        return true;
    ret[0] = count(scales) == 1 ? rows : 1;
    ret[1] = cols;
    return count(scales) == 1 || (count(scales) == rows && scales->shape[0] == rows);
}

enum status fp8_find(const struct safetensors *set, const struct safetensors_entry *codes,
                     const int block[2], struct safetensors_entry *ret)
{
    char name[200];
    const struct safetensors_entry *scales;
    struct safetensors_entry e = *codes;
    snprintf(name, sizeof name, "%s_scale_inv", codes->name);
    scales = safetensors_find(set, name);
    name[strlen(name) - strlen("_inv")] = '\0';
    if (!scales) scales = safetensors_find(set, name);
    if (!scales)
        return status_fail(ST_NOT_FOUND,
                           "%s: tensor %s is F8_E4M3, and neither %s nor %s_inv is there: the "
                           "folder is incomplete, or of a form that is not supported; use the "
                           "model's bf16, f16 or f32 folder",
                           codes->file, codes->name, name, name);
    if (scales->dt != DT_F32 && scales->dt != DT_BF16 && scales->dt != DT_F16)
        return status_fail(ST_UNSUPPORTED, "%s: tensor %s is %s; scales must be F32, BF16 or F16",
                           scales->file, scales->name, dtype_safetensors_name(scales->dt));
    if (codes->n_dims != 2 || codes->bytes == 0 || !find_block(codes, scales, block, e.block))
        return status_fail(ST_MISMATCH,
                           "%s: tensor %s has %lld scales; the matrix has %lld rows, and "
                           "quantization_config calls for one, one a row, or one a block",
                           scales->file, scales->name, (long long)count(scales),
                           (long long)codes->shape[0]);
    for (int64_t i = 0; i < count(scales); i++)
        if (!isfinite(scale_at(scales, i)))
            return status_fail(ST_FORMAT,
                               "%s: tensor %s has a scale that is no number: the folder is broken, "
                               "or was converted wrongly; take it from where it was published",
                               scales->file, scales->name);
    e.dt = DT_F32;
    e.read = read_row;
    e.more = scales;
    *ret = e;
    return ST_OK;
}

static bool is_power_of_two(float x)
{
    int exponent;
    return frexpf(fabsf(x), &exponent) == 0.5f;
}

// A row's sums of squares: of what changes, and of the numbers themselves.
static void round_row(const float *x, int64_t n, double sums[2])
{
    float largest = 0;
    for (int64_t i = 0; i < n; i++) largest = fmaxf(largest, fabsf(x[i]));
    const int scale = e4m3_scale(largest);
    for (int64_t i = 0; i < n; i++) {
        const float y =
            f32_from_e4m3(e4m3_from_f32(x[i] * power_of_two(-scale))) * power_of_two(scale);
        sums[0] += ((double)y - x[i]) * ((double)y - x[i]);
        sums[1] += (double)x[i] * x[i];
    }
}

double fp8_rounding(const struct safetensors_entry *e)
{
    const int64_t rows = e->shape[0], cols = e->shape[1], n = count(e->more);
    double changed = 0, all = 0;
    int64_t powers = 0;
    for (int64_t i = 0; i < n; i++) powers += is_power_of_two(scale_at(e->more, i));
    if (powers == n) return 0;
#pragma omp parallel for reduction(+ : changed, all)
    for (int64_t row = 0; row < rows; row++) {
        double sums[2] = {0, 0};
        float *x = malloc((size_t)cols * sizeof *x);
        if (!x) continue; // it is only told
        e->read(e, row, 0, cols, x);
        round_row(x, cols, sums);
        changed += sums[0];
        all += sums[1];
        free(x);
    }
    return all > 0 ? sqrt(changed / all) : 0;
}

// ---- writing ------------------------------------------------------------------------------------

// Modules of whole matrices beside the twin's: what loaders would otherwise take for quantised.
static json_t *list_ignored(const struct weights *w)
{
    json_t *list = json_pack("[s]", "lm_head"); // also where it is the embeddings
    for (const struct weight_tensor *t = w->tensors; t < w->tensors + w->n_tensors; t++) {
        const char *dot = strrchr(t->name, '.');
        if (t->n_dims != 2 || !dot || t->role == ROLE_EMBED || t->role == ROLE_HEAD ||
            t->role == ROLE_LAYER_EMBED || t->role == ROLE_DELTA_CONV ||
            weights_find(w->twin, t->name))
            continue;
        json_array_append_new(list, json_stringn(t->name, (size_t)(dot - t->name)));
    }
    return list;
}

json_t *fp8_config_new(const struct weights *w, bool rounds)
{
    json_t *ignored = list_ignored(w), *rows;
    rows = rounds ? json_pack("{s:i, s:s, s:s, s:b, s:b}", "num_bits", 8, "type", "float",
                              "strategy", "token", "dynamic", true, "symmetric", true)
                  : json_null();
    return json_pack("{s:s, s:s, s:s, s:o, s:n, s:{s:{s:[s], s:o, s:n, s:{s:i, s:s, s:s, s:b, "
                     "s:b}}}}",
                     "quant_method", "compressed-tensors", "format", "float-quantized",
                     "quantization_status", "compressed", "ignore", ignored, "kv_cache_scheme",
                     "config_groups", "group_0", "targets", "Linear", "input_activations", rows,
                     "output_activations", "weights", "num_bits", 8, "type", "float", "strategy",
                     "channel", "dynamic", false, "symmetric", true);
}
