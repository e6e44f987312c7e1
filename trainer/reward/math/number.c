/* number.c: finds and reads numbers in prose. Stateless; any thread.
 *
 * One scanner (next_number) knows what a number looks like; the rules only choose where it starts
 * and ends.
 */
#include "trainer/reward/math/number.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- one number ---------------------------------------------------------------------------------

static bool is_digit(char c)
{
    return isdigit((unsigned char)c);
}

// Length of a thousands separator at s: a comma, also as TeX has it, or one of TeX's small spaces,
// before exactly three digits; 0: there is none.
static size_t separator(const char *s)
{
    static const char *const forms[] = {"{,}\\!", "{,}", ",\\!", ",",   "\\,",
                                        "\\!",    "\\;", "\\:",  "\\ ", NULL};
    for (int i = 0; forms[i]; i++) {
        size_t n = strlen(forms[i]);
        if (strncmp(s, forms[i], n) == 0 && is_digit(s[n]) && is_digit(s[n + 1]) &&
            is_digit(s[n + 2]) && !is_digit(s[n + 3]))
            return n;
    }
    return 0;
}

// Reads the decimal that starts at s (a digit, or '.' before one); returns where it ends.
static const char *scan_decimal(const char *s, bool *ret_whole, double *ret_value)
{
    char digits[64];
    size_t n = 0, skip;
    bool whole = true;
    while (*s) {
        if (is_digit(*s) || (*s == '.' && whole && is_digit(s[1]))) {
            whole = whole && *s != '.';
            if (n < sizeof digits - 1) digits[n++] = *s;
            s++;
        } else if (whole && (skip = separator(s)) > 0) {
            s += skip;
        } else {
            break;
        }
    }
    digits[n] = '\0';
    *ret_whole = whole;
    *ret_value = strtod(digits, NULL);
    return s;
}

static bool starts_decimal(const char *s)
{
    return is_digit(*s) || (*s == '.' && is_digit(s[1]));
}

// Behind the name of TeX's \frac, \dfrac, \tfrac or \cfrac at s; NULL: it is none.
static const char *fraction_name(const char *s)
{
    if (*s != '\\') return NULL;
    s++;
    if (*s && strchr("dtc", *s)) s++;
    return strncmp(s, "frac", 4) == 0 ? s + 4 : NULL;
}

// One part of a TeX fraction: a number in braces, or one digit. NULL: it is something else.
static const char *scan_part(const char *s, double *ret_value)
{
    bool whole;
    while (*s == ' ') s++;
    if (is_digit(*s)) {
        *ret_value = *s - '0';
        return s + 1;
    }
    if (*s++ != '{') return NULL;
    while (*s == ' ') s++;
    bool negative = *s == '-';
    s += negative;
    if (!starts_decimal(s)) return NULL;
    s = scan_decimal(s, &whole, ret_value);
    if (negative) *ret_value = -*ret_value;
    while (*s == ' ') s++;
    return *s == '}' ? s + 1 : NULL;
}

// The TeX fraction at s; NULL: none, or not one of two numbers.
static const char *scan_tex_fraction(const char *s, double *ret_value)
{
    double above, below;
    if (!(s = fraction_name(s)) || !(s = scan_part(s, &above)) || !(s = scan_part(s, &below)) ||
        below == 0)
        return NULL;
    *ret_value = above / below;
    return s;
}

// "3/4", but not what is a date ("3/4/2025") or no fraction of whole numbers. `text`: where the
// text starts.
static const char *scan_plain_fraction(const char *text, const char *s, double *ret_value)
{
    bool whole;
    double above, below;
    if (!is_digit(*s) || (s > text && s[-1] == '/')) return NULL;
    s = scan_decimal(s, &whole, &above);
    if (!whole || *s != '/' || !is_digit(s[1])) return NULL;
    s = scan_decimal(s + 1, &whole, &below);
    if (!whole || below == 0 || (*s == '/' && is_digit(s[1]))) return NULL;
    *ret_value = above / below;
    return s;
}

// The number at s: a fraction, or a decimal and what a mixed number has behind it ("1 1/2"). NULL:
// there is none.
static const char *scan_number(const char *text, const char *s, double *ret_value)
{
    bool whole;
    double part;
    const char *end;
    if ((end = scan_tex_fraction(s, ret_value)) || (end = scan_plain_fraction(text, s, ret_value)))
        return end;
    if (!starts_decimal(s) || (*s == '.' && s > text && is_digit(s[-1]))) return NULL;
    s = scan_decimal(s, &whole, ret_value);
    if (!whole) return s;
    end = scan_tex_fraction(s + (*s == ' '), &part);
    if (!end && *s == ' ') end = scan_plain_fraction(text, s + 1, &part);
    if (!end || !(part > 0 && part < 1)) return s;
    *ret_value += part;
    return end;
}

// Where the minus that ends right before s begins; NULL: there is none.
static const char *minus_before(const char *text, const char *s)
{
    if (s > text && s[-1] == '-') return s - 1;
    if (s - text >= 3 && memcmp(s - 3, "\xe2\x88\x92", 3) == 0) return s - 3; // U+2212
    return NULL;
}

// "-5", "-$5", "$-5", TeX's "-\$5" and "-{5}"; not the minus of "7-5".
static bool is_negative(const char *text, const char *number)
{
    const char *sign = number;
    if (sign > text && sign[-1] == '{') sign--;
    if (sign > text && sign[-1] == '$') sign--;
    if (sign > text && sign[-1] == '\\') sign--;
    const char *minus = minus_before(text, sign);
    if (!minus) return false;
    return minus == text || !(isalnum((unsigned char)minus[-1]) || minus[-1] == ')');
}

// Behind a TeX fraction that is not one of two numbers, its parts left out.
static const char *skip_fraction(const char *s)
{
    s = fraction_name(s);
    for (int part = 0; part < 2 && *s == '{'; part++) {
        int depth = 0;
        do depth += (*s == '{') - (*s == '}');
        while (*s++ && depth > 0 && *s);
    }
    return s;
}

// The next number at or after *at and before `end` (NULL: the text's), which moves behind it. Signs
// are looked for back to `text`. ret_start: where it was found, may be NULL.
static bool next_number(const char *text, const char *end, const char **at, const char **ret_start,
                        double *ret_value)
{
    for (const char *s = *at; *s && (!end || s < end);) {
        double value;
        const char *behind = scan_number(text, s, &value);
        if (behind) {
            *at = behind;
            if (ret_start) *ret_start = s;
            *ret_value = is_negative(text, s) ? -value : value;
            return true;
        }
        s = fraction_name(s) ? skip_fraction(s) : s + 1;
    }
    return false;
}

bool number_last(const char *text, double *ret_value)
{
    bool found = false;
    for (const char *at = text; next_number(text, NULL, &at, NULL, ret_value);) found = true;
    return found;
}

// ---- the answer of a solution -------------------------------------------------------------------

// Behind the last `mark` of the text; NULL: there is none.
static const char *after_last(const char *text, const char *mark)
{
    const char *after = NULL;
    for (const char *s = text; (s = strcasestr(s, mark)) != NULL;) after = s += strlen(mark);
    return after;
}

// The last number of what stands in \boxed{...}, from behind its brace. None where it holds a
// fraction that is not one of two numbers: what else it holds is not the answer.
static bool boxed_number(const char *content, double *ret_value)
{
    const char *end = content;
    double value;
    bool found = false;
    for (int depth = 1; *end; end++) {
        depth += (*end == '{') - (*end == '}');
        if (depth == 0) break;
        if (fraction_name(end) && !scan_tex_fraction(end, &value)) return false;
    }
    for (const char *at = content; next_number(content, end, &at, NULL, &value); found = true)
        *ret_value = value;
    return found;
}

// The first number of what follows a mark, or the boxed one.
static bool marked_number(const char *tail, double *ret_value)
{
    const char *boxed = after_last(tail, "\\boxed{");
    return boxed ? boxed_number(boxed, ret_value) : next_number(tail, NULL, &tail, NULL, ret_value);
}

// Length of the word at s where it may introduce an answer ("#### Final answer: 18").
static size_t answer_word(const char *s)
{
    static const char *const words[] = {"the", "final", "answer", "is"};
    size_t len = 0;
    while (isalpha((unsigned char)s[len])) len++;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (len == strlen(words[i]) && strncasecmp(s, words[i], len) == 0) return len;
    return 0;
}

// What stands before a number says that it is the answer: "x = 5", "Total: 18".
static bool is_labelled(const char *line, const char *number)
{
    while (number > line && strchr(" $*\\{(-", number[-1])) number--;
    return number > line && (number[-1] == '=' || number[-1] == ':');
}

/* Whether a line is a Markdown heading, "#### Step 2: ...", and no answer's mark: a word that does
 * not introduce an answer stands before any number. The text's last line is one only where a colon
 * is behind its number: "#### about 5" is an answer. */
static bool is_heading(const char *line)
{
    const char *s = line + strspn(line, " "), *end = line + strcspn(line, "\n"), *number;
    double value;
    if (strncmp(s, "####", 4) != 0) return false;
    for (s += strspn(s, "#"); s < end; s++) {
        size_t word = answer_word(s);
        if (*s == '\\' || is_digit(*s)) return false;
        if (word == 0 && isalpha((unsigned char)*s)) break;
        if (word) s += word - 1;
    }
    if (s >= end) return false;
    bool last = end[strspn(end, " \n")] == '\0';
    if (!next_number(line, end, &s, &number, &value)) return !last;
    return !is_labelled(line, number) && (!last || *s == ':');
}

static const char *next_line(const char *line)
{
    line += strcspn(line, "\n");
    return *line ? line + 1 : NULL;
}

// Behind the last "####" that is no heading's; NULL: there is none.
static const char *after_answer_mark(const char *text)
{
    const char *after = NULL;
    for (const char *line = text; line; line = next_line(line)) {
        if (is_heading(line)) continue;
        const char *end = line + strcspn(line, "\n");
        for (const char *s = line; (s = memmem(s, (size_t)(end - s), "####", 4)) != NULL;)
            after = s += strspn(s, "#");
    }
    return after;
}

// The last number that is not in a heading.
static bool last_in_lines(const char *text, double *ret_value)
{
    bool found = false;
    for (const char *line = text; line; line = next_line(line)) {
        const char *end = line + strcspn(line, "\n");
        if (is_heading(line)) continue;
        for (const char *at = line; next_number(text, end, &at, NULL, ret_value);) found = true;
    }
    return found;
}

bool number_answer(const char *text, double *ret_value)
{
    const char *tail = after_answer_mark(text);
    if (tail) return marked_number(tail, ret_value);
    tail = after_last(text, "the answer is");
    if (tail && marked_number(tail, ret_value)) return true;
    tail = after_last(text, "\\boxed{");
    if (tail) return boxed_number(tail, ret_value);
    return last_in_lines(text, ret_value);
}

bool number_same(double a, double b)
{
    return fabs(a - b) <= 1e-9 * fmin(1, fmax(fabs(a), fabs(b)));
}
