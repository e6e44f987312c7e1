/* api_key.c: see api_key.h. */
#include "common/http/api_key.h"
#include "common/base/file.h"
#include "common/base/log.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

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

enum status api_key_make(const char *option, const char *path, char **ret)
{
    uint64_t random[2];
    char text[64];
    enum status st;
    if (!file_exists(path)) {
        if (getrandom(random, sizeof random, 0) != sizeof random)
            return status_fail(ST_IO, "%s: the system gives no random bits for a key", path);
        snprintf(text, sizeof text, "tml-%016" PRIx64 "%016" PRIx64 "\n", random[0], random[1]);
        CHECK(file_write_atomic(path, 0600, text, strlen(text)));
    }
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) FAIL(ST_IO, "%s %s: %s", option, path, strerror(errno));
    st = file_check_owner(fd, path);
    close(fd);
    if (st == ST_OK) st = api_key_read(option, path, ret);
out:
    return st;
}
