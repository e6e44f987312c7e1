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
 * What verifying steps took is also held against the plain steps that would have brought as many
 * tokens, the draft model's prompts included: where they took longer all the same, more gain is
 * asked for.
 *
 * Costs are believed until they are measured again. So sizes grow from small ones, at most by
 * doubling; one in PLAIN_EVERY steps that would verify is plain, and one verifies twice as many;
 * and one refused plan in PROBE_EVERY verifies a few all the same.
 *
 * Where nothing pays, looking for drafts must not cost either: plans refused one after another are
 * followed by more and more steps that propose nothing, up to MOST_IDLE. */
#include "infer-server/speculative.h"
#include "infer-server/step_cost.h"
#include "infer-server/suffix_memory.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MEMORY_BYTES  ((size_t)64 << 20)
#define NGRAM_MOST    4
#define NGRAM_REACH   8192 // tokens looked back
#define FIRST_GUESS   0.5  // acceptance before anything was measured
#define WEIGHT_SAMPLE 0.1  // of a new measurement in a sample's average
#define WEIGHT_ALL    0.01 // in that of its method, where new samples start, and of a match
#define LEAST_CHANCE  0.05 // a draft less likely than this is not worth its row
#define PROBE_EVERY   16
#define PLAIN_EVERY   32 // twice that where verifying gains more than MUCH
#define MUCH          1.5
#define MOST_IDLE     15
#define MODEL_UNUSED  64
#define LEAST_GAIN    1.05 // expected, of verifying over a plain step: costs are only estimates
#define MOST_DRAFTING 512  // samples of one plan
#define TRUST_KEPT    0.98 // of the sums below, at each step that verifies
#define TRUST_PRIOR   4.0  // tokens
#define TAKEN_KEPT    0.98 // of the times below, likewise
#define TAKEN_PRIOR   8.0  // plain steps

struct average {
    double value;
    int n; // of measurements, FIRST_GUESS being one
};

struct speculative {
    bool fixed;
    int max_rows;
    struct suffix_memory *memory;
    struct step_cost cost, passes;                  // of steps; of the draft model's passes
    struct average acceptance[SPECULATIVE_METHODS]; // by method
    struct average by_match[SPECULATIVE_METHODS][SUFFIX_DEPTH + 1];
    int refused;               // plans whose drafts would not pay
    int in_a_row;              // of these, since the last that did
    int idle;                  // steps yet to come that propose nothing
    int verified;              // plans that did
    int model_unused;          // steps since the draft model was in one
    bool exploring;            // the last plan was not what promised most
    double taken_ms, plain_ms; // of verifying steps of late, and of plain ones for as many tokens
    double expected, accepted; // tokens that verified drafts were to bring and brought, of late
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
    for (int i = 0; i < SPECULATIVE_METHODS; i++) {
        s->acceptance[i] = (struct average){FIRST_GUESS, 1};
        for (int k = 0; k <= SUFFIX_DEPTH; k++) s->by_match[i][k] = s->acceptance[i];
    }
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
    uint64_t h = 0xcbf29ce484222325u; // FNV-1a over whole tokens, with a shift to spread high bits
    for (int i = 0; i < n; i++) {
        h = (h ^ (uint32_t)prompt[i]) * 0x100000001b3u;
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
        if (most < 1) continue;
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
}

void speculative_learn(struct speculative *s, struct speculative_choice choice,
                       const struct history *history)
{
    if (!choice.k[SPECULATIVE_SUFFIX]) return;
    int32_t tail[SUFFIX_DEPTH];
    const int before = history->n_prompt + history->n_generated - 1;
    const int n = before < SUFFIX_DEPTH ? before : SUFFIX_DEPTH;
    for (int i = 0; i < n; i++) tail[i] = token_at(history, before - n + i);
    suffix_memory_add(s->memory, history->prompt_key, tail, n, token_at(history, before));
}

// ---- how many ----------------------------------------------------------------------------------

bool speculative_wants_drafts(struct speculative *s)
{
    if (s->idle == 0) return true;
    s->idle--;
    s->model_unused++;
    return false;
}

struct tally { // what is in the plan so far
    int rows;
    double tokens, pass_ms;       // expected beyond a plain step's; of the draft model
    int passes[SPECULATIVE_MOST]; // its rows at each depth
};

static double pass_ms(const struct speculative *s, int rows)
{
    return rows > 0 ? step_cost_plain_ms(&s->passes, rows) : 0;
}

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
    if (draft->method == SPECULATIVE_DRAFT_MODEL) {
        int *rows = &tally->passes[draft->n_verify - 1];
        tally->pass_ms += pass_ms(s, *rows + 1) - pass_ms(s, *rows);
        ++*rows;
    }
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
    return (s->accepted + TRUST_PRIOR) / (s->expected + TRUST_PRIOR);
}

// The gain over a plain step that is asked for, of a step of plain_ms.
static double least_gain(const struct speculative *s, double plain_ms)
{
    const double prior = TAKEN_PRIOR * plain_ms;
    const double over = (s->taken_ms + prior) / (s->plain_ms + prior);
    return over > 1 ? LEAST_GAIN * over : LEAST_GAIN;
}

void speculative_step_brought(struct speculative *s, int n_seqs, int n_tokens, double ms)
{
    if (s->exploring) return;
    s->taken_ms = TAKEN_KEPT * s->taken_ms + ms;
    s->plain_ms =
        TAKEN_KEPT * s->plain_ms + step_cost_plain_ms(&s->cost, n_seqs) * n_tokens / n_seqs;
}

void speculative_prompts_took(struct speculative *s, double ms)
{
    s->taken_ms += ms;
}

// How many rows a plan may verify, going by those that were measured.
static int most_rows(const struct speculative *s, int n_seqs)
{
    const int reached = step_cost_reach(&s->cost) - n_seqs;
    const int least = n_seqs > 8 ? n_seqs / 4 : 2, most = reached > least ? 2 * reached : 2 * least;
    return most < s->max_rows ? most : s->max_rows;
}

// Of best_rows, which gain so much (0: none of n_rows pays), what is done: now and then something
// else, to measure it.
static int explore(struct speculative *s, int best_rows, double gain, int n_rows, int n_seqs)
{
    if (n_rows == 0) return 0;
    if (best_rows > 0) {
        const int every = gain > MUCH ? 2 * PLAIN_EVERY : PLAIN_EVERY, turn = ++s->verified % every;
        s->in_a_row = 0;
        if (turn == every / 2 && best_rows < n_rows)
            return 2 * best_rows < n_rows ? 2 * best_rows : n_rows;
        return turn > 0 ? best_rows : 0;
    }
    s->in_a_row++;
    s->taken_ms *= TAKEN_KEPT; // what was dear once is forgotten, or would keep drafts out for ever
    s->plain_ms *= TAKEN_KEPT;
    s->idle = s->in_a_row / 4 < MOST_IDLE ? s->in_a_row / 4 : MOST_IDLE;
    if (++s->refused % PROBE_EVERY > 0) return 0;
    const int few = 1 + n_seqs / 4;
    return few < n_rows ? few : n_rows;
}

static void plan_drafts(struct speculative *s, struct draft *const *drafts, int n, int n_seqs)
{
    // Each of more sequences than rows for drafts could gain next to nothing.
    struct draft *order[MOST_DRAFTING];
    double chances[MOST_DRAFTING];
    struct candidates candidates = {.n = n};
    struct tally tally = {0};
    if (n == 0 || n > s->max_rows || n > MOST_DRAFTING) return;
    const double plain_ms = step_cost_plain_ms(&s->cost, n_seqs), trusted = trust(s);
    if (plain_ms <= 0) return; // a plain step first
    for (int i = 0; i < n; i++) {
        candidates.at[i].chance = drafts[i]->chance;
        candidates.at[i].draft = drafts[i];
    }
    for (int i = n / 2 - 1; i >= 0; i--) sift_down(&candidates, i);
    const double plain_rate = n_seqs / plain_ms;
    double best = least_gain(s, plain_ms) * plain_rate, chance;
    int best_rows = 0;
    const int most = most_rows(s, n_seqs);
    while (tally.rows < most && tally.rows < MOST_DRAFTING) {
        struct draft *draft = take_best(&candidates, &chance);
        if (!draft) break;
        order[tally.rows] = draft;
        chances[tally.rows] = chance;
        count(s, draft, chance, &tally);
        const double ms =
            step_cost_verify_ms(&s->cost, n_seqs, n_seqs + tally.rows) + tally.pass_ms;
        const double rate = (n_seqs + trusted * tally.tokens) / ms;
        if (rate <= best) continue;
        best = rate;
        best_rows = tally.rows;
    }
    const int rows = explore(s, best_rows, best / plain_rate, tally.rows, n_seqs);
    s->exploring = rows != best_rows;
    best_rows = rows;
    for (int i = tally.rows - 1; i >= best_rows; i--) order[i]->n_verify--;
    if (best_rows == 0) return;
    s->expected *= TRUST_KEPT;
    s->accepted *= TRUST_KEPT;
    for (int i = 0; i < best_rows; i++) s->expected += chances[i];
}

void speculative_plan(struct speculative *s, struct draft *const *drafts, int n, int n_seqs)
{
    if (s->fixed)
        take_all(s, drafts, n);
    else
        plan_drafts(s, drafts, n, n_seqs);
    s->model_unused++;
    for (int i = 0; i < n; i++)
        if (drafts[i]->n_verify > 0 && drafts[i]->method == SPECULATIVE_DRAFT_MODEL)
            s->model_unused = 0;
}

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
    if (n_verified > 0) s->accepted += n_accepted;
    // Drafts behind the first that was refused say nothing.
    const int trials = n_verified == 0 ? 1 : n_accepted < n_verified ? n_accepted + 1 : n_verified;
    double *own = &draft->by[method].acceptance;
    for (int i = 0; i < trials; i++) {
        const double hit = i < n_accepted ? 1 : 0;
        *own += WEIGHT_SAMPLE * (hit - *own);
        add_to(&s->acceptance[method], hit);
    }
    add_to(&s->by_match[method][draft->matched], n_accepted > 0 ? 1 : 0);
    draft->by[method].judged = true;
}

void speculative_step_took(struct speculative *s, int n_rows, bool verified, double ms)
{
    step_cost_learn(&s->cost, n_rows, verified, ms);
}

void speculative_pass_took(struct speculative *s, int n_rows, double ms)
{
    step_cost_learn(&s->passes, n_rows, false, ms);
}

bool speculative_model_pays(const struct speculative *s)
{
    return s->fixed || s->model_unused < MODEL_UNUSED;
}
