/* reward_shape.c: the scorers of a completion's shape, whatever its answer: its length, its parts,
 * its repetitions, whether it is JSON. Stateless but for settings; the thread that scores. */
#include "trainer/reward/reward_scorer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- overlong: DAPO's soft punishment (Yu et al. 2025) ------------------------------------------

struct overlong {
    int64_t longest, buffer; // tokens
};

static enum status open_overlong(const struct reward_options *options, const char *argument,
                                 void **ret_state)
{
    (void)argument;
    if (options->overlong_buffer <= 0 || options->overlong_buffer >= options->max_completion_length)
        return status_fail(ST_INVALID,
                           "reward \"overlong\" needs --overlong-buffer, how many of the %lld "
                           "tokens of --max-completion-length are too many: 1 to %lld",
                           (long long)options->max_completion_length,
                           (long long)options->max_completion_length - 1);
    struct overlong *o = malloc(sizeof *o);
    if (!o) return status_fail(ST_NO_MEMORY, "no memory for rewards");
    *o = (struct overlong){options->max_completion_length, options->overlong_buffer};
    *ret_state = o;
    return ST_OK;
}

static enum status score_overlong(void *state, const struct reward_input *input, double *ret_score)
{
    const struct overlong *o = state;
    const double over = (double)(input->n_tokens - (o->longest - o->buffer));
    *ret_score = over > 0 ? fmax(-over / (double)o->buffer, -1) : 0;
    return ST_OK;
}

// ---- think_format -------------------------------------------------------------------------------

static enum status score_think(void *state, const struct reward_input *input, double *ret_score)
{
    static const char open[] = "<think>", close[] = "</think>";
    const char *rest = input->text + strlen(open);
    (void)state;
    *ret_score = strncmp(input->text, open, strlen(open)) == 0 && !strstr(rest, open) &&
                 strstr(rest, close) != NULL;
    return ST_OK;
}

// ---- repetition (Yeo et al. 2025) ---------------------------------------------------------------

static enum status open_repetition(const struct reward_options *options, const char *argument,
                                   void **ret_state)
{
    (void)argument;
    int64_t *n = malloc(sizeof *n);
    if (!n) return status_fail(ST_NO_MEMORY, "no memory for rewards");
    *n = options->repetition_ngram > 0 ? options->repetition_ngram : 3;
    *ret_state = n;
    return ST_OK;
}

static int by_ngram(const void *a, const void *b, void *n)
{
    const int32_t *x = *(const int32_t *const *)a, *y = *(const int32_t *const *)b;
    for (int64_t i = 0; i < *(const int64_t *)n; i++)
        if (x[i] != y[i]) return x[i] < y[i] ? -1 : 1;
    return 0;
}

static enum status score_repetition(void *state, const struct reward_input *input,
                                    double *ret_score)
{
    int64_t n = *(int64_t *)state;
    const int64_t all = input->n_tokens - n + 1;
    int64_t unique = 1;
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

// ---- json ---------------------------------------------------------------------------------------

// What the text holds between the last two ``` fences that stand there, or all of it.
static json_t *json_of(const char *text)
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
    const size_t len = begin ? (size_t)(end - begin) : strlen(text);
    return json_loadb(begin ? begin : text, len, JSON_DECODE_ANY, NULL);
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

static enum status check_json(void *state, const char *answer, const json_t *row)
{
    (void)state;
    (void)row;
    if (!answer) return ST_OK;
    json_t *wanted = json_loads(answer, JSON_DECODE_ANY, NULL);
    if (!wanted)
        return status_fail(ST_FORMAT, "the data set's answer \"%.80s\" is no JSON", answer);
    json_decref(wanted);
    return ST_OK;
}

static enum status score_json(void *state, const struct reward_input *input, double *ret_score)
{
    (void)state;
    json_t *got = json_of(input->text);
    json_t *wanted = input->answer ? json_loads(input->answer, JSON_DECODE_ANY, NULL) : NULL;
    *ret_score = got && (!wanted || same_json(got, wanted));
    json_decref(got);
    json_decref(wanted);
    return ST_OK;
}

const struct scorer scorer_overlong = {
    .name = "overlong",
    .help = "0 to -1 over the last --overlong-buffer tokens of --max-completion-length (DAPO)",
    .open = open_overlong,
    .close = free,
    .score = score_overlong,
};
const struct scorer scorer_think_format = {
    .name = "think_format",
    .help = "1 where the text begins with <think>, once, and closes it",
    .score = score_think,
};
const struct scorer scorer_repetition = {
    .name = "repetition",
    .help = "-(share of --repetition-ngram tokens in a row that stood there before)",
    .open = open_repetition,
    .close = free,
    .score = score_repetition,
};
const struct scorer scorer_json = {
    .name = "json",
    .binary = true,
    .help = "1 where the text, or what it holds between ```, is JSON equal to the answer, if the "
            "line has one",
    .check_row = check_json,
    .score = score_json,
};
