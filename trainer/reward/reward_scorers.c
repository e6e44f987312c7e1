/* reward_scorers.c: the table of scorers, and those that need no file of their own: of a text
 * against the data set's answer or a pattern, and of a completion's shape whatever its answer. To
 * add one: its function and its row here. The thread that scores. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "common/constraint/constraint.h"
#include "trainer/reward/math/prose.h"
#include "trainer/reward/reward_scorer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <ctype.h>
#include <math.h>
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

// ---- against the answer -------------------------------------------------------------------------

static void trim(const char **text, size_t *len)
{
    while (*len && isspace((unsigned char)**text)) ++*text, --*len;
    while (*len && isspace((unsigned char)(*text)[*len - 1])) --*len;
}

static double is_exact(const struct reward_input *input)
{
    const char *text = input->text, *answer = input->answer;
    size_t text_len = strlen(text), answer_len = strlen(answer);
    trim(&text, &text_len);
    trim(&answer, &answer_len);
    return text_len == answer_len && memcmp(text, answer, text_len) == 0;
}

static bool reads_number(const char *answer)
{
    double number;
    return number_answer(answer, &number);
}

static bool has_number(bool (*find)(const char *text, double *ret_number),
                       const struct reward_input *input)
{
    double got, wanted;
    return number_answer(input->answer, &wanted) && find(input->text, &got) &&
           number_same(got, wanted);
}

static double is_numeric(const struct reward_input *input)
{
    return has_number(number_last, input);
}

static double is_gsm8k(const struct reward_input *input)
{
    return has_number(number_answer, input);
}

// What is chosen: in the last \boxed{}, else behind the last "answer", else the last letter.
static char choice_of(const char *text)
{
    static struct prose first = {"(?<![A-Za-z0-9]) [A-J] (?![A-Za-z0-9])", NULL};
    static struct prose last = {".* (?<![A-Za-z0-9]) ([A-J]) (?![A-Za-z0-9])", NULL};
    static const char *const marks[] = {"\\boxed{", "answer"};
    const char *end = text + strlen(text);
    struct prose_match m;
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
        const char *behind = behind_last(text, end, marks[i]);
        if (behind && prose_find(&first, behind, behind, end, &m)) return *m.begin[0];
    }
    return prose_find(&last, text, text, end, &m) ? *m.begin[1] : '\0';
}

static bool reads_choice(const char *answer)
{
    return choice_of(answer);
}

static double is_choice(const struct reward_input *input)
{
    const char letter = choice_of(input->text);
    return letter && letter == choice_of(input->answer);
}

// Numbers by value, objects whatever their order.
static bool same_json(const json_t *a, const json_t *b)
{
    const char *key;
    const json_t *value;
    if (json_is_number(a) && json_is_number(b)) return json_number_value(a) == json_number_value(b);
    if (json_typeof(a) != json_typeof(b)) return false;
    if (json_is_array(a)) {
        bool same = json_array_size(a) == json_array_size(b);
        for (size_t i = 0; same && i < json_array_size(a); i++)
            same = same_json(json_array_get(a, i), json_array_get(b, i));
        return same;
    }
    if (!json_is_object(a)) return json_equal(a, b);
    if (json_object_size(a) != json_object_size(b)) return false;
    json_object_foreach ((json_t *)a, key, value) {
        const json_t *other = json_object_get(b, key);
        if (!other || !same_json(value, other)) return false;
    }
    return true;
}

static bool reads_json(const char *answer)
{
    json_t *wanted = json_loads(answer, JSON_DECODE_ANY, NULL);
    const bool reads = wanted != NULL;
    json_decref(wanted);
    return reads;
}

// What the text holds between the last two ``` fences that stand there, or all of it.
static const char *fenced(const char *text, size_t *ret_len)
{
    const char *begin = NULL, *end = NULL, *fence = text;
    while ((fence = strstr(fence, "```"))) {
        const char *next = strstr(fence + 3, "```");
        if (!next) break;
        begin = fence + 3;
        end = next;
        fence = next + 3;
    }
    if (begin && strncmp(begin, "json", 4) == 0) begin += 4;
    *ret_len = begin ? (size_t)(end - begin) : strlen(text);
    return begin ? begin : text;
}

static double is_json(const struct reward_input *input)
{
    size_t len;
    const char *text = fenced(input->text, &len);
    json_t *got = json_loadb(text, len, JSON_DECODE_ANY, NULL);
    json_t *wanted = input->answer ? json_loads(input->answer, JSON_DECODE_ANY, NULL) : NULL;
    const bool same = got && (!wanted || same_json(got, wanted));
    json_decref(got);
    json_decref(wanted);
    return same;
}

static enum status meets_format(const json_t *row, const char *text, size_t len, double *ret)
{
    bool meets = false;
    json_t *spec;
    enum status st = constraint_of_format(json_object_get(row, "response_format"), &spec);
    if (st == ST_OK && !spec)
        st = status_fail(ST_INVALID, "no field \"response_format\" of a type other than text: the "
                                     "reward \"json_schema\" has nothing to hold a text against");
    if (st == ST_OK) st = constraint_meets(spec, text, len, &meets);
    json_decref(spec);
    *ret = meets;
    return st;
}

static enum status check_format(void *options, const json_t *row)
{
    double meets;
    (void)options;
    return meets_format(row, "", 0, &meets);
}

static enum status score_format(void *options, const struct reward_input *input, double *ret_score)
{
    size_t len;
    const char *text = fenced(input->text, &len);
    (void)options;
    trim(&text, &len);
    return meets_format(input->row, text, len, ret_score);
}

// ---- against a pattern --------------------------------------------------------------------------
// It is the line's own ("pattern" in the data set) or else --reward-pattern. The members of a group
// come one after another and share a line, so the last compiled one is kept. A match that runs into
// PCRE2's limits (a pattern that backtracks without end) is an error: whether it would have matched
// is not known.

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

// ---- shape --------------------------------------------------------------------------------------

static enum status check_length(const struct reward_options *options)
{
    if (options->length_target > 0) return ST_OK;
    return status_fail(ST_INVALID, "--length-target %g must be above 0", options->length_target);
}

static enum status score_length(void *options, const struct reward_input *input, double *ret_score)
{
    double chars = 0, target = ((struct reward_options *)options)->length_target;
    for (const char *s = input->text; *s; s++) chars += (*s & 0xC0) != 0x80; // UTF-8 lead bytes
    *ret_score = -fabs(chars - target) / target;
    return ST_OK;
}

static enum status check_overlong(const struct reward_options *options)
{
    if (options->overlong_buffer > 0 && options->overlong_buffer < options->max_completion_length)
        return ST_OK;
    return status_fail(ST_INVALID,
                       "reward \"overlong\" needs --overlong-buffer, how many of the %lld "
                       "tokens of --max-completion-length are too many: 1 to %lld",
                       (long long)options->max_completion_length,
                       (long long)options->max_completion_length - 1);
}

// DAPO's soft punishment (Yu et al. 2025).
static enum status score_overlong(void *state, const struct reward_input *input, double *ret_score)
{
    const struct reward_options *options = state;
    const int64_t buffer = options->overlong_buffer;
    const double over = (double)(input->n_tokens - (options->max_completion_length - buffer));
    *ret_score = over > 0 ? fmax(-over / (double)buffer, -1) : 0;
    return ST_OK;
}

static double think_format(const struct reward_input *input)
{
    static const char open[] = "<think>", close[] = "</think>";
    const char *behind = input->text + strlen(open);
    return strncmp(input->text, open, strlen(open)) == 0 && !strstr(behind, open) &&
           strstr(behind, close) != NULL;
}

static int by_ngram(const void *a, const void *b, void *n)
{
    const int32_t *x = *(const int32_t *const *)a, *y = *(const int32_t *const *)b;
    for (int64_t i = 0; i < *(const int64_t *)n; i++)
        if (x[i] != y[i]) return x[i] < y[i] ? -1 : 1;
    return 0;
}

// Yeo et al. 2025.
static enum status score_repetition(void *state, const struct reward_input *input,
                                    double *ret_score)
{
    const struct reward_options *options = state;
    int64_t n = options->repetition_ngram > 0 ? options->repetition_ngram : 3, unique = 1;
    const int64_t all = input->n_tokens - n + 1;
    *ret_score = 0;
    if (all <= 0) return ST_OK;
    const int32_t **ngrams = malloc((size_t)all * sizeof(const int32_t *));
    if (!ngrams) return status_fail(ST_NO_MEMORY, "no memory for %d tokens", input->n_tokens);
    for (int64_t i = 0; i < all; i++) ngrams[i] = input->ids + i;
    qsort_r(ngrams, (size_t)all, sizeof *ngrams, by_ngram, &n);
    for (int64_t i = 1; i < all; i++) unique += by_ngram(&ngrams[i - 1], &ngrams[i], &n) != 0;
    free(ngrams);
    *ret_score = -(1 - (double)unique / (double)all);
    return ST_OK;
}

// ---- neither ------------------------------------------------------------------------------------

static double constant(const struct reward_input *input)
{
    (void)input;
    return 1;
}

static enum status check_environment(const struct reward_options *options)
{
    if (options->environment) return ST_OK;
    return status_fail(ST_INVALID, "reward \"environment\" is what an environment gave, and none "
                                   "makes samples here: cw-trainer train --rollouts names one");
}

static double environment(const struct reward_input *input)
{
    return input->environment;
}

// ---- the table ----------------------------------------------------------------------------------

#define ROW(title, ...)                                                                            \
    &(const struct scorer)                                                                         \
    {                                                                                              \
        .name = title, __VA_ARGS__                                                                 \
    }
#define OF_ANSWER .binary = true, .needs_answer = true
#define OF_NUMBER OF_ANSWER, .reads = reads_number, .unread = "holds no number"

const struct scorer *const scorers[] = {
    ROW("exact", OF_ANSWER, .value = is_exact,
        .help = "1 where the text is the answer, blanks around it aside"),
    ROW("numeric", OF_NUMBER, .value = is_numeric,
        .help = "1 where the last number of the text is the answer"),
    ROW("gsm8k", OF_NUMBER, .value = is_gsm8k,
        .help = "1 where the number after \"####\", \"the answer is\", in \\boxed{}, or else the "
                "last one is the answer",
        .prompt_template =
            "{prompt} Let's think step by step and output the final answer after \"####\"."),
    ROW("regex", .binary = true, .open = regex_open, .close = regex_close, .check_row = prepare,
        .score = regex_score,
        .help = "1 where the line's \"pattern\", or else --reward-pattern, is found in the text "
                "(PCRE2)"),
    ROW("length", .check_options = check_length, .score = score_length,
        .help = "-|characters - target| / target (--length-target)"),
    ROW("constant", .value = constant, .help = "1 for everything: no signal, for measurements"),
    &scorer_plugin,
    &scorer_command,
    ROW("environment", .check_options = check_environment, .value = environment,
        .help = "what the environment of --rollouts gave, and the default with it"),
    ROW("overlong", .check_options = check_overlong, .score = score_overlong,
        .help = "0 to -1 over the last --overlong-buffer tokens of --max-completion-length (DAPO)"),
    ROW("think_format", .value = think_format,
        .help = "1 where the text begins with <think>, once, and closes it"),
    ROW("repetition", .score = score_repetition,
        .help = "-(share of --repetition-ngram tokens in a row that stood there before)"),
    ROW("json", .binary = true, .reads = reads_json, .unread = "is no JSON", .value = is_json,
        .help = "1 where the text, or what it holds between ```, is JSON equal to the answer, if "
                "the line has one"),
    ROW("json_schema", .binary = true, .check_row = check_format, .score = score_format,
        .help = "1 where the text, or what it holds between ```, is what the line's "
                "\"response_format\" asks for"),
    &scorer_math,
    ROW("choice", OF_ANSWER, .reads = reads_choice, .unread = "is no letter from A to J",
        .value = is_choice,
        .help = "1 where the letter that the text chooses, A to J, is the answer: in \\boxed{}, "
                "behind \"answer\", or else the last"),
    NULL,
};
