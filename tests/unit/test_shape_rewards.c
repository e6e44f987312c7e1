/* test_shape_rewards.c: the scorers of a completion's shape against TRL's reward functions and
 * Python's json (tests/golden/rewards). */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/reward_one.h"
#include "tests/support/support.h"

static double score(const struct reward_options *options, const struct reward_input *input)
{
    struct reward *r;
    double sum;
    assert_ok(reward_new(options, &r));
    assert_ok(reward_check_row(r, input->answer, NULL));
    assert_ok(reward_score(r, input, NULL, &sum));
    reward_free(r);
    return sum;
}

// The JSON value at *at, which goes behind it.
static json_t *next_json(char **at)
{
    json_error_t error;
    json_t *value = json_loads(*at, JSON_DECODE_ANY | JSON_DISABLE_EOF_CHECK, &error);
    assert_non_null(value);
    *at += error.position;
    return value;
}

static double overlong(char *line)
{
    struct reward_options options = {.names = "overlong"};
    struct reward_input input = {.text = ""};
    options.max_completion_length = atoi(strsep(&line, " "));
    options.overlong_buffer = atoi(strsep(&line, " "));
    input.n_tokens = atoi(strsep(&line, " "));
    return score(&options, &input) - strtod(line, NULL);
}

static double repetition(char *line)
{
    struct reward_options options = {.names = "repetition"};
    int32_t ids[64];
    struct reward_input input = {.text = "", .ids = ids};
    options.repetition_ngram = atoi(strsep(&line, " "));
    char *list = strsep(&line, " ");
    if (*list == '-') list = NULL;
    for (char *id; (id = strsep(&list, ","));) ids[input.n_tokens++] = atoi(id);
    return score(&options, &input) - strtod(line, NULL);
}

static double text_or_json(const char *name, char *line)
{
    struct reward_options options = {.names = name};
    json_t *answer = test_keep(strcmp(name, "json") == 0 ? next_json(&line) : json_null());
    json_t *text = test_keep(next_json(&line));
    struct reward_input input = {.text = json_string_value(text),
                                 .answer = json_string_value(answer)};
    const double off = score(&options, &input) - strtod(line, NULL);
    return off;
}

TEST(references_agree)
{
    char *text = test_read(test_path(test_root(), "tests/golden/rewards/rewards.txt")),
         *next = text;
    int n = 0;
    for (char *line; (line = strsep(&next, "\n"));) {
        if (!*line || *line == '#') continue;
        char *shown = test_keep(strdup(line));
        const char *word = strsep(&line, " ");
        const double off = strcmp(word, "overlong") == 0     ? overlong(line)
                           : strcmp(word, "repetition") == 0 ? repetition(line)
                           : strcmp(word, "think") == 0      ? text_or_json("think_format", line)
                                                             : text_or_json("json", line);
        if (!(fabs(off) < 1e-9)) fail_msg("%g off: %s", off, shown);
        n++;
    }
    assert_int_equal(n, 270);
}

TEST(what_is_missing_is_named)
{
    struct reward_options options = {.names = "overlong", .max_completion_length = 10};
    struct reward *r;
    assert_fails(reward_new(&options, &r), ST_INVALID, "--overlong-buffer");
    options.overlong_buffer = 10;
    assert_status(reward_new(&options, &r), ST_INVALID);
    options = (struct reward_options){.names = "json"};
    assert_ok(reward_new(&options, &r));
    assert_fails(reward_check_row(r, "{", NULL), ST_FORMAT, "is no JSON");
    reward_free(r);
}
