/* series.c: metrics.jsonl into memory, 8 bytes a number: 10,000 steps of 100 keys are 8 MB, and the
 * file itself is never held whole. A value has the 7 digits of a float, which is more than a chart
 * shows. */
// SPDX-License-Identifier: Apache-2.0
#include "tools/report/report.h"
#include "common/base/bytes.h"
#include "common/base/file.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static struct series *series_of(struct metrics *m, const char *key)
{
    const json_t *place = json_object_get(m->index, key);
    if (place) return &m->series[json_integer_value(place)];
    struct series *grown = array_room(m->series, (size_t)m->n, sizeof *grown);
    if (!grown) return NULL;
    m->series = grown;
    struct series s = {.key = strdup(key)};
    if (!s.key || json_object_set_new(m->index, key, json_integer(m->n)) != 0) {
        free(s.key);
        return NULL;
    }
    m->series[m->n] = s;
    return &m->series[m->n++];
}

static bool series_push(struct series *s, int32_t line, float value)
{
    int32_t *at = array_room(s->at, s->n, sizeof *at);
    if (at) s->at = at;
    float *values = array_room(s->values, s->n, sizeof *values);
    if (values) s->values = values;
    if (!at || !values) return false;
    s->at[s->n] = line;
    s->values[s->n++] = value;
    return true;
}

static enum status take_line(void *context, const char *text, size_t len)
{
    struct metrics *m = context;
    enum status st = ST_OK;
    const char *key;
    const json_t *value;
    json_t *line = json_loadb(text, len, 0, NULL);
    const json_t *step = json_object_get(line, "step");
    const int32_t last = m->n_lines > 0 ? m->steps[m->n_lines - 1] : -1;
    if (!json_is_integer(step) || json_integer_value(step) <= last ||
        json_integer_value(step) > INT32_MAX) {
        m->n_bad++;
        goto out;
    }
    int32_t *steps = array_room(m->steps, (size_t)m->n_lines, sizeof *steps);
    if (!steps) FAIL(ST_NO_MEMORY, "no memory for %d lines of metrics", m->n_lines);
    m->steps = steps;
    m->steps[m->n_lines++] = (int32_t)json_integer_value(step);
    json_object_foreach (line, key, value) {
        double number = json_number_value(value);
        if (!json_is_number(value) || fabs(number) > FLT_MAX || value == step) continue;
        struct series *s = series_of(m, key);
        if (!s || !series_push(s, m->n_lines - 1, (float)number))
            FAIL(ST_NO_MEMORY, "no memory for %d lines of metrics", m->n_lines);
    }
out:
    json_decref(line);
    return st;
}

enum status metrics_read(struct metrics *m, const char *path, bool *ret_anew)
{
    enum status st;
    struct stat info;
    if (stat(path, &info) != 0)
        return status_fail(errno == ENOENT ? ST_NOT_FOUND : ST_IO, "%s: %s", path, strerror(errno));
    const bool anew =
        m->index && (info.st_ino != m->inode || info.st_dev != m->device || info.st_size < m->at);
    if (anew) metrics_release(m);
    if (!m->index) *m = (struct metrics){.index = json_object()};
    m->device = info.st_dev;
    m->inode = info.st_ino;
    CHECK(file_lines_from(path, &m->at, take_line, m));
    if (m->n_lines == 0 && m->n_bad > 0)
        FAIL(ST_FORMAT,
             "%s: no line is an object with a \"step\": it is not what cw-trainer "
             "writes",
             path);
    *ret_anew = anew;
out:
    return st;
}

void metrics_release(struct metrics *m)
{
    for (int i = 0; i < m->n; i++) {
        free(m->series[i].key);
        free(m->series[i].at);
        free(m->series[i].values);
    }
    free(m->series);
    free(m->steps);
    json_decref(m->index);
    *m = (struct metrics){0};
}
