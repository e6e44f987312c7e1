/* option_rules.c: what goes with what among the options of a table (options.h has how a rule is
 * written): checked once at start, and listed in --help-all. No state.
 *
 * A condition is text, read anew where it is needed: there are some hundred, looked at once. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/options.h"

#include <string.h>

// One term of a condition: the name of an option, and what its value is compared with.
struct term {
    const struct option_spec *spec; // NULL: an option that this table has not, which is off
    char relation;                  // 0: the option is on; '=', '!', '<', '>', '~'
    const char *value;              // behind the relation
    size_t len;                     // of that
};

// The comparison that `text`, up to `len`, begins with.
static void read_relation(const char *text, size_t len, struct term *ret)
{
    const size_t sign = len ? 1 + (text[0] == '!') : 0;
    ret->relation = len ? text[0] : 0;
    ret->value = text + sign;
    ret->len = len - sign;
}

// Reads the term at *at, which is moved to the sign behind it.
static struct term next_term(const struct option_spec *table, const char **at)
{
    const size_t len = strcspn(*at, "&|"), name = strcspn(*at, "=!<>~&|");
    struct term t = {.spec = table};
    while (t.spec->name && (t.spec->type == OPTION_HEADING || t.spec->type == OPTION_FOREIGN ||
                            strlen(t.spec->name) != name || memcmp(t.spec->name, *at, name) != 0))
        t.spec++;
    if (!t.spec->name) t.spec = NULL;
    read_relation(*at + name, len - name, &t);
    *at += len;
    return t;
}

static double number_of(const struct option_spec *spec, const void *field)
{
    switch (spec->type) {
    case OPTION_FLAG:
    case OPTION_DERIVED:
        return *(const bool *)field;
    case OPTION_INT:
    case OPTION_SIZE:
        return (double)*(const int64_t *)field;
    case OPTION_DOUBLE:
        return *(const double *)field;
    case OPTION_CHOICE:
        return *(const int *)field;
    default: {
        const char *text = *(const char *const *)field;
        return text && *text;
    }
    }
}

// The value as it is spelt; number: room for one.
static const char *text_of(const struct option_spec *spec, const void *field, char number[32])
{
    if (spec->type == OPTION_CHOICE) return spec->choices[*(const int *)field];
    if (spec->type == OPTION_FLAG) return *(const bool *)field ? "true" : "false";
    if (spec->type == OPTION_STRING || spec->type == OPTION_FILE) {
        const char *text = *(const char *const *)field;
        return text ? text : "";
    }
    snprintf(number, 32, "%.10g", number_of(spec, field));
    return number;
}

static bool is_listed(const struct term *t, const char *word)
{
    for (const char *at = t->value, *end = t->value + t->len; at <= end;) {
        const char *comma = memchr(at, ',', (size_t)(end - at));
        const size_t len = (size_t)((comma ? comma : end) - at);
        if (strlen(word) == len && memcmp(at, word, len) == 0) return true;
        at += len + 1;
    }
    return false;
}

static bool term_holds(const struct term *t, const void *config)
{
    char number[32];
    const void *field = t->spec ? (const char *)config + t->spec->offset : NULL;
    const char *text = t->spec ? text_of(t->spec, field, number) : "";
    const double x = t->spec ? number_of(t->spec, field) : 0;
    switch (t->relation) {
    case '=':
        return is_listed(t, text);
    case '!':
        return !is_listed(t, text);
    case '<':
        return x < atof(t->value);
    case '>':
        return x > atof(t->value);
    case '~':
        for (const char *at = text; strlen(at) >= t->len; at++)
            if (memcmp(at, t->value, t->len) == 0) return true;
        return false;
    default:
        return x != 0;
    }
}

// The first alternative that holds; NULL: none does.
static const char *find_alternative(const struct option_spec *table, const char *condition,
                                    const void *config)
{
    for (const char *at = condition;; at++) {
        const char *start = at;
        bool holds = true;
        for (;; at++) {
            const struct term t = next_term(table, &at);
            holds &= term_holds(&t, config);
            if (*at != '&') break;
        }
        if (holds) return start;
        if (!*at) return NULL;
    }
}

// ---- sentences ----------------------------------------------------------------------------------

// An option as it is: --async, --sync checkpoint, --rollout-ahead 2.
static void put_option(const struct option_spec *spec, const void *config, struct bytes *to)
{
    char number[32];
    const bool plain =
        spec->type == OPTION_FLAG || spec->type == OPTION_STRING || spec->type == OPTION_DERIVED;
    bytes_printf(to, "%s%s", spec->type == OPTION_DERIVED ? "" : "--", spec->name);
    if (!plain) bytes_printf(to, " %s", text_of(spec, (const char *)config + spec->offset, number));
}

// A term as it should be.
static void put_wanted(const struct term *t, struct bytes *to)
{
    const struct option_spec *spec = t->spec;
    const bool flag = spec->type == OPTION_FLAG && t->relation == '=';
    if (t->relation == '!') bytes_puts(to, "another ");
    if (t->relation == '=' && t->len == 0) bytes_puts(to, "no ");
    bytes_printf(to, "%s%s%s", spec->type == OPTION_DERIVED ? "" : "--",
                 flag && t->value[0] == 'f' ? "no-" : "", spec->name);
    if (t->relation == '!') bytes_puts(to, " than");
    if (t->relation == '>' ||
        (!t->relation && spec->type != OPTION_FLAG && spec->type != OPTION_STRING &&
         spec->type != OPTION_DERIVED && spec->type != OPTION_CHOICE))
        bytes_printf(to, " above %.*s", t->relation ? (int)t->len : 1,
                     t->relation ? t->value : "0");
    if (t->relation == '<') bytes_printf(to, " below %.*s", (int)t->len, t->value);
    if (!t->relation && spec->type == OPTION_CHOICE)
        bytes_printf(to, " other than %s", spec->choices[0]);
    if (strchr("=!~", t->relation) && t->relation && !flag)
        for (size_t i = 0, n = t->len; i < n; i++) {
            if (i == 0) bytes_puts(to, " ");
            if (t->value[i] == ',')
                bytes_puts(to, " or ");
            else
                bytes_append(to, t->value + i, 1);
        }
}

// The condition as it should be, and what each of its options is.
static void put_condition(const struct option_spec *table, const char *condition, struct bytes *to)
{
    for (const char *at = condition;; at++) {
        const struct term t = next_term(table, &at);
        if (t.spec) put_wanted(&t, to);
        if (!*at) return;
        bytes_puts(to, *at == '&' ? " and " : " or ");
    }
}

static void put_alternative(const struct option_spec *table, const char *at, const void *config,
                            struct bytes *to)
{
    for (;; at++) {
        const struct term t = next_term(table, &at);
        put_option(t.spec, config, to);
        if (*at != '&') return;
        bytes_puts(to, " and ");
    }
}

// ---- rules --------------------------------------------------------------------------------------

// Whether the rule holds; else `why` is the sentence.
static bool rule_holds(const struct option_spec *table, const struct option_spec *spec,
                       const struct option_rule *r, const void *config, struct bytes *why)
{
    if (r->kind != RULE_NEEDS && r->kind != RULE_EXCLUDES) return true;
    struct term own = {.spec = spec};
    if (r->when) read_relation(r->when, strlen(r->when), &own);
    if (!term_holds(&own, config)) return true;
    const char *held = find_alternative(table, r->other, config);
    if ((held != NULL) == (r->kind == RULE_NEEDS)) return true;
    put_option(spec, config, why);
    bytes_puts(why, held ? " with " : " needs ");
    if (held)
        put_alternative(table, held, config, why);
    else
        put_condition(table, r->other, why);
    if (r->reason) bytes_printf(why, held ? ": %s" : ", %s", r->reason);
    if (held && !(r->reason && strchr(r->reason, ';')))
        bytes_puts(why, "; leave one of the two out");
    return false;
}

enum status options_check(const struct option_set *set, const void *config)
{
    struct bytes why = BYTES_INIT;
    enum status st = ST_OK;
    for (const struct option_spec *spec = set->table; st == ST_OK && spec->name; spec++)
        for (const struct option_rule *r = spec->rules; st == ST_OK && r && r->kind != RULE_END;
             r++)
            if (!rule_holds(set->table, spec, r, config, &why))
                st = status_fail(ST_INVALID, "%s", bytes_text(&why));
    bytes_release(&why);
    return st;
}

void options_list_idle(const struct option_set *set, const void *config, struct bytes *to)
{
    for (const struct option_spec *spec = set->table; spec->name; spec++)
        for (const struct option_rule *r = spec->rules; r && r->kind != RULE_END; r++) {
            if (r->kind != RULE_WITHIN || set->given[spec - set->table] != OPTION_GIVEN ||
                find_alternative(set->table, r->other, config))
                continue;
            bytes_printf(to, "--%s has no effect without ", spec->name);
            put_condition(set->table, r->other, to);
            bytes_puts(to, "\n");
        }
}

// Whether one alternative is that an option is off which this table has not.
static bool holds_here(const struct option_spec *table, const char *condition)
{
    for (const char *at = condition;; at++) {
        const struct term t = next_term(table, &at);
        if (!t.spec && t.relation == '=' && t.len == 0) return true;
        if (!*at) return false;
    }
}

void option_rules_describe(const struct option_spec *table, const struct option_spec *spec,
                           struct bytes *to)
{
    for (const struct option_rule *r = spec->rules; r && r->kind != RULE_END; r++) {
        if (r->kind == RULE_COMMON || holds_here(table, r->other)) continue;
        bytes_puts(to, " [");
        if (r->when) bytes_printf(to, "%s: ", r->when + (r->when[0] == '='));
        bytes_puts(to, r->kind == RULE_EXCLUDES ? "not with " : "with ");
        put_condition(table, r->other, to);
        bytes_puts(to, "]");
    }
}
