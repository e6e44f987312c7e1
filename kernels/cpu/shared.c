/* shared.c: POSIX shared memory for the CPU backend. The name is the handle. The maker takes the
 * name exclusively and reserves every page at once, so that a full /dev/shm is an error here and
 * not a SIGBUS at the first write; its free unlinks the name. It holds a lock on it (flock), which
 * the kernel lets go when it dies: so another process can tell what a killed one left, whatever PID
 * namespace that was in. Openers check owner and size before they map. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu.h"
#include "common/base/file.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static enum status check_name(const char *name)
{
    if (name[0] == '/' && name[1] != '\0' && !strchr(name + 1, '/')) return ST_OK;
    return status_fail(ST_INVALID, "shared memory name \"%s\" is not \"/\" and a word", name);
}

static enum status map(int fd, struct shared_memory *memory)
{
    void *data = mmap(NULL, memory->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED)
        return status_fail(ST_NO_MEMORY, "shared memory %s: cannot map %zu bytes: %s",
                           memory->handle, memory->bytes, strerror(errno));
    cpu_huge_pages(data, memory->bytes);
    memory->data = data;
    return ST_OK;
}

static enum status reserve(int fd, const struct shared_memory *memory)
{
    int err;
    do {
        err = posix_fallocate(fd, 0, (off_t)memory->bytes);
    } while (err == EINTR);
    if (err == EOPNOTSUPP || err == EINVAL) err = ftruncate(fd, (off_t)memory->bytes) ? errno : 0;
    if (err == 0) return ST_OK;
    return status_fail(err == ENOSPC ? ST_NO_MEMORY : ST_IO,
                       "shared memory %s: cannot reserve %zu bytes in /dev/shm: %s%s",
                       memory->handle, memory->bytes, strerror(err),
                       err == ENOSPC ? " (remove what is left there, or mount it larger)" : "");
}

// A new segment, and its lock. Who looks for what the dead left may come between the two and take
// the name away: then there is another one to be made.
static int create_locked(const char *name)
{
    for (int attempt = 0; attempt < 10; attempt++) {
        struct stat held, named;
        int fd = shm_open(name, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
        if (fd < 0) return -1;
        const bool locked = flock(fd, LOCK_EX) == 0;
        int now_fd = locked ? shm_open(name, O_RDONLY | O_CLOEXEC, 0) : -1;
        const int err = errno;
        bool same = now_fd >= 0 && fstat(fd, &held) == 0 && fstat(now_fd, &named) == 0 &&
                    held.st_ino == named.st_ino;
        if (now_fd >= 0) close(now_fd);
        if (same) return fd;
        if (now_fd < 0 && (!locked || err != ENOENT)) { // it is still our own
            shm_unlink(name);
            close(fd);
            errno = err;
            return -1;
        }
        close(fd);
    }
    errno = EAGAIN;
    return -1;
}

enum status cpu_shared_create(struct device *dev, const char *name, struct shared_memory *memory)
{
    (void)dev;
    int n =
        snprintf(memory->handle, sizeof memory->handle, "%s%s", name[0] == '/' ? "" : "/", name);
    if (n < 0 || (size_t)n >= sizeof memory->handle)
        return status_fail(ST_INVALID, "shared memory name of %zu characters (at most %zu)",
                           strlen(name), sizeof memory->handle - 2);
    enum status st = check_name(memory->handle);
    if (st != ST_OK) return st;
    int fd = create_locked(memory->handle);
    if (fd < 0 && errno == EEXIST)
        return status_fail(ST_BUSY,
                           "shared memory %s exists already: another process made it, or one that "
                           "died left it; if so, remove /dev/shm%s",
                           memory->handle, memory->handle);
    if (fd < 0)
        return status_fail(ST_IO, "shared memory %s: cannot create: %s", memory->handle,
                           strerror(errno));
    st = reserve(fd, memory);
    if (st == ST_OK) st = map(fd, memory);
    memory->lock_fd = fd;
    if (st == ST_OK) return ST_OK;
    shm_unlink(memory->handle);
    close(fd);
    return st;
}

enum status cpu_shared_open(struct device *dev, struct shared_memory *memory)
{
    (void)dev;
    enum status st = check_name(memory->handle);
    if (st != ST_OK) return st;
    int fd = shm_open(memory->handle, O_RDWR | O_CLOEXEC, 0);
    if (fd < 0 && errno == ENOENT)
        return status_fail(ST_NOT_FOUND,
                           "shared memory %s does not exist: the process that made it has ended",
                           memory->handle);
    if (fd < 0)
        return status_fail(ST_IO, "shared memory %s: cannot open: %s", memory->handle,
                           strerror(errno));
    struct stat info;
    st = status_context(file_check_owner(fd, memory->handle), "shared memory");
    if (st == ST_OK && fstat(fd, &info))
        st = status_fail(ST_IO, "shared memory %s: fstat: %s", memory->handle, strerror(errno));
    else if (st == ST_OK && (size_t)info.st_size != memory->bytes)
        st = status_fail(ST_MISMATCH, "shared memory %s has %lld bytes, not the %zu expected",
                         memory->handle, (long long)info.st_size, memory->bytes);
    if (st == ST_OK) st = map(fd, memory);
    close(fd);
    return st;
}

void cpu_shared_close(struct shared_memory *memory)
{
    munmap(memory->data, memory->bytes);
    if (!memory->maker) return;
    shm_unlink(memory->handle);
    close(memory->lock_fd);
}
