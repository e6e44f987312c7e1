/* test_generated.c: tests/support/generated.c makes the numbers of tests/golden/generated.py (these
 * are NumPy's), and the projections of a tensor show what happens to any of its entries. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/safetensors.h"
#include "tests/support/generated.h"
#include "tests/support/support.h"

TEST(bits_are_numpys)
{
    static const uint64_t want[] = {0x8eadf46921f1e6f3, 0x9f9dae31c1f4eff6, 0xc29a298e83d59350};
    const uint64_t of = generated_state("10/a");
    for (int i = 0; i < 3; i++) assert_int_equal(generated_bits(of, i), want[i]);
    assert_int_equal(generated_bits(of, 99999), 0x38fbd32cb74c84b3);
}

static struct safetensors *made(const char *recipe)
{
    const char *folder = test_folder();
    struct safetensors *set;
    test_write(test_path(folder, "weights.txt"), recipe, strlen(recipe));
    assert_ok(generated_write(folder, folder));
    assert_ok(safetensors_open(folder, &set));
    return set;
}

TEST(weights_are_numpys)
{
    static const float norm[] = {0x1.1181dap+0f, 0x1.cbd26cp-1f, 0x1.175cf2p+0f, 0x1.0f5294p+0f};
    static const float last[] = {-0x1.223d6p-4f, 0x1.176a18p-6f};
    static const uint8_t codes[] = {130, 68, 241, 190, 152, 182, 84, 78};
    static const uint8_t scales[] = {121, 120, 122, 122, 121, 122, 120, 120};
    struct safetensors *set = made("model.safetensors 7\nw f32 1.0 0.1 4\nu u8 0 255 2 4\n"
                                   "copy f32 0.0 0.08 2 3 =7/w\nv u8 120 122 8 =7/u\n");
    assert_memory_equal(safetensors_find(set, "w")->data, norm, sizeof norm);
    assert_memory_equal(safetensors_find(set, "u")->data, codes, sizeof codes);
    assert_memory_equal(safetensors_find(set, "v")->data, scales, sizeof scales);
    const struct safetensors_entry *copy = safetensors_find(set, "copy");
    assert_int_equal(copy->n_dims, 2);
    assert_int_equal(copy->shape[1], 3);
    assert_memory_equal((const float *)copy->data + 4, last, sizeof last);
    safetensors_free(set);
}

static struct projection projected(const float *x, int n)
{
    struct projection p;
    projection_init(&p, "w");
    for (int i = 0; i < n; i++) projection_add(&p, i, (double)x[i]);
    return p;
}

TEST(projections_are_numpys_and_see_every_entry)
{
    static const float want[] = {0.6804093f,  -0.16959807f, -0.94024646f, 0.6778171f, 0.76083815f,
                                 -3.7267046f, -0.37569344f, -0.82242393f, 2.4562042f};
    struct safetensors *set = made("model.safetensors 7\nw f32 0.0 0.08 1000\n");
    float x[1000];
    memcpy(x, safetensors_find(set, "w")->data, sizeof x);
    const struct projection p = projected(x, 1000);
    for (int j = 0; j < GENERATED_SIGNS; j++) assert_float_equal(p.sum[j], (double)want[j], 1e-6);
    assert_float_equal(sqrt(p.squares), (double)want[GENERATED_SIGNS], 1e-6);
    for (int i = 0; i < 1000; i += 37) { // one entry that is off is seen in full by each
        const float was = x[i];
        x[i] += 0.01f;
        const struct projection off = projected(x, 1000);
        for (int j = 0; j < GENERATED_SIGNS; j++)
            assert_float_equal(fabs(off.sum[j] - p.sum[j]), 0.01, 1e-6);
        x[i] = was;
    }
    for (int i = 0; i < 1000; i++) x[i] = -x[i];
    const struct projection other_sign = projected(x, 1000);
    for (int j = 0; j < GENERATED_SIGNS; j++)
        assert_float_equal(other_sign.sum[j], -p.sum[j], 1e-6);
    safetensors_free(set);
}

TEST(damaged_lists_are_refused)
{
    static const char *const lists[] = {"", "model.safetensors",
                                        "model.safetensors 7\nw f32 0.0 2\n"};
    const char *folder = test_folder();
    for (int i = 0; i < 3; i++) {
        test_write(test_path(folder, "weights.txt"), lists[i], strlen(lists[i]));
        assert_status(generated_write(folder, folder), ST_FORMAT);
    }
    assert_false(file_exists(test_path(folder, "model.safetensors")));
}
