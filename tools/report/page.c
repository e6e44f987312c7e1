/* page.c: the page's elements: style, body, data and script, which draws all of it.
 *
 * What a model wrote into a rollout is JSON in an element that is no program, and the script makes
 * text of it, never markup. Should that have a hole: the page's Content-Security-Policy lets no
 * other script run than this one, named by its hash, and nothing be loaded, but by a served page
 * from its server. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/file.h"
#include "common/base/hash.h"
#include "tools/report/report.h"

#include <string.h>
#include <sys/stat.h>

void page_put_json(struct bytes *to, const char *json, size_t len)
{
    while (len > 0) {
        const char *next = memchr(json, '<', len);
        const size_t plain = next ? (size_t)(next - json) : len;
        bytes_append(to, json, plain);
        if (!next) return;
        bytes_puts(to, "\\u003c");
        json += plain + 1;
        len -= plain + 1;
    }
}

// connect: what its scripts may load from
static enum status put_head(const char *connect, struct bytes *to)
{
    enum status st;
    unsigned char hash[HASH_SHA256_BYTES];
    struct bytes name = BYTES_INIT;
    hash_sha256(report_script, strlen(report_script), hash);
    CHECK(base64_encode(hash, sizeof hash, &name));
    bytes_printf(to,
                 "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>\n"
                 "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
                 "style-src 'unsafe-inline'; script-src 'sha256-%s'; connect-src %s; form-action "
                 "'none'; base-uri 'none'\"/>\n"
                 "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n"
                 "<title>cw-report</title>\n<style>\n",
                 bytes_text(&name), connect);
    bytes_puts(to, report_style);
    bytes_puts(to, "</style></head>\n");
    bytes_puts(to, report_body);
out:
    bytes_release(&name);
    return st;
}

static void put_end(struct bytes *to)
{
    bytes_puts(to, "<script>");
    bytes_puts(to, report_script);
    bytes_puts(to, "</script>\n</body></html>\n");
}

// ---- texts of samples ---------------------------------------------------------------------------

// Steps of a run that have samples, in turn from i on; -1: no more.
static int32_t next_step(const struct samples *s, size_t *i)
{
    if (*i >= s->n) return -1;
    const int32_t step = s->samples[*i].step;
    while (*i < s->n && s->samples[*i].step == step) ++*i;
    return step;
}

// Of its samples the first whose lines are `max` bytes at most.
static enum status put_file(int number, const struct run_folder *run, int32_t step, bool held_out,
                            int64_t max, struct bytes *to)
{
    enum status st;
    char path[PATH_ROOM];
    int64_t left_out;
    struct bytes text = BYTES_INIT;
    CHECK(run_folder_rollouts(run, step, held_out, path));
    if (!file_exists(path) || max <= 0) goto out;
    CHECK(file_read_start(path, (size_t)max, &text, &left_out));
    if (text.len == 0) goto out;
    bytes_printf(to, "<script type=\"application/json\" id=\"rollouts-%d-%d%s\">", number, step,
                 held_out ? "-eval" : "");
    page_put_json(to, bytes_text(&text), text.len);
    bytes_puts(to, "</script>\n");
    st = bytes_status(to);
out:
    bytes_release(&text);
    return st;
}

// Those of the step, then those of its evaluation.
static enum status put_texts(int number, const struct run_folder *run, int32_t step, int64_t max,
                             struct bytes *to)
{
    const int64_t end = (int64_t)to->len + max;
    enum status st = put_file(number, run, step, false, max, to);
    return st == ST_OK ? put_file(number, run, step, true, end - (int64_t)to->len, to) : st;
}

// Of all steps n, and of their files all bytes.
static enum status measure(const struct run_folder *run, int64_t *ret_n, int64_t *ret_bytes)
{
    char path[PATH_ROOM];
    struct stat info;
    int64_t n = 0, bytes = 0;
    size_t i = 0;
    for (int32_t step; (step = next_step(&run->samples, &i)) >= 0; n++)
        for (int held_out = 0; held_out < 2; held_out++) {
            enum status st = run_folder_rollouts(run, step, held_out, path);
            if (st != ST_OK) return st;
            if (stat(path, &info) == 0) bytes += info.st_size;
        }
    *ret_n = n;
    *ret_bytes = bytes;
    return ST_OK;
}

// Of more than `max` bytes, those of the last step, which the page shows first, and of every so
// many-th one.
static enum status put_all_texts(int number, const struct run_folder *run, int64_t max,
                                 struct bytes *to)
{
    enum status st;
    int64_t n, bytes;
    size_t i = 0;
    if (max == 0) return ST_OK;
    CHECK(measure(run, &n, &bytes));
    if (n == 0) goto out;
    const int64_t every = bytes / max + 1;
    const int64_t end = (int64_t)to->len + max;
    CHECK(put_texts(number, run, run->samples.samples[run->samples.n - 1].step, max, to));
    for (int64_t k = 0; k < n - 1 && (int64_t)to->len < end; k++) {
        const int32_t step = next_step(&run->samples, &i);
        if (k % every == 0) CHECK(put_texts(number, run, step, end - (int64_t)to->len, to));
    }
out:
    return st;
}

// ---- the page -----------------------------------------------------------------------------------

enum status page_put(const struct run_folder *runs, int n, int64_t max_texts, struct bytes *to)
{
    enum status st;
    struct bytes data = BYTES_INIT;
    CHECK(put_head("'none'", to));
    for (int i = 0; i < n; i++) CHECK(put_all_texts(i, &runs[i], max_texts / n, to));
    for (int i = 0; i < n; i++) {
        bytes_clear(&data);
        CHECK(run_data_put(&runs[i], &(struct run_cursor){0}, &data));
        bytes_printf(to, "<script type=\"application/json\" id=\"run-%d\">", i);
        page_put_json(to, bytes_text(&data), data.len);
        bytes_puts(to, "</script>\n");
    }
    put_end(to);
    st = bytes_status(to);
out:
    bytes_release(&data);
    return st;
}

enum status page_put_live(int n, int shown, struct bytes *to)
{
    enum status st = put_head("'self'", to);
    if (st != ST_OK) return st;
    bytes_printf(to,
                 "<script type=\"application/json\" data-shown=\"%d\" id=\"live\">%d</script>\n",
                 shown, n);
    put_end(to);
    return bytes_status(to);
}
