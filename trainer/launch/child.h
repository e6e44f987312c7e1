/* child.h: a child process that is talked to in lines, over its standard input and output.
 * Of the reward "command" and of environments. One thread at a time.
 *
 * The child is the leader of a process group of its own (a Ctrl-C at the terminal, which the
 * trainer takes as "end after this step", must not take the child away in the middle of it), is
 * killed with its group when it is ended, and by the kernel should the trainer die. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_CHILD_H
#define TRAINER_CHILD_H

#include "common/base/bytes.h"

#include <sys/types.h>

struct child {        // all zero: none
    const char *line; // as given, for messages; borrowed
    pid_t pid;        // 0: none
    int to, from;     // its standard input and output, not blocking; valid with a pid
    struct bytes out; // still to be written
    size_t written;   // of `out`
    struct bytes in;  // read
    size_t taken;     // of `in`
    int64_t started_ns;
};

// Starts `line`, words and quotes as a shell takes them. The shell replaces itself by the program,
// so that the program's own end is seen.
enum status child_start(struct child *c, const char *line);
// Kills it, with what it started, and frees the buffers. Its status, as waitpid() gives it; 0 where
// there was none.
int child_end(struct child *c);

// Waits until the child has lived for `ms`, or ended sooner. ST_PEER_GONE says how it ended.
enum status child_check(struct child *c, int ms);
// Writes and reads what can be without waiting. ST_PEER_GONE says how it ended, and has ended it;
// what it wrote before is lost then.
enum status child_pump(struct child *c);

// Takes a whole line out of `in`, without its end; false: there is none yet. Valid until the next
// child_pump().
bool child_line(struct child *c, const char **ret_text, size_t *ret_len);
// What is read and not taken; "" where that is nothing.
const char *child_rest(const struct child *c);
// Whether there are bytes it has not read, or that it wrote and are not read yet.
bool child_unread(const struct child *c);

#endif
