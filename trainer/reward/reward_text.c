/* reward_text.c: the scorers that look at the text alone: against the data set's answer, by length,
 * or not at all. Stateless but for a target; the thread that scores. */
#include "trainer/reward/math/number.h"
#include "trainer/reward/reward_scorer.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static void trim(const char **text, size_t *len)
{
    while (*len && isspace((unsigned char)**text)) ++*text, --*len;
    while (*len && isspace((unsigned char)(*text)[*len - 1])) --*len;
}

static enum status score_exact(void *state, const struct reward_input *input, double *ret_score)
{
    (void)state;
    const char *text = input->text, *answer = input->answer;
    size_t text_len = strlen(text), answer_len = strlen(answer);
    trim(&text, &text_len);
    trim(&answer, &answer_len);
    *ret_score = text_len == answer_len && memcmp(text, answer, text_len) == 0;
    return ST_OK;
}

static enum status read_reference(const char *answer, double *ret_number)
{
    if (number_answer(answer, ret_number)) return ST_OK;
    return status_fail(ST_FORMAT, "the data set's answer \"%.80s\" holds no number", answer);
}

static enum status check_reference(void *state, const char *answer, const json_t *row)
{
    (void)state;
    (void)row;
    double number;
    return answer ? read_reference(answer, &number) : ST_OK;
}

static enum status score_number(const struct reward_input *input, bool found, double got,
                                double *ret_score)
{
    double wanted;
    enum status st = read_reference(input->answer, &wanted);
    if (st != ST_OK) return st;
    *ret_score = found && number_same(got, wanted);
    return ST_OK;
}

static enum status score_numeric(void *state, const struct reward_input *input, double *ret_score)
{
    (void)state;
    double got = 0;
    bool found = number_last(input->text, &got);
    return score_number(input, found, got, ret_score);
}

static enum status score_gsm8k(void *state, const struct reward_input *input, double *ret_score)
{
    (void)state;
    double got = 0;
    bool found = number_answer(input->text, &got);
    return score_number(input, found, got, ret_score);
}

static enum status open_length(const struct reward_options *options, const char *argument,
                               void **ret_state)
{
    (void)argument;
    if (!(options->length_target > 0))
        return status_fail(ST_INVALID, "--length-target %g must be above 0",
                           options->length_target);
    double *target = malloc(sizeof *target);
    if (!target) return status_fail(ST_NO_MEMORY, "no memory for rewards");
    *target = options->length_target;
    *ret_state = target;
    return ST_OK;
}

static enum status score_length(void *state, const struct reward_input *input, double *ret_score)
{
    double chars = 0, target = *(double *)state;
    for (const char *s = input->text; *s; s++) chars += (*s & 0xC0) != 0x80; // UTF-8 lead bytes
    *ret_score = -fabs(chars - target) / target;
    return ST_OK;
}

static enum status score_constant(void *state, const struct reward_input *input, double *ret_score)
{
    (void)state;
    (void)input;
    *ret_score = 1;
    return ST_OK;
}

static enum status open_environment(const struct reward_options *options, const char *argument,
                                    void **ret_state)
{
    (void)argument;
    (void)ret_state;
    if (options->environment) return ST_OK;
    return status_fail(ST_INVALID, "reward \"environment\" is what an environment gave, and none "
                                   "makes samples here: cw-trainer train --rollouts names one");
}

static enum status score_environment(void *state, const struct reward_input *input,
                                     double *ret_score)
{
    (void)state;
    *ret_score = input->environment;
    return ST_OK;
}

const struct scorer scorer_exact = {
    .name = "exact",
    .binary = true,
    .needs_answer = true,
    .help = "1 where the text is the answer, blanks around it aside",
    .score = score_exact,
};
const struct scorer scorer_numeric = {
    .name = "numeric",
    .binary = true,
    .needs_answer = true,
    .help = "1 where the last number of the text is the answer",
    .check_row = check_reference,
    .score = score_numeric,
};
const struct scorer scorer_gsm8k = {
    .name = "gsm8k",
    .binary = true,
    .needs_answer = true,
    .help = "1 where the number after \"####\", \"the answer is\", in \\boxed{}, or else the last "
            "one is the answer",
    .prompt_template =
        "{prompt} Let's think step by step and output the final answer after \"####\".",
    .check_row = check_reference,
    .score = score_gsm8k,
};
const struct scorer scorer_length = {
    .name = "length",
    .help = "-|characters - target| / target (--length-target)",
    .open = open_length,
    .close = free,
    .score = score_length,
};
const struct scorer scorer_constant = {
    .name = "constant",
    .help = "1 for everything: no signal, for measurements",
    .score = score_constant,
};
const struct scorer scorer_environment = {
    .name = "environment",
    .help = "what the environment of --rollouts gave, and the default with it",
    .open = open_environment,
    .score = score_environment,
};
