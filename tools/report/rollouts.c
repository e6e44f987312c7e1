/* rollouts.c: of the first, the middle and the last logged step, one group: samples of the same
 * prompt, which GRPO compares with each other. A group whose rewards differ shows more than one
 * without, so the first such is taken. */
#include "tools/report/rollouts.h"
#include "common/base/file.h"
#include "tools/report/html.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STEPS_SHOWN   3
#define SAMPLES_SHOWN 4
#define TEXT_SHOWN    6000 // bytes of a completion or prompt

// ---- a text -------------------------------------------------------------------------------------

// Bytes of the first `n` of a text's characters.
static size_t byte_of_character(const char *text, size_t len, json_int_t n)
{
    size_t at = 0;
    for (; at < len; at++)
        if (((unsigned char)text[at] & 0xc0) != 0x80 && n-- == 0) break;
    return at;
}

// `len`, or less where that is more than is shown; never within a character.
static size_t shown(const char *text, size_t len)
{
    if (len <= TEXT_SHOWN) return len;
    for (len = TEXT_SHOWN; len > 0 && ((unsigned char)text[len] & 0xc0) == 0x80;) len--;
    return len;
}

static void put_cut_mark(size_t left_out, struct bytes *to)
{
    if (left_out) bytes_printf(to, "<em>[%zu more bytes]</em>", left_out);
}

void completion_draw(const char *text, size_t len, const json_t *accepted,
                     const json_t *text_offset, struct bytes *to)
{
    size_t end = shown(text, len), at = 0, n = json_array_size(text_offset);
    bool marked = false;
    if (json_array_size(accepted) != n) n = 0;
    // A token's text reaches to where the next one's begins. Neighbours that are both accepted
    // share one <mark>; tokens without text of their own (half a character) do not part them.
    for (size_t t = 0; t < n && at < end; t++) {
        json_int_t next = t + 1 < n ? json_integer_value(json_array_get(text_offset, t + 1)) -
                                          json_integer_value(json_array_get(text_offset, t))
                                    : (json_int_t)len;
        size_t token_end = at + (next > 0 ? byte_of_character(text + at, end - at, next) : 0);
        bool mark = json_integer_value(json_array_get(accepted, t)) > 0;
        if (token_end == at) continue;
        if (mark != marked) bytes_puts(to, mark ? "<mark>" : "</mark>");
        marked = mark;
        html_text(to, text + at, token_end - at);
        at = token_end;
    }
    if (marked) bytes_puts(to, "</mark>");
    html_text(to, text + at, end - at);
    put_cut_mark(len - end, to);
}

static void put_prompt_text(const char *role, const json_t *text, struct bytes *to)
{
    if (!json_is_string(text)) return;
    size_t len = json_string_length(text), end = shown(json_string_value(text), len);
    bytes_puts(to, "<pre class=\"prompt\"><b>");
    html_puts(to, role);
    bytes_puts(to, "</b> ");
    html_text(to, json_string_value(text), end);
    put_cut_mark(len - end, to);
    bytes_puts(to, "</pre>\n");
}

// A prompt is text or a list of chat messages.
static void put_prompt(const json_t *prompt, struct bytes *to)
{
    size_t i;
    const json_t *message;
    put_prompt_text("prompt", prompt, to);
    json_array_foreach (prompt, i, message) {
        const char *role = json_string_value(json_object_get(message, "role"));
        put_prompt_text(role ? role : "message", json_object_get(message, "content"), to);
    }
}

// ---- a sample -----------------------------------------------------------------------------------

static double number_of(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

// A number and its unit; nothing where there is no such number.
static void put_fact(const char *key, double value, const char *unit, struct bytes *to)
{
    char number[NUMBER_ROOM], text[NUMBER_ROOM + 8];
    if (!isfinite(value)) return;
    snprintf(text, sizeof text, "%s%s", number_text(value, number), unit);
    html_fact(to, key, text);
}

static void draw_sample(const json_t *sample, struct bytes *to)
{
    const json_t *text = json_object_get(sample, "completion"), *value;
    const json_t *telemetry = json_object_get(sample, "telemetry");
    const char *term;
    bytes_puts(to, "<div class=\"sample\"><dl>");
    put_fact("reward", number_of(sample, "reward"), "", to);
    put_fact("advantage", number_of(sample, "advantage"), "", to);
    json_object_foreach (json_object_get(sample, "terms"), term, value)
        put_fact(term, json_is_number(value) ? json_number_value(value) : NAN, "", to);
    put_fact("tokens", number_of(sample, "tokens"), "", to);
    put_fact("latency", number_of(telemetry, "latency_ms"), " ms", to);
    put_fact("drafts accepted", number_of(telemetry, "accept_rate") * 100, "%", to);
    if (json_is_true(json_object_get(sample, "truncated")))
        html_fact(to, "truncated", "at the token limit");
    bytes_puts(to, "</dl><pre>");
    completion_draw(json_string_value(text), json_string_length(text),
                    json_object_get(sample, "accepted"), json_object_get(sample, "text_offset"),
                    to);
    bytes_puts(to, "</pre></div>\n");
}

// ---- a step -------------------------------------------------------------------------------------

// The first group of the file whose rewards differ, or else its first: at most SAMPLES_SHOWN
// samples of it. Groups are told apart by "sample", which counts from 0 in each.
struct pick {
    json_t *group, *first, *differing; // arrays
};

static void end_group(struct pick *p)
{
    if (json_array_size(p->group) == 0) return;
    const double reward = number_of(json_array_get(p->group, 0), "reward");
    bool differs = false;
    for (size_t i = 1; i < json_array_size(p->group); i++)
        differs |= number_of(json_array_get(p->group, i), "reward") != reward;
    if (!p->first) p->first = json_incref(p->group);
    if (differs && !p->differing) p->differing = json_incref(p->group);
    json_decref(p->group);
    p->group = json_array();
}

static enum status take_line(void *context, const char *line, size_t len)
{
    struct pick *p = context;
    enum status st = ST_OK;
    if (p->differing) return ST_OK;
    json_t *sample = json_loadb(line, len, JSON_ALLOW_NUL, NULL);
    const json_t *number = json_object_get(sample, "sample");
    bool good = json_is_string(json_object_get(sample, "completion")) && json_is_integer(number);
    if (good && json_integer_value(number) == 0) end_group(p);
    if (good && json_array_append(p->group, sample) != 0)
        st = status_fail(ST_NO_MEMORY, "no memory for the samples of a rollout");
    json_decref(sample);
    return st;
}

static enum status pick_group(const char *path, json_t **ret)
{
    struct pick p = {.group = json_array()};
    enum status st = file_each_line(path, take_line, &p);
    if (st == ST_OK) {
        end_group(&p);
        *ret = json_incref(p.differing ? p.differing : p.first);
    }
    json_decref(p.group);
    json_decref(p.first);
    json_decref(p.differing);
    return st;
}

// Fewer than all, but with the least and the largest reward among them.
static bool is_shown(const json_t *group, size_t i)
{
    size_t n = json_array_size(group), min = 0, max = 0;
    for (size_t k = 1; k < n; k++) {
        double reward = number_of(json_array_get(group, k), "reward");
        if (reward < number_of(json_array_get(group, min), "reward")) min = k;
        if (reward > number_of(json_array_get(group, max), "reward")) max = k;
    }
    return i == min || i == max || i < SAMPLES_SHOWN - 2;
}

static enum status draw_step(const struct numbered_file *file, struct bytes *to)
{
    json_t *group = NULL;
    enum status st = pick_group(file->path, &group);
    if (st != ST_OK || !group) return st;
    const json_t *first = json_array_get(group, 0), *answer = json_object_get(first, "answer");
    size_t n = 0;
    for (size_t i = 0; i < json_array_size(group); i++) n += is_shown(group, i);
    bytes_printf(to, "<h3>Step %lld <span>%zu of a group of %zu samples</span></h3>\n",
                 (long long)file->number, n, json_array_size(group));
    if (json_object_get(first, "prompt_text")) // as the model saw it
        put_prompt(json_object_get(first, "prompt_text"), to);
    else if (json_object_get(first, "prompt"))
        put_prompt(json_object_get(first, "prompt"), to);
    if (json_is_string(answer)) {
        const char *text = json_string_value(answer);
        bytes_puts(to, "<p>answer: <code>");
        html_text(to, text, shown(text, json_string_length(answer)));
        bytes_puts(to, "</code></p>\n");
    }
    for (size_t i = 0; i < json_array_size(group); i++)
        if (is_shown(group, i)) draw_sample(json_array_get(group, i), to);
    json_decref(group);
    return bytes_status(to);
}

enum status rollouts_draw(const struct run_folder *run, struct bytes *to)
{
    enum status st = ST_OK;
    const struct file_list *list = &run->rollouts;
    if (list->n == 0) return ST_OK;
    bytes_puts(to, "<section><h2>Rollouts</h2>\n<p>Samples of the first, the middle and "
                   "the last step whose text was logged. <mark>Marked</mark> text was drafted and "
                   "accepted.</p>\n");
    for (int i = 0, last = -1; i < STEPS_SHOWN; i++) {
        int k = (list->n - 1) * i / (STEPS_SHOWN - 1);
        if (k != last) CHECK(draw_step(&list->files[k], to));
        last = k;
    }
    bytes_puts(to, "</section>\n");
    st = bytes_status(to);
out:
    return st;
}
