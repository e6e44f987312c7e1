/* speculative.c: decides how much is drafted, from three things that it measures. The engine's
 * thread.
 *
 * What rows cost: ms[rows] of steps and of the draft model's passes (step_cost.h).
 *
 * What drafts bring: acceptance rates, by method and depth. The depth of a draft is the number of
 * tokens that speak for it: those of the context that were matched, and the drafts before it. A
 * deterministic draft is compared with what was sampled whether it was verified or not.
 *
 * The plan of a step is the argmax of expected tokens per millisecond over how probable a draft
 * must be. A draft is accepted with the product of the rates up to its depth, its reach, which
 * falls from one draft of a sample to the next: so each threshold is a length for every sample, and
 * all samples' drafts stand in one order.
 *
 * What it came to: every step, each method is charged what looking, drafting and verifying took,
 * and credited the plain steps that its accepted tokens saved; backoff.h says what follows. What
 * the draft model computes of samples' pasts is amortised over the steps that come. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/speculative/speculative.h"
#include "common/base/hash.h"
#include "common/base/clock.h"
#include "infer-server/speculative/backoff.h"
#include "infer-server/speculative/step_cost.h"
#include <stdlib.h>
#include <string.h>

#define DEPTHS       SPECULATIVE_MAX // the deepest have no more to tell them apart
#define KEPT         0.996 // of the acceptance counts, a step: policies and texts change in hundreds
#define PRIOR        2.0   // drafts that the rate of the depth before counts for: soon outweighed
#define KNOWN        8.0   // drafts, from which on a draft model's rate is more than a guess
#define TEST_SAMPLES 4     // that it drafts for until then: their past has to be computed
#define MIN_GAIN     1.05  // expected over a plain step, as costs and rates are estimates
#define MARGIN       0.025 // of that to be there afterwards: plain steps alone find warmer caches
#define PLAIN_EVERY  128   // verifying steps: one plain, to know its price; costs half a percent
#define BANDS        64    // of reach; steps finer than a rate is known
#define AMORTISE     64    // steps: about as many as are drafted for behind a prompt
#define LEARN_TIMED  16    // tokens learned, one of which is timed: the clock costs as much

struct method_state {
    void *memory;
    struct backoff backoff;
    double tried[DEPTHS], accepted[DEPTHS]; // drafts, of late
    double rate[DEPTHS];                    // acceptance, in the present step
    int asked, rows, saved, learned; // in it: samples; drafts verified; tokens they brought; tokens
    struct step_cost learning;       // of a token
};

struct speculative {
    bool fixed;
    int max_rows;
    // Of a step, by rows; of the draft model's passes, by rows, and of its prompts', by tokens; of
    // looking for drafts, by samples and methods that are asked.
    struct step_cost cost, passes, prompts, looks;
    struct method_state by[SPECULATIVE_METHODS];
    unsigned n_verifying; // plans with drafts in them
    int n_testing;        // samples that a draft model is tested on in this step
    double owed_ms;       // for the draft model's prompts, to be amortised
};

// ---- life --------------------------------------------------------------------------------------

// A depth that was little tried is taken to be like the one before it.
static void set_rates(struct method_state *by, double guess)
{
    for (int d = 0; d < DEPTHS; d++) {
        by->rate[d] = guess = (by->accepted[d] + PRIOR * guess) / (by->tried[d] + PRIOR);
        by->tried[d] *= KEPT;
        by->accepted[d] *= KEPT;
    }
}

enum status speculative_new(bool fixed, int max_rows, struct speculative **ret)
{
    enum status st = ST_OK;
    struct speculative *s = calloc(1, sizeof *s);
    if (!s) return status_fail(ST_NO_MEMORY, "no memory for speculative decoding");
    s->fixed = fixed;
    s->max_rows = max_rows;
    for (int m = 0; m < SPECULATIVE_METHODS; m++) {
        set_rates(&s->by[m], draft_methods[m]->guess);
        if (draft_methods[m]->new_memory) CHECK(draft_methods[m]->new_memory(&s->by[m].memory));
    }
    *ret = s;
    return ST_OK;
out:
    speculative_free(s);
    return st;
}

void speculative_free(struct speculative *s)
{
    if (!s) return;
    for (int m = 0; m < SPECULATIVE_METHODS; m++)
        if (draft_methods[m]->free_memory) draft_methods[m]->free_memory(s->by[m].memory);
    free(s);
}

uint64_t speculative_prompt_key(const int32_t *prompt, int n)
{
    uint64_t h = HASH_FNV_START; // FNV-1a over whole tokens, with a shift to spread high bits
    for (int i = 0; i < n; i++) {
        h = (h ^ (uint32_t)prompt[i]) * HASH_FNV_PRIME;
        h ^= h >> 29;
    }
    return h;
}

// ---- acceptance --------------------------------------------------------------------------------

static int depth_of(const struct draft *draft, int i)
{
    return draft->matched + i < DEPTHS ? draft->matched + i : DEPTHS - 1;
}

// That draft i is accepted, where those before it are with probability `reach`.
static double next_reach(const struct speculative *s, const struct draft *draft, int i,
                         double reach)
{
    return reach * s->by[draft->method].rate[depth_of(draft, i)];
}

static double expected_tokens(const struct speculative *s, const struct draft *draft)
{
    double reach = 1, sum = 0;
    for (int i = 0; i < draft->n; i++) sum += reach = next_reach(s, draft, i, reach);
    return sum;
}

void speculative_verified(struct speculative *s, const struct draft *draft, int n_verified,
                          int n_accepted, int n_saved)
{
    struct method_state *by = &s->by[draft->method];
    if (s->fixed || (n_verified == 0 && !draft_methods[draft->method]->propose)) return;
    // Drafts behind the first that was refused say nothing.
    const int trials = n_verified == 0 ? 1 : n_accepted < n_verified ? n_accepted + 1 : n_verified;
    for (int i = 0; i < trials; i++) {
        by->tried[depth_of(draft, i)]++;
        by->accepted[depth_of(draft, i)] += i < n_accepted;
    }
    by->rows += n_verified;
    by->saved += n_saved;
}

// ---- proposals ---------------------------------------------------------------------------------

static bool rests(const struct speculative *s, int m)
{
    return !s->fixed && backoff_waits(&s->by[m].backoff);
}

// A method that drafts with a model, whose acceptance rate is not known.
static bool untested(const struct speculative *s, int m)
{
    return !s->fixed && !draft_methods[m]->propose && s->by[m].tried[0] < KNOWN;
}

bool speculative_wants_drafts(const struct speculative *s, struct speculative_choice choice)
{
    for (int m = 0; m < SPECULATIVE_METHODS; m++)
        if (choice.k[m] && !rests(s, m)) return true;
    return false;
}

void speculative_propose(struct speculative *s, struct speculative_choice choice,
                         const struct history *history, int room, struct draft *draft)
{
    double best = 0;
    draft->n = draft->n_verify = 0;
    for (int m = 0; m < SPECULATIVE_METHODS; m++) {
        const int max = choice.k[m] < room ? choice.k[m] : room;
        if (max < 1 || rests(s, m) || (untested(s, m) && s->n_testing >= TEST_SAMPLES)) continue;
        struct draft other = {.method = (enum speculative_method)m, .n = max};
        s->by[m].asked++;
        if (draft_methods[m]->propose) {
            other.n = 0;
            draft_methods[m]->propose(s->by[m].memory, history, max, &other);
        }
        const double expected = expected_tokens(s, &other);
        if (expected <= best) continue;
        best = expected;
        *draft = other;
    }
    s->n_testing += draft->n > 0 && untested(s, (int)draft->method);
}

void speculative_learn(struct speculative *s, struct speculative_choice choice,
                       const struct history *history)
{
    for (int m = 0; m < SPECULATIVE_METHODS; m++) {
        if (!choice.k[m] || !draft_methods[m]->learn || rests(s, m)) continue;
        const bool timed = s->by[m].learned++ % LEARN_TIMED == 0;
        const int64_t start_ns = timed ? clock_now_ns() : 0;
        draft_methods[m]->learn(s->by[m].memory, history);
        if (timed) step_cost_learn(&s->by[m].learning, 1, 0, clock_ms_since(start_ns));
    }
}

// ---- the plan ----------------------------------------------------------------------------------

struct band { // drafts of like reach
    int rows;
    double tokens;               // expected of them
    int passes[SPECULATIVE_MAX]; // rows of the draft model's passes, by depth
    int caught_up;               // tokens that it would have to catch up on
};

static int band_of(double reach)
{
    return (int)(reach * (BANDS - 1));
}

static void add_to_bands(const struct speculative *s, const struct draft *draft, struct band *bands)
{
    double reach = 1;
    for (int i = 0; i < draft->n; i++) {
        reach = next_reach(s, draft, i, reach);
        struct band *b = &bands[band_of(reach)];
        b->rows++;
        b->tokens += reach;
        if (draft_methods[draft->method]->propose) continue;
        const int lag = i == 0 ? draft->lag : 0;
        b->passes[i] += lag <= DRAFT_RIDES ? 1 + lag : 1;
        b->caught_up += lag > DRAFT_RIDES ? lag : 0;
    }
}

static void add_band(struct band *sum, const struct band *b)
{
    sum->rows += b->rows;
    sum->tokens += b->tokens;
    sum->caught_up += b->caught_up;
    for (int i = 0; i < SPECULATIVE_MAX; i++) sum->passes[i] += b->passes[i];
}

static double band_ms(const struct speculative *s, const struct band *b, int n_seqs, double context)
{
    const int rows = n_seqs + b->rows;
    double ms = step_cost_ms(&s->cost, rows, (int64_t)(rows * context));
    if (b->caught_up > 0) ms += step_cost_ms(&s->prompts, b->caught_up, 0) / AMORTISE;
    for (int i = 0; i < SPECULATIVE_MAX && b->passes[i] > 0; i++)
        ms += step_cost_ms(&s->passes, b->passes[i], (int64_t)(b->passes[i] * context));
    return ms;
}

// The band from which on drafts are verified; BANDS: none are.
static int lowest_band(const struct speculative *s, struct draft *const *drafts, int n, int n_seqs,
                       int64_t attended)
{
    struct band bands[BANDS] = {0}, sum = {0};
    const double context = n_seqs > 0 ? (double)attended / n_seqs : 0;
    const double plain_ms = band_ms(s, &sum, n_seqs, context);
    int best = BANDS;
    if (plain_ms <= 0) return BANDS; // a plain step first
    double most = MIN_GAIN * n_seqs / plain_ms;
    for (int i = 0; i < n; i++) add_to_bands(s, drafts[i], bands);
    for (int l = BANDS - 1; l >= 0 && sum.rows + bands[l].rows <= s->max_rows; l--) {
        if (bands[l].rows == 0) continue;
        add_band(&sum, &bands[l]);
        const double rate = (n_seqs + sum.tokens) / band_ms(s, &sum, n_seqs, context);
        if (rate <= most) continue;
        most = rate;
        best = l;
    }
    return best;
}

void speculative_plan(struct speculative *s, struct draft *const *drafts, int n, int n_seqs,
                      int64_t attended)
{
    const bool all = s->fixed || s->n_testing > 0;
    int min = all ? 0 : lowest_band(s, drafts, n, n_seqs, attended), rows = s->max_rows;
    if (!all && min < BANDS && ++s->n_verifying % PLAIN_EVERY == 0) min = BANDS;
    for (int i = 0; i < n; i++) {
        struct draft *draft = drafts[i];
        double reach = 1;
        draft->n_verify = 0;
        if (s->n_testing > 0 && !untested(s, (int)draft->method)) continue;
        while (rows > 0 && draft->n_verify < draft->n &&
               band_of(reach = next_reach(s, draft, draft->n_verify, reach)) >= min) {
            draft->n_verify++;
            rows--;
        }
    }
}

// ---- what it came to ---------------------------------------------------------------------------

static int64_t attended_by_rows(const struct step_report *r)
{
    return r->n_seqs > 0 ? r->attended * r->n_rows / r->n_seqs : 0;
}

// What a method gained in a step over a plain one: the steps that its tokens saved, less everything
// that was done for it. All at the tables' prices, which a busy machine's outliers hardly move.
// all: of all methods.
static double gain_of(const struct speculative *s, const struct method_state *by,
                      const struct step_report *r, const struct method_state *all)
{
    const double plain_ms = step_cost_ms(&s->cost, r->n_seqs, r->attended);
    const double rows_ms = step_cost_ms(&s->cost, r->n_rows, attended_by_rows(r)) - plain_ms;
    double gain = plain_ms * by->saved / r->n_seqs;
    gain -= step_cost_ms(&by->learning, 1, 0) * by->learned;
    gain -= step_cost_ms(&s->looks, all->asked, 0) * by->asked / all->asked;
    if (by->rows > 0) gain -= (rows_ms + MARGIN * plain_ms) * by->rows / all->rows;
    return gain;
}

static void charge(struct speculative *s, int m, const struct step_report *r, double ms,
                   const struct method_state *all)
{
    struct method_state *by = &s->by[m];
    const bool model = !draft_methods[m]->propose;
    if (rests(s, m)) {
        backoff_wait(&by->backoff, ms);
    } else if (by->asked > 0 && r->warm) {
        const double paid = model ? s->owed_ms / AMORTISE : 0;
        const double gain = gain_of(s, by, r, all) - paid - (model ? r->draft_ms : 0);
        backoff_use(&by->backoff, gain, ms);
        s->owed_ms -= paid;
    }
    if (!model || !rests(s, m)) return;
    backoff_lost(&by->backoff, s->owed_ms);
    s->owed_ms = 0;
}

static void begin_step(struct speculative *s)
{
    for (int m = 0; m < SPECULATIVE_METHODS; m++) {
        struct method_state *by = &s->by[m];
        set_rates(by, draft_methods[m]->guess);
        by->asked = by->rows = by->saved = by->learned = 0;
    }
    s->n_testing = 0;
}

void speculative_step_over(struct speculative *s, const struct step_report *r)
{
    const double ms = r->look_ms + r->draft_ms + r->catch_up_ms + r->step_ms;
    struct method_state all = {0};
    if (s->fixed) return;
    if (r->n_caught_up > 0) speculative_prompts_took(s, r->n_caught_up, r->catch_up_ms);
    if (r->warm && r->decodes)
        step_cost_learn(&s->cost, r->n_rows, attended_by_rows(r), r->step_ms);
    for (int m = 0; m < SPECULATIVE_METHODS; m++) {
        all.asked += s->by[m].asked;
        all.rows += s->by[m].rows;
    }
    if (all.asked > 0) step_cost_learn(&s->looks, all.asked, 0, r->look_ms);
    for (int m = 0; m < SPECULATIVE_METHODS; m++) charge(s, m, r, ms, &all);
    begin_step(s);
}

void speculative_stepped(struct speculative *s, double ms)
{
    for (int m = 0; m < SPECULATIVE_METHODS; m++)
        if (rests(s, m)) backoff_wait(&s->by[m].backoff, ms);
    if (!s->fixed) begin_step(s);
}

void speculative_prompts_took(struct speculative *s, int n_tokens, double ms)
{
    if (ms > 0) step_cost_learn(&s->prompts, n_tokens, 0, ms);
    s->owed_ms += step_cost_ms(&s->prompts, n_tokens, 0);
}

bool speculative_model_pays(const struct speculative *s, enum speculative_method method)
{
    const struct method_state *by = &s->by[method];
    return s->fixed || (backoff_on(&by->backoff) && !backoff_waits(&by->backoff));
}

struct step_cost *speculative_step_cost(struct speculative *s)
{
    return &s->cost;
}
struct step_cost *speculative_pass_cost(struct speculative *s)
{
    return &s->passes;
}
