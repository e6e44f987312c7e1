/* reward.c: the table of scorers. Stateless but for the chosen terms and their weights; any thread.
 */
#include "trainer/reward.h"
#include "common/base/bytes.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TERMS 16

struct scorer {
    const char *name;
    bool binary, needs_answer; // binary: 0 or 1
    double (*score)(const struct reward *r, const struct reward_input *input);
    const char *help;
};

struct reward {
    int n;
    const struct scorer *terms[MAX_TERMS];
    double weights[MAX_TERMS];
    double length_target;
};

// ---- numbers in text ----------------------------------------------------------------------------

// Reads the number that starts at s (a digit, or '.' before one); returns where it ends.
static const char *scan_number(const char *s, double *ret)
{
    char digits[64];
    size_t n = 0;
    bool fraction = false;
    for (; *s; s++) {
        if (isdigit((unsigned char)*s)) {
            if (n < sizeof digits - 1) digits[n++] = *s;
        } else if (*s == ',' && !fraction && isdigit((unsigned char)s[1]) &&
                   isdigit((unsigned char)s[2]) && isdigit((unsigned char)s[3]) &&
                   !isdigit((unsigned char)s[4])) {
            continue; // 1,234
        } else if (*s == '.' && !fraction && isdigit((unsigned char)s[1])) {
            fraction = true;
            if (n < sizeof digits - 1) digits[n++] = '.';
        } else {
            break;
        }
    }
    digits[n] = '\0';
    *ret = strtod(digits, NULL);
    return s;
}

bool reward_last_number(const char *text, bool after_marker, double *ret)
{
    const char *start = text, *marker = text;
    while (after_marker && (marker = strstr(marker, "####")) != NULL) start = marker += 4;
    bool found = false;
    for (const char *s = start; *s;) {
        bool digit = isdigit((unsigned char)*s) || (*s == '.' && isdigit((unsigned char)s[1]) &&
                                                    (s == start || !isdigit((unsigned char)s[-1])));
        if (!digit) {
            s++;
            continue;
        }
        // "-5", "-$5": a minus before it, unless it stands between two operands ("7-5").
        const char *sign = s;
        if (sign > start && sign[-1] == '$') sign--;
        bool negative =
            sign > start && sign[-1] == '-' &&
            (sign - 1 == start || !(isalnum((unsigned char)sign[-2]) || sign[-2] == ')'));
        double value;
        s = scan_number(s, &value);
        *ret = negative ? -value : value;
        found = true;
        if (start != text) break; // GSM8K: the first number after the marker is the answer
    }
    return found;
}

static bool same_number(double a, double b)
{
    return fabs(a - b) <= 1e-9 * fmax(1, fmax(fabs(a), fabs(b)));
}

// ---- scorers ------------------------------------------------------------------------------------

static void trim(const char **text, size_t *len)
{
    while (*len && isspace((unsigned char)**text)) ++*text, --*len;
    while (*len && isspace((unsigned char)(*text)[*len - 1])) --*len;
}

static double score_exact(const struct reward *r, const struct reward_input *input)
{
    (void)r;
    const char *text = input->text, *answer = input->answer;
    size_t text_len = strlen(text), answer_len = strlen(answer);
    trim(&text, &text_len);
    trim(&answer, &answer_len);
    return text_len == answer_len && memcmp(text, answer, text_len) == 0;
}

static double score_numeric(const struct reward *r, const struct reward_input *input)
{
    (void)r;
    double got, wanted;
    return reward_last_number(input->text, false, &got) &&
           reward_last_number(input->answer, true, &wanted) && same_number(got, wanted);
}

static double score_gsm8k(const struct reward *r, const struct reward_input *input)
{
    (void)r;
    double got, wanted;
    return reward_last_number(input->text, true, &got) &&
           reward_last_number(input->answer, true, &wanted) && same_number(got, wanted);
}

static double score_length(const struct reward *r, const struct reward_input *input)
{
    double chars = 0;
    for (const char *s = input->text; *s; s++) chars += (*s & 0xC0) != 0x80; // UTF-8 lead bytes
    return -fabs(chars - r->length_target) / r->length_target;
}

static double score_constant(const struct reward *r, const struct reward_input *input)
{
    (void)r;
    (void)input;
    return 1;
}

static const struct scorer scorers[] = {
    {"exact", true, true, score_exact, "1 where the text is the answer, blanks around it aside"},
    {"numeric", true, true, score_numeric, "1 where the last number of the text is the answer"},
    {"gsm8k", true, true, score_gsm8k,
     "1 where the number after \"####\" (or else the last one) is the answer"},
    {"length", false, false, score_length, "-|characters - target| / target (--length-target)"},
    {"constant", false, false, score_constant, "1 for everything: no signal, for measurements"},
};
#define N_SCORERS (sizeof scorers / sizeof *scorers)

const char *reward_describe(int i, const char **ret_help)
{
    if (i < 0 || (size_t)i >= N_SCORERS) return NULL;
    *ret_help = scorers[i].help;
    return scorers[i].name;
}

static const struct scorer *scorer_find(const char *name, size_t len)
{
    for (size_t i = 0; i < N_SCORERS; i++)
        if (strlen(scorers[i].name) == len && memcmp(scorers[i].name, name, len) == 0)
            return &scorers[i];
    return NULL;
}

static enum status parse_terms(struct reward *r, const char *names)
{
    for (const char *s = names; s;) {
        size_t len = strcspn(s, ",");
        const struct scorer *scorer = scorer_find(s, len);
        if (!scorer) {
            struct bytes known = BYTES_INIT;
            for (size_t i = 0; i < N_SCORERS; i++)
                bytes_printf(&known, "%s%s", i ? ", " : "", scorers[i].name);
            enum status st = status_fail(ST_INVALID, "reward \"%.*s\" is not one of %s", (int)len,
                                         s, bytes_text(&known));
            bytes_release(&known);
            return st;
        }
        if (r->n == MAX_TERMS)
            return status_fail(ST_INVALID, "--reward names more than %d terms", MAX_TERMS);
        r->terms[r->n] = scorer;
        r->weights[r->n++] = 1;
        s = s[len] ? s + len + 1 : NULL;
    }
    return ST_OK;
}

static enum status parse_weights(struct reward *r, const char *weights)
{
    int n = 0;
    for (const char *s = weights; s && *s; n++) {
        char *end;
        double weight = strtod(s, &end);
        if (end == s || (*end && *end != ',') || !isfinite(weight))
            return status_fail(ST_INVALID, "reward weights \"%s\": \"%s\" is not a number", weights,
                               s);
        if (n < r->n) r->weights[n] = weight;
        s = *end ? end + 1 : end;
    }
    if (n && n != r->n)
        return status_fail(ST_INVALID, "reward weights \"%s\" are %d for %d terms", weights, n,
                           r->n);
    return ST_OK;
}

enum status reward_new(const char *names, const char *weights, double length_target,
                       struct reward **ret)
{
    enum status st = ST_OK;
    struct reward *r = calloc(1, sizeof *r);
    if (!r) return status_fail(ST_NO_MEMORY, "no memory for rewards");
    r->length_target = length_target;
    if (!(length_target > 0)) {
        st = status_fail(ST_INVALID, "length target %g must be above 0", length_target);
        goto out;
    }
    CHECK(parse_terms(r, names));
    CHECK(parse_weights(r, weights));
    *ret = r;
out:
    if (st != ST_OK) reward_free(r);
    return st;
}

void reward_free(struct reward *r)
{
    free(r);
}

int reward_terms(const struct reward *r)
{
    return r->n;
}

const char *reward_term_name(const struct reward *r, int term)
{
    return r->terms[term]->name;
}

bool reward_needs_answer(const struct reward *r)
{
    for (int i = 0; i < r->n; i++)
        if (r->terms[i]->needs_answer) return true;
    return false;
}

int reward_accuracy_term(const struct reward *r)
{
    for (int i = 0; i < r->n; i++)
        if (r->terms[i]->binary) return i;
    return -1;
}

double reward_score(const struct reward *r, const struct reward_input *input, double *ret_terms)
{
    double sum = 0;
    for (int i = 0; i < r->n; i++) {
        double score = r->terms[i]->score(r, input);
        if (ret_terms) ret_terms[i] = score;
        sum += r->weights[i] * score;
    }
    return sum;
}
