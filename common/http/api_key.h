/* api_key.h: the file of an API key, which both sides read alike. Stateless. */
#ifndef COMMON_HTTP_API_KEY_H
#define COMMON_HTTP_API_KEY_H

#include "common/base/status.h"

// The first line without white space around it; the caller frees it. ST_INVALID where it is no word
// of 8 characters or more; `option` names itself in errors. Warns where others may read the file.
enum status api_key_read(const char *option, const char *path, char **ret);
// The same of a file that is this user's own (ST_MISMATCH), and is made where it is not there:
// 0600, "tml-" and 128 random bits.
enum status api_key_make(const char *option, const char *path, char **ret);

#endif
