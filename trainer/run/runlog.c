/* runlog.c: metrics.jsonl, its copy for TensorBoard, rollouts/ and the progress line. Owns the open
 * files; the trainer's thread.
 *
 * A line is written with one write(2) and is whole or, after a crash, the last and cut off:
 * resuming drops it with those of steps that were not checkpointed.
 */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/runlog.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct runlog {
    char *folder, path[PATH_ROOM]; // path: of metrics.jsonl
    int fd;
    struct tensorboard *tensorboard;
    int64_t first_step, logging_steps, start_ns;
};

static int64_t step_of(const char *line, size_t len) // -1: it has none
{
    json_t *json = json_loadb(line, len, 0, NULL);
    const json_t *number = json_object_get(json, "step");
    int64_t step = json_is_integer(number) ? json_integer_value(number) : -1;
    json_decref(json);
    return step;
}

struct kept { // the lines of steps from the first to the last
    int64_t first, last;
    struct bytes lines;
};

static enum status keep_line(void *context, const char *line, size_t len)
{
    struct kept *kept = context;
    const int64_t step = step_of(line, len);
    if (step >= kept->first && step <= kept->last) bytes_append(&kept->lines, line, len);
    return bytes_status(&kept->lines);
}

bool runlog_has_steps(const char *folder)
{
    struct kept steps = {1, INT64_MAX, BYTES_INIT};
    char path[PATH_ROOM];
    if (path_put(path, folder, "metrics.jsonl") == ST_OK) file_each_line(path, keep_line, &steps);
    const bool found = steps.lines.len > 0;
    bytes_release(&steps.lines);
    return found;
}

enum status runlog_new(const char *folder, int64_t step, int64_t logging_steps, struct runlog **ret)
{
    enum status st = ST_OK;
    // of a run that starts over none: the line of step 0 is written again
    struct kept kept = {0, step > 0 ? step : -1, BYTES_INIT};
    struct runlog *log = calloc(1, sizeof *log);
    if (!log) return status_fail(ST_NO_MEMORY, "no memory for the run's log");
    log->fd = -1;
    log->first_step = step;
    log->logging_steps = logging_steps;
    log->start_ns = clock_now_ns();
    *ret = log;
    if (!folder) return ST_OK;
    CHECK(path_put(log->path, folder, "metrics.jsonl"));
    if (!(log->folder = strdup(folder))) FAIL(ST_NO_MEMORY, "no memory for the run's log");
    if (file_exists(log->path)) { // lines of later steps are dropped
        CHECK(file_each_line(log->path, keep_line, &kept));
        CHECK(file_write_atomic(log->path, 0644, bytes_text(&kept.lines), kept.lines.len));
    }
    log->fd = open(log->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (log->fd < 0) FAIL(ST_IO, "%s: %s", log->path, strerror(errno));
    CHECK(tensorboard_new(folder, step, &log->tensorboard));
out:
    bytes_release(&kept.lines);
    if (st != ST_OK) {
        runlog_free(log);
        *ret = NULL;
    }
    return st;
}

void runlog_free(struct runlog *log)
{
    if (!log) return;
    if (log->fd >= 0) close(log->fd);
    tensorboard_free(log->tensorboard);
    free(log->folder);
    free(log);
}

json_t *json_finite(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

void metrics_put(json_t *metrics, const char *key, double value)
{
    json_object_set_new(metrics, key, json_finite(value));
}

void metrics_putf(json_t *metrics, double value, const char *key, ...)
{
    char text[64];
    va_list args;
    va_start(args, key);
    vsnprintf(text, sizeof text, key, args);
    va_end(args);
    metrics_put(metrics, text, value);
}

enum status runlog_write(struct runlog *log, json_t *metrics)
{
    enum status st;
    struct bytes line = BYTES_INIT;
    struct stat open, named;
    if (!log->folder) {
        json_decref(metrics);
        return ST_OK;
    }
    // Whoever removes or moves the folder of a run that goes on hears of it at its next line.
    if (fstat(log->fd, &open) != 0 || stat(log->path, &named) != 0 || open.st_ino != named.st_ino ||
        open.st_dev != named.st_dev)
        FAIL(ST_IO,
             "%s was removed or replaced while the run goes on: what follows would be kept nowhere",
             log->path);
    CHECK(json_put_line(&line, json_incref(metrics), JSON_REAL_PRECISION(METRICS_DIGITS)));
    CHECK(file_write_all(log->fd, log->path, line.data, line.len));
    st = tensorboard_write(log->tensorboard, metrics);
out:
    json_decref(metrics);
    bytes_release(&line);
    return st;
}

enum status runlog_rollouts(struct runlog *log, int64_t step, bool evaluation,
                            const struct bytes *lines)
{
    enum status st;
    char folder[PATH_ROOM], path[PATH_ROOM];
    if (!log->folder) return ST_OK;
    CHECK(path_put(folder, log->folder, "rollouts"));
    CHECK(path_put(path, folder, "%sstep-%" PRId64 ".jsonl", evaluation ? "eval-" : "", step));
    CHECK(file_make_folders(folder));
    st = file_write_atomic(path, 0644, bytes_text(lines), lines->len);
out:
    return st;
}

void runlog_progress(const struct runlog *log, const struct progress *p, int64_t total_steps)
{
    struct bytes line = BYTES_INIT;
    bool terminal = isatty(STDERR_FILENO);
    bool due = p->step % log->logging_steps == 0 || p->step == log->first_step + 1 ||
               p->step == total_steps;
    if (!log->folder || (!terminal && !due)) return;
    double per_step = clock_ms_since(log->start_ns) / 1e3 / (double)(p->step - log->first_step);
    progress_line(p, total_steps, per_step * (double)(total_steps - p->step), &line);
    log_progress("%s", bytes_text(&line));
    bytes_release(&line);
}
