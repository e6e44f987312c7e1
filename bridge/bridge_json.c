/* bridge_json.c: fields that must be there, each fault named by place and key. No state. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/bridge_json.h"
#include "common/base/json.h"

#include <stdlib.h>
#include <string.h>

int bridge_device_number(const char *device)
{
    return strncmp(device, "cuda:", 5) == 0 ? (int)strtol(device + 5, NULL, 10) : -1;
}

static enum status missing(const char *where, const char *key)
{
    return status_fail(ST_FORMAT, "%s: \"%s\" is missing", where, key);
}

enum status bridge_need_string(const char *where, const json_t *object, const char *key, char *ret,
                               size_t size)
{
    const char *text = NULL;
    enum status st = json_get_string(where, object, key, &text);
    if (st != ST_OK) return st;
    if (!text) return missing(where, key);
    size_t len = strlen(text);
    if (len == 0 || len >= size)
        return status_fail(ST_FORMAT, "%s: \"%s\" has %zu characters; it must have 1 to %zu", where,
                           key, len, size - 1);
    memcpy(ret, text, len + 1);
    return ST_OK;
}

enum status bridge_need_int(const char *where, const json_t *object, const char *key, int64_t min,
                            int64_t max, int64_t *ret)
{
    if (!json_has(object, key)) return missing(where, key);
    return json_get_int(where, object, key, min, max, ret);
}

enum status bridge_need_value(const char *where, const json_t *object, const char *key,
                              json_type type, const char *words, const json_t **ret)
{
    const json_t *value = json_object_get(object, key);
    if (!value) return missing(where, key);
    if (json_typeof(value) != type)
        return status_fail(ST_FORMAT, "%s: \"%s\" must be %s", where, key, words);
    *ret = value;
    return ST_OK;
}

enum status bridge_need_dtype(const char *where, const json_t *object, enum dtype *ret)
{
    char name[24];
    enum status st = bridge_need_string(where, object, "dtype", name, sizeof name);
    if (st != ST_OK) return st;
    int dt = dtype_from_name(name);
    if (dt < 0 || strcmp(name, dtype_torch_name((enum dtype)dt)) != 0)
        return status_fail(ST_FORMAT,
                           "%s: dtype \"%s\" is unknown; torch.float32, torch.bfloat16 ...", where,
                           name);
    *ret = (enum dtype)dt;
    return ST_OK;
}
