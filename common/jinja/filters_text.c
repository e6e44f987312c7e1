/* filters_text.c: filters that make a text of a text. And what is refused by
 * name. One thread. */
#include "common/jinja/run.h"
#include "common/jinja/text.h"

// Words begin behind white space, hyphens and opening brackets.
BUILTIN(title)
{
    const struct string *s = c->v[0].string;
    size_t text = text_begin(r);
    bool inside = false;
    run_bytes(r, 4 * s->n_bytes);
    for (size_t at = 0, word = 0; at <= s->n_bytes;) {
        size_t start = at;
        uint32_t character = at < s->n_bytes ? utf8_next(s->data, s->n_bytes, &at) : ' ';
        bool between = text_is(character, TEXT_SPACE) ||
                       (character < 0x80 && character && strchr("-({[<", (int)character));
        if (inside && between) { // the word from there to here
            size_t second = word;
            utf8_next(s->data, s->n_bytes, &second);
            text_put_case(s->data + word, second - word, CASE_UPPER, &r->text);
            text_put_case(s->data + second, start - second, CASE_LOWER, &r->text);
        }
        if (start == s->n_bytes) break;
        if (between) run_put(r, s->data + start, at - start);
        if (!between && !inside) word = start;
        inside = !between;
    }
    return text_end(r, text, false);
}

BUILTIN(indent)
{
    static const struct string blank = {" ", 1, 1, false}, newline = {"\n", 1, 1, false};
    bool first = arg_truth(c, 2, false), empty = arg_truth(c, 3, false);
    if (c->v[0].kind != V_STRING) type_fail(r, "indent wants a text", c->v[0]);
    const struct string *spaces =
        c->v[1].kind == V_STRING ? c->v[1].string
                                 : value_repeat(r, value_string(&blank), arg_int(c, 1, 4)).string;
    // a newline is put behind it first, so that a last empty line counts
    struct value whole = arithmetic(r, T_ADD, c->v[0], value_string(&newline));
    struct list lines = split_lines(r, whole.string, false);
    size_t text = text_begin(r);
    for (size_t i = 0; i < lines.n; i++) {
        const struct string *line = lines.items[i].string;
        if (i > 0) run_puts(r, "\n");
        if (i == 0 ? first : empty || line->n_bytes > 0) run_put_string(r, spaces);
        run_put_string(r, line);
    }
    return text_end(r, text, false);
}

BUILTIN(truncate_text)
{
    static const struct string dots = {"...", 3, 3, false};
    int64_t n = value_length(r, c->v[0]), length = arg_int(c, 1, 255), leeway = arg_int(c, 4, 5);
    const struct string *end = given(c->v[3]) ? arg_string(c, 3) : &dots;
    bool kill = arg_truth(c, 2, false);
    if (length < (int64_t)end->n_chars || leeway < 0)
        fail(r, "expected length >= %zu, got %lld", end->n_chars, (long long)length);
    if (n <= length + leeway) return c->v[0];
    if (c->v[0].kind != V_STRING) type_fail(r, "truncate wants a text", c->v[0]);
    const struct string *s = c->v[0].string;
    run_bytes(r, s->n_bytes);
    size_t cut = string_offset(s, (size_t)length - end->n_chars), text = text_begin(r);
    const char *space = kill ? NULL : memrchr(s->data, ' ', cut);
    run_put(r, s->data, space ? (size_t)(space - s->data) : cut);
    run_put_string(r, end);
    return text_end(r, text, false);
}

BUILTIN(wordcount)
{
    const struct string *s = c->v[0].string;
    int64_t words = 0;
    bool inside = false;
    run_bytes(r, s->n_bytes);
    for (size_t at = 0; at < s->n_bytes;) {
        bool word = text_is(utf8_next(s->data, s->n_bytes, &at), TEXT_WORD);
        words += word && !inside;
        inside = word;
    }
    return value_int(words);
}

BUILTIN(not_supported)
{
    arena_fail(&r->arena, ST_UNSUPPORTED, "not supported: %s", c->function->name);
}

const struct builtin text_builtins[] = {
    {FILTER, "title", title, 0, "$", 0},
    {FILTER, "indent", indent, 0, "width first blank", 0},
    {FILTER, "truncate", truncate_text, 0, "length killwords end leeway", 0},
    {FILTER, "wordcount", wordcount, 0, "$", 0},
    {FILTER, "pprint random urlize wordwrap", not_supported, 0, "*", 0},
    {FUNCTION, "lipsum", not_supported, 0, "*", 0},
    {METHOD(V_STRING), "encode maketrans translate", not_supported, 0, "*", 0},
    {.name = NULL},
};
