/* reward.c: the list of weighted terms that --reward asks for, each by a row of the table of
 * scorers (reward_scorers.c). Owns the scorers' states. The thread that scores. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/reward/reward.h"
#include "trainer/reward/reward_scorer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct term {
    const struct scorer *scorer;
    void *state;
};

struct reward {
    struct reward_options options;
    struct reward_info info;
    struct term terms[REWARD_MAX_TERMS]; // (info.n)
};

void reward_describe_all(struct bytes *ret)
{
    for (int i = 0; scorers[i]; i++)
        bytes_printf(ret, "\n  %-12s  %s", scorers[i]->name, scorers[i]->help);
}

// ---- the list of terms --------------------------------------------------------------------------

// The scorer of an entry, NAME or NAME:ARGUMENT, of so many characters.
static enum status find_scorer(const char *entry, size_t len, const struct scorer **ret)
{
    const size_t n = strcspn(entry, ",:");
    struct bytes known = BYTES_INIT;
    enum status st = ST_OK;
    for (int i = 0; scorers[i]; i++) {
        const struct scorer *s = scorers[i];
        if (strlen(s->name) == n && memcmp(s->name, entry, n) == 0 &&
            s->takes_argument == (entry[n] == ':')) {
            *ret = s;
            goto out;
        }
        bytes_printf(&known, "%s%s%s", i ? ", " : "", s->name, s->takes_argument ? ":..." : "");
    }
    FAIL(ST_INVALID, "reward \"%.*s\" is not one of %s", (int)len, entry, bytes_text(&known));
out:
    bytes_release(&known);
    return st;
}

// Length of "command:PROGRAM ARGS" at s: to the next ",command:" that does not stand in quotes.
static size_t command_length(const char *s)
{
    char quote = 0;
    size_t i = 0;
    for (; s[i]; i++) {
        if (quote ? s[i] == quote : s[i] == '\'' || s[i] == '"')
            quote = quote ? 0 : s[i];
        else if (s[i] == '\\' && quote != '\'' && s[i + 1])
            i++;
        else if (!quote && strncmp(s + i, ",command:", strlen(",command:")) == 0)
            break;
    }
    return i;
}

// The last of them: no two are alike.
static void name_term(struct reward_info *info, const char *name)
{
    char *ret = info->terms[info->n].name;
    const size_t size = sizeof info->terms[0].name;
    snprintf(ret, size, "%.50s", name);
    for (int i = 0, number = 2; i < info->n; i++)
        if (strcmp(info->terms[i].name, ret) == 0) {
            snprintf(ret, size, "%.50s_%d", name, number++);
            i = -1; // that one may be there too
        }
}

// One entry of the list, at s; ret_len: its length.
static enum status parse_term(struct reward *r, const char *s, size_t *ret_len)
{
    size_t len = strcspn(s, ",");
    const struct scorer *scorer = NULL;
    enum status st = find_scorer(s, len, &scorer);
    if (st != ST_OK) return st;
    if (r->info.n == REWARD_MAX_TERMS)
        return status_fail(ST_INVALID, "--reward names more than %d terms", REWARD_MAX_TERMS);
    if (scorer == &scorer_command) len = command_length(s);
    char *argument = NULL;
    if (scorer->takes_argument) {
        const size_t name_len = strlen(scorer->name) + 1;
        argument = strndup(s + name_len, len - name_len);
        if (!argument) return status_fail(ST_NO_MEMORY, "no memory for rewards");
    }
    struct reward_info *info = &r->info;
    struct term *term = &r->terms[info->n];
    *term = (struct term){scorer, &r->options};
    if (scorer->check_options) st = scorer->check_options(&r->options);
    if (scorer->open) st = scorer->open(&r->options, argument, &term->state);
    free(argument);
    if (st != ST_OK) return st;
    name_term(info, scorer->label ? scorer->label(term->state) : scorer->name);
    info->terms[info->n].weight = 1;
    info->needs_answer |= scorer->needs_answer;
    if (scorer->binary && info->accuracy_term < 0) info->accuracy_term = info->n;
    if (!info->prompt_template) info->prompt_template = scorer->prompt_template;
    info->n++;
    *ret_len = len;
    return ST_OK;
}

static enum status parse_weights(struct reward *r, const char *weights)
{
    int n = 0;
    for (const char *s = weights; s && *s; n++) {
        char *end;
        double weight = strtod(s, &end);
        if (end == s || (*end && *end != ',') || !isfinite(weight))
            return status_fail(ST_INVALID, "--reward-weights %s: \"%s\" is not a number", weights,
                               s);
        if (n < r->info.n) r->info.terms[n].weight = weight;
        s = *end ? end + 1 : end;
    }
    if (n && n != r->info.n)
        return status_fail(ST_INVALID,
                           "--reward-weights %s: %d for %d terms of --reward; give each its own",
                           weights, n, r->info.n);
    return ST_OK;
}

enum status reward_new(const struct reward_options *options, struct reward **ret)
{
    enum status st = ST_OK;
    size_t len = 0;
    struct reward *r = calloc(1, sizeof *r);
    if (!r) return status_fail(ST_NO_MEMORY, "no memory for rewards");
    r->options = *options;
    r->info.accuracy_term = -1;
    for (const char *s = options->none ? NULL : options->names; s; s = s[len] ? s + len + 1 : NULL)
        CHECK(parse_term(r, s, &len));
    CHECK(parse_weights(r, options->weights));
    *ret = r;
out:
    if (st != ST_OK) reward_free(r);
    return st;
}

void reward_free(struct reward *r)
{
    if (!r) return;
    for (int i = 0; i < r->info.n; i++)
        if (r->terms[i].scorer->close) r->terms[i].scorer->close(r->terms[i].state);
    free(r);
}

const struct reward_info *reward_info(const struct reward *r)
{
    return &r->info;
}

static enum status check_answer(const struct scorer *scorer, const char *answer)
{
    if (!answer || !scorer->reads || scorer->reads(answer)) return ST_OK;
    return status_fail(ST_FORMAT, "the data set's answer \"%s\" %s", CUT(answer, 80),
                       scorer->unread);
}

enum status reward_check_row(struct reward *r, const char *answer, const json_t *row)
{
    enum status st = ST_OK;
    for (int i = 0; st == ST_OK && i < r->info.n; i++) {
        const struct term *t = &r->terms[i];
        st = check_answer(t->scorer, answer);
        if (st == ST_OK && t->scorer->check_row) st = t->scorer->check_row(t->state, row);
    }
    return st;
}

enum status reward_check(struct reward *r)
{
    for (int i = 0; i < r->info.n; i++) {
        const struct term *t = &r->terms[i];
        enum status st = t->scorer->check ? t->scorer->check(t->state) : ST_OK;
        if (st != ST_OK) return status_context(st, "reward %s", r->info.terms[i].name);
    }
    return ST_OK;
}

static enum status score_term(const struct term *t, const struct reward_input *inputs, int n,
                              double *ret_scores, int *ret_failed)
{
    enum status st = ST_OK;
    if (t->scorer->score_all)
        st = t->scorer->score_all(t->state, inputs, n, ret_scores, ret_failed);
    for (int i = 0; !t->scorer->score_all && st == ST_OK && i < n; i++) {
        *ret_failed = i;
        if (i == 0 || inputs[i].answer != inputs[i - 1].answer)
            st = check_answer(t->scorer, inputs[i].answer);
        if (st == ST_OK && t->scorer->score)
            st = t->scorer->score(t->state, &inputs[i], &ret_scores[i]);
        else if (st == ST_OK)
            ret_scores[i] = t->scorer->value(&inputs[i]);
    }
    return st;
}

enum status reward_score_all(struct reward *r, const struct reward_input *inputs, int n,
                             double *ret_terms, double *ret_sums, int *ret_failed)
{
    for (int k = 0; k < r->info.n; k++) {
        enum status st =
            score_term(&r->terms[k], inputs, n, ret_terms + (size_t)k * (size_t)n, ret_failed);
        if (st != ST_OK) return status_context(st, "reward %s", r->info.terms[k].name);
    }
    for (int i = 0; i < n; i++) {
        double sum = 0;
        int applied = 0;
        for (int k = 0; k < r->info.n; k++) {
            const double term = ret_terms[(size_t)k * (size_t)n + (size_t)i];
            if (isnan(term)) continue;
            sum += r->info.terms[k].weight * term;
            applied++;
        }
        ret_sums[i] = applied ? sum : NAN;
    }
    return ST_OK;
}
