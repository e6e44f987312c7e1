/* options.c: command line, JSON config file, --help and the resolved config, all from one table.
 * Main thread, once at start.
 *
 * The command line is read first into a list of (option, text), so that --config is known before
 * anything is stored; then defaults, file and list are applied in that order, each overwriting the
 * one before. All strings are copied into the set, so a config does not depend on who gave a value.
 */
#include "common/base/options.h"
#include "common/base/json.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

struct assignment {
    const struct option_spec *spec;
    const char *text; // borrowed from argv, or "true"/"false"
};

struct option_set {
    const struct option_spec *table;
    size_t count; // of the table
    bool *given;  // one for each of the table: by flag or file
    char **strings;
    size_t n_strings, cap_strings;
};

static bool is_option(const struct option_spec *spec)
{
    return spec->type != OPTION_HEADING;
}

static size_t table_count(const struct option_spec *table)
{
    size_t n = 0;
    while (table[n].name) n++;
    return n;
}

// Names that options had once: still read, in no list, and never suggested.
static const struct {
    const char *was, *is;
} renamed[] = {
    {"head-rows", "logits-chunk"},
};

static bool is_name(const char *name, const char *text, size_t len)
{
    return strlen(name) == len && memcmp(name, text, len) == 0;
}

static const struct option_spec *table_find(const struct option_spec *table, const char *name,
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

// ---- the nearest name, for errors ---------------------------------------------------------------

#define NAME_MAX_LEN 63

// Edits (insert, delete, replace) from a to b; two rows of the usual table.
static size_t edit_distance(const char *a, const char *b)
{
    size_t row[NAME_MAX_LEN + 1], na = strlen(a), nb = strlen(b);
    if (na > NAME_MAX_LEN || nb > NAME_MAX_LEN) return SIZE_MAX;
    for (size_t j = 0; j <= nb; j++) row[j] = j;
    for (size_t i = 1; i <= na; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= nb; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[nb];
}

// NULL where nothing is near: a suggestion that is a guess misleads. The start of a name counts as
// one edit.
static const char *nearest_name(const struct option_spec *table, const char *word)
{
    size_t len = strlen(word), limit = len < 6 ? 1 : len < 12 ? 2 : len / 4;
    const char *nearest = NULL;
    for (; table->name; table++) {
        if (!is_option(table)) continue;
        size_t edits = edit_distance(word, table->name);
        if (edits > 1 && len >= 3 && strncmp(word, table->name, len) == 0) edits = 1;
        if (edits < limit || (edits == limit && !nearest)) {
            nearest = table->name;
            limit = edits;
        }
    }
    return nearest;
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

// Keeps a copy of `text` in the set.
static enum status keep_string(struct option_set *set, const char *text, const char **ret)
{
    if (set->n_strings == set->cap_strings) {
        size_t cap = set->cap_strings ? set->cap_strings * 2 : 32;
        char **strings = realloc(set->strings, cap * sizeof *strings);
        if (!strings) return status_fail(ST_NO_MEMORY, "out of memory while reading options");
        set->strings = strings;
        set->cap_strings = cap;
    }
    char *copy = strdup(text);
    if (!copy) return status_fail(ST_NO_MEMORY, "out of memory while reading options");
    set->strings[set->n_strings++] = copy;
    *ret = copy;
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

static void *field_of(const struct option_spec *spec, void *config)
{
    return (char *)config + spec->offset;
}

static enum status store_int(const struct option_spec *spec, struct source from, int64_t x,
                             void *config)
{
    enum status st = check_range(spec, from, (double)x);
    if (st == ST_OK) memcpy(field_of(spec, config), &x, sizeof x);
    return st;
}

static enum status store_double(const struct option_spec *spec, struct source from, double x,
                                void *config)
{
    enum status st = check_range(spec, from, x);
    if (st == ST_OK) memcpy(field_of(spec, config), &x, sizeof x);
    return st;
}

static enum status store_string(struct option_set *set, const struct option_spec *spec,
                                const char *text, void *config)
{
    const char *copy = NULL;
    enum status st = keep_string(set, text, &copy);
    if (st == ST_OK) memcpy(field_of(spec, config), &copy, sizeof copy);
    return st;
}

static enum status store_bool(const struct option_spec *spec, bool x, void *config)
{
    memcpy(field_of(spec, config), &x, sizeof x);
    return ST_OK;
}

static enum status store_choice(const struct option_spec *spec, struct source from,
                                const char *text, void *config)
{
    int value;
    if (name_parse(spec->choices, text, &value) != ST_OK)
        return value_fail(from, "%s", status_message());
    memcpy(field_of(spec, config), &value, sizeof value);
    return ST_OK;
}

// A value spelt as on the command line.
static enum status store_text(struct option_set *set, const struct option_spec *spec,
                              struct source from, const char *text, void *config)
{
    char *end;
    errno = 0;
    switch (spec->type) {
    case OPTION_FLAG:
        if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0)
            return value_fail(from, "'%s' is neither true nor false", text);
        return store_bool(spec, text[0] == 't', config);
    case OPTION_INT: {
        long long x = strtoll(text, &end, 10);
        if (end == text || *end || errno != 0)
            return value_fail(from, "'%s' is not a whole number", text);
        return store_int(spec, from, x, config);
    }
    case OPTION_DOUBLE: {
        double x = strtod(text, &end);
        if (end == text || *end || !isfinite(x))
            return value_fail(from, "'%s' is not a number", text);
        return store_double(spec, from, x, config);
    }
    case OPTION_SIZE: {
        int64_t bytes;
        if (options_size(text, &bytes) != ST_OK) return value_fail(from, "%s", status_message());
        return store_int(spec, from, bytes, config);
    }
    case OPTION_STRING:
    case OPTION_FILE:
        return store_string(set, spec, text, config);
    case OPTION_CHOICE:
        return store_choice(spec, from, text, config);
    case OPTION_HEADING:
        break;
    }
    return ST_OK;
}

// ---- the file -----------------------------------------------------------------------------------

static enum status store_json(struct option_set *set, const struct option_spec *spec,
                              const char *path, const json_t *object, const char *key, void *config)
{
    struct source from = {path, key};
    const json_t *value = json_object_get(object, key);
    enum status st;
    switch (spec->type) {
    case OPTION_FLAG: {
        bool x = false;
        st = json_get_bool(path, object, key, &x);
        return st != ST_OK ? st : store_bool(spec, x, config);
    }
    case OPTION_DOUBLE: {
        double x = 0;
        st = json_get_double(path, object, key, -INFINITY, INFINITY, &x);
        return st != ST_OK ? st : store_double(spec, from, x, config);
    }
    case OPTION_SIZE:
        if (json_is_string(value))
            return store_text(set, spec, from, json_string_value(value), config);
        // fall through
    case OPTION_INT: {
        int64_t x = 0;
        int64_t min = spec->type == OPTION_SIZE ? 0 : INT64_MIN;
        st = json_get_int(path, object, key, min, INT64_MAX, &x);
        return st != ST_OK ? st : store_int(spec, from, x, config);
    }
    case OPTION_STRING:
    case OPTION_CHOICE:
    case OPTION_FILE: {
        const char *text = NULL;
        st = json_get_string(path, object, key, &text);
        return st != ST_OK ? st : store_text(set, spec, from, text, config);
    }
    case OPTION_HEADING:
        break;
    }
    return ST_OK;
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
    return table_find(table, name, len);
}

static enum status unknown_key(const struct option_set *set, const char *path, const char *key)
{
    char name[NAME_MAX_LEN + 1];
    snprintf(name, sizeof name, "%s", key);
    swap_letter(name, '_', '-');
    const char *near = nearest_name(set->table, name);
    if (!near)
        return status_fail(ST_INVALID, "%s: unknown key \"%s\" (--help lists the names)", path,
                           key);
    snprintf(name, sizeof name, "%s", near);
    swap_letter(name, '-', '_');
    return status_fail(ST_INVALID, "%s: unknown key \"%s\"; did you mean \"%s\"?", path, key, name);
}

#define CONFIG_FILE_BYTES (1 << 20)

static enum status apply_file(struct option_set *set, const char *path, void *config)
{
    json_t *root = NULL, *value;
    const char *key;
    enum status st;
    CHECK(json_read_file(path, CONFIG_FILE_BYTES, &root));
    if (!json_is_object(root)) {
        st = status_fail(ST_INVALID, "%s: a config file holds one JSON object", path);
        goto out;
    }
    json_object_foreach (root, key, value) {
        const struct option_spec *spec = find_key(set->table, key);
        if (!spec) {
            st = unknown_key(set, path, key);
            goto out;
        }
        if (json_is_null(value)) continue;
        if (spec->type == OPTION_FILE) {
            st = status_fail(ST_INVALID, "%s: \"config\": a config file cannot name another", path);
            goto out;
        }
        CHECK(store_json(set, spec, path, root, key, config));
        set->given[spec - set->table] = true;
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
    const char *near = nearest_name(table, name);
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
    status_fail(ST_INVALID, "--%s needs a value (%s)", spec->name, bytes_text(&values));
    bytes_release(&values);
    return ST_INVALID;
}

// Reads argv[*at], and its value where that is the next word; advances *at past them.
static enum status read_option(const struct option_spec *table, int argc, char **argv, int *at,
                               struct assignment *ret)
{
    const char *word = argv[*at], *name = word + 2;
    size_t len = strcspn(name, "=");
    const char *value = name[len] == '=' ? name + len + 1 : NULL;
    const struct option_spec *spec = table_find(table, name, len);
    (*at)++;
    if (!spec && len > 3 && strncmp(name, "no-", 3) == 0) {
        spec = table_find(table, name + 3, len - 3);
        if (!spec || spec->type != OPTION_FLAG) return unknown_option(table, word);
        if (value) return status_fail(ST_INVALID, "--no-%s takes no value", spec->name);
        value = "false";
    }
    if (!spec) return unknown_option(table, word);
    if (!value && spec->type == OPTION_FLAG) value = "true";
    if (!value) {
        if (*at >= argc || strncmp(argv[*at], "--", 2) == 0) return no_value(spec);
        value = argv[(*at)++];
    }
    *ret = (struct assignment){spec, value};
    return ST_OK;
}

// What the command line says, before any of it is stored.
struct command_line {
    struct assignment *assignments; // room for argc
    const char **positional;        // room for max_positional
    int n_assignments, n_positional;
    bool help, version; // stops at the first of them
};

static enum status read_command_line(const struct option_spec *table, int argc, char **argv,
                                     int max_positional, struct command_line *line)
{
    bool options_end = false;
    for (int at = 1; at < argc;) {
        const char *word = argv[at];
        if (!options_end && strcmp(word, "--") == 0) {
            options_end = true;
            at++;
        } else if (!options_end && (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0)) {
            line->help = true;
            return ST_OK;
        } else if (!options_end && strcmp(word, "--version") == 0) {
            line->version = true;
            return ST_OK;
        } else if (!options_end && strncmp(word, "--", 2) == 0) {
            enum status st =
                read_option(table, argc, argv, &at, &line->assignments[line->n_assignments]);
            if (st != ST_OK) return st;
            line->n_assignments++;
        } else if (!options_end && word[0] == '-' && word[1]) {
            return status_fail(ST_INVALID, "unknown option %s: options are long ones, as --help",
                               word);
        } else {
            if (line->n_positional == max_positional)
                return status_fail(ST_INVALID, "unexpected argument '%s' (--help shows the usage)",
                                   word);
            line->positional[line->n_positional++] = word;
            at++;
        }
    }
    return ST_OK;
}

// ---- help ---------------------------------------------------------------------------------------

#define HELP_COLUMN 32

static int terminal_width(void)
{
    struct winsize size;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col < 60) return 80;
    return size.ws_col < 100 ? size.ws_col : 100;
}

// Prints `text` wrapped at `width`, its first line at column `at`, further ones at HELP_COLUMN.
static void print_wrapped(const char *text, int at, int width)
{
    while (*text) {
        int len = (int)strcspn(text, " ");
        if (at > HELP_COLUMN && at + 1 + len > width) {
            printf("\n%*s", HELP_COLUMN, "");
            at = HELP_COLUMN;
        } else if (at > HELP_COLUMN) {
            putchar(' ');
            at++;
        }
        printf("%.*s", len, text);
        at += len;
        text += len;
        text += strspn(text, " ");
    }
    putchar('\n');
}

static void print_option(const struct option_spec *spec, int width)
{
    struct bytes left = BYTES_INIT, right = BYTES_INIT;
    if (spec->type == OPTION_FLAG) {
        bytes_printf(&left, "  --[no-]%s", spec->name);
    } else {
        bytes_printf(&left, "  --%s ", spec->name);
        put_values(spec, &left);
    }
    bytes_puts(&right, spec->help ? spec->help : "");
    if (spec->fallback) bytes_printf(&right, " (default: %s)", spec->fallback);
    int at = printf("%s", bytes_text(&left));
    if (at > HELP_COLUMN - 2) {
        putchar('\n');
        at = 0;
    }
    printf("%*s", HELP_COLUMN - at, "");
    print_wrapped(bytes_text(&right), HELP_COLUMN, width);
    bytes_release(&left);
    bytes_release(&right);
}

static void print_help(const struct option_spec *table, const char *program, const char *usage)
{
    int width = terminal_width();
    printf("usage: %s %s\n", program, usage);
    if (table->name && is_option(table)) printf("\noptions:\n");
    for (; table->name; table++) {
        if (table->type == OPTION_HEADING)
            printf("\n%s:\n", table->help);
        else
            print_option(table, width);
    }
    printf("\n");
    static const struct option_spec own[] = {
        {.name = "help", .help = "print this and exit"},
        {.name = "version", .help = "print the version and exit"},
    };
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) {
        int at = printf("  --%s", own[i].name);
        printf("%*s", HELP_COLUMN - at, "");
        print_wrapped(own[i].help, HELP_COLUMN, width);
    }
    fflush(stdout);
}

// ---- all together -------------------------------------------------------------------------------

static enum status apply_all(struct option_set *set, const struct command_line *line, void *config)
{
    enum status st;
    const struct option_spec *table = set->table;
    for (size_t i = 0; i < set->count; i++)
        if (is_option(&table[i]) && table[i].fallback)
            CHECK(store_text(set, &table[i], (struct source){NULL, table[i].name},
                             table[i].fallback, config));

    const char *file = NULL;
    for (int i = 0; i < line->n_assignments; i++)
        if (line->assignments[i].spec->type == OPTION_FILE) file = line->assignments[i].text;
    if (file) CHECK(apply_file(set, file, config));

    for (int i = 0; i < line->n_assignments; i++) {
        const struct option_spec *spec = line->assignments[i].spec;
        CHECK(store_text(set, spec, (struct source){NULL, spec->name}, line->assignments[i].text,
                         config));
        set->given[spec - table] = true;
    }
    st = ST_OK;
out:
    return st;
}

// No string of a config outlives the set that owns it.
static void drop_strings(const struct option_spec *table, void *config)
{
    const char *none = NULL;
    for (; table->name; table++)
        if (table->type == OPTION_STRING || table->type == OPTION_FILE)
            memcpy(field_of(table, config), &none, sizeof none);
}

enum option_result options_parse(const struct option_spec *table, const char *program,
                                 const char *usage, int argc, char **argv, int max_positional,
                                 void *config, const char **ret_positional,
                                 struct option_set **ret_set)
{
    enum option_result result = OPTIONS_BAD;
    size_t room = (size_t)(argc > 0 ? argc : 1);
    struct command_line line = {
        .assignments = calloc(room, sizeof *line.assignments),
        .positional = calloc((size_t)max_positional + 1, sizeof *line.positional),
    };
    struct option_set *set = calloc(1, sizeof *set);
    if (set) {
        set->table = table;
        set->count = table_count(table);
        set->given = calloc(set->count + 1, sizeof *set->given);
    }
    if (!set || !set->given || !line.assignments || !line.positional) {
        status_fail(ST_NO_MEMORY, "out of memory while reading options");
        goto out;
    }
    if (read_command_line(table, argc, argv, max_positional, &line) != ST_OK) goto out;
    if (line.help || line.version) {
        if (line.help)
            print_help(table, program, usage);
        else
            printf("%s %s\n", program, COMMONWEIGHT_VERSION);
        fflush(stdout);
        result = OPTIONS_DONE;
        goto out;
    }
    if (apply_all(set, &line, config) != ST_OK) {
        drop_strings(table, config);
        goto out;
    }
    for (int i = 0; i < max_positional; i++) ret_positional[i] = line.positional[i];
    *ret_set = set;
    set = NULL;
    result = OPTIONS_OK;
out:
    options_free(set);
    free(line.assignments);
    free(line.positional);
    return result;
}

bool options_given(const struct option_set *set, const char *name)
{
    const struct option_spec *spec = table_find(set->table, name, strlen(name));
    return spec && set->given[spec - set->table];
}

static json_t *field_to_json(const struct option_spec *spec, const void *config);

enum status options_fill(struct option_set *set, const char *path, const json_t *recorded,
                         void *config, struct bytes *ret_taken)
{
    enum status st = ST_OK;
    const char *key;
    json_t *value, *before = NULL;
    json_object_foreach ((json_t *)recorded, key, value) {
        const struct option_spec *spec = find_key(set->table, key);
        if (!spec) {
            st = status_context(unknown_key(set, path, key), "recorded by another version");
            goto out;
        }
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
