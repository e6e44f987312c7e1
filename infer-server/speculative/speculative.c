/* speculative.c: owns the drafters' memory, the averages of acceptance and the cost of steps;
 * decides how much is drafted. The engine's thread.
 *
 * The plan is greedy over single drafts: the j-th draft of a sample whose drafts are accepted with
 * chance p yields p^j tokens, so the most promising next draft of the batch is the one with the
 * largest p^j. Drafts are added in that order, and the number of them with the most expected tokens
 * per millisecond is taken; it is compared with a plain step's. The first draft of a draft model at
 * some depth costs a pass of that model, the next ones at that depth make it a little wider. Those
 * that look best are partly those that were overrated, so what is expected is scaled by what such
 * expectations came to lately.
 *
 * Whether it pays in the end is a matter of accounts, not of plans. An account earns a small share
 * of the time that steps take, to spend on mistakes: what looking for drafts, drawing and verifying
 * them cost is charged, and the plain steps are credited that accepted drafts saved. Where it is
 * overdrawn it closes until it has earned that back (nothing is proposed or remembered meanwhile),
 * so that nothing can cost more than the share. All goes through one account, the keeping of the
 * suffix memory included; what has to do with the draft model through one of its own as well. What
 * is done only in order to know more has a third: verifying a few drafts though it does not seem to
 * pay, and a plain step between those that verify. What the draft model computes of a sample's past
 * is an investment: it is charged bit by bit while its drafts bring something in. */
#include "infer-server/speculative/speculative.h"
#include "common/base/hash.h"
#include "common/base/clock.h"
#include "infer-server/speculative/step_cost.h"
#include "infer-server/speculative/suffix_memory.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MEMORY_BYTES  ((size_t)64 << 20)
#define NGRAM_MOST    4
#define NGRAM_REACH   8192   // tokens looked back
#define FIRST_GUESS   0.5    // acceptance before anything was measured
#define MODEL_GUESS   0.8    // of a draft model, which is there for it
#define TESTS         32     // drafts of it that are judged before it is believed
#define TEST_SAMPLES  4      // that it may draft for until then
#define MODEL_STALE   2000   // steps without any of its drafts, after which it is tested anew
#define WEIGHT_SAMPLE 0.1    // of a new measurement in a sample's average
#define WEIGHT_ALL    0.01   // in that of its method, where new samples start, and of a match
#define LEAST_CHANCE  0.05   // a draft less likely than this is not worth its row
#define LEAST_GAIN    1.06   // expected, of verifying over a plain step: costs are only estimates
#define MODEL_UNUSED  64     // steps
#define INVEST_OVER   32     // steps over which the computing of a sample's past is charged
#define INVEST_SHARE  0.02   // of the time, that may be owed for it
#define LOSS_SHARE    0.005  // of the time, that an account earns
#define TRY_SHARE     0.0025 // and that for what is done to know more
#define TIME_KEPT     0.998  // of the time, at each step
#define LOOK_WEIGHT   0.1    // of a new measurement
#define PROMPT_WEIGHT 0.1    // likewise
#define PROMPT_OFF    1.0    // that it may be above what was expected
#define TIME_LEARNING 16     // tokens, one of which is timed
#define MOST_DRAFTING 512    // samples of one plan
#define TRUST_KEPT    0.98   // of the sums below, at each step that verifies
#define TRUST_PRIOR   4.0    // tokens

struct average {
    double value;
    int n; // of measurements, FIRST_GUESS being one
};

struct speculative {
    bool fixed;
    int max_rows;
    struct suffix_memory *memory;
    struct step_cost cost, passes;                  // of steps; of the draft model's passes
    double prompt_ms, prompt_token_ms;              // of the draft model: of a pass, of a token
    struct average acceptance[SPECULATIVE_METHODS]; // by method
    struct average by_match[SPECULATIVE_METHODS][SUFFIX_DEPTH + 1];
    double prompt_level;      // what those take of late, over what was measured
    bool exploring;           // the last plan was not what promised most
    double gain;              // that it promised over a plain step
    int model_unused;         // steps since the draft model was in one, because it pays
    int tests;                // drafts of it yet to be judged before it is believed
    int offered;              // samples that it was proposed for in this step
    int untested;             // steps without any of its drafts
    double look_ms;           // of looking for drafts
    unsigned n_learned;       // tokens
    double learning_ms;       // since the accounts were last settled
    double total_ms;          // of late, by all steps
    double all, model, tries; // the accounts, in milliseconds
    double owed_ms;           // by that of the model
    double expected, saved;   // tokens that verified drafts were to bring and brought, of late
};

// ---- choices -----------------------------------------------------------------------------------

static const struct {
    const char *name;
    int k; // where none is given
} methods[SPECULATIVE_METHODS] = {{"ngram", 5}, {"suffix", 8}, {"draft_model", 5}};

static enum status parse_method(const char *text, size_t n, struct speculative_choice *choice)
{
    const size_t name = strcspn(text, ":,");
    for (int m = 0; m < SPECULATIVE_METHODS; m++) {
        if (name != strlen(methods[m].name) || strncmp(text, methods[m].name, name) != 0) continue;
        char *end = (char *)text + name;
        long k = methods[m].k;
        if (text[name] == ':') k = strtol(text + name + 1, &end, 10);
        const bool digits = text[name] != ':' || (text[name + 1] >= '0' && text[name + 1] <= '9');
        if (!digits || end != text + n || k < 1 || k > SPECULATIVE_MOST)
            return status_fail(ST_INVALID,
                               "speculative method \"%.40s\": K, the most tokens drafted at once, "
                               "must be 1 to %d",
                               text, SPECULATIVE_MOST);
        if (choice->k[m])
            return status_fail(ST_INVALID, "speculative method \"%s\" is named twice",
                               methods[m].name);
        choice->k[m] = (int)k;
        return ST_OK;
    }
    return status_fail(ST_INVALID,
                       "speculative method \"%.40s\" is none of off, ngram[:K], suffix[:K], "
                       "draft_model[:K]",
                       text);
}

enum status speculative_parse(const char *text, struct speculative_choice *ret)
{
    struct speculative_choice choice = {.chosen = true};
    for (const char *at = text; strcmp(text, "off") != 0;) {
        const size_t n = strcspn(at, ",");
        enum status st = parse_method(at, n, &choice);
        if (st != ST_OK) return st;
        if (!at[n]) break;
        at += n + 1;
    }
    *ret = choice;
    return ST_OK;
}

void speculative_write(struct speculative_choice choice, char ret[64])
{
    size_t n = 0;
    for (int m = 0; m < SPECULATIVE_METHODS; m++)
        if (choice.k[m])
            n += (size_t)snprintf(ret + n, 64 - n, "%s%s:%d", n ? "," : "", methods[m].name,
                                  choice.k[m]);
    if (n == 0) snprintf(ret, 64, "off");
}

int speculative_most(struct speculative_choice choice)
{
    int most = 0;
    for (int m = 0; m < SPECULATIVE_METHODS; m++)
        if (choice.k[m] > most) most = choice.k[m];
    return most;
}

// ---- life --------------------------------------------------------------------------------------

static void forget_acceptance(struct speculative *s, enum speculative_method method)
{
    const bool model = method == SPECULATIVE_DRAFT_MODEL;
    s->acceptance[method] = (struct average){model ? MODEL_GUESS : FIRST_GUESS, 1};
    for (int k = 0; k <= SUFFIX_DEPTH; k++) s->by_match[method][k] = s->acceptance[method];
    if (model) s->tests = TESTS;
}

enum status speculative_new(bool fixed, int max_rows, struct speculative **ret)
{
    struct speculative *s = calloc(1, sizeof *s);
    if (!s) return status_fail(ST_NO_MEMORY, "no memory for speculative decoding");
    enum status st = suffix_memory_new(MEMORY_BYTES, &s->memory);
    if (st != ST_OK) {
        speculative_free(s);
        return st;
    }
    s->fixed = fixed;
    s->max_rows = max_rows;
    s->model_unused = MODEL_UNUSED;
    s->prompt_level = 1;
    for (int m = 0; m < SPECULATIVE_METHODS; m++) forget_acceptance(s, (enum speculative_method)m);
    *ret = s;
    return ST_OK;
}

void speculative_free(struct speculative *s)
{
    if (!s) return;
    suffix_memory_free(s->memory);
    free(s);
}

// ---- drafters ----------------------------------------------------------------------------------

uint64_t speculative_prompt_key(const int32_t *prompt, int n)
{
    uint64_t h = HASH_FNV_START; // FNV-1a over whole tokens, with a shift to spread high bits
    for (int i = 0; i < n; i++) {
        h = (h ^ (uint32_t)prompt[i]) * HASH_FNV_PRIME;
        h ^= h >> 29;
    }
    return h;
}

static inline int32_t token_at(const struct history *h, int i)
{
    return i < h->n_prompt ? h->prompt[i] : h->generated[i - h->n_prompt];
}

// The latest of the longest matches; a match so late that fewer than `most` tokens follow goes on
// into the drafts themselves, as a repetition would.
static int draft_ngram(const struct history *h, int most, int32_t *ret_tokens, int *ret_matched)
{
    const int length = h->n_prompt + h->n_generated, last = length - 1;
    const int first = last > NGRAM_REACH ? last - NGRAM_REACH : 0;
    int best = 0, best_end = -1;
    for (int end = last - 1; end >= first && best < NGRAM_MOST; end--) {
        int n = 0;
        while (n < NGRAM_MOST && end - n >= first && token_at(h, end - n) == token_at(h, last - n))
            n++;
        if (n <= best) continue;
        best = n;
        best_end = end;
    }
    if (!best) return 0;
    *ret_matched = best;
    for (int i = 0; i < most; i++) {
        const int from = best_end + 1 + i;
        ret_tokens[i] = from < length ? token_at(h, from) : ret_tokens[from - length];
    }
    return most;
}

static double chance_of(const struct speculative *s, enum speculative_method method,
                        double acceptance, int matched)
{
    return (acceptance + s->by_match[method][matched].value) / 2;
}

// Drafts beyond this the plan would not look at; finding them takes time.
static int useful_length(const struct speculative *s, double chance, int most)
{
    double reached = chance;
    int n = 1;
    if (s->fixed) return most;
    while (n < most && (reached *= chance) >= LEAST_CHANCE) n++;
    return n;
}

static int draft_suffix(const struct speculative *s, const struct history *h, double acceptance,
                        int most, int32_t *ret_tokens, int *ret_matched)
{
    int32_t tail[SUFFIX_DEPTH + SPECULATIVE_MOST];
    const int length = h->n_prompt + h->n_generated;
    int n = length < SUFFIX_DEPTH ? length : SUFFIX_DEPTH, drafted = 0;
    for (int i = 0; i < n; i++) tail[i] = token_at(h, length - n + i);
    for (; drafted < most; drafted++) {
        const int known = n < SUFFIX_DEPTH ? n : SUFFIX_DEPTH;
        const int matched =
            suffix_memory_next(s->memory, h->prompt_key, tail + n - known, known, &tail[n]);
        if (matched == 0) break;
        if (drafted == 0) {
            *ret_matched = matched;
            const double chance = chance_of(s, SPECULATIVE_SUFFIX, acceptance, matched);
            most = useful_length(s, chance, most);
        }
        ret_tokens[drafted] = tail[n++];
    }
    return drafted > 0 ? drafted : draft_ngram(h, most, ret_tokens, ret_matched);
}

static bool may_lose(const struct speculative *s)
{
    return s->fixed || s->all >= 0;
}

// Until it is believed, for a few samples only: their past has to be computed.
static bool model_may_draft(const struct speculative *s)
{
    if (s->fixed) return true;
    return s->model >= 0 && s->owed_ms <= INVEST_SHARE * s->total_ms &&
           (s->tests == 0 || s->offered < TEST_SAMPLES);
}

static double expected_tokens(double chance, int n)
{
    double reached = 1, sum = 0;
    for (int i = 0; i < n; i++) sum += reached *= chance;
    return sum;
}

void speculative_propose(struct speculative *s, struct speculative_choice choice,
                         const struct history *history, int room, struct draft *draft)
{
    double best = 0;
    draft->n = draft->n_verify = 0;
    for (int m = 0; m < SPECULATIVE_METHODS; m++) {
        int32_t tokens[SPECULATIVE_MOST];
        const int most = choice.k[m] < room ? choice.k[m] : room;
        int n = most, matched = 0;
        if (most < 1 || (m == SPECULATIVE_DRAFT_MODEL && !model_may_draft(s))) continue;
        if (!draft->by[m].judged) draft->by[m].acceptance = s->acceptance[m].value;
        const double acceptance = draft->by[m].acceptance;
        if (m == SPECULATIVE_NGRAM)
            n = draft_ngram(history, most, tokens, &matched);
        else if (m == SPECULATIVE_SUFFIX)
            n = draft_suffix(s, history, acceptance, most, tokens, &matched);
        const double chance = chance_of(s, (enum speculative_method)m, acceptance, matched);
        const double expected = expected_tokens(chance, n);
        if (expected <= best) continue;
        best = expected;
        draft->method = (enum speculative_method)m;
        draft->n = n;
        draft->matched = matched;
        draft->chance = chance;
        if (m != SPECULATIVE_DRAFT_MODEL) memcpy(draft->tokens, tokens, (size_t)n * sizeof *tokens);
    }
    s->offered += draft->n > 0 && draft->method == SPECULATIVE_DRAFT_MODEL;
}

static void learn(struct speculative *s, const struct history *history)
{
    int32_t tail[SUFFIX_DEPTH];
    const int before = history->n_prompt + history->n_generated - 1;
    const int n = before < SUFFIX_DEPTH ? before : SUFFIX_DEPTH;
    for (int i = 0; i < n; i++) tail[i] = token_at(history, before - n + i);
    suffix_memory_add(s->memory, history->prompt_key, tail, n, token_at(history, before));
}

void speculative_learn(struct speculative *s, struct speculative_choice choice,
                       const struct history *history)
{
    if (!choice.k[SPECULATIVE_SUFFIX] || !may_lose(s)) return;
    if (s->n_learned++ % TIME_LEARNING > 0) {
        learn(s, history);
        return;
    }
    const int64_t start_ns = clock_now_ns();
    learn(s, history);
    s->learning_ms += TIME_LEARNING * clock_ms_since(start_ns);
}

// ---- how many ----------------------------------------------------------------------------------

bool speculative_wants_drafts(struct speculative *s)
{
    s->offered = 0;
    if (s->tests == 0 && s->untested >= MODEL_STALE) forget_acceptance(s, SPECULATIVE_DRAFT_MODEL);
    if (may_lose(s)) return true;
    s->model_unused++;
    s->untested++;
    return false;
}

struct tally { // what is in the plan so far
    int rows;
    int64_t attended;                  // by the rows of the drafts
    double tokens, pass_ms;            // expected beyond a plain step's; of the draft model
    int passes[SPECULATIVE_MOST];      // its rows at each depth
    int64_t reading[SPECULATIVE_MOST]; // and what these attend to
};

struct candidates { // a heap of the samples that have a draft left, by the chance of the next one
    int n;
    struct {
        double chance; // that this draft and those before it are accepted
        struct draft *draft;
    } at[MOST_DRAFTING];
};

static void sift_down(struct candidates *c, int i)
{
    for (int child; (child = 2 * i + 1) < c->n; i = child) {
        if (child + 1 < c->n && c->at[child + 1].chance > c->at[child].chance) child++;
        if (c->at[i].chance >= c->at[child].chance) return;
        const typeof(c->at[0]) moved = c->at[i];
        c->at[i] = c->at[child];
        c->at[child] = moved;
    }
}

// The next draft of the sample where it promises most; NULL where none is left that may be worth
// it.
static struct draft *take_best(struct candidates *c, double *ret_chance)
{
    if (c->n == 0 || c->at[0].chance < LEAST_CHANCE) return NULL;
    struct draft *draft = c->at[0].draft;
    *ret_chance = c->at[0].chance;
    c->at[0].chance *= draft->chance;
    if (++draft->n_verify == draft->n) c->at[0] = c->at[--c->n];
    sift_down(c, 0);
    return draft;
}

static void count(const struct speculative *s, const struct draft *draft, double chance,
                  struct tally *tally)
{
    const int depth = draft->n_verify - 1, context = draft->context + depth;
    if (draft->method == SPECULATIVE_DRAFT_MODEL) {
        int *rows = &tally->passes[depth];
        int64_t *reading = &tally->reading[depth];
        if (*rows > 0) tally->pass_ms -= step_cost_ms(&s->passes, *rows, *reading);
        const int more = depth == 0 && draft->behind == 1 ? 2 : 1;
        *rows += more;
        *reading += (int64_t)more * context;
        tally->pass_ms += step_cost_ms(&s->passes, *rows, *reading);
        if (depth == 0 && draft->behind > 1)
            tally->pass_ms += s->prompt_level * s->prompt_token_ms * draft->behind / INVEST_OVER;
    }
    tally->attended += context + 1;
    tally->tokens += chance;
    tally->rows++;
}

static void take_all(const struct speculative *s, struct draft *const *drafts, int n)
{
    for (int i = 0, rows = 0; i < n; rows += drafts[i++]->n_verify)
        drafts[i]->n_verify = drafts[i]->n < s->max_rows - rows ? drafts[i]->n : s->max_rows - rows;
}

static double trust(const struct speculative *s)
{
    const double came_true = (s->saved + TRUST_PRIOR) / (s->expected + TRUST_PRIOR);
    return came_true < 1 ? came_true : 1;
}

// How many rows a plan may verify, going by the sizes that were measured.
static int most_rows(const struct speculative *s, int n_seqs)
{
    const int reach = step_cost_reach(&s->cost);
    const int most = 2 * (reach > n_seqs ? reach : n_seqs) - n_seqs;
    return most < s->max_rows ? most : s->max_rows;
}

// The samples that the draft model is tested on, where the plan has left them out; false: none.
static bool test_model(const struct speculative *s, struct draft *const *drafts, int n)
{
    bool tested = false;
    for (int i = 0; i < n && s->tests > 0; i++) {
        if (drafts[i]->method != SPECULATIVE_DRAFT_MODEL) continue;
        if (drafts[i]->n_verify > 0) return false;
        drafts[i]->n_verify = drafts[i]->n;
        tested = true;
    }
    return tested;
}

// Of the plan's rows (0: none of n_rows pays), what is done: now and then something else, to
// measure it.
static int explore(int best_rows, int n_rows, int n_seqs)
{
    const int few = 1 + n_seqs / 4;
    if (best_rows > 0) return 0;
    return few < n_rows ? few : n_rows;
}

static void take_back(struct draft *const *order, int from, int to)
{
    for (int i = to - 1; i >= from; i--) order[i]->n_verify--;
}

static void plan_drafts(struct speculative *s, struct draft *const *drafts, int n, int n_seqs,
                        int64_t attended)
{
    struct draft *order[MOST_DRAFTING];
    double chances[MOST_DRAFTING];
    struct candidates candidates = {.n = n};
    struct tally tally = {0};
    s->exploring = false;
    // Each of more sequences than rows for drafts could gain next to nothing.
    if (n == 0 || n > s->max_rows || n > MOST_DRAFTING) return;
    const double plain_ms = step_cost_ms(&s->cost, n_seqs, attended), trusted = trust(s);
    if (plain_ms <= 0) return; // a plain step first
    for (int i = 0; i < n; i++) {
        candidates.at[i].chance = drafts[i]->chance;
        candidates.at[i].draft = drafts[i];
    }
    for (int i = n / 2 - 1; i >= 0; i--) sift_down(&candidates, i);
    const double plain_rate = n_seqs / plain_ms;
    double best = LEAST_GAIN * plain_rate, chance;
    int best_rows = 0;
    const int most = most_rows(s, n_seqs);
    while (tally.rows < most && tally.rows < MOST_DRAFTING) {
        struct draft *draft = take_best(&candidates, &chance);
        if (!draft) break;
        order[tally.rows] = draft;
        chances[tally.rows] = chance;
        count(s, draft, chance, &tally);
        const double ms = s->look_ms + tally.pass_ms +
                          step_cost_ms(&s->cost, n_seqs + tally.rows, attended + tally.attended);
        const double rate = (n_seqs + trusted * tally.tokens) / ms;
        if (rate <= best) continue;
        best = rate;
        best_rows = tally.rows;
    }
    s->gain = best / plain_rate;
    take_back(order, best_rows, tally.rows);
    int rows = best_rows;
    if (s->tries > 0 && best_rows + TEST_SAMPLES * SPECULATIVE_MOST <= s->max_rows)
        s->exploring = test_model(s, drafts, n);
    if (s->tries > 0 && !s->exploring) {
        rows = explore(best_rows, tally.rows, n_seqs);
        take_back(order, rows, best_rows);
        for (int i = best_rows; i < rows; i++) order[i]->n_verify++;
        s->exploring = rows != best_rows;
    }
    if (rows == 0 || s->exploring) return;
    s->expected *= TRUST_KEPT;
    s->saved *= TRUST_KEPT;
    for (int i = 0; i < rows; i++) s->expected += chances[i];
}

void speculative_plan(struct speculative *s, struct draft *const *drafts, int n, int n_seqs,
                      int64_t attended)
{
    if (s->fixed)
        take_all(s, drafts, n);
    else
        plan_drafts(s, drafts, n, n_seqs, attended);
    s->model_unused++;
    s->untested++;
    for (int i = 0; i < n; i++) {
        if (drafts[i]->n_verify == 0 || drafts[i]->method != SPECULATIVE_DRAFT_MODEL) continue;
        if (!s->exploring) s->model_unused = 0;
        s->untested = 0;
    }
}

// ---- what came of it ---------------------------------------------------------------------------

// The mean of the first measurements, then a moving one.
static void add_to(struct average *a, double measured)
{
    a->n++;
    const double weight = 1.0 / a->n > WEIGHT_ALL ? 1.0 / a->n : WEIGHT_ALL;
    a->value += weight * (measured - a->value);
    if (weight == WEIGHT_ALL) a->n--;
}

void speculative_judge(struct speculative *s, struct draft *draft, int n_verified, int n_accepted)
{
    const enum speculative_method method = draft->method;
    if (n_verified == 0 && method == SPECULATIVE_DRAFT_MODEL) return;
    // Drafts behind the first that was refused say nothing.
    const int trials = n_verified == 0 ? 1 : n_accepted < n_verified ? n_accepted + 1 : n_verified;
    double *own = &draft->by[method].acceptance;
    for (int i = 0; i < trials; i++) {
        const double hit = i < n_accepted ? 1 : 0;
        *own += WEIGHT_SAMPLE * (hit - *own);
        add_to(&s->acceptance[method], hit);
    }
    add_to(&s->by_match[method][draft->matched], n_accepted > 0 ? 1 : 0);
    if (method == SPECULATIVE_DRAFT_MODEL) s->tests = s->tests > trials ? s->tests - trials : 0;
    draft->by[method].judged = true;
}

// Against a plain step with the same sequences: what drafts cost, less the plain steps' time that
// the tokens beyond its own saved.
static double loss_of(const struct speculative *s, const struct step_report *r, double plain_ms)
{
    const double more_ms = step_cost_ms(&s->cost, r->n_rows, r->attended_by_all) - plain_ms;
    return r->look_ms + r->draft_ms + more_ms - plain_ms * r->n_saved / r->n_seqs;
}

// What was saved long ago is no leave to lose as much.
static void pay_in(double *account, double ms, double most)
{
    *account += ms;
    if (*account > most) *account = most;
}

static void settle_accounts(struct speculative *s, const struct step_report *r)
{
    const double plain_ms = step_cost_ms(&s->cost, r->n_seqs, r->attended);
    const double loss_ms = loss_of(s, r, plain_ms), most = LOSS_SHARE * s->total_ms;
    if (!s->exploring) {
        pay_in(&s->all, -loss_ms, most);
        if (r->draft_ms > 0) pay_in(&s->model, -loss_ms, most);
    } else if (r->n_rows == r->n_seqs) {
        s->tries -= (s->gain - 1) * plain_ms;
    } else if (loss_ms > 0) {
        s->tries -= loss_ms;
    }
}

static void earn(struct speculative *s, double ms)
{
    const double paid = s->owed_ms / INVEST_OVER;
    s->owed_ms -= paid;
    pay_in(&s->model, LOSS_SHARE * ms - paid, LOSS_SHARE * s->total_ms);
    pay_in(&s->all, LOSS_SHARE * ms - paid - s->learning_ms, LOSS_SHARE * s->total_ms);
    pay_in(&s->tries, TRY_SHARE * ms, TRY_SHARE * s->total_ms);
    s->learning_ms = 0;
}

void speculative_prompts_took(struct speculative *s, int n_tokens, double ms)
{
    const double measured = s->prompt_ms + s->prompt_token_ms * n_tokens;
    double off = measured > 0 && ms > 0 ? ms / (s->prompt_level * measured) - 1 : 0;
    if (off > PROMPT_OFF) off = PROMPT_OFF; // the first passes of all set things up
    s->prompt_level *= 1 + PROMPT_WEIGHT * off;
    s->owed_ms += s->prompt_level * measured;
}

void speculative_step_over(struct speculative *s, const struct step_report *r)
{
    const double ms = r->look_ms + r->draft_ms + r->catch_up_ms + r->step_ms;
    if (s->fixed || r->n_seqs == 0) return;
    if (r->settled && r->decodes)
        step_cost_learn(&s->cost, r->n_rows, r->attended_by_all, r->step_ms);
    if (s->total_ms == 0) { // as if plain steps like the first had always gone on
        s->total_ms = step_cost_ms(&s->cost, r->n_seqs, r->attended) / (1 - TIME_KEPT);
        if (s->total_ms == 0) return;
        s->all = s->model = LOSS_SHARE * s->total_ms;
        s->tries = TRY_SHARE * s->total_ms;
    }
    s->total_ms = TIME_KEPT * s->total_ms + ms;
    if (!s->exploring) s->saved += r->n_saved;
    if (r->n_caught_up > 0) speculative_prompts_took(s, r->n_caught_up, r->catch_up_ms);
    earn(s, ms);
    if (!r->looked) return;
    s->look_ms += LOOK_WEIGHT * (r->look_ms - s->look_ms);
    if (r->settled) settle_accounts(s, r);
}

bool speculative_model_pays(const struct speculative *s)
{
    return s->fixed || (model_may_draft(s) && s->model_unused < MODEL_UNUSED);
}

struct step_cost *speculative_step_cost(struct speculative *s)
{
    return &s->cost;
}
struct step_cost *speculative_pass_cost(struct speculative *s)
{
    return &s->passes;
}
void speculative_set_prompt_cost(struct speculative *s, double ms, double token_ms)
{
    s->prompt_ms = ms;
    s->prompt_token_ms = token_ms;
}
