/* control_page.c: making, opening and replacing control pages. A page gets its name only when it is
 * whole, and keeps it until its owner ends or another server finds the owner dead. The owner's sign
 * of life is a lock on the page's file (flock), which the kernel lets go when the owner dies: a pid
 * says nothing to a server of another PID namespace that shares /dev/shm. Called by the thread that
 * owns the mapping. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/control_page.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define CONTROL_MAGIC  "CWEIGHTS" // 8 bytes, no NUL
#define CONTROL_FORMAT 2
#define ATTEMPTS       10 // to take a name
#define ATTEMPT_MS     20

static enum status check_name(const char *name)
{
    size_t len = strlen(name);
    // Room for the suffix of the temporary name.
    if (len < 2 || len > NAME_BYTES - 24 || name[0] != '/' || strchr(name + 1, '/'))
        return status_fail(
            ST_INVALID,
            "control page name \"%s\": it must be \"/\" and 1 to %d other characters without \"/\"",
            name, NAME_BYTES - 25);
    return ST_OK;
}

// Maps an existing page and checks that it is one. The descriptor stays open where wanted.
static enum status map_page(const char *name, struct page **ret, int *ret_fd)
{
    int fd = shm_open(name, O_RDWR | O_CLOEXEC, 0);
    if (fd < 0) {
        if (errno == ENOENT)
            return status_fail(
                ST_NOT_FOUND,
                "control page %s does not exist: the server has ended; start cw-infer-server again",
                name);
        return status_fail(ST_IO, "control page %s: %s", name, strerror(errno));
    }
    struct stat sb;
    struct page *page = MAP_FAILED;
    enum status st;
    CHECK(status_context(file_check_owner(fd, name), "control page"));
    if (fstat(fd, &sb) != 0) FAIL(ST_IO, "control page %s: %s", name, strerror(errno));
    // An earlier build's is known by what comes first; nothing else of it is looked at.
    if (sb.st_size != CONTROL_BYTES && sb.st_size != CONTROL_FIRST)
        FAIL(ST_MISMATCH, "control page %s has %lld bytes, not %d: it is not one of ours", name,
             (long long)sb.st_size, CONTROL_BYTES);
    page = mmap(NULL, CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        FAIL(ST_IO, "control page %s cannot be mapped: %s", name, strerror(errno));
    if (memcmp(page->magic, CONTROL_MAGIC, 8) != 0)
        FAIL(ST_MISMATCH,
             "control page %s does not begin with \"" CONTROL_MAGIC "\": another program made it",
             name);
    *ret = page;
    if (ret_fd) {
        *ret_fd = fd;
        return ST_OK;
    }
out:
    if (st != ST_OK && page != MAP_FAILED) munmap(page, CONTROL_BYTES);
    close(fd);
    return st;
}

// The path behind a shared memory name, for link() and rename(), which have no shm_ counterparts.
static void page_path(char ret[128], const char *name)
{
    snprintf(ret, 128, "/dev/shm%s", name);
}

// Its owner holds the lock; one of an earlier build held none, and is looked for by its pid. Where
// the owner is dead the lock is the caller's then, until it closes fd.
static bool owner_lives(const struct page *page, int fd)
{
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) return true;
    return !atomic_load(&page->ended) && page->owner_namespace == process_namespace() &&
           process_alive(page->owner_pid, page->owner_start);
}

// Takes the name from the page behind fd, if it still has it. With the lock, so that two servers
// that start at once agree on which page they look at.
static bool unlink_page(const char *name, int fd)
{
    struct stat held, named;
    int now_fd = -1;
    bool same = fstat(fd, &held) == 0 && (now_fd = shm_open(name, O_RDONLY | O_CLOEXEC, 0)) >= 0 &&
                fstat(now_fd, &named) == 0 && held.st_ino == named.st_ino;
    bool removed = same && shm_unlink(name) == 0;
    if (now_fd >= 0) close(now_fd);
    return removed;
}

// Removes the page of that name if its owner is dead; ST_BUSY if it lives.
static enum status remove_dead(const char *name)
{
    struct page *page = NULL;
    int fd = -1;
    enum status st = map_page(name, &page, &fd);
    if (st == ST_NOT_FOUND) return ST_OK;
    if (st != ST_OK) return status_context(st, "the name is taken; remove /dev/shm%s", name);
    if (owner_lives(page, fd))
        FAIL(ST_BUSY,
             "control page %s belongs to the living process %d: another server uses this bridge; "
             "give this one its own --bridge and --socket",
             name, (int)page->owner_pid);
    unlink_page(name, fd);
out:
    munmap(page, CONTROL_BYTES);
    close(fd);
    return st;
}

bool control_sweep(const char *name)
{
    struct page *page = NULL;
    int fd = -1;
    if (map_page(name, &page, &fd) != ST_OK) return false;
    bool removed = !owner_lives(page, fd) && unlink_page(name, fd);
    munmap(page, CONTROL_BYTES);
    close(fd);
    return removed;
}

// All else is zero.
static void fill_page(struct page *page, const char *layout_hash)
{
    memcpy(page->magic, CONTROL_MAGIC, 8);
    page->format = CONTROL_FORMAT;
    page->bytes = CONTROL_BYTES;
    snprintf(page->layout_hash, sizeof page->layout_hash, "%s", layout_hash);
    snprintf(page->roles[0].name, sizeof page->roles[0].name, "policy");
    page->owner_pid = getpid();
    page->owner_start = process_start_time(getpid());
    page->owner_namespace = process_namespace();
    atomic_store(&page->version, 1);
    atomic_store(&page->owner_updating, 1);
    atomic_store(&page->owner_heartbeat_ns, clock_now_ns());
    atomic_store(&page->heartbeat_limit_ms, HEARTBEAT_LIMIT_MS);
}

// Links the whole page to its name, from which a dead owner's page is removed.
static enum status take_name(const char *fresh_path, const char *path, const char *name)
{
    enum status st = ST_OK;
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        if (link(fresh_path, path) == 0) return ST_OK;
        if (errno != EEXIST) break;
        st = remove_dead(name);
        if (st != ST_OK && st != ST_BUSY) return st;
        // one that sweeps, or starts at the same time, holds a dead owner's lock for an instant
        if (st == ST_BUSY) clock_sleep_ms(ATTEMPT_MS);
    }
    return st == ST_BUSY ? st : status_fail(ST_IO, "control page %s: %s", name, strerror(errno));
}

enum status control_create(const char *name, const char *layout_hash, struct control **ret)
{
    enum status st = check_name(name);
    if (st != ST_OK) return st;
    if (strlen(layout_hash) >= sizeof((struct page *)0)->layout_hash)
        return status_fail(ST_INVALID, "control page %s: layout hash \"%s\" is too long", name,
                           layout_hash);
    char fresh[NAME_BYTES], fresh_path[128], path[128];
    struct page *page = MAP_FAILED;
    struct control *c = calloc(1, sizeof *c);
    if (!c) return status_fail(ST_NO_MEMORY, "control page %s: out of memory", name);
    snprintf(fresh, sizeof fresh, "%s.%d", name, (int)getpid());
    page_path(fresh_path, fresh);
    page_path(path, name);

    // The page is made whole under a name of its own and then linked: nobody sees half of one.
    shm_unlink(fresh);
    int fd = shm_open(fresh, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) FAIL(ST_IO, "control page %s: %s", fresh, strerror(errno));
    // Before it looks like a page: none is ever seen without its owner's lock, under either name.
    if (flock(fd, LOCK_EX) != 0)
        FAIL(ST_IO, "control page %s cannot be locked: %s", fresh, strerror(errno));
    // posix_fallocate: a full /dev/shm is an error here, not a SIGBUS later
    int error = posix_fallocate(fd, 0, CONTROL_BYTES);
    if (error) FAIL(ST_IO, "control page %s: no room in /dev/shm: %s", fresh, strerror(error));
    page = mmap(NULL, CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        FAIL(ST_IO, "control page %s cannot be mapped: %s", fresh, strerror(errno));
    fill_page(page, layout_hash);
    CHECK(take_name(fresh_path, path, name));
    snprintf(c->name, sizeof c->name, "%s", name);
    c->owner = true;
    c->page = page;
    c->fd = fd;
    page = MAP_FAILED;
    fd = -1;
    *ret = TAKE_PTR(c);
out:
    shm_unlink(fresh);
    if (page != MAP_FAILED) munmap(page, CONTROL_BYTES);
    if (fd >= 0) close(fd);
    free(c);
    return st;
}

enum status control_open(const char *name, const char *layout_hash, struct control **ret)
{
    struct page *page = NULL;
    enum status st = check_name(name);
    if (st != ST_OK) return st;
    struct control *c = calloc(1, sizeof *c);
    if (!c) return status_fail(ST_NO_MEMORY, "control page %s: out of memory", name);
    CHECK(map_page(name, &page, NULL));
    c->page = page;
    c->fd = -1;
    snprintf(c->name, sizeof c->name, "%s", name);
    if (page->format != CONTROL_FORMAT || page->bytes != CONTROL_BYTES)
        FAIL(ST_MISMATCH,
             "control page %s has format %u (%u bytes), this program format %d (%d bytes): run "
             "server and client of the same build",
             name, page->format, page->bytes, CONTROL_FORMAT, CONTROL_BYTES);
    if (strncmp(page->layout_hash, layout_hash, sizeof page->layout_hash) != 0)
        FAIL(ST_MISMATCH,
             "control page %s was made for layout %.16s..., the bridge file says %.16s...: the "
             "file is not this server's; restart the server, which writes it anew",
             name, page->layout_hash, layout_hash);
    CHECK(control_owner_alive(c));
    *ret = TAKE_PTR(c);
out:
    control_free(c);
    return st;
}

void control_free(struct control *c)
{
    if (!c) return;
    if (c->page) munmap(c->page, CONTROL_BYTES);
    if (c->fd >= 0) close(c->fd);
    free(c);
}

void control_end(struct control *c)
{
    struct page *page = c->page;
    atomic_store(&page->ended, 1);
    shm_unlink(c->name);
    flock(c->fd, LOCK_UN); // closing it is not enough while the page is mapped
    // A writer asleep in control_quiesce() looks at `ended` when the futex lets it go.
    futex_wake(&page->phase);
    control_notify(c);
}
