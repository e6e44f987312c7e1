/* file.c: whole files: read, map, write atomically, make and remove folders. No state of its own;
 * any thread. Every descriptor is close-on-exec, and what is not a regular file is refused before
 * it is read, so that a FIFO in the place of a file cannot hang a caller. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

// The sentence for a system call that failed on `path`; `doing` is "read", "create".
static enum status io_fail(const char *doing, const char *path)
{
    int error = errno;
    enum status code = error == ENOENT ? ST_NOT_FOUND : error == ENOMEM ? ST_NO_MEMORY : ST_IO;
    return status_fail(code, "cannot %s %s: %s", doing, path, strerror(error));
}

enum status file_check_link(const char *path)
{
    char target[PATH_MAX];
    ssize_t n = readlink(path, target, sizeof target);
    if (n < 0 || access(path, F_OK) == 0 || errno != ENOENT) return ST_OK;
    return status_fail(ST_IO,
                       "%s is a link to %.*s, which is not there (a download that was cut off?); "
                       "fetch the file anew, or remove the link",
                       path, (int)n, target);
}

static enum status open_regular(const char *path, int *ret_fd, size_t *ret_len)
{
    // O_NONBLOCK so that opening a FIFO does not wait for a writer; it means nothing to a file
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT && file_check_link(path) != ST_OK) return ST_IO;
    if (fd < 0 && (errno == ENOTDIR || errno == ENAMETOOLONG)) // nothing can be there
        return status_fail(ST_NOT_FOUND, "cannot open %s: %s", path, strerror(errno));
    if (fd < 0) return io_fail("open", path);
    struct stat info;
    enum status st = ST_OK;
    if (fstat(fd, &info) != 0)
        st = io_fail("stat", path);
    else if (!S_ISREG(info.st_mode))
        st = status_fail(ST_IO, "%s is %s, not a regular file", path,
                         S_ISDIR(info.st_mode) ? "a folder" : "a special file");
    if (st != ST_OK) {
        close(fd);
        return st;
    }
    *ret_fd = fd;
    *ret_len = (size_t)info.st_size;
    return ST_OK;
}

enum status file_check_owner(int fd, const char *path)
{
    struct stat info;
    if (fstat(fd, &info) != 0) return io_fail("stat", path);
    if (info.st_uid == geteuid() || info.st_uid == 0) return ST_OK;
    return status_fail(
        ST_MISMATCH,
        "%s belongs to user %u, and this process runs as user %u: it is not trusted; "
        "run both as one user, or name another file",
        path, (unsigned)info.st_uid, (unsigned)geteuid());
}

// Reads to the end, not to `size`: files of /proc say 0, and a file may grow meanwhile. The one
// byte more lets a file of the expected size end on its first empty read. Stops behind `max` bytes.
static enum status read_to_end(int fd, const char *path, size_t size, size_t max,
                               struct bytes *content)
{
    size_t room = size + 1;
    while (content->len <= max) {
        if (!bytes_reserve(content, room)) break;
        ssize_t n = read(fd, content->data + content->len, room);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return io_fail("read", path);
        if (n == 0) break;
        content->len += (size_t)n;
        room = content->len < size ? size + 1 - content->len : 4096;
    }
    if (content->data) content->data[content->len] = 0;
    return bytes_status(content);
}

// ret_left_out: see file_read_start(); NULL: a larger file is an error.
static enum status read_file(const char *path, size_t max, bool own, struct bytes *ret,
                             int64_t *ret_left_out)
{
    int fd = -1;
    size_t size = 0;
    struct bytes content = BYTES_INIT;
    enum status st;
    CHECK(open_regular(path, &fd, &size));
    if (own) CHECK(file_check_owner(fd, path));
    if (size <= max || ret_left_out)
        CHECK(read_to_end(fd, path, size < max ? size : max, max, &content));
    const size_t len = content.len;
    if (!ret_left_out && (size > max || len > max))
        FAIL(ST_FORMAT, "%s is larger than the %zu bytes allowed for it", path, max);
    if (len > max) { // the last line's end within them
        const char *end = memrchr(content.data, '\n', max);
        content.len = end ? (size_t)(end + 1 - content.data) : 0;
        content.data[content.len] = 0;
    }
    if (ret_left_out) *ret_left_out = (int64_t)((size > len ? size : len) - content.len);
    bytes_release(ret);
    *ret = content;
    content = (struct bytes)BYTES_INIT;
out:
    bytes_release(&content);
    if (fd >= 0) close(fd);
    return st;
}

enum status file_read(const char *path, size_t max, struct bytes *ret)
{
    return read_file(path, max, false, ret, NULL);
}

enum status file_read_own(const char *path, size_t max, struct bytes *ret)
{
    return read_file(path, max, true, ret, NULL);
}

enum status file_read_start(const char *path, size_t max, struct bytes *ret, int64_t *ret_left_out)
{
    return read_file(path, max, false, ret, ret_left_out);
}

enum status file_each_line(const char *path, file_line_fn take, void *context)
{
    int64_t at = 0;
    return file_lines_from(path, &at, take, context);
}

enum status file_lines_from(const char *path, int64_t *at, file_line_fn take, void *context)
{
    char *line = NULL;
    size_t room = 0, size;
    ssize_t len;
    int fd = -1;
    enum status st = open_regular(path, &fd, &size);
    FILE *file = st == ST_OK ? fdopen(fd, "r") : NULL;
    if (st == ST_OK && !file) {
        st = io_fail("read", path);
        close(fd);
    }
    if (!file) return st;
    if (*at > 0 && fseeko(file, (off_t)*at, SEEK_SET) != 0) st = io_fail("read", path);
    while (st == ST_OK && (len = getline(&line, &room, file)) > 0) {
        if (line[len - 1] != '\n') break; // the last
        *at += len;
        CHECK(take(context, line, (size_t)len));
    }
    if (ferror(file)) st = io_fail("read", path);
out:
    free(line);
    fclose(file);
    return st;
}

// The folder of `path`, for fsync: "a/b" -> "a", "b" -> ".", "/b" -> "/". NULL for want of memory.
static char *folder_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    if (!slash) return strdup(".");
    return slash == path ? strdup("/") : strndup(path, (size_t)(slash - path));
}

enum status file_sync_folder(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return io_fail("open folder", path);
    enum status st = ST_OK;
    // EINVAL: a file system whose folders need no fsync
    if (fsync(fd) != 0 && errno != EINVAL) st = io_fail("fsync folder", path);
    close(fd);
    return st;
}

enum status file_sync_parent(const char *path)
{
    char *folder = folder_of(path);
    if (!folder) return status_fail(ST_NO_MEMORY, "out of memory for the folder of %s", path);
    enum status st = file_sync_folder(folder);
    free(folder);
    return st;
}

enum status file_write_all(int fd, const char *path, const void *data, size_t len)
{
    const char *at = data;
    while (len > 0) {
        ssize_t n = write(fd, at, len);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return io_fail("write", path);
        at += n;
        len -= (size_t)n;
    }
    return ST_OK;
}

#define TEMPORARY        ".tmp."
#define TEMPORARY_DIGITS 6

static bool is_alive(long pid)
{
    return pid > 0 && (kill((pid_t)pid, 0) == 0 || errno != ESRCH);
}

static unsigned random_bits(int attempt)
{
    unsigned bits = 0;
    if (getrandom(&bits, sizeof bits, 0) < 0) bits = (unsigned)getpid() + (unsigned)attempt;
    return bits & 0xffffff;
}

// A new file named by this process, or where it has one already at random. mkostemp() would make it
// 0600, and what the umask leaves of the mode could then only be guessed.
enum status file_replace_begin(const char *path, unsigned mode, struct file_replacement *ret)
{
    for (int attempt = 0; attempt < 100; attempt++) {
        const unsigned bits = attempt == 0 ? (unsigned)getpid() : random_bits(attempt);
        char *name;
        if (asprintf(&name, "%s" TEMPORARY "%06x", path, bits) < 0)
            return status_fail(ST_NO_MEMORY, "out of memory while writing %s", path);
        int fd = open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, (mode_t)mode);
        if (fd >= 0) {
            *ret = (struct file_replacement){name, fd};
            return ST_OK;
        }
        free(name);
        if (errno != EEXIST) break;
    }
    return io_fail("create a file beside", path);
}

int file_sweep_temporaries(const char *path)
{
    char *folder = folder_of(path);
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    size_t len = strlen(name), mark = strlen(TEMPORARY);
    DIR *dir = folder ? opendir(folder) : NULL;
    int n = 0;
    for (const struct dirent *entry; dir && (entry = readdir(dir));) {
        const size_t all = strlen(entry->d_name), tail = mark + TEMPORARY_DIGITS;
        const char *remaining = entry->d_name + all - tail;
        if (all <= tail || strncmp(entry->d_name, name, len) != 0 || (len && all != len + tail) ||
            strncmp(remaining, TEMPORARY, mark) != 0 ||
            strspn(remaining + mark, "0123456789abcdef") != TEMPORARY_DIGITS ||
            is_alive(strtol(remaining + mark, NULL, 16)))
            continue;
        n += unlinkat(dirfd(dir), entry->d_name, 0) == 0;
    }
    if (dir) closedir(dir);
    free(folder);
    return n;
}

// The process of a name; 0: it is of none.
static long owner_of(const char *name, const char *prefix, const char *suffix)
{
    const size_t len = strlen(name), end = strlen(suffix);
    if (strncmp(name, prefix, strlen(prefix)) != 0 || len < strlen(prefix) + end ||
        strcmp(name + len - end, suffix) != 0 || strstr(name, TEMPORARY))
        return 0;
    size_t at = len - end;
    while (at > strlen(prefix) && name[at - 1] >= '0' && name[at - 1] <= '9') at--;
    return at > 0 && (name[at - 1] == '.' || name[at - 1] == '-') ? strtol(name + at, NULL, 10) : 0;
}

// By a process that this one cannot see, of another container say.
static bool is_held(int folder, const char *name)
{
    const int fd = openat(folder, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    const bool held = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (fd >= 0) close(fd);
    return held;
}

void file_sweep_owned(const char *folder, const char *prefix, const char *suffix)
{
    DIR *dir = opendir(folder);
    for (const struct dirent *entry; dir && (entry = readdir(dir));) {
        struct stat info;
        const long pid = owner_of(entry->d_name, prefix, suffix);
        if (pid <= 0 || is_alive(pid) || is_held(dirfd(dir), entry->d_name) ||
            fstatat(dirfd(dir), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0 ||
            info.st_uid != geteuid())
            continue;
        char path[PATH_ROOM]; // what cannot be removed is left as it is
        if (path_put(path, folder, "%s", entry->d_name) == ST_OK) file_remove_tree(path);
    }
    if (dir) closedir(dir);
}

enum status file_make_temporary_folder(const char *folder, const char *prefix, char ret[PATH_ROOM])
{
    file_sweep_owned(folder, prefix, "");
    for (int attempt = 0; attempt < 100; attempt++) {
        enum status st =
            path_put(ret, folder, "%s-%06x-%d", prefix, random_bits(attempt), (int)getpid());
        if (st != ST_OK) return st;
        if (mkdir(ret, 0700) == 0) { // held open, and locked, until the process ends
            const int fd = open(ret, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
            if (fd >= 0) flock(fd, LOCK_SH | LOCK_NB);
            return ST_OK;
        }
        if (errno != EEXIST) break;
    }
    return io_fail("make", ret);
}

enum status file_replace_end(const char *path, struct file_replacement *r, enum status st)
{
    if (st == ST_OK && fsync(r->fd) != 0) st = io_fail("write", path);
    if (close(r->fd) != 0 && st == ST_OK) st = io_fail("write", path);
    if (st == ST_OK && rename(r->temporary, path) != 0) st = io_fail("write", path);
    if (st != ST_OK) unlink(r->temporary);
    free(r->temporary);
    return st == ST_OK ? file_sync_parent(path) : st;
}

enum status file_write_atomic(const char *path, unsigned mode, const void *data, size_t len)
{
    struct file_replacement r;
    enum status st = file_replace_begin(path, mode, &r);
    return st == ST_OK ? file_replace_end(path, &r, file_write_all(r.fd, path, data, len)) : st;
}

enum status file_map_open(const char *path, struct file_map *ret)
{
    int fd = -1;
    size_t len = 0;
    enum status st = open_regular(path, &fd, &len);
    if (st != ST_OK) return st;
    void *data = NULL;
    if (len > 0) {
        data = mmap(NULL, len, PROT_READ, MAP_PRIVATE, fd, 0);
        if (data == MAP_FAILED) st = io_fail("map", path);
    }
    close(fd);
    if (st == ST_OK) *ret = (struct file_map){data, len};
    return st;
}

void file_map_release(struct file_map *map)
{
    if (!map) return;
    if (map->data) munmap((void *)(uintptr_t)map->data, map->len);
    *map = (struct file_map){NULL, 0};
}

bool file_exists(const char *path)
{
    struct stat info;
    return lstat(path, &info) == 0;
}

enum status file_make_folders(const char *path)
{
    char *copy = strdup(path);
    if (!copy) return status_fail(ST_NO_MEMORY, "out of memory while making folder %s", path);
    enum status st = ST_OK;
    for (char *p = copy; st == ST_OK && *p;) {
        while (*p == '/') p++;
        while (*p && *p != '/') p++;
        char kept = *p;
        *p = 0;
        struct stat info;
        if (mkdir(copy, 0755) == 0) {
            st = file_sync_parent(copy);
        } else {
            int error = errno == EEXIST ? ENOTDIR : errno; // a file stands in the way
            if (stat(copy, &info) != 0 || !S_ISDIR(info.st_mode)) {
                errno = error;
                st = io_fail("make folder", copy);
            }
        }
        *p = kept;
    }
    free(copy);
    return st;
}

static int remove_entry(const char *path, const struct stat *info, int type, struct FTW *walk)
{
    (void)info;
    (void)type;
    (void)walk;
    return remove(path) == 0 || errno == ENOENT ? 0 : -1;
}

enum status file_remove_tree(const char *path)
{
    // FTW_PHYS: a link is removed, never followed
    if (nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS) != 0 && errno != ENOENT)
        return io_fail("remove", path);
    return ST_OK;
}

enum status path_put(char ret[PATH_ROOM], const char *folder, const char *format, ...)
{
    size_t len = strlen(folder);
    char name[PATH_ROOM];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(name, sizeof name, format, args);
    va_end(args);
    const char *slash = len == 0 || folder[len - 1] == '/' ? "" : "/";
    if (n < 0 || (size_t)n >= sizeof name ||
        snprintf(ret, PATH_ROOM, "%s%s%s", folder, slash, name) >= PATH_ROOM)
        return status_fail(ST_INVALID, "%s/%s: the path is too long", folder, CUT(name, 100));
    return ST_OK;
}

bool file_exists_in(const char *folder, const char *name)
{
    char path[PATH_ROOM];
    return path_put(path, folder, "%s", name) == ST_OK && file_exists(path);
}

bool file_is_within(const char *path, const char *folder)
{
    char of[PATH_ROOM], in[PATH_ROOM];
    if (!realpath(path, of) || !realpath(folder, in)) return false;
    const size_t len = strlen(in);
    return strncmp(of, in, len) == 0 && (!of[len] || of[len] == '/');
}

enum status path_absolute(const char *path, char *ret, size_t size)
{
    char folder[PATH_ROOM] = "";
    if (path[0] != '/' && !getcwd(folder, sizeof folder))
        return status_fail(ST_IO, "the working folder has no path: %m");
    const int n = snprintf(ret, size, "%s%s%s", folder, folder[0] ? "/" : "", path);
    if (n < 0 || (size_t)n >= size)
        return status_fail(ST_INVALID, "%s: a path of more than %zu bytes", path, size - 1);
    return ST_OK;
}
