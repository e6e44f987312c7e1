/* process.c: the life of other processes, from /proc and, where the kernel has them, pidfds. No
 * state; any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/process.h"
#include "common/base/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOOK_MS 5 // between looks, where there is no descriptor to wait for

enum found { FOUND, NONE, UNKNOWN };

// State letter and start time out of /proc/PID/stat. UNKNOWN where looking failed for another
// reason than that there is no such process.
static enum found process_stat(pid_t pid, char *ret_state, uint64_t *ret_start)
{
    char path[40], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno == ENOENT ? NONE : UNKNOWN;
    ssize_t n = read(fd, text, sizeof text - 1);
    int error = errno;
    close(fd);
    if (n <= 0) return n < 0 && error != ESRCH ? UNKNOWN : NONE;
    text[n] = 0;
    // The command name (field 2) may hold anything, ")" included: the last one ends it.
    char *p = strrchr(text, ')');
    if (!p || p[1] != ' ') return UNKNOWN;
    p += 2;
    char state = *p;
    for (int field = 3; field < 22; field++) { // start time is field 22
        p = strchr(p, ' ');
        if (!p) return UNKNOWN;
        p++;
    }
    *ret_state = state;
    *ret_start = strtoull(p, NULL, 10);
    return FOUND;
}

uint64_t process_start_time(pid_t pid)
{
    char state;
    uint64_t start;
    return pid > 0 && process_stat(pid, &state, &start) == FOUND ? start : 0;
}

int64_t process_started_ms(pid_t pid)
{
    const uint64_t ticks = process_start_time(pid);
    struct timespec boot;
    clock_gettime(CLOCK_BOOTTIME, &boot);
    const int64_t boot_ms = boot.tv_sec * 1000 + boot.tv_nsec / NS_PER_MS,
                  started_ms = (int64_t)(ticks * 1000 / (uint64_t)sysconf(_SC_CLK_TCK));
    return clock_wall_ms() - (ticks ? boot_ms - started_ms : 0);
}

// A descriptor that becomes readable when the process has ended; -1 with errno where there is no
// such process (ESRCH) or no such descriptor to be had (a kernel without them, too many open).
static int open_process(pid_t pid)
{
    return (int)syscall(SYS_pidfd_open, pid, 0);
}

static bool has_ended(int pidfd, int wait_ms)
{
    struct pollfd exited = {.fd = pidfd, .events = POLLIN};
    return poll(&exited, 1, wait_ms) > 0;
}

bool process_alive(pid_t pid, uint64_t start_time)
{
    char state;
    uint64_t start;
    if (pid <= 0) return false;
    // The descriptor is opened before the start time is compared, so both speak of one process. It
    // also tells a killed process that its parent has not reaped yet from one whose first thread
    // ended.
    int fd = open_process(pid);
    if (fd < 0 && errno == ESRCH) return false;
    enum found found = process_stat(pid, &state, &start);
    bool alive = found == UNKNOWN || (found == FOUND && start == start_time);
    if (fd >= 0) {
        if (alive && has_ended(fd, 0)) alive = false;
        close(fd);
    } else if (alive && found == FOUND) {
        alive = state != 'Z' && state != 'X';
    }
    return alive;
}

enum status process_kill(pid_t pid, uint64_t start_time, int timeout_ms)
{
    int64_t deadline = clock_deadline_ns(timeout_ms);
    enum status st = ST_OK;
    int fd = open_process(pid); // first: what is then found to be that process is what is killed
    if (!process_alive(pid, start_time)) goto out;
    int sent =
        fd >= 0 ? (int)syscall(SYS_pidfd_send_signal, fd, SIGKILL, NULL, 0) : kill(pid, SIGKILL);
    if (sent != 0 && errno != ESRCH)
        FAIL(ST_IO, "process %d cannot be killed: %s", (int)pid, strerror(errno));
    while (process_alive(pid, start_time)) {
        int left_ms = clock_ms_until(deadline);
        if (left_ms == 0)
            FAIL(ST_TIMEOUT, "process %d was killed and has not ended within %.1f s", (int)pid,
                 timeout_ms / 1e3);
        if (fd >= 0)
            has_ended(fd, left_ms);
        else
            clock_sleep_ms(LOOK_MS);
    }
out:
    if (fd >= 0) close(fd);
    return st;
}

uint64_t process_namespace(void)
{
    struct stat info;
    return stat("/proc/self/ns/pid", &info) == 0 ? (uint64_t)info.st_ino : 0;
}

void process_boot_id(char ret[40])
{
    ret[0] = 0;
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    ssize_t n = read(fd, ret, 39);
    close(fd);
    ret[n > 0 ? n : 0] = 0;
    ret[strcspn(ret, "\n")] = 0;
}
