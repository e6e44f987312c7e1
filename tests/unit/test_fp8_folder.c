/* test_fp8_folder.c: folders whose matrices are FP8 with scales of their own, in each published
 * form: every number that is loaded is the code times its scale; what the twin makes of them is
 * told; what is broken or of another quantisation is refused by name. That torch computes the same
 * from such a folder is what tests/golden/qwen3-blocks shows. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/e4m3.h"
#include "common/model/fp8_folder.h"
#include "tests/support/loaded.h"
#include "tests/support/support.h"
#include <math.h>

enum { MAX_TENSORS = 400 };

// Rows and columns with one scale, 0: all of them.
struct form {
    const char *quantization, *scales;
    int rows, cols;
    enum dtype dt;
    int n_dims;
};
#define COMPRESSED(strategy)                                                                       \
    "{'quant_method':'compressed-tensors','format':'float-quantized','ignore':['lm_head'],"        \
    "'config_groups':{'group_0':{'targets':['Linear'],'weights':{'num_bits':8,'type':'float',"     \
    "'symmetric':true,'dynamic':false,'strategy':" strategy "},'input_activations':null}}}"
static const struct form forms[] = {
    {"{'quant_method':'fp8','fmt':'e4m3','activation_scheme':'dynamic',"
     "'weight_block_size':[20,24]}",
     "_scale_inv", 20, 24, DT_F32, 2},
    {"{'quant_method':'fp8','weight_block_size':[16,16]}", "_scale_inv", 16, 16, DT_BF16, 2},
    {"{'quant_method':'fp8','activation_scheme':'static'}", "_scale", 0, 0, DT_F32, 0},
    {COMPRESSED("'tensor'"), "_scale", 0, 0, DT_BF16, 1},
    {COMPRESSED("'channel'"), "_scale", 1, 0, DT_BF16, 2},
    {COMPRESSED("'block','block_structure':[32,16]"), "_scale", 32, 16, DT_F32, 2},
    {"{'quant_method':'fbgemm_fp8','activation_scale_ub':1200.0}", "_scale", 1, 0, DT_F32, 2},
    {"{'quant_method':'fbgemm_fp8'}", "_scale", 1, 0, DT_F16, 1},
    {"{'quant_method':'modelopt','quant_algo':'FP8'}", "_scale", 0, 0, DT_F32, 0},
};
enum { FORMS = sizeof forms / sizeof forms[0] };

// A matrix of the plain folder, as it is stored, and what it stands for.
struct matrix {
    int64_t rows, cols, block_rows, block_cols, across, n_scales;
    uint8_t *codes;
    void *scales;
    float *numbers;
};

static float scale_for(const float *x, const struct matrix *m, int64_t i)
{
    const int64_t row = i / m->across * m->block_rows, col = i % m->across * m->block_cols;
    float largest = 0;
    for (int64_t r = row; r < m->rows && r < row + m->block_rows; r++)
        for (int64_t c = col; c < m->cols && c < col + m->block_cols; c++)
            largest = fmaxf(largest, fabsf(x[r * m->cols + c]));
    return largest / 448;
}

static double value_of(uint8_t code)
{
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const double x = exponent ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9);
    return code & 0x80 ? -x : x;
}

static void quantise(const float *x, const struct form *f, bool powers, struct matrix *m)
{
    m->block_rows = f->rows ? f->rows : m->rows;
    m->block_cols = f->cols ? f->cols : m->cols;
    m->across = (m->cols + m->block_cols - 1) / m->block_cols;
    m->n_scales = (m->rows + m->block_rows - 1) / m->block_rows * m->across;
    m->codes = test_keep(malloc((size_t)(m->rows * m->cols)));
    m->numbers = test_keep(malloc((size_t)(m->rows * m->cols) * sizeof(float)));
    m->scales = test_keep(calloc((size_t)m->n_scales, sizeof(float)));
    float *scales = test_keep(calloc((size_t)m->n_scales, sizeof(float)));
    for (int64_t i = 0; i < m->n_scales; i++) {
        const float scale = scale_for(x, m, i);
        uint16_t half = bf16_from_f32(scale);
        scales[i] = powers ? exp2f(ceilf(log2f(scale))) : scale;
        if (f->dt == DT_BF16) scales[i] = f32_from_bf16(half);
        if (f->dt == DT_F16) scales[i] = f32_from_f16(half = (uint16_t)(0x0800 + i % 1024));
        if (f->dt == DT_F32)
            ((float *)m->scales)[i] = scales[i];
        else
            ((uint16_t *)m->scales)[i] = half;
    }
    for (int64_t r = 0; r < m->rows; r++)
        for (int64_t c = 0; c < m->cols; c++) {
            const float scale = scales[r / m->block_rows * m->across + c / m->block_cols];
            const uint8_t code = e4m3_from_f32(x[r * m->cols + c] / scale);
            m->codes[r * m->cols + c] = code;
            m->numbers[r * m->cols + c] = (float)(value_of(code) * (double)scale);
        }
}

static struct safetensors_source *add(struct safetensors_source *s, const char *name,
                                      const char *end, enum dtype dt, const void *data)
{
    snprintf(s->name, sizeof s->name, "%s", test_text("%s%s", name, end));
    s->dt = dt;
    s->tag = data;
    return s;
}

// Writes the model with its layers' matrices in that form; the i-th of them is tensor i of
// `sources`, of which there are *n_sources. How many there are.
static int write_form(const char *model, const struct form *f, bool powers, const char *folder,
                      struct safetensors_source *sources, int *n_sources, struct matrix *matrices)
{
    struct safetensors *set = tensors_of(model);
    const int n = tensor_sources(set, sources);
    static const float input = 0.5f;
    json_t *config = json_of_file(test_path(model, "config.json"));
    int end = n, changed = 0;
    for (int i = 0; i < n; i++) {
        struct safetensors_source *s = &sources[i];
        matrices[i] = (struct matrix){.rows = s->shape[0], .cols = s->shape[1]};
        if (s->n_dims != 2 || !strstr(s->name, "proj")) continue;
        struct matrix *m = &matrices[i];
        quantise(s->tag, f, powers, m);
        s->dt = DT_E4M3;
        s->tag = m->codes;
        struct safetensors_source *scale =
            add(&sources[end++], s->name, f->scales, f->dt, m->scales);
        scale->n_dims = f->n_dims;
        scale->shape[0] = f->rows || f->n_dims == 1 ? m->n_scales / m->across : 1;
        scale->shape[1] = m->across;
        const char *layer = test_text("%.*s", (int)(strlen(s->name) - strlen("weight")), s->name);
        add(&sources[end], layer, "input_scale", DT_F32, &input)->n_dims = 0;
        end++;
        changed++;
    }
    json_object_set_new(config, "quantization_config", json_quoted(f->quantization));
    assert_ok(json_write_file(test_path(folder, "config.json"), 0644, config));
    tensors_write(folder, sources, end);
    *n_sources = end;
    return changed;
}

static void compare(const struct loaded *m, const struct safetensors_source *sources, int n,
                    const struct matrix *matrices)
{
    int compared = 0;
    for (int i = 0; i < n; i++) {
        const struct matrix *want = &matrices[i];
        if (sources[i].dt != DT_E4M3) continue;
        const struct weight_tensor *t = weights_find(m->weights, sources[i].name);
        assert_non_null(t);
        assert_true(t->n == want->rows * want->cols);
        float *have = test_keep(malloc((size_t)t->n * sizeof *have));
        assert_ok(weights_read(m->weights, m->dev, (int)(t - m->weights->tensors), have));
        for (int64_t k = 0; k < t->n; k++) {
            float x = want->numbers[k];
            if (m->weights->dt == DT_BF16) x = f32_from_bf16(bf16_from_f32(x));
            assert_true(have[k] == x);
        }
        compared++;
    }
    assert_true(compared >= 8);
}

// llama3: heads of 8; qwen3-moe: an expert's matrix by itself; phi3: queries, keys and values are
// one; deepseek-v3: latent attention, sizes that no block divides.
static const char *const models[] = {"llama3", "qwen3-moe", "phi3", "deepseek-v3"};

TEST(numbers_are_codes_times_scales)
{
    static struct safetensors_source sources[MAX_TENSORS];
    static struct matrix matrices[MAX_TENSORS];
    for (size_t k = 0; k < sizeof models / sizeof *models; k++)
        for (int i = 0; i < FORMS; i++) {
            const char *folder = test_folder();
            int n;
            assert_true(write_form(test_golden(models[k]), &forms[i], false, folder, sources, &n,
                                   matrices) > 0);
            struct loaded *m = loaded_of(folder, i % 2 ? DT_BF16 : DT_F32);
            assert_true(m->config->stored == STORED_FP8);
            compare(m, sources, n, matrices);
            assert_null(json_object_get(m->config->source, "quantization_config"));
        }
}

// A reload into a model that is of an ordinary folder.
TEST(checked_for_an_ordinary_model)
{
    static struct safetensors_source sources[MAX_TENSORS];
    static struct matrix matrices[MAX_TENSORS];
    const char *folder = test_folder();
    int n;
    write_form(test_golden("llama3"), &forms[0], false, folder, sources, &n, matrices);
    assert_fails(weights_check(loaded_of(test_golden("llama3"), DT_F32)->weights, folder),
                 ST_UNSUPPORTED, "with /reload and --start-from that of the model's own folder");
}

// An older modelopt says so in a file beside config.json.
TEST(modelopt_in_a_file_of_its_own)
{
    static struct safetensors_source sources[MAX_TENSORS];
    static struct matrix matrices[MAX_TENSORS];
    const char *folder = test_folder();
    int n;
    write_form(test_golden("llama3"), &forms[FORMS - 1], false, folder, sources, &n, matrices);
    json_t *config = json_of_file(test_path(folder, "config.json"));
    json_object_del(config, "quantization_config");
    assert_ok(json_write_file(test_path(folder, "config.json"), 0644, config));
    struct loaded m;
    assert_fails(loaded_open(folder, DT_F32, &m), ST_UNSUPPORTED,
                 "is F8_E4M3; weights must be F32, BF16 or F16, and matrices F8_E4M3 where "
                 "config.json has the quantization_config");
    loaded_close(&m);
    test_put(folder, "hf_quant_config.json",
             "{\"producer\":{\"name\":\"modelopt\"},\"quantization\":{\"quant_algo\":\"FP8\","
             "\"kv_cache_quant_algo\":null,\"exclude_modules\":[\"lm_head\"]}}");
    compare(loaded_of(folder, DT_F32), sources, n, matrices);
    test_put(folder, "hf_quant_config.json", "{\"quantization\":{\"quant_algo\":\"NVFP4\"}}");
    struct model_config *c;
    assert_fails(model_config_load(folder, &c), ST_UNSUPPORTED,
                 "quant_method \"modelopt\" with quant_algo NVFP4 is not supported");
}

// A rank's slice of every matrix is that of the whole.
TEST(shards_read_their_slices)
{
    static struct safetensors_source sources[MAX_TENSORS];
    static struct matrix matrices[MAX_TENSORS];
    const char *folder = test_folder();
    int n;
    write_form(test_golden("llama3"), &forms[0], false, folder, sources, &n, matrices);
    struct loaded *whole = loaded_of(folder, DT_F32);
    for (int rank = 0; rank < 2; rank++) {
        struct loaded m;
        loaded_config(folder, &m);
        assert_ok(model_config_shard(m.config, (struct shard){rank, 2}));
        loaded_zeros(&m, DT_F32);
        assert_ok(weights_load(m.weights, m.dev, folder));
        for (int i = 0; i < m.weights->n_tensors; i++) {
            const struct weight_tensor *t = &m.weights->tensors[i];
            float *have = test_keep(malloc((size_t)t->n * sizeof *have)),
                  *want = test_keep(malloc((size_t)t->n * sizeof *want)),
                  *all = test_keep(malloc((size_t)whole->weights->tensors[i].n * sizeof *all));
            assert_ok(weights_read(m.weights, m.dev, i, have));
            assert_ok(weights_read(whole->weights, whole->dev, i, all));
            shard_take(t, all, sizeof *all, want);
            assert_memory_equal(have, want, (size_t)t->n * sizeof *have);
        }
        loaded_close(&m);
    }
}

// With fp8-weights: a power of two keeps the folder's numbers, and else what was changed is told.
TEST(what_the_twin_makes_of_them)
{
    static struct safetensors_source sources[MAX_TENSORS];
    static struct matrix matrices[MAX_TENSORS];
    char words[256];
    for (int powers = 0; powers < 2; powers++) {
        const char *folder = test_folder();
        int n;
        const int changed =
            write_form(test_golden("llama3"), &forms[0], powers, folder, sources, &n, matrices);
        struct loaded m;
        loaded_config(folder, &m);
        m.config->quantization = QUANTIZATION_FP8_WEIGHTS;
        loaded_zeros(&m, DT_BF16);
        assert_ok(weights_load(m.weights, m.dev, folder));
        compare(&m, sources, n, matrices);
        assert_int_equal(m.weights->n_rounded, powers ? 0 : changed);
        assert_true(weights_describe_stored(m.weights, words, sizeof words));
        assert_contains(words, powers ? "multiplied as they are: all scales are powers of two"
                                      : test_text("%d of its FP8 matrices have scales", changed));
        assert_true(powers ? m.weights->rounding == 0
                           : m.weights->rounding > 0.01 && m.weights->rounding < 0.04);
        int rows_off = 0;
        for (int i = 0; i < n; i++) {
            if (sources[i].dt != DT_E4M3) continue;
            const struct weight_tensor *t = weights_find(m.weights->twin, sources[i].name);
            const struct matrix *want = &matrices[i];
            const uint8_t *codes;
            const int8_t *scales;
            weights_twin_tensor(m.weights->twin, (int)(t - m.weights->twin->tensors), &codes,
                                &scales);
            for (int64_t r = 0; r < want->rows; r++) {
                bool off = false;
                for (int64_t c = 0; c < want->cols; c++)
                    off |= want->numbers[r * want->cols + c] !=
                           f32_from_e4m3(codes[r * want->cols + e4m3_place(c, want->cols)]) *
                               e4m3_factor(scales[r]);
                rows_off += off;
            }
        }
        assert_true(powers ? rows_off == 0 : rows_off > 100);
        loaded_close(&m);
    }
}

TEST(saved_as_ordinary_weights)
{
    static struct safetensors_source sources[MAX_TENSORS];
    static struct matrix matrices[MAX_TENSORS];
    const char *folder = test_folder(), *copy = test_folder();
    int n;
    write_form(test_golden("llama3"), &forms[1], false, folder, sources, &n, matrices);
    struct loaded *m = loaded_of(folder, DT_BF16);
    assert_ok(weights_save(m->weights, m->dev, copy, DT_BF16));
    assert_ok(json_write_file(test_path(copy, "config.json"), 0644, m->config->source));
    struct loaded *again = loaded_of(copy, DT_BF16);
    assert_true(again->config->stored == STORED_PLAIN);
    assert_memory_equal(m->weights->base, again->weights->base, m->weights->canary_offset);
}

static struct safetensors_source *source_of(struct safetensors_source *all, int n, const char *name)
{
    for (int i = 0; i < n; i++)
        if (strcmp(all[i].name, name) == 0) return &all[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

#define SCALES "model.layers.1.mlp.down_proj.weight_scale_inv"

static void assert_refused(const char *folder, const struct safetensors_source *sources, int n,
                           enum status code, const char *words)
{
    struct loaded m;
    tensors_write(folder, sources, n);
    assert_fails(loaded_open(folder, DT_F32, &m), code, words);
    loaded_close(&m);
}

TEST(broken_tensors_are_refused)
{
    static struct safetensors_source sources[MAX_TENSORS];
    static struct matrix matrices[MAX_TENSORS];
    static float broken[64];
    const char *folder = test_folder();
    int n;
    write_form(test_golden("llama3"), &forms[0], false, folder, sources, &n, matrices);
    struct safetensors_source *s = source_of(sources, n, SCALES), kept = *s;
    memcpy(broken, s->tag, (size_t)(s->shape[0] * s->shape[1]) * sizeof(float));
    broken[1] = NAN;
    s->tag = broken;
    assert_refused(folder, sources, n, ST_FORMAT, SCALES " has a scale that is no number");
    *s = kept;
    s->shape[1]--;
    assert_refused(folder, sources, n, ST_MISMATCH, SCALES " has ");
    *s = kept;
    s->dt = DT_I32;
    assert_refused(folder, sources, n, ST_UNSUPPORTED, SCALES " is I32; scales must be");
    *s = kept;
    snprintf(s->name, sizeof s->name, "model.layers.9.mlp.down_proj.weight_scale_inv");
    assert_refused(folder, sources, n, ST_NOT_FOUND,
                   "neither model.layers.1.mlp.down_proj.weight_scale nor");
    *s = kept; // a scale of what is not there
    sources[n] = *s;
    snprintf(sources[n].name, sizeof s->name, "model.layers.9.mlp.down_proj.weight_scale_inv");
    assert_refused(folder, sources, n + 1, ST_MISMATCH, "is not part of a");
}

TEST_EACH(other_quantisations_are_refused, "fp8_folders")
{
    json_t *config = json_of_file(test_path(test_golden("llama3"), "config.json"));
    struct model_config *c = NULL;
    json_object_set(config, "quantization_config",
                    json_object_get(json_array_get(cases, i), "quantization"));
    assert_fails(model_config_from_json("config.json", config, &c), row_status(cases, i, "code"),
                 row_text(cases, i, "words"));
    assert_null(c);
}
