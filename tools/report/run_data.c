/* run_data.c: columns out of a run. Stateless. */
// SPDX-License-Identifier: Apache-2.0
#include "tools/report/report.h"
#include "common/base/file.h"
#include "common/base/json.h"

#include <stdlib.h>
#include <string.h>

#define REPORTS_GIVEN 20        // of cluster reports
#define REPORT_MAX    (1 << 16) // bytes of one; of a longer one, its first lines

static void put_base64(struct json_out *o, const char *key, const void *data, size_t bytes)
{
    struct bytes text = BYTES_INIT;
    if (base64_encode(data, bytes, &text) != ST_OK) o->to->failed = true;
    json_out_string(o, key, bytes_text(&text), text.len);
    bytes_release(&text);
}

static void put_clean(struct json_out *o, const char *key, const char *text)
{
    json_t *clean = json_clean_string(text);
    json_out_value(o, key, clean);
    json_decref(clean);
}

// ---- metrics ------------------------------------------------------------------------------------

// The place of its first value at that line or behind it.
static size_t place_of(const struct series *s, int64_t line)
{
    size_t lo = 0, hi = s->n;
    while (lo < hi) {
        const size_t middle = (lo + hi) / 2;
        if (s->at[middle] < line)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo;
}

static void put_series(struct json_out *o, const struct series *s, int64_t from)
{
    const size_t first = place_of(s, from), n = s->n - first;
    if (n == 0) return;
    size_t same = 1;
    while (same < n && s->values[first + same] == s->values[first]) same++;
    json_out_open(o, NULL, '{');
    json_out_text(o, "key", s->key);
    if ((size_t)(s->at[s->n - 1] - s->at[first]) == n - 1)
        json_out_int(o, "first", s->at[first]);
    else
        put_base64(o, "at", s->at + first, n * sizeof *s->at);
    if (same == n) {
        json_out_float(o, "same", s->values[first]);
        json_out_uint(o, "n", n);
    } else {
        put_base64(o, "values", s->values + first, n * sizeof *s->values);
    }
    json_out_close(o, '}');
}

static void put_metrics(struct json_out *o, const struct metrics *m, int64_t from)
{
    json_out_int(o, "lines", m->n_lines);
    json_out_int(o, "bad", m->n_bad);
    json_out_int(o, "from", from);
    put_base64(o, "steps", m->n_lines > from ? m->steps + from : NULL,
               (size_t)(m->n_lines - from) * sizeof *m->steps);
    json_out_open(o, "series", '[');
    for (int i = 0; i < m->n; i++) put_series(o, &m->series[i], from);
    json_out_close(o, ']');
}

// ---- cluster reports ----------------------------------------------------------------------------

// Of many, the first and the latest.
static enum status put_reports(struct json_out *o, const struct run_folder *run)
{
    enum status st = ST_OK;
    struct bytes text = BYTES_INIT;
    int64_t behind;
    const int left_out = run->n_reports > REPORTS_GIVEN ? run->n_reports - REPORTS_GIVEN : 0;
    json_out_int(o, "left_out", left_out);
    json_out_open(o, "reports", '[');
    for (int i = 0; i < run->n_reports; i++) {
        if (i > 0 && i <= left_out) continue;
        CHECK(file_read_start(run->reports[i].path, REPORT_MAX, &text, &behind));
        json_out_open(o, NULL, '{');
        json_out_int(o, "epoch", run->reports[i].epoch);
        put_clean(o, "text", bytes_text(&text));
        json_out_int(o, "left_out", behind);
        json_out_close(o, '}');
    }
    json_out_close(o, ']');
    json_out_int(o, "n_reports", run->n_reports);
out:
    bytes_release(&text);
    return st;
}

// ---- samples ------------------------------------------------------------------------------------

static const struct {
    const char *key;
    size_t offset, size;
} columns[] = {
#define COLUMN(field)                                                                              \
    {                                                                                              \
#field, offsetof(struct report_sample, field),                                             \
            sizeof(((struct report_sample *)NULL)->field)                                          \
    }
    COLUMN(step),   COLUMN(row),    COLUMN(line),      COLUMN(number),
    COLUMN(tokens), COLUMN(reward), COLUMN(advantage), COLUMN(truncated),
#undef COLUMN
};

static enum status put_samples(struct json_out *o, const struct samples *s, size_t from)
{
    const size_t n = s->n - from;
    char *column = malloc(n * sizeof(int32_t) + 1);
    if (!column) return status_fail(ST_NO_MEMORY, "no memory for %zu samples", n);
    json_out_open(o, "samples", '{');
    json_out_int(o, "from", (int64_t)from);
    json_out_int(o, "bad", s->n_bad);
    for (size_t c = 0; c < sizeof columns / sizeof *columns; c++) {
        const size_t size = columns[c].size;
        for (size_t i = 0; i < n; i++)
            memcpy(column + i * size, (const char *)&s->samples[from + i] + columns[c].offset,
                   size);
        put_base64(o, columns[c].key, column, n * size);
    }
    json_out_close(o, '}');
    free(column);
    return ST_OK;
}

static enum status put_prompts(struct json_out *o, const struct samples *s, size_t from)
{
    const size_t n = s->n_prompts - from;
    int32_t *lines = malloc(n * sizeof *lines + 1);
    if (!lines) return status_fail(ST_NO_MEMORY, "no memory for %zu prompts", n);
    for (size_t i = 0; i < n; i++) lines[i] = s->prompts[from + i].line;
    json_out_open(o, "prompts", '{');
    json_out_int(o, "from", (int64_t)from);
    put_base64(o, "line", lines, n * sizeof *lines);
    json_out_open(o, "text", '[');
    for (size_t i = 0; i < n; i++) put_clean(o, NULL, s->prompts[from + i].text);
    json_out_close(o, ']');
    json_out_close(o, '}');
    free(lines);
    return ST_OK;
}

// ---- the whole ----------------------------------------------------------------------------------

// No more than there is: a page of another generation, or with numbers of its own making, gets all.
static struct run_cursor checked(const struct run_folder *run, const struct run_cursor *has)
{
    const bool good = has->generation == run->generation && has->lines >= 0 && has->samples >= 0 &&
                      has->prompts >= 0 && has->lines <= run->metrics.n_lines &&
                      has->samples <= (int64_t)run->samples.n &&
                      has->prompts <= (int64_t)run->samples.n_prompts;
    return good ? *has : (struct run_cursor){0};
}

enum status run_data_put(const struct run_folder *run, const struct run_cursor *has,
                         struct bytes *to)
{
    enum status st = ST_OK;
    struct json_out out = {to, false}, *o = &out;
    const struct run_cursor from = checked(run, has);
    json_out_open(o, NULL, '{');
    put_clean(o, "name", run->name);
    json_out_int(o, "generation", run->generation);
    json_out_int(o, "written", run->written_s);
    json_out_bool(o, "behind", run_folder_is_behind(run));
    if (from.lines == 0) {
        json_out_value(o, "config", run->config);
        json_out_value(o, "start", run->start);
    }
    put_metrics(o, &run->metrics, from.lines);
    if (from.reports != run->n_reports || from.lines == 0) CHECK(put_reports(o, run));
    CHECK(put_samples(o, &run->samples, (size_t)from.samples));
    CHECK(put_prompts(o, &run->samples, (size_t)from.prompts));
    json_out_close(o, '}');
    st = bytes_status(to);
out:
    return st;
}
