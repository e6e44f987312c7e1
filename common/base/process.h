/* process.h: which process, and does it live? A pid alone may have been given to another process,
 * so a process is named by its pid and start time. Any thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_PROCESS_H
#define COMMON_BASE_PROCESS_H

#include "common/base/status.h"
#include <stdint.h>
#include <sys/types.h>

// Start time in clock ticks since boot (/proc/PID/stat); 0 if there is no such process.
uint64_t process_start_time(pid_t pid);
// The same as milliseconds since 1970 (clock_wall_ms()), to a tick; now, where it cannot be known.
int64_t process_started_ms(pid_t pid);
// False only where it is certain: a process that cannot be looked at (no descriptor is free) lives.
bool process_alive(pid_t pid, uint64_t start_time);
// Kills it and waits until none of its threads runs any more. ST_OK also where it was dead already;
// ST_IO where this process may not kill it, ST_TIMEOUT where it has not ended by then.
enum status process_kill(pid_t pid, uint64_t start_time, int timeout_ms);
// The inode of this process's PID namespace, within which pids mean something; 0 without /proc.
uint64_t process_namespace(void);
void process_boot_id(char ret[40]); // /proc/sys/kernel/random/boot_id; "" where it cannot be read

#endif
