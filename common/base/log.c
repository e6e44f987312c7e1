/* log.c: lines on standard error. One mutex orders the lines of all threads and guards the live
 * line; a line is formatted outside it and leaves in one write(2), so that lines of several
 * processes on one terminal do not mix. */
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

// $JOURNAL_STREAM is "device:inode" of the journal's socket; it may be inherited by a program whose
// standard error was then sent elsewhere (systemd.exec(5)), so it is compared.
static bool stderr_is_journal(void)
{
    const char *stream = getenv("JOURNAL_STREAM");
    unsigned long long device, inode;
    struct stat info;
    return stream && sscanf(stream, "%llu:%llu", &device, &inode) == 2 &&
           fstat(STDERR_FILENO, &info) == 0 && info.st_dev == device && info.st_ino == inode;
}

void log_open(const char *program, enum log_level level)
{
    pthread_mutex_lock(&logger.lock);
    logger.program = program;
    logger.level = level;
    logger.journal = stderr_is_journal();
    logger.terminal = isatty(STDERR_FILENO) == 1;
    pthread_mutex_unlock(&logger.lock);
}

const char *const log_level_names[] = {"error", "warn", "info", "debug", NULL};

// There is nowhere to report that standard error cannot be written.
static void emit(const struct bytes *text)
{
    ssize_t written = write(STDERR_FILENO, bytes_text(text), text->len);
    (void)written;
}

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

static void put_formatted(struct bytes *text, const char *format, va_list arguments)
{
    char small[1024];
    char *large = NULL;
    va_list again;
    va_copy(again, arguments);
    int n = vsnprintf(small, sizeof small, format, arguments);
    if (n >= (int)sizeof small && vasprintf(&large, format, again) < 0) large = NULL;
    va_end(again);
    bytes_puts(text, large ? large : n < 0 ? format : small);
    free(large);
}

void log_line(enum log_level level, const char *format, ...)
{
    if (level > logger.level) return;
    struct bytes body = BYTES_INIT, line = BYTES_INIT;
    va_list arguments;
    va_start(arguments, format);
    put_formatted(&body, format, arguments);
    va_end(arguments);

    pthread_mutex_lock(&logger.lock);
    if (logger.live) bytes_puts(&line, "\r\033[K");
    logger.live = false;
    put_head(&line, level);
    bytes_append(&line, bytes_text(&body), body.len);
    bytes_puts(&line, "\n");
    emit(&line);
    pthread_mutex_unlock(&logger.lock);
    bytes_release(&line);
    bytes_release(&body);
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
    put_formatted(&body, format, arguments);
    va_end(arguments);

    pthread_mutex_lock(&logger.lock);
    if (logger.terminal) {
        fit_terminal(&body);
        bytes_puts(&line, "\r");
        bytes_append(&line, bytes_text(&body), body.len);
        bytes_puts(&line, "\033[K");
        logger.live = true;
    } else {
        if (logger.journal) bytes_puts(&line, "<6>");
        bytes_append(&line, bytes_text(&body), body.len);
        bytes_puts(&line, "\n");
    }
    emit(&line);
    pthread_mutex_unlock(&logger.lock);
    bytes_release(&line);
    bytes_release(&body);
}

void log_progress_end(void)
{
    pthread_mutex_lock(&logger.lock);
    if (logger.live) {
        struct bytes line = BYTES_INIT;
        bytes_puts(&line, "\n");
        emit(&line);
        bytes_release(&line);
    }
    logger.live = false;
    pthread_mutex_unlock(&logger.lock);
}
