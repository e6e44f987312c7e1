/* spawn.h: starts another program as a child that ends with this process, or a thread. No state;
 * any thread, but the child dies with the thread that started it. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_SPAWN_H
#define COMMON_BASE_SPAWN_H

#include "common/base/bytes.h"

#include <pthread.h>
#include <stdbool.h>
#include <sys/types.h>

// Appends what a shell reads as that one word; and, as such a word, the program `name` beside this
// one, or else what PATH has of that name.
void spawn_put_word(struct bytes *to, const char *word);
void spawn_put_program(struct bytes *to, const char *name);

// `line`: words and quotes as a shell takes them; the shell replaces itself by the program, so that
// the program's own end is seen. in, out, err: its three streams; -1: this process's own. It leads
// a process group of its own (a Ctrl-C at the terminal is not for it), no signal is blocked in it,
// and the kernel kills it should this process die.
enum status spawn(const char *line, int in, int out, int err, pid_t *ret);
// Whether it has ended, or does within `ms`; its status (NULL: not wanted), as waitpid() gives it,
// stays to be taken.
bool spawn_exited(pid_t pid, int ms, int *ret_status);
// Kills its group and takes its status, as waitpid() gives it; one that ended by itself keeps it.
int spawn_end(pid_t pid);
// Appends how it ended: "ended with status 1", "was ended by signal 9 (Killed)".
#define SPAWN_WORDS 96
void spawn_words(int status, char ret[SPAWN_WORDS]);

// A thread that leaves signals to the main one, as do those that it starts. 0, or an errno.
int thread_start(pthread_t *ret, void *(*run)(void *), void *context);

#endif
