/* data.c: reads and tokenises a JSONL data set, and orders it. The trainer's thread.
 *
 * Prompts are turned into token ids once, at start: from there on tokens travel as ids, to the
 * daemon and into the packed batches. Strict by intent: a data set with a wrong line is refused
 * before a GPU hour is spent on the lines before it.
 */
#include "trainer/rollout/data.h"
#include "common/base/hash.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/rng.h"
#include "common/model/chat_template.h"
#include "trainer/rollout/data_file.h"
#include "trainer/rollout/turns.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void example_release(struct example *e)
{
    json_decref(e->row);
    free(e->number);
    json_decref(e->prompt_text);
    free(e->learnt);
    token_list_release(&e->prompt_ids);
    token_list_release(&e->completion_ids);
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
    e->said = value;
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

static enum status read_prompt(const char *where, const char *field, struct example *e)
{
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
    return status_fail(ST_FORMAT,
                       "%s: no field \"prompt\", \"messages\" or \"question\"; name another with "
                       "--prompt-field",
                       where);
}

static enum status read_answer(const char *where, const char *field, struct example *e)
{
    enum status st = json_get_string(where, e->row, "completion", &e->completion);
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

static enum status read_line(struct dataset *d, int line, const char *text, size_t len,
                             const struct dataset_options *options)
{
    char where[512];
    struct example e = {.line = line};
    enum status st;
    snprintf(where, sizeof where, "%s, line %d", d->path, line);
    if ((d->n & (d->n - 1)) == 0) { // full at every power of two
        size_t cap = d->n ? 2 * (size_t)d->n : 1;
        struct example *larger = realloc(d->examples, cap * sizeof *larger);
        if (!larger) return status_fail(ST_NO_MEMORY, "%s: no memory", where);
        d->examples = larger;
    }
    CHECK(json_parse(where, text, len, &e.row));
    if (!json_is_object(e.row)) {
        st = status_fail(ST_FORMAT, "%s: not a JSON object", where);
        goto out;
    }
    CHECK(read_prompt(where, options->prompt_field, &e));
    CHECK(read_answer(where, options->answer_field, &e));
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
                          const struct dataset_options *options, struct dataset **ret)
{
    static const struct dataset_options plain;
    enum status st = ST_OK;
    int line = 0;
    size_t read = 0;
    struct bytes copy = BYTES_INIT; // a line with a NUL behind it
    struct dataset *d = calloc(1, sizeof *d);
    if (!d || !(d->path = strdup(where))) {
        st = status_fail(ST_NO_MEMORY, "%s: no memory", where);
        goto out;
    }
    CHECK(data_file_check(where, text, len));
    d->byte_order_mark = data_file_has_mark(text, len);
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
    if (d->n == 0) {
        st = status_fail(ST_FORMAT, "%s: holds no example", where);
        goto out;
    }
    *ret = d;
out:
    bytes_release(&copy);
    if (st != ST_OK) dataset_free(d);
    return st;
}

enum status dataset_load(const char *path, const struct dataset_options *options,
                         struct dataset **ret)
{
    struct file_map map;
    enum status st = data_file_open(path, &map);
    if (st != ST_OK) return st;
    st = dataset_parse(path, map.data ? (const char *)map.data : "", map.len, options, ret);
    file_map_release(&map);
    return st;
}

bool dataset_has_questions(const struct dataset *d)
{
    for (int i = 0; i < d->n; i++)
        if (d->examples[i].question) return true;
    return false;
}

bool dataset_has_messages(const struct dataset *d)
{
    for (int i = 0; i < d->n; i++)
        if (d->examples[i].messages) return true;
    return false;
}

enum status dataset_require_answers(const struct dataset *d)
{
    for (int i = 0; i < d->n; i++)
        if (!d->examples[i].answer)
            return status_fail(ST_INVALID,
                               "%s, line %d: no field \"answer\" or \"completion\", which the "
                               "reward needs",
                               d->path, d->examples[i].line);
    return ST_OK;
}

// ---- tokens -------------------------------------------------------------------------------------

static enum status encode(const struct dataset *d, const struct example *e,
                          const struct prompt_format *format, const char *text, size_t len,
                          bool add_special, struct token_list *ret)
{
    enum status st = tokenizer_encode(format->tokenizer, text, len, add_special, ret);
    if (st != ST_OK) return status_context(st, "%s, line %d", d->path, e->line);
    for (int i = 0; i < ret->n; i++)
        if (ret->ids[i] < 0 || ret->ids[i] >= format->vocab_size)
            return status_fail(ST_MISMATCH,
                               "%s, line %d: token id %d is beyond the model's vocabulary of %d; "
                               "the tokenizer belongs to another model",
                               d->path, e->line, ret->ids[i], format->vocab_size);
    return ST_OK;
}

// The prompt is, or becomes, a chat.
static bool is_chat(const struct example *e, const struct prompt_format *format)
{
    return e->messages || format->wrap || (format->wrap_questions && e->question);
}

// A text prompt with what the format puts around it.
static void put_prompt(const struct example *e, const struct prompt_format *format,
                       struct bytes *ret)
{
    const char *around =
        e->question && format->around_questions ? format->around_questions : format->around;
    const char *place = around ? strstr(around, PROMPT_PLACE) : NULL;
    if (place) bytes_append(ret, around, (size_t)(place - around));
    bytes_append(ret, e->prompt, e->prompt_len);
    if (place) bytes_puts(ret, place + strlen(PROMPT_PLACE));
}

// Chat messages of an example: its own, or its text as a user's message. New reference.
static json_t *example_messages(const struct example *e, const struct prompt_format *format)
{
    if (e->messages) return json_incref((json_t *)e->messages);
    struct bytes text = BYTES_INIT;
    put_prompt(e, format, &text);
    json_t *messages = text.failed ? NULL : json_array();
    if (messages && format->system)
        json_array_append_new(messages,
                              json_pack("{s:s, s:s}", "role", "system", "content", format->system));
    if (messages)
        json_array_append_new(messages, json_pack("{s:s, s:s%}", "role", "user", "content",
                                                  bytes_text(&text), text.len));
    bytes_release(&text);
    return messages;
}

static bool ends_on_assistant(const json_t *messages)
{
    const json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    const char *role = json_string_value(json_object_get(last, "role"));
    return role && strcmp(role, "assistant") == 0;
}

// The first of what the template ignores is kept for the mains to say.
static void note_ignored(struct dataset *d, const struct example *e,
                         const struct chat_template *chat, const struct chat_input *input)
{
    char sentence[600];
    if (d->ignored || chat_template_check_used(chat, input) == ST_OK) return;
    snprintf(sentence, sizeof sentence, "%s, line %d: %s", d->path, e->line, status_message());
    d->ignored = strdup(sentence);
}

static enum status render(struct dataset *d, const struct example *e,
                          const struct prompt_format *format, const json_t *messages,
                          bool generation_prompt, struct bytes *ret)
{
    if (!format->chat)
        return status_fail(ST_UNSUPPORTED,
                           "%s, line %d: chat messages, but the model folder has no chat template; "
                           "give one with --chat-template-file",
                           d->path, e->line);
    json_t *joined = NULL;
    enum status st = chat_messages_join_parts(format->chat, messages, &joined);
    struct chat_input input = {
        .messages = joined,
        .tools = json_object_get(e->row, "tools"),
        .kwargs = json_object_get(e->row, "chat_template_kwargs"),
        .add_generation_prompt = generation_prompt,
    };
    if (st == ST_OK) st = chat_template_render(format->chat, &input, ret);
    if (st == ST_OK) note_ignored(d, e, format->chat, &input);
    json_decref(joined);
    return status_context(st, "%s, line %d", d->path, e->line);
}

// Kept for the log of rollouts, where it is not what the row says.
static enum status keep_text(struct example *e, const struct bytes *text)
{
    json_decref(e->prompt_text);
    e->prompt_text = NULL;
    if (e->prompt && text->len == e->prompt_len && memcmp(text->data, e->prompt, text->len) == 0)
        return ST_OK;
    e->prompt_text = json_stringn(bytes_text(text), text->len);
    return e->prompt_text ? ST_OK : status_fail(ST_NO_MEMORY, "no memory for a prompt's text");
}

static enum status tokenize_prompt(struct dataset *d, struct example *e,
                                   const struct prompt_format *format)
{
    enum status st = ST_OK;
    struct bytes text = BYTES_INIT;
    json_t *messages = NULL;
    e->prompt_ids.n = 0;
    if (is_chat(e, format)) {
        messages = example_messages(e, format);
        if (messages && e->messages &&
            ends_on_assistant(messages)) { // supervised: without the answer
            json_t *prompt = json_copy(messages);
            if (prompt) json_array_remove(prompt, json_array_size(prompt) - 1);
            json_decref(messages);
            messages = prompt;
        }
        if (!messages) {
            st = status_fail(ST_NO_MEMORY, "%s, line %d: no memory", d->path, e->line);
            goto out;
        }
        CHECK(render(d, e, format, messages, true, &text));
        CHECK(encode(d, e, format, bytes_text(&text), text.len, false, &e->prompt_ids));
    } else {
        put_prompt(e, format, &text);
        CHECK(bytes_status(&text));
        CHECK(encode(d, e, format, bytes_text(&text), text.len, true, &e->prompt_ids));
    }
    CHECK(keep_text(e, &text));
    if (e->prompt_ids.n == 0)
        st = status_fail(ST_FORMAT, "%s, line %d: the prompt has no tokens", d->path, e->line);
out:
    json_decref(messages);
    bytes_release(&text);
    return st;
}

enum status dataset_tokenize(struct dataset *d, const struct prompt_format *format, int max_prompt,
                             int *ret_left_out)
{
    int kept = 0, longest = 0;
    for (int i = 0; i < d->n; i++) {
        enum status st = tokenize_prompt(d, &d->examples[i], format);
        if (st != ST_OK) return st;
        if (d->examples[i].prompt_ids.n > longest) longest = d->examples[i].prompt_ids.n;
    }
    if (max_prompt > 0 && longest > max_prompt) {
        int longest_kept = 0;
        for (int i = 0; i < d->n; i++) {
            struct example e = d->examples[i];
            if (e.prompt_ids.n > max_prompt) {
                example_release(&e);
                continue;
            }
            if (e.prompt_ids.n > longest_kept) longest_kept = e.prompt_ids.n;
            d->examples[kept++] = e;
        }
        *ret_left_out = d->n - kept;
        d->n = kept;
        longest = longest_kept;
        if (kept == 0)
            return status_fail(ST_INVALID,
                               "%s: every prompt is longer than --max-prompt-length %d tokens",
                               d->path, max_prompt);
    } else {
        *ret_left_out = 0;
    }
    d->max_prompt = longest;
    return ST_OK;
}

// The whole conversation of an example, with the answer at its end. New reference.
static enum status answered_messages(const struct dataset *d, const struct example *e,
                                     const struct prompt_format *format, json_t **ret)
{
    json_t *messages = example_messages(e, format), *answered = messages;
    if (messages && !(e->messages && ends_on_assistant(messages))) {
        if (!e->completion) {
            json_decref(messages);
            return status_fail(ST_FORMAT,
                               "%s, line %d: neither a \"completion\" nor an assistant's "
                               "message at the end to learn",
                               d->path, e->line);
        }
        answered = json_copy(messages);
        json_array_append_new(
            answered, json_pack("{s:s, s:s}", "role", "assistant", "content", e->completion));
        json_decref(messages);
    }
    if (!answered) return status_fail(ST_NO_MEMORY, "%s, line %d: no memory", d->path, e->line);
    *ret = answered;
    return ST_OK;
}

struct rendering {
    struct dataset *d; // what it ignores is noted there
    const struct example *e;
    const struct prompt_format *format;
};

static enum status render_turns(void *context, const json_t *messages, bool generation_prompt,
                                struct bytes *ret)
{
    const struct rendering *r = context;
    return render(r->d, r->e, r->format, messages, generation_prompt, ret);
}

// Appends the tokens of a stretch of text to the completion.
static enum status add_stretch(const struct dataset *d, struct example *e,
                               const struct prompt_format *format, const struct bytes *text,
                               size_t start, size_t end, bool learnt)
{
    const int before = e->completion_ids.n;
    if (start == end) return ST_OK;
    enum status st =
        encode(d, e, format, bytes_text(text) + start, end - start, false, &e->completion_ids);
    if (st != ST_OK) return st;
    const int n = e->completion_ids.n;
    uint8_t *larger = realloc(e->learnt, (size_t)(n ? n : 1));
    if (!larger) return status_fail(ST_NO_MEMORY, "%s, line %d: no memory", d->path, e->line);
    e->learnt = larger;
    memset(larger + before, learnt, (size_t)(n - before));
    return ST_OK;
}

static void count_turns(struct dataset *d, const json_t *messages, const struct turns *t)
{
    size_t i, n = 0;
    const json_t *message;
    json_array_foreach (messages, i, message) {
        const char *role = json_string_value(json_object_get(message, "role"));
        n += role && strcmp(role, "assistant") == 0;
    }
    d->turns.several += n > 1;
    d->turns.earlier += (int64_t)n - 1;
    d->turns.learnt += t->n - 1;
}

// The completion of a chat is what the conversation's text has from its first turn that is learnt
// on: the answers with the template's own ends of turn, and what stands between them.
static enum status tokenize_chat_completion(struct dataset *d, struct example *e,
                                            const struct prompt_format *format)
{
    enum status st = ST_OK;
    struct turns t = TURNS_INIT;
    struct rendering rendering = {d, e, format};
    json_t *messages = NULL;
    char where[512];
    snprintf(where, sizeof where, "%s, line %d", d->path, e->line);
    CHECK(answered_messages(d, e, format, &messages));
    CHECK(turns_find(where, messages, format->all_turns, render_turns, &rendering, &t));
    if (t.n > 1) { // it begins before the last
        e->prompt_ids.n = 0;
        CHECK(encode(d, e, format, bytes_text(&t.text), t.turns[0].start, false, &e->prompt_ids));
    }
    for (int i = 0; i < t.n; i++) {
        if (i > 0)
            CHECK(add_stretch(d, e, format, &t.text, t.turns[i - 1].end, t.turns[i].start, false));
        CHECK(add_stretch(d, e, format, &t.text, t.turns[i].start, t.turns[i].end, true));
    }
    count_turns(d, messages, &t);
out:
    json_decref(messages);
    turns_release(&t);
    return st;
}

enum status dataset_tokenize_completions(struct dataset *d, const struct prompt_format *format,
                                         int end_id)
{
    d->max_prompt = d->max_completion = 0;
    for (int i = 0; i < d->n; i++) {
        struct example *e = &d->examples[i];
        enum status st;
        e->completion_ids.n = 0;
        if (is_chat(e, format)) {
            st = tokenize_chat_completion(d, e, format);
        } else if (!e->completion) {
            st = status_fail(ST_FORMAT,
                             "%s, line %d: no field \"completion\" or \"answer\" to learn", d->path,
                             e->line);
        } else {
            st = encode(d, e, format, e->completion, strlen(e->completion), false,
                        &e->completion_ids);
            if (st == ST_OK && end_id >= 0 && !token_list_push(&e->completion_ids, end_id))
                st = status_fail(ST_NO_MEMORY, "%s, line %d: no memory", d->path, e->line);
        }
        if (st != ST_OK) return st;
        if (e->completion_ids.n == 0)
            return status_fail(ST_FORMAT, "%s, line %d: the completion has no tokens", d->path,
                               e->line);
        if (e->prompt_ids.n > d->max_prompt) d->max_prompt = e->prompt_ids.n;
        if (e->completion_ids.n > d->max_completion) d->max_completion = e->completion_ids.n;
    }
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
    if (epoch != o->epoch) { // Fisher and Yates
        struct rng rng;
        rng_init(&rng, o->seed, (uint64_t)epoch);
        for (int k = 0; k < o->n; k++) o->permutation[k] = k;
        for (int k = o->n - 1; k > 0; k--) {
            int other = (int)rng_below(&rng, (uint32_t)k + 1), swap = o->permutation[k];
            o->permutation[k] = o->permutation[other];
            o->permutation[other] = swap;
        }
        o->epoch = epoch;
    }
    return o->permutation[i % o->n];
}
