/* test_mxfp4.c: gpt-oss's published form: experts as 4-bit floats with a scale for each 32, read
 * into ordinary weights and saved as those. That transformers computes the same from such a folder
 * is what tests/golden/gpt-oss-mxfp4 shows. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/loaded.h"
#include "tests/support/support.h"

static const char *golden_folder(void)
{
    return test_golden("gpt-oss-mxfp4");
}

// Value c of a row of blocks: sign, two bits of exponent, one of mantissa.
static double decode(const uint8_t *blocks, const uint8_t *scales, int c)
{
    const int code = blocks[c / 2] >> (c % 2 * 4) & 15, exponent = code >> 1 & 3;
    const double mantissa = (code & 1) * 0.5;
    const double x = exponent ? (1 + mantissa) * exp2(exponent - 1) : mantissa;
    return (code & 8 ? -x : x) * exp2(scales[c / 32] - 127);
}

// One of the folder's matrices against a matrix of the table: its rows are those from `first` on,
// each `step`-th.
static void compare(const struct loaded *m, const struct safetensors *set, const char *stored,
                    const char *name, int64_t first, int64_t step)
{
    char blocks_name[128], scales_name[128];
    snprintf(blocks_name, sizeof blocks_name, "%s_blocks", stored);
    snprintf(scales_name, sizeof scales_name, "%s_scales", stored);
    const struct safetensors_entry *blocks = safetensors_find(set, blocks_name),
                                   *scales = safetensors_find(set, scales_name);
    const struct weight_tensor *t = weights_find(m->weights, name);
    assert_true(blocks && scales && t);
    float *have = test_keep(malloc((size_t)t->n * sizeof *have));
    assert_ok(weights_read(m->weights, m->dev, (int)(t - m->weights->tensors), have));
    for (int64_t r = 0; r < t->shape[0]; r++)
        for (int64_t c = 0; c < t->shape[1]; c++) {
            const int64_t row = first + r * step;
            const double want =
                decode((const uint8_t *)blocks->data + row * t->shape[1] / 2,
                       (const uint8_t *)scales->data + row * t->shape[1] / 32, (int)c);
            assert_true(have[r * t->shape[1] + c] == (float)want);
        }
}

TEST(values_are_read)
{
    struct loaded *m = loaded_of(golden_folder(), DT_BF16);
    assert_true(m->config->stored == STORED_MXFP4 &&
                m->config->file_dtype == DT_F32); // "dtype" says so
    struct safetensors *set = tensors_of(golden_folder());
    const int inner = m->config->layers[0].intermediate, hidden = m->config->hidden;
    const char *stored = "model.layers.1.mlp.experts.gate_up_proj";
    const char *expert = "model.layers.1.mlp.experts.3.";
    char name[128];
    snprintf(name, sizeof name, "%sgate_proj.weight", expert);
    compare(m, set, stored, name, 3 * 2 * inner, 2);
    snprintf(name, sizeof name, "%sup_proj.weight", expert);
    compare(m, set, stored, name, 3 * 2 * inner + 1, 2);
    snprintf(name, sizeof name, "%sdown_proj.weight", expert);
    compare(m, set, "model.layers.1.mlp.experts.down_proj", name, 3 * hidden, 1);
}

// What is saved is not quantised any more, and holds the same numbers.
TEST(saved_as_ordinary_weights)
{
    const char *copy = test_folder();
    struct loaded *m = loaded_of(golden_folder(), DT_BF16);
    assert_ok(weights_save(m->weights, m->dev, copy, DT_BF16));
    assert_null(json_object_get(m->config->source, "quantization_config"));
    assert_ok(json_write_file(test_path(copy, "config.json"), 0644, m->config->source));
    struct loaded *again = loaded_of(copy, DT_BF16);
    assert_true(again->config->stored == STORED_PLAIN);
    assert_memory_equal(m->weights->base, again->weights->base, m->weights->canary_offset);
    struct safetensors *set = tensors_of(copy);
    const struct safetensors_entry *e =
        safetensors_find(set, "model.layers.0.mlp.experts.gate_up_proj");
    assert_non_null(e);
    assert_true(e->n_dims == 3 && e->shape[0] == 4 && e->shape[1] == 64 && e->shape[2] == 64);
    assert_null(safetensors_find(set, "model.layers.0.mlp.experts.gate_up_proj_blocks"));
}

TEST(refusals)
{
    struct loaded m;
    struct model_config *c;
    const char *other = test_folder();
    json_t *json = json_of_file(test_path(golden_folder(), "config.json"));
    json_object_set_new(json, "intermediate_size", json_integer(64)); // of 32
    assert_ok(json_write_file(test_path(other, "config.json"), 0644, json));
    loaded_plan(other, DT_BF16, &m);
    assert_fails(weights_load(m.weights, m.dev, golden_folder()), ST_MISMATCH,
                 "model.layers.0.mlp.experts.gate_up_proj_blocks must be U8 of shape (4, 128, 2");
    loaded_close(&m);
    json_object_set_new(json, "intermediate_size", json_integer(32));
    json_object_del(json, "quantization_config"); // which alone says that blocks are weights
    assert_ok(json_write_file(test_path(other, "config.json"), 0644, json));
    loaded_plan(other, DT_BF16, &m);
    assert_fails(weights_load(m.weights, m.dev, golden_folder()), ST_NOT_FOUND,
                 "tensor model.layers.0.mlp.experts.gate_up_proj is missing");
    loaded_close(&m);
    json_object_set_new(json, "quantization_config", json_pack("{s:s}", "quant_method", "awq"));
    assert_fails(model_config_from_json("config.json", json, &c), ST_UNSUPPORTED,
                 "quantization_config");
}

static struct safetensors_source *source_of(struct safetensors_source *all, int n, const char *name)
{
    for (int i = 0; i < n; i++)
        if (strcmp(all[i].name, name) == 0) return &all[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

// Experts' biases are ordinary ones, also where blocks and scales without any value go by the name.
TEST(biases_are_not_quantised)
{
    static struct safetensors_source sources[128];
    const char *bias = "model.layers.0.mlp.experts.gate_up_proj_bias", *folder = test_folder();
    struct safetensors *set = tensors_of(golden_folder());
    const int n = tensor_sources(set, sources);
    const int at = (int)(source_of(sources, n, bias) - sources), places[] = {at, n};
    const int64_t cols = sources[at].shape[1] / 32;
    for (int k = 0; k < 2; k++) {
        struct safetensors_source *to = &sources[places[k]];
        *to = (struct safetensors_source){
            .dt = DT_U8, .n_dims = 4 - k, .shape = {4, 0, cols, 16}, .tag = bias};
        snprintf(to->name, sizeof to->name, "%s%s", bias, k ? "_scales" : "_blocks");
    }
    tensors_write(folder, sources, n + 1);
    struct loaded *m = loaded_planned(golden_folder(), DT_BF16);
    assert_fails(weights_load(m->weights, m->dev, folder), ST_NOT_FOUND,
                 "gate_up_proj_bias is missing");
}

// The one scale that stands for no number would make 32 weights NaN.
TEST(a_scale_without_a_number_is_refused)
{
    static struct safetensors_source sources[128];
    const char *scales = "model.layers.1.mlp.experts.down_proj_scales", *folder = test_folder();
    struct safetensors *set = tensors_of(golden_folder());
    const int n = tensor_sources(set, sources);
    const size_t bytes = safetensors_find(set, scales)->bytes;
    struct safetensors_source *one = source_of(sources, n, scales);
    uint8_t *broken = test_keep(malloc(bytes));
    assert_non_null(broken);
    memcpy(broken, one->tag, bytes);
    broken[bytes - 1] = 255;
    one->tag = broken;
    tensors_write(folder, sources, n);
    struct loaded *m = loaded_planned(golden_folder(), DT_BF16);
    assert_fails(weights_load(m->weights, m->dev, folder), ST_FORMAT,
                 "model.layers.1.mlp.experts.down_proj_scales has a scale of 255");
}
