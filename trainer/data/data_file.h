/* data_file.h: the bytes of a data set's file, or what to do where it is none. One thread. */
#ifndef TRAINER_DATA_FILE_H
#define TRAINER_DATA_FILE_H

#include "common/base/file.h"

// Maps a JSONL file. Where something else was given (a name of the Hub, a folder) the sentence says
// how to come by one.
enum status data_file_open(const char *path, struct file_map *ret);
// ST_FORMAT where the bytes are of a known other format: Parquet, Arrow, compressed, UTF-16, one
// JSON list. `where` names them.
enum status data_file_check(const char *where, const char *text, size_t len);
bool data_file_has_mark(const char *text, size_t len); // begins with UTF-8's byte order mark

#endif
