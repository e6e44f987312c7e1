/* divergence.c: the rules behind divergence.h. They are coarse on purpose: what they find no
 * healthy run shows. A standing fault is said after DIVERGENCE_STEPS steps and then ten times as
 * rarely each time; a passing one again after DIVERGENCE_STEPS steps at the earliest.
 */
#include "trainer/run/divergence.h"

#include <math.h>

#define NORM_JUMP       100.0 // times the mean of late
#define NORM_WEIGHT     0.9   // of that mean, beside a new norm
#define NORMS_NEEDED    5
#define KL_FAR          1.0 // nats a token; runs that go well stay below a tenth
#define ENTROPY_UNIFORM 0.9 // of the most there can be
#define ENTROPY_SOUND   0.7 // what it was at first, for that to be a change
#define ENTROPY_RISE    1.0 // nats above what it was at first
#define ENTROPY_FALL    0.5 // behind such a rise, of what it was at first

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
    s->flat = now->zero_spread >= 1 ? s->flat + 1 : 0;
    s->flat_steps += s->flat > 0;
    s->wrong = now->accuracy == 0 ? s->wrong + 1 : 0;
    s->still = now->grad_norm == 0 ? s->still + 1 : 0;
    if (is_time(s->flat)) {
        bytes_printf(
            ret,
            "in the last %d steps all samples of a prompt had the same reward (mean %.3f), "
            "in every group: there was nothing to learn from; ",
            s->flat, now->reward);
        bytes_puts(ret, now->accuracy == 0   ? "no sample was right: look at some of them "
                                               "(--log-completions), at --reward and at "
                                               "--max-completion-length, or take easier prompts\n"
                        : now->accuracy == 1 ? "all samples were right: take harder prompts\n"
                                             : "look at --reward, --temperature and the prompts\n");
    } else if (is_time(s->wrong)) {
        bytes_printf(
            ret,
            "in the last %d steps no sample was right: what is learnt is not the task; look "
            "at some of them (--log-completions)\n",
            s->wrong);
    } else if (!s->flat && is_time(s->still)) {
        bytes_printf(
            ret,
            "in the last %d steps the gradient was 0 although rewards differed: all samples "
            "were masked (--mask-truncated-completions, --importance-sampling-mode)\n",
            s->still);
    }
}

static void look_at_norm(struct divergence *s, double norm, struct bytes *ret)
{
    if (!(norm > 0)) return;
    bool jumps = s->norms >= NORMS_NEEDED && norm > NORM_JUMP * s->norm_mean;
    if (is_news(s, jumps, &s->said_norm))
        bytes_printf(ret,
                     "the gradient norm is %.3g, %.0f times what it was of late: the run may be "
                     "diverging; lower --learning-rate or go back to a checkpoint\n",
                     norm, norm / s->norm_mean);
    s->norm_mean = s->norms ? NORM_WEIGHT * s->norm_mean + (1 - NORM_WEIGHT) * norm : norm;
    s->norms++;
}

void divergence_check(struct divergence *s, const struct progress *now, struct bytes *ret)
{
    if (s->steps++ == 0) s->first_entropy = now->entropy;
    look_at_rewards(s, now, ret);
    look_at_norm(s, now->grad_norm, ret);
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
            "the entropy is %.2f a token of %.2f that are possible (%.2f at first): the "
            "policy is close to noise; go back to a checkpoint and lower --learning-rate\n",
            now->entropy, now->max_entropy, s->first_entropy);
    if (now->entropy > s->most_entropy) s->most_entropy = now->entropy;
    bool collapsed = s->most_entropy > s->first_entropy + ENTROPY_RISE &&
                     now->entropy < ENTROPY_FALL * s->first_entropy;
    if (is_news(s, collapsed, &s->said_collapse))
        bytes_printf(ret,
                     "the entropy was %.2f a token at first, rose to %.2f and is %.2f: the policy "
                     "has collapsed onto few texts; go back to a checkpoint and lower "
                     "--learning-rate\n",
                     s->first_entropy, s->most_entropy, now->entropy);
}

void divergence_summary(const struct divergence *s, struct bytes *ret)
{
    if (s->steps == 0 || s->flat_steps < s->steps) return;
    bytes_printf(ret,
                 "in none of the %ld steps did the rewards of a prompt's samples differ: nothing "
                 "could be learnt from them",
                 s->steps);
}
