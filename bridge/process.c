/* process.c: the life of other processes, from /proc and, where the kernel has them, pidfds. No
 * state; any thread. */
#include "bridge/process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

// State letter and start time out of /proc/PID/stat; false if there is no such process.
static bool process_stat(pid_t pid, char *ret_state, uint64_t *ret_start)
{
    char path[40], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return false;
    text[n] = 0;
    // The command name (field 2) may hold anything, ")" included: the last one ends it.
    char *p = strrchr(text, ')');
    if (!p || p[1] != ' ') return false;
    p += 2;
    char state = *p;
    for (int field = 3; field < 22; field++) { // start time is field 22
        p = strchr(p, ' ');
        if (!p) return false;
        p++;
    }
    *ret_state = state;
    *ret_start = strtoull(p, NULL, 10);
    return true;
}

uint64_t process_start_time(pid_t pid)
{
    char state;
    uint64_t start;
    return pid > 0 && process_stat(pid, &state, &start) ? start : 0;
}

bool process_alive(pid_t pid, uint64_t start_time)
{
    char state;
    uint64_t start;
    if (pid <= 0) return false;
    // The descriptor is opened before the start time is compared, so both speak of one process. It
    // also tells a killed process that its parent has not reaped yet from one whose first thread
    // ended.
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd < 0 && errno == ESRCH) return false;
    bool alive = process_stat(pid, &state, &start) && start == start_time;
    if (fd >= 0) {
        struct pollfd exited = {.fd = fd, .events = POLLIN};
        if (alive && poll(&exited, 1, 0) > 0) alive = false;
        close(fd);
    } else if (alive) { // a kernel without pidfd_open
        alive = state != 'Z' && state != 'X';
    }
    return alive;
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
