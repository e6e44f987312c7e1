/* progress.c: the progress line, the rules of divergence, and a record of the best evaluation. The
 * rules are coarse on purpose: what they find no healthy run shows. A standing fault is said after
 * DIVERGENCE_STEPS steps and then ten times as rarely each time; a passing one again after
 * DIVERGENCE_STEPS steps at the earliest. The trainer's thread.
 */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/runlog.h"
#include "common/base/json.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#define NORM_JUMP       100.0 // times the mean of late
#define NORM_WEIGHT     0.9   // of that mean, beside a new norm
#define NORMS_NEEDED    5
#define KL_FAR          1.0 // nats a token; runs that go well stay below a tenth
#define ENTROPY_UNIFORM 0.9 // of the most there can be
#define ENTROPY_SOUND   0.7 // what it was at first, for that to be a change
#define ENTROPY_RISE    1.0 // nats above what it was at first
#define ENTROPY_FALL    0.5 // behind such a rise, of what it was at first

// ---- the line -----------------------------------------------------------------------------------

const char *duration_text(double seconds, char ret[DURATION_ROOM])
{
    long s = (long)(seconds + 0.5);
    if (s >= 3600)
        snprintf(ret, DURATION_ROOM, "%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
    else
        snprintf(ret, DURATION_ROOM, "%ld:%02ld", s / 60, s % 60);
    return ret;
}

// What matters most comes first: a terminal cuts the line at its width.
void progress_line(const struct progress *p, int64_t total_steps, double seconds_left,
                   struct bytes *ret)
{
    char left[DURATION_ROOM];
    bytes_printf(ret, "step %" PRId64 "/%" PRId64 "  %s left", p->step, total_steps,
                 duration_text(seconds_left, left));
    if (isfinite(p->reward)) bytes_printf(ret, "  reward %.3f", p->reward);
    if (isfinite(p->teacher)) bytes_printf(ret, "  teacher %.4f", p->teacher);
    if (p->accuracy >= 0) bytes_printf(ret, "  accuracy %.1f%%", 100 * p->accuracy);
    if (p->acceptance >= 0) bytes_printf(ret, "  acceptance %.1f%%", 100 * p->acceptance);
    if (isfinite(p->reward)) bytes_printf(ret, "  zero-spread %.1f%%", 100 * p->zero_spread);
    if (isfinite(p->kl)) bytes_printf(ret, "  kl %.4f", p->kl);
    bytes_printf(ret, "  grad norm %.3g", isfinite(p->grad_norm) ? p->grad_norm : 0);
    if (p->clipped >= 0) bytes_printf(ret, "  clipped %.1f%%", 100 * p->clipped);
    bytes_printf(ret, "  cut off %.1f%%  %.0f tokens/s  length %.1f", 100 * p->cut_off,
                 p->tokens_per_s, p->mean_length);
}

// ---- divergence ---------------------------------------------------------------------------------

// Whether a count of steps in a row is one at which to speak: 10, 100, 1000...
static bool is_time(int steps)
{
    int at = DIVERGENCE_STEPS;
    while (at < steps && at <= 100000000) at *= 10;
    return steps == at;
}

// A passing sign: once, and not again for a while.
static bool is_news(const struct divergence *s, bool shows, long *said)
{
    if (!shows || (*said && s->steps < *said)) return false;
    *said = s->steps + DIVERGENCE_STEPS;
    return true;
}

static void look_at_rewards(struct divergence *s, const struct progress *now, struct bytes *ret)
{
    if (!isfinite(now->reward) && isfinite(now->teacher)) return; // which alone is learnt from
    s->flat = now->zero_spread >= 1 ? s->flat + 1 : 0;
    s->flat_steps += s->flat > 0;
    s->wrong = now->accuracy == 0 ? s->wrong + 1 : 0;
    s->still = now->grad_norm == 0 ? s->still + 1 : 0;
    if (is_time(s->flat)) {
        bytes_printf(ret,
                     "in the last %d steps all samples of a prompt had the same reward, or "
                     "none (mean %.3f), in every group: there was nothing to learn from; ",
                     s->flat, now->reward);
        bytes_puts(ret, now->accuracy == 0
                            ? "no sample was right: look at some of them (--log-completions), at "
                              "--reward and at --max-completion-length, or take easier prompts\n"
                        : now->accuracy == 1 ? "all samples were right: take harder prompts\n"
                                             : "look at --reward, --temperature and the prompts\n");
    } else if (is_time(s->wrong)) {
        bytes_printf(ret,
                     "in the last %d steps no sample was right: what is learnt is not the task; "
                     "look at some of them (--log-completions)\n",
                     s->wrong);
    } else if (!s->flat && is_time(s->still)) {
        bytes_printf(
            ret,
            "in the last %d steps the gradient was 0 although rewards differed: all samples were "
            "masked (--mask-truncated-completions, --importance-sampling-mode)\n",
            s->still);
    }
}

void divergence_check(struct divergence *s, const struct progress *now, struct bytes *ret)
{
    if (s->steps++ == 0) s->first_entropy = now->entropy;
    look_at_rewards(s, now, ret);
    const double norm = now->grad_norm;
    if (norm > 0) {
        const bool jumps = s->norms >= NORMS_NEEDED && norm > NORM_JUMP * s->norm_mean;
        if (is_news(s, jumps, &s->said_norm))
            bytes_printf(ret,
                         "the gradient norm is %.3g, %.0f times what it was of late: the run may "
                         "be diverging; lower --learning-rate or go back to a checkpoint\n",
                         norm, norm / s->norm_mean);
        s->norm_mean = s->norms ? NORM_WEIGHT * s->norm_mean + (1 - NORM_WEIGHT) * norm : norm;
        s->norms++;
    }
    if (is_news(s, now->kl > KL_FAR, &s->said_kl))
        bytes_printf(ret,
                     "the KL divergence from the start is %.3g a token: the run may be diverging; "
                     "raise --beta, lower --learning-rate or go back to a checkpoint\n",
                     now->kl);
    bool uniform = now->entropy > ENTROPY_UNIFORM * now->max_entropy &&
                   s->first_entropy < ENTROPY_SOUND * now->max_entropy;
    if (is_news(s, uniform, &s->said_entropy))
        bytes_printf(
            ret,
            "the entropy is %.2f a token of %.2f that are possible (%.2f at first): the policy is "
            "close to noise; go back to a checkpoint and lower --learning-rate\n",
            now->entropy, now->max_entropy, s->first_entropy);
    if (now->entropy > s->peak_entropy) s->peak_entropy = now->entropy;
    bool collapsed = s->peak_entropy > s->first_entropy + ENTROPY_RISE &&
                     now->entropy < ENTROPY_FALL * s->first_entropy;
    if (is_news(s, collapsed, &s->said_collapse))
        bytes_printf(
            ret,
            "the entropy was %.2f a token at first, rose to %.2f and is %.2f: the policy has "
            "collapsed onto few texts; go back to a checkpoint and lower --learning-rate\n",
            s->first_entropy, s->peak_entropy, now->entropy);
}

void divergence_summary(const struct divergence *s, struct bytes *ret)
{
    if (s->steps == 0 || s->flat_steps < s->steps) return;
    bytes_printf(ret,
                 "in none of the %ld steps did the rewards of a prompt's samples differ: nothing "
                 "could be learnt from them",
                 s->steps);
}

// ---- the best evaluation ------------------------------------------------------------------------

bool best_consider(struct best *b, int64_t step, double score)
{
    if (isfinite(score) && (b->step < 0 || score > b->score)) {
        *b = (struct best){.step = step, .score = score};
        return true;
    }
    if (b->step >= 0) b->waited++;
    return false;
}

void best_words(const struct best *b, bool is_best, int64_t step, char ret[BEST_WORDS])
{
    if (is_best || b->step < 0)
        snprintf(ret, BEST_WORDS, "%s", is_best && step > 0 ? ", the best so far" : "");
    else
        snprintf(ret, BEST_WORDS, "; the best was at step %" PRId64, b->step);
}

json_t *best_to_json(const struct best *b)
{
    if (b->step < 0) return json_null();
    return json_pack("{s:I, s:f, s:I}", "step", (json_int_t)b->step, "score", b->score, "waited",
                     (json_int_t)b->waited);
}

enum status best_from_json(const char *where, const json_t *json, struct best *ret)
{
    struct best b = BEST_NONE;
    double score = NAN;
    enum status st;
    if (!json || json_is_null(json)) {
        *ret = b;
        return ST_OK;
    }
    if (!json_is_object(json))
        return status_fail(ST_FORMAT, "%s: field \"best\" is not an object", where);
    CHECK(json_get_int(where, json, "step", 0, INT64_MAX, &b.step));
    CHECK(json_get_double(where, json, "score", -DBL_MAX, DBL_MAX, &score));
    CHECK(json_get_int(where, json, "waited", 0, INT64_MAX, &b.waited));
    if (b.step < 0 || isnan(score))
        FAIL(ST_FORMAT, "%s: field \"best\" has no \"step\" or no \"score\"", where);
    b.score = score;
    *ret = b;
out:
    return st;
}
