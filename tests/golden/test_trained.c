/* test_trained.c: a really trained model (stories260K of the shared test data, where it is at hand)
 * must tell its story: 200 greedy tokens, one by one over the paged cache. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/reference.h"
#include "tests/support/support.h"

static int read_ids(const json_t *object, const char *key, int32_t *ret, int max)
{
    const json_t *list = json_object_get(object, key);
    int n = (int)json_array_size(list);
    assert_in_range(n, 1, max);
    for (int i = 0; i < n; i++)
        ret[i] = (int32_t)json_integer_value(json_array_get(list, (size_t)i));
    return n;
}

TEST(stories_are_told)
{
    char folder[PATH_MAX];
    SCOPED(reference_close) struct reference r;
    json_t *expected;
    int32_t prompt[16], want[512], have[512];
    test_data_folder("models/stories260K/hf", folder);
    assert_ok(json_read_file(test_path(folder, "expected_greedy.json"), 1 << 20, &expected));
    int n_prompt = read_ids(expected, "prompt_ids", prompt, 16),
        n = read_ids(expected, "greedy_ids", want, 512);
    assert_int_equal(n, 200);
    reference_open(folder, "cpu", &r);
    reference_greedy(&r, prompt, n_prompt, n, have);
    for (int i = 0; i < n; i++)
        if (have[i] != want[i]) fail_msg("token %d is %d, expected %d", i, have[i], want[i]);
    json_decref(expected);
}
