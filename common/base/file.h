/* file.h: whole files. Errors name the path and say why (ST_IO, ST_NOT_FOUND). */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_FILE_H
#define COMMON_BASE_FILE_H

#include "common/base/bytes.h"

// The open file must belong to this user or to root: what another user made may change under its
// reader's hands, or say what that user likes. ST_MISMATCH names the owner.
enum status file_check_owner(int fd, const char *path);

// Reads a regular file of at most `max` bytes (larger: ST_FORMAT). The content replaces what the
// initialised buffer held.
enum status file_read(const char *path, size_t max, struct bytes *ret);
enum status file_read_own(const char *path, size_t max, struct bytes *ret); // file_check_owner()
// The same, but of a larger file its first whole lines, of `max` bytes at most. ret_left_out: the
// bytes behind them.
enum status file_read_start(const char *path, size_t max, struct bytes *ret, int64_t *ret_left_out);

// Temporary file beside `path` (PATH.tmp.XXXXXX), write, fsync, rename, fsync of the folder. The
// file gets `mode` but for what the umask takes away, as with open(). On failure `path` is as it
// was and the temporary file is gone; only where the last step, the folder's fsync, fails, is the
// new file in place but not known to be durable.
enum status file_write_atomic(const char *path, unsigned mode, const void *data, size_t len);
// The same in steps: what is written to fd in between takes the file's place. st: how that went;
// its failure is the result, and the file as it was.
struct file_replacement {
    char *temporary;
    int fd;
};
enum status file_replace_begin(const char *path, unsigned mode, struct file_replacement *ret);
enum status file_replace_end(const char *path, struct file_replacement *r, enum status st);

// Removes the temporary files that killed processes left beside `path`, or, where that ends on "/",
// in the folder; says how many there were.
int file_sweep_temporaries(const char *path);
// Of names that end on ".PID" or "-PID" and a suffix, the process that makes them: removes what
// begins with the prefix, is this user's, and has a process that is no more, files and whole
// folders.
void file_sweep_owned(const char *folder, const char *prefix, const char *suffix);

// Writes all of it to an open file; `path` names it in the error.
enum status file_write_all(int fd, const char *path, const void *data, size_t len);

// Calls take() for each whole line, with its newline, in order. A last one that has none (its
// writer goes on, or was killed) is passed over.
typedef enum status (*file_line_fn)(void *context, const char *line, size_t len);
enum status file_each_line(const char *path, file_line_fn take, void *context);
// The same from a byte on, which is moved behind the lines that were taken: a file that grows is
// read on by the next call. One shorter than that has none.
enum status file_lines_from(const char *path, int64_t *at, file_line_fn take, void *context);

// Read-only mapping of a whole file. `data` is NULL for an empty file.
struct file_map {
    const unsigned char *data;
    size_t len;
};
enum status file_map_open(const char *path, struct file_map *ret);
void file_map_release(struct file_map *map);

// Also where it is a link that leads nowhere: what reads it then says so.
bool file_exists(const char *path);
bool file_exists_in(const char *folder, const char *name);
// Whether the path is the folder or something in it; both must be there for that.
bool file_is_within(const char *path, const char *folder);
// ST_IO where it is such a link, naming what it leads to.
enum status file_check_link(const char *path);
enum status file_make_folders(const char *path); // mkdir -p, 0755; new names are fsynced
// fsyncs a folder, so that names created in it are durable; file_sync_parent: that of `path`
enum status file_sync_folder(const char *path);
enum status file_sync_parent(const char *path);
enum status file_remove_tree(const char *path); // rm -r; a missing path is fine

// "a/b", the name by a format. ST_INVALID where that is more than the system takes as a path.
#define PATH_ROOM 4096
enum status path_put(char ret[PATH_ROOM], const char *folder, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
// A new folder of this user alone, FOLDER/PREFIX-XXXXXX-PID, once those are swept that killed
// processes left.
enum status file_make_temporary_folder(const char *folder, const char *prefix, char ret[PATH_ROOM]);
// One that does not depend on the working folder. Links and ".." stay.
enum status path_absolute(const char *path, char *ret, size_t size);

#endif
