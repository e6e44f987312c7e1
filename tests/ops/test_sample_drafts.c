/* test_sample_drafts.c: speculative decoding with a draft model keeps the target's distribution.
 * Many sequences are generated side by side as an engine would: K tokens are drafted one after the
 * other from a draft distribution, all are verified in one call of `sample` with a bonus row behind
 * them, and what follows the first refused draft is thrown away. The next token's logits depend on
 * the last token alone, so that the distribution at every position can be computed exactly; the
 * pairs (last token, token) at every position are held against it by a chi-square test, and the
 * accepted drafts against sum min(p, q). Seeds are fixed: the test passes always or never.
 *
 *   test_sample_drafts [--device cuda:N] */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/sampling.h"
#include "tests/support/op_table.h"

enum { VOCAB = 11, K = 3, LENGTH = K + 1, SEQUENCES = 35000, START = 0 };
// sequences of all settings together: above 10^6

// Normal deviate that a test may reach: one-sided p of 1e-6.
static const double limit = 4.75;

// Two first-order chains and a setting. Rows of logits are by last token.
struct chain {
    const char *name;
    struct sample_params params;
    int draft_vocab;
    float target[VOCAB][VOCAB], draft[VOCAB][VOCAB]; // draft: (VOCAB, draft_vocab) used
    double p[VOCAB][VOCAB], q[VOCAB][VOCAB], overlap[VOCAB];
};

struct counts {
    int64_t pair[LENGTH][VOCAB][VOCAB]; // by position, last token, token
    int64_t verified, accepted;
    double expected, variance; // of accepted, given what was verified
};

// Device memory of one step, and its mirror here.
struct buffers {
    float *logits, *draft_logits;
    struct sample_params *params;
    struct sample_draft *drafts;
    struct sample_result *results;
    float *host_logits, *host_draft_logits;
    struct sample_params *host_params;
    struct sample_draft *host_drafts;
    struct sample_result *host_results;
};

struct sequence {
    int32_t tokens[LENGTH + 1]; // tokens[0] is START; behind n, drafts
    int32_t n;                  // tokens there are, START among them
    int32_t n_drafts, first;    // of this round: drafts, and the row of the first of them
    uint64_t seed;
};

static void buffers_open(struct buffers *b)
{
    const size_t rows = (size_t)SEQUENCES * (K + 1);
    *b = (struct buffers){
        .logits = to_device(NULL, rows * VOCAB * sizeof(float)),
        .draft_logits = to_device(NULL, rows * VOCAB * sizeof(float)),
        .params = to_device(NULL, rows * sizeof(struct sample_params)),
        .drafts = to_device(NULL, rows * sizeof(struct sample_draft)),
        .results = to_device(NULL, rows * sizeof(struct sample_result)),
        .host_logits = op_host(rows * VOCAB * sizeof(float)),
        .host_draft_logits = op_host(rows * VOCAB * sizeof(float)),
        .host_params = op_host(rows * sizeof(struct sample_params)),
        .host_drafts = op_host(rows * sizeof(struct sample_draft)),
        .host_results = op_host(rows * sizeof(struct sample_result)),
    };
}

// Runs `sample` over what the host arrays hold, in calls of at most 30000 rows: CUDA takes 65535,
// drafts' rows among them.
static void run_sample(struct buffers *b, int n, int vocab, bool verify, int n_drafts,
                       int draft_vocab)
{
    device_copy_in(dev, b->logits, b->host_logits, (size_t)n * vocab * sizeof(float));
    device_copy_in(dev, b->params, b->host_params, (size_t)n * sizeof *b->params);
    if (verify) {
        device_copy_in(dev, b->drafts, b->host_drafts, (size_t)n * sizeof *b->drafts);
        device_copy_in(dev, b->draft_logits, b->host_draft_logits,
                       (size_t)n_drafts * draft_vocab * sizeof(float));
    }
    for (int at = 0; at < n; at += 30000) {
        int part = n - at < 30000 ? n - at : 30000;
        const struct sample_args args = {.logits = b->logits + (size_t)at * vocab,
                                         .params = b->params + at,
                                         .n = part,
                                         .vocab = vocab,
                                         .drafts = verify ? b->drafts + at : NULL,
                                         .draft_logits = verify ? b->draft_logits : NULL,
                                         .draft_vocab = verify ? draft_vocab : 0};
        device_ops(dev)->sample(dev, b->results + at, &args);
    }
    device_copy_out(dev, b->host_results, b->results, (size_t)n * sizeof *b->results);
    assert_ok(device_sync(dev));
}

static struct sample_params params_of(const struct chain *c, const struct sequence *s, int position,
                                      bool draft)
{
    struct sample_params p = c->params;
    p.seed = draft ? ~s->seed : s->seed;
    p.position = (uint64_t)position;
    return p;
}

// Row of the k-th draft of a sequence, or of its bonus, among the rows to be verified.
static int row_of(const struct sequence *s, int i, int k)
{
    return s[i].first + i + k;
}

// Up to K drafts behind every sequence, none that could not be used; their rows stay in
// host_draft_logits, sequence by sequence. Returns how many.
static int draft(struct buffers *b, const struct chain *c, struct sequence *s, int n)
{
    const int width = c->draft_vocab;
    int total = 0;
    for (int i = 0; i < n; i++) {
        s[i].n_drafts = LENGTH - s[i].n < K ? LENGTH - s[i].n : K;
        s[i].first = total;
        total += s[i].n_drafts;
    }
    for (int k = 0; k < K; k++) {
        int rows = 0;
        for (int i = 0; i < n; i++) {
            if (k >= s[i].n_drafts) continue;
            const float *row = c->draft[s[i].tokens[s[i].n + k - 1]];
            memcpy(b->host_logits + (size_t)rows * width, row, (size_t)width * sizeof *row);
            memcpy(b->host_draft_logits + (size_t)(s[i].first + k) * width, row,
                   (size_t)width * sizeof *row);
            b->host_params[rows++] = params_of(c, &s[i], s[i].n + k, true);
        }
        if (rows) run_sample(b, rows, width, false, 0, 0);
        rows = 0;
        for (int i = 0; i < n; i++)
            if (k < s[i].n_drafts) s[i].tokens[s[i].n + k] = b->host_results[rows++].token;
    }
    return total;
}

// Judges the drafts of every sequence and adds what comes of them.
static void verify(struct buffers *b, const struct chain *c, struct sequence *s, int n,
                   int n_drafts, struct counts *counts)
{
    for (int i = 0; i < n; i++)
        for (int k = 0; k <= s[i].n_drafts; k++) {
            int row = row_of(s, i, k);
            memcpy(b->host_logits + (size_t)row * VOCAB, c->target[s[i].tokens[s[i].n + k - 1]],
                   sizeof c->target[0]);
            b->host_params[row] = params_of(c, &s[i], s[i].n + k, false);
            b->host_drafts[row] =
                k < s[i].n_drafts ? (struct sample_draft){s[i].tokens[s[i].n + k], s[i].first + k}
                                  : (struct sample_draft){-1, 0};
        }
    run_sample(b, n_drafts + n, VOCAB, true, n_drafts, c->draft_vocab);
    for (int i = 0; i < n; i++)
        for (int k = 0; k <= s[i].n_drafts; k++) {
            bool bonus = k == s[i].n_drafts;
            int32_t last = s[i].tokens[s[i].n - 1], drafted = bonus ? -1 : s[i].tokens[s[i].n];
            int32_t token = b->host_results[row_of(s, i, k)].token;
            assert_in_range(token, 0, VOCAB - 1);
            counts->pair[s[i].n - 1][last][token]++;
            s[i].tokens[s[i].n++] = token;
            if (bonus) break;
            counts->verified++;
            counts->accepted += token == drafted;
            counts->expected += c->overlap[last];
            counts->variance += c->overlap[last] * (1 - c->overlap[last]);
            if (token != drafted) break;
        }
}

// Deviate of a chi-square value as a normal one (Wilson and Hilferty 1931).
static double chi_deviate(double chi, int cells)
{
    double spread = 2.0 / (9.0 * cells);
    return (cbrt(chi / cells) - (1 - spread)) / sqrt(spread);
}

// Largest deviate over the positions of the pairs' counts from the chain's exact distribution.
static double worst_deviate(const struct chain *c, const struct counts *counts)
{
    double marginal[VOCAB] = {0}, worst = -INFINITY;
    marginal[START] = 1;
    for (int position = 0; position < LENGTH; position++) {
        double next[VOCAB] = {0}, chi = 0, rare = 0;
        int64_t rare_count = 0;
        int cells = -1; // one is lost to the known total
        for (int a = 0; a < VOCAB; a++)
            for (int t = 0; t < VOCAB; t++) {
                double expected = SEQUENCES * marginal[a] * c->p[a][t];
                int64_t count = counts->pair[position][a][t];
                next[t] += marginal[a] * c->p[a][t];
                if (expected == 0 && count > 0)
                    fail_msg("%s: token %d after %d, which is cut, was given out", c->name, t, a);
                if (expected >= 10) {
                    chi += (count - expected) * (count - expected) / expected;
                    cells++;
                } else {
                    rare += expected;
                    rare_count += count;
                }
            }
        if (rare >= 10) {
            chi += (rare_count - rare) * (rare_count - rare) / rare;
            cells++;
        }
        if (position > 0) assert_true(cells > 1);
        if (cells > 0) worst = fmax(worst, chi_deviate(chi, cells)); // 0: the cut leaves one token
        memcpy(marginal, next, sizeof marginal);
    }
    return worst;
}

static void run_chain(struct buffers *b, struct chain *c, uint64_t seed, struct counts *counts,
                      double *ret_chi, double *ret_rate)
{
    struct sequence *s = op_host(SEQUENCES * sizeof *s);
    struct rng rng;
    rng_init(&rng, seed, 1);
    for (int a = 0; a < VOCAB; a++) {
        distribution_formula(c->target[a], VOCAB, &c->params, c->p[a]);
        distribution_formula(c->draft[a], c->draft_vocab, &c->params, c->q[a]);
        for (int t = 0; t < c->draft_vocab; t++) c->overlap[a] += fmin(c->p[a][t], c->q[a][t]);
    }
    for (int i = 0; i < SEQUENCES; i++)
        s[i] = (struct sequence){.tokens = {START}, .n = 1, .seed = rng_u64(&rng)};
    for (int n = SEQUENCES; n > 0;) {
        int n_drafts = draft(b, c, s, n);
        verify(b, c, s, n, n_drafts, counts);
        int left = 0;
        for (int i = 0; i < n; i++)
            if (s[i].n <= LENGTH) s[left++] = s[i];
        n = left;
    }
    *ret_chi = worst_deviate(c, counts);
    *ret_rate = (counts->accepted - counts->expected) / sqrt(counts->variance);
}

static const struct {
    const char *name;
    float top_p, min_p;
    int top_k;
} cuts[] = {{"no cut", 1, 0, 0},
            {"top-k 4", 1, 0, 4},
            {"top-p 0.8", 0.8f, 0, 0},
            {"min-p 0.1", 1, 0.1f, 0},
            {"all cuts", 0.8f, 0.1f, 4}};
enum { N_CUTS = sizeof cuts / sizeof cuts[0] };

ON_EACH_DEVICE(chains)
{
    static const float temperatures[] = {0.7f, 1, 1.5f};
    static const int draft_vocabs[] = {VOCAB, VOCAB - 2};
    struct buffers b;
    struct rng rng;
    int64_t total = 0;
    int failed = 0;
    buffers_open(&b);
    rng_init(&rng, 2024, 0);
    for (int v = 0; v < 2; v++)
        for (int temperature = 0; temperature < 3; temperature++)
            for (int cut = 0; cut < N_CUTS; cut++) {
                char name[64];
                struct chain c = {.name = name,
                                  .params = {.temperature = temperatures[temperature],
                                             .top_p = cuts[cut].top_p,
                                             .min_p = cuts[cut].min_p,
                                             .top_k = cuts[cut].top_k},
                                  .draft_vocab = draft_vocabs[v]};
                struct counts counts = {.verified = 0};
                double chi, rate;
                for (int a = 0; a < VOCAB; a++)
                    for (int t = 0; t < VOCAB; t++) {
                        c.target[a][t] = 1.2f * rng_normal(&rng);
                        c.draft[a][t] = 0.8f * c.target[a][t] + 0.7f * rng_normal(&rng);
                    }
                c.target[START][5] = -INFINITY; // forbidden, which the draft does not know
                snprintf(name, sizeof name, "t %.1f, %s, draft of %d",
                         (double)temperatures[temperature], cuts[cut].name, c.draft_vocab);
                run_chain(&b, &c, 1000 + (uint64_t)total, &counts, &chi, &rate);
                bool good = chi < limit && fabs(rate) < limit;
                printf("%-32s accepted %.4f of %lld; deviates: tokens %+.2f, acceptance %+.2f%s\n",
                       name, (double)counts.accepted / (double)counts.verified,
                       (long long)counts.verified, chi, rate, good ? "" : "  FAIL");
                failed += !good;
                total += SEQUENCES;
            }
    assert_true(total >= 1000000);
    if (failed) fail_msg("%d of the settings above are not the target's distribution", failed);
}

OP_BODIES
