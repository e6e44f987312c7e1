/* samples.c: files of rollouts/, line by line. */
// SPDX-License-Identifier: Apache-2.0
#include "tools/report/report.h"
#include "common/base/bytes.h"
#include "common/base/file.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define PROMPT_BYTES 120 // of a prompt in a list

struct reading {
    struct samples *samples;
    int32_t step, row;
    bool held_out;
    struct bytes line;
};

static int32_t whole(const json_t *object, const char *key, int32_t otherwise)
{
    const json_t *value = json_object_get(object, key);
    return json_is_integer(value) ? (int32_t)json_integer_value(value) : otherwise;
}

static float number(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_number(value) ? (float)json_number_value(value) : NAN;
}

// Text, or the content of the last of several messages; NULL: there is none.
static const char *prompt_text(const json_t *prompt)
{
    if (json_is_string(prompt)) return json_string_value(prompt);
    const json_t *last = json_array_get(prompt, json_array_size(prompt) - 1);
    return json_string_value(json_object_get(last, "content"));
}

static enum status take_prompt(struct samples *s, const json_t *line, int32_t number_of_line)
{
    char key[16];
    const char *text = prompt_text(json_object_get(line, "prompt"));
    snprintf(key, sizeof key, "%d", number_of_line);
    if (!text || json_object_get(s->known, key)) return ST_OK;
    size_t len = strnlen(text, PROMPT_BYTES);
    while (text[len] && ((unsigned char)text[len] & 0xc0) == 0x80) len--; // whole characters
    struct prompt *grown = array_room(s->prompts, s->n_prompts, sizeof *grown);
    if (grown) s->prompts = grown;
    char *copy = grown ? strndup(text, len) : NULL;
    if (!copy || json_object_set_new(s->known, key, json_true()) != 0) {
        free(copy);
        return status_fail(ST_NO_MEMORY, "no memory for %zu prompts", s->n_prompts);
    }
    s->prompts[s->n_prompts++] = (struct prompt){number_of_line, copy};
    return ST_OK;
}

// A line with its lists of numbers emptied: they have an entry a token, which is most of the line,
// and nothing of them is wanted here.
static void put_short(const char *text, const char *end, struct bytes *to)
{
    while (text < end) {
        const char *next = text;
        while (next < end && *next != '"' && *next != '[') next++;
        if (next < end && *next == '"') { // to the end of the string
            for (next++; next < end && *next != '"'; next++) next += *next == '\\';
            next++;
        } else if (next < end) {
            next++;
        }
        if (next > end) next = end;
        bytes_append(to, text, (size_t)(next - text));
        text = next;
        if (next[-1] != '[') continue;
        const char *close = text;
        while (close < end && strchr("0123456789.,-+eE ", *close) && *close) close++;
        if (close < end && *close == ']') text = close;
    }
}

static enum status take_line(void *context, const char *text, size_t len)
{
    struct reading *r = context;
    struct samples *s = r->samples;
    enum status st = ST_OK;
    bytes_clear(&r->line);
    put_short(text, text + len, &r->line);
    json_t *line = json_loadb(bytes_text(&r->line), r->line.len, JSON_ALLOW_NUL, NULL);
    const int32_t of_data = whole(line, "line", 0);
    const char *finish = json_string_value(json_object_get(line, "finish_reason"));
    struct report_sample sample = {.step = r->step,
                                   .row = r->row++,
                                   .line = r->held_out ? -of_data : of_data,
                                   .number = whole(line, "sample", -1),
                                   .tokens = whole(line, "tokens", -1),
                                   .reward = number(line, "reward"),
                                   .advantage = number(line, "advantage"),
                                   .truncated = json_is_true(json_object_get(line, "truncated")) ||
                                                (finish && strcmp(finish, "length") == 0)};
    if (json_is_string(json_object_get(line, "completion")) && sample.number >= 0) {
        struct report_sample *grown = array_room(s->samples, s->n, sizeof *grown);
        if (!grown) FAIL(ST_NO_MEMORY, "no memory for %zu samples", s->n);
        s->samples = grown;
        s->samples[s->n++] = sample;
        st = take_prompt(s, line, sample.line);
    } else {
        s->n_bad++;
    }
out:
    json_decref(line);
    return st;
}

enum status samples_add(struct samples *s, int32_t step, bool held_out, const char *path)
{
    struct reading reading = {s, step, 0, held_out, BYTES_INIT};
    struct stat info;
    int64_t at = 0;
    if (!s->known && !(s->known = json_object()))
        return status_fail(ST_NO_MEMORY, "no memory for prompts");
    enum status st = file_lines_from(path, &at, take_line, &reading);
    if (stat(path, &info) == 0 && info.st_size > at) s->n_bad++; // its end is missing
    bytes_release(&reading.line);
    return st;
}

void samples_release(struct samples *s)
{
    for (size_t i = 0; i < s->n_prompts; i++) free(s->prompts[i].text);
    free(s->prompts);
    free(s->samples);
    json_decref(s->known);
    *s = (struct samples){0};
}
