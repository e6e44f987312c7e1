/* data.c: reads a JSONL data set. The trainer's thread. Strict by intent: a data set with a wrong
 * line is refused before a GPU hour is spent on the lines before it. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/data/data.h"
#include "common/base/bytes.h"
#include "common/base/hash.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/rng.h"
#include "common/constraint/constraint.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

void example_release(struct example *e)
{
    json_decref(e->row);
    json_decref(e->constraint);
    free(e->number);
    json_decref(e->prompt_text);
    free(e->learnt);
    token_list_release(&e->prompt_ids);
    token_list_release(&e->teacher_ids);
    token_list_release(&e->completion_ids);
    token_list_release(&e->answer_ids);
}

void dataset_free(struct dataset *d)
{
    if (!d) return;
    for (int i = 0; i < d->n; i++) example_release(&d->examples[i]);
    free(d->examples);
    free(d->path);
    free(d->chat_source);
    free(d->ignored);
    free(d);
}

// ---- the file -----------------------------------------------------------------------------------
// What is given as data is often what a data set was fetched as: each such thing gets the line that
// turns it into JSONL.

#define TO_JSONL                                                                                   \
    "python3 -m commonweight.data '%s' > train.jsonl (of the sources' folder python/, or of make " \
    "wheel; it wants pip install datasets)"

// Maps a JSONL file. Where something else was given (a name of the Hub, a folder) the sentence says
// how to come by one.
static enum status open_file(const char *path, struct file_map *ret)
{
    struct stat info;
    const char *slash = strchr(path, '/');
    // "openai/gsm8k", "gsm8k": not a path that was mistyped, which would end on .jsonl or so
    const bool is_hub_name = path[0] != '/' && path[0] != '.' &&
                             !(slash && strchr(slash + 1, '/')) && !strstr(path, ".json") &&
                             !strchr(path, ' ');
    bool there = stat(path, &info) == 0;
    if (!there && errno == ENOENT && !file_exists(path) && is_hub_name)
        return status_fail(
            ST_NOT_FOUND,
            "%s: there is no such file, and no data set is fetched by name; if it is "
            "one of the Hub: " TO_JSONL,
            path, path);
    if (there && S_ISDIR(info.st_mode))
        return status_fail(ST_INVALID,
                           "%s is a folder; data is one file, JSONL, an example a line; of a data "
                           "set's folder: " TO_JSONL,
                           path, path);
    return file_map_open(path, ret);
}

// It begins with UTF-8's byte order mark.
static bool has_mark(const char *text, size_t len)
{
    return len >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0;
}

static enum status must_convert(const char *path, const char *is)
{
    return status_fail(ST_FORMAT, "%s %s; data is JSONL, an example a line: " TO_JSONL, path, is,
                       path);
}

// The bytes are of no known other format: Parquet, Arrow, compressed, UTF-16, one JSON list.
static enum status check_bytes(const char *where, const char *text, size_t len)
{
    static const struct {
        const char *magic, *words;
        bool table; // which commonweight.data reads
    } formats[] = {
        {"PAR1", "is a Parquet file", true},
        {"ARROW1", "is an Arrow file", true},
        {"\xff\xff\xff\xff", "is an Arrow file", true},
        {"\x1f\x8b", "is compressed (gzip): unpack it with gunzip", false},
        {"\x28\xb5\x2f\xfd", "is compressed (zstd): unpack it with unzstd", false},
        {"PK\x03\x04", "is a zip file: unpack it", false},
        {"\xff\xfe", "is UTF-16: write it as UTF-8 (iconv -f UTF-16 -t UTF-8)", false},
        {"\xfe\xff", "is UTF-16: write it as UTF-8 (iconv -f UTF-16 -t UTF-8)", false},
    };
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        size_t n = strlen(formats[i].magic);
        if (len < n || memcmp(text, formats[i].magic, n) != 0) continue;
        if (!formats[i].table) return status_fail(ST_FORMAT, "%s %s", where, formats[i].words);
        return must_convert(where, formats[i].words);
    }
    const char *dot = strrchr(where, '.');
    const bool is_csv = dot && strcasecmp(dot, ".csv") == 0;
    if (has_mark(text, len)) text += 3, len -= 3;
    size_t blank = 0;
    while (blank < len && strchr(" \t\r\n", text[blank]) && text[blank]) blank++;
    if (blank < len && text[blank] == '[')
        return status_fail(
            ST_FORMAT,
            "%s is one JSON list; data is JSONL, an example a line: jq -c '.[]' %s > "
            "train.jsonl",
            where, where);
    // whatever it is called, a line of JSONL begins so
    if (is_csv && blank < len && text[blank] != '{') return must_convert(where, "is a CSV file");
    return ST_OK;
}

// ---- lines --------------------------------------------------------------------------------------

static enum status check_messages(const char *where, const char *key, const json_t *messages)
{
    size_t i;
    const json_t *message;
    if (json_array_size(messages) == 0)
        return status_fail(ST_FORMAT, "%s: field \"%s\" is an empty list", where, key);
    json_array_foreach (messages, i, message) {
        bool calls = json_array_size(json_object_get(message, "tool_calls")) > 0;
        if (!json_is_string(json_object_get(message, "role")) ||
            (!json_has(message, "content") && !calls))
            return status_fail(ST_FORMAT,
                               "%s: field \"%s\", entry %zu is not an object with \"role\" and "
                               "\"content\" or \"tool_calls\"",
                               where, key, i);
    }
    return ST_OK;
}

struct prompt_key {
    const char *name;
    bool text, messages, question; // what it may hold; example.question
};

static enum status read_prompt_key(const char *where, const struct prompt_key *key,
                                   struct example *e)
{
    const json_t *value = json_object_get(e->row, key->name);
    e->prompt_json = value;
    if (json_is_array(value) && key->messages) {
        e->messages = value;
        return check_messages(where, key->name, value);
    }
    if (!json_is_string(value) || !key->text)
        return status_fail(ST_FORMAT, "%s: field \"%s\" must be %s", where, key->name,
                           !key->text      ? "a list of messages"
                           : key->messages ? "text or a list of messages"
                                           : "text");
    e->prompt = json_string_value(value);
    e->prompt_len = json_string_length(value);
    e->question = key->question;
    if (e->prompt_len == 0)
        return status_fail(ST_FORMAT, "%s: field \"%s\" is empty", where, key->name);
    return ST_OK;
}

static enum status no_field(const char *where, const char *name, const char *option)
{
    return status_fail(ST_FORMAT, "%s: no field \"%s\" (--%s)", where, name, option);
}

static enum status read_prompt(const char *where, const struct prompt_options *o, struct example *e)
{
    const char *field = o->prompt_field;
    static const struct prompt_key keys[] = {
        {"prompt", true, true, false},
        {"messages", false, true, false},
        {"question", true, false, true},
    };
    if (field) {
        const struct prompt_key named = {field, true, true, true};
        return json_has(e->row, field) ? read_prompt_key(where, &named, e)
                                       : no_field(where, field, "prompt-field");
    }
    for (int k = 0; k < 3; k++)
        if (json_has(e->row, keys[k].name)) return read_prompt_key(where, &keys[k], e);
    const struct prompt_key conversation = {o->side, false, true, false};
    if (o->side && json_is_array(json_object_get(e->row, o->side)))
        return read_prompt_key(where, &conversation, e);
    return status_fail(ST_FORMAT,
                       "%s: no field \"prompt\", \"messages\" or \"question\"; name another with "
                       "--prompt-field",
                       where);
}

// Of a field that is to follow the prompt.
static enum status check_follows(const char *where, const char *name, const struct example *e)
{
    if (!message_by_assistant(json_array_get(e->messages, json_array_size(e->messages) - 1)))
        return ST_OK;
    return status_fail(ST_FORMAT,
                       "%s: the prompt ends with a message of the assistant, and \"%s\" is to "
                       "follow it; let it end with the user's",
                       where, name);
}

// A completion, where it is there: text, or a list with one message of the assistant.
static enum status read_completion(const char *where, const char *name, struct example *e)
{
    const json_t *list = json_object_get(e->row, name), *message = json_array_get(list, 0);
    if (!json_is_array(list)) return json_get_string(where, e->row, name, &e->completion);
    if (json_array_size(list) != 1 || !message_by_assistant(message))
        return status_fail(ST_FORMAT,
                           "%s: field \"%s\" must be text, or a list with one message, of the "
                           "assistant; what was said before it belongs to the prompt",
                           where, name);
    e->reply = message;
    e->completion = json_string_value(json_object_get(message, "content"));
    enum status st = check_messages(where, name, list);
    return st == ST_OK ? check_follows(where, name, e) : st;
}

// One of a pair's; of a line without a prompt it is the end of the conversation.
static enum status read_side(const char *where, const char *side, struct example *e)
{
    if (e->messages && e->messages == json_object_get(e->row, side)) return ST_OK;
    if (!json_has(e->row, side)) return status_fail(ST_FORMAT, "%s: no field \"%s\"", where, side);
    enum status st = check_follows(where, side, e);
    return st == ST_OK ? read_completion(where, side, e) : st;
}

static enum status read_answer(const char *where, const char *field, struct example *e)
{
    enum status st = read_completion(where, "completion", e);
    if (st != ST_OK) return st;
    const char *name = field ? field : "answer";
    const json_t *answer = json_object_get(e->row, name);
    if (field && !json_has(e->row, field)) return no_field(where, field, "answer-field");
    if (json_is_real(answer) && fabs(json_real_value(answer)) >= 0x1p63)
        return status_fail(ST_FORMAT,
                           "%s: field \"%s\" is a number of more digits than are kept; write it as "
                           "text, in quotes",
                           where, name);
    if (json_is_number(answer)) {
        e->number = json_dumps(answer, JSON_ENCODE_ANY);
        if (!e->number) return status_fail(ST_NO_MEMORY, "%s: no memory", where);
        e->answer = e->number;
    } else if ((st = json_get_string(where, e->row, name, &e->answer)) != ST_OK) {
        return st;
    }
    if (!e->answer) e->answer = e->completion;
    if (!e->completion) e->completion = e->answer;
    return ST_OK;
}

// The schema, too, is read before anything is sampled; one that the line before has was.
static enum status read_format(const char *where, const struct dataset *d, struct example *e)
{
    const struct example *before = d->n > 0 ? &d->examples[d->n - 1] : NULL;
    bool meets;
    enum status st =
        constraint_of_format(json_object_get(e->row, "response_format"), &e->constraint);
    if (st == ST_OK && e->constraint && !(before && json_equal(before->constraint, e->constraint)))
        st = constraint_meets(e->constraint, "", 0, &meets);
    return status_context(st, "%s: field \"response_format\"", where);
}

// The prompt that a teacher reads, as one of its own would be.
static enum status read_taught(const char *where, const struct prompt_options *o, struct example *e)
{
    static const struct prompt_key key = {"teacher_prompt", true, true, false};
    struct example alone = {.row = e->row};
    if (!o->teacher || !json_has(e->row, key.name)) return ST_OK;
    e->taught = json_object_get(e->row, key.name);
    return read_prompt_key(where, &key, &alone);
}

static enum status read_line(struct dataset *d, int line, const char *text, size_t len,
                             const struct prompt_options *options)
{
    char where[512];
    struct example e = {.line = line};
    enum status st;
    snprintf(where, sizeof where, "%s, line %d", d->path, line);
    struct example *larger = array_room(d->examples, (size_t)d->n, sizeof *larger);
    if (!larger) return status_fail(ST_NO_MEMORY, "%s: no memory", where);
    d->examples = larger;
    CHECK(json_parse(where, text, len, &e.row));
    if (!json_is_object(e.row)) FAIL(ST_FORMAT, "%s: not a JSON object", where);
    CHECK(read_prompt(where, options, &e));
    CHECK(options->side ? read_side(where, options->side, &e)
                        : read_answer(where, options->answer_field, &e));
    if (!options->completions) CHECK(read_format(where, d, &e)); // nothing else is sampled
    CHECK(read_taught(where, options, &e));
    d->questions |= e.question;
    d->messages |= e.messages != NULL;
    d->n_constrained += e.constraint != NULL;
    d->n_taught += json_has(e.row, "teacher_prompt");
    d->examples[d->n++] = e;
out:
    if (st != ST_OK) example_release(&e);
    return st;
}

static bool blank(const char *text, size_t len)
{
    return strspn(text, " \t\r") >= len;
}

enum status dataset_parse(const char *where, const char *text, size_t len,
                          const struct prompt_options *options, struct dataset **ret)
{
    static const struct prompt_options plain;
    enum status st = ST_OK;
    int line = 0;
    size_t read = 0;
    struct bytes copy = BYTES_INIT; // a line with a NUL behind it
    struct dataset *d = calloc(1, sizeof *d);
    if (!d || !(d->path = strdup(where))) FAIL(ST_NO_MEMORY, "%s: no memory", where);
    CHECK(check_bytes(where, text, len));
    d->byte_order_mark = has_mark(text, len);
    if (d->byte_order_mark) read = 3;
    if (!options) options = &plain;
    while (read < len && (!options->max_samples || d->n < options->max_samples)) {
        const char *start = text + read, *newline = memchr(start, '\n', len - read);
        size_t n = newline ? (size_t)(newline - start) : len - read;
        line++;
        bytes_clear(&copy);
        bytes_append(&copy, start, n);
        CHECK(bytes_status(&copy));
        if (!blank(bytes_text(&copy), n)) CHECK(read_line(d, line, bytes_text(&copy), n, options));
        read += n + 1;
    }
    d->digest = hash_fnv1a(text, read < len ? read : len);
    if (d->n == 0) FAIL(ST_FORMAT, "%s: holds no example", where);
    *ret = d;
out:
    bytes_release(&copy);
    if (st != ST_OK) dataset_free(d);
    return st;
}

enum status dataset_load(const char *path, const struct prompt_options *options,
                         struct dataset **ret)
{
    struct file_map map;
    enum status st = open_file(path, &map);
    if (st != ST_OK) return st;
    st = dataset_parse(path, map.data ? (const char *)map.data : "", map.len, options, ret);
    file_map_release(&map);
    return st;
}

enum status dataset_require_answers(const struct dataset *d)
{
    for (int i = 0; i < d->n; i++)
        if (!d->examples[i].answer)
            return status_fail(ST_INVALID,
                               "%s, line %d: no field \"answer\" or \"completion\", which the "
                               "reward needs; name another with --answer-field",
                               d->path, d->examples[i].line);
    return ST_OK;
}

// ---- order --------------------------------------------------------------------------------------

enum status data_order_init(struct data_order *o, uint64_t seed, int n)
{
    *o = (struct data_order){.seed = seed, .n = n, .epoch = -1};
    o->permutation = malloc((size_t)n * sizeof *o->permutation);
    return o->permutation ? ST_OK : status_fail(ST_NO_MEMORY, "no memory for the data order");
}

void data_order_release(struct data_order *o)
{
    free(o->permutation);
    o->permutation = NULL;
}

int data_order_at(struct data_order *o, int64_t i)
{
    int64_t epoch = i / o->n;
    if (epoch != o->epoch) {
        struct rng rng;
        rng_init(&rng, o->seed, (uint64_t)epoch);
        for (int k = 0; k < o->n; k++) o->permutation[k] = k;
        rng_shuffle(&rng, o->permutation, o->n, sizeof *o->permutation);
        o->epoch = epoch;
    }
    return o->permutation[i % o->n];
}
