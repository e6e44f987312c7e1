/* reward_math.c: the scorer "math": whether the answer that a text gives is the data set's, by what
 * it means. Stateless; the thread that scores. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/reward/math/math.h"
#include "trainer/reward/math/prose.h"
#include "trainer/reward/reward_scorer.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

// A text's backslashes may have come doubled: \\\\frac. In a matrix they end rows. The units at its
// end, words that measure and the powers that they may have, are no part of a number.
static struct math_node *parse(const char *text, size_t len)
{
    static struct prose units = {
        "(?: (?<=[0-9}\\ \t\n]) (?: mm|cm|dm|m|km|inch|inches|in|ft|foot|feet|yard|mile|meter|"
        "metre|mg|g|kg|gram|pound|lb|ounce|oz|ton|ml|l|liter|litre|gallon|s|sec|second|min|minute|"
        "h|hr|hour|day|week|month|year|mph|kmh|degree|deg|cent|dollar|euro|rupee|unit|square|cubic|"
        "sq|cu|point|people|student|children|way|digit|acre|hectare )"
        "(?: (?<=[a-z]{3})s )? (?: \\^\\d | \\^\\{\\d\\} )? [\\s.]* )+ \\z",
        NULL};
    const bool rows = memmem(text, len, "\\begin", 6) != NULL;
    struct prose_match m;
    size_t n = 0;
    char *copy = malloc(len + 1);
    if (!copy) return NULL;
    for (size_t i = 0; i < len; i++) {
        const bool twice = !rows && text[i] == '\\' && i + 2 < len && text[i + 1] == '\\' &&
                           isalpha((unsigned char)text[i + 2]);
        if (!twice) copy[n++] = text[i];
    }
    if (prose_find(&units, copy, copy, copy + n, &m)) n = (size_t)(m.begin[0] - copy);
    struct math_node *root = math_parse(copy, n);
    free(copy);
    return root;
}

// The first of the likely answers that is an expression. ret_text: the likeliest, as it stands.
static struct math_node *find(const char *text, struct bytes *ret_text)
{
    struct bytes all[MATH_ANSWERS] = {{0}};
    struct math_node *found = NULL;
    const int n = math_answers(text, all);
    for (int i = 0; i < n && !found; i++) found = parse(bytes_text(&all[i]), all[i].len);
    if (n > 0) bytes_puts(ret_text, bytes_text(&all[0]));
    for (int i = 0; i < n; i++) bytes_release(&all[i]);
    return found;
}

// Blanks aside.
static bool same_text(const char *a, const char *b)
{
    if (!*a) return false;
    for (;; a++, b++) {
        while (isspace((unsigned char)*a)) a++;
        while (isspace((unsigned char)*b)) b++;
        if (*a != *b || !*a) return *a == *b;
    }
}

static double is_same(const struct reward_input *input)
{
    const char *wanted = input->answer, *text = input->text;
    struct bytes wanted_text = BYTES_INIT, got_text = BYTES_INIT;
    struct math_node *got = find(text, &got_text), *found = find(wanted, &wanted_text);
    struct math_node *bare = NULL; // as a data set's answer may stand
    bool same = got && found && math_same(found, got);
    if (!same && got && (bare = parse(wanted, strlen(wanted)))) same = math_same(bare, got);
    if (!same) same = same_text(bytes_text(&wanted_text), bytes_text(&got_text));
    free(found);
    free(bare);
    free(got);
    bytes_release(&wanted_text);
    bytes_release(&got_text);
    return same;
}

static bool reads_answer(const char *answer)
{
    struct bytes text = BYTES_INIT;
    struct math_node *bare = parse(answer, strlen(answer)), *found = find(answer, &text);
    const bool any = bare || found || text.len;
    free(bare);
    free(found);
    bytes_release(&text);
    return any;
}

const struct scorer scorer_math = {
    .name = "math",
    .binary = true,
    .needs_answer = true,
    .help = "1 where the text's last \\boxed{}, or else its answer, formula or number, means the "
            "answer: fractions, roots, sets, intervals, matrices, equations, letters",
    .reads = reads_answer,
    .unread = "holds no formula and no number",
    .value = is_same,
};
