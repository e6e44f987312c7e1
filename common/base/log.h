/* log.h: lines for a person on standard error. Used by programs (server, trainer, tools) only:
 * common/, kernels/ and bridge/ return errors instead. Thread-safe; one write(2) a line, which
 * holds no control characters whatever it is given. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_LOG_H
#define COMMON_BASE_LOG_H

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };

// `program` stands before every line; the default level is LOG_INFO. With systemd's journal on
// standard error ($JOURNAL_STREAM) lines carry "<N>" priorities and no time.
void log_open(const char *program, enum log_level level);
extern const char *const log_level_names[];
void log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define log_error(...) log_line(LOG_ERROR, __VA_ARGS__)
#define log_warn(...)  log_line(LOG_WARN, __VA_ARGS__)
#define log_info(...)  log_line(LOG_INFO, __VA_ARGS__)
#define log_debug(...) log_line(LOG_DEBUG, __VA_ARGS__)

// One live line ("\r...", rewritten) when standard error is a terminal, else a plain line.
void log_progress(const char *format, ...) __attribute__((format(printf, 1, 2)));
void log_progress_end(void); // leaves the live line standing and goes to the next

#endif
