/* names.c: see names.h. */
#include "common/base/names.h"

#include <string.h>

int name_find(const char *const names[], const char *text)
{
    for (int i = 0; names[i]; i++)
        if (strcmp(names[i], text) == 0) return i;
    return -1;
}

void names_list(const char *const names[], struct bytes *to)
{
    for (int i = 0; names[i]; i++) bytes_printf(to, "%s%s", i ? "|" : "", names[i]);
}

enum status name_parse(const char *const names[], const char *text, int *ret)
{
    const int value = name_find(names, text);
    if (value < 0) {
        struct bytes list = BYTES_INIT;
        names_list(names, &list);
        status_fail(ST_INVALID, "'%.200s' is not one of %s", text, bytes_text(&list));
        bytes_release(&list);
        return ST_INVALID;
    }
    *ret = value;
    return ST_OK;
}
