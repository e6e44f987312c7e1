/* reward_regex.c: the scorer `regex`: 1 where a Perl-compatible pattern is found in the completion.
 * The pattern is the line's own ("pattern" in the data set) or else --reward-pattern. The trainer's
 * thread.
 *
 * The members of a group come one after another and share a line, so the last compiled pattern is
 * kept. A match that runs into PCRE2's limits (a pattern that backtracks without end) is an error:
 * whether it would have matched is not known.
 */
#include "trainer/reward/reward_scorer.h"
#include "common/base/json.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

struct regex {
    const char *fallback; // of --reward-pattern; NULL: none
    char *pattern;        // that `code` is of
    pcre2_code *code;
    pcre2_match_data *match;
};

static void regex_close(void *state)
{
    struct regex *x = state;
    if (!x) return;
    pcre2_match_data_free(x->match);
    pcre2_code_free(x->code);
    free(x->pattern);
    free(x);
}

// Makes x->code that of `pattern`.
static enum status compile(struct regex *x, const char *pattern)
{
    int error;
    PCRE2_SIZE at;
    if (x->pattern && strcmp(x->pattern, pattern) == 0) return ST_OK;
    char *copy = strdup(pattern);
    if (!copy) return status_fail(ST_NO_MEMORY, "no memory for a pattern");
    pcre2_code *code =
        pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                      PCRE2_UTF | PCRE2_UCP | PCRE2_MATCH_INVALID_UTF, &error, &at, NULL);
    if (!code) {
        char words[256];
        pcre2_get_error_message(error, (PCRE2_UCHAR *)words, sizeof words);
        free(copy);
        return status_fail(ST_INVALID, "pattern \"%s\", character %zu: %s", pattern, at, words);
    }
    free(x->pattern);
    pcre2_code_free(x->code);
    x->pattern = copy;
    x->code = code;
    return ST_OK;
}

static enum status regex_open(const struct reward_options *options, const char *argument,
                              void **ret_state)
{
    enum status st = ST_OK;
    struct regex *x = calloc(1, sizeof *x);
    (void)argument;
    if (!x) return status_fail(ST_NO_MEMORY, "no memory for the reward \"regex\"");
    x->match = pcre2_match_data_create(1, NULL);
    x->fallback = options->pattern;
    if (!x->match) FAIL(ST_NO_MEMORY, "no memory for the reward \"regex\"");
    if (x->fallback) CHECK(status_context(compile(x, x->fallback), "--reward-pattern"));
    *ret_state = x;
out:
    if (st != ST_OK) regex_close(x);
    return st;
}

static enum status prepare(void *state, const json_t *row)
{
    struct regex *x = state;
    const char *pattern = x->fallback;
    enum status st = json_get_string("data set", row, "pattern", &pattern);
    if (st != ST_OK) return st;
    if (!pattern)
        return status_fail(ST_INVALID,
                           "no field \"pattern\", and --reward-pattern is not given: the reward "
                           "\"regex\" has nothing to look for");
    return compile(x, pattern);
}

static enum status regex_score(void *state, const struct reward_input *input, double *ret_score)
{
    struct regex *x = state;
    enum status st = prepare(state, input->row);
    if (st != ST_OK) return st;
    int n =
        pcre2_match(x->code, (PCRE2_SPTR)input->text, strlen(input->text), 0, 0, x->match, NULL);
    if (n < 0 && n != PCRE2_ERROR_NOMATCH) {
        char words[256];
        pcre2_get_error_message(n, (PCRE2_UCHAR *)words, sizeof words);
        return status_fail(ST_INVALID, "pattern \"%s\": %s; write it so that it backtracks less",
                           x->pattern, words);
    }
    *ret_score = n >= 0;
    return ST_OK;
}

const struct scorer scorer_regex = {
    .name = "regex",
    .binary = true,
    .help =
        "1 where the line's \"pattern\", or else --reward-pattern, is found in the text (PCRE2)",
    .open = regex_open,
    .close = regex_close,
    .check_row = prepare,
    .score = regex_score,
};
