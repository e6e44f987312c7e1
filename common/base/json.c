/* json.c: reading and writing JSON through jansson, with errors that name file and field. No state;
 * any thread, each on its own values. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "common/base/file.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// An integer of more digits than int64_t holds, as Python writes them ("no limit" is 10^30 in
// tokenizer_config.json).
static bool is_wide_integer(const char *number, size_t len)
{
    char digits[24];
    for (size_t i = 0; i < len; i++)
        if (!strchr("-0123456789", number[i])) return false; // a fraction
    if (len >= sizeof digits) return true;
    memcpy(digits, number, len);
    digits[len] = '\0';
    errno = 0;
    strtoll(digits, NULL, 10);
    return errno == ERANGE;
}

static bool in_number(char c)
{
    return c && strchr("+-.eE0123456789", c);
}

// The text with wide integers as fractions ("10..." becomes "10....0"), which are read as reals,
// and Python's Infinity (the time_step_limit of published configs) as the largest number.
static enum status widen_numbers(const char *text, size_t len, struct bytes *ret)
{
    static const char infinity[] = "Infinity", largest[] = "1.7976931348623157e308";
    const size_t word = sizeof infinity - 1;
    bool in_string = false;
    for (size_t i = 0; i < len;) {
        size_t n = 1;
        bool wide = false;
        if (in_string && text[i] == '\\' && i + 1 < len) {
            n = 2;
        } else if (text[i] == '"') {
            in_string = !in_string;
        } else if (!in_string && len - i >= word && memcmp(text + i, infinity, word) == 0) {
            bytes_puts(ret, largest);
            i += word;
            continue;
        } else if (!in_string && in_number(text[i])) {
            while (i + n < len && in_number(text[i + n])) n++;
            wide = is_wide_integer(text + i, n);
        }
        bytes_append(ret, text + i, n);
        if (wide) bytes_puts(ret, ".0");
        i += n;
    }
    return bytes_status(ret);
}

// of_file: Python's Infinity is read.
static enum status parse(const char *where, const char *text, size_t len, bool of_file,
                         json_t **ret)
{
    static const char bom[] = "\xef\xbb\xbf";
    json_error_t error;
    struct bytes widened = BYTES_INIT;
    enum status st = ST_OK;
    if (len >= 3 && memcmp(text, bom, 3) == 0) text += 3, len -= 3;
    // A sampled token may be the byte 0, so strings may hold NUL; json_get_string() refuses it.
    json_t *value = json_loadb(text, len, JSON_ALLOW_NUL, &error);
    if (!value && (json_error_code(&error) == json_error_numeric_overflow ||
                   (of_file && json_error_code(&error) == json_error_invalid_syntax &&
                    strstr(error.text, "'Infinity'")))) {
        CHECK(status_context(widen_numbers(text, len, &widened), "%s", where));
        value = json_loadb(bytes_text(&widened), widened.len, JSON_ALLOW_NUL, &error);
    }
    if (!value) {
        char line[32] = ""; // of one line, `where` says which
        if (len && memchr(text, '\n', len)) snprintf(line, sizeof line, "line %d, ", error.line);
        FAIL(json_error_code(&error) == json_error_out_of_memory ? ST_NO_MEMORY : ST_FORMAT,
             "%s: %scolumn %d: %s", where, line, error.column, error.text);
    }
    *ret = value;
out:
    bytes_release(&widened);
    return st;
}

enum status json_parse(const char *where, const char *text, size_t len, json_t **ret)
{
    return parse(where, text, len, false, ret);
}

enum status json_read_file(const char *path, size_t max_bytes, json_t **ret)
{
    struct bytes text = BYTES_INIT;
    enum status st = file_read(path, max_bytes, &text);
    if (st == ST_OK) st = parse(path, bytes_text(&text), text.len, true, ret);
    bytes_release(&text);
    return st;
}

enum status json_write_file(const char *path, unsigned mode, const json_t *value)
{
    struct bytes text = BYTES_INIT;
    char *dump = json_dumps(value, JSON_INDENT(2));
    if (!dump) return status_fail(ST_INVALID, "%s: the value cannot be written as JSON", path);
    bytes_puts(&text, dump);
    bytes_puts(&text, "\n");
    free(dump);
    enum status st = bytes_status(&text);
    if (st == ST_OK) st = file_write_atomic(path, mode, text.data, text.len);
    bytes_release(&text);
    return st;
}

static const char *type_words(const json_t *value)
{
    static const char *const words[] = {
        [JSON_OBJECT] = "an object",       [JSON_ARRAY] = "an array",  [JSON_STRING] = "a string",
        [JSON_INTEGER] = "a whole number", [JSON_REAL] = "a fraction", [JSON_TRUE] = "a boolean",
        [JSON_FALSE] = "a boolean",        [JSON_NULL] = "null",
    };
    return words[json_typeof(value)];
}

#define IS(type)  (1 << (type))
#define IS_NUMBER (IS(JSON_INTEGER) | IS(JSON_REAL))

// The field, which must be of one of these types; NULL where it is absent or null.
static enum status find(const char *where, const json_t *object, const char *key, int types,
                        const char *wanted, const json_t **ret)
{
    *ret = NULL;
    if (!object || json_is_null(object)) return ST_OK;
    if (!json_is_object(object))
        return status_fail(ST_INVALID, "%s: \"%s\" is looked for in an object, but there is %s",
                           where, key, type_words(object));
    const json_t *value = json_object_get(object, key);
    if (!value || json_is_null(value)) return ST_OK;
    if (!(types & IS(json_typeof(value))))
        return status_fail(ST_INVALID, "%s: \"%s\" must be %s, not %s", where, key, wanted,
                           type_words(value));
    *ret = value;
    return ST_OK;
}

enum status json_get_int(const char *where, const json_t *object, const char *key, int64_t min,
                         int64_t max, int64_t *ret_x)
{
    const json_t *value;
    enum status st = find(where, object, key, IS_NUMBER, "a whole number", &value);
    if (!value) return st;
    int64_t x = json_integer_value(value);
    if (json_is_real(value)) {
        double real = json_real_value(value);
        // 2^63 and beyond have no int64_t
        if (real != floor(real) || real < -0x1p63 || real >= 0x1p63)
            return status_fail(ST_INVALID,
                               "%s: \"%s\" is %g, which is not a whole number of 64 bits", where,
                               key, real);
        x = (int64_t)real;
    }
    if (x >= min && x <= max) {
        *ret_x = x;
        return ST_OK;
    }
    if (max == INT64_MAX)
        return status_fail(ST_INVALID, "%s: \"%s\" is %lld; it must be at least %lld", where, key,
                           (long long)x, (long long)min);
    return status_fail(ST_INVALID, "%s: \"%s\" is %lld; it must lie between %lld and %lld", where,
                       key, (long long)x, (long long)min, (long long)max);
}

enum status json_get_int32(const char *where, const json_t *object, const char *key, int min,
                           int max, int *ret_x)
{
    int64_t x = *ret_x;
    enum status st = json_get_int(where, object, key, min, max, &x);
    if (st == ST_OK) *ret_x = (int)x;
    return st;
}

enum status json_get_double(const char *where, const json_t *object, const char *key, double min,
                            double max, double *ret_x)
{
    const json_t *value;
    enum status st = find(where, object, key, IS_NUMBER, "a number", &value);
    if (!value) return st;
    double x = json_number_value(value);
    if (x >= min && x <= max) {
        *ret_x = x;
        return ST_OK;
    }
    if (isinf(max))
        return status_fail(ST_INVALID, "%s: \"%s\" is %g; it must be at least %g", where, key, x,
                           min);
    return status_fail(ST_INVALID, "%s: \"%s\" is %g; it must lie between %g and %g", where, key, x,
                       min, max);
}

enum status json_get_bool(const char *where, const json_t *object, const char *key, bool *ret_x)
{
    const json_t *value;
    enum status st =
        find(where, object, key, IS(JSON_TRUE) | IS(JSON_FALSE), "true or false", &value);
    if (value) *ret_x = json_is_true(value);
    return st;
}

enum status json_get_string(const char *where, const json_t *object, const char *key,
                            const char **ret_x)
{
    const json_t *value;
    enum status st = find(where, object, key, IS(JSON_STRING), "a string", &value);
    if (!value) return st;
    const char *text = json_string_value(value);
    if (strlen(text) != json_string_length(value))
        return status_fail(ST_INVALID, "%s: \"%s\" holds the character U+0000, which is not taken",
                           where, key);
    *ret_x = text;
    return ST_OK;
}

bool json_has(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return value && !json_is_null(value);
}

enum status json_expect(const char *where, const json_t *object, const char *key, const char *want,
                        const char *way_out)
{
    const char *have = want;
    enum status st = json_get_string(where, object, key, &have);
    if (st != ST_OK || strcmp(have, want) == 0) return st;
    return status_fail(ST_UNSUPPORTED, "%s: %s is \"%s\", not \"%s\": %s", where, key, have, want,
                       way_out);
}

// afresh: what holds otherwise is set first.
static enum status read_field(const char *where, const json_t *object, const struct json_field *f,
                              bool afresh, void *at)
{
    double x;
    enum status st;
    switch (f->type) {
    case AS_TEXT:
        if (afresh) *(const char **)at = NULL;
        return json_get_string(where, object, f->name, at);
    case AS_JSON:
        if (afresh) *(const json_t **)at = NULL;
        if (json_has(object, f->name)) *(const json_t **)at = json_object_get(object, f->name);
        return ST_OK;
    case AS_BOOL:
        if (afresh) *(bool *)at = f->otherwise != 0;
        return json_get_bool(where, object, f->name, at);
    case AS_INT32:
        if (afresh) *(int *)at = (int)f->otherwise;
        return json_get_int32(where, object, f->name, (int)f->min, (int)f->max, at);
    case AS_INT:
        if (afresh) *(int64_t *)at = f->otherwise;
        return json_get_int(where, object, f->name, f->min, f->max, at);
    case AS_F32:
        x = afresh ? f->or_else : (double)*(float *)at;
        st = json_get_double(where, object, f->name, f->from, f->to, &x);
        *(float *)at = (float)x;
        return st;
    case AS_REAL:
        if (afresh) *(double *)at = f->or_else;
        return json_get_double(where, object, f->name, f->from, f->to, at);
    }
    return ST_OK;
}

enum status json_read_field(const char *where, const json_t *object, const struct json_field *f,
                            void *ret)
{
    return read_field(where, object, f, false, (char *)ret + f->offset);
}

enum status json_read_fields(const char *where, const json_t *object,
                             const struct json_field *fields, const char *needs, void *ret)
{
    char name[64];
    enum status st = ST_OK;
    for (const struct json_field *f = fields; f->name; f++)
        CHECK(read_field(where, object, f, true, (char *)ret + f->offset));
    for (const char *word = needs ? needs : ""; *word; word += strspn(word, " ")) {
        const int n = (int)strcspn(word, " ");
        snprintf(name, sizeof name, "%.*s", n, word);
        if (!json_has(object, name)) FAIL(ST_INVALID, "%s: \"%s\" is missing", where, name);
        word += n;
    }
out:
    return st;
}

enum status json_put_line(struct bytes *to, json_t *line, size_t flags)
{
    char *text = line ? json_dumps(line, JSON_COMPACT | flags) : NULL;
    json_decref(line);
    if (!text)
        return status_fail(ST_NO_MEMORY, "no memory for a line of JSON, or its text is not UTF-8");
    bytes_printf(to, "%s\n", text);
    free(text);
    return bytes_status(to);
}

enum status json_read_numbers(const json_t *list, const struct number_list *how, int n,
                              void *ret_array)
{
    static const size_t sizes[] = {sizeof(int32_t), 1, sizeof(uint64_t), sizeof(float)};
    const size_t len = json_array_size(list);
    enum status st = ST_OK;
    void *array = NULL;
    if (!json_is_array(list)) FAIL(ST_FORMAT, "field \"%s\" is not a list", how->key);
    if (n >= 0 && len != (size_t)n)
        FAIL(ST_FORMAT, "field \"%s\" has %zu entries for %d tokens", how->key, len, n);
    if (!(array = malloc((len + 1) * sizes[how->type])))
        FAIL(ST_NO_MEMORY, "no memory for %zu numbers", len);
    for (size_t t = 0; t < len; t++) {
        const json_t *entry = json_array_get(list, t);
        const double x = json_number_value(entry);
        if (!(how->type == NUMBER_F32 ? json_is_number(entry) : json_is_integer(entry)) ||
            !(x >= how->min && x <= how->max))
            FAIL(how->status, "field \"%s\": entry %zu %s", how->key, t, how->fault);
        if (how->type == NUMBER_I32) ((int32_t *)array)[t] = (int32_t)x;
        if (how->type == NUMBER_U8) ((uint8_t *)array)[t] = (uint8_t)x;
        if (how->type == NUMBER_U64) ((uint64_t *)array)[t] = (uint64_t)x;
        if (how->type == NUMBER_F32) ((float *)array)[t] = (float)x;
    }
    memcpy(ret_array, &array, sizeof array);
    array = NULL;
out:
    free(array);
    return st;
}

json_t *json_ids(const int32_t *ids, int n)
{
    json_t *list = json_array();
    for (int i = 0; list && i < n; i++)
        if (json_array_append_new(list, json_integer(ids[i]))) {
            json_decref(list);
            list = NULL;
        }
    return list;
}

json_t *json_reals(const double *x, int n)
{
    json_t *list = json_array();
    for (int i = 0; i < n; i++)
        if (json_array_append_new(list, json_real(x[i])) != 0) {
            json_decref(list);
            return NULL;
        }
    return list;
}

// ---- text straight into a buffer ----------------------------------------------------------------

static void before_value(struct json_out *o, const char *key)
{
    if (o->comma) bytes_append(o->to, ",", 1);
    if (key) bytes_printf(o->to, "\"%s\":", key);
    o->comma = true;
}

void json_out_open(struct json_out *o, const char *key, char bracket)
{
    before_value(o, key);
    bytes_append(o->to, &bracket, 1);
    o->comma = false;
}

void json_out_close(struct json_out *o, char bracket)
{
    bytes_append(o->to, &bracket, 1);
    o->comma = true;
}

void json_out_int(struct json_out *o, const char *key, int64_t x)
{
    before_value(o, key);
    bytes_printf(o->to, "%" PRId64, x);
}

void json_out_uint(struct json_out *o, const char *key, uint64_t x)
{
    before_value(o, key);
    bytes_printf(o->to, "%" PRIu64, x);
}

void json_out_real(struct json_out *o, const char *key, double x)
{
    before_value(o, key);
    if (!isfinite(x)) {
        bytes_puts(o->to, "null");
        return;
    }
    char text[40];
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, x);
        if (strtod(text, NULL) == x) break;
    }
    bytes_puts(o->to, text);
}

void json_out_float(struct json_out *o, const char *key, float x)
{
    before_value(o, key);
    if (isfinite(x))
        bytes_printf(o->to, "%.9g", x); // 9 digits give every f32 back
    else
        bytes_puts(o->to, "null");
}

void json_out_bool(struct json_out *o, const char *key, bool x)
{
    before_value(o, key);
    bytes_puts(o->to, x ? "true" : "false");
}

void json_out_null(struct json_out *o, const char *key)
{
    before_value(o, key);
    bytes_puts(o->to, "null");
}

void json_out_string(struct json_out *o, const char *key, const char *s, size_t len)
{
    before_value(o, key);
    bytes_append(o->to, "\"", 1);
    size_t from = 0;
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c != '"' && c != '\\' && c != 0x7f) continue;
        bytes_append(o->to, s + from, i - from);
        from = i + 1;
        if (c == '\n')
            bytes_puts(o->to, "\\n");
        else if (c == '"' || c == '\\')
            bytes_printf(o->to, "\\%c", c);
        else
            bytes_printf(o->to, "\\u%04x", c);
    }
    bytes_append(o->to, s + from, len - from);
    bytes_append(o->to, "\"", 1);
}

void json_out_text(struct json_out *o, const char *key, const char *s)
{
    if (s)
        json_out_string(o, key, s, strlen(s));
    else
        json_out_null(o, key);
}

void json_out_value(struct json_out *o, const char *key, const json_t *value)
{
    char *text = value ? json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    before_value(o, key);
    bytes_puts(o->to, text ? text : "null");
    free(text);
}

void json_out_logprob(struct json_out *o, const char *key, float logprob)
{
    json_out_float(o, key, isinf(logprob) ? -9999.0f : logprob);
}

json_t *json_clean_string(const char *sentence)
{
    struct bytes text = BYTES_INIT;
    size_t len = strlen(sentence);
    for (size_t i = 0; i < len;) {
        int n = utf8_sequence(sentence + i, len - i);
        bytes_append(&text, n > 0 ? sentence + i : "?", n > 0 ? (size_t)n : 1);
        i += n > 0 ? (size_t)n : 1;
    }
    json_t *string = json_stringn(bytes_text(&text), text.len);
    bytes_release(&text);
    return string;
}

static int is_entry(const struct dirent *entry)
{
    return strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
}

json_t *json_folder(const char *folder)
{
    struct dirent **entries = NULL;
    const int n = scandir(folder, &entries, is_entry, versionsort);
    json_t *names = n < 0 ? NULL : json_array();
    for (int i = 0; i < n; i++) {
        json_array_append_new(names, json_string_nocheck(entries[i]->d_name));
        free(entries[i]);
    }
    free(entries);
    return names;
}
