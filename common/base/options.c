/* options.c: command line, JSON config file, --help and the resolved config, all from one table.
 * Main thread, once at start.
 *
 * The command line is gone over twice: first for its faults and for --config, then, once defaults
 * and file are stored, for its values. A value is a text as on the command line, whoever gives it;
 * strings are copied into the set, so a config does not depend on who gave a value.
 */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/options.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

static bool is_option(const struct option_spec *spec)
{
    return spec->type != OPTION_HEADING && spec->type != OPTION_DERIVED &&
           spec->type != OPTION_FOREIGN;
}

// Names that options had once: still read, in no list, and never suggested.
static const struct {
    const char *was, *is;
} renamed[] = {
    {"head-rows", "logits-chunk"},
    {"quiet-timeout", "quiesce-timeout"},
};

static bool is_name(const char *name, const char *text, size_t len)
{
    return strlen(name) == len && memcmp(name, text, len) == 0;
}

static const struct option_spec *find_option(const struct option_spec *table, const char *name,
                                             size_t len)
{
    for (size_t i = 0; i < sizeof renamed / sizeof *renamed; i++)
        if (is_name(renamed[i].was, name, len)) {
            name = renamed[i].is;
            len = strlen(name);
        }
    for (; table->name; table++)
        if (is_option(table) && is_name(table->name, name, len)) return table;
    return NULL;
}

// ---- names that are not there -------------------------------------------------------------------

static const char *nearest_option(const struct option_spec *table, const char *word)
{
    struct nearest_name nearest = {.word = word};
    for (; table->name; table++)
        if (is_option(table)) nearest_name_try(&nearest, table->name);
    return nearest.name;
}

// ---- values -------------------------------------------------------------------------------------

enum status options_size(const char *text, int64_t *ret_bytes)
{
    static const char units[] = "KMGT";
    char *end;
    errno = 0;
    long long n = strtoll(text, &end, 10);
    bool bad = end == text || errno != 0 || n < 0;
    int64_t bytes = n;
    if (!bad && *end) {
        const char *unit = strchr(units, *end >= 'a' ? *end - 'a' + 'A' : *end);
        bad = !unit || end[1] != 0;
        if (!bad) bad = __builtin_mul_overflow(bytes, 1LL << 10 * (unit - units + 1), &bytes);
    }
    if (bad)
        return status_fail(ST_INVALID,
                           "'%s' is not a size: give bytes, or a number with K, M, G or "
                           "T behind it, as 512M",
                           text);
    *ret_bytes = bytes;
    return ST_OK;
}

// "--learning-rate" or "config.json: \"learning_rate\"": who gave the value, for errors.
struct source {
    const char *file; // NULL: the command line
    const char *name;
};

static enum status value_fail(struct source from, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static enum status value_fail(struct source from, const char *format, ...)
{
    char sentence[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    if (from.file) return status_fail(ST_INVALID, "%s: \"%s\": %s", from.file, from.name, sentence);
    return status_fail(ST_INVALID, "--%s: %s", from.name, sentence);
}

static enum status check_range(const struct option_spec *spec, struct source from, double x)
{
    if ((spec->min == 0 && spec->max == 0) || (x >= spec->min && x <= spec->max)) return ST_OK;
    if (isinf(spec->max) || spec->max >= 0x1p62)
        return value_fail(from, "%.10g is too small; it must be at least %.10g", x, spec->min);
    return value_fail(from, "%.10g is out of range; it must lie between %.10g and %.10g", x,
                      spec->min, spec->max);
}

static enum status parse_int(struct source from, const char *text, int64_t *ret)
{
    char *end;
    errno = 0;
    *ret = strtoll(text, &end, 10);
    if (end == text || *end || errno != 0)
        return value_fail(from, "'%s' is not a whole number", text);
    return ST_OK;
}

// Stores a value spelt as on the command line; a copy of a text is the set's.
static enum status store(struct option_set *set, const struct option_spec *spec, struct source from,
                         const char *text, void *config)
{
    void *field = (char *)config + spec->offset;
    enum status st = ST_OK;
    char *end, **strings;
    double x;
    switch (spec->type) {
    case OPTION_FLAG:
        if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0)
            return value_fail(from, "'%s' is neither true nor false", text);
        *(bool *)field = text[0] == 't';
        break;
    case OPTION_INT:
    case OPTION_SIZE: {
        int64_t n = 0;
        if (spec->type == OPTION_INT)
            st = parse_int(from, text, &n);
        else if (options_size(text, &n) != ST_OK)
            st = value_fail(from, "%s", status_message());
        if (st == ST_OK) st = check_range(spec, from, (double)n);
        if (st == ST_OK) *(int64_t *)field = n;
        break;
    }
    case OPTION_DOUBLE:
        x = strtod(text, &end);
        if (end == text || *end || !isfinite(x))
            return value_fail(from, "'%s' is not a number", text);
        st = check_range(spec, from, x);
        if (st == ST_OK) *(double *)field = x;
        break;
    case OPTION_STRING:
    case OPTION_FILE:
        if ((strings = array_room(set->strings, set->n_strings, sizeof *strings)))
            set->strings = strings;
        if (!strings || !(strings[set->n_strings] = strdup(text)))
            return status_fail(ST_NO_MEMORY, "out of memory while reading options");
        *(const char **)field = strings[set->n_strings++];
        break;
    case OPTION_CHOICE:
        if (name_parse(spec->choices, text, field) != ST_OK)
            st = value_fail(from, "%s", status_message());
        break;
    case OPTION_HEADING:
    case OPTION_DERIVED:
    case OPTION_FOREIGN:
        break;
    }
    return st;
}

// ---- the file -----------------------------------------------------------------------------------

// The value of a key, as its text on the command line: numbers in `number`.
static enum status text_of(const struct option_spec *spec, const char *path, const json_t *object,
                           const char *key, char number[32], const char **ret)
{
    bool flag = false;
    double x = 0;
    int64_t n = 0, min = spec->type == OPTION_SIZE ? 0 : INT64_MIN;
    enum status st = ST_OK;
    *ret = number;
    if (spec->type == OPTION_FLAG) {
        st = json_get_bool(path, object, key, &flag);
        *ret = flag ? "true" : "false";
    } else if (spec->type == OPTION_DOUBLE) {
        st = json_get_double(path, object, key, -INFINITY, INFINITY, &x);
        snprintf(number, 32, "%.17g", x);
    } else if (spec->type == OPTION_INT ||
               (spec->type == OPTION_SIZE && !json_is_string(json_object_get(object, key)))) {
        st = json_get_int(path, object, key, min, INT64_MAX, &n);
        snprintf(number, 32, "%lld", (long long)n);
    } else {
        st = json_get_string(path, object, key, ret);
    }
    return st;
}

static enum status store_json(struct option_set *set, const struct option_spec *spec,
                              const char *path, const json_t *object, const char *key, void *config)
{
    char number[32];
    const char *text;
    enum status st = text_of(spec, path, object, key, number, &text);
    return st == ST_OK ? store(set, spec, (struct source){path, key}, text, config) : st;
}

static void swap_letter(char *text, char from, char to)
{
    for (; *text; text++)
        if (*text == from) *text = to;
}

// Keys are spelt with '_' where the table has '-'; a key with '-' is unknown, so that there is one
// spelling.
static const struct option_spec *find_key(const struct option_spec *table, const char *key)
{
    char name[NAME_MAX_LEN + 1];
    size_t len = strlen(key);
    if (len > NAME_MAX_LEN || strchr(key, '-')) return NULL;
    memcpy(name, key, len + 1);
    swap_letter(name, '_', '-');
    return find_option(table, name, len);
}

// What is behind the colon of "name name: here", where `word` is one of the names; else NULL.
static const char *here_for(const char *entry, const char *word)
{
    const size_t len = strlen(word), names = strcspn(entry, ":");
    for (const char *at = entry; at < entry + names; at += strcspn(at, " :") + 1)
        if (strcspn(at, " :") == len && memcmp(at, word, len) == 0) return entry + names + 2;
    return NULL;
}

// What stands here for an option of another program, of whose name the last part counts; NULL:
// nothing is known of it.
static const char *foreign_name(const struct option_spec *table, const char *word)
{
    const char *dot = strrchr(word, '.'), *here = NULL;
    for (; table->name && !here; table++)
        for (const char *const *entry = table->choices;
             table->type == OPTION_FOREIGN && *entry && !here; entry++)
            here = here_for(*entry, dot ? dot + 1 : word);
    return here;
}

static enum status unknown_key(const struct option_set *set, const char *path, const char *key)
{
    char name[NAME_MAX_LEN + 1];
    snprintf(name, sizeof name, "%s", key);
    swap_letter(name, '_', '-');
    const char *here = foreign_name(set->table, name);
    if (here) return status_fail(ST_INVALID, "%s: unknown key \"%s\": here %s", path, key, here);
    const char *near = nearest_option(set->table, name);
    if (!near)
        return status_fail(ST_INVALID, "%s: unknown key \"%s\" (--help lists the names)", path,
                           key);
    snprintf(name, sizeof name, "%s", near);
    swap_letter(name, '-', '_');
    return status_fail(ST_INVALID, "%s: unknown key \"%s\"; did you mean \"%s\"?", path, key, name);
}

#define CONFIG_FILE_BYTES (1 << 20)

static json_t *field_to_json(const struct option_spec *spec, const void *config);

static enum status apply_file(struct option_set *set, const char *path, void *config)
{
    json_t *root = NULL, *value;
    const char *key;
    enum status st;
    CHECK(json_read_file(path, CONFIG_FILE_BYTES, &root));
    if (!json_is_object(root)) FAIL(ST_INVALID, "%s: a config file holds one JSON object", path);
    json_object_foreach (root, key, value) {
        const struct option_spec *spec = find_key(set->table, key);
        if (!spec) CHECK(unknown_key(set, path, key));
        if (json_is_null(value)) continue;
        if (spec->type == OPTION_FILE)
            FAIL(ST_INVALID, "%s: \"config\": a config file cannot name another", path);
        json_t *before = field_to_json(spec, config);
        st = store_json(set, spec, path, root, key, config);
        set->given[spec - set->table] =
            json_equal(before, value) ? OPTION_AS_DEFAULT : OPTION_GIVEN;
        json_decref(before);
        if (st != ST_OK) break;
    }
out:
    json_decref(root);
    return st;
}

// ---- the command line ---------------------------------------------------------------------------

static enum status unknown_option(const struct option_spec *table, const char *word)
{
    char name[NAME_MAX_LEN + 1];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(word + 2, "="), word + 2);
    swap_letter(name, '_', '-');
    const char *here = foreign_name(table, name);
    if (here) return status_fail(ST_INVALID, "unknown option %s: here %s", word, here);
    const char *near = nearest_option(table, name);
    if (near) return status_fail(ST_INVALID, "unknown option %s; did you mean --%s?", word, near);
    return status_fail(ST_INVALID, "unknown option %s (--help lists the options)", word);
}

// For a person: what the option takes.
static void put_values(const struct option_spec *spec, struct bytes *to)
{
    if (spec->type == OPTION_CHOICE)
        names_list(spec->choices, to);
    else
        bytes_puts(to, spec->value_name ? spec->value_name : "VALUE");
}

static enum status no_value(const struct option_spec *spec)
{
    struct bytes values = BYTES_INIT;
    put_values(spec, &values);
    status_fail(ST_INVALID,
                "--%s needs a value (%s); one that begins with -- stands behind a =, as --%s=VALUE",
                spec->name, bytes_text(&values), spec->name);
    bytes_release(&values);
    return ST_INVALID;
}

// Reads argv[*at], and its value where that is the next word; advances *at past them.
static enum status read_option(const struct option_spec *table, int argc, char **argv, int *at,
                               const struct option_spec **ret_spec, const char **ret_value)
{
    const char *word = argv[*at], *name = word + 2;
    size_t len = strcspn(name, "=");
    const char *value = name[len] == '=' ? name + len + 1 : NULL;
    const struct option_spec *spec = find_option(table, name, len);
    (*at)++;
    if (!spec && len > 3 && strncmp(name, "no-", 3) == 0) {
        spec = find_option(table, name + 3, len - 3);
        if (!spec || spec->type != OPTION_FLAG) return unknown_option(table, word);
        if (value) return status_fail(ST_INVALID, "--no-%s takes no value", spec->name);
        value = "false";
    }
    if (!spec) return unknown_option(table, word);
    if (!value && spec->type == OPTION_FLAG) value = "true";
    if (!value) {
        const char *next = *at < argc ? argv[*at] : "--";
        // no option has a blank in it: such words are a value of several
        if (strncmp(next, "--", 2) == 0 && !strchr(next, ' ')) return no_value(spec);
        value = argv[(*at)++];
    }
    *ret_spec = spec;
    *ret_value = value;
    return ST_OK;
}

struct command_line {
    int argc;
    char **argv;
    const char **positional; // room for max_positional
    int n_positional, max_positional;
    const char *file;             // of --config
    bool help, help_all, version; // stops at the first of them
};

// What the command line says; its values are stored where there is a set.
static enum status read_command_line(const struct option_spec *table, struct command_line *line,
                                     struct option_set *set, void *config)
{
    bool options_end = false;
    line->n_positional = 0;
    for (int at = 1; at < line->argc;) {
        const char *word = line->argv[at], *value = NULL;
        const struct option_spec *spec = NULL;
        bool option = !options_end && word[0] == '-' && word[1];
        if (!option) {
            if (line->n_positional == line->max_positional)
                return status_fail(ST_INVALID, "unexpected argument '%s'%s", word,
                                   line->max_positional > 0
                                       ? " (--help shows the usage)"
                                       : ": values stand behind their options (--help lists them)");
            line->positional[line->n_positional++] = word;
            at++;
            continue;
        }
        options_end = strcmp(word, "--") == 0;
        line->help_all = strcmp(word, "--help-all") == 0;
        line->help = line->help_all || strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0;
        line->version = strcmp(word, "--version") == 0;
        if (line->help || line->version) return ST_OK;
        if (options_end) {
            at++;
            continue;
        }
        if (word[1] != '-')
            return status_fail(ST_INVALID, "unknown option %s: options are long ones, as --help",
                               word);
        enum status st = read_option(table, line->argc, line->argv, &at, &spec, &value);
        if (st == ST_OK && spec->type == OPTION_FILE) line->file = value;
        if (st == ST_OK && set) {
            st = store(set, spec, (struct source){NULL, spec->name}, value, config);
            set->given[spec - table] = OPTION_GIVEN;
        }
        if (st != ST_OK) return st;
    }
    return ST_OK;
}

// ---- help ---------------------------------------------------------------------------------------

#define HELP_COLUMN 32

// `left`, and `right` in the column beside it, wrapped at `width`.
static void print_row(const char *left, const char *right, int width)
{
    int at = printf("%s", left);
    printf("%s%*s", at > HELP_COLUMN - 2 ? "\n" : "",
           at > HELP_COLUMN - 2 ? HELP_COLUMN : HELP_COLUMN - at, "");
    at = HELP_COLUMN;
    for (int len; *right; right += len + (int)strspn(right + len, " "), at += len) {
        len = (int)strcspn(right, " ");
        if (at > HELP_COLUMN && at + 1 + len > width)
            at = printf("\n%*s", HELP_COLUMN, "") - 1;
        else if (at > HELP_COLUMN)
            at += printf(" ");
        printf("%.*s", len, right);
    }
    putchar('\n');
}

static void print_option(const struct option_spec *table, const struct option_spec *spec, bool all,
                         int width)
{
    struct bytes left = BYTES_INIT, right = BYTES_INIT;
    bytes_printf(&left, spec->type == OPTION_FLAG ? "  --[no-]%s" : "  --%s ", spec->name);
    if (spec->type != OPTION_FLAG) put_values(spec, &left);
    bytes_puts(&right, spec->help ? spec->help : "");
    if (spec->fallback) bytes_printf(&right, " (default: %s)", spec->fallback);
    if (all) option_rules_describe(table, spec, &right);
    print_row(bytes_text(&left), bytes_text(&right), width);
    bytes_release(&left);
    bytes_release(&right);
}

static bool is_common(const struct option_spec *spec)
{
    for (const struct option_rule *r = spec->rules; r && r->kind != RULE_END; r++)
        if (r->kind == RULE_COMMON) return true;
    return false;
}

static void print_help(const struct option_spec *table, const char *program, const char *usage,
                       bool all)
{
    struct winsize size;
    int n = 0, n_common = 0, width = 80;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col >= 60)
        width = size.ws_col < 100 ? size.ws_col : 100;
    for (const struct option_spec *spec = table; spec->name; spec++) {
        n += is_option(spec);
        n_common += is_common(spec);
    }
    all |= n_common == 0;
    printf("usage: %s %s\n", program, usage);
    if (!all || (table->name && is_option(table))) printf("\noptions:\n");
    for (const struct option_spec *spec = table; spec->name; spec++) {
        if (is_option(spec) && (all || is_common(spec)))
            print_option(table, spec, all, width);
        else if (all && spec->type == OPTION_HEADING)
            printf("\n%s:\n", spec->help);
    }
    printf("\n");
    print_row("  --help", "print this and exit", width);
    if (!all) printf("  %-*sprint all %d options and exit\n", HELP_COLUMN - 2, "--help-all", n);
    print_row("  --version", "print the version and exit", width);
}

// ---- all together -------------------------------------------------------------------------------

static enum status apply_all(struct option_set *set, struct command_line *line, void *config)
{
    enum status st;
    for (const struct option_spec *spec = set->table; spec->name; spec++)
        if (spec->fallback)
            CHECK(store(set, spec, (struct source){NULL, spec->name}, spec->fallback, config));
    if (line->file) CHECK(apply_file(set, line->file, config));
    st = read_command_line(set->table, line, set, config);
out:
    return st;
}

enum option_result options_parse(const struct option_spec *table, const char *program,
                                 const char *usage, int argc, char **argv, int max_positional,
                                 void *config, const char **ret_positional,
                                 struct option_set **ret_set)
{
    enum option_result result = OPTIONS_BAD;
    size_t n_options = 0;
    while (table[n_options].name) n_options++;
    struct command_line line = {
        .argc = argc,
        .argv = argv,
        .positional = calloc((size_t)max_positional + 1, sizeof *line.positional),
        .max_positional = max_positional,
    };
    struct option_set *set = calloc(1, sizeof *set);
    if (set)
        *set =
            (struct option_set){.table = table, .given = calloc(n_options + 1, sizeof *set->given)};
    if (!set || !set->given || !line.positional) {
        status_fail(ST_NO_MEMORY, "out of memory while reading options");
        goto out;
    }
    if (read_command_line(table, &line, NULL, NULL) != ST_OK) goto out;
    if (line.help || line.version) {
        if (line.help)
            print_help(table, program, usage, line.help_all);
        else
            printf("%s %s\n", program, COMMONWEIGHT_VERSION);
        fflush(stdout);
        result = OPTIONS_DONE;
        goto out;
    }
    if (apply_all(set, &line, config) != ST_OK) {
        // No string of a config outlives the set that owns it.
        const char *none = NULL;
        for (; table->name; table++)
            if (table->type == OPTION_STRING || table->type == OPTION_FILE)
                memcpy((char *)config + table->offset, &none, sizeof none);
        goto out;
    }
    for (int i = 0; i < max_positional; i++) ret_positional[i] = line.positional[i];
    *ret_set = set;
    set = NULL;
    result = OPTIONS_OK;
out:
    options_free(set);
    free(line.positional);
    return result;
}

bool options_given(const struct option_set *set, const char *name)
{
    const struct option_spec *spec = find_option(set->table, name, strlen(name));
    return spec && set->given[spec - set->table];
}

enum status options_fill(struct option_set *set, const char *path, const json_t *recorded,
                         void *config, struct bytes *ret_taken)
{
    enum status st = ST_OK;
    const char *key;
    json_t *value, *before = NULL;
    json_object_foreach ((json_t *)recorded, key, value) {
        const struct option_spec *spec = find_key(set->table, key);
        if (!spec)
            CHECK(status_context(unknown_key(set, path, key),
                                 "recorded by another version or command"));
        if (json_is_null(value) || spec->type == OPTION_FILE || set->given[spec - set->table])
            continue;
        before = field_to_json(spec, config);
        CHECK(store_json(set, spec, path, recorded, key, config));
        if (!json_equal(before, value)) {
            char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
            bytes_printf(ret_taken, "%s--%s %s", ret_taken->len ? ", " : "", spec->name,
                         text ? text : "");
            free(text);
        }
        json_decref(before);
        before = NULL;
    }
out:
    json_decref(before);
    return st;
}

static json_t *field_to_json(const struct option_spec *spec, const void *config)
{
    const char *field = (const char *)config + spec->offset;
    switch (spec->type) {
    case OPTION_FLAG:
        return json_boolean(*(const bool *)field);
    case OPTION_INT:
    case OPTION_SIZE:
        return json_integer(*(const int64_t *)(const void *)field);
    case OPTION_DOUBLE:
        return json_real(*(const double *)(const void *)field);
    case OPTION_CHOICE:
        return json_string(spec->choices[*(const int *)(const void *)field]);
    case OPTION_STRING:
    case OPTION_FILE: {
        const char *text = *(const char *const *)(const void *)field;
        return text ? json_string(text) : json_null();
    }
    case OPTION_HEADING:
    case OPTION_DERIVED:
    case OPTION_FOREIGN:
        break;
    }
    return NULL;
}

json_t *options_to_json(const struct option_spec *table, const void *config)
{
    json_t *object = json_object();
    for (; object && table->name; table++) {
        if (!is_option(table) || table->type == OPTION_FILE) continue;
        char key[NAME_MAX_LEN + 1];
        snprintf(key, sizeof key, "%s", table->name);
        swap_letter(key, '-', '_');
        json_t *value = field_to_json(table, config);
        if (!value) value = json_null(); // a string of argv that is not UTF-8
        if (json_object_set_new(object, key, value) != 0) {
            json_decref(object);
            object = NULL;
        }
    }
    return object;
}

void options_free(struct option_set *set)
{
    if (!set) return;
    for (size_t i = 0; i < set->n_strings; i++) free(set->strings[i]);
    free(set->strings);
    free(set->given);
    free(set);
}

// ---- programs -----------------------------------------------------------------------------------

bool program_hears_hangup(void)
{
    struct sigaction action;
    return sigaction(SIGHUP, NULL, &action) == 0 && action.sa_handler != SIG_IGN;
}

int program_main(const struct program *p, int argc, char **argv)
{
    struct option_set *set = NULL;
    char name[64];
    signal(SIGXFSZ, SIG_IGN); // a file that may not grow is an error of write(2), with a sentence
    snprintf(name, sizeof name, "%s%s%s", p->name, p->command ? " " : "",
             p->command ? p->command : "");
    log_open(p->name, LOG_INFO);
    const int words = !p->word ? 0 : p->max_words ? p->max_words : 1;
    enum option_result parsed =
        options_parse(p->options, name, p->usage, argc, argv, words, p->config, p->word, &set);
    if (parsed == OPTIONS_DONE) return 0;
    const bool usable = parsed == OPTIONS_OK && (!p->check || p->check(p->context, set) == ST_OK);
    const enum status st = usable ? p->run(p->context) : ST_INVALID;
    if (st != ST_OK && st != ST_CANCELLED) log_error("%s", status_message());
    options_free(set);
    return usable ? st != ST_OK : 2;
}
