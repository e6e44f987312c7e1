/* process.h: which process, and does it live? A pid alone may have been given to another process,
 * so a process is named by its pid and start time. Any thread. */
#ifndef BRIDGE_PROCESS_H
#define BRIDGE_PROCESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

// Start time in clock ticks since boot (/proc/PID/stat); 0 if there is no such process.
uint64_t process_start_time(pid_t pid);
bool process_alive(pid_t pid, uint64_t start_time);
// The inode of this process's PID namespace, within which pids mean something; 0 without /proc.
uint64_t process_namespace(void);
void process_boot_id(char ret[40]); // /proc/sys/kernel/random/boot_id; "" where it cannot be read

#endif
