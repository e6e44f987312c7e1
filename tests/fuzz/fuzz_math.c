/* fuzz_math.c: any text as a data set's answer and a completion: what is found in them is parsed
 * and compared. A first byte says where one ends and the other begins. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/reward/math/math.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct math_node *read(const char *text, size_t len)
{
    struct bytes found[MATH_ANSWERS] = {{0}};
    struct math_node *node = NULL;
    char *copy = strndup(text, len);
    if (!copy) abort();
    const int n = math_answers(copy, found);
    if (n > MATH_ANSWERS) abort();
    for (int i = 0; i < n; i++) {
        if (!node) node = math_parse(bytes_text(&found[i]), found[i].len);
        bytes_release(&found[i]);
    }
    if (!node) node = math_parse(copy, strlen(copy));
    free(copy);
    return node;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2) return 0;
    const size_t half = data[0] < size - 1 ? data[0] : size - 1;
    struct math_node *wanted = read((const char *)data + 1, half),
                     *got = read((const char *)data + 1 + half, size - 1 - half);
    if (wanted && got) {
        math_same(wanted, got);
        math_same(got, wanted);
    }
    free(wanted);
    free(got);
    return 0;
}
