/* series.c: metrics.jsonl into memory, 16 bytes a number: 100,000 steps of 80 keys are 128 MB, and
 * the file itself is never held whole. */
#include "tools/report/series.h"
#include "common/base/file.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LARGEST 1e300 // so that a difference of two is finite

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

static bool series_push(struct series *s, int64_t step, double value)
{
    struct point *grown = array_room(s->points, s->n, sizeof *grown);
    if (!grown) return false;
    s->points = grown;
    s->points[s->n++] = (struct point){step, value};
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
    if (!json_is_integer(step) || json_integer_value(step) <= m->last_step) {
        m->n_bad++;
        goto out;
    }
    m->last_step = json_integer_value(step);
    if (m->n_lines++ == 0) m->first_step = m->last_step;
    json_object_foreach (line, key, value) {
        double number = json_number_value(value);
        if (!json_is_number(value) || fabs(number) > LARGEST || value == step) continue;
        struct series *s = series_of(m, key);
        if (!s || !series_push(s, m->last_step, number))
            FAIL(ST_NO_MEMORY, "no memory for %lld lines of metrics", (long long)m->n_lines);
    }
out:
    json_decref(line);
    return st;
}

enum status metrics_read(const char *path, struct metrics *ret)
{
    enum status st;
    struct metrics m = {.index = json_object(), .first_step = -1, .last_step = -1};
    CHECK(file_each_line(path, take_line, &m));
    if (m.n_lines == 0 && m.n_bad > 0)
        FAIL(ST_FORMAT,
             "%s: no line is an object with a \"step\": it is not what cw-trainer train "
             "writes",
             path);
    *ret = m;
out:
    if (st != ST_OK) metrics_release(&m);
    return st;
}

void metrics_release(struct metrics *m)
{
    for (int i = 0; i < m->n; i++) {
        free(m->series[i].key);
        free(m->series[i].points);
    }
    free(m->series);
    json_decref(m->index);
    *m = (struct metrics){0};
}

struct series *metrics_find(const struct metrics *m, const char *key)
{
    const json_t *place = json_object_get(m->index, key);
    return place ? &m->series[json_integer_value(place)] : NULL;
}

// Mean of the points of `error` at the steps from first to last; *at goes forward over them.
static double mean_error(const struct series *error, size_t *at, int64_t first, int64_t last)
{
    double sum = 0;
    int n = 0;
    if (!error) return NAN;
    while (*at < error->n && error->points[*at].step < first) ++*at;
    for (; *at < error->n && error->points[*at].step <= last; ++*at, n++)
        sum += error->points[*at].value;
    return n ? sum / n : NAN;
}

enum status curve_new(const struct series *s, const struct series *error, int max_points,
                      struct curve *ret)
{
    size_t size = (s->n + (size_t)max_points - 1) / (size_t)max_points, at = 0;
    struct curve c = {.reduced = size > 1};
    if (s->n == 0) {
        *ret = c;
        return ST_OK;
    }
    c.points = malloc((s->n + size - 1) / size * sizeof *c.points);
    if (!c.points) return status_fail(ST_NO_MEMORY, "no memory for a curve");
    for (size_t first = 0; first < s->n; first += size) {
        size_t n = s->n - first < size ? s->n - first : size;
        const struct point *p = &s->points[first];
        struct curve_point q = {.min = p->value, .max = p->value};
        for (size_t i = 0; i < n; i++) {
            q.step += (double)p[i].step / (double)n;
            q.mean += p[i].value / (double)n;
            q.min = fmin(q.min, p[i].value);
            q.max = fmax(q.max, p[i].value);
        }
        q.error = mean_error(error, &at, p->step, p[n - 1].step);
        c.points[c.n++] = q;
    }
    *ret = c;
    return ST_OK;
}

void curve_release(struct curve *c)
{
    free(c->points);
    *c = (struct curve){0};
}
