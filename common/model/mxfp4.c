/* mxfp4.c: see weights_impl.h. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/weights_impl.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define BLOCK     32 // values with one scale
#define NAN_SCALE 255

static const struct safetensors_entry *find(const struct safetensors *set, const char *name,
                                            const char *end)
{
    char whole[200];
    snprintf(whole, sizeof whole, "%s%s", name, end);
    return safetensors_find(set, whole);
}

static void read_row(const struct safetensors_entry *e, int64_t row, int64_t first, int64_t n,
                     void *ret)
{
    static const float values[16] = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                                     -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    const int64_t runs = e->shape[2]; // with a scale each
    const uint8_t *blocks = (const uint8_t *)e->data + row * runs * (BLOCK / 2),
                  *scales = (const uint8_t *)e->more + row * runs;
    for (int64_t i = 0; i < n; i++) {
        const int64_t c = first + i;
        const int code = c % 2 ? blocks[c / 2] >> 4 : blocks[c / 2] & 15;
        ((uint16_t *)ret)[i] = bf16_from_f32(ldexpf(values[code], scales[c / BLOCK] - 127));
    }
}

bool mxfp4_find(const struct safetensors *set, const char *name, struct safetensors_entry *ret)
{
    const struct safetensors_entry *blocks = find(set, name, "_blocks"),
                                   *scales = find(set, name, "_scales");
    if (!blocks || !scales) return false;
    if (!ret) return true;
    *ret = *blocks;
    ret->dt = DT_BF16;
    ret->read = read_row;
    ret->more = scales->data;
    return true;
}

static enum status check_one(const struct safetensors_entry *e, int n_dims, const int64_t shape[3])
{
    const int64_t want[4] = {shape[0], shape[2], shape[1] / BLOCK, BLOCK / 2};
    bool same = e->n_dims == n_dims && shape[1] % BLOCK == 0;
    for (int d = 0; same && d < n_dims; d++) same = e->shape[d] == want[d];
    if (same && e->dt == DT_U8) return ST_OK;
    return status_fail(ST_MISMATCH,
                       "%s: tensor %s must be U8 of shape (%lld, %lld, %lld%s), as MXFP4 of what "
                       "config.json calls for",
                       e->file, e->name, (long long)want[0], (long long)want[1], (long long)want[2],
                       n_dims == 4 ? ", 16" : "");
}

enum status mxfp4_check(const struct safetensors *set, const char *name, const int64_t shape[3])
{
    const struct safetensors_entry *scales = find(set, name, "_scales");
    enum status st = check_one(find(set, name, "_blocks"), 4, shape);
    if (st == ST_OK) st = check_one(scales, 3, shape);
    if (st == ST_OK && memchr(scales->data, NAN_SCALE, scales->bytes))
        st = status_fail(ST_FORMAT,
                         "%s: tensor %s has a scale of %d, which stands for no number: the folder "
                         "is broken, or was converted wrongly; take it from where it was published",
                         scales->file, scales->name, NAN_SCALE);
    return st;
}

bool mxfp4_names(const char *name, const char *tensor)
{
    const size_t len = strlen(name);
    return strncmp(name, tensor, len) == 0 &&
           (strcmp(tensor + len, "_blocks") == 0 || strcmp(tensor + len, "_scales") == 0);
}
