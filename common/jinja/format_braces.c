/* format_braces.c: "...".format(values). One thread. */
#include "common/jinja/format.h"
#include <ctype.h>
#include <stdlib.h>

struct braces {
    struct run *run;
    const struct arguments *arguments;
    size_t next; // of the fields without a number
    bool by_number;
    bool markup;
};

// ---- [[fill]align][sign][z][#][0][width][group][.precision][type] -------------------------------

static struct field read_spec(struct run *r, const char *at, const char *end)
{
    struct field f = {.precision = -1};
    int first = at < end ? utf8_sequence(at, (size_t)(end - at)) : 0;
    const char *behind = at + (first > 0 ? first : 0);
    f.align = first > 0 ? read_one(&behind, end, "<>=^") : 0;
    if (f.align) {
        memcpy(f.fill, at, (size_t)first);
        f.n_fill = first;
        at = behind;
    } else {
        f.align = read_one(&at, end, "<>=^");
    }
    f.sign = read_one(&at, end, "+- ");
    read_one(&at, end, "z");
    f.alternate = read_one(&at, end, "#");
    if (read_one(&at, end, "0")) {
        if (!f.n_fill) f.fill[0] = '0';
        if (!f.n_fill) f.n_fill = 1;
        if (!f.align) f.align = '=';
    }
    f.width = read_digits(&at, end, MAX_WIDTH - 1);
    f.group = read_one(&at, end, ",_");
    if (read_one(&at, end, ".")) {
        if (at == end || !isdigit((unsigned char)*at))
            fail(r, "Format specifier missing precision");
        f.precision = (int)read_digits(&at, end, MAX_PRECISION);
        check_precision(r, f.precision);
    }
    if (at < end) f.type = *at++;
    if (at < end || (unsigned char)f.type > 0x7f) fail(r, "Invalid format specifier");
    return f;
}

static _Noreturn void bad_code(struct run *r, char type, struct value v)
{
    fail(r, "Unknown format code '%c' for object of type '%s'", type, value_type(v));
}

static void put_text(struct run *r, struct field f, struct value v)
{
    if (f.type && f.type != 's') bad_code(r, f.type, v);
    if (f.align == '=' && f.fill[0] != '0')
        fail(r, "'=' alignment not allowed in string format specifier");
    if (f.align == '=') f.align = '<';
    put_text_field(r, &f, '<', v.string);
}

static void put_number(struct run *r, struct field f, struct value v)
{
    int64_t x;
    bool real = f.type && strchr("eEfFgG%", f.type);
    if (real || !value_as_int(v, &x)) {
        if (f.type && !real && f.type != 'n') bad_code(r, f.type, v);
        put_real_field(r, &f, value_as_double(v));
        return;
    }
    if (f.type && !strchr("dboxXcn", f.type)) bad_code(r, f.type, v);
    if (f.precision >= 0) fail(r, "Precision not allowed in integer format specifier");
    if (f.type == 'c')
        put_character_field(r, &f, '<', x);
    else
        put_integer_field(r, &f, x);
}

// ---- name.attribute[key] ------------------------------------------------------------------------

static struct value first_value(struct braces *b, const char *name, size_t n)
{
    const struct arguments *a = b->arguments;
    char *end;
    size_t i = strtoul(name, &end, 10);
    if (n > 0 && (end != name + n || !isdigit((unsigned char)*name))) {
        struct string key = {name, n, n, false};
        const struct dict_entry *e = entry_named(b->run, &a->named, &key);
        if (e) return e->value;
        fail(b->run, "KeyError: '%.*s'", SHOWN(&key));
    }
    if (n == 0 ? b->by_number : b->next > 0)
        fail(b->run, "numbered and unnumbered fields are mixed");
    b->by_number = n > 0;
    if (n == 0) i = b->next++;
    if (i >= a->positional.n)
        fail(b->run, "Replacement index %zu out of range for positional args tuple", i);
    return a->positional.items[i];
}

static struct value field_value(struct braces *b, const char *name, size_t n)
{
    size_t at = 0;
    while (at < n && name[at] != '.' && name[at] != '[') at++;
    struct value v = first_value(b, name, at);
    while (at < n) {
        bool dot = name[at++] == '.';
        size_t start = at;
        while (at < n && (dot ? name[at] != '.' && name[at] != '[' : name[at] != ']')) at++;
        if (!dot && at == n) fail(b->run, "Missing ']' in format string");
        struct value key = string_new(&b->run->arena, name + start, at - start, false);
        if (dot) {
            v = get_attribute(b->run, v, key.string);
            continue;
        }
        char *end;
        long number = strtol(name + start, &end, 10);
        if (end == name + at && at > start) key = value_int(number);
        v = get_item(b->run, v, key);
        at++; // "]"
    }
    return v;
}

// ---- the whole ----------------------------------------------------------------------------------

static struct value converted(struct run *r, struct value v, char conversion)
{
    if (conversion == 'r' || conversion == 'a') return value_repr(r, v);
    if (conversion != 's') fail(r, "Unknown conversion specifier %c", conversion);
    return value_str(r, v);
}

// What stands between a pair of braces.
static void put_field(struct braces *b, const char *s, size_t n)
{
    size_t name = 0;
    char conversion = 0;
    while (name < n && s[name] != ':' && s[name] != '!')
        name += s[name] == '[' ? strcspn(s + name, "]") : 1;
    if (name > n) name = n;
    size_t spec = name;
    if (spec < n && s[spec] == '!') {
        conversion = spec + 1 < n ? s[spec + 1] : 0;
        spec += 2;
    }
    if (spec < n && s[spec] != ':') fail(b->run, "expected ':' after conversion");
    struct value v = field_value(b, s, name);
    if (conversion) v = converted(b->run, v, conversion);
    if (spec + 1 >= n) {
        run_put_string(b->run, (b->markup ? value_escape : value_str)(b->run, v).string);
        return;
    }
    struct field f = read_spec(b->run, s + spec + 1, s + n);
    if (v.kind == V_STRING)
        put_text(b->run, f, v);
    else if (value_is_number(v))
        put_number(b->run, f, v);
    else
        fail(b->run, "unsupported format string passed to %s.__format__", value_type(v));
}

// End of the field whose "{" is before s: its "}", with braces within it in pairs; n: there is
// none.
static size_t field_end(const char *s, size_t n)
{
    int open = 1;
    for (size_t i = 0; i < n; i++) {
        open += (s[i] == '{') - (s[i] == '}');
        if (open == 0) return i;
    }
    return n;
}

static struct value format_braces(struct run *r, const struct string *format,
                                  const struct arguments *arguments)
{
    struct braces b = {.run = r, .arguments = arguments, .markup = format->markup};
    const char *s = format->data;
    size_t n = format->n_bytes, text = text_begin(r);
    run_bytes(r, n);
    for (size_t i = 0; i < n; i++) {
        if ((s[i] != '{' && s[i] != '}') || (i + 1 < n && s[i + 1] == s[i])) {
            run_put(r, &s[i], 1);
            i += s[i] == '{' || s[i] == '}';
        } else if (s[i] == '}') {
            fail(r, "Single '}' encountered in format string");
        } else {
            size_t len = field_end(s + i + 1, n - i - 1);
            if (i + 1 + len >= n) fail(r, "expected '}' before end of string");
            if (memchr(s + i + 1, '{', len)) fail(r, "fields within fields are not supported");
            put_field(&b, s + i + 1, len);
            i += 1 + len;
        }
    }
    return text_end(r, text, format->markup);
}

BUILTIN(format)
{
    return format_braces(r, c->v[0].string, c->all);
}

BUILTIN(format_map)
{
    if (c->v[1].kind != V_DICT) type_fail(r, "format_map() wants a mapping", c->v[1]);
    struct arguments arguments = {.named.n = 0};
    for (const struct dict_entry *e = c->v[1].dict->entries;
         e < c->v[1].dict->entries + c->v[1].dict->n; e++)
        if (e->key.kind == V_STRING) dict_append(&r->arena, &arguments.named, e->key, e->value);
    return format_braces(r, c->v[0].string, &arguments);
}

const struct builtin braces_builtins[] = {
    {METHOD(V_STRING), "format", format, 0, "*", 0},
    {METHOD(V_STRING), "format_map", format_map, 0, "/mapping", 1},
    {.name = NULL},
};
