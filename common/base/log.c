/* log.c: lines on standard error. One mutex orders the lines of all threads and guards the live
 * line; a line is formatted outside it and leaves in one write(2), so that lines of several
 * processes on one terminal do not mix. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/log.h"
#include "common/base/bytes.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static struct {
    pthread_mutex_t lock;
    const char *program;
    enum log_level level;
    bool journal, terminal;
    bool live; // the cursor stands at the end of a live line
} logger = {.lock = PTHREAD_MUTEX_INITIALIZER, .program = "", .level = LOG_INFO};

void log_open(const char *program, enum log_level level)
{
    pthread_mutex_lock(&logger.lock);
    logger.program = program;
    logger.level = level;
    // $JOURNAL_STREAM is "device:inode" of the journal's socket; it may be inherited by a program
    // whose standard error was then sent elsewhere (systemd.exec(5)), so it is compared.
    const char *stream = getenv("JOURNAL_STREAM");
    unsigned long long device, inode;
    struct stat info;
    logger.journal = stream && sscanf(stream, "%llu:%llu", &device, &inode) == 2 &&
                     fstat(STDERR_FILENO, &info) == 0 && info.st_dev == device &&
                     info.st_ino == inode;
    logger.terminal = isatty(STDERR_FILENO) == 1;
    pthread_mutex_unlock(&logger.lock);
}

const char *const log_level_names[] = {"error", "warn", "info", "debug", NULL};

static void put_head(struct bytes *text, enum log_level level)
{
    static const char *const words[] = {"error: ", "warning: ", "", "debug: "};
    static const int journal_priority[] = {3, 4, 6, 7}; // syslog's
    if (logger.journal) {
        bytes_printf(text, "<%d>", journal_priority[level]);
    } else {
        struct timespec now;
        struct tm local;
        clock_gettime(CLOCK_REALTIME, &now);
        localtime_r(&now.tv_sec, &local);
        bytes_printf(text, "%02d:%02d:%02d.%03ld ", local.tm_hour, local.tm_min, local.tm_sec,
                     now.tv_nsec / 1000000);
    }
    if (logger.program[0]) bytes_printf(text, "%s: ", logger.program);
    bytes_puts(text, words[level]);
}

// What clients call things may stand in a line, and must not begin another or steer a terminal:
// control characters, C1's too, are written as \xNN, and what has several lines becomes one.
static void put_plain(struct bytes *line, const struct bytes *body)
{
    const unsigned char *text = (const unsigned char *)bytes_text(body);
    size_t n = body->len;
    while (n > 0 && text[n - 1] == '\n') n--;
    for (size_t i = 0; i < n; i++) {
        const bool c1 = text[i] == 0xc2 && i + 1 < n && text[i + 1] >= 0x80 && text[i + 1] < 0xa0;
        if (text[i] == '\n')
            bytes_puts(line, " | ");
        else if (c1 || text[i] < 0x20 || text[i] == 0x7f)
            bytes_printf(line, "\\x%02x", text[i += c1]);
        else
            bytes_append(line, (const char *)&text[i], 1);
    }
}

// Writes the line with the body behind it, and gives the lock back. There is nowhere to report that
// standard error cannot be written.
static void end_line(struct bytes *line, struct bytes *body, const char *end)
{
    put_plain(line, body);
    bytes_puts(line, end);
    ssize_t written = write(STDERR_FILENO, bytes_text(line), line->len);
    (void)written;
    pthread_mutex_unlock(&logger.lock);
    bytes_release(line);
    bytes_release(body);
}

void log_line(enum log_level level, const char *format, ...)
{
    if (level > logger.level) return;
    struct bytes body = BYTES_INIT, line = BYTES_INIT;
    va_list arguments;
    va_start(arguments, format);
    bytes_vprintf(&body, format, arguments);
    va_end(arguments);

    pthread_mutex_lock(&logger.lock);
    if (logger.live) bytes_puts(&line, "\r\033[K");
    logger.live = false;
    put_head(&line, level);
    end_line(&line, &body, "\n");
}

// Cuts to the terminal's width: a line that wraps cannot be rewritten with "\r".
static void fit_terminal(struct bytes *text)
{
    struct winsize size;
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || !text->data) return;
    size_t at = 0;
    for (unsigned columns = 1; at < text->len && columns < size.ws_col; columns++) {
        int n = utf8_sequence(text->data + at, text->len - at);
        at += n > 0 ? (size_t)n : 1;
    }
    text->len = at;
    text->data[at] = 0;
}

void log_progress(const char *format, ...)
{
    if (logger.level < LOG_INFO) return;
    struct bytes body = BYTES_INIT, line = BYTES_INIT;
    va_list arguments;
    va_start(arguments, format);
    bytes_vprintf(&body, format, arguments);
    va_end(arguments);

    pthread_mutex_lock(&logger.lock);
    if (logger.terminal) fit_terminal(&body);
    if (logger.terminal) logger.live = true;
    bytes_puts(&line, logger.terminal ? "\r" : logger.journal ? "<6>" : "");
    end_line(&line, &body, logger.terminal ? "\033[K" : "\n");
}

void log_progress_end(void)
{
    struct bytes body = BYTES_INIT, line = BYTES_INIT;
    pthread_mutex_lock(&logger.lock);
    const bool live = logger.live;
    logger.live = false;
    end_line(&line, &body, live ? "\n" : "");
}
