/* number.c: finds and reads decimal numbers in prose. Stateless; any thread.
 *
 * One scanner (next_number) knows what a number looks like; the rules only choose where it starts.
 */
#include "trainer/rollout/number.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool is_digit(char c)
{
    return isdigit((unsigned char)c);
}

// Reads the number that starts at s (a digit, or '.' before one); returns where it ends.
static const char *scan_number(const char *s, double *ret_value)
{
    char digits[64];
    size_t n = 0;
    bool fraction = false;
    for (; *s; s++) {
        if (is_digit(*s)) {
            if (n < sizeof digits - 1) digits[n++] = *s;
        } else if (*s == ',' && !fraction && is_digit(s[1]) && is_digit(s[2]) && is_digit(s[3]) &&
                   !is_digit(s[4])) {
            continue; // 1,234
        } else if (*s == '.' && !fraction && is_digit(s[1])) {
            fraction = true;
            if (n < sizeof digits - 1) digits[n++] = '.';
        } else {
            break;
        }
    }
    digits[n] = '\0';
    *ret_value = strtod(digits, NULL);
    return s;
}

// Where the minus that ends right before s begins; NULL: there is none.
static const char *minus_before(const char *text, const char *s)
{
    if (s > text && s[-1] == '-') return s - 1;
    if (s - text >= 3 && memcmp(s - 3, "\xe2\x88\x92", 3) == 0) return s - 3; // U+2212
    return NULL;
}

// "-5", "-$5", "$-5"; not the minus of "7-5".
static bool is_negative(const char *text, const char *digits)
{
    const char *sign = digits;
    if (sign > text && sign[-1] == '$') sign--;
    const char *minus = minus_before(text, sign);
    if (!minus) return false;
    return minus == text || !(isalnum((unsigned char)minus[-1]) || minus[-1] == ')');
}

// The next number at or after *at, which moves behind it. Signs are looked for back to `text`.
static bool next_number(const char *text, const char **at, double *ret_value)
{
    for (const char *s = *at; *s; s++) {
        if (!is_digit(*s) && !(*s == '.' && is_digit(s[1]) && (s == text || !is_digit(s[-1]))))
            continue;
        double value;
        *at = scan_number(s, &value);
        *ret_value = is_negative(text, s) ? -value : value;
        return true;
    }
    return false;
}

bool number_last(const char *text, double *ret_value)
{
    bool found = false;
    for (const char *at = text; next_number(text, &at, ret_value);) found = true;
    return found;
}

// Behind the last `mark` of the text; NULL: there is none.
static const char *after_last(const char *text, const char *mark)
{
    const char *after = NULL;
    for (const char *s = text; (s = strcasestr(s, mark)) != NULL;) after = s += strlen(mark);
    return after;
}

// The content of \boxed{...} from behind its brace, without TeX's braces and spaces, so that
// 1{,}234 and 1{,}\!234 are 1,234.
static bool boxed_number(const char *content, double *ret_value)
{
    char plain[256];
    size_t n = 0;
    int depth = 1;
    for (const char *s = content; *s && n < sizeof plain - 1; s++) {
        depth += (*s == '{') - (*s == '}');
        if (depth == 0) break;
        if (*s == '\\' && strchr(",!;: $%", s[1]) && s[1])
            s++;
        else if (*s != '{' && *s != '}')
            plain[n++] = *s;
    }
    plain[n] = '\0';
    return !strstr(plain, "\\frac") && !strstr(plain, "\\dfrac") && !strstr(plain, "\\tfrac") &&
           number_last(plain, ret_value);
}

// The first number of what follows a mark, or the boxed one.
static bool marked_number(const char *rest, double *ret_value)
{
    const char *boxed = after_last(rest, "\\boxed{");
    return boxed ? boxed_number(boxed, ret_value) : next_number(rest, &rest, ret_value);
}

bool number_answer(const char *text, double *ret_value)
{
    const char *rest = after_last(text, "####");
    if (rest) return marked_number(rest, ret_value);
    rest = after_last(text, "the answer is");
    if (rest && marked_number(rest, ret_value)) return true;
    rest = after_last(text, "\\boxed{");
    if (rest) return boxed_number(rest, ret_value);
    return number_last(text, ret_value);
}

bool number_same(double a, double b)
{
    return fabs(a - b) <= 1e-9 * fmax(1, fmax(fabs(a), fabs(b)));
}
