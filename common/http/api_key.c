/* api_key.c: reading it is all. */
#include "common/http/api_key.h"
#include "common/base/file.h"
#include "common/base/log.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum status api_key_read(const char *option, const char *path, char **ret)
{
    struct bytes text = BYTES_INIT;
    struct stat info;
    enum status st;
    CHECK(file_read(path, 64 << 10, &text));
    const char *start = bytes_text(&text);
    while (*start == ' ' || *start == '\t') start++;
    size_t n = strcspn(start, "\r\n");
    while (n > 0 && isspace((unsigned char)start[n - 1])) n--;
    for (size_t i = 0; i < n; i++)
        if (!isgraph((unsigned char)start[i]))
            FAIL(ST_INVALID, "%s %s: the first line must be one word of plain ASCII", option, path);
    if (n < 8) FAIL(ST_INVALID, "%s %s: the key must have 8 characters or more", option, path);
    if (stat(path, &info) == 0 && (info.st_mode & 077))
        log_warn("%s %s can be read by others: chmod 600 it", option, path);
    *ret = strndup(start, n);
    if (!*ret) st = status_fail(ST_NO_MEMORY, "out of memory");
out:
    bytes_release(&text);
    return st;
}
